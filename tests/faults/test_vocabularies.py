"""Pairs of vocabularies: the same, padded, or different; and ids that only one side has."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.errors import CompatibilityError
from specdec.loading import byte_tokenizer
from specdec_plugins.drafters.model import DraftModel
from tests.families import greedy, prompts, tiny
from tests.faults.kit import Forwards, Watched, ask, engine, generate, own, serve

TEXT = (3, 1, 4, 1, 5)


def of_width(width, seed=0):
    """A tiny llama with that many ids; those that 80 have too mean the same in every width."""
    config = type(tiny("llama").config)(**{**tiny("llama").config.to_dict(), "vocab_size": width})
    model = AutoModelForCausalLM.from_config(config).eval()
    rows = torch.arange(width) % 80
    state = {
        name: value[rows] if value.shape[0] == 80 else value
        for name, value in tiny("llama", seed=seed).state_dict().items()
    }
    model.load_state_dict(state)
    with torch.no_grad():
        # Ids beyond the shared ones are what the model likes best: nothing may come of it.
        model.lm_head.weight[80:] *= 1.5
    model.generation_config.eos_token_id = None
    return model


def swapped():
    """The byte tokenizer with two ids exchanged."""
    tokenizer = byte_tokenizer()
    vocabulary = tokenizer.get_vocab()
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    tokenizer.get_vocab = lambda: vocabulary
    return tokenizer


def more(*tokens):
    """The byte tokenizer with tokens added at its end."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def drafter_with(tokenizer, width=80):
    model = tiny("llama", seed=1) if width == 80 else of_width(width, seed=1)
    return DraftModel(model=model, tokenizer=tokenizer, num_speculative_tokens=3)


# Catches: a pair whose ids mean different things, with garbage in every token that is accepted.
def test_a_drafter_whose_ids_mean_other_strings_is_refused():
    with pytest.raises(CompatibilityError, match="tokenizers differ"):
        engine(drafter_with(swapped()), tokenizer=byte_tokenizer())


# Catches: sizes of embeddings compared instead of tokenizers; a padded id that is drafted, or read by a model without
# it.
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("width", [64, 96])
def test_models_of_one_tokenizer_and_other_paddings_work_in_both_directions(width, temperature):
    asked = [ask(prompt, new=24, temperature=temperature, seed=i) for i, prompt in enumerate(prompts())]
    small, drafter = 64 if width == 64 else 80, Watched(drafter_with(None, width))
    with Forwards(drafter.inner.model) as forwards:
        done = engine(drafter).generate(asked)
    assert temperature or [completion.tokens for completion in done] == list(greedy("llama", 24))
    drafted = torch.cat([draft.tokens.flatten() for draft in drafter.drafts])
    assert 0 <= int(drafted.min()) <= int(drafted.max()) < small
    assert all(int(fed["ids"].max()) < width for fed in forwards.inputs)
    laws = [draft.law for draft in drafter.drafts if temperature and draft.tokens.shape[1]]
    assert {law.shape[-1] for law in laws} == ({80} if temperature else set())
    assert sum(completion.counters.num_draft_tokens for completion in done) > 10


# Catches: a pair of one tokenizer and two paddings sent down a path for different tokenizers.
@pytest.mark.parametrize("width", [80, 288])
def test_a_padded_pair_may_have_its_tokenizers_given(width):
    done = serve(drafter_with(byte_tokenizer(), width), ask(TEXT, new=12), tokenizer=byte_tokenizer())
    assert done.tokens == generate(tiny("llama"), TEXT, 12)
    assert done.text == byte_tokenizer().decode(done.tokens)


# Catches: a mismatch that is found deep inside, as a shape, and not named.
def test_different_tokenizers_are_named_with_their_first_difference():
    with pytest.raises(CompatibilityError) as caught:
        engine(drafter_with(swapped()), tokenizer=byte_tokenizer())
    first = byte_tokenizer().convert_tokens_to_ids("a")
    assert "2 of 257 shared ids" in str(caught.value)
    assert f"{first}: target 'a', draft 'b'" in str(caught.value)


# Catches: a check too strict for tokens added at the end, or one that no longer looks at what both sides share.
def test_ids_that_only_one_side_names_are_a_note_and_no_problem():
    drafter = drafter_with(more("<one>", "<two>"))
    engine(drafter, tokenizer=byte_tokenizer())
    assert [note for note in drafter.notes if "2 ids" in note and "draft" in note]
    other = drafter_with(byte_tokenizer())
    engine(other, tokenizer=more("<one>"))
    assert [note for note in other.notes if "1 id" in note and "target" in note]
    with pytest.raises(CompatibilityError, match="tokenizers differ"):
        engine(drafter_with(more("<one>", "<two>")), tokenizer=more("<two>", "<one>"))


# Catches: a special id of the drafter, missing or outside its vocabulary, that is fed as a token.
@pytest.mark.parametrize("special", [-1, 80, None])
def test_special_ids_of_a_drafter_are_never_fed_to_it(special):
    model = own(seed=1)
    for config in (model.config, model.generation_config):
        config.pad_token_id = config.bos_token_id = config.mask_token_id = special
    drafter = DraftModel(model=model, num_speculative_tokens=3)
    one = engine(drafter)
    with Forwards(model) as forwards:
        done = one.generate([ask(prompt, new=24) for prompt in prompts()])
    assert [completion.tokens for completion in done] == list(greedy("llama", 24))
    fed = torch.cat([inputs["ids"].flatten() for inputs in forwards.inputs])
    assert 0 <= int(fed.min()) <= int(fed.max()) < 80
