"""DFlash: a block from one forward over the target's features, its tokens independent of one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from attrs import define, field

from specdec_plugins.drafters.blocks.config import BlockConfig
from specdec_plugins.drafters.blocks.drafter import BlockDrafter, Proposal, proposals


@final
@define(kw_only=True, eq=False)
class DFlash(BlockDrafter):
    """Proposes a block of tokens from features of the target: one forward of a few layers fills all masks at once.

    Tokens of a block do not see one another, and drawn independently at temperature 1 they make little sense together,
    so the argmax is proposed unless asked otherwise. With `sample` the law handed over is the very tensor each token
    was drawn from, after the request's own filters and processors. Greedy requests draft point masses. A text past the
    drafter's context gets no draft, and a draft ends at logits that are not finite.

    Reads what z-lab publishes for targets of the Qwen3 kind, `dflash` of the speculators package, and DeepSpec's
    dflash_*_block7, whose rows say what follows them; docs/block-drafters.md.

    Source: DFlash, arXiv:2602.06036.
    Cost: one forward of the drafter's layers and of the head over the block, and keys and values of those layers for
    every token.

    Attributes:
        proposal: `argmax` takes the most probable token; `sample` draws each token and hands over its law.
    """

    proposal: Proposal = field(default="argmax", validator=proposals)

    @classmethod
    def reads(cls, config: Mapping[str, Any]) -> bool:
        return config.get("speculators_model_type") == "dflash" or config.get("architectures") == ["DFlashDraftModel"]

    def _problems(self, config: BlockConfig) -> list[str]:
        heads = config.markov is not None or config.confidence
        return ["the checkpoint has a Markov or a confidence head; try drafter 'dspark'"] * heads

    @property
    def _threshold(self) -> float:
        return 0.0
