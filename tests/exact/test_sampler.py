"""The real sampler against exact laws: N = 50,000, fixed seed, alpha 1e-6. Planted faults fail."""

import pytest
import torch
from torch import Tensor

from specdec.law import Dense
from specdec.noise import Noise
from specdec.probability import sample
from specdec.sequence import Sequence, make_batch
from specdec.settle import draw, settle
from specdec.testing import (
    ALPHA,
    chain,
    chi_square,
    output_law,
    point_model,
    random_model,
    sampled_counts,
    token_law,
)
from specdec.types import Draft, Request, Sampling, Scores
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.standard import Standard
from specdec_plugins.verifiers.typical import Typical

SEED = 20260
SAMPLES = 50_000
TREE = (-1, -1, 0, 0, 1, 1)
P = random_model(5, 4, 1)
Q = random_model(5, 4, 2)


class Zero:
    """Fault: every acceptance number is 0, so all that can be kept is kept."""

    def __init__(self, noise: Noise) -> None:
        self.noise = noise

    def uniform(self, stream: str, count: int) -> Tensor:
        numbers = self.noise.uniform(stream, count)
        return numbers * 0 if stream == "accept" else numbers


class Shared(Zero):
    """Fault: acceptance uses the very numbers the draft was drawn with."""

    def uniform(self, stream: str, count: int) -> Tensor:
        return self.noise.uniform("draft" if stream == "accept" else stream, count)


class SharedNext(Zero):
    """Fault: the replacement is drawn with the first number of the acceptance."""

    def uniform(self, stream: str, count: int) -> Tensor:
        return self.noise.uniform("accept" if stream == "next" else stream, count)


def report(value: float) -> float:
    print(f"seed {SEED}, N {SAMPLES}: p-value {value:.3g}")
    return value


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_standard_samples_the_target(nodes):
    counts = sampled_counts(Standard(), P, Q, chain(nodes), 2, samples=SAMPLES, seed=SEED)
    assert report(chi_square(counts, token_law(P, 2))) > ALPHA
    # The test has power: the draft's own law is told apart.
    assert chi_square(counts, token_law(Q, 2)) < ALPHA


def test_standard_samples_the_target_with_a_deterministic_drafter():
    counts = sampled_counts(
        Standard(), P, point_model(Q), chain(3), 2, samples=SAMPLES, seed=SEED, wrap=lambda tokens, probs: None
    )
    assert report(chi_square(counts, token_law(P, 2))) > ALPHA


@pytest.mark.parametrize("replace", [True, False], ids=["independent", "without_replacement"])
def test_standard_samples_the_target_over_a_tree(replace):
    counts = sampled_counts(Standard(), P, Q, TREE, 3, samples=SAMPLES, seed=SEED, replace=replace)
    assert report(chi_square(counts, token_law(P, 3))) > ALPHA


@pytest.mark.parametrize("theta", [0.5, 0.8, 0.95])
def test_nucleus_samples_its_closed_law(theta):
    p, q = P[0][0], Q[0][0]
    order = p.argsort(descending=True)
    before = p[order].cumsum(0) - p[order]
    member = torch.zeros(5, dtype=torch.bool)
    member[order] = before < theta
    excess = (q - p).clamp(min=0) * member
    law = p + excess - excess.sum() / (q - p).clamp(min=0).sum() * (p - q).clamp(min=0)
    counts = sampled_counts(Nucleus(theta=theta), P, Q, chain(2), 1, samples=SAMPLES, seed=SEED)
    assert report(chi_square(counts, law)) > ALPHA


@pytest.mark.parametrize("rule", [Nucleus(theta=0.8), Typical(), Typical(replacement="argmax")], ids=repr)
def test_lossy_rules_sample_their_enumerated_law_and_not_the_target(rule):
    counts = sampled_counts(rule, P, Q, chain(2), 2, samples=SAMPLES, seed=SEED)
    assert report(chi_square(counts, output_law(rule, P, Q, chain(2), 2))) > ALPHA
    assert chi_square(counts, token_law(P, 2)) < ALPHA


@pytest.mark.parametrize("fault", [Zero, Shared, SharedNext])
@pytest.mark.parametrize("rule", [Standard(), Nucleus(theta=0.5)], ids=repr)
def test_faulty_noise_is_noticed(rule, fault):
    counts = sampled_counts(rule, P, Q, chain(2), 2, samples=SAMPLES, seed=SEED, noise=fault)
    assert chi_square(counts, output_law(rule, P, Q, chain(2), 2)) < ALPHA


