"""The orchestrator: a network, a system and a run become one prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from paleo.assemble import (
    BYTES,
    Columns,
    TurnTimes,
    alive,
    columns,
    crowded,
    memory,
    over,
    pipeline_end,
    recomputed,
    section_figures,
    states,
    turns_held,
    update_kernel,
    waits,
    walk,
    workspace,
)
from paleo.engine import Task, Timeline
from paleo.graph import Graph, build
from paleo.layers.base import Choices
from paleo.lower import Program, Section, lower, without_backward
from paleo.optimizers import Optimizer, optimizer
from paleo.parallel.mesh import Axes, Mesh
from paleo.parallel.placement import STRATEGIES, Placement, idle_axes
from paleo.pipeline import StageTime, check, pipeline_timeline
from paleo.plan import Plan, plan
from paleo.precision import Precision, autocast, precision
from paleo.pricing.communication import Fabric, Network
from paleo.pricing.footprint import Footprint
from paleo.pricing.kernels import KernelTimes, Pricer, pricer
from paleo.schedules.base import Numeric, Passes
from paleo.specs.hardware import System
from paleo.specs.model import ModelSpec
from paleo.specs.run import Run
from paleo.specs.software import Software, load_software
from paleo.stages import Chunk, cut
from paleo.timeline import Buckets, Direction, Prices, SectionTime, step_timeline, turns
from paleo.work import Kernel

Array = npt.NDArray[np.float64]


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


@dataclass(frozen=True)
class Prediction:
    """One training step (or forward pass) of ``model`` under ``plan`` on ``system``, in SI; ``draw`` makes the
    timeline."""

    model: ModelSpec
    system: System
    run: Run
    plan: Plan
    graph: Graph
    program: Program
    draw: Callable[[], Timeline]
    breakdown: Breakdown
    memory: Footprint
    flops: float
    interval: tuple[float, float]
    calibration: str
    unmodelled: tuple[str, ...]
    warnings: tuple[str, ...]

    @cached_property
    def timeline(self) -> Timeline:
        """The step as tasks on streams, or a pipeline's passes on stages (a window of them, where it has very many
        microbatches)."""
        return self.draw()

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
class Setting:
    """What prices the programs of a run, whatever its degrees and batch shares are."""

    run: Run
    system: System
    formats: Precision
    software: Software
    prices: Pricer
    fabric: Fabric

    @property
    def choices(self) -> Choices:
        """How layers are carried out."""
        software = self.software
        attention = self.run.attention or software.attention
        wide = frozenset(software.wide if self.formats.casts else ())
        return Choices(attention, software.loss, software.gelu, wide)

    @property
    def optimizer(self) -> Optimizer:
        """The run's optimizer as the software carries it out."""
        plain = [optimizer(name).name for name in self.software.stepwise_updates]
        return optimizer(self.run.optimizer, stepwise=self.run.optimizer in plain)

    @property
    def overlapped(self) -> bool:
        """Whether gradients travel during backward."""
        return (self.run.exchange or ("overlapped" if self.software.overlap else "after")) == "overlapped"

    def lowered(self, graph: Graph, placement: Placement, mesh: Mesh) -> Program:
        """One rank's program."""
        program = lower(
            graph,
            placement,
            mesh,
            self.formats,
            fused=self.software.fused,
            regather=self.software.regather,
            softmax_multiple=self.software.softmax_multiple,
        )
        return without_backward(program) if self.run.forward_only else program


def setting(system: System, run: Run, dtype: str, software: Software | None = None) -> Setting:
    """Software, pricer and links of a run; ``software`` in place of the profile that it names."""
    software = software or load_software(run.software)
    software = software if run.cudnn is None else software.model_copy(update={"cudnn": run.cudnn})
    prices = pricer(system.device, dtype, run.calibration, software)
    software = software if prices.rates is None else software.model_copy(update={"contention": 0.0})
    fabric = Fabric(system, run.algorithm_or_server, prices.rates, host=software.host_forward)
    formats = autocast(precision(dtype)) if software.mixed == "autocast" else precision(dtype)
    held, accesses = software.gradient_accumulator, software.gradient_accesses
    formats = replace(formats, accumulator=held, gradient_accesses=accesses)
    return Setting(run, system, formats, software, prices, fabric)


