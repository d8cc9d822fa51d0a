"""Who takes part in a race: this library without and with a draft, transformers, and what else is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec import Target
from specdec.drafter import Drafter
from specdec.errors import RecipeError
from specdec.options import build, describe
from specdec.registry import load
from specdec_plugins.bench.peers import Economize, Flashspec, installed
from specdec_plugins.bench.sides import Ours, Side, Task, Transformers
from specdec_plugins.drafters.blocks.drafter import BlockDrafter
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.drafters.none import NoDraft
from specdec_plugins.kv.slab import Slab

OURS = "specdec"
BASELINE = "transformers generate"
_SPACE = 16  # cells of a cache row beyond prompt, new tokens and drafts


def drafters(section: Mapping[str, Any], loaded: tuple[Any, Any] | None, width: int) -> Callable[[], Drafter]:
    """Makes a drafter for each target.

    Raises:
        RecipeError: it needs options, or refuses the length; says every reason.
    """
    cls = load("drafters", section["use"])
    options = {name: value for name, value in section.items() if name != "use"} | {"num_speculative_tokens": width}
    if loaded is not None:
        model, tokenizer = loaded
        options |= {"model": model, "tokenizer": tokenizer}

    def make() -> Drafter:
        made, problems = build(cls, options, "DRAFT", f"drafter {section['use']}")
        if problems:
            raise RecipeError(problems)
        drafter: Drafter = made
        return drafter

    return make


def own(
    model: Any,
    tokenizer: Any,
    make: Callable[[], Drafter],
    prompts: Sequence[tuple[int, ...]],
    counts: Sequence[int],
    width: int,
    verifiers: Sequence[str],
    task: Task,
) -> list[Side]:
    """This library, without and with a draft."""
    need = max(map(len, prompts)) + task.new_tokens
    sides: list[Side] = []
    for rows in counts:
        target = Target(model, tokenizer, kv=Slab(rows=rows, tokens=need + width + _SPACE))
        if need > target.context:  # others would go on past it
            raise RecipeError(
                f"--new-tokens {task.new_tokens}: with the longest prompt that makes {need} tokens, and the target has "
                f"a context of {target.context}; try fewer, or other prompts"
            )
        drafter = make()
        drafter.bind(target)
        models = (model, *_weights(drafter))
        plain = _rule("standard")
        sides.append(Ours(named(f"{OURS} none", rows), rows, (model,), target, NoDraft(), plain, task))
        sides += [
            Ours(named(f"{OURS} {name}", rows), rows, models, target, drafter, _rule(name), task) for name in verifiers
        ]
    return sides


def others(model: Any, helper: Any, draft: str, counts: Sequence[int], width: int, task: Task) -> list[Side]:
    """transformers, and the other libraries that are installed."""
    sides: list[Side] = [Transformers(named(BASELINE, rows), rows, (model,), task, {}) for rows in counts]
    sides.append(Transformers("transformers prompt lookup", 1, (model,), task, {"prompt_lookup_num_tokens": width}))
    if helper is None:
        return sides
    generation = helper.generation_config
    generation.num_assistant_tokens, generation.num_assistant_tokens_schedule = width, "constant"
    generation.assistant_confidence_threshold = 0.0
    sides.insert(-1, Transformers("transformers assisted", 1, (model, helper), task, {"assistant_model": helper}))
    by_name = ":" not in draft and not draft.endswith(".gguf")  # it has transformers load the draft model itself
    if installed("economize") and by_name and not task.temperature:
        sides += [Economize(named("economize", rows), rows, (model, helper), draft, width, task) for rows in counts]
    if installed("flashspec"):
        sides.append(Flashspec("flashspec", 1, (model, helper), width, task))
    return sides


def _weights(drafter: Drafter) -> tuple[Any, ...]:
    """The modules a drafter brings."""
    if isinstance(drafter, BlockDrafter):
        return drafter.networks
    return (drafter.model,) if isinstance(drafter, DraftModel) else ()


def _rule(name: str) -> Any:
    """A verifier as it is without options."""
    rule = load("verifiers", name)
    if missing := [option.name for option in describe(rule) if option.default is None]:
        raise RecipeError(f"--verifier {name}: needs {', '.join(missing)}, and rules have no options here; try another")
    return rule()


def named(name: str, rows: int) -> str:
    """A side's name, with its rows where there are several."""
    return name if rows == 1 else f"{name} x{rows}"
