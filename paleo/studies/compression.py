"""Whether compressing the gradients of a run pays, and below which rate of its links it would."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paleo.compression.base import Compression, Message, break_even_rate, wire_bytes
from paleo.parallel.mesh import BATCH_AXES
from paleo.predict import Prediction, predict
from paleo.step.compression import scaled


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
    run = prediction.run.model_copy(update={"compress": None, "microbatch": prediction.plan.microbatch})
    dense = predict(prediction.model, prediction.system, run)
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
