"""From measured tables to calibration files: fits of every kernel family of every device, one YAML file per device.

A kernel family is a timing formula with its parameters. Rows of one device or system, family and timing method are
fitted together; variants of a timing method share all parameters but launch costs. Kinds of tables choose start values
and fixed parameters (``KernelTable.fit_settings``). Fits are deterministic: the same tables give the same files.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from paleo.calibrate.fit import (
    Array,
    Fit,
    FitResult,
    MeasuredRows,
    StepTimePredictor,
    count_rows,
    split_by_configuration,
)
from paleo.errors import PaleoError, SpecError, suggest_names
from paleo.files import is_file
from paleo.predict import Prediction
from paleo.pricing.power import BOARD_POWER_METHOD, PowerParameters
from paleo.specs.calibration import Calibration, CalibrationEntry, HeldOutErrors, IntervalBin
from paleo.specs.loading import parse_yaml, validate_mapping
from paleo.tables.base import ResidualErrors, residual_errors
from paleo.tables.cells import number_column, read_table, text_column
from paleo.tables.kernels import (
    KERNEL_TABLES,
    FitTarget,
    FittedParameters,
    KernelTable,
    group_rows_for_prediction,
    measured_time,
)
from paleo.tables.kinds._machines import PowerTable, measured_step_time, predict_board_power
from paleo.tables.run_tables import CELL_ERRORS, Row, RunTable, find_table_kind, row_dicts
from paleo.tables.validation import measured_and_predicted_values, table_kind_of_file, usable_rows_of_table
from paleo.units import with_noun

#: Order of the fits: stacks with many rows first, since others set out from them.
_STACK_ORDER = ("graph", "kernel", "eager", "back-to-back")
#: Fewer rows than this are all fitted, none held out.
MIN_ROWS_TO_HOLD_OUT = 12
#: Significant digits of what is written.
_DIGITS, ERROR_DIGITS = 5, 3
_YAML_COMMENT = (
    "# Fitted by `paleo calibrate --fit` to measured tables; residuals are those of rows that were not fitted.\n"
)


@dataclass(frozen=True)
class KernelFitJob:
    """One fit to run: rows of one device or system (``hardware``), kernel family (timing formula) and timing method."""

    table_kind: KernelTable[Any]
    file: str
    hardware: str
    family: str
    timing_method: str
    rows: tuple[MeasuredRows, ...]

    @property
    def label(self) -> str:
        """Title of a kernel fit in progress messages: device or system, family, timing method and number of rows."""
        return f"{self.hardware} {self.family} {self.timing_method} ({count_rows(self.rows)} rows)"


@dataclass(frozen=True)
class FittedEntry:
    """Calibration entry of one kernel family, with the device or system (``hardware``) whose file holds the entry."""

    hardware: str
    entry: CalibrationEntry


def kernel_fit_jobs(files: Iterable[str | Path], only: Sequence[str] = ()) -> list[KernelFitJob]:
    """List the fits of kernel families that measured tables allow, in the order in which the fits run.

    Parameters
    ----------
    files : iterable of str or Path
        Measured tables.
    only : sequence of str, default ()
        Names of devices or systems to fit; all of the tables if empty.

    Returns
    -------
    list of KernelFitJob
        One job per device or system, kernel family and timing method.

    Raises
    ------
    SpecError
        If the tables have no rows of a named device or system.
    """
    fitted = [job for file in files if has_kernel_families(file) for job in _table_jobs(file)]
    subjects = {job.hardware for job in fitted}
    for name in only:
        if name not in subjects:
            raise SpecError(f"the tables have no rows of {name!r} to fit; {suggest_names(name, subjects)}")
    chosen = [job for job in fitted if not only or job.hardware in only]
    order = {stack: place for place, stack in enumerate(_STACK_ORDER)}
    return sorted(chosen, key=lambda job: (order.get(job.timing_method, len(_STACK_ORDER)), job.family, job.hardware))


def has_kernel_families(file: str | Path) -> bool:
    """Return True if parameters of kernel families (timing formulas) can be fitted to a measured table.

    Parameters
    ----------
    file : str or Path
        A measured table.

    Returns
    -------
    bool
        True for a table of kernels or collectives that is used for fitting.

    Raises
    ------
    SpecError
        If the table cannot be read.
    """
    name = table_kind_name(file)
    return name in KERNEL_TABLES and KERNEL_TABLES[name].used_for_fitting


def table_kind_name(file: str | Path) -> str:
    """Return the name of the kind of table that a file holds; '' for unknown columns.

    Parameters
    ----------
    file : str or Path
        A measured table.

    Returns
    -------
    str
        Name of the table kind.

    Raises
    ------
    SpecError
        If the table cannot be read.
    """
    columns = read_table(file).columns
    try:
        return find_table_kind(columns).name
    except SpecError:
        return ""


def _table_jobs(file: str | Path) -> Iterator[KernelFitJob]:
    frame = _sound_rows(file)
    kind = KERNEL_TABLES[find_table_kind(frame.columns).name]
    together: dict[tuple[str, str, str], list[MeasuredRows]] = {}
    for group in group_rows_for_prediction(kind, kind.prepare_rows(frame)):
        figures = kind.load_datasheet(group.hardware, group.dtype, group.compute_unit)
        key = (kind.calibration_keys(figures)[0], group.family, group.timing_method.partition("/")[0])
        rows = MeasuredRows(group.frame, figures, group.timing_method, measured_time(group.frame))
        together.setdefault(key, []).append(rows)
    for (subject, family, stack), rows_of in together.items():
        yield KernelFitJob(kind, Path(file).name, subject, family, stack, tuple(rows_of))


def selects_special_fit(subject: str, only: Sequence[str], free: Sequence[str]) -> bool:
    """Return True if option ``--only`` names a special fit (``intervals``, ``arithmetic``, …), which must stand alone.

    Parameters
    ----------
    subject : str
        Name of the special fit.
    only : sequence of str
        Values of option ``--only``.
    free : sequence of str
        Values of option ``--free``.

    Returns
    -------
    bool
        True if ``only`` names the special fit.

    Raises
    ------
    SpecError
        If ``--only`` names anything else as well, or if ``--free`` is used.
    """
    if subject not in only:
        return False
    if len(only) > 1 or free:
        others = [*(f"--only {name}" for name in only if name != subject), *(f"--free {name}" for name in free)]
        alone = "it is fitted by itself, all its numbers at once"
        raise SpecError(f"--only {subject}: {alone}, not with {', '.join(others)}")
    return True


def read_step_table(file: str | Path, purpose: str, report: Callable[[str], object]) -> tuple[RunTable, pd.DataFrame]:
    """Read the usable rows of a table of runs (such as training steps) for a fit.

    Parameters
    ----------
    file : str or Path
        A measured table.
    purpose : str
        Words for the error message on why such a table is needed.
    report : callable
        Called with the name of the table and its number of rows, to show progress.

    Returns
    -------
    tuple of (RunTable, DataFrame)
        (kind of table, its usable rows).

    Raises
    ------
    SpecError
        If the rows of the table are not runs.
    """
    frame = usable_rows_of_table(file)
    table = find_table_kind(frame.columns)
    if not isinstance(table, RunTable):
        raise SpecError(f"{file}: no table of steps, which {purpose}")
    report(f"{Path(file).name} ({with_noun(len(frame), 'row')})")
    return table, frame


def _sound_rows(file: str | Path) -> pd.DataFrame:
    """Read the rows of a measured table that have both a time and a prediction, as ``paleo validate`` uses."""
    frame = usable_rows_of_table(file)
    measured, predictions = measured_and_predicted_values(table_kind_of_file(file, frame), frame)
    sound: pd.DataFrame = frame[(predictions.failure_reasons == "") & np.isfinite(measured)]
    return sound


def count_unusable_rows(files: Iterable[str | Path]) -> int:
    """Count the rows of kernel tables that no fit can use, because they have no measured time or no prediction.

    Parameters
    ----------
    files : iterable of str or Path
        Measured tables.

    Returns
    -------
    int
        Number of rows.
    """
    return sum(len(read_table(file)) - len(_sound_rows(file)) for file in files if has_kernel_families(file))


def run_kernel_fits(
    work: Sequence[KernelFitJob], date: str, report: Callable[[KernelFitJob], object] = lambda job: None
) -> Iterator[list[FittedEntry]]:
    """Run fits and yield the calibration entries of each; later fits may start from earlier results.

    Fits that do not depend on each other run in parallel, in half as many processes as there are processors.

    Parameters
    ----------
    work : sequence of KernelFitJob
        Fits to run (`kernel_fit_jobs`).
    date : str
        Date written into the entries (YYYY-MM-DD).
    report : callable
        Called with each job as it starts.

    Yields
    ------
    list of FittedEntry
        Entries of one job, one per timing method, in the order of the jobs.
    """
    processes = min((os.cpu_count() or 1) // 2, len(work))
    solved = _fit_in_parallel(work, processes, report) if processes > 1 else _fit_serially(work, report)
    for job, result in zip(work, solved, strict=True):
        entries = []
        for stack in result.parameters:
            frame = pd.concat([rows.frame for rows in job.rows if rows.group_name == stack])
            entries.append(_calibration_entry(job.family, stack, job.file, frame, result, date))
        yield [FittedEntry(job.hardware, entry) for entry in entries]


def _fit_serially(work: Sequence[KernelFitJob], report: Callable[[KernelFitJob], object]) -> Iterator[FitResult[Any]]:
    fitted: dict[tuple[str, str, str], Any] = {}
    for job in work:
        report(job)
        yield (result := kernel_fit(job, fitted).run())
        fitted |= _parameters_by_key(job, result)


def _fit_in_parallel(
    work: Sequence[KernelFitJob], processes: int, report: Callable[[KernelFitJob], object]
) -> Iterator[FitResult[Any]]:
    """Run fits in parallel and yield their results in the order of the jobs.

    A job starts when all jobs that it depends on are finished.
    """
    fitted: dict[tuple[str, str, str], Any] = {}
    waiting, results = list(range(len(work))), dict[int, FitResult[Any]]()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[FitResult[Any]], int] = {}
        for place in range(len(work)):
            while place not in results:
                open_jobs = [*running.values(), *waiting]
                for ready in [job for job in waiting if not any(_depends_on(work, job, other) for other in open_jobs)]:
                    waiting.remove(ready)
                    report(work[ready])
                    running[pool.submit(Fit.run, kernel_fit(work[ready], fitted))] = ready
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    done = running.pop(future)
                    results[done] = future.result()
                    fitted |= _parameters_by_key(work[done], results[done])
            yield results[place]


def _depends_on(work: Sequence[KernelFitJob], place: int, other: int) -> bool:
    """Return True if a kernel fit may start from the parameters of an earlier fit.

    Both are of the same table, and differ in timing method or are of the same device or system.
    """
    job, earlier = work[place], work[other]
    may_teach = job.timing_method != earlier.timing_method or job.hardware == earlier.hardware
    return other < place and job.file == earlier.file and may_teach


def _parameters_by_key(job: KernelFitJob, result: FitResult[Any]) -> dict[tuple[str, str, str], Any]:
    return {(job.hardware, job.family, stack): values for stack, values in result.parameters.items()}


def kernel_fit(job: KernelFitJob, fitted: FittedParameters) -> Fit[Any]:
    """Set up the fit of a job, with the settings that its kind of table chooses.

    Parameters
    ----------
    job : KernelFitJob
        Rows that are fitted together.
    fitted : mapping
        Parameters of earlier jobs by (subject, family, timing method), as start values.

    Returns
    -------
    Fit
        The fit, not run yet.
    """
    target = FitTarget(job.hardware, job.family, job.timing_method, job.rows[0].datasheet, fitted)
    plan = job.table_kind.fit_settings(target)
    # parts of the rows in a split; held out only if all three would have rows
    columns = job.table_kind.configuration_columns
    together = np.concatenate([split_by_configuration(rows.frame, columns) for rows in job.rows])
    enough = len(together) >= MIN_ROWS_TO_HOLD_OUT and all((together == part).any() for part in range(3))
    settings = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}  # fields of `Fit`, too
    return Fit(job.table_kind, job.rows, **settings, uses_held_out_rows=enough)


def _calibration_entry(
    family: str, stack: str, file: str, frame: pd.DataFrame, result: FitResult[Any], date: str
) -> CalibrationEntry:
    """Build the calibration entry of a fitted kernel family and timing method.

    Parameters
    ----------
    family, stack : str
        Keys of the entry.
    file : str
        Name of the table, for ``source``.
    frame : DataFrame
        Rows that were fitted; their columns ``source`` and ``library`` are cited.
    result : FitResult
        Result of the fit.
    date : str
        Date written into the entry (YYYY-MM-DD).

    Returns
    -------
    CalibrationEntry
        Entry for the calibration file, with numbers rounded to `_DIGITS` and `ERROR_DIGITS` significant digits.
    """
    residual, tested = result.residual_by_stack[stack], result.rows_held_out > 0
    libraries = text_column(frame, "library")  # the most frequent first
    sigma = {
        name.partition("[")[0]: round_to_digits(value, ERROR_DIGITS)
        for name, value in result.log_standard_deviations.items()
        if "[" not in name or f"[{stack}]" in name
    }
    untested = f"{with_noun(residual.rows, 'row')} fitted, none held out (MAPE there {residual.mape:.3f})"
    bins = [
        IntervalBin(
            up_to_s=None if math.isinf(each.up_to_s) else round_to_digits(each.up_to_s, 4),
            low=round_to_digits(min(each.low, 1.0), 4),  # stretched to hold the prediction itself
            high=round_to_digits(max(each.high, 1.0), 4),
        )
        for each in result.interval_by_stack[stack]
    ]
    return CalibrationEntry(
        family=family, stack=stack, date=date, uncertainty=sigma, interval=tuple(bins),
        source=f"{file} ({sources_text(frame)})",
        library="; ".join(libraries[libraries != ""].value_counts().index[:3])[:200] or None,
        rows_fitted=result.rows_fitted, rows_held_out=residual.rows if tested else 0,
        parameters=_rounded_fields(result.parameters[stack]), notes=None if tested else untested,
        residual=rounded_residual(residual) if tested and residual.rows else None,
    )  # fmt: skip


def _rounded_fields(parameters: Any, digits: int = _DIGITS) -> dict[str, float]:
    return {name: round_to_digits(value, digits) for name, value in dataclasses.asdict(parameters).items()}


def sources_text(frame: pd.DataFrame) -> str:
    """List the sources of measured rows in one text, for a citation.

    Parameters
    ----------
    frame : DataFrame
        The rows.

    Returns
    -------
    str
        Names with commas between them, sorted.
    """
    return ", ".join(sorted(set(text_column(frame, "source")) - {""}))


def step_calibration_entry(
    family: str, parameters: Any, source: str, date: str, ratios: Array | None = None, **more: Any
) -> CalibrationEntry:
    """Build the calibration entry of parameters that are fitted to whole training steps.

    Parameters
    ----------
    family : str
        Key of the entry.
    parameters : dataclass
        Fitted constants.
    source : str
        Citation of the measured tables.
    date : str
        Date written into the entry (YYYY-MM-DD).
    ratios : ndarray, optional
        Predicted over measured step times, for the entry's residual.
    **more
        Further fields of the entry.

    Returns
    -------
    CalibrationEntry
        Entry for the calibration file. The residual has no total error, as ratios do not tell sums of times.
    """
    if ratios is not None:
        errors = rounded_residual(residual_errors(ratios, np.ones_like(ratios)))
        errors.pop("total_error")
        more["residual"] = HeldOutErrors(**errors)
    return CalibrationEntry(
        family=family, stack="whole steps", source=source, date=date,
        parameters=_rounded_fields(parameters, ERROR_DIGITS),
        **{"interval": (IntervalBin(low=1.0, high=1.0),), **more},
    )  # fmt: skip


def table_citation(files: Sequence[str], sources: int) -> str:
    """Format a citation of the measured tables of a fit, with the number of sources.

    Parameters
    ----------
    files : sequence of str
        Measured tables.
    sources : int
        Number of sources of the rows.

    Returns
    -------
    str
        Citation, for field ``source`` of calibration entries.
    """
    return f"{', '.join(Path(file).name for file in files)} ({sources} sources)"


def rounded_residual(errors: ResidualErrors) -> dict[str, float]:
    """Round the errors of a fit to `ERROR_DIGITS` significant digits, for a calibration file.

    Parameters
    ----------
    errors : ResidualErrors
        Errors of a fit.

    Returns
    -------
    dict of str to float
        Fields of `paleo.specs.calibration.HeldOutErrors`.
    """
    return {**_rounded_fields(errors, ERROR_DIGITS), "rows": errors.rows}


def round_to_digits(value: float, digits: int = _DIGITS) -> float:
    """Round a number to some significant digits, for a calibration file.

    Parameters
    ----------
    value : float
        A number.
    digits : int, default _DIGITS
        Number of significant digits.

    Returns
    -------
    float
        The rounded number.
    """
    return float(f"{value:.{digits}g}")


def calibrations_by_hardware(fits: Sequence[FittedEntry], folder: Path | None = None) -> dict[str, Calibration]:
    """Collect fitted entries into one calibration per device or system, merged with existing files.

    Parameters
    ----------
    fits : sequence of FittedEntry
        Fitted entries.
    folder : Path, optional
        Folder of existing calibration files. Entries of other families and timing methods are kept, and so are
        handwritten notes on entries.

    Returns
    -------
    dict of str to Calibration
        Calibration by name of the device or system.
    """
    out = {}
    for subject in sorted({fitted.hardware for fitted in fits}):
        new = {(fitted.entry.family, fitted.entry.stack): fitted.entry for fitted in fits if fitted.hardware == subject}
        kept = _existing_entries(folder / f"{subject}.yaml") if folder else {}
        for key in kept.keys() & new.keys():
            new[key] = new[key].model_copy(update={"notes": new[key].notes or kept[key].notes})
        entries = sorted((kept | new).items())
        out[subject] = Calibration(name=subject, subject=subject, entries=tuple(entry for _, entry in entries))
    return out


def _existing_entries(path: Path) -> dict[tuple[str, str], CalibrationEntry]:
    if not is_file(path):
        return {}
    data = parse_yaml(path.read_text(encoding="utf-8"), where=path)
    calibration = validate_mapping(Calibration, {"name": path.stem, **data}, path)
    return {(entry.family, entry.stack): entry for entry in calibration.entries}


def calibration_yaml(calibration: Calibration) -> str:
    """Format a calibration as the YAML text of its file.

    Parameters
    ----------
    calibration : Calibration
        The calibration.

    Returns
    -------
    str
        YAML text with a comment on its origin.
    """
    entries = [entry.model_dump(exclude_defaults=True, mode="json") for entry in calibration.entries]
    data = {"subject": calibration.device_or_system, "entries": entries}
    return _YAML_COMMENT + str(yaml.safe_dump(data, sort_keys=False, width=118, allow_unicode=True))


#: The family of a board's figures in calibration files, and columns that make rows the same run, under other limits.
_POWER_FAMILY, _RUN_COLUMNS = "power", ("model", "dataset", "batch_size")


def _run_key(row: Row) -> str:
    return "|".join(str(row.get(name)) for name in ("device", *_RUN_COLUMNS, "optimizer"))


def fit_board_power(files: Sequence[str], only: Sequence[str], date: str) -> list[FittedEntry]:
    """Fit the parameters of GPU board power (`paleo.pricing.power`) of each device to measured power [W].

    Parameters
    ----------
    files : sequence of str
        Tables of kind ``power``.
    only : sequence of str
        Names of devices to fit; all of the tables if empty.
    date : str
        Date written into the entries (YYYY-MM-DD).

    Returns
    -------
    list of FittedEntry
        One entry per device, fitted to the rows whose runs can be predicted.

    Raises
    ------
    SpecError
        If a device of ``only`` has no rows, or no row can be fitted.
    """
    frame, runs = _predicted_rows(pd.concat([usable_rows_of_table(file) for file in files], ignore_index=True))
    devices = sorted({str(name) for name in frame["device"]})
    for name in only:
        if name not in devices:
            raise SpecError(f"the tables have no rows of {name!r} to fit; {suggest_names(name, devices)}")
    if not devices:
        raise SpecError(f"{files[0]}: no row can be fitted; `paleo validate` says why")
    label = ", ".join(Path(file).name for file in files)
    watts = StepTimePredictor(
        _RUN_COLUMNS,
        lambda runs, parameters: lambda row: predict_board_power(row, runs[_run_key(row)], parameters).average,
    )
    fitted = []
    for name in only or devices:
        device_rows = frame[frame["device"] == name].reset_index(drop=True)
        rows = MeasuredRows(device_rows, runs, BOARD_POWER_METHOD, PowerTable().measured_values(device_rows))
        result = Fit(watts, [rows], PowerParameters(), random_starts=0, row_weight_exponent=0.0).run()
        entry = _calibration_entry(_POWER_FAMILY, BOARD_POWER_METHOD, label, device_rows, result, date)
        fitted.append(FittedEntry(name, entry))
    return fitted


def _predicted_rows(frame: pd.DataFrame) -> tuple[pd.DataFrame, Mapping[str, Prediction | None]]:
    """Select power measurements that can be fitted: (rows, predictions of their runs by run key).

    Rows need a predictable run, a measured power and a power limit.
    """
    table, runs, sound = PowerTable(), dict[str, Prediction | None](), []
    for row in row_dicts(frame):
        name = _run_key(row)
        try:
            if name not in runs:
                runs[name] = None
                runs[name] = table.predict_without_power_limit(row, None)
            measured_step_time(row)
            sound.append(runs[name] is not None)
        except (PaleoError, *CELL_ERRORS):
            sound.append(False)
    stated = np.isfinite(table.measured_values(frame) + number_column(frame, "power_limit_w", float("nan")))
    return frame[stated & np.array(sound, dtype=bool)], runs
