"""First weights of a Markov head: the target's own expectations, as well as rank r can say them."""

import json

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from specdec.target import Target
from specdec_plugins.distill import bigrams
from specdec_plugins.distill.command import distill
from specdec_plugins.distill.corpus import Text
from specdec_plugins.distill.features import head_of
from specdec_plugins.drafters.blocks.markov import Markov
from specdec_plugins.kv.slab import Slab
from tests.families import VOCABULARY, tiny

HIDDEN, SEEN = 32, 50


def texts():
    """Of ids below `SEEN`, small ones more often; most begin with 7."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.rand((40, 30), generator=generator).square() * SEEN).long()
    drawn[:25, 0] = 7
    return [Text(str(index), tuple(row), 2) for index, row in enumerate(drawn.tolist())]


def fresh(rank, kind="vanilla"):
    """A head before: random numbers, and no bias."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = Markov(VOCABULARY, HIDDEN, rank, kind)
    with torch.no_grad():
        made.markov_w2.weight.zero_()
    return made


def begun(rank, kind="vanilla", family="llama", of=None):
    made, target = fresh(rank, kind), Target(tiny(family), kv=Slab(rows=1, tokens=8))
    bigrams.begin(made, target, head_of(target), texts() if of is None else of)
    return made


def bias(head, tokens):
    with torch.no_grad():
        return head.markov_w2(head.embed(torch.tensor(tokens))).double()


def believed(family, of):
    """The ids seen, how often, and the model's own logits [n, V] behind each, from plain forwards."""
    flat = [token for text in of for token in text.tokens]
    ids = sorted(set(flat))
    with torch.no_grad():
        rows = [tiny(family)(torch.tensor([context])).logits[0, -1] for context in bigrams._contexts(of).tolist()]
    return ids, torch.tensor([flat.count(token) for token in ids]).double(), torch.stack(rows).double()


def centred(logits, counts):
    """Without the mean over tokens that come before, weighted, and without a constant for each."""
    share = (counts / counts.sum()).unsqueeze(1)
    found = logits - (share * logits).sum(0)
    return found - found.mean(1, keepdim=True)


# Catches: a context that ends with another token, or that lacks the usual first token; a token that begins texts read
# behind one that happens to come before it elsewhere.
def test_each_token_is_read_behind_its_usual_neighbour_and_the_texts_usual_beginning():
    of = [Text("a", (9, 1, 2, 1, 2), 1), Text("b", (9, 3, 2, 1, 4), 0), Text("c", (5, 1, 2), 1)]
    assert bigrams._contexts(of).tolist() == [[9, 2, 1], [9, 1, 2], [9, 9, 3], [9, 1, 4], [9, 9, 5], [9, 9, 9]]


# Catches: hidden rows before the final norm or of another place, a head that is transposed or scaled, ids mixed up, a
# batch of rows that is cut. A target with more tokens than are read at once is among them.
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("at_once", [7, 256])
def test_with_all_ranks_two_biases_differ_as_the_targets_logits_do(family, at_once, monkeypatch):
    monkeypatch.setattr(bigrams, "_ROWS", at_once)
    ids, _, logits = believed(family, texts())
    found = bias(begun(HIDDEN, family=family), ids)
    wanted = logits - logits[0]
    differences = found - found[0]
    differences, wanted = (one - one.mean(1, keepdim=True) for one in (differences, wanted))
    assert wanted.std() > 0.5  # there is something to find; how much, the family's random weights decide
    torch.testing.assert_close(differences, wanted, atol=2e-4 * float(wanted.abs().max()), rtol=0)


# Catches: rare tokens that count as much as frequent ones, a decomposition of what is not centred, directions sorted
# the wrong way round.
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_a_small_rank_is_the_best_one_when_tokens_count_as_often_as_they_occur(rank):
    ids, counts, logits = believed("llama", texts())
    whole, weights = centred(logits, counts), (counts / counts.sum()).sqrt().unsqueeze(1)
    left, strength, right = torch.linalg.svd(weights * whole, full_matrices=False)
    best = left[:, :rank] * strength[:rank] @ right[:rank]
    found = weights * bias(begun(rank), ids)
    torch.testing.assert_close(found, best, atol=1e-4 * float(strength[0]), rtol=0)
    plain, values, across = torch.linalg.svd(whole, full_matrices=False)
    unweighted = weights * (plain[:, :rank] * values[:rank] @ across[:rank])
    assert (unweighted - best).abs().max() > 1e-2 * float(best.abs().max())


# Catches: numbers of one matrix much larger than those of the other, for which one learning rate is wrong.
def test_both_matrices_have_numbers_of_one_size():
    head = begun(8)
    ids = sorted({token for text in texts() for token in text.tokens})
    sizes = [weight.square().mean(0) for weight in (head.markov_w1.weight[ids], head.markov_w2.weight)]
    torch.testing.assert_close(*sizes, rtol=1e-3, atol=0)


