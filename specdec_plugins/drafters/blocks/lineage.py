"""Which weights a drafter was trained for: a mark of the target in the checkpoint, compared when both meet."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

_PER_TENSOR = 512
_SHOWN = 15


def mark(model: Any) -> str:
    """SHA-256 over name, shape and up to 512 evenly spaced numbers of every parameter, rounded to bfloat16.

    So it is the same in float32 and in bfloat16, and it is another one for other weights, quantized ones included.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        plain = tensor.detach().to_dense() if tensor.is_mkldnn else tensor.detach()
        digest.update(f"{name}\x1f{tuple(plain.shape)}\x1f".encode())
        if plain.device.type != "meta" and plain.numel():
            flat = plain.reshape(-1)
            numbers = flat[:: max(1, flat.numel() // _PER_TENSOR)].cpu().to(torch.bfloat16).contiguous()
            digest.update(bytes(numbers.view(torch.uint8).tolist()))
    return f"sha256-bfloat16:{digest.hexdigest()}"


def stranger(trained_for: str | None, model: Any) -> list[str]:
    """What is to be said when a drafter that was trained for one target meets a model."""
    if trained_for is None or (found := mark(model)) == trained_for:
        return []
    kind, _, wanted = trained_for.partition(":")
    got = found.partition(":")[2]
    return [
        f"the drafter was trained for other weights of this architecture ({kind} {wanted[:_SHOWN]}..., these are "
        f"{got[:_SHOWN]}...): outputs stay right, and fewer drafts may be kept"
    ]
