"""Benchmarks whose completions are programs, judged by running them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import final

from attrs import frozen

from specdec import sandbox
from specdec.benchmark import Benchmark
from specdec.task import Sample


@frozen(kw_only=True)
class CodeBenchmark(Benchmark):
    """A completion is worth 1 if its program passes the tests of its sample, and 0 if not.

    Attributes:
        scored: false runs nothing and gives no score.
        allow_unsafe: where no sandbox can be had, run programs without one; they can then do whatever you can.
    """

    scored: bool = True
    allow_unsafe: bool = False

    @abstractmethod
    def program(self, sample: Sample, completion: str) -> tuple[str, ...]:
        """What is run, part by part, the tests last."""

    @final
    def missing(self) -> str | None:
        if not self.scored or self.allow_unsafe or (why := sandbox.problem()) is None:
            return None
        return (
            f"data.task: no sandbox can be had for the programs that it judges: {why}; wanted Linux 5.12 or later and "
            "the right to unshare; try data.scored=false, or data.allow_unsafe=true where programs may do any harm"
        )

    @final
    def score(self, sample: Sample, completion: str) -> Mapping[str, float]:
        if not self.scored:
            return {}
        confined = not self.allow_unsafe or sandbox.problem() is None
        return {"pass@1": float(sandbox.run_program(*self.program(sample, completion), confined=confined).passed)}
