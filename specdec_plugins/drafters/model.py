"""A smaller causal language model."""

from __future__ import annotations

import os
from itertools import accumulate
from operator import mul
from typing import Any, Literal, final

import torch
from attrs import Factory, define, field
from attrs.converters import optional
from attrs.validators import ge, in_
from torch import Tensor

from specdec.drafter import Drafter, draw_chain, draw_tree
from specdec.errors import CompatibilityError, ModelError
from specdec.loading import load, tokenizer_problems
from specdec.padding import alike
from specdec.preflight import preflight
from specdec.sequence import Batch
from specdec.target import Target
from specdec.types import Draft, Kept, Span

_MOST_NODES = 512
_CHUNK = 512  # most tokens of a row that one forward reads


def _branches(_: object, __: object, value: tuple[int, ...] | None) -> None:
    if value is None:
        return
    if not value or not all(type(count) is int and count >= 1 for count in value):
        raise ValueError(f"'branches' must be whole numbers from 1, one for each level, got {list(value)}")
    if sum(accumulate(value, mul)) > _MOST_NODES:
        raise ValueError(f"'branches' must make at most {_MOST_NODES} nodes, got {sum(accumulate(value, mul))}")


def _nodes(drafter: Any) -> int:
    return sum(accumulate(drafter.branches, mul)) if drafter.branches else 5


def _as_branches(drafter: Any, _: object, value: int) -> None:
    if drafter.branches and value != _nodes(drafter):
        raise ValueError(
            f"'num_speculative_tokens' must be {_nodes(drafter)} with these branches, or left out, got {value}"
        )


