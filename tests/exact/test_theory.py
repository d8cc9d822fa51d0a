"""Identities of one position on random simplices, in float64: the closed forms that diagnostics are made of."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from specdec import theory
from specdec.probability import nucleus, total_variation

TOLERANCE = 1e-12


def simplices(size: int, rows: int, seed: int, zeros: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand((rows, size), generator=generator, dtype=torch.float64).log().neg() ** 2
    if zeros:
        values = values * (torch.rand((rows, size), generator=generator) < 0.7)
        values[:, 0] += 1e-3
    return values / values.sum(-1, keepdim=True)


def pairs() -> list[tuple[Tensor, Tensor]]:
    return [
        (simplices(size, 300, size, zeros), simplices(size, 300, 100 + size, zeros))
        for size in (2, 3, 5, 8)
        for zeros in (False, True)
    ]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The standard replacement; p where nothing is ever rejected."""
    rest = (p - q).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass.clamp(min=1e-300), p)


def share(excess: Tensor, reject: Tensor) -> Tensor:
    """E/R as a column; 0 where nothing is ever rejected."""
    return torch.where(reject > 0, excess / reject.clamp(min=1e-300), 0.0).unsqueeze(-1)


def supersets(p: Tensor, q: Tensor) -> list[Tensor]:
    """Acceptance functions at or above the standard one."""
    standard = theory.standard_acceptance(p, q)
    generator = torch.Generator().manual_seed(7)
    coin = torch.rand(p.shape, generator=generator, dtype=torch.float64)
    return [
        standard,
        standard + (1 - standard) * coin,
        torch.where(coin < 0.5, 1.0, standard),
        (standard / 0.6).clamp(max=1.0),
        torch.where(nucleus(p, 0.9), 1.0, standard),
        torch.ones_like(p),
    ]


def test_standard_acceptance_is_the_ratio_capped_at_one_and_zero_where_nothing_was_drawn():
    # Catches q/p, a missing cap, and 0/0.
    p, q = torch.tensor([0.2, 0.5, 0.0, 0.3]).double(), torch.tensor([0.4, 0.2, 0.4, 0.0]).double()
    assert torch.equal(theory.standard_acceptance(p, q)[2:], torch.zeros(2).double())
    assert torch.allclose(theory.standard_acceptance(p, q), torch.tensor([0.5, 1.0, 0.0, 0.0]).double(), rtol=1e-6)


def test_rejection_is_the_total_variation():
    # Catches a missing half and (p - q)+ summed over a part only.
    for p, q in pairs():
        assert torch.allclose(theory.rejection(p, q), total_variation(p, q), atol=TOLERANCE)


def test_output_law_is_the_sum_over_drafted_and_replaced_tokens():
    # Naive double loop, with a replacement that depends on what was rejected; catches a transposed [V, V].
    p, q = simplices(4, 20, 1), simplices(4, 20, 2)
    accept, follow = simplices(4, 20, 3), simplices(4, 80, 4).view(20, 4, 4)
    law = theory.output_law(q, accept, follow)
    same = theory.output_law(q, accept, p)
    for row in range(20):
        for y in range(4):
            direct = q[row, y] * accept[row, y]
            for x in range(4):
                direct = direct + q[row, x] * (1 - accept[row, x]) * follow[row, x, y]
            assert abs(float(law[row, y] - direct)) < TOLERANCE
            lost = sum(float(q[row, x] * (1 - accept[row, x])) for x in range(4))
            assert abs(float(same[row, y]) - float(q[row, y] * accept[row, y] + lost * p[row, y])) < TOLERANCE


def test_no_rule_deviates_less_than_its_acceptance_beyond_standard():
    # The lower bound for any acceptance and any replacement.
    for p, q in pairs():
        accept = simplices(p.shape[-1], 300, 5) * 3
        accept = accept.clamp(max=1.0)
        follow = simplices(p.shape[-1], 300, 6)
        bound = theory.excess(p, q, accept).clamp(min=0)
        assert bool((theory.deviation(p, q, accept, follow) >= bound - TOLERANCE).all())


def test_accepting_more_than_standard_with_its_residual_deviates_by_exactly_the_excess():
    # out = p + e - (E/R)(p - q)+, TV = E <= R, out >= (1 - E/R) p: catches E over the wrong set and a wrong sign.
    for p, q in pairs():
        for accept in supersets(p, q):
            follow = residual(p, q)
            law = theory.output_law(q, accept, follow)
            e = q * accept - torch.minimum(p, q)
            total, reject = theory.excess(p, q, accept), theory.rejection(p, q)
            formula = p + e - share(total, reject) * (p - q).clamp(min=0)
            assert torch.allclose(law, formula, atol=TOLERANCE)
            assert torch.allclose(theory.deviation(p, q, accept, follow), total, atol=TOLERANCE)
            assert torch.allclose((q * accept).sum(-1), 1 - reject + total, atol=TOLERANCE)
            assert bool((total <= reject + TOLERANCE).all())
            assert bool((law >= (1 - share(total, reject)) * p - TOLERANCE).all())
            inside = torch.where(p > 0, p * (p / law.clamp(min=1e-300)).log(), 0.0).sum(-1)
            assert bool((inside <= -(1 - share(total, reject).squeeze(-1)).clamp(min=1e-300).log() + 1e-9).all())


