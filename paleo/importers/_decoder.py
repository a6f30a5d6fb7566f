"""The decoder of most language models; families differ in norms, attention and feed-forward blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from paleo.errors import SpecError
from paleo.importers.transformers_configuration import (
    MAX_DEFAULT_SEQ,
    Config,
    ModelFileEntry,
    ModelMapping,
    UnsupportedHeadError,
    class_count,
)

DecoderLayer = tuple[Mapping[str, Any], ModelFileEntry]

MAX_LAYERS = 2000


@dataclass(frozen=True, slots=True)
class Decoder:
    """Description of a decoder-only transformer: the parts of a model file in which model families differ.

    ``norm_placement`` says where norms are: "pre" before each half of a layer; "post" after the sum; "parallel" with
    one norm for both halves side by side, "twin" with one norm for each; "sandwich" before and after each half;
    "inner" after each half and before its sum.
    """

    params: Mapping[str, Any]
    norm: ModelFileEntry
    attention: Mapping[str, Any]
    feed_forward: ModelFileEntry
    norm_placement: str = "pre"
    dropout: bool = False
    entries_after_embedding: tuple[ModelFileEntry, ...] = ()
    final_entries: tuple[ModelFileEntry, ...] = ()
    ties_embeddings: bool = False
    head_bias: bool = False
    attention_kind: str = "attention"
    embedding_width: str = "=hidden"
    notes: str = ""
    task: str = "language modelling"


def residual_block_entry(*inner: ModelFileEntry) -> ModelFileEntry:
    """Return a model-file entry that adds the input of the entries ``inner`` to their output."""
    return {"branches": [list(inner), []], "join": "add"}


def decoder_layer_entries(decoder: Decoder, more: Mapping[str, Any], feed: ModelFileEntry) -> list[ModelFileEntry]:
    """Return the model-file entries of one decoder layer: attention and feed-forward with their norms and residuals.

    ``more`` are further options of the layer's attention, or under ``mixer`` the entry that takes its place;
    ``feed`` is the feed-forward entry.
    """
    drop = [{"dropout": {"rate": "=dropout"}}] if decoder.dropout else []
    mixer = more["mixer"] if "mixer" in more else {decoder.attention_kind: dict(decoder.attention) | dict(more)}
    attention = [mixer, *drop]
    feed_forward, norm = [feed, *drop], decoder.norm
    match decoder.norm_placement:
        case "pre":
            return [residual_block_entry(norm, *attention), residual_block_entry(norm, *feed_forward)]
        case "post":
            return [residual_block_entry(*attention), norm, residual_block_entry(*feed_forward), norm]
        case "inner":
            return [residual_block_entry(*attention, norm), residual_block_entry(*feed_forward, norm)]
        case "sandwich":
            return [residual_block_entry(norm, *attention, norm), residual_block_entry(norm, *feed_forward, norm)]
        case "twin":
            return [{"branches": [[norm, *attention], [norm, *feed_forward], []], "join": "add"}]
        case _:
            return [residual_block_entry(norm, {"branches": [attention, feed_forward], "join": "add"})]


def fold_repeats(layers: Sequence[Any]) -> list[tuple[list[Any], int]]:
    """Fold a sequence of layers into few, short repeated patterns; return a list of (pattern, count).

    >>> fold_repeats("aaabbb"), fold_repeats("ababa")
    ([(['a'], 3), (['b'], 3)], [(['a', 'b'], 2), (['a'], 1)])
    """
    runs = [([layer], len(list(same))) for layer, same in groupby(layers)]
    best = runs
    for period in range(2, min(12, len(layers) // 2) + 1):
        times = len(layers) // period
        if list(layers[: period * times]) == list(layers[:period]) * times:
            tail = fold_repeats(layers[period * times :]) if len(layers) % period else []
            shorter = [(list(layers[:period]), times), *tail]
            best = min(best, shorter, key=_length)
    return min(best, _greedily_folded(layers), key=_length)


def _length(runs: Sequence[tuple[list[Any], int]]) -> int:
    return sum(len(pattern) for pattern, _ in runs)


def _greedily_folded(layers: Sequence[Any]) -> list[tuple[list[Any], int]]:
    """Fold a sequence into (pattern, count) pairs, at each position by the pattern that saves most."""
    runs: list[tuple[list[Any], int]] = []
    place = 0
    while place < len(layers):
        best_period, best_times = 1, 1
        for period in range(1, min(24, (len(layers) - place) // 2) + 1):
            pattern, times = layers[place : place + period], 1
            while layers[place + period * times : place + period * (times + 1)] == pattern:
                times += 1
            if period * (times - 1) > best_period * (best_times - 1):
                best_period, best_times = period, times
        runs.append((list(layers[place : place + best_period]), best_times))
        place += best_period * best_times
    return runs


def repeated_layer_entries(decoder: Decoder, layers: Sequence[DecoderLayer]) -> list[ModelFileEntry]:
    """Return the decoder's layers as model-file entries, with equal layers folded into loops (``repeat``).

    Each layer is (attention options, feed-forward entry). If there is only one loop, its count is the parameter
    ``=layers``.
    """
    runs = fold_repeats(list(layers))
    entries = []
    for index, (pattern, times) in enumerate(runs):
        body = [entry for more, feed in pattern for entry in decoder_layer_entries(decoder, more, feed)]
        whole = len(runs) == 1 and len(pattern) == 1
        label = "block" if len(runs) == 1 else f"block{index + 1}"
        entries.append({"repeat": "=layers" if whole else times, "name": label, "layers": body})
    return entries


def language_model_file(config: Config, decoder: Decoder, layers: Sequence[DecoderLayer]) -> ModelMapping:
    """Return the content of a model file for a decoder: inputs, embedding, layers, final norm, output layer and loss.

    Each of ``layers`` is (attention options, feed-forward entry).
    """
    notes = f"{decoder.notes} FLOP count the whole rectangle of scores although attention is causal.".strip()
    params = dict(decoder.params)
    tokens = {"dims": {"batch": "=batch", "seq": "=seq"}, "role": "index"}
    embed = {"name": "embed", "embedding": {"entries": "=vocab", "features": decoder.embedding_width}}
    body = [embed, *decoder.entries_after_embedding, *repeated_layer_entries(decoder, layers), *decoder.final_entries]
    return {
        "task": decoder.task if _head_name(config) in _LM_HEADS else "text classification",
        "notes": notes,
        "params": params,
        "tokens": "=seq",
        "inputs": {"tokens": tokens},
        "layers": [*body, *_head(config, decoder)],
    }


#: Endings of the classes with an output layer over the vocabulary for every position.
_LM_HEADS = frozenset({"ForCausalLM", "LMHeadModel"})
_HEAD = re.compile(r"(LMHeadModel|For[A-Z]\w+|Model)\Z")


def _head_name(config: Config) -> str:
    """Return the head of an architecture, such as ``ForCausalLM`` (also the default) of ``LlamaForCausalLM``."""
    named = config.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        return "ForCausalLM"
    ending = _HEAD.search(named[0])
    return ending[0] if ending else named[0]


def _head(config: Config, decoder: Decoder) -> list[ModelFileEntry]:
    """Return the model-file entries after the last layer: output layer and loss, or a classifier."""
    kind = _head_name(config)
    if kind in _LM_HEADS:
        tie = {"tie": "embed"} if decoder.ties_embeddings else {}
        projection = {"features": "=vocab", "dim": "vocab", "bias": decoder.head_bias} | tie
        return [{"name": "head", "linear": projection}, "cross_entropy"]
    classes = {"features": class_count(config), "dim": "classes"}
    if kind == "ForSequenceClassification":  # every position is scored, then the last one is selected
        return [{"name": "head", "linear": classes | {"bias": False}}, "select", "cross_entropy"]
    if kind == "Model":
        return []
    raise UnsupportedHeadError(kind)


def base_parameters(config: Config, **more: Any) -> dict[str, Any]:
    """Return a decoder's size parameters for a model file (hidden, heads, layers, seq, vocab) and ``more``."""
    hidden = config.integer("hidden_size", "n_embd", "d_model")
    heads = config.integer("num_attention_heads", "n_head")
    positions = config.integer("max_position_embeddings", "n_positions", "seq_length", default=2048)
    layers = config.integer("num_hidden_layers", "n_layer")
    if layers > MAX_LAYERS:
        raise SpecError(f"{config.path}: num_hidden_layers: {layers} layers; expected at most {MAX_LAYERS}")
    shape = {"seq": min(positions, MAX_DEFAULT_SEQ), "hidden": hidden, "heads": heads}
    return shape | {"layers": layers} | more | {"vocab": config.integer("vocab_size")}


