"""Block drafters a second time: straight lines from the equations, one row, no cache, float64 in between."""

import torch


def rms(values, weight, eps):
    return values / (values.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(heads, positions, theta):
    """[T, heads, dim]: each pair (i, i + dim/2) is a complex number, turned by position * theta^(-2i/dim)."""
    half = heads.shape[-1] // 2
    angles = positions.double()[:, None] * theta ** (-torch.arange(half).double() * 2 / heads.shape[-1])
    found = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([found.real, found.imag], -1)


def backbone(weights, shape, features, embedded, seen=None):
    """Normed rows [T, H] of a block behind [L, taps * H] features of everything committed.

    `seen` [layers] -> bool [T, L + T], where not every row sees everything.
    """
    w = {name: value.double() for name, value in weights.items()}
    eps, theta, size = shape.rms_norm_eps, shape.rope_theta, shape.head_dim
    length, width = features.shape[0], embedded.shape[0]
    positions = torch.arange(length + width)
    g = rms(features.double() @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    h = embedded.double()
    for layer in range(shape.num_hidden_layers):
        at = {name.removeprefix(f"layers.{layer}."): value for name, value in w.items() if f"layers.{layer}." in name}
        x = rms(h, at["input_layernorm.weight"], eps)
        both = torch.cat([g, x])
        q = (x @ at["self_attn.q_proj.weight"].T).unflatten(-1, (-1, size))
        k = (both @ at["self_attn.k_proj.weight"].T).unflatten(-1, (-1, size))
        v = (both @ at["self_attn.v_proj.weight"].T).unflatten(-1, (-1, size))
        q = turned(rms(q, at["self_attn.q_norm.weight"], eps), positions[length:], theta)
        k = turned(rms(k, at["self_attn.k_norm.weight"], eps), positions, theta)
        group = q.shape[1] // k.shape[1]
        heads = []
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T / size**0.5
            if seen is not None:
                scores = scores.masked_fill(~seen[layer], -torch.inf)
            heads.append(scores.softmax(-1) @ v[:, head // group])
        h = h + torch.cat(heads, -1) @ at["self_attn.o_proj.weight"].T
        x = rms(h, at["post_attention_layernorm.weight"], eps)
        gate = x @ at["mlp.gate_proj.weight"].T
        h = h + (gate * gate.sigmoid() * (x @ at["mlp.up_proj.weight"].T)) @ at["mlp.down_proj.weight"].T
    return rms(h, w["norm.weight"], eps)


def walk(weights, kind, rows, anchor, choose):
    """Biases [K, V] of a walk over rows [K, H] from the anchor; `choose(k, bias)` says which token follows."""
    w = {name: value.double() for name, value in weights.items()}
    rank = w["markov_w1.weight"].shape[1]
    state, previous, biases = torch.zeros(rank, dtype=torch.float64), anchor, []
    for k, h in enumerate(rows.double()):
        e = w["markov_w1.weight"][previous]
        inner = e
        if kind == "gated":
            inner = (w["gate_proj.weight"] @ torch.cat([h, e]) + w["gate_proj.bias"]).sigmoid() * e
        if kind == "rnn":
            z = w["joint_proj.weight"] @ torch.cat([state, e, h]) + w["joint_proj.bias"]
            g, c, o = z[:rank].sigmoid(), z[rank : 2 * rank].tanh(), z[2 * rank :].tanh()
            state, inner = g * state + (1 - g) * c, o
        biases.append(w["markov_w2.weight"] @ inner)
        previous = choose(k, biases[-1])
    return torch.stack(biases)
