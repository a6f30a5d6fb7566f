"""From measured tables to calibration files: fit every family of every device, and write one YAML for each.

The rows of one subject, family and way of timing are fitted together (its variants share all but the launch); kinds of
tables say where a search sets out and what their rows cannot tell (``TableKind.fit_plan``). Everything is
deterministic, so that the same tables give the same files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import yaml

from paleo.calibrate.fit import Rows, count, fit, split
from paleo.errors import SpecError, near
from paleo.specs.calibration import Calibration, Entry
from paleo.specs.loading import parse_yaml, validate
from paleo.units import counted
from paleo.validate.kinds.base import KINDS, groups, measured_time, read_table, text
from paleo.validate.runner import named_table
from paleo.validate.steps.base import StepTable
from paleo.validate.tables import table_of

if TYPE_CHECKING:
    from paleo.calibrate.fit import FitResult, FittedBin
    from paleo.validate.kinds.base import FitPlan, TableKind
    from paleo.validate.residual import ResidualErrors

#: Order of the fits: stacks with many rows first, since others set out from them.
ORDER = ("graph", "kernel", "eager", "back-to-back")
#: Fewer rows than this are all fitted, none held out.
LEAST_ROWS = 12
#: Significant digits of what is written.
DIGITS, ERROR_DIGITS = 5, 3
HEADER = "# Fitted by `paleo calibrate --fit` to measured tables; residuals are those of rows that were not fitted.\n"


@dataclass(frozen=True)
class FitJob:
    """Rows that are fitted together, with their subject, family and stack."""

    kind: TableKind[Any]
    file: str
    subject: str
    family: str
    stack: str
    rows: tuple[Rows, ...]

    @property
    def label(self) -> str:
        """For people: subject, family, stack and the count of rows."""
        return f"{self.subject} {self.family} {self.stack} ({count(self.rows)} rows)"


@dataclass(frozen=True)
class Fit:
    """One entry of a calibration file, and the subject that it belongs to."""

    subject: str
    entry: Entry


def jobs(files: Iterable[str | Path], only: Sequence[str] = ()) -> list[FitJob]:
    """What there is to fit in the tables, in the order of the fits; ``only`` names subjects."""
    fitted = [job for file in files if fits(file) for job in _jobs_of(file)]
    subjects = {job.subject for job in fitted}
    for name in only:
        if name not in subjects:
            raise SpecError(f"the tables have no rows of {name!r} to fit; {near(name, subjects)}")
    chosen = [job for job in fitted if not only or job.subject in only]
    return sorted(chosen, key=lambda job: (_order(job.stack), job.family, job.subject))


def _order(stack: str) -> int:
    return ORDER.index(stack) if stack in ORDER else len(ORDER)


def fits(file: str | Path) -> bool:
    """Whether a table is of a kind that families are fitted to; SpecError where it cannot be read."""
    columns = read_table(file).columns
    try:
        name = table_of(columns).name
    except SpecError:
        return False
    return name in KINDS and KINDS[name].calibrates


def _jobs_of(file: str | Path) -> Iterator[FitJob]:
    frame = sound_rows(file)
    kind = KINDS[table_of(frame.columns).name]
    together: dict[tuple[str, str, str], list[Rows]] = {}
    for group in groups(kind, kind.prepared(frame)):
        figures = kind.figures(group.subject, group.dtype, group.compute)
        key = (kind.traits(figures)[0], group.family, group.stack.partition("/")[0])
        rows = Rows(group.frame, figures, group.stack, measured_time(group.frame))
        together.setdefault(key, []).append(rows)
    for (subject, family, stack), rows_of in together.items():
        yield FitJob(kind, Path(file).name, subject, family, stack, tuple(rows_of))


def asked_alone(subject: str, only: Sequence[str], free: Sequence[str]) -> bool:
    """Whether ``--only`` names ``subject``, which is fitted by itself; SpecError where it names something else, too, or
    numbers to free."""
    if subject not in only:
        return False
    if len(only) > 1 or free:
        named = ", ".join(
            [*(f"--only {name}" for name in only if name != subject), *(f"--free {name}" for name in free)]
        )
        raise SpecError(f"--only {subject}: it is fitted by itself, all its numbers at once, not with {named}")
    return True


def steps_table(file: str | Path, purpose: str, report: Callable[[str], object]) -> tuple[StepTable, pd.DataFrame]:
    """The kind and the rows of a table of steps, after ``report`` is told its name; SpecError with the ``purpose`` for
    any other table."""
    frame = read_table(file).reset_index(drop=True)
    table = table_of(frame.columns)
    if not isinstance(table, StepTable):
        raise SpecError(f"{file}: no table of steps, which {purpose}")
    report(f"{Path(file).name} ({counted(len(frame), 'row')})")
    return table, frame


def sound_rows(file: str | Path) -> pd.DataFrame:
    """The rows that `paleo validate` predicts and compares, too; others are no reason to fit nothing."""
    frame = read_table(file).reset_index(drop=True)
    table = named_table(file, frame)
    sound: pd.DataFrame = frame[(table.predict(frame).reasons == "") & np.isfinite(table.measured(frame))]
    return sound


def skipped_rows(files: Iterable[str | Path]) -> int:
    """How many rows of the tables that are fitted are not sound."""
    return sum(len(read_table(file)) - len(sound_rows(file)) for file in files if fits(file))


def fit_each(
    work: Sequence[FitJob], date: str, report: Callable[[FitJob], object] = lambda job: None
) -> Iterator[list[Fit]]:
    """Fits job after job and yields each job's fits when they are ready; later jobs may start from earlier results."""
    fitted: dict[tuple[str, str, str], Any] = {}
    for job in work:
        report(job)
        result = fitted_job(job, fitted)
        fitted |= {(job.subject, job.family, stack): values for stack, values in result.parameters.items()}
        yield [Fit(job.subject, entry) for entry in _entries(job, result, date)]


