"""Software parameters from training steps: ``paleo calibrate --fit`` on tables of training iterations.

A software profile has parameters that no kernel table can tell. These are the host time of an operation, the cost of
collectives beside computation, and the slow-down of an old attention kernel. They are fitted to the steps of one
profile by the same robust least squares of log errors as kernels. Held-out configurations test the fit.

``--only waiting`` fits how GPU and CPU time add up in MoE steps where the CPU waits for token counts
(`HostTime.waiting_exponent`). All profiles share one exponent; sources named with ``--hold-out`` are not fitted. Few
MoE configurations are measured, and rows of a source err together. Each source is therefore tested with the exponent of
the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml

from paleo.calibrate.fit import (
    CONFIGURATION_COLUMNS,
    Fit,
    FitResult,
    MeasuredRows,
    StepTimePredictor,
    bounded_parameter,
    count_rows,
    predicted_and_measured,
)
from paleo.calibrate.kernel_fits import ERROR_DIGITS, read_step_table, round_to_digits, rounded_residual, sources_text
from paleo.errors import SpecError, suggest_names
from paleo.specs.calibration import HeldOutErrors
from paleo.specs.device import find_device
from paleo.specs.loading import Spec
from paleo.specs.software import SoftwareFit, SoftwareProfile, load_software
from paleo.step.section_times import HOST_PACED_EXPONENT
from paleo.tables.base import ResidualErrors, residual_errors
from paleo.tables.cells import text_column
from paleo.tables.run_tables import RunTable, find_table_kind, profile_at_release, row_dicts, uses_substitute_profile
from paleo.tables.validation import measured_and_predicted_values, usable_rows_of_table
from paleo.units import GIGA, MEBIBYTE, MICROSECOND, MILLISECOND, Quantity, with_noun

Array = npt.NDArray[np.float64]
ProgressCallback = Callable[[str], object]
#: Rows that a fit sees: host time and one more term are settled by about forty.
_MAX_TRAINING_ROWS = 60
#: What differs from architecture to architecture.
_PER_ARCHITECTURE = ("attention_slowdown",)
#: Fewer rows than this are no fit that can be tested.
MIN_STEPS = 12


@dataclass(frozen=True, slots=True)
class SoftwareParameters:
    """Parameters of a software profile that are fitted to training steps.

    ``host_forward`` is the CPU time of launching one forward operation [s]. ``backward_forward_ratio`` is backward over
    forward CPU time per operation; it is not fitted, as step times do not tell the two apart. ``contention`` and
    ``attention_slowdown`` are fields of `SoftwareProfile`.
    """

    host_forward: float = bounded_parameter(1.0, 0.1 * MICROSECOND, MILLISECOND)
    backward_forward_ratio: float = bounded_parameter(1.0, 0.1, 10.0, fitted=False)
    contention: float = bounded_parameter(1.0, 0.01, 4.0)
    attention_slowdown: float = bounded_parameter(1.0, 1.0, 8.0)

    @classmethod
    def from_profile(cls, profile: SoftwareProfile, architecture: str) -> SoftwareParameters:
        """Read the current values of the parameters to fit from a software profile.

        Parameters
        ----------
        profile : SoftwareProfile
            Software profile.
        architecture : str
            GPU architecture whose attention slow-down is read.

        Returns
        -------
        SoftwareParameters
            Values of the profile, in SI units.
        """
        ratio = profile.host.backward / profile.host.forward if profile.host.forward else 1.0
        return cls(profile.host.forward, ratio, profile.overlap.contention, profile.attention_slowdown(architecture))


class _ProfileFitInputs(NamedTuple):
    """Fixed inputs of a software fit: kind of table, and the software profile before the fit."""

    table: RunTable
    profile: SoftwareProfile


def _row_time_predictor(
    figures: _ProfileFitInputs, parameters: SoftwareParameters
) -> Callable[[dict[str, Any]], float]:
    changed = {
        "host.forward": parameters.host_forward,
        "host.backward": parameters.host_forward * parameters.backward_forward_ratio,
        "overlap.contention": parameters.contention,
        "attention.slowdown": parameters.attention_slowdown,
    }
    profile = figures.profile.with_fields(changed)
    return lambda row: figures.table.predict_row(row, profile).value


@dataclass(frozen=True, slots=True)
class SoftwareJob:
    """One software fit to run: the measured steps of one software profile in one table, grouped by GPU architecture.

    ``skipped_rows`` counts rows that cannot be predicted, and rows of other software for which the profile is only a
    substitute.
    """

    profile: SoftwareProfile
    file: str
    source: str
    rows: tuple[MeasuredRows, ...]
    skipped_rows: int

    @property
    def name(self) -> str:
        """Name of the software profile."""
        return self.profile.name

    @property
    def step_count(self) -> int:
        """Number of measured steps to fit and to test on."""
        return count_rows(self.rows)

    @property
    def citation(self) -> str:
        """Citation of the fitted rows: name of the table and sources of its rows."""
        return f"{self.file} ({self.source})"

    @property
    def architectures(self) -> tuple[str, ...]:
        """GPU architectures of the devices that ran the measured steps."""
        return tuple(group.group_name for group in self.rows)

    def make_fit(self, fixed: Sequence[str] = (), per_stack: Sequence[str] = ()) -> Fit[SoftwareParameters]:
        """Set up the fit of the software profile's parameters to its measured steps; `Fit.run` runs the fit.

        Parameters
        ----------
        fixed : sequence of str, default ()
            Names of parameters that keep the profile's values.
        per_stack : sequence of str, default ()
            Names of parameters with one value per architecture.

        Returns
        -------
        Fit[SoftwareParameters]
            The fit, not run yet.
        """
        columns = set(self.rows[0].frame.columns)
        kind = StepTimePredictor([name for name in CONFIGURATION_COLUMNS if name in columns], _row_time_predictor)
        return Fit(
            kind, self.rows, SoftwareParameters.from_profile(self.profile, self.rows[0].group_name),
            fixed_parameters=fixed, parameters_per_stack=per_stack,
            max_training_rows=_MAX_TRAINING_ROWS, random_starts=0, row_weight_exponent=0.0, max_evaluations=15,
        )  # fmt: skip

    @property
    def label(self) -> str:
        """Title of a software fit in progress messages: profile and number of steps."""
        return f"{self.profile.name} ({self.step_count} steps)"


@dataclass(frozen=True, slots=True)
class SoftwareFitResult:
    """Software profile before and after a fit of its parameters to measured steps."""

    profile_before: SoftwareProfile
    profile_after: SoftwareProfile

    def changed_values(self) -> Iterator[tuple[str, str, str]]:
        """Yield (parameter, value before, value after) as texts, for all parameters that a fit may change."""
        before, after = (_shown_values(profile) for profile in (self.profile_before, self.profile_after))
        yield from ((name, before[name], after[name]) for name in before)


def software_jobs(file: str | Path, only: Sequence[str] = ()) -> list[SoftwareJob]:
    """List the fits of software profiles that a table of steps allows.

    Parameters
    ----------
    file : str or Path
        A measured table.
    only : sequence of str, default ()
        Names of profiles to fit; all if empty.

    Returns
    -------
    list of SoftwareJob
        One job per profile. Rows that cannot be predicted, and those with a substitute profile
        (`uses_substitute_profile`), are counted but not fitted.

    Raises
    ------
    SpecError
        If the table has no row of a profile.
    """
    frame = usable_rows_of_table(file)
    table = find_table_kind(frame.columns)
    if not isinstance(table, RunTable) or not table.used_for_fitting:
        return []
    profiles = pd.Series([table.software_profile(row) for row in row_dicts(frame)], index=frame.index)
    for name in only:
        if name not in set(profiles):
            raise SpecError(f"{file}: no row of the profile {name!r}; {suggest_names(name, {*profiles, 'fabric'})}")
    chosen = [name for name in sorted(set(profiles)) if not only or name in only]
    return [_job(table, Path(file).name, frame[profiles == name], load_software(name)) for name in chosen]


def _job(table: RunTable, file: str, frame: pd.DataFrame, profile: SoftwareProfile) -> SoftwareJob:
    _, predicted = measured_and_predicted_values(table, frame)
    named = np.array([not uses_substitute_profile(row) for row in row_dicts(frame)])
    fine = frame[np.isfinite(predicted.values) & named]
    architectures = np.array([find_device(str(name)).architecture for name in fine["device"]])
    inputs, measured = _ProfileFitInputs(table, profile), table.measured_values(fine)
    groups = tuple(
        MeasuredRows(fine[architectures == name], inputs, str(name), measured[architectures == name])
        for name in np.unique(architectures)
    )
    return SoftwareJob(profile, file, sources_text(fine), groups, len(frame) - len(fine))


def fit_software(job: SoftwareJob, date: str, free: Sequence[str] = ()) -> SoftwareFitResult:
    """Fit the parameters of one software profile to its measured steps.

    Parameters
    ----------
    job : SoftwareJob
        Rows of the profile.
    date : str
        Date written into results (YYYY-MM-DD).
    free : sequence of str, default ()
        Names of the parameters to fit; by default those whose value in the profile has an effect.

    Returns
    -------
    SoftwareFitResult
        Profile before and after the fit.

    Raises
    ------
    SpecError
        If there is no parameter to fit, or none of a name in ``free``.
    """
    profile = job.profile
    at_work = {
        "host_forward": profile.host.forward > 0,
        "contention": profile.overlap.contention > 0,
        "attention_slowdown": profile.attention.slowdown not in (1.0, {}),
    }
    moving = tuple(free) or tuple(name for name, stated in at_work.items() if stated)
    if not moving:
        raise SpecError(f"{profile.name}: the profile states no host time, contention or slowdown to fit; name them")
    for name in moving:
        if name not in at_work:
            raise SpecError(f"--free {name}: no such number of a profile; {suggest_names(name, set(at_work))}")
    fixed = [name for name in at_work if name not in moving]
    fit = job.make_fit(fixed, per_stack=[name for name in moving if name in _PER_ARCHITECTURE])
    floor = {field.name: field.metadata["low"] for field in dataclasses.fields(SoftwareParameters)}
    off_bounds = {name: max(getattr(fit.start_values, name), floor[name]) for name in moving}
    result = dataclasses.replace(fit, start_values=dataclasses.replace(fit.start_values, **off_bounds)).run()
    return SoftwareFitResult(profile, _fitted_profile(job, result, moving, date))


def _fitted_profile(
    job: SoftwareJob, result: FitResult[SoftwareParameters], moving: Sequence[str], date: str
) -> SoftwareProfile:
    shared = next(iter(result.parameters.values()))
    update: dict[str, Any] = {}
    if "host_forward" in moving:
        update |= {
            "host.forward": round_to_digits(shared.host_forward, ERROR_DIGITS),
            "host.backward": round_to_digits(shared.host_forward * shared.backward_forward_ratio, ERROR_DIGITS),
        }
    if "contention" in moving:
        update["overlap.contention"] = round_to_digits(shared.contention, ERROR_DIGITS)
    if "attention_slowdown" in moving:
        kept = job.profile.attention.slowdown
        update["attention.slowdown"] = dict(kept if isinstance(kept, dict) else {}) | {
            stack: round_to_digits(parameters.attention_slowdown, ERROR_DIGITS)
            for stack, parameters in result.parameters.items()
        }
    record = SoftwareFit(
        source=job.citation, date=date, architectures=job.architectures, rows_fitted=result.rows_fitted,
        rows_held_out=result.rows_held_out, residual=HeldOutErrors(**rounded_residual(result.residual)),
        uncertainty={name: round_to_digits(value, 2) for name, value in result.log_standard_deviations.items()},
    )  # fmt: skip
    return job.profile.with_fields({**update, "fit": record})


def _shown_values(profile: SoftwareProfile) -> dict[str, str]:
    """Format the values that a fit may change, by their name in a profile."""
    host = {name: f"{getattr(profile.host, name) / MICROSECOND:.4g} us" for name in ("forward", "backward")}
    slowdown = profile.attention.slowdown
    words = [f"{name} {number:g}" for name, number in slowdown.items()] if isinstance(slowdown, Mapping) else None
    return {
        **{f"host.{name}": text for name, text in host.items()},
        "overlap.contention": f"{profile.overlap.contention:g}",
        "attention.slowdown": f"{slowdown:g}" if words is None else ", ".join(words),
    }


#: How a profile's file states quantities.
_UNIT_OF_DIMENSION = {"time": ("us", MICROSECOND), "bytes": ("MiB", MEBIBYTE), "bandwidth": ("GB/s", GIGA)}


def software_profile_yaml(profile: SoftwareProfile) -> str:
    """Format a software profile as the text of its YAML file, with times in us, memory in MiB and rates in GB/s.

    Parameters
    ----------
    profile : SoftwareProfile
        Software profile.

    Returns
    -------
    str
        YAML text.
    """
    data: dict[str, Any] = profile.model_dump(exclude_defaults=True, exclude={"name"}, mode="json", by_alias=True)
    for name, group in data.items():
        if isinstance(fields := getattr(profile, name, None), Spec) and name != "fit":
            data[name] = {key: _with_unit(fields, key, value) for key, value in group.items()}
    return str(yaml.safe_dump(data, sort_keys=False, width=118, allow_unicode=True))


def _with_unit(group: Spec, name: str, value: Any) -> Any:
    """Convert a field's SI value to the text with unit that the YAML file of a software profile holds."""
    field = next(each for key, each in type(group).model_fields.items() if name in (key, each.alias))
    optional = (each for choice in get_args(field.annotation) for each in getattr(choice, "__metadata__", ()))
    quantities = (each for each in (*field.metadata, *optional) if isinstance(each, Quantity))
    unit = next((_UNIT_OF_DIMENSION[quantity.dimension] for quantity in quantities), None)
    if unit is None:
        return value
    texts = [f"{each / unit[1]:.6g} {unit[0]}" for each in (value if isinstance(value, list) else [value])]
    return texts if isinstance(value, list) else texts[0]


