"""Following a sample of the target through a tree."""

from __future__ import annotations

from typing import final

from attrs import frozen
from torch import Tensor

from specdec.probability import at as gather
from specdec.probability import without
from specdec.verifier import FastAccept, Place, PointwiseVerifier


@final
@frozen(kw_only=True)
class TreeTarget(PointwiseVerifier, FastAccept):
    """Keeps the child that the target itself would have drawn, if there is one; never looks at the draft's law.

    Formula: children are tried in order, each kept with the probability that what is left of p gives it, or else taken
    out of p; what is left after the last one follows. That is t ~ p, and the child t where there is one.
    Source: SpecInfer's naive sampling, arXiv:2305.09781; EAGLE-2, arXiv:2406.16858; `target only` in SGLang.
    Guarantee: the output law is the target's, whatever the children and however they were chosen. On a chain it is
    `sample_match`. Made for the most probable tokens as children; sampled ones waste less under `tree`.
    Cost: O(V) per draft node, no draft law.
    """

    paper = "arXiv:2305.09781"
    family = "lossless"
    exactness = "lossless"
    replacement = "target"
    trees = True
    own_siblings = True

    def acceptance(self, at: Place) -> Tensor:
        return at.p

    def accept_at(self, at: Place) -> Tensor:
        return gather(at.p, at.token)

    def correct(self, at: Place) -> Tensor:
        return without(at.p, at.token)

    def law(self, at: Place) -> Tensor:
        return at.p
