"""A recipe, run: every drafter with every verifier on the same prompts, noise, cache policy, loop and clock.

Prompts go in chunks of as many as the cache has rows; every combination does a chunk before the next begins, so that a
machine's mood hits all alike.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from attrs import evolve, fields, frozen, has

from specdec.drafter import Drafter
from specdec.encoding import has_template, prompt_ids
from specdec.engine import Engine
from specdec.environment import environment
from specdec.errors import CompatibilityError, DataError
from specdec.figures import PICTURES, sheets
from specdec.frontier import frontiers
from specdec.generation import failure, refuse
from specdec.noise import request_seed
from specdec.page import page, pictures, standalone
from specdec.pricing import price
from specdec.progress import Completion
from specdec.recipe import DataSection, Recipe
from specdec.recorder import Recorder, Recording
from specdec.registry import load
from specdec.report import markdown
from specdec.results import Row, combined, fidelity, plain_logprobs, summarise
from specdec.rundir import PAGE, REPORT, RunFolder
from specdec.target import Target
from specdec.task import Sample, scores_of
from specdec.trace import Trace
from specdec.types import Request, Sampling
from specdec.verifier import Verifier

BASELINE = "autoregressive"
_WARM_UP_TOKENS = 8
_log = logging.getLogger("specdec")


@final
@frozen
class Status:
    """Where a run is.

    Attributes:
        label: the combination that runs.
        done: requests that are finished, of all combinations.
        total: requests of the whole run.
        tokens_per_second: of this combination, in this session.
        acceptance_length: the same.
    """

    label: str
    done: int
    total: int
    tokens_per_second: float | None
    acceptance_length: float


@final
@frozen(eq=False)
class Combination:
    """One row of the comparison, the engine that makes it, how its tokens are drawn, and who records it, if anybody."""

    row: Row
    engine: Engine
    sampling: Sampling
    recorder: Recorder | None = None


def compare(
    recipe: Recipe, *, overwrite: bool = False, progress: Callable[[Status], None] | None = None
) -> dict[str, Any]:
    """Run a recipe and write its folder.

    Args:
        recipe: what to run.
        overwrite: replace a run that is in the folder.
        progress: told after every block of tokens.

    Returns:
        What `results.json` holds.

    Raises:
        SpecdecError: it cannot run; as far as possible found before the first step, all reasons at once.
    """
    folder = RunFolder.open(recipe.output_dir, recipe.to_dict(), overwrite=overwrite)
    options = {name: value for name, value in recipe.to_dict()["target"].items() if name != "model"}
    target = Target.load(recipe.target.model, kv=recipe.kv.make(), **options)
    prompts = encode(recipe.samples, target.tokenizer, recipe.data)
    rules = {entry.label: entry.make() for entry in recipe.verifiers}
    recording = Recording.of(recipe.to_dict(), rules)
    combinations = combine(recipe, target, recording)
    requests = [Request(prompt=prompt, sampling=recipe.sampling, id=name) for name, prompt in prompts.items()]
    refuse(combinations[0].engine, requests)
    _say_notes(target, [combination.engine.drafter for combination in combinations])
    about = {**environment(target), "prompts": _digest(prompts)}
    costs = price([(combination.row.drafter, combination.engine) for combination in combinations], requests)
    run = _Run(recipe, prompts, combinations, folder, progress)
    run.warm_up()
    with folder.hold():
        records = folder.begin(about)
        if records:
            _log.info("%s: resuming, %d requests are there already", folder.path, len(records))
        if recording is not None:
            recording.begin(target.vocabulary, prompts, records)
        records += run.remaining(records)
        curves, missing = ([], []) if recording is None else _frontiers(folder)
        results = {
            "recipe": recipe.name,
            "sampling": recipe.to_dict()["sampling"],
            "greedy": recipe.sampling.greedy,
            "seed": recipe.seed,
            "target": recipe.target.model,
            "data": {"file": recipe.data.file, "prompts": len(prompts), "repeats": recipe.report.repeats},
            "rows_at_once": target.kv.rows,
            "environment": about,
            **({"costs": costs} if costs else {}),
            **summarise(
                [combination.row for combination in combinations],
                records,
                {sample.id: sample.group for sample in recipe.samples},
            ),
            "frontiers": curves,
            "notes": missing,
        }
        tables = {file: sheet.text() for file, sheet in sheets(results).items()}
        try:
            drawn = pictures(results)
        except ImportError:
            drawn = None  # which the page says
        tables |= {PICTURES[file]: standalone(svg) for file, svg in (drawn or {}).items()}
        folder.finish(results, {REPORT: markdown(results), PAGE: page(results, drawn), **tables})
    return results


def _frontiers(folder: RunFolder) -> tuple[list[dict[str, Any]], list[str]]:
    _log.info("%s: replaying other thetas over the recorded steps", folder.path)
    try:
        drawn, missing = frontiers(Trace.open(folder.path))
    except Exception as error:  # such as a shard that is gone: the run is finished, and gets its report
        drawn, missing = [], [f"any rule: {' '.join(str(error).split())}"]
    return drawn, [f"Not in the frontier, {text}." for text in missing]


def encode(samples: Sequence[Sample], tokenizer: Any, data: DataSection) -> dict[str, tuple[int, ...]]:
    """Sample id -> prompt ids, through the chat template where the recipe says so.

    Raises:
        DataError: there is no tokenizer, or no template where one is needed, or the template refuses a sample.
    """
    if tokenizer is None:
        raise DataError("target.model: has no tokenizer, so prompts cannot become tokens; try another folder or hub id")
    template = has_template(tokenizer)
    if data.chat_template is True and not template:
        raise DataError("data.chat_template: true, but the target's tokenizer has no template; try auto")
    use = template if data.chat_template == "auto" else data.chat_template
    hint = "other data.chat_template_kwargs, or data.chat_template: false" if use else "another prompt"
    prompts = {}
    for sample in samples:
        if sample.messages and not use:
            raise DataError(f"sample {sample.id!r}: chat messages need a chat template, and none is used here")
        prompts[sample.id] = prompt_ids(
            sample.messages or sample.text or "",
            tokenizer,
            data.chat_template_kwargs if use else None,
            f"sample {sample.id!r}",
            hint,
        )
    return prompts


def combine(recipe: Recipe, target: Target, recording: Recording | None = None) -> list[Combination]:
    """The product of drafters and verifiers, and the baseline before it. A drafter is bound once and used by all.

    Raises:
        CompatibilityError: names every pair that does not fit, and why.
    """
    pairs: list[tuple[Row, Drafter, Any, Sampling]] = []
    plain = Row(
        label=BASELINE,
        drafter="none",
        verifier="standard",
        exactness="lossless",
        family="lossless",
        point_mass=False,
        baseline=True,
    )
    alone = [(plain, recipe.sampling)] if recipe.report.baseline else []
    if recipe.report.controls:
        for top_p in _thetas(recipe):
            control = evolve(plain, label=f"top_p={top_p}", exactness="lossy", family="other", baseline=False)
            alone.append((control, evolve(recipe.sampling, top_p=top_p)))
    for row, sampling in alone:
        pairs.append((row, load("drafters", "none")(), load("verifiers", "standard")(), sampling))
    standards = [entry.label for entry in recipe.verifiers if entry.use == "standard"]
    for source in recipe.drafters:
        drafter = source.make()
        for entry in recipe.verifiers:
            verifier = entry.make()
            row = Row(
                label=combined(source.label, entry.label),
                drafter=source.label,
                verifier=entry.label,
                exactness=verifier.exactness,
                family=verifier.family,
                point_mass=drafter.num_speculative_tokens > 0 and (drafter.deterministic or recipe.sampling.greedy),
                reference=combined(source.label, standards[0]) if standards and entry.label not in standards else None,
                options=", ".join(f"{name} {value}" for name, value in entry.values.items() if value is not None),
            )
            pairs.append((row, drafter, verifier, recipe.sampling))
    made: list[Combination] = []
    problems = []
    for row, drafter, verifier, sampling in pairs:
        try:
            scheduler = recipe.scheduler.make()
            recorder = recording.recorder(len(made), row, drafter) if recording is not None else None
            asked = {"diagnostics": recipe.report.diagnostics, "logprobs": recipe.report.logprobs}
            engine = Engine(target, drafter, verifier, scheduler, trace=recorder, **asked)
            made.append(Combination(row, engine, sampling, recorder))
        except CompatibilityError as error:
            problems += [f"{row.label}: {problem}" for problem in error.problems]
    if problems:
        raise CompatibilityError(problems)
    return made


def _thetas(recipe: Recipe) -> list[float]:
    """Of the rules that keep what lies in a nucleus, also within rules made of rules, each once."""
    rules = [entry.make() for entry in recipe.verifiers]
    found = []
    for rule in rules:  # grows
        for value in (getattr(rule, one.name, None) for one in (fields(type(rule)) if has(type(rule)) else ())):
            rules += [part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Verifier)]
        if isinstance(theta := getattr(rule, "theta", None), float) and theta < 1.0:
            found.append(theta)
    return list(dict.fromkeys(found))


@final
class _Run:
    """The loop over chunks, repeats and combinations."""

    def __init__(
        self,
        recipe: Recipe,
        prompts: Mapping[str, tuple[int, ...]],
        combinations: Sequence[Combination],
        folder: RunFolder,
        progress: Callable[[Status], None] | None,
    ) -> None:
        self.recipe, self.prompts, self.combinations, self.folder = recipe, prompts, combinations, folder
        self.progress = progress
        self.total = len(prompts) * recipe.report.repeats * len(combinations)
        self.done = 0
        self.seen: dict[str, list[float]] = {}  # label -> emitted tokens, steps, seconds
        self.task, self.samples = recipe.task.make(), {sample.id: sample for sample in recipe.samples}

    def remaining(self, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Everything that no record is of, in order."""
        there = {(record["run"], record["sample"], record["repeat"]) for record in records}
        self.done = len(there)
        names, rows = list(self.prompts), self.combinations[0].engine.target.kv.rows
        made = []
        for start in range(0, len(names), rows):
            for repeat in range(self.recipe.report.repeats):
                for combination in self.combinations:
                    label = combination.row.label
                    chunk = [name for name in names[start : start + rows] if (label, name, repeat) not in there]
                    if chunk:
                        new = self._segment(combination, chunk, repeat)
                        self.folder.append(new)
                        made += new
        return made

    def _request(self, combination: Combination, sample: str, repeat: int) -> Request:
        sampling = evolve(combination.sampling, seed=request_seed(self.recipe.seed, sample, repeat))
        return Request(prompt=self.prompts[sample], sampling=sampling, id=sample)

    def warm_up(self) -> None:
        """A few tokens that count nowhere: first calls allocate and choose kernels. A failure then leaves no folder."""
        for combination in self.combinations:
            first = self._request(combination, next(iter(self.prompts)), 0)
            few = evolve(first.sampling, max_new_tokens=min(_WARM_UP_TOKENS, first.sampling.max_new_tokens))
            combination.engine.generate([evolve(first, sampling=few)])

    def _segment(self, combination: Combination, chunk: Sequence[str], repeat: int) -> list[dict[str, Any]]:
        engine, label = combination.engine, combination.row.label
        before = list(engine.seconds)
        if combination.recorder is not None:
            combination.recorder.begin(repeat)
        done: dict[str, Completion] = {}
        seen = self.seen.setdefault(label, [0.0, 0.0, 0.0])
        for event in engine.stream([self._request(combination, name, repeat) for name in chunk]):
            if event.completion is not None:
                done[event.id] = event.completion
                self.done += 1
                if event.completion.finish_reason == "error":
                    _log.warning("%s: sample %r: %s", label, event.id, failure(event.completion))
            seen[0] += len(event.tokens)
            seen[1] += 1
            if self.progress is not None:
                spent = seen[2] + sum(engine.seconds) - sum(before)
                pace = seen[0] / spent if spent else None
                self.progress(Status(label, self.done, self.total, pace, seen[0] / seen[1]))
        seconds = [after - earlier for after, earlier in zip(engine.seconds, before, strict=True)]
        seen[2] += sum(seconds)
        if combination.recorder is not None:
            combination.recorder.write()
        return [self._record(label, repeat, done[name], [part / len(chunk) for part in seconds]) for name in chunk]

    def _record(self, label: str, repeat: int, completion: Completion, seconds: Sequence[float]) -> dict[str, Any]:
        """`seconds` is the request's equal share of its chunk's: only their sum means something."""
        asked = {"logprobs": plain_logprobs(completion.logprobs)} if self.recipe.report.logprobs else {}
        return {
            "run": label,
            "sample": completion.id,
            "repeat": repeat,
            "prompt_tokens": len(self.prompts[completion.id]),
            "finish_reason": completion.finish_reason,
            "text": completion.text,
            "tokens": list(completion.tokens),
            "counters": completion.counters.to_dict(),
            "fidelity": fidelity(completion.diagnostics) if self.recipe.report.diagnostics else None,
            "seconds": dict(zip(("draft", "verify", "rest"), seconds, strict=True)),
            "scores": scores_of(self.task, self.recipe.task.use, self.samples[completion.id], completion.text or ""),
            **asked,
        }


def _say_notes(target: Target, drafters: Sequence[Drafter]) -> None:
    _log.info("nothing but end-of-sequence ids is taken from a model's generation config; sampling is the recipe's")
    notes = [note for drafter in drafters for note in drafter.notes]
    for note in dict.fromkeys(notes):
        _log.info("%s", note)


def _digest(prompts: Mapping[str, tuple[int, ...]]) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(list(prompts.items())).encode()).hexdigest()}"
