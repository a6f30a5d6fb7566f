"""Table of training with compressed gradients or parameters, and of the uncompressed (dense) runs beside them.

A row's measured value is its first filled column: step time, FLOP/s of a GPU, speed-up over one GPU, or time over that
of the dense run. Links are stated by the row. Compute time is predicted, or follows from the measured dense run.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from paleo.compression.base import CodingWork, CompressedCollective, SummedGradient, parse_compression
from paleo.errors import SpecError
from paleo.predict import predict
from paleo.specs.device import load_device
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import SoftwareProfile, load_software
from paleo.specs.system import load_system
from paleo.tables.base import column_set, parse_column_names
from paleo.tables.cells import Array, number_or_nan, text_column
from paleo.tables.kinds._consistency import BACKWARD_STEP_FRACTION, HOST_MEMORY_RING_RATE, TCP_PROCESS_BANDWIDTH_LIMIT
from paleo.tables.run_tables import (
    RUN_TABLES,
    NonStepTimeTable,
    Row,
    RowPrediction,
    has_value,
    integer_cell,
    positive_cell,
    row_dicts,
    with_measured_device_variant,
)
from paleo.units import MEBIBYTE, TERA

if TYPE_CHECKING:
    from paleo.tables.base import Predictions

#: Columns that may hold what was measured, the first filled one counts, and their units.
_MEASURED_COLUMN_UNITS = {"step_s": 1.0, "tflops_per_gpu": TERA, "speedup_over_1": 1.0, "time_over_dense": 1.0}
#: Width of a language model of which only the parameters are stated: 128 for each layer, as GPT-3's (Brown et al.,
#: Language models are few-shot learners, 2020, table 2.1: 12,288 by 96), with heads of 128.
_GPT_WIDTH_PER_LAYER, _GPT_HEAD_DIM = 128, 128
#: Software of a step without an exchange: the sources are of 2018 to 2023, before PyTorch updated lists of tensors.
_DEFAULT_PROFILE = "pytorch-eager@1.13"
#: Entries of GPT-2's vocabulary.
_GPT2_VOCABULARY_SIZE = 50257
#: Networks that rows name without a name of the catalog, with their sizes: those of CIFAR-100 in the catalog's form.
_CATALOG_NETWORK_OF_NAME: dict[str, tuple[str, dict[str, int]]] = {
    "ResNet18_v2": ("resnet18-v2", {"classes": 100, "resolution": 32}),
    "ResNet50_v2": ("resnet50-v2", {}),
}
#: Systems of the catalog by GPUs of a node, for rows that name none.
_SYSTEM_BY_NODE_GPUS = {16: "deepspeed-v100-edr", 8: "dgx-1-v100"}
#: Samples of a GPU where a row states none.
_DEFAULT_BATCH_PER_GPU = 32
#: FLOP for a parameter and token: Megatron-DeepSpeed counts the forward pass that is computed again (its
#: throughput_calculator: 24 x 4 batch seq layers hidden², with the scores and the output layer). By 6 the dense steps
#: of 18B on one NIC would end before their gathers had crossed it.
_FLOPS_PER_PARAMETER_TOKEN = 8.0
#: Share of memory bandwidth that passes of coding reach.
_CODING_BANDWIDTH_FRACTION = 0.8
#: BytePS sends gradients beside the backward pass; Horovod's and DeepSpeed's runs of these pages sum them behind it: on
#: 16 GPUs their dense steps are longer by the whole ring.
_OVERLAPPING_SOFTWARE = "BytePS"
#: What rings inside nodes of eight V100 and more reach by NVLink [byte/s]; nodes of four go through host memory, and so
#: does Open MPI (Horovod copies gradients there and back).
_NVLINK_RING_RATE = 65.0e9
#: Share of a nominal TCP rate that a process reaches where the row's rate is not one that was measured. NCCL's sockets
#: reach no more than `TCP_PROCESS_BANDWIDTH_LIMIT` on any link.
_TCP_RATE_FRACTION = {"OpenMPI": 0.5, "NCCL": 0.95}
#: Seconds of each step of a ring over TCP beside its bytes: a chunk goes through host memory and a socket at both ends.
#: Fitted to three dense runs of VGG-16 by NCCL; the other 15 rows on several nodes by TCP come from 15.5 to 9.6 %.
_TCP_RING_STEP_TIME = 0.1e-3
#: Bytes that Horovod sums at once (HOROVOD_FUSION_THRESHOLD); each buffer goes round by itself.
_FUSION_BUFFER = 64.0 * MEBIBYTE


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Cluster of a measured run: number of GPUs, GPUs per node, bandwidths [byte/s], and latency of a ring step [s].

    ``link_bandwidth`` is the bandwidth of a node's network link, ``node_bandwidth`` that within a node,
    ``memory_bandwidth`` that of a GPU's memory. ``ring_step_seconds`` is the fixed time of each ring step.
    """

    gpus: float
    gpus_per_node: float
    link_bandwidth: float
    node_bandwidth: float
    memory_bandwidth: float
    ring_step_seconds: float

    @classmethod
    def from_row(cls, row: Row) -> _Cluster:
        gpus, per_node = float(integer_cell(row, "gpus")), float(integer_cell(row, "gpus_per_node"))
        transport = str(row.get("transport"))
        link = float(row["link_bytes_per_s"]) * _TCP_RATE_FRACTION.get(transport, 1.0)
        link = min(link, TCP_PROCESS_BANDWIDTH_LIMIT) if transport == "NCCL" else link
        device = load_device(str(row["device"]))
        through_host = transport == "OpenMPI" or "4 GPUs a node" in str(row.get("system_text"))
        inside = HOST_MEMORY_RING_RATE if through_host else _NVLINK_RING_RATE
        step = _TCP_RING_STEP_TIME if transport in _TCP_RATE_FRACTION else 0.0
        return cls(gpus, per_node, link, inside, device.memory.bandwidth * _CODING_BANDWIDTH_FRACTION, step)

    @property
    def nodes(self) -> float:
        return max(1.0, self.gpus / self.gpus_per_node)

    def message_time(self, message: CompressedCollective) -> float:
        """Compute the time of one collective on the cluster [s]: a ring over the nodes' links, or an all-to-all.

        In an all-to-all, only the part for ranks of the same node stays inside the node.
        """
        payload = float(np.asarray(message.payload))
        if self.gpus <= 1:
            return 0.0
        share = (self.gpus - 1.0) / self.gpus * (2.0 if message.operation == "all_reduce" else 1.0)
        inner = share * payload / self.node_bandwidth
        if self.nodes == 1:
            return inner
        leaving = self.gpus_per_node * (1.0 - 1.0 / self.nodes) if message.operation == "all_to_all" else share
        steps = share * self.gpus * math.ceil(payload / _FUSION_BUFFER)
        return max(inner, leaving * payload / self.link_bandwidth) + steps * self.ring_step_seconds

    def coding_time(self, coding: CodingWork) -> float:
        """Compute the time of compressing or decompressing gradients [s].

        It has memory passes, and a call per separately coded tensor.
        """
        call = load_software("pytorch-eager").gradients.compression_call
        return float(coding.bytes) / self.memory_bandwidth + float(coding.framework_calls) * call


