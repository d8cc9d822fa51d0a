"""Judge decoding: a learned head that looks at the draft token."""

from __future__ import annotations

from pathlib import Path
from typing import final

import torch
from attrs import define, field
from attrs.validators import ge, le
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.errors import CompatibilityError, ModelError
from specdec.probability import at as gather
from specdec.probability import one_hot, softened
from specdec.target import Target
from specdec.theory import standard_acceptance
from specdec.verifier import FastAccept, Place, PointwiseVerifier

_LAST = -1


@final
@define(kw_only=True, eq=False)
class Judge(PointwiseVerifier, FastAccept):
    """Keeps what the standard rule keeps, or what a linear head on the target's features of the draft token approves.

    Formula: a(x) = 1 if sigmoid(w . h(x) + b) >= threshold, else min(1, p(x)/q(x)); h(x) is the target's feature after
    the final norm at x itself. Replacement norm((p - q)+); bonus p. x must be possible: p(x) > 0, or where p has all
    its mass on one token, as at temperature 0, softmax(logits)(x) > 0; a processor that forbids x is not heard there.
    Source: Bachmann et al., arXiv:2501.19309; no head is published with it.
    Guarantee: none; it accepts at least what the standard rule accepts. The definition is known at the drafted token
    only: the others have no feature, and get the standard acceptance.
    Cost: O(H) per draft node.

    Attributes:
        weights: a safetensors file with `weight` [H] or [1, H] and, if there is one, `bias` [] or [1].
        threshold: probability from which the head approves.
    """

    weights: str
    threshold: float = field(default=0.5, validator=[ge(0.0), le(1.0)])
    _head: tuple[Tensor, Tensor] | None = field(init=False, default=None, repr=False)

    paper = "arXiv:2501.19309"
    family = "standard_or_set"
    exactness = "lossy"
    dominates_standard = True
    needs = frozenset({"hidden", "raw_logits"})
    taps = (_LAST,)

    def prepare(self, target: Target | None) -> None:
        """Load the head.

        Raises:
            ModelError: the file is missing, damaged or laid out in another way.
            CompatibilityError: the head is for another hidden size.
        """
        weight, bias = self._load()
        if target is not None:
            if weight.shape[0] != target.config.hidden_size:
                raise CompatibilityError(
                    f"verifier Judge: {self.weights!r} has {weight.shape[0]} weights and the target's features have "
                    f"{target.config.hidden_size}; wanted a head that was trained on this target"
                )
            weight, bias = weight.to(target.device), bias.to(target.device)
        self._head = weight, bias

    def acceptance(self, at: Place) -> Tensor:
        standard = standard_acceptance(at.p, at.q.dense())
        drafted = one_hot(at.token.clamp(min=0), at.p.shape[-1], at.p.dtype) > 0
        return torch.where(drafted & self._approved(at).unsqueeze(-1), 1.0, standard)

    def accept_at(self, at: Place) -> Tensor:
        standard = standard_acceptance(gather(at.p, at.token), at.q.at(at.token))
        return torch.where(self._approved(at), 1.0, standard)

    def law(self, at: Place) -> None:
        """Not known: it takes the features of tokens that were not drafted."""

    def _approved(self, at: Place) -> Tensor:
        if self._head is None:
            raise CompatibilityError("verifier Judge: has no head yet; call prepare(target), as Engine does")
        weight, bias = (part.to(at.p.dtype) for part in self._head)
        score = (at.hidden[_LAST].to(at.p.dtype) @ weight + bias).sigmoid()
        return (score >= self.threshold) & (gather(softened(at.p, at.logits), at.token) > 0)

    def _load(self) -> tuple[Tensor, Tensor]:
        path = Path(self.weights).expanduser()
        wanted = "wanted a safetensors file with `weight` [H] or [1, H] and `bias` [] or [1] or none"
        if not path.is_file():
            raise ModelError(f"verifier Judge: weights {self.weights!r}: no such file; {wanted}")
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"verifier Judge: weights {self.weights!r}: cannot be read: {error}; {wanted}") from error
        weight, bias = tensors.get("weight"), tensors.get("bias", torch.zeros(1))
        fits = weight is not None and (weight.dim() == 1 or (weight.dim() == 2 and weight.shape[0] == 1))
        if weight is None or not fits or bias.numel() != 1 or tensors.keys() - {"weight", "bias"}:
            got = ", ".join(f"`{name}` {list(tensor.shape)}" for name, tensor in sorted(tensors.items())) or "nothing"
            raise ModelError(f"verifier Judge: weights {self.weights!r}: holds {got}; {wanted}")
        if not bool(weight.isfinite().all() & bias.isfinite().all()):
            raise ModelError(f"verifier Judge: weights {self.weights!r}: holds values that are not finite; {wanted}")
        return weight.reshape(-1), bias.reshape(())
