"""Tables of training steps under rank placements on slow networks, and of messages on rail networks.

Pipeline ranks are packed, scheduled or placed at random; ``placement_networks.csv`` beside the table gives the
bandwidth of each pair of ranks. A stage waits for its transfers, so the step takes (m + p − 1) times the longest stage
(computation and transfers). Gradient all-reduces by rings follow. Random placements are drawn a few times; scheduled
placements are improved by swaps of two ranks.

Reference: Yuan et al., Decentralized training of foundation models in heterogeneous environments, NeurIPS 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import SpecError, suggest_names
from paleo.files import is_file
from paleo.predict import Prediction, predict
from paleo.pricing.communication import collective_parameters
from paleo.pricing.links.alpha_beta import partly_overlapped_time
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system
from paleo.tables.base import column_set
from paleo.tables.cells import Array, read_table
from paleo.tables.run_tables import (
    RUN_TABLES,
    NonStepTimeTable,
    Row,
    RowPrediction,
    integer_cell,
    peak_flops_step_time,
    row_dicts,
)

if TYPE_CHECKING:
    from paleo.pricing.links.fabric import FabricParameters
    from paleo.specs.software import SoftwareProfile
    from paleo.tables.base import Predictions


#: The table of networks, beside that of the steps.
_NETWORKS_FILE = "placement_networks.csv"
#: What TCP leaves of a rate: 1,460 bytes of a frame of 1,538.
_TCP_PAYLOAD_FRACTION = 1460.0 / 1538.0
#: One flow between two machines of Amazon's cloud, unless they are placed together: 5 Gb/s (EC2 user guide, instance
#: network bandwidth).
_CLOUD_FLOW_RATE = 0.625e9
#: Transfers that a stage waits for, of the four of a microbatch: all where sends block (Megatron of 2021), half of them
#: where sends have a stream of their own (DT-FM).
_BLOCKING_SEND_WAIT_FRACTION, _STREAMED_SEND_WAIT_FRACTION = 1.0, 0.5
#: Draws of random placements, and exchanges of two ranks that a schedule tries.
_RANDOM_PLACEMENT_COUNT, _PLACEMENT_SWAP_COUNT = 12, 600
#: What a stage's computation follows from, beside its degrees.
_STAGE_TIME_COLUMNS = ("layers", "hidden", "seq_len", "micro_batch", "dtype", "software")
#: The machine of the rows; heads and words of their GPT-3 family, which the table leaves out.
_NODE_SYSTEM_NAME, _GPT3_HEAD_COUNT, _GPT3_VOCABULARY_SIZE = "aws-p3.16xlarge", 16, 50257
#: Bytes of an activation, and of a gradient.
_HALF_PRECISION_BYTES = 2.0
RankGrid = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class PairNetwork:
    """Network described by the bandwidth between each pair of ranks.

    ``pair_bandwidths`` [byte/s] and ``shares_link`` have shape (ranks, ranks), ``group_of_rank`` shape (ranks,). Where
    ``shares_link`` is True, all ranks of a group share one link to the others.
    """

    pair_bandwidths: Array
    group_of_rank: RankGrid
    shares_link: npt.NDArray[np.bool_]

    @classmethod
    def from_rows(cls, rows: pd.DataFrame) -> PairNetwork:
        """Build the network from its rows of ``placement_networks.csv``, one pair of groups of ranks per row."""
        ranks = int((rows["first_rank_a"] + rows["ranks_a"]).max())
        rates, shared = np.zeros((ranks, ranks)), np.zeros((ranks, ranks), dtype=bool)
        group = np.arange(ranks)
        for row in sorted(row_dicts(rows), key=lambda row: str(row["group_a"]) != "any"):  # the general rows first
            a, b = (slice(int(row[f"first_rank_{x}"]), int(row[f"first_rank_{x}"] + row[f"ranks_{x}"])) for x in "ab")
            for source, target in ((a, b), (b, a)):
                rates[source, target], shared[source, target] = row["pair_bytes_per_s"], bool(row["shared_by_group"])
            if row["group_a"] == row["group_b"]:
                group[a] = a.start
        return cls(rates, group, shared)

    def transfer_times(self, source: RankGrid, target: RankGrid, size: float) -> Array:
        """Compute the times of point-to-point transfers that start together and share links.

        Parameters
        ----------
        source, target : ndarray of int, shape (flows,)
            Sending and receiving rank of each transfer.
        size : float
            Size of each transfer [byte].

        Returns
        -------
        ndarray, shape (flows,)
            Times [s]; 0 if source and target are the same rank.
        """
        rates, shared = self.pair_bandwidths[source, target], self.shares_link[source, target]
        out, into = self.group_of_rank[source], self.group_of_rank[target]
        ranks = len(self.group_of_rank)
        leaving, entering = (np.bincount(end[shared], minlength=ranks) for end in (out, into))
        flows = np.maximum(np.maximum(leaving[out], entering[into]), 1)
        flow_rates = np.where(shared, np.minimum(rates / flows, _CLOUD_FLOW_RATE), rates)
        payload_rates = flow_rates * np.where(out != into, _TCP_PAYLOAD_FRACTION, 1.0)
        return np.asarray(np.where(source == target, 0.0, size / payload_rates))


@dataclass(frozen=True, slots=True)
class _Pipelines:
    """Pipeline-parallel run of a measured step: sizes and times that do not depend on the placement of ranks.

    ``compute_time``: time in which a stage computes a microbatch [s]. ``boundary_bytes``: activations that a rank sends
    to the next stage [byte]. ``gradient_bytes``: gradients of a rank [byte]. ``microbatches``, ``stages`` and
    ``tensor_parallel_ranks`` are counts. ``waited_transfer_fraction``: share of its transfers for which a stage waits
    [-].
    """

    compute_time: float
    boundary_bytes: float
    gradient_bytes: float
    microbatches: int
    stages: int
    tensor_parallel_ranks: int
    waited_transfer_fraction: float

    def step_time(self, network: PairNetwork, grid: RankGrid) -> float:
        """Compute the step time [s] of a pipeline-parallel run for a placement of ranks.

        ``grid`` holds the rank at each place, shape (stages, pipelines).
        """
        waited = np.zeros(grid.shape)
        for source, target in ((grid[:-1], grid[1:]), (grid[1:], grid[:-1])):
            seconds = network.transfer_times(source.ravel(), target.ravel(), self.boundary_bytes).reshape(source.shape)
            waited[:-1] += seconds
            waited[1:] += seconds
        passes = float((self.compute_time + self.waited_transfer_fraction * waited).max())
        return (self.microbatches + self.stages - 1) * passes + self._gradient_exchange_time(network, grid)

    def _gradient_exchange_time(self, network: PairNetwork, grid: RankGrid) -> float:
        """Compute the time of the gradient all-reduces [s]; all stages run at once, each by a ring in rank order."""
        pipelines = grid.shape[1] // self.tensor_parallel_ranks
        if pipelines == 1:
            return 0.0
        ranks = grid.reshape(self.stages, pipelines, self.tensor_parallel_ranks)
        ring = np.sort(ranks.swapaxes(1, 2).reshape(-1, pipelines), axis=1)
        sent = 2.0 * (pipelines - 1) / pipelines * self.gradient_bytes
        return float(network.transfer_times(ring.ravel(), np.roll(ring, -1, axis=1).ravel(), sent).max())


def _packed(ranks: int, shape: tuple[int, int]) -> RankGrid:
    """Arrange ranks in Megatron's order, shape (stages, pipelines); consecutive ranks belong to the same stage."""
    return np.arange(ranks).reshape(shape)


