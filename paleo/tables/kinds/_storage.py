"""Rows of MLPerf Storage: samples per second that emulated accelerators are fed with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paleo.errors import SpecError
from paleo.studies.goodput import ADAM_BYTES, ON_DEMAND_BOOT, SPOT_BOOT, Mode, checkpoint_seconds, storage_of
from paleo.tables.steps import Row, Step, StepTable, filled
from paleo.tables.tables import STEPS
from paleo.units import KILO

if TYPE_CHECKING:
    from paleo.specs.software import Software


#: Samples of a batch and seconds that an emulated accelerator computes on it (mlcommons/storage v1.0, workload files).
COMPUTE = {
    ("unet3d", "h100"): (7.0, 0.323), ("unet3d", "a100"): (7.0, 0.636),
    ("resnet50", "h100"): (400.0, 0.224), ("resnet50", "a100"): (400.0, 0.435),
    ("cosmoflow", "h100"): (1.0, 0.0035), ("cosmoflow", "a100"): (1.0, 0.00551),
}  # fmt: skip
#: Stored bytes of a sample (same files, mean), and the share of time that accelerators must be busy.
SAMPLE = {"unet3d": 146600.628 * KILO, "resnet50": 114.66 * KILO, "cosmoflow": 2828.486 * KILO}
LEAST_BUSY = {"unet3d": 0.90, "resnet50": 0.90, "cosmoflow": 0.70}


#: Samples of a whole run over those of its busy share, which leaves out the first batch of an epoch: 0.965 to 1.
STEADY_SHARE = 0.98


def workload_of(row: Row) -> tuple[str, str]:
    """Workload and emulated accelerator by the words of a row; SpecError where it names none."""
    words = " ".join(str(row.get(key, "")) for key in ("workload", "emulated_device", "url_or_path")).lower()
    network = re.search("unet3d|resnet50|cosmoflow", words)
    device = re.search("h100|a100", words)
    if network is None or device is None:
        raise SpecError("workload or emulated accelerator is not stated")
    return network.group(), device.group()


def fed_samples(*, workload: str, device: str, accelerators: float, read_rate: float | None = None) -> float:
    """Samples per second of emulated accelerators: what they compute in the share of time that they are busy, and no
    more than storage reads.

    Submitters take as many accelerators as stay busy for the least share. So the share lies anywhere between that and
    where another one would fit, (n + 1) / n of it: its mean is taken, and no more than the middle of the least share
    and all of the time.

    >>> fed = [fed_samples(workload="unet3d", device="h100", accelerators=count) for count in (2, 10, 100)]
    >>> [round(rate / (count * 7 / 0.323), 3) for rate, count in zip(fed, (2, 10, 100))]
    [0.95, 0.945, 0.904]
    """
    batch, seconds = COMPUTE[workload, device]
    least = LEAST_BUSY[workload]
    busy = min(least * (1.0 + 0.5 / max(accelerators, 1.0)), (1.0 + least) / 2.0)
    value = accelerators * batch / seconds * busy
    return value if read_rate is None else min(value, read_rate / SAMPLE[workload])


class StorageRuns(StepTable):
    """One run a row; the measured quantity is samples per second."""

    name = "storage"
    header = frozenset({"workload", "accelerators", "utilization", "samples_per_s"})
    reads = "emulated_device nodes submitter system_text"
    configuration = ("submitter", "system_text", "emulated_device", "nodes", "url_or_path")
    measured_column = "samples_per_s"
    measured_unit = 1.0
    calibrates = False

    def step(self, row: Row, software: Software | None = None) -> Step:
        """Samples per second; the baseline is one rate for each accelerator of all workloads."""
        workload, device = workload_of(row)
        if not filled(row, "accelerators"):
            raise SpecError("accelerators is blank")
        count = float(row["accelerators"])
        value = fed_samples(workload=workload, device=device, accelerators=count)
        batch, seconds = COMPUTE[workload, device]
        most = count * batch / seconds
        least = most * LEAST_BUSY[workload] * STEADY_SHARE
        return Step(value, least, most, count, f"{workload} {device}", "emulated")


STEPS.register("storage")(StorageRuns())


#: Relative half-width of the 90 % interval: storage is shared, and rates of one kind differ by half.
SPREAD = 1.6
#: Where a row does not say: a node of eight, and tensors of a residual network of some sixty layers.
PROCESSES, TENSORS = 8.0, 200.0
MODES: dict[str, Mode] = {"sync": "sync", "async": "async", "memory": "memory"}


def bytes_of(row: Row) -> float:
    """Bytes of the checkpoint: as stated, else those of Adam's states in mixed precision."""
    if filled(row, "bytes"):
        return float(row["bytes"])
    if filled(row, "parameters"):
        return ADAM_BYTES * float(row["parameters"])
    raise SpecError("neither bytes nor parameters are stated")


class CheckpointSaves(StepTable):
    """One save a row; the measured quantity is how long training stopped."""

    name = "checkpoint"
    header = frozenset({"software", "storage", "mode", "processes", "save_s"})
    reads = "bytes model nodes notes parameters source storage_bytes_per_s tensors"
    configuration = ("model", "parameters", "bytes", "tensors", "nodes", "storage_bytes_per_s")
    measured_column = "save_s"
    measured_unit = 1.0
    calibrates = False

    def step(self, row: Row, software: Software | None = None) -> Step:
        """The pause of the row's save; the baseline is its bytes at one rate."""
        total, mode = bytes_of(row), str(row["mode"])
        if mode not in MODES:
            raise SpecError(f"mode {mode!r} is none of {', '.join(MODES)}")
        if not filled(row, "storage") and mode == "sync":
            raise SpecError("storage is not stated")
        rate = float(row["storage_bytes_per_s"]) if filled(row, "storage_bytes_per_s") else None
        seconds = checkpoint_seconds(
            total_bytes=total,
            software=str(row["software"]),
            processes=float(row["processes"]) if filled(row, "processes") else PROCESSES,
            nodes=float(row["nodes"]) if filled(row, "nodes") else 1.0,
            storage=storage_of(str(row["storage"]), rate if mode == "sync" else rate or 1.0),
            mode=MODES[mode],
            tensors=float(row["tensors"]) if filled(row, "tensors") else TENSORS,
        )
        return Step(seconds, seconds / SPREAD, seconds * SPREAD, total, str(row["software"]), str(row["storage"]))


STEPS.register("checkpoint")(CheckpointSaves())


class Startup(StepTable):
    """Machines of one kind a row; the measured quantity is their mean time to boot."""

    name = "startup"
    header = frozenset({"preemptible", "machines", "boot_s"})
    reads = "boot_p90_s device device_reported region"
    configuration = ("device", "device_reported", "region", "boot_p90_s")
    measured_column = "boot_s"
    measured_unit = 1.0
    calibrates = False

    def step(self, row: Row, software: Software | None = None) -> Step:
        """Seconds of the terms on which the machine is rented; the baseline is one number for all."""
        spot = filled(row, "preemptible") and float(row["preemptible"]) > 0
        boot = SPOT_BOOT if spot else ON_DEMAND_BOOT
        return Step(boot.seconds, boot.low, boot.high, 1.0, str(row.get("device") or "-"), "spot" if spot else "kept")


STEPS.register("startup")(Startup())
