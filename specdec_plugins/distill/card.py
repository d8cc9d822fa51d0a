"""The model card beside a trained drafter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec_plugins.distill.recipe import DistillRecipe
from specdec_plugins.drafters.blocks.config import BlockConfig


def card(
    recipe: DistillRecipe, config: BlockConfig, best: Mapping[str, Any], about: Mapping[str, Any], trained_for: str
) -> str:
    """A README.md: what it is for, what it was trained on, what it reached.

    Args:
        recipe: as it was read.
        config: the drafter's sizes.
        best: a measurement of held-out texts.
        about: the environment.
        trained_for: the mark of the target's weights that the checkpoint carries.
    """
    shape, target, name = config.shape, about["target"], Path(recipe.target.model).name
    files = [*recipe.data.texts, *recipe.data.prompts, *recipe.data.samples]
    places = range(1, config.block_size + 1)
    table = [
        "| rule | acceptance length | " + " | ".join(f"place {place}" for place in places) + " |",
        "| - " * (config.block_size + 2) + "|",
        *(
            f"| {name} | {one['length']:.2f} | " + " | ".join(f"{value:.3f}" for value in one["acceptance"]) + " |"
            for name, one in best["curves"].items()
        ),
    ]
    return "\n".join(
        [
            f"# A block drafter for {name}",
            "",
            f"Drafts {config.block_size} tokens in one forward, from layers {', '.join(map(str, config.taps))} of its "
            "target. The form is DSpark's; embedding and vocabulary head are the target's and not in the file.",
            "",
            f"- layers: {shape.num_hidden_layers}, hidden size {shape.hidden_size}, intermediate size "
            f"{shape.intermediate_size}, Markov head {config.markov} of rank {config.rank}",
            f"- target: {target['model_type']}, {target['parameters']} parameters, {target['dtype']}, weights "
            f"`{trained_for}`",
            f"- data: {', '.join(Path(file).name for file in files)}; answers at temperature "
            f"{recipe.sample.temperature:g}",
            f"- steps: {recipe.train.steps}, of {recipe.train.sequences} texts with {recipe.train.anchors} blocks "
            f"each; seed {recipe.seed}",
            "",
            f"Held-out texts at temperature 1, step {best['step']}, every token before a place being the target's:",
            "",
            *table,
            "",
        ]
    )
