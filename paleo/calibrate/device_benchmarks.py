"""Benchmarks of kernels and collectives on a device through torch, for calibration.

Benchmark points are designed for each pricing family (timing formula) as rows of the tables that fits read, without
times. Sizes are spread over decades, with odd sizes between the powers of two that tiles fit best. They range from
launches that do nothing to kernels that run for milliseconds.

On a CUDA device a call is captured into a CUDA graph and replayed between two events, so that host time does not count.
A call that cannot be captured is launched in a loop. Inputs are random normal numbers (constant inputs draw less
power), times are medians after a warm-up. On the CPU a wall clock is used, for tests.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paleo.errors import PaleoError, SpecError, suggest_names
from paleo.files import append_csv_row, csv_columns, is_file, read_csv_rows
from paleo.specs.device import find_device
from paleo.units import MICROSECOND, MILLISECOND

Row = Mapping[str, Any]
#: A size that tiles fit.
_KIBI = 2**10
#: Bytes of an element.
_BYTES_PER_ELEMENT = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class BenchmarkPoint:
    """Kernel or collective to benchmark: the kind of table for its result, and its row without the time."""

    table: str
    row: Row

    @property
    def row_key(self) -> str:
        """Text that identifies the benchmark in its table: the values of all columns but the time."""
        return "|".join(f"{name}={self.row[name]}" for name in sorted(self.row))


def _gemm_points(dtypes: tuple[str, ...], largest: int) -> Iterator[BenchmarkPoint]:
    """List GEMMs to benchmark: square, skinny (few rows, wide weights), deep (long k), odd and batched.

    Tensor cores load 16 bytes of a row at a time. Rows of another length, such as those of a vocabulary of 50,257, take
    other kernels. Such unaligned GEMMs are listed in the three operand layouts of a training step. ``largest`` limits m
    and k, not the vocabulary dimension n.
    """
    square = [(n, n, n) for n in (64, 128, 256, 384, 512, 768, _KIBI, 1536, 2048, 3072, 4096, 6144, 8192, 12288)]
    skinny = [(m, n, k) for m in (1, 8, 32, 128, 512) for n, k in ((_KIBI, _KIBI), (4096, 4096), (12288, 4096))]
    deep = [(64, 64, 16384), (256, 256, 8192), (128, 4096, 16384), (512, 512, 32768), (2048, 512, 512)]
    odd = [(1000, 1000, 1000), (777, 2049, 513), (3000, 100, 3000), (5000, 5000, 500), (129, 8193, 4096)]
    batched = [(128, 128, 64, 96), (512, 512, 64, 64), (2048, 64, 2048, 16), (_KIBI, _KIBI, 128, 32), (333, 77, 64, 48)]
    single = [(*sizes, 1) for sizes in (*square, *skinny, *deep, *odd)]
    for dtype, (m, n, k, batch) in itertools.product(dtypes, [*single, *batched]):
        if max(m, n, k) <= largest:
            yield _product(dtype, m, n, k, batch)
            if batch == 1 and m % 128 == 0 and m == n:
                yield _product(dtype, m, n, k, layout="NT")
            if m == n and m in (64, 512, 2048):
                yield _product(dtype, m, n, k, batch, launch="eager")
    unaligned = [(4096, 50257, 768), (8192, 1001, 2048), (4096, 4095, 4096), (2048, 4096, 4095), (4095, 2048, 4096)]
    for dtype, (m, n, k), layout in itertools.product(dtypes, unaligned, ("NT", "NN", "TN")):
        if max(m, k) <= largest and _BYTES_PER_ELEMENT[dtype] == 2:
            yield _product(dtype, m, n, k, layout=layout)


def _product(
    dtype: str, m: int, n: int, k: int, batch: int = 1, layout: str = "NN", launch: str = "queued"
) -> BenchmarkPoint:
    sizes = {"m": m, "n": n, "k": k, "batch": batch}
    return BenchmarkPoint(
        "gemm", {"dtype": dtype, **sizes, "trans_a": layout[0], "trans_b": layout[1], "launch": launch}
    )


def _elementwise_points(dtypes: tuple[str, ...], largest: int) -> Iterator[BenchmarkPoint]:
    """List memory-bound kernels to benchmark: elementwise passes (cold and warm cache), softmax, layer norm."""
    sizes = [2**power for power in range(0, 28, 3)]
    for dtype, size, op in itertools.product(dtypes, sizes, ("add", "relu", "gelu", "copy")):
        if size <= largest**2:
            for cache in ("warm", "cold"):
                yield _stream(op, (size,), dtype, cache)
            if op == "add":
                yield _stream(op, (size,), dtype, "warm", launch="eager")
    rows = [(64, 256), (512, 1000), (4096, 768), (4096, 4096), (16384, _KIBI), (131072, 128), (2048, 32768)]
    for dtype, (count, length), op in itertools.product(dtypes, rows, ("softmax", "layernorm")):
        if max(count, length) <= largest**2 // 4:
            yield _stream(op, (count, length), dtype, "warm")


def _stream(op: str, shape: tuple[int, ...], dtype: str, cache: str, launch: str = "queued") -> BenchmarkPoint:
    moved = math.prod(shape) * _BYTES_PER_ELEMENT[dtype] * (3 if op == "add" else 2)
    text = "x".join(map(str, shape))
    row = {"op": op, "shape": text, "dtype": dtype, "bytes_moved": moved, "cache": cache, "launch": launch}
    return BenchmarkPoint("elementwise", row)


def _attention_points(dtypes: tuple[str, ...], largest: int) -> Iterator[BenchmarkPoint]:
    """List attention kernels to benchmark: encoder, decode, and causal training forward and backward."""
    heads = ((32, 32), (32, 8), (16, 16))
    lengths = ((1, 512), (4, _KIBI), (8, 2048), (1, 8192), (2, 4096), (16, 256), (1, 129))
    for dtype, (q_heads, kv_heads), (batch, length), head_dim in itertools.product(
        (dtype for dtype in dtypes if _BYTES_PER_ELEMENT[dtype] == 2), heads, lengths, (64, 128)
    ):
        if length > largest:
            continue
        common = {"dtype": dtype, "batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        for phase, queries in (("encoder", length), ("generation", 1)):
            columns = {"phase": phase, **common, "q_len": queries, "kv_len": length, "causal": False}
            yield BenchmarkPoint("attention", columns)
        widths = {"head_num": q_heads, "kv_head_num": kv_heads, "qk_head_dim": head_dim, "v_head_dim": head_dim}
        for op in ("sdp_fwd", "sdp_bwd"):
            blank = dict.fromkeys(("m", "k", "n", "layout", "groups", "group_m", "stage"))
            row = {"op": op, "dtype": dtype, "batch": batch, "seq_len": length, **widths}
            yield BenchmarkPoint("training_kernels", row | blank)


def _conv_points(dtypes: tuple[str, ...], largest: int) -> Iterator[BenchmarkPoint]:
    """List convolution layers of VGG, ResNet and Inception to benchmark: forward, data and filter gradients."""
    layers = (
        (3, 224, 64, 7, 3, 2), (64, 56, 64, 1, 0, 1), (64, 56, 64, 3, 1, 1), (256, 56, 128, 1, 0, 2),
        (128, 28, 128, 3, 1, 1), (512, 28, 256, 1, 0, 1), (256, 14, 256, 3, 1, 1), (512, 7, 512, 3, 1, 1),
        (2048, 7, 512, 1, 0, 1), (192, 17, 192, 7, 3, 1), (48, 35, 64, 5, 2, 1), (64, 224, 64, 3, 1, 1),
    )  # fmt: skip
    directions = ("fwd", "bwd_data", "bwd_filter")
    for dtype, batch, layer, direction in itertools.product(dtypes, (1, 16, 64), layers, directions):
        c, size, k, taps, pad, stride = layer
        if size * batch <= largest and dtype != "fp8":
            sizes = {"n": batch, "c": c, "h": size, "w": size, "k": k, "r": taps, "s": taps, "pad_h": pad, "pad_w": pad}
            steps = {"stride_h": stride, "stride_w": stride, "direction": direction}
            yield BenchmarkPoint("conv", {"dtype": dtype, **sizes, **steps})


def _rnn_points(dtypes: tuple[str, ...], largest: int) -> Iterator[BenchmarkPoint]:
    """List recurrent layers (vanilla, LSTM, GRU) to benchmark: short and long sequences, narrow and wide cells."""
    sizes = (
        (256, 16, 150), (512, 32, 25), (_KIBI, 64, 25), (1760, 16, 50), (1536, 8, 50), (2048, 128, 25), (2816, 32, 20),
    )  # fmt: skip
    combinations = itertools.product(dtypes, ("vanilla", "lstm", "gru"), sizes, ("fwd", "bwd"))
    for dtype, cell, (hidden, batch, steps), direction in combinations:
        if hidden <= largest and dtype in ("fp32", "fp16"):
            shape = {"hidden": hidden, "batch": batch, "timesteps": steps}
            yield BenchmarkPoint("rnn", {"dtype": dtype, "cell": cell, **shape, "direction": direction})


def _copies_points(dtypes: tuple[str, ...], largest: int) -> Iterator[BenchmarkPoint]:
    """List copies between page-locked host memory and device memory to benchmark, in both directions."""
    for power, direction in itertools.product(range(2, 31, 4), ("h2d", "d2h")):
        if 2**power <= largest**2:
            yield BenchmarkPoint("copies", {"copy": direction, "bytes": 2**power})


def _deepbench_points(dtypes: tuple[str, ...], largest: int) -> Iterator[BenchmarkPoint]:
    """List some of DeepBench's training GEMMs to benchmark, for comparison with its published tables."""
    shapes = (
        (1760, 16, 1760), (1760, 128, 1760), (1760, 7000, 1760), (2048, 32, 2048), (2560, 64, 2560), (4096, 16, 4096),
        (5124, 700, 2048), (35, 700, 2048), (7680, 1500, 2560), (3072, 1500, _KIBI), (512, 24000, 1536),
        (_KIBI, 8, 500000),
    )  # fmt: skip
    for dtype, (m, n, k), layout in itertools.product(dtypes, shapes, ("NN", "TN", "NT")):
        if max(m, n, k) <= largest * 64:
            yield _product(dtype, m, n, k, layout=layout)


