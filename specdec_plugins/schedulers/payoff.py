"""Which draft lengths of a step emit most tokens a second: a pure function of costs and chances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import final

from attrs import define, field, frozen

from specdec.costs import Costs

_HORIZON = 32  # steps over which a drafter's catching up may pay


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
        hopes: that the token at each place is drafted, and kept with all before it, where little is known for certain
            to be so; as many as there is room for.
        sure: the same, but what is not known is not believed.
        missed: tokens that the drafter has not read, because it was not asked.
        left: tokens that it may still emit.
    """

    hopes: tuple[float, ...]
    sure: tuple[float, ...]
    missed: int
    left: int


@final
@frozen
class _Way:
    """A way to take the step: drafts of `width` tokens for the first `count` rows, and what that is expected to bring.

    Attributes:
        hoped: tokens a second, by hopes; what the drafter has to read is paid over the steps to come.
        sure: the same, by what is sure.
        lost: seconds beyond a plain step.
    """

    count: int
    width: int
    hoped: float
    sure: float
    lost: float


def choose(prices: Prices, rows: Sequence[Outlook], offers: Sequence[float], purse: float) -> tuple[list[int], float]:
    """The draft lengths, and the tokens a second that they are expected to bring.

    The best way is taken whose loss, if nothing is kept, is in the purse, or that is sure to pay. Where there is hope
    for others only, because the drafter would have much to read, one row is tried.

    Args:
        prices: of steps.
        rows: all that decode.
        offers: that the drafter has a token for each place.
        purse: seconds that the step may lose.
    """
    order = sorted((index for index, row in enumerate(rows) if row.hopes), key=lambda index: rows[index].missed)
    plain = len(rows) / prices.verify(len(rows), 0)
    ways = list(_ways(prices, rows, order, offers))
    paying = [way for way in ways if way.hoped > plain and (way.lost <= purse or way.sure > plain)]
    lengths = [0] * len(rows)
    if paying:
        best = max(paying, key=lambda way: way.hoped)
        _fill(lengths, rows, order, best)
        if best.count > 1:
            one = prices.draft(best.count, best.width) - prices.draft(best.count - 1, best.width)
            _shorten(lengths, rows, best.hoped * one / best.width)
        return lengths, best.hoped
    trials = [way for way in ways if way.count == 1 and way.lost <= purse]
    if trials and any(way.hoped > plain for way in ways):
        # What one row has to read is paid once; longer drafts then say more for little more.
        _fill(lengths, rows, order, max(trials, key=lambda way: way.width / max(way.lost, 1e-9)))
    return lengths, plain


def _ways(prices: Prices, rows: Sequence[Outlook], order: Sequence[int], offers: Sequence[float]) -> Iterator[_Way]:
    """Rows that the drafter is least behind with come first: one of them, and all that are no further behind."""
    batch, most = len(rows), max((len(row.hopes) for row in rows), default=0)
    last = max((row.left for row in rows), default=0)
    hoped, sure, missed = [float(batch)] * (most + 1), [float(batch)] * (most + 1), 0
    for count, index in enumerate(order, 1):
        row = rows[index]
        missed += row.missed
        _add(hoped, row.hopes)
        _add(sure, row.sure)
        if 1 < count < len(order) and rows[order[count]].missed == row.missed:
            continue
        reading, verified = prices.catch_up(missed), prices.verify(batch, 0)
        for width in range(1, most + 1):
            # The longest draft is this long if one of the rows gets one.
            some = 1.0 - (1.0 - offers[width - 1]) ** count
            verified += some * (prices.verify(batch, width) - prices.verify(batch, width - 1))
            steps = max(1.0, min(_HORIZON, last * batch / hoped[width]))
            seconds = prices.draft(count, width) + verified + reading / steps
            yield _Way(
                count=count,
                width=width,
                hoped=hoped[width] / seconds,
                sure=sure[width] / seconds,
                lost=prices.draft(count, width) + reading + prices.verify(batch, width) - prices.verify(batch, 0),
            )


def _add(emitted: list[float], chances: Sequence[float]) -> None:
    """What a row brings by width of its draft, added in place."""
    own = [0.0, *accumulate(chances)]
    emitted[:] = [tokens + own[min(width, len(chances))] for width, tokens in enumerate(emitted)]


def _fill(lengths: list[int], rows: Sequence[Outlook], order: Sequence[int], way: _Way) -> None:
    for index in order[: way.count]:
        lengths[index] = min(way.width, len(rows[index].hopes))


def _shorten(lengths: list[int], rows: Sequence[Outlook], price: float) -> None:
    """Leave out what costs the drafter more than it brings; a step as long as its longest row is paid anyway.

    Args:
        lengths: of drafts; changed in place.
        rows: all that decode.
        price: of one more row for one more token, in tokens.
    """
    for index, row in enumerate(rows):
        while lengths[index] and row.hopes[lengths[index] - 1] < price:
            lengths[index] -= 1
