"""Fuzzy speculative decoding: one decision for a position, by how far apart the two models are there."""

from __future__ import annotations

from typing import Literal, final

import torch
from attrs import field, frozen
from attrs.validators import ge, in_
from torch import Tensor

from specdec.probability import entropy, total_variation
from specdec.verifier import Place, PointwiseVerifier


@final
@frozen(kw_only=True)
class Fuzzy(PointwiseVerifier):
    """Keeps whatever was drafted where the laws of draft and target are close, and nothing where they are not.

    Formula: a(x) = 1 if D(p, q) <= threshold and p(x) > 0, else 0, with D the Jensen-Shannon divergence, KL(q || p), or
    the total variation; p follows a rejection; bonus p.
    Source: Holsman et al., arXiv:2502.20704, and its code, which has the Jensen-Shannon divergence and tries 0.4; there
    p(x) = 0 is not looked at.
    Guarantee: with `tv` and no filters, the total variation from the target is at most the threshold where the draft is
    kept, and 0 elsewhere. A threshold of 0 decodes the target's law, with no token kept but where p equals q.
    Cost: O(V) per draft node. It needs the law of the draft: a point mass is far from everything.

    Attributes:
        threshold: largest divergence at which the draft is trusted, in nats (`tv`: a probability).
        divergence: which one.
    """

    threshold: float = field(default=0.4, validator=ge(0.0))
    divergence: Literal["js", "kl", "tv"] = field(default="js", validator=in_(("js", "kl", "tv")))

    paper = "arXiv:2502.20704"
    family = "other"
    exactness = "lossy"
    replacement = "target"
    needs = frozenset({"draft_law"})

    def acceptance(self, at: Place) -> Tensor:
        close = self._apart(at.p, at.q.dense()) <= self.threshold
        return (close.unsqueeze(-1) & (at.p > 0)).to(at.p.dtype)

    def correct(self, at: Place) -> Tensor:
        return at.p

    def _apart(self, p: Tensor, q: Tensor) -> Tensor:
        if self.divergence == "tv":
            return total_variation(p, q)
        if self.divergence == "js":
            return entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2
        return torch.where(q > 0, q * (q / p).log(), 0.0).sum(-1)
