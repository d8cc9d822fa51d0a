"""Checkpoints of block drafters: every published form is read, and everything unexpected is one sentence."""

import re
from pathlib import Path

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from specdec.errors import ModelError
from specdec_plugins.drafters.blocks import checkpoint
from specdec_plugins.drafters.blocks.config import read
from tests.block_checkpoints import (
    BLOCK,
    DIALECTS,
    HIDDEN,
    QWEN3,
    TAPS,
    VOCABULARY,
    deepspec,
    shapes,
    speculators,
    weights,
    write,
    z_lab,
)

DOCS = (Path(__file__).parents[2] / "docs" / "block-drafters.md").read_text(encoding="utf-8")
ANCHORED = {"dspark", "gated", "rnn", "dflash of DeepSpec", "speculators dspark"}


# Catches: a form whose ids are read as another's, a block size that is looked for in one place only.
@pytest.mark.parametrize("name", DIALECTS)
def test_every_published_form_is_read_whole(name, tmp_path):
    config = DIALECTS[name]()
    model = checkpoint.load(write(tmp_path, config))
    found = model.config
    assert found.taps == TAPS
    assert (found.block_size, found.mask_token, found.vocabulary) == (BLOCK, 79, VOCABULARY)
    assert found.most == (BLOCK if name in ANCHORED else BLOCK - 1)
    assert found.shape.rope_theta == 1e6
    assert {name: value.tolist() for name, value in model.tensors().items()} == {
        name: value.tolist() for name, value in weights(config).items()
    }


# Catches: what `distill` writes and nobody can load, or that is another drafter when it is read again.
@pytest.mark.parametrize("name", sorted(ANCHORED))
def test_what_is_written_is_read_again(name, tmp_path):
    model = checkpoint.load(write(tmp_path / "a", DIALECTS[name]()))
    checkpoint.save(tmp_path / "b", model)
    again = checkpoint.load(tmp_path / "b")
    assert again.tensors().keys() == model.tensors().keys()
    assert all(torch.equal(value, again.tensors()[key]) for key, value in model.tensors().items())
    assert again.config == evolve(model.config, dialect="deepspec")


# Catches: a drafter that a kill cuts off while it is written, so that the training which wrote it cannot go on.
def test_files_that_are_there_stay_until_the_new_ones_are_whole(tmp_path, monkeypatch):
    def killed(file, content):
        with file.open("wb") as half:
            half.write(content[: len(content) // 2])
        raise KeyboardInterrupt

    model = checkpoint.load(write(tmp_path / "a", deepspec()))
    checkpoint.save(tmp_path / "b", model)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path / "b", model)
    again = checkpoint.load(tmp_path / "b").tensors()
    assert all(torch.equal(value, again[key]) for key, value in model.tensors().items())
    with monkeypatch.context() as patch:
        write_all = Path.write_bytes
        patch.setattr(
            Path, "write_bytes", lambda file, text: (killed if "json" in file.name else write_all)(file, text)
        )
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path / "b", model)
    assert checkpoint.describe(tmp_path / "b") == model.config
    checkpoint.save(tmp_path / "b", model)
    assert sorted(file.name for file in (tmp_path / "b").iterdir()) == ["config.json", "model.safetensors"]


# Catches: weights in several files, of which only the first is looked at.
def test_sharded_weights_are_the_same_drafter(tmp_path):
    one = checkpoint.load(write(tmp_path / "a", deepspec())).tensors()
    many = checkpoint.load(write(tmp_path / "b", deepspec(), shards=3)).tensors()
    assert all(torch.equal(value, many[name]) for name, value in one.items())


# Catches: a table of tensors in the docs that drifted from what is loaded.
def test_the_docs_name_every_tensor_with_its_shape():
    told = dict(re.findall(r"^\| `([\w.{}]+)` \| `\[([^\]]+)\]` \|", DOCS, re.MULTILINE))
    letters = {
        "H": 32,
        "F": 48,
        "n·d": 32,
        "m·d": 16,
        "d": 8,
        "V": 80,
        "r": 6,
        "t·H": 64,
        "H+r": 38,
        "3r": 18,
        "2r+H": 44,
    }
    real = {}
    for config in (deepspec(), deepspec("gated"), deepspec("rnn")):
        real |= {re.sub(r"layers\.\d+", "layers.{i}", name): shape for name, shape in shapes(config).items()}
    real |= {"embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    sizes = {
        name: tuple(letters[part.strip()] if not part.strip().isdigit() else int(part) for part in shape.split(","))
        for name, shape in told.items()
    }
    assert sizes == real


