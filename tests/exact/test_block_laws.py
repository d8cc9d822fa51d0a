"""What block drafters hand over: the equations, recomputed without a cache, and laws that their tokens follow."""

import functools

import pytest
import torch
from attrs import evolve

from specdec import Engine, Request, Sampling, Target
from specdec.testing import ALPHA, chi_square
from specdec_plugins.drafters.blocks.backbone import Backbone
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.schedulers.static import Static
from specdec_plugins.verifiers.standard import Standard
from tests import block_equations
from tests.block_checkpoints import drafter, networks
from tests.families import VOCABULARY, prompts, tiny
from tests.faults.kit import Watched, ask, engine, facts, serve


@functools.cache
def features(tokens, taps):
    """Outputs of some decoder layers over tokens, side by side [L, taps * H], from one plain forward."""
    model, found = tiny("qwen3", layers=4), {}
    hooks = [
        model.model.layers[tap].register_forward_hook(
            lambda _, __, out, tap=tap: found.update({tap: out[0] if isinstance(out, tuple) else out})
        )
        for tap in taps
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.cat([found[tap][0] for tap in taps], -1)


def looks(shape, length, width):
    """Which keys each row sees, layer by layer, place by place."""
    found = []
    for window in shape.windows:
        causal = shape.causal if window is None else shape.causal_windows
        seen = torch.ones((width, length + width), dtype=torch.bool)
        for row in range(width):
            for key in range(length + width):
                behind = length + row - key
                seen[row, key] = not (causal and behind < 0) and (window is None or abs(behind) < window)
        found.append(seen)
    return found


def laws(model, committed, pending, drafted, temperature):
    """The law of each drafted token, and the guess before it, from the equations alone; everything is recomputed."""
    config, target = model.config, tiny("qwen3", layers=4)
    ids = torch.tensor([pending] + [config.mask_token] * (config.block_size - 1))
    embedded = target.get_input_embeddings().weight[ids].detach()
    seen = looks(config.shape, len(committed), config.block_size)
    known = features(committed, config.taps) if committed else torch.zeros((0, len(config.taps) * 32))
    rows = block_equations.backbone(model.backbone.state_dict(), config.shape, known, embedded, seen)
    rows = rows if config.from_anchor else rows[1:]
    logits = rows @ target.get_output_embeddings().weight.detach().double().T
    before = [pending, *drafted]
    rows, logits = rows[: len(drafted)], logits[: len(drafted)]
    if model.markov is not None:
        weights = model.markov.state_dict()
        logits = logits + block_equations.walk(weights, config.markov, rows, pending, lambda k, _: drafted[k])
    guesses = None
    if model.confidence is not None:
        held = {name: value.double() for name, value in model.confidence.state_dict().items()}
        embedded = model.markov.markov_w1.weight.detach().double()[torch.tensor(before[: len(drafted)])]
        guesses = (torch.cat([rows, embedded], -1) @ held["proj.weight"][0] + held["proj.bias"]).sigmoid()
    return (logits / temperature).softmax(-1), guesses


def watched(name, *, temperature=1.0, new=30, scheduler=None, rows=4, **options):
    """Everything that a drafter was asked and proposed for four prompts of different lengths, and what came out."""
    seen = Watched(drafter(name, family="qwen3", layers=4, block=5, **options))
    seen.known, propose = [], seen.propose

    def remember(batch):
        seen.known.append([tuple(row.tokens) for row in batch.rows])
        return propose(batch)

    seen.propose = remember
    target = Target(tiny("qwen3", layers=4), kv=Slab(rows=rows, tokens=64))
    asked = [
        Request(prompt=prompt, sampling=Sampling(temperature=temperature, max_new_tokens=new, seed=index))
        for index, prompt in enumerate(prompts())
    ]
    return seen, Engine(target, seen, Standard(), scheduler or Static()).generate(asked)


def windowed(causal):
    """The z-lab drafter with a window in its first layer."""
    made = networks("z-lab", "qwen3", 4, 5)
    shape = evolve(made.config.shape, windows=(6, None), causal_windows=causal)
    backbone = Backbone(shape).eval().requires_grad_(False)
    backbone.load_state_dict(made.backbone.state_dict())
    return evolve(made, config=evolve(made.config, shape=shape), backbone=backbone)


FORMS = ["dspark", "gated", "rnn", "dflash of DeepSpec", "z-lab"]


# Catches: features one token late, blocks one position off, rows of rejected drafts that stay, keys of a block that are
# kept, a bias that looks at the wrong token, a state that is another row's: all of it only lowers acceptance.
@pytest.mark.parametrize("name", FORMS)
def test_laws_and_guesses_are_the_equations_over_many_rounds_with_partial_acceptance(name):
    seen, done = watched(name, temperature=0.8, proposal="sample", scheduler=Continuous(prefill_chunk=6), rows=3)
    model = networks(name, "qwen3", 4, 5)
    rounds, partial = 0, sum(one.counters.num_per_length.get(length, 0) for one in done for length in (2, 3, 4, 5))
    for batch, draft, known in zip(seen.asked, seen.drafts, seen.known, strict=True):
        for row, tokens in enumerate(known):
            size = int(draft.sizes[row])
            if not size or rounds > 40:
                continue
            rounds += 1
            drafted = draft.tokens[row, :size].tolist()
            wanted, guesses = laws(model, tokens[:-1], tokens[-1], drafted, 0.8)
            torch.testing.assert_close(draft.law.dense()[row, :size].double(), wanted, atol=1e-5, rtol=0)
            if guesses is not None:
                torch.testing.assert_close(draft.confidence[row, :size].double(), guesses, atol=1e-5, rtol=0)
        assert len(batch.rows) == len(known)
    assert rounds > 40
    assert partial >= 3


# Catches: windows that count cells of another row, or look one way where they look both ways.
@pytest.mark.parametrize("causal", [True, False])
def test_layers_with_a_window_are_the_equations(causal):
    model = windowed(causal)
    seen, _ = watched("z-lab", proposal="sample", model=model, new=12)
    for draft, known in zip(seen.drafts[:3], seen.known, strict=False):
        for row, tokens in enumerate(known):
            drafted = draft.tokens[row, : int(draft.sizes[row])].tolist()
            wanted, _ = laws(model, tokens[:-1], tokens[-1], drafted, 1.0)
            torch.testing.assert_close(draft.law.dense()[row].double(), wanted, atol=1e-5, rtol=0)


# Catches: a block that is cut to the length of the draft, which is another distribution where rows look both ways.
@pytest.mark.parametrize("name", FORMS)
def test_a_shorter_draft_is_the_beginning_of_the_whole_block(name):
    found = []
    for options in ({}, {"num_speculative_tokens": 2}):
        seen, _ = watched(name, proposal="sample", new=4, **options)
        drafts = zip(seen.known, seen.drafts, strict=True)
        laws = {known: draft.law.dense()[i] for all_known, draft in drafts for i, known in enumerate(all_known)}
        found.append(laws)
    whole, short = found
    assert len(whole.keys() & short.keys()) >= 4
    for known in whole.keys() & short.keys():
        assert short[known].shape[0] <= 2
        torch.testing.assert_close(short[known], whole[known][: short[known].shape[0]], atol=1e-6, rtol=0)


def pairs(options, requests, k):
    """How often each text begins with each two tokens."""
    target = Target(tiny("qwen3", layers=4), kv=Slab(rows=400, tokens=16))
    target.preflighted = True
    one = Engine(target, drafter("dspark", k, "qwen3", layers=4, block=5, **options), Standard(), Continuous())
    done = one.generate(
        [Request(prompt=(3, 1, 4), sampling=Sampling(max_new_tokens=2, seed=seed, top_k=4)) for seed in range(requests)]
    )
    firsts = sorted({one.tokens for one in done})
    return firsts, torch.tensor([sum(one.tokens == first for one in done) for first in firsts])


# Catches: a law that the tokens were not drawn from, a cut that knows the token it cuts, point masses with a law.
@pytest.mark.parametrize(
    "options",
    [{}, {"draft_temperature": 2.5}, {"threshold": 0.5}, {"proposal": "argmax"}],
    ids=["sample", "hot", "cut", "argmax"],
)
def test_standard_output_at_temperature_one_is_the_targets(options):
    firsts, counts = pairs(options, 2400, 2)
    exact = torch.tensor([chance((3, 1, 4), first) for first in firsts])
    assert counts.sum() == 2400
    law = torch.cat([exact, (1 - exact.sum()).clamp(min=0).view(1)])
    assert chi_square(torch.cat([counts, torch.zeros(1)]), law) > ALPHA


def chance(prompt, tokens):
    """Of two tokens with top-k 4, from plain forwards."""
    found = 1.0
    for depth in range(2):
        with torch.no_grad():
            logits = tiny("qwen3", layers=4)(torch.tensor([[*prompt, *tokens[:depth]]])).logits[0, -1]
        kept = logits.topk(4)
        place = (kept.indices == tokens[depth]).nonzero()
        found *= float(kept.values.softmax(-1)[place[0, 0]]) if len(place) else 0.0
    return found


# Catches: a draft temperature that is forgotten, or that changes the target's.
def test_drafted_tokens_follow_the_law_handed_over_at_the_drafts_own_temperature():
    seen = Watched(drafter("dspark", 2, "qwen3", layers=4, block=5, draft_temperature=2.0))
    target = Target(tiny("qwen3", layers=4), kv=Slab(rows=600, tokens=8))
    target.preflighted = True
    asked = [Request(prompt=(3, 1, 4), sampling=Sampling(max_new_tokens=3, seed=seed)) for seed in range(600)]
    Engine(target, seen, Standard(), Continuous()).generate(asked)
    draft = seen.drafts[0]
    wanted, _ = laws(networks("dspark", "qwen3", 4, 5), (3, 1), 4, draft.tokens[0].tolist(), 2.0)
    torch.testing.assert_close(draft.law.dense()[0].double(), wanted, atol=1e-5, rtol=0)
    assert chi_square(torch.bincount(draft.tokens[:, 0], minlength=VOCABULARY), wanted[0]) > ALPHA
    sharp, _ = laws(networks("dspark", "qwen3", 4, 5), (3, 1), 4, draft.tokens[0].tolist(), 1.0)
    assert chi_square(torch.bincount(draft.tokens[:, 0], minlength=VOCABULARY), sharp[0]) < ALPHA


# Catches: a cut behind the token it guesses, one by a row's mate, or one that a later guess undoes.
def test_a_draft_ends_before_the_first_guess_below_the_threshold():
    seen, _ = watched("dspark", new=20, threshold=0.4)
    lengths = set()
    for batch, draft in zip(seen.asked, seen.drafts, strict=True):
        for row, guesses in enumerate(draft.confidence.tolist()):
            most = min(batch.budget[row], len(guesses))
            length = next((index for index, one in enumerate(guesses[:most]) if one < 0.4), most)
            assert int(draft.sizes[row]) == length
            lengths.add(length)
    assert len(lengths) > 3


# Catches: point masses that carry a law, or a law for greedy requests that is soft.
def test_argmax_and_greedy_requests_draft_point_masses():
    greedy_draft, _ = watched("dspark", temperature=0, new=4)
    sampled, _ = watched("dspark", new=4, proposal="argmax")
    assert greedy_draft.drafts[0].law is None
    assert sampled.drafts[0].law is None
    assert torch.equal(greedy_draft.drafts[0].tokens, sampled.drafts[0].tokens)
    assert drafter("z-lab").deterministic
    assert not drafter("dspark").deterministic
    mixed = [ask((3, 1, 4), temperature=temperature, new=8) for temperature in (0, 1.0)]
    together = engine(drafter("dspark", 3)).generate(mixed)
    assert [facts(done) for done in together] == [facts(serve(drafter("dspark", 3), one)) for one in mixed]
