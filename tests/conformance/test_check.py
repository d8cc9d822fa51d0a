"""The kit that proves a rule: every registered rule passes, every planted fault is caught by the check for it."""

import contextlib
import functools
import json
from typing import ClassVar, final

import pytest
import torch
from attrs import define, evolve, field, frozen
from click.testing import CliRunner
from safetensors.torch import save_file

from specdec.cli import main
from specdec.conformance import CHECKS, check
from specdec.errors import ModelError
from specdec.law import Dense
from specdec.noise import Noise
from specdec.options import build
from specdec.probability import at as gather
from specdec.probability import normalise, one_hot, without
from specdec.registry import load, names
from specdec.subject import DoesNotApply, Failed, Subject
from specdec.testing import chain, output_law, random_model, sampled_counts
from specdec.theory import rejection, standard_acceptance
from specdec.types import Verdict
from specdec.verifier import FastAccept, PointwiseVerifier, Verifier

# What cannot be left out; of `judge` a file is made.
OPTIONS = {
    "any_of": {"rules": [{"use": "nucleus"}, {"use": "top_k_or", "k": 2}]},
    "gated": {"inside": {"use": "nucleus"}, "outside": {"use": "standard"}, "begin": 0, "end": 1},
    "synthetic": {"acceptance_length": 2.5},
}
FEATURES = 64


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    path = tmp_path_factory.mktemp("head") / "head.safetensors"
    weight = torch.randn(FEATURES, generator=torch.Generator().manual_seed(0))
    save_file({"weight": 0.05 * weight}, path)
    return str(path)


@pytest.fixture(autouse=True, scope="module")
def known_numbers():
    """The kit draws with the same keys for every rule: their numbers are mixed once."""
    uniform = Noise.uniform

    @functools.cache
    def mixed(seeds, steps, stream, count):
        return uniform(Noise(seeds, steps), stream, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Noise, "uniform", lambda self, stream, count: mixed(self.seeds, self.steps, stream, count).clone()
        )
        yield


def made(name, options, head):
    given = {"weights": head} if name == "judge" else OPTIONS.get(name, {})
    rule, problems = build(load("verifiers", name), {**given, **options}, name, name)
    assert problems == []
    return rule


# Catches: a built-in rule that is not what it declares, and a check that no rule passes.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name == "mentored" else ()) for name in names("verifiers")]
)
def test_every_registered_rule_is_what_it_says(name, head):
    report = check(made(name, {}, head), quick=True)
    assert not report.failed, report.verdict
    assert [result.name for result in report.results] == list(CHECKS)


# Catches: the same of a rule that bisects at every place, whose whole drafts take seconds to enumerate. That its law is
# its definition is in tests/exact/test_published_rules.py.
def test_a_rule_that_is_slow_to_enumerate_is_what_it_says_of_one_place(head):
    rule = made("mentored", {}, head)
    rule.prepare(None)
    for name in CHECKS.keys() - {"definition", "exactness"}:
        with contextlib.suppress(DoesNotApply):
            CHECKS[name](Subject(rule, quick=True))


# Catches: options for which a rule is another one: memory, set rules whose replacement is not p, look-ahead.
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nucleus", {"budget": 0.1}),
        ("nucleus", {"children": "all"}),
        ("fly", {"window": 2}),
        ("gated", {"inside": "standard", "outside": "standard"}),
        ("typical", {"replacement": "argmax"}),
    ],
)
def test_rules_with_options_are_what_they_say(name, options, head):
    check(made(name, options, head), quick=True).assert_passed()


# Planted faults. Each is a rule that somebody could write.


class Pointwise(PointwiseVerifier):
    family = "lossless"
    exactness = "lossless"

    def acceptance(self, at):
        return standard_acceptance(at.p, at.q.dense())


