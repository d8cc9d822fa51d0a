import pytest
import torch
from attrs import field, frozen
from torch import Tensor

from specdec.law import Dense, Logits, Sparse
from specdec.noise import Noise
from specdec.probability import sample
from specdec.types import SOURCES, Draft, Scores, Verdict
from specdec.verifier import Place, PointwiseVerifier
from specdec_plugins.verifiers.greedy import Greedy
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.standard import Standard
from specdec_plugins.verifiers.typical import Typical

ROWS, NODES, SIZE = 60, 4, 6


@frozen
class Fingerprint(PointwiseVerifier):
    """Reads everything a place has, so that two programs that build places differently give different answers."""

    family = "other"
    exactness = "lossy"
    trees = True
    taps = (3,)

    def acceptance(self, at: Place) -> Tensor:
        return torch.sigmoid(at.hidden[3][..., :1] + at.logits - 0.1 * at.depth.unsqueeze(-1) + at.q.dense())

    def correct(self, at: Place) -> Tensor:
        place = at.hidden[3].sum(-1) + at.depth + 0.3 * at.token
        return (at.logits + torch.arange(at.p.shape[-1]) * place.unsqueeze(-1)).softmax(-1) + at.q.dense() + at.p


@frozen
class Counting(PointwiseVerifier):
    """Keeps every token of even id while it remembers fewer than `most` examined places."""

    most: int = 10

    family = "other"
    exactness = "lossy"
    memory = 1

    def start(self, prompt: tuple[int, ...]) -> tuple[float, ...]:
        return (float(len(prompt)),)

    def acceptance(self, at: Place) -> Tensor:
        few = at.memory < self.most
        return ((torch.arange(at.p.shape[-1]) % 2 == 0) & few).to(at.p.dtype)

    def advance(self, at: Place) -> Tensor:
        return at.memory + 1


@frozen
class Scripted(PointwiseVerifier):
    """Keeps exactly the nodes it is told to, by depth."""

    keep: tuple[bool, ...] = field(default=())

    family = "other"
    exactness = "lossy"
    trees = True

    def acceptance(self, at: Place) -> Tensor:
        allowed = torch.tensor([*self.keep, False]).to(at.p.dtype)
        return allowed[at.depth.clamp(max=len(self.keep))].unsqueeze(-1).expand_as(at.p)


RULES = [
    Standard(),
    Greedy(),
    Nucleus(theta=0.6),
    Typical(),
    Typical(replacement="residual"),
    Typical(replacement="argmax"),
    Fingerprint(),
]


def case(seed: int, rows: int = ROWS, nodes: int = NODES) -> tuple[Draft, Scores]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((rows, nodes + 1, SIZE), generator=generator, dtype=torch.float64)
    p = logits.softmax(-1)
    q = 0.6 * p[:, :nodes] + 0.4 * torch.randn((rows, nodes, SIZE), generator=generator).double().softmax(-1)
    tokens = sample(q, torch.rand((rows, nodes), generator=generator, dtype=torch.float64))
    sizes = torch.randint(0, nodes + 1, (rows,), generator=generator)
    hidden = {3: torch.randn((rows, nodes + 1, 2), generator=generator, dtype=torch.float64)}
    fed = torch.cat([torch.zeros((rows, 1), dtype=torch.int64), tokens], 1)
    return Draft(tokens, sizes, law=Dense(q)), Scores(fed, logits, p, hidden, torch.ones(rows, dtype=torch.bool))


def noise(rows: int = ROWS, step: int = 0) -> Noise:
    return Noise(tuple(range(rows)), (step,) * rows)


def as_tree(draft: Draft) -> Draft:
    nodes = draft.tokens.shape[1]
    return Draft(draft.tokens, draft.sizes, torch.arange(-1, nodes - 1).repeat(len(draft.tokens), 1), draft.law)


def assert_same(left: Verdict, right: Verdict) -> None:
    assert torch.equal(left.lengths, right.lengths)
    assert torch.equal(left.source, right.source)
    assert torch.allclose(left.next_probs, right.next_probs, atol=1e-12)
    counted = torch.arange(left.path.shape[1]) < left.lengths.unsqueeze(1)
    assert torch.equal(left.path * counted, right.path * counted)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_walk_and_the_chain_path_agree(rule):
    # Ragged rows, every kind of law. Catches a place built from another node's logits, hidden, depth or law.
    for seed in range(6):
        draft, scores = case(seed)
        q = draft.law.dense()
        order = q.topk(SIZE, dim=-1)
        for law in (draft.law, Logits(q.log()), Sparse(order.indices, order.values, SIZE), None):
            one = Draft(draft.tokens, draft.sizes, law=law)
            assert_same(rule.verify(one, scores, noise(), None), rule.verify(as_tree(one), scores, noise(), None))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_walk_and_the_chain_path_agree_without_draft_nodes(rule):
    # N = 0: plain decoding is verification of nothing; the bonus law is the answer.
    draft, scores = case(1, nodes=0)
    for law in (draft.law, None):
        one = Draft(draft.tokens, draft.sizes, law=law)
        chain, walk = rule.verify(one, scores, noise(), None), rule.verify(as_tree(one), scores, noise(), None)
        assert_same(chain, walk)
        assert chain.path.shape == (ROWS, 0)
        assert not bool(chain.lengths.any())
        assert chain.source.tolist() == [SOURCES.index("bonus")] * ROWS
        if not isinstance(rule, Fingerprint):
            best = torch.nn.functional.one_hot(scores.probs[:, 0].argmax(-1), SIZE).double()
            assert torch.allclose(chain.next_probs, best if rule.replacement == "argmax" else scores.probs[:, 0])


