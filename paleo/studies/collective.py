"""Predicted times of collectives, from the same cost model as training steps.

`collective` compares all algorithms over one group of ranks. `step_collectives` lists every collective of a training
step: content, ranks, number of calls, time of one call, and the source of that time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.collectives.base import Array, CollectiveAlgorithm, algorithms_for
from paleo.errors import PlanError, SpecError
from paleo.pricing.calibration_lookup import constant_efficiencies
from paleo.pricing.communication import (
    Crossover,
    Fabric,
    Nccl,
    algorithm_crossovers,
    collective_calibrations,
    describe_collective_calibration,
)
from paleo.pricing.communication import algorithm_times as policy_prices
from paleo.pricing.links.alpha_beta import bus_factor
from paleo.specs.calibration import load_user_calibration
from paleo.specs.system import GroupLevel, System, resolve_system
from paleo.step.gradient_exchange import gathered_elements_by_axes, gradient_elements_by_axes
from paleo.step.interval import INTERVAL_CALIBRATION
from paleo.step.section_times import collective_times, enumerate_collectives
from paleo.units import Quantity

if TYPE_CHECKING:
    from paleo.parallel.placement import Axes
    from paleo.predict import Prediction
    from paleo.pricing.links.group import GroupLinks
    from paleo.step.configuration_batch import ConfigurationBatch
    from paleo.step.layouts import ExchangedTensors

#: By how much an algorithm must win to be worth a change.
_NOTABLE = 0.01
#: How far beyond the last change the last algorithm is looked at, as a factor of the payload.
_BEYOND = 16.0


@dataclass(frozen=True, slots=True)
class AlgorithmTime:
    """Predicted time [s] and bandwidth [byte/s] of one collective algorithm, such as a ring or a tree.

    ``lower_bound_ratio`` is the time over the lower bound, and ``steps`` the number of consecutive messages.
    ``chosen_by_library`` is True if the library (such as NCCL) would run the algorithm at this payload.
    ``available_in_library`` is True if the library has the algorithm for this operation, at any payload.
    """

    algorithm: str
    time: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    lower_bound_ratio: float
    steps: float
    chosen_by_library: bool
    available_in_library: bool
    in_network: bool


@dataclass(frozen=True, slots=True)
class CollectiveStudy:
    """Comparison of all algorithms of one collective operation over one group of a system."""

    operation: str
    payload_bytes: float
    ranks: int
    fabric: Fabric
    group_levels: tuple[GroupLevel, ...]
    links: GroupLinks
    rows: tuple[AlgorithmTime, ...]
    crossovers: tuple[Crossover, ...]
    lower_bound: float
    calibration_text: str

    @property
    def system(self) -> System:
        """System whose links carry the collective."""
        return self.fabric.system

    @property
    def best(self) -> AlgorithmTime:
        """Fastest algorithm that the library (such as NCCL) would choose; predictions of training steps use it."""
        return next(row for row in self.rows if row.chosen_by_library)

    @property
    def algorithm_selector(self) -> str:
        """Name of the library that chooses the algorithm, such as ``NCCL``.

        It is empty if the links have constant rates; then the fastest algorithm runs.
        """
        return "NCCL" if isinstance(self.fabric.collective_model, Nccl) else ""

    @property
    def faster_unchosen_algorithms(self) -> list[AlgorithmTime]:
        """Algorithms faster than NCCL's choice: the fastest that NCCL has, and the fastest that NCCL lacks."""
        if not self.algorithm_selector:
            return []
        beating = [row for row in self.rows if row.time * (1.0 + _NOTABLE) < self.best.time]
        groups = ([row for row in beating if row.available_in_library is candidate] for candidate in (True, False))
        return [rows[0] for rows in groups if rows]

    def times(self, payload_bytes: Array) -> Mapping[str, Array]:
        """Predict the time of every algorithm of this study at other payloads.

        Parameters
        ----------
        payload_bytes : ndarray, shape (...)
            Payloads [byte].

        Returns
        -------
        dict of str to Array
            Seconds by algorithm, arrays of the shape of `payload_bytes`; the algorithm that is fastest in this study
            comes first.
        """
        names = [row.algorithm for row in self.rows]
        return self.fabric.algorithm_times(self.operation, self.links, payload_bytes, names)


