"""Link parameters from training steps: ``paleo calibrate --fit --only fabric`` on tables of training iterations.

If no nccl-tests results exist, step times tell what share of a link collectives reach and how long they take to start.
Six parameters of a system are fitted by the same robust least squares of log errors as kernels. They are bandwidth
share and latency of rings inside a node, of pairwise exchanges there, and of traffic between nodes. Kernel and software
parameters stay as they are. A parameter is fitted to rows whose step depends on the link, and written only if its
standard deviation (log) is below `MAX_LOG_STANDARD_DEVIATION`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.calibrate.fit import (
    CONFIGURATION_COLUMNS,
    Fit,
    MeasuredRows,
    StepTimePredictor,
    bounded_parameter,
    count_rows,
    join_cells_to_keys,
    log_errors,
    sample_rows,
    split_by_configuration,
)
from paleo.calibrate.kernel_fits import round_to_digits, rounded_residual, sources_text
from paleo.errors import PaleoError, SpecError, suggest_names
from paleo.pricing.communication import COLLECTIVE_CALIBRATION_FAMILIES, collective_parameters
from paleo.specs.calibration import Calibration, CalibrationEntry
from paleo.specs.catalog import entry_names, is_path
from paleo.specs.system import System, load_system
from paleo.tables.base import ResidualErrors, residual_errors
from paleo.tables.cells import read_table
from paleo.tables.run_tables import RunTable, find_table_kind, integer_cell, row_dicts
from paleo.tables.validation import measured_and_predicted_values, usable_rows_of_table
from paleo.units import MICROSECOND, MILLISECOND

if TYPE_CHECKING:
    from paleo.pricing.calibration_lookup import SourcedParameters

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
#: The column that names a configuration.
_CONFIGURATION_COLUMN = ("configuration",)
#: What ``--only`` calls the links of every system of a table.
_FIT_ONLY_ALL_LINKS = "fabric"
#: The stack of entries that were fitted to whole steps.
WHOLE_STEP_STACK = "step"
#: A row speaks for a number if making that this much worse moves its step by at least so much, relatively.
_WORSENING_FACTOR, _MIN_STEP_TIME_CHANGE = 4.0, 0.005
#: Rows that a search sees, and how often it may ask for all of them.
_MAX_TRAINING_ROWS, _MAX_FULL_EVALUATIONS = 60, 12
#: One sigma of a number's logarithm above which the rows leave it open; no step repeats better than `_MIN_ROW_SPREAD`.
MAX_LOG_STANDARD_DEVIATION, _MIN_ROW_SPREAD = 0.25, 0.01
#: Log step of the derivatives behind that sigma, and how near to a bound a search has run into it.
_DERIVATIVE_LOG_STEP, _BOUND_LOG_TOLERANCE = 0.05, 0.02


@dataclass(frozen=True, slots=True)
class LinkParameters:
    """Fitted parameters of a system's links (`LINK_PARAMETERS`): shares of the bandwidth [-] and latencies [s].

    ``inside_share`` is for rings inside a node, ``exchange_share`` for pairwise exchanges inside a node,
    ``between_share`` for traffic between nodes.
    """

    inside_share: float = bounded_parameter(1.0, 0.05, 1.0)
    inside_latency: float = bounded_parameter(1.0, 1 * MICROSECOND, 200 * MICROSECOND)
    exchange_share: float = bounded_parameter(1.0, 0.05, 1.0)
    exchange_latency: float = bounded_parameter(1.0, 1 * MICROSECOND, 200 * MICROSECOND)
    between_share: float = bounded_parameter(1.0, 0.02, 1.0)
    between_latency: float = bounded_parameter(1.0, 0.5 * MICROSECOND, MILLISECOND)


class _FittableLinkParameter(NamedTuple):
    """Link parameter that can be fitted to step times: field ``field_name`` of the link family (formula) ``family``.

    Fields in ``scaled_fields`` are scaled by the same factor; ``meaning`` describes the parameter.
    """

    family: str
    field_name: str
    scaled_fields: tuple[str, ...]
    meaning: str


LINK_PARAMETERS: Mapping[str, _FittableLinkParameter] = {
    "inside_share": _FittableLinkParameter(
        "collective.nccl", "simple_fraction", ("ll_fraction", "ll128_fraction", "switch_fraction"),
        "share of the link that rings reach inside a node",
    ),
    "inside_latency": _FittableLinkParameter(
        "collective.nccl", "launch_time", ("ll_hop_time", "simple_launch_time", "simple_fence_time", "time_per_chunk"),
        "start of a ring inside a node; its hops in proportion",
    ),
    "exchange_share": _FittableLinkParameter(
        "collective.exchange", "simple_fraction", ("ll_fraction",),
        "share of the link that exchanges in pairs reach inside a node",
    ),
    "exchange_latency": _FittableLinkParameter(
        "collective.exchange", "launch_time", ("time_per_peer", "simple_launch_time", "time_per_chunk"),
        "start of an exchange in pairs inside a node"
    ),
    "between_share": _FittableLinkParameter(
        "collective.fabric", "fabric_fraction", ("exchange_fraction", "send_fraction"),
        "share of a node's ports that is reached",
    ),
    "between_latency": _FittableLinkParameter("collective.fabric", "ll_fabric_hop_time",
        ("simple_hop_time", "time_per_peer"),
        "a hop between nodes"),
}  # fmt: skip


class _LinkFitInputs(NamedTuple):
    """Fixed inputs of a link fit: kind of table, system, and the link parameters before the fit, by family."""

    table: RunTable
    system: System
    parameters_before: Mapping[str, SourcedParameters[Any]]


def _time_predictor(moving: Sequence[str]) -> StepTimePredictor:
    """Build the predictor of step times for a fit of the link parameters named ``moving``."""

    def priced(figures: _LinkFitInputs, parameters: LinkParameters) -> Callable[[dict[str, Any]], float]:
        changed = link_entries(figures.parameters_before, parameters, moving)
        table = figures.table.with_calibration(system_calibration(figures.system, changed))
        return lambda row: table.predict_row(row).value

    return StepTimePredictor(_CONFIGURATION_COLUMN, priced)


@dataclass(frozen=True, slots=True)
class LinkJob:
    """One link fit to run: the measured steps of one system, to which its link parameters are fitted.

    ``dependent_rows`` is, for each fitted parameter, a mask of the rows whose predicted step time depends on it.
    ``skipped_rows`` counts rows that cannot be predicted.
    """

    system: System
    start_parameters: LinkParameters
    source: str
    rows: tuple[MeasuredRows, ...]
    dependent_rows: Mapping[str, Flags]
    skipped_rows: int

    @property
    def name(self) -> str:
        """Catalog name of the system whose links are fitted."""
        return self.system.name

    @property
    def step_count(self) -> int:
        """Number of measured steps whose time depends on a fitted link parameter."""
        return count_rows(self.rows)

    @property
    def label(self) -> str:
        """Title of a link fit in progress messages: system and number of steps."""
        return f"links of {self.system.name} ({self.step_count} steps)"

    @property
    def parameters_before(self) -> Mapping[str, SourcedParameters[Any]]:
        """Link parameters before the fit, by family (such as ``collective.nccl``, NCCL inside a node)."""
        figures: _LinkFitInputs = self.rows[0].datasheet
        return figures.parameters_before

    @property
    def held_out_mask(self) -> Flags:
        """Mask of the measured steps that the link fit does not see, over all rows of the job, shape (rows,)."""
        return np.concatenate([split_by_configuration(part.frame, _CONFIGURATION_COLUMN) > 0 for part in self.rows])

    @property
    def training_rows(self) -> list[MeasuredRows]:
        """Sample of the measured steps to which link parameters are fitted, one group per table."""
        fitted = [split_by_configuration(part.frame, _CONFIGURATION_COLUMN) == 0 for part in self.rows]
        chosen = [part.select(mask) for part, mask in zip(self.rows, fitted, strict=True)]
        return sample_rows(chosen, _MAX_TRAINING_ROWS, 0)


@dataclass(frozen=True, slots=True)
class LinkFit:
    """Result of a fit of a system's link parameters to training steps.

    ``parameters`` are the fitted values; ``log_standard_deviations`` is the standard deviation of the logarithm of each
    parameter that the rows determine; ``unfitted_reasons`` says why the others were not fitted. ``errors_before`` and
    ``errors_after`` are the errors on held-out rows before and after the fit. ``entries`` are the calibration entries
    to write.
    """

    job: LinkJob
    parameters: LinkParameters
    log_standard_deviations: Mapping[str, float]
    unfitted_reasons: Mapping[str, str]
    errors_before: ResidualErrors
    errors_after: ResidualErrors
    entries: tuple[CalibrationEntry, ...]

    @property
    def reduces_error(self) -> bool:
        """True if the link fit has reduced the mean error on held-out steps."""
        return self.errors_after.mape < self.errors_before.mape


def requests_link_fit(file: str | Path, only: Sequence[str]) -> bool:
    """Return True if option ``--only`` asks for a fit of link parameters to a table of steps.

    Parameters
    ----------
    file : str or Path
        A measured table.
    only : sequence of str
        Values of ``--only``.

    Returns
    -------
    bool
        True for a table of steps if ``only`` names systems or `_FIT_ONLY_ALL_LINKS`.

    Raises
    ------
    SpecError
        If ``only`` names software profiles, too.
    """
    frame = read_table(file)
    table = find_table_kind(frame.columns)
    if not isinstance(table, RunTable):
        return False
    links = [name for name in only if name == _FIT_ONLY_ALL_LINKS or name in entry_names("systems") or is_path(name)]
    if links and len(links) < len(only):
        other = next(name for name in only if name not in links)
        raise SpecError(f"--only {links[0]} and {other}: links and software are fitted one after the other")
    return bool(links)


def link_jobs(files: Sequence[str | Path], only: Sequence[str], free: Sequence[str] = ()) -> list[LinkJob]:
    """List the link fits that tables of steps allow, one job per system.

    Parameters
    ----------
    files : sequence of str or Path
        Measured tables.
    only : sequence of str
        Names of systems, or `_FIT_ONLY_ALL_LINKS` for all systems of the tables.
    free : sequence of str, default ()
        Names of the link parameters to fit; all of `LINK_PARAMETERS` if empty.

    Returns
    -------
    list of LinkJob
        One job per system.

    Raises
    ------
    SpecError
        If a name is no link parameter, or a system has no rows on several devices.
    """
    for name in free:
        if name not in LINK_PARAMETERS:
            nearest = suggest_names(name, LINK_PARAMETERS)
            raise SpecError(f"--free {name}: no such number of a system's links; {nearest}")
    names = [] if _FIT_ONLY_ALL_LINKS in only else [load_system(name).name for name in only]
    by_system: dict[str, list[_PredictedRows]] = {}
    for file in files:
        for name, rows in _rows_by_system(Path(file), names).items():
            by_system.setdefault(name, []).append(rows)
    for name in names:
        if name not in by_system:
            raise SpecError(f"{files[0]}: no row of several devices of {name!r}; {suggest_names(name, by_system)}")
    return [_job(rows, tuple(free) or tuple(LINK_PARAMETERS)) for _, rows in sorted(by_system.items())]


class _PredictedRows(NamedTuple):
    """Measured steps of one system in one table with their predicted times [s], for a link fit.

    ``skipped_rows`` counts rows that cannot be predicted.
    """

    rows: MeasuredRows
    predicted_times: Array
    skipped_rows: int


def _rows_by_system(file: Path, only: Sequence[str]) -> dict[str, _PredictedRows]:
    """Group the multi-device runs of one table by the name of their system, with predictions, for link fits."""
    frame = usable_rows_of_table(file)
    table = find_table_kind(frame.columns)
    if not isinstance(table, RunTable) or not table.used_for_fitting:
        return {}
    systems = [_system_of(table, row) for row in row_dicts(frame)]
    known = {system.name: system for system in systems if system is not None and (not only or system.name in only)}
    out = {}
    for name, system in sorted(known.items()):
        system_rows = frame[[system is not None and system.name == name for system in systems]]
        seconds = measured_and_predicted_values(table, system_rows)[1].values
        fine = system_rows[np.isfinite(seconds)]
        if len(fine):
            before = {family: collective_parameters(system, family) for family in COLLECTIVE_CALIBRATION_FAMILIES}
            figures = _LinkFitInputs(table, system, before)
            named = fine.assign(configuration=configuration_labels(fine), table=file.name)
            rows = MeasuredRows(named, figures, WHOLE_STEP_STACK, table.measured_values(fine))
            out[name] = _PredictedRows(rows, seconds[np.isfinite(seconds)], len(system_rows) - len(fine))
    return out


def _system_of(table: RunTable, row: Mapping[str, Any]) -> System | None:
    """Return the system of a measured run on several devices; None for one device or an unknown system."""
    try:
        return table.system_of_row(row) if integer_cell(row, "n_gpus", 1) > 1 else None
    except PaleoError:
        return None


def configuration_labels(frame: pd.DataFrame) -> pd.Series[str]:
    """Label the configuration of each measured run, without data-parallel degree and global batch.

    Rows with equal labels lie on the same side of the split into fitted and held-out rows.

    Parameters
    ----------
    frame : DataFrame
        Measured rows.

    Returns
    -------
    Series of str
        One label per row.
    """
    columns = [name for name in CONFIGURATION_COLUMNS if name in frame.columns]
    return join_cells_to_keys(frame, columns)


def _job(groups: Sequence[_PredictedRows], names: Sequence[str]) -> LinkJob:
    figures: _LinkFitInputs = groups[0].rows.datasheet
    before = figures.parameters_before
    numbers = LINK_PARAMETERS.items()
    start = LinkParameters(**{name: getattr(before[of.family].parameters, of.field_name) for name, of in numbers})
    spoken = {name: [_dependent_rows(group, start, name) for group in groups] for name in names}
    used = [np.any([flags[index] for flags in spoken.values()], axis=0) for index in range(len(groups))]
    kept = [(group.rows.select(mask), mask) for group, mask in zip(groups, used, strict=True)]
    tables = [part for group, _ in kept for part in group.frame.groupby("table")]
    words = sorted({f"{name} ({sources_text(part)})" for name, part in tables})
    dependent = {
        name: np.concatenate([group[mask] for group, mask in zip(flags, used, strict=True)])
        for name, flags in spoken.items()
    }
    rows, skipped = tuple(group for group, mask in kept if mask.any()), sum(group.skipped_rows for group in groups)
    return LinkJob(figures.system, start, "; ".join(words), rows, dependent, skipped)


def _dependent_rows(group: _PredictedRows, start: LinkParameters, name: str) -> Flags:
    """Mark rows whose step time grows by `_MIN_STEP_TIME_CHANGE` if a parameter is `_WORSENING_FACTOR` worse."""
    factor = 1.0 / _WORSENING_FACTOR if name.endswith("share") else _WORSENING_FACTOR
    worse = dataclasses.replace(start, **{name: getattr(start, name) * factor})
    slower = _time_predictor([name]).predict_times(group.rows.frame, group.rows.datasheet, worse)
    return np.asarray(slower / group.predicted_times - 1.0 >= _MIN_STEP_TIME_CHANGE)


def fit_links(job: LinkJob, date: str, free: Sequence[str] = ()) -> LinkFit:
    """Fit the link parameters of one system to its measured steps.

    Parameters
    ----------
    job : LinkJob
        Rows of the system.
    date : str
        Date written into results (YYYY-MM-DD).
    free : sequence of str, default ()
        Names of the parameters to fit; all if empty.

    Returns
    -------
    LinkFit
        Fitted values and errors; parameters that the rows do not determine keep their values.

    Raises
    ------
    SpecError
        If ``free`` names a parameter that the rows do not determine, or there are too few configurations.
    """
    held_out, name = job.held_out_mask, job.system.name
    if held_out.all() or not held_out.any():
        raise SpecError(f"{name}: its {job.step_count} steps are of too few configurations to fit some and test others")
    still = f"no fitted step gets {_MIN_STEP_TIME_CHANGE:.1%} longer when it is {_WORSENING_FACTOR:g} times worse"
    left = {name: still for name, spoken in job.dependent_rows.items() if not (spoken & ~held_out).any()}
    parameters, sigma = job.start_parameters, dict[str, float]()
    if not (free and left):
        parameters, sigma = _fit_determined(job, [name for name in job.dependent_rows if name not in left], left)
    if (free and left) or not sigma:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left.items())
        raise SpecError(f"{name}: its {job.step_count} steps do not settle what is to be fitted ({reasons})")
    return _link_fit(job, parameters, sigma, left, date)


def _fit_determined(job: LinkJob, moving: list[str], left: dict[str, str]) -> tuple[LinkParameters, dict[str, float]]:
    """Fit link parameters; drop the least determined one and repeat until the rows determine all the others.

    ``moving`` names the parameters; reasons of dropped parameters are added to ``left``. Returns (parameters, standard
    deviation of each logarithm).
    """
    parameters = job.start_parameters
    while moving:
        parameters = Fit(
            _time_predictor(moving), job.training_rows, parameters,
            fixed_parameters=[name for name in LINK_PARAMETERS if name not in moving],
            max_training_rows=_MAX_TRAINING_ROWS, random_starts=0, prior_precision=0.0, row_weight_exponent=0.0,
            max_evaluations=_MAX_FULL_EVALUATIONS, uses_held_out_rows=False,
        ).run().parameters[WHOLE_STEP_STACK]  # fmt: skip
        sigma = link_log_standard_deviations(job, parameters, moving)
        at_bound = {name for name in sigma if _reached_bound(parameters, name) is not None}
        open_numbers = [name for name in sigma if sigma[name] > MAX_LOG_STANDARD_DEVIATION or name in at_bound]
        if not open_numbers:
            return parameters, sigma
        loose = max(open_numbers, key=lambda name: sigma[name])
        left[loose] = _unfitted_reason(parameters, loose, sigma[loose])
        moving.remove(loose)
        parameters = dataclasses.replace(parameters, **{loose: getattr(job.start_parameters, loose)})
    return parameters, {}


def link_log_standard_deviations(job: LinkJob, parameters: LinkParameters, moving: Sequence[str]) -> dict[str, float]:
    """Compute the standard deviation of the logarithm of each fitted link parameter.

    The formula is sqrt(diag(s² (JᵀJ)⁻¹)), with the Jacobian J of log errors and the spread s of the rows, at least
    `_MIN_ROW_SPREAD`.

    Parameters
    ----------
    job : LinkJob
        Rows of the system.
    parameters : LinkParameters
        Values at which derivatives are taken.
    moving : sequence of str
        Names of the fitted parameters.

    Returns
    -------
    dict of str to float
        Standard deviation by name; inf if the rows do not determine the parameter.
    """

    def errors(**factors: float) -> Array:
        moved = {name: getattr(parameters, name) * factor for name, factor in factors.items()}
        point = dataclasses.replace(parameters, **moved)
        return log_errors(_time_predictor(moving), job.training_rows, {WHOLE_STEP_STACK: point})

    up, down = math.exp(_DERIVATIVE_LOG_STEP), math.exp(-_DERIVATIVE_LOG_STEP)
    slopes = [(errors(**{name: up}) - errors(**{name: down})) / (2.0 * _DERIVATIVE_LOG_STEP) for name in moving]
    jacobian = np.stack(slopes, axis=1)
    spread = max(1.4826 * float(np.median(np.abs(errors()))), _MIN_ROW_SPREAD)
    _, sizes, rotation = np.linalg.svd(jacobian, full_matrices=False)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = np.nansum((rotation / sizes[:, None]) ** 2, axis=0)
    return {name: spread * math.sqrt(variance_of) for name, variance_of in zip(moving, variance.tolist(), strict=True)}


def _reached_bound(parameters: LinkParameters, name: str) -> float | None:
    """Return the bound of a link parameter's range at which a search has ended; None if it ended inside."""
    (parameter,) = [field for field in dataclasses.fields(LinkParameters) if field.name == name]
    value = getattr(parameters, name)
    ends = [parameter.metadata[end] for end in ("low", "high")]
    return next((float(end) for end in ends if abs(math.log(value / end)) < _BOUND_LOG_TOLERANCE), None)


