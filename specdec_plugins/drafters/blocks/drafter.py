"""What block drafters share: their options, and one `Blocks` to which all work goes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

from attrs import Factory, define, field
from attrs.validators import ge, in_, instance_of
from torch import nn

from specdec.drafter import Drafter
from specdec.errors import CompatibilityError
from specdec.sequence import Batch
from specdec.target import Target
from specdec.types import Draft, Kept
from specdec_plugins.drafters.blocks.config import BlockConfig
from specdec_plugins.drafters.blocks.drafting import Blocks
from specdec_plugins.drafters.blocks.fitting import described, tempered, whole_block

Proposal = Literal["sample", "argmax"]
proposals = in_(("sample", "argmax"))


def length() -> Any:
    """The field num_speculative_tokens: the block's own length where none is given. It stands behind `model`."""
    return field(default=Factory(whole_block, takes_self=True), validator=[instance_of(int), ge(1)])


@define(kw_only=True, eq=False)
class BlockDrafter(Drafter):
    """A drafter that fills a block of places in one forward over the target's features.

    Attributes:
        model: a folder with the checkpoint, or a hub id.
        revision: of a hub id.
        num_speculative_tokens: length of a draft, at most what a block drafts, which it is when left out. A shorter
            draft is the beginning of a whole block.
        proposal: `sample` draws each token and hands over its law; `argmax` takes the most probable one.
        draft_temperature: of the draft of requests that sample; their own when left out.
        dtype: `auto` is the checkpoint's.
        device: where it goes; the target's when left out.
        packed: on a CPU, keep its linear layers in the layout that it multiplies fastest.
        notes: what binding found worth saying.
    """

    model: Any
    revision: str | None = None
    num_speculative_tokens: int = length()
    proposal: Proposal = field(default="sample", validator=proposals)
    draft_temperature: float | None = field(default=None, validator=tempered)
    dtype: str = "auto"
    device: str | None = None
    packed: bool = True
    notes: list[str] = field(init=False, factory=list)
    _blocks: Blocks | None = field(init=False, default=None)

    @property
    def deterministic(self) -> bool:
        return self.proposal == "argmax"

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self._blocks is None else self._blocks.model.config.taps

    @property
    def summary(self) -> str:
        return "" if self._blocks is None else self._blocks.summary

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        """What it brings beside the target, once it is bound."""
        return () if self._blocks is None else tuple(part for _, part in self._blocks.model.parts)

    def bind(self, target: Target) -> None:
        if self._blocks is not None:
            if self._blocks.target is target:
                return
            raise CompatibilityError(f"drafter {self._name} is bound to another target; make one for each target")
        self._blocks = Blocks.load(
            self.model,
            target,
            most=self.num_speculative_tokens,
            temperature=0.0 if self.deterministic else self.draft_temperature,
            threshold=self._threshold,
            problems=self._problems(described(self.model, self.revision)),
            owner=self._name,
            revision=self.revision,
            dtype=self.dtype,
            device=self.device,
            packed=self.packed,
        )
        self.notes = self._blocks.notes

    def propose(self, batch: Batch) -> Draft:
        return self._bound().propose(batch)

    def observe(self, batch: Batch, kept: Kept) -> None:
        self._bound().observe(batch, kept)

    def release(self, slots: tuple[int, ...]) -> None:
        self._bound().release(slots)

    @abstractmethod
    def _problems(self, config: BlockConfig) -> list[str]:
        """What speaks against a checkpoint, whatever the target."""

    @property
    @abstractmethod
    def _threshold(self) -> float:
        """A draft ends before the first token whose guessed acceptance is below; 0 never cuts."""

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _bound(self) -> Blocks:
        if self._blocks is None:
            raise CompatibilityError(
                f"drafter {self._name} is not bound to a target; call bind(target), as Engine does"
            )
        return self._blocks
