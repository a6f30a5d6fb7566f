"""The decoder of most language models; families differ in norms, attention and feed-forward blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

_MAX_LAYERS = 2000


@dataclass(frozen=True, slots=True)
class Decoder:
    """Description of a decoder-only transformer: the parts of a model file in which model families differ.

    ``norm_placement`` says where norms are: "pre" before each half of a layer; "post" after the sum; "parallel" with
    one norm for both halves side by side, "twin" with one norm for each; "sandwich" before and after each half;
    "inner" after each half and before its sum. ``final_entries`` stand between the last layer and the output layer;
    None stands for one norm. A configuration without ``tie_word_embeddings`` means ``tied``. Both halves of a layer
    end with a dropout if ``params`` hold its rate.
    """

    params: Mapping[str, Any]
    norm: ModelFileEntry = "rms_norm"
    attention: Mapping[str, Any] = field(default_factory=dict)
    norm_placement: str = "pre"
    entries_after_embedding: Sequence[ModelFileEntry] = ()
    final_entries: Sequence[ModelFileEntry] | None = None
    tied: bool = False
    head_bias: bool = False
    attention_kind: str = "attention"
    embedding_width: str = "=hidden"
    notes: str = ""


def residual_block_entry(*inner: ModelFileEntry) -> ModelFileEntry:
    """Return a model-file entry that adds the input of the entries ``inner`` to their output."""
    return {"branches": [list(inner), []], "join": "add"}


def _decoder_layer_entries(decoder: Decoder, more: Mapping[str, Any], feed: ModelFileEntry) -> list[ModelFileEntry]:
    """Return the model-file entries of one decoder layer: attention and feed-forward with their norms and residuals.

    ``more`` are further options of the layer's attention, or under ``mixer`` the entry that takes its place;
    ``feed`` is the feed-forward entry.
    """
    drop = [{"dropout": {"rate": "=dropout"}}] if "dropout" in decoder.params else []
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


def loops_of_layers(
    layers: Sequence[Any], entries_of: Callable[[list[Any]], list[ModelFileEntry]]
) -> list[ModelFileEntry]:
    """Return loops (``repeat``) over equal layers as model-file entries.

    ``entries_of`` makes the body of a loop from the layers of one iteration.
    """
    runs = enumerate(fold_repeats(layers), start=1)
    return [{"repeat": times, "name": f"block{n}", "layers": entries_of(pattern)} for n, (pattern, times) in runs]


def _decoder_loops(
    decoder: Decoder, mixers: Sequence[Mapping[str, Any]], feeds: Sequence[ModelFileEntry]
) -> list[ModelFileEntry]:
    """Return the decoder's layers as loops; if all layers are equal, there are ``=layers`` of them."""
    layers = list(zip(mixers, feeds, strict=True))
    loops = loops_of_layers(
        layers, lambda pattern: [entry for layer in pattern for entry in _decoder_layer_entries(decoder, *layer)]
    )
    if len(loops) == 1:
        loops[0] |= {"name": "block"} | ({"repeat": "=layers"} if loops[0]["repeat"] == len(layers) else {})
    return loops


