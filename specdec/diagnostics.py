"""What a step says about the places it looked at, and the law that each of its tokens was drawn from.

A place is where one token is emitted: after the pending token, and after each kept draft node. The draft proposed a
token there (in a tree several: the first-tried one is meant), or none, as after a draft that is kept to its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import evolve
from torch import Tensor
from torch.nn.functional import pad

from specdec.law import PointMass
from specdec.noise import Noise
from specdec.probability import at as gather
from specdec.probability import entropy, mass_above, total_variation
from specdec.theory import excess, nucleus_excess, rejection, standard_acceptance
from specdec.tree import first_child
from specdec.types import Draft, Extras, Scores, Verdict
from specdec.verifier import Place, PointwiseVerifier, Verifier

# The paper's nucleus, for diagnostics that must not depend on the rule that runs.
REFERENCE_THETA = 0.95
DIAGNOSTICS = (
    "accepted",
    "by_ratio",
    "p",
    "q",
    "rank",
    "in_nucleus",
    "rejection",
    "nucleus_excess",
    "target_entropy",
    "draft_entropy",
    "acceptance",
    "excess",
    "deviation",
)
LOGPROBS = ("target", "raw", "output", "uncovered")


def probe(
    draft: Draft,
    scores: Scores,
    verdict: Verdict,
    following: Tensor,
    verifier: Verifier,
    noise: Noise,
    memory: Tensor | None,
    *,
    diagnostics: bool = True,
    logprobs: bool = True,
) -> Extras:
    """Numbers about the places of a step, W of them, float64 [B, W] each; place i emits the i-th token.

    Of every place where a draft token was examined (`diagnostics`): accepted: whether it was kept; by_ratio: whether
    its uniform is below min(1, p/q), so that the standard rule keeps it too. p, q: its probabilities. rank: tokens more
    probable under p. in_nucleus: whether it lies in the target's nucleus of theta 0.95. rejection: R. nucleus_excess: E
    of NSD with theta 0.95 there, whatever rule runs. target_entropy, draft_entropy: of p and q, in nats. acceptance:
    the rule's, of the drafted token; excess: that of the whole place beyond 1 - R; deviation: total variation between
    the law of the emitted token and p. These three are NaN for a rule that does not decide place by place, the last two
    also for one that has no law there.

    Of every emitted token (`logprobs`): target: log p, after temperature, filters and processors; raw: log softmax of
    the raw logits; output: its logarithm under the law it was drawn from, which is p for lossless rules and NaN where
    nobody knows it; uncovered: the mass of p on tokens which that law never gives.

    Args:
        draft: what was proposed, [B, N].
        scores: what the target said.
        verdict: what the rule decided.
        following: int64 [B], the token after each kept path.
        verifier: the rule.
        noise: of the step.
        memory: float64 [B, M], the rule's before the step.
        diagnostics: give the first kind.
        logprobs: give the second.
    """
    nodes = draft.tokens.shape[1]
    uniform = noise.uniform("accept", nodes) if nodes else scores.probs.new_zeros((len(draft.tokens), 0))
    asked = (diagnostics and nodes > 0, logprobs)
    if scores.probs.device.type != "cpu":
        return _probe(draft, scores, verdict, following, verifier, uniform, memory, *asked)
    # What is known of one row fits into a processor's cache, that of all rows does not.
    parts = []
    for row in range(len(draft.tokens)):
        one = slice(row, row + 1)
        parts.append(
            _probe(
                *_only(row, draft, scores, verdict),
                following[one],
                verifier,
                uniform[one],
                None if memory is None else memory[one],
                *asked,
            )
        )
    return Extras(places=_stacked([part.places for part in parts]), tokens=_stacked([part.tokens for part in parts]))


def _only(row: int, draft: Draft, scores: Scores, verdict: Verdict) -> tuple[Draft, Scores, Verdict]:
    """Of one row all that is looked at here."""
    one = slice(row, row + 1)
    return (
        evolve(
            draft,
            tokens=draft.tokens[one],
            sizes=draft.sizes[one],
            parents=None if draft.parents is None else draft.parents[one],
            law=None if draft.law is None else draft.law.only(row),
        ),
        evolve(
            scores,
            tokens=scores.tokens[one],
            logits=scores.logits[one],
            probs=scores.probs[one],
            hidden={tap: features[one] for tap, features in scores.hidden.items()},
        ),
        evolve(verdict, path=verdict.path[one], lengths=verdict.lengths[one], next_probs=verdict.next_probs[one]),
    )


def _stacked(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Rows [1, W] of different lengths one below the other; what is behind the end of one is 0."""
    most = max((values.shape[1] for part in parts for values in part.values()), default=0)
    return {name: torch.cat([pad(part[name], (0, most - part[name].shape[1])) for part in parts]) for name in parts[0]}


