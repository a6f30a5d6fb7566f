"""Fit of MLPerf training tasks: ``paleo calibrate --fit`` on MLPerf tables writes the fitted values into task files.

Tables of reference convergence points give laws of samples to target by batch. Tables of submissions give three
corrections of a task: measured over predicted step time, samples over the law, and the cost of an evaluation.

Cross-validation leaves out each round in turn: a submission is predicted by its task fitted to all other rounds. Errors
of steps, samples and minutes are reported by benchmark, beside the best of three baselines
(`paleo.tables.kinds._mlperf_training`).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import PaleoError, SpecError
from paleo.files import is_folder
from paleo.learning.base import ReferencePointsLaw, fit_reference_points
from paleo.specs.catalog import CATALOG_FOLDERS, catalog_root, entry_files
from paleo.specs.task import (
    PlatformDifferences,
    QualityEvaluation,
    SubmissionSamples,
    TrainingCode,
    TrainingTask,
    load_task,
)
from paleo.studies.target import TargetTime, time_from_prediction
from paleo.tables.kinds._mlperf_training import (
    MlperfTrainingTable,
    other_round_baselines,
    repeated_rows,
    samples_in_task_unit,
    submission_time_to_target,
)
from paleo.tables.run_tables import CELL_ERRORS, has_value, number_cell, row_dicts
from paleo.tables.validation import usable_rows_of_table
from paleo.units import MILLISECOND, MINUTE

if TYPE_CHECKING:
    from paleo.specs.device import Device
    from paleo.specs.loading import Spec

#: Columns that tell a table of reference points.
_CONVERGENCE_TABLE_COLUMNS = frozenset({"benchmark", "round", "global_batch_size", "samples_mean", "samples_std", "n"})
_LAW_SOURCE_TEMPLATE = "reference convergence points of MLPerf Training (mlcommons/logging, rcp_checker) as of {rounds}"


def is_convergence_table(columns: Iterable[str]) -> bool:
    """Return True if a table holds MLPerf reference convergence points, by its column names.

    Parameters
    ----------
    columns : iterable of str
        Column names of the table.

    Returns
    -------
    bool
        True if all columns of such a table are present.
    """
    return set(columns) >= _CONVERGENCE_TABLE_COLUMNS


def reference_convergence_points(task: TrainingTask, table: pd.DataFrame) -> pd.DataFrame:
    """Select the MLPerf reference convergence points of a task: for each global batch, the point of the latest round.

    Rounds before the first one that has reference points use the points of that first round.

    Parameters
    ----------
    task : TrainingTask
        Training task with its benchmarks and rounds.
    table : DataFrame
        Reference convergence points of all benchmarks.

    Returns
    -------
    DataFrame
        Rows of ``table`` that hold for the task.
    """
    task_points = table[table["benchmark"].isin(task.benchmarks)]
    chosen = task_points[task_points["round"].isin(task.rounds) if task.rounds else ~_in_listed_rounds(task_points)]
    if task.rounds and chosen.empty and not task_points.empty:
        chosen = task_points[task_points["round"] == task_points["round"].min()]
    return chosen.sort_values(["round", "samples_mean"]).drop_duplicates("global_batch_size", keep="last")


def _in_listed_rounds(points: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Return a mask of reference points whose benchmark and round belong to a catalog task that lists its rounds."""
    tasks = [load_task(name) for name in entry_files("tasks")]
    listed = {(benchmark, name) for task in tasks for benchmark in task.benchmarks for name in task.rounds}
    pairs = zip(points["benchmark"], points["round"], strict=True)
    return np.fromiter((pair in listed for pair in pairs), dtype=np.bool_, count=len(points))


def fit_convergence_law(points: pd.DataFrame) -> ReferencePointsLaw:
    """Fit the law of samples to target by batch to a task's reference points.

    The seed noise is the median of the points' relative standard deviations.

    Parameters
    ----------
    points : DataFrame
        Reference points of one task.

    Returns
    -------
    ReferencePointsLaw
        Law of samples to target by global batch.
    """
    noise = (points["samples_std"] / points["samples_mean"]).to_numpy(dtype=np.float64)
    pairs = list(zip(points["global_batch_size"].astype(float), points["samples_mean"].astype(float), strict=True))
    source = _LAW_SOURCE_TEMPLATE.format(rounds=points["round"].astype(str).max())
    return fit_reference_points(pairs, source=source, seed_noise=float(np.median(noise)))


def convergence_law_yaml(law: ReferencePointsLaw) -> str:
    """Format a law of samples to target as the ``law:`` block of a task file (YAML text).

    Parameters
    ----------
    law : ReferencePointsLaw
        Fitted law of samples to target.

    Returns
    -------
    str
        YAML text of the block.
    """
    pairs = ", ".join(f"[{batch:g}, {samples:.0f}]" for batch, samples in sorted(law.points))
    critical = [] if law.critical_batch is None else [f"    critical_batch: {law.critical_batch:.1f}"]
    low, high = law.batches or (0.0, 0.0)
    lines = [
        "law:",
        "  reference_points:",
        f"    samples_min: {law.samples_min:.0f}",
        *critical,
        f"    points: [{pairs}]",
        f"    batches: [{low:g}, {high:g}]",
        f"    residual: {law.residual:.4f}",
        f"    seed_noise: {law.seed_noise:.4f}",
        f'    source: "{law.source}"',
    ]
    return "\n".join(lines) + "\n"


