"""The drafter's own state: its cache, its positions, its limits, and what a run says about them."""

import json

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.cli import main
from specdec.law import Dense
from specdec.noise import Noise
from specdec.scheduler import Scheduler
from specdec.testing import random_model
from specdec.types import Draft, Scores
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.standard import Standard
from tests.families import prompts, tiny
from tests.faults.kit import NUMBERS, Watched, ask, build, counting, engine, facts, generate, serve

TEXT = (3, 1, 4, 1, 5, 9, 2)


def self_draft(k=4, family="llama"):
    return DraftModel(model=tiny(family), num_speculative_tokens=k)


# Catches: a draft cache without the last accepted draft or without the bonus, which only shows in acceptance.
@pytest.mark.parametrize("k", range(1, 9))
def test_a_target_that_drafts_for_itself_is_accepted_whole_at_every_length(k):
    for prompt in (TEXT, TEXT[:1]):
        done = serve(self_draft(k), ask(prompt, new=3 * (k + 1)))
        assert done.counters.num_per_length == {k + 1: 3}
        assert done.counters.acceptance_rate == 1.0


# Catches: a trim by one cell too many or too few, which grows with every rejection.
@pytest.mark.parametrize("seed", [0, 1], ids=["all accepted", "nearly all rejected"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_draft_cache_holds_the_committed_text_but_for_a_last_draft_it_never_read(family, seed):
    drafter = DraftModel(model=tiny(family, seed=seed), num_speculative_tokens=3)
    one = engine(drafter, family, rows=1)
    one.submit(ask(TEXT, new=40))
    whole, rejected = 0, 0
    while not one.scheduler.idle:
        events = one.step()
        if one.scheduler.idle or not events:
            continue
        row, full = one.scheduler.running[0], len(events[0].tokens) == 4
        assert drafter._draft.kv.lengths[row.slot] == row.cached - full
        whole, rejected = whole + full, rejected + (not full)
    assert (whole if seed == 0 else rejected) > 5


class EveryOther(Scheduler):
    """Lets a row draft in every second of its steps only."""

    def admit(self, waiting, running, slots):
        return min(waiting, slots)

    def budget(self, row, most):
        return min(most, row.room) if row.step % 2 == 0 else 0


# Catches: a first step after a prefill that is entered in another state than later ones.
@pytest.mark.parametrize("length", range(1, 8))
@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_the_first_step_after_a_prefill_drafts_like_any_other(chunk, length):
    done = serve(self_draft(3), ask(TEXT[:length], new=8), scheduler=Continuous(prefill_chunk=chunk))
    assert done.counters.num_per_length == {4: 2}


# Catches: steps without a draft that the drafter's cache never hears of.
def test_steps_without_a_draft_leave_no_hole_in_the_draft_cache():
    done = serve(self_draft(3), ask(TEXT, new=20), scheduler=EveryOther())
    assert done.counters.num_per_length == {4: 4, 1: 4}
    assert done.counters.acceptance_rate == 1.0
    assert done.counters.num_drafts == 4


# Catches: padded rows of a draft batch that read padding, which lowers acceptance without a wrong token.
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_acceptance_in_a_ragged_batch_is_that_of_each_row_alone(family):
    rows = [ask(prompt, new=20, name=str(index)) for index, prompt in enumerate(prompts())]
    together = engine(build("model", family=family), family).generate(rows)
    for row, done in zip(rows, together, strict=True):
        assert facts(done) == facts(serve(build("model", family=family), row, family=family))
    selves = engine(self_draft(4, family), family).generate(rows)
    assert {done.counters.acceptance_rate for done in selves} == {1.0}


class Deaf(Watched):
    """Hears nothing of what is cached before the first token, as when cells come from elsewhere."""

    def observe(self, batch, kept):
        if any(kept.tokens):
            self.inner.observe(batch, kept)


# Catches: drafts without a context where the drafter did not see the prompt go by.
@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_drafter_that_missed_the_prompt_reads_it_before_it_drafts(length):
    done = serve(Deaf(self_draft(4)), ask(TEXT[:length], new=20))
    assert done.counters.num_per_length == {5: 4}


# Catches: two caches that must have one length, and a crash or worse drafts where they do not.
@pytest.mark.parametrize("lost", [1, 3, 100])
def test_a_draft_cache_that_is_behind_catches_up(lost):
    drafter = self_draft(4)
    one = engine(drafter, rows=1)
    one.submit(ask(TEXT, new=20))
    tokens = []
    while not one.scheduler.idle:
        tokens += [token for event in one.step() for token in event.tokens]
        kv = drafter._draft.kv
        kv.truncate((0,), (max(0, kv.lengths[0] - lost),))
    assert tuple(tokens) == generate(tiny("llama"), TEXT, 20)
    assert one.steps == 4


# Catches: acceptance that is off by a position or a row: a loop over the same numbers and golden counts both differ.
def test_acceptance_on_a_recorded_trace_is_the_golden_one():
    p, q = random_model(6, 4, 11), random_model(6, 4, 12)
    rows, nodes = 4000, 3
    noise = Noise(tuple(range(rows)), (0,) * rows)
    draws, uniform = noise.uniform("draft", nodes), noise.uniform("accept", nodes)
    tokens, codes = torch.zeros((rows, nodes), dtype=torch.int64), torch.zeros((rows, nodes + 1), dtype=torch.int64)
    for node in range(nodes):
        law = q[node][codes[:, node]]
        tokens[:, node] = (law.cumsum(-1) <= draws[:, node : node + 1]).sum(-1).clamp(max=5)
        codes[:, node + 1] = codes[:, node] * 6 + tokens[:, node]
    probs = torch.stack([p[node][codes[:, node]] for node in range(nodes + 1)], 1)
    law = torch.stack([q[node][codes[:, node]] for node in range(nodes)], 1)
    fed = torch.cat([tokens[:, :1], tokens], 1)
    scores = Scores(fed, probs.log(), probs, {}, torch.ones(rows, dtype=torch.bool))
    verdict = Standard().verify(Draft(tokens, torch.full((rows,), nodes), law=Dense(law)), scores, noise, None)
    by_hand = []
    for row in range(rows):
        length = 0
        while length < nodes:
            x = int(tokens[row, length])
            if not float(uniform[row, length]) < float(probs[row, length, x]) / float(law[row, length, x]):
                break
            length += 1
        by_hand.append(length)
    assert verdict.lengths.tolist() == by_hand
    assert torch.bincount(verdict.lengths).tolist() == GOLDEN


GOLDEN = [3238, 392, 178, 192]


def yarn(seed=1):
    """A model whose rotary positions are scaled."""
    options = {**tiny("llama").config.to_dict(), "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24,
    }}  # fmt: skip
    options.pop("model_type")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **options)).eval()
    model.load_state_dict(tiny("llama", seed=seed).state_dict())
    model.generation_config.eos_token_id = None
    return model


