"""Rows of checkpoints: seconds that training stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.errors import SpecError
from paleo.studies.checkpoint import ADAM_BYTES, checkpoint_seconds, storage_of
from paleo.validate.steps.base import Step, StepTable, filled
from paleo.validate.tables import STEPS

if TYPE_CHECKING:
    from paleo.specs.software import Software
    from paleo.studies.checkpoint import Mode
    from paleo.validate.steps.base import Row

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
