"""The `config.json` of a block drafter, in each form that is published, as one description.

What is not known is refused: a key that changes the network and is read over gives a drafter that runs and is never
right, which shows in nothing but a low acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, final

from attrs import frozen

from specdec.errors import ModelError
from specdec_plugins.drafters.blocks.backbone import Shape
from specdec_plugins.drafters.blocks.markov import KINDS, Kind
from specdec_plugins.drafters.blocks.sheet import Sheet

Dialect = Literal["deepspec", "z-lab", "speculators"]

# Of a saved Qwen3 config: what says nothing about the forward.
_WITHOUT_EFFECT = frozenset((
    "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "attn_implementation", "auto_map",
    "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "initializer_range",
    "is_encoder_decoder", "label2id", "max_window_layers", "model_type", "name_or_path", "num_anchors",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
    "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
))  # fmt: skip
# Of the speculators package: how it was trained, and the options of heads that `projector_type` does not ask for.
_OF_TRAINING = frozenset((
    "architectures", "auf", "ce_loss_alpha", "confidence_head_alpha", "dtype", "emb_dim", "gru_hidden_dim",
    "has_no_defaults_at_init", "l1_loss_alpha", "lambda_base_decay_ratio", "lambda_base_start", "loss_decay_gamma",
    "model_type", "num_anchors", "pure_draft_prefix_len", "speculators_config", "speculators_model_type",
    "speculators_version", "tie_word_embeddings", "torch_dtype", "transformers_version",
))  # fmt: skip


@final
@frozen(kw_only=True)
class BlockConfig:
    """What a block drafter is.

    Attributes:
        dialect: whose form the config has.
        shape: sizes of the backbone.
        vocabulary: ids of embedding, head and Markov head.
        block_size: rows of a block, the anchor's included.
        mask_token: id that stands for what is to be drafted.
        taps: decoder layers of the target, by the number of the layer whose output it is.
        from_anchor: row k of a block says what follows it; otherwise what stands in its own place.
        target_layers: decoder layers of the target it was trained for, where that is said.
        context: most positions, where that is said.
        markov: kind of Markov head, or None.
        rank: of the Markov head.
        confidence: it has a confidence head.
        confidence_with_markov: that head sees the embedding of the token before.
    """

    dialect: Dialect = "deepspec"
    shape: Shape
    vocabulary: int
    block_size: int
    mask_token: int
    taps: tuple[int, ...]
    from_anchor: bool = True
    target_layers: int | None = None
    context: int | None = None
    markov: Kind | None = None
    rank: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False

    @property
    def most(self) -> int:
        """Tokens that one block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1


def read(config: Mapping[str, Any], place: str) -> BlockConfig:
    """The description in a `config.json`.

    Args:
        config: its content.
        place: what an error calls it.

    Raises:
        ModelError: it is none of the known forms, or says something unknown; names every reason.
    """
    names = config.get("architectures") or []
    sheet = Sheet(config)
    if "speculators_model_type" in config:
        found = _speculators(sheet)
    elif names == ["Qwen3DSparkModel"]:
        found = _deepspec(sheet)
    elif names == ["DFlashDraftModel"]:
        found = _z_lab(sheet)
    else:
        raise ModelError(
            f"{place}: architectures is {names!r}, wanted Qwen3DSparkModel (DeepSpec), DFlashDraftModel (z-lab), or a "
            "config of the speculators package; other block drafters are not known"
        )
    if sheet.problems:
        raise ModelError(f"{place}: {'; '.join(dict.fromkeys(sheet.problems))}")
    return found


