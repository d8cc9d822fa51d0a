"""Whether target, drafter, verifier and scheduler fit. All reasons at once, before the first step."""

from __future__ import annotations

from specdec.drafter import Drafter
from specdec.errors import CompatibilityError
from specdec.target import Target
from specdec.verifier import Verifier


def check(target: Target, drafter: Drafter, verifier: Verifier) -> None:
    """Compare what each needs with what the others give.

    Raises:
        CompatibilityError: they do not fit; `problems` names every reason.
    """
    problems = []
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
    if drafter.num_speculative_tokens + 1 >= target.kv.tokens:
        problems.append(
            f"num_speculative_tokens: a draft of {drafter.num_speculative_tokens} does not fit a cache row of "
            f"{target.kv.tokens} tokens; give kv more tokens"
        )
    layers = int(target.config.num_hidden_layers)
    for name, taps in ((f"drafter {source}", drafter.taps), (f"verifier {rule}", verifier.taps)):
        if wrong := [tap for tap in taps if not -1 <= tap < layers]:
            problems.append(f"{name} taps layers {wrong} and the target has 0 to {layers - 1} (-1 is the final norm)")
    if problems:
        raise CompatibilityError(problems)
