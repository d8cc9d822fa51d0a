"""JSON Lines files: one object a line, plain or packed. Whatever is wrong with one is said with its line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.errors import DataError

_EXAMPLE = '{"prompt": "..."}'


def rows(file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file, read one by one, with the numbers of their lines from 1; blank lines are skipped.

    Args:
        file: its path; it is unpacked where it ends in .gz.

    Raises:
        DataError: it cannot be read, or a line is no object.
    """
    for number, line in _lines(file):
        yield number, _row(line, f"{file}:{number}")


def refuse_half_characters(value: Any, where: str) -> None:
    """See that plain data can be written as UTF-8, as prompts and ids will be.

    Raises:
        DataError: it holds a lone surrogate.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: got {error.object[error.start]!a} in the id or the prompt, which is half a character; "
            "wanted text that can be written as UTF-8"
        ) from error


def short(value: Any) -> str:
    """A value as JSON for a message, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}:{error.colno}: not JSON: {error.msg}; wanted one object a line, such as {_EXAMPLE}"
        ) from error
    except RecursionError as error:
        raise DataError(f"{where}: nested too deeply; wanted an object of a few levels") from error
    except ValueError as error:  # a number of thousands of digits
        raise DataError(f"{where}: cannot be read: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: got {type(row).__name__}, wanted an object such as {_EXAMPLE}")
    return row


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
