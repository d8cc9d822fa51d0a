"""Models and tokenizers from transformers: a hub id, a folder, or a tiny random one made on the spot."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from specdec.errors import ModelError

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
) -> tuple[Any, Any]:
    """Load a decoder-only model and its tokenizer.

    Args:
        name: a hub id, a folder, or `random:FAMILY[:SEED]`, a tiny model of that model type with random weights and a
            byte tokenizer, which needs no download.
        revision: branch, tag or commit of a hub id.
        dtype: 'auto' takes the checkpoint's.
        device: where a model without a device map goes.
        device_map: passed to transformers.
        attn_implementation: 'sdpa' or 'eager'; None is transformers' choice.
        quantization_config: passed to transformers.
        trust_remote_code: passed to transformers; runs code from the checkpoint.

    Returns:
        The model in evaluation mode, and the tokenizer or None where the checkpoint has none.

    Raises:
        ModelError: it cannot be loaded; says why.
    """
    kind = torch_dtype(dtype)
    if name.startswith(RANDOM):
        given = {"device_map": device_map, "quantization_config": quantization_config, "revision": revision}
        if unused := [key for key, value in given.items() if value is not None]:
            raise ModelError(f"model {name!r}: a random model takes no {' or '.join(unused)}; leave it out")
        model, tokenizer = _random(name, attn_implementation)
        model = model.to(torch.float32 if kind == "auto" else kind)
    else:
        optional = {
            "device_map": device_map,
            "attn_implementation": attn_implementation,
            "quantization_config": quantization_config,
        }
        chosen = {key: value for key, value in optional.items() if value is not None}
        try:
            model = AutoModelForCausalLM.from_pretrained(
                name, revision=revision or "main", dtype=kind, trust_remote_code=trust_remote_code, **chosen
            )
        except Exception as error:  # a broken checkpoint can fail anywhere in transformers or safetensors
            raise ModelError(f"model {name!r} cannot be loaded: {_first_line(error)}") from error
        tokenizer = _tokenizer(name, revision, trust_remote_code)
    if device is not None and device_map is None:
        try:
            model = model.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ModelError(f"device {device!r}: {_first_line(error)}; try 'cpu'") from error
    return model.eval(), tokenizer


def _tokenizer(name: str, revision: str | None, trust_remote_code: bool) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision or "main", trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError):
        return (
            None  # a model without one still decodes ids; texts and stop strings are refused where they are asked for
        )


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