def replace_law(text: str, block: str) -> str:
    """Replace the ``law:`` block in the text of a task file; other blocks are unchanged.

    Parameters
    ----------
    text : str
        Text of the task file.
    block : str
        New block as YAML text, from `convergence_law_yaml`.

    Returns
    -------
    str
        The new text of the file.
    """
    return _replaced(text, "law", block)


def _write_laws(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Fit the law of samples to target of each task with enough points; write and return the task files."""
    written = []
    for name, source in entry_files("tasks").items():
        points = reference_convergence_points(load_task(name), table)
        if len(points) > 1:
            path, law = folder / f"{name}.yaml", convergence_law_yaml(fit_convergence_law(points))
            path.write_text(replace_law(source.read_text(encoding="utf-8"), law))
            written.append(path)
    return written


Array = npt.NDArray[np.float64]
#: A round's weight in the fit for another: software is dated, and each round apart counts less.
_ROUND_DISCOUNT = 0.6
#: Weight of rows whose configuration is a guess or not known.
_UNSURE_WEIGHT = 0.5
#: Widths of the pulls, in rows: of an architecture's and a device's deviation and of two other terms to zero, of what a
#: round adds to `_DEFAULT_TREND`.
_PRIOR_ROWS = {"architecture": 0.5, "device": 1.0, "per_doubling": 2.0, "several_nodes": 1.0, "per_round": 3.0}
#: What a round adds to the logarithm of a step on the same device where a task's rows do not say: mean of the eleven
#: tasks, GNMT and Transformer left out, that several rounds are known of (0.00 to -0.12).
_DEFAULT_TREND = -0.05
#: Logarithm of the step below which deviations are not outliers.
_LEAST_SPREAD = 0.02


@dataclass(frozen=True, slots=True)
class SubmissionRow:
    """One MLPerf submission with its prediction before the fit (``predicted_target``) and its measured values.

    Times are in seconds: ``step_time``, ``evaluation_time`` (all evaluations together), ``time_to_target``,
    ``other_time`` (neither steps nor evaluations). ``samples`` counts samples to target, ``evaluation_count``
    evaluations, ``averaged_runs`` the runs that the submission averages. Unknown values are nan.
    ``has_exact_configuration`` is True if the table marks the submission's configuration as certain.
    """

    row_index: int
    predicted_target: TargetTime
    round_name: str
    has_exact_configuration: bool
    averaged_runs: float
    step_time: float
    samples: float
    evaluation_time: float
    evaluation_count: float
    time_to_target: float
    other_time: float

    @property
    def task(self) -> str:
        """Name of the submission's training task in the catalog."""
        return self.predicted_target.task.name

    @property
    def device(self) -> Device:
        """Device that the submission ran on."""
        return self.predicted_target.prediction.system.device


def _predicted_submissions(frame: pd.DataFrame) -> list[SubmissionRow]:
    """Predict the time to target of all rows of a table of MLPerf submissions, except copies of the same log.

    Parameters
    ----------
    frame : DataFrame
        Table of kind ``training_runs``.

    Returns
    -------
    list of SubmissionRow
        Measured and predicted values of the rows that can be predicted.
    """
    alone = ~repeated_rows(frame)
    rows = []
    for index, cells in enumerate(row_dicts(frame)):
        if not alone[index]:
            continue
        try:
            rows.append(_row(index, cells, submission_time_to_target(cells)))
        except (PaleoError, *CELL_ERRORS):
            continue
    return rows


def _row(index: int, cells: dict[str, Any], point: TargetTime) -> SubmissionRow:
    def measured(name: str, unit: float = 1.0) -> float:
        value = number_cell(cells, name, np.nan)
        return value * unit if value > 0 else np.nan

    # Seconds that are neither steps nor evaluations; nan where they are not known, or counted as evaluation (TPUs).
    on_tpu = point.prediction.system.device.kind == "tpu"
    return SubmissionRow(
        row_index=index,
        predicted_target=point,
        round_name=str(cells["round"]),
        has_exact_configuration=cells.get("config_match") == "exact",
        averaged_runs=measured("runs"),
        step_time=measured("step_ms", MILLISECOND) if has_value(cells, "step_ms") else _implied_step(cells, point),
        samples=samples_in_task_unit(cells, "samples_to_target"),
        evaluation_time=_evaluation_time(cells, point),
        evaluation_count=measured("evaluations"),
        time_to_target=measured("minutes_to_target", MINUTE),
        other_time=np.nan if on_tpu else number_cell(cells, "other_s", np.nan),
    )


#: Share of the minutes that blocks of training make up at least in a log that tells training from evaluation.
_LEAST_TRAINING = 0.1


def _separates_evaluation(cells: dict[str, Any], point: TargetTime) -> bool:
    """Return True if the log of a submission separates training time from evaluation time; logs of TPUs may not."""
    if point.prediction.system.device.kind != "tpu" or not has_value(cells, "train_s"):
        return True
    return float(cells["train_s"]) > _LEAST_TRAINING * float(cells["minutes_to_target"]) * MINUTE


def _evaluation_time(cells: dict[str, Any], point: TargetTime) -> float:
    """Return the measured time of all evaluations of a submission [s]; nan if not known.

    Logs of TPUs do not state this time; for them it is the time to target minus the logged steps.
    """
    stated = number_cell(cells, "evaluation_s", np.nan)
    if point.prediction.system.device.kind != "tpu":
        return stated
    if not has_value(cells, "step_ms"):
        return stated if _separates_evaluation(cells, point) else np.nan
    steps = samples_in_task_unit(cells, "samples_to_target") / point.global_batch
    return max(float(cells["minutes_to_target"]) * MINUTE - steps * float(cells["step_ms"]) * MILLISECOND, 0.0)


def _implied_step(cells: dict[str, Any], point: TargetTime) -> float:
    """Derive the step time [s] of a submission that logs none: training time over number of steps; nan if not known."""
    stated = all(has_value(cells, name) for name in ("minutes_to_target", "evaluation_s", "samples_to_target"))
    if not stated or not _separates_evaluation(cells, point):
        return np.nan
    left = float(cells["minutes_to_target"]) * MINUTE - float(cells["evaluation_s"])
    samples = samples_in_task_unit(cells, "samples_to_target")
    return left / (samples / point.global_batch) if left > 0 and samples > 0 else np.nan


def _weights(rows: list[SubmissionRow], rounds: list[str], towards: str) -> Array:
    """Compute the weight of each submission in a fit for round ``towards``, shape (rows,).

    The weight falls with the distance in rounds; an uncertain configuration halves the weight.
    """
    return np.asarray(_ROUND_DISCOUNT ** _rounds_apart(rows, rounds, towards) * _configuration_weights(rows))


def _weights_by_device(rows: list[SubmissionRow], rounds: list[str], towards: str) -> Array:
    """Compute weights like those of `_weights`, with full weight for the nearest round of each device, shape (rows,).

    The last rows of a device that is no longer submitted are as informative for that device as the first rows of a new
    one.
    """
    apart = _rounds_apart(rows, rounds, towards)
    devices = np.array([row.device.name for row in rows])
    nearest = {name: apart[devices == name].min() for name in np.unique(devices)}
    return np.asarray(_ROUND_DISCOUNT ** (apart - [nearest[name] for name in devices]) * _configuration_weights(rows))


def _rounds_apart(rows: list[SubmissionRow], rounds: list[str], towards: str) -> Array:
    place = rounds.index(towards)
    return np.array([abs(rounds.index(row.round_name) - place) for row in rows], dtype=np.float64)


def _configuration_weights(rows: list[SubmissionRow]) -> Array:
    return np.where([row.has_exact_configuration for row in rows], 1.0, _UNSURE_WEIGHT)


def fit_step_time_ratio(rows: list[SubmissionRow], rounds: list[str], towards: str) -> TrainingCode:
    """Fit the ratio of measured to predicted step time of a task's training code, by architecture and device.

    The fit is robust least squares of log(measured / predicted step). Deviations of architectures and devices are
    pulled to zero, and the ratio has a trend over rounds.

    Parameters
    ----------
    rows : list of SubmissionRow
        Submissions of the task.
    rounds : list of str
        All rounds of MLPerf, in order.
    towards : str
        Round at which the ratio is evaluated.

    Returns
    -------
    TrainingCode
        Ratios, trend and number of rows; neutral with too few rows.
    """
    code = rows[0].predicted_target.task.code
    fitted = [row for row in rows if row.step_time > 0]
    if len(fitted) < _MIN_SUBMISSIONS_TO_FIT:
        return code.model_copy(update={"ratio": {}, "rows": 0, "per_round": 0.0, "round": None, "start": 0.0})
    reference = float(np.median([_samples_per_gpu(row) for row in fitted]))
    architectures = sorted({row.device.architecture for row in fitted})
    devices = sorted({row.device.name for row in fitted})
    later = np.array([float(rounds.index(row.round_name) - rounds.index(towards)) for row in fitted])
    design = np.column_stack([[_design_row(row, architectures, devices, reference) for row in fitted], later])
    ratios = [row.step_time / row.predicted_target.prediction.step_time for row in fitted]
    target = np.log(ratios) - _DEFAULT_TREND * later
    pulls = [0.0, *[_PRIOR_ROWS["architecture"]] * len(architectures), *[_PRIOR_ROWS["device"]] * len(devices)]
    pulls += [_PRIOR_ROWS["per_doubling"], _PRIOR_ROWS["several_nodes"], _PRIOR_ROWS["per_round"]]
    beta = _robust_least_squares(design, target, _weights_by_device(fitted, rounds, towards), np.array(pulls))
    per_doubling, several_nodes, trend = (float(term) for term in beta[-3:])
    update = {
        "ratio": _fitted_ratios(beta[:-1], architectures, devices, fitted), "samples_per_gpu": reference,
        "per_doubling": round(per_doubling, 4), "several_nodes": round(several_nodes, 4), "rows": len(fitted),
        "per_round": round(trend + _DEFAULT_TREND, 4), "round": towards,
        "start": _fitted_start_time(rows, rounds, towards),
    }  # fmt: skip
    return code.model_copy(update=update)


def _fitted_start_time(rows: list[SubmissionRow], rounds: list[str], towards: str) -> float:
    """Estimate the time of a run that is neither steps nor evaluations [s], as a weighted median over submissions."""
    timed = [row for row in rows if row.other_time >= 0]
    if len(timed) < _MIN_SUBMISSIONS_TO_FIT:
        return 0.0
    return round(_weighted_median(np.array([row.other_time for row in timed]), _weights(timed, rounds, towards)), 1)


#: Rows from which on a code is fitted.
_MIN_SUBMISSIONS_TO_FIT = 3


def _samples_per_gpu(row: SubmissionRow) -> float:
    return row.predicted_target.global_batch / row.predicted_target.prediction.plan.gpus


def _design_row(row: SubmissionRow, architectures: list[str], devices: list[str], reference: float) -> list[float]:
    prediction = row.predicted_target.prediction
    return [
        1.0,
        *(float(row.device.architecture == architecture) for architecture in architectures),
        *(float(row.device.name == name) for name in devices),
        float(np.log2(_samples_per_gpu(row) / reference)),
        float(prediction.plan.gpus > max(prediction.system.devices_per_node, 1)),
    ]


def _robust_least_squares(design: Array, target: Array, weights: Array, pulls: Array) -> Array:
    """Solve weighted least squares with pulls (ridge penalties) to zero; rows beyond two spreads weigh less (Huber)."""
    used, beta = weights, np.zeros(design.shape[1])
    for _ in range(8):
        normal = design.T @ (design * used[:, None]) + np.diag(np.maximum(pulls, 1e-12))
        beta = np.linalg.solve(normal, design.T @ (used * target))
        residuals = np.abs(target - design @ beta)
        spread = max(1.48 * float(np.median(residuals)), _LEAST_SPREAD)
        used = weights / np.maximum(1.0, residuals / (2.0 * spread))
    return np.asarray(beta)


def _fitted_ratios(
    beta: Array, architectures: list[str], devices: list[str], rows: list[SubmissionRow]
) -> dict[str, float]:
    """Return the ratios of step times in the solution of the step-time fit (``beta``), by architecture and device."""
    of_architecture = dict(zip(architectures, beta[1 : 1 + len(architectures)], strict=True))
    of_device = dict(zip(devices, beta[1 + len(architectures) : -2], strict=True))
    home = {row.device.name: row.device.architecture for row in rows}
    ratio = {"all": beta[0]} | {name: beta[0] + term for name, term in of_architecture.items()}
    ratio |= {name: beta[0] + of_architecture[home[name]] + term for name, term in of_device.items()}
    return {name: round(float(np.exp(value)), 4) for name, value in ratio.items()}


def fit_sample_ratio(rows: list[SubmissionRow], rounds: list[str], towards: str) -> SubmissionSamples | None:
    """Fit how many samples to target submissions need, relative to the law of MLPerf's reference runs of their task.

    Parameters
    ----------
    rows : list of SubmissionRow
        Submissions of the task.
    rounds : list of str
        All rounds of MLPerf, in order.
    towards : str
        Round to predict; rows of nearby rounds weigh most.

    Returns
    -------
    SubmissionSamples, optional
        Weighted median of samples / law, and rms of its logarithm about that; None with too few rows.
    """
    fitted = [row for row in rows if row.samples > 0]
    if len(fitted) < _MIN_SUBMISSIONS_TO_FIT:
        return None
    points = [row.predicted_target for row in fitted]
    by_law = [float(point.task.law.samples(point.global_batch)) for point in points]
    logs = np.log([row.samples / samples for row, samples in zip(fitted, by_law, strict=True)])
    weights = _weights(fitted, rounds, towards)
    centre = _weighted_median(logs, weights)
    rms = float(np.sqrt(np.average((logs - centre) ** 2, weights=weights)))
    source, ratio = f"{len(fitted)} submissions of rounds {rounds[0]} to {rounds[-1]}", round(float(np.exp(centre)), 4)
    return SubmissionSamples(ratio=ratio, residual=round(rms, 4), rows=len(fitted), source=source)


def fit_evaluation(rows: list[SubmissionRow], code: TrainingCode, rounds: list[str], towards: str) -> QualityEvaluation:
    """Fit the time of one quality evaluation: a multiple of its forward passes plus a constant time.

    Both come from weighted medians over submissions.

    Parameters
    ----------
    rows : list of SubmissionRow
        Submissions of the task.
    code : TrainingCode
        Fitted ratios of step times, which also hold for forward passes.
    rounds : list of str
        All rounds of MLPerf, in order.
    towards : str
        Round to predict; rows of nearby rounds weigh most.

    Returns
    -------
    QualityEvaluation
        ``work`` (multiple of the forward passes) and ``fixed`` (constant time [s]), from the mixture of both that
        scatters least over the rows.
    """
    evaluation = rows[0].predicted_target.task.evaluation
    fitted = [row for row in rows if row.evaluation_time >= 0 and row.evaluation_count > 0]
    if len(fitted) < _MIN_SUBMISSIONS_TO_FIT:
        return evaluation
    plain = evaluation.model_copy(update={"work": 1.0, "fixed": 0.0})
    neutral = rows[0].predicted_target.task.model_copy(update={"code": code, "evaluation": plain})
    counts = [1.0 if evaluation.beside else row.evaluation_count for row in fitted]
    seconds = np.array([row.evaluation_time for row in fitted]) / np.array(counts)
    passes = np.array([_retimed(row, neutral).evaluation_time for row in fitted])
    weights = _weights(fitted, rounds, towards)
    # Return work and fixed seconds in that mixture of both that scatters least about the measured values.
    usual, best = float(np.median(passes)), (float("inf"), 1.0, 0.0)
    for share in _TRIED_FORWARD_PASS_SHARES:
        mixture = share * passes / usual + (1.0 - share)
        scale = _weighted_median(seconds / mixture, weights)
        logs = np.abs(np.log(seconds[seconds > 0] / mixture[seconds > 0] / max(scale, _MIN_EVALUATION_SCALE)))
        scatter = float(np.median(logs)) if len(logs) and scale > 0 else float("inf")
        best = min(best, (scatter, share * scale / usual, (1.0 - share) * scale))
    work, fixed = (0.0, 0.0) if _weighted_median(seconds, weights) <= 0 else best[1:]
    return evaluation.model_copy(update={"work": round(work, 4), "fixed": round(fixed, 3)})


#: Shares of passes in the seconds of an evaluation that are tried, and seconds that are none.
_TRIED_FORWARD_PASS_SHARES, _MIN_EVALUATION_SCALE = (0.0, 0.25, 0.5, 0.75, 1.0), 1e-12


def _weighted_median(values: Array, weights: Array) -> float:
    """Compute the weighted median: the value below which half of the weight lies.

    Examples
    --------
    >>> _weighted_median(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 5.0]))
    2.0
    """
    order = np.argsort(values)
    place = int(np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2.0))
    return float(values[order][min(place, len(values) - 1)])


