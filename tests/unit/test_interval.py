"""The 90 % interval of a step: what it is made of, and the fit of what whole steps add to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paleo.calibrate.spreads import Evidence, evidence, fitted, left_out
from paleo.errors import SpecError
from paleo.predict import Prediction, predict
from paleo.specs.hardware import load_device, load_system
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import load_software
from paleo.step.step import SPREADS, Spreads, Uncertainty, untimed

NOTHING = np.zeros(2)
#: A step of a fitted profile, all of whose parts are known exactly.
KNOWN = Uncertainty(NOTHING, NOTHING, NOTHING, NOTHING, short=0.0, library=0.0, update=0.0, tested=1.0, constants=False)


def predicted(model: str = "gpt2", system: str = "dgx-a100-80gb", **fields: object) -> Prediction:
    options = {"gpus": 8, "batch": 8, "dtype": "bf16", **fields}
    return predict(load_model(model), load_system(system), Run.model_validate(options))


@pytest.mark.parametrize(
    ("part", "squares"),
    [
        ({}, 0.3**2),
        ({"tested": 0.0}, 0.3**2 + 0.4**2),
        ({"tested": 0.0, "short": 0.5}, 0.3**2 + 0.4**2 + 0.5**2),
        ({"short": 0.5}, 0.3**2),
        ({"links": np.array([0.4, 0.4])}, 0.3**2 + 0.4**2),
        ({"unknown": np.array([0.4, 0.4])}, 0.3**2 + 0.4**2),
        ({"library": 0.8}, 0.3**2 + 0.4**2),
        ({"update": 0.2}, 0.3**2 + 0.4**2),
        ({"kernels": np.array([0.5, 0.5])}, 0.3**2 + (0.6 * 0.5) ** 2),
        ({"scatter": np.array([0.5, 0.5])}, 0.3**2 + (0.8 * 0.5) ** 2),
    ],
)
def test_squares_of_the_parts_add_up(part: dict[str, Any], squares: float) -> None:
    spreads = Spreads(kernels=0.6, software=0.3, untested=0.4, host=1.0, library=0.5, update=2.0)
    assert replace(KNOWN, **part).half_widths(spreads) == pytest.approx(np.sqrt([squares, squares]))


def test_an_interval_is_never_below_what_software_does_and_has_its_ends_beside_the_step() -> None:
    for model in ("gpt2", "resnet50", "qwen3-30b-a3b"):
        prediction = predicted(model)
        low, high = (abs(np.log(end / prediction.step_time)) for end in prediction.interval)
        assert min(low, high) > np.hypot(SPREADS.software, SPREADS.untested)
        assert (low, high) == pytest.approx(tuple(prediction.uncertainty.half_widths()))


def test_software_that_was_fitted_on_the_architecture_is_known_better() -> None:
    tested = {
        (software, system): predicted(system=system, software=software).uncertainty.tested
        for software, system in (("megatron-2021", "dgx-a100-80gb"), ("megatron-2021", "dgx-h100"),
                                 ("fsdp-composer", "dgx-h100"), ("pytorch-eager", "dgx-a100-80gb"))
    }  # fmt: skip
    assert list(tested.values()) == [1.0, 0.0, 1.0, 0.0]


def test_links_count_by_the_time_that_waits_for_them_and_by_whether_they_were_measured() -> None:
    """NVLink of a DGX H100 was measured (0.877 to 1.127), the fabric between several has defaults (0.5 to 2)."""
    alone, node, nodes = (predicted(system="dgx-h100", gpus=gpus) for gpus in (1, 8, 16))
    assert alone.uncertainty.links == pytest.approx(NOTHING)
    for prediction, factors in ((node, (0.877, 1.127)), (nodes, (0.5, 2.0))):
        share = prediction.breakdown.communication_exposed / prediction.step_time
        assert share > 0 and prediction.uncertainty.links == pytest.approx(share * np.abs(np.log(factors)), rel=0.02)


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
    software = software if release is None else software.changed({"convolutions.cudnn": release})
    assert untimed(software, load_device(device), dtype) is expected


def test_devices_of_an_architecture_that_was_never_measured_are_known_less() -> None:
    """Gaudi 2 takes its kernels from Ampere: all of them may be wrong in the same way."""
    run = Run(batch=8)
    gaudi, a100 = (predict(load_model("gpt2"), load_system(name), run) for name in ("gaudi2", "a100-sxm4-40gb"))
    assert a100.uncertainty.unknown == pytest.approx(NOTHING)
    assert (gaudi.uncertainty.unknown > 0.4).all() and gaudi.interval[1] > 1.5 * gaudi.step_time


def test_constant_rates_bring_their_own_factors() -> None:
    ideal = predicted(calibration="ideal")
    assert ideal.interval == pytest.approx((ideal.step_time, 2.0 * ideal.step_time))


def made_up(spreads: Spreads, sources: int = 24, rows: int = 40) -> Evidence:
    """Steps of many sources whose errors are as wide as the spreads say, normally distributed."""
    generator = np.random.default_rng(5)
    count = sources * rows
    old_library, tested = (np.repeat(generator.random(sources) < share, rows) for share in (0.3, 0.4))
    known = Uncertainty(
        kernels=np.tile(generator.uniform(0.1, 0.6, count), (2, 1)), scatter=np.full((2, count), 0.05),
        unknown=np.zeros((2, count)), links=np.tile(generator.uniform(0.0, 0.2, count), (2, 1)),
        short=generator.uniform(0.0, 0.2, count), library=np.where(old_library, 0.9, 0.0),
        update=generator.uniform(0.0, 0.2, count), tested=np.where(tested, 1.0, 0.0), constants=False,
    )  # fmt: skip
    sigma = known.half_widths(spreads)[0] / 1.645
    return Evidence(np.repeat(np.arange(sources), rows).astype(str), generator.normal(0.0, sigma), known)


def test_a_fit_finds_the_spreads_that_made_the_errors_and_holds_sources_that_it_has_not_seen() -> None:
    spreads = Spreads(kernels=0.1, software=0.08, untested=0.2, host=1.0, library=0.5, update=0.7)
    known = made_up(spreads)
    spreads_found = fitted(known, level=0.9)
    assert (spreads_found.untested, spreads_found.library) == pytest.approx(
        (spreads.untested, spreads.library), rel=0.2
    )
    few = known.of(np.isin(known.sources, [str(number) for number in range(8)]))
    coverage = left_out(few, level=0.9)
    assert list(coverage["rows"]) == [40] * 8 and coverage["inside"].mean() == pytest.approx(0.9, abs=0.05)


def test_tables_without_steps_are_refused() -> None:
    with pytest.raises(SpecError, match="no row"):
        evidence([])
    with pytest.raises(SpecError, match="one source alone"):
        left_out(made_up(SPREADS, sources=1))
