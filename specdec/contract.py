"""What every rule owes its callers whatever it computes: shapes, purity, rows and padding that nobody sees.

A check is a function of a `Subject`. It answers with a few words and its figures, or raises `Failed` or `DoesNotApply`.
"""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any, cast

import attrs
import torch
from attrs import evolve
from torch import Tensor

from specdec.law import Dense
from specdec.options import build, values
from specdec.probability import at as gather
from specdec.subject import TOLERANCE, Case, DoesNotApply, Failed, Said, Subject, counted, differ, make_law, shape_of
from specdec.testing import Scripted
from specdec.types import SOURCES, Draft, Scores, Verdict
from specdec.verifier import FastAccept, Place, PointwiseVerifier

_DTYPES = (torch.float32, torch.float64)
_SIZE = 7  # of the vocabulary of `Subject.case`


def shapes_and_dtypes(subject: Subject) -> Said:
    """Everything has the shape and dtype it should, for ragged, single and empty drafts, in float32 and float64."""
    for dtype, nodes in ((dtype, nodes) for dtype in _DTYPES for nodes in (3, 1, 0)):
        for parents in subject.shapes if nodes == 3 else (None,):
            case = subject.case(6, nodes, 3, dtype=dtype, parents=parents)
            _well_formed(case.judge(subject.verifier), case)
        if nodes and isinstance(subject.verifier, PointwiseVerifier):
            _place_shapes(subject, subject.first(case), dtype)
    return "float32 and float64, drafts of 0 to 3 tokens", {}


def acceptance_at_the_drafted_token(subject: Subject) -> Said:
    """`accept_at` is `acceptance` at the drafted token."""
    rule = subject.pointwise
    if not isinstance(rule, FastAccept):
        raise DoesNotApply("it has no accept_at")
    worst = 0.0
    for dtype, kind, size in ((d, k, s) for d in _DTYPES for k in subject.kinds for s in (3, _SIZE, 400)):
        for seed in range(2 if subject.quick else 6):
            case = subject.case(24, 1, 20 + seed, size=size, dtype=dtype, kind=kind, zeros=size != 3)
            at = subject.first(case)
            if seed % 2:
                tied = at.p.mul(8).ceil()
                at = evolve(at, p=tied / tied.sum(-1, keepdim=True))
            chain = evolve(  # the same places as two rows of a dozen nodes
                at,
                p=at.p.view(2, 12, -1),
                q=Dense(at.q.dense().view(2, 12, -1)),
                token=at.token.view(2, 12),
                depth=at.depth.view(2, 12),
                logits=at.logits.view(2, 12, -1),
                hidden={tap: features.view(2, 12, -1) for tap, features in at.hidden.items()},
                memory=None if at.memory is None else at.memory.view(2, 12, -1),
            )
            for place in (at, chain):
                wanted, found = gather(rule.acceptance(place), place.token), rule.accept_at(place)
                gap = (wanted - found).abs().flatten()
                worst = max(worst, float(gap.max()))
                if not bool((gap <= (1e-5 if dtype == torch.float32 else TOLERANCE)).all()):
                    where = int(gap.nan_to_num(nan=9.0).argmax())
                    raise Failed(
                        f"accept_at says {found.flatten()[where]:.6g} where acceptance says "
                        f"{wanted.flatten()[where]:.6g} ({dtype}, {kind} law, vocabulary {size})",
                        difference=float(gap.nan_to_num(nan=9.0).max()),
                    )
    return f"differences up to {worst:.1e}", {"difference": worst}


