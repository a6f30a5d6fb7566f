"""Rows of measured watts: one GPU that trains under a power limit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from paleo.errors import SpecError, near
from paleo.operations.base import OPTIMIZERS
from paleo.predict import Prediction, predict
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import System, load_system
from paleo.studies.cost import Power, power, power_interval, power_parameters
from paleo.tables.steps import Row, Step, StepTable, filled, software_of, whole_cell
from paleo.tables.tables import STEPS
from paleo.units import MILLISECOND

if TYPE_CHECKING:
    from paleo.pricing.power import PowerParameters
    from paleo.specs.software import Software


class MeasuredNetwork(NamedTuple):
    """A network of the catalog with its sizes, and the samples of an epoch where rows state epochs alone."""

    name: str
    sizes: Mapping[str, int | float | str] = MappingProxyType({})
    samples: float | None = None


#: Networks by the model and data set of a row, with the sizes that the usual scripts give them: SQuAD in 384 tokens
#: (huggingface/transformers, run_qa.py), tweets padded to the longest of a batch, utterances of 7 s.
NETWORKS = {
    ("resnet50", "imagenet"): MeasuredNetwork("resnet50"),
    ("bert_base_uncased", "squad"): MeasuredNetwork("bert_base", {"seq": 384}),
    ("bert_base_uncased", "sentiment140"): MeasuredNetwork("bert_base", {"seq": 48}, 1_600_000),
    ("deepspeech2", "librispeech"): MeasuredNetwork("deepspeech2"),
    ("shufflenetv2", "cifar100"): MeasuredNetwork("shufflenet_v2"),
    ("ncf", "movielens-1m"): MeasuredNetwork("ncf", samples=5 * 994_169),
}


def network_of(row: Row) -> MeasuredNetwork:
    """The network of a row; SpecError where the catalog has none."""
    key = (str(row["model"]).strip().lower(), str(row.get("dataset", "")).strip().lower())
    if key not in NETWORKS:
        known = [" on ".join(pair) for pair in NETWORKS]
        raise SpecError(f"no network is known for {' on '.join(key)}; {near(' on '.join(key), known)}")
    return NETWORKS[key]


def seconds_of(row: Row) -> float | None:
    """Time of an iteration that a row states, or what follows from that of an epoch."""
    if filled(row, "iteration_ms"):
        return _stated(row, "iteration_ms") * MILLISECOND
    samples = network_of(row).samples
    if samples is None or not filled(row, "time_per_epoch_s"):
        return None
    return _stated(row, "time_per_epoch_s") * whole_cell(row, "batch_size") / samples


def _stated(row: Row, key: str) -> float:
    """A cell as a number above zero; SpecError where it is none."""
    try:
        value = float(row[key])
    except (TypeError, ValueError):
        value = float("nan")
    if not 0 < value < float("inf"):
        raise SpecError(f"{key} {row[key]!r:.60} is not a number above zero")
    return value


def drawn(row: Row, prediction: Prediction, figures: PowerParameters | None = None) -> Power:
    """Power of a predicted step under the row's limit, within the row's time of an iteration."""
    device = prediction.system.device
    unlimited = power(prediction, figures)
    if unlimited is None:
        raise SpecError(f"device {device.name} states no design power (tdp)")
    limited = unlimited.capped(float(row["power_limit_w"]), (figures or power_parameters(device)).least_voltage_clock)
    seconds = seconds_of(row)
    return limited if seconds is None else limited.within(seconds)


class PowerTable(StepTable):
    """Mean watts of a board over an epoch, a run a row.

    A row that states the time of an iteration is asked for the watts of that time: what the network's kernels leave of
    it, the board waits for data. The baseline is the limit itself, times one constant a device."""

    name = "power"
    header = frozenset({"model", "device", "batch_size", "power_limit_w", "average_power_w"})
    reads = "dataset dtype iteration_ms n_gpus notes optimizer software time_per_epoch_s"
    configuration = ("dataset", "n_gpus", "optimizer", "dtype", "software", "iteration_ms", "time_per_epoch_s", "notes")
    measured_column = "average_power_w"
    measured_unit = 1.0
    calibrates = False

    def system(self, row: Row) -> System:
        """The device alone."""
        return load_system(str(row["device"]))

    def step(self, row: Row, software: Software | None = None) -> Step:
        """Watts of the row's run under its limit."""
        prediction = self.prediction(row, software)
        watts, limit = drawn(row, prediction), float(row["power_limit_w"])
        device = prediction.system.device
        low, high = power_interval(device)
        return Step(
            watts.average, watts.average * low, watts.average * high, limit, device.name, prediction.run.software
        )

    def prediction(self, row: Row, software: Software | None) -> Prediction:
        """The prediction of a row's run at the device's own design power."""
        network = network_of(row)
        system, stated = self.system(row), str(row.get("optimizer", "")).strip().lower()
        fp32 = re.search(r"\bfp32\b", str(row.get("notes", "")))
        run = Run(
            gpus=whole_cell(row, "n_gpus", 1),
            batch=whole_cell(row, "batch_size"),
            dtype=str(row["dtype"]) if filled(row, "dtype") else "fp32" if fp32 else None,
            optimizer=stated if stated in OPTIMIZERS else "adam",
            software=software_of(row),
            model=dict(network.sizes),
        )
        if software is None and self.calibration is None:
            return _predicted(network.name, system.name, run.model_dump_json(exclude_defaults=True))
        return predict(load_model(network.name), system, run, software, self.calibration_of(system))


@lru_cache(maxsize=16)
def _predicted(model: str, system: str, run: str) -> Prediction:
    """A prediction by names, kept for the next limits of the same run."""
    return predict(load_model(model), load_system(system), Run.model_validate_json(run))


STEPS.register("power")(PowerTable())
