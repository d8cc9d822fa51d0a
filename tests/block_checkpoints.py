"""Tiny checkpoints of block drafters in exactly the published forms: keys and tensor names are written out here, and
the writer uses nothing of the loader. Below, the same drafters in memory for tiny targets."""

import functools
import json

import torch
from safetensors.torch import save_file

from specdec_plugins.drafters.blocks.checkpoint import BlockModel
from specdec_plugins.drafters.blocks.config import read
from specdec_plugins.drafters.dflash import DFlash
from specdec_plugins.drafters.dspark import DSpark
from tests.families import tiny

HIDDEN, INNER, HEADS, SHARED, SIZE, VOCABULARY, RANK = 32, 48, 4, 2, 8, 80, 6
LAYERS, TARGET_LAYERS, TAPS, BLOCK = 2, 4, (0, 2), 5

# A Qwen3 config as transformers 5 saves it.
QWEN3 = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "dtype": "float32", "eos_token_id": None,
    "head_dim": SIZE, "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02,
    "intermediate_size": INNER, "layer_types": ["full_attention"] * LAYERS, "max_position_embeddings": 128,
    "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
    "num_key_value_heads": SHARED, "pad_token_id": None, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "sliding_window": None,
    "tie_word_embeddings": False, "transformers_version": "5.10.2", "use_cache": True, "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}  # fmt: skip


