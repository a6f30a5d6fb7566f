"""A network, a system and a run become one prediction: count, price, one step, and what is said about it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.lowering.policies import runs
from paleo.operations.base import model_flops
from paleo.operations.contraction import executed_share
from paleo.parallel.placement import placement
from paleo.parallel.plan import host_warnings, idle_options, loading_warnings, plan, rare_utilisation, warnings
from paleo.pricing.communication import calibrated_families
from paleo.pricing.kernels import figures
from paleo.step.backend import backend_of
from paleo.step.exchange import check_sharded
from paleo.step.memory import Footprint
from paleo.step.step import priced, single_batch, step
from paleo.units import MICROSECOND, duration

if TYPE_CHECKING:
    from paleo.lowering.policies import Chunk
    from paleo.lowering.program import Program
    from paleo.network.graph import Graph
    from paleo.operations.tensor import Precision
    from paleo.parallel.placement import Mesh
    from paleo.parallel.plan import Plan
    from paleo.pricing.kernels import KernelTimes
    from paleo.schedules.base import Numeric
    from paleo.schedules.pipeline import Timeline
    from paleo.specs.calibration import Calibration
    from paleo.specs.hardware import Device, System
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.software import Software
    from paleo.step.backend import Backend
    from paleo.step.step import Priced, StepArrays
    from paleo.step.waiting import InputPipeline

Array = npt.NDArray[np.float64]
#: The kernels of functions that an importer did not know, and by which factor their times are guessed, either way.
OPAQUE, OPAQUE_SPREAD = "opaque", 3.0
#: The first cuDNN whose convolutions were timed for a calibration.
FIRST_TIMED = 5.0
#: The first cuDNN with kernels for an architecture's tensor cores, by its release notes; 8 for those not named.
FIRST_TENSOR_KERNELS = {"Volta": 7.0, "Turing": 7.0}
AMPERE_TENSOR_KERNELS = 8.0
#: Kernels shorter than this show a host that is slower than its profile says: eager frameworks take 10 to 46 us to
#: issue an operation (host times of profiles), and pauses between operations come on top.
SHORT = 100.0 * MICROSECOND
#: The largest share of short kernels in steps of untested software that were measured: beyond it the half-width stays.
MOST_SHORT = 0.5


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where a step's seconds go; the parts add up to the step. ``communication_total`` counts hidden collectives too.

    With a pipeline it is the breakdown of the busiest stage, and ``bubble`` is what that stage waits for others.
    ``stragglers``: waiting for the slowest of all ranks, where the run or the software says how unequal they are.
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
    def step(self) -> float:
        """Seconds of the step: the sum of its parts."""
        worked = self.compute + self.memory_bound + self.launch
        return worked + self.communication_exposed + self.bubble + self.optimizer + self.input + self.stragglers


@dataclass(frozen=True, slots=True)
class Spreads:
    """90 % half-widths (log) that measured steps ask for beside those of kernels and links.

    ``kernels``: the part of kernels' half-widths that all of a device have in common; the rest averages out over them.
    ``software``: of every step. ``untested``: more of software whose profile was fitted to no steps on the device's
    architecture, and ``host``: of the share of short kernels under such software, which a host has to keep up with.
    ``library``: of convolutions by a library that was not timed, or that is older than the tensor cores
    it runs on. ``update``: of what happens once a step, over the share of the update.

    Fitted by `paleo.calibrate.spreads` to the errors of 1,587 steps of 30 sources, each source weighted alike. With
    spreads that were fitted without it, 16 of the 27 sources of six rows or more have 80 to 95 % of them inside, 6
    fewer and 5 more; half-widths are 0.22 on the mean of the sources. ``kernels`` is known badly: 0.03 to 0.12 do
    alike.
    """

    kernels: float = 0.04
    software: float = 0.067
    untested: float = 0.118
    host: float = 0.9
    library: float = 0.446
    update: float = 0.72


SPREADS = Spreads()


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """What the half-width of a step's interval is made of; arrays hold its low and its high end, (2,), or those of many
    steps, (2, steps), whose shares are (steps,) then.

    ``kernels``: half-widths of kernels weighted by their shares of the kernels' time, and ``scatter`` the root of the
    sum of the squares of these, which is what is left of errors that go either way. ``unknown``: the same weighted sum
    over kernels that no measured one of the architecture, or none at all, speaks for. ``links``: the half-width of the
    links times the share of exposed communication. ``short``, ``library`` and ``update``: shares of kernels shorter
    than `SHORT` that a host issues one by one (up to `MOST_SHORT`), of convolutions by a library that was not timed,
    and of the optimizer's update. ``tested``: 1 where the software was fitted to steps on the architecture, else 0.
    Under constant rates (``constants``), whose factors hold for steps, there are kernels alone.
    """

    kernels: Array
    scatter: Array
    unknown: Array
    links: Array
    short: Numeric
    library: Numeric
    update: Numeric
    tested: Numeric
    constants: bool

    def half_widths(self, spreads: Spreads = SPREADS) -> Array:
        """Logarithms from the predicted step down to the low and up to the high end: squares add up."""
        if self.constants:
            return self.kernels
        variance = (spreads.kernels * self.kernels) ** 2 + (1.0 - spreads.kernels**2) * self.scatter**2
        variance += self.unknown**2 + self.links**2
        assumed = spreads.untested**2 + (spreads.host * self.short) ** 2
        software = spreads.software**2 + (1.0 - self.tested) * assumed
        once = (spreads.library * self.library) ** 2 + (spreads.update * self.update) ** 2
        half_widths: Array = np.sqrt(variance + software + once)
        return half_widths


@dataclass(frozen=True, repr=False)
class Prediction:
    """One training step (or forward pass) of ``model`` under ``plan`` on ``system``, in SI. ``steps`` is that step with
    all its arrays, ``pieces`` are those of a pipeline, ``kernels`` the prices of the program's kernels in its order."""

    model: ModelSpec
    system: System
    run: Run
    plan: Plan
    graph: Graph
    program: Program
    kernels: KernelTimes
    steps: StepArrays
    breakdown: Breakdown
    memory: Footprint
    flops: float
    uncertainty: Uncertainty
    calibration: str
    unmodelled: tuple[str, ...]
    warnings: tuple[str, ...]
    host_memory: float = 0.0
    input_pipeline: InputPipeline | None = None
    pieces: tuple[Chunk, ...] = ()

    def __repr__(self) -> str:
        return f"<Prediction: {self.headline}>"

    @property
    def headline(self) -> str:
        """The step in a line."""
        low, high = (duration(end) for end in self.interval)
        fits = "" if self.memory.fits else ", does not fit"
        machines = self.system.share(self.plan.gpus)
        return f"{self.model.name} on {machines}, {duration(self.step_time)} a step ({low} to {high}){fits}"

    @cached_property
    def timeline(self) -> Timeline:
        """The step as tasks on streams, or a pipeline's passes on stages (a window of them, where it has very many
        microbatches)."""
        from paleo.step.timeline import step_timeline

        return step_timeline(self.steps, self.program, self.input_pipeline)

    @cached_property
    def slowed(self) -> float:
        """Seconds of ``breakdown.communication_exposed`` that computation loses to the collectives beside it: what the
        step would save if it lost none (``overlap.contention`` of the software)."""
        batch = self.steps.batch
        if batch.backend.software.overlap.contention == 0:
            return 0.0
        saved = float(self.steps.step_time[0] - step(batch.without_contention()).step_time[0])
        return min(max(saved, 0.0), self.breakdown.communication_exposed)

    def variant(self, system: System | None = None, software: Software | None = None, **fields: object) -> Prediction:
        """The prediction of a run that differs in some ``fields``, at the same microbatch unless that is one of them;
        on another ``system`` where one is given. ``software`` as in `predict`."""
        run = self.run.model_copy(update={"microbatch": self.plan.microbatch, **fields})
        return predict(self.model, self.system if system is None else system, run, software)

    def stage_footprint(self, stage: int) -> Footprint:
        """What the devices of one stage of a pipeline hold."""
        return _footprint(self.steps, self.system, self.steps.batch.backend.software, stage)

    @property
    def step_time(self) -> float:
        """Seconds of one step."""
        return self.breakdown.step

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which nine of ten real steps should lie; collectives and bubbles take the same factors."""
        low, high = np.exp(self.uncertainty.half_widths() * (-1.0, 1.0)).tolist()
        return self.step_time * low, self.step_time * high

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
        """Model FLOP of the step over what all gpus could do in it at the peak of the dtype: what the network asks for,
        a causal mask's half of attention, nothing that is computed again (Chowdhery et al., PaLM, 2022, appendix B,
        who count the whole rectangle of scores)."""
        return self.flops / self._possible

    @property
    def hfu(self) -> float:
        """The same with the FLOP that the devices execute: recomputed layers and scores, padding, too."""
        return self.executed_flops / self._possible

    @property
    def _possible(self) -> float:
        device = self.system.device
        return self.step_time * self.plan.gpus * device.peak_flops_per_s(device.arithmetic(self.plan.dtype))

    @property
    def executed_flops(self) -> float:
        """FLOP that all devices execute in a step."""
        ranks = self.plan.mesh.size // self.plan.stages
        kernel_flops = (
            executed_share(counted.kernel)
            * counted.kernel.flops
            * runs(section, counted)
            * counted.times
            * section.repeat
            for section in self.program.sections
            for counted in section.kernels
        )
        return sum(kernel_flops) * self.plan.microbatches * ranks


def predict(
    model: ModelSpec,
    system: System,
    run: Run,
    software: Software | None = None,
    calibration: Calibration | None = None,
) -> Prediction:
    """Count, price, schedule. Pure: the same inputs give the same prediction, and nothing is kept. ``software`` and
    ``calibration`` stand in for the profile and the calibration file that the run names."""
    layout = plan(model, system, run)
    backend = backend_of(system, run, layout.dtype, software, calibration)
    check_sharded(run.compress, layout.parallel.zero)
    graph = backend.graph(model, layout.microbatch * layout.dp)
    placed = placement(graph, layout.parallel, run.placement, run.expert_imbalance)
    program = priced(backend.lowered(graph, placed, layout.mesh), layout, backend)
    arriving = backend.input_pipeline(graph, layout.gpus, layout.mesh.size / layout.dp, layout.local_batch)
    steps = step(single_batch(program, layout, backend, arriving))
    breakdown = Breakdown(**{part: float(seconds[0]) for part, seconds in steps.parts.items()})
    host_bytes = float(steps.stage_memory.host_bytes.mean())
    flops = _model_flops(graph, backend.formats, layout, run)
    return Prediction(
        model,
        system,
        run,
        layout,
        graph,
        program.program,
        program.kernels,
        steps,
        breakdown,
        _footprint(steps, system, backend.software, int(steps.stage_memory.fullest[0])),
        flops,
        _uncertainty(
            program,
            layout,
            backend,
            exposed=breakdown.communication_exposed / breakdown.step,
            update=breakdown.optimizer / breakdown.step,
        ),
        backend.calibration(layout.mesh),
        unmodelled(program.program, run, arriving is not None),
        (
            *warnings(layout, graph, placed),
            *idle_options(run, system, layout),
            *host_warnings(system, layout, host_bytes),
            *rare_utilisation(system, layout, flops / breakdown.step),
            *loading_warnings(run, breakdown.input / breakdown.step),
        ),
        host_bytes,
        arriving,
        tuple(program.pieces),
    )


def _footprint(steps: StepArrays, system: System, software: Software, stage: int) -> Footprint:
    """What one stage holds."""
    sizes = steps.stage_memory
    reserved = float(sizes.reserved[0])
    return Footprint(
        parameters=float(sizes.states.parameters[stage, 0]),
        gradients=float(sizes.states.gradients[stage, 0]),
        optimizer=float(sizes.states.optimizer[stage, 0]),
        activations=float(sizes.activations[stage, 0]),
        workspace=float((sizes.workspace + sizes.states.gathered)[stage, 0]) + reserved,
        reserved=reserved,
        fragmentation=software.memory.fragmentation if system.device.kind == "gpu" else 0.0,
        capacity=system.device.memory.capacity,
    )


def _model_flops(graph: Graph, formats: Precision, layout: Plan, run: Run) -> float:
    """FLOP that the network asks for over the whole global batch, each rank's padding left out."""
    counts = [(node.repeat, model_flops(operation, formats)) for node in graph.nodes for operation in node.operations]
    flops = sum(repeat * (forward + (0.0 if run.forward_only else backward)) for repeat, (forward, backward) in counts)
    return flops / graph.batch * layout.global_batch


