"""Which layers a target can miss when it drafts for itself: a greedy search scored by the predicted speed-up.

From the full target one more layer is left out at a time, the one whose absence keeps most of the target's law. A
candidate costs one forward over texts that the target itself wrote, in the target's own cache, from which it reads the
prompts' keys and values as a draft would.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import final

import torch
from attrs import evolve, frozen
from torch import Tensor

from specdec.costs import line
from specdec.preflight import preflight
from specdec.processing import laws
from specdec.registry import load as plugin
from specdec.sequence import Sequence as Row
from specdec.stopwatch import Watched, follow
from specdec.target import Target
from specdec.types import Request, Span

_POSITIONS = 256  # places of texts that candidates are scored on
MOST_DRAFT = 8
_PATIENCE = 2  # removals that do not help, before the search ends
_CLEARLY = 1.02
_TIMED = 7


@final
@frozen
class Search:
    """What was found.

    Attributes:
        layers: of the target.
        skip: layers to leave out; empty where no subset pays.
        num_speculative_tokens: the draft length with it.
        speedup: predicted, without the prompts; 1 is plain decoding.
        acceptance: share of drafted tokens that would be kept.
        path: for each further layer left out: which, the acceptance then, the speed-up then.
    """

    layers: int
    skip: tuple[int, ...]
    num_speculative_tokens: int
    speedup: float
    acceptance: float
    path: tuple[tuple[int, float, float], ...]


@final
@frozen(eq=False)
class _Texts:
    """What the target wrote, with the prompts in its cache.

    Attributes:
        target: with the prompts cached, all but their last tokens.
        slots: their cache rows.
        rows: the requests, for their sampling.
        span: the last tokens of the prompts and all but the last of what followed.
        written: int64 [B, T], what followed.
        laws: the target's, [B, T, V].
        counts: bool [B, T], which places are of a text.
    """

    target: Target
    slots: tuple[int, ...]
    rows: tuple[Row, ...]
    span: Span
    written: Tensor
    laws: Tensor
    counts: Tensor


def search(target: Target, requests: Sequence[Request], progress: Callable[[str], None] = lambda text: None) -> Search:
    """Search the layers that `layer_skip` should leave out.

    Args:
        target: whose layers; the search makes a cache of its own.
        requests: prompts, and how the target is sampled.
        progress: told what is being done.

    Raises:
        ModelError: the target's layers cannot be left out.
    """
    layers = int(target.config.num_hidden_layers)
    if layers < 2:
        return Search(layers, (), 1, 1.0, 1.0, ())
    preflight(_without(target, (layers - 1,)))
    progress("texts of the target's own")
    texts = _write(target, requests)
    progress("timing forwards of all and of half of the layers")
    one, per_layer, verify = _seconds(texts, target.kv.rows)
    path: list[tuple[int, float, float]] = []
    skip: tuple[int, ...] = ()
    chosen, best, highest, fruitless = skip, (1.0, 1, 1.0), 0.0, 0
    bound = dict.fromkeys(range(layers), 1.0)  # acceptance without a layer, when last seen: it rarely grows again
    while len(skip) < layers - 1 and fruitless < _PATIENCE:
        layer, places = _least_missed(texts, skip, bound, progress)
        del bound[layer]
        skip = tuple(sorted((*skip, layer)))
        lengths = acceptance_lengths(places, MOST_DRAFT)
        draft = one - per_layer * len(skip)
        gains = [kept * one / (size * draft + line(verify, size)) for size, kept in enumerate(lengths, 1)]
        now, share = max(gains), places.nanmean().item()
        path.append((layer, share, now))
        progress(f"without {len(skip)} of {layers} layers: acceptance {share:.1%}, predicted {now:.2f}x")
        if now > best[0]:
            chosen, best = skip, (now, 1 + gains.index(now), share)
        fruitless = 0 if now > highest else fruitless + 1
        highest = max(highest, now)
    speedup, size, acceptance = best
    if speedup < _CLEARLY:
        chosen = ()
    return Search(layers, chosen, size, speedup, acceptance, tuple(path))


def acceptance_lengths(places: Tensor, most: int) -> list[float]:
    """Expected acceptance length for drafts of 1 to `most` tokens.

    Args:
        places: [B, T], how probably a draft token is kept at each place of a text, given those before it; NaN where
            there is none. The mean over all stretches of a length says how often a draft that long is kept.
    """
    together, kept, lengths = places, 1.0, []
    mean = places.nanmean().item()
    reached = 1.0
    for size in range(1, most + 1):
        if size > 1:
            together = together[:, :-1] * places[:, size - 1 :]
        seen = together.nanmean().item()
        reached = seen if seen == seen else reached * mean  # texts shorter than the draft
        kept += reached
        lengths.append(kept)
    return lengths


def _least_missed(
    texts: _Texts, skip: tuple[int, ...], bound: dict[int, float], progress: Callable[[str], None]
) -> tuple[int, Tensor]:
    """The layer whose absence, beside that of `skip`, keeps most of the law; and the acceptance at every place.

    Layers are looked at in the order of what they kept when last seen; the first that still keeps as much as any other
    once did is taken, so that few have to be looked at.
    """
    seen: dict[int, Tensor] = {}
    while True:
        layer = min(bound, key=lambda one: (-bound[one], one))
        if layer in seen:
            return layer, seen[layer]
        progress(f"without {len(skip)} layers, and without layer {layer}")
        seen[layer] = _acceptance(texts, _without(texts.target, (*skip, layer)))
        bound[layer] = seen[layer].nanmean().item()


def _acceptance(texts: _Texts, draft: Target) -> Tensor:
    """How probably a token of the draft's law is kept at each place, [B, T]; NaN where there is none."""
    q = _laws(draft, texts.slots, texts.rows, texts.span, texts.written)
    kept = torch.minimum(texts.laws, q).sum(-1).nan_to_num(0.0)
    return torch.where(texts.counts, kept, torch.nan)


