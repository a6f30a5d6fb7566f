"""The orchestrator: a network, a system and a run become one prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paleo.engine import Timeline
from paleo.graph import Graph, build
from paleo.layers.base import Choices
from paleo.lower import Program, Section, lower, without_backward
from paleo.optimizers import optimizer
from paleo.parallel.placement import STRATEGIES
from paleo.pipeline import StageTime, pipeline_time
from paleo.plan import Plan, plan
from paleo.precision import Precision, precision
from paleo.pricing.communication import Network
from paleo.pricing.footprint import Footprint
from paleo.pricing.kernels import KernelTimes, Pricer, pricer
from paleo.schedules.base import SCHEDULES
from paleo.specs.hardware import System
from paleo.specs.model import ModelSpec
from paleo.specs.run import Run
from paleo.specs.software import Software, load_software
from paleo.stages import Chunk, cut
from paleo.timeline import Exchange, SectionTime, busy, step_timeline
from paleo.work import Kernel


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where a step's seconds go; the parts add up to the step. ``communication_total`` counts hidden collectives too.

    With a pipeline it is the breakdown of the busiest stage, and ``bubble`` is what that stage waits for others.
    """

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
        """Seconds of the step: the sum of its parts."""
        worked = self.compute + self.memory_bound + self.launch
        return worked + self.communication_exposed + self.bubble + self.optimizer + self.input


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
        return self.breakdown.step

    @property
    def samples_per_s(self) -> float:
        """Samples of the global batch per second."""
        return self.plan.global_batch / self.step_time

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second, for models that count them."""
        tokens = self.graph.tokens_per_sample
        return None if tokens is None else tokens * self.samples_per_s

    @property
    def mfu(self) -> float:
        """Model FLOP of the step over what all gpus could do in it at the peak of the dtype."""
        peak = self.system.device.peak_flops_per_s(self.plan.dtype)
        return self.flops / (self.step_time * self.plan.gpus * peak)


@dataclass(frozen=True, slots=True)
class _Priced:
    """A program with its seconds: all that scheduling needs."""

    program: Program
    kernels: KernelTimes
    times: list[SectionTime]
    chunks: list[Chunk]
    plan: Plan
    run: Run
    formats: Precision
    network: Network
    prices: Pricer
    software: Software

    def stage(self, index: int) -> list[Chunk]:
        """The chunks that one stage holds: every ``stages``-th one."""
        return self.chunks[index :: self.plan.stages]

    def over(self, chunks: Sequence[Chunk], value: Sequence[float]) -> float:
        """A per-turn figure of sections, summed over chunks."""
        return sum(value[section] * turns for chunk in chunks for section, turns in chunk)


def predict(model: ModelSpec, system: System, run: Run) -> Prediction:
    """Count, price, schedule. Pure: the same inputs give the same prediction, and nothing is kept."""
    chosen = plan(model, system, run)
    formats = precision(chosen.dtype)
    software = load_software(run.software)
    software = software if run.cudnn is None else software.model_copy(update={"cudnn": run.cudnn})
    choices = Choices(run.attention or software.attention, software.loss)
    graph = build(model, batch=chosen.microbatch * chosen.dp, choices=choices, overrides=run.model)
    placement = STRATEGIES[chosen.parallel.preset](graph, chosen.parallel)
    program = lower(graph, placement, chosen.mesh, formats, fused=software.fused)
    program = without_backward(program) if run.forward_only else program
    priced = _priced(program, system, chosen, run, formats, software)
    timeline, breakdown = _single(priced) if chosen.stages == 1 else _pipelined(priced)
    return Prediction(
        model,
        system,
        run,
        chosen,
        graph,
        program,
        timeline,
        breakdown,
        max((_footprint(priced, stage) for stage in range(chosen.stages)), key=lambda memory: memory.total),
        _model_flops(graph, formats, chosen, run),
        _interval(priced, breakdown),
        priced.prices.name,
        _unmodelled(run),
        _warnings(chosen),
    )


def _priced(
    program: Program, system: System, chosen: Plan, run: Run, formats: Precision, software: Software
) -> _Priced:
    prices = pricer(system.device, chosen.dtype, run.calibration, software)
    network = Network(system, chosen.mesh, run.algorithm_or_server, prices.rates, host=software.host_forward)
    kernels = prices.times([counted.kernel for section in program.sections for counted in section.kernels])
    times = _section_times(program, kernels, network, run)
    chunks = cut(program, [time.turn for time in times], chosen.stages * chosen.parallel.chunks)
    return _Priced(program, kernels, times, chunks, chosen, run, formats, network, prices, software)


def _section_times(program: Program, kernels: KernelTimes, network: Network, run: Run) -> list[SectionTime]:
    """Kernel seconds gathered section by section, with the collectives that block them and what is recomputed."""
    found, first = [], 0
    blocks = any(section.repeat > 1 for section in program.sections)
    for section in program.sections:
        span = slice(first, first + len(section.kernels))
        first = span.stop
        seconds = kernels.total[span] * np.array([counted.times for counted in section.kernels])
        by_phase = {phase: 0.0 for phase in ("forward", "backward", "backward_weight")}
        core = 0.0
        for counted, time in zip(section.kernels, seconds.tolist(), strict=True):
            by_phase[counted.kernel.phase] += time
            core += time if counted.core and counted.kernel.phase == "forward" else 0.0
        waits = {"forward": 0.0, "backward": 0.0}
        for one in section.transfers:
            if not one.overlapped:
                waits[one.phase] += network.time(one.operation, (one.axis,), one.payload_bytes) * one.times
        if run.recompute == "full" and (section.repeat > 1 or not blocks):
            again, waited = by_phase["forward"], waits["forward"]
        else:
            again, waited = (core if run.recompute == "selective" else 0.0), 0.0
        again, waited = (0.0, 0.0) if run.forward_only else (again, waited)
        found.append(
            SectionTime(
                by_phase["forward"],
                by_phase["backward"] + again,
                by_phase["backward_weight"],
                waits["forward"],
                waits["backward"] + waited,
            )
        )
    return found


def _single(priced: _Priced) -> tuple[Timeline, Breakdown]:
    """No pipeline: one timeline with gradient buckets beside the backward pass."""
    zero, run = priced.plan.parallel.zero, priced.run
    gather = _state_gather(priced, 0)
    exchange = Exchange(
        lambda axes, size: _gradient_time(priced, axes, size),
        lambda size: priced.network.time("all_gather", _replica_axes(priced.plan), size),
        run.bucket,
        priced.formats.gradient,
        priced.formats.parameter,
        (run.exchange or ("overlapped" if priced.software.overlap else "after")) == "overlapped",
        zero == 3 and priced.plan.dp > 1,
    )
    line = step_timeline(
        priced.program, priced.times, microbatches=priced.plan.microbatches, exchange=exchange, update=_update_time(priced, 0) + gather
    )
    return line, _breakdown(priced, 0, line.end, busy(line.events, "bucket", "gather") + gather)


def _pipelined(priced: _Priced) -> tuple[Timeline, Breakdown]:
    """Stages under a schedule; each then exchanges its gradients and updates. The step ends when the last stage is done."""
    chosen = priced.plan
    stages = [[_stage_time(priced, chunk) for chunk in priced.stage(index)] for index in range(chosen.stages)]
    line = pipeline_time(_schedule(priced), stages, chosen.microbatches)
    tails = [_tail(priced, index) for index in range(chosen.stages)]
    finishes = [end + tail for end, tail in zip(line.ends, tails, strict=True)]
    loads = [sum(time.forward + time.backward + time.weights for time in stage) for stage in stages]
    busiest = max(range(chosen.stages), key=lambda index: loads[index])
    return line.timeline, _breakdown(priced, busiest, max(finishes), tails[busiest])


def _schedule(priced: _Priced) -> str:
    """The schedule by name; 1F1B over several chunks a stage is the interleaved one."""
    name = priced.run.schedule
    return "interleaved" if priced.plan.parallel.chunks > 1 and name == "1f1b" else name


def _stage_time(priced: _Priced, chunk: Chunk) -> StageTime:
    """One microbatch through one chunk; a send blocks the stage that makes it, as Megatron's does."""
    times = priced.times
    last = priced.program.sections[chunk[-1][0]]
    split = 1 if priced.plan.parallel.sequence_parallel else priced.plan.mesh.degree("tp")
    send = priced.network.time("send_recv", ("pp",), last.output_bytes / split)
    return StageTime(
        priced.over([chunk], [time.forward + time.forward_transfers for time in times]) + send,
        priced.over([chunk], [time.backward + time.backward_transfers for time in times]) + send,
        priced.over([chunk], [time.weights for time in times]),
        0.0,
    )