def deepspec(kind="vanilla", **changes):
    """deepseek-ai/dspark_qwen3_*_block7, and with `kind` None dflash_qwen3_*_block7."""
    heads = {
        "markov_rank": RANK, "markov_head_type": kind, "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    } if kind else {"markov_rank": 0, "enable_confidence_head": False}  # fmt: skip
    return {
        **QWEN3, "architectures": ["Qwen3DSparkModel"], "num_target_layers": TARGET_LAYERS, "block_size": BLOCK,
        "mask_token_id": 79, "target_layer_ids": list(TAPS), "num_anchors": 512, **heads, **changes,
    }  # fmt: skip


def z_lab(*, inside=False, **changes):
    """z-lab/Qwen3-4B-DFlash-b16, and with `inside` the newer ones, whose block size stands in dflash_config."""
    own = {"mask_token_id": 79, "target_layer_ids": list(TAPS)}
    found = {
        **QWEN3, "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "num_target_layers": TARGET_LAYERS, "dflash_config": own, "tie_word_embeddings": True,
    }  # fmt: skip
    # transformers 4 wrote rope_theta and rope_scaling
    del found["rope_parameters"]
    found |= {"rope_theta": 1000000, "rope_scaling": None, "torch_dtype": "float32"}
    (own if inside else found)["block_size"] = BLOCK
    return {**found, **changes}


def speculators(kind="dspark", **changes):
    """A config of the speculators package; ids of layers are indices of hidden_states."""
    heads = {
        "markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    } if kind == "dspark" else {}  # fmt: skip
    return {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS], "block_size": BLOCK, "draft_vocab_size": VOCABULARY,
        "dtype": "float32", "mask_token_id": 79, "sample_from_anchor": kind == "dspark",
        "sliding_window_non_causal": False, "speculators_config": {"algorithm": kind, "verifier": {}},
        "speculators_model_type": kind, "speculators_version": "0.6.0", "tie_word_embeddings": False,
        "transformer_layer_config": QWEN3, "transformers_version": "5.10.2", **heads, **changes,
    }  # fmt: skip


DIALECTS = {
    "dspark": deepspec,
    "gated": lambda: deepspec("gated"),
    "rnn": lambda: deepspec("rnn"),
    "dflash of DeepSpec": lambda: deepspec(None),
    "z-lab": z_lab,
    "z-lab inside": lambda: z_lab(inside=True),
    "speculators dspark": speculators,
    "speculators dflash": lambda: speculators("dflash"),
}


def shapes(config):
    """Name and shape of every tensor, embedding and head of the target left out."""
    sizes, own = config.get("transformer_layer_config", config), config.get("dflash_config", {})
    taps = config.get("target_layer_ids") or own.get("target_layer_ids") or config.get("aux_hidden_state_layer_ids")
    wide, vocabulary, inner = sizes["hidden_size"], sizes["vocab_size"], sizes["intermediate_size"]
    found = {"fc.weight": (wide, len(taps or TAPS) * wide), "hidden_norm.weight": (wide,), "norm.weight": (wide,)}
    for layer in range(LAYERS):
        for name, shape in {
            "input_layernorm": (wide,),
            "post_attention_layernorm": (wide,),
            "self_attn.q_proj": (HEADS * SIZE, wide),
            "self_attn.k_proj": (SHARED * SIZE, wide),
            "self_attn.v_proj": (SHARED * SIZE, wide),
            "self_attn.o_proj": (wide, HEADS * SIZE),
            "self_attn.q_norm": (SIZE,),
            "self_attn.k_norm": (SIZE,),
            "mlp.gate_proj": (inner, wide),
            "mlp.up_proj": (inner, wide),
            "mlp.down_proj": (wide, inner),
        }.items():
            found[f"layers.{layer}.{name}.weight"] = shape
    if config.get("markov_rank"):
        found |= {f"markov_head.markov_w{number}.weight": (vocabulary, RANK) for number in (1, 2)}
    if config.get("markov_head_type") == "gated":
        found |= {"markov_head.gate_proj.weight": (RANK, wide + RANK), "markov_head.gate_proj.bias": (RANK,)}
    if config.get("markov_head_type") == "rnn":
        found |= {"markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + wide)}
        found |= {"markov_head.joint_proj.bias": (3 * RANK,)}
    if config.get("enable_confidence_head"):
        seen = wide + (RANK if config["confidence_head_with_markov"] else 0)
        found |= {"confidence_head.proj.weight": (1, seen), "confidence_head.proj.bias": (1,)}
    return found


@functools.cache
def _random(shape, seed):
    """Of a size that lets context decide what is drafted."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return 1.0 + drawn / 4 if len(shape) == 1 else drawn * (2.0 / shape[-1] ** 0.5)


def weights(config, seed=0):
    return {name: _random(shape, 1000 * seed + index) for index, (name, shape) in enumerate(shapes(config).items())}


def of_target(model):
    """The frozen copies that DeepSpec's checkpoints bring."""
    head = model.get_output_embeddings().weight.detach()
    return {"embed_tokens.weight": model.get_input_embeddings().weight.detach().clone(), "lm_head.weight": head.clone()}


def write(folder, config, tensors=None, *, shards=1):
    """A checkpoint as save_pretrained leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = weights(config) if tensors is None else tensors
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    names, placed = sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, {"format": "pt"})
        placed |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


@functools.cache
def networks(name, family="llama", layers=None, block=7, dtype=torch.float32, **changes):
    """A drafter of a dialect for `tiny(family, layers=layers)` that drafts `block` tokens. Tests must not change it."""
    layers = layers or tiny(family).config.num_hidden_layers
    taps = list(range(layers - 1))[-2:]
    config = DIALECTS[name]() | {"num_target_layers": layers}
    if name.startswith("z-lab"):
        config |= {"block_size": block + 1, "dflash_config": {"mask_token_id": 79, "target_layer_ids": taps}}
    else:
        config |= {"block_size": block, "target_layer_ids": taps}
    config |= changes
    made = BlockModel.empty(read(config, "config.json"))
    drawn = weights(config)
    with torch.no_grad():
        for key, value in made.tensors().items():
            value.copy_(drawn[key])
    for _, part in made.parts:
        part.requires_grad_(False).to(dtype)
    return made


def drafter(name, k=None, family="llama", *, layers=None, block=7, **options):
    """One that drafts for `tiny(family, layers=layers)`."""
    kind = DFlash if name.startswith("z-lab") else DSpark
    given = {} if k is None else {"num_speculative_tokens": k}
    return kind(**{"model": networks(name, family, layers, block), **given, **options})