def _retimed(row: SubmissionRow, task: TrainingTask) -> TargetTime:
    """Predict a submission's time to target again under other parameters of its task (code, evaluation, samples)."""
    runs, point = row.averaged_runs if row.averaged_runs > 0 else 1.0, row.predicted_target
    return time_from_prediction(task, point.prediction, point.forward_time, global_batch=point.global_batch, runs=runs)


def _by_platform(
    task: TrainingTask, rows: list[SubmissionRow], change: Callable[[TrainingTask, list[SubmissionRow]], TrainingTask]
) -> TrainingTask:
    """Apply a fit (``change``) to a training task with its GPU submissions, and to its TPU platforms with theirs."""
    apart = {kind: [row for row in rows if row.device.kind == kind] for kind in task.platforms}
    base = change(task, [row for row in rows if row.device.kind not in apart])
    platforms = {kind: _platform(change(base.for_device_kind(kind), part), base) for kind, part in apart.items()}
    return base.model_copy(update={"platforms": platforms})


def _platform(task: TrainingTask, base: TrainingTask) -> PlatformDifferences:
    """Return the section of a training task for one kind of device (TPU): what differs from the GPU task."""
    evaluation = None if task.evaluation == base.evaluation else task.evaluation
    submissions = None if task.submissions == base.submissions else task.submissions
    return PlatformDifferences(code=task.code, evaluation=evaluation, submissions=submissions)