def _tail(priced: _Priced, stage: int) -> float:
    """What a stage does after its last backward pass: exchange gradients, update, gather updated parameters."""
    gradients: dict[tuple[str, ...], float] = {}
    for chunk in priced.stage(stage):
        for section, turns in chunk:
            for one in priced.program.sections[section].gradients:
                gradients[one.axes] = gradients.get(one.axes, 0.0) + one.elements * turns * priced.formats.gradient
    exchange = sum(_gradient_time(priced, axes, size) for axes, size in gradients.items() if axes)
    return exchange + _update_time(priced, stage) + _state_gather(priced, stage)


def _replica_axes(chosen: Plan) -> tuple[str, ...]:
    return tuple(axis for axis in ("ep", "dp") if chosen.mesh.degree(axis) > 1)


def _gradient_time(priced: _Priced, axes: tuple[str, ...], size: float) -> float:
    """Sum gradients over their replicas; sharded states need only each rank's shard of the sum."""
    operation = "reduce_scatter" if priced.plan.parallel.zero else "all_reduce"
    return priced.network.time(operation, axes, size)


def _state_gather(priced: _Priced, stage: int) -> float:
    """With sharded states (ZeRO-1, ZeRO-2) every rank collects the parameters that the others updated."""
    if priced.plan.parallel.zero not in (1, 2) or priced.run.forward_only:
        return 0.0
    size = _parameters(priced, stage) * priced.formats.parameter
    return priced.network.time("all_gather", _replica_axes(priced.plan), size)


