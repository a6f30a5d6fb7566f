"""Training steps of convolutional networks: what rows mean, what frameworks do, scaling, the real table."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from paleo.errors import SpecError
from paleo.lowering.program import Program, without_backward
from paleo.operations.base import Kernel
from paleo.predict import Prediction, predict
from paleo.pricing import families
from paleo.pricing.kernels import KernelFamilyPredictor
from paleo.pricing.power import energy_per_flop
from paleo.specs.device import Device, load_device
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import load_software
from paleo.specs.system import load_system
from paleo.specs.task import mlperf_task
from paleo.tables.base import scaling_efficiency_points, summarise_scaling_efficiencies
from paleo.tables.kinds._vision_and_language import (
    ACCUMULATION_NOTE,
    VisionStepTable,
    accumulated_microbatches,
    catalog_model_name,
    cudnn_release,
    parse_cudnn_version,
    run_of_cnn_row,
    size_overrides,
    software_profile_at_date,
    software_profile_of,
)
from paleo.tables.run_tables import find_table_kind, system_of_run
from paleo.tables.validation import FileReport, validate_frame
from paleo.tables.validation_report import json_document, validation_renderables


def step(model: str, system: str = "v100-sxm2-16gb", **more: object) -> Prediction:
    run = {"batch": 32, "dtype": "fp32", "optimizer": "momentum", **more}
    return predict(load_model(model), load_system(system), Run.model_validate(run))


# --- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "release"),
    [("5105", 5.1), ("4007", 4.0), ("7605", 7.6), ("8005", 8.0), ("90100", 9.1), ("R2", 2.0), ("v4", 4.0),
     ("none (native im2col+GEMM)", 1.0), ("", None), ("nan", None), ("yes", None)],
)  # fmt: skip
def test_releases_of_cudnn(text: str, release: float | None) -> None:
    assert parse_cudnn_version(text) == release


@pytest.mark.parametrize(
    ("row", "release"),
    [({"cudnn": "R4", "framework": "CuDNN[R2] *"}, 4.0), ({"framework": "CuDNN (R1) *"}, 1.0),
     ({"framework": "TensorFlow", "source": "convnet-benchmarks"}, 4.0),
     ({"framework": "Torch-7", "source": "convnet-benchmarks Dec-2014"}, 1.0),
     ({"framework": "TensorFlow 2.3.0", "source": "elsewhere"}, None)],
)  # fmt: skip
def test_a_library_is_stated_named_or_dated(row: dict[str, str], release: float | None) -> None:
    assert cudnn_release(row) == release


@pytest.mark.parametrize(
    ("row", "profile"),
    [({"framework": "Caffe", "software": "caffe"}, "caffe-native"),
     ({"framework": "Caffe (caffe time)", "software": "caffe", "cudnn": "none (native)"}, "caffe-native"),
     ({"framework": "Caffe (caffe time)", "software": "caffe", "cudnn": "R4 (inferred)"}, "caffe"),
     ({"framework": "Caffe2 (cudnn_exhaustive_search)", "software": "caffe2", "cudnn": "v4"}, "caffe2"),
     ({"framework": "cudaconvnet2*"}, "cuda-convnet2"), ({"framework": "fbfft (Torch)"}, "fbfft"),
     ({"framework": "Torch-7 (native)"}, "torch7-native"), ({"framework": "CuDNN[R2] *"}, "cudnn-library"),
     ({"framework": "Torch7 (cudnn)", "software": "torch7-cudnn"}, "torch7-cudnn"),
     ({"framework": "TensorFlow 1.15.3", "software": "tensorflow1"}, "tensorflow1.15"),
     ({"framework": "TensorFlow 1.15.4", "software": "tensorflow1"}, "tensorflow1.15-ngc"),
     ({"framework": "TensorFlow (20.06-tf1-py3)", "software": "tensorflow1"}, "tensorflow1.15-ngc"),
     ({"framework": "TensorFlow 2.3.0", "software": "tensorflow2"}, "tensorflow2"),
     ({"framework": "TensorFlow2", "software": "tensorflow2", "source": "DeepLearningExamples"}, "tensorflow2-ngc"),
     ({"framework": "MxNet (mxnet-20.12-py3)", "software": "mxnet"}, "mxnet-nvidia")],
)  # fmt: skip
def test_profiles_of_rows(row: dict[str, str], profile: str) -> None:
    assert software_profile_of(row) == profile


@pytest.mark.parametrize(
    ("row", "profile"),
    [({"framework": "PyTorch NGC 20.01/20.10 (v0 configs)"}, "pytorch-ngc@20.10"),
     ({"framework": "PyTorch NGC 22.09 class (v1 configs)"}, "pytorch-ngc@22.09"),
     ({"framework": "PyTorch NGC 24.02"}, "pytorch-ngc"), ({"framework": "PyTorch"}, "pytorch-ngc"),
     ({"framework": "PyTorch", "source": "DeepLearningExamples"}, "pytorch-ngc-channels-last@21.03"),
     ({"framework": "PyTorch (22.09)", "source": "DeepLearningExamples"}, "pytorch-ngc-channels-last@22.09")],
)  # fmt: skip
def test_profiles_as_they_were_when_a_row_was_measured(row: dict[str, str], profile: str) -> None:
    assert software_profile_at_date({"software": "pytorch-ngc", **row}) == profile


def test_updates_by_a_call_for_each_term_until_lists_were_the_default() -> None:
    """161 tensors of ResNet-50, four written terms each, at the host's 16.7 us of a call outside the forward pass."""
    model, system = load_model("resnet50"), load_system("dgx-1-v100")
    then, now = (
        predict(model, system, Run(gpus=1, batch=64, dtype="fp16", optimizer="momentum", software=software))
        for software in ("pytorch-ngc@21.03", "pytorch-ngc")
    )
    assert now.breakdown.optimizer < 0.002 and then.breakdown.optimizer == pytest.approx(161 * 4 * 16.7e-6)


