"""Rules that look at a whole draft: block verification and FLy, against slow references and by exact enumeration."""

import itertools

import pytest
import torch
from torch import Tensor

from specdec.law import Dense, Logits, PointMass, Sparse
from specdec.noise import Noise
from specdec.probability import at as gather
from specdec.probability import sample
from specdec.testing import Model, chain, output_law, point_model, random_model, token_law
from specdec.theory import standard_acceptance
from specdec.types import SOURCES, Draft, Scores, Verdict
from specdec.verifier import Verifier
from specdec_plugins.verifiers.block import Block
from specdec_plugins.verifiers.fly import Fly
from specdec_plugins.verifiers.standard import Standard

HIGHEST = 1.0 - 2.0**-53


class Script:
    """Gives the numbers that were written for it."""

    def __init__(self, uniform: Tensor) -> None:
        self.written = uniform

    def uniform(self, stream: str, count: int) -> Tensor:
        assert (stream, count) == ("accept", self.written.shape[1])
        return self.written


def f64(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch(seed: int, rows: int, nodes: int, size: int, dtype: torch.dtype = torch.float64) -> tuple[Draft, Scores]:
    """Ragged drafts really drawn from q; every third row is greedy, every fifth cut to its best tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn((rows, nodes + 1, size), generator=generator, dtype=torch.float64)
    p = logits.softmax(-1)
    q = 0.5 * p[:, :nodes] + 0.5 * torch.randn((rows, nodes, size), generator=generator, dtype=torch.float64).softmax(
        -1
    )
    best = torch.where(p >= p.topk(2).values[..., -1:], p, 0.0)
    p[::5] = (best / best.sum(-1, keepdim=True))[::5]
    p[::3] = torch.nn.functional.one_hot(logits.argmax(-1), size).double()[::3]
    tokens = sample(q, torch.rand((rows, nodes), generator=generator, dtype=torch.float64))
    sizes = torch.randint(0, nodes + 1, (rows,), generator=generator)
    fed = torch.cat([torch.zeros((rows, 1), dtype=torch.int64), tokens], 1)
    scores = Scores(fed, logits.to(dtype), p.to(dtype), {}, torch.ones(rows, dtype=torch.bool))
    return Draft(tokens, sizes, law=Dense(q.to(dtype))), scores


def noise(rows: int, step: int = 0) -> Noise:
    return Noise(tuple(range(rows)), (step,) * rows)


def ratio(p: list[float], q: list[float], x: int) -> float:
    return p[x] / q[x] if q[x] > 0 else 0.0


def slow_block(
    p: list[list[float]], q: list[list[float]], tokens: list[int], u: list[float]
) -> tuple[int, list[float]]:
    """Block verification of one draft, token by token; p has one row more than q."""
    drafted, weight, kept, mine = len(tokens), 1.0, 0, 1.0
    for i in range(1, drafted + 1):
        weight = min(1.0, weight * ratio(p[i - 1], q[i - 1], tokens[i - 1]))
        enough = weight
        if i < drafted:
            left = sum(max(weight * a - b, 0.0) for a, b in zip(p[i], q[i], strict=True))
            enough = 1.0 if left == 0 and weight == 1 else left / (left + 1 - weight)
        if u[i - 1] < enough:
            kept, mine = i, weight
    if kept == drafted:
        return kept, p[kept]
    rest = [max(mine * a - b, 0.0) for a, b in zip(p[kept], q[kept], strict=True)]
    return kept, [value / sum(rest) for value in rest] if sum(rest) > 1e-8 else p[kept]


def slow_fly(
    p: list[list[float]], q: list[list[float]], raw: list[list[float]], tokens: list[int], u: list[float], rule: Fly
) -> tuple[int, list[float]]:
    """FLy on one draft; `raw` is softmax of the logits."""
    native = [u[i] < min(1.0, ratio(p[i], q[i], x)) for i, x in enumerate(tokens)]
    for i, x in enumerate(tokens):
        if native[i]:
            continue
        law = f64(raw[i] if sorted(p[i])[-2] == 0 else p[i])
        best = law.sort(descending=True).values[: rule.top_k]
        unsure = -sum(float(v) * float(v.log()) for v in best if v > 0) >= rule.entropy_threshold
        following = native[i + 1 : i + 1 + rule.window]
        if not (unsure and len(following) == rule.window and all(following) and float(law[x]) > 0):
            rest = [max(a - b, 0.0) for a, b in zip(p[i], q[i], strict=True)]
            return i, [value / sum(rest) for value in rest] if sum(rest) > 1e-8 else p[i]
    return len(tokens), p[len(tokens)]


FLYS = [Fly(), Fly(window=1), Fly(window=2), Fly(window=1, entropy_threshold=0.8), Fly(window=1, top_k=1)]


@pytest.mark.parametrize("rule", [Block(), *FLYS], ids=repr)
@pytest.mark.parametrize("law", ["dense", "point"])
# Catches: a wrong row of p or q, sizes taken for the width, the first rejection taken for the last acceptance, a window
# that counts the token itself or reaches past the draft, the raw law above temperature 0.
def test_a_batch_is_the_slow_reference_row_by_row(rule, law):
    lengths = set()
    for seed in range(6):
        draft, scores = batch(seed, 120, 8 if isinstance(rule, Fly) else 4, 5)
        if law == "point":
            draft = Draft(draft.tokens, draft.sizes)
        nodes = draft.tokens.shape[1]
        uniform = noise(120).uniform("accept", nodes)
        verdict = rule.verify(draft, scores, noise(120), None)
        q = (draft.law or PointMass(draft.tokens, 5, torch.float64)).dense()
        raw = scores.logits.softmax(-1)
        for row in range(120):
            size = int(draft.sizes[row])
            p, drafted = scores.probs[row].tolist(), q[row, :size].tolist()
            tokens, u = draft.tokens[row, :size].tolist(), uniform[row, :size].tolist()
            if isinstance(rule, Block):
                kept, law_after = slow_block(p[: size + 1], drafted, tokens, u)
            else:
                kept, law_after = slow_fly(p[: size + 1], drafted, raw[row].tolist(), tokens, u, rule)
            assert int(verdict.lengths[row]) == kept, (seed, row)
            assert torch.allclose(verdict.next_probs[row], f64(law_after), atol=1e-12)
            assert (SOURCES[int(verdict.source[row])] == "bonus") == (kept == size)
            lengths.add(kept)
        assert torch.equal(verdict.path, torch.arange(nodes).expand(120, nodes))
    assert lengths >= {0, 1, 2}


@pytest.mark.parametrize("rule", [Block(), *FLYS], ids=repr)
# Catches: a law class of a draft that is read as another.
def test_every_kind_of_law_gives_the_same_verdict(rule):
    draft, scores = batch(9, 60, 6, 5)
    q = draft.law.dense()
    order = q.topk(5, dim=-1)
    first = rule.verify(draft, scores, noise(60), None)
    for law in (Logits(q.log()), Sparse(order.indices, order.values, 5)):
        other = rule.verify(Draft(draft.tokens, draft.sizes, law=law), scores, noise(60), None)
        assert torch.equal(first.lengths, other.lengths)
        assert torch.allclose(first.next_probs, other.next_probs, atol=1e-12)


# Block verification.


# Catches: u <= h, a scan that stops at the first failure, token residuals, h of the last token from Z.
def test_block_golden_case():
    # w_1 = .5/.8 = .625, Z_1 = .625 * .9 - .5 = .0625, h_1 = .0625/.4375 = 1/7. Token 0 then has w_2 = 1, token 1 1/8.
    p, q = f64([[[0.5, 0.5], [0.9, 0.1], [0.3, 0.7]]]), f64([[[0.8, 0.2], [0.5, 0.5]]])
    scores = Scores(torch.zeros((1, 3)).long(), p.log(), p, {}, torch.ones(1).bool())

    def verify(second: int, *uniform: float) -> Verdict:
        return Block().verify(Draft(torch.tensor([[0, second]]), torch.tensor([2]), law=Dense(q)), scores,
                              Script(f64([uniform])), None)  # fmt: skip

    for second, uniform, kept, follows in (
        (0, (HIGHEST, HIGHEST), 2, [0.3, 0.7]),
        (1, (HIGHEST, 0.1249), 2, [0.3, 0.7]),
        (1, (1 / 7 - 1e-9, 0.1251), 1, [1.0, 0.0]),
        (1, (1 / 7 + 1e-9, 0.125), 0, [0.0, 1.0]),
    ):
        verdict = verify(second, *uniform)
        assert verdict.lengths.tolist() == [kept], uniform
        assert torch.allclose(verdict.next_probs, f64([follows])), uniform


Cases = tuple[Tensor, Draft, Scores]


def drafts(models: list[tuple[Model, Model]], nodes: int) -> Cases:
    """Every draft of so many tokens, model after model, and its probability."""
    weights, tokens, laws, probs = [], [], [], []
    for p, q in models:
        size = p[0].shape[-1]
        drawn = torch.tensor(list(itertools.product(range(size), repeat=nodes)))
        codes = torch.zeros((len(drawn), nodes + 1), dtype=torch.int64)
        for node in range(nodes):
            codes[:, node + 1] = codes[:, node] * size + drawn[:, node]
        tokens.append(drawn)
        laws.append(torch.stack([q[node][codes[:, node]] for node in range(nodes)], 1))
        probs.append(torch.stack([p[node][codes[:, node]] for node in range(nodes + 1)], 1))
        weights.append(gather(laws[-1], drawn).prod(1))
    chosen, whole = torch.cat(tokens), torch.cat(probs)
    fed = torch.cat([chosen[:, :1] * 0, chosen], 1)
    scores = Scores(fed, whole.log(), whole, {}, torch.ones(len(chosen), dtype=torch.bool))
    return torch.cat(weights), Draft(chosen, torch.full((len(chosen),), nodes), law=Dense(torch.cat(laws))), scores


def cells(rule: Verifier, draft: Draft, scores: Scores) -> list[tuple[Tensor, Verdict]]:
    """A decomposition of the noise of each row into cells of one verdict each: (share, verdict).

    For rules that compare each uniform with one threshold, whatever the others are. The threshold of a node is found by
    bisection under every corner of the other uniforms; where the corners do not agree there is no decomposition.
    """
    count, nodes = draft.tokens.shape
    threshold = torch.full((count, nodes), torch.nan, dtype=torch.float64)
    for node, corner in itertools.product(range(nodes), itertools.product((0.0, HIGHEST), repeat=nodes - 1)):
        uniform = f64([*corner[:node], 0.0, *corner[node:]]).repeat(count, 1)

        def kept(value: Tensor, node: int = node, uniform: Tensor = uniform) -> Tensor:
            uniform[:, node] = value
            return rule.verify(draft, scores, Script(uniform), None).lengths

        below, above = torch.zeros(count).double(), torch.ones(count).double()
        low = kept(below)
        split = low != kept(below + HIGHEST)
        if not bool(split.any()):
            continue
        for _ in range(36):
            middle = (below + above) / 2
            same = kept(middle) == low
            below, above = torch.where(same, middle, below), torch.where(same, above, middle)
        found = (below + above) / 2
        known = split & ~threshold[:, node].isnan()
        assert bool(((found - threshold[:, node]).abs() < 1e-9)[known].all()), "a threshold depends on other numbers"
        threshold[:, node] = torch.where(split, found, threshold[:, node])
    # A node without a threshold changes nothing wherever its uniform lies.
    threshold = threshold.nan_to_num(nan=0.5)
    made = []
    for corner in itertools.product((0.0, HIGHEST), repeat=nodes):
        share = torch.where(f64(list(corner)) == 0.0, threshold, 1 - threshold).prod(1)
        made.append((share, rule.verify(draft, scores, Script(f64(list(corner)).repeat(count, 1)), None)))
    return made


def cell_law(rule: Verifier, p: Model, q: Model, nodes: int, tokens: int) -> Tensor:
    """The law of the first tokens, as `specdec.testing.output_law`, for rules whose thresholds are independent."""
    size = p[0].shape[-1]
    weight, draft, scores = drafts([(p, q)], nodes)
    parts = [torch.zeros(size**length, dtype=torch.float64) for length in range(tokens + 1)]
    for share, verdict in cells(rule, draft, scores):
        for row, chance in enumerate((weight * share).tolist()):
            kept, code = int(verdict.lengths[row]), 0
            for node in range(min(kept, tokens)):
                code = code * size + int(draft.tokens[row, node])
            if kept >= tokens:
                parts[tokens][code] += chance
            else:
                parts[kept + 1].view(-1, size)[code] += chance * verdict.next_probs[row]
    for length in range(tokens):
        parts[length + 1] += (parts[length].unsqueeze(1) * p[length]).flatten()
    return parts[tokens]


# Catches: the kit's own enumeration being wrong about a rule that keeps tokens after one that failed.
@pytest.mark.parametrize("rule", [Block(), Standard()], ids=repr)
def test_two_enumerations_of_a_lossless_rule_agree_and_find_the_target(rule):
    for seed in range(4):
        p, q = random_model(3, 4, seed, zeros=seed % 2), random_model(3, 4, seed + 50)
        law = cell_law(rule, p, q, 3, 3)
        assert float((law - output_law(rule, p, q, chain(3), 3)).abs().max()) < 1e-9
        assert float((law - token_law(p, 3)).abs().max()) < 1e-9


# Catches: a rule that is lossless and slower: with the law above, only block verification passes.
def test_block_accepts_more_than_token_verification_on_most_models():
    models = [(random_model(3, 4, seed), random_model(3, 4, 1000 + seed)) for seed in range(80)]
    weight, draft, scores = drafts(models, 3)
    block, token = (
        sum((weight * share * verdict.lengths).view(80, -1).sum(1) for share, verdict in cells(rule, draft, scores))
        for rule in (Block(), Standard())
    )
    assert bool((block >= token - 1e-9).all())
    assert int((block > token + 1e-6).sum()) >= 60


# Catches: a gain where there is none to be had: one token, or a drafter of point masses with p never above q.
def test_block_is_token_verification_for_one_token():
    for seed in range(20):
        draft, scores = batch(seed, 200, 1, 5)
        for one in (draft, Draft(draft.tokens, draft.sizes)):
            block, token = (rule.verify(one, scores, noise(200), None) for rule in (Block(), Standard()))
            assert torch.equal(block.lengths, token.lengths)
            assert torch.allclose(block.next_probs, token.next_probs, atol=1e-12)
            assert torch.equal(block.source, token.source)


# Catches: 1 added to a small number and taken away again, which in float32 leaves other digits of it.
def test_block_keeps_in_float32_what_has_nothing_to_lose():
    # Where p(x_1) >= q(x_1) the first weight is 1, so its threshold is 1 however little is left for the second token.
    generator = torch.Generator().manual_seed(0)
    p = torch.rand((4000, 3, 6), generator=generator) + 0.05
    p = p / p.sum(-1, keepdim=True)
    q = p[:, :2] * (1 + 1e-5 * torch.randn((4000, 2, 6), generator=generator))
    q = q / q.sum(-1, keepdim=True)
    tokens = torch.stack([(p[:, 0] - q[:, 0]).argmax(-1), (q[:, 1] - p[:, 1]).argmax(-1)], 1)
    draft = Draft(tokens, torch.full((4000,), 2), law=Dense(q))
    scores = Scores(tokens[:, :1].repeat(1, 3), p.log(), p, {}, torch.ones(4000, dtype=torch.bool))
    lengths = Block().verify(draft, scores, Script(f64([[HIGHEST, HIGHEST]]).repeat(4000, 1)), None).lengths
    assert set(lengths.tolist()) <= {1, 2}
    assert 1 in lengths.tolist()


# FLy.


def fly_case(tokens: list[int], logits: list[float], size: int | None = None) -> tuple[Draft, Scores]:
    """A greedy row of which every position has the same logits, best token 0."""
    values = f64([[logits] * (len(tokens) + 1)])
    p = torch.zeros_like(values)
    p[..., 0] = 1.0
    draft = Draft(torch.tensor([tokens]), torch.tensor([len(tokens) if size is None else size]))
    return draft, Scores(torch.zeros((1, len(tokens) + 1)).long(), values, p, {}, torch.ones(1).bool())


UNSURE, SURE = [1.0, 0.9, 0.0], [9.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("tokens", "logits", "size", "kept"),
    [
        ([0, 1, 0, 0, 0], UNSURE, 5, 5),  # two follow and match
        ([0, 1, 0, 0, 0], SURE, 5, 1),  # the target is sure
        ([0, 1, 0, 1, 0], UNSURE, 5, 1),  # the second of the window differs
        ([0, 0, 0, 1, 0], UNSURE, 5, 3),  # the window is not whole
        ([0, 1, 0, 0, 0], UNSURE, 3, 1),  # nor here: the row's own draft ends before
        ([1, 0, 0, 1, 0, 0], UNSURE, 6, 6),  # twice
        ([1, 1, 0, 0], UNSURE, 4, 0),  # a mismatch right behind one
        ([2, 0, 0], UNSURE, 3, 3),  # the third best, which is possible
        ([-1, 0, 0], UNSURE, 3, 0),  # a placeholder is not
    ],
)
# Catches: a window that includes the token itself or is one short, padding in it, a gate with the wrong sign.
def test_fly_passes_over_a_mismatch_the_draft_recovers_from(tokens, logits, size, kept):
    draft, scores = fly_case(tokens, logits, size)
    verdict = Fly(window=2).verify(draft, scores, Script(torch.zeros(1, len(tokens)).double()), None)
    assert verdict.lengths.tolist() == [kept]
    assert verdict.next_probs.tolist() == [[1.0, 0.0, 0.0]]
    standard = Standard().verify(draft, scores, Script(torch.zeros(1, len(tokens)).double()), None)
    assert int(standard.lengths) <= kept


# Catches: > for >=, an entropy of all tokens or of renormalised ones, bits for nats, other constants.
def test_fly_gate_is_the_entropy_of_the_best_tokens():
    logits = [1.0, 0.5, 0.0, -0.5]
    best = f64(logits).softmax(-1)[:3]
    exact = float(-(best * best.log()).sum())
    draft, scores = fly_case([1, 0, 0], logits)
    for threshold, kept in ((exact - 1e-9, 3), (exact + 1e-9, 0)):
        rule = Fly(window=2, entropy_threshold=threshold)
        assert rule.verify(draft, scores, Script(torch.zeros(1, 3).double()), None).lengths.tolist() == [kept]
    assert (Fly().window, Fly().entropy_threshold, Fly().top_k) == (5, 0.3, 3)


# Catches: a native decision that is argmax match above temperature 0.
def test_fly_judges_short_drafts_as_the_standard_rule():
    for seed in range(5):
        draft, scores = batch(seed, 300, 5, 6)
        fly, standard = (rule.verify(draft, scores, noise(300), None) for rule in (Fly(window=5), Standard()))
        assert torch.equal(fly.lengths, standard.lengths)
        assert torch.equal(fly.next_probs, standard.next_probs)


# Catches: a rejection that is passed over and counted in the law all the same: the law of three tokens over all noise.
@pytest.mark.parametrize("window", [1, 2])
def test_fly_law_is_that_of_its_decisions(window):
    rule, far = Fly(window=window, entropy_threshold=0.5), []
    for seed in range(4):
        p, q = random_model(3, 4, seed), random_model(3, 4, 30 + seed)
        expected = torch.zeros(27, dtype=torch.float64)
        weight, draft, scores = drafts([(p, q)], 3)
        accept = standard_acceptance(gather(scores.probs[:, :3], draft.tokens), draft.law.at(draft.tokens))
        for row in range(len(weight)):
            laws, drawn = scores.probs[row].tolist(), draft.law.dense()[row].tolist()
            tokens = draft.tokens[row].tolist()
            for native in itertools.product((True, False), repeat=3):
                chance = float(weight[row])
                for i, m in enumerate(native):
                    chance *= float(accept[row, i]) if m else 1 - float(accept[row, i])
                u = [0.0 if m else 1.0 for m in native]
                kept, follows = slow_fly(laws, drawn, laws, tokens, u, rule)
                joint = torch.ones(1, dtype=torch.float64)
                for depth in range(3):
                    if depth < kept:
                        step = torch.nn.functional.one_hot(torch.tensor([tokens[depth]]), 3).double()
                    else:
                        step = f64([follows]) if depth == kept else p[depth]
                    joint = (joint.unsqueeze(1) * step).flatten()
                expected += chance * joint
        law = cell_law(rule, p, q, 3, 3)
        assert float((law - expected).abs().max()) < 1e-9, seed
        far.append(float((law - token_law(p, 3)).abs().max()))
    assert max(far) > 1e-2  # lossy where the target is unsure


# Catches: a deterministic drafter that breaks the look-ahead rules' laws.
def test_block_with_a_deterministic_drafter_is_lossless():
    for seed in range(6):
        p, q = random_model(4, 4, seed, zeros=seed % 2), point_model(random_model(4, 4, 90 + seed))
        law = output_law(Block(), p, q, chain(3), 3, wrap=lambda tokens, probs: None)
        assert float((law - token_law(p, 3)).abs().max()) < 1e-9
