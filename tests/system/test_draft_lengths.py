"""Draft lengths that pay, in the engine: the same tokens as with any other lengths, and a drafter that falls behind."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from attrs import evolve

from specdec import Engine, Request, Sampling, Target
from specdec.comparison import compare
from specdec.costs import Costs
from specdec.recipe import read_recipe
from specdec_plugins.drafters import model
from specdec_plugins.drafters.layer_skip import LayerSkip
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.drafters.prompt_lookup import PromptLookup
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.adaptive import Adaptive
from specdec_plugins.verifiers.standard import Standard
from tests.families import greedy, prompts, tiny
from tests.faults.kit import Forwards, Watched, own
from tests.scripted import Scripted, oracle

NEW = 24
# A draft costs little and a longer verification nothing, or much: lengths go up, or go up and down.
CHEAP = Costs(draft={1: {1: 0.01, 4: 0.04}}, verify={1: {0: 1.0, 4: 1.1}}, rest={}, catch_up=0.001)
DEAR = Costs(draft={1: {1: 0.2, 4: 0.8}}, verify={1: {0: 1.0, 4: 1.5}}, rest={}, catch_up=0.02)
DRAFTERS = {
    "model": lambda family: DraftModel(model=tiny(family, seed=1), num_speculative_tokens=4),
    "self": lambda family: DraftModel(model=tiny(family), num_speculative_tokens=4),
    "layer_skip": lambda family: LayerSkip(num_speculative_tokens=4),
    "prompt_lookup": lambda family: PromptLookup(num_speculative_tokens=4),
    "wrong_later": lambda family: Scripted(script=oracle(greedy(family, NEW), prompts(), 4, wrong_at=2)),
}


def decode(family, drafter, scheduler, rows=4, verifier=None, **sampling):
    target = Target(tiny(family), kv=Slab(rows=rows, tokens=64))
    engine = Engine(target, drafter, verifier or Standard(), scheduler)
    asked = Sampling(**{"temperature": 0, "max_new_tokens": NEW, **sampling})
    return engine, engine.generate([Request(prompt=prompt, sampling=asked) for prompt in prompts()])


# Catches: budgets of another row, a draft cache with holes where the drafter was not asked, rows that join late.
@pytest.mark.parametrize(
    ("family", "drafter", "rows", "costs"),
    [
        pytest.param(
            family, drafter, rows, costs, id=f"{family}-{drafter}-{rows}-{name}",
            marks=() if family == "llama" and rows != 2 and (turn + rows + (name == "dear")) % 2 else pytest.mark.full,
        )
        for family in ("llama", "gemma3")
        for turn, drafter in enumerate(DRAFTERS)
        for rows in (1, 2, 4)
        for name, costs in (("cheap", CHEAP), ("dear", DEAR))
    ],
)  # fmt: skip
def test_greedy_tokens_are_those_of_any_other_scheduler(family, drafter, rows, costs):
    scheduler = Adaptive(costs=costs, prefill_chunk=5)
    _, completions = decode(family, DRAFTERS[drafter](family), scheduler, rows)
    assert [completion.tokens for completion in completions] == list(greedy(family, NEW))


# Catches: a length that stays at its first value, one that costs the drafts of a perfect drafter.
def test_a_perfect_drafter_soon_drafts_its_longest():
    engine, completions = decode("llama", DRAFTERS["self"]("llama"), Adaptive(costs=CHEAP))
    assert {completion.counters.acceptance_rate for completion in completions} == {1.0}
    assert engine.steps <= 9  # five would do for 24 tokens, if it had known


# Catches: prompts read by a draft model that is hardly ever asked; a prompt that is not read when it is.
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_draft_model_reads_a_prompt_when_it_is_first_asked(family, monkeypatch):
    monkeypatch.setattr(model, "_CHUNK", 3)
    body = own(family)
    drafter = DraftModel(model=body, num_speculative_tokens=4)
    dear = evolve(CHEAP, catch_up=9.0)
    _, completions = decode(family, drafter, Adaptive(costs=dear), max_new_tokens=6)
    assert [completion.tokens for completion in completions] == [tokens[:6] for tokens in greedy(family, NEW)]
    # A prompt of one token is all that is read: the drafter has nothing to read of it.
    assert [completion.counters.num_drafts > 0 for completion in completions] == [True, False, False, False]
    with Forwards(body) as seen:
        _, completions = decode(family, DraftModel(model=body, num_speculative_tokens=4), Adaptive(costs=CHEAP))
    widths = [forward["ids"].shape[1] for forward in seen.inputs]
    assert max(widths[-20:]) <= 4  # three tokens and the pending one
    assert {completion.counters.acceptance_rate for completion in completions} == {1.0}


# Catches: a target that is asked about columns that were trimmed, a law that is left longer than its tokens.
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_target_is_not_asked_about_what_was_trimmed(temperature):
    def unsure(draft, batch):
        confidence = torch.full(draft.tokens.shape, 0.0)
        return evolve(draft, confidence=confidence)

    body = own()
    target = Target(body, kv=Slab(rows=4, tokens=64))
    drafter = Watched(DraftModel(model=tiny("llama"), num_speculative_tokens=4), change=unsure)
    engine = Engine(target, drafter, Standard(), Adaptive(costs=CHEAP))
    with Forwards(body) as seen:
        completions = engine.generate(
            [Request(prompt=p, sampling=Sampling(temperature=temperature, max_new_tokens=NEW)) for p in prompts()]
        )
    assert max(draft.tokens.shape[1] for draft in drafter.drafts) == 4
    assert {forward["ids"].shape[1] for forward in seen.inputs[1:]} <= {1, 2}
    assert {completion.counters.acceptance_rate for completion in completions} == {1.0}
    if not temperature:
        assert [completion.tokens for completion in completions] == list(greedy("llama", NEW))


# Catches: a page whose code or whose table drifted from what it shows.
def test_the_page_s_examples_work():
    page = (Path(__file__).parents[2] / "docs" / "draft-lengths.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found = {}
    exec(compile(code, "draft-lengths.md", "exec"), found)
    assert found["engine"].generate([Request(prompt=(1, 2), sampling=Sampling(max_new_tokens=4))])
    recipe = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    assert Adaptive(costs=recipe["scheduler"]["costs"]).price("model", None).catch_up == 0.009


RECIPE = """
target: {model: "random:llama", dtype: float32}
drafters: [{use: model, name: small, model: "random:llama:1", num_speculative_tokens: 3}, {use: prompt_lookup}]
verifiers: [{use: standard}, {use: nucleus}]
kv: {use: slab, rows: 2, tokens: 96}
scheduler: {use: "specdec_plugins.schedulers.adaptive:Adaptive"}
sampling: {temperature: 1.0, max_new_tokens: 12}
data: {file: p.jsonl}
output_dir: out
"""


# Catches: costs measured for each rule anew or not written, results that cannot be given to another run.
def test_a_run_measures_costs_once_for_each_drafter_and_can_be_given_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "abc abc"}\n{"prompt": "hello"}\n')
    (tmp_path / "r.yaml").write_text(RECIPE)
    compare(read_recipe("r.yaml"))
    costs = json.loads((tmp_path / "out" / "results.json").read_text())["costs"]
    assert list(costs) == ["small", "prompt_lookup"]
    assert set(costs["small"]["verify"]) == {"1", "2"}
    assert costs["small"]["catch_up"] > 0 == costs["prompt_lookup"]["catch_up"]
    monkeypatch.setattr("specdec.pricing.measure", None)
    (tmp_path / "again.yaml").write_text(RECIPE.replace('Adaptive"}', f'Adaptive", costs: {json.dumps(costs)}}}'))
    texts = []
    for name in ("again", "more"):
        compare(read_recipe("again.yaml", [f"output_dir={name}"]))
        records = (tmp_path / name / "samples.jsonl").read_text().splitlines()
        texts.append([(one["run"], one["counters"], one["tokens"]) for one in map(json.loads, records)])
        assert json.loads((tmp_path / name / "results.json").read_text())["costs"] == costs
    assert texts[0] == texts[1]
