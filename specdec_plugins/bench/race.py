"""Sides that take turns over the same prompts, and what their times say of each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from attrs import frozen

from specdec.metrics import bootstrap
from specdec_plugins.bench.machine import most_memory
from specdec_plugins.bench.sides import Side


@final
@frozen
class Lap:
    """One prompt by one side: tokens and its share of the seconds.

    Attributes:
        prompt: its number.
        tokens: new ones.
        seconds: of the prompts that ran at once, divided by their number.
    """

    prompt: int
    tokens: tuple[int, ...]
    seconds: float


@final
@frozen
class Result:
    """What a side did.

    Attributes:
        laps: one a prompt and round.
        memory: bytes at most while it ran.
        facts: what it says of itself.
    """

    laps: tuple[Lap, ...]
    memory: int
    facts: Mapping[str, Any]

    @property
    def pace(self) -> float:
        """New tokens a second."""
        return sum(len(lap.tokens) for lap in self.laps) / sum(lap.seconds for lap in self.laps)


def race(
    sides: Sequence[Side],
    prompts: Sequence[tuple[int, ...]],
    rounds: int,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Result]:
    """Every side does a group of prompts before the next group begins, in an order that turns each time.

    A group has as many prompts as the side with most rows takes at once. Each side first does one group that does not
    count.
    """
    size = max(side.rows for side in sides)
    groups = [range(start, min(start + size, len(prompts))) for start in range(0, len(prompts), size)]
    laps: dict[str, list[Lap]] = {side.name: [] for side in sides}
    memory = dict.fromkeys(laps, 0)
    for side in sides:
        tell(f"warming up {side.name}")
        side.run([prompts[index] for index in groups[0]][: side.rows], 0)
        side.reset()
    for turn, group in enumerate(list(groups) * rounds):
        for side in sides if turn % 2 == 0 else reversed(sides):
            tell(f"group {turn + 1} of {len(groups) * rounds}: {side.name}")
            with most_memory(side.device) as most:
                for start in range(0, len(group), side.rows):
                    chunk = group[start : start + side.rows]
                    began = time.perf_counter()
                    done = side.run([prompts[index] for index in chunk], chunk[0])
                    share = (time.perf_counter() - began) / len(chunk)
                    laps[side.name] += [
                        Lap(index, tuple(tokens), share) for index, tokens in zip(chunk, done, strict=True)
                    ]
            memory[side.name] = max(memory[side.name], most[0])
    return {side.name: Result(tuple(laps[side.name]), memory[side.name], side.facts()) for side in sides}


def ratio(ours: Result, theirs: Result) -> dict[str, Any]:
    """How many times as many tokens a second, with a 95 % interval by bootstrap over prompts, and equal outputs."""
    groups: dict[int, list[float]] = {}
    for side, result in enumerate((ours, theirs)):
        for lap in result.laps:
            group = groups.setdefault(lap.prompt, [0.0] * 4)
            group[2 * side] += len(lap.tokens)
            group[2 * side + 1] += lap.seconds

    def statistic(chosen: Sequence[Any]) -> float | None:
        tokens, seconds, their_tokens, their_seconds = (sum(group[i] for group in chosen) for i in range(4))
        return (tokens / seconds) / (their_tokens / their_seconds) if their_tokens else None

    return {
        "value": statistic(list(groups.values())),
        "interval": bootstrap(list(groups.values()), statistic),
        "equal_outputs": sum(one.tokens == other.tokens for one, other in zip(ours.laps, theirs.laps, strict=True)),
        "outputs": len(ours.laps),
    }
