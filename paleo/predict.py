"""Prediction of one step from a network, a system and a run: count, price, schedule, warn, and list what is omitted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.lowering.kernel_launches import unmatched_recompute_module_warnings
from paleo.lowering.stages_and_recompute import ModelChunk, kernel_runs_per_microbatch
from paleo.operations.base import configure_optimizer, model_flops
from paleo.operations.contraction import executed_flop_share
from paleo.parallel.plan import (
    Plan,
    high_utilisation_warnings,
    host_memory_warnings,
    ineffective_option_warnings,
    input_pipeline_warnings,
    missing_routing_time_warnings,
    missing_sequence_parallel_warnings,
    plan,
    plan_warnings,
    shared_expert_overlap_warnings,
    tpu_software_warnings,
)
from paleo.step.backend import Backend, build_backend
from paleo.step.interval import OPAQUE_KERNEL_KIND, StepUncertainty, step_uncertainty
from paleo.step.memory import MemoryFootprint
from paleo.step.step import StepPredictions, predict_steps, single_configuration_batch, timed_program
from paleo.step.waiting import InputPipeline, describe_unmodelled_straggler_wait
from paleo.units import format_duration

if TYPE_CHECKING:
    from paleo.lowering.program import Program
    from paleo.network.graph import Graph
    from paleo.operations.tensor import Precision
    from paleo.pricing.kernels import KernelTimes
    from paleo.schedules.pipeline_simulation import Timeline
    from paleo.specs.calibration import Calibration
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.software import SoftwareProfile
    from paleo.specs.system import System
    from paleo.step.configuration_batch import ConfigurationBatch

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Parts of a step's time [s]. The parts add up to the step.

    ``communication_total`` also counts hidden collectives and is no part of the sum. With a pipeline it is the
    breakdown of the busiest stage, and ``bubble`` is the time that this stage waits for others. ``stragglers`` is the
    wait for the slowest of all ranks, if the run or the software gives their variation.
    """

    compute: float
    memory_bound: float
    launch: float
    communication_exposed: float
    communication_total: float
    bubble: float
    optimizer: float
    input: float
    stragglers: float = 0.0

    @property
    def step_time(self) -> float:
        """Step time: the sum of the parts [s]."""
        kernels = self.compute + self.memory_bound + self.launch
        return kernels + self.communication_exposed + self.bubble + self.optimizer + self.input + self.stragglers