def _laws(side: Target, slots: tuple[int, ...], rows: tuple[Row, ...], span: Span, written: Tensor) -> Tensor:
    logits = side.forward(slots, span).logits
    assert logits is not None  # asked for
    with torch.inference_mode():
        return laws(logits.to(torch.promote_types(logits.dtype, torch.float32)), rows, written)


def _without(target: Target, skip: Sequence[int]) -> Target:
    layers = int(target.config.num_hidden_layers)
    return target.subset(layer for layer in range(layers) if layer not in skip)


def _write(target: Target, requests: Sequence[Request]) -> _Texts:
    """Let the target write, all prompts at once, and keep its laws over what it wrote."""
    each = -(-_POSITIONS // len(requests))
    wanted = [evolve(one, sampling=evolve(one.sampling, max_new_tokens=each)) for one in requests]
    cells = max(len(one.prompt) for one in wanted) + each + 1
    wide = Target(target.model, target.tokenizer, kv=evolve(target.kv, rows=len(wanted), tokens=cells))
    wide.preflighted = True  # the same model in another cache
    done, _ = follow(wide, Watched(plugin("drafters", "none")()), plugin("verifiers", "standard")(), wanted)
    slots = tuple(wide.kv.acquire() for _ in wanted)
    before = tuple(len(one.prompt) - 1 for one in wanted)
    if max(before):
        wide.forward(slots, Span(_padded([one.prompt[:-1] for one in wanted], wide), before), logits=False)
        wide.kv.commit(slots, torch.arange(max(before)).expand(len(slots), -1), before, chain=True)
    sizes = tuple(len(one.tokens) for one in done)
    fed = [(request.prompt[-1], *one.tokens[:-1]) for request, one in zip(wanted, done, strict=True)]
    written, span = _padded([one.tokens for one in done], wide), Span(_padded(fed, wide), sizes)
    rows = tuple(Row(request=one, eos_ids=wide.eos_ids, limit=wide.context) for one in wanted)
    counts = torch.arange(max(sizes), device=wide.device) < torch.tensor(sizes, device=wide.device).unsqueeze(1)
    return _Texts(wide, slots, rows, span, written, _laws(wide, slots, rows, span, written), counts)


def _padded(texts: Sequence[Sequence[int]], target: Target) -> Tensor:
    width = max(map(len, texts))
    return torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], device=target.device)


def _seconds(texts: _Texts, rows: int) -> tuple[float, float, dict[int, float]]:
    """Median seconds of a one-token forward, of one layer in it, and of forwards over a draft of each width."""
    target, rows = texts.target, min(rows, len(texts.slots))
    layers = int(target.config.num_hidden_layers)
    half = _without(target, range(layers // 2))
    room = target.kv.tokens - max(target.kv.lengths)
    ways = {(target, width) for width in (0, 1, 2, 4, MOST_DRAFT) if width < room} | {(half, 0)}
    found: dict[tuple[Target, int], list[float]] = {way: [] for way in sorted(ways, key=lambda way: way[1])}
    for _ in range(_TIMED + 1):  # the first is to warm up
        for side, width in found:
            ids = texts.span.tokens[:rows, :1].expand(-1, 1 + width)
            start = _now(target)
            out = _laws(side, texts.slots[:rows], texts.rows[:rows], Span(ids, (1 + width,) * rows), ids[:, 1:])
            out.amax().item()  # waits for the device
            found[side, width].append(_now(target) - start)
    medians = {way: statistics.median(seconds[1:]) for way, seconds in found.items()}
    one = medians[target, 0]
    per_layer = max(0.0, one - medians[half, 0]) / (layers // 2)
    return one, per_layer, {width: seconds for (side, width), seconds in medians.items() if side is target}


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
