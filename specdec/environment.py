"""What a run depended on besides its recipe: versions, machine, weights."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from specdec.target import Target

_PACKAGES = ("specdec-lab", "torch", "transformers", "tokenizers", "safetensors", "numpy", "accelerate", "gguf")
_PER_TENSOR = 4096


def environment(target: Target) -> dict[str, Any]:
    """Plain data about versions, machine and target."""
    return {
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None}
        | {"torch": str(torch.__version__)},  # with its build, which the metadata may leave out
        "platform": platform.platform(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "accelerators": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "target": {
            "model_type": target.config.model_type,
            "parameters": target.parameters,
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "weights": weights_hash(target.model),
        },
    }


def weights_hash(model: Any) -> str:
    """SHA-256 over name, shape, dtype and up to 4096 evenly spaced numbers of every parameter and buffer.

    Reading a sample keeps it to seconds for any size; it tells checkpoints, revisions and dtypes apart.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        digest.update(f"{name}\x1f{tuple(tensor.shape)}\x1f{tensor.dtype}\x1f".encode())
        if tensor.is_mkldnn:
            tensor = tensor.to_dense()
        if tensor.device.type != "meta" and tensor.numel():
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // _PER_TENSOR)].contiguous().cpu()
            digest.update(bytes(sample.view(torch.uint8).tolist()))
    return f"sha256-sample:{digest.hexdigest()}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
