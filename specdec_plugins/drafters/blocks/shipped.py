"""Checkpoints that come with the package."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from specdec.errors import ModelError

PREFIX = "shipped:"
SMOLLM2 = f"{PREFIX}smollm2-135m-instruct"


def folder_of(name: str) -> Path:
    """The folder of a checkpoint, by its name with the prefix.

    Raises:
        ModelError: there is none of this name.
    """
    folders = Path(str(importlib.resources.files("specdec_plugins.drafters"))) / "weights"
    there = {f"{PREFIX}{folder.name}": folder for folder in sorted(folders.iterdir()) if folder.is_dir()}
    if name not in there:
        raise ModelError(f"model {name!r}: no such drafter comes with the package; there are {', '.join(there)}")
    return there[name]
