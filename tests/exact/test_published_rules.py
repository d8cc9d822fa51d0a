"""What holds for every registered rule, and the published numbers of each: closed forms, golden cases, couplings."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec import registry, theory
from specdec.errors import CompatibilityError, ModelError
from specdec.law import Dense, Law, Logits, PointMass, Sparse
from specdec.noise import Noise
from specdec.options import build, describe
from specdec.probability import at as gather
from specdec.probability import normalise, sample, total_variation
from specdec.testing import Model, chain, output_law, point_model, random_model, token_law
from specdec.types import SOURCES, Draft, Scores
from specdec.verifier import FastAccept, Place, PointwiseVerifier, Verifier
from tests.families import tiny
from tests.faults.kit import ask, counting, engine

HIDDEN = 3
# Options to try beside the defaults, and those that a rule cannot do without.
OPTIONS = {
    "nucleus": [{}, {"theta": 0.5}],
    "typical": [{}, {"replacement": "argmax"}, {"replacement": "residual"}],
    "leniency": [{}, {"leniency": 0.95, "entropy_scale": 0.4}, {"leniency": 1.0}, {"leniency": 0.1}],
    "top_k_or": [{}, {"k": 1}, {"k": 3}],
    "margin_or": [{}, {"factor": 0.5}, {"factor": 1.0}],
    "top_k": [{}, {"k": 1}, {"k": 2, "replacement": "argmax"}, {"k": 2, "replacement": "residual"}],
    "threshold": [{}, {"threshold_single": 0.3}, {"threshold_acc": 0.4}],
    "relaxed": [
        {},
        {"top_n": 3, "delta": 0.3},
        *({"top_n": 10, "delta": 0.6, "replacement": r} for r in ("target", "residual")),
    ],
    "mars": [{}, {"ratio": 0.5}],
    "ensemble": [{}, {"weight": 0.0}, {"weight": 0.8}, {"weight": 1.0}],
    "cactus": [{}, {"delta": 0.0}, {"delta": 0.1}],
    "mentored": [{}, {"divergence": 0.0}, {"divergence": 0.02}, {"divergence": 1.0}],
    "cascade": [{}, {"alpha": 0.1}, {"defer": "token"}, {"defer": "token", "alpha": 0.9}],
    "fly": [{}, {"window": 1}, {"window": 2, "top_k": 1}],
    "judge": [{}],
    "synthetic": [{"rates": (0.8, 0.4)}, {"acceptance_length": 2.5}],
}
# Rules that may emit what the target cannot: a law of their own that reaches what the draft reaches, and a fixed rate.
BEYOND_THE_TARGET = {"ensemble", "cascade", "synthetic"}
# Rules that were published for temperature 0 look at the model's own law where the processed one is a single token.
GREEDY_RELAXES = {"leniency", "relaxed", "fly", "judge"}


def cases() -> list[tuple[str, dict]]:
    found = []
    for name in registry.names("verifiers"):
        cls = registry.load("verifiers", name)
        required = [field.name for field in attrs.fields(cls) if field.init and field.default is attrs.NOTHING]
        if name in OPTIONS or not required:
            found += [(name, options) for options in OPTIONS.get(name, [{}])]
    return [case for case in found if not facts(case).memory]  # what remembers has no law of one position


def label(case: tuple[str, dict]) -> str:
    return f"{case[0]}({', '.join(f'{key}={value}' for key, value in case[1].items())})"


def make(name: str, options: dict, folder: object) -> Verifier:
    if name == "judge":
        path = folder / "head.safetensors"
        save_file({"weight": torch.tensor([1.0, -2.0, 0.5]), "bias": torch.tensor([0.1])}, path)
        options = {"weights": str(path), **options}
    rule = registry.load("verifiers", name)(**options)
    rule.prepare(None)
    return rule


def facts(case: tuple[str, dict]) -> Verifier:
    """The rule as far as its options say what it is; nothing is loaded."""
    name, options = case
    return registry.load("verifiers", name)(**({"weights": ""} if name == "judge" else {}), **options)


def on_the_line(case: tuple[str, dict]) -> bool:
    """Whether the total variation is claimed to be the acceptance beyond the standard rule's."""
    family = facts(case).family
    return family == "standard_or_set" or (family == "mixture" and case[1].get("defer") != "token")


def rules(*claims: Callable[[tuple[str, dict]], bool], drawn: bool = False, by_the_kit: bool = False) -> Any:
    """Every registered rule of which all claims hold, as `case`; with `drawn` the kind of law of its drafts, too.

    With `by_the_kit` the kit checks the same of every rule at its defaults (tests/conformance/test_check.py): here
    rules that have options are looked at with others than those, and with the defaults in full.
    """
    chosen = [case for case in CASES if all(claim(case) for claim in claims)]
    laws = [(case, law) for case in chosen for law in ("dense", "point") if law == "dense" or takes_points(case)]
    values = laws if drawn else [(case,) for case in chosen]
    twice = [(name, {}) for name, options in OPTIONS.items() if len(options) > 1] if by_the_kit else []
    parameters = [pytest.param(*value, marks=pytest.mark.full if value[0] in twice else ()) for value in values]
    return pytest.mark.parametrize(
        ("case", "law") if drawn else ("case",),
        parameters,
        ids=lambda value: value if isinstance(value, str) else label(value),
    )


def takes_points(case: tuple[str, dict]) -> bool:
    return "draft_law" not in facts(case).needs


def pointwise(case: tuple[str, dict]) -> bool:
    return isinstance(facts(case), PointwiseVerifier)


def featureless(case: tuple[str, dict]) -> bool:
    return "hidden" not in facts(case).needs


def dominating(case: tuple[str, dict]) -> bool:
    return facts(case).dominates_standard


def walks_trees(case: tuple[str, dict]) -> bool:
    return facts(case).trees


def lossless(case: tuple[str, dict]) -> bool:
    return facts(case).exactness == "lossless"


CASES = cases()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("head")


@pytest.fixture
def rule(case, folder):
    return make(*case, folder)


