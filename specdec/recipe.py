"""A comparison as a YAML file. Everything wrong with one is said at once, and no model is loaded to find it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

import attrs
from attrs import field, frozen
from attrs.validators import ge, optional

from specdec.compat import misfits, too_long
from specdec.errors import CompatibilityError, DataError, PluginError, RecipeError
from specdec.options import build, label_of, values
from specdec.registry import load, suggestion
from specdec.results import ambiguous, combined
from specdec.task import Sample, samples_of
from specdec.types import Sampling
from specdec.yamlfile import find, is_file, is_folder, override, read

_REQUIRED = ("target", "drafters", "verifiers", "data")


@final
@frozen(kw_only=True)
class TargetSection:
    """The model whose law is wanted; the options of `specdec.loading.load`, and of `Target`.

    Attributes:
        model: a hub id, a folder, a GGUF file, `random:FAMILY` for a tiny one made on the spot.
        revision: branch, tag or commit of a hub id.
        dtype: `auto` is the checkpoint's.
        device: where it goes, such as cuda.
        device_map: passed to transformers.
        attn_implementation: sdpa or eager; null is transformers' choice.
        quantization_config: passed to transformers.
        trust_remote_code: runs code from the checkpoint.
        packed: on a CPU, keep linear layers in the layout that it multiplies fastest.
        graphs: run forwards over few tokens, those of a draft model too, in few fixed shapes: `compile` by
            torch.compile, `cuda` as CUDA graphs.
    """

    model: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    device: str | None = None
    device_map: Any = None
    attn_implementation: Literal["sdpa", "eager"] | None = None
    quantization_config: Any = None
    trust_remote_code: bool = False
    packed: bool = True
    graphs: Literal["off", "compile", "cuda"] = "off"


@final
@frozen(kw_only=True)
class DataSection:
    """Which prompts, and how they become tokens. Options of the task stand beside these.

    Attributes:
        task: a registered task, or `my_module:MyTask`.
        file: looked for in the recipe's folder, then in the current one.
        limit: at most this many prompts.
        chat_template: `auto` uses the tokenizer's template where it has one.
        chat_template_kwargs: handed to the template.
    """

    task: str = "jsonl"
    file: str | None = None
    limit: int | None = field(default=None, validator=optional(ge(1)))
    chat_template: Literal["auto", True, False] = "auto"
    chat_template_kwargs: dict[str, Any] = field(factory=dict)


@final
@frozen(kw_only=True)
class ReportSection:
    """What is measured.

    Attributes:
        baseline: also run plain autoregressive decoding; speedups are against it.
        repeats: runs of every prompt, each with its own noise.
        diagnostics: compute what the fidelity columns need; kept out of all times.
        logprobs: put into `samples.jsonl` how probable each token was under the target and under the law it was drawn
            from; kept out of all times.
        controls: beside every rule with a theta, also sample plainly with top-p = theta: without it "quality kept" may
            only be what truncation does.
        trace: record drafted steps for `specdec replay`: `full` keeps whole laws, `compact` their probable tokens.
    """

    baseline: bool = True
    repeats: int = field(default=1, validator=ge(1))
    diagnostics: bool = True
    logprobs: bool = False
    controls: bool = False
    trace: Literal["none", "full", "compact"] = "none"


@final
@frozen(eq=False)
class Entry:
    """A strategy of a recipe.

    Attributes:
        use: its registered name, or `my_module:MyClass`.
        label: what the report calls it.
        cls: the class.
        options: as given.
        values: all of them, defaults included.
    """

    use: str
    label: str
    cls: type
    options: Mapping[str, Any]
    values: Mapping[str, Any]

    def make(self) -> Any:
        """A new object."""
        return build(self.cls, self.options, self.use, self.use)[0]


@final
@frozen(kw_only=True, eq=False)
class Recipe:
    """A checked recipe: every plugin is importable, every option is valid, the data are read."""

    name: str
    target: TargetSection
    drafters: tuple[Entry, ...]
    verifiers: tuple[Entry, ...]
    kv: Entry
    scheduler: Entry
    sampling: Sampling
    seed: int
    data: DataSection
    task: Entry
    samples: tuple[Sample, ...]
    report: ReportSection
    output_dir: Path

    def to_dict(self) -> dict[str, Any]:
        """Plain data with every default written out; reading it again gives the same recipe."""
        sampling = values(self.sampling)
        del sampling["seed"]
        return {
            "target": values(self.target),
            "drafters": [{"use": entry.use, "name": entry.label, **entry.values} for entry in self.drafters],
            "verifiers": [{"use": entry.use, "name": entry.label, **entry.values} for entry in self.verifiers],
            "kv": {"use": self.kv.use, **self.kv.values},
            "scheduler": {"use": self.scheduler.use, **self.scheduler.values},
            "sampling": sampling,
            "seed": self.seed,
            "data": {**values(self.data), **self.task.values},
            "report": values(self.report),
            "output_dir": str(self.output_dir),
        }


_SECTIONS = tuple(name.name for name in attrs.fields(Recipe) if name.name not in ("name", "task", "samples"))


def read_recipe(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        source: a path, or the name of a recipe that is shipped, such as `smoke`.
        overrides: such as `drafters.0.num_speculative_tokens=7`; values are YAML.

    Raises:
        RecipeError: lists every problem.
        CompatibilityError: strategies do not fit each other or the cache; names every pair, and what is wrong with the
            data.
        DataError: only the data are wrong.
    """
    path = find(source)
    content = read(path)
    if content is None:
        raise RecipeError(
            f"{path}: is empty, wanted {', '.join(_REQUIRED)}; try `specdec init` for a recipe to begin with"
        )
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: got {type(content).__name__}, wanted a mapping with {', '.join(_REQUIRED)}")
    if content and not {str(key) for key in content} & set(_SECTIONS):
        first = next(iter(content))
        raise RecipeError(
            f"{path}: is no recipe: it has {first!r} and none of {', '.join(_SECTIONS)}; try another file, or "
            "`specdec init` for a recipe to begin with"
        )
    for text in overrides:
        override(content, text)
    return _Reading(content, path).recipe()