def compare_algorithms(
    operation: str,
    payload_bytes: float | str,
    ranks: int,
    system: str | Path | System,
    *,
    calibration: str = "auto",
    dtype: str = "bf16",
) -> CollectiveStudy:
    """Predict the time of every algorithm of a collective over neighbouring ranks of a system, without other traffic.

    Parameters
    ----------
    operation : str
        ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast`` or ``send_recv``.
    payload_bytes : float | str
        Bytes, or a text with unit such as ``100MB``; the size as in nccl-tests.
    ranks : int
        Number of ranks.
    system : str | Path | System
        Name, path or loaded system.
    calibration : str, optional
        ``auto``, ``ideal``, ``ppp=…`` or a calibration file.
    dtype : str, optional
        Format of the numbers.

    Returns
    -------
    CollectiveStudy
        Times and bandwidths, fastest algorithm first.

    Raises
    ------
    SpecError
        If a name or value is not valid.
    PlanError
        If the system has no links or fewer ranks.
    """
    operation, payload_bytes = str(operation).replace("-", "_"), _payload(payload_bytes)
    if not isinstance(ranks, Integral) or ranks < 2:
        raise SpecError(f"ranks {ranks!r:.80}: expected a whole number, 2 or more")
    ranks, system = int(ranks), resolve_system(system)
    if not system.levels:
        raise PlanError(f"system {system.name} is one device alone; {operation} over {ranks} ranks needs links")
    constant = constant_efficiencies(system.device.kind, calibration)
    measured = load_user_calibration(calibration) if constant is None and calibration != "auto" else None
    if measured is not None and measured.device_or_system == INTERVAL_CALIBRATION:
        raise SpecError(
            f"--calibration {calibration}: holds intervals of whole steps; a collective needs a calibration "
            "of links, auto, ideal or ppp=…"
        )
    fabric = Fabric(system, constant_efficiencies=constant, user_calibration=measured, dtype=dtype)
    links = fabric.links(1, ranks)
    bounds = {
        in_network: float(
            fabric.collective_model.time_lower_bound(operation, payload_bytes, links, in_network=in_network)
        )
        for in_network in (False, True)
    }
    rows = _rows(operation, payload_bytes, links, fabric, bounds)
    best = next(row for row in rows if row.chosen_by_library)
    return CollectiveStudy(
        operation, payload_bytes, ranks=ranks, fabric=fabric, group_levels=system.group_levels(1, ranks), links=links,
        rows=rows,
        crossovers=_worthwhile(fabric, operation, links), lower_bound=bounds[best.in_network],
        calibration_text=describe_collective_calibration(fabric, operation, links),
    )  # fmt: skip


def _payload(payload_bytes: object) -> float:
    """Convert a payload to bytes, from a number [byte] or a text with a unit."""
    try:
        if isinstance(payload_bytes, Real) and not isinstance(payload_bytes, bool):
            return Quantity("bytes", positive=True).check_range(float(payload_bytes), payload_bytes)
        return Quantity("bytes", positive=True).parse_text(payload_bytes)
    except SpecError as error:
        raise SpecError(f"payload_bytes: {error}") from None


def _rows(
    operation: str, payload_bytes: float, links: GroupLinks, fabric: Fabric, bounds: Mapping[bool, float]
) -> tuple[AlgorithmTime, ...]:
    """Return time and bandwidth of every collective algorithm that the network can carry out, fastest first.

    Parameter servers are included, although a run uses them only on request.
    """
    payload = np.asarray(payload_bytes)
    algorithms = [algorithm for algorithm in algorithms_for(operation) if links.can_run(algorithm, operation)]
    seconds = fabric.algorithm_times(
        operation, links, np.asarray(payload_bytes), [algorithm.name for algorithm in algorithms]
    )
    factor = float(bus_factor(operation, links.ranks))
    candidates = {each.name: each for each in fabric.collective_model.candidate_algorithms(operation, links)}
    chosen = {
        name for name, each in candidates.items() if fabric.collective_model.would_run(each, operation, payload, links)
    }
    rows = [
        _row(algorithm, payload_bytes, float(seconds[algorithm.name]), factor,
             float(algorithm.traffic(operation, payload, links.fan_outs).steps),
             bounds[not algorithm.is_one_port], algorithm.name in chosen, algorithm.name in candidates)
        for algorithm in algorithms
    ]  # fmt: skip
    return tuple(sorted((row for row in rows if math.isfinite(row.time)), key=lambda row: (row.time, row.algorithm)))