@pytest.mark.parametrize("theta", [1e-9, 0.4, 0.85, 0.95, 1.0])
def test_nucleus_law_is_piecewise(theta):
    # q on S and q > p; p on q > p outside S; p - (E/R)(p - q) elsewhere. Catches S of the wrong law.
    for p, q in pairs():
        member = nucleus(p, theta)
        accept = torch.where(member, 1.0, theory.standard_acceptance(p, q))
        law = theory.output_law(q, accept, residual(p, q))
        e, r = theory.nucleus_excess(p, q, theta), theory.rejection(p, q)
        less = p - share(e, r) * (p - q)
        expected = torch.where(q > p, torch.where(member, q, p), less)
        assert torch.allclose(law, expected, atol=TOLERANCE)
        assert torch.allclose(theory.excess(p, q, accept), e, atol=TOLERANCE)
        inside = torch.where(member, q, torch.minimum(p, q)).sum(-1)
        assert torch.allclose(inside, 1 - r + e, atol=TOLERANCE)


def test_nucleus_excess_has_its_limits():
    # Theta 0 is the standard rule, not the mode; theta 1 keeps all tokens the target can emit.
    for p, q in pairs():
        assert torch.equal(theory.nucleus_excess(p, q, 0.0), torch.zeros(300).double())
        mode = p == p.amax(-1, keepdim=True)
        assert torch.allclose(theory.nucleus_excess(p, q, 1e-12), ((q - p).clamp(min=0) * mode).sum(-1))
        assert torch.allclose(theory.nucleus_excess(p, q, 1.0), ((q - p).clamp(min=0) * (p > 0)).sum(-1))
        steps = [theory.nucleus_excess(p, q, theta) for theta in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)]
        assert all(bool((high >= low - TOLERANCE).all()) for low, high in itertools.pairwise(steps))


def test_a_lenient_ratio_is_bounded_by_the_target_over_its_leniency():
    for p, q in pairs():
        for leniency in (1.0, 0.7, 0.2):
            accept = (theory.standard_acceptance(p, q) / leniency).clamp(max=1.0)
            accept = torch.where(p / q.clamp(min=1e-300) >= leniency, 1.0, accept)
            law = theory.output_law(q, accept, residual(p, q))
            assert bool((law <= p / leniency + TOLERANCE).all())


def test_interpolated_target_deviates_by_its_weight_times_r():
    for p, q in pairs():
        for weight in (0.25, 0.5):
            own = weight * q + (1 - weight) * p
            accept = theory.standard_acceptance(own, q)
            law = theory.output_law(q, accept, residual(own, q))
            assert torch.allclose(law, own, atol=TOLERANCE)
            expected = weight * theory.rejection(p, q)
            assert torch.allclose(theory.deviation(p, q, accept, residual(own, q)), expected, atol=TOLERANCE)


def test_a_processed_target_bounds_everything_by_its_own_support():
    # After top-k on p the identity holds for the processed law: a token outside its support is never in the output.
    for p, q in pairs():
        keep = p >= p.topk(2).values[..., -1:]
        p = p * keep / (p * keep).sum(-1, keepdim=True)
        for theta in (0.5, 1.0):
            accept = torch.where(nucleus(p, theta), 1.0, theory.standard_acceptance(p, q))
            law = theory.output_law(q, accept, residual(p, q))
            assert float(law[p == 0].max() if bool((p == 0).any()) else 0.0) <= TOLERANCE
            assert torch.allclose(total_variation(law, p), theory.nucleus_excess(p, q, theta), atol=TOLERANCE)


def test_point_mass_draft():
    # R = 1 - p(x), standard keeps p(x), nucleus is deterministic inside S and the target's law outside.
    p = simplices(6, 200, 11)
    for x in range(6):
        q = torch.zeros_like(p)
        q[:, x] = 1.0
        assert torch.allclose(theory.rejection(p, q), 1 - p[:, x], atol=TOLERANCE)
        assert torch.allclose((q * theory.standard_acceptance(p, q)).sum(-1), p[:, x], atol=TOLERANCE)
        member = nucleus(p, 0.8)
        law = theory.output_law(q, torch.where(member, 1.0, theory.standard_acceptance(p, q)), residual(p, q))
        assert torch.allclose(law, torch.where(member[:, x : x + 1], q, p), atol=TOLERANCE)
        assert torch.allclose(theory.nucleus_excess(p, q, 0.8), (1 - p[:, x]) * member[:, x], atol=TOLERANCE)


def test_sequence_bound_and_expected_length():
    # Hand values; catches a sum in place of a product and a missing 1.
    assert abs(theory.sequence_bound([0.001] * 32) - (1 - 0.999**32)) < TOLERANCE
    assert theory.sequence_bound([]) == 0.0
    assert theory.sequence_bound([0.2, -0.1, 0.5]) == pytest.approx(0.6)
    assert theory.sequence_bound([2.0]) == 1.0
    assert theory.expected_acceptance_length([0.6] * 7) == pytest.approx((1 - 0.6**8) / 0.4)
    assert theory.expected_acceptance_length([0.5, 0.2]) == pytest.approx(1 + 0.5 + 0.1)
    assert theory.expected_acceptance_length([]) == 1.0


def test_sequence_bound_holds_for_two_positions_by_enumeration():
    # The total variation of pairs of tokens against the bound from the worst deviation of each position.
    for seed in range(20):
        p1, o1 = simplices(4, 1, seed)[0], simplices(4, 1, 50 + seed)[0]
        p2, o2 = simplices(4, 4, 100 + seed), simplices(4, 4, 150 + seed)
        worst = [float(total_variation(p1, o1)), float(total_variation(p2, o2).max())]
        exact = float(total_variation((p1.unsqueeze(1) * p2).flatten(), (o1.unsqueeze(1) * o2).flatten()))
        assert exact <= theory.sequence_bound(worst) + TOLERANCE
        assert math.isclose(theory.sequence_bound(worst), 1 - (1 - worst[0]) * (1 - worst[1]))
