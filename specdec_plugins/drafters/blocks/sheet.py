"""Keys of a config while they are read: what is wrong with each, and which nobody asked for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, final

from attrs import define, field


@final
@define
class Sheet:
    """A mapping of a config, and what was found wrong with it.

    Attributes:
        config: the mapping.
        where: what stands before its keys in a problem.
        problems: all so far, shared with inner mappings.
        seen: keys that were asked for.
    """

    config: Mapping[str, Any]
    where: str = ""
    problems: list[str] = field(factory=list)
    seen: set[str] = field(factory=set)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which is then known; null is as good as none."""
        self.seen.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def whole(self, key: str, *, least: int = 1, needed: bool = True) -> int | None:
        """A whole number, None where it is missing or wrong."""
        value = self.take(key)
        if value is None and not needed:
            return None
        if type(value) is not int or value < least:
            got = "is missing" if value is None else f"is {value!r}"
            self.problems.append(f"{self.where}{key} {got}, wanted a whole number from {least}")
            return None
        return value

    def number(self, key: str) -> float:
        """A finite number above 0."""
        value = self.take(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            self.problems.append(f"{self.where}{key} is {value!r}, wanted a finite number above 0")
            return 1.0
        return float(value)

    def only(self, key: str, *wanted: Any) -> None:
        """The key is absent, null, or one of these."""
        if (value := self.take(key)) is not None and value not in wanted:
            self.problems.append(f"{self.where}{key} is {value!r}, and only {' or '.join(map(repr, wanted))} is known")

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            self.problems.append(f"{self.where}{key} is {value!r}, wanted true or false")
            return default
        return value

    def ids(self, key: str, less: int = 0) -> tuple[int, ...]:
        """Numbers of layers, of each of which `less` is taken."""
        value = self.take(key)
        if not isinstance(value, list) or not value or not all(type(one) is int for one in value):
            self.problems.append(f"{self.where}{key} is {value!r}, wanted numbers of the target's layers")
            return ()
        if wrong := [one for one in value if one < less]:
            self.problems.append(f"{self.where}{key} holds {wrong[0]}: embeddings are no layer that can be tapped")
        return tuple(one - less for one in value)

    def inner(self, key: str) -> Sheet:
        """The mapping under a key, empty where there is none."""
        value = self.take(key, {})
        if not isinstance(value, Mapping):
            self.problems.append(f"{self.where}{key} is {value!r}, wanted a mapping")
            value = {}
        return Sheet(value, f"{self.where}{key}.", self.problems)

    def close(self, ignored: frozenset[str]) -> None:
        """Refuse what nobody took."""
        if unknown := sorted(self.config.keys() - self.seen - ignored):
            self.problems.append(
                f"{', '.join(self.where + key for key in unknown)}: unknown, and may change the network"
            )
