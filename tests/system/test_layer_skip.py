"""The target without some of its layers: the same weights, nothing changed, and a drafter that leaves no trace."""

import copy
import functools
import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from specdec import Engine, Request, Sampling, Target
from specdec.errors import CompatibilityError, ModelError
from specdec.law import Dense
from specdec.options import build
from specdec.probability import sample
from specdec.registry import load, names
from specdec.sequence import Sequence, make_batch
from specdec.types import Span
from specdec_plugins.drafters.layer_skip import LayerSkip, middle
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.schedulers.static import Static
from specdec_plugins.verifiers.standard import Standard
from tests.families import FAMILIES, greedy, prompts, tiny
from tests.system.test_invariants import IN_TURN, cells, fresh_cells

LAYERS = 6
KEPT = (0, 2, 3, 5)
SUBSETS = {
    "some": KEPT,
    "first": (0,),
    "last": (5,),
    "of one kind": (1, 4),  # the full ones of Gemma 3
    "of the other kind": (0, 2, 3),
    "all": tuple(range(LAYERS)),
}


def deep(family, dtype=torch.float64):
    return tiny(family, dtype=dtype, layers=LAYERS)


@functools.cache
def mixed_qwen2():
    """Qwen2 with a window in its later layers only: it builds its masks by what kinds of layers it has."""
    config = copy.deepcopy(deep("qwen2").config)
    config = type(config)(
        **{
            **config.to_dict(),
            "layer_types": None,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 3,
        }
    )
    assert config.layer_types == ["full_attention"] * 3 + ["sliding_attention"] * 3
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()
    model.load_state_dict(deep("qwen2").state_dict())
    return model


def model_of(name):
    return mixed_qwen2() if name == "qwen2, mixed" else deep(name)


def target_for(model, rows=4):
    return Target(model, kv=Slab(rows=rows, tokens=64))


def by_hand(model, layers, ids, cache=None, start=0):
    """Gemma 3 written out: logits [1, n, V] of ids [n] at positions from `start`, through some layers only."""
    text = model.model
    given = "cache" if "cache" in inspect.signature(type(text).forward).parameters else "past_key_values"
    positions = torch.arange(start, start + len(ids)).unsqueeze(0)
    back = positions[0].unsqueeze(1) - torch.arange(start + len(ids))
    hidden = text.embed_tokens(torch.tensor([ids]))
    for layer in layers:
        kind = model.config.layer_types[layer]
        seen = back >= 0
        if kind == "sliding_attention":
            seen = seen & (back < model.config.sliding_window)
        hidden = text.layers[layer](
            hidden,
            attention_mask=seen[None, None],
            position_embeddings=text.rotary_emb(hidden, positions, kind),
            position_ids=positions,
            **{given: cache},
        )
    return model.lm_head(text.norm(hidden))


def rebuilt(model, layers):
    """A model of its own, made from a config of so many layers and filled with the weights of the chosen ones."""
    name = "transformer.h" if model.config.model_type == "gpt2" else "model.layers"
    options = model.config.to_dict()
    options["n_layer" if model.config.model_type == "gpt2" else "num_hidden_layers"] = len(layers)
    if "layer_types" in options:
        options["layer_types"] = [model.config.layer_types[layer] for layer in layers]
    fresh = AutoModelForCausalLM.from_config(type(model.config)(**options), attn_implementation="sdpa")
    weights = {key: value for key, value in model.state_dict().items() if not key.startswith(name)}
    for place, layer in enumerate(layers):
        for key, value in model.state_dict().items():
            if key.startswith(f"{name}.{layer}."):
                weights[key.replace(f"{name}.{layer}.", f"{name}.{place}.")] = value
    fresh = fresh.double().eval()
    fresh.load_state_dict(weights)
    return fresh


