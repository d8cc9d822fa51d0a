"""Rows of a batch: lengths, masks, noise, stops and figures of each are its own."""

import pytest
import torch

from specdec import Target
from specdec.types import Span
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.static import Static
from tests.families import FAMILIES, greedy, prompts, tiny
from tests.faults.kit import Forwards, ask, build, counting, engine, facts, generate, registered, serve
from tests.scripted import Scripted, oracle

TEXTS = prompts()[1:]  # three prompts of different lengths


def uneven(family="llama", k=4, accepts=(0, 2, 4)):
    """An oracle whose blocks are right up to another place for each prompt."""
    scripts = [oracle(greedy(family, 24), prompts(), k, wrong_at=place) for place in accepts]

    def script(tokens, budget):
        index = next(index for index, text in enumerate(TEXTS) if tokens[: len(text)] == text)
        return scripts[index](tokens, budget)

    return Scripted(script=script, num_speculative_tokens=k)


# Catches: several rows refused, or all of them cut to what the worst accepts.
def test_rows_that_accept_nothing_some_and_all_of_their_drafts_decode_together():
    one = engine(uneven(), rows=3, scheduler=Static())
    done = one.generate([ask(text, new=24) for text in TEXTS])
    assert [completion.tokens for completion in done] == list(greedy("llama", 24)[1:])
    assert [completion.counters.num_steps for completion in done] == [24, 8, 5]


# Catches: rejected cells that are zeroed instead of hidden: a zero key still takes part in a softmax.
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stale", [0.0, 1e3, -1e3])
def test_a_rejected_cell_takes_no_part_in_attention_whatever_it_holds(family, stale):
    model = tiny(family, dtype=torch.float64)
    target, alone = Target(model, kv=Slab(rows=2, tokens=32)), Target(model, kv=Slab(rows=1, tokens=32))
    slots = tuple(target.kv.acquire() for _ in range(2))
    ids = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    target.forward(slots, Span(ids, (6, 6)))
    counts = (2, 5)
    target.kv.commit(slots, torch.arange(6).expand(2, -1), counts, chain=True)
    for store in (*target.kv._keys.values(), *target.kv._values.values()):
        for slot, count in zip(slots, counts, strict=True):
            store[slot, :, count:] = stale
    found = target.forward(slots, Span(torch.tensor([[7, 8], [7, 8]]), (2, 2))).logits
    for row, count in enumerate(counts):
        slot = alone.kv.acquire()
        whole = torch.cat([ids[row : row + 1, :count], torch.tensor([[7, 8]])], 1)
        wanted = alone.forward((slot,), Span(whole, (count + 2,))).logits
        torch.testing.assert_close(found[row], wanted[0, -2:])
        alone.kv.release((slot,))


# Catches: one offset for the batch, moved by the block or by the least that a row accepted.
def test_each_row_moves_on_by_what_it_accepted():
    one = engine(uneven(), rows=3, scheduler=Static())
    for text in TEXTS:
        one.submit(ask(text, new=24))
    one.step()  # the prompts
    before = list(one.target.kv.lengths)
    one.step()
    moved = [after - length for after, length in zip(one.target.kv.lengths, before, strict=True)]
    assert before == [len(text) - 1 for text in TEXTS]
    assert moved == [1, 3, 5]


# Catches: a figure over the batch, where a token counts only if every row accepts it.
def test_acceptance_is_counted_per_row():
    done = engine(uneven(), rows=3, scheduler=Static()).generate([ask(text, new=24) for text in TEXTS])
    assert [completion.counters.num_accepted_tokens for completion in done] == [0, 16, 19]
    assert [len(completion.counters.num_accepted_tokens_per_pos) for completion in done] == [0, 2, 4]


# Catches: a mask of the padded rows that is made for the first step only.
@pytest.mark.parametrize("family", FAMILIES)
def test_the_mask_of_a_ragged_batch_holds_in_every_step(family):
    one = engine(build("layer_skip"), family, scheduler=Static())
    with Forwards(one.target.model) as forwards:
        done = one.generate([ask(prompt, new=16) for prompt in prompts()])
    for completion, wanted in zip(done, greedy(family, 24), strict=True):
        assert completion.tokens[1:] == wanted[1:16]
    for fed in forwards.inputs:
        for mask in fed["mask"].values() if isinstance(fed["mask"], dict) else [fed["mask"]]:
            assert (mask.shape[0], mask.shape[2]) == fed["ids"].shape


# Catches: buffers of a drafter that are made for one row.
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("name", registered())
def test_every_drafter_serves_several_rows(name, temperature):
    asked = [ask(prompt, new=10, temperature=temperature, seed=i, name=str(i)) for i, prompt in enumerate(prompts())]
    for request, done in zip(asked, engine(build(name), rows=3).generate(asked), strict=True):
        assert facts(done) == facts(serve(build(name), request))


# Catches: rows that are mixed up when they are many, or matched to results by position.
def test_permuted_rows_of_a_large_batch_give_permuted_results():
    asked = [ask((i, 3, 5 + i)[: 1 + i % 3], new=6, temperature=i % 2, seed=i, name=str(i)) for i in range(24)]
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    straight = engine(build("model"), rows=24).generate(asked)
    mixed = engine(build("model"), rows=24).generate([asked[i] for i in order])
    assert [facts(straight[i]) for i in order] == [facts(done) for done in mixed]
    assert len({done.tokens for done in straight}) > 20


# Catches: rows with a seed of their own that take another path than those without.
@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_with_seeds_of_their_own_do_not_disturb_others(temperature):
    plain = [ask(prompt, new=12, temperature=temperature, name=str(i)) for i, prompt in enumerate(prompts())]
    seeded = [ask(prompt, new=12, temperature=1, seed=7 + i, name=f"s{i}") for i, prompt in enumerate(prompts())]
    mixed = [row for pair in zip(plain, seeded, strict=True) for row in pair]
    together = engine(build("model"), rows=8).generate(mixed)
    assert [facts(done) for done in together] == [facts(serve(build("model"), row)) for row in mixed]


# Catches: finished rows that go on, and are fed and counted until the last one ends.
def test_a_finished_row_takes_no_further_part():
    one = engine(counting(4), rows=2, scheduler=Static(), eos=[])
    short, long = ask(new=1, name="short"), ask(new=30, name="long")
    with Forwards(one.target.model) as forwards:
        done = one.generate([short, long])
    assert [completion.counters.num_steps for completion in done] == [1, 6]
    assert [fed["ids"].shape[0] for fed in forwards.inputs[-6:]] == [2, 1, 1, 1, 1, 1]
    assert one.steps == 6


# Catches: one mode for the whole batch: greedy rows that sample, or sampling rows whose draft law is a point mass.
def test_greedy_and_sampling_rows_share_a_batch():
    asked = [ask(p, new=16, temperature=t, seed=4) for p, t in zip(prompts(), (0, 1.3, 0, 0.6), strict=True)]
    together = engine(build("layer_skip")).generate(asked)
    assert [done.tokens for done in together[::2]] == [wanted[:16] for wanted in greedy("llama", 24)[::2]]
    for request, done in zip(asked, together, strict=True):
        assert facts(done) == facts(serve(build("layer_skip"), request))
    assert together[1].tokens != generate(tiny("llama"), prompts()[1], 16)
