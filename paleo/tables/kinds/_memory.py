"""Rows of measured memory per GPU."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from paleo.tables.kinds._networks import catalog_network, llama_like, network_of
from paleo.tables.kinds._transformers import run_of, system_of, that_ran
from paleo.tables.steps import STEPS, Row, Step, StepTable, filled, row_dicts, software_of, whole_cell
from paleo.units import GIB

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.specs.model import ModelSpec
    from paleo.specs.software import Software
    from paleo.specs.system import System
    from paleo.step.memory import Footprint
    from paleo.tables.cells import Array


def counted(row: Row, memory: Footprint) -> float:
    """The quantity in a row's figure, by its column ``what``: used memory (nvidia-smi), reserved memory
    (max_memory_reserved of torch), else allocated memory."""
    words = str(row.get("what", "")).lower()
    return memory.used if "nvidia-smi" in words else memory.cached if "reserved" in words else memory.allocated


#: Software whose own report of a run is that of its first process, so of the first stage of a pipeline: nanotron's
#: table of benchmarks (helpers.py of 0.4: log_throughput writes on rank 0, whose stage is the first).
FIRST_PROCESS = ("nanotron",)


def reported(row: Row, prediction: Prediction) -> Footprint:
    """Select the footprint that a row reports: that of the fullest GPU, or of the first process where that one
    reports."""
    own_report = prediction.run.software in FIRST_PROCESS and "max" not in str(row.get("what", "")).lower()
    return prediction.stage_footprint(0) if own_report else prediction.memory


class MemoryTable(StepTable):
    """The fullest GPU's memory, or that of the GPU which reported it, a run a row."""

    name = "memory"
    header = frozenset({"model", "device", "n_gpus", "seq_len", "micro_batch", "global_batch", "memory_gb_per_gpu"})
    reads = (
        "attention cp cross_entropy dp dtype dtype_reported ep ffn_hidden gated_mlp heads hidden kv_heads layers "
        "n_experts notes pp recompute sequence_parallel shard_group sharding software source system top_k tp vocab vp "
        "what zero_stage_or_fsdp"
    )
    configuration = ("tp", "pp", "dp", "cp", "ep", "vp", "dtype", "sharding", "sequence_parallel", "recompute")
    measured_column = "memory_gb_per_gpu"
    #: What frameworks label GB is 2^30 bytes: they print ``torch.cuda.max_memory_*() / 1024**3``, nanotron among them.
    measured_unit = GIB
    calibrates = False

    def system(self, row: Row) -> System:
        """Return the system of a row, as `system_of` finds it."""
        return system_of(row)

    def step(self, row: Row, software: Software | None = None) -> Step:
        """Predict the bytes on the GPU that was looked at (`reported`), counted as the row's tool counts them
        (`counted`). The baseline is parameters, gradients and optimizer states alone."""
        prediction = self._prediction(row, software)
        memory, device = reported(row, prediction), prediction.system.device.name
        size, states = counted(row, memory), memory.parameters + memory.gradients + memory.optimizer
        return Step(size, 0.8 * size, 1.25 * size, states, device, prediction.run.software)

    def parts(self, frame: pd.DataFrame) -> dict[str, tuple[Array, Array]]:
        """Return reserved bytes, predicted and measured, where the notes state them beside the allocated ones (``70.88
        GiB reserved``)."""
        sizes = np.full((2, len(frame)), np.nan)
        for index, row in enumerate(row_dicts(frame)):
            stated = re.search(r"([\d.]+) GiB reserved", str(row.get("notes", "")))
            if stated:
                sizes[:, index] = self.memory_of(row).cached, float(stated.group(1)) * GIB
        return {"reserved by the allocator": (sizes[0], sizes[1])}

    def memory_of(self, row: Row) -> Footprint:
        """Predict the memory of a row's run."""
        return self._prediction(row, None).memory

    def profile(self, row: Row) -> str:
        """Return the software profile of a row; rows that name none are known by their source."""
        return software_of({"framework": row.get("source", ""), **row}, "nanotron")

    def _prediction(self, row: Row, software: Software | None) -> Prediction:
        model, sizes = _network(row)
        profile = software.name if software else self.profile(row)
        return that_ran(row, model, run_of(row, profile, sizes), software)


def _network(row: Row) -> tuple[ModelSpec, dict[str, int | float | str]]:
    """Return the network of a row: by the columns of its sizes if present, else by its name."""
    if filled(row, "layers") and filled(row, "hidden"):
        return network_of(row)
    name = str(row["model"])
    model = llama_like(name) or catalog_network(name)
    lengths = (parameter for parameter in ("seq", "positions") if parameter in model.params)
    return model, dict.fromkeys(lengths, whole_cell(row, "seq_len"))


STEPS.register("memory")(MemoryTable())
