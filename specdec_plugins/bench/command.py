"""`specdec bench`: who is how fast on the same prompts, here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.errors import DataError, RecipeError

if TYPE_CHECKING:
    from specdec_plugins.bench.race import Result
    from specdec_plugins.bench.sides import Side, Task

_OURS = "specdec"
_BASELINE = "transformers generate"
_MOST = 2**16  # of prompts, rows, new tokens and draft tokens that anybody could mean
_PARTS = ("prefill", "draft", "verify", "rest")
_COUNT = click.IntRange(1, _MOST)
_SPACE = 16  # cells of a cache row beyond prompt, new tokens and drafts


@click.command()
@click.argument("target")
@click.argument("draft")
@click.option("--prompts", type=click.Path(path_type=Path), required=True, help="JSON Lines, as of task jsonl.")
@click.option("--limit", type=_COUNT, default=8, show_default=True, help="Prompts.")
@click.option("-k", "width", type=_COUNT, default=4, show_default=True, help="num_speculative_tokens.")
@click.option("--new-tokens", type=_COUNT, default=64, show_default=True, help="At most, of each prompt.")
@click.option("--rows", default="1", show_default=True, help="Prompts at once, as 1,4,8.")
@click.option("--verifier", "verifiers", multiple=True, help="A rule of ours (standard); again for more.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Times over all prompts.")
@click.option("--only", multiple=True, metavar="TEXT", help="Only sides whose name has this; again for more.")
def bench(
    target: str,
    draft: str,
    prompts: Path,
    limit: int,
    width: int,
    new_tokens: int,
    rows: str,
    verifiers: tuple[str, ...],
    temperature: float,
    dtype: str,
    rounds: int,
    only: tuple[str, ...],
) -> None:
    """Time TARGET with DRAFT beside transformers and whatever else is installed, in one process, alternating.

    Every side decodes the same prompts with the same weights, ours as this library loads them, all others as
    transformers does. Ratios are of new tokens a second inside this run; single speeds say little. The last line is one
    JSON document.
    """
    from specdec.loading import load
    from specdec_plugins.bench.machine import read_bandwidth, weights_read
    from specdec_plugins.bench.race import race, ratio
    from specdec_plugins.bench.sides import Task

    counts = _counts(rows)
    if not math.isfinite(temperature):
        raise RecipeError(f"--temperature {temperature}: wanted a finite number, such as 1")
    model, tokenizer = load(target, dtype=dtype)
    ids = _ids(prompts, limit, tokenizer)
    task = Task(new_tokens, temperature, _ends(model, tokenizer, counts[0]))
    wanted = tuple(dict.fromkeys(verifiers)) or ("standard",)
    sides = [
        side
        for side in (
            *_own(model, tokenizer, load(draft, dtype=dtype), ids, counts, width, wanted, task),
            *_others(
                load(target, dtype=dtype, packed=False)[0],
                load(draft, dtype=dtype, packed=False)[0],
                draft,
                counts,
                width,
                task,
            ),
        )
        if not only or any(text in side.name for text in only)
    ]
    if not sides:
        raise RecipeError(f"--only {' --only '.join(only)}: no side has that in its name")
    try:
        found = race(sides, ids, rounds, lambda text: click.echo(text, err=True))
    except KeyboardInterrupt:
        click.echo("interrupted; nothing is kept, the same command begins anew", err=True)
        raise SystemExit(130) from None
    device = model.get_input_embeddings().weight.device
    machine = {"read_bandwidth": read_bandwidth(device), "weights": weights_read(model)}
    ours = [side.name for side in sides if side.name.startswith(_OURS)]
    ratios = {name: {other: ratio(found[name], found[other]) for other in _rivals(name, sides)} for name in ours}
    _show(sides, found, ratios, machine)
    document = {
        "schema_version": 1,
        "task": {"prompts": len(ids), "new_tokens": new_tokens, "temperature": temperature, "k": width, "dtype": dtype},
        "machine": machine,
        "sides": {side.name: _facts(side, found, machine) for side in sides},
        "ratios": ratios,
    }
    click.echo(json.dumps(document, allow_nan=False))


def _counts(rows: str) -> list[int]:
    try:
        found = [int(part) for part in rows.split(",")]
    except ValueError as error:
        raise RecipeError(f"--rows {rows}: wanted whole numbers with commas between them, such as 1,4,8") from error
    if min(found) < 1 or max(found) > _MOST or len(set(found)) < len(found):
        raise RecipeError(f"--rows {rows}: wanted different numbers from 1 to {_MOST}, such as 1,4,8")
    return found


def _ids(file: Path, limit: int, tokenizer: Any) -> list[tuple[int, ...]]:
    """Prompts as ids, through the chat template where there is one."""
    from specdec.encoding import has_template, prompt_ids
    from specdec.registry import load
    from specdec.task import samples_of

    if tokenizer is None:
        raise DataError("target: has no tokenizer, so prompts cannot become tokens; try another folder or hub id")
    template: dict[str, Any] | None = {} if has_template(tokenizer) else None
    return [
        prompt_ids(sample.messages or sample.text or "", tokenizer, template, f"sample {sample.id!r}", "another prompt")
        for sample in samples_of(load("tasks", "jsonl")(), "jsonl", str(file), limit)
    ]


def _ends(model: Any, tokenizer: Any, rows: int) -> tuple[int, ...]:
    from specdec import Target
    from specdec_plugins.kv.slab import Slab

    return tuple(sorted(Target(model, tokenizer, kv=Slab(rows=rows, tokens=2)).eos_ids))


def _others(model: Any, helper: Any, draft: str, counts: Sequence[int], width: int, task: Task) -> list[Side]:
    """transformers, and the other libraries that are installed."""
    from specdec_plugins.bench.peers import Economize, Flashspec, installed
    from specdec_plugins.bench.sides import Transformers

    generation = helper.generation_config
    generation.num_assistant_tokens, generation.num_assistant_tokens_schedule = width, "constant"
    generation.assistant_confidence_threshold = 0.0
    sides: list[Side] = [Transformers(_named(_BASELINE, rows), rows, (model,), task, {}) for rows in counts]
    sides.append(Transformers("transformers assisted", 1, (model, helper), task, {"assistant_model": helper}))
    sides.append(Transformers("transformers prompt lookup", 1, (model,), task, {"prompt_lookup_num_tokens": width}))
    by_name = ":" not in draft and not draft.endswith(".gguf")  # it has transformers load the draft model itself
    if installed("economize") and by_name and not task.temperature:
        sides += [Economize(_named("economize", rows), rows, (model, helper), draft, width, task) for rows in counts]
    if installed("flashspec"):
        sides.append(Flashspec("flashspec", 1, (model, helper), width, task))
    return sides


def _own(
    model: Any,
    tokenizer: Any,
    draft: tuple[Any, Any],
    prompts: Sequence[tuple[int, ...]],
    counts: Sequence[int],
    width: int,
    verifiers: Sequence[str],
    task: Task,
) -> list[Side]:
    """This library, without and with a draft."""
    from specdec import Target
    from specdec_plugins.bench.sides import Ours
    from specdec_plugins.drafters.model import DraftModel
    from specdec_plugins.drafters.none import NoDraft
    from specdec_plugins.kv.slab import Slab

    need = max(map(len, prompts)) + task.new_tokens
    sides: list[Side] = []
    for rows in counts:
        target = Target(model, tokenizer, kv=Slab(rows=rows, tokens=need + width + _SPACE))
        if need > target.context:  # others would go on past it
            raise RecipeError(
                f"--new-tokens {task.new_tokens}: with the longest prompt that makes {need} tokens, and the target has "
                f"a context of {target.context}; try fewer, or other prompts"
            )
        drafter = DraftModel(model=draft[0], tokenizer=draft[1], num_speculative_tokens=width)
        plain = _rule("standard")
        sides.append(Ours(_named("specdec none", rows), rows, (model,), target, NoDraft(), plain, task))
        sides += [
            Ours(_named(f"specdec {name}", rows), rows, (model, draft[0]), target, drafter, _rule(name), task)
            for name in verifiers
        ]
    return sides


def _rule(name: str) -> Any:
    """A verifier as it is without options."""
    from specdec.options import describe
    from specdec.registry import load

    rule = load("verifiers", name)
    if missing := [option.name for option in describe(rule) if option.default is None]:
        raise RecipeError(f"--verifier {name}: needs {', '.join(missing)}, and rules have no options here; try another")
    return rule()


def _rivals(name: str, sides: Sequence[Side]) -> list[str]:
    """Everybody else's sides, and of ours those with as many rows."""
    rows = next(side.rows for side in sides if side.name == name)
    return [
        side.name for side in sides if side.name != name and not (side.name.startswith(_OURS) and side.rows != rows)
    ]


