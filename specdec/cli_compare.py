"""`specdec compare`: finished runs in one report. The report goes to stdout."""

from __future__ import annotations

import json
from pathlib import Path

import click

from specdec.errors import OutputError


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write the page with figures there, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
def compare(runs: tuple[Path, ...], html: Path | None, as_json: bool) -> None:
    """Join the finished runs in the folders RUN... into one report.

    Their prompts, sampling, seed and target must be the same; drafters, rules, machines and versions need not be. What
    is printed with --json has the form of a run's results.json.
    """
    if html is not None:
        _refuse(html)
    from specdec.joined import join, read_runs  # brings in torch
    from specdec.page import page
    from specdec.report import markdown

    results = join(read_runs(runs))
    if html is not None:
        _write(html, page(results))
    click.echo(json.dumps(results, allow_nan=False) if as_json else markdown(results).rstrip())


def _refuse(path: Path) -> None:
    if path.exists() or path.is_symlink():
        what = "is a folder, wanted a file" if path.is_dir() else "exists and is not overwritten"
        raise OutputError(f"{path}: {what}; try another --html, or remove it")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no folder {str(path.parent)!r}; make it, or try another --html")


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}; try another --html") from error