def unmodelled(program: Program, run: Run, loads: bool) -> tuple[str, ...]:
    """What a real step has and this one leaves out, or knows by its bytes alone: silence is never a number.
    ``loads``: data loading is part of it."""
    loading = "input pipeline (storage, decoding, host-to-device copies)"
    constant = "launches of kernels and latencies of links, as ppp= is a share of peaks alone"
    shares_of_peaks = [constant] if run.calibration.startswith("ppp=") else []
    always = (*([] if loads else [loading]), *shares_of_peaks)
    launches = [
        (counted.kernel, counted.times * section.repeat) for section in program.sections for counted in section.kernels
    ]
    guessed = [(kernel, times) for kernel, times in launches if kernel.operation == OPAQUE]
    if not guessed:
        return always
    shares = [
        sum(getattr(kernel, count) * times for kernel, times in guessed)
        / (sum(getattr(kernel, count) * times for kernel, times in launches) or 1.0)
        for count in ("flops", "bytes")
    ]
    names = ", ".join(dict.fromkeys(kernel.name for kernel, _ in guessed if kernel.phase == "forward"))
    text = f"functions that the importer did not know: {shares[0]:.1%} of FLOP, {shares[1]:.1%} of bytes"
    return (*always, f"{text} ({names[:200]})")