class Whole(Verifier):
    """The standard rule for chains, written without the walk of the core."""

    family = "lossless"
    exactness = "lossless"

    def keeps(self, uniform, chance):
        return uniform < chance

    def verify(self, draft, scores, noise, memory):
        rows, nodes = draft.tokens.shape
        law = draft.law or Dense(one_hot(draft.tokens.clamp(min=0), scores.probs.shape[-1], scores.probs.dtype))
        probs, row = scores.probs, torch.arange(rows)
        chance = standard_acceptance(gather(probs[:, :nodes], draft.tokens), law.at(draft.tokens))
        keep = self.keeps(noise.uniform("accept", nodes), chance) & (torch.arange(nodes) < draft.sizes.unsqueeze(1))
        lengths = keep.long().cumprod(1).sum(1)
        rejected, follows = lengths < draft.sizes, probs[row, lengths]
        rest = (follows - law.row(lengths, rejected).dense()).clamp(min=0) if nodes else follows
        source = torch.where(rejected, 1, 0).to(torch.int8)
        path = torch.arange(nodes).expand(rows, nodes)
        return self.answer(Verdict(path, lengths, normalise(rest, follows)[0], source))

    def answer(self, verdict):
        return verdict


def caught(name, rule, match=None):
    rule.prepare(None)
    with pytest.raises(Failed, match=match) as failure:
        CHECKS[name](Subject(rule, quick=True))
    return failure.value


# Catches: planted rules that fail for another reason than their fault.
@pytest.mark.parametrize("rule", [Pointwise(), Whole()], ids=["pointwise", "whole"])
def test_the_rules_that_faults_are_planted_in_are_right(rule):
    failed = {result.name: result.text for result in check(rule, quick=True).failed}
    assert failed == {}


# Catches: a kit that does not look at the law of the whole sequence.
def test_a_wrong_residual_is_caught():
    class TargetAfterRejection(Pointwise):
        def correct(self, at):
            return at.p

    class AlsoRelaxed(TargetAfterRejection):
        family, exactness = "standard_or_set", "lossy"

    assert caught("exactness", TargetAfterRejection(), "says lossless").figures["tv"] > 0.01
    caught("family", AlsoRelaxed(), "not norm")


# Catches: laws compared so coarsely that a small leak passes; leaks at one depth, in ties, on trees only.
@pytest.mark.parametrize(
    "where", ["everywhere", "third token", "ties", "siblings", "point masses", "sharp targets", "temperature 0"]
)
def test_a_deviation_of_two_percent_is_caught(where):
    class Leaky(Pointwise):
        trees = True

        def acceptance(self, at):
            q, standard = at.q.dense(), standard_acceptance(at.p, at.q.dense())
            reject = rejection(at.p, q).unsqueeze(-1)
            more = standard + (1 - standard) * (0.02 / reject.clamp(min=0.02)) * (q > 0)
            here = {
                "third token": (at.depth == 2).unsqueeze(-1),
                "ties": (at.p.sort(-1).values.diff(dim=-1) == 0).any(-1, keepdim=True),
                "siblings": ((at.p == 0).sum(-1, keepdim=True) == 1) & (at.q.dense() > 0).all(-1, keepdim=True),
                "point masses": (q == 1).any(-1, keepdim=True),
                "sharp targets": at.p.amax(-1, keepdim=True) > 0.7,
                "temperature 0": at.p.amax(-1, keepdim=True) == 1,
            }.get(where, torch.ones_like(standard, dtype=torch.bool))
            return torch.where(here, more, standard)

        own_siblings = where == "siblings"

    failure = caught("exactness", Leaky(), "says lossless")
    assert failure.figures["tv"] < 0.03
    p, q = random_model(3, 3, 0), random_model(3, 2, 1)
    if where == "everywhere":
        assert float((output_law(Leaky(), p, q, chain(1), 1) - p[0][0]).abs().sum() / 2) == pytest.approx(0.02)


# Catches: u <= a, in a rule of its own and in one that goes through the core.
def test_a_comparison_that_is_not_strict_is_caught():
    class Below(Whole):
        def keeps(self, uniform, chance):
            return uniform <= chance

    class Nudged(Pointwise):
        def verify(self, draft, scores, noise, memory):
            return super().verify(draft, scores, Shifted(noise), memory)

    caught("impossible tokens", Below(), "p\\(x\\) = 0")
    caught("strict comparison", Nudged(), "equal to its acceptance is kept")


