"""One rule inside a span of the text, another outside."""

from __future__ import annotations

from typing import final

import torch
from attrs import define, evolve, field
from torch import Tensor

from specdec.errors import CompatibilityError
from specdec.target import Target
from specdec.verifier import Exactness, Family, Need, Place, PointwiseVerifier, Replacement, Verifier


def _pointwise(_: object, attribute: object, value: Verifier) -> None:
    if not isinstance(value, PointwiseVerifier):
        raise ValueError(f"must decide place by place, and {type(value).__name__} does not")


@final
@define(kw_only=True, eq=False)
class Gated(PointwiseVerifier):
    """Keeps inside a span, such as a thinking block, what one rule keeps, and outside what another keeps.

    Formula: a(x) = a_inside(x) after `begin` until `end`, else a_outside(x); replacement and bonus likewise. Where the
    text is, is known from the tokens before the place alone: the pending one first, then the kept ones.
    Source: TensorRT-LLM's relaxed acceptance in the thinking phase is this with `relaxed` inside.
    Guarantee: where both rules are lossless it is lossless; otherwise that of each rule on its side.
    Cost: the sum of the rules'.

    Attributes:
        inside: the rule of the span, `{use: NAME, ...}`.
        outside: the rule of everything else.
        begin: the token that opens the span, as text or id. It is itself decided outside.
        end: the token that closes it, decided inside.
    """

    inside: Verifier = field(validator=_pointwise)
    outside: Verifier = field(validator=_pointwise)
    begin: str | int = "<think>"
    end: str | int = "</think>"
    _begin: int | None = field(init=False, default=None)
    _end: int | None = field(init=False, default=None)

    @property
    def family(self) -> Family:
        return self.inside.family if self.inside.family == self.outside.family else "other"

    @property
    def exactness(self) -> Exactness:
        return "lossless" if {rule.exactness for rule in self._rules} == {"lossless"} else "lossy"

    @property
    def dominates_standard(self) -> bool:
        return all(rule.dominates_standard for rule in self._rules)

    @property
    def replacement(self) -> Replacement:
        """Of the rule inside; counters do not tell the sides apart."""
        return self._rules[0].replacement

    @property
    def needs(self) -> frozenset[Need]:
        return self.inside.needs | self.outside.needs

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(sorted({*self.inside.taps, *self.outside.taps}))

    @property
    def memory(self) -> int:
        return 1 + self.inside.memory + self.outside.memory

    def prepare(self, target: Target | None) -> None:
        for rule in self._rules:
            rule.prepare(target)
        self._begin, self._end = _id(self.begin, "begin", target), _id(self.end, "end", target)

    def start(self, prompt: tuple[int, ...]) -> tuple[float, ...]:
        marks = [token for token in prompt if token in (self._begin, self._end)]
        return (float(marks[-1:] == [self._begin]), *self.inside.start(prompt), *self.outside.start(prompt))

    def acceptance(self, at: Place) -> Tensor:
        inside, outside = (rule.acceptance(own) for rule, own in self._sides(at))
        return torch.where(self._open(at).unsqueeze(-1), inside, outside)

    def correct(self, at: Place) -> Tensor:
        inside, outside = (rule.correct(own) for rule, own in self._sides(at))
        return torch.where(self._open(at).unsqueeze(-1), inside, outside)

    def law(self, at: Place) -> Tensor | None:
        inside, outside = (rule.law(own) for rule, own in self._sides(at))
        return None if inside is None or outside is None else torch.where(self._open(at).unsqueeze(-1), inside, outside)

    def advance(self, at: Place) -> Tensor | None:
        memory = _remembered(at)
        opened = self._open(at).unsqueeze(-1)
        parts = [memory[..., :1]]
        for here, (rule, own) in zip((opened, ~opened), self._sides(at), strict=True):
            if own.memory is not None and (after := rule.advance(own)) is not None:
                parts.append(torch.where(here, after, own.memory))
        return torch.cat(parts, -1)

    def follow(self, tokens: Tensor, memory: Tensor) -> Tensor:
        assert self._begin is not None  # prepared
        assert self._end is not None
        opened = memory[..., 0].masked_fill(tokens.eq(self._end), 0.0).masked_fill(tokens.eq(self._begin), 1.0)
        parts = [rule.follow(tokens, memory[..., own]) for rule, own in zip(self._rules, self._slices, strict=True)]
        return torch.cat([opened.unsqueeze(-1), *parts], -1)

    @property
    def _rules(self) -> tuple[PointwiseVerifier, PointwiseVerifier]:
        assert isinstance(self.inside, PointwiseVerifier)  # their validators
        assert isinstance(self.outside, PointwiseVerifier)
        return self.inside, self.outside

    @property
    def _slices(self) -> tuple[slice, slice]:
        middle = 1 + self.inside.memory
        return slice(1, middle), slice(middle, self.memory)

    def _open(self, at: Place) -> Tensor:
        return _remembered(at)[..., 0] > 0

    def _sides(self, at: Place) -> list[tuple[PointwiseVerifier, Place]]:
        memory = _remembered(at)
        return [
            (rule, evolve(at, memory=memory[..., own] if rule.memory else None))
            for rule, own in zip(self._rules, self._slices, strict=True)
        ]


def _remembered(at: Place) -> Tensor:
    assert at.memory is not None  # there is always one number at least
    return at.memory


def _id(token: str | int, option: str, target: Target | None) -> int:
    """The id of a token that is given as text.

    Raises:
        CompatibilityError: it is none of the target's.
    """
    if isinstance(token, int):
        return token
    tokenizer = None if target is None else target.tokenizer
    if tokenizer is None:
        raise CompatibilityError(
            f"gated.{option}: {token!r} needs the target's tokenizer and there is none; give an id"
        )
    found = tokenizer(token, add_special_tokens=False)["input_ids"]
    if len(found) != 1:
        raise CompatibilityError(
            f"gated.{option}: {token!r} is {len(found)} tokens of the target, wanted one; give another text or an id"
        )
    return int(found[0])
