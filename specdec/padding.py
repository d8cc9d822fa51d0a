"""Rows of unlike lengths in few forwards: a column of padding costs a CPU as much as a token does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Columns that take a CPU as long as a forward of their own would; other devices have arithmetic to spare.
_WORTH_A_FORWARD = 16


def alike(lengths: Sequence[int], device: torch.device) -> list[list[int]]:
    """Indices of rows that are forwarded together, each group ascending.

    Args:
        lengths: new tokens of each row.
        device: where the forward runs.
    """
    if device.type != "cpu":
        return [list(range(len(lengths)))] if lengths else []
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if groups and lengths[groups[-1][0]] - lengths[index] <= _WORTH_A_FORWARD:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [sorted(group) for group in groups]
