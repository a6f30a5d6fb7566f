"""Files of jobs: YAML files of trainings, searches, services and reinforcement learning, or the trace of a cluster."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from paleo.errors import SpecError, suggest_names
from paleo.files import read_bytes
from paleo.specs.loading import NonEmptyText, Spec, StrictBool, read_yaml, record_file_digest, validate_mapping
from paleo.units import Seconds, parse_quantity, parse_whole_number

#: Most jobs of a file, and most GPUs of one of them.
_MAX_JOBS, MAX_GPUS_PER_JOB = 900_000, 900_000
_MOST_BYTES = 500 * 1000 * 1000
#: Names of each column in public traces (Philly, Helios, Acme, Tiresias).
_TRACE_COLUMN_ALIASES: dict[str, tuple[str, ...]] = {
    "name": ("name", "job_id", "job", "jobid"),
    "arrival": ("arrival", "submit_time", "submitted_time", "submission_time"),
    "gpus": ("gpus", "gpu_num", "num_gpu", "num_gpus", "gpu"),
    "duration": ("duration", "duration_s", "runtime", "run_time"),
    "team": ("team", "user", "vc", "group"),
    "deadline": ("deadline",),
    "priority": ("priority",),
}
NumberOrText = Annotated[float | str, Field(union_mode="left_to_right")]


class JobSpec(Spec):
    """One job of a job file: a training, a search, a service, reinforcement learning, or a job of known run time.

    The kind follows from the keys: ``duration`` (a known run time), ``tune``, ``serve`` or ``rl``; otherwise the job is
    a training of ``model``.

    Parameters
    ----------
    name
        name of the job; others refer to it in `after`
    model
        network: a catalog name or a file
    arrival
        when the job is submitted
    deadline
        latest end, counted from the same zero as arrivals
    priority
        larger ones come first under the policy `priority`
    team
        who is charged under the policy `fair`
    preemptible
        whether the job may be stopped, resized and started again
    gpus
        GPUs: a number, a range such as `8..64` (the job is elastic), or auto
    after
        jobs that end before this one starts
    duration
        run time of a job whose speed is known
    tokens
        tokens of a training
    samples
        samples of a training
    epochs
        epochs of a training
    target
        task whose quality the training reaches, such as mlperf:bert
    run
        fields of the run, such as global_batch
    tune
        options of `paleo tune`: trials, method, max_tokens, …
    serve
        load of a service: rate, input, output, engine
    until
        end of a service, counted from the same zero as arrivals
    rl
        options of `paleo rl`: steps, rollouts, output, …
    """

    name: NonEmptyText = ""
    model: NonEmptyText | None = None
    arrival: Seconds = 0.0
    deadline: Seconds | None = None
    priority: float = 0.0
    team: NonEmptyText = ""
    preemptible: StrictBool = True
    gpus: Annotated[int | NonEmptyText, Field(union_mode="left_to_right")] = "auto"
    after: tuple[NonEmptyText, ...] = ()
    duration: Seconds | None = None
    tokens: NumberOrText | None = None
    samples: NumberOrText | None = None
    epochs: NumberOrText | None = None
    target: NonEmptyText | None = None
    run: dict[str, Any] = Field(default_factory=dict)
    tune: dict[str, Any] | None = None
    serve: dict[str, Any] | None = None
    until: Seconds | None = None
    rl: dict[str, Any] | None = None

    @field_validator("after", mode="before")
    @classmethod
    def _one_name_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _keys_belong_together(self) -> JobSpec:
        kinds = [name for name in ("duration", "tune", "serve", "rl") if getattr(self, name) is not None]
        if len(kinds) > 1:
            raise SpecError(f"{' and '.join(kinds)}: a job is of one kind; expected one of them")
        if self.model is None and kinds != ["duration"]:
            raise SpecError("model: missing; expected a network, or the duration of a job whose run time is known")
        if kinds == ["duration"] and self.gpus == "auto":
            raise SpecError("gpus: missing; expected a number for a job whose duration is known")
        if kinds == ["serve"] and self.until is None:
            raise SpecError("until: missing; expected the end of the service, such as 7d")
        if self.until is not None and self.until <= self.arrival:
            raise SpecError(f"until: {self.until:g} s is not after the arrival at {self.arrival:g} s")
        if self.deadline is not None and self.deadline <= self.arrival:
            raise SpecError(f"deadline: {self.deadline:g} s is not after the arrival at {self.arrival:g} s")
        if not math.isfinite(self.priority):
            raise SpecError(f"priority: {self.priority} is no number")
        self.gpu_range()
        return self

    @property
    def kind(self) -> str:
        """Kind of the job: trace, tune, serve, rl or train."""
        kinds = {"duration": "trace", "tune": "tune", "serve": "serve", "rl": "rl"}
        return next((word for name, word in kinds.items() if getattr(self, name) is not None), "train")

    def gpu_range(self) -> tuple[int, int] | None:
        """Return the smallest and the largest number of GPUs that the job may have; None for ``auto``.

        Raises
        ------
        SpecError
            If ``gpus`` is neither a number, a range nor ``auto``.
        """
        if self.gpus == "auto":
            return None
        first, dots, last = str(self.gpus).partition("..")
        low, high = parse_whole_number(first, MAX_GPUS_PER_JOB), parse_whole_number(last or first, MAX_GPUS_PER_JOB)
        if isinstance(self.gpus, bool) or not low or not high or low > high or (dots and not last):
            raise SpecError(f"gpus: {self.gpus!r:.60} is no number of GPUs; expected 8, a range such as 8..64, or auto")
        return low, high


class FleetSpec(Spec):
    """Content of a job file: the list of its jobs."""

    name: NonEmptyText = "fleet"
    jobs: list[JobSpec] = Field(min_length=1)


def read_jobs(path: str | Path) -> tuple[JobSpec, ...]:
    """Read the jobs of a YAML file or of a trace (CSV).

    Parameters
    ----------
    path : str or Path
        File with jobs (YAML) or a trace of jobs (CSV).

    Returns
    -------
    tuple of JobSpec
        Jobs in the order of the file.

    Raises
    ------
    SpecError
        If the file cannot be read or a job contradicts itself; the message names file, job and key.
    """
    place = Path(path)
    if place.name.lower().endswith((".csv", ".csv.gz")):
        return _checked_with_names(tuple(_trace_jobs(place)), path)
    return _checked_with_names(validate_mapping(FleetSpec, {"name": place.stem, **read_yaml(path)}, path).jobs, path)


def _trace_jobs(path: Path) -> Iterator[JobSpec]:
    """Yield the jobs in a table with submission times, GPUs and durations [s]; times may also be dates."""
    content = read_bytes(path, most=_MOST_BYTES, expected="a table of jobs")
    record_file_digest(path, content)
    try:
        rows = list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{path}: is no table of text ({str(error)[:100]}); expected CSV in UTF-8") from None
    if not rows:
        header = "a header with arrival (or submit_time), gpus, duration"
        raise SpecError(f"{path}: has no jobs; expected {header}, and rows")
    if len(rows) > _MAX_JOBS:
        raise SpecError(f"{path}: {len(rows):,} jobs; expected {_MAX_JOBS:,} or fewer")
    named = {str(name).strip().lower(): name for name in rows[0] if name}
    aliases = _TRACE_COLUMN_ALIASES.items()
    columns = {key: next((named[name] for name in names if name in named), None) for key, names in aliases}
    for key in ("arrival", "gpus", "duration"):
        if columns[key] is None:
            raise SpecError(f"{path}: column {key} is missing; expected one of {', '.join(_TRACE_COLUMN_ALIASES[key])}")
    arrivals = [_time_in_cell(path, line, row, columns["arrival"]) for line, row in enumerate(rows, 2)]
    dated = any(isinstance(_number_or_text(row.get(str(columns["arrival"]))), str) for row in rows[:1])
    zero = min(arrivals) if dated else 0.0
    for line, (row, arrival) in enumerate(zip(rows, arrivals, strict=True), 2):
        yield _job(path, line, row, columns, arrival - zero)


def _job(path: Path, line: int, row: Mapping[str, str], columns: Mapping[str, str | None], arrival: float) -> JobSpec:
    """Build the job in one row of a trace, without pydantic's validation, so that a hundred thousand rows load fast."""
    where = f"{path}: line {line}"
    gpus = _whole(where, str(columns["gpus"]), row)
    duration = _number(where, str(columns["duration"]), row)
    for name, value in (("arrival", arrival), ("duration", duration)):
        if not 0 <= value <= 1e10:
            raise SpecError(f"{where}: {columns[name]}: {value:g} s; expected a time of zero or more, below 1e10 s")
    cells = {key: row.get(column) if column else None for key, column in columns.items()}
    deadline = _number(where, str(columns["deadline"]), row) if cells["deadline"] else None
    if deadline is not None and not arrival < deadline <= 1e10:
        raise SpecError(f"{where}: {columns['deadline']}: {deadline:g} s is not after the arrival at {arrival:g} s")
    priority = _number(where, str(columns["priority"]), row) if cells["priority"] else 0.0
    return JobSpec.model_construct(
        name=str(cells["name"] or f"line {line}")[:100], arrival=arrival, gpus=gpus, duration=duration,
        team=str(cells["team"] or ""), deadline=deadline, priority=priority,
    )  # fmt: skip