def _row(
    algorithm: CollectiveAlgorithm,
    payload_bytes: float,
    seconds: float,
    factor: float,
    steps: float,
    bound: float,
    automatic: bool,
    candidate: bool,
) -> AlgorithmTime:
    rate = payload_bytes / seconds if seconds > 0 else math.inf
    ratio = seconds / bound if bound > 0 else 1.0
    return AlgorithmTime(
        algorithm.name,
        seconds,
        algorithm_bandwidth=rate,
        bus_bandwidth=factor * rate,
        lower_bound_ratio=ratio,
        steps=steps,
        chosen_by_library=automatic,
        available_in_library=candidate,
        in_network=algorithm.reduces_in_network,
    )


def _worthwhile(fabric: Fabric, operation: str, links: GroupLinks) -> tuple[Crossover, ...]:
    """Return the payloads above which another collective algorithm is the fastest, by at least 1 % (``_NOTABLE``).

    Payloads at which two algorithms alternate within that margin are left out.
    """

    def prices(payload_bytes: Array, names: Sequence[str] | None = None, /) -> Mapping[str, Array]:
        return policy_prices(fabric.collective_model, operation, payload_bytes, links, names)

    changes = algorithm_crossovers(prices)
    kept: list[Crossover] = []
    ends = [change.payload_bytes for change in changes[1:]]
    ends += [_BEYOND * change.payload_bytes for change in changes[-1:]]
    for change, end in zip(changes, ends, strict=True):
        before = kept[-1].above if kept else changes[0].below
        if change.above == before:
            continue
        seconds = prices(np.asarray(math.sqrt(change.payload_bytes * end)))
        if seconds[before] > (1.0 + _NOTABLE) * seconds[change.above]:
            kept.append(Crossover(change.payload_bytes, before, change.above))
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class StepCollective:
    """Collectives of equal kind and size in a training step, as one device of the slowest pipeline stage sees them.

    The device takes part in ``calls`` of them a step, each of ``payload_bytes`` [byte] over the mesh ``axes``.
    ``seconds`` is the time of one call without other traffic [s].
    """

    data_kind: str
    operation: str
    axes: Axes
    ranks: int
    calls: int
    payload_bytes: float
    seconds: float
    time_source: str


def step_collectives(prediction: Prediction) -> list[StepCollective]:
    """List the collectives of a predicted training step, grouped by content, operation, mesh axes and payload.

    Parameters
    ----------
    prediction : Prediction
        Prediction of a run.

    Returns
    -------
    list of StepCollective
        Groups of equal collectives; those with the largest time over all their calls come first.
    """
    sent = [*_of_layers(prediction), *_over_replicas(prediction), *_between_stages(prediction)]
    same: dict[tuple[str, str, Axes, float], StepCollective] = {}
    for collective in sent:
        key = collective.data_kind, collective.operation, collective.axes, collective.payload_bytes
        calls = collective.calls + (same[key].calls if key in same else 0)
        same[key] = replace(collective, calls=calls)
    return sorted(same.values(), key=lambda each: -each.calls * each.seconds)


def _of_layers(prediction: Prediction) -> Iterator[StepCollective]:
    """Yield the collectives inside layers, which tensor, context and expert parallelism cause."""
    batch, program = prediction.step_arrays.batch, prediction.program
    payloads = np.array([each.payload_bytes for _, each in enumerate_collectives(program)]).reshape(-1, 1)
    [priced] = collective_times(batch.backend.fabric, [(batch.layouts.meshes[0], program)], [payloads])
    layers = batch.assignment.layers_per_microbatch[_busiest(prediction)]
    for (index, transfer), seconds in zip(enumerate_collectives(program), priced[:, 0].tolist(), strict=True):
        passes = 2 if transfer.recomputed and program.sections[index].recompute_policy == "full" else 1
        calls = round(float(layers[index]) * transfer.calls_per_iteration * passes * float(batch.microbatches[0]))
        if seconds > 0 and calls:
            yield _step_collective(
                batch, "layers", transfer.operation, (transfer.axis,), calls, transfer.payload_bytes, seconds
            )


