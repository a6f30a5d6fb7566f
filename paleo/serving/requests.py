"""Requests to an inference service: arrivals and lengths, drawn at random or read from a trace."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, Literal

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError, suggest_names
from paleo.files import read_bytes
from paleo.units import MILLISECOND

Array = npt.NDArray[np.float64]
Arrivals = Literal["poisson", "constant", "at once", "closed"]
#: Headers of traces in the forms that are published: arrival, prompt tokens, answer tokens.
_TRACE_COLUMN_ALIASES = {
    "arrival": ("arrival_s", "arrived_at", "timestamp", "arrival", "arrival_time", "time"),
    "input": ("input_tokens", "num_prefill_tokens", "contexttokens", "request tokens", "input_length", "prompt_tokens"),
    "output": (
        "output_tokens", "num_decode_tokens", "generatedtokens", "response tokens", "output_length",
        "completion_tokens",
    ),
}  # fmt: skip
#: Most lines of a trace that are kept.
_MAX_TRACE_REQUESTS = 5_000_000
#: Most bytes of a trace, tokens of a prompt or answer, and seconds of an arrival (dates count from 1970).
_MAX_TRACE_BYTES, _MAX_REQUEST_TOKENS, _MAX_ARRIVAL_SECONDS = 500_000_000, 2.0**40, 2.0**40


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests to an inference service, in the order of arrival.

    Attributes
    ----------
    arrival : numpy.ndarray
        Arrival times [s], shape (n,).
    prompt_tokens, answer_tokens : numpy.ndarray
        Tokens of prompt and answer, shape (n,), at least 1.
    prefix_hit_share : float
        Share of each prompt that is found in the prefix cache [-].
    shares_prefix : bool
        True if all requests share the cached pages, so that these count once in the cache.
    """

    arrival: Array
    prompt_tokens: Array
    answer_tokens: Array
    prefix_hit_share: float = 0.0
    shares_prefix: bool = False

    def __len__(self) -> int:
        return len(self.arrival)

    def requests_of_one_replica(self, replicas: int) -> Requests:
        """Select every n-th request, those that one of n replicas gets under round-robin routing.

        Parameters
        ----------
        replicas : int
            Number of replicas.

        Returns
        -------
        Requests
            Requests of the first replica.
        """
        columns = (self.arrival, self.prompt_tokens, self.answer_tokens)
        arrival, prompts, answers = (each[::replicas] for each in columns)
        return replace(self, arrival=arrival, prompt_tokens=prompts, answer_tokens=answers)


def sample_lengths(mean: float, variation: float, count: int, random: np.random.Generator) -> Array:
    """Draw lengths of prompts or answers, in whole tokens, from a log-normal distribution.

    Parameters
    ----------
    mean : float
        Mean length [tokens].
    variation : float
        Coefficient of variation; 0 makes all lengths equal.
    count : int
        Number of lengths.
    random : np.random.Generator
        Random generator.

    Returns
    -------
    ndarray, shape (count,)
        Lengths [tokens], at least 1.

    Examples
    --------
    >>> sample_lengths(7.0, 0.0, 3, np.random.default_rng(0))
    array([7, 7, 7])
    """
    if variation <= 0:
        return np.full(count, max(round(mean), 1.0))
    sigma = math.sqrt(math.log1p(variation**2))
    return np.maximum(np.round(random.lognormal(math.log(mean) - sigma**2 / 2.0, sigma, count)), 1.0)


def sample_requests(
    count: int,
    *,
    input_tokens: float,
    output_tokens: float,
    rate: float = math.inf,
    arrivals: Arrivals = "poisson",
    input_variation: float = 0.0,
    output_variation: float = 0.0,
    hit: float = 0.0,
    shared: bool = False,
    seed: int = 1,
) -> Requests:
    """Draw random requests to an inference service, with arrival times and lengths.

    Parameters
    ----------
    count : int
        Number of requests.
    input_tokens : float
        Mean tokens of a prompt.
    output_tokens : float
        Mean tokens of an answer.
    rate : float, optional
        Requests per second; inf for all at once.
    arrivals : Arrivals, optional
        Arrival process: ``poisson``, ``constant``, ``at once`` or ``closed``.
    input_variation : float, optional
        Coefficient of variation of the prompt lengths.
    output_variation : float, optional
        Coefficient of variation of the answer lengths.
    hit : float, optional
        Share of prompt tokens (0 to 1) that are in the prefix cache.
    shared : bool, optional
        True if all prompts share the cached tokens.
    seed : int, optional
        Seed of the random numbers.

    Returns
    -------
    Requests
        Requests in the order of arrival.
    """
    random = np.random.default_rng(seed)
    if arrivals in ("at once", "closed") or math.isinf(rate):
        arrival = np.zeros(count)
    elif arrivals == "constant":
        arrival = np.arange(count) / rate
    else:
        arrival = np.cumsum(random.exponential(1.0 / rate, count))
    first = sample_lengths(input_tokens, input_variation, count, random)
    second = sample_lengths(output_tokens, output_variation, count, random)
    return Requests(arrival, first, second, hit, shared)


