"""MT-bench: questions of eight kinds, as one asks them in a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from attrs import frozen

from specdec.benchmark import Benchmark, Row, Source
from specdec.errors import DataError
from specdec.task import Sample


@final
@frozen(kw_only=True)
class MtBench(Benchmark):
    """MT-bench, 80 open questions of eight kinds (arXiv:2306.05685), the first turn of each. There is no score.

    The second turn answers a completion and is left out, as DeepSpec does; a judge model would be needed for a score.
    A report also tells the kinds apart. Data: fields question_id, turns and category (on the hub prompt_id and prompt
    instead of the first two); mt_bench.jsonl in SPECDEC_DATA, HuggingFaceH4/mt_bench_prompts on the hub, where one word
    of one question is another.
    """

    @property
    def source(self) -> Source:
        return Source("mt_bench.jsonl", "HuggingFaceH4/mt_bench_prompts", split="train")

    def missing(self) -> str | None:
        return None

    def sample(self, row: Row) -> Sample:
        if not (turns := row.texts("turns", "prompt")):
            raise DataError(f"{row.where}: there is no turn; try this task's own data")
        kind = row.fields.get("category")
        group = kind if isinstance(kind, str) else None
        return Sample(id=row.identity("question_id", "prompt_id"), text=turns[0], group=group)

    def score(self, sample: Sample, completion: str) -> Mapping[str, float]:
        return {}
