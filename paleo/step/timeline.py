"""The timeline of one configuration: the passes of its step as tasks on streams, or on the stages of a pipeline.

Without a pipeline, gradient buckets are sent on a separate stream as soon as the backward pass has filled them. A run
may also exchange gradients after that pass. Sharded parameters are gathered before the section (run of equal layers)
that needs them. All microbatches but the last are one task, as they are equal.

Exposed collectives of layers are listed by name (`_exposed_section_collectives`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from paleo.lowering.stages_and_recompute import ModelChunk, kernel_runs_per_microbatch
from paleo.schedules.pipeline_simulation import (
    ChunkPassTimes,
    Task,
    TaskEvent,
    Timeline,
    pipeline_events,
    simulate_tasks,
)
from paleo.step.pipeline import chunk_pass_times, chunk_send_times, stage_end_times, stage_pass_times
from paleo.step.section_times import LayerTimes, collective_times, enumerate_collectives
from paleo.step.step import StepPredictions, straggler_wait_time
from paleo.step.streams import (
    Direction,
    LayerIteration,
    bucket_settings,
    contended_layer_times,
    exposed_parameter_gather_times,
    gradient_bucket_exchange_times,
    layer_iterations,
    section_gather_times_and_bytes,
    stream_end_times,
    time_after_last_bucket,
    time_after_passes,
    update_times,
)

if TYPE_CHECKING:
    from paleo.lowering.program import LayerCollective, Program, Section
    from paleo.step.configuration_batch import ConfigurationBatch
    from paleo.step.waiting import InputPipeline

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _NamedCollective:
    """Collective in a timeline: name, exposed time (``seconds``) [s] and payload (``bytes``) [byte]."""

    name: str
    seconds: float
    bytes: float


def _exposed_section_collectives(
    batch: ConfigurationBatch, program: Program
) -> list[dict[Direction, list[_NamedCollective]]]:
    """List the exposed collectives of one layer of each section (run of equal layers), by direction.

    The exposed time of a section is divided among its collectives in proportion to their times.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations, of which the first one is used.
    program : Program
        Kernels and collectives of one rank.

    Returns
    -------
    list[dict[Direction, list[_NamedCollective]]]
        For each section the collectives of its forward and backward pass.
    """
    payloads = np.array([[each.payload_bytes] for _, each in enumerate_collectives(program)]).reshape(-1, 1)
    [priced] = collective_times(batch.backend.fabric, [(batch.layouts.meshes[0], program)], [payloads])
    alone: list[list[tuple[LayerCollective, float]]] = [[] for _ in program.sections]
    for (section, transfer), seconds in zip(enumerate_collectives(program), priced[:, 0].tolist(), strict=True):
        alone[section].append((transfer, seconds * transfer.calls_per_iteration))
    forward, backward = batch.layer_times.forward_transfers[:, 0], batch.layer_times.backward_transfers[:, 0]
    return [
        {
            "forward": _exposed_collectives(section, alone[row], "forward", float(forward[row])),
            "backward": _exposed_collectives(section, alone[row], "backward", float(backward[row])),
        }
        for row, section in enumerate(program.sections)
    ]


def _exposed_collectives(
    section: Section, transfers: list[tuple[LayerCollective, float]], direction: Direction, total: float
) -> list[_NamedCollective]:
    """List the exposed collectives of a section's forward or backward pass, with times that add up to ``total`` [s].

    The backward direction includes forward collectives that full recomputation repeats. Time without any collective is
    offload traffic.
    """
    again = direction == "backward" and section.recompute_policy == "full"
    owed = [(each, s) for each, s in transfers if each.phase == direction or (again and each.recomputed)]
    known = sum(seconds for _, seconds in owed)
    if total <= 0:
        return []
    if known == 0:
        return [_NamedCollective(f"{section.name}: host memory", total, 0.0)]
    return [
        _NamedCollective(f"{each.name} {each.operation} over {each.axis}", s * total / known, each.payload_bytes)
        for each, s in owed
        if s > 0
    ]


def _chunk_collectives(batch: ConfigurationBatch, program: Program) -> list[list[dict[str, list[_NamedCollective]]]]:
    """List the exposed collectives of each pass of each chunk of each stage, by kind of pass (F, B, W)."""
    by_section, assignment = _exposed_section_collectives(batch, program), batch.assignment
    kinds: tuple[tuple[str, Direction], ...] = (("F", "forward"), ("B", "backward"))
    passes = [
        {kind: _of_piece(by_section, piece, direction) for kind, direction in kinds} | {"W": []}
        for piece in assignment.model_chunks
    ]
    places = batch.schedule.stage_chunks(assignment.stages, assignment.chunks_per_stage)
    return [[passes[piece] for piece in pieces] for pieces in places]


def _of_piece(
    by_section: list[dict[Direction, list[_NamedCollective]]], piece: tuple[tuple[int, int], ...], direction: Direction
) -> list[_NamedCollective]:
    """List the exposed collectives of all layers of a model chunk, each name once per section."""
    return [
        _NamedCollective(each.name, each.seconds * layers, each.bytes * layers)
        for section, layers in piece
        for each in by_section[section][direction]
    ]


#: Names of the streams of a device.
COMPUTE_STREAM, _COMMUNICATION_STREAM = "compute", "communication"
_FIRST = np.zeros(1, dtype=np.intp)
#: Kinds of tasks that overlap with computation.
_OVERLAPPING = frozenset({"bucket", "gather"})
#: Phases of kernels in the passes of a pipeline; ``again`` means recomputation.
_PASSES = (("forward",), ("again", "backward"), ("backward_weight",))


def step_timeline(steps: StepPredictions, program: Program, arriving: InputPipeline | None) -> Timeline:
    """Build the timeline of one step, with the arrival of the next training batch.

    Parameters
    ----------
    steps : StepPredictions
        Step times of a batch, of which the first configuration is used.
    program : Program
        Kernels and collectives of one rank.
    arriving : InputPipeline, optional
        Times in which the input pipeline delivers a batch; None for synthetic data.

    Returns
    -------
    Timeline
        Events (passes, collectives, update, waits) with start and end [s].
    """
    batch = steps.batch
    line = _streams(batch, program) if batch.assignment.stages == 1 else _pipeline(batch, program)
    events = list(line.events)
    if arriving is not None:
        seconds = float(arriving.batch_interval)
        task = Task(f"next batch ({arriving.slowest_stage})", "input", seconds, (), "input")
        events.append(TaskEvent(task, 0.0, seconds))
    waited = float(straggler_wait_time(batch)[0])
    if waited > 0:
        end = max(event.end for event in events)
        wait = Task("waits for the slowest rank", _COMMUNICATION_STREAM, waited, (), "wait")
        events.append(TaskEvent(wait, end, end + waited))
    return Timeline(tuple(events))


# one stage


@dataclass(frozen=True, slots=True)
class _Iterations:
    """The layers of one microbatch in order, with the times from which timeline tasks are built.

    ``bucket_send_times`` is the time of the gradient buckets after each iteration [s]. ``gathers`` holds, by direction
    and section, the time [s] and the bytes of the parameter gather.
    """

    program: Program
    order: list[LayerIteration]
    bucket_send_times: list[float]
    times: LayerTimes
    gathers: dict[Direction, list[tuple[float, float]]]
    collectives: list[dict[Direction, list[_NamedCollective]]]


#: Kind of parameter gather before each pass.
_GATHERS: dict[Direction, Literal["all", "again"]] = {"forward": "all", "backward": "again"}


def _streams(batch: ConfigurationBatch, program: Program) -> Timeline:
    """Build the timeline of a step without a pipeline, on a compute stream and a communication stream."""
    buckets = bucket_settings(batch)
    free, share = batch.layer_times.select_configurations(_FIRST), stream_end_times(batch).contention_share[_FIRST]
    times = contended_layer_times(batch, _FIRST).with_slowdown_share(free, share)
    gathers = {direction: [(0.0, 0.0)] * len(program.sections) for direction in _GATHERS}
    if buckets.shards_parameters:
        for direction, content in _GATHERS.items():
            gathers[direction] = section_gather_times_and_bytes(batch.layouts, content)[:, :, 0].T.tolist()
    tasks: list[Task] = []
    count, sent = int(batch.microbatches[0]), list[int]()
    collectives = _exposed_section_collectives(batch, program)
    for last in (False, True):
        order = layer_iterations(program, buckets, last=last)
        seconds = gradient_bucket_exchange_times(batch, [(0, order)])[:, 0].tolist()
        taken = times.last_microbatch if last else times.earlier_microbatches
        microbatch_work = _Iterations(program, order, seconds, taken, gathers, collectives)
        if last:
            sent = _add_microbatch(tasks, microbatch_work)
        elif count > 1:
            earlier: list[Task] = []
            _add_microbatch(earlier, microbatch_work)
            total = simulate_tasks(earlier).end_time * (count - 1)
            tasks.append(Task(f"{count - 1} earlier microbatches", COMPUTE_STREAM, total, (), "accumulate"))
    update = float(time_after_last_bucket(batch)[0])
    if update > 0:
        tasks.append(Task("update", COMPUTE_STREAM, update, (*_last(tasks), *sent), "update"))
    return simulate_tasks(tasks)


def _add_microbatch(tasks: list[Task], microbatch: _Iterations) -> list[int]:
    """Add the timeline tasks of one microbatch, and return the positions of its gradient buckets.

    A gather starts when the iteration before the last has ended, so that the weights of two iterations exist at once.
    """
    sent: list[int] = []
    issued: tuple[int, ...] = ()
    for iteration, seconds in zip(microbatch.order, microbatch.bucket_send_times, strict=True):
        section = microbatch.program.sections[iteration.section]
        awaited: tuple[int, ...] = ()
        if iteration.waits_for_gather:
            latest, name = _last(tasks), f"weights of {section.name}"
            gathering, moved = microbatch.gathers[iteration.direction][iteration.section]
            tasks.append(Task(name, _COMMUNICATION_STREAM, gathering, issued, "gather", bytes=moved))
            awaited, issued = (len(tasks) - 1,), latest
        _add_iteration(tasks, microbatch, section, iteration, awaited)
        if iteration.buckets:
            size = sum(size for _, size in iteration.buckets)
            name = f"gradients over {' and '.join('+'.join(axes) for axes, _ in iteration.buckets)}"
            tasks.append(Task(name, _COMMUNICATION_STREAM, seconds, _last(tasks), "bucket", bytes=size))
            sent.append(len(tasks) - 1)
    return sent


def _last(tasks: list[Task]) -> tuple[int, ...]:
    """Return the index of the latest task on the compute stream as a tuple; () if there is none."""
    return next(((i,) for i in range(len(tasks) - 1, -1, -1) if tasks[i].kind not in _OVERLAPPING), ())


def _add_iteration(
    tasks: list[Task], microbatch: _Iterations, section: Section, iteration: LayerIteration, awaited: tuple[int, ...]
) -> None:
    """Add the timeline tasks of layers of a section in one direction: one compute task, then exposed collectives."""
    row, times, forward = iteration.section, microbatch.times, iteration.direction == "forward"
    figures = (times.forward,) if forward else (times.backward, times.weight_gradients)
    seconds = float(sum(figure[row, 0] for figure in figures))
    phases = ("forward",) if forward else ("again", "backward", "backward_weight")
    flops, moved = (iteration.layer_count * work for work in _work(section, phases))
    duration, before = seconds * iteration.layer_count, (*_last(tasks), *awaited)
    tasks.append(Task(section.name, COMPUTE_STREAM, duration, before, iteration.direction, flops, moved))
    for waited in microbatch.collectives[row][iteration.direction]:
        duration, size = waited.seconds * iteration.layer_count, waited.bytes * iteration.layer_count
        tasks.append(Task(waited.name, COMPUTE_STREAM, duration, _last(tasks), "transfer", bytes=size))


def _work(section: Section, phases: Sequence[str]) -> tuple[float, float]:
    """Return (FLOP, bytes) of the kernels of one layer in some phases, such as ``forward``."""
    flops = moved = 0.0
    for counted in section.kernels:
        kernel, again = counted.kernel, kernel_runs_per_microbatch(section, counted) - 1
        times = counted.repetitions * ((kernel.phase in phases) + ("again" in phases) * again)
        flops, moved = flops + times * kernel.flops, moved + times * kernel.bytes
    return flops, moved


# stages


def _pipeline(batch: ConfigurationBatch, program: Program) -> Timeline:
    """Build the timeline of pipeline stages, each with its gradient exchange and update after its passes.

    A pass includes its sends and the exposed collectives of its layers, which are listed on a second track of the
    stage.
    """
    assignment, count = batch.assignment, int(batch.microbatches[0])
    places = batch.schedule.stage_chunks(assignment.stages, assignment.chunks_per_stage)
    seconds, sent = chunk_pass_times(batch)[..., 0], chunk_send_times(batch)[..., 0]
    collectives = _chunk_collectives(batch, program)
    chunks = [
        [
            _chunk_time(program, assignment.model_chunks[piece], float(sent[stage, chunk]), seconds[:, stage, chunk])
            for chunk, piece in enumerate(pieces)
        ]
        for stage, pieces in enumerate(places)
    ]
    ends = stage_end_times(batch)[:, 0].tolist()
    events: list[TaskEvent] = []
    for event in pipeline_events(batch.schedule.name, chunks, count, ends):
        stage, chunk = _place(event.task)
        events += _pass_events(event, float(sent[stage, chunk]), collectives[stage][chunk])
    passes, update = stage_pass_times(batch), update_times(batch)
    total, gathers = time_after_passes(batch, passes)[:, 0], exposed_parameter_gather_times(batch, passes)[:, 0]
    for name, after in {"exchange": total - update[:, 0] - gathers, "update": update[:, 0], "gather": gathers}.items():
        for stage, duration in enumerate(after.tolist()):
            if duration > 0:
                task = Task(name, f"stage{stage}", duration, (), name)
                events.append(TaskEvent(task, ends[stage], ends[stage] + duration))
                ends[stage] += duration
    return Timeline(tuple(events))


def _place(task: Task) -> tuple[int, int]:
    """Return the stage and the chunk of a pipeline pass from its task.

    The task is called ``F3.1`` or, with one chunk a stage, ``F3``.
    """
    chunk = task.name.partition(".")[2]
    return int(task.resource.removeprefix("stage")), int(chunk) if chunk else 0


def _pass_events(event: TaskEvent, send: float, collectives: dict[str, list[_NamedCollective]]) -> Iterator[TaskEvent]:
    """Yield the events of one pipeline pass: the pass, the send at its end, and its exposed collectives."""
    task = event.task
    if task.kind not in collectives:
        yield event
        return
    until = event.end - (send if task.kind in ("F", "B") else 0.0)
    yield TaskEvent(replace(task, duration=until - event.start), event.start, until)
    if until < event.end:
        yield TaskEvent(Task(f"send {task.name}", task.resource, send, (), "send"), until, event.end)
    start = until - sum(each.seconds for each in collectives[task.kind])
    for each in collectives[task.kind]:
        track = f"{task.resource} communication"
        named = Task(each.name, track, each.seconds, (), "transfer", bytes=each.bytes)
        yield TaskEvent(named, start, start + each.seconds)
        start += each.seconds


def _chunk_time(program: Program, chunk: ModelChunk, send: float, seconds: Array) -> ChunkPassTimes:
    """Return the time of one microbatch through one model chunk, including sends, for which the stage waits."""
    counted = [[sum(layers * _work(program.sections[i], p)[k] for i, layers in chunk) for p in _PASSES] for k in (0, 1)]
    flops, moved = ((each[0], each[1], each[2]) for each in counted)
    forward, backward, weights = (float(each) for each in seconds)
    return ChunkPassTimes(forward + send, backward + send, weights, 0.0, flops, moved)
