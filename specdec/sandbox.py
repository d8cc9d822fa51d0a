"""Programs that a model wrote, each in a process of its own with next to no rights.

The sandbox is meant for programs by language models, which go wrong in every way but do not look for their judge. It
is no defence against an attacker: docs/tasks.md says what it prevents and what it does not.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, final

from attrs import frozen

from specdec import sandbox_launcher
from specdec.errors import DataError

CPU_SECONDS = 5
SECONDS = 15.0
MEMORY = 1 << 30
_SYSTEM_PYTHON = "/usr/bin/python3"
_INSIDE = Path(__file__).with_name("sandbox_program.py")


@final
@frozen
class Outcome:
    """What became of a program.

    Attributes:
        passed: every part ran to its end.
        why: why not, such as `AssertionError: `; `passed` where it did.
        seconds: wall-clock time, with the start of the process.
    """

    passed: bool
    why: str
    seconds: float


def run_program(
    *parts: str, cpu_seconds: int = CPU_SECONDS, seconds: float = SECONDS, confined: bool = True
) -> Outcome:
    """Run a Python program, part by part in one module, in a new process. It has passed if its last part ended.

    The process has no network, sees no other process, can write to an empty folder only, runs as another user where
    specdec runs as root, and has limits on time, memory (1 GiB), files and processes. It has the standard library only.

    Args:
        parts: Python source, such as a model's answer and the tests; what one defines, the next ones see.
        cpu_seconds: of one process.
        seconds: of wall-clock time; the process and all that it started are then killed.
        confined: False does without what only Linux has, and not everywhere: the program can then do what the user can,
            but for the limits.

    Raises:
        DataError: it cannot be confined here.
    """
    if os.name != "posix":
        raise DataError(f"sandbox: programs cannot be run on {sys.platform}; wanted Linux, or macOS unconfined")
    if confined and (why := problem()) is not None:
        raise DataError(f"sandbox: cannot be had here: {why}; wanted Linux 5.12 or later and the right to unshare")
    return _run(parts, _interpreter(confined=confined)[0], cpu_seconds, seconds, confined=confined)


def problem() -> str | None:
    """Why programs cannot be confined here, or None."""
    if sys.platform != "linux":
        return f"the system is {sys.platform}"
    return _interpreter(confined=True)[1]


@functools.cache
def _interpreter(*, confined: bool) -> tuple[str, str | None]:
    """A Python that starts there, or why none does. This one's may lie where the other user cannot go."""
    why = None
    for python in (os.path.realpath(sys.executable), _SYSTEM_PYTHON):
        try:
            outcome = _run((), python, CPU_SECONDS, SECONDS, confined=confined)
        except DataError as error:
            why = why or str(error)
        else:
            if outcome.passed:
                return python, None
            why = why or f"{python} does not start: {outcome.why}"
    return os.path.realpath(sys.executable), why


def _run(parts: tuple[str, ...], python: str, cpu_seconds: int, seconds: float, *, confined: bool) -> Outcome:
    token = secrets.token_hex(16)
    job = {
        # -I would also drop the hash seed, which makes the order of sets, and so the outcome, the same every time.
        "argv": [python, "-s", "-S", "-B", "-c", _INSIDE.read_text(encoding="utf-8")],
        "environment": {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/nowhere", "PYTHONHASHSEED": "0"},
        "limits": {"AS": MEMORY, "CPU": cpu_seconds, "FSIZE": 1 << 20, "NOFILE": 64, "CORE": 0, "NPROC": 16},
        "seconds": seconds,
        "confined": confined,
    }
    with (
        tempfile.TemporaryDirectory(prefix="specdec-", ignore_cleanup_errors=True) as folder,
        # Files and no pipes: nobody waits for anybody, and the program can write no more than its limit.
        tempfile.TemporaryFile() as program,
        tempfile.TemporaryFile() as answers,
        tempfile.TemporaryFile() as complaints,
    ):
        sources = [part.encode(errors="replace") for part in parts]
        program.write(b" ".join(b"%d" % len(source) for source in sources) + b"\n" + b"".join(sources))
        program.write(token.encode())
        program.seek(0)
        Path(folder).chmod(0o777)  # its user may be another one
        started = time.perf_counter()
        code = _wait([*_launcher(), json.dumps(job)], folder, program, answers, complaints)
        took = time.perf_counter() - started
        said, complaint = _text(answers), _text(complaints)
    if code == sandbox_launcher.REFUSED:
        raise DataError(complaint)
    if code not in (0, sandbox_launcher.KILLED, sandbox_launcher.LATE):
        raise DataError(f"the launcher ended with {code}: {complaint}")
    if said == token:
        return Outcome(True, "passed", took)
    if code == sandbox_launcher.LATE:
        return Outcome(False, f"not finished after {seconds:g} s", took)
    if code == sandbox_launcher.KILLED:
        return Outcome(False, "killed: processor time, memory, or a crash", took)
    return Outcome(False, said or "the process ended before the program did", took)


def _launcher() -> list[str]:
    return [sys.executable, "-I", "-S", sandbox_launcher.__file__]


def _wait(command: list[str], folder: str, program: IO[bytes], answers: IO[bytes], complaints: IO[bytes]) -> int:
    """The exit code. The launcher keeps to the time itself."""
    process = subprocess.Popen(
        command, cwd=folder, env={}, stdin=program, stdout=answers, stderr=complaints, start_new_session=True
    )
    try:
        return process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _text(file: IO[Any]) -> str:
    file.seek(0)
    return " ".join(str(file.read(300), "utf-8", "replace").split()).removesuffix(":")
