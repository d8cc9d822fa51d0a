"""Other libraries that draft with a second model, where they are installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, final

import torch
from attrs import define, field

from specdec_plugins.bench.sides import Side, Task, cut, where


def installed(name: str) -> bool:
    """Whether a library is there."""
    return find_spec(name) is not None


@final
@define(eq=False)
class Economize(Side):
    """economize's draft_model technique; its cycle holds the exact token beside the drafted ones."""

    model: Any
    draft: str
    width: int
    task: Task
    _ready: Any = field(init=False, default=None)
    _decoding: Any = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        import economize
        from economize.techniques.draft_model import DraftModelConfig

        self._ready = economize.apply(self.model, DraftModelConfig(model=self.draft))
        self._decoding = economize.DecodeConfig(cycle_length=self.width + 1)

    @property
    def device(self) -> torch.device:
        return where(self.model)

    def run(self, prompts: Sequence[tuple[int, ...]], first: int) -> list[list[int]]:
        found = self._ready.decode_batch(
            [torch.tensor(prompt) for prompt in prompts],
            self.task.new_tokens,
            decoding=self._decoding,
            stop=list(self.task.ends),
        )
        return [cut(one.tokens.tolist(), self.task.ends) for one in found]


@final
@define(eq=False)
class Flashspec(Side):
    """flashspec's engine with one drafter; it takes one prompt at a time in its fast loop."""

    model: Any
    draft: Any
    width: int
    task: Task
    _ready: Any = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        import flashspec
        from flashspec.engine.hf_drafter import HuggingFaceDrafter
        from flashspec.engine.verifier import TargetModel

        device, temperature = self.device, self.task.temperature
        config = flashspec.FlashSpecConfig(
            max_new_tokens=self.task.new_tokens,
            eos_token_ids=list(self.task.ends),
            bandit=flashspec.BanditConfig(n_arms=1),
            sampling=flashspec.SamplingConfig(
                gamma=self.width, temperature=temperature, variant="rejection" if temperature else "greedy"
            ),
        )
        drafter = HuggingFaceDrafter("draft", device, temperature=temperature, model=self.draft)
        target = TargetModel("target", device, model=self.model)
        self._ready = flashspec.SpeculativeEngine(config, [drafter], target)

    @property
    def device(self) -> torch.device:
        return where(self.model)

    def run(self, prompts: Sequence[tuple[int, ...]], first: int) -> list[list[int]]:
        found = []
        for index, prompt in enumerate(prompts):
            torch.manual_seed(first + index)
            out = self._ready.generate(torch.tensor([prompt])).output_ids[0].tolist()
            found.append(cut([token for token in out if token >= 0], self.task.ends))
        return found
