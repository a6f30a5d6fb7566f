"""Consistency models in which workers average their parameters: all of them periodically, or neighbours each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paleo.consistency.base import (
    CONSISTENCY_MODELS,
    FP32_BYTES,
    Array,
    ConsistencyModel,
    ConsistencyResult,
    DataParallelWorkload,
    count_argument,
)
from paleo.errors import PlanError, suggest_names
from paleo.step.waiting import Numeric, averaged_noise, straggler_wait_share

# Gossip: a worker averages with a few neighbours each step, and no worker waits for all others


def ring_spectral_gap(workers: Numeric) -> Array:
    """Compute the spectral gap of gossip on a ring, which sets how fast workers agree: (2/3)(1 − cos 2π/n).

    Each of n workers averages with both neighbours with weights 1/3.

    >>> float(ring_spectral_gap(4.0).round(4))
    0.6667
    """
    return np.asarray(2.0 / 3.0 * (1.0 - np.cos(2.0 * np.pi / np.maximum(workers, 2.0))))


def exponential_graph_spectral_gap(workers: Numeric) -> Array:
    """Compute the spectral gap of gossip on the static exponential graph of n workers: 2 / (1 + ⌈log₂ n⌉).

    The gap sets how fast workers agree. Reference: Ying et al., Exponential graph is provably efficient for
    decentralized deep training, NeurIPS 2021.
    """
    return np.asarray(2.0 / (1.0 + np.ceil(np.log2(np.maximum(workers, 2.0)))))


@dataclass(frozen=True, slots=True)
class _GossipTopology:
    """Communication graph of gossip: the neighbours with which a worker averages parameters in each step.

    ``kind`` is ``ring`` (2 neighbours), ``exp`` (⌈log₂ N⌉) or ``one-peer`` (1).
    """

    kind: str
    reference: str

    def degree(self, workers: Numeric) -> Array:
        """Return the number of neighbours that a worker averages with in each step, shape (configurations,)."""
        n = np.asarray(workers, dtype=np.float64)
        most = {"ring": 2.0 + 0.0 * n, "one-peer": 1.0 + 0.0 * n, "exp": np.ceil(np.log2(np.maximum(n, 1.0)))}
        return np.asarray(np.minimum(most[self.kind], n - 1.0))

    def mixing_steps(self, workers: Numeric) -> Array:
        """Compute the number of gossip steps after which a difference between workers has fallen to 1/e.

        One-peer exponential graphs over powers of two reach exact consensus after ⌈log₂ N⌉ steps.
        """
        if self.kind == "one-peer":
            return np.asarray(np.ceil(np.log2(np.maximum(workers, 2.0))))
        return 1.0 / (ring_spectral_gap(workers) if self.kind == "ring" else exponential_graph_spectral_gap(workers))


_TOPOLOGIES = {
    "ring": _GossipTopology("ring", "Lian et al., D-PSGD, NIPS 2017"),
    "exp2": _GossipTopology("exp", "Ying et al., NeurIPS 2021"),
    "one-peer": _GossipTopology("one-peer", "Assran et al., Stochastic gradient push, ICML 2019"),
    "sgp": _GossipTopology("one-peer", "Assran et al., Stochastic gradient push, ICML 2019"),
    "dpsgd": _GossipTopology("ring", "Lian et al., D-PSGD, NIPS 2017"),
}


@dataclass(frozen=True, slots=True)
class Gossip:
    """Gossip consistency model: each worker averages its parameters with d neighbours in each step.

    The step time is compute (1 + W) + max(0, d · neighbour exchange − compute), where W is the share of waiting for the
    slowest of d + 1 workers. The averaged parameters are those at the start of the step. Their exchange therefore
    overlaps with the whole step, not only with the backward pass (Lian et al., 2017, section 4).
    """

    topology: str
    matches_synchronous = False  # the parameters of the workers differ
    uses_servers = False

    @property
    def summary(self) -> str:
        """Description of the consistency model in a few words."""
        return f"each worker averages with its neighbours ({self.topology})"

    @property
    def reference(self) -> str:
        """Paper that describes the gossip topology."""
        return _TOPOLOGIES[self.topology].reference

    def evaluate(self, workload: DataParallelWorkload) -> ConsistencyResult:
        degree = _TOPOLOGIES[self.topology].degree(workload.workers)
        exposed = np.maximum(0.0, degree * workload.neighbour_exchange_time - workload.compute_time)
        waiting = straggler_wait_share(degree + 1.0, workload.jitter, workload.persistent_jitter)
        mixing = np.where(degree > 0, _TOPOLOGIES[self.topology].mixing_steps(workload.workers), 0.0)
        return ConsistencyResult.from_step_time(
            workload,
            workload.compute_time * (1.0 + waiting) + exposed,
            sent=degree * workload.payload,
            staleness=(mixing, 0.0),
            extra_memory=workload.payload * (degree > 0),
        )


@CONSISTENCY_MODELS.register("gossip")
def gossip(argument: str) -> ConsistencyModel:
    """Build a gossip consistency model from its topology: ``gossip:ring``, ``gossip:exp2``, ``gossip:one-peer``."""
    if argument not in _TOPOLOGIES:
        nearest = suggest_names(argument, _TOPOLOGIES)
        raise PlanError(f"consistency gossip:{argument}: unknown topology {argument!r}; {nearest}")
    return Gossip(argument)


# Local steps with an average after every H steps: local SGD, model and elastic averaging, DiLoCo, federated rounds


def _local_step(workload: DataParallelWorkload, steps: Numeric, synchronisation: Numeric) -> Array:
    """Compute the mean time of a local SGD step [s] with its share of the synchronisation, shape (configurations,).

    ``synchronisation`` is the time [s] of one average of parameters after ``steps`` local steps.
    """
    noise = straggler_wait_share(workload.workers, averaged_noise(workload.jitter, steps), workload.persistent_jitter)
    return np.asarray(workload.compute_time * (1.0 + noise) + synchronisation / steps)


@dataclass(frozen=True, slots=True)
class PeriodicAveraging:
    """Consistency model of local SGD and its variants: workers average parameters after every ``steps`` local steps.

    ``extra_parameter_copies`` is the number of further fp32 copies of the parameters that a worker stores. The
    parameters are sent in ``fragments`` parts, one after another. With ``overlaps_fragments``, each is overlapped with
    the steps up to the next part.
    """

    name: str
    steps: int
    extra_parameter_copies: float
    reference: str
    fragments: int = 1
    overlaps_fragments: bool = False
    uses_servers = False

    @property
    def summary(self) -> str:
        """Description of the consistency model in a few words."""
        return f"workers average every {self.steps} steps"

    @property
    def matches_synchronous(self) -> bool:
        """True for one step between averages of plain gradients, which equals a synchronous step."""
        return self.steps == 1 and self.name == "local"

    def evaluate(self, workload: DataParallelWorkload) -> ConsistencyResult:
        widened = FP32_BYTES * np.asarray(workload.parameter_count) / np.maximum(workload.payload, 1.0)
        synchronisation = np.asarray(workload.all_reduce_time * widened)
        window = self.steps / self.fragments * workload.compute_time
        overlapped = np.minimum(synchronisation / self.fragments, window) * self.fragments
        hidden = overlapped if self.overlaps_fragments else 0.0
        step = _local_step(workload, float(self.steps), synchronisation - hidden)
        several = np.asarray(workload.workers) > 1
        return ConsistencyResult.from_step_time(
            workload,
            step,
            sent=FP32_BYTES * workload.parameter_count * several / self.steps,
            staleness=((self.steps - 1) / 2.0 * several, np.sqrt((self.steps**2.0 - 1.0) / 12.0) * several),
            extra_memory=self.extra_parameter_copies * FP32_BYTES * workload.parameter_count,
        )


@CONSISTENCY_MODELS.register("local")
def local_sgd_model(argument: str) -> ConsistencyModel:
    """Build the consistency model ``local:H`` (local SGD): workers average their parameters after every H local steps.

    The model also describes model averaging, and post-local SGD after its synchronous phase.
    """
    steps = count_argument("local", argument, "local steps between two averages")
    return PeriodicAveraging("local", steps, 0.0, "Stich, Local SGD, ICLR 2019; Lin et al., Post-local SGD, ICLR 2020")


@CONSISTENCY_MODELS.register("easgd")
def easgd(argument: str) -> ConsistencyModel:
    """Build the consistency model ``easgd:H`` (elastic averaging): workers pull to a centre after every H local steps.

    A worker stores the centre besides its own parameters.
    """
    steps = count_argument("easgd", argument, "local steps between two pulls to the centre")
    return PeriodicAveraging("easgd", steps, 1.0, "Zhang, Choromanska and LeCun, Elastic averaging SGD, NIPS 2015")


@CONSISTENCY_MODELS.register("diloco")
def diloco(argument: str) -> ConsistencyModel:
    """Build the consistency model ``diloco:H`` or ``diloco:H/F``: workers average parameters every H steps.

    Each worker keeps an outer copy of the parameters and an outer momentum in fp32. Parameters are divided into F
    fragments (1 by default), each of which is exchanged during the steps up to the next one (streaming).
    """
    steps, _, fragments = argument.partition("/")
    number = count_argument("diloco", steps, "inner steps between two outer steps")
    pieces = count_argument("diloco", fragments, "fragments of the parameters") if fragments else 1
    if pieces > number:
        raise PlanError(f"consistency diloco:{argument}: {pieces} fragments need as many inner steps, not {number}")
    reference = "Douillard et al., DiLoCo, 2023; Streaming DiLoCo, 2025"
    return PeriodicAveraging("diloco", number, 2.0, reference, pieces, overlaps_fragments=pieces > 1)


@dataclass(frozen=True, slots=True)
class _FederatedAveraging:
    """Federated-averaging consistency model: rounds of ``steps`` local steps at clients with separate links.

    Clients pull and push the model each round. The time per step is μ (1 + c e_N / √H + e_N persistent) + 2 exchange /
    H. Here μ is the mean compute time, H = ``steps``, c the noise of a step, and e_N the expected maximum of N normal
    deviates. The exchange is the time of one transfer of the model.
    """

    steps: int
    summary = "clients make local steps, then send their model to a server"
    reference = "McMahan et al., Communication-efficient learning of deep networks, AISTATS 2017"
    matches_synchronous = False
    uses_servers = False

    def evaluate(self, workload: DataParallelWorkload) -> ConsistencyResult:
        step = _local_step(workload, float(self.steps), 2.0 * np.asarray(workload.neighbour_exchange_time))
        staleness = (self.steps - 1) / 2.0, math.sqrt((self.steps**2 - 1) / 12.0)
        return ConsistencyResult.from_step_time(workload, step, sent=workload.payload / self.steps, staleness=staleness)


@CONSISTENCY_MODELS.register("federated")
def federated_averaging_model(argument: str) -> ConsistencyModel:
    """Build the consistency model ``federated:H``: clients send their model after every H local steps."""
    return _FederatedAveraging(count_argument("federated", argument, "local steps a round"))
