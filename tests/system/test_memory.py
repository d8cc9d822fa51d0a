"""Memory of wide results is used again, never while somebody holds what is in it, and does not grow."""

import functools
import gc

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specdec import Engine, Request, Sampling, Target, memory
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.nucleus import Nucleus

CPU = torch.device("cpu")
SHAPE = (3, 300_000)
WIDE = 70_001


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(memory, "_kept", memory._Kept())


@functools.cache
def wide(seed):
    config = CONFIG_MAPPING["qwen2"](
        vocab_size=WIDE, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def engine_for(**options):
    target = Target(wide(0), kv=Slab(rows=3, tokens=48))
    return Engine(target, DraftModel(model=wide(1), num_speculative_tokens=3), Nucleus(), Continuous(), **options)


def requests(start):
    return [
        Request(
            prompt=tuple(range(1, 3 + row)),
            sampling=Sampling(temperature=float(row > 0), max_new_tokens=5 + row, ignore_eos=True, seed=start + row),
        )
        for row in range(3)
    ]


# Catches: new memory every time.
def test_memory_that_nobody_holds_is_used_again():
    first = memory.empty(SHAPE, torch.float32, CPU)
    place = first.data_ptr()
    del first
    assert memory.empty(SHAPE, torch.float32, CPU).data_ptr() == place
    assert memory.empty((300_000, 2), torch.float32, CPU).data_ptr() == place  # something narrower fits, too


# Catches: memory given away while a view, a slice's array or another name for it lives.
@pytest.mark.parametrize(
    "hold", [lambda x: x, lambda x: x[1:2, 5:], lambda x: x.view(-1).unsqueeze(0), lambda x: x.numpy(),
             lambda x: x.detach(), lambda x: x.expand(2, *SHAPE), lambda x: x.untyped_storage()],
)  # fmt: skip
@pytest.mark.parametrize("inference", [False, True])
def test_memory_that_somebody_holds_is_left_alone(hold, inference):
    with torch.inference_mode(inference):
        first = memory.empty(SHAPE, torch.float32, CPU)
        place = first.data_ptr()
        held = hold(first)
        del first
        assert memory.empty(SHAPE, torch.float32, CPU).data_ptr() != place
        del held
        assert place in {block.data_ptr() for block in [memory.empty(SHAPE, torch.float32, CPU) for _ in range(2)]}


# Catches: every size ever asked for is kept.
def test_what_is_kept_is_bounded():
    for size in range(20):
        memory.empty((2**20 * (1 + size),), torch.uint8, CPU)
    assert len(memory._kept.blocks) <= 8


# Catches: a step that writes into the scores, laws or verdicts of the step before, which a trace still holds.
def test_what_a_trace_holds_keeps_its_numbers():
    held = []

    def trace(batch, draft, scores, verdict, kept):
        found = [scores.logits, scores.probs, verdict.next_probs, *([draft.law.dense()] if draft.law else [])]
        held.append([(tensor, tensor.clone()) for tensor in found])

    traced = engine_for(trace=trace).generate(requests(0))
    assert len(held) > 3
    assert all(torch.equal(tensor, copy) for step in held for tensor, copy in step)
    assert [one.tokens for one in engine_for().generate(requests(0))] == [one.tokens for one in traced]


# Catches: tensors of a step or a request that an engine keeps, blocks that are never used again. What the process
# takes, with a narrow vocabulary, is in test_survival.py.
def test_an_engine_keeps_no_tensor_of_what_has_ended():
    engine = engine_for()

    def living():
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    for start in range(4):
        engine.generate(requests(start))
    before = living()
    for start in range(30):
        engine.generate(requests(start))
    assert living() <= before  # fewer, where what earlier tests left behind has gone meanwhile
    assert sum(map(len, memory._kept.blocks)) <= 8 * (3 * 4 * WIDE * 4)  # of the widest result, [B, 1+N, V]