def _probe(
    draft: Draft,
    scores: Scores,
    verdict: Verdict,
    following: Tensor,
    verifier: Verifier,
    uniform: Tensor,
    memory: Tensor | None,
    diagnostics: bool,
    logprobs: bool,
) -> Extras:
    at, child = _places(draft, scores, verdict)
    rule = verifier if isinstance(verifier, PointwiseVerifier) else None
    columns = torch.arange(child.shape[1], device=child.device)
    kept = columns < verdict.lengths.unsqueeze(1)
    node = pad(verdict.path, (0, 1))[:, : child.shape[1]]  # kept there
    emitted = torch.where(kept, scores.tokens.gather(1, (node + 1) * kept), following.unsqueeze(1))
    if rule is not None and memory is not None:
        at = evolve(at, memory=_memories(at, emitted, rule, rule.follow(scores.tokens[:, 0], memory)))
    # Siblings that the rule itself tries change the law; by recursive rejection they do not.
    known = rule is not None and not (rule.own_siblings and draft.parents is not None)
    law = rule.law(at) if rule is not None and known else None
    drafted = child >= 0
    places: dict[str, Tensor] = {}
    if diagnostics:
        drawn = uniform.gather(1, child.clamp(min=0))
        standard = standard_acceptance(gather(at.p, at.token), at.q.at(at.token))
        places = _about(at, rule, law) | {"accepted": kept & (node == child), "by_ratio": drawn < standard}
    tokens: dict[str, Tensor] = {}
    if logprobs:
        if verifier.exactness == "lossless":
            law = at.p
        elif law is None:
            law = torch.full_like(at.p, torch.nan)
        # Where nothing was drafted the verdict has the law itself; there is one such place at most, the last.
        law = torch.where(drafted.unsqueeze(-1), law, verdict.next_probs.unsqueeze(1))
        tokens = {
            "target": gather(at.p, emitted).log(),
            "raw": gather(at.logits, emitted) - at.logits.logsumexp(-1),
            "output": gather(law, emitted).log(),
            "uncovered": torch.where(law[..., 0].isnan(), torch.nan, torch.where(law > 0, 0.0, at.p).sum(-1)),
        }
    return Extras(
        places={name: places[name].double() for name in DIAGNOSTICS if name in places},
        tokens={name: tokens[name].double() for name in LOGPROBS if name in tokens},
    )


def _about(at: Place, rule: PointwiseVerifier | None, law: Tensor | None) -> dict[str, Tensor]:
    p, q, own = at.p, at.q.dense(), gather(at.p, at.token)
    unknown = torch.full_like(own, torch.nan)
    found = {
        "p": own,
        "q": at.q.at(at.token),
        "rank": (p > own.unsqueeze(-1)).sum(-1),
        "in_nucleus": (mass_above(p, own) < REFERENCE_THETA) & (own > 0),
        "rejection": rejection(p, q),
        "nucleus_excess": nucleus_excess(p, q, REFERENCE_THETA),
        "target_entropy": entropy(p),
        "draft_entropy": entropy(q),
        "acceptance": unknown,
        "excess": unknown,
        "deviation": unknown,
    }
    if rule is not None:
        every = rule.acceptance(at)
        found["acceptance"] = gather(every, at.token)
        if law is not None:
            found |= {"excess": excess(p, q, every), "deviation": total_variation(law, p)}
    return found


def _places(draft: Draft, scores: Scores, verdict: Verdict) -> tuple[Place, Tensor]:
    """What the rule saw at each place [B, W], and the first-tried draft node there, -1 where there is none.

    Places behind the end of a row's path hold anything.
    """
    rows, nodes = draft.tokens.shape
    device = draft.tokens.device
    parent = pad(verdict.path[:, : int(verdict.lengths.max())], (1, 0), value=-1)
    child = first_child(draft.parents, draft.sizes, parent)
    row, drafted, node = torch.arange(rows, device=device).unsqueeze(1), child >= 0, child.clamp(min=0)
    none = PointMass(torch.full_like(child, -1), scores.probs.shape[-1], scores.probs.dtype)
    law = none if not nodes else (draft.law or PointMass(draft.tokens, none.vocabulary, none.dtype)).row(node, drafted)
    place = Place(
        p=scores.probs[row, parent + 1],
        q=law,
        token=torch.where(drafted, draft.tokens[row, node], -1) if nodes else child,
        depth=torch.arange(parent.shape[1], device=device).expand_as(parent),
        logits=scores.logits[row, parent + 1],
        hidden={tap: features[row, torch.where(drafted, child, parent) + 1] for tap, features in scores.hidden.items()},
    )
    return place, child


def _memories(at: Place, emitted: Tensor, rule: PointwiseVerifier, memory: Tensor) -> Tensor:
    """What the rule remembers at each place, [B, W, M], from what it does at the first."""
    found = [memory]
    for column in range(emitted.shape[1] - 1):
        here = torch.full_like(emitted[:, 0], column)
        place = Place(
            p=at.p[:, column],
            q=at.q.row(here, here >= 0),
            token=at.token[:, column],
            depth=at.depth[:, column],
            logits=at.logits[:, column],
            hidden={tap: features[:, column] for tap, features in at.hidden.items()},
            memory=found[-1],
        )
        after = rule.advance(place)
        found.append(rule.follow(emitted[:, column], found[-1] if after is None else after))
    return torch.stack(found, 1)
