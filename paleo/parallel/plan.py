"""Parallelisation plan of a run: the mesh, batch sizes and dtype that follow from run, network and system.

Times are not predicted here. The second half of the module has warnings about plans that will not run as the user
expects, and about options that have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from paleo.collectives.base import COLLECTIVE_ALGORITHMS, algorithms_for
from paleo.errors import PlanError, SpecError, suggest_names
from paleo.layers.base import LAYERS
from paleo.operations.base import SHARED_EXPERTS_NAME_INFIX, configure_optimizer
from paleo.operations.tensor import BYTES_PER_NUMBER, QuantisationScaling
from paleo.parallel.placement import (
    AXES,
    BATCH_AXES,
    Mesh,
    Placement,
    Strategy,
    parse_strategy,
    redundant_mesh_axes,
    shard_degree_within_node,
)
from paleo.schedules.base import SCHEDULES
from paleo.specs.catalog import systems_with_device
from paleo.specs.software import TPU_PROFILE_NAME, SoftwareProfile, load_software, profiles_with_routing_time
from paleo.units import GIBIBYTE

if TYPE_CHECKING:
    from paleo.network.graph import Graph
    from paleo.specs.device import Device
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.system import System

#: Samples per data-parallel rank if a run states no batch: of networks without tokens, and of sequences.
DEFAULT_BATCH, DEFAULT_SEQUENCES = 32, 8
#: Largest number of pieces of a pipeline: twice the layers of the deepest networks that are trained.
_MAX_MODEL_CHUNKS = 2000


@dataclass(frozen=True, slots=True)
class Plan:
    """Parallelisation plan of a run on a system: mesh degrees, batch sizes and number format.

    ``local_batch`` is the batch of the data-parallel rank with the most samples. Only ``dp`` ranks have work;
    ``idle_gpus`` GPUs have none, for example if strong scaling leaves fewer samples than ranks.
    """

    mesh: Mesh
    strategy: Strategy
    dtype: str
    global_batch: int
    local_batch: int
    microbatch: int
    idle_gpus: int

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks with work, over which the batch is split."""
        return self.mesh.replicas

    @property
    def zero_shards(self) -> int:
        """Number of ranks over which ZeRO shards optimizer states, gradients or parameters."""
        return self.mesh.group_size(self.mesh.zero_shard_axes)

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.mesh.degree("pp")

    @property
    def gpus(self) -> int:
        """Number of GPUs of the run, including idle ones."""
        return self.mesh.size + self.idle_gpus

    @property
    def microbatches(self) -> int:
        """Number of microbatches that a data-parallel rank processes in a step."""
        return math.ceil(self.local_batch / self.microbatch)

    @property
    def strategy_text(self) -> str:
        """Strategy as text for the command line, such as ``tp=8,pp=4,zero=1``."""
        degrees = {axis: degree for axis, degree in self.mesh.degrees if degree > 1}
        degrees |= {"dp": self.dp} if self.dp > 1 else {}
        if self.strategy.expert_tensor_degree is not None:
            degrees["ep"] = self.mesh.group_size(self.strategy.expert_axes)
        parts = [] if self.strategy.preset == "dp" and degrees else [self.strategy.preset]
        parts += [f"{axis}={degree}" for axis, degree in degrees.items()]
        parts += [f"vp={self.strategy.chunks}"] if self.strategy.chunks > 1 else []
        parts += [] if self.strategy.expert_tensor_degree is None else [f"etp={self.strategy.expert_tensor_degree}"]
        parts += [f"zero={self.strategy.zero}"] if self.strategy.zero else []
        return ",".join(parts + self.strategy.flags)


