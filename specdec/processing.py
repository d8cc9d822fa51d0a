"""From raw logits to the law a token is drawn from, with transformers' own processors.

The same chain makes the target's p and a draft model's q. A processor sees, for every position, exactly the tokens
before it: everything known, then the draft tokens on the way there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec import memory
from specdec.probability import argmax, one_hot
from specdec.sequence import Sequence

Chain = list[Callable[[Any, Any], Any]]


def _contextual(row: Sequence) -> Chain:
    """Processors that look at the tokens before a position, in transformers' order."""
    sampling, chain = row.sampling, []
    if sampling.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.min_new_tokens and row.eos_ids:
        chain.append(
            MinNewTokensLengthLogitsProcessor(
                len(row.request.prompt), sampling.min_new_tokens, sorted(row.eos_ids), device="cpu"
            )
        )
    return [*chain, *row.request.processors]


def _filters(row: Sequence) -> tuple[float, ...]:
    """What `_warpers` depends on."""
    sampling = row.sampling
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


def _warpers(row: Sequence) -> list[LogitsProcessor]:
    """Processors that look at one row of logits only, in transformers' order."""
    sampling, chain = row.sampling, []
    if sampling.greedy:
        return []
    if sampling.temperature != 1.0:
        chain.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(TopPLogitsWarper(float(sampling.top_p)))
    if sampling.min_p > 0.0:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return chain


def processed(
    logits: Tensor, rows: tuple[Sequence, ...], drafts: Tensor, *, first: int = 0, parents: Tensor | None = None
) -> Tensor:
    """Logits after each request's processors, temperature, top-k, top-p and min-p; arguments as for `laws`."""
    contexts = [_contextual(row) for row in rows]
    warpers = [_warpers(row) for row in rows]
    if not any(contexts) and not any(warpers):
        return logits
    if not any(contexts) and len({_filters(row) for row in rows}) == 1:  # all at once
        flat = logits.flatten(0, 1)
        for warper in warpers[0]:
            flat = warper(drafts, flat)
        return flat.view_as(logits)
    # Only who looks at the tokens before a node has to know its place in the tree.
    trees = None if parents is None or not any(contexts) else parents.tolist()
    return torch.stack(
        [
            _row(logits[b], row, drafts[b], first, None if trees is None else trees[b], contexts[b], warpers[b])
            for b, row in enumerate(rows)
        ]
    )


def laws(
    logits: Tensor, rows: tuple[Sequence, ...], drafts: Tensor, *, first: int = 0, parents: Tensor | None = None
) -> Tensor:
    """Probabilities after processors, temperature, top-k, top-p and min-p; one-hot at the argmax for greedy rows.

    Args:
        logits: float32 or float64 [B, T, V].
        rows: the sequences.
        drafts: int64 [B, N]. Position t of a chain follows the known tokens and drafts[:first + t].
        first: how many draft tokens position 0 follows.
        parents: int64 [B, N] of a token tree (then first is 0 and position 1 + j follows node j), or None.

    Returns:
        [B, T, V] in the dtype of the logits. Where scores are NaN, infinite or all minus infinity there is no law, and
        the probability of token 0 is NaN.
    """
    logits = processed(logits, rows, drafts, first=first, parents=parents)
    greedy = [row.sampling.greedy for row in rows]
    if all(greedy):
        return _mode(logits)
    probs = torch.softmax(logits, -1, out=memory.empty(tuple(logits.shape), logits.dtype, logits.device))
    for b, chosen in enumerate(greedy):
        if chosen:
            probs[b] = _mode(logits[b])
    return probs


def modes(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first largest logit of [..., V]: its id, int64 [...], and whether it is a number a law could come from."""
    best = argmax(logits)
    return best, torch.isfinite(logits.gather(-1, best.unsqueeze(-1)).squeeze(-1))


def _mode(logits: Tensor) -> Tensor:
    """All mass on the first largest logit."""
    best, finite = modes(logits)
    law = one_hot(best, logits.shape[-1], logits.dtype)
    law[..., 0].masked_fill_(~finite, torch.nan)
    return law


def _row(
    logits: Tensor,
    row: Sequence,
    drafts: Tensor,
    first: int,
    parents: list[int] | None,
    context: Chain,
    warpers: list[LogitsProcessor],
) -> Tensor:
    if context:
        logits = _processed(logits, row, drafts, first, parents, context)
    for warper in warpers:
        logits = warper(drafts, logits)  # these do not read their first argument
    return logits


def _processed(
    logits: Tensor, row: Sequence, drafts: Tensor, first: int, parents: list[int] | None, context: Chain
) -> Tensor:
    """The chain at every position that can be reached. Behind an end, or behind a token that the chain forbids, nothing
    is ever emitted, and a request's own processor, such as the matcher of a grammar, need not have an answer there.
    """
    known = torch.tensor(row.tokens, dtype=torch.int64, device=logits.device)
    ends = row.eos_ids | row.sampling.stop_ids
    tokens = drafts.tolist() if row.request.processors else []  # the built-in ones have an answer everywhere
    done: list[Tensor] = []
    dead: list[bool] = []
    for t in range(logits.shape[0]):
        if not tokens:
            dead.append(False)
        elif t == 0:
            dead.append(not ends.isdisjoint(tokens[:first]))
        else:
            above, token = t - 1 if parents is None else 1 + parents[t - 1], tokens[first + t - 1]
            dead.append(dead[above] or token in ends or not bool(done[above][token] > -torch.inf))
        prefix = _prefix(drafts, first + t, parents)
        done.append(logits[t] if dead[t] else _apply(context, torch.cat([known, prefix]), logits[t]))
    return torch.stack(done)


def _apply(chain: Chain, ids: Tensor, scores: Tensor) -> Tensor:
    scores = scores.unsqueeze(0).clone()
    for processor in chain:
        scores = processor(ids.unsqueeze(0), scores)
    return scores.squeeze(0)


def _prefix(drafts: Tensor, position: int, parents: list[int] | None) -> Tensor:
    if parents is None:
        return drafts[:position]
    path: list[int] = []
    node = position - 1
    while node >= 0:
        path.append(node)
        node = parents[node]
    return drafts[torch.tensor(path[::-1], dtype=torch.int64, device=drafts.device)]
