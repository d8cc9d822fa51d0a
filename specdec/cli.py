"""The command line. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from specdec import __version__
from specdec.cli_check import check
from specdec.cli_compare import compare as compare_runs
from specdec.cli_doctor import doctor
from specdec.cli_generate import generate
from specdec.cli_init import init
from specdec.cli_interrupt import stoppable
from specdec.cli_replay import replay
from specdec.errors import OutputError, PluginError, RecipeError, SpecdecError
from specdec.registry import KINDS, Plugin, load, names, plugins, problem, suggestion, summary

if TYPE_CHECKING:
    from specdec.comparison import Status
    from specdec.recipe import Recipe

_log = logging.getLogger("specdec")


class _Commands(click.Group):
    """Our commands and those of plugins; errors of ours are lines on stderr, not tracebacks."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *names("commands")})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (own := super().get_command(ctx, cmd_name)) is not None or cmd_name not in names("commands"):
            return own
        try:
            found = load("commands", cmd_name)
        except PluginError as error:
            return _broken(cmd_name, str(error))
        if isinstance(found, click.Command):
            return found
        return _broken(cmd_name, f"commands/{cmd_name} is not a click command")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if not ctx.resilient_parsing and args[0] not in known and not args[0].startswith("-"):
            raise RecipeError(f"{args[0]}: no such command{suggestion(args[0], known)}; there are {', '.join(known)}")
        return super().resolve_command(ctx, args)

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with _errors_told():
            return super().make_context(*arguments, **options)

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().main(*arguments, **options)
        except OSError:
            if (why := _stdout_problem()) is None:
                raise
            click.echo(f"error: stdout: cannot be written: {why}; try another place for the output", err=True)
            sys.exit(OutputError.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        with _errors_told():
            return super().invoke(ctx)


@contextmanager
def _errors_told() -> Iterator[None]:
    """Errors of ours, and what click says of arguments, as lines on stderr."""
    try:
        yield
    except SpecdecError as error:
        for line in str(error).splitlines():
            click.echo(f"error: {line}", err=True)
        sys.exit(error.exit_code)
    except click.UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # no error but the help, which it shows itself
            raise
        place = "specdec" if error.ctx is None else error.ctx.command_path
        click.echo(f"error: {place}: {error.format_message().rstrip('.')}; see {place} --help", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo("interrupted; what is finished is kept, the same command goes on from there", err=True)
        sys.exit(130)


def _stdout_problem() -> str | None:
    """Why what was printed cannot be written, or None. It is then dropped, or Python would fail over it at its end."""
    try:
        sys.stdout.write("\n")  # what failed is in no buffer where PYTHONUNBUFFERED is set
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error.strerror
    return None


def _broken(name: str, why: str) -> click.Command:
    def fail() -> None:
        raise PluginError(why)

    return click.Command(name, callback=fail, help=f"Cannot be used: {why}")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specdec")
def main() -> None:
    """Compare verification rules of speculative decoding on equal footing."""
    if not sys.stderr.isatty():
        # Bars of those who load models, too; read when they are imported, which is later.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


main.add_command(check)
main.add_command(compare_runs)
main.add_command(generate)
main.add_command(doctor)
main.add_command(init)
main.add_command(replay)


_SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change the recipe, such as verifiers.0.theta=0.9."
)
_LIMIT = click.option("--limit", type=click.IntRange(min=1), help="At most this many prompts.")


@main.command()
@click.argument("recipe")
@_SET
@click.option("--output-dir", help="Instead of the recipe's.")
@click.option("--overwrite", is_flag=True, help="Replace the run that is in the output folder.")
@_LIMIT
@click.option("--quiet", is_flag=True, help="Print nothing but warnings and the last line.")
def run(
    recipe: str, overrides: tuple[str, ...], output_dir: str | None, overwrite: bool, limit: int | None, quiet: bool
) -> None:
    """Run RECIPE, a file or the name of a shipped recipe. The last line on stdout is one JSON document."""
    read = _read(recipe, overrides, limit)
    if output_dir == "":
        raise RecipeError("--output-dir: got an empty name, wanted a folder; leave it out for the recipe's")
    if output_dir is not None:
        read = attrs.evolve(read, output_dir=Path(output_dir))
    from specdec.comparison import compare  # models and transformers are needed from here on only
    from specdec.report import last_line, markdown

    with (
        _logging(quiet=quiet),
        _progress(wanted=not quiet and sys.stderr.isatty()) as tell,
        _interruptible(tell) as told,
    ):
        results = compare(read, overwrite=overwrite, progress=told)
    if not quiet:
        if sys.stdout.isatty():
            _show_tables(results)
        else:
            click.echo(markdown(results).partition("## How to read it")[0].rstrip())
        click.echo(
            f"\n{read.output_dir}/report.md says how to read it, with all intervals; report.html is a page of it."
        )
    click.echo(json.dumps(last_line(results, str(read.output_dir)), allow_nan=False))


@main.command()
@click.argument("recipe")
@_SET
@_LIMIT
def validate(recipe: str, overrides: tuple[str, ...], limit: int | None) -> None:
    """Say everything that is wrong with RECIPE. No model is loaded."""
    read = _read(recipe, overrides, limit)
    rows = len(read.drafters) * len(read.verifiers) + read.report.baseline
    click.echo(
        f"{recipe}: valid; {len(read.samples)} prompts x {read.report.repeats} repeats x {rows} rows "
        f"({len(read.drafters)} drafters x {len(read.verifiers)} verifiers"
        f"{' and the baseline' if read.report.baseline else ''})"
        f"{', and plain decoding within each theta' if read.report.controls else ''}"
    )


@main.command("ls")
@click.argument("kind", required=False)
def list_plugins(kind: str | None) -> None:
    """List strategies: all, or of one KIND."""
    for title in KINDS if kind is None else (kind,):
        found = plugins(title)
        if not found and kind is None:
            continue
        click.echo(title)
        width = max((len(plugin.name) for plugin in found), default=0)
        for plugin in found:
            click.echo(f"  {plugin.name.ljust(width)}  {_line(plugin)}")


@main.command()
@click.argument("name")
def show(name: str) -> None:
    """Options, formula and source of a strategy: NAME, or KIND/NAME."""
    kind, _, short = name.rpartition("/")
    if kind:
        chosen = [plugin for plugin in plugins(kind) if plugin.name == short] or [Plugin(kind, short, "", "", False)]
    else:
        every = [plugin for kind in KINDS for plugin in plugins(kind)]
        chosen = [plugin for plugin in every if plugin.name == short]
        if not chosen:
            known = sorted({plugin.name for plugin in every})
            own = f"; a class of no package is shown as KIND/{name}, such as verifiers/{name}" if ":" in name else ""
            raise PluginError(f"{name}: unknown{suggestion(name, known)}; there are {', '.join(known)}{own}")
        if len({plugin.kind for plugin in chosen}) > 1:
            raise PluginError(f"{name}: say which: {' or '.join(f'{plugin.kind}/{short}' for plugin in chosen)}")
    cls = load(chosen[0].kind, short)
    click.echo("\n".join(_description(chosen[0], cls)))


def _read(recipe: str, overrides: tuple[str, ...], limit: int | None) -> Recipe:
    from specdec.recipe import read_recipe  # reading one imports its plugins

    return read_recipe(recipe, [*overrides, *([] if limit is None else [f"data.limit={limit}"])])


def _line(plugin: Plugin) -> str:
    if not plugin.bundled and (why := problem(plugin)) is not None:
        return f"cannot be used: {why} ({plugin.distribution})"
    origin = "" if plugin.bundled else f" ({plugin.distribution})"
    return summary(plugin) + origin


def _description(plugin: Plugin, cls: Any) -> list[str]:
    from specdec.options import describe  # needs the class, and so its module, anyway

    lines = [f"{plugin.kind}/{plugin.name}", ""]
    text = (click.unstyle(cls.__doc__ or "")).partition("Attributes:")[0]
    lines += [line.strip() for line in text.strip().splitlines()]
    for title in ("paper", "family", "exactness", "dominates_standard", "trees", "deterministic"):
        if (value := _fact(cls, title)) not in (None, ""):
            lines.append(f"{title.replace('_', ' ')}: {value}")
    lines += ["", "options:"]
    options = describe(cls) if isinstance(cls, type) else []
    for option in options:
        default = "required" if option.default is None else f"default {option.default}"
        lines.append(f"  {option.name}: {option.type}, {default}")
        if option.text:
            lines.append(f"      {option.text}")
    if not options:
        lines.append("  none")
    return [*lines, "", f"from {plugin.distribution}: {plugin.value}"]


def _fact(cls: Any, name: str) -> Any:
    """A property that may depend on options: of the class, or of an object with the defaults."""
    value = getattr(cls, name, None)
    if isinstance(value, property):
        try:
            value = getattr(cls(), name)
        except Exception:  # it has required options, or cannot be made without a target
            return None
    return value if isinstance(value, str | bool) else None


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what stderr is at the time: a bar takes it over while it is drawn."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, _: Any) -> None:
        """It is not kept."""


@contextmanager
def _logging(*, quiet: bool) -> Iterator[None]:
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = _log.level
    _log.addHandler(handler)
    _log.setLevel(logging.WARNING if quiet else logging.INFO)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _log.setLevel(level)


@contextmanager
def _progress(*, wanted: bool) -> Iterator[Callable[[Status], None] | None]:
    if not wanted:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)

    def tell(status: Status) -> None:
        bar.start()  # not before: downloads and loading draw bars of their own
        pace = "" if status.tokens_per_second is None else f"  {status.tokens_per_second:.1f} tokens/s"
        text = f"{status.label}{pace}  tau {status.acceptance_length:.2f}"
        bar.update(task, completed=status.done, total=status.total, description=text)

    try:
        yield tell
    finally:
        bar.stop()


