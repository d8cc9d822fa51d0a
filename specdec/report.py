"""Results as people read them: one table, what its columns mean, and what the run depended on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec.figures import OF_A_GROUP, group_names
from specdec.numerals import NONE, one, percent, three, times, two

NOT_MEASURED = "not measured"
SPEED = ("acceptance length", "gain", "accepted", "tokens/s", "speedup")
FIDELITY = ("R", "E", "deviation", "rejected, in nucleus", "rejected, in top 10", "same ids as standard")
# What a speed-up is called, from the least that deserves the name.
_PACES = (("faster", 1.05), ("about as fast", 0.95), ("slower", 0.0))
_MEANINGS = (
    ("acceptance length", "acceptance_length"),
    ("gain", "acceptance_length_gain"),
    ("accepted", "acceptance_rate"),
    ("tokens/s", "tokens_per_second"),
    ("speedup", "speedup"),
    ("R", "rejection"),
    ("E", "nucleus_excess"),
    ("deviation", "deviation"),
    ("rejected, in nucleus", "rejected_in_nucleus"),
    ("rejected, in top 10", "rejected_in_top_10"),
    ("same ids as standard", "agreement"),
)


_PRICES = (
    ("excess", "excess"),
    ("deviation per request", "deviation_per_request"),
    ("bound", "sequence_bound"),
    ("relaxed", "relaxed"),
    ("draft entropy there", "relaxed_draft_entropy"),
    ("target entropy there", "relaxed_target_entropy"),
)


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """One row of results as text, by column; every column is there."""
    drafts = row["counters"]["num_draft_tokens"] > 0
    return {
        "run": row["label"] + (" *" if row["point_mass"] else "") + _failures(row),
        "exactness": row["exactness"].replace("_", " "),
        "acceptance length": _interval(row["acceptance_length"], two),
        "gain": NONE if (gain := row["acceptance_length_gain"]) is None else _interval(gain, two),
        "accepted": percent(row["acceptance_rate"]),
        "tokens/s": one(row["tokens_per_second"]),
        "speedup": times(row["speedup"]),
        **_fidelity(row, drafts=drafts),
        "same ids as standard": _agreement(row["agreement"]),
        **{name: _score(score) for name, score in row["scores"].items()},
    }


def markdown(results: Mapping[str, Any]) -> str:
    """The report of a run: a pure function of what `results.json` holds."""
    rows = [cells(row) for row in results["rows"]]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    rows = [{column: row.get(column, NONE) for column in columns} for row in rows]
    scores = dict.fromkeys(name for row in results["rows"] for name in row["scores"])
    data = results["data"]
    lines = [
        f"# {results['recipe']}",
        "",
        f"Target {results['target']}, {data['prompts']} prompts x {data['repeats']} repeats, "
        f"{results['rows_at_once']} at once, {sampled(results)}.",
        "",
        _table(columns, rows),
        "",
        *in_words(results),
        *_price(results["rows"]),
        *_groups(results["rows"]),
        *_positions(results["rows"]),
        *(line for text in notes(results) for line in (text, "")),
        "## How to read it",
        "",
        *[f"- **{column}**: {results['formulas'][name]}." for column, name in (*_MEANINGS, *_PRICES)],
        f"- **by position**: {results['formulas']['acceptance_by_position']}.",
        *([f"- **{', '.join(scores)}**: {results['formulas']['scores']}."] if scores else []),
        f"- In brackets: {results['formulas']['interval']}.",
        "- **exactness**: `lossless` keeps the target's law; `own target` keeps another law that the rule states; "
        "`lossy` promises neither, and its speed means little without the columns to the right of it.",
        "",
        "A place is a draft position that the rule looked at; p is the target's law there after temperature and "
        "filters, q the law the draft token was drawn from. Places are those of the row's own run, so R and E differ "
        "between rows.",
        "",
        "## Also measured",
        "",
        *_details(results),
        "",
        *machines(results),
    ]
    return "\n".join(lines) + "\n"


def _price(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each rule that is not lossless did beyond the standard one, as a section; nothing where none ran."""
    lines = []
    for row in rows:
        found = row["fidelity"]
        if row["exactness"] == "lossless" or found is None or not found["places"]:
            continue
        kinds = {"relaxed": percent, "relaxed_draft_entropy": two, "relaxed_target_entropy": two}
        texts = {"run": row["label"], "exactness": row["exactness"].replace("_", " ")}
        for column, name in _PRICES:
            if name == "sequence_bound":
                texts[column] = no_law(row) if found[name] is None else three(found[name])
            else:
                unknown = name in ("excess", "deviation_per_request") and found[name]["value"] is None
                texts[column] = no_law(row) if unknown else _interval(found[name], kinds.get(name, three))
        lines.append(texts)
    if not lines:
        return []
    return ["## Beyond the standard rule", "", _table(list(lines[0]), lines), ""]


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Acceptance and deviation of each kind of prompt, as a section; nothing where there are no kinds."""
    names = group_names(rows)
    lines = []
    for row in rows:
        if not names or not row["counters"]["num_draft_tokens"]:
            continue
        texts = {"run": row["label"], "exactness": row["exactness"].replace("_", " ")}
        for name in names:
            group = (row.get("groups") or {}).get(name, {})  # none in a comparison with other prompts
            texts |= {f"{name}: {column}": _of_a_group(row, group, key) for key, column in OF_A_GROUP.items()}
        lines.append(texts)
    return ["## By kind of prompt", "", _table(list(lines[0]), lines), ""] if lines else []


def _of_a_group(row: Mapping[str, Any], group: Mapping[str, Any], key: str) -> str:
    measured = group.get(key)
    if measured is None or measured["value"] is None:
        return missing(row, group, key)
    return _interval(measured, three if key == "deviation" else two)


def missing(row: Mapping[str, Any], group: Mapping[str, Any], key: str) -> str:
    """What stands for a number that a group of prompts has not; the group is empty where none of them ran."""
    if key != "deviation" or not group:
        return NONE
    if group.get(key) is None or row["fidelity"] is None:
        return NOT_MEASURED
    # Of a rule that has a law, nothing was examined there.
    return no_law(row) if row["fidelity"]["deviation"]["value"] is None else NONE


def _positions(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Acceptance by draft position as a section."""
    rows = [row for row in rows if row["acceptance_by_position"]]
    if not rows:
        return []
    most = max(len(row["acceptance_by_position"]) for row in rows)
    lines = []
    for row in rows:
        texts = {"run": row["label"], "exactness": row["exactness"].replace("_", " ")}
        for place in range(most):
            here = row["acceptance_by_position"][place : place + 1]
            texts[str(place + 1)] = (
                f"{percent(here[0]['conditional'])} / {percent(here[0]['unconditional'])}" if here else NONE
            )
        lines.append(texts)
    heading = "Of the draft tokens at each position: kept of those examined / kept of all drafts that reach there."
    return ["## Acceptance by position", "", heading, "", _table(list(lines[0]), lines), ""]


