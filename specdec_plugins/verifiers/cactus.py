"""Constrained acceptance speculative sampling."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from attrs.validators import ge
from torch import Tensor
from torch.nn.functional import pad

from specdec.probability import FALLBACK_MASS
from specdec.probability import at as gather
from specdec.theory import standard_acceptance
from specdec.verifier import FastAccept, Place, PointwiseVerifier


@final
@frozen(kw_only=True)
class Cactus(PointwiseVerifier, FastAccept):
    """Keeps a draft token as if the target thought more of it, by an amount that a divergence budget allows.

    Formula: h(x) = min(1, p(x) + sqrt(2 delta p(x) (1 - p(x)))); a(x) = min(1, h(x)/q(x)). After rejecting x the target
    has h(x) at x and p(y) (1 - h(x)) / (1 - p(x)) elsewhere, and its residual over q follows; bonus p.
    Source: arXiv:2604.04987 and its released code; delta 1 is its example, no default is published.
    Guarantee: delta 0 is the standard rule. At one position the total variation from the target is the acceptance
    beyond the standard rule's.
    Cost: O(1) per draft node and one residual of size V; O(V log V) for its law.

    Attributes:
        delta: the divergence budget, in nats.
    """

    delta: float = field(default=1.0, validator=ge(0.0))

    paper = "arXiv:2604.04987"
    family = "mixture"
    exactness = "lossy"
    dominates_standard = True
    trees = False  # what a rejected sibling leaves is published for a chain only

    def acceptance(self, at: Place) -> Tensor:
        return standard_acceptance(self._raised(at.p), at.q.dense())

    def accept_at(self, at: Place) -> Tensor:
        return standard_acceptance(self._raised(gather(at.p, at.token)), at.q.at(at.token))

    def correct(self, at: Place) -> Tensor:
        chosen = gather(at.p, at.token).unsqueeze(-1)
        others = (1 - self._raised(chosen)) / torch.where(chosen < 1, 1 - chosen, 1.0)
        # The rejected token has more mass under q than under its own target: it is in no residual.
        return (at.p * others - at.q.dense()).clamp(min=0)

    def law(self, at: Place) -> Tensor:
        p, q = at.p.double(), at.q.dense().double()
        keep = standard_acceptance(self._raised(p), q)
        # After rejecting x, y has p(y) (others(x) - q(y)/p(y))+ up to the sum of these. Both sums are taken over sorted
        # values: that over y for the mass of each residual, and that over x for the share of each y.
        others = (1 - self._raised(p)) / torch.where(p < 1, 1 - p, 1.0)
        ratio = torch.where(p > 0, q / torch.where(p > 0, p, 1.0), torch.inf)
        mass = _above(others, ratio, p)
        lost = q * (1 - keep)
        share = torch.where(mass > FALLBACK_MASS, lost / mass, 0.0)
        unshared = torch.where(mass > FALLBACK_MASS, 0.0, lost).sum(-1, keepdim=True)
        return (q * keep + p * (_above(-ratio, -others, share) + unshared)).to(at.p.dtype)

    def _raised(self, p: Tensor) -> Tensor:
        return (p + (2 * self.delta * p * (1 - p)).clamp(min=0).sqrt()).clamp(max=1.0)


def _above(values: Tensor, levels: Tensor, weights: Tensor) -> Tensor:
    """The sum over i of weights_i (value - levels_i)+ for each value; all [..., V]."""
    ordered, order = levels.sort(dim=-1)
    weight = weights.gather(-1, order)
    product = torch.where(weight > 0, weight * ordered, 0.0)
    counts = torch.searchsorted(ordered, values)
    weight, product = (pad(part.cumsum(-1), (1, 0)).gather(-1, counts) for part in (weight, product))
    return torch.where(weight > 0, values * weight - product, 0.0).clamp(min=0)