def test_both_paths_agree_with_a_loop_over_rows_and_nodes():
    # Naive standard rule, one row at a time; catches both programs being wrong in the same way.
    draft, scores = case(3)
    uniform = noise().uniform("accept", NODES)
    verdict = Standard().verify(draft, scores, noise(), None)
    q = draft.law.dense()
    for row in range(ROWS):
        kept, law = 0, None
        for node in range(int(draft.sizes[row])):
            token = int(draft.tokens[row, node])
            if float(uniform[row, node]) < float(scores.probs[row, node, token] / q[row, node, token]):
                kept += 1
                continue
            law = (scores.probs[row, node] - q[row, node]).clamp(min=0)
            break
        source = "bonus" if law is None else "residual"
        law = scores.probs[row, kept] if law is None else law / law.sum()
        assert int(verdict.lengths[row]) == kept
        assert SOURCES[int(verdict.source[row])] == source
        assert torch.allclose(verdict.next_probs[row], law)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(
    ("keep", "length"),
    [
        ((True, False, True, True), 1),
        ((False, True, True, True), 0),
        ((True, True, True, False), 3),
        ((True, True, True, True), 4),
    ],
)
def test_the_first_miss_ends_the_path(tree, keep, length):
    # [T, F, T, T] keeps one token, not three: catches a sum in place of the leading run.
    draft, scores = case(2)
    draft = Draft(draft.tokens, torch.full((ROWS,), NODES), law=draft.law)
    verdict = Scripted(keep=keep).verify(as_tree(draft) if tree else draft, scores, noise(), None)
    assert verdict.lengths.tolist() == [length] * ROWS
    assert verdict.path[:, :length].tolist() == [list(range(length))] * ROWS


@pytest.mark.parametrize("tree", [False, True])
def test_a_draft_kept_to_its_end_is_followed_by_the_row_after_its_last_node(tree):
    # Ragged sizes: the bonus comes from row `size`, whatever the padded nodes are. Catches row N for every row.
    draft, scores = case(4)
    verdict = Scripted(keep=(True,) * NODES).verify(as_tree(draft) if tree else draft, scores, noise(), None)
    assert torch.equal(verdict.lengths, draft.sizes)
    assert torch.allclose(verdict.next_probs, scores.probs[torch.arange(ROWS), draft.sizes])
    assert verdict.source.tolist() == [SOURCES.index("bonus")] * ROWS


@pytest.mark.parametrize("tree", [False, True])
def test_sources_say_where_the_next_token_comes_from(tree):
    # bonus, residual, target, argmax, and fallback where the residual has no mass.
    p = torch.tensor([[[0.6, 0.4, 0.0], [0.2, 0.3, 0.5]]]).double().repeat(4, 1, 1)
    scores = Scores(torch.zeros((4, 2), dtype=torch.int64), p.log(), p, {}, torch.ones(4, dtype=torch.bool))
    q = torch.tensor([[[0.2, 0.2, 0.6]], [[0.2, 0.2, 0.6]], [[0.6, 0.4, 0.0]], [[0.6, 0.4, 0.0]]]).double()
    # Row 0 rejects a token the target lacks, row 1 keeps, row 2 drew what its law says it cannot, row 3 has no draft.
    draft = Draft(torch.tensor([[2], [1], [2], [1]]), torch.tensor([1, 1, 1, 0]), law=Dense(q))
    draft = as_tree(draft) if tree else draft

    def sources(rule: PointwiseVerifier) -> list[str]:
        return [SOURCES[code] for code in rule.verify(draft, scores, noise(4), None).source.tolist()]

    assert sources(Standard()) == ["residual", "bonus", "fallback", "bonus"]
    assert sources(Typical()) == ["target", "bonus", "target", "bonus"]
    assert sources(Typical(replacement="argmax")) == ["argmax", "bonus", "argmax", "bonus"]
    assert sources(Typical(replacement="residual")) == ["residual", "bonus", "fallback", "bonus"]
    fallback = Standard().verify(draft, scores, noise(4), None).next_probs[2]
    assert torch.equal(fallback, p[0, 0])


