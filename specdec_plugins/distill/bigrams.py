"""First weights of a Markov head: what the target itself expects after one token, when it sees little else.

The target reads each token x of the texts behind the token that it most often follows, and both behind the texts'
usual first token; its last row h(x) gives logits W h(x). The bias from x is their deviation from the mean over tokens,
and the head's two matrices are its best approximation of rank r when tokens count as often as they occur (a truncated
singular value decomposition). A drafter then begins as a bigram model of its target, and places behind the first do not
have to learn one from random numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from specdec.target import FINAL, Target
from specdec.types import Span
from specdec_plugins.distill.corpus import Text
from specdec_plugins.drafters.blocks.markov import Markov
from specdec_plugins.kv.slab import Slab

_ROWS = 256  # tokens read at once


def begin(markov: Markov, target: Target, head: Tensor, texts: Sequence[Text]) -> None:
    """Give a head these weights. Tokens that no text has say nothing; ranks beyond the target's own stay.

    Args:
        markov: the head; of kind rnn, whose bias depends on more than one token, it stays as it is.
        target: whose expectations they are; its cache is left alone.
        head: its vocabulary head, [V, H].
        texts: say which tokens, and how often.
    """
    if markov.kind == "rnn":
        return
    seen = Counter(token for text in texts for token in text.tokens)
    ids = torch.tensor(sorted(seen), device=head.device)
    share = torch.tensor([seen[token] for token in sorted(seen)], dtype=torch.float32, device=head.device).unsqueeze(1)
    share /= share.sum()
    rows = _rows(target, _contexts(texts)).float()
    rows -= (share * rows).sum(0)
    words = head.float() - head.float().mean(0)
    basis, triangle = torch.linalg.qr(words)
    _, strength, directions = torch.linalg.svd(torch.linalg.qr(share.sqrt() * rows)[1] @ triangle.T)
    rank = min(markov.rank, int((strength > 1e-6 * strength[0]).sum()))
    into = basis @ directions[:rank].T
    codes = rows @ (words.T @ into)
    even = (codes.square().mean(0) / into.square().mean(0)).pow(0.25)
    weak = 2.0 if markov.kind == "gated" else 1.0  # its gate begins half open
    with torch.no_grad():
        # What no text has is never trained: random numbers would stay, and w2 makes a bias of them.
        markov.markov_w1.weight[:, :rank] = 0
        markov.markov_w1.weight[ids, :rank] = codes / even * weak
        markov.markov_w2.weight[:, :rank] = into * even


def _contexts(texts: Sequence[Text]) -> Tensor:
    """Each token of the texts, ascending, behind two others: int64 [n, 3]."""
    first = Counter(text.tokens[0] for text in texts).most_common(1)[0][0]
    before: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for text in texts:
        before[text.tokens[0]][first] += 1
        for one, token in pairwise(text.tokens):
            before[token][one] += 1
    return torch.tensor([(first, before[token].most_common(1)[0][0], token) for token in sorted(before)])


def _rows(target: Target, contexts: Tensor) -> Tensor:
    """The target's last rows [n, H] at the end of contexts int64 [n, T]."""
    count, width = contexts.shape
    reader = Target(target.model, None, kv=Slab(rows=min(_ROWS, count), tokens=width))
    found = []
    for at in range(0, count, _ROWS):
        chunk = contexts[at : at + _ROWS].to(target.device)
        span = Span(chunk, (width,) * len(chunk))
        hidden = reader.forward(tuple(range(len(chunk))), span, taps=(FINAL,), logits=False).hidden
        found.append(hidden[FINAL][:, -1].clone())
    return torch.cat(found)
