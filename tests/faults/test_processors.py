"""Logits processors, penalties and grammars: every position sees the tokens before it, and each token counts once."""

import itertools
import math

import pytest
import torch
import transformers
from transformers import LogitsProcessor

from specdec.processing import laws
from specdec.sequence import Sequence
from tests.families import tiny
from tests.faults.kit import (
    COUNTING,
    NUMBERS,
    CountUp,
    ask,
    build,
    counting,
    engine,
    generate,
    in_turn,
    registered,
    serve,
)
from tests.scripted import Scripted, oracle

TEXT = (3, 1, 4, 1, 5)
DRAFTERS = registered(drafting=True)


def right(text, tokens, k=4, wrong_at=None):
    """An oracle of a known output."""
    return Scripted(script=oracle((tokens,), (text,), k, wrong_at=wrong_at), num_speculative_tokens=k)


# Catches: penalties that the verification leaves out, at all positions or at all but the first.
@pytest.mark.parametrize("wrong_at", [None, 0, 2])
def test_a_repetition_penalty_holds_at_every_verified_position(wrong_at):
    model = tiny("llama")
    wanted, without = generate(model, TEXT, 24, repetition_penalty=1.5), generate(model, TEXT, 24)
    assert wanted != without
    for drafter in (right(TEXT, wanted, wrong_at=wrong_at), right(TEXT, without)):
        assert serve(drafter, ask(TEXT, new=24, repetition_penalty=1.5)).tokens == wanted


class Frequency(LogitsProcessor):
    """Takes one off for each time a token has come already."""

    def __call__(self, input_ids, scores):
        return scores - torch.nn.functional.one_hot(input_ids, scores.shape[1]).sum(1).to(scores.dtype)


# Catches: a history that overlaps by one, so that the last token counts twice from the second position on.
def test_each_token_of_the_history_counts_once_at_every_position():
    request = ask((1, 1, 2), temperature=1.0, processors=(Frequency(),))
    row = Sequence(request=request, eos_ids=frozenset(), limit=99)
    row.append(3)
    probs = laws(torch.zeros((1, 4, 6)), (row,), torch.tensor([[3, 2, 1]]))
    by_hand = [[0, 2, 1, 1, 0, 0], [0, 2, 1, 2, 0, 0], [0, 2, 2, 2, 0, 0], [0, 3, 2, 2, 0, 0]]
    torch.testing.assert_close(probs[0], (-torch.tensor(by_hand, dtype=torch.float32)).softmax(-1))


class CountUpUnless(CountUp):
    """Counts up, but takes one token before all others wherever it may."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores):
        counted = super().__call__(input_ids, scores)
        counted[:, self.token] = scores[:, self.token] + 1000.0
        return counted


# Catches: the minimum counted once a step, which holds the end back several times too long.
@pytest.mark.parametrize("minimum", [0, 4, 7])
@pytest.mark.parametrize("name", registered())
def test_min_new_tokens_is_counted_per_token(name, minimum):
    request = ask(COUNTING, processors=(CountUpUnless(70),), min_new_tokens=minimum)
    done = serve(build(name), request, eos=[70])
    assert len(done.tokens) == minimum + 1
    assert (done.tokens[-1], done.finish_reason) == (70, "eos")


# Catches: a drafter whose path goes around the shared chain of processors.
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_obeys_penalties_and_drafts_with_them(name, temperature):
    penalty = {"repetition_penalty": 1.5, "temperature": temperature, "new": 24}
    if temperature == 0:
        assert serve(build(name), ask(TEXT, **penalty)).tokens == generate(
            tiny("llama"), TEXT, 24, repetition_penalty=1.5
        )
    done = serve(build(name), ask(temperature=temperature))
    assert done.tokens == NUMBERS[:12]
    assert done.counters.acceptance_rate == 1.0


class Matcher(LogitsProcessor):
    """Keeps a state as a grammar does: it advances by tokens and goes back to the common prefix. Every third different
    token so far, counted with its repeats, decides what is allowed next.
    """

    def __init__(self):
        self.seen, self.sums, self.calls = [], [0], 0

    def __deepcopy__(self, memory):
        raise AssertionError("a processor was copied")

    def __call__(self, input_ids, scores):
        ids, same = input_ids[0].tolist(), 0
        while same < min(len(ids), len(self.seen)) and ids[same] == self.seen[same]:
            same += 1
        del self.seen[same:], self.sums[same + 1 :]
        for token in ids[same:]:
            self.seen.append(token)
            self.sums.append(self.sums[-1] * 3 + token)
        self.calls += 1
        allowed = torch.full_like(scores, -math.inf)
        allowed[:, self.sums[-1] % 3 :: 3] = 0.0
        return scores + allowed


# Catches: copies of a processor that share part of its state, rejected drafts that it counts, accepted ones twice.
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_processor_with_a_state_of_its_prefix_is_called_as_it_is_and_gives_what_it_gives_alone(temperature):
    options = {"temperature": temperature, "new": 24, "seed": 5}
    plain = serve(request=ask(TEXT, processors=(Matcher(),), **options)).tokens
    matcher = Matcher()
    done = serve(build("layer_skip"), ask(TEXT, processors=(matcher,), **options))
    assert matcher.calls > 24
    for place in range(24):
        sums = [0]
        for token in (*TEXT, *done.tokens[:place]):
            sums.append(sums[-1] * 3 + token)
        assert done.tokens[place] % 3 == sums[-1] % 3
    assert temperature or done.tokens == plain
    assert 0 < done.counters.num_accepted_tokens < done.counters.num_draft_tokens


# Catches: a prompt's end and decoding that take different paths, so that a penalty holds for the first token only.
@pytest.mark.parametrize("prompt", [(3, 1), (3, 3), (7,)])
def test_a_penalty_holds_from_the_first_token_to_the_last(prompt):
    wanted = generate(tiny("llama"), prompt, 16, repetition_penalty=2.0)
    assert len(set(prompt + wanted)) > len(set(prompt + generate(tiny("llama"), prompt, 16)))
    assert serve(build("model"), ask(prompt, new=16, repetition_penalty=2.0)).tokens == wanted


class EvenThenEven(LogitsProcessor):
    """After an even token no odd one."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[input_ids[:, -1] % 2 == 0, 1::2] = -math.inf
        return scores