def strict_comparison(subject: Subject) -> Said:
    """A token is kept when its uniform is below its acceptance: at the acceptance itself it is not."""
    rule = subject.pointwise
    case = subject.case(300, 1, 40)
    at = subject.first(case)
    chance = rule.accept_at(at) if isinstance(rule, FastAccept) else gather(rule.acceptance(at), at.token)
    drafted = case.draft.sizes > 0
    for uniform, wanted, words in (
        (chance, torch.zeros_like(drafted), "equal to its acceptance"),
        (torch.nextafter(chance, -torch.ones_like(chance)).clamp(min=0), drafted & (chance > 0), "just below it"),
    ):
        lengths = evolve(case, noise=Scripted(uniform.unsqueeze(1))).judge(rule).lengths
        if wrong := int(((lengths > 0) != wanted).sum()):
            kept = "is kept" if words.startswith("equal") else "is not kept"
            raise Failed(f"a token whose uniform is {words} {kept} in {wrong} of 300 rows", rows=wrong)
    return "kept just below the acceptance, not at it", {}


def one_definition(subject: Subject) -> Said:
    """The acceptance of a token is the same whichever token was drafted, and says all: nothing else is looked at."""
    rule = subject.pointwise
    if "hidden" in rule.needs:
        raise DoesNotApply("features belong to the drafted token")
    at = subject.first(subject.case(100, 1, 50))
    every = [rule.acceptance(evolve(at, token=torch.full_like(at.token, token))) for token in range(_SIZE)]
    spread = float((torch.stack(every).amax(0) - torch.stack(every).amin(0)).max())
    if not spread <= TOLERANCE:
        raise Failed(
            f"the acceptance of a token changes by up to {spread:.3g} with which one was drafted", spread=spread
        )
    return "acceptance does not depend on which token was drafted", {"spread": spread}


def permutations(subject: Subject) -> Said:
    """Other ids for the same tokens change nothing but the ids."""
    rule, worst = subject.verifier, 0.0
    for seed in range(3 if subject.quick else 8):
        order = torch.randperm(_SIZE, generator=torch.Generator().manual_seed(seed))
        case = subject.case(200, 3, 60 + seed)
        if isinstance(rule, PointwiseVerifier):
            at = subject.first(case)
            moved = evolve(
                at, p=at.p[:, order], q=Dense(at.q.dense()[:, order]), token=order.argsort()[at.token],
                logits=at.logits[:, order],
            )  # fmt: skip
            for name in ("acceptance", "correct"):
                there, here = getattr(rule, name)(at)[:, order], getattr(rule, name)(moved)
                worst = max(worst, gap := float((there - here).abs().max()))
                if not gap <= TOLERANCE:
                    raise Failed(f"{name} changes by up to {gap:.3g} when ids are permuted", difference=gap)
        if rule.memory:  # it may follow certain ids
            continue
        relabel, law, scores = order.argsort(), case.draft.law, case.scores
        assert law is not None  # dense
        other = evolve(
            case,
            draft=evolve(case.draft, tokens=relabel[case.draft.tokens], law=Dense(law.dense()[..., order])),
            scores=evolve(
                scores, tokens=relabel[scores.tokens], probs=scores.probs[..., order], logits=scores.logits[..., order]
            ),
        )
        here, there = other.judge(rule), case.judge(rule)
        there = evolve(there, next_probs=there.next_probs[:, order])
        if wrong := int(differ(here, there).sum()):
            raise Failed(f"{counted(wrong, 'verdict')} of 200 changed when ids were permuted", rows=wrong)
    return f"differences up to {worst:.1e}", {"difference": worst}


def draft_laws(subject: Subject) -> Said:
    """The verdict is the same in whichever way a drafter hands over its law."""
    for parents in subject.shapes:
        cases = {kind: subject.case(400, 3, 70, kind=kind, parents=parents) for kind in subject.kinds}
        found: dict[str, Verdict] = {kind: case.judge(subject.verifier) for kind, case in cases.items()}
        if "none" in cases:
            hot = torch.nn.functional.one_hot(cases["none"].draft.tokens, _SIZE).double()
            dense = evolve(cases["none"], draft=evolve(cases["none"].draft, law=Dense(hot)))
            found["point as dense"] = dense.judge(subject.verifier)
        for kind, verdict in found.items():
            base = "none" if kind in ("none", "point", "point as dense") else "dense"
            if wrong := int(differ(verdict, found[base], 1e-7).sum()):
                raise Failed(f"law given as {kind}: {counted(wrong, 'verdict')} of 400 differ from {base}", rows=wrong)
    return ", ".join(found), {}


