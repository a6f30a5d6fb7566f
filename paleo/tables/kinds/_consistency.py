"""Table of data-parallel steps under a consistency model: bulk-synchronous, asynchronous servers, local steps, gossip.

A row states its link and usually the step time of one worker alone; predicted is what exchange and waiting add. Without
a stated step time, the step of the row's network is predicted.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from paleo.consistency.asynchronous import server_service_time, throughput_by_worker_class
from paleo.consistency.base import DataParallelWorkload, ParameterServers, parse_consistency
from paleo.errors import SpecError
from paleo.predict import predict
from paleo.specs.device import find_device, load_link
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import PARAMETER_SERVER_CALL_TIME, SoftwareProfile
from paleo.specs.system import load_system
from paleo.tables.cells import Array, number_or_nan, text_column, word_mask
from paleo.tables.run_tables import (
    RUN_TABLES,
    NonStepTimeTable,
    Row,
    RowPrediction,
    has_value,
    integer_cell,
    positive_cell,
)

if TYPE_CHECKING:
    from paleo.tables.base import Predictions

#: TensorFlow's parameter server on a cloud machine of four virtual cores: 0.102 ms a tensor and 0.68 GB/s of push,
#: update and pull, fitted to four saturated rates of P100 workers; 6.5 % on 93 other rates (other cards, other years).
_CLOUD_PARAMETER_SERVER = ParameterServers(seconds_per_tensor=PARAMETER_SERVER_CALL_TIME, bandwidth=0.68e9)
#: Links whose latency stands for a hop of a collective, by the transport that a row names.
_LINK_OF_TRANSPORT = {"tcp": "ethernet-10g-tcp", "rdma": "infiniband-edr"}
#: Share of a link's rate that one process reaches. TCP at 100 Gb/s is bound by a core: 2.2 to 2.7 GB/s were measured
#: there (Shi et al., arXiv:2005.13247); 10 Gb/s by protocol, RDMA as NCCL's topology file has it.
TCP_PROCESS_BANDWIDTH_LIMIT, _TCP_SHARE, _RDMA_SHARE = 2.5e9, 0.95, 0.96
#: What four cards without peer-to-peer reach in a ring over PCIe 3, through host memory [byte/s]: 4.2 to 6.3 GB/s were
#: measured on four RTX 2080 Ti (three networks, no overlap).
HOST_MEMORY_RING_RATE = 4.4e9
#: Share of a backward pass beside which collectives make headway: all of it on the wire, 0.4 where cards copy through
#: host memory and so take turns with the pass (fitted to the rows of one node).
BACKWARD_STEP_FRACTION, _HOST_COPY_OVERLAP_FRACTION = 2.0 / 3.0, 0.4
#: Bytes of a bucket where gradients are merged (Horovod, PyTorch).
_BUCKET_BYTES = 25.0 * 2**20
#: Payload of a ring over a link that tc shapes: 1,448 bytes of a frame of 1,514 (its headers count), and beside each
#: the half acknowledgement of 66 bytes that what comes in is owed. What iperf measured is payload.
_SHAPED_PAYLOAD_FRACTION = 1448.0 / (1514.0 + 66.0 / 2.0)
#: Messages one after another in a step with a distant server, and seconds there and back between regions of a cloud in
#: North America (from the east).
_ROUND_TRIPS_PER_STEP, _REGION_ROUND_TRIP_TIMES = 4.5, {"east": 0.0, "central": 0.033, "west": 0.066}
#: Noise of a worker's step; none of the tables states it.
_STEP_NOISE = 0.02


class ConsistencyTable(NonStepTimeTable):
    """Table of data-parallel steps under a consistency model (synchronous, asynchronous, …), one run per row.

    The measured value is the step time of a worker [s]; for asynchronous runs the time between two updates of the
    model.
    """

    name = "consistency"
    identifying_columns = frozenset({"consistency", "exchange", "workers", "one_worker_step_s", "updates_per_s"})
    optional_columns = (
        "batch_per_gpu compute_s device dtype gpus_per_node link_bytes_per_s model model_slug notes overlap "
        "parameters servers source step_s steps_measured synchronisations system_text tensors worker_devices "
        "worker_regions"
    )
    configuration_columns = (
        "device", "worker_devices", "worker_regions", "model", "batch_per_gpu", "servers", "overlap",
        "link_bytes_per_s", "system_text", "gpus_per_node", "steps_measured", "synchronisations",
    )  # fmt: skip
    measured_column = "step_s"
    measured_columns = ("updates_per_s", "step_s")

    def measured_values(self, frame: pd.DataFrame) -> Array:
        """Return the measured step time of each data-parallel run [s].

        For asynchronous runs with a measured update rate, the value is the time between updates.
        """
        steps, rates = (number_or_nan(frame, name) for name in ("step_s", "updates_per_s"))
        by_rate = word_mask(frame, "consistency", "async") & ~word_mask(frame, "updates_per_s", "")
        return np.where(by_rate, 1.0 / np.where(rates > 0, rates, np.nan), steps)

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Predict data-parallel steps under consistency models, one run per row.

        A run with several kinds of workers takes single-worker step times from other rows.
        """
        steps = number_or_nan(frame, "one_worker_step_s")
        models, devices = text_column(frame, "model"), text_column(frame, "device")
        known = np.isfinite(steps) & (devices != "").to_numpy()
        self._alone = dict(zip(zip(models[known], devices[known], strict=True), steps[known].tolist(), strict=True))
        return super().predict(frame)

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the step time of a run under its consistency model [s]; if asynchronous, time between updates."""
        if has_value(row, "worker_devices"):
            # Predict the seconds between updates of workers of several kinds around one server.
            kinds = re.findall(r"(\d+) x ([\w-]+)", str(row["worker_devices"]))
            payload, tensors = 4.0 * positive_cell(row, "parameters"), positive_cell(row, "tensors")
            service = float(server_service_time(payload, tensors, _CLOUD_PARAMETER_SERVER))
            missing = [device for _, device in kinds if (str(row["model"]), device) not in self._alone]
            if missing or not kinds:
                raise SpecError(f"the table has no step of one worker on {', '.join(missing) or 'any of the workers'}")
            think = [max(self._alone[str(row["model"]), device] - service, 0.0) for _, device in kinds]
            counts = np.array([float(count) for count, _ in kinds])
            rates = throughput_by_worker_class(counts, np.array(think), np.full(len(kinds), service))
            seconds = float(1.0 / rates.sum())
            return _row_prediction(seconds, seconds, "workers of several kinds")
        work = self._workload(row)
        cycle = parse_consistency(_model_name(row)).evaluate(work)
        seconds = float(1.0 / cycle.updates_per_s if _asynchronous(row) else cycle.step_time)
        ideal = float(np.asarray(work.compute_time)) / (integer_cell(row, "workers") if _asynchronous(row) else 1.0)
        return _row_prediction(seconds, ideal, str(row["device"]))

    def _workload(self, row: Row) -> DataParallelWorkload:
        workers, payload = float(integer_cell(row, "workers")), 4.0 * positive_cell(row, "parameters")
        tensors = positive_cell(row, "tensors") if has_value(row, "tensors") else payload / _BUCKET_BYTES
        alone = self._compute(row)
        work = DataParallelWorkload(
            workers, alone, all_reduce_time=0.0, overlapped_exchange_time=0.0, neighbour_exchange_time=0.0,
            payload=payload, parameter_count=payload / 4.0, tensors=tensors, jitter=_STEP_NOISE if workers > 1 else 0.0,
        )  # fmt: skip
        if _asynchronous(row):
            server = replace(_CLOUD_PARAMETER_SERVER, count=max(1, integer_cell(row, "servers", 1)))
            compute = max(alone - float(server_service_time(payload, tensors, server)), 0.0)
            return replace(work, compute_time=compute, server=server, round_trip=_round_trip_seconds(row))
        exchange, hidden = _exchange(row, workers, payload, tensors, alone)
        neighbour = _neighbour_seconds(row, workers, payload)
        return replace(
            work, all_reduce_time=exchange, overlapped_exchange_time=hidden, neighbour_exchange_time=neighbour
        )

    def _compute(self, row: Row) -> float:
        """Return the step time of one worker without gradient exchange [s]: as stated, else predicted."""
        for column in ("one_worker_step_s", "compute_s"):
            if has_value(row, column):
                return positive_cell(row, column)
        if not has_value(row, "model_slug"):
            raise SpecError("neither the step of one worker is stated nor a network of the catalog")
        run = Run(gpus=1, batch=integer_cell(row, "batch_per_gpu"), dtype=str(row["dtype"]), software="pytorch-eager")
        system = load_system(find_device(str(row["device"])).name)
        return predict(load_model(str(row["model_slug"])), system, run).step_time


def _row_prediction(seconds: float, ideal: float, subject: str) -> RowPrediction:
    """Build the prediction of a measured run from a time, with a 90 % interval of a factor 1.2 either way.

    Of measured runs that were not fitted, 9 of 10 lie within this interval.

    Parameters
    ----------
    seconds : float
        Predicted time [s].
    ideal : float
        Baseline: compute time without exchange and waiting [s].
    subject : str
        Name of the device.

    Returns
    -------
    RowPrediction
        Value with its interval.
    """
    return RowPrediction.within_factor(seconds, 1.2, ideal, subject, "one worker's step and the stated link")


def _asynchronous(row: Row) -> bool:
    return str(row["consistency"]) == "async"


def _model_name(row: Row) -> str:
    """Return the consistency model of a measured run, such as ``local:8`` (8 local steps per synchronisation)."""
    stated = str(row["consistency"])
    name, _, _ = stated.partition(":")
    if name in ("local", "diloco") and has_value(row, "steps_measured") and has_value(row, "synchronisations"):
        return f"{name}:{max(1, round(positive_cell(row, 'steps_measured') / positive_cell(row, 'synchronisations')))}"
    return stated


def _transport(row: Row) -> str:
    return "rdma" if "rdma" in str(row.get("system_text", "")).lower() else "tcp"


def _hop_seconds(row: Row) -> float:
    return float(load_link(_LINK_OF_TRANSPORT[_transport(row)]).latency or 0.0)


def _node_rate(row: Row) -> float:
    """Return the bandwidth that one node achieves over its link [byte/s]."""
    stated = positive_cell(row, "link_bytes_per_s")
    if _transport(row) == "rdma":
        return _RDMA_SHARE * stated
    described = str(row.get("system_text", ""))
    if "iperf" in described:
        return stated * (_SHAPED_PAYLOAD_FRACTION if "shaped" in described else 1.0)
    return min(_TCP_SHARE * stated, TCP_PROCESS_BANDWIDTH_LIMIT)


def _exchange(row: Row, workers: float, payload: float, tensors: float, alone: float) -> tuple[float, float]:
    """Compute the gradient exchange of a data-parallel run: (total time, part that the backward pass can hide) [s].

    A ring sends 2 (P - 1) / P of the payload through each node's link; a server on each node sends twice the payload.
    Within a node the ring runs over NVLink or, without peer-to-peer access, through host memory. Each tensor is one
    call, or each bucket if gradients are merged. With a merging schedule, backward can hide the whole exchange;
    otherwise the last call follows the backward pass.

    Parameters
    ----------
    row : Row
        Table row of the run: its cells by column name.
    workers : float
        Number of workers.
    payload : float
        Size of all gradients [byte].
    tensors : float
        Number of gradient tensors.
    alone : float
        Step time of one worker without exchange [s].
    """
    per_node = max(1, integer_cell(row, "gpus_per_node", 1))
    if workers <= 1:
        return 0.0, 0.0
    ring = 2.0 * (workers - 1.0) / workers * payload
    inside = ring / HOST_MEMORY_RING_RATE if "PCIe" in str(row.get("system_text", "")) else 0.0
    across = 0.0
    merged = str(row.get("overlap")) == "merged" or "Horovod" in str(row.get("notes", ""))
    calls = max(1.0, payload / _BUCKET_BYTES) if merged else tensors
    if workers > per_node:
        hops = 2.0 * (workers - 1.0) * _hop_seconds(row) * calls
        server = str(row["exchange"]) == "server"
        across = 2.0 * payload / _node_rate(row) if server else ring / _node_rate(row)
        across += hops if str(row.get("overlap")) in ("backward", "merged", "scheduled") and not server else 0.0
    seconds = max(inside, across)
    if str(row.get("overlap")) in ("none", "nan", "None"):
        return seconds, 0.0
    share = 1.0 if across > inside else _HOST_COPY_OVERLAP_FRACTION
    last = 0.0 if str(row.get("overlap")) == "merged" else seconds / calls  # the last call follows the backward pass
    return seconds, share * min(seconds - last, BACKWARD_STEP_FRACTION * alone)


def _round_trip_seconds(row: Row) -> float:
    """Compute the mean time [s] of a step's messages between workers and a parameter server in another cloud region."""
    places = re.findall(r"(\d+) (\w+)", str(row.get("worker_regions") or ""))
    counts = [(int(count), _REGION_ROUND_TRIP_TIMES.get(place, 0.0)) for count, place in places]
    total = sum(count for count, _ in counts)
    return _ROUND_TRIPS_PER_STEP * sum(count * seconds for count, seconds in counts) / total if total else 0.0


def _neighbour_seconds(row: Row, workers: float, payload: float) -> float:
    """Compute the time [s] in which a worker sends its parameters to one peer in a gossip step.

    One worker of a node at a time has its peer on another node: BlueFog's benchmark takes inner-outer graphs on several
    nodes (topology_util, by memory), and eight messages at once would take longer than the measured steps. A node that
    averages its parameters first also sends one message. 0 if all workers are on one node.
    """
    if workers <= max(1, integer_cell(row, "gpus_per_node", 1)):
        return 0.0
    return payload / _node_rate(row) + _hop_seconds(row)


RUN_TABLES.register("consistency")(ConsistencyTable())