def _uncertainty(program: Priced, layout: Plan, backend: Backend, *, exposed: float, update: float) -> Uncertainty:
    """Of a priced program under a plan; ``exposed`` and ``update`` are the shares of a step that exposed communication
    and the optimizer's update take."""
    kernels = program.kernels
    counted = [(each, section.repeat) for section in program.program.sections for each in section.kernels]
    shares = kernels.total * np.array([each.times * repeat for each, repeat in counted], dtype=np.float64)
    shares = shares / (float(shares.sum()) or 1.0)
    half_widths = np.abs(np.log(np.stack([kernels.low, kernels.high])))
    families = np.array([each.kernel.family for each, _ in counted])
    unknown = np.isin(families, list(backend.prices.foreign)) * half_widths
    unknown = unknown + np.array([each.kernel.operation == OPAQUE for each, _ in counted]) * np.log(OPAQUE_SPREAD)
    software, device, constants = backend.software, backend.system.device, backend.prices.rates is not None
    weighted = shares * half_widths
    return Uncertainty(
        kernels=weighted.sum(axis=1) + (shares * unknown).sum(axis=1) * constants,
        scatter=np.sqrt((weighted**2).sum(axis=1)),
        unknown=(shares * unknown).sum(axis=1),
        links=exposed * _links(backend, layout.mesh),
        short=min(float(shares[kernels.total < SHORT].sum()), MOST_SHORT) * (not software.host.whole_iteration),
        library=float(shares[families == "conv"].sum()) * untimed(software, device, layout.dtype),
        update=update,
        tested=float(software.fit is not None and device.architecture in software.fit.architectures),
        constants=constants,
    )


def _links(backend: Backend, mesh: Mesh) -> Array:
    """Half-widths of large collectives over the outermost links of a mesh."""
    if mesh.size == 1 or backend.prices.rates is not None:
        return np.zeros(2)
    families = calibrated_families(backend.fabric, "all_reduce", backend.fabric.links(1, mesh.size))
    return np.abs(np.log(next(iter(families.values())).factors(np.inf)))


def untimed(software: Software, device: Device, dtype: str) -> bool:
    """Whether convolutions are those of a library that no calibration stands for: a framework's own, cuDNN before the
    first that was timed, or one without kernels for the tensor cores that are asked for."""
    release = software.convolutions.cudnn
    least = FIRST_TENSOR_KERNELS.get(device.architecture, AMPERE_TENSOR_KERNELS)
    early = figures(device, dtype).tensor_cores and release < least
    return software.convolutions.algorithms is not None or release < FIRST_TIMED or early
