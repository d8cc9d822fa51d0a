"""What a rule says of itself on whole drafts: by exact enumeration of the rule as implemented, and by sampling.

A check is a function of a `Subject`. It answers with a few words and its figures, or raises `Failed` or `DoesNotApply`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import evolve
from torch import Tensor

from specdec.law import Dense, PointMass
from specdec.one_position import decided, largest, token_places
from specdec.probability import normalise, total_variation
from specdec.registry import load
from specdec.subject import TOLERANCE, DoesNotApply, Failed, Said, Subject, counted, make_law
from specdec.testing import (
    ALPHA,
    Model,
    Scripted,
    Wrap,
    chain,
    chi_square,
    output_law,
    point_model,
    random_model,
    sampled_counts,
    token_law,
)
from specdec.types import Draft
from specdec.verifier import Place, PointwiseVerifier

_TREES = ((-1, -1, 0, 0), (-1, 0, -1, 2))
_SINGLE = 1e-5  # of laws in float32


def lower_bound(subject: Subject) -> Said:
    """The implemented rule keeps what its acceptance says, and its total variation is not below the line."""
    rule, closest = subject.pointwise, 1.0
    for name, p, q, nodes, wrap in _chains(subject, 1):
        law = output_law(rule, p, q, chain(nodes), 1, wrap=wrap, see=subject.see)
        after = p[1].unsqueeze(0)
        position = decided(rule, token_places(subject, p[0], q[0], after, 0, _pending(rule, 1)), q[0])
        gap = float(total_variation(law, p[0][0]) - position.line[0])
        closest = min(closest, gap)
        if not gap >= -TOLERANCE:
            raise Failed(f"{name}: total variation {-gap:.3g} below extra acceptance, which no rule can be", gap=gap)
    return f"TV - extra acceptance is at least {max(closest, 0.0):.1e}", {"gap": closest}


def _chains(subject: Subject, longest: int = 3) -> Iterator[tuple[str, Model, Model, int, Wrap]]:
    """Targets, drafters, numbers of nodes, and what the drafter hands over."""
    point = "draft_law" not in subject.verifier.needs
    for nodes in range(1, longest + 1):
        for seed in range(1 if subject.quick else 3):
            p, q = random_model(3, nodes + 2, 2 * seed), random_model(3, nodes + 1, 2 * seed + 1)
            yield f"{counted(nodes, 'token')}", p, q, nodes, _dense
            fewer = random_model(4, nodes + 2, seed, zeros=1), random_model(4, nodes + 1, seed + 50, zeros=2)
            if nodes < 3:
                yield f"{counted(nodes, 'token')} with zeros", *fewer, nodes, _dense
            if point:
                yield f"{counted(nodes, 'token')} of a deterministic drafter", p, point_model(q), nodes, _nothing
        p = random_model(3, nodes + 2, 9)
        yield (
            f"{counted(nodes, 'token')} at temperature 0",
            point_model(p),
            random_model(3, nodes + 1, 7),
            nodes,
            _dense,
        )
        yield f"{counted(nodes, 'token')}, draft equal to target", p, p[:-1], nodes, _dense
        apart = (
            torch.tensor([[0.6, 0.4, 0.0]], dtype=torch.float64),
            torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64),
        )
        yield f"{counted(nodes, 'token')}, no token in common", (apart[0], *p[1:]), (apart[1], *p[1:-1]), nodes, _dense
        tied = tuple(_tied(table) for table in random_model(3, nodes + 2, 8))
        yield f"{counted(nodes, 'token')} with ties", tied, tuple(_tied(table) for table in p[:-1]), nodes, _dense


def _chain_laws(subject: Subject) -> Iterator[tuple[str, Model, Model, int, Tensor]]:
    """The same with the law of a step's tokens, the bonus included, instead of what is handed over."""
    for index, (name, p, q, nodes, wrap) in enumerate(_chains(subject)):
        if index not in subject.laws:
            subject.laws[index] = output_law(
                subject.verifier, p, q, chain(nodes), nodes + 1, wrap=wrap, see=subject.see
            )
        yield name, p, q, nodes, subject.laws[index]


def _dense(tokens: Tensor, probs: Tensor) -> Dense:
    return Dense(probs)


def _nothing(tokens: Tensor, probs: Tensor) -> None:
    return None


def _tied(table: Tensor) -> Tensor:
    steps = (table * 3).ceil()
    return steps / steps.sum(-1, keepdim=True)


def _pending(rule: PointwiseVerifier, rows: int) -> Tensor | None:
    """Memory of a new request once its pending token 0 is known."""
    if not rule.memory:
        return None
    memory = torch.tensor(rule.start((0,)), dtype=torch.float64).repeat(rows, 1)
    return rule.follow(torch.zeros(rows, dtype=torch.int64), memory)