def _scheduled_step_seconds(network: PairNetwork, work: _Pipelines, shape: tuple[int, int]) -> float:
    """Compute the step time [s] of a pipeline-parallel run after a search for a good placement of ranks.

    The search starts from the better of two rank orders and keeps those random swaps of two ranks that shorten the
    step.
    """
    random, ranks = np.random.default_rng(0), shape[0] * shape[1]
    starts = (_packed(ranks, shape), _packed(ranks, shape[::-1]).T.copy())
    best = min(starts, key=lambda grid: work.step_time(network, grid)).ravel().copy()
    least = work.step_time(network, best.reshape(shape))
    for first, second in random.integers(0, ranks, (_PLACEMENT_SWAP_COUNT, 2)):
        best[[first, second]] = best[[second, first]]
        seconds = work.step_time(network, best.reshape(shape))
        if seconds >= least:
            best[[first, second]] = best[[second, first]]
        least = min(least, seconds)
    return least


def _random_step_seconds(network: PairNetwork, work: _Pipelines, shape: tuple[int, int]) -> float:
    """Compute the mean step time [s] of a pipeline-parallel run over random placements of its ranks."""
    random, ranks = np.random.default_rng(0), shape[0] * shape[1]
    draws = [random.permutation(ranks).reshape(shape) for _ in range(_RANDOM_PLACEMENT_COUNT)]
    return float(np.mean([work.step_time(network, grid) for grid in draws]))


