"""Bytes of a training state in each dtype."""

from __future__ import annotations

import pytest

from paleo.errors import SpecError
from paleo.operations.base import OPTIMIZERS, configure_optimizer
from paleo.operations.tensor import BYTES_PER_NUMBER, default_precision, with_autocast_weights
from paleo.predict import predict
from paleo.pricing.calibration_lookup import find_calibrated_parameters
from paleo.pricing.gemm import GemmParameters, gemm_time
from paleo.pricing.kernels import device_datasheet, kernel_predictor
from paleo.specs.device import Device
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import load_software
from paleo.specs.system import load_system
from paleo.tables.kinds._transformers import operand_scaling_of_run


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
    made = default_precision(dtype)
    assert (made.activation_bytes, made.operand_bytes, made.parameter_bytes) == (activation, operand, parameter)
    assert (made.gradient_bytes, made.master_bytes, made.state_bytes) == (gradient, master, state)
    assert made.bytes_of("activation") == activation
    assert made.bytes_of("parameter") == parameter
    assert made.bytes_of("gradient") == gradient
    assert (made.bytes_of("statistic"), made.bytes_of("mask"), made.bytes_of("index")) == (4, 1, 8)


@pytest.mark.parametrize("dtype", BYTES_PER_NUMBER)
def test_mixed_precision_adam_takes_sixteen_bytes_a_parameter(dtype: str) -> None:
    """Rajbhandari et al., ZeRO, 2020, section 3.1: 2 + 2 + 12 in sixteen bits; 4 + 4 + 8 in fp32."""
    made = default_precision(dtype)
    total = made.parameter_bytes + made.gradient_bytes + OPTIMIZERS["adam"].state_bytes(made)
    assert total == (32 if dtype == "fp64" else 16)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8", "fp32"])
def test_autocast_keeps_wide_weights_and_the_same_sixteen_bytes(dtype: str) -> None:
    made = with_autocast_weights(default_precision(dtype))
    assert (made.parameter_bytes, made.gradient_bytes, made.master_bytes, made.fp32_activation_bytes) == (4, 4, 0, 4)
    assert made.parameter_bytes + made.gradient_bytes + OPTIMIZERS["adam"].state_bytes(made) == 16
    assert made.operand_bytes == default_precision(dtype).operand_bytes
    assert made.casts_weights_each_pass == (dtype != "fp32")


def test_an_unknown_dtype_has_near_names() -> None:
    with pytest.raises(SpecError, match="nearest: 'bf16'"):
        default_precision("bf61")
    with pytest.raises(SpecError, match="nearest: 'adam'"):
        configure_optimizer("adm")


def test_narrow_products_quantise_their_operands_inside_the_blocks_alone() -> None:
    """Each product with a weight reads its input as 2 bytes and writes it twice as 1 (one transposed); so its gradient.
    The head and attention stay in sixteen bits."""
    run = Run(batch=1, dtype="fp8", software="megatron-core", model={"layers": 3, "seq": 128})
    made = predict(load_model("llama2-7b"), load_system("h100-sxm5-80gb"), run)
    kernels = {(c.kernel.name, c.kernel.phase): c.kernel for s in made.program.sections for c in s.kernels}
    casts = [kernel for (name, _), kernel in kernels.items() if name.endswith(".quantise")]
    assert len(casts) == 2 * 4  # qkv, out, up, down; forward and backward
    tokens, hidden, ffn = 128, 4096, 11008
    read = {kernel.name.removesuffix(".quantise").split(".")[-1]: kernel.bytes_read for kernel in casts
            if kernel.phase == "forward"}  # fmt: skip
    assert read == {"qkv": 2 * tokens * hidden, "out": 2 * tokens * hidden, "up": 2 * tokens * hidden,
                    "down": 2 * tokens * ffn}  # fmt: skip
    assert all(kernel.bytes_written == kernel.bytes_read for kernel in casts)
    operations = {name.split(".")[-1]: kernel.operation for (name, phase), kernel in kernels.items()
                  if kernel.family == "gemm" and phase == "forward"}  # fmt: skip
    assert operations == {"qkv": "narrow", "out": "narrow", "up": "narrow", "down": "narrow", "head": "gemm"}


