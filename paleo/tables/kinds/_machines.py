"""Tables of measured machines: goodput, stragglers, power, storage, checkpoints and boot times."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paleo.errors import SpecError, suggest_names
from paleo.operations.base import OPTIMIZERS
from paleo.predict import Prediction, predict
from paleo.specs.model import load_model
from paleo.specs.prices import DEFAULT_RELIABILITY
from paleo.specs.run import Run
from paleo.specs.system import load_system
from paleo.step.waiting import expected_normal_maximum, expected_slowest_rank_time, normal_quantile
from paleo.studies.cost import Power, device_power, power_interval_factors, power_parameters
from paleo.studies.goodput import (
    CHECKPOINT_BYTES_PER_PARAMETER,
    ON_DEMAND_BOOT_TIME,
    SPOT_BOOT_TIME,
    CheckpointMode,
    RestartTimes,
    best_checkpoint_interval,
    checkpoint_pause,
    goodput,
    mean_time_between_failures,
    storage_by_name,
)
from paleo.tables.base import parse_column_names
from paleo.tables.run_tables import (
    RUN_TABLES,
    NonStepTimeTable,
    Row,
    RowPrediction,
    has_value,
    integer_cell,
    number_cell,
    positive_cell,
    software_profile_name,
)
from paleo.units import HOUR, KILO, MILLISECOND

if TYPE_CHECKING:
    from paleo.pricing.power import PowerParameters
    from paleo.specs.software import SoftwareProfile


# Rows of long runs: the share of time that trained

#: Accelerators in a node where a row counts those alone: 8 GPUs, 16 chips of Trainium (trn1.32xlarge).
_GPUS_PER_NODE, _TRAINIUM_PER_NODE = 8.0, 16.0
#: What a row says that tells a run of another row once more.
_REPEATED_RUN_NOTE = "by another count"
#: Words of rows whose machines people replaced and restarted, and the hours that took: OPT-175B's chronicle (41 % of 56
#: days over 90 restarts).
_MANUAL_RESTART_WORDS, _MANUAL_RESTART_HOURS = ("manual", "by hand", "without dlrover"), 6.6
#: Pause of a checkpoint where a row does not say how long it takes: copied to host memory, written beside training.
_CHECKPOINT_PAUSE = 10.0


def _mtbf_of(row: Row) -> float:
    """Return the mean time between failures of a measured training run [s].

    It is the row's cell, else its period over its number of failures, else that of its nodes at the usual failure rate.
    """
    if has_value(row, "mtbf_s"):
        return float(row["mtbf_s"])
    if has_value(row, "period_s") and has_value(row, "failures"):
        return float(row["period_s"]) / float(row["failures"])
    if has_value(row, "nodes"):
        nodes = float(row["nodes"])
    elif has_value(row, "gpus"):
        trainium = "trainium" in str(row.get("model", "")).lower()
        nodes = float(row["gpus"]) / (_TRAINIUM_PER_NODE if trainium else _GPUS_PER_NODE)
    else:
        raise SpecError("neither failures nor nodes are stated")
    return float(mean_time_between_failures(nodes=nodes, node_rate=DEFAULT_RELIABILITY.failures))


def _restart_time_of(row: Row) -> float:
    """Return the time from a failure of a measured run to the first new training step [s].

    It is the row's cell, else `_MANUAL_RESTART_HOURS` if its notes tell of a manual restart, else the usual restart
    plus load time.
    """
    words = f"{row.get('run', '')} {row.get('notes', '')}".lower()
    if has_value(row, "restart_s"):
        return float(row["restart_s"])
    if any(word in words for word in _MANUAL_RESTART_WORDS):
        return _MANUAL_RESTART_HOURS * HOUR
    return RestartTimes().total_time(number_cell(row, "load_s", 60.0))


class GoodputTable(NonStepTimeTable):
    """Table of long training runs, one per row; the measured value is goodput (share of time that trains) [-]."""

    name = "goodput"
    identifying_columns = frozenset({"gpus", "mtbf_s", "interval_s", "goodput"})
    optional_columns = "checkpoint_bytes checkpoint_s device failures load_s model nodes notes period_s restart_s run"
    configuration_columns = ("model", "run", "nodes", "failures", "checkpoint_s", "checkpoint_bytes", "notes")
    measured_column = "goodput"

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the goodput of a measured training run [-]; the interval spans the usual range of failure rates."""
        if _REPEATED_RUN_NOTE in str(row.get("notes", "")):
            raise SpecError("the run of another row by another count")
        mtbf, restart, save = _mtbf_of(row), _restart_time_of(row), number_cell(row, "checkpoint_s", _CHECKPOINT_PAUSE)
        stated = has_value(row, "interval_s")
        interval = float(row["interval_s"] if stated else best_checkpoint_interval(save=save, mtbf=mtbf))
        usual = DEFAULT_RELIABILITY
        share, low, high = (
            float(goodput(interval=interval, save=save, restart=restart, mtbf=mtbf * factor))
            for factor in (1.0, usual.failures / usual.high, usual.failures / usual.low)
        )
        if not math.isfinite(share):
            raise SpecError("nothing is known of failures")
        return RowPrediction(share, low, high, 1.0, str(row.get("device") or "-"), "closed form")


