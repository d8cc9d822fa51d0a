"""The interface of verification rules, and the one walk that all pointwise rules share.

A rule is pure: what it sees, its noise and its memory are arguments, and it answers with a path and a distribution, not
with a token. So losslessness and every bound can be tested by exact enumeration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal, final

import torch
from attrs import frozen
from torch import Tensor

from specdec.law import Law, PointMass, pick
from specdec.noise import Noise
from specdec.probability import at as gather
from specdec.probability import normalise
from specdec.target import Target
from specdec.theory import output_law, standard_acceptance
from specdec.types import SOURCES, Draft, Scores, Verdict

Family = Literal["lossless", "standard_or_set", "set_only", "mixture", "lookahead", "other"]
Exactness = Literal["lossless", "own_target", "lossy"]
Need = Literal["draft_law", "raw_logits", "hidden"]
Replacement = Literal["residual", "target", "argmax"]


class Verifier(ABC):
    """Decides which draft tokens are kept and what follows them. All properties may depend on the options."""

    paper: ClassVar[str] = ""
    """Where the rule was published, such as "arXiv:2211.17192"."""

    @property
    @abstractmethod
    def family(self) -> Family:
        """What kind of rule it is."""

    @property
    @abstractmethod
    def exactness(self) -> Exactness:
        """Whether the output law is the target's ("lossless"), another one it states ("own_target"), or neither."""

    @property
    def dominates_standard(self) -> bool:
        """Whether it accepts, on common noise, at least what the standard rule accepts."""
        return False

    @property
    def needs(self) -> frozenset[Need]:
        """What it cannot do without. "draft_law" refuses drafters that only give point masses."""
        return frozenset()

    @property
    def trees(self) -> bool:
        """Whether it can walk token trees."""
        return False

    @property
    def taps(self) -> tuple[int, ...]:
        """Target features it wants in `Scores.hidden`."""
        return ()

    @property
    def memory(self) -> int:
        """M, how many numbers it remembers of each request between steps."""
        return 0

    def prepare(self, target: Target | None) -> None:  # noqa: B027  # most rules have nothing to prepare
        """Called once before the first step: load the weights of a head, turn strings into ids."""

    def start(self, prompt: tuple[int, ...]) -> tuple[float, ...]:
        """The M numbers of a new request."""
        return (0.0,) * self.memory

    @abstractmethod
    def verify(self, draft: Draft, scores: Scores, noise: Noise, memory: Tensor | None) -> Verdict:
        """Judge a draft. `memory` is float64 [B, M], or None for a rule that remembers nothing."""


@final
@frozen(eq=False)
class Place:
    """What one draft node sees from its parent. Leading dimensions `...` are the same everywhere.

    Attributes:
        p: [..., V], the target's law here, processed.
        q: the law the draft token was drawn from, [..., V] when dense; the zero measure where nothing was proposed.
        token: int64 [...], the draft token; -1 at a leaf.
        depth: int64 [...], 0 for a child of the pending token.
        logits: [..., V], raw.
        hidden: tap -> [..., H], the target's features at the node itself (at a leaf, of its parent).
        memory: float64 [..., M], or None.
    """

    p: Tensor
    q: Law
    token: Tensor
    depth: Tensor
    logits: Tensor
    hidden: Mapping[int, Tensor]
    memory: Tensor | None = None


class FastAccept(ABC):
    """Optional beside `PointwiseVerifier`: the acceptance at the drafted tokens only."""

    @abstractmethod
    def accept_at(self, at: Place) -> Tensor:
        """`acceptance(at)` at `at.token`, [...]."""


