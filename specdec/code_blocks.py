"""The program in an answer of a chat model."""

from __future__ import annotations

import re

_PYTHON = ("python", "py", "python3")
_OPENS = re.compile(r"^(?P<before>.*?)(?P<fence>`{3,})[ \t]*(?P<language>[\w+.-]*)[ \t]*$")


def code_of(text: str, name: str) -> str:
    """The last block that defines a name, else the last block marked as Python, else the longest, else the text.

    A block that was not closed, since the answer was cut, goes to the end.

    Args:
        text: the answer, Markdown as a rule.
        name: of the function that is wanted; empty for any.
    """
    blocks = _blocks(text)
    codes = [code for _, code in blocks]
    if defining := [code for code in codes if defines(code, name)]:
        return defining[-1]
    if python := [code for language, code in blocks if language.lower() in _PYTHON]:
        return python[-1]
    return max(codes, key=len, default=text)


def defines(code: str, name: str) -> bool:
    """Whether code has a function or class, or assigns a variable, of a name, outside of everything else."""
    return re.search(rf"^(?:(?:(?:async\s+)?def|class)\s+{name}\b|{name}\s*[:=])", code, re.MULTILINE) is not None


def _blocks(text: str) -> list[tuple[str, str]]:
    """Language and code of every fenced block."""
    blocks: list[tuple[str, list[str]]] = []
    fence = indent = ""
    for line in text.splitlines():
        if fence and line.strip() == fence:
            fence = ""
        elif fence:
            blocks[-1][1].append(line.removeprefix(indent))
        elif found := _OPENS.match(line):
            fence = found["fence"]
            indent = "" if found["before"].strip() else found["before"]  # of a block in a list
            blocks.append((found["language"], []))
    return [(language, "\n".join(lines) + "\n") for language, lines in blocks]