class CompressionTable(NonStepTimeTable):
    """Table of training runs with compressed gradients, one per row; the first filled column is the measured value.

    Columns are those of `_MEASURED_COLUMN_UNITS`: step time, FLOP/s of a GPU, speed-up over one GPU, or ratio to the
    dense run.
    """

    name = "compression"
    identifying_columns = column_set("compressor gpus gpus_per_node link_bytes_per_s speedup_over_1 tflops_per_gpu")
    optional_columns = (
        "batch_per_gpu device dtype model model_slug nodes notes parameters samples_per_s sharding software source "
        "step_s system_text time_over_dense tokens_per_gpu transport"
    )
    configuration_columns = parse_column_names(
        "model parameters tokens_per_gpu batch_per_gpu device transport sharding"
    )
    measured_column = "value"
    measured_columns = tuple(_MEASURED_COLUMN_UNITS)

    def measured_values(self, frame: pd.DataFrame) -> Array:
        """Return what each run with compressed gradients measured, in SI units.

        It is the first filled column of `_MEASURED_COLUMN_UNITS`; nan if all are empty.
        """
        stated = [(text_column(frame, name) != "").to_numpy() for name in _MEASURED_COLUMN_UNITS]
        values = [number_or_nan(frame, name) * unit for name, unit in _MEASURED_COLUMN_UNITS.items()]
        return np.asarray(np.select(stated, values, np.nan), dtype=np.float64)

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Predict runs with compressed gradients.

        Multi-node runs take their compute time from the measured dense run on one node.
        """
        known: dict[tuple[str, ...], float] = {}
        for row in row_dicts(frame):
            if row["compressor"] == "none":
                with suppress(SpecError):
                    known |= _computed(row)
        self._alone = known
        return super().predict(frame)

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict what one run with compressed gradients measured.

        It is step time, FLOP/s, speed-up over one GPU, or time relative to the dense run.
        """
        cluster = _Cluster.from_row(row)
        if has_value(row, "tflops_per_gpu"):
            return _sharded(row)
        if has_value(row, "time_over_dense") and row["compressor"] == "none":
            raise SpecError("a dense run beside itself: time_over_dense is one")
        compute = self._alone.get(_run_key(row)) or self._compute(row)
        seconds = _seconds(row, cluster, compute)
        if has_value(row, "step_s"):
            value = seconds
        elif has_value(row, "speedup_over_1"):
            value = cluster.gpus * compute / seconds
        else:
            value = seconds / _seconds({**row, "compressor": "none"}, cluster, compute)
        names = (str(row["device"]), "stated links and a predicted step")
        return RowPrediction.within_factor(value, 1.4, value, *names)

    def _compute(self, row: Row) -> float:
        """Predict the step time of a measured network on one GPU, without gradient exchange [s]."""
        name, sizes = str(row.get("model_slug")), dict[str, int]()
        if not has_value(row, "model_slug"):
            if str(row["model"]) not in _CATALOG_NETWORK_OF_NAME:
                raise SpecError(f"model {row['model']!r} is not in the catalog")
            name, sizes = _CATALOG_NETWORK_OF_NAME[str(row["model"])]
        batch = integer_cell(row, "batch_per_gpu", _DEFAULT_BATCH_PER_GPU)
        if name.startswith("bert"):
            sizes = {"seq": 384 if batch == 3 else 128}
        run = Run(gpus=1, batch=batch, dtype=_dtype(row), software=_DEFAULT_PROFILE, model=sizes)
        return predict(load_model(name), load_system(str(row["device"])), run).step_time