def refused(folder):
    with pytest.raises(ModelError) as error:
        checkpoint.load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


# Catches: a missing tensor that stays random, a left-over one that says the network is another, a transposed one.
def test_wrong_tensors_are_named_all_at_once(tmp_path):
    tensors = weights(deepspec())
    del tensors["layers.1.mlp.up_proj.weight"]
    tensors["layers.2.mlp.up_proj.weight"] = torch.zeros(2)
    tensors["mask_embedding"] = torch.zeros(HIDDEN)
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous()
    tensors["embed_tokens.weight"] = torch.zeros((VOCABULARY - 1, HIDDEN))
    tensors["norm.weight"] = torch.ones(HIDDEN, dtype=torch.int64)
    said = refused(write(tmp_path, deepspec(), tensors))
    assert "1 tensors are missing, layers.1.mlp.up_proj.weight" in said
    assert "2 tensors are left over, layers.2.mlp.up_proj.weight, mask_embedding" in said
    assert "fc.weight is [64, 32], wanted [32, 64]" in said
    assert "embed_tokens.weight is [79, 32], wanted [80, 32]" in said
    assert "norm.weight holds I64" in said


# Catches: heads that the config does not ask for, or asks for and are not there.
def test_a_head_that_config_and_weights_disagree_about_is_refused(tmp_path):
    assert "markov_head.gate_proj.bias" in refused(write(tmp_path / "a", deepspec("gated"), weights(deepspec())))
    assert "4 tensors are left over" in refused(write(tmp_path / "b", deepspec(None), weights(deepspec())))


BROKEN = [
    (deepspec("lstm"), "markov_head_type is 'lstm', and only vanilla, gated, rnn are known"),
    (deepspec(architectures=["Gemma4DSparkModel"]), "architectures is ['Gemma4DSparkModel'], wanted Qwen3DSparkModel"),
    (deepspec(target_layer_ids=[0, 3]), "taps layer 3 of 4; wanted 0 to 2"),
    (deepspec(target_layer_ids=[-1, 2]), "target_layer_ids holds -1: embeddings are no layer"),
    (deepspec(target_layer_ids=None), "target_layer_ids is None, wanted numbers of the target's layers"),
    (deepspec(mask_token_id=80), "mask_token_id is 80, wanted an id below vocab_size 80"),
    (deepspec(block_size="7"), "block_size is '7', wanted a whole number from 1"),
    (deepspec(head_dim=None), "head_dim is missing"),
    (deepspec(rms_norm_eps=float("inf")), "rms_norm_eps is inf, wanted a finite number above 0"),
    (deepspec(attention_bias=True), "attention_bias is True, and only False is known"),
    (deepspec(model_type="gemma4_text"), "model_type is 'gemma4_text'"),
    (deepspec(rope_parameters={"rope_theta": 1e6, "rope_type": "yarn"}), "rope_parameters.rope_type is 'yarn'"),
    (deepspec(rope_parameters={"rope_theta": 1e6, "factor": 2.0}), "rope_parameters.factor: unknown"),
    (deepspec(global_head_dim=512), "global_head_dim: unknown, and may change the network"),
    (deepspec(confidence_head_with_markov="yes"), "confidence_head_with_markov is 'yes', wanted true or false"),
    (deepspec(markov_rank=0), "confidence_head_with_markov is true and markov_rank is 0"),
    (deepspec(layer_types=["sliding_attention"] * 2), "sliding_window is None and use_sliding_window False"),
    (deepspec(layer_types=[["full_attention"], {}]), "wanted 2 of full_attention and sliding_attention"),
    (
        deepspec(layer_types=["sliding_attention"] * 2, sliding_window=4, use_sliding_window=True),
        "this architecture has full_attention only",
    ),
    (deepspec(num_key_value_heads=3), "do not divide"),
    (z_lab(input_embedding_scale=2.0), "input_embedding_scale is 2.0, and only 1 or 1.0 is known"),
    (z_lab(rope_scaling={"type": "llama3"}), "rope_scaling is {'type': 'llama3'}"),
    (z_lab(block_size=1), "its one row is the anchor"),
    (z_lab(dflash_config={"selector_rank": 4, "mask_token_id": 79, "target_layer_ids": [0, 2]}), "selector_rank"),
    (speculators(aux_hidden_state_layer_ids=[0, 3]), "holds 0: embeddings are no layer"),
    (speculators(draft_vocab_size=64), "draft_vocab_size is 64 of 80"),
    (speculators(target_hidden_size=64), "target_hidden_size is 64"),
    (speculators(projector_type="domino"), "projector_type is 'domino'"),
]


