import math

import pytest
import torch
from torch import Tensor

from specdec.noise import Noise
from specdec.probability import (
    FALLBACK_MASS,
    argmax,
    at,
    entropy,
    mass_above,
    normalise,
    nucleus,
    one_hot,
    sample,
    total_variation,
)

HIGHEST = 1.0 - 2.0**-53


def laws(rows: int, size: int, seed: int, zeros: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = (3 * torch.randn((rows, size), generator=generator, dtype=torch.float64)).exp()
    values = values * (torch.rand((rows, size), generator=generator) >= zeros)
    values[:, size // 2] += 1e-6
    return values / values.sum(-1, keepdim=True)


def naive_sample(probs: list[float], uniform: float) -> int:
    goal, total = uniform * math.fsum(probs), 0.0
    for token, mass in enumerate(probs):
        total += mass
        if total > goal:
            return token
    return max(token for token, mass in enumerate(probs) if mass > 0)


def test_sample_is_the_inverse_transform_over_ids_in_order():
    # Catches another order, and >= in place of >.
    probs = laws(200, 7, 1)
    uniform = torch.rand(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = [naive_sample(row, u) for row, u in zip(probs.tolist(), uniform.tolist(), strict=True)]
    assert sample(probs, uniform).tolist() == expected


def test_sample_at_a_border_takes_the_next_id():
    # Binary fractions, so the borders are exact: u = 0.25 belongs to id 1. Catches right=False.
    probs = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    assert [int(sample(probs, torch.tensor(u).double())) for u in (0.0, 0.25, 0.5, 0.75)] == [0, 1, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, 1 - 2.0**-24, HIGHEST])
def test_sample_never_draws_an_id_of_mass_zero(dtype, uniform):
    # Zeros at both ends and in between; catches u = 0 taking id 0 and u near 1 running off the end.
    for size in (1, 2, 5, 300, 5000):
        probs = laws(50, size, size, zeros=0.6).to(dtype)
        if size > 3:
            probs[:, 0] = 0
            probs[:, -1] = 0
        drawn = sample(probs, torch.full((50,), uniform, dtype=torch.float64))
        assert bool((probs.gather(1, drawn.unsqueeze(1)) > 0).all())


def test_sample_does_not_need_laws_that_sum_to_one():
    # float32 softmax sums to 1 only nearly; catches u compared with the raw cumulative sum.
    probs = laws(40, 6, 3)
    uniform = torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(sample(probs, uniform), sample(probs * 0.25, uniform))
    tiny = torch.tensor([0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    assert int(sample(tiny, torch.tensor(HIGHEST).double())) == 2


def test_sample_reaches_every_id_of_a_uniform_law_over_150000():
    size = 150_000
    probs = torch.full((1, size), 1.0 / size, dtype=torch.float32)
    wanted = torch.tensor([0, 1, 17, 74_999, 149_998, 149_999])
    uniform = (wanted + 0.5).double() / size
    assert sample(probs.expand(6, -1), uniform).tolist() == wanted.tolist()


def test_sample_tells_improbable_ids_apart_behind_a_probable_one():
    # 0.999 at id 0: near 1 a float32 cumulative sum has steps wider than the other ids' mass.
    size = 150_000
    probs = torch.full((size,), 0.001 / (size - 1), dtype=torch.float32)
    probs[0] = 0.999
    exact = probs.double().cumsum(0)
    wanted = torch.tensor([1, 2, 3, 501, 502, 75_000, 149_998, 149_999])
    uniform = (exact[wanted - 1] + exact[wanted]) / 2 / exact[-1]
    assert sample(probs.expand(8, -1), uniform).tolist() == wanted.tolist()


def test_sample_of_rows_that_are_not_finite_stays_in_range():
    # Such rows end with an error later; they must not crash here or harm their neighbours.
    probs = laws(5, 6, 4)
    good = sample(probs, torch.full((5,), 0.4).double())
    probs[1] = float("nan")
    probs[3, 2] = float("inf")
    probs[4] = 0.0
    drawn = sample(probs, torch.full((5,), 0.4).double())
    assert bool(((drawn >= 0) & (drawn < 6)).all())
    assert drawn[0] == good[0]
    assert drawn[2] == good[2]


def test_sample_takes_any_leading_shape():
    probs = laws(6, 5, 5).view(2, 3, 5)
    uniform = torch.rand((2, 3), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    flat = sample(probs.view(6, 5), uniform.view(6))
    assert torch.equal(sample(probs, uniform), flat.view(2, 3))


def naive_nucleus(probs: list[float], theta: float) -> list[bool]:
    """The smallest set of top tokens with mass at least theta, widened by all that tie with its least member."""
    order = sorted(range(len(probs)), key=lambda x: -probs[x])
    mass, least = 0.0, math.inf
    for x in order:
        if mass >= theta or probs[x] == 0:
            break
        mass, least = mass + probs[x], probs[x]
    return [probability >= least and probability > 0 for probability in probs]


@pytest.mark.parametrize("theta", [1e-9, 0.2, 0.5, 0.9, 0.95, 0.999, 1.0])
def test_nucleus_is_the_smallest_top_set_with_ties(theta):
    # Catches the crossing token left out, ties split, and zeros taken in at theta 1.
    for size in (1, 3, 8, 40):
        probs = laws(60, size, size)
        assert nucleus(probs, theta).tolist() == [naive_nucleus(row, theta) for row in probs.tolist()]


def test_nucleus_with_ties_everywhere():
    # Multiples of 1/64 sum exactly.
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        counts = torch.bincount(torch.randint(0, 9, (64,), generator=generator), minlength=9)
        probs = counts.double() / 64
        for theta in (1 / 64, 0.25, 0.5, 0.75, 63 / 64, 1.0):
            assert nucleus(probs, theta).tolist() == naive_nucleus(probs.tolist(), theta)


@pytest.mark.parametrize("size", [256, 257, 1000])
def test_nucleus_wider_than_the_first_tokens_is_sorted_in_full(size):
    # Flat laws whose nucleus has more than 256 members beside peaked ones; catches a cut at 256.
    flat = laws(3, size, 1, zeros=0.0) * 0.01 + 0.99 / size
    peaked = laws(3, size, 2)
    probs = torch.cat([flat, peaked])
    for theta in (0.3, 0.95, 1.0):
        assert nucleus(probs, theta).tolist() == [naive_nucleus(row, theta) for row in probs.tolist()]
    uniform = torch.full((1, size), 1.0 / size)
    assert bool(nucleus(uniform, 0.5).all())


def test_nucleus_of_theta_zero_is_empty():
    assert not bool(nucleus(laws(4, 6, 1), 0.0).any())


def test_mass_above_counts_strictly_greater_in_float64():
    # Catches >=, and a sum in the input's precision.
    probs = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    found = [float(mass_above(probs, probs[:, x])) for x in range(4)]
    assert found == [0.0, 0.5, 0.5, 1.0]
    many = torch.full((1, 150_000), 1.0 / 150_000)
    exact = 150_000 * float(many[0, 0])
    assert mass_above(many, torch.zeros(1)).dtype == torch.float64
    assert abs(float(mass_above(many, torch.zeros(1))) - exact) < 1e-12


def test_normalise_divides_by_the_mass_or_falls_back():
    # Catches softmax, a missing guard, and a NaN mass that slips through mass <= limit.
    fallback = torch.tensor([0.1, 0.9]).double()
    weights = torch.tensor(
        [[3.0, 1.0], [0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], [FALLBACK_MASS, 0.0], [3e-8, 1e-8]]
    ).double()
    law, lost = normalise(weights, fallback.expand(6, 2))
    assert lost.tolist() == [False, True, True, True, True, False]
    assert torch.allclose(law[0], torch.tensor([0.75, 0.25]).double())
    assert torch.allclose(law[5], torch.tensor([0.75, 0.25]).double())
    for row in (1, 2, 3, 4):
        assert torch.equal(law[row], fallback)


def test_entropy_takes_zero_times_log_zero_as_zero():
    # Catches NaN after top-k, and bits in place of nats.
    probs = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).double()
    assert entropy(probs).tolist() == pytest.approx([math.log(2), 0.0])
    floored = entropy(probs, floor=1e-5)
    assert floored.tolist() == pytest.approx([-math.log(0.50001), -math.log(1.00001)])


def test_entropy_with_a_floor_of_a_wide_uniform_law_is_far_from_its_entropy():
    # The constant is part of a published rule: 11.01 nats instead of 11.93.
    probs = torch.full((151_936,), 1 / 151_936, dtype=torch.float64)
    assert float(entropy(probs)) == pytest.approx(11.931, abs=1e-3)
    assert float(entropy(probs, floor=1e-5)) == pytest.approx(11.01, abs=1e-2)


def test_total_variation_is_half_the_absolute_difference():
    left, right = torch.tensor([0.5, 0.5, 0.0]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    assert float(total_variation(left, right)) == pytest.approx(0.3)


def test_at_and_one_hot():
    # Catches an index of -1 that wraps round to the last token.
    values = torch.tensor([[0.1, 0.9], [0.3, 0.7]])
    assert at(values, torch.tensor([1, -1])).tolist() == pytest.approx([0.9, 0.0])
    hot = one_hot(torch.tensor([[1], [0]]), 3, torch.float64)
    assert hot.dtype == torch.float64
    assert hot.tolist() == [[[0.0, 1.0, 0.0]], [[1.0, 0.0, 0.0]]]


def test_the_frequencies_of_sample_follow_the_law():
    uniform = Noise(tuple(range(20_000)), (0,) * 20_000).uniform("next", 1).squeeze(1)
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)
    counts = torch.bincount(sample(probs.expand(20_000, -1), uniform), minlength=4)
    assert counts[1] == 0
    assert (counts / 20_000).tolist() == pytest.approx(probs.tolist(), abs=0.02)


@pytest.mark.parametrize("size", [1, 7, 1023, 1024, 1025, 1151, 1300, 50_257])
def test_argmax_is_the_first_of_the_largest(size):
    # Ties within a block, across blocks and in the last, shorter one; catches a window that is off, a later tie, NaN.
    generator = torch.Generator().manual_seed(size)
    for spread in (1, 30):
        values = (spread * torch.randn((3, 4, size), generator=generator)).round()
        assert torch.equal(argmax(values), values.argmax(-1))
        assert torch.equal(argmax(values[:, 1:3]), values[:, 1:3].argmax(-1))
        values[0, 0, size // 2 :] = values.amax() + 1
        values[1, 1, -1] = values.amax() + 1
        values[2, 2] = -torch.inf
        assert torch.equal(argmax(values), values.argmax(-1))
        values[1, 3, size - 1 - size // 3] = torch.nan
        assert torch.equal(argmax(values), values.argmax(-1))
