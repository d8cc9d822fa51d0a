"""The report as one HTML page that needs nothing else: no script, no network, light and dark, wide and narrow."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from specdec.drawing import draw
from specdec.figures import (
    FRONTIER,
    LENGTHS,
    OF_A_GROUP,
    POSITIONS,
    PRICE,
    TIMES,
    against_standard,
    group_names,
    score,
    score_names,
    sheets,
)
from specdec.numerals import NONE, one, percent, three, times, two
from specdec.report import NOT_MEASURED, in_words, machines, missing, no_law, notes, points, sampled
from specdec.style import PICTURE, STYLE

_CAPTIONS = {
    PRICE: (
        "What extra acceptance costs",
        "A point a rule, with 95 % intervals. Deviation is at least the extra acceptance, whatever the drafter: no "
        "rule lies below the dashed line, and one on it pays no more than it must. Rules without a law at single "
        "places, or without diagnostics, are not shown.",
    ),
    FRONTIER: (
        "What theta buys",
        "A line replays a rule at thetas from 0.5 to 0.99, and the standard rule, over the recorded steps of one row: "
        "expectations over the accept noise, at blocks that begin where those of the recorded rule began. A budget is "
        "spent along the recorded texts. Diamonds are rows that ran, with 95 % intervals.",
    ),
    POSITIONS: (
        "Acceptance by draft position",
        "Of the draft tokens examined at a position, the share that was kept.",
    ),
    LENGTHS: (
        "Tokens of a verification",
        "How often a verification emitted so many tokens, bonus or replacement included.",
    ),
    TIMES: (
        "Where the time goes",
        "Drafting, verification and all the rest, divided by emitted tokens; diagnostics are not in it.",
    ),
}
_EXPLAINED = (
    ("acceptance length", "acceptance_length"),
    ("accepted", "acceptance_rate"),
    ("tokens/s", "tokens_per_second"),
    ("speedup", "speedup"),
    ("deviation", "deviation"),
    ("per request", "deviation_per_request"),
    ("bound", "sequence_bound"),
    ("extra acceptance", "excess"),
    ("same ids as standard", "agreement"),
    ("small figures", "interval"),
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def pictures(results: Mapping[str, Any]) -> dict[str, str]:
    """The figures as inline SVG, by their sheets.

    Raises:
        ImportError: there is no matplotlib.
    """
    return draw(sheets(results), _names(results["rows"]))


def standalone(svg: str) -> str:
    """A figure as a file of its own."""
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    head, mark, rest = svg.partition(">")
    return f"{head.replace('<svg', f'<svg {spaces}', 1)}{mark}<style>{PICTURE}</style>{rest}\n"


def page(results: Mapping[str, Any], drawn: Mapping[str, str] | None = None) -> str:
    """The report of a run: a pure function of what `results.json` holds.

    Args:
        results: of the run.
        drawn: its `pictures`, where they are there already.
    """
    data, title = results["data"], escape(results["recipe"])
    ran = (
        f"Target {results['target']}, {data['prompts']} prompts x {data['repeats']} repeats, "
        f"{results['rows_at_once']} at once, {sampled(results)}, seed {results['seed']}."
    )
    shown = [*_EXPLAINED, *([("scores", "scores")] if score_names(results["rows"]) else [])]
    explained = [f"<dt>{name}</dt><dd>{_told(results['formulas'][formula])}.</dd>" for name, formula in shown]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{title}: specdec</title><style>{STYLE}</style></head><body><main>",
            f"<h1>{title}</h1>",
            f"<p>{_told(ran)}</p>",
            _table(results["rows"]),
            *_words(in_words(results)),
            *(f"<p>{_told(text)}</p>" for text in notes(results)),
            *_groups(results["rows"]),
            *_figures(results, drawn),
            "<h2>How to read it</h2>",
            f"<dl>{''.join(explained)}",
            "<dt>exactness</dt><dd>A lossless rule keeps the target's law; own target keeps another law that the rule "
            "states; lossy promises neither, and its speed means little without its deviation.</dd></dl>",
            "<h2>What it ran on</h2>",
            *(f"<p>{_told(text)}</p>" for text in machines(results) if text),
            "</main></body></html>",
            "",
        ]
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    scores = score_names(rows)
    heads = [
        *("run", "exactness", "acceptance length", "accepted", "tokens/s", "speedup", "against standard"),
        *("deviation", "per request", "bound", "same ids as standard"),
        *scores,
    ]
    spans = [("", 4), ("speed", 3), ("what it costs", 4), *([("scores", len(scores))] if scores else [])]
    return _framed(spans, heads, [_cells(row, rows, scores) for row in rows])


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Acceptance and deviation of each kind of prompt, where there are kinds."""
    names = group_names(rows)
    drafting = [row for row in rows if row["counters"]["num_draft_tokens"]]
    if not names or not drafting:
        return []
    lines = []
    for row in drafting:
        groups = [(row.get("groups") or {}).get(name, {}) for name in names]
        numbers = [
            _measured(group.get(key), three if key == "deviation" else two, missing(row, group, key))
            for group in groups
            for key in OF_A_GROUP
        ]
        lines.append([*_heads(row), *(f"<td>{number}</td>" for number in numbers)])
    heads = ["run", "exactness", *[*OF_A_GROUP.values()] * len(names)]
    spans = [("", 2), *((name, len(OF_A_GROUP)) for name in names)]
    return ["<h2>By kind of prompt</h2>", _framed(spans, heads, lines)]


