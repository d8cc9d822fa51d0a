"""The target's own answers: what a drafter will meet. One line a prompt, so what is there is never made again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.engine import Engine
from specdec.errors import DataError, OutputError
from specdec.noise import request_seed
from specdec.target import Target
from specdec.types import Request, Sampling
from specdec_plugins.distill.folder import whole
from specdec_plugins.distill.recipe import SampleSection
from specdec_plugins.drafters.none import NoDraft
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.standard import Standard


def answer(
    target: Target,
    prompts: Mapping[str, Sequence[int]],
    file: Path,
    options: SampleSection,
    seed: int,
    tell: Callable[[str], None],
    stopped: Sequence[Any] = (),
) -> None:
    """Have the target answer prompts that a file has no answer to yet; lines {"id", "prompt", "tokens"} are added.

    Args:
        target: answers, as many at once as its cache has rows.
        prompts: id -> ids.
        file: JSON Lines; a last line that was cut off is dropped.
        options: how it answers.
        seed: of all randomness, with the id of each prompt.
        tell: told how far it is.
        stopped: not empty when it is to stop; what is finished is kept.

    Raises:
        DataError: no prompt is short enough.
        OutputError: the file answers other prompts.
    """
    done = _done(file)
    if other := [name for name, ids in done.items() if ids != list(prompts.get(name, ()))]:
        raise OutputError(
            f"{file}: answers other prompts than data.prompts has now, such as {other[0]!r}; try another --output-dir, "
            "or --overwrite"
        )
    open_ = {name: tuple(ids) for name, ids in prompts.items() if name not in done}
    room = target.limit - options.max_new_tokens
    fitting = {name: ids for name, ids in open_.items() if 0 < len(ids) <= room}
    if open_ and not fitting and not done:
        raise DataError(
            f"data.prompts: none of {len(open_)} fits in {room} tokens, which is what sample.max_new_tokens "
            f"{options.max_new_tokens} leaves of {target.limit}; try a smaller one"
        )
    if len(fitting) < len(open_):
        tell(f"{len(open_) - len(fitting)} prompts are longer than {room} tokens and left out")
    requests = [
        Request(
            prompt=ids,
            id=name,
            sampling=Sampling(
                temperature=options.temperature,
                max_new_tokens=options.max_new_tokens,
                seed=request_seed(seed, name, 0),
            ),
        )
        for name, ids in fitting.items()
    ]
    if not requests:
        return
    engine = Engine(target, NoDraft(), Standard(), Continuous())
    with file.open("a", encoding="utf-8") as lines:
        count, tokens = len(done), 0
        for event in engine.stream(requests):
            if stopped:
                return
            if event.completion is None:
                continue
            made = list(event.completion.tokens)
            lines.write(json.dumps({"id": event.id, "prompt": list(fitting[event.id]), "tokens": made}) + "\n")
            lines.flush()
            count, tokens = count + 1, tokens + len(made)
            tell(f"sampling: {count} of {len(done) + len(requests)} prompts, {tokens} new tokens")


def _done(file: Path) -> dict[str, list[int]]:
    if not file.exists():
        return {}
    with whole(file):
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]
        done = {str(row["id"]): row["prompt"] for row in map(json.loads, lines)}
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return done