def f64(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def close(left: Tensor, right: Tensor, tolerance: float = 1e-9) -> bool:
    return float((left - right).abs().max()) < tolerance


def laws(shape: tuple[int, ...], seed: int, kind: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Raw logits [..., V] and the law that processors make of them: whole, cut after the best, tied, or greedy."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "tied":
        logits = logits.round()
    p = logits.softmax(-1)
    if kind == "cut":
        p = torch.where(p >= p.topk(max(shape[-1] // 2, 1)).values[..., -1:], p, 0.0)
    if kind == "greedy":
        p = torch.nn.functional.one_hot(p.argmax(-1), shape[-1]).double()
    return logits.to(dtype), (p / p.sum(-1, keepdim=True)).to(dtype)


# What the loop hands over, and, in full, what enumeration does, which the kit tries every day.
SINGLE_AND_DOUBLE = [torch.float32, pytest.param(torch.float64, marks=pytest.mark.full)]
KINDS = ("whole", "cut", "tied", "greedy")


def kernel(rule: PointwiseVerifier, p: Tensor, q: Tensor, logits: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Acceptance [B, V] and law of the replacement [B, V, V], each token drafted in turn with features of its own."""
    rows, size = p.shape
    wide = (rows, size, size)
    hidden = torch.randn((rows, size, HIDDEN), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    token = torch.arange(size).expand(rows, size)
    at = Place(
        p.unsqueeze(1).expand(wide),
        Dense(q.unsqueeze(1).expand(wide)),
        token,
        torch.zeros_like(token),
        logits.unsqueeze(1).expand(wide),
        {-1: hidden.to(p.dtype)},
    )
    follow, _ = normalise(rule.correct(at), at.p)
    return gather(rule.acceptance(at), token), follow


def place(p: Tensor, q: Tensor | Law, token: int = -1, logits: Tensor | None = None, depth: int = 0) -> Place:
    tokens = torch.full(p.shape[:-1], token)
    law = Dense(q) if isinstance(q, Tensor) else q
    hidden = torch.zeros((*p.shape[:-1], HIDDEN), dtype=p.dtype)
    return Place(p, law, tokens, tokens * 0 + depth, p.log() if logits is None else logits, {-1: hidden})


def batch(rows: int, nodes: int, size: int, seed: int, kind: str = "whole", dtype: torch.dtype = torch.float64):
    """Ragged drafts really drawn from q, which is often near p."""
    logits, p = laws((rows, nodes + 1, size), seed, kind, dtype)
    q = 0.5 * laws((rows, nodes, size), seed + 1, "whole", dtype)[1] + 0.5 * p[:, :nodes]
    generator = torch.Generator().manual_seed(seed + 2)
    tokens = sample(q, torch.rand((rows, nodes), generator=generator, dtype=torch.float64))
    hidden = {-1: torch.randn((rows, nodes + 1, HIDDEN), generator=generator, dtype=torch.float64).to(dtype)}
    sizes = torch.randint(0, nodes + 1, (rows,), generator=generator)
    fed = torch.cat([torch.zeros((rows, 1), dtype=torch.int64), tokens], 1)
    return Draft(tokens, sizes, law=Dense(q)), Scores(fed, logits, p, hidden, torch.ones(rows, dtype=torch.bool))


def noise(rows: int, step: int = 0) -> Noise:
    return Noise(tuple(range(rows)), (step,) * rows)


class Fixed:
    """Every uniform is the same number."""

    def __init__(self, rows: int, value: float) -> None:
        self.rows, self.value = rows, value

    def uniform(self, stream: str, count: int) -> Tensor:
        assert stream == "accept"
        return torch.full((self.rows, count), self.value, dtype=torch.float64)


# Whatever the rule.


# Catches: a registered rule that nobody tests because its options are not in the table above.
def test_every_bundled_rule_of_this_table_is_registered():
    assert set(OPTIONS) <= set(registry.names("verifiers"))
    assert {"block", "sample_match", "standard", "greedy"} <= {name for name, _ in CASES}


# Catches: an attribute that became an option because of its annotation, and an option that nobody explains.
@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_every_option_is_explained(name):
    options = describe(registry.load("verifiers", name))
    assert [option.name for option in options if not option.text] == []
    assert not {option.name for option in options} & {"needs", "taps", "trees", "family", "exactness", "paper"}


# Catches: a constant in another dtype, a law that does not sum to 1, work in place, a path longer than the draft, and a
# rule that fails on an empty draft, on point masses, or on a tree that it says it walks.
@rules(by_the_kit=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_verdict_is_a_law_in_the_dtype_of_the_scores(rule, dtype):
    for kind in KINDS:
        draft, scores = batch(12, 3, 7, 1, kind, dtype)
        drafts = [draft, Draft(draft.tokens, draft.sizes), Draft(draft.tokens[:, :0], draft.sizes * 0)]
        if "draft_law" in rule.needs:
            drafts = drafts[::2]
        if rule.trees:
            drafts.append(Draft(draft.tokens, draft.sizes, torch.tensor([-1, -1, 0]).repeat(12, 1), draft.law))
        for one in drafts:
            some = scores if one.tokens.shape[1] else Scores(
                scores.tokens[:, :1], scores.logits[:, :1], scores.probs[:, :1],
                {tap: features[:, :1] for tap, features in scores.hidden.items()}, scores.finite,
            )  # fmt: skip
            tensors = [one.tokens, one.sizes, some.probs, some.logits, draft.law.dense()]
            before = [tensor.clone() for tensor in tensors]
            verdict = rule.verify(one, some, noise(12), None)
            again = rule.verify(one, some, noise(12), None)
            assert all(torch.equal(was, now) for was, now in zip(before, tensors, strict=True))
            assert torch.equal(verdict.lengths, again.lengths)
            assert torch.equal(verdict.next_probs, again.next_probs)
            assert verdict.next_probs.dtype == dtype
            assert verdict.source.dtype == torch.int8
            assert torch.allclose(verdict.next_probs.sum(-1), torch.ones(12, dtype=dtype))
            assert bool((verdict.next_probs >= 0).all())
            assert bool((verdict.lengths <= one.sizes).all())
            if not one.tokens.shape[1]:
                assert verdict.source.tolist() == [SOURCES.index("bonus")] * 12


# Catches: a leaf that is treated as a rejection: the token after a whole draft is the target's.
@rules()
def test_a_draft_kept_to_its_end_is_followed_by_the_target(rule):
    draft, scores = batch(40, 3, 7, 2)
    verdict = rule.verify(draft, scores, Fixed(40, 0.0), None)
    whole = verdict.lengths == draft.sizes
    assert bool(whole.any())
    expected = scores.probs[torch.arange(40), draft.sizes]
    if isinstance(rule, PointwiseVerifier) and rule.replacement == "argmax":
        expected = torch.nn.functional.one_hot(expected.argmax(-1), 7).double()
    assert close(verdict.next_probs[whole], expected[whole])
    assert set(verdict.source[whole].tolist()) == {SOURCES.index("bonus")}


# Catches: rows that see each other, and padding that is looked at.
@rules(by_the_kit=True)
def test_rows_and_padding_do_not_matter_to_others(rule):
    draft, scores = batch(9, 4, 6, 3)
    whole = rule.verify(draft, scores, noise(9), None)
    padding = torch.arange(4) >= draft.sizes.unsqueeze(1)
    q = draft.law.dense().clone()
    q[padding] = 1.0 / 6
    changed = Draft(torch.where(padding, 5, draft.tokens), draft.sizes, law=Dense(q))
    other = rule.verify(changed, scores, noise(9), None)
    assert torch.equal(whole.lengths, other.lengths)
    assert torch.equal(whole.next_probs, other.next_probs)
    for row in range(9):
        one = torch.tensor([row])
        alone = rule.verify(
            Draft(draft.tokens[one], draft.sizes[one], law=Dense(draft.law.dense()[one])),
            Scores(
                scores.tokens[one], scores.logits[one], scores.probs[one],
                {tap: features[one] for tap, features in scores.hidden.items()}, scores.finite[one],
            ),
            Noise((row,), (0,)),
            None,
        )  # fmt: skip
        assert torch.equal(alone.lengths, whole.lengths[one])
        assert close(alone.next_probs, whole.next_probs[one], 1e-12)


# Catches: two formulas of one rule that drift apart, on every law, beside ties, zeros and greedy rows.
@rules(pointwise, by_the_kit=True)
@pytest.mark.parametrize("dtype", SINGLE_AND_DOUBLE, ids=str)
def test_accept_at_is_the_acceptance_at_the_drafted_token(rule, dtype):
    for kind, size in itertools.product(KINDS, (3, 8, 300)):
        logits, p = laws((4, 5, size), size, kind, dtype)
        _, q = laws((4, 5, size), size + 1, "whole", dtype)
        token = sample(q, torch.linspace(0.05, 0.95, 20).view(4, 5))
        order = q.topk(min(size, 6), dim=-1)
        given = [Dense(q), Logits(q.log()), Sparse(order.indices, order.values, size)]
        for law in (*given, *([] if "draft_law" in rule.needs else [PointMass(token, size, dtype)])):
            hidden = {-1: torch.linspace(-2, 2, 60, dtype=dtype).view(4, 5, 3)}
            at = Place(p, law, token, torch.arange(5).expand(4, 5), logits, hidden)
            full = rule.acceptance(at)
            assert full.shape == p.shape
            assert full.dtype == dtype
            assert bool(((full >= 0) & (full <= 1)).all())
            if isinstance(rule, FastAccept):
                fast = rule.accept_at(at)
                assert fast.dtype == dtype
                assert torch.allclose(fast, gather(full, token), rtol=1e-5, atol=1e-7)


# Catches: a rule whose answer depends on the order of ids. Argmax does where there are ties.
@rules(pointwise, by_the_kit=True)
def test_permuting_the_vocabulary_permutes_the_rule(rule):
    for kind in KINDS:
        if kind == "tied" and (rule.replacement == "argmax" or type(rule).__name__ == "Greedy"):
            continue
        for seed in range(4):
            logits, p = laws((5, 7), seed, kind)
            _, q = laws((5, 7), seed + 50, "tied")
            order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
            token = torch.tensor([0, 2, 3, 5, 6])
            hidden = {-1: torch.linspace(-2, 2, 15, dtype=torch.float64).view(5, 3)}
            there = Place(p, Dense(q), token, token * 0, logits, hidden)
            moved = Place(p[:, order], Dense(q[:, order]), order.argsort()[token], token * 0, logits[:, order], hidden)
            assert close(rule.acceptance(there)[:, order], rule.acceptance(moved), 1e-12)
            assert close(rule.correct(there)[:, order], rule.correct(moved), 1e-12)


# Catches: sets that split ties by id, as a sort does.
@rules(pointwise, featureless, lambda case: case[0] != "greedy")
def test_tokens_that_tie_are_treated_alike(rule):
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0, 0.0]], dtype=torch.float64)
    accept = rule.acceptance(place(logits.softmax(-1), torch.full((1, 6), 1 / 6, dtype=torch.float64), 0, logits))[0]
    assert len({float(accept[x]) for x in (0, 2, 3)}) == 1
    assert len({float(accept[x]) for x in (1, 4)}) == 1


# Catches: u <= a, a set without p > 0, and -1 read as the last id. Every uniform is 0.
@rules(drawn=True, by_the_kit=True)
def test_impossible_tokens_and_placeholders_are_never_kept(rule, case, law):
    p = f64(0.6, 0.4, 0.0, 0.0).view(1, 1, 4).repeat(4, 2, 1)
    q = f64(0.1, 0.1, 0.4, 0.4).view(1, 1, 4).repeat(4, 1, 1)
    hidden = {-1: torch.tensor([5.0, 0.0, 0.0]).double().repeat(4, 2, 1)}  # the judge approves of anything
    logits = torch.tensor([[[1.0, 0.9, -torch.inf, 2.0]]], dtype=torch.float64).repeat(4, 2, 1)
    scores = Scores(torch.zeros((4, 2), dtype=torch.int64), logits, p, hidden, torch.ones(4, dtype=torch.bool))
    for token in (-1, *(() if case[0] in BEYOND_THE_TARGET else (2, 3))):
        draft = Draft(torch.full((4, 1), token), torch.ones(4).long(), law=Dense(q) if law == "dense" else None)
        verdict = rule.verify(draft, scores, Fixed(4, 0.0), None)
        assert verdict.lengths.tolist() == [0] * 4, token
        assert float(verdict.next_probs[:, 2:].abs().max()) < 1e-12 or case[0] in BEYOND_THE_TARGET


# Catches: a rule that says it dominates and does not, by the ratio, by rounding, or by another use of the noise.
@rules(dominating, drawn=True, by_the_kit=True)
@pytest.mark.parametrize("dtype", SINGLE_AND_DOUBLE, ids=str)
def test_a_rule_that_dominates_keeps_at_least_what_standard_keeps_on_every_path(rule, law, dtype):
    standard = registry.load("verifiers", "standard")()
    for seed, kind in enumerate(KINDS):
        draft, scores = batch(800, 5, 6, seed, kind, dtype)
        draft = draft if law == "dense" else Draft(draft.tokens, draft.sizes)
        least = standard.verify(draft, scores, noise(800), None).lengths
        assert bool((rule.verify(draft, scores, noise(800), None).lengths >= least).all())
        if isinstance(rule, PointwiseVerifier):
            logits, p = laws((400, 6), seed, kind, dtype)
            q = laws((400, 6), seed + 9, "whole", dtype)[1]
            at = place(p, q, 1, logits)
            assert bool((rule.acceptance(at) >= theory.standard_acceptance(p, q)).all())


# Losslessness by enumeration.


def pair(seed: int, size: int, depth: int = 4) -> tuple[Model, Model]:
    return (
        random_model(size, depth, 2 * seed, zeros=seed % 2),
        random_model(size, depth, 2 * seed + 1, zeros=1 if seed % 4 > 1 else 0),
    )


# Catches: a residual that is not renormalised, the wrong row, a threshold that is off, and noise that is used twice.
@rules(lossless)
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_lossless_rule_reproduces_the_target_over_three_tokens(rule, nodes):
    for seed in range(4):
        p, q = pair(seed, 3 + seed % 2)
        assert close(output_law(rule, p, q, chain(nodes), 3), token_law(p, 3)), seed
        law = output_law(rule, p, point_model(q), chain(nodes), 3, wrap=lambda tokens, probs: None)
        assert close(law, token_law(p, 3)), seed


# Catches: a rule that is exact with the law it was told only.
@pytest.mark.parametrize("case", [("sample_match", {}), ("threshold", {})], ids=label)
def test_a_rule_that_never_looks_at_the_draft_law_is_exact_when_that_is_wrong(rule):
    p, q = pair(3, 4)
    wrong = random_model(4, 1, 99)[0]
    law = output_law(rule, p, q, chain(2), 3, wrap=lambda tokens, probs: Dense(wrong.expand_as(probs)))
    assert close(law, token_law(p, 3))


# Catches: a second list of what is lossless. The rules that are, and no others.
def test_the_lossless_rules_are_these():
    found = {case[0] for case in CASES if lossless(case)}
    assert {"standard", "sample_match", "block", "threshold"} <= found
    assert not found & {
        "greedy",
        "nucleus",
        "leniency",
        "ensemble",
        "cascade",
        "cactus",
        "mentored",
        "fly",
        "synthetic",
    }


# The law of one position.


# Catches: a rule that claims acceptance without its price; holds for any acceptance and any replacement.
@rules(pointwise, by_the_kit=True)
def test_no_rule_deviates_less_than_its_acceptance_beyond_standard(rule):
    for kind in KINDS:
        for size in (2, 3, 6):
            logits, p = laws((120, size), size, kind)
            q = laws((120, size), 40 + size, "cut" if size == 6 else "whole")[1]
            accept, follow = kernel(rule, p, q, logits)
            excess = theory.excess(p, q, accept)
            assert bool((theory.deviation(p, q, accept, follow) >= excess - 1e-9).all())


# Catches: another residual, an acceptance below standard, a mixture that is decoded with the wrong target.
@rules(on_the_line)
def test_a_rule_of_the_standard_or_mixture_kind_deviates_by_exactly_its_excess(rule):
    for kind in KINDS:
        for size in (2, 3, 6):
            logits, p = laws((120, size), 10 + size, kind)
            q = laws((120, size), 70 + size, "cut" if size == 6 else "whole")[1]
            accept, follow = kernel(rule, p, q, logits)
            assert close(theory.deviation(p, q, accept, follow), theory.excess(p, q, accept))
            assert bool((theory.excess(p, q, accept) <= theory.rejection(p, q) + 1e-12).all())


# Catches: diagnostics and decoder that speak of different rules: the same law through the real verify.
@rules(pointwise, featureless, by_the_kit=True)
def test_the_law_of_the_implemented_rule_is_that_of_its_definition(rule):
    for seed in range(3):
        p, q = pair(seed, 4, 2)
        accept, follow = kernel(rule, p[0], q[0], p[0].log())
        assert close(output_law(rule, p, q, chain(1), 1), theory.output_law(q[0], accept, follow)[0]), seed


# Catches: a rule that claims trees and changes its law there: later siblings are tried by the standard rule, so the law
# of one position is that of its first child alone.
@rules(on_the_line, walks_trees, featureless)
@pytest.mark.parametrize("replace", [True, False], ids=["independent", "without_replacement"])
def test_a_second_sibling_changes_nothing_in_the_law_of_a_rule_that_walks_trees(rule, replace):
    for seed in range(3):
        p, q = random_model(4, 2, 60 + seed), random_model(4, 2, 80 + seed)
        tree = output_law(rule, p, q, (-1, -1), 1, replace=replace)
        assert close(tree, output_law(rule, p, q, chain(1), 1)), seed


P, Q = f64(0.1, 0.4, 0.3, 0.2), f64(0.5, 0.1, 0.05, 0.35)
STANDARD = f64(0.2, 1.0, 1.0, 4 / 7)


def rule_of(name: str, **options: object) -> PointwiseVerifier:
    return registry.load("verifiers", name)(**options)


def keeps(name: str, p: Tensor = P, q: Tensor = Q, logits: Tensor | None = None, **options: object) -> Tensor:
    """The acceptance, after its fast form was found to agree."""
    made = rule_of(name, **options)
    full = made.acceptance(place(p, q, 0, logits))
    if isinstance(made, FastAccept):
        single = [float(made.accept_at(place(p, q, x, logits))) for x in range(p.shape[-1])]
        assert close(torch.tensor([single], dtype=torch.float64), full, 1e-12)
    return full


def follows(name: str, token: int, p: Tensor = P, q: Tensor = Q, logits: Tensor | None = None, **options: object):
    return normalise(rule_of(name, **options).correct(place(p, q, token, logits)), p)[0]


RESIDUAL = f64(0, 0.3, 0.25, 0) / 0.55


# Catches: q in the acceptance, and a token that is drawn again after it was rejected.
def test_sample_match_golden_case():
    assert close(keeps("sample_match"), P)
    assert close(follows("sample_match", 0), f64(0, 0.4, 0.3, 0.2) / 0.9)
    assert close(follows("sample_match", -1), P)


# Catches: l on the wrong side, the matched residual (p - l q)+, another constant, the entropy of the wrong law or base.
def test_leniency_golden_case():
    assert close(keeps("leniency", leniency=0.5), f64(0.4, 1, 1, 1))
    assert close(keeps("leniency", leniency=1.0), STANDARD)
    assert close(follows("leniency", 0, leniency=0.5), RESIDUAL)
    # H of (.1, .4, .3, .2) is 1.279854 nats, exp(-.4 H) = .599331.
    scaled = keeps("leniency", leniency=0.95, entropy_scale=0.4)
    assert close(scaled, f64(0.2 / 0.599331, 1, 1, (4 / 7) / 0.599331), 1e-5)
    # A certain target: the cap of 0.95 decides. The entropy is that of the logits, whatever top-k made of them.
    certain = torch.tensor([[0.0, 30.0, 0.0, 0.0]], dtype=torch.float64)
    capped = keeps("leniency", logits=certain, leniency=0.95, entropy_scale=0.4)
    assert close(capped, f64(0.2 / 0.95, 1, 1, (4 / 7) / 0.95), 1e-6)


# Catches: the bound lost to another residual or to l above 1.
@pytest.mark.parametrize("case", [("leniency", {"leniency": value}) for value in (1.0, 0.7, 0.3, 0.1)], ids=label)
@pytest.mark.parametrize("kind", ["whole", "cut", "tied"])
def test_leniency_emits_nothing_above_the_target_over_l(rule, case, kind):
    logits, p = laws((300, 6), 5, kind)
    q = laws((300, 6), 6, "whole")[1]
    law = theory.output_law(q, *kernel(rule, p, q, logits))
    assert bool((law <= p / case[1]["leniency"] + 1e-12).all())


# Catches: k - 1 and k + 1 tokens, the ranks of q.
def test_top_k_or_golden_case():
    assert close(keeps("top_k_or", k=2), STANDARD)
    assert close(keeps("top_k_or", k=3), f64(0.2, 1, 1, 1))
    assert close(keeps("top_k_or", k=4), f64(1, 1, 1, 1))
    assert close(follows("top_k_or", 0, k=3), RESIDUAL)
    assert rule_of("top_k_or").k == 10


# Catches: > for >=, a difference in place of a factor, alpha in place of 1 - alpha.
def test_margin_or_golden_case():
    assert close(keeps("margin_or", factor=0.51), STANDARD)
    assert close(keeps("margin_or", factor=0.5), f64(0.2, 1, 1, 1))
    assert close(keeps("margin_or", factor=0.25), f64(1, 1, 1, 1))
    assert rule_of("margin_or").factor == 0.05


# Catches: k - 1 and k + 1 tokens, a coin, the wrong replacement.
def test_top_k_golden_case():
    assert close(keeps("top_k", k=3), f64(0, 1, 1, 1))
    assert close(keeps("top_k", k=1), f64(0, 1, 0, 0))
    assert close(follows("top_k", 0), P)
    assert close(follows("top_k", 0, replacement="argmax"), f64(0, 1, 0, 0))
    assert close(follows("top_k", 0, replacement="residual"), RESIDUAL)
    assert rule_of("top_k").k == 5


# Catches: > for >=, the two thresholds swapped, q in the acceptance, a token that is drawn again.
def test_threshold_golden_case():
    assert close(keeps("threshold"), P)
    assert close(keeps("threshold", threshold_single=0.3, threshold_acc=0.5), f64(0.2, 1, 1, 0.4))
    assert close(keeps("threshold", threshold_acc=0.25), f64(0.4, 1, 1, 0.8))
    assert close(follows("threshold", 3), f64(0.1, 0.4, 0.3, 0) / 0.8)
    assert rule_of("threshold").exactness == "lossless"
    assert rule_of("threshold", threshold_acc=0.5).exactness == "lossy"
    assert rule_of("threshold", threshold_single=0.5).exactness == "lossy"


# Catches: > for >=, a factor in place of a difference, OR in place of AND, other defaults than the strict ones.
def test_relaxed_golden_case():
    assert close(keeps("relaxed"), f64(0, 1, 0, 0))
    assert close(keeps("relaxed", top_n=3, delta=0.15), f64(0, 1, 1, 0))
    assert close(keeps("relaxed", top_n=3, delta=0.2), f64(0, 1, 1, 1))
    assert close(keeps("relaxed", top_n=3, delta=1.0), f64(0, 1, 1, 1))
    assert close(keeps("relaxed", top_n=1, delta=1.0), f64(0, 1, 0, 0))
    assert close(follows("relaxed", 0), f64(0, 1, 0, 0))
    assert close(follows("relaxed", 0, replacement="target"), P)
    assert close(follows("relaxed", 0, replacement="residual"), RESIDUAL)


def logits_of(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


# Catches: >= for >, a ratio of probabilities, the residual after a rejection among close tokens, no guard for z1 <= 0.
def test_mars_golden_case():
    near, exact = logits_of(1, 4, 3.8, 2), logits_of(1, 4, 3.6, 2)
    assert close(keeps("mars", logits=near), f64(0, 1, 1, 0))
    assert close(follows("mars", 0, logits=near), P)
    assert close(keeps("mars", logits=exact), STANDARD)
    assert close(follows("mars", 0, logits=exact), RESIDUAL)
    for below in (logits_of(-3, -1, -1.05, -2), logits_of(-3, 0, 0, -2)):
        assert close(keeps("mars", logits=below), STANDARD)
        assert close(follows("mars", 0, logits=below), RESIDUAL)
    assert rule_of("mars").ratio == 0.9


# Catches: the weight on the wrong side, the residual of p - m.
def test_ensemble_golden_case():
    assert close(keeps("ensemble", weight=0.5), f64(0.6, 1, 1, 0.275 / 0.35))
    assert close(keeps("ensemble", weight=0.0), STANDARD)
    assert close(keeps("ensemble", weight=1.0), f64(1, 1, 1, 1))
    assert close(follows("ensemble", 0, weight=0.5), RESIDUAL)
    assert rule_of("ensemble").weight == 0.3


# Catches: an output that is not the mixture.
@pytest.mark.parametrize("weight", [0.0, 0.3, 0.75, 1.0])
def test_ensemble_decodes_its_mixture_and_deviates_by_weight_times_r(weight):
    rule = rule_of("ensemble", weight=weight)
    for seed in range(10):
        p, q = pair(seed, 4, 2)
        law = output_law(rule, p, q, chain(1), 1)
        assert close(law, (weight * q[0] + (1 - weight) * p[0])[0])
        expected = weight * float(theory.rejection(p[0], q[0]))
        assert abs(float(total_variation(law, p[0][0])) - expected) < 1e-9


# Catches: a missing 2, the root left out, the others not scaled down, the rejected token drawn again.
def test_cactus_golden_case():
    # 2 delta = 1/4: h(0) = .1 + .5 * .3 = .25, h(3) = .2 + .5 * .4 = .4.
    assert close(keeps("cactus", delta=0.125), f64(0.5, 1, 1, 1))
    assert close(keeps("cactus", delta=0.0), STANDARD)
    # The others times .75/.9: (1/3, 1/4, 1/6) over q.
    assert close(follows("cactus", 0, delta=0.125), f64(0, 1 / 3 - 0.1, 0.25 - 0.05, 0) / (1 / 3 + 0.25 - 0.15))
    assert close(follows("cactus", 0, delta=0.0), RESIDUAL)
    assert rule_of("cactus").delta == 1.0


# Catches: a replacement that forgets which token was rejected.
def test_cactus_replacement_depends_on_the_rejected_token():
    q = f64(0.5, 0.02, 0.03, 0.45)
    first, last = follows("cactus", 0, q=q, delta=0.1), follows("cactus", 3, q=q, delta=0.1)
    assert not close(first, last, 1e-3)


def divergence(p: Tensor, law: Tensor) -> Tensor:
    return torch.where(p > 0, p * (p / law.clamp(min=1e-300)).log(), 0.0).sum(-1)


# Catches: KL(out || p), another base, alpha and beta swapped, a budget that is not used up.
def test_mentored_golden_case():
    # out = (c/2, 1 - c/2) and KL = -log(c (2 - c))/2 = .1, so c = 1 + sqrt(1 - exp(-.2)) = 1.425757266.
    p, q = f64(0.5, 0.5), f64(0.9, 0.1)
    assert close(keeps("mentored", p, q), f64(0.5 * 1.425757266 / 0.9, 1), 1e-7)
    assert close(follows("mentored", 0, p, q), f64(0, 1))
    assert close(keeps("mentored", divergence=0.0), STANDARD)
    assert close(follows("mentored", 0, divergence=0.0), RESIDUAL)


# Catches: a bound that is broken or not reached, an output law that is not q held between two multiples of p.
@pytest.mark.parametrize("budget", [0.02, 0.1, 0.15, 1.0])
@pytest.mark.parametrize("kind", ["whole", "cut", "tied"])
def test_mentored_uses_its_divergence_and_no_more(budget, kind):
    rule = rule_of("mentored", divergence=budget)
    logits, p = laws((200, 6), 20, kind)
    q = laws((200, 6), 21, "whole")[1]
    accept, follow = kernel(rule, p, q, logits)
    law = theory.output_law(q, accept, follow)
    spent = divergence(p, law)
    assert bool((spent <= budget + 1e-9).all())
    possible = (q * (p > 0)).sum(-1)  # no more than this can be accepted
    used = (q * accept).sum(-1) > possible - 1e-9
    assert bool(((spent > budget - 1e-6) | used).all())
    assert bool((spent > 0.9 * budget).any())
    # Karush-Kuhn-Tucker: the law is q wherever it is strictly between its bounds.
    times = torch.where(p > 0, law / p.clamp(min=1e-300), 1.0)
    low, high = times.amin(-1, keepdim=True), times.amax(-1, keepdim=True)
    inside = (times > low + 1e-6) & (times < high - 1e-6) & (p > 0)
    assert bool(inside.any())
    assert close(law[inside], q[inside], 1e-7)


# Catches: an acceptance below what another law of the same divergence has: mixtures with the draft are such laws.
def test_mentored_accepts_more_than_a_mixture_of_the_same_divergence():
    _, p = laws((100, 5), 30, "whole")
    logits, q = laws((100, 5), 31, "whole")
    accept, _ = kernel(rule_of("mentored", divergence=0.1), p, q, logits)
    for weight in torch.linspace(0.05, 0.95, 19).tolist():
        mixture = weight * q + (1 - weight) * p
        allowed = divergence(p, mixture) <= 0.1
        assert bool(((q * accept).sum(-1) >= torch.minimum(mixture, q).sum(-1) - 1e-9)[allowed].all())


# Catches: <= for <, alpha on the wrong side, the set of q, p not shared out.
def test_cascade_golden_case():
    assert close(keeps("cascade"), f64(1, 1, 1, 1))  # max q = .5 is not below .4 - .5 * .55
    p, q = f64(0.05, 0.9, 0.03, 0.02), f64(0.3, 0.25, 0.25, 0.2)
    standard = theory.standard_acceptance(p, q)
    assert close(keeps("cascade", p, q), standard)  # .3 < .9 - .5 * .65
    assert close(keeps("cascade", p, q, alpha=1.0), torch.ones(1, 4).double())  # .3 is not below .9 - .65
    assert close(follows("cascade", 0, p, q), f64(0, 1, 0, 0))
    assert close(keeps("cascade", f64(0.75, 0.25), f64(0.5, 0.5), alpha=1.0), f64(1, 1))  # .5 is not below .5
    # Token: .1 < .5 * .4 is deferred and .2 is not; pi = (.05, .3, .2, .45).
    assert close(keeps("cascade", defer="token"), f64(0.1, 1, 1, 1))
    assert close(follows("cascade", 0, defer="token"), f64(0, 0.2, 0.15, 0.1) / 0.45)


# Catches: a cascade that is not decoded exactly.
@pytest.mark.parametrize("defer", ["opt", "token"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 1.0])
def test_cascade_decodes_its_own_law(defer, alpha):
    rule, both = rule_of("cascade", defer=defer, alpha=alpha), set()
    for seed in range(20):
        p, q = pair(seed, 4, 2)
        one, other = p[0][0], q[0][0]
        if defer == "opt":
            deferred = float(other.max()) < float(one.max()) - alpha * float((one - other).abs().sum()) / 2
            expected = one if deferred else other
            both.add(deferred)
        else:
            lost = [x for x in range(4) if float(one[x]) < (1 - alpha) * float(one.max())]
            expected = one * sum(float(other[x]) for x in lost)
            for x in set(range(4)) - set(lost):
                expected[x] += other[x]
        assert close(output_law(rule, p, q, chain(1), 1), expected), seed
    assert defer == "token" or alpha in (0.7, 1.0) or both == {True, False}


# Catches: conditional rates read as unconditional ones, a length that forgets the token after the draft.
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rates": (0.8, 0.4)}, [0.8, 0.5, 0.0, 0.0]),
        ({"rates": (0.5, 0.0, 0.0)}, [0.5, 0.0, 0.0, 0.0]),
        ({"acceptance_length": 2.5}, [1.0, 0.5, 0.0, 0.0]),
        ({"acceptance_length": 1.0}, [0.0, 0.0, 0.0, 0.0]),
        ({"acceptance_length": 3.0}, [1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_synthetic_keeps_at_the_rate_of_a_depth(options, expected):
    rule = rule_of("synthetic", **options)
    for depth, rate in enumerate(expected):
        at = place(P, Q, 1, depth=depth)
        assert float(rule.accept_at(at)) == pytest.approx(rate)
        assert close(rule.acceptance(at), torch.full((1, 4), rate, dtype=torch.float64))
    draft, scores = batch(20_000, 4, 5, 0)
    draft = Draft(draft.tokens, draft.sizes * 0 + 4, law=draft.law)
    mean = float(rule.verify(draft, scores, noise(20_000), None).lengths.double().mean())
    wanted = sum(math.prod(expected[: i + 1]) for i in range(4))
    assert abs(mean - wanted) < 0.02
    assert wanted == pytest.approx(options.get("acceptance_length", 1 + sum(options.get("rates", ()))) - 1)


# Judge.


def judge(folder, tensors, **options):
    path = folder / "head.safetensors"
    save_file(tensors, path)
    return registry.load("verifiers", "judge")(weights=str(path), **options)


HEAD = {"weight": torch.tensor([1.0, -2.0, 0.5]), "bias": torch.tensor([0.1])}


# Catches: > for >=, a bias that is left out, the parent's feature, an approval that spreads to other tokens.
def test_judge_keeps_what_its_head_approves(tmp_path):
    rule = judge(tmp_path, {"weight": torch.tensor([[1.0, -2.0, 0.5]]), "bias": torch.tensor(0.5)})
    rule.prepare(None)
    # w . h = -1/2 - ..., so sigmoid(0) = 1/2 is reached exactly by the first only.
    at = place(P.repeat(3, 1), Q.repeat(3, 1), 0)
    hidden = torch.tensor([[-0.5, 0.0, 0.0], [-0.6, 0.0, 0.0], [0.0, 0.25, 0.5]], dtype=torch.float64)
    at = attrs.evolve(at, hidden={-1: hidden})
    assert close(rule.accept_at(at), f64(1, 0.2, 1)[0])
    assert close(rule.acceptance(at), torch.cat([f64(1, 1, 1, 4 / 7), STANDARD, f64(1, 1, 1, 4 / 7)]))
    assert rule.taps == (-1,)
    assert {"hidden", "raw_logits"} == rule.needs


# Catches: weights that are kept when left out of a threshold: 0 approves of everything possible, 1 of almost nothing.
def test_judge_with_threshold_zero_keeps_all_that_is_possible(tmp_path):
    rule = judge(tmp_path, HEAD, threshold=0.0)
    rule.prepare(None)
    draft, scores = batch(300, 4, 6, 3, "cut")
    possible = (gather(scores.probs[:, :4], draft.tokens) > 0) & (torch.arange(4) < draft.sizes.unsqueeze(1))
    lengths = rule.verify(draft, scores, noise(300), None).lengths
    assert torch.equal(lengths, possible.long().cumprod(1).sum(1))


# Catches: a wrong file that is a traceback, or is used all the same.
def test_a_judge_names_what_is_wrong_with_its_file(tmp_path):
    with pytest.raises(ModelError, match=r"absent.safetensors': no such file; wanted a safetensors file with `weight`"):
        registry.load("verifiers", "judge")(weights=str(tmp_path / "absent.safetensors")).prepare(None)
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(ModelError, match="cannot be read"):
        registry.load("verifiers", "judge")(weights=str(tmp_path / "text.safetensors")).prepare(None)
    for tensors, message in (
        ({"bias": torch.zeros(1)}, r"holds `bias` \[1\]; wanted"),
        ({"weight": torch.zeros(2, 3)}, r"holds `weight` \[2, 3\]; wanted"),
        ({"weight": torch.zeros(3), "bias": torch.zeros(2)}, r"holds `bias` \[2\], `weight` \[3\]; wanted"),
        ({"weight": torch.zeros(3), "scale": torch.zeros(1)}, r"holds `scale` \[1\], `weight` \[3\]; wanted"),
        ({"weight": torch.full((3,), math.nan)}, "not finite"),
    ):
        with pytest.raises(ModelError, match=message):
            judge(tmp_path, tensors).prepare(None)
    with pytest.raises(CompatibilityError, match=r"call prepare\(target\)"):
        judge(tmp_path, HEAD).accept_at(place(P, Q, 0))


# Catches: a head of another model that fails in the first step, if at all; a tap that the engine does not hand over.
def test_a_judge_runs_in_the_engine_and_refuses_a_head_of_another_size(tmp_path):
    size = tiny("llama").config.hidden_size
    with pytest.raises(CompatibilityError, match=f"3 weights and the target's features have {size}"):
        engine(verifier=judge(tmp_path, HEAD))
    for bias, kept in ((-50.0, False), (50.0, True)):
        rule = judge(tmp_path, {"weight": torch.zeros(size), "bias": torch.tensor([bias])})
        done = engine(counting(3), verifier=rule).generate([ask(prompt=(1, 2, 3), new=12)])[0]
        assert (done.counters.num_accepted_tokens == done.counters.num_draft_tokens) == kept


# Temperature 0: the processed law is one token, and these rules look at the model's own.


# Catches: a rule published for temperature 0 that is exact match there, or that keeps anything at all.
@pytest.mark.parametrize(
    ("name", "options", "kept"),
    [
        ("leniency", {"leniency": 0.5}, [1, 1, 0]),
        ("leniency", {"leniency": 0.5, "entropy_scale": 0.4}, [1, 1, 0]),
        ("leniency", {"leniency": 0.95}, [1, 0, 0]),
        ("relaxed", {"top_n": 2, "delta": 0.3}, [1, 1, 0]),
        ("relaxed", {"top_n": 3, "delta": 0.6}, [1, 1, 1]),
        ("relaxed", {}, [1, 0, 0]),
        ("nucleus", {}, [1, 0, 0]),
        ("margin_or", {}, [1, 0, 0]),
        ("mars", {}, [1, 0, 0]),
        ("cactus", {}, [1, 0, 0]),
        ("mentored", {}, [1, 0, 0]),
    ],
)
def test_at_temperature_zero_a_near_miss_is_kept_by_the_rules_made_for_it(name, options, kept):
    # softmax(2, 1.9, 0) = (.490, .444, .066).
    logits = logits_of(2.0, 1.9, 0.0)
    p = f64(1, 0, 0)
    rule = rule_of(name, **options)
    for x in range(3):
        draft = Draft(torch.tensor([[x]]), torch.tensor([1]))
        scores = Scores(torch.zeros((1, 2)).long(), logits.repeat(1, 2, 1), p.repeat(1, 2, 1), {}, torch.ones(1).bool())
        verdict = rule.verify(draft, scores, Fixed(1, 0.999999), None)
        assert verdict.lengths.tolist() == [kept[x]], x
        assert close(verdict.next_probs, p)  # and what follows is the target's own choice
        assert ("raw_logits" in rule.needs) == (name in GREEDY_RELAXES | {"mars"})


# Catches: a judge that is silenced by a p(x) of 0 at temperature 0.
def test_at_temperature_zero_a_judge_keeps_what_it_approves(tmp_path):
    rule = judge(tmp_path, HEAD)
    rule.prepare(None)
    draft, scores = batch(200, 4, 6, 11, "greedy")
    draft = Draft(draft.tokens, draft.sizes)
    more = rule.verify(draft, scores, noise(200), None).lengths
    match = (scores.probs[:, :4].argmax(-1) == draft.tokens) & (torch.arange(4) < draft.sizes.unsqueeze(1))
    approved = (scores.hidden[-1][:, 1:] @ HEAD["weight"].double() + 0.1 >= 0) & (
        torch.arange(4) < draft.sizes.unsqueeze(1)
    )
    assert torch.equal(more, (match | approved).long().cumprod(1).sum(1))
    assert bool((more > match.long().cumprod(1).sum(1)).any())


# Couplings: on one draft and one noise, a looser option keeps at least as much on every path.


@pytest.mark.parametrize(
    ("name", "loosening"),
    [
        ("leniency", [{"leniency": value} for value in (1.0, 0.9, 0.5, 0.1)]),
        ("leniency", [{"leniency": 0.95, "entropy_scale": value} for value in (0.0, 0.4, 2.0)]),
        ("top_k_or", [{"k": value} for value in (1, 2, 4, 6)]),
        ("margin_or", [{"factor": value} for value in (1.0, 0.5, 0.05, 1e-6)]),
        ("nucleus", [{"theta": value} for value in (0.1, 0.5, 0.95, 1.0)]),
        ("top_k", [{"k": value} for value in (1, 2, 4, 6)]),
        ("relaxed", [{"top_n": n, "delta": delta} for n, delta in ((1, 0.0), (2, 0.1), (3, 0.3), (6, 1.0))]),
        ("threshold", [{"threshold_acc": value} for value in (1.0, 0.6, 0.2)]),
        ("threshold", [{"threshold_single": value} for value in (1.0, 0.5, 0.1)]),
        ("ensemble", [{"weight": value} for value in (0.0, 0.3, 0.9, 1.0)]),
        ("cactus", [{"delta": value} for value in (0.0, 0.05, 0.3, 1.0)]),
        ("mentored", [{"divergence": value} for value in (0.0, 0.05, 0.2, 1.0)]),
        ("fly", [{"window": value} for value in (4, 3, 2, 1)]),
        ("fly", [{"window": 1, "entropy_threshold": value} for value in (1.0, 0.6, 0.3, 0.0)]),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value[0]),
)
# Catches: a flipped comparison, a reciprocal, an option that is not used.
def test_a_looser_option_keeps_at_least_as_much_on_every_path(name, loosening):
    for kind in ("whole", "greedy") if name in GREEDY_RELAXES else ("whole", "cut"):
        draft, scores = batch(1500, 6, 6, 17, kind)
        kept = [rule_of(name, **options).verify(draft, scores, noise(1500), None).lengths for options in loosening]
        for less, more in itertools.pairwise(kept):
            assert bool((more >= less).all())
        assert int(kept[-1].sum()) > int(kept[0].sum())


# Options that make no rule.


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("leniency", {"leniency": 0.0}, "leniency: got 0.0, wanted > 0.0"),
        ("leniency", {"entropy_scale": -1.0}, "entropy_scale: got -1.0, wanted >= 0.0"),
        ("top_k_or", {"k": 0}, "k: got 0, wanted >= 1"),
        ("top_k", {"replacement": "draft"}, "replacement: got 'draft', wanted one of residual, target, argmax"),
        ("margin_or", {"factor": 1.5}, "factor: got 1.5, wanted <= 1.0"),
        ("threshold", {"threshold_acc": 0.0}, "threshold_acc: got 0.0, wanted > 0.0"),
        ("relaxed", {"top_n": 0}, "top_n: got 0, wanted >= 1"),
        ("mars", {"ratio": 0.0}, "ratio: got 0.0, wanted > 0.0"),
        ("ensemble", {"weight": 1.1}, "weight: got 1.1, wanted <= 1.0"),
        ("cactus", {"delta": -0.1}, "delta: got -0.1, wanted >= 0"),
        ("mentored", {"divergence": -0.1}, "divergence: got -0.1, wanted >= 0"),
        ("cascade", {"defer": "chow"}, "defer: got 'chow', wanted one of opt, token"),
        ("fly", {"window": 0}, "window: got 0, wanted >= 1"),
        ("judge", {}, "weights: missing"),
        ("synthetic", {}, "must be given without rates, or rates without it"),
        ("synthetic", {"rates": [0.5], "acceptance_length": 2.0}, "acceptance_length: must be given without rates"),
        ("synthetic", {"rates": [0.5, 0.7]}, "rates: must be between 0 and 1 and must not rise"),
        ("synthetic", {"acceptance_length": 0.5}, "acceptance_length: got 0.5, wanted >= 1"),
    ],
)
# Catches: an option without a validator, and a refusal that does not name it.
def test_an_option_that_makes_no_rule_is_named(name, options, problem):
    made, problems = build(registry.load("verifiers", name), options, "verifiers[0]", name)
    assert made is None
    assert problem in "; ".join(problems)
