"""The steps: what is drawn, the gradient, the optimiser, and the state from which a run goes on.

All that is random in a step is a function of the recipe's seed and of the step's number, and so is what the pool holds.
A state is then the step's number, the weights, and what the optimiser keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, final

import torch
from attrs import define, field
from torch import Tensor, nn

from specdec.noise import request_seed
from specdec.target import Target
from specdec_plugins.distill import measure
from specdec_plugins.distill.anchors import Blocks, choose, make
from specdec_plugins.distill.corpus import Text
from specdec_plugins.distill.features import Features
from specdec_plugins.distill.loss import Divergence, Weights
from specdec_plugins.distill.network import Network
from specdec_plugins.distill.pool import Pool
from specdec_plugins.distill.recipe import TrainSection
from specdec_plugins.distill.vocabulary import Lexicon

_Found = TypeVar("_Found")

_CHUNK = 96
_BETAS = (0.9, 0.95)
_CONFIDENCE_RATE = 2e-3


@final
@define(eq=False)
class Trainer:
    """A network, what it learns from, and its optimisers.

    Attributes:
        target: whose law is learnt.
        network: what learns.
        pool: texts with features.
        lexicon: chooses the tokens of a step.
        options: the recipe's.
        size: places of a block.
        mask_id: what stands at them.
        seed: of all randomness.
        step: steps done, those of the confidence head included.
    """

    target: Target
    network: Network
    pool: Pool
    lexicon: Lexicon
    options: TrainSection
    size: int
    mask_id: int
    seed: int
    step: int = field(init=False, default=0)
    _optimiser: torch.optim.Optimizer = field(init=False)
    _learning: list[nn.Parameter] = field(init=False)

    def __attrs_post_init__(self) -> None:
        confident = list(self.network.confidence_head.parameters())
        own = {id(parameter) for parameter in confident}
        self._learning = [parameter for parameter in self.network.parameters() if id(parameter) not in own]
        groups = [
            {"params": self._learning, "weight_decay": self.options.weight_decay},
            {"params": confident, "weight_decay": 0.0},
        ]
        self._optimiser = torch.optim.AdamW(groups, lr=0.0, betas=_BETAS, fused=True)

    @property
    def last(self) -> int:
        """Steps in all."""
        return self.options.steps + self.options.confidence_steps

    def state(self) -> dict[str, Any]:
        """All that a later step depends on."""
        return {"step": self.step, "network": self.network.state_dict(), "optimiser": self._optimiser.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.step = state["step"]
        self.network.load_state_dict(state["network"])
        self._optimiser.load_state_dict(state["optimiser"])

    def advance(self) -> dict[str, float]:
        """One step; says what it found."""
        generator = torch.Generator().manual_seed(request_seed(self.seed, "step", self.step))
        drawn = self.pool.draw(self.step, self.options.sequences, generator)
        texts, features = [text for text, _ in drawn], [found for _, found in drawn]
        blocks = make(texts, choose(texts, self.options.anchors, generator), self.size, self.mask_id)
        keep = self.options.decay ** torch.arange(self.size)
        taken = blocks.there & (torch.rand(blocks.there.shape, generator=generator) < keep)
        found = self._learn(blocks, features, taken, generator) if self.step < self.options.steps else None
        found = found or self._trust(blocks, features, taken)
        self.step += 1
        return found

    def rate(self) -> float:
        """The learning rate of the step to come."""
        warm, total = self.options.warm_up, self.options.steps
        if self.step < warm:
            return self.options.learning_rate * (self.step + 1) / warm
        way = (self.step - warm) / max(1, total - warm)
        return self.options.learning_rate * (0.01 + 0.99 * (1 + math.cos(math.pi * way)) / 2)

    def curves(self, held: Sequence[tuple[Text, Features]]) -> dict[str, measure.Curve]:
        """What rules keep along held-out texts."""
        return measure.curves(self._chances, held, self.size, self.mask_id)

    def _learn(
        self, blocks: Blocks, features: Sequence[Features], taken: Tensor, generator: torch.Generator
    ) -> dict[str, float]:
        options = self.options
        ids, words = self.lexicon.choose(blocks.following[taken], generator)
        with self._arithmetic():
            hidden = self._rows(blocks, features)
            codes = self.network.markov_head.codes(blocks.previous, hidden)
        bias = self.network.markov_head.markov_w2.weight
        loss, shares = Divergence.apply(  # type: ignore[no-untyped-call]  # torch functions are untyped
            hidden[taken].float(),
            codes[taken].float(),
            bias if ids is None else bias[ids],
            self._final(blocks, features)[taken],
            blocks.following[taken],
            words,
            Weights(options.tv, options.kl, options.ce),
        )
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._learning, options.clip)
        self._descend(self.rate(), 0.0)
        return {"loss": loss.item(), "kept": shares.mean().item(), "norm": norm.item()}

    def _trust(self, blocks: Blocks, features: Sequence[Features], taken: Tensor) -> dict[str, float]:
        """A step of the confidence head: what the standard rule keeps, guessed from what is known before it."""
        with torch.no_grad(), self._arithmetic():
            hidden = self._rows(blocks, features)
            shares = self._over_laws(blocks, features, hidden, taken, lambda p, q: torch.minimum(p, q).sum(-1))
            chances = torch.cat(shares)
            embedded = self.network.markov_head.embed(blocks.previous)[taken].float()
            rows = hidden[taken].float()
        logits = self.network.confidence_head(rows, embedded)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, chances)
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # the same
        left = 1 - (self.step - self.options.steps) / max(1, self.options.confidence_steps)
        self._descend(0.0, _CONFIDENCE_RATE * left)
        error = (logits.sigmoid() - chances).abs().mean()
        return {"loss": loss.item(), "kept": chances.mean().item(), "error": error.item()}

    def _descend(self, rate: float, confident: float) -> None:
        for group, value in zip(self._optimiser.param_groups, (rate, confident), strict=True):
            group["lr"] = value
        self._optimiser.step()

    def _chances(self, blocks: Blocks, features: Sequence[Features]) -> dict[str, Tensor]:
        with torch.no_grad(), self._arithmetic():
            hidden = self._rows(blocks, features)
        parts = self._over_laws(blocks, features, hidden, blocks.there, measure.kept)
        empty = torch.zeros(blocks.there.shape)
        return {
            name: empty.masked_scatter(blocks.there, torch.cat([part[name] for part in parts])) for name in parts[0]
        }

    def _over_laws(
        self,
        blocks: Blocks,
        features: Sequence[Features],
        hidden: Tensor,
        taken: Tensor,
        look: Callable[[Tensor, Tensor], _Found],
    ) -> list[_Found]:
        """What `look` says of the laws [r, V] of target and draft at the places taken, some after another."""
        head, kind = self.lexicon.head, self.lexicon.head.dtype
        with torch.no_grad(), self._arithmetic():
            codes = self.network.markov_head.codes(blocks.previous, hidden)[taken].to(kind)
            rows, final = hidden[taken].to(kind), self._final(blocks, features)[taken].to(kind)
            bias = self.network.markov_head.markov_w2.weight.to(kind)
            found = []
            for first in range(0, len(rows), _CHUNK):
                chunk = slice(first, first + _CHUNK)
                p = (final[chunk] @ head.T).float().softmax(-1)
                q = (rows[chunk] @ head.T + codes[chunk] @ bias.T).float().softmax(-1)
                found.append(look(p, q))
        return found

    def _rows(self, blocks: Blocks, features: Sequence[Features]) -> Tensor:
        embedded = self.target.embed(blocks.inputs.flatten(1)).detach().float()
        rows: Tensor = self.network(embedded, blocks, [found.tapped for found in features])
        return rows

    def _final(self, blocks: Blocks, features: Sequence[Features]) -> Tensor:
        """The target's own rows [B, A, K, H]: at the token before the one that a place predicts."""
        found = []
        for row, of_text in enumerate(features):
            places = blocks.positions[row].clamp(max=len(of_text.final) - 1)
            found.append(of_text.final[places])
        return torch.stack(found)

    def _arithmetic(self) -> Any:
        """The target's dtype for products, where it is no wider than the weights that are trained."""
        kind = self.lexicon.head.dtype
        return nullcontext() if kind == torch.float32 else torch.autocast(self.lexicon.head.device.type, kind)
