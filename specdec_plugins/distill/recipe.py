"""What is trained on what, as a YAML file. Everything wrong with one is said at once, and no model is loaded for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, final

import attrs
from attrs import field, frozen
from attrs.validators import ge, gt, le, lt, optional

from specdec.errors import RecipeError
from specdec.options import build, values
from specdec.recipe import TargetSection
from specdec.registry import suggestion
from specdec.yamlfile import find, is_file, override, read


def _numbers(value: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


@final
@frozen(kw_only=True)
class DrafterSection:
    """The network that is trained.

    Attributes:
        block_size: places of a block; each of them predicts a token.
        num_hidden_layers: layers of the backbone.
        taps: layers of the target whose outputs it reads; five from the second to the last but two when left out.
        intermediate_size: of its layers; the target's when left out.
        num_attention_heads: the target's when left out.
        num_key_value_heads: the target's when left out.
        head_dim: the target's when left out.
        markov_rank: rank of the bias from the token before.
        markov_head_type: which bias.
        mask_token_id: what stands at the places that are to be filled; when left out, that of the drafter to go on
            from, or else the first id that the texts never have.
        start: the folder of a trained drafter to go on from, of the same sizes.
    """

    block_size: int = field(default=7, validator=ge(1))
    num_hidden_layers: int = field(default=2, validator=ge(1))
    taps: tuple[int, ...] | None = field(default=None, converter=_numbers)
    intermediate_size: int | None = field(default=None, validator=optional(ge(1)))
    num_attention_heads: int | None = field(default=None, validator=optional(ge(1)))
    num_key_value_heads: int | None = field(default=None, validator=optional(ge(1)))
    head_dim: int | None = field(default=None, validator=optional(ge(2)))
    markov_rank: int = field(default=64, validator=ge(1))
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    mask_token_id: int | None = field(default=None, validator=optional(ge(0)))
    start: str | None = None


@final
@frozen(kw_only=True)
class DataSection:
    """What it is trained on: JSON Lines, looked for in the recipe's folder, then in the current one.

    Attributes:
        texts: files of finished texts: `text` alone, or `prompt` or `messages` with `response`.
        prompts: files of prompts that the target answers first, as task `jsonl` reads them.
        samples: files of such answers made elsewhere: {"id": ..., "prompt": [ids], "tokens": [ids]}.
        max_tokens: what is longer is cut, and what is longer than the target's context.
        held_out: share of the texts that measures and never trains; which ones, their ids decide.
    """

    texts: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    max_tokens: int = field(default=768, validator=ge(8))
    held_out: float = field(default=0.02, validator=[gt(0.0), lt(1.0)])


@final
@frozen(kw_only=True)
class SampleSection:
    """How the target answers prompts.

    Attributes:
        temperature: 1 is the law that a drafter should know.
        max_new_tokens: of an answer.
        rows: prompts at once.
    """

    temperature: float = field(default=1.0, validator=gt(0.0))
    max_new_tokens: int = field(default=256, validator=ge(1))
    rows: int = field(default=48, validator=ge(1))


@final
@frozen(kw_only=True)
class TrainSection:
    """How it is trained.

    Attributes:
        steps: of the network.
        confidence_steps: of the confidence head, afterwards.
        sequences: texts in a step.
        anchors: blocks of each text in a step.
        decay: each place of a block counts this much as often as the one before it.
        vocabulary: tokens that the loss of a step looks at: the most frequent ones, those of its texts, and for a
            quarter a random choice that stands for all others; the whole vocabulary when left out.
        tv: weight of the total variation from the target's law, which is what the standard rule rejects.
        kl: weight of the divergence KL(p || q).
        ce: weight of the cross-entropy of the texts' own tokens.
        learning_rate: at its highest; it falls to a hundredth along a cosine.
        warm_up: steps in which it rises.
        weight_decay: of AdamW.
        clip: most norm of a gradient.
        pool_gb: most space for features of the target, in the run directory.
        fresh: after so many steps eight more texts come into the pool, and eight go where it is full.
        measure: steps between measurements of held-out texts; state is kept as often.
        measured: most held-out texts looked at.
    """

    steps: int = field(default=4000, validator=ge(1))
    confidence_steps: int = field(default=200, validator=ge(1))
    sequences: int = field(default=4, validator=ge(1))
    anchors: int = field(default=32, validator=ge(1))
    decay: float = field(default=0.8, validator=[gt(0.0), le(1.0)])
    vocabulary: int | None = field(default=None, validator=optional(ge(16)))
    tv: float = field(default=1.0, validator=ge(0.0))
    kl: float = field(default=0.5, validator=ge(0.0))
    ce: float = field(default=0.1, validator=ge(0.0))
    learning_rate: float = field(default=1e-3, validator=gt(0.0))
    warm_up: int = field(default=100, validator=ge(0))
    weight_decay: float = field(default=0.0, validator=ge(0.0))
    clip: float = field(default=1.0, validator=gt(0.0))
    pool_gb: float = field(default=4.0, validator=gt(0.0))
    fresh: int = field(default=16, validator=ge(1))
    measure: int = field(default=500, validator=ge(1))
    measured: int = field(default=32, validator=ge(1))


@final
@frozen(kw_only=True)
class DistillRecipe:
    """A checked recipe; files are full paths."""

    target: TargetSection
    drafter: DrafterSection
    data: DataSection
    sample: SampleSection
    train: TrainSection
    seed: int = field(default=0, validator=ge(0))
    output_dir: str = field()

    def to_dict(self) -> dict[str, Any]:
        """Plain data with every default written out."""
        sections = {name: values(getattr(self, name)) for name in _SECTIONS}
        return {**sections, "seed": self.seed, "output_dir": self.output_dir}


_SECTIONS: dict[str, type] = {
    "target": TargetSection,
    "drafter": DrafterSection,
    "data": DataSection,
    "sample": SampleSection,
    "train": TrainSection,
}
_ALONE = ("seed", "output_dir")


def read_recipe(source: str, overrides: Sequence[str] = ()) -> DistillRecipe:
    """Read and check a recipe.

    Args:
        source: its path.
        overrides: such as `train.steps=100`; values are YAML.

    Raises:
        RecipeError: lists every problem.
    """
    path = find(source)
    content = read(path)
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: got {type(content).__name__}, wanted a mapping with target and data")
    for text in overrides:
        override(content, text)
    known = (*_SECTIONS, *_ALONE)
    problems = [
        f"{key}: unknown section{suggestion(str(key), known)}; there are {', '.join(known)}"
        for key in content
        if key not in known
    ]
    problems += [
        f"{name}: missing; every recipe has target and data" for name in ("target", "data") if not content.get(name)
    ]
    made: dict[str, Any] = {}
    for name, cls in _SECTIONS.items():
        given = content.get(name) or {}
        if not isinstance(given, dict):
            problems.append(f"{name}: got {given!r}, wanted a mapping")
            continue
        if name == "target" and not given:
            continue
        made[name], found = build(cls, given, name, f"section {name}")
        problems += found
    alone = {name: content[name] for name in _ALONE if name in content}
    seed, output = alone.get("seed", 0), alone.get("output_dir", f"runs/{path.stem}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        problems.append(f"seed: got {seed!r}, wanted a whole number from 0")
    if not isinstance(output, str) or not output or "\0" in output:
        problems.append(f"output_dir: got {output!r}, wanted a folder; try {f'runs/{path.stem}'!r}")
    if made.get("data") is not None:
        made["data"], missing = _placed(made["data"], path.parent)
        problems += missing
    if made.get("train") is not None and made["train"].tv + made["train"].kl + made["train"].ce == 0:
        problems.append("train: got tv, kl and ce 0, wanted one of them above; try train.tv: 1")
    if made.get("target") is not None and (graphs := made["target"].graphs) != "off":
        problems.append(f"target.graphs: got {graphs!r}, and a training makes no use of graphs; leave it out")
    if problems:
        raise RecipeError(problems)
    return DistillRecipe(**made, seed=seed, output_dir=output)


def _placed(data: DataSection, folder: Path) -> tuple[DataSection, list[str]]:
    """The same with full paths, and what is not there."""
    problems: list[str] = []
    if not (data.texts or data.prompts or data.samples):
        problems.append("data: got no file, wanted some under texts, prompts or samples")
    placed: dict[str, Any] = {}
    for name in ("texts", "prompts", "samples"):
        found = []
        for file in getattr(data, name):
            places = (folder / file, Path(file))
            place = next((place for place in places if is_file(place)), None)
            if place is None:
                looked = " and ".join(dict.fromkeys(str(place.parent.absolute()) for place in places))
                problems.append(f"data.{name}: no file {Path(file).name!r}; looked in {looked}")
            else:
                found.append(str(place.resolve()))
        placed[name] = tuple(found)
    return attrs.evolve(data, **placed), problems
