"""GSM8K: grade school mathematics with a number as the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from attrs import frozen

from specdec import math_answers
from specdec.benchmark import Benchmark, Row, Source
from specdec.errors import DataError
from specdec.task import Sample

_PROMPT = "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


@final
@frozen(kw_only=True)
class Gsm8k(Benchmark):
    r"""GSM8K, 1319 word problems of grade school mathematics (arXiv:2110.14168), judged by math-verify.

    Asks to reason step by step and to put the final answer within \boxed{}, in DeepSpec's words. Scores: `strict` reads
    the last \boxed{} alone; `lenient` also takes what math-verify reads in the whole text, such as its last number.
    Data: fields question and answer; gsm8k.jsonl in SPECDEC_DATA, openai/gsm8k on the hub.

    Attributes:
        scored: false judges nothing and does without math-verify.
    """

    scored: bool = True

    @property
    def source(self) -> Source:
        return Source("gsm8k.jsonl", "openai/gsm8k", "main")

    def missing(self) -> str | None:
        if not self.scored or (why := math_answers.problem()) is None:
            return None
        return f"data.task: {why}, or data.scored=false for no score"

    def sample(self, row: Row) -> Sample:
        text = _PROMPT.format(question=row.text("question"))
        _, mark, answer = row.text("answer").rpartition("####")
        if not mark or not answer.strip():
            raise DataError(f"{row.where}: field 'answer' does not end in #### and a number; try this task's own data")
        return Sample(id=row.identity("id"), text=text, fields={"answer": answer.strip()})

    def score(self, sample: Sample, completion: str) -> Mapping[str, float]:
        if not self.scored:
            return {}
        gold, boxed = sample.fields["answer"], math_answers.last_boxed(completion)
        strict = boxed is not None and math_answers.right(gold, boxed)
        return {"strict": float(strict), "lenient": float(strict or math_answers.right(gold, completion))}
