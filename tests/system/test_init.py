"""`specdec init`: a recipe that is valid as it stands, and nothing that exists is lost."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from specdec import loading, registry, starter, target
from specdec.cli import main
from specdec.options import describe
from specdec.recipe import read_recipe
from specdec_plugins.drafters import model
from tests.block_checkpoints import deepspec, write, z_lab

DRAFTERS = ["random:llama:1", *sorted(set(registry.names("drafters")) - {"model", "dspark", "dflash"})]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def specdec(*arguments, code=0):
    result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.stderr
    return result


def refused(*arguments, code):
    result = specdec("init", *arguments, code=code)
    assert result.stdout == ""
    [error] = result.stderr.splitlines()
    return error


# Catches: an option without a default, a value that YAML reads as something else, a prompts file that is not found.
@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_validate_accepts_the_recipe_as_it_stands(drafter, monkeypatch):
    for module in (loading, target, model):  # all that know it by name
        monkeypatch.setattr(module, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    said = specdec("init", "random:llama", *([] if drafter is None else [drafter])).stdout
    assert said == "recipe.yaml and prompts.jsonl: written; specdec run recipe.yaml runs it\n"
    assert "12 prompts x 1 repeats x 4 rows (1 drafters x 3 verifiers" in specdec("validate", "recipe.yaml").stdout
    [entry] = read_recipe("recipe.yaml").drafters
    assert entry.use == ("prompt_lookup" if drafter is None else "model" if ":" in drafter else drafter)
    assert entry.label == entry.use


# Catches: an option that is left out, a default that differs from the class's own, a section or option without a word.
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_option_stands_there_with_its_default_and_what_it_means(drafter):
    text = specdec("init", "random:llama", drafter, "--output", "-").stdout
    words = " ".join(text.replace("#", " ").split())
    entries = [("drafters", "model" if ":" in drafter else drafter), *(("verifiers", rule) for rule in starter.RULES)]
    for kind, use in (*entries, ("kv", "slab"), ("schedulers", "continuous"), ("tasks", "jsonl")):
        for option in describe(registry.load(kind, use)):
            assert f"{option.name}:" in text
            assert " ".join(option.text.split()) in words
    lines = text.splitlines()
    sections = [index for index, line in enumerate(lines) if line[:1].isalpha()]
    assert len(sections) == 10
    assert all(lines[index - 1].startswith("# ") for index in sections)
    Path("r.yaml").write_text(text)
    recipe = read_recipe("r.yaml")
    for entry in (*recipe.verifiers, recipe.kv, recipe.scheduler, recipe.task):
        made = entry.cls()
        assert entry.values == {option.name: _plain(getattr(made, option.name)) for option in describe(entry.cls)}


def _plain(value):
    return list(value) if isinstance(value, tuple | set | frozenset) else value


# Catches: a recipe that validates and cannot be run.
def test_the_recipe_of_a_pair_runs_to_its_end():
    specdec("init", "random:llama", "random:llama:1")
    done = specdec("run", "recipe.yaml", "--set", "sampling.max_new_tokens=4", "--limit", "2", "--quiet")
    last = json.loads(done.stdout)
    assert last["output_dir"] == "runs/recipe"
    assert [row["label"] for row in last["rows"]] == ["autoregressive", *(f"model + {rule}" for rule in starter.RULES)]
    assert all(row["errors"] == 0 for row in last["rows"])


# Catches: an existing recipe, or prompts of the user's, that are lost; half of the two files written.
def test_what_exists_is_never_overwritten():
    Path("recipe.yaml").write_text("mine")
    error = refused("random:llama", code=8)
    assert error == "error: recipe.yaml: exists and is not overwritten; try another --output, or remove it"
    assert [path.name for path in Path().iterdir()] == ["recipe.yaml"]
    Path("prompts.jsonl").write_text('{"prompt": "mine"}\n')
    error = refused("random:llama", "--output", "other.yaml", code=8)
    assert error.startswith("error: prompts.jsonl: exists and is not overwritten; use it with --file prompts.jsonl")
    assert not Path("other.yaml").exists()
    specdec("init", "random:llama", "--output", "other.yaml", "--file", "prompts.jsonl")
    assert [sample.text for sample in read_recipe("other.yaml").samples] == ["mine"]
    assert Path("recipe.yaml").read_text() == "mine"


# Catches: a second recipe in a folder refused because of the prompts that the first one brought.
def test_the_shipped_prompts_serve_several_recipes():
    specdec("init", "random:llama")
    said = specdec("init", "random:llama", "layer_skip", "--output", "second.yaml").stdout
    assert said == "second.yaml: written; specdec run second.yaml runs it\n"
    assert len(read_recipe("second.yaml").samples) == 12


# Catches: a path that only the folder knows in which init was called.
def test_the_prompts_are_found_from_any_folder(tmp_path, monkeypatch):
    for name in ("recipes", "data"):
        Path(name).mkdir()
        Path(name, "p.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
        specdec("init", "random:llama", "--file", f"{name}/p.jsonl", "--output", f"recipes/{name}.yaml")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for name in ("recipes", "data"):
        assert [sample.text for sample in read_recipe(f"../recipes/{name}.yaml").samples] == [name]
    assert "\n  file: p.jsonl  #" in (tmp_path / "recipes/recipes.yaml").read_text()


# Catches: files made by a recipe that only goes to stdout.
def test_a_dash_prints_and_writes_nothing():
    text = specdec("init", "random:llama", "--output", "-").stdout
    assert list(Path().iterdir()) == []
    Path("r.yaml").write_text(text)
    assert len(read_recipe("r.yaml").samples) == 12


# Catches: a mistyped path or name that is written down, to fail only when the recipe is run.
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("./absent",), 2, r"TARGET: no such folder or file: './absent'; looked in "),
        (("/absent/model",), 2, r"TARGET: no such folder or file: '/absent/model'; try "),
        (("absent.gguf",), 2, "TARGET: no such folder or file: 'absent.gguf'"),
        (("",), 2, "TARGET: no such folder or file: ''"),
        (("random:llama", "a/b/c"), 2, "DRAFTER: no such folder or file: 'a/b/c'"),
        (("random:llama", "promt_lookup"), 2, "DRAFTER: no drafter 'promt_lookup'; did you mean 'prompt_lookup'?"),
        (("random:llama", "model"), 2, "DRAFTER: 'model' drafts with a model; give that model instead"),
        (("random:llama", "dflash"), 2, "DRAFTER: 'dflash' drafts with a checkpoint; give the folder of one instead"),
        (("random:llama", "--output", "."), 8, ".: is a folder, wanted a file"),
        (("random:llama", "--output", "absent/r.yaml"), 8, "absent/r.yaml: there is no folder 'absent'"),
        (("random:llama", "--file", "absent.jsonl"), 7, "absent.jsonl: cannot be read: "),
        (("random:llama", "--file", "."), 7, "--file .: is a folder, wanted a file"),
    ],
)
def test_what_cannot_become_a_recipe_is_one_sentence(arguments, code, said):
    assert refused(*arguments, code=code).startswith(f"error: {said}")
    assert list(Path().iterdir()) == []


# Catches: the folder of a block drafter taken for a model that decodes by itself.
@pytest.mark.parametrize(("config", "use"), [(deepspec(), "dspark"), (z_lab(), "dflash")])
def test_a_folder_with_a_block_drafter_is_drafted_with_by_the_one_that_reads_it(config, use, tmp_path):
    folder = write(tmp_path / "drafter", config)
    specdec("init", "random:qwen3", str(folder))
    [entry] = read_recipe("recipe.yaml").drafters
    assert (entry.use, entry.values["model"]) == (use, str(folder))
    assert entry.values["num_speculative_tokens"] == (5 if use == "dspark" else 4)


# Catches: a hub id of one or two parts, or a folder of the user's, refused.
@pytest.mark.parametrize("name", ["gpt2", "org/name", "./there", "there/it/is", "random:llama:3"])
def test_a_hub_id_and_an_existing_folder_are_taken(name):
    Path("there/it/is").mkdir(parents=True)
    specdec("init", name)
    assert read_recipe("recipe.yaml").target.model == name
