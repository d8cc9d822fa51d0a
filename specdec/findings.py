"""What can be said of a pair of models before they decode anything: kinds, tokenizers, contexts, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, final

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from specdec.errors import CompatibilityError, ModelError, RequestError, SpecdecError
from specdec.kv import KVCacheManager
from specdec.target import Target
from specdec.types import Span

Outcome = Literal["ok", "note", "warning", "failure"]
_SHOWN = 3
_GIB = 2**30
# Of a generation config: what is used (the ends), and what has no say in which token is drawn.
_NOT_SAMPLING = {
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "transformers_version",
    "use_cache",
    "cache_implementation",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    "do_sample",
}


@final
@frozen
class Finding:
    """One thing that was examined.

    Attributes:
        name: what.
        outcome: `ok`; `note`, worth knowing; `warning`, may spoil speed or use; `failure`, it is wrong.
        text: one or two sentences.
        figures: the same as plain data.
        error: what a failure amounts to.
    """

    name: str
    outcome: Outcome
    text: str
    figures: Mapping[str, Any] = field(factory=dict)
    error: SpecdecError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"name": self.name, "outcome": self.outcome, "text": self.text, "figures": dict(self.figures)}


def failure(name: str, error: SpecdecError, **figures: Any) -> Finding:
    """A failure, in the words of its error."""
    return Finding(name, "failure", " ".join(str(error).split()), figures, error)


def model(name: str, target: Target) -> Finding:
    """What kind of model it is."""
    config, parameters = target.config, target.parameters
    layers = int(config.num_hidden_layers)
    sliding = [kind for kind in getattr(config, "layer_types", None) or () if kind == "sliding_attention"]
    window = getattr(config, "sliding_window", None)
    windowed = len(sliding) if getattr(config, "layer_types", None) else layers * (window is not None)
    kinds = f"{layers} layers" + (
        f", {windowed} of them with a window of {window}" if windowed else " of full attention"
    )
    dtype, attention = str(target.dtype).removeprefix("torch."), config._attn_implementation
    return Finding(
        name,
        "ok",
        f"{config.model_type}, {_count(parameters)} parameters, {dtype} on {target.device}, {attention} attention, "
        f"{kinds}; keys and values can be rolled back by length",
        {
            "model_type": config.model_type,
            "parameters": parameters,
            "dtype": dtype,
            "device": str(target.device),
            "attention": attention,
            "layers": layers,
            "sliding_layers": windowed,
            "vocabulary": target.vocabulary,
        },
    )


def generation_settings(target: Target) -> Finding:
    """What the checkpoint's generation config says and nobody here follows."""
    config = getattr(target.model, "generation_config", None)
    said = {} if config is None else config.to_diff_dict()
    unused = {
        name: value
        for name, value in said.items()
        if name not in _NOT_SAMPLING and not name.startswith("_") and value is not None
    }
    ends = f"{len(target.eos_ids)} end-of-sequence ids are taken from the checkpoint"
    if not unused:
        return Finding("generation config", "ok", f"{ends}; it asks for nothing else")
    listed = ", ".join(f"{name}={value}" for name, value in unused.items())
    return Finding(
        "generation config",
        "note",
        f"{ends}, and nothing else: {listed} not used; give what you want of it as sampling options",
        {"unused": {name: str(value) for name, value in unused.items()}},
    )


def tokenizers(target: Target, draft: Target) -> Finding:
    """Whether ids mean the same on both sides."""
    name = "tokenizers"
    widths = f"the logits are {target.vocabulary} and {draft.vocabulary} wide"
    if target.tokenizer is None or draft.tokenizer is None:
        side = "target" if target.tokenizer is None else "draft model"
        return Finding(
            name, "warning", f"the {side} has no tokenizer, so nobody knows whether ids mean the same; {widths}"
        )
    ours, theirs = ({index: text for text, index in one.tokenizer.get_vocab().items()} for one in (target, draft))
    shared = ours.keys() & theirs.keys()
    different = sorted(index for index in shared if ours[index] != theirs[index])
    figures: dict[str, Any] = {
        "shared": len(shared),
        "different": len(different),
        "first": [{"id": index, "target": ours[index], "draft": theirs[index]} for index in different[:_SHOWN]],
        "target_only": len(ours.keys() - shared),
        "draft_only": len(theirs.keys() - shared),
        "widths": [target.vocabulary, draft.vocabulary],
    }
    if different:
        first = ", ".join(f"{index} ({ours[index]!r}, {theirs[index]!r})" for index in different[:_SHOWN])
        return failure(
            name,
            CompatibilityError(
                f"tokenizers: {len(different)} of {len(shared)} shared ids stand for different strings in target and "
                f"draft, such as {first}; try a draft model of the target's family"
            ),
            **figures,
        )
    only = [
        f"{len(extra)} ids are named by the {side} only, {min(extra)} the first"
        for side, extra in (("target", ours.keys() - shared), ("draft model", theirs.keys() - shared))
        if extra
    ]
    text = "; ".join([f"all {len(shared)} shared ids stand for the same strings", *only, widths])
    return Finding(name, "note" if only else "ok", text, figures)


