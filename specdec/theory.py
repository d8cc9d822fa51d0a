"""Closed forms for one position: what a rule's acceptance and replacement do to the law of the emitted token.

p is the target's law, q the draft's, a the acceptance, R = TV(p, q) what the standard rule rejects (Leviathan et al.,
arXiv:2211.17192). For any a >= min(1, p/q) with the residual (p - q)+ as replacement, let e = q a - min(p, q) and
E = sum e: the output law is p + e - (E/R)(p - q)+, its total variation from p is E, and E <= R.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from specdec.law import Law
from specdec.probability import nucleus, one_hot, total_variation


def standard_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q) for every token, [..., V]; 0 where q is 0, for such a token was never drawn."""
    return torch.where(q > 0, (p / q).clamp(max=1.0), 0.0)


def replacement(kind: str, p: Tensor, q: Law) -> Tensor:
    """What follows a rejection, up to a constant, [..., V]: p ("target"), all on its mode ("argmax"), or (p - q)+."""
    if kind == "target":
        return p
    if kind == "argmax":
        return one_hot(p.argmax(-1), p.shape[-1], p.dtype)
    return (p - q.dense()).clamp(min=0)


def rejection(p: Tensor, q: Tensor) -> Tensor:
    """R, the probability that the standard rule rejects: TV(p, q), [...]."""
    return (q - p).clamp(min=0).sum(-1)


def excess(p: Tensor, q: Tensor, acceptance: Tensor) -> Tensor:
    """E, the acceptance beyond the standard rule's: sum of q a - min(p, q), [...]."""
    return (q * acceptance - torch.minimum(p, q)).sum(-1)


def nucleus_excess(p: Tensor, q: Tensor, theta: float) -> Tensor:
    """E of nucleus speculative decoding (arXiv:2610.07822): the draft's excess over p inside the nucleus, [...]."""
    return ((q - p).clamp(min=0) * nucleus(p, theta)).sum(-1)


def output_law(q: Tensor, acceptance: Tensor, replacement: Tensor) -> Tensor:
    """The law of the token a rule emits at one position, [..., V].

    Args:
        q: [..., V].
        acceptance: [..., V].
        replacement: [..., V], or [..., V, V] where row x is the law after rejecting x.
    """
    rejected = q * (1 - acceptance)
    if replacement.dim() == q.dim():
        return q * acceptance + rejected.sum(-1, keepdim=True) * replacement
    return q * acceptance + (rejected.unsqueeze(-1) * replacement).sum(-2)


def deviation(p: Tensor, q: Tensor, acceptance: Tensor, replacement: Tensor) -> Tensor:
    """Total variation between the output law and p, [...]."""
    return total_variation(output_law(q, acceptance, replacement), p)


def sequence_bound(deviations: Iterable[float]) -> float:
    """1 - prod(1 - eps_t): bounds the total variation of a sequence whose step t deviates by at most eps_t always."""
    kept = 1.0
    for value in deviations:
        kept *= 1.0 - min(max(value, 0.0), 1.0)
    return 1.0 - kept


def expected_acceptance_length(acceptances: Iterable[float]) -> float:
    """1 + sum over k of the product of the first k acceptances: tokens emitted by one verification."""
    length, kept = 1.0, 1.0
    for value in acceptances:
        kept *= value
        length += kept
    return length
