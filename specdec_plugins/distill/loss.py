"""How far the draft's law is from the target's, with its gradient in the same pass.

The logits of a place have the width of the vocabulary, so they are never kept: rows are taken in chunks that fit a
processor's cache, and what is kept is the gradient for their few inputs. With p the target's law, q the draft's, t the
token of the text, and z the draft's logits:

    loss = tv (1 - sum min(p, q)) + kl KL(p || q) + ce (-log q(t))
    d loss / dz = q (kl + ce + tv (s - m)) - kl p - ce 1[t]     with m = 1[q < p] and s = sum q m.
"""

from __future__ import annotations

from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor

_CHUNK = 96


@final
@frozen(eq=False)
class Weights:
    """Of the three parts."""

    tv: float
    kl: float
    ce: float


@final
@frozen(eq=False)
class Vocabulary:
    """The tokens that a step looks at.

    Attributes:
        head: [M, H], their rows of the target's head.
        offsets: float32 [M], the logarithm of how many tokens each stands for.
        places: int64 [V], where a token is among them; 0 for those that are not.
    """

    head: Tensor
    offsets: Tensor
    places: Tensor


@final
class Divergence(torch.autograd.Function):
    """Mean loss of rows, and the share of each that the standard rule keeps."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        codes: Tensor,
        bias: Tensor,
        final: Tensor,
        tokens: Tensor,
        words: Vocabulary,
        weights: Weights,
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            ctx: torch's.
            hidden: [R, H], the draft's rows.
            codes: [R, r], what the bias from the token before is made of.
            bias: [M, r], its rows of the tokens looked at.
            final: [R, H], the target's own rows for the same places.
            tokens: int64 [R], of the texts.
            words: the tokens looked at.
            weights: of the parts.

        Returns:
            float32 [], and float32 [R].
        """
        kind, width = words.head.dtype, hidden.shape[1]
        inputs = torch.cat([hidden, codes], 1).to(kind)
        table = torch.cat([words.head, bias.to(kind)], 1)
        place = words.places[tokens].unsqueeze(1)
        backward, kept, total = torch.empty_like(inputs), [], hidden.new_zeros((), dtype=torch.float64)
        into_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        for first in range(0, len(inputs), _CHUNK):
            chunk = slice(first, first + _CHUNK)
            p = (final[chunk].to(kind) @ words.head.T).float().add_(words.offsets).softmax(-1)
            logits = (inputs[chunk] @ table.T).float().add_(words.offsets)
            level = logits.logsumexp(-1, keepdim=True)
            surprise = (level - logits.gather(1, place[chunk])).squeeze(1)
            q = torch.exp(logits.sub_(level), out=logits)
            less = (q < p).float()
            share = torch.minimum(p, q).sum(-1)
            kept.append(share)
            total += (weights.tv * (1 - share) + weights.ce * surprise).sum().double()
            if weights.kl:
                total += weights.kl * torch.where(p > 0, p * (p / q.clamp(min=1e-30)).log(), 0.0).sum().double()
            inside = (q * less).sum(-1, keepdim=True)
            slope = q.mul_(less.mul_(-weights.tv).add_(weights.kl + weights.ce + weights.tv * inside))
            slope.sub_(p, alpha=weights.kl)
            slope.scatter_add_(1, place[chunk], slope.new_full((len(slope), 1), -weights.ce))
            slope = slope.to(kind)
            backward[chunk] = slope @ table
            into_bias += (slope.T @ inputs[chunk, width:]).float()
        count = max(1, len(inputs))
        ctx.save_for_backward(backward, into_bias)
        ctx.width, ctx.count = width, count
        shares = torch.cat(kept) if kept else hidden.new_zeros(0)
        ctx.mark_non_differentiable(shares)
        return (total / count).float(), shares

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        backward, into_bias = ctx.saved_tensors
        scale = slopes[0] / ctx.count
        rows = backward.float() * scale
        return rows[:, : ctx.width], rows[:, ctx.width :], into_bias * scale, None, None, None, None
