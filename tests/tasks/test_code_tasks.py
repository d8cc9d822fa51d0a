import json

import pytest

from specdec import sandbox
from specdec.errors import DataError
from specdec.task import scores_of
from specdec_plugins.tasks.humaneval import HumanEval
from specdec_plugins.tasks.mbpp import Mbpp
from specdec_plugins.tasks.mt_bench import MtBench

NEEDS_A_SANDBOX = pytest.mark.skipif(sandbox.problem() is not None, reason=f"no sandbox here: {sandbox.problem()}")
PROMPT = """from typing import List

def one():
    return 1

def f(x: List) -> int:
    '''One more than its length.'''
"""
FUNCTION = {
    "task_id": "HumanEval/0",
    "prompt": PROMPT,
    "entry_point": "f",
    "test": "def check(candidate):\n    assert candidate([1]) == 2 == 1 + one()\n",
}
TREE = {
    "task_id": 367,
    "text": "Write it.",
    "code": "class Node:\n    pass\ndef help(): pass\ndef f(x):\n    return x",
    "test_setup_code": "root = Node()",
    "test_list": ["assert f(root) is root", "assert f(1) == 1"],
}
CHECKED = {
    "task_id": 11,
    "prompt": "Write it.",
    "code": "def f(x):\n    return x",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(f(1), 1)"],
}


def sample_of(task, row, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(row), encoding="utf-8")
    return task.samples(str(file), None)[0]


def block(code):
    return f"Here it is:\n```python\n{code}\n```\nDone."


