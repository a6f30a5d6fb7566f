"""The passes of pipeline stages.

Arrays have the stages along their first axis (their chunks along the second, where they are told apart) and the cases
along the last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paleo.schedules.base import Passes
from paleo.step.batch import Batch
from paleo.step.layouts import Layouts
from paleo.step.section_times import LayerTimes, contended, over
from paleo.step.sharded_parameters import ShardedFigures, sharded_passes, waited_iterations
from paleo.step.single_stage import section_gathers
from paleo.step.stages import layer_parameters

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class ShardedChunks:
    """Passes of stages whose parameters or gradients are sharded: seconds of each chunk with gathers and scatters that
    are waited for, (3 passes, stages, chunks, cases), and seconds of all gathers and scatters of a microbatch, (stages,
    cases)."""

    passes: Array
    communication: Array


def stage_passes(batch: Batch) -> Passes:
    """Seconds of one microbatch through all chunks of each stage, with the sends that it waits for: (stages, cases)
    each."""
    return batch.shared.once(("passes", *_passes_key(batch)), lambda: _stage_passes(batch))


def _passes_key(batch: Batch) -> tuple[object, ...]:
    """What passes of the same cases and assignment depend on."""
    if batch.scattered:
        return batch.sharding, batch.overlapped, batch.schedule.splits_backward
    return ("offload", batch.zero) if batch.backend.offload.parts else ("plain",)


def _stage_passes(batch: Batch) -> Passes:
    sent = sends(batch)
    forward, backward, weights = _computed(batch)
    return Passes(forward + sent, backward + sent, weights)


def _computed(batch: Batch) -> tuple[Array, Array, Array]:
    """Passes without sends: (stages, cases) each."""
    if batch.scattered:
        forward, backward, weights = sharded_chunks(batch).passes.sum(axis=2) / batch.assignment.copies
        return forward, backward, weights
    times, computed = batch.times, batch.assignment.computed
    return over(computed, times.forwards), over(computed, times.backwards), over(computed, times.weights)


def chunk_passes(batch: Batch) -> Array:
    """Seconds of one microbatch through each chunk of each stage, sends left out: (3 passes, stages, chunks, cases)."""
    if batch.scattered:
        return sharded_chunks(batch).passes
    times, placed = batch.times, batch.assignment.placed
    return np.stack([over(placed, each) for each in (times.forwards, times.backwards, times.weights)])


def sends(batch: Batch) -> Array:
    """Seconds in which each stage sends the outputs of its chunks on, one microbatch and way; the stage waits for that,
    as Megatron's does: (stages, cases)."""
    seconds = np.zeros((batch.assignment.stages, len(batch)))
    for section in np.flatnonzero(batch.assignment.sends.any(axis=0)).tolist():
        seconds += batch.assignment.sends[:, section, None] * batch.cases.send(section)
    return seconds


def chunk_sends(batch: Batch) -> Array:
    """Seconds in which each chunk of each stage sends its output on, one microbatch and way: (stages, chunks,
    cases)."""
    assignment, schedule = batch.assignment, batch.schedule
    leaves = schedule.hands_on(assignment.stages, assignment.chunks)
    seconds = np.zeros((*assignment.placed.shape[:2], len(batch)))
    for stage, pieces in enumerate(schedule.pieces(assignment.stages, assignment.chunks)):
        for chunk, piece in enumerate(pieces):
            if leaves[stage][chunk]:
                seconds[stage, chunk] = batch.cases.send(assignment.pieces[piece][-1][0])
    return seconds


def stage_ends(batch: Batch) -> Array:
    """When each stage has done its passes: (stages, cases)."""
    key = "ends", batch.ends, batch.schedule.name, *_passes_key(batch)
    return batch.shared.once(key, lambda: _stage_ends(batch))


def _stage_ends(batch: Batch) -> Array:
    passes, chunks = stage_passes(batch), batch.assignment.chunks
    if batch.ends == "closed" or batch.schedule.closed.exact == "any":
        return batch.schedule.stage_ends(passes, batch.microbatches, chunks)
    forward, backward, weights = chunk_passes(batch)
    sent = chunk_sends(batch)
    pieces = Passes(forward + sent, backward + sent, weights)
    return batch.schedule.stage_ends(passes, batch.microbatches, chunks, pieces)


