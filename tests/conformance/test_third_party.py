"""A stranger's rule: from a file beside the recipe, and from an installed wheel next to a broken one."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from attrs import frozen
from click.testing import CliRunner

from specdec.cli import main

RULE = '''
"""Rules of a stranger."""

from typing import final

import torch
from attrs import field, frozen
from attrs.validators import ge, le

from specdec import Place, PointwiseVerifier


@final
@frozen(kw_only=True)
class MyRule(PointwiseVerifier):
    """Keeps any draft token with a fixed probability.

    Attributes:
        chance: that probability.
    """

    chance: float = field(default=1.0, validator=[ge(0.0), le(1.0)])

    family = "other"
    exactness = "lossy"

    def acceptance(self, at: Place) -> torch.Tensor:
        return torch.full_like(at.p, self.chance)
'''
BROKEN = "raise RuntimeError('built for another machine')\n"
COMMAND = "import click\n\n\n@click.command()\ndef hello():\n    '''Says hello.'''\n    click.echo('hello')\n"
ENTRY_POINTS = """[specdec.verifiers]
coin = stranger.rules:MyRule
rusty = stranger.broken:Rule

[specdec.commands]
hello = stranger.command:hello
"""
RUN = ("run", "smoke", "--limit", "1", "--set", "sampling.max_new_tokens=12", "--set", "sampling.ignore_eos=true")


# Commands one after the other in one process, which imports everything once: their codes, stdout and stderr.
CODE = """
import json, sys
from click.testing import CliRunner
from specdec.cli import main
done = [CliRunner().invoke(main, command, prog_name="specdec") for command in json.loads(sys.argv[1])]
print(json.dumps([[one.exit_code, one.stdout, one.stderr] for one in done]))
"""


@frozen
class Answer:
    code: int
    stdout: str
    stderr: str


def specdec(python, *commands, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(python), "-c", CODE, json.dumps(commands)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [Answer(*answer) for answer in json.loads(done.stdout)]


def lengths(done):
    assert done.code == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    return {row["label"]: row["acceptance_length"] for row in rows}


# Catches: a loader that knows entry points only, options of a class of no package that are not applied, a module that
# is looked for in one place only.
@pytest.mark.parametrize("place", ["current folder", "recipe's folder"])
def test_a_rule_in_a_file_runs(tmp_path, place, monkeypatch):
    (tmp_path / "work").mkdir()
    home = tmp_path / "work" if place == "current folder" else tmp_path
    (home / "my_rule.py").write_text(RULE)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one two three"}\n')
    (tmp_path / "mine.yaml").write_text(
        "target: {model: 'random:llama'}\n"
        "drafters: [{use: model, name: model, model: 'random:llama:1', num_speculative_tokens: 3}]\n"
        "verifiers: [{use: 'my_rule:MyRule', name: always}, {use: 'my_rule:MyRule', name: never, chance: 0.0}]\n"
        "kv: {rows: 1, tokens: 64}\n"
        "sampling: {max_new_tokens: 12, ignore_eos: true}\n"
        "data: {file: prompts.jsonl}\n"
    )
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delitem(sys.modules, "my_rule", raising=False)
    done = CliRunner().invoke(main, ["run", "../mine.yaml"], catch_exceptions=False)
    found = lengths(Answer(done.exit_code, done.stdout, done.stderr))
    assert found == {"autoregressive": 1.0, "model + always": 4.0, "model + never": 1.0}


def wheel(folder):
    """A wheel made by hand: nothing has to be built or fetched."""
    info = "stranger-1.2.dist-info"
    files = {
        "stranger/__init__.py": "",
        "stranger/rules.py": RULE,
        "stranger/broken.py": BROKEN,
        "stranger/command.py": COMMAND,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: stranger\nVersion: 1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": ENTRY_POINTS,
    }
    lines = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(text.encode())}\n")
    files[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"])
    path = folder / "stranger-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a temporary environment that sees what this one has, and the wheel."""
    folder = tmp_path_factory.mktemp("stranger")
    home = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    made = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    ask = [str(made), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    # addsitedir also reads the .pth files there, such as that of an editable install.
    (site / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    install = [sys.executable, "-m", "pip", "--python", str(made), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, "--disable-pip-version-check", str(wheel(folder))], check=True)
    return made


@pytest.fixture(scope="module")
def answers(python, tmp_path_factory):
    """What the commands say that have to import the rules."""
    unknown = [("validate", "smoke", "--set", f"verifiers.0.use={name}") for name in ("rusty", "absent")]
    used = (*RUN, "--set", "verifiers=[{use: standard}, {use: coin}]")
    commands = {"ls": ("ls", "verifiers"), "show": ("show", "coin"), "run": used}
    commands |= dict(zip(("rusty", "absent"), unknown, strict=True))
    found = specdec(python, *commands.values(), folder=tmp_path_factory.mktemp("work"))
    return dict(zip(commands, found, strict=True))


# Catches: an ls that dies with one plugin, hides it, or does not say who brought what.
def test_an_installed_rule_is_listed_and_a_broken_one_is_named_with_its_error(answers):
    assert answers["ls"].code == 0, answers["ls"].stderr
    lines = {line.split()[0]: line for line in answers["ls"].stdout.splitlines()}
    assert "Keeps any draft token with a fixed probability. (stranger 1.2)" in lines["coin"]
    assert "cannot be imported: RuntimeError: built for another machine" in lines["rusty"]
    assert "Keeps what the standard rule keeps" in lines["nucleus"]
    assert "chance: float, default 1.0" in answers["show"].stdout
    assert "from stranger 1.2: stranger.rules:MyRule" in answers["show"].stdout


# Catches: entry points of other distributions that are listed but not loaded.
def test_an_installed_rule_is_used(answers):
    found = lengths(answers["run"])
    assert found["model + coin"] > 3.0
    assert found["model + standard"] < 3.0


# Catches: a broken plugin that is a traceback when it is asked for, or that is not named beside an unknown name.
@pytest.mark.parametrize("name", ["rusty", "absent"])
def test_a_broken_rule_is_an_error_in_the_recipe(answers, name):
    done = answers[name]
    assert done.code == 2
    assert done.stderr.count("\n") == 1
    assert "verifiers[0].use: " in done.stderr
    assert "cannot be imported: RuntimeError: built for another machine" in done.stderr


# Catches: a group that is read by nobody.
def test_an_installed_command_is_a_command(python, tmp_path):
    hello, told = specdec(python, ("hello",), ("--help",), folder=tmp_path)
    assert hello.stdout == "hello\n"
    assert "Says hello." in told.stdout