RUN_TABLES.register("goodput")(GoodputTable())


def rank_mean_times(*, ranks: int, mean: float, slowest: float, deviation: float) -> list[float]:
    """Construct mean step times of ranks that match a given average, slowest rank and standard deviation.

    The slowest rank is the first entry. The others are normal quantiles whose spread makes up the rest of the
    deviation. Times are in the unit of ``mean``.
    """
    if ranks == 1:
        return [slowest]
    mean_of_others = (ranks * mean - slowest) / (ranks - 1)
    left = ranks * deviation**2 - (slowest - mean) ** 2 - (ranks - 1) * (mean_of_others - mean) ** 2
    scores = normal_quantile((np.arange(1.0, ranks) - 0.375) / (ranks - 1 + 0.25))
    spread = np.sqrt(max(left, 0.0) / max(float(np.sum(scores**2)), 1.0))
    return [slowest, *np.minimum(mean_of_others + spread * scores, slowest).tolist()]


class StragglerTable(NonStepTimeTable):
    """Table of pipeline stages with stragglers, from traces of training jobs, one stage per row.

    The measured value is the compute time of the slowest rank, averaged over steps [s].
    """

    name = "stragglers"
    identifying_columns = frozenset({"trace", "ranks", "persistent_sd_s", "independent_sd_s", "compute_max_s"})
    optional_columns = "cause compute_mean_s slowest_rank_mean_s stage steps"
    configuration_columns = ("cause", "stage", "compute_mean_s", "slowest_rank_mean_s")
    measured_column = "compute_max_s"

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the compute time of a stage's slowest rank [s], as the expected maximum over its ranks.

        The baseline is the mean over ranks.
        """
        if not has_value(row, "ranks"):
            raise SpecError("ranks is not stated")
        ranks, mean = integer_cell(row, "ranks"), float(row["compute_mean_s"])
        noise, slowest = float(row["independent_sd_s"]), float(row["slowest_rank_mean_s"])
        means = rank_mean_times(ranks=ranks, mean=mean, slowest=slowest, deviation=float(row["persistent_sd_s"]))
        value = expected_slowest_rank_time(means, noise / mean)
        steps = max(integer_cell(row, "steps", 1), 1)
        error = 1.65 * noise / np.sqrt(steps) + 0.01 * value * float(expected_normal_maximum(ranks))
        return RowPrediction(value, value - error, value + error, mean, str(row["trace"]), "expected maximum")


RUN_TABLES.register("stragglers")(StragglerTable())


# Rows of measured watts: one GPU that trains under a power limit


class MeasuredNetwork(NamedTuple):
    """Network that a power row measured: catalog name, sizes that differ from the catalog's, and samples of an epoch.

    ``samples`` is needed for rows that state only the time of an epoch; None otherwise.
    """

    name: str
    sizes: Mapping[str, int | float | str] = MappingProxyType({})
    samples: float | None = None


#: Software of runs that name none: Zeus measured its traces in 2022, before PyTorch updated lists of tensors.
_ZEUS_PROFILE = "pytorch-eager@1.12"
#: Networks by the model and data set of a row, with the sizes that the usual scripts give them: SQuAD in 384 tokens
#: (huggingface/transformers, run_qa.py), tweets padded to the longest of a batch, utterances of 7 s.
_POWER_RUN_NETWORKS = {
    ("resnet50", "imagenet"): MeasuredNetwork("resnet50"),
    ("bert_base_uncased", "squad"): MeasuredNetwork("bert_base", {"seq": 384}),
    ("bert_base_uncased", "sentiment140"): MeasuredNetwork("bert_base", {"seq": 48}, 1_600_000),
    ("deepspeech2", "librispeech"): MeasuredNetwork("deepspeech2"),
    ("shufflenetv2", "cifar100"): MeasuredNetwork("shufflenet_v2"),
    ("ncf", "movielens-1m"): MeasuredNetwork("ncf", samples=5 * 994_169),
}


def _network_of_power_run(row: Row) -> MeasuredNetwork:
    """Return the network of a measured power run: the catalog's for columns ``model`` and ``dataset``.

    Raise SpecError if the catalog has none.
    """
    key = (str(row["model"]).strip().lower(), str(row.get("dataset", "")).strip().lower())
    if key not in _POWER_RUN_NETWORKS:
        known = [" on ".join(pair) for pair in _POWER_RUN_NETWORKS]
        raise SpecError(f"no network is known for {' on '.join(key)}; {suggest_names(' on '.join(key), known)}")
    return _POWER_RUN_NETWORKS[key]


def measured_step_time(row: Row) -> float | None:
    """Return the measured step time of a power run [s], as stated or from its time per epoch, or else None."""
    if has_value(row, "iteration_ms"):
        return positive_cell(row, "iteration_ms") * MILLISECOND
    samples = _network_of_power_run(row).samples
    if samples is None or not has_value(row, "time_per_epoch_s"):
        return None
    return positive_cell(row, "time_per_epoch_s") * integer_cell(row, "batch_size") / samples


def predict_board_power(row: Row, prediction: Prediction, figures: PowerParameters | None = None) -> Power:
    """Predict the power that a GPU board draws in a measured training run, under the run's power limit.

    If the measured step time is longer than predicted, the board idles for the rest (it waits for data).

    Parameters
    ----------
    row : Row
        Table row of the run: its cells by column name.
    prediction : Prediction
        Prediction of the run's step at the design power of its device.
    figures : PowerParameters, optional
        Power parameters to use instead of those of the device.

    Returns
    -------
    Power
        Power of the step under the limit, averaged over the measured step time [W].
    """
    device = prediction.system.device
    unlimited = device_power(prediction, figures)
    if unlimited is None:
        raise SpecError(f"device {device.name} states no design power (tdp)")
    least_clock = (figures or power_parameters(device)).least_voltage_clock
    limited = unlimited.with_power_limit(float(row["power_limit_w"]), least_clock)
    seconds = measured_step_time(row)
    return limited if seconds is None else limited.with_step_time(seconds)


class PowerTable(NonStepTimeTable):
    """Table of training runs, one per row; the measured value is the mean power of a board over an epoch [W].

    A board waits for data during the part of a stated step time that exceeds the predicted one. The baseline is the
    row's power limit times one constant per device.
    """

    name = "power"
    identifying_columns = frozenset({"model", "device", "batch_size", "power_limit_w", "average_power_w"})
    optional_columns = "dataset dtype iteration_ms n_gpus notes optimizer software time_per_epoch_s"
    configuration_columns = parse_column_names(
        "dataset n_gpus optimizer dtype software iteration_ms time_per_epoch_s notes"
    )
    measured_column = "average_power_w"

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the mean power of a GPU board in a measured training run under its power limit [W]."""
        prediction = self.predict_without_power_limit(row, software)
        watts, limit = predict_board_power(row, prediction), float(row["power_limit_w"])
        device = prediction.system.device
        factors, names = power_interval_factors(device), (device.name, prediction.run.software)
        return RowPrediction.with_factors(watts.average, factors, limit, *names)

    def predict_without_power_limit(self, row: Row, software: SoftwareProfile | None) -> Prediction:
        """Predict the training step of a measured power run without a power limit, at the device's design power."""
        network = _network_of_power_run(row)
        system, stated = load_system(str(row["device"])), str(row.get("optimizer", "")).strip().lower()
        fp32 = re.search(r"\bfp32\b", str(row.get("notes", "")))
        run = Run(
            gpus=integer_cell(row, "n_gpus", 1),
            batch=integer_cell(row, "batch_size"),
            dtype=str(row["dtype"]) if has_value(row, "dtype") else "fp32" if fp32 else None,
            optimizer=stated if stated in OPTIMIZERS else "adam",
            software=software_profile_name(row, _ZEUS_PROFILE),
            model=dict(network.sizes),
        )
        if software is None and self.calibration is None:
            return _predicted(network.name, system.name, run.model_dump_json(exclude_defaults=True))
        return predict(load_model(network.name), system, run, software, self.applicable_calibration(system))


