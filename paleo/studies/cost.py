"""What a step draws and what that costs: power from work done, energy, rent, electricity; samples to a target.

A board draws an idle share of its design power all the time, another share while any kernel runs, and energy for each
FLOP and each byte on top, kernel by kernel and never more than its limit (`paleo.pricing.power.PowerParameters`, fitted
to measured watts). The energy of a FLOP is a share of the one that explains how far products of training fall below
their peak at the power limit (``GemmParameters.training_energy``). The design power is given beside it as the upper
limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from paleo.errors import SpecError
from paleo.lowering.policies import runs
from paleo.operations.tensor import precision
from paleo.pricing.gemm import GemmParameters
from paleo.pricing.power import BOARD, LEAST_SHARE, PICO, PowerParameters, clock_under_limit, operand_energy
from paleo.pricing.store import STEP_STACKS, lookup
from paleo.specs.loading import Spec, validate
from paleo.specs.prices import Term, term_named
from paleo.specs.system import load_system
from paleo.units import KILO, MICROSECOND, YEAR, PricePerEnergy, PricePerSecond, Quantity, Seconds, Watts

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.pricing.store import SourcedParameters
    from paleo.specs.device import Device

Array = npt.NDArray[np.float64]
P = TypeVar("P")

#: Arithmetic of element-wise passes runs on ordinary cores in fp32, whatever the dtype of a run.
VECTOR_FAMILY = "gemm.simt"
#: The longest time over which machines are written off [years].
MOST_YEARS = 30


class Tariff(Spec):
    """Costs beside the catalog's rent. All are optional; costs that are not stated are not guessed.

    ``electricity`` [USD/J] is for machines of one's own (a rent of the catalog includes it); ``pue`` multiplies the
    energy (cooling and supply of the building); ``host_power`` [W] is drawn for each GPU by the rest of its node;
    ``gpu_price`` [USD/s] replaces the catalog's rent, ``gpu_prices`` do for single systems, by their names. ``term`` is
    how long machines are rented for, in the dated price lists. ``years`` [s]: machines are bought instead and written
    off evenly over so long a time. ``market``: what the market asks for a device is a rent where electricity has a
    price, too (else such a system is taken to be one's own).
    """

    electricity: PricePerEnergy | None = None
    pue: Annotated[float, Field(ge=1.0, le=3.0)] = 1.0
    host_power: Watts | None = None
    gpu_price: PricePerSecond | None = None
    gpu_prices: dict[str, PricePerSecond] = Field(default_factory=dict)
    term: Term = "on-demand"
    years: Seconds | None = None
    market: bool = False

    @property
    def rented(self) -> bool:
        """Whether the price of a machine holds its electricity."""
        return self.years is None


def stated_tariff(
    *,
    price: str | None = None,
    electricity: str | None = None,
    pue: float | None = None,
    host_power: str | None = None,
    term: str = "on-demand",
    buy: float | None = None,
) -> Tariff:
    """A tariff in words: ``price`` is one rate (``2.5 USD/h``) or one for each system in USD an hour (``A=2.1,B=1.3``),
    ``buy`` the years over which machines are written off. SpecError names what is wrong."""
    by_system = isinstance(price, str) and "=" in price
    if price is not None and not by_system:
        _check_rate(price)
    if buy is not None and (isinstance(buy, str) or not 0 < buy <= MOST_YEARS):
        raise SpecError(f"--buy {buy!r:.80}: expected the years in which a machine is written off, up to {MOST_YEARS}")
    stated = {
        "gpu_price": None if by_system else price,
        "gpu_prices": _prices_by_system(str(price)) if by_system else None,
        "electricity": electricity,
        "pue": pue,
        "host_power": host_power,
        "term": term_named(term),
        "years": None if buy is None else f"{buy * YEAR} s",
    }
    return validate(Tariff, {key: value for key, value in stated.items() if value is not None}, "options")


def _check_rate(text: str) -> None:
    """SpecError where a rate has no unit of its own."""
    try:
        Quantity("price_per_s").parsed(text)
    except SpecError as error:
        raise SpecError(f"--price {error}; or by system in USD an hour: dgx-h100=2.5") from None


def _prices_by_system(text: str) -> dict[str, str]:
    """``A=2.1,B=1.3`` in USD an hour, or with units."""
    prices: dict[str, str] = {}
    for part in text.split(","):
        name, _, rate = (piece.strip() for piece in part.partition("="))
        if not rate:
            raise SpecError(f"--price {text!r}: expected one rate, or NAME=RATE for each system; {part!r} is neither")
        prices[load_system(name).name] = rate if "USD" in rate else f"{rate} USD/h"
    return prices


@dataclass(frozen=True, slots=True)
class Power:
    """Power of one GPU over a step, averaged over a pipeline's stages [W].

    ``demand`` is what each kernel would draw at full clock and ``seconds`` how long it runs in a step of ``step``
    seconds; for the rest of the step the board draws ``idle``. ``cap`` is the limit, the design power unless set lower.
    """

    idle: float
    demand: Array
    seconds: Array
    cap: float
    step: float

    @property
    def busy_share(self) -> float:
        """Share of the step in which a kernel runs."""
        return min(1.0, float(self.seconds.sum()) / self.step)

    @property
    def running(self) -> float:
        """Average while kernels run: of each, never more than the limit."""
        total = float(self.seconds.sum())
        return float((np.minimum(self.demand, self.cap) * self.seconds).sum()) / total if total else self.idle

    @property
    def average(self) -> float:
        """Average over the step."""
        return self.idle + self.busy_share * (self.running - self.idle)

    @property
    def dynamic(self) -> float:
        """Joules of a step above idling, if no limit were."""
        return float(((self.demand - self.idle) * self.seconds).sum())

    def capped(self, limit: float, least_voltage_clock: float) -> Power:
        """The same work under a lower limit: each kernel's clock falls until it keeps it."""
        excess = (self.demand - self.idle) / max(limit - self.idle, LEAST_SHARE * self.cap)
        seconds = self.seconds / clock_under_limit(excess, least_voltage_clock)
        return replace(self, seconds=seconds, cap=limit, step=self.step + float((seconds - self.seconds).sum()))

    def within(self, seconds: float) -> Power:
        """The same work in a step of ``seconds``, of which the board idles what kernels leave."""
        return replace(self, step=max(seconds, float(self.seconds.sum())))


def power(prediction: Prediction, figures: PowerParameters | None = None) -> Power | None:
    """Power of one GPU of a predicted step, by other figures of its board where they are given; None where the device
    states no design power."""
    device = prediction.system.device
    if device.tdp is None:
        return None
    figures, kernels, spent = figures or board(device), _kernels(prediction), prediction.breakdown
    idle = figures.idle_watts(device.tdp, device.memory.kind, device.memory.bandwidth)
    busy = figures.busy * device.tdp
    filled = kernels.seconds_of_call / (kernels.seconds_of_call + figures.filling)
    watts = busy * filled + _energies(prediction, figures) @ kernels.work / kernels.seconds_of_call
    streaming = figures.dram * PICO * device.memory.bandwidth
    demand = idle + np.append(watts, [busy + streaming, busy])
    waited = spent.communication_exposed + spent.stragglers  # a rank that waits spins in its collective
    seconds = np.append(kernels.seconds, [spent.optimizer, waited])
    return Power(idle, demand, seconds, device.tdp, prediction.step_time)


def board(device: Device) -> PowerParameters:
    """What the device's board draws, calibrated or inherited."""
    return _calibrated(PowerParameters, device, "power").parameters


def power_interval(device: Device) -> tuple[float, float]:
    """Factors on the watts of a step that hold nine of ten measured ones."""
    return _calibrated(PowerParameters, device, "power").factors(1.0)


def _energies(prediction: Prediction, figures: PowerParameters) -> Array:
    """Joules of a FLOP on the main unit, of one on ordinary cores, and of a byte."""
    dtype, device = prediction.plan.dtype, prediction.system.device
    on_tensor_cores = dtype in device.tensor_dtypes and dtype != "fp32"
    family = f"gemm.{dtype}" if precision(dtype).narrow else "gemm.tensor" if on_tensor_cores else VECTOR_FAMILY
    flop, vector = (
        figures.arithmetic * _calibrated(GemmParameters, device, name).parameters.training_energy
        for name in (family, VECTOR_FAMILY)
    )
    wider = operand_energy(dtype) if on_tensor_cores else 1.0
    return np.array([flop * wider, vector, figures.dram]) * PICO


def _calibrated(kind: type[P], device: Device, family: str) -> SourcedParameters[P]:
    return lookup(
        kind,
        subject=device.name,
        architecture=device.architecture,
        memory_kind=device.memory.kind,
        family=family,
        stacks=(*STEP_STACKS, BOARD),
    )


class _Kernels(NamedTuple):
    """Work (FLOP, FLOP on ordinary cores, bytes) and seconds of each kernel, and its seconds in a step on an average
    GPU of a stage."""

    work: Array
    seconds_of_call: Array
    seconds: Array


def _kernels(prediction: Prediction) -> _Kernels:
    counted = [
        (each.kernel, each.times * section.repeat * runs(section, each))
        for section in prediction.program.sections
        for each in section.kernels
    ]
    share = prediction.plan.microbatches / prediction.plan.stages
    launches = share * np.array([times for _, times in counted], dtype=np.float64)
    work = np.array([(kernel.flops, kernel.vector_flops, kernel.bytes) for kernel, _ in counted], dtype=np.float64)
    seconds_of_call = np.maximum(prediction.kernels.total, MICROSECOND / KILO)
    return _Kernels(work.reshape(-1, 3).T, seconds_of_call, seconds_of_call * launches)


def energy(prediction: Prediction, seconds: float, tariff: Tariff) -> float | None:
    """Joules of so long a run on all its GPUs, hosts and building as far as the tariff states them."""
    watts = power(prediction)
    if watts is None:
        return None
    return (watts.average + (tariff.host_power or 0.0)) * prediction.plan.gpus * seconds * tariff.pue


def samples_to_target(*, samples: float, global_batch: float, critical_batch: float | None) -> float:
    """Samples that reach the same loss at a global batch, where small batches need ``samples``.

    samples (1 + global_batch / critical_batch)

    ``critical_batch`` is the gradient noise scale where that has been measured: a run at it takes twice the fewest
    samples and twice the fewest steps, and beyond it more GPUs buy ever less. Without one, the samples stay as they
    are.

    >>> samples_to_target(samples=1e6, global_batch=2048, critical_batch=2048)
    2000000.0

    Reference: McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training, arXiv:1812.06162, eq.
    2.11.
    """
    return samples if critical_batch is None else samples * (1.0 + global_batch / critical_batch)
