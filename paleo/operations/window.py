"""Sliding windows of convolutions and pools, and the rows of neighbouring ranks that they read where space is split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paleo.operations.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Window:
    """How one windowed dim of a convolution or a pool slides: out[i] reads in[i·stride + j·dilation − padding], j <
    taps. ``kernel`` is the dim of a convolution's taps.

    >>> Window("height", "in_height", "kernel_height", stride=2, padding=3, taps=7).halo
    (3, 2)
    """

    out: str
    source: str
    kernel: str
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    taps: int = 1

    @property
    def _reach(self) -> int:
        return self.dilation * (self.taps - 1)

    @property
    def halo(self) -> tuple[int, int]:
        """Rows of the source below and above a rank's share that its own outputs read, where both are cut evenly."""
        return self.padding, max(0, self._reach - self.padding - self.stride + 1)

    @property
    def gradient_halo(self) -> tuple[int, int]:
        """Outputs of the neighbours below and above that read the rank's own rows: their gradients are needed."""
        return max(0, (self._reach - self.padding) // self.stride), -(-self.padding // self.stride)


#: Rows of neighbours that a rank reads beside its own share, for each window: of the source, and of the output's
#: gradient.
Halos = tuple[tuple[int, int], ...]


def halos(windows: tuple[Window, ...], ways: Mapping[str, float]) -> Halos:
    """What comes from both neighbours; of two ranks each has one."""

    def received(rows: tuple[int, int], ranks: float) -> int:
        return 0 if ranks <= 1 else sum(rows) if ranks > 2 else max(rows)

    return tuple((received(w.halo, ways.get(w.out, 1)), received(w.gradient_halo, ways.get(w.out, 1))) for w in windows)


def with_rows(tensor: Tensor, rows: Iterable[tuple[str, int]]) -> float:
    """Elements of a tensor with so many more rows along its dims, over its own."""
    return math.prod((tensor.size(dim) + more) / tensor.size(dim) for dim, more in rows)
