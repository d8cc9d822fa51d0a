"""Which draft lengths of a step emit most tokens a second: a pure function of costs and chances."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import final

from attrs import define, field, frozen

from specdec.costs import Costs

_HORIZON = 16  # steps over which a drafter's catching up may pay


@final
@define(eq=False)
class Prices:
    """Seconds of the parts of steps, each looked up once."""

    costs: Costs
    _verify: dict[tuple[int, int], float] = field(init=False, factory=dict)
    _draft: dict[tuple[int, int], float] = field(init=False, factory=dict)

    def verify(self, rows: int, width: int) -> float:
        """Verification and rest of a step whose longest draft has `width` tokens; 0 is a plain step."""
        if (rows, width) not in self._verify:
            self._verify[rows, width] = self.costs.step(rows, width, asked=False)
        return self._verify[rows, width]

    def draft(self, rows: int, width: int) -> float:
        """A draft of `width` tokens for some rows."""
        if not rows or not width:
            return 0.0
        if (rows, width) not in self._draft:
            self._draft[rows, width] = self.costs.parts(rows, width)[0]
        return self._draft[rows, width]

    def catch_up(self, tokens: int) -> float:
        """What a drafter has to read first."""
        return self.costs.catch_up * tokens


@final
@frozen
class Outlook:
    """A row before a step.

    Attributes:
        gains: that the token at each place is drafted, and kept with all before it; as many as there is room for.
        missed: tokens that the drafter has not read, because it was not asked.
    """

    gains: tuple[float, ...]
    missed: int


def choose(prices: Prices, rows: Sequence[Outlook], offers: Sequence[float], purse: float) -> tuple[list[int], float]:
    """The draft lengths, and the tokens a second that they are expected to bring.

    Args:
        prices: of steps.
        rows: all that decode.
        offers: that the drafter has a token for each place.
        purse: seconds that the step may lose if nothing is kept.
    """
    batch, plain = len(rows), prices.verify(len(rows), 0)
    left = max(1, *(len(row.gains) for row in rows))
    pace, chosen, width = batch / plain, 0, 0
    # Rows that the drafter is least behind with come first: how many of them, and how many tokens?
    order = sorted((index for index in range(batch) if rows[index].gains), key=lambda index: rows[index].missed)
    emitted, behind = [float(batch)] * (left + 1), 0
    for count, index in enumerate(order, 1):
        row = rows[index]
        behind += row.missed
        own = [0.0, *accumulate(row.gains)]
        emitted = [tokens + own[min(at, len(row.gains))] for at, tokens in enumerate(emitted)]
        if count < len(order) and rows[order[count]].missed == row.missed:
            continue
        reading, verified = prices.catch_up(behind), plain
        for at in range(1, left + 1):
            # The longest draft is this long if one of the rows gets one.
            some = 1.0 - (1.0 - offers[at - 1]) ** count
            verified += some * (prices.verify(batch, at) - prices.verify(batch, at - 1))
            drafted = prices.draft(count, at)
            lost = drafted + reading + prices.verify(batch, at) - plain
            found = emitted[at] / (drafted + reading / min(_HORIZON, left) + verified)
            if found > pace and lost <= purse:
                pace, chosen, width = found, count, at
    lengths = [0] * batch
    for index in order[:chosen]:
        lengths[index] = min(width, len(rows[index].gains))
    if chosen > 1:
        _shorten(lengths, rows, pace * (prices.draft(chosen, width) - prices.draft(chosen - 1, width)) / width)
    return lengths, pace


def _shorten(lengths: list[int], rows: Sequence[Outlook], price: float) -> None:
    """Leave out what costs the drafter more than it brings; a step as long as its longest row is paid anyway.

    Args:
        lengths: of drafts; changed in place.
        rows: all that decode.
        price: of one more row for one more token, in tokens.
    """
    for index, row in enumerate(rows):
        while lengths[index] and row.gains[lengths[index] - 1] < price:
            lengths[index] -= 1
