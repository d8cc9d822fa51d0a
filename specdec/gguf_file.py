"""Models in GGUF files, unpacked by transformers, with what its reader gets wrong put right."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.errors import ModelError

SUFFIX = ".gguf"
_log = logging.getLogger("specdec")
# What transformers leaves on a model that it has unpacked, and that would say of a saved one that it is GGUF still.
_MARKS = ("hf_quantizer", "quantization_method", "is_quantized")
_GPT2 = {"", "default", "gpt-2"}


def load(path: Path, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file, its weights unpacked to `dtype`.

    Args:
        path: the file.
        dtype: of the weights; what is packed in 4 bits has no more precision for it.
        options: of transformers' `from_pretrained`.

    Raises:
        ModelError: the file is damaged or of a kind that cannot be read, or the packages that read it are missing.
    """
    pre = _check(path)
    try:
        from transformers import GgufConfig
    except ImportError:  # versions that can only unpack
        pass
    else:
        options["quantization_config"] = GgufConfig(dequantize=True)
    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
        model, told = AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=dtype, output_loading_info=True, **where, **options
        )
    except Exception as error:  # a kind of model or of packing that it does not know fails anywhere
        why = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"model {str(path)!r}: transformers cannot read this GGUF file: {why}") from error
    if missing := sorted(told["missing_keys"]):
        raise ModelError(
            f"model {str(path)!r}: {len(missing)} tensors are missing, {missing[0]} the first; wanted a whole model"
        )
    _repair_tokenizer(tokenizer, pre, path)
    _repair_config(model)
    return model, tokenizer


def _check(path: Path) -> str:
    """How the tokenizer cuts texts before it merges, as the file names it; the file is then known to be whole.

    Raises:
        ModelError: it is not.
    """
    try:
        import accelerate  # noqa: F401  # transformers asks for it
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError(
            f"model {str(path)!r}: GGUF files need the packages gguf and accelerate, and {error.name} is missing; "
            "try python -m pip install 'specdec-lab[gguf]'"
        ) from error
    try:
        pre = GGUFReader(path).get_field("tokenizer.ggml.pre")
        return "" if pre is None else str(pre.contents())
    except OSError as error:
        raise ModelError(f"model {str(path)!r}: cannot be read: {error.strerror}; wanted a GGUF file") from error
    except Exception as error:  # the reader takes what is there at its word and fails where that leads
        raise ModelError(
            f"model {str(path)!r}: truncated, damaged or no GGUF file ({type(error).__name__}: {error}); "
            "try to fetch it again"
        ) from error


def _repair_tokenizer(tokenizer: Any, pre: str, path: Path) -> None:
    """SmolLM's digits stand alone, which transformers (up to 5.24) does not know: it would cut spaces before them as
    GPT-2 does, and lists, sums and code would become tokens that the model was not trained on.
    """
    if pre == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [
                Digits(individual_digits=True),
                ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
    elif pre not in _GPT2 and isinstance(tokenizer.backend_tokenizer.pre_tokenizer, ByteLevel):
        _log.warning("%s: transformers does not know its pre-tokenizer %r and cuts texts as GPT-2 does", path, pre)


def _repair_config(model: Any) -> None:
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for mark in _MARKS:
        vars(model).pop(mark, None)
    if (epsilon := getattr(config, "rms_norm_eps", None)) is not None:
        # The file holds a float32, and 1e-05 comes back as 9.999999747378752e-06. The modules have it already.
        config.rms_norm_eps = float(f"{epsilon:.6g}")