class PointwiseVerifier(Verifier):
    """Each node is kept with a probability that depends on what is seen there; the first miss ends the path."""

    @property
    def replacement(self) -> Replacement:
        """What `correct` draws from after a rejection; shown in counters."""
        return "residual"

    @property
    def trees(self) -> bool:
        return self.dominates_standard

    @abstractmethod
    def acceptance(self, at: Place) -> Tensor:
        """The definition of the rule: probability of keeping each token of the vocabulary, [..., V]."""

    def correct(self, at: Place) -> Tensor:
        """Law of the replacement up to a constant, [..., V]. At a leaf (`at.token` is -1) the law of the bonus token.

        The residual (p - q)+ of the standard rule, arXiv:2211.17192; at a leaf q is the zero measure and this is p.
        """
        return (at.p - at.q.dense()).clamp(min=0)

    @property
    def own_siblings(self) -> bool:
        """Whether further children of a node are tried by the rule, too, against what is left of p there."""
        return False

    def law(self, at: Place) -> Tensor | None:
        """Law of the token emitted at a drafted place before its draft token is known, [..., V].

        This holds where `acceptance` and `correct` do not look at `at.token`; a rule where they do gives its own, or
        None where that is not known. A rule of exactness "own_target" states here what it decodes.
        """
        return output_law(at.q.dense(), self.acceptance(at), normalise(self.correct(at), at.p)[0])

    def advance(self, at: Place) -> Tensor | None:
        """Memory after this place was examined, whatever became of its token. Siblings share a place."""
        return at.memory

    def follow(self, tokens: Tensor, memory: Tensor) -> Tensor:
        """Memory once these tokens, int64 [B], are known: the pending ones first, then each that is kept."""
        return memory

    @final
    def verify(self, draft: Draft, scores: Scores, noise: Noise, memory: Tensor | None) -> Verdict:
        rows, nodes = draft.tokens.shape
        law = draft.law or PointMass(draft.tokens, scores.probs.shape[-1], scores.probs.dtype)
        uniform = noise.uniform("accept", nodes)
        if draft.parents is not None or memory is not None:
            return self._walk(draft, law, scores, uniform, memory)
        columns = torch.arange(nodes, device=draft.tokens.device)
        chain = Place(
            p=scores.probs[:, :nodes],
            q=law,
            token=draft.tokens,
            depth=columns.expand(rows, nodes),
            logits=scores.logits[:, :nodes],
            hidden={tap: features[:, 1:] for tap, features in scores.hidden.items()},
        )
        accepted = (uniform < self._at_token(chain)) & (columns < draft.sizes.unsqueeze(1))
        lengths = accepted.long().cumprod(1).sum(1)
        rejected = lengths < draft.sizes
        node = lengths.clamp(max=max(nodes - 1, 0))
        token = pick(draft.tokens, node) if nodes else torch.zeros_like(lengths)
        end = Place(
            p=pick(scores.probs, lengths),
            q=law.row(node, rejected)
            if nodes
            else PointMass(lengths * 0 - 1, scores.probs.shape[-1], scores.probs.dtype),
            token=torch.where(rejected, token, -1),
            depth=lengths,
            logits=pick(scores.logits, lengths),
            hidden={tap: pick(features, lengths + rejected) for tap, features in scores.hidden.items()},
        )
        next_probs, lost = normalise(self.correct(end), end.p)
        return Verdict(columns.expand(rows, nodes), lengths, next_probs, self._source(rejected, lost))

    def _at_token(self, at: Place) -> Tensor:
        return self.accept_at(at) if isinstance(self, FastAccept) else gather(self.acceptance(at), at.token)

    def _source(self, rejected: Tensor, lost: Tensor) -> Tensor:
        kind = torch.where(lost, SOURCES.index("fallback"), SOURCES.index(self.replacement))
        return torch.where(rejected, kind, SOURCES.index("bonus")).to(torch.int8)

    def _walk(self, draft: Draft, law: Law, scores: Scores, uniform: Tensor, memory: Tensor | None) -> Verdict:
        """Node by node, for trees and for rules that remember. The first child of a node is tried by the rule, further
        siblings by recursive rejection (SpecInfer, arXiv:2305.09781): the standard rule, or the rule itself where it
        says so, against what is left of p.
        """
        rows, nodes = draft.tokens.shape
        row = torch.arange(rows, device=draft.tokens.device)
        current = torch.full_like(row, -1)
        lengths = torch.zeros_like(row)
        tried = torch.zeros_like(row, dtype=torch.bool)
        lost = torch.zeros_like(tried)
        path = torch.zeros((rows, nodes), dtype=torch.int64, device=row.device)
        left = scores.probs[:, 0]  # what is left of p at the current node
        if memory is not None:
            memory = self.follow(scores.tokens[:, 0], memory)
        for node in range(nodes):
            parent = draft.parents[:, node] if draft.parents is not None else torch.full_like(row, node - 1)
            active = (node < draft.sizes) & (parent == current)
            here = torch.full_like(row, node)
            at = self._place(
                draft, law.row(here, here >= 0), scores, left, current, draft.tokens[:, node], node, lengths, memory
            )
            rest = at.q.dense()
            chance = self._at_token(at)
            if not self.own_siblings:
                chance = torch.where(
                    tried, standard_acceptance(gather(left, at.token), at.q.at(at.token)), chance.to(left.dtype)
                )
            keep = active & (uniform[:, node] < chance)
            miss = active & ~keep
            residual = self.correct(at)
            if not self.own_siblings:
                residual = torch.where(tried.unsqueeze(1), (left - rest).clamp(min=0), residual)
            residual, gone = normalise(residual, left)
            if memory is not None and (after := self.advance(at)) is not None:
                memory = torch.where((active & ~tried).unsqueeze(1), after, memory)
                memory = torch.where(keep.unsqueeze(1), self.follow(at.token, memory), memory)
            lost = torch.where(miss, gone, lost & ~keep)
            path[row, lengths.clamp(max=nodes - 1)] = torch.where(keep, node, path[row, lengths.clamp(max=nodes - 1)])
            lengths = lengths + keep
            current = torch.where(keep, node, current)
            tried = (tried | miss) & ~keep
            left = torch.where(
                miss.unsqueeze(1), residual, torch.where(keep.unsqueeze(1), scores.probs[:, node + 1], left)
            )
        none = PointMass(torch.full_like(row, -1), scores.probs.shape[-1], scores.probs.dtype)
        leaf = self._place(draft, none, scores, left, current, torch.full_like(row, -1), None, lengths, memory)
        bonus, empty = normalise(self.correct(leaf), left)
        next_probs = torch.where(tried.unsqueeze(1), left, bonus)
        return Verdict(path, lengths, next_probs, self._source(tried, torch.where(tried, lost, empty)), memory)

    def _place(
        self,
        draft: Draft,
        law: Law,
        scores: Scores,
        p: Tensor,
        current: Tensor,
        token: Tensor,
        node: int | None,
        depth: Tensor,
        memory: Tensor | None,
    ) -> Place:
        column = current + 1 if node is None else torch.full_like(current, node + 1)
        return Place(
            p=p,
            q=law,
            token=token,
            depth=depth,
            logits=pick(scores.logits, current + 1),
            hidden={tap: pick(features, column) for tap, features in scores.hidden.items()},
            memory=memory,
        )
