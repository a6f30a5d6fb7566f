"""Prediction of a training step: times and bytes by part, of many configurations of equal structure at once.

All commands use this one model: a prediction computes one configuration, a search hundreds of thousands, a timeline the
same passes one by one. `single_configuration_batch` turns one configuration into a batch: the times of its program are
predicted, and its layers are cut into model chunks and assigned to pipeline stages. Arrays have the stages along their
first axis, configurations along the last; units are seconds and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.lowering.stages_and_recompute import (
    ModelChunk,
    RecomputePolicies,
    has_mixed_recompute,
    recompute_policy_shares,
    split_by_recompute_policy,
    with_recompute_policy,
)
from paleo.pricing.kernels import KernelTimes
from paleo.schedules.base import SCHEDULES, Schedule, check_schedule
from paleo.step.configuration_batch import ConfigurationBatch, LayoutConfigurations
from paleo.step.layouts import Layouts, cached
from paleo.step.memory import (
    DistinctStages,
    DistinctStagesAndChunks,
    StageAssignment,
    StateMemory,
    live_microbatches,
    total_stage_memory,
    with_update_temporaries,
    workspace_memory,
)
from paleo.step.pipeline import (
    layer_iteration_times,
    send_times,
    sharded_communication_time,
    stage_end_times,
    stage_pass_times,
)
from paleo.step.section_times import (
    MEMORY_FIELDS,
    SectionTimes,
    collective_times,
    enumerate_collectives,
    layer_times,
    section_field_values,
    section_times,
    sum_per_stage,
)
from paleo.step.streams import (
    after_backward_times,
    stream_end_times,
    time_after_last_bucket,
    time_after_passes,
    update_times,
)
from paleo.step.waiting import InputPipeline, StepTimeNoise, straggler_wait_share

if TYPE_CHECKING:
    from paleo.lowering.program import Program
    from paleo.parallel.placement import Mesh
    from paleo.parallel.plan import Plan
    from paleo.step.backend import Backend

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of each pipeline stage by part, arrays of shape (stages, configurations) [byte].

    ``workspace`` is temporary memory including gathered parameters. ``reserved`` is the memory of the process outside
    tensors, shape (configurations,). ``host_bytes`` are states and activations in host memory. ``flat_buffer_cache`` is
    the smaller of the flat copies of gradients and the memory in use before them. The allocator has blocks for both,
    although they are never alive at the same time.
    """

    states: StateMemory
    activations: Array
    workspace: Array
    reserved: Array
    host_bytes: Array
    flat_buffer_cache: Array

    @property
    def fullest_stage(self) -> Index:
        """Index of the stage with the most memory, shape (configurations,)."""
        return np.asarray(total_stage_memory(self.states, self.activations, self.workspace).argmax(axis=0))


@dataclass(frozen=True)
class StepPredictions:
    """Predicted step times of a batch of C configurations, shape (C,) [s]; other results are computed when read."""

    batch: ConfigurationBatch
    step_time: Array

    @cached_property
    def fullest_stage_memory(self) -> Array:
        """Memory of the fullest pipeline stage, memory of the process outside tensors included, shape (C,) [byte]."""
        return fullest_stage_memory(self.batch)

    @cached_property
    def stage_memory(self) -> StageMemory:
        """Memory of each pipeline stage by part (states, activations, workspace, …) [byte]."""
        return stage_memory(self.batch)

    @cached_property
    def breakdown(self) -> dict[str, Array]:
        """Breakdown of the step time of the busiest pipeline stage by part, arrays of shape (C,) [s].

        All parts sum to the step time, except ``communication_total``, which also counts hidden communication.
        """
        return _parts(self.batch)

    @cached_property
    def busiest_stage(self) -> Index:
        """Index of the pipeline stage whose passes take longest, shape (C,)."""
        return _busiest_stage(self.batch)


def predict_steps(batch: ConfigurationBatch) -> StepPredictions:
    """Predict the time of one training step of every configuration in a batch.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together.

    Returns
    -------
    StepPredictions
        Step times [s]; memory and breakdown are computed when they are read.
    """
    worked = np.maximum(_time_without_waits(batch), batch.input_arrival_time)
    return StepPredictions(batch, worked + straggler_wait_time(batch))


