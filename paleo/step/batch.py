"""Configurations of equal structure: the argument of `paleo.step.step.step`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from paleo.lowering.policies import blocks
from paleo.step.layouts import Shared
from paleo.step.memory import Shares, streamed
from paleo.step.section_times import partly_paired, section_figures

if TYPE_CHECKING:
    from paleo.schedules.base import Schedule
    from paleo.step.backend import Backend
    from paleo.step.layouts import Layouts
    from paleo.step.memory import Assignment
    from paleo.step.section_times import LayerTimes

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
#: ZeRO stages that communicate in the same way: none, sharded states (1, and 2 where gradients are scattered once a
#: step), gradients scattered after every backward pass, sharded parameters.
Sharding = Literal["none", "states", "gradients", "parameters"]


@dataclass(frozen=True, slots=True)
class Cases:
    """Layouts at a microbatch under a recompute policy, whatever else they choose.

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
    shared: Shared = field(default_factory=Shared, compare=False)

    def __len__(self) -> int:
        return len(self.layout)

    def of(self, cases: Index) -> Cases:
        """The cases at some positions."""
        return Cases(self.layouts, self.layout[cases], self.microbatches[cases], self.times.of(cases), (self, cases))

    def send(self, section: int) -> Array:
        """Seconds in which a stage that ends with a section sends its output on; ranks of tp that do not split the
        sequence send a share each: (cases,)."""
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
    shared: Shared = field(default_factory=Shared, compare=False)

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
        """Whether gradients are summed and scattered after every backward pass: ZeRO-3, and ZeRO-2 where the software
        does so, over several ranks."""
        return self.backend.scatters(self.zero, self.assignment.stages) and self._shared_out

    @property
    def _shared_out(self) -> bool:
        ranks = self.layouts.shards[self.cases.layout] * self.assignment.copies
        return bool(np.all(ranks > 1))

    @property
    def sharding(self) -> Sharding:
        """Which collectives the replicas run."""
        if self.zero == 0:
            return "none"
        return "parameters" if self.sharded else "gradients" if self.scattered else "states"

    def without_contention(self) -> Batch:
        """The same with collectives that take nothing from the computation beside them."""
        software = self.backend.software.changed({"overlap.contention": 0.0})
        layouts = replace(self.layouts, backend=replace(self.backend, software=software), shared=Shared())
        return replace(self, cases=replace(self.cases, layouts=layouts, shared=Shared()), shared=Shared())

    @property
    def times(self) -> LayerTimes:
        """Times of layers, with what they wait for host memory, and for exchanges that no other microbatch hides:
        (sections, cases)."""
        if not self.training or not (self.backend.offload.parts or self.pairs):
            return self.cases.times
        return self.shared.once(("times", self.zero, self.schedule.name), self._waiting)

    @property
    def pairs(self) -> bool:
        """Whether exchanges of tokens hide behind another microbatch."""
        return bool(self.backend.software.overlap.experts)

    def _waiting(self) -> LayerTimes:
        times = partly_paired(self.cases.times, self._unpaired_share) if self.pairs else self.cases.times
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
        shares = Shares.of(
            self.zero,
            layouts.shards[layout],
            self.microbatches,
            scattered=scattered,
            activations=offload.activation_share(section_figures(program, "repeat"), blocks(program)),
        )
        return streamed(times, elements, learned, offload, self.backend.formats, shares)

    def per_case(self, figures: Array) -> Array:
        """Figures of layouts, those of each case: (…, layouts) to (…, cases)."""
        return np.take(figures, self.cases.layout, axis=-1)
