"""The interface of everything that proposes tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec import memory, tree
from specdec.law import Dense
from specdec.probability import argmax, one_hot, sample
from specdec.processing import laws, modes, processed
from specdec.sequence import Batch
from specdec.target import Target
from specdec.types import Draft, Kept

_EXHAUSTED = 1e-9


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
    def catches_up(self) -> bool:
        """Whether it reads by itself, when it is asked for a draft, what it was not told of a prompt."""
        return False

    @property
    def notes(self) -> list[str]:
        """What binding found worth saying, one sentence each."""
        return []

    @property
    def summary(self) -> str:
        """What binding loaded and how much memory it takes, as a sentence; empty where it loaded nothing."""
        return ""

    @classmethod
    def reads(cls, config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this config.json is for this drafter, and no model that decodes by itself."""
        return False

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


def draw_chain(batch: Batch, budget: Sequence[int], follow: Callable[[int, list[int], Tensor], Tensor]) -> Draft:
    """Draw a chain token by token, with each request's own temperature, filters and processors.

    A point mass where all rows are greedy; otherwise the law handed over is the very tensor each token was drawn from.
    From the first logits of a row that are not finite on, there is no draft.

    Args:
        batch: the rows.
        budget: nodes wanted for each row, at most `batch.budget`.
        follow: given how many nodes there are (`depth`), the indices of the `b` rows that want one more, and their last
            tokens int64 [b, 1] (the pending ones at depth 0), returns the raw logits [b, V] of what comes next.
    """
    rows, width, device = len(batch.rows), max(budget), batch.pending.device
    tokens = torch.zeros((rows, width), dtype=torch.int64, device=device)
    finite = torch.ones((rows, width), dtype=torch.bool, device=device)
    uniform = batch.noise.uniform("draft", width)
    law: Tensor | None = None
    for depth in range(width):
        active = [index for index in range(rows) if budget[index] > depth]
        chosen = torch.tensor(active, device=device)
        last = tokens[:, depth - 1] if depth else batch.pending
        logits = follow(depth, active, last[chosen].unsqueeze(1)).to(device)
        logits = memory.copy(logits, torch.promote_types(logits.dtype, torch.float32))
        sequences = tuple(batch.rows[index] for index in active)
        arguments = (logits.unsqueeze(1), sequences, tokens[chosen, :depth])
        if batch.greedy:
            token, good = (found.squeeze(1) for found in modes(processed(*arguments, first=depth)))
        else:
            probs = laws(*arguments, first=depth).squeeze(1)
            token, good = sample(probs, uniform[chosen, depth]), torch.isfinite(probs[:, 0])
            if law is None:
                law = memory.empty((rows, width, probs.shape[-1]), probs.dtype, probs.device)
            if len(active) < rows:
                probs = probs.new_zeros((rows, probs.shape[-1])).index_copy(0, chosen, probs)
            law[:, depth] = probs
        tokens[chosen, depth] = torch.where(good, token, 0)
        finite[chosen, depth] = good
    sizes = torch.minimum(torch.tensor(budget, device=device), finite.long().cumprod(1).sum(1))
    return Draft(tokens, sizes, law=None if law is None else Dense(law))


def draw_tree(
    batch: Batch,
    budget: Sequence[int],
    branches: Sequence[int],
    follow: Callable[[int, list[int], Tensor, Tensor], Tensor],
    *,
    replace: bool = False,
) -> Draft:
    """Draw a tree level by level, every node of a level getting `branches[level]` children, each request with its own
    temperature, filters and processors.

    Each child is drawn from the law that is handed over for it: with `replace` the law q of its place, otherwise q
    without the siblings before it, and q again where those took all of its mass. The children of a greedy row are its
    most probable tokens, as point masses. Below logits that are not finite, and from there on, a row has no draft.

    Args:
        batch: the rows.
        budget: nodes wanted for each row, at most `batch.budget`; a row gets the first of the tree, level by level.
        branches: children of each node, by level.
        follow: given the level, the indices of the `b` rows that want it, their nodes so far int64 [b, n] and the
            parents of these int64 [n] (-1 is the pending token), returns the raw logits [b, 1+n, V] after the pending
            token and after each node.
        replace: siblings may be equal.
    """
    rows, device = len(batch.rows), batch.pending.device
    levels, parents = tree.levels(branches)
    width = min(len(parents), max(budget))
    tokens = torch.zeros((rows, len(parents)), dtype=torch.int64, device=device)
    sizes = torch.tensor(budget, device=device).clamp(max=width)
    uniform = batch.noise.uniform("draft", len(parents))
    greedy = torch.tensor([row.sampling.greedy for row in batch.rows], device=device)
    drawn_from: list[Tensor] = []
    for level, nodes in enumerate(levels):
        active = [index for index in range(rows) if budget[index] > nodes.start]
        if not active:
            break
        chosen, above = torch.tensor(active, device=device), torch.tensor(parents[: nodes.start], dtype=torch.int64)
        logits = follow(level, active, tokens[chosen, : nodes.start], above.to(device)).to(device)
        logits = memory.copy(logits, torch.promote_types(logits.dtype, torch.float32))
        sequences, known = tuple(batch.rows[index] for index in active), above.to(device).expand(len(active), -1)
        probs = laws(logits, sequences, tokens[chosen, : nodes.start], parents=known)
        left, ranked = probs.clone(), logits.clone()
        for node in nodes:
            here = 1 + parents[node]
            law, sharp = left[:, here], greedy[chosen]
            mass = law.sum(-1, keepdim=True)
            law = torch.where(mass > _EXHAUSTED, law / mass.clamp(min=_EXHAUSTED), probs[:, here])
            good = torch.isfinite(law[:, 0])
            eldest = node == nodes.start or parents[node - 1] != parents[node]
            best = argmax(law if eldest else ranked[:, here])
            token = torch.where(sharp, best, torch.where(good, sample(law, uniform[chosen, node]), 0))
            tokens[chosen, node] = token
            sizes[chosen] = torch.where(good, sizes[chosen], sizes[chosen].clamp(max=node))
            if not batch.greedy:
                law = torch.where(sharp.unsqueeze(1), one_hot(token, law.shape[-1], law.dtype), law)
                drawn_from.append(law.new_zeros((rows, law.shape[-1])).index_copy(0, chosen, law))
            if not replace:
                left[:, here] = left[:, here].scatter(-1, token.unsqueeze(1), 0.0)
            ranked[:, here] = ranked[:, here].scatter(-1, token.unsqueeze(1), -torch.inf)
    above = torch.tensor(parents[:width], device=device).repeat(rows, 1)
    return Draft(tokens[:, :width], sizes, above, None if batch.greedy else Dense(torch.stack(drawn_from[:width], 1)))
