"""A draft model that proposes trees: several sampled children of a token, tried one after the other."""

import pytest
import torch

from specdec import Engine, Request, Sampling, Target
from specdec.sequence import Sequence, make_batch
from specdec.types import Span
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.standard import Standard
from specdec_plugins.verifiers.tree import Tree
from specdec_plugins.verifiers.tree_target import TreeTarget
from tests.families import FAMILIES, greedy, prompts, tiny

FULL = pytest.mark.full
NEW = 24
RULES = (Standard(), Tree(), TreeTarget(), Nucleus())
# The whole product in full; every day all shapes and all rules, not each with each, on one family, one on the others.
CASES = [
    pytest.param(
        family,
        rule,
        branches,
        id=f"{family}-{type(rule).__name__}-{branches}",
        marks=()
        if (type(rule), branches) == (Standard, (3, 1, 1)) or (family == "gemma3" and (not turn or turn == shape + 1))
        else FULL,
    )
    for family in FAMILIES
    for turn, rule in enumerate(RULES)
    for shape, branches in enumerate(((2,), (3, 1, 1), (2, 2)))
]


def drafting(model, rows=4, tokens=64, target=None, **options):
    target = target or Target(tiny("llama"), kv=Slab(rows=rows, tokens=tokens))
    drafter = DraftModel(model=model, **options)
    drafter.bind(target)
    return target, drafter


def propose(drafter, target, prompts_of, **sampling):
    """The first draft for some prompts, each in its own cache row."""
    rows = []
    for index, prompt in enumerate(prompts_of):
        request = Request(prompt=prompt, sampling=Sampling(max_new_tokens=NEW, seed=index, **sampling), id=str(index))
        row = Sequence(request=request, eos_ids=frozenset(), limit=64, text=None)
        row.slot = index
        rows.append((row, drafter.num_speculative_tokens))
    batch = make_batch(rows, target.device, None)
    with torch.inference_mode():
        return batch, drafter.propose(batch)


# Catches: siblings that see each other, positions by column, a draft cache that keeps siblings, a kept second child
# whose subtree is another's.
@pytest.mark.parametrize(("family", "verifier", "branches"), CASES)
def test_greedy_decoding_over_drafted_trees_equals_generate(family, verifier, branches):
    target = Target(tiny(family), kv=Slab(rows=2, tokens=64))
    drafter = DraftModel(model=tiny(family, seed=1), branches=branches)
    engine = Engine(target, drafter, verifier, Continuous(prefill_chunk=3))
    sampling = Sampling(temperature=0, max_new_tokens=NEW)
    completions = engine.generate([Request(prompt=p, sampling=sampling) for p in prompts()])
    assert [completion.tokens for completion in completions] == list(greedy(family, NEW))


# Catches: a draft cache that forgets what was kept over a tree, a path that is not the first child's.
@pytest.mark.parametrize("family", FAMILIES)
def test_the_target_as_its_own_drafter_keeps_a_whole_path(family):
    model = tiny(family)
    target, drafter = drafting(model, target=Target(model, kv=Slab(rows=4, tokens=64)), branches=(2, 1, 1))
    engine = Engine(target, drafter, Standard(), Continuous())
    completions = engine.generate(
        [Request(prompt=p, sampling=Sampling(temperature=0, max_new_tokens=21)) for p in prompts()]
    )
    # Three tokens of the path and the bonus each step, until the budget is too short for the whole tree.
    assert all(completion.counters.num_per_length.get(4, 0) >= 4 for completion in completions)


