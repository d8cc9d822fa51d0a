"""Speculative sampling as first published."""

from __future__ import annotations

from typing import final

from attrs import frozen
from torch import Tensor

from specdec.theory import standard_acceptance
from specdec.verifier import FastAccept, Place, PointwiseVerifier


@final
@frozen(kw_only=True)
class Standard(PointwiseVerifier, FastAccept):
    """Keeps a draft token with probability min(1, p/q); after a rejection draws from the residual (p - q)+.

    Formula: a(x) = min(1, p(x)/q(x)); replacement norm((p - q)+); bonus p.
    Source: Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al., arXiv:2302.01318.
    Guarantee: the output law is the target's. With a deterministic drafter q is a point mass: a(x) = p(x).
    Cost: O(N) per row and one residual of size V.
    """

    paper = "arXiv:2211.17192"
    family = "lossless"
    exactness = "lossless"
    dominates_standard = True

    def acceptance(self, at: Place) -> Tensor:
        return standard_acceptance(at.p, at.q.dense())

    def accept_at(self, at: Place) -> Tensor:
        p = at.p.gather(-1, at.token.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return standard_acceptance(p, at.q.at(at.token))
