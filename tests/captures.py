"""CUDA graphs without CUDA: what runs inside `torch.cuda.graph` is recorded, op by op, and replayed at its addresses.

As a capture does, it refuses what needs a number on the host or brings one from there; no Python runs in a replay.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ON_THE_HOST = ("_local_scalar_dense", "lift_fresh", "nonzero", "is_nonzero", "equal")


class Recorded(TorchDispatchMode):
    """Stands for `torch.cuda.CUDAGraph`, and for its capture."""

    def __init__(self):
        super().__init__()
        self.ops, self.replays = [], 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket.__name__ in _ON_THE_HOST:
            raise RuntimeError(f"operation not permitted when stream is capturing: {op}")
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        self.ops.append((op, args, kwargs, out))
        return out

    def replay(self):
        self.replays += 1
        for op, args, kwargs, out in self.ops:
            for old, new in zip(tree_leaves(out), tree_leaves(op(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextmanager
def capture(graph, pool):
    with graph:
        yield


def without_cuda(monkeypatch):
    """Let targets on the CPU have `graphs="cuda"`; returns the graphs that are captured."""
    found = []

    def graph():
        found.append(Recorded())
        return found[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr("specdec.target.refusals", lambda *_: [])
    return found
