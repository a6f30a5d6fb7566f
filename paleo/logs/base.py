"""Readers of training logs (Megatron-LM, NeMo, torchtitan, …) and of nccl-tests logs.

A module of this folder registers the reader of one kind of log::

    READERS.register("torchtitan")(Reader(...))

A reader extracts values from single lines; the lines of one step are joined to a `StepRecord`. Values are in SI units.
Logs of nccl-tests have one line for each payload, with out-of-place and in-place times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from paleo.errors import SpecError, suggest_names
from paleo.files import GZIP_MAGIC, require_regular_file
from paleo.registry import Registry
from paleo.units import MICROSECOND, with_noun

#: Most lines of a log that are read, most characters of a line, and of all lines. Ten steps are enough for an audit.
_MAX_LOG_LINES, _MAX_LINE_CHARACTERS, MAX_LOG_CHARACTERS = 200_000, 4_096, 2**28
#: Fewest records of steps by which a kind of log is recognised.
_MIN_LOGGED_STEPS = 3
#: Terminal codes for colours, which frameworks write into their logs between words.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Values that a training log gives for one step; values that the log does not give are None or empty.

    ``seconds`` is the step time [s], ``tokens_per_s`` the throughput of one GPU, ``global_batch`` the samples of the
    step, and ``memory`` the peak of allocated memory [byte]. ``slowest_rank_parts`` holds the time of parts of the step
    (compute, exchange, optimizer) on the slowest rank [s], ``fastest_rank_parts`` the same on the fastest rank.
    """

    seconds: float | None = None
    tokens_per_s: float | None = None
    global_batch: float | None = None
    memory: float | None = None
    slowest_rank_parts: Mapping[str, float] = field(default_factory=dict)
    fastest_rank_parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingLogReader:
    """Reader of one framework's training log.

    ``step_pattern`` matches the line that starts (or is) the record of a step. ``values_of_line`` reads fields of
    `StepRecord` from a line. ``reference`` is the source of the format.
    """

    step_pattern: re.Pattern[str]
    values_of_line: Callable[[str], Mapping[str, object]]
    reference: str


TRAINING_LOG_READERS: Registry[TrainingLogReader] = Registry("kind of log", "paleo.logs")


@dataclass(frozen=True, slots=True)
class TrainingLog:
    """Content of a training log: its steps in order and the framework that wrote the log (``kind``).

    ``remarks`` are warnings that the steps may not come from one undisturbed run.
    """

    kind: str
    steps: tuple[StepRecord, ...]
    remarks: tuple[str, ...] = ()


def read_log_lines(path: str | Path) -> list[str]:
    """Read the lines of a log file without terminal colours; very long lines are truncated, very long files are cut.

    Parameters
    ----------
    path : str | Path
        Path of the log.

    Returns
    -------
    list of str
        Lines.

    Raises
    ------
    SpecError
        If the file cannot be read as text.
    """
    place = Path(path)
    try:
        require_regular_file(place, "a log as text")
        with place.open("rb") as file:
            if file.read(2) == GZIP_MAGIC:
                raise SpecError(f"{place}: is compressed (gzip); expected a log as text: gunzip it first")
        with place.open(encoding="utf-8", errors="replace") as stream:
            return list(_first_lines(stream))
    except OSError as error:
        raise SpecError(f"{place}: {error.strerror}") from None


def _first_lines(stream: TextIO) -> Iterator[str]:
    """Yield the first lines of a file, up to a limited number of lines and characters."""
    begins, lines, characters = True, 0, 0
    while (
        lines < _MAX_LOG_LINES and characters < MAX_LOG_CHARACTERS and (piece := stream.readline(_MAX_LINE_CHARACTERS))
    ):
        characters += len(piece)
        if begins:
            lines += 1
            yield _COLOURS.sub("", piece.rstrip("\n"))
        begins = piece.endswith("\n")


