"""`specdec bench`: what it prints, what its figures are made of, what it refuses."""

import json

import pytest
import torch
from attrs import evolve
from click.testing import CliRunner
from torch import nn

from specdec import Target
from specdec.cli import main
from specdec.packing import PackedLinear
from specdec_plugins.bench import command, machine
from specdec_plugins.bench.machine import weights
from specdec_plugins.bench.race import Lap, Result, race, ratio
from specdec_plugins.bench.sides import Side, cut
from specdec_plugins.drafters.dspark import DSpark
from specdec_plugins.kv.slab import Slab
from tests.block_checkpoints import deepspec, networks, write
from tests.families import tiny


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": str(index), "prompt": f"text {'long ' * index}"}) for index in range(3)]
    file.write_text("\n".join(lines))
    return file


@pytest.fixture
def alone(monkeypatch):
    """No other library is there, whatever this machine has."""
    monkeypatch.setattr("specdec_plugins.bench.entrants.installed", lambda name: False)
    monkeypatch.setattr(machine, "_BYTES", 1 << 22)


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


# Catches: a side that decodes other prompts or other ends than the rest, a last line that is not JSON, tokens that are
# counted twice, ours run without the speculative path.
def test_everybody_says_the_same_in_one_table_and_one_document(prompts, alone):
    options = ["--prompts", prompts, "--dtype", "float32", "--new-tokens", 6, "-k", 2, "--rows", "1,2"]
    done = bench("random:llama", "random:llama", *options)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout.splitlines()[-1])
    assert set(document["sides"]) == {
        "specdec none", "specdec standard", "specdec none x2", "specdec standard x2", "transformers generate",
        "transformers generate x2", "transformers assisted", "transformers prompt lookup",
    }  # fmt: skip
    for others in document["ratios"].values():
        assert {one["equal_outputs"] for one in others.values()} == {3}
    perfect = document["sides"]["specdec standard"]  # a draft of its own target
    assert perfect["acceptance_length"] == pytest.approx(3.0)
    assert perfect["steps"] == 3 * 2
    assert set(perfect["shares"]) == {"prefill", "draft", "verify", "rest"}
    assert sum(perfect["shares"].values()) == pytest.approx(1)
    assert document["sides"]["specdec none"]["steps"] == 3 * 6
    assert document["machine"]["read_bandwidth"] > 0
    assert "specdec none x2" not in document["ratios"]["specdec none"]
    assert all(name in done.stdout for name in document["sides"])


# Catches: refusals as tracebacks, rows that are dropped in silence.
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rows", "1,x"], "--rows 1,x: wanted whole numbers"),
        (["--rows", "2,2"], "--rows 2,2: wanted different numbers"),
        (["--only", "nobody"], "--only nobody: no side has that in its name"),
        (["--rows", "1,65537"], "--rows 1,65537: wanted different numbers from 1 to 65536"),
        (["--temperature", "nan"], "--temperature nan: wanted a finite number"),
        (["--temperature", "inf"], "--temperature inf: wanted a finite number"),
        (["--new-tokens", 10**10], "Invalid value for '--new-tokens'"),
        (["--new-tokens", 1020], "--new-tokens 1020: with the longest prompt that makes 1035 tokens, and the target"),
        (["--verifier", "judge"], "--verifier judge: needs weights, and rules have no options here"),
    ],
)
def test_what_cannot_be_raced_is_one_sentence(prompts, alone, options, said):
    done = bench("random:llama", "random:llama", "--prompts", prompts, "--dtype", "float32", *options)
    assert done.exit_code != 0
    assert said in done.output
    assert "Traceback" not in done.output


class Counting(Side):
    """Makes as many tokens as a prompt has, and remembers when it ran."""

    def __init__(self, name, rows, log):
        super().__init__(name, rows, (nn.Linear(3, 5),))
        self.log = log

    @property
    def device(self):
        return torch.device("cpu")

    def run(self, prompts, first):
        self.log.append((self.name, first, len(prompts)))
        return [list(prompt) for prompt in prompts]


# Catches: one side that always goes first, of groups too, groups that are not shared, prompts beyond a side's rows.
def test_sides_take_turns_over_the_same_prompts():
    log = []
    sides = [Counting("one", 1, log), Counting("two", 2, log)]
    found = race(sides, [(1,), (1, 2), (1, 2, 3)], rounds=1)
    warm = [("one", 0, 1), ("two", 0, 2)]
    assert log == [*warm, ("one", 0, 1), ("two", 0, 2), ("one", 1, 1), ("two", 2, 1), ("one", 2, 1)]
    assert [len(lap.tokens) for lap in found["two"].laps] == [1, 2, 3]
    assert found["one"].memory >= machine.weights(sides[0].models[0]) == 4 * (15 + 5)


