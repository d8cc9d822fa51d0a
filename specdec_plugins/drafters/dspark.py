"""DSpark: a block from one forward over the target's features, its tokens tied together by a Markov head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from attrs import define, field
from attrs.validators import ge, le

from specdec_plugins.drafters.blocks.config import BlockConfig
from specdec_plugins.drafters.blocks.drafter import BlockDrafter, length
from specdec_plugins.drafters.blocks.shipped import SMOLLM2


@final
@define(kw_only=True, eq=False)
class DSpark(BlockDrafter):
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
        model: a folder with the checkpoint, or a hub id; when left out the drafter for SmolLM2-135M-Instruct that comes
            with the package.
        threshold: a draft ends before the first token that the confidence head gives less; 0 never cuts.
    """

    model: Any = SMOLLM2
    num_speculative_tokens: int = length()
    threshold: float = field(default=0.0, validator=[ge(0.0), le(1.0)])

    @classmethod
    def reads(cls, config: Mapping[str, Any]) -> bool:
        return config.get("speculators_model_type") == "dspark" or config.get("architectures") == ["Qwen3DSparkModel"]

    def _problems(self, config: BlockConfig) -> list[str]:
        problems = []
        if config.markov is None and not config.from_anchor:
            problems.append("the checkpoint is one of DFlash; try drafter 'dflash'")
        if self.threshold > 0 and not config.confidence:
            problems.append(f"threshold is {self.threshold} and the checkpoint has no confidence head; try 0")
        return problems

    @property
    def _threshold(self) -> float:
        return self.threshold
