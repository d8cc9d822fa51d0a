"""Whether two greedy texts differ because of rounding: the first token that differs, judged by the model's own logits.

A forward over one token and a forward over five round differently. Where the two best logits lie closer together than
that rounding, either token is right: a near-tie. A larger gap means that something else computed the other token.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import final

import torch
from attrs import frozen

from specdec.target import Target

# Rounding of a logit, in units of the dtype's step at the largest logit. In bfloat16 and float16 transformers' own two
# ways (token by token, all at once) differ by up to one such step for each of two logits; twice that is allowed.
_STEPS = 4
# In float32 rounding is of the order of 1e-5; what is larger than this is no rounding, and smaller gaps are no news.
_LEAST = {torch.float64: 1e-6, torch.float32: 1e-3}


@final
@frozen
class Difference:
    """The first place where two continuations of a prompt differ.

    Attributes:
        position: its index among the new tokens.
        theirs: the token of the first text; None where that text has ended.
        ours: the token of the second.
        gap: how far the worse of the two logits lies below the largest one, after the common tokens.
        tolerance: the largest gap that rounding explains.
    """

    position: int
    theirs: int | None
    ours: int | None
    gap: float
    tolerance: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap <= self.tolerance


def tolerance(dtype: torch.dtype, largest: float) -> float:
    """The largest gap of two logits that rounding explains, given the largest logit's size."""
    return max(_LEAST.get(dtype, 0.0), _STEPS * torch.finfo(dtype).eps * largest)


def judge(target: Target, known: Sequence[int], tokens: Sequence[int]) -> tuple[float, float]:
    """How far the worst of `tokens` lies below the best logit after `known`, and the gap that rounding explains.

    One forward of the model's own over the whole text, without a cache of ours or its.
    """
    ids = torch.tensor([list(known)], device=target.device)
    with torch.inference_mode():
        logits = target.model(input_ids=ids, use_cache=False).logits[0, -1].float()
    gap = (logits.max() - logits[list(tokens)].min()).item()
    return (gap if gap == gap else float("inf")), tolerance(target.dtype, logits.abs().max().item())


def difference(target: Target, prompt: Sequence[int], theirs: Sequence[int], ours: Sequence[int]) -> Difference | None:
    """The first difference of two greedy continuations, or None where they are equal."""
    if tuple(theirs) == tuple(ours):
        return None
    shorter = min(len(theirs), len(ours))
    place = next((index for index in range(shorter) if theirs[index] != ours[index]), shorter)
    one, other = (text[place] if place < len(text) else None for text in (theirs, ours))
    if one is None or other is None:  # one goes on where the other has ended: rounding does not do that
        return Difference(place, one, other, float("inf"), 0.0)
    gap, allowed = judge(target, [*prompt, *theirs[:place]], [one, other])
    return Difference(place, one, other, gap, allowed)


def reference(target: Target, prompt: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
    """The greedy continuation by transformers' own `generate`, with nothing of the generation config but its ends."""
    model = copy(target.model)  # a second shell around the same weights: the model keeps its own generation config
    plain = type(target.model.generation_config)()
    ends = sorted(target.eos_ids)
    plain.update(do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=ends[0] if ends else 0)
    plain.eos_token_id = ends or None
    model.generation_config = plain
    ids = torch.tensor([list(prompt)], device=target.device)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids))
    return tuple(out[0, len(prompt) :].tolist())
