"""The backend of a run: software, number formats, predictor of kernel times and links, for any degrees and batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from paleo.layers.base import LayerImplementations
from paleo.lowering.kernel_launches import (
    ActivationCheckpointing,
    DispatchOverlap,
    FusedChains,
    LoweringOptions,
    TokenDispatch,
)
from paleo.lowering.program import Program, lower_graph, with_token_dispatch, without_backward
from paleo.lowering.stages_and_recompute import ModelChunk, cut_by_flops, cut_into_stages
from paleo.network.graph import Graph, apply_graph_transforms, build_graph
from paleo.operations.base import Optimizer, WeightMatrices, configure_optimizer, update_kernel
from paleo.operations.tensor import MIXED_PRECISION, Precision, default_precision, with_quantisation_scales
from paleo.parallel.placement import Mesh, Placement, Strategy, strategy_placement
from paleo.pricing.communication import Fabric, describe_collective_calibration
from paleo.pricing.kernels import KernelPredictor, kernel_predictor
from paleo.pricing.links.topology import has_explicit_topology, parse_node_placement
from paleo.schedules.base import SCHEDULES, Numeric
from paleo.specs.software import SoftwareProfile, load_software
from paleo.step.gradient_exchange import (
    compression_kernels,
    framework_calls_per_gradient_element,
    parse_gradient_compression,
)
from paleo.step.memory import Offload, gradient_clipping_kernels, host_link_rate, parse_offload
from paleo.step.section_times import HOST_PACED_EXPONENT
from paleo.step.waiting import InputPipeline, default_input_options, input_pipeline, input_sample_bytes

if TYPE_CHECKING:
    from paleo.compression.base import Compression, SummedGradient
    from paleo.operations.base import Kernel
    from paleo.specs.calibration import Calibration
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.system import System

Array = npt.NDArray[np.float64]
#: Number of networks, each at one batch, that are cached between predictions: rows of a table, points of a curve and
#: compared systems often use the same ones.
_MAX_CACHED_GRAPHS = 16


@dataclass(frozen=True, slots=True)
class _GraphKey:
    """Cache key of the layer graph of a network at a batch size.

    Models are compared by id; the reference keeps the id from being reused.
    """

    identity: int
    batch: int
    implementations: LayerImplementations
    parameters: str
    model: ModelSpec = field(compare=False)
    overrides: Mapping[str, Any] = field(compare=False)

    def graph(self) -> Graph:
        return build_graph(self.model, batch=self.batch, choices=self.implementations, overrides=self.overrides)


class LayerGraphCache:
    """Cache of layer graphs by model, batch size, implementations and model parameters.

    The least recently used graph is dropped first.
    """

    def __init__(self, most: int = _MAX_CACHED_GRAPHS) -> None:
        self._graph = lru_cache(most)(_GraphKey.graph)

    def graph(self, model: ModelSpec, batch: int, choices: LayerImplementations, overrides: Mapping[str, Any]) -> Graph:
        """Return the layer graph of a network at a batch size, from the cache or newly built.

        Parameters
        ----------
        model : ModelSpec
            Network, as its model file describes it.
        batch : int
            Number of samples.
        choices : LayerImplementations
            Implementations of attention, losses, gates and norms in the framework.
        overrides : dict of str to Any
            Parameters of the model file (such as ``layers``) with other values.

        Returns
        -------
        Graph
            Network as a graph of layers.
        """
        return self._graph(_GraphKey(id(model), batch, choices, repr(overrides), model, overrides))


_LAYER_GRAPH_CACHE = LayerGraphCache()


def with_replicated_heads(model: ModelSpec, sizes: Mapping[str, Any], tp: int) -> Mapping[str, Any]:
    """Replicate key and value heads if there are fewer than tensor-parallel ranks, so that each rank has a whole head.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    sizes : mapping
        Parameters of the network that a run overrides.
    tp : int
        Number of tensor-parallel ranks.

    Returns
    -------
    mapping
        The sizes, with ``kv_heads`` set to `tp` if `tp` is a multiple of a smaller number of heads. Weights, gradients
        and updates of the copies are counted on each rank; the reduction of the copies' gradients is not. Software
        that gathers instead (``parallelism.few_key_heads``) copies keys and values, not weights.
    """
    heads, keys = (sizes.get(name, model.params.get(name)) for name in ("heads", "kv_heads"))
    whole = isinstance(heads, int) and isinstance(keys, int) and 0 < keys < tp
    return {**sizes, "kv_heads": tp} if whole and tp % keys == 0 and heads % tp == 0 else sizes


@dataclass(frozen=True, slots=True)
class Backend:
    """Software, number formats, kernel predictor and links of a run, independent of degrees and batch sizes."""

    run: Run
    system: System
    formats: Precision
    software: SoftwareProfile
    predictor: KernelPredictor
    fabric: Fabric
    offload: Offload
    compression: Compression | None = None

    @property
    def layer_implementations(self) -> LayerImplementations:
        """Implementations of attention, losses, gates and norms: those of the run, else those of the software."""
        software = self.software
        gates: Literal["fused", "separate"] = "fused" if software.fusion.passes else "separate"
        wide = frozenset(software.formats.wide if self.formats.casts_weights_each_pass else ())
        return LayerImplementations(
            attention=self.run.kernels.attention or software.attention.implementation,
            loss=self.run.kernels.cross_entropy or software.fusion.loss,
            gates=gates,
            gelu=software.fusion.gelu,
            experts="fused" if software.host.whole_iteration else software.fusion.experts,
            fp32_functions=wide,
            metric_loss_evaluations=0 if self.run.forward_only else software.fusion.metrics,
            recurrence=software.fusion.recurrence,
            relative_attention_layout=software.attention.relative,
            tied_gradient_accumulation=software.gradients.tied,
            memories_through_host=software.host.feeds is not None and not self.run.forward_only,
            latent_rotation_calls=software.host.latent_rotation,
            grouped_router_calls=software.host.grouped_router,
            sigmoid_router_calls=software.host.sigmoid_router,
            unfused_router_calls=software.host.unfused_router,
            latent_tokens=software.parallelism.latents,
            rotation=software.fusion.rotation,
            rms_norm=software.fusion.rms_norm,
        )

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of the run, with the memory passes of the software's implementation."""
        name, gradients = self.run.optimizer, self.software.gradients
        stepwise, listwise = (
            [configure_optimizer(each).name for each in names]
            for names in (gradients.stepwise_updates, gradients.listwise_updates)
        )
        return configure_optimizer(name, stepwise=name in stepwise, listwise=name in listwise)

    @property
    def fused_chains(self) -> FusedChains:
        """Chains of element-wise operations that the software fuses into one kernel."""
        software = self.software
        if software.fusion.passes:
            return "convolutions" if software.fusion.convolutions else "all"
        if self.run.forward_only:
            return "none" if software.fusion.norms == "never" else "norms"
        trained: dict[str, FusedChains] = {"forward": "norms forward", "both": "norms"}
        narrow = self.formats.activation_bytes < self.formats.fp32_activation_bytes
        return trained.get(software.fusion.norms, "none") if narrow else "none"

    @property
    def collective_issue_time(self) -> float:
        """Host time to launch a collective [s]; 0 if the software replays a CUDA graph of the whole iteration."""
        free = self.predictor.constant_efficiencies is not None or self.software.host.whole_iteration
        return 0.0 if free else self.software.host.forward

    @property
    def host_wait_exponent(self) -> float:
        """Exponent p of the combined time (device^p + host^p)^(1/p), where the host waits for token counts.

        p = 1 adds the times; p = 4 gives nearly the longer one. The host needs the counts to size NCCL's messages and
        DeepEP's buffers; hybridep sizes them on the device.
        """
        stated = self.software.host.routing > 0 and self.predictor.constant_efficiencies is None
        waits = stated and self.software.parallelism.expert_dispatch != "hybridep"
        return self.software.host.waiting_exponent if waits else HOST_PACED_EXPONENT

    @property
    def slice_gather_host_time(self) -> float:
        """Host time per slice of a tensor in the parameter all-gather of ZeRO-1 and ZeRO-2 [s]."""
        return self.software.host.piece if self.predictor.constant_efficiencies is None else 0.0

    @property
    def overlaps_gradient_exchange(self) -> bool:
        """True if gradients are exchanged during the backward pass."""
        when = self.run.exchange.when
        return self.software.overlap.gradients if when is None else when == "overlapped"

    @property
    def limits_bucket_elements(self) -> bool:
        """True if the software limits gradient buckets by elements, and the run gives no bucket size in bytes."""
        return self.run.exchange.bucket is None and self.software.gradients.bucket_elements > 0

    def bucket_bytes(self, ranks: Numeric) -> Array:
        """Return the gradient bucket size of each layout [byte].

        Parameters
        ----------
        ranks : float or array
            Ranks over which states are sharded, of each layout.

        Returns
        -------
        array
            Bytes, in the shape of ``ranks``: as the run says, else by the rule of the software.
        """
        rule, ranks = self.software.gradients, np.asarray(ranks, dtype=np.float64)
        if not self.limits_bucket_elements:
            return np.full_like(ranks, rule.bucket if self.run.exchange.bucket is None else self.run.exchange.bucket)
        elements = np.maximum(rule.bucket_elements, rule.bucket_per_rank * ranks)
        return np.asarray(elements * self.formats.accumulated_gradient_bytes)

    def scatters_every_pass(self, zero: int, stages: int) -> bool:
        """Return True if gradients are reduce-scattered after every backward pass instead of once a step.

        Parameters
        ----------
        zero : int
            ZeRO stage, 0 to 3.
        stages : int
            Number of pipeline stages.

        Returns
        -------
        bool
            True after every backward pass, False once a step.
        """
        habit = self.software.parallelism
        in_pipelines = habit.gradient_scatters == "pass" and habit.parameter_gathers_in_pipelines == "pass"
        each_pass = in_pipelines or (stages == 1 and habit.gradient_scatters != "step")
        return zero == 3 or (zero == 2 and each_pass)

    def cut_into_stages(self, program: Program, iteration: Array, stages: Sequence[int]) -> list[ModelChunk]:
        """Cut a network into model chunks for pipeline stages, by the run or the rule of the software.

        Parameters
        ----------
        program : Program
            Kernels and collectives of one rank.
        iteration : ndarray, shape (sections,)
            Time of one layer of each section (run of equal layers) [s].
        stages : sequence of int, shape (pieces,)
            Pipeline stage of each model chunk.

        Returns
        -------
        list of ModelChunk
            Sections and numbers of layers of each model chunk.
        """
        cut = self.run.pipeline.cut
        if cut is None and self.software.parallelism.stages == "work" and len(stages) > 1:
            return cut_by_flops(program, len(stages))
        return cut_into_stages(program, iteration.tolist(), stages, cut)

    def compression_times(self, counts: Array, gradient: SummedGradient) -> Array:
        """Return the time to compress and decompress gradients on a device [s].

        Parameters
        ----------
        counts : ndarray, shape (...)
            Number of gradient elements.
        gradient : SummedGradient
            Sizes per gradient element (`gradient_sizes_per_element`).

        Returns
        -------
        ndarray, shape (...)
            Seconds; zero without compression.
        """
        method = self.compression
        if method is None:
            return np.zeros_like(counts)
        calls = framework_calls_per_gradient_element(method, gradient) * self.software.gradients.compression_call
        return self._passes(counts, 0.0, lambda count, _: compression_kernels(method, gradient, count)) + calls * counts

    @property
    def clip_method(self) -> str:
        """Way of clipping gradients to a global norm.

        ``none``: gradients are not clipped. ``norm``: the norm is computed, and the update applies the factor.
        ``scaled``: the norm is computed, and a separate pass scales the gradients.
        """
        return self.run.clip or self.software.gradients.clip

    def update_times(self, counts: Array, tensors: Numeric, rule: Optimizer) -> Array:
        """Return the time of an element-wise optimizer update.

        Parameters
        ----------
        counts : ndarray, shape (...)
            Number of parameters that are updated.
        tensors : Numeric
            Number of tensors that hold these parameters.
        rule : Optimizer
            Optimizer and its update rule, such as Adam.

        Returns
        -------
        ndarray, shape (...)
            Time [s].
        """
        formats = self.formats
        return self._passes(counts, tensors, lambda count, number: [update_kernel(count, number, rule, formats)])

    def matrix_update_time(self, matrix: WeightMatrices) -> float:
        """Return the time of the matrix products in the update of one weight matrix, as in Muon or Shampoo.

        Parameters
        ----------
        matrix : WeightMatrices
            Shape of the weight matrix.

        Returns
        -------
        float
            Seconds; 0 if the optimizer multiplies no matrices.
        """
        rule = self.optimizer.matrix_update
        if rule is None:
            return 0.0
        kernels, times = zip(*rule.kernels("update", matrix, self.formats), strict=True)
        return float(self.predictor.times(list(kernels)).host_synchronous_times @ np.array(times))

    def clipping_times(self, counts: Array) -> Array:
        """Return the time that gradient clipping adds to the optimizer update.

        Parameters
        ----------
        counts : ndarray, shape (...)
            Number of gradient elements.

        Returns
        -------
        ndarray, shape (...)
            Time [s].
        """
        clip, formats = self.clip_method, self.formats
        return self._passes(counts, 0.0, lambda count, _: gradient_clipping_kernels(count, clip, formats))

    def _passes(self, counts: Array, tensors: Numeric, kernels: Callable[[float, float], Sequence[Kernel]]) -> Array:
        """Predict the time of memory passes for many sizes; equal sizes are predicted once.

        ``kernels`` builds the passes for one (count, tensors).
        """
        pairs = np.stack([counts.ravel(), np.broadcast_to(tensors, counts.shape).ravel()])
        unique, place = np.unique(pairs, axis=1, return_inverse=True)
        listed = [kernels(*pair) for pair in unique.T.tolist()]
        if not listed or not listed[0]:
            return np.zeros_like(counts)
        times = self.predictor.times([kernel for each in listed for kernel in each])
        seconds = times.host_synchronous_times.reshape(len(listed), -1).sum(axis=1)
        return np.where(unique[0] > 0, seconds, 0.0)[place.ravel()].reshape(counts.shape)

    def input_pipeline(self, graph: Graph, gpus: int, replica: Numeric, local_batch: Numeric) -> InputPipeline | None:
        """Return the times in which the input pipeline reads, decodes and copies the batch of a step.

        Parameters
        ----------
        graph : Graph
            Network as a graph of layers.
        gpus : int
            Number of devices of the run.
        replica : Numeric
            Ranks that hold one replica of the model.
        local_batch : Numeric
            Number of samples of one replica.

        Returns
        -------
        InputPipeline, optional
            Times of reading, decoding and copying; None for synthetic data.
        """
        stages = self.run.input
        if stages is None and self.predictor.constant_efficiencies is None and not self.run.forward_only:
            stages = default_input_options(self.run, graph, self.system, self.software.loader.image, gpus)
        if stages is None or stages == "none":
            return None
        size = input_sample_bytes(graph)
        link = host_link_rate(self.system, self.predictor.constant_efficiencies)
        return input_pipeline(stages, self.system, size, gpus=gpus, replica=replica, local_batch=local_batch, link=link)

    def reserved_memory(self, mesh: Mesh) -> float:
        """Return the GPU memory outside tensors: the CUDA context of the process and the buffers of communicators.

        Parameters
        ----------
        mesh : Mesh
            Parallel degrees of the axes; each axis of more than one rank has a communicator.

        Returns
        -------
        float
            Bytes; 0 on devices other than GPUs.
        """
        talks = sum(degree > 1 for _, degree in mesh.degrees)
        size = self.software.memory.context + talks * self.software.memory.communicator
        return size if self.system.device.kind == "gpu" else 0.0

    def graph(self, model: ModelSpec, batch: int, tp: int = 1) -> Graph:
        """Build the layer graph of a network at a batch size, with the run's frozen layers and adapters (LoRA).

        Parameters
        ----------
        model : ModelSpec
            Network, as its model file describes it.
        batch : int
            Number of samples.
        tp : int, default 1
            Tensor-parallel ranks, for which key heads are copied where there are fewer (`with_replicated_heads`).

        Returns
        -------
        Graph
            Network as a graph of layers.
        """
        sizes, choices = self._split_heads(model, tp)
        return apply_graph_transforms(build_graph(model, batch=batch, choices=choices, overrides=sizes), self.run)

    def cached_graph(self, model: ModelSpec, batch: int, tp: int = 1) -> Graph:
        """Return the layer graph of a network at a batch size from a cache, with the run's frozen layers and adapters.

        Parameters
        ----------
        model : ModelSpec
            Network, as its model file describes it.
        batch : int
            Number of samples.
        tp : int, default 1
            Number of tensor-parallel ranks.

        Returns
        -------
        Graph
            Network as a graph of layers.
        """
        sizes, choices = self._split_heads(model, tp)
        return apply_graph_transforms(_LAYER_GRAPH_CACHE.graph(model, batch, choices, sizes), self.run)

    def _split_heads(self, model: ModelSpec, tp: int) -> tuple[Mapping[str, Any], LayerImplementations]:
        """Return model parameters and layer implementations of a network whose heads are split over ``tp`` ranks.

        If there are fewer key heads than ranks, they are copied or gathered, as the software does.
        """
        sizes = with_replicated_heads(model, self.run.model, tp)
        keys = self.run.model.get("kv_heads", model.params.get("kv_heads"))
        copied = self.software.parallelism.few_key_heads == "copied"
        if copied or sizes is self.run.model or not isinstance(keys, int):
            return sizes, self.layer_implementations
        return sizes, replace(self.layer_implementations, gathered_key_heads=keys)

    def placement(self, graph: Graph, strategy: Strategy) -> Placement:
        """Return how a strategy splits each layer over mesh axes, overridden by the run's placement rules.

        Parameters
        ----------
        graph : Graph
            Network as a graph of layers.
        strategy : Strategy
            Preset, parallel degrees and flags.

        Returns
        -------
        Placement
            For each layer, which dims are split over which axes.
        """
        strategy = replace(strategy, expert_tokens=self.software.parallelism.expert_tokens)
        return strategy_placement(graph, strategy, self.run.placement, self.run.experts.imbalance)

    def lower(self, graph: Graph, placement: Placement, mesh: Mesh) -> Program:
        """Lower a network to the kernels and collectives of one rank.

        Parameters
        ----------
        graph : Graph
            Layer graph of the network at the samples of a microbatch.
        placement : Placement
            For each layer, which dims are split over which axes.
        mesh : Mesh
            Parallel degrees of the mesh axes.

        Returns
        -------
        Program
            Kernels and collectives of one rank.
        """
        program = self.lower_without_token_deduplication(graph, placement, mesh)
        return with_token_dispatch(program, self.token_dispatch(placement, mesh))

    def lower_without_token_deduplication(
        self, graph: Graph, placement: Placement, mesh: Mesh, sections: int | None = None
    ) -> Program:
        """Lower a network to one rank's kernels and collectives, with one copy of a token per selected expert.

        Token dispatch as in `lower` may send one copy to each rank or node instead.

        Parameters
        ----------
        graph : Graph
            Layer graph of the network at the samples of a microbatch.
        placement : Placement
            For each layer, which dims are split over which axes.
        mesh : Mesh
            Parallel degrees of the mesh axes.
        sections : int, optional
            Number of first sections to lower; all by default.

        Returns
        -------
        Program
            Kernels and collectives of one rank.
        """
        options = LoweringOptions(
            fused_chains=self.fused_chains,
            regathers_tensor_parallel_inputs=self.software.parallelism.regather,
            softmax_matrices_per_kernel=self.software.fusion.softmax_multiple,
            tensor_parallel_overlap_chunks=mesh.degree("tp") if self._overlaps_tensor(graph, mesh) else 1,
            checkpointing=self._checkpoints,
        )
        program = lower_graph(graph, placement, mesh, self.formats, options, sections)
        return without_backward(program) if self.run.forward_only else program

    def token_dispatch(self, placement: Placement, mesh: Mesh) -> TokenDispatch:
        """Return the way in which MoE tokens are sent to their experts.

        Parameters
        ----------
        placement : Placement
            For each layer, which dims are split over which axes.
        mesh : Mesh
            Parallel degrees of the mesh axes.

        Returns
        -------
        TokenDispatch
            Nodes or devices that get one copy of a token, and what overlaps with the exchange.
        """
        if self.software.parallelism.expert_dispatch == "nccl":
            return TokenDispatch(None, self._beside_dispatch)
        spread = (rule.split_axes["experts"] for rule in placement.rules if rule.split_axes.get("experts"))
        axes = next(spread, ("ep",))
        targets = self.fabric.token_dispatch_target_count(mesh.stride(axes), mesh.group_size(axes))
        return TokenDispatch(targets, self._beside_dispatch)

    def _overlaps_tensor(self, graph: Graph, mesh: Mesh) -> bool:
        """Return True if tensor-parallel gathers and scatters overlap with matrix products."""
        habit = self.software.overlap
        ranks = mesh.degree("tp")
        if ranks > 1 and not habit.tensor_over_nodes and self.fabric.links(mesh.stride(("tp",)), ranks).nodes > 1.0:
            return False
        latents = not habit.tensor_with_latents and any(node.type == "latent_attention" for node in graph.nodes)
        return habit.tensor and not latents

    def describe_calibration(self, mesh: Mesh) -> str:
        """Describe the calibrations behind the times of kernels and, for several devices, of links, as one line.

        Parameters
        ----------
        mesh : Mesh
            Parallel degrees of the mesh axes.

        Returns
        -------
        str
            One line.
        """
        if mesh.size == 1 or self.predictor.constant_efficiencies is not None:
            return self.predictor.name
        links = describe_collective_calibration(self.fabric, "all_reduce", self.fabric.links(1, mesh.size))
        return f"{self.predictor.name}; links: {links}"

    @property
    def _checkpoints(self) -> ActivationCheckpointing:
        """Activation checkpointing: which modules are recomputed, by the run, else by the software."""
        habit = self.software.recomputation
        if not self.run.recompute.modules:
            return ActivationCheckpointing(habit.stops_recompute_early, habit.selective)
        return ActivationCheckpointing(habit.stops_recompute_early, "attention", self.run.recompute.modules)

    @property
    def _beside_dispatch(self) -> DispatchOverlap | None:
        """Computation that overlaps with the MoE token exchange; None if nothing does."""
        if self.software.overlap.experts:
            return "microbatch"
        by_nccl = self.software.parallelism.expert_dispatch == "nccl"
        return "shared experts" if self.software.overlap.shared_experts and by_nccl else None