# Catches: the kind of a layer looked up at its old place (a mask and a rope of the wrong kind), a layer too many.
@pytest.mark.parametrize("layers", SUBSETS.values(), ids=SUBSETS)
@torch.inference_mode()
def test_a_subset_of_gemma3_equals_a_loop_over_the_kept_layers(layers):
    model, ids = deep("gemma3"), list(prompts()[1])
    found = target_for(model).subset(layers).model(torch.tensor([ids]), use_cache=False).logits
    torch.testing.assert_close(found, by_hand(model, layers, ids), atol=1e-9, rtol=1e-9)


# Catches: the same in every family, layers that are counted by the old config, and windows that are lost where only one
# kind of layer is left. The staged side also catches offsets that forget cells, and keys stored under another layer.
@pytest.mark.parametrize("layers", SUBSETS.values(), ids=SUBSETS)
@pytest.mark.parametrize("name", [*FAMILIES, "qwen2, mixed"])
@torch.inference_mode()
def test_a_subset_equals_a_model_built_of_those_layers(name, layers):
    model, ids = model_of(name), list(prompts()[1])
    wanted = rebuilt(model, layers)(torch.tensor([ids]), use_cache=False).logits
    target = target_for(model)
    subset = target.subset(layers)
    assert subset.config.num_hidden_layers == len(layers)
    own = subset.model(torch.tensor([ids]), use_cache=False).logits
    torch.testing.assert_close(own, wanted, atol=1e-9, rtol=1e-9)
    slot = target.kv.acquire()
    first = subset.forward((slot,), Span(torch.tensor([ids[:7]]), (7,))).logits
    rest = [
        subset.forward((slot,), Span(torch.tensor([[token]]), (1,)), offset=7 + step).logits
        for step, token in enumerate(ids[7:])
    ]
    torch.testing.assert_close(torch.cat([first, *rest], 1), wanted, atol=1e-9, rtol=1e-9)
    assert target.kv.lengths[slot] == 0
    assert set(target.kv._keys) == set(layers)


# Catches: kept layers that read another layer's committed keys, or none, and drafts that do not see one another.
@torch.inference_mode()
def test_kept_layers_read_what_the_target_has_committed_for_them():
    model, ids = deep("gemma3"), list(prompts()[1])
    cache = DynamicCache()
    by_hand(model, range(LAYERS), ids[:12], cache)
    wanted = torch.cat(
        [by_hand(model, KEPT, [token], cache, 12 + step) for step, token in enumerate(ids[12:])], 1
    )  # the hidden states of the other layers never change: each cell is written once
    target = target_for(model)
    subset, slot = target.subset(KEPT), target.kv.acquire()
    target.forward((slot,), Span(torch.tensor([ids[:12]]), (12,)))
    target.kv.commit((slot,), torch.zeros((1, 0)), (12,), chain=True)
    found = [
        subset.forward((slot,), Span(torch.tensor([[token]]), (1,)), offset=step).logits
        for step, token in enumerate(ids[12:])
    ]
    torch.testing.assert_close(torch.cat(found, 1), wanted, atol=1e-9, rtol=1e-9)


