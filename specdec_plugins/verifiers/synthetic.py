"""A fixed acceptance rate, whatever the models say."""

from __future__ import annotations

from typing import Any, final

import torch
from attrs import field, frozen
from torch import Tensor

from specdec.verifier import FastAccept, Place, PointwiseVerifier


def _rates(_: Any, attribute: Any, value: tuple[float, ...]) -> None:
    if any(not 0.0 <= rate <= 1.0 for rate in value) or list(value) != sorted(value, reverse=True):
        raise ValueError(f"'{attribute.name}' must be between 0 and 1 and must not rise: {value}")


def _length(rule: Any, attribute: Any, value: float | None) -> None:
    if value is not None and value < 1.0:
        raise ValueError(f"'{attribute.name}' must be >= 1: {value}")
    if (value is None) == (not rule.rates):
        raise ValueError(f"'{attribute.name}' must be given without rates, or rates without it")


@final
@frozen(kw_only=True)
class Synthetic(PointwiseVerifier, FastAccept):
    """Keeps draft tokens at a wanted rate. A tool to measure the cost of a system: the text it makes means nothing.

    Formula: a = rates[i] / rates[i - 1] for the draft token at depth i, with rates[-1] = 1 and 0 past the last; p
    follows. An acceptance length L stands for the rates 1 for floor(L - 1) tokens, then the fraction that is left, then
    0.
    Source: `synthetic_acceptance_rates` and `synthetic_acceptance_length` of vLLM.
    Guarantee: a draft of enough tokens is kept to each depth with the rate given, and nothing about the text.
    Cost: O(1) per draft node.

    Attributes:
        rates: share of the drafts of which at least 1, 2, ... tokens are kept.
        acceptance_length: wanted mean of emitted tokens per verification, the token after the draft included.
    """

    rates: tuple[float, ...] = field(default=(), converter=tuple, validator=_rates)
    acceptance_length: float | None = field(default=None, validator=_length)

    family = "other"
    exactness = "lossy"
    replacement = "target"

    def acceptance(self, at: Place) -> Tensor:
        return self._keep(at).unsqueeze(-1).expand_as(at.p)

    def accept_at(self, at: Place) -> Tensor:
        return self._keep(at) * (at.token >= 0)

    def correct(self, at: Place) -> Tensor:
        return at.p

    def _keep(self, at: Place) -> Tensor:
        if self.acceptance_length is None:
            rates = [1.0, *self.rates]
        else:
            whole = int(self.acceptance_length)
            rates = [1.0] * whole + [self.acceptance_length - whole]
        steps = [after / before if before else 0.0 for before, after in zip(rates, [*rates[1:], 0.0], strict=True)]
        table = torch.tensor(steps, dtype=at.p.dtype, device=at.p.device)
        return table[at.depth.clamp(max=len(steps) - 1)]
