"""From a verdict to what became real: draw the next token, cut at stops, say which cells to keep.

This is the one device-to-host copy of a step, and the one place where tokens enter a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import tree
from specdec.probability import sample
from specdec.sequence import Batch
from specdec.types import SOURCES, Draft, Extras, FinishReason, Kept, Scores, Source, Verdict


def settle(
    batch: Batch, draft: Draft, scores: Scores, verdict: Verdict, clipped: Tensor, extras: Extras | None
) -> Kept:
    """Commit tokens one by one to the batch's sequences and advance their steps.

    Args:
        batch: the rows; their sequences grow here.
        draft: what was verified, [B, N].
        scores: what the target said.
        verdict: what the rule decided.
        clipped: int64 [B], nodes that the drafter proposed in vain.
        extras: numbers per node that somebody asked for.

    Returns:
        What was kept. A row with scores that are not finite keeps nothing and finishes with `error`.
    """
    starts = batch.lengths
    nodes = draft.tokens.shape[1]
    depth = draft.sizes if draft.parents is None else tree.deepest(draft.parents, draft.sizes)
    token = sample(verdict.next_probs, batch.noise.uniform("next", 1).squeeze(1))
    columns = [verdict.lengths, token, verdict.source, scores.finite, draft.sizes, clipped, depth]
    first = len(columns)
    parts = [torch.stack([column.double() for column in columns], 1), verdict.path.double(), draft.tokens.double()]
    names = list(extras.values) if extras is not None else []
    parts += [extras.values[name].double() for name in names] if extras is not None else []
    host = torch.cat(parts, dim=1).tolist()

    kept: list[tuple[int, ...]] = []
    offsets: list[list[int]] = []
    finished: list[FinishReason | None] = []
    for row, values in zip(batch.rows, host, strict=True):
        length, following, finite = int(values[0]), int(values[1]), bool(values[3])
        path = [int(node) for node in values[first : first + length]]
        tokens = [int(values[first + verdict.path.shape[1] + node]) for node in path]
        row.step += 1
        emitted = []
        if not finite:
            row.finish_reason = "error"
        else:
            for new in (*tokens, following):
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
    block = first + verdict.path.shape[1] + nodes
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
        sources=tuple(_source(values) for values in host),
        finished=tuple(finished),
        memory=verdict.memory,
        extras={
            name: tuple(tuple(values[block + i * nodes : block + (i + 1) * nodes]) for values in host)
            for i, name in enumerate(names)
        },
    )


def _source(values: list[float]) -> Source | None:
    return SOURCES[int(values[2])] if values[3] else None  # type: ignore[return-value]  # SOURCES are the Source names
