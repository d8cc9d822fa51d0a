"""Run as a process of its own by `specdec.sandbox`: takes rights away from itself, then becomes the program.

It is run by its file name, without specdec, and imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

REFUSED = 70  # exit code: the limits or the namespaces cannot be had; stderr says why
KILLED = 71  # the program was killed, by one of its limits or by itself
LATE = 72  # the program was killed because its time was over

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 1, 2, 4, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_NOBODY = 65534


def main() -> None:
    """Run one program in the current folder, which is all that a confined one may write to.

    The argument is a JSON object: the program's `argv` and `environment`, its `limits` (names of `resource` without
    RLIMIT_ -> number), `seconds` of wall-clock time, and whether it is `confined`.
    """
    job = json.loads(sys.argv[1])
    user = 1_900_000_000 + os.getpid()
    children: list[int] = []
    late = False

    def stop(*_: object) -> None:
        nonlocal late
        late = True
        for child in children:
            _kill(child)

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, job["seconds"], 0.1)  # again and again: the first may come before the child
    with _refusing(2):
        if job["confined"]:
            _leave_the_world(Path.cwd())
        child = os.fork()
    if child == 0:
        complaints = os.dup(2)  # closed by exec
        with _refusing(complaints):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            _become(job, user)
    children.append(child)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _kill(child)  # what is left of its group; of a confined one nothing is, its namespace ended with it
    os._exit(LATE if late else REFUSED if code == REFUSED else KILLED if code < 0 else 0)


def _kill(child: int) -> None:
    """The child's whole group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)


def _become(job: Mapping[str, Any], user: int) -> None:
    """Give up the rest of the rights and exec."""
    os.setpgid(0, 0)
    _limit(job["limits"], strict=job["confined"])
    if os.geteuid() == 0:
        _become_user(user)
    if sys.platform == "linux":
        _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.execve(job["argv"][0], job["argv"], job["environment"])


@contextlib.contextmanager
def _refusing(complaints: int) -> Iterator[None]:
    """Nothing runs with more rights than were meant: what cannot be had is said, and ends the process."""
    try:
        yield
    except Exception as error:  # whatever failed, a right was not given up
        os.write(complaints, str(error).encode())
        os._exit(REFUSED)


def _leave_the_world(folder: Path) -> None:
    """No network, no other processes, nothing to write to but `folder`, which is then empty."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEWNET | _NEWPID | _NEWNS | _NEWIPC | (_NEWUSER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    read_only = (ctypes.c_uint64 * 4)(_ATTR_RDONLY, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(read_only), ctypes.sizeof(read_only))
    flags = _MS_NOSUID | _MS_NODEV
    for hidden in ("/proc", "/run"):  # other processes, sockets of services
        if Path(hidden).is_dir():
            _call("mount", b"none", hidden.encode(), b"tmpfs", flags | _MS_RDONLY, b"size=4k")
    _call("mount", b"none", os.fsencode(folder), b"tmpfs", flags, b"size=16m,nr_inodes=1k,mode=0777")
    os.chdir(folder)


def _limit(limits: Mapping[str, int], *, strict: bool) -> None:
    import resource  # Windows has none

    for name, most in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        except (AttributeError, ValueError, OSError) as error:
            if strict:
                raise OSError(f"limit {name} of {most}: {error}") from error


def _become_user(user: int) -> None:
    """One that nothing else runs as, since processes are counted by user; nobody where ids are few."""
    os.setgroups([])
    for candidate in (user, _NOBODY):
        try:
            os.setresgid(candidate, candidate, candidate)
            os.setresuid(candidate, candidate, candidate)
        except OSError:
            continue
        return
    raise PermissionError("root cannot become another user")


def _call(name: str, *arguments: Any) -> None:
    """A function of the C library."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        raise OSError(f"{'mount_setattr' if name == 'syscall' else name}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
