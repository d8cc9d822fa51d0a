"""Recorded draft places as a rule sees them: the whole laws of a full trace, stand-ins for those of a compact one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from specdec.law import Dense, Law, PointMass
from specdec.trace import Steps
from specdec.verifier import Place

ENTRIES = 1 << 22  # probabilities looked at together
MOST = 1 << 15  # tokens that stand in for others, of one kind
ROUNDING = 1e-7  # mass of this and less is what sums may be off by


@final
@frozen(eq=False)
class Whole:
    """The places of a full trace."""

    steps: Steps
    _row: Tensor = field(init=False)
    _depth: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_row", torch.arange(len(self.steps["draft"])) + self.steps.owner)
        object.__setattr__(self, "_depth", self.steps.depth)

    def at(self, index: Tensor, memory: Tensor | None = None) -> Place:
        """The places `index` int64 [n]."""
        steps, token, row = self.steps, self.steps["draft"][index], self._row[index]
        p = steps["p"][row]
        law: Law = PointMass(token, p.shape[-1], p.dtype) if steps.law == "point" else Dense(steps["q"][index])
        logits = steps["logits"][row] if "logits" in steps.tensors else unseen(p)
        return Place(p, law, token, self._depth[index], logits, {}, memory)

    def chunks(self, index: Tensor) -> Iterable[Tensor]:
        """Parts int64 [m] of `index` int64 [n], by position in it, that may be looked at together."""
        return torch.split(torch.arange(len(index)), max(1, ENTRIES // self.steps["p"].shape[-1]))


def unseen(like: Tensor) -> Tensor:
    """What a rule gets that looks at logits and did not say so."""
    return torch.full((1,) * like.dim(), float("nan")).expand(like.shape)


@final
@frozen(eq=False)
class StandIn:
    """The places of a compact trace: kept tokens as they are, and others that stand in for those left out.

    All that is known of the tokens left out holds for those that stand in: their mass and entropy under p, their mass
    under q, their sum of (q - p)+, how much of p is on tokens more probable than the drafted one, and that none reaches
    the cut. The rest is not known, and so there are two stand-ins. In the even one p has equal tokens, and where q is
    beyond p, p is 0. In the uneven one a third of p is on tokens as large as the cut allows, the rest on smaller ones,
    and q is beyond p where p is large. Ids are numbered anew, those of the kept tokens in the same order.
    """

    steps: Steps
    uneven: bool
    _first: Tensor = field(init=False)
    _token: Tensor = field(init=False)
    _depth: Tensor = field(init=False)
    _counts: Tensor = field(init=False)  # int64 [D, 5]: kept tokens, then those of each kind that stand in
    _each: Tensor = field(init=False)  # float32 [D, 5, 2]: p and q of one token of each kind

    def __attrs_post_init__(self) -> None:
        steps = self.steps
        kept, p = steps["kept"], steps["kept_p"].double()
        first = kept.cumsum(0) - kept
        of = torch.arange(len(kept)).repeat_interleave(kept)
        drafted = (steps["ids"] == steps["draft"][of]).nonzero().flatten()  # one in every place
        above = steps["above"].index_add(0, of, p * (p > steps["drafted_p"][of]), alpha=-1)
        entropy = steps["entropy_p"].index_add(0, of, torch.special.entr(p), alpha=-1)
        kinds = self._kinds(above, entropy)
        none = torch.zeros_like(entropy)  # the kept ones are filled in
        pairs = [(none, none), *((each_p, each_q) for _, each_p, each_q in kinds)]
        for name, value in (
            ("_first", first),
            ("_token", drafted - first),
            ("_depth", steps.depth),
            ("_counts", torch.stack([kept, *(count.long() for count, _, _ in kinds)], 1)),
            ("_each", torch.stack([torch.stack(pair, 1) for pair in pairs], 1).float()),
        ):
            object.__setattr__(self, name, value)

    def at(self, index: Tensor, memory: Tensor | None = None) -> Place:
        """The places `index` int64 [n], over as many tokens as the largest of them needs."""
        steps, token, counts = self.steps, self._token[index], self._counts[index]
        total = counts.sum(1)
        width = int(total.max())
        counts = torch.cat([counts, (width - total).unsqueeze(1)], 1).flatten()
        each = torch.nn.functional.pad(self._each[index], (0, 0, 0, 1)).flatten(0, 1)
        p, q = (one.repeat_interleave(counts).view(len(index), width) for one in each.unbind(1))
        kept = steps["kept"][index]
        row = torch.arange(len(index)).repeat_interleave(kept)
        column = torch.arange(len(row)) - (kept.cumsum(0) - kept)[row]
        entry = self._first[index][row] + column
        p[row, column] = steps["kept_p"][entry]
        if steps.law == "dense":
            q[row, column] = steps["kept_q"][entry]
        law: Law = PointMass(token, width) if steps.law == "point" else Dense(q)
        return Place(p, law, token, self._depth[index], unseen(p), {}, memory)

    def chunks(self, index: Tensor) -> Iterator[Tensor]:
        """Parts int64 [m] of `index` int64 [n], by position in it, of places that are about as wide as each other."""
        width = self._counts[index].sum(1)
        order = width.argsort()
        while len(order):
            ordered = width[order]
            fits = (torch.arange(1, len(order) + 1) * ordered <= ENTRIES) & (ordered <= 64 + 2 * ordered[0])
            part, order = order.tensor_split([max(1, int(fits.sum()))])
            yield part

    def _kinds(self, above: Tensor, entropy: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each kind of token: how many, and p and q of each one, all [D].

        Args:
            above: mass of the tokens left out that are more probable than the drafted one.
            entropy: sum of -p log p over all tokens left out.
        """
        cut, tail_p, tail_q, tail_excess, drafted = (
            self.steps[name] for name in ("cut", "tail_p", "tail_q", "tail_excess", "drafted_p")
        )
        below = drafted < cut  # only then are tokens left out that are more probable
        limit = torch.where(below, drafted, cut)
        high = torch.where(below & (above > ROUNDING), above.minimum(tail_p), 0.0)
        low = tail_p - high
        common = (tail_q - tail_excess).clamp(min=0).minimum(tail_p)
        large = low / 3 if self.uneven else torch.zeros_like(low)
        lent = common.minimum(large)  # p on the tokens where q is beyond it
        large, low = large - lent, low - large
        counts = [
            torch.where(high > 0, (high / cut).floor() + 1, 0.0),
            _count(large, limit),
            _count(tail_excess + lent, cut).maximum(_count(lent, limit)),
        ]
        pairs = list(zip((high, large, lent), counts, strict=True))
        highs, larges, lents = (mass / count.clamp(min=1) for mass, count in pairs)
        spent = sum(count * torch.special.entr(mass / count.clamp(min=1)) for mass, count in pairs)
        # The mean of -log p over the rest of the mass is what the known entropy leaves for it.
        level = ((spent - entropy) / low.clamp(min=ROUNDING)).exp().minimum(limit)
        number = _count(low, level)
        lows = low / number.clamp(min=1)
        rest = tail_p - lent
        share = torch.where(rest > ROUNDING, (common - lent) / rest.clamp(min=ROUNDING), 0.0).clamp(min=0, max=1)
        return [
            (counts[0], highs, highs * share),
            (counts[1], larges.minimum(limit), larges.minimum(limit) * share),
            (number, lows.minimum(limit), lows.minimum(limit) * share),
            (counts[2], lents.minimum(limit), (tail_excess + lent) / counts[2].clamp(min=1)),
        ]


def _count(mass: Tensor, limit: Tensor) -> Tensor:
    """How many tokens share a mass, none with more than the limit, as far as that many may stand in."""
    return torch.where(mass > ROUNDING, (mass / limit.clamp(min=1e-30)).ceil(), 0.0).clamp(max=MOST)