def straggler_wait_time(batch: ConfigurationBatch) -> Array:
    """Return the time for which synchronous ranks wait for the slowest rank in a step.

    All replicas and stages wait for one another. Computation varies between ranks, collectives do not. Other
    consistency models are in `paleo.consistency`.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together.

    Returns
    -------
    ndarray, shape (configurations,)
        Times [s].
    """
    run, layouts = batch.backend.run, batch.layouts
    noise = StepTimeNoise.from_run(run, batch.backend.software, np.array(layouts.local_batches, dtype=np.float64))
    if not (noise.has_noise and batch.has_backward and run.exchange.consistency == "bsp"):
        return np.zeros(len(batch))
    share = straggler_wait_share(layouts.replicas * batch.assignment.stages, noise.independent, noise.persistent)
    arithmetic, moving, launch = _kernel_parts(batch, _busiest_stage(batch))
    return batch.expand_to_configurations(share) * (arithmetic + moving + launch)


def _work_key(batch: ConfigurationBatch) -> tuple[object, ...]:
    zero = batch.zero if batch.backend.offload.parts else batch.sharding
    return batch.schedule.name, zero, batch.overlaps_gradient_exchange


@cached(_work_key)
def _time_without_waits(batch: ConfigurationBatch) -> Array:
    """Return the step time without waits for input data and stragglers, shape (configurations,) [s]."""
    if batch.assignment.stages > 1:
        seconds = stage_end_times(batch) + time_after_passes(batch, stage_pass_times(batch))
        return np.asarray(seconds.max(axis=0))
    return np.asarray(stream_end_times(batch).end + time_after_last_bucket(batch))


# breakdown


def _busiest_stage(batch: ConfigurationBatch) -> Index:
    """Return the index of the stage whose passes take longest, the first of equal ones, shape (configurations,)."""
    if batch.assignment.stages == 1:
        return np.zeros(len(batch), dtype=np.intp)
    passes = stage_pass_times(batch)
    return np.asarray(np.argmax(passes.forward + passes.backward + passes.weight_gradients, axis=0))


def _parts(batch: ConfigurationBatch) -> dict[str, Array]:
    stage, count = _busiest_stage(batch), batch.microbatches
    times, computed = batch.layer_times, batch.assignment.layers_per_microbatch
    arithmetic, moving, launch = _kernel_parts(batch, stage)
    update = _of_stage(update_times(batch), stage)
    waited = _of_stage(sum_per_stage(computed, times.forward_transfers + times.backward_transfers), stage) * count
    hidden = _of_stage(sum_per_stage(computed, times.hidden_transfers), stage) * count
    computing, worked = arithmetic + moving + launch + update, _time_without_waits(batch)
    if batch.assignment.stages == 1:
        gathers = after_backward_times(batch, summed=False).total_communication
        state_gathers = batch.expand_to_configurations(gathers)[0]
        total = waited + hidden + stream_end_times(batch).communication_time + state_gathers
        exposed = np.where(total > 0, np.maximum(0.0, worked - computing), 0.0)  # without any it is a rounding error
        total, bubble = np.maximum(total, exposed), np.zeros_like(worked)  # contention counts, too
    else:
        after_exposed, after_hidden = _communication_after_passes(batch, stage)
        exposed = waited + 2.0 * _of_stage(send_times(batch), stage) * count + after_exposed
        total = exposed + after_hidden + hidden
        bubble = np.maximum(0.0, worked - computing - exposed)
    return {
        "compute": arithmetic,
        "memory_bound": moving,
        "launch": launch,
        "communication_exposed": exposed,
        "communication_total": total,
        "bubble": bubble,
        "optimizer": update,
        "input": np.maximum(0.0, batch.input_arrival_time - worked),
        "stragglers": straggler_wait_time(batch),
    }


def _of_stage(figures: Array, stage: Index) -> Array:
    """Select the values of one stage per configuration from an array (stages, configurations)."""
    return np.asarray(np.take_along_axis(figures, stage[None], axis=0)[0])


