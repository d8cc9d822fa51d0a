"""What a rule says of itself at one position, as its own acceptance, replacement and law define it there.

A check is a function of a `Subject`. It answers with a few words and its figures, or raises `Failed` or `DoesNotApply`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from attrs import evolve, frozen
from torch import Tensor

from specdec import theory
from specdec.law import Dense, PointMass
from specdec.probability import at as gather
from specdec.probability import normalise, total_variation
from specdec.subject import TOLERANCE, DoesNotApply, Failed, Said, Subject, simplices
from specdec.verifier import Place, PointwiseVerifier


@final
@frozen(eq=False)
class Position:
    """A rule's definition at places [C]: p, q and acceptance of each token [C, V], what follows after it [C, V, V]."""

    p: Tensor
    q: Tensor
    acceptance: Tensor
    follow: Tensor

    @property
    def law(self) -> Tensor:
        """Of the emitted token, [C, V]."""
        return theory.output_law(self.q, self.acceptance, self.follow)

    @property
    def accepted(self) -> Tensor:
        """The probability of keeping the draft token, [C]."""
        return (self.q * self.acceptance).sum(-1)

    @property
    def line(self) -> Tensor:
        """Acceptance beyond the standard rule's, which no rule's total variation is below, [C]."""
        return (self.accepted - (1 - theory.rejection(self.p, self.q))).clamp(min=0)


def token_places(subject: Subject, p: Tensor, q: Tensor, after: Tensor, depth: int, memory: Tensor | None) -> Place:
    """Places [C, V], one for each token that could be drafted, from p, q [C, V] and the laws after each, [C, V, V]."""
    count, size = p.shape
    token = torch.arange(size).expand(count, size)
    deterministic = "draft_law" not in subject.verifier.needs and bool(((q == 0) | (q == 1)).all())
    return Place(
        p=p.unsqueeze(1).expand(-1, size, -1),
        q=PointMass(token, size, p.dtype) if deterministic else Dense(q.unsqueeze(1).expand(-1, size, -1)),
        token=token,
        depth=torch.full_like(token, depth),
        logits=subject.raw(p).unsqueeze(1).expand(-1, size, -1),
        hidden=subject.features(after),
        memory=None if memory is None else memory.unsqueeze(1).expand(-1, size, -1),
    )


def decided(rule: PointwiseVerifier, at: Place, q: Tensor) -> Position:
    """What the rule does at places [C, V] of drafts from q [C, V]."""
    p = at.p[:, 0]
    return Position(p, q, gather(rule.acceptance(at), at.token), normalise(rule.correct(at), at.p)[0])


def positions(subject: Subject, count: int, seed: int = 0) -> Iterator[tuple[Place, Position]]:
    """Random places of several vocabularies and depths, with zeros, without, with point masses where it knows them."""
    rule = subject.pointwise
    # Enumeration of whole drafts ends at three tokens; deeper places are looked at by themselves.
    for size, kind, depth in (
        (2, "soft", 0),
        (3, "soft", 1),
        (5, "zeros", 3),
        (8, "zeros", 7),
        (5, "point", 15),
        (40, "soft", 40),
    ):
        if kind == "point" and "draft_law" in rule.needs:
            continue
        p = simplices((count, size), seed + size, torch.float64, zeros=kind == "zeros")
        q = simplices((count, size), seed + size + 100, torch.float64, zeros=kind == "zeros")
        if kind == "point":
            q = torch.nn.functional.one_hot(q.argmax(-1), size).double()
        after = simplices((count, size, size), seed + 200, torch.float64, zeros=False)
        at = token_places(subject, p, q, after, depth, subject.memories(count, seed))
        yield at, decided(rule, at, q)


def acceptance_and_replacement(subject: Subject) -> Said:
    """Acceptance is a probability, the replacement a law up to a constant wherever a rejection is possible."""
    rule, low, high = subject.pointwise, 1.0, 0.0
    for at, position in positions(subject, 60):
        every, weights = rule.acceptance(at), rule.correct(at)
        low, high = min(low, float(every.min())), max(high, float(every.max()))
        if not bool(((every >= 0) & (every <= 1 + 1e-12)).all()):
            low, high = float(every.min()), float(every.max())
            raise Failed(f"acceptance reaches from {low:.6g} to {high:.6g}, wanted probabilities", low=low, high=high)
        if not bool((weights >= 0).all()):
            raise Failed(f"correct gives {float(weights.min()):.3g}, wanted no negative number")
        lost = position.q * (1 - position.acceptance)
        if bool(((lost > 1e-6) & (weights.sum(-1) <= 1e-8)).any()):
            raise Failed("correct is all zero where a rejection is possible")
        none = torch.full_like(at.token, -1)
        bonus = rule.correct(evolve(at, token=none, q=PointMass(none, at.p.shape[-1], at.p.dtype)))
        if not bool((bonus >= 0).all()) or not bool((bonus.sum(-1) > 1e-8).all()):
            raise Failed("correct gives no law for the bonus token, where token is -1 and q is zero everywhere")
    return f"acceptance from {low:.3g} to {high:.3g}", {"low": low, "high": high}