_BenchmarkSuite = Callable[[tuple[str, ...], int], Iterator[BenchmarkPoint]]
#: Name -> points; the order is the order of measuring.
SUITES: Mapping[str, _BenchmarkSuite] = {
    "gemm": _gemm_points, "elementwise": _elementwise_points, "attention": _attention_points, "conv": _conv_points,
    "rnn": _rnn_points, "copies": _copies_points, "deepbench": _deepbench_points,
}  # fmt: skip
#: What is measured where nothing else is asked for.
DEFAULT_SUITES = ("gemm", "elementwise", "attention", "conv", "rnn", "copies")
#: Payloads of collectives [byte]: from one packet to what fills the links.
PAYLOAD_BYTES = tuple(2**power for power in range(10, 31, 2))
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def benchmark_points(suites: tuple[str, ...], dtypes: tuple[str, ...], largest: int) -> list[BenchmarkPoint]:
    """List the kernel benchmarks of several suites, interleaved so that a partial run has some of each.

    Parameters
    ----------
    suites : tuple of str
        Names in `SUITES`.
    dtypes : tuple of str
        Number formats, such as ``bf16``.
    largest : int
        Largest dimension of a matrix.

    Returns
    -------
    list of BenchmarkPoint
        Benchmarks in the order in which they run.

    Raises
    ------
    SpecError
        If the name of a suite is unknown.

    Examples
    --------
    >>> [point.table for point in benchmark_points(("gemm", "copies"), ("fp32",), 64)][:4]
    ['gemm', 'copies', 'gemm', 'copies']
    """
    for name in suites:
        if name not in SUITES:
            raise SpecError(f"unknown suite {name!r}; {suggest_names(name, SUITES)}")
    rounds = itertools.zip_longest(*(_interleaved(list(SUITES[name](dtypes, largest))) for name in suites))
    return [point for each in rounds for point in each if point is not None]


