"""Margin-aware verification."""

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
class Mars(PointwiseVerifier, FastAccept):
    """Keeps either of the target's two best tokens where they are close; elsewhere the standard rule decides.

    Formula: z1 >= z2 are the two largest raw logits. If z2/z1 > ratio, a(x) = 1 for the tokens of logit at least z2 and
    0 for the others, and p follows a rejection; else a(x) = min(1, p(x)/q(x)) and norm((p - q)+) follows. Nothing is
    close where z1 <= 0, as a ratio means nothing there. Bonus p; ties are in; p(x) = 0 is never kept.
    Source: arXiv:2601.15498 and its released code, which has 0.9 and relaxes above temperature 0 only: so here, for at
    temperature 0 the second token has p(x) = 0.
    Guarantee: none; a third token that the standard rule would keep is rejected. The ratio changes when a model adds a
    constant to its logits, which changes nothing in its law.
    Cost: O(V) per draft node.

    Attributes:
        ratio: of the second logit to the first, above which they are close.
    """

    ratio: float = field(default=0.9, validator=[gt(0.0), le(1.0)])

    paper = "arXiv:2601.15498"
    family = "other"
    exactness = "lossy"
    needs = frozenset({"raw_logits"})

    def acceptance(self, at: Place) -> Tensor:
        return self._keep(at, at.p, at.q.dense(), at.logits)

    def accept_at(self, at: Place) -> Tensor:
        chosen = (gather(at.p, at.token), at.q.at(at.token), gather(at.logits, at.token))
        return self._keep(at, *(value.unsqueeze(-1) for value in chosen)).squeeze(-1)

    def correct(self, at: Place) -> Tensor:
        close, _ = self._best(at)
        return torch.where(close, at.p, (at.p - at.q.dense()).clamp(min=0))

    def _keep(self, at: Place, p: Tensor, q: Tensor, logits: Tensor) -> Tensor:
        close, second = self._best(at)
        member = ((logits >= second) & (p > 0)).to(p.dtype)
        return torch.where(close, member, standard_acceptance(p, q))

    def _best(self, at: Place) -> tuple[Tensor, Tensor]:
        """Whether the two best are close, and the second logit, [..., 1] each."""
        best = at.logits.topk(2, dim=-1).values
        first, second = best[..., :1], best[..., 1:]
        # As a product and not a quotient this is never true for first <= 0, since second <= first.
        return second > self.ratio * first, second