@pytest.mark.parametrize(
    ("slug", "gpus", "notes", "passes"),
    [("efficientnet_b0", 1, ACCUMULATION_NOTE, 64), ("efficientnet_b0", 32, ACCUMULATION_NOTE, 2), ("resnet50", 8,
     ACCUMULATION_NOTE, 4), ("se-resnext101-32x4d", 8, ACCUMULATION_NOTE, 2), ("resnet50", 64, ACCUMULATION_NOTE, 1),
     ("efficientnet_b0", 1, "", 1)],
)  # fmt: skip
def test_recipes_that_accumulate_gradients(slug: str, gpus: int, notes: str, passes: int) -> None:
    row = {"model_slug": slug, "batch_per_gpu": 64.0, "n_gpus": gpus, "notes": f"recipe {notes} (1k-4k)"}
    assert accumulated_microbatches(row) == passes


def test_a_pass_of_such_a_recipe_has_its_share_of_the_update() -> None:
    cells = {"model_slug": "efficientnet_b0", "device": "v100-sxm2-16gb", "dtype": "fp32", "software": "pytorch-ngc"}
    row = cells | {"n_gpus": 1, "batch_per_gpu": 64.0, "iteration_ms": 97.0, "framework": "PyTorch (21.03)"}
    rows = [row | {"notes": notes} for notes in ("", f"recipe {ACCUMULATION_NOTE}", "no weight update")]
    every, shared, without = (VisionStepTable().predict_network_row(case).value for case in rows)
    assert every - shared == pytest.approx((every - without) * 63 / 64, rel=1e-9) and every - without > 0.01
    assert (
        run_of_cnn_row(row).optimizer == "rmsprop"
        and run_of_cnn_row(row | {"model_slug": "resnet50"}).optimizer == "momentum"
    )


def test_a_pass_of_such_a_recipe_lasts_at_least_until_its_images_arrive() -> None:
    """Eight V100s of a DGX-1 with 5 cores each decode 128 images in 128 x 4.84 ms / 5; the update of which three
    quarters are left out would end it sooner."""
    row = {"model_slug": "efficientnet_b0", "device": "v100-sxm2-16gb", "system": "dgx-1-v100", "dtype": "fp16"} | {
        "software": "pytorch-ngc", "n_gpus": 8, "batch_per_gpu": 128.0, "iteration_ms": 131.0,
        "framework": "PyTorch (21.03)", "source": "DeepLearningExamples",
        "notes": f"recipe {ACCUMULATION_NOTE}, incl. data loading",
    }  # fmt: skip
    assert VisionStepTable().predict_network_row(row).value == pytest.approx(128 * 4.84e-3 / 5, rel=1e-9)


def test_opencl_kernels_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match="OpenCL kernels of CL-nn"):
        software_profile_of({"framework": "CL-nn (Torch)", "software": "caffe"})


