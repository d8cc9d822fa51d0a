"""The page and the CSV files of a report: what they hold, and what they must not."""

import csv
import io
import json
import re
import sys
from itertools import pairwise

import pytest

from specdec import drawing
from specdec.figures import FILES, FRONTIER, LENGTHS, POSITIONS, PRICE, TABLE, TIMES, sheets
from specdec.labels import Box, place, spread
from specdec.metrics import Counters
from specdec.page import page
from tests.unit.test_report import RECORDS, ROWS, record, results, row, sums

pytestmark = pytest.mark.drawn

EVIL = '<script>alert("x")</script> & $\\frac$ **b** \\* `c`'


def made(rows=ROWS, records=RECORDS, **changes):
    return results(rows, records, **{"seed": 3, **changes})


def drafting(run, sample, **changes):
    """A record whose counters know positions."""
    counters = Counters(
        num_steps=4,
        num_drafts=4,
        num_draft_tokens=8,
        num_accepted_tokens=3,
        num_emitted_tokens=7,
        num_drafted_per_pos=[4, 4],
        num_examined_per_pos=[4, 2],
        num_accepted_tokens_per_pos=[2, 1],
        num_per_length={1: 2, 2: 1, 3: 1},
    )
    whole = record(run, sample, range(7), sums=sums())
    return {**whole, "counters": json.loads(json.dumps(counters.to_dict())), **changes}


def many(count):
    """A run of many rules with long names."""
    rows = [row("standard", exactness="lossless")]
    rows += [row(f"d + rule_{index}(option=0.{index})", verifier=f"rule {index}") for index in range(count)]
    records = [drafting(entry.label, sample) for entry in rows for sample in "ab"]
    return made(rows, records)


def parsed(sheet):
    return list(csv.DictReader(io.StringIO(sheet.text())))


def texts(html):
    return re.sub(r"<[^>]+>", "", html)


# Catches: a row that is left out of the table or of a figure, options or a speed against standard that are not shown.
def test_every_row_is_in_the_page():
    rows = (*ROWS[:2], row("rule", reference="standard", options="theta 0.95, children first"))
    html = page(made(rows))
    body = html.partition("<tbody>")[2].partition("</tbody>")[0]
    assert body.count("<tr>") == len(rows)
    for entry in rows:
        assert f'<th scope="row">{entry.label}' in body
    assert "<small>theta 0.95, children first</small>" in body
    assert "<td>2.00x</td>" in body.split("rule")[1]  # 6 tokens a second, standard 3
    drawn = html.split("<figure>")[1:]
    assert len(drawn) == 3  # no counters of positions in these records
    assert all("rule" in texts(figure) for figure in drawn)
    assert len(page(many(19)).split("<figure>")[1:]) == 4


# Catches: a name that becomes markup in the table, in a sentence or in a figure, or that matplotlib reads as a formula.
def test_whatever_a_user_named_is_escaped():
    rows = (ROWS[0], row(EVIL, options=EVIL, exactness="lossy"))
    records = [*RECORDS[:2], drafting(EVIL, "a"), drafting(EVIL, "b", finish_reason="error")]
    html = page(made(rows, records, recipe=EVIL, target=EVIL, data={"file": EVIL, "prompts": 2, "repeats": 1}))
    assert "<script" not in html
    assert html.count("&lt;script&gt;") > 6
    assert "$\\frac$" in html.split("<figure>")[2]
    assert page(made((row("\udc80\x00\n\u4e2d" * 30),), [drafting("\udc80\x00\n\u4e2d" * 30, "a")]))


