"""Recurrences with a matrix as state: limits of their prices, families of rows, one kernel in a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from paleo.layers.base import LAYERS, LayerImplementations
from paleo.operations.base import RecomputedFusedChain, map_tensors
from paleo.operations.tensor import Tensor, default_precision
from paleo.pricing.kernels import device_datasheet
from paleo.pricing.scans import ScanParameters, chunked_scan_time, short_convolution_time, token_scan_time
from paleo.specs.device import load_device
from paleo.tables.kernels import KERNEL_TABLES

H100 = device_datasheet(load_device("h100-sxm5-80gb"), "bf16")
#: A kernel that memory alone bounds.
STREAM = ScanParameters(
    launch_time=0.0,
    host_time=0.0,
    flops_per_cycle=1e12,
    bandwidth_efficiency=1.0,
    chunk_step_cycles=0.0,
    block_start_cycles=0.0,
)


def array(value: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([value], dtype=np.float64)


STATE = {"batch": array(64.0), "heads": array(32.0), "keys": array(128.0), "values": array(128.0), "device": H100}


def test_a_token_reads_and_writes_the_state_of_its_sequence() -> None:
    seconds = token_scan_time(tokens=array(1.0), token_bytes=array(0.0), parameters=STREAM, **STATE)
    assert seconds == pytest.approx(2 * 64 * 32 * 128 * 128 * 4 / H100.memory_bandwidth)


def test_a_long_prompt_takes_time_in_proportion_and_many_short_ones_fill_chunks() -> None:
    shape = {"token_bytes": array(16384.0), "chunk": 64.0, "parameters": ScanParameters(launch_time=0.0), **STATE}
    one, four = (float(chunked_scan_time(length=array(length), **shape)[0]) for length in (4096.0, 16384.0))
    assert four == pytest.approx(4 * one, rel=0.02)
    assert chunked_scan_time(length=array(2.0), **shape) == pytest.approx(
        chunked_scan_time(length=array(64.0), **shape), rel=0.2
    )


def test_a_short_convolution_streams_its_channels_or_starts_a_block_for_each() -> None:
    shape = {"batch": array(8.0), "length": array(8192.0), "channels": array(4096.0), "taps": array(1.0)}
    seconds = short_convolution_time(**shape, device=H100, parameters=STREAM)
    assert seconds == pytest.approx(4 * 8 * 8192 * 4096 / H100.memory_bandwidth)
    blocks = short_convolution_time(**shape, device=H100, parameters=replace(STREAM, block_start_cycles=1e6))
    assert blocks == pytest.approx(8 * 4096 * 1e6 / H100.multiprocessors / H100.clock_hz, rel=1e-3)


def test_rows_are_of_the_kernels_of_their_release() -> None:
    kind = KERNEL_TABLES["scan"]
    rows = [
        ("causal_conv1d_fn", "sglang", "0.5.10", "context"), ("causal_conv1d_fn", "sglang", "0.5.14", "context"),
        ("causal_conv1d_update", "vllm", "0.24.0", "verify"), ("chunk_kda", "sglang", "0.5.16", "context"),
    ]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["kernel_source", "library", "version", "phase"])
    assert list(kind.kernel_family(frame)) == [
        "scan.conv.cuda",
        "scan.conv.triton",
        "scan.conv.verify",
        "scan.chunk_kda",
    ]
    assert list(kind.timing_method(frame)) == ["graph/early", "graph", "graph", "graph"]


def test_a_layer_runs_its_recurrence_as_one_kernel_and_three_times_backward() -> None:
    layer = LAYERS["mamba2"].model_validate({"heads": 64, "head_dim": 64, "groups": 8, "state": 128, "chunk": 128})
    expansion = layer.to_operations(
        "m", (Tensor("x", ("batch", "seq", "hidden"), (2, 4096, 2688)),), LayerImplementations()
    )
    chain = next(operation for operation in expansion.operations if isinstance(operation, RecomputedFusedChain))
    (forward,), (backward,) = (
        chain.forward_kernels(default_precision("bf16")),
        chain.backward_kernels(default_precision("bf16")),
    )
    expected = {"batch": 2, "length": 4096, "heads": 64, "keys": 128, "values": 64, "passes": 1}
    assert dict(forward.shape) == expected
    assert dict(backward.shape) == expected | {"passes": 3}
    renamed = map_tensors(chain, lambda tensor: replace(tensor, name=f"new.{tensor.name}"))
    inside = [tensor.name for operation in renamed.operations for tensor in (*operation.read_tensors, operation.out)]
    assert inside and all(name.startswith("new.") for name in inside)
