"""The interface of everything that proposes tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod

from specdec.sequence import Batch
from specdec.target import Target
from specdec.types import Draft, Kept


class Drafter(ABC):
    """Proposes draft tokens for the rows of a batch and learns what was kept.

    State belongs to slots: `observe` is called after every commit, prefill chunks included, and `release` when a row
    ends, so a drafter with its own cache can follow the target's row numbers.
    """

    @property
    @abstractmethod
    def num_speculative_tokens(self) -> int:
        """Most nodes it proposes for one row in one step; 0 drafts nothing."""

    @property
    def deterministic(self) -> bool:
        """Whether drafts are point masses whatever the sampling: rules that need a draft law refuse it."""
        return False

    @property
    def trees(self) -> bool:
        """Whether it may return parents."""
        return False

    @property
    def taps(self) -> tuple[int, ...]:
        """Target features it wants in `Kept.hidden`: k is the output of decoder layer k, -1 after the final norm."""
        return ()

    @property
    def notes(self) -> list[str]:
        """What binding found worth saying, one sentence each."""
        return []

    @abstractmethod
    def bind(self, target: Target) -> None:
        """Load weights and make caches for this target. A second call with the same target changes nothing.

        Raises:
            CompatibilityError: the target does not fit; names every reason.
        """

    @abstractmethod
    def propose(self, batch: Batch) -> Draft:
        """Propose at most `batch.budget[b]` nodes for row b; more is clipped and counted."""

    @abstractmethod
    def observe(self, batch: Batch, kept: Kept) -> None:
        """Learn what a step or a prefill chunk committed. `batch` is as it was planned; its rows have moved on."""

    @abstractmethod
    def release(self, slots: tuple[int, ...]) -> None:
        """Forget rows that ended."""
