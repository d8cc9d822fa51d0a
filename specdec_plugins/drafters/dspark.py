"""DSpark: a block from one forward over the target's features, its tokens tied together by a Markov head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, final

from attrs import Factory, define, field
from attrs.validators import ge, in_, instance_of, le

from specdec.drafter import Drafter
from specdec.errors import CompatibilityError
from specdec.sequence import Batch
from specdec.target import Target
from specdec.types import Draft, Kept
from specdec_plugins.drafters.blocks.config import BlockConfig
from specdec_plugins.drafters.blocks.drafting import Blocks
from specdec_plugins.drafters.blocks.fitting import described, tempered, whole_block


@final
@define(kw_only=True, eq=False)
class DSpark(Drafter):
    """Proposes a block of tokens from features of the target: one forward of a few layers, then a bias that looks at
    the token before, drawn left to right.

    Every row of the block says what follows it. Greedy requests draft point masses; otherwise the law handed over is
    the very tensor each token was drawn from, after the request's own filters and processors. A text past the drafter's
    context gets no draft, and a draft ends at logits that are not finite.

    Reads what DeepSpec publishes (dspark_*, and dflash_*_block7, which have no Markov head) and `dspark` of the
    speculators package; docs/block-drafters.md.

    Source: DSpark, arXiv:2607.05147.
    Cost: one forward of the drafter's layers and of the head over the block, the Markov head once for each token, and
    keys and values of those layers for every token.

    Attributes:
        model: a folder with the checkpoint, or a hub id.
        revision: of a hub id.
        num_speculative_tokens: length of a draft, at most what a block drafts, which it is when left out. A shorter
            draft is the beginning of a whole block.
        proposal: `sample` draws each token and hands over its law; `argmax` takes the most probable one.
        draft_temperature: of the draft of requests that sample; their own when left out.
        threshold: a draft ends before the first token that the confidence head gives less; 0 never cuts.
        dtype: `auto` is the checkpoint's.
        device: where it goes; the target's when left out.
        packed: on a CPU, keep its linear layers in the layout that it multiplies fastest.
        notes: what binding found worth saying.
    """

    model: Any
    revision: str | None = None
    num_speculative_tokens: int = field(
        default=Factory(whole_block, takes_self=True), validator=[instance_of(int), ge(1)]
    )
    proposal: Literal["sample", "argmax"] = field(default="sample", validator=in_(("sample", "argmax")))
    draft_temperature: float | None = field(default=None, validator=tempered)
    threshold: float = field(default=0.0, validator=[ge(0.0), le(1.0)])
    dtype: str = "auto"
    device: str | None = None
    packed: bool = True
    notes: list[str] = field(init=False, factory=list)
    _blocks: Blocks | None = field(init=False, default=None)

    @classmethod
    def reads(cls, config: Mapping[str, Any]) -> bool:
        return config.get("speculators_model_type") == "dspark" or config.get("architectures") == ["Qwen3DSparkModel"]

    @property
    def deterministic(self) -> bool:
        return self.proposal == "argmax"

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self._blocks is None else self._blocks.model.config.taps

    @property
    def summary(self) -> str:
        return "" if self._blocks is None else self._blocks.summary

    def bind(self, target: Target) -> None:
        if self._blocks is not None:
            if self._blocks.target is target:
                return
            raise CompatibilityError("drafter DSpark is bound to another target; make one for each target")
        self._blocks = Blocks.load(
            self.model,
            target,
            most=self.num_speculative_tokens,
            temperature=0.0 if self.deterministic else self.draft_temperature,
            threshold=self.threshold,
            problems=self._problems(described(self.model, self.revision)),
            owner="DSpark",
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

    def _problems(self, config: BlockConfig) -> list[str]:
        problems = []
        if config.markov is None and not config.from_anchor:
            problems.append("the checkpoint is one of DFlash; try drafter 'dflash'")
        if self.threshold > 0 and not config.confidence:
            problems.append(f"threshold is {self.threshold} and the checkpoint has no confidence head; try 0")
        return problems

    def _bound(self) -> Blocks:
        if self._blocks is None:
            raise CompatibilityError("drafter DSpark is not bound to a target; call bind(target), as Engine does")
        return self._blocks
