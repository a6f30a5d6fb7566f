"""Time of the MoE token exchange by libraries such as DeepEP, which send each token separately.

A token is sent once to each rank with some of its experts (DeepEP's normal mode, NVLink kernels of TensorRT-LLM).
Between nodes a token is sent once to each node, or once per expert (DeepEP's low-latency mode). Some multiprocessors do
the copies. Ranks first exchange the counts of their tokens.

    time = launch + hops · log2(nodes) + (link⁴ + copies⁴ + network⁴ + tokens⁴)^¼
    copies  = all that a rank sends, its own share included, over what its multiprocessors copy
    network = bytes to other nodes over NIC's share, which falls as nodes^spread

Reference: DeepSeek-AI, DeepEP (README, 2025).

The all-reduce kernels of inference engines send in one or two shots, and leave large payloads to NCCL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.collectives.base import COLLECTIVE_ALGORITHMS, Numeric
from paleo.pricing.calibration_lookup import find_calibrated_parameters
from paleo.pricing.links.alpha_beta import bus_factor, partly_overlapped_time, pipeline_fill_time, with_launch_skew
from paleo.pricing.links.group import MIN_SWITCH_RANKS, GroupLinks
from paleo.specs.calibration import parameter
from paleo.units import MICROSECOND, MILLISECOND

if TYPE_CHECKING:
    from paleo.specs.system import System

Array = npt.NDArray[np.float64]
#: Multiprocessors that copy if a row does not say: DeepEP's default (``Buffer.num_sms``).
DEEPEP_MULTIPROCESSORS = 20.0
_NANOSECOND = MICROSECOND * MILLISECOND
#: Mode of DeepEP that training uses.
TRAINING_DEEPEP_MODE = "deepep-normal"
#: Exponent of the norm that combines the limits of an exchange.
_NORM = 4.0


@dataclass(frozen=True, slots=True)
class TokenExchangeParameters:
    """Calibrated parameters of one direction (dispatch or combine) of an MoE token exchange on one system."""

    launch_time: float = parameter("20 us", "1..1000 us", "launches, counts and a barrier")
    link_share: float = parameter("0.7", "0.05..1.5", "share of a device's links that is reached")
    copy_rate: float = parameter("10 B/ns", "0.1..1000 B/ns", "what a multiprocessor copies")
    nic_share: float = parameter("0.8", "0.1..1.2", "share of a NIC that two nodes reach")
    nic_share_exponent: float = parameter("0.1", "0.001..3", "power of the nodes by which that share falls")
    time_per_visit: float = parameter("0.1 ns", "1e-3..1000 ns", "of each expert that a token visits")
    time_per_node_doubling: float = parameter("5 us", "0.01..1000 us", "of each doubling of the nodes")


@dataclass(frozen=True, slots=True)
class TokenExchangeLinks:
    """Bandwidths of one device for an MoE token exchange, one direction [byte/s]: its links, and its NIC."""

    link_bandwidth: float
    nic_bandwidth: float


def token_exchange_links(system: System) -> TokenExchangeLinks:
    """Return the intra-node link bandwidth and the NIC bandwidth of one device of a system.

    Parameters
    ----------
    system : System
        The system; its innermost level connects the devices of a node, its outermost the nodes.

    Returns
    -------
    TokenExchangeLinks
        Bandwidths [byte/s].
    """
    inner, outer = system.levels[0], system.levels[-1]
    return TokenExchangeLinks(inner.member_bandwidth, outer.member_bandwidth / system.devices_per_node)


def mean_visited_groups(groups: npt.ArrayLike, experts: npt.ArrayLike, top_k: npt.ArrayLike) -> Array:
    """Compute the mean number of expert groups (nodes or ranks) that a token visits under uniform routing.

    Parameters
    ----------
    groups : array-like
        Number of groups (ranks or nodes) over which the experts are divided.
    experts, top_k : array-like
        Number of experts of the layer, and number that a token visits.

    Returns
    -------
    ndarray
        Mean number of groups.

    Examples
    --------
    >>> mean_visited_groups(4, 8, [1, 8]).tolist()
    [1.0, 4.0]
    """
    n, total, chosen = np.broadcast_arrays(*(np.asarray(each, dtype=np.float64) for each in (groups, experts, top_k)))
    unvisited = np.ones(n.shape)
    for drawn in range(int(chosen.max(initial=0.0))):
        left = np.clip((total - total / n - drawn) / np.maximum(total - drawn, 1.0), 0.0, 1.0)
        unvisited = np.where(drawn < chosen, unvisited * left, unvisited)
    return np.asarray(n * (1.0 - unvisited))


def moe_token_exchange_time(
    *,
    inside: Array,
    linked: Array,
    across: Array,
    visits: Array,
    nodes: Array,
    multiprocessors: Array,
    links: TokenExchangeLinks,
    parameters: TokenExchangeParameters,
) -> Array:
    """Compute the time of one direction (dispatch or combine) of an MoE token exchange.

    Parameters
    ----------
    inside, linked, across : array
        Bytes that a rank sends: to ranks of its node including itself; the part of these that uses links; to other
        nodes.
    visits : array
        Visits to experts by the tokens of a rank (tokens times top-k).
    nodes : array
        Number of nodes.
    multiprocessors : array
        Number of multiprocessors that copy.
    links : TokenExchangeLinks
        Links and NIC of a device.
    parameters : TokenExchangeParameters
        Calibration of the exchange kernels.

    Returns
    -------
    ndarray
        Time [s].
    """
    p = parameters
    parts = (
        linked / (p.link_share * links.link_bandwidth),
        inside * _NANOSECOND / (p.copy_rate * multiprocessors),
        across / (p.nic_share * links.nic_bandwidth) * nodes**p.nic_share_exponent,
        visits * p.time_per_visit,
    )
    joined = sum(part**_NORM for part in parts) ** (1.0 / _NORM)
    return np.asarray(p.launch_time + p.time_per_node_doubling * np.log2(nodes) + joined)


def intra_node_token_exchange_time(payload_bytes: Array, ranks: int, system: System, kernel: str) -> Array | None:
    """Compute the time of one direction of an MoE token exchange inside a node.

    Each token is sent once to each rank with some of its experts.

    Parameters
    ----------
    payload_bytes : ndarray
        Bytes that a rank sends, including those to itself.
    ranks : int
        Number of expert-parallel ranks that share the experts.
    system : System
        Machine: its devices, nodes and links.
    kernel : str
        Kernel of the exchange, such as ``deepep-normal.dispatch``.

    Returns
    -------
    ndarray, optional
        Seconds; None if the exchange was not measured on the architecture.
    """
    device, family = system.device, f"exchange.{kernel}"
    entry = find_calibrated_parameters(
        TokenExchangeParameters, subject=device.name, architecture=device.architecture,
        memory_kind=device.memory.kind, family=family,
    )  # fmt: skip
    if entry.origin == "default":
        return None
    nothing, single = np.zeros(payload_bytes.shape), np.array(1.0)
    return moe_token_exchange_time(
        inside=payload_bytes, linked=payload_bytes * (1.0 - 1.0 / ranks), across=nothing, visits=nothing, nodes=single,
        multiprocessors=DEEPEP_MULTIPROCESSORS * single, links=token_exchange_links(system),
        parameters=entry.parameters,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CustomAllReduceParameters:
    """Calibrated parameters of one-shot and two-shot all-reduce over NVLink, and of NCCL's ring for large payloads."""

    launch_time: float = parameter("4 us", "0.5..50 us", "kernel start and first barrier")
    host_time: float = parameter("1 ns", "1 ns..500 us", "time the host needs to issue the call")
    time_per_peer: float = parameter("0.1 us", "1 ns..5 us", "one more peer in the barrier")
    one_shot_fraction: float = parameter("0.6", "0.05..1", "share of the link, one-shot")
    second_barrier_time: float = parameter("4 us", "0.1..50 us", "the second barrier and pass")
    two_shot_fraction: float = parameter("0.6", "0.05..1", "share of the link, two-shot")
    max_payload_bytes: float = parameter("8 MiB", "1 kB..1 GiB", "largest payload", fitted=False)
    two_shot_threshold: float = parameter("2 MiB", "1 kB..1 GiB", "payload times ranks of two-shot", fitted=False)
    ring_launch_time: float = parameter("15 us", "0.1..300 us", "launch and start of NCCL")
    ring_hop_time: float = parameter("5 us", "0.1..100 us", "one hop of NCCL's ring")
    ring_fraction: float = parameter("0.77", "0.05..1", "share of the link of NCCL's ring")
    local_copy_time_ratio: float = parameter(
        "0.38", "0.02..3", "copy of a rank's own share to its output, in link times"
    )
    time_per_chunk: float = parameter("1.5 us", "1 ns..1000 us", "cost of one more chunk in the pipeline")
    switch_fraction: float = parameter("0.63", "0.2..1", "share of the link with NVLink SHARP")


