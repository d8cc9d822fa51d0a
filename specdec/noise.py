"""Uniform numbers that depend on nothing but the request, its own decode step, and what they are for.

Results therefore do not depend on batch mates, and all verifiers see the same numbers. Keys use the step, not the
position: a position can be visited in two steps, and position keys bias block verification.
"""

from __future__ import annotations

import hashlib
from typing import Literal, final

import torch
from attrs import frozen
from torch import Tensor

Stream = Literal["draft", "accept", "next"]
_STREAMS: dict[Stream, int] = {"draft": 1, "accept": 2, "next": 3}
_MOST = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def request_seed(seed: int, sample: str, repeat: int) -> int:
    """The seed of one request, so that prompts of a run do not share uniforms."""
    digest = hashlib.sha256(f"{seed}\x1f{sample}\x1f{repeat}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _signed(value: int) -> int:
    value &= _MOST
    return value - (1 << 64) if value >> 63 else value


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on int64 with wrap-around."""
    value = (value ^ _shift(value, 30)) * _signed(_FIRST)
    value = (value ^ _shift(value, 27)) * _signed(_SECOND)
    return value ^ _shift(value, 31)


def _key(value: int) -> int:
    """The same of the next state, on whole numbers below 2**64: a few rows are sooner mixed by the host alone."""
    value = (value + _GAMMA) & _MOST
    value = ((value ^ (value >> 30)) * _FIRST) & _MOST
    value = ((value ^ (value >> 27)) * _SECOND) & _MOST
    return value ^ (value >> 31)


@final
@frozen(eq=False)
class Noise:
    """The numbers of one step.

    Attributes:
        seeds: one request seed per row.
        steps: each row's own decode step.
        device: where the numbers are wanted.
    """

    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    device: torch.device | str = "cpu"

    def uniform(self, stream: Stream, count: int) -> Tensor:
        """Numbers in [0, 1), float64 [B, count] (float32 where the device has no float64)."""
        keys = [
            _key(_key(_key(seed) ^ step) ^ _STREAMS[stream]) for seed, step in zip(self.seeds, self.steps, strict=True)
        ]
        key = torch.tensor([_signed(key) for key in keys], dtype=torch.int64)
        bits = _mix((key.unsqueeze(1) ^ torch.arange(count, dtype=torch.int64)) + _signed(_GAMMA))
        device = torch.device(self.device)
        if device.type == "mps":
            return (_shift(bits, 40).to(torch.float32) / (1 << 24)).to(device)
        return (_shift(bits, 11).to(torch.float64) / (1 << 53)).to(device)
