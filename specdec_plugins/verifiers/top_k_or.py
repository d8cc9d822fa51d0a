"""The standard rule, or the target's most probable tokens."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from attrs.validators import ge
from torch import Tensor

from specdec.probability import at as gather
from specdec.probability import top
from specdec.theory import standard_acceptance
from specdec.verifier import FastAccept, Place, PointwiseVerifier


@final
@frozen(kw_only=True)
class TopKOr(PointwiseVerifier, FastAccept):
    """Keeps what the standard rule keeps, or what is among the target's k most probable tokens.

    Formula: a(x) = 1 if fewer than k tokens are more probable than x and p(x) > 0, else min(1, p(x)/q(x)); replacement
    norm((p - q)+); bonus p. Ties are in.
    Source: a control for rules of this form, such as `nucleus`, at equal acceptance; no publication of its own.
    Guarantee: at one position the total variation from the target is the sum of (q - p)+ over the k tokens.
    Cost: O(V) per draft node.

    Attributes:
        k: how many; 10 is what the relaxed acceptance of TensorRT-LLM looks at.
    """

    k: int = field(default=10, validator=ge(1))

    family = "standard_or_set"
    exactness = "lossy"
    dominates_standard = True

    def acceptance(self, at: Place) -> Tensor:
        standard = standard_acceptance(at.p, at.q.dense())
        return torch.where(top(at.p, self.k), 1.0, standard)

    def accept_at(self, at: Place) -> Tensor:
        p = gather(at.p, at.token)
        member = ((at.p > p.unsqueeze(-1)).sum(-1) < self.k) & (p > 0)
        return torch.where(member, 1.0, standard_acceptance(p, at.q.at(at.token)))
