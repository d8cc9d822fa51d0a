"""Mentored decoding: the largest acceptance within a divergence of the target."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from attrs.validators import ge
from torch import Tensor

from specdec.theory import standard_acceptance
from specdec.verifier import Place, PointwiseVerifier

_HALVINGS = 50


@final
@frozen(kw_only=True)
class Mentored(PointwiseVerifier):
    """Accepts as much as any law within a Kullback-Leibler divergence of the target allows.

    Formula: the output law is q held between p/beta and p/alpha, with alpha <= 1 <= beta such that it sums to 1 and
    KL(p || out) = divergence: a(x) = min(1, p(x) / (alpha q(x))), replacement norm((p/beta - q)+); bonus p. alpha is
    bisected at every position, and beta follows from it in closed form over the tokens sorted by q/p.
    Source: Tran-Thien, "An optimal lossy variant of speculative decoding" (2023) and its notebook, which tries 0.1,
    0.15 and 0.2 and stops within a fifth of the budget. Here the search goes on to the rounding, always from below.
    Guarantee: KL(p || out) <= divergence; divergence 0 is the standard rule. At one position the total variation from
    the target is the acceptance beyond the standard rule's.
    Cost: O(V log V) per draft node for one sort.

    Attributes:
        divergence: the largest KL(p || out) of a position, in nats.
    """

    divergence: float = field(default=0.1, validator=ge(0.0))

    family = "mixture"
    exactness = "lossy"
    dominates_standard = True
    trees = False  # what a rejected sibling leaves is published for a chain only

    def acceptance(self, at: Place) -> Tensor:
        q = at.q.dense()
        return standard_acceptance(self._bounds(at.p, q)[0] * at.p, q)

    def correct(self, at: Place) -> Tensor:
        q = at.q.dense()
        _, least = self._bounds(at.p, q)
        return (torch.where(least > 0, least, 1.0) * at.p - q).clamp(min=0)

    def _bounds(self, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """1/alpha and 1/beta, [..., 1] each: how many times p the output law is at most and at least."""
        dtype, p, q = p.dtype, p.double(), q.double()
        ratio, order = torch.where(p > 0, q / torch.where(p > 0, p, 1.0), torch.inf).sort(dim=-1)
        mass, drafted = p.gather(-1, order), q.gather(-1, order)
        terms = torch.where((mass > 0) & (ratio > 0), mass * ratio.log(), 0.0)
        masses, draws, logs = (_before(values) for values in (mass, drafted, terms))
        # What it takes to lift all tokens before one to its ratio.
        lift = torch.where(mass > 0, ratio * masses[..., 1:] - draws[..., 1:], torch.inf)
        unreached = ((mass > 0) & (ratio == 0)).any(-1, keepdim=True)

        def solve(most: Tensor) -> tuple[Tensor, Tensor]:
            """1/beta and the divergence that follow from 1/alpha."""
            high = torch.searchsorted(ratio, most, right=True)
            rest = masses[..., -1:] - masses.gather(-1, high)
            rejected = (draws[..., -1:] - draws.gather(-1, high) - most * rest).clamp(min=0)
            low = torch.searchsorted(lift, rejected)
            lifted = masses.gather(-1, low)
            least = torch.where(low > 0, (rejected + draws.gather(-1, low)) / torch.where(low > 0, lifted, 1.0), 0.0)
            held = torch.where(low > 0, lifted * least.log(), torch.where(unreached, -torch.inf, 0.0))
            return least, -(held + logs.gather(-1, high) - logs.gather(-1, low) + rest * most.log())

        most = torch.where(mass > 0, ratio, 1.0).amax(-1, keepdim=True).clamp(min=1.0)
        if not self.divergence:  # near 1 the divergence grows with the square: rounding would hide a step of 1e-8
            most = torch.ones_like(most)
        under = torch.where(solve(most)[1] <= self.divergence, most, 1.0)
        for _ in range(_HALVINGS):
            middle = (under * most).sqrt()
            fits = solve(middle)[1] <= self.divergence
            under, most = torch.where(fits, middle, under), torch.where(fits, most, middle)
        return under.to(dtype), solve(under)[0].to(dtype)


def _before(values: Tensor) -> Tensor:
    """Sums of the first 0 to V values, [..., 1+V]."""
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))