def _interleaved(row: list[BenchmarkPoint]) -> list[BenchmarkPoint]:
    """Reorder benchmarks by steps of the golden ratio, so that any beginning of the list is spread over all sizes."""
    golden = 0.618033988749895
    order = sorted(range(len(row)), key=lambda index: (index * golden) % 1.0)
    return [row[index] for index in order]


def collective_benchmarks(ranks: int, ranks_per_node: int, dtype: str = "bf16") -> list[BenchmarkPoint]:
    """List collective benchmarks over all ranks of a job and over smaller groups in a node.

    Parameters
    ----------
    ranks : int
        Ranks of the job, one process per GPU.
    ranks_per_node : int
        Ranks on each node.
    dtype : str, default 'bf16'
        Number format, such as ``bf16``.

    Returns
    -------
    list of BenchmarkPoint
        One benchmark for each operation, group and payload.
    """
    groups = [n for n in (2, 4, 8, 16) if n < ranks and n <= ranks_per_node] + [ranks]
    points = []
    for op, n, payload in itertools.product(_COLLECTIVES, groups, PAYLOAD_BYTES):
        group = {"ranks": n, "ranks_per_node": min(n, ranks_per_node)}
        points.append(BenchmarkPoint("collective", {"op": op, "dtype": dtype, **group, "bytes": payload, "algo": ""}))
    return points


SOURCE_NAME = "paleo calibrate"
#: Bytes that are written between cold calls, to empty any last-level cache there is.
_FLUSH_BYTES = 2**28
#: Copies of the weights that take turns in a replayed product, as in inference.
_WEIGHT_COPIES = 5
#: Most calls in one captured graph and replays in a sample, samples of a median, and about how long one may take [s].
_MAX_CALLS_PER_SAMPLE, _SAMPLES_PER_MEDIAN, _TARGET_SAMPLE_TIME = 20, 7, 15 * MILLISECOND
KernelCall = Callable[[], object]


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """Median time of one call [s], and the timing method: graph, kernel, back-to-back (a loop of launches) or eager."""

    seconds: float
    timing_method: str


