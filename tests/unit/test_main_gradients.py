"""Gradients in fp32 beside bf16 weights, as Megatron-LM sums them up, and what a run may state of its software."""

from __future__ import annotations

import pytest

from paleo.predict import Prediction, predict
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import load_software
from paleo.specs.system import load_system
from paleo.tables.kinds._transformers import run_of_transformer_row

H100 = load_system("dgx-h100")


def predicted(strategy: str = "dp", **run: object) -> Prediction:
    asked = {"gpus": 8, "batch": 1, "microbatch": 1, "dtype": "bf16", "software": "megatron-core", **run}
    return predict(load_model("llama3-8b"), H100, Run.model_validate({**asked, "strategy": strategy}))


def bytes_a_parameter(prediction: Prediction) -> float:
    kept = prediction.memory
    return (kept.parameters + kept.gradients + kept.optimizer) / prediction.graph.parameters


@pytest.mark.parametrize(
    ("strategy", "gradients", "expected"),
    [
        ("dp", "narrow", 16),
        ("dp", "fp32", 18),
        ("dp=8,zero=1", "narrow", 4 + 12 / 8),
        ("dp=8,zero=1", "fp32", 6 + 12 / 8),
    ],
)
def test_bytes_a_parameter_are_those_of_megatron(strategy: str, gradients: str, expected: float) -> None:
    assert bytes_a_parameter(predicted(strategy, kernels={"main_gradients": gradients})) == pytest.approx(
        expected, rel=1e-6
    )


def test_wider_gradients_take_longer_to_exchange_and_to_write() -> None:
    narrow, wide = (predicted(kernels={"main_gradients": format}, exchange="after") for format in ("narrow", "fp32"))
    total = narrow.breakdown.communication_total
    assert wide.breakdown.communication_total == pytest.approx(2 * total, rel=0.05)
    assert (
        wide.step_time - wide.breakdown.communication_exposed
        > narrow.step_time - narrow.breakdown.communication_exposed
    )


def test_fp32_training_and_autocast_have_them_anyway() -> None:
    narrow, wide = (predicted(dtype="fp32", kernels={"main_gradients": format}) for format in ("narrow", "fp32"))
    assert narrow.step_time == wide.step_time and narrow.memory == wide.memory


def test_a_profile_may_say_so_too() -> None:
    profile = load_software("megatron-core").with_fields({"formats.main_gradients": "fp32"})
    run = Run(gpus=8, batch=1, dtype="bf16", software="megatron-core")
    assert bytes_a_parameter(predict(load_model("llama3-8b"), H100, run, profile)) == pytest.approx(18, rel=1e-6)


ROW = {
    "source": "s", "model": "llama3-8b", "system": "dgx-h100", "device": "h100-sxm5-80gb", "layers": 32, "hidden": 4096,
    "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "gated_mlp": 1, "vocab": 128256, "seq_len": 8192, "n_gpus": 8,
    "tp": 1, "pp": 1, "dp": 8, "dtype": "bf16", "micro_batch": 1, "global_batch": 8, "recompute": "none",
    "software": "pytorch-eager", "framework": "huggingface",
}  # fmt: skip


def test_rows_state_their_attention_and_their_loss() -> None:
    """Long contexts of Hugging Face were priced with eager attention: ten times the time at 256k tokens."""
    plain, stated = (
        run_of_transformer_row(ROW),
        run_of_transformer_row(ROW | {"attention": "flash", "cross_entropy": "fused"}),
    )
    assert (plain.kernels.attention, plain.kernels.cross_entropy) == (None, None)
    assert (stated.kernels.attention, stated.kernels.cross_entropy) == ("fused", "tiled"), (
        "Liger's, beside such networks"
    )
    model = load_model("llama3-8b")
    eager, flash = (
        predict(model, H100, run.model_copy(update={"software": "huggingface-eager"})) for run in (plain, stated)
    )
    assert flash.step_time < 0.8 * eager.step_time
    assert flash.memory.activations < 0.3 * eager.memory.activations


def test_rows_state_the_modules_that_they_recompute() -> None:
    run = run_of_transformer_row(ROW | {"recompute": "selective", "recompute_modules": "layernorm+moe_act"})
    assert run.recompute.modules == ("layernorm", "moe_act")
    assert run_of_transformer_row(ROW).recompute.modules == ()


