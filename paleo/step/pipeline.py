"""Times of the passes of pipeline stages, with exposed sends and collectives.

Arrays have the stages along their first axis (their chunks along the second, if these are distinguished) and the cases
along the last.

With sharded parameters (ZeRO-3; FSDP's FULL_SHARD) every microbatch gathers each layer before its forward and before
its backward pass, frees it after either, and reduce-scatters its gradients immediately.

As without a pipeline (`paleo.step.streams`), a layer is gathered while the previous one computes, and its gradients are
sent after the next gather. The first gather of a forward pass and the last gradients of a backward pass are exposed.
Between them there is a closed form. A layer i starts at

    start[i + 1] = start[i] + max(compute[i], gradients[i - 1] + gather[i + 1])

and layers without parameters add their times between such layers.

Reference: Zhao et al., PyTorch FSDP, VLDB 2023, sections 3.2 and 3.3. All functions broadcast over arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.schedules.base import PassTimes
from paleo.step.layouts import cached
from paleo.step.memory import StageAssignment, gathered_parameter_mask
from paleo.step.section_times import LayerTimes, sum_per_stage, with_contention
from paleo.step.streams import section_gather_times

if TYPE_CHECKING:
    from paleo.lowering.stages_and_recompute import ModelChunk
    from paleo.step.configuration_batch import ConfigurationBatch
    from paleo.step.layouts import ExchangedTensors, Layouts

Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]


@dataclass(frozen=True)
class ShardedIterationTimes:
    """Times of one layer of each section (run of equal layers) under ZeRO-3, shape (sections, …) [s].

    ``forward``, ``backward`` and ``weight_gradients`` are the passes with their exposed collectives. ``gather`` and
    ``regather`` are the parameter gathers before forward and backward, ``gradient_exchange`` the gradient exchange;
    None for exchanges that do not occur.
    """

    forward: Array
    backward: Array
    weight_gradients: Array
    gather: Array | None
    regather: Array | None
    gradient_exchange: Array | None

    @cached_property
    def full_backward(self) -> Array:
        """Time of a layer's backward pass with the gradients of inputs and weights, shape (sections, …) [s]."""
        return self.backward + self.weight_gradients


@dataclass(frozen=True, slots=True)
class _Unit:
    """One layer whose sharded parameters are gathered, and the layers without parameters that follow it.

    ``gathered_section`` is the section of the first; ``following_sections`` holds (section, number of layers) of the
    others.
    """

    gathered_section: int
    following_sections: tuple[tuple[int, int], ...] = ()

    def _following_seconds(self, figures: Array) -> Array:
        """Return the time of the layers without parameters that follow the gathered one [s]."""
        return np.asarray(sum(count * figures[section] for section, count in self.following_sections))

    def seconds(self, figures: Array) -> Array:
        """Return the time of the gathered layer and of the layers without parameters that follow it.

        Parameters
        ----------
        figures : ndarray, shape (sections, ...)
            Time of one layer of each section (run of equal layers) [s].

        Returns
        -------
        ndarray
            Time [s], with the shape of one section's times.
        """
        gathered: Array = figures[self.gathered_section]
        return gathered + self._following_seconds(figures) if self.following_sections else gathered


#: Units in sequence, each with the number of its repetitions.
_Row = list[tuple[_Unit, int]]


def sharded_chunk_pass_times(
    chunk: ModelChunk, figures: ShardedIterationTimes, gathered: Mask, has_backward: Mask, *, splits: bool
) -> PassTimes:
    """Compute the forward and backward time of a model chunk under ZeRO-3, with exposed gathers and reduce-scatters.

    Parameters
    ----------
    chunk : ModelChunk
        Sections (runs of equal layers) of the chunk, and their numbers of layers.
    figures : ShardedIterationTimes
        Times of one layer of each section, of its gathers and its gradient exchange, (sections, ...) [s].
    gathered : Mask, shape (sections,)
        True for sections with parameters to gather.
    has_backward : Mask, shape (sections,)
        True for sections with a backward pass.
    splits : bool
        True if gradients of weights are computed in a separate pass.

    Returns
    -------
    PassTimes
        Times of forward, backward and weight passes, arrays of shape (...) [s].
    """
    forth, lead = _units(chunk, gathered)
    back, back_lead = _units(chunk[::-1], gathered & has_backward)
    f, before = figures, forth[-1][0].seconds(figures.forward) if forth else 0.0
    forward = _row(forth, f.forward, lead._following_seconds(f.forward), gather=f.gather)
    if not splits:
        last = np.asarray(sum(layers * f.weight_gradients[section] for section, layers in chunk))
        following = back_lead._following_seconds(f.full_backward)
        backward = _row(back, f.full_backward, following, f.regather, f.gradient_exchange, before)
        return PassTimes(forward, backward - last, last)
    backward = _row(back, f.backward, back_lead._following_seconds(f.backward), f.regather, before=before)
    following = back_lead._following_seconds(f.weight_gradients)
    weights = _row(back, f.weight_gradients, following, gradients=f.gradient_exchange)
    return PassTimes(forward, backward, weights)


