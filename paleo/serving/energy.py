"""Power of devices that serve: an idle fraction, an addition for running kernels, and the energy of FLOP and bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.pricing.gemm import GemmParameters
from paleo.pricing.power import BOARD, PICO, PowerParameters
from paleo.pricing.store import STEP_STACKS, lookup

if TYPE_CHECKING:
    from paleo.serving.plans import ServingPlan
    from paleo.specs.device import Device


def watts_of(plan: ServingPlan, device: Device) -> float | None:
    """Return the mean power of one device of a plan [W], at most its design power; None where it states none.

    Parameters
    ----------
    plan : ServingPlan
        Its replica's state says how much is computed and read in a second.
    device : Device
        The device that serves.
    """
    if device.tdp is None:
        return None
    name, architecture, kind = device.name, device.architecture, device.memory.kind
    board = lookup(
        PowerParameters, subject=name, architecture=architecture, family="power", memory_kind=kind,
        stacks=(*STEP_STACKS, BOARD),
    ).parameters  # fmt: skip
    product = lookup(
        GemmParameters, subject=name, architecture=architecture, family="gemm.tensor", memory_kind=kind
    ).parameters
    flops, moved = _work(plan)
    idle = board.idle_watts(device.tdp, device.memory.kind, device.memory.bandwidth)
    demand = (
        idle
        + board.busy * device.tdp
        + PICO * (board.arithmetic * product.training_energy * flops + board.dram * moved)
    )
    return min(demand, device.tdp)


def _work(plan: ServingPlan) -> tuple[float, float]:
    """Return the FLOP and the memory traffic [bytes] of one device in a second."""
    candidate, state = plan.candidate, plan.state
    work, stages = candidate.phases.lowered, candidate.sharding.pp
    per_token = 2.0 * sum(each.weights * each.count for each in work.layers if not each.of_experts)
    per_token += sum((each.at(2.0).flops - each.at(1.0).flops) * each.count for each in work.layers if each.of_experts)
    output = float(np.asarray(state.output))
    prompt = float(state.pieces) * float(np.asarray(plan.batching.tokens)) if float(state.pieces) > 1 else 0.0
    tokens = float(state.requests_per_s) * (output + prompt)
    iterations = stages / max(float(state.iteration), PICO)
    cached = float(state.batch) / stages * float(candidate.memory.sequence(output)) / candidate.memory.ranks
    return tokens * per_token / stages, iterations * (candidate.memory.weights + cached)
