"""Einsums of two operands: linear layers, convolutions, attention products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paleo.operations.base import Kernel, MemoryPass, flat_pass
from paleo.operations.tensor import halos, split_all, with_rows

if TYPE_CHECKING:
    from paleo.operations.base import Family, Phase
    from paleo.operations.tensor import Halos, Precision, Tensor, Window


@dataclass(frozen=True, slots=True)
class Contraction:
    """An einsum of two operands over named dims, perhaps with sliding windows: linear layers, convolutions, attention
    products.

    Dims in all three tensors are batch dims; dims absent from ``out`` are summed. FLOP = 2 · product of the sizes of
    all dims (a windowed source dim is addressed by its output and kernel dims and does not count). The backward
    contractions follow: d lhs = out' · rhs, d rhs = lhs · out'.

    ``transposed`` marks a transposed convolution: its forward pass is the data gradient of a convolution. ``visible``
    is the share of its products that a mask leaves to be computed: about half under a causal mask, 1 without one.
    """

    name: str
    lhs: Tensor
    rhs: Tensor
    out: Tensor
    bias: Tensor | None = None
    windows: tuple[Window, ...] = ()
    transposed: bool = False
    halos: Halos = ()
    visible: float = 1.0

    @property
    def useful(self) -> tuple[float, float]:
        """Shares of its FLOP, forward and backward, that the network asks for."""
        return self.visible, self.visible

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return (self.lhs, self.rhs) if self.bias is None else (self.lhs, self.rhs, self.bias)

    @property
    def saves(self) -> tuple[Tensor, ...]:
        kept = [self.lhs] if self.rhs.grad else []
        return tuple(kept + ([self.rhs] if self.lhs.grad and self.rhs.role == "activation" else []))

    @property
    def private_dims(self) -> frozenset[str]:
        return frozenset(name for w in self.windows for name in (w.source, w.kernel, w.out))

    @property
    def flops(self) -> float:
        hidden = {w.out if self.transposed else w.source for w in self.windows}
        sizes = {
            d: n
            for t in (self.lhs, self.rhs, self.out)
            for d, n in zip(t.dims, t.sizes, strict=True)
            if d not in hidden
        }
        return 2.0 * math.prod(sizes.values())

    def split(self, ways: Mapping[str, float]) -> Contraction:
        bias = None if self.bias is None else self.bias.split(ways)
        lhs, rhs, out = split_all((self.lhs, self.rhs, self.out), ways)
        return replace(self, lhs=lhs, rhs=rhs, out=out, bias=bias, halos=halos(self.windows, ways))

    def forward(self, precision: Precision) -> tuple[Kernel, ...]:
        formats = self.operands(precision)
        kernels = [self._kernel("forward", self.lhs, self.rhs, self.out, formats, extra=self.bias)]
        if formats.narrow:
            kernels += self._quantised("forward", self.lhs, formats)
        return (*_of_one_call(kernels), *self._casts("forward", precision))

    def _casts(self, phase: Phase, precision: Precision) -> tuple[Kernel, ...]:
        """Mixed precision: what is stored wide is narrowed for the product, and its gradient widened after it."""
        if not precision.casts:
            return ()
        wide = [t for t in (self.lhs, self.rhs) if t.wide or t.role == "parameter"]
        if phase == "forward":
            return tuple(_cast(self.name, phase, t, t.bytes(precision), precision.activation) for t in wide)
        phases: list[Phase] = ["backward_weight" if t.role == "parameter" else "backward" for t in wide]
        return tuple(
            _cast(self.name, phase, t, float(t.elements * precision.activation), precision.gradient)
            for t, phase in zip(wide, phases, strict=True)
            if t.grad
        )

    def backward(self, precision: Precision) -> tuple[Kernel, ...]:
        if not any(tensor.grad for tensor in self.reads):
            return ()
        precision = self.operands(precision)
        kernels = self._quantised("backward", self.out, precision) if precision.narrow else []
        if self.lhs.grad:
            kernels.append(self._kernel("backward", self.out, self.rhs, self.lhs, precision))
        if self.rhs.grad:
            phase: Phase = "backward_weight" if self.rhs.role == "parameter" else "backward"
            kernels.append(self._kernel(phase, self.lhs, self.out, self.rhs, precision))
        if self.bias is not None and self.bias.grad:
            summed = MemoryPass(f"{self.name}.bias", "reduce", (self.out,), self.bias, flops_per_element=1.0)
            kernels.append(replace(summed.forward(precision)[0], phase="backward_weight"))
        return (*_of_one_call(kernels), *self._casts("backward", precision))

    def operands(self, precision: Precision) -> Precision:
        """Only products with weights are made in formats below sixteen bits, and no convolutions."""
        return precision if self.rhs.role == "parameter" and not self.windows else precision.sixteen_bits

    def _quantised(self, phase: Phase, source: Tensor, precision: Precision) -> list[Kernel]:
        """An operand brought to the narrow format with its scales, and its transpose beside it: the product of the
        weight gradient, where there is one, runs along the other dim; before that its largest value, where the scale
        needs it. Weights are brought there once a step, which is not counted."""
        count, copies = float(source.elements), 2.0 if self.rhs.grad else 1.0
        read, written = count * precision.activation, copies * count * (precision.operand + precision.scale_bytes)
        largest = flat_pass(f"{self.name}.largest", "reduce", phase, count, read, 0.0)
        quantised = flat_pass(f"{self.name}.quantise", "elementwise", phase, count, read, written)
        return [largest, quantised] if precision.measured_first else [quantised]

    def _kernel(
        self, phase: Phase, left: Tensor, right: Tensor, out: Tensor, precision: Precision, extra: Tensor | None = None
    ) -> Kernel:
        moved = left.elements * self._border(left, phase) + right.elements
        read = moved * precision.operand + (0.0 if extra is None else extra.bytes(precision))
        gradient = phase == "backward_weight" and not precision.casts
        written = out.elements * (precision.gradient if gradient else precision.activation)
        if self.windows:
            operation, shape = self._direction(phase), self._conv_shape()
        else:
            operation, shape = "narrow" if precision.narrow else "gemm", _gemm_shape(left, right, out)
        family: Family = "conv" if self.windows else "gemm"
        experts = float(self.rhs.size("experts")) if self._of_experts else 0.0
        return Kernel(
            self.name,
            family,
            operation,
            phase,
            self.flops,
            0.0,
            float(read),
            float(written),
            shape,
            experts=experts,
        )

    @property
    def _of_experts(self) -> bool:
        """Whether each expert of a mixture has a matrix of its own."""
        return self.rhs.role == "parameter" and "experts" in self.rhs.dims and "experts" in self.lhs.dims

    def _border(self, tensor: Tensor, phase: Phase) -> float:
        """A windowed operand with the rows of its neighbours, over its own rows."""
        if not self.windows:
            return 1.0
        direction = int((phase == "backward") != self.transposed)
        pairs = zip(self.windows, self.halos, strict=False)
        return with_rows(tensor, [(w.out if phase == "backward" else w.source, rows[direction]) for w, rows in pairs])

    def _direction(self, phase: Phase) -> str:
        if phase == "backward_weight":
            return "bwd_filter"
        return "bwd_data" if (phase == "backward") != self.transposed else "fwd"

    def _conv_shape(self) -> dict[str, float]:
        """NCHW shape of the equivalent convolution; missing spatial dims are 1, a third one is folded into the batch of
        windows."""
        image, result = (self.out, self.lhs) if self.transposed else (self.lhs, self.out)
        groups = self.rhs.size("groups") if "groups" in self.rhs.dims else 1
        names = ("d", "h", "w")[-len(self.windows) :] if len(self.windows) > 1 else ("h",)
        shape: dict[str, float] = {
            "n": image.sizes[0],
            "c": math.prod(n for d, n in zip(image.dims, image.sizes, strict=True) if d in ("groups", _channel(image))),
            "k": math.prod(
                n for d, n in zip(result.dims, result.sizes, strict=True) if d in ("groups", _channel(result))
            ),
            "groups": groups,
        }
        for axis, window in zip(names, self.windows, strict=True):
            source, sink = (window.out, window.source) if self.transposed else (window.source, window.out)
            shape |= {axis: image.size(source), f"out_{axis}": result.size(sink)}
            shape |= {f"kernel_{axis}": self.rhs.size(window.kernel), f"stride_{axis}": window.stride}
            shape |= {f"dilation_{axis}": window.dilation, f"pad_{axis}": window.padding}
        return shape


def _of_one_call(kernels: list[Kernel]) -> list[Kernel]:
    """Kernels that come out of one call of the framework."""
    return kernels if len(kernels) == 1 else [replace(kernel, calls=1.0 / len(kernels)) for kernel in kernels]


def _cast(name: str, phase: Phase, tensor: Tensor, read: float, width: float) -> Kernel:
    """One pass from one format to another of ``width`` bytes."""
    count = float(tensor.elements)
    return flat_pass(f"{name}.cast", "elementwise", phase, count, read, count * width)


def _channel(tensor: Tensor) -> str:
    return tensor.dims[2] if tensor.dims[1] == "groups" else tensor.dims[1]


def _gemm_shape(left: Tensor, right: Tensor, out: Tensor) -> dict[str, float]:
    """m, n, k and batch of the matrix product: batch dims are shared by all three, k dims are summed."""
    sizes = {d: n for t in (left, right, out) for d, n in zip(t.dims, t.sizes, strict=True)}
    inside, l, r = set(out.dims), set(left.dims), set(right.dims)  # noqa: E741 - the field's letters
    return {
        "m": float(math.prod([n for d, n in sizes.items() if d in inside and d in l and d not in r])),
        "n": float(math.prod([n for d, n in sizes.items() if d in inside and d in r and d not in l])),
        "k": float(math.prod([n for d, n in sizes.items() if d not in inside])),
        "batch": float(math.prod([n for d, n in sizes.items() if d in inside and d in l and d in r])),
    }
