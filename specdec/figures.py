"""The numbers behind a report's table and figures, one sheet each: what is drawn is what a CSV file holds."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, final

from attrs import frozen

Cell = str | float | None
_MEASURED = ("rejection", "nucleus_excess", "excess", "deviation", "deviation_per_request")
# What is told of a group of prompts, and what a report calls it.
OF_A_GROUP = {"acceptance_length": "acceptance length", "acceptance_length_gain": "gain", "deviation": "deviation"}
_SPLIT = ("draft", "verify", "rest")


@final
@frozen
class Sheet:
    """Rows of numbers under named columns; the first column is the run.

    Attributes:
        file: where it goes in the folder of a run.
        columns: their names.
        rows: None is a number that was not measured.
    """

    file: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def text(self) -> str:
        """The sheet as CSV."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.columns, *self.rows])
        return out.getvalue()


TABLE, PRICE, POSITIONS = "table.csv", "figures/deviation.csv", "figures/positions.csv"
LENGTHS, TIMES, FRONTIER = "figures/lengths.csv", "figures/times.csv", "figures/frontier.csv"
FILES = (TABLE, PRICE, FRONTIER, POSITIONS, LENGTHS, TIMES)
PICTURES = {file: file.replace(".csv", ".svg") for file in FILES if file != TABLE}


def sheets(results: Mapping[str, Any]) -> dict[str, Sheet]:
    """Every sheet by its file, also those that nothing was measured for: a pure function of `results.json`."""
    rows = results["rows"]
    made = (_table(rows), _price(rows), _frontier(results), _positions(rows), _lengths(rows), _times(rows))
    return {sheet.file: sheet for sheet in made}


def against_standard(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """How many times as fast a row is as the standard row of the same drafter."""
    pace = next((other["tokens_per_second"] for other in rows if other["label"] == row["reference"]), None)
    own: float | None = row["tokens_per_second"]
    return own / pace if own and pace else None


def score_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of what tasks scored, each once; none where there were no scores."""
    return list(dict.fromkeys(name for row in rows for name in row.get("scores") or ()))


def score(row: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """A score of a row, a value with its interval, where it has it."""
    found: Mapping[str, Any] | None = (row.get("scores") or {}).get(name)
    return found


def group_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of prompts, each once; none where they were not of several kinds."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("groups") or ()))
    return names if len(names) > 1 else []


def _group(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return (row.get("groups") or {}).get(name) or {}


def _spread(measured: Mapping[str, Any] | None) -> tuple[Cell, Cell, Cell]:
    """Value, low and high."""
    if measured is None:
        return None, None, None
    low, high = measured.get("interval") or (None, None)
    return measured["value"], low, high


def _named(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"


def _table(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    scores, groups = score_names(rows), group_names(rows)
    columns = (
        *("run", "drafter", "verifier", "options", "exactness", "requests", "errors"),
        *(column for name in ("acceptance_length", "acceptance_length_gain") for column in _named(name)),
        *("acceptance_rate", "tokens_per_second", "speedup", "speedup_against_standard"),
        *(column for name in _MEASURED for column in _named(name)),
        *("sequence_bound", "agreement", "median_first_difference"),
        *(column for name in scores for column in _named(f"score_{name}")),
        *(column for name in groups for key in OF_A_GROUP for column in _named(f"group_{name}_{key}")),
    )
    lines = []
    for row in rows:
        found, agreement = row["fidelity"] or {}, row["agreement"] or {}
        lines.append(
            (
                *(row["label"], row["drafter"], row["verifier"], row["options"], row["exactness"]),
                *(row["requests"], row["errors"]),
                *_spread(row["acceptance_length"]),
                *_spread(row["acceptance_length_gain"]),
                *(row["acceptance_rate"], row["tokens_per_second"], row["speedup"], against_standard(row, rows)),
                *(cell for name in _MEASURED for cell in _spread(found.get(name))),
                *(found.get("sequence_bound"), agreement.get("share"), agreement.get("median_first_difference")),
                *(cell for name in scores for cell in _spread(score(row, name))),
                *(cell for name in groups for key in OF_A_GROUP for cell in _spread(_group(row, name).get(key))),
            )
        )
    return Sheet(TABLE, columns, tuple(lines))


def _price(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    """What each rule keeps beyond the standard one, and what that costs, at a mean place."""
    columns = ("run", "exactness", *_named("extra_acceptance"), *_named("deviation"))
    measured = [(row, row["fidelity"]) for row in rows if row["fidelity"] and row["fidelity"]["places"]]
    return Sheet(
        PRICE,
        columns,
        tuple(
            (row["label"], row["exactness"], *_spread(found["excess"]), *_spread(found["deviation"]))
            for row, found in measured
        ),
    )


def _frontier(results: Mapping[str, Any]) -> Sheet:
    """Acceptance length and deviation by theta: over recorded steps, and of the rows that ran."""
    columns = ("run", "rule", "theta", "source", *_named("acceptance_length"), *_named("deviation"))
    rows = {row["label"]: row for row in results["rows"]}
    lines: list[tuple[Cell, ...]] = []

    for one in results.get("frontiers", ()):
        for point in one["points"]:
            measured = _spread(point["acceptance_length"]), _spread(point["deviation"])
            lines.append((one["trace"], one["rule"], point["theta"], "replay", *measured[0], *measured[1]))
        for run in one["runs"]:
            row = rows[run["label"]]
            measured = _spread(row["acceptance_length"]), _spread((row["fidelity"] or {}).get("deviation"))
            lines.append((run["label"], one["rule"], run["theta"], "run", *measured[0], *measured[1]))
    return Sheet(FRONTIER, columns, tuple(lines))


def _positions(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    columns = ("run", "position", "drafted", "examined", "accepted", "conditional", "unconditional")
    lines: list[tuple[Cell, ...]] = []
    for row in rows:
        counters = row["counters"]
        drafted = counters["num_drafted_per_pos"]
        counts = [
            (*counters[name], *[0] * len(drafted)) for name in ("num_examined_per_pos", "num_accepted_tokens_per_pos")
        ]
        for place, shares in enumerate(row["acceptance_by_position"]):
            seen, kept = (numbers[place] for numbers in counts)
            lines.append(
                (row["label"], place + 1, drafted[place], seen, kept, shares["conditional"], shares["unconditional"])
            )
    return Sheet(POSITIONS, columns, tuple(lines))


def _lengths(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    lines: list[tuple[Cell, ...]] = []
    for row in rows:
        counts = {int(length): count for length, count in row["counters"]["num_per_length"].items()}
        steps = sum(counts.values())
        most = max(counts, default=0)
        lines += [
            (row["label"], length, counts.get(length, 0), counts.get(length, 0) / steps)
            for length in range(1, most + 1)
        ]
    return Sheet(LENGTHS, ("run", "emitted_tokens", "steps", "share"), tuple(lines))


def _times(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    columns = (
        "run",
        "tokens",
        *(f"{name}_seconds" for name in _SPLIT),
        *(f"{name}_ms_per_token" for name in _SPLIT),
    )
    lines: list[tuple[Cell, ...]] = []
    for row in rows:
        tokens, seconds = row["counters"]["num_emitted_tokens"], [row["seconds"][name] for name in _SPLIT]
        lines.append((row["label"], tokens, *seconds, *(1000 * part / tokens if tokens else None for part in seconds)))
    return Sheet(TIMES, columns, tuple(lines))
