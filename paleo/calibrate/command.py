"""Command ``paleo calibrate``: ``--fit FILE…`` fits calibrations to measured tables; without it a device is measured
first.

``--fit … --only ledger`` reports the error of each source of measured rows when left out of the fits. A source of
training steps is predicted with energy factors and intervals that were fitted to the other sources. A source of served
runs is predicted with engine profiles that take no value from that source. A source of kernels is predicted with
parameters that were fitted to the other sources of its family and device.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd

from paleo.calibrate import interval_constants, sustained_energy
from paleo.calibrate.device_benchmarks import (
    DEFAULT_SUITES,
    BenchmarkPoint,
    MeasurementFolder,
    benchmark_points,
    collective_benchmarks,
    device_benchmark_runner,
    import_torch,
    measure_collectives,
    run_benchmarks,
)
from paleo.calibrate.fit import MeasuredRows, count_rows, predicted_and_measured
from paleo.calibrate.kernel_fits import (
    MIN_ROWS_TO_HOLD_OUT,
    FittedEntry,
    KernelFitJob,
    calibration_yaml,
    calibrations_by_hardware,
    count_unusable_rows,
    fit_board_power,
    has_kernel_families,
    kernel_fit,
    kernel_fit_jobs,
    run_kernel_fits,
    selects_special_fit,
    table_kind_name,
)
from paleo.calibrate.links import LinkJob, fit_links, fitted_parameter_rows, link_jobs, requests_link_fit
from paleo.calibrate.mlperf_tasks import (
    CROSS_VALIDATION_HEADINGS,
    cross_validated_submissions,
    error_table_rows,
    fit_tasks,
    format_percent,
    gpu_ranking_accuracy,
    is_convergence_table,
    is_mlperf_task_table,
)
from paleo.calibrate.software import (
    FIT_ONLY_HOST_WAITS,
    MIN_STEPS,
    SoftwareJob,
    cross_validated_waiting_fit,
    fit_software,
    software_jobs,
    software_profile_yaml,
)
from paleo.errors import SpecError
from paleo.files import check_output_path, is_folder, write_text
from paleo.specs.device import find_device
from paleo.specs.system import load_system
from paleo.step.interval import INTERVAL_CALIBRATION
from paleo.tables.base import ResidualErrors, residual_errors
from paleo.tables.cells import text_column
from paleo.tables.kinds._machines import PowerTable
from paleo.tables.validation import FileReport, usable_rows_of_table, validate_file
from paleo.tables.validation_report import report_console
from paleo.units import with_noun

if TYPE_CHECKING:
    from paleo.specs.calibration import Calibration, HeldOutErrors
    from paleo.tables.base import ResidualErrors as FittedResidual

ProgressCallback = Callable[[str], object]
#: What `--only` asks for.
_REPORT_ONLY_SOURCE_ERRORS = "ledger"
#: Kinds of tables of training steps, whose predictions state the parts of their intervals, and the one whose steps tell
#: what sustained arithmetic costs.
_TRANSFORMER_TABLE = "llm_iterations"
_STEP_TABLES = (_TRANSFORMER_TABLE, "cnn_iterations", "other_iterations")
#: Kinds of tables whose sources stand in the ledger: runs of engines, too, to which nothing is fitted here.
LEDGER_TABLES = (*_STEP_TABLES, "serving", "inference")
#: Columns of the ledger; errors, biases and coverages as fractions.
SOURCE_ERROR_COLUMNS = (
    "table", "source", "rows", "mean_error", "bias", "left_out_error", "left_out_bias", "coverage",
    "left_out_coverage", "one_constant",
)  # fmt: skip
#: Fewest rows of a source in the ledger, and digits of its numbers.
_MIN_ROWS_OF_REPORTED_SOURCE, _DIGITS = 6, 4


def step_errors_by_source(files: Sequence[str], report: ProgressCallback = str) -> pd.DataFrame:
    """Compare the errors of each source of measured steps with its rows in the fits and with its rows left out.

    Parameters
    ----------
    files : sequence of str
        Tables of steps.
    report : callable
        Called with a label when each part of the work starts, to show progress.

    Returns
    -------
    DataFrame
        Columns `SOURCE_ERROR_COLUMNS`, one line per source of at least `_MIN_ROWS_OF_REPORTED_SOURCE` rows.
    """
    known = sustained_energy.dense_steps([f for f in files if table_kind_name(f) == _TRANSFORMER_TABLE], report)
    calibrations = {
        name: sustained_energy.energy_factor_calibration(sustained_energy.fit_energy_factors(others))
        for name, _, others in known.leave_one_out()
    }
    coverages = interval_constants.cross_validated_coverage(interval_constants.step_errors(files, report))
    inside = coverages.set_index("source")["inside"]
    lines = []
    for file in files:
        report(f"{Path(file).name}: each source left out")
        whole = validate_file(file)
        for source, errors in whole.errors_by_group(whole.row_sources).items():
            if errors.rows >= _MIN_ROWS_OF_REPORTED_SOURCE:
                tested = _left_out_errors(whole, source, calibrations.get(source)) or errors
                shares = errors.coverage, inside.get(f"{whole.table.name}: {source}", np.nan), errors.baseline_mape
                values = (errors.mape, errors.bias, tested.mape, tested.bias, *shares)
                numbers = [np.nan if value is None else round(float(value), _DIGITS) for value in values]
                lines.append((Path(file).name, source, errors.rows, *numbers))
    return pd.DataFrame(lines, columns=SOURCE_ERROR_COLUMNS)


def _left_out_errors(whole: FileReport, source: str, calibration: Calibration | None) -> ResidualErrors | None:
    """Compute the errors on one source's measured rows with fits that left that source out.

    Refitted are the energy factors of arithmetic (``calibration``), or the engine profiles without values of the
    source. None if no prediction changes.
    """
    chosen = whole.predicted_row_mask & (whole.row_sources == source)
    table: Any = whole.table
    other = table.without_fits_to_source(source) if calibration is None else table.with_calibration(calibration)
    if other is table:
        return None
    return residual_errors(other.predict(whole.frame[chosen]).values, whole.measured[chosen])


def kernel_source_errors(job: KernelFitJob) -> Iterator[tuple[str, ResidualErrors]]:
    """Compute the errors of each source of a kernel family's rows when the family is fitted to all other sources.

    Parameters
    ----------
    job : KernelFitJob
        Rows of one family on one device.

    Yields
    ------
    tuple of (str, ResidualErrors)
        Name of the source, and the errors of its rows.
    """
    names = np.concatenate([text_column(rows.frame, "source").to_numpy() for rows in job.rows])
    for name in np.unique(names):
        parts = [_split_by_source(rows, str(name)) for rows in job.rows]
        remainder = tuple(complement for _, complement in parts if len(complement.measured_times))
        tested = [part for part, complement in parts if len(part.measured_times) and len(complement.measured_times)]
        if tested and count_rows(remainder) >= MIN_ROWS_TO_HOLD_OUT:
            result = kernel_fit(replace(job, rows=remainder), {}).run()
            yield str(name), residual_errors(*predicted_and_measured(job.table_kind, tested, result.parameters))


def _split_by_source(rows: MeasuredRows, source: str) -> tuple[MeasuredRows, MeasuredRows]:
    chosen = (text_column(rows.frame, "source") == source).to_numpy()
    return rows.select(chosen), rows.select(~chosen)


def worsened_sources(before: pd.DataFrame, after: pd.DataFrame, points: float = 0.02) -> list[tuple[str, str]]:
    """List the sources whose left-out error has grown by more than a tolerance since a stored table of errors.

    Parameters
    ----------
    before, after : DataFrame
        Stored and new errors of each source, with columns `SOURCE_ERROR_COLUMNS`.
    points : float, default 0.02
        Growth of the error that is tolerated, as a fraction.

    Returns
    -------
    list of tuple of (str, str)
        (source, sentence with both errors); sources that ``after`` lacks are named as well.

    Examples
    --------
    >>> line = pd.DataFrame([("t", "lab", 9, *[0.1] * 7)], columns=SOURCE_ERROR_COLUMNS)
    >>> worsened_sources(line, line.assign(left_out_error=0.13))
    [('lab', 't, lab: 13.0 % where the ledger has 10.0 %')]
    """
    both = before.merge(after, on=["table", "source"], how="left", suffixes=("", "_now"))
    grown = both[~(both["left_out_error_now"] <= both["left_out_error"] + points)]
    columns = grown[["table", "source", "left_out_error_now", "left_out_error"]]
    return [
        (source, f"{table}, {source}: {100.0 * new:.1f} % where the ledger has {100.0 * old:.1f} %")
        for table, source, new, old in columns.itertuples(index=False)
    ]


StepFitJob = TypeVar("StepFitJob", SoftwareJob, LinkJob)
ConstantsFit = TypeVar("ConstantsFit", sustained_energy.SustainedEnergyFit, interval_constants.IntervalConstantsFit)
#: Tables that no family is fitted to: they inform.
_UNFITTED_TABLES = ("copies",)
#: Columns of a source's coverage that are printed, and how.
_COVERAGE_FORMATS = (("inside", ".0%"), ("half_width", ".3f"))


@dataclass(frozen=True, slots=True)
class _Request:
    """Options of one call of ``paleo calibrate --fit``: tables to fit, output files, and what to fit."""

    files: Sequence[str]
    output: str | None
    output_dir: str | None
    only_subjects: Sequence[str]
    free_parameters: Sequence[str]
    held_out_sources: Sequence[str]
    date: str

    def output_paths(self, subjects: Sequence[str]) -> dict[str, Path]:
        """Determine the calibration file to write for each device, system or profile from the output options.

        Parameters
        ----------
        subjects : sequence of str
            Names of the devices, systems or profiles that are fitted.

        Returns
        -------
        dict of str to Path
            Path of the file, by name of the device, system or profile.

        Raises
        ------
        SpecError
            If a file cannot be written, or if the options name no output.
        """
        if self.output is not None:
            if len(subjects) > 1:
                raise SpecError(
                    f"-o {self.output}: the tables hold {len(subjects)} subjects ({', '.join(subjects[:6])}); choose "
                    "one with --only, or name a folder with --output-dir"
                )
            return dict.fromkeys(subjects, check_output_path(self.output, (".yaml", ".yml")))
        if self.output_dir is None:
            raise SpecError("--fit: nothing says where to write; name a file with -o, or a folder with --output-dir")
        folder = Path(self.output_dir)
        if not is_folder(folder):
            raise SpecError(f"--output-dir {self.output_dir}: no such folder")
        return {name: check_output_path(folder / f"{name}.yaml", option="--output-dir") for name in subjects}

    def write_calibrations(self, fitted: Sequence[FittedEntry], places: Mapping[str, Path]) -> dict[str, Calibration]:
        """Write the entries fitted so far, one calibration file per device or system, and return the calibrations.

        Each call writes whole files. In a folder, entries of other families are kept.

        Parameters
        ----------
        fitted : sequence of FittedEntry
            Fitted calibration entries, each with its subject.
        places : mapping of str to Path
            File to write, by subject.

        Returns
        -------
        dict of str to Calibration
            Calibration that was written, by subject.
        """
        files = calibrations_by_hardware(fitted, places[min(places)].parent if self.output is None else None)
        for subject, calibration in files.items():
            write_text(places[subject], calibration_yaml(calibration))
        return files


def fit_tables(
    files: Sequence[str],
    *,
    output: str | None = None,
    output_dir: str | None = None,
    only: Sequence[str] = (),
    free: Sequence[str] = (),
    hold_out: Sequence[str] = (),
    today: str | None = None,
) -> int:
    """Fit calibrations to measured tables and write the calibration files (``paleo calibrate --fit``).

    The kind of table decides what is written. Kernels and power: one calibration file per device or system. Training
    steps: software profiles. With ``only``, training steps give links of systems, intervals of step times, energy
    factors of arithmetic, or the overlap of CPU and GPU in MoE steps. MLPerf tables: task files.

    Parameters
    ----------
    files : sequence of str
        Measured tables; or folders, all tables of which are fitted, kernels first.
    output : str, optional
        File to write, for tables of one subject.
    output_dir : str, optional
        Folder for one file per subject; entries of other families in it are kept.
    only : sequence of str
        Devices, systems or profiles to fit; or ``fabric``, ``intervals``, ``arithmetic``, ``waiting`` or ``ledger``.
    free : sequence of str
        Names of the parameters of profiles or links that are fitted; by default the usual ones.
    hold_out : sequence of str
        Sources that are not fitted (``--only waiting``).
    today : str, optional
        Date written into results (YYYY-MM-DD); today by default.

    Returns
    -------
    int
        The exit code.

    Raises
    ------
    PaleoError
        If the input has errors.
    """
    if not files:
        raise SpecError("--fit: no file is named; expected measured tables, such as measurements/gemm.csv.gz")
    if output is not None and output_dir is not None:
        raise SpecError("-o and --output-dir exclude each other: one file, or one file a device in a folder")
    if any(is_folder(file) for file in files):
        return _fit_folders(files, output_dir, today, [*only, *free, *hold_out])
    if hold_out and FIT_ONLY_HOST_WAITS not in only:
        raise SpecError(
            f"--hold-out {hold_out[0]}: keeps sources back from --only {FIT_ONLY_HOST_WAITS}, from no other fit"
        )
    date = today or datetime.date.today().isoformat()
    request = _Request(files, output, output_dir, only, free, hold_out, date)
    for option, fit in _SPECIAL_FITS.items():
        if selects_special_fit(option, only, free):
            return fit(request)
    columns = [_column_names(file) for file in files]
    if all(is_mlperf_task_table(names) for names in columns):
        return _fit_tasks(request)
    if all(names >= PowerTable.identifying_columns for names in columns):
        boards = fit_board_power(files, only, date)
        places = request.output_paths(sorted({board.hardware for board in boards}))
        _print_calibrations(request.write_calibrations(boards, places), places)
        return 0
    links = any(requests_link_fit(file, only) for file in files)
    steps = [] if links else [job for file in files for job in software_jobs(file, only)]
    if (links or steps) and any(has_kernel_families(file) for file in files):
        raise SpecError("tables of steps and of kernels are fitted one after the other, not in one call")
    if links:
        return _fit_links(request)
    if steps:
        return _fit_steps(request, steps)
    if free:
        raise SpecError(f"--free {free[0]}: names numbers of software profiles; the tables hold no steps to fit")
    return _fit_kernels(request)


def _column_names(file: str) -> frozenset[str]:
    """Read the column names of a measured table; an empty set if the file cannot be read (later steps report why)."""
    try:
        return frozenset(pd.read_csv(file, nrows=0, compression="infer").columns)
    except (OSError, EOFError, ValueError):
        return frozenset()


def _fit_folders(paths: Sequence[str], output_dir: str | None, today: str | None, unknown: Sequence[str]) -> int:
    """Fit all measured tables of folders in stages: kernels, board power, energy factors, step-time intervals.

    Each stage uses what the stages before it have written. Returns the exit code.
    """
    if unknown or output_dir is None:
        wrong = f"{unknown[0]!r} names a part" if unknown else "--output-dir says where to write"
        raise SpecError(f"--fit {paths[0]}: all tables of a folder are fitted together; {wrong}")
    listed = [sorted(map(str, Path(path).glob("*.csv*"))) if is_folder(path) else [path] for path in paths]
    tables = [file for files in listed for file in files]
    names = {file: table_kind_name(file) for file in tables}
    kernels = [file for file in tables if has_kernel_families(file)]
    steps = [file for file in tables if names[file] in _STEP_TABLES]
    dense = [file for file in steps if names[file] == _TRANSFORMER_TABLE]
    stages = (
        (kernels, ()),
        ([file for file in tables if names[file] == PowerTable.name], ()),
        (dense, (sustained_energy.FIT_ONLY_ARITHMETIC_ENERGY,)),
        (steps, (interval_constants.FIT_ONLY_PREDICTION_INTERVALS,)),
    )
    for files, only in stages:
        if files:
            sys.stderr.write(f"fitting {', '.join([*map(str, only), *(Path(file).name for file in files)])}\n")
            fit_tables(files, output_dir=output_dir, only=only, today=today)
            _clear_catalog_caches()
    lines = [
        (job.hardware, job.family, source, str(errors.rows), f"{errors.mape:.1%}", f"{errors.bias:+.1%}")
        for job in kernel_fit_jobs(kernels)
        for source, errors in kernel_source_errors(job)
    ]
    headings = ("subject", "family", "source", "rows", "MAPE", "bias")
    report_console().print(_table(headings, lines, "kernels by source, with what the other sources give"))
    unfitted = [Path(file).name for file in tables if not any(file in files for files, _ in stages)]
    sys.stderr.write(f"not fitted: {', '.join(unfitted)}\n" if unfitted else "")
    listed_sources = [file for file in tables if names[file] in LEDGER_TABLES]
    return _write_source_errors(listed_sources, str(Path(output_dir) / "ledger.csv")) if dense else 0


def _clear_catalog_caches() -> None:
    """Clear the caches of loaded catalog files, so that predictions use calibration files that were just written."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "paleo":
            for value in vars(module).values():
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