@frozen(eq=False)
class Shifted:
    noise: object

    def uniform(self, stream, count):
        numbers = self.noise.uniform(stream, count)
        return torch.nextafter(numbers, torch.full_like(numbers, -1))


# Catches: numbers that are not used, or another stream's; the law of such a rule is not the target's.
def test_a_uniform_that_is_ignored_is_caught():
    class Half(Whole):
        def keeps(self, uniform, chance):
            return chance > 0.5

    class Zero(Pointwise):
        def verify(self, draft, scores, noise, memory):
            return super().verify(draft, scores, Nothing(), memory)

    caught("exactness", Half(), "says lossless")
    caught("definition", Zero(), "the law of verify")

    class Other(Whole):
        def verify(self, draft, scores, noise, memory):
            return super().verify(draft, scores, Renamed(noise), memory)

    report = check(Other(), quick=True)
    assert {"exactness", "sampler"} <= {result.name for result in report.failed}
    assert "from 'draft'" in next(result.text for result in report.failed if result.name == "exactness")


class Nothing:
    def uniform(self, stream, count):
        return torch.zeros((1, count), dtype=torch.float64)


@frozen(eq=False)
class Renamed:
    noise: object

    def uniform(self, stream, count):
        return self.noise.uniform("draft", count)


# Catches: a sampler check without power, or one that runs in float64 only.
def test_a_fault_of_float32_is_caught_by_the_sampler():
    class Loose(Pointwise):
        family, exactness = "other", "lossy"

        def acceptance(self, at):
            standard = standard_acceptance(at.p, at.q.dense())
            return standard if at.p.dtype == torch.float64 else standard.sqrt()

    caught("sampler", Loose(), "p-value")
    CHECKS["definition"](Subject(Loose(), quick=True))


# Catches: next_probs taken as it comes.
@pytest.mark.parametrize("fault", ["law", "dtype", "lengths", "path", "source", "float32"])
def test_a_malformed_verdict_is_caught(fault):
    class Malformed(Whole):
        def answer(self, verdict):
            return {
                "law": evolve(verdict, next_probs=verdict.next_probs * 1.01),
                "dtype": evolve(verdict, next_probs=verdict.next_probs.half()),
                "lengths": evolve(verdict, lengths=verdict.lengths + 1),
                "path": evolve(verdict, path=verdict.path.flip(1)),
                "source": evolve(verdict, source=verdict.source.long()),
                "float32": evolve(verdict, next_probs=verdict.next_probs.double()),
            }[fault]

    caught("shapes and dtypes", Malformed())


# Catches: numbers beyond 1, replacements below 0 or empty, a bonus that is nothing.
@pytest.mark.parametrize("fault", ["above one", "negative", "empty", "no bonus"])
def test_acceptances_and_replacements_that_are_none_are_caught(fault):
    class Wrong(Pointwise):
        def acceptance(self, at):
            ratio = at.p / at.q.dense().clamp(min=1e-9)
            return ratio if fault == "above one" else ratio.clamp(max=1.0)

        def correct(self, at):
            rest = at.p - at.q.dense()
            if fault == "empty":
                return (-at.p).clamp(min=0)
            if fault == "no bonus":
                return rest.clamp(min=0) * (at.token >= 0).unsqueeze(-1)
            return rest if fault == "negative" else rest.clamp(min=0)

    caught("acceptance and replacement", Wrong())


# Catches: ids that matter, as the drafted token or as such.
def test_a_rule_that_looks_at_ids_is_caught():
    class LikesLowIds(Pointwise):
        family, exactness = "standard_or_set", "lossy"

        def acceptance(self, at):
            low = torch.arange(at.p.shape[-1]) == 0
            standard = standard_acceptance(at.p, at.q.dense())
            return torch.where(low & (at.p > 0), (standard + 0.02).clamp(max=1.0), standard)

    class LooksAtTheDraft(Pointwise):
        def acceptance(self, at):
            standard = standard_acceptance(at.p, at.q.dense())
            return torch.where((at.token == 3).unsqueeze(-1), (standard + 0.02).clamp(max=1.0), standard)

    caught("permutations", LikesLowIds(), "acceptance changes")
    caught("one definition", LooksAtTheDraft(), "with which one was drafted")