@pytest.mark.parametrize("rule", [Standard(), Nucleus(theta=0.5)], ids=repr)
def test_a_law_that_was_not_sampled_from_is_noticed(rule):
    # Sampled after top-k, handed over before it: the commonest fault in the field.
    raw = random_model(5, 4, 2)
    cut = random_model(5, 4, 2, zeros=2)

    def before_top_k(tokens: Tensor, probs: Tensor) -> Dense:
        laws = [raw[0].expand(len(tokens), -1), raw[1][tokens[:, 0]]]
        return Dense(torch.stack(laws, 1))

    counts = sampled_counts(rule, P, cut, chain(2), 2, samples=SAMPLES, seed=SEED, wrap=before_top_k)
    assert chi_square(counts, output_law(rule, P, cut, chain(2), 2)) < ALPHA


def test_what_follows_is_drawn_from_its_own_stream():
    # Through batch, verify, draw and settle as in the loop; catches drawing from a stream already used.
    sequences = []
    for index in range(SAMPLES):
        request = Request(prompt=(0,), sampling=Sampling(seed=SEED + index, max_new_tokens=8))
        sequences.append(Sequence(request, frozenset(), limit=100))
        sequences[-1].slot = index
    batch = make_batch([(sequence, 1) for sequence in sequences])
    q = Q[0].expand(SAMPLES, -1)
    token = sample(q, batch.noise.uniform("draft", 1).squeeze(1))
    draft = Draft(token.unsqueeze(1), torch.ones(SAMPLES, dtype=torch.int64), law=Dense(q.unsqueeze(1)))
    probs = torch.stack([P[0].expand(SAMPLES, -1), P[1][token]], 1)
    fed = torch.stack([batch.pending, token], 1)
    scores = Scores(fed, probs.log(), probs, {}, torch.ones(SAMPLES, dtype=torch.bool))
    verdict = Standard().verify(draft, scores, batch.noise, None)
    following = draw(verdict, batch.noise)
    kept = settle(batch, draft, scores, verdict, following, torch.zeros(SAMPLES, dtype=torch.int64), None)
    first = torch.bincount(torch.tensor([tokens[0] for tokens in kept.tokens]), minlength=5)
    assert report(chi_square(first, P[0][0])) > ALPHA
    pairs = torch.tensor([tokens for tokens in kept.tokens if len(tokens) == 2])
    joint = torch.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25)
    kept_law = torch.minimum(P[0][0], Q[0][0])
    assert report(chi_square(joint, (kept_law.unsqueeze(1) * P[1]).flatten())) > ALPHA


def test_chi_square_has_the_reference_values():
    # Survival function at known points, pooling, impossible outcomes.
    fair = torch.full((2,), 0.5, dtype=torch.float64)
    assert chi_square(torch.tensor([55, 45]), fair) == pytest.approx(0.31731050786291415)
    assert chi_square(torch.tensor([50, 50]), fair) == 1.0
    three = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert chi_square(torch.tensor([60, 20, 20]), three) == pytest.approx(0.06948345122280154)
    assert chi_square(torch.tensor([5, 4, 1]), torch.tensor([0.5, 0.5, 0.0]).double()) == 0.0
    # Two cells with 4 expected each become one with 8; alone they would be judged by a law that does not hold there.
    small = torch.tensor([0.92, 0.04, 0.04], dtype=torch.float64)
    assert chi_square(torch.tensor([90, 10, 0]), small) == pytest.approx(
        chi_square(torch.tensor([90, 10]), torch.tensor([0.92, 0.08]).double())
    )
    assert chi_square(torch.tensor([7]), torch.ones(1).double()) == 1.0


def test_chi_square_is_rarely_small_for_the_law_itself():
    # 400 correct samples: the p-values are spread evenly; catches a wrong number of degrees of freedom.
    law = random_model(8, 1, 5)[0][0]
    uniform = Noise(tuple(range(400)), (3,) * 400).uniform("draft", 2000)
    drawn = sample(law.expand(400, 2000, 8), uniform)
    values = torch.tensor([chi_square(torch.bincount(row, minlength=8), law) for row in drawn])
    assert 0.4 < float(values.mean()) < 0.6
    assert 0.02 < float((values < 0.1).double().mean()) < 0.2
