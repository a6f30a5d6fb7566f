"""``paleo calibrate --fit … --only arithmetic``: what sustained arithmetic costs in whole steps.

`SustainedParameters` are fitted to dense steps of all sources together, each source weighing as much as another. Each
source is also left out once, and predicted with what the others give. Predictions are made at a few values of the
factor; between them logarithms of seconds are interpolated, since a step depends on the factor of one device alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.calibrate.files import ERROR_DIGITS, rounded, rounded_residual, steps_table
from paleo.calibrate.fit import optimiser
from paleo.errors import SpecError
from paleo.pricing.power import ARITHMETIC_FAMILY, SustainedParameters
from paleo.specs.calibration import STEPS, Calibration, Entry, IntervalBin, Residual
from paleo.specs.device import find_device
from paleo.specs.software import load_software
from paleo.tables.cells import text
from paleo.tables.errors import residual
from paleo.tables.steps import Row, Step, StepTable, row_dicts, whole_cell
from paleo.units import counted

Array = npt.NDArray[np.float64]
Words = npt.NDArray[np.str_]
#: What `--only` asks for.
ASKED = "arithmetic"
#: Factors at which steps are predicted.
GRID = (0.85, 1.05, 1.25, 1.5)
#: Errors (log) up to which their squares count; larger ones count in proportion (Huber, 1964).
_ROBUST = 0.1
#: GPUs of a node, and most rows that a source is asked for.
_NODE, _MOST = 8, 60
#: Rows from which a source weighs as much as another, and sources that a constant needs.
_WHOLE_SOURCE, _LEAST_SOURCES = 6, 2
#: Weight of the pull of each logarithm towards 1: it settles what the rows leave open.
_PULL = 0.002


@dataclass(frozen=True)
class DenseSteps:
    """Dense steps with the seconds that were measured, and those predicted at each factor of `GRID`."""

    sources: Words
    architectures: Words
    measured: Array
    predicted: Array

    def of(self, rows: npt.NDArray[np.bool_]) -> DenseSteps:
        """Pick rows."""
        return DenseSteps(self.sources[rows], self.architectures[rows], self.measured[rows], self.predicted[rows])

    def errors(self, factors: SustainedParameters) -> Array:
        """Logarithms of predicted over measured seconds, of shape (rows,)."""
        at = np.log([factors.of(name) for name in self.architectures])
        grid, known = np.log(GRID), np.log(self.predicted)
        seconds = np.array([np.interp(x, grid, row) for x, row in zip(at, known, strict=True)])
        return np.asarray(seconds - np.log(self.measured))

    @property
    def weights(self) -> Array:
        """Weights of the rows: each source weighs as much as another, one of few rows less."""
        _, place, counts = np.unique(self.sources, return_inverse=True, return_counts=True)
        shares = np.minimum(counts / _WHOLE_SOURCE, 1.0)
        return np.asarray((shares / counts / shares.sum())[place])


def dense_steps(files: Sequence[str], report: Callable[[str], object] = str) -> DenseSteps:
    """Predict the dense steps of tables at each factor of `GRID`.

    Parameters
    ----------
    files : sequence of str
        Tables of steps of transformers.
    report : callable
        Called with a label as each part of the work starts.

    Returns
    -------
    DenseSteps

    Raises
    ------
    SpecError
        If no step of the tables depends on the factors.
    """
    parts = []
    for file in files:
        table, frame = steps_table(file, f"--only {ASKED} fits arithmetic to", report)
        frame = _of_kernels(table, frame)
        seconds = []
        for factor in GRID:
            report(f"{Path(file).name} at {factor:g}")
            seconds.append(_seconds(table, frame, factor))
        predicted = np.stack(seconds, axis=-1)
        depends = np.isfinite(predicted).all(axis=-1) & (predicted[:, -1] > predicted[:, 0])
        architectures = np.array([find_device(str(name)).architecture for name in frame["device"][depends]])
        sources = text(frame, "source").to_numpy()[depends].astype(str)
        parts.append(DenseSteps(sources, architectures, table.measured(frame)[depends], predicted[depends]))
    if not sum(len(part.measured) for part in parts):
        raise SpecError(f"{', '.join(files)}: no step of these tables depends on arithmetic in sixteen bits")
    joined = ("sources", "architectures", "measured", "predicted")
    return DenseSteps(*(np.concatenate([getattr(part, name) for part in parts]) for name in joined))


def _of_kernels(table: StepTable, frame: pd.DataFrame) -> pd.DataFrame:
    """Rows whose steps are kernels nearly alone: dense networks on one node, nothing offloaded, passes fused and issued
    without waiting. Of each source evenly `_MOST` at most."""

    def chosen_row(row: Row) -> bool:
        one_node = whole_cell(row, "n_experts", 1) <= 1 and whole_cell(row, "n_gpus", 1) <= _NODE
        software = load_software(table.profile(row))
        fused = software.fusion.passes and not software.host.blocking
        return one_node and fused and "offload" not in str(row.get("notes"))

    chosen = frame[np.array([chosen_row(row) for row in row_dicts(frame)])]
    evenly = [
        part.iloc[np.unique(np.linspace(0, len(part) - 1, min(len(part), _MOST)).round().astype(int))]
        for _, part in chosen.groupby(text(chosen, "source"), sort=True)
    ]
    return pd.concat(evenly).reset_index(drop=True) if evenly else chosen


def _seconds(table: StepTable, frame: pd.DataFrame, factor: float) -> Array:
    """Seconds of each row with one factor for all architectures; nan where a row cannot be predicted."""
    tried = calibration(SustainedParameters(*(factor,) * len(fields(SustainedParameters))))
    changed = table.with_calibration(tried)
    return np.array([step.value if isinstance(step, Step) else math.nan for step in changed.steps(frame)])


def calibration(factors: SustainedParameters) -> Calibration:
    """Compose a calibration of steps that holds factors which are tried.

    Parameters
    ----------
    factors : SustainedParameters
        What sustained arithmetic costs.

    Returns
    -------
    Calibration
    """
    return Calibration(name=STEPS, subject=STEPS, entries=(_entry(factors, "factors that are tried", "2000-01-01"),))


def _entry(factors: SustainedParameters, source: str, date: str) -> Entry:
    parameters = {name: rounded(value, ERROR_DIGITS) for name, value in asdict(factors).items()}
    interval = (IntervalBin(low=1.0, high=1.0),)
    return Entry(
        family=ARITHMETIC_FAMILY,
        stack="whole steps",
        source=source,
        date=date,
        parameters=parameters,
        interval=interval,
    )


def fitted(known: DenseSteps) -> SustainedParameters:
    """Fit the factors of all architectures for which two sources speak; others stay 1."""
    names = [field.name for field in fields(SustainedParameters)]
    words = np.array([name.lower().replace(" ", "_") for name in known.architectures])
    free = [name for name in names if len(set(known.sources[words == name])) >= _LEAST_SOURCES]
    weights = known.weights

    def loss(logs: Array) -> float:
        factors = SustainedParameters(**dict(zip(free, np.exp(logs).tolist(), strict=True)))
        errors = np.abs(known.errors(factors))
        robust = np.where(errors < _ROBUST, np.square(errors) / 2.0, _ROBUST * (errors - _ROBUST / 2.0))
        return float((weights * robust).sum() + _PULL * np.square(logs).sum())

    bounds = [(math.log(GRID[0]), math.log(GRID[-1]))] * len(free)
    run = optimiser("minimize")(loss, np.full(len(free), 0.1), method="L-BFGS-B", bounds=bounds)
    return SustainedParameters(**dict(zip(free, np.exp(run.x).tolist(), strict=True)))


@dataclass(frozen=True)
class ArithmeticFitted:
    """Fitted factors, and the errors of each source: ``fitted`` by them, ``tested`` by those of all other sources."""

    known: DenseSteps
    factors: SustainedParameters
    lines: pd.DataFrame

    def entry(self, files: Sequence[str], date: str) -> Entry:
        """Compose the entry of the calibration of steps; its residual is that of sources left out."""
        tested = np.concatenate(self.lines["errors"].to_list())
        errors = rounded_residual(residual(np.exp(tested), np.ones_like(tested)))
        errors.pop("total_error")
        names = f"{', '.join(Path(file).name for file in files)} ({len(self.lines)} sources)"
        counts = {"rows_fitted": len(self.known.measured), "rows_held_out": len(tested)}
        return _entry(self.factors, names, date).model_copy(update={**counts, "residual": Residual(**errors)})


def fit_arithmetic(files: Sequence[str], report: Callable[[str], object] = str) -> ArithmeticFitted:
    """Fit the factors to all rows of the tables, and leave each source out of the fit in turn.

    Parameters
    ----------
    files : sequence of str
        Tables of steps of transformers.
    report : callable
        Called with a label as each part of the work starts.

    Returns
    -------
    ArithmeticFitted
    """
    known = dense_steps(files, report)
    report(f"arithmetic of {counted(len(known.measured), 'step')}")
    factors, lines = fitted(known), []
    for name in np.unique(known.sources):
        chosen = known.sources == name
        others = fitted(known.of(~chosen))
        part = known.of(chosen)
        errors = {"before": SustainedParameters(), "fitted": factors, "left out": others}
        logs = {word: part.errors(values) for word, values in errors.items()}
        line = {"source": str(name), "rows": int(chosen.sum()), "errors": logs["left out"], **asdict(others)}
        for word, values in logs.items():
            line |= {f"{word} bias": float(values.mean()), f"{word} mape": float(np.abs(np.expm1(values)).mean())}
        lines.append(line)
    return ArithmeticFitted(known, factors, pd.DataFrame(lines))
