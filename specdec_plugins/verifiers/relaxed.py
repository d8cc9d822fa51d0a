"""Relaxed acceptance of TensorRT-LLM."""

from __future__ import annotations

from typing import final

from attrs import field, frozen
from attrs.validators import ge, in_, le
from torch import Tensor

from specdec.probability import at as gather
from specdec.probability import softened, top
from specdec.theory import replacement
from specdec.verifier import FastAccept, Place, PointwiseVerifier, Replacement


@final
@frozen(kw_only=True)
class Relaxed(PointwiseVerifier, FastAccept):
    """Keeps a draft token among the target's top few that is not far below the first.

    Formula: a(x) = 1 if fewer than top_n tokens are more probable than x and p(x) >= max p - delta, else 0. Published
    for temperature 0: where p has all its mass on one token, softmax(logits) takes its place, and a processor that
    forbids x is not heard; the processed argmax itself is always kept.
    Source: TensorRT-LLM, `use_relaxed_acceptance_for_thinking` of its multi-token prediction: there between the marks
    of a thinking phase only, here everywhere.
    Guarantee: none beyond the set. The defaults are the API's and strict, as `greedy`; top_n 10 with delta 0.6 are what
    it recommends for DeepSeek-R1.
    Cost: O(V) per draft node, no draft law.

    Attributes:
        top_n: how many tokens may be kept.
        delta: how far below the largest probability, as a difference.
        replacement: the law after a rejection, and with `argmax`, as published, of the bonus token too; `target` draws
            from p, `residual` is norm((p - q)+).
    """

    top_n: int = field(default=1, validator=ge(1))
    delta: float = field(default=0.0, validator=[ge(0.0), le(1.0)])
    replacement: Replacement = field(default="argmax", validator=in_(("target", "argmax", "residual")))

    family = "set_only"
    exactness = "lossy"
    needs = frozenset({"raw_logits"})

    def acceptance(self, at: Place) -> Tensor:
        soft = softened(at.p, at.logits)
        near = top(soft, self.top_n) & (soft >= soft.amax(-1, keepdim=True) - self.delta)
        return (near | (at.p == 1)).to(at.p.dtype)

    def accept_at(self, at: Place) -> Tensor:
        soft = softened(at.p, at.logits)
        own = gather(soft, at.token)
        near = ((soft > own.unsqueeze(-1)).sum(-1) < self.top_n) & (own >= soft.amax(-1) - self.delta) & (own > 0)
        return (near | (gather(at.p, at.token) == 1)).to(at.p.dtype)

    def correct(self, at: Place) -> Tensor:
        return replacement(self.replacement, at.p, at.q)