def language_model_file(
    config: Config,
    decoder: Decoder,
    feeds: Sequence[ModelFileEntry] = (),
    mixers: Sequence[Mapping[str, Any]] | None = None,
) -> ModelMapping:
    """Return the content of a model file for a decoder: inputs, embedding, layers, final norm, output layer and loss.

    ``feeds`` holds the feed-forward entry of each layer, ``mixers`` further options of its attention (None: none).
    """
    tied = config.flag("tie_word_embeddings", decoder.tied)
    embed = {"name": "embed", "embedding": {"entries": "=vocab", "features": decoder.embedding_width}}
    loops = _decoder_loops(decoder, mixers or [{}] * len(feeds), feeds)
    final = (decoder.norm,) if decoder.final_entries is None else decoder.final_entries
    return {
        "task": "language modelling" if _head_name(config) in _LM_HEADS else "text classification",
        "notes": f"{decoder.notes} FLOP count the whole rectangle of scores although attention is causal.".strip(),
        "params": with_vocab_last(decoder.params),
        "tokens": "=seq",
        "inputs": {"tokens": {"dims": {"batch": "=batch", "seq": "=seq"}, "role": "index"}},
        "layers": [embed, *decoder.entries_after_embedding, *loops, *final, *_head(config, decoder.head_bias, tied)],
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


def _head(config: Config, bias: bool, tied: bool) -> list[ModelFileEntry]:
    """Return the model-file entries after the last layer: output layer and loss, or a classifier."""
    kind = _head_name(config)
    if kind in _LM_HEADS:
        projection = {"features": "=vocab", "dim": "vocab", "bias": bias} | ({"tie": "embed"} if tied else {})
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
    if layers > _MAX_LAYERS:
        raise SpecError(f"{config.path}: num_hidden_layers: {layers} layers; expected at most {_MAX_LAYERS}")
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
    usual = [default] * count if isinstance(default, bool) else default
    slides = [kind == "sliding_attention" for kind in kinds] if kinds else usual
    if not window or not any(slides):
        return [{}] * count
    params["window"] = config.integer("sliding_window")
    return [{"window": "=window"} if slide else {} for slide in slides]


def gated_feed_forward(
    config: Config, params: dict[str, Any], *, default: str = "silu", bias: bool = False
) -> ModelFileEntry:
    """Return the model-file entry of a gated feed-forward block, and set the width ``ffn`` in ``params``."""
    params["ffn"] = config.integer("intermediate_size")
    function = config.activation("hidden_activation", "hidden_act", default=default, gated=True)
    return {"mlp": {"ffn": "=ffn", "activation": function, "bias": bias}}


FeedForwardBuilder = Callable[[Config, dict[str, Any]], list[ModelFileEntry]]


def gated_feed_forwards(config: Config, params: dict[str, Any]) -> list[ModelFileEntry]:
    """Return the feed-forward entry of each layer: gated blocks, with biases as ``mlp_bias`` says."""
    return [gated_feed_forward(config, params, bias=config.flag("mlp_bias"))] * params["layers"]


def llama_like_model(
    config: Config,
    *,
    bias: bool | None = None,
    out_bias: bool | None = None,
    slides: Sequence[bool] | bool = False,
    head_dim: int | None = None,
    attention: Mapping[str, Any] | None = None,
    feed: FeedForwardBuilder = gated_feed_forwards,
    **more: Any,
) -> ModelMapping:
    """Return the content of a model file for a Llama-like decoder: RMS norms, rotary positions and gated feed-forward.

    ``slides`` says which layers have a sliding window, ``attention`` are further options of the attention, ``feed``
    makes the feed-forward entry of each layer, and ``more`` are fields of `Decoder`.
    """
    params = grouped_query_parameters(config, head_dim)
    bias = config.flag("attention_bias") if bias is None else bias
    feeds, slices = feed(config, params), window_options(config, params, slides)
    options = {"rotary": True, **(attention or {}), "bias": bias}
    options |= {} if out_bias in (None, bias) else {"out_bias": out_bias}
    return language_model_file(
        config, Decoder(params, attention=attention_options(params, **options), **more), feeds, slices
    )


def with_vocab_last(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the parameters with the vocabulary at the end, the order in which model files are written."""
    return {key: value for key, value in params.items() if key != "vocab"} | {"vocab": params["vocab"]}


def mixture_entry(
    config: Config,
    params: dict[str, Any],
    *,
    ffn: str = "moe_intermediate_size",
    activation: str | None = None,
    **more: Any,
) -> ModelFileEntry:
    """Return the model-file entry of a mixture of experts.

    ``ffn`` are the keys that may state the width of an expert, separated by spaces; ``more`` are options of the
    mixture. The numbers of experts become parameters in ``params``.
    """
    params |= config.integers(
        experts="num_local_experts num_experts n_routed_experts",
        top_k="num_experts_per_tok num_experts_per_token",
        expert_ffn=ffn,
    )
    activation = activation or config.activation("hidden_act", default="silu", gated=True)
    return {"moe": {"experts": "=experts", "top_k": "=top_k", "ffn": "=expert_ffn", "activation": activation} | more}


def feed_forward_layers(config: Config, params: dict[str, Any], **more: Any) -> list[ModelFileEntry]:
    """Return the feed-forward entry of each layer: a mixture of experts, or a dense block where there is no mixture.

    ``more`` are options of `mixture_entry`.
    """
    mixture = mixture_entry(config, params, **more)
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
