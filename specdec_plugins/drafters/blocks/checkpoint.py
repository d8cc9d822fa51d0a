"""Checkpoints of block drafters: a folder with config.json and safetensors, or a hub id. Read whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from attrs import evolve, field, frozen
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_bytes
from torch import Tensor, nn

from specdec import hub
from specdec.checkpoint import is_there
from specdec.errors import ModelError
from specdec_plugins.drafters.blocks import shipped
from specdec_plugins.drafters.blocks.backbone import Backbone
from specdec_plugins.drafters.blocks.config import BlockConfig, as_dict, read
from specdec_plugins.drafters.blocks.markov import Confidence, Markov

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Frozen copies of the target's, which a checkpoint may bring.
OF_TARGET = ("embed_tokens.weight", "lm_head.weight")
_TRAINED_FOR = "trained_for"
_SHOWN = 3


@final
@frozen(eq=False, kw_only=True)
class BlockModel:
    """A block drafter's networks.

    Attributes:
        config: what it is.
        backbone: its layers.
        markov: its Markov head, or None.
        confidence: its confidence head, or None.
        files: the file of each tensor, where it came from a checkpoint.
        trained_for: mark of the target's weights, as `lineage.mark` gives it, where the checkpoint says it.
    """

    config: BlockConfig
    backbone: Backbone
    markov: Markov | None = None
    confidence: Confidence | None = None
    files: Mapping[str, Path] = field(factory=dict)
    trained_for: str | None = None

    @classmethod
    def empty(cls, config: BlockConfig) -> BlockModel:
        """Networks of this kind, with the weights that torch gives them."""
        width, rank = config.shape.hidden_size, config.rank
        return cls(
            config=config,
            backbone=Backbone(config.shape),
            markov=Markov(config.vocabulary, width, rank, config.markov) if config.markov else None,
            confidence=Confidence(width, rank if config.confidence_with_markov else 0) if config.confidence else None,
        )

    @property
    def parts(self) -> list[tuple[str, nn.Module]]:
        """The networks, with what the names of their parameters begin with."""
        heads = (("markov_head.", self.markov), ("confidence_head.", self.confidence))
        return [("", self.backbone), *((prefix, head) for prefix, head in heads if head is not None)]

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter, by its published name."""
        return {
            prefix + name: value
            for prefix, part in self.parts
            for name, value in part.state_dict(keep_vars=True).items()
        }

    def of_target(self, name: str) -> Tensor | None:
        """One of `OF_TARGET` as the checkpoint has it, or None where it has none."""
        return _tensor(self.files[name], name) if name in self.files else None


