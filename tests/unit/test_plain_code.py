"""Facts of software as their code runs: plain norms and rotations, copies of key heads, microbatches by habit."""

from __future__ import annotations

import pytest

from paleo.layers.base import LAYERS, LayerImplementations
from paleo.operations.base import Kernel
from paleo.operations.tensor import Tensor, default_precision
from paleo.predict import predict
from paleo.pricing.kernels import kernel_predictor
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import load_software
from paleo.specs.system import load_system
from paleo.step.backend import with_replicated_heads

X = Tensor("x", ("batch", "seq", "hidden"), (2, 64, 256))


def moved(operations: object, phase: str) -> float:
    """Bytes of an element that passes read and write."""
    kernels = [kernel for each in operations for kernel in getattr(each, f"{phase}_kernels")(default_precision("bf16"))]  # type: ignore[attr-defined]
    return sum(kernel.bytes_read + kernel.bytes_written for kernel in kernels) / X.elements


def test_plain_norm_moves_36_bytes_forward_and_twice_that_backward() -> None:
    layer = LAYERS["rms_norm"]()
    plain = layer.to_operations("norm", (X,), LayerImplementations(rms_norm="stepwise")).operations
    fused = layer.to_operations("norm", (X,), LayerImplementations()).operations
    assert moved(plain, "forward") == pytest.approx(36.0, rel=0.01)
    assert moved(plain, "backward") == pytest.approx(76.0, rel=0.05)
    assert moved(fused, "forward") == pytest.approx(4.0, rel=0.02)


def test_complex_rotation_moves_20_bytes_each_way() -> None:
    layer = LAYERS["attention"](heads=4, rotary=True)
    rotary = [
        operation
        for operation in layer.to_operations("attention", (X,), LayerImplementations(rotation="complex")).operations
        if ".rotary." in operation.name
    ]
    assert moved(rotary, "forward") == pytest.approx(2 * 20.0)  # query and key
    assert moved(rotary, "backward") == pytest.approx(2 * 20.0)


def test_eager_step_is_slower_by_a_tenth_or_more() -> None:
    model, system = load_model("llama3-8b"), load_system("dgx-h100")
    run = Run(gpus=8, strategy="fsdp", batch=1, model={"seq": 8192}, recompute="selective")
    eager, compiled = (
        predict(model, system, run.model_copy(update={"software": name})) for name in ("torchtitan-eager", "torchtitan")
    )
    assert 1.1 < eager.step_time / compiled.step_time < 1.25  # torchtitan's own pair: 1.16