def family(subject: Subject) -> Said:
    """What a rule of its family must be at one position."""
    rule = subject.verifier
    if rule.family == "lossless":
        return _lossless_places(subject)
    off = below = binary = depends = deviation = 0.0
    standard = True
    for at, position in positions(subject, 60 if subject.quick else 300):
        variation = total_variation(position.law, position.p)
        off = max(off, largest((variation - position.line).abs()))
        below = max(below, largest(theory.standard_acceptance(position.p, position.q) - position.acceptance))
        binary = max(binary, largest(torch.minimum(position.acceptance, 1 - position.acceptance)))
        deviation = max(deviation, largest(variation))
        residual, lost = normalise((position.p - position.q).clamp(min=0), position.p)
        seen = (position.q * (1 - position.acceptance) > 1e-9) & ~lost.unsqueeze(-1)
        standard &= bool(((position.follow - residual.unsqueeze(1)).abs().amax(-1) * seen < 1e-9).all())
        if rule.family == "set_only":
            other = evolve(at, q=Dense(simplices(tuple(at.p.shape), 7, torch.float64)))
            change = subject.pointwise.acceptance(at) - subject.pointwise.acceptance(other)
            depends = max(depends, largest(change.abs()))
    figures = {"off_line": off, "total_variation": deviation}
    if rule.family == "standard_or_set":
        if below > TOLERANCE:
            raise Failed(f"keeps a token with {below:.3g} less than the standard rule does", **figures)
        if not standard:
            raise Failed("what follows a rejection is not norm((p - q)+)", **figures)
        if off > TOLERANCE:
            raise Failed(f"total variation and extra acceptance differ by up to {off:.3g}", **figures)
        return (
            f"a >= min(1, p/q), residual (p - q)+, TV = extra acceptance to {off:.0e}, TV up to {deviation:.2f}",
            figures,
        )
    if rule.family == "set_only":
        if binary > TOLERANCE:
            raise Failed(f"an acceptance is {binary:.3g} away from both 0 and 1, wanted a set", **figures)
        if depends > TOLERANCE:
            raise Failed(f"acceptance changes by up to {depends:.3g} with q, wanted a set of p alone", **figures)
        return f"a set of p alone, up to {off:.2f} above the line TV = extra acceptance", figures
    if off <= TOLERANCE:
        return f"on the line TV = extra acceptance, TV up to {deviation:.2f}", figures
    return f"up to {off:.2f} above the line TV = extra acceptance, TV up to {deviation:.2f}", figures


def _lossless_places(subject: Subject) -> Said:
    """At every place, whatever is remembered there, the target's law."""
    if subject.verifier.exactness == "lossy":
        raise Failed("family lossless and exactness lossy contradict each other")
    if subject.verifier.exactness == "own_target":
        raise DoesNotApply("lossless, with its own target: see exactness")
    found = [largest(total_variation(one.law, one.p)) for _, one in positions(subject, 60 if subject.quick else 300)]
    if not max(found) <= TOLERANCE:
        raise Failed(f"says lossless and is {max(found):.3g} (TV) from the target at one position", tv=max(found))
    return f"at one position the target's law, within {max(found):.0e}", {"tv": max(found)}


def stated_law(subject: Subject) -> Said:
    """`law` is what acceptance and correct make of every token that could be drafted, and the same for all of them."""
    rule, worst = subject.pointwise, 0.0
    for at, position in positions(subject, 100):
        if (law := rule.law(at)) is None:
            raise DoesNotApply("it has no law at one position")
        drawn = position.q > 0  # a point mass belongs to its own token
        gap = largest((law - position.law.unsqueeze(1)).abs().amax(-1)[drawn])
        worst = max(worst, gap)
        if not gap <= TOLERANCE:
            raise Failed(
                f"the law of what acceptance and correct emit is up to {gap:.3g} from law(at); a rule where one of "
                "them looks at the drafted token needs its own law, or None",
                difference=gap,
            )
    return f"law(at) is that of acceptance and correct within {worst:.0e}", {"difference": worst}


def ties(subject: Subject) -> Said:
    """Tokens of equal probability: the law is a law, and like tokens are treated alike or by their ids."""
    rule = subject.pointwise
    p = torch.tensor(
        [[0.3, 0.3, 0.3, 0.1], [0.25] * 4, [0.5, 0.5, 0.0, 0.0], [0.4, 0.2, 0.2, 0.2]], dtype=torch.float64
    )
    q = torch.full_like(p, 0.25)
    at = token_places(subject, p, q, p.unsqueeze(1).expand(-1, 4, -1), 0, subject.memories(4, 0))
    position = decided(rule, at, q)
    off = float((position.law.sum(-1) - 1).abs().max())
    if not off <= TOLERANCE or bool((position.law < -1e-12).any()):
        raise Failed(f"with ties what is emitted is no law; a sum is off by {off:.3g}", off=off)
    alike = [abs(float(position.acceptance[row, x] - position.acceptance[row, y])) for row, x, y in (
        (0, 0, 1), (0, 0, 2), (1, 0, 3), (2, 0, 1), (3, 1, 3))]  # fmt: skip
    words = "tokens that tie are treated alike" if max(alike) <= TOLERANCE else "of tokens that tie, ids decide"
    return words, {"difference": max(alike)}


def largest(values: Tensor) -> float:
    """0 of nothing, infinity of what is no number."""
    return float(values.nan_to_num(nan=torch.inf).max()) if values.numel() else 0.0
