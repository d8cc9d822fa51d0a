"""Memory for results as wide as a vocabulary, used again once nobody holds what was in it.

An operating system hands large memory out and takes it back page by page, which costs more than most of the arithmetic
in it. On other devices torch keeps memory itself.
"""

from __future__ import annotations

import math
import sys
import threading

import torch
from torch import Tensor

_LARGE = 2**20  # bytes; what is smaller the allocator keeps
_BLOCKS = 8  # kept for each thread, the latest used last


class _Kept(threading.local):
    def __init__(self) -> None:
        self.blocks: list[bytearray] = []


_kept = _Kept()


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.empty."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _LARGE:
        return torch.empty(shape, dtype=dtype, device=device)
    blocks = _kept.blocks
    free = (place for place in range(len(blocks)) if size <= len(blocks[place]) < 2 * size and _idle(blocks, place))
    place = next(free, None)
    block = bytearray(size) if place is None else blocks.pop(place)
    if len(blocks) == _BLOCKS:
        del blocks[0]
    blocks.append(block)
    return torch.frombuffer(block, dtype=dtype, count=math.prod(shape)).view(shape)


def copy(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in a dtype, never the same memory."""
    return empty(tuple(values.shape), dtype, values.device).copy_(values)


def _idle(blocks: list[bytearray], place: int) -> bool:
    """Whether nothing but the list refers to a block: torch holds it as long as a tensor or a view of one lives."""
    return sys.getrefcount(blocks[place]) == 2