def read_log(path: str | Path) -> TrainingLog:
    """Read the steps of a training log of any registered framework, which is recognised by its lines.

    Parameters
    ----------
    path : str | Path
        Path of the log.

    Returns
    -------
    TrainingLog
        Steps, and the kind of log.

    Raises
    ------
    SpecError
        If no registered reader finds `_MIN_LOGGED_STEPS` steps.
    """
    lines = read_log_lines(path)
    logs = [TrainingLog(kind, tuple(_records(reader, lines))) for kind, reader in TRAINING_LOG_READERS.items()]
    best = max(logs, key=lambda log: len(log.steps))
    if len(best.steps) < _MIN_LOGGED_STEPS:
        kinds = ", ".join(name for name, _ in TRAINING_LOG_READERS.items())
        raise SpecError(
            f"{path}: no steps of a training were found; expected at least {_MIN_LOGGED_STEPS} of {kinds}, or as many "
            "payloads of nccl-tests"
        )
    reader = TRAINING_LOG_READERS[best.kind]
    return replace(best, remarks=tuple(_remarks([line for line in lines if reader.step_pattern.search(line)])))


#: Patterns for the number of a step, and for signs that a step was lost.
_STEP_NUMBER = re.compile(r"\b(?:iteration|step|global_step|batch)\b\W{0,16}(\d{1,12})\b", re.IGNORECASE)
_LOST = re.compile(r"number of (?:skipped|nan) iterations:\s*0*([1-9]\d{0,8})\b", re.IGNORECASE)
_NO_NUMBER = re.compile(r"\b(?:loss|grad_norm|grad norm)\b\W{1,4}(?:nan|[-+]?inf)\b", re.IGNORECASE)


def _remarks(lines: list[str]) -> Iterator[str]:
    """Yield warnings if a log reports skipped or NaN steps, or if step numbers go back as after a restart."""
    lost = sum(_LOST.search(line) is not None or _NO_NUMBER.search(line) is not None for line in lines)
    if lost:
        yield f"{lost} of {with_noun(len(lines), 'record')} report skipped steps or values that are not a number (NaN)"
    numbers = [int(match[1]) for match in map(_STEP_NUMBER.search, lines) if match is not None]
    back = sum(later < earlier - 1 for earlier, later in pairwise(numbers))
    if back:
        times = with_noun(back, "time")
        yield f"numbers of steps go back {times}: the file holds several runs, or one that was resumed"


def _records(reader: TrainingLogReader, lines: list[str]) -> Iterator[StepRecord]:
    """Yield one record per step of a log.

    It holds the values of the line that begins the step and of the lines up to the next step.
    """
    current: dict[str, object] | None = None
    for line in lines:
        if reader.step_pattern.search(line):
            if current:
                yield _record(current)
            current = {}
        if current is not None:
            for name, value in reader.values_of_line(line).items():
                current[name] = {**_mapping(current.get(name)), **value} if isinstance(value, Mapping) else value
    if current:
        yield _record(current)


def _record(stated: Mapping[str, object]) -> StepRecord:
    return StepRecord(**stated)  # type: ignore[arg-type]


def _mapping(value: object) -> Mapping[str, float]:
    return value if isinstance(value, Mapping) else {}


def matched_number(pattern: re.Pattern[str], line: str, unit: float = 1.0) -> float | None:
    """Extract the number that a pattern finds in a line of a log, if the number is positive.

    Parameters
    ----------
    pattern : re.Pattern[str]
        Pattern with a group for the number, which may have commas between thousands.
    line : str
        Line of the log.
    unit : float, optional
        SI value of the number's unit, by which the number is multiplied.

    Returns
    -------
    float, optional
        The number in SI units; None if the pattern finds none above zero.
    """
    match = pattern.search(line)
    return None if match is None else parse_positive_number(match.group(1), unit)