# Catches: children that another node's law was handed over for, siblings drawn with one uniform, `-1` at deeper levels.
def test_every_child_is_drawn_from_the_law_that_is_handed_over():
    target, drafter = drafting(tiny("llama", seed=1), rows=400, branches=(2, 2))
    prompt = (5, 9, 2)
    _, draft = propose(drafter, target, [prompt] * 400)
    assert draft.parents[0].tolist() == [-1, -1, 0, 0, 1, 1]
    laws = draft.law.dense()
    with torch.inference_mode():
        alone = tiny("llama", seed=1)(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    torch.testing.assert_close(laws[:, 0], alone.expand(400, -1))
    # Without replacement: the second child's law lacks the first child.
    assert float(laws[torch.arange(400), 1, draft.tokens[:, 0]].max()) == 0.0
    wanted = alone.repeat(400, 1).scatter(1, draft.tokens[:, :1], 0.0)
    torch.testing.assert_close(laws[:, 1], wanted / wanted.sum(-1, keepdim=True))
    # A grandchild's law is the draft model's after its own path.
    with torch.inference_mode():
        path = torch.cat([torch.tensor([prompt]).expand(400, -1), draft.tokens[:, 1:2]], 1)
        after = tiny("llama", seed=1)(path).logits[:, -1].softmax(-1)
    torch.testing.assert_close(laws[:, 4], after, atol=1e-5, rtol=1e-4)
    # Drawn from it: the mean of the indicator minus the law, over 400 rows, is noise.
    for node in range(6):
        hit = torch.zeros_like(laws[:, node]).scatter(1, draft.tokens[:, node : node + 1], 1.0)
        z = (hit - laws[:, node]).sum(0) / (laws[:, node] * (1 - laws[:, node])).sum(0).clamp(min=1e-9).sqrt()
        common = laws[:, node].sum(0) > 5
        assert float(z[common].abs().max()) < 5


# Catches: a law without the siblings before it that is handed over where they were drawn with them.
def test_with_replacement_siblings_share_their_law():
    target, drafter = drafting(tiny("llama", seed=1), rows=50, branches=(3,), siblings="with_replacement")
    _, draft = propose(drafter, target, [(5, 9)] * 50)
    laws = draft.law.dense()
    assert torch.equal(laws[:, 0], laws[:, 1])
    assert torch.equal(laws[:, 0], laws[:, 2])
    assert bool((draft.tokens[:, 0] == draft.tokens[:, 1]).any())


# Catches: a law of mass zero where siblings took all there was.
def test_where_siblings_took_all_mass_the_law_is_whole_again():
    target, drafter = drafting(tiny("llama", seed=1), rows=4, branches=(3,))
    _, draft = propose(drafter, target, [(5, 9)] * 4, top_k=2)
    laws = draft.law.dense()
    torch.testing.assert_close(laws.sum(-1), torch.ones(4, 3))
    assert torch.equal(laws[:, 0], laws[:, 2])


# Catches: greedy siblings that are equal, greedy rows among sampling ones whose law is soft.
def test_children_of_greedy_rows_are_the_most_probable_tokens():
    target, drafter = drafting(tiny("llama", seed=1), branches=(3,))
    _, draft = propose(drafter, target, [(5, 9)], temperature=0)
    assert draft.law is None
    with torch.inference_mode():
        best = tiny("llama", seed=1)(torch.tensor([[5, 9]])).logits[0, -1].topk(3).indices
    assert draft.tokens[0].tolist() == best.tolist()


# Catches: rows of a tree batch that depend on each other, budgets of one row applied to all.
def test_a_row_of_a_batch_gets_the_tree_it_gets_alone():
    for temperature in (0.0, 1.0):
        sampling = [Sampling(temperature=temperature, max_new_tokens=12 + index, seed=index) for index in range(4)]
        requests = [Request(prompt=p, sampling=s, id=str(s.seed)) for p, s in zip(prompts(), sampling, strict=True)]

        def decode(wanted):
            target = Target(tiny("gemma3", dtype=torch.float64), kv=Slab(rows=4, tokens=64))
            drafter = DraftModel(model=tiny("gemma3", seed=1, dtype=torch.float64), branches=(2, 2))
            return [c.tokens for c in Engine(target, drafter, Standard(), Continuous()).generate(wanted)]

        assert decode(requests) == [decode([request])[0] for request in requests]


# Catches: cells of a tree that were committed out of order or not at all, in the draft model's cache.
def test_the_draft_cache_holds_what_a_fresh_prefill_holds():
    target, drafter = drafting(tiny("llama", seed=1), rows=2, branches=(3, 1))
    engine = Engine(target, drafter, Standard(), Continuous())
    for request in (Request(prompt=p, sampling=Sampling(max_new_tokens=16, seed=4)) for p in prompts()[:2]):
        engine.submit(request)
    for _ in range(4):
        engine.step()
    draft = drafter._draft
    for row in engine.scheduler.running:
        length = draft.kv.lengths[row.slot]
        assert len(row.tokens) - 5 <= length <= len(row.tokens)
        probe = torch.tensor([[7]])
        with torch.inference_mode():
            staged = draft.forward((row.slot,), Span(probe, (1,))).logits[0, -1]
            fresh = tiny("llama", seed=1)(torch.tensor([[*row.tokens[:length], 7]])).logits[0, -1]
        torch.testing.assert_close(staged, fresh, atol=1e-4, rtol=1e-4)


# Catches: options that contradict each other, and one of them ignored.
def test_branches_and_their_number_of_nodes_agree():
    assert DraftModel(model="m", branches=[3, 1, 1]).num_speculative_tokens == 9
    assert DraftModel(model="m", branches=[2, 3]).num_speculative_tokens == 8
    assert DraftModel(model="m").num_speculative_tokens == 5
    assert not DraftModel(model="m", branches=[1, 1]).trees
    with pytest.raises(ValueError, match="must be 9 with these branches, or left out, got 7"):
        DraftModel(model="m", branches=[3, 1, 1], num_speculative_tokens=7)
    for wrong in ([], [0], [2, 1.5], [9, 9, 9]):
        with pytest.raises(ValueError, match="'branches' must"):
            DraftModel(model="m", branches=wrong)
