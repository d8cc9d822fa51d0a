"""Whether target, drafter and verifier fit: all reasons at once, before the first step. Whether a draft is one."""

from __future__ import annotations

import torch

from specdec.drafter import Drafter
from specdec.errors import CompatibilityError
from specdec.sequence import Batch
from specdec.target import Target
from specdec.types import Draft
from specdec.verifier import Verifier


def check(target: Target, drafter: Drafter, verifier: Verifier) -> None:
    """Compare what each needs with what the others give.

    Raises:
        CompatibilityError: they do not fit; `problems` names every reason.
    """
    problems = [*misfits(drafter, verifier), *too_long(drafter, target.kv.tokens)]
    rule, source = type(verifier).__name__, type(drafter).__name__
    layers = int(target.config.num_hidden_layers)
    for name, taps in ((f"drafter {source}", drafter.taps), (f"verifier {rule}", verifier.taps)):
        if wrong := [tap for tap in taps if not -1 <= tap < layers]:
            problems.append(f"{name} taps layers {wrong} and the target has 0 to {layers - 1} (-1 is the final norm)")
    if target.graphs != "off":
        kind = f"target.graphs: {target.graphs!r}"
        if drafter.trees:
            problems.append(f"{kind} runs chains only and drafter {source} proposes trees; try 'off'")
        for name, taps in ((f"drafter {source}", drafter.taps), (f"verifier {rule}", verifier.taps)):
            if taps:
                problems.append(f"{kind} keeps no features and {name} taps layers; try 'off'")
    if problems:
        raise CompatibilityError(problems)


def misfits(drafter: Drafter, verifier: Verifier) -> list[str]:
    """Every reason why the two do not fit, from their options alone; no model is needed."""
    problems: list[str] = []
    rule, source = type(verifier).__name__, type(drafter).__name__
    if drafter.trees and not verifier.trees:
        problems.append(
            f"verifier {rule} walks chains only and drafter {source} proposes trees; try verifier 'standard'"
        )
    if "draft_law" in verifier.needs and drafter.deterministic:
        problems.append(
            f"verifier {rule} needs the law a token was drawn from and drafter {source} is deterministic; "
            "try a drafter that samples"
        )
    if "hidden" in verifier.needs and not verifier.taps:
        problems.append(f"verifier {rule} needs hidden features and names no taps; give it `taps`")
    return problems


def too_long(drafter: Drafter, tokens: int) -> list[str]:
    """Why a draft does not fit a cache row of so many tokens, or nothing."""
    most = drafter.num_speculative_tokens
    if most + 1 < tokens:
        return []
    return [
        f"num_speculative_tokens: a draft of {most} does not fit a cache row of {tokens} tokens; "
        f"set kv.tokens to at least {most + 2}, or draft fewer"
    ]


def check_draft(draft: Draft, drafter: Drafter, batch: Batch, vocabulary: int) -> None:
    """Whether a draft has the shapes, dtypes and law that `Draft` promises. Looks at no value: nothing waits for a
    device.

    Raises:
        CompatibilityError: names everything that is off.
    """
    name, rows, nodes = f"drafter {type(drafter).__name__}", len(batch.rows), draft.tokens.shape[-1]
    problems = []
    wanted = [("tokens", draft.tokens, (rows, nodes)), ("sizes", draft.sizes, (rows,))]
    if draft.parents is not None:
        wanted.append(("parents", draft.parents, (rows, nodes)))
        if not drafter.trees:
            problems.append(f"{name}: gave parents and says `trees` is False")
    for field, tensor, shape in wanted:
        if tuple(tensor.shape) != shape or tensor.dtype != torch.int64:
            problems.append(
                f"{name}: {field} are {tensor.dtype} {list(tensor.shape)}, wanted torch.int64 {list(shape)}"
            )
    if draft.law is None and nodes and not drafter.deterministic and not batch.greedy:
        problems.append(
            f"{name}: gave no law for requests that sample and says `deterministic` is False; wanted the law that its "
            "tokens were drawn from, a PointMass where none was drawn"
        )
    if draft.law is not None and not problems and draft.law.shape != (rows, nodes, vocabulary):
        problems.append(f"{name}: law is {list(draft.law.shape)}, wanted {[rows, nodes, vocabulary]}")
    if problems:
        raise CompatibilityError(problems)