class _Stopwatch(Protocol):
    """Interface of clocks that time kernel calls on a device."""

    def time_calls(self, calls: Sequence[KernelCall], flush: KernelCall | None) -> KernelTiming:
        """Measure the median time of one call over calls with equal work that are made in turn.

        Parameters
        ----------
        calls : sequence of KernelCall
            Calls with equal work, such as one call for each copy of the inputs.
        flush : KernelCall or None
            Call that empties the caches before each timed call, and is not timed itself. None: the caches stay warm.

        Returns
        -------
        KernelTiming
            Median time of one call [s], and the timing method.
        """

    def time_eager(self, call: KernelCall) -> KernelTiming:
        """Measure the median time of a single call, including the work of the host.

        Parameters
        ----------
        call : KernelCall
            Call to time.

        Returns
        -------
        KernelTiming
            Median time of the call [s], and the timing method.
        """


class WallClock:
    """Host clock that times calls on synchronous devices (the CPU), in place of CUDA events."""

    def time_calls(self, calls: Sequence[KernelCall], flush: KernelCall | None) -> KernelTiming:
        """Measure the median time of one call by the wall clock, over calls with equal work that are made in turn.

        Parameters
        ----------
        calls : sequence of KernelCall
            Calls with equal work.
        flush : KernelCall, optional
            Call that empties the caches before each timed call; its time does not count.

        Returns
        -------
        KernelTiming
            Median time of one call [s], with the method ``back-to-back``.
        """
        samples = []
        for index in range(_SAMPLES_PER_MEDIAN + 1):
            if flush is not None:
                flush()
            start = time.perf_counter()
            calls[index % len(calls)]()
            samples.append(time.perf_counter() - start)
        return KernelTiming(statistics.median(samples[1:]), "back-to-back")

    def time_eager(self, call: KernelCall) -> KernelTiming:
        """Measure the median time of a call by the wall clock, host overhead included.

        Parameters
        ----------
        call : KernelCall
            Call to time.

        Returns
        -------
        KernelTiming
            Median time of the call [s], with the method ``eager``.
        """
        return KernelTiming(self.time_calls([call], None).seconds, "eager")


def _repeats(seconds: float) -> int:
    """Count the calls of ``seconds`` [s] that fill `_TARGET_SAMPLE_TIME`; at most `_MAX_CALLS_PER_SAMPLE`."""
    return max(1, min(_MAX_CALLS_PER_SAMPLE, round(_TARGET_SAMPLE_TIME / max(seconds, MICROSECOND))))


class _CudaClock:
    """Clock by CUDA events around replays of a captured graph, or around a loop of launches if capture fails."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def time_calls(self, calls: Sequence[KernelCall], flush: KernelCall | None) -> KernelTiming:
        """Measure the median time of one call by CUDA events.

        With a flush, calls are timed one by one, and the flush runs before the first event. Without a flush, replays of
        a captured graph are timed, or a loop of launches if capture fails.

        Parameters
        ----------
        calls : sequence of KernelCall
            Calls with equal work, made in turn.
        flush : KernelCall or None
            Call that empties the caches before each timed call. None: the caches stay warm.

        Returns
        -------
        KernelTiming
            Median time of one call [s], and the timing method.
        """
        for call in calls:
            call()
        self.torch.cuda.synchronize()
        rough = self._between(lambda: [call() for call in calls])
        if flush is not None:
            samples = [self._between(calls[index % len(calls)], flush) for index in range(_SAMPLES_PER_MEDIAN)]
            return KernelTiming(statistics.median(samples), "kernel")
        count = _repeats(rough / len(calls))
        replay, timing = self._repeated(calls, count)
        replay()
        repeats = _repeats(self._between(replay))
        samples = [
            self._between(lambda: [replay() for _ in range(repeats)]) / repeats for _ in range(_SAMPLES_PER_MEDIAN)
        ]
        return KernelTiming(statistics.median(samples) / count, timing)

    def time_eager(self, call: KernelCall) -> KernelTiming:
        """Measure the median time of a single call by CUDA events, each after the device has become idle.

        Parameters
        ----------
        call : KernelCall
            Call to time.

        Returns
        -------
        KernelTiming
            Median time of the call [s], with the method ``eager``.
        """
        for _ in range(3):
            call()
        samples = []
        for _ in range(_SAMPLES_PER_MEDIAN):
            self.torch.cuda.synchronize()
            samples.append(self._between(call))
        return KernelTiming(statistics.median(samples), "eager")

    def _repeated(self, calls: Sequence[KernelCall], count: int) -> tuple[KernelCall, str]:
        """Capture ``count`` calls in turn into a CUDA graph: (function that runs all of them, timing method).

        If capture fails, the function is a loop of launches. Calls are captured on the stream of the inputs, as a
        backward pass runs on the stream of its forward pass.
        """

        def loop() -> None:
            for index in range(count):
                calls[index % len(calls)]()

        graph = self.torch.cuda.CUDAGraph()
        try:
            with self.torch.cuda.graph(graph, stream=self.torch.cuda.current_stream()):
                loop()
        except RuntimeError:
            self.torch.cuda.synchronize()
            return loop, "back-to-back"
        return graph.replay, "graph"

    def _between(self, call: KernelCall, before: KernelCall | None = None) -> float:
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        if before is not None:
            before()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * MILLISECOND


@dataclass
class DeviceBenchmarkRunner:
    """Benchmark runner for one device: builds the inputs of kernels, times the kernels and makes table rows.

    ``name`` is the device's catalog name, ``library`` the version of torch and cuDNN. ``further_columns`` holds columns
    that all rows share, such as date and driver.
    """

    torch: Any
    device: Any
    name: str
    clock: _Stopwatch
    library: str
    further_columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def on_cuda(self) -> bool:
        """True if the benchmarked device is a CUDA device."""
        return bool(self.device.type == "cuda")

    def measure(self, point: BenchmarkPoint) -> dict[str, Any]:
        """Measure the time of one kernel on the device and return its table row.

        Parameters
        ----------
        point : BenchmarkPoint
            Kernel to time.

        Returns
        -------
        dict of str to object
            Columns of the benchmark, ``time_us`` (median of the samples) and timing method. Also device, versions of
            library and driver, date, and the clock of the multiprocessors [MHz].
        """
        with self.torch.no_grad(), _tf32(self.torch, point.row.get("dtype") == "tf32"):
            calls = _BUILDERS[point.table](self, point.row)
            flush = self._flush if point.row.get("cache") == "cold" else None
            eager = point.row.get("launch") == "eager"
            timing = self.clock.time_eager(calls[0]) if eager else self.clock.time_calls(calls, flush)
        times = {"time_us": round(timing.seconds / MICROSECOND, 4), "timing": timing.timing_method}
        clock = _sustained_clock(self.torch, self.device) if self.on_cuda else ""
        names = {"source": SOURCE_NAME, "device": self.name, "library": self.library}
        return {**names, **point.row, **times, **self.further_columns, "clock_mhz": clock}

    def _flush(self) -> None:
        if not hasattr(self, "_scratch"):
            size = _FLUSH_BYTES if self.on_cuda else 2**22
            self._scratch = self.torch.empty(size, dtype=self.torch.uint8, device=self.device)
        self._scratch.zero_()

    def random_normal(self, *shape: int, dtype: str) -> Any:
        """Create a tensor of random normal numbers on the device, as input of a benchmark.

        Parameters
        ----------
        *shape : int
            Sizes of the tensor.
        dtype : str
            Number format, such as ``bf16``.

        Returns
        -------
        torch.Tensor
            The tensor.
        """
        names = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
        return self.torch.randn(*shape, device=self.device, dtype=getattr(self.torch, names[dtype]))


@contextmanager
def _tf32(torch: Any, allowed: bool) -> Iterator[None]:
    """Set within a ``with`` block whether fp32 products may use TF32 (``allowed``); restore the setting after."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    cudnn = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = cudnn


