import json
import sys
from types import ModuleType

import pytest
import yaml
from click.testing import CliRunner

from specdec import hub, math_answers, sandbox
from specdec.cli import main
from specdec.errors import DataError
from specdec_plugins.tasks.gsm8k import Gsm8k
from specdec_plugins.tasks.humaneval import HumanEval
from specdec_plugins.tasks.mbpp import Mbpp
from specdec_plugins.tasks.mt_bench import MtBench

MATH = {"question": "1 + 1?", "answer": "It is\n#### 2"}
FUNCTION = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f): pass"}
TASK = {"task_id": 11, "prompt": "Do it.", "code": "def f(): pass", "test_imports": [], "test_list": ["assert f()"]}
TALK = {"question_id": 81, "turns": ["Hello?", "Why?"]}
ALL = [(Gsm8k, MATH), (HumanEval, FUNCTION), (Mbpp, TASK), (MtBench, TALK)]


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    """No folder, no hub, and no judge is looked for: only data are asked about here."""
    monkeypatch.delenv("SPECDEC_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(hub, "answers", lambda: False)
    monkeypatch.setattr(sandbox, "problem", lambda: None)
    monkeypatch.setattr(math_answers, "problem", lambda: None)


def write(path, *rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def hugging(monkeypatch):
    """A package `datasets` that knows one row of each, and what it was asked for."""
    asked = []

    def load_dataset(repository, config=None, *, split):
        asked.append((repository, config, split, hub_is_left_alone()))
        rows = {"openai/gsm8k": MATH, "openai/openai_humaneval": FUNCTION, "google-research-datasets/mbpp": TASK}
        return [rows.get(repository) or {"prompt_id": 7, "prompt": TALK["turns"]}]

    module = ModuleType("datasets")
    module.load_dataset, module.asked = load_dataset, asked
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def hub_is_left_alone():
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


# Catches: a task that reads other fields than its data have, a number as an id.
@pytest.mark.parametrize(
    ("task", "row", "identity"),
    [(*pair, name) for pair, name in zip(ALL, ("1", "HumanEval/0", "11", "81"), strict=True)],
)
def test_a_given_file_is_read(tmp_path, task, row, identity):
    (sample,) = task().samples(write(tmp_path / "a.jsonl", row), None)
    assert sample.id == identity
    assert sample.text


# Catches: a folder that is ignored, a file name that is not the data's own, the hub asked although there is a folder.
@pytest.mark.parametrize(
    ("task", "row", "file"),
    [
        (Gsm8k(), MATH, "gsm8k.jsonl"),
        (HumanEval(), FUNCTION, "humaneval.jsonl"),
        (Mbpp(), TASK, "mbpp_sanitized_test.jsonl"),
        (Mbpp(edition="full"), TASK, "mbpp_test.jsonl"),
        (MtBench(), TALK, "mt_bench.jsonl"),
    ],
)
def test_the_folder_of_the_environment_is_looked_into(tmp_path, monkeypatch, hugging, task, row, file):
    monkeypatch.setenv("SPECDEC_DATA", str(tmp_path))
    with pytest.raises(
        DataError, match=rf"^data\.file: missing, and SPECDEC_DATA is .* no file {file} is; try [^\n]*$"
    ):
        task.samples(None, None)
    write(tmp_path / file, row)
    assert len(task.samples(None, None)) == 1
    assert hugging.asked == []


# Catches: another data set, a training split, a hub that does not answer waited for.
@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize(
    ("task", "asked", "identity"),
    [
        (Gsm8k(), ("openai/gsm8k", "main", "test"), "1"),
        (HumanEval(), ("openai/openai_humaneval", None, "test"), "HumanEval/0"),
        (Mbpp(), ("google-research-datasets/mbpp", "sanitized", "test"), "11"),
        (Mbpp(edition="full"), ("google-research-datasets/mbpp", "full", "test"), "11"),
        (MtBench(), ("HuggingFaceH4/mt_bench_prompts", None, "train"), "7"),
    ],
)
def test_the_hub_is_asked_last(monkeypatch, hugging, task, asked, identity, answers):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "answers", lambda: answers)
    assert [sample.id for sample in task.samples(None, None)] == [identity]
    assert hugging.asked == [(*asked, not answers)]


# Catches: what the package raises shown as a traceback.
def test_a_hub_that_fails_is_one_sentence(hugging):
    def load_dataset(*_, **__):
        raise ConnectionError("no\nroute")

    hugging.load_dataset = load_dataset
    with pytest.raises(DataError) as caught:
        Gsm8k().samples(None, None)
    assert str(caught.value) == (
        "data.file: missing, and openai/gsm8k cannot be had from the hub: ConnectionError: no route; "
        "try a file, or SPECDEC_DATA, a folder that has gsm8k.jsonl"
    )


# Catches: a way that is not named, a traceback.
@pytest.mark.parametrize(("task", "row"), ALL)
def test_data_that_are_nowhere_are_one_sentence_with_three_ways(task, row):
    with pytest.raises(DataError) as caught:
        task().samples(None, None)
    said = str(caught.value)
    assert said.startswith("data.file: missing; there are three ways: give a file, set SPECDEC_DATA to a folder")
    assert f"{task().source.file}, or python -m pip install datasets to get {task().source.repository}" in said
    assert "\n" not in said


# Catches: the first rows instead of evenly spread ones, a limit applied before, rows read that are not asked for.
def test_even_spreads_and_limit_counts(tmp_path):
    file = write(tmp_path / "a.jsonl", *({"question": str(n), "answer": f"#### {n}"} for n in range(7)))
    assert [s.id for s in Gsm8k(even=3).samples(file, None)] == ["1", "3", "5"]
    assert [s.id for s in Gsm8k(even=3).samples(file, 2)] == ["1", "3"]
    assert [s.id for s in Gsm8k(even=7).samples(file, None)] == [str(n) for n in range(1, 8)]
    with pytest.raises(DataError, match=r"^data\.even: got 8, wanted at most 7"):
        Gsm8k(even=8).samples(file, None)
    with (tmp_path / "a.jsonl").open("a", encoding="utf-8") as lines:
        lines.write("broken")
    assert len(Gsm8k().samples(file, 7)) == 7


# Catches: an even subset other than the published one.
@pytest.mark.parametrize(
    ("task", "file"),
    [
        (Gsm8k, "gsm8k"),
        (HumanEval, "humaneval"),
        (Mbpp, "mbpp_test"),
        (Mbpp, "mbpp_sanitized_test"),
    ],
)
def test_even_100_is_the_published_subset(folder, task, file):
    chosen = task(even=100).samples(str(folder / f"{file}.jsonl"), None)
    published = task().samples(str(folder / f"{file}.even100.jsonl"), None)
    assert [sample.text for sample in chosen] == [sample.text for sample in published]


# Catches: rows that are dropped or doubled on the way.
@pytest.mark.parametrize(
    ("task", "count"),
    [(Gsm8k(), 1319), (HumanEval(), 164), (Mbpp(), 257), (Mbpp(edition="full"), 500), (MtBench(), 80)],
)
def test_every_row_becomes_a_sample(folder, monkeypatch, task, count):
    monkeypatch.setenv("SPECDEC_DATA", str(folder))
    samples = task.samples(None, None)
    assert len({sample.id for sample in samples}) == len(samples) == count


# Catches: another benchmark's file taken, a KeyError, an empty prompt, a message without the line.
@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        (
            Gsm8k,
            [MATH, TALK],
            r"a\.jsonl:2: no field question; it has 'question_id', 'turns'; try this task's own data",
        ),
        (Gsm8k, [{**MATH, "question": 5}], r"a\.jsonl:1: field 'question' is 5, wanted a text"),
        (Gsm8k, [{**MATH, "answer": "2"}], r"a\.jsonl:1: field 'answer' does not end in #### and a number"),
        (Gsm8k, [{**MATH, "question": "\ud800"}], r"a\.jsonl:1: got '\\ud800'"),
        (HumanEval, [{**FUNCTION, "test": None}], r"a\.jsonl:1: field 'test' is null, wanted a text"),
        (Mbpp, [{**TASK, "test_list": "assert f()"}], r"field 'test_list' is \"assert f\(\)\", wanted a list of texts"),
        (MtBench, [{**TALK, "turns": []}], r"a\.jsonl:1: there is no turn"),
        (MtBench, [{**TALK, "turns": [""]}], r"a\.jsonl:1: the prompt is an empty text"),
        (MtBench, [], r"a\.jsonl: empty"),
    ],
)
def test_a_row_of_something_else_is_named_with_its_line(tmp_path, task, rows, message):
    with pytest.raises(DataError, match=message):
        task().samples(write(tmp_path / "a.jsonl", *rows), None)


# Catches: a recipe that must name a file, an option of the task that is refused, a traceback where data are missing.
def test_a_recipe_needs_no_more_than_the_task(tmp_path, monkeypatch):
    write(tmp_path / "gsm8k.jsonl", *[MATH] * 5)
    recipe = {
        "target": {"model": "random:llama"},
        "drafters": [{"use": "none"}],
        "verifiers": [{"use": "standard"}],
        "data": {"task": "gsm8k", "limit": 3},
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    monkeypatch.setenv("SPECDEC_DATA", str(tmp_path))
    command = ["validate", str(tmp_path / "r.yaml")]
    done = CliRunner().invoke(main, command)
    assert "valid; 3 prompts" in done.stdout, done.output
    assert "valid; 2 prompts" in CliRunner().invoke(main, [*command, "--set", "data.even=2"]).stdout
    monkeypatch.delenv("SPECDEC_DATA")
    done = CliRunner().invoke(main, command)
    assert (done.exit_code, done.stderr.count("\n")) == (7, 1)
    assert done.stderr.startswith("error: data.file: missing; there are three ways")
