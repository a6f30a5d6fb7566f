"""Rows of machines that start: seconds from the order to a machine that answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.studies.goodput import ON_DEMAND_BOOT, SPOT_BOOT
from paleo.validate.steps.base import Step, StepTable, filled
from paleo.validate.tables import STEPS

if TYPE_CHECKING:
    from paleo.specs.software import Software
    from paleo.validate.steps.base import Row


class Startup(StepTable):
    """Machines of one kind a row; the measured quantity is their mean time to boot."""

    name = "startup"
    header = frozenset({"preemptible", "machines", "boot_s"})
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
