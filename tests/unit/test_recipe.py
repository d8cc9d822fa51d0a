import json
import sys

import pytest
import yaml

from specdec.errors import DataError, RecipeError
from specdec.recipe import read_recipe
from specdec.yamlfile import dump, find, parse, shipped


def minimal():
    return {
        "target": {"model": "random:llama"},
        "drafters": [{"use": "prompt_lookup"}],
        "verifiers": [{"use": "standard"}],
        "data": {"file": "p.jsonl"},
    }


@pytest.fixture
def read(tmp_path):
    """Reads a recipe that is the minimal one, changed by a function or by overrides."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')

    def go(change=None, *overrides):
        content = minimal()
        if change is not None:
            change(content)
        path = tmp_path / "r.yaml"
        path.write_text(yaml.safe_dump(content))
        return read_recipe(str(path), overrides)

    return go


def problems(read, change=None, *overrides):
    with pytest.raises(RecipeError) as caught:
        read(change, *overrides)
    return caught.value.problems


# Catches: a section that has no default.
def test_the_minimal_recipe_is_valid(read):
    recipe = read()
    assert recipe.kv.use == "slab"
    assert recipe.scheduler.use == "continuous"
    assert recipe.report.baseline
    assert [sample.text for sample in recipe.samples] == ["a"]
    assert str(recipe.output_dir) == "runs/r"


# Catches: a validation that stops at the first problem, wrong paths, missing suggestions, laxness in types.
@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("targett=1", "targett: unknown section; did you mean 'target'?"),
        ("target.model=", "target.model: missing; give it in the recipe or with --set target.model=VALUE"),
        ("target.dtype=float31", "target.dtype: got 'float31', wanted one of auto, float32"),
        ("target.trust_remote_code=1", "target.trust_remote_code: got 1, wanted true or false"),
        ("target.revision=5", "target.revision: got 5, wanted text"),
        ("drafters.0.max_ngran=2", "drafters[0].max_ngran: unknown option of prompt_lookup; did you mean 'max_ngram'?"),
        ("drafters.0.max_ngram=x", "drafters[0].max_ngram: got 'x', wanted a whole number"),
        ("drafters.0.max_ngram=true", "drafters[0].max_ngram: got True, wanted a whole number"),
        ("drafters.0.max_ngram=2.0", "drafters[0].max_ngram: got 2.0, wanted a whole number"),
        ("drafters.0.min_ngram=9", "drafters[0].min_ngram: must be at most max_ngram = 3, got 9"),
        ("drafters.0.use=model", "drafters[0].model: missing; give it in the recipe or with --set drafters.0.model="),
        ("drafters.0.use=look", "drafters[0].use: drafters/look: unknown"),
        ("drafters.0.use=", "drafters[0].use: got None, wanted the name of one of drafters"),
        ("drafters=[]", "drafters: got [], wanted a list of at least one mapping"),
        ("verifiers=[standard]", "verifiers[0]: got 'standard', wanted a mapping; try {use: standard}"),
        ("verifiers.0.x=1", "verifiers[0].x: unknown option of standard; it has none"),
        ("verifiers=[{use: nucleus, theta: 2}]", "verifiers[0].theta: got 2.0, wanted <= 1.0"),
        ("verifiers=[{use: nucleus, theta: '1'}]", "verifiers[0].theta: got '1', wanted a number"),
        (
            "verifiers=[{use: typical, replacement: residul}]",
            "got 'residul', wanted one of residual, target, argmax; did you mean 'residual'?",
        ),
        ("verifiers=[{use: standard}, {use: standard}]", "verifiers[1]: is called 'standard' as verifiers[0] is"),
        ("kv.rows=0", "kv.rows: got 0, wanted >= 1"),
        # What takes the machine's memory, or overflows, before it is judged.
        ("kv.rows=1000000000000", "kv.rows: got 1000000000000, wanted <= 65536"),
        (f"kv.rows={10**22}", f"kv.rows: got {10**22}, wanted <= 65536"),
        (f"kv.tokens={10**12}", f"kv.tokens: got {10**12}, wanted <= 2147483647"),
        (f"sampling.temperature={10**400}", "sampling.temperature: a number is too large (int too large to convert"),
        # What has no JSON.
        ("sampling.temperature=.inf", "sampling.temperature: got inf, wanted finite numbers"),
        ("sampling.top_p=.nan", "sampling.top_p: got nan, wanted finite numbers"),
        ("verifiers=[{use: nucleus, theta: .nan}]", "verifiers[0].theta: got nan, wanted finite numbers"),
        ("data.chat_template_kwargs={a: [.nan]}", "data.chat_template_kwargs: got {'a': [nan]}, wanted finite numbers"),
        ("sampling.temperature=-1", "sampling.temperature: must be 0 (greedy)"),
        ("sampling.seed=1", "sampling.seed: unknown option; the recipe's own `seed`"),
        ("sampling.stop_ids=[a]", "sampling.stop_ids: got 'a', wanted a whole number"),
        ("seed=-1", "seed: got -1, wanted a whole number from 0"),
        ("data.limit=0", "data.limit: got 0, wanted >= 1"),
        ("data.file=absent.jsonl", "data.file: no file 'absent.jsonl'; looked in "),
        ('data.file="a\\0b"', r"data.file: no file 'a\x00b'; looked in "),
        (f"data.file={'x' * 300}", "data.file: no file 'xxx"),
        ("data.task=jsonk", "data.task: tasks/jsonk: unknown; did you mean 'jsonl'?"),
        ("data.chat_template=maybe", "data.chat_template: got 'maybe', wanted one of auto, True, False"),
        ("report.repeats=0", "report.repeats: got 0, wanted >= 1"),
        ("report=5", "report: got 5, wanted a mapping"),
    ],
)
def test_a_wrong_recipe_is_told_where_what_and_what_to_try(read, override, problem):
    found = problems(read, None, override)
    assert len(found) == 1
    assert problem in found[0]


# Catches: a check of either list alone; the records of both pairs would be pooled under "x + y + z".
def test_labels_of_combinations_are_unique(read):
    def change(content):
        content["drafters"] = [{"use": "prompt_lookup", "name": "x + y"}, {"use": "none", "name": "x"}]
        content["verifiers"] = [{"use": "standard", "name": "z"}, {"use": "greedy", "name": "y + z"}]

    assert problems(read, change) == [
        "drafters: 'x' with the verifier 'y + z' is called 'x + y + z', as 'x + y' with 'z' is, wanted a name for each"
        "; give one of them another `name`"
    ]


# Catches: a task that is trusted; two samples of one id would share one record.
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return []", r"gave none, wanted at least one"),
        ("return [Sample(id='a', text='x'), Sample(id='a', text='y')]", r"two samples have the id 'a'"),
        ("return ['text']", r"gave 'text', wanted a Sample"),
        ("return [Sample(id=1, text='x')]", r"gave Sample\(id=1.*a text as its id"),
        ("return 1 / 0", r"failed: ZeroDivisionError: division by zero; wanted a DataError"),
        ("return None", r"failed: TypeError"),
    ],
)
def test_a_task_that_misbehaves_is_named(read, tmp_path, body, message, request):
    module = f"task_{request.node.callspec.indices['body']}"
    (tmp_path / f"{module}.py").write_text(
        "from specdec.task import Sample, Task\nclass Mine(Task):\n"
        f"    def samples(self, file, limit):\n        {body}\n"
        "    def score(self, sample, completion):\n        return None\n"
    )
    with pytest.raises(DataError, match=message) as caught:
        read(None, f"data.task={module}:Mine")
    assert str(caught.value).startswith(f"task {module}:Mine: ")


# Catches: whatever a third-party class raises while it is made, shown by the error's name alone.
@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("MemoryError", "a number is too large (out of memory); try a smaller one"),
        ("OSError(36, 'File name too long', 'aaa')", "File name too long: aaa"),
    ],
)
def test_what_a_class_raises_is_a_problem_with_a_sentence(read, tmp_path, monkeypatch, error, said):
    monkeypatch.delitem(sys.modules, "huge", raising=False)
    (tmp_path / "huge.py").write_text(
        "from specdec_plugins.schedulers.static import Scheduler\nclass Huge(Scheduler):\n"
        f"    def __init__(self):\n        raise {error}\n"
        "    def admit(self, *_):\n        pass\n    __abstractmethods__ = frozenset()\n"
    )
    found = problems(read, None, "scheduler.use=huge:Huge")
    assert found == [f"scheduler: {said}"]


# Catches: everything that returns early.
def test_all_problems_are_said_at_once(read):
    def change(content):
        content["target"] = {}
        content["verifiers"] = [{"use": "nucleus", "theta": 0}, {"use": "typical", "epsilon": 0, "delta": -1, "x": 1}]
        content["data"]["file"] = "absent.jsonl"
        content["kv"] = {"use": "slab", "rows": "many"}

    found = problems(read, change)
    rules = ("verifiers[0].theta", "verifiers[1].epsilon", "verifiers[1].delta", "verifiers[1].x")
    places = ("target.model", *rules, "data.file", "kv.rows")
    assert all(any(line.startswith(f"{place}:") for line in found) for place in places)
    assert len(found) == len(places)


# Catches: sections that are silently empty.
def test_missing_sections_are_named(read):
    found = problems(read, lambda content: content.clear())
    assert [line.partition(":")[0] for line in found] == ["target", "drafters", "verifiers", "data"]


# Catches: a rule that cannot appear twice, and labels that do not say what differs.
def test_labels_are_unique_and_say_what_was_given(read):
    def change(content):
        content["verifiers"] = [
            {"use": "nucleus", "theta": 0.9},
            {"use": "nucleus", "theta": 0.95},
            {"use": "nucleus", "name": "nsd"},
        ]
        content["drafters"] = [{"use": "model", "model": "some/folder/tiny", "num_speculative_tokens": 3}]

    recipe = read(change)
    assert [entry.label for entry in recipe.verifiers] == ["nucleus(theta=0.9)", "nucleus(theta=0.95)", "nsd"]
    assert recipe.drafters[0].label == "model(model=tiny, num_speculative_tokens=3)"


# Catches: overrides that are not typed, that do not make a section, or that ignore list indices in brackets.
def test_overrides_are_yaml_and_may_make_what_is_missing(read):
    recipe = read(None, "sampling.temperature=1e-1", "drafters[0].max_ngram=5", "kv.rows=2", "target.revision=null")
    assert recipe.sampling.temperature == 0.1
    assert recipe.drafters[0].values["max_ngram"] == 5
    assert recipe.kv.make().rows == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nothing", "wanted KEY=VALUE"),
        ("drafters.3.x=1", "drafters has entries 0 to 0, got '3'"),
        ("target.model.x=1", "target.model is 'random:llama' and has no 'x'"),
        ("seed=[1", "--set seed:1:3: not YAML"),
        ("drafters.²=1", "drafters has entries 0 to 0, got '²'"),
        ("target.device_map=&x [*x]", "--set target.device_map:1:1: not YAML: found unconstructable recursive node"),
    ],
)
def test_an_override_that_leads_nowhere_is_an_error(read, override, message):
    assert message in problems(read, None, override)[0]


# Catches: PyYAML's habits: the last of two equal keys wins, 1e-3 is text; a syntax error without its line.
def test_yaml_is_read_without_its_pitfalls():
    assert parse("a: 1e-3", "x") == {"a": 0.001}
    with pytest.raises(RecipeError, match="x:2:1: not YAML: 'a' is given twice"):
        parse("a: 1\na: 2", "x")
    with pytest.raises(RecipeError, match="x:2:"):
        parse("a: 1\n b: [", "x")


# Catches: what PyYAML lets through as ValueError, KeyError, IndexError, TypeError or RecursionError, without its line.
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n? [b]\n: 2", "x:2:3: not YAML: got a sequence as a key, wanted text"),
        ("a:\n  {{b: 1}: 2}", "x:2:4: not YAML: got a mapping as a key, wanted text"),
        (f"a:\n  {'9' * 5000}", "x:2:3: not YAML: cannot read a value: ValueError: Exceeds the limit"),
        (f"a: 0x{'f' * 5000}", "x:1:4: not YAML: cannot read a value: ValueError: Exceeds the limit"),
        ("a: 2024-13-45", "x:1:4: not YAML: cannot read a value: ValueError: month must be in 1..12"),
        ("a: !!bool maybe", "x:1:4: not YAML: cannot read a value: KeyError: 'maybe'"),
        ("a: !!int ''", "x:1:4: not YAML: cannot read a value: IndexError"),
        ('a: "\\ud800"', "x:1:4: not YAML: cannot read a value: UnicodeEncodeError"),
        (f"a: {'[' * 3000}{']' * 3000}", "x: nested too deeply"),
        ("a: {<<: 5}", "x:1:9: not YAML: expected a mapping or list of mappings for merging"),
    ],
)
def test_what_yaml_cannot_give_is_told_with_its_line(text, message):
    with pytest.raises(RecipeError) as caught:
        parse(text, "x")
    assert str(caught.value).startswith(message)


# Catches: a merged key that is taken for one given twice, or that wins over the mapping's own.
def test_merge_keys_work():
    text = "a: &a {use: nucleus, theta: 0.9}\nb: {<<: *a, theta: 0.5}\nc: {<<: [*a, {k: 1}]}"
    assert parse(text, "x") == {
        "a": {"use": "nucleus", "theta": 0.9},
        "b": {"use": "nucleus", "theta": 0.5},
        "c": {"use": "nucleus", "theta": 0.9, "k": 1},
    }


# Catches: an override of one entry that changes the other, which YAML's alias made the same object.
def test_an_override_changes_one_place_only(read):
    def change(content):
        entry = {"use": "nucleus", "theta": 0.9}
        content["verifiers"] = [entry, entry]

    recipe = read(change, "verifiers.1.theta=0.5")
    assert [entry.values["theta"] for entry in recipe.verifiers] == [0.9, 0.5]


# Catches: a UnicodeDecodeError or an OSError with a traceback.
def test_a_recipe_that_cannot_be_read_is_an_error_of_the_recipe(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"a: \xff")
    with pytest.raises(RecipeError, match=r"latin\.yaml: cannot be read: .*wanted a YAML file in UTF-8"):
        read_recipe(str(path))
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(RecipeError, match="no such file"):
            read_recipe(name)


# Catches: looking in the current folder first.
def test_a_data_file_beside_the_recipe_wins(read, tmp_path, monkeypatch):
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "p.jsonl").write_text('{"prompt": "wrong"}\n')
    (other / "only.jsonl").write_text('{"prompt": "right"}\n')
    monkeypatch.chdir(other)
    assert read().samples[0].text == "a"
    assert read(None, "data.file=only.jsonl").samples[0].text == "right"


# Catches: a malformed row that is found only when models are loaded.
def test_a_malformed_row_is_found_by_reading_the_recipe(read, tmp_path):
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:1: no field"):
        read(None, "data.file=bad.jsonl")


# Catches: an option that is lost or changed on the way to config.yaml.
def test_the_resolved_recipe_reads_as_the_same_recipe(read, tmp_path):
    recipe = read(None, "verifiers=[{use: nucleus, theta: 0.9}]", "sampling.stop_ids=[3, 1]", "report.repeats=2")
    again = tmp_path / "again.yaml"
    again.write_text(dump(recipe.to_dict()))
    assert read_recipe(str(again)).to_dict() == recipe.to_dict()
    json.dumps(recipe.to_dict(), allow_nan=False)


# Catches: one object shared by several engines.
def test_an_entry_makes_a_new_object_each_time(read):
    scheduler = read().scheduler
    assert scheduler.make() is not scheduler.make()


# Catches: a shipped recipe that does not fit the schema, and package data that are not found.
def test_shipped_recipes_are_found_by_name():
    assert {"smoke", "pair"} <= set(shipped())
    assert len(read_recipe("smoke").samples) == 6
    models = ["target.model=random:llama", "drafters.0.model=random:llama"]
    assert len(read_recipe("pair", models).samples) == 12
    with pytest.raises(RecipeError) as caught:
        read_recipe("pair")
    assert [line.partition(":")[0] for line in caught.value.problems] == ["target.model", "drafters[0].model"]
    with pytest.raises(RecipeError, match="did you mean 'smoke'"):
        read_recipe("smok")


# Catches: a recipe of the paper that no longer fits the schema, or drafts more than its checkpoint's block.
@pytest.mark.parametrize(("name", "most"), [("qwen3-4b-dspark", 7), ("qwen3-8b-dspark", 7), ("qwen3-8b-dflash", 15)])
def test_recipes_of_the_paper_are_found_and_read(name, most, tmp_path):
    assert f"paper/{name}" in shipped()
    data = yaml.safe_load(find(f"paper/{name}").read_text())["data"]
    assert data["tasks"] == ["gsm8k", "humaneval", "mbpp", "mt_bench"]
    assert data["chat_template_kwargs"] == {"enable_thinking": False}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Say something."}))
    recipe = read_recipe(f"paper/{name}", [f"data={{task: jsonl, file: {tmp_path / 'rows.jsonl'}}}"])
    [drafter] = recipe.drafters
    assert drafter.use == name.rpartition("-")[2]
    assert drafter.make().num_speculative_tokens == most
    assert [(rule.use, rule.values.get("theta")) for rule in recipe.verifiers][2] == ("nucleus", 0.95)
    assert recipe.sampling.temperature == 1.0


# Catches: the shipped recipe winning over a file of the user's.
def test_a_path_wins_over_a_shipped_name(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smoke").write_text(yaml.safe_dump(minimal()))
    assert len(read_recipe("smoke").samples) == 1