# Catches: an order that turns around in every second turn only, of which groups of an even size see one half.
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
def test_either_of_two_sides_goes_first_as_often(rows):
    log = []
    race([Counting("one", rows, log), Counting("two", rows, log)], [(1,)] * 2 * rows, rounds=2)
    firsts = [name for name, *_ in log[2::2]]
    assert firsts.count("one") == firsts.count("two")


# Catches: a rule that is raced against itself under one name, whose prompts are then counted twice.
def test_a_rule_that_is_named_twice_runs_once(prompts, alone):
    options = ["--prompts", prompts, "--dtype", "float32", "--new-tokens", 2, "--only", "specdec"]
    done = bench("random:llama", "random:llama", *options, "--verifier", "standard", "--verifier", "standard")
    assert done.exit_code == 0, done.output
    assert list(json.loads(done.stdout.splitlines()[-1])["sides"]) == ["specdec none", "specdec standard"]


# Catches: a promise that the same command goes on, where nothing is kept.
def test_an_interrupted_race_says_that_nothing_is_kept(prompts, alone, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec_plugins.bench.race.race", interrupted)
    done = bench("random:llama", "random:llama", "--prompts", prompts, "--dtype", "float32", "--only", "specdec")
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-1] == "interrupted; nothing is kept, the same command begins anew"


def result(*laps):
    return Result(tuple(Lap(prompt, (0,) * tokens, seconds) for prompt, tokens, seconds in laps), 0, {})


# Catches: a mean of ratios in place of the ratio of totals, sides the wrong way round.
def test_the_ratio_is_of_totals():
    ours, theirs = result((0, 10, 1.0), (1, 10, 3.0)), result((0, 10, 2.0), (1, 4, 8.0))
    found = ratio(ours, theirs)
    assert found["value"] == pytest.approx((20 / 4) / (14 / 10))
    assert found["equal_outputs"] == 1
    same = evolve(ours)
    assert ratio(ours, same)["value"] == pytest.approx(1)


# Catches: the padding behind an end counted as tokens.
def test_nothing_behind_an_end_counts():
    assert cut([5, 6, 2, 0, 0], (2,)) == [5, 6, 2]
    assert cut([5, 6], (2,)) == [5, 6]


# Catches: a forecast from drafts alone, or from the shares of the wrong side.
def test_the_forecast_is_made_of_prompts_drafts_and_verifications():
    seconds = {"prefill": 1.0, "draft": 2.0, "verify": 3.0, "rest": 50.0}
    assert command._forwards(evolve(result((0, 12, 56.0)), facts={"seconds": seconds})) == pytest.approx(0.5)


# Catches: an untied input embedding counted as read, a tied head not counted.
def test_weights_read_are_all_but_a_table_of_embeddings():
    from specdec.loading import load

    model, _ = load("random:llama")
    table = model.get_input_embeddings().weight.numel() * 4
    assert machine.weights_read(model) == machine.weights(model) - table
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


# Catches: a drafter's name taken for a model, transformers "assisted" by none, weights of a drafter that nobody counts.
def test_a_drafter_without_a_draft_model_is_raced_by_its_name(prompts, alone, tmp_path):
    said = bench("random:qwen3", "prompt_lookup", "--prompts", prompts, "--limit", "2", "--new-tokens", "4")
    sides = json.loads(said.stdout.splitlines()[-1])["sides"]
    assert set(sides) == {"specdec none", "specdec standard", "transformers generate", "transformers prompt lookup"}
    model = tiny("qwen3", layers=4)
    blocks = networks("dspark", "qwen3", 4)
    drafter = DSpark(model=blocks)
    drafter.bind(Target(model, kv=Slab(rows=1, tokens=64)))
    assert sum(map(weights, drafter.networks)) == sum(value.numel() * 4 for value in blocks.tensors().values())


# Catches: an option that a drafter refuses, as a traceback.
def test_a_length_that_the_drafter_refuses_is_one_sentence(prompts, alone, tmp_path):
    folder = str(write(tmp_path / "drafter", deepspec()))
    said = bench("random:qwen3", folder, "--prompts", prompts, "-k", "9")
    assert said.exit_code == 5
    assert "num_speculative_tokens is 9 and a block drafts 5" in said.stderr
