"""What costs and acceptance come to, in words: what a step takes, whether it pays, what limits it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from specdec.costs import Prediction, Timing
from specdec.findings import Finding, counted
from specdec.layer_search import Search

# Least difference that is worth another num_speculative_tokens, and that is no draw between with and without.
_CLEARLY = 1.05


def costs(timings: Sequence[Timing], rows: int, width: int, prompts: Sequence[int]) -> Finding:
    """Median seconds of the parts of a step, and how far the middle half of them spreads."""

    def part(name: str, at: int) -> tuple[float, float]:
        found = [
            value for one in timings if (one.rows, one.width) == (rows, at) if (value := getattr(one, name)) is not None
        ]
        low, middle, high = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
        return middle, (high - low) / 2

    parts = {
        "one_token": part("verify", 0),
        "verification": part("verify", width),
        "draft": part("draft", width),
        "rest": part("rest", width),
        "plain_rest": part("rest", 0),
    }
    shown = {name: f"{_ms(middle)} ± {_ms(spread)} ms" for name, (middle, spread) in parts.items()}
    noisy = any(parts[name][1] > 0.15 * parts[name][0] for name in ("one_token", "verification"))
    text = (
        f"at {counted(rows)} after prompts of {min(prompts)} to {max(prompts)} tokens a forward of one token takes "
        f"{shown['one_token']}, of {width + 1} {shown['verification']}, a draft of {width} {shown['draft']}, "
        f"the rest of a step {shown['rest']} (plain {shown['plain_rest']})"
    )
    return Finding(
        "costs",
        "warning" if noisy else "ok",
        text + ("; the times spread widely: let the machine do nothing else" if noisy else ""),
        {
            "milliseconds": {name: [1000 * value for value in pair] for name, pair in parts.items()},
            "timed": len(timings),
        },
    )


def acceptance(accepted: Sequence[int], steps: int, prediction: Prediction) -> Finding:
    """Tokens a verification, and how often the token at each place of a draft was kept."""
    reached = [count / steps for count in accepted]
    rates = [f"{now / before:.0%}" for before, now in pairwise([1.0, *reached]) if before]
    text = (
        f"{prediction.acceptance_length:.2f} tokens a verification over {steps} of them; of drafts that got so far the "
        f"token at each place was kept in {', '.join(rates) or '0%'}"
    )
    return Finding(
        "acceptance",
        "ok",
        text,
        {"acceptance_length": prediction.acceptance_length, "steps": steps, "accepted_per_pos": list(accepted)},
    )


def verdict(found: Prediction, width: int, rows: int) -> Finding:
    """Whether it pays, why not more, and whether another draft length would pay better."""
    low, high = found.interval
    span = f"{found.speedup:.2f}x [{low:.2f}, {high:.2f}]"
    if found.speedup >= _CLEARLY:
        said = [f"expected {span} faster than plain decoding"]
    elif found.speedup > 1 / _CLEARLY:
        said = [f"hardly pays: {span}"]
    else:
        said = [f"does not pay: {span}"]
    said[0] += f" at {counted(rows)} and num_speculative_tokens {width}, prompts included"
    draft, verify, rest = (part / sum(found.parts) for part in found.parts)
    said.append(
        f"a step takes {sum(found.parts) / found.plain:.2f} plain ones (draft {draft:.0%}, verification {verify:.0%}, "
        f"rest {rest:.0%}) and gives {found.acceptance_length:.2f} tokens"
    )
    words = {
        "draft": "drafts that cost nothing",
        "verify": "a verification as fast as one token",
        "acceptance": "full acceptance",
    }
    most = max(found.limits, key=lambda name: found.limits[name])
    said.append(f"what limits it most: {words[most]} would give {found.limits[most]:.2f}x")
    best = found.best
    gain = found.by_length[best - 1]
    if best != width and gain > _CLEARLY * found.speedup:
        how = "" if best <= found.measured else ", by going on as the last places do"
        said.append(f"num_speculative_tokens {best} would be better: {gain:.2f}x{how}")
    return Finding(
        "verdict",
        "ok" if found.speedup >= _CLEARLY else "warning",
        "; ".join(said),
        {
            "speedup": found.speedup,
            "interval": list(found.interval),
            "steady": found.steady,
            "acceptance_length": found.acceptance_length,
            "by_length": list(found.by_length),
            "best": best,
            "limits": dict(found.limits),
        },
    )


def skips(found: Search) -> Finding:
    """Which layers to skip, as options one can paste."""
    figures = {
        "skip": list(found.skip),
        "num_speculative_tokens": found.num_speculative_tokens,
        "speedup": found.speedup,
        "acceptance": found.acceptance,
        "path": [list(step) for step in found.path],
    }
    if not found.skip:
        best = max((step[2] for step in found.path), default=0.0)
        text = f"no subset of the layers pays: the best of {len(found.path)} sizes tried gives {best:.2f}x"
        return Finding("layer skip", "warning", text, figures)
    listed = ", ".join(map(str, found.skip))
    text = (
        f"without {len(found.skip)} of {found.layers} layers the target agrees with itself in {found.acceptance:.1%}, "
        f"{found.speedup:.2f}x predicted from its own texts; --set 'drafter.skip=[{listed}]' "
        f"--set drafter.num_speculative_tokens={found.num_speculative_tokens}; in a recipe "
        f"{{use: layer_skip, skip: [{listed}], num_speculative_tokens: {found.num_speculative_tokens}}}"
    )
    return Finding("layer skip", "ok", text, figures)


def _ms(seconds: float) -> str:
    """Milliseconds, with one place where they are few."""
    return f"{1000 * seconds:.0f}" if seconds >= 0.01 else f"{1000 * seconds:.2g}"
