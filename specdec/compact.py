"""Laws cut down to what matters of them: the probable tokens, and of all others the mass and a few exact numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.diagnostics import REFERENCE_THETA
from specdec.probability import at as gather
from specdec.probability import entropy, mass_above, nucleus

CUT = 1e-4  # a token of at least this probability under target or draft is kept
MOST = 4096  # tokens that are kept of one place


def compacted(p: Tensor, q: Tensor | None, tokens: Tensor) -> dict[str, Tensor]:
    """The tensors of a compact trace.

    Args:
        p: [D, V].
        q: [D, V], or None for point masses.
        tokens: int64 [D], the drafted ones; they are always kept.

    Returns:
        `kept` [D] entries of each place: `ids`, `kept_p`, `kept_q` (not for point masses), ids ascending. Then, one
        number a place: `cut`, below which both probabilities of every other token are, `tail_p` and `tail_q`, the mass
        of those tokens, `tail_excess`, their sum of (q - p)+; and what is exact about the whole law: `rejection`,
        `nucleus_excess`, `entropy_p`, `entropy_q`, `drafted_p`, `drafted_q`, `rank`, `above` (mass of the tokens more
        probable than the drafted one).
    """
    drafted = torch.zeros_like(p, dtype=torch.bool).scatter_(1, tokens.unsqueeze(1), True)
    larger = p if q is None else torch.maximum(p, q)
    keep = larger >= CUT
    cut = torch.full((len(p),), CUT, dtype=torch.float64, device=p.device)
    for place in (keep.sum(1) > MOST).nonzero().flatten().tolist():
        best = larger[place].topk(MOST)
        keep[place] = torch.zeros_like(keep[place]).scatter_(0, best.indices, True)
        cut[place] = best.values[-1].double()
    keep |= drafted
    draft = drafted.to(p.dtype) if q is None else q
    over = (draft.double() - p.double()).clamp(min=0)
    chosen = gather(p, tokens)
    numbers = {
        "cut": cut,
        "tail_p": (p * ~keep).sum(1, dtype=torch.float64),
        "tail_q": (draft * ~keep).sum(1, dtype=torch.float64),
        "tail_excess": (over * ~keep).sum(1),
        "rejection": over.sum(1),
        "nucleus_excess": (over * nucleus(p, REFERENCE_THETA)).sum(1),
        "entropy_p": entropy(p.double()),
        "entropy_q": entropy(draft.double()),
        "drafted_p": chosen,
        "drafted_q": gather(draft, tokens),
        "rank": (p > chosen.unsqueeze(1)).sum(1),
        "above": mass_above(p, chosen),
    }
    tables = {"kept": keep.sum(1), "ids": keep.nonzero()[:, 1].to(torch.int32), "kept_p": p[keep].float()}
    if q is not None:
        tables["kept_q"] = q[keep].float()
    return {**tables, **{name: value.double() for name, value in numbers.items()}}
