"""The rule that runs is the rule that was proved: p, q, residual and bonus."""

import functools
import re
from pathlib import Path

import pytest
import torch

from specdec.errors import CompatibilityError
from specdec.law import Dense
from specdec.probability import sample
from specdec.testing import ALPHA, chain, chi_square, output_law, point_model, random_model, token_law
from specdec.theory import standard_acceptance
from specdec.types import Draft, Scores
from specdec.verifier import Place
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.schedulers.static import Static
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.standard import Standard
from tests.families import prompts, tiny
from tests.faults.kit import Watched, ask, build, counting, engine, facts, generate, registered, serve
from tests.scripted import Scripted

P, Q = random_model(6, 4, 1), random_model(6, 4, 2)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def far(law, p, tokens=2):
    return float((law - token_law(p, tokens)).abs().max())


def sampling_drafters():
    return [name for name in registered(drafting=True) if not build(name).deterministic]


# Catches: drafts drawn after top-k whose law is handed over as it was before.
@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.4}], ids=str)
@pytest.mark.parametrize("name", sampling_drafters())
def test_the_law_handed_over_is_the_one_after_the_filters(name, filters):
    plain, cut = Watched(build(name)), Watched(build(name))
    one = {"temperature": 1.0, "seed": 3} | filters
    serve(plain, ask((3, 1, 4), temperature=1.0, seed=3))
    serve(cut, ask((3, 1, 4), **one))
    raw, found = plain.drafts[0].law.dense()[0, 0], cut.drafts[0].law.dense()[0, 0]
    inside = found > 0
    wanted = raw.pow(1 / one["temperature"]) * inside
    torch.testing.assert_close(found, wanted / wanted.sum())
    assert inside.all() == ("temperature" in filters)
    assert "top_k" not in filters or int(inside.sum()) == 3
    assert raw[inside].min() > raw[~inside].max() if not inside.all() else True


# Catches: argmax drafts that are judged by the softmax they were not drawn from.
def test_a_greedy_drafter_of_a_sampling_target_is_a_point_mass():
    exact = output_law(Standard(), P, point_model(Q), chain(2), 2, wrap=lambda tokens, probs: None)
    assert far(exact, P) < 1e-9

    def softmax(tokens, probs):
        return Dense(Q[0].expand(len(tokens), 1, -1))

    assert far(output_law(Standard(), P, point_model(Q), chain(1), 2, wrap=softmax), P) > 0.01


class Fixed:
    """Noise that is written down."""

    def __init__(self, accept):
        self.accept = accept

    def uniform(self, stream, count):
        return self.accept


def judged(p, q, tokens, uniform):
    """What standard says of one draft, tables p [1 + N, V] and q [N, V] given."""
    drafted = torch.tensor([tokens])
    scores = Scores(torch.cat([drafted[:, :1], drafted], 1), p.log()[None], p[None], {}, torch.ones(1, dtype=bool))
    draft = Draft(drafted, torch.tensor([len(tokens)]), law=Dense(q[None]))
    return Standard().verify(draft, scores, Fixed(f64(*uniform)[None]), None)


# Catches: p or q gathered at another position, another row, or another token.
def test_each_ratio_is_that_of_its_own_position():
    p = f64([0.2, 0.3, 0.5], [0.1, 0.6, 0.3], [0.4, 0.4, 0.2], [0.3, 0.3, 0.4])
    q = f64([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.1, 0.8])
    tokens, ratios = (0, 2, 2), (0.4, 0.5, 0.25)  # 0.2 / 0.5, 0.3 / 0.6, 0.2 / 0.8
    for place in range(3):
        just = [ratio - 1e-9 for ratio in ratios]
        assert judged(p, q, tokens, just).lengths.item() == 3
        just[place] = ratios[place] + 1e-9
        assert judged(p, q, tokens, just).lengths.item() == place
    torch.testing.assert_close(judged(p, q, tokens, (0, 0, 0)).next_probs[0], p[3])


# Catches: a residual that goes through a softmax instead of being divided by its sum.
def test_the_residual_is_divided_by_its_sum():
    verdict = judged(f64([0.2, 0.5, 0.3], [0.2, 0.5, 0.3]), f64([0.6, 0.2, 0.2]), (0,), (0.9,))
    torch.testing.assert_close(verdict.next_probs[0], f64(0.0, 0.75, 0.25))


