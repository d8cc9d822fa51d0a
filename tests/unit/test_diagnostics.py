"""What is said about the places of a step, against loops over single numbers."""

import math

import pytest
import torch
from torch import Tensor

from specdec import diagnostics
from specdec.diagnostics import DIAGNOSTICS, LOGPROBS, REFERENCE_THETA, probe
from specdec.law import Dense, Logits
from specdec.noise import Noise
from specdec.probability import sample
from specdec.settle import draw
from specdec.types import Draft, Scores, Verdict
from specdec.verifier import Place, PointwiseVerifier, Verifier
from specdec_plugins.verifiers.block import Block
from specdec_plugins.verifiers.cactus import Cactus
from specdec_plugins.verifiers.fly import Fly
from specdec_plugins.verifiers.greedy import Greedy
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.sample_match import SampleMatch
from specdec_plugins.verifiers.standard import Standard
from specdec_plugins.verifiers.threshold import Threshold
from specdec_plugins.verifiers.tree_target import TreeTarget
from specdec_plugins.verifiers.typical import Typical

ROWS, NODES, SIZE = 7, 3, 8
NOISE = Noise(tuple(range(ROWS)), (0,) * ROWS)


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


def kept_whole(draft: Draft) -> Verdict:
    """Of a rule that keeps every draft token."""
    rows, nodes = draft.tokens.shape
    bonus = torch.full((rows, SIZE), 1 / SIZE, dtype=torch.float64)
    path = torch.arange(nodes).expand(rows, nodes)
    return Verdict(path, draft.sizes, bonus, torch.zeros(rows, dtype=torch.int8))


def look(draft: Draft, scores: Scores, rule: Verifier) -> dict[str, Tensor]:
    """What is said about every node of a chain, [ROWS, NODES]."""
    following = torch.zeros_like(draft.sizes)
    extras = probe(draft, scores, kept_whole(draft), following, rule, NOISE, None, logprobs=False)
    assert extras.tokens == {}
    return {name: value[:, : draft.tokens.shape[1]] for name, value in extras.places.items()}


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
        "target_entropy": -sum(value * math.log(value) for value in p if value > 0),
        "draft_entropy": -sum(value * math.log(value) for value in q if value > 0),
        "acceptance": min(1.0, p[token] / q[token]),
    }


@pytest.mark.parametrize("law", [True, False])
def test_what_is_said_of_every_node_equals_a_loop(law):
    # Catches p after the node in place of p before it, ties in the rank, and a point mass taken for something else.
    for seed in range(3):
        draft, scores = case(seed, law)
        values = look(draft, scores, Standard())
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
    values = look(draft, scores, Standard())
    assert float(values["deviation"].abs().max()) < 1e-12
    assert float(values["excess"].abs().max()) < 1e-12
    reference = values["nucleus_excess"]
    values = look(draft, scores, Nucleus(theta=REFERENCE_THETA))
    assert torch.allclose(values["deviation"], reference, atol=1e-12)
    assert torch.allclose(values["excess"], reference, atol=1e-12)
    assert torch.equal(values["nucleus_excess"], reference)
    values = look(draft, scores, Nucleus(theta=0.3))
    assert torch.allclose(values["deviation"], values["excess"], atol=1e-12)
    assert bool((values["deviation"] <= values["rejection"] + 1e-12).all())
    assert bool((values["deviation"] < reference - 1e-3).any())


@pytest.mark.parametrize("rule", [Typical(), Typical(replacement="argmax"), Typical(replacement="residual"), Greedy()])
def test_deviation_of_other_rules_equals_a_loop(rule):
    draft, scores = case(6)
    values = look(draft, scores, rule)
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
    residual = look(draft, scores, Typical(replacement="residual"))["deviation"]
    target = look(draft, scores, Typical(replacement="target"))["deviation"]
    assert float(target.max()) > 0.01
    assert torch.allclose(residual, target, atol=1e-12)


# Catches: the law after the one token that was drafted, taken for that of the place.
@pytest.mark.parametrize(
    "rule",
    [SampleMatch(), TreeTarget(), Threshold(), Threshold(threshold_single=0.5, threshold_acc=0.6), Cactus(delta=0.3)],
)
def test_deviation_of_rules_whose_replacement_depends_on_the_token_equals_a_loop(rule):
    draft, scores = case(10)
    values = look(draft, scores, rule)
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
    values = look(draft, scores, Whole())
    assert bool(values["deviation"].isnan().all())
    assert bool(values["excess"].isnan().all())
    assert not bool(values["rejection"].isnan().any())
    assert not isinstance(Whole(), PointwiseVerifier)