def _framed(spans: Sequence[tuple[str, int]], heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of cells, its columns in groups."""
    groups = "".join(f'<td colspan="{span}">{escape(name)}</td>' for name, span in spans)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in lines)
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr class="groups">{groups}</tr><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _heads(row: Mapping[str, Any]) -> list[str]:
    """What a line begins with: the row's name, and what its rule promises."""
    mark = " *" if row["point_mass"] else ""
    failed = f" ({row['errors']} of {row['requests']} failed)" if row["errors"] else ""
    options = f"<small>{escape(row['options'])}</small>" if row["options"] else ""
    label = re.sub(r"([(,_/])", r"\1<wbr>", escape(row["label"] + mark + failed))
    kind = escape(row["exactness"])
    return [
        f'<th scope="row">{label}{options}</th>',
        f'<td class="kind {kind}">{kind.replace("_", " ")}</td>',
    ]


def _cells(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], scores: Sequence[str]) -> list[str]:
    found, agreement = row["fidelity"], row["agreement"]
    drafts = row["counters"]["num_draft_tokens"] > 0
    costs = [NONE] * 3
    if drafts and found is None:
        costs = [NOT_MEASURED] * 3
    elif drafts:
        unknown = no_law(row) if found["places"] else NONE
        costs = [_measured(found["deviation"], three, unknown), _measured(found["deviation_per_request"], two, unknown)]
        costs.append(unknown if found["sequence_bound"] is None else three(found["sequence_bound"]))
    same = NONE
    if agreement is not None and agreement["share"] is not None:
        first = agreement["median_first_difference"]
        same = percent(agreement["share"]) + ("" if first is None else f"<small>else from {first:g}</small>")
    numbers = [
        _measured(row["acceptance_length"], two),
        percent(row["acceptance_rate"]),
        one(row["tokens_per_second"]),
        times(row["speedup"]),
        times(against_standard(row, rows)),
        *costs,
        same,
        *(_score(score(row, name)) for name in scores),
    ]
    return [*_heads(row), *(f"<td>{number}</td>" for number in numbers)]


def _figures(results: Mapping[str, Any], drawn: Mapping[str, str] | None) -> list[str]:
    """The figures, or one sentence where they cannot be drawn."""
    try:
        drawn = pictures(results) if drawn is None else drawn
    except ImportError:
        return [
            "<h2>Figures</h2>",
            "<p>Figures need matplotlib, which <code>pip install matplotlib</code> brings in; their numbers are in "
            "the CSV files of the run.</p>",
        ]
    return [
        f'<figure><h2>{_CAPTIONS[file][0]}</h2><div class="wide" tabindex="0">{svg}</div>'
        f"<figcaption>{_CAPTIONS[file][1]} Numbers: <code>{file}</code>.</figcaption></figure>"
        for file, svg in drawn.items()
    ]


def _names(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What a figure calls each row: its rule, where that is enough."""
    ruled = {row["label"]: row for row in rows if row["counters"]["num_draft_tokens"]}
    drafters, verifiers = ({row[kind] for row in ruled.values()} for kind in ("drafter", "verifier"))
    short = len(drafters) == 1 and len(verifiers) == len(ruled)
    return {row["label"]: row["verifier"] if short and row["label"] in ruled else row["label"] for row in rows}


def _words(lines: Sequence[str]) -> list[str]:
    """A heading and the list below it, as the Markdown report has them."""
    items = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    told = [line for line in lines if line and not line.startswith("- ")]
    listed = [f"<ul>{''.join(f'<li>{_told(item)}</li>' for item in items)}</ul>"] if items else []
    return [*(f"<p>{_told(text)}</p>" for text in told), *listed]


def _told(text: str) -> str:
    """A sentence of the Markdown report: escaped, then its marks."""
    text = re.sub(r"\*\*(\w[\w ]*)\*\*", r"<strong>\1</strong>", escape(text).replace("\\*", "&#42;"))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def _score(found: Mapping[str, Any] | None) -> str:
    """A score with its interval, and below it the difference to the standard rule in points."""
    difference = None if found is None else found.get("difference")
    return _measured(found, percent) + ("" if difference is None else f"<small>{points(difference)}</small>")


def _measured(measured: Mapping[str, Any] | None, show: Callable[[float | None], str], missing: str = NONE) -> str:
    """A value, and its interval below it."""
    if measured is None or measured["value"] is None:
        return missing
    interval = measured.get("interval")
    below = "" if interval is None else f"<small>{show(interval[0])} to {show(interval[1])}</small>"
    return f"{show(measured['value'])}{below}"