@lru_cache(maxsize=16)
def _predicted(model: str, system: str, run: str) -> Prediction:
    """Predict a training step from names of model and system and the run as JSON.

    The cache serves rows that differ only in power limit.
    """
    return predict(load_model(model), load_system(system), Run.model_validate_json(run))


RUN_TABLES.register("power")(PowerTable())


# Rows of MLPerf Storage: samples per second that emulated accelerators are fed with

#: Samples of a batch and seconds that an emulated accelerator computes on it (mlcommons/storage v1.0, workload files).
_EMULATED_COMPUTE_TIMES = {
    ("unet3d", "h100"): (7.0, 0.323), ("unet3d", "a100"): (7.0, 0.636),
    ("resnet50", "h100"): (400.0, 0.224), ("resnet50", "a100"): (400.0, 0.435),
    ("cosmoflow", "h100"): (1.0, 0.0035), ("cosmoflow", "a100"): (1.0, 0.00551),
}  # fmt: skip
#: Stored bytes of a sample (same files, mean), and the share of time that accelerators must be busy.
_SAMPLE_BYTES = {"unet3d": 146600.628 * KILO, "resnet50": 114.66 * KILO, "cosmoflow": 2828.486 * KILO}
_MIN_ACCELERATOR_UTILISATION = {"unet3d": 0.90, "resnet50": 0.90, "cosmoflow": 0.70}