def _units(order: Sequence[tuple[int, int]], gathers: Mask) -> tuple[_Row, _Unit]:
    """Group the layers of a pass into units, each a layer with parameters and the layers without any that follow.

    Also returns the layers before the first gathered one.
    """
    units: list[tuple[int, int, list[tuple[int, int]]]] = []
    lead: list[tuple[int, int]] = []
    for section, layers in order:
        if gathers[section]:
            units += [(section, layers - 1, [])] * (layers > 1) + [(section, 1, [])]
        else:
            (units[-1][2] if units else lead).append((section, layers))
    row = [(_Unit(section, tuple(following)), layers) for section, layers, following in units]
    return row, _Unit(-1, tuple(lead))


def _row(
    row: _Row,
    compute: Array,
    lead: Array,
    gather: Array | None = None,
    gradients: Array | None = None,
    before: Array | float = 0.0,
) -> Array:
    """Compute the time of layers in sequence under ZeRO-3, with exposed gathers and gradient exchange [s].

    The first gather runs during ``lead``, the layers without parameters at the start, and during the last ``before``
    seconds of the previous pass. The last gradients are exposed. Gradients are sent once their layer and the next
    gather are done. If layers without parameters follow, this is ``early`` seconds before the next unit starts.
    """
    units = _expanded(row)
    if gather is None and gradients is None:
        return np.asarray(lead + sum(times * unit.seconds(compute) for unit, times in units))
    if not row:
        return lead
    zeros = np.zeros(len(compute))
    gather, gradients = zeros if gather is None else gather, zeros if gradients is None else gradients
    seconds = np.maximum(lead, gather[units[0][0].gathered_section] - before)
    sent, early = np.zeros(()), np.zeros(())
    for (unit, times), (following, _) in pairwise(units):
        computing, idle = unit.seconds(compute), unit._following_seconds(compute)
        awaited = np.maximum(sent - early, 0.0) + gather[following.gathered_section]
        seconds = seconds + times * np.maximum(computing, awaited)
        early = np.minimum(idle, np.maximum(computing - awaited, 0.0)) if unit.following_sections else np.zeros(())
        sent = gradients[unit.gathered_section]
    last = units[-1][0]
    computing = compute[last.gathered_section]
    done = np.maximum(computing, sent - early) + gradients[last.gathered_section]
    return np.asarray(seconds + np.maximum(last.seconds(compute), done))


def _expanded(row: _Row) -> _Row:
    """Separate the first of equal units of layers, whose time depends on the unit before."""
    units: _Row = []
    for unit, count in row:
        units += [(unit, 1), (unit, count - 1)] if count > 1 else [(unit, 1)]
    return units


@dataclass(frozen=True, slots=True)
class ShardedChunkPasses:
    """Pass times of pipeline stages with sharded parameters or gradients, with exposed gathers and reduce-scatters.

    ``passes`` has the shape (3 passes, kinds, chunks, cases) [s]; stages with equal layers are of one kind.
    ``stage_kind`` is the kind of each stage, shape (stages,).
    """

    passes: Array
    stage_kind: Index


@cached(lambda batch: _passes_key(batch))
def stage_pass_times(batch: ConfigurationBatch) -> PassTimes:
    """Return the time of one microbatch through all model chunks of each pipeline stage, with exposed sends.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.

    Returns
    -------
    PassTimes
        Times of forward, backward and weight passes, arrays of shape (stages, cases) [s].
    """
    sent = send_times(batch)
    forward, backward, weights = _computed(batch)
    return PassTimes(forward + sent, backward + sent, weights)