def test_variants_of_networks() -> None:
    harness = {"model_slug": "resnet50", "notes": "tf_cnn_benchmarks synthetic ImageNet"}
    assert catalog_model_name(harness) == "resnet50-v1"
    assert catalog_model_name({"model_slug": "resnet50", "notes": ""}) == "resnet50"
    assert catalog_model_name(harness | {"model_slug": "alexnet"}) == "alexnet-tf"
    assert catalog_model_name(harness | {"model_slug": "alexnet", "source": "its page (May 2017)"}) == "alexnet"
    assert catalog_model_name({"model_slug": "alexnet", "notes": ""}) == "alexnet"
    assert catalog_model_name({"model_slug": "vgg16", "framework": "tf_cnn_benchmarks"}) == "vgg16"
    assert (
        catalog_model_name({"model_slug": "resnext101-32x4d", "model": "SE-ResNeXt-101 32x4d"}) == "se-resnext101-32x4d"
    )


def test_nodes_networks_and_images_are_those_of_the_row() -> None:
    row = {"device": "k80-die", "system": "aws-p2.16xlarge", "n_gpus": 64, "nodes": 8, "model_slug": "vgg11"}
    whole, half = system_of_run(row | {"nodes": 4}), system_of_run(row)
    assert whole == load_system("aws-p2.16xlarge")
    assert half.devices_per_node == 8 and [level.ranks for level in half.levels] == [2, 8, None]
    assert [level.ranks for level in system_of_run(row | {"n_gpus": 24}).levels] == [2, 3, None]
    assert [level.ranks for level in system_of_run(row | {"n_gpus": 8}).levels] == [None]
    assert system_of_run(row | {"n_gpus": 8, "nodes": 1}) == whole
    slow = system_of_run(row | {"interconnect": "PCIe + 10 Gb/s Ethernet (AWS p2.8xlarge)"}).levels[-1]
    assert slow.link.bandwidth == 1.25e9 and slow.ports == 1
    assert system_of_run(row | {"interconnect": "20 GbE"}).levels[-1].link.bandwidth == 2.5e9
    assert system_of_run(row | {"interconnect": "InfiniBand FDR 56 Gb/s"}).levels[-1] == half.levels[-1]
    assert system_of_run(row | {"interconnect": "RoCE 50 Gb/s"}).levels[-1].link.name == "ethernet-100g-roce"
    assert size_overrides(row | {"input_shape": "64x3x231x231"}) == {"resolution": 231}
    assert (
        size_overrides(row | {"input_shape": "3x224x224"}) == size_overrides(row | {"input_shape": float("nan")}) == {}
    )


# --- what frameworks do --------------------------------------------------------------------------------------------


def test_one_image_at_a_time_scales_with_the_batch() -> None:
    """im2col and one product for each image: no batch makes an image cheaper, and each takes a launch more."""
    small, large = (step("vgg16", software="caffe-native", batch=b).breakdown for b in (8, 64))
    assert (large.compute + large.memory_bound) / (small.compute + small.memory_bound) == pytest.approx(8, rel=0.06)
    assert step("vgg16", software="caffe-native").step_time > 1.5 * step("vgg16", software="caffe").step_time


def test_own_kernels_on_tensor_cores_are_refused_with_the_cure() -> None:
    with pytest.raises(SpecError, match=r"caffe-native.*explicit.*fp16.*expected fp32"):
        step("vgg16", software="caffe-native", dtype="fp16")


def test_channels_first_costs_copies_in_the_dtypes_that_stay_so() -> None:
    profile = load_software("tensorflow1")
    straight = profile.with_fields({"formats.transposes": ()})
    for dtype, more in (("tf32", True), ("fp16", False), ("fp32", False)):
        run = Run(batch=64, dtype=dtype, software="tensorflow1")
        turned, plain = (
            predict(load_model("resnet50"), load_system("a100-pcie-40gb"), run, software).step_time
            for software in (profile, straight)
        )
        assert turned > 1.1 * plain if more else turned == plain


