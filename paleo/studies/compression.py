"""Whether compressing the gradients of a run pays, and below which rate of its links it would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paleo.compression.base import Message, break_even_rate, wire_bytes
from paleo.errors import PlanError
from paleo.parallel.placement import BATCH_AXES
from paleo.step.exchange import scaled
from paleo.studies.changed_system import changed

if TYPE_CHECKING:
    from paleo.compression.base import Compression
    from paleo.predict import Prediction


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
        prediction, dense, method, sent, plain, coding, rate, float(break_even_rate(plain, sent, coding))
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
    """The run on systems whose links between nodes (of one node: inside it) are so many times as fast."""
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
