"""Several rules, of which one is enough."""

from __future__ import annotations

from functools import reduce
from itertools import accumulate
from typing import final

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from specdec.law import Dense
from specdec.probability import normalise
from specdec.target import Target
from specdec.verifier import Family, Need, Place, PointwiseVerifier, Replacement, Verifier


def _fit(_: object, __: object, value: tuple[Verifier, ...]) -> None:
    if len(value) < 2:
        raise ValueError(f"'rules' must be at least two, got {len(value)}")
    parts = [rule for rule in value if isinstance(rule, PointwiseVerifier)]
    if wrong := [type(rule).__name__ for rule in value if not isinstance(rule, PointwiseVerifier)]:
        raise ValueError(f"'rules' must decide place by place, and {', '.join(wrong)} does not")
    first, *others = map(_after_rejections, parts)
    if wrong := [type(rule).__name__ for rule, law in zip(parts[1:], others, strict=True) if not first.allclose(law)]:
        raise ValueError(
            f"'rules' must agree on what follows a rejection, and {', '.join(wrong)} differs from "
            f"{type(parts[0]).__name__}; try the option `replacement` where a rule has it"
        )


def _after_rejections(rule: PointwiseVerifier) -> Tensor:
    """What a rule draws from after rejecting each of four tokens, for one p and q."""
    p, q = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).expand(4, 2, 4).unbind(1)
    token = torch.arange(4)
    memory = torch.zeros((4, rule.memory), dtype=torch.float64) if rule.memory else None
    return normalise(rule.correct(Place(p, Dense(q), token, token * 0, p.log(), {}, memory)), p)[0]


@final
@frozen(kw_only=True)
class AnyOf(PointwiseVerifier):
    """Keeps a draft token that any of its rules keeps, all of them seeing the same uniform number.

    Formula: a(x) = max over rules of a_i(x); replacement and bonus those of the first rule.
    Source: none; what systems call a fallback or an "or".
    Guarantee: none of its own. Rules whose replacements differ are refused, for no one of them would be right.
    Cost: the sum of the rules'.

    Attributes:
        rules: two or more rules, `{use: NAME, ...}` each.
    """

    exactness = "lossy"

    rules: tuple[Verifier, ...] = field(converter=tuple, validator=_fit)

    @property
    def family(self) -> Family:
        return "standard_or_set" if self.dominates_standard else "set_only"

    @property
    def dominates_standard(self) -> bool:
        return any(rule.dominates_standard for rule in self.rules)

    @property
    def replacement(self) -> Replacement:
        return self._parts[0].replacement

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset().union(*(rule.needs for rule in self.rules))

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(sorted({tap for rule in self.rules for tap in rule.taps}))

    @property
    def memory(self) -> int:
        return sum(rule.memory for rule in self.rules)

    def prepare(self, target: Target | None) -> None:
        for rule in self.rules:
            rule.prepare(target)

    def start(self, prompt: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(number for rule in self.rules for number in rule.start(prompt))

    def acceptance(self, at: Place) -> Tensor:
        every = [rule.acceptance(own) for rule, own in zip(self._parts, self._places(at), strict=True)]
        return reduce(torch.maximum, every)

    def correct(self, at: Place) -> Tensor:
        return self._parts[0].correct(self._places(at)[0])

    def law(self, at: Place) -> Tensor | None:
        plain = all(type(rule).law is PointwiseVerifier.law for rule in self._parts)
        return super().law(at) if plain else None

    def advance(self, at: Place) -> Tensor | None:
        if at.memory is None:
            return None
        after = [rule.advance(own) for rule, own in zip(self._parts, self._places(at), strict=True)]
        return torch.cat([part for part in after if part is not None], -1)

    def follow(self, tokens: Tensor, memory: Tensor) -> Tensor:
        parts = [rule.follow(tokens, memory[..., own]) for rule, own in zip(self._parts, self._slices, strict=True)]
        return torch.cat(parts, -1)

    @property
    def _parts(self) -> list[PointwiseVerifier]:
        return [rule for rule in self.rules if isinstance(rule, PointwiseVerifier)]

    @property
    def _slices(self) -> list[slice]:
        ends = list(accumulate(rule.memory for rule in self.rules))
        return [slice(end - rule.memory, end) for rule, end in zip(self.rules, ends, strict=True)]

    def _places(self, at: Place) -> list[Place]:
        """What each rule sees: its own part of the memory."""
        if at.memory is None:
            return [at] * len(self.rules)
        return [evolve(at, memory=at.memory[..., own]) for own in self._slices]
