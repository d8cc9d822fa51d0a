"""From the engine's steps to shards of traces; see `specdec.trace`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor

from specdec.compact import compacted
from specdec.drafter import Drafter
from specdec.errors import OutputError
from specdec.law import PointMass
from specdec.results import Row
from specdec.sequence import Batch
from specdec.trace import (
    FOLDER,
    INDEX,
    PROMPTS,
    SCHEMA_VERSION,
    SHARDS,
    Kind,
    LawKind,
    RequestKey,
    Shard,
    Steps,
    save,
    shards_of,
)
from specdec.types import Draft, Kept, Scores, Verdict
from specdec.verifier import Verifier

_log = logging.getLogger("specdec")
SHARD_BYTES = 64 << 20  # a shard is written when what waits for it is larger


@final
class Recording:
    """The traces of one run while it is made.

    A chunk's shards come first, then their lines, then its samples in the run's own file: whatever a kill leaves, what
    has no sample is dropped when the run goes on.
    """

    def __init__(self, path: Path, kind: Kind, *, logits: bool, about: Mapping[str, Any]) -> None:
        """
        Args:
            path: the folder of the traces.
            kind: `full` or `compact`.
            logits: keep raw logits, too.
            about: the recipe as plain data.
        """
        self.path, self.kind, self.logits, self._about = path, kind, logits, about
        self._rows: list[dict[str, Any]] = []
        self._number = 0

    @classmethod
    def of(cls, recipe: Mapping[str, Any], rules: Mapping[str, Verifier]) -> Self | None:
        """The recording that a recipe (as plain data) with these rules asks for."""
        kind = recipe["report"]["trace"]
        if kind == "none":
            return None
        unseen = {"hidden"} if kind == "full" else {"hidden", "raw_logits"}
        for label, rule in rules.items():
            if lost := sorted(rule.needs & unseen):
                _log.info(
                    "%s: looks at %s, which a %s trace does not hold; its steps are recorded for other rules only",
                    *(label, " and ".join(lost), kind),
                )
        # Logits are a third more to write, so they are kept for whom they serve.
        logits = kind == "full" and any("raw_logits" in rule.needs for rule in rules.values())
        return cls(Path(recipe["output_dir"]) / FOLDER, kind, logits=logits, about=recipe)

    def recorder(self, index: int, row: Row, drafter: Drafter) -> Recorder | None:
        """Who records a combination; None for one that drafts nothing."""
        if drafter.num_speculative_tokens == 0:
            return None
        entries = {
            name: next(entry for entry in self._about[f"{name}s"] if entry["name"] == label)
            for name, label in (("drafter", row.drafter), ("verifier", row.verifier))
        }
        self._rows.append({"row": index, "label": row.label, "deterministic": drafter.deterministic, **entries})
        return Recorder(self, index)

    def begin(
        self, vocabulary: int, prompts: Mapping[str, tuple[int, ...]], records: Sequence[Mapping[str, Any]]
    ) -> None:
        """Start writing, or go on.

        Args:
            vocabulary: V.
            prompts: sample id -> ids.
            records: of the samples that are there.

        Raises:
            OutputError: it cannot be written.
        """
        labels = {row["label"]: row["row"] for row in self._rows}
        done = {(labels.get(record["run"], -1), record["sample"], record["repeat"]) for record in records}
        with _errors(self.path):
            self.path.mkdir(exist_ok=True)
            kept = [_counted(shard, done) for shard in shards_of(self.path / SHARDS)]
            kept = [shard for shard in kept if any(shard.requests)]
            there = {(shard.row, *key) for shard in kept for key in shard.requests if key is not None}
            lost = [
                record
                for record in records
                if record["run"] in labels
                and record["finish_reason"] != "error"
                and (labels[record["run"]], record["sample"], record["repeat"]) not in there
            ]
            if lost:
                raise OutputError(
                    f"{self.path}: has no steps of sample {lost[0]['sample']!r} of {lost[0]['run']!r}, which is "
                    "finished; try another --output-dir, or --overwrite"
                )
            for left in self.path.glob("*.safetensors"):
                if left.name not in {shard.file for shard in kept}:
                    left.unlink()
            self._number = max((int(Path(shard.file).stem.partition("-")[2]) for shard in kept), default=0)
            index = {
                "schema_version": SCHEMA_VERSION,
                "kind": self.kind,
                "logits": self.logits,
                "vocabulary": vocabulary,
                "sampling": self._about["sampling"],
                "rows": self._rows,
            }
            self._write(INDEX, json.dumps(index, indent=2, ensure_ascii=False) + "\n")
            self._write(PROMPTS, json.dumps(prompts, ensure_ascii=False) + "\n")
            self._write(SHARDS, "".join(shard.line() for shard in kept))

    def save(self, row: int, steps: Steps) -> Shard:
        """Write a shard that does not count yet."""
        self._number += 1
        shard = Shard(f"{row}-{self._number}.safetensors", row, steps.law, steps.requests)
        with _errors(self.path):
            save(self.path / shard.file, steps)
            with (self.path / shard.file).open("rb+") as file:
                os.fsync(file.fileno())
        return shard

    def count(self, shards: Sequence[Shard]) -> None:
        """From now on they count."""
        with _errors(self.path), (self.path / SHARDS).open("a", encoding="utf-8") as file:
            file.write("".join(shard.line() for shard in shards))
            file.flush()
            os.fsync(file.fileno())

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}"
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary.replace(self.path / name)


@final
class Recorder:
    """What the engine of one combination tells its steps to. Records between `begin` and `write` only."""

    def __init__(self, recording: Recording, row: int) -> None:
        self._recording, self._row = recording, row
        self._repeat: int | None = None
        self._shards: list[Shard] = []
        self._parts: dict[str, list[Tensor]] = {}
        self._requests: dict[RequestKey, int] = {}
        self._law: LawKind = "point"
        self._bytes = 0

    def begin(self, repeat: int) -> None:
        """A chunk of requests begins."""
        self._repeat = repeat

    def write(self) -> None:
        """The chunk has ended: its steps are written and count."""
        self._flush()
        self._recording.count(self._shards)
        self._shards, self._repeat = [], None

    def __call__(self, batch: Batch, draft: Draft, scores: Scores, verdict: Verdict, kept: Kept) -> None:
        """Take one step. A row of scores that are not finite is left out: nothing of it was emitted."""
        if self._repeat is None:
            return
        rows = [index for index, reason in enumerate(kept.finished) if reason != "error"]
        if not rows:
            return
        law: LawKind = "point" if draft.law is None or isinstance(draft.law, PointMass) else "dense"
        if draft.tokens.shape[1] and self._parts and law != self._law:
            self._flush()
        if draft.tokens.shape[1] or not self._parts:
            self._law = law
        for name, tensor in self._facts(rows, batch, draft, kept).items():
            self._keep(name, tensor)
        chosen = torch.tensor(rows, device=draft.tokens.device)
        sizes, tokens = draft.sizes[chosen].unsqueeze(1), draft.tokens[chosen]
        columns = torch.arange(tokens.shape[1] + 1, device=tokens.device)
        drafted, scored = columns[:-1] < sizes, columns <= sizes
        self._keep("draft", tokens[drafted])
        whole = None if law == "point" else draft.law
        if self._recording.kind == "compact":
            for index in rows:  # one after another: what is known of one fits into a processor's cache
                size = kept.drafted[index]
                q = None if whole is None else whole.only(index).dense()[0, :size]
                for name, tensor in compacted(scores.probs[index, :size], q, draft.tokens[index, :size]).items():
                    self._keep(name, tensor)
        else:
            self._keep("p", scores.probs[chosen][scored])
            if whole is not None:
                self._keep("q", whole.dense()[chosen][drafted])
            if self._recording.logits:
                self._keep("logits", scores.logits[chosen][scored])
        if self._bytes > SHARD_BYTES:
            self._flush()

    def _facts(self, rows: list[int], batch: Batch, draft: Draft, kept: Kept) -> dict[str, Tensor]:
        """What is known on the host, one number a row, and the emitted tokens."""
        proposed = draft.tokens.tolist()
        ends = []
        for index in rows:
            row = batch.rows[index]
            stops = row.eos_ids | row.sampling.stop_ids
            size = kept.drafted[index]
            ends.append(next((node for node in range(size) if proposed[index][node] in stops), size))
        keys: list[RequestKey] = [(batch.rows[index].request.id, self._repeat or 0) for index in rows]
        pending = batch.pending.tolist()
        facts = {
            "request": [self._requests.setdefault(key, len(self._requests)) for key in keys],
            "step": [batch.noise.steps[index] for index in rows],
            "seed": [batch.noise.seeds[index] for index in rows],
            "pending": [pending[index] for index in rows],
            "size": [kept.drafted[index] for index in rows],
            "end": ends,
            "accepted": [kept.accepted[index] for index in rows],
            "emitted_count": [len(kept.tokens[index]) for index in rows],
            "finished": [int(kept.finished[index] is not None) for index in rows],
            "emitted": [token for index in rows for token in kept.tokens[index]],
        }
        return {name: torch.tensor(values, dtype=torch.int64) for name, values in facts.items()}

    def _keep(self, name: str, tensor: Tensor) -> None:
        tensor = tensor.cpu()
        self._parts.setdefault(name, []).append(tensor)
        self._bytes += tensor.nbytes

    def _flush(self) -> None:
        if self._parts:
            tensors = {name: torch.cat(parts) for name, parts in self._parts.items()}
            self._shards.append(self._recording.save(self._row, Steps(self._law, tuple(self._requests), tensors)))
        self._parts, self._requests, self._bytes = {}, {}, 0


def _counted(shard: Shard, done: set[tuple[int, str, int]]) -> Shard:
    requests = [None if one is None or (shard.row, *one) not in done else one for one in shard.requests]
    return Shard(shard.file, shard.row, shard.law, requests)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"{path}: cannot be written: {why}; try another --output-dir") from error
