"""Whether decoding here gives what the target says: against itself as its own draft model, and against transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve

from specdec.drafter import Drafter
from specdec.errors import ModelError
from specdec.findings import Finding, Outcome, failure
from specdec.metrics import pool
from specdec.nearties import Difference, difference, judge, reference
from specdec.registry import load
from specdec.stopwatch import Watched, follow
from specdec.target import Target
from specdec.types import Request

# Enough to meet an error, small enough for a large model on a processor.
EQUAL_PROMPTS, EQUAL_TOKENS = 4, 32
_SELF_PROMPTS, _SELF_TOKENS, _SELF_DRAFT = 2, 24, 4
# Share of its own drafts that a target in half precision keeps at least; less is more than rounding does.
_HALF_LEAST = 0.9


def itself(target: Target, requests: Sequence[Request]) -> Finding:
    """The target as its own draft model: p equals q, so that nothing is rejected but for rounding.

    At temperature 0 every rejection is judged by the gap of the logits. At the requests' own temperature float32 and
    float64 reject nothing, and in half precision p and q differ by the rounding of forwards of different widths.
    """
    name, single = "self-draft", target.dtype.itemsize >= 4
    model = load("drafters", "model")
    drafter = model(model=target.model, tokenizer=target.tokenizer, num_speculative_tokens=_SELF_DRAFT)
    said, faults, shares = [], [], []
    figures: dict[str, Any] = {}
    for temperature in dict.fromkeys((0.0, requests[0].sampling.temperature)):
        asked = [_plain(one, temperature, _SELF_TOKENS, ignore_eos=True) for one in requests[:_SELF_PROMPTS]]
        watched = Watched(drafter)
        done, _ = follow(target, watched, load("verifiers", "standard")(), asked)
        total = pool([one.counters for one in done])
        share = 1.0 if total.acceptance_rate is None else total.acceptance_rate
        shares.append(share)
        said.append(f"{share:.2%} of {total.num_draft_tokens} drafted tokens kept at temperature {temperature:g}")
        texts = {request.id: (*request.prompt, *one.tokens) for request, one in zip(asked, done, strict=True)}
        gaps = []
        if temperature == 0:
            gaps = [
                judge(target, texts[name][:place], [drafted, came]) for name, place, drafted, came in watched.rejected
            ]
        figures[f"{temperature:g}"] = {
            "drafted": total.num_draft_tokens,
            "accepted": total.num_accepted_tokens,
            "gaps": [gap if gap < float("inf") else None for gap, _ in gaps],
        }
        if wide := [gap for gap, allowed in gaps if gap > allowed]:
            faults.append(f"{len(wide)} rejected at temperature 0 with a gap of the logits of up to {max(wide):.3g}")
        elif gaps:
            said[-1] += f", the others near-ties (gaps of the logits up to {max(gap for gap, _ in gaps):.2g})"
        elif share < 1 and single:
            faults.append(f"{1 - share:.2%} rejected at temperature {temperature:g}")
    text = "; ".join(said)
    if faults:
        error = ModelError(
            f"{name}: the target rejects its own drafts beyond rounding: {'; '.join(faults)}; a forward over several "
            "tokens does not say what single ones say, so that speculative decoding is not exact; try another target"
        )
        return failure(name, error, **figures)
    outcome: Outcome = "ok" if min(shares) == 1 else "note" if min(shares) >= _HALF_LEAST or single else "warning"
    if outcome != "ok" and not single:
        dtype = str(target.dtype).removeprefix("torch.")
        text += f"; {dtype} rounds forwards of one and of several tokens apart, so p and q are not quite the same"
    return Finding(name, outcome, text, figures)


def equality(target: Target, drafter: Drafter, requests: Sequence[Request], progress: Callable[[str], None]) -> Finding:
    """Greedy texts, plain and speculative, against transformers' own `generate`."""
    name = "equality"
    most = min(EQUAL_TOKENS, requests[0].sampling.max_new_tokens)
    asked = [_plain(one, 0.0, most) for one in requests[:EQUAL_PROMPTS]]
    wanted = []
    for index, one in enumerate(asked):
        progress(f"transformers' own generate: prompt {index + 1} of {len(asked)}")
        wanted.append(reference(target, one.prompt, min(most, target.context - len(one.prompt))))
    equal, figures = {}, []
    ties: list[str] = []
    faults: list[str] = []
    for way, source in {"plain": load("drafters", "none")(), "speculative": drafter}.items():
        progress(f"{way} decoding of the same prompts")
        done, _ = follow(target, Watched(source), load("verifiers", "standard")(), asked)
        equal[way] = 0
        for request, theirs, ours in zip(asked, wanted, done, strict=True):
            found = difference(target, request.prompt, theirs, ours.tokens)
            if found is None:
                equal[way] += 1
                continue
            (ties if found.near_tie else faults).append(
                f"{way}, prompt {request.id!r}: {_told(found, target.tokenizer)}"
            )
            figures.append({"way": way, "prompt": request.id, **_plain_data(found)})
    counted = ", ".join(f"{way} {count} of {len(asked)}" for way, count in equal.items())
    text = f"greedy texts of up to {most} tokens equal to those of transformers' generate: {counted}"
    data = {"prompts": len(asked), "tokens": most, "equal": equal, "differences": figures}
    if faults:
        rest = f"; and {len(ties)} near-ties" if ties else ""
        error = ModelError(f"{name}: {text}; {'; '.join(faults)}{rest}; wanted differences at near-ties only")
        return failure(name, error, **data)
    return Finding(name, "note" if ties else "ok", "; ".join([text, *ties]), data)


def _plain(request: Request, temperature: float, most: int, *, ignore_eos: bool = False) -> Request:
    """The prompt without filters, processors and stops of its own."""
    kind = type(request.sampling)
    seed = request.sampling.seed
    return evolve(
        request,
        sampling=kind(temperature=temperature, max_new_tokens=most, ignore_eos=ignore_eos, seed=seed),
        processors=(),
    )


def _told(found: Difference, tokenizer: Any) -> str:
    theirs, ours = (
        "the end" if token is None else str(token) if tokenizer is None else repr(tokenizer.decode([token]))
        for token in (found.theirs, found.ours)
    )
    verdict = "a near-tie" if found.near_tie else "not a tie: a fault"
    return (
        f"at new token {found.position} it is {theirs} there and {ours} here, {verdict} "
        f"(gap of the logits {found.gap:.3g}, rounding explains {found.tolerance:.2g})"
    )


def _plain_data(found: Difference) -> dict[str, Any]:
    return {
        "position": found.position,
        "theirs": found.theirs,
        "ours": found.ours,
        "gap": found.gap if found.gap < float("inf") else None,
        "tolerance": found.tolerance,
        "near_tie": found.near_tie,
    }
