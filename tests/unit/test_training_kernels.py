"""Kernels of training steps: experts in a loop, attention with narrow values, rows of the table."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from paleo.pricing.attention import PrefillParameters, attention_prefill_time
from paleo.pricing.families import (
    CONCURRENT_EXPERTS,
    TrainingKernelParameters,
    looped_expert_gemm_time,
    training_attention_parameters,
)
from paleo.pricing.gemm import GemmParameters, gemm_time
from paleo.pricing.kernels import device_datasheet
from paleo.specs.device import load_device
from paleo.tables.kernels import KERNEL_TABLES

B200 = device_datasheet(load_device("b200"), "bf16")
PRODUCT = {
    "m": 1024.0, "n": 4096.0, "k": 7168.0, "element_bytes": 2.0, "result_bytes": 2.0, "device": B200,
    "parameters": GemmParameters(),
}  # fmt: skip


def test_experts_run_as_many_at_a_time_as_there_are_streams() -> None:
    round_of_four = float(gemm_time(batch=CONCURRENT_EXPERTS, **PRODUCT))
    assert float(looped_expert_gemm_time(experts=32.0, launch=0.0, **PRODUCT)) == pytest.approx(8 * round_of_four)
    assert float(looped_expert_gemm_time(experts=32.0, launch=1e-6, **PRODUCT)) == pytest.approx(
        8 * round_of_four + 32e-6
    )


def test_attention_of_narrow_values_skips_their_products_but_where_a_kernel_pads_them() -> None:
    shape = {
        "batch": 1.0, "query_heads": 128.0, "kv_heads": 128.0, "query_length": 8192.0, "kv_length": 8192.0,
        "head_dim": 192.0, "causal": True, "device": B200, "parameters": PrefillParameters(exp_cycles=1e-9),
    }  # fmt: skip
    whole, narrow = (float(attention_prefill_time(kernel_name="fa4", value_dim=v, **shape)) for v in (192.0, 128.0))
    assert narrow / whole == pytest.approx(320 / 384, rel=0.03)
    padded = [float(attention_prefill_time(kernel_name="fa2", value_dim=v, **shape)) for v in (192.0, 128.0)]
    assert padded[1] == pytest.approx(padded[0], rel=0.01)


def test_training_scales_the_rates_of_an_engines_kernel() -> None:
    trained = training_attention_parameters(
        PrefillParameters(mma_efficiency=0.6), TrainingKernelParameters(forward_rate_ratio=1.5, backward_rate_ratio=0.5)
    )
    assert (trained.mma_efficiency, trained.backward_efficiency) == (pytest.approx(0.9), 0.5)


@pytest.mark.parametrize(
    ("stage", "rows", "columns", "length", "written"),
    [("fwd", 512, 4096, 7168, 2), ("bwd_grad_act", 512, 7168, 4096, 2), ("bwd_grad_w", 4096, 7168, 512, 8)],
)
def test_stages_of_experts_are_products_of_their_shape(
    stage: str, rows: float, columns: float, length: float, written: float
) -> None:
    """FLOP are the same in each stage; a gradient that is added to an fp32 sum reads and writes four bytes."""
    kind = KERNEL_TABLES["training_kernels"]
    frame = pd.DataFrame(
        [{"op": "group_matmul", "device": "b200", "groups": 64, "group_m": 512, "group_n": 4096, "group_k": 7168,
          "stage": stage, "accumulate": stage == "bwd_grad_w", "main_grad_dtype": "fp32", "out_dtype": "bf16"}]
    )  # fmt: skip
    flops, moved = kind.flops_and_bytes(frame)
    assert flops[0] == 2.0 * 64 * 512 * 4096 * 7168
    assert moved[0] == 64 * (2.0 * (rows + columns) * length + written * rows * columns)
    assert np.isfinite(kind.predict_times(kind.prepare_rows(frame), B200, TrainingKernelParameters())).all()