def fit_training_task(task: TrainingTask, rows: list[SubmissionRow], rounds: list[str], towards: str) -> TrainingTask:
    """Fit a training task's step-time ratios, sample ratio and evaluation cost to MLPerf submissions.

    GPUs and each other kind of device (TPU) are fitted apart.

    Parameters
    ----------
    task : TrainingTask
        Training task before the fit.
    rows : list of SubmissionRow
        Submissions of the task.
    rounds : list of str
        All rounds of MLPerf, in order.
    towards : str
        Round to predict; rows of nearby rounds weigh most.

    Returns
    -------
    TrainingTask
        Copy of the task with fitted values.
    """
    return _by_platform(task, rows, lambda known, kind_rows: _fitted(known, kind_rows, rounds, towards))


def _fitted(task: TrainingTask, rows: list[SubmissionRow], rounds: list[str], towards: str) -> TrainingTask:
    if not rows:
        return task
    code = fit_step_time_ratio(rows, rounds, towards)
    samples, evaluation = fit_sample_ratio(rows, rounds, towards), fit_evaluation(rows, code, rounds, towards)
    return task.model_copy(update={"code": code, "submissions": samples, "evaluation": evaluation})


def step_residual(rows: list[SubmissionRow], rounds: list[str]) -> float:
    """Compute the cross-validated error of a task's step times: rms of log(measured / predicted).

    Each round is predicted by a fit to the other rounds.

    Parameters
    ----------
    rows : list of SubmissionRow
        Submissions of the task.
    rounds : list of str
        All rounds of MLPerf, in order.

    Returns
    -------
    float
        The rms in log units; with a single round that of the fit itself and at least ``_ONE_ROUND``, with too few rows
        0.
    """
    known = [row for row in rows if row.step_time > 0]
    if len(known) < _MIN_SUBMISSIONS_TO_FIT:
        return 0.0
    logs = []
    for towards in sorted({row.round_name for row in known}):
        other_rounds = [row for row in known if row.round_name != towards] or known
        code = fit_step_time_ratio(other_rounds, rounds, towards)
        task = known[0].predicted_target.task.model_copy(update={"code": code})
        logs += [np.log(row.step_time / _retimed(row, task).step_time) for row in known if row.round_name == towards]
    spread = 1.48 * float(np.median(np.abs(logs)))
    rms = float(np.sqrt(np.mean(np.minimum(np.abs(logs), 4.0 * max(spread, _LEAST_SPREAD)) ** 2)))
    return round(rms if len({row.round_name for row in known}) > 1 else max(rms, _ONE_ROUND), 4)