def attention_seconds(software: str, dropout: float, seq: int = 1024) -> float:
    """Seconds of GPT-2's attention, forward and backward, in a step of 16,384 tokens on one H100."""
    model = load_model("gpt2")
    made = predict(
        model.model_copy(update={"params": model.params | {"dropout": dropout, "seq": seq}}),
        load_system("h100-sxm5-80gb"),
        Run(batch=16384 // seq, dtype="bf16"),
        load_software(software),
    )
    kernels = [each for section in made.program.sections for each in section.kernels]
    assert len(kernels) == len(made.kernels.device_time)
    return sum(
        s for k, s in zip(kernels, made.kernels.device_time.tolist(), strict=True) if k.kernel.family == "attention"
    )


def test_attention_that_draws_random_numbers_takes_1_4_times_as_long_where_that_was_measured() -> None:
    plain = attention_seconds("pytorch-amp", 0.0)
    assert attention_seconds("pytorch-amp", 0.1) == pytest.approx(1.4 * plain)
    assert attention_seconds("megatron-core", 0.1) == pytest.approx(attention_seconds("megatron-core", 0.0))


def test_an_explicit_mask_leaves_no_scores_out() -> None:
    """In rows of 16,384 tokens nearly half of the scores are hidden; in short rows tiles cost more than scores."""
    for seq, least, most in ((16384, 1.8, 2.0), (1024, 1.2, 1.8)):
        seen, all_scores = (attention_seconds(f"{name}-compile", 0.0, seq) for name in ("pytorch", "huggingface"))
        assert least < all_scores / seen < most


def test_norms_are_plain_code_in_transformers_and_in_older_releases() -> None:
    assert (
        load_software("pytorch-amp").fusion.rms_norm == load_software("huggingface-compile").fusion.rms_norm == "fused"
    )
    assert load_software("pytorch-compile@2.4").fusion.rms_norm == "fused"
    for name in ("pytorch-amp@2.4", "huggingface-amp", "huggingface-bf16", "fsdp2", "deepspeed-zero3"):
        assert load_software(name).fusion.rms_norm == "stepwise"


def test_key_heads_are_copied_to_ranks_that_share_them() -> None:
    model = load_model("llama3-70b")  # 8 key heads
    assert with_replicated_heads(model, {}, 8) == {}
    assert with_replicated_heads(model, {}, 16) == {"kv_heads": 16}
    assert with_replicated_heads(model, {"kv_heads": 3}, 16) == {"kv_heads": 3}  # is divided by no number of ranks
    run = Run(gpus=16, strategy="tp=16,sp", batch=1, software="nanotron")
    wide = predict(model, load_system("dgx-h100"), run)
    narrow = predict(model, load_system("dgx-h100"), run.model_copy(update={"gpus": 8, "strategy": "tp=8,sp"}))
    assert wide.model_flops_per_step == narrow.model_flops_per_step
    shares = wide.memory.parameters * 16 / (narrow.memory.parameters * 8)
    assert 1.0 < shares < 1.05


def test_ranks_gather_what_makes_few_key_heads_or_copy_their_weights() -> None:
    """Llama 3 70B over sixteen ranks: query, key and value of all are (64 + 2 x 8) x 128 numbers a token."""
    model, system = load_model("llama3-70b"), load_system("dgx-h100")
    run = Run(gpus=16, strategy="tp=16,sp", batch=1, dtype="bf16", software="megatron-core", model={"layers": 2})
    gathered = predict(model, system, run)
    copied = predict(
        model, system, run, load_software("megatron-core").with_fields({"parallelism.few_key_heads": "copied"})
    )
    layer = max(gathered.program.sections, key=lambda section: section.repeat)
    added = [each for each in layer.collectives if each.name.endswith(".qkv")]
    phases = {each.operation: each.phase for each in added}
    assert phases == {"all_gather": "forward", "reduce_scatter": "backward"}
    assert {each.payload_bytes for each in added} == {(64 + 2 * 8) * 128 * 8192 * 2.0}
    assert copied.memory.parameters - gathered.memory.parameters == pytest.approx(2 * 2 * 8 * 128 * 8192 * 2 / 16)
    assert gathered.step_time > copied.step_time


def test_pipelines_of_torchtitan_took_as_many_microbatches_as_stages() -> None:
    model, system = load_model("llama3-8b"), load_system("dgx-h100")
    run = Run(gpus=16, strategy="pp=4,dp=4", batch=32, software="torchtitan@2024-12")
    assert predict(model, system, run).plan.microbatches == 4
    assert predict(model, system, run.model_copy(update={"software": "torchtitan"})).plan.microbatches == 32


def test_exchange_of_tokens_over_nodes_costs_the_host_whoever_sends_them() -> None:
    model, system = load_model("qwen3-30b-a3b"), load_system("dgx-h100")
    steps = {}
    for gpus in (8, 16):
        for dispatch in ("nccl", "deepep"):
            run = Run(
                gpus=gpus, strategy=f"ep={gpus}", batch=1, software="megatron-core", experts={"dispatch": dispatch}
            )
            program = predict(model, system, run)
            steps[gpus, dispatch] = program.breakdown.communication_exposed
    layers = 48 * 4
    assert steps[16, "nccl"] - steps[8, "nccl"] > layers * 0.7e-3
    assert steps[16, "deepep"] - steps[8, "deepep"] > layers * 0.6e-3


@pytest.mark.parametrize(("rows", "columns", "least"), [(524288, 128, 5.0), (16384, 8192, 1.0)])
def test_streamed_norms_cost_what_their_bytes_do_and_a_block_for_each_short_row_far_more(
    rows: int, columns: int, least: float
) -> None:
    """Transformer Engine's blocks step through rows; PyTorch starts a block for each, of a head's 128 entries too."""
    size, shape = float(4 * rows * columns), {"rows": float(rows), "columns": float(columns)}
    norm, plain = (
        Kernel("pass", "memory", operation, "forward", 0.0, 0.0, size / 2, size / 2, shape)
        for operation in ("norm", "elementwise")
    )
    device = load_system("h100-sxm5-80gb").device
    streamed, block = (
        float(kernel_predictor(device, "bf16", "auto", load_software(name)).times([norm]).device_time[0])
        for name in ("megatron-core", "megatron-2021")
    )
    assert (
        streamed
        == kernel_predictor(device, "bf16", "auto", load_software("megatron-core")).times([plain]).device_time[0]
    )
    assert block > least * streamed