def test_megatron_keeps_them_in_fp32_and_recipes_of_nemo_do_not() -> None:
    """18 and 6 + 12/dp bytes a parameter (Megatron-Core's documentation of its distributed optimizer); 16 in NeMo."""
    for software, whole, shared in (("megatron-core", 18, 6 + 12 / 8), ("nemo", 16, 4 + 12 / 8)):
        assert bytes_a_parameter(predicted(software=software)) == pytest.approx(whole, rel=1e-6)
        assert bytes_a_parameter(predicted("dp=8,zero=1", software=software)) == pytest.approx(shared, rel=1e-6)


@pytest.mark.parametrize(("format", "more"), [("narrow", 2.0), ("fp32", 6.0)])
def test_a_product_that_adds_to_the_sum_reads_and_writes_it(format: str, more: float) -> None:
    """A result of 2 bytes a weight becomes a sum that is read and written: 2 bytes more in bf16, 6 in fp32."""
    fused = load_software("megatron-core")
    plain = fused.with_fields({"gradients.accumulated": False})
    run = Run.model_validate(
        {"gpus": 1, "batch": 1, "dtype": "bf16", "software": "megatron-core", "kernels.main_gradients": format}
    )
    moved = [
        sum(section.repeat * counted.repetitions * counted.kernel.bytes for section in each.program.sections
            for counted in section.kernels if counted.kernel.name.endswith(".sums"))
        for each in (predict(load_model("llama3-8b"), H100, run, profile) for profile in (plain, fused))
    ]  # fmt: skip
    assert moved[0] == 0.0
    assert moved[1] == pytest.approx(more * 8.03e9, rel=1e-3)


def test_an_accumulator_is_added_to_in_a_pass_of_its_own_and_exchanged() -> None:
    """bf16 read, fp32 read and written: 10 bytes a parameter; kept: 2 + 2 + 4 + 12; exchanged: 4. Cast first, 6 more
    are moved, and the sum reads what was cast."""
    plain = load_software("megatron-2021")
    summing = plain.with_fields({"gradients.main_gradient_bytes": 4.0})
    run = Run.model_validate({"gpus": 8, "batch": 1, "dtype": "bf16", "software": "megatron-2021"})
    narrow, wide = (predict(load_model("llama3-8b"), H100, run, profile) for profile in (plain, summing))
    moved = sum(
        section.repeat * counted.repetitions * counted.kernel.bytes
        for section in wide.program.sections
        for counted in section.kernels
        if counted.kernel.name.endswith(".accumulation")
    )
    assert moved == pytest.approx(10 * 8.03e9, rel=1e-3)
    assert bytes_a_parameter(wide) == pytest.approx(20, rel=1e-6)
    cast = predict(
        load_model("llama3-8b"), H100, run, summing.with_fields({"gradients.casts_gradients_before_accumulation": True})
    )
    sections = cast.program.sections
    kernels = [(each.kernel, each.repetitions * section.repeat) for section in sections for each in section.kernels]
    passes = {
        name: sum(times * kernel.bytes for kernel, times in kernels if kernel.name.endswith(name)) / 8.03e9
        for name in (".widening", ".accumulation")
    }
    assert passes == pytest.approx({".widening": 2 + 4, ".accumulation": 3 * 4}, rel=1e-3)
    assert bytes_a_parameter(cast) == bytes_a_parameter(wide)
    assert wide.breakdown.communication_total == pytest.approx(2 * narrow.breakdown.communication_total, rel=0.05)


def test_pieces_that_zero_gathers_one_by_one_cost_the_host() -> None:
    """32 blocks of 4 products and 2 norms, embedding, last norm and output: 195 tensors, each in 8 pieces of 17 us."""
    pieces = load_software("nanotron")
    flat = pieces.with_fields({"host.piece": 0.0})
    run = {"gpus": 8, "batch": 8, "dtype": "bf16", "software": "nanotron"}
    for strategy, seconds in (("zero=1", 195 * 8 * 17e-6), ("dp", 0.0)):
        asked = Run.model_validate({**run, "strategy": strategy})
        slow, fast = (predict(load_model("llama3-8b"), H100, asked, profile) for profile in (pieces, flat))
        assert slow.step_time - fast.step_time == pytest.approx(seconds, abs=1e-9)
