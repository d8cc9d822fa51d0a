"""`specdec generate`: a prompt, a file of prompts or a chat at the terminal. Texts go to stdout, all else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from specdec.cli_answers import Answers
from specdec.cli_interrupt import stoppable
from specdec.errors import DataError, ModelError, RecipeError, RequestError
from specdec.registry import load, suggestion

if TYPE_CHECKING:
    from specdec.generation import Generator
    from specdec.progress import Completion
    from specdec.task import Sample
    from specdec.types import Request, Sampling

    Turn = dict[str, str]

_SAMPLING = (
    click.option("--max-new-tokens", type=int, metavar="N", help="At most this many tokens for a prompt (128)."),
    click.option("--min-new-tokens", type=int, metavar="N", help="No end-of-sequence token before this many."),
    click.option("--temperature", type=float, metavar="T", help="0 is greedy (1)."),
    click.option("--top-k", type=int, metavar="K", help="0 is off, as it is when left out."),
    click.option("--top-p", type=float, metavar="P", help="1 is off, as it is when left out."),
    click.option("--min-p", type=float, metavar="P", help="0 is off, as it is when left out."),
    click.option("--repetition-penalty", type=float, metavar="X", help="1 is off, as it is when left out."),
    click.option(
        "--stop", "stop_strings", multiple=True, metavar="TEXT", help="End before this text; may be repeated."
    ),
    click.option("--ignore-eos", is_flag=True, default=None, help="End-of-sequence tokens are ordinary tokens."),
    click.option("--seed", type=int, metavar="N", help="Of all randomness (0)."),
)


def _sampling(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


@click.command()
@click.argument("prompt", required=False)
@click.option("--model", required=True, help="The target: a hub id, a folder, or random:llama.")
@click.option("--draft-model", help="A smaller model of its family, for the drafter.")
@click.option("--drafter", help="A drafter's name (prompt_lookup; model, where there is a draft model).")
@click.option("--verifier", default="standard", show_default=True, help="A rule's name.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of drafter, verifier or target, such as verifier.theta=0.9; may be repeated.",
)
@click.option("--file", type=click.Path(path_type=Path), help="Prompts: JSON Lines (.jsonl), else one a line.")
@click.option("--chat", is_flag=True, help="A conversation, a line a turn.")
@click.option("--system", metavar="TEXT", help="The system turn of a chat.")
@click.option("--raw", is_flag=True, help="Continue texts as they stand, without the chat template.")
@_sampling
@click.option("--rows", type=int, default=8, show_default=True, help="Prompts of a file decoded at once.")
@click.option("--dtype", metavar="NAME", help="Of the models: float32, bfloat16, float16 (the checkpoint's).")
@click.option("--device", help="Where the target goes, such as cuda.")
@click.option("--json", "as_json", is_flag=True, help="The last line on stdout is one JSON document.")
@click.option("--quiet", is_flag=True, help="Print no statistics, and with --json nothing but the document.")
def generate(
    prompt: str | None,
    model: str,
    draft_model: str | None,
    drafter: str | None,
    verifier: str,
    overrides: tuple[str, ...],
    file: Path | None,
    chat: bool,
    system: str | None,
    raw: bool,
    rows: int,
    dtype: str | None,
    device: str | None,
    as_json: bool,
    quiet: bool,
    **sampling: Any,
) -> None:
    """Continue PROMPT, or what stdin holds, and show the text as it becomes final.

    Where the model's tokenizer has a chat template, a text is a user's turn; --raw continues it as it stands.
    """
    named = {"model": model, "dtype": dtype, "device": device}
    given = [
        name for name, is_given in (("PROMPT", prompt is not None), ("--file", file), ("--chat", chat)) if is_given
    ]
    if len(given) > 1:
        raise RecipeError(f"{' and '.join(given)}: give one of them")
    if system is not None and raw:
        raise RecipeError("--system and --raw: without the chat template there is no system turn; give one of them")
    answers = Answers(show=not (as_json and quiet), quiet=quiet)
    turns = [] if system is None else [{"role": "system", "content": system}]
    try:
        samples = None if chat else _prompts(prompt, file)
        from specdec.generation import failure, make_sampling  # models and transformers are needed from here on only
        from specdec.options import values

        made = make_sampling(**{name: value for name, value in sampling.items() if value not in (None, ())})
        target = {name: value for name, value in named.items() if value is not None}
        content = {"target": target, "drafter": {"use": drafter}, "verifier": {"use": verifier}}
        generator = _generator(content, overrides, draft_model, rows)
        if samples is None:
            _chat(generator, made, turns, answers)
        else:
            _answer(generator, made, samples, turns, answers, raw=raw)
    except KeyboardInterrupt:
        answers.end_line()
        answers.tell()
        click.echo("interrupted", err=True)
        sys.exit(130)
    answers.tell()
    if as_json:
        about = {"model": target["model"], "drafter": generator.drafter, "verifier": generator.verifier}
        click.echo(json.dumps({**about, "sampling": values(made), **answers.document()}, allow_nan=False))
    if failed := [done for done in answers.completions if done.finish_reason == "error"]:
        raise ModelError("\n".join(f"prompt {done.id}: {failure(done)}" for done in failed))


def _prompts(prompt: str | None, file: Path | None) -> list[Sample]:
    """What is to be answered, from the argument, the file or stdin."""
    from specdec.task import Sample

    if file is not None:
        return file_prompts(file)
    if prompt is None:
        if sys.stdin.isatty():
            raise RecipeError("PROMPT: missing; give it as the argument, on stdin or with --file, or try --chat")
        try:
            prompt = sys.stdin.read().removesuffix("\n")
        except ValueError as error:
            raise DataError(f"stdin: cannot be read: {error}; wanted text in UTF-8") from error
    if not prompt:
        raise RequestError("PROMPT: empty; wanted a text")
    return [Sample(id="1", text=prompt)]


def file_prompts(file: Path, limit: int | None = None) -> list[Sample]:
    """The prompts of a file: JSON Lines by its name, else one a line.

    Raises:
        DataError: it cannot be read, or holds none.
    """
    from specdec.task import Sample, samples_of

    if ".jsonl" in file.suffixes:
        return list(samples_of(load("tasks", "jsonl")(), "jsonl", str(file), limit))
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {error}; wanted text in UTF-8, a prompt a line") from error
    if samples := [Sample(id=str(number), text=line) for number, line in enumerate(lines, 1) if line.strip()]:
        return samples[:limit]
    raise DataError(f"{file}: empty; wanted a prompt a line")


def _generator(content: dict[str, Any], overrides: tuple[str, ...], draft_model: str | None, rows: int) -> Generator:
    """Model and strategies; every problem of their options is told before a model is loaded."""
    from specdec.generation import Generator

    options = load_options(content, overrides)
    drafter = content["drafter"]
    if drafter.get("use") is None:
        drafter["use"] = "prompt_lookup" if draft_model is None and "model" not in drafter else "model"
    return Generator(
        options.pop("model"),
        drafter=drafter,
        draft_model=draft_model,
        verifier=content["verifier"],
        rows=rows,
        load_options=options,
    )


def load_options(content: dict[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """Apply --set to sections, and give the options of section `target`, checked.

    Raises:
        RecipeError: a section or an option of the target is not what was wanted.
    """
    from specdec.options import build, values
    from specdec.recipe import TargetSection
    from specdec.yamlfile import override

    for text in overrides:
        section = text.partition("=")[0].partition(".")[0]
        if section not in content:
            there = ", ".join(content)
            raise RecipeError(f"--set {text}: unknown section{suggestion(section, content)}; there are {there}")
        override(content, text)
    wrong = [
        f"--set {name}: got {given!r}, wanted options" for name, given in content.items() if type(given) is not dict
    ]
    if wrong:
        raise RecipeError(wrong)
    section, problems = build(TargetSection, content["target"], "target", "section target")
    if problems:
        raise RecipeError(problems)
    return values(section)


def _answer(
    generator: Generator, sampling: Sampling, samples: list[Sample], system: list[Turn], answers: Answers, *, raw: bool
) -> None:
    """Serve prompts. One alone is shown as it grows; of several each is shown whole, in order, under its id."""
    from specdec.encoding import has_template
    from specdec.generation import make_requests

    template = not raw and has_template(generator.tokenizer)
    if system and not template:
        raise RequestError("--system: needs a chat template, and the model's tokenizer has none; leave it out")
    prompts: list[Any] = [sample.messages or sample.text for sample in samples]
    if template:
        chats = [[{"role": "user", "content": one}] if isinstance(one, str) else list(one) for one in prompts]
        prompts = [chat if chat[0]["role"] == "system" else [*system, *chat] for chat in chats]
    ids = generator.encode(prompts, names=[f"prompt {sample.id!r}" for sample in samples])
    requests = [
        attrs.evolve(request, id=sample.id)
        for request, sample in zip(make_requests(ids, sampling), samples, strict=True)
    ]
    done: dict[str, Completion] = {}
    with stoppable() as stopped, closing(answers.events(generator, requests)) as events:
        for event in events:
            if stopped:
                raise KeyboardInterrupt
            if len(samples) == 1:
                answers.write(event.text)
            if event.completion is not None:
                done[event.id] = event.completion
            while len(answers.completions) < len(requests) and requests[len(answers.completions)].id in done:
                request = requests[len(answers.completions)]
                completion = done[request.id]
                if len(samples) > 1:
                    answers.write("\n" * bool(answers.completions) + f"[{completion.id}]\n{completion.text}")
                answers.end_line()
                answers.keep(request, completion)


def _chat(generator: Generator, sampling: Sampling, system: list[Turn], answers: Answers) -> None:
    """A conversation; the whole of it goes through the chat template at every turn."""
    from specdec.encoding import has_template
    from specdec.generation import make_requests

    if not has_template(generator.tokenizer):
        raise RequestError("--chat: needs a chat template, and the model's tokenizer has none; try an instruct model")
    if sys.stdin.isatty() and not answers.quiet:
        click.echo("/exit or Ctrl-D ends, Ctrl-C stops an answer, /new begins anew", err=True)
    turns, count = list(system), 0
    while (line := _line()) is not None and line != "/exit":
        if line == "/new":
            turns = list(system)
        if line in ("", "/new"):
            continue
        turns.append({"role": "user", "content": line})
        try:
            [request] = make_requests(generator.encode([turns]), sampling, start=count)
            answer = _turn(generator, request, answers)
        except (DataError, RequestError) as error:
            click.echo(f"error: {error}; /new begins anew", err=True)
            answer = ""
        count += 1
        turns = [*turns, {"role": "assistant", "content": answer}] if answer else turns[:-1]


def _turn(generator: Generator, request: Request, answers: Answers) -> str:
    """One answer, or what there is of it when Ctrl-C stops it."""
    text, cut = "", False
    with stoppable() as stopped, closing(answers.events(generator, [request])) as events:
        for event in events:
            answers.write(event.text)
            text += event.text
            if event.completion is not None:
                answers.keep(request, event.completion)
                cut = event.completion.finish_reason == "length"
            if stopped:
                break
    answers.end_line()
    if cut and not answers.quiet:
        click.echo(f"(cut off after {request.sampling.max_new_tokens} tokens)", err=True)
    return text


def _line() -> str | None:
    """The next line of a conversation, or None at its end."""
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  # input() then edits lines
            return input("> ").strip()
        line = sys.stdin.readline()
    except EOFError:
        click.echo()
        return None
    except ValueError as error:
        raise DataError(f"stdin: cannot be read: {error}; wanted text in UTF-8") from error
    return line.strip() if line else None
