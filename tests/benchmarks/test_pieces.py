"""What the pieces of a step cost at a vocabulary of 152k: `pytest tests/benchmarks -n 0 --benchmark-enable`."""

import functools
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specdec import Engine, Request, Sampling, Target
from specdec.drafter import draw_chain
from specdec.law import Dense
from specdec.noise import Noise
from specdec.sequence import Sequence, make_batch
from specdec.settle import draw, settle
from specdec.types import Draft, Scores
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.block import Block
from specdec_plugins.verifiers.greedy import Greedy
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.standard import Standard

VOCABULARY, NODES = 151_936, 4
ROWS = pytest.mark.parametrize("rows", [1, 8])
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 1.0])


@pytest.fixture(autouse=True)
def untracked():
    with torch.inference_mode():
        yield


@functools.cache
def wide(seed):
    config = CONFIG_MAPPING["qwen2"](
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def batch_of(rows, temperature=1.0):
    found = []
    for slot in range(rows):
        request = Request(prompt=(1, 2 + slot), sampling=Sampling(temperature=temperature, seed=slot))
        sequence = Sequence(request=request, eos_ids=frozenset(), limit=10**6)
        sequence.slot, sequence.cached = slot, 1
        found.append((sequence, NODES))
    return make_batch(found)


def judged(rows):
    """A draft and its scores."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((rows, 1 + NODES, VOCABULARY), generator=generator)
    law = (logits[:, :NODES] + torch.randn((rows, NODES, VOCABULARY), generator=generator)).softmax(-1)
    tokens = law.argmax(-1)
    scores = Scores(
        torch.cat([tokens[:, :1], tokens], 1), logits, logits.softmax(-1), {}, torch.ones(rows, dtype=torch.bool)
    )
    return Draft(tokens, torch.full((rows,), NODES), law=Dense(law)), scores, Noise((0,) * rows, tuple(range(rows)))


@ROWS
@pytest.mark.parametrize("rule", [Standard(), Nucleus(), Greedy(), Block()], ids=lambda rule: type(rule).__name__)
def test_verify(benchmark, rule, rows):
    draft, scores, noise = judged(rows)
    assert len(benchmark(rule.verify, draft, scores, noise, None).lengths) == rows


@ROWS
def test_settle(benchmark, rows):
    draft, scores, noise = judged(rows)
    verdict = Standard().verify(draft, scores, noise, None)
    following, none = draw(verdict, noise), torch.zeros(rows, dtype=torch.int64)

    def fresh():
        return (batch_of(rows), draft, scores, verdict, following, none, None), {}

    kept = benchmark.pedantic(settle, setup=fresh, rounds=50)
    assert all(kept.tokens)


@ROWS
def test_stage(benchmark, rows):
    cache, slots = Slab(rows=rows, tokens=64), tuple(range(rows))
    assert benchmark(cache.stage, slots, (1 + NODES,) * rows, 1 + NODES).where.cells.shape == (rows, 1 + NODES)


@ROWS
@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_commit(benchmark, rows, chain):
    cache, slots = Slab(rows=rows, tokens=64), tuple(range(rows))
    staged, new = cache.stage(slots, (1 + NODES,) * rows, 1 + NODES), torch.zeros((rows, 2, 1 + NODES, 64))
    for layer in range(24):
        staged.update(new, new, layer)
    offsets = torch.tensor([[0, 2, 4]]).repeat(rows, 1)

    def fresh():
        cache.truncate(slots, (0,) * rows)
        return (slots, offsets, (3,) * rows), {"chain": chain}

    benchmark.pedantic(cache.commit, setup=fresh, rounds=50)
    assert cache.lengths == [3] * rows


@ROWS
@TEMPERATURES
def test_draw_chain(benchmark, rows, temperature):
    batch = batch_of(rows, temperature)
    logits = torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(0)).bfloat16()
    draft = benchmark(draw_chain, batch, [NODES] * rows, lambda depth, active, last: logits)
    assert draft.tokens.shape == (rows, NODES)


@ROWS
@TEMPERATURES
def test_step(benchmark, rows, temperature):
    target = Target(wide(0), kv=Slab(rows=rows, tokens=4000))
    engine = Engine(target, DraftModel(model=wide(1), num_speculative_tokens=NODES), Nucleus(), Continuous())
    for row in range(rows):
        sampling = Sampling(temperature=temperature, max_new_tokens=3900, ignore_eos=True, seed=row)
        engine.submit(Request(prompt=(1, 2 + row), sampling=sampling))
    engine.step()
    counted = SimpleNamespace(events=[])
    benchmark.pedantic(lambda: counted.events.append(engine.step()), rounds=20, warmup_rounds=2)
    assert all(len(events) == rows for events in counted.events)