# Catches: a whole-draft rule whose ids are never permuted.
def test_a_rule_of_whole_drafts_that_looks_at_ids_is_caught():
    class First(Whole):
        def verify(self, draft, scores, noise, memory):
            verdict = super().verify(draft, scores, noise, memory)
            return evolve(verdict, lengths=torch.where(draft.tokens[:, 0] == 3, 0, verdict.lengths))

    caught("permutations", First(), "when ids were permuted")


@final
@frozen(kw_only=True)
class Spends(PointwiseVerifier):
    """Relaxed until a budget is spent."""

    family, exactness, dominates_standard, memory = "other", "lossy", True, 1
    trees = False

    def acceptance(self, at):
        standard = standard_acceptance(at.p, at.q.dense())
        return torch.where((at.memory < 1) & (at.p > 0), 1.0, standard)

    def advance(self, at):
        return at.memory + 0.2


# Catches: memory of the wrong shape, none, or that of the step before.
@pytest.mark.parametrize("fault", ["none", "stale", "wide", "float32", "never"])
def test_a_memory_that_is_not_handed_on_is_caught(fault):
    class Forgets(Whole):
        family, exactness, memory = "other", "lossy", 1

        def verify(self, draft, scores, noise, memory):
            after = {"none": None, "wide": memory.repeat(1, 2), "float32": memory.float(), "never": memory}[fault]
            return evolve(super().verify(draft, scores, noise, None), memory=after)

    class Stale(PointwiseVerifier):
        family, exactness, memory = "other", "lossy", 1
        trees = False
        acceptance, advance = Spends.acceptance, Spends.advance

        def verify(self, draft, scores, noise, memory):
            return evolve(super().verify(draft, scores, noise, memory), memory=memory)

    class Never(Pointwise):
        memory = 1

    CHECKS["memory"](Subject(Spends()))
    caught("memory", {"stale": Stale, "never": Never}.get(fault, Forgets)())


# Catches: arguments, the rule itself or global numbers that are changed.
@pytest.mark.parametrize("fault", ["probs", "draws", "draws python", "attribute", "class", "second call"])
def test_a_rule_that_is_not_pure_is_caught(fault):
    import random

    @define(eq=False)
    class Impure(Pointwise):
        calls: int = 0
        seen: list = field(factory=list)
        log: ClassVar = []

        def acceptance(self, at):
            if fault == "probs":
                at.p.clamp_(min=1e-6)
            if fault == "draws":
                torch.rand(1)
            if fault == "draws python":
                random.random()
            if fault in ("attribute", "second call"):
                self.calls += 1
            if fault == "class":
                self.log.append(1)
            standard = standard_acceptance(at.p, at.q.dense())
            return standard * 0.5 if fault == "second call" and self.calls % 2 else standard

    caught("purity", Impure())


# Catches: a declaration that is only believed.
def test_a_rule_that_claims_to_dominate_and_does_not_is_caught():
    class Tighter(Pointwise):
        family, exactness, dominates_standard = "other", "lossy", True

        def acceptance(self, at):
            return 0.98 * standard_acceptance(at.p, at.q.dense())

    caught("dominates standard", Tighter(), "keeps less")

    class Modest(Pointwise):
        dominates_standard = False

    with pytest.raises(DoesNotApply, match="and does"):
        CHECKS["dominates standard"](Subject(Modest(), quick=True))


# Catches: two formulas that drift apart, and drift in one dtype or law only.
@pytest.mark.parametrize("where", ["everywhere", "float32", "sparse"])
def test_an_accept_at_that_differs_is_caught(where):
    class TwoFormulas(Pointwise, FastAccept):
        def accept_at(self, at):
            standard = standard_acceptance(gather(at.p, at.token), at.q.at(at.token))
            wrong = {"float32": at.p.dtype == torch.float32, "sparse": type(at.q).__name__ == "Sparse"}.get(where, True)
            return (standard + 0.02).clamp(max=1.0) if wrong else standard

    caught("accept_at", TwoFormulas(), "accept_at says")
    if where == "everywhere":
        caught("definition", TwoFormulas(), "the law of verify")