def portrait(model):
    """Everything of a model that a shell could have changed."""
    return (
        model.config.to_dict(),
        model.generation_config.to_dict(),
        [(name, id(module), sorted(vars(module))) for name, module in model.named_modules()],
        [(name, id(parameter)) for name, parameter in model.named_parameters()],
        [getattr(module, "layer_idx", None) for module in model.modules()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        [id(module.config) for module in model.modules() if hasattr(module, "config")],
    )


# Catches: a layer_idx set anew, a config cut in place, a module list shortened, a hook or an attribute left behind, a
# copy of a weight, tables of children that the shell and the model share.
@pytest.mark.parametrize("family", FAMILIES)
def test_the_users_model_is_as_before(family):
    model = copy.deepcopy(deep(family, torch.float32))
    before, weights = portrait(model), {key: value.clone() for key, value in model.state_dict().items()}
    target = target_for(model)
    engine = Engine(target, LayerSkip(skip=(1, 4)), Standard(), Continuous())
    engine.generate(requests(0.0, new=6))
    shell = engine.drafter._draft.model
    assert portrait(model) == before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    own = {id(part) for part in (*model.parameters(), *model.buffers())}
    assert {id(part) for part in (*shell.parameters(), *shell.buffers())} <= own
    assert shell.get_output_embeddings() is model.get_output_embeddings()
    shell.register_forward_hook(lambda *_: 1 / 0)
    shell.get_decoder().register_forward_hook(lambda *_: 1 / 0)
    shell.get_decoder().some_attribute = torch.nn.Identity()
    assert portrait(model) == before


# Catches: a shell that runs the whole model, because a forward bound to the model was copied with its attributes.
@torch.inference_mode()
def test_a_forward_that_was_patched_onto_the_model_is_not_the_shells():
    model, ids = copy.deepcopy(deep("llama")), torch.tensor([prompts()[1]])
    wanted = target_for(deep("llama")).subset(KEPT).model(ids, use_cache=False).logits
    model.forward = functools.partial(type(model).forward, model)
    model.model.forward = functools.partial(type(model.model).forward, model.model)
    assert torch.equal(target_for(model).subset(KEPT).model(ids, use_cache=False).logits, wanted)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ((), "no layer is left of LlamaForCausalLM; keep at least one of 0 to 5"),
        ((0, 6, -1), r"has no layers \[6, -1\]; wanted some of 0 to 5; .* in ascending order"),
        ((0, 2, 2), r"got layers \[0, 2, 2\]; wanted each once, in ascending order"),
        ((2, 0), "ascending"),
    ],
)
def test_layers_that_cannot_be_had_are_named(layers, said):
    with pytest.raises(ModelError, match=said):
        target_for(deep("llama")).subset(layers)


# Catches: a model whose layers read each other's keys, cut all the same.
def test_a_model_whose_layers_are_tied_is_refused():
    model = copy.deepcopy(deep("llama"))
    model.config.num_kv_shared_layers = 2
    with pytest.raises(ModelError, match=r"llama ties its layers to one another \(num_kv_shared_layers\)"):
        target_for(model).subset((0, 1))


def requests(temperature, new=20):
    return [
        Request(prompt=p, id=str(i), sampling=Sampling(temperature=temperature, max_new_tokens=new, seed=i))
        for i, p in enumerate(prompts())
    ]


def engine_for(family, k=3, skip=None, rows=4, dtype=torch.float64, scheduler=None):
    drafter = LayerSkip(num_speculative_tokens=k, skip=skip)
    return Engine(target_for(deep(family, dtype), rows), drafter, Standard(), scheduler or Continuous(prefill_chunk=6))


def facts(completion):
    return completion.tokens, completion.finish_reason, completion.counters


# Catches: draft cells that the verification reads, positions or masks of another row, a row that has dropped out of the
# draft and is drafted for, late rows that meet cells of a draft. (Shallow models: tests/system/test_greedy.py.)
@pytest.mark.parametrize(
    ("family", "scheduler", "rows", "k"),
    [
        *((family, Static, 4, 3) for family in FAMILIES),
        *((family, lambda: Continuous(prefill_chunk=3), 2, k) for family in ("llama", "gemma3") for k in (1, 3, 7)),
    ],
)
def test_greedy_output_equals_generate(family, scheduler, rows, k):
    engine = engine_for(family, k, rows=rows, dtype=torch.float32, scheduler=scheduler())
    completions = engine.generate(requests(0.0, new=24))
    assert [c.tokens for c in completions] == list(greedy(family, 24, layers=LAYERS))
    assert all(0 < c.counters.num_draft_tokens <= k * c.counters.num_steps for c in completions)


# Catches: a draft at another row's offset, noise of the batch instead of the row, a padded row that is read.
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_a_ragged_batch_equals_the_row_alone(family):
    together = engine_for(family).generate(requests(1.0))
    single = engine_for(family, rows=1)
    for request, completion in zip(requests(1.0), together, strict=True):
        assert facts(single.generate([request])[0]) == facts(completion)