def placeholders(subject: Subject) -> Said:
    """Id -1 stands for no token and is never kept, though the first or last token be certain."""
    p = torch.zeros((4, 2, 3), dtype=torch.float64)
    p[:2, :, 0], p[2:, :, 2] = 1.0, 1.0  # an index of -1 is the last token, one that is clamped the first
    fed = torch.tensor([[0, -1]] * 4)
    scores = subject.see(Scores(fed, p.log(), p, {}, torch.ones(4, dtype=torch.bool)))
    for kind in subject.kinds:
        law = None if kind == "none" else make_law(kind, fed[:, 1:], p[:, :1])
        for parents in (None, (-1,)) if subject.verifier.trees else (None,):
            tree = None if parents is None else torch.tensor([parents] * 4)
            draft = Draft(fed[:, 1:], torch.ones(4, dtype=torch.int64), tree, law)
            noise = Scripted(torch.zeros((4, 1), dtype=torch.float64))
            if bool(Case(draft, scores, noise, subject.memories(4, 0)).judge(subject.verifier).lengths.any()):
                raise Failed(f"a draft token of id -1 is kept ({kind} law)")
    return "id -1 is never kept", {}


def padding(subject: Subject) -> Said:
    """What stands behind the end of a draft changes nothing."""
    for parents in subject.shapes:
        case = subject.case(400, 3, 80, parents=parents)
        nodes = case.draft.tokens.shape[1]
        behind = torch.arange(nodes) >= case.draft.sizes.unsqueeze(1)
        p, law, fed = case.scores.probs.clone(), case.draft.law, case.scores.tokens.clone()
        assert law is not None  # dense
        q = law.dense().clone()
        q[behind], p[:, 1:][behind], fed[:, 1:][behind] = 1.0 / _SIZE, 1.0 / _SIZE, _SIZE - 1
        seen = subject.see(evolve(case.scores, probs=p, tokens=fed))
        draft = evolve(case.draft, tokens=torch.where(behind, _SIZE - 1, case.draft.tokens), law=Dense(q))
        other = evolve(case, draft=draft, scores=seen)
        if wrong := int(differ(case.judge(subject.verifier), other.judge(subject.verifier)).sum()):
            raise Failed(f"padding changes {counted(wrong, 'verdict')} of 400", rows=wrong)
    return "400 ragged drafts", {}


def rows_apart(subject: Subject) -> Said:
    """A row gets the verdict that it gets alone, wherever it stands in the batch."""
    rule = subject.verifier
    # Of a rule with a definition, that is compared too, so few verdicts are enough.
    rows = 24 if isinstance(rule, PointwiseVerifier) else 100 if subject.quick else 300
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).tolist()
    for parents in subject.shapes:
        case = subject.case(rows, 3, 90, parents=parents)
        whole = case.judge(rule)
        for index in (*([row] for row in range(rows)), order):
            if bool(differ(case.rows(index).judge(rule), _some(whole, index)).any()):
                words = "in another order" if len(index) > 1 else f"alone (row {index[0]})"
                raise Failed(f"a row of a batch gets another verdict {words}")
    if isinstance(rule, PointwiseVerifier):
        at = subject.first(case)
        for name in ("acceptance", "correct"):
            every = getattr(rule, name)(at)
            for row in range(rows):
                if not torch.allclose(getattr(rule, name)(_one(at, row)), every[[row]], rtol=0, atol=TOLERANCE):
                    raise Failed(f"{name} of a row of a batch is another one alone (row {row})")
    return f"{rows} rows, each alone and in another order", {}


