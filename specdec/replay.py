"""A rule over recorded steps, without a model: what it would have kept of the drafts that another rule was given.

The blocks begin where those of the recorded rule began, and hold the tokens that were drafted there. Given those, only
the accept noise is random, so a pointwise rule keeps the first k tokens with the product of its first k acceptances.
The drafted tokens are themselves draws from q, whatever rule runs, so the mean over blocks is an estimate of the rule's
acceptance length at these block starts, with less noise than a run would have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor

from specdec.diagnostics import REFERENCE_THETA
from specdec.errors import CompatibilityError
from specdec.metrics import bootstrap
from specdec.places import StandIn, Whole
from specdec.rerun import View, as_recorded, decide, judge, kept
from specdec.theory import nucleus_excess, rejection
from specdec.trace import RequestKey, Steps, Trace, joined
from specdec.verifier import PointwiseVerifier, Verifier

BRACKET = 1e-3  # most that a figure may depend on what a compact trace left out
_FULL = "it needs a full trace; try report.trace: full"
# Each figure is one sum over another; the sums are those of `_sums`.
_RATIOS = {
    "acceptance_length": ("emitted", "steps"),
    "acceptance_rate": ("accepted", "drafted"),
    "acceptance": ("accepted", "examined"),
    "rejection": ("rejection", "examined"),
    "nucleus_excess": ("nucleus_excess", "examined"),
    "deviation": ("deviation", "examined"),
}
FIGURES = tuple(_RATIOS)


@final
@frozen
class Figure:
    """A figure, its 95 % interval over prompts, and how far what a compact trace left out leaves it open."""

    value: float
    interval: tuple[float, float] | None
    open: float


@final
@frozen(kw_only=True)
class Replayed:
    """One rule over the steps of one combination.

    Attributes:
        expectation: whether the figures are expectations over the accept noise; else they are of the recorded noise.
        figures: `FIGURES` by name; None where it is not known.
        steps: recorded steps.
        places: draft places in them.
        equal: steps in which the rule, on the recorded noise, emits what was recorded; of a compact trace those in
            which it keeps as many draft tokens. None when that was not asked for.
    """

    expectation: bool
    figures: Mapping[str, Figure | None]
    steps: int
    places: int
    equal: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        figures = {
            name: None if figure is None else {"value": figure.value, "interval": figure.interval, "open": figure.open}
            for name, figure in self.figures.items()
        }
        return {
            "expectation": self.expectation,
            "steps": self.steps,
            "places": self.places,
            "equal_steps": self.equal,
            **figures,
        }


class UnrecordedError(CompatibilityError):
    """A trace does not hold what a rule looks at."""


def replay(trace: Trace, row: int, rules: Mapping[str, Verifier], *, check: bool = False) -> dict[str, Replayed]:
    """Run rules over the recorded steps of one combination.

    Args:
        trace: of a finished run.
        row: the combination's index in it.
        rules: by name, prepared.
        check: also decide on the recorded noise, and count the steps that come out as they were recorded.

    Raises:
        UnrecordedError: the trace does not hold what a rule needs.
        CompatibilityError: a figure is no finite number.
        DataError: a shard cannot be read.
    """
    about = trace.rows[row]
    if problems := [problem for name, rule in rules.items() for problem in _lacking(trace, about, name, rule)]:
        raise UnrecordedError(problems)
    tallies = {name: _Tally(f"{about['label']}: rule {name}", rule, trace) for name, rule in rules.items()}
    for steps in joined(trace.steps(row)) if trace.kind == "compact" else trace.steps(row):
        views: list[View] = (
            [Whole(steps)] if trace.kind == "full" else [StandIn(steps, uneven) for uneven in (False, True)]
        )
        reference = _reference(steps, views[0])
        for tally in tallies.values():
            tally.take(steps, views, reference, check=check)
    return {name: tally.result() for name, tally in tallies.items()}


def _lacking(trace: Trace, row: Mapping[str, Any], name: str, rule: Verifier) -> list[str]:
    """Everything that a rule needs and the traces of a row do not hold."""
    where, problems = f"{row['label']}: rule {name}", []
    if "hidden" in rule.needs:
        problems.append(f"{where} looks at hidden features, which no trace holds; try `specdec run`")
    elif "raw_logits" in rule.needs and trace.kind == "compact":
        problems.append(f"{where} looks at raw logits: {_FULL}")
    elif "raw_logits" in rule.needs and not trace.logits:
        problems.append(
            f"{where} looks at raw logits, which are recorded where a rule of the recipe looks at them; record with it"
        )
    if "draft_law" in rule.needs and row["deterministic"]:
        problems.append(f"{where} needs the law a token was drawn from, and the drafter was deterministic")
    if not isinstance(rule, PointwiseVerifier) and trace.kind == "compact":
        problems.append(f"{where} does not decide place by place: {_FULL}")
    if not isinstance(rule, PointwiseVerifier) and rule.memory:
        problems.append(f"{where} remembers, and does not decide place by place; try `specdec run`")
    return problems


def _reference(steps: Steps, view: View) -> tuple[Tensor, Tensor]:
    """R, and E of theta 0.95, of every place, float64 [D]."""
    if "rejection" in steps.tensors:
        return steps["rejection"], steps["nucleus_excess"]
    parts = [torch.zeros((2, 0), dtype=torch.float64)]
    for index in view.chunks(torch.arange(len(steps["draft"]))):
        at = view.at(index)
        q = at.q.dense()
        parts.append(torch.stack([rejection(at.p, q), nucleus_excess(at.p, q, REFERENCE_THETA)]).double())
    found = torch.cat(parts, 1)
    return found[0], found[1]


@final
class _Tally:
    """One rule's way through the shards of one combination. A compact trace is looked at twice, see `StandIn`."""

    def __init__(self, where: str, rule: Verifier, trace: Trace) -> None:
        sides = range(1 if trace.kind == "full" else 2)
        self.where, self.rule, self.prompts = where, rule, trace.prompts
        self.memories: list[dict[RequestKey, Tensor]] = [{} for _ in sides]
        self.totals: list[dict[str, dict[str, float]]] = [{} for _ in sides]  # sample id -> name -> sum
        self.steps = self.places = 0
        self.equal: int | None = None
        self.lawful = True

    def take(self, steps: Steps, views: list[View], reference: tuple[Tensor, Tensor], *, check: bool) -> None:
        self.steps += len(steps)
        self.places += len(steps["draft"])
        same = torch.ones(len(steps), dtype=torch.bool)
        for side, view in enumerate(views):
            if isinstance(self.rule, PointwiseVerifier):
                judged = judge(self.rule, view, self.memories[side], self.prompts)
                acceptance, deviation, starts = judged.acceptance, judged.deviation, judged.starts
                if check and isinstance(view, StandIn):
                    same &= kept(steps, acceptance) == steps["accepted"]
                elif check:
                    same &= as_recorded(steps, *decide(self.rule, steps, starts))
            else:
                lengths, tokens = decide(self.rule, steps, None)
                acceptance, deviation = (steps.depth < lengths[steps.owner]).double(), None
                same &= as_recorded(steps, lengths, tokens)
            self.lawful &= deviation is not None
            known = torch.zeros_like(acceptance) if deviation is None else deviation
            self._add(self.totals[side], steps, _sums(steps, acceptance, *reference, known))
        if check:
            self.equal = (self.equal or 0) + int(same.sum())

    def _add(self, totals: dict[str, dict[str, float]], steps: Steps, sums: Mapping[str, Tensor]) -> None:
        for name, values in sums.items():
            each = torch.zeros(len(steps.requests), dtype=torch.float64).index_add_(0, steps["request"], values)
            for (sample_id, _), value in zip(steps.requests, each.tolist(), strict=True):
                total = totals.setdefault(sample_id, {})
                total[name] = total.get(name, 0.0) + value

    def result(self) -> Replayed:
        return Replayed(
            expectation=isinstance(self.rule, PointwiseVerifier),
            figures={name: self._figure(name) for name in FIGURES},
            steps=self.steps,
            places=self.places,
            equal=self.equal,
        )

    def _figure(self, name: str) -> Figure | None:
        if name == "deviation" and not self.lawful:
            return None
        over, under = _RATIOS[name]

        def ratio(groups: list[Any]) -> float | None:
            below = sum(group[1] for group in groups)
            return sum(group[0] for group in groups) / below if below else None

        sides = [[(total[over], total[under]) for total in totals.values()] for totals in self.totals]
        values = [value for groups in sides if (value := ratio(list(groups))) is not None]
        if not values:
            return None
        if not all(map(math.isfinite, values)):
            raise CompatibilityError(f"{self.where}: makes {name} something else than a finite number")
        gap = max(values) - min(values)
        if not gap <= BRACKET:
            raise UnrecordedError(
                f"{self.where}: what a compact trace left out moves {name} by {gap:.4f}, wanted {BRACKET} at most: "
                f"{_FULL}"
            )
        return Figure(sum(values) / len(values), bootstrap(sides[0], ratio), gap)