def _parameters(priced: _Priced, stage: int) -> float:
    return priced.over(priced.stage(stage), [section.parameters for section in priced.program.sections])


def _update_time(priced: _Priced, stage: int) -> float:
    """The optimizer as one pass over all that it reads and writes; sharded states divide it."""
    if priced.run.forward_only:
        return 0.0
    chosen = optimizer(priced.run.optimizer)
    count = _parameters(priced, stage) / (priced.plan.dp if priced.plan.parallel.zero else 1)
    read, written = (count * per_parameter for per_parameter in chosen.update_bytes(priced.formats))
    shape = {"rows": count, "columns": 1.0}
    kernel = Kernel("update", "memory", "optimizer", "update", 0.0, count * chosen.flops, read, written, shape)
    return float(priced.prices.times([kernel]).total[0]) if count else 0.0


def _breakdown(priced: _Priced, stage: int, step: float, beside: float) -> Breakdown:
    """The seconds of one stage by what they went into; what is left of the step is exposed communication or bubble."""
    held: dict[int, int] = {}
    for chunk in priced.stage(stage):
        for index, here in chunk:
            held[index] = held.get(index, 0) + here
    turns = [
        counted.times * held.get(index, 0) * _repeats(priced.run, section, counted.kernel.phase, counted.core, priced.program)
        for index, section in enumerate(priced.program.sections)
        for counted in section.kernels
    ]
    times = np.array(turns, dtype=float) * priced.plan.microbatches
    kernels = priced.kernels
    launch = float((kernels.launch * times).sum())
    work = (kernels.total - kernels.launch) * times
    arithmetic, moving = float(work[kernels.arithmetic].sum()), float(work[~kernels.arithmetic].sum())
    update = _update_time(priced, stage)
    computing = arithmetic + moving + launch + update
    blocking = [time.forward_transfers + time.backward_transfers for time in priced.times]
    waited = priced.over(priced.stage(stage), blocking) * priced.plan.microbatches
    if priced.plan.stages == 1:
        exposed = max(0.0, step - computing)
        return Breakdown(arithmetic, moving, launch, exposed, waited + beside, 0.0, update, 0.0)
    sends = sum(2 * _stage_time(priced, chunk).forward for chunk in priced.stage(stage)) * priced.plan.microbatches
    sends -= 2 * priced.plan.microbatches * priced.over(
        priced.stage(stage), [time.forward + time.forward_transfers for time in priced.times]
    )
    talking = waited + sends + beside - update
    return Breakdown(arithmetic, moving, launch, talking, talking, max(0.0, step - computing - talking), update, 0.0)