def custom_all_reduce_time(
    *, payload_bytes: Numeric, links: GroupLinks, parameters: CustomAllReduceParameters
) -> Array:
    """Compute the time of a custom all-reduce: one-shot, two-shot or, above the largest payload, NCCL.

    One-shot: every rank reads all other buffers, (P-1) S over its link. Two-shot: reduce-scatter and all-gather, 2
    (P-1)/P S, after one more barrier; from 2 MiB / P on if P > 2 (vLLM, SGLang). A call outside a graph takes at least
    the host time.

    Parameters
    ----------
    payload_bytes : array-like
        Size of the whole tensor [byte].
    links : GroupLinks
        Levels of the network that the group spans.
    parameters : CustomAllReduceParameters
        Calibrated parameters of the collective library on these links.

    Returns
    -------
    ndarray
        Time [s].
    """
    p, payload, ranks = parameters, np.asarray(payload_bytes, dtype=np.float64), links.ranks
    wire = bus_factor("all_reduce", ranks) * payload / links.levels[0].bandwidth
    start = p.launch_time + p.time_per_peer * ranks
    one_shot = start + wire * ranks / 2.0 / p.one_shot_fraction
    two_shot = start + p.second_barrier_time + wire / p.two_shot_fraction
    kernel = np.where(np.logical_and(payload * ranks >= p.two_shot_threshold, ranks > 2), two_shot, one_shot)
    time = np.where(payload <= p.max_payload_bytes, kernel, _ring_beyond(payload, wire, links, p))
    return with_launch_skew(np.where(ranks > 1, time, 0.0), p.host_time)


def _ring_beyond(payload: Array, wire: Array, links: GroupLinks, p: CustomAllReduceParameters) -> Array:
    """Compute the time of NCCL's ring for payloads too large for custom kernels, or of NVLink SHARP if faster [s]."""
    copied = 0.5 * p.local_copy_time_ratio * payload / links.ranks / links.levels[0].bandwidth
    moved = wire / p.ring_fraction + copied
    hops = partly_overlapped_time(2.0 * (links.ranks - 1.0) * p.ring_hop_time, moved)
    time = p.ring_launch_time + hops + pipeline_fill_time(moved, p.time_per_chunk)
    if not links.switch_reduces:
        return np.asarray(time)
    traffic = COLLECTIVE_ALGORITHMS["in_switch"].traffic("all_reduce", payload, links.fan_outs)
    switch = links.datasheet_wire_time(traffic) / p.switch_fraction
    by_switch = p.ring_launch_time + links.ranks * p.ring_hop_time + switch
    by_switch = by_switch + pipeline_fill_time(switch, p.time_per_chunk)
    return np.where(links.ranks >= MIN_SWITCH_RANKS, np.minimum(time, by_switch), time)
