"""Tasks with a data set of their own: from a file, a folder of such files, or the hub."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, final

from attrs import field, frozen
from attrs.validators import ge, optional

from specdec import hub
from specdec.errors import DataError
from specdec.jsonlines import refuse_half_characters, rows, short
from specdec.task import Sample, Task

FOLDER = "SPECDEC_DATA"


@final
@frozen
class Source:
    """Where the rows of a benchmark are.

    Attributes:
        file: its name in the folder of the environment variable SPECDEC_DATA.
        repository: of data sets on the hub.
        config: of that data set.
        split: the same.
    """

    file: str
    repository: str
    config: str | None = None
    split: str = "test"


@final
@frozen
class Row:
    """One row.

    Attributes:
        fields: as they stand in the data.
        where: file and line.
        number: from 1.
    """

    fields: Mapping[str, Any]
    where: str
    number: int

    def text(self, *names: str) -> str:
        """The first field of these names that is there, a text.

        Raises:
            DataError: there is none, or it is something else.
        """
        return str(self._field(names, "a text", lambda value: isinstance(value, str)))

    def texts(self, *names: str) -> tuple[str, ...]:
        """The same, a list of texts."""
        found = self._field(
            names, "a list of texts", lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value)
        )
        return tuple(found)

    def identity(self, *names: str) -> str:
        """The first of these fields, of whatever type, or the row's number."""
        return next((str(self.fields[name]) for name in names if name in self.fields), str(self.number))

    def _field(self, names: tuple[str, ...], wanted: str, fits: Any) -> Any:
        name = next((name for name in names if name in self.fields), None)
        if name is None:
            has = ", ".join(map(repr, self.fields)) or "none"
            raise DataError(f"{self.where}: no field {' or '.join(names)}; it has {has}; try this task's own data")
        if not fits(value := self.fields[name]):
            raise DataError(f"{self.where}: field {name!r} is {short(value)}, wanted {wanted}")
        return value


@frozen(kw_only=True)
class Benchmark(Task):
    """A task whose data have a name. They come from data.file, else from SPECDEC_DATA, else from the hub.

    Attributes:
        even: take this many rows, spread evenly over all N: the rows floor(i * N / even), counted from 0; of these
            data.limit takes the first.
    """

    even: int | None = field(default=None, validator=optional(ge(1)))

    @property
    @abstractmethod
    def source(self) -> Source:
        """Where the rows are, if no file is given."""

    @abstractmethod
    def sample(self, row: Row) -> Sample:
        """The prompt of a row, and in `fields` what its score needs."""

    @abstractmethod
    def missing(self) -> str | None:
        """Why completions cannot be judged here, in one sentence with what to try, or None."""

    @final
    def samples(self, file: str | None, limit: int | None) -> list[Sample]:
        if (why := self.missing()) is not None:
            raise DataError(why)
        found: Iterable[Row] = _rows(self.source, file)
        if self.even is not None:
            every = list(found)
            if self.even > len(every):
                raise DataError(f"data.even: got {self.even}, wanted at most {len(every)}, as many rows as there are")
            found = [every[index * len(every) // self.even] for index in range(self.even)]
        samples = [self._checked(row) for row in islice(found, limit)]
        if not samples:
            raise DataError(f"{file or self.source.file}: empty; wanted one JSON object a line")
        return samples

    def _checked(self, row: Row) -> Sample:
        sample = self.sample(row)
        if not sample.text:
            raise DataError(f"{row.where}: the prompt is an empty text; try this task's own data")
        refuse_half_characters([sample.id, sample.text], row.where)
        return sample


def _rows(source: Source, file: str | None) -> Iterator[Row]:
    if file is None and (folder := os.environ.get(FOLDER)):
        file = str(Path(folder) / source.file)
        if not Path(file).is_file():
            raise DataError(
                f"data.file: missing, and {FOLDER} is {folder!r}, where no file {source.file} is; "
                f"try another folder, or without {FOLDER} to ask the hub"
            )
    if file is not None:
        return (Row(row, f"{file}:{number}", number) for number, row in rows(file))
    where = f"{source.repository} ({source.split})"
    return (Row(row, f"{where}:{number}", number) for number, row in enumerate(_from_hub(source), 1))


def _from_hub(source: Source) -> Iterable[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"data.file: missing; there are three ways: give a file, set {FOLDER} to a folder that has "
            f"{source.file}, or python -m pip install datasets to get {source.repository} from the hub"
        ) from error
    try:
        with nullcontext() if hub.answers() else hub.left_alone():  # what it has kept is found without the hub
            found = datasets.load_dataset(source.repository, source.config, split=source.split)
            return [dict(row) for row in found]
    except Exception as error:  # it raises what it and its many libraries like
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"data.file: missing, and {source.repository} cannot be had from the hub: {why}; "
            f"try a file, or {FOLDER}, a folder that has {source.file}"
        ) from error
