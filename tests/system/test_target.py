"""Loading, refusing and tapping models."""

import copy
from typing import final

import pytest
import torch
from attrs import define, field, frozen
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaForCausalLM

from specdec import Engine, PointwiseVerifier, Request, Sampling, Target
from specdec.drafter import Drafter
from specdec.errors import CompatibilityError, ModelError
from specdec.loading import byte_tokenizer, load, tokenizer_problems
from specdec.preflight import preflight
from specdec.theory import standard_acceptance
from specdec.types import Draft
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.drafters.none import NoDraft
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.standard import Standard
from tests.families import FAMILIES, greedy, prompts, tiny

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def from_config(kind, attention=None, auto=AutoModelForCausalLM, **options):
    config = AutoConfig.for_model(kind, **options)
    return auto.from_config(config, attn_implementation=attention).eval()


def with_sdpa(model):
    model.config._attn_implementation = "sdpa"  # some versions of transformers refuse it themselves, some do not
    return model


def slab(rows=2):
    return Slab(rows=rows, tokens=64)


# Catches: names that only work on the hub, weights of another dtype, a tokenizer that is lost on the way.
def test_a_folder_decodes_like_the_model_it_was_saved_from(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), kv=slab(4), dtype="float32", attn_implementation="sdpa")
    engine = Engine(target, DraftModel(model=str(tmp_path), num_speculative_tokens=3), Standard(), Continuous())
    sampling = Sampling(temperature=0, max_new_tokens=24, ignore_eos=True)
    completions = engine.generate([Request(prompt=p, sampling=sampling) for p in prompts()])
    assert [c.tokens for c in completions] == list(greedy("llama", 24))
    assert completions[0].counters.acceptance_rate == 1.0
    assert target.tokenizer.decode([1, 2]) == byte_tokenizer().decode([1, 2])
    assert load(str(tmp_path), dtype="bfloat16")[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("no/such/folder/here", {}, "no such folder"),
        ("owner/no-such-model", {}, "the hub did not answer"),
        ("random:llama", {"dtype": "float31"}, "unknown dtype 'float31'"),
        ("random:llama:x", {}, "must be a whole number"),
        ("random:nonsense", {}, "try random:llama"),
        ("random:llama", {"device": "nonsense"}, "device 'nonsense'"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(name, options, said, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=said) as caught:
        load(name, **options)
    assert "\n" not in str(caught.value)


REFUSED = {
    "encoder-decoder": (
        lambda: from_config(
            "t5", auto=AutoModelForSeq2SeqLM, vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4
        ),
        "t5 is an encoder-decoder",
    ),
    "ALiBi": (
        lambda: from_config("bloom", vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
        "bloom: forward takes no",
    ),
    "recurrent": (
        lambda: from_config("mamba", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
        "mamba: ",
    ),
    "soft-capped sdpa": (
        lambda: with_sdpa(from_config("gemma2", "eager", **SMALL, num_key_value_heads=2, head_dim=8)),
        "try attn_implementation='eager'",
    ),
    "rope that depends on the longest row": (
        lambda: from_config(
            "llama", **SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
        "rope scaling 'dynamic'",
    ),
}


# Catches: a model that decodes to garbage instead of being refused by its name, before the first token.
@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_rewound_are_refused_by_name(case):
    make, said = REFUSED[case]
    with pytest.raises(ModelError, match=said):
        Target(make(), kv=slab())


def test_an_attention_without_explicit_masks_is_refused():
    model = from_config("llama", **SMALL)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError, match="'flash_attention_2' takes no explicit mask; try 'sdpa' or 'eager'"):
        Target(model, kv=slab())


def test_a_rope_that_depends_on_the_longest_row_is_fine_with_one_row():
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    Target(from_config("llama", **SMALL, rope_parameters=scaling), kv=slab(1))


class SingleTokenBranch(LlamaForCausalLM):
    """Looks like Llama; several new tokens on a cache are computed as if they all had the first one's position."""

    def forward(self, *args, **options):
        position = options.get("position_ids")
        if position is not None and position.shape[1] in (2, 3, 4):
            options["position_ids"] = position[:, :1].expand_as(position)
        return super().forward(*args, **options)


# Catches: a preflight that never runs, or passes whatever it sees.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_preflight_refuses_a_model_whose_staged_forward_is_wrong(dtype):
    good = tiny("llama", dtype=dtype)
    bad = SingleTokenBranch(good.config).to(dtype).eval()
    bad.load_state_dict(good.state_dict())
    bad.config = good.config
    preflight(Target(good, kv=slab()))
    with pytest.raises(ModelError, match="llama: staged forwards of several tokens differ from the model's own"):
        Engine(Target(bad, kv=slab()), NoDraft(), Standard(), Continuous())


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_preflight_passes_what_works_and_leaves_the_cache_empty(family, dtype, rows):
    target = Target(tiny(family, dtype=dtype), kv=slab(rows))
    preflight(target)
    assert target.preflighted
    assert target.kv.room == rows
    assert target.kv.lengths == [0] * rows


# Catches: weights that are not numbers, called a recurrent state.
def test_the_preflight_names_scores_that_are_not_finite():
    model = copy.deepcopy(tiny("llama"))
    model.get_output_embeddings().weight.data[3] = float("nan")
    with pytest.raises(ModelError, match=r"llama: the model's own forward gives scores that are not finite, in torch"):
        preflight(Target(model, kv=slab(2)))


# Catches: end-of-sequence ids of one source that replace those of another.
def test_eos_ids_are_the_union_of_generation_config_config_and_tokenizer():
    model = from_config("llama", **SMALL, eos_token_id=7)
    model.generation_config.eos_token_id = [5, 9]
    tokenizer = byte_tokenizer()
    assert Target(model, tokenizer, kv=slab()).eos_ids == {5, 7, 9, tokenizer.eos_token_id}
    assert Target(model, kv=slab()).eos_ids == {5, 7, 9}


# Catches: sizes compared instead of meanings: padding is fine, shuffled ids are not.
def test_tokenizers_are_compared_by_what_ids_mean():
    plain, shuffled = byte_tokenizer(), byte_tokenizer()
    assert tokenizer_problems(plain, plain) == ([], [])
    more = byte_tokenizer()
    more.add_tokens(["<more>"])
    problems, notes = tokenizer_problems(plain, more)
    assert problems == []
    assert notes == ["1 ids are named by the draft's tokenizer only, 257 the first"]
    swapped = {**plain.get_vocab(), "a": plain.get_vocab()["b"], "b": plain.get_vocab()["a"]}
    shuffled.get_vocab = lambda: swapped
    problems, _ = tokenizer_problems(plain, shuffled)
    assert "2 of 257 shared ids stand for different strings" in problems[0]
    target = Target(tiny("llama"), plain, kv=slab())
    with pytest.raises(CompatibilityError, match="tokenizers differ"):
        DraftModel(model=tiny("llama"), tokenizer=shuffled).bind(target)


@final
@define(eq=False)
class Tapper(Drafter):
    """Drafts by lookup in a fixed continuation and keeps the features it is given, per request."""

    script: object
    num_speculative_tokens: int = 3
    taps: tuple = (0, 1, -1)
    found: dict = field(init=False, factory=dict)

    def bind(self, target):
        pass

    def propose(self, batch):
        drafts = [self.script(tuple(row.tokens), budget) for row, budget in zip(batch.rows, batch.budget, strict=True)]
        width = max(len(tokens) for tokens in drafts)
        tokens = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in drafts], dtype=torch.int64)
        return Draft(tokens.reshape(len(drafts), width), torch.tensor([len(tokens) for tokens in drafts]))

    def observe(self, batch, kept):
        for index, row in enumerate(batch.rows):
            seen = self.found.setdefault(row.request.id, {tap: [] for tap in self.taps} | {"in": [], "next": []})
            assert len(seen["in"]) == kept.starts[index]
            count = kept.counts[index]
            seen["in"] += kept.inputs[index, :count].tolist()
            seen["next"] += kept.next_inputs[index, :count].tolist()
            for tap in self.taps:
                seen[tap].append(kept.hidden[tap][index, :count])

    def release(self, slots):
        pass


# Catches: features of rejected or padded tokens, of another row, one token late, missing for prompt chunks.
@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_the_features_of_exactly_the_committed_tokens(family):
    outputs = greedy(family, 24)
    known = {prompt: prompt + output for prompt, output in zip(prompts(), outputs, strict=True)}

    def script(tokens, budget):
        whole = next(full for prompt, full in known.items() if tokens[: len(prompt)] == prompt)
        block = list(whole[len(tokens) : len(tokens) + min(3, budget)])
        return [*block[:2], *((token + 1) % 80 for token in block[2:])]  # right, right, wrong

    model = tiny(family)
    before = sum(len(module._forward_hooks) for module in model.modules())
    tapper = Tapper(script)
    engine = Engine(Target(model, kv=slab(3)), tapper, Standard(), Continuous(prefill_chunk=4))
    completions = engine.generate(
        [
            Request(prompt=p, id=str(i), sampling=Sampling(temperature=0, max_new_tokens=12))
            for i, p in enumerate(prompts())
        ]
    )
    assert sum(len(module._forward_hooks) for module in model.modules()) == before
    for prompt, completion in zip(prompts(), completions, strict=True):
        tokens = [*prompt, *completion.tokens]
        found = tapper.found[completion.id]
        assert found["in"] == tokens[:-1]
        assert found["next"] == tokens[1:]
        states = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        for tap, wanted in ((0, states[1]), (-1, states[-1])):
            torch.testing.assert_close(torch.cat(found[tap]), wanted[0], atol=1e-4, rtol=1e-4)


def test_a_tap_of_a_layer_that_is_not_there_is_refused_before_the_first_step():
    with pytest.raises(CompatibilityError, match=r"taps layers \[2\] and the target has 0 to 1"):
        Engine(Target(tiny("llama"), kv=slab()), Tapper(None, taps=(0, 2)), Standard(), Continuous())


@final
@frozen(kw_only=True)
class Counting(PointwiseVerifier):
    """The standard rule that counts the places it examined, and whose prompt's length it was told."""

    family = "lossless"
    exactness = "lossless"
    dominates_standard = True
    memory = 2

    def start(self, prompt):
        return (0.0, float(len(prompt)))

    def acceptance(self, at):
        return standard_acceptance(at.p, at.q.dense())

    def advance(self, at):
        return at.memory + torch.tensor([1.0, 0.0], dtype=torch.float64)


# Catches: memory of another slot, of the slot's last owner, or of the step before.
def test_what_a_rule_remembers_follows_its_request():
    target = Target(tiny("llama"), kv=slab(2))
    drafter = DraftModel(model=tiny("llama", seed=1), num_speculative_tokens=3)
    engine = Engine(target, drafter, Counting(), Continuous(), diagnostics=True)
    remembered = {}
    for index, prompt in enumerate(prompts()):
        engine.submit(
            Request(prompt=prompt, id=str(index), sampling=Sampling(max_new_tokens=6 + 5 * index, seed=index))
        )
    while not engine.scheduler.idle:
        rows = list(engine.scheduler.running)
        finished = [event.completion for event in engine.step() if event.completion]
        for row in {*rows, *engine.scheduler.running}:
            remembered[row.request.id] = engine._memory[row.slot].tolist()
        for completion in finished:
            places = len(completion.diagnostics["accepted"])
            count, length = remembered[completion.id]
            assert length == len(prompts()[int(completion.id)])
            # The last step may have examined places that a stop cut off.
            assert places <= count <= places + 3
    plain = Engine(target, drafter, Standard(), Continuous()).generate(
        [
            Request(prompt=p, id=str(i), sampling=Sampling(max_new_tokens=6 + 5 * i, seed=i))
            for i, p in enumerate(prompts())
        ]
    )
    again = Engine(target, drafter, Counting(), Continuous()).generate(
        [
            Request(prompt=p, id=str(i), sampling=Sampling(max_new_tokens=6 + 5 * i, seed=i))
            for i, p in enumerate(prompts())
        ]
    )
    assert [c.tokens for c in again] == [c.tokens for c in plain]
