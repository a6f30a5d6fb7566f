"""The mesh of ranks: named axes with degrees, innermost first, so that each axis is a set of groups on the system."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Axes from the innermost (neighbouring ranks) to the outermost, the order of Megatron and of torchtitan; ``spatial``
#: divides images. Experts are spread over ``ep`` of the data-parallel ranks, and states over ``shard`` of them where
#: that is stated: the batch is divided over ``BATCH_AXES`` together.
AXES = ("spatial", "tp", "cp", "ep", "shard", "dp", "pp")
Axes = tuple[str, ...]
BATCH_AXES: Axes = ("ep", "shard", "dp")


def joined(axes: Axes) -> str:
    """One name for the group over several axes that one collective spans.

    >>> joined(("tp", "ep")), Mesh.of({"tp": 2, "ep": 4, "dp": 3}).degree("tp+ep")
    ('tp+ep', 8)
    """
    return "+".join(axes)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of the axes; ranks are numbered with the first axis fastest.

    >>> mesh = Mesh.of({"dp": 4, "tp": 8})
    >>> mesh.size, mesh.stride(("dp",)), mesh.degree("pp")
    (32, 8, 1)
    """

    degrees: tuple[tuple[str, int], ...]
    _by_axis: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_axis", dict(self.degrees))

    @classmethod
    def of(cls, degrees: Mapping[str, int]) -> Mesh:
        return cls(tuple((axis, degrees.get(axis, 1)) for axis in AXES))

    @property
    def size(self) -> int:
        return math.prod(degree for _, degree in self.degrees)

    def degree(self, axis: str) -> int:
        """Ranks along an axis, or along several joined by ``+`` (`joined`)."""
        known = self._by_axis.get(axis)
        return self.ways(tuple(axis.split("+"))) if known is None else known

    def stride(self, axes: Axes) -> int:
        """How far apart neighbours of a group along the axes are numbered: the stride of the innermost one in use."""
        names = [name for name, _ in self.degrees]
        axes = tuple(name for axis in axes for name in axis.split("+"))
        used = [axis for axis in axes if self.degree(axis) > 1] or list(axes)
        innermost = min(names.index(axis) for axis in used)
        return math.prod(degree for _, degree in self.degrees[:innermost])

    @property
    def replicas(self) -> int:
        """Ranks that share out the batch."""
        return self.ways(BATCH_AXES)

    @property
    def state_axes(self) -> Axes:
        """Axes over which ZeRO shares out states: those of the shard group, or of all replicas, and in either case the
        ranks of cp, which hold the same parameters (Megatron's distributed optimizer and FSDP share states over dp x
        cp)."""
        axes = ("cp", "shard") if self.degree("shard") > 1 else ("cp", "ep", "dp")
        return tuple(axis for axis in axes if self.degree(axis) > 1)

    def ways(self, axes: Axes) -> int:
        """Ranks over which several axes together divide."""
        return math.prod([self._by_axis[axis] for axis in axes])
