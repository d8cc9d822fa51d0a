"""The check that needs a GPU, and its own code where there is none."""

import json

import pytest
import torch

from specdec import graphs
from tests.captures import without_cuda
from tests.gpu.check import Check, main, options

CPU = ["--device", "cpu", "--backend", "eager", "--new", "8", "--k", "1", "--rows", "1", "--repeats", "1"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs and copies to the host need a CUDA GPU")
def test_what_only_a_gpu_can_say(capsys):
    assert main([]) == 0, capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out == (
        "this check needs a CUDA GPU and there is none; try --device cpu for the part that needs none\n"
    )


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    monkeypatch.setattr(graphs, "BACKEND", graphs.BACKEND)  # main sets it


# Catches: a check that breaks before it has looked, or finds something and says that all is well.
@pytest.mark.parametrize("wrong", [False, True])
def test_it_finds_what_is_wrong_and_nothing_else(wrong, capsys, monkeypatch):
    if wrong:
        compiled = graphs.compiled

        def stale(step, cells):
            made, first = compiled(step, cells), []

            def run(tokens, numbers):
                first.append(numbers)
                return made(tokens, first[0])

            return run

        monkeypatch.setattr(graphs, "compiled", stale)
        monkeypatch.setattr(Check, "speed", lambda check: check.say("speed rows=1", None, "nothing"))
    assert main(CPU) == wrong
    *lines, last = capsys.readouterr().out.splitlines()
    told = json.loads(last)
    assert told["failed"] == (["equality graphs=compile k=0", "equality graphs=compile k=1"] if wrong else [])
    assert set(told["found"]) == {line[7:].partition(":")[0] for line in lines}
    assert told["found"]["replay k=1"]["runs"] > told["found"]["replay k=1"]["made"]


# Catches: lines that only a GPU reaches and that were never run; copies that are taken for right when none was counted.
@pytest.mark.full
def test_what_a_gpu_runs_runs_with_captures_that_are_recorded(capsys, monkeypatch):
    without_cuda(monkeypatch)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "memory_reserved", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    check = Check(options([*CPU, "--new", "40", "--rows", "2"]))
    check.kind = "cuda"
    for look in (check.equality, check.copies, check.speed, check.memory):
        look()
    assert check.failed == ["copies graphs=off", "copies graphs=cuda"]
    assert "copies graphs=cuda: a step has 0 Memcpy DtoH" in capsys.readouterr().out
