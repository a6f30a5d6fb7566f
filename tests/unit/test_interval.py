"""The 90 % interval of a step: what it is made of, and the fit of what whole steps add to it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from paleo.calibrate.interval_constants import StepErrors, cross_validated_coverage, fit_interval_constants, step_errors
from paleo.calibrate.kernel_fits import calibration_yaml
from paleo.cli import run_command_line as run
from paleo.errors import SpecError
from paleo.predict import Prediction, predict
from paleo.specs.calibration import load_calibration
from paleo.specs.device import load_device
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import load_software
from paleo.specs.system import load_system
from paleo.step.interval import IntervalParameters, StepUncertainty, interval_parameters, lacks_timed_convolutions
from paleo.tables.validation import validate_file

NOTHING = np.zeros(2)
#: A step of a fitted profile, all of whose parts are known exactly.
KNOWN = StepUncertainty(
    NOTHING,
    NOTHING,
    NOTHING,
    short_kernel_share=0.0,
    untimed_convolution_share=0.0,
    update_share=0.0,
    software_tested=1.0,
    uses_constant_rates=False,
)


def predicted(model: str = "gpt2", system: str = "dgx-a100-80gb", **fields: object) -> Prediction:
    options = {"gpus": 8, "batch": 8, "dtype": "bf16", **fields}
    return predict(load_model(model), load_system(system), Run.model_validate(options))


@pytest.mark.parametrize(
    ("part", "low", "high"),
    [
        ({}, 0.3**2, 0.3**2),
        ({"software_tested": 0.0}, 0.3**2 + 0.4**2, 0.3**2 + 0.4**2),
        (
            {"short_kernel_share": 0.5},
            0.3**2,
            0.3**2 + 0.5**2,
        ),  # a slower host makes the step longer, a faster one no shorter
        ({"link_half_width": np.array([0.4, 0.8])}, 0.3**2 + 0.2**2, 0.3**2 + 0.4**2),
        ({"unmeasured_half_width": np.array([0.4, 0.2])}, 0.3**2 + 0.4**2, 0.3**2 + 0.2**2),
        ({"untimed_convolution_share": 0.8}, 0.3**2 + 0.4**2, 0.3**2 + 0.4**2),
        ({"update_share": 0.2}, 0.3**2 + 0.4**2, 0.3**2 + 0.4**2),
        ({"uses_experts": 1.0}, 0.3**2 + 0.2**2, 0.3**2 + 0.2**2),
        ({"unfused_pass_share": 0.5}, 0.3**2 + 0.4**2, 0.3**2 + 0.4**2),
        ({"gemm_half_width": np.array([0.5, 1.0])}, 0.3**2 + 0.3**2, 0.3**2 + 0.6**2),
    ],
)
def test_squares_of_the_parts_add_up(part: dict[str, Any], low: float, high: float) -> None:
    each = IntervalParameters(
        gemm_error_weight=0.6, link_error_weight=0.5, software_half_width=0.3, untested_software_half_width=0.4,
        unknown_host_half_width=1.0, untimed_library_half_width=0.5, expert_half_width=0.2, update_half_width=2.0,
        upper_to_lower_width_root=1.0,
        fused_pass_half_width=0.8,
    )  # fmt: skip
    known = replace(KNOWN, **part)
    assert known.interval_half_widths(each) == pytest.approx(np.sqrt([low, high]))
    assert known.interval_half_widths(replace(each, upper_to_lower_width_root=1.25)) == pytest.approx(
        [np.sqrt(low) / 1.25, np.sqrt(high) * 1.25]
    )


def test_spreads_are_those_of_the_catalog() -> None:
    """What `paleo calibrate --fit … --only intervals` wrote, not the values from which it sets out."""
    entry = next(each for each in load_calibration("steps").entries if each.family == "interval")
    assert asdict(interval_parameters()) == entry.parameters != asdict(IntervalParameters())
    assert set(entry.uncertainty) == set(entry.parameters) and entry.rows_held_out > 1000


def test_an_interval_is_never_below_what_software_does_and_has_its_ends_beside_the_step() -> None:
    known = interval_parameters()
    for model in ("gpt2", "resnet50", "qwen3-30b-a3b"):
        prediction = predicted(model)
        low, high = (abs(np.log(end / prediction.step_time)) for end in prediction.interval)
        assert (
            low
            > np.hypot(known.software_half_width, known.untested_software_half_width) / known.upper_to_lower_width_root
        )
        assert (
            high
            > np.hypot(known.software_half_width, known.untested_software_half_width) * known.upper_to_lower_width_root
        )
        assert (low, high) == pytest.approx(tuple(prediction.uncertainty.interval_half_widths()))


def test_hosts_whose_times_were_fitted_elsewhere_are_assumed() -> None:
    """Short kernels wait for a host of unknown speed; Megatron-Core has the host times of a profile that was fitted to
    steps on A100 and H100."""
    short = {
        (software, system): predicted(system=system, software=software).uncertainty.short_kernel_share
        for software, system in (("megatron-core", "dgx-h100"), ("megatron-core", "dgx-b200"),
                                 ("tensorflow2", "dgx-h100"), ("fsdp-composer", "dgx-a100-80gb"))
    }  # fmt: skip
    assert [share > 0 for share in short.values()] == [False, True, True, False]


def test_software_that_was_fitted_on_the_architecture_is_known_better() -> None:
    tested = {
        (software, system): predicted(system=system, software=software).uncertainty.software_tested
        for software, system in (("megatron-2021", "dgx-a100-80gb"), ("megatron-2021", "dgx-h100"),
                                 ("fsdp-composer", "dgx-h100"), ("pytorch-eager", "dgx-a100-80gb"))
    }  # fmt: skip
    assert list(tested.values()) == [1.0, 0.0, 1.0, 0.0]


def test_links_count_by_the_time_that_waits_for_them_and_by_whether_they_were_measured() -> None:
    """NVLink of a DGX H100 was measured, the fabric between several has defaults (0.5 to 2)."""
    (rings,) = (
        entry
        for entry in load_calibration("dgx-h100").entries
        if (entry.family, entry.stack) == ("collective.nccl", "back-to-back")
    )
    measured = rings.interval[-1].low, rings.interval[-1].high
    alone, node, nodes = (predicted(system="dgx-h100", gpus=gpus) for gpus in (1, 8, 16))
    assert alone.uncertainty.link_half_width == pytest.approx(NOTHING)
    for prediction, factors in ((node, measured), (nodes, (0.5, 2.0))):
        share = prediction.breakdown.communication_exposed / prediction.step_time
        assert share > 0 and prediction.uncertainty.link_half_width == pytest.approx(
            share * np.abs(np.log(factors)), rel=0.02
        )


@pytest.mark.parametrize(
    ("profile", "release", "device", "dtype", "expected"),
    [
        ("cuda-convnet2", None, "titan-x-maxwell", "fp32", True),  # kernels of its own
        ("torch7-cudnn", 4.0, "titan-x-maxwell", "fp32", True),  # 5 was timed, 4 was not
        ("torch7-cudnn", 5.0, "titan-x-maxwell", "fp32", False),
        ("tensorflow2", 7.6, "a100-sxm4-40gb", "fp16", True),  # its tensor cores came after that release
        ("tensorflow2", 7.6, "a100-sxm4-40gb", "fp32", False),  # its vector units are as before
        ("tensorflow2", 7.6, "v100-sxm2-16gb", "fp16", False),
        ("pytorch-ngc", None, "a100-sxm4-40gb", "fp16", False),
    ],
)
def test_libraries_of_convolution_that_no_calibration_stands_for(
    profile: str, release: float | None, device: str, dtype: str, expected: bool
) -> None:
    software = load_software(profile)
    software = software if release is None else software.with_fields({"convolutions.cudnn": release})
    assert lacks_timed_convolutions(software, load_device(device), dtype) is expected


def test_devices_of_an_architecture_that_was_never_measured_are_known_less() -> None:
    """Gaudi 2 takes its kernels from Ampere: all of them may be wrong in the same way."""
    run = Run(batch=8)
    gaudi, a100 = (predict(load_model("gpt2"), load_system(name), run) for name in ("gaudi2", "a100-sxm4-40gb"))
    assert a100.uncertainty.unmeasured_half_width == pytest.approx(NOTHING)
    assert (gaudi.uncertainty.unmeasured_half_width > 0.4).all() and gaudi.interval[1] > 1.5 * gaudi.step_time


def test_an_interval_widens_with_distance_from_what_was_measured() -> None:
    """Scale beyond a node, and a device whose kernels nobody measured, though it is of a known architecture."""
    near = predicted("llama3-8b", gpus=8).uncertainty
    far = predicted("llama3-8b", gpus=512).uncertainty
    assert (near.log10_nodes, far.log10_nodes) == (0.0, pytest.approx(np.log10(64)))
    widths = [
        replace(near, log10_nodes=scale, unmeasured_device=device).interval_half_widths()
        for scale, device in ((0, 0), (2, 0), (0, 1))
    ]
    assert (widths[1] > widths[0]).all() and (widths[2] > widths[0]).all()


def test_sending_tokens_to_experts_widens_the_interval_of_a_step() -> None:
    options: dict[str, Any] = {"system": "dgx-h100", "batch": 1, "strategy": "zero=3"}
    dense, mixture = (predicted(name, **options).uncertainty for name in ("llama2-7b", "mixtral-8x7b"))
    assert (dense.uses_experts, mixture.uses_experts) == (0.0, 1.0)
    assert (mixture.interval_half_widths() > replace(mixture, uses_experts=0.0).interval_half_widths()).all()


def test_a_compiler_that_may_have_run_widens_the_interval_by_the_passes_that_it_would_fuse() -> None:
    """TensorFlow by its share of passes, which is larger in sixteen bits; not with XLA, nor where none is to be had."""
    shares = {
        (software, dtype): predicted(
            "bert_large", "dgx-1-v100", dtype=dtype, software=software
        ).uncertainty.unfused_pass_share
        for software in ("tensorflow1", "tensorflow-xla", "pytorch-eager")
        for dtype in ("fp16", "fp32")
    }
    assert shares["tensorflow1", "fp16"] > shares["tensorflow1", "fp32"] > 0.1
    assert {share for (software, _), share in shares.items() if software != "tensorflow1"} == {0.0}


def test_constant_rates_bring_their_own_factors() -> None:
    ideal = predicted(calibration="ideal")
    assert ideal.interval == pytest.approx((ideal.step_time, 2.0 * ideal.step_time))


def made_up(known: IntervalParameters, sources: int = 24, rows: int = 40) -> StepErrors:
    """Steps of many sources whose errors are as wide as the spreads say, normally distributed on either side."""
    generator = np.random.default_rng(5)
    count = sources * rows
    old_library, tested, routed = (np.repeat(generator.random(sources) < share, rows) for share in (0.3, 0.4, 0.4))
    parts = StepUncertainty(
        gemm_half_width=np.tile(generator.uniform(0.1, 0.6, count), (2, 1)),
        unmeasured_half_width=np.zeros((2, count)),
        link_half_width=np.tile(generator.uniform(0.0, 0.2, count), (2, 1)),
        short_kernel_share=generator.uniform(0.0, 0.2, count),
        untimed_convolution_share=np.where(old_library, 0.9, 0.0), update_share=generator.uniform(0.0, 0.2, count),
        software_tested=np.where(tested, 1.0, 0.0), uses_constant_rates=False, log10_nodes=np.zeros(count),
        unmeasured_device=np.zeros(count),
        uses_experts=np.where(routed, 1.0, 0.0), unfused_pass_share=np.zeros(count),
    )  # fmt: skip
    normal = generator.normal(0.0, 1.0 / 1.645, count)
    low, high = parts.interval_half_widths(known)
    return StepErrors(np.repeat(np.arange(sources), rows).astype(str), normal * np.where(normal > 0, low, high), parts)


@pytest.mark.slow
def test_a_fit_finds_the_spreads_that_made_the_errors_and_holds_sources_that_it_has_not_seen() -> None:
    true = IntervalParameters(
        software_half_width=0.08,
        untested_software_half_width=0.2,
        untimed_library_half_width=0.5,
        expert_half_width=0.2,
        upper_to_lower_width_root=1.4,
    )
    known = made_up(true)
    found = fit_interval_constants(known, level=0.9)
    assert (
        found.untested_software_half_width,
        found.untimed_library_half_width,
        found.expert_half_width,
        found.upper_to_lower_width_root,
    ) == pytest.approx(
        (
            true.untested_software_half_width,
            true.untimed_library_half_width,
            true.expert_half_width,
            true.upper_to_lower_width_root,
        ),
        rel=0.2,
    )
    few = known.select(np.isin(known.sources, [str(number) for number in range(8)]))
    coverage = cross_validated_coverage(few, level=0.9)
    assert list(coverage["rows"]) == [40] * 8 and coverage["inside"].mean() == pytest.approx(0.9, abs=0.05)


def test_tables_without_steps_are_refused() -> None:
    with pytest.raises(SpecError, match="no row"):
        step_errors([])
    with pytest.raises(SpecError, match="one source alone"):
        cross_validated_coverage(made_up(IntervalParameters(), sources=1))


def steps(folder: Path) -> str:
    """A table of two sources, steps of ResNet-50 on one V100."""
    rows = [
        {"source": source, "model_slug": "resnet50", "device": "v100-sxm2-16gb", "n_gpus": 1, "dtype": "fp32",
         "batch_per_gpu": batch, "framework": "PyTorch", "iteration_ms": 3.0 * batch, "software": "pytorch-eager"}
        for source in ("a laboratory", "another") for batch in (16, 24, 32, 48, 64, 96)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(folder / "cnn_iterations.csv", index=False)
    return str(folder / "cnn_iterations.csv")


@pytest.mark.slow
def test_the_command_writes_the_spreads_and_says_how_sources_are_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["calibrate", "--fit", steps(tmp_path), "--only", "intervals", "--output-dir", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "cnn_iterations: a laboratory" in said.out and "left out: " in said.out
    assert "[1/2] cnn_iterations.csv (12 rows)" in said.err and "[2/2] spreads of 12 steps" in said.err
    (entry,) = load_calibration(tmp_path / "steps.yaml").entries
    assert entry.family == "interval" and entry.rows_fitted == entry.rows_held_out == 12
    assert (
        IntervalParameters(**entry.parameters).software_half_width > 0
        and entry.residual is not None
        and entry.residual.rows == 12
    )
    assert entry.residual.total_error is None  # relative times have no sum


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--only", "intervals"), "nothing says where to write"),
        (("--only", "intervals", "--only", "fabric", "-o", "s.yaml"), "not with --only fabric"),
        (("--only", "intervals", "--free", "skew", "-o", "s.yaml"), "not with --free skew"),
    ],
)
def test_bad_options_of_a_fit_of_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], said: str
) -> None:
    assert run(["calibrate", "--fit", steps(tmp_path), *more]) == 2
    assert said in capsys.readouterr().err


def test_a_table_of_kernels_has_no_intervals_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "gemm.csv").write_text("source,device,dtype,m,n,k,batch,time_us\na,a40,fp16,8,8,8,1,9\n")
    assert run(["calibrate", "--fit", str(file), "--only", "intervals", "-o", str(tmp_path / "s.yaml")]) == 2
    assert "no table of steps" in capsys.readouterr().err


@pytest.fixture
def own_spreads(tmp_path: Path) -> str:
    """A calibration of intervals twice as wide as those of the catalog."""
    shipped = load_calibration("steps")
    entry = next(each for each in shipped.entries if each.family == "interval")
    wider = {
        name: value * (1.0 if name == "upper_to_lower_width_root" else 2.0) for name, value in entry.parameters.items()
    }
    own = shipped.model_copy(update={"entries": (entry.model_copy(update={"parameters": wider}),)})
    (tmp_path / "mine.yaml").write_text(calibration_yaml(own))
    return str(tmp_path / "mine.yaml")


def test_spreads_of_a_calibration_that_a_run_names_are_those_of_its_interval(own_spreads: str) -> None:
    """Prices stay those of the catalog; each half-width is twice as wide, as nothing is unknown here."""
    shipped, own = (predicted(calibration=calibration) for calibration in ("auto", own_spreads))
    assert own.step_time == shipped.step_time and shipped.uncertainty.unmeasured_half_width == pytest.approx(NOTHING)
    assert np.log(np.array(own.interval) / own.step_time) == pytest.approx(
        2.0 * np.log(np.array(shipped.interval) / shipped.step_time)
    )
    assert predicted(calibration="steps").interval == shipped.interval


@pytest.mark.slow
def test_a_validation_takes_them_for_every_system(tmp_path: Path, own_spreads: str) -> None:
    table = steps(tmp_path)
    shipped, own = (validate_file(table, each).predictions for each in (None, load_calibration(own_spreads)))
    assert list(own.values) == list(shipped.values)
    assert np.log(own.high / own.values) == pytest.approx(2.0 * np.log(shipped.high / shipped.values))


def test_a_collective_refuses_them(own_spreads: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["collective", "all-reduce", "--bytes", "1MB", "--ranks", "8", "--system", "dgx-h100",
                "--calibration", own_spreads]) == 2  # fmt: skip
    assert "holds intervals of whole steps" in capsys.readouterr().err
