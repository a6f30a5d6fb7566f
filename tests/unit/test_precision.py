"""Bytes of a training state in each dtype."""

from __future__ import annotations

import pytest

from paleo.errors import SpecError
from paleo.optimizers import OPTIMIZERS, optimizer
from paleo.precision import BYTES, precision


@pytest.mark.parametrize(
    ("dtype", "activation", "operand", "parameter", "gradient", "master", "state"),
    [
        ("fp64", 8, 8, 8, 8, 0, 8),
        ("fp32", 4, 4, 4, 4, 0, 4),
        ("tf32", 4, 4, 4, 4, 0, 4),
        ("fp16", 2, 2, 2, 2, 4, 4),
        ("bf16", 2, 2, 2, 2, 4, 4),
        ("fp8", 2, 1, 2, 2, 4, 4),
        ("fp4", 2, 0.5, 2, 2, 4, 4),
    ],
)
def test_formats(
    dtype: str, activation: float, operand: float, parameter: float, gradient: float, master: float, state: float
) -> None:
    made = precision(dtype)
    assert (made.activation, made.operand, made.parameter) == (activation, operand, parameter)
    assert (made.gradient, made.master, made.state) == (gradient, master, state)
    assert made.bytes_of("activation") == activation
    assert made.bytes_of("parameter") == parameter
    assert made.bytes_of("gradient") == gradient
    assert (made.bytes_of("statistic"), made.bytes_of("mask"), made.bytes_of("index")) == (4, 1, 8)


@pytest.mark.parametrize("dtype", BYTES)
def test_mixed_precision_adam_takes_sixteen_bytes_a_parameter(dtype: str) -> None:
    """Rajbhandari et al., ZeRO, 2020, section 3.1: 2 + 2 + 12 in sixteen bits; 4 + 4 + 8 in fp32."""
    made = precision(dtype)
    total = made.parameter + made.gradient + OPTIMIZERS["adam"].state_bytes(made)
    assert total == (32 if dtype == "fp64" else 16)


def test_an_unknown_dtype_has_near_names() -> None:
    with pytest.raises(SpecError, match="nearest: 'bf16'"):
        precision("bf61")
    with pytest.raises(SpecError, match="nearest: 'adam'"):
        optimizer("adm")
