"""`specdec check`: whether a verification rule is what it says. Findings go to stdout."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from specdec.errors import RecipeError
from specdec.registry import load

if TYPE_CHECKING:
    from specdec.conformance import Result
    from specdec.verifier import Verifier

_COLOURS = {"passed": "green", "failed": "red", "does not apply": "bright_black"}
_FAILED = 1


@click.command()
@click.argument("rule")
@click.option(
    "--set", "overrides", multiple=True, metavar="OPTION=VALUE", help="An option of the rule, such as theta=0.9; YAML."
)
@click.option("--quick", is_flag=True, help="Fewer models and samples.")
@click.option(
    "--hidden-size", type=click.IntRange(min=1), default=64, show_default=True, metavar="N",
    help="Of the target's features, for a rule that has weights for them.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
def check(rule: str, overrides: tuple[str, ...], quick: bool, hidden_size: int, as_json: bool) -> None:
    """Check RULE against what it says of itself: by exact enumeration, and with the real sampler.

    RULE is a verifier's name, or my_module:MyVerifier for a class in a file here. The exit code is 0 when nothing
    failed, 1 when a check failed, and 2 or more when the rule could not be made.
    """
    verifier = _made(rule, overrides)
    from specdec.conformance import CHECKS
    from specdec.conformance import check as run

    width = max(map(len, CHECKS))

    def show(result: Result) -> None:
        outcome = click.style(result.outcome.ljust(14), fg=_COLOURS[result.outcome])
        click.echo(f"{result.name.ljust(width)}  {outcome}  {result.text}")

    report = run(verifier, quick=quick, hidden_size=hidden_size, tell=(lambda _: None) if as_json else show)
    click.echo(json.dumps(report.to_dict(), allow_nan=False) if as_json else f"\n{report.verdict}")
    if report.failed:
        sys.exit(_FAILED)


def _made(name: str, overrides: tuple[str, ...]) -> Verifier:
    """The rule with its options.

    Raises:
        RecipeError: an option is missing or not what was wanted.
    """
    from specdec.options import build
    from specdec.yamlfile import override

    options: dict[str, Any] = {}
    for text in overrides:
        override(options, text)
    made, problems = build(load("verifiers", name), options, name, name)
    if problems:
        # An option stands alone on this command line, without the place of the rule in a recipe.
        told = f"give it in the recipe or with --set {name}."
        raise RecipeError([one.replace(told, "give it with --set ") for one in problems])
    verifier: Verifier = made
    return verifier
