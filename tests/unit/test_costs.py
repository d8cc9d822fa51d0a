import random

import pytest

from specdec.costs import Costs, Timing, Trail, lengths_of, line, predict, speedup

# Ten for a plain step of one row; a draft of w tokens costs w, its verification 10 + w, the rest 1.
TIMINGS = [
    Timing(rows=rows, width=width, draft=float(width) if width else None, verify=10.0 * rows + width, rest=1.0)
    for rows in (1, 2)
    for width in (0, 1, 2, 4)
]


def trail(steps, emitted, verified, **prefill):
    return Trail(steps=steps, emitted=emitted, verified=verified, **prefill)


# Catches: a mean in place of a median, timings of one cell that land in another, a draft without a time taken for 0.
def test_costs_are_the_medians_of_each_cell():
    timings = [
        Timing(1, 0, None, 10.0, 1.0),
        *(Timing(1, 4, draft, 14.0, 2.0) for draft in (4.0, 5.0, 600.0)),
        Timing(1, 4, None, 14.0, 2.0),
    ]
    assert Costs.of(timings).parts(1, 4) == (5.0, 14.0, 2.0)


# Catches: a nearest cell in place of a line, rows and width mixed up, a drafter that is paid where it is not asked.
def test_costs_between_what_was_measured_lie_on_a_line():
    costs = Costs.of(TIMINGS)
    assert costs.parts(1, 3) == (3.0, 13.0, 1.0)
    assert costs.step(2, 3) == 3.0 + 23.0 + 1.0
    assert costs.parts(1, 4, asked=False) == (0.0, 14.0, 1.0)
    assert costs.plain(1) == 11.0
    assert Costs.of([one for one in TIMINGS if one.rows != 1] + TIMINGS[:4]).step(1, 0, asked=False) == 11.0


# Catches: a clamp at the last point, a line through the first and the last, a cost below 0.
@pytest.mark.parametrize(("at", "value"), [(0, 1.0), (1, 2.0), (3, 6.0), (6, 12.0), (-5, 0.0)])
def test_lines_go_on_beyond_the_points(at, value):
    assert line({0: 1.0, 2: 3.0, 4: 9.0} if at == 3 else {0: 1.0, 1: 2.0, 5: 10.0}, at) == pytest.approx(value)


# Catches: a longer draft that costs nothing, where a forward of a few tokens happened to be slower than one of more.
def test_costs_never_fall_past_what_was_measured():
    assert line({0: 60.0, 2: 110.0, 4: 76.0}, 8) == 76.0
    assert line({0: 60.0, 2: 110.0, 4: 76.0}, 3) == pytest.approx(93.0)


# Catches: a step of few rows that costs nothing, where only steps of many rows were measured.
def test_costs_before_what_was_measured_are_at_least_their_share():
    assert line({4: 0.1, 8: 0.3}, 1) == pytest.approx(0.025)
    assert line({4: 0.1, 8: 0.12}, 2) == pytest.approx(0.09)


# Catches: prompts counted on one side only, a draft's prompts counted on both, tokens that are not paid a plain step.
def test_the_speed_up_is_plain_seconds_over_speculative_seconds():
    costs = Costs.of(TIMINGS)
    made = trail({(1, 4, True): 5}, (20,), (5,), prefill=30.0, draft_prefill=7.0)
    assert speedup(costs, [made]) == pytest.approx((30 + 20 * 11) / (30 + 7 + 5 * 19))
    two = trail({(2, 4, True): 5, (1, 2, True): 3}, (20, 30), (5, 8))
    assert speedup(costs, [two]) == pytest.approx((20 * 21 + 10 * 11) / (5 * 29 + 3 * 15))
    assert speedup(costs, [made, two]) == pytest.approx((250 + 530) / (37 + 95 + 190))


