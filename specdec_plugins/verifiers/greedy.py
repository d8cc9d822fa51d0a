"""Exact match with the argmax."""

from __future__ import annotations

from typing import final

from attrs import frozen
from torch import Tensor

from specdec.probability import one_hot
from specdec.verifier import FastAccept, Place, PointwiseVerifier


@final
@frozen(kw_only=True)
class Greedy(PointwiseVerifier, FastAccept):
    """Keeps a draft token when it is the most probable one; otherwise the most probable one follows.

    Formula: a(x) = 1 if x = argmax p else 0; replacement and bonus argmax p. The lowest id wins a tie.
    Source: Stern et al., arXiv:1811.03115.
    Guarantee: the output is the target's greedy one, at any temperature. Above 0 that is another law than the target's:
    use `standard` there.
    Cost: O(V) per draft node, no draft law.
    """

    paper = "arXiv:1811.03115"
    family = "lossless"
    exactness = "own_target"
    replacement = "argmax"
    trees = True

    def acceptance(self, at: Place) -> Tensor:
        return one_hot(at.p.argmax(-1), at.p.shape[-1], at.p.dtype)

    def accept_at(self, at: Place) -> Tensor:
        return (at.p.argmax(-1) == at.token).to(at.p.dtype)

    def correct(self, at: Place) -> Tensor:
        return one_hot(at.p.argmax(-1), at.p.shape[-1], at.p.dtype)

    def law(self, at: Place) -> Tensor:
        return one_hot(at.p.argmax(-1), at.p.shape[-1], at.p.dtype)
