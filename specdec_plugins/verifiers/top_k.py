"""Membership in the target's most probable tokens."""

from __future__ import annotations

from typing import final

from attrs import field, frozen
from attrs.validators import ge, in_
from torch import Tensor

from specdec.probability import at as gather
from specdec.probability import top
from specdec.theory import replacement
from specdec.verifier import FastAccept, Place, PointwiseVerifier, Replacement


@final
@frozen(kw_only=True)
class TopK(PointwiseVerifier, FastAccept):
    """Keeps a draft token that is among the target's k most probable ones; never looks at the draft's law.

    Formula: a(x) = 1 if fewer than k tokens are more probable than x and p(x) > 0, else 0. Ties are in.
    Source: the baseline of AutoJudge (arXiv:2504.20039) and of Cactus (arXiv:2604.04987), whose k is 5.
    Guarantee: none; a token the standard rule would keep can be rejected too. What follows a rejection differs between
    systems and is an option: `target` draws from p, `argmax` is AutoJudge's, `residual` is norm((p - q)+).
    Cost: O(V) per draft node.

    Attributes:
        k: how many.
        replacement: the law after a rejection, and with `argmax` of the bonus token too.
    """

    k: int = field(default=5, validator=ge(1))
    replacement: Replacement = field(default="target", validator=in_(("target", "argmax", "residual")))

    paper = "arXiv:2504.20039"
    family = "set_only"
    exactness = "lossy"

    def acceptance(self, at: Place) -> Tensor:
        return top(at.p, self.k).to(at.p.dtype)

    def accept_at(self, at: Place) -> Tensor:
        p = gather(at.p, at.token)
        return (((at.p > p.unsqueeze(-1)).sum(-1) < self.k) & (p > 0)).to(p.dtype)

    def correct(self, at: Place) -> Tensor:
        return replacement(self.replacement, at.p, at.q)
