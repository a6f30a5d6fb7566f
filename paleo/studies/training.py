"""What training takes: time, rent and energy of so many epochs, samples or tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paleo.errors import SpecError
from paleo.predict import Prediction
from paleo.specs.hardware import Price, System
from paleo.specs.model import ModelSpec
from paleo.units import HOUR, KILO

JOULES_PER_KWH = KILO * HOUR


@dataclass(frozen=True, slots=True)
class Amount:
    """How much training: samples, and in words what they are."""

    samples: float
    words: str


def amount(
    model: ModelSpec,
    *,
    epochs: float | None = None,
    samples: float | None = None,
    tokens: float | None = None,
    tokens_per_sample: float | None = None,
) -> Amount | None:
    """Training of so many epochs (of the model file's data set), samples or tokens; None where none is stated."""
    stated = {"epochs": epochs, "samples": samples, "tokens": tokens}
    given = {name: value for name, value in stated.items() if value is not None}
    if not given:
        return None
    if len(given) > 1:
        raise SpecError(f"{' and '.join(given)}: state one of them")
    (name, value), *_ = given.items()
    if not (math.isfinite(value) and value > 0):
        raise SpecError(f"{name}: {value} must be above zero")
    if epochs is not None:
        if model.dataset is None:
            raise SpecError(f"epochs: model {model.name} names no data set; state samples (or tokens) instead")
        return Amount(epochs * model.dataset.samples, f"{_count(epochs, 'epoch')} of {model.dataset.name}")
    if tokens is not None:
        if tokens_per_sample is None:
            raise SpecError(f"tokens: samples of model {model.name} are not counted in tokens; state samples")
        return Amount(tokens / tokens_per_sample, f"{tokens:,.0f} tokens")
    return Amount(value, _count(value, "sample"))


def _count(value: float, what: str) -> str:
    return f"{value:,g} {what}" + ("" if value == 1 else "s")


@dataclass(frozen=True, slots=True)
class Training:
    """Time [s], price [USD, None where no price is known] and energy [J] of an amount of training on one configuration.

    Energy is an upper estimate: every GPU at its thermal design power all the time, the hosts not counted.
    """

    amount: Amount
    steps: int
    time: float
    price_per_s: float | None
    price: Price | None
    energy: float | None

    @property
    def cost(self) -> float | None:
        return None if self.price_per_s is None else self.price_per_s * self.time

    @property
    def price_per_hour(self) -> float | None:
        return None if self.price_per_s is None else self.price_per_s * HOUR

    @property
    def energy_kwh(self) -> float | None:
        return None if self.energy is None else self.energy / JOULES_PER_KWH


def training(prediction: Prediction, wanted: Amount) -> Training:
    """What an amount of training takes; whole nodes are paid for, each step is a whole step."""
    steps = math.ceil(wanted.samples / prediction.plan.global_batch)
    seconds = steps * prediction.step_time
    rate, price = rent(prediction.system, prediction.plan.gpus)
    power = prediction.system.device.tdp
    energy = None if power is None else power * prediction.plan.gpus * seconds
    return Training(wanted, steps, seconds, rate, price, energy)


def rent(system: System, gpus: int) -> tuple[float | None, Price | None]:
    """USD per second for the nodes that hold ``gpus`` devices (else for the devices), and the price it is made of."""
    if system.price_per_node is not None:
        return system.price_per_node.rate * math.ceil(gpus / system.devices_per_node), system.price_per_node
    if system.device.price is not None:
        return system.device.price.rate * gpus, system.device.price
    return None, None