# Catches: keys and values of the draft that stay where the target's belong, lengths that a draft has moved.
@pytest.mark.parametrize(("family", "temperature"), IN_TURN)
def test_nothing_of_a_draft_stays_in_the_cache(family, temperature):
    engine = engine_for(family, rows=3, dtype=torch.float64)
    for request in requests(temperature, new=10):
        engine.submit(request)
    compared = 0
    while not engine.scheduler.idle:
        engine.step()
        for row in engine.scheduler.running:
            assert engine.target.kv.lengths[row.slot] == row.cached
            if not row.cached:
                continue
            wanted = fresh_cells(engine.target.model, row.tokens[: row.cached])
            for ours, fresh in zip(cells(engine.target.kv, row.slot), wanted, strict=True):
                torch.testing.assert_close(ours, fresh, atol=1e-9, rtol=1e-9)
                compared += 1
    assert compared > 50


# Catches: any difference between drafting and verifying: an offset or a position off by one, a token drafted twice.
@pytest.mark.parametrize(("temperature", "dtype"), [(0.0, torch.float32), (1.0, torch.float64)])
@pytest.mark.parametrize("family", FAMILIES)
def test_skipping_nothing_accepts_everything(family, temperature, dtype):
    completions = engine_for(family, skip=(), dtype=dtype).generate(requests(temperature))
    assert [c.counters.acceptance_rate for c in completions] == [1.0] * 4


def prepared(model, sampling, budget):
    """A target with the first two prompts of a length cached, and their batch."""
    target = target_for(model)
    rows = []
    for index, prompt in enumerate(prompts()[1:]):
        sequence = Sequence(
            request=Request(prompt=prompt, sampling=Sampling(seed=index, **sampling)), eos_ids=frozenset(), limit=64
        )
        sequence.slot, sequence.cached = target.kv.acquire(), len(prompt) - 1
        target.forward((sequence.slot,), Span(torch.tensor([prompt[:-1]]), (len(prompt) - 1,)))
        target.kv.commit((sequence.slot,), torch.zeros((1, 0)), (len(prompt) - 1,), chain=True)
        rows.append((sequence, budget[index]))
    return target, make_batch(rows)


# Catches: a law that is not the one drawn from: another temperature, another depth or row, a greedy draft at a
# temperature; a row that gets more than its budget.
@torch.inference_mode()
def test_tokens_are_drawn_from_the_law_that_is_handed_over_and_it_is_the_subsets():
    model, budget = deep("gemma3"), (3, 1, 2)
    target, batch = prepared(model, {"temperature": 0.7}, budget)
    drafter = LayerSkip(num_speculative_tokens=3, skip=(1, 4))
    drafter.bind(target)
    draft = drafter.propose(batch)
    assert isinstance(draft.law, Dense)
    assert draft.sizes.tolist() == list(budget)
    uniform = batch.noise.uniform("draft", 3)
    for index, row in enumerate(batch.rows):
        cache = DynamicCache()
        by_hand(model, range(LAYERS), row.tokens[:-1], cache)
        last = row.tokens[-1]
        for depth in range(budget[index]):
            logits = by_hand(model, KEPT, [last], cache, len(row.tokens) - 1 + depth)[0, -1]
            law = draft.law.probs[index, depth]
            torch.testing.assert_close(law, (logits / 0.7).softmax(-1), atol=1e-9, rtol=1e-9)
            last = int(draft.tokens[index, depth])
            assert last == int(sample(law[None], uniform[index, depth][None])[0])
    assert not draft.law.probs[1, 1:].any()


# Catches: a dense law of greedy rows, which every rule would have to read.
def test_a_greedy_draft_is_a_point_mass():
    target, batch = prepared(deep("llama"), {"temperature": 0}, (3, 3, 3))
    drafter = LayerSkip(num_speculative_tokens=3)
    drafter.bind(target)
    assert drafter.propose(batch).law is None