# Catches: quantities over the batch: a mean, a largest value, the row before.
@pytest.mark.parametrize("fault", ["mean", "largest", "shortest"])
def test_rows_that_leak_are_caught(fault):
    class Leaks(Pointwise):
        def acceptance(self, at):
            standard = standard_acceptance(at.p, at.q.dense())
            if fault == "mean":
                return standard * (0.98 + 0.02 * at.p.mean(0, keepdim=True))
            return standard * at.p / at.p.max() if fault == "largest" else standard

    class Shortest(Whole):
        def answer(self, verdict):
            return evolve(verdict, lengths=verdict.lengths.clamp(max=int(verdict.lengths.min())))

    caught("rows", Shortest() if fault == "shortest" else Leaks(), "row of a batch")


class Raises(Pointwise):
    def acceptance(self, at):
        if bool(at.p.isnan().any()):
            raise ValueError("a law must be finite")
        return standard_acceptance(at.p, at.q.dense())


# Catches: NaN that reaches healthy rows through a sum that is multiplied by 0, and a rule that raises over it.
def test_scores_that_are_not_finite_and_spread_are_caught():
    class Spreads(Pointwise):
        def acceptance(self, at):
            return standard_acceptance(at.p, at.q.dense()) + 0.0 * at.p.sum()

    caught("not finite", Spreads(), "in one row change the verdict of another")
    failed = {result.name: result.text for result in check(Raises(), quick=True).failed}
    assert failed == {"not finite": "raised ValueError: a law must be finite"}


# Catches: padding that counts.
def test_padding_that_matters_is_caught():
    class Mean(Whole):
        def verify(self, draft, scores, noise, memory):
            verdict = super().verify(draft, scores, noise, memory)
            return evolve(verdict, lengths=torch.where(draft.tokens.sum(1) > 8, 0, verdict.lengths))

    caught("padding", Mean(), "padding changes")


# Catches: impossible tokens that a rank lets in, and that come out of a replacement.
def test_a_token_that_the_target_cannot_emit_is_caught():
    class Ranked(Pointwise):
        family, exactness = "set_only", "lossy"

        def acceptance(self, at):
            return (at.p >= at.p.topk(min(6, at.p.shape[-1])).values[..., -1:]).to(at.p.dtype)

    class Smoothed(Pointwise):
        family, exactness = "standard_or_set", "lossy"

        def correct(self, at):
            return (at.p - at.q.dense()).clamp(min=0) + 1e-3

    caught("impossible tokens", Ranked(), "keeps a token")
    caught("impossible tokens", Smoothed(), "draws a token")


# Catches: -1 as an index, of the last token and, clamped, of the first.
@pytest.mark.parametrize("index", [-1, 0])
def test_a_placeholder_that_is_kept_is_caught(index):
    class Indexed(Pointwise, FastAccept):
        def accept_at(self, at):
            token = torch.where(at.token < 0, index % at.p.shape[-1], at.token)
            p, q = gather(at.p, token), gather(at.q.dense(), token)
            return torch.where(at.token < 0, p, standard_acceptance(p, q))

    caught("placeholders", Indexed(), "id -1 is kept")


# Catches: a rule that knows one kind of law.
def test_a_rule_that_knows_dense_laws_only_is_caught():
    class DenseOnly(Pointwise):
        def acceptance(self, at):
            q = at.q.dense() if isinstance(at.q, Dense) else torch.full_like(at.p, 1 / at.p.shape[-1])
            return standard_acceptance(at.p, q)

    caught("draft laws", DenseOnly(), "differ from")


