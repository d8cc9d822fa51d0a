"""Tiny random models of the families the target must decode, made from configs in milliseconds."""

import functools

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 80
NAMED_IDS = 64  # ids a tokenizer would name: the rest is padding, as in Qwen2
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt2")

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_CONFIGS = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 8,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt2": ("gpt2", {}),
}


@functools.cache
def tiny(family, seed=0, dtype=torch.float32, attention="sdpa", positions=96, layers=None):
    """A model in evaluation mode whose argmax margins are wide. Tests must not change it.

    With `layers`, that many; where a family has several kinds of layers, they go on in turn.
    """
    kind, options = _CONFIGS[family]
    common = {**_COMMON, "max_position_embeddings": positions}
    if layers is not None:
        common["num_hidden_layers"] = layers
        options = {key: value for key, value in options.items() if key != "num_hidden_layers"}
        if kinds := options.get("layer_types"):
            options["layer_types"] = [kinds[layer % len(kinds)] for layer in range(layers)]
    if kind == "gpt2":
        names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        common = {names.get(key, key): value for key, value in common.items()}
        common["n_positions"] = common.pop("max_position_embeddings")
        for unknown in ("intermediate_size", "num_key_value_heads", "head_dim"):
            common.pop(unknown)
    config = CONFIG_MAPPING[kind](**{**common, **options})
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        # Weights of 0.02 barely move the residual stream: scale them so that context decides what comes next.
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(16.0 if "lm_head" in name or "wpe" in name else 8.0)
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()


@functools.cache
def prompts(seed=0, lengths=(1, 20, 7, 13)):
    """A ragged batch of prompts."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(tuple(torch.randint(0, NAMED_IDS, (n,), generator=generator).tolist()) for n in lengths)


@functools.cache
def greedy(family, new_tokens=24, seed=0, dtype=torch.float32, attention="sdpa", layers=None):
    """What transformers' own generate gives for each prompt, alone."""
    model = tiny(family, seed, dtype, attention, layers=layers)
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
        )
        outputs.append(tuple(out[0, len(prompt) :].tolist()))
    return tuple(outputs)
