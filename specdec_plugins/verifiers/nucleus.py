"""Nucleus speculative decoding (NSD)."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from attrs.validators import gt, le
from torch import Tensor

from specdec.probability import at as gather
from specdec.probability import mass_above, nucleus
from specdec.theory import standard_acceptance
from specdec.verifier import FastAccept, Place, PointwiseVerifier


@final
@frozen(kw_only=True)
class Nucleus(PointwiseVerifier, FastAccept):
    """Keeps what the standard rule keeps, or what lies in the target's top-p nucleus.

    Formula: a(x) = 1 if x in S else min(1, p(x)/q(x)); replacement norm((p - q)+); bonus p. S holds x when the tokens
    more probable than x sum to less than theta and p(x) > 0: the crossing token is in, ties are in, nothing is sorted.
    Source: arXiv:2610.07822.
    Guarantee: at one position the total variation from the target is E, the sum of (q - p)+ over S, and E <= R. With a
    deterministic drafter every drafted nucleus token is kept.
    Cost: O(V) per draft node.

    Attributes:
        theta: mass of the nucleus.
    """

    theta: float = field(default=0.95, validator=[gt(0.0), le(1.0)])

    paper = "arXiv:2610.07822"
    family = "standard_or_set"
    exactness = "lossy"
    dominates_standard = True

    def acceptance(self, at: Place) -> Tensor:
        standard = standard_acceptance(at.p, at.q.dense())
        return torch.where(nucleus(at.p, self.theta), torch.ones_like(standard), standard)

    def accept_at(self, at: Place) -> Tensor:
        p = gather(at.p, at.token)
        standard = standard_acceptance(p, at.q.at(at.token))
        member = (mass_above(at.p, p) < self.theta) & (p > 0)
        return torch.where(member, torch.ones_like(standard), standard)