def not_finite(subject: Subject) -> Said:
    """Scores that are not finite spoil their own row alone, and raise nothing."""
    rule, healthy = subject.verifier, [0, 2, 4, 5]
    for bad, parents in ((bad, parents) for bad in (float("nan"), float("inf")) for parents in subject.shapes):
        case = subject.case(6, 3, 100, parents=parents)
        case = evolve(case, draft=evolve(case.draft, sizes=torch.full_like(case.draft.sizes, 3)))
        wanted, probs, finite = case.judge(rule), case.scores.probs.clone(), case.scores.finite.clone()
        probs[1], probs[3, 1], finite[[1, 3]] = bad, bad, False
        scores = evolve(subject.see(evolve(case.scores, probs=probs)), finite=finite)
        found = evolve(case, scores=scores).judge(rule)
        if bool(differ(_some(found, healthy), _some(wanted, healthy)).any()):
            raise Failed(f"scores of {bad} in one row change the verdict of another")
        if not bool(((found.lengths >= 0) & (found.lengths <= case.draft.sizes)).all()):
            raise Failed(f"a row whose scores are {bad} keeps {found.lengths.tolist()} tokens")
    return "NaN and infinity stay in their row", {}


def purity(subject: Subject) -> Said:
    """The same arguments give the same verdict; arguments, the rule and global random numbers stay as they were."""
    rule = subject.verifier
    for parents in subject.shapes:
        case = subject.case(200, 3, 110, parents=parents)
        memory = None if case.memory is None else case.memory.clone()
        kept, state = copy.deepcopy(_tensors(case)), _state(rule)
        torch_state, python_state = torch.random.get_rng_state(), random.getstate()
        first = rule.verify(case.draft, case.scores, case.noise, memory)
        first = evolve(first, memory=None if first.memory is None else first.memory.clone())
        subject.case(50, 2, 120).judge(rule)
        if bool(differ(first, rule.verify(case.draft, case.scores, case.noise, memory)).any()):
            raise Failed("the same arguments gave another verdict the second time")
        if wrong := [name for name, now in _tensors(case).items() if not torch.equal(kept[name], now)]:
            raise Failed(f"verify changes its arguments: {', '.join(wrong)}")
        if memory is not None and case.memory is not None and not torch.equal(case.memory, memory):
            raise Failed("verify changes the memory it is given in place, wanted a new tensor")
        if wrong := [name for name, now in _state(rule).items() if state.get(name) != now]:
            raise Failed(f"verify changes attributes of the rule: {', '.join(wrong)}")
        if not torch.equal(torch_state, torch.random.get_rng_state()) or python_state != random.getstate():
            raise Failed("verify draws from a global random number generator, wanted noise.uniform('accept', N) only")
    return "same verdict twice, nothing changed", {}


def options_round_trip(subject: Subject) -> Said:
    """The options can be written into a recipe and read again, and the rule can be pickled and evolved."""
    rule = subject.verifier
    told = values(rule)
    made, problems = build(type(rule), told, "rule", type(rule).__name__)
    if problems:
        raise Failed(f"options {told} cannot be read back: {'; '.join(problems)}")
    if (again := values(made)) != told:
        raise Failed(f"options {told} came back as {again}")
    copies = {"options": made}
    if "<locals>" not in type(rule).__qualname__:  # of a class inside a function nothing can be pickled
        copies["pickle"] = pickle.loads(pickle.dumps(rule))
    if attrs.has(type(rule)):
        copies["evolve"] = evolve(cast("Any", rule))
    case = subject.case(50, 3, 130)
    wanted = case.judge(rule)
    for name, other in copies.items():
        other.prepare(None)
        if bool(differ(case.judge(other), wanted).any()):
            raise Failed(f"a rule made again by {name} gives other verdicts")
    return ", ".join(f"{name}={value}" for name, value in told.items()) or "it has none", {}


