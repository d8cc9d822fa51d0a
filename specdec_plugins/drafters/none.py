"""Plain autoregressive decoding, in the same loop as everything else."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen

from specdec.drafter import Drafter
from specdec.sequence import Batch
from specdec.target import Target
from specdec.types import Draft, Kept


@final
@frozen(kw_only=True)
class NoDraft(Drafter):
    """Proposes nothing: every step is one target forward and one token. The baseline of every comparison."""

    num_speculative_tokens = 0
    deterministic = True

    def bind(self, target: Target) -> None:
        """Nothing to load."""

    def propose(self, batch: Batch) -> Draft:
        empty = torch.zeros((len(batch.rows), 0), dtype=torch.int64, device=batch.pending.device)
        return Draft(empty, empty.sum(1))

    def observe(self, batch: Batch, kept: Kept) -> None:
        """Nothing to learn."""

    def release(self, slots: tuple[int, ...]) -> None:
        """Nothing to forget."""