def _passes_key(batch: ConfigurationBatch) -> tuple[object, ...]:
    """Return the part of a cache key on which pass times depend besides the cases and the stage assignment."""
    paired = (batch.schedule.name,) if batch.overlaps_token_exchange else ()
    if batch.scatters_every_pass:
        return *paired, batch.sharding, batch.overlaps_gradient_exchange, batch.schedule.splits_backward
    return (*paired, "offload", batch.zero) if batch.backend.offload.parts else (*paired, "plain")


def _computed(batch: ConfigurationBatch) -> tuple[Array, Array, Array]:
    """Return the forward, backward and weight-gradient times of each stage without sends, (stages, cases) each [s]."""
    if batch.scatters_every_pass:
        sharded = sharded_stage_pass_times(batch)
        forward, backward, weights = (sharded.passes.sum(axis=2) / batch.assignment.replicas)[:, sharded.stage_kind]
    else:
        forward, backward, weights = _sums(batch.layer_times, batch.assignment.layers_per_microbatch)
    return forward, backward, weights


def _sums(times: LayerTimes, layers: Array) -> list[Array]:
    """Sum the forward, backward and weight-gradient times of the layers of each stage, or of each of its chunks [s]."""
    passes = times.forward_with_transfers, times.backward_with_transfers, times.weight_gradients
    return [sum_per_stage(layers, seconds) for seconds in passes]


def chunk_pass_times(batch: ConfigurationBatch) -> Array:
    """Return the time of one microbatch through each model chunk of each pipeline stage, without sends.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.

    Returns
    -------
    ndarray, shape (3 passes, stages, chunks, cases)
        Times [s] of forward, input-gradient and weight-gradient passes.
    """
    if batch.scatters_every_pass:
        sharded = sharded_stage_pass_times(batch)
        return sharded.passes[:, sharded.stage_kind]
    return np.stack(_sums(batch.layer_times, batch.assignment.layers_per_chunk))


def send_times(batch: ConfigurationBatch) -> Array:
    """Return the time in which each pipeline stage sends its activations, for one microbatch in one direction.

    The stage waits for its sends, as Megatron's does. If sends block (`blocking_sends` of the software), the receiving
    stage waits, too, so the sends of the previous stage are added.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.

    Returns
    -------
    ndarray, shape (stages, cases)
        Time [s].
    """
    seconds = np.zeros((batch.assignment.stages, len(batch)))
    for section in np.flatnonzero(batch.assignment.output_sends.any(axis=0)).tolist():
        seconds += batch.assignment.output_sends[:, section, None] * batch.cases.send_time(section)
    if batch.backend.software.parallelism.blocking_sends:
        seconds[1:] += seconds[:-1].copy()
    return seconds


def chunk_send_times(batch: ConfigurationBatch) -> Array:
    """Return the time in which each model chunk of each stage sends its output, for one microbatch in one direction.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.

    Returns
    -------
    ndarray, shape (stages, chunks, cases)
        Time [s].
    """
    assignment, schedule = batch.assignment, batch.schedule
    leaves = schedule.sends_output(assignment.stages, assignment.chunks_per_stage)
    seconds = np.zeros((*assignment.layers_per_chunk.shape[:2], len(batch)))
    for stage, pieces in enumerate(schedule.stage_chunks(assignment.stages, assignment.chunks_per_stage)):
        for chunk, piece in enumerate(pieces):
            if leaves[stage][chunk]:
                seconds[stage, chunk] = batch.cases.send_time(assignment.model_chunks[piece][-1][0])
    return seconds


@cached(lambda batch: (batch.stage_end_method, batch.schedule.name, *_passes_key(batch)))
def stage_end_times(batch: ConfigurationBatch) -> Array:
    """Return the time at which each pipeline stage ends its last pass [s].

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.

    Returns
    -------
    ndarray, shape (stages, cases)
        Seconds from the start of the step.
    """
    from paleo.schedules.stage_ends import pipeline_stage_end_times  # a step without a pipeline needs none

    passes, chunks = stage_pass_times(batch), batch.assignment.chunks_per_stage
    if batch.stage_end_method == "closed" or batch.schedule.closed_forms.exact_for_stages == "any":
        return pipeline_stage_end_times(batch.schedule, passes, batch.microbatches, chunks)
    (forward, backward, weights), sent = chunk_pass_times(batch), chunk_send_times(batch)
    pieces = PassTimes(forward + sent, backward + sent, weights)
    return pipeline_stage_end_times(batch.schedule, passes, batch.microbatches, chunks, pieces)


