"""The package of docs/write-a-verifier.md is built, installed, checked and run; docs/verifiers.md is up to date."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from click.testing import CliRunner

from specdec.catalogue import page
from specdec.cli import main
from specdec.registry import plugins

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "write-a-verifier.md").read_text(encoding="utf-8")
FILES = {
    text.split("\n", 1)[0].removeprefix("# "): text
    for text in re.findall(r"```(?:toml|python)\n(.*?)```", PAGE, re.DOTALL)
}
RUN = ("run", "smoke", "--limit", "1", "--set", "sampling.max_new_tokens=12", "--set", "sampling.ignore_eos=true")


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The files of the page, in a folder."""
    folder = tmp_path_factory.mktemp("my-rules")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def python(package, tmp_path_factory):
    """The interpreter of a temporary environment that sees what this one has, and the wheel of the page's package."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheels = tmp_path_factory.mktemp("wheels")
    # A build leaves metadata beside the sources, which would be found as an installed package there.
    source = shutil.copytree(package, tmp_path_factory.mktemp("source") / "my-rules")
    build = [*pip, "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    subprocess.run([*build, str(source)], check=True)
    (wheel,) = wheels.iterdir()
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    made = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    ask = [str(made), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    # addsitedir also reads the .pth files there, such as that of an editable install.
    (site / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    install = [*pip, "--python", str(made), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, str(wheel)], check=True)
    return made


def call(python, *arguments, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([str(python), *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def specdec(*arguments):
    """In this process, without what an earlier call imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_rules"]:
        del sys.modules[name]
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False, prog_name="specdec")


# Catches: a page whose blocks are not the package that it speaks of.
def test_the_page_is_a_package_of_three_short_files():
    assert list(FILES) == ["pyproject.toml", "my_rules/tolerant.py", "tests/test_tolerant.py"]
    assert len(FILES["my_rules/tolerant.py"].splitlines()) <= 34


# Two commands and the page's own test, one after the other in a process that imports everything once.
INSTALLED = """
import json, sys
import pytest
from click.testing import CliRunner
from specdec.cli import main
for command in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, command, prog_name="specdec")
    print(json.dumps([done.exit_code, done.stdout, done.stderr]))
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider"]))
"""


@pytest.fixture(scope="module")
def answers(python, tmp_path_factory):
    """Lines on stdout, and the code, of the package that is installed: `ls`, `run`, and its test."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "test_tolerant.py").write_text(FILES["tests/test_tolerant.py"], encoding="utf-8")
    chosen = re.search(r"(verifiers=\[.*?\])'", PAGE)[1]
    commands = ("ls", "verifiers"), (*RUN, "--set", chosen)
    done = call(python, "-c", INSTALLED, json.dumps(commands), folder=folder)
    listed, run, tested = done.stdout.split("\n", 2)
    return json.loads(listed), json.loads(run), (done.returncode, tested, done.stderr)


# Catches: an entry point that is not found, a rule that a recipe cannot use.
def test_the_package_of_the_page_is_listed_and_runs(answers):
    (_, listed, why), (code, ran, error), _ = answers
    assert re.search(r"tolerant +Keeps a draft token more readily .* \(my-rules 0\.1\.0\)", listed), why
    assert code == 0, error
    rows = json.loads(ran.splitlines()[-1])["rows"]
    assert {"model + standard", "model + tolerant", "model + nucleus"} <= {row["label"] for row in rows}


# Catches: a rule of the page that is not what it says, a test of the page that does not run where it is installed.
def test_the_rule_of_the_page_passes_its_own_test(answers):
    code, tested, error = answers[2]
    assert code == 0, tested + error
    assert "2 passed" in tested


def shown(name):
    block = re.search(rf"<!-- {name}:begin -->\n```text\n(.*?)```\n<!-- {name}:end -->", PAGE, re.DOTALL)
    return block[1].splitlines()


# Catches: output on the page that the command no longer prints, a guard that is praised and not needed.
def test_the_page_shows_what_the_check_prints(package, tmp_path, monkeypatch):
    command = re.search(r"^specdec (check my_rules.*)$", PAGE, re.MULTILINE)[1].split()
    monkeypatch.chdir(package)
    done = specdec(*command)
    assert done.exit_code == 0, done.stdout
    printed, told = ([line.split("  ")[0] for line in lines] for lines in (done.stdout.splitlines(), shown("check")))
    assert printed == told
    (tmp_path / "my_rules").mkdir()
    without = FILES["my_rules/tolerant.py"].replace(" * (at.p > 0)", "")
    (tmp_path / "my_rules/tolerant.py").write_text(without, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = specdec(*command)
    assert done.exit_code == 1
    assert [line for line in done.stdout.splitlines() if "  failed  " in line] == shown("fault")


# Catches: a rule that was added or changed and a table that was not.
def test_the_table_of_rules_is_the_one_that_is_generated():
    committed = (DOCS / "verifiers.md").read_text(encoding="utf-8")
    assert committed == page(), "run python -m specdec.catalogue > docs/verifiers.md"


# Catches: a table that leaves rules out, cells that are cut by a bar in a formula, rules without a formula.
def test_the_table_has_a_whole_row_for_every_rule():
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    bundled = [one.name for one in plugins("verifiers") if one.bundled]
    assert [re.match(r"\| `(\w+)`", row)[1] for row in rows] == bundled
    for row in rows:
        cells = re.split(r"(?<!\\) \| ", row.strip("| "))
        assert len(cells) == 9, row
        assert "a(x)" in row or "a = " in row or " kept" in row or "accept" in cells[2], row
