"""Integers are counted, rates are derived. Names as in vLLM where they exist."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import final

import torch
from attrs import Factory, asdict, define

from specdec.law import PointMass
from specdec.probability import at as gather
from specdec.probability import mass_above, total_variation
from specdec.theory import excess, nucleus_excess, rejection
from specdec.types import SOURCES, Draft, Extras, Kept, Scores
from specdec.verifier import Place, PointwiseVerifier, Verifier

# The paper's nucleus, for diagnostics that must not depend on the rule that runs.
REFERENCE_THETA = 0.95
DIAGNOSTICS = ("p", "q", "rank", "in_nucleus", "rejection", "nucleus_excess", "deviation", "excess")


@final
@define
class Counters:
    """What happened to one request, or, added up, to many.

    Attributes:
        num_steps: target verifications.
        num_drafts: steps with at least one draft token.
        num_draft_tokens: draft tokens that were verified.
        num_accepted_tokens: draft tokens that the rule kept and that were emitted.
        num_emitted_tokens: all new tokens, bonus and replacement included.
        num_clipped: draft tokens beyond the budget or outside the vocabulary, never verified.
        num_drafted_per_pos: how often a draft had a token at each position (in a tree, at each depth).
        num_accepted_tokens_per_pos: how often the token there was kept.
        num_per_source: how often the token after the path came from each of `SOURCES`.
        num_per_length: histogram of emitted tokens per step.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_clipped: int = 0
    num_drafted_per_pos: list[int] = Factory(list)
    num_accepted_tokens_per_pos: list[int] = Factory(list)
    num_per_source: dict[str, int] = Factory(lambda: dict.fromkeys(SOURCES, 0))
    num_per_length: dict[int, int] = Factory(dict)

    def count(self, kept: Kept, row: int) -> None:
        """Add one step of one row. A token that a stop cut off counts nowhere."""
        emitted = len(kept.tokens[row])
        accepted = min(kept.accepted[row], emitted)
        cut = emitted <= kept.accepted[row]
        drafted, depth = kept.drafted[row], kept.depths[row]
        if cut and drafted == depth:  # a chain: what the stop cut off was never looked at
            drafted = depth = min(drafted, emitted)
        self.num_steps += 1
        self.num_drafts += drafted > 0
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.num_emitted_tokens += emitted
        self.num_clipped += kept.clipped[row]
        for counts, upto in ((self.num_drafted_per_pos, depth), (self.num_accepted_tokens_per_pos, accepted)):
            counts.extend([0] * (upto - len(counts)))
            for position in range(upto):
                counts[position] += 1
        source = kept.sources[row]
        if source is not None and not cut:
            self.num_per_source[source] += 1
        if emitted:
            self.num_per_length[emitted] = self.num_per_length.get(emitted, 0) + 1

    @property
    def acceptance_rate(self) -> float | None:
        """num_accepted_tokens / num_draft_tokens; the bonus is not in it."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """num_emitted_tokens / num_steps, the papers' tau; bonus or replacement included."""
        return self.num_emitted_tokens / self.num_steps if self.num_steps else None

    def to_dict(self) -> dict[str, object]:
        """Plain data for a results file."""
        data = asdict(self)
        data["num_per_length"] = {str(length): count for length, count in sorted(self.num_per_length.items())}
        return data


def pool(parts: Sequence[Counters]) -> Counters:
    """The sum of counters."""
    total = Counters()
    for part in parts:
        for name in (
            "num_steps",
            "num_drafts",
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_emitted_tokens",
            "num_clipped",
        ):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for name in ("num_drafted_per_pos", "num_accepted_tokens_per_pos"):
            counts = getattr(total, name)
            more = getattr(part, name)
            counts.extend([0] * (len(more) - len(counts)))
            for position, value in enumerate(more):
                counts[position] += value
        for source, value in part.num_per_source.items():
            total.num_per_source[source] += value
        for length, value in part.num_per_length.items():
            total.num_per_length[length] = total.num_per_length.get(length, 0) + value
    return total


def probe(draft: Draft, scores: Scores, verifier: Verifier) -> Extras:
    """Diagnostics of every node of a chain, each [B, N] float64; positions after the first rejection were not examined.

    p, q: probabilities of the drafted token. rank: tokens more probable under p. in_nucleus: whether it lies in the
    target's nucleus of theta 0.95. rejection: R. nucleus_excess: E of NSD with theta 0.95 there, whatever rule runs.
    deviation: total variation between the rule's output law and p; excess: its acceptance beyond 1 - R. The last two
    are NaN for rules that have no law at one place, or need what they remember for it.
    """
    nodes = draft.tokens.shape[1]
    p = scores.probs[:, :nodes]
    law = draft.law or PointMass(draft.tokens, p.shape[-1], p.dtype)
    q = law.dense()
    tokens = draft.tokens
    columns = torch.arange(nodes, device=tokens.device).expand(tokens.shape)
    chosen = gather(p, tokens)
    values = {
        "p": chosen,
        "q": law.at(tokens),
        "rank": (p > chosen.unsqueeze(-1)).sum(-1),
        "in_nucleus": (mass_above(p, chosen) < REFERENCE_THETA) & (chosen > 0),
        "rejection": rejection(p, q),
        "nucleus_excess": nucleus_excess(p, q, REFERENCE_THETA),
        "deviation": torch.full_like(chosen, float("nan")),
        "excess": torch.full_like(chosen, float("nan")),
    }
    if isinstance(verifier, PointwiseVerifier) and verifier.memory == 0:
        hidden = {tap: features[:, 1:] for tap, features in scores.hidden.items()}
        at = Place(p, law, tokens, columns, scores.logits[:, :nodes], hidden)
        if (emitted := verifier.law(at)) is not None:
            values["deviation"] = total_variation(emitted, p)
            values["excess"] = excess(p, q, verifier.acceptance(at))
    return Extras({name: value.double() for name, value in values.items()})


def bootstrap(
    groups: Sequence[object], statistic: Callable[[list[object]], float | None], rounds: int = 1000, seed: int = 0
) -> tuple[float, float] | None:
    """A 95 % interval of a statistic by resampling groups (prompts) with replacement; None with fewer than two."""
    if len(groups) < 2:
        return None
    generator = random.Random(seed)
    drawn = [statistic(generator.choices(groups, k=len(groups))) for _ in range(rounds)]
    values = sorted(value for value in drawn if value is not None)
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=40, method="inclusive")
    return cuts[0], cuts[-1]
