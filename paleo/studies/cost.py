"""What a step draws and what that costs: power from work done, energy, rent, electricity; samples to a target.

A device draws an idle share of its design power all the time, and energy for each FLOP and each byte on top. The energy
of a FLOP is the one that explains how far products of training fall below their peak at the power limit
(``GemmParameters.training_energy``), so that time and energy tell the same story. The design power is given
beside it as the upper limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from paleo.errors import SpecError
from paleo.lowering.recompute import runs
from paleo.operations.kernel import Kernel
from paleo.predict import Prediction
from paleo.pricing.gemm import GemmParameters
from paleo.pricing.power import DRAM_ENERGY, IDLE_SHARE, PICO
from paleo.pricing.store import lookup
from paleo.specs.hardware import Device, load_system
from paleo.specs.loading import Spec, validate
from paleo.specs.prices import Term, term_named
from paleo.units import YEAR, PricePerEnergy, PricePerSecond, Seconds, Watts

#: Arithmetic of element-wise passes runs on ordinary cores in fp32, whatever the dtype of a run.
VECTOR_FAMILY = "gemm.simt"
#: The longest time over which machines are written off [years].
MOST_YEARS = 30


class Tariff(Spec):
    """What is paid for beside the catalog's rent: all optional, and what is left out is not guessed.

    ``electricity`` [USD/J] is for machines of one's own (a rent of the catalog includes it); ``pue`` multiplies the
    energy (cooling and supply of the building); ``host_power`` [W] is drawn for each GPU by the rest of its node;
    ``gpu_price`` [USD/s] replaces the catalog's rent, ``gpu_prices`` do for single systems, by their names. ``term`` is
    how long machines are rented for, in the dated price lists. ``years`` [s]: machines are bought instead and written
    off evenly over so long a time.
    """

    electricity: PricePerEnergy | None = None
    pue: Annotated[float, Field(ge=1.0, le=3.0)] = 1.0
    host_power: Watts | None = None
    gpu_price: PricePerSecond | None = None
    gpu_prices: dict[str, PricePerSecond] = Field(default_factory=dict)
    term: Term = "on-demand"
    years: Seconds | None = None

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
    by_system = price is not None and "=" in price
    if buy is not None and not 0 < buy <= MOST_YEARS:
        raise SpecError(f"--buy {buy:g}: expected the years in which a machine is written off, up to {MOST_YEARS}")
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


def _prices_by_system(text: str) -> dict[str, str]:
    """``A=2.1,B=1.3`` in USD an hour; a rate with its unit does as well."""
    prices: dict[str, str] = {}
    for part in text.split(","):
        name, _, rate = (piece.strip() for piece in part.partition("="))
        if not rate:
            raise SpecError(f"--price {text!r}: expected one rate, or NAME=RATE for each system; {part!r} is neither")
        prices[load_system(name).name] = rate if "USD" in rate else f"{rate} USD/h"
    return prices


@dataclass(frozen=True, slots=True)
class Power:
    """Average power of one GPU over a step [W]; ``cap`` is its design power. ``dynamic`` is what the work would draw
    uncapped."""

    idle: float
    dynamic: float
    cap: float
    busy_share: float

    @property
    def average(self) -> float:
        """What it draws: while it computes never more than the cap, otherwise the idle part."""
        return self.idle + min(self.dynamic, self.busy_share * (self.cap - self.idle))


def dynamic_energy(
    *, flops: float, vector_flops: float, moved_bytes: float, flop_energy: float, vector_energy: float
) -> float:
    """Energy of work [J]: each FLOP and each byte of memory traffic has its price; the idle power is not in it.

    Holds at full clock; under a power limit clocks and voltage fall, and each FLOP takes less.

    >>> round(dynamic_energy(flops=1e12, vector_flops=0.0, moved_bytes=1e10, flop_energy=1e-12, vector_energy=1e-11), 6)
    1.4

    References: Horowitz, ISSCC 2014 (energy per operation); O'Connor et al., MICRO 2017 (3.9 pJ/bit of HBM2).
    """
    return flops * flop_energy + vector_flops * vector_energy + moved_bytes * DRAM_ENERGY


def power(prediction: Prediction) -> Power | None:
    """Average power of one GPU of a predicted step; None where the device states no design power."""
    device = prediction.system.device
    if device.tdp is None:
        return None
    tensor = (
        "gemm.fp8"
        if prediction.plan.dtype == "fp8"
        else "gemm.tensor"
        if _on_tensor_cores(prediction)
        else VECTOR_FAMILY
    )
    flops, vector, moved = _work(prediction)
    joules = dynamic_energy(
        flops=flops,
        vector_flops=vector,
        moved_bytes=moved,
        flop_energy=_flop_energy(device, tensor),
        vector_energy=_flop_energy(device, VECTOR_FAMILY),
    )
    spent, idle = prediction.breakdown, IDLE_SHARE * device.tdp
    busy = spent.compute + spent.memory_bound + spent.launch + spent.optimizer
    return Power(idle, joules / prediction.step_time, device.tdp, min(1.0, busy / prediction.step_time))


def _on_tensor_cores(prediction: Prediction) -> bool:
    return prediction.plan.dtype in prediction.system.device.tensor_dtypes and prediction.plan.dtype != "fp32"


def _flop_energy(device: Device, family: str) -> float:
    """Joules of one FLOP in training, calibrated or inherited."""
    calibrated = lookup(
        GemmParameters,
        subject=device.name,
        architecture=device.architecture,
        memory_kind=device.memory.kind,
        family=family,
    )
    return calibrated.parameters.training_energy * PICO


def _work(prediction: Prediction) -> tuple[float, float, float]:
    """FLOP on the main unit, FLOP on ordinary cores and bytes of one step on an average GPU of a stage."""
    sums = [0.0, 0.0, 0.0]
    for section in prediction.program.sections:
        for counted in section.kernels:
            turns = counted.times * section.repeat * runs(section, counted)
            for index, work in enumerate(_counts(counted.kernel)):
                sums[index] += work * turns
    share = prediction.plan.microbatches / prediction.plan.stages
    return sums[0] * share, sums[1] * share, sums[2] * share


def _counts(kernel: Kernel) -> tuple[float, float, float]:
    return kernel.flops, kernel.vector_flops, kernel.bytes


def energy(prediction: Prediction, seconds: float, tariff: Tariff) -> float | None:
    """Joules of so long a run on all its GPUs, hosts and building as far as the tariff states them."""
    drawn = power(prediction)
    if drawn is None:
        return None
    return (drawn.average + (tariff.host_power or 0.0)) * prediction.plan.gpus * seconds * tariff.pue


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