def as_dict(config: BlockConfig) -> dict[str, Any]:
    """A `config.json` in DeepSpec's form.

    Raises:
        ModelError: that form cannot say it.
    """
    shape = config.shape
    if not config.from_anchor or any(shape.windows) or shape.causal:
        raise ModelError("a config in DeepSpec's form has blocks that draft from the anchor, and full attention only")
    made: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "vocab_size": config.vocabulary,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "layer_types": ["full_attention"] * shape.num_hidden_layers,
        **{name: getattr(shape, name) for name in _SIZES},
        "rms_norm_eps": shape.rms_norm_eps,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "target_layer_ids": list(config.taps),
        "markov_rank": config.rank,
        "enable_confidence_head": config.confidence,
    }
    optional = {
        "num_target_layers": config.target_layers,
        "max_position_embeddings": config.context,
        "markov_head_type": config.markov,
        "confidence_head_with_markov": config.confidence_with_markov if config.confidence else None,
    }
    return made | {name: value for name, value in optional.items() if value is not None}


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def _shape(sheet: Sheet, taps: int, *, causal: bool = False, causal_windows: bool = False) -> Shape:
    """The part that is a Qwen3 config."""
    sizes = {name: sheet.whole(name) or 1 for name in _SIZES}
    for key, wanted in (
        ("model_type", "qwen3"),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
    ):
        sheet.only(key, wanted)
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"] or sizes["head_dim"] % 2:
        sheet.problems.append(f"{sheet.where}num_attention_heads, num_key_value_heads and head_dim do not divide")
    windows = _windows(sheet, sizes["num_hidden_layers"])
    return Shape(
        **sizes,
        rms_norm_eps=sheet.number("rms_norm_eps"),
        rope_theta=_theta(sheet),
        num_taps=taps,
        windows=windows,
        causal=causal,
        causal_windows=causal_windows and any(windows),
    )


def _theta(sheet: Sheet) -> float:
    """transformers 4 wrote rope_theta and rope_scaling, 5 writes rope_parameters."""
    sheet.only("rope_scaling")
    if sheet.take("rope_parameters") is None:
        return sheet.number("rope_theta")
    sheet.seen.add("rope_theta")
    rope = sheet.inner("rope_parameters")
    rope.only("rope_type", "default")
    theta = rope.number("rope_theta")
    rope.close(frozenset())
    return theta


def _windows(sheet: Sheet, layers: int) -> tuple[int | None, ...]:
    kinds = sheet.take("layer_types", ["full_attention"] * layers)
    used, size = sheet.flag("use_sliding_window", False), sheet.take("sliding_window")
    known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    if not known or len(kinds) != layers:
        sheet.problems.append(
            f"{sheet.where}layer_types is {kinds!r}, wanted {layers} of full_attention and sliding_attention"
        )
        return (None,) * layers
    if "sliding_attention" in kinds and not (used and type(size) is int and size > 0):
        sheet.problems.append(
            f"{sheet.where}layer_types asks for sliding_attention, sliding_window is {size!r} and use_sliding_window "
            f"{used!r}; wanted a window and true"
        )
    if used and "layer_types" not in sheet.config:
        sheet.problems.append(f"{sheet.where}use_sliding_window is true without layer_types, which say where")
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def _heads(sheet: Sheet) -> dict[str, Any]:
    rank = sheet.whole("markov_rank", least=0, needed=False) or 0
    kind = sheet.take("markov_head_type", "vanilla")
    if rank and kind not in KINDS:
        sheet.problems.append(f"{sheet.where}markov_head_type is {kind!r}, and only {', '.join(KINDS)} are known")
    confidence = sheet.flag("enable_confidence_head", False)
    with_markov = sheet.flag("confidence_head_with_markov", False) and confidence
    if with_markov and not rank:
        sheet.problems.append(f"{sheet.where}confidence_head_with_markov is true and markov_rank is 0")
    return {
        "markov": kind if rank else None,
        "rank": rank,
        "confidence": confidence,
        "confidence_with_markov": with_markov,
    }


def _deepspec(sheet: Sheet) -> BlockConfig:
    taps = sheet.ids("target_layer_ids")
    found = _config(sheet, "deepspec", _shape(sheet, len(taps)), taps, sheet, True, _heads(sheet))
    if any(found.shape.windows):
        sheet.problems.append("layer_types: this architecture has full_attention only")
    sheet.close(_WITHOUT_EFFECT)
    return found


