import json
import math
import re
import time

import pytest
import torch
from click.testing import CliRunner

import specdec_plugins.drafters.model
from specdec import doctor, findings, stopwatch
from specdec.cli import main
from specdec.costs import predict
from specdec.doctor import examine
from specdec.errors import CompatibilityError, DataError, ModelError, PluginError, RecipeError, RequestError
from specdec.given import section_of
from specdec.loading import load
from specdec.nearties import difference, reference, tolerance
from specdec.stopwatch import Watched, follow, time_steps
from specdec.target import Target
from specdec.types import Request, Sampling
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.drafters.none import NoDraft
from specdec_plugins.drafters.prompt_lookup import PromptLookup
from specdec_plugins.kv.slab import Slab
from specdec_plugins.verifiers.standard import Standard
from tests.block_checkpoints import deepspec, write
from tests.families import greedy, prompts, tiny
from tests.scripted import Scripted, oracle

TEXTS = ["once upon a time", "def main():"]
FEW = Sampling(max_new_tokens=6, temperature=1.0)
GREEDY = Sampling(max_new_tokens=24, temperature=0.0)


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    """Three rounds of every width are enough here, and nothing lands in the checkout."""
    monkeypatch.chdir(tmp_path)
    original = stopwatch.time_steps

    def short(*arguments, rounds, seconds):
        return original(*arguments, rounds=3, seconds=seconds)

    monkeypatch.setattr(doctor, "time_steps", short)


def pair(seed=1):
    """A target and a draft model, loaded, with tokenizers of their own."""
    return (*load("random:llama"), *load(f"random:llama:{seed}"))


def look(model="random:llama", tokenizer=None, *, sampling=FEW, **options):
    return examine(model, tokenizer, prompts=TEXTS, sampling=sampling, **options)


def by_name(examination):
    return {finding.name: finding for finding in examination.findings}


def specdec(*arguments):
    return CliRunner().invoke(main, ["doctor", *arguments], catch_exceptions=False)


# Catches: a finding that is left out, an order in which later ones rest on what was not looked at yet.
def test_a_good_pair_gets_every_finding():
    told = []
    found = look(draft_model="random:llama:1", tell=told.append, rows=2)
    assert [finding.name for finding in found.findings] == [
        "target",
        "generation config",
        "draft model",
        "tokenizers",
        "context",
        "preflight",
        "memory",
        "self-draft",
        "equality",
        "costs",
        "acceptance",
        "verdict",
    ]
    assert told == found.findings
    assert {finding.outcome for finding in found.findings[:9]} == {"ok"}
    assert found.error is None
    low, high = found.prediction.interval
    assert 0 < low <= high
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["speedup"] == found.prediction.speedup


# Catches: a model loaded for every engine, or once more by the drafter.
def test_each_model_is_loaded_once(monkeypatch):
    loaded = []

    def counted(name, **options):
        loaded.append((name, options.get("dtype"), options.get("device")))
        return load(name, **options)

    monkeypatch.setattr(doctor, "load", counted)
    monkeypatch.setattr(specdec_plugins.drafters.model, "load", counted)
    look(draft_model="random:llama:1", load_options={"dtype": "float64"})
    assert loaded == [("random:llama", "float64", None), ("random:llama:1", "float64", "cpu")]


# Catches: weights, configs or a forward that are changed for the examination and stay so.
def test_the_models_stay_as_they_were():
    model, tokenizer, draft, own = pair()
    for one in (model, draft):
        one.generation_config.repetition_penalty = 1.3
    before = [(dict(vars(one)), {k: v.clone() for k, v in one.state_dict().items()}) for one in (model, draft)]
    configs = [(one.generation_config.to_dict(), one.config.to_dict()) for one in (model, draft)]
    look(model, tokenizer, draft_model=draft, draft_tokenizer=own, layer_skip=False)
    for one, (attributes, weights), said in zip((model, draft), before, configs, strict=True):
        assert {key: id(value) for key, value in vars(one).items()} == {key: id(v) for key, v in attributes.items()}
        assert all(torch.equal(value, weights[name]) for name, value in one.state_dict().items())
        assert (one.generation_config.to_dict(), one.config.to_dict()) == said