#: Least residual of a code that only one round is known of: rounds of the other codes differ by so much.
_ONE_ROUND = 0.15


#: Fields of the fitted blocks of a task file, in the order in which a file has them.
_BLOCK_FIELDS = {
    "code": (
        "software", "ratio", "samples_per_gpu", "per_doubling", "several_nodes", "per_round", "round", "start",
        "residual", "rows", "source",
    ),
    "evaluation": ("samples", "every", "first", "work", "fixed", "beside", "source"),
    "submissions": ("ratio", "residual", "rows", "source"),
}  # fmt: skip


def is_mlperf_task_table(columns: Iterable[str]) -> bool:
    """Return True if a table holds MLPerf reference convergence points or submissions, by its column names.

    Parameters
    ----------
    columns : iterable of str
        Column names of the table.

    Returns
    -------
    bool
        True for tables that are fitted into task files.
    """
    names = set(columns)
    return is_convergence_table(names) or names >= MlperfTrainingTable.identifying_columns


def fit_tasks(files: Sequence[str], output_dir: str | None, date: str) -> int:
    """Fit training tasks to MLPerf tables and write their task files.

    Reference convergence points give laws of samples to target; submissions give step-time ratios, sample ratios and
    evaluation costs.

    Parameters
    ----------
    files : sequence of str
        Measured tables.
    output_dir : str, optional
        Folder to write task files to; the catalog's folder by default.
    date : str
        Date written into results (YYYY-MM-DD).

    Returns
    -------
    int
        The exit code.

    Raises
    ------
    SpecError
        If the folder does not exist.
    """
    folder = Path(output_dir) if output_dir is not None else catalog_root() / CATALOG_FOLDERS["tasks"]
    if not is_folder(folder):
        raise SpecError(f"--output-dir {folder}: is not a folder")
    for file in files:
        table = usable_rows_of_table(file)
        laws = is_convergence_table(table.columns)
        for path in _write_laws(table, folder) if laws else _write_submissions(table, folder, date):
            sys.stderr.write(f"wrote {path}\n")
    return 0


