"""The text of a first recipe for a pair of models: every option of what it uses, with its default and what it means."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import RecipeError
from specdec.options import build, describe, values
from specdec.recipe import DataSection, ReportSection, TargetSection
from specdec.registry import load
from specdec.types import Sampling
from specdec.yamlfile import dump

RULES = ("standard", "typical", "nucleus")
_WIDTH = 100


def recipe_text(target: str, drafter: Mapping[str, Any], file: str, recipe: Path) -> str:
    """A recipe that is valid as it stands. No model is loaded.

    Args:
        target: as `target.model` is written.
        drafter: `use`, and the options that have no default.
        file: as `data.file` is written.
        recipe: where it will lie; its name goes into the comments and the folder of its runs.

    Raises:
        PluginError: the drafter is unknown, or cannot be imported.
        RecipeError: the drafter needs an option that is not there; lists every one.
    """
    task = _options(load("tasks", "jsonl"), {}, "data", "jsonl")
    parts = [
        _comment(f"{', '.join(RULES[:-1])} and {RULES[-1]} on {target}, with the drafter {drafter['use']}.")
        + _comment(f"`specdec validate {recipe.name}` says what is wrong with it, `specdec run {recipe.name}` runs it;")
        + _comment("--set sampling.temperature=0 and the like change a single run."),
        _comment("The model whose output is wanted.")
        + _section("target", _options(TargetSection, {"model": target}, "target", "section target")),
        _comment("What proposes tokens; a run is the product of drafters and rules, everything else equal.")
        + _list("drafters", [drafter]),
        _comment("The rules that decide what is kept; `specdec ls verifiers` lists all.")
        + _list("verifiers", [{"use": use} for use in RULES]),
        _comment("Room for keys and values: prompt and new tokens must fit a row.") + _strategy("kv", "kv", "slab"),
        _comment("Who runs when there are more prompts than rows.")
        + _strategy("schedulers", "scheduler", "continuous"),
        _comment("How tokens are drawn, and when a text ends.")
        + _section("sampling", _options(Sampling, {}, "sampling", "section sampling", without=("seed",))),
        _comment("All randomness is a function of it; every rule sees the same numbers.") + dump({"seed": 0}),
        _comment("Which prompts: JSON Lines, as the file named here.")
        + _section("data", _options(DataSection, {"file": file}, "data", "section data") + task),
        _comment("What is measured.") + _section("report", _options(ReportSection, {}, "report", "section report")),
        _comment("The folder of the run; it is made, resumed when interrupted, never overwritten unasked.")
        + dump({"output_dir": f"runs/{recipe.stem}"}),
    ]
    return "\n".join(parts)


def _section(name: str, lines: list[str]) -> str:
    return f"{name}:\n" + "".join(textwrap.indent(line, "  ") for line in lines)


def _strategy(kind: str, section: str, use: str) -> str:
    cls = load(kind, use)
    return (
        f"{section}:\n"
        + _comment(_first_sentence(cls), "  ")
        + textwrap.indent(dump({"use": use}) + "".join(_options(cls, {}, section, use)), "  ")
    )


def _list(kind: str, entries: list[Mapping[str, Any]]) -> str:
    text = f"{kind}:\n"
    for index, entry in enumerate(entries):
        use, given = entry["use"], {name: value for name, value in entry.items() if name != "use"}
        cls = load(kind, use)
        lines = "".join(_options(cls, given, f"{kind}[{index}]", use))
        text += _comment(_first_sentence(cls), "  ")
        body = textwrap.indent(_line("use", use, "") + _line("name", use, "what the report calls it") + lines, "    ")
        text += f"  - {body.removeprefix('    ')}"
    return text


def _options(cls: type, given: Mapping[str, Any], path: str, owner: str, *, without: tuple[str, ...] = ()) -> list[str]:
    """A line of YAML, comment included, for each option of a class."""
    made, problems = build(cls, given, path, owner)
    if problems:
        raise RecipeError(problems)
    chosen = values(made)
    return [
        _line(option.name, chosen[option.name], option.text) for option in describe(cls) if option.name not in without
    ]


def _line(name: str, value: Any, comment: str) -> str:
    text = dump({name: value})
    short = f"{text.rstrip()}  # {comment}\n"
    if not comment:
        return text
    return short if len(short) <= _WIDTH and text.count("\n") == 1 else _comment(comment) + text


def _comment(text: str, indent: str = "") -> str:
    lines = textwrap.wrap(text, _WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    return "".join(f"{indent}# {line}\n" for line in lines)


def _first_sentence(cls: type) -> str:
    """Of the docstring."""
    paragraph = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
    sentence, end, _ = paragraph.partition(". ")
    return sentence + end.rstrip()
