"""What the machine can do, and what a side took of it: bytes read a second, and memory at its most."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_BYTES = 1 << 29  # more than any cache holds
_ROUNDS = 5
_PAUSE = 0.02  # seconds between two looks at the memory
_PAGE = 4096


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that a sum over much memory reads, the best of a few."""
    numbers = torch.ones(_BYTES // 4, device=device)
    best = 0.0
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        numbers.sum().item()
        best = max(best, _BYTES / (time.perf_counter() - start))
    return best


def weights(model: torch.nn.Module) -> int:
    """Bytes of all weights."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def weights_read(model: Any) -> int:
    """Bytes of the weights that one forward reads: all but input embeddings that are not the head as well."""
    shared = {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    looked_up = {id(parameter) for parameter in model.get_input_embeddings().parameters()} - shared
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in looked_up)


@contextmanager
def most_memory(device: torch.device) -> Iterator[list[int]]:
    """Afterwards the list holds one number: by how many bytes the process or the device grew inside, at most."""
    found: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found.append(torch.cuda.max_memory_allocated(device) - before)
        return
    done, most = threading.Event(), [before := _resident()]

    def look() -> None:
        while not done.wait(_PAUSE):
            most[0] = max(most[0], _resident())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        found.append(max(most[0], _resident()) - before)


def _resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    file = Path("/proc/self/statm")
    return int(file.read_text(encoding="ascii").split()[1]) * _PAGE if file.exists() else 0