def _write_source_errors(files: Sequence[str], output: str | None) -> int:
    """Print the errors of each source of steps when left out of the fits; write them to ``output`` if given.

    Returns the exit code.
    """
    place = None if output is None else check_output_path(output, (".csv",))
    with _progress(3 * len(files) + len(sustained_energy.TRIAL_ENERGY_FACTORS)) as report:
        errors = step_errors_by_source(files, report)
    shares = [
        (table, source, str(rows), *(f"{100 * value:.1f}" for value in values))
        for table, source, rows, *values in errors.itertuples(index=False)
    ]
    headings = [name.replace("_", " ") for name in SOURCE_ERROR_COLUMNS]
    report_console().print(_table(headings, shares, "steps by source, %"))
    if place is not None:
        write_text(place, errors.to_csv(index=False))
    return 0


def _fit_kernels(request: _Request) -> int:
    for file in request.files:
        if not has_kernel_families(file):
            sys.stderr.write(f"{file}: no family is fitted to such a table\n")
    work = kernel_fit_jobs(request.files, request.only_subjects)
    if not work:
        raise SpecError(f"{request.files[0]}: no row can be fitted; `paleo validate` says why")
    places = request.output_paths(sorted({job.hardware for job in work}))
    fitted: list[FittedEntry] = []
    with _progress(len(work)) as report:
        for fits_of_job in run_kernel_fits(work, request.date, report):
            fitted += fits_of_job
            written = request.write_calibrations(fitted, places)
    _print_calibrations(written, places)
    for entry in (entry for calibration in written.values() for entry in calibration.entries if not entry.residual):
        rows = f"{with_noun(entry.rows_fitted, 'row')} for {len(entry.parameters)} numbers, and none held out"
        tested = f"{MIN_ROWS_TO_HOLD_OUT} or more rows can be tested"
        sys.stderr.write(f"warning: {entry.family}, {entry.stack}: {rows}: {tested}\n")
    skipped = count_unusable_rows(request.files)
    if skipped:
        sys.stderr.write(
            f"{with_noun(skipped, 'row')} left out, which cannot be predicted; `paleo validate` says why\n"
        )
    return 0