def _named(name: str, rows: int) -> str:
    return name if rows == 1 else f"{name} x{rows}"


def _facts(side: Side, found: Mapping[str, Result], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of one side; of ours also the share of the machine's bandwidth, and what its parts predict."""
    result = found[side.name]
    facts: dict[str, Any] = {
        "rows": side.rows,
        "tokens_per_second": result.pace,
        "memory": result.memory,
        **result.facts,
    }
    if not (steps := facts.get("steps")):
        return facts
    seconds = facts["seconds"]
    facts["bandwidth_share"] = machine["weights"] * steps / seconds["verify"] / machine["read_bandwidth"]
    facts["shares"] = {name: part / sum(seconds.values()) for name, part in seconds.items()}
    plain = found.get(_named("specdec none", side.rows))
    if plain is not None and plain is not result:
        facts["predicted"] = _forwards(plain) / _forwards(result)
        facts["speedup"] = result.pace / plain.pace
    return facts


def _forwards(result: Result) -> float:
    """Seconds of prompts, drafts and verifications for each new token: what nobody can leave out."""
    seconds = result.facts["seconds"]
    spent: float = sum(seconds[part] for part in ("prefill", "draft", "verify"))
    return spent / sum(len(lap.tokens) for lap in result.laps)


def _show(
    sides: Sequence[Side],
    found: Mapping[str, Result],
    ratios: Mapping[str, Mapping[str, Any]],
    machine: Mapping[str, Any],
) -> None:
    from specdec.numerals import one, percent, times, two

    names = ("side", "tokens/s", "tau", *_PARTS, "bandwidth", "predicted", "measured", "memory")
    lines: list[Sequence[str]] = [names]
    for side in sides:
        facts = _facts(side, found, machine)
        shares = facts.get("shares", {})
        lines.append(
            [
                side.name,
                one(facts["tokens_per_second"]),
                two(facts.get("acceptance_length")),
                *(percent(shares.get(name)) for name in _PARTS),
                percent(facts.get("bandwidth_share")),
                times(facts.get("predicted")),
                times(facts.get("speedup")),
                f"{facts['memory'] / 2**30:.1f} GiB",
            ]
        )
    _table(lines)
    click.echo(
        f"\nThe machine reads {machine['read_bandwidth'] / 1e9:.1f} GB/s; predicted and measured are against none."
    )
    lines = [["ratio of tokens/s", "against", "times", "95 %", "equal outputs"]]
    for name, others in ratios.items():
        for other, value in others.items():
            interval = value["interval"]
            span = "-" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"
            lines.append([name, other, times(value["value"]), span, f"{value['equal_outputs']} of {value['outputs']}"])
    click.echo("")
    _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
