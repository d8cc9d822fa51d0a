"""Steps of the engine, counted and timed: the same loop, drafter and rule that a run has, one step at a time."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import final

import torch
from attrs import define, evolve, field

from specdec.costs import Costs, Timing, Trail
from specdec.drafter import Drafter
from specdec.engine import Engine
from specdec.errors import RequestError
from specdec.progress import Completion
from specdec.scheduler import Scheduler
from specdec.sequence import Batch
from specdec.sequence import Sequence as Row
from specdec.target import Target
from specdec.types import Draft, Kept, Request
from specdec.verifier import Verifier

_LEAST_ROUNDS = 3
_TURNS = 3  # steps of one width in a row


@final
@define(kw_only=True, eq=False)
class Paced(Scheduler):
    """Admits all it can, and gives every row a budget of at most `width`.

    Attributes:
        width: None is the drafter's own.
    """

    width: int | None = None

    def admit(self, waiting: int, running: int, slots: int) -> int:
        return min(waiting, slots)

    def budget(self, row: Row, most: int) -> int:
        return min(most, row.room) if self.width is None else min(most, row.room, self.width)


@final
@define(eq=False)
class Watched(Drafter):
    """A drafter that proposes what another one does, and counts what became of it.

    Attributes:
        inner: the other one.
        fill: lengthen drafts that have no law to the whole budget, so that a width is what it was meant to be.
        steps: (rows, width, whether the drafter was asked) -> how many such steps.
        rejected: request id, place in its tokens, the drafted token and the one that came instead.
        chunks: how many chunks of prompts it has seen.
        read: tokens of them.
        prefill: seconds of the drafter over them.
        last: rows and width of the last step; None after a prompt's chunk.
    """

    inner: Drafter
    fill: bool = False
    steps: Counter[tuple[int, int, bool]] = field(init=False, factory=Counter)
    rejected: list[tuple[str, int, int, int]] = field(init=False, factory=list)
    chunks: int = field(init=False, default=0)
    read: int = field(init=False, default=0)
    prefill: float = field(init=False, default=0.0)
    last: tuple[int, int] | None = field(init=False, default=None)
    _draft: Draft | None = field(init=False, default=None)

    @property
    def num_speculative_tokens(self) -> int:
        return self.inner.num_speculative_tokens

    @property
    def deterministic(self) -> bool:
        return self.inner.deterministic

    @property
    def trees(self) -> bool:
        return self.inner.trees

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    @property
    def catches_up(self) -> bool:
        return self.inner.catches_up

    def bind(self, target: Target) -> None:
        self.inner.bind(target)

    def propose(self, batch: Batch) -> Draft:
        draft = self.inner.propose(batch)
        self._draft = _filled(draft, batch) if self.fill and draft.law is None and draft.parents is None else draft
        return self._draft

    def observe(self, batch: Batch, kept: Kept) -> None:
        draft, self._draft = self._draft, None
        if not any(kept.tokens) and not any(kept.finished):
            start = _now(batch)
            self.inner.observe(batch, kept)
            self.prefill += _now(batch) - start
            self.chunks += 1
            self.read += sum(kept.counts)
            self.last = None
            return
        width = 0 if draft is None else min(max(batch.budget), draft.tokens.shape[1])
        self.last = (len(batch.rows), width)
        self.steps[len(batch.rows), width, draft is not None] += 1
        for index, row in enumerate(batch.rows):
            accepted = kept.accepted[index]
            if draft is not None and accepted < min(kept.drafted[index], len(kept.tokens[index])):
                place = kept.starts[index] + 1 + accepted
                drafted = int(draft.tokens[index, accepted])
                self.rejected.append((row.request.id, place, drafted, kept.tokens[index][accepted]))
        self.inner.observe(batch, kept)

    def release(self, slots: tuple[int, ...]) -> None:
        self.inner.release(slots)


def follow(
    target: Target,
    drafter: Watched,
    verifier: Verifier,
    requests: Sequence[Request],
    tell: Callable[[int], None] = lambda done: None,
) -> tuple[list[Completion], list[Trail]]:
    """Serve requests in chunks of as many as the cache has rows, as a comparison does, and keep their trails.

    Args:
        tell: told how many are done.
    """
    engine = Engine(target, drafter, verifier, Paced(), diagnostics=target.device.type == "cuda")
    rows = target.kv.rows
    completions, trails = [], []
    for start in range(0, len(requests), rows):
        chunk = requests[start : start + rows]
        drafter.steps, drafter.prefill, before = Counter(), 0.0, engine.prefill
        done: dict[str, Completion] = {}
        for request in chunk:
            engine.submit(request)
        while not engine.scheduler.idle:
            events = engine.step()
            done |= {event.id: event.completion for event in events if event.completion is not None}
        made = [done[request.id] for request in chunk]
        completions += made
        trails.append(
            Trail(
                steps=dict(drafter.steps),
                emitted=tuple(one.counters.num_emitted_tokens for one in made),
                verified=tuple(one.counters.num_steps for one in made),
                prefill=max(0.0, engine.prefill - before - drafter.prefill),
                draft_prefill=drafter.prefill,
            )
        )
        tell(len(completions))
    return completions, trails


def levels(rows: int) -> list[int]:
    """Numbers of rows to measure: all, and the powers of two below."""
    return [rows, *(1 << power for power in reversed(range(rows.bit_length())) if 1 << power < rows)]


def widths(most: int) -> list[int]:
    """Widths of drafts to measure: the powers of two below `most`, and `most`."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