@dataclass(frozen=True, slots=True)
class _Priced:
    """A program with its seconds: all that scheduling needs."""

    program: Program
    kernels: KernelTimes
    times: TurnTimes
    columns: Columns
    chunks: list[Chunk]
    plan: Plan
    setting: Setting
    network: Network

    @property
    def run(self) -> Run:
        return self.setting.run

    @property
    def schedule(self) -> str:
        """The schedule by name; 1F1B over several chunks a stage is the interleaved one."""
        return schedule_name(self.run.schedule, self.plan.parallel.chunks)

    @property
    def held(self) -> Array:
        """Turns of each section on each stage."""
        return turns_held(len(self.program.sections), self.chunks, self.plan.stages)

    @property
    def parameters(self) -> Array:
        """Parameter elements of each stage."""
        return over(self.held, self.columns.parameters)


def schedule_name(name: str, chunks: int) -> str:
    """1F1B over several chunks a stage is the interleaved one."""
    return "interleaved" if chunks > 1 and name == "1f1b" else name


def predict(model: ModelSpec, system: System, run: Run, software: Software | None = None) -> Prediction:
    """Count, price, schedule. Pure: the same inputs give the same prediction, and nothing is kept. ``software`` stands
    in for the profile that the run names."""
    chosen = plan(model, system, run)
    made = setting(system, run, chosen.dtype, software)
    graph = build(model, batch=chosen.microbatch * chosen.dp, choices=made.choices, overrides=run.model)
    placement = STRATEGIES[chosen.parallel.preset](graph, chosen.parallel)
    priced = _priced(made.lowered(graph, placement, chosen.mesh), chosen, made)
    draw, breakdown = _single(priced) if chosen.stages == 1 else _pipelined(priced)
    return Prediction(
        model,
        system,
        run,
        chosen,
        graph,
        priced.program,
        draw,
        breakdown,
        _footprint(priced),
        _model_flops(graph, made.formats, chosen, run),
        _interval(priced, breakdown),
        made.prices.name,
        _unmodelled(priced.program),
        _warnings(chosen, idle_axes(graph, placement, chosen.mesh)),
    )


def _priced(program: Program, chosen: Plan, made: Setting) -> _Priced:
    fabric = made.fabric
    network = Network(made.system, chosen.mesh, fabric.algorithm, fabric.rates, fabric.own, fabric.host)
    kernels = made.prices.times([counted.kernel for section in program.sections for counted in section.kernels])
    waited = np.array([network.time(one.operation, (one.axis,), one.payload_bytes) for _, one in waits(program)])
    table = columns(program, kernels.total, waited, [section_figures(program, name) for name in BYTES])
    times = recomputed(table, "none" if made.run.forward_only else made.run.recompute)
    chunks = cut(program, times.turn.tolist(), chosen.stages * chosen.parallel.chunks)
    return _Priced(program, kernels, times, table, chunks, chosen, made, network)


def _single(priced: _Priced) -> tuple[Callable[[], Timeline], Breakdown]:
    """No pipeline: gradient buckets travel beside the backward pass."""
    zero, ranks, program, times = priced.plan.parallel.zero, priced.plan.dp, priced.program, priced.times
    buckets = Buckets(
        priced.run.bucket, priced.setting.formats.gradient, priced.setting.overlapped, zero == 3 and ranks > 1
    )
    width, axes = priced.setting.formats.parameter, _replica_axes(priced.plan)

    def bucket(over_axes: Axes, size: float) -> float:
        return priced.network.time(gradient_operation(zero), over_axes, size)

    def gather(section: Section) -> float:
        return priced.network.time("all_gather", axes, section.parameters * width) if buckets.sharded else 0.0

    gathers = np.array([gather(section) for section in program.sections])
    if buckets.overlapped or buckets.sharded:
        times = crowded(times, gathers, _gradient_seconds(program, bucket, buckets), priced.setting.software.contention)
    collected = float(_state_gathers(priced)[0])
    update = float(_updates(priced)[0]) + collected
    ends: list[tuple[Numeric, Numeric]] = []
    beside = 0.0
    for last in (False, True):
        order = turns(program, buckets, last=last)
        sent = [sum(bucket(*one) for one in turn.buckets) for turn in order]
        start = 0.0 if not last else (priced.plan.microbatches - 1) * max(map(float, ends[0]))
        ends.append(walk(order, times.forwards, times.backwards + times.weights, gathers, sent, start))
        beside = float(sum(sent) + sum(gathers[turn.section] for turn in order if turn.gathers))
    end = max(map(float, ends[1])) + update

    def draw() -> Timeline:
        prices = Prices(_section_times(times), partial(_counts, priced), bucket, gather, width)
        return step_timeline(program, prices, microbatches=priced.plan.microbatches, buckets=buckets, update=update)

    return draw, _breakdown(priced, 0, end, beside + collected)