# Catches: positions of the draft model that are the target's, or without the scaling it was trained with.
def test_a_draft_model_keeps_its_own_rotary_scaling():
    scaled = yarn()
    alone = generate(scaled, TEXT, 30)
    assert alone != generate(tiny("llama", seed=1), TEXT, 30)
    drafter = Watched(DraftModel(model=scaled, num_speculative_tokens=6))
    done = serve(drafter, ask(TEXT, new=30))
    assert done.tokens == generate(tiny("llama"), TEXT, 30)
    assert tuple(drafter.drafts[0].tokens[0].tolist()) == alone[:6]
    done = serve(DraftModel(model=scaled, num_speculative_tokens=4), ask(TEXT, new=40), model=scaled)
    assert done.counters.num_per_length == {5: 8}
    assert done.tokens == generate(scaled, TEXT, 40)


# Catches: drafts beyond the block a drafter was made for, verified all the same.
def test_a_draft_longer_than_the_drafter_declares_is_clipped_and_counted():
    drafter = Watched(counting(9, num_speculative_tokens=3))
    drafter.inner.script = lambda tokens, budget: [tokens[-1] + 1 + i for i in range(9)]
    done = serve(drafter, ask(new=12))
    assert {budget for batch in drafter.asked for budget in batch.budget} == {3}
    assert done.tokens == NUMBERS[:12]
    counters = done.counters
    assert (counters.num_draft_tokens, counters.num_clipped) == (9, 3 * 6)
    assert len(counters.num_drafted_per_pos) == 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs of one prompt each, the third with another prompt: their JSON files and their resolved recipe."""
    folder = tmp_path_factory.mktemp("runs")
    found = []
    for number, text in enumerate(("Once upon a time", "Once upon a time", "Once upon a time ")):
        data, out = folder / f"{number}.jsonl", folder / str(number)
        data.write_text(json.dumps({"prompt": text}) + "\n", encoding="utf-8")
        arguments = ["run", "smoke", "--quiet"]
        for setting in (
            "drafters=[{use: prompt_lookup}]",
            "verifiers=[{use: standard}]",
            "sampling.max_new_tokens=2",
            f"data.file={data}",
            f"output_dir={out}",
        ):
            arguments += ["--set", setting]
        result = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.stderr
        files = {name: (out / name).read_text(encoding="utf-8") for name in ("environment.json", "results.json")}
        config = (out / "config.yaml").read_text(encoding="utf-8")
        found.append({name: json.loads(text) for name, text in files.items()} | {"config.yaml": config})
    return found


# Catches: results of two renderings of one file, by template or mode, that cannot be told apart.
def test_a_run_records_a_hash_of_what_its_prompts_became(runs):
    hashes = [files["environment.json"]["prompts"] for files in runs]
    assert hashes[0] == hashes[1] != hashes[2]
    assert all(text.startswith("sha256:") for text in hashes)


# Catches: draft lengths and thresholds that hide in defaults; an acceptance without how much was drafted.
def test_a_run_records_every_default_of_its_drafters_and_how_much_they_drafted(runs):
    for option in ("num_speculative_tokens: 10", "max_ngram: 3", "min_ngram: 1"):
        assert option in runs[0]["config.yaml"]
    counters = runs[0]["results.json"]["rows"][-1]["counters"]
    assert {"num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_steps"} <= counters.keys()


# Catches: a draft length at which text or acceptance at one depth differ from all others.
@pytest.mark.parametrize("k", range(1, 9))
def test_at_every_draft_length_an_oracle_is_right_at_every_depth(k):
    done = serve(counting(k), ask(new=3 * (k + 1)))
    assert done.tokens == NUMBERS[: 3 * (k + 1)]
    assert done.counters.num_accepted_tokens_per_pos == done.counters.num_drafted_per_pos == [3] * k
