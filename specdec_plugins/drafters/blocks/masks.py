"""Which keys the rows of a block see."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_plugins.drafters.blocks.backbone import Shape


def masks(shape: Shape, starts: Tensor, width: int, end: int) -> tuple[Tensor, dict[int, Tensor]]:
    """Masks of the layers without a window, and of those with one, by window.

    Args:
        shape: which layers look how.
        starts: int64 [B], cell and position of the first row of each block; all cells before it are committed.
        width: rows of a block (`T`).
        end: cells (`S`); a cell is its position.

    Returns:
        bool [B, 1, T, S], and the same for each window.
    """
    keys = torch.arange(end, device=starts.device)
    rows = (starts.unsqueeze(1) + torch.arange(width, device=starts.device)).unsqueeze(2)
    before, whole = keys <= rows, (keys < starts.view(-1, 1, 1) + width).expand(-1, width, -1)
    seen = before if shape.causal else whole
    windowed = {}
    for window in {window for window in shape.windows if window is not None}:
        near = (rows - keys).abs() < window
        windowed[window] = ((before if shape.causal_windows else whole) & near).unsqueeze(1)
    return seen.unsqueeze(1), windowed