def _over_replicas(prediction: Prediction) -> Iterator[StepCollective]:
    """Yield the collectives between data-parallel replicas: reductions of gradients and all-gathers of parameters.

    The traffic of a step is divided into calls of equal size: one for each bucket or layer, or one for each pass.
    """
    batch, program, mesh = prediction.step_arrays.batch, prediction.program, prediction.plan.mesh
    if not batch.has_backward:
        return
    formats, kinds = batch.backend.formats, batch.assignment.distinct_stages_and_chunks.stages
    holding = kinds.layer_and_tied_copy_counts[batch.assignment.stage_kind[_busiest(prediction)]]
    passes = math.ceil(float(batch.microbatches[0]))
    sums = passes if batch.scatters_every_pass else 1
    sent: list[tuple[str, ExchangedTensors, dict[Axes, npt.NDArray[np.float64]], float, int]] = [
        (
            "gradients",
            "gradients",
            gradient_elements_by_axes(program, mesh, 1),
            formats.accumulated_gradient_bytes,
            sums,
        )
    ]
    if batch.zero:
        content: ExchangedTensors = "all" if batch.shards_parameters else "trained"
        shares = gathered_elements_by_axes(program, mesh, 1, frozen=batch.shards_parameters)
        sent.append(("weights", content, shares, formats.parameter_bytes, 2 * passes if batch.shards_parameters else 1))
    kinds_of = [event.task.kind for event in prediction.timeline.events] if batch.assignment.stages == 1 else []
    travelling = {
        "gradients": kinds_of.count("bucket"),
        "weights": kinds_of.count("gather") if batch.shards_parameters else 0,
    }
    for words, content, shares, width, calls in sent:
        for axes, elements in shares.items():
            payload = float(holding @ elements) * width
            for operation, over, part in batch.layouts.exchange_collectives(0, content, batch.zero, axes, payload):
                if over and part > 0:
                    pieces = max(calls, travelling[words])
                    size, groups = part * calls / pieces, batch.layouts.communication_groups([0], [over])
                    seconds = float(
                        batch.layouts.exchange_collective_times(operation, [0], groups, np.array([size]))[0]
                    )
                    yield _step_collective(batch, words, operation, over, pieces, size, seconds)


def _between_stages(prediction: Prediction) -> Iterator[StepCollective]:
    """Yield the send/recv of activations and gradients between neighbouring pipeline stages; none without pipeline."""
    batch, mesh = prediction.step_arrays.batch, prediction.plan.mesh
    if mesh.degree("pp") == 1:
        return
    section = batch.assignment.model_chunks[0][-1][0]
    split = 1.0 if batch.layouts.sequence_parallel[0] else float(mesh.degree("tp"))
    payload, seconds = (
        float(batch.layer_times.output_bytes[section][0]) / split,
        float(batch.cases.send_time(section)[0]),
    )
    calls = 2 * batch.assignment.chunks_per_stage * math.ceil(float(batch.microbatches[0]))
    yield _step_collective(batch, "activations", "send_recv", ("pp",), calls, payload, seconds)


def _busiest(prediction: Prediction) -> int:
    return int(prediction.step_arrays.busiest_stage[0])


def _step_collective(
    batch: ConfigurationBatch, content: str, operation: str, axes: Axes, calls: int, payload: float, seconds: float
) -> StepCollective:
    mesh, fabric = batch.layouts.meshes[0], batch.backend.fabric
    links = fabric.links(mesh.stride(axes), mesh.group_size(axes))
    price = _time_source(fabric, operation.partition("@")[0], links)
    return StepCollective(
        content,
        operation,
        axes=axes,
        ranks=mesh.group_size(axes),
        calls=calls,
        payload_bytes=payload,
        seconds=seconds,
        time_source=price,
    )


def _time_source(fabric: Fabric, operation: str, links: GroupLinks) -> str:
    """Name the source of a collective's predicted time: a calibration file, or datasheets of links."""
    if fabric.constant_efficiencies is not None:
        return fabric.constant_efficiencies.name
    inside, sources = len(links.levels) - links.inter_node_level_count, []
    for family, entry in collective_calibrations(fabric, operation, links).items():
        between = family == "collective.fabric"
        levels = fabric.system.levels[inside : len(links.levels)] if between else fabric.system.levels[:inside]
        datasheet = f"datasheet ({', '.join(level.link.name for level in levels)})"
        source_names = {
            "measured": f"measured ({entry.source_name}.yaml)",
            "inherited": f"inherited ({entry.source_name})",
        }
        sources.append(source_names.get(entry.origin, datasheet))
    return ", ".join(dict.fromkeys(sources))
