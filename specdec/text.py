"""Tokens to text, a little at a time: whole characters only, and nothing that a stop string may still take back."""

from __future__ import annotations

from typing import Any, final

from attrs import define, field

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@final
@define(eq=False)
class TextStream:
    """The text of one growing sequence of ids.

    `text` is final up to its end: it never shrinks, and what `push` returned so far concatenates to it. Incomplete
    UTF-8 and any suffix that could begin a stop string are held back until `push` or `close` settles them.

    Attributes:
        tokenizer: a transformers tokenizer.
        stop_strings: the text ends before the first of these.
        text: what may be shown.
        stopped: a stop string was completed.
    """

    tokenizer: Any
    stop_strings: tuple[str, ...] = ()
    text: str = ""
    stopped: bool = False
    _ids: list[int] = field(factory=list)
    _context: int = 0  # ids before this one no longer influence what is decoded
    _read: int = 0  # ids before this one are in `_seen`
    _seen: str = ""

    def push(self, token: int) -> str:
        """Take one more id; return the text that became final."""
        if self.stopped:
            return ""
        self._ids.append(token)
        before = _decode(self.tokenizer, self._ids[self._context : self._read])
        after = _decode(self.tokenizer, self._ids[self._context :])
        if len(after) > len(before) and not after.endswith(_REPLACEMENT):
            self._seen += after[len(before) :]
            self._context, self._read = self._read, len(self._ids)
        return self._release(final=False)

    def close(self) -> str:
        """No more ids: return what was held back."""
        if self.stopped:
            return ""
        before = _decode(self.tokenizer, self._ids[self._context : self._read])
        after = _decode(self.tokenizer, self._ids[self._context :])
        self._seen += after[len(before) :]
        self._context = self._read = len(self._ids)
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        start = len(self.text)
        # The one completed first, so that the text does not depend on where tokens end.
        hits = [(i + len(stop), i) for stop in self.stop_strings if (i := self._seen.find(stop, start)) >= 0]
        if hits:
            self.stopped = True
            end = min(hits)[1]
        else:
            end = len(self._seen) if final else len(self._seen) - self._held()
        self.text = self._seen[:end]
        return self.text[start:]

    def _held(self) -> int:
        """Length of the longest suffix that a stop string could begin with."""
        longest = 0
        for stop in self.stop_strings:
            for length in range(min(len(stop) - 1, len(self._seen)), longest, -1):
                if self._seen.endswith(stop[:length]):
                    longest = length
                    break
        return longest
