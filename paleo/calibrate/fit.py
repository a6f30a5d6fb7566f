"""Robust fits of a timing formula's parameters to measured rows, with held-out errors and a conformal interval.

Parameters are searched in log space within their bounds, by least squares on log(predicted / measured). A soft-L1 loss
keeps a few outliers from deciding the fit. Rows are split by *configuration* into three parts: to fit, to set the
interval, and to report errors. The interval is split conformal (Papadopoulos et al., 2002; Lei et al., 2018): order
statistics of measured / predicted on rows that the fit did not see.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import SpecError, suggest_names
from paleo.tables.base import ResidualErrors, residual_errors
from paleo.tables.run_tables import row_dicts

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult


Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
StringArray = npt.NDArray[np.str_]
Parameters = TypeVar("Parameters")
#: Columns that name a configuration; rows that differ in replicas or in the global batch alone are one.
CONFIGURATION_COLUMNS = (
    "model", "model_slug", "system", "device", "layers", "hidden", "seq_len", "tp", "pp", "micro_batch",
    "batch_per_gpu", "recompute",
)  # fmt: skip
#: Log error at which the loss turns from square to linear; also the standard error of one row under the prior.
_LOSS_SCALE = 0.1
#: Share of configurations to fit, and to set the interval on; the rest is held out for the report.
_FITTED_CONFIGURATION_SHARE, _INTERVAL_CONFIGURATION_SHARE = 0.5, 0.25
#: Share of a range that a start keeps from its ends; log step of a numerical derivative.
_BOUND_MARGIN = 1 / 1000
#: Rows from which a source weighs as much as another and is left out by itself.
MIN_ROWS_OF_LEFT_OUT_SOURCE = 6
#: Factors of a fit that held no rows out: a judgement, no statistic.
_UNTESTED_FACTORS = (0.8, 1.25)


class TimePredictor(Protocol):
    """Interface through which a fit predicts the times of measured rows with trial parameters."""

    @property
    def configuration_columns(self) -> tuple[str, ...]:
        """Names of the table columns that together identify a measured configuration."""

    def predict_times(self, frame: pd.DataFrame, figures: Any, parameters: Any) -> Array:
        """Predict the time of measured rows that share datasheet values and parameters.

        Parameters
        ----------
        frame : DataFrame
            Measured rows.
        figures : object
            Datasheet values of the device or system, or other fixed inputs of the prediction (a profile, a system).
        parameters : object
            Trial parameters of the fit.

        Returns
        -------
        ndarray, shape (rows,)
            Times [s].
        """


@dataclass(frozen=True, slots=True)
class MeasuredRows:
    """Measured rows that one call of a timing formula predicts: same device or system, number format and timing method.

    ``datasheet`` holds the datasheet values (or other fixed inputs) of their prediction. ``measured_times`` are the
    measured times [s], shape (rows,).
    """

    frame: pd.DataFrame
    datasheet: Any
    group_name: str
    measured_times: Array

    def select(self, mask: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> MeasuredRows:
        """Select some of the measured rows, by mask or by position.

        Parameters
        ----------
        mask : ndarray of bool or ndarray of int
            True for each row to keep, or the positions of these rows.

        Returns
        -------
        MeasuredRows
            The kept rows, with the same datasheet and timing method.
        """
        chosen = self.frame.iloc[np.arange(len(self.frame))[mask]]
        return MeasuredRows(chosen, self.datasheet, self.group_name, self.measured_times[mask])


def count_rows(rows: Iterable[MeasuredRows]) -> int:
    """Count the measured rows of several groups together.

    Parameters
    ----------
    rows : iterable of MeasuredRows
        Groups of measured rows.

    Returns
    -------
    int
        Number of rows.
    """
    return sum(len(group.measured_times) for group in rows)


@dataclass(frozen=True, slots=True)
class FittedIntervalBin:
    """Bin of a 90 % interval: factors ``low`` and ``high`` on predicted times up to ``up_to_s`` [s]."""

    up_to_s: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class FitResult(Generic[Parameters]):
    """Result of a fit of a timing formula's parameters to measured rows.

    ``parameters``: fitted values by stack (timing method or architecture). ``log_standard_deviations``: standard
    deviation of each parameter's logarithm. ``residual``: errors on held-out rows, of all stacks and by stack.
    ``interval_bins``: 90 % factors by predicted time, of all stacks and by stack.
    """

    parameters: Mapping[str, Parameters]
    log_standard_deviations: Mapping[str, float]
    residual: ResidualErrors
    residual_by_stack: Mapping[str, ResidualErrors]
    interval_bins: tuple[FittedIntervalBin, ...]
    interval_by_stack: Mapping[str, tuple[FittedIntervalBin, ...]]
    rows_fitted: int
    rows_held_out: int


def conformal_factors(ratio: Array, level: float = 0.9) -> tuple[float, float]:
    """Compute the factors on a prediction between which a new measurement lies with a given probability.

    They are the order statistics ceil((n + 1)(1 ± level) / 2) of n exchangeable ratios; the extremes if rows are few.

    Parameters
    ----------
    ratio : ndarray, shape (n,)
        Measured over predicted times [-].
    level : float, default 0.9
        Probability that a new measurement lies between the factors.

    Returns
    -------
    tuple of (float, float)
        (low, high) factors, with equal tails.

    Examples
    --------
    >>> conformal_factors(np.arange(1.0, 20.0))
    (1.0, 19.0)
    """
    ordered, tail = np.sort(ratio), (1.0 - level) / 2.0
    rank = math.floor(round((len(ordered) + 1) * tail, 9))
    return float(ordered[max(rank - 1, 0)]), float(ordered[min(len(ordered) - rank, len(ordered) - 1)])


def conformal_bins(
    predicted: Array, measured: Array, *, most: int = 4, least_rows: int = 150
) -> tuple[FittedIntervalBin, ...]:
    """Compute 90 % interval factors (conformal) for bins of predicted time that hold equally many rows.

    Parameters
    ----------
    predicted, measured : ndarray, shape (n,)
        Predicted and measured times [s].
    most : int, default 4
        Largest number of bins.
    least_rows : int, default 150
        Smallest number of rows in a bin.

    Returns
    -------
    tuple of FittedIntervalBin
        Bins in rising order of predicted time.
    """
    bins = max(1, min(most, len(predicted) // least_rows))
    edges = np.quantile(predicted, np.arange(1, bins) / bins)
    bin_of = np.searchsorted(edges, predicted)
    ratio = measured / predicted
    factors = [conformal_factors(ratio[bin_of == index]) for index in range(bins)]
    return tuple(FittedIntervalBin(float(edge), *pair) for edge, pair in zip([*edges, math.inf], factors, strict=True))


def split_by_configuration(
    frame: pd.DataFrame, configuration: Sequence[str], *, seed: int = 0
) -> npt.NDArray[np.int64]:
    """Split measured rows into a part to fit, a part to set the interval and a held-out part.

    The part of a row depends only on the values of its configuration and the seed, not on other rows of the table.

    Parameters
    ----------
    frame : DataFrame
        Measured rows.
    configuration : sequence of str
        Columns that define a configuration.
    seed : int, default 0
        Seed of the split.

    Returns
    -------
    ndarray of int, shape (rows,)
        0 to fit, 1 to set the interval, 2 held out; rows of one configuration share a part.

    Raises
    ------
    SpecError
        If a column is missing.
    """
    missing = [name for name in configuration if name not in frame.columns]
    if missing:
        raise SpecError(f"column {missing[0]!r} is missing; {suggest_names(missing[0], map(str, frame.columns))}")
    words = join_cells_to_keys(frame, configuration) + f"|{seed}"
    fraction = (pd.util.hash_array(words.to_numpy(dtype=object)) % 9973) / 9973
    return np.digitize(
        fraction, [_FITTED_CONFIGURATION_SHARE, _FITTED_CONFIGURATION_SHARE + _INTERVAL_CONFIGURATION_SHARE]
    ).astype(np.int64)


def join_cells_to_keys(frame: pd.DataFrame, columns: Sequence[str]) -> pd.Series[str]:
    """Join the cells of some columns into one text per row, to identify configurations; all empty cells count as equal.

    Parameters
    ----------
    frame : DataFrame
        Measured rows.
    columns : sequence of str
        Columns to join.

    Returns
    -------
    Series of str
        One text per row, cells joined by ``|``.
    """
    return frame[list(columns)].astype(str).fillna("").agg("|".join, axis=1)


def sample_rows(rows: Sequence[MeasuredRows], limit: int, seed: int) -> list[MeasuredRows]:
    """Draw a random sample of measured rows for a fit, the same number from each group (or all rows of a small group).

    Parameters
    ----------
    rows : sequence of MeasuredRows
        Groups of measured rows.
    limit : int
        Largest number of rows altogether.
    seed : int
        Seed of the draw.

    Returns
    -------
    list of MeasuredRows
        Groups with at most ``limit`` rows altogether.
    """
    generator, share = np.random.default_rng(seed), max(1, limit // max(1, len(rows)))
    filled = [group for group in rows if len(group.measured_times)]
    return [group.select(np.sort(generator.permutation(len(group.measured_times))[:share])) for group in filled]


class _LogVector(Generic[Parameters]):
    """Conversion between a fit's parameters and one vector of their logarithms, in which the optimizer searches.

    Shared parameters occur once in the vector, those of ``parameters_per_stack`` once for each stack.
    """

    def __init__(self, fit: Fit[Parameters], stacks: Sequence[str]) -> None:
        start, fields = fit.start_values, {field.name: field for field in dataclasses.fields(fit.start_values)}  # type: ignore[arg-type]
        for name in (*fit.parameters_per_stack, *fit.fixed_parameters, *fit.additionally_fitted_parameters):
            if name not in fields:
                raise SpecError(f"unknown parameter {name!r} of {type(start).__name__}; {suggest_names(name, fields)}")
        fitted = (name for name, field in fields.items() if field.metadata.get("fitted", True))
        released = {*fitted, *fit.additionally_fitted_parameters} - {*fit.fixed_parameters}
        moving = [name for name in fields if name in released]
        varying = [name for name in moving if name in fit.parameters_per_stack]
        self.start, self.stacks = start, list(stacks)
        self.keys: list[tuple[str, str | None]] = [(name, None) for name in moving if name not in varying]
        self.keys += [(name, stack) for name in varying for stack in stacks]
        self.low, self.high = (np.log([fields[name].metadata[end] for name, _ in self.keys]) for end in ("low", "high"))
        self.centre = self.move_inside_bounds(self.to_log_vector(start))

    def to_log_vector(self, point: Parameters) -> Array:
        """Convert parameters to the vector of logarithms in which the optimizer searches.

        Parameters
        ----------
        point : Parameters
            Parameters of one stack (timing method), all positive.

        Returns
        -------
        ndarray, shape (keys,)
            Natural logarithms of the fitted parameters.
        """
        return np.log([getattr(point, name) for name, _ in self.keys])

    def move_inside_bounds(self, vector: Array) -> Array:
        """Move entries of a log vector that lie at a bound slightly inside, so that a search may start there.

        Parameters
        ----------
        vector : ndarray, shape (keys,)
            Natural logarithms of the fitted parameters.

        Returns
        -------
        ndarray, shape (keys,)
            Logarithms that lie inside the bounds by at least a small share of their range.
        """
        margin = _BOUND_MARGIN * (self.high - self.low)
        return np.clip(vector, self.low + margin, self.high - margin)

    def _unpack(self, vector: Array) -> dict[str, Parameters]:
        values = np.exp(np.clip(vector, self.low, self.high))
        out: dict[str, Parameters] = {}
        for stack in self.stacks:
            chosen = {n: float(v) for (n, s), v in zip(self.keys, values, strict=True) if s in (None, stack)}
            out[stack] = dataclasses.replace(self.start, **chosen)  # type: ignore[type-var]
        return out

    def parameter_label(self, key: tuple[str, str | None]) -> str:
        """Return the name of one entry of the log vector, as key of the fit's uncertainty.

        Parameters
        ----------
        key : tuple of str and (str or None)
            Parameter and stack (timing method) of the entry; None for a parameter that all stacks share.

        Returns
        -------
        str
            Name of the parameter. The stack follows in brackets if several stacks have their own value.
        """
        return key[0] if key[1] is None or len(self.stacks) == 1 else f"{key[0]}[{key[1]}]"


def log_errors(kind: TimePredictor, rows: Sequence[MeasuredRows], parameters: Mapping[str, Any]) -> Array:
    """Compute the log errors of predicted times, log(predicted / measured), over all groups of measured rows.

    Parameters
    ----------
    kind : TimePredictor
        Predictor of the rows' times.
    rows : sequence of MeasuredRows
        Groups of measured rows.
    parameters : mapping of str to object
        Parameters by stack.

    Returns
    -------
    ndarray, shape (rows,)
        Natural logarithms of predicted over measured time.
    """
    parts = [
        np.log(kind.predict_times(group.frame, group.datasheet, parameters[group.group_name]) / group.measured_times)
        for group in rows
        if len(group.measured_times)
    ]
    return np.concatenate(parts) if parts else np.zeros(0)


def predicted_and_measured(
    kind: TimePredictor, rows: Sequence[MeasuredRows], parameters: Mapping[str, Any]
) -> tuple[Array, Array]:
    """Predict the times of all measured rows with given parameters, and return them with the measured times.

    Parameters
    ----------
    kind : TimePredictor
        Predictor of the rows' times.
    rows : sequence of MeasuredRows
        Groups of measured rows.
    parameters : mapping of str to object
        Parameters by stack.

    Returns
    -------
    predicted, measured : ndarray, shape (rows,)
        Times [s].
    """
    measured = np.concatenate([group.measured_times for group in rows]) if rows else np.zeros(0)
    return measured * np.exp(log_errors(kind, rows, parameters)), measured


@dataclass(frozen=True)
class Fit(Generic[Parameters]):
    """Robust fit of bounded parameters to measured rows, run by `run`.

    All fits of kernels, board power, links, software and host waiting use this class. They differ in their rows, their
    parameters and the formula that predicts a row.

    Parameters
    ----------
    predictor : TimePredictor
        Predictor of the rows' times, which also names the columns of a configuration.
    rows : sequence of MeasuredRows
        Measured rows, perhaps of several devices, formats and stacks.
    start_values : dataclass
        Parameters at which the search starts; their fields state the bounds (`paleo.specs.calibration.parameter`).
    alternative_starts : sequence of dataclass
        Further starts of searches, for nearly discrete parameters (tile sizes).
    parameters_per_stack, fixed_parameters, additionally_fitted_parameters : sequence of str
        Names of parameters with one value per stack (launch costs), and of parameters that stay at `start_values`.
        Those of the third kind are fitted although by default they are not.
    max_training_rows : int
        Largest number of rows that a search uses.
    random_starts : int
        Number of further searches from random points near `start_values`.
    prior_precision : float
        Inverse width, in log units, of a normal prior around `start_values`. The prior counts as one row per parameter
        and decides parameters that the rows do not determine.
    overestimate_weight : float
        Weight of an error above the measured time relative to an error below. It is above 1 for rows that often include
        more than the kernel (a compilation).
    row_weight_exponent : float
        Exponent of the measured time in the weight of a row, as long kernels dominate a training step.
    max_evaluations : int
        Largest number of evaluations of the formula in a search.
    seed : int
        Seed of the split and of the starts.
    uses_held_out_rows : bool
        False fits all rows, for tables with few rows: residuals are then those of fitted rows, and the interval is
        ``_UNTESTED_FACTORS``.
    """

    predictor: TimePredictor
    rows: Sequence[MeasuredRows]
    start_values: Parameters
    alternative_starts: Sequence[Parameters] = ()
    parameters_per_stack: Sequence[str] = ()
    fixed_parameters: Sequence[str] = ()
    additionally_fitted_parameters: Sequence[str] = ()
    max_training_rows: int = 1000
    random_starts: int = 1
    prior_precision: float = 0.5
    overestimate_weight: float = 1.0
    row_weight_exponent: float = 0.15
    max_evaluations: int = 40
    seed: int = 0
    uses_held_out_rows: bool = True

    @property
    def split_rows(self) -> tuple[list[MeasuredRows], list[MeasuredRows], list[MeasuredRows]]:
        """Measured rows split by configuration: (to fit, to set the interval, held out for the residual)."""
        parts = [
            split_by_configuration(group.frame, self.predictor.configuration_columns, seed=self.seed)
            if self.uses_held_out_rows
            else np.zeros(len(group.measured_times), dtype=np.int64)
            for group in self.rows
        ]
        to_fit, between, kept = (
            [group.select(part == part_number) for group, part in zip(self.rows, parts, strict=True)]
            for part_number in (0, 1, 2 if self.uses_held_out_rows else 0)
        )
        return sample_rows(to_fit, self.max_training_rows, self.seed), between, kept

    def run(self) -> FitResult[Parameters]:
        """Fit the parameters to the measured rows, and compute held-out errors and intervals.

        Raise SpecError if no row is left to fit.
        """
        train, between, held_out = self.split_rows
        if not train:
            raise SpecError("no rows to fit: every configuration fell into the held-out parts, or the table is empty")
        packing = _LogVector(self, sorted({group.group_name for group in self.rows}))
        run = self._search(train, packing)
        parameters = packing._unpack(run.x)

        def compared(rows: Sequence[MeasuredRows], stack: str | None = None) -> tuple[Array, Array]:
            chosen = [group for group in rows if stack in (None, group.group_name)]
            return predicted_and_measured(self.predictor, chosen, parameters)

        def interval(predicted: Array, measured: Array) -> tuple[FittedIntervalBin, ...]:
            untested = FittedIntervalBin(math.inf, *_UNTESTED_FACTORS)
            return conformal_bins(predicted, measured) if len(measured) else (untested,)

        sigma = zip(map(packing.parameter_label, packing.keys), _log_sigma(run).tolist(), strict=True)
        return FitResult(
            parameters=parameters,
            log_standard_deviations=dict(sigma),
            residual=residual_errors(*compared(held_out)),
            residual_by_stack={stack: residual_errors(*compared(held_out, stack)) for stack in parameters},
            interval_bins=interval(*compared(between)),
            interval_by_stack={stack: interval(*compared(between, stack)) for stack in parameters},
            rows_fitted=count_rows(train),
            rows_held_out=count_rows(held_out) if self.uses_held_out_rows else 0,
        )

    def _search(self, rows: Sequence[MeasuredRows], packing: _LogVector[Parameters]) -> OptimizeResult:
        """Run several bounded least-squares searches, the first from the start values, and return the best result."""
        measured = np.concatenate([group.measured_times for group in rows])
        weights = np.clip((measured / np.median(measured)) ** self.row_weight_exponent, 0.5, 3.0)

        def errors(vector: Array) -> Array:
            pull = _LOSS_SCALE * self.prior_precision * (vector - packing.centre)
            off = log_errors(self.predictor, rows, packing._unpack(vector))
            return np.concatenate([weights * np.where(off > 0.0, self.overestimate_weight, 1.0) * off, pull])

        generator, least_squares = np.random.default_rng(self.seed), scipy_optimizer("least_squares")
        points = [packing.centre, *(packing.to_log_vector(alternative) for alternative in self.alternative_starts)]
        size, bounds = len(packing.centre), (packing.low, packing.high)
        points += [packing.centre + generator.normal(0.0, 0.3, size) for _ in range(self.random_starts)]
        runs = [
            least_squares(
                errors, packing.move_inside_bounds(point), bounds=bounds, loss="soft_l1", f_scale=_LOSS_SCALE,
                diff_step=np.full(size, _BOUND_MARGIN), max_nfev=self.max_evaluations,
            )
            for point in points
        ]  # fmt: skip
        return min(runs, key=lambda run: float(run.cost))


def _log_sigma(run: OptimizeResult) -> Array:
    """Compute the standard deviation of each log parameter, sqrt(diag(s² (JᵀJ)⁻¹)), from the Jacobian J."""
    jacobian = np.asarray(run.jac)
    spread = 1.4826 * np.median(np.abs(run.fun))
    variance: Array = np.diag(np.linalg.pinv(jacobian.T @ jacobian))
    return np.asarray(spread * np.sqrt(np.maximum(variance, 0.0)))


# Constants of whole steps, in which each source of rows weighs as much as another and is left out in turn


@dataclass(frozen=True)
class StepsBySource:
    """Base class of arrays over measured steps from several sources, with one entry per step on the first axis.

    ``sources`` names the source of each step, shape (rows,).
    """

    sources: StringArray

    def select(self, rows: BoolArray) -> Self:
        """Select some of the measured steps in all arrays.

        Parameters
        ----------
        rows : ndarray of bool, shape (rows,)
            True for each row to keep.

        Returns
        -------
        StepsBySource
            The same class with the kept rows.
        """
        names = [field.name for field in dataclasses.fields(self)]
        return dataclasses.replace(self, **{name: getattr(self, name)[rows] for name in names})

    @property
    def source_balanced_weights(self) -> Array:
        """Weight of each row in a fit, shape (rows,): sources have equal total weight, small sources less."""
        _, place, counts = np.unique(self.sources, return_inverse=True, return_counts=True)
        shares = np.minimum(counts / MIN_ROWS_OF_LEFT_OUT_SOURCE, 1.0)
        return np.asarray((shares / counts / shares.sum())[place])

    def leave_one_out(self, least: int = 1) -> Iterator[tuple[str, Self, Self]]:
        """Yield each source with its rows and with the rows of all other sources, for leave-one-source-out tests.

        Parameters
        ----------
        least : int, default 1
            Sources with fewer rows are skipped.

        Yields
        ------
        tuple of (str, SourceRows, SourceRows)
            (name of the source, its rows, all other rows).
        """
        names, counts = np.unique(self.sources, return_counts=True)
        for name in names[counts >= least]:
            chosen = self.sources == name
            yield str(name), self.select(chosen), self.select(~chosen)


def minimise_loss(loss: Callable[[Array], float], start: Array, bounds: Sequence[tuple[float, float]]) -> list[float]:
    """Minimise a loss over positive constants in log space, within bounds (L-BFGS-B).

    Parameters
    ----------
    loss : callable
        Function of the logarithms of the constants that returns the loss.
    start : ndarray, shape (constants,)
        Logarithms of the start values.
    bounds : sequence of tuple of float
        Smallest and largest value of each constant (not logarithms).

    Returns
    -------
    list of float
        Constants with the least loss.
    """
    logs = [(math.log(low), math.log(high)) for low, high in bounds]
    run = scipy_optimizer("minimize")(loss, start, method="L-BFGS-B", bounds=logs)
    values: list[float] = np.exp(run.x).tolist()
    return values


def scipy_optimizer(name: str) -> Any:
    """Import an optimizer of scipy.optimize, or say how to install scipy.

    Parameters
    ----------
    name : str
        Name of the function, such as ``least_squares``.

    Returns
    -------
    callable
        The function ``scipy.optimize.<name>``.

    Raises
    ------
    SpecError
        If scipy is not installed; the message says how to install scipy.
    """
    try:
        from scipy import optimize
    except ImportError:
        raise SpecError("fitting needs scipy, which is not installed; pip install 'paleo-perf[fit]'") from None
    return getattr(optimize, name)


def bounded_parameter(default: float, low: float, high: float, *, fitted: bool = True) -> Any:
    """Declare a parameter of a fit to whole steps as a dataclass field with search bounds.

    Parameters
    ----------
    default, low, high : float
        Default value, and bounds of the search, in SI units.
    fitted : bool
        False for a parameter that is fitted only if the user names it.

    Returns
    -------
    dataclasses.Field
        Field with its bounds in the metadata.
    """
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "fitted": fitted})


class StepTimePredictor:
    """Predictor through which a fit computes the times of training steps with trial parameters (a `TimePredictor`).

    Parameters
    ----------
    configuration_columns : sequence of str
        Columns that define a configuration.
    seconds : callable
        Function of (fixed inputs, parameters) that returns a function from a row to its predicted time [s].
    """

    def __init__(
        self, configuration_columns: Sequence[str], seconds: Callable[[Any, Any], Callable[[dict[str, Any]], float]]
    ) -> None:
        self.configuration_columns, self._seconds = tuple(configuration_columns), seconds

    def predict_times(self, frame: pd.DataFrame, figures: Any, parameters: Any) -> Array:
        """Predict the time of each measured run with trial parameters of a fit.

        Parameters
        ----------
        frame : DataFrame
            Measured rows.
        figures : object
            Fixed inputs of the prediction, such as a system or a software profile.
        parameters : object
            Trial parameters of the fit.

        Returns
        -------
        ndarray, shape (rows,)
            Times [s].
        """
        seconds = self._seconds(figures, parameters)
        return np.array([seconds(row) for row in row_dicts(frame)])