#: What the command-line option ``--only`` of `paleo calibrate` calls this.
FIT_ONLY_HOST_WAITS = "waiting"
#: Inverses of the powers at which each step is predicted; between them its logarithm is interpolated. Where device and
#: host take alike that is exact.
_INVERSE_EXPONENTS = np.linspace(1.0 / (2.0 * HOST_PACED_EXPONENT), 1.0, 8)
#: Columns of the seconds at these.
_EXPONENT_TIME_COLUMNS = [f"seconds at {1.0 / inverse:.3g}" for inverse in _INVERSE_EXPONENTS]


@dataclass(frozen=True, slots=True)
class HostWaitingParameters:
    """Parameter of the fit of host waiting: exponent with which CPU and GPU time of MoE steps are combined.

    ``exponent`` is `HostTime.waiting_exponent`. 1 adds the two times, as if CPU and GPU took turns; large values take
    nearly the longer one.
    """

    exponent: float = bounded_parameter(HOST_PACED_EXPONENT, 1.0, 2.0 * HOST_PACED_EXPONENT)


def _exponent_time_predictor(figures: Any, parameters: HostWaitingParameters) -> Callable[[dict[str, Any]], float]:
    """Return a function from a row to its predicted step time [s], interpolated between stored exponents."""
    inverse = 1.0 / parameters.exponent
    return lambda row: float(
        np.exp(np.interp(inverse, _INVERSE_EXPONENTS, np.log([row[name] for name in _EXPONENT_TIME_COLUMNS])))
    )


