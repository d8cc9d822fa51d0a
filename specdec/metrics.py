"""Integers are counted, rates are derived. Names as in vLLM where they exist."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import final

from attrs import Factory, asdict, define

from specdec.types import SOURCES, Kept


@final
@define
class Counters:
    """What happened to one request, or, added up, to many.

    Attributes:
        num_steps: target verifications.
        num_drafts: steps with at least one draft token.
        num_draft_tokens: draft tokens that were verified.
        num_accepted_tokens: draft tokens that the rule kept and that were emitted.
        num_emitted_tokens: all new tokens, bonus and replacement included.
        num_clipped: draft tokens beyond the budget or outside the vocabulary, never verified.
        num_drafted_per_pos: how often a draft had a token at each position (in a tree, at each depth).
        num_examined_per_pos: how often the rule came to that position.
        num_accepted_tokens_per_pos: how often the token there was kept.
        num_per_source: how often the token after the path came from each of `SOURCES`.
        num_per_length: histogram of emitted tokens per step.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_clipped: int = 0
    num_drafted_per_pos: list[int] = Factory(list)
    num_examined_per_pos: list[int] = Factory(list)
    num_accepted_tokens_per_pos: list[int] = Factory(list)
    num_per_source: dict[str, int] = Factory(lambda: dict.fromkeys(SOURCES, 0))
    num_per_length: dict[int, int] = Factory(dict)

    def count(self, kept: Kept, row: int) -> None:
        """Add one step of one row. A token that a stop cut off counts nowhere."""
        emitted = len(kept.tokens[row])
        accepted = min(kept.accepted[row], emitted)
        cut = emitted <= kept.accepted[row]
        drafted, depth = kept.drafted[row], kept.depths[row]
        if cut and drafted == depth:  # a chain: what the stop cut off was never looked at
            drafted = depth = min(drafted, emitted)
        self.num_steps += 1
        self.num_drafts += drafted > 0
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.num_emitted_tokens += emitted
        self.num_clipped += kept.clipped[row]
        for counts, upto in (
            (self.num_drafted_per_pos, depth),
            (self.num_examined_per_pos, min(kept.examined[row], emitted)),
            (self.num_accepted_tokens_per_pos, accepted),
        ):
            counts.extend([0] * (upto - len(counts)))
            for position in range(upto):
                counts[position] += 1
        source = kept.sources[row]
        if source is not None and not cut:
            self.num_per_source[source] += 1
        if emitted:
            self.num_per_length[emitted] = self.num_per_length.get(emitted, 0) + 1

    @property
    def acceptance_rate(self) -> float | None:
        """num_accepted_tokens / num_draft_tokens; the bonus is not in it."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """num_emitted_tokens / num_steps, the papers' tau; bonus or replacement included."""
        return self.num_emitted_tokens / self.num_steps if self.num_steps else None

    @property
    def acceptance_by_position(self) -> list[tuple[float | None, float]]:
        """For each draft position the share kept of those examined there, and of all drafts that had a token there."""
        every = zip(
            self.num_accepted_tokens_per_pos + [0] * len(self.num_drafted_per_pos),
            self.num_examined_per_pos + [0] * len(self.num_drafted_per_pos),
            self.num_drafted_per_pos,
            strict=False,
        )
        return [(kept / seen if seen else None, kept / drafted) for kept, seen, drafted in every]

    def to_dict(self) -> dict[str, object]:
        """Plain data for a results file."""
        data = asdict(self)
        data["num_per_length"] = {str(length): count for length, count in sorted(self.num_per_length.items())}
        return data


def pool(parts: Sequence[Counters]) -> Counters:
    """The sum of counters."""
    total = Counters()
    for part in parts:
        for name in (
            "num_steps",
            "num_drafts",
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_emitted_tokens",
            "num_clipped",
        ):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for name in ("num_drafted_per_pos", "num_examined_per_pos", "num_accepted_tokens_per_pos"):
            counts = getattr(total, name)
            more = getattr(part, name)
            counts.extend([0] * (len(more) - len(counts)))
            for position, value in enumerate(more):
                counts[position] += value
        for source, value in part.num_per_source.items():
            total.num_per_source[source] += value
        for length, value in part.num_per_length.items():
            total.num_per_length[length] = total.num_per_length.get(length, 0) + value
    return total


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, `successes` of `trials` (E. B. Wilson, 1927).

    Raises:
        ValueError: there are no trials.
    """
    if trials < 1:
        raise ValueError(f"'trials' must be at least 1, got {trials}")
    z, share = 1.959963984540054, successes / trials
    centre, scale = share + z * z / (2 * trials), 1 + z * z / trials
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def bootstrap(
    groups: Sequence[object], statistic: Callable[[list[object]], float | None], rounds: int = 1000, seed: int = 0
) -> tuple[float, float] | None:
    """A 95 % interval of a statistic by resampling groups (prompts) with replacement; None with fewer than two."""
    if len(groups) < 2:
        return None
    generator = random.Random(seed)
    drawn = [statistic(generator.choices(groups, k=len(groups))) for _ in range(rounds)]
    values = sorted(value for value in drawn if value is not None)
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=40, method="inclusive")
    return cuts[0], cuts[-1]
