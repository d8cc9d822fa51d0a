"""What can run in a race: our own engine and transformers. A side makes tokens of prompts; the race holds the watch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from attrs import define, field, frozen

from specdec import Engine, Request, Sampling, Target
from specdec.drafter import Drafter
from specdec.metrics import Counters, pool
from specdec.verifier import Verifier
from specdec_plugins.schedulers.continuous import Continuous


@final
@frozen
class Task:
    """What every side does: so many new tokens, ends included or not, at one temperature."""

    new_tokens: int
    temperature: float
    ends: tuple[int, ...]


@define(eq=False)
class Side(ABC):
    """A way to decode.

    Attributes:
        name: in tables.
        rows: prompts it takes at once.
        models: whose weights it reads, the target first.
    """

    name: str
    rows: int
    models: tuple[Any, ...]

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        device: torch.device = self.models[0].get_input_embeddings().weight.device
        return device

    @abstractmethod
    def run(self, prompts: Sequence[tuple[int, ...]], first: int) -> list[list[int]]:
        """New tokens of at most `rows` prompts; `first` is the number of the first, for seeds."""

    def facts(self) -> Mapping[str, Any]:
        """What it knows of its own steps."""
        return {}

    def reset(self) -> None:  # noqa: B027  # most sides count nothing
        """Forget what was counted while warming up."""


@final
@define(eq=False)
class Ours(Side):
    """This library's engine."""

    target: Target
    drafter: Drafter
    verifier: Verifier
    task: Task
    _engine: Engine = field(init=False)
    _counters: list[Counters] = field(init=False, factory=list)
    _before: tuple[int, float, list[float]] = field(init=False, default=(0, 0.0, [0.0] * 3))

    def __attrs_post_init__(self) -> None:
        self._engine = Engine(self.target, self.drafter, self.verifier, Continuous())

    def run(self, prompts: Sequence[tuple[int, ...]], first: int) -> list[list[int]]:
        requests = [
            Request(
                prompt=prompt,
                sampling=Sampling(
                    temperature=self.task.temperature, max_new_tokens=self.task.new_tokens, seed=first + index
                ),
            )
            for index, prompt in enumerate(prompts)
        ]
        done = self._engine.generate(requests)
        self._counters += [one.counters for one in done]
        return [list(one.tokens) for one in done]

    def reset(self) -> None:
        self._counters = []
        self._before = self._engine.steps, self._engine.prefill, list(self._engine.seconds)

    def facts(self) -> Mapping[str, Any]:
        steps, prefill, seconds = self._before
        draft, verify, rest = (now - then for now, then in zip(self._engine.seconds, seconds, strict=True))
        prefill = self._engine.prefill - prefill
        return {
            "acceptance_length": pool(self._counters).acceptance_length,
            "steps": self._engine.steps - steps,
            "seconds": {"prefill": prefill, "draft": draft, "verify": verify, "rest": rest - prefill},
        }


@final
@define(eq=False)
class Transformers(Side):
    """`generate` of transformers: plain, with an assistant, or with prompt lookup.

    Attributes:
        options: for `generate`, beside length, sampling and padding.
    """

    task: Task
    options: Mapping[str, Any]

    def run(self, prompts: Sequence[tuple[int, ...]], first: int) -> list[list[int]]:
        width = max(map(len, prompts))
        device = self.device
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        torch.manual_seed(first)
        sampled = {"temperature": self.task.temperature, "top_k": 0, "top_p": 1.0} if self.task.temperature else {}
        out = self.models[0].generate(
            ids,
            attention_mask=mask,
            do_sample=bool(self.task.temperature),
            max_new_tokens=self.task.new_tokens,
            eos_token_id=list(self.task.ends) or None,
            pad_token_id=0,
            repetition_penalty=1.0,  # generation configs set one, and greedy decoding would read it
            **sampled,
            **self.options,
        )
        return [cut(row, self.task.ends) for row in out[:, width:].tolist()]


def cut(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Up to the first end, that one included: behind it is padding."""
    return tokens[: next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))]
