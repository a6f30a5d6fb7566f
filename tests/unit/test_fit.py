"""The fit engine on rows whose parameters are known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest

from paleo.calibrate import fit
from paleo.calibrate.fit import Array, Fit, MeasuredRows, conformal_bins, conformal_factors, split_by_configuration
from paleo.errors import SpecError
from paleo.specs.calibration import parameter
from paleo.tables.base import ResidualErrors, residual_errors


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds = start + size / rate."""

    start: float = parameter("1 s", "0.01..100 s", "constant part")
    rate: float = parameter("1 1/s", "0.01..100", "size per second")
    pinned: float = parameter("1", "0.1..10", "not fitted", fitted=False)


class LineTable:
    configuration_columns: tuple[str, ...] = ("size",)

    def predict_times(self, frame: pd.DataFrame, figures: float, parameters: Line) -> Array:
        return np.asarray(parameters.start + frame["size"].to_numpy(dtype=np.float64) / (parameters.rate * figures))


def rows(
    stack: str, start: float, *, count: int = 400, noise: float = 0.05, outliers: int = 0, seed: int = 0
) -> MeasuredRows:
    random = np.random.default_rng(seed)
    frame = pd.DataFrame({"size": np.round(10 ** random.uniform(-1, 3, count), 4)})
    measured = LineTable().predict_times(frame, 2.0, Line(start, 5.0)) * np.exp(random.normal(0, noise, count))
    measured[:outliers] *= 20.0
    return MeasuredRows(frame, 2.0, stack, measured)


@pytest.mark.slow
def test_recovers_parameters_and_states_honest_errors() -> None:
    result = Fit(LineTable(), [rows("a", 3.0)], Line()).run()
    found = result.parameters["a"]
    assert found.start == pytest.approx(3.0, rel=0.03) and found.rate == pytest.approx(5.0, rel=0.03)
    assert found.pinned == 1.0
    # mean of |exp(N(0, 0.05)) - 1| is 0.05 sqrt(2 / pi) = 0.040
    assert result.residual.mape == pytest.approx(0.040, abs=0.012)
    assert 0.0005 < result.log_standard_deviations["rate"] < 0.02
    assert result.rows_fitted + result.rows_held_out < 400


@pytest.mark.parametrize(("others", "random"), [(0, 0), (0, 2), (2, 0), (1, 3)])
def test_a_search_sets_out_from_each_start_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, others: int, random: int
) -> None:
    starts: list[Array] = []
    optimizer = fit.scipy_optimizer("least_squares")

    def counted(errors: object, start: Array, **more: object) -> object:
        starts.append(start)
        return optimizer(errors, start, **more)

    monkeypatch.setattr(fit, "scipy_optimizer", lambda name: counted)
    alternatives = [Line(start=2.0 + place) for place in range(others)]
    Fit(LineTable(), [rows("a", 3.0, count=40)], Line(), alternatives, random_starts=random).run()
    assert len({tuple(start) for start in starts}) == len(starts) == 1 + others + random


@pytest.mark.slow
def test_outliers_do_not_steer_the_fit() -> None:
    result = Fit(LineTable(), [rows("a", 3.0, outliers=12)], Line()).run()
    assert result.parameters["a"].start == pytest.approx(3.0, rel=0.06)


def test_stacks_share_all_but_what_stands_apart() -> None:
    result = Fit(LineTable(), [rows("a", 1.0), rows("b", 8.0, seed=1)], Line(), parameters_per_stack=("start",)).run()
    assert result.parameters["a"].start == pytest.approx(1.0, rel=0.05)
    assert result.parameters["b"].start == pytest.approx(8.0, rel=0.05)
    assert result.parameters["a"].rate == result.parameters["b"].rate
    assert set(result.log_standard_deviations) == {"rate", "start[a]", "start[b]"}
    assert set(result.residual_by_stack) == {"a", "b"}


def test_fixed_stays_and_free_moves() -> None:
    assert (
        Fit(LineTable(), [rows("a", 3.0)], Line(start=3.0), fixed_parameters=("start",)).run().parameters["a"].start
        == 3.0
    )
    assert (
        "pinned"
        in Fit(LineTable(), [rows("a", 3.0)], Line(), additionally_fitted_parameters=("pinned",))
        .run()
        .log_standard_deviations
    )
    with pytest.raises(SpecError, match="nearest: 'rate'"):
        Fit(LineTable(), [rows("a", 3.0)], Line(), fixed_parameters=("rat",)).run()


def test_interval_covers_nine_of_ten_new_rows() -> None:
    result = Fit(LineTable(), [rows("a", 3.0, count=3000, noise=0.1)], Line()).run()
    new = rows("a", 3.0, count=2000, noise=0.1, seed=9)
    predicted = LineTable().predict_times(new.frame, 2.0, result.parameters["a"])
    edges = [one.up_to_s for one in result.interval_bins]
    assert len(edges) > 1 and edges[-1] == math.inf
    which = [result.interval_bins[int(np.searchsorted(edges, value))] for value in predicted]
    inside = [one.low * p <= t <= one.high * p for one, p, t in zip(which, predicted, new.measured_times, strict=True)]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.03)


def test_empty_cells_of_words_are_part_of_a_configuration() -> None:
    frame = pd.DataFrame({"size": np.arange(40.0), "system": [None, "dgx-1"] * 20})
    part = split_by_configuration(frame, ("size", "system"))
    assert (
        set(part) == {0, 1, 2}
        and (part == split_by_configuration(frame.fillna({"system": ""}), ("size", "system"))).all()
    )


def test_split_keeps_configurations_together_and_apart_from_other_rows() -> None:
    frame = pd.DataFrame({"size": np.repeat(np.arange(500), 2)})
    part = split_by_configuration(frame, ("size",))
    assert (part[::2] == part[1::2]).all()
    assert (split_by_configuration(frame.iloc[100:120], ("size",)) == part[100:120]).all()
    assert np.bincount(part)[0] / len(part) == pytest.approx(0.5, abs=0.08)
    with pytest.raises(SpecError, match="'sizes' is missing; nearest: 'size'"):
        split_by_configuration(frame, ("sizes",))


def test_small_sets() -> None:
    assert conformal_factors(np.array([0.9, 1.0, 1.2])) == (0.9, 1.2)
    assert len(conformal_bins(np.ones(100), np.ones(100))) == 1
    assert math.isnan(residual_errors(np.zeros(0), np.zeros(0)).mape)
    assert residual_errors(np.array([2.0]), np.array([1.0])) == ResidualErrors(1, 1.0, 1.0, 1.0, math.log(2), 1.0)
    with pytest.raises(SpecError, match="no rows to fit"):
        Fit(LineTable(), [], Line()).run()
