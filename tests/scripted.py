"""Drafters that follow a script, without a model."""

from collections.abc import Callable
from typing import final

import torch
from attrs import define, field

from specdec.drafter import Drafter
from specdec.types import Draft


@final
@define(kw_only=True, eq=False)
class Scripted(Drafter):
    """Proposes what `script(tokens so far, budget)` returns for each row, and records everything it is told."""

    script: Callable
    num_speculative_tokens: int = 4
    parents: Callable | None = None
    law: Callable | None = None
    deterministic = True
    proposed: list = field(init=False, factory=list)
    observed: list = field(init=False, factory=list)
    released: list = field(init=False, factory=list)

    @property
    def trees(self):
        return self.parents is not None

    def bind(self, target):
        pass

    def propose(self, batch):
        found = [
            list(self.script(tuple(row.tokens), budget)) for row, budget in zip(batch.rows, batch.budget, strict=True)
        ]
        self.proposed.append([(row.request.id, tuple(tokens)) for row, tokens in zip(batch.rows, found, strict=True)])
        width = max(len(tokens) for tokens in found)
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in found], dtype=torch.int64)
        sizes = torch.tensor([len(row) for row in found])
        parents = None
        if self.parents is not None:
            parents = torch.tensor([self.parents(width)] * len(found), dtype=torch.int64)
        return Draft(tokens.reshape(len(found), width), sizes, parents=parents)

    def observe(self, batch, kept):
        self.observed.append((batch, kept))

    def release(self, slots):
        self.released.extend(slots)


def oracle(outputs, prompts, k, wrong_at=None, vocabulary=80):
    """Knows each prompt's greedy continuation; with `wrong_at`, is right until that position of every block."""
    known = {prompt: prompt + output for prompt, output in zip(prompts, outputs, strict=True)}

    def script(tokens, budget):
        whole = next((full for prompt, full in known.items() if tokens[: len(prompt)] == prompt), None)
        if whole is None or whole[: len(tokens)] != tokens:
            return []
        block = list(whole[len(tokens) : len(tokens) + min(budget, k)])
        if wrong_at is not None and wrong_at < len(block):
            block[wrong_at] = (block[wrong_at] + 1) % vocabulary
        return block

    return script