def in_words(results: Mapping[str, Any]) -> list[str]:
    """What the speed-ups say, as lines of a list; nothing where there is no baseline."""
    kinds: dict[str, list[str]] = {name: [] for name, _ in _PACES}
    for row in sorted(results["rows"], key=lambda row: -(row["speedup"] or 0.0)):
        if row["speedup"] is not None and not row["baseline"]:
            kind = next(name for name, least in _PACES if row["speedup"] >= least)
            kinds[kind].append(f"{row['label']} ({times(row['speedup'])})")
    found = [f"- **{name}**: {', '.join(labels)}" for name, labels in kinds.items() if labels]
    heading = f"Against autoregressive decoding, with {results['rows_at_once']} prompts at once on this machine:"
    if len(results.get("runs", ())) > 1:
        heading = "Against autoregressive decoding, each within its own run:"
    return [heading, "", *found, ""] if found else []


def last_line(results: Mapping[str, Any], output_dir: str) -> dict[str, Any]:
    """The run in one JSON document: what a script wants."""
    return {
        "schema_version": results["schema_version"],
        "recipe": results["recipe"],
        "output_dir": output_dir,
        "rows": [
            {
                "label": row["label"],
                "exactness": row["exactness"],
                "errors": row["errors"],
                "acceptance_length": row["acceptance_length"]["value"],
                "acceptance_length_gain": None
                if row["acceptance_length_gain"] is None
                else row["acceptance_length_gain"]["value"],
                "acceptance_rate": row["acceptance_rate"],
                "tokens_per_second": row["tokens_per_second"],
                "speedup": row["speedup"],
                **{
                    name: None if row["fidelity"] is None else row["fidelity"][name]["value"]
                    for name in ("rejection", "nucleus_excess", "deviation")
                },
                "agreement": None if row["agreement"] is None else row["agreement"]["share"],
            }
            for row in results["rows"]
        ],
    }


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    texts = [[_escaped(column) for column in columns], *([_escaped(row[column]) for column in columns] for row in rows)]
    widths = [max(3, *(len(text[index]) for text in texts)) for index in range(len(columns))]
    left = 2  # the first columns are words, the others numbers

    def line(text: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(text, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * width}" if index < left else f"{'-' * (width - 1)}:" for index, width in enumerate(widths)]
    return "\n".join([line(texts[0]), line(rule), *(line(text) for text in texts[1:])])


def _escaped(cell: str) -> str:
    """Text that stays in its cell, and is no HTML."""
    for mark, shown in (("\\", "\\\\"), ("|", "\\|"), ("&", "&amp;"), ("<", "&lt;")):
        cell = cell.replace(mark, shown)
    return cell


def no_law(row: Mapping[str, Any]) -> str:
    """What stands for the deviation of a rule that has no law at single places."""
    return "0 (lossless)" if row["exactness"] == "lossless" else "none"


def _fidelity(row: Mapping[str, Any], *, drafts: bool) -> dict[str, str]:
    fidelity = row["fidelity"]
    names = ("rejection", "nucleus_excess", "deviation", "rejected_in_nucleus", "rejected_in_top_10")
    kinds: tuple[Callable[[float | None], str], ...] = (three, three, three, percent, percent)
    if not drafts:
        return dict.fromkeys(FIDELITY[:-1], NONE)
    if fidelity is None:
        return dict.fromkeys(FIDELITY[:-1], NOT_MEASURED)
    shown = {
        column: _interval(fidelity[name], kind) for column, name, kind in zip(FIDELITY[:-1], names, kinds, strict=True)
    }
    if fidelity["places"] and fidelity["deviation"]["value"] is None:
        shown["deviation"] = no_law(row)
    return shown


def _agreement(agreement: Mapping[str, Any] | None) -> str:
    if agreement is None or agreement["share"] is None:
        return NONE
    first = agreement["median_first_difference"]
    return percent(agreement["share"]) + (f", else from {first:g}" if first is not None else "")


def _score(score: Mapping[str, Any]) -> str:
    text, difference = _interval(score, percent), score["difference"]
    return text if difference is None else f"{text}, {points(difference)}"


def points(difference: Mapping[str, Any]) -> str:
    """A difference of scores and its interval, in points."""
    low, high = difference["interval"] or (difference["value"],) * 2
    return f"{100 * difference['value']:+.0f} [{100 * low:+.0f}, {100 * high:+.0f}]"


def _failures(row: Mapping[str, Any]) -> str:
    return f" ({row['errors']} of {row['requests']} failed)" if row["errors"] else ""


def sampled(results: Mapping[str, Any]) -> str:
    """How tokens were drawn, and how many at most."""
    sampling = results["sampling"]
    told = ["greedy" if results["greedy"] else f"temperature {sampling['temperature']:g}"]
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        if sampling[name] != off:
            told.append(f"{name} {sampling[name]:g}")
    return ", ".join([*told, f"at most {sampling['max_new_tokens']} new tokens"])


def notes(results: Mapping[str, Any]) -> list[str]:
    """What a reader must know before the figures, one sentence or two each."""
    rows = results["rows"]
    said = []
    if results["greedy"]:
        said.append(
            "Decoding is greedy: p is all on the target's most probable token, and R, E, deviation and the nucleus "
            "refer to that."
        )
    if any(row["point_mass"] for row in rows):
        said.append(
            "\\* Drafts are point masses (q = 1 on the draft token): the drafter does not sample, or decoding is "
            "greedy. R is then 1 - p(draft token), and NSD keeps every drafted token that lies in the nucleus."
        )
    if not any(row["baseline"] for row in rows):
        said.append("There is no autoregressive row (report.baseline is false), so no speedup.")
    if failed := [f"{row['label']} ({row['errors']})" for row in rows if row["errors"]]:
        said.append(f"Requests that ended on scores that were not finite: {', '.join(failed)}. They are in all counts.")
    return [*said, *results.get("notes", ())]


def _details(results: Mapping[str, Any]) -> list[str]:
    lines = []
    for row in results["rows"]:
        seconds, counters = row["seconds"], row["counters"]
        split = ", ".join(f"{name} {seconds[name]:.2f}" for name in ("draft", "verify", "rest"))
        mean = two(row["acceptance_length_mean_over_requests"])
        lines.append(
            f"- {row['label']}: {counters['num_emitted_tokens']} tokens in {counters['num_steps']} verifications of "
            f"{counters['num_draft_tokens']} draft tokens; seconds {split}; acceptance length as a mean over requests "
            f"{mean}."
        )
    return lines


def machines(results: Mapping[str, Any]) -> list[str]:
    """What each run depended on, a paragraph a run."""
    runs = results.get("runs") or [results]
    told = [("" if len(runs) < 2 else f"{run['run']}: ") + _environment(run["environment"]) for run in runs]
    return [line for text in told for line in (text, "")][:-1]


def _environment(about: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    target = about["target"]
    machine = (
        ", ".join(dict.fromkeys(about["accelerators"])) or f"{about['processor']}, {about['torch_threads']} threads"
    )
    return (
        f"Python {about['python']}, {packages}. {machine}. Target {target['model_type']}, "
        f"{target['parameters']:,} parameters, {target['dtype']} on {target['device']}."
    )


def _interval(measured: Mapping[str, Any], show: Callable[[float | None], str]) -> str:
    if measured["value"] is None:
        return NONE
    text = show(measured["value"])
    if measured["interval"] is None:
        return text
    low, high = measured["interval"]
    return f"{text} [{show(low)}, {show(high)}]"
