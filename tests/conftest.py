"""Settings of the whole suite."""

import functools
import os

import pytest
import torch

# Tiny tensors gain nothing from threads and lose much when cores are shared; subprocesses of tests inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# No test asks a model hub for anything.
os.environ["HF_HUB_OFFLINE"] = "1"
# Nor does a bar run through what is said on stderr.
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def few_rounds():
    """A thousand rounds of the bootstrap are a third of a small run; test_metrics.py looks at them."""
    from specdec import replay, results
    from specdec.metrics import bootstrap

    with pytest.MonkeyPatch.context() as patch:
        for module in (replay, results):
            patch.setattr(module, "bootstrap", functools.partial(bootstrap, rounds=100))
        yield


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Figures cost half a second a run, so only tests that look at them draw them."""

    def absent(*_):
        raise ImportError("no figures in this test")

    if "drawn" not in request.keywords:
        monkeypatch.setattr("specdec.page.draw", absent)