def read_trace(path: str | Path) -> Requests:
    """Read the trace of an inference service: arrival time, prompt tokens and answer tokens of each request.

    The columns of the traces of Azure, BurstGPT, Mooncake and Vidur are known, as well as ``arrival_s, input_tokens,
    output_tokens``. Arrivals are dates or seconds; in Mooncake's form (``timestamp, input_length, output_length``) they
    are milliseconds. Requests without an answer are left out.

    Parameters
    ----------
    path : str | Path
        File of CSV or JSON lines, plain or gzipped.

    Returns
    -------
    Requests
        Requests in the order of arrival.

    Raises
    ------
    SpecError
        If a column is missing, a line has no numbers above zero, or there is no line.
    """
    place = Path(path)
    raw = read_bytes(place, most=_MAX_TRACE_BYTES, expected="a trace of requests, CSV or JSON lines")
    try:
        rows = list(_rows(place, io.StringIO(raw.decode("utf-8-sig"), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError(
            f"trace {str(place)[:200]}: is neither CSV nor JSON lines in UTF-8 ({str(error)[:100]})"
        ) from None
    table = np.array([row for row in rows if row[2] >= 1.0], dtype=np.float64).reshape(-1, 3)
    if not len(table):
        raise SpecError(f"trace {str(place)[:200]}: no requests")
    order = np.argsort(table[:, 0], kind="stable")
    arrival = table[order, 0] - table[order, 0].min()
    return Requests(arrival, np.maximum(table[order, 1], 1.0), table[order, 2])


def _rows(path: Path, lines: IO[str]) -> Iterator[tuple[float, float, float]]:
    """Yield arrival time [s], prompt tokens and answer tokens of each line of a trace."""
    start = lines.readline()
    if start.lstrip().startswith("{"):
        first, rows = 1, (_parsed(path, number, line) for number, line in enumerate(chain([start], lines), 1))
        header: Sequence[str] = list(_parsed(path, 1, start))
    else:
        reader = csv.DictReader(chain([start], lines))
        first, header, rows = 2, reader.fieldnames or (), (dict(row) for row in reader)
    lowered = {name.strip().lower(): name for name in header}
    names: dict[str, str] = {}
    for part, known in _TRACE_COLUMN_ALIASES.items():
        name = next((lowered[each] for each in known if each in lowered), None)
        if name is None:
            nearest = suggest_names(known[0], list(header))
            raise SpecError(f"trace {path}: no column of the {part}, such as {known[0]}; {nearest}")
        names[part] = name
    unit = MILLISECOND if names["input"].strip().lower() == "input_length" else 1.0
    for number, row in enumerate(rows, start=first):
        if number - first >= _MAX_TRACE_REQUESTS:
            raise SpecError(f"trace {path}: more than {_MAX_TRACE_REQUESTS:,} requests; cut it")
        yield _row(path, number, row, names, unit)


def _parsed(path: Path, number: int, line: str) -> dict[str, str]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise SpecError(f"trace {path}: line {number}: {line.strip()[:60]!r}: expected a JSON object")
    return data


def _row(
    path: Path, number: int, row: Mapping[str, str], names: Mapping[str, str], unit: float
) -> tuple[float, float, float]:
    try:
        arrival = unit * _seconds(row[names["arrival"]])
        first, second = (float(row[names[part]]) for part in ("input", "output"))
    except (KeyError, TypeError, ValueError, OverflowError):
        arrival = first = second = math.nan
    if not (
        abs(arrival) <= _MAX_ARRIVAL_SECONDS
        and 0 <= first <= _MAX_REQUEST_TOKENS
        and 0 <= second <= _MAX_REQUEST_TOKENS
    ):
        cells = {names[part]: row.get(names[part]) for part in _TRACE_COLUMN_ALIASES}
        raise SpecError(f"trace {path}: line {number}: {cells}: expected an arrival and two counts of tokens")
    return arrival, first, second


def _seconds(text: str) -> float:
    """Convert the arrival in a trace, a number of seconds or an ISO date, to seconds."""
    try:
        return float(text)
    except ValueError:
        from datetime import datetime

        return datetime.fromisoformat(text.strip()[:26]).timestamp()
