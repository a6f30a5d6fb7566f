"""Training logs: steps and stated figures of any framework. A module of this folder reads one kind of log::

    READERS.register("torchtitan")(Reader(...))

A reader turns a line into what that line states; lines of one step are put together. Seconds, bytes, samples, SI.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from paleo.errors import SpecError
from paleo.files import GZIP, require_regular
from paleo.registry import Registry

#: Lines that are read of a log, characters of one, and of all of them: ten steps are enough.
MOST_LINES, LONGEST_LINE, MOST_CHARACTERS = 200_000, 4_096, 2**28
#: Lines by which a log is recognised.
FEWEST_STEPS = 3
#: What colours a text in a terminal; frameworks write it into their logs, between words.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as logged; None or empty where the log does not say.

    ``seconds`` of the step; ``tokens_per_s`` of one GPU; ``global_batch`` in samples; ``memory`` bytes, the peak that
    was allocated; ``parts``: seconds of parts of the step by name (compute, exchange, optimizer) on the slowest rank;
    ``fastest``: the same on the fastest.
    """

    seconds: float | None = None
    tokens_per_s: float | None = None
    global_batch: float | None = None
    memory: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    fastest: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reader:
    """A kind of log: ``begins`` finds the line that begins (or is) the record of a step, ``states`` what any line
    states as fields of `StepRecord`; ``reference`` says where the format is written down."""

    begins: re.Pattern[str]
    states: Callable[[str], Mapping[str, object]]
    reference: str


READERS: Registry[Reader] = Registry("kind of log", "paleo.logs")


@dataclass(frozen=True, slots=True)
class Log:
    """Steps of a training log, in order, and what kind of log it is."""

    kind: str
    steps: tuple[StepRecord, ...]


def lines_of(path: str | Path) -> list[str]:
    """Lines of a log, long ones cut; SpecError where it cannot be read as text."""
    place = Path(path)
    try:
        require_regular(place, "a log as text")
        with place.open("rb") as file:
            if file.read(2) == GZIP:
                raise SpecError(f"{place}: is packed (gzip); expected a log as text: gunzip it first")
        with place.open(encoding="utf-8", errors="replace") as stream:
            return list(_first_lines(stream))
    except OSError as error:
        raise SpecError(f"{place}: {error.strerror}") from None


def _first_lines(stream: TextIO) -> Iterator[str]:
    """The first lines, whatever their length: only so many characters of the file are looked at."""
    begins, lines, characters = True, 0, 0
    while lines < MOST_LINES and characters < MOST_CHARACTERS and (piece := stream.readline(LONGEST_LINE)):
        characters += len(piece)
        if begins:
            lines += 1
            yield _COLOURS.sub("", piece.rstrip("\n"))
        begins = piece.endswith("\n")


def read_log(path: str | Path) -> Log:
    """The steps of a log of any registered kind; SpecError where no kind finds `FEWEST_STEPS` steps in it."""
    lines = lines_of(path)
    logs = [Log(kind, tuple(_records(reader, lines))) for kind, reader in READERS.items()]
    best = max(logs, key=lambda log: len(log.steps))
    if len(best.steps) < FEWEST_STEPS:
        kinds = ", ".join(name for name, _ in READERS.items())
        raise SpecError(
            f"{path}: no steps of a training were found; expected at least {FEWEST_STEPS} of {kinds}, or as many "
            "payloads of nccl-tests"
        )
    return best


def _records(reader: Reader, lines: list[str]) -> Iterator[StepRecord]:
    """A record for each line that begins one, with the figures of the lines up to the next record."""
    current: dict[str, object] | None = None
    for line in lines:
        if reader.begins.search(line):
            if current:
                yield _record(current)
            current = {}
        if current is not None:
            for name, value in reader.states(line).items():
                current[name] = {**_mapping(current.get(name)), **value} if isinstance(value, Mapping) else value
    if current:
        yield _record(current)


def _record(stated: Mapping[str, object]) -> StepRecord:
    return StepRecord(**stated)  # type: ignore[arg-type]


def _mapping(value: object) -> Mapping[str, float]:
    return value if isinstance(value, Mapping) else {}


def number_behind(pattern: re.Pattern[str], line: str, unit: float = 1.0) -> float | None:
    """The first group of a pattern as a number above zero, thousands separated by commas or not."""
    match = pattern.search(line)
    return None if match is None else number_of(match.group(1), unit)


def number_of(text: str, unit: float = 1.0) -> float | None:
    """A text as a number above zero; None for dots without digits, and for more digits than a number has."""
    try:
        value = float(text.replace(",", "")) * unit
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def stated(**values: float | None) -> dict[str, object]:
    """The figures that the log states, by name."""
    return {name: value for name, value in values.items() if value is not None}
