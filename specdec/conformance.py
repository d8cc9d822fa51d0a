"""The kit that proves a rule: what `specdec check` runs, and what a test suite of your own calls.

from specdec.conformance import check

check(MyRule()).assert_passed()
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, final

from attrs import frozen

from specdec import contract, one_position, whole_drafts
from specdec.options import label_of, values
from specdec.registry import name_of
from specdec.subject import DoesNotApply, Failed, Said, Subject
from specdec.verifier import Verifier

Outcome = Literal["passed", "failed", "does not apply"]


@final
@frozen
class Result:
    """What one check found.

    Attributes:
        name: of the check.
        outcome: `passed`, `failed` or `does not apply`.
        text: a few words.
        figures: the numbers in them.
    """

    name: str
    outcome: Outcome
    text: str
    figures: dict[str, float]


@final
@frozen
class Report:
    """What all checks found.

    Attributes:
        rule: its name and options.
        declared: what it says of itself.
        results: one for each check, in order.
    """

    rule: str
    declared: dict[str, Any]
    results: tuple[Result, ...]

    @property
    def failed(self) -> tuple[Result, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.outcome == "failed")

    @property
    def verdict(self) -> str:
        """One sentence."""
        passed = sum(result.outcome == "passed" for result in self.results)
        skipped = sum(result.outcome == "does not apply" for result in self.results)
        claim = f"{self.declared['exactness'].replace('_', ' ')}, {self.declared['family'].replace('_', ' ')}"
        if self.failed:
            which = ", ".join(result.name for result in self.failed)
            return (
                f"{self.rule} is not what it says ({claim}): {len(self.failed)} of {len(self.results)} failed: {which}"
            )
        return f"{self.rule} is what it says ({claim}): {passed} passed, {skipped} not applicable"

    def assert_passed(self) -> None:
        """Nothing, if no check failed.

        Raises:
            AssertionError: with the failed checks.
        """
        if self.failed:
            raise AssertionError("\n".join([self.verdict, *(f"{one.name}: {one.text}" for one in self.failed)]))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        checks = [
            {
                "name": one.name,
                "outcome": one.outcome,
                "text": one.text,
                "figures": {name: value if math.isfinite(value) else None for name, value in one.figures.items()},
            }
            for one in self.results
        ]
        return {"rule": self.rule, "passed": not self.failed, "declared": self.declared, "checks": checks}


def check(
    verifier: Verifier,
    *,
    quick: bool = False,
    hidden_size: int = 64,
    tell: Callable[[Result], None] = lambda result: None,
) -> Report:
    """Check a rule against what it says of itself.

    Args:
        verifier: the rule; it is prepared without a target.
        quick: fewer models and samples.
        hidden_size: of the features a rule with taps is shown.
        tell: called with each result as it comes.

    Raises:
        SpecdecError: `prepare` refuses: a file is missing, a tokenizer is needed.
    """
    verifier.prepare(None)
    subject = Subject(verifier, hidden_size, quick)
    results = []
    for name, function in CHECKS.items():
        results.append(_result(name, function, subject))
        tell(results[-1])
    names = ("family", "exactness", "dominates_standard", "trees", "memory")
    declared = {name: getattr(verifier, name) for name in names} | {"needs": sorted(verifier.needs)}
    label = label_of(name_of("verifiers", type(verifier)), values(verifier))
    return Report(label, declared, tuple(results))


def _result(name: str, function: Callable[[Subject], Said], subject: Subject) -> Result:
    try:
        text, figures = function(subject)
    except DoesNotApply as reason:
        return Result(name, "does not apply", str(reason), {})
    except Failed as failure:
        return Result(name, "failed", str(failure), failure.figures)
    except Exception as error:  # a rule may raise anything
        said = " ".join(str(error).split())
        return Result(name, "failed", f"raised {type(error).__name__}: {said}", {})
    return Result(name, "passed", text, figures)


CHECKS: dict[str, Callable[[Subject], Said]] = {
    "shapes and dtypes": contract.shapes_and_dtypes,
    "acceptance and replacement": one_position.acceptance_and_replacement,
    "one definition": contract.one_definition,
    "accept_at": contract.acceptance_at_the_drafted_token,
    "strict comparison": contract.strict_comparison,
    "definition": whole_drafts.definition,
    "law": one_position.stated_law,
    "exactness": whole_drafts.exactness,
    "family": one_position.family,
    "lower bound": whole_drafts.lower_bound,
    "dominates standard": whole_drafts.coupling,
    "sampler": whole_drafts.sampler,
    "impossible tokens": whole_drafts.impossible_tokens,
    "placeholders": contract.placeholders,
    "draft laws": contract.draft_laws,
    "padding": contract.padding,
    "rows": contract.rows_apart,
    "not finite": contract.not_finite,
    "permutations": contract.permutations,
    "ties": one_position.ties,
    "purity": contract.purity,
    "memory": contract.memory,
    "needs": contract.declared_needs,
    "options": contract.options_round_trip,
}
