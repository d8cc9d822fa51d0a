"""MBPP: short Python functions from one sentence."""

from __future__ import annotations

import re
from typing import Literal, final

from attrs import frozen

from specdec.benchmark import Row, Source
from specdec.code_benchmark import CodeBenchmark
from specdec.code_blocks import code_of
from specdec.task import Sample

_PAPER = (
    "You are an expert Python programmer, and here is your task: {task} Your code should pass these tests:\n\n{tests}"
)


@final
@frozen(kw_only=True)
class Mbpp(CodeBenchmark):
    """MBPP, short Python functions to be written from one sentence (arXiv:2108.07732), judged by three tests each.

    The program is the last block of code that defines the function. It is run, then the set-up of the tests, then the
    tests. Score: `pass@1`, of one completion a sample. Data: fields task_id, prompt or text, code, test_list, and
    test_imports or test_setup_code; mbpp_sanitized_test.jsonl or mbpp_test.jsonl in SPECDEC_DATA (tasks 11 to 510),
    google-research-datasets/mbpp on the hub.

    Attributes:
        prompt: `paper` shows the sentence and the tests, as the paper does. `deepspec` shows the sentence alone, as
            DeepSpec and DFlash do: a model cannot know then what to call the function, so pass@1 means nothing; use it
            to compare acceptance and speed with theirs.
        edition: `sanitized` is the 257 test tasks that were checked by hand, `full` all 500.
    """

    prompt: Literal["paper", "deepspec"] = "paper"
    edition: Literal["sanitized", "full"] = "sanitized"

    @property
    def source(self) -> Source:
        file = "mbpp_test.jsonl" if self.edition == "full" else "mbpp_sanitized_test.jsonl"
        return Source(file, "google-research-datasets/mbpp", self.edition)

    def sample(self, row: Row) -> Sample:
        task, tests = row.text("text", "prompt"), "\n".join(row.texts("test_list"))
        setup = row.text("test_setup_code") if "test_setup_code" in row.fields else "\n".join(row.texts("test_imports"))
        fields = {"name": _name(row.text("code"), tests), "setup": setup, "tests": tests}
        text = _PAPER.format(task=task, tests=tests) if self.prompt == "paper" else task
        return Sample(id=row.identity("task_id"), text=text, fields=fields)

    def program(self, sample: Sample, completion: str) -> tuple[str, ...]:
        return code_of(completion, sample.fields["name"]), sample.fields["setup"], sample.fields["tests"]


def _name(code: str, tests: str) -> str:
    """What the tests call the function: the last name that the reference defines and they use."""
    names = re.findall(r"^def\s+(\w+)", code, re.MULTILINE)
    return next((name for name in reversed(names) if re.search(rf"\b{name}\b", tests)), "")
