"""Bytes on a device: states, activations and workspace of each stage. Pure functions that broadcast: stages are the
first axis, configurations the last.

What a rank must hold at the peak of a step, part by part, and the optimizer's update and the clipping of gradients
before it, as kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.operations.base import flat_pass

if TYPE_CHECKING:
    from paleo.operations.base import Kernel
    from paleo.operations.optimizers import Optimizer
    from paleo.operations.tensor import Precision
    from paleo.parallel.mesh import Axes
    from paleo.schedules.base import Numeric, Schedule

Array = npt.NDArray[np.float64]


def alive(schedule: Schedule, stages: int, microbatches: Numeric, chunks: int) -> Array:
    """Microbatches whose activations live at once in each piece of the network (chunks, copies) that a stage has:
    (stages, pieces, …)."""
    if stages == 1:
        return np.ones((1, 1) + np.ndim(microbatches) * (1,))
    stage = np.arange(float(stages)).reshape((-1,) + np.ndim(microbatches) * (1,))
    living = schedule.alive_by_piece(stage, stages, microbatches, chunks)
    shape = np.broadcast_shapes(stage.shape, np.shape(microbatches))
    return np.moveaxis(np.broadcast_to(living, (len(living), *shape)), 0, 1)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of what training keeps for each parameter on a stage, (stages, …), and of what sharding gathers at a
    time."""

    parameters: Array
    gradients: Array
    optimizer: Array
    gathered: Numeric


def states(
    parameters: Array,
    trained: Array,
    largest: Numeric,
    ranks: Numeric,
    zero: int,
    optimizer: Optimizer,
    formats: Precision,
    *,
    training: bool = True,
) -> States:
    """States of ``parameters`` elements on each stage, ``trained`` of them with gradients and optimizer states, sharded
    over ``ranks`` as ZeRO's stages say (Rajbhandari et al., SC 2020).

    ``largest``: elements of the largest section; with sharded parameters two of them are whole at once.
    """
    share = [1.0 / np.asarray(ranks) if zero >= stage else 1.0 for stage in (3, 2, 1)]
    return States(
        parameters * formats.parameter * share[0],
        trained * ((formats.gradient + formats.accumulator) * training) * share[1],
        trained * (optimizer.state_bytes(formats) * training) * share[2],
        2.0 * largest * formats.parameter if zero == 3 else 0.0 * np.asarray(largest),
    )


def workspace(layers: Array, largest_output_bytes: Array, transient: Array, bucket: Numeric) -> Array:
    """What a stage needs for a moment, (stages, …): two of its largest activations (a gradient and its successor), two
    buckets, and what recomputation brings back. Only sections that a stage holds count."""
    known: dict[bytes, Array] = {}
    rows = []
    for sections in layers > 0:  # few stages differ in what they hold
        kind = sections.tobytes()
        if kind not in known:
            most = (figures[sections].max(axis=0, initial=0.0) for figures in (largest_output_bytes, transient))
            known[kind] = 2.0 * next(most) + next(most) + 2.0 * np.asarray(bucket)
        rows.append(known[kind])
    return np.stack(rows)


def total_memory(states: States, activations: Array, work: Numeric) -> Array:
    """Bytes of each stage, all parts together."""
    return states.parameters + states.gradients + states.optimizer + activations + work + states.gathered


#: The squared norm of the gradients is exchanged as one fp32 number.
NORM_BYTES = 4.0


def update_kernel(count: float, tensors: float, optimizer: Optimizer, formats: Precision) -> Kernel:
    """The optimizer as one pass over all that it reads and writes of ``count`` parameters in ``tensors``."""
    read, written = (count * per_parameter for per_parameter in optimizer.update_bytes(formats))
    calls, flops = optimizer.launches(tensors), count * optimizer.flops
    return flat_pass("update", "optimizer", "update", count, read, written, flops=flops, calls=calls)


def clip_kernels(count: float, clip: str, formats: Precision) -> list[Kernel]:
    """Passes over ``count`` gradients before an update that is clipped to a global norm: they are read once for the
    norm and, where they are ``scaled`` apart from the update, read and written once more (Pascanu et al., ICML
    2013)."""
    size = count * formats.summed
    norm = flat_pass("norm of gradients", "reduce", "update", count, size, 0.0, flops=2.0 * count)
    scale = flat_pass("scaled gradients", "elementwise", "update", count, size, size)
    return {"none": [], "norm": [norm], "scaled": [norm, scale]}[clip]


def clip_axes(zero: int) -> Axes:
    """The axes over which parts of the norm are summed: whatever parameters, or shards of their gradients, are divided
    over."""
    return ("tp", "cp", "ep", "shard", "dp", "pp") if zero else ("tp", "pp")


#: What fills the memory.
PARTS = ("parameters", "gradients", "optimizer", "activations", "workspace")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the fullest device at the end of the forward pass, when most activations live.

    ``workspace`` is the largest temporary: two copies of the largest activation (a gradient and its successor),
    communication buckets, and what is ``reserved``, which no tensor gets: the context of the process and buffers of its
    communicators. ``fragmentation``: what the framework's allocator holds beside its tensors while there is room, as a
    share of them; it gives that back before it runs out, so that it is no part of the total.

    >>> shown = Footprint(6.0, 2.0, 4.0, 5.0, 2.0, 1.0, 0.125, capacity=20.5)
    >>> shown.allocated, shown.cached, shown.used, shown.fits
    (18.0, 19.5, 20.5, True)
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    reserved: float
    fragmentation: float
    capacity: float

    @property
    def parts(self) -> dict[str, float]:
        """The bytes by part; they add up to the total."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def allocated(self) -> float:
        """What the framework's allocator hands out (torch.cuda.max_memory_allocated)."""
        return self.total - self.reserved

    @property
    def cached(self) -> float:
        """What it reserves (torch.cuda.max_memory_reserved): no more than the device has left, unless the tensors alone
        are more than that."""
        return max(self.allocated, min(self.allocated * (1.0 + self.fragmentation), self.capacity - self.reserved))

    @property
    def used(self) -> float:
        """What the device's driver shows (nvidia-smi): context and communicators, too."""
        return self.cached + self.reserved

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity
