import json
import math

import pytest
import torch

from specdec.law import Dense
from specdec.metrics import DIAGNOSTICS, REFERENCE_THETA, Counters, bootstrap, pool, probe
from specdec.probability import sample
from specdec.types import Draft, Kept, Scores
from specdec.verifier import Place, PointwiseVerifier, Verifier
from specdec_plugins.verifiers.cactus import Cactus
from specdec_plugins.verifiers.greedy import Greedy
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.sample_match import SampleMatch
from specdec_plugins.verifiers.standard import Standard
from specdec_plugins.verifiers.threshold import Threshold
from specdec_plugins.verifiers.tree_target import TreeTarget
from specdec_plugins.verifiers.typical import Typical


def kept(*rows: tuple[int, int, int, int, str | None]) -> Kept:
    """Per row: drafted, accepted by the rule, emitted, clipped, source."""
    empty = torch.zeros((len(rows), 0), dtype=torch.int64)
    return Kept(
        tokens=tuple(tuple(range(emitted)) for _, _, emitted, _, _ in rows),
        starts=(0,) * len(rows),
        inputs=empty,
        next_inputs=empty,
        offsets=empty,
        counts=tuple(emitted for _, _, emitted, _, _ in rows),
        chain=True,
        hidden={},
        drafted=tuple(row[0] for row in rows),
        depths=tuple(row[0] for row in rows),
        clipped=tuple(row[3] for row in rows),
        accepted=tuple(row[1] for row in rows),
        sources=tuple(row[4] for row in rows),  # type: ignore[arg-type]
        finished=(None,) * len(rows),
    )


def counted(*steps: tuple[int, int, int, int, str | None]) -> Counters:
    counters = Counters()
    for step in steps:
        counters.count(kept((9, 9, 9, 9, "argmax"), step), 1)
    return counters


def test_counters_of_a_few_steps_by_hand():
    # Drafted 4, 4, 0, 2; accepted 2, 4, 0, 0. Catches a bonus counted as accepted and a step without draft as a draft.
    counters = counted((4, 2, 3, 0, "residual"), (4, 4, 5, 1, "bonus"), (0, 0, 1, 0, "bonus"), (2, 0, 1, 2, "fallback"))
    assert (counters.num_steps, counters.num_drafts) == (4, 3)
    assert (counters.num_draft_tokens, counters.num_accepted_tokens, counters.num_emitted_tokens) == (10, 6, 10)
    assert counters.num_clipped == 3
    assert counters.num_drafted_per_pos == [3, 3, 2, 2]
    assert counters.num_accepted_tokens_per_pos == [2, 2, 1, 1]
    assert counters.num_per_source == {"bonus": 2, "residual": 1, "target": 0, "argmax": 0, "fallback": 1}
    assert counters.num_per_length == {3: 1, 5: 1, 1: 2}
    assert counters.acceptance_rate == pytest.approx(0.6)
    assert counters.acceptance_length == pytest.approx(2.5)


def test_tokens_that_a_stop_cut_off_count_nowhere():
    # Six drafted, four kept, the third was the end: three emitted, three accepted. Catches 1 + accepted.
    counters = counted((6, 4, 3, 0, "residual"))
    assert (counters.num_draft_tokens, counters.num_drafted_per_pos) == (3, [1, 1, 1])
    assert (counters.num_accepted_tokens, counters.num_emitted_tokens) == (3, 3)
    assert counters.num_accepted_tokens_per_pos == [1, 1, 1]
    assert sum(counters.num_per_source.values()) == 0
    assert counters.num_per_length == {3: 1}
    # The stop was the last kept token: still nothing followed.
    counters = counted((4, 4, 4, 0, "bonus"))
    assert sum(counters.num_per_source.values()) == 0


def test_a_row_with_an_error_emits_nothing():
    counters = counted((4, 2, 0, 0, None))
    assert (counters.num_steps, counters.num_accepted_tokens, counters.num_emitted_tokens) == (1, 0, 0)
    assert counters.num_per_length == {}
    assert counters.num_draft_tokens == 0
    assert counters.acceptance_rate is None


def test_rates_of_nothing_are_not_numbers():
    # Catches 0 / 0 and a reported rate of 0 % where nothing was drafted.
    assert Counters().acceptance_rate is None
    assert Counters().acceptance_length is None
    assert counted((0, 0, 1, 0, "bonus")).acceptance_rate is None


