"""A transformers model without some of its decoder layers, as a shell around the same weights."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from specdec.errors import ModelError

LAYER_LISTS = ("layers", "h", "blocks")
# Settings that tie layers to one another or to inputs of their own, so that none of them can be left out.
_TIED = ("num_kv_shared_layers", "hidden_size_per_layer_input")
# A patched forward is bound to the model it was made for, and would run all of that model's layers.
_BOUND = ("forward", "_old_forward", "_hf_hook")


def shell(model: Any, layers: tuple[int, ...]) -> Any:
    """The model with only `layers`, without a copy of a weight and without a change to the model.

    The modules around the layer list are shallow copies, everything else is the same object. The shell's config is a
    copy that counts and describes the kept layers only, because models look up a layer's kind by its position in the
    list; a layer itself keeps its own index, so its keys and values go to its own place in a cache. Use it for forwards
    only: to move, train or convert it would do the same to the model.

    Args:
        model: a decoder-only causal language model.
        layers: which layers to keep, ascending.

    Raises:
        ModelError: names every reason why that cannot be done.
    """
    kind = type(model).__name__
    decoder = model.get_decoder()
    name = next((name for name in LAYER_LISTS if isinstance(getattr(decoder, name, None), nn.ModuleList)), None)
    if name is None:
        raise ModelError(f"subset: {kind} has its layers under none of {', '.join(LAYER_LISTS)}; wanted such a list")
    count = len(getattr(decoder, name))
    problems = []
    if wrong := [layer for layer in layers if not 0 <= layer < count]:
        problems.append(f"subset: {kind} has no layers {wrong}; wanted some of 0 to {count - 1}")
    if not layers:
        problems.append(f"subset: no layer is left of {kind}; keep at least one of 0 to {count - 1}")
    if list(layers) != sorted(set(layers)):
        problems.append(f"subset: got layers {list(layers)}; wanted each once, in ascending order")
    config = model.config.get_text_config(decoder=True)
    if tied := [setting for setting in _TIED if getattr(config, setting, None)]:
        problems.append(
            f"subset: {config.model_type} ties its layers to one another ({', '.join(tied)}); "
            "none can be left out, try a smaller model as the drafter"
        )
    if problems:
        raise ModelError("; ".join(problems))
    kept = _shallow(getattr(decoder, name))
    kept._modules = {str(place): getattr(decoder, name)[layer] for place, layer in enumerate(layers)}
    return _around(model, decoder, name, kept, layers)


def _around(module: Any, decoder: Any, name: str, kept: nn.Module, layers: tuple[int, ...]) -> Any:
    """A copy of `module` whose decoder, itself or somewhere inside it, has `kept` for its layer list."""
    outer = _shallow(module)
    if module is decoder:
        outer._modules[name] = kept
    else:
        child = next(key for key, inner in module.named_children() if any(one is decoder for one in inner.modules()))
        outer._modules[child] = _around(module._modules[child], decoder, name, kept, layers)
    if hasattr(module, "config"):
        outer.config = _cut(module.config, layers)
    return outer


def _shallow(module: nn.Module) -> Any:
    """The same children, weights, buffers and hooks, in tables of its own."""
    outer = object.__new__(type(module))
    state = {key: value for key, value in vars(module).items() if key not in _BOUND}
    vars(outer).update({key: copy.copy(value) if isinstance(value, dict) else value for key, value in state.items()})
    return outer


def _cut(config: Any, layers: tuple[int, ...]) -> Any:
    """A copy of a config, or of a config around a text config, that describes the kept layers."""
    text, whole = config.get_text_config(decoder=True), copy.copy(config)
    if text is not config:
        for key, value in vars(config).items():
            if value is text:
                setattr(whole, key, _cut(text, layers))
        return whole
    count = int(config.num_hidden_layers)
    for key, value in vars(config).items():
        if "layer" in key and isinstance(value, list | tuple) and len(value) == count:
            setattr(whole, key, type(value)(value[layer] for layer in layers))
    whole.num_hidden_layers = len(layers)
    if len(getattr(whole, "layer_types", None) or layers) != len(layers):
        raise ModelError(f"subset: {config.model_type} derives the kinds of its layers; none can be left out")
    return whole
