import json
import sys
import threading
import time
from importlib.metadata import version

import pytest

from specdec import math_answers
from specdec.errors import DataError
from specdec.math_answers import last_boxed, right
from specdec.task import scores_of
from specdec_plugins.tasks.gsm8k import Gsm8k


def read(file, answer="#### 18"):
    file.write_text(json.dumps({"question": "How many?", "answer": answer}), encoding="utf-8")
    return Gsm8k().samples(str(file), None)[0]


# Catches: another prompt than DeepSpec's, a brace that the template doubles or drops.
def test_the_prompt_is_deepspecs(tmp_path):
    assert read(tmp_path / "a.jsonl").text == (
        "How many?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )


# Catches: a score that reads the first box, a number before the box, a text without box that is strict.
@pytest.mark.parametrize(
    ("completion", "strict", "lenient"),
    [
        (r"So \boxed{18}", 1, 1),
        (r"$\boxed{18}$ dollars", 1, 1),
        (r"\boxed{\$18}", 1, 1),
        (r"\boxed{18.00}", 1, 1),
        (r"\boxed{ 18 \text{ dollars} }", 1, 1),
        (r"\boxed{\frac{36}{2}}", 1, 1),
        (r"\boxed{12}, no, \boxed{18}", 1, 1),
        (r"\boxed{12}. Rather \boxed{18}.", 1, 1),
        (r"\boxed{18}, no, \boxed{12}", 0, 0),
        (r"\boxed{18} and then \boxed{", 1, 1),
        ("It is 18.", 0, 1),
        ("She makes $18 per day", 0, 1),
        ("first 12 and then 18", 0, 1),
        ("first 18 and then 12", 0, 0),
        (r"\boxed{}", 0, 0),
        ("eighteen", 0, 0),
        ("", 0, 0),
        ("\ud800", 0, 0),
    ],
)
def test_strict_reads_the_last_box_and_lenient_the_last_number(tmp_path, completion, strict, lenient):
    sample = read(tmp_path / "a.jsonl")
    assert scores_of(Gsm8k(), "gsm8k", sample, completion) == {"strict": strict, "lenient": lenient}


# Catches: thousands that are read as two numbers.
@pytest.mark.parametrize("written", ["1,800", "1800", "1800.0", r"1{,}800"])
def test_thousands_are_one_number(tmp_path, written):
    sample = read(tmp_path / "a.jsonl", "so\n#### 1,800")
    assert Gsm8k().score(sample, rf"\boxed{{{written}}}")["strict"] == 1.0


# Catches: braces that are not counted, an open box taken or taken for the end of the search.
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (r"a \boxed{\frac{1}{2}} b", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{1} \boxed{2}", r"\boxed{2}"),
        (r"\boxed{1} \boxed{2", r"\boxed{1}"),
        (r"\boxed{\boxed{1}}", r"\boxed{1}"),
        (r"\boxed 1", None),
        ("", None),
    ],
)
def test_the_last_box_that_is_closed_is_found(text, wanted):
    assert last_boxed(text) == wanted


# Catches: an answer that keeps the run busy for ever, and one that takes those after it with it.
def test_an_answer_that_is_too_much_is_wrong_and_the_next_one_is_judged():
    assert right("2", "2")
    started = time.perf_counter()
    assert not right("18", r"\boxed{9^{9^{9^{9}}}}", seconds=0.5)
    assert time.perf_counter() - started < 20
    assert right("18", r"\boxed{18}")


# Catches: a signal that only the main thread may set, answers that are given to another's question.
def test_answers_are_judged_from_any_thread():
    assert right("1", "1")
    found = {}
    asking = [threading.Thread(target=lambda n=n: found.update({n: right("3", rf"\boxed{{{n}}}")})) for n in range(6)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert found == {n: n == 3 for n in range(6)}


# Catches: an answer that was interrupted and is then taken for the answer to the next question.
def test_an_interrupted_question_leaves_nothing_behind(monkeypatch):
    assert right("1", "1")

    def interrupted(text):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(math_answers.json, "loads", interrupted)
        with pytest.raises(KeyboardInterrupt):
            right("1", "1")
    assert not right("1", "2")


# Catches: a traceback, or a run that ends when its first completion is judged.
def test_missing_math_verify_is_one_sentence_before_anything_runs(tmp_path, monkeypatch):
    sample = read(tmp_path / "a.jsonl")
    math_answers._WORKER.stop()
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(DataError) as caught:
        Gsm8k().samples(str(tmp_path / "a.jsonl"), None)
    assert str(caught.value) == (
        "data.task: answers are read by the package math-verify, which is missing; "
        "try python -m pip install 'specdec-lab[tasks]', or data.scored=false for no score"
    )
    with pytest.raises(DataError, match=r"pip install 'specdec-lab\[tasks\]'$"):
        Gsm8k().score(sample, "18")
    assert Gsm8k(scored=False).samples(str(tmp_path / "a.jsonl"), None) == [sample]
    assert scores_of(Gsm8k(scored=False), "gsm8k", sample, "18") == {}


# Catches: a package that is there and cannot be imported, whose answers would all be wrong.
def test_math_verify_of_a_wrong_version_is_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("from sympy import no_such_name", encoding="utf-8")
    math_answers._WORKER.stop()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DataError, match=r"math-verify, which cannot be used: ImportError: .*; try python -m pip"):
        right("1", "1")
    monkeypatch.undo()
    assert right("1", "1")


# Catches: an extra that leaves the version open in which the answers above were read.
def test_the_extra_names_what_is_installed():
    assert tuple(map(int, version("math-verify").split(".")[:2])) >= (0, 9)


# Catches: reference answers that are not their own answers, a neighbour that is taken for one.
@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.full)])
def test_reference_answers_verify_and_their_neighbours_do_not(folder, every):
    task = Gsm8k()
    for sample in task.samples(str(folder / "gsm8k.jsonl"), None)[::every]:
        gold = sample.fields["answer"]
        other = float(gold.replace(",", "")) + 1
        assert task.score(sample, rf"\boxed{{{gold}}}") == {"strict": 1.0, "lenient": 1.0}, sample.id
        assert task.score(sample, f"12 of 30, so {gold}.") == {"strict": 0.0, "lenient": 1.0}, sample.id
        assert task.score(sample, rf"{gold} or \boxed{{{other:g}}}") == {"strict": 0.0, "lenient": 0.0}, sample.id


# Catches: a scan from every box to the end, which takes minutes for what a looping model writes.
def test_many_boxes_that_are_never_closed_cost_no_time():
    started = time.perf_counter()
    assert math_answers.last_boxed("\\boxed{" * 100_000) is None
    assert math_answers.last_boxed("\\boxed{" * 100_000 + "7}") == "\\boxed{7}"
    assert time.perf_counter() - started < 5
