"""Several tasks in one run: whose prompts, whose scores, and what is refused."""

import json
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import CliRunner

from specdec.cli import main
from specdec.errors import DataError
from specdec.figures import FRONTIER, PICTURES
from specdec.task import samples_of, scores_of
from specdec_plugins.tasks.gsm8k import Gsm8k
from specdec_plugins.tasks.jsonl import Jsonl
from specdec_plugins.tasks.mt_bench import MtBench
from specdec_plugins.tasks.several import Several


@pytest.fixture
def _data(tmp_path, monkeypatch):
    """Three rows of each of two benchmarks, some ids of one those of the other."""
    sums = [{"id": str(n), "question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(3)]
    talks = [{"question_id": str(n), "category": "writing", "turns": [f"Hello {n}?"]} for n in range(3)]
    for file, rows in (("gsm8k.jsonl", sums), ("mt_bench.jsonl", talks)):
        (tmp_path / file).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    monkeypatch.setenv("SPECDEC_DATA", str(tmp_path))


BOTH = (Gsm8k(), MtBench())


# Catches: ids that meet, an `each` over all tasks, a limit of each task, a group of the part instead of the task.
@pytest.mark.usefixtures("_data")
def test_each_task_gives_its_own_prompts():
    found = samples_of(Several(tasks=BOTH, each=2), "several", None, None)
    assert [sample.id for sample in found] == ["gsm8k/0", "gsm8k/1", "mt_bench/0", "mt_bench/1"]
    assert [sample.group for sample in found] == ["gsm8k"] * 2 + ["mt_bench"] * 2
    assert found[2].text == "Hello 0?"
    assert [sample.id for sample in samples_of(Several(tasks=BOTH, each=2), "several", None, 3)][2:] == ["mt_bench/0"]
    assert len(samples_of(Several(tasks=BOTH), "several", None, None)) == 6


# Catches: a completion that is judged by another task or by another row, a score whose task nobody can tell.
@pytest.mark.usefixtures("_data")
def test_each_completion_is_judged_by_its_task():
    task = Several(tasks=BOTH)
    found = samples_of(task, "several", None, None)
    assert scores_of(task, "several", found[1], r"\boxed{2}") == {"gsm8k strict": 1.0, "gsm8k lenient": 1.0}
    assert scores_of(task, "several", found[1], r"\boxed{1}") == {"gsm8k strict": 0.0, "gsm8k lenient": 0.0}
    assert scores_of(task, "several", found[4], r"\boxed{2}") == {}


# Catches: one file read by two tasks, two parts whose ids and scores would meet, a run of no task.
@pytest.mark.usefixtures("_data")
def test_what_cannot_be_is_refused():
    with pytest.raises(
        DataError, match=r"^data\.file: got 'x', wanted none: each task of `several` finds its own data$"
    ):
        Several(tasks=BOTH).samples("x", None)
    with pytest.raises(DataError, match=r"^data\.tasks\[1\], jsonl: data\.file: missing; task jsonl reads a file"):
        Several(tasks=(Gsm8k(), Jsonl())).samples(None, None)
    with pytest.raises(ValueError, match="has gsm8k twice, wanted each task once"):
        Several(tasks=(Gsm8k(), MtBench(), Gsm8k()))
    with pytest.raises(ValueError, match="tasks"):
        Several(tasks=())


# Catches: options of parts that a recipe cannot give, groups and scores that are lost on the way to the report.
@pytest.mark.usefixtures("_data")
@pytest.mark.drawn
def test_a_run_tells_the_tasks_apart(tmp_path):
    recipe = {
        "target": {"model": "random:llama", "dtype": "float32"},
        "drafters": [{"use": "model", "name": "model", "model": "random:llama:1", "num_speculative_tokens": 2}],
        "verifiers": [{"use": "standard"}, {"use": "nucleus"}],
        "kv": {"rows": 2, "tokens": 256},
        "sampling": {"temperature": 1.0, "max_new_tokens": 6},
        "data": {"task": "several", "tasks": [{"use": "gsm8k"}, "mt_bench"], "each": 2},
        "report": {"baseline": False},
        "output_dir": str(tmp_path / "out"),
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    done = CliRunner().invoke(main, ["run", str(tmp_path / "r.yaml"), "--quiet"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    for row in rows:
        assert set(row["scores"]) == {"gsm8k strict", "gsm8k lenient"}
        assert row["scores"]["gsm8k strict"]["requests"] == 2
        assert {name: group["requests"] for name, group in row["groups"].items()} == {"gsm8k": 2, "mt_bench": 2}
    for picture in PICTURES.values():  # files of their own, with every name space they use
        there = (tmp_path / "out" / picture).exists()
        assert there is (picture != PICTURES[FRONTIER])  # nothing was recorded
        if there:
            ElementTree.parse(tmp_path / "out" / picture)
    report = (tmp_path / "out" / "report.md").read_text()
    section = report.split("## By kind of prompt")[1].split("##")[0]
    assert "gsm8k: acceptance length" in section
    assert section.count("model + ") == 2