def _number_or_text(text: str | None) -> float | str:
    """Convert a text to a number, or return it unchanged if it is none."""
    try:
        return float(str(text))
    except ValueError:
        return str(text).strip()


def _time_in_cell(path: Path, line: int, row: Mapping[str, str], column: str | None) -> float:
    """Return a time in a cell as seconds; the cell holds a number [s], a text with a unit, or a date."""
    value = _number_or_text(row.get(str(column)))
    if isinstance(value, float):
        if math.isfinite(value):
            return value
    else:
        try:
            return datetime.fromisoformat(value).replace(tzinfo=None).timestamp()
        except (ValueError, OverflowError, OSError):
            pass
    return _number(f"{path}: line {line}", str(column), row)


def _number(where: str, column: str, row: Mapping[str, str]) -> float:
    """Return the number in a cell, such as seconds; raise SpecError, which names the cell, for other texts."""
    value = _number_or_text(row.get(column))
    if isinstance(value, str):
        try:
            value = parse_quantity(value, "time")
        except SpecError:
            value = math.nan
    if not math.isfinite(value):
        raise SpecError(f"{where}: {column}: {str(row.get(column))[:60]!r} is no number")
    return value


def _whole(where: str, column: str, row: Mapping[str, str]) -> int:
    """Return the whole number in a cell, such as GPUs; raise SpecError, which names the cell, for other texts."""
    value = _number_or_text(row.get(column))
    if isinstance(value, str) or not math.isfinite(value) or value != int(value) or not 1 <= value <= MAX_GPUS_PER_JOB:
        raise SpecError(f"{where}: {column}: {str(row.get(column))[:60]!r}; expected a number of GPUs of 1 or more")
    return int(value)


