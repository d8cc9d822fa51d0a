"""The target's cache: what was rejected never happened, and a model that cannot be rewound is refused."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from specdec import Target
from specdec.errors import ModelError
from specdec.preflight import preflight
from specdec.types import Span
from specdec_plugins.kv.slab import Slab
from tests.families import greedy, prompts, tiny
from tests.faults.kit import Forwards, ask, build, engine, generate, in_turn, own, serve
from tests.scripted import Scripted, oracle

TEXT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)


def script_of(family, k, wrong_at=None, new=24, attention="sdpa"):
    return oracle(greedy(family, new, attention=attention), prompts(), k, wrong_at=wrong_at)


def all_rows(drafter, family="llama", new=24, **options):
    done = engine(drafter, family, **options).generate([ask(prompt, new=new) for prompt in prompts()])
    return [completion.tokens for completion in done]


# Catches: positions that are not moved back with the cells of a rejection; rotary models hide some of it, learned
# positions none.
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("wrong_at", [0, 1, 3])
def test_positions_go_back_with_a_rejection(family, wrong_at):
    drafter = Scripted(script=script_of(family, 4, wrong_at))
    assert all_rows(drafter, family) == list(greedy(family, 24))


# Catches: storage that is cut and made anew at a rejection, and cells past the committed length that are attended.
def test_storage_stays_in_its_place_and_stale_cells_are_never_seen():
    one = engine(Scripted(script=script_of("llama", 4, 1)))
    for prompt in prompts():
        one.submit(ask(prompt, new=24))
    done, places = {}, set()
    while not one.scheduler.idle:
        done |= {event.completion.tokens: None for event in one.step() if event.completion}
        kv = one.target.kv
        places.add(tuple(store.data_ptr() for store in (*kv._keys.values(), *kv._values.values())))
        for slot, length in enumerate(kv.lengths):
            for store in (*kv._keys.values(), *kv._values.values()):
                store[slot, :, length:] = 1e4
    assert set(done) == set(greedy("llama", 24))
    assert len(places) == 1


# Catches: a recorded past that is longer than the window's mask says, once the window is full.
@pytest.mark.parametrize("wrong_at", range(4))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_sliding_window_survives_a_rejection_anywhere_in_a_block(attention, wrong_at):
    drafter = Scripted(script=script_of("mistral", 4, wrong_at, 40, attention))
    model = tiny("mistral", attention=attention)
    assert all_rows(drafter, model=model, new=40) == list(greedy("mistral", 40, attention=attention))


# Catches: a rollback into cells that a windowed layer has thrown away.
@pytest.mark.parametrize("wrong_at", [0, 2, None])
def test_alternating_windows_survive_a_rejection_behind_a_prompt_longer_than_they_are(wrong_at):
    assert max(map(len, prompts())) > tiny("gemma3").config.sliding_window
    drafter = Scripted(script=script_of("gemma3", 4, wrong_at))
    assert all_rows(drafter, "gemma3") == list(greedy("gemma3", 24))


# Catches: a window that holds one new token too few or K too many when several come at once.
@pytest.mark.parametrize("k", [1, 4, 7])
def test_no_position_of_a_block_sees_more_than_its_window(k):
    one = engine(Scripted(script=script_of("mistral", k, k - 1), num_speculative_tokens=k), "mistral")
    with Forwards(one.target.model) as forwards:
        one.generate([ask(prompt) for prompt in prompts()])
    widest = 0
    for fed in forwards.inputs:
        seen, positions = fed["mask"][:, 0].sum(-1), fed["positions"]
        real = (positions > 0) | (torch.arange(positions.shape[1]) == 0)
        assert torch.equal(seen[real], torch.clamp(positions + 1, max=8)[real])
        widest = max(widest, int(seen.max()))
    assert widest == 8
    assert max(fed["ids"].shape[1] for fed in forwards.inputs) >= k + 1


SMALL = {"vocab_size": 80, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
HYBRID = {
    "bamba": {**HEADS, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
              "mamba_d_state": 8},
    "falcon_h1": {**HEADS, "mamba_d_ssm": 32, "mamba_n_heads": 8, "mamba_d_head": 4, "mamba_n_groups": 1,
                  "mamba_d_state": 8},
    "granitemoehybrid": {**HEADS, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8,
                         "mamba_n_groups": 1, "mamba_d_state": 8, "shared_intermediate_size": 32},
    "zamba2": {**HEADS, "layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8, "mamba_d_state": 8,
               "mamba_ngroups": 1, "attention_head_dim": 8},
    "jamba": {**HEADS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False,
              "num_experts": 2},
    "qwen3_next": {**HEADS, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
                   "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8,
                   "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
                   "shared_expert_intermediate_size": 16},
    "lfm2": {**HEADS, "layer_types": ["conv", "full_attention"]},
}  # fmt: skip
RECURRENT = {
    "mamba": {**SMALL, "state_size": 4},
    "mamba2": {**SMALL, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
    "rwkv": {**SMALL, "attention_hidden_size": 32},
}


def refused(kind, options, auto=AutoModelForCausalLM):
    """What is said of a model of a family that must not be decoded."""
    model = auto.from_config(AutoConfig.for_model(kind, **options)).eval()
    with pytest.raises(ModelError) as caught:
        preflight(Target(model, kv=Slab(rows=2, tokens=64)))
    return str(caught.value)


# Catches: a rewind that does nothing to a state, so that rejected drafts stay in it.
@pytest.mark.parametrize("kind", RECURRENT)
def test_a_recurrent_model_is_refused_by_its_name(kind):
    assert refused(kind, RECURRENT[kind]).startswith(f"{kind}: ")


# Catches: attention layers beside recurrent ones taken for a cache that can be rewound; a model whose forward of
# several tokens takes its single-token branch.
@pytest.mark.parametrize("kind", HYBRID)
def test_a_hybrid_model_is_refused_by_its_name(kind):
    assert refused(kind, HYBRID[kind]).startswith(f"{kind}: ")


# Catches: linear attention taken for attention, at any mixture of full, short and empty drafts.
def test_linear_attention_is_refused_by_the_name_of_its_layers():
    assert "layers of type linear_attention cannot be rewound by length" in refused("qwen3_next", HYBRID["qwen3_next"])


# Catches: a state of rejected drafts that a later request with the same beginning finds.
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_row_that_is_used_again_knows_nothing_of_what_was_rejected_in_it(family):
    drafter = Scripted(script=lambda tokens, budget: [(tokens[-1] * 7 + i) % 80 for i in range(budget)])
    one = engine(drafter, family, rows=1)
    for length in (10, 7, 10, 3):
        done = one.generate([ask(TEXT[:length], new=16)])[0]
        assert done.tokens == generate(tiny(family), TEXT[:length], 16)
    assert any(kept.drafted[0] > kept.accepted[0] for _, kept in drafter.observed)


TINY_T5 = {"vocab_size": 80, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
TINY_BART = {
    "vocab_size": 80, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


# Catches: a cross-attention cache that is cropped with the text, or a cache class chosen for another kind of model.
@pytest.mark.parametrize(
    ("kind", "options", "auto"),
    [("t5", TINY_T5, AutoModelForSeq2SeqLM), ("bart", TINY_BART, AutoModelForSeq2SeqLM),
     ("whisper", {**TINY_BART, "num_mel_bins": 8}, AutoModelForSpeechSeq2Seq)],
)  # fmt: skip
def test_an_encoder_decoder_is_refused_at_construction(kind, options, auto):
    assert f"{kind} is an encoder-decoder; wanted a decoder-only model" in refused(kind, options, auto)


# Catches: an error of position or content that each rollback adds to, until it shows.
def test_after_two_hundred_tokens_of_rollbacks_the_cells_are_those_of_a_fresh_prefill():
    model = tiny("llama", positions=256)
    wanted = generate(model, TEXT, 200)
    whole = TEXT + wanted

    def script(tokens, budget):
        block = list(whole[len(tokens) : len(tokens) + budget])
        place = len(tokens) % 5
        return [(token + (i == place)) % 80 for i, token in enumerate(block)]

    one = engine(Scripted(script=script), model=model, rows=1, tokens=256)
    one.submit(ask(TEXT, new=201))
    while one.scheduler.waiting or len(one.scheduler.running[0].tokens) < 210:
        one.step()
    row = one.scheduler.running[0]
    assert tuple(row.tokens[:210]) == whole
    fresh = Target(model, kv=Slab(rows=1, tokens=256))
    slot = fresh.kv.acquire()
    fresh.forward((slot,), Span(torch.tensor([row.tokens[: row.cached]]), (row.cached,)))
    for layer in fresh.kv._keys:
        for name in ("_keys", "_values"):
            found, want = (getattr(target.kv, name)[layer][0, :, : row.cached] for target in (one.target, fresh))
            torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


# Catches: positions and cells that drift apart.
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_every_forward_begins_at_the_length_that_is_cached(family):
    drafter = Scripted(script=in_turn(script_of(family, 4, 2), (4, 2, 0, 3)))
    one = engine(drafter, family)
    with Forwards(one.target.model) as forwards:
        one.generate([ask(prompt) for prompt in prompts()])
    assert len(forwards.inputs) == len(drafter.observed) > 5
    emitted = {}
    for fed, (batch, kept) in zip(forwards.inputs, drafter.observed, strict=True):
        for index, row in enumerate(batch.rows):
            prompt = row.request.prompt
            # All but the last token of what is known; the prompt is cached at once, from its first token on.
            before = len(prompt) - 1 + emitted.get(prompt, 0) if kept.tokens[index] else 0
            assert int(fed["positions"][index, 0]) == before
            emitted[prompt] = emitted.get(prompt, 0) + len(kept.tokens[index])


# Catches: buffers of the step before that are verified when nothing is drafted near the end of the context.
@pytest.mark.parametrize("widths", [(4, 0), (3, 0, 1), (4, 4, 0)])
def test_near_the_end_of_the_context_no_draft_of_a_step_before_is_verified(widths):
    model = tiny("gpt2", positions=40)
    whole = TEXT + generate(model, TEXT, 30)

    def right(tokens, budget):
        return list(whole[len(tokens) : len(tokens) + budget])

    drafter = Scripted(script=in_turn(right, widths))
    one = engine(drafter, model=model)
    with Forwards(model) as forwards:
        done = one.generate([ask(TEXT, new=60)])[0]
    assert (done.tokens, done.finish_reason) == (whole[10:], "context")
    drafted = [list(tokens) for ((_, tokens),) in drafter.proposed]
    fed = [inputs["ids"][0, 1:].tolist() for inputs in forwards.inputs[-done.counters.num_steps :]]
    assert fed == drafted + [[]] * (len(fed) - len(drafted))


# Catches: a cache of transformers' own that comes in by the generation config, with residual windows or other devices.
@pytest.mark.parametrize("kind", ["quantized", "offloaded", "static", "hybrid"])
def test_the_cache_is_the_engines_own_whatever_the_generation_config_asks_for(kind):
    model = own()
    model.generation_config.cache_implementation = kind
    model.generation_config.cache_config = {"backend": "quanto", "residual_length": 4}
    done = serve(build("layer_skip"), ask(TEXT, new=20), model=model)
    assert done.tokens == generate(tiny("llama"), TEXT, 20)
    assert model.generation_config.cache_implementation == kind
