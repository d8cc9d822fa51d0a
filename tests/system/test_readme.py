"""The README's examples run as they stand there."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from specdec.cli import main
from specdec.diagnostics import DIAGNOSTICS, LOGPROBS

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
PRICE = (Path(__file__).parents[2] / "docs" / "price.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
CONSOLE = re.findall(r"```console\n(.*?)```", README, re.DOTALL)


# Catches: an example that drifted from the library it shows.
@pytest.mark.parametrize("block", [0, 1])
def test_the_library_examples_run(block, capsys):
    exec(compile(PYTHON[block], "README.md", "exec"), {})
    assert len(re.findall(r"^(?:length|eos) \d+\.\d+ ['\"]", capsys.readouterr().out, re.MULTILINE)) == 2


# Catches: a rule outside the package that no longer runs from the one command the README gives.
def test_the_rule_of_the_readme_runs_by_the_command_beside_it(tmp_path, monkeypatch):
    rule = PYTHON[2]
    assert rule.startswith("# my_rule.py\n")
    (tmp_path / "my_rule.py").write_text(rule, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    command = shlex.split(next(block for block in CONSOLE if "my_rule" in block))
    result = CliRunner().invoke(main, [*command[1:], "--limit", "2", "--set", "drafters.0.num_speculative_tokens=2"])
    assert result.exit_code == 0, result.output
    report = (tmp_path / "runs/smoke/report.md").read_text(encoding="utf-8")
    assert "model + my_rule:MyRule(k=5)" in report


# Catches: examples that grew past what the page promises.
@pytest.mark.parametrize(("block", "most"), [(0, 5), (1, 13), (2, 22)])
def test_examples_are_short(block, most):
    assert PYTHON[block].count("\n") <= most


# Catches: a figure that is measured and not explained, or explained and no longer measured; weights from other names.
def test_the_page_of_prices_names_what_is_measured_and_its_example_runs():
    cells = [cell for line in PRICE.splitlines() if line.startswith("| `") for cell in [line.split(" | ")[0]]]
    assert sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == sorted(DIAGNOSTICS + LOGPROBS)
    names: dict[str, float] = {}
    exec(compile(re.search(r"```python\n(.*?)```", PRICE, re.DOTALL)[1], "price.md", "exec"), names)
    assert 0 < names["weight"] < float("inf")
