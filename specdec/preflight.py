"""A check of milliseconds on the model itself: staged forwards must say what the model's own forward says.

A model can accept a cache, a mask and positions and still compute something else: recurrent layers, ALiBi, kernels with
a single-token branch, a causal bias of its own that assumes all rows end at one cell. Such a model is refused by name.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from specdec.errors import ModelError
from specdec.target import Target
from specdec.types import Span

_PREFIXES = (6, 2)  # two rows of different lengths
_NEW = 5
# New tokens of each row in each forward: one row wide while the other is narrow, either way, and one by one.
_SCHEDULES = {
    "staged forwards of several tokens": ((4, 1), (1, 4)),
    "staged forwards of one token": ((1, 1),) * _NEW,
}
# Largest difference of logits allowed, in units of the logits' own spread.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 0.35, torch.float16: 0.1}


def preflight(target: Target) -> None:
    """Compare staged forwards over two ragged rows with the model's own forward over each row alone.

    Runs once per target, in a small cache of its own.

    Raises:
        ModelError: they differ, or the model fails; names the model type, the difference and the tolerance.
    """
    length = _PREFIXES[0] + _NEW
    if target.preflighted or target.context < length:
        return
    kind = target.config.model_type
    rows = min(len(_PREFIXES), target.kv.rows)
    ids = (torch.arange(rows * length) * 7919 + 13).remainder(target.vocabulary).view(rows, -1).to(target.device)
    small = Target(target.model, kv=attrs.evolve(target.kv, rows=rows, tokens=length))
    try:
        with torch.inference_mode():
            own = [_own(target, ids[row], _PREFIXES[row]) for row in range(rows)]
            found = {name: _staged(small, ids, schedule) for name, schedule in _SCHEDULES.items()}
    except Exception as error:  # whatever a model raises when it is handed explicit masks, positions and a cache
        raise ModelError(
            f"{kind}: cannot be decoded with staged keys and values: {type(error).__name__}: {error}"
        ) from error
    if not all(bool(torch.isfinite(logits).all()) for logits in own):
        raise ModelError(
            f"{kind}: the model's own forward gives scores that are not finite, in {target.dtype}; "
            "try dtype float32, or fetch the checkpoint again"
        )
    allowed = _TOLERANCE.get(target.dtype, 0.35)
    for name, rows_found in found.items():
        for row, (ours, wanted) in enumerate(zip(rows_found, own, strict=True)):
            difference = ((ours - wanted).abs().max() / wanted.std()).item()
            if not difference <= allowed:
                raise ModelError(
                    f"{kind}: {name} differ from the model's own forward by {difference:.3g} of the logits' spread "
                    f"(row {row} of {len(own)}), wanted at most {allowed:g}; it cannot be decoded by staging keys and "
                    "values (a recurrent state, ALiBi, or an attention that ignores the mask); try another target"
                )
    target.preflighted = True


def _own(target: Target, ids: Tensor, prefix: int) -> Tensor:
    """Logits [_NEW, V] of the model's own forward, without any cache."""
    out: Tensor = target.model(input_ids=ids[None, : prefix + _NEW], use_cache=False).logits
    return out[0, prefix:].float()


def _staged(target: Target, ids: Tensor, schedule: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """The same logits of every row from staged forwards over all rows together."""
    rows = ids.shape[0]
    slots = tuple(target.kv.acquire() for _ in range(rows))
    offsets = torch.arange(_PREFIXES[0], device=ids.device).expand(rows, -1)
    done = [0] * rows
    found: list[list[Tensor]] = [[] for _ in range(rows)]
    for counts in (_PREFIXES[:rows], *(step[:rows] for step in schedule)):
        tokens = ids.new_zeros((rows, max(counts)))
        for row, count in enumerate(counts):
            tokens[row, :count] = ids[row, done[row] : done[row] + count]
        out = target.forward(slots, Span(tokens, counts)).logits
        assert out is not None  # asked for
        target.kv.commit(slots, offsets, counts, chain=True)
        for row, count in enumerate(counts):
            found[row].append(out[row, :count].float())
            done[row] += count
    target.kv.release(slots)
    return [torch.cat(parts[1:]) for parts in found]