def memory(subject: Subject) -> Said:
    """`start` gives M numbers; `verify` hands on what the definition says, float64 [B, M]."""
    rule = subject.verifier
    if not rule.memory:
        raise DoesNotApply("it remembers nothing")
    size = rule.memory
    if len(numbers := rule.start((1, 2, 3))) != size:
        raise Failed(f"start gives {len(numbers)} numbers, wanted its memory of {size}")
    case = subject.case(200, 3, 140)
    assert case.memory is not None  # it remembers
    found = case.judge(rule).memory
    if found is None or found.shape != (200, size) or found.dtype != torch.float64:
        raise Failed(f"verify returns memory {shape_of(found)}, wanted float64 [200, {size}]")
    if not bool(found.isfinite().all()):
        raise Failed("verify returns a memory that is not finite")
    changed = float((found != case.memory).any(-1).double().mean())
    if isinstance(rule, PointwiseVerifier):
        if type(rule).advance is PointwiseVerifier.advance and type(rule).follow is PointwiseVerifier.follow:
            raise Failed("it has a memory and neither advance nor follow: nothing is ever remembered")
        if not bool(((found - _replayed(subject, rule, case)).abs() <= TOLERANCE).all()):
            raise Failed("verify hands on another memory than follow and advance say")
    return f"M = {size}, changed by {changed:.0%} of the drafts", {"size": size, "changed": changed}