#: Samples of a whole run over those of its busy share, which leaves out the first batch of an epoch: 0.965 to 1.
_STEADY_SAMPLE_RATIO = 0.98


def _workload_of(row: Row) -> tuple[str, str]:
    """Return (workload, emulated accelerator) of an MLPerf Storage run; raise SpecError if either is unknown."""
    words = " ".join(str(row.get(key, "")) for key in ("workload", "emulated_device", "url_or_path")).lower()
    network = re.search("unet3d|resnet50|cosmoflow", words)
    device = re.search("h100|a100", words)
    if network is None or device is None:
        raise SpecError("workload or emulated accelerator is not stated")
    return network.group(), device.group()


def _accelerator_sample_rate(
    *, workload: str, device: str, accelerators: float, read_rate: float | None = None
) -> float:
    """Estimate the samples per second that emulated accelerators of MLPerf Storage consume, limited by the read rate.

    An accelerator must be busy for a required share of time, and submitters add accelerators as long as this holds. The
    reached share therefore lies between the required one and (n + 1) / n of it. The mean of both is taken, at most the
    middle of the required share and 1. ``read_rate`` is the rate of storage [byte/s]; None: no limit.

    >>> fed = [_accelerator_sample_rate(workload="unet3d", device="h100", accelerators=count) for count in (2, 10, 100)]
    >>> [round(rate / (count * 7 / 0.323), 3) for rate, count in zip(fed, (2, 10, 100))]
    [0.95, 0.945, 0.904]
    """
    batch, seconds = _EMULATED_COMPUTE_TIMES[workload, device]
    least = _MIN_ACCELERATOR_UTILISATION[workload]
    busy = min(least * (1.0 + 0.5 / max(accelerators, 1.0)), (1.0 + least) / 2.0)
    value = accelerators * batch / seconds * busy
    return value if read_rate is None else min(value, read_rate / _SAMPLE_BYTES[workload])