def plan(model: ModelSpec, system: System, run: Run) -> Plan:
    """Resolve the options of a run on a system to mesh degrees, batch sizes and dtype.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.

    Returns
    -------
    Plan
        Mesh, strategy, batch sizes and dtype.

    Raises
    ------
    PlanError
        If degrees or batches contradict each other or the system.
    """
    strategy = parse_strategy(run.strategy)
    # Raise an error for unknown names in a run, even if this plan does not use them.
    SCHEDULES[run.pipeline.schedule]
    if configure_optimizer(run.optimizer).matrix_update is not None and "optimizer" in run.offload.states:
        raise PlanError(f"offload: the matrix products of {run.optimizer} are not priced on a host")
    name = run.exchange.algorithm
    if name is not None and "all_reduce" not in COLLECTIVE_ALGORITHMS[name].traffic_formulas:
        known = [algorithm.name for algorithm in algorithms_for("all_reduce")]
        raise PlanError(f"exchange.algorithm: {name!r} is no all_reduce; {suggest_names(name, known)}")
    replicas = _replicas(run, strategy)
    strategy = _within_nodes(strategy, system, replicas) if strategy.shards_within_nodes else strategy
    if run.gpus > 1 and not system.levels:
        raise PlanError(f"gpus: {system.name} is one device without links; name a system {_systems_of(system)}")
    if system.max_devices is not None and run.gpus > system.max_devices:
        raise PlanError(f"gpus: system {system.name} has {system.max_devices} devices, not {run.gpus}")
    global_batch, local = _batches(model, run, replicas)
    experts = _expert_ranks(run, strategy)
    busy = min(replicas, math.ceil(global_batch / local))
    stated = f"strategy {run.strategy!r}"
    if busy % experts:
        raise PlanError(f"{stated}: {busy} data-parallel ranks with work cannot be divided over ep={experts}")
    outer = busy // (experts * _shards(run, strategy, busy))
    mesh = Mesh.from_degrees({**strategy.degrees, "ep": experts, "dp": outer})
    stages = mesh.degree("pp")
    strategy = _with_chunks(run, strategy) if stages > 1 else strategy
    _check_cut(run, stages, strategy.chunks)
    microbatch = run.microbatch or (local if stages == 1 else _usual_microbatch(run, local, stages))
    if microbatch > local:
        raise PlanError(f"microbatch: {microbatch} exceeds the {local} samples of a data-parallel rank")
    if stages * strategy.chunks > _MAX_MODEL_CHUNKS:
        pieces = f"pp={stages} times vp={strategy.chunks}"
        raise PlanError(f"{stated}: {pieces} pieces of a pipeline; expected at most {_MAX_MODEL_CHUNKS}")
    if strategy.chunks > 1 and stages == 1:
        raise PlanError(f"{stated}: vp={strategy.chunks} needs a pipeline (pp of 2 or more)")
    dtype = resolve_dtype(system.device, run.dtype)
    return Plan(mesh, strategy, dtype, global_batch, local, microbatch, run.gpus - mesh.size)