def declared_needs(subject: Subject) -> Said:
    """A rule that does not say that it needs raw logits or features does not look at them."""
    rule = subject.verifier
    if bool(rule.taps) != ("hidden" in rule.needs):
        raise Failed(f"its taps are {list(rule.taps)} and its needs {sorted(rule.needs)}: taps and hidden go together")
    if "raw_logits" not in rule.needs:
        case = subject.case(400, 3, 150)
        noise = torch.randn(case.scores.logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        other = evolve(case, scores=evolve(case.scores, logits=noise))
        if wrong := int(differ(case.judge(rule), other.judge(rule)).sum()):
            raise Failed(f"other raw logits change {counted(wrong, 'verdict')} of 400, and it does not say raw_logits")
    return ", ".join(sorted(rule.needs)).replace("_", " ") or "p, and q where it is known", {}


def _replayed(subject: Subject, rule: PointwiseVerifier, case: Case) -> Tensor:
    """Memory after a verdict on a chain, by the definition."""
    assert case.memory is not None
    verdict, tokens, law = case.judge(rule), case.draft.tokens, case.draft.law
    assert law is not None  # dense
    remembered = rule.follow(case.scores.tokens[:, 0], case.memory.clone())
    for node in range(tokens.shape[1]):
        column = torch.full_like(case.draft.sizes, node)
        at = Place(
            p=case.scores.probs[:, node],
            q=law.row(column, column >= 0),
            token=tokens[:, node],
            depth=column,
            logits=case.scores.logits[:, node],
            hidden={tap: features[:, node + 1] for tap, features in case.scores.hidden.items()},
            memory=remembered,
        )
        examined = ((verdict.lengths >= node) & (case.draft.sizes > node)).unsqueeze(1)
        if (after := rule.advance(at)) is not None:
            remembered = torch.where(examined, after, remembered)
        kept = (verdict.lengths > node).unsqueeze(1)
        remembered = torch.where(kept, rule.follow(tokens[:, node], remembered), remembered)
    return remembered


def _well_formed(verdict: Verdict, case: Case) -> None:
    rows, nodes = case.draft.tokens.shape
    size, dtype = case.scores.probs.shape[-1], case.scores.probs.dtype
    for name, tensor, shape, wanted in (
        ("path", verdict.path, (rows, verdict.path.shape[-1]), torch.int64),
        ("lengths", verdict.lengths, (rows,), torch.int64),
        ("next_probs", verdict.next_probs, (rows, size), dtype),
        ("source", verdict.source, (rows,), torch.int8),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != wanted:
            raise Failed(f"verify returns {name} {shape_of(tensor)}, wanted {str(wanted)[6:]} {list(shape)}")
    if bool(((verdict.lengths < 0) | (verdict.lengths > case.draft.sizes)).any()):
        raise Failed(f"verify keeps {verdict.lengths.tolist()} tokens of drafts of {case.draft.sizes.tolist()}")
    if bool(((verdict.source < 0) | (verdict.source >= len(SOURCES))).any()):
        raise Failed(f"verify returns source {verdict.source.tolist()}, wanted indices into {list(SOURCES)}")
    off = float((verdict.next_probs.sum(-1) - 1).abs().max())
    if not off <= (1e-5 if dtype == torch.float32 else TOLERANCE) or bool((verdict.next_probs < 0).any()):
        raise Failed(f"next_probs is no law: a sum is off by {off:.3g}, the least value {verdict.next_probs.min():.3g}")
    parents = case.draft.parents if case.draft.parents is not None else torch.arange(-1, nodes - 1).repeat(rows, 1)
    for row in range(rows):
        before = -1
        for node in verdict.path[row, : int(verdict.lengths[row])].tolist():
            if not 0 <= node < nodes or int(parents[row, node]) != before:
                raise Failed(f"path {verdict.path[row].tolist()} is none from the root")
            before = node


def _place_shapes(subject: Subject, at: Place, dtype: torch.dtype) -> None:
    rule = subject.pointwise
    answers = {"acceptance": rule.acceptance(at), "correct": rule.correct(at)}
    wanted = dict.fromkeys(answers, at.p.shape)
    if isinstance(rule, FastAccept):
        answers["accept_at"], wanted["accept_at"] = rule.accept_at(at), at.token.shape
    for name, tensor in answers.items():
        if tensor.shape != wanted[name] or tensor.dtype != dtype:
            raise Failed(f"{name} returns {shape_of(tensor)}, wanted {str(dtype)[6:]} {list(wanted[name])}")


def _one(at: Place, row: int) -> Place:
    return Place(
        at.p[[row]],
        Dense(at.q.dense()[[row]]),
        at.token[[row]],
        at.depth[[row]],
        at.logits[[row]],
        {tap: features[[row]] for tap, features in at.hidden.items()},
        None if at.memory is None else at.memory[[row]],
    )


def _some(verdict: Verdict, index: list[int]) -> Verdict:
    return Verdict(
        verdict.path[index],
        verdict.lengths[index],
        verdict.next_probs[index],
        verdict.source[index],
        None if verdict.memory is None else verdict.memory[index],
    )


def _tensors(case: Case) -> dict[str, Tensor]:
    law = case.draft.law
    found = {
        "draft.tokens": case.draft.tokens,
        "draft.sizes": case.draft.sizes,
        "draft.parents": case.draft.parents,
        "draft.law": None if law is None else law.dense(),
        "scores.tokens": case.scores.tokens,
        "scores.logits": case.scores.logits,
        "scores.probs": case.scores.probs,
        **{f"scores.hidden[{tap}]": features for tap, features in case.scores.hidden.items()},
    }
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _state(rule: object) -> dict[str, Any]:
    """What an object and its class hold, in a form that tells whether it changed."""
    slots = [name for base in type(rule).__mro__ for name in getattr(base, "__slots__", ()) if name != "__weakref__"]
    found = {name: getattr(rule, name) for name in slots if hasattr(rule, name)} | dict(getattr(rule, "__dict__", {}))
    plain = (bool, int, float, str, list, dict, set, Tensor)
    found |= {f"class {name}": value for name, value in vars(type(rule)).items() if isinstance(value, plain)}
    return {name: _frozen(value) for name, value in found.items()}


def _frozen(value: Any) -> Any:
    try:
        return pickle.dumps(value)
    except Exception:  # what cannot be pickled is told apart by identity
        return id(value)