def parse_positive_number(text: str, unit: float = 1.0) -> float | None:
    """Parse a positive number of a log and convert it to SI units.

    Parameters
    ----------
    text : str
        The text, with or without commas between thousands.
    unit : float, optional
        SI value of the number's unit, by which the number is multiplied.

    Returns
    -------
    float, optional
        The number in SI units; None if the text is no positive finite number.
    """
    try:
        value = float(text.replace(",", "")) * unit
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def without_missing_values(**values: float | None) -> dict[str, object]:
    """Collect the values that a log line gives, as a dict: all keyword arguments that are not None.

    Parameters
    ----------
    **values : float, optional
        Fields of `StepRecord`; None for values that the line lacks.

    Returns
    -------
    dict of str to object
        Values by field.
    """
    return {name: value for name, value in values.items() if value is not None}


#: Collective operation that each program of nccl-tests times.
NCCL_TESTS_PROGRAMS = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "alltoall_perf": "all_to_all",
    "broadcast_perf": "broadcast",
    "reduce_perf": "reduce",
}
#: Fewest payloads by which a log of nccl-tests is recognised.
_MIN_PAYLOADS = 3
_ROW = re.compile(r"^\s*(\d+)\s+\d+\s+\w+\s+\w+\s+(?:-?\d+\s+)?([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+\S+\s+([\d.]+)\s")
_RANK = re.compile(r"#\s+Rank\s+(\d{1,9})\s")
_PROGRAM = re.compile(rf"\b({'|'.join(NCCL_TESTS_PROGRAMS)})\b")


@dataclass(frozen=True, slots=True)
class NcclTestsLog:
    """Content of an nccl-tests log: payloads [byte], and the shorter of the in-place and out-of-place times [s].

    ``operation`` and ``ranks`` are None if the log does not state them. ``run_count`` is the number of runs in the log.
    """

    payloads: tuple[float, ...]
    seconds: tuple[float, ...]
    operation: str | None
    ranks: int | None
    run_count: int = 1


def read_nccl_tests_log(path: str | Path) -> NcclTestsLog | None:
    """Read the payloads and times of a log of nccl-tests.

    Parameters
    ----------
    path : str | Path
        Path of the log.

    Returns
    -------
    NcclTestsLog, optional
        Payloads [byte] and times [s]; None for another kind of log.
    """
    lines = read_log_lines(path)
    rows = [row for row in map(_ROW.match, lines) if row is not None]
    timed = dict(sorted(figures for row in rows if (figures := _parse_row(row)) is not None))
    if len(timed) < _MIN_PAYLOADS:
        return None
    ranks = [int(match[1]) for match in map(_RANK.search, lines) if match is not None]
    names = [match[1] for match in map(_PROGRAM.search, lines) if match is not None]
    return NcclTestsLog(
        payloads=tuple(timed),
        seconds=tuple(timed.values()),
        operation=NCCL_TESTS_PROGRAMS[names[0]] if names else None,
        ranks=max(ranks) + 1 if ranks else None,
        run_count=max(1, ranks.count(0)),
    )


def _parse_row(row: re.Match[str]) -> tuple[float, float] | None:
    """Parse a line of nccl-tests: (payload [byte], shorter of its two times [s]); None if a number is missing or 0."""
    payload = parse_positive_number(row[1])
    times = [time for place in (2, 5) if (time := parse_positive_number(row[place], MICROSECOND)) is not None]
    return (payload, min(times)) if payload is not None and len(times) == 2 else None


def logged_collective(log: NcclTestsLog, stated: str | None) -> str:
    """Return the collective operation that an nccl-tests log measures, such as ``all_reduce``.

    Parameters
    ----------
    log : NcclTestsLog
        Log of nccl-tests.
    stated : str, optional
        Collective that the user names; it takes precedence.

    Returns
    -------
    str
        Name of the collective.

    Raises
    ------
    SpecError
        If neither the log nor the user names a collective, or the name is unknown.
    """
    if stated is None and log.operation is None:
        raise SpecError(
            f"the log does not name its program; state --operation: {', '.join(NCCL_TESTS_PROGRAMS.values())}"
        )
    operation = str(stated or log.operation).replace("-", "_")
    if operation not in NCCL_TESTS_PROGRAMS.values():
        raise SpecError(f"--operation {operation!r}; {suggest_names(operation, NCCL_TESTS_PROGRAMS.values())}")
    return operation
