"""`specdec distill`: from a recipe to a drafter; killed and gone on; twice the same; what it refuses."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file

from specdec.errors import CompatibilityError, DataError, OutputError, RecipeError
from specdec_plugins.distill.command import distill
from specdec_plugins.distill.folder import Folder
from specdec_plugins.distill.recipe import read_recipe
from specdec_plugins.distill.run import Run
from specdec_plugins.drafters.blocks import checkpoint
from tests.families import tiny

TRAIN = {"steps": 12, "confidence_steps": 4, "measure": 4, "sequences": 2, "anchors": 3, "warm_up": 2, "measured": 4}


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe for a tiny random target; options of `train` can be changed."""
    generator = torch.Generator().manual_seed(0)
    lines = [
        {"id": f"text-{index}", "prompt": [1, 2, 3], "tokens": torch.randint(250, (20,), generator=generator).tolist()}
        for index in range(40)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def write(**train):
        content = {
            "target": {"model": "random:llama", "dtype": "float32"},
            "drafter": {
                "block_size": 3,
                "num_hidden_layers": 1,
                "taps": [0],
                "markov_rank": 4,
                "intermediate_size": 32,
            },
            "data": {"samples": ["samples.jsonl"], "held_out": 0.2},
            "train": TRAIN | train,
            "output_dir": str(tmp_path / "run"),
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
        return tmp_path / "recipe.yaml"

    return write


def run(*arguments):
    return CliRunner().invoke(distill, list(map(str, arguments)), catch_exceptions=False)


def weights(folder):
    return load_file(folder / "drafter" / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Catches: a checkpoint that the loader refuses, a curve with other places than the block, a last line that is no JSON,
# what only a training needs left behind.
def test_a_run_leaves_a_drafter_a_curve_and_a_card(recipe, tmp_path):
    done = run(recipe())
    best = json.loads(done.stdout.splitlines()[-1])
    assert set(best["curves"]) == {"standard", "nucleus"}
    assert best["curves"]["nucleus"]["length"] >= best["curves"]["standard"]["length"] >= 1
    folder = tmp_path / "run"
    model = checkpoint.load(folder / "drafter")
    assert (model.config.block_size, model.config.taps) == (3, (0,))
    table = (folder / "curve.csv").read_text().splitlines()
    assert table[0] == "step,rule,acceptance_length,acceptance_1,acceptance_2,acceptance_3"
    assert len(table) == 1 + 2 * 3
    assert model.trained_for in (folder / "drafter" / "README.md").read_text()
    assert not (folder / "features").exists()
    assert not (folder / "state.pt").exists()


# Catches: randomness that is not the seed's, and a seed that nothing follows.
def test_two_runs_of_one_seed_give_the_same_weights(recipe, tmp_path):
    file = recipe(steps=200, measure=100)
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        run(file, "--output-dir", tmp_path / name, "--set", f"seed={seed}")
    assert same(weights(tmp_path / "one"), weights(tmp_path / "two"))
    assert not same(weights(tmp_path / "one"), weights(tmp_path / "three"))


# Catches: an optimiser that begins anew, data that begin anew, weights that are kept and not read, a log with steps
# twice.
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(recipe, tmp_path):
    whole = recipe(steps=60, measure=10)
    run(whole, "--output-dir", tmp_path / "whole")
    command = "from specdec_plugins.distill.command import distill; distill()"
    process = subprocess.Popen([sys.executable, "-c", command, str(whole)], env=os.environ, stderr=subprocess.DEVNULL)
    state = tmp_path / "run" / "state.pt"
    while not state.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "run" / "results.json").exists()
    done = run(whole)
    assert "going on after step" in done.stderr
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "run"))
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("whole", "run")]
    steps = [[json.loads(line)["step"] for line in log] for log in logs]
    assert steps[0] == steps[1]


