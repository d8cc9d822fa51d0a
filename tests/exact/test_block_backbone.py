"""The network of block drafters against its equations, written a second time."""

import pytest
import torch

from specdec_plugins.drafters.blocks.backbone import Backbone, Shape
from specdec_plugins.drafters.blocks.markov import KINDS, Confidence, Markov
from specdec_plugins.kv.slab import Slab
from tests import block_equations

SHAPE = Shape(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    num_taps=2,
    windows=(None, None, None),
)
WIDTH = 5
TOLERANCE = 1e-5


def shaken(module, seed=0):
    """Every parameter random, norms included: with weights of one a norm in the wrong place would pass."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / max(parameter.shape[-1], 1) ** 0.5)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    return module.eval()


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def everything(starts, width, end):
    cells = torch.arange(end)
    return (cells < torch.tensor(starts)[:, None] + width)[:, None, None].expand(-1, 1, width, -1)


# Catches: keys of committed tokens without their norm or at the block's positions, block rows that look only backward,
# queries from g, a final norm left out, rows of one batch mixed up where they have taken different numbers of tokens.
@torch.inference_mode()
def test_three_rounds_of_uneven_length_are_the_equations_over_all_that_was_committed():
    net = shaken(Backbone(SHAPE))
    kv = Slab(rows=4, tokens=40)
    slots = (1, 3)
    known = [drawn(0, 48), drawn(0, 48)]
    for slot in slots:
        kv.occupy(slot)
    for turn, counts in enumerate([(9, 4), (1, 3), (5, 2)]):
        width = max(counts)
        new = [drawn(count, 48, seed=10 * turn + row) for row, count in enumerate(counts)]
        padded = torch.stack([torch.cat([part, torch.full((width - len(part), 48), 7.0)]) for part in new])
        starts = torch.tensor([kv.lengths[slot] for slot in slots])
        net.write(net.context(padded), starts[:, None] + torch.arange(width), kv.stage(slots, counts, width))
        kv.commit(slots, torch.arange(width).expand(2, -1), counts, chain=True)
        known = [torch.cat([old, part]) for old, part in zip(known, new, strict=True)]

        starts = [kv.lengths[slot] for slot in slots]
        embedded = drawn(2, WIDTH, 24, seed=100 + turn)
        cache = kv.stage(slots, (WIDTH, WIDTH), WIDTH)
        positions = torch.tensor(starts)[:, None] + torch.arange(WIDTH)
        rows = net(embedded, positions, cache, everything(starts, WIDTH, cache.where.end))
        for row in range(2):
            wanted = block_equations.backbone(net.state_dict(), SHAPE, known[row], embedded[row])
            torch.testing.assert_close(rows[row].double(), wanted, atol=TOLERANCE, rtol=0)


# Catches: the state of a walk that is not carried, a gate on the wrong side, parts of a projection in another order.
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_walk_is_the_equations_step_by_step_and_all_at_once(kind):
    head = shaken(Markov(17, 6, 4, kind))
    rows, tokens = drawn(2, WIDTH, 6), torch.tensor([[3, 5, 5, 0, 16], [9, 1, 2, 3, 4]])
    together = head(tokens, rows)
    state = None
    for place in range(WIDTH):
        bias, state = head.step(tokens[:, place], rows[:, place], state)
        torch.testing.assert_close(bias, together[:, place], atol=1e-6, rtol=0)
    for row in range(2):
        following = [*tokens[row, 1:].tolist(), 0]
        wanted = block_equations.walk(
            head.state_dict(), kind, rows[row], int(tokens[row, 0]), lambda k, _, after=following: after[k]
        )
        torch.testing.assert_close(together[row].double(), wanted, atol=TOLERANCE, rtol=0)


# Catches: a guess that is computed in bfloat16, or a head without the token before that wants one.
@pytest.mark.parametrize("rank", [0, 4])
@torch.inference_mode()
def test_confidence_is_a_linear_form_in_float32(rank):
    head = shaken(Confidence(6, rank)).to(torch.bfloat16)
    rows, before = drawn(3, 6).bfloat16(), drawn(3, rank, seed=1).bfloat16() if rank else None
    seen = torch.cat([rows, before], -1) if rank else rows
    wanted = seen.double() @ head.proj.weight.double().T + head.proj.bias.double()
    found = head(rows, before)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted.squeeze(-1), atol=1e-6, rtol=0)


# Catches: a name that differs from the published ones, which a strict loader would only report as missing.
def test_parameters_are_named_as_published():
    layer = [
        *(f"self_attn.{name}_proj" for name in "qkvo"), "self_attn.q_norm", "self_attn.k_norm", "input_layernorm",
        "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    ]  # fmt: skip
    names = {f"layers.{index}.{name}.weight" for index in range(3) for name in layer}
    assert set(Backbone(SHAPE).state_dict()) == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    plain = {"markov_w1.weight", "markov_w2.weight"}
    extra = {
        "vanilla": set(),
        "gated": {"gate_proj.weight", "gate_proj.bias"},
        "rnn": {"joint_proj.weight", "joint_proj.bias"},
    }
    assert {kind: set(Markov(17, 6, 4, kind).state_dict()) for kind in KINDS} == {
        kind: plain | extra[kind] for kind in KINDS
    }
    assert set(Confidence(6, 4).state_dict()) == {"proj.weight", "proj.bias"}
