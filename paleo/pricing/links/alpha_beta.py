"""Time of the traffic of a collective over the levels of a network, by alpha, beta and gamma.

alpha [s] is the cost of a message, beta [s/byte] of a byte that one unit sends into a level, gamma [s/byte] of a byte
that a rank combines (Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005). For a group of one level these are the
textbook formulas.

Latency and transfer may overlap. The functions below combine them for pipelines that fill, for kernels that wait for
the last rank, and for the smooth minimum of two choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paleo.collectives.base import (
    Array,
    FanOuts,
    LevelTraffic,
    Numeric,
    Traffic,
    algorithms_for,
    checked_fan_outs,
    checked_payload,
    group_rank_count,
    recursive_doubling_rounds,
    remote_buffer_fraction,
)
from paleo.errors import SpecError
from paleo.units import KILO, MICROSECOND


@dataclass(frozen=True, slots=True)
class LevelCost:
    """Latency (alpha) and inverse bandwidth (beta, gamma) of one interconnect level for one communication group.

    Attributes
    ----------
    alpha : float or ndarray
        One message from end to end [s].
    beta : float or ndarray
        One byte sent by a unit of the level below through the ports that the group may use [s/byte].
    gamma : float or ndarray
        One byte combined by a rank [s/byte].
    rank_beta : float or ndarray
        One byte sent by a single rank of that unit, through the ports that it drives [s/byte].
    """

    alpha: Numeric
    beta: Numeric
    gamma: Numeric = 0.0
    rank_beta: Numeric = 0.0

    def transfer_time(self, level: LevelTraffic) -> Numeric:
        """Compute the time to send the bytes of a collective over one interconnect level, without latency.

        Parameters
        ----------
        level : LevelTraffic
            Bytes on the wire and bytes that are summed.

        Returns
        -------
        array-like
            Time [s].
        """
        seconds = self.beta * level.wire_bytes
        if level.senders_per_member is None:
            return seconds
        return np.maximum(seconds, self.rank_beta * level.wire_bytes / level.senders_per_member)


def collective_traffic_time(traffic: Traffic, costs: Sequence[LevelCost]) -> Array:
    """Compute the time of a collective's traffic by the alpha-beta model, phase after phase.

    A phase takes the sum of its latencies and the time of its slowest level: sum of alpha steps + max of beta bytes +
    sum of gamma bytes.

    Parameters
    ----------
    traffic : Traffic
        Steps and bytes of an algorithm, level by level.
    costs : sequence of LevelCost
        Latency and bandwidth of each level, inner to outer.

    Returns
    -------
    ndarray
        Time [s].

    Raises
    ------
    SpecError
        If the traffic has more levels than there are costs.

    Examples
    --------
    >>> from paleo.collectives.base import COLLECTIVE_ALGORITHMS
    >>> ring = COLLECTIVE_ALGORITHMS["ring"].traffic("all_reduce", 800.0, (8,))
    >>> float(collective_traffic_time(ring, [LevelCost(alpha=1.0, beta=0.01)]))  # 14 steps and 1400 bytes
    28.0
    """
    total = np.zeros(())
    for phase in traffic.phases:
        if len(phase) > len(costs):
            raise SpecError(f"traffic over {len(phase)} levels needs as many level costs, found {len(costs)}")
        slowest = np.zeros(())
        for level, cost in zip(phase, costs, strict=False):
            slowest = np.maximum(slowest, cost.transfer_time(level))
            total = total + cost.alpha * level.steps + cost.gamma * level.reduced_bytes
        total = total + slowest
    return np.asarray(total)


def collective_time_lower_bound(
    operation: str, payload_bytes: Numeric, group: FanOuts, costs: Sequence[LevelCost], *, in_network: bool = False
) -> Array:
    """Compute a lower bound of the time of a collective by any algorithm between hosts.

    For one level: alpha log2 P + beta S c, with c = 2 (P-1)/P for all_reduce, (P-1)/P for reduce_scatter, all_gather
    and all_to_all, 1 for broadcast and send_recv. Over several levels the latencies add, and the slowest level counts.
    Switches that may combine and copy messages (``in_network``) take one step per level, and S for an all_reduce.

    Parameters
    ----------
    operation : str
        Collective operation, such as ``all_reduce``.
    payload_bytes : array-like
        Size of the whole tensor [byte].
    group : FanOuts
        Fan-out of each level, inner to outer.
    costs : sequence of LevelCost
        Latency and bandwidth of each level, inner to outer.
    in_network : bool, default False
        True if switches may combine and copy messages.

    Returns
    -------
    ndarray
        Time [s].

    Raises
    ------
    SpecError
        If the group has more levels than there are costs.

    References
    ----------
    Chan, Heimlich, Purkayastha and van de Geijn, Collective communication, CCPE 19(13), 2007.

    Examples
    --------
    >>> cost = LevelCost(alpha=1.0, beta=0.01)
    >>> float(collective_time_lower_bound("all_reduce", 800.0, (8,), [cost]))
    17.0
    """
    algorithms_for(operation)
    payload, fan_outs = checked_payload(payload_bytes), checked_fan_outs(group)
    if len(costs) != len(fan_outs):
        raise SpecError(f"a group of {len(fan_outs)} levels needs as many level costs, found {len(costs)}")
    latency, slowest = np.zeros(()), np.zeros(())
    for index, cost in enumerate(costs):
        fan_out, above = fan_outs[index], group_rank_count(fan_outs[index + 1 :])
        spanned = np.where(fan_out > 1, 1.0, 0.0)
        if operation == "send_recv":
            spanned = spanned * (above == 1)
        steps = spanned if in_network or operation == "send_recv" else recursive_doubling_rounds(fan_out)
        share = _least_share(operation, fan_outs, index, in_network)
        latency = latency + cost.alpha * steps
        slowest = np.maximum(slowest, cost.beta * payload * share * spanned)
    return np.asarray(latency + slowest)


def torus_time_lower_bound(operation: str, payload_bytes: Numeric, group: FanOuts, costs: Sequence[LevelCost]) -> Array:
    """Compute a lower bound of the time of a collective by any algorithm on a torus, each level being a dimension.

    The bytes that a rank must send are spread over all its links; latency is left out.

    Parameters
    ----------
    operation : str
        Collective operation, such as ``all_reduce``.
    payload_bytes : array-like
        Size of the whole tensor [byte].
    group : FanOuts
        Fan-out of each level, inner to outer.
    costs : sequence of LevelCost
        Time per byte of each level, inner to outer [s/byte]: that of all ranks of a unit together, so that eight ranks
        with a link each have an eighth of the link's time.

    Returns
    -------
    ndarray
        Time [s].

    Examples
    --------
    >>> costs = [LevelCost(alpha=1.0, beta=0.01), LevelCost(alpha=1.0, beta=0.01 / 8)]
    >>> # a rank sends 5600 + 700 bytes over two links of 100 bytes a second each
    >>> float(torus_time_lower_bound("all_gather", 6400.0, (8, 8), costs))
    31.5
    """
    payload, fan_outs = checked_payload(payload_bytes), checked_fan_outs(group)
    rate: Array = np.zeros(())
    for index, cost in enumerate(costs):
        rate = rate + np.where(fan_outs[index] > 1, 1.0, 0.0) / (cost.beta * group_rank_count(fan_outs[:index]))
    ranks = group_rank_count(fan_outs)
    sent = bus_factor(operation, ranks) * payload * (ranks > 1)
    return np.asarray(sent / np.where(rate > 0, rate, np.inf))


def _least_share(operation: str, fan_outs: tuple[Array, ...], index: int, in_network: bool) -> Array:
    """Return the smallest share of the payload that each unit of a level must send into the level, by any algorithm."""
    fan_out = fan_outs[index]
    if operation == "all_reduce":
        return np.ones(()) if in_network else 2.0 * remote_buffer_fraction(fan_out)
    if operation == "all_to_all":
        inside, above = group_rank_count(fan_outs[:index]), group_rank_count(fan_outs[index + 1 :])
        return inside * remote_buffer_fraction(fan_out) / above
    return remote_buffer_fraction(fan_out) if operation in ("reduce_scatter", "all_gather") else np.ones(())


def bus_factor(operation: str, ranks: Numeric) -> Array:
    """Return the bytes that each rank must send in a collective, relative to the payload.

    This is nccl-tests' factor between algorithm bandwidth and bus bandwidth.

    Parameters
    ----------
    operation : str
        Collective operation, such as ``all_reduce``.
    ranks : array-like
        Number of ranks of the group.

    Returns
    -------
    ndarray
        Factor in bus bandwidth = factor * payload / time (nccl-tests).

    Examples
    --------
    >>> float(bus_factor("all_reduce", 8)), float(bus_factor("all_gather", 8)), float(bus_factor("broadcast", 8))
    (1.75, 0.875, 1.0)
    """
    algorithms_for(operation)
    count = np.asarray(ranks, dtype=np.float64)
    if operation in ("broadcast", "send_recv"):
        return np.ones_like(count)
    return (2.0 if operation == "all_reduce" else 1.0) * remote_buffer_fraction(count)


#: Time that counts as zero, since parameters are fitted by their logarithms [s].
NANOSECOND = MICROSECOND / KILO


def partly_overlapped_time(latency: Numeric, transfer: Numeric) -> Array:
    """Combine latency and transfer time that partly overlap: the root of the sum of their squares.

    Parameters
    ----------
    latency : array-like
        Seconds of all steps.
    transfer : array-like
        Seconds on the wire.

    Returns
    -------
    ndarray
        Root of the sum of squares [s].

    Examples
    --------
    >>> float(partly_overlapped_time(3.0, 4.0))
    5.0
    """
    return np.asarray(np.hypot(latency, transfer))


def hop_latency_correction(measured: float, stated: float | None, latency: float) -> float:
    """Compute the time to add to a measured hop time if the link has another latency.

    The link's part of the hop changes in proportion; the software's part does not. The link's part is the datasheet
    latency, or the whole hop if that is shorter. If the latency of the measured link is unknown, the hop takes at least
    as long as the new link's latency.

    Parameters
    ----------
    measured : float
        Seconds of the hop.
    stated : float, optional
        Latency of the link on which the hop was measured [s].
    latency : float
        Latency of the link in use [s].

    Returns
    -------
    float
        Time to add to the measured hop [s]; negative for a faster link.

    Examples
    --------
    >>> [round(hop_latency_correction(4.0, *ends), 9) for ends in ((1.0, 3.0), (8.0, 4.0), (None, 5.0))]
    [2.0, -2.0, 1.0]
    """
    if stated is None:
        return max(0.0, latency - measured)
    return min(stated, measured) * (latency / stated - 1.0) if stated > 0.0 else latency


def pipeline_fill_time(transfer: Numeric, chunk_cost: Numeric) -> Array:
    """Compute the time to fill a pipeline of chunks, for the optimal number of chunks.

    Sending n chunks costs n chunk_cost + transfer / n in addition to the transfer; at the best n both terms are equal.

    Parameters
    ----------
    transfer : array-like
        Seconds on the wire.
    chunk_cost : array-like
        Seconds of one more chunk.

    Returns
    -------
    ndarray
        Seconds: 2 sqrt(transfer x chunk_cost).

    References
    ----------
    Sanders, Speck and Traff, Parallel Computing 35(12), 2009, section 2 (optimal pipelining).

    Examples
    --------
    >>> float(pipeline_fill_time(16.0, 1.0))
    8.0
    """
    return np.asarray(2.0 * np.sqrt(np.asarray(transfer) * chunk_cost))


def smooth_minimum(first: Numeric, second: Numeric, norm: float = 6.0) -> Array:
    """Compute a smooth minimum of two values, slightly below the true minimum near ties.

    Parameters
    ----------
    first, second : array-like
        Values above zero.
    norm : float, default 6.0
        Order n; larger orders give a sharper minimum.

    Returns
    -------
    ndarray
        (x^-n + y^-n)^(-1/n).

    Examples
    --------
    >>> round(float(smooth_minimum(1.0, 10.0)), 6)
    1.0
    """
    least = np.minimum(first, second)
    ratio = least / np.maximum(np.maximum(first, second), np.finfo(np.float64).tiny)
    return np.asarray(least * (1.0 + ratio**norm) ** (-1.0 / norm))


def smooth_maximum(first: Numeric, second: Numeric, norm: float = 4.0) -> Array:
    """Compute a smooth maximum of two values, slightly above the true maximum near ties.

    Parameters
    ----------
    first, second : array-like
        Values above zero.
    norm : float, default 4.0
        Order n; larger orders give a sharper maximum.

    Returns
    -------
    ndarray
        (x^n + y^n)^(1/n).

    Examples
    --------
    >>> round(float(smooth_maximum(1.0, 1.0)), 6)
    1.189207
    """
    largest = np.maximum(np.maximum(first, second), np.finfo(np.float64).tiny)
    return np.asarray(largest * ((first / largest) ** norm + (second / largest) ** norm) ** (1.0 / norm))


def with_launch_skew(time: Array, skew: Numeric) -> Array:
    """Add launch skew to the time of a collective: no rank ends before the last rank has launched.

    Parameters
    ----------
    time : ndarray
        Seconds of the kernel.
    skew : array-like
        Seconds until the last rank launches.

    Returns
    -------
    ndarray
        Smooth maximum of both [s].
    """
    return smooth_maximum(time, skew)
