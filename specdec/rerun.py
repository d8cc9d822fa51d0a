"""One rule over a shard of recorded steps: its acceptance at every draft place, and its decisions on recorded noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from attrs import frozen
from torch import Tensor

from specdec.law import Dense
from specdec.noise import Noise
from specdec.places import ENTRIES, StandIn, Whole, unseen
from specdec.probability import at as gather
from specdec.probability import total_variation
from specdec.settle import draw
from specdec.trace import RequestKey, Steps
from specdec.types import Draft, Scores
from specdec.verifier import FastAccept, Place, PointwiseVerifier, Verifier

View = Whole | StandIn


@final
@frozen(eq=False)
class Judged:
    """What a pointwise rule makes of the draft places of a shard.

    Attributes:
        acceptance: float64 [D], of the drafted token, given that all before it in its draft were kept.
        deviation: float64 [D], total variation of the rule's law from p; None where the rule has none.
        starts: float64 [S, M], what the rule remembered when each step began, or None.
    """

    acceptance: Tensor
    deviation: Tensor | None
    starts: Tensor | None = None


def judge(
    rule: PointwiseVerifier,
    view: View,
    memories: dict[RequestKey, Tensor],
    prompts: Mapping[str, tuple[int, ...]],
) -> Judged:
    """Ask a rule about every place.

    Args:
        rule: prepared.
        view: the places of a shard.
        memories: what the rule remembers of each request, from the shards before; changed here.
        prompts: sample id -> ids.
    """
    if rule.memory:
        return _remembering(rule, view, memories, prompts)
    acceptance = torch.zeros(len(view.steps["draft"]), dtype=torch.float64)
    deviation: Tensor | None = torch.zeros_like(acceptance)
    every = torch.arange(len(acceptance))
    for part in view.chunks(every):
        index = every[part]
        at = view.at(index)
        acceptance[index] = _accept(rule, at)
        if deviation is not None:
            found = _deviate(rule, at, view)
            deviation = None if found is None else deviation.index_copy(0, index, found)
    return Judged(acceptance, deviation)


def _remembering(
    rule: PointwiseVerifier,
    view: View,
    memories: dict[RequestKey, Tensor],
    prompts: Mapping[str, tuple[int, ...]],
) -> Judged:
    """Step by step, several requests at once. A rule remembers what lies on the recorded way: the places up to the
    first token that was not kept, and the tokens that were.
    """
    steps, first = view.steps, view.steps.first
    acceptance = torch.zeros(len(steps["draft"]), dtype=torch.float64)
    deviation: Tensor | None = torch.zeros_like(acceptance)
    starts = torch.zeros((len(steps), rule.memory), dtype=torch.float64)
    for wave in _waves(steps):
        keys = [steps.requests[request] for request in steps["request"][wave].tolist()]
        for key in keys:
            if key not in memories:
                memories[key] = torch.tensor(rule.start(prompts[key[0]]), dtype=torch.float64)
        memory = starts[wave] = torch.stack([memories[key] for key in keys])
        memory = rule.follow(steps["pending"][wave], memory).clone()
        known = memory.clone()
        size, accepted = steps["size"][wave], steps["accepted"][wave]
        for node in range(int(size.max())):
            inside = (size > node).nonzero().flatten()
            for part in view.chunks(first[wave][inside] + node):
                row = inside[part]
                index = first[wave][row] + node
                at = view.at(index, memory[row])
                acceptance[index] = _accept(rule, at)
                if deviation is not None:
                    found = _deviate(rule, at, view)
                    deviation = None if found is None else deviation.index_copy(0, index, found)
                after = rule.advance(at)
                after = memory[row] if after is None else after
                memory[row] = rule.follow(steps["draft"][index], after)
                way = torch.where((accepted[row] > node).unsqueeze(1), memory[row], after)
                known[row] = torch.where((accepted[row] >= node).unsqueeze(1), way, known[row])
        memories.update(zip(keys, known.unbind(), strict=True))
    return Judged(acceptance, deviation, starts)


def _waves(steps: Steps) -> list[Tensor]:
    """Steps int64 [n] of different requests that may be looked at together, each request's in order."""
    seen: dict[int, int] = {}
    waves: list[list[int]] = []
    for step, request in enumerate(steps["request"].tolist()):
        seen[request] = number = seen.get(request, -1) + 1
        if number == len(waves):
            waves.append([])
        waves[number].append(step)
    return [torch.tensor(wave) for wave in waves]


