"""Recorded decode steps in the folder of a run: what each drafted block saw, and what became of it.

A shard is a safetensors file with steps of one combination; `shards.jsonl` says which shards count, and which of their
requests. docs/replay.md names every tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, final

import torch
from attrs import evolve, field, frozen
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as as_bytes
from torch import Tensor

from specdec.errors import DataError

SCHEMA_VERSION = 1
FOLDER, INDEX, SHARDS, PROMPTS = "traces", "index.json", "shards.jsonl", "prompts.json"
Kind = Literal["full", "compact"]
LawKind = Literal["dense", "point"]
RequestKey = tuple[str, int]
JOINED_BYTES = 64 << 20
_TRY = "try to run the recipe anew"
# How often each tensor has an entry: once a step, draft place, score row (one more than places), emitted token, kept
# vocabulary entry.
_EXTENTS = {
    "step": ("request", "step", "seed", "pending", "size", "end", "accepted", "emitted_count", "finished"),
    "place": ("draft", "q", "kept"),
    "row": ("p", "logits"),
    "emitted": ("emitted",),
    "entry": ("ids", "kept_p", "kept_q"),
}
_EXTENT = {name: extent for extent, names in _EXTENTS.items() for name in names}
_COMMON = {*_EXTENTS["step"], "draft", "emitted"}


@final
@frozen(eq=False)
class Steps:
    """S decode steps of one combination, in the order they were made; D draft places in all.

    Attributes:
        law: `dense`, or `point` where the drafter drew from point masses.
        requests: sample id and repeat; the tensor `request` int64 [S] indexes them.
        tensors: by name. Those of compact traces that are not listed above have one entry a draft place.
    """

    law: LawKind
    requests: tuple[RequestKey, ...]
    tensors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __len__(self) -> int:
        return len(self.tensors["size"])

    @property
    def vocabulary(self) -> int | None:
        """V of a full trace; None in a compact one."""
        return self["p"].shape[-1] if "p" in self.tensors else None

    @property
    def first(self) -> Tensor:
        """The first draft place of each step, int64 [S]; its first score row is as many steps further."""
        return self["size"].cumsum(0) - self["size"]

    @property
    def owner(self) -> Tensor:
        """The step of each draft place, int64 [D]."""
        return torch.arange(len(self)).repeat_interleave(self["size"])

    @property
    def depth(self) -> Tensor:
        """Each draft place's index within its draft, int64 [D]."""
        return torch.arange(len(self["draft"])) - self.first[self.owner]

    @property
    def bytes(self) -> int:
        """Size of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def select(self, wanted: Tensor) -> Self:
        """The steps of `wanted` bool [S]."""
        places = wanted.repeat_interleave(self["size"])
        masks = {
            "step": wanted,
            "place": places,
            "row": wanted.repeat_interleave(self["size"] + 1),
            "emitted": wanted.repeat_interleave(self["emitted_count"]),
        }
        if "kept" in self.tensors:
            masks["entry"] = places.repeat_interleave(self["kept"])
        chosen = {name: tensor[masks[_EXTENT.get(name, "place")]] for name, tensor in self.tensors.items()}
        return evolve(self, tensors=chosen)

    def problem(self) -> str | None:
        """What does not fit together, or None."""
        if missing := sorted(_COMMON - self.tensors.keys()):
            return f"has no {missing[0]}"
        counts = {"step": len(self), "place": int(self["size"].sum()), "emitted": int(self["emitted_count"].sum())}
        counts["row"] = counts["step"] + counts["place"]
        if "kept" in self.tensors:
            counts["entry"] = int(self["kept"].sum())
        for name, tensor in self.tensors.items():
            if len(tensor) != (wanted := counts.get(_EXTENT.get(name, "place"), 0)):
                return f"has {len(tensor)} entries of {name}, wanted {wanted}"
        return None


def _keys(given: Iterable[Any]) -> tuple[RequestKey | None, ...]:
    return tuple(None if one is None else (one[0], one[1]) for one in given)


@final
@frozen
class Shard:
    """One line of `shards.jsonl`. A request that is None does not count: its sample was made again elsewhere."""

    file: str
    row: int
    law: LawKind
    requests: tuple[RequestKey | None, ...] = field(converter=_keys)

    def line(self) -> str:
        """As it stands in the file."""
        return json.dumps({"file": self.file, "row": self.row, "law": self.law, "requests": self.requests}) + "\n"


def joined(shards: Iterable[Steps]) -> Iterator[Steps]:
    """Small shards put together: more requests at once are looked at in less time."""
    waiting: list[Steps] = []
    for steps in shards:
        size = sum(one.bytes for one in (*waiting, steps))
        if waiting and (steps.law != waiting[0].law or size > JOINED_BYTES):
            yield _join(waiting)
            waiting = []
        waiting.append(steps)
    if waiting:
        yield _join(waiting)


def _join(shards: list[Steps]) -> Steps:
    requests = {key: index for index, key in enumerate(dict.fromkeys(key for one in shards for key in one.requests))}
    tensors = {name: torch.cat([one[name] for one in shards]) for name in shards[0].tensors}
    places = [torch.tensor([requests[key] for key in one.requests])[one["request"]] for one in shards]
    return Steps(shards[0].law, tuple(requests), tensors | {"request": torch.cat(places)})


def save(path: Path, steps: Steps) -> None:
    """Write a shard."""
    # Not with save_file, which keeps its file from everybody else whatever the umask.
    path.write_bytes(as_bytes({name: tensor.contiguous() for name, tensor in steps.tensors.items()}))


def shards_of(path: Path) -> list[Shard]:
    """The lines of `shards.jsonl` that were written to their end.

    Raises:
        DataError: one of them is no shard.
    """
    found = []
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            found.append(Shard(**json.loads(line)))
        except (ValueError, TypeError, LookupError) as error:
            raise DataError(f"{path}:{number}: is not the line of a shard; {_TRY}") from error
    return found


@final
@frozen(eq=False)
class Trace:
    """The traces of a finished run.

    Attributes:
        path: their folder.
        kind: `full`, or `compact`.
        logits: whether raw logits are there.
        vocabulary: V.
        rows: label, drafter, verifier and what else is known of each combination, by its index in the run.
        prompts: sample id -> ids, for rules that remember.
    """

    path: Path
    kind: Kind
    logits: bool
    vocabulary: int
    rows: Mapping[int, Mapping[str, Any]]
    prompts: Mapping[str, tuple[int, ...]]
    shards: tuple[Shard, ...]

    @classmethod
    def open(cls, run: Path) -> Self:
        """Read the index of the traces in a run's folder.

        Raises:
            DataError: there are none, or they are not what was wanted.
        """
        path = run / FOLDER
        if not path.is_dir():
            raise DataError(f"{run}: holds no traces, wanted a run with them; try report.trace: full in its recipe")
        index, prompts = _json(path / INDEX), _json(path / PROMPTS)
        if index.get("schema_version") != SCHEMA_VERSION:
            raise DataError(
                f"{path / INDEX}: schema version {index.get('schema_version')!r}, wanted {SCHEMA_VERSION}; {_TRY}"
            )
        try:
            return cls(
                path=path,
                kind=index["kind"],
                logits=index["logits"],
                vocabulary=index["vocabulary"],
                rows={row["row"]: row for row in index["rows"]},
                prompts={name: tuple(ids) for name, ids in prompts.items()},
                shards=tuple(shards_of(path / SHARDS)),
            )
        except (LookupError, TypeError) as error:
            raise DataError(f"{path / INDEX}: is not the index of traces; {_TRY}") from error

    def steps(self, row: int) -> Iterator[Steps]:
        """The steps of one combination, a shard at a time.

        Raises:
            DataError: a shard is missing, cut off, or not what its line says.
        """
        for shard in self.shards:
            if shard.row == row:
                steps = self._read(shard)
                if None in shard.requests:
                    counts = torch.tensor([request is not None for request in shard.requests])
                    steps = steps.select(counts[steps["request"]])
                yield steps

    def _read(self, shard: Shard) -> Steps:
        path = self.path / shard.file
        try:
            tensors = load_file(path)
        except FileNotFoundError as error:
            raise DataError(f"{path}: is missing, and {SHARDS} names it; {_TRY}") from error
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path}: cannot be read, perhaps it was cut off ({error}); {_TRY}") from error
        steps = Steps(shard.law, tuple(one or ("", 0) for one in shard.requests), tensors)
        if (why := steps.problem()) is not None:
            raise DataError(f"{path}: {why}; {_TRY}")
        return steps


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}; {_TRY}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: got {type(found).__name__}, wanted an object; {_TRY}")
    return found