def _kernel_parts(batch: ConfigurationBatch, stage: Index) -> tuple[Array, Array, Array]:
    """Return kernel times of a stage in a step, split by limit: (arithmetic, memory, launches), (configurations,) [s].

    Kernel time beyond these limits counts as launches.
    """
    times, computed = batch.layer_times, batch.assignment.layers_per_microbatch
    passes = times.forward + times.backward + times.weight_gradients
    arithmetic, moving, launch, kernels = (
        _of_stage(sum_per_stage(computed, seconds), stage) * batch.microbatches
        for seconds in (*times.times_by_limit, passes)
    )
    return arithmetic, moving, launch + np.maximum(0.0, kernels - arithmetic - moving - launch)


def _communication_after_passes(batch: ConfigurationBatch, stage: Index) -> tuple[Array, Array]:
    """Return exposed and hidden communication of a pipeline stage besides sends and collectives inside layers.

    This is the gradient exchange, the gathers of updated parameters, and the collectives of sharded parameters.
    """
    after = time_after_passes(batch, stage_pass_times(batch)) - update_times(batch)
    hidden = np.maximum(0.0, batch.expand_to_configurations(after_backward_times(batch).total_communication) - after)
    if batch.scatters_every_pass:
        times, computed = batch.layer_times, batch.assignment.layers_per_microbatch
        passes = stage_pass_times(batch)
        plain = sum_per_stage(computed, times.iteration_time) + 2.0 * send_times(batch)
        waits = (passes.forward + passes.backward + passes.weight_gradients - plain) * batch.microbatches
        beside = sharded_communication_time(batch) * batch.microbatches
        after, hidden = after + waits, hidden + np.maximum(0.0, beside - waits)
    return _of_stage(after, stage), _of_stage(hidden, stage)


# memory


def stage_memory(batch: ConfigurationBatch) -> StageMemory:
    """Compute the memory of each pipeline stage by part, arrays of shape (stages, configurations).

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.

    Returns
    -------
    StageMemory
        Memory by part [byte].
    """
    layouts, assignment = batch.layouts, batch.assignment
    kinds, rows = assignment.distinct_stages_and_chunks.stages, assignment.stage_kind
    overlapped = batch.overlaps_gradient_exchange
    kept, host_bytes = layouts.state_memory(kinds, batch.zero, assignment.stages, overlapped=overlapped)
    parts = (np.broadcast_to(getattr(kept, name), host_bytes.shape)[rows] for name in StateMemory.__slots__)
    states = StateMemory(*map(batch.expand_to_configurations, parts))
    activations, work = _activation_memory(batch)
    living = _live_microbatches(batch)
    offloaded = (sum_per_stage(assignment.layers_per_chunk, batch.layer_times.offloaded_bytes) * living).sum(axis=1)
    passing = (activations * living).sum(axis=1)
    on_host = batch.expand_to_configurations(host_bytes[rows]) + offloaded
    apart = np.minimum(passing + work + states.gathered_parameters, states.flat_gradient_copies)
    work = with_update_temporaries(work, states, passing)
    return StageMemory(states, passing, work, batch.expand_to_configurations(layouts.reserved_memory()), on_host, apart)


def fullest_stage_memory(batch: ConfigurationBatch) -> Array:
    """Compute the memory of the fullest pipeline stage of each configuration.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.

    Returns
    -------
    ndarray, shape (configurations,)
        Size [byte].
    """
    layouts, assignment = batch.layouts, batch.assignment
    kinds = assignment.distinct_stages_and_chunks.stages

    overlapped = batch.overlaps_gradient_exchange

    def state_bytes() -> tuple[Array, Array]:
        kept, _ = layouts.state_memory(kinds, batch.zero, assignment.stages, overlapped=overlapped)
        lasting = total_stage_memory(kept, np.zeros(1), layouts.reserved_memory())
        return lasting, np.broadcast_to(kept.update_temporaries - kept.gathered_parameters, lasting.shape)

    of_kinds = layouts.cache.get_or_compute(("bytes of states", batch.zero, overlapped), state_bytes)
    states, update = (batch.expand_to_configurations(each[assignment.stage_kind]) for each in of_kinds)
    key = "passing memory", batch.schedule.name, batch.zero if batch.backend.offload.parts else 0

    def passing_bytes() -> Array:
        activations, work = _activation_memory(batch)
        return np.asarray((activations * _live_microbatches(batch)).sum(axis=1) + work)

    return np.asarray((states + np.maximum(batch.cache.get_or_compute(key, passing_bytes), update)).max(axis=0))


