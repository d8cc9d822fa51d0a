"""A strategy as people give it: a name, a mapping with `use`, or an object; and the words that stand for a drafter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, final

from attrs import define

from specdec.drafter import Drafter
from specdec.errors import PluginError, RecipeError
from specdec.loading import RANDOM
from specdec.options import build, describe, label_of
from specdec.registry import drafter_of, load, names, suggestion
from specdec.verifier import Verifier

_BASES: dict[str, type] = {"drafters": Drafter, "verifiers": Verifier}
_SHOWN = 60


@final
@define
class Given:
    """A strategy that can be made, or why not.

    Attributes:
        use: its name; of an object that of its class.
        options: those given.
        problems: what is wrong with it, one sentence each.
        cls: its class, where there is one.
        made: the object, where one was given.
    """

    use: str
    options: dict[str, Any]
    problems: list[str]
    cls: Any = None
    made: Any = None

    @classmethod
    def of(cls, kind: str, given: Any, extra: Mapping[str, Any]) -> Self:
        """
        Args:
            kind: `drafters` or `verifiers`.
            given: the name, mapping or object.
            extra: options that were given beside it.
        """
        path = kind.removesuffix("s")
        if not isinstance(given, str | Mapping):
            problems = [f"{path}: is an object already and takes no {name}; give it to the object" for name in extra]
            if not isinstance(given, base := _BASES[kind]):
                hint = "; a model is given as draft_model" if hasattr(given, "config") and kind == "drafters" else ""
                wanted = f"a name, a mapping with `use`, or a {base.__name__} object{hint}"
                problems.insert(0, f"{path}: got {short(given)}, wanted {wanted}")
            return cls(type(given).__name__, {}, problems, type(given), given)
        options = {"use": given} if isinstance(given, str) else dict(given)
        use = options.pop("use", None)
        options |= extra
        if not isinstance(use, str):
            wanted = f"the name of one of {kind}; see `specdec ls {kind}`"
            return cls("", {}, [f"{path}.use: got {use!r}, wanted {wanted}"])
        try:
            found = load(kind, use)
        except PluginError as error:
            return cls(use, {}, [f"{path}: {error}"])
        return cls(use, options, build(found, options, path, use)[1], found)

    @property
    def label(self) -> str:
        """What it is called, with the options given."""
        return label_of(self.use, self.options)

    def takes(self, *options: str) -> bool:
        """Whether it has all of these options."""
        return self.made is None and self.cls is not None and {*options} <= {one.name for one in describe(self.cls)}

    def make(self, **changed: Any) -> Any:
        """The strategy, with some options changed where it is not an object already.

        Raises:
            RecipeError: the options are wrong.
        """
        if self.made is not None:
            return self.made
        made, problems = build(self.cls, {**self.options, **changed}, self.use, self.use)
        if problems:
            raise RecipeError(problems)
        return made


def section_of(drafter: str | None) -> dict[str, Any]:
    """The section `drafter` that a word stands for: a registered drafter, `my_module:MyDrafter`, or a model.

    Raises:
        PluginError: it is neither, by all that can be told without loading it.
    """
    if drafter is None:
        return {}
    own_class = re.fullmatch(r"[\w.]+:\w+", drafter) and not drafter.startswith(RANDOM)
    if drafter in (known := names("drafters")) or own_class:
        return {"use": drafter}
    near = suggestion(drafter, known)
    if near and not Path(drafter).exists() and "/" not in drafter:
        raise PluginError(f"drafter {drafter!r}: neither a drafter nor a folder{near}; there are {', '.join(known)}")
    return {"use": drafter_of(drafter) or "model", "model": drafter}


def short(value: Any) -> str:
    """A value in a message."""
    text = repr(value) if isinstance(value, str | int | float | list | tuple | dict | None) else type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
