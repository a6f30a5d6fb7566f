"""The orchestrator: a network, a system and a run become one prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from paleo.lowering.partition import Chunk
from paleo.lowering.program import Program, Section
from paleo.lowering.recompute import Ways, dealt, marked, runs, turn_shares, uneven
from paleo.network.graph import Graph
from paleo.operations.kernel import Kernel
from paleo.operations.precision import Precision
from paleo.parallel.mesh import Axes, Mesh
from paleo.parallel.overrides import placement
from paleo.parallel.plan import Plan, plan
from paleo.pricing.communication import Network
from paleo.pricing.footprint import Footprint
from paleo.pricing.kernels import KernelTimes
from paleo.schedules.base import SCHEDULES, Numeric, Passes, Schedule
from paleo.schedules.engine import Event, Task, Timeline
from paleo.schedules.pipeline import StageTime, check, pipeline_timeline
from paleo.specs.calibration import Calibration
from paleo.specs.hardware import System
from paleo.specs.model import ModelSpec
from paleo.specs.run import Run
from paleo.specs.software import Software
from paleo.step.backend import Setting, setting
from paleo.step.gradient_exchange import (
    copied,
    exposed_exchange,
    exposed_gather,
    gathered_shares,
    gradient_elements,
    gradient_shares,
    gradient_turns,
    owned_elements,
    replica_groups,
    sendings,
    sharers,
    tied_pairs,
)
from paleo.step.host import Feeding, Shares, divided, host_update, streamed
from paleo.step.section_times import (
    BYTES,
    Columns,
    TurnTimes,
    alive,
    clip_axes,
    collectives,
    columns,
    crowded,
    memory,
    over,
    recomputed,
    section_figures,
    stage_ends,
    states,
    turns_placed,
    walk,
    workspace,
)
from paleo.step.sharded_parameters import Figures, gathered_elements, sharded_passes, turn_of_each, waited_turns
from paleo.step.timeline import Buckets, Direction, Prices, SectionTime, step_timeline, turns
from paleo.step.warnings import OPAQUE, OPAQUE_SPREAD, host_warnings, unmodelled, warnings

Array = npt.NDArray[np.float64]
Numbers = TypeVar("Numbers", float, Array)


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
    timeline, ``pieces`` are those of a pipeline."""

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
    host_memory: float = 0.0
    fed: Feeding | None = None
    pieces: tuple[Chunk, ...] = ()

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
class _Priced:
    """A program with its seconds: all that scheduling needs."""

    program: Program
    kernels: KernelTimes
    times: TurnTimes
    columns: Columns
    chunks: list[Chunk]
    placed: Array
    plan: Plan
    setting: Setting
    network: Network

    @property
    def run(self) -> Run:
        return self.setting.run

    @property
    def schedule(self) -> Schedule:
        """The order of the pipeline's passes."""
        return SCHEDULES[schedule_name(self.run.schedule, self.plan.parallel.chunks)]

    @property
    def copies(self) -> int:
        """Copies of the network that the stages hold together."""
        return self.schedule.copies if self.plan.stages > 1 else 1

    @property
    def sharded(self) -> bool:
        """Whether parameters are gathered for every pass."""
        return self.plan.parallel.zero == 3 and self.plan.shards * self.copies > 1

    @property
    def held(self) -> Array:
        """Turns of each section on each stage, in all copies."""
        return np.asarray(self.placed.sum(axis=1))

    @property
    def made(self) -> Array:
        """Turns of each section that a stage makes for a microbatch, on average over the copies."""
        return self.held / self.copies

    @property
    def parameters(self) -> Array:
        """Parameter elements of each stage, copies of tied ones too."""
        return over(self.held, self.columns.parameters) + self._tied([tie.elements for tie in self.program.ties])

    @property
    def trained(self) -> Array:
        """Those of them that have gradients."""
        ties = self.program.ties
        return over(self.held, self.columns.trained) + self._tied([tie.elements * tie.trained for tie in ties])

    @property
    def sharers(self) -> Array:
        """Ranks over which ZeRO shares out the states of each stage, its mean parameter's."""
        plan, ties = self.plan, self.program.ties
        turns_made = gradient_turns(self.placed, ties).sum(axis=1)
        owned = turns_made @ owned_elements(self.program, plan.mesh, self.copies)
        return sharers(self.trained, owned, float(plan.shards * self.copies))

    def _tied(self, elements: Sequence[float]) -> Array | float:
        return copied(self.held, self.program.ties) @ np.array(elements) if elements else 0.0


