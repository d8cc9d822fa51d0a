"""From the records of a run to its results: integers are added up, rates derived, intervals drawn over prompts."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

from attrs import asdict, frozen

from specdec.diagnostics import DIAGNOSTICS, REFERENCE_THETA
from specdec.metrics import Counters, bootstrap, pool, wilson

SCHEMA_VERSION = 1
TOP = 10
FORMULAS = {
    "acceptance_length": "num_emitted_tokens / num_steps: tokens of one target verification, bonus or replacement "
    "included, pooled over all steps of all requests",
    "acceptance_length_mean_over_requests": "mean over requests of num_emitted_tokens / num_steps",
    "acceptance_length_gain": "acceptance_length minus that of the standard row of the same drafter; the interval "
    "resamples prompts for both rows together",
    "acceptance_rate": "num_accepted_tokens / num_draft_tokens, the bonus not in it",
    "tokens_per_second": "num_emitted_tokens / (seconds draft + verify + rest), diagnostics not in it",
    "speedup": "tokens_per_second / tokens_per_second of the autoregressive row of the same run",
    "rejection": "mean over examined places of R = TV(p, q) = sum (q - p)+: what the standard rule rejects there",
    "nucleus_excess": f"mean over examined places of E, the sum of (q - p)+ over p's nucleus of theta "
    f"{REFERENCE_THETA}: the total variation that NSD causes there, whatever rule runs",
    "deviation": "mean over examined places of TV(output law of the rule that runs, p); none for a rule without a "
    "law at single places",
    "excess": "mean over examined places of the rule's acceptance, sum of q a, beyond the standard rule's 1 - R",
    "deviation_per_request": "mean over requests of the sum of deviations at their places; its expectation bounds the "
    "total variation between the law of whole outputs and the target's",
    "sequence_bound": "deviation_per_request, at most 1: an estimate of that bound from these requests, no certificate",
    "relaxed": "share of accepted draft tokens that the standard rule rejects on the same uniform number",
    "relaxed_target_entropy": "mean entropy of p, in nats, at the places of these tokens",
    "relaxed_draft_entropy": "mean entropy of q, in nats, at the places of these tokens",
    "acceptance_by_position": "conditional: kept / examined at a draft position; unconditional: kept / drafted there",
    "rejected_in_nucleus": f"share of rejected draft tokens that lie in p's nucleus of theta {REFERENCE_THETA}",
    "rejected_in_top_10": "share of rejected draft tokens with fewer than 10 tokens more probable under p",
    "agreement": "share of requests with the ids of the standard row of the same drafter on the same noise, and among "
    "the others the median index of the first difference",
    "scores": "mean of the task's scores over requests with Wilson's 95 % interval, and the difference to the standard "
    "row of the same drafter in points, paired by prompt and repeat, its interval by bootstrap over prompts",
    "interval": "95 %, percentile bootstrap over prompts, 1000 rounds",
}

Record = Mapping[str, Any]


@final
@frozen(kw_only=True)
class Row:
    """One combination of a run.

    Attributes:
        label: unique in the run.
        drafter: its label.
        verifier: its label.
        exactness: what the rule promises.
        family: what kind of rule it is.
        point_mass: drafts have no law: the drafter is deterministic or sampling is greedy.
        baseline: the row that speedups are against.
        reference: label of the standard row of the same drafter, or None.
        options: of the rule, defaults included, in words.
    """

    label: str
    drafter: str
    verifier: str
    exactness: str
    family: str
    point_mass: bool
    baseline: bool = False
    reference: str | None = None
    options: str = ""


def fidelity(diagnostics: Mapping[str, Sequence[float]]) -> dict[str, float | int | None]:
    """Sums over the examined places of one request; `excess` and `deviation` are None where a rule has no law."""
    values = {name: diagnostics.get(name, ()) for name in DIAGNOSTICS}
    accepted = list(zip(values["accepted"], values["by_ratio"], strict=True))
    missed = [index for index, (kept, _) in enumerate(accepted) if not kept]
    relaxed = [index for index, (kept, standard) in enumerate(accepted) if kept and not standard]

    def known(name: str) -> float | None:
        total = sum(values[name])
        return total if total == total else None

    return {
        "places": len(accepted),
        "rejection": sum(values["rejection"]),
        "nucleus_excess": sum(values["nucleus_excess"]),
        "excess": known("excess"),
        "deviation": known("deviation"),
        "accepted": len(accepted) - len(missed),
        "relaxed": len(relaxed),
        "relaxed_target_entropy": sum(values["target_entropy"][index] for index in relaxed),
        "relaxed_draft_entropy": sum(values["draft_entropy"][index] for index in relaxed),
        "rejected": len(missed),
        "rejected_in_nucleus": sum(values["in_nucleus"][index] > 0 for index in missed),
        "rejected_in_top_10": sum(values["rank"][index] < TOP for index in missed),
    }


def plain_logprobs(logprobs: Mapping[str, Sequence[float]]) -> dict[str, list[float | None] | None]:
    """As JSON can hold it: minus infinity is null, and so is a whole list in which something is not known (NaN)."""
    return {
        name: None
        if any(value != value for value in values)
        else [None if value == -math.inf else value for value in values]
        for name, values in logprobs.items()
    }


def combined(drafter: str, verifier: str) -> str:
    """The label of a row, from those of its drafter and its verifier; `autoregressive` is never one."""
    return f"{drafter} + {verifier}"


def ambiguous(drafters: Sequence[str], verifiers: Sequence[str]) -> list[str]:
    """What is wrong with labels: records are pooled by row, and "x + y" with "z" would meet "x" with "y + z"."""
    taken: dict[str, tuple[str, str]] = {}
    problems = []
    for pair in itertools.product(drafters, verifiers):
        label = combined(*pair)
        if (first := taken.setdefault(label, pair)) != pair:
            problems.append(
                f"drafters: {pair[0]!r} with the verifier {pair[1]!r} is called {label!r}, as {first[0]!r} with "
                f"{first[1]!r} is, wanted a name for each; give one of them another `name`"
            )
    return problems


def summarise(
    rows: Sequence[Row], records: Sequence[Record], groups: Mapping[str, str | None] | None = None
) -> dict[str, Any]:
    """What `results.json` holds, apart from what is said about the run itself.

    Args:
        rows: of the run.
        records: one a request.
        groups: of samples, by their id; None is no group.
    """
    by_row = {row.label: [record for record in records if record["run"] == row.label] for row in rows}
    baseline = next((row.label for row in rows if row.baseline), None)
    pace = _pace(by_row[baseline]) if baseline is not None else None
    return {
        "schema_version": SCHEMA_VERSION,
        "formulas": FORMULAS,
        "rows": [{**_row(row, by_row, pace), "groups": _groups(row, by_row, groups or {})} for row in rows],
    }


def counters(record: Record) -> Counters:
    """The counters of a record, as they were before they became JSON."""
    data = dict(record["counters"])
    data["num_per_length"] = {int(length): count for length, count in data["num_per_length"].items()}
    return Counters(**data)


def _row(row: Row, by_row: Mapping[str, list[Record]], pace: float | None) -> dict[str, Any]:
    records = by_row[row.label]
    parts = [counters(record) for record in records]
    total = pool(parts)
    lengths = [part.acceptance_length for part in parts if part.acceptance_length is not None]
    seconds = {name: sum(record["seconds"][name] for record in records) for name in ("draft", "verify", "rest")}
    own = _pace(records)
    return {
        **asdict(row),
        "prompts": len({record["sample"] for record in records}),
        "requests": len(records),
        "errors": sum(record["finish_reason"] == "error" for record in records),
        "counters": total.to_dict(),
        "acceptance_length": _acceptance_length(records),
        "acceptance_length_gain": _gain(records, by_row[row.reference]) if row.reference is not None else None,
        "acceptance_length_mean_over_requests": statistics.fmean(lengths) if lengths else None,
        "acceptance_rate": total.acceptance_rate,
        "acceptance_by_position": [
            {"conditional": seen, "unconditional": drafted} for seen, drafted in total.acceptance_by_position
        ],
        "seconds": {**seconds, "total": sum(seconds.values())},
        "tokens_per_second": own,
        "speedup": own / pace if own and pace else None,
        "fidelity": _fidelity(records),
        "agreement": _agreement(records, by_row[row.reference]) if row.reference is not None else None,
        "scores": _scores(records, by_row[row.reference] if row.reference is not None else ()),
    }


def _groups(
    row: Row, by_row: Mapping[str, list[Record]], groups: Mapping[str, str | None]
) -> dict[str, dict[str, Any]]:
    """Acceptance and deviation of each group of samples, by its name."""

    def chosen(label: str, name: str) -> list[Record]:
        return [record for record in by_row[label] if groups.get(record["sample"]) == name]

    found = {}
    for name in dict.fromkeys(name for name in groups.values() if name is not None):
        records = chosen(row.label, name)
        found[name] = {
            "requests": len(records),
            "acceptance_length": _acceptance_length(records),
            "acceptance_length_gain": None if row.reference is None else _gain(records, chosen(row.reference, name)),
            "deviation": _mean("deviation", records) if _measured(records) else None,
        }
    return found


def _acceptance_length(records: Sequence[Record]) -> dict[str, Any]:
    return _ratio(records, lambda r: r["counters"]["num_emitted_tokens"], lambda r: r["counters"]["num_steps"])


def _pace(records: Iterable[Record]) -> float | None:
    tokens, seconds = 0, 0.0
    for record in records:
        tokens += record["counters"]["num_emitted_tokens"]
        seconds += sum(record["seconds"].values())
    return tokens / seconds if seconds else None


def _fidelity(records: Sequence[Record]) -> dict[str, Any] | None:
    if not _measured(records):
        return None

    def mean(name: str, over: str | None = "places") -> dict[str, Any]:
        return _mean(name, records, over)

    whole = mean("deviation", None)

    return {
        "places": sum(record["fidelity"]["places"] for record in records),
        "rejected": sum(record["fidelity"]["rejected"] for record in records),
        "rejection": mean("rejection"),
        "nucleus_excess": mean("nucleus_excess"),
        "excess": mean("excess"),
        "deviation": mean("deviation"),
        "deviation_per_request": whole,
        "sequence_bound": None if whole["value"] is None else min(1.0, max(0.0, whole["value"])),
        "relaxed": mean("relaxed", "accepted"),
        "relaxed_target_entropy": mean("relaxed_target_entropy", "relaxed"),
        "relaxed_draft_entropy": mean("relaxed_draft_entropy", "relaxed"),
        "rejected_in_nucleus": mean("rejected_in_nucleus", "rejected"),
        "rejected_in_top_10": mean("rejected_in_top_10", "rejected"),
    }


def _measured(records: Sequence[Record]) -> bool:
    return bool(records) and all(record["fidelity"] is not None for record in records)


def _mean(name: str, records: Sequence[Record], over: str | None = "places") -> dict[str, Any]:
    """Of a sum over places; None in one request is a law that nobody knows."""
    if any(record["fidelity"][name] is None for record in records):
        return {"value": None, "interval": None}
    return _ratio(
        records, lambda record: record["fidelity"][name], lambda record: 1 if over is None else record["fidelity"][over]
    )


def _ratio(
    records: Sequence[Record], over: Callable[[Record], float], under: Callable[[Record], float]
) -> dict[str, Any]:
    """A ratio of totals and its interval over prompts."""
    totals: dict[str, list[float]] = {}
    for record in records:
        group = totals.setdefault(record["sample"], [0.0, 0.0])
        group[0] += over(record)
        group[1] += under(record)

    def statistic(groups: Sequence[Any]) -> float | None:
        below = sum(group[1] for group in groups)
        return sum(group[0] for group in groups) / below if below else None

    groups = list(totals.values())
    value = statistic(groups)
    interval = bootstrap(groups, statistic) if value is not None else None
    return {"value": value, "interval": None if interval is None else list(interval)}


def _gain(records: Sequence[Record], reference: Sequence[Record]) -> dict[str, Any]:
    """Difference of acceptance lengths, paired by prompt."""
    groups: dict[str, list[float]] = {}
    for side, rows in enumerate((records, reference)):
        for record in rows:
            group = groups.setdefault(record["sample"], [0.0] * 4)
            group[2 * side] += record["counters"]["num_emitted_tokens"]
            group[2 * side + 1] += record["counters"]["num_steps"]

    def statistic(chosen: Sequence[Any]) -> float | None:
        ours, our_steps, theirs, their_steps = (sum(group[i] for group in chosen) for i in range(4))
        return ours / our_steps - theirs / their_steps if our_steps and their_steps else None

    value = statistic(list(groups.values()))
    interval = bootstrap(list(groups.values()), statistic) if value is not None else None
    return {"value": value, "interval": None if interval is None else list(interval)}


def _scores(records: Sequence[Record], reference: Sequence[Record]) -> dict[str, Any]:
    """Each score's mean, its interval, and the difference to the standard row on the same prompts and noise."""
    theirs = {_key(record): record.get("scores", {}) for record in reference}
    found = {}
    for name in dict.fromkeys(name for record in records for name in record.get("scores", {})):
        values = [record["scores"][name] for record in records if name in record["scores"]]
        pairs: dict[str, list[float]] = {}
        for record in records:
            if name in record["scores"] and name in theirs.get(_key(record), {}):
                pairs.setdefault(record["sample"], []).append(record["scores"][name] - theirs[_key(record)][name])
        groups = list(pairs.values())
        interval = bootstrap(groups, _mean_of_all) if groups else None
        found[name] = {
            "value": statistics.fmean(values),
            "requests": len(values),
            "interval": list(wilson(sum(values), len(values))),
            "difference": None
            if not groups
            else {"value": _mean_of_all(groups), "interval": None if interval is None else list(interval)},
        }
    return found


def _mean_of_all(groups: Sequence[Any]) -> float:
    return statistics.fmean(value for group in groups for value in group)


def _agreement(records: Sequence[Record], reference: Sequence[Record]) -> dict[str, Any]:
    wanted = {_key(record): record["tokens"] for record in reference if record["finish_reason"] != "error"}
    pairs = [
        (record["tokens"], wanted[_key(record)])
        for record in records
        if record["finish_reason"] != "error" and _key(record) in wanted
    ]
    first = [_first_difference(ours, theirs) for ours, theirs in pairs if ours != theirs]
    return {
        "requests": len(pairs),
        "equal": len(pairs) - len(first),
        "share": (len(pairs) - len(first)) / len(pairs) if pairs else None,
        "median_first_difference": statistics.median(first) if first else None,
    }


def _key(record: Record) -> tuple[str, int]:
    return record["sample"], record["repeat"]


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