def _unfitted_reason(parameters: LinkParameters, name: str, sigma: float) -> str:
    if sigma > MAX_LOG_STANDARD_DEVIATION:
        spread = f"one sigma is a factor of {math.exp(sigma):.2g}" if sigma < 1.0 else "any value does"
        return f"the steps leave it open ({spread})"
    end = _reached_bound(parameters, name)
    return f"the fit runs into its bound {_value_text(name, end or math.nan)}: the steps miss for another reason"


def _value_text(name: str, value: float) -> str:
    return f"{value:.3g}" if name.endswith("share") else f"{value / MICROSECOND:.3g} us"


def _link_fit(
    job: LinkJob, parameters: LinkParameters, sigma: Mapping[str, float], left: Mapping[str, str], date: str
) -> LinkFit:
    moving, measured = list(sigma), np.concatenate([part.measured_times for part in job.rows])
    ratios = [
        np.exp(log_errors(_time_predictor(moving), job.rows, {WHOLE_STEP_STACK: part}))
        for part in (job.start_parameters, parameters)
    ]

    def tested(names: Sequence[str]) -> tuple[ResidualErrors, ResidualErrors]:
        mask = job.held_out_mask & np.any([job.dependent_rows[name] for name in names], axis=0)
        before, after = (residual_errors(ratio[mask] * measured[mask], measured[mask]) for ratio in ratios)
        return before, after

    updated = []
    for entry in link_entries(job.parameters_before, parameters, moving):
        numbers = [name for name in moving if LINK_PARAMETERS[name].family == entry.family]
        before, after = tested(numbers)
        fitted = int((~job.held_out_mask & np.any([job.dependent_rows[name] for name in numbers], axis=0)).sum())
        update = {
            "parameters": {name: round_to_digits(value) for name, value in entry.parameters.items()},
            "source": job.source, "date": date,
            "rows_fitted": min(fitted, _MAX_TRAINING_ROWS), "rows_held_out": after.rows,
            "uncertainty": {LINK_PARAMETERS[name].field_name: round_to_digits(sigma[name], 2) for name in numbers},
            "residual": rounded_residual(after) if after.rows else None,
            "notes": _notes(job, parameters, numbers, before),
        }  # fmt: skip
        updated.append(CalibrationEntry(**{**entry.model_dump(), **update}))
    return LinkFit(job, parameters, sigma, left, *tested(moving), tuple(updated))


