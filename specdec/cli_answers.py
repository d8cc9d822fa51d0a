"""What `specdec generate` prints: texts as they become final, then statistics, and a document for scripts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Generator as Stream
from contextlib import closing
from typing import TYPE_CHECKING, Any, final

import click
from attrs import define, field

if TYPE_CHECKING:
    from specdec.generation import Generator
    from specdec.progress import Completion, Event
    from specdec.types import Request

# A model may emit what moves the cursor or renames the window; only lines and tabs reach a terminal.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@final
@define
class Answers:
    """Texts on their way out, and the account of them.

    Attributes:
        show: print texts.
        quiet: print neither notes nor statistics.
        tokens: emitted so far, those of unfinished requests included.
        steps: target verifications, counted for each request.
        seconds: draft, verify, rest.
        warning: what a rule that is not lossless means here; empty for one that is.
        prompts: tokens of each prompt that was answered.
        completions: the answers, in the same order.
    """

    show: bool
    quiet: bool
    tokens: int = 0
    steps: int = 0
    seconds: list[float] = field(factory=lambda: [0.0, 0.0, 0.0])
    warning: str = ""
    prompts: list[int] = field(factory=list)
    completions: list[Completion] = field(factory=list)
    _notes: list[str] = field(factory=list)
    _open: bool = False  # the cursor stands within a line

    def events(self, generator: Generator, requests: list[Request]) -> Stream[Event, None, None]:
        """Serve requests, keeping account."""
        engine = generator.engine(requests)
        if engine.verifier.exactness != "lossless" and engine.drafter.num_speculative_tokens:
            greedy = requests[0].sampling.greedy
            what = "the text may differ from the target's own" if greedy else "the law of the text is not the target's"
            self.warning = f"{generator.verifier} is not a lossless rule: {what}"
        for note in engine.drafter.notes:
            if not self.quiet and note not in self._notes:
                click.echo(note, err=True)
                self._notes.append(note)
        earlier = [there - spent for there, spent in zip(engine.seconds, self.seconds, strict=True)]
        with closing(engine.stream(requests)) as stream:  # type: ignore[type-var]  # an iterator that is a generator
            for event in stream:
                self.tokens += len(event.tokens)
                self.steps += 1
                self.seconds = [there - before for there, before in zip(engine.seconds, earlier, strict=True)]
                yield event

    def write(self, text: str) -> None:
        """Print a piece of text at once."""
        if not self.show or not text:
            return
        if sys.stdout.isatty():
            text = text.translate(_CONTROLS)
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        click.echo(text.encode(encoding, "replace").decode(encoding), nl=False, color=True)  # color: as it is
        self._open = not text.endswith("\n")

    def end_line(self) -> None:
        """End the line, where one was begun."""
        if self._open:
            click.echo()
        self._open = False

    def keep(self, request: Request, completion: Completion) -> None:
        """Take an answer into the account."""
        self.prompts.append(len(request.prompt))
        self.completions.append(completion)

    def tell(self) -> None:
        """Statistics, and what the rule means for the text, on stderr."""
        if self.quiet or not self.steps:
            return
        seconds = sum(self.seconds)
        drafted = sum(done.counters.num_draft_tokens for done in self.completions)
        kept = sum(done.counters.num_accepted_tokens for done in self.completions)
        facts = [
            f"{self.tokens} tokens in {seconds:.2f} s, {self.tokens / seconds:.1f} tokens/s",
            f"acceptance length {self.tokens / self.steps:.2f}",
            f"{kept / drafted:.0%} of {drafted} drafted tokens accepted" if drafted else "nothing drafted",
            "draft {:.0%}, verify {:.0%}, rest {:.0%} of the time".format(*(part / seconds for part in self.seconds)),
        ]
        ends = Counter(done.finish_reason.replace("_", " ") for done in self.completions)
        if ends:
            one = len(self.completions) == 1
            facts.append("ended by " + ", ".join(name if one else f"{name} ({ends[name]})" for name in ends))
        click.echo("; ".join(facts), err=True)
        if self.warning:
            click.echo(self.warning, err=True)

    def document(self) -> dict[str, Any]:
        """The same for a script, with everything about each answer."""
        from specdec.metrics import pool  # brings in torch

        total, seconds = pool([done.counters for done in self.completions]), sum(self.seconds)
        return {
            "schema_version": 1,
            "lossless": not self.warning,
            "tokens": self.tokens,
            "seconds": dict(zip(("draft", "verify", "rest"), self.seconds, strict=True)),
            "tokens_per_second": self.tokens / seconds if seconds else None,
            "acceptance_length": total.acceptance_length,
            "acceptance_rate": total.acceptance_rate,
            "completions": [
                {
                    "id": done.id,
                    "prompt_tokens": prompt,
                    "text": done.text,
                    "tokens": list(done.tokens),
                    "finish_reason": done.finish_reason,
                    "counters": done.counters.to_dict(),
                }
                for prompt, done in zip(self.prompts, self.completions, strict=True)
            ],
        }
