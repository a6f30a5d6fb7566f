"""The orchestrator: a network, a system and a run become one prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paleo.engine import Timeline
from paleo.graph import Graph, build
from paleo.layers.base import Choices
from paleo.lower import Program, lower, without_backward
from paleo.optimizers import optimizer
from paleo.parallel.placement import STRATEGIES
from paleo.plan import Plan, plan
from paleo.precision import Precision, precision
from paleo.pricing.communication import Network
from paleo.pricing.footprint import Footprint
from paleo.pricing.kernels import KernelTimes, Pricer, pricer
from paleo.specs.hardware import System
from paleo.specs.model import ModelSpec
from paleo.specs.run import Run
from paleo.timeline import COMPUTE, Exchange, SectionTime, step_timeline
from paleo.work import Kernel


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where a step's seconds go; the parts add up to the step. ``communication_total`` counts hidden collectives too."""

    compute: float
    memory_bound: float
    launch: float
    communication_exposed: float
    communication_total: float
    bubble: float
    optimizer: float
    input: float

    @property
    def step(self) -> float:
        busy = self.compute + self.memory_bound + self.launch
        return busy + self.communication_exposed + self.bubble + self.optimizer + self.input


@dataclass(frozen=True, slots=True)
class Prediction:
    """One training step (or forward pass) of ``model`` under ``plan`` on ``system``, in SI."""

    model: ModelSpec
    system: System
    run: Run
    plan: Plan
    graph: Graph
    program: Program
    timeline: Timeline
    breakdown: Breakdown
    memory: Footprint
    flops: float
    interval: tuple[float, float]
    calibration: str
    unmodelled: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def step_time(self) -> float:
        """Seconds of one step."""
        return self.timeline.end

    @property
    def samples_per_s(self) -> float:
        return self.plan.global_batch / self.step_time

    @property
    def tokens_per_s(self) -> float | None:
        tokens = self.graph.tokens_per_sample
        return None if tokens is None else tokens * self.samples_per_s

    @property
    def mfu(self) -> float:
        """Model FLOP of the step over what all gpus could do in it at the peak of the dtype."""
        peak = self.system.device.peak_flops_per_s(self.plan.dtype)
        return self.flops / (self.step_time * self.plan.gpus * peak)


def predict(model: ModelSpec, system: System, run: Run) -> Prediction:
    """Count, price, schedule. Pure: the same inputs give the same prediction, and nothing is kept."""
    chosen = plan(model, system, run)
    formats = precision(chosen.dtype)
    graph = build(model, batch=chosen.microbatch * chosen.dp, choices=Choices(run.attention), overrides=run.model)
    program = lower(graph, STRATEGIES[chosen.preset](graph), chosen.mesh, formats)
    if run.forward_only:
        program = without_backward(program)
    prices = pricer(system.device, chosen.dtype, run.calibration)
    network = Network(system, chosen.mesh, run.algorithm_or_server, prices.rates)
    kernels = prices.times([counted.kernel for section in program.sections for counted in section.kernels])
    update = 0.0 if run.forward_only else _update_time(program, run, formats, prices)
    exchange = Exchange(network.all_reduce, run.bucket, formats.gradient, run.exchange == "overlapped")
    times = _section_times(program, kernels, network)
    timeline = step_timeline(program, times, microbatches=chosen.microbatches, exchange=exchange, update=update)
    return Prediction(
        model,
        system,
        run,
        chosen,
        graph,
        program,
        timeline,
        _breakdown(program, kernels, timeline, chosen.microbatches, update),
        _footprint(program, run, chosen, formats, system),
        _model_flops(graph, formats, chosen, run),
        prices.interval(timeline.end),
        prices.name,
        _unmodelled(run),
        _warnings(model, system, chosen),
    )


def _section_times(program: Program, kernels: KernelTimes, network: Network) -> list[SectionTime]:
    """Kernel seconds gathered section by section, forward and backward, with the collectives that block them."""
    found, first = [], 0
    for section in program.sections:
        span = slice(first, first + len(section.kernels))
        first = span.stop
        seconds = kernels.total[span] * np.array([counted.times for counted in section.kernels])
        forward = np.array([counted.kernel.phase == "forward" for counted in section.kernels], dtype=bool)
        waits = {"forward": 0.0, "backward": 0.0}
        for one in section.transfers:
            waits[one.phase] += network.time(one.operation, one.axis, one.payload_bytes) * one.times
        found.append(
            SectionTime(float(seconds[forward].sum()), float(seconds[~forward].sum()), waits["forward"], waits["backward"])
        )
    return found