def _repeats(run: Run, section: Section, phase: str, core: bool, program: Program) -> int:
    """How often a kernel runs in a microbatch: forward kernels run again where they are recomputed."""
    if phase != "forward" or run.recompute == "none" or run.forward_only:
        return 1
    if run.recompute == "selective":
        return 2 if core else 1
    return 2 if section.repeat > 1 or all(one.repeat == 1 for one in program.sections) else 1


def _footprint(priced: _Priced, stage: int) -> Footprint:
    chosen, run, formats, sections = priced.plan, priced.run, priced.formats, priced.program.sections
    count, zero, ranks = _parameters(priced, stage), chosen.parallel.zero, max(chosen.dp, 1)
    training = 0.0 if run.forward_only else 1.0
    blocks = any(section.repeat > 1 for section in sections)
    kept, transient = [], 0.0
    for section in sections:
        recomputed = run.recompute == "full" and (section.repeat > 1 or not blocks)
        full = min(section.input_bytes, section.saved_bytes) if recomputed else section.saved_bytes
        kept.append(full - (section.core_bytes if run.recompute == "selective" else 0.0))
        transient = max(transient, section.saved_bytes if recomputed else 0.0)
    alive = _in_flight(priced, stage)
    bucket = run.bucket if chosen.dp > 1 and not run.forward_only else 0.0
    largest = max((section.largest_output_bytes for section in sections), default=0.0)
    gathered = 2.0 * max((s.parameters for s in sections), default=0.0) * formats.parameter if zero == 3 else 0.0
    return Footprint(
        parameters=count * formats.parameter / (ranks if zero == 3 else 1),
        gradients=count * formats.gradient * training / (ranks if zero >= 2 else 1),
        optimizer=count * optimizer(run.optimizer).state_bytes(formats) * training / (ranks if zero >= 1 else 1),
        activations=priced.over(priced.stage(stage), kept) * alive / chosen.parallel.chunks * training,
        workspace=2.0 * largest + 2.0 * bucket + transient + gathered,
        capacity=priced.network.system.device.memory.capacity,
    )


def _in_flight(priced: _Priced, stage: int) -> float:
    """Microbatch activations alive at once on a stage, in chunks."""
    chosen = priced.plan
    if chosen.stages == 1:
        return float(chosen.parallel.chunks)
    schedule = SCHEDULES[_schedule(priced)]
    stages, chunks, window = chosen.stages, chosen.parallel.chunks, 4 * chosen.stages
    if chosen.microbatches <= 2 * window:
        return float(schedule.in_flight(stage, stages, chosen.microbatches, chunks))
    first, second = (schedule.in_flight(stage, stages, turns, chunks) for turns in (window, 2 * window))
    return second + (chosen.microbatches - 2 * window) * (second - first) / window


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


def _interval(priced: _Priced, breakdown: Breakdown) -> tuple[float, float]:
    """Where nine of ten real steps should lie: each kernel's factors weighted by its time, as if all erred together (the careful
    assumption, as errors of one family go the same way); collectives and bubbles take the same factors."""
    kernels = priced.kernels
    if not len(kernels.total):
        return breakdown.step, breakdown.step
    weight = float(kernels.total.sum()) or 1.0
    low, high = (float((kernels.total * factor).sum()) / weight for factor in (kernels.low, kernels.high))
    return breakdown.step * low, breakdown.step * high


def _unmodelled(run: Run) -> tuple[str, ...]:
    """What a real step has and this one leaves out: silence is never a number."""
    return ("input pipeline (storage, decoding, host-to-device copies)", "CUDA context and memory fragmentation")


def _warnings(chosen: Plan) -> tuple[str, ...]:
    found = []
    if chosen.idle:
        found.append(f"{chosen.idle} of {chosen.gpus} gpus are idle: the global batch has only {chosen.global_batch} samples")
    elif chosen.local_batch * chosen.dp > chosen.global_batch:
        spare = chosen.local_batch * chosen.dp - chosen.global_batch
        uneven = f"the global batch does not divide evenly: the step waits for ranks with {chosen.local_batch} samples"
        found.append(f"{uneven} ({spare} slots idle)")
    return tuple(found)
