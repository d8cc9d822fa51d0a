"""What the target computed over texts: tapped layers side by side, and its last rows, from which its law follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from attrs import frozen
from torch import Tensor

from specdec.errors import CompatibilityError
from specdec.target import FINAL, Target
from specdec.types import Span
from specdec_plugins.distill.corpus import Text

_FEW = 32  # tokens: logits are as wide as the vocabulary
_ROUNDING = 0.05  # of the largest logit


@final
@frozen(eq=False)
class Features:
    """Of one text of n tokens.

    Attributes:
        tapped: [n, taps * H].
        final: [n, H], after the final norm.
    """

    tapped: Tensor
    final: Tensor


def tap(target: Target, texts: Sequence[Text], taps: tuple[int, ...]) -> list[Features]:
    """Features of texts, in one forward. The target's cache has a row for each and commits nothing."""
    sizes = tuple(len(text.tokens) for text in texts)
    ids = torch.zeros((len(texts), max(sizes)), dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : sizes[row]] = torch.tensor(text.tokens)
    span = Span(ids.to(target.device), sizes)
    hidden = target.forward(tuple(range(len(texts))), span, taps=(*taps, FINAL), logits=False).hidden
    # Copies: what an inference forward gives cannot be trained on.
    return [
        Features(
            torch.cat([hidden[number][row, :size] for number in taps], -1),
            hidden[FINAL][row, :size].clone(),
        )
        for row, size in enumerate(sizes)
    ]


def see_plain(target: Target, text: Text) -> None:
    """See that the target's logits are its last rows times its head: laws are computed from these two.

    Raises:
        CompatibilityError: they are scaled, capped, or have a bias, or are no numbers.
    """
    ids = torch.tensor([text.tokens[:_FEW]], device=target.device)
    found = target.forward((0,), Span(ids, (ids.shape[1],)), taps=(FINAL,))
    assert found.logits is not None  # asked for
    head = head_of(target)
    with torch.inference_mode():
        wanted = (found.hidden[FINAL].to(head.device, head.dtype) @ head.T).float()
        logits = found.logits.to(head.device).float()
        if not bool(logits.isfinite().all()):
            raise CompatibilityError(
                f"target: its logits are not finite in {target.dtype}; try target.dtype: float32, or another checkpoint"
            )
        if (logits - wanted).abs().max() > _ROUNDING * logits.abs().max():
            raise CompatibilityError(
                "target: its logits are not its last rows times its head, but scaled, capped or with a bias, and a "
                "drafter would learn another law; wanted a target without"
            )


def size_of(features: Sequence[Features]) -> Tensor:
    """How large each number of the target's last rows is, float32 [H]."""
    return torch.cat([found.final for found in features]).float().square().mean(0).sqrt()


def head_of(target: Target) -> Tensor:
    """The target's head as a plain matrix [V, H]."""
    weight: Tensor = target.model.get_output_embeddings().weight.detach()
    return weight.to_dense() if weight.is_mkldnn else weight
