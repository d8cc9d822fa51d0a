"""The lenient ratio, fixed or scaled by the entropy."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from attrs.validators import ge, gt, le
from torch import Tensor

from specdec.probability import at as gather
from specdec.probability import entropy, softened
from specdec.theory import standard_acceptance
from specdec.verifier import FastAccept, Place, PointwiseVerifier


@final
@frozen(kw_only=True)
class Leniency(PointwiseVerifier, FastAccept):
    """Keeps a draft token with the standard probability divided by a leniency.

    Formula: a(x) = min(1, p(x) / (l q(x))) with l = min(leniency, exp(-entropy_scale H)), H = -sum r log(r + 1e-10) of
    the raw law r = softmax(logits); replacement norm((p - q)+); bonus p. Where p has all its mass on one token, as at
    temperature 0, the raw law decides instead: x is kept too when r(x) >= l max r. A processor that forbids x is not
    heard there.
    Source: Leviathan et al., arXiv:2211.17192, appendix A.5, with the replacement of Fast-HSD; the entropy scale is
    that of vllm-ascend (leniency 0.95, entropy_scale 0.4).
    Guarantee: out(x) <= p(x)/l above temperature 0; the total variation is the acceptance beyond the standard rule's.
    Leniency 1 without the scale is exact there.
    Cost: O(V) per draft node.

    Attributes:
        leniency: the largest l; the paper tries 0.1 to 0.8 and gives no default.
        entropy_scale: how l falls with the target's entropy in nats; 0 is a fixed l.
    """

    leniency: float = field(default=0.5, validator=[gt(0.0), le(1.0)])
    entropy_scale: float = field(default=0.0, validator=ge(0.0))

    paper = "arXiv:2211.17192"
    family = "standard_or_set"
    exactness = "lossy"
    dominates_standard = True
    needs = frozenset({"raw_logits"})

    def acceptance(self, at: Place) -> Tensor:
        soft = softened(at.p, at.logits)
        return self._keep(at, soft, at.p, at.q.dense(), soft)

    def accept_at(self, at: Place) -> Tensor:
        soft = softened(at.p, at.logits)
        chosen = (gather(at.p, at.token), at.q.at(at.token), gather(soft, at.token))
        return self._keep(at, soft, *(value.unsqueeze(-1) for value in chosen)).squeeze(-1)

    def _keep(self, at: Place, soft: Tensor, p: Tensor, q: Tensor, own: Tensor) -> Tensor:
        """The acceptance of tokens with these probabilities under p, q and `soft`."""
        least = torch.full_like(at.p[..., :1], self.leniency)
        if self.entropy_scale:
            uncertainty = entropy(at.logits.softmax(-1), floor=1e-10).to(p.dtype).unsqueeze(-1)
            least = (-self.entropy_scale * uncertainty).exp().clamp(max=self.leniency)
        greedy = (at.p > 0).sum(-1, keepdim=True) == 1
        near = greedy & (own >= least * soft.amax(-1, keepdim=True))
        return torch.where(near, 1.0, standard_acceptance(p, least * q))
