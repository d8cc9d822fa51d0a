"""Finished runs side by side: what fits is joined, what does not is refused in one sentence."""

import copy
import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from specdec.cli import main
from specdec.errors import CompatibilityError, DataError, RecipeError
from specdec.figures import FRONTIER, sheets
from specdec.joined import join, read_runs
from specdec.page import page
from specdec.report import in_words, markdown
from tests.unit.test_report import RECORDS, ROWS, results, row

pytestmark = pytest.mark.drawn


def run(rows=ROWS, records=RECORDS, **changes):
    found = copy.deepcopy(results(rows, records, seed=0, **changes))
    found["environment"]["prompts"] = "sha256:1"
    found["environment"]["target"]["weights"] = "sha256-sample:1"
    return found


def renamed(label="rule"):
    """A run whose last row has another label."""
    rows = (*ROWS[:2], row(label, reference="standard"))
    return run(rows, [*RECORDS[:4], *({**entry, "run": label} for entry in RECORDS[4:])])


def write(folder, found):
    folder = Path(folder)
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(found), encoding="utf-8")
    return folder


# Catches: rows lost or in another order, two rows of one label, a speed held against the standard row of another run, a
# label that is changed without need.
def test_what_fits_is_joined_and_equal_labels_get_their_runs_name():
    one, other = run(), renamed("new rule")
    other["rows"][1]["tokens_per_second"] = 4.0
    found = join({"a": one, "b": other})
    assert [entry["label"] for entry in found["rows"]] == [
        "a: plain",
        "a: standard",
        "rule",
        "b: plain",
        "b: standard",
        "new rule",
    ]
    assert [entry["reference"] for entry in found["rows"]][2::3] == ["a: standard", "b: standard"]
    assert [entry["run"] for entry in found["rows"]] == ["a"] * 3 + ["b"] * 3
    assert found["rows"][2] == {**one["rows"][2], "run": "a", "reference": "a: standard"}
    for text in (markdown(found), page(found)):
        for entry in found["rows"]:
            assert entry["label"] in text
    assert "1.50x" in page(found).split('row">new rule')[1]  # six tokens a second, its own standard row four
    assert in_words(found)[0] == "Against autoregressive decoding, each within its own run:"
    assert one == run()
    assert [entry["label"] for entry in join({"a": one})["rows"]] == ["plain", "standard", "rule"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def other_prompts(found):
    found["environment"]["prompts"] = "sha256:2"


def other_sampling(found):
    found["sampling"]["temperature"] = 0.5


def other_seed(found):
    found["seed"] = 7


def other_target(found):
    found["environment"]["target"]["weights"] = "sha256-sample:2"


# Catches: a difference that is not looked at, or not named; a refusal that stops at the first of several.
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (other_prompts, "other prompts"),
        (other_sampling, "other sampling (temperature 0.5, not 1.0)"),
        (other_seed, "another seed (7, not 0)"),
        (other_target, "another target (t, whose weights are not those of t)"),
    ],
)
def test_runs_of_another_task_are_refused(change, told):
    changed = renamed()
    change(changed)
    with pytest.raises(CompatibilityError) as caught:
        join({"a": run(), "b": run(), "c": changed})
    assert str(caught.value) == f"c: has {told} than a; wanted runs that differ in drafters and rules alone"
    other_seed(changed)
    other_prompts(changed)
    with pytest.raises(CompatibilityError, match=r"other prompts and .*another seed"):
        join({"a": run(), "c": changed})


# Catches: another machine, version or batch that is refused or not told of, runs of one machine that are doubted.
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda found: found["environment"].update(processor="other"), "processor"),
        (lambda found: found["environment"]["packages"].update(torch="3"), "packages.torch"),
        (lambda found: found["environment"]["target"].update(device="cuda"), "target.device"),
        (lambda found: found.update(rows_at_once=9), "prompts at once"),
    ],
)
def test_speeds_of_other_machines_are_not_comparable(change, told):
    changed = renamed()
    assert join({"a": run(), "b": changed})["notes"] == []
    change(changed)
    found = join({"a": run(), "b": changed})
    assert found["notes"][0].startswith(f"Speeds are not comparable between these runs, which differ in {told}; ")
    assert found["notes"][0] in markdown(found)
    assert found["notes"][0] in page(found)
    assert "\na: Python 3" in markdown(found)
    assert "\nb: Python 3" in markdown(found)