@final
@define(kw_only=True, eq=False)
class DraftModel(Drafter):
    """Proposes a chain, or a tree, by sampling a smaller model, with the request's own temperature, filters and
    processors.

    Its cache follows the target's rows: what was kept is committed, what was not never happened. A row past the draft
    model's context gets an empty draft. Where all rows are greedy the draft is a point mass; otherwise the law handed
    over is the very tensor each token was drawn from. A text with an id that the draft model lacks gets none either.

    Source: Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318; trees: SpecInfer, arXiv:2305.09781, and
    Sequoia, arXiv:2402.12374.
    Cost: a forward of the draft model for each level of the draft a step, and its cache.

    Attributes:
        model: a hub id, a folder, `random:FAMILY`, or a loaded transformers model.
        branches: of a tree, children of every node by level: [3, 1, 1] is three chains of three. A chain when left out.
        siblings: whether the children of a node may be equal.
        num_speculative_tokens: length of a draft, 5; with `branches` the number of its nodes, which follows from them.
        tokenizer: of a loaded model, so that ids can be compared; loaded with the model otherwise.
        revision: of a hub id.
        dtype: `auto` is the checkpoint's.
        device: where it goes; the target's when left out.
        device_map: passed to transformers.
        attn_implementation: passed to transformers.
        quantization_config: passed to transformers.
        trust_remote_code: passed to transformers.
        packed: on a CPU, keep linear layers of a model that is loaded here in the layout that it multiplies fastest.
        notes: what binding found worth saying.
    """

    model: Any
    branches: tuple[int, ...] | None = field(default=None, converter=optional(tuple), validator=_branches)
    siblings: Literal["without_replacement", "with_replacement"] = field(
        default="without_replacement", validator=in_(("without_replacement", "with_replacement"))
    )
    num_speculative_tokens: int = field(default=Factory(_nodes, takes_self=True), validator=[ge(1), _as_branches])
    tokenizer: Any = None
    revision: str | None = None
    dtype: str = "auto"
    device: str | None = None
    device_map: Any = None
    attn_implementation: str | None = None
    quantization_config: Any = None
    trust_remote_code: bool = False
    packed: bool = True
    notes: list[str] = field(init=False, factory=list)
    _target: Target | None = field(init=False, default=None)
    _draft: Target | None = field(init=False, default=None)
    _staged: dict[int, int] = field(init=False, factory=dict)  # drafts that have cells beyond the committed, per slot
    _doubtful: set[int] = field(init=False, factory=set)  # slots whose cells may hold values that are not finite

    @property
    def trees(self) -> bool:
        return self.branches is not None and max(self.branches) > 1

    @property
    def catches_up(self) -> bool:
        return True

    def bind(self, target: Target) -> None:
        if self._target is target:
            return
        if self._target is not None:
            raise CompatibilityError("drafter DraftModel is bound to another target; make one for each target")
        model, tokenizer = self.model, self.tokenizer
        if isinstance(model, str | os.PathLike):
            model, tokenizer = load(
                os.fspath(model),
                revision=self.revision,
                dtype=self.dtype,
                device=self.device or str(target.device),
                device_map=self.device_map,
                attn_implementation=self.attn_implementation,
                quantization_config=self.quantization_config,
                trust_remote_code=self.trust_remote_code,
                packed=self.packed,
            )
        elif not hasattr(model, "config"):
            raise ModelError(f"drafter model: got {type(model).__name__}, wanted a loaded model, a hub id or a folder")
        if tokenizer is not None and target.tokenizer is not None:
            problems, self.notes = tokenizer_problems(target.tokenizer, tokenizer)
            if problems:
                raise CompatibilityError(problems)
        draft = Target(model, tokenizer, kv=target.kv.fork(), graphs=target.graphs)
        preflight(draft)
        self._target, self._draft = target, draft
        self._staged, self._doubtful = {}, set()

    def propose(self, batch: Batch) -> Draft:
        _, draft = self._bound()
        budget = [min(most, self.num_speculative_tokens) for most in batch.budget]
        for index, (row, slot) in enumerate(zip(batch.rows, batch.slots, strict=True)):
            draft.kv.occupy(slot)
            if len(row.tokens) + budget[index] > draft.limit or not self._reads(row.tokens, slot):
                budget[index] = 0

        return self._tree(batch, budget) if self.trees else self._chain(batch, budget)

    def _chain(self, batch: Batch, budget: list[int]) -> Draft:
        target, draft = self._bound()

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

    def _tree(self, batch: Batch, budget: list[int]) -> Draft:
        """Every level forwards the whole tree above it: what it staged before has no place for siblings of its own."""
        target, draft = self._bound()
        roots: dict[int, Tensor] = {}

        def follow(level: int, active: list[int], nodes: Tensor, parents: Tensor) -> Tensor:
            slots = tuple(batch.slots[index] for index in active)
            if level == 0:
                caught = self._catch_up(slots, [batch.rows[index].tokens for index in active])
                roots.update(zip(active, caught, strict=True))
            logits = torch.stack([roots[index] for index in active]).unsqueeze(1)
            if level:
                sizes = tuple(min(budget[index], nodes.shape[1]) for index in active)
                span = Span(nodes.to(draft.device), sizes, parents.to(draft.device).expand(len(active), -1))
                below = draft.forward(slots, span).logits
                assert below is not None  # asked for
                logits = torch.cat([logits, below], 1)
            return self._fit(logits, target.vocabulary)

        return draw_tree(batch, budget, self.branches or (), follow, replace=self.siblings == "with_replacement")

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

        Returns the logits [b, V] after the last of each row, where they are wanted.
        """
        _, draft = self._bound()
        long = [index for index, slot in enumerate(slots) if len(known[index]) - draft.kv.lengths[slot] > _CHUNK]
        if long:
            first = [known[index][: draft.kv.lengths[slots[index]] + _CHUNK] for index in long]
            self._catch_up(tuple(slots[index] for index in long), first, logits=False)
            return self._catch_up(slots, known, logits=logits)
        new = [tokens[draft.kv.lengths[slot] :] for slot, tokens in zip(slots, known, strict=True)]
        groups = alike([len(tokens) for tokens in new], draft.device)
        found = [self._read([slots[i] for i in group], [new[i] for i in group], logits=logits) for group in groups]
        if len(groups) == 1:
            return found[0]
        order = torch.tensor([index for group in groups for index in group]).argsort().to(draft.device)
        return torch.cat(found)[order]

    def _read(self, slots: list[int], new: list[list[int]], *, logits: bool) -> Tensor:
        """Cache the new tokens of rows; returns the logits [b, V] after the last of each, where they are wanted."""
        _, draft = self._bound()
        counts = tuple(len(tokens) for tokens in new)
        width = max(counts)
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in new], device=draft.device)
        out = draft.forward(tuple(slots), Span(ids, counts), logits=logits).logits
        draft.kv.commit(slots, torch.arange(width).expand(len(slots), -1), counts, chain=True)
        if out is None:
            return ids.new_zeros((len(slots), 0))
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
