"""Texts as ids: finished ones, and answers of the target."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, final

from attrs import frozen

from specdec.encoding import has_template, prompt_ids
from specdec.errors import DataError
from specdec.jsonlines import rows, short


@final
@frozen
class Text:
    """One text.

    Attributes:
        id: of its own.
        tokens: all ids.
        start: how many of them are the prompt, which is read and never predicted.
    """

    id: str
    tokens: tuple[int, ...]
    start: int

    @property
    def anchors(self) -> range:
        """Positions at which a block may begin: something comes before and behind each."""
        return range(max(1, self.start - 1), len(self.tokens) - 1)


def finished(file: str, tokenizer: Any) -> list[Text]:
    """The texts of a file: `text` alone, or `prompt` or `messages` with `response`.

    Raises:
        DataError: a row is neither; names its line.
    """
    found = []
    for number, row in rows(file):
        where = f"{file}:{number}"
        name = _written(str(row.get("id", number)), where)
        if isinstance(row.get("text"), str) and row["text"]:
            tokens = prompt_ids(row["text"], tokenizer, None, where, "another text")
            found.append(Text(name, tokens, 0))
            continue
        prompt = row.get("messages", row.get("prompt"))
        response = row.get("response")
        if not (isinstance(prompt, str | list) and prompt and isinstance(response, str) and response):
            raise DataError(
                f"{where}: got the fields {', '.join(map(repr, row)) or 'none'}, wanted 'text', or 'prompt' or "
                "'messages' with 'response'"
            )
        found.append(_answered(name, prompt, response, tokenizer, where))
    return found


def _answered(name: str, prompt: Any, response: str, tokenizer: Any, where: str) -> Text:
    template: Mapping[str, Any] | None = {} if has_template(tokenizer) else None
    if template is None and not isinstance(prompt, str):
        raise DataError(f"{where}: has 'messages', which need a chat template, and the target has none; try 'prompt'")
    ids = prompt_ids(prompt, tokenizer, template, where, "another prompt")
    answer = tuple(tokenizer(_written(response, where), add_special_tokens=False)["input_ids"])
    end = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    return Text(name, ids + answer + end, len(ids))


def sampled(file: str, vocabulary: int) -> list[Text]:
    """Answers of the target, as `specdec_plugins.distill.sampling` writes them.

    Raises:
        DataError: a row is none; names its line.
    """
    found = []
    for number, row in rows(file):
        prompt, tokens = (_ids(row, name, vocabulary, f"{file}:{number}") for name in ("prompt", "tokens"))
        found.append(Text(_written(str(row.get("id", number)), f"{file}:{number}"), prompt + tokens, len(prompt)))
    return found


def digest(texts: Iterable[Text]) -> str:
    """A hash of all texts."""
    found = hashlib.sha256()
    for text in texts:
        found.update(f"{text.id}\x1f{text.start}\x1f{text.tokens}\x1e".encode())
    return found.hexdigest()


def _written(text: str, where: str) -> str:
    """A text that can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: got {text[error.start]!a}, which is half a character; wanted whole ones") from error
    return text


def _ids(row: Mapping[str, Any], name: str, vocabulary: int, where: str) -> tuple[int, ...]:
    ids = row.get(name)
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocabulary for token in ids):
        raise DataError(f"{where}: field {name!r} is {short(ids)}, wanted a list of ids below {vocabulary}")
    return tuple(ids)


def cut(texts: Iterable[Text], most: int) -> list[Text]:
    """Those in which a block can begin, none longer than `most`."""
    short_ones = (Text(text.id, text.tokens[:most], text.start) for text in texts)
    return [text for text in short_ones if text.anchors]


def split(texts: Iterable[Text], share: float) -> tuple[list[Text], list[Text]]:
    """Texts to train on and texts held out. An id is always on the same side, whatever else there is."""
    sides: tuple[list[Text], list[Text]] = [], []
    for text in texts:
        digest = hashlib.sha256(text.id.encode()).digest()
        sides[int.from_bytes(digest[:8], "big") < share * 2**64].append(text)
    return sides