# Catches: a traceback, or a report of half a run, where a folder holds something else.
def test_a_folder_without_a_finished_run_is_one_sentence(tmp_path):
    def refused(*folders, error=DataError):
        with pytest.raises(error) as caught:
            read_runs([Path(folder) for folder in folders])
        assert "\n" not in str(caught.value)
        return str(caught.value)

    good = write(tmp_path / "good", run())
    assert "holds no run" in refused(good, tmp_path / "none")
    unfinished = write(tmp_path / "unfinished", run())
    (unfinished / "results.json").unlink()
    (unfinished / "config.yaml").write_text("{}", encoding="utf-8")
    assert "holds an unfinished run" in refused(unfinished)
    (unfinished / "results.json").write_text('{"rows": [', encoding="utf-8")
    assert "is not JSON" in refused(unfinished)
    (unfinished / "results.json").write_text("[]", encoding="utf-8")
    assert "schema_version None, wanted 1" in refused(unfinished)
    old = run()
    del old["seed"]
    assert "has no 'seed'" in refused(write(tmp_path / "old", old))
    assert "is given twice" in refused(good, tmp_path / "old" / ".." / "good", error=RecipeError)


# Catches: runs named by what they share, folders of one name that become one run.
def test_runs_are_named_by_their_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b", "c/a"):
        write(folder, run())
    assert list(read_runs([Path("a"), Path("b/")])) == ["a", "b"]
    assert list(read_runs([Path("a"), Path("c/a")])) == ["a", "c/a"]


# Catches: a document beside the report, an error that leaves half a document or a file, a page that is overwritten.
def test_the_command_prints_a_report_or_a_document_and_writes_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("a", run())
    write("b", renamed("new rule"))

    def specdec(*arguments):
        return CliRunner().invoke(main, ["compare", *arguments], catch_exceptions=False)

    found = join(read_runs([Path("a"), Path("b")]))
    assert specdec("a", "b").stdout == markdown(found)
    done = specdec("a", "b", "--json", "--html", "both.html")
    assert json.loads(done.stdout) == found
    assert Path("both.html").read_text(encoding="utf-8") == page(found)
    again = specdec("a", "b", "--html", "both.html")
    assert (again.exit_code, again.stdout) == (8, "")
    assert again.stderr == "error: both.html: exists and is not overwritten; try another --html, or remove it\n"
    changed = renamed()
    other_seed(changed)
    shutil.rmtree("b")
    write("b", changed)
    refused = specdec("a", "b", "--json", "--html", "new.html")
    assert (refused.exit_code, refused.stdout) == (5, "")
    assert refused.stderr.startswith("error: b: has another seed (7, not 0) than a; ")
    assert not Path("new.html").exists()
    assert specdec("a", "none").exit_code == 7
    assert specdec().exit_code == 2


# Catches: a traceback where results were damaged deeper than their first level.
@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found["rows"][0].update(counters=None),
        lambda found: found.update(environment={}),
        lambda found: found.update(rows=[]),
        lambda found: found.update(rows=["a text"]),
    ],
)
def test_damaged_results_are_one_sentence(damage, tmp_path):
    found = run()
    damage(found)
    folder = write(tmp_path / "bad", found)
    with pytest.raises(
        DataError, match=r"results\.json: (is not as a run writes it|got rows .*wanted a list).*run it again"
    ):
        read_runs([folder])


# Catches: a frontier of a row that has another name now, a note nobody can tell the run of, a run without groups or
# frontiers beside one that has them.
def test_frontiers_and_groups_follow_their_rows():
    point = {
        "theta": 0.9,
        "acceptance_length": {"value": 3.0, "interval": None},
        "deviation": {"value": 0.1, "interval": None},
    }
    one, other = run(), renamed("new rule")
    one["frontiers"] = [
        {"rule": "n", "trace": "standard", "points": [point], "runs": [{"label": "rule", "theta": 0.9}]}
    ]
    one["notes"] = ["Not in the frontier."]
    for entry in one["rows"]:
        group = {"requests": 1, "acceptance_length": {"value": 2.5, "interval": None}}
        group |= {"acceptance_length_gain": None, "deviation": None}
        entry["groups"] = {"maths": group, "code": group}
    found = join({"a": one, "b": other})
    assert found["frontiers"][0]["trace"] == "a: standard"
    assert found["frontiers"][0]["runs"] == [{"label": "rule", "theta": 0.9}]
    assert "a: Not in the frontier." in found["notes"]
    assert [line["run"] for line in csv.DictReader(io.StringIO(sheets(found)[FRONTIER].text()))] == [
        "a: standard",
        "rule",
    ]
    section = markdown(found).split("## By kind of prompt")[1].split("##")[0]
    lines = {line.split("|")[1].strip(): line for line in section.splitlines() if line.startswith("| ")}
    assert lines["rule"].count("2.50") == 2
    assert "2.50" not in lines["new rule"]
    assert "What theta buys" in page(found)
