"""Measured recurrent layers: cell, hidden units, batch and steps, without the input products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from paleo.errors import SpecError
from paleo.pricing.gemm import GemmParameters
from paleo.pricing.kernels import DeviceFigures, unit_of
from paleo.pricing.rnn import GATES, RnnDirection, RnnParameters, rnn_time
from paleo.pricing.store import lookup
from paleo.specs.device import find_device
from paleo.tables.cells import Array, number, text
from paleo.tables.kernels import KINDS, TableKind, by_arithmetic, compute_unit_of, timing_keys, unpriced_reason
from paleo.tables.kinds._conv import ELEMENT_BYTES, element_bytes, library_version

DIRECTIONS: Mapping[str, RnnDirection] = {
    "fwd": RnnDirection.FORWARD,
    "bwd_data": RnnDirection.DATA,
    "bwd_filter": RnnDirection.FILTER,
    "bwd": RnnDirection.BACKWARD,
}


class RnnTable(TableKind[DeviceFigures]):
    """One layer over ``timesteps`` steps a row."""

    name: ClassVar[str] = "rnn"
    header: ClassVar[frozenset[str]] = frozenset(
        {"source", "device", "dtype", "cell", "hidden", "batch", "timesteps", "direction", "time_us"}
    )
    reads: ClassVar[str] = "compute library timing"
    configuration: ClassVar[tuple[str, ...]] = ("cell", "hidden", "batch", "timesteps", "direction")
    sizes: ClassVar[tuple[str, ...]] = ("hidden", "batch", "timesteps")
    families: ClassVar[Mapping[str, type[Any]]] = {
        "rnn.vector": RnnParameters,
        "rnn.half": RnnParameters,
        "rnn.tensor": RnnParameters,
    }
    host_parameters: ClassVar[tuple[str, ...]] = ("launch", "step", "ramp")

    def unsupported(self, frame: pd.DataFrame) -> pd.Series[str]:
        """An unknown dtype, cell or direction, no peak on the device, or an extent below 1."""
        dtypes = frozenset(ELEMENT_BYTES)
        out = by_arithmetic(frame, self.compute(frame), lambda *columns: unpriced_reason(*columns, dtypes))
        for column, known in (("cell", list(GATES)), ("direction", list(DIRECTIONS))):
            out = out.mask((out == "") & ~text(frame, column).isin(known), f"{column} is none of " + ", ".join(known))
        small = np.any([~(number(frame, name) >= 1) for name in ("hidden", "batch", "timesteps")], axis=0)
        return out.mask((out == "") & small, "an extent is below 1")

    def stack(self, frame: pd.DataFrame) -> pd.Series[str]:
        """All known rows launch back to back."""
        return timing_keys(frame, pd.Series("back-to-back", index=frame.index, dtype=object))

    def family(self, frame: pd.DataFrame) -> pd.Series[str]:
        """rnn.tensor on tensor cores; rnn.half for half-precision storage without them; else rnn.vector."""
        return by_arithmetic(frame, self.compute(frame), _family)

    def compute(self, frame: pd.DataFrame) -> pd.Series[str]:
        """As the row says; DeepBench fp16 that says nothing is half-precision arithmetic on ordinary cores."""
        return compute_unit_of(frame)

    def starts(self, family: str, figures: DeviceFigures) -> Sequence[RnnParameters]:
        """The defaults, and a kernel that hides little of its latency."""
        return (RnnParameters(), RnnParameters(depth_cycles=150.0))

    def work(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """FLOP of the products; bytes of the weights once a step (once for the filter gradient), and of the states."""
        hidden, batch, steps = (number(frame, name) for name in ("hidden", "batch", "timesteps"))
        gate_count, element, direction = _gates(frame), element_bytes(frame), _ways(frame)
        products = gate_count * hidden**2
        gradients = np.where(direction == RnnDirection.BACKWARD, 2.0, 1.0)
        reads = np.where(direction == RnnDirection.FILTER, 1.0, steps)
        states = (gate_count + 1.0) * hidden * batch * steps
        return 2.0 * products * batch * steps * gradients, (products * reads + states) * element

    def time(self, frame: pd.DataFrame, figures: DeviceFigures, parameters: RnnParameters) -> Array:
        """Seconds of rows of one device, dtype, family and stack, by the standard (not persistent) kernels."""
        hidden, batch, steps = (number(frame, name) for name in ("hidden", "batch", "timesteps"))
        return rnn_time(
            gate_count=_gates(frame), hidden=hidden, batch=batch, timesteps=steps, direction=_ways(frame),
            element_bytes=element_bytes(frame), library=library_version(text(frame, "library")),
            device=figures, parameters=parameters, products=_products(figures),
        )  # fmt: skip


def _products(figures: DeviceFigures) -> GemmParameters:
    """The device's calibration of plain products, measured or inherited."""
    return lookup(
        GemmParameters,
        subject=figures.name,
        architecture=figures.architecture,
        memory_kind=figures.memory_kind,
        family="gemm.tensor" if figures.tensor_cores else "gemm.simt",
    ).parameters


def _gates(frame: pd.DataFrame) -> Array:
    return text(frame, "cell").map(lambda cell: float(GATES.get(cell, np.nan))).to_numpy(dtype=np.float64)


def _ways(frame: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.int64]]:
    return text(frame, "direction").map(lambda word: int(DIRECTIONS.get(word, 0))).to_numpy(dtype=np.int64)


@cache
def _family(device: str, dtype: str, compute: str) -> str:
    try:
        unit = unit_of(find_device(device), dtype, compute)
    except SpecError:
        return "rnn.vector"
    if unit == "tensor":
        return "rnn.tensor"
    return "rnn.half" if dtype in ("fp16", "bf16") else "rnn.vector"


KINDS.register("rnn")(RnnTable())