def _run_key(row: Row) -> tuple[str, ...]:
    """Return the cells of a table row that identify its network and cluster, which decide its compute time."""
    return tuple(str(row.get(name)) for name in ("source", "model", "batch_per_gpu", "link_bytes_per_s"))


def _computed(row: Row) -> dict[tuple[str, ...], float]:
    """Derive the compute time of a step [s] from a measured dense run, keyed by `_run_key`; {} if it cannot be derived.

    It is the single-node step time minus the gradient exchange. For a run with only a rate, it is the step time at that
    rate minus the exposed exchange.
    """
    if has_value(row, "step_s") and row["gpus"] == row["gpus_per_node"]:
        return {_run_key(row): float(row["step_s"]) - _seconds(row, _Cluster.from_row(row), 0.0)}
    if has_value(row, "samples_per_s") and not has_value(row, "step_s"):
        batch = integer_cell(row, "gpus") * integer_cell(row, "batch_per_gpu", _DEFAULT_BATCH_PER_GPU)
        step = batch / positive_cell(row, "samples_per_s")
        exposed = _seconds(row, _Cluster.from_row(row), step) - step
        return {_run_key(row): max(step - exposed, 0.0) or step}
    return {}


def _matrices(row: Row) -> float:
    """Count the parameter tensors of two or more dimensions in a measured network; only these are compressed by DGC."""
    if not has_value(row, "model_slug"):
        return 1.0
    run = Run(gpus=1, batch=1, forward_only=True)
    graph = predict(load_model(str(row["model_slug"])), load_system(str(row["device"])), run).graph
    return float(
        sum(
            node.repeat
            for node in graph.nodes
            for operation in node.operations
            for tensor in operation.read_tensors
            if tensor.role == "parameter" and len(tensor.dims) > 1
        )
    )


