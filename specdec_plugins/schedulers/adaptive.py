"""A draft length that pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from itertools import accumulate
from operator import mul
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from attrs import define, field
from attrs.converters import optional
from attrs.validators import optional as if_given
from torch import Tensor

from specdec.costs import Costs
from specdec.errors import CompatibilityError
from specdec.scheduler import Scheduler
from specdec.sequence import Batch, Sequence
from specdec.types import Draft, Kept
from specdec_plugins.schedulers.acceptance import Acceptance
from specdec_plugins.schedulers.payoff import Outlook, Prices, choose

_SHARE = 0.01  # of all seconds that drafts may lose
_START, _CAP = 3.0, 64.0  # plain steps that they may lose before anything was spent, and at once after they have gained


def _plain(given: Costs | Mapping[str, Any]) -> Mapping[str, Any]:
    return given.to_dict() if isinstance(given, Costs) else given


def _tables(given: Mapping[str, Any]) -> dict[str, Costs]:
    """By drafter; the name is empty where there is one table for all."""
    if "verify" in given:
        return {"": Costs.read(given)}
    return {str(name): Costs.read(table) for name, table in given.items()}


def _readable(_: object, __: object, given: Mapping[str, Any]) -> None:
    _tables(given)


@final
@define(kw_only=True, eq=False)
class Adaptive(Scheduler):
    """Drafts as many tokens for each row as pay, 0 included, by what steps cost and by what was kept so far.

    Of all ways to draft K_b tokens for row b, a step takes the one with the most expected tokens a second,

        sum_b (1 + sum_{j <= K_b} P(token j is drafted, and kept with all before it)) / seconds(rows, longest K).

    The chances are counts of what was kept that fade: pooled by place over all rows and requests, and each row's own.
    Where no draft pays the drafter is not asked, and what it would have to read before it can draft again is in the
    price of that. What was never seen, or has faded, is believed to be kept, so that drafts are tried again; yet,
    beyond what drafts have gained, trials may not lose more than three plain steps, the reading of one prompt and 1 %
    of all seconds, unless what was seen makes it sure to pay.
    Of a draft with confidences, the end that does not pay is not verified. Whether a token is cut depends on the
    confidences of those before it and not on its own, so the law of the output stays what the rule makes it.

    Seconds are those of the table; no clock is looked at. The same table and the same texts give the same drafts. But
    these depend on the other rows and on earlier requests, and so do the tokens that are drawn at a temperature, if
    not their law. Made for chains: of a tree, it takes nodes for places.

    Cost: less than a millisecond of the host a step.

    Attributes:
        costs: seconds of steps: {draft, verify, rest, catch_up}, the first three by rows and draft tokens, the last for
            a token that the drafter has yet to read. One table, or one by each drafter's name, as in `results.json`.
            `specdec run` measures what is left out; in your own code `specdec.stopwatch.measure` does.
    """

    costs: Mapping[str, Any] | None = field(default=None, converter=optional(_plain), validator=if_given(_readable))
    _prices: Prices | None = field(init=False, default=None)
    _seen: Acceptance = field(init=False, factory=Acceptance)
    _read: WeakKeyDictionary[Sequence, int] = field(init=False, factory=WeakKeyDictionary)  # tokens, by the drafter
    _purse: float = field(init=False, default=math.nan)  # seconds that drafts may lose now
    _pace: float = field(init=False, default=0.0)  # tokens a second that the step is to bring

    @property
    def reads(self) -> bool:
        return False

    def admit(self, waiting: int, running: int, slots: int) -> int:
        return min(waiting, slots)

    def price(self, drafter: str, measure: Callable[[], Costs]) -> Costs:
        tables = _tables(self.costs or {})
        costs = tables.get("") or tables.get(drafter) or measure()
        self._prices = Prices(costs)
        return costs

    def budgets(self, rows: ListOf[Sequence], most: int) -> list[int]:
        room = [min(most, row.room) for row in rows]
        if not any(room):
            return room
        prices, seen = self._known(), self._seen
        hopes, sure, offers = seen.hopes(most), seen.sure(most), seen.offers(most)

        def gains(row: Sequence, pooled: list[float], places: int) -> tuple[float, ...]:
            return tuple(map(mul, accumulate(seen.of(row, pooled)[:places], mul), offers))

        outlooks = [
            Outlook(gains(row, hopes, places), gains(row, sure, places), self._behind(row), 1 + row.room)
            for row, places in zip(rows, room, strict=True)
        ]
        if math.isnan(self._purse):
            first = min(self._behind(row) for row in rows)
            self._purse = _START * prices.verify(len(rows), 0) + prices.catch_up(first)
        lengths, self._pace = choose(prices, outlooks, offers, self._purse)
        return lengths

    def trim(self, draft: Draft) -> Tensor:
        rows, width = draft.tokens.shape
        if draft.confidence is None or draft.parents is not None or not width:
            return draft.sizes
        prices, pooled = self._known(), self._seen.hopes(width)
        bars = []
        for place in range(width):
            # What the places from here on bring a row that comes here, and what they cost, up to each of them.
            brings = accumulate(accumulate(pooled[place:], mul))
            takes = (prices.verify(rows, end) - prices.verify(rows, place) for end in range(place + 1, width + 1))
            bars.append(min(self._pace * take / bring for take, bring in zip(takes, brings, strict=True)))
        before = torch.nn.functional.pad(draft.confidence[:, :-1].double(), (1, 0), value=1.0).cumprod(1)
        there = torch.arange(width, device=draft.sizes.device) < draft.sizes.unsqueeze(1)
        pays = (before * there).sum(0) >= torch.tensor(bars, dtype=torch.float64, device=before.device)
        return torch.minimum(draft.sizes, pays.long().cumprod(0).sum())

    def learn(self, batch: Batch, kept: Kept) -> None:
        if not math.isnan(self._purse):
            self._pay(batch, kept)
        self._seen.fade()
        for index, (row, asked) in enumerate(zip(batch.rows, batch.budget, strict=True)):
            if asked:
                self._seen.add(row, asked, kept.drafted[index], kept.examined[index], kept.accepted[index])
                self._read[row] = kept.starts[index] + kept.counts[index]

    def _pay(self, batch: Batch, kept: Kept) -> None:
        """Into the purse goes a share of the step, and what drafts gained; out of it what they lost."""
        prices, rows = self._known(), len(batch.rows)
        plain, asked = prices.verify(rows, 0), [index for index, budget in enumerate(batch.budget) if budget]
        spent = prices.verify(rows, max(kept.drafted))
        if asked:
            behind = (kept.starts[index] - self._read.get(batch.rows[index], 0) for index in asked)
            spent += prices.draft(len(asked), max(batch.budget)) + prices.catch_up(sum(behind))
            self._purse += plain * sum(map(len, kept.tokens)) / rows - spent
        self._purse = min(self._purse + _SHARE * spent, _CAP * plain)

    def _behind(self, row: Sequence) -> int:
        return row.cached - self._read.get(row, 0)

    def _known(self) -> Prices:
        if self._prices is None:
            tables = _tables(self.costs or {})
            if len(tables) != 1:
                raise CompatibilityError(
                    f"scheduler Adaptive: has costs of {len(tables)} drafters, wanted those of its own; give `costs`, "
                    "such as specdec.stopwatch.measure(target, drafter, verifier, requests)"
                )
            self._prices = Prices(*tables.values())
        return self._prices
