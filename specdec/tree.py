"""Token trees as parent pointers. A chain is a tree with one branch; `None` says so without a tensor.

Column 0 of a span is its root, the pending token; draft node j is column 1 + j.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def levels(branches: Sequence[int]) -> tuple[list[range], list[int]]:
    """Nodes of each level and the parent of each node, where every node of a level has `branches[level]` children.

    Nodes are numbered level by level, the children of a node next to one another; -1 is the pending token.
    """
    found: list[range] = []
    parents: list[int] = []
    above = range(-1, 0)
    for count in branches:
        start = len(parents)
        parents += [parent for parent in above for _ in range(count)]
        above = range(start, len(parents))
        found.append(above)
    return found, parents


def span_parents(parents: Tensor) -> Tensor:
    """Draft parents [B, N] (-1 is the pending token) as parents of span columns, int64 [B, 1+N]; the root has -1."""
    root = parents.new_full((parents.shape[0], 1), -1)
    return torch.cat([root, parents + 1], dim=1)


def ancestors(parents: Tensor) -> Tensor:
    """Which columns each column descends from, itself included, bool [B, T, T].

    Args:
        parents: int64 [B, T] in topological order, -1 for a root.
    """
    rows, columns = parents.shape
    seen = torch.eye(columns, dtype=torch.bool, device=parents.device).repeat(rows, 1, 1)
    batch = torch.arange(rows, device=parents.device)
    for column in range(columns):
        parent = parents[:, column]
        above = seen[batch, parent.clamp(min=0)] & (parent >= 0).unsqueeze(-1)
        seen[:, column] |= above
    return seen


def depths(seen: Tensor) -> Tensor:
    """Depth of each column below its root, int64 [B, T], from `ancestors`."""
    return seen.sum(-1) - 1


def topological(parents: Tensor) -> Tensor:
    """Which draft nodes have a parent that stands before them (or the pending token), bool [B, N]."""
    columns = torch.arange(parents.shape[1], device=parents.device)
    return (parents < columns) & (parents >= -1)


def deepest(parents: Tensor, sizes: Tensor) -> Tensor:
    """Nodes on the longest path of each row's draft, int64 [B].

    Args:
        parents: int64 [B, N] of draft nodes, -1 for a child of the pending token.
        sizes: int64 [B], nodes that count.
    """
    if not parents.shape[1]:
        return torch.zeros_like(sizes)
    below = depths(ancestors(parents)) + 1
    columns = torch.arange(parents.shape[1], device=parents.device)
    return torch.where(columns < sizes.unsqueeze(1), below, 0).amax(-1)


def positions(starts: Tensor, sizes: Tensor, width: int, seen: Tensor | None) -> Tensor:
    """Absolute position of each column, int64 [B, T]; padding columns have position 0.

    Args:
        starts: int64 [B], position of column 0.
        sizes: int64 [B], columns that count.
        width: T.
        seen: `ancestors` of the columns, or None for a chain.
    """
    columns = torch.arange(width, device=starts.device)
    below = columns.expand(starts.shape[0], width) if seen is None else depths(seen)
    return torch.where(columns < sizes.unsqueeze(1), starts.unsqueeze(1) + below, 0)


def visible(starts: Tensor, width: int, end: int, seen: Tensor | None, window: int | None) -> Tensor:
    """Which cells each column attends to, bool [B, 1, T, S].

    Cells below the start are all seen; of the staged ones a column sees its ancestors and itself. With a window, only
    cells less than `window` positions back. Every column, padding too, sees at least one cell.

    Args:
        starts: int64 [B], first staged cell.
        width: T.
        end: S.
        seen: `ancestors` of the columns, or None for a chain.
        window: sliding window, or None.
    """
    cells = torch.arange(end, device=starts.device)
    columns = torch.arange(width, device=starts.device)
    start = starts.view(-1, 1, 1)
    if seen is None:
        query, key = start + columns.view(1, -1, 1), cells.view(1, 1, -1)
        mask = key <= query
    else:
        staged = cells.view(1, -1) - starts.view(-1, 1)  # [B, S]: column whose cell it is
        inside = (staged >= 0) & (staged < width)
        column = staged.clamp(min=0, max=width - 1)
        below = depths(seen)
        picked = seen.gather(2, column.unsqueeze(1).expand(-1, width, -1))
        mask = torch.where(inside.unsqueeze(1), picked, (staged < 0).unsqueeze(1))
        query = start + below.unsqueeze(2)
        key = torch.where(inside, starts.view(-1, 1) + below.gather(1, column), cells.view(1, -1)).unsqueeze(1)
    if window is not None:
        mask = mask & (query - key < window)
    # A padding column past the end, or out of every window, looks at cell 0: attention needs something finite.
    blind = ~mask.any(-1)
    mask[..., 0] |= blind
    return mask.unsqueeze(1)


def first_child(parents: Tensor | None, sizes: Tensor, nodes: Tensor) -> Tensor:
    """The first draft node below each of some nodes, -1 where there is none.

    Args:
        parents: int64 [B, N] as in `Draft`, -1 for a child of the pending token; None is a chain.
        sizes: int64 [B], how many draft nodes count.
        nodes: int64 [B, W], draft nodes; -1 is the pending token.

    Returns:
        int64 [B, W].
    """
    if parents is None:
        return torch.where(nodes + 1 < sizes.unsqueeze(1), nodes + 1, -1)
    if not parents.shape[1]:
        return torch.full_like(nodes, -1)
    there = torch.arange(parents.shape[1], device=parents.device) < sizes.unsqueeze(1)
    below = (parents.unsqueeze(1) == nodes.unsqueeze(2)) & there.unsqueeze(1)
    return torch.where(below.any(-1), below.long().argmax(-1), -1)