def schedule_name(name: str, chunks: int) -> str:
    """1F1B over several chunks a stage is the interleaved one."""
    return "interleaved" if chunks > 1 and name == "1f1b" else name


def predict(
    model: ModelSpec, system: System, run: Run, software: Software | None = None, own: Calibration | None = None
) -> Prediction:
    """Count, price, schedule. Pure: the same inputs give the same prediction, and nothing is kept. ``software`` and
    ``own`` stand in for the profile and the calibration file that the run names."""
    chosen = plan(model, system, run)
    made = setting(system, run, chosen.dtype, software, own)
    graph = made.graph(model, chosen.microbatch * chosen.dp)
    placed = placement(graph, chosen.parallel, run.placement, run.expert_imbalance)
    priced = _priced(made.lowered(graph, placed, chosen.mesh), chosen, made)
    draw, breakdown = _single(priced) if chosen.stages == 1 else _pipelined(priced)
    fed = made.fed(graph, chosen.gpus, chosen.mesh.size / chosen.dp, chosen.local_batch)
    if fed is not None:
        breakdown = replace(breakdown, input=max(0.0, float(fed.total) - breakdown.step))
        draw = partial(_beside_input, draw, fed)
    memory_held, away = _footprint(priced)
    return Prediction(
        model,
        system,
        run,
        chosen,
        graph,
        priced.program,
        draw,
        breakdown,
        memory_held,
        _model_flops(graph, made.formats, chosen, run),
        _interval(priced, breakdown),
        made.prices.name,
        unmodelled(priced.program, run),
        (*warnings(chosen, graph, placed), *host_warnings(system, chosen, away)),
        away,
        fed,
        tuple(priced.chunks),
    )


def _beside_input(draw: Callable[[], Timeline], fed: Feeding) -> Timeline:
    """The step, and beside it the next batch as it arrives."""
    seconds = float(fed.total)
    task = Task(f"next batch ({fed.slowest})", "input", seconds, (), "input")
    return Timeline((*draw().events, Event(task, 0.0, seconds)))


def _priced(program: Program, chosen: Plan, made: Setting) -> _Priced:
    run, pieces, fabric = made.run, chosen.stages * chosen.parallel.chunks, made.fabric
    network = Network(made.system, chosen.mesh, fabric.algorithm, fabric.rates, fabric.own, fabric.host)
    program = program if run.forward_only else marked(program, run.recompute)
    kernels, table = _tabled(program, network, made)

    def weights(ways: Ways) -> Array:
        return _cut_weights(_turn_times(table, ways, chosen, made), program, chosen, network, made)

    if uneven(run):
        shares = turn_shares(program, run, pieces).items()
        mean = np.sum([weights(Ways.each(len(table.repeat), how)) * share for how, share in shares], axis=0)
        program, chunks = dealt(program, made.cut(program, mean, pieces), run)
        kernels, table = _tabled(program, network, made)
    else:
        chunks = made.cut(program, weights(Ways.of(program)), pieces)
    times = _turn_times(table, Ways.of(program), chosen, made)
    name = schedule_name(run.schedule, chosen.parallel.chunks)
    places = SCHEDULES[name].pieces(chosen.stages, chosen.parallel.chunks) if chosen.stages > 1 else ((0,),)
    placed = turns_placed(len(program.sections), chunks, places)
    return _Priced(program, kernels, times, table, chunks, placed, chosen, made, network)


def _tabled(program: Program, network: Network, made: Setting) -> tuple[KernelTimes, Columns]:
    """Kernels and collectives priced, and added up by section."""
    kernels = made.prices.times([counted.kernel for section in program.sections for counted in section.kernels])
    bare = replace(network, host=0.0)
    waited = np.array([bare.time(one.operation, (one.axis,), one.payload_bytes) for _, one in collectives(program)])
    sizes = [section_figures(program, name) for name in BYTES]
    return kernels, columns(program, kernels.total, kernels.host, waited, sizes, call=made.call)


