"""Sheets as inline SVG. The only file that knows matplotlib, and only when something is drawn.

Text stays text, and colours are names that the page gives a value to, in light and in dark.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from specdec.figures import FRONTIER, LENGTHS, POSITIONS, PRICE, TIMES, Cell, Sheet
from specdec.labels import Box, place, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that occur nowhere else, and what the page calls them.
COLOURS = ("ink", "muted", "grid", *(f"series{index}" for index in range(8)))
_HEX = {name: f"#0102{index + 16:02x}" for index, name in enumerate(COLOURS)}
_INK, _MUTED, _GRID = (_HEX[name] for name in COLOURS[:3])
_SERIES = [_HEX[name] for name in COLOURS[3:]]
_CLASSES = {"lossless": _SERIES[2], "own_target": _SERIES[0], "lossy": _SERIES[1]}
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1, 2)))
_MARKERS = "osD^"
_SIZE, _SMALL = 9.5, 8.5
_WIDTH = 680  # pixels, as every length here; a point of matplotlib's is one
_LONGEST = 44
_NAMED = 3  # curves whose points all have names
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a $ in a label is a $
    "font.family": ["sans-serif"],
    "font.size": _SIZE,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "legend.fontsize": _SIZE,
}


def draw(sheets: dict[str, Sheet], names: dict[str, str]) -> dict[str, str]:
    """SVG elements by sheet; a sheet that there is nothing to draw of is left out.

    Args:
        sheets: of `figures.sheets`.
        names: what a run is called in a figure.

    Raises:
        ImportError: there is no matplotlib.
    """
    drawers: dict[str, Callable[[Sheet, dict[str, str]], Figure | None]] = {
        PRICE: _price,
        FRONTIER: _frontier,
        POSITIONS: _positions,
        LENGTHS: _lengths,
        TIMES: _times,
    }
    called = {run: _shown(name) for run, name in names.items()}
    made = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as of signs that its own font lacks: the reader's has them
        from matplotlib import rc_context

        for file, drawer in drawers.items():
            with rc_context({**_STYLE, "svg.hashsalt": file}):
                if (figure := drawer(sheets[file], called)) is not None:
                    made[file] = _svg(figure, file)
    return made


def _price(sheet: Sheet, names: dict[str, str]) -> Figure | None:
    """Deviation over extra acceptance, a point a rule, and the line that none lies below."""
    from matplotlib.lines import Line2D

    points = [dict(zip(sheet.columns, row, strict=True)) for row in sheet.rows]
    points = [point for point in points if point["extra_acceptance"] is not None and point["deviation"] is not None]
    if not points:
        return None
    height = 460
    figure, axes = _axes(height, left=62, right=16, top=34, bottom=46)
    across, up = ([_number(point[name]) for point in points] for name in ("extra_acceptance", "deviation"))
    most = max(*across, *up, 1e-3)
    least = min(*across, 0.0)
    # To the right and above there must be room for names.
    x_limits, y_limits = (least - 0.06 * (most - least), most + 0.3 * (most - least)), (-0.045 * most, 1.12 * most)
    axes.set_xlim(x_limits)
    axes.set_ylim(y_limits)
    bound = ([x_limits[0], 0.0, y_limits[1]], [0.0, 0.0, y_limits[1]])
    axes.plot(*bound, color=_MUTED, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    for point, x, y in zip(points, across, up, strict=True):
        colour = _CLASSES.get(str(point["exactness"]), _INK)
        _whiskers(axes, point, ("extra_acceptance", "deviation"), colour)
        axes.plot([x], [y], marker="o", markersize=6, color=colour, linestyle="none", zorder=3)
    axes.set_xlabel("extra acceptance at a mean place, beyond what the standard rule keeps")
    axes.set_ylabel("deviation at a mean place")
    corners = [tuple(axes.transData.transform(corner)) for corner in zip(*bound, strict=True)]
    texts = [names[str(point["run"])] for point in points]
    _name_points(axes, list(zip(across, up, strict=True)), texts, _along(corners))
    there = {str(point["exactness"]) for point in points}
    handles = [
        Line2D([], [], marker="o", linestyle="none", color=colour, label=name.replace("_", " "))
        for name, colour in _CLASSES.items()
        if name in there
    ]
    handles.append(Line2D([], [], color=_MUTED, linestyle=(0, (4, 3)), label="deviation = extra acceptance"))
    figure.legend(handles=handles, loc="upper left", ncol=4, bbox_to_anchor=(0.07, 1.0), handletextpad=0.4)
    return figure


def _frontier(sheet: Sheet, names: dict[str, str]) -> Figure | None:
    """Acceptance length over deviation as theta moves: a line for replayed steps, a diamond for a row that ran."""
    from matplotlib.lines import Line2D

    points = [dict(zip(sheet.columns, row, strict=True)) for row in sheet.rows]
    points = [point for point in points if point["acceptance_length"] is not None and point["deviation"] is not None]
    curves: dict[tuple[str, str], list[dict[str, Cell]]] = {}
    for point in points:
        if point["source"] == "replay":
            curves.setdefault((str(point["run"]), str(point["rule"])), []).append(point)
    if not curves:
        return None
    legend = 16 * (len(curves) + 1)
    figure, axes = _axes(380 + legend, left=62, right=16, top=20 + legend, bottom=46)
    across, up = ([_number(point[name]) for point in points] for name in ("deviation", "acceptance_length"))
    wide, high = max(max(across) - min(across), 1e-3), max(max(up) - min(up), 1e-2)
    axes.set_xlim(min(across) - 0.06 * wide, max(across) + 0.14 * wide)
    axes.set_ylim(min(up) - 0.12 * high, max(up) + 0.12 * high)
    axes.set_xlabel("deviation at a mean place")
    axes.set_ylabel("acceptance length")
    handles, line = [], []
    for index, ((run, rule), curve) in enumerate(curves.items()):
        colour, dash = _SERIES[index % 8], _DASHES[index // 8 % 4]
        x, y = ([_number(point[name]) for point in curve] for name in ("deviation", "acceptance_length"))
        style: dict[str, Any] = {"color": colour, "linestyle": dash, "linewidth": 1.5, "marker": "o", "markersize": 4}
        axes.plot(x, y, **style)
        line += _along([tuple(axes.transData.transform(pair)) for pair in zip(x, y, strict=True)])
        handles.append(Line2D([], [], label=f"{_shown(rule)}, over the steps of {names[run]}", **style))
    for point in points:
        if point["source"] != "replay":
            _whiskers(axes, point, ("deviation", "acceptance_length"), _INK)
            here = [_number(point["deviation"])], [_number(point["acceptance_length"])]
            axes.plot(*here, marker="D", markersize=6, color=_INK, linestyle="none", zorder=3)
    if any(point["source"] != "replay" for point in points):
        handles.append(Line2D([], [], marker="D", linestyle="none", color=_INK, label="a row that ran"))
    # Thetas of one curve are enough where there are many, and one name where names and points meet.
    first = next(iter(curves))
    named = dict.fromkeys(
        (_number(point["deviation"]), _number(point["acceptance_length"]), _theta(point, names))
        for point in points
        if point["source"] != "replay" or len(curves) <= _NAMED or (point["run"], point["rule"]) == first
    )
    _name_points(axes, [(x, y) for x, y, _ in named], [text for _, _, text in named], line)
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.07, 1.0), handletextpad=0.6)
    return figure


def _theta(point: dict[str, Cell], names: dict[str, str]) -> str:
    if point["source"] != "replay":
        return names[str(point["run"])]
    return "standard" if point["theta"] is None else f"{point['theta']:g}"


def _whiskers(axes: Axes, point: dict[str, Cell], names: tuple[str, str], colour: str) -> None:
    """The intervals of a point, across and up."""
    x, y = (_number(point[name]) for name in names)
    for name, horizontal in zip(names, (True, False), strict=True):
        low, high = point[f"{name}_low"], point[f"{name}_high"]
        if low is not None and high is not None:
            ends = ([_number(low), _number(high)], [y, y]) if horizontal else ([x, x], [_number(low), _number(high)])
            axes.plot(*ends, color=colour, linewidth=0.8, alpha=0.35, zorder=2)


def _along(corners: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Places on a line with these corners, some pixels apart."""
    found = corners[-1:]
    for one, other in pairwise(corners):
        parts = 1 + int(math.dist(one, other) / 6)
        found += [
            (one[0] + (other[0] - one[0]) * part / parts, one[1] + (other[1] - one[1]) * part / parts)
            for part in range(parts)
        ]
    return found


