"""`specdec.generate` and `specdec generate`."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

import specdec
from specdec import Engine, Request, Sampling, Target, cli_generate, generation
from specdec.cli import main
from specdec.errors import ModelError, RecipeError, RequestError, SpecdecError
from specdec.loading import load
from specdec.noise import request_seed
from specdec_plugins.drafters.model import DraftModel
from specdec_plugins.drafters.prompt_lookup import PromptLookup
from specdec_plugins.kv.slab import Slab
from specdec_plugins.schedulers.continuous import Continuous
from specdec_plugins.verifiers.nucleus import Nucleus
from specdec_plugins.verifiers.standard import Standard

TEXTS = ["Once upon a time", "one two one two one two", "x"]
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def pair():
    return load("random:llama")


@pytest.fixture
def chatty(monkeypatch):
    """`random:llama` has a chat template; returns the prompts that reached an engine, as texts."""
    seen = []

    def with_template(name, **options):
        model, tokenizer = load(name, **options)
        tokenizer.chat_template = TEMPLATE
        return model, tokenizer

    engine = generation.Generator.engine

    def watched(self, requests):
        seen.extend(self.tokenizer.decode(request.prompt) for request in requests)
        return engine(self, requests)

    monkeypatch.setattr(generation, "load_model", with_template)
    monkeypatch.setattr(generation.Generator, "engine", watched)
    return seen


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr(generation, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))


# Catches: numbers shifted by one token, raw logits that were filtered, a temperature left out, laws of the draft.
@pytest.mark.parametrize("verifier", ["standard", "block", "nucleus", "sample_match"])
def test_logprobs_are_those_of_a_forward_over_the_whole_text(pair, verifier):
    model, tokenizer = pair
    options = {"draft_model": "random:llama:1", "num_speculative_tokens": 3, "temperature": 0.6, "max_new_tokens": 24}
    found = specdec.generate(model, tokenizer, TEXTS, verifier=verifier, logprobs=True, **options)
    silent = specdec.generate(model, tokenizer, TEXTS, verifier=verifier, **options)
    assert [one.tokens for one in silent] == [one.tokens for one in found]
    assert {bool(one.logprobs) for one in silent} == {False}
    for text, one in zip(TEXTS, found, strict=True):
        prompt = tokenizer(text).input_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *one.tokens]])).logits[0, len(prompt) - 1 : -1]
        own = torch.tensor(one.tokens).unsqueeze(1)
        for name, laws in (("raw", logits), ("target", logits / 0.6)):
            wanted = laws.log_softmax(-1).gather(1, own).squeeze(1)
            assert torch.allclose(torch.tensor(one.logprobs[name]), wanted, atol=1e-4)
        output, own_law = torch.tensor(one.logprobs["output"]), torch.tensor(one.logprobs["target"])
        assert torch.allclose(output, own_law, rtol=0, atol=1e-5) == (verifier != "nucleus")
        assert all(value == value for value in one.logprobs["output"])
        assert one.logprobs["uncovered"] == [0.0] * len(one.tokens)


def tokens(completions):
    return [completion.tokens for completion in completions]


def run(*arguments, stdin=None, code=0):
    result = CliRunner().invoke(main, ["generate", *arguments], input=stdin, catch_exceptions=False)
    assert result.exit_code == code, result.stderr
    assert "Traceback" not in result.stderr
    return result


RANDOM = ("--model", "random:llama", "--max-new-tokens", "12")


# Catches: a keyword that does not reach the sampling, a seed that all prompts share, a drafter or rule that is not the
# one named, prompts encoded otherwise than by the tokenizer.
def test_it_gives_what_the_engine_gives(pair):
    model, tokenizer = pair
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
    limits = {"max_new_tokens": 20, "min_new_tokens": 3, "stop_ids": {7}, "stop_strings": ("ab",), "ignore_eos": True}
    target = Target(model, tokenizer, kv=Slab(rows=3, tokens=64))
    drafter = DraftModel(model="random:llama:1", num_speculative_tokens=3)
    engine = Engine(target, drafter, Nucleus(theta=0.8), Continuous())
    wanted = engine.generate(
        Request(
            prompt=tokenizer(text).input_ids,
            sampling=Sampling(seed=request_seed(5, str(index), 0), **sampling, **limits),
        )
        for index, text in enumerate(TEXTS)
    )
    found = specdec.generate(
        model,
        tokenizer,
        TEXTS,
        draft_model="random:llama:1",
        verifier={"use": "nucleus", "theta": 0.8},
        num_speculative_tokens=3,
        seed=5,
        **sampling,
        **limits,
    )
    assert tokens(found) == tokens(wanted)
    assert [(done.id, done.text, done.finish_reason, done.counters) for done in found] == [
        (str(index), done.text, done.finish_reason, done.counters) for index, done in enumerate(wanted)
    ]


# Catches: each way to say the same strategy that goes another way.
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drafter": "prompt_lookup", "verifier": "standard"},
        {"drafter": {"use": "prompt_lookup"}, "verifier": {"use": "standard"}},
        {"drafter": PromptLookup(), "verifier": Standard()},
        {"drafter": "specdec_plugins.drafters.prompt_lookup:PromptLookup"},
        {"drafter": {"use": "prompt_lookup"}, "num_speculative_tokens": 10},
    ],
)
def test_name_mapping_and_object_are_the_same_strategy(pair, options):
    default = specdec.generate(*pair, TEXTS, max_new_tokens=16)
    found = specdec.generate(*pair, TEXTS, max_new_tokens=16, **options)
    assert [done.counters for done in found] == [done.counters for done in default]
    assert tokens(found) == tokens(default)
    assert default[1].counters.num_draft_tokens > 0


# Catches: a draft model that is loaded when it is there already, or that is ignored.
def test_a_draft_model_is_named_or_loaded_or_an_option(pair):
    model, _ = load("random:llama:1")
    found = [
        specdec.generate(*pair, TEXTS, max_new_tokens=16, **options)
        for options in (
            {"draft_model": "random:llama:1"},
            {"draft_model": model},
            {"drafter": "model", "draft_model": model},
            {"drafter": {"use": "model", "model": "random:llama:1"}},
            {"drafter": DraftModel(model=model)},
        )
    ]
    assert all(tokens(one) == tokens(found[0]) for one in found)
    assert all(done.counters.num_accepted_tokens for done in found[0])


# Catches: a template applied to texts, or not to chats; ids that are encoded again; one prompt taken for many.
def test_texts_chats_and_ids_alone_and_in_lists(pair):
    model, tokenizer = pair
    _, with_template = load("random:llama")
    with_template.chat_template = TEMPLATE
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    text = "<system>be brief\n<user>hi\n<assistant>"
    ids = tokenizer(text).input_ids
    wanted = specdec.generate(model, tokenizer, text, max_new_tokens=8)
    assert len(wanted) == 1
    tensor = torch.tensor(ids)
    for prompts in ([text], chat, [chat], tuple(chat), ids, [ids], (tuple(ids),), tensor, tensor[None], list(tensor)):
        assert tokens(specdec.generate(model, with_template, prompts, max_new_tokens=8)) == tokens(wanted)
    mixed = specdec.generate(model, with_template, [ids, chat, text], max_new_tokens=8, temperature=0)
    assert tokens(mixed) == [mixed[0].tokens] * 3
    bare = specdec.generate(model, prompts=[ids], max_new_tokens=8)
    assert (bare[0].tokens, bare[0].text) == (wanted[0].tokens, None)


# Catches: processors that reach no request, or the first one only.
def test_processors_reach_every_prompt(pair):
    def only_seven(_, scores):
        return torch.full_like(scores, -torch.inf).index_fill(-1, torch.tensor([7]), 0.0)

    found = specdec.generate(*pair, TEXTS, max_new_tokens=4, processors=[only_seven])
    assert tokens(found) == [(7,) * 4] * 3


# Catches: results that depend on batch mates or on how many run at once; equal prompts that get equal texts.
def test_a_batch_gives_what_each_prompt_gives_alone(pair):
    together = specdec.generate(*pair, ["abc"] * 5, max_new_tokens=16, seed=3)
    assert len(set(tokens(together))) == 5
    assert tokens(specdec.generate(*pair, ["abc"] * 5, max_new_tokens=16, seed=3, rows=2)) == tokens(together)
    assert tokens(specdec.generate(*pair, ["abc"] * 2, max_new_tokens=16, seed=3)) == tokens(together)[:2]
    assert tokens(specdec.generate(*pair, ["abc"], max_new_tokens=16, seed=4)) != tokens(together)[:1]


# Catches: a cache as long as max_new_tokens though the model has fewer positions, one too short for a draft, one with
# rows that nobody uses.
def test_the_cache_is_of_the_size_that_is_needed(pair, monkeypatch):
    made = []
    monkeypatch.setattr(
        generation,
        "Target",
        lambda *given, kv, **options: made.append((kv.rows, kv.tokens)) or Target(*given, kv=kv, **options),
    )
    assert specdec.generate(*pair, prompts=["abcd"], max_new_tokens=10**9, stop_ids=range(272))
    assert specdec.generate(*pair, prompts=["abcd", "ab"], max_new_tokens=20)
    assert specdec.generate(*pair, prompts=["a"], max_new_tokens=1)
    assert made == [(1, 1024), (2, 24), (1, 12)]


# Catches: an engine made anew for every turn of a chat, or one whose cache is too short for the next.
def test_a_generator_keeps_its_engine_while_the_cache_is_long_enough(pair):
    generator = generation.Generator(*pair, drafter=PromptLookup())
    sampling = generation.make_sampling(max_new_tokens=8)

    def served(length, count=1):
        requests = generation.make_requests([tuple(range(60, 60 + length))] * count, sampling)
        engine = generator.engine(requests)
        assert tokens(engine.generate(requests)) == tokens(
            specdec.generate(*pair, [request.prompt for request in requests], max_new_tokens=8)
        )
        return engine, engine.target.kv.rows, engine.target.kv.tokens

    first = served(10)
    assert first[1:] == (1, 18)
    assert served(4) == first
    assert served(11)[1:] == (1, 36)
    assert served(12, 2)[1:] == (2, 36)
    assert served(12)[1:] == (2, 36)


# Catches: the message of a drafter that was given to two targets, where its user has one.
def test_a_drafter_object_cannot_follow_a_cache_that_grows(pair):
    generator = generation.Generator(*pair, drafter=DraftModel(model="random:llama:1"))

    def served(count):
        requests = generation.make_requests([(1, 2, 3)], generation.make_sampling(max_new_tokens=count))
        return generator.engine(requests)

    served(4)
    with pytest.raises(RequestError, match=r"the cache must grow to 1 rows of 43 tokens, .*by name or as a mapping"):
        served(40)


# Catches: tracebacks of others' types, problems told one at a time, a model loaded for a call that cannot succeed.
@pytest.mark.parametrize(
    ("options", "kind", "lines"),
    [
        ({"drafter": "promt_lookup"}, RecipeError, ["drafter: .*unknown; did you mean 'prompt_lookup'?"]),
        ({"verifier": "nucleos", "rows": 0}, RecipeError, ["verifier: .*did you mean 'nucleus'?", "kv.rows: got 0"]),
        ({"verifier": {"use": "nucleus", "thetta": 1}}, RecipeError, ["verifier.thetta: .*did you mean 'theta'?"]),
        ({"verifier": {"theta": 1}}, RecipeError, ["verifier.use: got None"]),
        ({"drafter": 3}, RecipeError, ["drafter: got 3, wanted a name"]),
        ({"drafter": Standard()}, RecipeError, ["drafter: got Standard, wanted a name"]),
        ({"drafter": "model"}, RecipeError, ["drafter.model: missing"]),
        ({"drafter": "none", "num_speculative_tokens": 2}, RecipeError, ["drafter.num_speculative_tokens: unknown"]),
        ({"drafter": PromptLookup(), "num_speculative_tokens": 2}, RecipeError, ["drafter: is an object already"]),
        ({"tokenizer": ["a text"]}, RecipeError, ["tokenizer: got list, .*third argument"]),
        ({"temperature": -1, "top_p": 2}, RecipeError, ["sampling.temperature: ", "sampling.top_p: "]),
        ({"prompts": []}, RequestError, ["prompts: got none, wanted a text"]),
        ({"prompts": None}, RequestError, ["prompts: got None, wanted a text"]),
        ({"prompts": {"input_ids": [[1]]}}, RequestError, ["prompts: got .*; try its input_ids"]),
    ],
)
def test_an_error_comes_before_the_model(no_model, options, kind, lines):
    given = {"prompts": ["a"], **options}
    with pytest.raises(kind) as raised:
        specdec.generate("random:llama", **given)
    found = str(raised.value).splitlines()
    assert len(found) == len(lines)
    for text, line in zip(found, lines, strict=True):
        place, _, rest = line.partition(".*")
        assert text.startswith(place)
        assert rest in text


# Catches: a prompt that is not named, or only the first of those that cannot be served.
@pytest.mark.parametrize(
    ("arguments", "options", "kind", "lines"),
    [
        ((None, ["a"]), {}, RequestError, ["prompts[0]: a text needs a tokenizer"]),
        (([{"role": "user", "content": "a"}],), {}, RequestError, ["prompts[0]: a chat needs a chat template"]),
        ((["a", 3],), {}, RequestError, ["prompts[1]: got 3, wanted a text"]),
        (([[1], ["a"]],), {}, RequestError, ["prompts[1]: got ['a'], wanted a text"]),
        (([[], [999], "ok"],), {}, RequestError, ["request '0': the prompt is empty", "request '1': token 999"]),
        ((["a" * 2000],), {}, RequestError, ["request '0': 2000 prompt tokens leave no room"]),
        ((["a"],), {"dtype": torch.float64}, ModelError, ["dtype: the model is loaded already"]),
    ],
)
def test_a_prompt_that_cannot_be_served_is_named(pair, arguments, options, kind, lines):
    model, tokenizer = pair
    given = arguments if len(arguments) > 1 else (tokenizer, *arguments)
    with pytest.raises(kind) as raised:
        specdec.generate(model, *given, **options)
    found = str(raised.value).splitlines()
    assert len(found) == len(lines)
    assert all(text.startswith(line) for text, line in zip(found, lines, strict=True))
    assert isinstance(raised.value, SpecdecError)


# Catches: a model that is no model told by an AttributeError; a dtype that does not reach the models that are named.
def test_what_is_no_model_is_refused_and_dtype_reaches_both(monkeypatch):
    with pytest.raises(ModelError, match="model: got int, wanted a loaded model"):
        specdec.generate(3, prompts=[[1]])
    with pytest.raises(ModelError, match="drafter model: got int, wanted a loaded model"):
        specdec.generate("random:llama", prompts=[[1]], draft_model=3)
    with pytest.raises(RecipeError, match="drafter: model: got LlamaForCausalLM, wanted the folder of a block drafter"):
        specdec.generate("random:llama", prompts=[[1]], drafter="dspark", draft_model=load("random:llama:1")[0])
    with pytest.raises(ModelError, match=r"model '/a{300}': no such folder"):
        specdec.generate("random:llama", prompts=[[1]], draft_model=f"/{'a' * 300}")
    made = []
    monkeypatch.setattr(generation, "Engine", lambda *given, **asked: made.append(Engine(*given, **asked)) or made[-1])
    specdec.generate("random:llama", prompts=["a"], draft_model="random:llama:1", dtype=torch.float64, max_new_tokens=2)
    assert made[0].target.dtype == made[0].drafter._draft.dtype == torch.float64


# Catches: text that is lost or shown twice, statistics on stdout, a command that differs from the library.
def test_the_text_goes_to_stdout_and_the_statistics_to_stderr(pair):
    result = run("one two one two one", *RANDOM, "--seed", "2")
    [wanted] = specdec.generate(*pair, "one two one two one", max_new_tokens=12, seed=2)
    assert result.stdout.removesuffix("\n") == wanted.text.removesuffix("\n")
    [line] = result.stderr.splitlines()
    for fact in (r"12 tokens in ", "tokens/s", "acceptance length ", "% of ", "draft ", "verify ", "ended by length"):
        assert fact in line


# Catches: a last line that is not one JSON document, flags that do not reach sampling, drafter and rule.
def test_the_last_line_is_one_json_document(pair):
    strategies = ("--draft-model", "random:llama:1", "--verifier", "nucleus", "--set", "verifier.theta=0.8")
    more = ("--set", "drafter.num_speculative_tokens=3", "--temperature", "0.7", "--top-k", "50", "--ignore-eos")
    result = run("hello", *RANDOM, *strategies, *more, "--stop", "q", "--stop", "~~", "--json")
    last = json.loads(result.stdout.splitlines()[-1], parse_constant=pytest.fail)
    assert last["drafter"] == "model(num_speculative_tokens=3, model=random:llama:1)"
    assert (last["model"], last["verifier"], last["lossless"]) == ("random:llama", "nucleus(theta=0.8)", False)
    sampling = {"temperature": 0.7, "top_k": 50, "ignore_eos": True, "stop_strings": ["q", "~~"]}
    assert last["sampling"].items() >= sampling.items()
    [wanted] = specdec.generate(
        *pair,
        "hello",
        draft_model="random:llama:1",
        num_speculative_tokens=3,
        verifier={"use": "nucleus", "theta": 0.8},
        max_new_tokens=12,
        **sampling,
    )
    [found] = last["completions"]
    assert (found["text"], tuple(found["tokens"]), found["prompt_tokens"]) == (wanted.text, wanted.tokens, 5)
    assert last["tokens"] == len(wanted.tokens)
    assert last["acceptance_length"] == wanted.counters.acceptance_length
    assert "the law of the text is not the target's" in result.stderr
    quiet = run("hello", *RANDOM, *strategies, *more, "--stop", "q", "--stop", "~~", "--json", "--quiet")
    assert json.loads(quiet.stdout)["completions"] == last["completions"]
    assert quiet.stderr == ""


# Catches: a lossless rule, or a lossy one that drafts nothing, said to change the law; the wrong word when greedy.
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--verifier", "standard"), ""),
        (("--verifier", "nucleus", "--drafter", "none"), ""),
        (("--verifier", "nucleus"), "nucleus is not a lossless rule: the law of the text is not the target's\n"),
        (("--verifier", "nucleus", "--temperature", "0"), "may differ from the target's own\n"),
    ],
)
def test_a_lossy_rule_says_so(arguments, said):
    result = run("aaaa", *RANDOM, *arguments)
    assert result.stderr.partition("\n")[2].endswith(said)
    assert ("lossless" in result.stderr) is bool(said)


# Catches: prompts of a file answered out of order, without their ids, or otherwise than in a batch.
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_file_is_a_batch(pair, tmp_path, kind):
    file = tmp_path / f"prompts.{kind}"
    lines = [json.dumps({"id": f"n{i}", "prompt": text}) for i, text in enumerate(TEXTS)] if kind == "jsonl" else TEXTS
    file.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    ids = ["n0", "n1", "n2"] if kind == "jsonl" else ["1", "3", "5"]
    result = run("--file", str(file), *RANDOM, "--json", "--rows", "2", "--stop", "q")
    wanted = specdec.generate(*pair, TEXTS, max_new_tokens=12, stop_strings="q")
    last = json.loads(result.stdout.splitlines()[-1])
    assert [(done["id"], done["text"]) for done in last["completions"]] == [
        (name, done.text) for name, done in zip(ids, wanted, strict=True)
    ]
    shown = "\n".join(
        f"[{name}]\n{done.text.removesuffix(chr(10))}{chr(10) if done.text else ''}"
        for name, done in zip(ids, wanted, strict=True)
    )
    assert result.stdout.startswith(shown)
    assert "length (" in result.stderr


# Catches: a template that is not used where there is one, or used with --raw; a system turn that is dropped.
def test_a_text_is_a_users_turn_where_there_is_a_template(chatty, tmp_path):
    run("hi", *RANDOM)
    run("hi", *RANDOM, "--raw")
    run("hi", *RANDOM, "--system", "be brief")
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}), encoding="utf-8")
    run("--file", str(file), *RANDOM)
    user = "<user>hi\n<assistant>"
    assert chatty == [user, "hi", f"<system>be brief\n{user}", "<user>a\n<assistant>"]


# Catches: a chat that forgets its turns or the system's, that answers empty lines, that goes on after /exit.
def test_a_chat_keeps_its_turns_until_they_are_begun_anew(chatty):
    result = run("--chat", *RANDOM, "--system", "S", "--json", stdin="one\n\n two \n/new\nthree\n/exit\nfour\n")
    last = json.loads(result.stdout.splitlines()[-1])
    first, second, third = (done["text"] for done in last["completions"])
    assert [done["id"] for done in last["completions"]] == ["0", "1", "2"]
    assert chatty == [
        "<system>S\n<user>one\n<assistant>",
        f"<system>S\n<user>one\n<assistant>{first}\n<user>two\n<assistant>",
        "<system>S\n<user>three\n<assistant>",
    ]
    assert result.stdout.startswith("".join(text.removesuffix("\n") + "\n" for text in (first, second, third)))
    assert "36 tokens in " in result.stderr
    assert result.stderr.count("(cut off after 12 tokens)\n") == 3


# Catches: turns that share their noise; times of one turn, or of one engine, told as those of the whole chat.
def test_turns_have_seeds_of_their_own_and_their_times_add_up(chatty, monkeypatch):
    made = []
    monkeypatch.setattr(generation, "Engine", lambda *given, **asked: made.append(Engine(*given, **asked)) or made[-1])
    result = run("--chat", *RANDOM, "--json", stdin="same\n/new\nsame\nmore\n")
    last = json.loads(result.stdout.splitlines()[-1])
    first, second, _ = (done["tokens"] for done in last["completions"])
    assert chatty[0] == chatty[1]
    assert first != second
    assert len(made) == 2
    for index, part in enumerate(("draft", "verify", "rest")):
        assert last["seconds"][part] == pytest.approx(sum(engine.seconds[index] for engine in made))


# Catches: one turn that cannot be served ending the whole conversation, or staying in it.
def test_a_turn_that_is_too_long_is_told_and_forgotten(chatty):
    result = run("--chat", *RANDOM, stdin=f"{'x' * 1100}\nshort\n")
    assert "error: request '0': 1118 prompt tokens leave no room" in result.stderr
    assert chatty[1] == "<user>short\n<assistant>"
    assert result.stderr.splitlines()[-1].startswith("12 tokens in ")


# Catches: Ctrl-C during an answer that ends the chat, loses what there is of the answer, or leaks its cache row.
def test_ctrl_c_stops_an_answer_and_not_the_chat(chatty, monkeypatch):
    written = []
    write = cli_generate.Answers.write

    def interrupted(self, text):
        written.append(text)
        write(self, text)
        if len(written) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli_generate.Answers, "write", interrupted)
    before = signal.getsignal(signal.SIGINT)
    result = run("--chat", "--model", "random:llama", "--max-new-tokens", "40", "--drafter", "none", stdin="one\ntwo\n")
    part = "".join(written[:3])
    assert chatty[1] == f"<user>one\n<assistant>{part}\n<user>two\n<assistant>"
    assert result.stderr.splitlines()[-1].startswith("43 tokens in ")
    assert signal.getsignal(signal.SIGINT) is before


# Catches: a second Ctrl-C, or one outside a chat, that ends in a traceback or without the statistics.
@pytest.mark.parametrize("arguments", [("hi",), ("--chat",)])
def test_an_interrupt_ends_it_with_what_there_is(chatty, monkeypatch, arguments):
    write = cli_generate.Answers.write

    def interrupted(self, text):
        write(self, text)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_generate.Answers, "write", interrupted)
    result = run(*arguments, *RANDOM, stdin="one\n", code=130)
    assert " tokens in " in result.stderr
    assert result.stderr.splitlines()[-1] == "interrupted"


# Catches: tracebacks, exit codes of other classes, errors on stdout, a model loaded for nothing.
@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (("hi", "--drafter", "promt_lookup"), 2, "drafter: .*did you mean 'prompt_lookup'?"),
        (("hi", "--set", "verifer.theta=1"), 2, "--set verifer.theta=1: unknown section; did you mean 'verifier'?"),
        (("hi", "--set", "verifier=nucleus"), 2, "--set verifier: got 'nucleus'"),
        (("hi", "--set", "target.modle=x"), 2, "target.modle: unknown option"),
        (("hi", "--dtype", "float8"), 2, "target.dtype: got 'float8'"),
        (("hi", "--temperature", "-1"), 2, "sampling.temperature: "),
        (("hi", "--chat"), 2, "PROMPT and --chat: give one of them"),
        (("hi", "--raw", "--system", "x"), 2, "--system and --raw: "),
        (("",), 6, "PROMPT: empty"),
        (("--file", "absent.txt"), 7, "absent.txt: cannot be read: "),
        (("--file", "absent.jsonl"), 7, "absent.jsonl: cannot be read: "),
    ],
)
def test_a_command_that_cannot_succeed_is_one_sentence(no_model, arguments, code, line):
    result = run(*arguments, *RANDOM, code=code)
    [error] = result.stderr.splitlines()
    place, _, rest = line.partition(".*")
    assert error.startswith(f"error: {place}")
    assert rest in error
    assert result.stdout == ""


# Catches: the same of what only the loaded model can tell.
@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (("hi", "--model", "random:nosuch"), 4, "model 'random:nosuch': "),
        (("--chat",), 6, "--chat: needs a chat template"),
        (("hi", "--system", "x"), 6, "--system: needs a chat template"),
        (("x" * 2000,), 6, "request '1': 2000 prompt tokens"),
        (("h\udce9",), 7, "prompt '1': cannot become tokens: UnicodeEncodeError: "),
    ],
)
def test_what_the_model_cannot_do_is_one_sentence(arguments, code, line):
    result = run(*RANDOM, *arguments, code=code)
    [error] = result.stderr.splitlines()
    assert error.startswith(f"error: {line}")
    assert result.stdout == ""


# Catches: scores that are not finite taken for an answer.
def test_scores_that_are_not_finite_are_an_error(monkeypatch):
    def broken(name, **options):
        model, tokenizer = load(name, **options)
        model.get_output_embeddings().weight.data[:, 0] = float("nan")
        return model, tokenizer

    monkeypatch.setattr(generation, "load_model", broken)
    monkeypatch.setattr("specdec.engine.preflight", lambda target: None)
    result = run("hi", *RANDOM, "--json", code=4)
    assert json.loads(result.stdout.splitlines()[-1])["completions"][0]["finish_reason"] == "error"
    assert result.stderr.splitlines()[-1].startswith("error: prompt 1: the target's scores were not finite")


# Catches: escape codes of a model that reach a terminal, or that are missing from what a pipe gets.
def test_a_terminal_sees_no_control_characters(monkeypatch, capsys):
    answers = cli_generate.Answers(show=True, quiet=True)
    answers.write("a\x1b[2J\tb\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    answers.write("a\x1b[2J\tb\n")
    assert capsys.readouterr().out == "a\x1b[2J\tb\na\N{REPLACEMENT CHARACTER}[2J\tb\n"


CHILD = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom specdec.cli import main; main()"


def child(*arguments, **options):
    command = [sys.executable, "-c", CHILD, "generate", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **options)


# Catches: text that is held back until the end, a prompt on stdin that is not read, what a real pipe changes.
def test_through_a_pipe_the_text_is_that_of_the_completion(pair):
    with child(*RANDOM, "--json", stdin=subprocess.PIPE) as process:
        out, err = process.communicate(b"one two one two one\n", timeout=120)
    assert process.returncode == 0, err
    [wanted] = specdec.generate(*pair, "one two one two one", max_new_tokens=12)
    assert out.decode().startswith(wanted.text)
    assert json.loads(out.splitlines()[-1])["completions"][0]["text"] == wanted.text
    assert err.decode().count("\n") == 1


# Catches: a reader that has gone, as `head` does, told by a traceback.
def test_a_closed_pipe_ends_it_silently():
    with child("x", "--model", "random:llama", "--max-new-tokens", "900", "--ignore-eos") as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 1


# Catches: text that only appears at the end; a signal that ends in a traceback.
def test_ctrl_c_ends_a_text_that_has_begun():
    with child("x", "--model", "random:llama", "--max-new-tokens", "900", "--ignore-eos") as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert err.decode().splitlines()[-1] == "interrupted"
    assert " tokens in " in err.decode()
