"""``paleo calibrate --fit FILE…`` fits measured tables; ``paleo calibrate`` measures a device first."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paleo.calibrate import spreads, waiting
from paleo.calibrate.files import (
    LEAST_ROWS,
    Fit,
    asked_alone,
    calibrations,
    fit_each,
    fits,
    jobs,
    skipped_rows,
    yaml_text,
)
from paleo.calibrate.links import LEAST_STEPS as LEAST_LINKS
from paleo.calibrate.links import (
    asked_for_links,
    fit_links,
    link_jobs,
    numbers,
)
from paleo.calibrate.measure import Tables, bench, import_torch, measure_all, measure_collectives
from paleo.calibrate.microbenchmarks import USUAL, collective_points, points
from paleo.calibrate.power import asked_for_power, fit_power
from paleo.calibrate.software import (
    LEAST_STEPS,
    fit_software,
    software_jobs,
    software_text,
)
from paleo.calibrate.tasks import asked_for_tasks, fit_tasks, is_convergence
from paleo.errors import SpecError
from paleo.files import checked_output, write_text
from paleo.specs.device import find_device
from paleo.specs.system import load_system
from paleo.step.interval import INTERVALS
from paleo.units import counted
from paleo.validate.kinds.base import read_table
from paleo.validate.report import console

if TYPE_CHECKING:
    import pandas as pd

    from paleo.calibrate.files import FitJob
    from paleo.calibrate.links import (
        LinkJob,
        LinksFitted,
    )
    from paleo.calibrate.measure import Bench
    from paleo.calibrate.microbenchmarks import Point
    from paleo.calibrate.software import (
        SoftwareFitted,
        SoftwareJob,
    )
    from paleo.specs.calibration import Calibration, Residual
    from paleo.validate.residual import ResidualErrors as FittedResidual

#: Tables that no family is fitted to: they inform.
UNFITTED = ("copies",)
#: Columns of a source's coverage that are printed, and how.
COVERAGE = (("inside", ".0%"), ("half_width", ".3f"))


def fit(
    files: Sequence[str],
    *,
    output: str | None = None,
    output_dir: str | None = None,
    only: Sequence[str] = (),
    free: Sequence[str] = (),
    hold_out: Sequence[str] = (),
    today: str | None = None,
) -> int:
    """Fit the tables and write one calibration file a device or system, or from tables of steps one software profile
    each, one calibration file of a system's links each, one of the intervals of steps, or the profiles whose hosts wait
    for counts of tokens; the exit code.

    ``only`` names devices, systems or profiles, ``free`` the numbers of those that are fitted, ``hold_out`` sources
    that are kept back (``--only waiting``). ``output`` is one file, for tables of one subject; ``output_dir`` a folder
    for one file a subject, where entries of other families are kept. Errors in the input raise PaleoError.
    """
    if not files:
        raise SpecError("--fit: no file is named; expected measured tables, such as measurements/gemm.csv.gz")
    if output is not None and output_dir is not None:
        raise SpecError("-o and --output-dir exclude each other: one file, or one file a device in a folder")
    if hold_out and waiting.ASKED not in only:
        raise SpecError(f"--hold-out {hold_out[0]}: keeps sources back from --only {waiting.ASKED}, from no other fit")
    date = today or datetime.date.today().isoformat()
    if asked_alone(spreads.ASKED, only, free):
        return _fit_intervals(files, output, output_dir, date)
    if asked_alone(waiting.ASKED, only, free):
        return _fit_waiting(files, hold_out, output, output_dir, date)
    if all(asked_for_tasks(file) for file in files):
        return _fit_tasks(files, output_dir, date)
    if all(asked_for_power(file) for file in files):
        boards = fit_power(files, only, date)
        _write_and_print(boards, _places(sorted({board.subject for board in boards}), output, output_dir), output)
        return 0
    if any(asked_for_links(file, only) for file in files):
        return _fit_links(files, only, output, output_dir, free, date)
    steps = [job for file in files for job in software_jobs(file, only)]
    if steps:
        if any(fits(file) for file in files):
            raise SpecError("tables of steps and of kernels are fitted one after the other, not in one call")
        return _fit_steps(steps, output, output_dir, free, date)
    if free:
        raise SpecError(f"--free {free[0]}: names numbers of software profiles; the tables hold no steps to fit")
    return _fit_kernels(files, only, output, output_dir, date)


def _fit_kernels(
    files: Sequence[str], only: Sequence[str], output: str | None, output_dir: str | None, date: str
) -> int:
    for file in files:
        if not fits(file):
            sys.stderr.write(f"{file}: no family is fitted to such a table\n")
    work = jobs(files, only)
    if not work:
        raise SpecError(f"{files[0]}: no row can be fitted; `paleo validate` says why")
    places = _places(sorted({job.subject for job in work}), output, output_dir)
    kept = places[min(places)].parent if output is None else None
    fitted: list[Fit] = []
    with _progress(len(work)) as report:
        for fits_of_job in fit_each(work, date, report):
            fitted += fits_of_job
            written = _write_calibrations(fitted, places, kept)
    for subject, calibration in written.items():
        _print_summary(calibration, places[subject])
    _say_untested(written.values())
    _say_skipped(skipped_rows(files))
    return 0


def _say_untested(written: Iterable[Calibration]) -> None:
    """A line for each entry of which no row was held out."""
    for entry in (entry for calibration in written for entry in calibration.entries if entry.residual is None):
        sys.stderr.write(
            f"warning: {entry.family}, {entry.stack}: {counted(entry.rows_fitted, 'row')} for "
            f"{len(entry.parameters)} numbers, and none held out: {LEAST_ROWS} or more rows can be tested\n"
        )


def _say_skipped(rows: int) -> None:
    if rows:
        sys.stderr.write(f"{counted(rows, 'row')} left out, which cannot be predicted; `paleo validate` says why\n")


def _write_calibrations(fitted: Sequence[Fit], places: Mapping[str, Path], kept: Path | None) -> dict[str, Calibration]:
    """Write what has been fitted so far, one file a subject; each call writes the files whole."""
    files = calibrations(fitted, kept)
    for subject, calibration in files.items():
        write_text(places[subject], yaml_text(calibration))
    return files


def _write_and_print(fitted: Sequence[Fit], places: Mapping[str, Path], output: str | None) -> None:
    kept = places[min(places)].parent if output is None else None
    for subject, calibration in _write_calibrations(fitted, places, kept).items():
        _print_summary(calibration, places[subject])


def _fit_steps(
    work: Sequence[SoftwareJob], output: str | None, output_dir: str | None, free: Sequence[str], date: str
) -> int:
    enough = [job for job in work if job.steps >= LEAST_STEPS]
    for job in work:
        if job.steps < LEAST_STEPS:
            sys.stderr.write(
                f"{job.profile.name}: {job.steps} steps, too few to fit and test; {LEAST_STEPS} are needed\n"
            )
    if not enough:
        raise SpecError(f"no profile has the {LEAST_STEPS} steps that a fit needs")
    places = _places([job.profile.name for job in enough], output, output_dir)
    results = []
    with _progress(len(enough)) as report:
        for job in enough:
            report(job)
            results.append(fit_software(job, date, free))
            write_text(places[results[-1].after.name], software_text(results[-1].after))
    for job, result in zip(enough, results, strict=True):
        _print_profile(job, result, places[result.after.name])
    return 0


def _fit_links(
    files: Sequence[str],
    only: Sequence[str],
    output: str | None,
    output_dir: str | None,
    free: Sequence[str],
    date: str,
) -> int:
    if any(fits(file) for file in files):
        raise SpecError("tables of steps and of kernels are fitted one after the other, not in one call")
    work = link_jobs(files, only, free)
    enough = [job for job in work if job.steps >= LEAST_LINKS]
    for job in work:
        if job.steps < LEAST_LINKS:
            sys.stderr.write(
                f"{job.system.name}: {job.steps} steps that depend on a link, too few to fit and test; "
                f"{LEAST_LINKS} are needed\n"
            )
    if not enough:
        raise SpecError(f"no system has the {LEAST_LINKS} steps that depend on its links and that a fit needs")
    places = _places([job.system.name for job in enough], output, output_dir)
    results, refused = [], []
    kept = places[min(places)].parent if output is None else None
    with _progress(len(enough)) as report:
        for job in enough:
            report(job)
            try:
                results.append(fit_links(job, date, free))
            except SpecError as error:
                refused.append(str(error))
                continue
            _write_calibrations([fit for result in results if result.better for fit in result.fits], places, kept)
    if refused and not results:
        raise SpecError(" / ".join(refused))
    sys.stderr.write("".join(f"{line}\n" for line in refused))
    for result in results:
        _print_links(result, places[result.job.system.name])
    return 0 if any(result.better for result in results) else 1


def _print_links(result: LinksFitted, path: Path) -> None:
    from rich.table import Table

    table = Table()
    for heading in ("number", "before", "after", "± one sigma", ""):
        table.add_column(heading, justify="left" if heading in ("number", "") else "right")
    for row in numbers(result):
        table.add_row(*row)
    where = f"-> {path}" if result.better else "not written: the steps held out are not predicted better"
    terminal = console()
    terminal.print(f"links of {result.job.system.name} {where}")
    terminal.print(table)
    for word, residual in (("before", result.before), ("after", result.after)):
        terminal.print(f"on the {residual.rows} steps held out, {word}: {_errors(residual)}")
    if result.job.skipped:
        terminal.print(f"{result.job.skipped} rows could not be predicted; `paleo validate` says why")


def _fit_tasks(files: Sequence[str], output_dir: str | None, date: str) -> int:
    from paleo.calibrate.rounds import submissions_left_out

    code = fit_tasks(files, output_dir, date)
    for table in (read_table(file) for file in files):
        if not is_convergence(table.columns):
            _print_rounds(submissions_left_out(table))
    return code


def _print_rounds(submissions: pd.DataFrame) -> None:
    from rich.table import Table

    from paleo.calibrate.rounds import HEADINGS, error_lines, percent, right_order

    if submissions.empty:
        return
    table = Table(title="each round left out: mean errors of its submissions", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "benchmark" else "right")
    for line in error_lines(submissions):
        table.add_row(*line)
    terminal = console()
    terminal.print(table)
    share, pairs = right_order(submissions)
    terminal.print(f"pairs of two kinds of GPUs in the right order: {percent(share)} of {counted(pairs, 'pair')}")


def _fit_intervals(files: Sequence[str], output: str | None, output_dir: str | None, date: str) -> int:
    places = _places([INTERVALS], output, output_dir)
    with _progress(len(files) + 1) as report:
        result = spreads.fit_spreads(files, report)
    _write_and_print([Fit(INTERVALS, result.entry(files, date))], places, output)
    _print_coverage(result)
    return 0


def _print_coverage(result: spreads.SpreadsFitted) -> None:
    from rich.table import Table

    table = Table(title="sources of several rows: share inside, half-width (log)", title_justify="left")
    for heading in ("source", "rows", "fitted", "half-width", "left out", "half-width"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for (_, source), (_, alone) in zip(result.inside.iterrows(), result.tested.iterrows(), strict=True):
        shares = [f"{part[name]:{form}}" for part in (source, alone) for name, form in COVERAGE]
        table.add_row(str(source["source"]), str(source["rows"]), *shares)
    terminal = console()
    terminal.print(table)
    terminal.print(f"fitted: {spreads.verdict(result.inside)}")
    terminal.print(f"left out: {spreads.verdict(result.tested)}")


def _fit_waiting(
    files: Sequence[str], hold_out: Sequence[str], output: str | None, output_dir: str | None, date: str
) -> int:
    _places([], output, output_dir)
    with _progress(len(files) + 1) as report:
        result = waiting.fit_waiting(files, hold_out, report)
    profiles = result.profiles(files, date)
    if output is not None and len(profiles) > 1:
        names = ", ".join(profile.name for profile in profiles)
        raise SpecError(
            f"-o {output}: the power is that of {len(profiles)} profiles ({names}); name a folder with --output-dir"
        )
    places = _places([profile.name for profile in profiles], output, output_dir)
    for profile in profiles:
        write_text(places[profile.name], software_text(profile))
    _print_waiting(result, [places[profile.name] for profile in profiles])
    return 0


def _print_waiting(result: waiting.WaitingFitted, written: Sequence[Path]) -> None:
    from rich.table import Table

    table = Table(title="sources with the power that the others give", title_justify="left")
    for heading in ("source", "rows", "power", "MAPE", "bias", ""):
        table.add_column(heading, justify="left" if heading in ("source", "") else "right")
    for test in result.tests:
        errors, word = test.errors, "held out" if test.source in result.kept_back else ""
        shares = (f"{errors.rows}", f"{test.power:.3g}", f"{errors.mape:.1%}", f"{errors.bias:+.1%}")
        table.add_row(test.source, *shares, word)
    terminal = console(markup=False)
    before = ", ".join(f"{profile.name} {profile.host.waiting_power:g}" for profile in result.before)
    steps = counted(result.rows_fitted, "step")
    terminal.print(
        f"host.waiting_power: {result.power:.3g} by {steps}, one sigma {result.sigma:.0%} (before: {before})"
    )
    terminal.print(table)
    terminal.print(f"on the {result.residual.rows} steps left out: {_errors(result.residual)}")
    terminal.print(f"-> {', '.join(str(path) for path in written)}")


def _errors(residual: FittedResidual | Residual) -> str:
    shares = f"median {residual.median_ape:.1%}, MAPE {residual.mape:.1%}, bias {residual.bias:+.1%}"
    return shares if residual.total_error is None else f"{shares}, total {residual.total_error:+.1%}"


def _print_profile(job: SoftwareJob, result: SoftwareFitted, path: Path) -> None:
    from rich.table import Table

    fit_of_profile = result.after.fit
    if fit_of_profile is None:
        return
    table = Table()
    for heading in ("number", "before", "after"):
        table.add_column(heading, justify="left" if heading == "number" else "right")
    for name, value in result.numbers():
        table.add_row(name, *value)
    terminal = console(markup=False)
    rows = f"{fit_of_profile.rows_fitted} steps fitted, {fit_of_profile.rows_held_out} held out"
    terminal.print(f"{result.after.name} -> {path}: {rows}")
    terminal.print(table)
    terminal.print(f"on the {fit_of_profile.residual.rows} steps held out: {_errors(fit_of_profile.residual)}")
    if job.skipped:
        terminal.print(
            f"{job.skipped} rows left out: not predicted (`paleo validate` says why), or of software without a profile"
        )


def _places(subjects: Sequence[str], output: str | None, output_dir: str | None) -> dict[str, Path]:
    """The file of each subject; SpecError when it cannot be written."""
    if output is not None:
        if len(subjects) > 1:
            raise SpecError(
                f"-o {output}: the tables hold {len(subjects)} subjects ({', '.join(subjects[:6])}); choose one with "
                "--only, or name a folder with --output-dir"
            )
        return dict.fromkeys(subjects, checked_output(output, (".yaml", ".yml")))
    if output_dir is None:
        raise SpecError("--fit: nothing says where to write; name a file with -o, or a folder with --output-dir")
    folder = Path(output_dir)
    if not folder.is_dir():
        raise SpecError(f"--output-dir {output_dir}: no such folder")
    return {name: checked_output(folder / f"{name}.yaml", option="--output-dir") for name in subjects}


@contextmanager
def _progress(count: int) -> Iterator[Callable[[FitJob | SoftwareJob | LinkJob | str], object]]:
    """A progress bar on stderr; called with each job, or its label, as it starts."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    terminal = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=terminal) as bar:
        task = bar.add_task("", total=count)
        started = 0

        def report(job: FitJob | SoftwareJob | LinkJob | str) -> None:
            nonlocal started
            label = job if isinstance(job, str) else job.label
            bar.update(task, completed=started, description=label)
            if not terminal.is_terminal:
                sys.stderr.write(f"[{started + 1}/{count}] {label}\n")
            started += 1

        yield report
        bar.update(task, completed=count, description="done")