def layer_iteration_times(times: LayerTimes, layouts: Layouts, layout: Index, *, sharded: bool) -> Array:
    """Return the time of one layer of each section, by which the network is cut into balanced pipeline stages.

    Parameters
    ----------
    times : LayerTimes
        Time and memory of one layer of each section (run of equal layers).
    layouts : Layouts
        Parallel layouts.
    layout : Index, shape (cases,)
        Position among ``layouts`` of each case.
    sharded : bool
        True to add exposed gathers and scatters of sharded parameters.

    Returns
    -------
    ndarray, shape (sections, cases)
        Time [s].
    """
    if not sharded:
        return times.iteration_time
    has_backward = np.array([section.has_backward for section in layouts.programs[0].sections])
    sections, width = len(has_backward), layouts.backend.formats.accumulated_gradient_bytes
    single = np.eye(sections, sections + len(layouts.programs[0].tied_parameters))[None]
    gradients = layouts.exchange_times_and_bytes(single, 1, "gradients", 3, width)[0, 0]
    gather, again = section_gather_times(layouts)[:, layout], section_gather_times(layouts, "again")[:, layout]
    # time of one layer of each section, for the balance of pipeline stages; (sections, …) [s]
    back = again * has_backward.reshape((-1,) + (1,) * (gather.ndim - 1)) + gradients[:, layout]
    ahead = np.maximum(times.forward_with_transfers, gather)
    return np.asarray(ahead + np.maximum(times.backward_with_transfers + times.weight_gradients, back))


# sharded parameters


@dataclass(frozen=True, slots=True)
class _ShardedCollectives:
    """Times of parameter gathers and gradient sums of stages with sharded parameters; equal stages are computed once.

    Attributes
    ----------
    stage_kind, first_stage_of_kind : ndarray of int
        Kind of each stage, shape (stages,), and the first stage of each kind, shape (kinds,).
    gathered_counts : ndarray, shape (kinds, sections, sections and ties)
        Parameters that each kind gathers for a layer of each section: numbers of layers and of tied parameters.
    gather, regather, gradients : ndarray, shape (kinds, sections, cases or 1)
        Times of the gathers before the forward and backward pass, and of gradient sums during the passes [s].
    gradients_after_chunk : ndarray, shape (kinds, chunks, cases or 1)
        Times of gradient sums after the last pass of each chunk [s].
    """

    stage_kind: Index
    first_stage_of_kind: Index
    gathered_counts: Array
    gather: Array
    regather: Array
    gradients: Array
    gradients_after_chunk: Array


@cached(_passes_key)
def sharded_stage_pass_times(batch: ConfigurationBatch) -> ShardedChunkPasses:
    """Return the pass times of model chunks whose parameters are gathered, or gradients scattered, in every pass.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.

    Returns
    -------
    ShardedChunkPasses
        Pass times by kind of stage [s].
    """
    assignment, overlap, plain = batch.assignment, batch.backend.software.overlap, batch.layer_times
    ahead, back = plain.forward_with_transfers, plain.backward_with_transfers + plain.weight_gradients
    owed = _sharded_collectives(batch)
    gathered = np.asarray((owed.gathered_counts @ batch.layouts.section_parameter_counts(trained=False)).any(axis=2))
    has_backward = np.array([section.has_backward for section in batch.layouts.programs[0].sections])
    splits = batch.schedule.splits_backward
    places = batch.schedule.stage_chunks(assignment.stages, assignment.chunks_per_stage)
    figures: dict[object, ShardedIterationTimes] = {}
    known: dict[tuple[object, ...], PassTimes] = {}
    passes = np.empty((3, len(owed.first_stage_of_kind), assignment.layers_per_chunk.shape[1], len(batch)))
    for row, stage in enumerate(owed.first_stage_of_kind.tolist()):
        gathers = owed.gather[row], owed.regather[row], owed.gradients[row]
        stage_key: object = owed.gathered_counts[row].tobytes() if assignment.replicas == 1 else row
        if stage_key not in figures:
            times = with_contention(plain, gathers[0], gathers[2], overlap, gathers[1])
            travelling = (seconds if seconds.any() else None for seconds in gathers)
            figures[stage_key] = ShardedIterationTimes(
                times.forward_with_transfers, times.backward_with_transfers, times.weight_gradients, *travelling
            )
        for chunk, number in enumerate(places[stage]):
            piece = assignment.model_chunks[number]
            if (stage_key, piece) not in known:
                slowed = sharded_chunk_pass_times(piece, figures[stage_key], gathered[row], has_backward, splits=splits)
                # Limit passes to the time without any overlap, which contention never exceeds.
                gather, regather, gradients = gathers
                forward = np.minimum(slowed.forward, sum(n * (ahead[i] + gather[i]) for i, n in piece))
                both = sum(n * (back[i] + regather[i] * has_backward[i] + gradients[i]) for i, n in piece)
                backward = np.minimum(slowed.backward, np.maximum(both - slowed.weight_gradients, 0.0))
                known[stage_key, piece] = PassTimes(forward, backward, slowed.weight_gradients)
            for place, seconds in zip(passes, known[stage_key, piece], strict=True):
                place[row, chunk] = seconds
    passes[2 if splits else 1] += owed.gradients_after_chunk
    return ShardedChunkPasses(passes, owed.stage_kind)


