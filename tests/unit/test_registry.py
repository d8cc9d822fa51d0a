import sys
from importlib.metadata import EntryPoint, entry_points

import pytest

from specdec import registry
from specdec.errors import PluginError
from specdec_plugins.verifiers.standard import Standard


class FakeDistribution:
    def __init__(self, name):
        self.name, self.version = name, "1.0"


def entry(name, value, distribution):
    made = EntryPoint(name, value, "specdec.verifiers")
    vars(made)["dist"] = FakeDistribution(distribution)
    return made


@pytest.fixture
def extra(monkeypatch):
    """Entry points of verifiers beside the installed ones."""

    def add(*entries):
        real = entry_points

        def found(*, group):
            return [*real(group=group), *(entries if group == "specdec.verifiers" else ())]

        monkeypatch.setattr(registry, "entry_points", found)

    return add


# Catches: a second list of built-ins beside the entry points, which would go on when metadata do not say them.
def test_names_are_those_of_the_metadata(monkeypatch):
    assert {"standard", "greedy", "nucleus", "typical"} <= set(registry.names("verifiers"))
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [])
    assert registry.names("verifiers") == []
    with pytest.raises(PluginError, match="unknown"):
        registry.load("verifiers", "standard")


# Catches: loading by another path than the entry point.
def test_load_gives_the_class_of_the_entry_point():
    assert registry.load("verifiers", "standard") is Standard


# Catches: a near name without a suggestion, a message without the list.
def test_an_unknown_name_gets_a_suggestion_and_the_list():
    with pytest.raises(PluginError, match=r"did you mean 'nucleus'\?; there are .*, nucleus, .*, standard, "):
        registry.load("verifiers", "nucleos")
    with pytest.raises(PluginError, match="did you mean 'verifiers'"):
        registry.names("verifier")


# Catches: the first or the last distribution silently winning.
def test_a_name_claimed_twice_is_an_error_that_names_both(extra):
    extra(entry("standard", "elsewhere:Rule", "rival"))
    with pytest.raises(PluginError, match=r"claimed by .*rival 1.0.*specdec-lab|claimed by .*specdec-lab.*rival 1.0"):
        registry.load("verifiers", "standard")
    assert registry.load("verifiers", "greedy").__name__ == "Greedy"


# Catches: a broken plugin that takes the others down, or that is not named when a name is unknown.
def test_a_plugin_that_cannot_be_imported_is_named_and_breaks_nothing_else(extra):
    extra(entry("broken", "no_such_module_here:Rule", "shaky"))
    assert registry.load("verifiers", "standard") is Standard
    assert "broken" in registry.names("verifiers")
    with pytest.raises(PluginError, match=r"unknown; .*verifiers/broken .*cannot be imported: ModuleNotFoundError"):
        registry.load("verifiers", "absent")


# Catches: an ABC check that is left out, or that accepts what cannot be made.
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Rule: pass", "not a subclass of specdec.verifier.Verifier"),
        ("Rule = 5", "not a subclass"),
        (
            "from specdec import Verifier\nclass Rule(Verifier): pass",
            "does not implement exactness, family, verify",
        ),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("", "cannot be imported: AttributeError"),
        ("import sys\nsys.exit(3)", r"cannot be imported: the module exits when imported \(sys.exit\(3\)\)"),
    ],
)
def test_what_is_no_plugin_of_the_kind_is_refused(tmp_path, text, message, request):
    module = f"rule_{request.node.callspec.indices['text']}"
    (tmp_path / f"{module}.py").write_text(text)
    with pytest.raises(PluginError, match=message):
        registry.load("verifiers", f"{module}:Rule", tmp_path)


# Catches: an import path that stays changed after a class was loaded from a folder.
def test_the_import_path_is_as_before(tmp_path):
    (tmp_path / "quiet_module.py").write_text("from specdec_plugins.verifiers.standard import Standard as Rule")
    before = list(sys.path)
    assert registry.load("verifiers", "quiet_module:Rule", tmp_path) is Standard
    assert sys.path == before


# Catches: a summary that imports, or that is not the docstring's first paragraph.
def test_a_summary_is_read_without_importing(extra, tmp_path, monkeypatch):
    (tmp_path / "loud_module.py").write_text('class Rule:\n    """Keeps\n    nothing.\n\n    More.\n    """\n1 / 0\n')
    monkeypatch.syspath_prepend(tmp_path)
    extra(entry("loud", "loud_module:Rule", "loud"))
    plugin = next(plugin for plugin in registry.plugins("verifiers") if plugin.name == "loud")
    assert registry.summary(plugin) == "Keeps nothing."
    assert "ZeroDivisionError" in (registry.problem(plugin) or "")
