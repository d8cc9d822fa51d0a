"""Greedy decoding is token-identical to transformers' generate, whatever drafts and however rows are batched."""

import pytest
import torch

from specdec import Engine, Request, Sampling, Target
from specdec_plugins.drafters.layer_skip import LayerSkip
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.drafters.none import NoDraft
from specdec_plugins.drafters.prompt_lookup import PromptLookup
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.schedulers.static import Static
from specdec_plugins.verifiers.greedy import Greedy
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.standard import Standard
from specdec_plugins.verifiers.typical import Typical
from tests import block_checkpoints
from tests.families import FAMILIES, VOCABULARY, greedy, prompts, tiny
from tests.scripted import Scripted, oracle

NEW = 24
DRAFTERS = {
    "none": lambda family, k: NoDraft(),
    "model": lambda family, k: DraftModel(model=tiny(family, seed=1), num_speculative_tokens=k),
    "self": lambda family, k: DraftModel(model=tiny(family), num_speculative_tokens=k),
    "layer_skip": lambda family, k: LayerSkip(num_speculative_tokens=k),
    "dspark": lambda family, k: block_checkpoints.drafter("rnn", k, family),
    "dflash": lambda family, k: block_checkpoints.drafter("z-lab", k, family),
    "prompt_lookup": lambda family, k: PromptLookup(num_speculative_tokens=k),
    "wrong_first": lambda family, k: _oracle(family, k, 0),
    "wrong_later": lambda family, k: _oracle(family, k, k - 1),
    "empty": lambda family, k: Scripted(script=lambda tokens, budget: [], num_speculative_tokens=k),
    "too_long": lambda family, k: Scripted(
        script=oracle(greedy(family, NEW), prompts(), k + 9), num_speculative_tokens=k
    ),
    "outside": lambda family, k: Scripted(script=_outside(family, k), num_speculative_tokens=k),
}


def _oracle(family, k, wrong):
    return Scripted(script=oracle(greedy(family, NEW), prompts(), k, wrong_at=wrong), num_speculative_tokens=k)


def _outside(family, k):
    right = oracle(greedy(family, NEW), prompts(), k)

    def script(tokens, budget):
        block = right(tokens, budget)
        # Ids below, at and above the vocabulary, in turn.
        block[len(tokens) % max(1, len(block)) :] = [(-1, VOCABULARY, VOCABULARY + 7)[len(tokens) % 3]]
        return block

    return script


def decode(family, drafter, verifier=None, scheduler=None, rows=4, new=NEW, attention="sdpa"):
    target = Target(tiny(family, attention=attention), kv=Slab(rows=rows, tokens=64))
    engine = Engine(target, drafter, verifier or Standard(), scheduler or Static())
    requests = [Request(prompt=p, sampling=Sampling(temperature=0, max_new_tokens=new)) for p in prompts()]
    return engine, engine.generate(requests)


def assert_same(completions, expected):
    assert [completion.tokens for completion in completions] == list(expected)


# Catches: positions or masks of another row, caches that keep rejected cells, a draft committed unverified, off-by-one
# of the budget, a sliding window applied by cell instead of by position, an id used as an index unchecked.
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batch_equals_generate(family, drafter, k):
    _, completions = decode(family, DRAFTERS[drafter](family, k))
    assert_same(completions, greedy(family, NEW))
    for completion in completions:
        counters = completion.counters
        assert counters.num_emitted_tokens == NEW == len(completion.tokens)
        assert counters.num_accepted_tokens <= counters.num_draft_tokens <= k * counters.num_steps


CHUNKED = [pytest.param(family, marks=() if family in ("llama", "gemma3") else pytest.mark.full) for family in FAMILIES]


# Catches: a prefill chunk that forgets its offset, a joining row that disturbs others, stale cells in a reused slot.
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", CHUNKED)
def test_chunked_prefill_and_late_joins_equal_generate(family, drafter, k):
    _, completions = decode(family, DRAFTERS[drafter](family, k), scheduler=Continuous(prefill_chunk=3), rows=2)
    assert_same(completions, greedy(family, NEW))


# Catches: a rule whose greedy case is not the argmax (a nucleus of a one-hot law that holds more than its mode).
@pytest.mark.parametrize("verifier", [Greedy(), Nucleus(), Typical(), Typical(replacement="argmax")])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_rule_is_greedy_at_temperature_zero(family, verifier):
    drafter = DraftModel(model=tiny(family, seed=1), num_speculative_tokens=3)
    _, completions = decode(family, drafter, verifier)
    assert_same(completions, greedy(family, NEW))


# Catches: a bool mask handed to eager attention, which adds it instead of hiding cells.
@pytest.mark.parametrize("family", FAMILIES)
def test_eager_attention_equals_generate(family):
    _, completions = decode(family, _oracle(family, 3, 1), attention="eager")
    assert_same(completions, greedy(family, NEW, attention="eager"))


# Catches: a draft cache that lacks the last accepted token, or holds rejected ones: acceptance would drop.
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_target_as_its_own_drafter_accepts_everything(family, k):
    _, completions = decode(family, DRAFTERS["self"](family, k))
    assert [completion.counters.acceptance_rate for completion in completions] == [1.0] * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_target_as_its_own_drafter_accepts_everything_at_temperature_one_in_float64(family):
    model = tiny(family, dtype=torch.float64)
    target = Target(model, kv=Slab(rows=4, tokens=64))
    engine = Engine(target, DraftModel(model=model, num_speculative_tokens=3), Standard(), Continuous(prefill_chunk=5))
    completions = engine.generate([Request(prompt=p, sampling=Sampling(max_new_tokens=NEW, seed=3)) for p in prompts()])
    assert [completion.counters.acceptance_rate for completion in completions] == [1.0] * 4
    assert len({completion.tokens for completion in completions}) == 4


# Catches: tree masks that let siblings see each other, positions by column and not by depth, commits that do not move.
@pytest.mark.parametrize("family", FAMILIES)
def test_token_trees_with_the_right_branch_second_equal_generate(family):
    right = oracle(greedy(family, NEW), prompts(), 2)

    def script(tokens, budget):
        block = right(tokens, budget)
        if len(block) < 2 or budget < 4:
            return []
        wrong = [(token + 1) % VOCABULARY for token in block]
        return [wrong[0], block[0], wrong[1], block[1]]  # two children of the pending token, two of the right one

    drafter = Scripted(script=script, num_speculative_tokens=4, parents=lambda width: [-1, -1, 1, 1][:width])
    _, completions = decode(family, drafter)
    assert_same(completions, greedy(family, NEW))
    assert all(completion.counters.num_per_length.get(3, 0) >= 4 for completion in completions)