def sharded_communication_time(batch: ConfigurationBatch) -> Array:
    """Return the total time of ZeRO-3 gathers and reduce-scatters in a microbatch, exposed or hidden.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.

    Returns
    -------
    ndarray, shape (stages, cases)
        Time [s].
    """
    assignment, owed = batch.assignment, _sharded_collectives(batch)
    has_backward = np.array([section.has_backward for section in batch.layouts.programs[0].sections])
    stage_seconds = (owed.gather + owed.regather * has_backward[:, None] + owed.gradients)[owed.stage_kind]
    communication = np.einsum("ps,psc->pc", assignment.layers_per_microbatch, stage_seconds)
    return np.asarray(communication + owed.gradients_after_chunk[owed.stage_kind].sum(axis=1) / assignment.replicas)


@cached(lambda batch: (batch.sharding, batch.overlaps_gradient_exchange))
def _sharded_collectives(batch: ConfigurationBatch) -> _ShardedCollectives:
    layouts, assignment, formats = batch.layouts, batch.assignment, batch.backend.formats
    stage, kind = _distinct_stages(assignment)
    parts = gathered_parameter_mask(assignment.layers_per_stage, layouts.programs[0].tied_parameters)[stage]
    zeros, copies = np.zeros((*parts.shape[:2], 1)), assignment.replicas

    def seconds(content: ExchangedTensors, width: float) -> Array:
        key = "sharded", content, copies, parts.tobytes()  # many cuts have the same kinds of stages
        of_layouts = layouts.cache.get_or_compute(
            key, lambda: layouts.exchange_times_and_bytes(parts, copies, content, 3, width)[0]
        )
        return batch.expand_to_configurations(of_layouts)

    gather = seconds("all", formats.parameter_bytes) if batch.shards_parameters else zeros
    apart = batch.shards_parameters and layouts.has_separate_backward_gathers
    regather = seconds("again", formats.parameter_bytes) if apart else gather
    if batch.overlaps_gradient_exchange:
        sums = seconds("gradients", formats.accumulated_gradient_bytes)
        late = np.zeros((len(stage), assignment.layers_per_chunk.shape[1], 1))
    else:
        after, _ = layouts.gradient_exchange_times_and_bytes(assignment, 3, chunks=True)
        sums, late = zeros, batch.expand_to_configurations(after[stage])
    return _ShardedCollectives(kind, stage, parts, gather, regather, sums, late)


def _distinct_stages(assignment: StageAssignment) -> tuple[Index, Index]:
    """Return (first stage of each kind, kind of each stage); stages with equal layers are of one kind.

    In bidirectional schedules each stage is a separate kind, as the distance to its replica's stage differs.
    """
    if assignment.replicas > 1:
        stages = np.arange(assignment.stages)
        return stages, stages
    rows = np.column_stack([assignment.stage_kind, assignment.chunk_kind])
    _, stage, kind = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return stage, kind.ravel()