def _live_microbatches(batch: ConfigurationBatch) -> Array:
    """Count the microbatches whose activations are alive at once, shape (stages, chunks, configurations)."""
    assignment = batch.assignment
    living = live_microbatches(batch.schedule, assignment.stages, batch.microbatches, assignment.chunks_per_stage)
    return living if batch.has_backward else np.zeros_like(living)


@cached(lambda batch: (batch.zero if batch.backend.offload.parts else 0,))
def _activation_memory(batch: ConfigurationBatch) -> tuple[Array, Array]:
    """Return the activations of a microbatch in each chunk of a stage, and the temporary memory of a stage [byte].

    Shapes are (stages, chunks, configurations) and (stages, configurations).
    """
    layouts, assignment, times = batch.layouts, batch.assignment, batch.layer_times
    several = layouts.zero_shard_ranks * assignment.replicas > 1
    sizes = layouts.bucket_memory(assignment.distinct_stages_and_chunks.stages)[assignment.stage_kind]
    buckets = batch.expand_to_configurations(np.where(several & batch.has_backward, sizes, 0.0))
    work = workspace_memory(assignment.layers_per_stage, times.workspace_bytes, times.recompute_bytes, 0.0) + buckets
    return sum_per_stage(assignment.layers_per_chunk, times.saved_bytes) + _sent_outputs(batch), work


def _sent_outputs(batch: ConfigurationBatch) -> Array:
    """Return the outputs that a stage keeps per microbatch after sending them, (stages, 1, configurations) [byte].

    Autograd starts the stage's backward pass from its output, even if the layer that computed it saves it, too. The
    result is the mean over the chunks of a stage.
    """
    assignment, habit = batch.assignment, batch.backend.software.parallelism.pipeline_outputs
    share = assignment.replicas / assignment.layers_per_chunk.shape[1] if habit == "kept" else 0.0
    return sum_per_stage(assignment.output_sends * share, batch.layer_times.output_bytes)[:, None]


class TimedProgram(NamedTuple):
    """One rank's program with predicted times: model chunks of the stages, kernel times, time and memory by section.

    A section is a run of equal layers. Arrays of ``section_times`` have shape (sections, 1).
    """

    program: Program
    model_chunks: list[ModelChunk]
    kernels: KernelTimes
    section_times: SectionTimes


def timed_program(program: Program, layout: Plan, backend: Backend) -> TimedProgram:
    """Predict the times of one rank's kernels and collectives, and cut its layers into model chunks for the stages.

    Layers that are recomputed differently become separate sections (runs of equal layers).

    Parameters
    ----------
    program : Program
        Kernels and collectives of one rank.
    layout : Plan
        Parallel plan of the run: mesh, strategy, microbatches.
    backend : Backend
        Software, and models of kernel and link times.

    Returns
    -------
    TimedProgram
        Program with times by kernel and section, and its model chunks.
    """
    run, pieces = backend.run, layout.stages * layout.strategy.chunks
    stages = _schedule_of(layout, backend).chunk_stages(layout.stages, layout.strategy.chunks)
    program = program if run.forward_only else with_recompute_policy(program, run.recompute.policy)
    kernels, costs = _section_times(program, layout.mesh, backend)

    sharded = layout.stages > 1 and layout.strategy.zero == 3 and layout.zero_shards > 1

    def weights(policies: RecomputePolicies) -> Array:
        whole = tuple((index, section.repeat) for index, section in enumerate(program.sections))
        batch = _batch(program, [whole], costs, policies, layout, backend)
        return layer_iteration_times(batch.layer_times, batch.layouts, batch.cases.layout_index, sharded=sharded)[:, 0]

    if not has_mixed_recompute(run):
        chunks = backend.cut_into_stages(program, weights(RecomputePolicies.from_program(program)), stages)
        return TimedProgram(program, chunks, kernels, costs)
    shares, sections = recompute_policy_shares(program, run, pieces), len(costs.repeat)
    policies = {how: RecomputePolicies.for_each_section(sections, how) for how in shares}
    mean = np.sum([weights(policies[how]) * share for how, share in shares.items()], axis=0)
    split = split_by_recompute_policy(program, backend.cut_into_stages(program, mean, stages), run)
    kernels, costs = _section_times(split.program, layout.mesh, backend)
    return TimedProgram(split.program, split.model_chunks, kernels, costs)


