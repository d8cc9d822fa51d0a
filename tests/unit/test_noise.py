import itertools

import pytest
import torch
from torch import Tensor

from specdec.noise import Noise, request_seed

ROWS = 20_000
MASK = (1 << 64) - 1
GOLDEN = {
    "draft": [[0.8513026201288322, 0.1345321208590312], [0.985991062117261, 0.1937016095335934]],
    "accept": [[0.8905966070102489, 0.8331490949579212], [0.2464731931044729, 0.801685504024373]],
    "next": [[0.21095320371927717], [0.5490748280262134]],
}
GOLDEN_SEED = 7190984699035236473


def mix(value: int) -> int:
    """The finaliser of splitmix64 on unsigned integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def reference(seed: int, step: int, stream: str, index: int) -> float:
    key = 0
    for part in (seed, step, {"draft": 1, "accept": 2, "next": 3}[stream], index):
        key = mix(((key ^ part) + 0x9E3779B97F4A7C15) & MASK)
    return (key >> 11) / 2**53


def test_numbers_are_the_documented_hash():
    # Pure Python on unsigned integers; catches arithmetic instead of logical shifts for seeds beyond 2^63.
    seeds, steps = (0, 1, 2**63 - 1, 2**64 - 1, 12345678901234567890), (0, 5, 10**6, 1, 2)
    for stream in ("draft", "accept", "next"):
        got = Noise(seeds, steps).uniform(stream, 4)
        for row, (seed, step) in enumerate(zip(seeds, steps, strict=True)):
            assert got[row].tolist() == [reference(seed, step, stream, index) for index in range(4)]


def test_numbers_are_pinned():
    # Results of earlier versions must stay reproducible: changing the hash is a breaking change.
    noise = Noise((0, 1), (0, 7))
    assert noise.uniform("draft", 2).tolist() == GOLDEN["draft"]
    assert noise.uniform("accept", 2).tolist() == GOLDEN["accept"]
    assert noise.uniform("next", 1).tolist() == GOLDEN["next"]
    assert request_seed(0, "sample-0", 0) == GOLDEN_SEED


def test_numbers_are_uniform_in_the_half_open_interval():
    # Mean, variance and the deciles; catches 24 bits, [0, 1] and a biased hash.
    for stream in ("draft", "accept", "next"):
        numbers = Noise(tuple(range(ROWS)), (3,) * ROWS).uniform(stream, 4)
        assert numbers.dtype == torch.float64
        assert float(numbers.min()) >= 0.0
        assert float(numbers.max()) < 1.0
        assert float(numbers.mean()) == pytest.approx(0.5, abs=0.005)
        assert float(numbers.var()) == pytest.approx(1 / 12, abs=0.002)
        tenths = torch.bincount((numbers.flatten() * 10).long(), minlength=10) / numbers.numel()
        assert tenths.tolist() == pytest.approx([0.1] * 10, abs=0.006)
        # Low bits are used: the numbers do not lie on a coarse grid.
        assert bool(((numbers * 2**24) % 1 > 0).any())


def correlation(left: Tensor, right: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1])


def test_streams_steps_seeds_and_indices_are_independent():
    # Draft and accept numbers that agree bias the output, and so does one number for two positions of a step.
    seeds = tuple(range(ROWS))
    views = {
        "draft": Noise(seeds, (0,) * ROWS).uniform("draft", 2),
        "accept": Noise(seeds, (0,) * ROWS).uniform("accept", 2),
        "next": Noise(seeds, (0,) * ROWS).uniform("next", 2),
        "step 1": Noise(seeds, (1,) * ROWS).uniform("draft", 2),
        "seed + 1": Noise(tuple(seed + 1 for seed in seeds), (0,) * ROWS).uniform("draft", 2),
    }
    columns = {(name, index): view[:, index] for name, view in views.items() for index in (0, 1)}
    for (a, left), (b, right) in itertools.combinations(columns.items(), 2):
        assert abs(correlation(left, right)) < 0.03, (a, b)
        assert float((left == right).double().mean()) < 0.001, (a, b)


def test_seed_and_step_do_not_mix_up():
    # (seed 1, step 0) and (seed 0, step 1) are different requests; catches seed + step and seed ^ step.
    grid = [Noise((seed,), (step,)).uniform("next", 1).item() for seed in range(40) for step in range(40)]
    assert len(set(grid)) == 1600


def test_numbers_do_not_depend_on_batch_mates():
    # Row i alone, in a batch, and in another order.
    whole = Noise((5, 6, 7), (2, 0, 9)).uniform("accept", 3)
    for row, (seed, step) in enumerate(((5, 2), (6, 0), (7, 9))):
        assert torch.equal(Noise((seed,), (step,)).uniform("accept", 3), whole[row : row + 1])
    assert torch.equal(Noise((7, 5), (9, 2)).uniform("accept", 3), whole[[2, 0]])


def test_asking_for_more_numbers_does_not_change_the_first():
    # A longer draft of a batch mate must not change a row; catches a stateful generator.
    noise = Noise((5, 6), (2, 0))
    assert torch.equal(noise.uniform("draft", 7)[:, :3], noise.uniform("draft", 3))
    assert noise.uniform("draft", 0).shape == (2, 0)


def test_request_seeds_differ_by_recipe_seed_sample_and_repeat():
    # Catches text glued together without a separator, and a seed outside int64.
    seeds = {
        request_seed(seed, sample, repeat)
        for seed, sample, repeat in itertools.product((0, 1, 11), ("", "1", "11", "a"), (0, 1))
    }
    assert len(seeds) == 24
    assert all(0 <= seed < 2**63 for seed in seeds)
