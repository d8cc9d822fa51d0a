"""Attention without copies of shared heads: the same as the reference, and really without copies."""

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM
from transformers.integrations import sdpa_attention

from specdec import attention
from specdec.attention import NAME, grouped, without_copies
from specdec.preflight import preflight
from specdec.target import Target
from specdec.types import Span
from specdec_plugins.kv.slab import Slab


class Module(torch.nn.Module):
    """What transformers' sdpa asks of an attention layer."""

    def __init__(self, shared):
        super().__init__()
        self.num_key_value_groups = shared
        self.is_causal = True


def case(batch, heads, shared, width, length, size=16, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    query = normal(batch, width, heads * shared, size).transpose(1, 2)  # as models make them: not contiguous
    key, value = normal(batch, heads, length, size), normal(batch, heads, length, size)
    mask = torch.rand((batch, 1, width, length), generator=generator) < 0.6
    mask[..., 0] = True
    return Module(shared), query, key, value, mask


# Catches: query heads that meet the keys of another group, a mask that moves between heads or rows, an output whose
# heads and columns are mixed up, a scale that is not the asked one.
@pytest.mark.parametrize("width", [1, 2, 5, 16, 17])
@pytest.mark.parametrize(("heads", "shared"), [(1, 6), (2, 3), (3, 1), (4, 2)])
@pytest.mark.parametrize("batch", [1, 3])
def test_it_is_the_reference(batch, heads, shared, width):
    given = case(batch, heads, shared, width, 23)
    for scaling in (None, 0.37):
        wanted, _ = sdpa_attention.sdpa_attention_forward(*given, scaling=scaling, sliding_window=7)
        found, weights = grouped(*given, scaling=scaling, sliding_window=7)
        assert weights is None
        assert found.shape == wanted.shape
        assert found.is_contiguous()
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


# Catches: an argument that changes the result and is dropped.
def test_what_it_does_not_know_goes_to_the_reference(monkeypatch):
    given = case(2, 2, 3, 4, 9)
    bias = torch.randn((2, 6, 4, 9), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted, _ = sdpa_attention.sdpa_attention_forward(*given, position_bias=bias)
    assert torch.equal(grouped(*given, position_bias=bias)[0], wanted)
    per_head = given[-1].expand(-1, 6, -1, -1)
    wanted, _ = sdpa_attention.sdpa_attention_forward(*given[:-1], per_head)
    assert torch.equal(grouped(*given[:-1], per_head)[0], wanted)
    asked = []
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *_, **others: asked.append(others))
    grouped(*given, softcap=30.0)
    assert asked == [{"scaling": None, "softcap": 30.0}]


# Catches: a target that attends by copies after all, a model that is left with another implementation than its own.
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_a_target_makes_no_copies_and_leaves_its_model_alone(family, monkeypatch):
    target = Target.load(f"random:{family}", kv=Slab(rows=2, tokens=64), attn_implementation="sdpa")
    config = target.config
    assert config.num_key_value_heads < config.num_attention_heads
    seen = []

    def copies(*_):
        raise AssertionError("keys were copied")

    monkeypatch.setattr(sdpa_attention, "repeat_kv", copies)
    handle = target.model.register_forward_pre_hook(lambda *_: seen.append(config._attn_implementation))
    slots = (target.kv.acquire(), target.kv.acquire())
    target.forward(slots, Span(torch.tensor([[1, 2, 3], [4, 5, 6]]), (3, 3)))
    handle.remove()
    assert seen == [NAME]
    assert config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError), without_copies(config):
        raise RuntimeError
    assert config._attn_implementation == "sdpa"


# Catches: a mask that is taken for an earlier one of the same forward, which is gone and had its place in memory.
def test_a_mask_is_never_taken_for_one_that_is_gone():
    module, *given, _ = case(1, 2, 3, 4, 9)
    with without_copies(Target.load("random:llama", kv=Slab(rows=1, tokens=64), attn_implementation="sdpa").config):
        for length in range(1, 9):
            mask = (torch.arange(9) < length).expand(1, 1, 4, 9)
            wanted, _ = sdpa_attention.sdpa_attention_forward(module, *given, mask)
            torch.testing.assert_close(grouped(module, *given, mask)[0], wanted, rtol=1e-12, atol=1e-12)
            del mask


# Catches: a mask that another thread's forward forgets while it is made.
def test_another_thread_may_end_its_forward_meanwhile(monkeypatch):
    class Mask:
        def repeat(self, *_):
            attention._masks = None
            return "for all heads"

    monkeypatch.setattr(attention, "_masks", {})
    assert attention._repeated(Mask(), 3) == "for all heads"


# Catches: a model that is refused because another thread runs it just now.
def test_a_model_that_runs_elsewhere_makes_a_target():
    model = Target.load("random:llama", kv=Slab(rows=1, tokens=64), attn_implementation="sdpa").model
    with without_copies(model.config):
        assert Target(model, kv=Slab(rows=1, tokens=64)).config is model.config


# Catches: a model without a mask in a thread of the user's own, while a target runs it in another.
def test_a_model_masks_its_padding_while_a_target_runs_it():
    target = Target.load("random:llama", kv=Slab(rows=1, tokens=64), attn_implementation="sdpa")
    given = {"input_ids": torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])}
    given["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with torch.inference_mode():
        wanted = target.model(**given).logits
        with without_copies(target.config):
            found = target.model(**given).logits
    torch.testing.assert_close(found[:, 2:], wanted[:, 2:])


# Catches: layers that look for the name sdpa, do not find it and add a mask of truth values to their scores.
def test_layers_that_ask_for_sdpa_by_name_find_it():
    options = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 272}
    config = FalconConfig(alibi=False, bos_token_id=None, eos_token_id=None, **options)
    target = Target(
        FalconForCausalLM._from_config(config, attn_implementation="sdpa").eval(), kv=Slab(rows=2, tokens=64)
    )
    preflight(target)
    assert not attention.asks_by_name(Target.load("random:llama", kv=Slab(rows=1, tokens=64)).model)


# Catches: another implementation that somebody asked for, quietly replaced.
def test_eager_stays_eager():
    target = Target.load("random:llama", kv=Slab(rows=1, tokens=64), attn_implementation="eager")
    with without_copies(target.config):
        assert target.config._attn_implementation == "eager"
