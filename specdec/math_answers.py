"""Whether the answer to a mathematical question is right, as math-verify reads it.

math-verify works in a process of its own: an answer such as 9^9^9^9 keeps it busy for ever, its own time limit is a
signal, which reaches only the main thread, and importing it takes half a second.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, final

from attrs import define, field

from specdec.errors import DataError

SECONDS = 15.0
_PROGRAM = Path(__file__).with_name("math_worker.py")
_HINT = "try python -m pip install 'specdec-lab[tasks]'"


def problem() -> str | None:
    """Why answers cannot be judged here, or None."""
    if importlib.util.find_spec("math_verify") is None:
        return f"answers are read by the package math-verify, which is missing; {_HINT}"
    return None


def right(gold: str, answer: str, seconds: float = SECONDS) -> bool:
    """Whether a text gives the wanted answer: its last \\boxed{} or, without one, its last expression or number.

    Args:
        gold: the wanted answer, LaTeX without dollar signs.
        answer: a whole completion, or a part of it.
        seconds: an answer that cannot be judged in this time is not right.

    Raises:
        DataError: math-verify is missing or cannot be imported.
    """
    return _WORKER.ask(gold, answer, seconds)


def last_boxed(text: str) -> str | None:
    """The last \\boxed{...} that is closed, with the word and its braces, or None."""
    found, opened = None, []  # where each brace that is open was opened, and whether that was a box
    for mark in re.finditer(r"\\boxed\{|[{}]", text):
        if mark[0] != "}":
            opened.append((mark.start(), mark[0] != "{"))
        elif opened:
            start, box = opened.pop()
            if box and (found is None or start > found[0]):
                found = (start, mark.end())
    return None if found is None else text[found[0] : found[1]]


@final
@define(eq=False)
class _Worker:
    """The process, started when it is first asked and again after an answer that was too much for it."""

    _process: subprocess.Popen[str] | None = field(init=False, default=None)
    _lock: threading.Lock = field(init=False, factory=threading.Lock)

    def ask(self, gold: str, answer: str, seconds: float) -> bool:
        with self._lock:
            if self._process is None:
                self._process = self._start()
            said = None
            try:
                said = self._exchange(self._process, json.dumps({"gold": gold, "answer": answer}), seconds)
            finally:
                if said is None:  # or what it says later would be taken for an answer to the next question
                    self.stop()
            return said is not None and said["right"] is True

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        if (why := problem()) is not None:
            raise DataError(why)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM.read_text(encoding="utf-8")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is not for it
        )
        said = self._exchange(process, None, 120.0)
        if said is None or said["ready"]:
            process.kill()
            process.communicate()
            why = "it does not start" if said is None else said["ready"]
            raise DataError(f"answers are read by the package math-verify, which cannot be used: {why}; {_HINT}")
        return process

    def _exchange(self, process: subprocess.Popen[str], line: str | None, seconds: float) -> dict[str, Any] | None:
        """Send a line and take one; None where none came in time, and the process has then been killed."""
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            if line is not None:
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
            said = process.stdout.readline()
            return json.loads(said) if said.endswith("\n") else None
        except OSError:  # it is no longer there
            return None
        finally:
            timer.cancel()


_WORKER = _Worker()
atexit.register(_WORKER.stop)