def test_operands_are_turned_and_results_are_not() -> None:
    """64 images of 56 x 56 in fp16: 64 channels to 256 turn a quarter of what 256 to 64 do. On a V100, at 2.25 numbers
    in a clock of 1.53 GHz of 80 multiprocessors, 51.4 million operands take 0.37 ms each way; streamed, 0.30 ms."""
    wide, narrow = (
        convolutions("v100-sxm2-16gb", "fp16", "pytorch-ngc", c=c, k=k)
        - convolutions("v100-sxm2-16gb", "fp16", "pytorch-ngc-channels-last", c=c, k=k)
        for c, k in ((256, 64), (64, 256))
    )
    loaded, streamed = 2 * 51_380_224 / (2.25 * 80 * 1.53e9), 4 * 51_380_224 / (0.75 * 900e9)
    assert wide == pytest.approx((loaded**4 + streamed**4) ** 0.25, rel=0.01)
    assert narrow == pytest.approx(wide / 4, rel=0.01)


def test_containers_hold_the_library_of_their_day() -> None:
    for name in ("pytorch-ngc", "pytorch-ngc-channels-last", "tensorflow2-ngc"):
        releases = [load_software(f"{name}@{release}").convolutions.cudnn for release in ("20.10", "21.03")]
        assert releases[0] == 8.0 and releases[1] > 8.1


@pytest.mark.slow
def test_exchanges_beside_the_backward_pass_of_containers_win_nothing() -> None:
    """As of pytorch-eager: a step is no faster than one whose gradients are exchanged after it."""
    model, system = load_model("resnet50"), load_system("dgx-1-v100")
    for name in ("pytorch-ngc", "pytorch-ngc-channels-last"):
        profile = load_software(name)
        run = Run(gpus=8, batch=64, dtype="fp16", optimizer="momentum", software=name, input="none")
        beside, after, free = (
            predict(model, system, run, profile.with_fields(changes)).step_time
            for changes in ({}, {"overlap.gradients": False}, {"overlap.contention": 0.0})
        )
        assert free < after <= beside < 1.1 * free


def passes(program: Program, operation: str) -> list[tuple[Kernel, float]]:
    """Forward memory passes of a program with the turns that each is taken."""
    return [
        (counted.kernel, counted.repetitions * section.repeat)
        for section in program.sections
        for counted in section.kernels
        if (counted.kernel.operation, counted.kernel.phase) == (operation, "forward")
    ]


def test_inference_needs_no_statistics() -> None:
    made = step("resnet50")
    alone = without_backward(made.program)
    assert sum(turns for _, turns in passes(made.program, "batch_norm")) == 53
    assert passes(alone, "batch_norm") == []
    passed = sum(turns for _, turns in passes(made.program, "elementwise"))
    assert sum(turns for _, turns in passes(alone, "elementwise")) == passed + 53
    assert step("resnet50", forward_only=True).step_time < 0.4 * made.step_time


def test_a_compiler_fuses_what_follows_batch_norm() -> None:
    """All 49 ReLUs and 16 additions go into the batch norms before them, in repeated blocks or not, and the tensor
    between is spared both ways: 2 bytes for each that a pass of its own writes. The sweep for statistics stays what it
    was."""
    plain, fused = (step("resnet50", software=name).program for name in ("tensorflow1", "tensorflow-xla"))
    alone = passes(plain, "elementwise")
    left = passes(fused, "elementwise")
    assert sum(turns for _, turns in alone) == 49 + 16 and not left

    def moved(program: Program) -> float:
        both = [*passes(program, "batch_norm"), *passes(program, "elementwise")]
        return sum(kernel.bytes * turns for kernel, turns in both)

    spared = 2.0 * sum(kernel.bytes_written * turns for kernel, turns in alone)
    spared -= 2.0 * sum(kernel.bytes_written * turns for kernel, turns in left)
    assert moved(plain) - moved(fused) == pytest.approx(spared)
    swept = [kernel.shape.get("swept", kernel.bytes_read) * turns for kernel, turns in passes(fused, "batch_norm")]
    assert sum(swept) == sum(kernel.bytes_read * turns for kernel, turns in passes(plain, "batch_norm"))


def bytes_of(made: Prediction, phase: str, *operations: str) -> float:
    return sum(
        one.kernel.bytes * one.repetitions * section.repeat
        for section in made.program.sections
        for one in section.kernels
        if one.kernel.phase == phase and one.kernel.operation in operations
    )


