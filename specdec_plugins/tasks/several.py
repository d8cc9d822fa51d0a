"""Prompts of several tasks in one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from attrs import evolve, field, frozen
from attrs.validators import ge, min_len, optional

from specdec.errors import DataError
from specdec.registry import name_of
from specdec.task import Sample, Task, samples_of, scores_of


def _name(task: Task) -> str:
    return name_of("tasks", type(task))


def _once(_: object, attribute: object, value: tuple[Task, ...]) -> None:
    names = [_name(task) for task in value]
    if twice := [name for index, name in enumerate(names) if name in names[:index]]:
        raise ValueError(f"has {twice[0]} twice, wanted each task once")


@final
@frozen(kw_only=True)
class Several(Task):
    """The prompts of several tasks, one task after the other, each judged by its own.

    Sample ids and scores begin with the task's name: `humaneval/HumanEval/3`, `gsm8k strict`. A report is over all
    prompts, its scores over those of their task, and it tells the tasks apart in a table of their own. Each task finds
    its own data; there is no `data.file`.

    Attributes:
        tasks: each `{use: NAME, ...}`, or a name.
        each: take at most this many rows of each task; data.limit then takes the first of all.
    """

    tasks: tuple[Task, ...] = field(validator=[min_len(1), _once])
    each: int | None = field(default=None, validator=optional(ge(1)))

    def samples(self, file: str | None, limit: int | None) -> list[Sample]:
        if file is not None:
            raise DataError(f"data.file: got {file!r}, wanted none: each task of `several` finds its own data")
        found = []
        for index, task in enumerate(self.tasks):
            name = _name(task)
            try:
                samples = samples_of(task, name, None, self.each)
            except DataError as error:
                raise DataError(f"data.tasks[{index}], {name}: {error}") from error
            for sample in samples:
                fields = {"task": index, "name": name, "sample": sample}
                found.append(evolve(sample, id=f"{name}/{sample.id}", group=name, fields=fields))
        return found[:limit]

    def score(self, sample: Sample, completion: str) -> Mapping[str, float]:
        name = sample.fields["name"]
        scores = scores_of(self.tasks[sample.fields["task"]], name, sample.fields["sample"], completion)
        return {f"{name} {metric}": value for metric, value in scores.items()}
