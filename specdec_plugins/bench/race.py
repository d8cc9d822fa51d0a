"""Sides that take turns over the same prompts, and what their times say of each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from attrs import frozen

from specdec.metrics import bootstrap
from specdec_plugins.bench.machine import most_memory, weights
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
        memory: bytes of the weights it reads and, while it warmed up, of what came to them at most.
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
    """Every side does a prompt, or as many as it takes at once, before the next turn, in an order that turns around.

    All have done the same prompts whenever the side with most rows begins. Each side first does some that do not count,
    with which it makes its caches.
    """
    size = max(side.rows for side in sides)
    laps: dict[str, list[Lap]] = {side.name: [] for side in sides}
    memory = {}
    for side in sides:
        tell(f"warming up {side.name}")
        with most_memory(side.device) as grown:
            side.run(prompts[: side.rows], 0)
        memory[side.name] = grown[0] + sum(map(weights, side.models))
        side.reset()
    for turn in range(rounds * len(prompts)):
        first = turn % len(prompts)
        # Groups of any size go forwards as often as backwards, and a prompt the other way in the next round.
        backwards = (turn // len(prompts) + first // size + first % size) % 2
        for side in reversed(sides) if backwards else sides:
            if first % size % side.rows:
                continue  # it had this prompt with the ones before
            last = min(first + side.rows, first - first % size + size, len(prompts))
            tell(f"prompt {turn + 1} of {rounds * len(prompts)}: {side.name}")
            began = time.perf_counter()
            done = side.run(prompts[first:last], first)
            share = (time.perf_counter() - began) / len(done)
            laps[side.name] += [Lap(first + place, tuple(tokens), share) for place, tokens in enumerate(done)]
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