# Catches: a law that is missing taken for a point mass, when the drafter has drawn from something else.
def test_a_drafter_that_samples_must_hand_over_its_law():
    def forgetful():
        return Watched(build("model"), lambda draft, batch: Draft(draft.tokens, draft.sizes))

    with pytest.raises(CompatibilityError, match="gave no law"):
        serve(forgetful(), ask((3, 1, 4), temperature=1.0))
    done = serve(forgetful(), ask((3, 1, 4)))  # greedy drafts are point masses
    assert done.tokens == generate(tiny("llama"), (3, 1, 4), 12)


# Catches: tokens drawn in one dtype and judged by a law of another, or drawn with other numbers than the stream's.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", sampling_drafters())
def test_drafts_are_drawn_from_the_very_tensor_that_is_handed_over(name, dtype):
    drafter = Watched(build(name, dtype=dtype))
    requests = [ask(prompt, temperature=0.7, top_k=9, seed=i, new=8) for i, prompt in enumerate(prompts())]
    engine(drafter, model=tiny("llama", dtype=dtype)).generate(requests)
    for batch, draft in zip(drafter.asked, drafter.drafts, strict=True):
        probs, width = draft.law.dense(), draft.tokens.shape[1]
        assert probs.dtype == torch.float32
        counted = torch.arange(width) < draft.sizes.unsqueeze(1)
        drawn = sample(probs, batch.noise.uniform("draft", width))
        assert torch.equal(drawn[counted], draft.tokens[counted])
        torch.testing.assert_close(probs.sum(-1)[counted], torch.ones(int(counted.sum())))


# Catches: a temperature that never reaches the drafter.
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_draft_model_draws_at_the_temperature_of_the_request(temperature):
    drafter = Watched(DraftModel(model=tiny("llama", seed=1), num_speculative_tokens=1))
    requests = [ask((3, 1, 4), temperature=temperature, seed=seed, new=2) for seed in range(400)]
    engine(drafter, rows=400, tokens=8).generate(requests)
    with torch.no_grad():
        logits = tiny("llama", seed=1)(torch.tensor([[3, 1, 4]])).logits[0, -1]
    law = (logits / temperature).softmax(-1)
    torch.testing.assert_close(drafter.drafts[0].law.dense()[0, 0], law, atol=1e-5, rtol=1e-4)
    counts = torch.bincount(drafter.drafts[0].tokens[:, 0], minlength=80)
    assert chi_square(counts, law) > ALPHA
    assert chi_square(counts, (logits / (temperature * 3)).softmax(-1)) < ALPHA


# Catches: argmax drafts beside a softmax law that push a greedy request off the greedy path.
def test_greedy_output_does_not_depend_on_the_law_a_drafter_hands_over():
    def soft(draft, batch):
        law = torch.full((*draft.tokens.shape, 80), 0.5 / 80).scatter_add_(
            -1, draft.tokens.unsqueeze(-1), torch.full((*draft.tokens.shape, 1), 0.5)
        )
        return Draft(draft.tokens, draft.sizes, law=Dense(law))

    drafter = Watched(build("model"), soft)
    assert serve(drafter, ask((3, 1, 4), new=24)).tokens == generate(tiny("llama"), (3, 1, 4), 24)


# Catches: the point mass of a chosen candidate used where candidates are not chosen, or a softmax where they are.
def test_the_best_two_candidates_of_a_tree_are_exact_as_point_masses_and_not_with_their_softmax():
    tree = (-1, -1, 0)
    first = point_model(Q)
    second = point_model(tuple(table * (one == 0) for table, one in zip(Q, first, strict=True)))
    best = tuple((one + two) / 2 for one, two in zip(first, second, strict=True))  # either order, no replacement
    assert far(output_law(Standard(), P, best, tree, 2, replace=False, wrap=lambda tokens, probs: None), P) < 1e-9

    def softmax(tokens, probs):
        laws = [Q[0].expand(len(tokens), -1)] * min(2, tokens.shape[1])
        return Dense(torch.stack([*laws, *[Q[1][tokens[:, 0]]] * (tokens.shape[1] - len(laws))], 1))

    assert far(output_law(Standard(), P, best, tree, 2, replace=False, wrap=softmax), P) > 0.01


# Catches: the first draft token committed without a look at it, as logits shifted by one do.
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_wrong_first_draft_is_never_emitted(temperature):
    done = serve(counting(4, wrong_at=0), ask(temperature=temperature))
    assert done.tokens == serve(request=ask()).tokens
    assert (done.counters.num_accepted_tokens, done.counters.num_draft_tokens > 12) == (0, True)


