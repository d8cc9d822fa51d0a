"""Where a request ends: the earliest of eos, stop string, budget and context wins, wherever a block puts it.

A token that the model really produces is declared to be the end, so any boundary of a block can be hit exactly. With an
oracle that drafts K = 4 right tokens, blocks are outputs 0-4, 5-9, 10-14, the last of each being the bonus.
"""

import functools

import pytest
import torch
from transformers import LogitsProcessor

from specdec import Engine, Request, Sampling, Target
from specdec.errors import RequestError
from specdec.loading import byte_tokenizer
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.drafters.none import NoDraft
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.standard import Standard
from tests.families import tiny
from tests.scripted import Scripted, oracle

K, LONG = 4, 14
PLACES = {"inside a block": 6, "last draft of a block": 8, "bonus": 9, "first of a block": 5, "first of all": 0}


class Printable(LogitsProcessor):
    """Only ids of visible ASCII in the byte tokenizer, and never one twice: every token is a recognisable end."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 64:] = float("-inf")
        scores.scatter_(1, input_ids.clamp(max=63), float("-inf"))
        return scores


PROMPT = (70, 71, 72, 73)  # ids the processor never lets through


def run(drafter, sampling, *, positions=96, eos=(), rows=1, extra=()):
    model = tiny("llama", positions=positions)
    target = Target(model, byte_tokenizer(), kv=Slab(rows=rows, tokens=64))
    target.eos_ids = frozenset(eos)
    engine = Engine(target, drafter, Standard(), Continuous())
    request = Request(prompt=PROMPT, sampling=sampling, processors=(Printable(),), id="stops")
    events = [event for event in engine.stream([request, *extra]) if event.id == "stops"]
    return events, events[-1].completion, engine


@functools.cache
def plain():
    _, completion, _ = run(NoDraft(), Sampling(temperature=0, max_new_tokens=LONG))
    assert len(set(completion.tokens)) == LONG
    return completion


def drafters():
    tokens = plain().tokens
    return {
        "oracle": Scripted(script=oracle((tokens,), (PROMPT,), K), num_speculative_tokens=K),
        "half right": Scripted(script=oracle((tokens,), (PROMPT,), K, wrong_at=2), num_speculative_tokens=K),
        "self": DraftModel(model=tiny("llama"), num_speculative_tokens=K),
        "none": NoDraft(),
    }


# Catches: a whole block committed before the stop test; stops tested on the last token only; a bonus after an accepted
# end; text cut where ids are not; counters and cache lengths that count what was dropped.
@pytest.mark.parametrize("drafter", ["oracle", "half right", pytest.param("self", marks=pytest.mark.full), "none"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["eos", "several eos", "stop id", "stop string", "budget", "context"])
def test_the_end_is_exact_wherever_it_lies_in_a_block(kind, place, drafter):
    whole, index = plain(), PLACES[place]
    token = whole.tokens[index]
    letter = whole.text[index]
    sampling, reason, eos, positions, text = {"temperature": 0, "max_new_tokens": LONG}, "eos", (), 96, index + 1
    if kind == "eos":
        eos = (token,)
    elif kind == "several eos":
        eos = (whole.tokens[index + 1], token, 79)
    elif kind == "stop id":
        sampling["stop_ids"] = [token]
    elif kind == "stop string":
        sampling["stop_strings"] = [letter]
        reason, text = "stop_string", index
    elif kind == "budget":
        sampling["max_new_tokens"] = index + 1
        reason = "length"
    else:
        positions = len(PROMPT) + index + 1
        reason = "context"
    source = drafters()[drafter]
    other = Request(prompt=(1, 2), sampling=Sampling(temperature=0, max_new_tokens=3), id="mate")
    events, completion, engine = run(source, Sampling(**sampling), positions=positions, eos=eos, rows=2, extra=[other])
    assert completion.finish_reason == reason
    assert completion.tokens == whole.tokens[: index + 1]
    assert completion.text == whole.text[:text]
    assert "".join(event.text for event in events) == completion.text
    assert sum((event.tokens for event in events), ()) == completion.tokens
    counters = completion.counters
    assert counters.num_emitted_tokens == index + 1
    assert sum(length * count for length, count in counters.num_per_length.items()) == index + 1
    assert 0 <= counters.num_accepted_tokens <= counters.num_draft_tokens
    if drafter in ("oracle", "self"):
        assert counters.num_accepted_tokens == counters.num_draft_tokens
        assert counters.num_steps == index // (K + 1) + 1
    assert engine.target.kv.room == 2


# Catches: a kept length that lets cells of dropped tokens survive, or commits the end twice.
@pytest.mark.parametrize("place", PLACES)
def test_cells_are_committed_for_kept_tokens_only(place):
    whole, index = plain(), PLACES[place]
    source = drafters()["oracle"]
    run(source, Sampling(temperature=0, max_new_tokens=LONG, stop_ids=[whole.tokens[index]]))
    batch, kept = source.observed[-1]
    assert kept.finished == ("eos",)
    assert kept.starts[0] + kept.counts[0] == len(PROMPT) + index
    assert batch.rows[0].cached == len(batch.rows[0].tokens) - 1
    assert not source.proposed[-1] or len(source.proposed) == index // (K + 1) + 1


ORDER = {"eos": 0, "stop_string": 1, "length": 2, "context": 3}


# Catches: the budget tested before stops on a step of several tokens; a later reason that overwrites an earlier one.
@pytest.mark.parametrize(
    "first", [pytest.param(1, marks=pytest.mark.full), 5, pytest.param(7, marks=pytest.mark.full), 9]
)
@pytest.mark.parametrize("pair", [(a, b) for a in ORDER for b in ORDER if a != b])
@pytest.mark.parametrize("gap", [0, 1])
def test_the_earliest_of_two_ends_wins(pair, first, gap):
    whole = plain()
    places = dict(zip(pair, (first, first + gap), strict=True))
    sampling, eos, positions = {"temperature": 0, "max_new_tokens": LONG}, (), 96
    if "eos" in places:
        eos = (whole.tokens[places["eos"]],)
    if "stop_string" in places:
        sampling["stop_strings"] = [whole.text[places["stop_string"]]]
    if "length" in places:
        sampling["max_new_tokens"] = places["length"] + 1
    if "context" in places:
        positions = len(PROMPT) + places["context"] + 1
    _, completion, _ = run(drafters()["oracle"], Sampling(**sampling), eos=eos, positions=positions)
    winner = pair[0] if gap else min(pair, key=ORDER.__getitem__)
    assert completion.finish_reason == winner
    assert completion.tokens == whole.tokens[: first + 1]


# Catches: a stop string found only when it ends at a block's last token, or looked for in one token at a time.
@pytest.mark.parametrize("start", range(8))
def test_a_stop_string_of_several_tokens_is_found_across_blocks(start):
    whole = plain()
    stop = whole.text[start : start + 3]
    _, completion, _ = run(
        drafters()["oracle"], Sampling(temperature=0, max_new_tokens=LONG, stop_strings=[stop, "\n"])
    )
    assert (completion.text, completion.tokens) == (whole.text[:start], whole.tokens[: start + 3])


# Catches: a cap that compares lengths of different sequences and never binds; a draft longer than what is left.
@pytest.mark.parametrize("budget", range(1, 12))
@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_budget_is_met_exactly_and_no_draft_is_wider_than_what_is_left(k, budget):
    tokens = plain().tokens
    source = Scripted(script=oracle((tokens,), (PROMPT,), k), num_speculative_tokens=k)
    _, completion, _ = run(source, Sampling(temperature=0, max_new_tokens=budget))
    assert completion.tokens == tokens[:budget]
    assert completion.counters.num_clipped == 0
    assert completion.counters.num_accepted_tokens == completion.counters.num_draft_tokens


# Catches: min_new_tokens or ignore_eos applied per step instead of per token.
@pytest.mark.parametrize("minimum", [0, 3, 7, 8, 11])
def test_min_new_tokens_holds_the_end_back_token_by_token(minimum):
    whole = plain()
    eos = whole.tokens[6]
    sampling = Sampling(temperature=0, max_new_tokens=LONG, min_new_tokens=minimum)
    _, speculative, _ = run(drafters()["self"], sampling, eos=(eos,))
    _, alone, _ = run(NoDraft(), sampling, eos=(eos,))
    assert speculative.tokens == alone.tokens
    assert (len(alone.tokens) == 7) == (minimum <= 6)
    assert eos not in alone.tokens[:minimum]


def test_ignored_eos_is_an_ordinary_token():
    whole = plain()
    sampling = Sampling(temperature=0, max_new_tokens=LONG, ignore_eos=True)
    _, completion, _ = run(drafters()["oracle"], sampling, eos=whole.tokens)
    assert (completion.tokens, completion.finish_reason) == (whole.tokens, "length")


# Catches: requests that fail in the middle of decoding instead of at submit, or leave the others queued.
@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request(prompt=()), "the prompt is empty"),
        (Request(prompt=(80,)), "outside the vocabulary of 80"),
        (Request(prompt=(1,) * 96), "no room in a context of 96"),
        (Request(prompt=(1,) * 60, sampling=Sampling(max_new_tokens=10)), "set kv.tokens to 70"),
        (Request(prompt=(1,), sampling=Sampling(stop_strings="x", max_new_tokens=4)), "need a tokenizer"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_anything_runs(request_, said):
    target = Target(tiny("llama"), kv=Slab(rows=1, tokens=64))
    engine = Engine(target, NoDraft(), Standard(), Continuous())
    good = Request(prompt=(1,), sampling=Sampling(max_new_tokens=2))
    with pytest.raises(RequestError, match=said):
        engine.generate([good, request_])
    assert engine.scheduler.idle
    assert len(engine.generate([good])[0].tokens) == 2


# Catches: history that is one token short or counts the last one twice; processors that see rejected drafts.
def test_a_processor_sees_exactly_the_tokens_before_each_position():
    class History(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[0, (int(input_ids.sum()) * 31 + input_ids.shape[1] * 7) % 64] += 60.0
            return scores

    outputs = []
    for source in (NoDraft(), DraftModel(model=tiny("llama", seed=1), num_speculative_tokens=3)):
        target = Target(tiny("llama"), kv=Slab(rows=1, tokens=64))
        request = Request(
            prompt=(3, 1, 4), sampling=Sampling(temperature=0, max_new_tokens=20), processors=(History(),)
        )
        outputs.append(Engine(target, source, Standard(), Continuous()).generate([request])[0])
    assert outputs[0].tokens == outputs[1].tokens
    assert outputs[1].counters.acceptance_rate == 1.0  # the draft model's chain sees the same prefixes


# Catches: any of transformers' processors that is rebuilt, skipped or fed another prefix on verify positions.
@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.7}, {"min_new_tokens": 9}, {"repetition_penalty": 0.6, "min_new_tokens": 3}]
)
def test_penalties_give_what_generate_gives(options):
    model = tiny("llama")
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    eos = 42
    wanted = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=20,
        eos_token_id=eos,
        pad_token_id=0,
        **options,
    )[0, 5:].tolist()
    target = Target(model, kv=Slab(rows=1, tokens=64))
    target.eos_ids = frozenset({eos})
    source = DraftModel(model=tiny("llama", seed=1), num_speculative_tokens=3)
    engine = Engine(target, source, Standard(), Continuous())
    found = engine.generate(
        [Request(prompt=ids[0].tolist(), sampling=Sampling(temperature=0, max_new_tokens=20, **options))]
    )
    assert list(found[0].tokens) == wanted
