"""The standard rule, or what comes near the target's most probable token."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from attrs.validators import gt, le
from torch import Tensor

from specdec.probability import at as gather
from specdec.theory import standard_acceptance
from specdec.verifier import FastAccept, Place, PointwiseVerifier


@final
@frozen(kw_only=True)
class MarginOr(PointwiseVerifier, FastAccept):
    """Keeps what the standard rule keeps, or what is within a factor of the target's largest probability.

    Formula: a(x) = 1 if p(x) >= factor max p, else min(1, p(x)/q(x)); replacement norm((p - q)+); bonus p.
    Source: the third token-specific rule of Narasimhan et al., arXiv:2405.19261, used beside the standard rule instead
    of in its place, as in MTPLX. The paper's alpha is 1 - factor.
    Guarantee: at one position the total variation from the target is the sum of (q - p)+ over the kept set.
    Cost: O(V) per draft node.

    Attributes:
        factor: the least share of the largest probability; MTPLX suggests alpha 0.95.
    """

    factor: float = field(default=0.05, validator=[gt(0.0), le(1.0)])

    paper = "arXiv:2405.19261"
    family = "standard_or_set"
    exactness = "lossy"
    dominates_standard = True

    def acceptance(self, at: Place) -> Tensor:
        return torch.where(at.p >= self._least(at), 1.0, standard_acceptance(at.p, at.q.dense()))

    def accept_at(self, at: Place) -> Tensor:
        p = gather(at.p, at.token)
        return torch.where(p >= self._least(at).squeeze(-1), 1.0, standard_acceptance(p, at.q.at(at.token)))

    def _least(self, at: Place) -> Tensor:
        return self.factor * at.p.amax(-1, keepdim=True)
