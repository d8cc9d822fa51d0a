import pytest
import torch
from torch import Tensor

from specdec.loading import byte_tokenizer
from specdec.metrics import Counters
from specdec.sequence import Sequence, make_batch
from specdec.settle import draw, settle
from specdec.text import TextStream
from specdec.types import SOURCES, Draft, Extras, Kept, Request, Sampling, Scores, Verdict

SIZE = 272
BLOCK = [10, 11, 12, 13]  # four kept draft tokens; 20 follows
NEXT = 20


def sequence(
    *, prompt: tuple[int, ...] = (1, 2, 3), eos: tuple[int, ...] = (), limit: int = 100, **sampling
) -> Sequence:
    row = Sequence(Request(prompt=prompt, sampling=Sampling(**sampling)), frozenset(eos), limit)
    row.slot, row.cached = 0, len(prompt) - 1
    return row


def step(
    rows: list[Sequence],
    *,
    tokens: list[list[int]] | None = None,
    path: list[list[int]] | None = None,
    following: list[int] | None = None,
    finite: list[bool] | None = None,
    extras: Extras | None = None,
    taps: dict[int, Tensor] | None = None,
) -> Kept:
    """One settled step: per row the drafted tokens, the kept path and the token that follows."""
    count = len(rows)
    tokens = tokens or [BLOCK] * count
    path = path if path is not None else [list(range(len(row))) for row in tokens]
    nodes = max(len(row) for row in tokens)
    for slot, row in enumerate(rows):
        row.slot = slot
    batch = make_batch([(row, nodes) for row in rows])
    padded = torch.tensor([row + [0] * (nodes - len(row)) for row in tokens]).reshape(count, nodes)
    width = max([1, *map(len, path)])
    verdict = Verdict(
        path=torch.tensor([row + [0] * (width - len(row)) for row in path]),
        lengths=torch.tensor([len(row) for row in path]),
        next_probs=torch.nn.functional.one_hot(torch.tensor(following or [NEXT] * count), SIZE).double(),
        source=torch.tensor(
            [0 if len(p) == len(t) else 1 for p, t in zip(path, tokens, strict=True)], dtype=torch.int8
        ),
        memory=torch.arange(count, dtype=torch.float64).unsqueeze(1),
    )
    scores = Scores(
        tokens=torch.cat([batch.pending.unsqueeze(1), padded], 1),
        logits=torch.zeros((count, nodes + 1, SIZE)),
        probs=torch.zeros((count, nodes + 1, SIZE)),
        hidden=taps or {},
        finite=torch.tensor(finite or [True] * count),
    )
    draft = Draft(padded, torch.tensor([len(row) for row in tokens]))
    return settle(batch, draft, scores, verdict, draw(verdict, batch.noise), torch.arange(count), extras)


def consistent(kept: Kept, rows: list[Sequence]) -> None:
    """Every field speaks of the same tokens."""
    for index, row in enumerate(rows):
        emitted = list(kept.tokens[index])
        assert kept.counts[index] == len(emitted)
        assert row.tokens[len(row.tokens) - len(emitted) :] == emitted
        count = len(emitted)
        assert kept.next_inputs[index, :count].tolist() == emitted
        known = row.tokens[: len(row.tokens) - count]
        if count:
            assert kept.inputs[index, :count].tolist() == [known[-1], *emitted[:-1]]
            assert kept.offsets[index, 0] == 0
        line = kept.offsets[index, :count].tolist()
        assert line == sorted(set(line))
        assert kept.finished[index] == row.finish_reason


def test_a_whole_block_and_the_token_after_it_become_known():
    # Catches a missing pending cell, and a cell for the last token, which is not computed yet.
    row = sequence()
    kept = step([row])
    assert row.tokens == [1, 2, 3, *BLOCK, NEXT]
    assert kept.tokens == ((*BLOCK, NEXT),)
    assert kept.counts == (5,)
    assert kept.offsets.tolist() == [[0, 1, 2, 3, 4]]
    assert kept.inputs.tolist() == [[3, *BLOCK]]
    assert kept.next_inputs.tolist() == [[*BLOCK, NEXT]]
    assert kept.chain
    assert (kept.starts, kept.drafted, kept.accepted, kept.finished) == ((2,), (4,), (4,), (None,))
    assert row.step == 1
    consistent(kept, [row])


def test_a_rejected_tail_is_dropped():
    row = sequence()
    kept = step([row], path=[[0]])
    assert kept.tokens == ((10, NEXT),)
    assert kept.sources == ("residual",)
    assert kept.counts == (2,)
    assert kept.offsets.tolist() == [[0, 1]]
    consistent(kept, [row])


def test_nothing_kept_still_emits_one_token():
    row = sequence()
    kept = step([row], path=[[]])
    assert (kept.tokens, kept.counts, kept.accepted, kept.chain) == (((NEXT,),), (1,), (0,), True)
    consistent(kept, [row])