def _seconds(row: Row, cluster: _Cluster, compute: float) -> float:
    """Predict the step time of a training run with compressed gradients [s]: compute, exposed exchange, and coding.

    Backward hides part of the exchange if the software overlaps them; coding is never hidden.

    Parameters
    ----------
    row : Row
        Table row of the run: its cells by column name.
    cluster : _Cluster
        GPUs and links of the run.
    compute : float
        Time of a step without gradient exchange [s].

    Returns
    -------
    float
        Step time [s].
    """
    gradient = SummedGradient(
        elements=positive_cell(row, "parameters"), tensors=1.0,
        matrices=_matrices(row) if str(row["compressor"]).startswith("dgc") else 1.0,
        ranks=cluster.gpus, element_bytes=2.0 if _dtype(row) == "fp16" else 4.0, ranks_per_node=cluster.gpus_per_node,
    )  # fmt: skip
    hidden = BACKWARD_STEP_FRACTION * compute if str(row.get("software", "")).startswith(_OVERLAPPING_SOFTWARE) else 0.0
    name = str(row["compressor"])
    if name == "none":
        exchange = cluster.message_time(CompressedCollective("all_reduce", gradient.bytes))
        return compute + max(0.0, exchange - hidden)
    if name in ("topk", "randomk"):
        raise SpecError(f"compressor {name!r}: the share of elements that is sent is not stated")
    method = parse_compression(name)
    exchange = sum(cluster.message_time(message) for message in method.collectives(gradient))
    coding = cluster.coding_time(method.encoding_work(gradient)) + cluster.coding_time(method.decoding_work(gradient))
    return compute + max(0.0, exchange - hidden) + coding


def _dtype(row: Row) -> str:
    return str(row["dtype"]) if has_value(row, "dtype") else "fp32"


def _sharded(row: Row) -> RowPrediction:
    """Predict the model FLOP/s per GPU of a language model trained under ZeRO-3 or ZeRO++ (compressed collectives).

    Activations are recomputed, as in DeepSpeed's example scripts.
    """
    method = None if str(row["compressor"]) == "none" else str(row["compressor"])
    tokens, model = integer_cell(row, "tokens_per_gpu"), load_model("gpt2")
    parameters = positive_cell(row, "parameters")
    run = Run(
        gpus=integer_cell(row, "gpus"), batch=1, microbatch=1, dtype=_dtype(row), strategy="zero=3", recompute="full",
        software="deepspeed-zero3", exchange={"compress": method}, model=_gpt_sizes(parameters, tokens),
    )  # fmt: skip
    # The catalog's node of so many GPUs, with the links that the row states between nodes.
    node_size = integer_cell(row, "gpus_per_node")
    if node_size not in _SYSTEM_BY_NODE_GPUS:
        known = ", ".join(map(str, _SYSTEM_BY_NODE_GPUS))
        raise SpecError(f"gpus_per_node {node_size}: no system of the catalog; known are {known}")
    system = with_measured_device_variant(load_system(_SYSTEM_BY_NODE_GPUS[node_size]), row)
    fabric, stated = system.levels[-1], positive_cell(row, "link_bytes_per_s")
    ports = max(1, round(stated / fabric.link.bandwidth))
    link = fabric.link.model_copy(update={"bandwidth": stated / ports})
    levels = (*system.levels[:-1], fabric.model_copy(update={"ports": ports, "link": link}))
    prediction = predict(model, system.model_copy(update={"levels": levels}), run)
    flops = megatron_deepspeed_flops(parameters, tokens)
    value, low, high = (flops / seconds for seconds in (prediction.step_time, *reversed(prediction.interval)))
    return RowPrediction(value, low, high, value, str(row["device"]), "a predicted step")


def megatron_deepspeed_flops(parameters: float, tokens: int) -> float:
    """Count the FLOP of one sequence's training step with Megatron-DeepSpeed's formula, to predict its reported FLOP/s.

    ``parameters`` is the number of parameters, ``tokens`` the length of the sequence.

    >>> round(megatron_deepspeed_flops(18e9, 1024) / TERA, 1)
    153.6
    """
    stack = _gpt_sizes(parameters, tokens)
    scores = tokens / (6.0 * stack["hidden"])
    output = _GPT2_VOCABULARY_SIZE / (16.0 * stack["layers"] * stack["hidden"])
    return _FLOPS_PER_PARAMETER_TOKEN * parameters * tokens * (1.0 + scores + output)


def _gpt_sizes(parameters: float, tokens: int) -> dict[str, int]:
    """Choose hidden size, layers and heads of a GPT with about ``parameters`` parameters (12 width² per layer)."""
    width = _GPT_HEAD_DIM * max(1, round((_GPT_WIDTH_PER_LAYER * parameters / 12.0) ** (1.0 / 3.0) / _GPT_HEAD_DIM))
    layers = max(1, round(parameters / (12.0 * width**2)))
    return {"hidden": width, "layers": layers, "heads": width // _GPT_HEAD_DIM, "seq": tokens, "positions": tokens}


RUN_TABLES.register("compression")(CompressionTable())
