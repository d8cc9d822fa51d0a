"""Draft lengths from a table of costs, in virtual time: no model, no clock."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve

from specdec.costs import Costs
from specdec.errors import CompatibilityError
from specdec.options import build, values
from specdec.scheduler import Room
from specdec.sequence import Sequence
from specdec.testing import output_law, random_model, token_law
from specdec.types import Draft, Request, Sampling
from specdec.verifier import Verifier
from specdec_plugins.schedulers.adaptive import Adaptive
from specdec_plugins.verifiers.standard import Standard

MOST, PROMPT = 7, 60


def table(draft, token, catch_up=0.0, rows=(1, 4, 8)):
    """A plain step of one row is 1: each level of a draft costs `draft`, each further token of a row `token`."""
    widths = (1, 2, 4, MOST)
    weight = {count: 1 + 0.1 * (count - 1) for count in rows}
    return Costs(
        draft={count: {width: draft * width * weight[count] for width in widths} for count in rows},
        verify={count: {width: weight[count] + token * width * count for width in (0, *widths)} for count in rows},
        rest={},
        catch_up=catch_up,
    )


TABLES = {
    "a slow draft model": table(0.4, 0.03, 0.03),
    "a fast draft model": table(0.1, 0.01, 0.001),
    "a look-up": table(0.001, 0.05),
}


def decode(costs, law, *, rows=1, requests=1, new=200, scheduler=None):
    """Serve requests in virtual time.

    Args:
        law: probability that the next draft token of a row is kept.

    Returns:
        Seconds, those of plain decoding, and for each step the budgets and the tokens that were kept.
    """
    scheduler, chance = scheduler or Adaptive(costs=costs), random.Random(0)
    for index in range(requests):
        request = Request(prompt=(1,) * PROMPT, sampling=Sampling(max_new_tokens=new), id=str(index))
        scheduler.submit(Sequence(request=request, eos_ids=frozenset(), limit=10**6))
    seconds, read, free, steps = 0.0, {}, list(range(rows)), []
    while not scheduler.idle:
        plan = scheduler.plan(Room(len(free), MOST))
        for row in plan.admit:
            row.slot, row.cached = free.pop(), PROMPT - 1
        if plan.prefill:
            continue
        batch = SimpleNamespace(
            rows=tuple(row for row, _ in plan.decode), budget=tuple(most for _, most in plan.decode)
        )
        starts, accepted = tuple(row.cached for row in batch.rows), []
        for row, most in plan.decode:
            kept = 0
            while kept < most and chance.random() < law(row):
                kept += 1
            accepted.append(kept)
        asked = [row for row, most in plan.decode if most]
        seconds += costs.step(len(batch.rows), max(batch.budget), asked=False)
        if asked:
            behind = sum(row.cached - read.get(row.request.id, 0) for row in asked)
            seconds += costs.parts(len(asked), max(batch.budget))[0] + costs.catch_up * behind
        for (row, most), kept in zip(plan.decode, accepted, strict=True):
            for _ in range(kept + 1):
                row.append(1)
            row.cached = len(row.tokens) - 1
            if most:
                read[row.request.id] = row.cached
            if row.finish_reason:
                free.append(row.slot)
        steps.append((batch.budget, tuple(accepted)))
        scheduler.observe(batch, SimpleNamespace(
            tokens=tuple((1,) * (kept + 1) for kept in accepted),
            starts=starts,
            counts=tuple(kept + 1 for kept in accepted),
            drafted=batch.budget,
            examined=tuple(min(most, kept + 1) for kept, most in zip(accepted, batch.budget, strict=True)),
            accepted=tuple(accepted),
            finished=tuple(row.finish_reason for row in batch.rows),
        ))  # fmt: skip
    return seconds, -(-requests // rows) * new * costs.plain(rows), steps


def never(row):
    return 0.0


def always(row):
    return 1.0


# Catches: trials without a bound, a drafter's reading that nobody counts, each request that pays for its own trials.
@pytest.mark.parametrize("costs", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize(("each", "new"), [(8, 48), (1, 600)], ids=["short", "long"])
def test_a_drafter_that_never_agrees_costs_less_than_a_twentieth(costs, rows, each, new):
    seconds, plain, steps = decode(costs, never, rows=rows, requests=each * rows, new=new)
    assert plain < seconds < 1.05 * plain
    asked = [any(budgets) for budgets, _ in steps]
    assert any(asked[len(asked) // 2 :]) or costs.catch_up > 0.02  # never given up, unless reading alone costs more
    assert sum(asked) < 0.5 * len(asked)


# Catches: a length that climbs by one at a time, hopes that stop short of the longest draft.
@pytest.mark.parametrize("costs", TABLES.values(), ids=TABLES)
def test_a_drafter_that_is_always_right_soon_drafts_its_longest(costs):
    seconds, _, steps = decode(costs, always, new=300)
    lengths = [budgets[0] for budgets, _ in steps]
    assert lengths.index(MOST) <= 6
    assert set(lengths[lengths.index(MOST) : -1]) == {MOST}
    best = 300 / (MOST + 1) * (costs.step(1, MOST)) + costs.catch_up * PROMPT
    assert seconds < 1.05 * best + 3 * costs.plain(1)


@pytest.mark.parametrize("rows", [4, 8])
def test_a_drafter_that_is_always_right_drafts_for_all_rows(rows):
    _, _, steps = decode(TABLES["a fast draft model"], always, rows=rows, requests=rows, new=100)
    assert [MOST] * rows in [list(budgets) for budgets, _ in steps[:8]]


# Catches: a length that ignores what steps of so many rows cost.
def test_the_length_follows_the_costs_of_the_batch():
    costs = table(0.01, 0.05)
    found = {}
    for rows in (1, 4, 8):
        _, _, steps = decode(costs, lambda row: 0.8, rows=rows, requests=rows, new=400)
        lengths = [max(budgets) for budgets, _ in steps[20:]]
        found[rows] = sum(lengths) / len(lengths)
    assert found[1] > found[4] + 0.5 > found[8] + 1.0


# Catches: counts that never fade, in either direction.
def test_a_text_that_changes_is_followed():
    costs = table(0.1, 0.01)
    _, _, steps = decode(costs, lambda row: float(row.emitted // 200 % 2), new=1000)
    emitted, lengths = 0, {}
    for (budget,), (kept,) in steps:
        lengths.setdefault(emitted // 100, []).append(budget)
        emitted += kept + 1
    means = {part: sum(found) / len(found) for part, found in lengths.items()}
    assert all(means[part] < 1 for part in (1, 5, 9))  # the second halves of what cannot be foretold
    assert all(means[part] > 0.9 * MOST for part in (3, 7))


# Catches: one length for all rows, or one rate.
def test_each_row_has_a_length_of_its_own():
    costs = evolve(table(0.3, 0.0), verify={4: {0: 1.0, MOST: 1.0}}, draft={1: {1: 0.1, 7: 0.7}, 4: {1: 0.4, 7: 2.8}})
    _, _, steps = decode(costs, lambda row: 0.95 if row.request.id == "0" else 0.05, rows=4, requests=4, new=120)
    together = [budgets for budgets, _ in steps if len(budgets) == 4]
    mean = [sum(row) / len(together) for row in zip(*together, strict=True)]
    assert mean[0] > 2
    assert mean[0] > 2 * max(mean[1:])


# Catches: a clock in the decisions, an order of a set, what one engine learned in another one.
def test_the_same_table_and_texts_give_the_same_drafts(monkeypatch):
    monkeypatch.setattr("time.perf_counter", None)
    found = [decode(TABLES["a slow draft model"], lambda row: 0.7, rows=4, requests=9, new=40) for _ in range(2)]
    assert found[0] == found[1]


# Catches: a drafter that is asked for a few last tokens though it would have to read the whole text first.
def test_reading_is_not_paid_for_a_few_tokens():
    costs = table(0.05, 0.0, catch_up=0.05)
    assert any(any(budgets) for budgets, _ in decode(costs, always, new=60)[2])
    assert not any(any(budgets) for budgets, _ in decode(costs, always, new=3)[2])


# Catches: a drafter asked at the last token of a text, where no draft could be kept.
def test_nothing_is_drafted_where_there_is_no_room():
    assert [budgets for budgets, _ in decode(TABLES["a look-up"], always, new=1)[2]] == [(0,)]


# Catches: a table that a recipe cannot hold, keys that JSON made texts, numbers that are lost on the way.
def test_costs_are_given_as_an_object_as_data_and_by_drafter():
    costs = TABLES["a slow draft model"]
    data = json.loads(json.dumps(costs.to_dict()))
    assert Costs.read(data) == Costs.read(costs.to_dict())
    ways = [Adaptive(costs=costs), Adaptive(costs=data), build(Adaptive, {"costs": {"x": data}}, "scheduler", "y")[0]]
    found = [decode(costs, lambda row: 0.7, new=60, scheduler=scheduler) for scheduler in ways]
    assert found[0] == found[1] == found[2]
    again, problems = build(Adaptive, values(ways[0]), "scheduler", "adaptive")
    assert not problems
    assert values(again) == values(ways[0])


# Catches: costs measured though they are given, those of another drafter taken.
def test_costs_that_are_left_out_are_measured():
    one, other = TABLES["a slow draft model"], TABLES["a look-up"]
    assert Adaptive(costs={"a": one.to_dict()}).price("a", None) == Costs.read(one.to_dict())
    assert Adaptive(costs={"a": one.to_dict()}).price("b", lambda: other) == other
    assert Adaptive(costs=one).price("b", None) == Costs.read(one.to_dict())
    assert Adaptive().price("b", lambda: other) == other
    with pytest.raises(CompatibilityError, match="has costs of 0 drafters"):
        decode(one, never, scheduler=Adaptive())


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (5, "got 5, wanted a mapping"),
        ({"verify": {}}, "wanted seconds by rows and draft tokens, such as {draft: "),
        ({"model": {"x": 1}}, "wanted seconds by rows and draft tokens, such as {draft: "),
        ({"verify": {"1": {"0": "fast"}}}, "wanted seconds by rows and draft tokens, such as {draft: "),
        ({"verify": {"0": {"0": 1}}}, "got verify {0: {0: 1.0}}, wanted rows from 1"),
        ({"verify": {"1": {"0": -1}}}, "got verify {1: {0: -1.0}}, wanted rows from 1"),
        ({"verify": {"2": {"1": 1}}}, "verify: knows no plain step of 2 rows"),
        ({"verify": {"2": {"0": 1, "4": 0}}}, "or steps that take no time; wanted seconds above 0"),
        ({"verify": {"1": {"0": 1}}, "catch_up": -1}, "got catch_up -1.0, wanted seconds from 0"),
    ],
)
def test_a_table_that_is_none_is_one_sentence(costs, message):
    made, problems = build(Adaptive, {"costs": costs}, "scheduler", "adaptive")
    assert made is None
    assert len(problems) == 1
    assert problems[0].startswith("scheduler.costs: ")
    assert message in problems[0]


# Catches: a step of few rows that takes no time, by the line through the steps of many that were measured.
def test_a_table_of_many_rows_is_enough_for_few():
    costs = Costs.read({"draft": {8: {4: 0.02}}, "verify": {4: {0: 0.1}, 8: {0: 0.3, 4: 0.2}}})
    seconds, plain, _ = decode(costs, never, new=100)
    assert 0 < plain < seconds < 1.1 * plain


def trimming():
    """A scheduler in a step that hopes for much, whose verifications are dear."""
    scheduler = Adaptive(costs=table(0.01, 0.3, rows=(1, 2)))
    row = Sequence(request=Request(prompt=(1, 2)), eos_ids=frozenset(), limit=100)
    row.cached = 1
    scheduler.budgets([row], 3)
    return scheduler


def confident(tokens, worth):
    """Drafts whose confidences are what each token is worth, by its place."""
    confidence = torch.stack([worth[place][tokens[:, place]] for place in range(tokens.shape[1])], 1).float()
    return Draft(tokens, torch.full((tokens.shape[0],), tokens.shape[1]), confidence=confidence)


# Catches: confidences that are not looked at, a cut at the token's own confidence, a product that forgets earlier ones.
def test_a_draft_is_cut_behind_a_token_of_little_confidence():
    scheduler = trimming()

    def sizes(*confidence, count=3):
        tokens = torch.zeros((1, 3), dtype=torch.int64)
        return scheduler.trim(Draft(tokens, torch.tensor([count]), confidence=torch.tensor([confidence]))).tolist()

    assert sizes(1.0, 1.0, 0.0) == [3]
    assert sizes(1.0, 0.01, 1.0) == [2]
    assert sizes(0.01, 1.0, 1.0) == [1]
    assert sizes(0.7, 0.7, 1.0) == [2]
    assert sizes(1.0, 1.0, 1.0, count=2) == [2]
    plain = Draft(torch.zeros((1, 3), dtype=torch.int64), torch.tensor([3]))
    assert scheduler.trim(plain).tolist() == [3]


class Cut(Verifier):
    """The standard rule over drafts that were cut, each beside the same other row."""

    family, exactness, needs = "lossless", "lossless", frozenset()

    def __init__(self, cut):
        self.cut, self.known = cut, {}

    def verify(self, draft, scores, noise, memory):
        sizes = [self._size(tuple(tokens)) for tokens in draft.tokens.tolist()]
        return Standard().verify(evolve(draft, sizes=torch.tensor(sizes)), scores, noise, memory)

    def _size(self, tokens):
        if tokens not in self.known:
            self.known[tokens] = int(self.cut(torch.tensor([tokens])))
        return self.known[tokens]


V, NODES = 3, 3
WORTH = torch.tensor([[0.02, 0.9, 0.5], [0.9, 0.02, 0.6], [0.3, 0.9, 0.9]])


def laws_apart(cut):
    """How far the law of what is emitted is from the target's, in total variation, by enumeration."""
    p, q = random_model(V, NODES + 2, 1), random_model(V, NODES, 2)
    found = output_law(Cut(cut), p, q, tuple(range(-1, NODES - 1)), NODES + 1)
    return float((found - token_law(p, NODES + 1)).abs().sum() / 2)


# Catches: a cut that depends on the token it cuts, in its own row or by way of the other rows of the batch.
@pytest.mark.parametrize("mate", [None, (0, 0, 0), (1, 1, 1), (1, 0, 1), (2, 2, 1)])
def test_cut_drafts_leave_the_law_of_the_output_as_it_is(mate):
    scheduler, seen = trimming(), set()

    def cut(tokens):
        both = tokens if mate is None else torch.cat([tokens, torch.tensor([mate])])
        size = int(scheduler.trim(confident(both, WORTH))[0])
        seen.add(size)
        return size

    assert laws_apart(cut) < 1e-9
    assert len(seen) > 1 or mate


# Catches: an enumeration that would pass whatever is cut.
def test_a_cut_by_a_token_s_own_confidence_is_seen():
    def own(tokens):
        kept = (confident(tokens, WORTH).confidence[0] > 0.1).long()
        return kept.cumprod(0).sum()

    assert laws_apart(own) > 0.01