def _turn_times(table: Columns, ways: Ways, chosen: Plan, made: Setting) -> TurnTimes:
    """Turns with what they recompute and what travels to the host beside them."""
    times = recomputed(table, ways)
    if not made.offload.parts or made.run.forward_only:
        return times
    shares = Shares.of(chosen.parallel.zero, chosen.shards, chosen.microbatches)
    return streamed(times, table, made.offload, made.formats, shares)


def _cut_weights(times: TurnTimes, program: Program, chosen: Plan, network: Network, made: Setting) -> Array:
    """Seconds of one turn of each section, by which a network is cut: with its gathers where they are waited for."""
    zero, mesh, sections = chosen.parallel.zero, chosen.mesh, program.sections
    if zero < 3 or chosen.stages == 1 or chosen.shards == 1:
        return times.turn
    learned = made.formats.gradient
    gather, _ = _section_gathers(program, network, made)
    sent = [
        sum(
            network.time(*owed)
            for g in one.gradients
            for owed in gradient_exchange(zero, g.axes, g.elements * learned, mesh)
        )
        for one in sections
    ]
    goes_back = np.array([one.goes_back for one in sections])
    return waited_turns(times, gather, np.array(sent), goes_back)


def _section_gathers(program: Program, network: Network, made: Setting) -> Array:
    """Seconds in which the parameters of one turn of each section are gathered where they are sharded, and their
    bytes: (2, sections)."""
    found = np.zeros((2, len(program.sections)))
    for axes, elements in gathered_shares(program, network.mesh, 1, frozen=True).items():
        sizes = elements[: found.shape[1]] * made.formats.parameter
        found += np.stack([[network.time("all_gather", axes, size) for size in sizes.tolist()], sizes])
    return found


def _single(priced: _Priced) -> tuple[Callable[[], Timeline], Breakdown]:
    """No pipeline: gradient buckets travel beside the backward pass."""
    zero, ranks, program, times = priced.plan.parallel.zero, priced.plan.shards, priced.program, priced.times
    buckets = Buckets(
        priced.run.bucket, priced.setting.formats.gradient, priced.setting.overlapped, zero == 3 and ranks > 1
    )
    parts = np.zeros((2, len(program.sections)))
    if buckets.sharded:
        parts = _section_gathers(program, priced.network, priced.setting)
    gathers = parts[0]
    gather = dict(zip((section.name for section in program.sections), parts.T.tolist(), strict=True))

    def bucket(over_axes: Axes, size: float) -> float:
        return _gradient_time(priced, over_axes, size)

    earlier = times
    if buckets.overlapped or buckets.sharded:
        times = crowded(
            times, gathers, _gradient_seconds(program, bucket, buckets), priced.setting.software.overlap.contention
        )
        earlier = times if buckets.sharded else earlier
    gathered = _state_gathers(priced, over(priced.held, times.forwards))
    collected = float(gathered.exposed[0])
    update = float(_updates(priced)[0]) + collected
    ends: list[tuple[Numeric, Numeric]] = []
    beside = 0.0
    for last in (False, True):
        order = turns(program, buckets, last=last)
        sent = [sum(bucket(*one) for one in turn.buckets) for turn in order]
        start = 0.0 if not last else (priced.plan.microbatches - 1) * max(map(float, ends[0]))
        used = times if last else earlier
        ends.append(walk(order, used.forwards, used.backwards + used.weights, gathers, sent, start))
        beside = float(sum(sent) + sum(gathers[turn.section] for turn in order if turn.gathers))
    end = max(map(float, ends[1])) + update

    def draw() -> Timeline:
        each = _section_times(times), _section_times(earlier)
        prices = Prices(*each, partial(_counts, priced), bucket, gather)
        return step_timeline(program, prices, microbatches=priced.plan.microbatches, buckets=buckets, update=update)

    return draw, _breakdown(priced, 0, end, beside + collected + float(gathered.hidden[0]))


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
    chosen, schedule = priced.plan, priced.schedule
    pieces = chosen.parallel.chunks
    check(schedule.name, chosen.stages, pieces, chosen.microbatches)
    sent, chunk_times = _sends(priced), _chunk_times(priced)
    sends = sent.sum(axis=1) / schedule.copies
    forward, backward, weights = chunk_times.seconds.sum(axis=2) / schedule.copies
    passes = Passes(forward + sends, backward + sends, weights)
    sums, gathers = _exchanges(priced, passes), _state_gathers(priced, passes.forward)
    exchanges, updates = sums.exposed + _tied_sums(priced), _updates(priced)
    tails = exchanges + updates + gathers.exposed
    end = float((stage_ends(schedule, passes, chosen.microbatches, pieces) + tails).max())
    busiest = int(np.argmax(passes.forward + passes.backward + passes.weights))

    def draw() -> Timeline:
        places = schedule.pieces(chosen.stages, pieces)
        chunks = [
            [_chunk_time(priced, priced.chunks[piece], *one) for piece, *one in zip(*stage, strict=True)]
            for stage in zip(places, sent.tolist(), *chunk_times.seconds.tolist(), strict=True)
        ]
        after = {"exchange": exchanges, "update": updates, "gather": gathers.exposed}
        follows = [
            Task(what, f"stage{stage}", seconds, (), what)
            for what, times_after in after.items()
            for stage, seconds in enumerate(times_after.tolist())
            if seconds > 0
        ]
        return pipeline_timeline(schedule.name, chunks, chosen.microbatches, follows)

    waits, beside = (float(one[busiest]) * chosen.microbatches for one in (chunk_times.waits, chunk_times.beside))
    exposed = float(tails[busiest]) + waits
    hidden = float((sums.hidden + gathers.hidden)[busiest]) + max(0.0, beside - waits)
    return draw, _breakdown(priced, busiest, end, exposed + hidden, float(sends[busiest]), hidden)