def lengths_by_row(widths):
    """A drafter of the request's own text backwards, as many tokens as its prompt says."""
    return Scripted(script=lambda tokens, budget: list(tokens[::-1][: min(budget, widths[tokens[0]])]))


# Catches: numbers or laws of a flattened batch taken by position where they are by row.
def test_rows_of_different_draft_lengths_keep_their_own_numbers_and_laws():
    widths = {1: 4, 2: 0, 3: 2, 4: 1}
    rows = [ask((first, 9, 9), temperature=1.0, seed=first, name=str(first)) for first in widths]
    wanted = {row.id: facts(serve(lengths_by_row(widths), row)) for row in rows}
    for order in ((0, 1, 2, 3), (3, 0, 2, 1), (2, 3, 1, 0)):
        for done in engine(lengths_by_row(widths), scheduler=Static()).generate([rows[i] for i in order]):
            assert facts(done) == wanted[done.id]


@functools.cache
def exact(prompt, top_k):
    """The target's law of two tokens after a prompt, [V * V], by two forwards of the model itself."""

    def laws(logits):
        kept = logits >= logits.topk(top_k).values[..., -1:]
        return logits.double().masked_fill(~kept, -torch.inf).softmax(-1)

    with torch.no_grad():
        first = laws(tiny("llama")(torch.tensor([prompt])).logits[0, -1])
        ids = torch.tensor([[*prompt, token] for token in range(80)])
        return (first.unsqueeze(1) * laws(tiny("llama")(ids).logits[:, -1])).flatten()


def pairs(drafter, texts, top_k, samples):
    """How often each pair of tokens came after each text, all texts in every batch."""
    one = engine(drafter, rows=512, tokens=32)
    requests = [
        ask(text, temperature=1.0, top_k=top_k, seed=1000 * index + seed, new=2, name=f"{index} {seed}")
        for seed in range(samples)
        for index, text in enumerate(texts)
    ]
    counts = torch.zeros((len(texts), 80 * 80))
    for done in one.generate(requests):
        counts[int(done.id.split()[0]), done.tokens[0] * 80 + done.tokens[1]] += 1
    return counts


# Catches: p or q of a batch mate, which no acceptance figure and no single row would show.
def test_every_row_of_a_ragged_sampling_batch_follows_its_own_law():
    texts = ((3, 1, 4), (1, 5, 9, 2, 6, 5, 3), (5,))
    counts = pairs(build("model", k=1), texts, 4, 600)
    for index, text in enumerate(texts):
        assert chi_square(counts[index], exact(text, 4)) > ALPHA
        assert chi_square(counts[index], exact(texts[index - 1], 4)) < ALPHA


# Catches: whatever makes the output of the whole loop another law than the target's; a test of it without power.
def test_the_output_of_the_loop_has_the_targets_law_and_a_drafter_that_lies_is_noticed():
    text = (3, 1, 4)
    assert chi_square(pairs(build("layer_skip", k=1), (text,), 4, 1500)[0], exact(text, 4)) > ALPHA

    def flat(draft, batch):
        return Draft(draft.tokens, draft.sizes, law=Dense(torch.full((*draft.tokens.shape, 80), 1 / 80)))

    liar = Watched(build("layer_skip", k=1), flat)
    assert chi_square(pairs(liar, (text,), 4, 1500)[0], exact(text, 4)) < ALPHA


# Catches: documentation that states another rule than the one that runs.
def test_the_documented_formula_is_the_rule():
    formula = "min(1, p(x)/q(x))"
    assert formula in Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    p, q = P[0][0], Q[0][0]
    tokens = torch.arange(6)
    at = Place(p.expand(6, 6), Dense(q.expand(6, 6)), tokens, tokens * 0, p.log().expand(6, 6), {})
    for rule in (Standard(), Nucleus(theta=0.6)):
        stated = re.search(r"a\(x\) = (.*?);", " ".join(rule.__doc__.split())).group(1)
        stated = re.sub(r"^1 if x in S", "1.0 if p[x] > 0 and sum(y for y in p if y > p[x]) < theta", stated)
        stated = stated.replace("p(x)", "p[x]").replace("q(x)", "q[x]").replace("otherwise", "else")
        names = {"p": p.tolist(), "q": q.tolist(), "theta": getattr(rule, "theta", None)}
        wanted = [eval(stated, {**names, "x": x}) for x in range(6)]
        torch.testing.assert_close(rule.acceptance(at).diagonal(), f64(*wanted))
    assert (standard_acceptance(p, q) < 1).any()
