import json

import pytest
import torch

from specdec.metrics import Counters, bootstrap, pool
from specdec.types import Kept


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
        examined=tuple(min(row[1] + 1, row[0]) for row in rows),
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
