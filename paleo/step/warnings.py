"""What a prediction says beside its numbers: what it leaves out, and what will not go as it was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paleo.parallel.placement import idle_axes, undivided_parameters
from paleo.units import GIB

if TYPE_CHECKING:
    from paleo.lowering.program import Program
    from paleo.network.graph import Graph
    from paleo.parallel.placement import Placement
    from paleo.parallel.plan import Plan
    from paleo.specs.hardware import System
    from paleo.specs.run import Run

#: The kernels of functions that an importer did not know, and by which factor their times are guessed, either way.
OPAQUE, OPAQUE_SPREAD = "opaque", 3.0


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


def host_warnings(system: System, chosen: Plan, device_bytes: float) -> list[str]:
    """Whether a node's memory holds what its devices have in it."""
    stated = None if system.host is None else system.host.memory
    node_bytes = device_bytes * min(chosen.gpus, system.devices_per_node)
    if not node_bytes:
        return []
    if stated is None:
        return [
            f"offload takes {node_bytes / GIB:.0f} GiB of a node's memory; system {system.name} does not state its size"
        ]
    if node_bytes <= stated:
        return []
    taken, memory = node_bytes / GIB, stated / GIB
    return [f"offload takes {taken:.0f} GiB of a node's memory, which has {memory:.0f} GiB: it will not run"]


#: Share of a network's parameters from which those that tensor parallelism leaves whole are worth a warning.
WHOLE_SHARE = 0.01


def _whole_layers(chosen: Plan, shares: Mapping[str, float]) -> list[str]:
    """Layers that every rank of a tensor-parallel group computes whole, with all of their parameters."""
    if sum(shares.values()) < WHOLE_SHARE:
        return []
    names = ", ".join(sorted(shares, key=lambda name: -shares[name])[:3])
    more = f" and {len(shares) - 3} more" if len(shares) > 3 else ""
    kept = f"{sum(shares.values()):.0%} of the parameters"
    return [f"tp={chosen.mesh.degree('tp')} does not split {names}{more}: every rank keeps and computes {kept} whole"]


#: A share of the peak that nobody has been seen to reach with a whole training step.
RARE_UTILISATION = 0.75


def rare_utilisation(system: System, chosen: Plan, flops_per_s: float) -> list[str]:
    """Whether a step would use more of the devices' arithmetic than is seen in practice."""
    peak = system.device.peak_flops_per_s(system.device.arithmetic(chosen.dtype))
    mfu = flops_per_s / (chosen.gpus * peak)
    if mfu <= RARE_UTILISATION:
        return []
    return [f"MFU {100 * mfu:.0f} %: hardly anybody reaches {100 * RARE_UTILISATION:.0f} %; expect a slower step"]


#: Share of a step from which waiting for images that nobody asked for is worth a warning.
LONG_WAIT = 0.02


def loading_warnings(run: Run, waited: float) -> list[str]:
    """Whether photographs that the run does not mention set its pace; ``waited``: the share of the step."""
    if run.input is not None or waited < LONG_WAIT:
        return []
    return [
        f"{waited:.0%} of the step waits for the host's cores to decode photographs, which the run does not mention; "
        "input=none is for synthetic ones, input.decode and input.cores for a faster loader"
    ]


def idle_options(run: Run, system: System, chosen: Plan) -> list[str]:
    """Options that ask for something, and change nothing under this plan."""
    one_node = f"the run has {chosen.gpus} GPUs of a node of {system.devices_per_node}"
    within = chosen.gpus <= system.devices_per_node
    served = run.consistency != "bsp" or run.exchange == "parameter-server"
    idle = {
        f"schedule={run.schedule}": run.schedule != "1f1b" and chosen.stages == 1 and "there is no pipeline",
        "sp": chosen.parallel.sequence_parallel and chosen.mesh.degree("tp") == 1 and "there is no tensor parallelism",
        f"servers={run.servers}": run.servers is not None and not served and "workers are synchronous (bsp)",
        f"background={run.background:g}": run.background > 0 and within and one_node,
        f"neighbour={run.neighbour}": run.neighbour is not None and within and one_node,
    }
    return [f"{option} changes nothing: {reason}" for option, reason in idle.items() if reason]


def warnings(chosen: Plan, graph: Graph, placement: Placement) -> tuple[str, ...]:
    """Ranks that do nothing new, or nothing at all; parameters that tensor parallelism does not divide."""
    idle = idle_axes(graph, placement, chosen.mesh)
    whole = {} if "tp" in idle else undivided_parameters(graph, placement, chosen.mesh)
    lines = [*_whole_layers(chosen, whole)]
    lines += [
        f"{axis}={chosen.mesh.degree(axis)} splits nothing in this network: its ranks all do the same work"
        for axis in idle
    ]
    if chosen.idle:
        lines.append(
            f"{chosen.idle} of {chosen.gpus} gpus are idle: the global batch has only {chosen.global_batch} samples"
        )
    elif chosen.local_batch * chosen.dp > chosen.global_batch:
        spare = chosen.local_batch * chosen.dp - chosen.global_batch
        uneven = f"the global batch does not divide evenly: the step waits for ranks with {chosen.local_batch} samples"
        lines.append(f"{uneven} ({spare} slots idle)")
    return tuple(lines)
