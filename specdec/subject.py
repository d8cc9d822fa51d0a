"""A rule under test, and what the kit shows it: random drafts and scores, with raw logits and features."""

from __future__ import annotations

from typing import Any, Literal, cast, final

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from specdec.law import Dense, Law, Logits, PointMass, Sparse
from specdec.noise import Noise
from specdec.probability import sample
from specdec.types import Draft, Scores, Verdict
from specdec.verifier import Place, PointwiseVerifier, Verifier

Said = tuple[str, dict[str, float]]
LawKind = Literal["dense", "logits", "sparse", "point", "none"]

TREE = (-1, -1, 0, 0, 2)
# Laws are compared in float64; what remains is the order of sums.
TOLERANCE = 1e-9
_SIZE = 7  # of the vocabulary, where nothing else is said


class Failed(Exception):  # noqa: N818  # it is raised as an answer, and caught by the kit alone
    """The rule is not what was wanted."""

    def __init__(self, text: str, **figures: float) -> None:
        super().__init__(text)
        self.figures = figures


class DoesNotApply(Exception):  # noqa: N818  # the same
    """There is nothing to check, and why."""


@final
@frozen(eq=False)
class Case:
    """One call of `verify`."""

    draft: Draft
    scores: Scores
    noise: Any
    memory: Tensor | None

    def judge(self, verifier: Verifier) -> Verdict:
        """The verdict of a rule."""
        memory = None if self.memory is None else self.memory.clone()
        return verifier.verify(self.draft, self.scores, cast("Noise", self.noise), memory)

    def rows(self, index: list[int]) -> Case:
        """Some of the rows, in this order."""
        law = self.draft.law
        return Case(
            evolve(
                self.draft,
                tokens=self.draft.tokens[index],
                sizes=self.draft.sizes[index],
                parents=None if self.draft.parents is None else self.draft.parents[index],
                law=None if law is None else Dense(law.dense()[index]),
            ),
            Scores(
                self.scores.tokens[index],
                self.scores.logits[index],
                self.scores.probs[index],
                {tap: features[index] for tap, features in self.scores.hidden.items()},
                self.scores.finite[index],
            ),
            Noise(tuple(self.noise.seeds[row] for row in index), tuple(self.noise.steps[row] for row in index)),
            None if self.memory is None else self.memory[index],
        )