def _sends(priced: _Priced) -> Array:
    """Seconds in which each chunk of each stage hands its output on; the stage waits for that, as Megatron's does:
    (stages, chunks). Ranks of tp send their shares and gather."""
    schedule, stages, chunks = priced.schedule, priced.plan.stages, priced.plan.parallel.chunks
    split = 1 if priced.plan.parallel.sequence_parallel else priced.plan.mesh.degree("tp")

    def seconds(piece: int) -> float:
        last = priced.program.sections[priced.chunks[piece][-1][0]]
        return priced.network.time("send_recv", ("pp",), last.output_bytes / split)

    pieces, sent = schedule.pieces(stages, chunks), np.array(schedule.hands_on(stages, chunks))
    return np.where(sent, [[seconds(piece) for piece in held] for held in pieces], 0.0)


@dataclass(frozen=True, slots=True)
class _ChunkTimes:
    """Seconds of the three passes of each chunk with their collectives, (3, stages, chunks); of a microbatch's gathers
    and scatters of sharded parameters, (stages,), and how much longer they make its passes."""

    seconds: Array
    beside: Array
    waits: Array


def _chunk_times(priced: _Priced) -> _ChunkTimes:
    """Passes of one microbatch, sends left out."""
    times, none = priced.times, np.zeros(priced.plan.stages)
    plain = np.stack([priced.placed @ one for one in (times.forwards, times.backwards, times.weights)])
    if not priced.sharded:
        return _ChunkTimes(plain, none, none)
    made, mesh, program, copies = priced.setting, priced.plan.mesh, priced.program, priced.copies
    turn = turn_of_each(priced.held, program.ties)
    elements = turn @ gathered_elements(program)
    gather = _gathers(priced, turn, frozen=True)
    shares = gradient_shares(program, mesh, copies)
    sent = _gradient_sums(priced, {axes: turn @ one for axes, one in shares.items()}, elements)
    late = np.zeros(priced.placed.shape[:2])
    if not made.overlapped:
        late, sent = _gradient_sums(priced, gradient_elements(program, priced.placed, mesh, copies), late), 0.0 * sent
    slow = crowded(times, gather, sent, made.software.overlap.contention)
    figures = [np.broadcast_to(one, gather.shape) for one in (slow.forwards, slow.backwards, slow.weights)]
    goes_back = np.array([section.goes_back for section in program.sections])
    seconds = np.zeros_like(plain)
    for stage, pieces in enumerate(priced.schedule.pieces(priced.plan.stages, priced.plan.parallel.chunks)):
        here = Figures(*(one[stage] for one in (*figures, gather, sent)))
        for chunk, piece in enumerate(pieces):
            seconds[:, stage, chunk] = sharded_passes(
                priced.chunks[piece],
                here,
                elements[stage] > 0,
                goes_back,
                splits=priced.schedule.splits_backward,
                late=late[stage, chunk],
            )
    beside = (priced.made * (gather * (1.0 + goes_back) + sent)).sum(axis=1) + late.sum(axis=1) / copies
    return _ChunkTimes(seconds, beside, (seconds - plain).sum(axis=(0, 2)) / copies)


