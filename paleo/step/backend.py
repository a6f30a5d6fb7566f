"""What prices the programs of a run: its software, formats, kernel prices and links, whatever its degrees and batch
shares are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from paleo.layers.base import Choices
from paleo.lowering.launches import Checkpoints, Dispatch, LoweringOptions
from paleo.lowering.policies import cut, cut_by_work
from paleo.lowering.program import lower, without_backward
from paleo.network.graph import build, changed
from paleo.operations.base import optimizer
from paleo.operations.tensor import autocast, precision, scaled
from paleo.parallel.placement import parse_strategy, placement
from paleo.pricing.communication import Fabric, collective_sources
from paleo.pricing.kernels import pricer
from paleo.pricing.links.topology import node_placement, states_topology
from paleo.schedules.base import SCHEDULES
from paleo.specs.software import load_software
from paleo.step.exchange import coding_kernels, method_of, tensor_calls
from paleo.step.memory import clip_kernels, link_rate, offload_of, update_kernel
from paleo.step.section_times import AHEAD
from paleo.step.waiting import input_pipeline, sample_bytes, usual_input

if TYPE_CHECKING:
    from paleo.compression.base import Compression, SummedGradient
    from paleo.lowering.launches import BesideDispatch, Chains
    from paleo.lowering.policies import Chunk
    from paleo.lowering.program import Program
    from paleo.network.graph import Graph
    from paleo.operations.base import Kernel, Optimizer
    from paleo.operations.tensor import Precision
    from paleo.parallel.placement import Mesh, Placement, Strategy
    from paleo.pricing.kernels import Pricer
    from paleo.schedules.base import Numeric
    from paleo.specs.calibration import Calibration
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.software import Software
    from paleo.specs.system import System
    from paleo.step.memory import Offload
    from paleo.step.waiting import InputPipeline

Array = npt.NDArray[np.float64]
#: Networks at a batch that are kept for the predictions that follow: rows of a table, points of a curve and systems
#: that are compared ask for the same ones again.
MOST_GRAPHS = 16


@dataclass(frozen=True, slots=True)
class _Network:
    """A network at a batch. Models are told apart by identity; the model beside it keeps another from taking that."""

    identity: int
    batch: int
    choices: Choices
    parameters: str
    model: ModelSpec = field(compare=False)
    overrides: Mapping[str, Any] = field(compare=False)

    def graph(self) -> Graph:
        return build(self.model, batch=self.batch, choices=self.choices, overrides=self.overrides)


class RecentGraphs:
    """The latest graphs by model, batch, choices and parameters; the least recently used goes first."""

    def __init__(self, most: int = MOST_GRAPHS) -> None:
        self._graph = lru_cache(most)(_Network.graph)

    def graph(self, model: ModelSpec, batch: int, choices: Choices, overrides: Mapping[str, Any]) -> Graph:
        """The network at a batch: the kept one, or else built and kept."""
        return self._graph(_Network(id(model), batch, choices, repr(overrides), model, overrides))


RECENT = RecentGraphs()


@dataclass(frozen=True, slots=True)
class Backend:
    """What prices the programs of a run, whatever its degrees and batch shares are."""

    run: Run
    system: System
    formats: Precision
    software: Software
    prices: Pricer
    fabric: Fabric
    offload: Offload
    compression: Compression | None = None

    @property
    def choices(self) -> Choices:
        """How layers are carried out."""
        software = self.software
        gates: Literal["fused", "separate"] = "fused" if software.fusion.passes else "separate"
        wide = frozenset(software.formats.wide if self.formats.casts else ())
        return Choices(
            attention=self.run.attention or software.attention.implementation,
            loss=self.run.cross_entropy or software.fusion.loss,
            gates=gates,
            gelu=software.fusion.gelu,
            experts="fused" if software.host.whole_iteration else software.fusion.experts,
            wide=wide,
            metrics=0 if self.run.forward_only else software.fusion.metrics,
            recurrence=software.fusion.recurrence,
            relative=software.attention.relative,
            tied=software.gradients.tied,
            memories_through_host=software.host.feeds is not None and not self.run.forward_only,
            latent_rotation=software.host.latent_rotation,
            grouped_router=software.host.grouped_router,
            sigmoid_router=software.host.sigmoid_router,
            latents=software.parallelism.latents,
            rotation=software.fusion.rotation,
        )

    @property
    def optimizer(self) -> Optimizer:
        """The run's optimizer as the software carries it out."""
        name, gradients = self.run.optimizer, self.software.gradients
        stepwise, listwise = (
            [optimizer(each).name for each in names]
            for names in (gradients.stepwise_updates, gradients.listwise_updates)
        )
        return optimizer(name, stepwise=name in stepwise, listwise=name in listwise)

    @property
    def chains(self) -> Chains:
        """Which chains of element-wise passes are one kernel."""
        software = self.software
        if software.fusion.passes:
            return "convolutions" if software.fusion.convolutions else "all"
        if self.run.forward_only:
            return "none" if software.fusion.norms == "never" else "norms"
        trained: dict[str, Chains] = {"forward": "norms forward", "both": "norms"}
        return trained.get(software.fusion.norms, "none") if self.formats.activation < self.formats.wide else "none"

    @property
    def call(self) -> float:
        """Seconds of the host for issuing a collective; none in a graph of the whole iteration."""
        free = self.prices.rates is not None or self.software.host.whole_iteration
        return 0.0 if free else self.software.host.forward

    @property
    def waiting_power(self) -> float:
        """How strongly the longer of device and host prevails where tokens are dispatched. The host waits in each layer
        for the counts of those that experts get: NCCL's messages and DeepEP's buffers are sized by them on the host,
        hybridep's on the device."""
        stated = self.software.host.routing > 0 and self.prices.rates is None
        waits = stated and self.software.parallelism.expert_dispatch != "hybridep"
        return self.software.host.waiting_power if waits else AHEAD

    @property
    def piece(self) -> float:
        """Seconds of the host for a piece of a tensor that ZeRO-1 and 2 gather."""
        return self.software.host.piece if self.prices.rates is None else 0.0

    @property
    def overlapped(self) -> bool:
        """Whether gradients travel during backward."""
        return (self.run.exchange or ("overlapped" if self.software.overlap.gradients else "after")) == "overlapped"

    def scatters(self, zero: int, stages: int) -> bool:
        """Whether gradients are summed and scattered after every backward pass, rather than once a step."""
        habit = self.software.parallelism
        each_pass = habit.gradient_scatters == "pass" and (stages == 1 or habit.pipeline_gathers == "pass")
        return zero == 3 or (zero == 2 and each_pass)

    def cut(self, program: Program, iteration: Array, pieces: int) -> list[Chunk]:
        """Pieces of a pipeline, as the software cuts them; ``iteration``: seconds of one layer iteration of each
        section."""
        by_work = self.run.cut is None and self.software.parallelism.stages == "work" and pieces > 1
        return cut_by_work(program, pieces) if by_work else cut(program, iteration.tolist(), pieces, self.run.cut)

    def coded(self, counts: Array, gradient: SummedGradient) -> Array:
        """Seconds in which a device codes and decodes a number of elements of a gradient; ``gradient`` is one
        element."""
        method = self.compression
        if method is None:
            return np.zeros_like(counts)
        calls = tensor_calls(method, gradient) * self.software.gradients.compression_call
        return self._passes(counts, 0.0, lambda count, _: coding_kernels(method, gradient, count)) + calls * counts

    @property
    def clip(self) -> str:
        """How gradients are clipped by their norm."""
        return self.run.clip or self.software.gradients.clip

    def updated(self, counts: Array, tensors: Array) -> Array:
        """Seconds in which a device updates so many parameters, in so many tensors; both broadcast."""
        optimizer, formats = self.optimizer, self.formats
        return self._passes(counts, tensors, lambda count, number: [update_kernel(count, number, optimizer, formats)])

    def clipped(self, counts: Array) -> Array:
        """Seconds of the passes that clipping adds to an update."""
        return self._passes(counts, 0.0, lambda count, _: clip_kernels(count, self.clip, self.formats))

    def _passes(self, counts: Array, tensors: Numeric, kernels: Callable[[float, float], Sequence[Kernel]]) -> Array:
        pairs = np.stack([counts.ravel(), np.broadcast_to(tensors, counts.shape).ravel()])
        unique, place = np.unique(pairs, axis=1, return_inverse=True)
        listed = [kernels(*pair) for pair in unique.T.tolist()]
        if not listed or not listed[0]:
            return np.zeros_like(counts)
        seconds = self.prices.times([kernel for each in listed for kernel in each]).synchronous.reshape(len(listed), -1)
        return np.where(unique[0] > 0, seconds.sum(axis=1), 0.0)[place.ravel()].reshape(counts.shape)

    def input_pipeline(self, graph: Graph, gpus: int, replica: Numeric, local_batch: Numeric) -> InputPipeline | None:
        """How long a step's batch takes to arrive, as the run says or as its software loads photographs; None for
        synthetic data."""
        stages = self.run.input
        if stages is None and self.prices.rates is None and not self.run.forward_only:
            stages = usual_input(self.run, graph, self.system, self.software.loader.image, gpus)
        if stages is None or stages == "none":
            return None
        size = sample_bytes(graph)
        link = link_rate(self.system, self.prices.rates)
        return input_pipeline(stages, self.system, size, gpus=gpus, replica=replica, local_batch=local_batch, link=link)

    def reserved(self, mesh: Mesh) -> float:
        """Bytes that no tensor gets: the process's context on a GPU, and buffers for each axis over which it talks."""
        talks = sum(degree > 1 for _, degree in mesh.degrees)
        size = self.software.memory.context + talks * self.software.memory.communicator
        return size if self.system.device.kind == "gpu" else 0.0

    def graph(self, model: ModelSpec, batch: int) -> Graph:
        """The network at a batch, with what the run freezes and adapts."""
        return changed(build(model, batch=batch, choices=self.choices, overrides=self.run.model), self.run)

    def recent_graph(self, model: ModelSpec, batch: int) -> Graph:
        """`graph` of a recently predicted network; results computed for a graph are kept with it."""
        return changed(RECENT.graph(model, batch, self.choices, self.run.model), self.run)

    def placement(self, graph: Graph, strategy: Strategy) -> Placement:
        """How the layers are divided by a strategy as the software carries it out, and by what the run states."""
        strategy = replace(strategy, expert_tokens=self.software.parallelism.expert_tokens)
        return placement(graph, strategy, self.run.placement, self.run.expert_imbalance)

    def lowered(self, graph: Graph, placement: Placement, mesh: Mesh) -> Program:
        """One rank's program."""
        options = LoweringOptions(
            chains=self.chains,
            regather=self.software.parallelism.regather,
            softmax_multiple=self.software.fusion.softmax_multiple,
            gather_pieces=mesh.degree("tp") if self._overlaps_tensor(graph) else 1,
            dispatch=Dispatch(self._targets(placement, mesh), self._beside_dispatch),
            checkpoints=self._checkpoints,
        )
        program = lower(graph, placement, mesh, self.formats, options)
        return without_backward(program) if self.run.forward_only else program

    def _overlaps_tensor(self, graph: Graph) -> bool:
        """Whether gathers and scatters over tp go beside products."""
        habit = self.software.overlap
        latents = not habit.tensor_with_latents and any(node.type == "latent_attention" for node in graph.nodes)
        return habit.tensor and not latents

    def calibration(self, mesh: Mesh) -> str:
        """Where the prices of kernels come from, and of several devices those of the links between them."""
        if mesh.size == 1 or self.prices.rates is not None:
            return self.prices.name
        links = collective_sources(self.fabric, "all_reduce", self.fabric.links(1, mesh.size))
        return f"{self.prices.name}; links: {links}"

    @property
    def _checkpoints(self) -> Checkpoints:
        """The recomputed modules: those of the run, else those of the software."""
        habit = self.software.recomputation
        if not self.run.recompute_modules:
            return Checkpoints(habit.stops_early, habit.selective)
        return Checkpoints(habit.stops_early, "attention", self.run.recompute_modules)

    @property
    def _beside_dispatch(self) -> BesideDispatch | None:
        """What is worked on while tokens go to experts or return."""
        if self.software.overlap.experts:
            return "microbatch"
        by_nccl = self.software.parallelism.expert_dispatch == "nccl"
        return "shared experts" if self.software.overlap.shared_experts and by_nccl else None

    def _targets(self, placement: Placement, mesh: Mesh) -> int | None:
        """Number of nodes (inside one node: of devices) that a token is sent to, once each."""
        once = self.software.parallelism.expert_dispatch != "nccl"
        spread = (rule.split["experts"] for rule in placement.rules if rule.split.get("experts"))
        axes = next(spread, ("ep",))
        return self.fabric.targets(mesh.stride(axes), mesh.group_size(axes)) if once else None