#: Steps of mixtures as what a fit asks of a kind.
_MOE_TIME_PREDICTOR = StepTimePredictor(("source",), _exponent_time_predictor)


def moe_waiting_steps(files: Sequence[str], report: ProgressCallback = str) -> list[MeasuredRows]:
    """Collect measured MoE steps in which the CPU waits for the GPU to learn how many tokens each expert gets.

    Parameters
    ----------
    files : sequence of str
        Tables of steps.
    report : callable
        Called with a label as each table is read.

    Returns
    -------
    list of MeasuredRows
        One group per software profile, in its version on the date of the measurement. Steps whose prediction does not
        depend on the fitted exponent are left out.

    Raises
    ------
    SpecError
        If a table holds no steps that are fitted, or there are no such rows.
    """
    groups: list[MeasuredRows] = []
    for file in files:
        table, frame = read_step_table(file, f"--only {FIT_ONLY_HOST_WAITS} fits hosts to", report)
        if not table.used_for_fitting:
            fitted = f"steps that --only {FIT_ONLY_HOST_WAITS} fits hosts to"
            raise SpecError(f"{file}: a table of kind {table.name} has no {fitted}")
        profiles = [profile_at_release(row, table.software_profile(row)) for row in row_dicts(frame)]
        names = pd.Series(profiles, index=frame.index)
        waiting = [name for name in sorted(set(names)) if load_software(name).host.routing > 0]
        groups += [_dependent_rows(table, frame[names == name], name) for name in waiting]
    if not count_rows(groups):
        raise SpecError(f"{', '.join(files)}: in no step of these tables does the host wait for counts of tokens")
    return groups


