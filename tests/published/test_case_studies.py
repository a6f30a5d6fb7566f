"""Case studies of the original Paleo (Qi, Sparks and Talwalkar, ICLR 2017): its results, and what was measured.

Its results are those of the original program with GEMM convolutions, run again. We price our own counts with its
formulas (``ppp=…``) and its device figures, among them a GB of memory traffic of 2^30 bytes. A tolerance is what our
counts deviate; the comment beside it says why. Measurements follow in the second half, each with its source.
"""

from __future__ import annotations

from functools import cache

import pytest

from paleo.predict import Prediction, predict
from paleo.specs.model import ModelSpec, load_model
from paleo.specs.run import Run
from paleo.specs.system import System, load_system
from paleo.units import GIBIBYTE, HOUR, MILLISECOND, TERA

K20X, K40, K20, K80 = "paleo-k20x-infiniband", "paleo-k40-10gbe", "paleo-k20-pcie2", "paleo-k80-20gbe"
#: The original's device figures: TFLOP/s and "GB/s". Its K80 is a board of two GPUs at base clock.
FIGURES = {K20X: (3.935, 250), K40: (4.29, 288), K80: (5.6, 480)}
NIN, ALEXNET, INCEPTION = "ppp=0.21,0.56", "ppp=0.62,1.0", "ppp=0.62,0.72"
PUBLISHED_NIN = "Iandola et al., FireCaffe, CVPR 2016, from memory (UNVERIFIED)"


@cache
def as_original(name: str) -> System:
    """A system whose device has the figures that the original gives it."""
    system, (peak, bandwidth) = load_system(name), FIGURES[name]
    memory = system.device.memory.model_copy(update={"bandwidth": bandwidth * GIBIBYTE})
    peaks = {"fp32": peak * TERA}
    device = system.device.model_copy(update={"peak": peaks, "vector_peak": peaks, "memory": memory})
    return system.model_copy(update={"device": device})


@cache
def nin(*, rounded_up: bool) -> ModelSpec:
    """NiN with pools that round up (27, 13, 6: Caffe's, our catalog's) or down (26, 12, 5: the original's)."""
    found = load_model("nin")
    pool = {"max_pool": {"kernel": 3, "stride": 2}}
    layers = [pool if "max_pool" in layer and not rounded_up else layer for layer in found.layers]
    return found.model_copy(update={"layers": layers})


def made(model: ModelSpec | str, system: System | str, calibration: str, **run: object) -> Prediction:
    network = load_model(model) if isinstance(model, str) else model
    machine = load_system(system) if isinstance(system, str) else system
    fixed = {
        "dtype": "fp32",
        "optimizer": "sgd",
        "exchange": "after",
        "exchange.algorithm": "tree",
        "software": "caffe",
    }
    return predict(network, machine, Run.model_validate({**fixed, "calibration": calibration, **run}))


def kernels(prediction: Prediction) -> float:
    """Seconds of computation and update, as the original's ``compute``."""
    spent = prediction.breakdown
    return spent.compute + spent.memory_bound + spent.optimizer


def strong(
    model: ModelSpec, batch: int, gpus: int, system: System | str, calibration: str, **run: object
) -> Prediction:
    return made(model, system, calibration, gpus=gpus, global_batch=batch, **run)


# The original program.


@pytest.mark.parametrize(("gpus", "milliseconds"), [(1, 7681.26), (32, 241.93), (128, 61.95)])
def test_compute_of_nin_is_the_originals(gpus: int, milliseconds: float) -> None:
    theirs = milliseconds * MILLISECOND
    ours = kernels(strong(nin(rounded_up=False), 1024, gpus, as_original(K20X), NIN))
    assert ours == pytest.approx(theirs, rel=0.002)  # where max pooling writes its 8-byte indices we count them
    catalog = kernels(strong(nin(rounded_up=True), 1024, gpus, as_original(K20X), NIN))
    assert 1.12 < catalog / theirs < 1.15, "Caffe's pools round up: more positions in the layers after them"


