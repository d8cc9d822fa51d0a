"""Speculative cascades."""

from __future__ import annotations

from typing import Literal, final

import torch
from attrs import field, frozen
from attrs.validators import ge, in_, le
from torch import Tensor

from specdec.probability import total_variation
from specdec.theory import standard_acceptance
from specdec.verifier import Need, Place, PointwiseVerifier


@final
@frozen(kw_only=True)
class Cascade(PointwiseVerifier):
    """Decodes a cascade of the two models exactly: the draft's law where it is good enough, the target's elsewhere.

    Formula: pi is q or p position by position or token by token; a(x) = min(1, pi(x)/q(x)), replacement norm((pi -
    q)+); bonus p. `opt`: pi = p if max q < max p - alpha TV(p, q), else q. `token` (V3): tokens of p(v) < (1 - alpha)
    max p are deferred, pi(v) = q(v) for the others, and p shares out what q gave to the deferred.
    Source: Narasimhan et al., arXiv:2405.19261, OPT and the third token-specific rule; alpha is swept, none is a
    default.
    Guarantee: the output law of a drafted position is pi. With `opt` that is either the draft's law, nothing rejected
    and the total variation R, or the target's by the standard rule; it reaches what q reaches, also tokens of p(x) = 0,
    and it needs the law of the draft, as max q of a point mass is 1.
    Cost: O(V) per draft node.

    Attributes:
        defer: `opt` decides for a whole position, `token` for each token.
        alpha: how much worse than the target the draft may be.
    """

    defer: Literal["opt", "token"] = field(default="opt", validator=in_(("opt", "token")))
    alpha: float = field(default=0.5, validator=[ge(0.0), le(1.0)])

    paper = "arXiv:2405.19261"
    family = "mixture"
    exactness = "own_target"
    trees = False  # pi of a later sibling is published by nobody

    @property
    def dominates_standard(self) -> bool:
        return self.defer == "opt"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"draft_law"}) if self.defer == "opt" else frozenset()

    def acceptance(self, at: Place) -> Tensor:
        q = at.q.dense()
        return standard_acceptance(self._own(at.p, q), q)

    def correct(self, at: Place) -> Tensor:
        q = at.q.dense()
        drawn = (q > 0).any(-1, keepdim=True)  # nowhere at the end of a draft: there p follows
        return (torch.where(drawn, self._own(at.p, q), at.p) - q).clamp(min=0)

    def law(self, at: Place) -> Tensor:
        return self._own(at.p, at.q.dense())

    def _own(self, p: Tensor, q: Tensor) -> Tensor:
        highest = p.amax(-1, keepdim=True)
        if self.defer == "opt":
            gain = highest - self.alpha * total_variation(p, q).unsqueeze(-1)
            return torch.where(q.amax(-1, keepdim=True) < gain, p, q)
        deferred = torch.where(p < (1 - self.alpha) * highest, q, 0.0)
        return q - deferred + p * deferred.sum(-1, keepdim=True)
