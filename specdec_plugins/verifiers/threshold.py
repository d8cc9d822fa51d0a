"""The two thresholds of SGLang."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from attrs.validators import gt, le
from torch import Tensor

from specdec.probability import at as gather
from specdec.probability import without
from specdec.verifier import Exactness, FastAccept, Place, PointwiseVerifier


@final
@frozen(kw_only=True)
class Threshold(PointwiseVerifier, FastAccept):
    """Keeps a draft token that is probable enough by itself, or with its probability over a threshold.

    Formula: a(x) = 1 if p(x) >= threshold_single, else min(1, p(x) / threshold_acc); replacement norm(p without x);
    bonus p. This is a chain, where every level has one child: over siblings SGLang compares one number with their
    summed probability, which is not done here.
    Source: `speculative_accept_threshold_single` and `speculative_accept_threshold_acc` of SGLang.
    Guarantee: lossless with both at 1, for any drafter, as `sample_match`. Below 1 none; the draft's law is never
    looked at, so a token the standard rule would keep can be rejected.
    Cost: O(1) per draft node, no draft law.

    Attributes:
        threshold_single: probability from which a token is kept for certain.
        threshold_acc: what p(x) is divided by; SGLang allows nothing below 1e-9.
    """

    threshold_single: float = field(default=1.0, validator=[gt(0.0), le(1.0)])
    threshold_acc: float = field(default=1.0, validator=[gt(0.0), le(1.0)])

    family = "other"

    @property
    def exactness(self) -> Exactness:
        return "lossless" if self.threshold_single == self.threshold_acc == 1.0 else "lossy"

    def acceptance(self, at: Place) -> Tensor:
        return self._keep(at.p)

    def accept_at(self, at: Place) -> Tensor:
        return self._keep(gather(at.p, at.token))

    def correct(self, at: Place) -> Tensor:
        return without(at.p, at.token)

    def law(self, at: Place) -> Tensor:
        q, keep = at.q.dense(), self._keep(at.p)
        # Each rejected x shares its mass out over the others: p(y) / (1 - p(x)). Nothing of p(x) = 1 is rejected.
        shared = q * (1 - keep) / torch.where(at.p < 1, 1 - at.p, 1.0)
        return q * keep + at.p * (shared.sum(-1, keepdim=True) - shared)

    def _keep(self, p: Tensor) -> Tensor:
        share = (p / max(self.threshold_acc, 1e-9)).clamp(max=1.0)
        return torch.where(p >= self.threshold_single, 1.0, share)
