"""Ties, rounding, seeds, noise and numbers that are none."""

import math

import pytest
import torch

import specdec
from specdec import Request, Sampling, Target
from specdec.drafter import draw_chain
from specdec.sequence import Sequence, make_batch
from specdec.types import Span
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from tests.families import FAMILIES, greedy, prompts, tiny
from tests.faults.kit import Watched, ask, build, counting, engine, facts, generate, own, serve
from tests.scripted import Scripted, oracle

TEXT = (3, 1, 4, 1, 5)


def flat(seed=0):
    """A bfloat16 model whose best logits are often equal, or nearly."""
    model = own("llama", seed=seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.02)
    return model.to(torch.bfloat16)


# Catches: a difference to plain decoding in half precision that is called rounding and is none.
def test_in_bfloat16_outputs_part_at_near_ties_only():
    for seed in range(1, 4):
        model = flat(seed)
        asked = [ask(prompt, new=40) for prompt in prompts(seed, (3, 9, 14))]
        plain = [done.tokens for done in engine(model=model).generate(asked)]
        script = oracle(plain, [request.prompt for request in asked], 5)
        found = engine(Scripted(script=script, num_speculative_tokens=5), model=model).generate(asked)
        for request, wanted, done in zip(asked, plain, found, strict=True):
            with torch.no_grad():
                ids = torch.tensor([[*request.prompt, *wanted]])
                logits = model(ids).logits[0, len(request.prompt) - 1 : -1].float()
            best = logits.topk(2, dim=-1).values
            # Two steps of bfloat16, which has eight bits, at the size of the largest logit.
            allowed = 2 * 2.0**-7 * logits.abs().amax(-1)
            assert ((best[:, 0] - best[:, 1]) / allowed).median() > 2  # most places are no near ties
            if done.tokens != wanted:
                place = next(i for i in range(40) if done.tokens[i] != wanted[i])
                gap = (logits[place, wanted[place]] - logits[place, done.tokens[place]]).abs()
                assert gap <= allowed[place], (place, wanted[place], done.tokens[place])


# Catches: a tie that goes to another token in one path than in the other.
@pytest.mark.parametrize("name", ["none", "self", "layer_skip"])
def test_an_exact_tie_goes_to_the_lowest_id_everywhere(name):
    model = own()
    with torch.no_grad():
        model.lm_head.weight[40:] = model.lm_head.weight[:40]
    drafter = build("model") if name == "self" else build(name)
    if name == "self":
        drafter.model = model
    done = serve(drafter, ask(TEXT, new=24), model=model)
    assert done.tokens == generate(model, TEXT, 24)
    assert max(done.tokens) < 40
    assert name != "self" or done.counters.acceptance_rate == 1.0


# Catches: logits of several tokens at once that are another function than those of one at a time.
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_gives_the_logits_of_its_tokens_one_by_one(family, dtype, most):
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
    outputs = []
    for widths in ((4, 8), (4, *[1] * 8)):
        target = Target(tiny(family, dtype=dtype), kv=Slab(rows=1, tokens=32))
        slot, done, found = target.kv.acquire(), 0, []
        for width in widths:
            found.append(target.forward((slot,), Span(ids[:, done : done + width], (width,))).logits)
            target.kv.commit((slot,), torch.zeros((1, 0)), (width,), chain=True)
            done += width
        outputs.append(torch.cat(found, 1))
    difference = ((outputs[0] - outputs[1]).abs().max() / outputs[0].std()).item()
    print(f"{family} {dtype}: {difference:.2g} of the logits' spread")
    assert difference < most


# Catches: a verifier that draws from a generator everybody shares.
def test_a_seed_decides_whatever_else_is_drawn_in_the_process():
    state = torch.random.get_rng_state()
    one = ask(TEXT, temperature=1, seed=11, new=24)
    alone = facts(serve(build("model"), one))
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        torch.rand(1000)
        assert facts(serve(build("model"), one)) == alone
    others = [ask(prompt, temperature=1, seed=i, new=9) for i, prompt in enumerate(prompts())]
    assert facts(engine(build("model"), rows=2).generate([*others, one])[-1]) == alone


# Catches: a generator that is made anew at every step: the seed has no effect, or every step has the same numbers.
@pytest.mark.parametrize("name", ["none", "model", "prompt_lookup"])
def test_each_seed_has_an_output_of_its_own(name):
    found = {serve(build(name), ask(TEXT, temperature=1, seed=seed, new=16)).tokens for seed in range(5)}
    assert len(found) == 5
    drafter = Watched(counting(2))
    serve(drafter, ask(TEXT, temperature=1, new=16))
    numbers = [tuple(batch.noise.uniform("accept", 2)[0].tolist()) for batch in drafter.asked]
    assert len(set(numbers)) == len(numbers) > 5


# Catches: one stream for all requests without a seed, so that samples of one prompt are copies.
def test_samples_of_one_prompt_differ():
    done = specdec.generate("random:llama", prompts=[list(TEXT)] * 8, draft_model="random:llama:1", max_new_tokens=8)
    assert len({completion.tokens for completion in done}) == 8