# Catches: a config that is read over, so that the drafter runs and is never right.
@pytest.mark.parametrize(("config", "said"), BROKEN, ids=[said[:40] for _, said in BROKEN])
def test_a_config_that_is_not_known_is_one_sentence(config, said, tmp_path):
    found = refused(write(tmp_path, config, {}))
    assert found.startswith(f"{tmp_path}/config.json: ")
    assert said in found


def test_a_config_says_everything_that_is_wrong_with_it():
    with pytest.raises(ModelError) as error:
        read(deepspec("lstm", mask_token_id=99, hidden_act="gelu", novel=1), "config.json")
    for part in ("markov_head_type", "mask_token_id", "hidden_act", "novel"):
        assert part in str(error.value)


WINDOWED = QWEN3 | {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "use_sliding_window": True,
}


# Catches: layers whose window and direction are those of another form; the published layout has both kinds.
@pytest.mark.parametrize(
    ("config", "windows", "causal", "causal_windows"),
    [
        (deepspec(), (None, None), False, False),
        (z_lab(), (None, None), False, False),
        (z_lab(is_causal=True), (None, None), True, False),
        (
            z_lab(layer_types=["sliding_attention", "full_attention"], sliding_window=4, use_sliding_window=True),
            (4, None),
            False,
            True,
        ),
        (
            z_lab(layer_types=["sliding_attention"] * 2, sliding_window=4, use_sliding_window=True, is_causal=False),
            (4, 4),
            False,
            False,
        ),
        (speculators(), (None, None), False, False),
        (speculators(transformer_layer_config=WINDOWED), (4, None), False, True),
        (speculators(transformer_layer_config=WINDOWED, sliding_window_non_causal=True), (4, None), False, False),
    ],
)
def test_windows_and_directions_are_those_of_the_form(config, windows, causal, causal_windows):
    shape = read(config, "config.json").shape
    assert (shape.windows, shape.causal, shape.causal_windows) == (windows, causal, causal_windows)


# Catches: taps of an old z-lab config, which names none, that are another spread than the published one.
def test_a_z_lab_config_without_taps_has_the_published_spread():
    config = z_lab(num_target_layers=36, num_hidden_layers=5, layer_types=None, dflash_config={"mask_token_id": 3})
    assert read(config, "config.json").taps == (1, 9, 17, 25, 33)


# Catches: files that are not there, or cut off, as a traceback of another library.
def test_broken_files_are_one_sentence(tmp_path):
    folder = write(tmp_path / "cut", deepspec())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    assert "is no whole safetensors file" in refused(folder)
    file.unlink()
    assert "is not there; fetch the checkpoint again" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "cannot be read as JSON" in refused(folder)
    (folder / "config.json").unlink()
    assert "holds no config.json" in refused(folder)
    with pytest.raises(ModelError, match="no such folder; wanted a folder with"):
        checkpoint.find("./absent")
    with pytest.raises(ModelError, match="the hub does not give it"):
        checkpoint.find("owner/absent")


# Catches: a copy of the checkpoint kept in float32 whatever it was saved in.
def test_weights_keep_the_dtype_of_the_checkpoint_unless_another_is_asked_for(tmp_path):
    folder = write(tmp_path, deepspec())
    half = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(half, folder / "model.safetensors", {"format": "pt"})
    assert {value.dtype for value in checkpoint.load(folder).tensors().values()} == {torch.bfloat16}
    wide = checkpoint.load(folder, dtype=torch.float32).tensors()
    assert {value.dtype for value in wide.values()} == {torch.float32}
    described = checkpoint.sizes(folder, checkpoint.describe(folder))
    assert described == {name: 2 * value.numel() for name, value in wide.items()}
