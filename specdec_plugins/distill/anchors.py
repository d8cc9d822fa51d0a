"""Blocks at random places of texts, and what their rows may see.

A block at position a stands for one step of decoding: the tokens before a are committed and seen as features, the token
at a is pending and the block's first row, the rows after it are masks. Row k predicts the token at a + 1 + k, told the
one at a + k. So the features of position a itself are not there yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from attrs import frozen
from torch import Tensor

from specdec_plugins.distill.corpus import Text


@final
@frozen(eq=False)
class Blocks:
    """A blocks of K places in each of B texts.

    Attributes:
        inputs: int64 [B, A, K], the pending token and masks.
        positions: int64 [B, A, K], absolute.
        previous: int64 [B, A, K], the token before the one that a place predicts.
        following: int64 [B, A, K], the one it predicts.
        there: bool [B, A, K], places whose token exists.
        mask: bool [B, 1, A * K, T + A * K], what each row sees of the T features and of all rows.
    """

    inputs: Tensor
    positions: Tensor
    previous: Tensor
    following: Tensor
    there: Tensor
    mask: Tensor


def choose(texts: Sequence[Text], count: int, generator: torch.Generator) -> list[list[int]]:
    """At most `count` random positions of each text, ascending."""
    chosen = []
    for text in texts:
        order = torch.randperm(len(text.anchors), generator=generator)[:count]
        chosen.append(sorted(text.anchors[index] for index in order.tolist()))
    return chosen


def make(texts: Sequence[Text], anchors: Sequence[Sequence[int]], size: int, mask_id: int) -> Blocks:
    """The blocks of these positions."""
    rows, most = len(texts), max(1, *map(len, anchors))
    longest = max(len(text.tokens) for text in texts)
    tokens = torch.zeros((rows, longest + size + 1), dtype=torch.int64)
    starts = torch.zeros((rows, most), dtype=torch.int64)
    real = torch.zeros((rows, most), dtype=torch.bool)
    for row, (text, places) in enumerate(zip(texts, anchors, strict=True)):
        tokens[row, : len(text.tokens)] = torch.tensor(text.tokens)
        starts[row, : len(places)] = torch.tensor(places, dtype=torch.int64)
        real[row, : len(places)] = True
    lengths = torch.tensor([len(text.tokens) for text in texts]).view(-1, 1, 1)
    positions = starts.unsqueeze(-1) + torch.arange(size)
    of = torch.arange(rows).view(-1, 1, 1)
    previous, following = tokens[of, positions], tokens[of, positions + 1]
    inputs = torch.full_like(positions, mask_id)
    inputs[..., 0] = previous[..., 0]
    context = torch.arange(longest) < starts.unsqueeze(-1)
    seen = context.unsqueeze(2).expand(-1, -1, size, -1).reshape(rows, most * size, longest)
    block = torch.arange(most).repeat_interleave(size)
    own = (block.unsqueeze(1) == block).expand(rows, -1, -1)
    return Blocks(
        inputs=inputs,
        positions=positions,
        previous=previous,
        following=following,
        there=real.unsqueeze(-1) & (positions + 1 < lengths),
        mask=torch.cat([seen, own], -1).unsqueeze(1),
    )