def _gradient_seconds(program: Program, bucket: Callable[[Axes, float], float], buckets: Buckets) -> Array:
    """Seconds in which the gradients of one turn of each section travel."""
    if buckets.least <= 0:
        return np.zeros(len(program.sections))
    parts = [
        [bucket(g.axes, g.elements * buckets.gradient_bytes) for g in s.gradients if g.axes] for s in program.sections
    ]
    return np.array([sum(part) for part in parts])


def _section_times(times: TurnTimes) -> list[SectionTime]:
    figures = (times.forward, times.backward, times.weights, times.forward_transfers, times.backward_transfers)
    return [SectionTime(*row) for row in np.stack(figures, axis=1).tolist()]


def _pipelined(priced: _Priced) -> tuple[Callable[[], Timeline], Breakdown]:
    """Stages under a schedule; each then exchanges its gradients and updates. The step ends when the last stage is
    done."""
    chosen, name, times, held = priced.plan, priced.schedule, priced.times, priced.held
    check(name, chosen.stages, chosen.parallel.chunks, chosen.microbatches)
    sends = np.array(
        [sum(_send(priced, chunk) for chunk in priced.chunks[s :: chosen.stages]) for s in range(chosen.stages)]
    )
    passes = Passes(over(held, times.forwards) + sends, over(held, times.backwards) + sends, over(held, times.weights))
    exchanges, updates, gathers = _exchanges(priced), _updates(priced), _state_gathers(priced)
    tails = exchanges + updates + gathers
    end = float(pipeline_end(name, passes, chosen.microbatches, chosen.parallel.chunks, tails))
    busiest = int(np.argmax(passes.forward + passes.backward + passes.weights))

    def draw() -> Timeline:
        chunks = [
            [_chunk_time(priced, chunk) for chunk in priced.chunks[s :: chosen.stages]] for s in range(chosen.stages)
        ]
        after = {"exchange": exchanges, "update": updates, "gather": gathers}
        follows = [
            Task(what, f"stage{stage}", seconds, (), what)
            for what, times_after in after.items()
            for stage, seconds in enumerate(times_after.tolist())
            if seconds > 0
        ]
        return pipeline_timeline(name, chunks, chosen.microbatches, follows)

    return draw, _breakdown(priced, busiest, end, float(tails[busiest]), float(sends[busiest]))


def _send(priced: _Priced, chunk: Chunk) -> float:
    """A chunk hands its output on; the stage waits for that, as Megatron's does. Ranks of tp send their shares and
    gather."""
    last = priced.program.sections[chunk[-1][0]]
    split = 1 if priced.plan.parallel.sequence_parallel else priced.plan.mesh.degree("tp")
    return priced.network.time("send_recv", ("pp",), last.output_bytes / split)


def _chunk_time(priced: _Priced, chunk: Chunk) -> StageTime:
    """One microbatch through one chunk, sends and collectives with it."""
    held, times = turns_held(len(priced.program.sections), [chunk], 1), priced.times
    forward, backward, weights = (float(over(held, one)[0]) for one in (times.forwards, times.backwards, times.weights))
    send, sections = _send(priced, chunk), priced.program.sections
    counted = [
        [sum(turns_here * _done(priced, sections[i], phases)[k] for i, turns_here in chunk) for phases in _PASSES]
        for k in (0, 1)
    ]
    flops, moved = ((one[0], one[1], one[2]) for one in counted)
    return StageTime(forward + send, backward + send, weights, 0.0, flops, moved)


#: Phases of kernels in the passes of a pipeline.
_PASSES = (("forward",), ("again", "backward"), ("backward_weight",))


def _done(priced: _Priced, section: Section, phases: Sequence[str]) -> tuple[float, float]:
    """FLOP and bytes of a turn's kernels in some phases; ``again`` is what is recomputed."""
    flops = moved = 0.0
    for counted in section.kernels:
        kernel = counted.kernel
        again = _repeats(priced.run, section, kernel.phase, counted.core, priced.program) - 1
        times = counted.times * ((kernel.phase in phases) + ("again" in phases) * again)
        flops, moved = flops + times * kernel.flops, moved + times * kernel.bytes
    return flops, moved


