"""Where prompts come from and how completions are judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, final

from attrs import field, frozen


@final
@frozen(kw_only=True)
class Sample:
    """One row of a task. Either `text` or `messages` (chat turns as transformers' templates take them) is set."""

    id: str
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    fields: Mapping[str, Any] = field(factory=dict)


@final
@frozen(kw_only=True)
class Score:
    """How good a completion is: `value` in [0, 1] under the metric `name`."""

    name: str
    value: float


class Task(ABC):
    """A source of prompts."""

    @abstractmethod
    def samples(self, file: str | None, limit: int | None) -> list[Sample]:
        """Read at most `limit` samples.

        Raises:
            DataError: the file is missing or a row is malformed; the message names the line.
        """

    @abstractmethod
    def score(self, sample: Sample, completion: str) -> Score | None:
        """Judge one completion; None where the task has no measure."""
