"""Will this pair of models be right, and will it pay? An examination of minutes, one finding after the other."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from attrs import define, evolve, field

from specdec import exactness, findings, prognosis
from specdec.comparison import encode
from specdec.costs import Prediction, Timing, predict
from specdec.drafter import Drafter
from specdec.engine import Engine
from specdec.errors import CompatibilityError, ModelError, RecipeError, RequestError, SpecdecError
from specdec.findings import Finding, failure
from specdec.given import Given
from specdec.layer_search import MOST_DRAFT, Search, search
from specdec.loading import load
from specdec.metrics import pool
from specdec.noise import request_seed
from specdec.options import build, describe
from specdec.recipe import DataSection, TargetSection
from specdec.registry import load as plugin
from specdec.stopwatch import Watched, cells, follow, levels, time_steps, widths
from specdec.target import Target
from specdec.task import Sample, samples_of
from specdec.types import Request, Sampling
from specdec.verifier import Verifier

_SHIPPED = "specdec_plugins.recipes"
_HANDFUL = 6  # shipped prompts, where nobody gave any


@final
@define(eq=False)
class Examination:
    """All that was found.

    Attributes:
        drafter: what it is called, with the options given.
        verifier: the same of the rule.
        findings: in the order found.
        prediction: of the speed-up; None where it came to none.
        search: what `layer_skip` should skip, where that was asked for.
        tell: told every finding at once.
        progress: told what is being done.
    """

    drafter: str
    verifier: str
    findings: list[Finding] = field(factory=list)
    prediction: Prediction | None = None
    search: Search | None = None
    tell: Callable[[Finding], None] = field(default=lambda finding: None, repr=False)
    progress: Callable[[str], None] = field(default=lambda text: None, repr=False)

    @property
    def error(self) -> SpecdecError | None:
        """What the first failure amounts to, or None."""
        return next((finding.error for finding in self.findings if finding.error is not None), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a script."""
        error, found = self.error, self.prediction
        return {
            "schema_version": 1,
            "drafter": self.drafter,
            "verifier": self.verifier,
            "exit_code": 0 if error is None else error.exit_code,
            "speedup": None if found is None else found.speedup,
            "interval": None if found is None else list(found.interval),
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def note(self, finding: Finding) -> None:
        """Keep and tell a finding, even a failure, that leaves the others worth knowing."""
        self.findings.append(finding)
        self.tell(finding)

    def add(self, finding: Finding) -> None:
        """Keep and tell a finding.

        Raises:
            SpecdecError: it is a failure.
        """
        self.note(finding)
        if finding.error is not None:
            raise finding.error


def examine(
    model: Any,
    tokenizer: Any = None,
    *,
    drafter: str | Mapping[str, Any] | Drafter | None = None,
    draft_model: Any = None,
    draft_tokenizer: Any = None,
    verifier: str | Mapping[str, Any] = "standard",
    prompts: Sequence[Sample | str | Sequence[Mapping[str, str]]] | None = None,
    rows: int = 1,
    tokens: int | None = None,
    sampling: Sampling | None = None,
    layer_skip: bool = False,
    load_options: Mapping[str, Any] | None = None,
    tell: Callable[[Finding], None] = lambda finding: None,
    progress: Callable[[str], None] = lambda text: None,
) -> Examination:
    """Examine a target and a drafter. The models are not changed, and each is loaded once.

    Args:
        model: the target: a loaded transformers model, a hub id, a folder, or `random:llama`.
        tokenizer: of a loaded model.
        drafter: a name, a mapping `{"use": name, ...options}` or a `Drafter`; `model` where there is a `draft_model`,
            `prompt_lookup` otherwise.
        draft_model: a smaller model, as `model`.
        draft_tokenizer: of a loaded draft model.
        verifier: a name or a mapping.
        prompts: texts, chats or samples; a handful of shipped ones when left out. A text goes through the chat template
            where the tokenizer has one, as in a comparison.
        rows: prompts decoded at once.
        tokens: cells a cache row shall have; what prompts and new tokens need when left out.
        sampling: 64 new tokens at temperature 1 when left out. Its seed is the recipe's of a comparison.
        layer_skip: search which layers the drafter `layer_skip` should skip, and examine it.
        load_options: of `specdec.loading.load`, for a target that is named.
        tell: told every finding as it is made.
        progress: told what is being done.

    Returns:
        The findings; the examination ends at the first failure that makes the others meaningless.

    Raises:
        SpecdecError: what was asked for is no examination, or a model cannot be loaded; as far as possible found before
            one is.
    """
    sampling = sampling or Sampling(max_new_tokens=64)
    samples = tuple(shipped()) if prompts is None else _samples(prompts)
    if drafter is None:
        drafter = "layer_skip" if layer_skip else "prompt_lookup" if draft_model is None else "model"
    source = Given.of("drafters", drafter, {} if draft_model is None else {"model": draft_model})
    rule = Given.of("verifiers", verifier, {})
    problems = [*source.problems, *rule.problems, *_wrong(rows, tokens)]
    if layer_skip and (source.use != "layer_skip" or source.options.get("skip") is not None):
        problems.append("layer_skip: finds what drafter layer_skip should skip; leave out other drafters, and `skip`")
    if problems:
        raise RecipeError(problems)
    load_options = load_options or {}
    if _loads(source) and (dtype := load_options.get("dtype", "auto")) != "auto":
        source.options.setdefault("dtype", dtype)  # a draft model that is only named is loaded as the target is
    if isinstance(model, str | os.PathLike):
        progress("loading the target")
        model, own = load(os.fspath(model), **load_options)
        tokenizer = own if tokenizer is None else tokenizer
    elif load_options:
        raise ModelError(f"{' and '.join(load_options)}: the model is loaded already; try without")
    examination = Examination(source.label, rule.label, tell=tell, progress=progress)
    patient = _Patient(examination, model, tokenizer, source, rule, samples, rows, tokens, sampling, draft_tokenizer)
    try:
        patient.examine(layer_skip=layer_skip)
    except SpecdecError as error:
        if error is not examination.error:
            raise
    return examination


def _loads(source: Given) -> bool:
    """Whether it takes a model that is better loaded here, to be looked at."""
    return "model" in source.options and source.takes("model", "tokenizer")


def shipped(limit: int | None = None) -> list[Sample]:
    """A handful of prompts that come with the package."""
    file = Path(str(importlib.resources.files(_SHIPPED))) / "prompts.jsonl"
    return list(samples_of(plugin("tasks", "jsonl")(), "jsonl", str(file), limit or _HANDFUL))


@final
@define(eq=False)
class _Patient:
    """Models and prompts under examination."""

    examination: Examination
    model: Any
    tokenizer: Any
    source: Given
    rule: Given
    samples: tuple[Sample, ...]
    rows: int
    tokens: int | None
    sampling: Sampling
    draft_tokenizer: Any
    target: Any = field(init=False, default=None)
    draft: Target | None = field(init=False, default=None)
    prompts: dict[str, tuple[int, ...]] = field(init=False, factory=dict)

    def examine(self, *, layer_skip: bool) -> None:
        add, note, progress = self.examination.add, self.examination.note, self.examination.progress
        self._enter(MOST_DRAFT if layer_skip else self.source.make().num_speculative_tokens)
        target, requests = self.target, self._requests()
        progress("a staged forward against the model's own")
        drafter = plugin("drafters", "none")() if layer_skip else self.source.make()
        verifier = self.rule.make()
        self._fit(drafter, verifier)
        wanted = self.tokens or max(map(len, self.prompts.values())) + self.sampling.max_new_tokens
        add(findings.memory(target, self.draft, self.rows, wanted))
        if layer_skip:
            try:
                self.examination.search = found = search(target, requests, progress)
            except ModelError as error:
                add(failure("layer skip", error))
                raise
            add(prognosis.skips(found))
            if found.skip:
                drafter = self.source.make(skip=list(found.skip), num_speculative_tokens=found.num_speculative_tokens)
        progress("the target as its own draft model")
        note(exactness.itself(target, requests))
        note(exactness.equality(target, drafter, requests, progress))
        if drafter.num_speculative_tokens:
            self._pay(drafter, verifier)

    def _enter(self, most: int) -> None:
        """The models themselves, and prompts as ids. `most` is how many tokens a draft may have."""
        add, slab = self.examination.add, plugin("kv", "slab")
        try:
            small = Target(self.model, self.tokenizer, kv=slab(rows=1, tokens=8))
        except ModelError as error:
            add(failure("target", error))
            raise
        add(findings.model("target", small))
        add(findings.generation_settings(small))
        if _loads(self.source):
            self._load_draft(small)
        self.prompts = encode(self.samples, self.tokenizer, DataSection())
        longest, new = max(map(len, self.prompts.values())), self.sampling.max_new_tokens
        add(findings.contexts(small, self.draft, longest, new, self.tokens or longest + new))
        room = longest + max(new, cells(max(1, most)), exactness.EQUAL_TOKENS) + most + 2
        try:
            self.target = Target(self.model, self.tokenizer, kv=slab(rows=self.rows, tokens=room))
        except ModelError as error:
            add(failure("target", error))
            raise

    def _load_draft(self, target: Target) -> None:
        add, given = self.examination.add, self.source.options
        model, tokenizer = given["model"], given.get("tokenizer", self.draft_tokenizer)
        if isinstance(model, str | os.PathLike):
            self.examination.progress("loading the draft model")
            known = {option.name for option in describe(TargetSection)} - {"model"}
            options = {name: value for name, value in given.items() if name in known}
            model, own = load(os.fspath(model), **{"device": str(target.device), **options})
            tokenizer = own if tokenizer is None else tokenizer
        self.source.options = {**given, "model": model, "tokenizer": tokenizer}
        try:
            draft = Target(model, tokenizer, kv=plugin("kv", "slab")(rows=1, tokens=8))
        except ModelError as error:
            add(failure("draft model", error))
            raise
        self.draft = draft
        add(findings.model("draft model", draft))
        add(findings.tokenizers(target, draft))

    def _fit(self, drafter: Drafter, verifier: Verifier) -> None:
        """The preflight, and whether target, drafter and rule fit."""
        add = self.examination.add
        try:
            Engine(self.target, drafter, verifier, plugin("schedulers", "continuous")())
        except (ModelError, CompatibilityError) as error:
            add(failure("preflight", error))
            raise
        both = " (target and draft model)" if self.draft is not None else ""
        said = "staged forwards over ragged rows say what the model's own forward says"
        short = "left out: the context is too short for it"
        add(Finding("preflight", "ok", f"{said}{both}" if self.target.preflighted else short))
        if drafter.summary:
            add(Finding("drafter", "ok", drafter.summary))
        for text in drafter.notes:
            add(Finding("drafter", "note", text))
        if verifier.exactness == "lossy":
            text = f"{self.rule.use} is not lossless: it changes the law of the output, by what `specdec run` measures"
            add(Finding("rule", "note", text))

    def _requests(self) -> list[Request]:
        """The very requests of a comparison's first repeat."""
        own = self.sampling
        return [
            Request(prompt=ids, sampling=evolve(own, seed=request_seed(own.seed, name, 0)), id=name)
            for name, ids in self.prompts.items()
        ]

    def _pay(self, drafter: Drafter, verifier: Verifier) -> None:
        """Costs of steps, acceptance on the prompts, and what both make of a run."""
        target, width, progress = self.target, drafter.num_speculative_tokens, self.examination.progress
        requests = self._requests()
        room = max(self.sampling.max_new_tokens, cells(width))
        endless = [
            evolve(
                one, sampling=evolve(one.sampling, ignore_eos=True, stop_strings=(), stop_ids=(), max_new_tokens=room)
            )
            for one in requests
        ]
        timings: list[Timing] = []
        for rows in levels(self.rows):
            progress(f"timing steps of {rows} rows")
            full = rows == self.rows
            timings += time_steps(
                target,
                drafter,
                verifier,
                endless,
                rows,
                widths(width),
                rounds=6 if full else 3,
                seconds=25.0 if full else 8.0,
            )
        seen = {rows: {one.width for one in timings if one.rows == rows} for rows in levels(self.rows)}
        if any(0 not in found or len(found) < 2 for found in seen.values()):
            text = "steps cannot be timed, because texts end before that; try shorter prompts or fewer drafted tokens"
            self.examination.add(Finding("costs", "warning", text))
            return
        lengths = [len(ids) for ids in self.prompts.values()]
        self.examination.add(prognosis.costs(timings, self.rows, max(seen[self.rows]), lengths))
        progress("speculative decoding of the prompts")
        done, trails = follow(
            target,
            Watched(drafter),
            verifier,
            requests,
            lambda count: progress(f"speculative decoding: {count} of {len(requests)} prompts"),
        )
        total = pool([one.counters for one in done])
        if any(one.finish_reason == "error" for one in done) or not total.num_emitted_tokens:
            raise ModelError("the target's scores were not finite on the prompts; try float32")
        prediction = predict(timings, trails, total.num_accepted_tokens_per_pos, self.rows, width)
        self.examination.prediction = prediction
        self.examination.add(prognosis.acceptance(total.num_accepted_tokens_per_pos, total.num_steps, prediction))
        self.examination.add(prognosis.verdict(prediction, width, self.rows))


def _samples(prompts: Any) -> tuple[Sample, ...]:
    """Prompts as samples.

    Raises:
        RequestError: the list is empty, or holds something else.
    """
    made = []
    for index, prompt in enumerate([prompts] if isinstance(prompts, str) else prompts):
        if isinstance(prompt, Sample):
            made.append(prompt)
        elif isinstance(prompt, str) and prompt:
            made.append(Sample(id=str(index), text=prompt))
        elif isinstance(prompt, list | tuple) and prompt and all(isinstance(turn, Mapping) for turn in prompt):
            made.append(Sample(id=str(index), messages=tuple(prompt)))
        else:
            raise RequestError(f"prompts[{index}]: got {type(prompt).__name__}, wanted a text or a chat")
    if not made:
        raise RequestError("prompts: got none, wanted texts or chats")
    return tuple(made)


def _wrong(rows: int, tokens: int | None) -> list[str]:
    """What the cache would say to its size."""
    wanted = {"rows": rows, **({} if tokens is None else {"tokens": tokens})}
    return build(plugin("kv", "slab"), wanted, "kv", "slab")[1]
