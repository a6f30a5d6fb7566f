"""What to measure on a device: designed points for each pricing family, as rows of the tables that fits read.

Few points say much: sizes are spread over decades, with odd ones between the powers of two that tiles fit best, from
launches that do nothing to kernels that run for milliseconds. A point is a row of its table without its time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paleo.errors import SpecError, near

Row = Mapping[str, Any]
#: A size that tiles fit.
KI = 2**10
#: Bytes of an element.
WIDTH = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to time: the table that its row belongs to, and the row."""

    table: str
    row: Row

    @property
    def key(self) -> str:
        """The identity of the point among all points of its table."""
        return "|".join(f"{name}={self.row[name]}" for name in sorted(self.row))


def gemm(dtypes: tuple[str, ...], largest: int) -> Iterator[Point]:
    """Square, skinny (few rows against wide weights), deep (long k), odd and batched products."""
    square = [(n, n, n) for n in (64, 128, 256, 384, 512, 768, KI, 1536, 2048, 3072, 4096, 6144, 8192, 12288)]
    skinny = [(m, n, k) for m in (1, 8, 32, 128, 512) for n, k in ((KI, KI), (4096, 4096), (12288, 4096))]
    deep = [(64, 64, 16384), (256, 256, 8192), (128, 4096, 16384), (512, 512, 32768), (2048, 512, 512)]
    odd = [(1000, 1000, 1000), (777, 2049, 513), (3000, 100, 3000), (5000, 5000, 500), (129, 8193, 4096)]
    batched = [(128, 128, 64, 96), (512, 512, 64, 64), (2048, 64, 2048, 16), (KI, KI, 128, 32), (333, 77, 64, 48)]
    single = [(*sizes, 1) for sizes in (*square, *skinny, *deep, *odd)]
    for dtype, (m, n, k, batch) in itertools.product(dtypes, [*single, *batched]):
        if max(m, n, k) <= largest:
            sizes = {"m": m, "n": n, "k": k, "batch": batch}
            row = {"dtype": dtype, **sizes, "trans_a": "N", "trans_b": "N", "launch": "queued"}
            yield Point("gemm", row)
            if batch == 1 and m % 128 == 0 and m == n:
                yield Point("gemm", row | {"trans_b": "T"})
            if m == n and m in (64, 512, 2048):
                yield Point("gemm", row | {"launch": "eager"})


def elementwise(dtypes: tuple[str, ...], largest: int) -> Iterator[Point]:
    """Streams of growing size, cold and warm, and rows of softmax and layer norm."""
    sizes = [2**power for power in range(0, 28, 3)]
    for dtype, size, op in itertools.product(dtypes, sizes, ("add", "relu", "gelu", "copy")):
        if size <= largest**2:
            for cache in ("warm", "cold"):
                yield _stream(op, (size,), dtype, cache)
            if op == "add":
                yield _stream(op, (size,), dtype, "warm", launch="eager")
    rows = [(64, 256), (512, 1000), (4096, 768), (4096, 4096), (16384, KI), (131072, 128), (2048, 32768)]
    for dtype, (count, length), op in itertools.product(dtypes, rows, ("softmax", "layernorm")):
        if max(count, length) <= largest**2 // 4:
            yield _stream(op, (count, length), dtype, "warm")


def _stream(op: str, shape: tuple[int, ...], dtype: str, cache: str, launch: str = "queued") -> Point:
    elements = 1
    for extent in shape:
        elements *= extent
    moved = elements * WIDTH[dtype] * (3 if op == "add" else 2)
    text = "x".join(map(str, shape))
    row = {"op": op, "shape": text, "dtype": dtype, "bytes_moved": moved, "cache": cache, "launch": launch}
    return Point("elementwise", row)