_STEP_TIME_BY_ORDER: Mapping[str, Callable[[PairNetwork, _Pipelines, tuple[int, int]], float]] = {
    "packed": lambda network, work, shape: work.step_time(network, _packed(shape[0] * shape[1], shape)),
    "scheduled": _scheduled_step_seconds,
    "random": _random_step_seconds,
}


class PlacementTable(NonStepTimeTable):
    """Table of training steps under rank placements, one per row; the measured value is the step time [s]."""

    name = "placement"
    identifying_columns = frozenset({"network", "order", "pp", "tp", "dp", "micro_batch", "step_s"})
    optional_columns = "device dtype global_batch hidden layers seq_len software"
    configuration_columns = ("layers", "hidden", "seq_len", "global_batch", "dtype", "software", "device")
    measured_column = "step_s"

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Predict training steps under rank placements.

        The file ``placement_networks.csv`` in the folder of the table describes the networks.
        """
        path = Path(str(frame.attrs.get("path", ""))).parent / _NETWORKS_FILE
        described = read_table(path) if is_file(path) else pd.DataFrame({"network": []})
        self._networks = {str(name): PairNetwork.from_rows(rows) for name, rows in described.groupby("network")}
        self._stages: dict[tuple[object, ...], tuple[float, float]] = {}
        return super().predict(frame)

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the step time of a pipeline-parallel run under its rank placement (column ``order``) [s]."""
        network, order = self._networks.get(str(row["network"])), str(row["order"])
        if network is None:
            raise SpecError(f"network {row['network']!r} is not described in a {_NETWORKS_FILE} beside the table")
        if order not in _STEP_TIME_BY_ORDER:
            raise SpecError(f"order {order!r}: expected {', '.join(_STEP_TIME_BY_ORDER)}")
        stages, tensor, pipelines = (integer_cell(row, name) for name in ("pp", "tp", "dp"))
        if stages * tensor * pipelines != len(network.group_of_rank):
            raise SpecError(f"{stages} x {tensor} x {pipelines} ranks on a network of {len(network.group_of_rank)}")
        key = *(str(row[name]) for name in _STAGE_TIME_COLUMNS), stages, tensor, software
        if key not in self._stages:
            self._stages[key] = _stage_seconds(row, software)
        compute, ideal = self._stages[key]
        work = _pipelines(row, compute)
        seconds = _STEP_TIME_BY_ORDER[order](network, work, (stages, tensor * pipelines))
        names = (str(row["device"]), "a predicted stage and stated links")
        return RowPrediction.within_factor(seconds, 1.3, ideal * work.microbatches, *names)


def _pipelines(row: Row, compute: float) -> _Pipelines:
    """Build the pipeline-parallel run of a measured step: times, bytes that ranks send, microbatches and stages.

    Each tensor-parallel rank sends its share of an activation, as Megatron scatters activations. Gradients are those of
    the first stage, with the embedding. ``compute`` is the time in which a stage computes a microbatch [s].
    """
    stages, tensor, pipelines, micro = (integer_cell(row, name) for name in ("pp", "tp", "dp", "micro_batch"))
    hidden = integer_cell(row, "hidden")
    elements = 12.0 * hidden**2 * integer_cell(row, "layers") / stages + _GPT3_VOCABULARY_SIZE * hidden
    return _Pipelines(
        compute,
        boundary_bytes=_HALF_PRECISION_BYTES * micro * integer_cell(row, "seq_len") * hidden / tensor,
        gradient_bytes=_HALF_PRECISION_BYTES * elements / tensor,
        microbatches=integer_cell(row, "global_batch") // pipelines // micro,
        stages=stages,
        tensor_parallel_ranks=tensor,
        waited_transfer_fraction=_BLOCKING_SEND_WAIT_FRACTION if _is_megatron(row) else _STREAMED_SEND_WAIT_FRACTION,
    )