def _z_lab(sheet: Sheet) -> BlockConfig:
    own = sheet.inner("dflash_config")
    place = {name: own if name in own.config else sheet for name in ("block_size", "mask_token_id", "target_layer_ids")}
    for key in ("input_embedding_scale", "output_multiplier"):
        for part in (own, sheet):
            part.only(key, 1, 1.0)
    for part in (own, sheet):
        part.only("final_logit_softcapping", 0, 0.0)
        part.only("projector_type", "dflash")
    causal = sheet.take("is_causal")
    if causal is not None:
        causal = sheet.flag("is_causal", False)
    layers, target = sheet.whole("num_hidden_layers") or 1, sheet.whole("num_target_layers", needed=False)
    if place["target_layer_ids"].config.get("target_layer_ids") is None and target is not None:
        taps = _spread(layers, target)
    else:
        taps = place["target_layer_ids"].ids("target_layer_ids")
    shape = _shape(sheet, len(taps), causal=causal is True, causal_windows=causal is not False)
    if place["block_size"].config.get("block_size") == 1:
        sheet.problems.append("block_size is 1, and its one row is the anchor; wanted 2 or more")
    found = _config(sheet, "z-lab", shape, taps, place, False, {})
    own.close(frozenset())
    sheet.close(_WITHOUT_EFFECT)
    return found


def _spread(layers: int, target: int) -> tuple[int, ...]:
    """The layers that a z-lab drafter taps when its config does not say: evenly from 1 to the third from the end."""
    if layers == 1:
        return (target // 2,)
    return tuple(round(1 + index * (target - 4) / (layers - 1)) for index in range(layers))


def _speculators(sheet: Sheet) -> BlockConfig:
    sheet.only("speculators_model_type", "dspark", "dflash")
    dspark = sheet.config.get("speculators_model_type") == "dspark"
    layer = sheet.inner("transformer_layer_config")
    taps = sheet.ids("aux_hidden_state_layer_ids", less=1)  # an index of hidden_states, whose first are embeddings
    shape = _shape(layer, len(taps), causal_windows=not sheet.flag("sliding_window_non_causal", False))
    sheet.only("projector_type", "dflash")
    sheet.only("shift_label", False)
    sheet.only("target_hidden_size", shape.hidden_size)
    vocabulary = layer.config.get("vocab_size")
    if (draft := sheet.take("draft_vocab_size", vocabulary)) != vocabulary:
        sheet.problems.append(f"draft_vocab_size is {draft} of {vocabulary}, and drafters of a part are not known")
    from_anchor = sheet.flag("sample_from_anchor", dspark)
    found = _config(layer, "speculators", shape, taps, sheet, from_anchor, _heads(sheet))
    layer.close(_WITHOUT_EFFECT)
    sheet.close(_OF_TRAINING)
    return found


def _config(
    sheet: Sheet,
    dialect: Dialect,
    shape: Shape,
    taps: tuple[int, ...],
    block: Sheet | Mapping[str, Sheet],
    from_anchor: bool,
    heads: Mapping[str, Any],
) -> BlockConfig:
    """Join the parts. `block` is where the keys of blocks stand."""
    sizes, masks = (block, block) if isinstance(block, Sheet) else (block["block_size"], block["mask_token_id"])
    vocabulary = sheet.whole("vocab_size") or 1
    mask, layers = masks.whole("mask_token_id", least=0) or 0, sheet.whole("num_target_layers", needed=False)
    if mask >= vocabulary:
        sheet.problems.append(f"mask_token_id is {mask}, wanted an id below vocab_size {vocabulary}")
    if layers is not None and (wrong := [tap for tap in taps if not 0 <= tap < layers - 1]):
        sheet.problems.append(
            f"taps layer {wrong[0]} of {layers}; wanted 0 to {layers - 2}, as the last one's output is never tapped raw"
        )
    return BlockConfig(
        dialect=dialect,
        shape=shape,
        vocabulary=vocabulary,
        block_size=sizes.whole("block_size") or 1,
        mask_token=mask,
        taps=taps,
        from_anchor=from_anchor,
        target_layers=layers,
        context=sheet.whole("max_position_embeddings", needed=False),
        **heads,
    )