@pytest.mark.slow
def test_libraries_fuse_sums_and_rectifiers_with_batch_norm() -> None:
    """In sixteen bits or in inference; both ways, or forward with gradients of their own; never other functions."""
    passes = ("batch_norm", "elementwise")

    def moved(model: str, software: str, phase: str = "forward", **more: object) -> float:
        return bytes_of(step(model, software=software, **more), phase, *passes)

    plain = {"dtype": "fp16"}
    for model, less in (("resnet50", True), ("efficientnet_b0", False)):
        both, none = moved(model, "mxnet-nvidia", **plain), moved(model, "mxnet", **plain)
        assert both < 0.85 * none if less else both > 0.95 * none
    assert moved("resnet50", "mxnet-nvidia", "backward", **plain) < moved("resnet50", "mxnet", "backward", **plain)
    first, old = (moved("resnet50", name, **plain) for name in ("tensorflow1.15-ngc", "tensorflow1"))
    assert first < old
    assert moved("resnet50", "tensorflow1.15", **plain) == old
    assert moved("resnet50", "tensorflow1.15-ngc", "backward", **plain) == moved(
        "resnet50", "tensorflow1", "backward", **plain
    )
    assert moved("resnet50", "tensorflow1.15") == moved("resnet50", "tensorflow1")
    alone = {"forward_only": True}
    assert moved("resnet50", "tensorflow1.15", **alone) < moved("resnet50", "tensorflow1", **alone)


@pytest.mark.slow
def test_batch_norm_that_knows_channels_first_alone_turns_tensors_both_ways() -> None:
    """TensorFlow without cuDNN's persistent kernels, in sixteen bits on tensor cores, in training: five tensors a norm
    (two forward, three backward) are read and written once more at three quarters of 1.555 TB/s at best."""
    device, norms = "a100-sxm4-40gb", 11_113_984 * 64 * 2  # outputs of the convolutions of 64 images, in bytes
    turned, plain = (step("resnet50", device, software=name, dtype="fp16", batch=64).step_time for name in TURNED)
    assert turned - plain > 0.95 * 5 * 2 * norms / (0.75 * 1.555e12)
    assert turned - plain < 1.5 * 5 * 2 * norms / (0.75 * 1.555e12)
    for other in ({"dtype": "fp32"}, {"dtype": "tf32"}, {"dtype": "fp16", "forward_only": True}):
        first, second = (step("resnet50", device, software=name, **other).step_time for name in TURNED)
        assert first == second


def test_batch_norms_that_cudnn_does_not_get_load_one_number_a_thread() -> None:
    """Eager PyTorch in bf16: 8 numbers are moved for each output of a convolution (3 forward, 5 backward, sums of the
    batch included), 4.5 in a clock of 1.98 GHz of each of 132 multiprocessors; compiled norms stream."""
    outputs, streamed = 11_113_984 * 256, 2 / 3.35e12
    plain = load_software("pytorch-amp").with_fields({"formats.scalar_norms": ()})
    run = Run(batch=256, dtype="bf16", optimizer="momentum")
    scalar, vector = (
        predict(load_model("resnet50"), load_system("h100-sxm5-80gb"), run, software).step_time
        for software in (load_software("pytorch-amp"), plain)
    )
    assert 0 < scalar - vector < 8 * outputs * (1 / (4.5 * 132 * 1.6e9) - streamed)
    assert load_software("pytorch-amp").formats.scalar_norms == ("bf16",)
    assert load_software("pytorch-compile").formats.scalar_norms == ()


#: A profile whose batch normalisations turn tensors, and one that is otherwise the same.
TURNED = ("tensorflow2", "tensorflow2-ngc@20.10")