def fitted_job(job: FitJob, fitted: Mapping[tuple[str, str, str], Any]) -> FitResult[Any]:
    """The fit of one job by its kind's plan."""
    plan: FitPlan = job.kind.fit_plan(job.subject, job.family, job.stack, job.rows[0].figures, fitted)
    return fit(
        job.kind, job.rows, plan.start, alternatives=plan.alternatives, per_stack=plan.per_stack, fixed=plan.fixed,
        training_rows=plan.training_rows, starts=plan.starts, prior=plan.prior, hold_out=_divisible(job),
    )  # fmt: skip


def _divisible(job: FitJob) -> bool:
    """Whether all three parts of a split would have rows."""
    parts = [split(rows.frame, job.kind.configuration) for rows in job.rows]
    together = np.concatenate(parts)
    return len(together) >= LEAST_ROWS and all((together == part).any() for part in range(3))


def _entries(job: FitJob, result: FitResult[Any], date: str) -> Iterator[Entry]:
    for stack, parameters in result.parameters.items():
        frame = pd.concat([rows.frame for rows in job.rows if rows.stack == stack])
        yield entry_of(job.family, stack, job.file, frame, dataclasses.asdict(parameters), result, date)


def entry_of(
    family: str,
    stack: str,
    file: str,
    frame: pd.DataFrame,
    parameters: Mapping[str, float],
    result: FitResult[Any],
    date: str,
) -> Entry:
    """The entry of one family and stack that was fitted to the rows of a frame."""
    residual, tested = result.residual_by_stack[stack], result.rows_held_out > 0
    untested = f"{counted(residual.rows, 'row')} fitted, none held out (MAPE there {residual.mape:.3f})"
    return Entry(
        family=family,
        stack=stack,
        source=f"{file} ({', '.join(sorted(set(text(frame, 'source')) - {''}))})",
        date=date,
        library=_library(frame),
        rows_fitted=result.rows_fitted,
        rows_held_out=residual.rows if tested else 0,
        parameters={name: rounded(value) for name, value in parameters.items()},
        uncertainty=_uncertainty(result.uncertainty, stack),
        residual=rounded_residual(residual) if tested and residual.rows else None,
        interval=_interval(result.interval_by_stack[stack]),
        notes=None if tested else untested,
    )


def _library(frame: pd.DataFrame) -> str | None:
    """The libraries of the rows, the most frequent first."""
    names = text(frame, "library")
    return "; ".join(names[names != ""].value_counts().index[:3])[:200] or None


def _uncertainty(sigma: Mapping[str, float], stack: str) -> dict[str, float]:
    stack_sigma = {name: value for name, value in sigma.items() if "[" not in name or name.endswith(f"[{stack}]")}
    return {name.partition("[")[0]: rounded(value, ERROR_DIGITS) for name, value in stack_sigma.items()}


def rounded_residual(errors: ResidualErrors) -> dict[str, float]:
    """Fields of a residual for YAML, errors rounded to `ERROR_DIGITS` significant digits."""
    return {
        name: value if name == "rows" else rounded(value, ERROR_DIGITS)
        for name, value in dataclasses.asdict(errors).items()
    }


def _interval(bins: Sequence[FittedBin]) -> tuple[dict[str, float], ...]:
    """Bins as data, the last without an end; each is stretched to hold the prediction itself."""
    return tuple(
        {
            **({} if math.isinf(interval.up_to_s) else {"up_to_s": rounded(interval.up_to_s, 4)}),
            "low": rounded(min(interval.low, 1.0), 4),
            "high": rounded(max(interval.high, 1.0), 4),
        }
        for interval in bins
    )


def rounded(value: float, digits: int = DIGITS) -> float:
    """``value`` rounded to ``digits`` significant digits."""
    return float(f"{value:.{digits}g}")


def calibrations(fits: Sequence[Fit], folder: Path | None = None) -> dict[str, Calibration]:
    """One calibration a subject.

    Entries that its file in ``folder`` has of other families and stacks are kept, and so are people's notes on entries.
    """
    out = {}
    for subject in sorted({fitted.subject for fitted in fits}):
        new = {(fitted.entry.family, fitted.entry.stack): fitted.entry for fitted in fits if fitted.subject == subject}
        kept = _existing(folder / f"{subject}.yaml") if folder else {}
        for key in kept.keys() & new.keys():
            new[key] = new[key].model_copy(update={"notes": new[key].notes or kept[key].notes})
        entries = sorted((kept | new).items())
        out[subject] = Calibration(name=subject, subject=subject, entries=tuple(entry for _, entry in entries))
    return out


def _existing(path: Path) -> dict[tuple[str, str], Entry]:
    if not path.is_file():
        return {}
    data = parse_yaml(path.read_text(encoding="utf-8"), where=path)
    calibration = validate(Calibration, {"name": path.stem, **data}, path)
    return {(entry.family, entry.stack): entry for entry in calibration.entries}


def yaml_text(calibration: Calibration) -> str:
    """A calibration as the text of its file."""
    entries = [entry.model_dump(exclude_defaults=True, mode="json") for entry in calibration.entries]
    body = yaml.safe_dump(
        {"subject": calibration.subject, "entries": entries}, sort_keys=False, width=118, allow_unicode=True
    )
    return HEADER + body
