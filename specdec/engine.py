"""The loop. A request becomes a sequence; each step drafts, scores, verifies, keeps, commits and tells everyone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import final

import torch
from attrs import evolve
from torch import Tensor

from specdec import tree
from specdec.compat import check, check_draft
from specdec.diagnostics import probe
from specdec.drafter import Drafter
from specdec.errors import CompatibilityError, RequestError
from specdec.padding import alike
from specdec.preflight import preflight
from specdec.progress import Completion, Event, Progress
from specdec.scheduler import Room, Scheduler
from specdec.sequence import Batch, Sequence, make_batch
from specdec.settle import draw, settle
from specdec.target import Target
from specdec.text import TextStream
from specdec.types import Draft, Extras, Kept, Request, Scores, Span, Verdict
from specdec.verifier import Verifier


@final
class Engine:
    """Target, drafter, verifier and scheduler in one loop.

    Attributes:
        seconds: draft, verify and rest (prefill is in the rest), summed; diagnostics are not in it. On a GPU the split
            is exact only with diagnostics on, which wait for the device; the sum always is.
        prefill: seconds of prompts, which are in the rest as well.
        steps: decode steps so far.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        scheduler: Scheduler,
        *,
        diagnostics: bool = False,
        logprobs: bool = False,
        trace: Callable[[Batch, Draft, Scores, Verdict, Kept], None] | None = None,
    ) -> None:
        """
        Args:
            target: the model whose law is wanted.
            drafter: proposes; bound to the target here.
            verifier: decides.
            scheduler: says which rows run.
            diagnostics: say in `Completion.diagnostics` what `specdec.diagnostics.probe` finds at every examined place.
            logprobs: say in `Completion.logprobs` how probable each token was, under the target and where it was drawn.
            trace: told every decode step before it is committed; not in the step's time.

        Raises:
            CompatibilityError: they do not fit each other; names every reason.
            ModelError: the preflight found that the target cannot be decoded exactly.
        """
        check(target, drafter, verifier)
        preflight(target)
        drafter.bind(target)
        verifier.prepare(target)
        self.target, self.drafter, self.verifier, self.scheduler = target, drafter, verifier, scheduler
        self.seconds = [0.0, 0.0, 0.0]
        self.prefill, self.steps = 0.0, 0
        self._diagnostics, self._logprobs, self._trace = diagnostics, logprobs, trace
        self._taps = tuple(sorted({*drafter.taps, *verifier.taps}))
        self._memory = (
            torch.zeros((target.kv.rows, verifier.memory), dtype=torch.float64, device=target.device)
            if verifier.memory
            else None
        )
        self._progress: dict[str, Progress] = {}
        self._unnamed = 0

    def submit(self, request: Request) -> str:
        """Queue a request; returns its id.

        Raises:
            RequestError: it cannot be served; says why.
        """
        request = self._named(request)
        self.refuse(request)
        sampling, target = request.sampling, self.target
        sequence = Sequence(
            request=request,
            eos_ids=frozenset() if sampling.ignore_eos else target.eos_ids,
            limit=target.context,
            text=TextStream(target.tokenizer, sampling.stop_strings) if target.tokenizer is not None else None,
        )
        self._progress[request.id] = Progress()
        self.scheduler.submit(sequence)
        return request.id

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Serve requests to their ends, in the order given.

        Raises:
            RequestError: one of them cannot be served (then none is), or the engine is serving others.
        """
        requests = list(requests)
        given = {request.id for request in requests}
        named = [self._named(request, given) for request in requests]
        done = {event.id: event.completion for event in self.stream(named) if event.completion is not None}
        return [done[request.id] for request in named]

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Serve requests, yielding what each step emitted. Leaving early drops what was not finished.

        Raises:
            RequestError: one of them cannot be served (then none is), or the engine is serving others.
        """
        if not self.scheduler.idle:
            raise RequestError("engine: other requests are not finished; step() to their end or close their stream")
        own: set[str] = set()
        try:
            for request in requests:
                own.add(self.submit(request))
            while not self.scheduler.idle:
                events = self.step()
                yield from events
                if not events and not self.scheduler.running:
                    raise RequestError("engine: no cache row is free for what waits; another engine holds them all")
        finally:
            self._release(list(self.scheduler.drop(own)), clear=True)
            for name in own:
                self._progress.pop(name, None)

    def step(self) -> list[Event]:
        """One plan: admit, cache prompts in chunks, decode every row that is ready."""
        plan = self.scheduler.plan(Room(self.target.kv.room, self.drafter.num_speculative_tokens))
        for row in plan.admit:
            row.slot = self.target.kv.acquire()
            if self._memory is not None:
                self._memory[row.slot] = self._start(row)
        with torch.inference_mode():
            for group in alike([count for _, count in plan.prefill], self.target.device):
                self._prefill([plan.prefill[index] for index in group])
            if not plan.decode:
                return []
            batch = make_batch(list(plan.decode), self.target.device, self._memory)
            return self._finish(batch, self._decode(batch))

    def _decode(self, batch: Batch) -> Kept:
        start = self._clock()
        draft, clipped = self._propose(batch)
        drafted = self._clock()
        scores = self.target.score(batch, draft, self._taps)  # stages keys and values
        verified = self._clock()
        verdict = self.verifier.verify(draft, scores, batch.noise, batch.memory)
        following = draw(verdict, batch.noise)
        judged = self._clock()
        extras = self._probe(batch, draft, scores, verdict, following)
        probed = self._clock()
        kept = settle(batch, draft, scores, verdict, following, clipped, extras)  # stops; the one copy to the host
        settled = self._clock()
        if self._trace is not None:
            self._trace(batch, draft, scores, verdict, kept)
        traced = self._clock()
        self._commit(batch, kept)
        self.drafter.observe(batch, kept)
        self.scheduler.observe(batch, kept)
        rest = (judged - verified) + (settled - probed) + (self._clock() - traced)
        seconds = (drafted - start, verified - drafted, rest)
        self.seconds = [total + part for total, part in zip(self.seconds, seconds, strict=True)]
        self.steps += 1
        return evolve(kept, seconds=seconds)

    def _probe(self, batch: Batch, draft: Draft, scores: Scores, verdict: Verdict, following: Tensor) -> Extras | None:
        if not self._logprobs and not (self._diagnostics and draft.tokens.shape[1]):
            return None
        return probe(
            draft, scores, verdict, following, self.verifier, batch.noise, batch.memory,
            diagnostics=self._diagnostics, logprobs=self._logprobs,
        )  # fmt: skip

    def _start(self, row: Sequence) -> Tensor:
        numbers = self.verifier.start(row.request.prompt)
        if len(numbers) != self.verifier.memory:
            raise CompatibilityError(
                f"verifier {type(self.verifier).__name__}: start gave {len(numbers)} numbers, wanted its memory of "
                f"{self.verifier.memory}"
            )
        return torch.tensor(numbers, dtype=torch.float64)

    def _clock(self) -> float:
        # Without waiting for the device, work of the diagnostics would be charged to what follows them.
        if (self._diagnostics or self._logprobs) and self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _propose(self, batch: Batch) -> tuple[Draft, Tensor]:
        """A draft within budgets and vocabulary, and how many nodes of each row were clipped to get there."""
        most = max(batch.budget)
        device = self.target.device
        if most == 0:
            none = torch.zeros((len(batch.rows), 0), dtype=torch.int64, device=device)
            return Draft(none, none.sum(1)), none.sum(1)
        draft = self.drafter.propose(batch)
        check_draft(draft, self.drafter, batch, self.target.vocabulary)
        width = min(most, draft.tokens.shape[1])
        tokens = draft.tokens[:, :width].to(device)
        columns = torch.arange(width, device=device)
        proposed = draft.sizes.to(device).clamp(min=0, max=draft.tokens.shape[1])
        usable = (tokens >= 0) & (tokens < self.target.vocabulary)
        if draft.law is not None:  # a draft law that is not finite counts as no draft
            usable &= torch.isfinite(draft.law.narrow(width).at(torch.where(usable, tokens, 0)))
        if draft.parents is not None:
            usable &= tree.topological(draft.parents[:, :width].to(device))
        whole = usable.long().cumprod(1).sum(1)
        sizes = torch.minimum(torch.minimum(proposed, whole), torch.tensor(batch.budget, device=device))
        clean = evolve(
            draft,
            tokens=torch.where(columns < sizes.unsqueeze(1), tokens, 0),
            sizes=sizes,
            parents=None
            if draft.parents is None
            else torch.where(columns < sizes.unsqueeze(1), draft.parents[:, :width].to(device), -1),
            law=None if draft.law is None else draft.law.narrow(width),
            confidence=None if draft.confidence is None else draft.confidence[:, :width],
        )
        wanted = self.scheduler.trim(clean)
        if wanted is sizes:
            return clean, proposed - sizes
        return _narrow(evolve(clean, sizes=torch.minimum(sizes, wanted).clamp(min=0))), proposed - sizes

    def _prefill(self, rows: list[tuple[Sequence, int]]) -> None:
        """Cache prompt chunks; no logits are made."""
        start = time.perf_counter()
        batch = make_batch([(row, 0) for row, _ in rows], self.target.device)
        chunk = {id(row): count for row, count in rows}
        counts = tuple(chunk[id(row)] for row in batch.rows)
        width = max(counts)
        pieces = [
            row.tokens[row.cached : row.cached + count + 1] for row, count in zip(batch.rows, counts, strict=True)
        ]
        ids = torch.tensor([piece + [0] * (width + 1 - len(piece)) for piece in pieces], device=self.target.device)
        tokens, after = ids[:, :width], ids[:, 1:]
        out = self.target.forward(batch.slots, Span(tokens, counts), taps=self.drafter.taps, logits=False)
        none: tuple[None, ...] = (None,) * len(batch.rows)
        kept = Kept(
            tokens=((),) * len(batch.rows),
            starts=batch.lengths,
            inputs=tokens,
            next_inputs=after,
            offsets=torch.arange(width, device=self.target.device).expand(len(batch.rows), width),
            counts=counts,
            chain=True,
            hidden=out.hidden,
            drafted=(0,) * len(batch.rows),
            depths=(0,) * len(batch.rows),
            clipped=(0,) * len(batch.rows),
            accepted=(0,) * len(batch.rows),
            examined=(0,) * len(batch.rows),
            sources=none,
            finished=none,
        )
        self._commit(batch, kept)
        if self.scheduler.reads or not self.drafter.catches_up:
            self.drafter.observe(batch, kept)
        spent = time.perf_counter() - start
        self.prefill += spent
        self.seconds[2] += spent

    def _commit(self, batch: Batch, kept: Kept) -> None:
        self.target.kv.commit(batch.slots, kept.offsets, kept.counts, chain=kept.chain)
        for row, start, count in zip(batch.rows, kept.starts, kept.counts, strict=True):
            row.cached = start + count
        if self._memory is not None and kept.memory is not None:
            self._memory[torch.tensor(batch.slots, device=self._memory.device)] = kept.memory

    def _finish(self, batch: Batch, kept: Kept) -> list[Event]:
        events = [self._progress[row.request.id].record(row, kept, i) for i, row in enumerate(batch.rows)]
        ended = [row for row in batch.rows if row.finish_reason is not None]
        self._release([row for row in ended if row.finish_reason != "error"], clear=False)
        self._release([row for row in ended if row.finish_reason == "error"], clear=True)
        for row in ended:
            del self._progress[row.request.id]
        return events

    def _release(self, rows: list[Sequence], *, clear: bool) -> None:
        slots = tuple(row.slot for row in rows if row.slot is not None)
        if slots:
            self.target.kv.release(slots, clear=clear)
            self.drafter.release(slots)

    def _named(self, request: Request, given: AbstractSet[str] = frozenset()) -> Request:
        if request.id:
            return request
        self._unnamed += 1
        while f"request-{self._unnamed}" in self._progress.keys() | given:
            self._unnamed += 1
        return evolve(request, id=f"request-{self._unnamed}")

    def refuse(self, request: Request) -> None:
        """Raise RequestError when a request cannot be served, without queuing it."""
        target, sampling, length = self.target, request.sampling, len(request.prompt)
        name = f"request {request.id!r}"
        if request.id in self._progress:
            raise RequestError(f"{name}: the id is already in use; give every request its own")
        if not length:
            raise RequestError(f"{name}: the prompt is empty; wanted at least one token, try the model's BOS token")
        if wrong := [token for token in request.prompt if not 0 <= token < target.vocabulary]:
            raise RequestError(f"{name}: token {wrong[0]} is outside the vocabulary of {target.vocabulary}")
        if length >= target.context:
            raise RequestError(
                f"{name}: {length} prompt tokens leave no room in a context of {target.context}; shorten it"
            )
        if sampling.stop_strings and target.tokenizer is None:
            raise RequestError(f"{name}: stop strings need a tokenizer; give the target one, or use stop_ids")
        marks = () if target.tokenizer is None else target.tokenizer.all_special_tokens
        if hidden := [stop for stop in sampling.stop_strings if any(mark in stop for mark in marks)]:
            raise RequestError(
                f"{name}: stop string {hidden[0]!r} holds a special token, which texts do not show; use stop_ids"
            )
        if (need := min(length + sampling.max_new_tokens, target.context)) > target.kv.tokens:
            raise RequestError(
                f"{name}: prompt and new tokens need {need} cells and a cache row has {target.kv.tokens}; "
                f"set kv.tokens to {need} or lower max_new_tokens"
            )


def _narrow(draft: Draft) -> Draft:
    """Without the columns that a scheduler left to no row: the target would be asked about them, too."""
    width = int(draft.sizes.max())
    return evolve(
        draft,
        tokens=draft.tokens[:, :width],
        parents=None if draft.parents is None else draft.parents[:, :width],
        law=None if draft.law is None else draft.law.narrow(width),
        confidence=None if draft.confidence is None else draft.confidence[:, :width],
    )
