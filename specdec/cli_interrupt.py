"""Ctrl-C between two steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stoppable() -> Iterator[list[int]]:
    """The first Ctrl-C only notes itself in the list, so that a step is never cut in two, nor the interrupt lost where
    Python drops what is raised, as in a `__del__`. The second is an interrupt as always.
    """
    stopped: list[int] = []

    def note(number: int, _: Any) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
