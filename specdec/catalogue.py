"""The table of all rules in docs/verifiers.md: `python -m specdec.catalogue > docs/verifiers.md` writes it anew."""

from __future__ import annotations

import re
from typing import Any

from specdec.registry import Plugin, load, plugins, summary

_HEAD = """# The rules

All verification rules that come with specdec, made from their docstrings by `python -m specdec.catalogue`.
`specdec show NAME` has the whole of each, `specdec check NAME` proves it, [write-a-verifier.md](write-a-verifier.md)
adds yours.

p is the target's law and q the draft's, processed alike; a(x) the probability of keeping the draft token x; (z)+ is z
where positive, norm(z) is z made to sum to 1.

- **family**: `lossless`; `standard_or_set` keeps what the standard rule keeps or what lies in a set, so at one position
  the total variation from the target is the extra acceptance; `set_only` keeps a set of p alone; `mixture` decodes
  another law made of p and q; `lookahead` looks at later draft tokens; `other`.
- **exactness** of the output: `lossless` is the target's law, `own_target` another law that the rule states, `lossy`
  neither.
- **dominates**: on the same drafts and numbers it keeps at least what `standard` keeps.
- **by options**: it depends on the options, such as the rules that a rule is made of.
"""
_COLUMNS = ("rule", "keeps", "formula", "family", "exactness", "dominates", "trees", "needs", "paper")


def page() -> str:
    """docs/verifiers.md, of the rules of specdec's own distribution."""
    lines = [_row(_COLUMNS), _row(["---"] * len(_COLUMNS))]
    lines += [_row(_cells(plugin)) for plugin in plugins("verifiers") if plugin.bundled]
    return "\n".join([_HEAD, *lines, ""])


def _cells(plugin: Plugin) -> list[str]:
    cls = load(plugin.kind, plugin.name)
    needs = _fact(cls, "needs")
    words = needs if isinstance(needs, str) else ", ".join(sorted(needs)).replace("_", " ") or "-"
    paper = re.sub(r"arXiv:(\S+)", r"[\1](https://arxiv.org/abs/\1)", cls.paper) or "-"
    facts = [_word(_fact(cls, name)) for name in ("family", "exactness", "dominates_standard", "trees")]
    return [f"`{plugin.name}`", summary(plugin), _formula(cls.__doc__ or ""), *facts, words, paper]


def _formula(text: str) -> str:
    """The docstring's formula, up to the sentence that says what a(x) is."""
    found = re.search(r"Formula: (.*?)\.?\s+[A-Z][a-z]+: ", text, re.DOTALL)
    sentences = re.split(r"(?<! )\.\s+", found[1]) if found else ["-"]
    until = next((index for index, one in enumerate(sentences) if "a(x) = " in one), len(sentences))
    return " ".join(". ".join(sentences[: until + 1]).split())


def _fact(cls: Any, name: str) -> Any:
    """A property with the default options; "by options" where it depends on some that must be given."""
    try:
        made = cls()
    except (TypeError, ValueError):
        made = object.__new__(cls)  # it has no options to depend on
    try:
        return getattr(made, name)
    except AttributeError:
        return "by options"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"`{value}`" if value != "by options" else str(value)


def _row(cells: Any) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(page(), end="")
