"""Prepared linear layers: the same model, the same names and numbers, no more memory than it says."""

import copy
import gc
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from specdec import packing
from specdec.environment import weights_hash
from specdec.loading import load
from specdec.packing import PackedLinear, pack
from specdec.target import Target
from specdec_plugins.kv.slab import Slab

DTYPES = [torch.float32, torch.bfloat16]


def model(dtype, tied=True):
    config = Qwen2Config(
        vocab_size=400,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def able(dtype):
    if not packing._exact(dtype):
        pytest.skip(f"this processor or this torch prepares no layer of {dtype}")


# Catches: a bias that is lost, columns that come back in another order, a layer that only works for the number of
# columns it was prepared for, products that are accumulated in a narrower dtype than the plain call's.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 7), (2, 40), (1, 300)])
def test_a_prepared_layer_is_the_plain_one_up_to_rounding(dtype, shape):
    able(dtype)
    torch.manual_seed(1)
    plain = nn.Linear(320, 272, dtype=dtype)
    columns = torch.randn((*shape, 320)).to(dtype)
    with torch.inference_mode():
        exact = nn.functional.linear(columns.double(), plain.weight.double(), plain.bias.double())
        found, usual = PackedLinear(plain)(columns), plain(columns)
    assert found.dtype == dtype
    assert found.shape == usual.shape
    off, least = (found.double() - exact).abs().max(), (usual.double() - exact).abs().max()
    assert off <= 2 * least + 2 * torch.finfo(torch.float32).eps * exact.abs().max()


# Catches: the first of several columns given for all of them, a single column whose shape is lost.
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_layer_is_the_plain_one_for_one_column_and_for_more(dtype):
    able(dtype)
    torch.manual_seed(2)
    plain = nn.Linear(1024, 1030, dtype=dtype)
    assert plain.weight.numel() >= packing._LARGE
    prepared = PackedLinear(plain)
    for shape in [(1, 1), (1,), (), (2, 1), (1, 3)]:
        columns = torch.randn((*shape, 1024)).to(dtype)
        with torch.inference_mode():
            wanted, found = plain(columns), prepared(columns)
        assert found.shape == wanted.shape
        torch.testing.assert_close(
            found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-2 if dtype == torch.bfloat16 else 1e-5
        )


# Catches: layers that were left out, a model whose logits change, a prepared layer of another one's weight.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_prepared_model_says_what_the_plain_one_says(dtype, tied):
    able(dtype)
    plain = model(dtype, tied)
    prepared = copy.deepcopy(plain)
    # Of each layer all but k and v, which are small, and the head.
    assert pack(prepared) == 2 * 5 + 1
    ids = torch.arange(2 * 9).reshape(2, 9)
    with torch.inference_mode():
        wanted, found = plain(ids).logits.double(), prepared(ids).logits.double()
    assert (wanted - found).abs().max() <= 40 * torch.finfo(dtype).eps * wanted.abs().max()
    assert pack(prepared) == 0  # nothing is prepared twice


# Catches: plain weights that stay beside the prepared ones, a tied embedding that is copied as well.
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_grows_by_the_head_that_was_tied_and_by_nothing_else(dtype):
    able(dtype)
    tied, untied = model(dtype), model(dtype, tied=False)

    def total(module):
        return sum(parameter.numel() for parameter in module.parameters())

    before, single = total(tied), total(untied)
    embeddings = tied.get_input_embeddings().weight
    pack(tied)
    pack(untied)
    assert total(tied) - before == 400 * 256
    assert total(untied) == single
    assert tied.get_input_embeddings().weight is embeddings
    plain = [name for name, module in untied.named_modules() if type(module) is nn.Linear]
    assert all(name.endswith(("k_proj", "v_proj")) for name in plain)


# Catches: a model that has more parameters because its tied head is kept in two layouts, or fewer where none is tied.
@pytest.mark.parametrize("tied", [True, False])
def test_a_prepared_model_has_as_many_parameters_as_a_plain_one(tied):
    able(torch.float32)
    plain = model(torch.float32, tied)
    before = Target(plain, kv=Slab(rows=1, tokens=8)).parameters
    assert before == sum(parameter.numel() for parameter in plain.parameters())
    pack(plain)
    assert Target(plain, kv=Slab(rows=1, tokens=8)).parameters == before


# Catches: a checkpoint that is taken for another one because its layout changed.
@pytest.mark.parametrize("dtype", DTYPES)
def test_prepared_weights_have_the_hash_of_plain_ones(dtype):
    able(dtype)
    plain = model(dtype)
    before = weights_hash(plain)
    pack(plain)
    assert weights_hash(plain) == before


# Catches: preparing what torch cannot multiply in this dtype, and an error in place of a plain layer.
def test_what_cannot_be_prepared_stays_plain(monkeypatch):
    assert pack(model(torch.float64)) == 0
    monkeypatch.setattr(packing, "_tried", {})
    monkeypatch.setattr(packing, "_ops", object())
    assert pack(model(torch.float32)) == 0


# Catches: a route that is off by more than rounding and used all the same.
def test_a_route_that_computes_something_else_is_not_taken(monkeypatch):
    able(torch.float32)

    class Wrong:
        _reorder_linear_weight = staticmethod(torch.ops.mkldnn._reorder_linear_weight)

        @staticmethod
        def _linear_pointwise(*given):
            return torch.ops.mkldnn._linear_pointwise(*given).bfloat16().float()

    monkeypatch.setattr(packing, "_tried", {})
    monkeypatch.setattr(packing, "_ops", Wrong)
    assert pack(model(torch.float32)) == 0


# Catches: hooks, another forward or a quantized weight that a prepared layer would lose in silence, or trip over.
def test_layers_that_somebody_changed_stay_plain():
    able(torch.float32)

    class Quantized(torch.Tensor):
        pass

    changed = nn.ModuleList(nn.Linear(320, 272) for _ in range(5))
    seen = []
    changed[0].register_forward_hook(lambda *_: seen.append("after"))
    changed[1].register_forward_pre_hook(lambda *_: seen.append("before"))
    changed[2].forward = lambda columns: seen.append("instead")
    changed[3].weight = nn.Parameter(changed[3].weight.detach().as_subclass(Quantized))
    assert pack(changed) == 1
    assert isinstance(changed[4], PackedLinear)
    for layer in changed[:3]:
        layer(torch.ones(320))
    assert seen == ["after", "before", "instead"]


# Catches: two columns' worth of numbers taken for two columns, where a plain layer refuses the width.
def test_columns_of_another_width_are_refused():
    able(torch.float32)
    with pytest.raises(RuntimeError):
        PackedLinear(nn.Linear(1024, 1030))(torch.ones(1, 2048))


# Catches: an error that says nothing of prepared layers where somebody copies, moves, converts or saves a model.
@pytest.mark.parametrize(
    "what", [copy.deepcopy, pickle.dumps, lambda one: one.to(torch.float64), lambda one: one.half()]
)
def test_what_a_prepared_model_cannot_do_says_how_it_can_be_done(what):
    able(torch.float32)
    prepared = model(torch.float32)
    pack(prepared)
    with pytest.raises(RuntimeError, match="packed: false"):
        what(prepared)
    assert prepared.to("cpu").eval() is prepared


# Catches: a user's random numbers that depend on whether something was prepared.
def test_preparing_draws_no_random_numbers(monkeypatch):
    monkeypatch.setattr(packing, "_tried", {})
    before = torch.get_rng_state()
    packing._exact(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


# Catches: an option that is read and dropped.
def test_loading_prepares_unless_told_not_to(tmp_path):
    able(torch.float32)
    model(torch.float32).save_pretrained(tmp_path)

    def kinds(**options):
        return {type(module) for module in load(str(tmp_path), **options)[0].modules()}

    assert PackedLinear in kinds()
    assert PackedLinear not in kinds(packed=False)


# Catches: plain weights that stay mapped, and in memory, because an embedding is a view of the same file.
def test_a_checkpoint_is_let_go_once_its_layers_are_prepared(tmp_path):
    able(torch.float32)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not list what a process has mapped")
    model(torch.float32).save_pretrained(tmp_path)
    prepared, _ = load(str(tmp_path))
    gc.collect()
    assert str(tmp_path) not in maps.read_text()
    assert prepared(torch.tensor([[1, 2]])).logits.isfinite().all()
