"""Exact match with a sample of the target."""

from __future__ import annotations

from typing import final

from attrs import frozen
from torch import Tensor

from specdec.probability import at as gather
from specdec.probability import without
from specdec.verifier import FastAccept, Place, PointwiseVerifier


@final
@frozen(kw_only=True)
class SampleMatch(PointwiseVerifier, FastAccept):
    """Keeps a draft token when it is what the target itself would have drawn; never looks at the draft's law.

    Formula: t ~ p, x is kept when t = x, otherwise t follows. So a(x) = p(x), replacement norm(p without x); bonus p.
    Source: the sampled verification of blockwise parallel drafters such as DFlash (arXiv:2602.06036); "strict" in vLLM,
    the default of TensorRT-LLM.
    Guarantee: the output law is the target's, whatever the drafter and however wrong the law it hands over. Acceptance
    is sum p q, at most the standard rule's 1 - TV(p, q); equal to it for deterministic drafters.
    Cost: O(1) per draft node, no draft law.
    """

    paper = "arXiv:2602.06036"
    family = "lossless"
    exactness = "lossless"
    replacement = "target"

    def acceptance(self, at: Place) -> Tensor:
        return at.p

    def accept_at(self, at: Place) -> Tensor:
        return gather(at.p, at.token)

    def correct(self, at: Place) -> Tensor:
        return without(at.p, at.token)

    def law(self, at: Place) -> Tensor:
        return at.p
