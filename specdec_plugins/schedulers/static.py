"""Fill the cache, run until the last row ends, fill again."""

from __future__ import annotations

from typing import final

from attrs import define

from specdec.scheduler import Scheduler


@final
@define(kw_only=True, eq=False)
class Static(Scheduler):
    """Admits new rows only when none runs, as most research code does. Rows that ended leave their place empty."""

    def admit(self, waiting: int, running: int, slots: int) -> int:
        return 0 if running else min(waiting, slots)
