"""Recursive rejection sampling over siblings."""

from __future__ import annotations

from typing import final

from attrs import frozen
from torch import Tensor

from specdec.probability import at as gather
from specdec.theory import standard_acceptance
from specdec.verifier import FastAccept, Place, PointwiseVerifier


@final
@frozen(kw_only=True)
class Tree(PointwiseVerifier, FastAccept):
    """Tries sampled children one after the other by the standard rule, each against what the ones before left of p.

    Formula: p_1 = p; child j is kept with probability min(1, p_j(x)/q_j(x)), else p_{j+1} = norm((p_j - q_j)+); after
    the last one p_{k+1} follows. q_j is what the drafter drew child j from: q again with replacement, q without the
    siblings before it otherwise; both are in the law it hands over.
    Source: SpecInfer, arXiv:2305.09781 (with replacement); Sequoia, arXiv:2402.12374 (without).
    Guarantee: the output law is the target's. `standard` does the same where it meets a tree; this rule refuses
    drafters without a law, for which `tree_target` keeps as much.
    Cost: O(V) per draft node.
    """

    paper = "arXiv:2305.09781"
    family = "lossless"
    exactness = "lossless"
    dominates_standard = True
    needs = frozenset({"draft_law"})

    def acceptance(self, at: Place) -> Tensor:
        return standard_acceptance(at.p, at.q.dense())

    def accept_at(self, at: Place) -> Tensor:
        return standard_acceptance(gather(at.p, at.token), at.q.at(at.token))
