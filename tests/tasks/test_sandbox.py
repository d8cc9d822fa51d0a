import os
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specdec import sandbox
from specdec.errors import DataError
from specdec.sandbox import run_program

SETPRIV = shutil.which("setpriv")
AS_ROOT = pytest.mark.skipif(
    not (SETPRIV and os.geteuid() == 0 and Path(sandbox._SYSTEM_PYTHON).exists()),
    reason="only root can be another user, by setpriv and the system's Python",
)
NEEDS_A_SANDBOX = pytest.mark.skipif(sandbox.problem() is not None, reason=f"no sandbox here: {sandbox.problem()}")
PLAIN_USER = 12345


def launched_by(monkeypatch, *options):
    """Let the launcher be started with other rights."""
    command = [SETPRIV, *options, sandbox._SYSTEM_PYTHON, "-I", "-S", sandbox.sandbox_launcher.__file__]
    monkeypatch.setattr(sandbox, "_launcher", lambda: command)
    sandbox._interpreter.cache_clear()


@pytest.fixture(params=["this user", pytest.param("a plain user", marks=AS_ROOT)])
def user(request, monkeypatch):
    """Root and others are confined in different ways."""
    if request.param == "a plain user":
        launched_by(monkeypatch, f"--reuid={PLAIN_USER}", f"--regid={PLAIN_USER}", "--clear-groups")
        if (why := sandbox.problem()) is not None:
            pytest.skip(f"no sandbox for a plain user here: {why}")
    yield request.param
    sandbox._interpreter.cache_clear()


# Catches: a right program that the limits are too narrow for.
@NEEDS_A_SANDBOX
@pytest.mark.parametrize(
    "parts",
    [
        ("def f(x): return x + 1", "assert f(1) == 2"),
        ("x = 1", "from __future__ import annotations\nassert x == 1"),
        ("def f(n): return n and 1 + f(n - 1)", "assert f(900) == 900"),
        ("if __name__ == '__main__': input()", "pass"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1", "assert A().x == 1"),
        ("import pickle\nclass A: pass", "assert type(pickle.loads(pickle.dumps(A()))) is A"),
        ("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()", "pass"),
        ("open('here', 'w').write('x')", "assert open('here').read() == 'x'"),
        ("print('é' * 100_000)", "pass"),
        ("import re, math, random, collections, itertools, functools, heapq, string, datetime, json", "pass"),
        ("a = 'é'\n" * 100_000, "pass"),
        ((),),
    ],
)
def test_a_right_program_passes(parts, user):
    outcome = run_program(*[part for part in parts if part])
    assert outcome.passed, outcome.why
    assert outcome.why == "passed"


ROOT_AND_OTHERS = ["this user", pytest.param("a plain user", marks=[AS_ROOT, pytest.mark.full])]


# Catches: an exit code that is taken for a pass; every right that is still there.
@NEEDS_A_SANDBOX
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import os; os._exit(0)", "the process ended before the program did"),
        ("import sys; sys.exit()", "SystemExit"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import os, sys; os.write(1, sys.stdin.buffer.read()); os._exit(0)", "the process ended before"),
        ("import os, sys; print(*sys.argv, *sys.orig_argv, os.environ, flush=True); os._exit(0)", "ended before"),
        ("def f(:", "SyntaxError"),
        ("class E(Exception):\n    def __str__(self): raise E\nraise E", "ended before"),
        ("while True: pass", "killed: processor time"),
        ("import time; time.sleep(60)", "not finished after 0.7 s"),
        ("while True: print('x' * 1_000_000)", "killed|not finished"),
        ("while True:\n    try:\n        while True: pass\n    except BaseException: pass", "killed: processor time"),
        (
            "import signal, time\nfor n in (2, 14, 15, 24): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)",
            "not finished",
        ),
        ("import os\nwhile True: os.fork()", "BlockingIOError"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "killed|not finished"),
        ("x = bytearray(3 << 30)", "MemoryError"),
        ("import os\nwhile True: os.open('/dev/null', 0)", "OSError.*Too many open files"),
        ("open('here', 'wb').write(bytes(2 << 20))", "OSError.*File too large"),
        ("for n in range(99): open(str(n), 'wb').write(bytes(1 << 20))", "OSError.*No space left"),
        ("import ctypes; ctypes.string_at(0)", "killed: .* a crash"),
        ("open('/dev/shm/specdec-test', 'w')", "Read-only|Permission"),
        ("import os; os.setuid(0)", "PermissionError|Invalid argument"),
        ("import os; os.chroot('/')", "PermissionError"),
        ("open('/proc/self/status')", "FileNotFoundError"),
        (
            "import os; assert os.getpid() != 1 or not os.getppid(), 'another process is seen'; raise KeyError",
            "KeyError",
        ),
        ("import numpy", "ModuleNotFoundError"),
        ("input()", "EOFError"),
    ],
)
@pytest.mark.parametrize("user", ROOT_AND_OTHERS, indirect=True)
def test_a_wrong_program_fails(program, why, user):
    outcome = run_program(program, "pass", cpu_seconds=1, seconds=0.7 if "not finished" in why else 20)
    assert not outcome.passed
    assert re.search(why, outcome.why), outcome.why
    assert outcome.seconds < 40


