"""The drafter as it is trained: many blocks of a text in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from specdec_plugins.distill.anchors import Blocks
from specdec_plugins.drafters.blocks.checkpoint import BlockModel


@final
class Joined:
    """Keys and values of features, and behind them those of blocks: what `Backbone` takes for a cache."""

    def __init__(self) -> None:
        self._context: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The first of a layer are those of features, [B, heads, T, dim]."""
        if layer not in self._context:
            self._context[layer] = keys, values
            return keys, values
        before = self._context[layer]
        return torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)


@final
class Network(nn.Module):
    """Backbone, Markov head and confidence head; embeddings and vocabulary head are the target's."""

    def __init__(self, model: BlockModel) -> None:
        super().__init__()
        assert model.markov is not None  # recipes ask for both heads
        assert model.confidence is not None
        self.backbone, self.markov_head, self.confidence_head = model.backbone, model.markov, model.confidence

    def forward(self, embedded: Tensor, blocks: Blocks, features: Sequence[Tensor]) -> Tensor:
        """Normed rows [B, A, K, H] of blocks.

        Args:
            embedded: their input embeddings, [B, A * K, H].
            blocks: where they stand and what they see.
            features: of each text, [n, taps * H].
        """
        lengths = [len(rows) for rows in features]
        context = self.backbone.context(torch.cat(list(features)).unsqueeze(0)).squeeze(0)
        padded = pad_sequence(list(torch.split(context, lengths)), batch_first=True)
        cache = Joined()
        places = torch.arange(padded.shape[1], device=padded.device).expand(len(lengths), -1)
        self.backbone.write(padded, places, cache)
        rows = self.backbone(embedded, blocks.positions.flatten(1), cache, blocks.mask)
        return rows.view(*blocks.positions.shape, -1)  # type: ignore[no-any-return]  # torch modules are untyped when called


def start(network: Network, size: Tensor, seed: int) -> None:
    """First weights: numbers of rows as large as the target's own, `size` [H], and no bias from the token before."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() > 1:
                less = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=less * parameter.shape[1] ** -0.5, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
        network.backbone.norm.weight.copy_(size)
        network.markov_head.markov_w2.weight.zero_()