def _dependent_rows(table: RunTable, frame: pd.DataFrame, name: str) -> MeasuredRows:
    """Return the measured steps of one software profile whose time depends on the waiting exponent.

    Predictions at several exponents are added as columns.
    """
    known = frame[np.isfinite(measured_and_predicted_values(table, frame)[1].values)]
    profile = load_software(name)
    for column, inverse in zip(_EXPONENT_TIME_COLUMNS, _INVERSE_EXPONENTS, strict=True):
        changed = profile.with_fields({"host.waiting_exponent": 1.0 / inverse})
        known = known.assign(**{column: [table.predict_row(row, changed).value for row in row_dicts(known)]})
    depends = known[_EXPONENT_TIME_COLUMNS[-1]] > known[_EXPONENT_TIME_COLUMNS[0]]
    return MeasuredRows(known, profile, name, table.measured_values(known)).select(depends.to_numpy(dtype=bool))


def fit_waiting_exponent(rows: Sequence[MeasuredRows]) -> FitResult[HostWaitingParameters]:
    """Fit the waiting exponent (how CPU and GPU time add up in MoE steps) to the steps of all profiles.

    Parameters
    ----------
    rows : sequence of MeasuredRows
        Groups of rows from `moe_waiting_steps`.

    Returns
    -------
    FitResult
        Fitted exponent; all rows are fitted, none held out.
    """
    start = HostWaitingParameters(rows[0].datasheet.host.waiting_exponent)
    return Fit(
        _MOE_TIME_PREDICTOR, rows, start, random_starts=0, row_weight_exponent=0.0, max_evaluations=15,
        uses_held_out_rows=False,
    ).run()  # fmt: skip


