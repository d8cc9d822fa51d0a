"""From a verdict to what became real: draw the next token, cut at stops, say which cells to keep.

This is the one device-to-host copy of a step, and the one place where tokens enter a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec import tree
from specdec.noise import Noise
from specdec.probability import sample
from specdec.sequence import Batch
from specdec.types import SOURCES, Draft, Extras, FinishReason, Kept, Scores, Source, Verdict


def draw(verdict: Verdict, noise: Noise) -> Tensor:
    """The token after each kept path, int64 [B]."""
    return sample(verdict.next_probs, noise.uniform("next", 1).squeeze(1))


def settle(
    batch: Batch,
    draft: Draft,
    scores: Scores,
    verdict: Verdict,
    following: Tensor,
    clipped: Tensor,
    extras: Extras | None,
) -> Kept:
    """Commit tokens one by one to the batch's sequences and advance their steps.

    Args:
        batch: the rows; their sequences grow here.
        draft: what was verified, [B, N].
        scores: what the target said.
        verdict: what the rule decided.
        following: int64 [B], as drawn from it.
        clipped: int64 [B], nodes that the drafter proposed in vain.
        extras: numbers that somebody asked for.

    Returns:
        What was kept. A row with scores that are not finite keeps nothing and finishes with `error`.
    """
    starts = batch.lengths
    nodes = draft.tokens.shape[1]
    depth = draft.sizes if draft.parents is None else tree.deepest(draft.parents, draft.sizes)
    last = pad(verdict.path, (1, 0), value=-1).gather(1, verdict.lengths.unsqueeze(1))
    examined = verdict.lengths + (tree.first_child(draft.parents, draft.sizes, last).squeeze(1) >= 0)
    columns = [verdict.lengths, following, verdict.source, scores.finite, draft.sizes, clipped, depth, examined]
    first = len(columns)
    parts = [torch.stack([column.double() for column in columns], 1), verdict.path.double(), draft.tokens.double()]
    places, laws = ({}, {}) if extras is None else (extras.places, extras.tokens)
    parts += [*places.values(), *laws.values()]
    host = torch.cat(parts, dim=1).tolist()

    kept: list[tuple[int, ...]] = []
    offsets: list[list[int]] = []
    finished: list[FinishReason | None] = []
    for row, values in zip(batch.rows, host, strict=True):
        length, drawn, finite = int(values[0]), int(values[1]), bool(values[3])
        path = [int(node) for node in values[first : first + length]]
        tokens = [int(values[first + verdict.path.shape[1] + node]) for node in path]
        row.step += 1
        emitted = []
        if not finite:
            row.finish_reason = "error"
        else:
            for new in (*tokens, drawn):
                emitted.append(new)
                if row.append(new) is not None:
                    break
        kept.append(tuple(emitted))
        offsets.append([0, *(1 + node for node in path)][: len(emitted)])
        finished.append(row.finish_reason)

    widest = max(len(row) for row in offsets)
    chain = all(row == list(range(len(row))) for row in offsets)
    padded = torch.tensor([row + [0] * (widest - len(row)) for row in offsets], dtype=torch.int64)
    after = torch.tensor([[*row, *[0] * (widest - len(row))] for row in kept], dtype=torch.int64)
    device = draft.tokens.device
    padded, after = padded.reshape(len(kept), widest).to(device), after.reshape(len(kept), widest).to(device)
    index = torch.arange(len(kept), device=device).unsqueeze(1)
    emitted_counts = [len(tokens) for tokens in kept]
    looked = [min(int(values[7]), count) for values, count in zip(host, emitted_counts, strict=True)]
    start = first + verdict.path.shape[1] + nodes
    middle = start + sum(block.shape[1] for block in places.values())
    return Kept(
        tokens=tuple(kept),
        starts=starts,
        inputs=scores.tokens.gather(1, padded),
        next_inputs=after,
        offsets=padded,
        counts=tuple(len(row) for row in offsets),
        chain=chain,
        hidden={tap: features[index, padded] for tap, features in scores.hidden.items()},
        drafted=tuple(int(values[4]) for values in host),
        depths=tuple(int(values[6]) for values in host),
        clipped=tuple(int(values[5]) for values in host),
        accepted=tuple(int(values[0]) for values in host),
        examined=tuple(int(values[7]) for values in host),
        sources=tuple(_source(values) for values in host),
        finished=tuple(finished),
        memory=verdict.memory,
        diagnostics=_cut(host, start, places, looked),
        logprobs=_cut(host, middle, laws, emitted_counts),
    )


def _cut(
    host: list[list[float]], start: int, blocks: Mapping[str, Tensor], counts: list[int]
) -> dict[str, tuple[tuple[float, ...], ...]]:
    """The first `counts` numbers of each row of some blocks that lie side by side from column `start` on."""
    found = {}
    for name, block in blocks.items():
        found[name] = tuple(tuple(row[start : start + count]) for row, count in zip(host, counts, strict=True))
        start += block.shape[1]
    return found


def _source(values: list[float]) -> Source | None:
    return SOURCES[int(values[2])] if values[3] else None  # type: ignore[return-value]  # SOURCES are the Source names
