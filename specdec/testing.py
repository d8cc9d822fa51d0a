"""Laws of a rule as it is implemented, for test suites: by exact enumeration, and by the real sampler.

A model here is one table per depth: `tables[d]` is [V**d, V], the law of the next token after each prefix of d tokens,
a prefix read as a number in base V, first token first. A law of the first n tokens is a vector [V**n] in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
from attrs import frozen
from torch import Tensor

from specdec.law import Dense, Law
from specdec.noise import Noise
from specdec.probability import sample
from specdec.types import Draft, Scores, Verdict
from specdec.verifier import Verifier

Model = tuple[Tensor, ...]
# From the tokens [B, N] and the laws [B, N, V] they were drawn from to the law a drafter would hand over, row by row.
Wrap = Callable[[Tensor, Tensor], Law | None]
# What the target says beside its laws: given those with logits log p and no features, made from them row by row.
See = Callable[[Scores], Scores]

# The level of every statistical test: a correct sampler fails once in a million seeds.
ALPHA = 1e-6
# How narrowly a threshold is enclosed, so that a law of a few nodes is known to better than 1e-10.
_WIDTH = 2.0**-36
_HIGHEST = 1.0 - 2.0**-53


def random_model(
    vocabulary: int,
    depth: int,
    seed: int,
    *,
    zeros: int = 0,
    scale: float = 1.5,
    dtype: torch.dtype = torch.float64,
) -> Model:
    """A model whose law differs after every prefix.

    Args:
        vocabulary: V.
        depth: tables for prefixes of 0 to depth - 1 tokens.
        seed: of the tables.
        zeros: how many of the least probable tokens have probability 0, as after top-k.
        scale: of the logits.
        dtype: of the tables.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for length in range(depth):
        logits = scale * torch.randn((vocabulary**length, vocabulary), generator=generator, dtype=torch.float64)
        if zeros:
            logits.scatter_(1, logits.topk(zeros, largest=False).indices, float("-inf"))
        tables.append(logits.softmax(-1).to(dtype))
    return tuple(tables)


def point_model(model: Model) -> Model:
    """The deterministic drafter that takes the most probable token of every table."""
    return tuple(torch.nn.functional.one_hot(table.argmax(-1), table.shape[-1]).to(table.dtype) for table in model)


def chain(nodes: int) -> tuple[int, ...]:
    """Parents of a chain."""
    return tuple(range(-1, nodes - 1))


def token_law(model: Model, tokens: int) -> Tensor:
    """The model's own law of its first tokens, [V**tokens]."""
    law = model[0].new_ones(1)
    for depth in range(tokens):
        law = (law.unsqueeze(1) * model[depth]).flatten()
    return law


