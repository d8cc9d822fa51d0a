"""`specdec replay`: another rule over the steps that a run recorded, without a model."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import click
from attrs import field, frozen

from specdec.errors import CompatibilityError, DataError, OutputError, RecipeError
from specdec.registry import load, suggestion

if TYPE_CHECKING:
    from specdec.replay import Figure, Replayed
    from specdec.trace import Kind, Trace

_BLOCKS = "Blocks begin where those of the recorded rule began, and hold the tokens that were drafted there."
_COLUMNS = {
    "acceptance_length": "acceptance length",
    "acceptance_rate": "accepted",
    "acceptance": "acceptance",
    "rejection": "R",
    "nucleus_excess": "E",
    "deviation": "deviation",
}
_EQUAL = {
    "full": "emit what was recorded",
    "compact": "keep as many draft tokens as were recorded; what a compact trace does not tell is the token after them",
}
_MOST = 1000  # values of a sweep


@final
@frozen
class _Rule:
    """A rule to be run over the steps of a row.

    Attributes:
        name: with the options that were given.
        made: the rule, prepared.
        identity: its class and all its options.
        value: of the swept option, if one is.
    """

    name: str
    made: Any = field(eq=False)
    identity: Any
    value: float | None = None


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--row", metavar="LABEL", help="Of this combination only, such as 'model + standard'.")
@click.option("--verifier", metavar="NAME", help="The rule (the recorded one).")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="An option of the rule, as theta=0.9.")
@click.option(
    "--sweep", metavar="NAME.OPTION=FROM:TO:STEP", help="A rule at many values, as nucleus.theta=0.5:0.95:0.05."
)
@click.option("--check", is_flag=True, help="Also count the steps that come out as they were recorded.")
@click.option("--csv", "file", type=click.Path(path_type=Path), help="Write the figures to a new file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def replay(
    run: Path,
    row: str | None,
    verifier: str | None,
    overrides: tuple[str, ...],
    sweep: str | None,
    check: bool,
    file: Path | None,
    as_json: bool,
) -> None:
    """Run a rule over the steps that RUN, a finished run's folder, recorded. No model is loaded.

    A recipe records with report.trace: full or compact. Without --verifier each row's own rule is run, which must
    come out as it was recorded. What a trace does not hold is left out and named.
    """
    if file is not None and file.exists():
        raise OutputError(f"{file}: exists; try another --csv")
    if sweep is not None and verifier is not None:
        raise RecipeError("--sweep and --verifier: the sweep names its rule; give one of them")
    if sweep is None and verifier is None and overrides:
        raise RecipeError(f"--set {overrides[0]}: is an option of no rule; give --verifier, too")
    trace = _open(run)
    chosen = _rows(trace, row)
    given = None
    if sweep is not None:
        given = _swept(sweep, overrides)
    elif verifier is not None:
        given = [_rule(verifier, _options(overrides), "verifier")]
    found: list[tuple[Mapping[str, Any], _Rule, Replayed]] = []
    left_out: list[str] = []
    for index in chosen:
        about = trace.rows[index]
        own = _recorded(about) if given is None or sweep is None else None
        rules = given if given is not None else [own] if own is not None else []
        same = own is not None and rules[0].identity == own.identity
        found += [(about, *one) for one in _replayed(trace, index, rules, left_out, check=check or same)]
    if not found:
        raise CompatibilityError(left_out)
    if file is not None:
        _write(file, found)
    if as_json:
        rows = [
            {"row": about["label"], "rule": rule.name, "value": rule.value, **one.to_dict()}
            for about, rule, one in found
        ]
        about_run = {"schema_version": 1, "run": str(run), "trace": trace.kind, "blocks": _BLOCKS}
        click.echo(json.dumps({**about_run, "rows": rows, "left_out": left_out}, allow_nan=False))
    else:
        _show(found, trace.kind)
        for text in left_out:
            click.echo(f"Left out: {text}.")


def _replayed(
    trace: Trace, index: int, rules: Sequence[_Rule], left_out: list[str], *, check: bool
) -> list[tuple[_Rule, Replayed]]:
    """Rules over a row's steps in one go, or else each by itself; why one is not there goes into `left_out`."""
    from specdec.replay import UnrecordedError
    from specdec.replay import replay as rerun

    try:
        done = rerun(trace, index, {rule.name: rule.made for rule in rules}, check=check)
    except UnrecordedError as error:
        if len(rules) > 1:
            return [one for rule in rules for one in _replayed(trace, index, [rule], left_out, check=check)]
        left_out.append("; ".join(str(error).splitlines()))
        return []
    return [(rule, done[rule.name]) for rule in rules]


