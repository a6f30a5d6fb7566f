"""Robust fits of a pricing family to measured rows, with held-out residuals and a conformal interval.

Parameters are searched in log space within their bounds, by least squares on log(predicted / measured) under a soft-L1
loss, so that a few odd rows do not steer the fit. Rows are divided by *configuration* into three parts: one to fit,
one to set the interval, one to report. The interval is split conformal (Papadopoulos et al., 2002; Lei et al.,
2018): order statistics of measured / predicted on rows that the fit did not see.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import SpecError, near
from paleo.validate.residual import residual

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

    from paleo.validate.residual import ResidualErrors

Array = npt.NDArray[np.float64]
P = TypeVar("P")
#: Log error at which the loss turns from square to linear; also the standard error of one row under the prior.
SCALE = 0.1
#: Share of configurations to fit, and to set the interval on; the rest is held out for the report.
FIT_SHARE, INTERVAL_SHARE = 0.5, 0.25
#: Share of a range that a start keeps from its ends; log step of a numerical derivative.
MARGIN = 1 / 1000
#: Factors of a fit that held no rows out: a judgement, no statistic.
UNTESTED = (0.8, 1.25)


class PricedRows(Protocol):
    """What a fit asks of a table kind."""

    @property
    def configuration(self) -> tuple[str, ...]:
        """Columns that define a configuration."""

    def time(self, frame: pd.DataFrame, figures: Any, parameters: Any) -> Array:
        """Seconds of rows that share figures and parameters."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Measured rows of one subject, dtype, family and stack, with the figures that price them; times in seconds."""

    frame: pd.DataFrame
    figures: Any
    stack: str
    measured: Array

    def take(self, mask: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Rows:
        """The rows that a mask or an index array picks."""
        return Rows(self.frame.iloc[np.arange(len(self.frame))[mask]], self.figures, self.stack, self.measured[mask])


def count(rows: Iterable[Rows]) -> int:
    """How many rows there are in several groups."""
    return sum(len(group.measured) for group in rows)


@dataclass(frozen=True, slots=True)
class FittedBin:
    """90 % factors on the prediction for predicted times up to ``up_to_s`` seconds."""

    up_to_s: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class FitResult(Generic[P]):
    """A fit: parameters per stack, one-sigma of each log parameter, and what held-out rows say."""

    parameters: Mapping[str, P]
    uncertainty: Mapping[str, float]
    residual: ResidualErrors
    residual_by_stack: Mapping[str, ResidualErrors]
    interval: tuple[FittedBin, ...]
    interval_by_stack: Mapping[str, tuple[FittedBin, ...]]
    rows_fitted: int
    rows_held_out: int


def conformal_factors(ratio: Array, level: float = 0.9) -> tuple[float, float]:
    """Factors (low, high) that hold a new measured / predicted with at least ``level``, equal tails.

    The order statistics ceil((n + 1)(1 ± level) / 2) of n exchangeable ratios; with too few rows, the extremes.

    >>> conformal_factors(np.arange(1.0, 20.0))
    (1.0, 19.0)
    """
    ordered, tail = np.sort(ratio), (1.0 - level) / 2.0
    rank = math.floor(round((len(ordered) + 1) * tail, 9))
    return float(ordered[max(rank - 1, 0)]), float(ordered[min(len(ordered) - rank, len(ordered) - 1)])


def conformal_bins(predicted: Array, measured: Array, *, most: int = 4, least_rows: int = 150) -> tuple[FittedBin, ...]:
    """Conformal factors in bins of predicted time of equal row count, at least ``least_rows`` rows each."""
    bins = max(1, min(most, len(predicted) // least_rows))
    edges = np.quantile(predicted, np.arange(1, bins) / bins)
    bin_of = np.searchsorted(edges, predicted)
    ratio = measured / predicted
    factors = [conformal_factors(ratio[bin_of == index]) for index in range(bins)]
    return tuple(FittedBin(float(edge), *pair) for edge, pair in zip([*edges, math.inf], factors, strict=True))


def split(frame: pd.DataFrame, configuration: Sequence[str], *, seed: int = 0) -> npt.NDArray[np.int64]:
    """Part of each row: 0 to fit, 1 to set the interval, 2 held out; rows of one configuration share a part.

    The part depends on nothing but the configuration's values and the seed, not on the other rows of the table.
    """
    missing = [name for name in configuration if name not in frame.columns]
    if missing:
        raise SpecError(f"column {missing[0]!r} is missing; {near(missing[0], map(str, frame.columns))}")
    words = joined(frame, configuration) + f"|{seed}"
    fraction = (pd.util.hash_array(words.to_numpy(dtype=object)) % 9973) / 9973
    return np.digitize(fraction, [FIT_SHARE, FIT_SHARE + INTERVAL_SHARE]).astype(np.int64)


def joined(frame: pd.DataFrame, columns: Sequence[str]) -> pd.Series[str]:
    """The cells of each row as one word; an empty cell is one like another."""
    return frame[list(columns)].astype(str).fillna("").agg("|".join, axis=1)


def sample(rows: Sequence[Rows], limit: int, seed: int) -> list[Rows]:
    """At most ``limit`` rows in all, an equal share from each group as far as it has them."""
    generator, share = np.random.default_rng(seed), max(1, limit // max(1, len(rows)))
    return [
        group.take(np.sort(generator.permutation(len(group.measured))[:share])) for group in rows if len(group.measured)
    ]


class _Packing(Generic[P]):
    """Parameters as one vector of logs: shared ones once, those of ``per_stack`` once for each stack."""

    def __init__(
        self, start: P, stacks: Sequence[str], per_stack: Sequence[str], fixed: Sequence[str], free: Sequence[str]
    ) -> None:
        fields = {field.name: field for field in dataclasses.fields(start)}  # type: ignore[arg-type]
        for name in (*per_stack, *fixed, *free):
            if name not in fields:
                raise SpecError(f"unknown parameter {name!r} of {type(start).__name__}; {near(name, fields)}")
        moving = [n for n, f in fields.items() if (f.metadata.get("fitted", True) or n in free) and n not in fixed]
        self.start, self.stacks = start, list(stacks)
        self.keys = [(n, None) for n in moving if n not in per_stack] + [
            (n, s) for n in moving if n in per_stack for s in stacks
        ]
        low, high = (np.log([fields[n].metadata[end] for n, _ in self.keys]) for end in ("low", "high"))
        self.low, self.high = low, high
        self.centre = self.inside(self.logs(start))

    def logs(self, point: P) -> Array:
        """The vector of a set of parameters."""
        return np.log([getattr(point, name) for name, _ in self.keys])

    def inside(self, vector: Array) -> Array:
        """The vector moved off its bounds, where a search may start."""
        margin = MARGIN * (self.high - self.low)
        return np.clip(vector, self.low + margin, self.high - margin)

    def unpack(self, vector: Array) -> dict[str, P]:
        values = np.exp(np.clip(vector, self.low, self.high))
        out: dict[str, P] = {}
        for stack in self.stacks:
            chosen = {n: float(v) for (n, s), v in zip(self.keys, values, strict=True) if s in (None, stack)}
            out[stack] = dataclasses.replace(self.start, **chosen)  # type: ignore[type-var]
        return out

    def label(self, key: tuple[str, str | None]) -> str:
        return key[0] if key[1] is None or len(self.stacks) == 1 else f"{key[0]}[{key[1]}]"


def log_errors(kind: PricedRows, rows: Sequence[Rows], parameters: Mapping[str, Any]) -> Array:
    """log(predicted / measured) of all rows, group after group."""
    parts = [np.log(kind.time(g.frame, g.figures, parameters[g.stack]) / g.measured) for g in rows]
    return np.concatenate(parts) if parts else np.zeros(0)


def predictions(kind: PricedRows, rows: Sequence[Rows], parameters: Mapping[str, Any]) -> tuple[Array, Array]:
    """Predicted and measured seconds of all rows, group after group."""
    measured = np.concatenate([group.measured for group in rows]) if rows else np.zeros(0)
    return measured * np.exp(log_errors(kind, rows, parameters)), measured


def _weights(rows: Sequence[Rows], emphasis: float) -> Array:
    """Weight (measured / median)^emphasis of each row, within 1/2 and 3: long rows decide what a whole step takes."""
    measured = np.concatenate([group.measured for group in rows])
    return np.asarray(np.clip((measured / np.median(measured)) ** emphasis, 0.5, 3.0))


def _search(
    kind: PricedRows,
    rows: Sequence[Rows],
    packing: _Packing[Any],
    *,
    alternatives: Sequence[Any],
    starts: int,
    prior: float,
    emphasis: float,
    evaluations: int,
    seed: int,
) -> OptimizeResult:
    """The best of several least-squares runs, the first from the start values."""
    weights = _weights(rows, emphasis)

    def errors(vector: Array) -> Array:
        pull = SCALE * prior * (vector - packing.centre)
        return np.concatenate([weights * log_errors(kind, rows, packing.unpack(vector)), pull])

    generator, least_squares = np.random.default_rng(seed), _least_squares()
    runs: list[OptimizeResult] = []
    points = [packing.centre, *(packing.logs(alternative) for alternative in alternatives)]
    points += [packing.centre + generator.normal(0.0, 0.3, len(packing.centre)) for _ in range(starts - 1)]
    for point in points:
        first = packing.inside(point)
        run = least_squares(
            errors, first, bounds=(packing.low, packing.high), loss="soft_l1", f_scale=SCALE,
            diff_step=np.full(len(first), MARGIN), max_nfev=evaluations,
        )  # fmt: skip
        runs.append(run)
    return min(runs, key=lambda run: float(run.cost))


def _least_squares() -> Any:
    """scipy's solver; SpecError says how to get it where it is not installed."""
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise SpecError("fitting needs scipy, which is not installed; pip install 'paleo-perf[fit]'") from None
    return least_squares


def _log_sigma(run: OptimizeResult) -> Array:
    """One-sigma of each log parameter, sqrt(diag(s² (JᵀJ)⁻¹)), from the Jacobian at the optimum."""
    jacobian = np.asarray(run.jac)
    spread = 1.4826 * np.median(np.abs(run.fun))
    variance: Array = np.diag(np.linalg.pinv(jacobian.T @ jacobian))
    return np.asarray(spread * np.sqrt(np.maximum(variance, 0.0)))


def fit(
    kind: PricedRows,
    rows: Sequence[Rows],
    start: P,
    *,
    alternatives: Sequence[P] = (),
    per_stack: Sequence[str] = (),
    fixed: Sequence[str] = (),
    free: Sequence[str] = (),
    training_rows: int = 1000,
    starts: int = 2,
    prior: float = 0.5,
    emphasis: float = 0.15,
    evaluations: int = 40,
    seed: int = 0,
    hold_out: bool = True,
) -> FitResult[P]:
    """Fit the parameters of a family to measured rows.

    ``rows`` may mix devices, dtypes and stacks: parameters are shared by all, but those named in ``per_stack`` (launch
    costs) are one per stack, and those in ``fixed`` stay at ``start``. ``prior`` is the inverse width, in log units, of
    a normal prior round the start values that counts as one row per parameter: it settles what the rows leave open.
    ``alternatives`` are further points to search from, for parameters that are all but discrete (tile sizes).
    ``emphasis`` is the power of the measured time that weights a row. ``free`` releases parameters that are not
    fitted as a rule. Without ``hold_out`` all rows are fitted, residuals are those of the fitted rows, and the interval
    is ``UNTESTED``: for tables of a handful of rows.
    """
    train, between, held_out = divided(kind, rows, training_rows=training_rows, seed=seed, hold_out=hold_out)
    if not train:
        raise SpecError("no rows to fit: every configuration fell into the held-out parts, or the table is empty")
    packing = _Packing(start, sorted({group.stack for group in rows}), per_stack, fixed, free)
    run = _search(
        kind,
        train,
        packing,
        starts=starts,
        prior=prior,
        emphasis=emphasis,
        evaluations=evaluations,
        seed=seed,
        alternatives=alternatives,
    )
    parameters = packing.unpack(run.x)
    predicted, measured = predictions(kind, held_out, parameters)
    stacks = {stack: [group for group in between if group.stack == stack] for stack in parameters}
    return FitResult(
        parameters=parameters,
        uncertainty={packing.label(k): float(s) for k, s in zip(packing.keys, _log_sigma(run), strict=True)},
        residual=residual(predicted, measured),
        residual_by_stack={
            stack: residual(*predictions(kind, [g for g in held_out if g.stack == stack], parameters))
            for stack in parameters
        },
        interval=_interval(kind, between, parameters),
        interval_by_stack={stack: _interval(kind, groups, parameters) for stack, groups in stacks.items()},
        rows_fitted=sum(len(group.measured) for group in train),
        rows_held_out=len(measured) if hold_out else 0,
    )


def divided(
    kind: PricedRows, rows: Sequence[Rows], *, training_rows: int, seed: int = 0, hold_out: bool = True
) -> tuple[list[Rows], list[Rows], list[Rows]]:
    """Rows to fit, at most ``training_rows``, those that set the interval, and those that are held out; without
    ``hold_out`` all are fitted, none set the interval, and errors are those of all."""
    whole = [np.zeros(len(group.measured), dtype=np.int64) for group in rows]
    parts = [split(group.frame, kind.configuration, seed=seed) for group in rows] if hold_out else whole
    to_fit, between, kept = (
        [group.take(part == part_number) for group, part in zip(rows, parts, strict=True)]
        for part_number in (0, 1, 2 if hold_out else 0)
    )
    return sample(to_fit, training_rows, seed), between, kept


def _interval(kind: PricedRows, rows: Sequence[Rows], parameters: Mapping[str, Any]) -> tuple[FittedBin, ...]:
    predicted, measured = predictions(kind, rows, parameters)
    return conformal_bins(predicted, measured) if len(measured) else (FittedBin(math.inf, *UNTESTED),)
