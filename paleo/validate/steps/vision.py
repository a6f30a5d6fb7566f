"""Rows of measured convolutional training steps as runs."""

from __future__ import annotations

import re

from paleo.errors import SpecError
from paleo.specs.hardware import System, load_system
from paleo.specs.run import Run
from paleo.validate.steps.transformers import DEFAULT_SYSTEMS, Row, filled, whole

#: What the measured harnesses did without: only forward and backward were timed.
WITHOUT_UPDATE = "no weight update"


def system_of(row: Row) -> System:
    """The row's system by name, else a server of its device, else the device alone."""
    if filled(row, "system"):
        return load_system(str(row["system"]))
    device = str(row["device"])
    return load_system(DEFAULT_SYSTEMS.get(device, "pcie3-8gpu") if whole(row, "n_gpus", 1) > 1 else device)


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
    software = str(row["software"]).strip() if filled(row, "software") else "cudnn-library"
    return Run(
        gpus=whole(row, "n_gpus", 1),
        batch=int(batch),
        dtype=str(row["dtype"]),
        optimizer="momentum",
        software=software,
        cudnn=cudnn_version(str(row.get("cudnn", ""))),
        forward_only=not filled(row, "iteration_ms"),
    )
