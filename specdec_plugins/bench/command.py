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
    from specdec_plugins.bench.sides import Side

_MOST = 2**16  # of prompts, rows, new tokens and draft tokens that anybody could mean
_PARTS = ("prefill", "draft", "verify", "rest")
_COUNT = click.IntRange(1, _MOST)


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

    DRAFT is a smaller model, which assists transformers too, or a drafter's name or checkpoint, for us alone. Every
    side decodes the same prompts with the same weights, ours as this library loads them, all others as transformers
    does. Ratios are of new tokens a second inside this run; single speeds say little. The last line is one JSON
    document.
    """
    from specdec.given import section_of
    from specdec.loading import load
    from specdec_plugins.bench.entrants import OURS, drafters, others, own
    from specdec_plugins.bench.machine import read_bandwidth, weights_read
    from specdec_plugins.bench.race import race, ratio
    from specdec_plugins.bench.sides import Task

    counts = _counts(rows)
    if not math.isfinite(temperature):
        raise RecipeError(f"--temperature {temperature}: wanted a finite number, such as 1")
    section = section_of(draft)
    by_model = section["use"] == "model"
    model, tokenizer = load(target, dtype=dtype)
    ids = _ids(prompts, limit, tokenizer)
    task = Task(new_tokens, temperature, _ends(model, tokenizer, counts[0]))
    wanted = tuple(dict.fromkeys(verifiers)) or ("standard",)
    sides = [
        side
        for side in (
            *own(
                model,
                tokenizer,
                drafters(section, load(draft, dtype=dtype) if by_model else None, width),
                ids,
                counts,
                width,
                wanted,
                task,
            ),
            *others(
                load(target, dtype=dtype, packed=False)[0],
                load(draft, dtype=dtype, packed=False)[0] if by_model else None,
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
    ours = [side.name for side in sides if side.name.startswith(OURS)]
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


def _rivals(name: str, sides: Sequence[Side]) -> list[str]:
    """Everybody else's sides, and of ours those with as many rows."""
    from specdec_plugins.bench.entrants import OURS

    rows = next(side.rows for side in sides if side.name == name)
    return [side.name for side in sides if side.name != name and not (side.name.startswith(OURS) and side.rows != rows)]


def _facts(side: Side, found: Mapping[str, Result], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of one side; of ours also the share of the machine's bandwidth, and what its parts predict."""
    from specdec_plugins.bench.entrants import OURS, named

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
    plain = found.get(named(f"{OURS} none", side.rows))
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
