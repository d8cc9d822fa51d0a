"""Block verification."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen
from torch import Tensor

from specdec.law import PointMass
from specdec.noise import Noise
from specdec.probability import at as gather
from specdec.probability import normalise
from specdec.types import SOURCES, Draft, Scores, Verdict
from specdec.verifier import Verifier


@final
@frozen(kw_only=True)
class Block(Verifier):
    """Keeps the longest prefix of a draft that the block as a whole allows; a token that fails alone ends nothing.

    Formula: w_0 = 1, w_i = min(1, w_(i-1) p(x_i)/q(x_i)); Z_i = sum of (w_i p - q)+ over the laws after x_1..x_i; h_i =
    Z_i / (Z_i + 1 - w_i) for i < K (1 where it is 0/0), h_K = w_K. The largest i with u_i < h_i is kept, or nothing;
    then norm((w_i p - q)+) follows, or the bonus p when i = K.
    Source: Sun et al., arXiv:2403.10444, algorithm 2.
    Guarantee: the output law is the target's, and no rule that is lossless for every pair of models accepts more tokens
    in the mean. On a single draft it may keep less than the standard rule.
    Cost: O(V) per draft node, and the draft's law dense. Chains only.
    """

    paper = "arXiv:2403.10444"
    family = "lossless"
    exactness = "lossless"

    def verify(self, draft: Draft, scores: Scores, noise: Noise, memory: Tensor | None) -> Verdict:
        rows, nodes = draft.tokens.shape
        probs, tokens = scores.probs, draft.tokens
        law = draft.law or PointMass(tokens, probs.shape[-1], probs.dtype)
        p, q = gather(probs[:, :nodes], tokens), law.at(tokens)
        ratio = torch.where(q > 0, p / torch.where(q > 0, q, 1.0), 0.0)
        weights = [torch.ones_like(probs[:, 0, 0])]
        for node in range(nodes):
            weights.append((weights[-1] * ratio[:, node]).clamp(max=1.0))
        weight = torch.stack(weights, 1)
        # What is left of each prefix: its own target less the draft, [B, N, V]; prefix i is row i.
        left = (weight[:, :nodes].unsqueeze(-1) * probs[:, :nodes] - law.dense()).clamp(min=0).sum(-1)
        whole = left + (1 - weight[:, :nodes])
        inner = torch.where(whole > 0, left / torch.where(whole > 0, whole, 1.0), 1.0)
        column = torch.arange(1, nodes + 1, device=tokens.device)
        last = column == draft.sizes.unsqueeze(1)
        enough = torch.where(last, weight[:, 1:], torch.nn.functional.pad(inner[:, 1:], (0, min(1, nodes))))
        kept = (noise.uniform("accept", nodes) < enough) & (column <= draft.sizes.unsqueeze(1))
        lengths = (kept * column).amax(1) if nodes else torch.zeros_like(draft.sizes)

        row = torch.arange(rows, device=tokens.device)
        rejected = lengths < draft.sizes
        follows = probs[row, lengths]
        if nodes:
            rest = weight[row, lengths].unsqueeze(1) * follows - law.row(lengths, rejected).dense()
            residual, lost = normalise(torch.where(rejected.unsqueeze(1), rest.clamp(min=0), follows), follows)
        else:
            residual, lost = follows, rejected
        kind = torch.where(lost, SOURCES.index("fallback"), SOURCES.index("residual"))
        source = torch.where(rejected, kind, SOURCES.index("bonus")).to(torch.int8)
        return Verdict((column - 1).expand(rows, nodes), lengths, residual, source)