def _write_submissions(table: pd.DataFrame, folder: Path, date: str) -> list[Path]:
    """Fit tasks to submissions for the last round and write their task files; return the written files."""
    rows, rounds = _predicted_submissions(table), sorted(set(table["round"].astype(str)))
    written = []
    for name, file in entry_files("tasks").items():
        task_rows = [row for row in rows if row.task == name]
        if len(task_rows) < _MIN_SUBMISSIONS_TO_FIT:
            continue
        task = _by_platform(load_task(name), task_rows, partial(_with_provenance, rounds=rounds, date=date))
        path = folder / f"{name}.yaml"
        path.write_text(replace_task_blocks(file.read_text(encoding="utf-8"), task), encoding="utf-8")
        written.append(path)
    return written


def _with_provenance(task: TrainingTask, rows: list[SubmissionRow], *, rounds: list[str], date: str) -> TrainingTask:
    """Fit a task for the last round of its rows, with its cross-validated residual and a citation of sources."""
    if len(rows) < _MIN_SUBMISSIONS_TO_FIT:
        return task
    seen = sorted({row.round_name for row in rows})
    fitted = _fitted(task, rows, rounds, seen[-1])
    source = f"{fitted.code.rows} submissions of rounds {seen[0]} to {seen[-1]}, fitted {date}"
    values = {"residual": step_residual(rows, rounds), "source": f"{source}; residual: each round left out in turn"}
    return fitted.model_copy(update={"code": fitted.code.model_copy(update=values)})


