"""Keys and values: stage, then commit. A forward only stages; what is not committed never happened.

For committed cells, cell == absolute position. A forward writes at `length + offset ...`, never below `length`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self, final

import attrs
import torch
from attrs import define, field
from attrs.validators import ge, instance_of, le
from torch import Tensor

from specdec.errors import RequestError


# torch.compile cannot follow how frozen attrs classes are made, so these two are not.
@final
@define(eq=False)
class Cells:
    """Where the columns of one forward live.

    Attributes:
        slots: cache row of each batch row.
        starts: first staged cell of each row.
        width: columns per row, padding included (`T`).
        end: one past the highest cell any row may see (`S`).
        cells: int64 [B, T], the cell of each column; padding columns have the scratch cell.
        rows: int64 [B, 1], `slots` as a tensor beside `cells`.
        contiguous: slots are neighbours in ascending order, so rows can be a view.
        level: every row starts at the same cell and all columns fit, so columns can be a slice.
    """

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    width: int
    end: int
    cells: Tensor
    rows: Tensor
    contiguous: bool
    level: bool


@final
@define(eq=False)
class StagedCache:
    """What a transformers model sees as its cache during one forward."""

    manager: KVCacheManager
    where: Cells

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Stage the new keys and values [B, heads, T, dim] of a layer; return all that its queries may see."""
        manager, where = self.manager, self.where
        manager._reserve(layer, keys, values)
        manager._write(layer, keys, values, where)
        return manager._read(layer, where)

    def get_seq_length(self, layer: int = 0) -> int:
        """The width of what is visible; models ask when they are not told positions, which the target always does."""
        return self.where.end - self.where.width


_MOST_ROWS, _MOST_TOKENS = 2**16, 2**31 - 1