# Catches: a target that cannot be rolled back examined as if it could.
def test_a_target_that_is_refused_ends_the_examination():
    model, tokenizer = load("random:llama")
    model.config._attn_implementation = "flash_attention_2"
    found = look(model, tokenizer)
    assert [(finding.name, finding.outcome) for finding in found.findings] == [("target", "failure")]
    assert isinstance(found.error, ModelError)
    assert "flash_attention_2" in found.findings[0].text


# Catches: sliding layers counted as full ones, a window that is nobody's.
def test_kinds_of_layers_are_told():
    kinds = {
        family: findings.model("target", Target(tiny(family), kv=Slab(rows=1, tokens=8)))
        for family in ("llama", "mistral", "gemma3")
    }
    assert kinds["llama"].figures["sliding_layers"] == 0
    assert "2 layers of full attention" in kinds["llama"].text
    assert kinds["mistral"].figures["sliding_layers"] == 2
    assert (kinds["gemma3"].figures["layers"], kinds["gemma3"].figures["sliding_layers"]) == (3, 2)
    assert "window of 8" in kinds["gemma3"].text


# Catches: settings of the checkpoint that are dropped in silence, and ends of a text called unused.
def test_what_is_not_taken_from_the_generation_config_is_told():
    model, tokenizer = load("random:llama")
    target = Target(model, tokenizer, kv=Slab(rows=1, tokens=8))
    assert findings.generation_settings(target).outcome == "ok"
    model.generation_config.update(repetition_penalty=1.5, top_k=7, do_sample=True, eos_token_id=[256, 3])
    found = findings.generation_settings(target)
    assert found.outcome == "note"
    assert found.figures["unused"] == {"repetition_penalty": "1.5", "top_k": "7"}


