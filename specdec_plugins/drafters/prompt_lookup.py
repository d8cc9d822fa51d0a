"""Drafts that are copied from the text so far."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from attrs.validators import ge

from specdec.drafter import Drafter
from specdec.sequence import Batch
from specdec.target import Target
from specdec.types import Draft, Kept


@final
@frozen(kw_only=True)
class PromptLookup(Drafter):
    """Finds the last tokens earlier in prompt and output, the longest n-gram and its latest place first, and proposes
    what followed. No model, no law: drafts are point masses.

    Source: Saxena, prompt lookup decoding, 2023; REST and vLLM's n-gram drafter are of the same kind.
    Cost: a scan of the known tokens on the host. A row without a match gets an empty draft.

    Attributes:
        num_speculative_tokens: most tokens to copy.
        max_ngram: longest n-gram that is looked for.
        min_ngram: shortest.
    """

    num_speculative_tokens: int = field(default=10, validator=ge(1))
    max_ngram: int = field(default=3, validator=ge(1))
    min_ngram: int = field(default=1, validator=ge(1))

    deterministic = True

    @min_ngram.validator
    def _ordered(self, _: object, value: int) -> None:
        if value > self.max_ngram:
            raise ValueError(f"'min_ngram' must be at most max_ngram = {self.max_ngram}, got {value}")

    def bind(self, target: Target) -> None:
        """Nothing to load."""

    def propose(self, batch: Batch) -> Draft:
        found = [self._look(row.tokens, budget) for row, budget in zip(batch.rows, batch.budget, strict=True)]
        width = max(len(tokens) for tokens in found)
        device = batch.pending.device
        padded = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in found], dtype=torch.int64)
        sizes = torch.tensor([len(tokens) for tokens in found], dtype=torch.int64)
        return Draft(padded.reshape(len(found), width).to(device), sizes.to(device))

    def observe(self, batch: Batch, kept: Kept) -> None:
        """The sequences themselves are all it reads."""

    def release(self, slots: tuple[int, ...]) -> None:
        """Nothing to forget."""

    def _look(self, tokens: list[int], budget: int) -> list[int]:
        count = min(budget, self.num_speculative_tokens)
        if count < 1:
            return []
        for size in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            pattern = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start] == pattern[0] and tokens[start : start + size] == pattern:
                    return tokens[start + size : start + size + count]
        return []