# Catches: another prompt than the field's.
def test_the_prompts_are_those_of_the_papers(tmp_path):
    unscored = {"scored": False}
    assert sample_of(HumanEval(**unscored), FUNCTION, tmp_path).text == (
        f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{PROMPT}\n```"
    )
    paper = (
        "You are an expert Python programmer, and here is your task: Write it. Your code should pass these tests:\n\n"
    )
    assert sample_of(Mbpp(**unscored), CHECKED, tmp_path).text == f"{paper}assert math.isclose(f(1), 1)"
    assert sample_of(Mbpp(**unscored), TREE, tmp_path).text == f"{paper}assert f(root) is root\nassert f(1) == 1"
    assert sample_of(Mbpp(prompt="deepspec", **unscored), CHECKED, tmp_path).text == "Write it."
    turns = {"question_id": 81, "turns": ["Hello?", "Why?"]}
    talk = sample_of(MtBench(), turns, tmp_path)
    assert talk.text == "Hello?"
    assert scores_of(MtBench(), "mt_bench", talk, "Well.") == {}


# Catches: imports and helpers of the prompt lost, a body that is not put behind the prompt, a stub that passes.
@NEEDS_A_SANDBOX
@pytest.mark.parametrize(
    ("completion", "passes"),
    [
        (block(PROMPT + "    return len(x) + 1"), True),
        (block("def f(x: List) -> int:\n    return len(x) + one()"), True),
        (block("from __future__ import annotations\ndef f(x):\n    return len(x) + 1"), True),
        (block("    return len(x) + 1"), True),
        ("    return len(x) + 1\n", True),
        (PROMPT + "    return len(x) + 1\n", True),
        (block("def f(x):\n    return len(x) + 1") + block("print(f([1, 2]))"), True),
        (block("def f(x):\n    return len(x) + 1\n\nif __name__ == '__main__':\n    input()"), True),
        (block("def f(x):\n    return len(x)"), False),
        (block("f = 5"), False),
        (block("def g(x):\n    return len(x) + 1"), False),
        (block("import os\nos._exit(0)"), False),
        (block("def f(x):\n    import sys\n    sys.exit()"), False),
        ("I do not know.", False),
        ("", False),
    ],
)
def test_humaneval_completions_are_run(tmp_path, completion, passes):
    task = HumanEval()
    assert scores_of(task, "humaneval", sample_of(task, FUNCTION, tmp_path), completion) == {"pass@1": float(passes)}


# Catches: the set-up run before the code that it needs, tests without their imports, the first test alone.
@NEEDS_A_SANDBOX
@pytest.mark.parametrize(
    ("row", "completion", "passes"),
    [
        (TREE, block(TREE["code"]), True),
        (TREE, block(TREE["code"]) + block("f(Node())"), True),
        (TREE, block("def f(x):\n    return x"), False),
        (TREE, block("class Node: pass\ndef f(x):\n    return x if x != 1 else 2"), False),
        (CHECKED, block(CHECKED["code"]), True),
        (CHECKED, CHECKED["code"], True),
        (CHECKED, block("def other(x):\n    return x"), False),
    ],
)
def test_mbpp_completions_are_run(tmp_path, row, completion, passes):
    task = Mbpp()
    assert scores_of(task, "mbpp", sample_of(task, row, tmp_path), completion) == {"pass@1": float(passes)}


# Catches: the tests' function called by the name of a helper.
def test_the_name_is_the_last_that_the_tests_use(tmp_path):
    assert sample_of(Mbpp(scored=False), TREE, tmp_path).fields["name"] == "f"


# Catches: programs that run unconfined unasked, a refusal that comes after the run, one that names no way out.
@pytest.mark.parametrize(("task", "row"), [(HumanEval, FUNCTION), (Mbpp, CHECKED)])
def test_a_missing_sandbox_is_one_sentence_before_anything_runs(tmp_path, monkeypatch, task, row):
    monkeypatch.setattr(sandbox, "problem", lambda: "unshare: Operation not permitted")
    with pytest.raises(DataError) as caught:
        sample_of(task(), row, tmp_path)
    assert str(caught.value) == (
        "data.task: no sandbox can be had for the programs that it judges: unshare: Operation not permitted; wanted "
        "Linux 5.12 or later and the right to unshare; try data.scored=false, or data.allow_unsafe=true where programs "
        "may do any harm"
    )
    unscored, unsafe = task(scored=False), task(allow_unsafe=True)
    sample = sample_of(unscored, row, tmp_path)
    assert scores_of(unscored, "mine", sample, "```python\nraise\n```") == {}
    with pytest.raises(DataError, match="cannot be had here: unshare"):
        task().score(sample, "")
    told = []
    monkeypatch.setattr(
        sandbox, "run_program", lambda *_, confined: told.append(confined) or sandbox.Outcome(True, "", 0)
    )
    assert unsafe.score(sample_of(unsafe, row, tmp_path), "") == {"pass@1": 1.0}
    monkeypatch.setattr(sandbox, "problem", lambda: None)
    unsafe.score(sample, "")
    assert told == [False, True]


SWEEPS = [
    (HumanEval(), "humaneval", lambda row: block(row["prompt"] + row["canonical_solution"])),
    (HumanEval(), "humaneval", lambda row: row["canonical_solution"]),
    (Mbpp(edition="full"), "mbpp_test", lambda row: block(row["code"])),
    (Mbpp(), "mbpp_sanitized_test", lambda row: block(row["code"])),
]


# Catches: a reference solution that fails, which every model's would then, and tests that do not look at the program.
@NEEDS_A_SANDBOX
@pytest.mark.parametrize("share", [20, pytest.param(None, marks=pytest.mark.full)])
@pytest.mark.parametrize(("task", "name", "reference"), SWEEPS, ids=["humaneval", "bodies", "mbpp", "mbpp_sanitized"])
def test_reference_solutions_pass_and_nothing_else_does(folder, task, name, reference, share):
    samples = task.samples(str(folder / f"{name}.jsonl"), None)
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    step = len(samples) // (share or len(samples))
    for sample, row in list(zip(samples, rows, strict=True))[::step]:
        assert task.score(sample, reference(row)) == {"pass@1": 1.0}, sample.id
    hollow = block(f"def {samples[0].fields.get('entry_point') or samples[0].fields['name']}(*_):\n    return None")
    assert task.score(samples[0], hollow) == {"pass@1": 0.0}
