"""Heads that look at the token before: a bias for the logits of the next one, and a guess whether it will be kept.

Notation of the equations: e = W1[x], the embedding of the token before, and h, the backbone's row for this place.
"""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor, nn

Kind = Literal["vanilla", "gated", "rnn"]
KINDS: tuple[Kind, ...] = ("vanilla", "gated", "rnn")


@final
class Markov(nn.Module):
    """A bias of rank r from the token before.

    vanilla: W2 e. gated: W2 (sigmoid(G [h; e]) * e). rnn: with (g, c, o) = J [s; e; h] the state becomes
    sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c), from 0 at the start of a block, and the bias is W2 tanh(o).
    """

    def __init__(self, vocabulary: int, hidden_size: int, rank: int, kind: Kind = "vanilla") -> None:
        super().__init__()
        self.rank, self.kind = rank, kind
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def embed(self, previous: Tensor) -> Tensor:
        """e [..., r] of tokens int64 [...]."""
        found: Tensor = self.markov_w1(previous)
        return found

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One place of a walk.

        Args:
            previous: int64 [B], the token before.
            hidden: [B, H], the backbone's row.
            state: [B, r] from the place before; None at the start of a block, and always where there is none.

        Returns:
            The bias [B, V], and the state for the next place.
        """
        inner, state = self._inner(self.embed(previous), hidden, state)
        return self.markov_w2(inner), state

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """The bias [..., K, V] at all K places of blocks, from int64 [..., K] and [..., K, H]."""
        return self.markov_w2(self.codes(previous, hidden))  # type: ignore[no-any-return]  # torch modules are untyped when called

    def codes(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """What W2 makes the bias of, [..., K, r], at all K places of blocks."""
        embedded = self.embed(previous)
        if self.kind != "rnn":
            return self._inner(embedded, hidden, None)[0]
        state, rows = None, []
        for place in range(previous.shape[-1]):
            inner, state = self._inner(embedded[..., place, :], hidden[..., place, :], state)
            rows.append(inner)
        return torch.stack(rows, -2)

    def _inner(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.kind == "vanilla":
            return embedded, None
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1))) * embedded, None
        if state is None:
            state = torch.zeros_like(embedded)
        gate, candidate, out = self.joint_proj(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)


@final
class Confidence(nn.Module):
    """A guess of how probable it is that the rule keeps a token, from what is known before it is drawn."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(self, hidden: Tensor, embedded_previous: Tensor | None = None) -> Tensor:
        """Logits [...] in float32 or finer, from [..., H], and [..., r] where the head was made with a rank."""
        seen = hidden if embedded_previous is None else torch.cat([hidden, embedded_previous], -1)
        kind = torch.promote_types(seen.dtype, torch.float32)
        logits = nn.functional.linear(seen.to(kind), self.proj.weight.to(kind), self.proj.bias.to(kind))
        return logits.squeeze(-1)