def _open(run: Path) -> Trace:
    from specdec.rundir import RESULTS
    from specdec.trace import Trace

    if not run.is_dir():
        raise DataError(f"{run}: no such folder; wanted the output folder of a run")
    trace = Trace.open(run)
    if not (run / RESULTS).exists():
        raise DataError(f"{run}: holds an unfinished run; go on with it by `specdec run` first")
    return trace


def _rows(trace: Trace, label: str | None) -> list[int]:
    labels = {about["label"]: index for index, about in trace.rows.items()}
    if label is None:
        return list(labels.values())
    if label not in labels:
        raise RecipeError(f"--row {label}: unknown{suggestion(label, labels)}; there are {', '.join(labels)}")
    return [labels[label]]


def _recorded(about: Mapping[str, Any]) -> _Rule:
    """The rule that a row was made with."""
    options = {name: value for name, value in about["verifier"].items() if name not in ("use", "name")}
    made = _rule(about["verifier"]["use"], options, f"{about['label']}: verifier")
    return _Rule(about["verifier"]["name"], made.made, made.identity)


def _options(overrides: Iterable[str]) -> dict[str, Any]:
    from specdec.yamlfile import override

    options: dict[str, Any] = {}
    for text in overrides:
        override(options, text)
    return options


def _rule(use: str, options: Mapping[str, Any], path: str, value: float | None = None) -> _Rule:
    from specdec.options import build, label_of, values

    made, problems = build(load("verifiers", use), options, path, use)
    if problems:
        raise RecipeError(problems)
    made.prepare(None)
    return _Rule(label_of(use, options), made, (type(made), values(made)), value)


def _swept(sweep: str, overrides: Iterable[str]) -> list[_Rule]:
    wanted = "wanted NAME.OPTION=FROM:TO:STEP, such as nucleus.theta=0.5:0.95:0.05"
    key, _, span = sweep.partition("=")
    name, _, option = key.rpartition(".")
    number = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
    if not name or not option or not re.fullmatch(f"{number}:{number}:{number}", span):
        raise RecipeError(f"--sweep {sweep}: {wanted}")
    first, last, step = map(float, span.split(":"))
    most = max(abs(first), abs(last))
    # Values are rounded to twelve places, and steps must stay apart.
    if not 1e-12 <= step < math.inf or not first <= last or most == math.inf or (last - first) / step > _MOST - 1:
        raise RecipeError(
            f"--sweep {sweep}: {wanted}, finite numbers, STEP from 1e-12, TO not below FROM, {_MOST} values at most"
        )
    whole = not re.search(r"[.eE]", span)
    options, rules = _options(overrides), []
    if option in options:
        raise RecipeError(f"--set {option}: is what --sweep sets; leave one of them out")
    for number_of in range(math.floor((last - first) / step + 1e-9) + 1):
        value = round(first + number_of * step, 12)
        rules.append(_rule(name, {**options, option: int(value) if whole else value}, "--sweep " + name, value))
    return rules


def _show(found: Sequence[tuple[Mapping[str, Any], _Rule, Replayed]], kind: Kind) -> None:
    table = [["row", "rule", *_COLUMNS.values()]]
    table += [
        [about["label"], rule.name, *(_cell(one.figures[name]) for name in _COLUMNS)] for about, rule, one in found
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = [
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())
    click.echo(f"\n{_BLOCKS}")
    if any(one.expectation for _, _, one in found):
        click.echo("Figures are expectations over the accept noise, intervals are over prompts.")
    for name in dict.fromkeys(rule.name for _, rule, one in found if not one.expectation):
        click.echo(f"{name} does not decide place by place: its figures are of the recorded noise, no expectation.")
    for about, rule, one in found:
        if one.equal is not None:
            click.echo(f"{about['label']}: by {rule.name} {one.equal} of {one.steps} steps {_EQUAL[kind]}.")


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    interval = "" if figure.interval is None else " [{:.3f}, {:.3f}]".format(*figure.interval)
    return f"{figure.value:.3f}{interval}"


def _write(file: Path, found: Sequence[tuple[Mapping[str, Any], _Rule, Replayed]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["row", "rule", "value", *(part for name in _COLUMNS for part in (name, f"{name}_low", f"{name}_high"))]
    )
    for about, rule, one in found:
        cells: list[Any] = [about["label"], rule.name, "" if rule.value is None else rule.value]
        for name in _COLUMNS:
            figure = one.figures[name]
            cells.append("" if figure is None else figure.value)
            cells += ["", ""] if figure is None or figure.interval is None else figure.interval
        writer.writerow(cells)
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text.getvalue())
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror}; try another --csv") from error