def _sums(steps: Steps, acceptance: Tensor, rejected: Tensor, excess: Tensor, deviation: Tensor) -> dict[str, Tensor]:
    """Expected counts of each step, float64 [S]; all else is [D]. A place counts by the chance that it is examined."""
    size, end = steps["size"], steps["end"]
    column = torch.arange(int(size.max()) + 1)
    table = torch.zeros((len(steps), len(column) - 1, 4), dtype=torch.float64)
    table[steps.owner, steps.depth] = torch.stack([acceptance, rejected, excess, deviation], 1)
    chance = torch.cat([torch.ones((len(steps), 1)), table[..., 0].cumprod(1)], 1).double()  # that k tokens are kept
    # A token that ends the text may be kept, and then nothing follows; `end` is the size where there is none.
    last = torch.minimum(size, end + 1).unsqueeze(1)
    examined = chance[:, :-1] * (column[:-1] < last)
    cut = chance.gather(1, last).squeeze(1) * (end < size)
    return {
        "steps": torch.ones(len(steps), dtype=torch.float64),
        "emitted": (chance * (column <= end.unsqueeze(1))).sum(1),
        "accepted": (chance[:, 1:] * (column[1:] <= last)).sum(1),
        "drafted": size - cut * (size - last.squeeze(1)),
        "examined": examined.sum(1),
        "rejection": (examined * table[..., 1]).sum(1),
        "nucleus_excess": (examined * table[..., 2]).sum(1),
        "deviation": (examined * table[..., 3]).sum(1),
    }