def iteration_seconds(times: LayerTimes, layouts: Layouts, layout: Index, *, sharded: bool) -> Array:
    """Seconds of one layer iteration of each section, by which a network is cut, (sections, cases): with the gathers
    and scatters of ``sharded`` parameters that are waited for."""
    if not sharded:
        return times.iteration
    goes_back = np.array([section.goes_back for section in layouts.programs[0].sections])
    sections, width = len(goes_back), layouts.backend.formats.summed
    single = np.eye(sections, sections + len(layouts.programs[0].ties))[None]
    gradients = layouts.sent(single, 1, "gradients", 3, width)[0, 0]
    gather, again = section_gathers(layouts)[:, layout], section_gathers(layouts, "again")[:, layout]
    return waited_iterations(times, gather, again, gradients[:, layout], goes_back)


# sharded parameters


def sharded_chunks(batch: Batch) -> ShardedChunks:
    """Chunks whose layers are gathered for every pass, or whose gradients are scattered after it."""
    return batch.shared.once(_passes_key(batch), lambda: _sharded_chunks(batch))


def _sharded_chunks(batch: Batch) -> ShardedChunks:
    """Stages alike are computed once."""
    assignment, contention = batch.assignment, batch.backend.software.overlap.contention
    parts, gather, regather, sent, late = _sharded_collectives(batch)
    gathered = np.asarray((parts @ batch.layouts.parameters(trained=False)).any(axis=2))
    goes_back = np.array([section.goes_back for section in batch.layouts.programs[0].sections])
    known: dict[tuple[object, ...], Array] = {}
    passes, places = [], batch.schedule.pieces(assignment.stages, assignment.chunks)
    for stage, numbers in enumerate(places):
        pieces = tuple(assignment.pieces[number] for number in numbers)
        key = pieces, parts[stage].tobytes(), stage if assignment.copies > 1 else 0
        if key not in known:
            times = contended(batch.times, gather[stage], sent[stage], contention, regather[stage])
            passes_of = times.forwards, times.backwards, times.weights
            figures = ShardedFigures(*passes_of, gather[stage], regather[stage], sent[stage])
            chunks = [
                sharded_passes(
                    piece, figures, gathered[stage], goes_back, splits=batch.schedule.splits_backward, late=after
                )
                for piece, after in zip(pieces, late[stage], strict=True)
            ]
            known[key] = np.stack([np.stack(np.broadcast_arrays(*chunk)) for chunk in chunks], axis=1)
        passes.append(known[key])
    both = gather + regather * goes_back[:, None]
    communication = np.einsum("ps,psc->pc", assignment.computed, both + sent)
    return ShardedChunks(np.stack(passes, axis=1), communication + late.sum(axis=1) / assignment.copies)


def _sharded_collectives(batch: Batch) -> tuple[Array, Array, Array, Array, Array]:
    """What each stage gathers for a layer of each section, (stages, sections, sections and ties); seconds of these
    gathers before the forward and before the backward pass, and of the sums of their gradients during the passes,
    (stages, sections, cases); and of the sums that come after the last pass of each chunk, (stages, chunks, cases)."""
    layouts, assignment, formats = batch.layouts, batch.assignment, batch.backend.formats
    parts = layer_parameters(assignment.layers, layouts.programs[0].ties)
    copies = assignment.copies
    gather = batch.taken(layouts.sent(parts, copies, "all", 3, formats.parameter)[0])
    gather = gather if batch.sharded else np.zeros_like(gather)
    again = gather
    if batch.sharded and layouts.regathers:
        again = batch.taken(layouts.sent(parts, copies, "again", 3, formats.parameter)[0])
    if batch.overlapped:
        late = np.zeros((*assignment.placed.shape[:2], len(batch)))
        return parts, gather, again, batch.taken(layouts.sent(parts, copies, "gradients", 3, formats.summed)[0]), late
    after, _ = layouts.exchange(assignment, 3, chunks=True)
    return parts, gather, again, np.zeros_like(gather), batch.taken(after)
