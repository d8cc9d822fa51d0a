"""How draft tokens were drawn. A closed set: every rule can ask each of them for one probability, one row, or all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from attrs import frozen
from torch import Tensor


class Law(ABC):
    """How draft tokens were drawn: one distribution over the vocabulary for each leading index."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of `dense()`, without making it."""

    @abstractmethod
    def at(self, tokens: Tensor) -> Tensor:
        """Probabilities of `tokens` int64 [...]; tokens below 0 have probability 0. Returns [...]."""

    @abstractmethod
    def dense(self) -> Tensor:
        """All probabilities, [..., V]."""

    @abstractmethod
    def row(self, index: Tensor, valid: Tensor) -> Law:
        """The law [B, ..., V] of nodes `index` int64 [B, ...]; the zero measure where `valid` bool [B, ...] is false.

        The zero measure is the draft law of a position nothing was proposed for: its residual is the target's law.
        """

    @abstractmethod
    def narrow(self, length: int) -> Law:
        """The same law for the first `length` nodes."""

    @abstractmethod
    def only(self, row: int) -> Law:
        """The same law for one row of the batch, [1, ..., V]."""


def pick(values: Tensor, index: Tensor) -> Tensor:
    """Node `index` int64 [B, ...] of each row of `values` [B, N, ...], [B, ..., ...]."""
    first = torch.arange(index.shape[0], device=index.device).view(-1, *(1,) * (index.dim() - 1))
    if values.dim() < 3 or not values.is_contiguous():
        return values[first, index]
    # Whole rows by one number: on the CPU that is several times faster than by two.
    flat = (first * values.shape[1] + index).flatten()
    return values.flatten(0, 1).index_select(0, flat).view(*index.shape, *values.shape[2:])


@final
@frozen(eq=False)
class Dense(Law):
    """`probs` [..., N, V], each row summing to 1."""

    probs: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.probs.shape)

    def at(self, tokens: Tensor) -> Tensor:
        found = self.probs.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return found * (tokens >= 0)

    def dense(self) -> Tensor:
        return self.probs

    def row(self, index: Tensor, valid: Tensor) -> Law:
        picked = pick(self.probs, index.clamp(min=0, max=self.probs.shape[1] - 1))
        return Dense(torch.where(valid.unsqueeze(-1), picked, picked.new_zeros(())))

    def narrow(self, length: int) -> Law:
        return Dense(self.probs[:, :length])

    def only(self, row: int) -> Law:
        return Dense(self.probs[row : row + 1])


@final
@frozen(eq=False)
class Logits(Law):
    """softmax(`logits` [..., N, V] / temperature [..., N, 1] or a number), made dense only where it is asked for."""

    logits: Tensor
    temperature: Tensor | float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.logits.shape)

    def _scaled(self) -> Tensor:
        return self.logits / self.temperature

    def at(self, tokens: Tensor) -> Tensor:
        scaled = self._scaled()
        chosen = scaled.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return (chosen - scaled.logsumexp(-1)).exp() * (tokens >= 0)

    def dense(self) -> Tensor:
        return self._scaled().softmax(-1)

    def row(self, index: Tensor, valid: Tensor) -> Law:
        safe = index.clamp(min=0, max=self.logits.shape[1] - 1)
        scale = pick(self.temperature, safe) if isinstance(self.temperature, Tensor) else self.temperature
        picked = (pick(self.logits, safe) / scale).softmax(-1)
        return Dense(torch.where(valid.unsqueeze(-1), picked, picked.new_zeros(())))

    def narrow(self, length: int) -> Law:
        scale = self.temperature[:, :length] if isinstance(self.temperature, Tensor) else self.temperature
        return Logits(self.logits[:, :length], scale)

    def only(self, row: int) -> Law:
        scale = self.temperature[row : row + 1] if isinstance(self.temperature, Tensor) else self.temperature
        return Logits(self.logits[row : row + 1], scale)


@final
@frozen(eq=False)
class Sparse(Law):
    """`probs` [..., N, C] on distinct candidates `ids` int64 [..., N, C]; everything else has probability 0."""

    ids: Tensor
    probs: Tensor
    vocabulary: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.ids.shape[:-1], self.vocabulary)

    def at(self, tokens: Tensor) -> Tensor:
        return ((self.ids == tokens.unsqueeze(-1)) * self.probs).sum(-1)

    def dense(self) -> Tensor:
        empty = self.probs.new_zeros((*self.ids.shape[:-1], self.vocabulary))
        return empty.scatter_add(-1, self.ids, self.probs)

    def row(self, index: Tensor, valid: Tensor) -> Law:
        safe = index.clamp(min=0, max=self.ids.shape[1] - 1)
        return Sparse(pick(self.ids, safe), pick(self.probs, safe) * valid.unsqueeze(-1), self.vocabulary)

    def narrow(self, length: int) -> Law:
        return Sparse(self.ids[:, :length], self.probs[:, :length], self.vocabulary)

    def only(self, row: int) -> Law:
        return Sparse(self.ids[row : row + 1], self.probs[row : row + 1], self.vocabulary)


@final
@frozen(eq=False)
class PointMass(Law):
    """All mass on `tokens` int64 [..., N]: what a deterministic drafter draws from; -1 is the zero measure."""

    tokens: Tensor
    vocabulary: int
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.tokens.shape, self.vocabulary)

    def at(self, tokens: Tensor) -> Tensor:
        return ((self.tokens == tokens) & (tokens >= 0)).to(self.dtype)

    def dense(self) -> Tensor:
        empty = torch.zeros((*self.tokens.shape, self.vocabulary), dtype=self.dtype, device=self.tokens.device)
        mass = (self.tokens >= 0).to(self.dtype).unsqueeze(-1)
        return empty.scatter_(-1, self.tokens.clamp(min=0).unsqueeze(-1), mass)

    def row(self, index: Tensor, valid: Tensor) -> Law:
        picked = pick(self.tokens, index.clamp(min=0, max=self.tokens.shape[1] - 1))
        return PointMass(torch.where(valid, picked, -1), self.vocabulary, self.dtype)

    def narrow(self, length: int) -> Law:
        return PointMass(self.tokens[:, :length], self.vocabulary, self.dtype)

    def only(self, row: int) -> Law:
        return PointMass(self.tokens[row : row + 1], self.vocabulary, self.dtype)
