"""Linear layers from weights in the layout that oneDNN reads fastest on a CPU.

A step of decoding reads every weight for a few columns, so it takes as long as the memory takes to give them. torch
hands oneDNN a plain matrix each time; prepared once, the same product comes 1.3 to 5 times as fast for 1 to 40 columns,
and no slower for more. The prepared weight replaces the plain one. Embeddings that a head shares stay as they are, and
the head gets a prepared copy.
"""

from __future__ import annotations

from typing import Any, NoReturn, Self, final

import torch
from torch import Tensor, nn

# Smaller ones stay in a processor's caches, where the plain call is as fast.
_LEAST = 1 << 16
_COLUMNS = 16  # columns a layer is prepared for; it takes any number
# One or two columns go another way, by which a large weight takes 20 to 40 % longer than for four of them.
_LARGE = 1 << 20
_FEW, _COLUMNS_OF_FEW = 2, 4
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_ops: Any = torch.ops.mkldnn
_BOUND = "a prepared linear layer stays as it is; to copy, move, convert or save the model, load it with packed: false"


@final
class PackedLinear(nn.Module):
    """A linear layer whose `weight` [out, in] is oneDNN's: opaque to torch, `weight.to_dense()` is the matrix."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = _ops._reorder_linear_weight(linear.weight.detach(), _COLUMNS)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self._large = linear.weight.numel() >= _LARGE
        self.train(linear.training)

    def forward(self, columns: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if self._large and 0 < (count := columns.shape[:-1].numel()) <= _FEW:
            copies = columns.reshape(count, -1).repeat(_COLUMNS_OF_FEW // count, 1)
            return self._product(copies)[:count].reshape(*columns.shape[:-1], -1)
        return self._product(columns)

    def _product(self, columns: Tensor) -> Tensor:
        return _ops._linear_pointwise(columns, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]  # untyped

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # torch has few operations on such a weight, and names none that failed
            raise RuntimeError(_BOUND) from error
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(_BOUND)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack(model: nn.Module) -> int:
    """Prepare a model's linear layers in place, those on a CPU in a dtype that it multiplies itself.

    Returns:
        How many layers were prepared; 0 where this torch or this processor cannot.
    """
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and _gains(module)]
    for name in names:
        parent, _, own = name.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, own, PackedLinear(getattr(holder, own)))  # one after another: the plain one goes at once
    if names:
        _let_go(model)
    return len(names)


def _let_go(model: nn.Module) -> None:
    """Move what stayed plain into memory of its own: a view of a checkpoint's file would keep all of that mapped."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and not parameter.is_mkldnn:
            parameter.data = parameter.data.clone()


def _gains(linear: nn.Linear) -> bool:
    weight = linear.weight
    large = weight.device.type == "cpu" and weight.numel() >= _LEAST
    # Quantized weights are of a type of their own; hooks and another forward would be lost.
    plain = type(weight) is nn.Parameter and not linear._forward_hooks and not linear._forward_pre_hooks
    return large and plain and "forward" not in vars(linear) and _exact(weight.dtype)


def _exact(dtype: torch.dtype) -> bool:
    """Whether a prepared layer of this dtype gives what a plain one does, up to rounding; tried once."""
    if dtype not in _tried:
        _tried[dtype] = dtype in _ROUNDING and _agrees(dtype)
    return _tried[dtype]


_tried: dict[torch.dtype, bool] = {}


def _agrees(dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    # Neither the caller's random numbers nor a default device of theirs have a part in it.
    linear = nn.Linear(96, 80, device="meta", dtype=dtype).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu"))
        columns = torch.randn((2, 5, 96), generator=generator, device="cpu", dtype=torch.float32).to(dtype)
        wanted = nn.functional.linear(columns.double(), linear.weight.double(), linear.bias.double())
        try:
            packed = PackedLinear(linear)
            same = torch.equal(packed.weight.to_dense(), linear.weight)
            error = (packed(columns).double() - wanted).abs().amax() / wanted.abs().amax()
        except (RuntimeError, AttributeError):  # another torch, or a processor without this dtype
            return False
    return same and bool(error < _ROUNDING[dtype])
