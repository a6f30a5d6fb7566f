"""Submissions to MLPerf Training: each row becomes a run of its benchmark's task on the row's system.

Predicted are minutes to target, and step time, samples and evaluation time apart. Tables of whole runs and tables of
steps hold the same submissions.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from paleo.errors import PaleoError, PlanError, SpecError
from paleo.predict import predict
from paleo.specs.device import find_device, load_link
from paleo.specs.software import SoftwareProfile, load_software
from paleo.specs.system import InterconnectLevel, System, load_system
from paleo.specs.task import TrainingTask, mlperf_task
from paleo.studies.target import (
    MODEL_PARALLEL_STRATEGIES,
    TargetTime,
    task_run,
    time_to_target,
    time_to_target_of_first_feasible_strategy,
)
from paleo.tables.cells import Array, number_or_nan
from paleo.tables.kinds._transformers import strategy_of_run
from paleo.tables.run_tables import (
    RUN_TABLES,
    USUAL_SYSTEM_OF_DEVICE,
    Row,
    RowPrediction,
    RunTable,
    has_value,
    integer_cell,
    number_cell,
    peak_flops_step_time,
    row_dicts,
    row_prediction,
    system_of_run,
    with_devices_per_node,
    with_measured_device_variant,
)
from paleo.units import MILLISECOND, MINUTE

if TYPE_CHECKING:
    from paleo.specs.calibration import Calibration
    from paleo.tables.base import Predictions


#: Systems of the catalog that were measured with copies through the host, which submissions on that card do not show.
_SUBSTITUTE_SYSTEMS = {"l40s-pcie-8gpu": "pcie4-8gpu"}
#: What joins nodes of catalog systems that are sold as single ones.
_DEFAULT_FABRIC_LINK = "infiniband-hdr"
#: Formats of numbers of submissions: those of tensor cores, whatever the row says of accumulation.
_TPU_DTYPE = "bf16"
#: Format of DeepSpeed's engine, which has none of eight bits, whatever others of the round use.
_DEEPSPEED_DTYPE = "bf16"


def _task_of_row(row: Row) -> TrainingTask:
    """Return the training task (a network trained to a quality target) of an MLPerf submission, by benchmark and round.

    Raise SpecError if the catalog has none.
    """
    benchmark, name = str(row["benchmark"]).strip(), str(row["round"]).strip()
    task = mlperf_task(benchmark, name)
    if task is None:
        raise SpecError(f"benchmark {benchmark!r} has no task in the catalog (models/tasks)")
    return task


def submission_system(row: Row) -> System:
    """Build the system of an MLPerf submission, with its device and devices per node, and a network between nodes."""
    device, gpus, nodes = str(row["device"]), integer_cell(row, "n_gpus"), integer_cell(row, "nodes", 1)
    name = str(row["system"]) if has_value(row, "system") else USUAL_SYSTEM_OF_DEVICE.get(device, "pcie4-8gpu")
    name = _SUBSTITUTE_SYSTEMS.get(name, name)
    system = with_measured_device_variant(load_system(name), row)
    node_size = -(-gpus // max(nodes, 1))
    if not system.levels:
        return system
    system = with_devices_per_node(system, node_size) if nodes > 1 or node_size < system.devices_per_node else system
    # The system with levels that hold so many devices a node and so many nodes.
    levels = list(system.levels)
    if levels and levels[-1].ranks is not None and levels[-1].ranks < node_size:
        levels[-1] = levels[-1].model_copy(update={"ranks": node_size})
    if nodes > 1 and (not levels or levels[-1].ranks is not None):
        link, ports = load_link(_DEFAULT_FABRIC_LINK), max(1, node_size // 4)
        levels.append(InterconnectLevel(name="fabric", ranks=None, link=link, topology="fabric", ports=ports))
    devices = max(1 if nodes > 1 else system.devices_per_node, node_size)
    return system.model_copy(update={"levels": tuple(levels), "devices_per_node": devices})


def training_gpus_and_options(row: Row, rows: float, task: TrainingTask) -> tuple[int, dict[str, str]]:
    """Determine how an MLPerf submission spreads its batch: (GPUs that train, `Run` options that split a sample).

    If a batch has fewer input ``rows`` (packed sequences or images) than GPUs and no degrees are stated, several GPUs
    share a sample. A language model takes up to eight tensor-parallel ranks, a volume up to four spatial ranks (TPUs:
    up to 16, also for images). Otherwise as many GPUs train as divide the batch, and the others evaluate.
    """
    gpus = integer_cell(row, "n_gpus")
    if rows >= gpus or any(has_value(row, axis) for axis in ("tp", "pp", "cp")):
        return gpus, {}
    ranks = max(count for count in range(1, int(rows) + 1) if rows % count == 0)
    split_on_tpu = on_tpu(row) and task.model in _SPATIALLY_SPLIT_NETWORKS
    most_neighbours = 16 if split_on_tpu else 4 if task.model == "unet3d" else 1
    axis, limit = _SAMPLE_SPLIT_AXES.get(task.code.software, ("spatial", most_neighbours))
    degree = max(degree for degree in (1, 2, 4, 8, 16) if ranks * degree <= gpus and degree <= limit)
    more = ",zero=1,sp" if axis == "tp" else ""
    return ranks * degree, {} if degree == 1 else {"strategy": f"{axis}={degree},dp={ranks}{more}"}


def on_tpu(row: Row) -> bool:
    """Return True if the device of a measured run is a TPU."""
    return str(row.get("device", "")).startswith("tpu")


#: Networks over whose images a compiler divides the space.
_SPATIALLY_SPLIT_NETWORKS = ("unet3d", "maskrcnn", "ssd-resnet34")
#: The axis that takes GPUs beyond the samples of a batch, and the most ranks of it, by software.
_SAMPLE_SPLIT_AXES = {"megatron-core": ("tp", 8)}


#: Batches of the Transformer above this one count tokens, of which a pair of sentences has so many.
_MAX_SENTENCES_PER_BATCH, _TOKENS_PER_SENTENCE_PAIR = 4096.0, 28.0
#: Pairs of sentences in a row of the Transformer's packed rows, in which TPUs count batches and, from v0.7 on, samples:
#: 4,590,101 pairs in the 566,340 rows of an epoch.
SENTENCE_PAIRS_PER_ROW = 4590101.0 / 566340.0


def samples_in_task_unit(row: Row, column: str) -> float:
    """Convert a cell of an MLPerf submission to samples as its task counts them; nan if empty.

    Columns are samples to target or samples per batch. The Transformer's batches count tokens on GPUs and packed rows
    on TPUs; samples fewer than an epoch count packed rows, too. Recommenders' logs of v0.7 on TPUs count evaluations in
    place of epochs.
    """
    value = number_cell(row, column, math.nan)
    task = _task_of_row(row)
    if task.model.startswith("dlrm") and on_tpu(row) and value > 2.0 * task.dataset_samples:
        return value / task.dataset_samples * task.evaluation.every
    if task.model != "transformer_big":
        return value
    counts_rows = on_tpu(row) if column == "global_batch" else value < task.dataset_samples
    if counts_rows:
        return value * SENTENCE_PAIRS_PER_ROW
    counts_tokens = column == "global_batch" and value > _MAX_SENTENCES_PER_BATCH
    return value * (1.0 / _TOKENS_PER_SENTENCE_PAIR) if counts_tokens else value


def boolean_cell(row: Row, key: str, default: bool) -> bool:
    """Read a cell of a table row that says yes or no, in words or as a number; ``default`` if the cell is empty.

    >>> boolean_cell({"sp": "True"}, "sp", False), boolean_cell({"sp": 0.0}, "sp", True), boolean_cell({}, "sp", True)
    (True, False, True)
    """
    return str(row[key]).strip().lower() in ("true", "1", "1.0") if has_value(row, key) else default


def strategy_of_row(row: Row, gpus: int, software: SoftwareProfile) -> str:
    """Build the strategy string (such as ``tp=8,pp=4``) of an MLPerf submission's run.

    The data-parallel degree is ``gpus`` over the product of the other degrees. Optimizer sharding and sequence
    parallelism follow the row's cells, else the software's default. Virtual stages are 1 unless stated.
    """
    product = math.prod(integer_cell(row, axis, 1) for axis in ("tp", "pp", "cp"))
    if gpus % product:
        raise PlanError(f"tp, pp and cp take {product} GPUs, which do not divide {gpus}")
    sharded = boolean_cell(row, "distributed_optimizer", software.parallelism.zero > 0)
    sequences = boolean_cell(row, "sequence_parallel", software.parallelism.sequence_parallel)
    stated = {"sharding": "zero1" if sharded else "none", "sequence_parallel": int(sequences)}
    return strategy_of_run({**row, **stated, "dp": gpus // product, "vp": integer_cell(row, "vp", 1)}, software)


def _run_options_of_row(row: Row, task: TrainingTask, gpus: int) -> dict[str, Any]:
    """Return the `Run` options that an MLPerf submission states: dtype, strategy and microbatch, by field name."""
    options: dict[str, Any] = {}
    if on_tpu(row) or has_value(row, "dtype"):
        options["dtype"] = _TPU_DTYPE if on_tpu(row) else str(row["dtype"])
    if any(has_value(row, axis) for axis in ("tp", "pp", "cp")):
        options["strategy"] = strategy_of_row(row, gpus, load_software(task.code.software))
    if has_value(row, "micro_batch") and any(has_value(row, axis) for axis in ("tp", "pp")):
        options["microbatch"] = integer_cell(row, "micro_batch")
    return options


#: Cells that decide a prediction: rows that agree in them are predicted once.
_PREDICTION_COLUMNS = (
    "benchmark", "round", "system", "device", "n_gpus", "nodes", "dtype", "global_batch", "tp", "pp", "cp", "vp",
    "micro_batch", "sequence_parallel", "distributed_optimizer", "runs",
)  # fmt: skip


def submission_time_to_target(row: Row, calibration: Calibration | None = None) -> TargetTime:
    """Predict the time to target of an MLPerf submission; raise PaleoError with the reason if it cannot be modelled.

    ``calibration`` is a user's calibration; None: the catalog's calibrations.
    """
    cells = tuple((name, row[name]) for name in _PREDICTION_COLUMNS if has_value(row, name))
    if not has_value(row, "dtype") and "deepspeed" in str(row.get("framework", "")).lower():
        cells = (*cells, ("dtype", _DEEPSPEED_DTYPE))
    return _known_target(cells) if calibration is None else _target(cells, calibration)


@lru_cache(maxsize=4096)
def _known_target(cells: tuple[tuple[str, Any], ...]) -> TargetTime:
    return _target(cells, None)


def _target(cells: tuple[tuple[str, Any], ...], calibration: Calibration | None) -> TargetTime:
    row = dict(cells)
    system = submission_system(row)
    task = _task_of_row(row).for_device_kind(system.device.kind)
    batch = samples_in_task_unit(row, "global_batch")
    if not batch >= 1:
        raise SpecError("global_batch is not stated")
    gpus, spread = training_gpus_and_options(row, max(1, round(batch / task.packed)), task)
    runs = float(row.get("runs", 1.0))
    run = task_run(task, gpus, batch, **{**_run_options_of_row(row, task, gpus), **spread})
    priced = partial(time_to_target, task, system, global_batch=batch, runs=runs, calibration=calibration)
    point = priced(run)
    if point.prediction.memory.fits or "strategy" in run.model_fields_set:
        return point
    # code of submissions that splits no tensors makes room by smaller passes, which take about as long together
    splits_tensors = task.code.software in _SAMPLE_SPLIT_AXES
    plans = [degrees for degrees in MODEL_PARALLEL_STRATEGIES if splits_tensors or "tp=" not in degrees]
    fitting = time_to_target_of_first_feasible_strategy(plans, lambda **stated: priced(run.model_copy(update=stated)))
    return fitting or point


# rows of tables of steps

#: How a table of steps names the source of a submission, and what its notes say of the batch that was logged.
_MLPERF_TRAINING_SOURCE_PATTERN = re.compile(r"MLPerf Training (v\d+\.\d+)")
_LOGGED_BATCH = re.compile(r"logged batch (\d+)")
#: Benchmarks that such tables name otherwise than MLPerf does.
_MLPERF_BENCHMARK_NAMES = {"resnet50-v1.5": "resnet", "ssd-resnet34": "ssd"}


def mlperf_submission_row(row: Row) -> Row | None:
    """Convert a row of a table of training steps to a row of a table of MLPerf submissions.

    None if its source is no round of MLPerf Training or the catalog has no task for its network.

    >>> row = {"source": "MLPerf Training v3.0, Dell", "model": "BERT", "device": "l40", "n_gpus": 2, "dtype": "fp16"}
    >>> mlperf_submission_row({**row, "global_batch": 48})["global_batch"]  # two sequences are packed into a row
    96.0
    """
    edition = _MLPERF_TRAINING_SOURCE_PATTERN.match(str(row.get("source", "")))
    slug = str(row.get("model_slug") or row.get("model", "")).strip().lower()
    benchmark = _MLPERF_BENCHMARK_NAMES.get(slug, slug)
    task = mlperf_task(benchmark, edition.group(1)) if edition else None
    if edition is None or task is None:
        return None
    logged = _LOGGED_BATCH.search(str(row.get("notes", "")))
    counted = row["global_batch"] if "global_batch" in row else row["batch_per_gpu"] * integer_cell(row, "n_gpus")
    batch = float(logged.group(1)) if logged else float(counted) * task.packed
    same = {name: row[name] for name in ("system", "device", "n_gpus", "nodes", "dtype") if has_value(row, name)}
    return {**same, "benchmark": benchmark, "round": edition.group(1), "global_batch": batch}


class NetworkStepTable(RunTable):
    """Abstract base of tables of training steps, some rows of which are from submissions to MLPerf Training."""

    def system_of_row(self, row: Row) -> System:
        """Build the system on which a measured training step ran, by `system_of_run`."""
        return system_of_run(row)

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict a measured training step [s]: by its task for an MLPerf submission, else by `predict_network_row`."""
        submission = mlperf_submission_row(row)
        if submission is None:
            return self.predict_network_row(row, software)
        calibration = self.applicable_calibration(submission_system(submission))
        point = submission_time_to_target(submission, calibration)
        known = point.prediction
        if software is not None:
            return row_prediction(predict(known.model, known.system, known.run, software, calibration))
        names = (known.system.device.name, point.task.name)
        return RowPrediction(point.step_time, *point.step_interval, peak_flops_step_time(known), *names)

    @abstractmethod
    def predict_network_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the step time [s] of a measured run that is no MLPerf submission, by its network and options."""


class MlperfTrainingTable(RunTable):
    """Table of submissions to MLPerf Training, one per row; the measured value is minutes to target.

    Rows whose samples, batch, system and minutes repeat another row's are copies of its logs and are counted once.
    """

    name = "training_runs"
    identifying_columns = frozenset({"benchmark", "round", "device", "n_gpus", "global_batch", "minutes_to_target"})
    optional_columns = (
        "cp distributed_optimizer dtype evaluation_s framework grad_accum interconnect micro_batch nodes other_s pp "
        "recompute runs samples_to_target sequence_parallel step_ms submitter system tp vp"
    )
    configuration_columns = (
        "submitter", "system", "nodes", "dtype", "tp", "pp", "cp", "vp", "micro_batch", "sequence_parallel",
        "distributed_optimizer", "recompute", "runs",
    )  # fmt: skip
    measured_column = "minutes_to_target"
    measured_unit_in_si = MINUTE
    used_for_fitting = False

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the time to target of an MLPerf submission [s]; the baseline is all samples' model FLOP at peak."""
        point = submission_time_to_target(row, self.applicable_calibration(submission_system(row)))
        ideal = peak_flops_step_time(point.prediction) * point.samples / point.global_batch
        names = (point.prediction.system.device.name, point.task.name)
        return RowPrediction(point.time_to_target, *point.interval, ideal, *names)

    def secondary_quantities(self, frame: pd.DataFrame) -> dict[str, tuple[Array, Array]]:
        """Compute (predicted, measured) step time, samples to target and evaluation time of MLPerf submissions.

        Keys are ``step`` [s], ``samples`` and ``evaluation`` (all evaluations) [s]. Arrays have shape (rows,); nan
        where either value is missing.
        """
        points = [self._point(row) for row in row_dicts(frame)]
        measured = {
            "step": number_or_nan(frame, "step_ms") * MILLISECOND,
            "samples": np.array([_samples(row) for row in row_dicts(frame)]),
            "evaluation": number_or_nan(frame, "evaluation_s"),
        }
        missing = (np.nan, np.nan, np.nan)
        parts = [missing if p is None else (p.step_time, p.samples, p.total_evaluation_time) for p in points]
        predicted, alone = np.array(parts, dtype=np.float64).reshape(-1, 3).T, ~repeated_rows(frame)
        known = {name: np.where(alone & (values > 0), values, np.nan) for name, values in measured.items()}
        return {name: (part, values) for part, (name, values) in zip(predicted, known.items(), strict=True)}

    def _point(self, row: Row) -> TargetTime | None:
        try:
            return submission_time_to_target(row, self.applicable_calibration(submission_system(row)))
        except PaleoError:
            return None

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Predict the time to target of MLPerf submissions; copies of another submission's log are left out."""
        predictions = super().predict(frame)
        predictions.failure_reasons[repeated_rows(frame)] = "repeats the log of another row"
        return predictions


