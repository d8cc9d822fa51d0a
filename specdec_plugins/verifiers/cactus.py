"""Constrained acceptance speculative sampling."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from attrs.validators import ge
from torch import Tensor

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
    Cost: O(1) per draft node and one residual of size V.

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

    def _raised(self, p: Tensor) -> Tensor:
        return (p + (2 * self.delta * p * (1 - p)).clamp(min=0).sqrt()).clamp(max=1.0)