def _gradient_sums(priced: _Priced, elements: dict[Axes, Array], none: Array) -> Array:
    """Seconds in which gradients are summed over their replicas: like ``elements`` by axes, (stages, …)."""
    width, plan = priced.setting.formats.gradient, priced.plan
    exchanges = (gradient_exchange(plan.parallel.zero, axes, n * width, plan.mesh) for axes, n in elements.items())
    return np.asarray(sum((_grouped(priced, *one) for owed in exchanges for one in owed), np.zeros_like(none)))


def _chunk_time(
    priced: _Priced, chunk: Chunk, send: float, forward: float, backward: float, weights: float
) -> StageTime:
    """One microbatch through one chunk, sends and collectives with it."""
    sections = priced.program.sections
    counted = [
        [sum(turns_here * _done(priced, sections[i], phases)[k] for i, turns_here in chunk) for phases in _PASSES]
        for k in (0, 1)
    ]
    flops, moved = ((one[0], one[1], one[2]) for one in counted)
    return StageTime(forward + send, backward + send, weights, 0.0, flops, moved)


#: The squared norm of the gradients is exchanged as one fp32 number.
NORM_BYTES = 4.0
#: Phases of kernels in the passes of a pipeline.
_PASSES = (("forward",), ("again", "backward"), ("backward_weight",))


def _done(priced: _Priced, section: Section, phases: Sequence[str]) -> tuple[float, float]:
    """FLOP and bytes of a turn's kernels in some phases; ``again`` is what is recomputed."""
    flops = moved = 0.0
    for counted in section.kernels:
        kernel = counted.kernel
        times = counted.times * ((kernel.phase in phases) + ("again" in phases) * (runs(section, counted) - 1))
        flops, moved = flops + times * kernel.flops, moved + times * kernel.bytes
    return flops, moved


def _counts(priced: _Priced, section: Section, direction: Direction) -> tuple[float, float, float]:
    """FLOP and bytes of a turn's kernels in one direction, and bytes of the collectives that it waits for."""
    phases = ("forward",) if direction == "forward" else ("again", "backward", "backward_weight")
    waited = (one for one in section.transfers if not one.overlapped and one.phase == direction)
    return *_done(priced, section, phases), sum(one.payload_bytes * one.times for one in waited)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Seconds of collectives that each stage waits for after its passes, and of those that its passes hide."""

    exposed: Array
    hidden: Array


def _exchanges(priced: _Priced, passes: Passes) -> _Sums:
    """The gradients of each stage, summed over their replicas: behind the last passes where the software overlaps.
    Those of sharded parameters have gone out with every microbatch."""
    made, none = priced.setting, np.zeros((priced.plan.stages, 1))
    if priced.sharded:
        return _Sums(none[:, 0], none[:, 0])
    elements = gradient_elements(priced.program, priced.placed, priced.plan.mesh, priced.copies)
    if not made.overlapped:
        elements = {axes: count.sum(axis=1, keepdims=True) for axes, count in elements.items()}
    seconds = none + _gradient_sums(priced, elements, sum(elements.values(), none))
    if not made.overlapped:
        return _Sums(seconds[:, 0], none[:, 0])
    buckets = sendings(sum(elements.values(), none) * made.formats.gradient, priced.run.bucket)
    chunks, contention = priced.plan.parallel.chunks, made.software.overlap.contention
    exposed = exposed_exchange(seconds, buckets, priced.schedule, passes, chunks, contention)
    return _Sums(exposed, seconds.sum(axis=1) - exposed)


def _grouped(priced: _Priced, operation: str, axes: Axes, sizes: Array) -> Array:
    """Seconds of a collective of each stage over its replicas, those in other copies too: ``sizes`` (stages, …)."""
    found, times = np.zeros(sizes.shape), priced.network.fabric.times
    flat = sizes.reshape(len(sizes), -1)
    for groups in replica_groups(priced.plan.mesh, axes, priced.copies):
        strides, ranks = (np.repeat(one, flat.shape[1]) for one in groups)
        found = np.maximum(found, times(operation, strides, ranks, flat.ravel()).reshape(sizes.shape))
    return found


def _tied_sums(priced: _Priced) -> Array:
    """Seconds in which the two stages that hold a tied parameter sum its gradients, after all others."""
    found, mesh = np.zeros(priced.plan.stages), priced.plan.mesh
    if priced.run.forward_only:
        return found
    for tie, owner, other in tied_pairs(priced.program.ties, priced.held):
        stride = mesh.stride(("pp",)) * abs(other - owner)
        size = priced.program.ties[tie].elements * priced.setting.formats.gradient
        found[[owner, other]] += priced.network.fabric.times(
            "all_reduce", np.array([stride]), np.array([2]), np.array([size])
        )
    return found


def _gradient_time(priced: _Priced, axes: Axes, size: float) -> float:
    """Seconds in which a rank's gradients are summed over ``axes``."""
    owed = gradient_exchange(priced.plan.parallel.zero, axes, size, priced.plan.mesh)
    return sum(priced.network.time(operation, over_axes, payload) for operation, over_axes, payload in owed)


