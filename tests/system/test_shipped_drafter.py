"""The drafter that comes with the package, and what a checkpoint says of the target it was trained for."""

import copy
import json
from pathlib import Path

import pytest
import torch
from attrs import evolve
from click.testing import CliRunner

from specdec import Target
from specdec.cli import main
from specdec.errors import CompatibilityError, ModelError
from specdec.packing import pack
from specdec.wheel_model import MODELS, cache_folder
from specdec_plugins.drafters.blocks import checkpoint, shipped
from specdec_plugins.drafters.blocks.lineage import mark
from specdec_plugins.drafters.dspark import DSpark
from specdec_plugins.kv.slab import Slab
from tests.block_checkpoints import deepspec, write
from tests.families import tiny

MEGABYTE = 10**6


def target(model):
    made = Target(model, kv=Slab(rows=2, tokens=64))
    made.preflighted = True
    return made


def trained_for(model, folder):
    """A checkpoint for `tiny("qwen3", layers=4)` that says so of `model`."""
    plain = checkpoint.load(write(folder / "plain", deepspec()))
    checkpoint.save(folder / "marked", evolve(plain, trained_for=mark(model)))
    return str(folder / "marked")


def notes(model, folder):
    made = DSpark(model=folder)
    made.bind(target(model))
    return made.notes


# Catches: a mark that depends on the dtype or on the layout of a prepared model, and so warns of the right target.
def test_a_mark_is_that_of_the_weights_in_any_dtype_and_layout():
    model = copy.deepcopy(tiny("qwen3", layers=4)).to(torch.bfloat16)
    wide = copy.deepcopy(model).float()
    packed = copy.deepcopy(model)
    pack(packed)
    assert len({mark(model), mark(wide), mark(packed)}) == 1


# Catches: a mark of shapes and names alone; one that looks at the first tensor.
def test_another_seed_or_one_other_layer_is_another_mark():
    model, other = tiny("qwen3", layers=4), tiny("qwen3", seed=1, layers=4)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.layers[3].mlp.down_proj.weight.mul_(1.5)
    assert len({mark(model), mark(other), mark(changed)}) == 3


# Catches: a mark that is written and never looked at, or lost between file and drafter.
def test_other_weights_than_those_trained_for_are_noted_once(tmp_path):
    model = tiny("qwen3", layers=4)
    folder = trained_for(model, tmp_path)
    assert notes(model, folder) == []
    [said] = notes(tiny("qwen3", seed=1, layers=4), folder)
    assert said.startswith("the drafter was trained for other weights of this architecture (sha256-bfloat16 ")
    assert said.endswith("outputs stay right, and fewer drafts may be kept")


# Catches: a warning for every published checkpoint, none of which says what it was trained for.
def test_a_checkpoint_that_says_nothing_is_not_doubted(tmp_path):
    assert notes(tiny("qwen3", seed=1, layers=4), str(write(tmp_path, deepspec()))) == []


# Catches: weights that only the user who trained them can read.
def test_who_may_read_a_checkpoint_is_for_the_umask_to_say(tmp_path):
    folder = Path(trained_for(tiny("qwen3", layers=4), tmp_path))
    (tmp_path / "touched").touch()
    assert {file.stat().st_mode for file in folder.iterdir()} == {(tmp_path / "touched").stat().st_mode}


# Catches: a drafter left out of the package, grown beyond what a package should carry, or without its card.
def test_the_shipped_drafter_is_whole_small_and_described():
    folder = shipped.folder_of(shipped.SMOLLM2)
    model = checkpoint.load(folder)
    assert (folder / "model.safetensors").stat().st_size <= 32 * MEGABYTE
    assert {value.dtype for value in model.tensors().values()} == {torch.bfloat16}
    assert all(value.isfinite().all() for value in model.tensors().values())
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert model.trained_for in card
    for word in ("licence", "seed", "gsm8k", "mbpp", "acceptance length"):
        assert word in card.lower(), word


# Catches: a name that is taken for a hub id; an error that does not say what there is.
def test_an_unknown_shipped_name_is_answered_with_those_there_are():
    with pytest.raises(
        ModelError, match=r"'shipped:gpt': no such drafter comes with the package; there are shipped:smo"
    ):
        DSpark(model="shipped:gpt")


# Catches: the default drafter on any target, which would run and never be right.
def test_the_default_drafter_refuses_another_target_and_says_what_to_give():
    with pytest.raises(CompatibilityError) as error:
        DSpark().bind(target(tiny("qwen3", layers=4)))
    problems = error.value.problems
    assert any("was trained for a target of hidden size 576, and this one has 32" in said for said in problems)
    assert any(
        "shipped:smollm2-135m-instruct is for that model alone; give option 'model'" in said for said in problems
    )


@pytest.fixture
def smollm2():
    name = "pypi:smollm2-135m-instruct"
    folder = cache_folder() / f"smollm2-135m-instruct-{MODELS[name].sha256[:8]}"
    if not folder.is_dir():
        pytest.skip(f"{name} was not fetched here yet; specdec run quickstart does it")
    return str(folder)


# Catches: a word about another target where it is the right one, and only an option is wrong.
def test_a_wrong_option_on_the_right_target_is_the_only_reason(smollm2):
    answer = CliRunner().invoke(
        main, ["generate", "x", "--model", smollm2, "--drafter", "dspark", "--set", "drafter.num_speculative_tokens=9"]
    )
    assert answer.exit_code == 5
    assert "num_speculative_tokens is 9 and a block drafts 7" in answer.stderr
    assert "for that model alone" not in answer.stderr


# Catches: a drafter trained for other weights than those that the name stands for; drafts that are never kept.
def test_it_drafts_for_the_model_it_is_named_after(smollm2):
    def said(*options):
        prompt = "Question: Tom has 3 apples and buys 4 more. How many apples does he have? Answer:"
        arguments = ["generate", prompt, "--model", smollm2, "--max-new-tokens", "24", "--json"]
        arguments += ["--temperature", "0", *options]
        answer = CliRunner().invoke(main, arguments)
        assert answer.exit_code == 0, answer.output
        assert "trained for other weights" not in answer.output
        return json.loads(answer.stdout.strip().splitlines()[-1])

    plain, drafted = said("--drafter", "none"), said("--drafter", "dspark")
    assert drafted["completions"][0]["text"] == plain["completions"][0]["text"]
    assert drafted["acceptance_length"] > 1.5
