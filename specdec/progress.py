"""What the outside sees of a request: an event for each step, a completion at the end."""

from __future__ import annotations

from typing import final

from attrs import define, field, frozen

from specdec.metrics import Counters
from specdec.sequence import Sequence
from specdec.types import FinishReason, Kept


@final
@frozen(eq=False)
class Completion:
    """A finished request.

    Attributes:
        id: the request's.
        tokens: emitted ids; an end-of-sequence id or the token that completes a stop string is the last of them.
        text: their text without special tokens, up to a stop string; None without a tokenizer.
        finish_reason: `eos`, `stop_string`, `length`, `context` or `error` (scores that were not finite).
        counters: what happened.
        diagnostics: name of `specdec.diagnostics.DIAGNOSTICS` -> one number for each examined draft position, in order;
            empty unless asked for.
        logprobs: `target`, `raw`, `output` and `uncovered` of `specdec.diagnostics.probe`, one number for each of
            `tokens`; empty unless asked for. exp(target - output) is the token's importance weight.
    """

    id: str
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    counters: Counters
    diagnostics: dict[str, list[float]]
    logprobs: dict[str, list[float]]


@final
@frozen(eq=False)
class Event:
    """What one step did for one request: its new ids, the text that became final, and at the end the completion."""

    id: str
    tokens: tuple[int, ...]
    text: str
    completion: Completion | None


@final
@define(eq=False)
class Progress:
    """Counters, asked numbers and shown text of one running request."""

    counters: Counters = field(factory=Counters)
    diagnostics: dict[str, list[float]] = field(factory=dict)
    logprobs: dict[str, list[float]] = field(factory=dict)
    shown: int = 0

    def record(self, row: Sequence, kept: Kept, index: int) -> Event:
        """Add row `index` of a step. Tokens that a stop cut off are in none of the figures."""
        self.counters.count(kept, index)
        for lists, new in ((self.diagnostics, kept.diagnostics), (self.logprobs, kept.logprobs)):
            for name, values in new.items():
                lists.setdefault(name, []).extend(values[index])
        completion = None
        if row.finish_reason is not None:
            if row.text is not None:
                row.text.close()
            completion = Completion(
                id=row.request.id,
                tokens=tuple(row.output),
                text=None if row.text is None else row.text.text,
                finish_reason=row.finish_reason,
                counters=self.counters,
                diagnostics=self.diagnostics,
                logprobs=self.logprobs,
            )
        text = "" if row.text is None else row.text.text[self.shown :]
        self.shown += len(text)
        return Event(row.request.id, kept.tokens[index], text, completion)
