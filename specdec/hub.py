"""Whether a model hub answers. A hub that does not costs two seconds, not the minutes of a client that tries again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 2.0


def answers(seconds: float = SECONDS) -> bool:
    """Ask the hub that huggingface_hub is set to for anything at all; False at once where it is set to be offline.

    The question runs in a thread of its own, because looking up a name waits as long as the system likes.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        from huggingface_hub import get_session

        try:
            get_session().head(constants.ENDPOINT, timeout=seconds)
        except Exception:  # every client library has its own
            return
        answered.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return answered.is_set()


@contextmanager
def left_alone() -> Iterator[None]:
    """Keep huggingface_hub from asking while the block runs.

    To be told to look at local files only is not enough for it: for its own statistics it asks all the same, and waits.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
