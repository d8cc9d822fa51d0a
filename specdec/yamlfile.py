"""Recipe files: found by path or by shipped name, read as YAML with its pitfalls removed, changed by dotted keys."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import yaml

from specdec.errors import RecipeError
from specdec.registry import suggestion

_SHIPPED = "specdec_plugins.recipes"


def dump(data: Mapping[str, Any]) -> str:
    """Plain data as YAML."""
    return str(yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True))


def shipped() -> list[str]:
    """Names of the recipes that come with the package, those in a folder of it with the folder's name."""
    folder = Path(str(importlib.resources.files(_SHIPPED)))
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def find(source: str) -> Path:
    """The file of a path, or of the name of a shipped recipe; a path wins.

    Raises:
        RecipeError: there is neither.
    """
    path = Path(source)
    if is_file(path):
        return path
    packaged = Path(str(importlib.resources.files(_SHIPPED))) / f"{source}.yaml"
    if source in shipped():
        return packaged
    if is_folder(path):
        config = path / "config.yaml"  # what a run leaves
        hint = f"try {config}" if is_file(config) else "try a file that is in it"
        raise RecipeError(f"recipe {source!r}: is a folder, wanted a YAML file; {hint}")
    raise RecipeError(
        f"recipe {source!r}: no such file{suggestion(source, shipped())}; shipped: {', '.join(shipped())}"
    )


def is_file(path: Path) -> bool:
    """Whether it is one; a name that no file can have (too long, a NUL in it) is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """The same for a folder."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice or is no scalar, reads 1e-3 as a number, and says where a value is bad."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep=True)  # a list that holds itself is then refused, too
            if isinstance(value, int | str):
                str(value).encode()  # what can neither be shown nor written: 5000 hexadecimal digits, half a character
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # PyYAML lets through what int() and date() raise, its own KeyError and IndexError
            raise _wrong(f"cannot read a value: {type(error).__name__}: {error}", node) from error
        return value


def _wrong(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _unique(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _wrong(f"got a {key.id} as a key, wanted text", key)
        if key.tag == "tag:yaml.org,2002:merge":
            continue  # construct_mapping sees to it; a key of the mapping's own wins and is not given twice
        if (name := loader.construct_object(key)) in seen:
            raise _wrong(f"{name!r} is given twice", key)
        seen.add(name)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read(path: Path) -> Any:
    """A YAML file as plain data.

    Raises:
        RecipeError: it cannot be read, or as `parse` does.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}; wanted a YAML file in UTF-8") from error
    return parse(text, str(path))


def parse(text: str, where: str) -> Any:
    """YAML as plain data.

    Raises:
        RecipeError: it is not YAML, or gives a key twice; `where` and the line are in the message.
    """
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise RecipeError(f"{where}{line}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{where}: not YAML: {error}") from error
    except RecursionError as error:
        raise RecipeError(f"{where}: nested too deeply; wanted a recipe of a few levels") from error


def override(content: dict[str, Any], change: str) -> None:
    """Apply `drafters.0.num_speculative_tokens=7`; sections on the way are made, what is in them is judged later.

    Raises:
        RecipeError: it is no KEY=VALUE, or the key leads nowhere.
    """
    dotted, equals, text = change.partition("=")
    if not equals or not dotted:
        raise RecipeError(f"--set {change}: wanted KEY=VALUE, such as drafters.0.num_speculative_tokens=7")
    value = parse(text, f"--set {dotted}")
    keys = re.sub(r"\[(\d+)\]", r".\1", dotted).split(".")
    if not all(keys):
        raise RecipeError(f"--set {dotted}: got an empty name in the key, wanted one such as drafters.0.model")
    place: Any = content
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        where = ".".join(keys[:depth]) or "the recipe"
        if isinstance(place, list):
            if key not in map(str, range(len(place))):
                raise RecipeError(f"--set {dotted}: {where} has entries 0 to {len(place) - 1}, got {key!r}")
            index: Any = int(key)
        elif isinstance(place, dict):
            index = key
        else:
            raise RecipeError(f"--set {dotted}: {where} is {place!r} and has no {key!r}")
        if last:
            place[index] = value
        else:
            if isinstance(place, dict) and place.get(index) is None:
                place[index] = {}
            place[index] = copy(place[index])  # an alias elsewhere in the file is not changed with it
            place = place[index]
