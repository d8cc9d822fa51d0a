"""The folder of a run: written atomically, resumed where it stopped, never overwritten unasked."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Self, final

from attrs import frozen

from specdec.errors import OutputError, RecipeError
from specdec.figures import FILES, PICTURES
from specdec.trace import FOLDER as TRACES
from specdec.yamlfile import dump, read

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # there runs are not kept apart

CONFIG, ENVIRONMENT, SAMPLES = "config.yaml", "environment.json", "samples.jsonl"
REPORT, PAGE, RESULTS, LOCK = "report.md", "report.html", "results.json", ".lock"
_RECORD = {"run", "sample", "repeat", "finish_reason", "tokens", "counters", "fidelity", "seconds"}
_TRY = "try another --output-dir, or --overwrite"
_HALVES = "backslashreplace"  # half a character, as in a file name that is not UTF-8, becomes what JSON writes for it


@final
@frozen
class RunFolder:
    """Where a run is written. `results.json` comes last: a folder that has it is finished.

    Attributes:
        path: the folder.
        config: the resolved recipe.
        overwrite: whatever is there is replaced.
    """

    path: Path
    config: Mapping[str, Any]
    overwrite: bool

    @classmethod
    def open(cls, path: Path, config: Mapping[str, Any], *, overwrite: bool = False) -> Self:
        """Look at a folder; leaves nothing in it.

        Raises:
            OutputError: it holds a finished run, an unfinished one of another recipe, or something else, or is in use,
                or is not writable.
        """
        folder = cls(path, config, overwrite)
        with _errors(path):
            if (path / LOCK).exists():
                with folder.hold():
                    pass
            folder._fresh()
            place = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
            if not place.is_dir():
                raise OutputError(f"{path}: {place} is no folder, wanted one; try another --output-dir")
            with TemporaryFile(dir=place):  # asked of the file system itself: rights are not all that can be missing
                pass
        return folder

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other runs out until the block ends. A process that is killed lets go.

        The lock's file stays: removed, it could be locked by one who opened it before and made anew by another.

        Raises:
            OutputError: it is in use, or not writable.
        """
        with _errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK).open("w")
        with file:
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise OutputError(f"{self.path}: in use by another run; try another --output-dir") from error
            except OSError:  # a file system without locks
                pass
            yield

    def _fresh(self) -> bool:
        """Whether there is nothing to go on from."""
        if self.path.exists() and not self.path.is_dir():
            raise OutputError(f"{self.path}: is a file, wanted a folder; try another --output-dir")
        if self.overwrite or not self.path.exists() or all(map(_is_ours, self.path.iterdir())):
            return True
        if not (self.path / CONFIG).is_file():
            raise OutputError(f"{self.path}: holds files that are no run; {_TRY}")
        if (self.path / RESULTS).exists():
            raise OutputError(f"{self.path}: holds a finished run; {_TRY}")
        found = read(self.path / CONFIG)
        if different := _differences(_without_place(found), _without_place(self.config)):
            reasons = "; ".join(different)
            raise OutputError(f"{self.path}: holds an unfinished run of another recipe ({reasons}); {_TRY}")
        return not (self.path / SAMPLES).exists()  # killed while it began

    def begin(self, environment: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Start writing; returns the records that an interrupted run left. Call it while the folder is held.

        Raises:
            OutputError: it was begun on another machine, with other versions, weights or prompts, or is not writable,
                or another run came first.
        """
        with _errors(self.path):
            if self._fresh():  # again: another run may have come and gone since
                shutil.rmtree(self.path / TRACES, ignore_errors=True)
                for name in (RESULTS, REPORT, PAGE, *FILES, *PICTURES.values(), SAMPLES, ENVIRONMENT, CONFIG):
                    self._remove(name)
                # The recipe first: with it, what a kill leaves is known as this run's. The samples last.
                self._write(CONFIG, dump(self.config))
                self._write(ENVIRONMENT, _json(environment))
                self._write(SAMPLES, "")
                return []
            found = json.loads((self.path / ENVIRONMENT).read_text(encoding="utf-8"))
            if different := _differences(found, json.loads(_json(environment))):
                raise OutputError(
                    f"{self.path}: holds a run that was begun elsewhere ({'; '.join(different)}); its times and texts "
                    f"do not mix with new ones; {_TRY}"
                )
            records = _complete_lines(self.path / SAMPLES)
            # A line that was cut off must not stick to the next one.
            self._write(SAMPLES, "".join(f"{_line(record)}\n" for record in records))
            return records

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add finished requests; they survive whatever happens next."""
        text = "".join(f"{_line(record)}\n" for record in records)
        with _errors(self.path), (self.path / SAMPLES).open("a", encoding="utf-8", errors=_HALVES) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def finish(self, results: Mapping[str, Any], reports: Mapping[str, str]) -> None:
        """Write what the run found: the texts made of the results by name, then the results."""
        text = _json(results)
        with _errors(self.path):
            for name, report in reports.items():
                self._write(name, report)
            self._write(RESULTS, text)

    def _write(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        for left in path.parent.glob(f".{path.name}.*"):  # by a run that was killed; the folder is ours alone
            left.unlink()
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8", errors=_HALVES)
        temporary.replace(path)

    def _remove(self, name: str) -> None:
        """A file of an earlier run, and the folder it was alone in."""
        path = self.path / name
        path.unlink(missing_ok=True)
        if path.parent != self.path and path.parent.is_dir() and not any(path.parent.iterdir()):
            path.parent.rmdir()


def _is_ours(path: Path) -> bool:
    """The lock, or the first thing that a run writes, cut off by a kill."""
    return path.name == LOCK or path.name.startswith(f".{CONFIG}.")


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OutputError:
        raise
    except RecipeError as error:
        raise OutputError(f"{error}; {_TRY}") from error
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OutputError(f"{path}: cannot be used: {why}; {_TRY}") from error


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    """Records of the lines that were written to their end, each once."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    # Texts may hold other line separators than a newline.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], 1):
        record = json.loads(line)
        key = tuple(map(record.get, ("run", "sample", "repeat"))) if isinstance(record, dict) else ()
        if tuple(map(type, key)) != (str, str, int) or not record.keys() >= _RECORD:
            raise OutputError(f"{path}:{number}: is not the record of a request; {_TRY}")
        found.setdefault(key, record)
    return list(found.values())


def _without_place(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "output_dir"} if isinstance(config, dict) else {}


def _differences(found: Any, wanted: Any, path: str = "") -> list[str]:
    """`sampling.temperature: 1.0 there, 0.5 now`, for every place where two plain data differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = dict.fromkeys((*found, *wanted))
        return [
            line
            for key in keys
            for line in _differences(found.get(key), wanted.get(key), f"{path}.{key}" if path else str(key))
        ]
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = enumerate(zip(found, wanted, strict=True))
        return [line for index, (one, other) in pairs for line in _differences(one, other, f"{path}[{index}]")]
    return [] if found == wanted else [f"{path}: {found!r} there, {wanted!r} now"]
