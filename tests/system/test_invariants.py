"""What must hold after every step, for every row, whoever its batch mates are."""

import pytest
import torch

from specdec import Engine, Request, Sampling, Target
from specdec.types import Span
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.schedulers.static import Static
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.standard import Standard
from specdec_plugins.verifiers.typical import Typical
from tests.families import FAMILIES, greedy, prompts, tiny
from tests.scripted import Scripted, oracle

FULL = pytest.mark.full
RULES = [Standard(), Nucleus(theta=0.9), Typical()]
# The whole product in full; every day, sampled, all rules on two families and one on the others, and greedy on one.
CASES = [
    pytest.param(
        family,
        rule,
        temperature,
        id=f"{family}-{type(rule).__name__}-{temperature}",
        marks=() if family == "gemma3" or (temperature and (family == "llama" or isinstance(rule, Nucleus))) else FULL,
    )
    for family in FAMILIES
    for rule in RULES
    for temperature in (0.0, 1.0)
]
# Sampled in every other family, greedy in those between.
IN_TURN = [
    pytest.param(family, temperature, marks=() if (place + int(temperature)) % 2 else FULL)
    for place, family in enumerate(FAMILIES)
    for temperature in (0.0, 1.0)
]


def engine_for(family, verifier, rows=4, dtype=torch.float64, scheduler=None, k=3):
    target = Target(tiny(family, dtype=dtype), kv=Slab(rows=rows, tokens=64))
    drafter = DraftModel(model=tiny(family, seed=1, dtype=dtype), num_speculative_tokens=k)
    return Engine(target, drafter, verifier, scheduler or Continuous(prefill_chunk=6))


def requests(temperature=1.0, new=20, **options):
    return [
        Request(prompt=p, id=str(i), sampling=Sampling(temperature=temperature, max_new_tokens=new, seed=i, **options))
        for i, p in enumerate(prompts())
    ]


def facts(completion):
    return completion.tokens, completion.finish_reason, completion.counters


# Catches: one length or one noise stream for the batch, a padded row that is read, memory of another slot.
@pytest.mark.parametrize(("family", "verifier", "temperature"), CASES)
def test_a_row_of_a_ragged_batch_equals_the_row_alone(family, verifier, temperature):
    wanted = requests(temperature, new=12)
    together = engine_for(family, verifier).generate(wanted)
    single = engine_for(family, verifier, rows=1)
    for request, completion in zip(wanted, together, strict=True):
        assert facts(single.generate([request])[0]) == facts(completion)


# Catches: results that depend on filters of a batch mate, a greedy row that samples beside sampling ones.
def test_rows_with_different_sampling_equal_the_rows_alone():
    mixed = [
        Sampling(temperature=0, max_new_tokens=18),
        Sampling(temperature=0.7, top_k=7, max_new_tokens=9, seed=1),
        Sampling(temperature=1.3, top_p=0.8, min_p=0.02, max_new_tokens=18, seed=2),
        Sampling(repetition_penalty=1.4, max_new_tokens=13, seed=3),
    ]
    wanted = [Request(prompt=p, id=str(i), sampling=s) for i, (p, s) in enumerate(zip(prompts(), mixed, strict=True))]
    together = engine_for("llama", Standard()).generate(wanted)
    alone = [engine_for("llama", Standard(), rows=1).generate([request])[0] for request in wanted]
    assert [facts(completion) for completion in together] == [facts(completion) for completion in alone]


# Catches: rows that are matched to results by position, a slot that keeps something of its last owner.
def test_permuting_requests_permutes_results():
    forward = engine_for("llama", Standard(), rows=3).generate(requests())
    backward = engine_for("llama", Standard(), rows=3).generate(requests()[::-1])[::-1]
    assert [facts(completion) for completion in forward] == [facts(completion) for completion in backward]


# Catches: state that leaks from call to call: step counters, drafter caches, a changed config or seed.
@pytest.mark.parametrize("verifier", RULES, ids=lambda rule: type(rule).__name__)
def test_two_calls_on_one_engine_equal_two_calls_on_fresh_ones(verifier):
    engine, wanted = engine_for("llama", verifier, rows=2), requests(new=10)
    before = engine.target.model.config.to_dict(), engine.target.model.generation_config.to_dict()
    first, second = engine.generate(wanted), engine.generate(wanted[::-1])
    fresh = [engine_for("llama", verifier, rows=2).generate(some) for some in (wanted, wanted[::-1])]
    assert [facts(c) for c in first] == [facts(c) for c in fresh[0]]
    assert [facts(c) for c in second] == [facts(c) for c in fresh[1]]
    assert before == (engine.target.model.config.to_dict(), engine.target.model.generation_config.to_dict())


