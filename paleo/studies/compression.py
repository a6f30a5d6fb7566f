"""Whether compressing the gradients of a run pays, and below which rate of its links it would; and compressed sums
beside the dense one: one gradient over one group of a system, method by method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paleo.compression.base import Message, SummedGradient, break_even_rate, compression, wire_bytes
from paleo.compression.sparse import Sparse
from paleo.errors import PlanError, SpecError
from paleo.operations.tensor import precision
from paleo.parallel.placement import BATCH_AXES
from paleo.specs.run import Run
from paleo.step.backend import backend_of
from paleo.step.exchange import scaled
from paleo.studies.changed_system import changed

if TYPE_CHECKING:
    from paleo.compression.base import Compression
    from paleo.predict import Prediction
    from paleo.step.backend import Backend
    from paleo.studies.collective import CollectiveStudy


@dataclass(frozen=True, slots=True)
class CompressionStudy:
    """A compressed run beside the dense one. ``wire`` and ``dense_wire``: bytes that a rank sends for its gradients;
    ``coding``: seconds of coding and decoding; ``rate``: what the dense exchange reaches, bytes that a rank sends a
    second; ``break_even``: the rate below which compression pays where nothing overlaps [byte/s]."""

    prediction: Prediction
    dense: Prediction
    method: Compression
    wire: float
    dense_wire: float
    coding: float
    rate: float
    break_even: float

    @property
    def warm_up(self) -> float:
        """Share of all steps, the first ones, that go dense."""
        return float(getattr(self.method, "warm_up", 0.0))

    @property
    def mean_step(self) -> float:
        """Seconds of a step on average over the run: w dense and 1 − w compressed ones."""
        return self.warm_up * self.dense.step_time + (1.0 - self.warm_up) * self.prediction.step_time

    @property
    def pays(self) -> bool:
        """Whether the compressed step is the shorter one."""
        return self.prediction.step_time < self.dense.step_time


def studied(prediction: Prediction) -> CompressionStudy | None:
    """The study of a run that compresses its gradients, else None."""
    batch = prediction.steps.batch
    method = batch.backend.compression
    if method is None:
        return None
    dense = prediction.variant(compress=None)
    kinds = batch.assignment.kinds.stages
    elements = float(batch.layouts.elements(kinds, trained=True).max())
    gradient = scaled(batch.layouts.gradient(0, BATCH_AXES), elements)
    sent = float(wire_bytes(method.messages(gradient), gradient))
    plain = float(wire_bytes((Message("all_reduce", gradient.bytes),), gradient))
    coding = float(batch.layouts.coding(kinds).max())
    before = dense.steps.batch
    exchange, _ = before.layouts.exchange(before.assignment, prediction.plan.parallel.zero, chunks=False)
    seconds = float(exchange.sum(axis=1).max())
    rate = plain / seconds if seconds > 0 else np.inf
    return CompressionStudy(
        prediction,
        dense,
        method=method,
        wire=sent,
        dense_wire=plain,
        coding=coding,
        rate=rate,
        break_even=float(break_even_rate(plain, sent, coding)),
    )


#: Rates over that of the system at which steps are compared.
FACTORS = (1 / 32, 1 / 8, 1 / 2, 1.0, 2.0, 8.0, 32.0)


@dataclass(frozen=True, slots=True)
class BandwidthCurve:
    """Steps of a compressed run and of the dense one over ``rates`` [byte/s] of a node's links to others; ``stated``:
    that of the system; ``crossing``: where they are equally long, None where they never are."""

    rates: tuple[float, ...]
    compressed: tuple[float, ...]
    dense: tuple[float, ...]
    stated: float
    crossing: float | None


def against_bandwidth(prediction: Prediction, factors: Sequence[float] = FACTORS) -> BandwidthCurve:
    """The run on systems whose links between nodes (inside the node, for one node) are faster by each of some
    factors."""
    level = len(prediction.system.levels) - 1
    if level < 0 or prediction.plan.gpus == 1:
        raise PlanError(f"{prediction.system.name} with {prediction.plan.gpus} GPUs: no links whose rate could change")
    stated = prediction.system.levels[level].unit_bandwidth
    steps: dict[str | None, list[float]] = {prediction.run.compress: [], None: []}
    for factor in factors:
        system = changed(prediction.system, f"levels[{level}].link.bandwidth", f"x{factor:.6f}")
        for method, seconds in steps.items():
            seconds.append(prediction.variant(system, compress=method).step_time)
    rates = tuple(stated * factor for factor in factors)
    coded, dense = (tuple(seconds) for seconds in steps.values())
    return BandwidthCurve(rates, coded, dense, stated, _crossing(rates, coded, dense))


def _crossing(rates: Sequence[float], coded: Sequence[float], dense: Sequence[float]) -> float | None:
    """The first rate at which compressing no longer pays, between two of ``rates`` by its logarithm."""
    gains = np.log(np.asarray(dense)) - np.log(np.asarray(coded))
    for number in np.flatnonzero((gains[:-1] > 0) & (gains[1:] <= 0)).tolist():
        share = gains[number] / (gains[number] - gains[number + 1])
        return float(np.exp(np.log(rates[number]) + share * np.log(rates[number + 1] / rates[number])))
    return None


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