def renamed(*swapped):
    """The byte tokenizer with two ids that have changed places."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    _, tokenizer = load("random:llama")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    words = {index: word for word, index in state["model"]["vocab"].items()}
    one, other = swapped
    state["model"]["vocab"] |= {words[one]: other, words[other]: one}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<eos>")


# Catches: ids compared by their number alone, only the first difference counted, an examination that goes on.
def test_tokenizers_that_differ_are_a_failure():
    model, tokenizer, draft, _ = pair()
    found = look(model, tokenizer, draft_model=draft, draft_tokenizer=renamed(40, 70))
    assert [finding.name for finding in found.findings][-1] == "tokenizers"
    last = found.findings[-1]
    assert (last.outcome, found.error.exit_code) == ("failure", 5)
    assert (last.figures["different"], last.figures["shared"]) == (2, 257)
    first = last.figures["first"][0]
    assert (first["id"], first["target"], first["draft"]) == (
        40,
        tokenizer.convert_ids_to_tokens(40),
        tokenizer.convert_ids_to_tokens(70),
    )
    assert repr(first["draft"]) in last.text


# Catches: ids of one side only taken for an error, or not told.
def test_ids_that_one_side_names_are_a_note():
    model, tokenizer, draft, own = pair()
    own.add_tokens(["<one>", "<two>"])
    sides = [Target(one, words, kv=Slab(rows=1, tokens=8)) for one, words in ((model, tokenizer), (draft, own))]
    found = findings.tokenizers(*sides)
    assert (found.outcome, found.figures["target_only"], found.figures["draft_only"]) == ("note", 0, 2)
    assert findings.tokenizers(Target(model, kv=Slab(rows=1, tokens=8)), sides[1]).outcome == "warning"


# Catches: a draft model's context mixed up with the target's, the wrong reason where texts end.
def test_contexts_are_compared():
    target, short = (Target(tiny("llama", positions=size), kv=Slab(rows=1, tokens=8)) for size in (96, 40))
    assert findings.contexts(target, target, 10, 20, 30).outcome == "ok"
    warned = findings.contexts(target, short, 10, 40, 50)
    assert warned.outcome == "warning"
    assert "past 40 tokens a row gets no drafts" in warned.text
    assert findings.contexts(target, short, 10, 20, 40).outcome == "ok"
    assert findings.contexts(target, target, 10, 100, 110).outcome == "note"
    for longest, new, tokens in ((96, 4, 100), (10, 20, 29)):
        refused = findings.contexts(target, None, longest, new, tokens)
        assert (refused.outcome, refused.error.exit_code) == ("failure", 6)
    assert "--tokens 30" in refused.text


# Catches: bytes guessed from a config, rows or tokens left out of the product, weights that are there counted again.
def test_memory_is_that_of_real_storage(monkeypatch):
    target = Target(tiny("llama"), kv=Slab(rows=1, tokens=8))
    draft = Target(tiny("llama", dtype=torch.bfloat16), kv=Slab(rows=1, tokens=8))
    wanted = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, their size, bytes of float32
    needed = 3 * 100 * (wanted + wanted // 2)
    for free, outcome in ((None, "note"), (10 * needed, "ok"), (needed * 1.1, "warning"), (needed - 1, "failure")):
        monkeypatch.setattr(findings, "free_bytes", lambda device, free=free: free)
        found = findings.memory(target, draft, 3, 100)
        assert (found.outcome, found.figures["bytes_per_cell"]) == (outcome, [wanted, wanted // 2])
        assert sum(found.figures["keys_and_values"]) == needed
    assert found.error.exit_code == 4
    assert "3 rows of 100 tokens" in found.text
    weights = [*tiny("llama").parameters(), *tiny("llama").buffers()]
    assert found.figures["weights"][0] == sum({one.data_ptr(): one.nbytes for one in weights}.values())


# Catches: free memory in the wrong unit.
def test_free_memory_is_in_bytes():
    assert 2**26 < findings.free_bytes(torch.device("cpu")) < 2**44


def patched(change):
    """A random llama whose logits `change(logits, width, last position)` alters, in place."""
    model, tokenizer = load("random:llama")
    own = model.forward

    def forward(*arguments, **options):
        out = own(*arguments, **options)
        positions = options.get("position_ids")
        last = -1 if positions is None else int(positions.max())
        change(out.logits, out.logits.shape[1], last)
        return out

    model.forward = forward
    return model, tokenizer


# Catches: a staged forward that is wrong, not found or found too late.
def test_a_wrong_staged_forward_ends_the_examination():
    def change(logits, width, last):
        if last >= 0 and width > 1:
            logits[..., 5] += 100.0

    found = look(*patched(change))
    assert [finding.name for finding in found.findings][-1] == "preflight"
    assert (found.findings[-1].outcome, found.error.exit_code) == ("failure", 4)


# Catches: target, drafter and rule that do not fit, noticed after minutes.
def test_parts_that_do_not_fit_end_the_examination():
    found = look(drafter={"use": "layer_skip", "skip": [7]})
    assert (found.findings[-1].name, found.error.exit_code) == ("preflight", 5)


ONE, TWIN = 70, 90


def twins(lead, amount):
    """A model that always says `ONE`, whose logit leads that of `TWIN` by `lead`. A staged forward of a verification's
    width, past the lengths of every preflight, adds `amount` to the latter.
    """

    def change(logits, width, last):
        logits[..., ONE], logits[..., TWIN] = 100.0, 100.0 - lead
        if 1 < width < 9 and last > 20:
            logits[..., TWIN] += amount

    return patched(change)


# Catches: a near-tie called a fault, a difference that is not told, an exit code for rounding.
def test_a_difference_at_equal_logits_is_a_near_tie():
    found = look(*twins(0.0, 1e-4), sampling=GREEDY, drafter=always(ONE))
    equality = by_name(found)["equality"]
    assert (equality.outcome, found.error) == ("note", None)
    assert "a near-tie" in equality.text
    first = equality.figures["differences"][0]
    assert (first["way"], first["theirs"], first["ours"], first["near_tie"]) == ("speculative", ONE, TWIN, True)
    assert first["gap"] == 0.0
    assert equality.figures["equal"]["plain"] == len(TEXTS)
    assert by_name(found)["self-draft"].outcome == "note"


# Catches: a fault in the logits explained away as a tie, by a tolerance that is too wide or a gap of the wrong forward.
def test_a_fault_is_not_a_tie():
    model, tokenizer = twins(0.01, 0.02)
    found = look(model, tokenizer, sampling=GREEDY, drafter=always(ONE))
    equality = by_name(found)["equality"]
    assert (equality.outcome, found.error.exit_code) == ("failure", 4)
    assert "not a tie: a fault" in equality.text
    first = equality.figures["differences"][0]
    assert (first["theirs"], first["ours"], first["near_tie"]) == (ONE, TWIN, False)
    assert first["gap"] == pytest.approx(0.01, rel=0.01)
    assert repr(tokenizer.decode([ONE])) in equality.text
    assert by_name(found)["self-draft"].outcome == "failure"
    assert "verdict" in by_name(found)  # the rest is still worth knowing


def always(token):
    """A drafter that proposes one token over and over."""
    return Scripted(script=lambda tokens, budget: [token] * budget)


# Catches: a text that ends early taken for a tie, the place counted from the prompt on, prefixes that are not common.
def test_the_first_difference_is_judged_by_the_models_own_logits():
    target = Target(tiny("llama"), kv=Slab(rows=1, tokens=96))
    prompt, said = prompts()[1], greedy("llama")[1]
    assert difference(target, prompt, said, said) is None
    other = (*said[:5], (said[5] + 1) % 64, *said[6:])
    found = difference(target, prompt, said, other)
    assert (found.position, found.theirs, found.ours, found.near_tie) == (5, said[5], other[5], False)
    ids = torch.tensor([[*prompt, *said[:5]]])
    with torch.inference_mode():
        logits = target.model(ids).logits[0, -1]
    assert found.gap == pytest.approx((logits[said[5]] - logits[other[5]]).item(), rel=1e-4)
    short = difference(target, prompt, said, said[:7])
    assert (short.position, short.ours, short.gap, short.near_tie) == (7, None, math.inf, False)


# Catches: a tolerance for one dtype used for all: in float32 a gap of 0.01 is no tie, in bfloat16 0.1 is one.
def test_tolerances_follow_the_dtype():
    assert tolerance(torch.float32, 20.0) == 1e-3
    assert tolerance(torch.float64, 20.0) == 1e-6
    assert tolerance(torch.bfloat16, 20.0) == pytest.approx(0.625)
    assert tolerance(torch.float16, 20.0) == pytest.approx(0.078125)


# Catches: a reference that follows the checkpoint's generation config, which nothing here does.
def test_the_reference_ignores_the_generation_config():
    model = tiny.__wrapped__("llama")
    model.generation_config.update(repetition_penalty=5.0, no_repeat_ngram_size=1, max_length=3, num_beams=2)
    target = Target(model, kv=Slab(rows=1, tokens=96))
    assert reference(target, prompts()[2], 24) == greedy("llama")[2]
    assert model.generation_config.repetition_penalty == 5.0


# Catches: half precision held to float32's standard, rounding reported as a fault.
def test_half_precision_differs_at_near_ties_only():
    found = look(draft_model="random:llama:1", sampling=GREEDY, load_options={"dtype": "bfloat16"})
    assert found.error is None
    assert by_name(found)["self-draft"].outcome in ("ok", "note")
    assert all(one["near_tie"] for one in by_name(found)["equality"].figures["differences"])


def requests(count=4, new=24):
    sampling = Sampling(temperature=0.0, max_new_tokens=new)
    return [Request(prompt=ids, sampling=sampling, id=str(index)) for index, ids in enumerate(prompts()[:count])]


# Catches: steps counted for the wrong rows or width, tokens or verifications of another prompt, chunks that mix.
def test_a_trail_says_what_the_engine_did():
    target = Target(tiny("llama"), kv=Slab(rows=2, tokens=96))
    drafter = Watched(Scripted(script=oracle(greedy("llama"), prompts(), 3), num_speculative_tokens=3))
    done, trails = follow(target, drafter, Standard(), requests())
    assert [one.tokens for one in done] == list(greedy("llama"))
    assert [trail.emitted for trail in trails] == [(24, 24), (24, 24)]
    assert [trail.verified for trail in trails] == [(6, 6), (6, 6)]
    # The first prompt has nothing to cache and is a step ahead of the second.
    assert [trail.steps for trail in trails] == [{(1, 3, True): 2, (2, 3, True): 5}, {(2, 3, True): 6}]
    assert all(trail.prefill > 0 for trail in trails)
    assert target.kv.room == 2
    _, plain = follow(target, Watched(NoDraft()), Standard(), requests(new=5))
    assert [trail.steps for trail in plain] == [{(1, 0, False): 2, (2, 0, False): 4}, {(2, 0, False): 5}]


# Catches: a draft model's time over prompts charged to plain decoding as well.
def test_the_prompts_of_a_draft_model_are_its_own_cost():
    slow = tiny.__wrapped__("llama", seed=1)
    own = slow.model.forward

    def late(*arguments, **options):
        time.sleep(0.02)
        return own(*arguments, **options)

    slow.model.forward = late
    target = Target(tiny("llama"), kv=Slab(rows=4, tokens=96))
    _, [trail] = follow(target, Watched(DraftModel(model=slow)), Standard(), requests(new=2))
    assert trail.draft_prefill > 0.02 > trail.prefill


# Catches: rejections of places that were not rejected, the wrong token of a draft.
def test_rejections_are_kept_with_their_places():
    target = Target(tiny("llama"), kv=Slab(rows=1, tokens=96))
    watched = Watched(Scripted(script=oracle(greedy("llama"), prompts(), 4, wrong_at=2)))
    follow(target, watched, Standard(), requests(count=1, new=6))
    said, start = greedy("llama")[0], len(prompts()[0])
    assert watched.rejected[0] == ("0", start + 2, (said[2] + 1) % 80, said[2])
    assert all((*prompts()[0], *said)[place] == came for _, place, _, came in watched.rejected)


# Catches: a width that is not what was meant (nothing found to copy), the first step after another width counted, other
# rows than wanted, plain steps that ask the drafter.
def test_steps_are_timed_at_the_widths_that_are_wanted():
    target = Target(tiny("llama"), kv=Slab(rows=3, tokens=90))
    asked = [Request(prompt=ids, sampling=Sampling(max_new_tokens=60, ignore_eos=True)) for ids in prompts()]
    found = time_steps(
        target, PromptLookup(num_speculative_tokens=4), Standard(), asked, 3, [1, 2, 4], rounds=4, seconds=9
    )
    assert {(one.rows, one.width) for one in found} == {(3, 0), (3, 1), (3, 2), (3, 4)}
    assert all((one.draft is None) == (one.width == 0) for one in found)
    assert 4 <= sum(one.width == 4 for one in found) <= 8
    assert target.kv.room == 3


# Catches: an endless search for room in texts that have none.
def test_texts_without_room_are_not_timed_for_ever():
    found = examine("random:llama", prompts=["x" * 1023], sampling=FEW, drafter="prompt_lookup")
    assert by_name(found)["costs"].outcome == "warning"
    assert "verdict" not in by_name(found)
    assert found.error is None


# Catches: a part of a step that is left out of the prediction, or paid twice: drafts, verification, prompts.
@pytest.mark.parametrize("rows", [1, 2])
def test_the_prediction_is_what_is_then_measured(rows, monkeypatch):
    now = [0.0]  # a clock that only forwards and drafts move: what else the machine does is in no figure
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    model = tiny.__wrapped__("llama")
    own = model.model.forward

    def late(*arguments, **options):
        now[0] += 0.012
        return own(*arguments, **options)

    model.model.forward = late
    known = oracle(greedy("llama"), prompts(), 4, wrong_at=3)

    def script(tokens, budget):
        now[0] += 0.02 / rows
        return known(tokens, budget)

    target = Target(model, kv=Slab(rows=rows, tokens=96))
    drafter, asked = Scripted(script=script), requests()
    timings = [
        timing
        for some in stopwatch.levels(rows)
        for timing in time_steps(
            target, drafter, Standard(), requests(new=40), some, stopwatch.widths(4), rounds=3, seconds=9
        )
    ]
    seconds = {}
    for name, source in (("plain", NoDraft()), ("speculative", drafter)):
        start = time.perf_counter()
        done, trails = follow(target, Watched(source), Standard(), asked)
        seconds[name] = time.perf_counter() - start
    accepted = [sum(one.counters.num_accepted_tokens_per_pos[place] for one in done) for place in range(3)]
    found = predict(timings, trails, accepted, rows, 4)
    assert found.speedup == pytest.approx(seconds["plain"] / seconds["speculative"], rel=0.03)


# Catches: a search whose result is not what is then examined.
def test_layer_skip_is_searched_and_examined(monkeypatch):
    from specdec import layer_search

    monkeypatch.setattr(layer_search, "_seconds", lambda texts, rows: (10.0, 4.5, {0: 10.0, 8: 10.0}))
    found = look(layer_skip=True, sampling=GREEDY)
    names = [finding.name for finding in found.findings]
    assert names.index("layer skip") < names.index("equality") < names.index("verdict")
    assert found.search.skip
    skip = list(found.search.skip)
    assert f"--set 'drafter.skip={skip}'" in by_name(found)["layer skip"].text
    assert by_name(found)["equality"].outcome == "ok"
    monkeypatch.setattr(layer_search, "_seconds", lambda texts, rows: (10.0, 0.0, {0: 10.0, 8: 90.0}))
    nothing = look(layer_skip=True, sampling=GREEDY)
    assert (nothing.search.skip, nothing.prediction, nothing.error) == ((), None, None)
    assert by_name(nothing)["layer skip"].outcome == "warning"


# Catches: nonsense that is found after a model is loaded, or told one piece at a time.
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"drafter": "prompt_lokup"}, RecipeError, "prompt_lookup"),
        ({"drafter": {"use": "prompt_lookup", "max_ngrm": 2}, "verifier": "standart"}, RecipeError, "standart"),
        ({"prompts": []}, RequestError, "none"),
        ({"prompts": [3]}, RequestError, "int"),
        ({"rows": 0, "tokens": 1}, RecipeError, "rows"),
        ({"layer_skip": True, "drafter": "prompt_lookup"}, RecipeError, "layer_skip"),
        ({"layer_skip": True, "drafter": {"use": "layer_skip", "skip": [1]}}, RecipeError, "skip"),
    ],
)
def test_nonsense_is_found_before_a_model_is_loaded(monkeypatch, options, error, said):
    monkeypatch.setattr(doctor, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(error, match=said):
        examine("random:llama", **options)


# Catches: a drafter's name taken for a hub id, a folder or a random model for a drafter's name.
def test_a_word_stands_for_a_drafter_or_a_model(tmp_path):
    assert section_of(None) == {}
    assert section_of("layer_skip") == {"use": "layer_skip"}
    assert section_of("my_mod.sub:MyDrafter") == {"use": "my_mod.sub:MyDrafter"}
    for model in ("random:llama:1", "Qwen/Qwen2.5-0.5B", "./model", "gpt2", str(tmp_path)):
        assert section_of(model) == {"use": "model", "model": model}
    with pytest.raises(PluginError, match="did you mean 'prompt_lookup'"):
        section_of("prompt_lokup")


# For a random qwen3, of two layers, 64 wide.
FITTING = deepspec(
    hidden_size=64, vocab_size=272, mask_token_id=271, num_target_layers=2, target_layer_ids=[0], block_size=3
)


# Catches: the folder of a block drafter that is loaded as a model; weights, cache and taps that nobody is told of.
def test_a_block_drafter_in_a_folder_is_recognised_and_told(tmp_path):
    folder = str(write(tmp_path, FITTING))
    assert section_of(folder) == {"use": "dspark", "model": folder}
    found = examine("random:qwen3", drafter=section_of(folder), prompts=["Once"], sampling=Sampling(max_new_tokens=4))
    assert found.error is None
    [said] = [finding for finding in found.findings if finding.name == "drafter"]
    assert said.text.startswith(
        "2 layers, a vanilla Markov head, a confidence head, blocks of 3; taps the outputs of the target's layers 0; "
    )
    assert re.search(r"; 0\.15 MiB of weights of its own and 0\.0\d MiB of cache$", said.text)
    misfit = examine("random:llama:1", drafter={"use": "dspark", "model": str(write(tmp_path / "b", deepspec()))})
    assert isinstance(misfit.error, CompatibilityError)
    assert "was trained for a target of hidden size 32, and this one has 64" in str(misfit.error)


SHORT = ("--limit", "2", "--max-new-tokens", "4")


# Catches: escape codes in a pipe, progress on stdout, a last line that is no document, figures that are not there.
def test_the_command_prints_findings_and_a_document():
    done = specdec("random:llama", "random:llama:1", *SHORT, "--temperature", "0", "--json", "--rows", "2")
    assert done.exit_code == 0
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    *lines, last = done.stdout.splitlines()
    document = json.loads(last, parse_constant=pytest.fail)
    assert [line.split()[0] for line in lines] == [finding["outcome"] for finding in document["findings"]]
    assert (document["target"], document["rows"], document["exit_code"]) == ("random:llama", 2, 0)
    assert document["drafter"] == "model(model=random:llama:1)"
    assert document["speedup"] > 0


# Catches: that it does not pay taken for an error, text beside the document where only it was asked for.
def test_that_it_does_not_pay_is_no_error():
    done = specdec("random:llama", *SHORT, "--json", "--quiet", "--set", "drafter.num_speculative_tokens=3")
    [document] = map(json.loads, done.stdout.splitlines())
    verdict = document["findings"][-1]
    assert (done.exit_code, verdict["name"]) == (0, "verdict")
    assert document["drafter"] == "prompt_lookup(num_speculative_tokens=3)"
    assert len(verdict["figures"]["by_length"]) == 6


# Catches: an exit code that is not the error's, a document that is missing because something is wrong.
def test_a_failure_has_the_exit_code_of_its_error(tmp_path):
    draft, _ = load("random:llama:1")
    draft.save_pretrained(tmp_path / "draft")
    renamed(40, 70).save_pretrained(tmp_path / "draft")
    done = specdec("random:llama", str(tmp_path / "draft"), *SHORT, "--json")
    assert done.exit_code == 5
    assert json.loads(done.stdout.splitlines()[-1])["exit_code"] == 5
    assert "error: tokenizers: 2 of 257 shared ids" in done.stderr
    assert specdec("random:llama", *SHORT, "--tokens", "5").exit_code == 6
    assert specdec("random:nothing", *SHORT).exit_code == 4


# Catches: a command that loads before it reads what it was given.
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("random:llama", "prompt_lokup"), 3, "did you mean 'prompt_lookup'"),
        (("random:llama", "nothing:Here"), 2, "nothing"),
        (("random:llama", "--file", "empty.txt"), 7, "empty"),
        (("random:llama", "--file", "missing.jsonl"), 7, "cannot be read"),
        (("random:llama", "--set", "kv.rows=2"), 2, "unknown section"),
        (("random:llama", "--set", "drafter.num_speculative_tokens=0"), 2, "num_speculative_tokens"),
        (("random:llama", "--verifier", "nucleus", "--set", "verifier.thetta=1"), 2, "theta"),
        (("random:llama", "--temperature", "-1"), 2, "temperature"),
        (("random:llama", "--rows", "0"), 2, "rows"),
        (("random:llama", "random:llama:1", "--layer-skip"), 2, "layer_skip"),
    ],
)
def test_nonsense_at_the_command_line_loads_nothing(monkeypatch, tmp_path, arguments, code, said):
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    monkeypatch.setattr(doctor, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    done = specdec(*arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


# Catches: --set that reaches another section, a file whose prompts are not those examined, --dtype for one model only.
def test_options_reach_what_they_are_for(monkeypatch, tmp_path):
    (tmp_path / "texts.txt").write_text("one\ntwo\nthree\n", encoding="utf-8")
    seen = {}

    def kept(model, **options):
        seen.update(options, model=model)
        raise DataError("enough")

    monkeypatch.setattr(doctor, "examine", kept)
    options = (
        "--set",
        "drafter.num_speculative_tokens=3",
        "--set",
        "sampling.top_p=0.9",
        "--set",
        "verifier.theta=0.5",
    )
    done = specdec(
        "T", "a/b", *options, "--verifier", "nucleus", "--file", "texts.txt", "--limit", "2", "--dtype", "float32"
    )
    assert done.exit_code == 7
    assert seen["drafter"] == {"use": "model", "model": "a/b", "num_speculative_tokens": 3}
    assert seen["verifier"] == {"use": "nucleus", "theta": 0.5}
    assert (seen["sampling"].top_p, seen["sampling"].temperature, seen["sampling"].max_new_tokens) == (0.9, 1.0, 64)
    assert [sample.text for sample in seen["prompts"]] == ["one", "two"]
    assert (seen["model"], seen["load_options"]["dtype"]) == ("T", "float32")