# Catches: a style, a font, a script or a picture that comes from elsewhere, a namespace that only XML needs, two
# figures that share an id, a colour that does not follow the reader's scheme.
def test_the_page_needs_nothing_else():
    html = page(many(3))
    assert "http://" not in html
    assert "https://" not in html
    assert not re.search(r"<(script|link|img|iframe|object)\b|@import|url\((?!#)", html)
    assert set(re.findall(r'(?:href|src)="(.)', html)) <= {"#"}
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert {name for pair in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', html) for name in pair if name} <= set(ids)
    drawn = "".join(html.split("<figure>")[1:])
    assert not re.search(r"(?:fill|stroke): #", drawn)
    assert "var(--series0)" in drawn
    assert html == page(many(3))


# Catches: figures that stand for what was not measured, a row of scores that is dropped or shown where there are none.
def test_what_is_missing_is_said_and_what_is_there_is_shown():
    off = made(records=[{**entry, "fidelity": None} for entry in RECORDS])
    assert "not measured" in page(off)
    assert "What extra acceptance costs" not in page(off)
    assert "accuracy" not in page(off)
    assert "<dt>scores</dt>" not in page(off)
    found = made()
    difference = {"value": -0.125, "interval": [-0.25, 0.0]}
    score = {"value": 0.625, "interval": [0.5, 0.75], "count": 8, "difference": difference}
    found["rows"][2]["scores"] = {"accuracy <b>": score}
    html = page(found)
    assert "accuracy &lt;b&gt;" in html
    assert "62 %<small>50 % to 75 %</small><small>-12 [-25, +0]</small>" in html
    assert "<dt>scores</dt>" in html
    line = parsed(sheets(found)[TABLE])[2]
    assert [line[f"score_accuracy <b>{end}"] for end in ("", "_low", "_high")] == ["0.625", "0.5", "0.75"]
    assert parsed(sheets(found)[TABLE])[1]["score_accuracy <b>"] == ""
    assert page(made((), []))


# Catches: rounded numbers, columns that are swapped, a CSV file without a figure's points.
def test_csv_files_hold_the_numbers_of_the_results():
    rows = (ROWS[0], ROWS[1], row('a, "b"', reference="standard"))
    found = made(rows, [*RECORDS[:4], drafting('a, "b"', "a"), drafting('a, "b"', "b")])
    entry, data = found["rows"][2], sheets(found)
    assert tuple(data) == FILES
    line = parsed(data[TABLE])[2]
    assert line["run"] == 'a, "b"'
    for name in ("acceptance_length", "acceptance_length_gain"):
        assert float(line[name]) == entry[name]["value"]
        assert [float(line[f"{name}_low"]), float(line[f"{name}_high"])] == entry[name]["interval"]
    for name in ("rejection", "excess", "deviation", "deviation_per_request"):
        assert float(line[name]) == entry["fidelity"][name]["value"]
    assert float(line["speedup"]) == entry["speedup"]
    assert float(line["speedup_against_standard"]) == entry["tokens_per_second"] / found["rows"][1]["tokens_per_second"]
    price = parsed(data[PRICE])
    assert [point["run"] for point in price] == ["standard", 'a, "b"']  # no place was examined without drafts
    assert float(price[1]["extra_acceptance"]) == entry["fidelity"]["excess"]["value"]
    assert float(price[1]["deviation_high"]) == entry["fidelity"]["deviation"]["interval"][1]
    assert [list(point.values())[1:] for point in parsed(data[POSITIONS])] == [
        ["1", "8", "8", "4", "0.5", "0.5"],
        ["2", "8", "4", "2", "0.5", "0.25"],
    ]
    lengths = [(int(p["emitted_tokens"]), int(p["steps"])) for p in parsed(data[LENGTHS]) if p["run"] == 'a, "b"']
    assert lengths == [(1, 4), (2, 2), (3, 2)]
    times = parsed(data[TIMES])[2]
    assert float(times["verify_seconds"]) == 2.0
    assert float(times["verify_ms_per_token"]) == pytest.approx(2000 / 14)


# Catches: a report that needs matplotlib, is silent about the figures it has not, or loads it before it draws.
def test_without_matplotlib_the_page_says_how_to_get_figures(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    html = page(made())
    assert "<svg" not in html
    assert html.count("pip install matplotlib") == 1
    assert html.count("<tr>") == page(made()).count("<tr>")
    assert [file for file, sheet in sheets(made()).items() if not sheet.rows] == [FRONTIER, POSITIONS]


# Catches: a point below the line that no rule can be below, drawn from numbers other than the sheet's.
def test_the_line_of_the_figure_is_the_bound(monkeypatch):
    seen = []
    original = drawing._axes

    def watched(*arguments, **options):
        seen.append(original(*arguments, **options)[1])
        return seen[-1].figure, seen[-1]

    monkeypatch.setattr(drawing, "_axes", watched)
    found = many(5)
    drawing.draw(sheets(found), {entry["label"]: entry["label"] for entry in found["rows"]})
    across, up = seen[0].lines[0].get_data()
    assert [(x, y) for x, y in zip(across, up, strict=True)][1:] == [(0.0, 0.0), (up[-1], up[-1])]
    points = {
        tuple(map(float, (line.get_xdata()[0], line.get_ydata()[0])))
        for line in seen[0].lines
        if line.get_marker() == "o"
    }
    wanted = {(float(p["extra_acceptance"]), float(p["deviation"])) for p in parsed(sheets(found)[PRICE])}
    assert points == wanted


# Catches: names over each other, over a point or outside the figure, where there is room.
def test_names_in_a_crowd_do_not_hide_each_other():
    points = [(300 + 9 * (index % 5), 200 + 7 * (index // 5)) for index in range(20)]
    frame = Box(0, 0, 620, 420)
    boxes = place(points, [(90.0, 10.0)] * 20, frame)
    for index, box in enumerate(boxes):
        assert not box.outside(frame)
        assert not any(box.meets(other) for other in boxes[:index])
        assert not any(box.meets(Box(x - 4, y - 4, x + 4, y + 4)) for x, y in points)


# Catches: an order that changes, names that are closer than a line, a crowd at an edge that leaves the figure.
def test_names_at_the_end_of_lines_keep_their_order():
    heights = [95.0, 96.0, 94.0, 10.0, 95.5]
    found = spread(heights, 12, 0, 100)
    assert sorted(range(5), key=lambda i: found[i]) == sorted(range(5), key=lambda i: heights[i])
    gaps = sorted(found)
    assert all(high - low >= 12 for low, high in pairwise(gaps))
    assert max(found) <= 100
    assert found[3] == 10.0


FRONTIERS = [
    {
        "rule": "nucleus",
        "trace": "standard",
        "points": [
            {
                "theta": theta,
                "acceptance_length": {"value": value, "interval": [value - 0.1, value + 0.1]},
                "deviation": cost,
            }
            for theta, value, cost in (
                (None, 2.0, {"value": 0.0, "interval": None}),
                (0.5, 2.5, {"value": 0.1, "interval": None}),
                (0.9, 3.0, {"value": 0.2, "interval": None}),
            )
        ],
        "runs": [{"label": "rule", "theta": 0.9}],
    }
]


# Catches: a point of the frontier that is lost or of another theta, a row that ran drawn as if it were replayed.
def test_the_frontier_has_what_was_replayed_and_what_ran(monkeypatch):
    seen = []
    original = drawing._axes
    monkeypatch.setattr(drawing, "_axes", lambda *a, **o: seen.append(original(*a, **o)) or seen[-1])
    records = [*RECORDS[:4], record("rule", "a", [1, 2, 9, 4], sums=sums()), RECORDS[5]]
    found = made(records=records, frontiers=FRONTIERS)
    lines = parsed(sheets(found)[FRONTIER])
    assert [(line["run"], line["theta"], line["source"]) for line in lines] == [
        ("standard", "", "replay"),
        ("standard", "0.5", "replay"),
        ("standard", "0.9", "replay"),
        ("rule", "0.9", "run"),
    ]
    assert float(lines[3]["acceptance_length"]) == pytest.approx(3.0)
    drawn = drawing.draw(
        {**sheets(found), PRICE: sheets(made(rows=()))[PRICE]},
        {"plain": "plain", "standard": "standard", "rule": "mine"},
    )
    axes = seen[0][1]
    curve = next(line for line in axes.lines if line.get_marker() == "o")
    assert list(zip(*curve.get_data(), strict=True)) == [(0.0, 2.0), (0.1, 2.5), (0.2, 3.0)]
    ran = [line for line in axes.lines if line.get_marker() == "D"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in ran] == [(pytest.approx(0.125), pytest.approx(3.0))]
    assert {"0.5", "0.9", "mine"} <= {text.get_text() for text in axes.texts}
    assert "What theta buys" in page(found)
    assert FRONTIER in drawn
    assert "What theta buys" not in page(made())


# Catches: a figure that has no room for its own legend, names of one point written over and over.
def test_many_frontiers_fit_into_their_figure():
    many_curves = [{**FRONTIERS[0], "rule": f"nucleus(budget={index})"} for index in range(25)]
    found = made(frontiers=many_curves)
    svg = drawing.draw(sheets(found), {entry["label"]: entry["label"] for entry in found["rows"]})[FRONTIER]
    assert svg.count(">0.5</text>") == 1
    assert svg.count("budget=24") == 1
