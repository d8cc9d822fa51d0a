"""Models and tokenizers in transformers' own format: a folder, or a hub id."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import hub
from specdec.errors import ModelError

_log = logging.getLogger("specdec")


def load(name: str, *, trust_remote_code: bool, **options: Any) -> tuple[Any, Any]:
    """Model, and tokenizer or None, of a folder or a hub id.

    Args:
        name: the folder or the id.
        trust_remote_code: run code from the checkpoint.
        options: of transformers' `from_pretrained`, `revision` included.

    Raises:
        ModelError: it is not there, or no whole model; says why.
    """
    where = {"trust_remote_code": trust_remote_code, "revision": options.pop("revision", None) or "main"}
    folder = Path(name).expanduser()
    if is_there(folder) or _is_path(name):
        _check(name, folder)
        return _load(name, str(folder), where, options)
    if hub.answers():
        return _load(name, name, where, options)
    with hub.left_alone():
        return _load(name, name, {**where, "local_files_only": True}, options)


def _load(name: str, source: str, where: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    try:
        model, told = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **where, **options)
    except Exception as error:  # a broken checkpoint can fail anywhere in transformers or safetensors
        if "local_files_only" in where and isinstance(error, OSError):
            raise ModelError(
                f"model {name!r}: no such folder, the hub did not answer within {hub.SECONDS:g} seconds or is switched "
                "off, and its cache does not hold the model; try a folder, or again with a connection"
            ) from error
        raise ModelError(f"model {name!r} cannot be loaded: {_first_line(error)}") from error
    _whole(name, told)
    return model, _tokenizer(source, where)


def is_there(path: Path) -> bool:
    """Whether it exists; a text too long to be a path does not."""
    try:
        return path.exists()
    except OSError:
        return False


def _is_path(name: str) -> bool:
    """Whether it can be no hub id, which is `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def _check(name: str, folder: Path) -> None:
    if not is_there(folder):
        raise ModelError(f"model {name!r}: no such folder; wanted a folder, a GGUF file or a hub id")
    if not folder.is_dir():
        raise ModelError(f"model {name!r}: is a file; wanted a folder, a GGUF file (.gguf) or a hub id")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {name!r}: holds no config.json; wanted a folder as save_pretrained writes it")


def _whole(name: str, told: dict[str, Any]) -> None:
    """Refuse what transformers only warns of: missing weights become random ones, left-over ones mean another model."""
    for kind, hint in (
        ("missing", "fetch the checkpoint again"),
        ("unexpected", "compare config.json with the weights"),
    ):
        if keys := sorted(told[f"{kind}_keys"]):
            raise ModelError(
                f"model {name!r} cannot be loaded: {len(keys)} tensors are {kind}, {keys[0]} the first; {hint}"
            )


def _tokenizer(source: str, where: dict[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, **where)
    except (OSError, ValueError, ImportError, KeyError) as error:
        # A model without one still decodes ids; texts and stop strings are refused where they are asked for.
        _log.warning("model %r has no tokenizer that can be loaded: %s", source, _first_line(error))
        return None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
