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


def request_seed(seed: int, sample: str, repeat: int) -> int:
    """The seed of one request, so that prompts of a run do not share uniforms."""
    digest = hashlib.sha256(f"{seed}\x1f{sample}\x1f{repeat}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on int64 with wrap-around."""
    value = (value ^ _shift(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift(value, 31)


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
        gamma = _signed(0x9E3779B97F4A7C15)
        key = _mix(torch.tensor([_signed(seed) for seed in self.seeds], dtype=torch.int64) + gamma)
        key = _mix((key ^ torch.tensor(self.steps, dtype=torch.int64)) + gamma)
        key = _mix((key ^ _STREAMS[stream]) + gamma)
        bits = _mix((key.unsqueeze(1) ^ torch.arange(count, dtype=torch.int64)) + gamma)
        device = torch.device(self.device)
        if device.type == "mps":
            return (_shift(bits, 40).to(torch.float32) / (1 << 24)).to(device)
        return (_shift(bits, 11).to(torch.float64) / (1 << 53)).to(device)