@pytest.mark.parametrize(("batch", "gpus", "theirs"), [(256, 32, 15.5), (1024, 32, 25.27), (1024, 128, 51.64)])
def test_speedup_of_nin_is_the_originals(batch: int, gpus: int, theirs: float) -> None:
    alone, many = (strong(nin(rounded_up=False), batch, n, as_original(K20X), NIN).step_time for n in (1, gpus))
    assert alone / many == pytest.approx(theirs, rel=0.003)


@pytest.mark.parametrize(
    ("model", "system", "calibration", "algorithm", "gpus", "milliseconds", "tolerance"),
    [
        ("nin", K20X, NIN, "tree", 32, 62.00, 0.0002),
        ("nin", K20X, NIN, "tree", 128, 86.80, 0.0002),
        ("alexnet-v2-owt", K80, ALEXNET, "tree", 8, 482.92, 0.0002),
        ("alexnet-v2-owt", K80, ALEXNET, "one_to_all", 8, 1126.81, 0.0002),
        ("inception_v3", K40, INCEPTION, "tree", 100, 1476.80, 0.005),  # 23.73 M parameters there, 23.83 M here
    ],
)
def test_collectives_are_the_originals(
    model: str, system: str, calibration: str, algorithm: str, gpus: int, milliseconds: float, tolerance: float
) -> None:
    found = made(model, system, calibration, gpus=gpus, batch=1, **{"exchange.algorithm": algorithm})
    assert found.breakdown.communication_exposed == pytest.approx(milliseconds * MILLISECOND, rel=tolerance)


@pytest.mark.parametrize(
    ("model", "system", "calibration", "forward", "backward", "forward_off", "backward_off"),
    [
        # No explanation found for the backward passes. Counting the zeros of a dilated gradient in strided convolutions
        # would add what Inception lacks, but more than AlexNet lacks, and NiN lacks nothing.
        ("alexnet-v2-owt", K80, ALEXNET, 113.61, 308.55, 0.003, 0.31),
        ("inception_v3", K40, INCEPTION, 1257.56, 2701.07, 0.015, 0.085),
    ],
)
def test_forward_and_backward_against_the_original(
    model: str, system: str, calibration: str, forward: float, backward: float, forward_off: float, backward_off: float
) -> None:
    inference = made(model, as_original(system), calibration, batch=256, forward_only=True)
    training = made(model, as_original(system), calibration, batch=256)
    back = kernels(training) - training.breakdown.optimizer - kernels(inference)
    assert kernels(inference) == pytest.approx(forward * MILLISECOND, rel=forward_off)
    assert back == pytest.approx(backward * MILLISECOND, rel=backward_off)


def test_update_of_alexnet_is_the_originals() -> None:
    update = made("alexnet-v2-owt", as_original(K80), ALEXNET, batch=256).breakdown.optimizer
    assert update == pytest.approx(1.189 * MILLISECOND, rel=0.0005)


@pytest.mark.slow
def test_weak_scaling_of_inception_has_the_originals_shape() -> None:
    found = [made("inception_v3", as_original(K40), INCEPTION, gpus=n, batch=256) for n in (1, 2, 4, 16, 64, 100)]
    speedups = [one.samples_per_s / found[0].samples_per_s for one in found]
    efficiencies = [speedup / one.plan.gpus for speedup, one in zip(speedups, found, strict=True)]
    assert speedups == sorted(speedups) and efficiencies == sorted(efficiencies, reverse=True)
    computed = 1257.56 + 2701.07
    assert speedups[-1] == pytest.approx(100 * computed / (computed + 1476.80), rel=0.02)


def test_alexnet_over_ethernet_needs_the_large_batch() -> None:
    alexnet = load_model("alexnet-v2-owt")
    for algorithm in ("one_to_all", "tree"):
        for batch, pays in ((256, False), (2048, True)):
            alone, many = (
                strong(alexnet, batch, n, as_original(K80), ALEXNET, **{"exchange.algorithm": algorithm}).step_time
                for n in (1, 8)
            )
            assert (many < alone) is pays, f"{algorithm}, batch {batch}"


# Measured.


