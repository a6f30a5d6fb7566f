"""Energy factors: ``paleo calibrate --fit … --only arithmetic`` fits the energy of sustained arithmetic in training
steps.

`SustainedEnergyParameters` (one factor per GPU architecture) multiply the energy per FLOP, which sets the clock at the
power limit. They are fitted to training steps of dense networks from all sources, each source with the same weight.
Each source is also left out once and predicted with the factors of the others. Predictions are made at a few values of
the factor. Between them, log times are interpolated, since a step depends on the factor of one architecture only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import pandas as pd

from paleo.calibrate.fit import Array, StepsBySource, StringArray, minimise_loss
from paleo.calibrate.kernel_fits import read_step_table, step_calibration_entry, table_citation
from paleo.errors import SpecError
from paleo.pricing.power import SUSTAINED_ENERGY_FAMILY, SustainedEnergyParameters
from paleo.specs.calibration import STEP_CALIBRATION_NAME, Calibration, CalibrationEntry
from paleo.specs.device import find_device
from paleo.specs.software import load_software
from paleo.tables.cells import text_column
from paleo.tables.run_tables import Row, RowPrediction, RunTable, integer_cell, row_dicts
from paleo.units import with_noun

#: What the command-line option ``--only`` of `paleo calibrate` calls this.
FIT_ONLY_ARITHMETIC_ENERGY = "arithmetic"
#: Factors at which steps are predicted.
TRIAL_ENERGY_FACTORS = (0.85, 1.05, 1.25, 1.5)
#: Errors (log) up to which their squares count; larger ones count in proportion (Huber, 1964).
_HUBER_THRESHOLD = 0.1
#: GPUs of a node, and most rows that a source is asked for.
_NODE, _MOST = 8, 60
#: Sources that a constant needs.
_MIN_SOURCES = 2
#: Weight of the pull of each logarithm towards 1: it settles what the rows leave open.
_PRIOR_WEIGHT = 0.002


@dataclass(frozen=True)
class DenseSteps(StepsBySource):
    """Measured training steps of dense networks, with the predicted step time at each trial energy factor.

    ``architectures`` and ``measured_times`` [s] have shape (rows,); ``predicted_times`` [s] has shape (rows, factors of
    `TRIAL_ENERGY_FACTORS`).
    """

    architectures: StringArray
    measured_times: Array
    predicted_times: Array

    def log_errors(self, factors: SustainedEnergyParameters) -> Array:
        """Compute the log error of each row's predicted step time at trial energy factors.

        Parameters
        ----------
        factors : SustainedEnergyParameters
            Energy factor of each architecture (dimensionless).

        Returns
        -------
        ndarray, shape (rows,)
            log(predicted time / measured time).
        """
        at = np.log([factors.for_architecture(name) for name in self.architectures])
        grid, known = np.log(TRIAL_ENERGY_FACTORS), np.log(self.predicted_times)
        seconds = np.array([np.interp(x, grid, row) for x, row in zip(at, known, strict=True)])
        return np.asarray(seconds - np.log(self.measured_times))


def dense_steps(files: Sequence[str], report: Callable[[str], object] = str) -> DenseSteps:
    """Predict the training steps of dense networks in tables, once for each energy factor of `TRIAL_ENERGY_FACTORS`.

    Parameters
    ----------
    files : sequence of str
        Tables of training steps of transformers.
    report : callable
        Called with a label when each part of the work starts, to show progress.

    Returns
    -------
    DenseSteps
        Measured and predicted step times.

    Raises
    ------
    SpecError
        If no step of the tables depends on the factors.
    """
    parts = []
    for file in files:
        table, frame = read_step_table(file, f"--only {FIT_ONLY_ARITHMETIC_ENERGY} fits arithmetic to", report)
        frame = _kernel_bound_rows(table, frame)
        predicted = np.empty((len(frame), len(TRIAL_ENERGY_FACTORS)))
        for column, factor in enumerate(TRIAL_ENERGY_FACTORS):
            report(f"{Path(file).name} at {factor:g}")
            predicted[:, column] = _predicted_times(table, frame, factor)
        depends = np.isfinite(predicted).all(axis=-1) & (predicted[:, -1] > predicted[:, 0])
        architectures = np.array([find_device(str(name)).architecture for name in frame["device"][depends]])
        sources = text_column(frame, "source").to_numpy()[depends].astype(str)
        parts.append(DenseSteps(sources, architectures, table.measured_values(frame)[depends], predicted[depends]))
    if not sum(len(part.measured_times) for part in parts):
        raise SpecError(f"{', '.join(files)}: no step of these tables depends on arithmetic in sixteen bits")
    joined = ("sources", "architectures", "measured_times", "predicted_times")
    return DenseSteps(*(np.concatenate([getattr(part, name) for part in parts]) for name in joined))


def _kernel_bound_rows(table: RunTable, frame: pd.DataFrame) -> pd.DataFrame:
    """Select rows whose step time is nearly all kernel time, so that energy factors can be fitted to them.

    These are dense networks on one node without offload, with software that fuses passes and launches kernels without
    waiting. At most `_MOST` rows of each source are kept, evenly spaced.
    """

    def chosen_row(row: Row) -> bool:
        one_node = integer_cell(row, "n_experts", 1) <= 1 and integer_cell(row, "n_gpus", 1) <= _NODE
        software = load_software(table.software_profile(row))
        fused = software.fusion.passes and not software.host.blocking
        return one_node and fused and "offload" not in str(row.get("notes"))

    chosen = frame[np.array([chosen_row(row) for row in row_dicts(frame)])]
    evenly = [
        part.iloc[np.unique(np.linspace(0, len(part) - 1, min(len(part), _MOST)).round().astype(int))]
        for _, part in chosen.groupby(text_column(chosen, "source"), sort=True)
    ]
    return pd.concat(evenly).reset_index(drop=True) if evenly else chosen


def _predicted_times(table: RunTable, frame: pd.DataFrame, factor: float) -> Array:
    """Predict the step time of measured runs with one energy factor for all architectures [s]; nan where impossible."""
    tried = energy_factor_calibration(SustainedEnergyParameters(*(factor,) * len(fields(SustainedEnergyParameters))))
    changed = table.with_calibration(tried)
    steps = changed.predict_rows(frame)
    return np.array([step.value if isinstance(step, RowPrediction) else math.nan for step in steps])


def energy_factor_calibration(factors: SustainedEnergyParameters) -> Calibration:
    """Wrap trial energy factors into a calibration of whole steps, so that predictions use them.

    Parameters
    ----------
    factors : SustainedEnergyParameters
        Energy factor of sustained arithmetic, per architecture [-].

    Returns
    -------
    Calibration
        Calibration that holds only these factors.
    """
    entry = step_calibration_entry(SUSTAINED_ENERGY_FAMILY, factors, "factors that are tried", "2000-01-01")
    return Calibration(name=STEP_CALIBRATION_NAME, subject=STEP_CALIBRATION_NAME, entries=(entry,))


def fit_energy_factors(known: DenseSteps) -> SustainedEnergyParameters:
    """Fit the energy factor of sustained arithmetic of each architecture with two or more sources.

    Other architectures keep the default.

    Parameters
    ----------
    known : DenseSteps
        Measured steps, with the step time predicted at each trial factor.

    Returns
    -------
    SustainedEnergyParameters
        Energy factor of each architecture (dimensionless).
    """
    names = [field.name for field in fields(SustainedEnergyParameters)]
    words = np.array([name.lower().replace(" ", "_") for name in known.architectures])
    free = [name for name in names if len(set(known.sources[words == name])) >= _MIN_SOURCES]
    weights = known.source_balanced_weights

    def loss(logs: Array) -> float:
        factors = SustainedEnergyParameters(**dict(zip(free, np.exp(logs).tolist(), strict=True)))
        errors = np.abs(known.log_errors(factors))
        linear = _HUBER_THRESHOLD * (errors - _HUBER_THRESHOLD / 2.0)
        robust = np.where(errors < _HUBER_THRESHOLD, np.square(errors) / 2.0, linear)
        return float((weights * robust).sum() + _PRIOR_WEIGHT * np.square(logs).sum())

    bounds = (TRIAL_ENERGY_FACTORS[0], TRIAL_ENERGY_FACTORS[-1])
    values = minimise_loss(loss, np.full(len(free), 0.1), [bounds] * len(free))
    return SustainedEnergyParameters(**dict(zip(free, values, strict=True)))


@dataclass(frozen=True)
class SustainedEnergyFit:
    """Result of the fit of energy factors of sustained arithmetic, with the errors of each source.

    ``errors_by_source`` has one row per source: bias and MAPE without factors (``before``), with the factors of all
    sources (``fitted``), and with those of all other sources (``left out``).
    """

    dense_step_rows: DenseSteps
    energy_factors: SustainedEnergyParameters
    errors_by_source: pd.DataFrame

    def calibration_entry(self, files: Sequence[str], date: str) -> CalibrationEntry:
        """Build the calibration entry of the fitted energy factors, with the residual on sources left out of the fit.

        Parameters
        ----------
        files : sequence of str
            Tables of measured steps, for the citation.
        date : str
            Date of the fit, such as "2026-01-31".

        Returns
        -------
        CalibrationEntry
            Factors with source, date, numbers of rows and residual.
        """
        tested = np.concatenate(self.errors_by_source["errors"].to_list())
        counts = {"rows_fitted": len(self.dense_step_rows.measured_times), "rows_held_out": len(tested)}
        source = table_citation(files, len(self.errors_by_source))
        family, factors = SUSTAINED_ENERGY_FAMILY, self.energy_factors
        return step_calibration_entry(family, factors, source, date, np.exp(tested), **counts)


def cross_validated_energy_fit(files: Sequence[str], report: Callable[[str], object] = str) -> SustainedEnergyFit:
    """Fit the energy factors of sustained arithmetic to all rows, and again with each source left out.

    Parameters
    ----------
    files : sequence of str
        Tables of training steps of transformers.
    report : callable
        Called with a label when each part of the work starts, to show progress.

    Returns
    -------
    SustainedEnergyFit
        Factors of all sources, and the errors of each source with and without its own rows in the fit.
    """
    known = dense_steps(files, report)
    report(f"arithmetic of {with_noun(len(known.measured_times), 'step')}")
    factors, lines = fit_energy_factors(known), []
    for name, part, remaining in known.leave_one_out():
        others = fit_energy_factors(remaining)
        errors = {"before": SustainedEnergyParameters(), "fitted": factors, "left out": others}
        logs = {word: part.log_errors(values) for word, values in errors.items()}
        line = {"source": name, "rows": len(part.measured_times), "errors": logs["left out"], **asdict(others)}
        for word, values in logs.items():
            line |= {f"{word} bias": float(values.mean()), f"{word} mape": float(np.abs(np.expm1(values)).mean())}
        lines.append(line)
    return SustainedEnergyFit(known, factors, pd.DataFrame(lines))
