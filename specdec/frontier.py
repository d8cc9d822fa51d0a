"""What theta buys: the rules of a run that have one, at other thetas over recorded steps, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import CompatibilityError
from specdec.options import build, label_of, values
from specdec.registry import load
from specdec.replay import replay
from specdec.trace import Trace

THETAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_SHOWN = ("acceptance_length", "deviation")


def frontiers(trace: Trace) -> tuple[list[dict[str, Any]], list[str]]:
    """Each rule that has a `theta`, at `THETAS`, over the steps of the standard row of the same drafter.

    Where the standard rule did not run with a drafter, the steps are those of its first row.

    Returns:
        For each rule and drafter `rule`; `trace`, the label of the row whose steps they are; `points`, a mapping of
        theta (None for the standard rule itself) and the figures of a replay; and `runs`, label and theta of the rows
        that did run. Then a sentence for each theta that the trace leaves open.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    open_ones: list[str] = []
    for row in trace.rows.values():
        use, options = row["verifier"]["use"], _options(row["verifier"])
        made, _ = build(load("verifiers", use), options, use, use)
        if not isinstance(theta := getattr(made, "theta", None), float):
            continue
        drafter, rule = row["drafter"]["name"], label_of(use, _unusual(use, options))
        if (drafter, rule) not in found:
            source, recorded = _source(trace, drafter)
            points = [_point(trace, source, None, "standard", {}, open_ones)]
            points += [_point(trace, source, at, use, {**options, "theta": at}, open_ones) for at in THETAS]
            found[drafter, rule] = {
                "rule": rule,
                "trace": recorded,
                "points": [point for point in points if point is not None],
                "runs": [],
            }
        found[drafter, rule]["runs"].append({"label": row["label"], "theta": theta})
    return list(found.values()), open_ones


def _point(
    trace: Trace, source: int, theta: float | None, use: str, options: Mapping[str, Any], open_ones: list[str]
) -> dict[str, Any] | None:
    """The figures of one theta; where the trace does not give them, why, into the last argument."""
    made, problems = build(load("verifiers", use), options, use, use)
    try:
        if made is None:
            raise CompatibilityError(problems)
        made.prepare(None)
        figures = replay(trace, source, {use: made})[use].to_dict()
    except CompatibilityError as error:
        open_ones.append(f"theta {theta}: {error}")
        return None
    return {"theta": theta, **{name: figures[name] for name in _SHOWN}}


def _options(verifier: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in verifier.items() if name not in ("use", "name")}


def _unusual(use: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not the rule's defaults, without theta."""
    plain, _ = build(load("verifiers", use), {}, use, use)
    usual = {} if plain is None else values(plain)
    return {name: value for name, value in options.items() if name != "theta" and value != usual.get(name)}


def _source(trace: Trace, drafter: str) -> tuple[int, str]:
    """Index and label of the row whose steps are replayed."""
    rows = {index: row for index, row in trace.rows.items() if row["drafter"]["name"] == drafter}
    index = next((index for index, row in rows.items() if row["verifier"]["use"] == "standard"), next(iter(rows)))
    return index, str(rows[index]["label"])