def _samples(row: Row) -> float:
    """Return the measured samples to target of an MLPerf submission, as its task counts them; nan if not known."""
    try:
        return samples_in_task_unit(row, "samples_to_target")
    except (PaleoError, ValueError, KeyError):
        return float("nan")


def repeated_rows(frame: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask of MLPerf submissions that repeat an earlier row's log, shape (rows,).

    Such rows agree in benchmark, round, device, number of GPUs, batch, samples and minutes.
    """
    same = ["benchmark", "round", "device", "n_gpus", "global_batch", "samples_to_target", "minutes_to_target"]
    known = [name for name in same if name in frame.columns]
    return frame.duplicated(known).to_numpy()


RUN_TABLES.register("training_runs")(MlperfTrainingTable())


#: Formats whose peak scales a score from one device to another; the first that a device has.
_BASELINE_PEAK_DTYPES = ("fp16", "bf16")


def peak_flops_of_devices(devices: pd.Series[str]) -> Array:
    """Look up the peak FLOP/s (fp16, else bf16) of devices by name; nan for devices that the catalog lacks."""

    def peak(name: str) -> float:
        for dtype in _BASELINE_PEAK_DTYPES:
            with suppress(PaleoError):
                return find_device(name).peak_flops_per_s(dtype)
        return math.nan

    known = {str(name): peak(str(name)) for name in devices.unique()}
    return np.asarray(devices.astype(str).map(known), dtype=np.float64)


#: How many powers of e in count another device is worth.
_OTHER_DEVICE_PENALTY = 10.0


def _work(frame: pd.DataFrame) -> Array:
    """Compute minutes x GPUs x peak FLOP/s of MLPerf submissions, a proxy for the work of a run, shape (rows,)."""
    minutes, gpus = (frame[name].to_numpy(dtype=np.float64) for name in ("minutes_to_target", "n_gpus"))
    return np.asarray(minutes * gpus * peak_flops_of_devices(frame["device"]))


def _least_work(other_rounds: pd.DataFrame, last: str) -> float:
    """Return the work of the best submission of the previous round; nan if that round has no usable row."""
    work = _work(other_rounds[other_rounds["round"] == last])
    return float(np.nanmin(work)) if np.isfinite(work).any() else np.nan


def _median_work(frame: pd.DataFrame, other_rounds: pd.DataFrame) -> Array:
    """Return the median work of other rounds on each row's device, or on all devices for a new one, shape (rows,)."""
    work = pd.Series(_work(other_rounds), index=other_rounds.index)
    medians = work.groupby(other_rounds["device"]).median()
    return np.asarray(frame["device"].map(medians).fillna(float(work.median())), np.float64)


def _nearest_work(frame: pd.DataFrame, other_rounds: pd.DataFrame) -> Array:
    """Return the work of the most similar submission of other rounds; nan if no other row is usable, shape (rows,).

    Most similar is a row of the same device with the nearest number of GPUs.
    """
    work = _work(other_rounds)
    usable = np.isfinite(work)
    if not usable.any():
        return np.full(len(frame), np.nan)
    gpus, counts = (np.log(rows["n_gpus"].to_numpy(dtype=np.float64)) for rows in (frame, other_rounds))
    same = other_rounds["device"].to_numpy()[None, :] == frame["device"].to_numpy()[:, None]
    distance = np.abs(gpus[:, None] - counts[None, :]) + np.where(same, 0.0, _OTHER_DEVICE_PENALTY)
    return np.asarray(work[np.argmin(np.where(usable[None, :], distance, np.inf), axis=1)])


def other_round_baselines(frame: pd.DataFrame) -> pd.DataFrame:
    """Predict minutes to target of MLPerf submissions by three baselines, from all other rounds of their benchmarks.

    Parameters
    ----------
    frame : DataFrame
        Submissions, one per row.

    Returns
    -------
    DataFrame
        Columns ``scaled_best``, ``one_utilisation`` and ``nearest``, in minutes; nan if a benchmark has no other round.
    """
    rounds = sorted(frame["round"].unique())
    parts = [pd.DataFrame(columns=["scaled_best", "one_utilisation", "nearest"], dtype=np.float64)]
    for benchmark in frame["benchmark"].unique():
        submissions = frame[frame["benchmark"] == benchmark]
        for name in submissions["round"].unique():
            rows, other_rounds = submissions[submissions["round"] == name], submissions[submissions["round"] != name]
            if other_rounds.empty:
                continue
            before = [earlier for earlier in rounds if earlier < name and (other_rounds["round"] == earlier).any()]
            last = before[-1] if before else str(other_rounds["round"].min())
            work = {
                "scaled_best": _least_work(other_rounds, last),
                "one_utilisation": _median_work(rows, other_rounds),
                "nearest": _nearest_work(rows, other_rounds),
            }
            rate = rows["n_gpus"].to_numpy(dtype=np.float64) * peak_flops_of_devices(rows["device"])
            parts.append(pd.DataFrame({word: each / rate for word, each in work.items()}, index=rows.index))
    return pd.concat(parts).reindex(frame.index)
