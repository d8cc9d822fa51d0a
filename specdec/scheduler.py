"""Which rows run and how many draft tokens each may get. There are no phases: a row whose cache is behind its known
tokens catches up, any other row decodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from typing import final

from attrs import define, field, frozen
from attrs.validators import ge, instance_of
from torch import Tensor

from specdec.costs import Costs
from specdec.sequence import Batch, Sequence
from specdec.types import Draft, Kept


@final
@frozen
class Room:
    """What there is: free cache rows, and the most draft tokens the drafter proposes for one row."""

    slots: int
    draft: int


@final
@frozen(eq=False)
class Plan:
    """One step.

    Attributes:
        admit: sequences that leave the queue and get a cache row now.
        prefill: (row, tokens to cache) for rows that are behind.
        decode: (row, draft budget) for rows with exactly one pending token.
    """

    admit: tuple[Sequence, ...]
    prefill: tuple[tuple[Sequence, int], ...]
    decode: tuple[tuple[Sequence, int], ...]


@define(kw_only=True, eq=False)
class Scheduler(ABC):
    """A queue and the rows that run. A strategy says how many to admit.

    Attributes:
        prefill_chunk: most prompt tokens of a row that one step caches.
    """

    prefill_chunk: int = field(default=512, validator=[instance_of(int), ge(1)])
    waiting: deque[Sequence] = field(init=False, factory=deque)
    running: list[Sequence] = field(init=False, factory=list)

    @abstractmethod
    def admit(self, waiting: int, running: int, slots: int) -> int:
        """How many of `waiting` sequences may start now, given `running` rows and `slots` free ones."""

    @property
    def reads(self) -> bool:
        """Whether drafters read prompts while these are cached, also those that can do so when they are first asked."""
        return True

    def budget(self, row: Sequence, most: int) -> int:
        """Draft tokens for a row: as many as could all be kept with one token after them."""
        return min(most, row.room)

    def budgets(self, rows: ListOf[Sequence], most: int) -> list[int]:
        """Draft tokens for all rows that decode in a step, for a strategy that decides about them together."""
        return [self.budget(row, most) for row in rows]

    def price(self, drafter: str, measure: Callable[[], Costs]) -> Costs | None:
        """Hear what steps cost, before the first of a run.

        Args:
            drafter: what the run calls the drafter.
            measure: times steps of the engine; takes a while, so a strategy that has no use for it does not call it.

        Returns:
            The costs that the strategy decides by; None if by none.
        """
        return None

    def learn(self, batch: Batch, kept: Kept) -> None:  # noqa: B027  # most strategies learn nothing
        """Look at what a decode step kept. `batch` is as it was planned; its rows have moved on."""

    def trim(self, draft: Draft) -> Tensor:
        """Sizes int64 [B] to verify, at most `draft.sizes`; may depend on `draft.confidence` only, never on tokens.

        Whether a node is cut may depend on what is known of the nodes before it, and not on the node itself: to drop a
        token because of what it is changes the law of the output. `confidence` may look at its own node, so that of a
        node says nothing about whether the node is cut.
        """
        return draft.sizes

    @final
    def submit(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the queue."""
        self.waiting.append(sequence)

    @final
    def plan(self, room: Room) -> Plan:
        """Decide the next step."""
        count = min(self.admit(len(self.waiting), len(self.running), room.slots), len(self.waiting), room.slots)
        admitted = tuple(self.waiting.popleft() for _ in range(max(0, count)))
        self.running.extend(admitted)
        prefill = tuple((row, min(row.behind, self.prefill_chunk)) for row in self.running if row.behind)
        ready = [row for row in self.running if not row.behind]
        wanted = self.budgets(ready, room.draft) if ready else []
        decode = ((row, max(0, min(most, room.draft, row.room))) for row, most in zip(ready, wanted, strict=True))
        return Plan(admitted, prefill, tuple(decode))

    @final
    def observe(self, batch: Batch, kept: Kept) -> None:
        """Learn, and let go of rows that ended."""
        self.learn(batch, kept)
        if any(kept.finished):
            self.running = [row for row in self.running if row.finish_reason is None]

    @final
    def drop(self, names: set[str]) -> tuple[Sequence, ...]:
        """Forget requests by id; returns the rows of them that were running."""
        rows = tuple(row for row in self.running if row.request.id in names)
        self.running = [row for row in self.running if row.request.id not in names]
        self.waiting = deque(row for row in self.waiting if row.request.id not in names)
        return rows

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not self.running