def _is_megatron(row: Row) -> bool:
    return str(row["software"]) == "Megatron"


def _stage_seconds(row: Row, software: SoftwareProfile | None) -> tuple[float, float]:
    """Predict (time of a microbatch on one stage with recomputation, time of its model FLOP at peak) [s].

    Both are differences between a network of twice the layers of a stage and one of a stage's layers.
    """
    layers = integer_cell(row, "layers") // integer_cell(row, "pp")
    fewer, more = (_of_layers(row, count, software) for count in (layers, 2 * layers))
    seconds = [each.step_time - each.breakdown.optimizer for each in (fewer, more)]
    return seconds[1] - seconds[0], peak_flops_step_time(more) - peak_flops_step_time(fewer)


def _of_layers(row: Row, layers: int, software: SoftwareProfile | None) -> Prediction:
    """Predict one microbatch through ``layers`` layers on the ranks of one stage, without fused attention."""
    tensor, megatron, length = integer_cell(row, "tp"), _is_megatron(row), integer_cell(row, "seq_len")
    run = Run(
        gpus=tensor, batch=integer_cell(row, "micro_batch"), strategy=f"tp={tensor}", dtype=str(row["dtype"]),
        optimizer="adam", recompute="full", software="megatron-2021" if megatron else "pytorch-eager",
        kernels={"attention": None if megatron else "stepwise"},
        model={
            "layers": layers, "hidden": integer_cell(row, "hidden"), "heads": _GPT3_HEAD_COUNT, "seq": length,
            "positions": length,
        },
    )  # fmt: skip
    return predict(load_model("gpt2"), load_system(_NODE_SYSTEM_NAME), run, software)


RUN_TABLES.register("placement")(PlacementTable())


#: Whom a GPU talks to: the one of its rail in the other node, or all there.
_PEER_PATTERNS = ("rail-aligned", "cross-rail")


class RailTable(NonStepTimeTable):
    """Table of messages between nodes of a rail network, one per row; the measured value is a GPU's rate [byte/s]."""

    name = "rails"
    identifying_columns = column_set("system ranks ranks_per_node peers message_bytes bytes_per_s_per_gpu")
    optional_columns = "device op"
    configuration_columns = ("peers", "message_bytes", "op")
    measured_column = "bytes_per_s_per_gpu"

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the rate at which one GPU sends messages to another node of a rail network [byte/s]."""
        system, peers = load_system(str(row["system"])), str(row["peers"])
        if peers not in _PEER_PATTERNS:
            raise SpecError(f"peers: {peers!r} is none of these; {suggest_names(peers, _PEER_PATTERNS)}")
        if integer_cell(row, "ranks_per_node") != system.devices_per_node:
            raise SpecError(f"ranks_per_node: only whole nodes of {system.devices_per_node} are modelled")
        outer = [level for level in system.levels if system.is_inter_node_level(level)]
        if not outer:
            raise SpecError(f"system {system.name} has no network between nodes")
        calibrated = collective_parameters(system, "collective.fabric")
        nic, size = outer[0].member_bandwidth / system.devices_per_node, float(integer_cell(row, "message_bytes"))
        nodes = integer_cell(row, "ranks") / system.devices_per_node
        seconds = _message_time(calibrated.parameters, peers, nodes, size / nic)
        (low, high), rate = calibrated.interval_factors(seconds), size / seconds
        origin = f"{calibrated.origin} ({calibrated.source_name})"
        return RowPrediction(rate, rate / high, rate / low, nic, system.name, origin)


def _message_time(fabric: FabricParameters, peers: str, nodes: float, wire: float) -> float:
    """Compute the time of a message between nodes over a rail network [s], from its time at the datasheet rate.

    Parameters
    ----------
    fabric : FabricParameters
        Calibrated parameters of the network between nodes.
    peers : str
        Peers that each GPU sends to: ``rail-aligned`` (same GPU index) or ``cross-rail`` (all).
    nodes : float
        Number of nodes.
    wire : float
        Time of the message's bytes at the datasheet rate [s].

    Returns
    -------
    float
        Time [s].
    """
    if peers == "rail-aligned":
        return wire / fabric.send_fraction
    share = fabric.exchange_fraction * nodes**-fabric.exchange_share_exponent
    return float(partly_overlapped_time(fabric.time_per_peer, wire / share))


RUN_TABLES.register("rails")(RailTable())