# Catches: a network that is reached where the machine has one, its loopback included.
@NEEDS_A_SANDBOX
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_nothing_reaches_the_network(kind, user):
    with socket.socket(socket.AF_INET, kind) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(0.2)
        if kind == socket.SOCK_STREAM:
            server.listen()
        program = (
            "import socket\n"
            f"s = socket.socket(socket.AF_INET, {int(kind)})\n"
            f"s.connect({server.getsockname()!r})\ns.send(b'x')"
        )
        outcome = run_program(program)
        assert not outcome.passed
        assert "Network is unreachable" in outcome.why
        with pytest.raises(TimeoutError):
            server.accept() if kind == socket.SOCK_STREAM else server.recv(1)


# Catches: a file that other users may write to, or that is the plain user's own, written to or removed.
@NEEDS_A_SANDBOX
@pytest.mark.parametrize("act", ["open({!r}, 'w')", "import os; os.remove({!r})", "import os; os.chmod({!r}, 0)"])
def test_a_file_outside_stays_as_it_is(tmp_path, act, user):
    file = tmp_path / "file"
    file.write_text("mine", encoding="utf-8")
    if os.geteuid() == 0:
        for path in (file, tmp_path):
            os.chown(path, PLAIN_USER, PLAIN_USER)
    file.chmod(0o777)
    tmp_path.chmod(0o777)
    outcome = run_program(act.format(str(file)))
    assert not outcome.passed
    assert "Read-only" in outcome.why or "Permission" in outcome.why or "permitted" in outcome.why
    assert file.read_text(encoding="utf-8") == "mine"
    assert file.stat().st_mode & 0o777 == 0o777


# Catches: what a program started that goes on when its time is over, in a session of its own.
@NEEDS_A_SANDBOX
@pytest.mark.parametrize("end", ["os._exit(0)", "time.sleep(60)"])
def test_nothing_is_left_running(tmp_path, monkeypatch, end, user):
    inside = tmp_path / "inside.py"
    inside.write_text(f"{sandbox._INSIDE.read_text(encoding='utf-8')}\n# {tmp_path}\n", encoding="utf-8")
    monkeypatch.setattr(sandbox, "_INSIDE", inside)
    orphan = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)\n"
    )
    run_program(orphan + end, seconds=1)
    assert not [pid for pid in map(str, all_pids()) if str(tmp_path) in command_of(pid)]


def all_pids():
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def command_of(pid):
    try:
        return Path("/proc", pid, "cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# Catches: an environment that is handed on, with what is secret in it.
@NEEDS_A_SANDBOX
def test_the_environment_is_bare(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    outcome = run_program("import os; raise KeyError(*sorted(os.environ))")
    assert outcome.why == "KeyError: ('HOME', 'LANG', 'PATH', 'PYTHONHASHSEED')"


# Catches: outcomes that depend on the order of sets, which differs from process to process.
@NEEDS_A_SANDBOX
def test_sets_have_the_same_order_every_time():
    program = "raise KeyError(str({str(n) for n in range(50)}))"
    assert run_program(program).why == run_program(program).why


# Catches: tests, or the token, that are in memory while the program runs.
@NEEDS_A_SANDBOX
def test_the_tests_are_not_read_before_the_program_has_ended():
    program = (
        "import sys\nseen = str(sys._getframe(1).f_locals)\nraise KeyError('need' + 'le' in seen, 'getframe' in seen)"
    )
    assert run_program(program, "needle").why == "KeyError: (False, True)"


# Catches: state that is shared between programs, signals that only the main thread may set.
@NEEDS_A_SANDBOX
def test_programs_may_run_side_by_side_in_threads():
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(run_program, [f"assert {number % 2}" for number in range(8)]))
    assert [outcome.passed for outcome in outcomes] == [bool(number % 2) for number in range(8)]


# Catches: a program that runs unconfined where the system has no sandbox.
def test_another_system_is_one_sentence(monkeypatch):
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(DataError, match=r"^sandbox: cannot be had here: the system is darwin; wanted Linux[^\n]*$"):
        run_program("pass")


# Catches: a denied unshare that is passed over.
@AS_ROOT
def test_a_denied_sandbox_is_one_sentence(monkeypatch):
    launched_by(monkeypatch, "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    with pytest.raises(DataError, match=r"^sandbox: cannot be had here: unshare: Operation not permitted; [^\n]*$"):
        run_program("pass")
    assert run_program("pass", confined=False).passed
    sandbox._interpreter.cache_clear()


# Catches: an unconfined program without limits, or one that leaves its group running.
@pytest.mark.skipif(os.name != "posix", reason="programs run on Linux and macOS only")
def test_an_unconfined_program_still_has_limits():
    assert run_program("def f(): return 1", "assert f() == 1", confined=False).passed
    assert run_program("import os; os._exit(0)", confined=False).why == "the process ended before the program did"
    assert run_program("import time; time.sleep(60)", seconds=0.5, confined=False).why == "not finished after 0.5 s"
    started = time.perf_counter()
    code = "import os, time\nif os.fork() == 0: time.sleep(60)"
    assert run_program(code, confined=False).passed
    assert time.perf_counter() - started < 30


# Catches: a launcher that cannot start, taken for a failed program.
def test_a_launcher_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(sandbox, "_launcher", lambda: [sys.executable, "-c", "raise SystemExit('no launcher')"])
    sandbox._interpreter.cache_clear()
    with pytest.raises(DataError, match="no launcher"):
        run_program("pass", confined=False)
    sandbox._interpreter.cache_clear()


# Catches: importing it, as tools that walk a package do, runs a program or ends the process.
def test_what_runs_inside_can_be_imported():
    done = subprocess.run([sys.executable, "-c", "import specdec.sandbox_program; print('alive')"], capture_output=True)
    assert done.stdout.split() == [b"alive"]
