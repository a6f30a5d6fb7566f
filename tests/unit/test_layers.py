"""Every layer type on a small case: shape, parameters, FLOP, bytes and saved activations, each worked by hand.

Bytes are those of fp32. ``image`` has 96 elements (384 B), ``sequence`` 80 (320 B), ``vector`` 16 (64 B).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from pydantic import ValidationError

from paleo.errors import GraphError, SpecError
from paleo.layers.base import ACTIVATIONS, LAYERS, LayerImplementations, LayerOperations
from paleo.network.graph import build_graph
from paleo.operations.base import Kernel, Operation, map_tensors, parameters_by_name
from paleo.operations.contraction import Contraction, Recurrence
from paleo.operations.tensor import Tensor, default_precision, with_autocast_weights
from paleo.specs.model import build_model_spec

FP32 = default_precision("fp32")
IMAGE = Tensor("x", ("batch", "channels", "height", "width"), (2, 3, 4, 4))
SMALL = Tensor("y", ("batch", "channels", "height", "width"), (2, 3, 1, 1))
PAIR = Tensor("y", ("batch", "channels", "height", "width"), (2, 2, 4, 4))
SEQUENCE = Tensor("x", ("batch", "seq", "hidden"), (2, 5, 8))
STREAMS = Tensor("x", ("batch", "seq", "streams", "hidden"), (2, 5, 3, 8))
MEMORY = Tensor("y", ("batch", "seq", "hidden"), (2, 3, 8))
VECTOR = Tensor("x", ("batch", "features"), (2, 8))
OTHER = Tensor("y", ("batch", "features"), (2, 8))
WORDS = Tensor("x", ("batch", "seq"), (2, 5), "index", needs_gradient=False)
CLICKS = Tensor("x", ("batch",), (2,), "index", needs_gradient=False)
CATEGORIES = Tensor("x", ("samples", "categories"), (2, 2), "index", needs_gradient=False)
BOXES = Tensor("y", ("batch", "regions", "box"), (2, 3, 4), "statistic", needs_gradient=False)


@dataclass(frozen=True)
class Case:
    """One layer on given inputs: bytes ``moved`` by its forward pass, and ``saved`` until its backward pass."""

    kind: str
    inputs: tuple[Tensor, ...]
    out: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    flops: float = 0.0
    backward: float = 0.0
    saved: float = 0.0
    moved: float = 0.0

    def __str__(self) -> str:
        return "-".join([self.kind, *(f"{key}={value}" for key, value in self.options.items())])


def expand(
    kind: str, inputs: tuple[Tensor, ...], options: dict[str, Any], choices: LayerImplementations | None = None
) -> LayerOperations:
    return LAYERS[kind].model_validate(options).to_operations("layer", inputs, choices or LayerImplementations())


def forward(operations: Iterable[Operation], dtype: str = "fp32") -> list[Kernel]:
    return [kernel for op in operations for kernel in op.forward_kernels(default_precision(dtype))]


def backward(operations: Iterable[Operation], dtype: str = "fp32") -> list[Kernel]:
    return [kernel for op in operations for kernel in op.backward_kernels(default_precision(dtype))]


def moved(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.bytes for kernel in kernels)


def saved_bytes(operations: Iterable[Operation], dtype: str = "fp32") -> float:
    """Each storage once, whoever keeps it."""
    return sum({t.name: t.bytes(default_precision(dtype)) for op in operations for t in op.saved_tensors}.values())


CASES = [
    # a 3 x 3 window over 16 positions: weight 6·3·9 = 162, and 6 biases
    Case(
        "conv", (IMAGE,), (2, 6, 4, 4), {"channels": 6, "kernel": 3, "padding": 1}, 168,
        2 * (2 * 6 * 16) * 27, 4 * (2 * 6 * 16) * 27, 384, 384 + 4 * 168 + 4 * 192,
    ),
    # one position, each output channel sees the one input channel of its group
    Case(
        "conv", (IMAGE,), (2, 6, 1, 1), {"channels": 6, "kernel": 3, "stride": 2, "groups": 3, "bias": False}, 54,
        2 * 12 * 9, 4 * 12 * 9, 384, 384 + 4 * 54 + 4 * 12,
    ),
    Case(
        "conv", (IMAGE,), (2, 3, 2, 2),
        {"channels": 3, "kernel": 3, "stride": 2, "padding": "same", "groups": "depthwise", "bias": False}, 27,
        2 * 24 * 9, 4 * 24 * 9, 384, 384 + 4 * 27 + 4 * 24,
    ),
    # every input element reaches 2 channels x 4 taps; weight 3·2·4 = 24, and 2 biases
    Case(
        "transposed_conv", (IMAGE,), (2, 2, 8, 8), {"channels": 2, "kernel": 2, "stride": 2}, 26,
        2 * 96 * 8, 4 * 96 * 8, 384, 384 + 4 * 26 + 4 * 256,
    ),
    Case("linear", (SEQUENCE,), (2, 5, 6), {"features": 6}, 54, 2 * 10 * 48, 4 * 10 * 48, 320, 320 + 4 * 54 + 4 * 60),
    # 1 row for each of 2 matrices of 8 x 6
    Case("grouped_linear", (VECTOR,), (2, 6), {"groups": 2, "features": 6}, 96, 192, 384, 64, 64 + 4 * 96 + 48),
    # keeps x, the input of the GELU (160 elements) and its output
    Case(
        "mlp", (SEQUENCE,), (2, 5, 8), {"ffn": 16}, 8 * 16 + 16 + 16 * 8 + 8,
        2 * 10 * 256, 4 * 10 * 256, 320 + 640 + 640, (320 + 4 * 144 + 640) + 1280 + (640 + 4 * 136 + 320),
    ),
    # keeps x, gate and partner (320 elements) and their product (160)
    Case(
        "mlp", (SEQUENCE,), (2, 5, 8), {"ffn": 16, "activation": "swiglu", "bias": False}, 3 * 128,
        2 * 10 * 384, 4 * 10 * 384, 320 + 1280 + 640, (320 + 1024 + 1280) + (1280 + 640) + (640 + 512 + 320),
    ),
    # dropout on the hidden layer: a mask of 160 bytes; the down projection keeps what is left
    Case(
        "mlp", (SEQUENCE,), (2, 5, 8), {"ffn": 16, "activation": "relu", "bias": False, "dropout": 0.1}, 256,
        2 * 10 * 256, 4 * 10 * 256, 320 + 640 + 160 + 640, (320 + 512 + 640) + 1280 + (1280 + 160) + (640 + 512 + 320),
    ),
    # 2 heads of 4: 100 scores, each 2·4 for q·k and 2·4 for p·v; five such products in backward.
    # keeps x; q, k, v; the context; 20 log-sum-exps
    Case(
        "attention", (SEQUENCE,), (2, 5, 8), {"heads": 2}, 8 * 24 + 24 + 64 + 8,
        2 * 10 * 192 + 100 * 16 + 2 * 10 * 64, 4 * 10 * 192 + 100 * 40 + 4 * 10 * 64, 320 + 960 + 320 + 80,
        (320 + 4 * 216 + 960) + (960 + 320 + 80) + (320 + 4 * 72 + 320),
    ),
    # one key and value head: 8 + 4 + 4 columns; scores as before
    Case(
        "attention", (SEQUENCE,), (2, 5, 8), {"heads": 2, "kv_heads": 1, "bias": False, "causal": True}, 8 * 16 + 64,
        2 * 10 * 128 + 1600 + 2 * 10 * 64, 4 * 10 * 128 + 4000 + 4 * 10 * 64, 320 + 640 + 320 + 80,
        (320 + 512 + 640) + (640 + 320 + 80) + (320 + 256 + 320),
    ),
    # a window of 2 keys leaves 40 scores
    Case(
        "attention", (SEQUENCE,), (2, 5, 8), {"heads": 2, "bias": False, "causal": True, "window": 2}, 256,
        2 * 10 * 256 + 40 * 16, 4 * 10 * 256 + 40 * 40, 320 + 960 + 320 + 80,
        (320 + 768 + 960) + (960 + 320 + 80) + (320 + 256 + 320),
    ),
    # 3 keys come from a second input: 60 scores
    Case(
        "attention", (SEQUENCE, MEMORY), (2, 5, 8), {"heads": 2, "bias": False}, 64 + 128 + 64,
        2 * 10 * 64 + 2 * 6 * 128 + 60 * 16 + 2 * 10 * 64, 4 * 10 * 64 + 4 * 6 * 128 + 60 * 40 + 4 * 10 * 64,
        320 + 192 + 320 + 2 * 192 + 320 + 80,
        (320 + 256 + 320) + (192 + 512 + 384) + (320 + 384 + 320 + 80) + (320 + 256 + 320),
    ),
    # query 8→4→2·6, keys and values 8→3 (+ 2 rotary)→2·(4 + 4); 100 scores of 6 + 4; backward 3·6 + 2·4.
    # keeps x, both latents before and after their norm, rotated q and k, v, context, log-sum-exp
    Case(
        "latent_attention", (SEQUENCE,), (2, 5, 8),
        {"heads": 2, "query_rank": 4, "kv_rank": 3, "nope_dim": 4, "rope_dim": 2, "value_dim": 4},
        32 + 4 + 48 + 40 + 3 + 48 + 64, 2 * 10 * 232 + 2 * 100 * 10, 4 * 10 * 232 + 2 * 100 * 26,
        320 + 160 + 160 + 120 + 120 + 480 + 480 + 320 + 320 + 80,
        (320 + 128 + 160) + (160 + 16 + 160) + (160 + 192 + 480) + (320 + 160 + 200) + (120 + 12 + 120)
        + (120 + 192 + 640) + 2 * 960 + (480 + 480 + 320 + 320 + 80) + (320 + 256 + 320),
    ),
    # W·query, U·key, 30 pairs of 4, scores and context; keeps query, memory, the tanh of every pair, the weights
    Case(
        "additive_attention", (SEQUENCE, MEMORY), (2, 5, 8), {"hidden": 4}, 32 + 32 + 4,
        2 * 10 * 32 + 2 * 6 * 32 + 2 * 120 + 2 * 30 * 8, 4 * 10 * 32 + 4 * 6 * 32 + 4 * 120 + 4 * 30 * 8,
        320 + 192 + 480 + 120,
        (320 + 128 + 160) + (192 + 128 + 96) + (160 + 96 + 480) + (480 + 16 + 120) + 240 + (120 + 192 + 320),
    ),
    # 10 tokens, 2 of 4 experts each: 20 rows through 3 weights of 48; keeps x, scores, the rows sent, gate and partner,
    # their product; probabilities are applied inside, so that the rows that come back are not kept
    Case(
        "moe", (SEQUENCE,), (2, 5, 8), {"experts": 4, "top_k": 2, "ffn": 6}, 32 + 4 * 144,
        2 * 10 * 32 + 2 * 20 * 144, 4 * 10 * 32 + 4 * 20 * 144, 320 + 160 + 640 + 960 + 480,
        (320 + 128 + 160) + (160 + 160) + (320 + 640) + (640 + 1536 + 960) + (960 + 480)
        + (480 + 768 + 640) + (640 + 160 + 320),
    ),
    # weights 8·18 and 6·18, two bias vectors of 18; keeps x, gates, states
    Case(
        "gru", (SEQUENCE,), (2, 5, 6), {"hidden": 6}, 144 + 108 + 36,
        2 * 10 * 252, 4 * 10 * 252, 320 + 720 + 240, (320 + 4 * 180 + 720) + (720 + 432 + 240),
    ),
    # keeps the cell states too
    Case(
        "lstm", (SEQUENCE,), (2, 5, 6), {"hidden": 6, "biases": 1}, 192 + 144 + 24,
        2 * 10 * 336, 4 * 10 * 336, 320 + 960 + 240 + 240, (320 + 4 * 216 + 960) + (960 + 576 + 240 + 240),
    ),
    Case(
        "rnn", (SEQUENCE,), (2, 5, 12), {"hidden": 6, "bidirectional": True, "biases": 0}, 2 * (48 + 36),
        2 * 10 * 168, 4 * 10 * 168, 320 + 480 + 480, (320 + 384 + 480) + (480 + 288 + 480),
    ),
    # two groups of two heads of 2, 3 states: 16 features a group in, 8 to 8 out, convolution of 10 by 4 and a bias a
    # group, three vectors of 4, norm of 8; scores, what is added, within and across: 600 + 480 + 800 + 480 FLOP, thrice
    # backward
    Case(
        "mamba2", (SEQUENCE,), (2, 5, 8), {"heads": 4, "head_dim": 2, "groups": 2, "state": 3, "chunk": 5},
        256 + 64 + 100 + 12 + 8, 6400 + 2360, 2 * 6400 + 3 * 2360,
        320 + 800 + (320 + 240 + 240 + 160) + 3 * 320,
        2624 + 2000 + (320 + 2 * 240 + 160 + 3 * 16 + 320) + 992 + 896,
    ),
    # no more than the 56 entries of the table move
    Case("embedding", (WORDS,), (2, 5, 8), {"entries": 7, "features": 8}, 56, saved=80, moved=80 + 224 + 320),
    Case("embedding", (WORDS,), (2, 5, 8), {"entries": 70, "features": 8}, 560, saved=80, moved=80 + 320 + 320),
    # 8 of the 10 words in a table of 6 x 8, two in one of 40 x 4; 8 -> 8 and 4 -> 8
    Case(
        "adaptive_embedding", (WORDS,), (2, 5, 8),
        {"sizes": [6, 40], "shares": [0.8, 0.2], "narrowing": 2, "features": 8}, 48 + 160 + 64 + 32,
        2 * (8 * 64 + 2 * 32), 4 * (8 * 64 + 2 * 32), 80 + 256 + 32,
        (64 + 192 + 256) + (256 + 256 + 256) + (16 + 32 + 32) + (32 + 128 + 64),
    ),
    # all ten states to the cluster, 8 -> 8 -> 6 words; two of them 8 -> 4 -> 40 words
    Case(
        "adaptive_softmax", (SEQUENCE,), (2, 5), {"sizes": [6, 40], "shares": [0.8, 0.2], "narrowing": 2},
        9 + 64 + 54 + 32 + 200, 2 * (10 * (8 + 64 + 48) + 2 * (32 + 160)), 4 * (10 * (8 + 64 + 48) + 2 * (32 + 160)),
        320 + 320 + 240 + 64 + 32 + 320,
        (320 + 36 + 40) + (320 + 256 + 320) + (320 + 216 + 240) + (240 + 240 + 40)
        + (64 + 64) + (64 + 128 + 32) + (32 + 800 + 320) + (320 + 320 + 8),
    ),
    # 2 samples x 2 tables x 3 rows of 4 are read, their sums written
    Case(
        "embedding_bag", (CLICKS,), (2, 2, 4), {"entries": [30, 40], "features": 4, "bag": 3}, 280,
        saved=16, moved=16 + 192 + 64,
    ),
    # 4 vectors: 16 dot products of 8, of which 6 go on with the dense 8
    Case(
        "dot_interaction", (VECTOR, Tensor("y", ("batch", "tables", "features"), (2, 3, 8))), (2, 14), {}, 0,
        2 * 2 * 16 * 8, 4 * 2 * 16 * 8, 256, (64 + 192 + 256) + (256 + 256 + 128) + (48 + 64 + 112),
    ),
    Case("batch_norm", (IMAGE,), (2, 3, 4, 4), {}, 6, saved=384 + 12, moved=384 + 24 + 384 + 12),
    Case("batch_norm", (IMAGE,), (2, 3, 4, 4), {"affine": False}, 0, saved=384 + 12, moved=384 + 384 + 12),
    Case("layer_norm", (SEQUENCE,), (2, 5, 8), {}, 16, saved=320 + 40, moved=320 + 64 + 320 + 40),
    Case("rms_norm", (SEQUENCE,), (2, 5, 8), {}, 8, saved=320 + 40, moved=320 + 32 + 320 + 40),
    Case("group_norm", (IMAGE,), (2, 3, 4, 4), {"groups": 3}, 6, saved=384 + 24, moved=384 + 24 + 384 + 24),
    Case("local_response_norm", (IMAGE,), (2, 3, 4, 4), {}, saved=3 * 384, moved=3 * 384),
    *(Case(name, (VECTOR,), (2, 8), saved=64, moved=128) for name in ACTIVATIONS),
    Case("dropout", (VECTOR,), (2, 8), saved=16, moved=64 + 64 + 16),
    Case("dropout", (VECTOR,), (2, 8), {"rate": 0}),
    Case("add", (VECTOR, OTHER), (2, 8), moved=3 * 64),
    Case("multiply", (IMAGE, SMALL), (2, 3, 4, 4), saved=384 + 24, moved=384 + 24 + 384),
    Case("concat", (IMAGE, PAIR), (2, 5, 4, 4), moved=2 * 640),
    Case("identity", (VECTOR,), (2, 8)),
    Case("detach", (VECTOR,), (2, 8)),
    Case("flatten", (IMAGE,), (2, 48)),
    Case("reshape", (IMAGE,), (2, 6, 8), {"dims": {"rows": 6, "columns": 8}}),
    Case("to_sequence", (IMAGE,), (2, 16, 3), moved=2 * 384),
    Case("spectrogram_to_sequence", (IMAGE,), (2, 4, 12), moved=2 * 384),
    Case("select", (SEQUENCE,), (2, 8), moved=2 * 64),
    Case("take", (SEQUENCE,), (2, 2, 8), {"count": 2}, moved=2 * 128),
    Case("mean", (SEQUENCE,), (2, 8), moved=320 + 64),
    Case("upsample", (IMAGE,), (2, 3, 8, 8), moved=384 + 1536),
    Case("crop", (IMAGE,), (2, 3, 2, 2), {"size": 2}, moved=2 * 96),
    Case("crop", (IMAGE, SMALL), (2, 3, 1, 1), moved=2 * 24),
    Case("class_token", (SEQUENCE,), (2, 6, 8), {}, 8, moved=320 + 32 + 384),
    Case("position_embedding", (SEQUENCE,), (2, 5, 8), {}, 40, moved=320 + 160 + 320),
    Case("scale", (SEQUENCE,), (2, 5, 8), {}, 8, saved=320, moved=320 + 32 + 320),
    # one int64 index for each of the 24 outputs
    Case("max_pool", (IMAGE,), (2, 3, 2, 2), {"kernel": 2}, saved=192, moved=384 + 96 + 192),
    Case("max_pool", (IMAGE,), (2, 3, 2, 2), {"kernel": 3, "stride": 2, "ceil": True}, saved=192, moved=384 + 96 + 192),
    Case("avg_pool", (IMAGE,), (2, 3, 2, 2), {"kernel": 2}, moved=384 + 96),
    Case("global_pool", (IMAGE,), (2, 3), moved=384 + 24),
    Case("global_pool", (IMAGE,), (2, 3, 1, 1), {"keep_space": True, "operation": "max"}, saved=48, moved=456),
    Case("adaptive_avg_pool", (IMAGE,), (2, 3, 2, 2), {"size": 2}, moved=384 + 96),
    Case("softmax", (VECTOR,), (2, 8), saved=64, moved=128),
    Case("cross_entropy", (VECTOR,), (2,), saved=64, moved=64 + 64 + 8),
    Case("cross_entropy", (IMAGE,), (2, 4, 4), {"dim": "channels"}, saved=384, moved=384 + 384 + 128),
    Case("binary_cross_entropy", (VECTOR,), (2, 8), saved=64, moved=128),
    # log-probabilities and the table of 10 x 7 positions
    Case("ctc", (SEQUENCE,), (2,), {"label_length": 3}, saved=320 + 280, moved=320 + 320 + 320 + 280 + 8),
    # what importers add
    Case("view", (VECTOR,), (2, 4, 2), {"dims": {"batch": 2, "rows": 4, "columns": 2}}),
    Case("einsum", (SEQUENCE,), (2, 5, 3),
         {"equation": "b s h, h o -> b s o", "dims": ["batch", "seq", "out"], "weight": [8, 3]},
         24, 480, 960, saved=320, moved=320 + 96 + 120),
    Case("pass", (VECTOR,), (2, 8), {"dims": {"batch": 2, "features": 8}}, moved=128),
    Case("opaque", (VECTOR,), (2, 8), {"of": "unknown", "dims": {"batch": 2, "features": 8}}, saved=64, moved=128),
    Case("learned", (VECTOR,), (2, 8), {"parameters": 7}, 7, moved=28 + 28),
    Case("relative_bias", (SEQUENCE,), (2, 5, 8), {"buckets": 32, "heads": 4}, 128, moved=400 + 400),
    # 70 rows of 4; 2 of them on average for each of the 2 x 2 sums, 4 indices
    Case(
        "sharded_embedding_bag", (CATEGORIES,), (2, 2, 4), {"entries": [30, 40], "features": 4, "bags": [3, 1]}, 280,
        saved=32, moved=32 + 128 + 64,
    ),
    # twice 8 -> 4 -> 8 and 8 biases; keeps x (once), both low vectors and what was crossed
    Case(
        "cross_network", (VECTOR,), (2, 8), {"layers": 2, "rank": 4}, 2 * 72,
        2 * 2 * 128, 2 * 4 * 128, 64 + 2 * 32 + 2 * 64 + 64,
        2 * ((64 + 128 + 32) + (32 + 128 + 32 + 64) + (3 * 64 + 64)),
    ),
    # 8 -> 3·2·4 for 2·8 states; a pass over 8 x 8 for 8 distances; u and v of 8; 2 x 5·8 scores of 2 heads by content,
    # by distance and for the values; 8 -> 8
    Case(
        "relative_attention", (SEQUENCE,), (2, 5, 8), {"heads": 2, "memory": 3}, 192 + 64 + 16 + 64,
        2 * 16 * 192 + 3 * 2 * 160 * 4 + 2 * 10 * 64, 4 * 16 * 192 + 3 * 4 * 160 * 4 + 4 * 10 * 64,
        512 + 2 * 320 + 2 * 512 + 640 + 320,
        832 + (512 + 768 + 1536) + (256 + 256) + 2 * 672 + (832 + 640) + (576 + 640) + 1280 + 1920 + 3 * 1280
        + (1152 + 320) + (320 + 256 + 320),
    ),
    # sort 96 scores, compare 6 with 6 a byte each, take 3 boxes
    Case("proposals", (IMAGE,), (2, 3, 4), {"kept": 3, "considered": 6}, moved=2 * 384 + (384 + 72) + (72 + 96)),
    # 6 regions of 3 x 2 x 2, four points each
    Case("roi_align", (IMAGE, BOXES), (6, 3, 2, 2), {"size": 2}, moved=(384 + 96 + 1152) + (1152 + 288)),
    Case("stack_frames", (SEQUENCE,), (2, 3, 16), {"factor": 2}, moved=320 + 384),
    Case("joint", (SEQUENCE, MEMORY), (2, 15, 8), saved=960, moved=320 + 192 + 960),
    Case("transducer_loss", (SEQUENCE,), (2,), saved=320 + 40 + 40, moved=(320 + 40) + (40 + 8 + 40)),
    # 10 nodes to 2 heads of 3: two relations with a weight of 48, vectors of 12 and a shift of 6 each
    Case(
        "relational_graph_attention", (SEQUENCE,), (2, 2, 6),
        {"relations": 2, "heads": 2, "head_dim": 3, "edges": 4, "targets": 2}, 2 * (48 + 12 + 6),
        2 * 10 * 48, 4 * 10 * 48, 320 + 240 + 64,
        640 + (320 + 384 + 240) + (240 + 96 + 64) + (240 + 64 + 192) + (192 + 48 + 96),
    ),
    # each stream: vectors 8 -> 48, packed 8 -> 24, norms of 2 x 4, output 8 -> 8, feed-forward 8 -> 16 -> 8
    Case(
        "double_stream", (SEQUENCE, OTHER), (2, 5, 8), {"heads": 2, "ffn": 16, "text": 2},
        2 * (432 + 216 + 8 + 72 + 280),
        2 * (2 * 2 * 384 + 10 * (192 + 64 + 256)) + 2 * 2 * 2 * 2 * 25 * 4, 30624, 5088, 22176,
    ),
    # vectors 8 -> 24, one product 8 -> 24 + 16, norms of 2 x 4, one product 8 + 16 -> 8
    Case(
        "single_stream", (SEQUENCE, OTHER), (2, 5, 8), {"heads": 2, "ffn": 16}, 216 + 360 + 8 + 200,
        2 * (2 * 192 + 10 * (320 + 192)) + 2 * 2 * 2 * 2 * 25 * 4, 26016, 4728, 15160,
    ),
    # gates of 2 x 4 beside query, key and value; norms of all 8 entries of the queries and 4 of the key
    Case(
        "attention", (SEQUENCE,), (2, 5, 8),
        {"heads": 2, "kv_heads": 1, "bias": False, "gate": "element", "qk_norm": "all heads"}, 8 * 24 + 8 + 4 + 64,
        2 * 10 * 256 + 2 * 100 * 8, 4 * 10 * 256 + 2 * 100 * 20,
        320 + (320 + 160) + (320 + 160 + 160 + 320 + 80) + 320 + 320, 5952,
    ),
    # a gate for each of 2 heads, values of 2; no weight for values that are the keys
    Case(
        "attention", (SEQUENCE,), (2, 5, 8), {"heads": 2, "kv_heads": 1, "bias": False, "gate": "head", "value_dim": 2},
        8 * 16 + 32, 2 * 10 * 160 + 2 * 100 * 6, 4 * 10 * 160 + 2 * 100 * 16, 1360, 3280,
    ),
    Case(
        "attention", (SEQUENCE,), (2, 5, 8), {"heads": 2, "kv_heads": 1, "bias": False, "shared_value": True},
        8 * 12 + 64, 2 * 10 * 160 + 2 * 100 * 8, 4 * 10 * 160 + 2 * 100 * 20, 1360, 3120,
    ),
    # 8 -> 4 before the experts, 4 -> 8 behind them: 5 tokens for each of 4 experts, 4 -> 2·16 -> 4
    Case(
        "moe", (SEQUENCE,), (2, 5, 8), {"experts": 4, "top_k": 2, "ffn": 16, "latent": 4, "latent_norm": True},
        32 + 32 + 4 + 4 * 192 + 32, 2 * 10 * 96 + 2 * 20 * 192, 4 * 10 * 96 + 4 * 20 * 192, 4960, 14992,
    ),
    # query 8 -> 4 -> 2·6, latents 8 -> 4 + 2, each head's 4 -> 4 before and behind; of 5 keys 3: 60 scores of 6 + 4.
    # index: 4 -> 2·4, 8 -> 4 with scale and shift, 8 -> 2; 100 scores of 4, 60 again with their gradient
    Case(
        "sparse_latent_attention", (SEQUENCE,), (2, 5, 8),
        {"heads": 2, "query_rank": 4, "kv_rank": 4, "nope_dim": 4, "rope_dim": 2, "value_dim": 4, "index_heads": 2,
         "index_dim": 4, "top_k": 3},
        (32 + 4 + 48 + 48 + 4 + 2 * 32 + 64) + (32 + 32 + 8 + 16),
        2 * 10 * (32 + 48 + 48 + 32 + 32 + 64) + 2 * 60 * 10 + 2 * 10 * 80 + 2 * 100 * 4 + 2 * 60 * 4,
        4 * 10 * (32 + 48 + 48 + 32 + 32 + 64) + 2 * 60 * 26 + 2 * 10 * 80 + 4 * 60 * 4, 3816, 13840,
    ),
    # of 5 keys 4 in blocks of 2; index: 8 -> 4 for query and key, each with a norm
    Case(
        "sparse_attention", (SEQUENCE,), (2, 5, 8),
        {"heads": 2, "bias": False, "index_heads": 1, "index_dim": 4, "block": 2, "top_k": 2}, 192 + 64 + 72,
        2 * 10 * 256 + 2 * 80 * 8 + 2 * 10 * 64 + 2 * 50 * 4 + 2 * 40 * 4,
        4 * 10 * 256 + 2 * 80 * 20 + 2 * 10 * 64 + 4 * 40 * 4, 2448, 8688,
    ),
    # query 8 -> 4 -> 2·4, key 8 -> 4; 2 entries of 4 from 8 -> 2·8, shifts of 4 x 8; 3 + 1 keys for 16 queries of 2
    # heads; out 4 -> 3 for each of 2 groups, 6 -> 8; index: 2 entries the same way, 4 -> 2·4, 8 -> 2
    Case(
        "compressed_attention", (replace(SEQUENCE, sizes=(2, 8, 8)),), (2, 8, 8),
        {"heads": 2, "head_dim": 4, "query_rank": 4, "window": 3, "ratio": 4, "overlap": True, "top_k": 1,
         "index_heads": 2, "index_dim": 4, "out_groups": 2, "out_rank": 3},
        (32 + 4 + 32 + 32 + 4) + 2 * (128 + 32 + 4) + 32 + 16 + 2 + 24 + 48,
        2 * 16 * (32 + 32 + 32 + 2 * 128 + 32 + 16 + 24 + 48) + 2 * 128 * 8 + 2 * 64 * 4 + 2 * 32 * 4,
        4 * 16 * (32 + 32 + 32 + 2 * 128 + 24 + 48) + 2 * 16 * 48 + 2 * 128 * 20 + 4 * 32 * 4, 7072, 22384,
    ),
    # 8 -> 8 + 8 of keys and values, 8 gates, 2 step sizes, 2 decays; taps of 4; two chunks of 3, for 2 heads of values:
    # keys x keys, keys and values in order, queries x keys, scores x values (9 x 4 each), a third of 3 x 3 x 3; the
    # state of 4 x 4 read twice and written once. Backward runs all products of the chunk once more
    Case(
        "delta_net", (SEQUENCE,), (2, 5, 8), {"heads": 1, "value_heads": 2, "key_dim": 4, "value_dim": 4, "chunk": 3},
        8 * 28 + 64 + 4 + 4 + 64, 2 * 10 * 288 + 16 * (180 + 9 + 144), 4 * 10 * 288 + 48 * (180 + 9 + 144), 2720,
        5744 + (2 * 160 + 320 + 2 * 80 + 2 * 8 + 320),
    ),
    Case("hyper_split", (SEQUENCE,), (2, 5, 3, 8), {"streams": 3}, moved=320 + 960),
    # a product 24 -> 3 + 3 + 9 with 15 shifts and 3 scales
    Case(
        "hyper_read", (STREAMS,), (2, 5, 8), {}, 360 + 18, 2 * 10 * 360, 4 * 10 * 360, 960 + 960 + 600 + 600,
        2 * 960 + (960 + 1440 + 600) + (600 + 72 + 600) + (960 + 600 + 320),
    ),
    Case("hyper_write", (replace(SEQUENCE, name="y"), STREAMS), (2, 5, 3, 8), {}, 0, 0, 0, 320 + 960, 320 + 2 * 960),
    Case("frozen_batch_norm", (IMAGE,), (2, 3, 4, 4), moved=384 + 384),
    Case("squared_error", (VECTOR,), (2, 8), saved=64, moved=128),
    Case("smooth_l1", (VECTOR,), (2, 8), saved=64, moved=128),
]  # fmt: skip


def test_every_layer_type_has_a_case() -> None:
    assert set(LAYERS) == {case.kind for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_worked_by_hand(case: Case) -> None:
    made = expand(case.kind, case.inputs, case.options)
    kernels = forward(made.operations)
    assert made.out.sizes == case.out
    assert sum(t.elements for t in parameters_by_name(made.operations).values()) == case.parameters
    assert sum(k.flops for k in kernels) == case.flops
    assert sum(k.flops for k in backward(made.operations)) == case.backward
    assert saved_bytes(made.operations) == case.saved
    assert sum(k.bytes for k in kernels) == case.moved


def test_a_product_without_a_compiler_spreads_the_gradient_of_what_was_broadcast() -> None:
    """384 B of gradient and 24 B of factors make 384 B for x; gradient and x make 384 B, which are summed to 24 B."""
    compiled = backward(expand("multiply", (IMAGE, SMALL), {}).operations)
    apart = backward(expand("multiply", (IMAGE, SMALL), {}, LayerImplementations(gates="separate")).operations)
    assert [k.bytes for k in compiled] == [384 + 384 + 24 + 384 + 24]
    assert [k.bytes for k in apart] == [384 + 24 + 384, 384 + 384 + 384, 384 + 24]
    assert [k.operation for k in apart] == ["elementwise", "elementwise", "reduce"]
    alike = replace(IMAGE, name="y")
    assert len(backward(expand("multiply", (IMAGE, alike), {}, LayerImplementations(gates="separate")).operations)) == 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_counts_hold_together(case: Case) -> None:
    made = expand(case.kind, case.inputs, case.options)
    assert len({op.name for op in made.operations}) == len(made.operations)
    for kernel in forward(made.operations) + backward(made.operations):
        counts = kernel.flops, kernel.vector_flops, kernel.bytes_read, kernel.bytes_written, *kernel.shape.values()
        assert all(math.isfinite(n) and n >= 0 for n in counts)
        assert kernel.bytes_written > 0
    assert all(k.phase == "forward" for k in forward(made.operations))
    assert all(k.phase != "forward" for k in backward(made.operations))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_work_is_linear_in_the_batch(case: Case) -> None:
    def flops(times: int) -> tuple[float, float]:
        inputs = tuple(
            t.reshaped(dict(zip(t.dims, (t.sizes[0] * times, *t.sizes[1:]), strict=True))) for t in case.inputs
        )
        operations = expand(case.kind, inputs, case.options).operations
        return sum(k.flops for k in forward(operations)), sum(k.flops for k in backward(operations))

    assert flops(3) == (3 * flops(1)[0], 3 * flops(1)[1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_half_the_bytes_in_bf16_but_for_statistics_masks_and_indices(case: Case) -> None:
    operations = expand(case.kind, case.inputs, case.options).operations
    narrow, wide = (sum(k.bytes for k in forward(operations, dtype)) for dtype in ("bf16", "fp32"))
    assert wide / 2 <= narrow <= wide
    exact = {t.role for op in operations for t in (*op.read_tensors, op.out, *op.saved_tensors)} <= {
        "activation",
        "parameter",
    }
    if exact:
        assert narrow == wide / 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_input_without_gradient_gets_none(case: Case) -> None:
    frozen = tuple(replace(t, needs_gradient=False) for t in case.inputs)
    names = {t.name for t in frozen}
    kernels = backward(expand(case.kind, frozen, case.options).operations)
    full = backward(expand(case.kind, case.inputs, case.options).operations)
    assert len(kernels) <= len(full)
    assert sum(k.flops for k in kernels) <= sum(k.flops for k in full)
    first = [op for op in expand(case.kind, frozen, case.options).operations if op.read_tensors[0].name in names]
    if first and isinstance(first[0], Contraction) and first[0].rhs.role == "parameter":
        assert {k.phase for k in first[0].backward_kernels(FP32)} == {"backward_weight"}


def test_unfused_attention_keeps_every_score() -> None:
    options = {"heads": 2, "bias": False, "dropout": 0.1}
    chain = expand("attention", (SEQUENCE,), options, LayerImplementations(attention="unfused")).operations
    fused = expand("attention", (SEQUENCE,), options).operations
    assert [k.family for k in forward(chain)] == ["gemm", "gemm", "memory", "memory", "gemm", "gemm"]
    assert sum(k.flops for k in forward(chain)) == sum(k.flops for k in forward(fused))
    # no recomputation of the scores: 100 of them, 2·4 each
    assert sum(k.flops for k in backward(fused)) - sum(k.flops for k in backward(chain)) == 800
    # x, q, k, v, softmax and what dropout left of it (100 each), the mask, the context
    assert saved_bytes(chain) == 320 + 3 * 320 + 400 + 400 + 100 + 320


def test_plain_attention_copies_heads_scales_and_masks() -> None:
    options = {"heads": 2, "bias": False, "dropout": 0.1}
    unfused = expand("attention", (SEQUENCE,), options, LayerImplementations(attention="unfused")).operations
    plain = expand("attention", (SEQUENCE,), options, LayerImplementations(attention="stepwise")).operations
    names = [k.operation for k in forward(plain)]
    assert names[:4] == ["gemm", "copy", "copy", "copy"]
    assert names[4:] == ["gemm", "elementwise", "elementwise", "softmax", "dropout", "gemm", "copy", "gemm"]
    # four copies of 80 numbers and two passes over 100 scores, read and written; the mask's gradient is free
    assert moved(forward(plain)) - moved(forward(unfused)) == 4 * 640 + 2 * 800
    assert moved(backward(plain)) - moved(backward(unfused)) == 4 * 640 + 800
    assert sum(k.flops for k in forward(plain)) == sum(k.flops for k in forward(unfused))
    assert saved_bytes(plain) == saved_bytes(unfused)


@pytest.mark.parametrize(
    ("kind", "gelu", "launches"),
    [("gelu", "fused", 1), ("gelu", "tanh-stepwise", 1), ("gelu_tanh", "tanh-stepwise", 8), ("gelu", "stepwise", 8),
     ("gelu_tanh", "fused", 1), ("relu", "stepwise", 1)],
)  # fmt: skip
def test_gelu_term_by_term(kind: str, gelu: Any, launches: int) -> None:
    made = expand(kind, (SEQUENCE,), {}, LayerImplementations(gelu=gelu)).operations
    assert len(forward(made)) == launches
    if launches == 8:
        # x³, ·0.04, x +, ·√(2/π), tanh, 1 +, x/2, · : 2+2+3+2+2+2+2+3 numbers an element; back 2+2+3, 2, two sums of
        # 3, 2, 3, 0, 2 and two products of 3 by autograd; 3+2+3+2+3+0+2+5 in a pass each
        assert moved(forward(made)) == 18 * 320
        assert moved(backward(made)) == pytest.approx((28 if kind == "gelu_tanh" else 20) * 320)
        assert saved_bytes(made) == 4 * 320  # x, tanh, x/2 and 1 + tanh


def test_mixed_precision_hands_on_fp32_until_the_next_product() -> None:
    half = with_autocast_weights(default_precision("fp16"))
    choices = LayerImplementations(fp32_functions=frozenset({"norm"}))
    norm = expand("layer_norm", (SEQUENCE,), {"affine": False}, choices)
    assert norm.out.stays_fp32 and moved(norm.operations[0].forward_kernels(half)) == 80 * (2 + 4) + 10 * 4
    dropped = expand("dropout", (norm.out,), {"rate": 0.1}, choices).out
    added = expand("add", (SEQUENCE, dropped), {}, choices).out
    assert dropped.stays_fp32 and added.stays_fp32
    linear = expand("linear", (added,), {"features": 4, "bias": False}, choices)
    assert not linear.out.stays_fp32
    product, *casts = linear.operations[0].forward_kernels(half)
    assert product.operation == "gemm" and [k.bytes for k in casts] == [80 * 6, 32 * 6]  # input and weight, 4 in, 2 out
    *products, widened, weight = linear.operations[0].backward_kernels(half)
    assert len(products) == 2 and (widened.phase, weight.phase) == ("backward", "backward_weight")
    assert (widened.bytes, weight.bytes) == (80 * 6, 32 * 6)
    for formats in (FP32, default_precision("fp16")):  # narrow weights with masters: nothing to cast
        assert len(linear.operations[0].forward_kernels(formats)) == 1
    assert not expand("batch_norm", (IMAGE,), {}, choices).out.stays_fp32


def test_rotary_and_normed_queries() -> None:
    made = expand("attention", (SEQUENCE,), {"heads": 2, "bias": False, "rotary": True, "qk_norm": True})
    names = [k.operation for k in forward(made.operations)]
    assert names == ["gemm", "norm", "norm", "rope", "rope", "fused", "gemm"]
    assert sum(t.elements for t in parameters_by_name(made.operations).values()) == 256 + 4 + 4


def test_shared_experts_see_every_token() -> None:
    options = {
        "experts": 4,
        "top_k": 2,
        "ffn": 6,
        "shared": 1,
        "shared_ffn": 10,
        "shared_gate": True,
        "score_bias": True,
    }
    made = expand("moe", (SEQUENCE,), options)
    assert sum(t.elements for t in parameters_by_name(made.operations).values()) == 32 + 4 + 4 * 144 + 3 * 80 + 8
    assert sum(k.flops for k in forward(made.operations)) == 6400 + 2 * 10 * (240 + 8)


def test_capacity_pads_the_experts() -> None:
    plain, padded = (
        sum(
            k.flops for k in forward(expand("moe", (SEQUENCE,), {"experts": 4, "top_k": 2, "ffn": 6} | more).operations)
        )
        for more in ({}, {"capacity_factor": 1.5})
    )
    assert padded - plain == 0.5 * 2 * 20 * 144


def test_recurrence_without_projection_is_the_steps_alone() -> None:
    gates = Tensor("x", ("batch", "seq", "gates"), (2, 5, 24))
    (step,) = forward(expand("lstm", (gates,), {"hidden": 6, "project": False, "biases": 0}).operations)
    assert step.family == "rnn" and step.flops == 2 * 10 * 6 * 24
    assert step.shape == {"hidden": 6, "batch": 2, "timesteps": 5, "gates": 4, "directions": 1}


def test_a_loop_runs_the_operations_of_each_step_and_adds_up_gradients() -> None:
    """60 numbers of state in 5 steps; weights of (6 + 8) x 24 are read twice and written at each step."""
    options = {"hidden": 6}
    layer, looped = (
        expand("lstm", (SEQUENCE,), options, LayerImplementations(recurrence=how)) for how in ("layer", "looped")
    )
    (cell,) = (kernel for kernel in forward(looped.operations) if kernel.name.endswith(".cell"))
    assert (cell.bytes_read, cell.bytes_written, cell.host_calls) == (60 * 26 * 4, 60 * 22 * 4, 5 * 26)
    back, total = (kernel for kernel in backward(looped.operations) if kernel.name.endswith((".cell", ".sum")))
    assert (back.bytes, back.host_calls, back.phase) == (2 * cell.bytes, 5 * 31, "backward")
    assert (total.host_calls, total.phase) == (5, "backward_weight")
    assert total.bytes == pytest.approx(5 * 14 * 24 * 3 * 4, rel=1e-12)
    assert len(forward(layer.operations)) == len(forward(looped.operations)) - 1
    assert sum(k.flops for k in backward(layer.operations)) == sum(k.flops for k in backward(looped.operations))
    frozen = expand("lstm", (SEQUENCE,), options, LayerImplementations(recurrence="looped")).operations[-1]
    assert isinstance(frozen, Recurrence)
    fixed = replace(frozen, weight=replace(frozen.weight, needs_gradient=False))
    assert not any(kernel.name.endswith(".sum") for kernel in fixed.backward_kernels(FP32))


def test_additive_attention_in_a_loop_reads_all_keys_at_each_step() -> None:
    """2 samples x 5 steps x 3 keys x 4 units are 480 bytes for a term of all steps. Forward: sum 2 (and the query,
    160), bias 2 (and b, 16), tanh 2, product 2; backward as many (b's gradient, too), 3 for tanh and product, 3 for the
    gradients of keys, and of the memory, 8 features wide. A loop of TensorFlow issues 16 and 28 operations a step."""
    options = {"hidden": 4, "normalized": True}
    layer, looped = (
        expand("additive_attention", (SEQUENCE, MEMORY), options, LayerImplementations(recurrence=how)).operations
        for how in ("layer", "looped")
    )
    (tanh,) = (kernel for kernel in forward(layer) if kernel.name == "layer.tanh")
    assert moved(forward(looped)) - moved(forward(layer)) == 8 * 480 + 160 + 16 - tanh.bytes
    (tanh,) = (kernel for kernel in backward(layer) if kernel.name == "layer.tanh")
    more = (2 + 2 + 3 + 3 + 3) * 480 + 160 + 2 * 16 + 3 * 2 * 5 * 3 * 8 * 4
    assert moved(backward(looped)) - moved(backward(layer)) == more - tanh.bytes
    passes = ("sum", "shifted", "tanh", "weighted")
    for direction, calls in ((forward, 16 * 5), (backward, 28 * 5)):
        assert sum(k.host_calls for k in direction(looped) if k.name.removeprefix("layer.") in passes) == calls


def test_relative_attention_with_heads_last_turns_scores_and_is_fed_its_memory() -> None:
    """2 x 2 heads x 5 x 8 scores of 640 bytes. Turned: both products, the pad, the mask's product, before and after the
    softmax, and for the sum: 7 more passes of a read and a write, backward as many. The memory of 2 x 3 x 8 numbers is
    read and written once, in fp32 also where products take sixteen bits."""
    options = {"heads": 2, "memory": 3}
    plain, turned = (
        expand(
            "relative_attention",
            (SEQUENCE,),
            options,
            LayerImplementations(attention="stepwise", relative_attention_layout=how),
        )
        for how in ("heads first", "heads last")
    )
    for direction in (forward, backward):
        assert moved(direction(turned.operations)) - moved(direction(plain.operations)) == 7 * 2 * 640
    fed = expand(
        "relative_attention",
        (SEQUENCE,),
        options,
        LayerImplementations(attention="stepwise", memories_through_host=True),
    )
    (feed,) = (kernel for kernel in forward(fed.operations) if kernel.operation == "feed")
    assert feed.bytes == 2 * 2 * 3 * 8 * 4 and moved(backward(fed.operations)) == moved(backward(plain.operations))
    mixed = [
        kernel
        for op in fed.operations
        for kernel in op.forward_kernels(with_autocast_weights(default_precision("fp16")))
    ]
    assert [kernel.bytes for kernel in mixed if kernel.operation == "feed"] == [feed.bytes]


def test_gradients_of_a_tied_table_as_slices_are_joined_and_added_up() -> None:
    """A table of 7 x 8 numbers, 224 bytes: three reads and three writes of it. Of tables that are parts of one of 2, 3
    and 5 words, 320 bytes in all, three gradients as large as the whole."""
    options = {"features": 7, "dim": "vocab", "bias": False, "tie": "embed"}
    plain, sliced = (
        expand("linear", (SEQUENCE,), options, LayerImplementations(tied_gradient_accumulation=how))
        for how in ("sum", "slices")
    )
    assert forward(plain.operations) == forward(sliced.operations)
    assert moved(backward(sliced.operations)) - moved(backward(plain.operations)) == 6 * 224
    joined = map_tensors(sliced.operations[0], lambda tensor: replace(tensor, needs_gradient=False))
    assert joined.out.elements == 0 < sliced.operations[0].out.elements and not joined.backward_kernels(FP32)
    assert (
        expand("linear", (SEQUENCE,), {"features": 7}, LayerImplementations(tied_gradient_accumulation="slices"))
        .operations[0]
        .name
        == "layer"
    )
    clusters = {"sizes": [2, 3, 5], "shares": [0.5, 0.3, 0.2], "tie": "embed"}
    plain, sliced = (
        expand("adaptive_softmax", (SEQUENCE,), clusters, LayerImplementations(tied_gradient_accumulation=how))
        for how in ("sum", "slices")
    )
    assert moved(backward(sliced.operations)) - moved(backward(plain.operations)) == (6 * 3 + 3) * 320
    narrowing = clusters | {"narrowing": 2}
    plain, sliced = (
        expand("adaptive_softmax", (SEQUENCE,), narrowing, LayerImplementations(tied_gradient_accumulation=how))
        for how in ("sum", "slices")
    )
    sizes = 2 * 8 + 3 * 4 + 5 * 2
    assert moved(backward(sliced.operations)) - moved(backward(plain.operations)) == 6 * 4 * sizes


def test_shapes_for_the_price_of_a_convolution() -> None:
    options = {"channels": 6, "kernel": [3, 1], "stride": 2, "padding": [1, 0], "groups": 3, "bias": False}
    (op,) = expand("conv", (IMAGE,), options).operations
    (kernel,) = op.forward_kernels(FP32)
    assert kernel.shape == {
        "n": 2, "c": 3, "k": 6, "groups": 3, "h": 4, "w": 4, "out_h": 2, "out_w": 2, "kernel_h": 3, "kernel_w": 1,
        "stride_h": 2, "stride_w": 2, "dilation_h": 1, "dilation_w": 1, "pad_h": 1, "pad_w": 0,
    }  # fmt: skip
    assert [(k.operation, k.phase) for k in op.backward_kernels(FP32)] == [
        ("bwd_data", "backward"),
        ("bwd_filter", "backward_weight"),
    ]


def test_a_transposed_convolution_is_priced_as_the_data_gradient() -> None:
    (op,) = expand("transposed_conv", (IMAGE,), {"channels": 2, "kernel": 2, "stride": 2, "bias": False}).operations
    (kernel,) = op.forward_kernels(FP32)
    sizes = {key: kernel.shape[key] for key in ("n", "c", "k", "h", "w", "out_h", "out_w")}
    assert kernel.operation == "bwd_data"
    assert sizes == {"n": 2, "c": 2, "k": 3, "h": 8, "w": 8, "out_h": 4, "out_w": 4}
    assert [k.operation for k in op.backward_kernels(FP32)] == ["fwd", "bwd_filter"]


def test_gemm_shapes_of_a_linear_layer_and_its_gradients() -> None:
    (op,) = expand("linear", (SEQUENCE,), {"features": 6, "bias": False}).operations
    shapes = [tuple(k.shape[key] for key in "mnk") for k in (*op.forward_kernels(FP32), *op.backward_kernels(FP32))]
    assert [sorted(shape) for shape in shapes] == [[6, 8, 10]] * 3
    assert [shape[2] for shape in shapes] == [8, 6, 10]


def test_a_split_dim_shares_the_work() -> None:
    (op,) = expand("linear", (SEQUENCE,), {"features": 6}).operations
    whole = sum(k.flops for k in op.forward_kernels(FP32))
    for dim, ways in (("batch", 2), ("features", 3), ("hidden", 4), ("seq", 5)):
        assert sum(k.flops for k in op.shard({dim: ways}).forward_kernels(FP32)) * ways == whole


@pytest.mark.parametrize(
    ("kind", "inputs", "options", "problem"),
    [
        ("conv", (IMAGE,), {"channels": 6, "kernel": 7}, "does not fit the input"),
        ("conv", (IMAGE,), {"channels": 4, "kernel": 1, "groups": 3}, "cannot be cut into 3 groups"),
        ("conv", (VECTOR,), {"channels": 4, "kernel": 1}, "2 dims, expected 3 or 4 or 5"),
        ("conv", (IMAGE,), {"channels": 4, "kernel": [1, 1, 1]}, "3 entries, expected 2"),
        ("attention", (SEQUENCE,), {"heads": 3}, "not a multiple of heads 3"),
        ("attention", (SEQUENCE,), {"heads": 4, "kv_heads": 3}, "must be a multiple of kv_heads 3"),
        ("moe", (SEQUENCE,), {"experts": 2, "top_k": 3, "ffn": 6}, "exceeds the 2 experts"),
        ("add", (VECTOR, SEQUENCE), {}, "cannot be joined element by element"),
        ("concat", (IMAGE, SMALL), {}, "cannot be joined along 'channels'"),
        ("reshape", (IMAGE,), {"dims": {"rows": 5}}, "cannot be viewed as"),
        ("crop", (IMAGE,), {"size": 5}, "cannot be cropped"),
        ("crop", (IMAGE,), {}, "either a size or a second input"),
        ("max_pool", (IMAGE,), {"kernel": 5}, "does not fit the input"),
        ("group_norm", (IMAGE,), {"groups": 2}, "cannot be cut into 2 groups"),
        ("cross_entropy", (VECTOR,), {"dim": "classes"}, "has no dim 'classes'"),
        ("position_embedding", (SEQUENCE,), {"positions": 4}, "fewer than the sequence"),
        ("mean", (IMAGE,), {}, "has no dim 'seq'"),
        ("adaptive_softmax", (SEQUENCE,), {"sizes": [6, 40], "shares": [0.8, 0.1]}, "not 2 parts of one"),
        ("adaptive_softmax", (SEQUENCE,), {"sizes": [6, 40], "shares": [0.8, 0.2], "narrowing": 9}, "no entries"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(
    kind: str, inputs: tuple[Tensor, ...], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(GraphError, match=problem):
        expand(kind, inputs, options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("conv", {"channels": 0, "kernel": 3}),
        ("conv", {"kernel": 3}),
        ("linear", {"feature": 3}),
        ("dropout", {"rate": 1.5}),
    ],
)
def test_options_are_checked(kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LAYERS[kind].model_validate(options)


def network(*layers: Any, blocks: dict[str, Any] | None = None) -> Any:
    data = {
        "title": "t",
        "task": "t",
        "source": "t",
        "inputs": {"image": {"dims": {"batch": "=batch", "channels": 3, "height": 8, "width": 8}}},
        "blocks": blocks or {},
        "layers": list(layers),
    }
    return build_graph(build_model_spec(data, "test.yaml"), batch=2)


CRITIC = {"critic": {"layers": [{"conv": {"channels": 4, "kernel": 3}}, "batch_norm"]}}


def test_shared_weights_count_once_and_work_counts_each_time() -> None:
    once = network({"name": "real", "critic": None}, blocks=CRITIC)
    again = {"name": "fake", "critic": None, "inputs": ["image"], "share": "real"}
    twice = network({"name": "real", "critic": None}, again, blocks=CRITIC)
    assert once.parameters == twice.parameters == 4 * 27 + 4 + 8
    work = [sum(k.flops for node in g.nodes for k in forward(node.operations)) for g in (once, twice)]
    assert work[1] == 2 * work[0]
    assert {name for node in twice.nodes for name in node.parameters} == {
        "real.conv1.weight",
        "real.conv1.bias",
        "real.batch_norm1.weight",
        "real.batch_norm1.bias",
    }


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        ({"name": "b", "conv": {"channels": 4, "kernel": 3}, "share": "nobody"}, "name of an earlier layer"),
        ({"conv": {"channels": 4, "kernel": 3}, "share": "a"}, "name of an earlier layer"),
        ({"name": "b", "batch_norm": None, "share": "a"}, "has no weight 'weight' to share"),
        ({"name": "b", "conv": {"channels": 5, "kernel": 3}, "share": "a"}, "the shapes differ"),
    ],
)
def test_sharing_what_is_not_there(layer: dict[str, Any], problem: str) -> None:
    first = (
        {"name": "a", "relu": None} if "batch_norm" in layer else {"name": "a", "conv": {"channels": 4, "kernel": 3}}
    )
    with pytest.raises((GraphError, SpecError), match=problem):
        network(first, {**layer, "inputs": ["image"]})


def test_detached_input_gets_no_data_gradient() -> None:
    def phases(*between: Any) -> list[str]:
        graph = network(
            {"conv": {"channels": 3, "kernel": 1, "bias": False}},
            *between,
            {"conv": {"channels": 3, "kernel": 1, "bias": False}},
        )
        return [k.phase for k in backward(graph.nodes[-1].operations)]

    assert phases() == ["backward", "backward_weight"]
    assert phases("detach") == ["backward_weight"]
