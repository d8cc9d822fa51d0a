"""A block drafter at work on a target: what it reads of what was kept, and the blocks it proposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, final

import torch
from attrs import define, evolve, field
from torch import Tensor, nn

from specdec.drafter import draw_chain
from specdec.errors import CompatibilityError, ModelError
from specdec.kv import KVCacheManager
from specdec.loading import torch_dtype
from specdec.packing import pack
from specdec.sequence import Batch
from specdec.target import Target
from specdec.types import Draft, Kept
from specdec_plugins.drafters.blocks import checkpoint, shipped
from specdec_plugins.drafters.blocks.checkpoint import BlockModel
from specdec_plugins.drafters.blocks.fitting import described, foreign, misfits
from specdec_plugins.drafters.blocks.lineage import stranger
from specdec_plugins.drafters.blocks.masks import masks

_GIB = 2**30


@final
@define(kw_only=True, eq=False)
class Blocks:
    """Networks, cache and rows of a block drafter on one target.

    The cache holds keys and values of what is committed, one cell a position as in the target's. A block is staged
    behind them and never committed.

    Attributes:
        model: the networks.
        target: whose features are read.
        most: tokens of a draft.
        temperature: of the draft, for requests that sample; None is the request's own.
        threshold: a draft ends before the first token whose guessed acceptance is below.
        notes: what was worth saying about the weights.
        weights: bytes of weights that are not the target's.
    """

    model: BlockModel
    target: Target
    most: int
    temperature: float | None
    threshold: float
    notes: list[str] = field(factory=list)
    weights: int = field(init=False, default=0)
    _kv: KVCacheManager = field(init=False)
    _embed: Callable[[Tensor], Tensor] = field(init=False)
    _head: Callable[[Tensor], Tensor] = field(init=False)
    _doubtful: set[int] = field(init=False, factory=set)  # slots whose cells may hold values that are not finite

    @classmethod
    def load(
        cls,
        name: Any,
        target: Target,
        *,
        most: int,
        temperature: float | None,
        threshold: float = 0.0,
        problems: Sequence[str] = (),
        owner: str,
        revision: str | None,
        dtype: str,
        device: str | None,
        packed: bool,
    ) -> Blocks:
        """Load a checkpoint for a target.

        Args:
            name: a folder, a hub id, or a `BlockModel`, which is taken as it is.
            target: the target.
            most: as the attribute.
            temperature: as the attribute.
            threshold: as the attribute.
            problems: what the drafter itself has against it.
            owner: what an error calls the drafter.
            revision: of a hub id.
            dtype: `auto` is the checkpoint's.
            device: where it goes; the target's when left out.
            packed: prepare linear layers on a CPU.

        Raises:
            CompatibilityError: the target does not fit; names every reason.
            ModelError: the checkpoint is not whole, or not known.
        """
        given = isinstance(name, BlockModel)
        config = described(name, revision)
        found = [*problems, *misfits(config, target, most)]
        if given and (dtype != "auto" or device is not None):
            found.append("dtype and device are those of the networks given as 'model'; leave them out")
        if str(name).startswith(shipped.PREFIX) and foreign(config, target):
            found.append(f"{name} is for that model alone; give option 'model' a checkpoint for this target")
        if found:
            raise CompatibilityError([f"drafter {owner}: {problem}" for problem in found])
        model = name if given else checkpoint.load(checkpoint.find(str(name), revision), dtype=torch_dtype(dtype))
        blocks = cls(model=model, target=target, most=most, temperature=temperature, threshold=threshold)
        if not given:
            try:
                for _, part in model.parts:
                    part.to(device or target.device)
            except (RuntimeError, AssertionError) as error:  # no such device, or torch is built without it
                why = str(error).partition("\n")[0]
                raise ModelError(f"drafter {owner}: device {device!r}: {why}; leave it out for the target's") from error
        blocks.notes += stranger(model.trained_for, target.model)
        blocks._share(packed=packed)
        blocks.weights += sum(value.numel() * value.element_size() for value in model.tensors().values())
        if packed and not given:
            for _, part in model.parts:
                pack(part)
        return blocks

    def __attrs_post_init__(self) -> None:
        self._kv = self.target.kv.fork(more=self.model.config.block_size)
        self._embed = self.target.embed
        self._head = lambda rows: self.target.head(rows.to(self.target.device, self.target.dtype))

    @property
    def summary(self) -> str:
        """What was loaded, in a sentence."""
        config, shape = self.model.config, self.model.config.shape
        heads = [f"a {config.markov} Markov head"] * bool(config.markov) + ["a confidence head"] * config.confidence
        taps = ", ".join(map(str, config.taps))
        cells = self._kv.rows * (self._kv.tokens + 1)
        size = self.model.backbone.hidden_norm.weight.element_size()
        cache = 2 * cells * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * size
        return (
            f"{shape.num_hidden_layers} layers{''.join(f', {head}' for head in heads)}, blocks of {config.block_size}; "
            f"taps the outputs of the target's layers {taps}; {_size(self.weights)} of weights of its own and "
            f"{_size(cache)} of cache"
        )

    def propose(self, batch: Batch) -> Draft:
        """Blocks for the rows that have a budget; a row whose features were not all seen, or that is past the
        drafter's context, gets none."""
        config = self.model.config
        budget = [min(most, self.most) for most in batch.budget]
        for index, (row, slot) in enumerate(zip(batch.rows, batch.slots, strict=True)):
            self._kv.occupy(slot)
            long = config.context is not None and row.cached + config.block_size > config.context
            if long or self._kv.lengths[slot] != row.cached:
                budget[index] = 0
        drafting = [index for index, most in enumerate(budget) if most]
        if not drafting:
            none = torch.zeros((len(budget), 0), dtype=torch.int64, device=batch.pending.device)
            return Draft(none, none.sum(1))
        return self._drawn(self._tempered(batch), budget, drafting)

    def observe(self, batch: Batch, kept: Kept) -> None:
        """Turn the features of newly committed tokens into keys and values."""
        counts = []
        for index, slot in enumerate(batch.slots):
            self._kv.occupy(slot)
            counts.append(kept.counts[index] if self._kv.lengths[slot] == kept.starts[index] else 0)
            self._judge(index, slot, batch, kept)
        if not (width := max(counts)):
            return
        features = torch.cat([kept.hidden[tap][:, :width] for tap in self.model.config.taps], -1)
        with torch.inference_mode():
            context = self.model.backbone.context(features.to(self._device, self._dtype))
            starts = torch.tensor([self._kv.lengths[slot] for slot in batch.slots], device=self._device)
            staged = self._kv.stage(batch.slots, counts, width, device=self._device)
            self.model.backbone.write(context, self._positions(starts, width), staged)
        offsets = torch.arange(width).expand(len(counts), -1)
        self._kv.commit(batch.slots, offsets, counts, chain=True)

    def release(self, slots: tuple[int, ...]) -> None:
        """Forget rows that ended."""
        for slot in slots:
            self._kv.release((slot,), clear=slot in self._doubtful)
            self._doubtful.discard(slot)

    def _drawn(self, batch: Batch, budget: list[int], drafting: list[int]) -> Draft:
        markov, confidence = self.model.markov, self.model.confidence
        with torch.inference_mode():
            rows = self._rows(tuple(batch.slots[index] for index in drafting), batch.pending[drafting])
            rows = rows[:, : max(budget)]
            logits = self._head(rows)
        place = {index: row for row, index in enumerate(drafting)}
        guesses = torch.zeros((len(budget), max(budget)), dtype=torch.float32, device=batch.pending.device)
        state: Tensor | None = None

        def follow(depth: int, active: list[int], last: Tensor) -> Tensor:
            nonlocal state
            here = torch.tensor([place[index] for index in active], device=logits.device)
            found = logits[here, depth]
            if markov is None and confidence is None:
                return found
            here, previous = here.to(rows.device), last.squeeze(1).to(rows.device)
            hidden = rows[here, depth]
            with torch.inference_mode():
                if confidence is not None:
                    seen = markov.embed(previous) if markov is not None and confidence.rank else None
                    guesses[active, depth] = confidence(hidden, seen).sigmoid().to(guesses)
                if markov is None:
                    return found
                bias, after = markov.step(previous, hidden, None if state is None else state[here])
                if after is not None:
                    # Rows only ever leave, so one that comes here was here at every depth before.
                    state = (after.new_zeros((len(drafting), after.shape[1])) if state is None else state).index_copy(
                        0, here, after
                    )
            return found + bias.to(found.device)

        draft = draw_chain(batch, budget, follow)
        if confidence is None:
            return draft
        sizes = draft.sizes
        if self.threshold > 0:
            sizes = torch.minimum(sizes, (guesses >= self.threshold).long().cumprod(1).sum(1))
        return evolve(draft, sizes=sizes, confidence=guesses)

    def _rows(self, slots: tuple[int, ...], anchors: Tensor) -> Tensor:
        """Rows [b, K, H] of whole blocks, those that draft. A shorter block would be one it was not trained on."""
        config = self.model.config
        width = config.block_size
        tokens = torch.full((len(slots), width), config.mask_token, dtype=torch.int64, device=anchors.device)
        tokens[:, 0] = anchors
        embedded = self._embed(tokens).to(self._device, self._dtype)
        staged = self._kv.stage(slots, (width,) * len(slots), width, device=self._device)
        starts = torch.tensor(staged.where.starts, device=self._device)
        seen, windowed = masks(config.shape, starts, width, staged.where.end)
        rows = self.model.backbone(embedded, self._positions(starts, width), staged, seen, windowed)
        return rows if config.from_anchor else rows[:, 1:]  # type: ignore[no-any-return]  # modules are untyped when called

    @staticmethod
    def _positions(starts: Tensor, width: int) -> Tensor:
        return starts.unsqueeze(1) + torch.arange(width, device=starts.device)

    def _tempered(self, batch: Batch) -> Batch:
        """The same rows, those that sample at the draft's own temperature."""
        if self.temperature is None:
            return batch
        rows = []
        for row in batch.rows:
            if not row.sampling.greedy:
                request = evolve(row.request, sampling=evolve(row.sampling, temperature=self.temperature))
                row = copy(row)
                row.request = request
            rows.append(row)
        return evolve(batch, rows=tuple(rows))

    def _judge(self, index: int, slot: int, batch: Batch, kept: Kept) -> None:
        """A whole draft attended to every cell of its row, and was finite; until there is one, the row is doubtful."""
        wanted = min(batch.budget[index], self.most)
        if not kept.tokens[index] or kept.drafted[index] < wanted:
            self._doubtful.add(slot)
        elif wanted:
            self._doubtful.discard(slot)

    def _share(self, *, packed: bool) -> None:
        """Use the target's embedding and head, unless the checkpoint has others."""
        embedding, head = self.target.model.get_input_embeddings(), self.target.model.get_output_embeddings()
        for name, theirs in zip(checkpoint.OF_TARGET, (embedding, head), strict=True):
            own = self.model.of_target(name)
            if own is None or _same(own, theirs.weight):
                continue
            own = own.to(self._device, self._dtype)
            self.weights += own.numel() * own.element_size()
            self.notes.append(f"{name} of {self.model.files[name].parent} is not the target's; it is used as it is")
            if theirs is embedding:
                self._embed = partial(_looked_up, own)
            else:
                self._head = _linear(own, packed=packed)

    @property
    def _device(self) -> torch.device:
        return self.model.backbone.hidden_norm.weight.device

    @property
    def _dtype(self) -> torch.dtype:
        return self.model.backbone.hidden_norm.weight.dtype


def _same(own: Tensor, theirs: Tensor) -> bool:
    theirs = theirs.to_dense() if theirs.is_mkldnn else theirs
    fits = own.shape == theirs.shape and theirs.dtype.is_floating_point
    return fits and torch.equal(own.to(theirs.device, theirs.dtype), theirs)


def _looked_up(weight: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.embedding(tokens.to(weight.device), weight)


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= 0.01 * _GIB else f"{count / 2**20:.2f} MiB"


def _linear(weight: Tensor, *, packed: bool) -> Callable[[Tensor], Tensor]:
    with torch.device("meta"):
        whole = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    whole.load_state_dict({"0.weight": weight}, assign=True)
    whole.requires_grad_(False)
    if packed:
        pack(whole)
    return whole
