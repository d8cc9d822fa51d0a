"""The pieces of distill: the loss and its gradient, the tokens a step looks at, the pool, texts."""

import json
import math
from pathlib import Path

import pytest
import torch

from specdec.errors import DataError
from specdec.loading import byte_tokenizer
from specdec_plugins.distill import corpus
from specdec_plugins.distill.anchors import make
from specdec_plugins.distill.corpus import Text
from specdec_plugins.distill.loss import Divergence, Vocabulary, Weights
from specdec_plugins.distill.pool import GROUP, Pool, groups_of
from specdec_plugins.distill.vocabulary import Lexicon, frequent


def plain(hidden, codes, bias, final, tokens, words, weights):
    """The loss as the formula says it."""
    p = (final @ words.head.T + words.offsets).softmax(-1)
    logits = hidden @ words.head.T + codes @ bias.T + words.offsets
    q, level = logits.softmax(-1), logits.log_softmax(-1)
    share = torch.minimum(p, q).sum(-1)
    divergence = (p * (p.log() - level)).sum(-1)
    surprise = -level.gather(1, words.places[tokens].unsqueeze(1)).squeeze(1)
    return (weights.tv * (1 - share) + weights.kl * divergence + weights.ce * surprise).mean(), share


# Catches: a wrong sign or a part left out of the gradient, which trains all the same and ends worse; chunks that lose
# or repeat rows.
@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.7, 0.4, 0.2)], ids=str)
def test_the_gradient_of_the_loss_is_that_of_its_formula(weights):
    generator = torch.Generator().manual_seed(0)
    sizes = ((250, 6), (250, 3), (30, 3))
    made = [torch.randn(size, generator=generator, requires_grad=True) for size in sizes]
    final, head = torch.randn((250, 6), generator=generator), torch.randn((30, 6), generator=generator)
    offsets = torch.where(torch.arange(30) < 20, 0.0, math.log(4.0))
    words, weights = Vocabulary(head, offsets, torch.arange(30)), Weights(*weights)
    tokens = torch.randint(20, (250,), generator=generator)
    wanted, shares = plain(*made, final, tokens, words, weights)
    slopes = torch.autograd.grad(wanted, made)
    found, kept = Divergence.apply(*made, final, tokens, words, weights)
    torch.testing.assert_close(found, wanted.detach())
    torch.testing.assert_close(kept, shares.detach())
    for ours, theirs in zip(torch.autograd.grad(found, made), slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


# Catches: a token of the step's texts that is not looked at, others counted once although they stand for many.
def test_tokens_looked_at_stand_for_the_whole_vocabulary():
    head = torch.randn((100, 4), generator=torch.Generator().manual_seed(0))
    lexicon = Lexicon(head, torch.tensor([5, 7, 9]), 20)
    tokens = torch.tensor([50, 7])
    ids, words = lexicon.choose(tokens, torch.Generator().manual_seed(1))
    assert len(ids) == 20
    assert len(ids.unique()) == 20
    assert set(ids[words.places[tokens]].tolist()) == {50, 7}
    assert words.offsets.exp().sum().item() == pytest.approx(100)
    assert words.offsets[words.places[torch.tensor([5, 7, 9, 50])]].tolist() == [0.0] * 4
    assert torch.equal(words.head, head[ids])


# Catches: prompts counted as if they were to be predicted.
def test_frequent_tokens_are_those_that_are_predicted():
    texts = [Text("a", (1, 1, 1, 2, 3, 3), 3), Text("b", (1, 3, 4), 1)]
    assert frequent(texts, 2).tolist() == [3, 2]


# Catches: a pool that grows beyond its room, keeps files of groups that went, or never meets the last texts.
def test_the_pool_is_a_window_that_moves_with_the_steps(tmp_path):
    texts = [Text(str(index), tuple(range(2 + index % 5)), 0) for index in range(30 * GROUP)]
    pool = Pool(tmp_path / "features", groups_of(texts, 0), None, 4, 10)
    assert pool.window(0) == range(12, 16)
    assert pool.window(25) == range(14, 18)
    assert pool.window(200) == range(32, 36)
    whole = Pool(tmp_path / "features", pool.groups, None, 30, 10)
    assert whole.window(0) == range(16)
    assert whole.window(1000) == range(30)
    assert sorted(text.id for group in pool.groups for text in group) == sorted(text.id for text in texts)


# Catches: features of a text handed out as another's, a file of a group that left.
def test_a_draw_gives_each_text_its_own_features(tmp_path):
    from specdec_plugins.distill.features import Features

    def tap(texts):
        return [Features(torch.full((2, 1), float(text.id)), torch.zeros(2, 1)) for text in texts]

    texts = [Text(str(index), (1, 2), 0) for index in range(20 * GROUP)]
    pool = Pool(tmp_path / "features", groups_of(texts, 0), tap, 3, 1)
    for step in (0, 1, 40):
        drawn = pool.draw(step, 5, torch.Generator().manual_seed(step))
        assert all(float(text.id) == found.tapped[0, 0] for text, found in drawn)
        kept = {int(path.stem) for path in Path(pool.folder).iterdir()}
        assert kept == {number % 20 for number in pool.window(step)}


# Catches: a block that sees features of its own pending token, of later ones, or rows of another block.
def test_a_block_sees_what_comes_before_it_and_itself():
    blocks = make([Text("a", (10, 11, 12, 13, 14, 15), 2), Text("b", (20, 21, 22), 1)], [[1, 3], [1]], 3, 99)
    assert blocks.inputs[0].tolist() == [[11, 99, 99], [13, 99, 99]]
    assert blocks.previous[0].tolist() == [[11, 12, 13], [13, 14, 15]]
    assert blocks.following[0, 0].tolist() == [12, 13, 14]
    assert blocks.there[0].tolist() == [[True] * 3, [True, True, False]]
    assert blocks.there[1].tolist() == [[True, False, False], [False] * 3]
    rows = blocks.mask[0, 0].int().tolist()
    assert rows[0] == rows[2] == [1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert rows[3] == [1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1]


# Catches: a text that changes sides when others come, or is on both.
def test_what_is_held_out_depends_on_the_id_alone():
    texts = [Text(f"text-{index}", (1, 2, 3), 1) for index in range(400)]
    learnt, held = corpus.split(texts, 0.1)
    assert 20 < len(held) < 60
    assert {text.id for text in learnt}.isdisjoint(text.id for text in held)
    assert corpus.split(texts[:50], 0.1)[1] == [text for text in held if text in texts[:50]]


# Catches: an id beyond the vocabulary or a row of another form that fails later, without its line.
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": [1], "tokens": [99]}, "2: field 'tokens' is [99], wanted a list of ids below 50"),
        ({"prompt": "text", "tokens": [1]}, "2: field 'prompt' is \"text\", wanted a list of ids below 50"),
    ],
)
def test_a_row_that_is_no_answer_is_one_sentence(tmp_path, row, said):
    file = tmp_path / "samples.jsonl"
    file.write_text(json.dumps({"id": "a", "prompt": [1], "tokens": [2]}) + "\n" + json.dumps(row))
    with pytest.raises(DataError) as error:
        corpus.sampled(str(file), 50)
    assert str(error.value) == f"{file}:{said}"


# Catches: half a character, which JSON can say and UTF-8 cannot, as a traceback of a tokenizer or of a hash.
@pytest.mark.parametrize(
    "row",
    [
        {"id": "\ud800", "prompt": [1], "tokens": [2]},
        {"id": "\ud800", "prompt": "a", "response": "b"},
        {"prompt": "a", "response": "b\ud800"},
    ],
)
def test_half_a_character_is_one_sentence(tmp_path, row):
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(DataError) as error:
        corpus.sampled(str(file), 50) if "tokens" in row else corpus.finished(str(file), byte_tokenizer())
    assert str(error.value) == f"{file}:1: got '\\ud800', which is half a character; wanted whole ones"
