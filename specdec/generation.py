"""Texts from prompts in one call: strategies by name, ids by tokenizer or chat template, a cache of the size needed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from attrs import evolve

from specdec.drafter import Drafter
from specdec.encoding import has_template, prompt_ids
from specdec.engine import Engine
from specdec.errors import CompatibilityError, ModelError, RecipeError, RequestError
from specdec.given import Given, short
from specdec.loading import load as load_model
from specdec.noise import request_seed
from specdec.options import build
from specdec.progress import Completion
from specdec.registry import load
from specdec.target import Target
from specdec.types import Request, Sampling
from specdec.verifier import Verifier

_WANTED = "a text, a chat (a list of {'role': ..., 'content': ...}), a list of ids, or a list of those"


def generate(
    model: Any,
    tokenizer: Any = None,
    prompts: Any = (),
    *,
    drafter: str | Mapping[str, Any] | Drafter | None = None,
    draft_model: Any = None,
    verifier: str | Mapping[str, Any] | Verifier = "standard",
    num_speculative_tokens: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    max_new_tokens: int = 128,
    min_new_tokens: int = 0,
    ignore_eos: bool = False,
    stop_ids: Iterable[int] = (),
    stop_strings: str | Sequence[str] = (),
    seed: int = 0,
    rows: int = 8,
    processors: Iterable[Any] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    logprobs: bool = False,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> list[Completion]:
    """Continue prompts with speculative decoding.

    A text is continued as it stands; a chat goes through the tokenizer's template. Of a model's generation config
    nothing but the end-of-sequence ids is used: what is not given here is off.

    Args:
        model: a loaded decoder-only transformers model (which is not changed), a hub id, a folder, or `random:llama`.
        tokenizer: of a loaded model; needed for texts, chats and stop strings only. Loaded with a model that is named.
        prompts: texts, chats (lists of `{"role": ..., "content": ...}`), lists of ids; or one of these alone.
        drafter: a registered name, `my_module:MyDrafter`, a mapping `{"use": name, ...options}`, or a `Drafter`.
            `model` where there is a `draft_model`, `prompt_lookup` otherwise.
        draft_model: the drafter's option `model`: a smaller transformers model, a hub id or a folder.
        verifier: as `drafter`. A rule that is not lossless changes the law of the output.
        num_speculative_tokens: the drafter's option of that name.
        temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens, min_new_tokens, ignore_eos, stop_ids,
            stop_strings: as in `Sampling`.
        seed: with a prompt's index it makes the prompt's own seed, so that equal prompts get different texts.
        rows: prompts decoded at once; the others wait.
        processors: as in `Request`.
        chat_template_kwargs: handed to the chat template.
        logprobs: fill `Completion.logprobs`: how probable each token was, under the target and where it was drawn.
        dtype: for models that are named; `auto` is the checkpoint's.
        device: for a model that is named.

    Returns:
        One completion for each prompt, in order: `text`, `tokens`, `finish_reason`, `counters`.

    Raises:
        SpecdecError: it cannot be done; as far as possible found before a model is loaded.
    """
    listed = _listed(prompts)
    sampling = make_sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        ignore_eos=ignore_eos,
        stop_ids=list(stop_ids),
        stop_strings=[stop_strings] if isinstance(stop_strings, str) else list(stop_strings),
        seed=seed,
    )
    named = {"dtype": None if dtype is None else str(dtype).removeprefix("torch."), "device": device and str(device)}
    generator = Generator(
        model,
        tokenizer,
        drafter=drafter,
        draft_model=draft_model,
        verifier=verifier,
        num_speculative_tokens=num_speculative_tokens,
        rows=rows,
        logprobs=logprobs,
        load_options={name: value for name, value in named.items() if value is not None},
    )
    ids = generator.encode(listed, chat_template_kwargs)
    requests = [evolve(request, processors=tuple(processors)) for request in make_requests(ids, sampling)]
    return generator.engine(requests).generate(requests)


def make_sampling(**given: Any) -> Sampling:
    """`Sampling` from options of plain types.

    Raises:
        RecipeError: lists every option that is not what was wanted.
    """
    made, problems = build(Sampling, given, "sampling", "sampling")
    if problems:
        raise RecipeError(problems)
    return made  # type: ignore[no-any-return]  # build gives what it is asked for


def make_requests(prompts: Iterable[tuple[int, ...]], sampling: Sampling, start: int = 0) -> list[Request]:
    """One request for each prompt, its index as its id, its seed from the sampling's and the index."""
    return [
        Request(
            prompt=prompt, sampling=evolve(sampling, seed=request_seed(sampling.seed, str(index), 0)), id=str(index)
        )
        for index, prompt in enumerate(prompts, start)
    ]