def _gemm(bench: DeviceBenchmarkRunner, row: Row) -> list[KernelCall]:
    m, n, k, batch, dtype = row["m"], row["n"], row["k"], row["batch"], row["dtype"]

    def operand(rows: int, columns: int, transposed: bool) -> Any:
        shape = (columns, rows) if transposed else (rows, columns)
        matrices = bench.random_normal(*((batch, *shape) if batch > 1 else shape), dtype=dtype)
        return matrices.transpose(-1, -2) if transposed else matrices

    left = operand(m, k, row["trans_a"] == "T")
    copies = _WEIGHT_COPIES if bench.on_cuda else 1
    return [_partial(bench.torch.matmul, left, operand(k, n, row["trans_b"] == "T")) for _ in range(copies)]


def _elementwise(bench: DeviceBenchmarkRunner, row: Row) -> list[KernelCall]:
    torch, shape = bench.torch, tuple(int(part) for part in row["shape"].split("x"))
    x, out = bench.random_normal(*shape, dtype=row["dtype"]), bench.random_normal(*shape, dtype=row["dtype"])
    functional = torch.nn.functional
    operations: dict[str, KernelCall] = {
        "add": lambda: torch.add(x, other, out=out),
        "copy": lambda: out.copy_(x),
        "relu": lambda: functional.relu(x),
        "gelu": lambda: functional.gelu(x),
        "softmax": lambda: functional.softmax(x, dim=-1),
        "layernorm": lambda: functional.layer_norm(x, shape[-1:]),
    }
    other = bench.random_normal(*shape, dtype=row["dtype"]) if row["op"] == "add" else x
    return [operations[row["op"]]]


def _attention(bench: DeviceBenchmarkRunner, row: Row) -> list[KernelCall]:
    lengths, heads = (row["q_len"], row["kv_len"]), (row["q_heads"], row["kv_heads"])
    attend, _ = _attention_call(bench, row, heads, lengths, row["head_dim"], causal=bool(row["causal"]))
    return [attend]


def _training_attention(bench: DeviceBenchmarkRunner, row: Row) -> list[KernelCall]:
    torch, heads = bench.torch, (row["head_num"], row["kv_head_num"])
    with torch.enable_grad():
        attend, inputs = _attention_call(bench, row, heads, (row["seq_len"],) * 2, row["qk_head_dim"], causal=True)
        if row["op"] == "sdp_fwd":
            return [attend]
        out = attend()
    return [_partial(torch.autograd.grad, out, inputs, torch.randn_like(out), retain_graph=True)]


