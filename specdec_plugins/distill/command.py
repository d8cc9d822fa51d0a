"""`specdec distill`: train a drafter for a target."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from specdec.cli_interrupt import stoppable


@click.command()
@click.argument("recipe")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change the recipe, such as train.steps=100."
)
@click.option("--output-dir", type=click.Path(path_type=Path), help="Where it is written; else as the recipe says.")
@click.option("--overwrite", is_flag=True, help="Begin anew where there is a run already.")
@click.option("--quiet", is_flag=True, help="Say nothing until the end.")
def distill(recipe: str, overrides: tuple[str, ...], output_dir: Path | None, overwrite: bool, quiet: bool) -> None:
    """Train the drafter of RECIPE, from texts and from the target's own outputs.

    The run directory holds the drafter in DSpark's form with a model card, a log, and as curve.csv what rules keep of
    held-out texts. The same command goes on where a run was stopped. The last line is the best measurement as JSON.
    """
    from specdec_plugins.distill.recipe import read_recipe

    checked = read_recipe(recipe, overrides)
    from specdec_plugins.distill.folder import RESULTS, Folder
    from specdec_plugins.distill.run import Run

    def tell(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    path = output_dir or Path(checked.output_dir)
    with Folder.open(path, checked.to_dict(), overwrite=overwrite) as folder, stoppable() as stopped:
        run = Run(checked, folder, tell, stopped)
        run.train()
        if not run.done:
            click.echo("interrupted; what is trained is kept, the same command goes on from there", err=True)
            sys.exit(130)
    tell(f"{path}: written")
    click.echo(json.dumps(json.loads((path / RESULTS).read_text(encoding="utf-8"))["best"]))