def attention(dtypes: tuple[str, ...], largest: int) -> Iterator[Point]:
    """Causal prefill, encoder and decoding of usual head counts, and the backward of training."""
    heads = ((32, 32), (32, 8), (16, 16))
    lengths = ((1, 512), (4, KI), (8, 2048), (1, 8192), (2, 4096), (16, 256), (1, 129))
    for dtype, (q_heads, kv_heads), (batch, length), head_dim in itertools.product(
        (dtype for dtype in dtypes if WIDTH[dtype] == 2), heads, lengths, (64, 128)
    ):
        common = {"dtype": dtype, "batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        for phase in ("context", "encoder", "generation", "context_backward"):
            queries = 1 if phase == "generation" else length
            if length <= largest:
                sizes = {"q_len": queries, "kv_len": length, "causal": phase.startswith("context")}
                yield Point("attention", {"phase": phase, **common, **sizes})


def conv(dtypes: tuple[str, ...], largest: int) -> Iterator[Point]:
    """Layers of VGG, ResNet, Inception and depthwise networks, in all three directions."""
    layers = (
        (3, 224, 64, 7, 3, 2), (64, 56, 64, 1, 0, 1), (64, 56, 64, 3, 1, 1), (256, 56, 128, 1, 0, 2),
        (128, 28, 128, 3, 1, 1), (512, 28, 256, 1, 0, 1), (256, 14, 256, 3, 1, 1), (512, 7, 512, 3, 1, 1),
        (2048, 7, 512, 1, 0, 1), (192, 17, 192, 7, 3, 1), (48, 35, 64, 5, 2, 1), (64, 224, 64, 3, 1, 1),
    )  # fmt: skip
    for dtype, batch, layer, direction in itertools.product(
        dtypes, (1, 16, 64), layers, ("fwd", "bwd_data", "bwd_filter")
    ):
        c, size, k, taps, pad, stride = layer
        if size * batch <= largest and dtype != "fp8":
            sizes = {"n": batch, "c": c, "h": size, "w": size, "k": k, "r": taps, "s": taps, "pad_h": pad, "pad_w": pad}
            yield Point(
                "conv", {"dtype": dtype, **sizes, "stride_h": stride, "stride_w": stride, "direction": direction}
            )


def rnn(dtypes: tuple[str, ...], largest: int) -> Iterator[Point]:
    """Short and long sequences of narrow and wide cells."""
    sizes = (
        (256, 16, 150),
        (512, 32, 25),
        (KI, 64, 25),
        (1760, 16, 50),
        (1536, 8, 50),
        (2048, 128, 25),
        (2816, 32, 20),
    )
    for dtype, cell, (hidden, batch, steps), direction in itertools.product(
        dtypes, ("vanilla", "lstm", "gru"), sizes, ("fwd", "bwd")
    ):
        if hidden <= largest and dtype in ("fp32", "fp16"):
            shape = {"hidden": hidden, "batch": batch, "timesteps": steps}
            yield Point("rnn", {"dtype": dtype, "cell": cell, **shape, "direction": direction})


def copies(dtypes: tuple[str, ...], largest: int) -> Iterator[Point]:
    """Between host and device, page-locked, both ways."""
    for power, direction in itertools.product(range(2, 31, 4), ("h2d", "d2h")):
        if 2**power <= largest**2:
            yield Point("copies", {"copy": direction, "bytes": 2**power})


def deepbench(dtypes: tuple[str, ...], largest: int) -> Iterator[Point]:
    """A selection of DeepBench's training products, for comparison with its published tables."""
    shapes = (
        (1760, 16, 1760), (1760, 128, 1760), (1760, 7000, 1760), (2048, 32, 2048), (2560, 64, 2560), (4096, 16, 4096),
        (5124, 700, 2048), (35, 700, 2048), (7680, 1500, 2560), (3072, 1500, KI), (512, 24000, 1536),
        (KI, 8, 500000),
    )  # fmt: skip
    for dtype, (m, n, k), (left, right) in itertools.product(dtypes, shapes, (("N", "N"), ("T", "N"), ("N", "T"))):
        if max(m, n, k) <= largest * 64:
            sizes = {"m": m, "n": n, "k": k, "batch": 1}
            yield Point("gemm", {"dtype": dtype, **sizes, "trans_a": left, "trans_b": right, "launch": "queued"})


Suite = Callable[[tuple[str, ...], int], Iterator[Point]]
#: Name -> points; the order is the order of measuring.
SUITES: Mapping[str, Suite] = {
    "gemm": gemm,
    "elementwise": elementwise,
    "attention": attention,
    "conv": conv,
    "rnn": rnn,
    "copies": copies,
    "deepbench": deepbench,
}
#: What is measured where nothing else is asked for.
USUAL = ("gemm", "elementwise", "attention", "conv", "rnn", "copies")
#: Payloads of collectives [byte]: from one packet to what fills the links.
PAYLOADS = tuple(2**power for power in range(10, 31, 2))
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def points(suites: tuple[str, ...], dtypes: tuple[str, ...], largest: int) -> list[Point]:
    """Points of the suites in turn, so that a measurement that is cut short has some of each.

    >>> [point.table for point in points(("gemm", "copies"), ("fp32",), 64)][:4]
    ['gemm', 'copies', 'gemm', 'copies']
    """
    for name in suites:
        if name not in SUITES:
            raise SpecError(f"unknown suite {name!r}; {near(name, SUITES)}")
    rounds = itertools.zip_longest(*(_spread(list(SUITES[name](dtypes, largest))) for name in suites))
    return [point for each in rounds for point in each if point is not None]


def _spread(row: list[Point]) -> list[Point]:
    """The points in an order whose every beginning is spread over all of them: by steps of the golden ratio."""
    golden = 0.618033988749895
    order = sorted(range(len(row)), key=lambda index: (index * golden) % 1.0)
    return [row[index] for index in order]


def collective_points(ranks: int, ranks_per_node: int, dtype: str = "bf16") -> list[Point]:
    """Collectives over all ranks of a job, and over each smaller power of two that fits into a node."""
    groups = [n for n in (2, 4, 8, 16) if n < ranks and n <= ranks_per_node] + [ranks]
    return [
        Point(
            "collective",
            {
                "op": op,
                "dtype": dtype,
                "ranks": n,
                "ranks_per_node": min(n, ranks_per_node),
                "bytes": payload,
                "algo": "",
            },
        )
        for op, n, payload in itertools.product(COLLECTIVES, groups, PAYLOADS)
    ]
