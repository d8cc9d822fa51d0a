"""What rules would keep of a drafter's blocks along held-out texts, place by place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from attrs import frozen
from torch import Tensor

from specdec.law import Dense
from specdec.verifier import Place, PointwiseVerifier
from specdec_plugins.distill.anchors import Blocks, make
from specdec_plugins.distill.corpus import Text
from specdec_plugins.distill.features import Features
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.standard import Standard

RULES: dict[str, PointwiseVerifier] = {"standard": Standard(), "nucleus": Nucleus(theta=0.95)}
_BLOCKS = 12  # of a text
_TEXTS = 4  # at once


@final
@frozen
class Curve:
    """What one rule keeps at temperature 1.

    Attributes:
        acceptance: chance of keeping the token of each place, when all tokens before it were the target's.
        length: acceptance length that follows: 1 and, for each place, the chance that it and all before it are kept.
    """

    acceptance: tuple[float, ...]
    length: float


def evenly(text: Text) -> list[int]:
    """Positions spread over a text."""
    every = max(1, len(text.anchors) // _BLOCKS)
    return list(text.anchors[::every][:_BLOCKS])


def kept(p: Tensor, q: Tensor) -> dict[str, Tensor]:
    """The chance that each rule keeps a token drawn from the draft's law q, float32 [R], of laws [R, V]."""
    nothing = torch.full(q.shape[:-1], -1, device=q.device)
    place = Place(p=p, q=Dense(q), token=nothing, depth=nothing, logits=p, hidden={})
    return {name: (q * rule.acceptance(place)).sum(-1) for name, rule in RULES.items()}


def curves(
    rows: Callable[[Blocks, Sequence[Features]], dict[str, Tensor]],
    held: Sequence[tuple[Text, Features]],
    size: int,
    mask_id: int,
) -> dict[str, Curve]:
    """The curve of each rule.

    Args:
        rows: of blocks and features, what each rule keeps at all places, float32 [B, A, K].
        held: texts and their features.
        size: places of a block.
        mask_id: what stands at them.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in RULES}
    there: list[Tensor] = []
    for first in range(0, len(held), _TEXTS):
        texts, features = zip(*held[first : first + _TEXTS], strict=True)
        blocks = make(texts, [evenly(text) for text in texts], size, mask_id)
        for name, chances in rows(blocks, features).items():
            found[name].append(chances.flatten(0, 1))
        there.append(blocks.there.flatten(0, 1))
    real = torch.cat(there).double()
    return {name: _curve(torch.cat(parts).double(), real) for name, parts in found.items()}


def _curve(chances: Tensor, real: Tensor) -> Curve:
    count = real.sum(0).clamp(min=1)
    acceptance = (chances * real).sum(0) / count
    runs = (chances.cumprod(1) * real).sum(0) / count
    return Curve(tuple(acceptance.tolist()), 1 + float(runs.sum()))
