"""Measured convolutions: NCHW extents, filters, pads, strides, and one of three directions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from paleo.errors import SpecError
from paleo.pricing.convolution import (
    AVAILABLE_FROM,
    PRESENT,
    ConvolutionParameters,
    ConvolutionShape,
    Direction,
    algorithm_costs,
    convolution_shape,
    fastest_time,
)
from paleo.pricing.kernels import DeviceFigures, unit_of
from paleo.pricing.power import INTEGER_LANES
from paleo.specs.device import find_device
from paleo.tables.cells import Array, number, text
from paleo.tables.kernels import KINDS, TableKind, by_arithmetic, compute_unit_of, timing_keys, unpriced_reason

ELEMENT_BYTES: Mapping[str, float] = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0}
#: The algorithms that libraries have for integers: transforms would leave their range.
INTEGER_ALGORITHMS = ("implicit",)
DIRECTIONS: Mapping[str, Direction] = {
    "fwd": Direction.FORWARD,
    "bwd_data": Direction.DATA,
    "bwd_filter": Direction.FILTER,
}
#: How a source times its rows; others are taken to launch back to back.
STACKS: Mapping[str, str] = {"neusight": "eager", "deepbench": "back-to-back"}
SIZES = ("n", "c", "h", "w", "k", "r", "s", "stride_h", "stride_w")
#: Energy per FLOP [pJ], by which power throttles: about TDP over the fp32 peak of cards that keep their clock.
ENERGY: Mapping[str, float] = {
    "Kepler": 60.0, "Maxwell": 37.0, "Pascal": 15.0, "Volta": 17.0, "Turing": 17.0, "Ampere": 13.0,
    "Ada Lovelace": 5.0, "Hopper": 9.0, "Blackwell": 7.0, "Blackwell Ultra": 7.0,
}  # fmt: skip
SCATTER = "fp16 data gradient with stride on ordinary cores: the library falls back to a generic kernel, not modelled"


class ConvolutionTable(TableKind[DeviceFigures]):
    """One convolution kernel call a row; the library's algorithm is not read but predicted."""

    name: ClassVar[str] = "conv"
    header: ClassVar[frozenset[str]] = frozenset(
        {"source", "device", "dtype", "n", "c", "h", "w", "k", "r", "s", "direction", "time_us"}
    )
    reads: ClassVar[str] = "compute library pad_h pad_w stride_h stride_w groups algo timing"
    configuration: ClassVar[tuple[str, ...]] = ("n", "c", "h", "w", "k", "r", "s", "stride_h")
    sizes: ClassVar[tuple[str, ...]] = ("n", "c", "h", "w", "k", "r", "s")
    families: ClassVar[Mapping[str, type[Any]]] = {
        "conv.vector": ConvolutionParameters,
        "conv.half": ConvolutionParameters,
        "conv.tensor": ConvolutionParameters,
        "conv.int8": ConvolutionParameters,
    }
    host_parameters: ClassVar[tuple[str, ...]] = ("launch",)

    def unsupported(self, frame: pd.DataFrame) -> pd.Series[str]:
        """An unknown dtype or direction, no peak on the device, an empty output, or a fallback kernel."""
        dtypes = frozenset(ELEMENT_BYTES)
        out = by_arithmetic(frame, self.compute(frame), lambda *columns: unpriced_reason(*columns, dtypes))
        direction = text(frame, "direction")
        out = out.mask((out == "") & ~direction.isin(list(DIRECTIONS)), "direction is none of " + ", ".join(DIRECTIONS))
        strided = number(frame, "stride_h", 1.0) * number(frame, "stride_w", 1.0) > 1
        half = self.family(frame) == "conv.half"
        out = out.mask((out == "") & half & strided & (direction == "bwd_data"), SCATTER)
        extent = {"h": ("r", "pad_h"), "w": ("s", "pad_w")}
        gaps = [
            number(frame, size) + 2 * number(frame, pad, 0.0) < number(frame, taps)
            for size, (taps, pad) in extent.items()
        ]
        small = np.any([~(number(frame, name, 1.0) >= 1) for name in SIZES], axis=0) | np.asarray(gaps[0] | gaps[1])
        return out.mask((out == "") & small, "an extent is below 1, or the filter exceeds the padded image")

    def stack(self, frame: pd.DataFrame) -> pd.Series[str]:
        """eager or back-to-back, by source."""
        return timing_keys(frame, text(frame, "source").map(lambda source: STACKS.get(source, "back-to-back")))

    def family(self, frame: pd.DataFrame) -> pd.Series[str]:
        """conv.int8 for integers; conv.tensor on tensor cores; conv.half for halves without; else conv.vector."""
        return by_arithmetic(frame, self.compute(frame), _family)

    def compute(self, frame: pd.DataFrame) -> pd.Series[str]:
        """As the row says; DeepBench fp16 that says nothing is half-precision arithmetic on ordinary cores."""
        return compute_unit_of(frame)

    def starts(self, family: str, figures: DeviceFigures) -> Sequence[ConvolutionParameters]:
        """The defaults, with the energy of the architecture."""
        default = ConvolutionParameters()
        energy = ENERGY.get(figures.architecture, default.energy_per_flop)
        energy = energy / INTEGER_LANES if family == "conv.int8" else energy
        return (dataclasses.replace(default, energy_per_flop=energy),)

    def work(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """FLOP of the direct method, and each tensor once."""
        shape = table_shape(frame)
        return shape.flops, shape.elements * element_bytes(frame)

    def time(self, frame: pd.DataFrame, figures: DeviceFigures, parameters: ConvolutionParameters) -> Array:
        """Seconds of rows of one device, dtype, family and stack, by the fastest algorithm that the library has."""
        costs = algorithm_costs(
            table_shape(frame), device=figures, parameters=parameters,
            element_bytes=element_bytes(frame), library=library_version(text(frame, "library")),
            algorithms=INTEGER_ALGORITHMS if (text(frame, "dtype") == "int8").all() else tuple(AVAILABLE_FROM),
        )  # fmt: skip
        return fastest_time(costs)


def table_shape(frame: pd.DataFrame) -> ConvolutionShape:
    """Shapes of the rows; strides, dilation and groups are 1 and pads 0 where the table has no such column."""
    columns = (
        "n",
        "c",
        "h",
        "w",
        "k",
        "r",
        "s",
        "pad_h",
        "pad_w",
        "stride_h",
        "stride_w",
        "dilation_h",
        "dilation_w",
        "groups",
    )
    names = ("batch", "channels", "height", "width", "filters", "kernel_h", "kernel_w", *columns[7:])
    fallback = {
        "pad_h": 0.0,
        "pad_w": 0.0,
        "stride_h": 1.0,
        "stride_w": 1.0,
        "dilation_h": 1.0,
        "dilation_w": 1.0,
        "groups": 1.0,
    }
    extents = {name: number(frame, column, fallback.get(column)) for name, column in zip(names, columns, strict=True)}
    direction = text(frame, "direction").map(lambda word: int(DIRECTIONS.get(word, Direction.FORWARD)))
    return convolution_shape(**extents, direction=direction.to_numpy(dtype=np.int64))


def element_bytes(frame: pd.DataFrame) -> Array:
    """Bytes of a stored element of each row."""
    return text(frame, "dtype").map(lambda dtype: ELEMENT_BYTES.get(dtype, np.nan)).to_numpy(dtype=np.float64)


def library_version(library: pd.Series[str]) -> Array:
    """The cuDNN version that a text names, as major.minor; a present one where it names none.

    >>> library_version(pd.Series(["cuDNN 7.6.2.24 (CUDA 10.1.243)", "PyTorch 2.1.0+cu121 (cuDNN 8.9.2)", ""])).tolist()
    [7.6, 8.9, 9.0]
    """
    release = library.str.extract(r"(?i)cudnn[ _-]*v?(\d+)(?:\.(\d+))?")
    major, minor = (pd.to_numeric(release[column]).to_numpy(dtype=np.float64) for column in (0, 1))
    version = major + np.minimum(np.nan_to_num(minor), 9.0) / 10.0
    return np.where(np.isnan(major), PRESENT, version)


@cache
def _family(device: str, dtype: str, compute: str) -> str:
    try:
        unit = unit_of(find_device(device), dtype, compute)
    except SpecError:
        return "conv.vector"
    if dtype == "int8":
        return "conv.int8"
    if unit == "tensor":
        return "conv.tensor"
    return "conv.half" if dtype in ("fp16", "bf16") and compute != "fp32" else "conv.vector"


KINDS.register("conv")(ConvolutionTable())