def test_static_and_continuous_schedules_give_the_same_tokens():
    outputs = [
        [facts(c) for c in engine_for("gemma3", Standard(), rows=2, scheduler=scheduler).generate(requests())]
        for scheduler in (Static(), Continuous(prefill_chunk=2))
    ]
    assert outputs[0] == outputs[1]


def cells(kv, slot):
    length = kv.lengths[slot]
    return [torch.stack([kv._keys[layer][slot, :, :length], kv._values[layer][slot, :, :length]]) for layer in kv._keys]


def fresh_cells(model, tokens):
    target = Target(model, kv=Slab(rows=1, tokens=64))
    slot = target.kv.acquire()
    target.forward((slot,), Span(torch.tensor([tokens]), (len(tokens),)))
    target.kv.commit((slot,), torch.zeros((1, 0)), (len(tokens),), chain=True)
    return cells(target.kv, slot)


# Catches: wrong rollbacks: a rejected cell kept, a tree cell not moved, a key rotated for another position.
@pytest.mark.parametrize(("family", "temperature"), IN_TURN)
def test_committed_cells_equal_a_fresh_prefill_after_every_step(family, temperature):
    engine = engine_for(family, Standard(), rows=3, dtype=torch.float32)
    for request in requests(temperature, new=12):
        engine.submit(request)
    compared = 0
    while not engine.scheduler.idle:
        engine.step()
        for row in engine.scheduler.running:
            assert engine.target.kv.lengths[row.slot] == row.cached
            assert row.behind >= 0
            sides = [(engine.target.kv, engine.target.model), (engine.drafter._draft.kv, engine.drafter._draft.model)]
            for kv, model in sides:
                known = row.tokens[: kv.lengths[row.slot]]
                if not known:
                    continue
                for found, wanted in zip(cells(kv, row.slot), fresh_cells(model, known), strict=True):
                    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
                    compared += 1
    assert compared > 50


# The same for trees, where kept cells have to move down.
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_committed_cells_of_trees_equal_a_fresh_prefill(family):
    right = oracle(greedy(family, 24), prompts(), 2)

    def script(tokens, budget):
        block = right(tokens, budget)
        return [(block[0] + 1) % 80, block[0], block[1]] if len(block) == 2 and budget >= 3 else []

    target = Target(tiny(family), kv=Slab(rows=4, tokens=64))
    drafter = Scripted(script=script, num_speculative_tokens=3, parents=lambda width: [-1, -1, 1][:width])
    engine = Engine(target, drafter, Standard(), Static())
    for request in requests(0.0, new=12):
        engine.submit(request)
    moved = 0
    while not engine.scheduler.idle:
        engine.step()
        moved += not drafter.observed[-1][1].chain
        for row in engine.scheduler.running:
            if row.cached:
                for found, wanted in zip(
                    cells(target.kv, row.slot), fresh_cells(target.model, row.tokens[: row.cached]), strict=True
                ):
                    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
    assert moved >= 3


class Poison:
    """A fault of the weights: wherever 5 is followed by 79, embeddings of the whole row are not finite."""

    def __init__(self, model, value):
        self.value = value
        self.handle = model.base_model.embed_tokens.register_forward_hook(self.hook)

    def hook(self, module, inputs, output):
        output = output.clone()
        hit = ((inputs[0][:, :-1] == 5) & (inputs[0][:, 1:] == 79)).any(1)
        output[hit] = self.value
        return output


# Catches: an argmax or a multinomial over NaN that becomes a token; NaN cells that poison the slot's next owner.
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_ends_on_nan_leaves_its_slot_clean_and_the_others_alone(temperature, value):
    plain = requests(temperature, new=6)
    bad = Request(prompt=(5, 79, 6), id="bad", sampling=Sampling(temperature=temperature, max_new_tokens=6))
    engine = engine_for("llama", Standard(), rows=2)
    unhurt = engine.generate(plain)
    poison = Poison(engine.target.model, value)
    try:
        completions = engine.generate([bad, *plain, Request(prompt=bad.prompt, id="again", sampling=bad.sampling)])
        later = engine.generate(plain)
    finally:
        poison.handle.remove()
    assert [c.finish_reason for c in completions] == ["error", *["length"] * len(plain), "error"]
    assert completions[0].tokens == ()
    assert [facts(c) for c in completions[1:-1]] == [facts(c) for c in unhurt]
    assert [facts(c) for c in later] == [facts(c) for c in unhurt]
    for layer in engine.target.kv._keys:
        assert torch.isfinite(engine.target.kv._keys[layer]).all()
        assert torch.isfinite(engine.target.kv._values[layer]).all()