def test_pooled_counters_are_sums_and_the_parts_stay():
    # Pooled over steps, not a mean of means: 1/1 and 0/9 are 1/10.
    one = counted((1, 1, 2, 0, "bonus"))
    two = counted((3, 0, 1, 1, "residual"), (3, 0, 1, 0, "residual"), (3, 0, 1, 0, "residual"))
    before = one.to_dict(), two.to_dict()
    total = pool([one, two])
    assert total.acceptance_rate == pytest.approx(0.1)
    assert total.acceptance_length == pytest.approx(5 / 4)
    assert total.num_drafted_per_pos == [4, 3, 3]
    assert total.num_accepted_tokens_per_pos == [1]
    assert total.num_per_length == {2: 1, 1: 3}
    assert total.num_per_source["residual"] == 3
    assert (total.num_steps, total.num_drafts, total.num_clipped) == (4, 4, 1)
    assert (one.to_dict(), two.to_dict()) == before
    assert pool([]).to_dict() == Counters().to_dict()
    assert pool([total]).to_dict() == total.to_dict()


def test_counters_are_plain_data():
    data = json.loads(json.dumps(counted((4, 2, 3, 0, "residual"), (1, 1, 2, 0, "bonus")).to_dict()))
    assert data["num_per_length"] == {"2": 1, "3": 1}
    assert data["num_draft_tokens"] == 5


# Diagnostics.

ROWS, NODES, SIZE = 7, 3, 8


def case(seed: int, law: bool = True) -> tuple[Draft, Scores]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((ROWS, NODES + 1, SIZE), generator=generator, dtype=torch.float64)
    logits[..., 3] = float("-inf")
    logits[..., 5] = logits[..., 6]
    p = logits.softmax(-1)
    q = torch.randn((ROWS, NODES, SIZE), generator=generator).double().softmax(-1)
    tokens = sample(q, torch.rand((ROWS, NODES), generator=generator, dtype=torch.float64))
    fed = torch.cat([torch.zeros((ROWS, 1), dtype=torch.int64), tokens], 1)
    scores = Scores(fed, logits, p, {}, torch.ones(ROWS, dtype=torch.bool))
    return Draft(tokens, torch.full((ROWS,), NODES), law=Dense(q) if law else None), scores


def naive(p: list[float], q: list[float], token: int) -> dict[str, float]:
    above = sum(value for value in p if value > p[token])
    order = sorted(range(len(p)), key=lambda x: -p[x])
    excess, mass, least = 0.0, 0.0, math.inf
    for x in order:
        if mass < REFERENCE_THETA and p[x] > 0:
            mass, least = mass + p[x], p[x]
    for x in order:
        if p[x] >= least:
            excess += max(q[x] - p[x], 0.0)
    return {
        "p": p[token],
        "q": q[token],
        "rank": float(sum(value > p[token] for value in p)),
        "in_nucleus": float(above < REFERENCE_THETA and p[token] > 0),
        "rejection": sum(max(b - a, 0.0) for a, b in zip(p, q, strict=True)),
        "nucleus_excess": excess,
    }


@pytest.mark.parametrize("law", [True, False])
def test_diagnostics_of_every_node_equal_a_loop(law):
    # Catches p after the node in place of p before it, ties in the rank, and a point mass taken for something else.
    for seed in range(3):
        draft, scores = case(seed, law)
        values = probe(draft, scores, Standard()).values
        assert set(values) == set(DIAGNOSTICS)
        for row in range(ROWS):
            for node in range(NODES):
                token = int(draft.tokens[row, node])
                q = draft.law.dense()[row, node].tolist() if law else [float(x == token) for x in range(SIZE)]
                expected = naive(scores.probs[row, node].tolist(), q, token)
                for name, value in expected.items():
                    assert values[name].dtype == torch.float64
                    assert float(values[name][row, node]) == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize("law", [True, False])
def test_deviation_of_a_rule_is_what_its_guarantee_says(law):
    # Standard: nothing. Nucleus: E, and its excess acceptance is the same number. The reference E is theta 0.95's.
    draft, scores = case(5, law)
    values = probe(draft, scores, Standard()).values
    assert float(values["deviation"].abs().max()) < 1e-12
    assert float(values["excess"].abs().max()) < 1e-12
    reference = values["nucleus_excess"]
    values = probe(draft, scores, Nucleus(theta=REFERENCE_THETA)).values
    assert torch.allclose(values["deviation"], reference, atol=1e-12)
    assert torch.allclose(values["excess"], reference, atol=1e-12)
    assert torch.equal(values["nucleus_excess"], reference)
    values = probe(draft, scores, Nucleus(theta=0.3)).values
    assert torch.allclose(values["deviation"], values["excess"], atol=1e-12)
    assert bool((values["deviation"] <= values["rejection"] + 1e-12).all())
    assert bool((values["deviation"] < reference - 1e-3).any())


