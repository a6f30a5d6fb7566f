"""Batches of configurations with equal structure, whose step times `paleo.step.step.predict_steps` computes at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from paleo.lowering.stages_and_recompute import full_recompute_sections
from paleo.step.layouts import Layouts, ResultCache, cached
from paleo.step.memory import OffloadShares, StageAssignment, with_offload_traffic
from paleo.step.section_times import LayerTimes, section_field_values, with_exposed_unpaired_exchange

if TYPE_CHECKING:
    from paleo.schedules.base import Schedule
    from paleo.step.backend import Backend

Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]
#: ZeRO stages with equal communication: none; sharded states (1, and 2 if gradients are scattered once a step);
#: gradients scattered after every backward pass; sharded parameters.
ZeroSharding = Literal["none", "states", "gradients", "parameters"]


@dataclass(frozen=True, slots=True)
class LayoutConfigurations:
    """Configurations to predict: parallel layouts, each with a microbatch size and a recompute policy.

    A section is a run of equal layers of the network. A case is one configuration.

    Attributes
    ----------
    layouts : Layouts
        Parallel layouts (degrees and ranks' programs) with equal sections.
    layout_index : ndarray of int, shape (cases,)
        Position among ``layouts`` of each configuration's layout.
    microbatches : ndarray, shape (cases,)
        Microbatches per step of each configuration.
    layer_times : LayerTimes
        Times of one layer of each section, shape (sections, cases).
    parent_selection : (LayoutConfigurations, ndarray of int), optional
        Larger `LayoutConfigurations` from which these were selected, and their positions there.
    cache : ResultCache
        Results that are computed once for these cases.
    """

    layouts: Layouts
    layout_index: IndexArray
    microbatches: Array
    layer_times: LayerTimes
    parent_selection: tuple[LayoutConfigurations, IndexArray] | None = None
    cache: ResultCache = field(default_factory=ResultCache, compare=False)

    def __len__(self) -> int:
        return len(self.layout_index)

    def select(self, cases: IndexArray) -> LayoutConfigurations:
        """Select some of the configurations by index.

        Parameters
        ----------
        cases : ndarray of int
            Positions of the configurations to keep.

        Returns
        -------
        LayoutConfigurations
            The selected configurations.
        """
        index, times = self.layout_index[cases], self.layer_times.select_configurations(cases)
        return LayoutConfigurations(self.layouts, index, self.microbatches[cases], times, (self, cases))

    @cached(lambda cases, section: (section,))
    def send_time(self, section: int) -> Array:
        """Return the time to send the output of a section to the next pipeline stage.

        If tp does not split the sequence, each tensor-parallel rank sends a share.

        Parameters
        ----------
        section : int
            Position of the section (run of equal layers).

        Returns
        -------
        ndarray, shape (cases,)
            Time [s].
        """
        if self.parent_selection is not None:
            whole, cases = self.parent_selection
            return whole.send_time(section)[cases]
        layouts = self.layouts
        pairs = zip(layouts.meshes, layouts.sequence_parallel, strict=True)
        split = np.array([1.0 if sequence else float(mesh.degree("tp")) for mesh, sequence in pairs])
        groups = layouts.communication_groups(range(len(layouts)), [("pp",)] * len(layouts))
        sizes = self.layer_times.output_bytes[section] / split[self.layout_index]
        return layouts.slowest_group_collective_time("send_recv", groups[..., self.layout_index], sizes)


@dataclass(frozen=True, slots=True)
class ConfigurationBatch:
    """Configurations whose step times are computed together, as arrays; they share schedule, ZeRO stage and stage cut.

    Attributes
    ----------
    cases : LayoutConfigurations
        The configurations: layouts, microbatches and recompute policies.
    assignment : StageAssignment
        Assignment of layers to pipeline stages.
    schedule : Schedule
        Pipeline schedule.
    zero : int
        ZeRO stage, 0 to 3.
    overlaps_gradient_exchange : bool
        True if gradients are exchanged during the backward pass, False if after it.
    input_arrival_time : ndarray, shape (cases,)
        Time after which the next training batch has arrived [s]; 0 for synthetic data.
    stage_end_method : {'order', 'closed'}
        How ends of stages are computed: pass by pass in the schedule's order, or by its closed forms if it has any,
        which assume equal chunks on a stage.
    cache : ResultCache
        Results that batches of the same cases and assignment have in common.
    """

    cases: LayoutConfigurations
    assignment: StageAssignment
    schedule: Schedule
    zero: int
    overlaps_gradient_exchange: bool
    input_arrival_time: Array | float = 0.0
    stage_end_method: Literal["order", "closed"] = "order"
    cache: ResultCache = field(default_factory=ResultCache, compare=False)

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def layouts(self) -> Layouts:
        """Parallel layouts (meshes with their programs) of the configurations."""
        return self.cases.layouts

    @property
    def backend(self) -> Backend:
        """Backend shared by all configurations: software, number formats, and models of kernel and link times."""
        return self.cases.layouts.backend

    @property
    def microbatches(self) -> Array:
        """Microbatches per step of each configuration, shape (cases,)."""
        return self.cases.microbatches

    @property
    def has_backward(self) -> bool:
        """True if the step has a backward pass (training), False for inference."""
        return self.layouts.has_backward

    @property
    def shards_parameters(self) -> bool:
        """True if parameters are gathered for every pass: ZeRO-3 over several ranks."""
        return self.zero == 3 and self._shared_out

    @property
    def scatters_every_pass(self) -> bool:
        """True if gradients are reduce-scattered after every backward pass: ZeRO-3, and ZeRO-2 with some software."""
        return self.backend.scatters_every_pass(self.zero, self.assignment.stages) and self._shared_out

    @property
    def _shared_out(self) -> bool:
        ranks = self.layouts.zero_shard_ranks[self.cases.layout_index] * self.assignment.replicas
        return bool(np.all(ranks > 1))

    @property
    def sharding(self) -> ZeroSharding:
        """Training state that data-parallel ranks shard: ``none``, ``states``, ``gradients`` or ``parameters``."""
        if self.zero == 0:
            return "none"
        return "parameters" if self.shards_parameters else "gradients" if self.scatters_every_pass else "states"

    def select(self, cases: IndexArray) -> ConfigurationBatch:
        """Select some of the configurations by index.

        Parameters
        ----------
        cases : ndarray of int
            Positions of the configurations to keep.

        Returns
        -------
        ConfigurationBatch
            The selected configurations, with a cache of their own.
        """
        arrival = self.input_arrival_time
        arrival = arrival[cases] if isinstance(arrival, np.ndarray) else arrival
        return replace(self, cases=self.cases.select(cases), input_arrival_time=arrival, cache=ResultCache())

    def without_contention(self) -> ConfigurationBatch:
        """Return the same configurations, with collectives that do not slow down overlapping computation."""
        software = self.backend.software.with_fields({"overlap.contention": 0.0})
        layouts = replace(self.layouts, backend=replace(self.backend, software=software), cache=ResultCache())
        return replace(self, cases=replace(self.cases, layouts=layouts, cache=ResultCache()), cache=ResultCache())

    @property
    def layer_times(self) -> LayerTimes:
        """Times of one layer of each section, with exposed offload and token exchange, shape (sections, cases) [s].

        A section is a run of equal layers.
        """
        if not self.has_backward or not (self.backend.offload.parts or self.overlaps_token_exchange):
            return self.cases.layer_times
        return self._waiting()

    @property
    def overlaps_token_exchange(self) -> bool:
        """True if the MoE token exchange of a microbatch overlaps with the computation of another microbatch."""
        return bool(self.backend.software.overlap.experts)

    @cached(lambda batch: (batch.zero, batch.schedule.name))
    def _waiting(self) -> LayerTimes:
        times = self.cases.layer_times
        if self.overlaps_token_exchange:
            times = with_exposed_unpaired_exchange(times, self._unpaired_share)
        return self._streamed(times) if self.backend.offload.parts else times

    @property
    def _unpaired_share(self) -> Array:
        """Share of a stage's passes that are not paired with a pass of another microbatch, shape (cases,).

        Unpaired passes (`Schedule.unpaired_passes`) wait for their MoE token exchange. All passes get the mean of both
        kinds. Megatron-Core pairs a forward and a backward pass only in the steady state of 1F1B. It fills the pipeline
        with one more pass for that (``overlap_moe_expert_parallel_comm`` in its pipeline_parallel/schedules.py).
        """
        stages, chunks = self.assignment.stages, self.assignment.chunks_per_stage
        unpaired = self.schedule.unpaired_passes(stages, self.microbatches, chunks) if stages > 1 else 1.0
        return np.asarray(np.minimum(unpaired / (self.microbatches * chunks), 1.0))

    def _streamed(self, times: LayerTimes) -> LayerTimes:
        layouts, layout = self.layouts, self.cases.layout_index
        program, offload = layouts.programs[0], self.backend.offload
        sections = len(program.sections)
        elements, learned = (layouts.section_parameter_counts(trained)[:sections, layout] for trained in (False, True))
        scattered = self.backend.scatters_every_pass(self.zero, self.assignment.stages)
        kept = offload.activation_share(section_field_values(program, "repeat"), full_recompute_sections(program))
        ranks, count = layouts.zero_shard_ranks[layout], self.microbatches
        shares = OffloadShares.from_zero_stage(self.zero, ranks, count, scattered=scattered, activations=kept)
        return with_offload_traffic(times, elements, learned, offload, self.backend.formats, shares)

    def expand_to_configurations(self, figures: Array) -> Array:
        """Expand values per layout to values per configuration.

        Parameters
        ----------
        figures : ndarray, shape (..., layouts)
            One value per layout.

        Returns
        -------
        ndarray, shape (..., cases)
            One value per case.
        """
        return np.take(figures, self.cases.layout_index, axis=-1)