# Catches: one mask for all positions of a step.
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_mask_by_the_token_before_is_right_at_every_position(temperature, seed):
    free = generate(tiny("llama"), (5 + seed, 7), 24)
    request = ask((5 + seed, 7), temperature=temperature, seed=seed, new=24, processors=(EvenThenEven(),))
    for drafter in (right((5 + seed, 7), free), build("model")):
        done = serve(drafter, request)
        known = (request.prompt[-1], *done.tokens)
        assert not [pair for pair in itertools.pairwise(known) if pair[0] % 2 == 0 and pair[1] % 2]
        assert temperature or done.tokens == serve(request=request).tokens


class Grammar(LogitsProcessor):
    """Even tokens until an odd one, then odd ones; a text that it forbids is an error, or has no next token at all."""

    def __init__(self, prompt, fails):
        self.prompt, self.fails = prompt, fails

    def __call__(self, input_ids, scores):
        kinds = [token % 2 for token in input_ids[0, self.prompt :].tolist()]
        if kinds != sorted(kinds):
            if self.fails:
                raise AssertionError("the matcher was moved by a token it forbids")
            return torch.full_like(scores, -math.inf)
        scores = scores.clone()
        scores[:, 1:2] = -math.inf
        if kinds and kinds[-1]:
            scores[:, ::2] = -math.inf
        return scores


# Catches: a matcher that is asked behind a draft it forbids, by a drafter that knows no grammar.
@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("temperature", [0, 1])
def test_no_mask_is_asked_for_behind_a_draft_that_it_forbids(temperature, fails):
    def mixed(tokens, budget):
        return [2, 3, 4, 5][:budget]

    request = ask(TEXT, temperature=temperature, new=24, processors=(Grammar(len(TEXT), fails),))
    tree = Scripted(script=mixed, parents=lambda width: [-1, 0, 1, 0][:width])
    mate = ask((9, 9), new=24)  # whose longer drafts pad those of the other
    for drafter in (
        Scripted(script=mixed),
        tree,
        build("prompt_lookup"),
        Scripted(script=lambda t, b: mixed(t, b)[:2]),
    ):
        done = engine(drafter).generate([request, mate])[0]
        assert (done.finish_reason, len(done.tokens)) == ("length", 24)
        kinds = [token % 2 for token in done.tokens]
        assert kinds == sorted(kinds)
        assert temperature or done.tokens == serve(request=request).tokens


