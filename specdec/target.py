"""A transformers decoder-only model behind one staged forward. Everything that versions of transformers differ in, and
everything a model must be told about caches, positions and masks, is in this file and in `specdec.subset`. The model
itself is never changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, final

import torch
from attrs import frozen
from torch import Tensor, nn

from specdec import memory, tree
from specdec.attention import NAME, asks_by_name, without_copies
from specdec.errors import ModelError
from specdec.graphs import WIDEST, Graphs, Kind, refusals
from specdec.kv import KVCacheManager, StagedCache
from specdec.loading import load
from specdec.processing import laws
from specdec.sequence import Batch
from specdec.subset import LAYER_LISTS, shell
from specdec.types import Draft, Scores, Span

_ATTENTION = ("sdpa", "eager")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")
FINAL = -1  # the tap after the final norm


@final
@frozen(eq=False)
class Forward:
    """What one forward gives: `logits` [B, T, V] as the model makes them (None when not wanted), taps [B, T, H]."""

    logits: Tensor | None
    hidden: Mapping[int, Tensor]


@final
class Target:
    """A model, its tokenizer and its cache.

    Attributes:
        model: the transformers model, as it was given.
        tokenizer: its tokenizer, or None.
        kv: the cache manager; its rows and tokens are this target's.
        config: the text part of the model's config.
        vocabulary: V, width of the logits.
        context: most positions the model has.
        eos_ids: union of the generation config's, the config's and the tokenizer's end-of-sequence ids.
        device: where token ids go in and logits come out.
        graphs: `compile` or `cuda` where forwards over few tokens run in fixed shapes, `off` otherwise.
        shapes: those shapes, or None.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, kv: KVCacheManager, graphs: Kind = "off") -> None:
        """
        Args:
            model: a loaded decoder-only transformers model.
            tokenizer: needed for texts and stop strings only.
            kv: an empty cache manager, such as `Slab(rows=8, tokens=4096)`.
            graphs: run forwards over few tokens in few fixed shapes, each made when it is first met: `compile` by
                torch.compile, `cuda` as CUDA graphs. Chains without taps only; everything else runs as with `off`.

        Raises:
            ModelError: the model cannot be decoded exactly; names every reason.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.kv = kv
        self.config = model.config.get_text_config(decoder=True)
        problems = _unsupported(model, self.config, kv)
        if graphs != "off":
            problems += refusals(graphs, model, {str(rope.get("rope_type")) for rope in _ropes(self.config)}, kv)
        if problems:
            raise ModelError("; ".join(problems))
        self.vocabulary = int(self.config.vocab_size)
        self.context = int(getattr(self.config, "max_position_embeddings", None) or kv.tokens)
        self.device = model.get_input_embeddings().weight.device
        self.eos_ids = _eos_ids(model, self.config, tokenizer)
        named = asks_by_name(model)
        self._attending: Callable[[Any], AbstractContextManager[Any]] = nullcontext if named else without_copies
        self._additive = self.config._attn_implementation == "eager"
        self._window = getattr(self.config, "sliding_window", None)
        self._layer_types = _layer_types(self.config)
        self._cache_name = "cache" if "cache" in _parameters(model) else "past_key_values"
        self.graphs: Kind = graphs
        self.shapes = None if graphs == "off" else Graphs(graphs, kv.rows, kv.tokens)
        self.preflighted = False

    @classmethod
    def load(cls, name: str, *, kv: KVCacheManager, graphs: Kind = "off", **options: Any) -> Self:
        """Load by hub id, folder or `random:FAMILY`; the options are those of `specdec.loading.load`."""
        model, tokenizer = load(name, **options)
        return cls(model, tokenizer, kv=kv, graphs=graphs)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the input embeddings."""
        weight = self.model.get_input_embeddings().weight
        return weight.dtype if weight.dtype.is_floating_point else torch.float32

    @property
    def parameters(self) -> int:
        """Numbers in the model's weights; a head that is the embedding counts once, in whichever layouts it is kept."""
        count: int = sum(parameter.numel() for parameter in self.model.parameters())
        head, table = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        tied = head is not None and getattr(self.config, "tie_word_embeddings", False)
        return count - int(head.weight.numel()) if tied and head.weight is not table.weight else count

    @property
    def limit(self) -> int:
        """Most tokens a request may know, by the model's context and the cache's."""
        return min(self.context, self.kv.tokens)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of int64 [B, T], [B, T, H], as they enter the first layer."""
        return self.model.get_input_embeddings()(tokens)  # type: ignore[no-any-return]  # transformers is untyped here

    def head(self, hidden: Tensor) -> Tensor:
        """Raw logits [B, T, V] of final hidden states [B, T, H]."""
        return self.model.get_output_embeddings()(hidden)  # type: ignore[no-any-return]  # transformers is untyped here

    def forward(
        self,
        slots: tuple[int, ...],
        span: Span,
        *,
        offset: int = 0,
        taps: tuple[int, ...] = (),
        logits: bool = True,
    ) -> Forward:
        """Run the model over new tokens of some rows. Keys and values are staged, not committed.

        Args:
            slots: cache row of each batch row.
            span: the tokens. A tree needs `offset` 0.
            offset: staged tokens that earlier forwards of this step left behind the committed ones.
            taps: decoder layers whose outputs are wanted; -1 is after the final norm.
            logits: whether to run the head; a prefill chunk does not need it.

        Raises:
            RequestError: the cache row is too short.
        """
        width = span.tokens.shape[1]
        if self.shapes is not None and logits and not taps and span.parents is None and width <= WIDEST:
            begins, end = self.kv.reach(slots, span.sizes, offset)
            with torch.inference_mode(), self._attending(self.config):
                return Forward(self.shapes.run(self._step, slots, span.tokens, begins, span.sizes, end), {})
        staged = self.kv.stage(slots, span.sizes, width, offset, device=self.device)
        # A copy that blocks would wait for everything the device has yet to do.
        starts, sizes = torch.tensor((staged.where.starts, span.sizes)).to(self.device, non_blocking=True)
        seen = None if span.parents is None else tree.ancestors(span.parents)
        arguments = self._arguments(span.tokens, starts, sizes, staged, seen)
        with torch.inference_mode(), self._attending(self.config), self._tapped(taps) as hidden:
            if logits:
                out = self.model(**arguments).logits.to(self.device)
            else:
                self.model.base_model(**arguments)
                out = None
        return Forward(out, hidden)

    def score(self, batch: Batch, draft: Draft, taps: tuple[int, ...] = ()) -> Scores:
        """One forward over the pending token and the draft, and the laws that follow from it."""
        tokens = torch.cat([batch.pending.unsqueeze(1), draft.tokens], dim=1)
        parents = None if draft.parents is None else tree.span_parents(draft.parents)
        # Budgets bound sizes on the host, so staging needs no look at the device.
        sizes = tuple(1 + min(budget, draft.tokens.shape[1]) for budget in batch.budget)
        out = self.forward(batch.slots, Span(tokens, sizes, parents), taps=taps)
        assert out.logits is not None  # asked for
        logits = memory.copy(out.logits, torch.promote_types(out.logits.dtype, torch.float32))
        with torch.inference_mode():
            probs = laws(logits, batch.rows, draft.tokens, parents=draft.parents)
            columns = torch.arange(tokens.shape[1], device=self.device)
            padding = columns > draft.sizes.unsqueeze(1)
            finite = (torch.isfinite(probs[..., 0]) | padding).all(-1)  # NaN where there is no law
        return Scores(tokens, logits, probs, out.hidden, finite)

    def subset(self, layers: Iterable[int]) -> Target:
        """The target with only these decoder layers, ascending: same weights, same cache rows, to draft with.

        A kept layer reads and writes its own place in the cache, so it finds what the target has committed. What the
        subset stages is never to be committed: the target's own forward at offset 0 writes over it. Taps of a subset
        count its own layers.

        Raises:
            ModelError: the layers cannot be had; names every reason.
        """
        return Target(shell(self.model, tuple(layers)), self.tokenizer, kv=self.kv, graphs=self.graphs)

    def _step(self, tokens: Tensor, numbers: Tensor, end: int) -> Tensor:
        """A forward over the first rows of the cache that looks at no number on the host: a `specdec.graphs.Step`."""
        starts, sizes = numbers[0], numbers[1]
        staged = self.kv.stage_fixed(starts, sizes, tokens.shape[1], end)
        logits: Tensor = self.model(**self._arguments(tokens, starts, sizes, staged, None)).logits
        return logits

    def _arguments(
        self, tokens: Tensor, starts: Tensor, sizes: Tensor, staged: StagedCache, seen: Tensor | None
    ) -> dict[str, Any]:
        width = tokens.shape[1]
        return {
            "input_ids": tokens,
            "position_ids": tree.positions(starts, sizes, width, seen),
            "attention_mask": self._mask(starts, width, staged.where.end, seen),
            self._cache_name: staged,
            "use_cache": True,
        }

    def _mask(self, starts: Tensor, width: int, end: int, seen: Tensor | None) -> Any:
        def one(window: int | None) -> Tensor:
            mask = tree.visible(starts, width, end, seen, window)
            if not self._additive:
                return mask
            additive = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
            return additive.masked_fill(~mask, torch.finfo(self.dtype).min)

        kinds = set(self._layer_types)
        if len(kinds) < 2:
            windowed = kinds == {"sliding_attention"} or (not kinds and self._window is not None)
            return one(self._window if windowed else None)
        return {"full_attention": one(None), "sliding_attention": one(self._window)}

    @contextmanager
    def _tapped(self, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """Forward hooks only while somebody taps: `output_hidden_states` means different things across versions."""
        found: dict[int, Tensor] = {}
        handles = []
        for tap in taps:

            def keep(_: nn.Module, __: Any, output: Any, tap: int = tap) -> None:
                found[tap] = (output[0] if isinstance(output, tuple) else output).to(self.device)

            handles.append(self._module(tap).register_forward_hook(keep))
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def _module(self, tap: int) -> nn.Module:
        decoder = self.model.base_model
        names = _FINAL_NORMS if tap == FINAL else LAYER_LISTS
        for name in names:
            if (module := getattr(decoder, name, None)) is not None:
                if tap == FINAL:
                    return module  # type: ignore[no-any-return]  # getattr on an untyped module
                if 0 <= tap < len(module):
                    return module[tap]  # type: ignore[no-any-return]  # getattr on an untyped module
        raise ModelError(
            f"tap {tap}: {type(self.model).__name__} has no such layer; wanted 0 to "
            f"{self.config.num_hidden_layers - 1}, or -1 for the final norm"
        )


def _parameters(model: Any) -> set[str]:
    """Names that the model's forward takes, a subclass that only passes them on included."""
    forwards = [
        vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind) and kind is not nn.Module
    ]
    return {name for forward in forwards for name in inspect.signature(forward).parameters}


