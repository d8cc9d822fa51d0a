"""Attention of few queries over many cached keys whose heads are shared, without copies of keys and values.

With an explicit mask transformers' sdpa repeats every key and value for each query head of its group. Folding the query
heads of a group into the rows of one head gives the same products over the keys as they are. It is registered with
transformers under `NAME`, and what it does not know goes to transformers' own sdpa, which stays the reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "specdec_grouped"
# What may be asked for beside the arguments and changes nothing, because the mask says it or nothing is trained.
_HARMLESS = {"sliding_window", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions"}


def grouped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The interface of transformers: query [B, H, T, D], key and value [B, G, S, D], mask bool [B, 1, T, S].

    Returns:
        [B, T, H, D], and no weights.
    """
    batch, heads, width, size = query.shape
    shared = heads // key.shape[1]
    plain = all(name in _HARMLESS or _nothing(asked) for name, asked in others.items())
    # With many queries the masks of all heads are more than the keys that are not copied.
    if attention_mask is None or shared == 1 or not plain or width > size or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(  # type: ignore[no-any-return]  # transformers is untyped here
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    folded = query.reshape(batch, key.shape[1], shared * width, size)
    mask = attention_mask if width == 1 else _repeated(attention_mask, shared)
    found = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return found.reshape(batch, heads, width, -1).transpose(1, 2).contiguous(), None


def _repeated(mask: Tensor, shared: int) -> Tensor:
    """The mask [B, 1, T, S] for all heads of a group, [B, 1, shared * T, S]; made once a forward for all layers."""
    masks = _masks  # another thread may end its forward, and what it knew, at any time
    if masks is None or is_compiling():
        return mask.repeat(1, 1, shared, 1)
    key = (id(mask), shared)
    if key not in masks:
        masks[key] = mask, mask.repeat(1, 1, shared, 1)  # a mask that is held lends its id to no other
    return masks[key][1]


_masks: dict[tuple[int, int], tuple[Tensor, Tensor]] | None = None  # of the forward that runs


def _nothing(asked: Any) -> bool:
    return asked is None or (isinstance(asked, int | float) and asked == 0)


AttentionInterface.register(NAME, grouped)
# For whoever uses the model from another thread: without masks of its own name a model would attend without any.
AttentionMaskInterface.register(NAME, sdpa_mask)


def asks_by_name(model: nn.Module) -> bool:
    """Whether layers of a model compare its implementation with sdpa: under another name they attend otherwise."""
    layers = {type(module) for module in model.modules() if not isinstance(module, PreTrainedModel)}
    kinds = {kind for layer in layers for kind in layer.__mro__ if kind is not nn.Module}
    functions = (inspect.unwrap(value) for kind in kinds for value in vars(kind).values() if callable(value))
    return any(_names_sdpa(function.__code__.co_consts) for function in functions if hasattr(function, "__code__"))


def _names_sdpa(constants: Any) -> bool:
    return any(one == "sdpa" or (isinstance(one, tuple | frozenset) and _names_sdpa(one)) for one in constants)


@contextmanager
def without_copies(config: Any) -> Iterator[None]:
    """A model whose config asks for sdpa attends in this way inside."""
    if config._attn_implementation != "sdpa":
        yield
        return
    global _masks
    config._attn_implementation, _masks = NAME, {}
    try:
        yield
    finally:
        config._attn_implementation, _masks = "sdpa", None