@final
@frozen(eq=False)
class Subject:
    """The rule under test, and what it is shown.

    Attributes:
        verifier: prepared.
        hidden_size: H of the features it is given.
        quick: fewer models and samples.
        laws: of whole chains, found once for all checks.
    """

    verifier: Verifier
    hidden_size: int = 64
    quick: bool = False
    laws: dict[int, Tensor] = field(init=False, factory=dict)
    _weights: dict[tuple[int, int], Tensor] = field(init=False, factory=dict)

    @property
    def pointwise(self) -> PointwiseVerifier:
        """The rule, if it has a definition place by place."""
        if not isinstance(self.verifier, PointwiseVerifier):
            raise DoesNotApply("it decides by whole drafts, not place by place")
        return self.verifier

    @property
    def kinds(self) -> tuple[LawKind, ...]:
        """Laws of drafters that the rule accepts."""
        soft: tuple[LawKind, ...] = ("dense", "logits", "sparse")
        return soft if "draft_law" in self.verifier.needs else (*soft, "point", "none")

    @property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """Parents of a chain, and of a tree where the rule can walk one."""
        return (None, TREE) if self.verifier.trees else (None,)

    def raw(self, p: Tensor) -> Tensor:
        """Logits whose softmax is nearly p [..., V]; tokens that a filter forbade have some, too, and all are shifted.

        Positive, as those of real heads often are, for rules that take ratios.
        """
        generator = torch.Generator().manual_seed(p.shape[-1])
        rest = 0.05 + 0.2 * torch.rand(p.shape[-1], generator=generator, dtype=torch.float64)
        return torch.where(p > 0, p, rest.to(p.dtype)).log() + 8.0

    def features(self, p: Tensor) -> dict[int, Tensor]:
        """What the target thinks where its next law is p [..., V], by tap."""
        found = {}
        for tap in self.verifier.taps:
            if (key := (tap, p.shape[-1])) not in self._weights:
                generator = torch.Generator().manual_seed(1000 + tap)
                shape = (p.shape[-1], self.hidden_size)
                self._weights[key] = torch.randn(shape, generator=generator, dtype=torch.float64)
            found[tap] = ((p + 0.05).log() @ self._weights[key].to(p.dtype)).sin()
        return found

    def see(self, scores: Scores) -> Scores:
        """Scores with raw logits and features made from their laws."""
        return evolve(scores, logits=self.raw(scores.probs), hidden=self.features(scores.probs))

    def case(
        self,
        rows: int,
        nodes: int,
        seed: int,
        *,
        size: int = _SIZE,
        dtype: torch.dtype = torch.float64,
        kind: LawKind = "dense",
        parents: tuple[int, ...] | None = None,
        zeros: bool = True,
        memory: bool = True,
    ) -> Case:
        """Ragged drafts really drawn from their laws, with a target that often agrees."""
        nodes = nodes if parents is None else len(parents)
        p = simplices((rows, nodes + 1, size), seed, dtype, zeros=zeros)
        q = 0.5 * simplices((rows, nodes, size), seed + 1, dtype, zeros=zeros) + 0.5 * p[:, :nodes]
        generator = torch.Generator().manual_seed(seed + 2)
        tokens = sample(q, torch.rand((rows, nodes), generator=generator, dtype=torch.float64))
        sizes = torch.randint(0, nodes + 1, (rows,), generator=generator)
        pending = torch.randint(0, size, (rows, 1), generator=generator)
        law = None if kind == "none" else make_law(kind, tokens, q)
        tree = None if parents is None else torch.tensor(parents).repeat(rows, 1)
        fed = torch.cat([pending, tokens], 1)
        scores = self.see(Scores(fed, p.log(), p, {}, torch.ones(rows, dtype=torch.bool)))
        noise = Noise(tuple(range(rows)), (seed,) * rows)
        return Case(Draft(tokens, sizes, tree, law), scores, noise, self.memories(rows, seed) if memory else None)

    def memories(self, rows: int, seed: int) -> Tensor | None:
        """What the rule remembers of requests that are under way, [rows, M]."""
        if not self.verifier.memory:
            return None
        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(0, _SIZE, (rows, 3), generator=generator).tolist()
        memory = torch.tensor([self.verifier.start(tuple(prompt)) for prompt in prompts], dtype=torch.float64)
        for step in range(2):
            case = evolve(self.case(rows, 3, seed + 10 * step, memory=False), memory=memory)
            after = case.judge(self.verifier).memory
            if after is None or after.shape != memory.shape:
                raise Failed(f"verify returns memory {shape_of(after)}, wanted {list(memory.shape)}")
            memory = after
        return memory

    def first(self, case: Case) -> Place:
        """The place of every row's first node, as the rule sees it."""
        draft, memory = case.draft, case.memory
        law = draft.law or PointMass(draft.tokens, case.scores.probs.shape[-1], case.scores.probs.dtype)
        node = torch.zeros_like(draft.sizes)
        if memory is not None:
            memory = self.pointwise.follow(case.scores.tokens[:, 0], memory)
        return Place(
            p=case.scores.probs[:, 0],
            q=law.row(node, node >= 0),
            token=draft.tokens[:, 0],
            depth=node,
            logits=case.scores.logits[:, 0],
            hidden={tap: features[:, 1] for tap, features in case.scores.hidden.items()},
            memory=memory,
        )


def simplices(shape: tuple[int, ...], seed: int, dtype: torch.dtype, *, zeros: bool = True) -> Tensor:
    """Random laws, some sharp; with zeros a fifth of the tokens is impossible, as after top-k."""
    generator = torch.Generator().manual_seed(seed)
    found = (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).exp()
    if zeros:
        found = found * (torch.rand(shape, generator=generator) < 0.8)
        found[..., :2] += 0.02 * torch.rand((*shape[:-1], 2), generator=generator, dtype=torch.float64) + 0.01
    return (found / found.sum(-1, keepdim=True)).to(dtype)


def make_law(kind: LawKind, tokens: Tensor, q: Tensor) -> Law:
    """The law q [..., V] of draft tokens, in one of the ways a drafter may hand it over."""
    if kind == "logits":
        return Logits(0.7 * (q.log() + 3.0), 0.7)
    if kind == "sparse":
        best = q.topk(q.shape[-1], dim=-1)
        return Sparse(best.indices, best.values, q.shape[-1])
    return PointMass(tokens, q.shape[-1], q.dtype) if kind == "point" else Dense(q)


def differ(left: Verdict, right: Verdict, tolerance: float = TOLERANCE) -> Tensor:
    """Rows whose verdicts are not the same, bool [B]."""
    counted = torch.arange(left.path.shape[1]) < left.lengths.unsqueeze(1)
    wrong = (left.lengths != right.lengths) | (left.source != right.source)
    wrong |= ((left.path != right.path) & counted).any(-1)
    wrong |= ~((left.next_probs - right.next_probs).abs() <= tolerance).all(-1)
    if left.memory is not None and right.memory is not None:
        wrong |= ~((left.memory - right.memory).abs() <= tolerance).all(-1)
    return wrong


def counted(number: int, noun: str) -> str:
    """`1 row`, `3 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shape_of(tensor: Tensor | None) -> str:
    """`float64 [2, 3]`."""
    return "None" if tensor is None else f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"