def _accept(rule: PointwiseVerifier, at: Place) -> Tensor:
    chance = rule.accept_at(at) if isinstance(rule, FastAccept) else gather(rule.acceptance(at), at.token)
    return chance.double().clamp(min=0, max=1)


def _deviate(rule: PointwiseVerifier, at: Place, view: View) -> Tensor | None:
    law = rule.law(at)
    if law is None:
        return None
    found = total_variation(law, at.p).double()
    if isinstance(view, StandIn) and view.uneven:
        found = found + (1 - at.p.sum(-1, dtype=torch.float64)).clamp(min=0)  # what no token could stand in for
    return found


def kept(steps: Steps, acceptance: Tensor) -> Tensor:
    """How many draft tokens are kept on the recorded noise, int64 [S], given their acceptance [D]."""
    most = int(steps["size"].max())
    noise = Noise(tuple(steps["seed"].tolist()), tuple(steps["step"].tolist())).uniform("accept", most)
    keep = torch.zeros((len(steps), most), dtype=torch.int64)
    keep[steps.owner, steps.depth] = (noise[steps.owner, steps.depth] < acceptance).long()
    return keep.cumprod(1).sum(1)


def decide(rule: Verifier, steps: Steps, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """The decisions of a rule on the recorded noise; a full trace only.

    Returns:
        How many draft tokens are kept, and the token after them, both int64 [S].
    """
    width = (1 + int(steps["size"].max())) * steps["p"].shape[-1]
    lengths, tokens = [], []
    for index in torch.split(torch.arange(len(steps)), max(1, ENTRIES // width)):
        draft, scores = _padded(steps, index)
        noise = Noise(tuple(steps["seed"][index].tolist()), tuple(steps["step"][index].tolist()))
        verdict = rule.verify(draft, scores, noise, None if starts is None else starts[index])
        lengths.append(verdict.lengths)
        tokens.append(draw(verdict, noise))
    return torch.cat(lengths), torch.cat(tokens)


def _padded(steps: Steps, index: Tensor) -> tuple[Draft, Scores]:
    """Steps as the rule saw them; columns past a row's size hold what does not count."""
    size, first = steps["size"][index].unsqueeze(1), steps.first[index].unsqueeze(1)
    column = torch.arange(int(size.max()) + 1)
    place = (first + column[:-1]).clamp(max=max(len(steps["draft"]) - 1, 0))
    nodes = place.shape[1]
    tokens = torch.where(column[:-1] < size, steps["draft"][place], 0) if nodes else place
    law = Dense(steps["q"][place]) if nodes and steps.law == "dense" else None
    row = first + index.unsqueeze(1) + column.minimum(size)
    probs = steps["p"][row]
    logits = steps["logits"][row] if "logits" in steps.tensors else unseen(probs)
    fed = torch.cat([steps["pending"][index].unsqueeze(1), tokens], 1)
    return Draft(tokens, size.squeeze(1), law=law), Scores(fed, logits, probs, {}, torch.ones(len(index)).bool())


def as_recorded(steps: Steps, lengths: Tensor, tokens: Tensor) -> Tensor:
    """Whether these decisions emit what was recorded, bool [S]; what a stop cut off is not compared."""
    most, row = int(steps["size"].max()), torch.arange(len(steps))
    ours = torch.zeros((len(steps), most + 1), dtype=torch.int64)
    ours[steps.owner, steps.depth] = steps["draft"]
    ours[row, lengths] = tokens
    count = steps["emitted_count"]
    owner = row.repeat_interleave(count)
    column = torch.arange(len(owner)) - (count.cumsum(0) - count)[owner]
    theirs = torch.zeros_like(ours)
    theirs[owner, column] = steps["emitted"]
    compared = torch.arange(most + 1) < count.unsqueeze(1)
    enough = (count == lengths + 1) | ((steps["finished"] > 0) & (count <= lengths + 1))
    return ((ours == theirs) | ~compared).all(1) & enough