class _Reading:
    """One pass over a recipe's content that collects problems instead of stopping."""

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        self.content, self.path = content, path
        self.problems: list[str] = []

    def recipe(self) -> Recipe:
        for key in self.content:
            if key not in _SECTIONS:
                self.problems.append(
                    f"{key}: unknown section{suggestion(str(key), _SECTIONS)}; there are {', '.join(_SECTIONS)}"
                )
        for name in _REQUIRED:
            if self.content.get(name) is None:
                self.problems.append(f"{name}: missing; every recipe has {', '.join(_REQUIRED)}")
        target = self._section("target", TargetSection)
        drafters, verifiers = self._entries("drafters"), self._entries("verifiers")
        self.problems += ambiguous(*([entry.label for entry in made if entry] for made in (drafters, verifiers)))
        kv = self._entry("kv", "kv", self._defaulted("kv", "slab"))
        scheduler = self._entry("schedulers", "scheduler", self._defaulted("scheduler", "continuous"))
        sampling = self._section("sampling", Sampling)
        data, task = self._data()
        report = self._section("report", ReportSection)
        if sampling is not None and report is not None:
            self.problems += _uncontrolled(sampling, report)
        seed = self._typed("seed", 0, int, "a whole number from 0")
        output = self._typed("output_dir", f"runs/{self.path.stem}", str, "a folder")
        if isinstance(output, str) and (not output or "\0" in output):
            self.problems.append(f"output_dir: got {output!r}, wanted a folder; try {f'runs/{self.path.stem}'!r}")
        samples, wrong = self._samples(data, task)
        if self.problems:
            raise RecipeError(self.problems + ([str(wrong)] if wrong else []))
        assert kv is not None  # otherwise there are problems
        if unfit := [*_unfit(drafters, verifiers, kv), *_unrecorded(drafters, report)]:
            raise CompatibilityError(unfit + ([str(wrong)] if wrong else []))
        if wrong:
            raise wrong
        assert scheduler is not None
        assert task is not None
        return Recipe(
            name=self.path.stem,
            target=target,
            drafters=drafters,
            verifiers=verifiers,
            kv=kv,
            scheduler=scheduler,
            sampling=sampling,
            seed=seed,
            data=data,
            task=task,
            samples=samples,
            report=report,
            output_dir=Path(output),
        )

    def _mapping(self, path: str, given: Any) -> dict[str, Any] | None:
        if isinstance(given, dict):
            return dict(given)
        hint = f"; try {{use: {given}}}" if isinstance(given, str) else ""
        self.problems.append(f"{path}: got {given!r}, wanted a mapping{hint}")
        return None

    def _section(self, name: str, cls: type) -> Any:
        given = self.content.get(name)
        if given is None and name in _REQUIRED:
            return None
        if (options := self._mapping(name, given or {})) is None:
            return None
        if cls is Sampling and options.pop("seed", None) is not None:
            self.problems.append("sampling.seed: unknown option; the recipe's own `seed` is the one of the run")
        made, problems = build(cls, options, name, f"section {name}")
        self.problems += problems
        return made

    def _defaulted(self, name: str, use: str) -> Any:
        given = self.content.get(name) or {}
        return {"use": use, **given} if isinstance(given, dict) else given

    def _entries(self, name: str) -> tuple[Any, ...]:
        given = self.content.get(name)
        if given is None:
            return ()
        if not isinstance(given, list) or not given:
            hint = f"; try [{given}]" if isinstance(given, dict) and given else ""
            hint = f"; try [{{use: {given}}}]" if isinstance(given, str) else hint
            self.problems.append(f"{name}: got {given!r}, wanted a list of at least one mapping with `use`{hint}")
            return ()
        entries = [self._entry(name, f"{name}[{index}]", options) for index, options in enumerate(given)]
        labels = [None if entry is None else entry.label for entry in entries]
        for index, label in enumerate(labels):
            if label is not None and label in labels[:index]:
                self.problems.append(
                    f"{name}[{index}]: is called {label!r} as {name}[{labels.index(label)}] is; "
                    "give one of them another `name`"
                )
        return tuple(entries)

    def _entry(self, kind: str, path: str, given: Any, *, key: str = "use") -> Entry | None:
        if (options := self._mapping(path, given)) is None:
            return None
        use, label = options.pop("use", None), options.pop("name", None)
        if not isinstance(use, str):
            near = difflib.get_close_matches("use", [str(key) for key in options], n=1)
            hint = f"; {near[0]!r} is not it" if near else ""
            self.problems.append(f"{path}.use: got {use!r}, wanted the name of one of {kind}{hint}; see `specdec ls`")
            return None
        if label is not None and not (isinstance(label, str) and label and label.isprintable()):
            self.problems.append(f"{path}.name: got {label!r}, wanted a text of one line, not empty")
        try:
            cls = load(kind, use, self.path.parent)
        except PluginError as error:
            self.problems.append(f"{path}.{key}: {error}")
            return None
        made, problems = build(cls, options, path, use)
        self.problems += problems
        if made is None:
            return None
        return Entry(use, str(label or label_of(use, options)), cls, options, values(made))

    def _data(self) -> tuple[Any, Entry | None]:
        if self.content.get("data") is None:
            return None, None
        if (given := self._mapping("data", self.content["data"])) is None:
            return None, None
        own = {name: given.pop(name) for name in [f.name for f in attrs.fields(DataSection)] if name in given}
        data, problems = build(DataSection, own, "data", "section data")
        self.problems += problems
        task = self._entry("tasks", "data", {"use": own.get("task") or "jsonl", **given}, key="task")
        if data is not None and data.file is not None:
            places = dict.fromkeys((self.path.parent / data.file, Path(data.file)))
            found = next((place for place in places if is_file(place)), None)
            if found is None:
                looked = " and ".join(str(place.parent.absolute()) for place in places)
                if any(is_folder(place) for place in places):
                    self.problems.append(f"data.file: {data.file!r} is a folder, wanted a file; try one that is in it")
                else:
                    self.problems.append(f"data.file: no file {Path(data.file).name!r}; looked in {looked}")
                return None, task
            data = attrs.evolve(data, file=str(found.resolve()))
        return data, task

    def _samples(self, data: DataSection | None, task: Entry | None) -> tuple[tuple[Sample, ...], DataError | None]:
        if data is None or task is None:
            return (), None
        try:
            samples = samples_of(task.make(), task.use, data.file, data.limit)
        except DataError as error:
            return (), error
        if data.chat_template is False and (chats := [sample.id for sample in samples if sample.messages]):
            return samples, DataError(
                f"data.chat_template: false, but sample {chats[0]!r} has chat messages, which need a template; try auto"
            )
        return samples, None

    def _typed(self, name: str, default: Any, kind: type, wanted: str) -> Any:
        value = self.content.get(name, default)
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
            self.problems.append(f"{name}: got {value!r}, wanted {wanted}")
        return value


