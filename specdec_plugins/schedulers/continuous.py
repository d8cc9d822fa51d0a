"""A row that ends makes room at once."""

from __future__ import annotations

from typing import final

from attrs import define

from specdec.scheduler import Scheduler


@final
@define(kw_only=True, eq=False)
class Continuous(Scheduler):
    """Admits a waiting request as soon as a cache row is free; its prompt is cached in chunks beside decoding rows."""

    def admit(self, waiting: int, running: int, slots: int) -> int:
        return min(waiting, slots)
