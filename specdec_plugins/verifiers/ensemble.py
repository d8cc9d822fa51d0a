"""A fixed mixture of draft and target."""

from __future__ import annotations

from typing import final

from attrs import field, frozen
from attrs.validators import ge, le
from torch import Tensor

from specdec.probability import at as gather
from specdec.theory import standard_acceptance
from specdec.verifier import FastAccept, Place, PointwiseVerifier


@final
@frozen(kw_only=True)
class Ensemble(PointwiseVerifier, FastAccept):
    """Decodes a mixture of the two models exactly, by the standard rule against it.

    Formula: m = weight q + (1 - weight) p; a(x) = min(1, m(x)/q(x)), which is weight + (1 - weight) min(1, p(x)/q(x));
    replacement norm((m - q)+) = norm((p - q)+); bonus p.
    Source: DIVERSED, arXiv:2604.07622, with its static weight; the interpolation of Cactus' code uses 0.5.
    Guarantee: the output law of a drafted position is m, so its total variation from the target is weight R, and
    acceptance is 1 - (1 - weight) R. m reaches what q reaches: also tokens of p(x) = 0.
    Cost: O(1) per draft node and one residual of size V. It needs the law of the draft: a point mass has nothing to
    mix.

    Attributes:
        weight: of the draft; 0 is the standard rule, 1 keeps every draft token.
    """

    weight: float = field(default=0.3, validator=[ge(0.0), le(1.0)])

    paper = "arXiv:2604.07622"
    family = "mixture"
    exactness = "own_target"
    dominates_standard = True
    needs = frozenset({"draft_law"})

    def acceptance(self, at: Place) -> Tensor:
        q = at.q.dense()
        return self._keep(at.p, q)

    def accept_at(self, at: Place) -> Tensor:
        return self._keep(gather(at.p, at.token), at.q.at(at.token))

    def law(self, at: Place) -> Tensor:
        return self.weight * at.q.dense() + (1 - self.weight) * at.p

    def _keep(self, p: Tensor, q: Tensor) -> Tensor:
        standard = standard_acceptance(p, q)
        return (standard + self.weight * (1 - standard)) * (q > 0)
