import pytest
import torch

from specdec import layer_search
from specdec.errors import ModelError
from specdec.layer_search import acceptance_lengths, search
from specdec.target import Target
from specdec.types import Request, Sampling
from specdec_plugins.kv.slab import Slab
from tests.families import prompts, tiny

NAN = float("nan")


def model(useless=(), layers=5):
    """A llama whose layers `useless` add nothing to what they are given."""
    made = tiny.__wrapped__("llama", layers=layers)
    with torch.no_grad():
        for layer in useless:
            made.model.layers[layer].self_attn.o_proj.weight.zero_()
            made.model.layers[layer].mlp.down_proj.weight.zero_()
    return made


def requests(temperature=1.0):
    sampling = Sampling(temperature=temperature, max_new_tokens=16)
    return [Request(prompt=ids, sampling=sampling, id=str(index)) for index, ids in enumerate(prompts())]


@pytest.fixture
def costs(monkeypatch):
    """Costs of a step as they are set: one token 10, of that 1.8 a layer, a verification `verify` at any width."""
    told = {"verify": 11.0, "layer": 1.8}
    monkeypatch.setattr(layer_search, "_POSITIONS", 40)
    monkeypatch.setattr(
        layer_search, "_seconds", lambda texts, rows: (10.0, told["layer"], {0: 10.0, 8: told["verify"]})
    )
    return told


def found(useless=(), temperature=1.0):
    return search(Target(model(useless), kv=Slab(rows=2, tokens=64)), requests(temperature))


# Catches: a score that is not the agreement with the target, layers counted from another place, a search that takes a
# useful layer before a useless one.
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_layers_that_do_nothing_are_left_out_first(costs, temperature):
    seen = found(useless=(1, 3), temperature=temperature)
    assert [step[0] for step in seen.path[:2]] == [1, 3]
    assert [step[1] for step in seen.path[:2]] == pytest.approx([1.0, 1.0], abs=1e-4)
    assert {1, 3} <= set(seen.skip)
    assert (seen.layers, seen.skip) == (5, tuple(sorted(seen.skip)))


# Catches: the speed-up not that of the costs, a draft length that is not the best.
def test_the_prediction_is_that_of_costs_and_acceptance(costs):
    seen = found(useless=(1, 3))
    first = seen.path[0][2]
    assert first == pytest.approx(max((size + 1) * 10 / (size * 8.2 + 10 + size / 8) for size in range(1, 9)), abs=1e-3)
    assert seen.speedup == max(step[2] for step in seen.path)


# Catches: a candidate skipped because of what another said once, although it is the better one.
def test_the_first_layer_left_out_is_the_best_of_all(costs):
    target = Target(model(), kv=Slab(rows=2, tokens=64))
    texts = layer_search._write(target, requests())
    kept = [
        layer_search._acceptance(texts, layer_search._without(texts.target, (layer,))).nanmean().item()
        for layer in range(5)
    ]
    assert search(target, requests()).path[0][:2] == (kept.index(max(kept)), pytest.approx(max(kept)))


# Catches: a subset that is recommended though it does not pay.
def test_where_nothing_pays_nothing_is_skipped(costs):
    costs["verify"], costs["layer"] = 90.0, 0.0
    seen = found()
    assert (seen.skip, seen.speedup) == ((), 1.0)
    assert seen.path


# Catches: an order that depends on a set or on chance.
def test_a_second_search_is_the_same(costs):
    assert found(useless=(2,)) == found(useless=(2,))


# Catches: a search that writes into the target's own cache rows or leaves them taken.
def test_the_target_is_as_it_was(costs):
    kept = model()
    before = {name: value.clone() for name, value in kept.state_dict().items()}
    target = Target(kept, kv=Slab(rows=2, tokens=64))
    search(target, requests())
    assert target.kv.room == 2
    assert all(torch.equal(value, before[name]) for name, value in kept.state_dict().items())


# Catches: costs that are not measured (the fixture hides them everywhere else), a layer that costs less than nothing.
def test_costs_are_measured():
    target = Target(model(), kv=Slab(rows=2, tokens=64))
    one, layer, verify = layer_search._seconds(layer_search._write(target, requests()), rows=2)
    assert 0 <= layer * 5 <= one * 2
    assert one == verify[0] > 0
    assert set(verify) == {0, 1, 2, 4, 8}


# Catches: a model of one layer, which cannot miss it, searched to no end.
def test_a_single_layer_stays(costs):
    seen = search(Target(model(layers=1), kv=Slab(rows=1, tokens=64)), requests())
    assert (seen.skip, seen.path) == ((), ())


# Catches: tied layers found only by a crash.
def test_layers_that_cannot_be_left_out_are_a_refusal(costs):
    tied = model()
    tied.config.num_kv_shared_layers = 2
    with pytest.raises(ModelError, match="num_kv_shared_layers"):
        search(Target(tied, kv=Slab(rows=1, tokens=64)), requests())


# Catches: places beyond a text's end counted as kept or as rejected, products over two texts.
def test_acceptance_lengths_are_means_over_stretches():
    places = torch.tensor([[1.0, 0.5, 0.0], [0.5, NAN, NAN]])
    one = (1 + 0.5 + 0 + 0.5) / 4
    two = (0.5 + 0.0) / 2
    assert acceptance_lengths(places, 3) == pytest.approx([1 + one, 1 + one + two, 1 + one + two + 0.0])
    assert acceptance_lengths(torch.tensor([[0.5]]), 3) == pytest.approx([1.5, 1.75, 1.875])
