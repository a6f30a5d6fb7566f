"""Tensors with named dims, so that a strategy can split them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paleo.operations.precision import Precision, Role

Size = int | float


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor by name (the identity of its storage: views share it), dims and sizes.

    ``grad`` is False for what needs no gradient: graph inputs, masks, indices, frozen weights. ``wide`` activations
    stay fp32 under mixed precision, and so does what element-wise passes make of them. ``packed`` weights are stored in
    so many bytes each, whatever the run's format; 0: in that.

    >>> x = Tensor("x", ("batch", "features"), (4, 8))
    >>> x.elements, x.size("features"), x.split({"batch": 2}).sizes
    (32, 8, (2, 8))
    """

    name: str
    dims: tuple[str, ...]
    sizes: tuple[Size, ...]
    role: Role = "activation"
    grad: bool = True
    wide: bool = False
    packed: float = 0.0

    @property
    def elements(self) -> Size:
        return math.prod(self.sizes)

    def size(self, dim: str) -> Size:
        return self.sizes[self.dims.index(dim)]

    def split(self, ways: Mapping[str, float]) -> Tensor:
        """The largest local shard when each dim of ``ways`` is divided; whole sizes stay whole numbers."""
        if ways.keys().isdisjoint(self.dims):
            return self
        pairs = zip(self.dims, self.sizes, strict=True)
        sizes = tuple([_share(n, ways[dim]) if dim in ways else n for dim, n in pairs])
        return Tensor(self.name, self.dims, sizes, self.role, self.grad, self.wide, self.packed)

    def renamed(self, names: Mapping[str, str]) -> Tensor:
        return replace(self, dims=tuple(names.get(dim, dim) for dim in self.dims))

    def like(self, name: str, *, role: Role | None = None) -> Tensor:
        """A new tensor of the same shape."""
        return replace(self, name=name, role=role or self.role, grad=True)

    def reshaped(self, dims: Mapping[str, Size], *, name: str | None = None) -> Tensor:
        return replace(self, name=name or self.name, dims=tuple(dims), sizes=tuple(dims.values()))

    def without(self, *dims: str, name: str, role: Role = "activation") -> Tensor:
        """The tensor left when ``dims`` are reduced away."""
        kept = {dim: n for dim, n in zip(self.dims, self.sizes, strict=True) if dim not in dims}
        return Tensor(name, tuple(kept), tuple(kept.values()), role)

    def bytes(self, precision: Precision) -> float:
        each = precision.wide if self.wide and self.role == "activation" else precision.bytes_of(self.role)
        return float(self.elements * (self.packed or each))


def _share(size: Size, ways: float) -> Size:
    if ways == 1:
        return size
    return math.ceil(size / ways) if isinstance(size, int) else size / ways


def split_all(tensors: tuple[Tensor, ...], ways: Mapping[str, float]) -> tuple[Tensor, ...]:
    """The largest local shard of each tensor."""
    return tuple([t.split(ways) for t in tensors])