# Catches: steps that are not asked for a draft (the last of a text) charged for one.
def test_a_step_without_a_draft_costs_a_plain_one():
    costs = Costs.of(TIMINGS)
    assert speedup(costs, [trail({(1, 0, False): 8}, (8,), (8,))]) == 1.0
    assert speedup(costs, [trail({(1, 0, True): 8}, (8,), (8,))]) == 1.0  # a draft of 0 costs 0 by the line


# Catches: the rate of the last place forgotten beyond what was measured, a shorter draft that keeps what it never had.
def test_acceptance_lengths_of_other_drafts():
    assert lengths_of(25, 10, [8, 4, 2, 1], 6) == pytest.approx([1.0, 1.8, 2.2, 2.4, 2.5, 2.55, 2.575])
    assert lengths_of(24, 10, [8, 4, 2, 1], 4) == pytest.approx([0.9, 1.7, 2.1, 2.3, 2.4])  # a stop dropped a bonus
    assert lengths_of(10, 10, [], 2) == [1.0, 1.0, 1.0]
    assert lengths_of(15, 10, [5], 2) == pytest.approx([1.0, 1.5, 1.75])


# Catches: a best draft length that ignores costs or acceptance, the wrong thing named as the limit.
def test_a_draft_that_is_seldom_kept_should_be_short():
    made = [trail({(1, 4, True): 10}, (20,), (10,))]
    found = predict(TIMINGS, made, [9, 1, 0, 0], rows=1, width=4)
    assert found.acceptance_length == 2.0
    assert found.speedup == pytest.approx(20 * 11 / (10 * 19))
    assert found.steady == pytest.approx(2 * 11 / 19)
    assert found.by_length[0] == pytest.approx(1.9 * 11 / 13)
    assert found.by_length[3] == pytest.approx(found.speedup)
    assert (found.best, found.measured, len(found.by_length)) == (1, 4, 8)
    assert found.limits == pytest.approx({"draft": 220 / 150, "verify": 220 / 150, "acceptance": 20 * 11 / (4 * 19)})


# Catches: a longer draft that costs what the measured one does.
def test_a_draft_that_is_always_kept_should_be_longer():
    found = predict(TIMINGS, [trail({(1, 4, True): 10}, (50,), (10,))], [10, 10, 10, 10], rows=1, width=4)
    assert found.best == 8
    assert found.by_length[7] == pytest.approx(9 * 11 / (8 + 18 + 1))


# Catches: a longer draft judged by the cost of drafting one token, of which nobody knows how it goes on.
def test_of_a_draft_of_one_token_nothing_is_said_of_longer_ones():
    short = [one for one in TIMINGS if one.width < 2]
    assert len(predict(short, [trail({(1, 1, True): 10}, (20,), (10,))], [10], rows=1, width=1).by_length) == 1


# Catches: an interval that ignores prompts, one that ignores timings, one that does not hold the value.
def test_the_interval_is_over_prompts_and_over_timings():
    equal = [trail({(1, 4, True): 5}, (10,), (5,)) for _ in range(6)]
    exact = predict(TIMINGS, equal, [5] * 4, rows=1, width=4)
    assert exact.interval == pytest.approx((exact.speedup, exact.speedup))
    mixed = [trail({(1, 4, True): 5}, (count,), (5,)) for count in (6, 8, 10, 12, 14, 10)]
    found = predict(TIMINGS, mixed, [5] * 4, rows=1, width=4)
    assert found.interval[0] < 0.95 * found.speedup < 1.05 * found.speedup < found.interval[1]
    chance = random.Random(1)
    noisy = [
        Timing(one.rows, one.width, one.draft, one.verify * chance.uniform(0.7, 1.3), one.rest)
        for one in TIMINGS
        for _ in range(5)
    ]
    shaken = predict(noisy, equal, [5] * 4, rows=1, width=4)
    assert shaken.interval[0] < shaken.interval[1]
    assert shaken.interval[0] <= shaken.speedup <= shaken.interval[1]
