"""One tensor per layer with a fixed number of cells for every row."""

from __future__ import annotations

import math
from typing import final

import torch
from attrs import define, field
from torch import Tensor

from specdec.errors import ModelError
from specdec.kv import Cells, KVCacheManager


@final
@define(kw_only=True, eq=False)
class Slab(KVCacheManager):
    """A fixed block of memory: `rows` x (`tokens` + 1 scratch cell) per layer, made when the layer is first seen.

    Costs rows x tokens x layers x 2 x heads x head size x bytes of the dtype. Neighbouring rows are read as views; rows
    with a hole between them are gathered, and `gathers` counts that.
    """

    fixed = True

    gathers: int = field(init=False, default=0)
    _keys: dict[int, Tensor] = field(init=False, factory=dict)
    _values: dict[int, Tensor] = field(init=False, factory=dict)

    def _reserve(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if layer not in self._keys:
            for store, new in ((self._keys, keys), (self._values, values)):
                shape = (self.rows, new.shape[1], self.tokens + 1, new.shape[3])
                try:
                    with torch.inference_mode(False):  # storage outlives the forward that first needs it
                        store[layer] = torch.zeros(shape, dtype=new.dtype, device=new.device)
                except RuntimeError as error:
                    size = math.prod(shape) * new.element_size() / 2**30
                    raise ModelError(
                        f"kv: {size:.1f} GiB for half of layer {layer} cannot be had on {new.device}; "
                        f"try fewer than {self.rows} rows or {self.tokens} tokens"
                    ) from error

    def _write(self, layer: int, keys: Tensor, values: Tensor, where: Cells) -> None:
        for store, new in ((self._keys[layer], keys), (self._values[layer], values)):
            first = where.slots[0]
            if where.contiguous and where.level:
                start = where.starts[0]
                store[first : first + len(where.slots), :, start : start + where.width] = new
            else:
                store[where.rows.to(store.device), :, where.cells.to(store.device)] = new.transpose(1, 2)

    def _read(self, layer: int, where: Cells) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[layer], self._values[layer]
        if where.contiguous:
            first, last = where.slots[0], where.slots[0] + len(where.slots)
            return keys[first:last, :, : where.end], values[first:last, :, : where.end]
        self.gathers += 1
        rows = where.rows.to(keys.device).squeeze(1)
        return keys[:, :, : where.end].index_select(0, rows), values[:, :, : where.end].index_select(0, rows)

    def _move(self, slot: int, source: Tensor, goal: Tensor) -> None:
        for store in (*self._keys.values(), *self._values.values()):
            row = store[slot]
            row[:, goal.to(store.device)] = row[:, source.to(store.device)]

    def _clear(self, slots: tuple[int, ...]) -> None:
        for store in (*self._keys.values(), *self._values.values()):
            store[list(slots)] = 0
