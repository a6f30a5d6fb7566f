"""Gossip: a worker averages with a few neighbours each step; nobody waits for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paleo.consistency.base import CONSISTENCY, Array, Consistency, Cycle, Workload
from paleo.errors import PlanError, near
from paleo.step.waiting import Numeric, waiting_share


def ring_gap(workers: Numeric) -> Array:
    """Spectral gap of averaging with both neighbours of a ring, weights 1/3: (2/3)(1 − cos 2π/n).

    >>> float(ring_gap(4.0).round(4))
    0.6667
    """
    return np.asarray(2.0 / 3.0 * (1.0 - np.cos(2.0 * np.pi / np.maximum(workers, 2.0))))


def exponential_gap(workers: Numeric) -> Array:
    """Spectral gap of the static exponential graph: 2 / (1 + ⌈log₂ n⌉).

    Reference: Ying et al., Exponential graph is provably efficient for decentralized deep training, NeurIPS 2021.
    """
    return np.asarray(2.0 / (1.0 + np.ceil(np.log2(np.maximum(workers, 2.0)))))


@dataclass(frozen=True, slots=True)
class Topology:
    """Neighbours that a worker hears of a step: ``ring`` 2, ``exp`` ⌈log₂ N⌉, ``one-peer`` 1."""

    neighbours: str
    reference: str

    def degree(self, workers: Numeric) -> Array:
        """Neighbours a step, (configurations,)."""
        n = np.asarray(workers, dtype=np.float64)
        most = {"ring": 2.0 + 0.0 * n, "one-peer": 1.0 + 0.0 * n, "exp": np.ceil(np.log2(np.maximum(n, 1.0)))}
        return np.asarray(np.minimum(most[self.neighbours], n - 1.0))

    def mixing_steps(self, workers: Numeric) -> Array:
        """Return the steps in which a difference between workers falls to 1/e.

        One-peer exponential graphs over powers of two reach exact consensus after ⌈log₂ N⌉ steps.
        """
        if self.neighbours == "one-peer":
            return np.asarray(np.ceil(np.log2(np.maximum(workers, 2.0))))
        return 1.0 / (ring_gap(workers) if self.neighbours == "ring" else exponential_gap(workers))


_TOPOLOGIES = {
    "ring": Topology("ring", "Lian et al., D-PSGD, NIPS 2017"),
    "exp2": Topology("exp", "Ying et al., NeurIPS 2021"),
    "one-peer": Topology("one-peer", "Assran et al., Stochastic gradient push, ICML 2019"),
    "sgp": Topology("one-peer", "Assran et al., Stochastic gradient push, ICML 2019"),
    "dpsgd": Topology("ring", "Lian et al., D-PSGD, NIPS 2017"),
}


@dataclass(frozen=True, slots=True)
class Gossip:
    """T = compute (1 + W of d + 1 workers) + max(0, d · neighbour − compute), d the neighbours a step.

    What is averaged are the parameters that a step began with, so they travel beside the whole of it (Lian et al.,
    2017, section 4), not beside its backward pass alone.
    """

    kind: str
    exact = False  # parameters of workers differ
    uses_servers = False

    @property
    def summary(self) -> str:
        """What the method does, in a few words."""
        return f"each worker averages with its neighbours ({self.kind})"

    @property
    def reference(self) -> str:
        """Where the topology comes from."""
        return _TOPOLOGIES[self.kind].reference

    def cycle(self, workload: Workload) -> Cycle:
        degree = _TOPOLOGIES[self.kind].degree(workload.workers)
        exposed = np.maximum(0.0, degree * workload.neighbour - workload.compute)
        waiting = waiting_share(degree + 1.0, workload.jitter, workload.persistent)
        mixing = np.where(degree > 0, _TOPOLOGIES[self.kind].mixing_steps(workload.workers), 0.0)
        return Cycle.of(
            workload,
            workload.compute * (1.0 + waiting) + exposed,
            sent=degree * workload.payload,
            staleness=(mixing, 0.0),
            extra_memory=workload.payload * (degree > 0),
        )


@CONSISTENCY.register("gossip")
def gossip(argument: str) -> Consistency:
    """``gossip:ring``, ``gossip:exp2``, ``gossip:one-peer``."""
    if argument not in _TOPOLOGIES:
        raise PlanError(f"consistency gossip:{argument}: unknown topology {argument!r}; {near(argument, _TOPOLOGIES)}")
    return Gossip(argument)
