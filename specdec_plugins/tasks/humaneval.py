"""HumanEval: functions from their docstrings."""

from __future__ import annotations

from typing import final

from attrs import frozen

from specdec.benchmark import Row, Source
from specdec.code_benchmark import CodeBenchmark
from specdec.code_blocks import code_of, defines
from specdec.task import Sample

_PROMPT = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"


@final
@frozen(kw_only=True)
class HumanEval(CodeBenchmark):
    """HumanEval, 164 Python functions to be written from signature and docstring (arXiv:2107.03374), judged by tests.

    Asks for a solution that passes the tests, in DeepSpec's words. The program is the last block of code that defines
    the function; what stands above it in the prompt (imports, helpers) is run first. Where no block defines it, the
    whole prompt is put in front. Score: `pass@1`, of one completion a sample. Data: fields task_id, prompt, entry_point
    and test; humaneval.jsonl in SPECDEC_DATA, openai/openai_humaneval on the hub.
    """

    @property
    def source(self) -> Source:
        return Source("humaneval.jsonl", "openai/openai_humaneval")

    def sample(self, row: Row) -> Sample:
        fields = {name: row.text(name) for name in ("prompt", "entry_point", "test")}
        return Sample(id=row.identity("task_id"), text=_PROMPT.format(prompt=fields["prompt"]), fields=fields)

    def program(self, sample: Sample, completion: str) -> tuple[str, ...]:
        prompt, name = sample.fields["prompt"], sample.fields["entry_point"]
        code = code_of(completion, name)
        above = prompt[: max(prompt.rfind(f"def {name}("), 0)]
        written = (above, code) if defines(code, name) else (prompt + code,)
        return (*written, f"{sample.fields['test']}\ncheck({name})\n")