def jobs_from_mappings(jobs: Sequence[Mapping[str, Any]]) -> tuple[JobSpec, ...]:
    """Build validated jobs from mappings with the keys of a job file.

    Parameters
    ----------
    jobs : Sequence[Mapping[str, Any]]
        One mapping a job.

    Returns
    -------
    tuple of JobSpec
        The jobs.

    Raises
    ------
    SpecError
        If a mapping is not valid.
    """
    if isinstance(jobs, Mapping) or not all(isinstance(job, Mapping) for job in jobs):
        raise SpecError("jobs: expected a path, or a list of mappings with the keys of a job file")
    return _checked_with_names(validate_mapping(FleetSpec, {"jobs": [dict(job) for job in jobs]}, "jobs").jobs, "jobs")


def _checked_with_names(jobs: Sequence[JobSpec], where: str | Path) -> tuple[JobSpec, ...]:
    """Name jobs that have no name, and check that names are unique and that dependencies exist and form no cycle."""
    named = tuple(job if job.name else job.model_copy(update={"name": f"job {n + 1}"}) for n, job in enumerate(jobs))
    # Check that names of jobs are unique and that predecessors exist and form no circle.
    numbers: dict[str, int] = {}
    for number, job in enumerate(named):
        if job.name in numbers:
            raise SpecError(f"{where}: jobs: the name {job.name!r:.60} occurs twice; expected one job of each name")
        numbers[job.name] = number
    for job in named:
        for name in job.after:
            if name not in numbers:
                nearest = suggest_names(name, numbers)
                raise SpecError(f"{where}: job {job.name!r:.60}: after: no job {name!r:.60}; {nearest}")
    remaining = {job.name: set(job.after) for job in named if job.after}
    while remaining:
        ready = [name for name, before in remaining.items() if not before & remaining.keys()]
        if not ready:
            circle = ", ".join(sorted(remaining)[:5])
            raise SpecError(f"{where}: after: jobs wait for each other in a circle: {circle:.200}")
        for name in ready:
            del remaining[name]
    return named
