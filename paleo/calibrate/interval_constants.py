"""Interval constants: ``paleo calibrate --fit … --only intervals`` fits the width of the 90 % intervals of step times.

The constants (`paleo.step.interval.IntervalParameters`) say what whole steps add to the uncertainty of kernels and
links. They are fitted to the errors of measured steps, and tested on sources that were left out of the fit.

The fit is a quantile regression of a row's log error (Koenker and Bassett, Regression Quantiles, Econometrica 46(1),
1978). Wide and narrow intervals count alike. The smooth loss is from Zheng (Gradient Descent Algorithms for Quantile
Regression, Int. J. of Machine Learning and Cybernetics 2, 2011). Rows of a source err together, so each source weighs
the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from paleo.calibrate.fit import (
    MIN_ROWS_OF_LEFT_OUT_SOURCE,
    Array,
    BoolArray,
    StepsBySource,
    conformal_factors,
    minimise_loss,
)
from paleo.calibrate.kernel_fits import read_step_table, round_to_digits, step_calibration_entry, table_citation
from paleo.errors import SpecError
from paleo.specs.calibration import CalibrationEntry, IntervalBin
from paleo.step.interval import INTERVAL_FAMILY, IntervalParameters, StepUncertainty
from paleo.tables.cells import text_column
from paleo.tables.run_tables import RowPrediction
from paleo.units import with_noun

ProgressCallback = Callable[[str], object]
#: What the command-line option ``--only`` of `paleo calibrate` calls this.
FIT_ONLY_PREDICTION_INTERVALS = "intervals"
#: Share of a source's rows that its intervals are to hold: the middle of `_ACCEPTED_COVERAGE`, as few sources come out
#: in between and the rest lie inside or outside as a whole.
_TARGET_COVERAGE = 0.885
#: Shares of a source's rows inside their intervals that are as they should be.
_ACCEPTED_COVERAGE = (0.8, 0.97)
#: Errors below this are as good as none: few rows are stated to more than three digits.
_MIN_ERROR = 0.002
#: Width (log) over which the loss turns from one slope to the other.
_LOSS_SMOOTHING = 0.02
#: Weight of the pull of each logarithm towards its start: it settles what the rows leave open.
_PRIOR_WEIGHT = 1e-4
#: What of `StepUncertainty` differs from step to step.
_UNCERTAINTY_FIELDS = tuple(
    field.name for field in fields(StepUncertainty) if field.name not in ("uses_constant_rates", "fitted_constants")
)


@dataclass(frozen=True)
class StepErrors(StepsBySource):
    """Log errors log(predicted / measured) of measured steps, with their sources and the parts of their intervals."""

    log_errors: Array
    uncertainty: StepUncertainty

    def half_widths(self, spreads: IntervalParameters) -> Array:
        """Compute the half-width of each step time's 90 % interval, on the side of the measured value.

        Parameters
        ----------
        spreads : IntervalParameters
            Constants of the interval.

        Returns
        -------
        ndarray, shape (rows,)
            Half-widths in log units.
        """
        low, high = self.uncertainty.interval_half_widths(spreads)
        return np.asarray(np.where(self.log_errors > 0, low, high))

    def select(self, rows: BoolArray) -> StepErrors:
        """Select the errors and intervals of some of the measured steps.

        Parameters
        ----------
        rows : ndarray of bool, shape (rows,)
            True for each row to keep.

        Returns
        -------
        StepErrors
            Errors and intervals of the kept rows.
        """
        figures: dict[str, Any] = {name: getattr(self.uncertainty, name)[..., rows] for name in _UNCERTAINTY_FIELDS}
        uncertainty = StepUncertainty(**figures, uses_constant_rates=False)
        return StepErrors(self.sources[rows], self.log_errors[rows], uncertainty)


def step_errors(files: Sequence[str], report: ProgressCallback = str) -> StepErrors:
    """Collect the prediction errors of measured steps whose prediction has a 90 % interval.

    Rows of MLPerf tasks are left out: they are fitted together with the task's code.

    Parameters
    ----------
    files : sequence of str
        Measured tables.
    report : ProgressCallback, default str
        Called with a label when each part of the work starts, to show progress.

    Returns
    -------
    StepErrors
        One entry per step.

    Raises
    ------
    SpecError
        If no row can be predicted.
    """
    rows = [row for file in files for row in _rows(file, report)]
    if not rows:
        raise SpecError("no row of these tables is a step that can be predicted")
    sources, errors, known = zip(*rows, strict=True)
    figures: dict[str, Any] = {n: np.stack([getattr(each, n) for each in known], axis=-1) for n in _UNCERTAINTY_FIELDS}
    return StepErrors(np.array(sources), np.array(errors), StepUncertainty(**figures, uses_constant_rates=False))


def _rows(file: str, report: ProgressCallback) -> Iterator[tuple[str, float, StepUncertainty]]:
    table, frame = read_step_table(file, f"--only {FIT_ONLY_PREDICTION_INTERVALS} fits intervals to", report)
    measured, names = table.measured_values(frame), text_column(frame, "source")
    for index, step in enumerate(table.predict_rows(frame)):
        if isinstance(step, RowPrediction) and step.uncertainty is not None:
            yield f"{table.name}: {names[index]}", math.log(step.value / measured[index]), step.uncertainty


def fit_interval_constants(evidence: StepErrors, level: float = _TARGET_COVERAGE) -> IntervalParameters:
    """Fit the constants of step-time intervals: as narrow as possible while they contain a given share of the rows.

    Parameters
    ----------
    evidence : StepErrors
        Errors of measured steps.
    level : float, default _TARGET_COVERAGE
        Share of rows that intervals should contain, averaged over sources [-].

    Returns
    -------
    IntervalParameters
        Fitted constants.
    """
    errors, weights = np.log(np.maximum(np.abs(evidence.log_errors), _MIN_ERROR)), evidence.source_balanced_weights
    start = np.log(np.array(astuple(IntervalParameters())))
    bounds = [(field.metadata["low"], field.metadata["high"]) for field in fields(IntervalParameters)]

    def loss(logs: Array) -> float:
        beyond = errors - np.log(evidence.half_widths(IntervalParameters(*np.exp(logs).tolist())))
        check = level * beyond + _LOSS_SMOOTHING * np.logaddexp(0.0, -beyond / _LOSS_SMOOTHING)
        return float((weights * check).sum() + _PRIOR_WEIGHT * np.square(logs - start).sum())

    return IntervalParameters(*minimise_loss(loss, start, bounds))


def cross_validated_coverage(known: StepErrors, level: float = _TARGET_COVERAGE) -> pd.DataFrame:
    """Test step-time intervals on each source, with constants fitted to all other sources.

    Sources have `MIN_ROWS_OF_LEFT_OUT_SOURCE` rows or more.

    Parameters
    ----------
    known : StepErrors
        Errors of measured steps.
    level : float, default _TARGET_COVERAGE
        Share of rows that intervals should contain [-].

    Returns
    -------
    DataFrame
        One line per source: the columns of `_interval_coverage_by_source`, and the fitted constants.

    Raises
    ------
    SpecError
        If the rows come from a single source.
    """
    names = np.unique(known.sources)
    if len(names) < 2:
        raise SpecError(f"rows of one source alone ({', '.join(names)}): nothing is left when it is left out")
    lines = []
    for _, rows, others in known.leave_one_out(MIN_ROWS_OF_LEFT_OUT_SOURCE):
        spreads = fit_interval_constants(others, level)
        lines.append({**_interval_coverage_by_source(rows, spreads), **asdict(spreads)})
    return pd.DataFrame(lines)


def _interval_coverage_by_source(rows: StepErrors, spreads: IntervalParameters) -> dict[str, str | float]:
    """Compute the coverage of a source: the share of its rows inside their 90 % intervals, and the mean half-width.

    Parameters
    ----------
    rows : StepErrors
        Errors of one source.
    spreads : IntervalParameters
        Constants of the intervals.

    Returns
    -------
    dict of str to str or float
        ``source``, number of ``rows``, share ``inside`` the interval, mean ``half_width`` in log units.
    """
    inside = float((np.abs(rows.log_errors) <= rows.half_widths(spreads)).mean())
    mean_widths = np.asarray(rows.uncertainty.interval_half_widths(spreads).mean(axis=0))
    width = float(mean_widths.mean())
    return {"source": str(rows.sources[0]), "rows": len(rows.log_errors), "inside": inside, "half_width": width}


@dataclass(frozen=True)
class IntervalConstantsFit:
    """Result of the fit of step-time intervals: constants (``interval_parameters``), and the share of each source's
    rows inside.

    ``measured_steps`` holds the measured steps. ``fitted_coverage`` gives these shares with the constants fitted to all
    rows. ``left_out_coverage`` gives them with each source left out of the fit (`cross_validated_coverage`).
    """

    measured_steps: StepErrors
    interval_parameters: IntervalParameters
    fitted_coverage: pd.DataFrame
    left_out_coverage: pd.DataFrame

    def calibration_entry(self, files: Sequence[str], date: str) -> CalibrationEntry:
        """Build the calibration entry of the fitted constants of step-time intervals.

        The entry's interval holds for a step of which nothing is known: conformal factors over all rows. The residual
        is the error of predictions relative to the measurements.

        Parameters
        ----------
        files : sequence of str
            Measured tables.
        date : str
            Date written into results (YYYY-MM-DD).

        Returns
        -------
        CalibrationEntry
            Entry to write into a calibration file.
        """
        errors, source = self.measured_steps.log_errors, table_citation(files, len(set(self.measured_steps.sources)))
        low, high = conformal_factors(np.exp(-errors))
        verdict = coverage_verdict(self.left_out_coverage)
        return step_calibration_entry(
            INTERVAL_FAMILY, self.interval_parameters, source, date, np.exp(errors),
            rows_fitted=len(errors), rows_held_out=int(self.left_out_coverage["rows"].sum()),
            uncertainty={name: round_to_digits(self._sigma(name), 2) for name in asdict(IntervalParameters())},
            interval=(IntervalBin(low=round_to_digits(min(low, 1.0), 4), high=round_to_digits(max(high, 1.0), 4)),),
            notes=f"each source of {MIN_ROWS_OF_LEFT_OUT_SOURCE} rows or more left out in turn: {verdict}",
        )  # fmt: skip

    def _sigma(self, name: str) -> float:
        """Compute the standard deviation of an interval constant's logarithm (jackknife over sources; Tukey, 1958)."""
        logs = np.log(self.left_out_coverage[name].to_numpy(dtype=np.float64))
        return float(np.sqrt((len(logs) - 1) / len(logs) * np.square(logs - logs.mean()).sum()))


