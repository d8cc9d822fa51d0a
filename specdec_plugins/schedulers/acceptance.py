"""How likely draft tokens are to be kept, from what was kept so far: counts that fade, so that a text may change."""

from __future__ import annotations

from itertools import accumulate, zip_longest
from typing import final
from weakref import WeakKeyDictionary

from attrs import define, field

from specdec.sequence import Sequence

_FADE = 0.95  # of pooled counts, a step
_FADE_OF_A_ROW = 0.85
_HOPE = 0.5  # how many tokens the belief is worth that what was never seen is kept
_DOUBT = 2.0  # the same of the belief that it is not
_POOLED = 4.0  # how many of its own tokens a row's share of the pooled rate is worth


@final
@define(eq=False)
class Acceptance:
    """Rates by place in the draft, pooled over all rows and requests, and one rate of each row's own.

    Where nothing was seen, or all of it has faded, `hopes` believe that a draft is kept, and `sure` that it is not.
    """

    _asked: list[float] = field(init=False, factory=list)
    _offered: list[float] = field(init=False, factory=list)
    _examined: list[float] = field(init=False, factory=list)
    _accepted: list[float] = field(init=False, factory=list)
    _rows: WeakKeyDictionary[Sequence, tuple[float, float]] = field(init=False, factory=WeakKeyDictionary)

    def hopes(self, most: int) -> list[float]:
        """That the token at each of `most` places is kept if those before it are."""
        return _hopes(self._accepted, self._examined, most)

    def sure(self, most: int) -> list[float]:
        """The same, with doubt for hope."""
        counts = zip_longest(self._accepted[:most], self._examined[:most], range(most), fillvalue=0.0)
        return [accepted / (examined + _DOUBT) for accepted, examined, _ in counts]

    def offers(self, most: int) -> list[float]:
        """That a draft has a token at each of `most` places, where it was asked for."""
        return _hopes(self._offered, self._asked, most)

    def of(self, row: Sequence, pooled: list[float]) -> list[float]:
        """The chances of one row: its own rate, and the pooled ones where it has little of its own."""
        examined, accepted = self._rows.get(row, (0.0, 0.0))
        return [(accepted + _POOLED * chance) / (examined + _POOLED) for chance in pooled]

    def fade(self) -> None:
        """A step has passed."""
        for counts in (self._asked, self._offered, self._examined, self._accepted):
            counts[:] = [_FADE * count for count in counts]
        for row, (examined, accepted) in list(self._rows.items()):
            self._rows[row] = (_FADE_OF_A_ROW * examined, _FADE_OF_A_ROW * accepted)

    def add(self, row: Sequence, asked: int, offered: int, examined: int, accepted: int) -> None:
        """One draft: tokens asked for, drafted, looked at and kept."""
        for counts, upto in (
            (self._asked, asked),
            (self._offered, offered),
            (self._examined, examined),
            (self._accepted, accepted),
        ):
            counts.extend([0.0] * (upto - len(counts)))
            for place in range(upto):
                counts[place] += 1.0
        before = self._rows.get(row, (0.0, 0.0))
        self._rows[row] = (before[0] + examined, before[1] + accepted)


def _hopes(hits: list[float], trials: list[float], most: int) -> list[float]:
    """Rates by place; one that was seldom seen is taken for the one before it, and the first for 1."""
    counts = zip_longest(hits[:most], trials[:most], range(most), fillvalue=0.0)
    steps = accumulate(counts, lambda rate, of: (of[0] + _HOPE * rate) / (of[1] + _HOPE), initial=1.0)
    return list(steps)[1:]