def test_diagnostics_of_an_empty_draft_are_empty():
    draft, scores = case(8)
    empty = Draft(draft.tokens[:, :0], draft.sizes * 0, law=draft.law.narrow(0))
    scores = Scores(scores.tokens[:, :1], scores.logits[:, :1], scores.probs[:, :1], {}, scores.finite)
    verdict = Verdict(torch.zeros((ROWS, 0)).long(), empty.sizes, scores.probs[:, 0], torch.zeros(ROWS).to(torch.int8))
    extras = probe(empty, scores, verdict, empty.sizes + 1, Nucleus(), NOISE, None)
    assert extras.places == {}
    assert torch.allclose(extras.tokens["output"], scores.probs[:, :1, 1].log())


# Catches: numbers of places behind the first rejection, a uniform of another node.
@pytest.mark.parametrize("rule", [Standard(), Nucleus(theta=0.6), Typical()])
def test_what_was_examined_is_what_the_rule_decided(rule):
    relaxed = 0
    for seed in range(20):
        draft, scores = case(seed)
        noise = Noise(tuple(range(seed, seed + ROWS)), (seed,) * ROWS)
        verdict = rule.verify(draft, scores, noise, None)
        extras = probe(draft, scores, verdict, draw(verdict, noise), rule, noise, None)
        for row, examined in enumerate((verdict.lengths + (verdict.lengths < draft.sizes)).tolist()):
            kept = extras.places["accepted"][row, :examined].tolist()
            ratio = extras.places["by_ratio"][row, :examined].tolist()
            assert kept == [float(node < verdict.lengths[row]) for node in range(examined)]
            relaxed += sum(one != other for one, other in zip(kept, ratio, strict=True))
            if isinstance(rule, Nucleus):
                assert all(one >= other for one, other in zip(kept, ratio, strict=True))
    assert (relaxed == 0) == isinstance(rule, Standard)


# Catches: q or p of another node of the tree, siblings taken for further places, a law that siblings change.
def test_places_of_a_tree_are_those_of_first_children_along_the_path():
    parents = [-1, -1, 1, 1, 2]
    generator = torch.Generator().manual_seed(3)
    p = (2 * torch.randn((40, 6, SIZE), generator=generator)).double().softmax(-1)
    q = torch.randn((40, 5, SIZE), generator=generator).double().softmax(-1)
    q[:, 1], q[:, 3] = q[:, 0], q[:, 2]  # siblings come from one law
    tokens = sample(q, torch.rand((40, 5), generator=generator, dtype=torch.float64))
    draft = Draft(tokens, torch.full((40,), 5), torch.tensor(parents).repeat(40, 1), Dense(q))
    fed = torch.cat([torch.zeros((40, 1), dtype=torch.int64), tokens], 1)
    scores, noise = Scores(fed, p.log(), p, {}, torch.ones(40) > 0), Noise(tuple(range(40)), (0,) * 40)
    rule = Nucleus(theta=0.6)
    verdict = rule.verify(draft, scores, noise, None)
    following = draw(verdict, noise)
    extras = probe(draft, scores, verdict, following, rule, noise, None)
    lengths = set()
    for row in range(40):
        path = verdict.path[row, : verdict.lengths[row]].tolist()
        emitted = [*tokens[row, path].tolist(), int(following[row])]
        places = [(node, parents.index(node) if node in parents else None) for node in (-1, *path)]
        for index, (node, child) in enumerate(places):
            law = p[row, node + 1]
            assert float(extras.tokens["target"][row, index]) == pytest.approx(math.log(law[emitted[index]]))
            if child is None:
                own = verdict.next_probs[row]
            else:
                own = rule.law(Place(law, Dense(q[row, child]), tokens[row, child], tokens[row, child], law.log(), {}))
                assert float(extras.places["q"][row, index]) == pytest.approx(float(q[row, child, tokens[row, child]]))
                assert bool(extras.places["accepted"][row, index]) == (path[index : index + 1] == [child])
                deviation = float((own - law).abs().sum() / 2)
                assert float(extras.places["deviation"][row, index]) == pytest.approx(deviation, abs=1e-12)
            assert float(extras.tokens["output"][row, index]) == pytest.approx(math.log(own[emitted[index]]))
        lengths.add(len(path))
    assert lengths == {0, 1, 2, 3}