def single_configuration_batch(
    program: TimedProgram, layout: Plan, backend: Backend, arriving: InputPipeline | None
) -> ConfigurationBatch:
    """Wrap one configuration as a `ConfigurationBatch` of length one, the input of `predict_steps`.

    Parameters
    ----------
    program : TimedProgram
        One rank's program with predicted times.
    layout : Plan
        Parallel plan of the run: mesh, strategy, microbatches.
    backend : Backend
        Software, and models of kernel and link times.
    arriving : InputPipeline, optional
        Times in which the input pipeline delivers a batch; None for synthetic data.

    Returns
    -------
    ConfigurationBatch
        Batch with one configuration.

    Raises
    ------
    PlanError
        If the schedule cannot run this number of microbatches.
    """
    if layout.stages > 1:
        name = _schedule_of(layout, backend).name
        check_schedule(name, layout.stages, layout.strategy.chunks, layout.microbatches)
    policies = RecomputePolicies.from_program(program.program)
    batch = _batch(program.program, program.model_chunks, program.section_times, policies, layout, backend)
    return batch if arriving is None else replace(batch, input_arrival_time=np.atleast_1d(arriving.batch_interval))


def _batch(
    program: Program,
    pieces: list[ModelChunk],
    costs: SectionTimes,
    policies: RecomputePolicies,
    layout: Plan,
    backend: Backend,
) -> ConfigurationBatch:
    """Build the `ConfigurationBatch` of one configuration; a network in one piece has one pipeline stage."""
    schedule, stages = _schedule_of(layout, backend), layout.stages if len(pieces) > 1 else 1
    sequence_parallel, local_batches = (layout.strategy.sequence_parallel,), (layout.local_batch,)
    layouts = Layouts(backend, (layout.mesh,), (program,), sequence_parallel, local_batches)
    microbatches, times = np.array([float(layout.microbatches)]), layer_times(costs, policies)
    cases = LayoutConfigurations(layouts, np.zeros(1, dtype=np.intp), microbatches, times)
    kinds, chunks = DistinctStagesAndChunks(DistinctStages(), DistinctStages()), layout.strategy.chunks
    assignment = StageAssignment.from_schedule(pieces, schedule, stages, chunks, program.tied_parameters, kinds)
    return ConfigurationBatch(cases, assignment, schedule, layout.strategy.zero, backend.overlaps_gradient_exchange)


def _section_times(program: Program, mesh: Mesh, backend: Backend) -> tuple[KernelTimes, SectionTimes]:
    """Predict the times of a program's kernels and collectives.

    Returns kernel times, and time and memory by section of shape (sections, 1).
    """
    times = backend.predictor.times([counted.kernel for section in program.sections for counted in section.kernels])
    column = KernelTimes(*(getattr(times, name)[:, None] for name in KernelTimes.__slots__))
    payloads = np.array([[transfer.payload_bytes] for _, transfer in enumerate_collectives(program)]).reshape(-1, 1)
    [transfers] = collective_times(backend.fabric, [(mesh, program)], [payloads])
    sizes = [section_field_values(program, name)[:, None] for name in MEMORY_FIELDS]
    call, power = backend.collective_issue_time, backend.host_wait_exponent
    return times, section_times(program, column, transfers, sizes, call=call, waiting_exponent=power)


def _schedule_of(layout: Plan, backend: Backend) -> Schedule:
    """Return the pipeline schedule of a run.

    1F1B with several model chunks a stage is interleaved 1F1B.
    """
    name = backend.run.pipeline.schedule
    return SCHEDULES["interleaved" if layout.strategy.chunks > 1 and name == "1f1b" else name]
