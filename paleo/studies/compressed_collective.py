"""Compressed sums beside the dense one: one gradient over one group of a system, method by method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paleo.compression.base import Message, SummedGradient, break_even_rate, compression, wire_bytes
from paleo.compression.sparse import Sparse
from paleo.errors import SpecError
from paleo.operations.tensor import precision
from paleo.specs.run import Run
from paleo.step.backend import backend_of
from paleo.step.exchange import scaled

if TYPE_CHECKING:
    from paleo.compression.base import Compression
    from paleo.step.backend import Backend
    from paleo.studies.collective import CollectiveStudy

#: Methods that need more of a network than the size of its gradient.
OF_NETWORKS = {
    "factors": "the layers and the batch of a network",
    "zeropp": "a network with zero=3",
}


@dataclass(frozen=True, slots=True)
class CompressedRow:
    """One method by one scheme: seconds on the wire and of coding, bytes that a rank sends, and the rate [byte/s] below
    which it pays where nothing overlaps."""

    method: str
    scheme: str
    wire: float
    coding: float
    sent: float
    break_even: float

    @property
    def time(self) -> float:
        """Seconds in all."""
        return self.wire + self.coding


@dataclass(frozen=True, slots=True)
class CompressedCollective:
    """Methods beside the dense sum of a `CollectiveStudy`, fastest first. ``sent``: bytes that a rank sends densely;
    ``rate``: at which it sends them [byte/s]; ``tensors``: in how many square matrices the gradient is."""

    dense: CollectiveStudy
    rows: tuple[CompressedRow, ...]
    sent: float
    tensors: int

    @property
    def time(self) -> float:
        """Seconds of the dense sum."""
        return self.dense.best.time

    @property
    def rate(self) -> float:
        """Bytes that a rank sends a second in the collective."""
        return self.sent / self.time

    def pays(self, row: CompressedRow) -> bool:
        """Whether coding and compressed messages together take less time."""
        return row.time < self.time


def compressed(
    study: CollectiveStudy, methods: Sequence[str], *, dtype: str = "bf16", tensors: int = 1, calibration: str = "auto"
) -> CompressedCollective:
    """What compressing makes of an all-reduce; SpecError for other operations and for methods of whole networks."""
    if study.operation != "all_reduce":
        raise SpecError(f"--compress: gradients are summed by all_reduce, not by {study.operation}")
    if tensors < 1:
        raise SpecError(f"--tensors {tensors}: expected 1 or more")
    arithmetic = dtype if dtype in study.system.device.peak else "fp32"  # of coding, on devices without the format
    backend = backend_of(study.system, Run(dtype=arithmetic, calibration=calibration), arithmetic)
    whole = _gradient(study, precision(dtype).gradient, tensors)
    sent = float(wire_bytes((Message("all_reduce", whole.bytes),), whole))
    rows = [row for name in methods for row in _rows(study, backend, name, whole, sent)]
    return CompressedCollective(study, tuple(sorted(rows, key=lambda row: row.time)), sent, tensors)


def _gradient(study: CollectiveStudy, width: float, tensors: int) -> SummedGradient:
    """A gradient of the study's payload in so many square matrices."""
    elements = study.payload_bytes / width
    sides = 2.0 * tensors * (elements / tensors) ** 0.5
    return SummedGradient(
        elements=elements, tensors=float(tensors), ranks=float(study.ranks), width=width, matrices=float(tensors),
        ranks_per_node=float(min(study.ranks, study.system.devices_per_node)), matrix_elements=elements,
        matrix_sides=sides,
    )  # fmt: skip


def _rows(
    study: CollectiveStudy, backend: Backend, name: str, whole: SummedGradient, sent: float
) -> list[CompressedRow]:
    """A row for each scheme of a method."""
    plain = name.partition(":")[0].strip()
    if plain in OF_NETWORKS:
        raise SpecError(f"--compress {name}: needs {OF_NETWORKS[plain]}; use paleo estimate")
    method = compression(name)
    coding = _coding(backend, method, whole)
    schemes = method.schemes(whole) if isinstance(method, Sparse) else {"": method.messages(whole)}
    rows = []
    for scheme, messages in schemes.items():
        wire = sum(_seconds(study, message) for message in messages)
        less = float(wire_bytes(messages, whole))
        rows.append(CompressedRow(name, scheme, wire, coding, less, float(break_even_rate(sent, less, coding))))
    return rows


def _coding(backend: Backend, method: Compression, whole: SummedGradient) -> float:
    """Seconds of coding and decoding a gradient on the system's device."""
    elements = float(whole.elements)
    single = replace(scaled(whole, 1.0 / elements), elements=1.0)
    return float(replace(backend, compression=method).coded(np.array([elements]), single)[0])


def _seconds(study: CollectiveStudy, message: Message) -> float:
    """Seconds of one collective over the study's group."""
    stride, ranks = np.array([1]), np.array([study.ranks])
    payload = np.asarray(message.payload, dtype=np.float64).reshape(1)
    return float(study.fabric.times(message.operation, stride, ranks, payload)[0])
