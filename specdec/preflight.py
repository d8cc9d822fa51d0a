"""A check of milliseconds on the model itself: staged forwards must say what the model's own forward says.

A model can accept a cache, a mask and positions and still compute something else with several new tokens on a cache
(recurrent layers, ALiBi, kernels with a single-token branch). Such a model is refused by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import ModelError
from specdec.target import Target
from specdec.types import Span

_PREFIX, _NEW = 5, 4
# Largest difference of logits allowed, in units of the logits' own spread.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 0.35, torch.float16: 0.1}


def preflight(target: Target) -> None:
    """Compare four tokens in one staged forward with four single ones and with the model's own, beside a second row.

    Runs once per target, on rows that are free and stay free.

    Raises:
        ModelError: they differ; names the model type, the difference and the tolerance.
    """
    if target.preflighted or target.kv.tokens < _PREFIX + _NEW or target.context < _PREFIX + _NEW:
        return
    ids = (torch.arange(2 * (_PREFIX + _NEW)) * 7919 + 13).remainder(target.vocabulary).view(2, -1).to(target.device)
    with torch.inference_mode():
        own = target.model(input_ids=ids[:1], use_cache=False).logits[0, _PREFIX:].float()
        together = _staged(target, ids, step=_NEW)
        apart = _staged(target, ids, step=1)
    spread = own.std().item()
    allowed = _TOLERANCE.get(target.dtype, 0.35)
    for name, found in (("one staged forward", together), ("single staged forwards", apart)):
        difference = (found.float() - own).abs().max().item() / spread
        if not difference <= allowed:
            raise ModelError(
                f"{target.config.model_type}: {_NEW} tokens in {name} differ from the model's own forward by "
                f"{difference:.3g} of the logits' spread, wanted at most {allowed:g}; the model cannot be decoded by "
                "staging keys and values (a recurrent state, ALiBi, or an attention that ignores the mask)"
            )
    target.preflighted = True


def _staged(target: Target, ids: Tensor, step: int) -> Tensor:
    """Logits of the last tokens of row 0, `step` at a time, beside a shorter second row where the cache has one."""
    slots = tuple(target.kv.acquire() for _ in range(min(2, target.kv.room)))
    lengths = (_PREFIX, _PREFIX - 3)[: len(slots)]
    counts = torch.arange(_PREFIX, device=ids.device).expand(len(slots), -1)
    try:
        target.forward(slots, Span(ids[: len(slots), :_PREFIX], lengths), logits=False)
        target.kv.commit(slots, counts, lengths, chain=True)
        found = []
        for done in range(0, _NEW, step):
            block = torch.stack([ids[row, length + done : length + done + step] for row, length in enumerate(lengths)])
            sizes = (step, max(1, step - 1))[: len(slots)]
            out = target.forward(slots, Span(block, sizes))
            assert out.logits is not None  # asked for
            found.append(out.logits[0])
            target.kv.commit(slots, counts[:, :step], (step,) * len(slots), chain=True)
        return torch.cat(found)
    finally:
        target.kv.release(slots)
