"""Tables of measured convolutions (NCHW extents, filters, pads, strides, direction) and of layers of CNNs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from paleo.pricing.convolution import (
    CURRENT_CUDNN_RELEASE,
    FIRST_CHOSEN_RELEASE,
    NON_CUDNN_RELEASE,
    ConvolutionDirection,
    ConvolutionParameters,
    ConvolutionShape,
    convolution_costs,
    convolution_shape,
    fastest_convolution_time,
)
from paleo.pricing.kernels import DeviceDatasheet, device_datasheet
from paleo.pricing.power import INT8_PRODUCTS_PER_FP32
from paleo.specs.device import find_device
from paleo.tables.base import column_set, parse_column_names
from paleo.tables.cells import Array, mapped_column, number_column, number_columns, text_column, word_mask
from paleo.tables.kernels import (
    KERNEL_TABLES,
    KernelTable,
    first_reasons,
    map_device_dtype_and_arithmetic_unit,
    timing_methods,
    unit_family,
    unsupported_reason,
)
from paleo.units import MILLISECOND

ELEMENT_BYTES: Mapping[str, float] = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0}
#: The algorithms that libraries have for integers: transforms would leave their range.
_INTEGER_ALGORITHMS = ("implicit",)
_CONVOLUTION_DIRECTION_OF_WORD: Mapping[str, ConvolutionDirection] = {
    "fwd": ConvolutionDirection.FORWARD,
    "bwd_data": ConvolutionDirection.DATA,
    "bwd_filter": ConvolutionDirection.FILTER,
}
#: How a source times its rows; others are taken to launch back to back.
_TIMING_METHOD_OF_SOURCE: Mapping[str, str] = {"neusight": "eager", "deepbench": "back-to-back"}
_SHAPE_FIELDS = ("batch", "channels", "height", "width", "filters", "kernel_h", "kernel_w")
_SIZE_COLUMNS = ("n", "c", "h", "w", "k", "r", "s", "stride_h", "stride_w")
#: Energy per FLOP [pJ], by which power throttles: about TDP over the fp32 peak of cards that keep their clock.
_PICOJOULES_PER_FLOP: Mapping[str, float] = {
    "Kepler": 60.0, "Maxwell": 37.0, "Pascal": 15.0, "Volta": 17.0, "Turing": 17.0, "Ampere": 13.0,
    "Ada Lovelace": 5.0, "Hopper": 9.0, "Blackwell": 7.0, "Blackwell Ultra": 7.0,
}  # fmt: skip
STRIDED_GRADIENT_UNSUPPORTED_REASON = (
    "fp16 data gradient with stride on ordinary cores: the library falls back to a generic kernel, not modelled"
)


class ConvolutionTable(KernelTable[DeviceDatasheet]):
    """Table of convolution kernel calls, one timed call per row; the algorithm that cuDNN chooses is predicted."""

    name = "conv"
    identifying_columns = frozenset(parse_column_names("source device dtype n c h w k r s direction time_us"))
    optional_columns = "compute library pad_h pad_w stride_h stride_w groups algo timing"
    configuration_columns = ("n", "c", "h", "w", "k", "r", "s", "stride_h")
    size_columns = ("n", "c", "h", "w", "k", "r", "s")
    parameters_by_family: ClassVar[Mapping[str, type[Any]]] = {
        f"conv.{unit}": ConvolutionParameters for unit in ("vector", "half", "tensor", "int8")
    }
    host_parameters = ("launch_time",)

    def unsupported_reasons(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Explain for each timed convolution why it cannot be modelled; '' if it can.

        Reasons are an unknown dtype or direction, a device without a peak for the dtype, and an empty output. A strided
        fp16 data gradient without tensor cores is not modelled either.
        """
        dtypes = frozenset(ELEMENT_BYTES)
        unsupported = map_device_dtype_and_arithmetic_unit(
            frame, self.arithmetic_unit(frame), lambda *columns: unsupported_reason(*columns, dtypes)
        )
        direction = text_column(frame, "direction")
        strided = number_column(frame, "stride_h", 1.0) * number_column(frame, "stride_w", 1.0) > 1
        half = self.kernel_family(frame) == "conv.half"
        small = [~(number_column(frame, name, 1.0) >= 1) for name in _SIZE_COLUMNS] + [
            number_column(frame, size) + 2 * number_column(frame, pad, 0.0) < number_column(frame, taps)
            for size, taps, pad in (("h", "r", "pad_h"), ("w", "s", "pad_w"))
        ]
        return first_reasons(
            frame.index,
            (unsupported != "", unsupported),
            (
                ~direction.isin(list(_CONVOLUTION_DIRECTION_OF_WORD)),
                f"direction is none of {', '.join(_CONVOLUTION_DIRECTION_OF_WORD)}",
            ),
            (half & strided & (direction == "bwd_data"), STRIDED_GRADIENT_UNSUPPORTED_REASON),
            (np.any(small, axis=0), "an extent is below 1, or the filter exceeds the padded image"),
        )

    def timing_method(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Return how each convolution was timed, ``eager`` or ``back-to-back``, by the source of the measurement."""
        return timing_methods(frame, text_column(frame, "source").map(_TIMING_METHOD_OF_SOURCE).fillna("back-to-back"))

    def kernel_family(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Return the family of each timed convolution: the key of its timing formula and calibrated parameters.

        It is ``conv.int8`` for integers, ``conv.tensor`` on tensor cores, ``conv.half`` for fp16 without them, else
        ``conv.vector``.
        """
        return map_device_dtype_and_arithmetic_unit(frame, self.arithmetic_unit(frame), _family)

    def start_values(self, family: str, figures: DeviceDatasheet) -> Sequence[ConvolutionParameters]:
        """Return start values for a fit of convolution parameters: defaults, with the device's energy per FLOP."""
        default = ConvolutionParameters()
        energy = _PICOJOULES_PER_FLOP.get(figures.architecture, default.energy_per_flop)
        lanes = INT8_PRODUCTS_PER_FP32 if family == "conv.int8" else 1.0
        return (dataclasses.replace(default, energy_per_flop=energy / lanes),)

    def flops_and_bytes(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """Count (FLOP, bytes) of timed convolutions: FLOP of direct convolution, and each tensor moved once."""
        shape = _convolution_shapes_of_rows(frame)
        return shape.flops, shape.moved_elements * element_bytes(frame)

    def predict_times(self, frame: pd.DataFrame, figures: DeviceDatasheet, parameters: ConvolutionParameters) -> Array:
        """Predict the time [s] of convolutions that share device, dtype, family and timing method.

        The fastest algorithm that the row's cuDNN version offers is taken.
        """
        integers = word_mask(frame, "dtype", "int8").all()
        costs = convolution_costs(
            _convolution_shapes_of_rows(frame), device=figures, parameters=parameters,
            element_bytes=element_bytes(frame), library=cudnn_versions(text_column(frame, "library")),
            algorithms=_INTEGER_ALGORITHMS if integers else tuple(FIRST_CHOSEN_RELEASE),
        )  # fmt: skip
        return fastest_convolution_time(costs)


def _convolution_shapes_of_rows(frame: pd.DataFrame) -> ConvolutionShape:
    """Read the convolution shapes of all table rows; strides, dilation and groups default to 1, pads to 0."""
    sizes = dict(zip(_SHAPE_FIELDS, number_columns(frame, ("n", "c", "h", "w", "k", "r", "s")), strict=True))
    steps = {
        name: number_column(frame, name, 0.0 if name.startswith("pad") else 1.0)
        for name in ("pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w", "groups")
    }
    direction = text_column(frame, "direction").map(_CONVOLUTION_DIRECTION_OF_WORD).fillna(ConvolutionDirection.FORWARD)
    return convolution_shape(**sizes, **steps, direction=np.asarray(direction, np.int64))


def element_bytes(frame: pd.DataFrame) -> Array:
    """Return the bytes of one stored tensor element in each table row, shape (rows,); nan for unknown formats."""
    return mapped_column(frame, "dtype", ELEMENT_BYTES)


def cudnn_versions(library: pd.Series[str]) -> Array:
    """Parse the cuDNN version (major.minor) from the library names of measured rows; a recent version if none is named.

    >>> cudnn_versions(pd.Series(["cuDNN 7.6.2.24 (CUDA 10.1.243)", "PyTorch 2.1.0+cu121 (cuDNN 8.9.2)", ""])).tolist()
    [7.6, 8.9, 9.0]
    """
    release = library.str.extract(r"(?i)cudnn[ _-]*v?(\d+)(?:\.(\d+))?")
    major, minor = (pd.to_numeric(release[column]).to_numpy(dtype=np.float64) for column in (0, 1))
    version = major + np.minimum(np.nan_to_num(minor), 9.0) / 10.0
    return np.where(np.isnan(major), CURRENT_CUDNN_RELEASE, version)


@cache
def _family(device: str, dtype: str, compute: str) -> str:
    if dtype == "int8":
        return "conv.int8"
    family = unit_family("conv", device, dtype, compute)
    return "conv.vector" if family == "conv.half" and compute == "fp32" else family


KERNEL_TABLES.register("conv")(ConvolutionTable())


# Networks timed layer by layer: forward plus backward of one layer a row, in several frameworks of 2015 and 2016

_PRODUCT_LAYER_TYPES = ("Convolution", "conv2d", "InnerProduct")
#: Layers without products: one kernel each way that moves bytes.
_MEMORY_BOUND_LAYER_TYPES = ("ReLU", "Pooling", "Concat")
#: Share of memory bandwidth of a kernel that streams, by memory kind: what long elementwise kernels reach.
_STREAM_BANDWIDTH_FRACTION: Mapping[str, float] = {"GDDR": 0.76, "HBM": 0.88}


@dataclass(frozen=True, slots=True)
class ConvolutionLibrary:
    """Convolution algorithms of a deep-learning framework, and its cuDNN version.

    ``image_by_image`` is True if the framework calls a kernel for each image of a batch.
    """

    algorithms: Collection[str]
    cudnn_version: float = NON_CUDNN_RELEASE
    image_by_image: bool = False


_IM2COL = ConvolutionLibrary(("explicit",), image_by_image=True)
_LIBRARY_OF_FRAMEWORK: Mapping[str, ConvolutionLibrary] = {
    "im2col": _IM2COL,
    "cudnn2": ConvolutionLibrary(("implicit", "explicit"), 2.0),
    "cudnn4": ConvolutionLibrary(("implicit", "explicit", "fft"), 4.0),
    "fbfft": ConvolutionLibrary(("fft",)),
    "cuda-convnet": ConvolutionLibrary(("implicit",)),
}


class CnnLayersTable(KernelTable[DeviceDatasheet]):
    """Table of layers of convolutional networks, one timed layer per row.

    The measured value is forward plus backward time.
    """

    name = "cnn_layers"
    identifying_columns = column_set("source device layer_type input_shape output_shape kernel forward_ms backward_ms")
    optional_columns = "compute cudnn dtype framework groups pad stride software"
    configuration_columns = ("input_shape", "output_shape", "kernel", "layer_type")
    parameters_by_family: ClassVar[Mapping[str, type[Any]]] = {"conv.vector": ConvolutionParameters}
    host_parameters = ("launch_time",)
    used_for_fitting = False
    measured_column = "forward_ms + backward_ms"
    measured_unit_in_si = MILLISECOND

    def measured_values(self, frame: pd.DataFrame) -> Array:
        """Return the measured forward plus backward time of each network layer [s]; nan unless above zero."""
        total = number_column(frame, "forward_ms", 0.0) + number_column(frame, "backward_ms", 0.0)
        return np.where(total > 0, total, np.nan) * MILLISECOND

    def load_datasheet(self, subject: str, dtype: str, compute: str) -> DeviceDatasheet:
        """Load the datasheet values of a device for fp32, the format of all rows of this table."""
        return device_datasheet(find_device(subject), "fp32")

    def unsupported_reasons(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Explain for each timed network layer why it cannot be modelled; '' if it can.

        Reasons are layers without work, unknown layer types, shapes or frameworks, and other formats than fp32.
        """
        kind, framework = text_column(frame, "layer_type"), text_column(frame, "framework")
        unshaped = np.isnan(_extents(frame, "input_shape")[:, 0] + _extents(frame, "output_shape")[:, 0])
        unknown = kind.isin(_PRODUCT_LAYER_TYPES) & (convolution_library_names(frame) == "")
        return first_reasons(
            frame.index,
            (
                ~kind.isin([*_PRODUCT_LAYER_TYPES, *_MEMORY_BOUND_LAYER_TYPES]),
                "layer type " + kind.where(kind != "", "(empty)") + " is not modelled",
            ),
            (unshaped, "a shape is not N x C [x H x W]"),
            (unknown, "kernels of framework " + framework + " are not modelled"),
            (~(self.measured_values(frame) > 0), "forward and backward time are not both there"),
            (text_column(frame, "dtype", "fp32") != "fp32", "only fp32 is modelled"),
        )

    def timing_method(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Return ``back-to-back`` for all timed network layers: each was timed in a loop of one layer."""
        return pd.Series("back-to-back", index=frame.index, dtype=object)

    def kernel_family(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Return ``conv.vector`` (key of calibrated parameters) for all network layers, memory-bound ones too."""
        return pd.Series("conv.vector", index=frame.index, dtype=object)

    def flops_and_bytes(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """Count (FLOP, bytes) of the forward pass and both gradients of timed network layers.

        FLOP are those of direct convolution; each pass moves each of its tensors once.
        """
        products = word_mask(frame, "layer_type", *_PRODUCT_LAYER_TYPES)
        shape = layer_convolution_shapes(frame, ConvolutionDirection.FORWARD)
        forward, backward = _moved(frame)
        moved = np.where(products, 3.0 * shape.moved_elements, forward + backward)
        return np.where(products, 3.0 * shape.flops, 0.0), moved * element_bytes(frame)

    def predict_times(self, frame: pd.DataFrame, figures: DeviceDatasheet, parameters: ConvolutionParameters) -> Array:
        """Predict the forward plus backward time [s] of network layers on one device."""
        forward, backward = _moved(frame)
        share = _STREAM_BANDWIDTH_FRACTION["GDDR" if figures.memory_kind.startswith("GDDR") else "HBM"]
        seconds = (forward + backward) * element_bytes(frame) / (share * figures.memory_bandwidth)
        products = word_mask(frame, "layer_type", *_PRODUCT_LAYER_TYPES)
        library = convolution_library_names(frame).to_numpy()
        for name, framework in _LIBRARY_OF_FRAMEWORK.items():
            chosen = products & (library == name)
            if chosen.any():
                seconds[chosen] = _convolution_layer_time(frame[chosen], framework, figures, parameters)
        return seconds


def convolution_library_names(frame: pd.DataFrame) -> pd.Series[str]:
    """Identify the convolution library of each timed layer, a key of `_LIBRARY_OF_FRAMEWORK`; '' if none matches.

    The columns ``framework`` and ``cudnn`` decide.
    """
    framework, cudnn = text_column(frame, "framework").str.lower(), text_column(frame, "cudnn").str.lower()
    out = pd.Series("", index=frame.index, dtype=object)
    out = out.mask(framework.isin(["caffe", "torch-7", "theano"]) | framework.str.contains("convolutionmm"), "im2col")
    out = out.mask(framework.str.startswith("cuda-convnet"), "cuda-convnet").mask(framework == "fbfft", "fbfft")
    out = out.mask(cudnn.str.contains("r4"), "cudnn4").mask(cudnn == "r2", "cudnn2")
    return out.mask(cudnn.str.startswith("none"), "im2col")


def _convolution_layer_time(
    frame: pd.DataFrame, framework: ConvolutionLibrary, figures: DeviceDatasheet, parameters: ConvolutionParameters
) -> Array:
    """Predict the time [s] of forward, data gradient and filter gradient of convolutional layers in one framework.

    Parameters
    ----------
    frame : DataFrame
        Rows of convolutional and fully connected layers.
    framework : ConvolutionLibrary
        Algorithms and library of the framework.
    figures : DeviceDatasheet
        Datasheet values of the rows' device.
    parameters : ConvolutionParameters
        Calibrated parameters.

    Returns
    -------
    ndarray, shape (rows,)
        Times [s].
    """
    images = _extents(frame, "input_shape")[:, 0] if framework.image_by_image else np.ones(len(frame))
    dense = word_mask(frame, "layer_type", "InnerProduct")
    calls, total = np.where(dense, 1.0, images), np.zeros(len(frame))
    for direction in ConvolutionDirection:
        costs = convolution_costs(
            layer_convolution_shapes(frame, direction, calls), device=figures, parameters=parameters,
            library=framework.cudnn_version, algorithms=framework.algorithms,
        )  # fmt: skip
        total += calls * fastest_convolution_time(costs)
    return total


def layer_convolution_shapes(
    frame: pd.DataFrame, direction: ConvolutionDirection, calls: Array | float = 1.0
) -> ConvolutionShape:
    """Convert rows of network layers to convolution shapes, each with its batch divided by ``calls``.

    A fully connected layer is a 1 x 1 convolution over the batch.
    """
    n, c, h, w = _extents(frame, "input_shape").T
    k = _extents(frame, "output_shape")[:, 1]
    taps = text_column(frame, "kernel", "1x1").str.extract(r"(\d+)\s*x\s*(\d+)").fillna("1")
    kernel = taps.to_numpy(dtype=np.float64)
    pad, stride = number_column(frame, "pad", 0.0), number_column(frame, "stride", 1.0)
    dense = word_mask(frame, "layer_type", "InnerProduct")
    return convolution_shape(
        batch=np.where(dense, 1.0, n / calls), channels=np.where(dense, c * h * w, c),
        height=np.where(dense, n, h), width=np.where(dense, 1.0, w), filters=k,
        kernel_h=np.where(dense, 1.0, kernel[:, 0]), kernel_w=np.where(dense, 1.0, kernel[:, 1]),
        pad_h=np.where(dense, 0.0, pad), pad_w=np.where(dense, 0.0, pad), stride_h=stride, stride_w=stride,
        groups=number_column(frame, "groups", 1.0), direction=direction,
    )  # fmt: skip


def _extents(frame: pd.DataFrame, column: str) -> Array:
    """Read (N, C, H, W) from texts such as 128x3x224x224, shape (rows, 4).

    H = W = 1 where they are absent; nan where a text is no shape.
    """
    sizes = text_column(frame, column).str.extract(r"^(\d+)x(\d+)(?:x(\d+)x(\d+))?$")
    return np.asarray(sizes.apply(pd.to_numeric).fillna({2: 1.0, 3: 1.0}), dtype=np.float64)


def _moved(frame: pd.DataFrame) -> tuple[Array, Array]:
    """Count the elements that a memory-bound layer reads and writes: (forward, backward), shape (rows,) each.

    ReLU reads input and writes output; backward reads input and output gradient. Concat copies each way. Pooling
    forward reads each row of a window anew (kernel / stride), and writes the output and the position of the maximum.
    Backward looks up gradient and position in each of the (kernel / stride)^2 windows that contain an input element.
    """
    inputs, outputs = (np.prod(_extents(frame, column), axis=1) for column in ("input_shape", "output_shape"))
    kernel = text_column(frame, "kernel", "1x1").str.extract(r"(\d+)\s*x")[0].fillna("1").to_numpy(dtype=np.float64)
    overlap = kernel / number_column(frame, "stride", 1.0)
    kind = text_column(frame, "layer_type").to_numpy()
    kinds = [kind == name for name in _MEMORY_BOUND_LAYER_TYPES]
    forward = np.select(kinds, [inputs + outputs, overlap * inputs + 2.0 * outputs, 2.0 * outputs], 0.0)
    backward = np.select(kinds, [inputs + 2.0 * outputs, (1.0 + 2.0 * overlap**2) * inputs, 2.0 * outputs], 0.0)
    return forward, backward


KERNEL_TABLES.register("cnn_layers")(CnnLayersTable())
