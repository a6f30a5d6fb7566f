"""Power, energy and cost of a training run: watts from the work of its kernels, rent, electricity, and time to train.

A board draws an idle share of its design power all the time, and another share while any kernel runs. Each FLOP and
each byte of memory traffic adds energy, up to the power limit of the board. The parameters
(`paleo.pricing.power.PowerParameters`) are fitted to measured watts. The energy of a FLOP is a share of
``GemmParameters.training_energy_per_flop``, which explains how far GEMMs of training fall below peak at the power
limit. The energy at design power is reported, too, as an upper limit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from paleo.errors import SpecError
from paleo.learning.base import samples_to_target
from paleo.lowering.stages_and_recompute import kernel_runs_per_microbatch
from paleo.network.graph import build_graph
from paleo.operations.tensor import default_precision
from paleo.pricing.calibration_lookup import TIMING_METHODS, SourcedParameters, find_calibrated_parameters
from paleo.pricing.gemm import GemmParameters
from paleo.pricing.power import (
    BOARD_POWER_METHOD,
    MIN_ARITHMETIC_POWER_SHARE,
    PICO,
    PowerParameters,
    power_limited_clock_share,
    relative_flop_energy,
)
from paleo.specs.device import Device, Price
from paleo.specs.loading import Spec, to_python_numbers, validate_mapping
from paleo.specs.prices import (
    BilledDevices,
    RentalTerm,
    billed_devices,
    machine_rent,
    occupied_machines,
    parse_rental_term,
    purchase_quote,
)
from paleo.specs.system import System, load_system
from paleo.step.waiting import normal_quantile
from paleo.studies.goodput import LongRun, LongRunOptions, predict_long_run
from paleo.studies.gradient_exchange import step_time_under_consistency
from paleo.units import (
    HOUR,
    KILO,
    MEGA,
    MICROSECOND,
    SECONDS_PER_YEAR,
    PricePerEnergy,
    PricePerSecond,
    Quantity,
    Seconds,
    Watts,
    parse_quantity,
    with_noun,
)

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run


Array = npt.NDArray[np.float64]
ParameterSet = TypeVar("ParameterSet")

#: Arithmetic of element-wise passes runs on ordinary cores in fp32, whatever the dtype of a run.
_VECTOR_FAMILY = "gemm.simt"
#: The longest time over which machines are written off [years].
_MOST_YEARS = 30


class Tariff(Spec):
    """Prices of machines and energy that a user gives in addition to the catalog's rents. All fields are optional.

    Prices that are not given are not guessed.

    ``electricity`` [USD/J] is for one's own machines (catalog rents include it). ``pue`` multiplies the energy, for
    cooling and power supply of the building. ``host_power`` [W] is what the rest of a node draws for each GPU.
    ``gpu_price`` [USD/s] replaces the catalog's rent of a GPU, ``gpu_prices`` those of single systems by name. ``term``
    is how long machines are rented for, in the dated price lists. With ``years`` [s], machines are bought and written
    off evenly over that time. ``market`` is True if market prices of a device count as rent although electricity has a
    price; otherwise such a system is taken to be one's own.
    """

    electricity: PricePerEnergy | None = None
    pue: Annotated[float, Field(ge=1.0, le=3.0)] = 1.0
    host_power: Watts | None = None
    gpu_price: PricePerSecond | None = None
    gpu_prices: dict[str, PricePerSecond] = Field(default_factory=dict)
    term: RentalTerm = "on-demand"
    years: Seconds | None = None
    market: bool = False

    @property
    def rented(self) -> bool:
        """True if machines are rented, so that their price includes electricity."""
        return self.years is None


def parse_tariff(
    *,
    price: str | None = None,
    electricity: str | None = None,
    pue: float | None = None,
    host_power: str | None = None,
    term: str = "on-demand",
    buy: float | None = None,
) -> Tariff:
    """Parse the prices of machines and energy that a user gives as text.

    Parameters
    ----------
    price : str, optional
        Rent of one GPU for all systems (``2.5 USD/h``), or by system in USD per hour (``A=2.1,B=1.3``).
    electricity : str, optional
        Price of energy, such as ``0.12 USD/kWh``.
    pue : float, optional
        Power usage effectiveness of the building, 1 or more.
    host_power : str, optional
        Power of the host for each GPU, such as ``150 W``.
    term : str, optional
        Term of the rent.
    buy : float, optional
        Years over which bought machines are written off.

    Returns
    -------
    Tariff
        The tariff in SI units.

    Raises
    ------
    SpecError
        If a text is not valid.
    """
    by_system = isinstance(price, str) and "=" in price
    if price is not None and not by_system:
        # Raise SpecError where a rate has no unit of its own.
        try:
            Quantity("price_per_s").parse_text(price)
        except SpecError as error:
            raise SpecError(f"--price {error}; or by system in USD an hour: dgx-h100=2.5") from None
    if buy is not None and (isinstance(buy, str) or not 0 < buy <= _MOST_YEARS):
        raise SpecError(f"--buy {buy!r:.80}: expected the years in which a machine is written off, up to {_MOST_YEARS}")
    stated = {
        "gpu_price": None if by_system else price,
        "gpu_prices": _prices_by_system(str(price)) if by_system else None,
        "electricity": electricity,
        "pue": pue,
        "host_power": host_power,
        "term": parse_rental_term(term),
        "years": None if buy is None else f"{buy * SECONDS_PER_YEAR} s",
    }
    return validate_mapping(Tariff, {key: value for key, value in stated.items() if value is not None}, "options")


def _prices_by_system(text: str) -> dict[str, str]:
    """Split prices such as ``A=2.1,B=1.3`` into a price by system, in USD an hour or with units."""
    prices: dict[str, str] = {}
    for part in text.split(","):
        name, _, rate = (piece.strip() for piece in part.partition("="))
        if not rate:
            raise SpecError(f"--price {text!r}: expected one rate, or NAME=RATE for each system; {part!r} is neither")
        prices[load_system(name).name] = rate if "USD" in rate else f"{rate} USD/h"
    return prices


@dataclass(frozen=True, slots=True)
class Power:
    """Power of one GPU over a training step [W], averaged over the pipeline stages.

    ``uncapped_kernel_power`` is the power of each kernel at full clock [W], and ``kernel_seconds`` its time in a step
    of ``step_time`` seconds. For the rest of the step the board draws ``idle`` [W]. ``power_limit`` [W] is the design
    power unless set lower.
    """

    idle: float
    uncapped_kernel_power: Array
    kernel_seconds: Array
    power_limit: float
    step_time: float

    @property
    def _busy_share(self) -> float:
        """Share (0 to 1) of the step time in which a kernel runs."""
        return min(1.0, float(self.kernel_seconds.sum()) / self.step_time)

    @property
    def _mean_running_power(self) -> float:
        """Mean power while kernels run, each capped at the power limit [W]."""
        total = float(self.kernel_seconds.sum())
        if not total:
            return self.idle
        return float((np.minimum(self.uncapped_kernel_power, self.power_limit) * self.kernel_seconds).sum()) / total

    @property
    def average(self) -> float:
        """Mean power over the step [W]."""
        return self.idle + self._busy_share * (self._mean_running_power - self.idle)

    def with_power_limit(self, limit: float, least_voltage_clock: float) -> Power:
        """Return the power of the same step under a lower power limit, which lowers the clock of each kernel.

        Parameters
        ----------
        limit : float
            Power limit [W].
        least_voltage_clock : float
            Clock, as a share of the boost clock, below which the voltage no longer falls.

        Returns
        -------
        Power
            Power of the slower step.
        """
        allowed = max(limit - self.idle, MIN_ARITHMETIC_POWER_SHARE * self.power_limit)
        excess = (self.uncapped_kernel_power - self.idle) / allowed
        seconds = self.kernel_seconds / power_limited_clock_share(excess, least_voltage_clock)
        step_time = self.step_time + float((seconds - self.kernel_seconds).sum())
        return replace(self, kernel_seconds=seconds, power_limit=limit, step_time=step_time)

    def with_step_time(self, seconds: float) -> Power:
        """Return the power of the same kernels in a longer step, in which the board idles between kernels.

        Parameters
        ----------
        seconds : float
            New step time [s].

        Returns
        -------
        Power
            Power over the longer step.
        """
        return replace(self, step_time=max(seconds, float(self.kernel_seconds.sum())))


def device_power(prediction: Prediction, figures: PowerParameters | None = None) -> Power | None:
    """Predict the power of one GPU over a training step, from the FLOP and bytes of its kernels.

    Parameters
    ----------
    prediction : Prediction
        Prediction of a run.
    figures : PowerParameters, optional
        Power parameters of the board, instead of the calibrated ones.

    Returns
    -------
    Power, optional
        Power over the step; None if the device file has no design power.
    """
    device = prediction.system.device
    if device.tdp is None:
        return None
    figures, kernels, spent = figures or power_parameters(device), _kernels(prediction), prediction.breakdown
    idle = figures.idle_watts(device.tdp, device.memory.kind, device.memory.bandwidth)
    busy = figures.busy_power_share * device.tdp
    filled = kernels.seconds_of_call / (kernels.seconds_of_call + figures.device_fill_time)
    watts = busy * filled + _energies(prediction, figures) @ kernels.work / kernels.seconds_of_call
    streaming = figures.dram_energy_per_byte * PICO * device.memory.bandwidth
    demand = idle + np.append(watts, [busy + streaming, busy])
    waited = spent.communication_exposed + spent.stragglers  # a rank that waits spins in its collective
    seconds = np.append(kernels.seconds, [spent.optimizer, waited])
    return Power(idle, demand, seconds, device.tdp, prediction.step_time)


def power_parameters(device: Device) -> PowerParameters:
    """Return the power parameters of a device's board, calibrated or inherited.

    Parameters
    ----------
    device : Device
        Device, as its datasheet describes it.

    Returns
    -------
    PowerParameters
        Idle power, and energies of a FLOP and of a byte from memory.
    """
    return _calibrated(PowerParameters, device, "power").parameters


def power_interval_factors(device: Device) -> tuple[float, float]:
    """Return the factors that turn a predicted power into its 90 % interval.

    Parameters
    ----------
    device : Device
        Device, as its datasheet describes it.

    Returns
    -------
    tuple[float, float]
        Low and high factor.
    """
    return _calibrated(PowerParameters, device, "power").interval_factors(1.0)


def _energies(prediction: Prediction, figures: PowerParameters) -> Array:
    """Return the energies [J] of a FLOP on tensor cores, of a FLOP on ordinary cores, and of a byte from memory."""
    dtype, device = prediction.plan.dtype, prediction.system.device
    on_tensor_cores = dtype in device.tensor_dtypes and dtype != "fp32"
    family = "gemm.tensor" if on_tensor_cores else _VECTOR_FAMILY
    if default_precision(dtype).quantises_operands:
        family = f"gemm.{dtype}"
    flop, vector = (
        figures.arithmetic_energy_share * _calibrated(GemmParameters, device, name).parameters.training_energy_per_flop
        for name in (family, _VECTOR_FAMILY)
    )
    wider = relative_flop_energy(dtype) if on_tensor_cores else 1.0
    return np.array([flop * wider, vector, figures.dram_energy_per_byte]) * PICO


def _calibrated(kind: type[ParameterSet], device: Device, family: str) -> SourcedParameters[ParameterSet]:
    return find_calibrated_parameters(
        kind,
        subject=device.name,
        architecture=device.architecture,
        memory_kind=device.memory.kind,
        family=family,
        stacks=(*TIMING_METHODS, BOARD_POWER_METHOD),
    )


class _Kernels(NamedTuple):
    """Work and duration of each kernel of a training step.

    ``work`` holds FLOP, FLOP on ordinary cores, and bytes, shape (3, kernels). ``seconds_of_call`` is the duration of
    one call [s], and ``seconds`` the time of all calls in a step, averaged over pipeline stages [s].
    """

    work: Array
    seconds_of_call: Array
    seconds: Array


def _kernels(prediction: Prediction) -> _Kernels:
    counted = [
        (each.kernel, each.repetitions * section.repeat * kernel_runs_per_microbatch(section, each))
        for section in prediction.program.sections
        for each in section.kernels
    ]
    share = prediction.plan.microbatches / prediction.plan.stages
    launches = share * np.array([times for _, times in counted], dtype=np.float64)
    work = np.array([(kernel.flops, kernel.vector_flops, kernel.bytes) for kernel, _ in counted], dtype=np.float64)
    seconds_of_call = np.maximum(prediction.kernels.device_time, MICROSECOND / KILO)
    return _Kernels(work.reshape(-1, 3).T, seconds_of_call, seconds_of_call * launches)


def training_energy(prediction: Prediction, seconds: float, tariff: Tariff) -> float | None:
    """Return the energy of a run on all its GPUs, including hosts and cooling if the tariff has them.

    Parameters
    ----------
    prediction : Prediction
        Prediction of the run.
    seconds : float
        Duration of the run [s].
    tariff : Tariff
        Host power and power usage effectiveness.

    Returns
    -------
    float, optional
        Energy [J]; None if the device file has no design power.
    """
    watts = device_power(prediction)
    return None if watts is None else seconds * _watts_of_all(prediction, watts.average, tariff)


def _watts_of_all(prediction: Prediction, busy: float, tariff: Tariff) -> float:
    """Return the power of all devices that are billed for a run, with hosts and cooling [W].

    Active devices draw ``busy`` watts; the other devices of the billed nodes idle.
    """
    plan, devices = prediction.plan, billed_devices(prediction.system, prediction.plan.gpus).devices
    watts = device_power(prediction)
    idle = (0.0 if watts is None else watts.idle) * (devices - plan.mesh.size)
    return (busy * plan.mesh.size + idle + (tariff.host_power or 0.0) * devices) * tariff.pue


#: Ends of a 90 % interval in standard deviations.
INTERVAL_STANDARD_DEVIATIONS = float(normal_quantile(0.95))
JOULES_PER_KWH = KILO * HOUR


@dataclass(frozen=True, slots=True)
class TrainingRequirement:
    """Samples and time [s] that a predicted run needs to reach its amount of training or target quality.

    ``interval`` is the 90 % interval of the time [s].

    ``code_over_predicted_step_time`` is the step time of the task's code over the predicted one, and
    ``evaluation_seconds`` [s] is part of the time.
    """

    samples: float
    seconds: float
    interval: tuple[float, float]
    code_over_predicted_step_time: float = 1.0
    evaluation_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainingAmount:
    """Amount of training: a number of samples, and its description as text.

    Where the amount depends on the run, ``requirement`` is a function from a predicted step to samples and time, and
    ``batches`` are the global batches worth trying. ``samples_log_deviation`` is the standard deviation of the
    logarithm of the number of samples.
    """

    samples: float
    description: str
    requirement: Callable[[Prediction], TrainingRequirement] | None = None
    batches: tuple[int, ...] = ()
    samples_log_deviation: float = 0.0


#: Epochs, samples or tokens: a number, or a text with a prefix (``15T``).
CountOrText = float | str
#: Far more than anyone trains on; more is a slip of an exponent.
MAX_TRAINING_AMOUNT = 2.0**53


def convert_training_amount(
    model: ModelSpec,
    *,
    epochs: CountOrText | None = None,
    samples: CountOrText | None = None,
    tokens: CountOrText | None = None,
    tokens_per_sample: float | None = None,
) -> TrainingAmount | None:
    """Convert an amount of training from epochs, samples or tokens to samples.

    Parameters
    ----------
    model : ModelSpec
        Model file, whose data set defines an epoch.
    epochs : CountOrText, optional
        Number of epochs.
    samples : CountOrText, optional
        Number of samples.
    tokens : CountOrText, optional
        Number of tokens.
    tokens_per_sample : float, optional
        Tokens of one sample.

    Returns
    -------
    TrainingAmount, optional
        Number of samples and its description; None if no amount is given.

    Raises
    ------
    SpecError
        If more than one is given, or a number is out of range.
    """
    stated = {"epochs": epochs, "samples": samples, "tokens": tokens}
    stated_values = {name: _number(name, value) for name, value in stated.items() if value is not None}
    if not stated_values:
        return None
    if len(stated_values) > 1:
        raise SpecError(f"{' and '.join(stated_values)}: state one of them")
    (name, value), *_ = stated_values.items()
    if not 0 < value <= MAX_TRAINING_AMOUNT:
        raise SpecError(f"{name}: {value} must be above zero, and at most {MAX_TRAINING_AMOUNT:.0e}")
    if epochs is not None:
        if model.dataset is None:
            raise SpecError(f"epochs: model {model.name} names no data set; state samples (or tokens) instead")
        return TrainingAmount(value * model.dataset.samples, f"{with_noun(value, 'epoch')} of {model.dataset.name}")
    if tokens is not None:
        if tokens_per_sample is None:
            raise SpecError(f"tokens: samples of model {model.name} are not counted in tokens; state samples")
        return TrainingAmount(value / tokens_per_sample, with_noun(round(value), "token"))
    return TrainingAmount(value, with_noun(value, "sample"))


def _number(name: str, value: CountOrText) -> float:
    """Convert an amount of training such as ``15T`` to a number (15e12); raise SpecError if it is none."""
    with contextlib.suppress(SpecError):
        number = parse_quantity(value, "count") if isinstance(value, str) else to_python_numbers(value)
        if isinstance(number, Real) and not isinstance(number, bool):
            return number  # type: ignore[return-value]
    raise SpecError(f"{name}: {value!r:.80}: expected a number, or a text such as 1M or 15T")


def parse_training_amount(
    model: ModelSpec,
    run: Run,
    *,
    epochs: CountOrText | None = None,
    samples: CountOrText | None = None,
    tokens: CountOrText | None = None,
) -> TrainingAmount | None:
    """Convert an amount of training from epochs, samples or tokens to samples of a network with the run's parameters.

    The run's parameters, such as the sequence length, give the tokens of a sample.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.
    epochs : CountOrText, optional
        Number of epochs.
    samples : CountOrText, optional
        Number of samples.
    tokens : CountOrText, optional
        Number of tokens.

    Returns
    -------
    TrainingAmount, optional
        Number of samples and its description; None if no amount is given.

    Raises
    ------
    SpecError
        If more than one is given, or a number is out of range.
    """
    per_sample = None if tokens is None else build_graph(model, batch=1, overrides=run.model).tokens_per_sample
    return convert_training_amount(model, epochs=epochs, samples=samples, tokens=tokens, tokens_per_sample=per_sample)


def default_samples_to_train(model: ModelSpec) -> TrainingAmount:
    """Return the amount of training if the user gives none: one epoch, or a million samples without a data set.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.

    Returns
    -------
    TrainingAmount
        Number of samples with its description.
    """
    epoch = convert_training_amount(model, epochs=1) if model.dataset is not None else None
    return epoch or TrainingAmount(MEGA, "1 million samples")


@dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """Time [s], cost [USD] and energy [J] of an amount of training on one configuration; costs are None if unknown.

    ``energy`` is modelled from the work done (see ``paleo.studies.cost``), ``energy_at_design_power`` assumes every GPU
    at its design power all the time. ``interval`` holds the ends of the 90 % interval of ``time``; cost and energy
    scale with it. ``gpus`` are used, ``billed_devices`` are paid for. ``long_run`` describes failures, where they are
    counted; all figures then include them.
    """

    amount: TrainingAmount
    samples: float
    steps: int
    time: float
    interval: tuple[float, float]
    price_per_s: float | None
    price: Price | None
    energy: float | None
    energy_at_design_power: float | None
    tariff: Tariff
    gpus: int
    billed_devices: BilledDevices
    long_run: LongRun | None = None
    code_over_predicted_step_time: float = 1.0
    evaluation_seconds: float = 0.0

    @property
    def billed_devices_text(self) -> str:
        """Text on the whole nodes or racks that are paid for; empty if the run uses them fully."""
        if self.billed_devices.devices == self.gpus:
            return ""
        return f"{self.billed_devices.devices} GPUs, as a {self.billed_devices.machine_noun} is billed whole"

    @property
    def rent(self) -> float | None:
        """Rent of the machines [USD]; None if no price is known."""
        return None if self.price_per_s is None else self.price_per_s * self.time

    @property
    def electricity(self) -> float | None:
        """Cost of electricity [USD]; None if the tariff has no price of energy or a catalog rent includes it."""
        stated = self.price is None or self.price.date == "as stated"
        if (self.tariff.rented and not stated) or self.energy is None or self.tariff.electricity is None:
            return None
        return self.energy * self.tariff.electricity

    @property
    def cost(self) -> float | None:
        """Total cost of the training [USD]: rent plus electricity, as far as prices are known; None if none is."""
        parts = [part for part in (self.rent, self.electricity) if part is not None]
        return sum(parts) if parts else None

    @property
    def price_per_hour(self) -> float | None:
        return None if self.price_per_s is None else self.price_per_s * HOUR

    @property
    def energy_kwh(self) -> float | None:
        return None if self.energy is None else self.energy / JOULES_PER_KWH

    @property
    def kwh_at_design_power(self) -> float | None:
        return None if self.energy_at_design_power is None else self.energy_at_design_power / JOULES_PER_KWH


def estimate_training(
    prediction: Prediction, amount: TrainingAmount, tariff: Tariff | None = None, *,
    critical_batch: float | None = None, long_run: LongRunOptions | None = None,
) -> TrainingEstimate:  # fmt: skip
    """Predict time, cost and energy of an amount of training.

    Whole nodes or racks are paid for (`paleo.specs.prices.billed_devices`), and the number of steps is rounded up. For
    asynchronous updates a step is the time in which all workers process the global batch once. With `long_run`,
    failures, checkpoints and spare nodes count, too.

    Parameters
    ----------
    prediction : Prediction
        Prediction of the run.
    amount : TrainingAmount
        Amount of training.
    tariff : Tariff, optional
        Prices; by default those of the catalog.
    critical_batch : float, optional
        Batch beyond which more samples are needed in proportion [samples].
    long_run : LongRunOptions, optional
        Failures and checkpoints.

    Returns
    -------
    TrainingEstimate
        Time [s], cost [USD] and energy [J], with intervals.

    Raises
    ------
    CapacityError
        If the run never finishes.
    """
    terms, plan = tariff or Tariff(), prediction.plan
    requirement = amount.requirement
    needed = _need(prediction, amount, critical_batch) if requirement is None else requirement(prediction)
    work, (low, high) = needed.seconds, needed.interval
    rate, price = rent_rate(prediction.system, plan.gpus, terms)
    failing = None if long_run is None else predict_long_run(prediction, work, long_run)
    seconds = work
    if failing is not None:
        seconds, (early, late) = failing.wall_time, failing.wall_time_interval
        low, high = low + early - work, high + late - work
        if rate is not None and failing.spares:
            rate *= 1.0 + failing.spares / occupied_machines(prediction.system, plan.gpus)
    watts = prediction.system.device.tdp
    limit = None if watts is None else _watts_of_all(prediction, watts, terms) * seconds
    return TrainingEstimate(
        amount,
        needed.samples,
        steps=math.ceil(needed.samples / plan.global_batch),
        time=seconds,
        interval=(low, high),
        price_per_s=rate,
        price=price,
        energy=training_energy(prediction, seconds, terms),
        energy_at_design_power=limit,
        tariff=terms,
        long_run=failing,
        billed_devices=billed_devices(prediction.system, plan.gpus),
        gpus=plan.gpus,
        code_over_predicted_step_time=needed.code_over_predicted_step_time,
        evaluation_seconds=needed.evaluation_seconds,
    )


def _need(prediction: Prediction, amount: TrainingAmount, critical_batch: float | None) -> TrainingRequirement:
    """Return samples and time that a run needs for a fixed amount of training, in whole steps, with the interval."""
    batch = prediction.plan.global_batch
    samples = float(samples_to_target(samples=amount.samples, global_batch=batch, critical_batch=critical_batch))
    work = math.ceil(samples / batch) * step_time_under_consistency(prediction)
    low, high = (end / prediction.step_time for end in prediction.interval)
    unsure = INTERVAL_STANDARD_DEVIATIONS * amount.samples_log_deviation
    ends = math.exp(-math.hypot(unsure, math.log(low))), math.exp(math.hypot(unsure, math.log(high)))
    return TrainingRequirement(samples, work, (work * ends[0], work * ends[1]))


def require_training_amount(long_run: LongRunOptions | None, amount: TrainingAmount | None) -> LongRunOptions | None:
    """Check that a run whose failures are counted has an amount of training; raise SpecError otherwise.

    Parameters
    ----------
    long_run : LongRunOptions, optional
        Failures and checkpoints; None without.
    amount : TrainingAmount, optional
        Amount of training; None without.

    Returns
    -------
    LongRunOptions, optional
        `long_run`.

    Raises
    ------
    SpecError
        If there is a long run without an amount.
    """
    if long_run is not None and amount is None:
        raise SpecError("--goodput: how long the run is has to be stated: --tokens, --samples, --epochs or --target")
    return long_run


def rent_rate(system: System, gpus: int, tariff: Tariff | None = None) -> tuple[float | None, Price | None]:
    """Return the rent of the whole nodes or racks that hold a number of devices [USD/s].

    The first known price counts: that of the tariff, the depreciation of bought machines, the price in the system's
    file, or the dated price lists (`paleo.specs.prices`). If electricity has a price, a system without any rental offer
    is taken to be owned, without rent.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    gpus : int
        Number of devices.
    tariff : Tariff, optional
        Prices; by default those of the catalog.

    Returns
    -------
    tuple[float | None, Price | None]
        Rent [USD/s] and the price with its source; both None where unknown.
    """
    terms = tariff or Tariff()
    stated = terms.gpu_prices.get(system.name, terms.gpu_price)
    if stated is not None:
        source = f"{stated * HOUR:.4g} USD an hour for each GPU"
        price = Price.model_construct(rate=stated, date="as stated", source=source)
        return stated * billed_devices(system, gpus).devices, price
    if terms.years is not None:
        # Compute USD per second of machines that are bought: their price spread evenly over their lifetime.
        quote = purchase_quote(system)
        if quote is None:
            return None, None
        rate = quote.device_price / terms.years
        years = f"{terms.years / SECONDS_PER_YEAR:.3g} years"
        purchase = f"bought at {quote.device_price:,.0f} USD for each GPU, written off over {years}"
        price = quote.price.model_copy(update={"rate": rate, "source": f"{purchase}; {quote.price.source}"})
        return rate * billed_devices(system, gpus).devices, price
    offer = machine_rent(system, gpus, terms.term)
    if offer is None or (terms.electricity is not None and not (offer[2] or terms.market)):
        return None, None
    return offer[0], offer[1]


def comparable_tariff(tariff: Tariff, systems: Iterable[System]) -> Tariff:
    """Make the costs of several systems comparable: if one system has a rent, market prices count as rents for all.

    Parameters
    ----------
    tariff : Tariff
        Prices.
    systems : iterable of System
        Systems that are compared.

    Returns
    -------
    Tariff
        Tariff under which all systems are priced.
    """
    hired = any(rent_rate(system, 1, tariff)[0] is not None for system in systems)
    return tariff.model_copy(update={"market": True}) if hired else tariff