def find(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of a checkpoint: one that comes with the package, a folder, or a hub id, which is fetched.

    Raises:
        ModelError: it is not there.
    """
    if name.startswith(shipped.PREFIX):
        return shipped.folder_of(name)
    folder = Path(name).expanduser()
    if is_there(folder) and folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or is_there(folder):
        raise ModelError(f"model {name!r}: no such folder; wanted a folder with {_CONFIG}, or a hub id")
    return _fetched(name, revision, [_CONFIG, *(["*.safetensors", _INDEX] if weights else [])])


def describe(folder: Path) -> BlockConfig:
    """What the checkpoint in a folder is, by its config.

    Raises:
        ModelError: there is none, or it is not one that is known.
    """
    file = folder / _CONFIG
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{folder}: holds no {_CONFIG}; wanted the folder of a block drafter") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: holds no mapping; wanted the config of a block drafter")
    return read(content, str(file))


def sizes(folder: Path, config: BlockConfig) -> dict[str, int]:
    """Bytes of every tensor in the files of a checkpoint; only headers are read.

    Raises:
        ModelError: tensors are missing, left over or misshapen; names every reason.
    """
    return {name: count for name, (_, count) in _checked(folder, config).items()}


def load(folder: Path, *, dtype: Any = "auto") -> BlockModel:
    """The networks of a checkpoint, on the CPU.

    Args:
        folder: as `find` gives it.
        dtype: 'auto' is that of the checkpoint's `fc.weight`.

    Raises:
        ModelError: the config is not known, or tensors are missing, left over or misshapen; names every reason.
    """
    config = describe(folder)
    files = {name: file for name, (file, _) in _checked(folder, config).items()}
    kind = _tensor(files["fc.weight"], "fc.weight").dtype if dtype == "auto" else dtype
    with torch.device("meta"):
        model = BlockModel.empty(config)
    for prefix, part in model.parts:
        state = {name: _tensor(files[prefix + name], prefix + name).to(kind) for name in part.state_dict()}
        part.load_state_dict(state, assign=True)
        part.requires_grad_(False).eval()
    with _opened(files["fc.weight"]) as weights:
        trained_for = (weights.metadata() or {}).get(_TRAINED_FOR)
    return evolve(model, files=files, trained_for=trained_for)


def save(folder: Path, model: BlockModel) -> None:
    """Write a checkpoint in DeepSpec's form, without copies of the target's embedding and head. What it was trained for
    goes into the metadata of the file. Files that are there stay whole until the new ones are.

    Raises:
        ModelError: that form cannot say it.
    """
    text = json.dumps(as_dict(model.config), indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.tensors().items()}
    about = {"format": "pt"} | ({_TRAINED_FOR: model.trained_for} if model.trained_for else {})
    # Not with save_file, which keeps its file from everybody else whatever the umask.
    for name, content in ((_WEIGHTS, as_bytes(tensors, about)), (_CONFIG, text.encode())):
        new = folder / f".{name}.new"
        new.write_bytes(content)
        new.replace(folder / name)


def _fetched(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        if hub.answers():
            return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
        with hub.left_alone():
            return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=True))
    except Exception as error:  # a client of the network fails in many ways
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(
            f"model {name!r}: no such folder, and the hub does not give it ({line}); try a folder, or again with a "
            "connection"
        ) from error


def _checked(folder: Path, config: BlockConfig) -> dict[str, tuple[Path, int]]:
    """File and bytes of every tensor, when the tensors are exactly those of the config."""
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in BlockModel.empty(config).tensors().items()}
    optional = dict.fromkeys(OF_TARGET, (config.vocabulary, config.shape.hidden_size))
    found = dict(_listed(folder))
    problems = []
    if missing := sorted(wanted.keys() - found.keys()):
        problems.append(f"{len(missing)} tensors are missing, {_some(missing)}")
    if extra := sorted(found.keys() - wanted.keys() - optional.keys()):
        problems.append(f"{len(extra)} tensors are left over, {_some(extra)}")
    for name, shape in (wanted | optional).items():
        if name in found and (got := found[name][1]) != shape:
            problems.append(f"{name} is {list(got)}, wanted {list(shape)}")
        elif name in found and not found[name][2].startswith(("F", "BF")):
            problems.append(f"{name} holds {found[name][2]}, wanted floating-point numbers")
    if problems:
        raise ModelError(f"{folder}: {'; '.join(problems)}; compare {_CONFIG} with the weights")
    return {name: (file, count) for name, (file, _, _, count) in found.items()}


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} the first"


def _listed(folder: Path) -> Iterator[tuple[str, tuple[Path, tuple[int, ...], str, int]]]:
    """File, shape, dtype and bytes of every tensor, from the headers of the files."""
    for file in _files(folder):
        with _opened(file) as weights:
            for name in weights.keys():  # noqa: SIM118  # it is no mapping
                part = weights.get_slice(name)
                shape, kind = tuple(part.get_shape()), str(part.get_dtype())
                bits = int("".join(letter for letter in kind.partition("_")[0] if letter.isdigit()) or 8)
                yield name, (file, shape, kind, torch.Size(shape).numel() * bits // 8)


def _files(folder: Path) -> Iterable[Path]:
    index = folder / _INDEX
    if not index.is_file():
        return [folder / _WEIGHTS]
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / str(name) for name in sorted(shards)]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: names no files of weights; fetch the checkpoint again") from error


def _tensor(file: Path, name: str) -> Tensor:
    with _opened(file) as weights:
        found: Tensor = weights.get_tensor(name)
        return found


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except (SafetensorError, OSError) as error:
        why = "is not there" if not file.is_file() else f"is no whole safetensors file: {error}"
        raise ModelError(f"{file}: {why}; fetch the checkpoint again") from error
