"""The few operations on distributions that everything else is made of. All work on the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import memory

# Mass below which a residual counts as lost to rounding and the target's own law is used instead.
FALLBACK_MASS = 1e-8
_BLOCK = 128
_WORTH_A_CALL = 1 << 14  # numbers


def normalise(weights: Tensor, fallback: Tensor) -> tuple[Tensor, Tensor]:
    """Make `weights` [..., V] (not negative) a law.

    Args:
        weights: [..., V], up to a constant.
        fallback: [..., V], used where the mass of `weights` is at most 1e-8 or not finite.

    Returns:
        The law [..., V] and a bool tensor [...] that says where the fallback was used.
    """
    mass = weights.sum(-1, keepdim=True)
    lost = ~(torch.isfinite(mass) & (mass > FALLBACK_MASS))
    law = torch.where(lost, fallback, weights).div_(torch.where(lost, 1.0, mass))
    return law, lost.squeeze(-1)


def sample(probs: Tensor, uniform: Tensor) -> Tensor:
    """Draw by inverse transform over ids in order.

    The cumulative sum is float64 (on the host where the device has none), so that 150,000 small numbers add up.

    Args:
        probs: [..., V], not negative; need not sum to 1.
        uniform: [...], in [0, 1).

    Returns:
        int64 [...]: the first id whose cumulative mass exceeds `uniform` times the whole, never one of mass 0.
    """
    device = probs.device
    if device.type == "mps":
        return sample(probs.cpu(), uniform.cpu()).to(device)
    cumulative = memory.copy(probs, torch.float64).cumsum_(-1)
    goal = uniform.double().unsqueeze(-1) * cumulative[..., -1:]
    drawn = torch.searchsorted(cumulative, goal, right=True).squeeze(-1)
    # The last id of positive mass is the first that reaches the whole: there rounding may push the goal.
    last = torch.searchsorted(cumulative, cumulative[..., -1:].contiguous(), right=False).squeeze(-1)
    smallest: Tensor = torch.minimum(drawn, last)
    return smallest.clamp(max=probs.shape[-1] - 1)


def one_hot(tokens: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """[..., V] with 1 at `tokens` int64 [...]."""
    zeros = memory.empty((*tokens.shape, vocabulary), dtype, tokens.device).zero_()
    return zeros.scatter_(-1, tokens.unsqueeze(-1), 1.0)


def argmax(values: Tensor) -> Tensor:
    """The first id of the largest of `values` [..., V], or of the first NaN, int64 [...]: torch.argmax by blocks, since
    a maximum is found much faster than its place.
    """
    size = values.shape[-1]
    if size < 8 * _BLOCK:
        return values.argmax(-1)
    whole = size - size % _BLOCK
    tops = values[..., :whole].view(*values.shape[:-1], -1, _BLOCK).amax(-1)
    if whole < size:
        tops = torch.cat([tops, values[..., whole:].amax(-1, keepdim=True)], -1)
    # The last window may begin in the block before it, where nothing is as large when the last one was chosen.
    start = (tops.argmax(-1, keepdim=True) * _BLOCK).clamp(max=size - _BLOCK)
    window = start + torch.arange(_BLOCK, device=values.device)
    first: Tensor = start.squeeze(-1) + values.gather(-1, window).argmax(-1)
    return first


def at(values: Tensor, tokens: Tensor) -> Tensor:
    """`values` [..., V] at `tokens` int64 [...]; 0 where a token is below 0."""
    found = values.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return found * (tokens >= 0)


def without(probs: Tensor, tokens: Tensor) -> Tensor:
    """`probs` [..., V] with 0 at `tokens` int64 [...]; unchanged where a token is below 0."""
    ids = torch.arange(probs.shape[-1], device=probs.device)
    return torch.where(ids == tokens.unsqueeze(-1), probs.new_zeros(()), probs)


def top(probs: Tensor, count: int) -> Tensor:
    """Which tokens are possible and have fewer than `count` more probable ones, bool [..., V]; ties are in."""
    least = probs.topk(min(count, probs.shape[-1]), dim=-1).values[..., -1:]
    return (probs >= least) & (probs > 0)


def certain(probs: Tensor) -> Tensor:
    """Whether one token has all the mass of `probs` [..., V], as at temperature 0; bool [..., 1]."""
    # Counted in the dtype of the law: counting truth values is ten times slower.
    return torch.gt(probs, 0, out=torch.empty_like(probs)).sum(-1, keepdim=True) == 1


def softened(probs: Tensor, logits: Tensor) -> Tensor:
    """`probs` [..., V], but softmax(`logits` [..., V]) where one token has all the mass, as at temperature 0."""
    return torch.where(certain(probs), logits.softmax(-1).to(probs.dtype), probs)


def entropy(probs: Tensor, floor: float = 0.0) -> Tensor:
    """-sum p log(p + floor) in nats, [...]; 0 log 0 is 0."""
    if floor > 0.0:
        return -(probs * (probs + floor).log()).sum(-1)
    terms: Tensor = torch.special.entr(probs)
    return terms.sum(-1)


def total_variation(left: Tensor, right: Tensor) -> Tensor:
    """Half the sum of absolute differences, [...]."""
    return (left - right).abs().sum(-1) / 2


def mass_above(probs: Tensor, value: Tensor) -> Tensor:
    """The sum of all probabilities of `probs` [..., V] that are greater than `value` [...], in float64."""
    # What fits a cache is ten times faster than the whole, unless a row is so short that its calls cost more.
    if probs.dim() > 2 and probs.device.type == "cpu" and probs.shape[1:].numel() >= _WORTH_A_CALL:
        return torch.stack([mass_above(row, least) for row, least in zip(probs, value, strict=True)])
    above = memory.empty(tuple(probs.shape), probs.dtype, probs.device)
    torch.gt(probs, value.unsqueeze(-1), out=above).mul_(probs)
    return memory.copy(above, torch.float64).sum(-1)


def nucleus(probs: Tensor, theta: float) -> Tensor:
    """Which tokens lie in the top-p nucleus, bool [..., V].

    x is in when the tokens of greater probability sum to less than theta and p(x) > 0: the smallest set of top tokens
    with mass at least theta, the crossing token in, ties in. Theta 0 is the empty set.
    """
    # The nucleus is nearly always small, so a full sort is the exception; but a device that would have to be asked
    # whether it is one sorts faster than it answers.
    width = min(256, probs.shape[-1]) if probs.device.type == "cpu" else probs.shape[-1]
    ordered = probs.topk(width, dim=-1).values
    if width < probs.shape[-1] and bool((ordered.sum(-1, dtype=torch.float64) < theta).any()):
        ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.double().cumsum(-1) - ordered
    # Sums that should be equal to theta may miss it by a rounding; ties take the mass before their first member.
    first = torch.searchsorted(-ordered, -ordered, right=False).clamp(max=ordered.shape[-1] - 1)
    inside = before.gather(-1, first) < theta
    cutoff = torch.where(inside, ordered, torch.full_like(ordered, float("inf"))).amin(-1, keepdim=True)
    return (probs >= cutoff) & (probs > 0)
