"""What a step costs, and what that makes of a run: measured seconds and counted steps in, a predicted speed-up out.

A run of speculative decoding pays the prompts (the target's forward over them, and the drafter's) and its steps; plain
decoding pays the prompts and a step for each token. Both are sums over the steps that happen, of costs that depend on
the rows of a step and on the width of its draft.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from attrs import evolve, field, frozen

Surface = Mapping[int, Mapping[int, float]]  # rows -> draft tokens -> seconds
_ROUNDS = 400
_PARTS = ("draft", "verify", "rest")
_EXAMPLE = "such as {draft: {1: {4: 0.1}}, verify: {1: {0: 0.2, 4: 0.3}}, rest: {}, catch_up: 0.01}"


@final
@frozen
class Timing:
    """One measured step.

    Attributes:
        rows: rows of the batch.
        width: draft tokens of each; 0 is a step of plain decoding.
        draft: seconds of the drafter; None where they say nothing.
        verify: seconds of the target's forward and the laws.
        rest: everything else of the step.
    """

    rows: int
    width: int
    draft: float | None
    verify: float
    rest: float


@final
@frozen
class Costs:
    """Typical seconds of a step's parts over rows and width, straight lines between what was measured.

    Attributes:
        draft: of the drafter; empty where it costs nothing.
        verify: of the target's forward and the laws.
        rest: of everything else.
        catch_up: seconds of the drafter for each token of a row that it has yet to read, where it was not asked.
    """

    draft: Surface
    verify: Surface
    rest: Surface
    catch_up: float = 0.0

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Costs:
        """From plain data, as `to_dict` writes it; numbers of rows and of tokens may be texts, as JSON has them.

        Raises:
            ValueError: it is no such table, or knows no plain step.
        """
        try:
            surfaces = {
                name: {
                    int(rows): {int(width): float(seconds) for width, seconds in cells.items()}
                    for rows, cells in data.get(name, {}).items()
                }
                for name in _PARTS
            }
            costs = cls(**surfaces, catch_up=float(data.get("catch_up", 0.0)))
            known = data.keys() <= {*_PARTS, "catch_up"}
        except (AttributeError, TypeError, ValueError):
            known = False
        if not known or not costs.verify:
            raise ValueError(f"got {data!r}, wanted seconds by rows and draft tokens, {_EXAMPLE}")
        for name, rows, cells in ((part, *place) for part in _PARTS for place in surfaces[part].items()):
            if rows < 1 or min(cells, default=-1) < 0 or not all(0 <= value < math.inf for value in cells.values()):
                raise ValueError(f"got {name} {{{rows}: {cells}}}, wanted rows from 1, tokens from 0, seconds from 0")
            if name == "verify" and not all((cells.get(0), *cells.values())):
                why = f"verify: knows no plain step of {rows} rows, or steps that take no time"
                raise ValueError(f"{why}; wanted seconds above 0, those of 0 draft tokens among them")
        if not 0 <= costs.catch_up < math.inf:
            raise ValueError(f"got catch_up {costs.catch_up}, wanted seconds from 0")
        return costs

    def to_dict(self) -> dict[str, Any]:
        """Plain data, in seconds to the tenth of a microsecond."""
        made: dict[str, Any] = {
            name: {
                rows: {width: round(seconds, 7) for width, seconds in cells.items()}
                for rows, cells in getattr(self, name).items()
            }
            for name in _PARTS
        }
        return {**made, "catch_up": round(self.catch_up, 7)}

    @classmethod
    def of(cls, timings: Iterable[Timing], chance: random.Random | None = None) -> Costs:
        """The medians of each cell; with `chance`, of its timings drawn anew with replacement."""
        cells: dict[tuple[int, int], list[Timing]] = {}
        for timing in timings:
            cells.setdefault((timing.rows, timing.width), []).append(timing)
        surfaces: dict[str, dict[int, dict[int, float]]] = {"draft": {}, "verify": {}, "rest": {}}
        for (rows, width), found in sorted(cells.items()):
            for name, surface in surfaces.items():
                seconds = [value for timing in found if (value := getattr(timing, name)) is not None]
                if seconds:
                    drawn = seconds if chance is None else chance.choices(seconds, k=len(seconds))
                    surface.setdefault(rows, {})[width] = statistics.median(drawn)
        return cls(surfaces["draft"], surfaces["verify"], surfaces["rest"])

    def parts(self, rows: int, width: int, asked: bool = True) -> tuple[float, float, float]:
        """Seconds of draft, verification and rest of one step; `asked` says whether the drafter was called at all."""
        draft = _over(self.draft, rows, width) if asked and self.draft else 0.0
        rest = _over(self.rest, rows, width) if self.rest else 0.0
        return draft, _over(self.verify, rows, width), rest

    def step(self, rows: int, width: int, asked: bool = True) -> float:
        """Seconds of one step."""
        return sum(self.parts(rows, width, asked))

    def plain(self, rows: int) -> float:
        """Seconds of one step of plain decoding."""
        return self.step(rows, 0, asked=False)


@final
@frozen
class Trail:
    """What speculative decoding did with prompts that ran at once.

    Attributes:
        steps: (rows, draft tokens, whether the drafter was asked) -> how many such steps.
        emitted: tokens of each prompt.
        verified: target verifications of each prompt.
        prefill: seconds of the target's forwards over the prompts, paid by plain decoding as well.
        draft_prefill: seconds of the drafter over the prompts.
    """

    steps: Mapping[tuple[int, int, bool], int]
    emitted: tuple[int, ...]
    verified: tuple[int, ...]
    prefill: float = 0.0
    draft_prefill: float = 0.0


@final
@frozen
class Prediction:
    """A predicted speed-up over plain decoding, whole requests with their prompts.

    Attributes:
        speedup: plain seconds / speculative seconds.
        interval: 95 %, over prompts and timings.
        acceptance_length: measured on the prompts.
        steady: acceptance length x plain step / speculative step, at full rows: the speed-up of a text without end.
        plain: seconds of a plain step at full rows.
        parts: seconds of draft, verification and rest of a speculative step at full rows and full width.
        by_length: speed-up for each num_speculative_tokens from 1.
        measured: up to which of them acceptance was measured; the others go on as the last ones do.
        limits: what the speed-up would be if one thing cost nothing: `draft`, `verify`, `acceptance`.
    """

    speedup: float
    interval: tuple[float, float]
    acceptance_length: float
    steady: float
    plain: float
    parts: tuple[float, float, float]
    by_length: tuple[float, ...]
    measured: int
    limits: Mapping[str, float] = field(factory=dict)

    @property
    def best(self) -> int:
        """The num_speculative_tokens of the largest predicted speed-up."""
        return 1 + self.by_length.index(max(self.by_length))


def predict(
    timings: Sequence[Timing], trails: Sequence[Trail], accepted: Sequence[int], rows: int, width: int
) -> Prediction:
    """The speed-up that the costs make of the steps.

    Args:
        timings: measured steps, plain ones among them.
        trails: what happened on the prompts.
        accepted: how often the draft token at each position was kept.
        rows: prompts that run at once.
        width: num_speculative_tokens.
    """
    costs = Costs.of(timings)
    emitted, steps = (sum(sum(getattr(trail, name)) for trail in trails) for name in ("emitted", "verified"))
    length = emitted / steps
    most = 2 * width if width > 1 else 1  # one width says nothing of how drafting goes on
    lengths = lengths_of(emitted, steps, accepted, most)
    parts = costs.parts(rows, width)
    return Prediction(
        speedup=speedup(costs, trails),
        interval=_interval(timings, trails, length),
        acceptance_length=length,
        steady=length * costs.plain(rows) / sum(parts),
        plain=costs.plain(rows),
        parts=parts,
        by_length=tuple(
            speedup(costs, trails, {width: wanted}, length / lengths[wanted]) for wanted in range(1, most + 1)
        ),
        measured=width,
        limits={
            "draft": speedup(evolve(costs, draft={}), [evolve(trail, draft_prefill=0.0) for trail in trails]),
            "verify": speedup(
                evolve(costs, verify={at: {0: _over(costs.verify, at, 0)} for at in costs.verify}), trails
            ),
            "acceptance": speedup(costs, trails, factor=length / (width + 1)),
        },
    )


def speedup(
    costs: Costs, trails: Sequence[Trail], widths: Mapping[int, int] | None = None, factor: float = 1.0
) -> float:
    """Plain seconds / speculative seconds.

    Args:
        costs: of the steps.
        trails: the steps.
        widths: from a full draft's width to another one; every draft is cut to it, a full one has it.
        factor: how many steps there are for each that happened.
    """
    plain = speculative = 0.0
    for trail in trails:
        plain += trail.prefill + sum(costs.plain(rows) for rows in _plain_rows(trail.emitted))
        spent = sum(
            count * costs.step(rows, _cut(width, widths), asked) for (rows, width, asked), count in trail.steps.items()
        )
        speculative += trail.prefill + trail.draft_prefill + factor * spent
    return plain / speculative


def lengths_of(emitted: int, steps: int, accepted: Sequence[int], most: int) -> list[float]:
    """Acceptance length for drafts of 0, 1, ... `most` tokens.

    A shorter draft keeps what the measured one kept up to there; of a longer one each further token is kept, given the
    one before it, as often as the last measured.
    """
    kept = [float(count) for count in accepted]
    before = kept[-2] if len(kept) > 1 else steps
    rate = min(1.0, kept[-1] / before) if kept and before else 0.0
    while len(kept) < most:
        kept.append(kept[-1] * rate if kept else 0.0)
    own = (emitted - sum(accepted)) / steps
    return [own + sum(kept[:width]) / steps for width in range(most + 1)]


def _interval(timings: Sequence[Timing], trails: Sequence[Trail], length: float) -> tuple[float, float]:
    """Both the timings of each cell and the prompts are drawn anew; fewer steps mean a larger acceptance length."""
    chance = random.Random(0)
    prompts = [pair for trail in trails for pair in zip(trail.emitted, trail.verified, strict=True)]
    found = []
    for _ in range(_ROUNDS):
        drawn = chance.choices(prompts, k=len(prompts))
        tokens, steps = sum(pair[0] for pair in drawn), sum(pair[1] for pair in drawn)
        found.append(speedup(Costs.of(timings, chance), trails, factor=length / (tokens / steps)))
    cuts = statistics.quantiles(found, n=40, method="inclusive")
    return cuts[0], cuts[-1]


def _plain_rows(emitted: Sequence[int]) -> list[int]:
    """Rows of each step of plain decoding: all that have tokens left to say."""
    return [sum(count > step for count in emitted) for step in range(max(emitted, default=0))]


def _cut(width: int, widths: Mapping[int, int] | None) -> int:
    if not widths:
        return width
    [(full, wanted)] = widths.items()
    return wanted if width >= full else min(width, wanted)


def _over(surface: Surface, rows: int, width: int) -> float:
    return line({at: line(cells, width) for at, cells in surface.items()}, rows)


def line(points: Mapping[int, float], at: int) -> float:
    """Straight lines through the points, the first and the last going on; past the last point never below that, since
    more work takes no less time, and before the first never below its share of that, as if work were done in parts.
    """
    places = sorted(points)
    if len(places) == 1:
        return points[places[0]]
    index = next((index for index, place in enumerate(places[1:-1], 1) if at <= place), len(places) - 1)
    low, high = places[index - 1], places[index]
    least = points[high] if at > places[-1] else points[low] * at / low if 0 < at < low else 0.0
    return max(least, points[low] + (points[high] - points[low]) * (at - low) / (high - low))