def test_attention_and_head_cost_the_same_in_eight_bits_as_in_sixteen() -> None:
    def seconds(dtype: str) -> dict[str, float]:
        run = Run(batch=1, dtype=dtype, software="cuda-graph", model={"layers": 3, "seq": 2048})
        made = predict(load_model("llama2-7b"), load_system("h100-sxm5-80gb"), run)
        kernels = [c.kernel for s in made.program.sections for c in s.kernels]
        prices = (
            kernel_predictor(made.system.device, dtype, "auto", load_software("cuda-graph")).times(kernels).device_time
        )
        return {kernel.name + kernel.phase: float(time) for kernel, time in zip(kernels, prices, strict=True)}

    eight, sixteen = seconds("fp8"), seconds("bf16")
    same = [name for name in sixteen if ".core" in name or name.startswith("head")]
    assert len(same) == 5 and all(eight[name] == sixteen[name] for name in same)
    assert all(eight[name] < 0.75 * sixteen[name] for name in sixteen if ".up" in name and "bias" not in name)


def test_training_draws_more_power_than_the_calibrating_rows() -> None:
    """The power of random training data slows large products in matrix units, and no others."""

    def seconds(system: str, dtype: str, activity: float) -> float:
        device = load_system(system).device
        known = found(device, dtype)
        return float(gemm_time(
            m=8192, n=8192, k=8192, element_bytes=2, result_bytes=2, activity=activity, sustained=1.0,
            device=device_datasheet(device, dtype), parameters=known,
        ))  # fmt: skip

    def found(device: Device, dtype: str) -> GemmParameters:
        return find_calibrated_parameters(
            GemmParameters, subject=device.name, architecture=device.architecture, memory_kind=device.memory.kind,
            family="gemm.tensor",
        ).parameters  # fmt: skip

    for name, ratio in POWER_OVER_LIMIT.items():
        known = found(load_system(name).device, "bf16")
        assert known.training_energy_per_flop > known.energy_per_flop
        slower = seconds(name, "bf16", known.training_energy_ratio) / seconds(name, "bf16", 1.0)
        assert slower == pytest.approx(ratio, abs=0.03), name


#: (1 + a⁴ r⁴)^(1/4) over (1 + r⁴)^(1/4) for r, the power at full clock over what the board leaves, and a, training's
#: energy over that of the calibration's rows (1.25 on both), as far as arithmetic limits the product.
POWER_OVER_LIMIT = {"h100-sxm5-80gb": 1.14, "a100-sxm4-80gb": 1.05}


@pytest.mark.parametrize(
    ("dtype", "scaling", "software", "largest", "written"),
    [
        ("fp8", None, "megatron-core", 0, 2 * 1.0),
        ("fp8", "current", "megatron-core", 0, 2 * 1.0),
        ("fp8", "current", "torchtitan-eager", 1, 2 * 1.0),
        ("fp8", "mxfp8", "megatron-core", 0, 2 * (1.0 + 1 / 32)),
        ("fp4", None, "megatron-core", 1, 2 * (0.5 + 1 / 16)),
        ("fp4", "mxfp8", "megatron-core", 0, 2 * (0.5 + 1 / 32)),
    ],
)
def test_scales_of_narrow_formats(dtype: str, scaling: str | None, software: str, largest: int, written: float) -> None:
    """Bytes written for each number of an operand and its transpose, and whether its largest value takes a pass."""
    run = {
        "batch": 1,
        "dtype": dtype,
        "kernels.scaling": scaling,
        "software": software,
        "model": {"layers": 3, "seq": 128},
    }
    made = predict(load_model("llama2-7b"), load_system("dgx-b200"), Run.model_validate(run))
    kernels = [counted.kernel for section in made.program.sections for counted in section.kernels]
    casts, passes = ([kernel for kernel in kernels if kernel.name.endswith(name)] for name in (".quantise", ".largest"))
    assert len(casts) == 8 and len(passes) == largest * 8
    assert all(kernel.bytes_written == pytest.approx(written * kernel.bytes_read / 2) for kernel in casts)
    assert sum(kernel.bytes for kernel in passes) == largest * sum(kernel.bytes_read for kernel in casts)


def test_rows_name_how_they_scale() -> None:
    said = {"fp8 (current scaling)?": "current", "mxfp8": "mxfp8", "nvfp4": "nvfp4", "fp8 (amp)": None, "bf16": None}
    assert {name: operand_scaling_of_run({"dtype_reported": name}) for name in said} == said
