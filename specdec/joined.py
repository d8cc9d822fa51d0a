"""Finished runs side by side in one report, where they can stand there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.errors import CompatibilityError, DataError, RecipeError
from specdec.figures import sheets
from specdec.report import markdown
from specdec.results import SCHEMA_VERSION
from specdec.rundir import CONFIG, RESULTS

_WANTED = {"recipe", "sampling", "greedy", "seed", "target", "data", "rows_at_once", "environment", "formulas", "rows"}
_OF_A_ROW = {"label", "options", "exactness", "baseline", "reference", "counters", "seconds", "fidelity", "agreement"}
# Whatever else an environment says changes speeds and nothing else.
_NOT_OF_THE_MACHINE = ("prompts", "target.weights")


def read_runs(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The results of finished runs, by the shortest names that tell them apart.

    Raises:
        RecipeError: a folder is given twice.
        DataError: one holds no finished run, or results that this version does not read.
    """
    if again := [str(path) for path, count in Counter(path.resolve() for path in folders).items() if count > 1]:
        raise RecipeError(f"{again[0]}: is given twice, wanted each run once; leave one out")
    short = [path.resolve().name for path in folders]
    names = short if len(set(short)) == len(short) else [str(path) for path in folders]
    return {name: _read(path) for name, path in zip(names, folders, strict=True)}


def join(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What `results.json` holds, of several runs. Rows of the same label get their run's name before it.

    Raises:
        CompatibilityError: the runs did not do the same task; says which ones, and what differs.
    """
    first, *others = runs
    if problems := [problem for other in others if (problem := _apart(first, runs[first], other, runs[other]))]:
        raise CompatibilityError(problems)
    labels = Counter(row["label"] for results in runs.values() for row in results["rows"])
    rows, drawn = [], []
    for run, results in runs.items():
        called = {
            row["label"]: f"{run}: {row['label']}" if labels[row["label"]] > 1 else row["label"]
            for row in results["rows"]
        }
        rows += [
            {**row, "run": run, "label": called[row["label"]], "reference": called.get(row["reference"])}
            for row in results["rows"]
        ]
        drawn += [
            {
                **one,
                "trace": called[one["trace"]],
                "runs": [{**ran, "label": called[ran["label"]]} for ran in one["runs"]],
            }
            for one in results.get("frontiers", ())
        ]
    about = runs[first]
    kept = ("run", "recipe", "data", "rows_at_once", "environment")
    return {
        **{name: about[name] for name in ("schema_version", "formulas", "sampling", "greedy", "seed", "environment")},
        "recipe": " and ".join(runs),
        "target": _either([results["target"] for results in runs.values()]),
        "data": {
            name: _either([results["data"][name] for results in runs.values()])
            for name in ("file", "prompts", "repeats")
        },
        "rows_at_once": _either([results["rows_at_once"] for results in runs.values()]),
        "runs": [{name: {**results, "run": run}[name] for name in kept} for run, results in runs.items()],
        "notes": [
            *_speeds(runs),
            *(f"{run}: {note}" for run, results in runs.items() for note in results.get("notes", ())),
        ],
        "rows": rows,
        "frontiers": drawn,
    }


def _read(folder: Path) -> dict[str, Any]:
    file = folder / RESULTS
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if (folder / CONFIG).is_file():
            raise DataError(f"{folder}: holds an unfinished run; the `specdec run` that began it goes on") from error
        raise DataError(f"{folder}: holds no run, wanted a folder with {RESULTS}; try another one") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}; try another folder") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: is not JSON: {error}; run it again with --overwrite") from error
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != SCHEMA_VERSION:
        raise DataError(f"{file}: got schema_version {version!r}, wanted {SCHEMA_VERSION}; run it again")
    rows = found.get("rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{file}: got rows {str(rows)[:40]!r}, wanted a list of mappings; run it again")
    missing = sorted(_WANTED - found.keys()) + sorted(_OF_A_ROW - set.intersection(*map(set, rows)))
    if missing:
        raise DataError(f"{file}: has no {missing[0]!r}, which this version of specdec writes; run it again")
    try:  # whatever else is not as it was written would fail while the report is made
        _ = markdown(found), sheets(found)
        _ = found["environment"]["prompts"], found["environment"]["target"]["weights"]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: is not as a run writes it: {type(error).__name__}: {error}; run it again") from error
    return dict(found)


def _apart(name: str, one: Mapping[str, Any], other_name: str, other: Mapping[str, Any]) -> str | None:
    """Why the second run cannot stand beside the first, in one sentence."""
    reasons = []
    if one["environment"]["prompts"] != other["environment"]["prompts"]:
        reasons.append("other prompts")
    if sampling := _differing(one["sampling"], other["sampling"]):
        reasons.append(f"other sampling ({', '.join(sampling)})")
    if one["seed"] != other["seed"]:
        reasons.append(f"another seed ({other['seed']}, not {one['seed']})")
    if one["environment"]["target"]["weights"] != other["environment"]["target"]["weights"]:
        reasons.append(f"another target ({other['target']}, whose weights are not those of {one['target']})")
    if not reasons:
        return None
    return f"{other_name}: has {' and '.join(reasons)} than {name}; wanted runs that differ in drafters and rules alone"


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} {other.get(key)!r}, not {one.get(key)!r}"
        for key in dict.fromkeys((*one, *other))
        if one.get(key) != other.get(key)
    ]


def _speeds(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence where speeds of these runs cannot be compared."""
    about = [{**_flat(run["environment"]), "prompts at once": run["rows_at_once"]} for run in runs.values()]
    keys = dict.fromkeys(key for facts in about for key in facts if key not in _NOT_OF_THE_MACHINE)
    if not (different := [key for key in keys if any(facts.get(key) != about[0].get(key) for facts in about)]):
        return []
    return [
        f"Speeds are not comparable between these runs, which differ in {', '.join(different)}; a speedup is against "
        "the autoregressive row of its own run."
    ]


def _flat(data: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return found


def _either(values: Sequence[Any]) -> Any:
    """The value that all have, or all of them in words."""
    different = list(dict.fromkeys(values))
    return different[0] if len(different) == 1 else " or ".join(map(str, different))