# Catches: families that are only believed.
@pytest.mark.parametrize("fault", ["below", "coin", "looks at q", "lossy lossless"])
def test_a_wrong_family_is_caught(fault):
    class Wrong(Pointwise):
        family = {"below": "standard_or_set", "lossy lossless": "lossless"}.get(fault, "set_only")
        exactness = "lossy"

        def acceptance(self, at):
            standard = standard_acceptance(at.p, at.q.dense())
            return {"below": 0.98 * standard, "coin": at.p}.get(fault, (standard == 1).to(at.p.dtype))

    caught("family", Wrong())


# Catches: memory that is looked at in a new request only.
def test_a_rule_that_turns_lossy_in_a_later_step_is_caught():
    class Tires(Pointwise):
        memory = 1
        advance = Spends.advance

        def acceptance(self, at):
            standard = standard_acceptance(at.p, at.q.dense())
            return torch.where((at.memory > 0.5) & (at.p > 0), (standard + 0.02).clamp(max=1.0), standard)

    caught("family", Tires(), "says lossless")


# Catches: acceptance that says less than is kept, seen by a law below what any rule can reach.
def test_a_law_that_no_rule_can_have_is_caught():
    class Boasts(Pointwise, FastAccept):
        exactness, family = "lossy", "other"

        def acceptance(self, at):
            return torch.ones_like(at.p)

        def accept_at(self, at):
            return standard_acceptance(gather(at.p, at.token), at.q.at(at.token))

    caught("lower bound", Boasts(), "no rule can be")


# Catches: an own target that is stated and not met; one that is not stated is told, not judged.
def test_a_law_that_is_stated_is_compared():
    class Mixture(Pointwise):
        family, exactness = "mixture", "own_target"

        def acceptance(self, at):
            standard = standard_acceptance(at.p, at.q.dense())
            return standard + 0.3 * (1 - standard) * (at.q.dense() > 0)

    class States(Mixture):
        def law(self, at):
            return 0.3 * at.q.dense() + 0.7 * at.p

    class StatesWrongly(Mixture):
        def law(self, at):
            return 0.32 * at.q.dense() + 0.68 * at.p

    with pytest.raises(DoesNotApply, match=r"no method law.*0\.\d\d \(TV\) from the target"):
        CHECKS["exactness"](Subject(Mixture(), quick=True))
    for name in ("exactness", "law"):
        assert "law(at)" in CHECKS[name](Subject(States(), quick=True))[0]
    caught("law", StatesWrongly(), "from law")


# Catches: the law of one drafted token told as that of the place: a deviation where there is none.
@pytest.mark.parametrize("where", ["acceptance", "correct"])
def test_a_law_that_depends_on_the_drafted_token_is_caught(where):
    class Sees(Pointwise):
        def acceptance(self, at):
            own = one_hot(at.token.clamp(min=0), at.p.shape[-1], at.p.dtype)
            return torch.where(own > 0, at.p, 0.5 * at.p) if where == "acceptance" else at.p

        def correct(self, at):
            return without(at.p, at.token)

    class Unknown(Sees):
        def law(self, at):
            return None

    caught("law", Sees(), "looks at the drafted token")
    with pytest.raises(DoesNotApply, match="no law at one position"):
        CHECKS["law"](Subject(Unknown(), quick=True))


# Catches: raw logits or features that are used and not declared.
def test_a_need_that_is_not_declared_is_caught():
    class Peeks(Pointwise):
        def acceptance(self, at):
            return standard_acceptance(at.p, at.q.dense()) * at.logits.sigmoid()

    class Taps(Pointwise):
        taps = (-1,)

    caught("needs", Peeks(), "does not say raw_logits")
    caught("needs", Taps(), "go together")


# Catches: division by the margin of the two best.
def test_a_law_that_ties_break_is_caught():
    class Margin(Pointwise):
        def acceptance(self, at):
            margin = -at.p.topk(2).values.diff(dim=-1)
            return standard_acceptance(at.p, at.q.dense()) * margin / margin

    caught("ties", Margin(), "no law")


def _percent(value):
    return value / 100