# Catches: a draft law of NaN that is compared, accepted or handed to the residual; NaN left in the draft model's cache.
def test_a_draft_model_that_gives_nan_counts_as_no_draft():
    engine = engine_for("llama", Standard(), rows=2)
    wanted = [Request(prompt=(5, 79, 6), id="bad", sampling=Sampling(max_new_tokens=8, seed=9)), *requests(new=8)]
    clean = engine.generate(wanted)
    poison = Poison(engine.drafter._draft.model, float("nan"))
    try:
        completions = engine.generate(wanted)
    finally:
        poison.handle.remove()
    assert completions[0].finish_reason == "length"
    assert completions[0].counters.num_draft_tokens == 0
    assert [facts(c) for c in completions[1:]] == [facts(c) for c in clean[1:]]
    for layer in engine.drafter._draft.kv._keys:
        assert torch.isfinite(engine.drafter._draft.kv._keys[layer]).all()


# Catches: storage that is made anew, slots that are never given back, counters of finished requests that pile up.
def test_many_requests_leave_nothing_behind():
    engine = engine_for("llama", Standard(), rows=2)
    engine.generate(requests(new=4))
    pointers = [tensor.data_ptr() for tensor in engine.target.kv._keys.values()]
    for _ in range(10):
        engine.generate(requests(new=4))
    assert [tensor.data_ptr() for tensor in engine.target.kv._keys.values()] == pointers
    assert engine.target.kv.room == engine.drafter._draft.kv.room == 2
    assert not engine._progress


# Catches: a stream whose reader walks away and whose rows still sit in the cache at the next call.
def test_an_abandoned_stream_leaves_the_engine_usable():
    engine = engine_for("llama", Standard(), rows=2)
    wanted = [facts(c) for c in engine.generate(requests())]
    events = engine.stream(requests())
    next(events)
    events.close()
    assert engine.target.kv.room == 2
    assert [facts(c) for c in engine.generate(requests())] == wanted


# Catches: a draft model whose own context is shorter: it must fall silent, not crash.
def test_past_the_draft_models_context_plain_decoding_finishes_the_job():
    target = Target(tiny("gpt2"), kv=Slab(rows=4, tokens=64))
    drafter = DraftModel(model=tiny("gpt2", positions=26), num_speculative_tokens=3)
    completions = Engine(target, drafter, Standard(), Static()).generate(requests(0.0, new=24))
    assert [c.tokens for c in completions] == list(greedy("gpt2", 24))
    assert 0 < completions[1].counters.num_drafts < completions[1].counters.num_steps


# Catches: widths compared instead of laws: a draft with fewer or more ids than the target must still be exact.
@pytest.mark.parametrize("width", [70, 95])
def test_a_draft_vocabulary_of_another_width_stays_exact(width):
    draft = tiny("llama", seed=1)
    head = torch.nn.Linear(32, width, bias=False)
    with torch.no_grad():
        head.weight.copy_(draft.lm_head.weight[torch.arange(width) % 80])
    other = torch.nn.Module.__new__(type(draft))
    other.__dict__.update(draft.__dict__)
    other._modules = {**draft._modules, "lm_head": head}
    target = Target(tiny("llama"), kv=Slab(rows=4, tokens=64))
    completions = Engine(target, DraftModel(model=other, num_speculative_tokens=3), Standard(), Static()).generate(
        requests(0.0, new=24)
    )
    assert [c.tokens for c in completions] == list(greedy("llama", 24))


# Catches: a seed that is ignored, or used for every request alike.
def test_seeds_change_samples_and_repeat_them():
    def run(seed):
        request = Request(prompt=(1, 2, 3), sampling=Sampling(max_new_tokens=16, seed=seed))
        return engine_for("llama", Standard(), rows=1).generate([request])[0].tokens

    assert run(1) == run(1)
    assert len({run(seed) for seed in range(3)}) == 3
