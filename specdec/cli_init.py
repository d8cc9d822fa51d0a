"""`specdec init`: a first recipe for models of your own. Nothing that exists is ever overwritten."""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path

import click

from specdec.errors import DataError, OutputError, RecipeError
from specdec.registry import drafter_of, load, names, suggestion

_PROMPTS = "prompts.jsonl"


@click.command()
@click.argument("target")
@click.argument("drafter", required=False)
@click.option("--file", "prompts", metavar="PATH", help="Prompts as JSON Lines (a dozen that come with specdec).")
@click.option("--output", default="recipe.yaml", show_default=True, metavar="PATH", help="- is stdout.")
def init(target: str, drafter: str | None, prompts: str | None, output: str) -> None:
    """Write a commented recipe for TARGET and DRAFTER.

    TARGET is a model: a hub id, a folder, a file, or random:llama. DRAFTER is a smaller model of its family, a
    folder with a block drafter, or the name of a drafter (see specdec ls drafters); prompt_lookup, when left out. No
    model is loaded.
    """
    _refuse_missing("TARGET", target)
    entry = _drafter(drafter)
    recipe = None if output == "-" else Path(output)
    if recipe is not None:
        _refuse_existing(recipe)
    from specdec.starter import recipe_text  # reading about strategies imports them

    shipped = files("specdec_plugins.recipes").joinpath(_PROMPTS)
    if prompts is not None:
        file = _beside(_readable(prompts), recipe)
    elif recipe is None:
        file = str(shipped)
    else:
        file = _PROMPTS
    text = recipe_text(target, entry, file, recipe or Path("recipe.yaml"))
    if recipe is None:
        click.echo(text, nl=False)
        return
    made = [recipe]
    if prompts is None:
        copy = recipe.parent / _PROMPTS
        if _write(copy, shipped.read_text(encoding="utf-8"), same=True):
            made.append(copy)
    _write(recipe, text)
    click.echo(f"{' and '.join(map(str, made))}: written; specdec run {shlex.quote(str(recipe))} runs it")


def _drafter(given: str | None) -> dict[str, str]:
    """`use`, and the model where it is one."""
    known = names("drafters")
    if given is None:
        return {"use": "prompt_lookup"}
    if given in known:
        if given == "model":
            raise RecipeError("DRAFTER: 'model' drafts with a model; give that model instead, such as random:llama:1")
        from specdec.options import describe

        if any(option.default is None for option in describe(load("drafters", given))):
            raise RecipeError(f"DRAFTER: {given!r} drafts with a checkpoint; give the folder of one instead")
        return {"use": given}
    if hint := suggestion(given, known):
        raise RecipeError(f"DRAFTER: no drafter {given!r}{hint}; there are {', '.join(known)}, or a model")
    _refuse_missing("DRAFTER", given)
    return {"use": drafter_of(given) or "model", "model": given}


def _refuse_missing(what: str, model: str) -> None:
    """A name that can only be a path, of something that is not there."""
    path = Path(model)
    looks = model.startswith((".", "/", "~")) or model.endswith(("/", ".gguf")) or model.count("/") > 1
    if not model or (looks and ":" not in model and not path.exists()):
        where = f"; looked in {path.absolute().parent}" if model and not path.is_absolute() else ""
        raise RecipeError(f"{what}: no such folder or file: {model!r}{where}; try the path of a model, or a hub id")


def _refuse_existing(recipe: Path) -> None:
    if recipe.exists() or recipe.is_symlink():
        what = "is a folder, wanted a file" if recipe.is_dir() else "exists and is not overwritten"
        raise OutputError(f"{recipe}: {what}; try another --output, or remove it")
    if not recipe.parent.is_dir():
        raise OutputError(f"{recipe}: there is no folder {str(recipe.parent)!r}; make it, or try another --output")


def _readable(prompts: str) -> Path:
    """The file, once every row of it was read."""
    from specdec.task import samples_of

    path = Path(prompts)
    if path.is_dir():
        raise DataError(f"--file {prompts}: is a folder, wanted a file; try one that is in it")
    samples_of(load("tasks", "jsonl")(), "jsonl", prompts, None)
    return path


def _beside(path: Path, recipe: Path | None) -> str:
    """As the recipe names it: from its own folder where it lies there, in full otherwise."""
    if recipe is None:
        return str(path)
    try:
        return str(path.resolve().relative_to(recipe.parent.resolve()))
    except ValueError:
        return str(path.resolve())


def _write(path: Path, text: str, *, same: bool = False) -> bool:
    """Make a file; with `same`, one that holds the text already will do. Whether it was made.

    Raises:
        OutputError: it exists, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        if same and path.is_file() and path.read_bytes() == text.encode():
            return False
        hint = f"use it with --file {shlex.quote(str(path))}, or " if same else ""
        raise OutputError(f"{path}: exists and is not overwritten; {hint}try another --output") from error
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}; try another --output") from error
    return True