def _name_points(
    axes: Axes, points: list[tuple[float, float]], texts: list[str], avoid: list[tuple[float, float]]
) -> None:
    """Names beside points, none over another or over places to avoid; a far one gets a line to its point."""
    pixels = [tuple(axes.transData.transform(point)) for point in points]
    frame = Box(*axes.transAxes.transform((0, 0)), *axes.transAxes.transform((1, 1)))
    inverse = axes.transData.inverted()
    boxes = place(pixels, [_extent(text) for text in texts], frame, avoid)
    for text, box, pixel in zip(texts, boxes, pixels, strict=True):
        left, middle = inverse.transform((box.left, (box.bottom + box.top) / 2))
        near = min(max(pixel[0], box.left), box.right), min(max(pixel[1], box.bottom), box.top)
        if (near[0] - pixel[0]) ** 2 + (near[1] - pixel[1]) ** 2 > 12**2:
            start, end = inverse.transform(pixel), inverse.transform(near)
            axes.plot([start[0], end[0]], [start[1], end[1]], color=_MUTED, linewidth=0.6, zorder=2)
        axes.text(left, middle, text, fontsize=_SMALL, va="center", ha="left", zorder=4)


def _positions(sheet: Sheet, names: dict[str, str]) -> Figure | None:
    """Of those examined at each position, the share kept: a line a rule, named at its end."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in sheet.rows:
        found = dict(zip(sheet.columns, row, strict=True))
        if found["conditional"] is not None:
            lines.setdefault(str(found["run"]), []).append((_number(found["position"]), _number(found["conditional"])))
    if not lines:
        return None
    right = max(_extent(names[run])[0] for run in lines) + 40
    step = 13
    figure, axes = _axes(max(300, step * len(lines) + 60), left=56, right=right, top=14, bottom=44)
    last = max(x for points in lines.values() for x, _ in points)
    lowest = min(y for points in lines.values() for _, y in points)
    floor = max(0.0, int(lowest * 10 - 1e-9) / 10 - 0.02)
    axes.set_xlim(1 - 0.03 * last, last + 0.02 * last)
    axes.set_ylim(floor, 1.02)
    axes.set_xlabel("draft position")
    axes.set_ylabel("kept, of those examined there")
    axes.set_xticks(range(1, int(last) + 1, max(1, int(last) // 12)))
    _percent(axes, "y")
    frame = axes.transAxes.transform((1, 1)), axes.transAxes.transform((1, 0))
    ends = {run: axes.transData.transform(points[-1]) for run, points in lines.items()}
    heights = spread([end[1] for end in ends.values()], step, frame[1][1], frame[0][1])
    inverse = axes.transData.inverted()
    for index, (run, height) in enumerate(zip(lines, heights, strict=True)):
        colour, dash = _SERIES[index % 8], _DASHES[index // 8 % 4]
        x, y = zip(*lines[run], strict=True)
        mark = _MARKERS[index // 8 % 4]
        axes.plot(x, y, color=colour, linestyle=dash, linewidth=1.5, marker=mark, markersize=4)
        start = inverse.transform((frame[0][0] + 22, height))
        leader = ([x[-1], start[0]], [y[-1], start[1]])
        axes.plot(*leader, color=colour, linewidth=0.7, alpha=0.6, clip_on=False)
        end = inverse.transform((frame[0][0] + 25, height))
        axes.text(end[0], end[1], names[run], fontsize=_SMALL, va="center", color=colour, clip_on=False)
    return figure


def _lengths(sheet: Sheet, names: dict[str, str]) -> Figure | None:
    """How many tokens a verification emitted: a small histogram for each rule."""
    found: dict[str, dict[int, float]] = {}
    for run, length, _, share in sheet.rows:
        found.setdefault(str(run), {})[int(_number(length))] = _number(share)
    if not found:
        return None
    columns, high, gap, head, foot = 3, 62, 14, 18, 18
    lines = -(-len(found) // columns)
    height, wide = lines * (head + high + foot) + 26, (_WIDTH - 44 - 8) / columns - gap
    figure = _figure(height)
    longest, most = (
        max(max(shares) for shares in found.values()),
        max(max(shares.values()) for shares in found.values()),
    )
    for index, (run, shares) in enumerate(found.items()):
        line, column = divmod(index, columns)
        left, bottom = 44 + column * (wide + gap), height - (line + 1) * (head + high + foot) + foot
        axes = figure.add_axes((left / _WIDTH, bottom / height, wide / _WIDTH, high / height))
        axes.bar(list(shares), list(shares.values()), width=0.8, color=_SERIES[0])
        axes.set_xlim(0.4, longest + 0.6)
        axes.set_ylim(0, 1.08 * most)
        axes.set_xticks(range(1, longest + 1, max(1, longest // 8)))
        axes.set_yticks([0, round(most / 2, 1)] if most > 0.1 else [0])
        axes.tick_params(labelsize=_SMALL, length=2, pad=2, labelleft=column == 0)
        axes.grid(visible=False, axis="x")
        _percent(axes, "y")
        axes.text(0, 1.06, names[run], transform=axes.transAxes, fontsize=_SMALL, va="bottom")
    figure.text(0.5, 4 / height, "emitted tokens of a verification", ha="center", va="bottom", fontsize=_SIZE)
    return figure


def _times(sheet: Sheet, names: dict[str, str]) -> Figure | None:
    """Milliseconds of an emitted token, split: a bar a rule."""
    bars = [(names[str(row[0])], [_number(part) for part in row[-3:]]) for row in sheet.rows if row[-1] is not None]
    if not bars:
        return None
    left = max(_extent(name)[0] for name, _ in bars) + 14
    figure, axes = _axes(19 * len(bars) + 82, left=left, right=52, top=32, bottom=44)
    heights = range(len(bars), 0, -1)
    begun = [0.0] * len(bars)
    for index, part in enumerate(("draft", "verify", "rest")):
        widths = [parts[index] for _, parts in bars]
        axes.barh(heights, widths, left=begun, height=0.68, color=_SERIES[(0, 1, 7)[index]], label=part)
        begun = [start + width for start, width in zip(begun, widths, strict=True)]
    for height, total in zip(heights, begun, strict=True):
        axes.text(total, height, f" {total:.3g}", va="center", fontsize=_SMALL)
    axes.set_yticks(heights, [name for name, _ in bars], fontsize=_SMALL)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(0.4, len(bars) + 0.6)
    axes.set_xlim(0, max(*begun, 1e-9) * 1.02)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("milliseconds of an emitted token")
    figure.legend(loc="upper left", ncol=3, bbox_to_anchor=(left / _WIDTH - 0.01, 1.0), handlelength=1.2)
    return figure


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH / 72, height / 72), dpi=72)


def _axes(height: float, *, left: float, right: float, top: float, bottom: float) -> tuple[Figure, Axes]:
    figure = _figure(height)
    size = (_WIDTH - left - right) / _WIDTH, (height - top - bottom) / height
    return figure, figure.add_axes((left / _WIDTH, bottom / height, *size))


def _percent(axes: Axes, axis: str) -> None:
    getattr(axes, f"{axis}axis").set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


def _number(cell: Cell) -> float:
    return float(cell or 0.0)


def _extent(text: str) -> tuple[float, float]:
    """Width and height of a small text. The reader's font is not known: this one is wide."""
    return 0.56 * _SMALL * len(text), 1.15 * _SMALL


def _shown(name: str) -> str:
    text = " ".join(name.encode("utf-8", "backslashreplace").decode().split())
    text = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text) or "-"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}"


def _svg(figure: Figure, file: str) -> str:
    """The element alone, without what a page has already, with ids of its own."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    own = re.sub(r"\W", "-", file)

    def tag(found: re.Match[str]) -> str:
        inside = re.sub(r' xmlns(?::\w+)?="[^"]*"', "", found[0])
        inside = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{own}-", inside)
        for name, colour in _HEX.items():
            inside = inside.replace(colour, f"var(--{name})")
        return inside

    text = re.sub(r"<[^<>]+>", tag, text)
    return re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text, count=1).strip()
