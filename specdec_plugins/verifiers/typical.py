"""Typical acceptance of Medusa."""

from __future__ import annotations

from typing import final

from attrs import field, frozen
from attrs.validators import ge, gt, in_
from torch import Tensor

from specdec.probability import at as gather
from specdec.probability import entropy, one_hot
from specdec.verifier import FastAccept, Place, PointwiseVerifier, Replacement


@final
@frozen(kw_only=True)
class Typical(PointwiseVerifier, FastAccept):
    """Keeps a draft token that is not improbable for how uncertain the target is; never looks at the draft's law.

    Formula: a(x) = 1 if p(x) > min(epsilon, delta exp(-H(p))) else 0, with H(p) = -sum p log(p + 1e-5).
    Source: Cai et al., arXiv:2401.10774, section 2.3.1, and the constants of Medusa's `medusa_generate`.
    Guarantee: none; a token the standard rule would keep can be rejected too. What follows a rejection differs between
    systems and is an option: `target` draws from p, `argmax` is Medusa's default, `residual` is norm((p - q)+).
    Cost: O(V) per draft node for the entropy.

    Attributes:
        epsilon: the threshold where the target is certain.
        delta: how the threshold falls with the entropy.
        replacement: the law after a rejection, and with `argmax` of the bonus token too.
    """

    epsilon: float = field(default=0.09, validator=[gt(0.0)])
    delta: float = field(default=0.3, validator=[ge(0.0)])
    replacement: Replacement = field(default="target", validator=in_(("target", "argmax", "residual")))

    paper = "arXiv:2401.10774"
    family = "set_only"
    exactness = "lossy"

    def acceptance(self, at: Place) -> Tensor:
        return (at.p > self._threshold(at.p).unsqueeze(-1)).to(at.p.dtype)

    def accept_at(self, at: Place) -> Tensor:
        return (gather(at.p, at.token) > self._threshold(at.p)).to(at.p.dtype)

    def correct(self, at: Place) -> Tensor:
        if self.replacement == "argmax":
            return one_hot(at.p.argmax(-1), at.p.shape[-1], at.p.dtype)
        if self.replacement == "residual":
            return (at.p - at.q.dense()).clamp(min=0)
        return at.p

    def _threshold(self, p: Tensor) -> Tensor:
        return (self.delta * (-entropy(p, floor=1e-5)).exp()).clamp(max=self.epsilon)
