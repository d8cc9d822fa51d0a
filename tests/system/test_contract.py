"""What the engine does with strategies and requests that break their promises, and with two users at once."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessor

from specdec import Engine, Request, Sampling, Scheduler, Target
from specdec.errors import CompatibilityError, ModelError, RequestError
from specdec.law import Dense
from specdec.loading import byte_tokenizer, load
from specdec.preflight import preflight
from specdec.types import Draft
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.drafters.none import NoDraft
from specdec_plugins.drafters.prompt_lookup import PromptLookup
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.schedulers.static import Static
from specdec_plugins.verifiers.standard import Standard
from tests.families import greedy, prompts, tiny
from tests.scripted import Scripted, oracle


def engine(drafter=None, rows=2, scheduler=None, target=None):
    target = target or Target(tiny("llama"), kv=Slab(rows=rows, tokens=64))
    return Engine(target, drafter or NoDraft(), Standard(), scheduler or Continuous())


def request(name="", new=6, prompt=(1, 2, 3), **options):
    return Request(prompt=prompt, id=name, sampling=Sampling(temperature=0, max_new_tokens=new, **options))


def changed(change, trees=False):
    script = oracle(greedy("llama", 24), prompts(), 3)
    parents = (lambda width: [-1, 0, 1][:width]) if trees else None
    inner = Scripted(script=script, num_speculative_tokens=3, parents=parents)
    propose = inner.propose

    class Wrapper:
        def __getattr__(self, name):
            return getattr(inner, name)

        def propose(self, batch):
            return change(propose(batch))

    return Wrapper()


BROKEN = {
    "float tokens": (lambda d: Draft(d.tokens.float(), d.sizes), "tokens are torch.float32"),
    "float sizes": (lambda d: Draft(d.tokens, d.sizes.float()), "sizes are torch.float32"),
    "a row too many": (lambda d: Draft(d.tokens.repeat(2, 1), d.sizes), r"wanted torch.int64 \[1, 3\]"),
    "unannounced parents": (lambda d: Draft(d.tokens, d.sizes, parents=d.tokens), "says `trees` is False"),
    "law of another vocabulary": (
        lambda d: Draft(d.tokens, d.sizes, law=Dense(torch.ones(*d.tokens.shape, 79))),
        r"law is \[1, 3, 79\], wanted \[1, 3, 80\]",
    ),
    "law of too few nodes": (lambda d: Draft(d.tokens, d.sizes, law=Dense(torch.ones(len(d.sizes), 2, 80))), "law is"),
}


# Catches: a plugin's mistake that is broadcast, indexed or counted instead of being named.
@pytest.mark.parametrize("case", BROKEN)
def test_a_draft_of_the_wrong_shape_is_refused_by_name(case):
    change, said = BROKEN[case]
    with pytest.raises(CompatibilityError, match=said):
        engine(changed(change), rows=4, scheduler=Static()).generate([request(prompt=p) for p in prompts()])


# Catches: negative sizes that become negative counters, sizes beyond the width, a law of NaN that is compared.
@pytest.mark.parametrize(
    ("change", "drafted"),
    [
        (lambda d: Draft(d.tokens, d.sizes - 9), 0),
        (lambda d: Draft(d.tokens, d.sizes + 9), None),
        (lambda d: Draft(d.tokens, d.sizes, law=Dense(torch.full((*d.tokens.shape, 80), math.nan))), 0),
    ],
)
def test_sizes_out_of_range_and_laws_of_nan_count_as_less_draft(change, drafted):
    completions = engine(changed(change), rows=4, scheduler=Static()).generate(
        [request(prompt=p, new=24) for p in prompts()]
    )
    assert [c.tokens for c in completions] == list(greedy("llama", 24))
    for completion in completions:
        counters = completion.counters
        assert 0 <= counters.num_accepted_tokens <= counters.num_draft_tokens <= 3 * counters.num_steps
        if drafted is not None:
            assert counters.num_draft_tokens == drafted


# Catches: parents that point at themselves, forward or nowhere: out of range, or a tree that hangs on nothing.
@pytest.mark.parametrize("parents", [[0, 1, 2], [-1, 2, 0], [-2, -1, 0], [-1, 7, 0]])
def test_nodes_without_a_parent_before_them_are_clipped(parents):
    def change(draft):
        width = draft.tokens.shape[1]
        return Draft(draft.tokens, draft.sizes, parents=torch.tensor([parents[:width]] * len(draft.sizes)))

    completions = engine(changed(change, trees=True), rows=4, scheduler=Static()).generate(
        [request(prompt=p, new=24) for p in prompts()]
    )
    assert [c.tokens for c in completions] == list(greedy("llama", 24))
    assert all(c.counters.num_clipped > 0 for c in completions)


# Catches: node numbers taken for depths in the figures by position.
def test_figures_of_a_tree_are_by_depth():
    right = oracle(greedy("llama", 24), prompts(), 2)

    def script(tokens, budget):
        block = right(tokens, budget)
        return [(block[0] + 1) % 80, block[0], block[1], (block[1] + 1) % 80] if len(block) == 2 and budget >= 4 else []

    drafter = Scripted(script=script, num_speculative_tokens=4, parents=lambda width: [-1, -1, 1, 0][:width])
    for completion in engine(drafter, rows=4).generate([request(prompt=p, new=24) for p in prompts()]):
        counters = completion.counters
        assert len(counters.num_drafted_per_pos) == 2
        assert counters.num_drafted_per_pos == counters.num_accepted_tokens_per_pos
        assert counters.num_draft_tokens == 4 * counters.num_drafts


class Generous(Scheduler):
    """A scheduler that promises too much and trims to less than nothing."""

    def admit(self, waiting, running, slots):
        return 99

    def budget(self, row, most):
        return 99

    def trim(self, draft):
        return draft.sizes - 99


# Catches: a budget beyond what is left, which would run past the cache; a trim below zero in the counters.
def test_a_scheduler_cannot_give_more_than_there_is():
    drafter = Scripted(script=oracle(greedy("llama", 24), prompts(), 9), num_speculative_tokens=9)
    completions = engine(drafter, scheduler=Generous()).generate([request(prompt=p, new=24) for p in prompts()])
    assert [c.tokens for c in completions] == list(greedy("llama", 24))
    assert [c.counters.num_draft_tokens for c in completions] == [0] * 4


# Catches: requests of somebody else that are served, dropped or lost by a call that has its own.
def test_a_call_leaves_other_requests_alone():
    one = engine()
    one.submit(request("a"))
    with pytest.raises(RequestError, match="other requests are not finished"):
        one.generate([request("b")])
    assert [row.request.id for row in one.scheduler.waiting] == ["a"]
    finished = []
    while not one.scheduler.idle:
        finished += [event.id for event in one.step() if event.completion]
    assert finished == ["a"]
    stream = one.stream([request("c")])
    next(stream)
    one.submit(request("d"))
    stream.close()
    assert [row.request.id for row in one.scheduler.waiting] == ["d"]
    while not one.scheduler.idle:
        one.step()
    assert one.generate([request("request-1"), request()])[1].id != "request-1"


# Catches: a loop that waits for ever for a row another engine holds.
def test_a_call_that_can_get_no_row_says_so():
    target = Target(tiny("llama"), kv=Slab(rows=1, tokens=64))
    holder, other = engine(target=target), engine(target=target)
    holder.submit(request())
    holder.step()
    with pytest.raises(RequestError, match="no cache row is free"):
        other.generate([request()])
    assert other.scheduler.idle


def test_a_drafter_serves_one_target():
    drafter = DraftModel(model=tiny("llama", seed=1), num_speculative_tokens=2)
    engine(drafter)
    with pytest.raises(CompatibilityError, match="bound to another target"):
        engine(drafter, rows=1)


# Catches: an id the draft model has no embedding for, fed to it.
@pytest.mark.parametrize("place", ["prompt", "output"])
def test_a_text_with_ids_the_draft_model_lacks_gets_no_drafts(place):
    config = type(tiny("llama").config)(**{**tiny("llama").config.to_dict(), "vocab_size": 40})
    small = AutoModelForCausalLM.from_config(config).eval()
    drafter = DraftModel(model=small, num_speculative_tokens=3)
    prompt = (70, 3) if place == "prompt" else (1, 2, 3)
    found = engine(drafter).generate([request(prompt=prompt, new=20), request(prompt=(4, 5), new=20)])
    plain = engine().generate([request(prompt=prompt, new=20), request(prompt=(4, 5), new=20)])
    assert [c.tokens for c in found] == [c.tokens for c in plain]
    assert place != "prompt" or found[0].counters.num_draft_tokens == 0


class Nothing(LogitsProcessor):
    """Leaves no token, or only NaN, from some length on."""

    def __init__(self, value):
        self.value = value

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, self.value) if input_ids.shape[1] >= 6 else scores


# Catches: a law that is looked at before the processors, so that what they break becomes the last id of the vocabulary.
@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("diagnostics", [False, True])
def test_processors_that_leave_no_law_end_the_row_with_an_error(value, temperature, diagnostics):
    target = Target(tiny("llama"), kv=Slab(rows=2, tokens=64))
    drafter = DraftModel(model=tiny("llama", seed=1), num_speculative_tokens=3)
    one = Engine(target, drafter, Standard(), Continuous(), diagnostics=diagnostics)
    sampling = Sampling(temperature=temperature, max_new_tokens=9)
    bad, good = one.generate(
        [
            Request(prompt=(1, 2, 3), sampling=sampling, processors=(Nothing(value),)),
            Request(prompt=(1, 2, 3), sampling=sampling),
        ]
    )
    assert bad.finish_reason == "error"
    assert len(bad.tokens) <= 3
    assert bad.tokens == good.tokens[: len(bad.tokens)]
    assert (good.finish_reason, len(good.tokens)) == ("length", 9)


# Catches: a causal bias of the model's own, built from the widest row, that only rows of one length survive.
def test_a_model_whose_own_mask_assumes_level_rows_is_refused():
    config = AutoConfig.for_model(
        "gpt_neo", vocab_size=80, hidden_size=32, num_layers=2, num_heads=4, window_size=8, max_position_embeddings=96,
        attention_types=[[["global", "local"], 1]],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)
    with pytest.raises(ModelError, match=r"gpt_neo: (staged forwards .* differ|cannot be decoded)"):
        preflight(Target(model, kv=Slab(rows=4, tokens=64)))


@pytest.mark.parametrize(("tokens", "fits"), [(24, True), (25, False)])
def test_longrope_is_refused_where_a_text_could_cross_its_switch(tokens, fits):
    config = AutoConfig.for_model(
        "phi3", vocab_size=80, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=96, original_max_position_embeddings=24, pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        },
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    if fits:
        engine(target=Target(model, kv=Slab(rows=2, tokens=tokens)))
    else:
        with pytest.raises(ModelError, match=r"rope scaling 'longrope' .* try kv.tokens 24"):
            Target(model, kv=Slab(rows=1, tokens=tokens))


def test_a_model_that_fails_under_staging_is_refused_by_name():
    model = AutoModelForCausalLM.from_config(tiny("llama").config).eval()
    model.base_model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ModelError, match="llama: cannot be decoded with staged keys and values: ZeroDivisionError"):
        engine(target=Target(model, kv=Slab(rows=1, tokens=64)))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"temperature": 1e-9},
        {"temperature": True},
        {"repetition_penalty": math.inf},
        {"top_k": True},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"max_new_tokens": 0},
        {"stop_strings": ("",)},
        {"stop_strings": (5,)},
        {"stop_ids": {"a"}},
        {"stop_ids": {1.5}},
        {"seed": -1},
    ],
)
def test_sampling_refuses_what_makes_no_sense(options):
    with pytest.raises((ValueError, TypeError)):
        Sampling(**options)


@pytest.mark.parametrize("prompt", ["12", [1.7], [None]])
def test_prompts_are_ids_and_nothing_that_could_be_turned_into_them(prompt):
    with pytest.raises(TypeError):
        Request(prompt=prompt)


# Catches: a stop string that can never be seen, because texts leave special tokens out.
def test_a_stop_string_with_a_special_token_is_refused():
    target = Target(tiny("llama"), byte_tokenizer(), kv=Slab(rows=1, tokens=64))
    with pytest.raises(RequestError, match=r"'<eos>' holds a special token.*use stop_ids"):
        engine(PromptLookup(), target=target).generate([request(stop_strings="<eos>")])


# Catches: options of `load` that a random model swallows.
def test_a_random_model_takes_the_attention_asked_for_and_refuses_the_rest():
    assert load("random:llama", attn_implementation="eager")[0].config._attn_implementation == "eager"
    with pytest.raises(ModelError, match="takes no device_map"):
        load("random:llama", device_map="auto")


# Catches: a cut checkpoint that ends in a traceback of another library.
def test_a_truncated_checkpoint_is_one_sentence(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_cache_that_does_not_fit_in_memory_is_named():
    target = Target(tiny("llama"), kv=Slab(rows=2, tokens=2**31 - 1))
    with pytest.raises(ModelError, match=r"kv: .* GiB for half of layer 0 cannot be had"):
        engine(target=target).generate([request()])