# Catches: answers made anew or twice after a kill, a last line that was cut off read as an answer, an answer that
# depends on those beside it.
def test_prompts_are_answered_once(recipe, tmp_path):
    lines = [json.dumps({"id": str(index), "prompt": f"prompt {index}"}) for index in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    changes = ["data.prompts=[prompts.jsonl]", "data.samples=[]", "sample.max_new_tokens=12", "sample.rows=4"]
    options = [part for change in changes for part in ("--set", change)]
    run(recipe(), *options)
    file = tmp_path / "run" / "samples.jsonl"
    whole = sorted(file.read_text().splitlines())
    assert len(whole) == 20
    (tmp_path / "run" / "results.json").unlink()
    file.write_text("\n".join(whole[:7]) + "\n" + whole[7][:20])
    run(recipe(), *options)
    assert sorted(file.read_text().splitlines()) == whole


# Catches: prompts of one file left out because another file's have their ids.
def test_prompts_of_two_files_that_would_be_one_are_refused(recipe, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "p.jsonl").write_text(json.dumps({"id": "0", "prompt": f"of {folder}"}))
    with pytest.raises(DataError, match=r"b/p\.jsonl: prompt 'p-0' is in another file of that name too; rename one"):
        run(recipe(), "--set", "data.prompts=[a/p.jsonl, b/p.jsonl]")


# Catches: the file of answers that is missed because no prompt was answered.
def test_prompts_that_leave_no_room_for_an_answer_are_one_sentence(recipe, tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "0", "prompt": "of a file"}))
    with pytest.raises(DataError, match=r"none of 1 fits in 0 tokens, .* sample\.max_new_tokens 1024 leaves of 1024"):
        run(recipe(), "--set", "data.prompts=[p.jsonl]", "--set", "sample.max_new_tokens=1024")


# Catches: prompts that are answered at length and then cut away, so that nothing is left to learn from.
def test_prompts_without_room_for_an_answer_are_left_out_before_they_are_answered(recipe, tmp_path):
    lines = [{"id": str(index), "prompt": "long " * 9 if index % 3 == 0 else "short"} for index in range(12)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--set", "data.prompts=[p.jsonl]", "--set", "data.max_tokens=16"]
    said = run(recipe(), *options, "--set", "sample.max_new_tokens=4").output
    assert "4 of 12 prompts leave no room for an answer within 16 tokens" in said
    assert len((tmp_path / "run" / "samples.jsonl").read_text().splitlines()) == 8
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "0", "prompt": "long " * 9}))
    with pytest.raises(
        DataError, match=r"data\.prompts: no prompt is shorter than 16 tokens; try more data\.max_tokens"
    ):
        run(recipe(), *options, "--overwrite")


# Catches: answers to what the prompts were before, taken for answers to what they are now.
def test_answers_to_other_prompts_are_not_gone_on_with(recipe, tmp_path):
    file, options = tmp_path / "p.jsonl", ["--set", "data.prompts=[p.jsonl]", "--set", "sample.max_new_tokens=4"]
    file.write_text(json.dumps({"id": "0", "prompt": "as it was"}))
    run(recipe(), *options)
    (tmp_path / "run" / "results.json").unlink()
    file.write_text(json.dumps({"id": "0", "prompt": "as it is"}))
    with pytest.raises(OutputError, match=r"answers other prompts than data\.prompts has now, such as 'p-0'; try"):
        run(recipe(), *options)


