"""A smaller causal language model."""

from __future__ import annotations

from typing import Any, final

import torch
from attrs import define, field
from attrs.validators import ge
from torch import Tensor

from specdec.drafter import Drafter, draw_chain
from specdec.errors import CompatibilityError
from specdec.loading import load, tokenizer_problems
from specdec.preflight import preflight
from specdec.sequence import Batch
from specdec.target import Target
from specdec.types import Draft, Kept, Span


@final
@define(kw_only=True, eq=False)
class DraftModel(Drafter):
    """Proposes a chain by sampling a smaller model, with the request's own temperature, filters and processors.

    Its cache follows the target's rows: what was kept is committed, what was not never happened. A row past the draft
    model's context gets an empty draft. Where all rows are greedy the draft is a point mass; otherwise the law handed
    over is the very tensor each token was drawn from. A text with an id that the draft model lacks gets none either.

    Source: Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318.
    Cost: num_speculative_tokens forwards of the draft model a step, and its cache.

    Attributes:
        model: a hub id, a folder, `random:FAMILY`, or a loaded transformers model.
        num_speculative_tokens: length of a draft.
        tokenizer: of a loaded model, so that ids can be compared; loaded with the model otherwise.
        revision: of a hub id.
        dtype: `auto` is the checkpoint's.
        device: where it goes; the target's when left out.
        device_map: passed to transformers.
        attn_implementation: passed to transformers.
        quantization_config: passed to transformers.
        trust_remote_code: passed to transformers.
        notes: what binding found worth saying.
    """

    model: Any
    num_speculative_tokens: int = field(default=5, validator=ge(1))
    tokenizer: Any = None
    revision: str | None = None
    dtype: str = "auto"
    device: str | None = None
    device_map: Any = None
    attn_implementation: str | None = None
    quantization_config: Any = None
    trust_remote_code: bool = False
    notes: list[str] = field(init=False, factory=list)
    _target: Target | None = field(init=False, default=None)
    _draft: Target | None = field(init=False, default=None)
    _staged: dict[int, int] = field(init=False, factory=dict)  # drafts that have cells beyond the committed, per slot
    _doubtful: set[int] = field(init=False, factory=set)  # slots whose cells may hold values that are not finite

    def bind(self, target: Target) -> None:
        if self._target is target:
            return
        if self._target is not None:
            raise CompatibilityError("drafter DraftModel is bound to another target; make one for each target")
        model, tokenizer = self.model, self.tokenizer
        if isinstance(model, str):
            model, tokenizer = load(
                model,
                revision=self.revision,
                dtype=self.dtype,
                device=self.device or str(target.device),
                device_map=self.device_map,
                attn_implementation=self.attn_implementation,
                quantization_config=self.quantization_config,
                trust_remote_code=self.trust_remote_code,
            )
        if tokenizer is not None and target.tokenizer is not None:
            problems, self.notes = tokenizer_problems(target.tokenizer, tokenizer)
            if problems:
                raise CompatibilityError(problems)
        draft = Target(model, tokenizer, kv=target.kv.fork())
        preflight(draft)
        self._target, self._draft = target, draft
        self._staged, self._doubtful = {}, set()

    def propose(self, batch: Batch) -> Draft:
        target, draft = self._bound()
        budget = [min(most, self.num_speculative_tokens) for most in batch.budget]
        for index, (row, slot) in enumerate(zip(batch.rows, batch.slots, strict=True)):
            draft.kv.occupy(slot)
            if len(row.tokens) + budget[index] > draft.limit or not self._reads(row.tokens, slot):
                budget[index] = 0

        def follow(depth: int, active: list[int], last: Tensor) -> Tensor:
            slots = tuple(batch.slots[index] for index in active)
            if depth == 0:
                logits = self._catch_up(slots, [batch.rows[index].tokens for index in active])
            else:
                span = Span(last.to(draft.device), (1,) * len(slots))
                logits = draft.forward(slots, span, offset=depth - 1).logits[:, -1]  # type: ignore[index]  # asked for
                self._staged.update(dict.fromkeys(slots, depth))
            return self._fit(logits, target.vocabulary)

        return draw_chain(batch, budget, follow)

    def observe(self, batch: Batch, kept: Kept) -> None:
        _, draft = self._bound()
        nothing = torch.zeros((1, 0), dtype=torch.int64)
        prompts: list[tuple[int, list[int]]] = []
        for index, (row, slot) in enumerate(zip(batch.rows, batch.slots, strict=True)):
            draft.kv.occupy(slot)
            known = kept.starts[index] + kept.counts[index]  # what the target has cached now
            ours = max(0, min(self._staged.pop(slot, 0), known - draft.kv.lengths[slot]))
            draft.kv.commit((slot,), nothing, (ours,), chain=True)
            if kept.drafted[index] < min(batch.budget[index], self.num_speculative_tokens):
                self._doubtful.add(slot)
            caught = not kept.tokens[index] and kept.finished[index] is None and known <= draft.limit
            if caught and self._reads(row.tokens[:known], slot):
                prompts.append((slot, row.tokens[:known]))
        if prompts:
            self._catch_up(tuple(slot for slot, _ in prompts), [tokens for _, tokens in prompts], logits=False)

    def release(self, slots: tuple[int, ...]) -> None:
        _, draft = self._bound()
        for slot in slots:
            self._staged.pop(slot, None)
            draft.kv.release((slot,), clear=slot in self._doubtful)
            self._doubtful.discard(slot)

    def _catch_up(self, slots: tuple[int, ...], known: list[list[int]], *, logits: bool = True) -> Tensor:
        """Cache known tokens that the draft model has not seen; they are never taken back, so they are committed.

        Returns the logits [b, V] after the last of each row.
        """
        _, draft = self._bound()
        new = [tokens[draft.kv.lengths[slot] :] for slot, tokens in zip(slots, known, strict=True)]
        counts = tuple(len(tokens) for tokens in new)
        width = max(counts)
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in new], device=draft.device)
        out = draft.forward(slots, Span(ids, counts), logits=logits).logits
        draft.kv.commit(slots, torch.arange(width).expand(len(slots), -1), counts, chain=True)
        if out is None:
            return ids
        return out[torch.arange(len(slots), device=out.device), torch.tensor(counts, device=out.device) - 1]

    def _reads(self, known: list[int], slot: int) -> bool:
        """Whether the draft model has an embedding for every token it has yet to see."""
        _, draft = self._bound()
        return max(known[draft.kv.lengths[slot] :], default=0) < draft.vocabulary

    @staticmethod
    def _fit(logits: Tensor, vocabulary: int) -> Tensor:
        """Cut or pad [b, V] to the target's width: ids the draft lacks get no mass."""
        logits = logits[..., :vocabulary]
        missing = vocabulary - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def _bound(self) -> tuple[Target, Target]:
        if self._target is None or self._draft is None:
            raise CompatibilityError("drafter DraftModel is not bound to a target; call bind(target), as Engine does")
        return self._target, self._draft
