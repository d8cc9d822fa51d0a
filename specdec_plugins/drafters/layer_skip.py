"""The target itself, without some of its layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from attrs import define, field
from attrs.validators import ge, instance_of
from torch import Tensor

from specdec.drafter import Drafter, draw_chain
from specdec.errors import CompatibilityError, ModelError
from specdec.preflight import preflight
from specdec.sequence import Batch
from specdec.target import Target
from specdec.types import Draft, Kept, Span


def middle(layers: int) -> tuple[int, ...]:
    """Every second layer of the middle half of `layers`; the first one always stays."""
    return tuple(range(max(1, layers // 4), layers - layers // 4, 2))


def _numbers(value: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


@final
@define(kw_only=True, eq=False)
class LayerSkip(Drafter):
    """Proposes a chain by sampling the target without the layers in `skip`, with the request's own temperature, filters
    and processors.

    It drafts in the target's own cache: the kept layers read the keys and values that the target has committed, what
    they stage themselves is written over by the verification, and nothing of it is ever committed.

    Where all rows are greedy the draft is a point mass; otherwise the law handed over is the very tensor each token was
    drawn from. A draft ends at logits that are not finite.

    Source: Zhang et al., Draft & Verify, arXiv:2309.08168, which searches the layers to skip for each model; Elhoushi
    et al., LayerSkip, arXiv:2404.16710, which skips the last ones of a model trained for it.
    Cost: num_speculative_tokens forwards of the kept layers and the head a step; no weight and no cache of its own.

    Attributes:
        num_speculative_tokens: length of a draft.
        skip: layers to leave out, from 0; an empty list leaves out none. When not given, every second layer of the
            middle half: of 32 layers 8, 10, ..., 22. Which layers a model can miss differs from model to model.
        notes: which layers are skipped, when it was not said.
    """

    num_speculative_tokens: int = field(default=4, validator=[instance_of(int), ge(1)])
    skip: tuple[int, ...] | None = field(default=None, converter=_numbers)
    notes: list[str] = field(init=False, factory=list)
    _target: Target | None = field(init=False, default=None)
    _draft: Target | None = field(init=False, default=None)

    def bind(self, target: Target) -> None:
        if self._target is target:
            return
        if self._target is not None:
            raise CompatibilityError("drafter LayerSkip is bound to another target; make one for each target")
        layers = int(target.config.num_hidden_layers)
        skip = middle(layers) if self.skip is None else self.skip
        if problems := _wrong(skip, layers):
            raise CompatibilityError(problems)
        try:
            draft = target.subset(layer for layer in range(layers) if layer not in skip)
            preflight(draft)
        except ModelError as error:
            raise CompatibilityError(f"drafter LayerSkip: {error}") from error
        if self.skip is None:
            self.notes = [f"skips layers {', '.join(map(str, skip)) or 'none'} of {layers}"]
        self._target, self._draft = target, draft

    def propose(self, batch: Batch) -> Draft:
        draft = self._draft
        if draft is None:
            raise CompatibilityError("drafter LayerSkip is not bound to a target; call bind(target), as Engine does")

        def follow(depth: int, active: list[int], last: Tensor) -> Tensor:
            slots = tuple(batch.slots[index] for index in active)
            out = draft.forward(slots, Span(last, (1,) * len(slots)), offset=depth).logits
            assert out is not None  # asked for
            return out[:, -1]

        # All columns stay, even those of a row whose draft ended early: the verification then writes every staged cell.
        return draw_chain(batch, [min(most, self.num_speculative_tokens) for most in batch.budget], follow)

    def observe(self, batch: Batch, kept: Kept) -> None:
        """The target's cache is all it reads."""

    def release(self, slots: tuple[int, ...]) -> None:
        """Nothing to forget."""


def _wrong(skip: tuple[int, ...], layers: int) -> list[str]:
    """Every reason why these layers cannot be skipped."""
    problems = []
    for layer in skip:
        if isinstance(layer, bool) or not isinstance(layer, int):
            problems.append(f"skip: got {layer!r}, wanted numbers of layers")
        elif not 0 <= layer < layers:
            problems.append(f"skip: the target has no layer {layer}; wanted some of 0 to {layers - 1}")
    if twice := sorted({layer for layer in skip if skip.count(layer) > 1}, key=repr):
        problems.append(f"skip: layers {', '.join(map(repr, twice))} are named more than once; name each once")
    if set(range(layers)) <= set(skip):
        problems.append(f"skip: no layer is left of the target's {layers}; leave at least one out of the list")
    return problems
