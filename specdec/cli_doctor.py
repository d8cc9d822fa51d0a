"""`specdec doctor`: whether a pair of models will be right, and whether it will pay. Findings go to stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli_generate import file_prompts, load_options
from specdec.errors import RecipeError

if TYPE_CHECKING:
    from specdec.findings import Finding

_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "failure": "red"}
_NAMES = max(map(len, ("generation config", "draft model")))


@click.command()
@click.argument("target")
@click.argument("drafter", required=False)
@click.option("--verifier", default="standard", show_default=True, help="A rule's name.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of drafter, verifier, target or sampling, such as drafter.num_speculative_tokens=7.",
)
@click.option("--rows", type=int, default=1, show_default=True, help="Prompts decoded at once.")
@click.option("--tokens", type=int, metavar="N", help="Cells a cache row shall have (what the prompts need).")
@click.option("--max-new-tokens", type=int, default=64, show_default=True, metavar="N", help="For a prompt.")
@click.option("--temperature", type=float, default=1.0, show_default=True, metavar="T", help="0 is greedy.")
@click.option(
    "--file",
    type=click.Path(path_type=Path),
    help="Prompts: JSON Lines (.jsonl), else one a line (a handful of shipped ones).",
)
@click.option("--limit", type=click.IntRange(min=1), help="At most this many prompts of the file.")
@click.option("--dtype", metavar="NAME", help="Of the models: float32, bfloat16, float16 (the checkpoint's).")
@click.option("--device", help="Where the target goes, such as cuda.")
@click.option("--layer-skip", is_flag=True, help="Search the layers that drafter layer_skip should leave out.")
@click.option("--json", "as_json", is_flag=True, help="The last line on stdout is one JSON document.")
@click.option("--quiet", is_flag=True, help="Show no progress, and with --json nothing but the document.")
def doctor(
    target: str,
    drafter: str | None,
    verifier: str,
    overrides: tuple[str, ...],
    rows: int,
    tokens: int | None,
    max_new_tokens: int,
    temperature: float,
    file: Path | None,
    limit: int | None,
    dtype: str | None,
    device: str | None,
    layer_skip: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Examine TARGET and DRAFTER: will it be right, and will it pay?

    TARGET is a hub id, a folder, or random:llama. DRAFTER is a drafter's name, or such a model, which then drafts;
    prompt_lookup when left out. The exit code is not 0 where something is wrong; that it does not pay is no error.
    """
    samples = None if file is None else file_prompts(file, limit)
    from specdec.doctor import examine, shipped  # models and transformers are needed from here on only
    from specdec.generation import make_sampling
    from specdec.given import section_of

    named = {"model": target, "dtype": dtype, "device": device}
    content: dict[str, Any] = {
        "target": {name: value for name, value in named.items() if value is not None},
        "drafter": section_of(drafter),
        "verifier": {"use": verifier},
        "sampling": {"temperature": temperature, "max_new_tokens": max_new_tokens},
    }
    options = load_options(content, overrides)
    if (graphs := options.pop("graphs")) != "off":
        raise RecipeError(
            f"--set target.graphs: got {graphs!r}, and the doctor looks at a model as it is; leave it out"
        )
    chosen = content["drafter"]
    if chosen and "use" not in chosen:
        chosen["use"] = "layer_skip" if layer_skip else "model" if "model" in chosen else "prompt_lookup"
    sampling = make_sampling(**content["sampling"])
    name = options.pop("model")
    with _progress(wanted=not quiet and sys.stderr.isatty()) as tell:
        found = examine(
            name,
            drafter=chosen or None,
            verifier=content["verifier"],
            prompts=samples if samples is not None else shipped(limit),
            rows=rows,
            tokens=tokens,
            sampling=sampling,
            layer_skip=layer_skip,
            load_options=options,
            tell=lambda finding: None if as_json and quiet else _show(finding),
            progress=tell,
        )
    if as_json:
        click.echo(json.dumps({"target": name, "rows": rows, **found.to_dict()}, allow_nan=False))
    if found.error is not None:
        raise found.error


def _show(finding: Finding) -> None:
    outcome = click.style(finding.outcome.ljust(7), fg=_COLOURS[finding.outcome])
    if sys.stderr.isatty():
        click.echo("\r\x1b[K", nl=False, err=True)
    click.echo(f"{outcome}  {finding.name.ljust(_NAMES)}  {finding.text}")


@contextmanager
def _progress(*, wanted: bool) -> Iterator[Callable[[str], None]]:
    """One line on a terminal, written over and over."""

    def tell(text: str) -> None:
        width = 78
        click.echo(f"\r\x1b[K{text[:width]}", nl=False, err=True)

    try:
        yield tell if wanted else lambda text: None
    finally:
        if wanted:
            click.echo("\r\x1b[K", nl=False, err=True)