def refuse(engine: Engine, requests: Iterable[Request]) -> None:
    """Raise RequestError with every request that cannot be served."""
    problems = []
    for request in requests:
        try:
            engine.refuse(request)
        except RequestError as error:
            problems.append(str(error))
    if problems:
        raise RequestError("\n".join(problems))


def failure(completion: Completion) -> str:
    """What the finish reason `error` of a completion means, with its step and place."""
    return (
        f"the target's scores were not finite in step {completion.counters.num_steps}, after "
        f"{len(completion.tokens)} tokens; try dtype float32"
    )


@final
class Generator:
    """A model and the strategies that serve it, with an engine that is kept while its cache is large enough.

    Attributes:
        model: the loaded model.
        tokenizer: its tokenizer, or None.
        drafter: what the drafter is called, with the options given.
        verifier: the same of the rule.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        drafter: str | Mapping[str, Any] | Drafter | None = None,
        draft_model: Any = None,
        verifier: str | Mapping[str, Any] | Verifier = "standard",
        num_speculative_tokens: int | None = None,
        rows: int = 8,
        logprobs: bool = False,
        load_options: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            model: as for `generate`, like all that is not said here.
            load_options: of `Target.load`, for a model that is named.

        Raises:
            RecipeError: strategies or their options are not what was wanted; found before the model is loaded.
            ModelError: the model cannot be loaded.
        """
        load_options = dict(load_options or {})
        self._graphs = load_options.pop("graphs", "off")
        extra: dict[str, Any] = {"model": draft_model, "num_speculative_tokens": num_speculative_tokens}
        extra = {name: value for name, value in extra.items() if value is not None}
        if drafter is None:
            drafter = "prompt_lookup" if draft_model is None else "model"
        self._drafter, self._verifier = Given.of("drafters", drafter, extra), Given.of("verifiers", verifier, {})
        problems = [*self._drafter.problems, *self._verifier.problems]
        problems += build(load("kv", "slab"), {"rows": rows}, "kv", "slab")[1]
        if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            problems.append(
                f"tokenizer: got {type(tokenizer).__name__}, wanted a loaded tokenizer; prompts are the third argument"
            )
        if problems:
            raise RecipeError(problems)
        self.drafter, self.verifier = self._drafter.label, self._verifier.label
        if draft_model is not None and "dtype" in load_options and self._drafter.takes("dtype"):
            # A draft model that is only named is loaded as the target is.
            self._drafter.options.setdefault("dtype", load_options["dtype"])
        if isinstance(model, str | os.PathLike):
            model, own = load_model(os.fspath(model), **load_options)
            tokenizer = own if tokenizer is None else tokenizer
        elif not hasattr(model, "config"):
            raise ModelError(f"model: got {type(model).__name__}, wanted a loaded model, a hub id or a folder")
        elif load_options:
            raise ModelError(f"{' and '.join(load_options)}: the model is loaded already; try without")
        self.model, self.tokenizer, self._rows, self._logprobs = model, tokenizer, rows, logprobs
        self._engine: Engine | None = None

    def encode(
        self, prompts: Sequence[Any], template: Mapping[str, Any] | None = None, names: Sequence[str] | None = None
    ) -> list[tuple[int, ...]]:
        """Ids of texts, chats and lists of ids; `template` is handed to the chat template, `names` are for messages.

        Raises:
            RequestError: a prompt is none of these, or there is no tokenizer or no template where one is needed.
            DataError: the tokenizer or the template refuses one.
        """
        names = names or [f"prompts[{index}]" for index in range(len(prompts))]
        return [self._ids(prompt, template or {}, name) for prompt, name in zip(prompts, names, strict=True)]

    def engine(self, requests: Sequence[Request]) -> Engine:
        """An engine with room for these requests.

        Raises:
            SpecdecError: model and strategies do not fit, or a request cannot be served.
        """
        rows = min(self._rows, len(requests))
        tokens = self._capped(max(len(request.prompt) + request.sampling.max_new_tokens for request in requests))
        kv = None if self._engine is None else self._engine.target.kv
        if self._engine is None or kv is None or rows > kv.rows or tokens > kv.tokens:
            if kv is not None:  # a chat grows at every turn, and a new cache may mean a draft model loaded anew
                rows = max(rows, kv.rows)
                tokens = self._capped(max(tokens, 2 * kv.tokens)) if tokens > kv.tokens else kv.tokens
            grown = kv is not None
            kv = self._engine = None  # its memory goes first
            drafter = self._drafter.make()
            cache = load("kv", "slab")(rows=rows, tokens=max(tokens, drafter.num_speculative_tokens + 2))
            target = Target(self.model, self.tokenizer, kv=cache, graphs=self._graphs)
            scheduler = load("schedulers", "continuous")()
            try:
                self._engine = Engine(target, drafter, self._verifier.make(), scheduler, logprobs=self._logprobs)
            except CompatibilityError as error:
                if not grown or self._drafter.made is None:
                    raise
                raise RequestError(
                    f"the cache must grow to {rows} rows of {tokens} tokens, and the drafter is an object that is "
                    "bound to the one before; give it by name or as a mapping"
                ) from error
        refuse(self._engine, requests)
        return self._engine

    def _capped(self, tokens: int) -> int:
        """No more than the model has positions."""
        context = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return min(tokens, context) if context else tokens

    def _ids(self, prompt: Any, template: Mapping[str, Any], where: str) -> tuple[int, ...]:
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        chat = _is_chat(prompt)
        if not isinstance(prompt, str) and not chat:
            try:
                return Request(prompt=prompt).prompt
            except TypeError:
                raise RequestError(f"{where}: got {short(prompt)}, wanted {_WANTED}") from None
        if self.tokenizer is None:
            raise RequestError(
                f"{where}: a text needs a tokenizer and there is none; give `tokenizer`, or a list of ids"
            )
        if chat and not has_template(self.tokenizer):
            raise RequestError(f"{where}: a chat needs a chat template and the tokenizer has none; try a text")
        hint = "other turns or chat_template_kwargs" if chat else "another text"
        return prompt_ids(prompt, self.tokenizer, template if chat else None, where, hint)


def _listed(prompts: Any) -> list[Any]:
    """The prompts, where one may stand alone.

    Raises:
        RequestError: there are none, or they are no prompts.
    """
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, str) or _is_chat(prompts):
        return [prompts]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        hint = "; try its input_ids" if isinstance(prompts, Mapping) and "input_ids" in prompts else ""
        raise RequestError(f"prompts: got {short(prompts)}, wanted {_WANTED}{hint}")
    listed = list(prompts)
    if not listed:
        raise RequestError(f"prompts: got none, wanted {_WANTED}")
    return [listed] if hasattr(listed[0], "__index__") and getattr(listed[0], "ndim", 0) == 0 else listed


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(turn, Mapping) for turn in prompt)