# Catches: one number for all tokens of a step, in drafting, in acceptance, or between the two.
def test_tokens_of_one_step_are_drawn_with_independent_numbers():
    rows = []
    for seed in range(2000):
        row = Sequence(request=Request(prompt=(1,), sampling=Sampling(seed=seed)), eos_ids=frozenset(), limit=99)
        row.slot = seed
        rows.append((row, 3))
    batch = make_batch(rows)
    draft = draw_chain(batch, [3] * 2000, lambda depth, active, last: torch.zeros((len(active), 80)))
    columns = [draft.tokens.double(), batch.noise.uniform("accept", 3), batch.noise.uniform("next", 1)]
    correlation = torch.corrcoef(torch.cat(columns, 1).T)
    # Of 2000 pairs, 5 standard deviations.
    assert (correlation - torch.eye(7)).abs().max() < 5 / math.sqrt(2000)


# Catches: greedy found out by comparing a temperature with a magic number, in several places that differ.
@pytest.mark.parametrize("temperature", [None, -1, -1e-9, 1e-9, 1e-5])
def test_temperatures_that_are_neither_greedy_nor_usable_are_refused(temperature):
    with pytest.raises(ValueError, match="'temperature' must be"):
        Sampling(temperature=temperature)


@pytest.mark.parametrize("name", ["none", "model", "layer_skip"])
def test_the_lowest_temperature_is_greedy_in_all_but_name(name):
    for temperature in (0, 0.0, 1e-4):
        done = serve(build(name), ask(TEXT, temperature=temperature, new=16))
        assert done.tokens == generate(tiny("llama"), TEXT, 16)
    mixed = [ask(TEXT, temperature=t, new=16) for t in (0, 1e-4, 1.0, 0)]
    found = [done.tokens for done in engine(build(name)).generate(mixed)]
    assert found[0] == found[1] == found[3] == generate(tiny("llama"), TEXT, 16)
    assert found[2] == serve(build(name), mixed[2]).tokens


def failing(value, seed=0):
    """A model whose scores are no numbers while the hook says so, and the hook."""
    model = own("llama", seed=seed)

    def head(module, inputs, output):
        return torch.full_like(output, value) if head.spoiled else output

    head.spoiled = False
    model.lm_head.register_forward_hook(head)
    return model, head


# Catches: an argmax or a draw over scores that are not numbers, laundered into a token.
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("name", ["none", "model", "prompt_lookup"])
def test_target_scores_that_are_not_numbers_end_the_row_with_an_error_and_give_no_token(name, temperature, value):
    model, head = failing(value)
    one = engine(build(name), model=model)
    one.submit(ask(TEXT, temperature=temperature, new=60))
    emitted = []
    for _ in range(3):
        emitted += [token for event in one.step() for token in event.tokens]
    head.spoiled = True
    events = one.step()
    done = events[0].completion
    assert (events[0].tokens, done.finish_reason) == ((), "error")
    assert list(done.tokens) == emitted
    assert done.counters.num_emitted_tokens == len(emitted) > 0


# Catches: a draft of the last id, or of anything, made out of a draft model's NaN.
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_draft_scores_that_are_not_numbers_are_no_draft(temperature, value):
    model, head = failing(value, seed=1)
    drafter = build("model")
    drafter.model = model
    one = engine(drafter)
    head.spoiled = True
    done = one.generate([ask(TEXT, temperature=temperature, new=12)])[0]
    assert done.tokens == serve(request=ask(TEXT, temperature=temperature, new=12)).tokens
    assert (done.counters.num_draft_tokens, done.counters.num_steps) == (0, 12)
    head.spoiled = False
    assert one.generate([ask(TEXT, temperature=temperature, new=12)])[0].counters.num_draft_tokens > 12


# Catches: a placeholder id that is used as an index, accepted, or counted as a draft.
@pytest.mark.parametrize("wrong", [-1, 80, 87, -(2**40)])
@pytest.mark.parametrize("temperature", [0, 1])
def test_an_id_outside_the_vocabulary_is_never_verified(temperature, wrong):
    script = counting(4).script

    def outside(tokens, budget):
        block = script(tokens, budget)
        block[min(1, len(block) - 1)] = wrong
        return block

    done = serve(Scripted(script=outside), ask(new=12, temperature=temperature))
    assert done.tokens == serve(request=ask(new=12)).tokens
    assert done.counters.num_accepted_tokens == done.counters.num_draft_tokens <= done.counters.num_steps
    assert done.counters.num_clipped > 0


# Catches: acceptance, and so speed, that differs from run to run of one seed.
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_run_is_repeated_to_the_last_counter(temperature):
    asked = [ask(prompt, temperature=temperature, seed=i, new=20) for i, prompt in enumerate(prompts())]
    runs = [[facts(done) for done in engine(build("model"), rows=2).generate(asked)] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


# Catches: a prompt that is cached in another shape under speculation than without.
@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 9])
def test_the_first_token_is_that_of_plain_decoding(length, family):
    text = (3, 1, 4, 1, 5, 9, 2, 6, 5)[:length]
    wanted = generate(tiny(family), text, 2)
    for chunk in (2, 512):
        for k in (1, length):
            drafter = Scripted(script=lambda tokens, budget: [7] * budget, num_speculative_tokens=k)
            done = serve(drafter, ask(text, new=2), family=family, scheduler=Continuous(prefill_chunk=chunk))
            assert done.tokens == wanted


# Catches: "it is just rounding" said of a difference in single precision.
@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_nothing_needs_an_excuse(family):
    for k in (1, 2, 4, 8):
        drafter = Scripted(script=oracle(greedy(family, 24), prompts(), k, wrong_at=k // 2), num_speculative_tokens=k)
        done = engine(drafter, family).generate([ask(prompt, new=24) for prompt in prompts()])
        assert [completion.tokens for completion in done] == list(greedy(family, 24))
