"""The benchmarks' data, where there are any."""

import os
from pathlib import Path

import pytest

from specdec import benchmark


@pytest.fixture(scope="session")
def folder():
    """The folder of the environment variable, or `shared/data` beside the repository."""
    beside = Path(__file__).parents[3] / "shared" / "data"
    found = Path(os.environ.get(benchmark.FOLDER) or beside)
    if not (found / "gsm8k.jsonl").is_file():
        pytest.skip(f"no benchmark data: set {benchmark.FOLDER} to a folder that has them")
    return found