# Catches: NaN that becomes a draft token, or stays in a cell where attention reads it though it is masked (as it would
# if the draft were cut to its longest row, and the verification wrote fewer cells than the draft has staged).
@pytest.mark.parametrize("every", [3, 1])
def test_a_draft_that_gives_nan_counts_as_no_draft_and_poisons_nothing(every, monkeypatch):
    model = copy.deepcopy(deep("llama", torch.float32))
    drafting = []
    propose = LayerSkip.propose

    def watched(self, batch):
        drafting.append(True)
        try:
            return propose(self, batch)
        finally:
            drafting.pop()

    def poison(module, inputs, output):
        return output.masked_fill((inputs[0] % every == 0).unsqueeze(-1), float("nan")) if drafting else output

    monkeypatch.setattr(LayerSkip, "propose", watched)
    model.model.embed_tokens.register_forward_hook(poison)
    engine = Engine(target_for(model, 3), LayerSkip(skip=(1,)), Standard(), Continuous(prefill_chunk=4))
    completions = engine.generate(requests(0.0, new=24))
    assert [c.tokens for c in completions] == list(greedy("llama", 24, layers=LAYERS))
    clean = engine_for("llama", 4, (1,), rows=3, dtype=torch.float32).generate(requests(0.0, new=24))
    assert sum(c.counters.num_draft_tokens for c in completions) < sum(c.counters.num_draft_tokens for c in clean)
    assert any(c.counters.num_draft_tokens for c in completions) == (every > 1)
    kv = engine.target.kv
    assert all(torch.isfinite(store).all() for store in (*kv._keys.values(), *kv._values.values()))


@pytest.mark.parametrize(
    ("skip", "said"),
    [
        ((0, 1, 2, 3, 4, 5), ["no layer is left of the target's 6"]),
        (
            (7, -1, 2, 2),
            ["has no layer 7; wanted some of 0 to 5", "has no layer -1", "layers 2 are named more than once"],
        ),
        ((True, "a"), ["got True, wanted numbers of layers", "got 'a', wanted numbers"]),
    ],
)
def test_layers_that_cannot_be_skipped_are_all_named_before_the_first_step(skip, said):
    with pytest.raises(CompatibilityError) as caught:
        engine_for("llama", skip=skip)
    assert len(caught.value.problems) == len(said)
    for problem, part in zip(caught.value.problems, said, strict=True):
        assert part in problem


def test_a_target_that_has_no_subset_is_refused_as_one_that_does_not_fit():
    model = copy.deepcopy(deep("llama"))
    model.config.num_kv_shared_layers = 2
    with pytest.raises(CompatibilityError, match="drafter LayerSkip: subset: llama ties its layers"):
        LayerSkip().bind(target_for(model))


def test_a_drafter_serves_one_target_and_says_what_it_skips():
    drafter = LayerSkip()
    target = target_for(deep("llama"))
    drafter.bind(target)
    drafter.bind(target)
    assert drafter.notes == ["skips layers 1, 3 of 6"]
    with pytest.raises(CompatibilityError, match="bound to another target"):
        drafter.bind(target_for(deep("llama")))


@pytest.mark.parametrize(
    ("layers", "skipped"), [(1, ()), (2, (1,)), (3, (1,)), (6, (1, 3)), (8, (2, 4)), (32, tuple(range(8, 24, 2)))]
)
def test_the_default_keeps_the_first_layer_and_skips_within_the_middle_half(layers, skipped):
    assert middle(layers) == skipped


# Catches: options that only Python can give, and a drafter that no recipe finds.
@pytest.mark.parametrize(("given", "skip"), [({"skip": [2, 3]}, (2, 3)), ({"skip": []}, ()), ({}, None)])
def test_a_recipe_finds_it_and_lists_the_layers(given, skip):
    assert "layer_skip" in names("drafters")
    assert load("drafters", "layer_skip") is LayerSkip
    drafter, problems = build(LayerSkip, given, "drafters[0]", "layer_skip")
    assert not problems
    assert drafter.skip == skip


def test_a_target_of_one_layer_is_drafted_for_by_itself():
    engine = Engine(target_for(tiny("llama", layers=1)), LayerSkip(), Standard(), Static())
    assert [c.counters.acceptance_rate for c in engine.generate(requests(0.0, new=6))] == [1.0] * 4
