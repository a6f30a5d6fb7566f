"""MFU counts what the network asks for, HFU what devices execute."""

from __future__ import annotations

import pytest

from paleo.parallel.plan import high_utilisation_warnings
from paleo.predict import Prediction, predict
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system

H100 = load_system("dgx-h100")


def predicted(network: str = "llama3-8b", **run: object) -> Prediction:
    asked = {"gpus": 8, "batch": 1, "microbatch": 1, "dtype": "bf16", "software": "megatron-core", **run}
    return predict(load_model(network), H100, Run.model_validate(asked))


def test_model_flops_of_a_causal_transformer_are_those_of_the_formula() -> None:
    """Llama 3 8B at 8,192 tokens: 6 FLOP a weight of every product and token, and half of 12·layers·hidden·seq."""
    layers, hidden, seq = 32, 4096, 8192
    weights = layers * (hidden * (4096 + 2 * 1024) + 4096 * hidden + 3 * hidden * 14336) + hidden * 128256
    expected = 6.0 * weights + 12.0 * layers * hidden * (seq + 1) / 2
    prediction = predicted()
    assert prediction.model_flops_per_step / (8 * seq) == pytest.approx(expected, rel=1e-9)


def test_fused_attention_executes_its_scores_twice() -> None:
    """Four products of visible scores are asked for backward, five are made: with forward 7 to 6 of attention."""
    prediction = predicted()
    attention = 12.0 * 32 * 4096 * 8193 / 2 * 8 * 8192
    assert prediction.executed_flops - prediction.model_flops_per_step == pytest.approx(attention / 6.0, rel=1e-9)


def test_recomputation_is_in_hfu_alone() -> None:
    """Full recomputation of all blocks makes their forward pass again; the head is not recomputed."""
    plain, full = predicted(), predicted(recompute="full")
    assert full.model_flops_per_step == plain.model_flops_per_step
    blocks = 2.0 * (
        sum(t.elements * n.repeat for n in plain.graph.nodes for t in n.parameters.values() if len(t.dims) > 1)
    )
    head_and_table = 2.0 * 2 * 4096 * 128256
    scores = 4.0 * 32 * 4096 * 8193 / 2
    again = (blocks - head_and_table + scores) * 8 * 8192
    assert full.executed_flops - plain.executed_flops == pytest.approx(again, rel=1e-6)
    assert full.hfu > full.mfu


def test_unfused_attention_executes_what_the_mask_hides() -> None:
    plain, unfused = predicted("gpt2"), predicted("gpt2", kernels={"attention": "unfused"})
    assert unfused.model_flops_per_step == pytest.approx(plain.model_flops_per_step, rel=1e-12)
    assert unfused.executed_flops > 1.03 * unfused.model_flops_per_step


def test_long_contexts_stay_below_the_peak() -> None:
    """115 % at 128k tokens, when whole rectangles and scores made again were counted."""
    prediction = predicted(gpus=32, strategy="tp=2,cp=16", batch=2, model={"seq": 131072})
    assert 0.3 < prediction.mfu < prediction.hfu < 0.75


def test_a_share_of_the_peak_that_nobody_reaches_is_warned_about() -> None:
    layout = predicted().plan
    peak = H100.device.peak_flops_per_s("bf16") * 8
    assert high_utilisation_warnings(H100, layout, 0.7 * peak) == []
    (warning,) = high_utilisation_warnings(H100, layout, 0.8 * peak)
    assert warning.startswith("MFU 80 %")


@pytest.mark.parametrize(
    ("network", "device"), [("vgg16", "p100-sxm2"), ("unet", "p100-sxm2"), ("unet", "gtx-1080-ti")]
)
def test_reduced_convolutions_count_the_products_that_they_execute(network: str, device: str) -> None:
    """Winograd's F(4x4, 3x3) executes 36 products for 144: counted directly, these steps would pass the peak."""
    system = load_system(device)
    prediction = predict(load_model(network), system, Run(batch=16))
    peak = system.device.peak_flops_per_s("fp32")
    assert prediction.direct_flops_per_s > peak
    assert 0.25 < prediction.executed_flop_ratio < 0.7
    assert prediction.mfu == pytest.approx(prediction.direct_flops_per_s * prediction.executed_flop_ratio / peak)
    assert prediction.mfu <= prediction.hfu < 0.75


def test_every_microbatch_gathers_parameters_of_zero_3() -> None:
    """Parameters are gathered anew in each microbatch, and gradients scattered: four times the communication."""
    one, four = (
        predict(load_model("gpt2"), H100, Run(gpus=8, batch=batch, microbatch=8, strategy="zero=3"))
        for batch in (8, 32)
    )
    assert four.breakdown.communication_total == pytest.approx(4 * one.breakdown.communication_total, rel=0.05)