@contextmanager
def _interruptible(tell: Callable[[Status], None] | None) -> Iterator[Callable[[Status], None]]:
    """From the first step on Ctrl-C ends a run between two steps; while a model is loaded, it does so at once."""
    with ExitStack() as stack:
        stopped: list[int] | None = None

        def told(status: Status) -> None:
            nonlocal stopped
            if stopped is None:
                stopped = stack.enter_context(stoppable())
            if stopped:
                raise KeyboardInterrupt
            if tell is not None:
                tell(status)

        yield told


def _show_tables(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from specdec.numerals import NONE
    from specdec.report import FIDELITY, SPEED, cells, in_words, notes

    console = Console()
    rows = [cells(row) for row in results["rows"]]
    scores = tuple(dict.fromkeys(name for row in results["rows"] for name in row["scores"]))
    for columns in filter(None, (("exactness", *SPEED), FIDELITY, scores)):
        table = Table()
        table.add_column("run", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="left" if column == "exactness" else "right")
        for row in rows:
            # Intervals of the second table are in the report; a terminal is narrow.
            texts = [row.get(column, NONE) for column in columns]
            shown = [text if columns is not FIDELITY else text.partition(" [")[0] for text in texts]
            table.add_row(row["run"], *shown)
        console.print(table)
    for line in (*in_words(results), *notes(results)):
        console.print(line.replace("**", "").replace("\\*", "*"), markup=False, highlight=False)