@define(kw_only=True, eq=False)
class KVCacheManager(ABC):
    """Rows of cells with a committed length each. A storage plugin writes `_reserve`, `_write`, `_read`, `_move`,
    `_clear`; everything about lengths is here.

    Attributes:
        rows: how many sequences fit at once (`R`).
        tokens: how many cells each has.
        fixed: storage stays where it is, and `_write` and `_read` of neighbouring rows look at no number on the host.
    """

    fixed: ClassVar[bool] = False

    rows: int = field(default=8, validator=[instance_of(int), ge(1), le(_MOST_ROWS)])
    tokens: int = field(default=2048, validator=[instance_of(int), ge(2), le(_MOST_TOKENS)])
    lengths: list[int] = field(init=False)
    _free: set[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        rows = min(self.rows, _MOST_ROWS)  # for whoever makes one with validators off, to hear all of them
        self.lengths = [0] * rows
        self._free = set(range(rows))

    def fork(self, *, more: int = 0) -> Self:
        """An empty manager with the same options and row numbers, for another model; each row has `more` cells more."""
        return attrs.evolve(self, tokens=self.tokens + more)

    @property
    def room(self) -> int:
        """Free rows."""
        return len(self._free)

    def acquire(self) -> int:
        """Take the lowest free row.

        Raises:
            RequestError: no row is free.
        """
        if not self._free:
            raise RequestError(f"kv.rows: all {self.rows} rows are taken; release one or give the cache more rows")
        slot = min(self._free)
        self._free.remove(slot)
        self.lengths[slot] = 0
        return slot

    def occupy(self, slot: int) -> None:
        """Take a given row, as a drafter does that follows the target's row numbers."""
        if slot in self._free:
            self._free.remove(slot)
            self.lengths[slot] = 0

    def release(self, slots: Sequence[int], *, clear: bool = False) -> None:
        """Give rows back. `clear` zeroes their cells: a masked NaN would still poison attention."""
        for slot in slots:
            self.lengths[slot] = 0
            self._free.add(slot)
        if clear and slots:
            self._clear(tuple(slots))

    def reach(self, slots: Sequence[int], sizes: Sequence[int], offset: int = 0) -> tuple[tuple[int, ...], int]:
        """Where a forward of these columns begins in each row, and one past the highest cell it needs.

        Raises:
            RequestError: a row does not have that many cells.
        """
        starts = tuple(self.lengths[slot] + offset for slot in slots)
        highest = max(start + size for start, size in zip(starts, sizes, strict=True))
        if highest > self.tokens:
            raise RequestError(
                f"kv.tokens: {highest} cells are needed and a row has {self.tokens}; "
                f"give the cache more tokens or the request fewer"
            )
        return starts, highest

    def stage(
        self,
        slots: Sequence[int],
        sizes: Sequence[int],
        width: int,
        offset: int = 0,
        *,
        device: torch.device | str = "cpu",
    ) -> StagedCache:
        """Prepare one forward that writes `sizes[b]` of `width` columns of row b at its length + offset.

        With the `device` of the keys, numbers go there once and not in every layer.

        Raises:
            RequestError: a row does not have that many cells.
        """
        starts, highest = self.reach(slots, sizes, offset)
        where = Cells(
            slots=tuple(slots),
            starts=starts,
            width=width,
            end=highest,
            cells=self._cells(torch.tensor(starts), torch.tensor(sizes), width).to(device, non_blocking=True),
            rows=torch.tensor(slots).unsqueeze(1).to(device, non_blocking=True),
            contiguous=list(slots) == list(range(slots[0], slots[0] + len(slots))),
            level=len(set(starts)) == 1 and starts[0] + width <= self.tokens,
        )
        return StagedCache(self, where)

    def stage_fixed(self, starts: Tensor, sizes: Tensor, width: int, end: int) -> StagedCache:
        """The same for the first rows of the cache, from numbers that stay on the device.

        Args:
            starts: int64 [B], first staged cell of row b.
            sizes: int64 [B], columns that count; a row of none takes no part.
            width: T.
            end: one past the highest cell any row may see.
        """
        rows = torch.arange(starts.shape[0], device=starts.device).unsqueeze(1)
        where = Cells(
            slots=tuple(range(starts.shape[0])),
            starts=(),
            width=width,
            end=end,
            cells=self._cells(starts, sizes, width),
            rows=rows,
            contiguous=True,
            level=False,
        )
        return StagedCache(self, where)

    def _cells(self, starts: Tensor, sizes: Tensor, width: int) -> Tensor:
        columns = torch.arange(width, device=starts.device)
        cells = starts.unsqueeze(1) + columns
        return torch.where(columns < sizes.unsqueeze(1), cells, self.tokens)

    def commit(self, slots: Sequence[int], offsets: Tensor, counts: Sequence[int], *, chain: bool) -> None:
        """Keep staged cells: make them contiguous and advance the lengths.

        Args:
            slots: cache rows.
            offsets: int64 [B, A], staged cells to keep, ascending, relative to the committed length.
            counts: how many of the `A` columns count for each row.
            chain: the offsets are 0, 1, 2, ... and nothing has to move.
        """
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            length = self.lengths[slot]
            if not chain and count:
                goal = torch.arange(length, length + count, device=offsets.device)
                self._move(slot, length + offsets[row, :count], goal)
            self.lengths[slot] = length + count

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget committed cells at the end of rows."""
        for slot, length in zip(slots, lengths, strict=True):
            self.lengths[slot] = min(self.lengths[slot], length)

    @abstractmethod
    def _reserve(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Make storage for a layer, on the device and in the dtype of its keys, the first time it is seen."""

    @abstractmethod
    def _write(self, layer: int, keys: Tensor, values: Tensor, where: Cells) -> None:
        """Store [B, heads, T, dim] at `where.cells`."""

    @abstractmethod
    def _read(self, layer: int, where: Cells) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, S, dim] of cells 0 to `where.end`."""

    @abstractmethod
    def _move(self, slot: int, source: Tensor, goal: Tensor) -> None:
        """Copy cells of a row, in every layer."""

    @abstractmethod
    def _clear(self, slots: tuple[int, ...]) -> None:
        """Zero all cells of rows, in every layer."""
