"""Check of a parallelisation plan against what its framework can run.

Quantities of a network, a run and a plan are collected by the names of
`paleo.specs.framework_capabilities.CONDITION_QUANTITIES`. A framework's restrictions are conditions over these
quantities. Quantities may be arrays, so that a search checks all configurations at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from paleo.parallel.placement import AXES
from paleo.specs.framework_capabilities import FrameworkAbilities, FrameworkRestriction, load_framework
from paleo.specs.software import load_software

if TYPE_CHECKING:
    from paleo.network.graph import Graph
    from paleo.parallel.plan import Plan
    from paleo.specs.run import Run
    from paleo.specs.software import SoftwareProfile
    from paleo.specs.system import System

PlanQuantities = Mapping[str, Any]
#: Formats with scales; a framework may lack some of their recipes.
_SCALED = ("fp8", "fp4")


def framework_abilities(software: SoftwareProfile | str) -> FrameworkAbilities | None:
    """Return the axes, ZeRO stages, schedules and so on that the framework behind a software profile supports.

    Parameters
    ----------
    software : SoftwareProfile | str
        Profile or its name.

    Returns
    -------
    FrameworkAbilities, optional
        Capabilities and restrictions with their sources; None if the profile names no framework.
    """
    profile = load_software(software) if isinstance(software, str) else software
    return None if profile.framework is None else load_framework(profile.framework)


def network_quantities(graph: Graph) -> dict[str, Any]:
    """Collect the sizes of a network against which restrictions of frameworks are checked.

    Parameters
    ----------
    graph : Graph
        Network at any batch.

    Returns
    -------
    dict
        ``heads``, ``kv_heads``, ``layers``, ``experts``, ``scans``, ``seq``, ``tied``; the largest value if layers
        differ.
    """
    kv_heads, heads, layers, experts, scans = 0, 0, 0, 0, 0
    owners: dict[str, str] = {}
    tied = 0
    for node in graph.nodes:
        sizes = {
            dim: size
            for operation in node.operations
            for tensor in (*operation.read_tensors, operation.out)
            for dim, size in zip(tensor.dims, tensor.sizes, strict=True)
        }
        if node.type in ("attention", "latent_attention"):
            layers += node.repeat
            kv_heads = max(kv_heads, int(sizes.get("kv_heads", 0)))
            heads = max(heads, int(sizes.get("kv_heads", 0) * sizes.get("group", 1)))
        experts = max(experts, int(sizes.get("experts", 0))) if node.type == "moe" else experts
        scans += node.repeat * (node.type == "mamba2")
        for parameter in node.parameters.values():
            tied |= int(owners.setdefault(parameter.name, node.name) != node.name)
    seq = int(graph.tokens_per_sample or 0)
    of_layers = {"heads": heads, "kv_heads": kv_heads, "layers": layers, "experts": experts, "scans": scans}
    return {**of_layers, "seq": seq, "tied": tied}


def run_quantities(run: Run, system: System, software: SoftwareProfile, dtype: str) -> dict[str, Any]:
    """Return the quantities of a run that are the same for all plans: optimizer, offload, formats, device.

    Parameters
    ----------
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.
    system : System
        Machine: its devices, nodes and links.
    software : SoftwareProfile
        Software profile: how a framework runs kernels and communication.
    dtype : str
        Number format of the operands of matrix products.

    Returns
    -------
    dict of str to Any
        Values by the names of `paleo.specs.framework_capabilities.CONDITION_QUANTITIES`.
    """
    parts = {part.strip() for part in run.offload.states.split(",")}
    offloaded = {f"offload_{part}": int(part in parts) for part in ("optimizer", "gradients", "parameters")}
    scaling = run.kernels.scaling or ("nvfp4" if dtype == "fp4" else software.formats.scaling)
    return {
        **offloaded,
        "offload_activations": int("activations" in parts or run.offload.layers is not None),
        "optimizer": run.optimizer,
        "dtype": dtype,
        "scaling": scaling if dtype in _SCALED else "none",
        "architecture": system.device.architecture,
    }


def framework_schedule_name(schedule: str, pp: int, vp: int) -> str:
    """Return the name of a pipeline schedule in the form that framework restrictions use.

    Parameters
    ----------
    schedule : str
        Schedule of the run.
    pp : int
        Pipeline stages.
    vp : int
        Chunks of a stage (virtual pipeline size).

    Returns
    -------
    str
        ``none`` without a pipeline, ``interleaved`` for 1F1B with several chunks, else ``schedule``.
    """
    if pp == 1:
        return "none"
    return "interleaved" if schedule == "1f1b" and vp > 1 else schedule


def plan_quantities(
    plan: Plan, run: Run, graph: Graph, system: System, software: SoftwareProfile, *, overlapped: bool
) -> dict[str, Any]:
    """Return the quantities of a plan (degrees, heads, layers, …) that a framework's restrictions refer to.

    Parameters
    ----------
    plan : Plan
        Mesh, strategy and batch shares.
    run : Run
        The run that was planned.
    graph : Graph
        Layers of the network at any batch.
    system : System
        System whose device limits formats.
    software : SoftwareProfile
        Profile of the framework.
    overlapped : bool
        True if gradients are exchanged during the backward pass.

    Returns
    -------
    dict
        Numbers and words by the names of `paleo.specs.framework_capabilities.CONDITION_QUANTITIES`.
    """
    mesh, parallel = plan.mesh, plan.strategy
    ep = mesh.group_size(parallel.expert_axes) if parallel.expert_tensor_degree is not None else mesh.degree("ep")
    return {
        **network_quantities(graph),
        **run_quantities(run, system, software, plan.dtype),
        "sp": int(parallel.sequence_parallel and parallel.degrees.get("tp", 1) > 1),
        "zero": parallel.zero,
        "vp": parallel.chunks,
        **{axis: mesh.degree(axis) for axis in AXES},
        "gpus": plan.gpus,
        "dp": plan.dp,
        "ulysses": int(mesh.degree("cp") > 1 and parallel.context_parallel_method == "all_to_all"),
        "ep": ep,
        "etp": (parallel.expert_tensor_degree or 0) if ep > 1 else 0,
        "schedule": framework_schedule_name(run.pipeline.schedule, plan.stages, parallel.chunks),
        "cut": int(isinstance(run.pipeline.cut, tuple) and plan.stages > 1),
        "microbatch": plan.microbatch,
        "microbatches": plan.microbatches,
        "global_batch": plan.global_batch,
        "overlapped": int(overlapped),
        "recompute": run.recompute.policy,
        "partial": int(run.recompute.policy == "full" and run.recompute.layers is not None),
    }


def violated_restrictions(framework: FrameworkAbilities, known: PlanQuantities) -> Iterator[FrameworkRestriction]:
    """Yield the restrictions that forbid a framework to run a plan; conditions on unknown quantities are skipped.

    Parameters
    ----------
    framework : FrameworkAbilities
        Capabilities and restrictions of the framework.
    known : PlanQuantities
        Quantities of the plan by name.

    Yields
    ------
    FrameworkRestriction
        Restrictions whose condition is met.
    """
    yield from (refusal for refusal in framework.restrictions if bool(refusal.condition.holds(known)))


def restriction_messages(framework: FrameworkAbilities, known: PlanQuantities) -> list[str]:
    """Return sentences that say why a framework cannot run a plan; an empty list if it can.

    Parameters
    ----------
    framework : FrameworkAbilities
        Capabilities and restrictions of the framework.
    known : PlanQuantities
        Quantities of the plan by name.

    Returns
    -------
    list of str
        One sentence for each violated restriction, with its source.

    Examples
    --------
    >>> restriction_messages(load_framework("ddp"), {"zero": 1})
    ['ddp torch 2.13.0 does not run zero=1: ZeRO: 0 (torch/nn/parallel/distributed.py:828)']
    """
    return [_sentence(framework, refusal, known) for refusal in violated_restrictions(framework, known)]


def _sentence(framework: FrameworkAbilities, refusal: FrameworkRestriction, known: PlanQuantities) -> str:
    """Return a sentence on one violated restriction: the framework, the values of the plan, and the source."""
    names = [name for name in known if name in refusal.condition.variable_names]
    stated = ", ".join(f"{name}={known[name]}" for name in names if known[name] not in (0, "none"))
    return f"{framework.name_and_release} does not run {stated or 'this'}: {refusal.fact} ({refusal.source})"