def convolutions(device: str | Device, dtype: str, software: str = "pytorch-eager", **shape: float) -> float:
    """Seconds of one forward convolution of 64 images."""
    chosen = load_device(device) if isinstance(device, str) else device
    sizes = {"n": 64, "c": 64, "h": 56, "w": 56, "k": 64, "kernel_h": 3, "kernel_w": 3, "pad_h": 1, "pad_w": 1}
    sizes |= {"out_d": 1, "kernel_d": 1, "stride_h": 1, "stride_w": 1, "dilation_h": 1, "dilation_w": 1, "groups": 1}
    sizes |= shape
    out = (sizes["h"] // sizes["stride_h"]) * (sizes["w"] // sizes["stride_w"]) * sizes["n"]
    work = 2 * out * sizes["k"] * sizes["c"] / sizes["groups"] * sizes["kernel_h"] * sizes["kernel_w"]
    width = 4 if dtype in ("fp32", "tf32") else 2
    read, written = width * sizes["n"] * sizes["c"] * sizes["h"] * sizes["w"], width * out * sizes["k"]
    kernel = Kernel("c", "conv", "fwd", "forward", work, 0.0, read, written, sizes)
    prices = KernelFamilyPredictor(chosen, dtype, load_software(software))
    return float(prices.device_times([kernel]).seconds[0])


def test_convolutions_draw_no_more_than_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products on B200 draw 0.84 pJ, those of its process 0.70: its convolutions would be slower with the former."""
    wide = {"c": 512.0, "k": 512.0, "h": 28.0, "w": 28.0}
    devices = ("b200", "gb200", "h100-sxm5-80gb")
    known = [convolutions(name, "bf16", **wide) for name in devices]
    monkeypatch.setattr(families, "energy_per_flop", lambda device: energy_per_flop(device)._replace(training=math.inf))
    unbounded = [convolutions(name, "bf16", **wide) for name in devices]
    assert unbounded[0] > 1.04 * known[0]
    assert unbounded[1:] == known[1:]


def test_few_channels_run_on_ordinary_cores() -> None:
    """Three channels fill a tenth of a tensor core's step, unless they are laid out last and padded to four; kernels of
    fp32 are there for tf32 data, too."""
    image = {"c": 3, "h": 224, "w": 224, "kernel_h": 7, "kernel_w": 7, "pad_h": 3, "pad_w": 3, "stride_h": 2}
    image |= {"stride_w": 2}
    first, last = "pytorch-ngc", "pytorch-eager"
    tf32, fp32 = (convolutions("a100-sxm4-40gb", dtype, first, **image) for dtype in ("tf32", "fp32"))
    assert tf32 == fp32
    assert convolutions("a100-sxm4-40gb", "tf32", last, **image) < 0.5 * fp32
    tf32, fp32 = (convolutions("a100-sxm4-40gb", dtype, c=256, k=256) for dtype in ("tf32", "fp32"))
    assert tf32 < 0.7 * fp32


def test_depthwise_convolutions_are_no_faster_than_ordinary_cores() -> None:
    """A quarter of V100's 15.7 TFLOP/s at most (two operands loaded for each product), whatever the dtype."""
    least = 2 * 64 * 56 * 56 * 512 * 49 / (0.25 * 15.7e12)
    for dtype in ("fp32", "fp16"):
        found = convolutions(
            "v100-sxm2-16gb", dtype, c=512, k=512, kernel_h=7, kernel_w=7, pad_h=3, pad_w=3, groups=512
        )
        assert found > 0.95 * least


def test_tensor_cores_at_their_power_limit_are_slower() -> None:
    """A V100 whose limit is out of reach is faster, most where arithmetic is densest."""
    cool = load_device("v100-sxm2-16gb").model_copy(update={"tdp": 3000.0})
    gained = [
        convolutions("v100-sxm2-16gb", "fp16", c=channels, k=channels)
        / convolutions(cool, "fp16", c=channels, k=channels)
        for channels in (64, 512)
    ]
    assert 1.0 < gained[0] < gained[1] < 1.5


def test_kernels_of_old_libraries_are_those_of_their_time() -> None:
    """Pascal with cuDNN 5 inherits from what was measured with it; an own calibration is asked first all the same."""
    old, new = (
        step("resnet50", "p100-sxm2", software="torch7-cudnn", kernels={"cudnn": release}) for release in (5.1, 7.0)
    )
    assert "conv.vector-cudnn5" in old.calibration and "conv.vector-cudnn5" not in new.calibration
    assert old.step_time > new.step_time
    own = step("resnet50", "p100-sxm2", software="torch7-cudnn", kernels={"cudnn": 5.1}, calibration="p100-pcie-16gb")
    assert "conv.vector-cudnn5" not in own.calibration
    assert (
        "cudnn5" not in step("resnet50", "titan-x-maxwell", software="torch7-cudnn", kernels={"cudnn": 5.1}).calibration
    )


# --- scaling -------------------------------------------------------------------------------------------------------


def curves(**columns: list[object]) -> list[object]:
    frame = pd.DataFrame(columns)
    times = np.array([1.0, 1.25, 2.0])[: len(frame)]
    return list(scaling_efficiency_points(frame, measured=times, predicted=np.ones(len(frame))))


def test_points_are_against_the_fewest_devices_of_the_same_configuration() -> None:
    one, two = curves(gpus=[2, 4, 8], model=["a"] * 3)
    assert (one.base_gpus, one.gpus, one.measured_efficiency, one.predicted_efficiency) == (2, 4, 0.8, 1.0)  # type: ignore[attr-defined]
    assert two.measured_efficiency == 0.5 and two.error == 50.0  # type: ignore[attr-defined]
    assert curves(gpus=[1, 2, 2], model=["a", "b", "b"]) == []
    assert curves(gpus=[1, np.nan, 2], model=["a"] * 3)[0].measured_efficiency == 0.5  # type: ignore[attr-defined]


def test_nothing_to_summarise() -> None:
    assert summarise_scaling_efficiencies([]).mean_error is None and summarise_scaling_efficiencies([]).points == 0


def test_a_table_of_steps_reports_its_scaling() -> None:
    row = {"source": "x", "model_slug": "alexnet", "model": "AlexNet", "device": "v100-sxm2-16gb", "dtype": "fp32"}
    row |= {"system": "dgx-1-v100", "batch_per_gpu": "32", "framework": "MXNet", "software": "mxnet", "notes": ""}
    frame = pd.DataFrame([{**row, "n_gpus": n, "iteration_ms": t} for n, t in ((1, 30.0), (4, 40.0))])
    report: FileReport = validate_frame("steps", frame, find_table_kind(frame.columns))
    (point,) = report.scaling_efficiencies
    assert point.measured_efficiency == 0.75 and 0.3 < point.predicted_efficiency < 1.0
    told = json_document([report])["files"][0]["scaling"]
    assert told["points"] == 1 and told["mean_error"] == pytest.approx(abs(point.error))
    assert any("points of 100 off" in str(one) for one in validation_renderables(report))


# --- fused normalisations ------------------------------------------------------------------------------------------


def normalisation(phase: str, **fusion: str) -> float:
    """Seconds of a batch normalisation with a rectifier over 2^30 bytes in one kernel: (dz, y, x) -> dx backward."""
    whole = 2.0**30
    read, swept = (whole, whole) if phase == "forward" else (3.0 * whole, 2.0 * whole)
    kernel = Kernel(
        "norm", "memory", "batch_norm", phase, 0.0, 0.0, read, whole, {"rows": 2.0**29, "columns": 1.0, "swept": swept}
    )  # type: ignore[arg-type]
    software = load_software("mxnet").with_fields({f"fusion.{name}": value for name, value in fusion.items()})
    return float(
        KernelFamilyPredictor(load_device("a100-sxm4-80gb"), "fp16", software).device_times([kernel]).seconds[0]
    )


def test_statistics_in_the_convolution_spare_one_of_three_passes() -> None:
    spared = normalisation("forward", statistics="convolution") / normalisation("forward")
    assert spared == pytest.approx(2 / 3, rel=0.02)
    assert normalisation("backward", statistics="convolution") == normalisation("backward")


def test_the_rectifiers_mask_takes_a_bit_a_number() -> None:
    """Six passes without a mask (dz, x; dz, y, x; dx), five and a sixteenth with it."""
    assert normalisation("backward", norms="both") / normalisation("backward") == pytest.approx(81 / 96, rel=0.02)
    assert normalisation("forward", norms="both") == normalisation("forward")


# --- detection -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_host_that_chooses_proposals_stops_the_device() -> None:
    """Once a step, whatever the batch, before submissions captured it in graphs; networks without proposals wait for
    nothing."""
    waited = load_software("nvidia-apex").host.selection
    assert waited > 0 and load_software("mlperf-nvidia").host.selection == 0
    ready = load_software("nvidia-apex").with_fields({"host.selection": 0.0})
    for model, batch, waits in (("maskrcnn", 1, 1.0), ("maskrcnn", 2, 1.0), ("retinanet", 1, 0.0)):
        run = Run(batch=batch, dtype="fp16", optimizer="momentum", software="nvidia-apex")
        system, network = load_system("v100-sxm2-16gb"), load_model(model)
        slow, fast = (predict(network, system, run, software).step_time for software in (None, ready))
        assert slow - fast == pytest.approx(waits * waited, rel=1e-3)


def test_rounds_of_detection_have_the_code_of_their_time() -> None:
    assert [mlperf_task("maskrcnn", edition).code.software for edition in ("v0.6", "v0.7", "v1.0", "v3.1")] == [
        "nvidia-apex", "nvidia-apex", "mlperf-nvidia", "mlperf-nvidia"
    ]  # fmt: skip
