"""Networks that answer in forward passes alone, against published rates and by their laws."""

from __future__ import annotations

from dataclasses import replace

import pytest

import paleo
from paleo.errors import SpecError
from paleo.network.graph import build_graph
from paleo.operations.base import Kernel
from paleo.serving.formats import Formats
from paleo.serving.single_pass import (
    ForwardPasses,
    RequestBatch,
    _operands,
    best_batch,
    fitting_batches,
    forward_pass_time,
    forward_passes,
    is_single_pass,
    largest_batch,
    request_batch_time,
)
from paleo.specs.model import load_model
from paleo.specs.system import load_system

H100 = load_system("dgx-h100")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "weights", "rate"),
    [
        ("resnet50", "int8", 88_500.0),
        ("retinanet", "int8", 1_800.0),
        ("stable-diffusion-xl", "fp8", 2.04),
        ("dlrm-dcnv2", "int8", 74_500.0),
    ],
)
def test_rates_are_near_those_of_mlperf(model: str, weights: str, rate: float) -> None:
    """Offline samples a second of an H100 SXM in MLPerf Inference v4.1 (closed division); nothing was fitted."""
    best = best_batch(fitting_batches(load_model(model), H100, Formats(weights)))
    assert best is not None and best.requests_per_s == pytest.approx(rate, rel=0.2)


def test_larger_batches_take_longer_and_a_narrow_format_takes_less() -> None:
    seconds = [forward_pass_time("resnet50", H100, "int8", batch) for batch in (1, 8, 64, 512)]
    assert seconds == sorted(seconds)
    assert forward_pass_time("resnet50", H100, "bf16", 64) > seconds[2]


def test_layers_that_run_as_one_kernel_save_their_memory_traffic() -> None:
    assert forward_pass_time("resnet50", H100, "int8", 2048, "stage1") < forward_pass_time(
        "resnet50", H100, "int8", 2048
    )


def test_a_pool_writes_no_places_of_maxima() -> None:
    pool = Kernel(
        name="max_pool1", family="memory", operation="pool", phase="forward", flops=0.0, vector_flops=0.0,
        bytes_read=800.0, bytes_written=1000.0, shape={"rows": 400.0, "columns": 1.0},
    )  # fmt: skip
    assert _operands(pool, "") == 800.0 + 200.0
    assert _operands(replace(pool, name="avg_pool1", bytes_written=200.0), "") == 800.0 + 200.0


def test_two_batches_fit_into_the_limit() -> None:
    tried = (RequestBatch(1, 1.0), RequestBatch(2, 1.5), RequestBatch(4, 2.5))
    assert best_batch(tried) == tried[2] and best_batch(tried, 3.0) == tried[1] and best_batch(tried, 1.9) is None


def test_an_image_takes_all_steps_of_a_diffusion_and_one_decoding() -> None:
    unet, decoder = forward_passes(load_model("stable-diffusion-xl"))
    assert (unet.count, unet.samples, decoder.count, decoder.stays_in_sixteen_bits) == (20, 2, 1, True)


def test_a_recommendation_ranks_pairs_and_keeps_its_tables_in_the_format_of_the_weights() -> None:
    network = load_model("dlrm-dcnv2")
    assert forward_passes(network)[0].samples == 270
    exact, wide, narrow = (
        request_batch_time(forward_passes(network), H100, Formats(weights), 256, between=between)
        for weights, between in (("int8", 2.0), ("bf16", 1.0), ("int8", 1.0))
    )
    assert narrow < exact < wide
    small = load_system("aws-g6e.48xlarge")
    with pytest.raises(SpecError, match="does not fit into the memory of l40s"):
        fitting_batches(network, small, Formats("bf16"))
    assert largest_batch(forward_passes(network), small, Formats("int8")) > 64


def test_weights_count_once_however_many_samples_a_pass_has() -> None:
    one, pair = ((ForwardPasses("dlrm-dcnv2", samples=samples),) for samples in (1, 2))
    small = load_system("aws-g6e.48xlarge")
    most = [largest_batch(parts, small, Formats("int8")) for parts in (one, pair)]
    assert most == [2048, 2048]


def test_the_decoder_has_the_parameters_of_the_published_one() -> None:
    """diffusers, AutoencoderKL: 83,653,863 parameters, of them 34,163,664 of the encoder and its quantisation."""
    assert build_graph(load_model("sdxl-vae-decoder"), batch=1).parameters == 83_653_863 - 34_163_592 - 72


@pytest.mark.parametrize(
    ("model", "single"), [("resnet50", True), ("bert_large", True), ("llama3-8b", False), ("falcon-h1-7b", False)]
)
def test_networks_that_generate_tokens_are_told_apart(model: str, single: bool) -> None:
    assert is_single_pass(load_model(model), H100) is single


@pytest.mark.slow
def test_serve_answers_for_networks_without_tokens() -> None:
    answer = paleo.serve("resnet50", "dgx-h100", gpus=8, weights="int8", latency="15ms")
    document = answer.to_dict()
    assert answer.limits_met and document["requests_per_s"] == pytest.approx(8 * answer.service.best.requests_per_s)
    assert 2.0 * answer.service.best.batch_time <= 0.015
    assert "requests/s of ResNet-50" in document["verdict"]


@pytest.mark.slow
def test_what_such_networks_cannot_be_asked_is_said() -> None:
    with pytest.raises(SpecError, match=r"--rate: resnet50 generates no tokens"):
        paleo.serve("resnet50", "dgx-h100", rate=5)
    with pytest.raises(SpecError, match=r"--input: a request to resnet50 has no tokens"):
        paleo.serve("resnet50", "dgx-h100", input=5)
    assert not paleo.serve("resnet50", "dgx-h100", latency="1us").limits_met