def _notes(job: LinkJob, parameters: LinkParameters, numbers: Sequence[str], before: ResidualErrors) -> str:
    moved = []
    for name in numbers:
        number = LINK_PARAMETERS[name]
        values = " -> ".join(_value_text(name, getattr(at, name)) for at in (job.start_parameters, parameters))
        moved.append(f"{number.field_name} {values}, in proportion {', '.join(number.scaled_fields)}")
    tested = f"; MAPE of the steps held out {before.mape:.3f} before" if before.rows else ""
    return f"fitted to whole steps: {'; '.join(moved)}{tested}"


def link_entries(
    before: Mapping[str, SourcedParameters[Any]], parameters: LinkParameters, moving: Sequence[str]
) -> Iterator[CalibrationEntry]:
    """Build the calibration entries of the link families whose parameters were fitted.

    Parameters
    ----------
    before : mapping of str to SourcedParameters[Any]
        Parameters before the fit, by family.
    parameters : LinkParameters
        Fitted link parameters.
    moving : sequence of str
        Names of the parameters that were fitted.

    Yields
    ------
    CalibrationEntry
        One entry per link family, with the fitted values and those that scale along.
    """
    for family in dict.fromkeys(LINK_PARAMETERS[name].family for name in moving):
        values: dict[str, float] = dataclasses.asdict(before[family].parameters)
        for name in moving:
            number = LINK_PARAMETERS[name]
            if number.family == family:
                factor = getattr(parameters, name) / values[number.field_name]
                values |= {
                    each: _clipped(before[family], each, values[each] * factor)
                    for each in (number.field_name, *number.scaled_fields)
                }
        bins = [{"up_to_s": None if math.isinf(end) else end, "low": low, "high": high}
                for end, low, high in before[family].interval_bins]  # fmt: skip
        yield CalibrationEntry(
            family=family, stack=WHOLE_STEP_STACK, source="steps", date="-", parameters=values, interval=tuple(bins)
        )


