"""What `budget` and `max_deviation` promise, by exact enumeration of sequences that several blocks make."""

from functools import cache

import pytest
import torch
from attrs import evolve

from specdec.law import Dense, PointMass
from specdec.probability import normalise
from specdec.testing import chain, output_law, random_model
from specdec.theory import nucleus_excess
from specdec.verifier import Place
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.standard import Standard

V = 3


def random_laws(count, depth, seed, dtype=torch.float64):
    """count models at once: law after each prefix, [count, V**d, V] for d < depth; some sharp, some flat."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(count, 1, 1, generator=generator, dtype=dtype) * 4
    return [
        (torch.randn(count, V**d, V, generator=generator, dtype=dtype) * scale).softmax(-1).to(dtype)
        for d in range(depth)
    ]


def sequence_law(rule, p, q, length, block, *, blocks=99):
    """The law of the first `length` tokens of `block`-token drafts, [count, V**length], from the rule's definition.

    What a rule remembers goes from place to place and from block to block. Tokens of a block after the first rejection,
    and the token after a block that was kept whole, are drawn as the engine does. After `blocks` blocks p goes on.
    """
    count = p[0].shape[0]
    start = torch.tensor(rule.start((0,)), dtype=torch.float64).expand(count, rule.memory)

    def after(prefix, depth, done, memory, left):
        """Laws of what follows `prefix` (a number) of `depth` tokens when `done` nodes of the block are kept."""
        if depth == length:
            return torch.ones(count, 1, dtype=torch.float64)
        here = p[depth][:, prefix]
        if done == block or not left:
            return torch.cat(
                [here[:, x : x + 1] * after(prefix * V + x, depth + 1, 0, memory, max(left - 1, 0)) for x in range(V)],
                1,
            )
        drafted = q[depth][:, prefix]
        token = torch.zeros(count, dtype=torch.int64)
        at = Place(here, Dense(drafted), token, token * 0 + done, here.log(), {}, memory if rule.memory else None)
        kept = drafted * rule.acceptance(at)
        rest = (1 - kept.sum(-1, keepdim=True)).clamp(min=0) * normalise(rule.correct(at), here)[0]
        memory = rule.advance(at) if rule.memory else memory
        return torch.cat(
            [
                kept[:, x : x + 1] * after(prefix * V + x, depth + 1, done + 1, memory, left)
                + rest[:, x : x + 1] * after(prefix * V + x, depth + 1, 0, memory, left - 1)
                for x in range(V)
            ],
            1,
        )

    return after(0, 0, 0, start, blocks)


def target_law(p, length):
    law = torch.ones(p[0].shape[0], 1, dtype=torch.float64)
    for depth in range(length):
        law = (law.unsqueeze(-1) * p[depth]).flatten(1)
    return law


def distance(rule, p, q, length, block):
    return (sequence_law(rule, p, q, length, block) - target_law(p, length)).abs().sum(-1) / 2


@cache
def laws():
    return random_laws(2000, 4, 0), random_laws(2000, 4, 1)


# Catches: this file's own enumeration.
def test_the_enumeration_of_sequences_is_exact_for_the_standard_rule():
    p, q = laws()
    assert distance(Standard(), p, q, 4, 2).max() < 1e-12
    assert sequence_law(Nucleus(), p, q, 3, 2).sum(-1).sub(1).abs().max() < 1e-12


# Catches: a charge for places the standard rule decided, none for rejected ones, a budget that starts anew with every
# block, E of the drafted token instead of the place, `<` of what was spent without what is about to be.
@pytest.mark.parametrize(("length", "block"), [(2, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("budget", [0.0, 0.05, 0.2, 0.6])
def test_a_request_deviates_by_at_most_its_budget(length, block, budget):
    p, q = laws()
    found = distance(Nucleus(theta=0.9, budget=budget), p, q, length, block)
    assert found.max() <= budget + 1e-12
    if budget:
        free = distance(Nucleus(theta=0.9), p, q, length, block)
        assert (free > budget).double().mean() > 0.05  # the bound binds
        assert found.max() > 0.7 * budget  # and is used


# Catches: the bound of a sum called a product, a place above the bound that is let through.
@pytest.mark.parametrize(("length", "block"), [(3, 2), (4, 3)])
@pytest.mark.parametrize("most", [0.0, 0.03, 0.15])
def test_a_sequence_is_as_certain_as_its_places(length, block, most):
    p, q = laws()
    found = distance(Nucleus(theta=0.9, max_deviation=most), p, q, length, block)
    assert found.max() <= 1 - (1 - most) ** length + 1e-12
    if most:
        assert (distance(Nucleus(theta=0.9), p, q, length, block) > 1 - (1 - most) ** length).double().mean() > 0.05
    if most == 0.15:
        assert found.max() > most  # more than one place is relaxed


# Catches: a budget that ends the relaxation at the first place that does not fit.
def test_a_place_that_does_not_fit_is_skipped_and_cheaper_ones_still_come():
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    dear, cheap = torch.tensor([[0.1, 0.8, 0.1]]).double(), torch.tensor([[0.48, 0.32, 0.2]]).double()
    rule, token = Nucleus(budget=0.1), torch.tensor([1])

    def at(q, memory):
        return Place(p, Dense(q), token, token * 0, p.log(), {}, memory)

    memory = torch.zeros(1, 1, dtype=torch.float64)
    assert float(rule.accept_at(at(dear, memory))) == pytest.approx(0.3 / 0.8)
    memory = rule.advance(at(dear, memory))
    assert memory.item() == 0.0
    assert float(rule.accept_at(at(cheap, memory))) == 1.0
    assert rule.advance(at(cheap, memory)).item() == pytest.approx(0.02)


# Catches: a walk that hands the budget's memory on in another way than the definition says.
@pytest.mark.parametrize("options", [{"budget": 0.1}, {"budget": 0.02}, {"max_deviation": 0.1}])
def test_the_implemented_rule_is_the_definition(options):
    rule = Nucleus(theta=0.9, **options)
    for seed in range(4):
        p, q = random_model(V, 3, seed), random_model(V, 2, seed + 100)
        stacked = [[table.unsqueeze(0) for table in model] for model in (p, q)]
        torch.testing.assert_close(
            output_law(rule, p, q, chain(2), 3),
            sequence_law(rule, stacked[0], stacked[1], 3, 2, blocks=1)[0],
            atol=1e-9,
            rtol=0,
        )


# Catches: a budget of infinity or an eps of 1 that is not NSD, and point masses whose E is that of a soft law.
def test_bounds_that_never_bind_change_nothing_and_point_masses_are_charged_in_full():
    p, q = (table[:, 0] for table in (laws()[0][0], laws()[1][0]))
    token = q.argmax(-1)
    place = Place(p, Dense(q), token, token * 0, p.log(), {}, torch.zeros(len(p), 1, dtype=torch.float64))
    free = Nucleus(theta=0.9)
    for rule in (Nucleus(theta=0.9, budget=9.0), Nucleus(theta=0.9, max_deviation=1.0)):
        assert torch.equal(rule.acceptance(place), free.acceptance(place))
        assert torch.equal(rule.accept_at(place), free.accept_at(place))
    point = evolve(place, q=PointMass(token, V, p.dtype))
    charged = Nucleus(theta=0.9, budget=9.0).advance(point)[:, 0]
    torch.testing.assert_close(charged, nucleus_excess(p, point.q.dense(), 0.9))


# Catches: siblings relaxed without being asked for, or against the whole of p instead of what is left of it.
def test_relaxed_siblings_stay_below_the_sum_of_their_own_excess():
    parents = (-1, -1)
    for seed in range(20):
        p, q = random_model(4, 2, seed), random_model(4, 1, seed + 100)
        first, every = Nucleus(theta=0.8), Nucleus(theta=0.8, children="all")
        laws_of = [output_law(rule, p, q, parents, 1) for rule in (first, every)]
        target, drafted = p[0][0], q[0][0]
        one = float(nucleus_excess(target, drafted, 0.8))
        bound = one
        rejected = 1 - (drafted * first.acceptance(_place(target, drafted))).sum()
        if rejected > 1e-12:
            left = normalise((target - drafted).clamp(min=0), target)[0]
            bound += float(rejected * nucleus_excess(left, drafted, 0.8))
        found = [float((law - target).abs().sum() / 2) for law in laws_of]
        assert found[0] == pytest.approx(one, abs=1e-9)
        assert found[1] <= bound + 1e-9


def _place(p, q):
    token = torch.tensor(0)
    return Place(p, Dense(q), token, token, p.log(), {})


# Catches: a certificate for trees whose other children were relaxed.
def test_bounds_and_relaxed_siblings_do_not_go_together():
    for bound in ({"budget": 0.1}, {"max_deviation": 0.1}):
        with pytest.raises(ValueError, match="'children' must be first"):
            Nucleus(children="all", **bound)
