"""Scheduling policies: the order in which jobs start, and whether running jobs are stopped for others.

A policy is an entry of a table: a sort key for the queue, and flags for everything else. `paleo.cluster.simulation`
implements all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paleo.registry import Registry

Key = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """One scheduling policy of a cluster.

    Attributes
    ----------
    title, source : str
        Name of the policy, and the publication that defines it.
    key : callable, optional
        Returns the key of a job under a simulation; smaller ones come first. None is the order of arrival.
    preempts : bool
        True if running jobs are stopped for jobs with a smaller key.
    backfills : bool
        True if later jobs may start when they do not delay the first one that waits.
    elastic : bool
        True if jobs are resized.
    rounds : bool
        True if the keys of running jobs change with time in steps of a quantum.
    """

    title: str
    source: str
    key: Callable[[Any, int], Key] | None = None
    preempts: bool = False
    backfills: bool = False
    elastic: bool = False
    rounds: bool = False


#: Policies by name.
POLICIES: Registry[Policy] = Registry("policy")


def _remaining(cluster: Any, job: int) -> Key:
    return (cluster.remaining(job), job)


def _attained(cluster: Any, job: int) -> Key:
    return (cluster.service_level(job), not cluster.runs(job), job)


def _priority(cluster: Any, job: int) -> Key:
    return (-cluster.jobs[job].priority, job)


def _fair(cluster: Any, job: int) -> Key:
    return (cluster.used_by(cluster.jobs[job].team), job)


for _name, _policy in {
    "fifo": Policy("first in, first out", "queueing theory"),
    "backfill": Policy("FIFO with EASY backfill", "Lifka, The ANL/IBM SP scheduling system, 1995", backfills=True),
    "srtf": Policy(
        "shortest remaining time first", "Schrage, Operations Research 16 (1968)", _remaining, preempts=True
    ),
    "las": Policy(
        "least attained service", "Gu et al., Tiresias, NSDI 2019, section 3", _attained, preempts=True, rounds=True
    ),
    "priority": Policy("priority with preemption", "Burns et al., Borg, Omega, and Kubernetes, 2016", _priority, True),
    "fair": Policy("fair share by team", "Ghodsi et al., NSDI 2011, for one resource", _fair, backfills=True),
    "elastic": Policy("elastic by marginal speed-up", "Peng et al., Optimus, EuroSys 2018, section 4.1", elastic=True),
}.items():
    POLICIES.register(_name)(_policy)
