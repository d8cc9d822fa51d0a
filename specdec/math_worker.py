"""Given as text to a process of its own by `specdec.math_answers`: reads answers with math-verify.

One JSON object a line: `{"gold": ..., "answer": ...}` is answered by `{"right": ...}`. The first line says
`{"ready": ...}`: an empty text, or why there will be no other.
"""

import json
import os
import sys

MEMORY = 4 << 30


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints is an answer
    why = ""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):  # not everywhere; the time is bounded all the same
        pass
    try:
        from math_verify import parse, verify
    except Exception as error:  # a package of a version that does not fit may raise anything
        why = f"{type(error).__name__}: {error}"
    print(json.dumps({"ready": why}), file=answers, flush=True)
    for line in sys.stdin if not why else ():
        asked = json.loads(line)
        try:
            right = bool(verify(parse(f"${asked['gold']}$"), parse(asked["answer"])))  # gold first: not symmetric
        except Exception:  # what cannot be read is not right
            right = False
        print(json.dumps({"right": right}), file=answers, flush=True)


if __name__ == "__main__":
    main()