def gradient_exchange(zero: int, axes: Axes, size: Numbers, mesh: Mesh) -> tuple[tuple[str, Axes, Numbers], ...]:
    """The collectives that sum gradients of ``size`` bytes, with their axes and payloads.

    Where a shard group is smaller than the replicas its ranks first scatter the sum, and each shard is then summed over
    the groups (HSDP: Zhao et al., PyTorch FSDP, VLDB 2023, section 3.2.2).
    """
    if not zero or mesh.degree("shard") == 1 or "shard" not in axes:
        return ((gradient_operation(zero), axes, size),)
    others = tuple(axis for axis in axes if axis != "shard")
    return ("reduce_scatter", ("shard",), size), ("all_reduce", others, size / mesh.degree("shard"))


def gradient_operation(zero: int) -> str:
    """Sharded states need only each rank's shard of the sum."""
    return "reduce_scatter" if zero else "all_reduce"


def _gathers(priced: _Priced, turns: Array, *, frozen: bool) -> Array:
    """Seconds in which stages gather the parameters of ``turns`` (stages, …, sections and ties), ``frozen`` ones too:
    (stages, …)."""
    found, width = np.zeros(turns.shape[:-1]), priced.setting.formats.parameter
    for axes, elements in gathered_shares(priced.program, priced.plan.mesh, priced.copies, frozen=frozen).items():
        found += _grouped(priced, "all_gather", axes, turns @ elements * width)
    return found


def _state_gathers(priced: _Priced, forward: Array) -> _Sums:
    """With sharded states (ZeRO-1, ZeRO-2) every rank collects the parameters that the others updated: behind the next
    step's first pass, ``forward`` long on each stage, where the software overlaps that."""
    none = np.zeros(priced.plan.stages)
    if priced.plan.parallel.zero not in (1, 2) or priced.run.forward_only:
        return _Sums(none, none)
    made = priced.setting
    sizes = priced.trained * made.formats.parameter
    seconds = _gathers(priced, gradient_turns(priced.placed, priced.program.ties).sum(axis=1), frozen=False)
    if not made.gathers_ahead:
        return _Sums(seconds, none)
    exposed = exposed_gather(seconds, sendings(sizes, priced.run.bucket), forward, made.software.overlap.contention)
    return _Sums(exposed, seconds - exposed)


def _updates(priced: _Priced) -> Array:
    """Seconds of the optimizer on each stage; sharded states divide its work."""
    if priced.run.forward_only:
        return np.zeros(priced.plan.stages)
    made, zero = priced.setting, priced.plan.parallel.zero
    counts = priced.trained / (priced.sharers if zero else 1.0)
    if made.offload.holds("optimizer"):
        behind = over(priced.made, priced.times.backwards + priced.times.weights)
        own = host_update(counts, behind, made.optimizer, made.formats, made.offload)
        return own + made.clipped(counts) + _norm_exchange(priced)
    tensors = over(priced.held, section_figures(priced.program, "tensors"))
    return made.updated(counts, tensors) + made.clipped(counts) + _norm_exchange(priced)


