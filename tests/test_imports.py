"""Who may import whom, found by parsing every file."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = (
    (
        "errors",
        "law",
        "memory",
        "padding",
        "hub",
        "code_blocks",
        "sandbox_launcher",
        "sandbox_program",
        "math_worker",
        "numerals",
        "packing",
        "costs",
    ),
    (
        "types",
        "noise",
        "probability",
        "theory",
        "tree",
        "text",
        "encoding",
        "jsonlines",
        "sandbox",
        "math_answers",
        "registry",
    ),
    ("sequence", "task", "gguf_file", "checkpoint", "attention"),
    ("wheel_model", "benchmark"),
    ("kv", "loading", "processing", "subset", "code_benchmark", "graphs"),
    ("target",),
    ("drafter", "verifier", "scheduler", "preflight", "nearties", "findings"),
    ("compat", "metrics", "diagnostics", "trace", "settle", "progress", "options"),
    ("engine", "compact", "places", "results", "environment", "figures", "labels", "style"),
    ("yamlfile", "stopwatch", "report", "drawing", "recorder", "rerun", "given"),
    (
        "recipe",
        "page",
        "testing",
        "rundir",
        "generation",
        "layer_search",
        "exactness",
        "subject",
        "catalogue",
        "replay",
        "pricing",
    ),
    ("frontier", "joined", "starter", "prognosis", "contract", "one_position"),
    ("comparison", "cli_answers", "cli_interrupt", "whole_drafts"),
    ("doctor", "cli_generate", "conformance"),
    ("cli_doctor", "cli_init", "cli_check", "cli_compare", "cli_replay"),
    ("cli",),
)
LAYER = {name: level for level, names in enumerate(LAYERS) for name in names}
# Layers whose modules may know each other; everywhere else a module imports strictly lower ones.
SAME_LAYER = {
    "theory": {"probability"},
    "progress": {"metrics"},
}
FOREIGN = {
    "transformers": {"target", "attention", "loading", "checkpoint", "gguf_file", "processing", "text"},
    "tokenizers": {"loading", "gguf_file"},
    "yaml": {"yamlfile"},
    "cattrs": {"options"},
    "click": {"cli", "cli_answers", "cli_generate", "cli_doctor", "cli_init", "cli_check", "cli_compare", "cli_replay"},
    "rich": {"cli"},
    "matplotlib": {"drawing"},
    "datasets": {"benchmark"},
    "math_verify": {"math_worker"},
}
CORE = sorted((ROOT / "specdec").glob("*.py"))
COMMANDS = {"bench", "distill"}  # packages of commands, which may reach into the core
STRATEGIES = sorted(path for path in (ROOT / "specdec_plugins").rglob("*.py") if path.parent.name not in COMMANDS)


def imported(path: Path, *, module_level: bool = False) -> set[str]:
    """Dotted names that a file imports, those inside functions included unless `module_level`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in tree.body if module_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            module = node.module or ""
            found.update(
                f"{module}.{alias.name}" if module in ("specdec", "specdec_plugins") else module for alias in node.names
            )
    return found


def ours(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("specdec.")} & LAYER.keys()


# Catches: a new module that nobody gave a layer.
def test_every_core_module_has_a_layer():
    assert {path.stem for path in CORE} - {"__init__"} <= LAYER.keys()


# Catches: `from specdec.engine import Engine` in verifier.py, or two modules of one layer that know each other.
@pytest.mark.parametrize("path", [path for path in CORE if path.stem != "__init__"], ids=lambda path: path.stem)
def test_a_core_module_imports_lower_layers_only(path):
    name = path.stem
    wrong = {
        other
        for other in ours(imported(path))
        if other != name and LAYER[other] >= LAYER[name] and other not in SAME_LAYER.get(name, set())
    }
    assert not wrong


# Catches: a core file that imports a concrete strategy.
@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_the_core_never_imports_the_plugins(path):
    assert not {name for name in imported(path) if name.split(".")[0] == "specdec_plugins"}


# Catches: a strategy that reaches into the engine, the registry or the command line; a command may.
@pytest.mark.parametrize("path", STRATEGIES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_a_plugin_imports_layers_up_to_five(path):
    limit = LAYER["drafter"]
    assert not {name for name in ours(imported(path)) if LAYER[name] > limit}


# Catches: yaml parsed in a second place, transformers touched outside the files that know its versions.
@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_a_foreign_library_is_imported_where_it_belongs(path):
    roots = {name.split(".")[0] for name in imported(path)}
    assert {root for root in roots & FOREIGN.keys() if path.stem not in FOREIGN[root]} == set()


def loaded(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


# Catches: a package __init__ that imports its modules, and a command line that is slow before it does anything.
@pytest.mark.parametrize("module", ["specdec", "specdec.cli", "specdec.registry", "specdec.page"])
def test_importing_it_brings_in_neither_strategies_nor_transformers(module):
    assert not loaded(f"import {module}") & {"specdec_plugins", "transformers", "torch", "matplotlib"}
