"""Prompts from a JSON Lines file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from attrs import frozen

from specdec.errors import DataError
from specdec.jsonlines import refuse_half_characters, rows, short
from specdec.task import Sample, Task

_PROMPTS = ("messages", "turns", "prompt", "question", "text")
_IDS = ("id", "task_id", "question_id")


@final
@frozen(kw_only=True)
class Jsonl(Task):
    """One JSON object a line; the prompt is its first field of `messages`, `turns`, `prompt`, `question`, `text`.

    `messages` are chat turns with `role` and `content`. Of `turns`, a list of texts, only the first is used: later ones
    answer a completion. The id is the field `id`, `task_id` or `question_id`, or the line number. A file ending in .gz
    is unpacked. There is no score.

    Attributes:
        prompt_field: take the prompt from this field only.
    """

    prompt_field: str | None = None

    def samples(self, file: str | None, limit: int | None) -> list[Sample]:
        if file is None:
            raise DataError("data.file: missing; task jsonl reads a file, give its path")
        found: dict[str, int] = {}
        samples: list[Sample] = []
        for number, row in rows(file):
            where = f"{file}:{number}"
            try:
                sample = self._sample(row, where, number)
            except RecursionError as error:
                raise DataError(f"{where}: nested too deeply; wanted an object of a few levels") from error
            if sample.id in found:
                raise DataError(f"{where}: id {sample.id!r} is also line {found[sample.id]}'s; wanted one of its own")
            found[sample.id] = number
            samples.append(sample)
            if len(samples) == limit:
                break
        if not samples:
            raise DataError(f"{file}: empty; wanted one JSON object a line")
        return samples

    def score(self, sample: Sample, completion: str) -> Mapping[str, float]:
        return {}

    def _sample(self, row: Mapping[str, Any], where: str, number: int) -> Sample:
        names = _PROMPTS if self.prompt_field is None else (self.prompt_field,)
        name = next((name for name in names if name in row), None)
        if name is None:
            raise DataError(
                f"{where}: no field {' or '.join(names)}; it has {', '.join(map(repr, row)) or 'none'}; "
                "try data.prompt_field"
            )
        identity = next((str(row[key]) for key in _IDS if row.get(key) is not None), str(number))
        fields = {key: value for key, value in row.items() if key != name}
        value = row[name]
        if not identity:
            raise DataError(
                f"{where}: the id is an empty text, wanted one of its own; try without, for the line number"
            )
        refuse_half_characters([identity, value], where)
        if isinstance(value, str) and value:
            return Sample(id=identity, text=value, fields=fields)
        if name == "turns" and isinstance(value, list) and value and isinstance(value[0], str) and value[0]:
            return Sample(id=identity, text=value[0], fields=fields)
        if isinstance(value, list) and value and all(_is_turn(turn) for turn in value):
            return Sample(id=identity, messages=tuple(value), fields=fields)
        raise DataError(f"{where}: field {name!r} is {short(value)}, wanted {_wanted(name)}")


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)


def _wanted(name: str) -> str:
    if name == "messages":
        return "a list of {'role': ..., 'content': ...}"
    return "a list that begins with a text" if name == "turns" else "a text that is not empty"
