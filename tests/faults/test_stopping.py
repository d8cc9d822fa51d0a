"""Stopping: one request, one block of several tokens, and an end somewhere in it."""

import pytest

import specdec
from specdec.errors import RecipeError
from specdec.loading import byte_tokenizer
from tests.faults.kit import COUNTING, NUMBERS, Watched, ask, build, counting, engine, own, registered, serve


# Catches: a block that is committed whole before the stop test, or a stop test on its last token only.
def test_an_eos_inside_an_accepted_block_is_the_last_token():
    one = engine(counting(4), eos=[NUMBERS[2]])
    events = list(one.stream([ask()]))
    done = events[-1].completion
    assert (done.tokens, done.finish_reason) == (NUMBERS[:3], "eos")
    assert sum((event.tokens for event in events), ()) == NUMBERS[:3]


# Catches: a drafter with a commit path of its own; an end that only some of them respect.
@pytest.mark.parametrize("place", [0, 2, 3, 4, 6])
@pytest.mark.parametrize("name", registered())
def test_every_drafter_stops_at_an_eos_wherever_its_block_has_it(name, place):
    drafter = build(name)
    done = serve(drafter, eos=[NUMBERS[place]])
    assert (done.tokens, done.finish_reason) == (NUMBERS[: place + 1], "eos")
    assert done.counters.num_accepted_tokens or drafter.num_speculative_tokens == 0


# Catches: a bonus or a resampled token after an accepted end.
def test_no_bonus_follows_an_eos_that_is_the_last_draft():
    done = serve(counting(4), eos=[NUMBERS[3]])
    assert (done.tokens, done.finish_reason) == (NUMBERS[:4], "eos")
    assert (done.counters.num_steps, done.counters.num_accepted_tokens) == (1, 4)
    assert sum(done.counters.num_per_source.values()) == 0


# Catches: a cap that compares lengths of two different sequences and never binds.
@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_budget_below_the_draft_length_is_met_exactly(budget, k):
    done = serve(counting(k), ask(new=budget))
    assert (done.tokens, done.finish_reason) == (NUMBERS[:budget], "length")


# Catches: a loop that counts iterations, so that the last block overshoots.
@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_budget_counts_tokens_and_not_steps(k):
    for budget in range(4, 12):
        done = serve(counting(k), ask(new=budget))
        assert done.tokens == NUMBERS[:budget]
        assert done.counters.num_steps == -(-budget // (k + 1))


# Catches: a drafter that is called with no room for a draft, or once more after the last token.
def test_no_drafter_is_called_for_the_last_token_or_after_it():
    drafter = Watched(counting(3))
    done = serve(drafter, ask(new=2 * 4 + 1))  # two full blocks, and one token that leaves nothing to draft
    assert done.counters.num_steps == 3
    assert [batch.budget for batch in drafter.asked] == [(3,), (3,)]


# Catches: an option that is swallowed where the drafter has no use for it.
def test_an_option_that_a_drafter_does_not_have_is_an_error():
    with pytest.raises(RecipeError, match="temperature: unknown option of prompt_lookup"):
        specdec.generate("random:llama", prompts=[[1]], drafter={"use": "prompt_lookup", "temperature": 0.5})


def spelled(index):
    return byte_tokenizer().decode([NUMBERS[index]])


# Catches: the length cap tested before stop strings on a step of several tokens.
def test_a_stop_string_beats_a_budget_later_in_the_same_block():
    done = serve(counting(6), ask(new=5, stop_strings=spelled(2)), tokenizer=byte_tokenizer())
    assert (done.tokens, done.finish_reason) == (NUMBERS[:3], "stop_string")


# Catches: only the last few tokens of a long block decoded in search of a stop string.
def test_a_stop_string_early_in_a_long_block_is_seen():
    done = serve(counting(16), ask(new=20, stop_strings=spelled(1) + spelled(2)), tokenizer=byte_tokenizer())
    assert (done.tokens, done.text) == (NUMBERS[:3], spelled(0))
    assert done.counters.num_steps == 1


# Catches: a text that is cut at a stop string while ids or figures by token go on.
def test_ids_text_and_figures_by_token_end_together():
    tokenizer = byte_tokenizer()
    stop = spelled(6) + spelled(7)
    done = serve(counting(4), ask(stop_strings=stop), tokenizer=tokenizer, diagnostics=True)
    assert tokenizer.decode(done.tokens) == done.text + stop
    # Of the eight tokens one is the bonus of the first block; every other was drafted and has one number of each kind.
    assert len(done.tokens) == 8
    assert {len(values) for values in done.diagnostics.values()} == {7}


# Catches: a trim after accounting and rollback: dropped tokens that are counted, or stay in the cache.
def test_what_an_end_cuts_off_is_in_no_counter_and_in_no_cell():
    drafter = counting(4)
    one = engine(drafter, rows=1, eos=[NUMBERS[6]])
    first = one.generate([ask()])[0]
    batch, kept = drafter.observed[-1]
    assert batch.rows[0].cached == len(COUNTING) + len(first.tokens) - 1 == kept.starts[0] + kept.counts[0]
    assert first.counters.num_emitted_tokens == len(first.tokens) == 7
    assert first.counters.num_accepted_tokens == first.counters.num_draft_tokens == 6
    again = one.generate([ask((3, 1, 4), processors=())])[0]
    assert again.tokens == serve(request=ask((3, 1, 4), processors=())).tokens


# Catches: a drafter that does not know the end and drafts past it, with nobody to trim what it drafted.
def test_nothing_behind_an_eos_is_kept_from_a_drafter_that_drafts_past_it():
    drafter = Watched(build("model"))
    done = serve(drafter, eos=[NUMBERS[1]])
    assert drafter.drafts[0].sizes.tolist() == [4]
    assert drafter.drafts[0].tokens[0, :2].tolist() == list(NUMBERS[:2])
    assert done.tokens == NUMBERS[:2]


# Catches: one end-of-sequence id taken of several, or looked for in drafted tokens only.
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("place", "wrong_at", "source"), [(1, None, None), (2, 2, "residual"), (4, None, "bonus")],
    ids=["draft", "replacement", "bonus"],
)  # fmt: skip
def test_any_of_several_eos_ids_ends_it_as_draft_replacement_or_bonus(place, wrong_at, source, first):
    model = own()
    ids = [NUMBERS[place], NUMBERS[place + 3]]
    model.generation_config.eos_token_id = ids if first == 0 else ids[::-1]
    model.config.eos_token_id = ids[1]
    done = serve(counting(4, wrong_at), model=model)
    assert (done.tokens, done.finish_reason) == (NUMBERS[: place + 1], "eos")
    assert done.counters.num_steps == 1
    assert {name for name, count in done.counters.num_per_source.items() if count} == ({source} if source else set())


# Catches: sources of end-of-sequence ids that replace each other.
@pytest.mark.parametrize("source", ["generation config", "config", "tokenizer"])
def test_an_eos_id_of_any_source_ends_it(source):
    model, tokenizer = own(), byte_tokenizer()
    places = dict.fromkeys(("generation config", "config", "tokenizer"), 7) | {source: 2}
    model.generation_config.eos_token_id = NUMBERS[places["generation config"]]
    model.config.eos_token_id = NUMBERS[places["config"]]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(NUMBERS[places["tokenizer"]])
    done = serve(counting(4), model=model, tokenizer=tokenizer)
    assert (done.tokens, done.finish_reason) == (NUMBERS[:3], "eos")