def _counts(priced: _Priced, section: Section, direction: Direction) -> tuple[float, float, float]:
    """FLOP and bytes of a turn's kernels in one direction, and bytes of the collectives that it waits for."""
    phases = ("forward",) if direction == "forward" else ("again", "backward", "backward_weight")
    waited = (one for one in section.transfers if not one.overlapped and one.phase == direction)
    return *_done(priced, section, phases), sum(one.payload_bytes * one.times for one in waited)


def _exchanges(priced: _Priced) -> Array:
    """Seconds in which each stage sums its gradients over their replicas."""
    elements: dict[Axes, Array] = {}
    for index, section in enumerate(priced.program.sections):
        for one in section.gradients:
            elements[one.axes] = elements.get(one.axes, 0.0) + priced.held[:, index] * one.elements
    operation, width = gradient_operation(priced.plan.parallel.zero), priced.setting.formats.gradient
    found = np.zeros(priced.plan.stages)
    for axes, count in elements.items():
        if axes:
            found += [priced.network.time(operation, axes, size) for size in (count * width).tolist()]
    return found


def gradient_operation(zero: int) -> str:
    """Sharded states need only each rank's shard of the sum."""
    return "reduce_scatter" if zero else "all_reduce"


def _replica_axes(chosen: Plan) -> Axes:
    return tuple(axis for axis in ("ep", "dp") if chosen.mesh.degree(axis) > 1)


def _state_gathers(priced: _Priced) -> Array:
    """With sharded states (ZeRO-1, ZeRO-2) every rank collects the parameters that the others updated; seconds by
    stage."""
    if priced.plan.parallel.zero not in (1, 2) or priced.run.forward_only:
        return np.zeros(priced.plan.stages)
    axes, sizes = _replica_axes(priced.plan), priced.parameters * priced.setting.formats.parameter
    return np.array([priced.network.time("all_gather", axes, size) for size in sizes.tolist()])


def _updates(priced: _Priced) -> Array:
    """Seconds of the optimizer on each stage; sharded states divide its work."""
    if priced.run.forward_only:
        return np.zeros(priced.plan.stages)
    counts = priced.parameters / (priced.plan.dp if priced.plan.parallel.zero else 1)
    chosen = priced.setting.optimizer
    tensors = over(priced.held, section_figures(priced.program, "tensors"))
    pairs = zip(counts.tolist(), tensors.tolist(), strict=True)
    kernels = [update_kernel(count, number, chosen, priced.setting.formats) for count, number in pairs]
    return np.where(counts > 0, priced.setting.prices.times(kernels).total, 0.0)


def _breakdown(priced: _Priced, stage: int, step: float, beside: float, sends: float = 0.0) -> Breakdown:
    """The seconds of one stage by what they went into; what is left of the step is exposed communication or bubble.

    ``beside``: buckets and gathers of the step, or what follows a pipeline; ``sends``: of one microbatch, one way.
    """
    held = priced.held[stage]
    turns_made = [
        counted.times * held[index] * _repeats(priced.run, section, counted.kernel.phase, counted.core, priced.program)
        for index, section in enumerate(priced.program.sections)
        for counted in section.kernels
    ]
    times = np.array(turns_made, dtype=float) * priced.plan.microbatches
    kernels = priced.kernels
    launch = float((kernels.launch * times).sum())
    work = (kernels.total - kernels.launch) * times
    arithmetic, moving = float(work[kernels.arithmetic].sum()), float(work[~kernels.arithmetic].sum())
    update = float(_updates(priced)[stage])
    computing = arithmetic + moving + launch + update
    waited = float(held @ (priced.times.forward_transfers + priced.times.backward_transfers)) * priced.plan.microbatches
    if priced.plan.stages == 1:
        exposed = max(0.0, step - computing)
        total = waited + beside
        total = max(total, exposed) if total else 0.0  # what computation loses to collectives beside it counts, too
        return Breakdown(arithmetic, moving, launch, exposed, total, 0.0, update, 0.0)
    talking = waited + 2 * sends * priced.plan.microbatches + beside - update
    return Breakdown(arithmetic, moving, launch, talking, talking, max(0.0, step - computing - talking), update, 0.0)