# Catches: what a rule remembers taken from before the step at every place.
def test_a_rule_that_remembers_is_asked_with_what_it_remembers_there():
    draft, scores = case(2)
    rule, spent = Nucleus(theta=0.9, budget=0.4), torch.linspace(0.0, 0.3, ROWS, dtype=torch.float64).unsqueeze(1)
    extras = probe(draft, scores, kept_whole(draft), draft.sizes, rule, NOISE, spent)
    paid = 0
    for row in range(ROWS):
        left = 0.4 - float(spent[row])
        for node in range(NODES):
            here = extras.places["deviation"][row, node]
            price = float(look(draft, scores, Nucleus(theta=0.9))["deviation"][row, node])
            affordable = price <= left
            assert float(here) == pytest.approx(price if affordable else 0.0, abs=1e-12)
            left -= price if affordable else 0.0
            paid += affordable
    assert 0 < paid < ROWS * NODES


# Catches: a law made up for rules that have none, lossless ones included that are not pointwise.
def test_the_law_of_each_token_is_told_where_it_is_known():
    draft, scores = case(4)
    verdict, following = kept_whole(draft), torch.full_like(draft.sizes, 2)

    def told(rule):
        found = probe(draft, scores, verdict, following, rule, NOISE, None, diagnostics=False)
        assert found.places == {}
        assert tuple(found.tokens) == LOGPROBS
        return found.tokens

    emitted = torch.cat([draft.tokens, following.unsqueeze(1)], 1)
    target = scores.probs.gather(-1, emitted.unsqueeze(-1)).squeeze(-1).log()
    raw = scores.logits.log_softmax(-1).gather(-1, emitted.unsqueeze(-1)).squeeze(-1)
    for rule in (Standard(), Block(), Nucleus(), Fly(), Greedy()):
        tokens = told(rule)
        assert torch.equal(tokens["target"], target)
        assert torch.allclose(tokens["raw"], raw)
        assert bool(tokens["output"][:, :NODES].isnan().any()) == isinstance(rule, Fly)
        assert torch.allclose(tokens["output"][:, NODES], torch.full((ROWS,), -math.log(SIZE)).double())
    for rule in (Standard(), Block()):
        assert torch.equal(told(rule)["output"][:, :NODES], target[:, :NODES])
        assert bool((told(rule)["uncovered"] == 0).all())
    greedy = told(Greedy())
    best = scores.probs[:, :NODES].amax(-1)
    assert torch.allclose(greedy["uncovered"][:, :NODES], 1 - best)
    assert torch.equal(greedy["output"][:, :NODES] == 0, scores.probs[:, :NODES].argmax(-1) == draft.tokens)
    assert bool(told(Fly())["uncovered"][:, :NODES].isnan().all())


# Catches: a row that is looked at with the draft, law, noise or memory of another one.
@pytest.mark.parametrize("law", [Dense, Logits])
def test_one_row_after_another_is_all_rows_at_once(law):
    generator = torch.Generator().manual_seed(4)
    rows, nodes, size = 4, 3, 6
    p = torch.rand((rows, nodes + 1, size), generator=generator, dtype=torch.float64)
    q = torch.rand((rows, nodes, size), generator=generator, dtype=torch.float64)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tokens = torch.randint(0, size, (rows, nodes), generator=generator)
    draft = Draft(tokens, torch.tensor([3, 0, 1, 2]), law=Dense(q) if law is Dense else Logits(q.log()))
    scores = Scores(torch.cat([tokens[:, :1], tokens], 1), p.log(), p, {}, torch.ones(rows, dtype=torch.bool))
    noise = Noise((1, 2, 3, 4), (0, 5, 0, 9))
    for rule in (Nucleus(theta=0.6), Nucleus(theta=0.6, budget=0.3)):
        memory = torch.tensor([[0.3], [0.2], [0.1], [0.0]], dtype=torch.float64) if rule.memory else None
        verdict = rule.verify(draft, scores, noise, memory)
        following = draw(verdict, noise)
        found = probe(draft, scores, verdict, following, rule, noise, memory)
        uniform = noise.uniform("accept", nodes)
        wanted = diagnostics._probe(draft, scores, verdict, following, rule, uniform, memory, True, True)
        for mine, theirs in ((found.places, wanted.places), (found.tokens, wanted.tokens)):
            assert set(mine) == set(theirs)
            for name, values in mine.items():
                for row, count in enumerate((verdict.lengths + 1).tolist()):
                    torch.testing.assert_close(values[row, :count], theirs[name][row, :count], equal_nan=True)