def _norm_exchange(priced: _Priced) -> float:
    """Seconds in which ranks sum up the norm of all gradients: one number."""
    if priced.setting.clip == "none":
        return 0.0
    return priced.network.time("all_reduce", clip_axes(priced.plan.parallel.zero), NORM_BYTES)


def _breakdown(
    priced: _Priced, stage: int, step: float, beside: float, sends: float = 0.0, behind: float = 0.0
) -> Breakdown:
    """The seconds of one stage by what they went into; what is left of the step is exposed communication or bubble.

    ``beside``: buckets and gathers of the step, or what follows a pipeline, ``behind`` seconds of it behind its passes;
    ``sends``: of one microbatch, one way.
    """
    held = priced.made[stage]
    turns_made = [
        counted.times * held[index] * runs(section, counted)
        for index, section in enumerate(priced.program.sections)
        for counted in section.kernels
    ]
    times = np.array(turns_made, dtype=float) * priced.plan.microbatches
    kernels = priced.kernels
    turn = priced.times.forward + priced.times.backward + priced.times.weights
    waiting = float(held @ turn) * priced.plan.microbatches - float((kernels.total * times).sum())
    launch = float((kernels.launch * times).sum()) + max(0.0, waiting)
    work = (kernels.total - kernels.launch) * times
    arithmetic, moving = float(work[kernels.arithmetic].sum()), float(work[~kernels.arithmetic].sum())
    update = float(_updates(priced)[stage])
    computing = arithmetic + moving + launch + update
    waited = float(held @ (priced.times.forward_transfers + priced.times.backward_transfers)) * priced.plan.microbatches
    hidden = float(held @ priced.columns.hidden) * priced.plan.microbatches
    if priced.plan.stages == 1:
        total = waited + hidden + beside
        exposed = max(0.0, step - computing) if total else 0.0  # without any it is what rounding leaves
        total = max(total, exposed)  # what computation loses to collectives beside it counts, too
        return Breakdown(arithmetic, moving, launch, exposed, total, 0.0, update, 0.0)
    talking = waited + 2 * sends * priced.plan.microbatches + beside - update
    exposed = talking - behind
    bubble = max(0.0, step - computing - exposed)
    return Breakdown(arithmetic, moving, launch, exposed, talking + hidden, bubble, update, 0.0)


def _footprint(priced: _Priced) -> tuple[Footprint, float]:
    """What the fullest stage holds, and what a device holds in its host's memory, the mean of all stages."""
    chosen, run, formats = priced.plan, priced.run, priced.setting.formats
    times, training = priced.times, not run.forward_only
    turn = turn_of_each(priced.held, priced.program.ties)
    largest = (turn @ gathered_elements(priced.program) * (priced.held > 0)).max(axis=1)
    kept = states(
        priced.parameters,
        priced.trained,
        largest,
        priced.sharers,
        chosen.parallel.zero,
        priced.setting.optimizer,
        formats,
        training=training,
    )
    kept, away = divided(kept, priced.setting.offload, largest, formats)
    living = alive(priced.schedule, chosen.stages, chosen.microbatches, chosen.parallel.chunks) * training
    activations = over(priced.held, times.kept) * living
    bucket = run.bucket if chosen.dp * priced.copies > 1 and training else 0.0
    work = workspace(priced.held, priced.columns.largest_output_bytes, times.transient, bucket)
    reserved = priced.setting.reserved(chosen.mesh)
    fullest = int(np.argmax(memory(kept, activations, work)))
    return Footprint(
        parameters=float(kept.parameters[fullest]),
        gradients=float(kept.gradients[fullest]),
        optimizer=float(kept.optimizer[fullest]),
        activations=float(activations[fullest]),
        workspace=float((work + kept.gathered)[fullest]) + reserved,
        reserved=reserved,
        capacity=priced.setting.system.device.memory.capacity,
    ), float((away + over(priced.held, times.away) * living).mean())


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