def coverage_verdict(sources: pd.DataFrame) -> str:
    """Summarise in a sentence how many sources have about 90 % of their rows inside the intervals.

    Parameters
    ----------
    sources : DataFrame
        One line per source, as `_interval_coverage_by_source` returns them.

    Returns
    -------
    str
        A sentence.
    """
    low, high = _ACCEPTED_COVERAGE
    inside, width = sources["inside"], sources["half_width"].mean()
    within, above = int(inside.between(low, high).sum()), int((inside > high).sum())
    return (
        f"{within} of {len(sources)} have {low:.0%} to {high:.0%} of their rows inside, "
        f"{len(sources) - within - above} fewer, {above} more; {inside.mean():.1%} on the mean of the sources, "
        f"half-width {width:.3f}"
    )


def cross_validated_interval_fit(
    files: Sequence[str], report: ProgressCallback = str, level: float = _TARGET_COVERAGE
) -> IntervalConstantsFit:
    """Fit the constants of step intervals to all rows, and again with each source left out.

    Parameters
    ----------
    files : sequence of str
        Measured tables.
    report : ProgressCallback, default str
        Called with a label when each part of the work starts, to show progress.
    level : float, default _TARGET_COVERAGE
        Share of rows that an interval should contain [-].

    Returns
    -------
    IntervalConstantsFit
        Constants, and the share of each source's rows inside the intervals.
    """
    known = step_errors(files, report)
    report(f"spreads of {with_noun(len(known.log_errors), 'step')}")
    tested, spreads = cross_validated_coverage(known, level), fit_interval_constants(known, level)
    inside = [
        _interval_coverage_by_source(rows, spreads) for _, rows, _ in known.leave_one_out(MIN_ROWS_OF_LEFT_OUT_SOURCE)
    ]
    return IntervalConstantsFit(known, spreads, pd.DataFrame(inside), tested)