def _definition_law(subject: Subject, rule: PointwiseVerifier, p: Model, q: Model, nodes: int, tokens: int) -> Tensor:
    """The law of the first tokens of a step that drafts a chain, continued by the target, [V**tokens].

    From the definition alone, position by position: a kept token is followed by the next place of the draft, a replaced
    one by the target itself, and a draft that is kept to its end by the bonus law.
    """
    size = p[0].shape[-1]
    going, gone = p[0].new_ones(1), p[0].new_zeros(1)
    memory = _pending(rule, 1)
    for depth in range(tokens):
        gone = (gone.unsqueeze(1) * p[depth]).flatten()
        if depth < nodes:
            at = token_places(subject, p[depth], q[depth], p[depth + 1].view(-1, size, size), depth, memory)
            position = decided(rule, at, q[depth])
            lost = q[depth] * (1 - position.acceptance)
            gone += (going.unsqueeze(1) * (lost.unsqueeze(-1) * position.follow).sum(1)).flatten()
            going = (going.unsqueeze(1) * q[depth] * position.acceptance).flatten()
            if memory is not None:
                after = rule.advance(at)
                after = at.memory if after is None else after
                assert after is not None  # it remembers
                memory = rule.follow(at.token.flatten(), after.reshape(-1, rule.memory))
        else:
            none = torch.full((len(p[depth]),), -1)
            leaf = Place(
                p[depth], PointMass(none, size, p[depth].dtype), none, torch.full_like(none, depth),
                subject.raw(p[depth]), subject.features(p[depth]), memory,
            )  # fmt: skip
            gone += (going.unsqueeze(1) * normalise(rule.correct(leaf), p[depth])[0]).flatten()
            going = p[0].new_zeros(size ** (depth + 1))
    return going + gone


def definition(subject: Subject) -> Said:
    """`verify` does what acceptance, correct, advance and follow say, token by token."""
    rule, worst, count = subject.pointwise, 0.0, 0
    for name, p, q, nodes, found in _chain_laws(subject):
        gap = float(total_variation(found, _definition_law(subject, rule, p, q, nodes, nodes + 1)))
        worst, count = max(worst, gap), count + 1
        if not gap <= TOLERANCE:
            raise Failed(f"{name}: the law of verify is {gap:.3g} (TV) from that of acceptance and correct", tv=gap)
    return f"{counted(count, 'model')}, drafts of 1 to 3 tokens, within {worst:.0e}", {"models": count, "tv": worst}


def exactness(subject: Subject) -> Said:
    """The law of what is emitted is the target's, by enumeration, if the rule says so; if not, how far it is off."""
    rule, worst, where, count = subject.verifier, 0.0, "", 0
    for name, p, law, tokens in _laws(subject):
        single = p[0].dtype == torch.float32
        if not abs(mass := float(law.sum()) - 1) <= (_SINGLE if single else TOLERANCE) or bool((law < -1e-12).any()):
            raise Failed(f"{name}: what is emitted is no law; its sum is off by {mass:.3g}", mass=mass)
        gap = float(total_variation(law, token_law(p, tokens)))
        count += 1
        if rule.exactness == "lossless" and not gap <= (_SINGLE if single else TOLERANCE):
            raise Failed(f"says lossless and is {gap:.3g} (TV) from the target: {name}", tv=gap)
        if gap > worst and not single:
            worst, where = gap, name
    figures = {"models": count, "tv": worst}
    if rule.exactness == "lossless":
        return f"the target's law in {counted(count, 'model')}, within {worst:.0e}", figures
    if rule.exactness == "own_target":
        stated = isinstance(rule, PointwiseVerifier) and type(rule).law is not PointwiseVerifier.law
        if not stated:
            raise DoesNotApply(
                f"own target, and no method law(at) that states it; up to {worst:.2f} (TV) from the target"
            )
        return f"its own target, stated by law(at); up to {worst:.2f} (TV) from the target", figures
    if worst <= TOLERANCE:
        return (
            f"says lossy and is the target's law in {counted(count, 'model')}: the declaration is too modest",
            figures,
        )
    return f"up to {worst:.2f} (TV) from the target: {where}", figures


def _laws(subject: Subject) -> Iterator[tuple[str, Model, Tensor, int]]:
    """Targets, and the enumerated law of the first tokens emitted with them: chains, trees, long drafts, float32."""
    rule, see = subject.verifier, subject.see
    for name, p, _, nodes, found in _chain_laws(subject):
        yield name, p, found, nodes + 1
    for seed in range(1 if subject.quick else 2):
        p, q = (random_model(3, 3, 70 + 2 * seed + one, dtype=torch.float32) for one in (0, 1))
        yield "2 tokens in float32", p, output_law(rule, p, q, chain(2), 2, see=see), 2
    if not isinstance(rule, PointwiseVerifier):  # it may look further ahead than three tokens
        p, q = random_model(2, 8, 80), random_model(2, 8, 81)
        yield "7 tokens of two", p, output_law(rule, p, q, chain(7), 8, see=see), 8
    for parents, replace in ((parents, replace) for parents in _TREES for replace in (True, False)):
        if rule.trees:
            p, q = random_model(3, 4, 90), random_model(3, 3, 91)
            how = "with" if replace else "without"
            yield (
                f"tree {list(parents)} {how} replacement",
                p,
                output_law(rule, p, q, parents, 3, replace=replace, see=see),
                3,
            )