# Catches: options that a recipe cannot hold: converted once more when they are read back.
def test_options_that_do_not_come_back_are_caught():
    @frozen(kw_only=True)
    class Converted(Pointwise):
        share: float = field(default=90.0, converter=_percent)

    caught("options", Converted(), "came back as")


# Catches: look-ahead that the enumeration does not see: a node that decides only if later ones are kept.
def test_a_rule_that_looks_ahead_is_enumerated():
    rule = load("verifiers", "fly")(window=2)
    p, q = random_model(3, 5, 0), random_model(3, 4, 1)
    law = output_law(rule, p, q, chain(4), 2)
    strict = output_law(load("verifiers", "standard")(), p, q, chain(4), 2)
    assert float((law - strict).abs().sum() / 2) > 0.01
    from specdec.testing import ALPHA, chi_square

    assert chi_square(sampled_counts(rule, p, q, chain(4), 2, samples=20_000), law) > ALPHA


# Catches: a report that cannot fail a suite, names that are not told.
def test_a_report_fails_a_suite_with_the_checks_that_failed():
    class Lossy(Pointwise):
        def correct(self, at):
            return at.p

    report = check(Lossy(), quick=True)
    with pytest.raises(AssertionError, match=r"exactness: says lossless and is 0\.\d+ \(TV\) from the target"):
        report.assert_passed()
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["passed"] is False


# The command.

RULE = """
from specdec import PointwiseVerifier
from specdec.theory import standard_acceptance
class Mine(PointwiseVerifier):
    family, exactness = "lossless", "lossless"
    def acceptance(self, at):
        return standard_acceptance(at.p, at.q.dense()){fault}
"""


def specdec(*arguments):
    return CliRunner().invoke(main, ["check", *arguments])


# Catches: a class in a file that is not found, a failure that exits with 0, a verdict that is not told.
@pytest.mark.parametrize(("fault", "code"), [("", 0), (".sqrt()", 1)])
def test_the_command_checks_a_class_in_a_file(tmp_path, monkeypatch, fault, code):
    monkeypatch.chdir(tmp_path)
    name = f"mine_{code}"
    (tmp_path / f"{name}.py").write_text(RULE.format(fault=fault))
    done = specdec(f"{name}:Mine", "--quick")
    assert done.exit_code == code, done.output
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[: len(CHECKS)]] == list(CHECKS)
    assert f"{name}:Mine is {'not ' if code else ''}what it says (lossless, lossless)" in lines[-1]
    assert ("failed" in done.stdout.split("exactness", 1)[1].splitlines()[0]) == bool(code)


# Catches: nested options, numbers that stay text, text beside the document.
def test_the_command_takes_options_and_gives_json():
    options = ("--set", "rules=[{use: nucleus}, {use: top_k_or}]", "--set", "rules.0.theta=0.5")
    done = specdec("any_of", *options, "--quick", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["passed"] is True
    assert {one["name"] for one in told["checks"]} == set(CHECKS)


# Catches: options that are missing or wrong told as a traceback, or with a --set that this command does not have.
def test_a_rule_that_cannot_be_made_is_one_sentence(head):
    done = specdec("any_of")
    assert (done.exit_code, done.stderr) == (2, "error: any_of.rules: missing; give it with --set rules=VALUE\n")
    done = specdec("nucleus", "--set", "thetta=0.5")
    assert done.stderr.startswith("error: nucleus.thetta: unknown option of nucleus; did you mean 'theta'?")
    assert specdec("nukleus").exit_code == 3
    assert specdec("judge", "--set", "weights=nowhere.safetensors").exit_code == ModelError.exit_code
    done = specdec("judge", "--set", f"weights={head}", "--quick", "--json", "--hidden-size", str(FEATURES))
    assert done.exit_code == 0, done.output


# Catches: a rule that is another one behind the third token of a draft, where whole drafts are no longer enumerated.
def test_a_rule_that_changes_deep_in_a_draft_is_caught():
    class Deep(Pointwise):
        def acceptance(self, at):
            return torch.where(at.depth.unsqueeze(-1) >= 3, 1.0, standard_acceptance(at.p, at.q.dense()))

    caught("family", Deep(), "from the target at one position")
