"""Reader of the logs of nccl-tests: one line for each payload, with out-of-place and in-place times."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paleo.errors import SpecError, near
from paleo.logs.base import lines_of, number_of
from paleo.units import MICROSECOND

#: Collective operation that each program of nccl-tests times.
PROGRAMS = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "alltoall_perf": "all_to_all",
    "broadcast_perf": "broadcast",
    "reduce_perf": "reduce",
}
#: Fewest payloads by which a log of nccl-tests is recognised.
FEWEST_PAYLOADS = 3
_ROW = re.compile(r"^\s*(\d+)\s+\d+\s+\w+\s+\w+\s+(?:-?\d+\s+)?([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+\S+\s+([\d.]+)\s")
_RANK = re.compile(r"#\s+Rank\s+(\d{1,9})\s")
_PROGRAM = re.compile(rf"\b({'|'.join(PROGRAMS)})\b")


@dataclass(frozen=True, slots=True)
class CollectiveLog:
    """Payloads [byte] of a log of nccl-tests with the shorter of their two times [s].

    ``operation`` and ``ranks`` are None if the log does not state them. ``runs`` is the number of runs in the log.
    """

    payloads: tuple[float, ...]
    seconds: tuple[float, ...]
    operation: str | None
    ranks: int | None
    runs: int = 1


def read_collectives(path: str | Path) -> CollectiveLog | None:
    """Read the payloads and times of a log of nccl-tests.

    Parameters
    ----------
    path : str | Path
        The log.

    Returns
    -------
    CollectiveLog, optional
        Payloads [byte] and times [s]; None for another kind of log.
    """
    lines = lines_of(path)
    rows = [row for row in map(_ROW.match, lines) if row is not None]
    timed = dict(sorted(figures for row in rows if (figures := _timed(row)) is not None))
    if len(timed) < FEWEST_PAYLOADS:
        return None
    ranks = [int(match[1]) for match in map(_RANK.search, lines) if match is not None]
    names = [match[1] for match in map(_PROGRAM.search, lines) if match is not None]
    return CollectiveLog(
        payloads=tuple(timed),
        seconds=tuple(timed.values()),
        operation=PROGRAMS[names[0]] if names else None,
        ranks=max(ranks) + 1 if ranks else None,
        runs=max(1, ranks.count(0)),
    )


def _timed(row: re.Match[str]) -> tuple[float, float] | None:
    """Return the payload [byte] of a line and the shorter of its times [s]; None where one is no number above 0."""
    payload, out_of_place, in_place = number_of(row[1]), number_of(row[2], MICROSECOND), number_of(row[5], MICROSECOND)
    return (
        None if payload is None or out_of_place is None or in_place is None else (payload, min(out_of_place, in_place))
    )


def operation_of(log: CollectiveLog, stated: str | None) -> str:
    """Return the collective of a log.

    Parameters
    ----------
    log : CollectiveLog
        Log of nccl-tests.
    stated : str, optional
        Collective that the user names; it takes precedence.

    Returns
    -------
    str
        For example ``all_reduce``.

    Raises
    ------
    SpecError
        If none is known.
    """
    if stated is None and log.operation is None:
        raise SpecError(f"the log does not name its program; state --operation: {', '.join(PROGRAMS.values())}")
    operation = str(stated or log.operation).replace("-", "_")
    if operation not in PROGRAMS.values():
        raise SpecError(f"--operation {operation!r}; {near(operation, PROGRAMS.values())}")
    return operation
