"""The data that flows through a step. Shapes use one alphabet:

`B` rows in the step, `T` new tokens per row, `N` draft nodes per row, `D` kept path length, `A = 1 + D` kept staged
tokens, `V` vocabulary, `H` hidden size, `S` cached positions, `R` rows the cache can hold, `M` numbers of rule memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, Literal, final

from attrs import field, frozen
from attrs.validators import ge, gt, instance_of, le
from torch import Tensor

from specdec.law import Law

FinishReason = Literal["eos", "stop_string", "length", "context", "error"]
# Where the token after a kept path came from. `Verdict.source` holds the index.
SOURCES = ("bonus", "residual", "target", "argmax", "fallback")
Source = Literal["bonus", "residual", "target", "argmax", "fallback"]


def _number(_: object, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"'{attribute.name}' must be a finite number, got {value!r}")


def _whole(_: object, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"'{attribute.name}' must be a whole number from 0, got {value!r}")


def _temperature(_: object, attribute: Any, value: float) -> None:
    if value != 0.0 and not value >= 1e-4:
        raise ValueError(f"'{attribute.name}' must be 0 (greedy) or at least 1e-4, got {value}; try 0")


def _stops(_: object, attribute: Any, value: tuple[Any, ...]) -> None:
    if wrong := [text for text in value if not isinstance(text, str) or not text]:
        raise ValueError(f"'{attribute.name}' must be texts that are not empty, got {wrong[0]!r}")


def _texts(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _ids(value: Iterable[Any]) -> tuple[int, ...]:
    # operator.index takes ints of every library and refuses 1.7 and "12".
    return tuple(operator.index(token) for token in value)


def _id_set(value: Iterable[Any]) -> frozenset[int]:
    return frozenset(_ids(value))


@final
@frozen(kw_only=True)
class Sampling:
    """How the tokens of one request are drawn and when it ends. Names as in transformers' GenerationConfig.

    Attributes:
        temperature: 0 means greedy; greedy is a mode and never divides.
        top_k: 0 means off.
        top_p: 1 means off.
        min_p: 0 means off.
        repetition_penalty: 1 means off.
        max_new_tokens: at most this many tokens are emitted.
        min_new_tokens: no end-of-sequence token before this many.
        ignore_eos: end-of-sequence tokens are ordinary tokens.
        stop_ids: further ids that end the request; they are kept in the ids.
        stop_strings: the text ends before the first of them; the ids end with the token that completes it.
        seed: all noise of the request is a function of it and of the row's own decode step.
    """

    temperature: float = field(default=1.0, validator=[_number, _temperature])
    top_k: int = field(default=0, validator=_whole)
    top_p: float = field(default=1.0, validator=[_number, gt(0.0), le(1.0)])
    min_p: float = field(default=0.0, validator=[_number, ge(0.0), le(1.0)])
    repetition_penalty: float = field(default=1.0, validator=[_number, gt(0.0)])
    max_new_tokens: int = field(default=128, validator=[_whole, ge(1)])
    min_new_tokens: int = field(default=0, validator=_whole)
    ignore_eos: bool = field(default=False, validator=instance_of(bool))
    stop_ids: frozenset[int] = field(default=frozenset(), converter=_id_set)
    stop_strings: tuple[str, ...] = field(default=(), converter=_texts, validator=_stops)
    seed: int = field(default=0, validator=_whole)

    @property
    def greedy(self) -> bool:
        """Whether tokens are the argmax of the processed logits."""
        return self.temperature == 0.0


@final
@frozen(kw_only=True, eq=False)
class Request:
    """One prompt to continue.

    Attributes:
        prompt: token ids, at least one.
        sampling: how to draw and when to stop.
        id: comes back with every event; made by the engine when left out.
        processors: transformers `LogitsProcessor` objects, called for every verify position and every draft position
            with exactly the tokens before it; not behind an end, nor behind a token that they forbid themselves.
    """

    prompt: tuple[int, ...] = field(converter=_ids)
    sampling: Sampling = field(factory=Sampling)
    id: str = ""
    processors: tuple[Any, ...] = field(default=(), converter=tuple)


@final
@frozen(eq=False)
class Draft:
    """What a drafter proposes. Nodes in topological order, siblings in the order drawn, padding last.

    Attributes:
        tokens: int64 [B, N].
        sizes: int64 [B], how many nodes of each row count; 0 is allowed.
        parents: int64 [B, N], -1 is a child of the pending token; None is a chain.
        law: the very law each token was drawn from; None is a point mass (a deterministic drafter).
        confidence: float32 [B, N], the drafter's own estimate of acceptance.
    """

    tokens: Tensor
    sizes: Tensor
    parents: Tensor | None = None
    law: Law | None = None
    confidence: Tensor | None = None


@final
@frozen(eq=False)
class Span:
    """New tokens for one forward: `tokens` int64 [B, T], of which `sizes` [B] count; `parents` as in `Draft`.

    In a tree, parents index the span's own columns and column 0 is the root; None is a chain.
    """

    tokens: Tensor
    sizes: tuple[int, ...]
    parents: Tensor | None = None


@final
@frozen(eq=False)
class Scores:
    """What the target says. Row 0 follows the pending token, row 1 + j follows draft node j.

    Attributes:
        tokens: int64 [B, 1+N], what was fed.
        logits: float32 [B, 1+N, V], raw (float64 for a float64 model).
        probs: [B, 1+N, V], after temperature, top-k, top-p, min-p and processors; one-hot for greedy rows.
        hidden: tap -> [B, 1+N, H].
        finite: bool [B], false where a law of the row is not one: scores that are NaN, infinite or all minus infinity.
    """

    tokens: Tensor
    logits: Tensor
    probs: Tensor
    hidden: Mapping[int, Tensor]
    finite: Tensor


@final
@frozen(eq=False)
class Verdict:
    """What a rule decided: which path is kept, and the law of the token that follows.

    Attributes:
        path: int64 [B, D] kept draft nodes, root to leaf.
        lengths: int64 [B], how much of `path` counts.
        next_probs: [B, V], law of the token after the path.
        source: int8 [B], index into `SOURCES`.
        memory: float64 [B, M], what the rule remembers of each request for its next call.
    """

    path: Tensor
    lengths: Tensor
    next_probs: Tensor
    source: Tensor
    memory: Tensor | None = None


@final
@frozen(eq=False)
class Extras:
    """Numbers that someone asked for, about the places of a step; `specdec.diagnostics.probe` says which.

    Attributes:
        places: name -> float64 [B, W], of every place where a draft token was examined; they come first.
        tokens: name -> float64 [B, W], of every emitted token.
    """

    places: Mapping[str, Tensor]
    tokens: Mapping[str, Tensor]


@final
@frozen(eq=False)
class Kept:
    """What became real in one step, on the host but for the tensors.

    Attributes:
        tokens: newly known tokens per row, the new pending one last; empty in a prefill chunk.
        starts: cached length of each row before the commit.
        inputs: int64 [B, A], the tokens whose cells were kept.
        next_inputs: int64 [B, A], the token after each of them.
        offsets: int64 [B, A], staged cells to keep, in order.
        counts: how many of the `A` columns count, per row.
        chain: nothing moves in memory.
        hidden: tap -> [B, A, H], rejected nodes already removed.
        drafted: draft nodes the rule examined or could have examined, per row.
        depths: longest path in the draft of each row; for a chain, what was drafted.
        clipped: nodes the drafter proposed beyond its budget or outside the vocabulary, per row.
        accepted: draft nodes the rule kept, per row, before stops cut them.
        examined: places at which the rule looked at a draft node, per row, before stops cut them.
        sources: where the token after the path came from, per row.
        seconds: draft, verify, rest.
        diagnostics: name -> per row, one number for each examined place; only what was asked for.
        logprobs: name -> per row, one number for each emitted token; the same.
        finished: why a row ended, or None.
    """

    tokens: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    inputs: Tensor
    next_inputs: Tensor
    offsets: Tensor
    counts: tuple[int, ...]
    chain: bool
    hidden: Mapping[int, Tensor]
    drafted: tuple[int, ...]
    depths: tuple[int, ...]
    clipped: tuple[int, ...]
    accepted: tuple[int, ...]
    examined: tuple[int, ...]
    sources: tuple[Source | None, ...]
    finished: tuple[FinishReason | None, ...]
    memory: Tensor | None = None
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    diagnostics: Mapping[str, tuple[tuple[float, ...], ...]] = field(factory=dict)
    logprobs: Mapping[str, tuple[tuple[float, ...], ...]] = field(factory=dict)