def _usual_microbatch(run: Run, local: int, stages: int) -> int:
    """Return the default microbatch of a pipeline [samples]: 1, or a sample count that gives one microbatch a stage."""
    habit = load_software(run.software).parallelism.microbatches
    return max(1, local // stages) if habit == "stages" else 1


def _with_chunks(run: Run, strategy: Strategy) -> Strategy:
    """Return the strategy with the number of model chunks per stage that the pipeline schedule requires.

    Raises PlanError if the strategy has another number of chunks.
    """
    known = SCHEDULES[run.pipeline.schedule].chunks_per_stage
    if known is None or known == 1 or strategy.chunks == known:
        return strategy
    if strategy.chunks > 1:
        stated = f"strategy {run.strategy!r}: vp={strategy.chunks}"
        raise PlanError(f"{stated}, but a stage of schedule {run.pipeline.schedule!r} holds {known} chunks")
    return replace(strategy, chunks=known)


def _check_cut(run: Run, stages: int, chunks: int) -> None:
    """Raise PlanError if ``pipeline.cut`` of a run does not list the layers of every pipeline piece."""
    cut = run.pipeline.cut
    if isinstance(cut, tuple) and len(cut) != stages * chunks:
        stages_and_chunks = f"pp={stages} times {chunks} chunks a stage" if chunks > 1 else f"pp={stages}"
        states = f"pipeline.cut: {list(cut)} states {len(cut)} pieces"
        raise PlanError(f"{states}; {stages_and_chunks} has {stages * chunks}")


def _replicas(run: Run, strategy: Strategy) -> int:
    """Return the data-parallel degree: the GPUs divided by the degrees of tp, cp and pp.

    Raises PlanError if the degrees of the strategy do not multiply to the GPUs of the run.
    """
    model_ranks = math.prod(strategy.degrees.get(axis, 1) for axis in AXES if axis not in BATCH_AXES)
    if run.gpus % model_ranks:
        raise PlanError(f"strategy {run.strategy!r}: takes a multiple of {model_ranks} gpus, the run has {run.gpus}")
    replicas = run.gpus // model_ranks
    if strategy.degrees.get("dp", replicas) != replicas:
        needed = model_ranks * strategy.degrees["dp"]
        raise PlanError(f"strategy {run.strategy!r}: takes {needed} gpus, the run has {run.gpus}")
    experts = _expert_ranks(run, strategy)
    if replicas % experts:
        fold = "" if strategy.expert_tensor_degree is not None else "; etp=1 folds experts over tp and cp, too"
        stated = f"strategy {run.strategy!r}: ep={strategy.degrees['ep']}"
        raise PlanError(f"{stated} does not divide the {replicas} data-parallel ranks{fold}")
    return replicas


def _expert_ranks(run: Run, strategy: Strategy) -> int:
    """Return the number of data-parallel ranks that share the experts: ep, less the tp and cp ranks folded in."""
    experts = strategy.degrees.get("ep", 1)
    inner = math.prod(strategy.degrees.get(axis, 1) for axis in strategy.expert_axes if axis != "ep")
    if experts == 1 or experts % inner == 0:
        return max(1, experts // inner)
    over = " and ".join(axis for axis in strategy.expert_axes if axis != "ep")
    raise PlanError(f"strategy {run.strategy!r}: ep={experts} is no multiple of the {inner} ranks of {over}")


def _shards(run: Run, strategy: Strategy, replicas: int) -> int:
    """Return the number of ranks of a ZeRO shard group (HSDP), 1 without such groups; raise PlanError if impossible."""
    ranks = strategy.degrees.get("shard", 1)
    if ranks == 1:
        return 1
    stated = f"strategy {run.strategy!r}: shard={ranks}"
    if strategy.zero == 0:
        raise PlanError(f"{stated} shards nothing without zero=1, 2 or 3")
    if strategy.degrees.get("ep", 1) > 1:
        raise PlanError(f"{stated} beside ep={strategy.degrees['ep']} is not modelled; leave one out")
    if replicas % ranks:
        raise PlanError(f"{stated} does not divide the {replicas} data-parallel ranks with work")
    return ranks


def _within_nodes(strategy: Strategy, system: System, replicas: int) -> Strategy:
    """Return the strategy with the largest ZeRO shard groups that fit inside a node (hsdp)."""
    model_ranks = math.prod(strategy.degrees.get(axis, 1) for axis in AXES if axis not in BATCH_AXES and axis != "pp")
    groups = shard_degree_within_node(system.devices_per_node, replicas, model_ranks)
    return replace(strategy, degrees={**strategy.degrees, **groups})


def _batches(model: ModelSpec, run: Run, replicas: int) -> tuple[int, int]:
    """Return the global batch and the largest batch of a data-parallel rank [samples]."""
    if run.batch is not None and run.global_batch is not None and run.batch * replicas != run.global_batch:
        stated = f"global_batch: {run.global_batch} is not batch {run.batch} times {replicas} data-parallel ranks"
        raise PlanError(f"{stated}; state one of them")
    if run.global_batch is not None:
        return run.global_batch, math.ceil(run.global_batch / replicas)
    local = run.batch or (DEFAULT_BATCH if model.tokens is None else DEFAULT_SEQUENCES)
    return local * replicas, local


def _systems_of(system: System) -> str:
    """Return the names of catalog systems that use the device of a single-device system, for an error message."""
    entries = systems_with_device(system.device.name)
    known = f"such as {' or '.join(entries[:2])}" if entries else "(none of the catalog has it)"
    return f"{known}, or write one: paleo init system"


def resolve_dtype(device: Device, requested: str | None) -> str:
    """Return the number format of a run: the requested dtype, or the usual training dtype of the device.

    Parameters
    ----------
    device : Device
        Device, as its datasheet describes it.
    requested : str, optional
        Dtype of the run; None for the default.

    Returns
    -------
    str
        Name of the dtype.

    Raises
    ------
    SpecError
        If the dtype is unknown, is not used for training, or has no peak rate on the device.
    """
    if requested is None:
        return device.training_dtype
    if requested in get_args(QuantisationScaling):
        dtype = "fp4" if requested == "nvfp4" else "fp8"
        raise SpecError(f"dtype: {requested!r} is how {dtype} is scaled; state dtype {dtype} and scaling={requested}")
    if requested not in BYTES_PER_NUMBER:
        raise SpecError(f"dtype: unknown dtype {requested!r}; {suggest_names(requested, BYTES_PER_NUMBER)}")
    if requested == "int8":
        raise SpecError("dtype: networks do not train in int8; expected fp32, tf32, bf16, fp16, fp8 or fp4")
    device.peak_flops_per_s(requested)
    return requested


def host_memory_warnings(system: System, chosen: Plan, device_bytes: float) -> list[str]:
    """Return a warning if a node has too little host memory for what its devices offload.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    chosen : Plan
        Plan of the run: mesh, batches and number format.
    device_bytes : float
        Offloaded states and activations of one device [byte].

    Returns
    -------
    list of str
        One warning, or an empty list.
    """
    stated = None if system.host is None else system.host.memory
    node_bytes = device_bytes * min(chosen.gpus, system.devices_per_node)
    taken = f"offload takes {node_bytes / GIBIBYTE:.0f} GiB of a node's memory"
    if not node_bytes or (stated is not None and node_bytes <= stated):
        return []
    if stated is None:
        return [f"{taken}; system {system.name} does not state its size"]
    return [f"{taken}, which has {stated / GIBIBYTE:.0f} GiB: it will not run"]


def unsplit_parameter_fractions(graph: Graph, placement: Placement, mesh: Mesh) -> dict[str, float]:
    """Return the layers whose parameters tensor parallelism leaves whole, with their share of all parameters.

    Every tensor-parallel rank holds these parameters whole. Layers for which this is cheap by declaration (empty
    ``tensor_parallel_dims``) are not listed.

    Parameters
    ----------
    graph : Graph
        Network as a graph of layers.
    placement : Placement
        Mesh axes that split the dims of every layer.
    mesh : Mesh
        Number of ranks along each mesh axis.

    Returns
    -------
    dict of str to float
        Fraction of the network's parameters by layer name.
    """
    total = sum(tensor.elements * node.repeat for node in graph.nodes for tensor in node.parameters.values())
    whole: dict[str, float] = {}
    for node in graph.nodes if mesh.degree("tp") > 1 else ():
        divided = {dim for dim, axes in placement.split_axes_of(node).items() if "tp" in axes}
        parameters = node.parameters.values()
        says_so = node.type in LAYERS and LAYERS[node.type].tensor_parallel_dims == ()
        if parameters and not says_so and all(divided.isdisjoint(tensor.dims) for tensor in parameters):
            whole[node.name] = sum(tensor.elements for tensor in parameters) * node.repeat / total
    return whole


#: Least share of a network's parameters that tensor parallelism leaves unsplit for which a warning is given.
_UNSPLIT_WARNING_FRACTION = 0.01


def _unsplit_layer_warnings(chosen: Plan, shares: Mapping[str, float]) -> list[str]:
    """Return a warning on layers that every tensor-parallel rank computes whole, if these hold many parameters."""
    if sum(shares.values()) < _UNSPLIT_WARNING_FRACTION:
        return []
    names = ", ".join(sorted(shares, key=lambda name: -shares[name])[:3])
    more = f" and {len(shares) - 3} more" if len(shares) > 3 else ""
    kept = f"{sum(shares.values()):.0%} of the parameters"
    return [f"tp={chosen.mesh.degree('tp')} does not split {names}{more}: every rank keeps and computes {kept} whole"]


#: MFU that no whole training step has been seen to reach.
IMPLAUSIBLE_MFU = 0.75


def high_utilisation_warnings(system: System, chosen: Plan, flops_per_s: float) -> list[str]:
    """Return a warning if the predicted MFU is higher than real training reaches.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    chosen : Plan
        Plan of the run: mesh, batches and number format.
    flops_per_s : float
        Model FLOP per second of all devices together.

    Returns
    -------
    list of str
        One warning, or an empty list.
    """
    peak = system.device.peak_flops_per_s(system.device.arithmetic_dtype(chosen.dtype))
    mfu = flops_per_s / (chosen.gpus * peak)
    if mfu <= IMPLAUSIBLE_MFU:
        return []
    return [f"MFU {100 * mfu:.0f} %: hardly anybody reaches {100 * IMPLAUSIBLE_MFU:.0f} %; expect a slower step"]


#: Least share of a step spent waiting for input for which a warning is given.
_INPUT_WAIT_WARNING_FRACTION = 0.02


def input_pipeline_warnings(run: Run, waited: float) -> list[str]:
    """Return a warning if image decoding on the host limits the step although the run has no ``input`` option.

    Parameters
    ----------
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.
    waited : float
        Fraction of the step that waits for input, 0 to 1.

    Returns
    -------
    list of str
        One warning, or an empty list.
    """
    if run.input is not None or waited < _INPUT_WAIT_WARNING_FRACTION:
        return []
    return [
        f"{waited:.0%} of the step waits for the host's cores to decode photographs, which the run does not mention; "
        "input=none is for synthetic ones, input.decode and input.cores for a faster loader"
    ]


def ineffective_option_warnings(run: Run, system: System, chosen: Plan, graph: Graph) -> list[str]:
    """Return warnings on options of a run that have no effect under its plan.

    Parameters
    ----------
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.
    system : System
        Machine: its devices, nodes and links.
    chosen : Plan
        Plan of the run: mesh, batches and number format.
    graph : Graph
        Network as a graph of layers.

    Returns
    -------
    list of str
        One warning for each such option.
    """
    dense = not any(node.type == "moe" for node in graph.nodes) and "the network has no experts"
    group = chosen.mesh.group_size(chosen.strategy.expert_axes)
    one_node = f"the run has {chosen.gpus} GPUs of a node of {system.devices_per_node}"
    within = chosen.gpus <= system.devices_per_node
    served = run.exchange.consistency != "bsp" or run.exchange.when == "parameter-server"
    schedule, servers = run.pipeline.schedule, run.exchange.servers
    idle = {
        f"schedule={schedule}": schedule != "1f1b" and chosen.stages == 1 and "there is no pipeline",
        "sp": chosen.strategy.sequence_parallel and chosen.mesh.degree("tp") == 1 and "there is no tensor parallelism",
        f"ep={group}": group > 1 and dense,
        f"experts.dispatch={run.experts.dispatch}": run.experts.dispatch is not None and dense,
        f"servers={servers}": servers is not None and not served and "workers are synchronous (bsp)",
        f"background={run.fabric.background:g}": run.fabric.background > 0 and within and one_node,
        f"neighbour={run.fabric.neighbour}": run.fabric.neighbour is not None and within and one_node,
    }
    return [f"{option} changes nothing: {reason}" for option, reason in idle.items() if reason]


def tpu_software_warnings(run: Run, system: System) -> list[str]:
    """Return a warning if a TPU run uses the default GPU software profile, as TPU programs are compiled.

    Parameters
    ----------
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.
    system : System
        Machine: its devices, nodes and links.

    Returns
    -------
    list of str
        One warning, or an empty list.

    Examples
    --------
    >>> from paleo.specs.system import load_system
    >>> from paleo.specs.run import Run
    >>> tpu_software_warnings(Run(), load_system("tpu-v6e-pod"))
    ['software pytorch-eager launches kernels one by one; programs on TPUs are compiled: --software xla-tpu']
    """
    usual = type(run).model_fields["software"].default
    if system.device.kind != "tpu" or run.software != usual:
        return []
    compiled = f"programs on TPUs are compiled: --software {TPU_PROFILE_NAME}"
    return [f"software {usual} launches kernels one by one; {compiled}"]


def missing_routing_time_warnings(graph: Graph, run: Run, software: SoftwareProfile, system: System) -> list[str]:
    """Return a warning if the software profile lacks a host time for MoE routing, so that steps are underestimated.

    Parameters
    ----------
    graph : Graph
        Network as a graph of layers.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.
    software : SoftwareProfile
        Software profile: how a framework runs kernels and communication.
    system : System
        Machine: its devices, nodes and links.

    Returns
    -------
    list of str
        One warning, or an empty list.
    """
    mixture = any(node.type == "moe" for node in graph.nodes)
    if not mixture or software.host.routing or run.calibration != "auto" or system.device.kind != "gpu":
        return []
    return [
        f"software {run.software} states no time of the host for sending tokens to experts, so steps come out too "
        f"short; profiles that state it: {', '.join(profiles_with_routing_time())}"
    ]


def missing_sequence_parallel_warnings(graph: Graph, run: Run, software: SoftwareProfile, chosen: Plan) -> list[str]:
    """Return a warning if an MoE network uses tp without sequence parallelism and the software does not support this.

    Parameters
    ----------
    graph : Graph
        Network as a graph of layers.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.
    software : SoftwareProfile
        Software profile: how a framework runs kernels and communication.
    chosen : Plan
        Plan of the run: mesh, batches and number format.

    Returns
    -------
    list of str
        One warning, or an empty list.
    """
    mixture, whole = any(node.type == "moe" for node in graph.nodes), not chosen.strategy.sequence_parallel
    if not mixture or not whole or software.parallelism.expert_tokens == "all" or run.forward_only:
        return []
    refused = f"software {run.software} trains no mixture over tp unless sequences are split over it, too: add sp"
    return [refused] if chosen.mesh.degree("tp") > 1 else []


def shared_expert_overlap_warnings(graph: Graph, software: SoftwareProfile, chosen: Plan) -> list[str]:
    """Return a warning if overlap of shared experts with the token exchange is requested but impossible.

    Parameters
    ----------
    graph : Graph
        Network as a graph of layers.
    software : SoftwareProfile
        Software profile: how a framework runs kernels and communication.
    chosen : Plan
        Plan of the run: mesh, batches and number format.

    Returns
    -------
    list of str
        One warning, or an empty list.
    """
    dispatch, names = software.parallelism.expert_dispatch, [op.name for node in graph.nodes for op in node.operations]
    reasons = {
        "no layer has shared experts": not any(SHARED_EXPERTS_NAME_INFIX in name for name in names),
        "there is no expert parallelism": chosen.mesh.group_size(chosen.strategy.expert_axes) == 1,
        f"{dispatch} has no such overlap, nccl has": dispatch != "nccl",
        "tokens travel beside another microbatch (experts.overlap)": bool(software.overlap.experts),
    }
    true_reasons = [reason for reason, holds in reasons.items() if holds and software.overlap.shared_experts]
    return [f"experts.shared_overlap changes nothing: {reason}" for reason in true_reasons[:1]]


def plan_warnings(chosen: Plan, graph: Graph, placement: Placement) -> tuple[str, ...]:
    """Return warnings about idle or redundant ranks, and about parameters that tensor parallelism does not split.

    Parameters
    ----------
    chosen : Plan
        Plan of the run: mesh, batches and number format.
    graph : Graph
        Network as a graph of layers.
    placement : Placement
        Mesh axes that split the dims of every layer.

    Returns
    -------
    tuple of str
        Warnings, one sentence each.
    """
    idle = redundant_mesh_axes(graph, placement, chosen.mesh)
    whole = {} if "tp" in idle else unsplit_parameter_fractions(graph, placement, chosen.mesh)
    lines = _unsplit_layer_warnings(chosen, whole)
    same = "splits nothing in this network: its ranks all do the same work"
    lines += [f"{axis}={chosen.mesh.degree(axis)} {same}" for axis in idle]
    if chosen.idle_gpus:
        few = f"the global batch has only {chosen.global_batch} samples"
        lines.append(f"{chosen.idle_gpus} of {chosen.gpus} gpus are idle: {few}")
    elif chosen.local_batch * chosen.dp > chosen.global_batch:
        spare = chosen.local_batch * chosen.dp - chosen.global_batch
        uneven = f"the global batch does not divide evenly: the step waits for ranks with {chosen.local_batch} samples"
        lines.append(f"{uneven} ({spare} slots idle)")
    return tuple(lines)
