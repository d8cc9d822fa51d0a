"""A plugin's attrs class is the schema of its options: types, defaults and validators, checked all at once."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, final, get_args, get_origin

import attrs
import cattrs
from attrs import frozen
from cattrs.errors import StructureHandlerNotFoundError

from specdec.errors import PluginError
from specdec.registry import kind_of, load, name_of, suggestion

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


@final
@frozen
class Option:
    """One option of a class, for people.

    Attributes:
        name: the attrs field.
        type: its annotation, as text.
        default: as text; None when it is required.
        text: from the class docstring's section "Attributes".
    """

    name: str
    type: str
    default: str | None
    text: str


def build(cls: type, given: Mapping[str, Any], path: str, owner: str) -> tuple[Any, list[str]]:
    """Make an object from options.

    Args:
        cls: an attrs class, or a class without options.
        given: option -> value, as read from a file.
        path: where in the recipe, such as `verifiers[2]`.
        owner: what to call the class, such as `nucleus`.

    Returns:
        The object and no problem, or None and every problem found.
    """
    known = {field.name: field for field in _fields(cls)}
    problems = [
        f"{path}.{key}: unknown option of {owner}{suggestion(str(key), known) or _known(known)}"
        for key in given
        if key not in known
    ]
    types_of = _types(cls)
    values: dict[str, Any] = {}
    for name, field in known.items():
        if given.get(name) is None and field.default is attrs.NOTHING:
            dotted = path.replace("[", ".").replace("]", "")
            problems.append(f"{path}.{name}: missing; give it in the recipe or with --set {dotted}.{name}=VALUE")
        elif not _finite(given.get(name)):
            problems.append(f"{path}.{name}: got {given[name]!r}, wanted finite numbers only")
        elif name in given:
            try:
                values[name] = _CONVERTER.structure(given[name], types_of.get(name, Any))
            except StructureHandlerNotFoundError:
                values[name] = given[name]
            except Exception as error:  # hooks and classes raise what they like; all of it is the recipe's fault
                problems.append(f"{path}.{name}: {_message(error, name)}")
    if problems:
        return None, problems + _invalid(cls, known, values, path)
    try:
        return cls(**{known[name].alias or name: value for name, value in values.items()}), []
    except Exception as error:  # validators raise what they like
        return None, _invalid(cls, known, values, path) or [f"{path}: {_message(error, '')}"]


def describe(cls: type) -> list[Option]:
    """The options of a class, in order."""
    docs = _attribute_docs(cls)
    types_of = _types(cls)
    return [
        Option(field.name, _type_name(types_of.get(field.name, field.type)), _default(field), docs.get(field.name, ""))
        for field in _fields(cls)
    ]


def values(made: Any) -> dict[str, Any]:
    """The options an object was made with, defaults included, as plain data."""
    return {field.name: _plain(getattr(made, field.name)) for field in _fields(type(made))}


def label_of(use: str, options: Mapping[str, Any]) -> str:
    """`nucleus(theta=0.9)`: the name and what was given; of a path or hub id the last part."""
    told = [
        f"{name}={value.rpartition('/')[2] if isinstance(value, str) else value}"
        for name, value in options.items()
        if isinstance(value, bool | int | float | str)
    ]
    return f"{use}({', '.join(told)})" if told else use


def _fields(cls: type) -> list[attrs.Attribute[Any]]:
    if not attrs.has(cls):
        return []
    return [field for field in attrs.fields(cls) if field.init and not field.name.startswith("_")]


def _types(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except Exception:  # annotations that exist for type checkers only: validators judge alone
        return {}


def _invalid(cls: type, known: Mapping[str, attrs.Attribute[Any]], values: Mapping[str, Any], path: str) -> list[str]:
    """What every validator says, not only the first."""
    placeholders = {
        field.alias or name: None
        for name, field in known.items()
        if field.default is attrs.NOTHING and name not in values
    }
    arguments = {known[name].alias or name: value for name, value in values.items()}
    try:
        with attrs.validators.disabled():
            made = cls(**placeholders, **arguments)
    except Exception:  # not makeable with these values; the caller has the message of the plain attempt
        return []
    problems = []
    for name in values:
        if (validator := known[name].validator) is not None:
            try:
                validator(made, known[name], getattr(made, name))
            except Exception as error:  # validators raise what they like
                problems.append(f"{path}.{name}: {_message(error, name)}")
    return problems


def _finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _message(error: Exception, name: str) -> str:
    if isinstance(error, MemoryError | OverflowError):
        return f"a number is too large ({str(error) or 'out of memory'}); try a smaller one"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = (str(error.args[0]) if error.args else type(error).__name__).removeprefix(f"'{name}' ")
    said = re.fullmatch(r"must be (.+): (\S+)", text)  # attrs' own comparisons
    return text if said is None else f"got {said[2]}, wanted {said[1]}"


def _known(known: Mapping[str, Any]) -> str:
    return f"; there are {', '.join(known)}" if known else "; it has none"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(_plain(entry) for entry in value)
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if (kind := kind_of(type(value))) is not None:
        return {"use": name_of(kind, type(value)), **values(value)}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _default(field: attrs.Attribute[Any]) -> str | None:
    if field.default is attrs.NOTHING:
        return None
    value = field.default
    if isinstance(value, attrs.Factory):  # type: ignore[arg-type]  # Factory is a class behind a typed function
        value = value.factory() if not value.takes_self else "(computed)"  # type: ignore[union-attr]
    return str(_plain(value))


def _type_name(kind: Any) -> str:
    if isinstance(kind, str):
        return kind
    if get_origin(kind) is Literal:
        return " | ".join(repr(choice) for choice in get_args(kind))
    if get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join(_type_name(part) for part in get_args(kind))
    if kind is type(None):
        return "None"
    return str(kind) if get_origin(kind) else getattr(kind, "__name__", str(kind))


def _attribute_docs(cls: type) -> dict[str, str]:
    """Name -> text of the "Attributes:" sections of a class and of what it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        lines = (base.__doc__ or "").expandtabs().splitlines()
        inside, name = False, ""
        for line in lines:
            indent = len(line) - len(line.lstrip())
            if line.strip() == "Attributes:":
                inside, level, name = True, indent, ""
            elif inside and line.strip() and indent <= level:
                inside = False
            elif inside and line.strip():
                head, colon, text = line.strip().partition(": ")
                if colon and head.isidentifier() and indent == level + 4:
                    name, found[head] = head, text
                elif name:
                    found[name] += f" {line.strip()}"
    return found