@pytest.mark.parametrize("rule", [Typical(), Typical(replacement="argmax"), Typical(replacement="residual"), Greedy()])
def test_deviation_of_other_rules_equals_a_loop(rule):
    draft, scores = case(6)
    values = probe(draft, scores, rule).values
    for row in range(ROWS):
        for node in range(NODES):
            p, q = scores.probs[row, node], draft.law.dense()[row, node]
            best = torch.arange(SIZE) == int(p.argmax())
            entropy = -float((p * (p + 1e-5).log()).sum())
            keep = p > min(0.09, 0.3 * math.exp(-entropy)) if isinstance(rule, Typical) else best
            residual = (p - q).clamp(min=0)
            follow = {"target": p, "residual": residual / residual.sum(), "argmax": best.double()}
            law = q * keep + float((q * ~keep).sum()) * follow[rule.replacement]
            assert float(values["deviation"][row, node]) == pytest.approx(float((law - p).abs().sum() / 2), abs=1e-12)
            expected = float((q * keep).sum() - torch.minimum(p, q).sum())
            assert float(values["excess"][row, node]) == pytest.approx(expected, abs=1e-12)


def test_deviation_where_the_residual_is_empty_is_that_of_the_fallback():
    # Typical rejects improbable tokens also where draft and target agree, and then draws from p. Catches a law that
    # does not sum to 1.
    _, scores = case(9)
    p = scores.probs[:, :NODES]
    draft = Draft(scores.tokens[:, 1:], torch.full((ROWS,), NODES), law=Dense(p))
    residual = probe(draft, scores, Typical(replacement="residual")).values["deviation"]
    target = probe(draft, scores, Typical(replacement="target")).values["deviation"]
    assert float(target.max()) > 0.01
    assert torch.allclose(residual, target, atol=1e-12)


# Catches: the law after the one token that was drafted, taken for that of the place.
@pytest.mark.parametrize(
    "rule",
    [SampleMatch(), TreeTarget(), Threshold(), Threshold(threshold_single=0.5, threshold_acc=0.6), Cactus(delta=0.3)],
)
def test_deviation_of_rules_whose_replacement_depends_on_the_token_equals_a_loop(rule):
    draft, scores = case(10)
    values = probe(draft, scores, rule).values
    for row in range(ROWS):
        for node in range(NODES):
            p, q = scores.probs[row, node], draft.law.dense()[row, node]
            law = torch.zeros_like(p)
            for token in range(SIZE):
                at = Place(p, Dense(q), torch.tensor(token), torch.tensor(node), p.log(), {})
                keep = rule.acceptance(at)[token]
                follow = rule.correct(at)
                law[token] += q[token] * keep
                if keep < 1:
                    law += q[token] * (1 - keep) * follow / follow.sum()
            expected = float((law - p).abs().sum() / 2)
            assert float(values["deviation"][row, node]) == pytest.approx(expected, abs=1e-12)
            if rule.exactness == "lossless":
                assert expected == pytest.approx(0, abs=1e-12)


def test_rules_that_are_not_pointwise_have_no_deviation():
    class Whole(Verifier):
        family = "lookahead"
        exactness = "lossless"

        def verify(self, draft, scores, noise, memory):
            raise NotImplementedError

    draft, scores = case(7)
    values = probe(draft, scores, Whole()).values
    assert bool(values["deviation"].isnan().all())
    assert bool(values["excess"].isnan().all())
    assert not bool(values["rejection"].isnan().any())
    assert not isinstance(Whole(), PointwiseVerifier)


def test_diagnostics_of_an_empty_draft_are_empty():
    draft, scores = case(8)
    empty = Draft(draft.tokens[:, :0], draft.sizes * 0, law=draft.law.narrow(0))
    scores = Scores(scores.tokens[:, :1], scores.logits[:, :1], scores.probs[:, :1], {}, scores.finite)
    assert all(value.shape == (ROWS, 0) for value in probe(empty, scores, Nucleus()).values.values())


def test_bootstrap_interval_of_a_mean_has_the_right_width():
    # 200 values of variance 1/12: the standard error is 0.0204, the interval about 0.08 wide and around the mean.
    values = torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    low, high = bootstrap(values, lambda some: sum(some) / len(some))
    mean = sum(values) / 200
    assert low < mean < high
    assert 0.06 < high - low < 0.1
    assert (low, high) == bootstrap(values, lambda some: sum(some) / len(some))
    assert (low, high) != bootstrap(values, lambda some: sum(some) / len(some), seed=1)


def test_bootstrap_of_too_little_is_none():
    # One prompt has no interval; statistics that are None in a draw are left out.
    assert bootstrap([1.0], lambda some: 1.0) is None
    assert bootstrap([], lambda some: 1.0) is None
    assert bootstrap([1.0, 2.0], lambda some: None) is None
    low, high = bootstrap([0.0, 1.0], lambda some: sum(some) / 2 if sum(some) else None)
    assert (low, high) == (0.5, 1.0)
