"""Names to classes, by entry points alone: built-in strategies and anybody's enter by the same groups.

Reading names reads metadata only; nothing is imported before it is asked for.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any, final

from attrs import frozen

from specdec.errors import PluginError

# What a plugin of each kind must be; None where any object will do.
_BASES: dict[str, str | None] = {
    "drafters": "specdec.drafter:Drafter",
    "verifiers": "specdec.verifier:Verifier",
    "kv": "specdec.kv:KVCacheManager",
    "schedulers": "specdec.scheduler:Scheduler",
    "tasks": "specdec.task:Task",
    "commands": None,
}
KINDS = tuple(_BASES)
_OWN = "specdec-lab"


@final
@frozen
class Plugin:
    """One entry point.

    Attributes:
        kind: its group without the prefix `specdec.`.
        name: what `use:` calls it.
        value: `module:Class`.
        distribution: who brings it, with the version.
        bundled: it is of specdec's own distribution.
    """

    kind: str
    name: str
    value: str
    distribution: str
    bundled: bool


def plugins(kind: str) -> list[Plugin]:
    """Every entry point of a kind, sorted by name; the same name twice when two distributions claim it.

    Raises:
        PluginError: there is no such kind.
    """
    return _plugins(kind, _entries(kind))


def names(kind: str) -> list[str]:
    """The names of a kind, from metadata only."""
    return sorted({entry.name for entry in _entries(kind)})


def load(kind: str, name: str, *folders: Path) -> Any:
    """Import one plugin.

    Args:
        kind: such as "verifiers".
        name: an entry point's, or `module:Class` for a class of no package.
        folders: where a module of no package may lie, beside the import path and the current folder.

    Raises:
        PluginError: unknown (says what there is, and which plugins cannot be imported), claimed twice, cannot be
            imported, or not of the kind.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        near = module.removesuffix(".py").replace("/", ".")
        hint = f"; did you mean '{near}:{attribute}'?" if near != module else ""
        if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            raise PluginError(f"{kind}/{name}: wanted a module and a class in it, as `my_module:MyClass`{hint}")
        with _importable(*folders, Path.cwd()):
            try:
                return _import(kind, name, name)
            except PluginError as error:
                raise PluginError(f"{error}{hint}") from error
    found = _plugins(kind, [entry for entry in _entries(kind) if entry.name == name])
    if len(found) > 1:
        claims = " and ".join(f"{plugin.distribution} ({plugin.value})" for plugin in found)
        raise PluginError(
            f"{kind}/{name}: claimed by {claims}; remove one of them, or say which with `use: {found[0].value}`"
        )
    if not found:
        raise PluginError(_unknown(kind, name))
    return _import(kind, name, found[0].value)


def kind_of(cls: Any) -> str | None:
    """Which kind of strategy a class is, an interface included; None for any other class. Imports nothing."""
    if not isinstance(cls, type):
        return None
    bases = {f"{base.__module__}:{base.__qualname__}" for base in cls.__mro__}
    return next((kind for kind, base in _BASES.items() if base in bases), None)


def name_of(kind: str, cls: type) -> str:
    """What `use:` calls a class: its entry point's name, or `module:Class`."""
    value = f"{cls.__module__}:{cls.__qualname__}"
    return min((entry.name for entry in _entries(kind) if entry.value == value), default=value)


def drafter_of(folder: str) -> str | None:
    """The drafter that says the checkpoint in a folder is for it; None for a model that decodes by itself, a folder
    without config.json, or no folder. Imports drafters only where there is a config."""
    try:
        config = json.loads((Path(folder).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    for plugin in plugins("drafters") if isinstance(config, dict) else ():
        with suppress(PluginError):
            if _import(plugin.kind, plugin.name, plugin.value).reads(config):
                return plugin.name
    return None


def problem(plugin: Plugin) -> str | None:
    """Why a plugin cannot be used, or None; imports it."""
    try:
        _import(plugin.kind, plugin.name, plugin.value)
    except PluginError as error:
        return str(error)
    return None


def summary(plugin: Plugin) -> str:
    """The first line of its docstring, read from the source without importing it; empty where there is none."""
    module, _, name = plugin.value.partition(":")
    try:
        spec = importlib.util.find_spec(module)
        source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
        tree = ast.parse(source)
    except (Exception, SystemExit):  # whatever a stranger's package raises on import, a list must not fail over it
        return ""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            text = ast.get_docstring(node) or ""
            return " ".join(text.partition("\n\n")[0].split())
    return ""


def suggestion(got: str, known: Any) -> str:
    """`; did you mean 'x'?`, or nothing when no known name is near."""
    near = difflib.get_close_matches(got, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _entries(kind: str) -> EntryPoints:
    if kind not in _BASES:
        raise PluginError(f"unknown kind {kind!r}{suggestion(kind, KINDS)}; one of {', '.join(KINDS)}")
    return entry_points(group=f"specdec.{kind}")


def _plugins(kind: str, entries: Iterable[EntryPoint]) -> list[Plugin]:
    """Reads the metadata of their distributions, which takes longer than to find the entry points."""
    found = {_plugin(kind, entry) for entry in entries}
    return sorted(found, key=lambda plugin: (plugin.name, plugin.distribution))


def _plugin(kind: str, entry: EntryPoint) -> Plugin:
    name = entry.dist.name if entry.dist is not None else "an unnamed distribution"
    version = f" {entry.dist.version}" if entry.dist is not None else ""
    return Plugin(kind, entry.name, entry.value, name + version, name == _OWN)


def _import(kind: str, name: str, value: str) -> Any:
    place = f"{kind}/{name}"
    module, _, attribute = value.partition(":")
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a plugin's module may raise anything
        where = "" if name == value else f" ({value})"
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            why = f"the module exits when imported (sys.exit({error.code!r}))"
        raise PluginError(f"{place}{where} cannot be imported: {why}; see `python -c 'import {module}'`") from error
    base = _base(kind)
    if base is not None and not (isinstance(found, type) and issubclass(found, base)):
        raise PluginError(f"{place}: {value} is not a subclass of {base.__module__}.{base.__name__}")
    if base is not None and inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise PluginError(f"{place}: {value} does not implement {missing}")
    return found


def _base(kind: str) -> type | None:
    if (path := _BASES[kind]) is None:
        return None
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]  # a class, by the table


def _unknown(kind: str, name: str) -> str:
    known = names(kind)
    text = f"{kind}/{name}: unknown{suggestion(name, known)}; there are {', '.join(known)}"
    if elsewhere := [other for other in KINDS if other != kind and name in names(other)]:
        text += f"; {name} is one of {' and '.join(elsewhere)}"
    for plugin in plugins(kind):
        if not plugin.bundled and (why := problem(plugin)) is not None:
            text += f"; {why}"
    return f"{text}; a class of no package is `my_module:MyClass`"


@contextmanager
def _importable(*folders: Path) -> Iterator[None]:
    added = [text for folder in folders if (text := str(folder.resolve())) not in sys.path]
    sys.path[:0] = added
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)