def contexts(target: Target, draft: Target | None, longest: int, new: int, tokens: int) -> Finding:
    """Whether prompts and new tokens fit, and what happens past the draft model's context.

    Args:
        longest: tokens of the longest prompt.
        new: max_new_tokens.
        tokens: wanted cells of a cache row.
    """
    name, need = "context", longest + new
    figures = {
        "target": target.context,
        "draft": None if draft is None else draft.context,
        "cache": tokens,
        "longest_prompt": longest,
        "needed": need,
    }
    if longest >= target.context:
        error = f"context: a prompt of {longest} tokens leaves no room in the target's {target.context}; shorten it"
        return failure(name, RequestError(error), **figures)
    if min(need, target.context) > tokens:
        error = f"context: prompt and new tokens need {need} cells and a row has {tokens}; try --tokens {need}"
        return failure(name, RequestError(error), **figures)
    said = [f"the target reads {target.context} tokens, a cache row holds {tokens}, the prompts here need {need}"]
    outcome: Outcome = "ok"
    if need > target.context or tokens > target.context:
        outcome = "note"
        said.append(f"texts end at {target.context} with the reason 'context'")
    if draft is not None:
        said[0] += f"; the draft model reads {draft.context}"
        reach = min(tokens, target.context)
        if draft.context < reach:
            outcome = "warning"
            said.append(f"past {draft.context} tokens a row gets no drafts and goes on at the speed of plain decoding")
    return Finding(name, outcome, "; ".join(said), figures)


def memory(target: Target, draft: Target | None, rows: int, tokens: int) -> Finding:
    """Weights, which are there already, and keys and values of the wanted size against what is free.

    Bytes of a cell are those of storage that was really made, by a forward over one token.
    """
    name, sides = "memory", [side for side in (target, draft) if side is not None]
    weights = [sum(tensor.nbytes for tensor in _tensors(side.model)) for side in sides]
    cells = [cell_bytes(side) for side in sides]
    wanted = [cell * rows * tokens for cell in cells]
    free = free_bytes(target.device)
    parts = [
        f"{side}: weights {_size(weight)}, {cell} bytes a token and row, {_size(need)} of keys and values"
        for side, weight, cell, need in zip(("target", "draft model"), weights, cells, wanted, strict=False)
    ]
    text = f"{'; '.join(parts)} at {counted(rows)} of {tokens} tokens"
    figures = {
        "weights": weights,
        "bytes_per_cell": cells,
        "keys_and_values": wanted,
        "free": free,
        "rows": rows,
        "tokens": tokens,
    }
    if free is None:
        return Finding(name, "note", f"{text}; what is free on {target.device} is not known", figures)
    need = sum(wanted)
    if need > free:
        error = f"memory: keys and values need {_size(need)} and {_size(free)} are free on {target.device}; "
        return failure(name, ModelError(f"{error}{text}; try fewer rows or tokens"), **figures)
    tight = need > 0.8 * free
    return Finding(
        name,
        "warning" if tight else "ok",
        f"{text}; {_size(free)} are free{', which is tight' if tight else ''}",
        figures,
    )


def cell_bytes(side: Target) -> int:
    """Bytes of keys and values of one token of one row, from storage made for a forward over one token."""
    kv = evolve(side.kv, rows=1, tokens=8)
    small = Target(side.model, kv=kv)
    ids = torch.zeros((1, 1), dtype=torch.int64, device=side.device)
    small.forward((kv.acquire(),), Span(ids, (1,)))
    return sum(tensor.nbytes for tensor in _held(kv)) // (kv.tokens + 1)  # one more cell is for what nobody reads


def free_bytes(device: torch.device) -> int | None:
    """What a device has left; None where it does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found and device.type == "cpu" else None


def counted(rows: int) -> str:
    """`1 row`, `4 rows`."""
    return f"{rows} row{'s' if rows > 1 else ''}"


def _held(kv: KVCacheManager) -> Iterator[Tensor]:
    """Every tensor that a cache manager keeps."""
    for name in {name for kind in type(kv).__mro__ for name in getattr(kind, "__slots__", ())} | set(
        getattr(kv, "__dict__", {})
    ):
        value = getattr(kv, name, None)
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        yield from (one for one in inside if isinstance(one, Tensor))


def _tensors(whole: Any) -> list[Tensor]:
    """Parameters and buffers, shared ones once."""
    return list({tensor.data_ptr(): tensor for tensor in (*whole.parameters(), *whole.buffers())}.values())


def _count(number: int) -> str:
    for size, word in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return str(number)


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= 0.01 * _GIB else f"{count / 2**20:.2f} MiB"
