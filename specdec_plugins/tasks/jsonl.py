"""Prompts from a JSON Lines file."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

from attrs import frozen

from specdec.errors import DataError
from specdec.task import Sample, Score, Task

_PROMPTS = ("messages", "turns", "prompt", "question", "text")
_IDS = ("id", "task_id", "question_id")
_EXAMPLE = '{"prompt": "..."}'


@final
@frozen(kw_only=True)
class Jsonl(Task):
    """One JSON object a line; the prompt is its first field of `messages`, `turns`, `prompt`, `question`, `text`.

    `messages` are chat turns with `role` and `content`. Of `turns`, a list of texts, only the first is used: later ones
    answer a completion. The id is the field `id`, `task_id` or `question_id`, or the line number. A file ending in .gz
    is unpacked. There is no score.

    Attributes:
        prompt_field: take the prompt from this field only.
    """

    prompt_field: str | None = None

    def samples(self, file: str | None, limit: int | None) -> list[Sample]:
        if file is None:
            raise DataError("data.file: missing; task jsonl reads a file, give its path")
        found: dict[str, int] = {}
        samples: list[Sample] = []
        for number, line in _lines(file):
            if limit is not None and len(samples) >= limit:
                break
            where = f"{file}:{number}"
            try:
                sample = self._sample(line, where, number)
            except RecursionError as error:
                raise DataError(f"{where}: nested too deeply; wanted an object of a few levels") from error
            if sample.id in found:
                raise DataError(f"{where}: id {sample.id!r} is also line {found[sample.id]}'s; wanted one of its own")
            found[sample.id] = number
            samples.append(sample)
        if not samples:
            raise DataError(f"{file}: empty; wanted one JSON object a line")
        return samples

    def score(self, sample: Sample, completion: str) -> Score | None:
        return None

    def _sample(self, line: str, where: str, number: int) -> Sample:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where}:{error.colno}: not JSON: {error.msg}; wanted one object a line, such as {_EXAMPLE}"
            ) from error
        except ValueError as error:  # a number of thousands of digits
            raise DataError(f"{where}: cannot be read: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: got {type(row).__name__}, wanted an object such as {_EXAMPLE}")
        names = _PROMPTS if self.prompt_field is None else (self.prompt_field,)
        name = next((name for name in names if name in row), None)
        if name is None:
            raise DataError(
                f"{where}: no field {' or '.join(names)}; it has {', '.join(map(repr, row)) or 'none'}; "
                "try data.prompt_field"
            )
        identity = next((str(row[key]) for key in _IDS if row.get(key) is not None), str(number))
        fields = {key: value for key, value in row.items() if key != name}
        value = row[name]
        if not identity:
            raise DataError(
                f"{where}: the id is an empty text, wanted one of its own; try without, for the line number"
            )
        try:
            json.dumps([identity, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: got {error.object[error.start]!a} in the id or the prompt, which is half a character; "
                "wanted text that can be written as UTF-8"
            ) from error
        if isinstance(value, str) and value:
            return Sample(id=identity, text=value, fields=fields)
        if name == "turns" and isinstance(value, list) and value and isinstance(value[0], str) and value[0]:
            return Sample(id=identity, text=value[0], fields=fields)
        if isinstance(value, list) and value and all(_is_turn(turn) for turn in value):
            return Sample(id=identity, messages=tuple(value), fields=fields)
        raise DataError(f"{where}: field {name!r} is {_short(value)}, wanted {_wanted(name)}")


def _lines(file: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1."""
    path = Path(file)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, raw in enumerate(lines, 1):
                line = _text(raw, f"{file}:{number}", "utf-8-sig" if number == 1 else "utf-8")
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read: {error}; wanted JSON Lines, a .gz file where it is packed") from error


def _text(raw: bytes, where: str, encoding: str) -> str:
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}:{error.start + 1}: got the byte {raw[error.start]:#x}, which is not UTF-8; save it as UTF-8 text"
        ) from error


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)


def _wanted(name: str) -> str:
    if name == "messages":
        return "a list of {'role': ..., 'content': ...}"
    return "a list that begins with a text" if name == "turns" else "a text that is not empty"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
