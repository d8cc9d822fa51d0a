"""The folder of a run: written atomically, resumed where it stopped, never overwritten unasked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, final

from attrs import frozen

from specdec.errors import OutputError
from specdec.yamlfile import dump, parse

CONFIG, ENVIRONMENT, SAMPLES = "config.yaml", "environment.json", "samples.jsonl"
REPORT, RESULTS = "report.md", "results.json"
_TRY = "try another --output-dir, or --overwrite"


@final
@frozen
class RunFolder:
    """Where a run is written. `results.json` comes last: a folder that has it is finished.

    Attributes:
        path: the folder.
        config: the resolved recipe.
        fresh: whatever run is there is replaced.
    """

    path: Path
    config: Mapping[str, Any]
    fresh: bool

    @classmethod
    def open(cls, path: Path, config: Mapping[str, Any], *, overwrite: bool = False) -> Self:
        """Look at a folder; writes nothing.

        Raises:
            OutputError: it holds a finished run, an unfinished one of another recipe, or something else.
        """
        if path.exists() and not path.is_dir():
            raise OutputError(f"{path}: is a file, wanted a folder; try another --output-dir")
        if overwrite or not path.exists() or not any(path.iterdir()):
            return cls(path, config, True)
        if not (path / CONFIG).is_file():
            raise OutputError(f"{path}: holds files that are no run; {_TRY}")
        if (path / RESULTS).exists():
            raise OutputError(f"{path}: holds a finished run; {_TRY}")
        found = parse((path / CONFIG).read_text(encoding="utf-8"), str(path / CONFIG))
        if different := _differences(_without_place(found), _without_place(config)):
            raise OutputError(f"{path}: holds an unfinished run of another recipe ({'; '.join(different)}); {_TRY}")
        return cls(path, config, False)

    def begin(self, environment: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Start writing; returns the records that an interrupted run left.

        Raises:
            OutputError: it was begun on another machine, with other versions, weights or prompts, or is not writable.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self.fresh:
                for name in (RESULTS, REPORT, SAMPLES, ENVIRONMENT, CONFIG):
                    (self.path / name).unlink(missing_ok=True)
                self._write(ENVIRONMENT, _json(environment))
                self._write(SAMPLES, "")
                self._write(CONFIG, dump(self.config))
                return []
            found = json.loads((self.path / ENVIRONMENT).read_text(encoding="utf-8"))
            if different := _differences(found, json.loads(_json(environment))):
                raise OutputError(
                    f"{self.path}: holds a run that was begun elsewhere ({'; '.join(different)}); its times and texts "
                    f"do not mix with new ones; {_TRY}"
                )
            records = _complete_lines((self.path / SAMPLES).read_text(encoding="utf-8"))
            # A line that was cut off must not stick to the next one.
            self._write(SAMPLES, "".join(f"{_line(record)}\n" for record in records))
            return records
        except OutputError:
            raise
        except (OSError, ValueError) as error:
            raise OutputError(f"{self.path}: cannot be used: {error}; {_TRY}") from error

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add finished requests; they survive whatever happens next."""
        with (self.path / SAMPLES).open("a", encoding="utf-8") as file:
            file.write("".join(f"{_line(record)}\n" for record in records))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, results: Mapping[str, Any], report: str) -> None:
        """Write what the run found."""
        self._write(REPORT, report)
        self._write(RESULTS, _json(results))

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.{os.getpid()}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path / name)


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _complete_lines(text: str) -> list[dict[str, Any]]:
    """Records of the lines that were written to their end. Texts may hold other line separators than a newline."""
    return [json.loads(line) for line in text.split("\n")[:-1]]


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