def _attention_call(
    bench: DeviceBenchmarkRunner,
    row: Row,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    width: int,
    *,
    causal: bool,
) -> tuple[KernelCall, list[Any]]:
    """Build a call of scaled-dot-product attention to benchmark: (call, [queries, keys, values])."""
    torch, batch = bench.torch, row["batch"]
    queries, keys = zip(heads, lengths, strict=True)
    sizes = (queries, keys, keys)
    inputs = [bench.random_normal(batch, count, length, width, dtype=row["dtype"]) for count, length in sizes]
    if torch.is_grad_enabled():
        inputs = [tensor.requires_grad_() for tensor in inputs]
    options = {"is_causal": causal, "enable_gqa": heads[0] != heads[1]}
    return _partial(torch.nn.functional.scaled_dot_product_attention, *inputs, **options), inputs


def _conv(bench: DeviceBenchmarkRunner, row: Row) -> list[KernelCall]:
    """Build the call of a convolution benchmark; 16-bit tensors are channels-last, to time no transposition."""
    torch, dtype = bench.torch, row["dtype"]
    torch.backends.cudnn.benchmark = True
    layout = {"memory_format": torch.contiguous_format if dtype == "fp32" else torch.channels_last}
    x = bench.random_normal(row["n"], row["c"], row["h"], row["w"], dtype=dtype).contiguous(**layout)
    weight = bench.random_normal(row["k"], row["c"], row["r"], row["s"], dtype=dtype).contiguous(**layout)
    options = {"stride": (row["stride_h"], row["stride_w"]), "padding": (row["pad_h"], row["pad_w"])}
    out = torch.nn.functional.conv2d(x, weight, **options)
    if row["direction"] == "fwd":
        return [_partial(torch.nn.functional.conv2d, x, weight, **options)]
    gradient = torch.randn_like(out)
    of_data = row["direction"] == "bwd_data"
    stride, padding, dilation, output_padding = [*options["stride"]], [*options["padding"]], [1, 1], [0, 0]
    no_bias, transposed, groups, output_mask = None, False, 1, [of_data, not of_data, False]
    arguments = (stride, padding, dilation, transposed, output_padding, groups, output_mask)
    return [_partial(torch.ops.aten.convolution_backward, gradient, x, weight, no_bias, *arguments)]


def _rnn(bench: DeviceBenchmarkRunner, row: Row) -> list[KernelCall]:
    """Build the call of a recurrent-layer benchmark; the input has one feature, so that its product is cheap."""
    torch = bench.torch
    cell = {"vanilla": torch.nn.RNN, "lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[row["cell"]]
    x = bench.random_normal(row["timesteps"], row["batch"], 1, dtype=row["dtype"])
    layer = cell(1, row["hidden"]).to(device=bench.device, dtype=x.dtype)
    if row["direction"] == "fwd":
        return [_partial(layer, x)]
    with torch.enable_grad():
        out, _ = layer(x.requires_grad_())
    leaves = [x, *layer.parameters()]
    return [_partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True)]


def _copies(bench: DeviceBenchmarkRunner, row: Row) -> list[KernelCall]:
    torch = bench.torch
    host = torch.empty(row["bytes"], dtype=torch.uint8, pin_memory=bench.on_cuda)
    remote = torch.empty(row["bytes"], dtype=torch.uint8, device=bench.device)
    target, origin = (remote, host) if row["copy"] == "h2d" else (host, remote)
    return [_partial(target.copy_, origin, non_blocking=True)]


def _partial(call: Callable[..., object], *arguments: Any, **named: Any) -> KernelCall:
    return lambda: call(*arguments, **named)


#: Table -> what makes the calls of a row.
_BUILDERS: Mapping[str, Callable[[DeviceBenchmarkRunner, Row], list[KernelCall]]] = {
    "gemm": _gemm, "elementwise": _elementwise, "attention": _attention, "training_kernels": _training_attention,
    "conv": _conv, "rnn": _rnn, "copies": _copies,
}  # fmt: skip


def import_torch() -> Any:
    """Import torch; raise a SpecError that says how to install torch if the import fails."""
    try:
        import torch
    except ImportError:
        raise SpecError("measuring needs torch, which is not installed; pip install 'paleo-perf[torch]'") from None
    return torch


