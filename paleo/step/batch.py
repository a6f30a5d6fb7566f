"""Configurations of equal structure: the argument of `paleo.step.step.step`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from paleo.lowering.policies import recomputed_sections
from paleo.step.layouts import Layouts, ResultCache
from paleo.step.memory import Assignment, OffloadShares, with_offload_traffic
from paleo.step.section_times import LayerTimes, section_values, with_unpaired_share

if TYPE_CHECKING:
    from paleo.schedules.base import Schedule
    from paleo.step.backend import Backend

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
#: ZeRO stages that communicate in the same way: none, sharded states (1, and 2 where gradients are scattered once a
#: step), gradients scattered after every backward pass, sharded parameters.
Sharding = Literal["none", "states", "gradients", "parameters"]


@dataclass(frozen=True, slots=True)
class Cases:
    """Layouts at a microbatch under a recompute policy.

    ``layout``: the position of each case among the ``layouts``, (cases,). ``microbatches``: of a step, (cases,).
    ``times``: of their layers, (sections, cases).
    ``chosen``: larger `Cases` of which these are some, and their positions there.
    ``shared``: figures of these cases, each computed once.
    """

    layouts: Layouts
    layout: Index
    microbatches: Array
    times: LayerTimes
    chosen: tuple[Cases, Index] | None = None
    shared: ResultCache = field(default_factory=ResultCache, compare=False)

    def __len__(self) -> int:
        return len(self.layout)

    def of(self, cases: Index) -> Cases:
        """Select some cases.

        Parameters
        ----------
        cases : Index
            Positions.

        Returns
        -------
        Cases
            These cases.
        """
        return Cases(self.layouts, self.layout[cases], self.microbatches[cases], self.times.of(cases), (self, cases))

    def send(self, section: int) -> Array:
        """Return the time in which a stage that ends with a section sends its output to the next stage.

        Ranks of tp that do not split the sequence send a share each.

        Parameters
        ----------
        section : int
            Position of the section.

        Returns
        -------
        ndarray, shape (cases,)
            Seconds.
        """
        return self.shared.once(("send", section), lambda: self._send(section))

    def _send(self, section: int) -> Array:
        if self.chosen is not None:
            whole, cases = self.chosen
            return whole.send(section)[cases]
        layouts = self.layouts
        pairs = zip(layouts.meshes, layouts.sequence_parallel, strict=True)
        split = np.array([1.0 if sequence else float(mesh.degree("tp")) for mesh, sequence in pairs])
        groups = layouts.groups(range(len(layouts)), [("pp",)] * len(layouts))
        sizes = self.times.output_bytes[section] / split[self.layout]
        return layouts.collective("send_recv", groups[..., self.layout], sizes)


@dataclass(frozen=True, slots=True)
class Batch:
    """Configurations of equal structure, one for each of its ``cases``.

    ``assignment``: how the network is cut into stages. ``schedule``, ``zero``: pipeline schedule and stage of ZeRO.
    ``overlapped``: gradients are exchanged during the backward pass, not after it.
    ``arrival``: seconds in which the next batch of data arrives, (cases,); 0 for synthetic data.
    ``ends``: stages end by the schedule's ``order``, pass by pass, or by its ``closed`` forms where it has any, which
    take the chunks of a stage for alike.
    ``shared``: figures that batches of the same cases and assignment have in common, each computed once.
    """

    cases: Cases
    assignment: Assignment
    schedule: Schedule
    zero: int
    overlapped: bool
    arrival: Array | float = 0.0
    ends: Literal["order", "closed"] = "order"
    shared: ResultCache = field(default_factory=ResultCache, compare=False)

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def layouts(self) -> Layouts:
        """The layouts of the cases."""
        return self.cases.layouts

    @property
    def backend(self) -> Backend:
        """The backend that prices the cases."""
        return self.cases.layouts.backend

    @property
    def microbatches(self) -> Array:
        """Microbatches of a step: (cases,)."""
        return self.cases.microbatches

    @property
    def training(self) -> bool:
        """Whether there is a backward pass."""
        return self.layouts.training

    @property
    def sharded(self) -> bool:
        """Whether parameters are gathered for every pass: ZeRO-3 over several ranks."""
        return self.zero == 3 and self._shared_out

    @property
    def scattered(self) -> bool:
        """True if gradients are reduce-scattered after every backward pass: ZeRO-3, and ZeRO-2 with some software."""
        return self.backend.scatters(self.zero, self.assignment.stages) and self._shared_out

    @property
    def _shared_out(self) -> bool:
        ranks = self.layouts.shards[self.cases.layout] * self.assignment.copies
        return bool(np.all(ranks > 1))

    @property
    def sharding(self) -> Sharding:
        """Key that is equal for batches whose replicas run the same collectives."""
        if self.zero == 0:
            return "none"
        return "parameters" if self.sharded else "gradients" if self.scattered else "states"

    def without_contention(self) -> Batch:
        """Same batch with collectives that do not slow down overlapping computation."""
        software = self.backend.software.changed({"overlap.contention": 0.0})
        layouts = replace(self.layouts, backend=replace(self.backend, software=software), shared=ResultCache())
        return replace(self, cases=replace(self.cases, layouts=layouts, shared=ResultCache()), shared=ResultCache())

    @property
    def times(self) -> LayerTimes:
        """Times of layer iterations with exposed offload traffic and expert exchange, shape (sections, cases)."""
        if not self.training or not (self.backend.offload.parts or self.pairs):
            return self.cases.times
        return self.shared.once(("times", self.zero, self.schedule.name), self._waiting)

    @property
    def pairs(self) -> bool:
        """Whether exchanges of tokens hide behind another microbatch."""
        return bool(self.backend.software.overlap.experts)

    def _waiting(self) -> LayerTimes:
        times = with_unpaired_share(self.cases.times, self._unpaired_share) if self.pairs else self.cases.times
        return self._streamed(times) if self.backend.offload.parts else times

    @property
    def _unpaired_share(self) -> Array:
        """Share of a stage's passes that have no pass the other way beside them (`Schedule.unpaired`), and so wait for
        their exchanges: (cases,). All passes take the mean of both kinds.

        Megatron-Core pairs a forward and a backward pass in the steady state of 1F1B alone, for which it fills the
        pipeline with one pass more (``overlap_moe_expert_parallel_comm`` in its pipeline_parallel/schedules.py).
        """
        stages, chunks = self.assignment.stages, self.assignment.chunks
        unpaired = self.schedule.unpaired(stages, self.microbatches, chunks) if stages > 1 else 1.0
        return np.asarray(np.minimum(unpaired / (self.microbatches * chunks), 1.0))

    def _streamed(self, times: LayerTimes) -> LayerTimes:
        layouts, layout = self.layouts, self.cases.layout
        program, offload = layouts.programs[0], self.backend.offload
        sections = len(program.sections)
        elements, learned = (layouts.parameters(trained)[:sections, layout] for trained in (False, True))
        scattered = self.backend.scatters(self.zero, self.assignment.stages)
        shares = OffloadShares.of(
            self.zero,
            layouts.shards[layout],
            self.microbatches,
            scattered=scattered,
            activations=offload.activation_share(section_values(program, "repeat"), recomputed_sections(program)),
        )
        return with_offload_traffic(times, elements, learned, offload, self.backend.formats, shares)

    def per_case(self, figures: Array) -> Array:
        """Expand values of layouts to values of cases.

        Parameters
        ----------
        figures : ndarray, shape (..., layouts)
            One value a layout.

        Returns
        -------
        ndarray, shape (..., cases)
            One value a case.
        """
        return np.take(figures, self.cases.layout, axis=-1)
