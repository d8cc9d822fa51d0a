"""Laws of emitted tokens by exact enumeration through the real `verify`, in float64, on vocabularies of 3 to 8."""

import pytest
import torch
from torch import Tensor

from specdec import theory
from specdec.law import Dense, Law, Logits, PointMass, Sparse
from specdec.probability import one_hot
from specdec.testing import Model, chain, output_law, point_model, random_model, token_law
from specdec.verifier import PointwiseVerifier
from specdec_plugins.verifiers.greedy import Greedy
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.standard import Standard
from specdec_plugins.verifiers.typical import Typical

TOLERANCE = 1e-9
MODELS = range(12)  # all combinations of what `pair` makes of a number
TREE = (-1, -1, 0, 0, 1, 1)


def f64(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(left: Tensor, right: Tensor) -> bool:
    return float((left - right).abs().max()) < TOLERANCE


def pair(seed: int, depth: int = 4, largest: int = 8) -> tuple[Model, Model]:
    """A target and a drafter; every third target and every fourth drafter has zeros."""
    vocabulary = 3 + seed % (largest - 2)
    return (
        random_model(vocabulary, depth, 2 * seed, zeros=1 if seed % 3 == 2 else 0),
        random_model(vocabulary, depth, 2 * seed + 1, zeros=1 if seed % 4 == 3 else 0),
    )


def dense(tokens: Tensor, probs: Tensor) -> Law:
    return Dense(probs)


def logits(tokens: Tensor, probs: Tensor) -> Law:
    # A temperature and a shift per node: what is handed over is not log q itself.
    return Logits(0.7 * (probs.log() + 3.0), 0.7)


def sparse(tokens: Tensor, probs: Tensor) -> Law:
    # Candidates in falling order and without the last one where it has no mass, as a top-k drafter has them.
    best = probs.topk(probs.shape[-1] - int((probs.amin(-1) == 0).all()), dim=-1)
    return Sparse(best.indices, best.values, probs.shape[-1])


def nothing(tokens: Tensor, probs: Tensor) -> None:
    return None


def point(tokens: Tensor, probs: Tensor) -> Law:
    return PointMass(tokens, probs.shape[-1], probs.dtype)


def closed_form(rule: PointwiseVerifier, p: Model, q: Model, nodes: int, tokens: int) -> Tensor:
    """The joint law of the first tokens from the definition of a rule alone, position by position.

    A kept token is followed by the next position of the draft, a replaced one by the target itself, and a draft kept to
    its end by the rule's bonus law.
    """
    size = p[0].shape[-1]
    speculative, plain = p[0].new_ones(1), p[0].new_zeros(1)
    for depth in range(tokens):
        accept, follow = _accept(rule, p[depth], q[depth]) if depth < nodes else (None, _bonus(rule, p[depth]))
        plain = (plain.unsqueeze(1) * p[depth]).flatten()
        if accept is None:
            plain += (speculative.unsqueeze(1) * follow).flatten()
            speculative = p[0].new_zeros(size ** (depth + 1))
        else:
            kept = q[depth] * accept
            lost = (speculative * (1 - kept.sum(-1))).unsqueeze(1)
            plain += (lost * follow).flatten()
            speculative = (speculative.unsqueeze(1) * kept).flatten()
    return speculative + plain


def _accept(rule: PointwiseVerifier, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Acceptance and replacement in naive scalar code, nothing of the package but the options of the rule."""
    accept, follow = torch.zeros_like(p), torch.zeros_like(p)
    for row in range(p.shape[0]):
        entropy = -sum(float(x) * float(torch.log(x + 1e-5)) for x in p[row])
        threshold = min(0.09, 0.3 * 2.718281828459045**-entropy)
        for x in range(p.shape[1]):
            px, qx = float(p[row, x]), float(q[row, x])
            ratio = 0.0 if qx == 0 else min(1.0, px / qx)
            if isinstance(rule, Nucleus):
                above = sum(float(y) for y in p[row] if y > px)
                accept[row, x] = 1.0 if px > 0 and above < rule.theta else ratio
            elif isinstance(rule, Typical):
                accept[row, x] = float(px > threshold)
            elif isinstance(rule, Greedy):
                accept[row, x] = float(x == int(p[row].argmax()))
            else:
                accept[row, x] = ratio
        residual = (p[row] - q[row]).clamp(min=0)
        kind = rule.replacement
        best = one_hot(p[row].argmax(), p.shape[1], p.dtype)
        standard = residual / residual.sum() if residual.sum() > 1e-8 else p[row]
        follow[row] = {"residual": standard, "target": p[row], "argmax": best}[kind]
    return accept, follow


def _bonus(rule: PointwiseVerifier, p: Tensor) -> Tensor:
    return one_hot(p.argmax(-1), p.shape[-1], p.dtype) if rule.replacement == "argmax" else p


# Standard: the output is the target's.


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("wrap", [dense, logits, sparse], ids=lambda wrap: wrap.__name__)
def test_standard_reproduces_the_target_for_the_first_two_and_three_tokens(wrap, nodes):
    # Catches a residual that is not renormalised, rows of p or q shifted by one, a bonus row off by one, a wrong law
    # class, and any reuse of one row's table for another: every prefix has its own tables.
    for seed in MODELS:
        p, q = pair(seed, largest=8 if wrap is dense and nodes < 3 else 5)
        law = output_law(Standard(), p, q, chain(nodes), 3, wrap=wrap)
        assert close(law, token_law(p, 3)), seed
        assert close(law.view(-1, p[0].shape[-1]).sum(1), token_law(p, 2)), seed


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("wrap", [nothing, point], ids=lambda wrap: wrap.__name__)
def test_standard_reproduces_the_target_with_a_deterministic_drafter(wrap, nodes):
    # Catches a residual that keeps the rejected token, and an acceptance other than p(x).
    for seed in MODELS:
        p, q = pair(seed)
        law = output_law(Standard(), p, point_model(q), chain(nodes), 3, wrap=wrap)
        assert close(law, token_law(p, 3)), seed
        assert close(law.view(-1, p[0].shape[-1]).sum(1), token_law(p, 2)), seed


def test_standard_reproduces_the_target_where_draft_and_target_share_no_token():
    # R = 1: catches a fallback that fires too early, and 0/0 in the ratio.
    p = (f64([[0.0, 0.6, 0.4, 0.0]]),)
    q = (f64([[0.3, 0.0, 0.0, 0.7]]),)
    p = (*p, *random_model(4, 2, 1)[1:])
    assert close(output_law(Standard(), p, q, chain(1), 2), token_law(p, 2))


def test_standard_reproduces_the_target_where_the_draft_is_the_target():
    # R = 0: nothing may be rejected, and nothing may divide by an empty residual.
    p = random_model(5, 4, 9)
    assert close(output_law(Standard(), p, p, chain(3), 3), token_law(p, 3))


def test_standard_is_exact_in_float32_to_its_rounding():
    # The engine hands over float32; catches a rule that only works in one dtype.
    p, q = random_model(5, 3, 3, dtype=torch.float32), random_model(5, 3, 4, dtype=torch.float32)
    assert float((output_law(Standard(), p, q, chain(2), 2) - token_law(p, 2)).abs().max()) < 1e-6


def test_a_law_that_was_not_sampled_from_is_not_lossless():
    # The measure itself must be able to fail: the known fault of raw probabilities beside sampling after top-k.
    p, q, other = random_model(5, 3, 0), random_model(5, 3, 1), random_model(5, 3, 2)
    wrong = output_law(Standard(), p, q, chain(1), 2, wrap=lambda tokens, probs: Dense(other[0].expand_as(probs)))
    assert float((wrong - token_law(p, 2)).abs().max()) > 1e-3


# Trees of standard: recursive rejection over siblings.


@pytest.mark.parametrize("replace", [True, False], ids=["independent", "without_replacement"])
def test_standard_over_sampled_siblings_reproduces_the_target(replace):
    # Catches siblings tested against p instead of what is left of it, a residual with the parent's or the first
    # sibling's q, children of a rejected node that are still walked, and a bonus after the wrong node.
    for seed in range(2):
        p, q = random_model(3, 4, 10 + seed), random_model(3, 4, 20 + seed)
        assert close(output_law(Standard(), p, q, TREE, 3, replace=replace), token_law(p, 3)), seed


@pytest.mark.parametrize("parents", [(-1, -1, -1), (-1, 0, -1, 2), (-1, 0, 0, 1, -1), (-1, 0, 1, 0)])
@pytest.mark.parametrize("replace", [True, False], ids=["independent", "without_replacement"])
def test_standard_reproduces_the_target_on_uneven_trees(parents, replace):
    # Nodes in depth-first order and leaves of different depth; catches an order that only works level by level.
    for seed in range(2):
        p, q = random_model(3, 4, 30 + seed), random_model(3, 4, 40 + seed)
        assert close(output_law(Standard(), p, q, parents, 2, replace=replace), token_law(p, 2)), seed


def test_standard_reproduces_the_target_over_deterministic_siblings():
    # Top-2 children without a law: the second child's acceptance is p(x) over what the first left.
    p, q = random_model(5, 4, 50), random_model(5, 4, 51)
    first = point_model(q)
    second = point_model(tuple(table * (one == 0) for table, one in zip(q, first, strict=True)))
    # Drawn without replacement these are always the two best tokens, in either order.
    drawn = tuple((one + two) / 2 for one, two in zip(first, second, strict=True))
    law = output_law(Standard(), p, drawn, (-1, -1, 0, 0), 2, replace=False, wrap=nothing)
    assert close(law, token_law(p, 2))


def test_nucleus_on_a_tree_deviates_by_the_excess_of_the_first_child_only():
    # Catches the nucleus being applied to later siblings, where it would deviate by more than E.
    for seed in range(4):
        p, q = random_model(5, 3, 70 + seed), random_model(5, 3, 80 + seed)
        for replace, theta in ((True, 0.3), (False, 0.3), (False, 0.8)):
            law = output_law(Nucleus(theta=theta), p, q, (-1, -1), 1, replace=replace)
            expected = float(theory.nucleus_excess(p[0], q[0], theta))
            assert abs(float((law - p[0][0]).abs().sum() / 2) - expected) < TOLERANCE


def test_nucleus_on_a_tree_does_not_relax_later_siblings():
    # By hand: no excess in the nucleus {0, 1} of p, so the output is p. After 3 is rejected (1/6, 5/6, 0, 0) is left,
    # and a second child 0 has q = .45 there: kept by the standard rule at 37 %, always if the nucleus were used again.
    p = (f64([[0.5, 0.45, 0.04, 0.01]]), *random_model(4, 2, 3)[1:])
    q = (f64([[0.45, 0.2, 0.05, 0.3]]),)
    law = output_law(Nucleus(theta=0.94), p, q, (-1, -1), 1)
    assert close(law, p[0][0])


@pytest.mark.parametrize("replace", [True, False])
def test_greedy_emits_the_most_probable_path_on_any_tree(replace):
    # Catches a later sibling kept although it is not the argmax.
    for seed in range(3):
        p, q = random_model(3, 4, 90 + seed), random_model(3, 4, 95 + seed)
        law = output_law(Greedy(), p, q, TREE, 2, replace=replace)
        # What follows the emitted tokens is the target itself, so the second token is greedy only inside the block.
        first = law.view(3, 3).sum(1)
        assert close(first, one_hot(p[0][0].argmax(), 3, torch.float64))


# Every pointwise rule: its law is the one its definition says.

RULES = [
    Standard(),
    Greedy(),
    Nucleus(theta=0.5),
    Nucleus(theta=0.9),
    Nucleus(theta=1.0),
    Nucleus(theta=1e-6),
    Typical(),
    Typical(replacement="residual"),
    Typical(replacement="argmax"),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_the_joint_law_of_a_rule_is_its_definition_position_by_position(rule, nodes):
    # Catches positions after an accepted token that see the wrong p or q, a bonus drawn from the wrong law, and any
    # difference between acceptance and accept_at.
    for seed in range(5):
        p, q = pair(seed, largest=6)
        law = output_law(rule, p, q, chain(nodes), 3)
        assert close(law, closed_form(rule, p, q, nodes, 3)), seed


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_joint_law_of_a_rule_with_a_deterministic_drafter_is_its_definition(rule):
    for seed in range(5):
        p, q = pair(seed, largest=6)
        law = output_law(rule, p, point_model(q), chain(2), 3, wrap=nothing)
        assert close(law, closed_form(rule, p, point_model(q), 2, 3)), seed


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_theory_output_law_is_the_law_of_the_implemented_rule(rule):
    # The diagnostics and the decoder must speak of the same rule.
    for seed in MODELS:
        p, q = pair(seed, depth=2)
        accept, follow = _accept(rule, p[0], q[0])
        law = output_law(rule, p, q, chain(1), 1)
        assert close(law, theory.output_law(q[0], accept, follow)[0]), seed


# Nucleus: the golden case and the law of a position.


def test_nucleus_golden_case():
    p = (f64([[0.5, 0.3, 0.15, 0.05]]), *random_model(4, 2, 0)[1:])
    q = (f64([[0.7, 0.1, 0.05, 0.15]]),)
    assert abs(float(theory.rejection(p[0], q[0])) - 0.3) < 1e-12
    assert abs(float(theory.nucleus_excess(p[0], q[0], 0.9)) - 0.2) < 1e-12
    law = output_law(Nucleus(theta=0.9), p, q, chain(1), 1)
    assert close(law, f64([0.7, 1 / 6, 1 / 12, 0.05]))
    assert abs(float((law - p[0][0]).abs().sum() / 2) - 0.2) < TOLERANCE


def nucleus_law(p: Tensor, q: Tensor, theta: float) -> tuple[Tensor, float, float]:
    """p + e - (E/R)(p - q)+ with E and R, the nucleus by a sort: the smallest set of top tokens with mass theta."""
    order = sorted(range(len(p)), key=lambda x: -float(p[x]))
    excess, mass = torch.zeros_like(p), 0.0
    for x in order:
        if mass >= theta or p[x] == 0:
            break
        excess[x] = max(float(q[x] - p[x]), 0.0)
        mass += float(p[x])
    R, E = float((q - p).clamp(min=0).sum()), float(excess.sum())  # noqa: N806  # the letters of the formula
    return p + excess - (E / R) * (p - q).clamp(min=0), E, R


@pytest.mark.parametrize("theta", [0.3, 0.6, 0.9, 0.95, 1.0])
def test_nucleus_law_is_the_published_formula_and_its_deviation_is_e(theta):
    # 40 pairs per theta; catches the crossing token left out, theta compared with the mass including the token, the
    # nucleus of q instead of p, and a residual that leaves out the nucleus.
    for seed in range(40):
        p, q = pair(seed, depth=2)
        expected, e, r = nucleus_law(p[0][0], q[0][0], theta)
        law = output_law(Nucleus(theta=theta), p, q, chain(1), 1)
        assert close(law, expected), seed
        assert abs(float((law - p[0][0]).abs().sum() / 2) - e) < TOLERANCE
        assert e <= r + 1e-12


def test_nucleus_positions_after_an_accepted_token_have_the_conditional_law():
    # The law of the second token given that the first was kept, from the joint law at K = 2 and at K = 1.
    for seed in range(12):
        p, q = pair(seed, depth=3, largest=6)
        size, theta = p[0].shape[-1], 0.8
        kept, _ = _accept(Nucleus(theta=theta), p[0], q[0])
        kept = (q[0] * kept)[0]
        two = output_law(Nucleus(theta=theta), p, q, chain(2), 2).view(size, size)
        one = output_law(Nucleus(theta=theta), p, q, chain(1), 2).view(size, size)
        for x in range(size):
            # Where the first token was replaced, the target follows in both; the difference is the second node's.
            expected = kept[x] * (nucleus_law(p[1][x], q[1][x], theta)[0] - p[1][x])
            assert close(two[x] - one[x], expected), (seed, x)


def test_typical_rejects_at_the_threshold_itself():
    # p(x) > min(epsilon, ...) is strict: catches >=.
    p = (f64([[0.75, 0.25]]), f64([[0.5, 0.5], [0.5, 0.5]]))
    q = (f64([[0.0, 1.0]]),)
    rule = Typical(epsilon=0.25, delta=1e9, replacement="argmax")
    assert close(output_law(rule, p, q, chain(1), 1), f64([1.0, 0.0]))


def test_greedy_emits_the_argmax_only():
    for seed in MODELS:
        p, q = pair(seed, depth=2)
        law = output_law(Greedy(), p, q, chain(1), 1)
        assert close(law, one_hot(p[0][0].argmax(), p[0].shape[-1], torch.float64)), seed
