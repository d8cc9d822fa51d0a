"""Where prompts come from and how completions are judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, final

from attrs import field, frozen

from specdec.errors import DataError


@final
@frozen(kw_only=True)
class Sample:
    """One row of a task. Either `text` or `messages` is set.

    Attributes:
        id: unique among the samples.
        text: the prompt.
        messages: chat turns, as transformers' templates take them.
        group: what kind of prompt it is; reports also tell acceptance and deviation of each group.
        fields: what the task's score needs.
    """

    id: str
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    group: str | None = None
    fields: Mapping[str, Any] = field(factory=dict)


class Task(ABC):
    """A source of prompts."""

    @abstractmethod
    def samples(self, file: str | None, limit: int | None) -> list[Sample]:
        """Read at most `limit` samples.

        Raises:
            DataError: the file is missing or a row is malformed; the message names the line.
        """

    @abstractmethod
    def score(self, sample: Sample, completion: str) -> Mapping[str, float]:
        """Judge one completion: metric -> value in [0, 1], none without a measure. A mean is over those that have it.

        Raises:
            DataError: what it needs to judge is missing.
        """


def samples_of(task: Task, name: str, file: str | None, limit: int | None) -> tuple[Sample, ...]:
    """What a task gives, checked, since results are kept by sample id.

    Raises:
        DataError: the task says so, fails, or gives something else than samples with ids of their own.
    """
    try:
        samples = tuple(task.samples(file, limit))
    except DataError:
        raise
    except Exception as error:  # a task is a stranger's code
        raise DataError(
            f"task {name}: samples() failed: {type(error).__name__}: {error}; wanted a DataError"
        ) from error
    if not samples:
        raise DataError(f"task {name}: samples() gave none, wanted at least one; try other data")
    ids: set[str] = set()
    for sample in samples:
        if not isinstance(sample, Sample) or not isinstance(sample.id, str):
            raise DataError(f"task {name}: samples() gave {sample!r}, wanted a Sample with a text as its id")
        if sample.group is not None and not (
            isinstance(sample.group, str) and sample.group.isprintable() and sample.group
        ):
            raise DataError(
                f"task {name}: sample {sample.id!r} has the group {sample.group!r}, wanted a printable text or None"
            )
        if sample.id in ids:
            raise DataError(f"task {name}: two samples have the id {sample.id!r}, wanted one of its own for each")
        ids.add(sample.id)
    return samples


def scores_of(task: Task, name: str, sample: Sample, completion: str) -> dict[str, float]:
    """What a task says of one completion, checked, since results are made of it; empty where it has no measure.

    Raises:
        DataError: the task says so, fails, or gives something else than numbers from 0 to 1.
    """
    where = f"task {name}: score() of sample {sample.id!r}"
    try:
        given = task.score(sample, completion)
        scores = {str(metric): float(value) for metric, value in given.items()}
    except DataError:
        raise
    except Exception as error:  # a task is a stranger's code
        raise DataError(f"{where} failed: {type(error).__name__}: {error}; wanted numbers by name") from error
    if wrong := {metric: value for metric, value in scores.items() if not 0.0 <= value <= 1.0}:
        raise DataError(f"{where} gave {wrong}, wanted numbers from 0 to 1")
    return scores
