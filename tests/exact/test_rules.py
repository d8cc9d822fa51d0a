"""What holds for each built-in rule whatever the models: purity, dtype, ties, permutations, couplings."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from specdec.law import Dense, Logits, PointMass, Sparse
from specdec.noise import Noise
from specdec.probability import at as gather
from specdec.probability import normalise, sample
from specdec.types import Draft, Scores, Verdict
from specdec.verifier import FastAccept, Place
from specdec_plugins.verifiers.greedy import Greedy
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.standard import Standard
from specdec_plugins.verifiers.typical import Typical

RULES = [
    Standard(),
    Greedy(),
    Nucleus(theta=0.3),
    Nucleus(),
    Nucleus(theta=1.0),
    Typical(),
    Typical(replacement="argmax"),
    Typical(replacement="residual"),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=repr)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def simplices(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64, zeros: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).exp()
    if zeros:
        values = values * (torch.rand(shape, generator=generator) < 0.8)
        values[..., 0] += 1e-2
    return (values / values.sum(-1, keepdim=True)).to(dtype)


def case(rows: int, nodes: int, size: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Draft, Scores]:
    """Drafts really drawn from q, ragged, with a target that often agrees."""
    p = simplices((rows, nodes + 1, size), seed, dtype)
    q = simplices((rows, nodes, size), seed + 1, dtype) * 0.5 + p[:, :nodes] * 0.5
    generator = torch.Generator().manual_seed(seed + 2)
    tokens = sample(q, torch.rand((rows, nodes), generator=generator, dtype=torch.float64))
    sizes = torch.randint(0, nodes + 1, (rows,), generator=generator)
    fed = torch.cat([torch.zeros((rows, 1), dtype=torch.int64), tokens], 1)
    scores = Scores(fed, p.log(), p, {}, torch.ones(rows, dtype=torch.bool))
    return Draft(tokens, sizes, law=Dense(q)), scores


def place(p: Tensor, q: Tensor, token: Tensor) -> Place:
    return Place(p, Dense(q), token, torch.zeros_like(token), p.log(), {})


def noise(rows: int, step: int = 0) -> Noise:
    return Noise(tuple(range(rows)), (step,) * rows)


def equal(left: Verdict, right: Verdict) -> bool:
    names = ("lengths", "next_probs", "source")
    if not all(torch.equal(getattr(left, name), getattr(right, name)) for name in names):
        return False
    counted = torch.arange(left.path.shape[1]) < left.lengths.unsqueeze(1)
    return torch.equal(left.path * counted, right.path * counted)


@every_rule
@both_dtypes
def test_a_rule_answers_in_the_dtype_it_gets(rule, dtype):
    # Catches a constant or a cumulative sum that promotes, on the chain path and in the walk.
    draft, scores = case(6, 3, 7, 1, dtype)
    tree = Draft(draft.tokens, draft.sizes, torch.tensor([-1, 0, 1]).repeat(6, 1), draft.law)
    for one in (draft, tree, Draft(draft.tokens, draft.sizes)):
        assert rule.verify(one, scores, noise(6), None).next_probs.dtype == dtype
    at = place(scores.probs[:, :3], draft.law.dense(), draft.tokens)
    assert rule.acceptance(at).dtype == dtype
    assert rule.accept_at(at).dtype == dtype
    assert rule.correct(at).dtype == dtype


@every_rule
@both_dtypes
@pytest.mark.parametrize("law", ["dense", "logits", "sparse", "point"])
def test_accept_at_is_the_acceptance_at_the_drafted_token(rule, dtype, law):
    # Catches two formulas that drift apart, on every law and beside ties and zeros.
    for seed, size in itertools.product(range(4), (3, 8, 400)):
        p = simplices((5, 4, size), seed, dtype)
        q = simplices((5, 4, size), 50 + seed, dtype)
        p[0] = (p[0] * 8).ceil() / (p[0] * 8).ceil().sum(-1, keepdim=True)  # many ties
        token = sample(q, torch.full((5, 4), 0.5))
        order = q.topk(min(size, 6), dim=-1)
        laws = {
            "dense": Dense(q),
            "logits": Logits(q.log()),
            "sparse": Sparse(order.indices, order.values, size),
            "point": PointMass(token, size, dtype),
        }
        at = Place(p, laws[law], token, torch.zeros_like(token), p.log(), {})
        assert isinstance(rule, FastAccept)
        full = rule.acceptance(at)
        assert full.shape == p.shape
        assert bool(((full >= 0) & (full <= 1)).all())
        assert torch.allclose(rule.accept_at(at), gather(full, token), rtol=1e-5, atol=1e-7)


@every_rule
def test_accept_at_of_a_place_without_a_token_does_not_fail(rule):
    # Token -1 is a leaf; catches a gather with a negative index.
    p, q = simplices((3, 5), 1), simplices((3, 5), 2)
    assert rule.accept_at(place(p, q, torch.tensor([-1, 2, -1]))).shape == (3,)


@every_rule
def test_permuting_the_vocabulary_permutes_acceptance_and_replacement(rule):
    # Catches rules that depend on the order of ids: a sort that breaks ties by id. Argmax may, so p has no ties there.
    for seed in range(20):
        p, q = simplices((4, 7), seed), simplices((4, 7), 50 + seed)
        if not isinstance(rule, Greedy) and rule.replacement != "argmax":
            p = (p * 8).ceil() / (p * 8).ceil().sum(-1, keepdim=True)
        order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
        token = torch.tensor([0, 2, 5, 6])
        there = place(p, q, token)
        moved = place(p[:, order], q[:, order], order.argsort()[token])
        assert torch.allclose(rule.acceptance(there)[:, order], rule.acceptance(moved), atol=1e-12)
        assert torch.allclose(rule.correct(there)[:, order], rule.correct(moved), atol=1e-12)
        assert torch.allclose(rule.accept_at(there), rule.accept_at(moved), atol=1e-12)


def test_nucleus_takes_all_tokens_that_tie_at_its_border():
    # p of 1 and 2 and 3 is the same: 0.5 and one of them reach 0.6, so all three are in. Catches a sort-based border.
    p = torch.tensor([[0.4, 0.15, 0.15, 0.15, 0.1, 0.05]]).double()
    q = torch.tensor([[0.0, 0.3, 0.2, 0.2, 0.2, 0.1]]).double()
    at = place(p, q, torch.tensor([3]))
    accept = Nucleus(theta=0.5).acceptance(at)[0]
    assert accept[1:4].tolist() == [1.0, 1.0, 1.0]
    assert accept[4] == pytest.approx(0.5)
    assert accept[5] == pytest.approx(0.5)
    assert float(Nucleus(theta=0.5).accept_at(at)) == 1.0


def test_nucleus_border_is_the_mass_before_a_token_strictly_below_theta():
    # Powers of two, so the sums are exact. Catches <= and the mass with the token in it.
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).double()
    q = torch.tensor([[0.0, 0.4, 0.3, 0.3]]).double()
    for theta, inside in ((0.5, 1), (0.51, 2), (0.75, 2), (0.76, 4), (1.0, 4)):
        rule = Nucleus(theta=theta)
        full = rule.acceptance(place(p, q, torch.tensor([1])))[0]
        single = torch.stack([rule.accept_at(place(p, q, torch.tensor([x])))[0] for x in range(4)])
        for accept in (full, single):
            assert (accept[1:] == 1.0).tolist() == [x < inside for x in (1, 2, 3)], theta


@every_rule
def test_a_token_the_target_cannot_emit_is_never_kept(rule):
    # Even with u = 0 and theta 1; catches u <= a and a nucleus without p > 0.
    p = torch.tensor([[0.6, 0.4, 0.0, 0.0]]).double().repeat(4, 1).unsqueeze(1).repeat(1, 2, 1)
    q = torch.tensor([[0.1, 0.1, 0.4, 0.4]]).double().repeat(4, 1).unsqueeze(1)
    scores = Scores(torch.zeros((4, 2), dtype=torch.int64), p.log(), p, {}, torch.ones(4, dtype=torch.bool))
    tokens = torch.tensor([[2], [3], [2], [3]])
    for law in (Dense(q), Logits(q.log()), None):
        for parents in (None, torch.full((4, 1), -1)):
            verdict = rule.verify(Draft(tokens, torch.ones(4).long(), parents, law), scores, Zero(4), None)
            assert verdict.lengths.tolist() == [0, 0, 0, 0]
            assert float(verdict.next_probs[:, 2:].abs().max()) == 0.0


class Zero:
    """All uniforms are 0."""

    def __init__(self, rows: int, value: float = 0.0) -> None:
        self.rows, self.value = rows, value

    def uniform(self, stream: str, count: int) -> Tensor:
        return torch.full((self.rows, count), self.value, dtype=torch.float64)


@every_rule
def test_a_placeholder_id_is_never_kept(rule):
    # -1 as an index is the last token; here the target is certain of that one.
    p = torch.tensor([[0.0, 0.0, 1.0]]).double().repeat(2, 2, 1)
    q = torch.tensor([[0.0, 0.0, 1.0]]).double().repeat(2, 1, 1)
    scores = Scores(torch.zeros((2, 2), dtype=torch.int64), p.log(), p, {}, torch.ones(2, dtype=torch.bool))
    for law in (Dense(q), Logits(q.log()), Sparse(torch.tensor([[[2]], [[2]]]), q[..., 2:], 3), None):
        for parents in (None, torch.full((2, 1), -1)):
            draft = Draft(torch.full((2, 1), -1), torch.ones(2).long(), parents, law)
            assert rule.verify(draft, scores, Zero(2), None).lengths.tolist() == [0, 0]


def test_typical_entropy_has_the_published_constant():
    # H = -sum p log(p + 1e-5) is a little below the entropy: a threshold between the two tells them apart.
    p = torch.tensor([[0.3, 0.3, 0.2, 0.1, 0.1]]).double()
    plain, published = float(-(p * p.log()).sum()), float(-(p * (p + 1e-5).log()).sum())
    delta = 0.2 * math.exp((plain + published) / 2)
    rule = Typical(epsilon=1.0, delta=delta)
    at = place(p, p, torch.tensor([2]))
    assert rule.acceptance(at)[0].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert rule.accept_at(at).tolist() == [0.0]


def test_a_token_that_is_always_kept_is_kept_with_the_highest_uniform():
    # p >= q: a = 1 exactly, and u = 1 - 2^-53; catches rounding in the ratio.
    draft, scores = case(50, 2, 5, 3)
    same = Draft(draft.tokens, torch.full((50,), 2), law=Dense(scores.probs[:, :2]))
    kept = Standard().verify(same, scores, Zero(50, 1 - 2.0**-53), None).lengths
    reachable = (gather(scores.probs[:, :2], draft.tokens) > 0).long().cumprod(1).sum(1)
    assert torch.equal(kept, reachable)


@every_rule
def test_verify_is_pure(rule):
    # Catches in-place work on probs, tokens or the law, and state kept between calls.
    draft, scores = case(8, 3, 6, 5)
    tree = Draft(draft.tokens, draft.sizes, torch.tensor([-1, -1, 0]).repeat(8, 1), draft.law)
    for one in (draft, tree):
        tensors = [one.tokens, one.sizes, one.law.dense(), scores.probs, scores.logits, scores.tokens]
        before = [tensor.clone() for tensor in tensors]
        first = rule.verify(one, scores, noise(8), None)
        rule.verify(one, scores, noise(8, step=1), None)
        second = rule.verify(one, scores, noise(8), None)
        assert equal(first, second)
        assert all(torch.equal(was, now) for was, now in zip(before, tensors, strict=True))


@every_rule
def test_rows_do_not_see_each_other(rule):
    # Each row alone equals itself in the batch, and a permuted batch is the permuted answer. Catches a cumulative
    # quantity over the batch and a gather from another row.
    draft, scores = case(9, 3, 6, 7)
    whole = rule.verify(draft, scores, noise(9), None)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    for rows in (*([row] for row in range(9)), order.tolist()):
        index = torch.tensor(rows)
        part = rule.verify(
            Draft(draft.tokens[index], draft.sizes[index], law=Dense(draft.law.dense()[index])),
            Scores(scores.tokens[index], scores.logits[index], scores.probs[index], {}, scores.finite[index]),
            Noise(tuple(rows), (0,) * len(rows)),
            None,
        )
        assert torch.equal(part.lengths, whole.lengths[index])
        assert torch.equal(part.source, whole.source[index])
        assert torch.equal(part.next_probs, whole.next_probs[index])


@every_rule
def test_next_probs_are_laws_and_padding_is_never_looked_at(rule):
    # Garbage in padded nodes changes nothing; every answer sums to 1.
    draft, scores = case(40, 3, 6, 9)
    whole = rule.verify(draft, scores, noise(40), None)
    assert torch.allclose(whole.next_probs.sum(-1), torch.ones(40).double())
    assert bool((whole.lengths <= draft.sizes).all())
    padding = torch.arange(3) >= draft.sizes.unsqueeze(1)
    q = draft.law.dense().clone()
    q[padding] = 1.0 / 6
    tokens = torch.where(padding, 5, draft.tokens)
    assert equal(whole, rule.verify(Draft(tokens, draft.sizes, law=Dense(q)), scores, noise(40), None))


def test_a_point_mass_draft_is_kept_with_the_probability_of_its_token():
    # law None: a(x) = p(x), the residual is p without x. Catches q = p(x) or q = 1 for every token.
    p = simplices((200, 2, 5), 11, zeros=False)
    tokens = p[:, 0].argmin(-1, keepdim=True)
    scores = Scores(torch.zeros((200, 2), dtype=torch.int64), p.log(), p, {}, torch.ones(200, dtype=torch.bool))
    uniform = noise(200).uniform("accept", 1)[:, 0]
    verdict = Standard().verify(Draft(tokens, torch.ones(200).long()), scores, noise(200), None)
    chosen = gather(p[:, 0], tokens[:, 0])
    assert torch.equal(verdict.lengths, (uniform < chosen).long())
    without = p[:, 0].scatter(1, tokens, 0.0)
    expected, _ = normalise(torch.where(verdict.lengths.bool().unsqueeze(1), p[:, 1], without), p[:, 0])
    assert torch.allclose(verdict.next_probs, expected)


# The coupling: on one draft and one noise, rules that accept more accept at least as much on every path.


def lengths(rule: object, draft: Draft, scores: Scores, step: int = 0) -> Tensor:
    return rule.verify(draft, scores, noise(len(draft.tokens), step), None).lengths


@pytest.mark.parametrize("law", ["dense", "point"])
def test_nucleus_keeps_at_least_what_standard_keeps_on_every_path(law):
    # 3000 paths; catches another number of uniforms used, another key, and a nucleus that replaces the ratio.
    draft, scores = case(3000, 5, 6, 13)
    if law == "point":
        draft = Draft(draft.tokens, draft.sizes)
    least = lengths(Standard(), draft, scores)
    more = [lengths(Nucleus(theta=theta), draft, scores) for theta in (1e-9, 0.3, 0.6, 0.9, 0.95, 1.0)]
    for low, high in itertools.pairwise([least, *more]):
        assert bool((high >= low).all())
    # The coupling is not empty: each step up keeps more somewhere.
    assert bool((more[-1] > least).any())
    assert int(more[3].sum()) > int(more[1].sum()) > int(least.sum())


def test_nucleus_of_theta_one_keeps_every_token_the_target_can_emit():
    draft, scores = case(2000, 4, 6, 17)
    possible = (gather(scores.probs[:, :4], draft.tokens) > 0) & (torch.arange(4) < draft.sizes.unsqueeze(1))
    assert torch.equal(lengths(Nucleus(theta=1.0), draft, scores), possible.long().cumprod(1).sum(1))


def test_nucleus_of_tiny_theta_adds_the_modes_only():
    # Theta towards 0 is not the standard rule: the mode is always kept, all modes where they tie.
    draft, scores = case(2000, 1, 6, 19)
    probs = scores.probs.clone()
    probs[::2, 0, :2] = probs[::2, 0].amax(-1, keepdim=True)
    probs = probs / probs.sum(-1, keepdim=True)
    scores = Scores(scores.tokens, probs.log(), probs, {}, scores.finite)
    mode = (gather(probs[:, :1], draft.tokens) == probs[:, :1].amax(-1))[:, 0] & (draft.sizes > 0)
    standard = lengths(Standard(), draft, scores).bool()
    assert torch.equal(lengths(Nucleus(theta=1e-9), draft, scores).bool(), standard | mode)
    assert bool((mode & ~standard).any())


def test_greedy_rows_accept_the_argmax_and_nothing_else():
    # One-hot targets, as greedy requests have them: every rule of the standard family is exact match there.
    draft, scores = case(500, 3, 6, 23)
    best = scores.probs.argmax(-1)
    hot = torch.nn.functional.one_hot(best, 6).double()
    scores = Scores(scores.tokens, scores.logits, hot, {}, scores.finite)
    match = (best[:, :3] == draft.tokens) & (torch.arange(3) < draft.sizes.unsqueeze(1))
    expected = match.long().cumprod(1).sum(1)
    deterministic = Draft(draft.tokens, draft.sizes)
    for rule in (Standard(), Greedy(), Nucleus(), Nucleus(theta=1.0), Typical(), Typical(replacement="residual")):
        verdict = rule.verify(deterministic, scores, noise(500), None)
        assert torch.equal(verdict.lengths, expected), rule
        assert torch.equal(verdict.next_probs, hot[torch.arange(500), expected]), rule
