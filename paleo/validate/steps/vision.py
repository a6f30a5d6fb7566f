"""Rows of measured convolutional training steps as runs."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from paleo.errors import SpecError
from paleo.predict import predict
from paleo.specs.hardware import System, load_system
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import Software
from paleo.units import MILLISECOND
from paleo.validate.kinds.base import Array, number
from paleo.validate.steps.base import Row, Step, StepTable, filled, of_prediction, software_of, whole, with_device
from paleo.validate.steps.transformers import DEFAULT_SYSTEMS
from paleo.validate.tables import STEPS

#: What the measured harnesses did without: only forward and backward were timed.
WITHOUT_UPDATE = "no weight update"


def system_of(row: Row) -> System:
    """The row's system by name, else a server of its device, else the device alone."""
    if filled(row, "system"):
        return with_device(load_system(str(row["system"])), row)
    device = str(row["device"])
    return with_device(
        load_system(DEFAULT_SYSTEMS.get(device, "pcie3-8gpu") if whole(row, "n_gpus", 1) > 1 else device), row
    )


def cudnn_version(text: str) -> float | None:
    """The cuDNN release that a cell names: 4007, R4, v3, ``5.1 (CUDA 8.0)``; 1 for none; None where nothing is said.

    >>> cudnn_version("4007"), cudnn_version("R4"), cudnn_version("5.1 (CUDA 8.0)"), cudnn_version("")
    (4.0, 4.0, 5.1, None)
    """
    text = text.strip()
    if not text or text.lower() == "nan":
        return None
    if text.lower().startswith("none"):
        return 1.0
    match = re.match(r"[vVrR]?(\d+(?:\.\d+)?)", text)
    if not match:
        return None
    number = float(match.group(1))
    return float(str(int(number))[0]) if number >= 100 else number


def without_update(row: Row) -> bool:
    """Whether only forward and backward were timed."""
    return WITHOUT_UPDATE in str(row.get("notes", ""))


def run_of(row: Row) -> Run:
    """The run that a row of ``cnn_iterations`` describes; a row without an iteration time is its forward pass alone."""
    batch = float(row["batch_per_gpu"])
    if batch != int(batch) or batch < 1:
        raise SpecError(f"batch_per_gpu {row['batch_per_gpu']!r} is not a whole number")
    return Run(
        gpus=whole(row, "n_gpus", 1),
        batch=int(batch),
        dtype=str(row["dtype"]),
        optimizer="momentum",
        software=software_of(row, "cudnn-library"),
        cudnn=cudnn_version(str(row.get("cudnn", ""))),
        forward_only=not filled(row, "iteration_ms"),
    )


class VisionSteps(StepTable):
    """One training step of a convolutional network a row, or its forward pass where only that was timed."""

    name = "cnn_iterations"
    header = frozenset({"model_slug", "device", "n_gpus", "batch_per_gpu", "framework", "iteration_ms"})
    configuration = ("system", "dtype", "cudnn", "software", "forward_ms", "notes")

    def measured(self, frame: pd.DataFrame) -> Array:
        """Seconds of the step; of the forward pass where the row has no step."""
        step = number(frame, "iteration_ms", float("nan"))
        return np.where(np.isfinite(step), step, number(frame, "forward_ms", float("nan"))) * MILLISECOND

    def step(self, row: Row, software: Software | None = None) -> Step:
        """The step of the row's run, without the update where the harness left it out."""
        made = predict(load_model(str(row["model_slug"])), system_of(row), run_of(row), software)
        spared = made.breakdown.optimizer if without_update(row) else 0.0
        return of_prediction(made, made.step_time - spared)


STEPS.register("cnn_iterations")(VisionSteps())
