"""A request while it is being decoded, and the rows of one step."""

from __future__ import annotations

from typing import final

import torch
from attrs import define, field, frozen
from torch import Tensor

from specdec.noise import Noise
from specdec.text import TextStream
from specdec.types import FinishReason, Request, Sampling


@final
@define(eq=False)
class Sequence:
    """The only mutable decoding state. The last of `tokens` is pending: known, not yet cached.

    Attributes:
        request: what was asked for.
        eos_ids: ids that end it (already empty when the request ignores them).
        limit: most tokens it can ever know, prompt included.
        text: its text so far, where there is a tokenizer.
        tokens: all known ids, prompt first.
        cached: how many of them the target has committed keys and values for.
        slot: its row in the cache, or None while it waits.
        step: its own decode steps so far; the key of its noise.
        finish_reason: why it ended, or None.
    """

    request: Request
    eos_ids: frozenset[int]
    limit: int
    text: TextStream | None = None
    tokens: list[int] = field(init=False)
    cached: int = 0
    slot: int | None = None
    step: int = 0
    finish_reason: FinishReason | None = None

    def __attrs_post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def output(self) -> list[int]:
        """Emitted ids."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def emitted(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def behind(self) -> int:
        """Known tokens before the pending one that are not cached yet."""
        return len(self.tokens) - 1 - self.cached

    @property
    def room(self) -> int:
        """Draft tokens that could all be kept, with one token after them, within budget and context."""
        return max(0, min(self.sampling.max_new_tokens - self.emitted, self.limit - len(self.tokens)) - 1)

    def append(self, token: int) -> FinishReason | None:
        """The one commit path: take a token, then look at eos, stop ids, stop strings, budget and context, in order."""
        self.tokens.append(token)
        if self.text is not None:
            self.text.push(token)
        if token in self.eos_ids or token in self.sampling.stop_ids:
            self.finish_reason = "eos"
        elif self.text is not None and self.text.stopped:
            self.finish_reason = "stop_string"
        elif self.emitted >= self.sampling.max_new_tokens:
            self.finish_reason = "length"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "context"
        return self.finish_reason


@final
@frozen(eq=False)
class Batch:
    """The rows of one step and what each may do.

    Attributes:
        rows: the sequences, ascending by slot.
        slots: their rows in the cache.
        budget: most draft nodes of each row in this step.
        pending: int64 [B], the last known token of each row.
        noise: the step's uniform numbers.
        memory: float64 [B, M], what the rule remembers of each row, or None.
    """

    rows: tuple[Sequence, ...]
    slots: tuple[int, ...]
    budget: tuple[int, ...]
    pending: Tensor
    noise: Noise
    memory: Tensor | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Cached tokens of each row before the step."""
        return tuple(row.cached for row in self.rows)

    @property
    def greedy(self) -> bool:
        """Whether every row is greedy."""
        return all(row.sampling.greedy for row in self.rows)


def make_batch(
    rows: list[tuple[Sequence, int]], device: torch.device | str = "cpu", memory: Tensor | None = None
) -> Batch:
    """A batch from (sequence, budget) pairs. `memory` is [R, M], indexed by slot."""
    ordered = sorted(rows, key=lambda pair: pair[0].slot if pair[0].slot is not None else -1)
    sequences = tuple(sequence for sequence, _ in ordered)
    slots = tuple(sequence.slot for sequence in sequences if sequence.slot is not None)
    return Batch(
        rows=sequences,
        slots=slots,
        budget=tuple(budget for _, budget in ordered),
        pending=torch.tensor([sequence.tokens[-1] for sequence in sequences], dtype=torch.int64, device=device),
        noise=Noise(tuple(s.sampling.seed for s in sequences), tuple(s.step for s in sequences), device),
        memory=None if memory is None else memory[torch.tensor(slots, device=memory.device)],
    )
