"""Attention without copies of shared heads: the same as the reference, and really without copies."""

import pytest
import torch
from transformers.integrations import sdpa_attention

from specdec import attention
from specdec.attention import NAME, grouped, without_copies
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


# Catches: another implementation that somebody asked for, quietly replaced.
def test_eager_stays_eager():
    target = Target.load("random:llama", kv=Slab(rows=1, tokens=64), attn_implementation="eager")
    with without_copies(target.config):
        assert target.config._attn_implementation == "eager"