def test_a_path_through_a_tree_names_its_cells():
    # Nodes 1 and 3 of four: cells 0, 2, 4, which have to move. Catches node numbers taken for cell numbers.
    row = sequence()
    kept = step([row], path=[[1, 3]])
    assert kept.tokens == ((11, 13, NEXT),)
    assert kept.offsets.tolist() == [[0, 2, 4]]
    assert not kept.chain
    consistent(kept, [row])


def test_ragged_rows_do_not_mix():
    # Different drafts, paths and budgets in one step; each row equals itself alone.
    options = [
        ({}, [10, 11], [0, 1], 20),
        ({"max_new_tokens": 2}, [12, 13, 14], [0, 1, 2], 21),
        ({}, [], [], 22),
        ({}, [15, 16, 17, 18], [0], 23),
    ]
    rows = [sequence(prompt=(1,) * (index + 1), **option[0]) for index, option in enumerate(options)]
    kept = step(
        rows,
        tokens=[option[1] for option in options],
        path=[option[2] for option in options],
        following=[option[3] for option in options],
    )
    consistent(kept, rows)
    assert kept.tokens == ((10, 11, 20), (12, 13), (22,), (15, 23))
    assert kept.finished == (None, "length", None, None)
    assert kept.starts == (0, 1, 2, 3)
    assert kept.drafted == (2, 3, 0, 4)
    assert kept.clipped == (0, 1, 2, 3)
    assert kept.accepted == (2, 3, 0, 1)
    assert kept.memory.tolist() == [[0.0], [1.0], [2.0], [3.0]]


# Stops: each inside a block, at its end, and just after it.

PLACES = [0, 1, 3, 4]  # index into the five tokens of a step; 3 is the end of the draft, 4 the token after it


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["eos", "stop id", "budget", "context"])
def test_the_token_that_stops_is_the_last_one_known(kind, place):
    # Catches tokens of the block that are appended after the stop, and a stop that is seen one token late.
    tokens = [*BLOCK, NEXT]
    options = {
        "eos": {"eos": (tokens[place], 99)},
        "stop id": {"stop_ids": (tokens[place],)},
        "budget": {"max_new_tokens": place + 1},
        "context": {"limit": 3 + place + 1},
    }[kind]
    row = sequence(**options)
    kept = step([row])
    assert kept.tokens == (tuple(tokens[: place + 1]),)
    assert kept.finished == ({"eos": "eos", "stop id": "eos", "budget": "length", "context": "context"}[kind],)
    assert row.output == tokens[: place + 1]
    assert kept.counts == (place + 1,)
    assert kept.offsets.tolist() == [list(range(place + 1))]
    consistent(kept, [row])


@pytest.mark.parametrize("place", PLACES)
def test_a_stop_string_stops_at_the_token_that_completes_it(place):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("abcdE", add_special_tokens=False)
    stop = "abcdE"[max(place - 1, 0) : place + 1]
    row = sequence(stop_strings=(stop,))
    row.text = TextStream(tokenizer, (stop,))
    kept = step([row], tokens=[ids[:4]], following=[ids[4]])
    assert kept.tokens == (tuple(ids[: place + 1]),)
    assert kept.finished == ("stop_string",)
    assert row.text.text == "abcdE"[: max(place - 1, 0)]
    consistent(kept, [row])


@pytest.mark.parametrize(
    ("options", "length", "reason"),
    [
        ({"eos": (12,), "stop_ids": (11,)}, 2, "eos"),
        ({"eos": (13,), "max_new_tokens": 2}, 2, "length"),
        ({"eos": (11,), "max_new_tokens": 3}, 2, "eos"),
        ({"max_new_tokens": 4, "limit": 5}, 2, "context"),
        # On the very same token the end of the text counts before the budget, the budget before the context.
        ({"eos": (12,), "max_new_tokens": 3, "limit": 6}, 3, "eos"),
        ({"max_new_tokens": 3, "limit": 6}, 3, "length"),
    ],
)
def test_the_earliest_stop_wins(options, length, reason):
    row = sequence(**options)
    kept = step([row])
    assert (len(kept.tokens[0]), kept.finished) == (length, (reason,))
    consistent(kept, [row])


def test_a_row_that_is_not_finite_keeps_nothing_and_the_others_go_on():
    # Catches a token drawn from NaN, and a neighbour that is lost with the row.
    rows = [sequence(), sequence(), sequence()]
    kept = step(rows, finite=[True, False, True])
    assert kept.finished == (None, "error", None)
    assert kept.tokens[1] == ()
    assert kept.counts == (5, 0, 5)
    assert rows[1].tokens == [1, 2, 3]
    assert kept.sources == ("bonus", None, "bonus")
    consistent(kept, rows)


def test_steps_advance_by_one_whatever_was_kept():
    # The key of the next noise: a row that emitted five tokens has done one step.
    rows = [sequence(), sequence(), sequence()]
    step(rows, path=[[0, 1, 2, 3], [], [0]], finite=[True, True, False])
    assert [row.step for row in rows] == [1, 1, 1]