def output_law(
    verifier: Verifier,
    p: Model,
    q: Model,
    parents: Sequence[int],
    tokens: int,
    *,
    replace: bool = True,
    wrap: Wrap = lambda _, probs: Dense(probs),
    see: See = lambda scores: scores,
) -> Tensor:
    """The exact law of the first tokens that a step emits, continued by the target itself, [V**tokens].

    Nothing the rule says about itself is trusted. Every draft is enumerated with its probability under q; for each node
    the number below which its uniform changes the verdict is enclosed by calls of `verify`, later uniforms being
    all as high as they get, or all 0 where that shows nothing; what follows the kept path is the verdict's own law. A
    rule must therefore compare each uniform with one threshold, which may depend on the uniforms before it.

    Args:
        verifier: a rule.
        p: the target, deep enough for `tokens` and for one token after the deepest node.
        q: the drafter.
        parents: of the draft nodes, -1 for a child of the pending token.
        tokens: how many.
        replace: siblings are drawn independently; otherwise each without the ones before it.
        wrap: what the drafter hands over as its law.
        see: adds raw logits and features.

    Raises:
        ValueError: a verdict changes more than once as one uniform grows.
    """
    drafted, codes, laws, weights = _all_drafts(q, parents, replace)
    uniform = torch.full(drafted.shape, _HIGHEST, dtype=torch.float64)
    index = torch.arange(drafted.shape[0])

    def case(index: Tensor) -> tuple[Draft, Scores]:
        draft = _draft(drafted[index], parents, wrap(drafted[index], laws[index]))
        return draft, see(_scores(p, codes[index], drafted[index], parents))

    def judge(case: tuple[Draft, Scores], uniform: Tensor) -> tuple[Tensor, Tensor]:
        verdict = _verify(verifier, *case, Scripted(uniform))
        counted = torch.arange(verdict.path.shape[1]) < verdict.lengths.unsqueeze(1)
        path = torch.where(counted, verdict.path, -1)
        return path, verdict.next_probs.to(weights.dtype)

    def same(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
        return (left[0] == right[0]).all(-1) & (left[1] == right[1]).all(-1)

    for node in range(len(parents)):
        every, late = case(index), uniform
        split = ~same(judge(every, _with(uniform, node, 0.0)), judge(every, uniform))
        if node + 1 < len(parents):
            # A rule that looks ahead may need the tokens after this one to be kept.
            eager = uniform.clone()
            eager[:, node + 1 :] = 0.0
            ahead = ~split & ~same(judge(every, _with(eager, node, 0.0)), judge(every, eager))
            late = torch.where(ahead.unsqueeze(1), eager, uniform)
            split |= ahead
        if not bool(split.any()):
            continue
        # Many numbers at once while they are few: most of the cost is that of a call.
        pieces = next(pieces for pieces in (64, 8, 2) if pieces == 2 or int(split.sum()) * pieces <= 8192)
        many = split.nonzero().squeeze(1).repeat_interleave(pieces - 1)
        some, fixed = case(index[many]), late[many]
        low, high = judge(some, _with(fixed, node, 0.0)), judge(some, fixed)
        below, width = torch.zeros_like(weights[split]), 1.0
        while width > _WIDTH:
            width /= pieces
            grid = below.unsqueeze(1) + width * torch.arange(1, pieces)
            seen = judge(some, _with(fixed, node, grid.flatten()))
            kept, lost = same(seen, low).view(-1, pieces - 1), same(seen, high).view(-1, pieces - 1)
            if not bool((kept | lost).all()) or bool((kept[:, 1:] & ~kept[:, :-1]).any()):
                raise ValueError(f"node {node}: the verdict changes more than once as its uniform grows")
            below = below + width * kept.sum(1)
        threshold = below + width / 2
        more = weights[split] * threshold
        weights = torch.cat([weights.masked_scatter(split, weights[split] - more), more])
        index, uniform = torch.cat([index, index[split]]), torch.cat([uniform, _with(uniform[split], node, 0.0)])

    path, following = judge(case(index), uniform)
    size = following.shape[1]
    parts = [torch.zeros(size**length, dtype=weights.dtype) for length in range(tokens + 1)]
    lengths = (path >= 0).sum(-1)
    for length in sorted(set(lengths.tolist())):
        row = lengths == length
        prefix = torch.zeros(int(row.sum()), dtype=torch.int64)
        for column in range(min(length, tokens)):
            prefix = prefix * size + drafted[index[row]].gather(1, path[row, column : column + 1]).squeeze(1)
        if length >= tokens:
            parts[tokens].index_add_(0, prefix, weights[row])
        else:
            joint = parts[length + 1].view(-1, size)
            joint.index_add_(0, prefix, weights[row].unsqueeze(1) * following[row])
    for length in range(tokens):
        parts[length + 1] += (parts[length].unsqueeze(1) * p[length]).flatten()
    return parts[tokens]


def sampled_counts(
    verifier: Verifier,
    p: Model,
    q: Model,
    parents: Sequence[int],
    tokens: int,
    *,
    samples: int = 50_000,
    seed: int = 0,
    replace: bool = True,
    wrap: Wrap = lambda _, probs: Dense(probs),
    see: See = lambda scores: scores,
    noise: Callable[[Noise], Any] = lambda noise: noise,
) -> Tensor:
    """How often the real sampler emits each of the first tokens, [V**tokens]: draft, verify, draw what follows.

    Every sample is a row with its own request seed, and uses the streams as the engine does. Arguments are those of
    `output_law`; `noise` may plant a fault by wrapping the numbers of the step.
    """
    vocabulary = p[0].shape[-1]
    seeds = tuple(range(seed * samples, (seed + 1) * samples))
    real = noise(Noise(seeds, (0,) * samples))
    uniform = real.uniform("draft", len(parents))
    drafted = torch.zeros((samples, len(parents)), dtype=torch.int64)
    codes, laws = torch.zeros((samples, len(parents) + 1), dtype=torch.int64), []
    for node in range(len(parents)):
        laws.append(_node_law(q, parents, drafted, codes, node, replace))
        drafted[:, node] = sample(laws[-1], uniform[:, node])
        codes[:, node + 1] = codes[:, parents[node] + 1] * vocabulary + drafted[:, node]
    stacked = torch.stack(laws, 1) if laws else p[0].new_zeros((samples, 0, vocabulary))
    draft = _draft(drafted, parents, wrap(drafted, stacked))
    verdict = _verify(verifier, draft, see(_scores(p, codes, drafted, parents)), real)
    following = sample(verdict.next_probs, real.uniform("next", 1).squeeze(1))
    prefix, rows = torch.zeros(samples, dtype=torch.int64), torch.arange(samples)
    for position in range(tokens):
        kept = following
        if position < verdict.path.shape[1]:
            kept = drafted[rows, verdict.path[:, position]]
        late = sample(p[position][prefix], noise(Noise(seeds, (1 + position,) * samples)).uniform("next", 1).squeeze(1))
        after = torch.where(verdict.lengths == position, following, late)
        prefix = prefix * vocabulary + torch.where(verdict.lengths > position, kept, after)
    return torch.bincount(prefix, minlength=vocabulary**tokens)


def chi_square(counts: Tensor, law: Tensor) -> float:
    """Probability of counts at least as far from `law` as these; 0 when something impossible was counted.

    Cells with an expectation below 5 are pooled.
    """
    counts, expected = counts.double(), law.double() / law.double().sum() * counts.sum()
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    order = expected.argsort()
    counts, expected = counts[order], expected[order]
    rare = int((expected < 5).sum())
    # The pool may need the smallest ordinary cells to reach 5 itself.
    while rare < len(expected) and 0 < float(expected[:rare].sum()) < 5:
        rare += 1
    if rare:
        counts = torch.cat([counts[:rare].sum().view(1), counts[rare:]])
        expected = torch.cat([expected[:rare].sum().view(1), expected[rare:]])
        counts, expected = counts[expected > 0], expected[expected > 0]
    if len(expected) < 2:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), statistic / 2))