class Witness(LogitsProcessor):
    """Counts up without forbidding anything, and remembers every prefix that it is shown."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(tuple(input_ids[0].tolist()))
        scores = scores.clone()
        scores[:, (self.seen[-1][-1] + 1) % 80] += 1000.0
        return scores


# Catches: masks of committed tokens only, of the draft shifted by one, none for the bonus, one for a rejected prefix
# in the next step.
def test_the_mask_of_a_position_sees_the_known_tokens_and_the_draft_up_to_it():
    witness, drafter = Witness(), counting(3, wrong_at=1)
    done = serve(drafter, ask(processors=(witness,), new=8))
    known, wanted = list(COUNTING), []
    for ((_, drafted),), (_, kept) in zip(drafter.proposed, drafter.observed[-len(drafter.proposed) :], strict=True):
        wanted += [(*known, *drafted[:i]) for i in range(len(drafted) + 1)]
        known += kept.tokens[0]
    assert done.tokens == NUMBERS[:8]
    assert witness.seen == wanted


# Catches: as many masks as a full draft needs, whatever was drafted.
@pytest.mark.parametrize("widths", [(3, 0, 1), (0,), (1, 4), (4, 3, 2, 1, 0)])
def test_fewer_drafts_than_asked_for_get_a_mask_each(widths):
    script = in_turn(counting(4).script, widths)
    witness = Witness()
    done = serve(Scripted(script=script), ask(processors=(witness,)))
    assert done.tokens == NUMBERS[:12]
    assert done.counters.num_draft_tokens + done.counters.num_steps == len(witness.seen)


class Terminated(CountUp):
    """Counts up to an end and cannot be asked for more."""

    def __init__(self, end, answer):
        self.end, self.answer = end, answer

    def __call__(self, input_ids, scores):
        if self.end in input_ids[0, len(COUNTING) :]:
            if self.answer is None:
                raise AssertionError("the matcher has terminated")
            return torch.full_like(scores, self.answer)
        return super().__call__(input_ids, scores)


# Catches: a mask asked for behind an end that was only drafted, and an error made of having none.
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("end", "answer"), [("eos", None), ("stop id", -math.inf)])
@pytest.mark.parametrize("name", ["counting", *registered()])
def test_no_mask_is_asked_for_behind_an_end(name, end, answer, temperature):
    drafter = counting(4) if name == "counting" else build(name)
    request = ask(
        processors=(Terminated(NUMBERS[6], answer),),
        temperature=temperature,
        stop_ids=[NUMBERS[6]] if end == "stop id" else [],
    )
    done = serve(drafter, request, eos=[NUMBERS[6]] if end == "eos" else [])
    assert (done.tokens, done.finish_reason) == (NUMBERS[:7], "eos")


PROCESSORS = {
    "MinLengthLogitsProcessor": lambda kind: kind(12, 42, device="cpu"),
    "MinNewTokensLengthLogitsProcessor": lambda kind: kind(len(TEXT), 9, 42, device="cpu"),
    "TemperatureLogitsWarper": lambda kind: kind(0.5),
    "RepetitionPenaltyLogitsProcessor": lambda kind: kind(1.6),
    "TopPLogitsWarper": lambda kind: kind(0.5),
    "TopKLogitsWarper": lambda kind: kind(4),
    "MinPLogitsWarper": lambda kind: kind(0.3),
    "TypicalLogitsWarper": lambda kind: kind(0.4),
    "EpsilonLogitsWarper": lambda kind: kind(0.05),
    "EtaLogitsWarper": lambda kind: kind(0.1, device="cpu"),
    "NoRepeatNGramLogitsProcessor": lambda kind: kind(2),
    "EncoderRepetitionPenaltyLogitsProcessor": lambda kind: kind(2.0, torch.tensor([TEXT])),
    "EncoderNoRepeatNGramLogitsProcessor": lambda kind: kind(1, torch.tensor([TEXT])),
    "SequenceBiasLogitsProcessor": lambda kind: kind([[[5, 9], -9.0], [[7], 9.0]]),
    "NoBadWordsLogitsProcessor": lambda kind: kind([[4], [1, 5]], eos_token_id=42),
    "ForcedBOSTokenLogitsProcessor": lambda kind: kind(7),
    "ForcedEOSTokenLogitsProcessor": lambda kind: kind(14, 42, device="cpu"),
    "InfNanRemoveLogitsProcessor": lambda kind: kind(),
    "ExponentialDecayLengthPenalty": lambda kind: kind((3, 1.5), 42, len(TEXT)),
    "LogitNormalization": lambda kind: kind(),
    "SuppressTokensAtBeginLogitsProcessor": lambda kind: kind([3, 7], len(TEXT), device="cpu"),
    "SuppressTokensLogitsProcessor": lambda kind: kind([3, 7], device="cpu"),
}


# Catches: a list of processors that is rebuilt, filtered or refused by their types under speculation.
@pytest.mark.parametrize("name", PROCESSORS)
def test_each_processor_of_transformers_gives_what_it_gives_in_generate(name):
    processor = PROCESSORS[name](getattr(transformers, name))
    wanted = generate(tiny("llama"), TEXT, 16, logits_processor=[processor], eos_token_id=42)
    for drafter in (right(TEXT, wanted, wrong_at=2), build("model")):
        done = serve(drafter, ask(TEXT, new=16, processors=(processor,)), eos=[42])
        assert done.tokens == wanted