# Catches: a Ctrl-C that is heard only when all prompts are answered, which can take hours; answers lost by it.
def test_an_interrupt_while_the_target_answers_ends_the_run_and_keeps_what_is_there(recipe, tmp_path):
    lines = [json.dumps({"id": str(index), "prompt": f"prompt {index}"}) for index in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    changes = ["data.prompts=[prompts.jsonl]", "data.samples=[]", "sample.max_new_tokens=12", "sample.rows=4"]
    checked, stopped = read_recipe(str(recipe()), changes), []

    def tell(text):
        if text.startswith("sampling: 3 of 20"):
            stopped.append(2)

    file = tmp_path / "run" / "samples.jsonl"
    with Folder.open(tmp_path / "run", checked.to_dict(), overwrite=False) as folder:
        made = Run(checked, folder, tell, stopped)
        made.train()
    assert not made.done
    begun = file.read_text().splitlines()
    assert 3 <= len(begun) < 8
    run(recipe(), *(part for change in changes for part in ("--set", change)))
    assert file.read_text().splitlines()[: len(begun)] == begun
    assert len(file.read_text().splitlines()) == 20


# Catches: an inner size that is only found where the config calls it as Llama does.
def test_a_target_of_gpt2s_kind_gives_all_sizes(recipe, tmp_path):
    target = tmp_path / "target"
    tiny("gpt2").save_pretrained(target)
    file = recipe()
    content = yaml.safe_load(file.read_text())
    del content["drafter"]["intermediate_size"]
    content["data"]["samples"] = ["small.jsonl"]
    file.write_text(yaml.safe_dump(content))
    lines = [{"id": str(index), "prompt": [1, 2], "tokens": [index, index + 1, 3]} for index in range(40)]
    (tmp_path / "small.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(file, "--set", f"target.model={target}")
    assert checkpoint.describe(tmp_path / "run" / "drafter").shape.intermediate_size == 4 * 32


# Catches: a loss without a number that is written down, or trained on with.
@pytest.mark.parametrize("options", [{}, {"clip": 1e30}, {"measure": 1}], ids=str)
def test_numbers_beyond_all_bounds_end_the_run_with_a_sentence(recipe, options):
    with pytest.raises(RecipeError, match=r"numbers of step \d+ are not finite; try a smaller train\.learning_rate"):
        run(recipe(learning_rate=1e30, warm_up=0, **options))


# Catches: a drafter of a law that is not the target's, as all laws are computed from last rows and head alone.
def test_a_target_that_scales_its_logits_is_refused(recipe):
    with pytest.raises(CompatibilityError, match="its logits are not its last rows times its head, but scaled"):
        run(recipe(), "--set", "target.model=random:cohere")


# Catches: an option of the target that is read over, or fails in the first forward.
@pytest.mark.parametrize(
    ("change", "said"),
    [("dtype=float64", "is float64, and a drafter learns in float32"), ("graphs=compile", "makes no use of graphs")],
)
def test_options_of_the_target_that_training_has_no_use_for_are_refused(recipe, change, said):
    with pytest.raises((CompatibilityError, RecipeError), match=said):
        run(recipe(), "--set", f"target.{change}")


# Catches: other sizes than the recipe's that fail in a tensor, or are called by names that no recipe has; and
# a drafter that can only be trained on with texts that leave out the same ids as those of its first training.
def test_a_drafter_is_trained_on_with_other_texts(recipe, tmp_path):
    run(recipe())
    first = checkpoint.describe(tmp_path / "run" / "drafter").mask_token
    lines = [{"id": str(index), "prompt": [first, 2], "tokens": [first, index, index + 1]} for index in range(40)]
    (tmp_path / "others.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = ["data.samples=[others.jsonl]", f"drafter.start={tmp_path / 'run' / 'drafter'}"]
    run(recipe(), "--output-dir", tmp_path / "two", *(part for change in changes for part in ("--set", change)))
    assert checkpoint.describe(tmp_path / "two" / "drafter").mask_token == first
    changes += ["drafter.markov_rank=3", "drafter.intermediate_size=24"]
    with pytest.raises(CompatibilityError) as error:
        run(recipe(), "--output-dir", tmp_path / "three", *(part for one in changes for part in ("--set", one)))
    said = [line.partition(" is ")[0] for line in str(error.value).splitlines()]
    assert said == ["drafter.start: its intermediate_size", "drafter.start: its markov_rank"]


# Catches: a target in a dtype too small for it as a traceback of linear algebra.
def test_a_target_whose_logits_are_no_numbers_is_refused(recipe, tmp_path):
    model = copy.deepcopy(tiny("llama"))
    torch.nn.init.constant_(model.model.norm.weight, torch.nan)
    model.save_pretrained(tmp_path / "target")
    lines = [{"id": str(index), "prompt": [1, 2], "tokens": [index, 3, 4]} for index in range(40)]
    (tmp_path / "small.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(CompatibilityError, match=r"its logits are not finite in torch\.float32; try"):
        run(recipe(), "--set", f"target.model={tmp_path / 'target'}", "--set", "data.samples=[small.jsonl]")


# Catches: positions that the target does not have: a traceback where they are a table, features of nothing elsewhere.
def test_texts_are_cut_to_the_targets_context(recipe, tmp_path):
    tiny("gpt2", positions=16).save_pretrained(tmp_path / "target")
    lines = [{"id": str(index), "prompt": [1, 2], "tokens": [index] * (5 + index)} for index in range(40)]
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(recipe(), "--set", f"target.model={tmp_path / 'target'}", "--set", "data.samples=[short.jsonl]")
    counts = re.search(r"(\d+) texts of (\d+) tokens, (\d+) held out", done.stderr)
    texts, tokens, held = map(int, counts.groups())
    assert texts + held == 40
    assert tokens <= 16 * texts


# Catches: a folder that is written over, a run that goes on with another recipe, or with other texts than its features
# are of.
def test_a_folder_of_another_run_is_left_alone(recipe, tmp_path):
    run(recipe())
    with pytest.raises(OutputError, match="holds a finished run"):
        run(recipe())
    (tmp_path / "run" / "results.json").unlink()
    with pytest.raises(OutputError, match=r"train\.anchors: 3 there, 2 now"):
        run(recipe(anchors=2))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"id": "new", "prompt": [1], "tokens": [5, 6, 7]}) + "\n")
    with pytest.raises(OutputError, match="was begun with other texts; try"):
        run(recipe())


# Catches: what a crash of the machine leaves behind, as a traceback.
@pytest.mark.parametrize(
    "name", ["environment.json", "log.jsonl", "state.pt", "features/0.safetensors", "samples.jsonl"]
)
def test_a_damaged_file_of_a_run_is_one_sentence(recipe, tmp_path, name):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "0", "prompt": "a"}))
    options = ["--set", "data.prompts=[prompts.jsonl]", "--set", "sample.max_new_tokens=4"]
    run(recipe(), *options)
    (tmp_path / "run" / "results.json").unlink()
    (tmp_path / "run" / "features").mkdir()
    for number in range(9) if name.startswith("features") else [0]:
        (tmp_path / "run" / name.replace("0", str(number))).write_text("[]\n")
    with pytest.raises(OutputError, match=r"is damaged; try another|cannot be read or written: .* header"):
        run(recipe(), *options)


# Catches: a full disk as a traceback of whoever wrote last.
@pytest.mark.parametrize("name", ["keep", "log", "table"])
def test_a_folder_that_can_no_longer_be_written_is_one_sentence(recipe, tmp_path, monkeypatch, name):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Folder, name, full)
    with pytest.raises(OutputError, match=r"run: cannot be read or written: .*No space left on device; the same"):
        run(recipe())


# Catches: only the first of several mistakes told, a misspelt option that is read over.
def test_everything_wrong_with_a_recipe_is_said_at_once(recipe):
    with pytest.raises(RecipeError) as error:
        read_recipe(str(recipe(stepps=3, decay=2.0)), ["data.samples=[nowhere.jsonl]", "colour=red"])
    said = "\n".join(error.value.problems)
    assert "train.stepps: unknown option of section train; did you mean 'steps'?" in said
    assert "train.decay: got 2.0, wanted <= 1.0" in said
    assert "data.samples: no file 'nowhere.jsonl'" in said
    assert "colour: unknown section" in said