def _uncontrolled(sampling: Sampling, report: ReportSection) -> list[str]:
    """Sampling beside which truncation at theta is no control."""
    if not report.controls or (sampling.top_p == 1.0 and not sampling.greedy):
        return []
    got = "temperature 0" if sampling.greedy else f"top_p {sampling.top_p:g}"
    return [
        f"report.controls: got true with sampling.{got}, wanted a target that samples from its whole law; try "
        "report.controls: false"
    ]


def _unrecorded(drafters: Sequence[Entry], report: ReportSection) -> list[str]:
    """Drafters whose steps cannot be recorded."""
    return [
        f"drafters[{index}]: drafts trees, and report.trace records chains; try report.trace: none"
        for index, entry in enumerate(drafters)
        if report.trace != "none" and entry.make().trees
    ]


def _unfit(drafters: Sequence[Entry], verifiers: Sequence[Entry], kv: Entry) -> list[str]:
    """What does not fit, of what strategies say without a model."""
    tokens, rules = kv.make().tokens, [(entry.label, entry.make()) for entry in verifiers]
    problems = []
    for index, entry in enumerate(drafters):
        drafter = entry.make()
        problems += [f"drafters[{index}].{problem}" for problem in too_long(drafter, tokens)]
        for label, rule in rules:
            problems += [f"{combined(entry.label, label)}: {problem}" for problem in misfits(drafter, rule)]
    return problems
