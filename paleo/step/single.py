"""One configuration as a batch: a program priced, cut into the pieces of a pipeline, and laid over its stages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.lowering.recompute import Policies, policy_shares, split_by_policy, uneven, with_policy
from paleo.pricing.kernels import KernelTimes
from paleo.schedules.base import SCHEDULES
from paleo.schedules.pipeline import check
from paleo.step.batch import Batch, Cases
from paleo.step.layouts import Layouts
from paleo.step.pipeline import iteration_seconds
from paleo.step.section_times import (
    BYTES,
    collectives,
    layer_times,
    section_costs,
    section_figures,
    transfer_seconds,
)
from paleo.step.stages import Assignment, Kinds, StageKinds

if TYPE_CHECKING:
    from paleo.lowering.partition import Chunk
    from paleo.lowering.program import Program
    from paleo.parallel.mesh import Mesh
    from paleo.parallel.plan import Plan
    from paleo.schedules.base import Schedule
    from paleo.step.backend import Backend
    from paleo.step.input_pipeline import InputPipeline
    from paleo.step.section_times import (
        SectionCosts,
    )

Array = npt.NDArray[np.float64]


class Priced(NamedTuple):
    """A program in pieces with the seconds of its kernels and the costs of its sections, (sections, 1)."""

    program: Program
    pieces: list[Chunk]
    kernels: KernelTimes
    costs: SectionCosts


def priced(program: Program, layout: Plan, backend: Backend) -> Priced:
    """Kernels and collectives priced, the network cut, and layers that are recomputed differently told apart."""
    run, pieces = backend.run, layout.stages * layout.parallel.chunks
    program = program if run.forward_only else with_policy(program, run.recompute)
    kernels, costs = _costs(program, layout.mesh, backend)

    sharded = layout.stages > 1 and layout.parallel.zero == 3 and layout.shards > 1

    def weights(policies: Policies) -> Array:
        whole = tuple((index, section.repeat) for index, section in enumerate(program.sections))
        batch = _batch(program, [whole], costs, policies, layout, backend)
        return iteration_seconds(batch.times, batch.layouts, batch.cases.layout, sharded=sharded)[:, 0]

    if not uneven(run):
        return Priced(program, backend.cut(program, weights(Policies.of(program)), pieces), kernels, costs)
    shares = policy_shares(program, run, pieces).items()
    mean = np.sum([weights(Policies.each(len(costs.repeat), how)) * share for how, share in shares], axis=0)
    split = split_by_policy(program, backend.cut(program, mean, pieces), run)
    kernels, costs = _costs(split.program, layout.mesh, backend)
    return Priced(split.program, split.pieces, kernels, costs)


def single_batch(program: Priced, layout: Plan, backend: Backend, arriving: InputPipeline | None) -> Batch:
    """The batch of one configuration; PlanError where its schedule cannot run so many microbatches."""
    if layout.stages > 1:
        name = schedule_of(layout, backend).name
        check(name, layout.stages, layout.parallel.chunks, layout.microbatches)
    batch = _batch(program.program, program.pieces, program.costs, Policies.of(program.program), layout, backend)
    return batch if arriving is None else replace(batch, arrival=np.atleast_1d(arriving.total))


def _batch(
    program: Program, pieces: list[Chunk], costs: SectionCosts, policies: Policies, layout: Plan, backend: Backend
) -> Batch:
    """One configuration; a network in one piece is laid over one stage."""
    schedule, stages = schedule_of(layout, backend), layout.stages if len(pieces) > 1 else 1
    sequence_parallel, local_batches = (layout.parallel.sequence_parallel,), (layout.local_batch,)
    layouts = Layouts(backend, (layout.mesh,), (program,), sequence_parallel, local_batches)
    cases = Cases(
        layouts, np.zeros(1, dtype=np.intp), np.array([float(layout.microbatches)]), layer_times(costs, policies)
    )
    kinds = Kinds(StageKinds(), StageKinds())
    assignment = Assignment.of(pieces, schedule, stages, layout.parallel.chunks, program.ties, kinds)
    return Batch(cases, assignment, schedule, layout.parallel.zero, backend.overlapped)


def _costs(program: Program, mesh: Mesh, backend: Backend) -> tuple[KernelTimes, SectionCosts]:
    """Kernels and collectives priced, and added up by section: (sections, 1)."""
    times = backend.prices.times([counted.kernel for section in program.sections for counted in section.kernels])
    column = KernelTimes(*(getattr(times, name)[:, None] for name in KernelTimes.__slots__))
    payloads = np.array([[transfer.payload_bytes] for _, transfer in collectives(program)]).reshape(-1, 1)
    [transfers] = transfer_seconds(backend.fabric, [(mesh, program)], [payloads])
    sizes = [section_figures(program, name)[:, None] for name in BYTES]
    return times, section_costs(program, column, transfers, sizes, call=backend.call)


def schedule_of(layout: Plan, backend: Backend) -> Schedule:
    """The schedule of a run; 1F1B over several chunks a stage is the interleaved one."""
    name = backend.run.schedule
    return SCHEDULES["interleaved" if layout.parallel.chunks > 1 and name == "1f1b" else name]
