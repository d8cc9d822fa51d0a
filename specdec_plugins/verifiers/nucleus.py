"""Nucleus speculative decoding (NSD)."""

from __future__ import annotations

from typing import Literal, final

import torch
from attrs import field, frozen
from attrs.validators import ge, gt, in_, le, optional
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
    Source: arXiv:2610.07822. `budget`, `max_deviation` and `children` go beyond it.
    Guarantee: at one position the total variation from the target is E, the sum of (q - p)+ over S, and E <= R. With
    `budget` a whole request's is at most that; with `max_deviation` eps it is at most 1 - (1 - eps)^T over T tokens.
    With a deterministic drafter every drafted nucleus token is kept. On a tree only the first child of a node is tried
    by this rule, which keeps the total variation at E.
    Cost: O(V) per draft node.

    Attributes:
        theta: mass of the nucleus.
        budget: most E that a request spends. A place whose E no longer fits, known from p and q before the draft token
            is looked at, is decided by the standard rule and costs nothing; cheaper ones may still come.
        max_deviation: places with a greater E are decided by the standard rule.
        children: `all` tries further siblings by this rule, too, with the nucleus of what is left of p: more is kept,
            and the total variation is then bounded by the sum over siblings of P(it is tried) times its own E.
    """

    theta: float = field(default=0.95, validator=[gt(0.0), le(1.0)])
    budget: float | None = field(default=None, validator=optional([ge(0.0)]))
    max_deviation: float | None = field(default=None, validator=optional([ge(0.0), le(1.0)]))
    children: Literal["first", "all"] = field(default="first", validator=in_(("first", "all")))

    paper = "arXiv:2610.07822"
    family = "standard_or_set"
    exactness = "lossy"
    dominates_standard = True

    @children.validator
    def _charged(self, _: object, value: str) -> None:
        if value == "all" and not (self.budget is None and self.max_deviation is None):
            raise ValueError(
                "'children' must be first with budget or max_deviation: they bound what first children cost"
            )

    @property
    def memory(self) -> int:
        return 0 if self.budget is None else 1

    @property
    def own_siblings(self) -> bool:
        return self.children == "all"

    def acceptance(self, at: Place) -> Tensor:
        q = at.q.dense()
        standard, member = standard_acceptance(at.p, q), nucleus(at.p, self.theta)
        if self._bounded:
            member = member & self._affordable(at, self._excess(at)).unsqueeze(-1)
        return torch.where(member, torch.ones_like(standard), standard)

    def accept_at(self, at: Place) -> Tensor:
        p = gather(at.p, at.token)
        standard = standard_acceptance(p, at.q.at(at.token))
        member = (mass_above(at.p, p) < self.theta) & (p > 0)
        if self._bounded:
            member = member & self._affordable(at, self._excess(at))
        return torch.where(member, torch.ones_like(standard), standard)

    def advance(self, at: Place) -> Tensor | None:
        if at.memory is None:
            return None
        excess = self._excess(at)
        return at.memory + torch.where(self._affordable(at, excess), excess, torch.zeros_like(excess)).unsqueeze(-1)

    @property
    def _bounded(self) -> bool:
        return self.budget is not None or self.max_deviation is not None

    def _excess(self, at: Place) -> Tensor:
        over = (at.q.dense() - at.p).clamp(min=0).double()
        return (over * nucleus(at.p, self.theta)).sum(-1)

    def _affordable(self, at: Place, excess: Tensor) -> Tensor:
        """Whether NSD may decide here."""
        fits = torch.ones_like(excess, dtype=torch.bool)
        if self.max_deviation is not None:
            fits = fits & (excess <= self.max_deviation)
        if self.budget is not None and at.memory is not None:
            fits = fits & (at.memory[..., 0] + excess <= self.budget)
        return fits