def predict_with_waiting_exponent(rows: Sequence[MeasuredRows], power: float) -> tuple[Array, Array]:
    """Predict the step times of MoE rows at a given waiting exponent.

    Parameters
    ----------
    rows : sequence of MeasuredRows
        Groups of rows from `moe_waiting_steps`.
    power : float
        Exponent: 1 adds the times of GPU and CPU; large values take nearly the longer one.

    Returns
    -------
    predicted, measured : ndarray, shape (rows,)
        Times [s].
    """
    parameters = {group.group_name: HostWaitingParameters(power) for group in rows}
    return predicted_and_measured(_MOE_TIME_PREDICTOR, rows, parameters)


def _of_sources(rows: Sequence[MeasuredRows], sources: Sequence[str], *, without: bool = False) -> list[MeasuredRows]:
    """Select the measured steps that come from the named sources, or with ``without`` those of all other sources."""
    return [group.select(np.isin(text_column(group.frame, "source"), sources) != without) for group in rows]


@dataclass(frozen=True, slots=True)
class LeftOutSourceTest:
    """Test of the waiting exponent on one source of MoE steps that was left out of the fit.

    ``exponent`` is the exponent fitted to all other sources; ``predicted`` and ``measured`` are the step times of the
    source's rows [s], shape (rows,).
    """

    source: str
    exponent: float
    predicted: Array
    measured: Array

    @property
    def errors(self) -> ResidualErrors:
        """Errors of the predicted step times of the source that was left out."""
        return residual_errors(self.predicted, self.measured)


def leave_one_source_out(rows: Sequence[MeasuredRows], kept_back: Sequence[str] = ()) -> list[LeftOutSourceTest]:
    """Predict the MoE steps of each source with the waiting exponent fitted to all other sources.

    Parameters
    ----------
    rows : sequence of MeasuredRows
        Groups of rows from `moe_waiting_steps`.
    kept_back : sequence of str
        Sources that no fit uses.

    Returns
    -------
    list of LeftOutSourceTest
        One test per source, in alphabetical order.

    Raises
    ------
    SpecError
        If no other source is left.
    """
    tests = []
    for name in _sources_of(rows):
        others = _of_sources(rows, [name, *kept_back], without=True)
        if not count_rows(others):
            raise SpecError(f"no source is left when {', '.join(dict.fromkeys([name, *kept_back]))} are left out")
        power = _fitted_exponent(fit_waiting_exponent(others))
        tests.append(LeftOutSourceTest(name, power, *predict_with_waiting_exponent(_of_sources(rows, [name]), power)))
    return tests


