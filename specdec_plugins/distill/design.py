"""The drafter that a recipe describes, for one target."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from specdec.errors import CompatibilityError
from specdec.target import Target
from specdec_plugins.distill.corpus import Text
from specdec_plugins.distill.network import Network, start
from specdec_plugins.distill.recipe import DrafterSection
from specdec_plugins.drafters.blocks import checkpoint
from specdec_plugins.drafters.blocks.backbone import Shape
from specdec_plugins.drafters.blocks.config import BlockConfig

_TAPS = 5


def spread(layers: int) -> tuple[int, ...]:
    """Five layers, or fewer where there are few, from the second to the last but two."""
    first, last = min(1, layers - 2), max(layers - 3, min(1, layers - 2))
    count = min(_TAPS, last - first + 1)
    return tuple(round(first + (last - first) * index / max(1, count - 1)) for index in range(count))


def design(section: DrafterSection, target: Target, texts: Iterable[Text]) -> BlockConfig:
    """The drafter's sizes.

    Raises:
        CompatibilityError: the target does not fit; names every reason.
    """
    config = target.config
    layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
    if layers < 2:
        raise CompatibilityError("target: has 1 layer, wanted 2 at least: the last one's output is never tapped raw")
    taps = spread(layers) if section.taps is None else section.taps
    problems = [
        f"drafter.taps: the target has no layer {tap} that can be tapped; wanted some of 0 to {layers - 2}"
        for tap in taps
        if not 0 <= tap < layers - 1
    ]
    if not taps or len(set(taps)) < len(taps):
        problems.append(f"drafter.taps: got {list(taps)}, wanted different layers")
    ours = section.num_attention_heads or heads
    shared = section.num_key_value_heads or getattr(config, "num_key_value_heads", None) or heads
    size = section.head_dim or getattr(config, "head_dim", None) or config.hidden_size // heads
    if ours % shared or size % 2:
        problems.append(
            f"drafter: {ours} heads of {size} numbers do not share {shared}; wanted a divisor and even sizes"
        )
    mask = section.mask_token_id
    if mask is None and section.start is not None:
        mask = checkpoint.describe(Path(section.start).expanduser()).mask_token
    elif mask is None:
        mask = _unseen(texts, target.vocabulary)
    if mask >= target.vocabulary:
        problems.append(f"drafter.mask_token_id: got {mask}, wanted an id below {target.vocabulary}")
    if target.dtype == torch.float64:
        problems.append("target: is float64, and a drafter learns in float32 at most; try target.dtype: float32")
    if problems:
        raise CompatibilityError(problems)
    return BlockConfig(
        shape=Shape(
            hidden_size=int(config.hidden_size),
            intermediate_size=section.intermediate_size or _inner(config),
            num_hidden_layers=section.num_hidden_layers,
            num_attention_heads=ours,
            num_key_value_heads=int(shared),
            head_dim=int(size),
            rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
            rope_theta=_theta(config),
            num_taps=len(taps),
            windows=(None,) * section.num_hidden_layers,
        ),
        vocabulary=target.vocabulary,
        block_size=section.block_size,
        mask_token=mask,
        taps=tuple(taps),
        target_layers=layers,
        context=target.context,
        markov=section.markov_head_type,
        rank=section.markov_rank,
        confidence=True,
        confidence_with_markov=True,
    )


def network(config: BlockConfig, section: DrafterSection, size: Tensor, seed: int) -> Network:
    """The network with its first weights: those of a drafter to go on from, or random ones.

    Args:
        config: its sizes.
        section: the recipe's.
        size: how large each number of the target's last rows is, [H].
        seed: of random weights.

    Raises:
        CompatibilityError: the drafter to go on from is another one.
        ModelError: it cannot be read.
    """
    if section.start is None:
        made = Network(checkpoint.BlockModel.empty(config))
        start(made, size, seed)
        return made
    model = checkpoint.load(Path(section.start).expanduser(), dtype=size.dtype)
    ours, theirs = _sizes(config), _sizes(model.config)
    if different := [name for name in ours if ours[name] != theirs[name]]:
        raise CompatibilityError(
            [f"drafter.start: its {name} is {theirs[name]}, the recipe's {ours[name]}" for name in different]
        )
    made = Network(model)
    made.requires_grad_(True)
    return made


# What a recipe calls otherwise.
_OPTIONS = {"rank": "markov_rank", "markov": "markov_head_type", "mask_token": "mask_token_id"}


def _sizes(config: BlockConfig) -> dict[str, Any]:
    """What a description says, those of its backbone beside the others, as a recipe calls it."""
    found = attrs.asdict(config)
    return {_OPTIONS.get(name, name): value for name, value in (found.pop("shape") | found).items()}


def _unseen(texts: Iterable[Text], vocabulary: int) -> int:
    seen = {token for text in texts for token in text.tokens}
    return next((token for token in range(vocabulary) if token not in seen), vocabulary - 1)


def _inner(config: Any) -> int:
    """GPT-2's is called otherwise, and mostly left out."""
    found = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return int(found or 4 * config.hidden_size)


def _theta(config: Any) -> float:
    rope = getattr(config, "rope_parameters", None) or {}
    found = rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    assert math.isfinite(found)
    return float(found)