# Catches: random numbers left to tokens that no text has: they make a bias larger than that of the others, and no step
# ever meets them.
def test_tokens_that_no_text_has_say_nothing():
    seen = {token for text in texts() for token in text.tokens}
    strength = bias(begun(8), list(range(VOCABULARY))).abs().amax(1)
    assert [token for token in range(VOCABULARY) if strength[token]] == sorted(seen)
    assert len(seen) == SEEN


# Catches: a head with a state whose first weights are another kind's.
def test_a_head_of_kind_rnn_stays_as_it_is():
    before, after = fresh(4, "rnn").state_dict(), begun(4, "rnn").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


# Catches: a gate that halves the bias at the start.
def test_behind_a_gate_that_is_half_open_the_bias_is_the_same():
    plain, gated = begun(8), begun(8, "gated")
    with torch.no_grad():
        gated.gate_proj.weight.zero_()
        gated.gate_proj.bias.zero_()
        tokens, hidden = torch.arange(SEEN), torch.randn((SEEN, HIDDEN), generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(gated(tokens, hidden), plain(tokens, hidden))


# Catches: both matrices zero at the ranks that the target has not, where no gradient would ever come; rounding errors
# taken for ranks of its own.
@pytest.mark.parametrize(("seen", "own"), [(SEEN, HIDDEN), (6, 5)])
def test_ranks_beyond_the_targets_own_say_nothing_and_can_learn(seen, own):
    head, before = begun(HIDDEN + 6, of=[Text("a", tuple(range(seen)) * 2, 1)]), fresh(HIDDEN + 6).markov_w1.weight
    assert torch.equal(head.markov_w1.weight[:, own:], before[:, own:])
    assert not head.markov_w2.weight[:, own:].any()
    assert head.markov_w2.weight[:, :own].any(0).all()
    head(torch.arange(seen), torch.zeros((seen, HIDDEN)))[:, 3].sum().backward()
    assert head.markov_w2.weight.grad[3, own:].all()


# Catches: a division by zero where all tokens of the texts are one, which has no deviation from the mean.
def test_one_token_over_and_over_says_nothing():
    head = begun(4, of=[Text("a", (5,) * 6, 1)])
    assert not head.markov_w2.weight.any()
    assert torch.equal(head.markov_w1.weight, fresh(4).markov_w1.weight)


# Catches: the target's cache taken for these forwards while it serves requests.
def test_the_targets_cache_is_left_alone():
    target = Target(tiny("llama"), kv=Slab(rows=1, tokens=8))
    slot = target.kv.acquire()
    before = vars(target).copy()
    bigrams.begin(fresh(4), target, head_of(target), texts())
    assert vars(target) == before
    assert target.kv.lengths[slot] == 0
    assert target.kv.room == 0


@pytest.fixture
def train(tmp_path):
    """Trains for a step so short that weights stay where they began."""
    generator = torch.Generator().manual_seed(0)
    lines = [
        {"id": str(index), "prompt": [1, 2, 3], "tokens": torch.randint(250, (20,), generator=generator).tolist()}
        for index in range(40)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(name, **drafter):
        sizes = {"block_size": 3, "num_hidden_layers": 1, "taps": [0], "markov_rank": 4, "intermediate_size": 32}
        content = {
            "target": {"model": "random:llama", "dtype": "float32"},
            "drafter": sizes | {"mask_token_id": 260} | drafter,
            "data": {"samples": ["samples.jsonl"], "held_out": 0.2},
            "train": {"steps": 1, "confidence_steps": 1, "warm_up": 0, "learning_rate": 1e-30},
            "output_dir": str(tmp_path / name),
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
        CliRunner().invoke(distill, [str(tmp_path / "recipe.yaml"), "--quiet"], catch_exceptions=False)
        found = load_file(tmp_path / name / "drafter" / "model.safetensors")
        return {part: found[f"markov_head.markov_{part}.weight"] for part in ("w1", "w2")}

    return run


# Catches: a run that never gives its head these weights, and a drafter that forgets at the start of another run what
# it had learnt.
def test_a_run_that_begins_anew_has_them_and_one_that_starts_from_a_drafter_has_that_drafters(train, tmp_path):
    first = train("one")
    assert first["w2"].abs().sum() > 0
    file = tmp_path / "one" / "drafter" / "model.safetensors"
    tensors = load_file(file)
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        tensors[name] = tensors[name].roll(1, 0)
    save_file(tensors, file, {"format": "pt"})
    second = train("two", start=str(tmp_path / "one" / "drafter"))
    for part in first:
        torch.testing.assert_close(second[part], first[part].roll(1, 0), atol=1e-20, rtol=0)
