"""Nodes of a cluster, where gangs of GPUs are placed, and the scheduling policies.

A policy tells in which order jobs start, and whether running jobs are stopped for others. It is an entry of a table: a
sort key for the queue, and flags for everything else. `paleo.cluster.simulation` implements all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paleo.registry import Registry

if TYPE_CHECKING:
    from paleo.specs.system import System

#: GPUs of a job on each node: number of the node and GPUs there.
GangPlacement = list[tuple[int, int]]
IntegerArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class NodePool:
    """Nodes of one kind, whose GPUs are assigned to gangs.

    A gang that is smaller than a node is placed on one node: the fullest with enough free GPUs. A larger gang takes
    whole nodes in as few racks as possible, and part of a node for the remainder.

    Attributes
    ----------
    nodes, gpus_per_node : int
        Nodes, and GPUs of each.
    nodes_per_rack : int
        Nodes below one leaf switch.
    spreads_over_racks : bool
        True to take whole nodes from all racks in turn instead.
    free_gpus : numpy.ndarray
        Free GPUs of each node.
    """

    nodes: int
    gpus_per_node: int
    nodes_per_rack: int = 1 << 30
    spreads_over_racks: bool = False
    free_gpus: IntegerArray = field(init=False)

    def __post_init__(self) -> None:
        self.free_gpus = np.full(self.nodes, self.gpus_per_node, dtype=np.int64)

    @property
    def gpus(self) -> int:
        """Number of GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    def can_place_gang(self, gpus: int, free: IntegerArray | None = None) -> bool:
        """Return True if a gang (the GPUs of one job) fits on the free nodes.

        Parameters
        ----------
        gpus : int
            GPUs of the gang.
        free : IntegerArray, shape (nodes,), optional
            Free GPUs of each node; by default the current ones.

        Returns
        -------
        bool
            True if it fits.
        """
        room = self.free_gpus if free is None else free
        whole, partial = divmod(gpus, self.gpus_per_node)
        if not whole:
            return bool((room >= partial).any())
        empty = int(np.count_nonzero(room == self.gpus_per_node))
        if not partial or empty != whole:
            return empty >= whole
        return bool(((room >= partial) & (room < self.gpus_per_node)).any())

    def placeable_gang_mask(self, sizes: IntegerArray, free: IntegerArray) -> npt.NDArray[np.bool_]:
        """Return a mask of the gang sizes (GPUs of one job) that fit on the free nodes.

        Parameters
        ----------
        sizes : IntegerArray, shape (n,)
            GPUs of the gangs.
        free : IntegerArray, shape (nodes,)
            Free GPUs of each node.

        Returns
        -------
        ndarray, shape (n,)
            True for sizes that fit.
        """
        per_node = self.gpus_per_node
        counts = np.bincount(free, minlength=per_node + 1)
        empty = int(counts[per_node])
        most = int(free.max(initial=0))
        most_partial = int(np.flatnonzero(counts[:per_node])[-1]) if counts[:per_node].any() else 0
        whole, partial = sizes // per_node, sizes % per_node
        beyond = (empty > whole) | (partial <= most_partial)
        return np.where(whole == 0, partial <= most, (empty >= whole) & ((partial == 0) | beyond))

    def gang_placement(self, gpus: int, free: IntegerArray | None = None) -> GangPlacement:
        """Return the nodes on which a gang would be placed, without marking them as used.

        Parameters
        ----------
        gpus : int
            GPUs of the gang.
        free : IntegerArray, shape (nodes,), optional
            Free GPUs of each node; by default the current ones.

        Returns
        -------
        GangPlacement
            Nodes with the number of GPUs on each.
        """
        room = self.free_gpus if free is None else free
        whole, partial = divmod(gpus, self.gpus_per_node)
        nodes = self._empty_nodes(np.flatnonzero(room == self.gpus_per_node), whole) if whole else []
        gang = [(node, self.gpus_per_node) for node in nodes]
        if partial:
            taken = np.array(room, dtype=np.int64)
            taken[nodes] = 0
            enough = np.where(taken >= partial, taken, self.gpus_per_node + 1)
            gang.append((int(enough.argmin()), partial))
        return gang

    def _empty_nodes(self, empty: IntegerArray, count: int) -> list[int]:
        """Return the indices of ``count`` empty nodes for a gang.

        The nodes are in the rack with the fewest empty nodes that suffice, otherwise in the emptiest racks.
        """
        if self.nodes_per_rack >= self.nodes:
            return [int(node) for node in empty[:count]]
        racks = empty // self.nodes_per_rack
        if self.spreads_over_racks:
            turn = np.concatenate([np.arange(size) for size in np.unique(racks, return_counts=True)[1]])
            return [int(node) for node in empty[np.argsort(turn, kind="stable")[:count]]]
        counts = np.bincount(racks)
        enough = np.flatnonzero(counts >= count)
        if len(enough):
            return [int(node) for node in empty[racks == enough[counts[enough].argmin()]][:count]]
        order = np.argsort(-counts[racks], kind="stable")
        return [int(node) for node in empty[order][:count]]

    def has_excess_racks(self, gang: GangPlacement) -> bool:
        """Return True if a gang is spread over more racks than its number of nodes needs.

        Parameters
        ----------
        gang : GangPlacement
            Nodes with the number of GPUs on each.

        Returns
        -------
        bool
            True if it does.
        """
        racks = {node // self.nodes_per_rack for node, _ in gang}
        return len(racks) > -(-len(gang) // self.nodes_per_rack)

    def allocate_gang(self, gang: GangPlacement) -> None:
        """Mark the GPUs of a gang as used.

        Parameters
        ----------
        gang : GangPlacement
            Nodes with the number of GPUs on each.
        """
        for node, gpus in gang:
            self.free_gpus[node] -= gpus

    def release_gang(self, gang: GangPlacement) -> None:
        """Mark the GPUs of a gang as free.

        Parameters
        ----------
        gang : GangPlacement
            Nodes with the number of GPUs on each.
        """
        for node, gpus in gang:
            self.free_gpus[node] += gpus


def nodes_per_rack(system: System) -> int | None:
    """Return the number of nodes below one leaf switch of a system.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.

    Returns
    -------
    int, optional
        Number of nodes; None if its file names no leaf switches.
    """
    level = next((each for each in system.levels if each.leaf is not None), None)
    return None if level is None else level.leaf


PriorityKey = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """Scheduling policy of a cluster: order of jobs, preemption, backfill and resizing.

    Attributes
    ----------
    title, source : str
        Name of the policy, and the publication that defines it.
    priority_key : callable, optional
        Returns the sort key of a job from the simulation and the job's number; smaller keys start first. None is the
        order of arrival.
    preempts : bool
        True if running jobs are stopped for jobs with a smaller key.
    backfills : bool
        True if later jobs may start when they do not delay the first one that waits.
    resizes_jobs : bool
        True if the policy changes the number of GPUs of running jobs.
    has_time_quanta : bool
        True if the keys of running jobs change with time in steps of a quantum.
    """

    title: str
    source: str
    priority_key: Callable[[Any, int], PriorityKey] | None = None
    preempts: bool = False
    backfills: bool = False
    resizes_jobs: bool = False
    has_time_quanta: bool = False


#: Policies by name.
SCHEDULING_POLICIES: Registry[SchedulingPolicy] = Registry("policy")


for _name, _policy in {
    "fifo": SchedulingPolicy("first in, first out", "queueing theory"),
    "backfill": SchedulingPolicy(
        "FIFO with EASY backfill", "Lifka, The ANL/IBM SP scheduling system, 1995", backfills=True
    ),
    "srtf": SchedulingPolicy(
        "shortest remaining time first",
        "Schrage, Operations Research 16 (1968)",
        lambda cluster, job: (cluster.remaining_time(job), job),
        preempts=True,
    ),
    "las": SchedulingPolicy(
        "least attained service",
        "Gu et al., Tiresias, NSDI 2019, section 3",
        lambda cluster, job: (cluster.service_level(job), job not in cluster.running, job),
        preempts=True,
        has_time_quanta=True,
    ),
    "priority": SchedulingPolicy(
        "priority with preemption",
        "Burns et al., Borg, Omega, and Kubernetes, 2016",
        lambda cluster, job: (-cluster.jobs[job].priority, job),
        preempts=True,
    ),
    "fair": SchedulingPolicy(
        "fair share by team",
        "Ghodsi et al., NSDI 2011, for one resource",
        lambda cluster, job: (cluster.team_gpu_time(cluster.jobs[job].team), job),
        backfills=True,
    ),
    "elastic": SchedulingPolicy(
        "elastic by marginal speed-up", "Peng et al., Optimus, EuroSys 2018, section 4.1", resizes_jobs=True
    ),
}.items():
    SCHEDULING_POLICIES.register(_name)(_policy)
