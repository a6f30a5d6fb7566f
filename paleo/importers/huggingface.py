"""Configurations of the transformers library (config.json) as models: nothing is downloaded, and no weight is needed.

A family is a function from the keys of its configuration to a model, registered under its ``model_type``. Most of them
are one decoder with other norms, attention and feed-forward blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from paleo.errors import SpecError, near
from paleo.files import read_bytes
from paleo.registry import Registry

Entry = Any
Model = dict[str, Any]
FAMILIES: Registry[Callable[[Config], Model]] = Registry("model_type of a configuration")

MAX_CONFIG_BYTES = 2_000_000
#: Sequences that nobody asked for stay this short; --seq says otherwise.
LONGEST_SEQ = 4096
#: Names of element-wise functions in configurations -> ours, and their gated form; what their code spells out is _tanh.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "silu", "relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh",
}  # fmt: skip
GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu", "relu": "reglu"}


class Config(Mapping[str, Any]):
    """The keys of a configuration, with messages that name the file and the key."""

    def __init__(self, data: Mapping[str, Any], path: str) -> None:
        self._data, self.path = data, path

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Any:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The whole number, 1 or more, under the first of these keys that is there."""
        value = next((self[key] for key in keys if self.get(key) is not None), default)
        if value is None:
            raise SpecError(f"{self.path}: {keys[0]}: this key is missing; {near(keys[0], self._data)}")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**40:
            raise SpecError(f"{self.path}: {keys[0]}: {value!r:.60} must be a whole number of 1 or more")
        return value

    def share(self, *keys: str, default: float = 0.0) -> float:
        """A dropout rate from 0 to below 1."""
        value = next((self[key] for key in keys if self.get(key) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise SpecError(f"{self.path}: {keys[0]}: {value!r:.60} must be a share from 0 to below 1")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A yes or no."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise SpecError(f"{self.path}: {key}: {value!r:.60} must be true or false")
        return default if value is None else value

    def activation(self, *keys: str, default: str, gated: bool = False) -> str:
        """The element-wise function of the feed-forward block."""
        name = next((self[key] for key in keys if self.get(key) is not None), default)
        function = ACTIVATIONS.get(name) if isinstance(name, str) else None
        if function is None or (gated and function not in GATED):
            raise SpecError(
                f"{self.path}: {keys[0]}: {name!r:.60} is no function that is known; {near(str(name), ACTIVATIONS)}"
            )
        return GATED[function] if gated else function

    def kinds(self, key: str, layers: int) -> list[str] | None:
        """A list of one word for each layer, if there is one."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != layers or not all(isinstance(one, str) for one in value):
            raise SpecError(f"{self.path}: {key}: expected {layers} words, one for each layer")
        return value


def read_config(path: str | Path) -> Config:
    """The configuration in a file, or in the ``config.json`` of a folder."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    raw = read_bytes(file, most=MAX_CONFIG_BYTES, expected="the config.json of a model")
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        raise SpecError(f"{file}: is not JSON; expected the config.json of a model") from None
    if not isinstance(data, dict):
        raise SpecError(f"{file}: expected one JSON mapping; is it the config.json of a model?")
    return Config(data, str(file))


def from_config(path: str | Path, *, seq: int | None = None) -> Model:
    """The model that a configuration describes, as the mapping of a model file; SpecError for what it cannot be.

    ``seq`` replaces the length of the sequences (the longest the model takes, at most 4096 tokens).
    """
    config = read_config(path)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = near(str(kind), FAMILIES) if kind is not None else "this key is missing"
        known = ", ".join(FAMILIES)
        raise SpecError(
            f"{config.path}: model_type: {kind!r:.60} is not a family that can be imported; {hint}. All: {known}"
        )
    model = FAMILIES[kind](config)
    if seq is not None and "seq" in model["params"]:
        model["params"]["seq"] = seq
    source = f"configuration {Path(config.path).name} of {config.get('_name_or_path') or kind}"
    return {"title": f"{kind} imported from {config.path}", "task": model.pop("task"), "source": source} | model


# The decoder that most families are.


@dataclass(frozen=True, slots=True)
class Decoder:
    """What tells one decoder from another; values are entries of a model file.

    ``residual``: "pre" norms before each half; "post" after the sum; "parallel" one norm for both halves, "twin" one
    for each half, side by side; "sandwich" before and after each half.
    """

    params: Mapping[str, Any]
    norm: Entry
    attention: Mapping[str, Any]
    feed: Entry
    residual: str = "pre"
    dropout: bool = False
    before: tuple[Entry, ...] = ()
    final: tuple[Entry, ...] = ()
    tied: bool = False
    head_bias: bool = False
    attention_kind: str = "attention"
    embedding: str = "=hidden"
    notes: str = ""


Layer = tuple[Mapping[str, Any], Entry]


def _residual(*inner: Entry) -> Entry:
    return {"branches": [list(inner), []], "join": "add"}


def block(decoder: Decoder, more: Mapping[str, Any], feed: Entry) -> list[Entry]:
    """The entries of one layer."""
    drop = [{"dropout": {"rate": "=dropout"}}] if decoder.dropout else []
    attention = [{decoder.attention_kind: dict(decoder.attention) | dict(more)}, *drop]
    fed, norm = [feed, *drop], decoder.norm
    match decoder.residual:
        case "pre":
            return [_residual(norm, *attention), _residual(norm, *fed)]
        case "post":
            return [_residual(*attention), norm, _residual(*fed), norm]
        case "sandwich":
            return [_residual(norm, *attention, norm), _residual(norm, *fed, norm)]
        case "twin":
            return [{"branches": [[norm, *attention], [norm, *fed], []], "join": "add"}]
        case _:
            return [_residual(norm, {"branches": [attention, fed], "join": "add"})]


def folded(layers: Sequence[Any]) -> list[tuple[list[Any], int]]:
    """Runs of a repeating pattern: (pattern, times), few and short.

    >>> folded("aaabbb"), folded("ababa")
    ([(['a'], 3), (['b'], 3)], [(['a', 'b'], 2), (['a'], 1)])
    """
    runs = [([one], len(list(same))) for one, same in groupby(layers)]
    best = runs
    for period in range(2, min(12, len(layers) // 2) + 1):
        times = len(layers) // period
        if list(layers[: period * times]) == list(layers[:period]) * times:
            rest = folded(layers[period * times :]) if len(layers) % period else []
            found = [(list(layers[:period]), times), *rest]
            if sum(len(pattern) for pattern, _ in found) < sum(len(pattern) for pattern, _ in best):
                best = found
    return best


def repeats(decoder: Decoder, layers: Sequence[Layer]) -> list[Entry]:
    """The layers as folded loops; ``=layers`` counts the turns where there is one loop."""
    made = folded(list(layers))
    entries = []
    for index, (pattern, times) in enumerate(made):
        body = [entry for more, feed in pattern for entry in block(decoder, more, feed)]
        whole = len(made) == 1 and len(pattern) == 1
        label = "block" if len(made) == 1 else f"block{index + 1}"
        entries.append({"repeat": "=layers" if whole else times, "name": label, "layers": body})
    return entries


def language_model(config: Config, decoder: Decoder, layers: Sequence[Layer]) -> Model:
    """Embedding, layers, norm and the projection to the vocabulary."""
    notes = f"{decoder.notes} FLOP count the whole rectangle of scores although attention is causal.".strip()
    head: dict[str, Any] = {"features": "=vocab", "dim": "vocab", "bias": decoder.head_bias}
    if decoder.tied:
        head["tie"] = "embed"
    params = dict(decoder.params)
    tokens = {"dims": {"batch": "=batch", "seq": "=seq"}, "role": "index"}
    embed = {"name": "embed", "embedding": {"entries": "=vocab", "features": decoder.embedding}}
    body = [embed, *decoder.before, *repeats(decoder, layers), *decoder.final, {"name": "head", "linear": head}]
    return {
        "task": "language modelling",
        "notes": notes,
        "params": params,
        "tokens": "=seq",
        "inputs": {"tokens": tokens},
        "layers": [*body, "cross_entropy"],
    }


def _shape(config: Config, **more: Any) -> dict[str, Any]:
    """Parameters that every decoder has."""
    hidden = config.integer("hidden_size", "n_embd", "d_model")
    heads = config.integer("num_attention_heads", "n_head")
    positions = config.integer("max_position_embeddings", "n_positions", "seq_length", default=2048)
    layers = config.integer("num_hidden_layers", "n_layer")
    if layers > _MOST_LAYERS:
        raise SpecError(f"{config.path}: num_hidden_layers: {layers} layers; {_MOST_LAYERS} are the most")
    shape = {"seq": min(positions, LONGEST_SEQ), "hidden": hidden, "heads": heads}
    return shape | {"layers": layers} | more | {"vocab": config.integer("vocab_size")}


_MOST_LAYERS = 2000


def _grouped(config: Config, default_head_dim: int | None = None) -> dict[str, Any]:
    """Parameters of a decoder with grouped-query attention and a head dim of its own."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    shape = _shape(config, kv_heads=kv_heads)
    head_dim = config.integer("head_dim", default=default_head_dim or max(1, shape["hidden"] // heads))
    return shape if head_dim * heads == shape["hidden"] else shape | {"head_dim": head_dim}


def _attention(params: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    keys = [key for key in ("heads", "kv_heads", "head_dim") if key in params]
    return {key: f"={key}" for key in keys} | {"causal": True} | more


def _windows(config: Config, params: dict[str, Any], default: Sequence[bool] | bool = False) -> list[Mapping[str, Any]]:
    """For each layer, the options of its attention: a sliding window or none."""
    count = params["layers"]
    window = config.get("sliding_window")
    kinds = config.kinds("layer_types", count)
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
    return [{"window": "=window"} if one else {} for one in slides]


def _gated(config: Config, params: dict[str, Any], *, default: str = "silu", bias: bool = False) -> Entry:
    params["ffn"] = config.integer("intermediate_size")
    return {
        "mlp": {
            "ffn": "=ffn",
            "activation": config.activation("hidden_activation", "hidden_act", default=default, gated=True),
            "bias": bias,
        }
    }


def _llama_like(
    config: Config, *, bias: bool | None = None, out_bias: bool | None = None, slides: Any = False, **more: Any
) -> Model:
    """RMS norms, rotary positions, gated feed-forward blocks."""
    params = _grouped(config, more.pop("head_dim", None))
    tied = config.flag("tie_word_embeddings", more.pop("tied", False))
    feed = more.pop("feed", None)
    options = {"rotary": True} | more.pop("attention", {})
    bias = config.flag("attention_bias") if bias is None else bias
    fed = feed(config, params) if feed else [_gated(config, params, bias=config.flag("mlp_bias"))] * params["layers"]
    windows = _windows(config, params, slides)
    attention = _attention(params, **options, bias=bias, **({} if out_bias in (None, bias) else {"out_bias": out_bias}))
    decoder = Decoder(params, "rms_norm", attention, None, tied=tied, final=("rms_norm",), **more)
    decoder = replace(decoder, params=_vocab_last(params))
    return language_model(config, decoder, list(zip(windows, fed, strict=True)))


def _vocab_last(params: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key != "vocab"} | {"vocab": params["vocab"]}


@FAMILIES.register("llama")
def llama(config: Config) -> Model:
    """Touvron et al., 2023."""
    bias = config.flag("attention_bias")
    return _llama_like(config, bias=bias, out_bias=bias)


@FAMILIES.register("mistral")
def mistral(config: Config) -> Model:
    """Jiang et al., Mistral 7B, 2023: a window on every layer, where the configuration has one."""
    return _llama_like(config, bias=False, slides=True)


@FAMILIES.register("mixtral")
def mixtral(config: Config) -> Model:
    """Jiang et al., Mixtral of experts, 2024."""
    return _llama_like(
        config, bias=False, slides=True, feed=lambda c, p: _experts(c, p, every=True, ffn=("intermediate_size",))
    )


@FAMILIES.register("qwen2")
def qwen2(config: Config) -> Model:
    """Qwen2, 2024: biases of query, key and value only."""
    return _llama_like(config, bias=True, out_bias=False)


@FAMILIES.register("qwen3")
def qwen3(config: Config) -> Model:
    """Qwen3, 2025: norms of queries and keys."""
    return _llama_like(config, head_dim=128, attention={"qk_norm": True})


def _experts(
    config: Config,
    params: dict[str, Any],
    *,
    every: bool = False,
    ffn: tuple[str, ...] = ("moe_intermediate_size",),
    **more: Any,
) -> list[Entry]:
    """A mixture in every layer, or in those that the configuration says; dense blocks in the others."""
    params["experts"] = config.integer("num_local_experts", "num_experts", "n_routed_experts")
    params["top_k"] = config.integer("num_experts_per_tok")
    params["expert_ffn"] = config.integer(*ffn)
    gated = config.activation("hidden_act", default="silu", gated=True)
    mixture = {"moe": {"experts": "=experts", "top_k": "=top_k", "ffn": "=expert_ffn", "activation": gated} | more}
    if every:
        return [mixture] * params["layers"]
    step, alone = config.integer("decoder_sparse_step", default=1), config.get("mlp_only_layers") or []
    dense_first = config.get("first_k_dense_replace") or 0
    if not isinstance(alone, list) or not isinstance(dense_first, int):
        raise SpecError(f"{config.path}: mlp_only_layers must be a list, first_k_dense_replace a whole number")
    sparse = [i >= dense_first and i not in alone and (i + 1) % step == 0 for i in range(params["layers"])]
    dense = None if all(sparse) else _gated(config, params)
    return [mixture if one else dense for one in sparse]


@FAMILIES.register("qwen2_moe")
def qwen2_moe(config: Config) -> Model:
    """Qwen2-MoE, 2024: shared experts behind a gate."""

    def feed(config: Config, params: dict[str, Any]) -> list[Entry]:
        shared = config.integer("shared_expert_intermediate_size")
        return _experts(config, params, shared=1, shared_ffn=shared, shared_gate=True)

    return _llama_like(config, bias=config.flag("qkv_bias", True), out_bias=False, feed=feed)


@FAMILIES.register("qwen3_moe")
def qwen3_moe(config: Config) -> Model:
    """Qwen3-MoE, 2025."""
    return _llama_like(config, attention={"qk_norm": True}, feed=_experts)


@FAMILIES.register("gpt_oss")
def gpt_oss(config: Config) -> Model:
    """OpenAI, gpt-oss, 2025: attention sinks, windows on every other layer, biases everywhere."""

    def feed(config: Config, params: dict[str, Any]) -> list[Entry]:
        return _experts(config, params, every=True, ffn=("intermediate_size",), bias=True, router_bias=True)

    alternate = [index % 2 == 0 for index in range(config.integer("num_hidden_layers"))]
    return _llama_like(
        config,
        bias=config.flag("attention_bias", True),
        head_dim=64,
        slides=alternate,
        feed=feed,
        attention={"sinks": True},
    )


@FAMILIES.register("gemma")
def gemma(config: Config) -> Model:
    """Gemma, 2024: GELU gates, heads of 256, tied embeddings."""
    return _llama_like(config, tied=True, head_dim=256, feed=_gelu_gates)


def _gelu_gates(config: Config, params: dict[str, Any]) -> list[Entry]:
    return [_gated(config, params, default="gelu_pytorch_tanh")] * params["layers"]


@FAMILIES.register("gemma2")
def gemma2(config: Config) -> Model:
    """Gemma 2, 2024: norms before and after each half, windows on every other layer; the soft caps of scores are
    not counted."""
    alternate = [index % 2 == 0 for index in range(config.integer("num_hidden_layers"))]
    notes = "The soft cap of scores and logits is left out."
    return _llama_like(
        config, tied=True, head_dim=256, feed=_gelu_gates, residual="sandwich", slides=alternate, notes=notes
    )


@FAMILIES.register("gemma3_text")
def gemma3(config: Config) -> Model:
    """Gemma 3, 2025: five layers with a window, then one without."""
    period = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    slides = [(index + 1) % period != 0 for index in range(config.integer("num_hidden_layers"))]
    extra = {"qk_norm": True}
    return _llama_like(
        config, tied=True, head_dim=256, feed=_gelu_gates, residual="sandwich", slides=slides, attention=extra
    )


@FAMILIES.register("phi3")
def phi3(config: Config) -> Model:
    """Phi-3, 2024: as Llama."""
    return _llama_like(config, bias=False, slides=True)


@FAMILIES.register("phi")
def phi(config: Config) -> Model:
    """Phi-1 and 2, 2023: attention and feed-forward side by side behind one layer norm."""
    params = _grouped(config) | {"ffn": config.integer("intermediate_size", default=4 * config.integer("hidden_size"))}
    if config.flag("qk_layernorm"):
        raise SpecError(f"{config.path}: qk_layernorm: true is not supported; expected false")
    feed = _plain_feed(config, "gelu_new")
    attention = _attention(params, rotary=True)
    decoder = Decoder(
        _vocab_last(params),
        "layer_norm",
        attention,
        feed,
        "parallel",
        final=("layer_norm",),
        head_bias=True,
        tied=config.flag("tie_word_embeddings"),
    )
    return language_model(config, decoder, [({}, feed)] * params["layers"])


def _plain_feed(config: Config, default: str, *keys: str, bias: bool = True) -> Entry:
    function = config.activation(*(keys or ("hidden_act",)), default=default)
    return {"mlp": {"ffn": "=ffn", "activation": function, "bias": bias}}


@FAMILIES.register("gpt2")
def gpt2(config: Config) -> Model:
    """Radford et al., 2019."""
    params = _shape(
        config, positions=config.integer("n_positions", "max_position_embeddings", default=LONGEST_SEQ // 4)
    )
    params["ffn"] = config.integer("n_inner", default=4 * params["hidden"])
    params["dropout"] = config.share("resid_pdrop", default=0.1)
    feed = _plain_feed(config, "gelu_new", "activation_function")
    positions = {"position_embedding": {"positions": "=max(positions, seq)"}}
    attention = _attention(params, dropout=config.share("attn_pdrop", default=0.1))
    decoder = Decoder(
        _vocab_last(params),
        "layer_norm",
        attention,
        feed,
        dropout=True,
        final=("layer_norm",),
        before=(positions, {"dropout": {"rate": config.share("embd_pdrop", default=0.1)}}),
        tied=config.flag("tie_word_embeddings", True),
    )
    return language_model(config, decoder, [({}, feed)] * params["layers"])


@FAMILIES.register("gpt_neox")
def gpt_neox(config: Config) -> Model:
    """Black et al., GPT-NeoX-20B, 2022: both halves side by side, each with its norm."""
    params = _shape(config) | {"ffn": config.integer("intermediate_size")}
    dropout = config.share("hidden_dropout")
    params |= {"dropout": dropout} if dropout else {}
    feed = _plain_feed(config, "gelu")
    attention = _attention(
        params, rotary=True, bias=config.flag("attention_bias", True), dropout=config.share("attention_dropout")
    )
    residual = "twin" if config.flag("use_parallel_residual", True) else "pre"
    decoder = Decoder(
        _vocab_last(params),
        "layer_norm",
        attention,
        feed,
        residual,
        final=("layer_norm",),
        dropout=bool(dropout),
        tied=config.flag("tie_word_embeddings"),
    )
    return language_model(config, decoder, [({}, feed)] * params["layers"])


@FAMILIES.register("opt")
def opt(config: Config) -> Model:
    """Zhang et al., OPT, 2022: two rows more than positions; the 350M model embeds narrower than it is and norms
    after each half."""
    params = _shape(config, positions=config.integer("max_position_embeddings", default=2048))
    params |= {
        "ffn": config.integer("ffn_dim", default=4 * params["hidden"]),
        "dropout": config.share("dropout", default=0.1),
    }
    embedded = config.integer("word_embed_proj_dim", default=params["hidden"])
    first = config.flag("do_layer_norm_before", True)
    norm: Entry = "layer_norm"
    if not config.flag("layer_norm_elementwise_affine", True):
        norm = {"layer_norm": {"affine": False}}
    bias = config.flag("enable_bias", True)
    feed = _plain_feed(config, "relu", "activation_function", bias=bias)
    positions: Entry = {"position_embedding": {"positions": "=max(positions, seq) + 2"}}
    narrow = embedded != params["hidden"]
    widen, shrink = ({"linear": {"features": one, "dim": "hidden", "bias": False}} for one in ("=hidden", "=embedded"))
    params |= {"embedded": embedded} if narrow else {}
    decoder = Decoder(
        _vocab_last(params),
        norm,
        _attention(params, bias=bias, dropout=config.share("attention_dropout")),
        feed,
        "pre" if first else "post",
        dropout=True,
        before=(*([widen] if narrow else []), positions),
        final=(
            *([norm] if first and not config.flag("_remove_final_layer_norm") else []),
            *([shrink] if narrow else []),
        ),
        tied=config.flag("tie_word_embeddings", True),
        embedding="=embedded" if narrow else "=hidden",
    )
    return language_model(config, decoder, [({}, feed)] * params["layers"])


@FAMILIES.register("bloom")
def bloom(config: Config) -> Model:
    """BigScience, BLOOM, 2022: ALiBi, a norm behind the embedding."""
    params = _shape(config) | {"ffn": 4 * config.integer("hidden_size", "n_embed")}
    dropout = config.share("hidden_dropout")
    params |= {"dropout": dropout} if dropout else {}
    feed: Entry = {"mlp": {"ffn": "=ffn", "activation": "gelu"}}
    decoder = Decoder(
        _vocab_last(params),
        "layer_norm",
        _attention(params, dropout=config.share("attention_dropout")),
        feed,
        before=("layer_norm",),
        final=("layer_norm",),
        dropout=bool(dropout),
        tied=config.flag("tie_word_embeddings", True),
        notes="The linear biases of ALiBi ride on the scores.",
    )
    return language_model(config, decoder, [({}, feed)] * params["layers"])


@FAMILIES.register("falcon")
def falcon(config: Config) -> Model:
    """Almazrouei et al., Falcon, 2023: multi-query or grouped, both halves side by side, biases only where stated."""
    new, parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn", True)
    heads = config.integer("num_attention_heads", "n_head")
    kv_heads = (
        config.integer("num_kv_heads", default=heads) if new else 1 if config.flag("multi_query", True) else heads
    )
    params = _shape(config, kv_heads=kv_heads)
    params["ffn"] = config.integer("ffn_hidden_size", default=4 * params["hidden"])
    bias = config.flag("bias")
    feed = _plain_feed(config, "gelu", "activation", bias=bias)
    rotary = not config.flag("alibi")
    norms = config.get("num_ln_in_parallel_attn") or (2 if new else 1)
    residual = "pre" if not parallel and not new else "twin" if new and norms == 2 else "parallel"
    attention = _attention(params, rotary=rotary, bias=bias, dropout=config.share("attention_dropout"))
    decoder = Decoder(
        _vocab_last(params),
        "layer_norm",
        attention,
        feed,
        residual,
        final=("layer_norm",),
        tied=config.flag("tie_word_embeddings", True),
    )
    return language_model(config, decoder, [({}, feed)] * params["layers"])


@FAMILIES.register("deepseek_v2")
def deepseek_v2(config: Config) -> Model:
    """DeepSeek-AI, DeepSeek-V2, 2024: latent attention, shared and routed experts, dense layers first."""
    shared = config.get("n_shared_experts")
    params = _shape(config)
    mla: dict[str, Any] = {"heads": "=heads"}
    if config.get("q_lora_rank") is not None:
        mla["query_rank"] = config.integer("q_lora_rank")
    keys = {
        "kv_rank": "kv_lora_rank",
        "nope_dim": "qk_nope_head_dim",
        "rope_dim": "qk_rope_head_dim",
        "value_dim": "v_head_dim",
    }
    mla |= {ours: config.integer(theirs) for ours, theirs in keys.items()}
    more: dict[str, Any] = {"shared": config.integer("n_shared_experts")} if shared else {}
    feeds = _experts(config, params, **more)
    notes = "Modules for multi-token prediction and the load-balancing bias of the router (not trained) are left out."
    decoder = Decoder(
        _vocab_last(params),
        "rms_norm",
        mla,
        None,
        final=("rms_norm",),
        tied=config.flag("tie_word_embeddings"),
        attention_kind="latent_attention",
        notes=notes,
    )
    return language_model(config, decoder, [({}, feed) for feed in feeds])


FAMILIES.register("deepseek_v3")(deepseek_v2)


# Encoders, and the pair of both.


def _encoder_blocks(*, dropout: bool = True) -> Entry:
    """Post-norm layers of BERT."""
    drop = [{"dropout": {"rate": "=dropout"}}] if dropout else []
    halves = [_residual({"attention": {"heads": "=heads", "dropout": "=attention_dropout"}}, *drop), "layer_norm"]
    halves += [_residual({"mlp": {"ffn": "=ffn", "activation": "=activation"}}, *drop), "layer_norm"]
    return {"repeat": "=layers", "name": "block", "layers": halves}


def _bert_head(config: Config, kind: str) -> list[Entry]:
    """What stands on the encoder, by the architecture that the configuration names."""
    roberta = config["model_type"] == "roberta"
    pooler = ["select", {"name": "pooler", "linear": {"features": "=hidden", "dim": "hidden"}}, "tanh"]
    masked: list[Entry] = [
        {"name": "transform", "linear": {"features": "=hidden", "dim": "hidden"}},
        "=activation",
        "layer_norm",
    ]
    masked[1] = "gelu" if roberta else config.activation("hidden_act", default="gelu")
    tie = {"tie": "embed"} if config.flag("tie_word_embeddings", True) else {}
    masked += [{"name": "head", "linear": {"features": "=vocab", "dim": "vocab"} | tie}, "cross_entropy"]
    labels = {"linear": {"features": _labels(config), "dim": "classes"}}
    rest: dict[str, list[Entry]] = {
        "ForMaskedLM": masked,
        "ForPreTraining": [
            {"name": "encoded", "identity": {}},
            *pooler,
            {"name": "next_sentence", "linear": {"features": 2}},
            "cross_entropy",
            {"name": "masked", "inputs": ["encoded"], "identity": {}},
            *masked,
        ],
        "ForSequenceClassification": [*pooler, {"dropout": {"rate": "=dropout"}}, labels, "cross_entropy"],
        "ForTokenClassification": [{"dropout": {"rate": "=dropout"}}, labels, "cross_entropy"],
        "Model": pooler,
    }
    if kind not in rest or (roberta and kind == "ForPreTraining"):
        raise SpecError(
            f"{config.path}: architectures: {kind!r:.60} is not supported; expected one of {', '.join(rest)}"
        )
    return rest[kind]


def _labels(config: Config) -> int:
    names = config.get("id2label")
    return max(1, len(names)) if isinstance(names, Mapping) else config.integer("num_labels", default=2)


def _architecture(config: Config, prefixes: Sequence[str], default: str) -> str:
    """``ForMaskedLM`` of ``BertForMaskedLM``."""
    named = config.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        return default
    return next((named[0].removeprefix(one) for one in prefixes if named[0].startswith(one)), named[0])


@FAMILIES.register("bert")
def bert(config: Config) -> Model:
    """Devlin et al., BERT, 2019; Liu et al., RoBERTa, 2019. Every position is projected to the vocabulary."""
    params = _shape(
        config,
        ffn=config.integer("intermediate_size"),
        positions=config.integer("max_position_embeddings", default=512),
    )
    spare = 2 if config["model_type"] == "roberta" else 0
    params["seq"] = max(1, params["positions"] - spare) if params["positions"] <= LONGEST_SEQ else LONGEST_SEQ
    params["dropout"] = config.share("hidden_dropout_prob", default=0.1)
    params["attention_dropout"] = config.share("attention_probs_dropout_prob", default=0.1)
    params["activation"] = config.activation("hidden_act", default="gelu")
    index = {"dims": {"batch": "=batch", "seq": "=seq"}, "role": "index"}
    kinds = {"entries": config.integer("type_vocab_size", default=2), "features": "=hidden", "rows": "kinds"}
    embed: list[Entry] = [
        {"name": "embed", "embedding": {"entries": "=vocab", "features": "=hidden"}},
        {"name": "segment", "inputs": ["segments"], "embedding": kinds},
        {"inputs": ["embed", "segment"], "add": {}},
        {"position_embedding": {"positions": f"=max(positions, seq + {spare})" if spare else "=max(positions, seq)"}},
        "layer_norm",
        {"dropout": {"rate": "=dropout"}},
    ]
    kind = _architecture(config, ("Bert", "Roberta"), "ForMaskedLM")
    return {
        "task": "masked language modelling" if kind in ("ForMaskedLM", "ForPreTraining") else "text classification",
        "notes": "Every position is projected to the vocabulary, as the library does." if "M" in kind else "",
        "params": _vocab_last(params),
        "tokens": "=seq",
        "inputs": {"tokens": index, "segments": index},
        "layers": [*embed, _encoder_blocks(), *_bert_head(config, kind)],
    }


@FAMILIES.register("roberta")
def roberta(config: Config) -> Model:
    """As BERT, with a head of its own for sequences."""
    model = bert(config)
    if _architecture(config, ("Roberta",), "ForMaskedLM") == "ForSequenceClassification":
        drop = {"dropout": {"rate": "=dropout"}}
        head = ["select", drop, {"name": "dense", "linear": {"features": "=hidden", "dim": "hidden"}}, "tanh", drop]
        start = model["layers"].index("select")
        model["layers"][start:] = [*head, {"linear": {"features": _labels(config), "dim": "classes"}}, "cross_entropy"]
    return model


@FAMILIES.register("vit")
def vit(config: Config) -> Model:
    """Dosovitskiy et al., ViT, 2021."""
    kind = _architecture(config, ("ViT",), "ForImageClassification")
    if kind not in ("ForImageClassification", "Model"):
        raise SpecError(
            f"{config.path}: architectures: {kind!r:.60} is not supported; expected ViTForImageClassification, ViTModel"
        )
    keys = {"image": "image_size", "patch": "patch_size", "colours": "num_channels", "hidden": "hidden_size"}
    keys |= {"heads": "num_attention_heads", "layers": "num_hidden_layers", "ffn": "intermediate_size"}
    usual = {"colours": 3, "image": 224, "patch": 16}
    params: dict[str, Any] = {ours: config.integer(theirs, default=usual.get(ours)) for ours, theirs in keys.items()}
    params["classes"] = _labels(config)
    bias = config.flag("qkv_bias", True)
    attention: dict[str, Any] = {"heads": "=heads"} | ({} if bias else {"bias": False, "out_bias": True})
    feed = {"mlp": {"ffn": "=ffn", "activation": config.activation("hidden_act", default="gelu")}}
    head: list[Entry] = ["select", {"name": "pooler", "linear": {"features": "=hidden", "dim": "hidden"}}, "tanh"]
    if kind == "ForImageClassification":
        head = ["select", {"name": "head", "linear": {"features": "=classes", "dim": "classes"}}, "cross_entropy"]
    body = {"repeat": "=layers", "name": "block"}
    layers = [_residual("layer_norm", {"attention": attention}), _residual("layer_norm", feed)]
    patches = {"name": "patches", "conv": {"channels": "=hidden", "kernel": "=patch", "stride": "=patch"}}
    image = {"batch": "=batch", "channels": "=colours", "height": "=image", "width": "=image"}
    return {
        "task": "image classification",
        "notes": "",
        "params": params,
        "inputs": {"image": {"dims": image}},
        "layers": [
            patches,
            "to_sequence",
            "class_token",
            "position_embedding",
            body | {"layers": layers},
            "layer_norm",
            *head,
        ],
    }


@FAMILIES.register("t5")
def t5(config: Config) -> Model:
    """Raffel et al., T5, 2020: encoder and decoder; learned biases of the scores by distance, one table for each."""
    if _architecture(config, ("T5", "MT5"), "ForConditionalGeneration") not in (
        "ForConditionalGeneration",
        "WithLMHeadModel",
    ):
        raise SpecError(f"{config.path}: architectures: only T5ForConditionalGeneration is supported")
    source = {"dims": {"batch": "=batch", "source_seq": "=seq"}, "role": "index"}
    target = {"dims": {"batch": "=batch", "seq": "=target_seq"}, "role": "index"}
    return {
        "task": "translation",
        "notes": "A sample is a source and a target of equal length; tokens are those of the target.",
        "params": _t5_params(config),
        "tokens": "=target_seq",
        "inputs": {"source": source, "target": target},
        "layers": _t5_layers(config),
    }


def _t5_params(config: Config) -> dict[str, Any]:
    layers = config.integer("num_layers", default=6)
    return {
        "seq": 512,
        "target_seq": "=seq",
        "hidden": config.integer("d_model"),
        "heads": config.integer("num_heads"),
        "head_dim": config.integer("d_kv"),
        "layers": layers,
        "decoder_layers": config.integer("num_decoder_layers", default=layers),
        "ffn": config.integer("d_ff"),
        "buckets": config.integer("relative_attention_num_buckets", default=32),
        "vocab": config.integer("vocab_size"),
        "dropout": config.share("dropout_rate", default=0.1),
    }


def _t5_layers(config: Config) -> list[Entry]:
    drop = {"dropout": {"rate": "=dropout"}}
    attention = {"heads": "=heads", "head_dim": "=head_dim", "bias": False, "dropout": "=dropout"}
    bias = {"relative_bias": {"buckets": "=buckets", "heads": "=heads"}}
    seen = _residual("rms_norm", {"attention": attention}, drop)
    own = _residual("rms_norm", {"attention": attention | {"causal": True}}, drop)
    cross = {"inputs": ["query", "memory"], "attention": attention}
    other = _residual({"name": "query", "rms_norm": {}}, cross, drop)
    feed = _residual("rms_norm", _t5_feed(config), drop)
    table: dict[str, Any] = {"entries": "=vocab", "features": "=hidden"}
    head: dict[str, Any] = {"features": "=vocab", "dim": "vocab", "bias": False}
    head |= {"tie": "embed"} if config.flag("tie_word_embeddings", True) else {}
    encoder = {"repeat": "=layers", "name": "encoder", "layers": [seen, feed]}
    decoder = {"repeat": "=decoder_layers", "name": "decoder", "layers": [own, other, feed]}
    first = {"name": "embed", "inputs": ["source"], "embedding": table}
    second = {"name": "target_embed", "inputs": ["target"], "embedding": table | {"tie": "embed"}}
    last = [{"name": "head", "linear": head}, "cross_entropy"]
    memory = {"name": "memory", **drop}
    return [first, drop, bias, encoder, "rms_norm", memory, second, drop, bias, decoder, "rms_norm", drop, *last]


def _t5_feed(config: Config) -> Entry:
    """Plain, or with a gate (T5 1.1)."""
    stated = str(config.get("feed_forward_proj") or "relu")
    words = Config({"feed_forward_proj": stated.removeprefix("gated-")}, config.path)
    function = words.activation("feed_forward_proj", default="relu", gated=stated.startswith("gated-"))
    return {"mlp": {"ffn": "=ffn", "activation": function, "bias": False, "dropout": "=dropout"}}


FAMILIES.register("mt5")(t5)
