"""specdec: verification rules of speculative decoding, compared and used on equal footing.

Names are loaded when they are first used: importing this package brings in neither transformers nor any strategy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.drafter import Drafter
    from specdec.engine import Engine
    from specdec.generation import generate
    from specdec.kv import KVCacheManager
    from specdec.progress import Completion, Event
    from specdec.scheduler import Scheduler
    from specdec.target import Target
    from specdec.task import Sample, Task
    from specdec.types import Draft, Kept, Request, Sampling, Scores, Verdict
    from specdec.verifier import FastAccept, Place, PointwiseVerifier, Verifier

_HOMES = {
    "drafter": ("Drafter",),
    "engine": ("Engine",),
    "generation": ("generate",),
    "kv": ("KVCacheManager",),
    "progress": ("Completion", "Event"),
    "scheduler": ("Scheduler",),
    "target": ("Target",),
    "task": ("Sample", "Task"),
    "types": ("Draft", "Kept", "Request", "Sampling", "Scores", "Verdict"),
    "verifier": ("FastAccept", "Place", "PointwiseVerifier", "Verifier"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Draft",
    "Drafter",
    "Engine",
    "Event",
    "FastAccept",
    "KVCacheManager",
    "Kept",
    "Place",
    "PointwiseVerifier",
    "Request",
    "Sample",
    "Sampling",
    "Scheduler",
    "Scores",
    "Target",
    "Task",
    "Verdict",
    "Verifier",
    "generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(import_module(f"specdec.{_HOME[name]}"), name)
