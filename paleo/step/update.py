"""The optimizer's update and the clipping of gradients before it, as kernels."""

from __future__ import annotations

from paleo.operations.kernel import Kernel, flat_pass
from paleo.operations.optimizers import Optimizer
from paleo.operations.precision import Precision
from paleo.parallel.mesh import Axes

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
    size = count * (formats.accumulator or formats.gradient)
    norm = flat_pass("norm of gradients", "reduce", "update", count, size, 0.0, flops=2.0 * count)
    scale = flat_pass("scaled gradients", "elementwise", "update", count, size, size)
    return {"none": [], "norm": [norm], "scaled": [norm, scale]}[clip]


def clip_axes(zero: int) -> Axes:
    """The axes over which parts of the norm are summed: whatever parameters, or shards of their gradients, are divided
    over."""
    return ("tp", "cp", "ep", "shard", "dp", "pp") if zero else ("tp", "pp")