def replace_task_blocks(text: str, task: TrainingTask) -> str:
    """Replace the fitted blocks (code, evaluation, submissions, platforms) in the text of a task file.

    Parameters
    ----------
    text : str
        Text of the task file.
    task : TrainingTask
        Fitted task.

    Returns
    -------
    str
        New text; other blocks are unchanged.
    """
    for name in ("submissions", "platforms"):
        text = _replaced(text, name, "")
    text = _replaced(text, "evaluation", _block("evaluation", task.evaluation))
    added = _block("submissions", task.submissions)
    if task.platforms:
        added += "platforms:\n"
        for kind, platform in task.platforms.items():
            blocks = "".join(_block(name, getattr(platform, name)) for name in _BLOCK_FIELDS)
            added += f"  {kind}:\n" + indent(blocks, "    ")
    return _replaced(text, "code", _block("code", task.code) + added)


#: Units of fields that carry one.
_FIELD_UNIT_SUFFIXES = {"fixed": " s", "start": " s"}


def _block(name: str, fields: Spec | None) -> str:
    """Format a section of a task as a YAML block with the given name; '' if ``fields`` is None."""
    if fields is None:
        return ""
    values = fields.model_dump(exclude_defaults=True)
    stated = [key for key in _BLOCK_FIELDS[name] if key in values]
    lines = [f"  {key}: {_shown(values[key])}{_FIELD_UNIT_SUFFIXES.get(key, '')}\n" for key in stated]
    return f"{name}:\n{''.join(lines)}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {number:g}" for key, number in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else f"{value:.12g}"


def _replaced(text: str, name: str, block: str) -> str:
    return re.sub(rf"(?m)^{name}:\n(?:[ \t].*\n)+", lambda _: block, text, count=1)


#: Two runs whose minutes differ by less than this share are not put in an order.
_TIE_TOLERANCE = 0.05
#: Columns of `errors_by_benchmark` that are shares.
_SHARE_COLUMNS = ("step", "samples", "minutes", "baseline", "inside")
#: Headings of `error_table_rows`.
CROSS_VALIDATION_HEADINGS = ("benchmark", "rows", "step", "samples", "minutes", "best baseline", "in 90 % interval")


def leave_one_round_out(rows: list[SubmissionRow], rounds: list[str]) -> Iterator[tuple[SubmissionRow, TargetTime]]:
    """Predict the time to target of each submission by its task fitted to all other MLPerf rounds (cross-validation).

    Parameters
    ----------
    rows : list of SubmissionRow
        Submissions.
    rounds : list of str
        All rounds of MLPerf, in order.

    Yields
    ------
    tuple of (SubmissionRow, TargetTime)
        Submission and prediction. Tasks with a single round are used without any fit.
    """

    def with_residual(task: TrainingTask, kind_rows: list[SubmissionRow]) -> TrainingTask:
        code = task.code.model_copy(update={"residual": step_residual(kind_rows, rounds)})
        return task.model_copy(update={"code": code})

    for name in sorted({row.task for row in rows}):
        task_rows = [row for row in rows if row.task == name]
        for towards in sorted({row.round_name for row in task_rows}):
            other_rounds = [row for row in task_rows if row.round_name != towards]
            task = load_task(name)
            codes = {kind: _unfitted(platform.code) for kind, platform in task.platforms.items()}
            platforms = {kind: PlatformDifferences(code=code) for kind, code in codes.items()}
            unfitted = {"code": _unfitted(task.code), "submissions": None, "platforms": platforms}
            task = task.model_copy(update=unfitted)
            if len(other_rounds) >= _MIN_SUBMISSIONS_TO_FIT:
                task = fit_training_task(task, other_rounds, rounds, towards)
            task = _by_platform(task, other_rounds, with_residual)
            for row in task_rows:
                if row.round_name == towards:
                    yield row, _retimed(row, task)


def _unfitted(code: TrainingCode) -> TrainingCode:
    terms = ("per_doubling", "several_nodes", "residual", "per_round", "start")
    return code.model_copy(update={"ratio": {}, **dict.fromkeys(terms, 0.0)})