def _layer_types(config: Any) -> tuple[str, ...]:
    return tuple(getattr(config, "layer_types", None) or ())


def _eos_ids(model: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for source in (getattr(generation, "eos_token_id", None), getattr(config, "eos_token_id", None)):
        if source is not None:
            found.update([source] if isinstance(source, int) else source)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(int(token) for token in found)


def _unsupported(model: Any, config: Any, kv: KVCacheManager) -> list[str]:
    """Every reason, by name, why a model cannot be decoded exactly by staging and committing keys and values."""
    kind = config.model_type
    problems = []
    if getattr(model.config, "is_encoder_decoder", False):
        problems.append(f"{kind} is an encoder-decoder; wanted a decoder-only model")
    attention = getattr(config, "_attn_implementation", None)
    attention = "sdpa" if attention == NAME else attention  # another thread runs the model just now
    if attention not in _ATTENTION:
        problems.append(f"{kind}: attn_implementation {attention!r} takes no explicit mask; try 'sdpa' or 'eager'")
    if strange := sorted(set(_layer_types(config)) - _LAYER_TYPES):
        problems.append(
            f"{kind}: layers of type {', '.join(strange)} cannot be rewound by length; wanted attention layers"
        )
    if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        problems.append(f"{kind}: {type(model).__name__} has no language-model head; load it as a causal LM")
    parameters = _parameters(model)
    if not {"cache", "past_key_values"} & parameters or "position_ids" not in parameters:
        problems.append(f"{kind}: forward takes no key-value cache or no positions (ALiBi or a recurrent state?)")
    if attention == "sdpa" and getattr(config, "attn_logit_softcapping", None):
        problems.append(f"{kind}: sdpa has no soft-capped attention; try attn_implementation='eager'")
    if getattr(config, "alibi", False):
        problems.append(f"{kind}: positions by ALiBi are not staged; wanted rotary or learned positions")
    for rope in _ropes(config):
        if rope.get("rope_type") == "dynamic" and kv.rows > 1:
            problems.append(f"{kind}: rope scaling 'dynamic' depends on the longest row; try kv.rows 1")
        short = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if rope.get("rope_type") == "longrope" and (short is None or kv.tokens > short):
            problems.append(
                f"{kind}: rope scaling 'longrope' turns keys by another factor once a text is longer than {short}, "
                f"cached ones included; try kv.tokens {short}"
            )
    return problems


def _ropes(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]
