"""Forwards of few shapes: a batch is padded to one of them, and each of them is compiled or captured once.

Batch row b of such a forward is cache row b, so keys and values are read and written where they lie. A row that takes
no part, and a column that does not count, stage into the scratch cell.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from types import FunctionType
from typing import Any, Literal, final

import torch
from attrs import define, field
from torch import Tensor

from specdec.errors import ModelError
from specdec.packing import PackedLinear

Kind = Literal["off", "compile", "cuda"]
# From tokens int64 [R, T], numbers int64 [2, R] (first staged cell, and columns that count, of each row) and how many
# cells to look at, to logits [R, T, V]. It may look at no number on the host.
Step = Callable[[Tensor, Tensor, int], Tensor]
WIDEST = 32  # more new tokens a row than this are a prompt, whose shapes are many and whose forwards are long anyway
FEWEST_CELLS = 128
BACKEND = "inductor"


def bucket(count: int, least: int, most: int) -> int:
    """The first power of two from `least` on that holds `count`, at most `most`."""
    return min(max(least, 1 << (count - 1).bit_length()), most)


@final
@define(eq=False)
class Graphs:
    """Runs a step in fixed shapes (rows, width, cells), powers of two all three.

    Attributes:
        kind: `compile` by torch.compile, or `cuda`, CUDA graphs of the step as it is.
        rows: of the cache.
        tokens: cells of a row.
        made: shapes so far.
        runs: forwards so far.
    """

    kind: Kind
    rows: int
    tokens: int
    made: int = field(init=False, default=0)
    runs: int = field(init=False, default=0)
    _shapes: dict[tuple[int, int, int], Callable[[Tensor, Tensor], Tensor]] = field(init=False, factory=dict)
    _pool: Any = field(init=False, default=None)

    def run(
        self,
        step: Step,
        slots: tuple[int, ...],
        tokens: Tensor,
        starts: tuple[int, ...],
        sizes: tuple[int, ...],
        end: int,
    ) -> Tensor:
        """Logits [B, T, V], a tensor of their own.

        Args:
            step: the same in every call.
            slots: cache row of each batch row.
            tokens: int64 [B, T].
            starts: first staged cell of each batch row.
            sizes: columns of each batch row that count.
            end: one past the highest cell any row may see.

        Raises:
            ModelError: the shape cannot be made.
        """
        rows, width = bucket(max(slots) + 1, 1, self.rows), bucket(tokens.shape[1], 1, WIDEST)
        cells = bucket(end, FEWEST_CELLS, self.tokens)
        places: list[list[int]] = [[0] * rows, [0] * rows, [*slots, *[0] * (rows - len(slots))]]
        for slot, start, size in zip(slots, starts, sizes, strict=True):
            places[0][slot], places[1][slot] = start, size
        numbers = torch.tensor(places).to(tokens.device, non_blocking=True)
        index = numbers[2, : len(slots)]
        # Everything is new in every forward: what an earlier, fuller batch left behind is in no buffer.
        padded = tokens.new_zeros((rows, width))
        padded[index, : tokens.shape[1]] = tokens
        shape = (rows, width, cells)
        if shape not in self._shapes:
            self._shapes[shape] = self._make(step, padded, numbers, cells)
            self.made += 1
        self.runs += 1
        return self._shapes[shape](padded, numbers)[:, : tokens.shape[1]].index_select(0, index)

    def _make(self, step: Step, tokens: Tensor, numbers: Tensor, cells: int) -> Callable[[Tensor, Tensor], Tensor]:
        step(tokens, numbers, cells)  # makes the cache's storage, and loads what a capture may not load
        try:
            if self.kind == "compile":
                made = compiled(step, cells)
                made(tokens, numbers)
                return made
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            # What a graph leaves behind is read before another one runs, so all of them may share their memory.
            return captured(step, tokens, numbers, cells, self._pool)
        except Exception as error:  # whatever a compiler or a driver raises about a model
            said = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])
            raise ModelError(
                f"target.graphs: {self.kind!r} cannot be had of this model: {type(error).__name__}: {said}; try 'off'"
            ) from error


def refusals(kind: Kind, model: Any, ropes: AbstractSet[str], kv: Any) -> list[str]:
    """Every reason why forwards of a model cannot run in fixed shapes.

    Args:
        kind: `compile` or `cuda`.
        model: the transformers model.
        ropes: kinds of its rotary positions.
        kv: its cache manager.
    """
    if kind not in ("compile", "cuda"):
        return [f"target.graphs: got {kind!r}, wanted off, compile or cuda"]
    where = f"target.graphs: {kind!r}"
    problems = []
    device = model.get_input_embeddings().weight.device
    if kind == "cuda" and device.type != "cuda":
        problems.append(f"{where} needs a CUDA device and the model is on {device}; try 'compile' or 'off'")
    if kind == "compile" and any(isinstance(module, PackedLinear) for module in model.modules()):
        problems.append(f"{where} takes no prepared linear layers; load the model with packed: false, or try 'off'")
    if not kv.fixed:
        problems.append(
            f"{where} needs a cache of fixed cells and {type(kv).__name__} has none; try kv 'slab' or 'off'"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        problems.append(f"{where} takes no quantized weights; try 'off'")
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        problems.append(f"{where} takes no model on several devices; try one device, or 'off'")
    if moving := sorted(ropes & {"dynamic", "longrope"}):
        problems.append(f"{where} takes no rope scaling {moving[0]!r}, which depends on the text; try 'off'")
    return problems


def compiled(step: Step, cells: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of one shape, by torch.compile."""

    def fixed(tokens: Tensor, numbers: Tensor) -> Tensor:
        return step(tokens, numbers, cells)

    # What was compiled is kept by code object, and few of one: each shape gets a code object of its own.
    own = FunctionType(
        fixed.__code__.replace(co_name=f"fixed_{cells}"), fixed.__globals__, "fixed", None, fixed.__closure__
    )
    return torch.compile(own, fullgraph=True, dynamic=False, backend=BACKEND)


def captured(step: Step, tokens: Tensor, numbers: Tensor, cells: int, pool: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of one shape, as a CUDA graph. What it returns is written over when it runs again."""
    tokens, numbers = tokens.clone(), numbers.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        found = step(tokens, numbers, cells)

    def replay(new_tokens: Tensor, new_numbers: Tensor) -> Tensor:
        tokens.copy_(new_tokens)
        numbers.copy_(new_numbers)
        graph.replay()
        return found

    return replay
