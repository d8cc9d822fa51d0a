"""The tables in docs/faults.md are true: what they name exists, and what exists is named."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
CODE = re.compile(r"\| [A-HM]\d")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if CODE.match(line)]
OWN = {"test_table.py"}


def facts_in(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def named():
    return {
        (folder or "tests/faults/", file, name)
        for folder, file, name in re.findall(r"`(tests/\w+/)?(test_\w+\.py)::(test_\w+)`", TABLE)
    }


# Catches: a test that was renamed or deleted while the table goes on to promise it.
def test_every_test_that_the_table_names_exists():
    files = {(folder, file) for folder, file, _ in named()}
    there = {(folder, file, name) for folder, file in files for name in facts_in(ROOT / folder / file)}
    assert named() - there == set()
    assert len(named()) > 90


# Catches: a test without a row, so that nobody knows what it stands for.
def test_every_test_here_is_in_the_table():
    files = [path for path in Path(__file__).parent.glob("test_*.py") if path.name not in OWN]
    here = {("tests/faults/", path.name, name) for path in files for name in facts_in(path)}
    assert here - named() == set()


# Catches: a row without a report, a fact or a test; a code that is used twice.
def test_every_row_has_a_report_a_fact_and_a_test_or_says_why_not():
    codes = [row[0] for row in ROWS]
    assert len(codes) == len(set(codes)) > 90
    for code, reports, fact, test in ROWS:
        assert re.search(r"[\w.-]+/[\w.-]+ #\d+", reports) or reports == "no public report known", code
        assert fact, code
        assert re.fullmatch(r"`[^`]+::test_\w+`(, `[^`]+::test_\w+`)*", test) or fact.startswith("left out"), code