def cells(most: int) -> int:
    """New tokens a row may need for two rounds of `time_steps`."""
    return 2 * sum(width + 1 for width, _ in _cycle(widths(most)))


def measure(target: Target, drafter: Drafter, verifier: Verifier, requests: Sequence[Request]) -> Costs:
    """What steps cost with a drafter, for a scheduler that decides by it: a minute or so on a real pair.

    Args:
        requests: whose prompts and sampling are used, each as far as a cache row has room for it.

    Raises:
        RequestError: texts end before steps can be timed.
    """
    seen = Watched(drafter, fill=True)
    most = drafter.num_speculative_tokens
    room = min(target.kv.tokens, target.context)
    endless = []
    for one in requests:
        new = max(1, min(cells(max(1, most)), room - len(one.prompt)))
        sampling = evolve(one.sampling, ignore_eos=True, stop_strings=(), stop_ids=(), max_new_tokens=new)
        endless.append(evolve(one, sampling=sampling))
    timings = []
    for rows in levels(target.kv.rows):
        found = time_steps(target, seen, verifier, endless, rows, widths(most), rounds=_LEAST_ROUNDS, seconds=8.0)
        timings += found
        if not {0, most} <= {one.width for one in found}:
            raise RequestError(
                f"costs: texts end before steps of 0 and of {most} draft tokens are timed for {rows} rows; give the "
                "cache more tokens, or the scheduler its costs"
            )
    # What a drafter was not asked about costs it as much as a prompt.
    reading = seen.prefill / max(1, seen.read) if drafter.catches_up else 0.0
    return Costs.read(evolve(Costs.of(timings), catch_up=reading).to_dict())


def time_steps(
    target: Target,
    drafter: Drafter,
    verifier: Verifier,
    requests: Sequence[Request],
    rows: int,
    wanted: Sequence[int],
    *,
    rounds: int,
    seconds: float,
) -> list[Timing]:
    """Seconds of steps of given widths, a plain one in turn with them, while real prompts are decoded.

    Args:
        requests: whose prompts and sampling are used, again and again.
        rows: how many run at once.
        wanted: widths of drafts, ascending.
        rounds: how many times each width is wanted.
        seconds: after which three rounds are enough.
    """
    watched, pace = Watched(drafter, fill=True), Paced()
    engine = Engine(target, watched, verifier, pace, diagnostics=target.device.type == "cuda")
    cycle = _cycle(wanted)
    supply = itertools.cycle(requests)
    found: list[Timing] = []
    began, finished, place = time.perf_counter(), 0, 0

    def enough() -> bool:
        return finished >= rounds or (finished >= _LEAST_ROUNDS and time.perf_counter() - began > seconds)

    while not enough():
        there = len(found)
        batch = [evolve(next(supply), id=f"{index}") for index in range(rows)]
        width, counts = cycle[place]
        pace.width = width
        with closing(engine.stream(batch)) as stream:  # type: ignore[type-var]  # an iterator that is a generator
            steps, before, full = engine.steps, list(engine.seconds), False
            for _ in stream:
                if engine.steps == steps:
                    continue  # another row of the same step
                spent = [after - earlier for after, earlier in zip(engine.seconds, before, strict=True)]
                steps, before = engine.steps, list(engine.seconds)
                if watched.last is None or watched.last[0] < rows:
                    if full:
                        break  # a row has ended
                    continue  # others are still at their prompts
                if counts and full and watched.last[1] == width:
                    found.append(Timing(rows, width, spent[0] if width else None, spent[1], spent[2]))
                full = True
                place = (place + 1) % len(cycle)
                finished += place == 0
                if enough():
                    break
                width, counts = cycle[place]
                pace.width = width
        if len(found) == there:
            break  # the texts have no room for it
    return found


def _cycle(wanted: Iterable[int]) -> list[tuple[int, bool]]:
    """Widths of steps in turn, and whether the step counts.

    Some steps of a width follow one another, as they do in a run, and the first of them does not count: a processor is
    slower with what it has not just done, and after plain steps a draft model has more to catch up with.
    """
    return [(width, turn > 0) for width in (0, *wanted) for turn in range(_TURNS)]


def _filled(draft: Draft, batch: Batch) -> Draft:
    """Every row with as many tokens as its budget, what is missing being the pending token."""
    most, width = max(batch.budget), draft.tokens.shape[1]
    columns = torch.arange(most, device=draft.tokens.device)
    padded = torch.nn.functional.pad(draft.tokens, (0, max(0, most - width)))[:, :most]
    pending = batch.pending.to(padded.device).unsqueeze(1)
    tokens = torch.where(columns < draft.sizes.unsqueeze(1), padded, pending)
    return evolve(draft, tokens=tokens, sizes=torch.tensor(batch.budget, device=tokens.device))


def _now(batch: Batch) -> float:
    if batch.pending.device.type == "cuda":
        torch.cuda.synchronize(batch.pending.device)
    return time.perf_counter()