def device_benchmark_runner(text: str, name: str | None, date: str) -> DeviceBenchmarkRunner:
    """Create the benchmark runner of a device that torch sees.

    Parameters
    ----------
    text : str
        Device in torch's notation: ``cuda:0``, …, or ``cpu`` for tests.
    name : str, optional
        Catalog name of the device, needed if the name that CUDA reports is unknown to the catalog.
    date : str
        Date written into table rows (YYYY-MM-DD).

    Returns
    -------
    DeviceBenchmarkRunner
        Runner that times kernels on the device.

    Raises
    ------
    SpecError
        If torch sees no such device, or the catalog does not know the device.
    """
    torch = import_torch()
    try:
        device = torch.device(text)
    except RuntimeError:
        raise SpecError(f"--device {text}: no such kind of device; expected cuda, cuda:1 or cpu") from None
    if device.type not in ("cuda", "cpu"):
        raise SpecError(f"--device {text}: expected cuda, cuda:1, … (or cpu, to test the path)")
    on_cuda = device.type == "cuda"
    if on_cuda and not torch.cuda.is_available():
        raise SpecError(
            f"--device {text}: torch {torch.__version__} sees no CUDA device. Measuring needs an NVIDIA GPU, its "
            "driver and a CUDA build of torch; measured tables of other machines are fitted with --fit FILE…"
        )
    if on_cuda and (device.index or 0) >= torch.cuda.device_count():
        raise SpecError(f"--device {text}: there are {torch.cuda.device_count()} CUDA devices")
    if not on_cuda and name is None:
        raise SpecError(
            f"--device {text}: nothing tells which device of the catalog this CPU is; say --name NAME (`paleo list "
            "devices`), such as --name epyc-9654"
        )
    reported = torch.cuda.get_device_name(device) if on_cuda else "cpu"
    if on_cuda:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # graphs are not captured on the default stream
    clock: _Stopwatch = _CudaClock(torch) if on_cuda else WallClock()
    more = {"device_reported": reported, "driver": _nvidia_smi("driver_version") if on_cuda else "", "date": date}
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    cudnn = f" (cuDNN {version // 10000}.{version // 100 % 100}.{version % 100})" if version else ""
    library = f"PyTorch {torch.__version__}{cudnn}"
    return DeviceBenchmarkRunner(torch, device, device_catalog_name(reported, name), clock, library, more)


def device_catalog_name(reported: str, name: str | None) -> str:
    """Look up the catalog name of a device from the name that CUDA reports or that the user gives.

    Parameters
    ----------
    reported : str
        Name that CUDA reports.
    name : str, optional
        Name that the user gives; takes precedence.

    Returns
    -------
    str
        Name of the device in the catalog.

    Raises
    ------
    SpecError
        If the catalog knows no device of that name; the message asks for ``--name``.
    """
    try:
        return find_device(name or reported).name
    except PaleoError as error:
        if name is not None:
            raise SpecError(f"--name {name}: {error}") from None
        raise SpecError(
            f"the device calls itself {reported!r}, which the catalog does not know; say --name NAME: {error}"
        ) from None