def _jobs_with_enough_rows(work: Sequence[StepFitJob], subject: str, steps: str) -> list[StepFitJob]:
    """Select the fits whose rows are enough to fit some and test on others; report the other fits on stderr."""
    for job in work:
        if job.step_count < MIN_STEPS:
            sys.stderr.write(f"{job.name}: {job.step_count} {steps}, too few to fit and test; {MIN_STEPS} are needed\n")
    enough = [job for job in work if job.step_count >= MIN_STEPS]
    if not enough:
        raise SpecError(f"no {subject} has the {MIN_STEPS} {steps} that a fit needs")
    return enough


def _fit_steps(request: _Request, work: Sequence[SoftwareJob]) -> int:
    enough = _jobs_with_enough_rows(work, "profile", "steps")
    places = request.output_paths([job.profile.name for job in enough])
    results = []
    with _progress(len(enough)) as report:
        for job in enough:
            report(job)
            results.append(fit_software(job, request.date, request.free_parameters))
            write_text(places[results[-1].profile_after.name], software_profile_yaml(results[-1].profile_after))
    for job, result in zip(enough, results, strict=True):
        name, record = result.profile_after.name, result.profile_after.fit
        if record is None:
            continue
        terminal = report_console(markup=False)
        rows = f"{record.rows_fitted} steps fitted, {record.rows_held_out} held out"
        terminal.print(f"{name} -> {places[name]}: {rows}")
        terminal.print(_table(("number", "before", "after"), result.changed_values()))
        terminal.print(f"on the {record.residual.rows} steps held out: {_errors_text(record.residual)}")
        if job.skipped_rows:
            why = "not predicted (`paleo validate` says why), or of software without a profile"
            terminal.print(f"{job.skipped_rows} rows left out: {why}")
    return 0