def _repeats(run: Run, section: Section, phase: str, core: bool, program: Program) -> int:
    """How often a kernel runs in a microbatch: forward kernels run again where they are recomputed."""
    if phase != "forward" or run.recompute == "none" or run.forward_only:
        return 1
    if run.recompute == "selective":
        return 2 if core else 1
    return 2 if section.repeat > 1 or all(one.repeat == 1 for one in program.sections) else 1


def _footprint(priced: _Priced) -> Footprint:
    """What the fullest stage holds."""
    chosen, run, formats = priced.plan, priced.run, priced.setting.formats
    times, training = priced.times, not run.forward_only
    kept = states(
        priced.parameters,
        priced.columns.parameters.max(initial=0.0),
        max(chosen.dp, 1),
        chosen.parallel.zero,
        priced.setting.optimizer,
        formats,
        training=training,
    )
    living = alive(priced.schedule, chosen.stages, chosen.microbatches, chosen.parallel.chunks)
    activations = over(priced.held, times.kept) * living * training
    bucket = run.bucket if chosen.dp > 1 and training else 0.0
    work = workspace(priced.columns.largest_output_bytes, times.transient, bucket)
    fullest = int(np.argmax(memory(kept, activations, work)))
    return Footprint(
        parameters=float(kept.parameters[fullest]),
        gradients=float(kept.gradients[fullest]),
        optimizer=float(kept.optimizer[fullest]),
        activations=float(activations[fullest]),
        workspace=float(work + kept.gathered),
        capacity=priced.setting.system.device.memory.capacity,
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


def _interval(priced: _Priced, breakdown: Breakdown) -> tuple[float, float]:
    """Where nine of ten real steps should lie: each kernel's factors weighted by its time, as if all erred together
    (the careful assumption, as errors of one family go the same way); collectives and bubbles take the same factors."""
    kernels = priced.kernels
    if not len(kernels.total):
        return breakdown.step, breakdown.step
    weight = float(kernels.total.sum()) or 1.0
    operations = [one.kernel.operation for section in priced.program.sections for one in section.kernels]
    spread = np.array([OPAQUE_SPREAD if operation == OPAQUE else 1.0 for operation in operations])
    factors = (kernels.low / spread, kernels.high * spread)
    low, high = (float((kernels.total * factor).sum()) / weight for factor in factors)
    return breakdown.step * low, breakdown.step * high


#: The kernels of functions that an importer did not know, and by which factor their times are guessed, either way.
OPAQUE, OPAQUE_SPREAD = "opaque", 3.0


def _unmodelled(program: Program) -> tuple[str, ...]:
    """What a real step has and this one leaves out, or knows by its bytes alone: silence is never a number."""
    always = ("input pipeline (storage, decoding, host-to-device copies)", "CUDA context and memory fragmentation")
    turns = [(one.kernel, one.times * section.repeat) for section in program.sections for one in section.kernels]
    guessed = [(kernel, times) for kernel, times in turns if kernel.operation == OPAQUE]
    if not guessed:
        return always
    shares = [
        sum(getattr(kernel, count) * times for kernel, times in guessed)
        / (sum(getattr(kernel, count) * times for kernel, times in turns) or 1.0)
        for count in ("flops", "bytes")
    ]
    names = ", ".join(dict.fromkeys(kernel.name for kernel, _ in guessed if kernel.phase == "forward"))
    text = f"functions that the importer did not know: {shares[0]:.1%} of FLOP, {shares[1]:.1%} of bytes"
    return (*always, f"{text} ({names[:200]})")


def _warnings(chosen: Plan, idle: Sequence[str]) -> tuple[str, ...]:
    found = [
        f"{axis}={chosen.mesh.degree(axis)} splits nothing in this network: its ranks all do the same work"
        for axis in idle
    ]
    if chosen.idle:
        found.append(
            f"{chosen.idle} of {chosen.gpus} gpus are idle: the global batch has only {chosen.global_batch} samples"
        )
    elif chosen.local_batch * chosen.dp > chosen.global_batch:
        spare = chosen.local_batch * chosen.dp - chosen.global_batch
        uneven = f"the global batch does not divide evenly: the step waits for ranks with {chosen.local_batch} samples"
        found.append(f"{uneven} ({spare} slots idle)")
    return tuple(found)