def test_siblings_are_tried_in_the_order_drawn_against_what_is_left():
    # By hand: p = (.5, .3, .2), two point-mass siblings 0 and 1. The second is tested against p without 0.
    p = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.7, 0.2, 0.1]]]).double()
    scores = Scores(torch.zeros((1, 3), dtype=torch.int64), p.log(), p, {}, torch.ones(1, dtype=torch.bool))
    draft = Draft(torch.tensor([[0, 1]]), torch.tensor([2]), torch.tensor([[-1, -1]]))

    class Fixed:
        def __init__(self, *values: float) -> None:
            self.values = values

        def uniform(self, stream: str, count: int) -> Tensor:
            assert stream == "accept"
            return torch.tensor([self.values], dtype=torch.float64)

    first = Standard().verify(draft, scores, Fixed(0.49, 0.0), None)
    assert (first.lengths.tolist(), first.path[0, 0].item()) == ([1], 0)
    assert torch.allclose(first.next_probs[0], p[0, 1])
    second = Standard().verify(draft, scores, Fixed(0.51, 0.59), None)
    assert (second.lengths.tolist(), second.path[0, 0].item()) == ([1], 1)
    assert torch.allclose(second.next_probs[0], p[0, 2])
    neither = Standard().verify(draft, scores, Fixed(0.51, 0.61), None)
    assert neither.lengths.tolist() == [0]
    assert torch.allclose(neither.next_probs[0], torch.tensor([0.0, 0.0, 1.0]).double())
    assert SOURCES[int(neither.source)] == "residual"


def test_children_of_a_rejected_node_are_never_reached():
    # Node 1 hangs under node 0; when 0 is rejected and 2 is kept, the path is [2, 3].
    _, scores = case(5, rows=1)
    tokens = torch.tensor([[0, 1, 2, 3]])
    p = torch.full((1, 5, SIZE), 0.0).double()
    p[0, 0, 2] = p[0, 1, 1] = p[0, 3, 3] = p[0, 2, 5] = p[0, 4, 4] = 1.0
    scores = Scores(scores.tokens, p.log(), p, scores.hidden, scores.finite)
    tree = Draft(tokens, torch.tensor([4]), torch.tensor([[-1, 0, -1, 2]]))
    verdict = Standard().verify(tree, scores, noise(1), None)
    assert verdict.lengths.tolist() == [2]
    assert verdict.path[0, :2].tolist() == [2, 3]
    assert torch.equal(verdict.next_probs[0], p[0, 4])


def test_memory_counts_the_places_that_were_examined():
    # Kept nodes and the first miss, not what follows it, and nothing at the end of a draft. Catches a memory that
    # advances for padding or after a miss, and one shared between rows.
    draft, scores = case(6)
    rule = Counting()
    start = torch.tensor([rule.start((1, 2))] * ROWS, dtype=torch.float64)
    verdict = rule.verify(draft, scores, noise(), start)
    even = (draft.tokens % 2 == 0) & (torch.arange(NODES) < draft.sizes.unsqueeze(1))
    lengths = even.long().cumprod(1).sum(1)
    assert torch.equal(verdict.lengths, lengths)
    assert torch.equal(verdict.memory[:, 0], 2.0 + lengths + (lengths < draft.sizes))
    assert bool((start == 2.0).all())


def test_memory_changes_what_later_places_of_the_same_draft_see():
    draft, scores = case(7)
    draft = Draft(draft.tokens * 0, torch.full((ROWS,), NODES), law=draft.law)
    verdict = Counting(most=3).verify(draft, scores, noise(), torch.ones((ROWS, 1), dtype=torch.float64))
    assert verdict.lengths.tolist() == [2] * ROWS


def test_a_rule_without_memory_hands_none_back():
    draft, scores = case(8)
    assert Standard().verify(draft, scores, noise(), None).memory is None


def test_a_place_has_the_features_of_the_node_itself():
    # Row 1 + j of the target's features belongs to node j: a judge looks at the drafted token, not at its parent.
    seen = {}

    @frozen
    class Look(PointwiseVerifier):
        family = "other"
        exactness = "lossy"

        def acceptance(self, at: Place) -> Tensor:
            seen["nodes"] = at.hidden[3]
            return torch.ones_like(at.p)

        def correct(self, at: Place) -> Tensor:
            seen["leaf"] = at.hidden[3]
            return at.p

    draft, scores = case(9)
    Look().verify(draft, scores, noise(), None)
    assert torch.equal(seen["nodes"], scores.hidden[3][:, 1:])
    assert torch.equal(seen["leaf"], scores.hidden[3][torch.arange(ROWS), draft.sizes])


def test_defaults_of_a_pointwise_rule():
    # A third party writes `acceptance` only.
    rule = Scripted()
    assert (rule.replacement, rule.memory, rule.taps, rule.needs) == ("residual", 0, (), frozenset())
    assert not rule.dominates_standard
    assert Standard().trees
    assert Nucleus().trees
    assert not Typical().trees
    assert rule.start((1,)) == ()
