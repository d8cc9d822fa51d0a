"""What theta buys: the rules of a run that have one, at other thetas over recorded steps, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import CompatibilityError
from specdec.options import build, label_of, values
from specdec.registry import load
from specdec.replay import replay
from specdec.trace import Trace
from specdec.verifier import Verifier

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
    open_ones = []
    for row in trace.rows.values():
        use, options = row["verifier"]["use"], _options(row["verifier"])
        made = _made(use, options)
        if not isinstance(getattr(made, "theta", None), float):
            continue
        rule = label_of(use, _unusual(use, options))
        key = (row["drafter"]["name"], rule)
        if key not in found:
            source, recorded = _source(trace, row["drafter"]["name"])
            rules: dict[float | None, Verifier] = {theta: _made(use, {**options, "theta": theta}) for theta in THETAS}
            points = []
            for theta, one in {None: _made("standard", {}), **rules}.items():
                try:
                    figures = replay(trace, source, {rule: one})[rule].to_dict()
                except CompatibilityError as error:
                    open_ones.append(f"theta {theta}: {error}")
                else:
                    points.append({"theta": theta, **{name: figures[name] for name in _SHOWN}})
            found[key] = {"rule": rule, "trace": recorded, "points": points, "runs": []}
        found[key]["runs"].append({"label": row["label"], "theta": made.theta})
    return list(found.values()), open_ones


def _options(verifier: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in verifier.items() if name not in ("use", "name")}


def _unusual(use: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not the rule's defaults, without theta."""
    plain, _ = build(load("verifiers", use), {}, use, use)
    usual = {} if plain is None else values(plain)
    return {name: value for name, value in options.items() if name != "theta" and value != usual.get(name)}


def _made(use: str, options: Mapping[str, Any]) -> Any:
    made, problems = build(load("verifiers", use), options, use, use)
    assert not problems, problems  # a rule of this run made it already
    made.prepare(None)
    return made


def _source(trace: Trace, drafter: str) -> tuple[int, str]:
    """Index and label of the row whose steps are replayed."""
    rows = {index: row for index, row in trace.rows.items() if row["drafter"]["name"] == drafter}
    index = next((index for index, row in rows.items() if row["verifier"]["use"] == "standard"), next(iter(rows)))
    return index, str(rows[index]["label"])