def _fit_links(request: _Request) -> int:
    work = link_jobs(request.files, request.only_subjects, request.free_parameters)
    enough = _jobs_with_enough_rows(work, "system", "steps that depend on a link")
    places = request.output_paths([job.system.name for job in enough])
    results, refused = [], []
    with _progress(len(enough)) as report:
        for job in enough:
            report(job)
            try:
                results.append(fit_links(job, request.date, request.free_parameters))
            except SpecError as error:
                refused.append(str(error))
                continue
            better = [(fit.job.system.name, fit.entries) for fit in results if fit.reduces_error]
            written = [FittedEntry(system, entry) for system, entries in better for entry in entries]
            request.write_calibrations(written, places)
    if refused and not results:
        raise SpecError(" / ".join(refused))
    sys.stderr.write("".join(f"{line}\n" for line in refused))
    terminal = report_console()
    for result in results:
        where = f"-> {places[result.job.system.name]}"
        unwritten = "not written: the steps held out are not predicted better"
        terminal.print(f"links of {result.job.system.name} {where if result.reduces_error else unwritten}")
        terminal.print(_table(("number", "before", "after", "± one sigma", ""), fitted_parameter_rows(result)))
        for word, errors in (("before", result.errors_before), ("after", result.errors_after)):
            terminal.print(f"on the {errors.rows} steps held out, {word}: {_errors_text(errors)}")
        if result.job.skipped_rows:
            terminal.print(f"{result.job.skipped_rows} rows could not be predicted; `paleo validate` says why")
    return 0 if any(result.reduces_error for result in results) else 1


