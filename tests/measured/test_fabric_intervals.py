"""How far the defaults of a fabric are off on measured ones, and whether the width of all others holds that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from paleo.pricing.calibration_lookup import UNMEASURED_INTERVAL_FACTORS
from paleo.pricing.communication import Fabric, Nccl, fastest_algorithm
from paleo.pricing.links.alpha_beta import bus_factor
from paleo.pricing.links.fabric import default_fabric_parameters
from paleo.specs.system import load_system
from paleo.tables.cells import number_column, read_table, text_column
from paleo.tables.kernels import KERNEL_TABLES
from paleo.units import GIGA, MEBIBYTE, MICROSECOND, MILLISECOND

Errors = Mapping[str, npt.NDArray[np.float64]]
#: Systems with rows between nodes whose network is known; in `EARLY` the GPUs sit on PCIe 3.
MEASURED = ("deepbench-8gpu-dual-root", "dgx-a100-40gb", "dgx-h100", "polaris")
EARLY = ("deepbench-8gpu-dual-root", "deepspeed-v100-edr")
#: Bus bandwidths of all_reduce that ml-engineering's network/README.md lists (achieved_source of the links): system,
#: ranks, bytes, byte/s; and that of 16 MiB.
PUBLISHED = (
    ("aws-p5en.48xlarge", 32, 2.0**32, 364.9 * GIGA),
    ("aws-p6-b200.48xlarge", 32, 2.0**34, 381.8 * GIGA),
    ("aws-p4d.24xlarge", 32, 2.0**34, 42.5 * GIGA),
)
PUBLISHED_SHORT = ("aws-p6-b200.48xlarge", 32, 16.0 * MEBIBYTE, 50.0 * GIGA)
#: Student's t at 95 % by degrees of freedom.
STUDENT = {3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895}


def measured_errors(shared: Path, *, short: bool) -> Errors:
    """log(measured / predicted by the defaults) of each fabric's rows of NCCL: rings and trees beyond a millisecond, or
    all operations below."""
    kind, frame = KERNEL_TABLES["collective"], read_table(shared / "measurements" / "collective.csv.gz")
    frame = frame[text_column(frame, "system").isin(MEASURED)]
    frame = frame[(kind.kernel_family(frame) == "collective.fabric") & (kind.timing_method(frame) == "back-to-back")]
    errors = {}
    for name in MEASURED:
        rows, system = frame[text_column(frame, "system") == name], load_system(name)
        seconds = kind.predict_times(rows, system, default_fabric_parameters(system))
        rings = ~text_column(rows, "op").isin(["all_to_all", "send_recv"]).to_numpy()
        chosen = seconds <= MILLISECOND if short else (seconds > MILLISECOND) & rings
        errors[name] = np.log(number_column(rows, "time_us") * MICROSECOND / seconds)[chosen]
    return errors


def published_error(name: str, ranks: int, size: float, published: float) -> npt.NDArray[np.float64]:
    """The same for a published bus bandwidth."""
    fabric = Fabric(load_system(name))
    seconds = float(fastest_algorithm(fabric.collective_model, "all_reduce", size, fabric.links(1, ranks)).time)
    return np.log([float(bus_factor("all_reduce", ranks)) * size / published / seconds])


def error_of_steps() -> npt.NDArray[np.float64]:
    """The same for a fabric that was fitted to whole steps: 1 GiB over 64 V100s."""
    fabric, defaults = (
        Fabric(load_system("deepspeed-v100-edr")),
        default_fabric_parameters(load_system("deepspeed-v100-edr")),
    )
    policies = (fabric.collective_model, Nccl(inter_node=defaults))
    fitted, usual = (
        float(fastest_algorithm(each, "all_gather", 2.0**30, fabric.links(1, 64)).time) for each in policies
    )
    return np.log([fitted / usual])


@pytest.fixture(scope="module")
def large(shared: Path) -> Errors:
    """Of times beyond a millisecond, by fabric."""
    published = {name: published_error(name, *figures) for name, *figures in PUBLISHED}
    return {**measured_errors(shared, short=False), **published, "deepspeed-v100-edr": error_of_steps()}


@pytest.fixture(scope="module")
def small(shared: Path) -> Errors:
    """Of shorter times, by fabric."""
    name, *figures = PUBLISHED_SHORT
    return {**measured_errors(shared, short=True), name: published_error(name, *figures)}


def interval(errors: Errors) -> tuple[float, float]:
    """Student's 90 % interval of an error on one more fabric: those of fabrics differ, and those of a fabric's rows."""
    means = np.array([rows.mean() for rows in errors.values()])
    within = float(np.mean([rows.var(ddof=1) for rows in errors.values() if len(rows) > 2]))
    spread = np.sqrt(means.var(ddof=1) * (1.0 + 1.0 / len(means)) + within)
    half = STUDENT[len(means) - 1] * float(spread)
    return float(means.mean()) - half, float(means.mean()) + half


def inside(errors: Errors, left_out: str) -> float:
    """Share of a fabric's rows in the interval of all others."""
    low, high = interval({name: rows for name, rows in errors.items() if name != left_out})
    return float(((errors[left_out] >= low) & (errors[left_out] <= high)).mean())


def recent(errors: Errors) -> Errors:
    """Those of fabrics beside GPUs on PCIe 4 and later."""
    return {name: rows for name, rows in errors.items() if name not in EARLY}


@pytest.mark.slow
@pytest.mark.shared
def test_one_more_fabric_lies_as_limits_say(large: Errors, small: Errors) -> None:
    assert len(large) == 8 and len(recent(large)) == 6 and len(small) == 5
    assert np.exp(interval(recent(large))) == pytest.approx((0.80, 1.46), rel=0.02)
    assert np.exp(interval(large)) == pytest.approx((0.71, 2.1), rel=0.02)
    assert np.exp(interval(small)) == pytest.approx((0.62, 3.6), rel=0.05)


@pytest.mark.slow
@pytest.mark.shared
def test_fabrics_that_are_left_out_lie_inside(large: Errors, small: Errors) -> None:
    """Large rings: eight of eight by all others, five of six by the recent ones. Short times: all five."""
    assert min(inside(large, name) for name in large) >= 0.85
    assert [name for name in large if name not in EARLY and inside(recent(large), name) < 0.9] == ["polaris"]
    assert min(inside(small, name) for name in small) >= 0.9


@pytest.mark.shared
def test_the_width_of_unmeasured_fabrics_holds_large_rings_on_each(large: Errors) -> None:
    low, high = np.log(UNMEASURED_INTERVAL_FACTORS)
    assert min(float(((rows >= low) & (rows <= high)).mean()) for rows in large.values()) >= 0.85