def _print_summary(calibration: Calibration, path: Path) -> None:
    from rich.table import Table

    table = Table(title=f"{calibration.subject} -> {path}", title_justify="left")
    for heading in ("family", "stack", "fitted", "held out", "median", "MAPE", "bias", "total"):
        table.add_column(heading, justify="left" if heading in ("family", "stack") else "right")
    for entry in calibration.entries:
        residual = entry.residual
        errors = () if residual is None else (residual.median_ape, residual.mape, residual.bias, residual.total_error)
        forms = zip(errors, (".1%", ".1%", "+.1%", "+.1%"), strict=False)
        shares = ["-" if error is None else format(error, form) for error, form in forms]
        shares = shares or ["-"] * 4
        table.add_row(entry.family, entry.stack, str(entry.rows_fitted), str(entry.rows_held_out), *shares)
    console().print(table)


def measure(
    *,
    device: str = "cuda:0",
    name: str | None = None,
    output: str | None = None,
    output_dir: str = ".",
    budget: float = 300.0,
    suites: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    largest: int = 16384,
    today: str | None = None,
) -> int:
    """Measure a device and fit what was measured; the exit code.

    Rows go to ``<device>.<table>.csv`` in ``output_dir``; points that these tables hold already are skipped, so that a
    run that was cut short, or had too small a ``budget`` [s], is taken up again. ``name`` is the device's catalog name
    where what CUDA reports is no alias of any; ``largest`` bounds the sizes.
    """
    date = today or datetime.date.today().isoformat()
    folder = Path(output_dir)
    if not folder.is_dir():
        raise SpecError(f"--output-dir {output_dir}: no such folder")
    if not (budget > 0 and largest >= 1):
        raise SpecError(f"--budget {budget:g} and --largest {largest} must be above zero")
    measured = bench(device, name, date)
    peaks = find_device(measured.name).peak
    chosen = tuple(dtypes) or tuple(dtype for dtype in ("fp32", "tf32", "fp16", "bf16") if dtype in peaks)
    chosen_points = points(tuple(suites) or USUAL, chosen, largest)
    tables = Tables(folder, measured.name, measured.library)
    written, failed = _measured_with_progress(measured, chosen_points, tables, budget)
    for line in failed:
        sys.stderr.write(f"not measured: {line}\n")
    missing = sum(not tables.is_measured(point) for point in chosen_points) - len(failed)
    sys.stderr.write(f"{written} rows measured, {missing} left for another run; tables in {folder}\n")
    return _fit_measured(tables, output or str(folder / f"{measured.name}.yaml"), measured.name, date)