def _clipped(measured: SourcedParameters[Any], name: str, value: float) -> float:
    """Limit the value of a link parameter to the allowed range of its calibration field."""
    (parameter,) = [field for field in dataclasses.fields(measured.parameters) if field.name == name]
    return float(min(max(value, parameter.metadata["low"]), parameter.metadata["high"]))


def system_calibration(system: System, fitted: Iterator[CalibrationEntry] | Sequence[CalibrationEntry]) -> Calibration:
    """Build the calibration of a system from fitted entries of its link families, to predict steps with them.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    fitted : iterator of CalibrationEntry or sequence of CalibrationEntry
        Entries of the system's link families.

    Returns
    -------
    Calibration
        Calibration of the system that holds these entries.
    """
    return Calibration(name=system.name, subject=system.name, entries=tuple(fitted))


def fitted_parameter_rows(result: LinkFit) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the terminal report on fitted link parameters, as texts.

    Parameters
    ----------
    result : LinkFit
        Result of the fit.

    Yields
    ------
    tuple of str
        (name, value before, value after, standard deviation, meaning or the reason why it was not fitted).
    """
    for name, number in LINK_PARAMETERS.items():
        before, after = (_value_text(name, getattr(a, name)) for a in (result.job.start_parameters, result.parameters))
        if name in result.log_standard_deviations:
            yield name, before, after, f"{math.expm1(result.log_standard_deviations[name]):.1%}", number.meaning
        elif name in result.unfitted_reasons:
            yield name, before, "as it was", "", result.unfitted_reasons[name]