def _update_time(program: Program, run: Run, formats: Precision, prices: Pricer) -> float:
    """The optimizer as one pass over all that it reads and writes."""
    chosen, count = optimizer(run.optimizer), program.parameters
    read, written = (count * per_parameter for per_parameter in chosen.update_bytes(formats))
    shape = {"rows": count, "columns": 1.0}
    kernel = Kernel("update", "memory", "optimizer", "update", 0.0, count * chosen.flops, read, written, shape)
    return float(prices.times([kernel]).total[0]) if count else 0.0


def _breakdown(program: Program, kernels: KernelTimes, timeline: Timeline, microbatches: int, update: float) -> Breakdown:
    counts = [counted.times * section.repeat * microbatches for section in program.sections for counted in section.kernels]
    times = np.array(counts, dtype=float)
    launch = float((kernels.launch * times).sum())
    work = (kernels.total - kernels.launch) * times
    arithmetic = float(work[kernels.arithmetic].sum())
    moving = float(work[~kernels.arithmetic].sum())
    computing = arithmetic + moving + launch
    network = sum(event.end - event.start for event in timeline.events if event.task.resource != COMPUTE)
    earlier = sum(event.end - event.start for event in timeline.events if event.task.kind == "accumulate")
    in_earlier = max(0.0, earlier - computing * (microbatches - 1) / microbatches)
    exposed = max(0.0, timeline.end - computing - update)
    return Breakdown(arithmetic, moving, launch, exposed, network + in_earlier, 0.0, update, 0.0)


def _footprint(program: Program, run: Run, chosen: Plan, formats: Precision, system: System) -> Footprint:
    count = program.parameters
    training = 0.0 if run.forward_only else 1.0
    bucket = run.bucket if chosen.dp > 1 and not run.forward_only else 0.0
    largest = max((section.largest_output_bytes for section in program.sections), default=0.0)
    return Footprint(
        parameters=count * formats.parameter,
        gradients=count * formats.gradient * training,
        optimizer=count * optimizer(run.optimizer).state_bytes(formats) * training,
        activations=program.saved_bytes,
        workspace=2.0 * largest + 2.0 * bucket,
        capacity=system.device.memory.capacity,
    )


def _model_flops(graph: Graph, formats: Precision, chosen: Plan, run: Run) -> float:
    """FLOP of the whole global batch, each rank's padding left out."""
    forward, backward = graph_flops(graph, formats)
    return (forward + (0.0 if run.forward_only else backward)) / graph.batch * chosen.global_batch


def graph_flops(graph: Graph, formats: Precision) -> tuple[float, float]:
    """FLOP of one forward and one backward pass over the graph's batch, on no particular device."""
    forward = backward = 0.0
    for node in graph.nodes:
        forward += node.repeat * _flops([kernel for op in node.operations for kernel in op.forward(formats)])
        backward += node.repeat * _flops([kernel for op in node.operations for kernel in op.backward(formats)])
    return forward, backward


def _flops(kernels: Sequence[Kernel]) -> float:
    return sum(kernel.flops for kernel in kernels)


def _unmodelled(run: Run) -> tuple[str, ...]:
    """What a real step has and this one leaves out: silence is never a number."""
    items = ["input pipeline (storage, decoding, host-to-device copies)", "CUDA context and memory fragmentation"]
    return tuple(items)


def _warnings(model: ModelSpec, system: System, chosen: Plan) -> tuple[str, ...]:
    found = []
    if chosen.idle:
        found.append(f"{chosen.idle} of {chosen.gpus} gpus are idle: the global batch has only {chosen.global_batch} samples")
    elif chosen.local_batch * chosen.dp > chosen.global_batch:
        spare = chosen.local_batch * chosen.dp - chosen.global_batch
        found.append(f"the global batch does not divide evenly: the step waits for ranks with {chosen.local_batch} samples ({spare} slots idle)")
    return tuple(found)
