"""Which tokens the loss of a step looks at: a third of the vocabulary costs a third of the time.

The frequent tokens and those of the step's own texts are looked at as they are. Of all others a random few stand for
the rest, each for as many as are left out: their logits are raised by the logarithm of that number, for the target and
for the draft alike, so sums over the vocabulary keep their expectation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import final

import torch
from attrs import define
from torch import Tensor

from specdec_plugins.distill.corpus import Text
from specdec_plugins.distill.loss import Vocabulary


def frequent(texts: Iterable[Text], count: int) -> Tensor:
    """At most `count` ids int64 [n], the most frequent first."""
    seen: Counter[int] = Counter()
    for text in texts:
        seen.update(text.tokens[max(1, text.start) :])
    order = sorted(seen, key=lambda token: (-seen[token], token))
    return torch.tensor(order[:count], dtype=torch.int64)


@final
@define(eq=False)
class Lexicon:
    """Chooses the tokens of a step.

    Attributes:
        head: [V, H], the target's.
        common: int64 [n], tokens that are always looked at.
        size: tokens of a step; the whole vocabulary where it is None.
    """

    head: Tensor
    common: Tensor
    size: int | None

    def choose(self, tokens: Tensor, generator: torch.Generator) -> tuple[Tensor | None, Vocabulary]:
        """The ids int64 [M] of a step in which `tokens` int64 [...] follow, None for all of them, and what they are."""
        width = len(self.head)
        if self.size is None or self.size >= width:
            every = torch.arange(width, device=self.head.device)
            return None, Vocabulary(self.head, torch.zeros(width, device=self.head.device), every)
        known = torch.zeros(width, dtype=torch.bool)
        known[self.common] = True
        known[tokens.flatten().cpu()] = True
        others = (~known).nonzero().flatten()
        count = max(1, self.size - int(known.sum()))
        drawn = others[torch.randperm(len(others), generator=generator)[:count]]
        ids = torch.cat([known.nonzero().flatten(), drawn])
        offsets = torch.zeros(len(ids))
        offsets[len(ids) - len(drawn) :] = math.log(len(others) / len(drawn)) if len(drawn) else 0.0
        places = torch.zeros(width, dtype=torch.int64)
        places[ids] = torch.arange(len(ids))
        device = self.head.device
        ids = ids.to(device)
        return ids, Vocabulary(self.head[ids], offsets.to(device), places.to(device))