def world_size() -> int:
    """Processes of this job, as ``torchrun`` says; 1 without it."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or not 1 <= len(text) <= 9:
        raise SpecError(
            f"WORLD_SIZE={text[:80]!r} in the environment: expected the number of processes, as torchrun sets"
        )
    return int(text)


def collectives(
    *, device: str = "cuda", system: str | None = None, output_dir: str = ".", today: str | None = None
) -> int:
    """Measure collectives in a job that ``torchrun`` started, one process a GPU; the exit code.

    Rows go to ``<system>.collective.csv`` in ``output_dir``; ``--fit`` fits them.
    """
    if system is None:
        raise SpecError("under torchrun collectives are measured; say with --name which system of the catalog this is")
    known, torch = load_system(system).name, import_torch()
    tables = Tables(Path(output_dir), known, "")
    measured = measure_collectives(
        torch, device.partition(":")[0], known, today or datetime.date.today().isoformat(), collective_points
    )
    for point, row in measured:
        tables.append(point, row)
    return 0


def _fit_measured(tables: Tables, output: str, name: str, date: str) -> int:
    kernels = [str(path) for path in tables.files() if path.name.split(".")[-2] not in UNFITTED]
    if not kernels:
        return 0
    return fit(kernels, output=output, only=(name,), today=date)


def _measured_with_progress(
    measured: Bench, chosen_points: Sequence[Point], tables: Tables, budget: float
) -> tuple[int, list[str]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=len(chosen_points))

        def report(point: Point) -> None:
            bar.update(task, advance=1, description=point.table)

        return measure_all(measured, chosen_points, tables, budget, report)