def grouped_query_parameters(config: Config, default_head_dim: int | None = None) -> dict[str, Any]:
    """Return the parameters of a model file for a decoder with grouped-query attention, with kv_heads and head_dim.

    ``head_dim`` is left out if it is hidden / heads.
    """
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    shape = base_parameters(config, kv_heads=kv_heads)
    head_dim = config.integer("head_dim", default=default_head_dim or max(1, shape["hidden"] // heads))
    return shape if head_dim * heads == shape["hidden"] else shape | {"head_dim": head_dim}


def attention_options(params: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the options of a causal attention entry; head counts refer to ``params``, and ``more`` are added."""
    keys = [key for key in ("heads", "kv_heads", "head_dim") if key in params]
    return {key: f"={key}" for key in keys} | {"causal": True} | more


def window_options(
    config: Config, params: dict[str, Any], default: Sequence[bool] | bool = False
) -> list[Mapping[str, Any]]:
    """Return, for each layer, the attention options for a sliding window.

    The options are empty for layers that attend to all positions.

    ``default`` says which layers have a window if the configuration lists none. The window's size becomes a parameter.
    """
    count = params["layers"]
    window = config.get("sliding_window")
    kinds = config.layer_kinds("layer_types", count)
    slides = (
        [kind == "sliding_attention" for kind in kinds]
        if kinds
        else [default] * count
        if isinstance(default, bool)
        else default
    )
    if not window or not any(slides):
        return [{}] * count
    params["window"] = config.integer("sliding_window")
    return [{"window": "=window"} if slide else {} for slide in slides]


def gated_feed_forward(
    config: Config, params: dict[str, Any], *, default: str = "silu", bias: bool = False
) -> ModelFileEntry:
    """Return the model-file entry of a gated feed-forward block, and set the width ``ffn`` in ``params``."""
    params["ffn"] = config.integer("intermediate_size")
    return {
        "mlp": {
            "ffn": "=ffn",
            "activation": config.activation("hidden_activation", "hidden_act", default=default, gated=True),
            "bias": bias,
        }
    }


def llama_like_model(
    config: Config, *, bias: bool | None = None, out_bias: bool | None = None, slides: Any = False, **more: Any
) -> ModelMapping:
    """Return the content of a model file for a Llama-like decoder: RMS norms, rotary positions and gated feed-forward.

    ``slides`` says which layers have a sliding window; ``more`` are fields of `Decoder` and options such as
    ``head_dim``, ``tied``, ``feed`` and ``attention``.
    """
    params = grouped_query_parameters(config, more.pop("head_dim", None))
    tied = config.flag("tie_word_embeddings", more.pop("tied", False))
    feed = more.pop("feed", None)
    options = {"rotary": True} | more.pop("attention", {})
    bias = config.flag("attention_bias") if bias is None else bias
    feeds = (
        feed(config, params)
        if feed
        else [gated_feed_forward(config, params, bias=config.flag("mlp_bias"))] * params["layers"]
    )
    slices = window_options(config, params, slides)
    attention = attention_options(
        params, **options, bias=bias, **({} if out_bias in (None, bias) else {"out_bias": out_bias})
    )
    norm = more.pop("norm", "rms_norm")
    decoder = Decoder(params, norm, attention, None, ties_embeddings=tied, final_entries=(norm,), **more)
    decoder = replace(decoder, params=with_vocab_last(params))
    return language_model_file(config, decoder, list(zip(slices, feeds, strict=True)))


def with_vocab_last(params: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the parameters with the vocabulary at the end, the order in which model files are written."""
    return {key: value for key, value in params.items() if key != "vocab"} | {"vocab": params["vocab"]}


def feed_forward_layers(
    config: Config,
    params: dict[str, Any],
    *,
    in_all_layers: bool = False,
    ffn: tuple[str, ...] = ("moe_intermediate_size",),
    **more: Any,
) -> list[ModelFileEntry]:
    """Return the feed-forward entry of each layer: a mixture of experts, or a dense block where there is no mixture.

    ``ffn`` are the keys that may state the width of an expert; ``in_all_layers`` ignores keys for dense layers;
    ``more`` are options of the mixture. The numbers of experts become parameters in ``params``.
    """
    params["experts"] = config.integer("num_local_experts", "num_experts", "n_routed_experts")
    params["top_k"] = config.integer("num_experts_per_tok", "num_experts_per_token")
    params["expert_ffn"] = config.integer(*ffn)
    gated = more.pop("activation", None) or config.activation("hidden_act", default="silu", gated=True)
    mixture = {"moe": {"experts": "=experts", "top_k": "=top_k", "ffn": "=expert_ffn", "activation": gated} | more}
    if in_all_layers:
        return [mixture] * params["layers"]
    step, alone = config.integer("decoder_sparse_step", default=1), config.get("mlp_only_layers") or []
    dense_first = config.get("first_k_dense_replace") or 0
    if not isinstance(alone, list) or not isinstance(dense_first, int):
        raise SpecError(f"{config.path}: mlp_only_layers must be a list, first_k_dense_replace a whole number")
    kinds = config.layer_kinds("mlp_layer_types", params["layers"])
    sparse = [i >= dense_first and i not in alone and (i + 1) % step == 0 for i in range(params["layers"])]
    sparse = sparse if kinds is None else [kind == "sparse" for kind in kinds]
    dense = None if all(sparse) else gated_feed_forward(config, params)
    return [mixture if mixed else dense for mixed in sparse]


def plain_feed_forward(config: Config, default: str, *keys: str, bias: bool = True) -> ModelFileEntry:
    """Return the model-file entry of a feed-forward block without a gate.

    ``keys`` are the configuration keys of the activation; without them the activation is ``default``.
    """
    function = config.activation(*(keys or ("hidden_act",)), default=default)
    return {"mlp": {"ffn": "=ffn", "activation": function, "bias": bias}}