@dataclass(frozen=True, repr=False, eq=False)
class Prediction:
    """One training step (or forward pass) of ``model`` under ``plan`` on ``system``, in SI units.

    ``graph`` has the layers of the network at the local batch of all replicas. ``program`` is what one rank computes
    and sends. ``kernels`` are the times of its kernels in order. ``model_chunks`` are the pieces of a pipeline.
    ``step_arrays`` is the step of this configuration with all its arrays. ``breakdown`` is the time of the step by
    part, and ``memory`` the bytes of the fullest device by purpose. ``model_flops_per_step`` are the FLOP of the
    network in a step, without recomputation and padding. ``host_memory`` is host memory for each device [bytes].
    ``calibration`` says which measurements the prices rest on. ``unmodelled`` lists what a real step has and this
    prediction omits.

    Predictions are compared by identity: a prediction equals only itself.
    """

    model: ModelSpec
    system: System
    run: Run
    plan: Plan
    graph: Graph
    program: Program
    kernels: KernelTimes
    step_arrays: StepPredictions
    breakdown: Breakdown
    memory: MemoryFootprint
    model_flops_per_step: float
    uncertainty: StepUncertainty
    calibration: str
    unmodelled: tuple[str, ...]
    warnings: tuple[str, ...]
    host_memory: float = 0.0
    input_pipeline: InputPipeline | None = None
    model_chunks: tuple[ModelChunk, ...] = ()

    def __repr__(self) -> str:
        return f"<Prediction: {self.headline}>"

    @property
    def headline(self) -> str:
        """Summary of the step in one line."""
        low, high = (format_duration(end) for end in self.interval)
        fits = "" if self.memory.fits else ", does not fit"
        machines = self.system.gpus_and_nodes_text(self.plan.gpus)
        return f"{self.model.name} on {machines}, {format_duration(self.step_time)} a step ({low} to {high}){fits}"

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the step: tasks on streams, or the passes of a pipeline on its stages.

        With very many microbatches it shows only some of them.
        """
        from paleo.step.timeline import step_timeline

        return step_timeline(self.step_arrays, self.program, self.input_pipeline)

    @cached_property
    def contention_time(self) -> float:
        """Part of ``breakdown.communication_exposed`` that computation loses to overlapping collectives [s].

        The time is the difference to a step without contention (``overlap.contention`` of the software profile is 0).
        """
        batch = self.step_arrays.batch
        if batch.backend.software.overlap.contention == 0:
            return 0.0
        saved = float(self.step_arrays.step_time[0] - predict_steps(batch.without_contention()).step_time[0])
        return min(max(saved, 0.0), self.breakdown.communication_exposed)

    def predict_variant(
        self, system: System | None = None, software: SoftwareProfile | None = None, **fields: object
    ) -> Prediction:
        """Predict the same run with some fields changed; the microbatch is kept unless ``microbatch`` is given.

        Parameters
        ----------
        system : System, optional
            Another system.
        software : SoftwareProfile, optional
            Profile to use instead of the run's.
        **fields : object
            Fields of the run with new values.

        Returns
        -------
        Prediction
            The prediction.

        Raises
        ------
        SpecError
            If a field or value is not valid.
        """
        from paleo.specs.run import replace_fields, user_set_fields

        changes = user_set_fields(type(self.run)(**fields))
        run = replace_fields(self.run, {"microbatch": self.plan.microbatch, **changes})
        return predict(self.model, self.system if system is None else system, run, software)

    def stage_footprint(self, stage: int) -> MemoryFootprint:
        """Return the memory of the devices of one pipeline stage.

        Parameters
        ----------
        stage : int
            Number of the stage, from 0.

        Returns
        -------
        MemoryFootprint
            Bytes by part.
        """
        return _footprint(self.step_arrays, self.system, self.step_arrays.batch.backend.software, stage)

    @property
    def step_time(self) -> float:
        """Time of one step [s]."""
        return self.breakdown.step_time

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper bound of the step time [s] that hold 90 % of measured steps.

        The times of collectives and pipeline bubbles have the same relative bounds.
        """
        low, high = np.exp(self.uncertainty.interval_half_widths() * (-1.0, 1.0)).tolist()
        return self.step_time * low, self.step_time * high

    @cached_property
    def framework_violations(self) -> tuple[str, ...]:
        """Documented limits of the software's framework that the plan violates, one sentence each."""
        return tuple(_unsupported(self.plan, self.run, self.graph, self.system, self.step_arrays.batch))

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
        """Model FLOP utilisation: FLOP of the network over the peak of all GPUs in the step time, 0 to 1.

        Recomputation does not count. Causal attention counts half of the scores (Chowdhery et al., PaLM, 2022, appendix
        B, count all). Convolutions count the products of the algorithm that is used, which are fewer with Winograd's
        and Fourier transforms; `direct_flops_per_s` counts the FLOP of the direct algorithm.
        """
        return self.model_flops_per_step * self.executed_flop_ratio / self._peak_flops

    @property
    def direct_flops_per_s(self) -> float:
        """FLOP of the network per second on all GPUs, with convolutions counted by the direct algorithm."""
        return self.model_flops_per_step / self.step_time

    @cached_property
    def executed_flop_ratio(self) -> float:
        """FLOP that the algorithms of all kernels execute (Winograd, Fourier transforms), over those of direct ones."""
        return _executed_flop_ratio(self.program, self.step_arrays.batch.backend)

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilisation: executed FLOP, with recomputation and padding, over the peak."""
        return self.executed_flops * self.executed_flop_ratio / self._peak_flops

    @property
    def _peak_flops(self) -> float:
        device = self.system.device
        return self.step_time * self.plan.gpus * device.peak_flops_per_s(device.arithmetic_dtype(self.plan.dtype))

    @property
    def executed_flops(self) -> float:
        """FLOP that all devices execute in a step, with convolutions counted by the direct algorithm."""
        ranks = self.plan.mesh.size // self.plan.stages
        return float(_counted_flops(self.program).sum()) * self.plan.microbatches * ranks


def _counted_flops(program: Program) -> Array:
    """Return the FLOP that each kernel executes in one microbatch over all its runs, shape (kernels,).

    Convolutions are counted by the direct algorithm.
    """
    counts = []
    for section in program.sections:
        for each in section.kernels:
            flops = executed_flop_share(each.kernel) * each.kernel.flops
            counts.append(flops * kernel_runs_per_microbatch(section, each) * each.repetitions * section.repeat)
    return np.array(counts)


def _executed_flop_ratio(program: Program, backend: Backend) -> float:
    """Return the FLOP that the algorithms of all kernels execute (Winograd, Fourier), over those of direct ones."""
    flops = _counted_flops(program)
    kernels = [each.kernel for section in program.sections for each in section.kernels]
    work = backend.predictor.relative_algorithm_flops(kernels)
    return float(work @ flops / total) if (total := flops.sum()) > 0 else 1.0


def predict(
    model: ModelSpec,
    system: System,
    run: Run,
    software: SoftwareProfile | None = None,
    calibration: Calibration | None = None,
) -> Prediction:
    """Predict the time and memory of one training step of a network on a system.

    The function is pure: the same inputs give the same prediction. Graphs of the latest networks are cached.

    Parameters
    ----------
    model : ModelSpec
        Network, from `load_model`.
    system : System
        Machine, from `load_system`.
    run : Run
        Batch, strategy, precision and so on.
    software : SoftwareProfile, optional
        Profile to use instead of the run's.
    calibration : Calibration, optional
        Calibration to use instead of the run's.

    Returns
    -------
    Prediction
        Step time with breakdown and interval, memory, warnings.

    Raises
    ------
    PlanError
        If the run does not suit the network and the system.
    SpecError
        If a name in the run is unknown.
    """
    if isinstance(model, str) or isinstance(system, str) or isinstance(run, dict):
        raise SpecError("predict takes results of load_model and load_system, and a Run; paleo.estimate takes names")
    layout = plan(model, system, run)
    backend = build_backend(system, run, layout.dtype, software, calibration, strategy=layout.strategy)
    batch = layout.microbatch * layout.dp
    graph = backend.cached_graph(model, batch, layout.mesh.degree("tp"))
    placed = backend.placement(graph, layout.strategy)
    program = timed_program(backend.lower(graph, placed, layout.mesh), layout, backend)
    arriving = backend.input_pipeline(graph, layout.gpus, layout.mesh.size / layout.dp, layout.local_batch)
    steps = predict_steps(single_configuration_batch(program, layout, backend, arriving))
    memory = _footprint(steps, system, backend.software, int(steps.stage_memory.fullest_stage[0]))
    breakdown = Breakdown(**{part: float(seconds[0]) for part, seconds in steps.breakdown.items()})
    host_memory = float(steps.stage_memory.host_bytes.mean())
    flops = _model_flops(backend.cached_graph(model, batch), backend.formats, layout, run)
    exposed, update = (part / breakdown.step_time for part in (breakdown.communication_exposed, breakdown.optimizer))
    return Prediction(
        model,
        system,
        run,
        plan=layout,
        graph=graph,
        program=program.program,
        kernels=program.kernels,
        step_arrays=steps,
        breakdown=breakdown,
        memory=memory,
        model_flops_per_step=flops,
        uncertainty=step_uncertainty(program, layout, backend, exposed=exposed, update=update),
        calibration=backend.describe_calibration(layout.mesh),
        unmodelled=(
            *_unmodelled_effects(program.program, run, loads=arriving is not None),
            *_straggler_warnings(run, backend.software, layout, breakdown),
        ),
        warnings=(
            *model.remarks,
            *plan_warnings(layout, graph, placed),
            *_run_warnings(run, system, layout, graph, backend.software),
            *_unsupported(layout, run, graph, system, steps.batch),
            *host_memory_warnings(system, layout, host_memory),
            *input_pipeline_warnings(run, breakdown.input / breakdown.step_time),
            *_tight_memory_warnings(memory),
            *_rare_utilisation(flops / breakdown.step_time, layout, program.program, backend),
        ),
        host_memory=host_memory,
        input_pipeline=arriving,
        model_chunks=tuple(program.model_chunks),
    )


def _rare_utilisation(flops_per_s: float, layout: Plan, program: Program, backend: Backend) -> list[str]:
    """Warn of an implausibly high MFU of a prediction.

    The FLOP that fast convolution algorithms save are computed only if the MFU of the direct count is too high.
    """
    rare = high_utilisation_warnings(backend.system, layout, flops_per_s)
    return rare and high_utilisation_warnings(
        backend.system, layout, flops_per_s * _executed_flop_ratio(program, backend)
    )


#: Fraction of the memory that should stay free; it is the mean error of predicted memory.
MEMORY_HEADROOM_SHARE = 0.05


def _tight_memory_warnings(memory: MemoryFootprint) -> list[str]:
    """Warn if the free device memory is smaller than the mean error of predicted memory (5 % of the capacity).

    Parameters
    ----------
    memory : MemoryFootprint
        Memory of the fullest device.

    Returns
    -------
    list of str
        One sentence or none.

    Examples
    --------
    >>> _tight_memory_warnings(MemoryFootprint(6.0, 2.0, 4.0, 5.0, 2.0, 1.0, 0.125, capacity=19.5))[0][:38]
    '97 % of the memory is taken: predicted'
    """
    taken = memory.total / memory.capacity
    if not memory.fits or taken <= 1.0 - MEMORY_HEADROOM_SHARE:
        return []
    off = f"predicted sizes are {100 * MEMORY_HEADROOM_SHARE:.0f} % off on average"
    return [f"{100 * taken:.0f} % of the memory is taken: {off}, so it may not fit"]


def _footprint(steps: StepPredictions, system: System, software: SoftwareProfile, stage: int) -> MemoryFootprint:
    """Return the device memory of one pipeline stage by purpose: parameters, gradients, activations and so on."""
    sizes = steps.stage_memory
    reserved = float(sizes.reserved[0])
    return MemoryFootprint(
        parameters=float(sizes.states.parameters[stage, 0]),
        gradients=float(sizes.states.gradients[stage, 0]),
        optimizer=float(sizes.states.optimizer[stage, 0]),
        activations=float(sizes.activations[stage, 0]),
        workspace=float((sizes.workspace + sizes.states.gathered_parameters)[stage, 0]) + reserved,
        reserved=reserved,
        fragmentation=software.memory.fragmentation if system.device.kind == "gpu" else 0.0,
        capacity=system.device.memory.usable_bytes,
        flat_buffer_cache=float(sizes.flat_buffer_cache[stage, 0]),
    )


def _model_flops(graph: Graph, formats: Precision, layout: Plan, run: Run) -> float:
    """Return the FLOP of the network over the whole global batch, without the padding of ranks."""
    counts = [(node.repeat, model_flops(operation, formats)) for node in graph.nodes for operation in node.operations]
    flops = sum(repeat * (forward + (0.0 if run.forward_only else backward)) for repeat, (forward, backward) in counts)
    return flops / graph.batch * layout.global_batch


def _unmodelled_effects(program: Program, run: Run, *, loads: bool) -> tuple[str, ...]:
    """List effects of a real training step that the prediction omits or only guesses.

    Guessed are functions that an importer did not know. Every prediction prints the list.

    Parameters
    ----------
    program : Program
        One rank's program.
    run : Run
        The run.
    loads : bool
        True if the prediction includes data loading.

    Returns
    -------
    tuple of str
        One phrase for each effect.
    """
    loading = "input pipeline (storage, decoding, host-to-device copies)"
    constant = "launches of kernels and latencies of links, as ppp= is a share of peaks alone"
    matrices = None if run.forward_only else configure_optimizer(run.optimizer).matrix_update
    always = [] if loads else [loading]
    always += [constant] if run.calibration.startswith("ppp=") else []
    always += [] if matrices is None else [matrices.unmodelled_costs]
    kernels = ((section.repeat, counted) for section in program.sections for counted in section.kernels)
    launches = [(counted.kernel, counted.repetitions * repeat) for repeat, counted in kernels]
    guessed = [(kernel, times) for kernel, times in launches if kernel.operation == OPAQUE_KERNEL_KIND]
    if not guessed:
        return tuple(always)
    shares = []
    for count in ("flops", "bytes"):
        part, whole = (
            sum(getattr(each, count) * times for each, times in launched) for launched in (guessed, launches)
        )
        shares.append(part / (whole or 1.0))
    names = ", ".join(dict.fromkeys(kernel.name for kernel, _ in guessed if kernel.phase == "forward"))
    text = f"functions that the importer did not know: {shares[0]:.1%} of FLOP, {shares[1]:.1%} of bytes"
    return (*always, f"{text} ({names[:200]})")


def _straggler_warnings(run: Run, software: SoftwareProfile, layout: Plan, breakdown: Breakdown) -> list[str]:
    """Warn of the time that ranks would wait for the slowest one if they were not taken to be equal."""
    kernels = breakdown.compute + breakdown.memory_bound + breakdown.launch
    ranks = float(layout.mesh.replicas * layout.stages)
    return [*filter(None, [describe_unmodelled_straggler_wait(run, software, ranks, kernels / breakdown.step_time)])]


def _run_warnings(run: Run, system: System, layout: Plan, graph: Graph, software: SoftwareProfile) -> list[str]:
    """Warn of run options that have no effect on this network, system or software, and of costs left out."""
    return [
        *ineffective_option_warnings(run, system, layout, graph),
        *unmatched_recompute_module_warnings(run.recompute.modules, graph),
        *_idle_servers(run),
        *tpu_software_warnings(run, system),
        *missing_sequence_parallel_warnings(graph, run, software, layout),
        *shared_expert_overlap_warnings(graph, software, layout),
        *missing_routing_time_warnings(graph, run, software, system),
    ]


def _unsupported(layout: Plan, run: Run, graph: Graph, system: System, batch: ConfigurationBatch) -> list[str]:
    """Return the documented limits of the software's framework that a plan violates."""
    software, overlapped = batch.backend.software, batch.overlaps_gradient_exchange
    if software.framework is None or run.forward_only:
        return []
    from paleo.parallel.framework_checks import plan_quantities, restriction_messages
    from paleo.specs.framework_capabilities import load_framework

    framework = load_framework(software.framework)
    return restriction_messages(framework, plan_quantities(layout, run, graph, system, software, overlapped=overlapped))


def _idle_servers(run: Run) -> list[str]:
    """Warn of parameter servers that the run sets but its consistency model does not use.

    Modules of consistency models are imported only if the run sets servers.
    """
    if run.exchange.servers is None:
        return []
    from paleo.consistency.base import unused_server_warnings

    return unused_server_warnings(run)
