"""Whether a block drafter, its options and a target fit, before any weight is read."""

from __future__ import annotations

import os
from typing import Any

from specdec.errors import ModelError
from specdec.target import Target
from specdec_plugins.drafters.blocks import checkpoint
from specdec_plugins.drafters.blocks.checkpoint import BlockModel
from specdec_plugins.drafters.blocks.config import BlockConfig


def described(model: Any, revision: str | None) -> BlockConfig:
    """What a drafter's option `model` is; of a name only the config is read.

    Raises:
        ModelError: it is not there, or not one that is known.
    """
    if isinstance(model, BlockModel):
        return model.config
    if not isinstance(model, str | os.PathLike):
        raise ModelError(f"model: got {type(model).__name__}, wanted the folder of a block drafter, or a hub id")
    return checkpoint.describe(checkpoint.find(os.fspath(model), revision, weights=False))


def whole_block(drafter: Any) -> int:
    """The length of a draft where none was given: all that a block drafts."""
    return described(drafter.model, drafter.revision).most


def tempered(drafter: Any, _: object, value: float | None) -> None:
    """Validate a draft temperature."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-4 <= value < float("inf"):
        raise ValueError(f"'draft_temperature' must be at least 1e-4, got {value!r}; try proposal 'argmax'")
    if drafter.proposal == "argmax":
        raise ValueError("'draft_temperature' must be left out with proposal 'argmax', which draws nothing")


def misfits(config: BlockConfig, target: Target, most: int) -> list[str]:
    """Every reason why a target cannot give what a block drafter needs."""
    layers = int(target.config.num_hidden_layers)
    problems = []
    if wrong := [tap for tap in config.taps if not 0 <= tap < layers - 1]:
        problems.append(
            f"taps layer {wrong[0]} and the target has {layers}; wanted 0 to {layers - 2}, as the last one's output is "
            "never tapped raw"
        )
    problems += foreign(config, target)
    if most > config.most:
        problems.append(f"num_speculative_tokens is {most} and a block drafts {config.most}")
    if target.graphs != "off":
        problems.append(f"target.graphs {target.graphs!r} keeps no features, and it taps layers; try 'off'")
    return problems


def foreign(config: BlockConfig, target: Target) -> list[str]:
    """Sizes by which a target is another one than the drafter was trained for."""
    sizes = (
        ("decoder layers", config.target_layers, int(target.config.num_hidden_layers)),
        ("hidden size", config.shape.hidden_size, int(target.config.hidden_size)),
        ("vocabulary", config.vocabulary, target.vocabulary),
    )
    return [
        f"was trained for a target of {what} {wanted}, and this one has {got}"
        for what, wanted, got in sizes
        if wanted is not None and wanted != got
    ]