def _scalar(value: Any, kind: Any) -> Any:
    """Exactly the type that is asked for: `5` is no text, `"5"` and `true` are no numbers."""
    right = isinstance(value, (int, float) if kind is float else kind)
    if not right or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"got {value!r}, wanted {_WORDS[kind]}")
    return float(value) if kind is float else value


def _choice(value: Any, kind: Any) -> Any:
    choices = get_args(kind)
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        near = suggestion(value, [str(choice) for choice in choices]) if isinstance(value, str) else ""
        raise ValueError(f"got {value!r}, wanted one of {', '.join(map(str, choices))}{near}")
    return value


def _sequence(value: Any, kind: Any) -> Any:
    if not isinstance(value, list | tuple | set | frozenset):
        raise ValueError(f"got {value!r}, wanted a list")
    made = get_origin(kind) or kind
    inner = [part for part in get_args(kind) if part is not ...]
    return made(_CONVERTER.structure(entry, inner[0] if inner else Any) for entry in value)


def _optional(value: Any, kind: Any) -> Any:
    parts = [part for part in get_args(kind) if part is not type(None)]
    if value is None and len(parts) < len(get_args(kind)):
        return None
    reasons = []
    for part in parts:
        try:
            return _CONVERTER.structure(value, part)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(" or ".join(dict.fromkeys(reasons)))


def _mapping(value: Any, kind: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"got {value!r}, wanted a mapping")
    return dict(value)


def _strategy(value: Any, kind: type) -> Any:
    """A strategy inside another one: an object, a name, or a mapping with `use`."""
    if isinstance(value, kind):
        return value
    given = {"use": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else {}
    if not isinstance(use := given.pop("use", None), str):
        raise ValueError(f"got {value!r}, wanted a name, or a mapping with `use`")
    name = kind_of(kind)
    assert name is not None  # that is how this hook was chosen
    try:
        made, problems = build(load(name, use), given, use, use)
    except PluginError as error:
        raise ValueError(str(error)) from error
    if problems:
        raise ValueError("; ".join(problems))
    return made


def _converter() -> cattrs.Converter:
    def origin_in(*origins: Any) -> Callable[[Any], bool]:
        return lambda kind: (get_origin(kind) or kind) in origins

    converter = cattrs.Converter(detailed_validation=False)
    for scalar in _WORDS:
        converter.register_structure_hook(scalar, _scalar)
    converter.register_structure_hook_func(origin_in(Literal), _choice)
    converter.register_structure_hook_func(origin_in(typing.Union, types.UnionType), _optional)
    converter.register_structure_hook_func(origin_in(tuple, list, set, frozenset), _sequence)
    converter.register_structure_hook_func(origin_in(dict, Mapping), _mapping)
    converter.register_structure_hook_func(lambda kind: kind_of(kind) is not None, _strategy)
    return converter


_CONVERTER = _converter()
