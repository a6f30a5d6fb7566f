"""Study of many jobs on a cluster: smallest order of nodes, finishing times with intervals, effect of one more node.

A sweep of fleets is one table of every combination of policies, nodes, placements and seeds. Sweeps run like
`paleo.studies.sweep`: in processes or on a Dask cluster, and continue where they were stopped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from paleo.cluster.jobs import read_jobs
from paleo.cluster.nodes import SCHEDULING_POLICIES, NodePool, nodes_per_rack
from paleo.cluster.simulation import ClusterJob, ClusterRun, simulate_cluster
from paleo.errors import SpecError, suggest_names
from paleo.specs.loading import NonEmptyText, read_yaml
from paleo.specs.prices import devices_per_machine
from paleo.specs.system import load_system
from paleo.studies.cost import INTERVAL_STANDARD_DEVIATIONS, Tariff, rent_rate
from paleo.studies.sweep import SweepStudy, build_sweep_study
from paleo.units import HOUR, comma_separated, format_duration, format_percent, parse_whole_number, with_noun

if TYPE_CHECKING:
    from paleo.cluster.jobs import JobSpec
    from paleo.cluster.run_times import JobRunTime, PredictedJob
    from paleo.specs.system import System
    from paleo.studies.sweep import SweepJob

Array = npt.NDArray[np.float64]
#: Most nodes of an order, and most jobs for which finishing times get intervals by default.
_MAX_NODES, _MAX_JOBS_WITH_INTERVALS = 100_000, 1000
#: Number of simulations with varied step times and failures from which intervals are computed.
_DEFAULT_SIMULATIONS = 20
_WAIT_STATISTICS = ("mean", "p95")
_PLACEMENTS = ("packed", "spread")
_UNMODELLED_EFFECTS = (
    "jobs that share a GPU, and traffic of one job that slows another",
    "repairs of nodes: a job with a failure restarts on its nodes, or on spare ones",
    "the time of the scheduler itself",
)


@dataclass(frozen=True, slots=True)
class ClusterRequirements:
    """Requirements on an order of machines: that all deadlines hold, and a limit of the waiting time [s].

    The limit is for the mean or for the 95th percentile of the jobs.
    """

    max_wait: float | None = None
    wait_statistic: str = "p95"


@dataclass(frozen=True)
class JobsOnCluster:
    """Jobs with their predicted run times, the systems of the cluster, and the scheduling policy.

    Attributes
    ----------
    jobs : tuple of PredictedJob
        Jobs with their predicted run times.
    systems : tuple of System
        Kinds of nodes, one system each.
    policy, placement : str
        Scheduling policy (a key of `paleo.cluster.nodes.SCHEDULING_POLICIES`), and whether a job
        is packed into few racks or spread over them.
    tariff : Tariff
        What machines and electricity cost.
    """

    jobs: tuple[PredictedJob, ...]
    systems: tuple[System, ...]
    policy: str
    placement: str = "packed"
    tariff: Tariff = field(default_factory=Tariff)

    @cached_property
    def cluster_jobs(self) -> tuple[ClusterJob, ...]:
        """Jobs with the run times and constraints that the scheduler uses, in the order of the file."""
        numbers = {job.spec.name: number for number, job in enumerate(self.jobs)}
        return tuple(job.cluster_job(numbers) for job in self.jobs)

    def empty_node_pools(self, nodes: Sequence[int]) -> list[NodePool]:
        """Return node pools with all GPUs free, one per system.

        Parameters
        ----------
        nodes : sequence of int
            Number of nodes of each kind.

        Returns
        -------
        list of NodePool
            One pool a kind.
        """
        return [
            NodePool(count, devices_per_machine(system), nodes_per_rack(system) or 1 << 30, self.placement == "spread")
            for system, count in zip(self.systems, nodes, strict=True)
        ]

    def simulate(self, nodes: Sequence[int], factors: Sequence[float] | None = None) -> ClusterRun:
        """Simulate the jobs on a cluster.

        Parameters
        ----------
        nodes : sequence of int
            Number of nodes of each kind.
        factors : sequence of float, optional
            Factors on the run time of each job.

        Returns
        -------
        ClusterRun
            Times of all jobs.
        """
        pools, policy = self.empty_node_pools(nodes), SCHEDULING_POLICIES[self.policy]
        return simulate_cluster(self.cluster_jobs, pools, policy, factors=factors)

    def fits_all_jobs(self, nodes: Sequence[int]) -> bool:
        """Return True if every job can get its preferred GPUs on the nodes of at least one system.

        Parameters
        ----------
        nodes : sequence of int
            Number of nodes of each kind.

        Returns
        -------
        bool
            True if all fit.
        """
        sizes = [count * devices_per_machine(system) for count, system in zip(nodes, self.systems, strict=True)]
        gangs = (zip(job.preferred_gpus, sizes, strict=True) for job in self.jobs)
        return all(any(0 < gpus <= size for gpus, size in gang) for gang in gangs)

    def rent_usd_per_s(self, nodes: Sequence[int]) -> float | None:
        """Return the rent of a cluster [USD/s].

        Parameters
        ----------
        nodes : sequence of int
            Number of nodes of each kind.

        Returns
        -------
        float, optional
            Rent [USD/s]; None if one of them has no price.
        """
        ordered = [(system, count) for system, count in zip(self.systems, nodes, strict=True) if count]
        rates = [rent_rate(system, count * devices_per_machine(system), self.tariff)[0] for system, count in ordered]
        return None if any(rate is None for rate in rates) else float(sum(rate or 0.0 for rate in rates))


@dataclass(frozen=True)
class FleetStudy:
    """Result of ``paleo fleet``: jobs simulated on an order of machines, with intervals and missed deadlines.

    Attributes
    ----------
    fleet : JobsOnCluster
        Jobs with predicted run times, systems and scheduling policy.
    nodes : tuple of int
        Number of nodes of each kind.
    is_smallest_order : bool
        True if this is the smallest order that meets the requirements.
    requirements : ClusterRequirements
        Deadlines and a limit of the waiting time.
    result : ClusterRun
        Times of all jobs on these machines.
    result_with_one_more_node : ClusterRun, optional
        Times of all jobs with one more node of the first kind.
    finish_time_intervals : numpy.ndarray, optional
        Ends of the 90 % interval of finishing times, shape (jobs, 2) [s].
    deadline_probability : numpy.ndarray, optional
        Share of the samples in which each deadline holds; nan without a deadline.
    """

    fleet: JobsOnCluster
    nodes: tuple[int, ...]
    is_smallest_order: bool
    requirements: ClusterRequirements
    result: ClusterRun
    result_with_one_more_node: ClusterRun | None = None
    finish_time_intervals: Array | None = None
    deadline_probability: Array | None = None
    unmodelled: tuple[str, ...] = _UNMODELLED_EFFECTS

    @property
    def waiting_time_statistic(self) -> float:
        """Waiting time of the jobs [s]: mean or 95th percentile, as the requirements say."""
        return waiting_time(self.result, self.requirements.wait_statistic)

    @property
    def late_jobs(self) -> list[str]:
        """Names of the jobs that miss their deadlines."""
        return late_jobs(self.fleet, self.result)

    @property
    def meets_requirements(self) -> bool:
        """True if the machines meet the deadlines and the waiting-time limit."""
        most = self.requirements.max_wait
        return not self.late_jobs and (most is None or self.waiting_time_statistic <= most)

    @property
    def rent_usd(self) -> float | None:
        """Rent of all nodes from the first arrival to the last end [USD]; None without a price."""
        rate = self.fleet.rent_usd_per_s(self.nodes)
        return None if rate is None else rate * self.result.makespan

    @property
    def machines_text(self) -> str:
        """The ordered machines as text, such as ``4 nodes of dgx-h100``."""
        ordered = zip(self.fleet.systems, self.nodes, strict=True)
        return " and ".join(f"{with_noun(count, 'node')} of {system.name}" for system, count in ordered if count)

    @property
    def lost_gpu_hours(self) -> dict[str, float]:
        """GPU-hours without progress, by reason; ``idle`` are those in which no job waits."""
        result = self.result
        unused = {name: value / HOUR for name, value in result.unused_gpu_seconds.items()}
        idle, pauses, failures = unused.pop("idle"), result.pause_gpu_seconds, result.failure_gpu_seconds
        stops = {"preemption": float(pauses.sum()) / HOUR, "failures": float(failures.sum()) / HOUR}
        return {**unused, **stops, "idle": idle}

    @property
    def verdict(self) -> str:
        """Summary in a few sentences: end of the jobs, waiting time, missed deadlines."""
        result, jobs = self.result, with_noun(len(self.fleet.jobs), "job")
        deadlines = sum(math.isfinite(job.deadline) for job in self.fleet.cluster_jobs)
        deadline = ", all deadlines hold" if deadlines else ""
        if deadlines and self.late_jobs:
            deadline = f", {with_noun(len(self.late_jobs), 'deadline')} of {deadlines} missed"
        smallest = " is the smallest order:" if self.is_smallest_order else ":"
        measure = "mean" if self.requirements.wait_statistic == "mean" else "95th percentile"
        waits = f"waiting times have a {measure} of {format_duration(self.waiting_time_statistic)}"
        words = (
            f"{self.machines_text}{smallest} {jobs} end after {format_duration(result.makespan)} under "
            f"{SCHEDULING_POLICIES[self.fleet.policy].title}{deadline}; "
            f"{waits if self.waiting_time_statistic else 'hardly any job waits'}; "
            f"GPUs are {format_percent(result.utilisation)} busy."
        )
        return " ".join([words, *filter(None, [self._larger_text(), self._unsafe_text()])])

    def _larger_text(self) -> str:
        larger = self.result_with_one_more_node
        if larger is None:
            return ""
        wait = waiting_time(larger, self.requirements.wait_statistic)
        if wait == self.waiting_time_statistic and larger.makespan == self.result.makespan:
            return "One node more changes neither."
        waits = format_duration(wait) if wait else "none"
        return f"One node more: the last ends after {format_duration(larger.makespan)}, waits are {waits}."

    def _unsafe_text(self) -> str:
        if self.deadline_probability is None or self.late_jobs:
            return ""
        unsafe = int(np.nansum(self.deadline_probability < 0.95))
        return f"{with_noun(unsafe, 'deadline')} may be missed (below 95 % of samples)." if unsafe else ""


def waiting_time(result: ClusterRun, measure: str) -> float:
    """Return the mean or the 95th percentile of the waiting times of all jobs in a simulation.

    Parameters
    ----------
    result : ClusterRun
        Simulated cluster.
    measure : str
        ``mean`` or ``p95``.

    Returns
    -------
    float
        Time [s].
    """
    if not len(result.waiting_time):
        return 0.0
    return float(result.waiting_time.mean() if measure == "mean" else np.quantile(result.waiting_time, 0.95))


def late_jobs(fleet: JobsOnCluster, result: ClusterRun) -> list[str]:
    """Return the jobs that end after their deadlines.

    Parameters
    ----------
    fleet : JobsOnCluster
        Jobs and kinds of nodes.
    result : ClusterRun
        Simulated cluster.

    Returns
    -------
    list of str
        Names of jobs.
    """
    ends = zip(fleet.cluster_jobs, result.finish.tolist(), strict=True)
    return [job.name for job, finish in ends if not finish <= job.deadline]


def predict_fleet(
    specs: Sequence[JobSpec], systems: Sequence[System], policy: str, *, nodes: Sequence[int] | None = None,
    placement: str = "packed", tariff: Tariff | None = None,
) -> JobsOnCluster:  # fmt: skip
    """Predict the run times of all jobs on every system.

    Parameters
    ----------
    specs : sequence of JobSpec
        Jobs of a job file.
    systems : sequence of System
        Kinds of nodes.
    policy, placement : str
        Name of `paleo.cluster.nodes.SCHEDULING_POLICIES`; ``packed`` or ``spread`` over racks.
    nodes : sequence of int, optional
        Number of nodes of each kind, which bounds the GPUs of a job.
    tariff : Tariff, optional
        What machines and electricity cost; by default the prices of the catalog.

    Returns
    -------
    JobsOnCluster
        The jobs with their run times [s] on each system.

    Raises
    ------
    SpecError
        For an unknown policy, and a job that can never run.
    """
    from paleo.cluster.run_times import predict_job_run_times

    if policy not in SCHEDULING_POLICIES:
        raise SpecError(f"--policy {policy!r:.40}: {suggest_names(policy, SCHEDULING_POLICIES)}")
    if placement not in _PLACEMENTS:
        raise SpecError(f"--placement {placement!r:.40}: {suggest_names(placement, _PLACEMENTS)}")
    counts = [_MAX_NODES] * len(systems) if nodes is None else list(nodes)
    sizes = [(count * devices_per_machine(system), system) for count, system in zip(counts, systems, strict=True)]
    most = [min(size, system.max_devices or size) for size, system in sizes]
    jobs = tuple(predict_job_run_times(spec, systems, most) for spec in specs)
    return JobsOnCluster(jobs, tuple(systems), policy, placement, tariff or Tariff())


def simulate_or_size_cluster(
    fleet: JobsOnCluster,
    nodes: Sequence[int] | None,
    wishes: ClusterRequirements,
    *,
    samples: int | None = None,
    seed: int = 0,
) -> FleetStudy:
    """Simulate jobs on ordered machines, or find the smallest order that meets the requirements.

    Parameters
    ----------
    fleet : JobsOnCluster
        Jobs with predicted run times, systems and scheduling policy.
    nodes : sequence of int, optional
        Number of nodes of each kind; the smallest order by default.
    wishes : ClusterRequirements
        Deadlines and a limit of the waiting time.
    samples : int, optional
        Simulations for intervals; 20 by default, none for more than a thousand jobs.
    seed : int
        Seed of the random numbers.

    Returns
    -------
    FleetStudy
        The simulated cluster.

    Raises
    ------
    SpecError
        If no order of machines meets the requirements, or no requirement is given.
    """
    order = tuple(_cheapest_node_counts(fleet, wishes) if nodes is None else nodes)
    result = fleet.simulate(order)
    count = (_DEFAULT_SIMULATIONS if len(fleet.jobs) <= _MAX_JOBS_WITH_INTERVALS else 0) if samples is None else samples
    study = FleetStudy(fleet, order, nodes is None, wishes, result)
    if len(fleet.jobs) <= _MAX_JOBS_WITH_INTERVALS:
        kind = int(np.argmax([bool(number) for number in order]))
        more = tuple(number + (place == kind) for place, number in enumerate(order))
        study = replace(study, result_with_one_more_node=fleet.simulate(more))
    if count:
        random = np.random.default_rng(seed)
        samples_of_factors = (_sample_run_time_factors(fleet, random) for _ in range(count))
        finishes = np.array([fleet.simulate(order, factors).finish for factors in samples_of_factors])
        deadlines = np.array([job.deadline for job in fleet.cluster_jobs])
        shares = np.where(np.isfinite(deadlines), (finishes <= deadlines).mean(axis=0), np.nan)
        intervals = np.quantile(finishes, [0.05, 0.95], axis=0).T
        study = replace(study, finish_time_intervals=intervals, deadline_probability=shares)
    return study


def _sample_run_time_factors(fleet: JobsOnCluster, random: np.random.Generator) -> list[float]:
    """Draw the ratio of real to expected run time of each job, from step-time errors and failures.

    Parameters
    ----------
    fleet : JobsOnCluster
        Jobs and kinds of nodes.
    random : np.random.Generator
        Random generator.

    Returns
    -------
    list of float
        One factor a job.
    """
    factors = []
    for job in fleet.jobs:
        price = next(table[gpus] for table, gpus in zip(job.run_times, job.preferred_gpus, strict=True) if gpus)
        factors.append(_run_time_factor(price, random))
    return factors


def _run_time_factor(price: JobRunTime, random: np.random.Generator) -> float:
    """Return a random ratio of real to expected run time.

    The step time is lognormal within its interval, and each failure loses up to twice its mean loss.
    """
    low, high = price.interval_factors
    spread = random.standard_normal() / INTERVAL_STANDARD_DEVIATIONS
    factor = math.exp(spread * (math.log(high) if spread > 0 else -math.log(low)))
    if math.isfinite(price.mtbf) and price.seconds:
        expected = price.seconds / price.mtbf
        failures, mean = int(random.poisson(min(expected, float(2**30)))), price.seconds_lost_per_failure
        lost = float(random.uniform(0.0, 2.0 * mean, failures).sum()) if failures < _MAX_NODES else 0.0
        factor += (lost - expected * mean) / price.seconds
    return max(factor, 0.1)


def _cheapest_node_counts(fleet: JobsOnCluster, wishes: ClusterRequirements) -> tuple[int, ...]:
    """Find the node counts per system that meet the requirements at the lowest rent.

    Every number of nodes of all kinds but the last is tried, up to the smallest order of that kind alone. The number of
    the last kind is the smallest that suffices, found by bisection above 128 nodes or a thousand jobs.

    Parameters
    ----------
    fleet : JobsOnCluster
        Jobs and kinds of nodes.
    wishes : ClusterRequirements
        Deadlines and a limit of the waiting time.

    Returns
    -------
    tuple of int
        Number of nodes of each kind.

    Raises
    ------
    SpecError
        If there is no requirement, or no order meets it.
    """
    if wishes.max_wait is None and not any(math.isfinite(job.deadline) for job in fleet.cluster_jobs):
        raise SpecError("--nodes auto: no job has a deadline; state one, or a limit of the waiting time with --wait")
    kinds = len(fleet.systems)
    if kinds == 1:
        count = _fewest_nodes(fleet, wishes, ())
        if count is None:
            raise SpecError(f"--nodes auto: no number of nodes meets the requirements; {_infeasible_reason(fleet)}")
        return (count,)
    singles = [_fewest_nodes(_on_one_kind(fleet, kind), wishes, ()) for kind in range(kinds)]
    tried = [range((_MOST_TRIED if count is None else count) + 1) for count in singles[:-1]]
    orders: list[tuple[int, ...]] = []
    for before in itertools.islice(itertools.product(*tried), _MOST_ORDERS):
        last = _fewest_nodes(fleet, wishes, before, most=singles[-1])
        if last is not None:
            orders.append((*before, last))
    if not orders:
        raise SpecError(f"--nodes auto: no order of these systems meets the requirements; {_infeasible_reason(fleet)}")
    return min(orders, key=lambda order: (fleet.rent_usd_per_s(order) or math.inf, sum(order)))


#: Most nodes of one kind, and most orders, that are tried for mixed kinds of nodes.
_MOST_TRIED, _MOST_ORDERS = 16, 2000
#: Largest order of one kind for which every smaller one is tried, because more nodes may delay a job.
_MOST_SCANNED = 128


def _on_one_kind(fleet: JobsOnCluster, kind: int) -> JobsOnCluster:
    """Return the fleet with one kind of nodes only; jobs that cannot run there make every order too small."""
    jobs = [replace(j, run_times=(j.run_times[kind],), preferred_gpus=(j.preferred_gpus[kind],)) for j in fleet.jobs]
    return replace(fleet, jobs=tuple(jobs), systems=(fleet.systems[kind],))


def _fewest_nodes(
    fleet: JobsOnCluster, wishes: ClusterRequirements, before: tuple[int, ...], most: int | None = None
) -> int | None:
    """Return the fewest nodes of the last kind that meet the requirements, given the nodes of the other kinds.

    The number is doubled until it suffices; then all smaller numbers are tried, or bisected for large orders.
    """

    def keeps(count: int) -> bool:
        nodes = (*before, count)
        if not fleet.fits_all_jobs(nodes):
            return False
        result = fleet.simulate(nodes)
        late = wishes.max_wait is not None and waiting_time(result, wishes.wait_statistic) > wishes.max_wait
        return not late and not late_jobs(fleet, result)

    if before and keeps(0):
        return 0
    largest = _nodes_without_waiting(fleet) if most is None else most
    high = 1
    while high < largest and not keeps(high):
        high *= 2
    high = min(high, largest)
    if not keeps(high):
        return None
    if len(fleet.jobs) <= _MAX_JOBS_WITH_INTERVALS and high <= _MOST_SCANNED:
        return next(count for count in range(1, high + 1) if keeps(count))
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return high


def _nodes_without_waiting(fleet: JobsOnCluster) -> int:
    """Return a number of nodes of the last kind so large that no job ever waits."""
    size = devices_per_machine(fleet.systems[-1])
    needed = sum(-(-max(job.preferred_gpus) // size) for job in fleet.jobs)
    owned = _MAX_NODES if fleet.systems[-1].max_devices is None else fleet.systems[-1].max_devices // size
    return max(min(needed, owned), 1)


def _infeasible_reason(fleet: JobsOnCluster) -> str:
    """Return a text on which jobs miss their deadlines even if nothing waits."""
    late = []
    for job in fleet.cluster_jobs:
        tables = zip(job.run_times, job.preferred_gpus, strict=True)
        if job.arrival + min(table[gpus] for table, gpus in tables if gpus) > job.deadline:
            late.append(job.name)
    if late:
        return f"{', '.join(late[:3])} would miss the deadline with all GPUs free: expected a later one, or more GPUs"
    return "expected later deadlines or a longer wait"


def parse_node_counts(nodes: int | str | Sequence[int], systems: Sequence[System]) -> tuple[int, ...]:
    """Parse the number of nodes of each system from option ``--nodes``.

    Parameters
    ----------
    nodes : int, str or sequence of int
        One number for each system; a text separates them by commas.
    systems : sequence of System
        Kinds of nodes.

    Returns
    -------
    tuple of int
        Number of nodes of each system.

    Raises
    ------
    SpecError
        For what is no number of nodes, or more than a system has.
    """
    parts = [nodes] if isinstance(nodes, int) else comma_separated(nodes) if isinstance(nodes, str) else list(nodes)
    numbers = (parse_whole_number(part, _MAX_NODES) if isinstance(part, str) else part for part in parts)
    counts = tuple(number if type(number) is int else None for number in numbers)
    known = tuple(count for count in counts if count is not None and 0 <= count <= _MAX_NODES)
    if len(known) != len(counts) or not any(known):
        raise SpecError(f"--nodes {str(nodes)[:60]!r}: expected a number of nodes up to {_MAX_NODES:,}, or auto")
    if len(known) != len(systems):
        raise SpecError(f"--nodes {str(nodes)[:60]!r}: {with_noun(len(systems), 'system')}; expected a number for each")
    for count, system in zip(known, systems, strict=True):
        most = _MAX_NODES if system.max_devices is None else system.max_devices // devices_per_machine(system)
        if count > most:
            raise SpecError(f"--nodes {count}: system {system.name} has {most}")
    return known


def check_requirements(wishes: ClusterRequirements) -> ClusterRequirements:
    """Check the limit of the waiting time and the statistic that it applies to.

    Parameters
    ----------
    wishes : ClusterRequirements
        Deadlines and a limit of the waiting time.

    Returns
    -------
    ClusterRequirements
        The requirements.

    Raises
    ------
    SpecError
        If the statistic is unknown or the limit of the waiting time is negative or infinite.
    """
    if wishes.wait_statistic not in _WAIT_STATISTICS:
        nearest = suggest_names(wishes.wait_statistic, _WAIT_STATISTICS)
        raise SpecError(f"--measure {wishes.wait_statistic!r:.40}: {nearest}")
    if wishes.max_wait is not None and not 0.0 <= wishes.max_wait < math.inf:
        raise SpecError(f"--wait {wishes.max_wait!r:.40}: expected a time of zero or more")
    return wishes


#: Axes of a sweep of fleets, with the default of each.
_FLEET_SWEEP_AXES: dict[str, Any] = {"nodes": None, "policy": "backfill", "placement": "packed", "seed": None}
_RESULT_COLUMNS = (
    "gpus", "span_s", "wait_mean_s", "wait_p95_s", "deadlines_missed", "utilisation", "preemptions",
    "waiting_gpu_hours", "fragmentation_gpu_hours", "preemption_gpu_hours", "failures_gpu_hours", "idle_gpu_hours",
    "cost_usd",
)  # fmt: skip


class FleetSweep(SweepStudy):
    """A study file of fleets: ``jobs`` is a file of jobs, ``axes`` are ``nodes``, ``policy``, ``placement``, ``seed``.

    With a seed, run times are sampled as for the intervals of ``paleo fleet``; without, they are the expected ones.
    """

    models: list[NonEmptyText] = Field(default_factory=list, max_length=0)
    jobs: NonEmptyText

    @property
    def step_axes(self) -> dict[str, list[Any]]:
        """Axes of the study's table with their values; the first axis changes slowest."""
        return {"system": list(self.systems), **self.axes}

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the result columns of the study's table, which follow the axes."""
        return _RESULT_COLUMNS

    def validate_axes_and_load_files(self) -> None:
        """Check every value of every axis, and load the jobs."""
        words = {"policy": list(SCHEDULING_POLICIES), "placement": list(_PLACEMENTS)}
        for name, values in self.axes.items():
            if name not in _FLEET_SWEEP_AXES:
                raise SpecError(f"axes.{name}: unknown axis; {suggest_names(name, _FLEET_SWEEP_AXES)}")
            for value in values:
                if name in words and value not in words[name]:
                    raise SpecError(f"axes.{name}: {value!r:.40}: {suggest_names(str(value), words[name])}")
                if name == "seed" and (type(value) is not int or value < 0):
                    raise SpecError(f"axes.seed: {value!r:.40}: expected a whole number of zero or more")
                if name == "nodes":
                    parse_node_counts(value, [load_system(self.systems[0])])
        if "nodes" not in self.axes:
            raise SpecError("axes.nodes: missing; expected numbers of nodes, such as [4, 8]")
        read_jobs(self.jobs)

    def predict_table_row(self, job: SweepJob, point: dict[str, Any]) -> dict[str, Any]:
        """Simulate a cluster at one point of the study and return its table row.

        Parameters
        ----------
        job : SweepJob
            Systems of the study, loaded.
        point : dict of str to Any
            Value of each axis (``system``, ``nodes``, ``policy``, ``placement``, ``seed``); absent axes take their
            defaults.

        Returns
        -------
        dict of str to Any
            Value of each result column; times in seconds, losses in GPU-hours, cost in USD.

        Raises
        ------
        SpecError
            If a number of nodes, a policy or a placement is not valid.
        """
        settings = {**_FLEET_SWEEP_AXES, **point}
        systems = [job.systems[str(point["system"])]]
        nodes = parse_node_counts(settings["nodes"], systems)
        policy, placement = settings["policy"], settings["placement"]
        fleet = predict_fleet(read_jobs(self.jobs), systems, policy, nodes=nodes, placement=placement)
        factors = None
        if settings["seed"] is not None:
            factors = _sample_run_time_factors(fleet, np.random.default_rng(settings["seed"]))
        study = FleetStudy(fleet, nodes, False, ClusterRequirements(), fleet.simulate(nodes, factors))
        result = study.result
        return {
            "gpus": result.gpus,
            "span_s": result.makespan,
            "wait_mean_s": waiting_time(result, "mean"),
            "wait_p95_s": waiting_time(result, "p95"),
            "deadlines_missed": len(study.late_jobs),
            "utilisation": result.utilisation,
            "preemptions": float(result.preemptions.sum()),
            **{f"{name}_gpu_hours": value for name, value in study.lost_gpu_hours.items()},
            "cost_usd": study.rent_usd,
            "problem": "",
        }


def load_run_or_fleet_sweep(path: str | Path) -> SweepStudy:
    """Load and check a sweep study from a YAML file: of fleets if the file names ``jobs``, otherwise of runs.

    Parameters
    ----------
    path : str or Path
        YAML file of the study.

    Returns
    -------
    SweepStudy
        The study, checked; a `FleetSweep` if the file names ``jobs``.

    Raises
    ------
    SpecError
        If an axis, value or name is not valid.
    """
    data = read_yaml(path)
    return build_sweep_study(FleetSweep if "jobs" in data else SweepStudy, path, data)
