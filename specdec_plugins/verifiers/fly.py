"""FLy: a mismatch that the draft recovers from."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from attrs.validators import ge
from torch import Tensor

from specdec.law import PointMass
from specdec.noise import Noise
from specdec.probability import at as gather
from specdec.probability import entropy, normalise, softened
from specdec.theory import standard_acceptance
from specdec.types import SOURCES, Draft, Scores, Verdict
from specdec.verifier import Verifier


@final
@frozen(kw_only=True)
class Fly(Verifier):
    """Keeps a token that the standard rule rejects when the target is unsure there and accepts all that follows.

    Formula: m_i is the standard decision u_i < min(1, p(x_i)/q(x_i)). A rejection at i is passed over if p(x_i) > 0,
    the sum of -p log p over the target's top_k tokens is at least entropy_threshold, the draft has `window` more
    tokens, and m_(i+1) to m_(i+window) all accept. The first rejection that is not ends the path: norm((p - q)+)
    follows; bonus p. Published for temperature 0: where p has all its mass on one token, softmax(logits) gives the
    entropy and p(x_i) > 0, and a processor that forbids x_i is not heard.
    Source: arXiv:2511.22972; constants of its code, whose window of 6 counts the token itself. vLLM's `fly` looks at up
    to 6 further tokens.
    Guarantee: none. It accepts at least what the standard rule accepts. A draft of at most `window` tokens is judged by
    the standard rule alone: draft more, the paper drafts 15.
    Cost: O(V) per draft node. Chains only.

    Attributes:
        window: how many further tokens must be accepted.
        entropy_threshold: in nats.
        top_k: tokens that the entropy is summed over, not renormalised.
    """

    window: int = field(default=5, validator=ge(1))
    entropy_threshold: float = field(default=0.3, validator=ge(0.0))
    top_k: int = field(default=3, validator=ge(1))

    paper = "arXiv:2511.22972"
    family = "lookahead"
    exactness = "lossy"
    dominates_standard = True
    needs = frozenset({"raw_logits"})

    def verify(self, draft: Draft, scores: Scores, noise: Noise, memory: Tensor | None) -> Verdict:
        rows, nodes = draft.tokens.shape
        probs, tokens = scores.probs[:, :nodes], draft.tokens
        law = draft.law or PointMass(tokens, scores.probs.shape[-1], scores.probs.dtype)
        column = torch.arange(nodes, device=tokens.device)
        native = noise.uniform("accept", nodes) < standard_acceptance(gather(probs, tokens), law.at(tokens))
        native &= column < draft.sizes.unsqueeze(1)
        soft = softened(probs, scores.logits[:, :nodes])
        unsure = entropy(soft.topk(min(self.top_k, soft.shape[-1]), dim=-1).values) >= self.entropy_threshold
        # Accepted tokens up to each column; `window` more of them `window` columns later means no rejection between.
        accepted = torch.nn.functional.pad(native.long(), (0, self.window)).cumsum(1)
        agrees = accepted[:, self.window :] - accepted[:, :nodes] == self.window
        passed = ~native & unsure & agrees & (gather(soft, tokens) > 0)
        lengths = (native | passed).long().cumprod(1).sum(1)

        row = torch.arange(rows, device=tokens.device)
        rejected = lengths < draft.sizes
        follows = scores.probs[row, lengths]
        rest = follows - law.row(lengths, rejected).dense() if nodes else follows
        residual, lost = normalise(rest.clamp(min=0), follows)
        kind = torch.where(lost, SOURCES.index("fallback"), SOURCES.index("residual"))
        source = torch.where(rejected, kind, SOURCES.index("bonus")).to(torch.int8)
        return Verdict(column.expand(rows, nodes), lengths, residual, source)