def _fit_tasks(request: _Request) -> int:
    code = fit_tasks(request.files, request.output_dir, request.date)
    for table in (usable_rows_of_table(file) for file in request.files):
        submissions = None if is_convergence_table(table.columns) else cross_validated_submissions(table)
        if submissions is None or submissions.empty:
            continue
        title = "each round left out: mean errors of its submissions"
        share, pairs = gpu_ranking_accuracy(submissions)
        terminal = report_console()
        terminal.print(_table(CROSS_VALIDATION_HEADINGS, error_table_rows(submissions), title))
        right = f"{format_percent(share)} of {with_noun(pairs, 'pair')}"
        terminal.print(f"pairs of two kinds of GPUs in the right order: {right}")
    return code


def _fit_constants(request: _Request, fit: Callable[..., ConstantsFit], parts: int) -> ConstantsFit:
    """Fit one entry of constants that hold for all training steps (intervals or energy factors); write the entry.

    Returns the result of the fit.
    """
    places = request.output_paths([INTERVAL_CALIBRATION])
    with _progress(parts + 1) as report:
        result = fit(request.files, report)
    entry = FittedEntry(INTERVAL_CALIBRATION, result.calibration_entry(request.files, request.date))
    _print_calibrations(request.write_calibrations([entry], places), places)
    return result