def sampler(subject: Subject) -> Said:
    """What is really drawn, in float32 with the numbers of the engine, has the enumerated law."""
    rule, least = subject.verifier, 1.0
    samples = 10_000 if subject.quick else 50_000
    shapes: list[tuple[tuple[int, ...], int]] = [(chain(2), 4), (chain(3), 3)]
    for parents, size in [*shapes, (_TREES[0], 3)] if rule.trees else shapes:
        p, q = random_model(size, 4, 11), random_model(size, 4, 12)
        law = output_law(rule, p, q, parents, 2, see=subject.see)
        p, q = (tuple(table.float() for table in model) for model in (p, q))
        counts = sampled_counts(rule, p, q, parents, 2, samples=samples, seed=3, see=subject.see)
        least = min(least, value := chi_square(counts, law.clamp(min=0).where(law > 1e-12, law.new_zeros(()))))
        if not value > ALPHA:
            raise Failed(f"{samples:,} samples do not have the enumerated law: p-value {value:.1e}", p_value=value)
    return f"{samples:,} samples, p-value at least {least:.2g}", {"samples": samples, "p_value": least}


def coupling(subject: Subject) -> Said:
    """On the same drafts and numbers it keeps at least what the standard rule keeps, if it says so."""
    rule, standard = subject.verifier, load("verifiers", "standard")()
    rows, fewer, more, total = 1000 if subject.quick else 5000, 0, 0, 0
    for seed, kind in ((200, "dense"), (300, "none"), (400, "dense")):
        if kind not in subject.kinds:
            continue
        case = subject.case(rows, 6 if kind == "dense" else 3, seed, kind=kind, zeros=seed != 400)
        least, found = evolve(case, memory=None).judge(standard).lengths, case.judge(rule).lengths
        fewer, more, total = fewer + int((found < least).sum()), more + int((found > least).sum()), total + rows
    figures = {"fewer": fewer / total, "more": more / total}
    if rule.dominates_standard and fewer:
        raise Failed(f"says that it dominates and keeps less on {fewer:,} of {total:,} drafts", **figures)
    if not rule.dominates_standard:
        hint = "" if fewer else ", and does"
        raise DoesNotApply(
            f"does not say that it dominates{hint}: less on {fewer / total:.1%}, more on {more / total:.1%}"
        )
    return f"never less on {total:,} drafts, more on {more / total:.1%}", figures


def impossible_tokens(subject: Subject) -> Said:
    """A token of probability 0 is never kept, though its uniform be 0, and never follows."""
    rule, kept, emitted, rows = subject.verifier, 0, 0.0, 0
    for parents, kind in ((parents, kind) for parents in (None, (-1, -1)) for kind in subject.kinds):
        if parents is not None and not rule.trees:
            continue
        case = subject.case(100, 2, 500, kind=kind, parents=parents)
        p = case.scores.probs.clone()
        p[..., -2:] = 0.0
        p = p / p.sum(-1, keepdim=True)
        tokens = torch.where(case.draft.tokens % 2 == 0, case.draft.tokens.shape[-1] + 3, p.shape[-1] - 1)
        q = 0.3 * p[:, :2] + 0.35 * torch.nn.functional.one_hot(torch.full_like(tokens, 5), p.shape[-1])
        q = q + 0.35 * torch.nn.functional.one_hot(torch.full_like(tokens, 6), p.shape[-1])
        law = None if kind == "none" else make_law(kind, tokens, q)
        draft = Draft(tokens, torch.full_like(case.draft.sizes, 2), case.draft.parents, law)
        scores = subject.see(evolve(case.scores, probs=p, tokens=torch.cat([case.scores.tokens[:, :1], tokens], 1)))
        verdict = evolve(
            case, draft=draft, scores=scores, noise=Scripted(torch.zeros((100, 2), dtype=torch.float64))
        ).judge(rule)
        kept, rows = kept + int((verdict.lengths > 0).sum()), rows + 100
        emitted = max(emitted, largest(verdict.next_probs[verdict.lengths == 0][:, -2:]))
    figures = {"kept": kept / rows, "emitted": emitted}
    if kept and (rule.exactness == "own_target" or rule.family == "other"):
        why = "its own target decides" if rule.exactness == "own_target" else "its family promises nothing"
        raise DoesNotApply(f"{why}; with a uniform of 0 it keeps {kept / rows:.0%} of tokens of p(x) = 0")
    if kept:
        raise Failed(f"keeps a token of p(x) = 0 in {kept} of {rows} drafts whose uniforms are 0", **figures)
    if emitted > 1e-12:
        raise Failed(f"draws a token of p(x) = 0 with probability {emitted:.3g} after a rejection", **figures)
    return f"none of {rows} kept with uniforms of 0", figures
