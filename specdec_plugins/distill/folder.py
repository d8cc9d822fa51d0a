"""The run directory: written atomically, gone on from where it stopped, never overwritten unasked."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self, final

import torch
from attrs import frozen
from safetensors import SafetensorError

from specdec.errors import OutputError, RecipeError
from specdec.rundir import RunFolder
from specdec.yamlfile import dump, read

CONFIG, ENVIRONMENT, LOG, CURVE, RESULTS = "config.yaml", "environment.json", "log.jsonl", "curve.csv", "results.json"
SAMPLES, FEATURES, STATE, DRAFTER = "samples.jsonl", "features", "state.pt", "drafter"
_OURS = (CONFIG, ENVIRONMENT, LOG, CURVE, RESULTS, SAMPLES, FEATURES, STATE, DRAFTER)
_TRY = "try another --output-dir, or --overwrite"


@final
@frozen
class Folder:
    """Where a drafter is trained. `results.json` comes last: a folder that has it is finished.

    Attributes:
        path: the folder.
        config: the resolved recipe.
    """

    path: Path
    config: Mapping[str, Any]

    @classmethod
    @contextmanager
    def open(cls, path: Path, config: Mapping[str, Any], *, overwrite: bool) -> Iterator[Self]:
        """Take a folder for this recipe, alone until the block ends.

        Raises:
            OutputError: it holds a finished run, a run of another recipe, or something else, or is in use, or cannot be
                written, now or later.
        """
        folder = cls(path, config)
        with RunFolder(path, config, overwrite).hold():
            try:
                folder._begin(overwrite)
            except (OSError, RecipeError) as error:
                if isinstance(error, OutputError):
                    raise
                raise OutputError(f"{path}: cannot be used: {error}; {_TRY}") from error
            try:
                yield folder
            except (OSError, SafetensorError) as error:
                if isinstance(error, OutputError):
                    raise
                raise OutputError(
                    f"{path}: cannot be read or written: {error}; the same command goes on once it can, or {_TRY}"
                ) from error

    def _begin(self, overwrite: bool) -> None:
        there = {entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")}
        if overwrite:
            for name in there & set(_OURS):
                entry = self.path / name
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        elif there and CONFIG not in there:
            raise OutputError(f"{self.path}: holds files that are no run; {_TRY}")
        elif RESULTS in there:
            raise OutputError(f"{self.path}: holds a finished run; {_TRY}")
        elif there and (different := _differences(read(self.path / CONFIG), dict(self.config))):
            raise OutputError(f"{self.path}: holds a run of another recipe ({'; '.join(different)}); {_TRY}")
        self.write(CONFIG, dump(self.config))

    def claim(self, environment: Mapping[str, Any]) -> None:
        """Write down what the run depends on beside its recipe: features that lie here are of these texts.

        Raises:
            OutputError: it was begun with other texts or other weights of the target.
        """
        file = self.path / ENVIRONMENT
        with whole(file):
            found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else environment
            others = [
                what
                for what, there, now in (
                    ("texts", found.get("texts"), environment["texts"]),
                    ("weights of the target", found["target"]["weights"], environment["target"]["weights"]),
                )
                if there not in (None, now)
            ]
        if others:
            raise OutputError(f"{self.path}: was begun with other {' and '.join(others)}; {_TRY}")
        self.write(ENVIRONMENT, json.dumps(environment, indent=2) + "\n")

    def write(self, name: str, text: str) -> None:
        """Make a file, or put another in its place."""
        with self.replacing(name) as path:
            path.write_text(text, encoding="utf-8")

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """A path to write to, which takes the place of a file when the block ends."""
        temporary = self.path / f".{name}.new"
        yield temporary
        temporary.replace(self.path / name)

    def keep(self, state: Mapping[str, Any]) -> None:
        """Write down the state of a training."""
        with self.replacing(STATE) as path:
            torch.save(dict(state), path)

    @property
    def begun(self) -> bool:
        """A state was written."""
        return (self.path / STATE).exists()

    def state(self) -> dict[str, Any] | None:
        """The state that was written last."""
        if not self.begun:
            return None
        with whole(self.path / STATE):
            found: dict[str, Any] = torch.load(self.path / STATE, weights_only=True)
        return found

    def log(self, entry: Mapping[str, Any]) -> None:
        """Add a line to the log."""
        with (self.path / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")

    def logged(self, step: int) -> list[dict[str, Any]]:
        """The log up to a step; what was written later is dropped."""
        file = self.path / LOG
        with whole(file):
            lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
            kept = [entry for entry in map(json.loads, lines) if entry["step"] <= step]
        self.write(LOG, "".join(json.dumps(entry) + "\n" for entry in kept))
        return kept

    def table(self, name: str, lines: Sequence[Sequence[Any]]) -> None:
        """Write a CSV file."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(lines)
        self.write(name, text.getvalue())

    def forget(self) -> None:
        """Remove what only a training that goes on needs."""
        shutil.rmtree(self.path / FEATURES, ignore_errors=True)
        (self.path / STATE).unlink(missing_ok=True)


@contextmanager
def whole(file: Path) -> Iterator[None]:
    """Whatever goes wrong with the content of a file of a run is that it is damaged.

    Raises:
        OutputError: it is.
    """
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, UnpicklingError) as error:
        raise OutputError(f"{file}: is damaged; {_TRY}") from error


def _differences(found: Any, wanted: Mapping[str, Any]) -> list[str]:
    """`train.steps: 100 there, 200 now`, for every option that differs; where it is written does not matter."""
    there, now = _flat(found), _flat(wanted)
    return [
        f"{key}: {there.get(key)!r} there, {now.get(key)!r} now"
        for key in dict.fromkeys((*there, *now))
        if key != "output_dir" and there.get(key) != now.get(key)
    ]


def _flat(data: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(data, Mapping):
        return {path: data}
    return {
        key: value
        for name, entry in data.items()
        for key, value in _flat(entry, f"{path}.{name}" if path else str(name)).items()
    }
