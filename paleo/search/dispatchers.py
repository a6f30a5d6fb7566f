"""Which dispatcher deals out tokens to experts: an all-to-all that sends a token to each of its experts, or one that
sends it once to each node and shakes hands first. Few tokens pay for the handshake, many for the copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

from paleo.errors import PlanError
from paleo.predict import predict
from paleo.search.space import divisors
from paleo.specs.software import load_software

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.specs.software import Dispatch
    from paleo.step.backend import Backend

#: Dispatchers by their names in words.
NAMES: dict[Dispatch, str] = {"nccl": "NCCL's all-to-all", "deepep": "DeepEP", "hybridep": "HybridEP"}
#: Microbatches that are tried for a crossover.
_TRIED = 8


def other_dispatcher(backend: Backend) -> Dispatch | None:
    """The dispatcher that a search tries beside the software's own; None where the run states one, or where the
    software has no other."""
    software = backend.software
    if backend.run.expert_dispatch is not None or not software.host.handshake:
        return None
    return "deepep" if software.parallelism.expert_dispatch == "nccl" else "nccl"


def dispatch_words(winner: Prediction) -> str:
    """How a plan's tokens travel, what the other dispatcher would cost, and at which microbatches it would win; empty
    where no experts are spread."""
    software = load_software(winner.run.software)
    used = winner.run.expert_dispatch or software.parallelism.expert_dispatch
    mesh, axes = winner.plan.mesh, winner.plan.parallel.expert_axes
    if mesh.ways(axes) == 1 or not software.host.handshake:
        return ""
    other: Dispatch = "deepep" if used == "nccl" else "nccl"
    gap = _step(winner, other, winner.plan.microbatch) / winner.step_time - 1.0
    slower = f"{100 * abs(gap):.1f} % {'slower' if gap >= 0 else 'faster'}"
    text = f"Tokens travel by {NAMES[used]}; {NAMES[other]} would be {slower}."
    return f"{text} {_crossover(winner, used, other)}"


def _crossover(winner: Prediction, used: Dispatch, other: Dispatch) -> str:
    """From which microbatch on the faster of two dispatchers is another one."""
    wins = dict(_compared(winner, used, other))
    sizes = list(wins)
    crossing = next((size for before, size in pairwise(sizes) if wins[before] != wins[size]), None)
    if crossing is None:
        first = other if wins[sizes[0]] else used
        return f"At microbatches of {sizes[0]} to {sizes[-1]} {NAMES[first]} is the faster one."
    below, above = (other, used) if wins[sizes[0]] else (used, other)
    return f"Below a microbatch of {crossing} {NAMES[below]} is faster, from there on {NAMES[above]}."


def _compared(winner: Prediction, used: Dispatch, other: Dispatch) -> Iterator[tuple[int, bool]]:
    """Microbatches that the plan's schedule can run, and whether the other dispatcher is faster there."""
    for size in divisors(winner.plan.local_batch)[:_TRIED]:
        with suppress(PlanError):
            yield size, _step(winner, other, size) < _step(winner, used, size)


def _step(winner: Prediction, dispatcher: Dispatch, microbatch: int) -> float:
    """Seconds of a plan's step by another dispatcher and microbatch."""
    changed = {"expert_dispatch": dispatcher, "microbatch": microbatch}
    return predict(winner.model, winner.system, winner.run.model_copy(update=changed)).step_time