def _sources_of(rows: Sequence[MeasuredRows]) -> list[str]:
    return sorted({source for group in rows for source in text_column(group.frame, "source")})


def _fitted_exponent(result: FitResult[HostWaitingParameters]) -> float:
    return next(iter(result.parameters.values())).exponent


@dataclass(frozen=True, slots=True)
class WaitExponentFit:
    """Result of a fit of the exponent p in (device^p + host^p)^(1/p), the time of MoE layers whose host waits.

    With p = 1 the times of device and host add, with a large p the longer one counts. ``exponent`` is the fitted p,
    ``log_standard_deviation`` the standard deviation of its logarithm.
    ``left_out_tests`` predicts each source with the exponent of all others (`leave_one_source_out`).
    ``held_out_sources`` are sources that no fit used. ``profiles_before`` are the catalog's profiles of the
    software that ran the rows, as they were before the fit.
    """

    exponent: float
    log_standard_deviation: float
    rows_fitted: int
    held_out_sources: tuple[str, ...]
    left_out_tests: tuple[LeftOutSourceTest, ...]
    profiles_before: tuple[SoftwareProfile, ...]

    @property
    def residual(self) -> ResidualErrors:
        """Errors of the step times of all rows, each predicted with the exponent fitted to the other sources."""
        parts = [(test.predicted, test.measured) for test in self.left_out_tests]
        predicted, measured = (np.concatenate(each) for each in zip(*parts, strict=True))
        return residual_errors(predicted, measured)

    def fitted_profiles(self, files: Sequence[str], date: str) -> list[SoftwareProfile]:
        """Return the software profiles, with the fitted waiting exponent, to write into profile files.

        Parameters
        ----------
        files : sequence of str
            Tables that were fitted; their names go into ``source``.
        date : str
            Date written into the record (YYYY-MM-DD).

        Returns
        -------
        list of SoftwareProfile
            Changed profiles. Profiles without a record of a fit get one; it names no architecture, as host times stay.
        """
        sources = [test.source for test in self.left_out_tests if test.source not in self.held_out_sources]
        record = SoftwareFit(
            source=f"{', '.join(Path(file).name for file in files)} ({', '.join(sources)})", date=date,
            rows_fitted=self.rows_fitted, rows_held_out=self.residual.rows,
            uncertainty={"waiting_power": round_to_digits(self.log_standard_deviation, 2)},
            residual=HeldOutErrors(**rounded_residual(self.residual)),
        )  # fmt: skip
        changed = {"host.waiting_exponent": round_to_digits(self.exponent, ERROR_DIGITS)}
        return [profile.with_fields({**changed, "fit": profile.fit or record}) for profile in self.profiles_before]


def cross_validated_waiting_fit(
    files: Sequence[str], kept_back: Sequence[str] = (), report: ProgressCallback = str
) -> WaitExponentFit:
    """Fit the waiting exponent to the MoE steps of tables, and test it on each source left out in turn.

    Parameters
    ----------
    files : sequence of str
        Tables of steps.
    kept_back : sequence of str
        Sources that are not fitted, only tested.
    report : callable
        Called with a label when each part of the work starts, to show progress.

    Returns
    -------
    WaitExponentFit
        Fitted exponent, and its tests on each source left out.

    Raises
    ------
    SpecError
        If a source of ``kept_back`` has no row, or there is nothing to fit.
    """
    rows = moe_waiting_steps(files, report)
    for name in kept_back:
        if name not in (known := _sources_of(rows)):
            raise SpecError(f"--hold-out {name}: no step of that source; {suggest_names(name, known)}")
    chosen = _of_sources(rows, kept_back, without=True)
    report(f"power of {with_noun(count_rows(chosen), 'step')}")
    tests, result = leave_one_source_out(rows, kept_back), fit_waiting_exponent(chosen)
    names = sorted({group.group_name.partition("@")[0] for group in rows if len(group.measured_times)})
    sigma, before = next(iter(result.log_standard_deviations.values())), tuple(load_software(name) for name in names)
    return WaitExponentFit(_fitted_exponent(result), sigma, result.rows_fitted, tuple(kept_back), tuple(tests), before)
