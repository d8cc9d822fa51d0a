"""What a confined process runs, given to it as text: a program part by part, and after the last one a token.

It is no part of specdec there, and imports the standard library only. On stdin come a line with the lengths of all
parts, the parts, the token. The token is read when the last part has ended, not before, and is written to stdout; where
a part raises, that is written instead.
"""

import os
import sys
import types


def main() -> None:
    """Run what comes on stdin; never returns."""
    write, leave = os.write, os._exit  # the program may change those of the module
    source, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    module = types.ModuleType("program")
    sys.modules["program"] = module  # dataclasses, pickle and typing look for it there
    lengths = b""
    while not lengths.endswith(b"\n"):
        lengths += _read(source, 1)
    try:
        for number, length in enumerate(lengths.split(), 1):
            text = _read(source, int(length)).decode()
            exec(compile(text, f"part {number}", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:  # SystemExit is one
        answer = f"{type(error).__name__}: {error}"
    else:
        answer = _read(source, 32).decode()
    write(answers, answer.encode(errors="replace")[:300])
    leave(0)


def _read(source: int, count: int) -> bytes:
    found = b""
    while len(found) < count:
        if not (more := os.read(source, count - len(found))):
            break
        found += more
    return found


if __name__ == "__main__":
    main()