def _fit_arithmetic(request: _Request) -> int:
    predictions = len(request.files) * (len(sustained_energy.TRIAL_ENERGY_FACTORS) + 1)
    result = _fit_constants(request, sustained_energy.cross_validated_energy_fit, predictions)
    parts = [f"{word} {part}" for word in ("before", "fitted", "left out") for part in ("bias", "mape")]
    lines = [
        (str(line["source"]), str(line["rows"]), *(f"{100 * line[part]:.1f}" for part in parts))
        for _, line in result.errors_by_source.iterrows()
    ]
    title = "steps of one node, by source: mean bias and absolute error, %"
    report_console().print(_table(("source", "rows", *parts), lines, title))
    return 0


def _fit_intervals(request: _Request) -> int:
    result = _fit_constants(request, interval_constants.cross_validated_interval_fit, len(request.files))
    lines, coverages = [], (result.fitted_coverage.iterrows(), result.left_out_coverage.iterrows())
    for (_, source), (_, alone) in zip(*coverages, strict=True):
        shares = [f"{part[name]:{form}}" for part in (source, alone) for name, form in _COVERAGE_FORMATS]
        lines.append((str(source["source"]), str(source["rows"]), *shares))
    headings = ("source", "rows", "fitted", "half-width", "left out", "half-width")
    terminal = report_console()
    terminal.print(_table(headings, lines, "sources of several rows: share inside, half-width (log)"))
    terminal.print(f"fitted: {interval_constants.coverage_verdict(result.fitted_coverage)}")
    terminal.print(f"left out: {interval_constants.coverage_verdict(result.left_out_coverage)}")
    return 0