def cross_validated_submissions(table: pd.DataFrame) -> pd.DataFrame:
    """Predict each MLPerf submission of a table by tasks fitted to the other rounds, and compute its errors.

    Parameters
    ----------
    table : DataFrame
        Table of kind ``training_runs``.

    Returns
    -------
    DataFrame
        One line per submission: ``benchmark``, ``round``, ``kind`` and name of the ``device``, ``gpus``; relative
        errors ``step``, ``samples`` and ``minutes`` (nan where not measured); ``measured`` and ``predicted`` time [s];
        ``inside`` (True within the 90 % interval); and the relative errors of three baselines.
    """
    rows, baselines, lines = _predicted_submissions(table), other_round_baselines(table), []
    for row, point in leave_one_round_out(rows, sorted(set(table["round"].astype(str)))):
        cells = table.iloc[row.row_index]
        low, high = point.interval
        minutes, device = float(cells["minutes_to_target"]), point.prediction.system.device
        line = {
            "benchmark": cells["benchmark"], "round": row.round_name, "kind": device.kind, "device": device.name,
            "gpus": int(float(cells["n_gpus"])),
            "step": abs(point.step_time / row.step_time - 1.0),
            "samples": abs(point.samples / row.samples - 1.0),
            "minutes": abs(point.time_to_target / row.time_to_target - 1.0),
            "measured": row.time_to_target, "predicted": point.time_to_target,
            "inside": float(low <= row.time_to_target <= high),
        }  # fmt: skip
        known = baselines.iloc[row.row_index]
        lines.append(line | {name: abs(value / minutes - 1.0) for name, value in known.items()})
    return pd.DataFrame(lines)


def errors_by_benchmark(submissions: pd.DataFrame) -> pd.DataFrame:
    """Average the cross-validated errors of MLPerf submissions by benchmark and kind of device.

    Parameters
    ----------
    submissions : DataFrame
        Result of `cross_validated_submissions`.

    Returns
    -------
    DataFrame
        Lines are benchmarks on GPUs, all GPUs, and each other kind of device. Columns: number of ``rows``; mean
        absolute errors ``step``, ``samples``, ``minutes``; ``baseline`` (the best of three baselines); share ``inside``
        the interval.
    """
    on_gpus = submissions["kind"] == "gpu"
    groups = [(str(name), rows) for name, rows in submissions[on_gpus].groupby("benchmark")]
    groups.sort(key=lambda group: -len(group[1]))
    groups.append(("all on GPUs", submissions[on_gpus]))
    groups += [(f"all on {str(kind).upper()}s", rows) for kind, rows in submissions[~on_gpus].groupby("kind")]
    names = ["scaled_best", "one_utilisation", "nearest"]
    lines = [
        {
            "benchmark": name,
            "rows": len(rows),
            **rows[["step", "samples", "minutes"]].mean(),
            "baseline": rows[names].mean().min(),
            "inside": rows["inside"].mean(),
        }
        for name, rows in groups
    ]
    return pd.DataFrame(lines).set_index("benchmark")


def error_table_rows(submissions: pd.DataFrame) -> list[tuple[str, ...]]:
    """Format the errors of `errors_by_benchmark` as text cells, for columns `CROSS_VALIDATION_HEADINGS`.

    Parameters
    ----------
    submissions : DataFrame
        Result of `cross_validated_submissions`.

    Returns
    -------
    list of tuple of str
        Cells of one line per group of submissions.
    """
    return [
        (str(name), f"{errors['rows']:,.0f}", *map(format_percent, errors[list(_SHARE_COLUMNS)]))
        for name, errors in errors_by_benchmark(submissions).iterrows()
    ]


def gpu_ranking_accuracy(submissions: pd.DataFrame) -> tuple[float, int]:
    """Compute how often the prediction ranks two GPU models in the right order of time to target.

    The two submissions of a pair agree in benchmark, round and number of GPUs.

    Parameters
    ----------
    submissions : DataFrame
        Result of `cross_validated_submissions`.

    Returns
    -------
    tuple of (float, int)
        (share in the right order, number of pairs whose times differ by more than `_TIE_TOLERANCE`).
    """
    right = pairs = 0
    on_gpus = submissions[submissions["kind"] == "gpu"]
    for _, rows in on_gpus.groupby(["benchmark", "round", "gpus"]):
        measured, predicted = rows["measured"].to_numpy(), rows["predicted"].to_numpy()
        others = rows["device"].to_numpy()[:, None] != rows["device"].to_numpy()[None, :]
        slower = (measured[:, None] > (1.0 + _TIE_TOLERANCE) * measured[None, :]) & others
        pairs += int(slower.sum())
        right += int((slower & (predicted[:, None] > predicted[None, :])).sum())
    return (right / pairs if pairs else float("nan")), pairs


def format_percent(share: float) -> str:
    """Format a fraction as a percentage; a dash if it is not finite.

    Parameters
    ----------
    share : float
        The fraction.

    Returns
    -------
    str
        Text such as ``4.2 %``.

    Examples
    --------
    >>> format_percent(0.0527), format_percent(float("nan"))
    ('5.3 %', '–')
    """
    return f"{100.0 * share:.1f} %" if np.isfinite(share) else "–"