@pytest.mark.parametrize("cudnn", [2.0, 4.0])
@pytest.mark.parametrize(("batch", "gpus", "measured"), [(256, 32, 13.0), (1024, 32, 23.0), (1024, 128, 39.0)])
def test_speedup_of_firecaffe(batch: int, gpus: int, measured: float, cudnn: float) -> None:
    """A bound, not an achievement: no closer than the original, which was fitted to this case and is off by 19, 10 and
    32 %.

    With the algorithms of cuDNN 2 we are off by about as much, too: the network between the nodes comes out too fast.
    """
    tolerance = 0.36
    alone, many = (
        strong(nin(rounded_up=True), batch, n, K20X, "auto", kernels={"cudnn": cudnn}).step_time for n in (1, gpus)
    )
    assert alone / many == pytest.approx(measured, rel=tolerance), PUBLISHED_NIN


@pytest.mark.parametrize(("model", "batch", "milliseconds"), [("inception_v3", 64, 2098.36), ("alexnet", 512, 780.49)])
def test_step_on_a_k80(model: str, batch: int, milliseconds: float) -> None:
    """TensorFlow benchmarks page, May 2017, one GK210, synthetic data. A bound, not an achievement: Kepler was not
    calibrated, takes the efficiencies of Maxwell and the peak of its boost clock, and comes out too fast."""
    run = {"batch": batch, "software": "tensorflow1", "kernels.cudnn": 5.1, "exchange.algorithm": None}
    ours = made(model, "aws-p2.16xlarge", "auto", **run).step_time
    assert 1 / 2.5 < ours / (milliseconds * MILLISECOND) < 1.25


@pytest.mark.parametrize(("calibration", "tolerance"), [("auto", 0.45), ("ppp=0.46,0.75", 0.10)])
def test_step_on_a_k20(calibration: str, tolerance: float) -> None:
    """Krizhevsky, arXiv:1404.5997, table 1: 98.05 hours for 90 epochs of ImageNet, from memory (UNVERIFIED). The
    constant was fitted to it."""
    measured = 98.05 * HOUR / 90 / 1_281_167 * 128
    ours = made("alexnet-v2-owt", K20, calibration, batch=128, kernels={"cudnn": 2.0}).step_time
    assert ours == pytest.approx(measured, rel=tolerance)


@pytest.mark.parametrize("calibration", ["auto", "ppp=0.46,0.75"])
@pytest.mark.parametrize(("gpus", "measured"), [(2, 1.95), (4, 3.74), (8, 6.25)])
def test_speedup_of_one_weird_trick(calibration: str, gpus: int, measured: float) -> None:
    """Krizhevsky, arXiv:1404.5997, table 1 (batch 128 per GPU in both kinds of layers), from memory (UNVERIFIED)."""
    run = {"batch": 128, "strategy": "owt", "exchange.algorithm": None, "kernels.cudnn": 2.0}
    found = {n: made("alexnet-v2-owt", K20, calibration, gpus=n, **run) for n in (1, gpus)}
    speedup = found[gpus].samples_per_s / found[1].samples_per_s
    assert speedup == pytest.approx(measured, rel=0.25)
    data_parallel = made("alexnet-v2-owt", K20, calibration, gpus=gpus, **{**run, "strategy": "dp"})
    assert found[gpus].step_time < data_parallel.step_time, "what the trick is for"


def test_one_weird_trick_exchanges_convolutions_alone() -> None:
    found = made("alexnet-v2-owt", K20, "ideal", gpus=8, batch=128, strategy="owt", **{"exchange.algorithm": None})
    gradients = [one for section in found.program.sections for one in section.gradients]
    weights = 64 * 3 * 121 + 192 * 64 * 25 + 384 * 192 * 9 + 384 * 384 * 9 + 256 * 384 * 9
    biases = 64 + 192 + 384 + 384 + 256
    assert sum(one.elements for one in gradients if one.axes) == weights + biases
    full = 6400 * 4096 + 4096 * 4096 + 4096 * 1000 + 4096 + 4096 + 1000
    assert sum(one.elements for one in gradients if not one.axes) == full / 8