def _fit_waiting(request: _Request) -> int:
    request.output_paths([])
    with _progress(len(request.files) + 1) as report:
        result = cross_validated_waiting_fit(request.files, request.held_out_sources, report)
    profiles = result.fitted_profiles(request.files, request.date)
    if request.output is not None and len(profiles) > 1:
        names = f"{len(profiles)} profiles ({', '.join(profile.name for profile in profiles)})"
        raise SpecError(f"-o {request.output}: the power is that of {names}; name a folder with --output-dir")
    places = request.output_paths([profile.name for profile in profiles])
    for profile in profiles:
        write_text(places[profile.name], software_profile_yaml(profile))
    lines = []
    for test in result.left_out_tests:
        errors, word = test.errors, "held out" if test.source in result.held_out_sources else ""
        shares = (f"{errors.rows}", f"{test.exponent:.3g}", f"{errors.mape:.1%}", f"{errors.bias:+.1%}")
        lines.append((test.source, *shares, word))
    before = ", ".join(f"{profile.name} {profile.host.waiting_exponent:g}" for profile in result.profiles_before)
    known = f"{result.exponent:.3g} by {with_noun(result.rows_fitted, 'step')}"
    terminal = report_console(markup=False)
    terminal.print(f"host.waiting_power: {known}, one sigma {result.log_standard_deviation:.0%} (before: {before})")
    headings, title = ("source", "rows", "power", "MAPE", "bias", ""), "sources with the power that the others give"
    terminal.print(_table(headings, lines, title))
    terminal.print(f"on the {result.residual.rows} steps left out: {_errors_text(result.residual)}")
    terminal.print(f"-> {', '.join(str(places[profile.name]) for profile in profiles)}")
    return 0


def _errors_text(residual: FittedResidual | HeldOutErrors) -> str:
    shares = f"median {residual.median_ape:.1%}, MAPE {residual.mape:.1%}, bias {residual.bias:+.1%}"
    return shares if residual.total_error is None else f"{shares}, total {residual.total_error:+.1%}"


#: Fits that option ``--only`` names by themselves.
_SPECIAL_FITS: Mapping[str, Callable[[_Request], int]] = {
    interval_constants.FIT_ONLY_PREDICTION_INTERVALS: _fit_intervals,
    sustained_energy.FIT_ONLY_ARITHMETIC_ENERGY: _fit_arithmetic,
    FIT_ONLY_HOST_WAITS: _fit_waiting,
    _REPORT_ONLY_SOURCE_ERRORS: lambda request: _write_source_errors(request.files, request.output),
}
#: Headings of columns of words; others hold figures.
_TEXT_HEADINGS = frozenset({"number", "source", "benchmark", "family", "stack", "subject", "table", ""})


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]], title: str | None = None) -> Any:
    """Build a table for the terminal: words left-aligned, numbers right-aligned."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _TEXT_HEADINGS else "right")
    for line in lines:
        table.add_row(*line)
    return table


def _print_calibrations(written: Mapping[str, Calibration], places: Mapping[str, Path]) -> None:
    headings = ("family", "stack", "fitted", "held out", "median", "MAPE", "bias", "total")
    for subject, calibration in written.items():
        lines = []
        for entry in calibration.entries:
            residual, forms = entry.residual, (".1%", ".1%", "+.1%", "+.1%")
            errors = [getattr(residual, name, None) for name in ("median_ape", "mape", "bias", "total_error")]
            shares = ["-" if error is None else format(error, form) for error, form in zip(errors, forms, strict=True)]
            lines.append((entry.family, entry.stack, str(entry.rows_fitted), str(entry.rows_held_out), *shares))
        report_console().print(_table(headings, lines, f"{calibration.device_or_system} -> {places[subject]}"))


@contextmanager
def _progress(count: int) -> Iterator[Callable[[Any], object]]:
    """Show a progress bar on stderr for ``count`` fits.

    Yields a function that is called with each fit, or its label, as it starts.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    terminal = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=terminal) as bar:
        task = bar.add_task("", total=count)
        started = 0

        def report(job: Any) -> None:
            nonlocal started
            label = job if isinstance(job, str) else job.label
            bar.update(task, completed=started, description=label)
            if not terminal.is_terminal:
                sys.stderr.write(f"[{started + 1}/{count}] {label}\n")
            started += 1

        yield report
        bar.update(task, completed=count, description="done")


