"""Rows of MLPerf Storage: samples per second that emulated accelerators are fed with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paleo.errors import SpecError
from paleo.units import KILO
from paleo.validate.steps.base import Step, StepTable, filled
from paleo.validate.tables import STEPS

if TYPE_CHECKING:
    from paleo.specs.software import Software
    from paleo.validate.steps.base import Row

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
    configuration = ("submitter", "system_text", "emulated_device", "nodes", "url_or_path")
    measured_column = "samples_per_s"
    measured_unit = 1.0
    calibrates = False

    def step(self, row: Row, software: Software | None = None) -> Step:
        """Samples per second; the baseline is one rate for each accelerator of all workloads."""
        workload, device = workload_of(row)
        if not filled(row, "accelerators"):
            raise SpecError("accelerators is not stated")
        count = float(row["accelerators"])
        value = fed_samples(workload=workload, device=device, accelerators=count)
        batch, seconds = COMPUTE[workload, device]
        most = count * batch / seconds
        least = most * LEAST_BUSY[workload] * STEADY_SHARE
        return Step(value, least, most, count, f"{workload} {device}", "emulated")


STEPS.register("storage")(StorageRuns())
