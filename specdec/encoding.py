"""A prompt, text or chat, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import DataError


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer says how a chat becomes one text."""
    return bool(getattr(tokenizer, "chat_template", None))


def prompt_ids(
    prompt: str | Sequence[Mapping[str, Any]], tokenizer: Any, template: Mapping[str, Any] | None, where: str, hint: str
) -> tuple[int, ...]:
    """The ids of one prompt, with what the tokenizer or the template puts before it.

    Args:
        prompt: a text, or the turns of a chat, `{"role": ..., "content": ...}` each.
        tokenizer: a transformers tokenizer.
        template: what the chat template is given, a text then being a user's turn; None is for no template.
        where: the prompt's place, for the message.
        hint: what to try, for the message.

    Raises:
        DataError: the template or the tokenizer refuses it.
    """
    try:
        if isinstance(prompt, str):
            prompt.encode()  # of a byte that is no UTF-8, tokenizers only say that it is no text
        if template is None:
            return tuple(tokenizer(prompt)["input_ids"])
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **template)
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # a template is a program, and tokenizers raise what they like
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{where}: cannot become tokens: {why}; try {hint}") from error