def calibrate_device(
    *,
    device: str = "cuda:0",
    name: str | None = None,
    output: str | None = None,
    output_dir: str = ".",
    budget: float = 420.0,
    suites: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    largest: int = 16384,
    today: str | None = None,
) -> int:
    """Benchmark kernels on the local device and fit its calibration to the times (``paleo calibrate``).

    Parameters
    ----------
    device : str
        Device in torch's notation: ``cuda:0``, …; ``cpu`` for tests.
    name : str, optional
        Catalog name of the device; needed if the name that CUDA reports is unknown.
    output : str, optional
        Calibration file to write; by default ``<device>.yaml`` in `output_dir`.
    output_dir : str
        Folder of the tables ``<device>.<table>.csv``. Points that they already hold are not measured again, so an
        interrupted run can be continued.
    budget : float
        Time after which no further point is measured [s].
    suites, dtypes : sequence of str
        Suites of points and number formats to measure; the usual ones if empty.
    largest : int
        Largest dimension of a matrix.
    today : str, optional
        Date written into rows and entries (YYYY-MM-DD); today by default.

    Returns
    -------
    int
        The exit code.

    Raises
    ------
    SpecError
        If an argument is out of range, or the device is missing or unknown.
    """
    from rich.console import Console
    from rich.progress import Progress

    date = today or datetime.date.today().isoformat()
    folder = Path(output_dir)
    if not is_folder(folder):
        raise SpecError(f"--output-dir {output_dir}: no such folder")
    if not (budget > 0 and largest >= 1):
        raise SpecError(f"--budget {budget:g} and --largest {largest} must be above zero")
    measured = device_benchmark_runner(device, name, date)
    peaks = find_device(measured.name).peak
    chosen = tuple(dtypes) or tuple(dtype for dtype in ("fp32", "tf32", "fp16", "bf16") if dtype in peaks)
    chosen_points = benchmark_points(tuple(suites) or DEFAULT_SUITES, chosen, largest)
    tables = MeasurementFolder(folder, measured.name, measured.library)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=len(chosen_points))

        def report(point: BenchmarkPoint) -> None:
            bar.update(task, advance=1, description=point.table)

        written, failed = run_benchmarks(measured, chosen_points, tables, budget, report)
    for line in failed:
        sys.stderr.write(f"not measured: {line}\n")
    missing = sum(not tables.is_measured(point) for point in chosen_points) - len(failed)
    sys.stderr.write(f"{written} rows measured, {missing} left for another run; tables in {folder}\n")
    kernels = [str(path) for path in tables.files() if path.name.split(".")[-2] not in _UNFITTED_TABLES]
    where = output or str(folder / f"{measured.name}.yaml")
    return fit_tables(kernels, output=where, only=(measured.name,), today=date) if kernels else 0


def world_size() -> int:
    """Return the number of processes of this job from ``torchrun``'s environment variable; 1 without torchrun."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or not 1 <= len(text) <= 9:
        raise SpecError(
            f"WORLD_SIZE={text[:80]!r} in the environment: expected the number of processes, as torchrun sets"
        )
    return int(text)


def benchmark_collectives(
    *, device: str = "cuda", system: str | None = None, output_dir: str = ".", today: str | None = None
) -> int:
    """Benchmark collectives in a job that ``torchrun`` started, one process per GPU, and write a measured table.

    Parameters
    ----------
    device : str
        Kind of device, ``cuda`` or ``cpu``.
    system : str
        Name of the system in the catalog.
    output_dir : str
        Folder in which ``<system>.collective.csv`` is written, a table for ``--fit``.
    today : str, optional
        Date written into rows (YYYY-MM-DD); today by default.

    Returns
    -------
    int
        The exit code.

    Raises
    ------
    SpecError
        If no system is named.
    """
    if system is None:
        raise SpecError("under torchrun collectives are measured; say with --name which system of the catalog this is")
    known, torch = load_system(system).name, import_torch()
    tables = MeasurementFolder(Path(output_dir), known, "")
    date = today or datetime.date.today().isoformat()
    for point, row in measure_collectives(torch, device.partition(":")[0], known, date, collective_benchmarks):
        tables.append(point, row)
    return 0
