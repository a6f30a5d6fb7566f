"""Networks timed layer by layer: forward plus backward of one layer a row, in several frameworks of 2015 and 2016.

Convolutions and inner products are priced by the convolution family with the algorithms that the framework has;
pooling, activation and concatenation by the bytes that they move.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from paleo.pricing.convolution import (
    OWN_KERNELS,
    ConvolutionParameters,
    ConvolutionShape,
    Direction,
    algorithm_costs,
    convolution_shape,
    fastest_time,
)
from paleo.pricing.kernels import DeviceFigures, figures
from paleo.specs.device import find_device
from paleo.tables.cells import Array, number, text
from paleo.tables.kernels import KINDS, TableKind
from paleo.tables.kinds._conv import element_bytes
from paleo.units import MILLISECOND

CONVOLUTIONS = ("Convolution", "conv2d", "InnerProduct")
#: Layers without products: one kernel each way that moves bytes.
STREAMED = ("ReLU", "Pooling", "Concat")
#: Share of memory bandwidth of a kernel that streams, by memory kind: what long elementwise kernels reach.
STREAM_SHARE: Mapping[str, float] = {"GDDR": 0.76, "HBM": 0.88}


@dataclass(frozen=True, slots=True)
class Framework:
    """What a framework computes convolutions with: algorithms, library version, and calls of one image each."""

    algorithms: Collection[str]
    library: float = OWN_KERNELS
    image_by_image: bool = False


_IM2COL = Framework(("explicit",), image_by_image=True)
FRAMEWORKS: Mapping[str, Framework] = {
    "im2col": _IM2COL,
    "cudnn2": Framework(("implicit", "explicit"), 2.0),
    "cudnn4": Framework(("implicit", "explicit", "fft"), 4.0),
    "fbfft": Framework(("fft",)),
    "cuda-convnet": Framework(("implicit",)),
}


class CnnLayersTable(TableKind[DeviceFigures]):
    """Forward plus backward time of one layer a row."""

    name: ClassVar[str] = "cnn_layers"
    header: ClassVar[frozenset[str]] = frozenset(
        {"source", "device", "layer_type", "input_shape", "output_shape", "kernel", "forward_ms", "backward_ms"}
    )
    reads: ClassVar[str] = "compute cudnn dtype framework groups pad stride software"
    configuration: ClassVar[tuple[str, ...]] = ("input_shape", "output_shape", "kernel", "layer_type")
    families: ClassVar[Mapping[str, type[Any]]] = {"conv.vector": ConvolutionParameters}
    host_parameters: ClassVar[tuple[str, ...]] = ("launch",)
    calibrates: ClassVar[bool] = False
    measured_column: ClassVar[str] = "forward_ms + backward_ms"
    measured_unit: ClassVar[float] = MILLISECOND

    def measured(self, frame: pd.DataFrame) -> Array:
        """Seconds of forward and backward together; nan unless above zero."""
        total = number(frame, "forward_ms", 0.0) + number(frame, "backward_ms", 0.0)
        return np.where(total > 0, total, np.nan) * MILLISECOND

    def figures(self, subject: str, dtype: str, compute: str) -> DeviceFigures:
        """All rows are fp32."""
        return figures(find_device(subject), "fp32")

    def unsupported(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Layers without work, unknown types, shapes or frameworks, and what is not fp32."""
        kind = text(frame, "layer_type")
        out = pd.Series("", index=frame.index, dtype=object)
        out = out.mask(
            ~kind.isin([*CONVOLUTIONS, *STREAMED]),
            "layer type " + kind.where(kind != "", "(empty)") + " is not modelled",
        )
        shaped = ~np.isnan(_extents(frame, "input_shape")[:, 0] + _extents(frame, "output_shape")[:, 0])
        out = out.mask((out == "") & ~shaped, "a shape is not N x C [x H x W]")
        unknown = kind.isin(CONVOLUTIONS) & (framework_of(frame) == "")
        out = out.mask((out == "") & unknown, "kernels of framework " + text(frame, "framework") + " are not modelled")
        timed = self.measured(frame) > 0
        out = out.mask((out == "") & ~timed, "forward and backward time are not both there")
        return out.mask((out == "") & (text(frame, "dtype", "fp32") != "fp32"), "only fp32 is modelled")

    def stack(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Every row is a loop of one layer, launched back to back."""
        return pd.Series("back-to-back", index=frame.index, dtype=object)

    def family(self, frame: pd.DataFrame) -> pd.Series[str]:
        """conv.vector for all rows: its bandwidth share prices the memory-bound layers too."""
        return pd.Series("conv.vector", index=frame.index, dtype=object)

    def work(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """FLOP of forward and both gradients by the direct method; tensors once for each of them."""
        products = text(frame, "layer_type").isin(CONVOLUTIONS).to_numpy()
        shape = layer_shape(frame, Direction.FORWARD)
        forward, backward = _moved(frame)
        moved = np.where(products, 3.0 * shape.elements, forward + backward)
        return np.where(products, 3.0 * shape.flops, 0.0), moved * element_bytes(frame)

    def time(self, frame: pd.DataFrame, figures: DeviceFigures, parameters: ConvolutionParameters) -> Array:
        """Seconds of forward and backward of rows of one device."""
        forward, backward = _moved(frame)
        rate = STREAM_SHARE["GDDR" if figures.memory_kind.startswith("GDDR") else "HBM"] * figures.memory_bandwidth
        seconds = (forward + backward) * element_bytes(frame) / rate
        products, library = text(frame, "layer_type").isin(CONVOLUTIONS).to_numpy(), framework_of(frame).to_numpy()
        for name, framework in FRAMEWORKS.items():
            chosen = products & (library == name)
            if chosen.any():
                seconds[chosen] = convolution_layer_time(frame[chosen], framework, figures, parameters)
        return seconds


def framework_of(frame: pd.DataFrame) -> pd.Series[str]:
    """Key of FRAMEWORKS for each row, from its framework and cuDNN columns; '' where the kernels are none of those."""
    framework, cudnn = text(frame, "framework").str.lower(), text(frame, "cudnn").str.lower()
    out = pd.Series("", index=frame.index, dtype=object)
    out = out.mask(framework.isin(["caffe", "torch-7", "theano"]) | framework.str.contains("convolutionmm"), "im2col")
    out = out.mask(framework.str.startswith("cuda-convnet"), "cuda-convnet").mask(framework == "fbfft", "fbfft")
    out = out.mask(cudnn.str.contains("r4"), "cudnn4").mask(cudnn == "r2", "cudnn2")
    return out.mask(cudnn.str.startswith("none"), "im2col")


def convolution_layer_time(
    frame: pd.DataFrame, framework: Framework, figures: DeviceFigures, parameters: ConvolutionParameters
) -> Array:
    """Seconds of forward, data gradient and filter gradient of convolution rows in one framework."""
    images = _extents(frame, "input_shape")[:, 0] if framework.image_by_image else np.ones(len(frame))
    dense = (text(frame, "layer_type") == "InnerProduct").to_numpy()
    calls, total = np.where(dense, 1.0, images), np.zeros(len(frame))
    for direction in Direction:
        costs = algorithm_costs(
            layer_shape(frame, direction, calls), device=figures, parameters=parameters,
            library=framework.library, algorithms=framework.algorithms,
        )  # fmt: skip
        total += calls * fastest_time(costs)
    return total


def layer_shape(frame: pd.DataFrame, direction: Direction, calls: Array | float = 1.0) -> ConvolutionShape:
    """Convolution shapes of the rows, the batch divided among ``calls``; an inner product is a 1 x 1 one over the
    batch."""
    n, c, h, w = _extents(frame, "input_shape").T
    k = _extents(frame, "output_shape")[:, 1]
    kernel = text(frame, "kernel", "1x1").str.extract(r"(\d+)\s*x\s*(\d+)").fillna("1").to_numpy(dtype=np.float64)
    pad, stride, groups = (
        number(frame, name, default) for name, default in (("pad", 0.0), ("stride", 1.0), ("groups", 1.0))
    )
    dense = (text(frame, "layer_type") == "InnerProduct").to_numpy()
    return convolution_shape(
        batch=np.where(dense, 1.0, n / calls), channels=np.where(dense, c * h * w, c),
        height=np.where(dense, n, h), width=np.where(dense, 1.0, w), filters=k,
        kernel_h=np.where(dense, 1.0, kernel[:, 0]), kernel_w=np.where(dense, 1.0, kernel[:, 1]),
        pad_h=np.where(dense, 0.0, pad), pad_w=np.where(dense, 0.0, pad), stride_h=stride, stride_w=stride,
        groups=groups, direction=direction,
    )  # fmt: skip


def _extents(frame: pd.DataFrame, column: str) -> Array:
    """N, C, H, W of a shape column such as 128x3x224x224; H = W = 1 where they are absent, nan where it is no shape."""
    sizes = text(frame, column).str.extract(r"^(\d+)x(\d+)(?:x(\d+)x(\d+))?$")
    return np.asarray(sizes.apply(pd.to_numeric).fillna({2: 1.0, 3: 1.0}), dtype=np.float64)


def _moved(frame: pd.DataFrame) -> tuple[Array, Array]:
    """Elements that forward and backward of a layer without products read and write.

    ReLU: input to output; input and output gradient to input gradient. Concat: a copy each way. Pooling forward reads
    each row of a window anew (kernel / stride) and writes output and the winner's place; backward looks up gradient
    and place of every window, (kernel / stride)^2, that an input element lies in.
    """
    inputs, outputs = (np.prod(_extents(frame, column), axis=1) for column in ("input_shape", "output_shape"))
    kernel = text(frame, "kernel", "1x1").str.extract(r"(\d+)\s*x")[0].fillna("1").to_numpy(dtype=np.float64)
    overlap = kernel / number(frame, "stride", 1.0)
    kind = text(frame, "layer_type").to_numpy()
    kinds = [kind == name for name in STREAMED]
    forward = np.select(kinds, [inputs + outputs, overlap * inputs + 2.0 * outputs, 2.0 * outputs], 0.0)
    backward = np.select(kinds, [inputs + 2.0 * outputs, (1.0 + 2.0 * overlap**2) * inputs, 2.0 * outputs], 0.0)
    return forward, backward


KINDS.register("cnn_layers")(CnnLayersTable())