class StorageTable(NonStepTimeTable):
    """Table of MLPerf Storage runs, which read training data, one per row; the measured value is samples per second."""

    name = "storage"
    identifying_columns = frozenset({"workload", "accelerators", "utilization", "samples_per_s"})
    optional_columns = "emulated_device nodes submitter system_text"
    configuration_columns = ("submitter", "system_text", "emulated_device", "nodes", "url_or_path")
    measured_column = "samples_per_s"

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the samples per second of an MLPerf Storage run; the baseline is a constant per accelerator."""
        workload, device = _workload_of(row)
        if not has_value(row, "accelerators"):
            raise SpecError("accelerators is blank")
        count = float(row["accelerators"])
        value = _accelerator_sample_rate(workload=workload, device=device, accelerators=count)
        batch, seconds = _EMULATED_COMPUTE_TIMES[workload, device]
        most = count * batch / seconds
        least = most * _MIN_ACCELERATOR_UTILISATION[workload] * _STEADY_SAMPLE_RATIO
        return RowPrediction(value, least, most, count, f"{workload} {device}", "emulated")


RUN_TABLES.register("storage")(StorageTable())


#: Relative half-width of the 90 % interval: storage is shared, and rates of one kind differ by half.
_INTERVAL_FACTOR = 1.6
#: Where a row does not say: a node of eight, and tensors of a residual network of some sixty layers.
_DEFAULT_CHECKPOINT_PROCESSES, _DEFAULT_CHECKPOINT_TENSORS = 8.0, 200.0
_CHECKPOINT_MODES: dict[str, CheckpointMode] = {"sync": "sync", "async": "async", "memory": "memory"}


def _checkpoint_bytes_of(row: Row) -> float:
    """Return the size of a measured checkpoint [byte]: as stated, else that of all parameters and Adam states."""
    if has_value(row, "bytes"):
        return float(row["bytes"])
    if has_value(row, "parameters"):
        return CHECKPOINT_BYTES_PER_PARAMETER * float(row["parameters"])
    raise SpecError("neither bytes nor parameters are stated")


class CheckpointTable(NonStepTimeTable):
    """Table of checkpoint saves, one per row; the measured value is the time for which training stopped [s]."""

    name = "checkpoint"
    identifying_columns = frozenset({"software", "storage", "mode", "processes", "save_s"})
    optional_columns = "bytes model nodes notes parameters source storage_bytes_per_s tensors"
    configuration_columns = ("model", "parameters", "bytes", "tensors", "nodes", "storage_bytes_per_s")
    measured_column = "save_s"

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict how long saving a checkpoint stops training [s]; the baseline is its bytes at one constant rate."""
        total, mode = _checkpoint_bytes_of(row), str(row["mode"])
        if mode not in _CHECKPOINT_MODES:
            raise SpecError(f"mode {mode!r} is none of {', '.join(_CHECKPOINT_MODES)}")
        if not has_value(row, "storage") and mode == "sync":
            raise SpecError("storage is not stated")
        rate = float(row["storage_bytes_per_s"]) if has_value(row, "storage_bytes_per_s") else None
        software_name, storage = str(row["software"]), str(row["storage"])
        seconds = checkpoint_pause(
            total_bytes=total, software=software_name, mode=_CHECKPOINT_MODES[mode],
            processes=number_cell(row, "processes", _DEFAULT_CHECKPOINT_PROCESSES),
            nodes=number_cell(row, "nodes", 1.0),
            storage=storage_by_name(storage, rate if mode == "sync" else rate or 1.0),
            tensors=number_cell(row, "tensors", _DEFAULT_CHECKPOINT_TENSORS),
        )  # fmt: skip
        return RowPrediction.within_factor(seconds, _INTERVAL_FACTOR, total, software_name, storage)


RUN_TABLES.register("checkpoint")(CheckpointTable())


class BootTimeTable(NonStepTimeTable):
    """Table of rented machine types, one per row; the measured value is the mean time to boot [s]."""

    name = "startup"
    identifying_columns = frozenset({"preemptible", "machines", "boot_s"})
    optional_columns = "boot_p90_s device device_reported region"
    configuration_columns = ("device", "device_reported", "region", "boot_p90_s")
    measured_column = "boot_s"

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the boot time of a rented machine, on demand or preemptible [s]; the baseline is one constant."""
        spot, device = number_cell(row, "preemptible", 0.0) > 0, str(row.get("device") or "-")
        boot, origin = (SPOT_BOOT_TIME, "spot") if spot else (ON_DEMAND_BOOT_TIME, "kept")
        return RowPrediction(boot.seconds, boot.low, boot.high, 1.0, device, origin)


RUN_TABLES.register("startup")(BootTimeTable())