@final
@frozen(eq=False)
class Scripted:
    """Stands in for `Noise` and gives the accept stream that was written for it, [B, N]."""

    accept: Tensor

    def uniform(self, stream: str, count: int) -> Tensor:
        if stream != "accept" or count != self.accept.shape[1]:
            raise ValueError(f"a rule may only draw one number per node from 'accept', not {count} from {stream!r}")
        return self.accept


def _with(uniform: Tensor, node: int, value: Tensor | float) -> Tensor:
    changed = uniform.clone()
    changed[:, node] = value
    return changed


def _verify(verifier: Verifier, draft: Draft, scores: Scores, noise: object) -> Verdict:
    memory = None
    if verifier.memory:
        memory = torch.tensor(verifier.start((0,)), dtype=torch.float64).repeat(draft.tokens.shape[0], 1)
    return verifier.verify(draft, scores, cast("Noise", noise), memory)


def _draft(tokens: Tensor, parents: Sequence[int], law: Law | None) -> Draft:
    sizes = torch.full((tokens.shape[0],), tokens.shape[1])
    if tuple(parents) == chain(len(parents)):
        return Draft(tokens, sizes, law=law)
    return Draft(tokens, sizes, torch.tensor(parents).repeat(tokens.shape[0], 1), law)


def _depth(parents: Sequence[int], node: int) -> int:
    return 0 if node < 0 else 1 + _depth(parents, parents[node])


def _node_law(q: Model, parents: Sequence[int], tokens: Tensor, codes: Tensor, node: int, replace: bool) -> Tensor:
    """What `node` is drawn from after the nodes before it: tokens [B, N] and their prefixes, codes [B, 1+N]."""
    parent = parents[node]
    law = q[_depth(parents, parent)][codes[:, parent + 1]]
    if not replace:
        for sibling in (other for other in range(node) if parents[other] == parent):
            law = law.scatter(1, tokens[:, sibling : sibling + 1], 0.0)
        law = law / law.sum(-1, keepdim=True)
    return law


def _all_drafts(q: Model, parents: Sequence[int], replace: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every draft: tokens [O, N], prefixes [O, 1+N], the laws they are drawn from [O, N, V], probabilities [O]."""
    size = q[0].shape[-1]
    tokens, codes = torch.zeros((1, len(parents)), dtype=torch.int64), torch.zeros((1, 1), dtype=torch.int64)
    laws, weights = q[0].new_zeros((1, 0, size), dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for node in range(len(parents)):
        law = _node_law(q, parents, tokens, codes, node, replace)
        outcomes, drawn = law.nonzero(as_tuple=True)
        tokens, codes, weights = tokens[outcomes].clone(), codes[outcomes], weights[outcomes] * law[outcomes, drawn]
        tokens[:, node] = drawn
        codes = torch.cat([codes, (codes[:, parents[node] + 1] * size + drawn).unsqueeze(1)], 1)
        laws = torch.cat([laws[outcomes].to(law.dtype), law[outcomes].unsqueeze(1)], 1)
    return tokens, codes, laws, weights


def _scores(p: Model, codes: Tensor, tokens: Tensor, parents: Sequence[int]) -> Scores:
    depths = [_depth(parents, node) for node in range(-1, len(parents))]
    probs = torch.stack([p[depth][codes[:, column]] for column, depth in enumerate(depths)], 1)
    fed = torch.cat([torch.zeros_like(tokens[:, :1]) if len(parents) else codes * 0, tokens], 1)
    return Scores(fed, probs.log(), probs, {}, torch.ones(tokens.shape[0], dtype=torch.bool))
