"""From a recipe to a drafter in a run directory: texts, features, steps, measurements, the checkpoint."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, final

import torch
from attrs import define, evolve, field
from torch import Tensor

from specdec.encoding import has_template, prompt_ids
from specdec.environment import environment
from specdec.errors import DataError, RecipeError
from specdec.loading import load
from specdec.target import Target
from specdec.task import samples_of
from specdec_plugins.distill import bigrams, corpus, sampling
from specdec_plugins.distill.card import card
from specdec_plugins.distill.design import design, network
from specdec_plugins.distill.features import Features, head_of, see_plain, size_of, tap
from specdec_plugins.distill.folder import CURVE, DRAFTER, FEATURES, RESULTS, SAMPLES, Folder
from specdec_plugins.distill.measure import Curve
from specdec_plugins.distill.pool import GROUP, Pool, groups_of
from specdec_plugins.distill.recipe import DistillRecipe
from specdec_plugins.distill.train import Trainer
from specdec_plugins.distill.vocabulary import Lexicon, frequent
from specdec_plugins.drafters.blocks import checkpoint
from specdec_plugins.drafters.blocks.config import BlockConfig
from specdec_plugins.drafters.blocks.lineage import mark
from specdec_plugins.kv.slab import Slab
from specdec_plugins.tasks.jsonl import Jsonl

_EVERY = 20  # steps between two lines of the log


@final
@define(eq=False)
class Run:
    """One training.

    Attributes:
        recipe: what it is.
        folder: where it is written.
        tell: told how far it is.
        stopped: not empty when it is to stop after the step.
        done: it is finished.
        trained_for: the mark of the target's weights.
    """

    recipe: DistillRecipe
    folder: Folder
    tell: Callable[[str], None]
    stopped: Sequence[Any]
    done: bool = field(init=False, default=False)
    trained_for: str = field(init=False, default="")

    def train(self) -> None:
        """Train, from where the folder stopped.

        Raises:
            SpecdecError: it cannot be done, or its numbers went beyond all bounds.
        """
        recipe = self.recipe
        model, tokenizer = load(
            recipe.target.model,
            **{name: getattr(recipe.target, name) for name in _LOADED},
        )
        texts = self._texts(model, tokenizer)
        if self.stopped:
            return
        learnt, held = corpus.split(texts, recipe.data.held_out)
        held = sorted(held, key=lambda text: len(text.tokens))[-recipe.train.measured :]
        if not learnt or not held:
            raise DataError(
                f"data: {len(learnt)} texts to train on and {len(held)} held out, wanted some of each; try more texts "
                "or another data.held_out"
            )
        longest = max(len(text.tokens) for text in texts)
        target = Target(model, tokenizer, kv=Slab(rows=GROUP, tokens=max(2, longest)))
        config = design(recipe.drafter, target, texts)
        see_plain(target, held[0])
        about = environment(target) | {"texts": corpus.digest(texts)}
        self.folder.claim(about)
        self.trained_for = mark(model)
        seen = [
            features
            for first in range(0, len(held), GROUP)
            for features in self._tap(target, config, held[first : first + GROUP])
        ]
        trainer = self._trainer(target, config, learnt, size_of(seen))
        self.tell(
            f"{len(learnt)} texts of {sum(len(text.tokens) for text in learnt)} tokens, {len(held)} held out; "
            f"{sum(parameter.numel() for parameter in trainer.network.parameters()) / 1e6:.1f} million parameters"
        )
        self._steps(trainer, config, list(zip(held, seen, strict=True)))
        if not self.done:
            return
        self._finish(config, about)

    def _texts(self, model: Any, tokenizer: Any) -> list[corpus.Text]:
        """All texts, in an order that does not depend on when each was made."""
        data, options = self.recipe.data, self.recipe.sample
        if tokenizer is None and (data.texts or data.prompts):
            raise DataError("target: has no tokenizer, so texts cannot become tokens; try data.samples, which are ids")
        config = model.config.get_text_config(decoder=True)
        vocabulary, most = int(config.vocab_size), data.max_tokens
        if context := getattr(config, "max_position_embeddings", None):
            most = min(most, int(context))
        found = [text for file in data.texts for text in corpus.finished(file, tokenizer)]
        files = list(data.samples)
        if data.prompts:
            template: dict[str, Any] | None = {} if has_template(tokenizer) else None
            prompts = {}
            for file in data.prompts:
                for sample in samples_of(Jsonl(), "jsonl", file, None):
                    what = sample.messages or sample.text or ""
                    ids = prompt_ids(what, tokenizer, template, f"{file}: prompt {sample.id!r}", "another prompt")
                    name = f"{Path(file).stem}-{sample.id}"
                    if name in prompts:
                        raise DataError(f"{file}: prompt {name!r} is in another file of that name too; rename one")
                    prompts[name] = ids
            fitting = {name: ids for name, ids in prompts.items() if len(ids) < most}
            if less := len(prompts) - len(fitting):
                self.tell(f"{less} of {len(prompts)} prompts leave no room for an answer within {most} tokens")
            if not (prompts := fitting):
                raise DataError(f"data.prompts: no prompt is shorter than {most} tokens; try more data.max_tokens")
            longest = max(map(len, prompts.values()))
            cache = Slab(rows=min(options.rows, len(prompts)), tokens=longest + options.max_new_tokens)
            target = Target(model, tokenizer, kv=cache)
            answers = self.folder.path / SAMPLES
            sampling.answer(target, prompts, answers, options, self.recipe.seed, self.tell, self.stopped)
            files += [str(answers)] * (not self.stopped)
        found += [text for file in files for text in corpus.sampled(file, vocabulary)]
        return sorted(corpus.cut(found, most), key=lambda text: (text.id, text.tokens))

    def _tap(self, target: Target, config: BlockConfig, texts: Sequence[corpus.Text]) -> list[Features]:
        return tap(target, texts, config.taps)

    def _trainer(self, target: Target, config: BlockConfig, texts: Sequence[corpus.Text], size: Tensor) -> Trainer:
        recipe, options = self.recipe, self.recipe.train
        head = head_of(target)
        made = network(config, recipe.drafter, size, recipe.seed).to(target.device)
        if recipe.drafter.start is None and not self.folder.begun:
            bigrams.begin(made.markov_head, target, head, texts)
        common = frequent(texts, len(head) if options.vocabulary is None else options.vocabulary * 3 // 4)
        groups = groups_of(texts, recipe.seed)
        row = (len(config.taps) + 1) * config.shape.hidden_size * head.element_size()
        most = max(sum(len(text.tokens) for text in group) for group in groups) * row
        pool = Pool(
            folder=self.folder.path / FEATURES,
            groups=groups,
            tap=lambda group: self._tap(target, config, group),
            room=max(1, int(options.pool_gb * 1e9 // most)),
            fresh=options.fresh,
        )
        return Trainer(
            target=target,
            network=made,
            pool=pool,
            lexicon=Lexicon(head, common, options.vocabulary),
            options=options,
            size=config.block_size,
            mask_id=config.mask_token,
            seed=recipe.seed,
        )

    def _steps(self, trainer: Trainer, config: BlockConfig, held: list[tuple[corpus.Text, Features]]) -> None:
        if (state := self.folder.state()) is not None:
            trainer.restore(state)
            self.tell(f"going on after step {trainer.step}")
        log = self.folder.logged(trainer.step)
        curves = [entry for entry in log if "curves" in entry]
        best = max((_worth(entry["curves"]) for entry in curves), default=0.0)
        options, began, first = self.recipe.train, time.perf_counter(), trainer.step
        parts: list[dict[str, float]] = []
        while trainer.step < trainer.last and not self.stopped:
            if trainer.step == options.steps:
                self._take_best(trainer, config)
            learning = trainer.step < options.steps
            parts.append(trainer.advance())
            step = trainer.step
            _see_finite(step, parts[-1].values())
            if step % _EVERY == 0 or step in (options.steps, trainer.last):
                mean = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
                pace = (time.perf_counter() - began) / (step - first)
                self.folder.log({"step": step, "seconds_a_step": round(pace, 3), **mean})
                self.tell(_line(step, trainer.last, pace, mean, learning=learning))
                parts = []
            if learning and (step % options.measure == 0 or step == options.steps):
                entry: dict[str, Any] = {
                    "step": step,
                    "curves": {name: _plain(one) for name, one in trainer.curves(held).items()},
                }
                _see_finite(step, [_worth(entry["curves"])])
                self.folder.log(entry)
                curves.append(entry)
                self._table(curves)
                self.tell(_curve_line(entry))
                if _worth(entry["curves"]) > best:
                    best = _worth(entry["curves"])
                    self._save(trainer, config)
                self.folder.keep(trainer.state())
        self.done = trainer.step == trainer.last
        if self.done:
            self._save(trainer, config)
        else:
            self.folder.keep(trainer.state())

    def _take_best(self, trainer: Trainer, config: BlockConfig) -> None:
        """The confidence head learns beside the weights that are kept, rounded as they are kept."""
        kept = checkpoint.load(self.folder.path / DRAFTER, dtype=torch.float32)
        own = trainer.network
        for module, from_file in ((own.backbone, kept.backbone), (own.markov_head, kept.markov)):
            assert from_file is not None  # written by this run
            module.load_state_dict(from_file.state_dict())

    def _save(self, trainer: Trainer, config: BlockConfig) -> None:
        own = trainer.network
        half = {name: value.to(torch.bfloat16) for name, value in own.state_dict().items()}
        model = checkpoint.BlockModel.empty(config)
        for prefix, part in (
            ("backbone.", model.backbone),
            ("markov_head.", model.markov),
            ("confidence_head.", model.confidence),
        ):
            assert part is not None  # as designed
            part.load_state_dict({name.removeprefix(prefix): v for name, v in half.items() if name.startswith(prefix)})
            part.to(torch.bfloat16)
        checkpoint.save(self.folder.path / DRAFTER, evolve(model, trained_for=self.trained_for))

    def _table(self, curves: Sequence[dict[str, Any]]) -> None:
        size = self.recipe.drafter.block_size
        lines: list[list[Any]] = [
            ["step", "rule", "acceptance_length", *(f"acceptance_{k}" for k in range(1, size + 1))]
        ]
        for entry in curves:
            for name, one in entry["curves"].items():
                lines.append([entry["step"], name, one["length"], *one["acceptance"]])
        self.folder.table(CURVE, lines)

    def _finish(self, config: BlockConfig, about: dict[str, Any]) -> None:
        log = self.folder.logged(self.recipe.train.steps + self.recipe.train.confidence_steps)
        curves = [entry for entry in log if "curves" in entry]
        best = max(curves, key=lambda entry: _worth(entry["curves"]))
        results = {"schema_version": 1, "best": best, "drafter": DRAFTER, "target": about["target"]}
        text = card(self.recipe, config, best, about, self.trained_for)
        (self.folder.path / DRAFTER / "README.md").write_text(text, encoding="utf-8")
        self.folder.write(RESULTS, json.dumps(results, indent=2) + "\n")
        self.folder.forget()


_LOADED = (
    "revision", "dtype", "device", "device_map", "attn_implementation", "quantization_config", "trust_remote_code",
    "packed",
)  # fmt: skip


def _plain(curve: Curve) -> dict[str, Any]:
    return {"length": curve.length, "acceptance": list(curve.acceptance)}


def _worth(curves: dict[str, Any]) -> float:
    """What decides which weights are kept: the acceptance lengths of all rules."""
    return float(sum(one["length"] for one in curves.values()))


def _see_finite(step: int, numbers: Iterable[float]) -> None:
    if not all(map(math.isfinite, numbers)):
        raise RecipeError(
            f"train: numbers of step {step} are not finite; try a smaller train.learning_rate or train.clip, a longer "
            "train.warm_up, or another target.dtype"
        )


def _line(step: int, last: int, pace: float, mean: dict[str, float], *, learning: bool) -> str:
    left = (last - step) * pace / 60
    what = "kept" if learning else "confidence head: error"
    value = mean["kept"] if learning else mean["error"]
    return (
        f"step {step} of {last}: loss {mean['loss']:.3f}, {what} {value:.3f}; {pace:.2f} s a step, {left:.0f} min left"
    )


def _curve_line(entry: dict[str, Any]) -> str:
    return f"step {entry['step']}, held out: " + "; ".join(
        f"{name} {one['length']:.3f} ({' '.join(f'{value:.3f}' for value in one['acceptance'])})"
        for name, one in entry["curves"].items()
    )