def _stated(run: Run) -> dict[str, Any]:
    """Return the fields of the software profile that the run overrides, by dotted name."""
    stated = {
        "convolutions.cudnn": run.kernels.cudnn,
        "parallelism.expert_dispatch": run.experts.dispatch,
        "overlap.experts": run.experts.overlap,
        "overlap.shared_experts": run.experts.shared_overlap,
        "host.routing": 0.0 if run.experts.drop_tokens else None,
        "host.whole_iteration": None if run.kernels.cuda_graph is None else run.kernels.cuda_graph == "full_iteration",
    }
    return {field: value for field, value in stated.items() if value is not None}


def build_backend(
    system: System,
    run: Run,
    dtype: str,
    software: SoftwareProfile | None = None,
    calibration: Calibration | None = None,
    *,
    strategy: Strategy | None = None,
) -> Backend:
    """Collect the software, number formats, kernel predictor and links of a run.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    run : Run
        Options of the run.
    dtype : str
        Number format of the operands of products, such as ``bf16``.
    software : SoftwareProfile, optional
        Profile to use instead of the run's.
    calibration : Calibration, optional
        Calibration to use instead of the run's.
    strategy : Strategy, optional
        Strategy of the run's plan. None in a search, which tries several strategies.

    Returns
    -------
    Backend
        Software, number formats, kernel predictor and links.

    Raises
    ------
    SpecError
        If a name of the run is unknown.
    """
    software = software or load_software(run.software)
    software = software.with_fields(_stated(run))
    stages = 1 if strategy is None else strategy.degrees.get("pp", 1)
    if software.overlap.experts is None and SCHEDULES[run.pipeline.schedule].pairs_forward_with_backward and stages > 1:
        software = software.with_fields({"overlap.experts": True})
    prices = kernel_predictor(system.device, dtype, run.calibration, software, calibration)
    software = software if prices.constant_efficiencies is None else software.with_fields({"overlap.contention": 0.0})
    nodes = parse_node_placement(run.fabric.nodes, run.fabric.background, run.fabric.neighbour)
    fabric = Fabric(
        system, run.exchange.forced_all_reduce, prices.constant_efficiencies, prices.user_calibration,
        software.host.forward,
        placement=nodes if has_explicit_topology(system) or not nodes.is_uncontended else None,
        token_handshake_time=0.0 if prices.constant_efficiencies is not None else software.host.handshake,
        efa_handshake_times=(0.0, 0.0) if prices.constant_efficiencies is not None else software.host.libfabric,
        token_exchange_library=software.parallelism.expert_dispatch,
    )  # fmt: skip
    formats, gradients = MIXED_PRECISION[software.formats.mixed](default_precision(dtype)), software.gradients
    formats = replace(
        formats,
        main_gradient_bytes=gradients.main_gradient_bytes if formats.master_bytes else 0.0,
        casts_gradients_before_accumulation=gradients.casts_gradients_before_accumulation,
        extra_gradient_accesses=gradients.extra_gradient_accesses,
        uses_flat_gradient_buffer=gradients.flat,
        fuses_gradient_accumulation=gradients.accumulated and not formats.casts_weights_each_pass,
        accumulates_gradients_by_autograd=gradients.added,
    )
    scaling = run.kernels.scaling or ("nvfp4" if dtype == "fp4" else software.formats.scaling)
    formats = with_quantisation_scales(formats, scaling, fused=software.fusion.passes)
    if formats.master_bytes and (run.kernels.main_gradients or software.formats.main_gradients) == "fp32":
        formats = replace(formats, gradient_bytes=formats.fp32_activation_bytes)
    zero = None if strategy is None else strategy.zero
    method = parse_gradient_compression(run.exchange.compress, zero=zero, forward_only=run.forward_only)
    offload = parse_offload(run.offload.states, system, prices.constant_efficiencies, run.offload.layers)
    return Backend(run, system, formats, software, prices, fabric, offload, compression=method)