def _stated(run: Run) -> dict[str, Any]:
    """Fields of the profile that a run states itself."""
    stated = {
        "convolutions.cudnn": run.cudnn,
        "parallelism.expert_dispatch": run.expert_dispatch,
        "overlap.experts": run.expert_overlap,
        "overlap.shared_experts": run.shared_expert_overlap,
        "host.routing": 0.0 if run.drop_tokens else None,
        "host.whole_iteration": None if run.cuda_graph is None else run.cuda_graph == "full_iteration",
    }
    return {field: value for field, value in stated.items() if value is not None}


def _paired(run: Run) -> bool:
    """Whether the pipeline's schedule runs forward beside backward passes."""
    return SCHEDULES[run.schedule].pairs and parse_strategy(run.strategy).degrees.get("pp", 1) > 1


def backend_of(
    system: System, run: Run, dtype: str, software: Software | None = None, calibration: Calibration | None = None
) -> Backend:
    """Software, pricer and links of a run; ``software`` and ``calibration`` in place of the profile and the calibration
    file that it names."""
    software = software or load_software(run.software)
    software = software.changed(_stated(run))
    if software.overlap.experts is None and _paired(run):
        software = software.changed({"overlap.experts": True})
    prices = pricer(system.device, dtype, run.calibration, software, calibration)
    software = software if prices.rates is None else software.changed({"overlap.contention": 0.0})
    nodes = node_placement(run.nodes, run.background, run.neighbour)
    fabric = Fabric(
        system, run.algorithm_or_server, prices.rates, prices.user_calibration, software.host.forward,
        placement=nodes if states_topology(system) or not nodes.usual else None,
        handshake=0.0 if prices.rates is not None else software.host.handshake,
    )  # fmt: skip
    formats = autocast(precision(dtype)) if software.formats.mixed == "autocast" else precision(dtype)
    accumulator, accesses = software.gradients.accumulator if formats.master else 0.0, software.gradients.accesses
    accumulated = software.gradients.accumulated and not formats.casts
    formats = replace(
        formats,
        accumulator=accumulator,
        gradient_accesses=accesses,
        accumulated=accumulated,
        added=software.gradients.added,
    )
    scaling = run.scaling or ("nvfp4" if dtype == "fp4" else software.formats.scaling)
    formats = scaled(formats, scaling, fused=software.fusion.passes)
    if formats.master and (run.main_gradients or software.formats.main_gradients) == "fp32":
        formats = replace(formats, gradient=formats.wide)
    method = method_of(run.compress, zero=parse_strategy(run.strategy).zero, forward_only=run.forward_only)
    offload = offload_of(run.offload, system, prices.rates, run.offload_layers)
    return Backend(
        run,
        system,
        formats=formats,
        software=software,
        prices=prices,
        fabric=fabric,
        offload=offload,
        compression=method,
    )