def _nvidia_smi(query: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip().splitlines()[0].strip()
    return ""


def _sustained_clock(torch: Any, device: Any) -> str:
    """Return the clock of the multiprocessors right after a measurement [MHz] as text; '' if unknown."""
    with suppress(Exception):  # needs pynvml, and a driver that answers
        return str(torch.cuda.clock_rate(device))
    return _nvidia_smi("clocks.sm")


#: Columns of a measured row that do not say what was asked for.
_RESULT_COLUMNS = frozenset(
    {"source", "device", "library", "time_us", "timing", "device_reported", "driver", "date", "clock_mhz"}
)


class MeasurementFolder:
    """Folder of CSV files to which benchmark results are appended.

    Benchmarks that a file already holds are not repeated.
    """

    def __init__(self, folder: Path, device: str, library: str) -> None:
        self.folder, self.device, self.library = folder, device, library
        self._done: dict[str, set[str]] = {}

    def path(self, table: str) -> Path:
        """Return the path of the CSV file of one kind of table.

        Parameters
        ----------
        table : str
            Kind of the table, such as ``gemm``.

        Returns
        -------
        Path
            CSV file of that table.
        """
        return self.folder / f"{self.device}.{table}.csv"

    def is_measured(self, point: BenchmarkPoint) -> bool:
        """Return True if the folder already has a time of a benchmark with this library version.

        Parameters
        ----------
        point : BenchmarkPoint
            Benchmark to look up.

        Returns
        -------
        bool
            True if the table has such a row.
        """
        if point.table not in self._done:
            path = self.path(point.table)
            rows = read_csv_rows(path) if is_file(path) else ()
            self._done[point.table] = {self._key(row) for row in rows if row.get("library") == self.library}
        return self._key(point.row) in self._done[point.table]

    def append(self, point: BenchmarkPoint, row: Row) -> None:
        """Append a measured row to the CSV file of its table; the header of a new file comes from its first row.

        Parameters
        ----------
        point : BenchmarkPoint
            Benchmark that was measured.
        row : mapping of str to object
            Table row with the measured time.
        """
        path = self.path(point.table)
        append_csv_row(path, (csv_columns(path) if is_file(path) else None) or list(row), row)
        self.is_measured(point)
        self._done[point.table].add(self._key(point.row))

    def files(self) -> list[Path]:
        """List the CSV files of the benchmarked device in the folder, sorted."""
        return sorted(self.folder.glob(f"{self.device}.*.csv"))

    def _key(self, row: Row) -> str:
        identifying_columns = sorted(name for name in row if name not in _RESULT_COLUMNS and row[name] is not None)
        return "|".join(f"{name}={row[name]}" for name in identifying_columns)


def run_benchmarks(
    measured: DeviceBenchmarkRunner,
    points: Sequence[BenchmarkPoint],
    tables: MeasurementFolder,
    budget: float,
    report: Callable[[BenchmarkPoint], object] = lambda point: None,
) -> tuple[int, list[str]]:
    """Run benchmarks until all are measured or the time budget is spent.

    Parameters
    ----------
    measured : DeviceBenchmarkRunner
        Runner that times kernels on the device.
    points : sequence of BenchmarkPoint
        Benchmarks in the order in which they run.
    tables : MeasurementFolder
        Folder to which rows are written.
    budget : float
        Time after which no further benchmark starts [s].
    report : callable, default lambda point: None
        Called with each benchmark as it starts.

    Returns
    -------
    tuple of (int, list of str)
        (number of rows written, descriptions of failed benchmarks with the error).
    """
    start, written, failed = time.perf_counter(), 0, list[str]()
    for point in points:
        report(point)
        if tables.is_measured(point):
            continue
        if time.perf_counter() - start > budget:
            break
        try:
            row = measured.measure(point)
        except (RuntimeError, NotImplementedError) as error:  # out of memory, or a kernel that is not there
            failed.append(f"{point.table} {point.row_key}: {str(error).splitlines()[0][:120]}")
            if measured.on_cuda:
                measured.torch.cuda.empty_cache()
            continue
        if math.isfinite(row["time_us"]) and row["time_us"] > 0:
            tables.append(point, row)
            written += 1
    return written, failed


def measure_collectives(
    torch: Any, device_type: str, system: str, date: str, points_of: Callable[[int, int], list[BenchmarkPoint]]
) -> Iterator[tuple[BenchmarkPoint, dict[str, Any]]]:
    """Benchmark collectives among the processes that ``torchrun`` started.

    Parameters
    ----------
    torch : object
        The torch module.
    device_type : str
        ``cuda`` or ``cpu``.
    system : str
        Catalog name of the system.
    date : str
        Date written into rows (YYYY-MM-DD).
    points_of : callable
        Function of (ranks, ranks per node) that lists the benchmarks, such as `collective_benchmarks`.

    Yields
    ------
    tuple of (BenchmarkPoint, dict of str to object)
        Benchmarks with their table rows, on rank 0; nothing on other ranks.
    """
    distributed, on_cuda = torch.distributed, device_type == "cuda"
    distributed.init_process_group("nccl" if on_cuda else "gloo")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if on_cuda:
        torch.cuda.set_device(local)
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    library = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if on_cuda else "gloo"
    device = torch.device("cuda", local) if on_cuda else torch.device("cpu")
    teams: dict[int, Any] = {}
    for point in points_of(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))):
        size = int(point.row["ranks"])
        if size not in teams:
            teams[size] = distributed.new_group(list(range(size)))
        seconds = _collective_time(torch, device, teams[size], point.row, rank < size)
        distributed.barrier()
        if rank == 0 and seconds is not None:
            times = {"time_us": round(seconds / MICROSECOND, 4), "date": date}
            yield point, {"source": SOURCE_NAME, "system": system, "library": library, **point.row, **times}
    distributed.destroy_process_group()


def _collective_time(torch: Any, device: Any, team: Any, row: Row, member: bool) -> float | None:
    """Measure the mean time of a collective in a loop, as nccl-tests does [s].

    None for ranks outside the group, or if the backend lacks the collective.
    """
    if not member:
        return None
    elements = max(row["ranks"], row["bytes"] // _BYTES_PER_ELEMENT[row["dtype"]] // row["ranks"] * row["ranks"])
    full = torch.ones(elements, device=device, dtype=torch.bfloat16)
    shard, other = torch.ones_like(full[: elements // row["ranks"]]), torch.ones_like(full)
    distributed = torch.distributed
    calls: Mapping[str, KernelCall] = {
        "all_reduce": lambda: distributed.all_reduce(full, group=team),
        "all_gather": lambda: distributed.all_gather_into_tensor(full, shard, group=team),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(shard, full, group=team),
        "all_to_all": lambda: distributed.all_to_all_single(other, full, group=team),
    }
    call, settle = calls[row["op"]], torch.cuda.synchronize if device.type == "cuda" else lambda: None
    try:
        for _ in range(3):
            call()
    except RuntimeError:
        return None
    settle()
    start = time.perf_counter()
    for _ in range(_MAX_CALLS_PER_SAMPLE):
        call()
    settle()
    return (time.perf_counter() - start) / _MAX_CALLS_PER_SAMPLE
