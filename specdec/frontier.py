"""What theta buys: the rules of a run that have one, at other thetas over recorded steps, without a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.options import build, label_of, values
from specdec.registry import load
from specdec.replay import replay
from specdec.trace import Trace

THETAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_SHOWN = ("acceptance_length", "deviation")


def frontiers(trace: Trace) -> tuple[list[dict[str, Any]], list[str]]:
    """Each rule that has an option `theta`, a number between 0 and 1, at `THETAS`.

    They run over the steps of the standard row of the same drafter; where the standard rule did not run with it, over
    those of its first row. A rule may be a stranger's: whatever it raises becomes a sentence.

    Returns:
        For each rule and drafter `rule`; `trace`, the label of the row whose steps they are; `points`, a mapping of
        theta (None for the standard rule itself) and the figures of a replay; and `runs`, label and theta of the rows
        that did run. Then a sentence for each point that is not there.
    """
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    standard: dict[int, list[dict[str, Any]]] = {}
    missing: list[str] = []
    for row in trace.rows.values():
        use, drafter = row["verifier"]["use"], row["drafter"]["name"]
        options = {name: value for name, value in row["verifier"].items() if name not in ("use", "name")}
        if not isinstance(theta := options.get("theta"), float) or not 0.0 <= theta <= 1.0:
            continue
        unusual = _unusual(use, options)
        key = (drafter, use, json.dumps(unusual, sort_keys=True))
        if key not in found:
            source = _source(trace, drafter)
            about = (str(trace.rows[source]["label"]), label_of(use, unusual))
            if source not in standard:
                standard[source] = _points(trace, source, "standard", [(None, {})], missing)
            wanted = [(at, {**options, "theta": at}) for at in THETAS]
            points = standard[source] + _points(trace, source, use, wanted, missing)
            found[key] = {"rule": about[1], "trace": about[0], "points": points, "runs": []}
        found[key]["runs"].append({"label": row["label"], "theta": theta})
    return list(found.values()), missing


def _points(
    trace: Trace, source: int, use: str, wanted: Sequence[tuple[float | None, Mapping[str, Any]]], missing: list[str]
) -> list[dict[str, Any]]:
    """The figures of a rule with each of these options, in one go over the steps, or else each by itself; why one is
    not there goes into the last argument.
    """
    try:
        rules = {str(theta): _made(use, options) for theta, options in wanted}
        figures = {name: one.to_dict() for name, one in replay(trace, source, rules).items()}
    except Exception as error:  # a rule may be a stranger's, and must not cost a finished run its report
        if len(wanted) > 1:
            return [point for one in wanted for point in _points(trace, source, use, [one], missing)]
        at = "" if wanted[0][0] is None else f" at theta {wanted[0][0]}"
        missing.append(f"{use}{at}: {'; '.join(str(error).splitlines()) or type(error).__name__}")
        return []
    return [{"theta": theta, **{name: figures[str(theta)][name] for name in _SHOWN}} for theta, _ in wanted]


def _made(use: str, options: Mapping[str, Any]) -> Any:
    made, problems = build(load("verifiers", use), options, use, use)
    if problems:
        raise ValueError("; ".join(problems))
    made.prepare(None)
    return made


def _unusual(use: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not the rule's defaults, without theta."""
    plain, _ = build(load("verifiers", use), {}, use, use)
    usual = {} if plain is None else values(plain)
    return {name: value for name, value in options.items() if name != "theta" and value != usual.get(name)}


def _source(trace: Trace, drafter: str) -> int:
    """The row whose steps are replayed."""
    rows = {index: row for index, row in trace.rows.items() if row["drafter"]["name"] == drafter}
    return next((index for index, row in rows.items() if row["verifier"]["use"] == "standard"), next(iter(rows)))