def test_features_are_those_of_the_kept_cells():
    # Catches features of rejected nodes, and features shifted by one.
    taps = {-1: torch.arange(10.0).view(2, 5, 1)}
    rows = [sequence(), sequence()]
    kept = step(rows, path=[[1, 3], [0]], taps=taps)
    assert kept.hidden[-1][0, :, 0].tolist() == [0.0, 2.0, 4.0]
    assert kept.hidden[-1][1, :2, 0].tolist() == [5.0, 6.0]


def test_extras_come_back_per_place_under_their_names():
    # Catches blocks that are shifted, numbers of places that were not examined, and of tokens that a stop cut off.
    block = torch.arange(9.0, dtype=torch.float64).view(3, 3)
    extras = Extras({"p": block, "rank": 10 + block}, {"target": 20 + block})
    rows = [sequence(), sequence(), sequence(stop_ids=[BLOCK[0]])]
    kept = step(rows, path=[[0], [0, 1], [0, 1]], extras=extras)
    assert kept.diagnostics == {
        "p": ((0.0, 1.0), (3.0, 4.0, 5.0), (6.0,)),
        "rank": ((10.0, 11.0), (13.0, 14.0, 15.0), (16.0,)),
    }
    assert kept.logprobs == {"target": ((20.0, 21.0), (23.0, 24.0, 25.0), (26.0,))}
    assert kept.examined == (2, 3, 3)
    assert step([sequence()]).diagnostics == step([sequence()]).logprobs == {}


# Catches: numbers of a row whose scores are not finite.
def test_a_row_that_failed_has_no_numbers():
    extras = Extras({"p": torch.ones((1, 3)).double()}, {"target": torch.ones((1, 3)).double()})
    kept = step([sequence()], path=[[0, 1]], finite=[False], extras=extras)
    assert (kept.diagnostics, kept.logprobs) == ({"p": ((),)}, {"target": ((),)})


def test_large_ids_survive_the_copy_to_the_host():
    # Ids travel as floating-point numbers: float32 would round those above 2^24.
    row = sequence()
    kept = step([row], tokens=[[2**24 + 1, 2**31 + 3]])
    assert kept.tokens == ((2**24 + 1, 2**31 + 3, NEXT),)


@pytest.mark.parametrize("source", range(len(SOURCES)))
def test_sources_are_named(source):
    row = sequence()
    row.slot = 0
    batch = make_batch([(row, 0)])
    law = torch.nn.functional.one_hot(torch.tensor([NEXT]), SIZE).double()
    verdict = Verdict(torch.zeros((1, 0)).long(), torch.zeros(1).long(), law, torch.tensor([source], dtype=torch.int8))
    empty = torch.zeros((1, 1, SIZE))
    scores = Scores(batch.pending.unsqueeze(1), empty, empty, {}, torch.ones(1, dtype=torch.bool))
    draft = Draft(torch.zeros((1, 0)).long(), torch.zeros(1).long())
    kept = settle(batch, draft, scores, verdict, torch.tensor([NEXT]), torch.zeros(1).long(), None)
    assert kept.sources == (SOURCES[source],)
    assert kept.tokens == ((NEXT,),)


def test_room_leaves_a_place_for_the_token_after_the_draft():
    # Budget and context both count; catches a draft of which the last token could never be kept.
    row = sequence(max_new_tokens=4, limit=100)
    assert row.room == 3
    row = sequence(max_new_tokens=40, limit=5)
    assert row.room == 1
    row = sequence(max_new_tokens=1)
    assert row.room == 0
    step([row])
    assert row.room == 0
    assert row.finish_reason == "length"


# Catches: a place counted below a leaf, where nothing was drafted, because another branch of the tree is deeper.
def test_places_are_counted_where_the_rule_looked():
    rows = [sequence() for _ in range(3)]
    for slot, row in enumerate(rows):
        row.slot = slot
    batch = make_batch([(row, 3) for row in rows])
    tokens = torch.tensor([[10, 11, 12]] * 3)
    # Two children of the pending token, and one below the first of them: kept are the second, the first, none.
    draft = Draft(tokens, torch.tensor([3, 3, 3]), torch.tensor([[-1, -1, 0]] * 3))
    law = torch.nn.functional.one_hot(torch.tensor([NEXT] * 3), SIZE).double()
    lengths = torch.tensor([1, 1, 0])
    verdict = Verdict(torch.tensor([[1], [0], [0]]), lengths, law, torch.zeros(3, dtype=torch.int8))
    empty = torch.zeros((3, 4, SIZE))
    scores = Scores(torch.cat([batch.pending.unsqueeze(1), tokens], 1), empty, empty, {}, torch.ones(3) > 0)
    kept = settle(batch, draft, scores, verdict, torch.tensor([NEXT] * 3), lengths * 0, None)
    assert kept.examined == (1, 2, 1)
    counters = Counters()
    counters.count(kept, 0)
    assert (counters.num_examined_per_pos, counters.num_accepted_tokens_per_pos) == ([1], [1])
