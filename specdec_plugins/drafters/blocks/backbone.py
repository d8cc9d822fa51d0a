"""The network that block drafters share: a few decoder layers whose keys and values are those of the target's features.

Notation of the equations: c are the tapped features of a committed token, side by side; g = RMS(fc(c)). In layer l with
input h, x = RMS(h): queries come from x, keys and values by the same weights from g of every committed token and from x
of every row of the block. g has no residual stream, so what a layer keeps of a committed token never changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, final

import torch
from attrs import frozen
from torch import Tensor, nn

from specdec.attention import grouped


class Cache(Protocol):
    """What holds keys and values during one forward, as `specdec.kv.StagedCache` does."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Take the new ones [B, heads, T, dim] of a layer; give back all that its queries may see."""
        ...


@final
@frozen(kw_only=True)
class Shape:
    """Sizes of a backbone, with the names of a Qwen3 config.

    Attributes:
        num_taps: how many layers of the target are tapped.
        windows: the sliding window of each layer, or None.
        causal: rows of a block see no later row of it, in layers without a window.
        causal_windows: the same, in layers with one.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    num_taps: int
    windows: tuple[int | None, ...]
    causal: bool = False
    causal_windows: bool = False


@final
class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, the quotient in float32 or finer."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, values: Tensor) -> Tensor:
        fine = values.to(torch.promote_types(values.dtype, torch.float32))
        scaled = fine * torch.rsqrt(fine.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(values.dtype)


@final
class Attention(nn.Module):
    """Queries of block rows over keys and values of committed tokens and of the block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        heads, shared, size, width = (
            shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, shape.hidden_size
        )  # fmt: skip
        self.q_proj = nn.Linear(width, heads * size, bias=False)
        self.k_proj = nn.Linear(width, shared * size, bias=False)
        self.v_proj = nn.Linear(width, shared * size, bias=False)
        self.o_proj = nn.Linear(heads * size, width, bias=False)
        self.q_norm = Norm(size, shape.rms_norm_eps)
        self.k_norm = Norm(size, shape.rms_norm_eps)
        self.size = size
        self.num_key_value_groups = heads // shared  # transformers' attention looks for it here

    def keys(self, rows: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, T, dim] of rows [B, T, H]."""
        keys, values = self._heads(self.k_proj(rows)), self._heads(self.v_proj(rows))
        return _turned(self.k_norm(keys), turn).transpose(1, 2), values.transpose(1, 2)

    def queries(self, rows: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Queries [B, heads, T, dim] of rows [B, T, H]."""
        return _turned(self.q_norm(self._heads(self.q_proj(rows))), turn).transpose(1, 2)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        found, _ = grouped(self, queries, keys, values, mask, scaling=self.size**-0.5)
        out: Tensor = self.o_proj(found.flatten(2))
        return out

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(*rows.shape[:-1], -1, self.size)


@final
class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return out


@final
class Layer(nn.Module):
    """One decoder layer over the rows of a block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, rows: Tensor, turn: tuple[Tensor, Tensor], cache: Cache, layer: int, mask: Tensor) -> Tensor:
        inner = self.input_layernorm(rows)
        keys, values = cache.update(*self.self_attn.keys(inner, turn), layer)
        rows = rows + self.self_attn(self.self_attn.queries(inner, turn), keys, values, mask)
        out: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return out


@final
class Backbone(nn.Module):
    """Parameters are named as in published checkpoints; docs/block-drafters.md lists them.

    Inference and training differ in the cache alone: `write` puts committed tokens into it, `forward` the block.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.num_taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def context(self, features: Tensor) -> Tensor:
        """g [B, T, H] of the tapped features [B, T, taps * H]."""
        g: Tensor = self.hidden_norm(self.fc(features))
        return g

    def write(self, context: Tensor, positions: Tensor, cache: Cache) -> None:
        """Give the cache what every layer keeps of committed tokens.

        Args:
            context: g, [B, T, H].
            positions: int64 [B, T], absolute.
            cache: takes them layer by layer.
        """
        turn = self._turn(positions, context.dtype)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            cache.update(*layer.self_attn.keys(context, turn), index)

    def forward(
        self,
        embedded: Tensor,
        positions: Tensor,
        cache: Cache,
        mask: Tensor,
        windowed: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Normed rows [B, T, H] of a block.

        Args:
            embedded: input embeddings of the block, [B, T, H].
            positions: int64 [B, T], absolute.
            cache: takes the block's keys and values, and gives back all.
            mask: bool [B, 1, T, S], which of all keys each row sees, in layers without a window.
            windowed: the same for layers with a window, by window.
        """
        turn = self._turn(positions, embedded.dtype)
        rows = embedded
        for index, (layer, window) in enumerate(zip(self.layers, self.shape.windows, strict=True)):
            rows = layer(rows, turn, cache, index, mask if window is None else (windowed or {})[window])
        out: Tensor = self.norm(rows)
        return out

    def _turn(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [B, T, 1, dim] of rotary positions; pairs are the two halves of a head."""
        size = self.shape.head_dim
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
        angles = positions.unsqueeze(-1).float() * self.shape.rope_theta**-exponents
        angles = torch.cat([angles, angles], -1).unsqueeze(2)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _turned(heads: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate [B, T, heads, dim]."""
    cosine, sine = turn
    first, second = heads.chunk(2, -1)
    return heads * cosine + torch.cat([-second, first], -1) * sine
