"""What training takes: time, rent and energy of so many epochs, samples or tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paleo.errors import SpecError
from paleo.network.graph import build
from paleo.specs.device import Price
from paleo.specs.loading import plain_numbers
from paleo.specs.prices import purchase_quote, rented
from paleo.specs.reliability import nodes_of
from paleo.step.waiting import normal_quantile
from paleo.studies.consistency import step_seconds
from paleo.studies.cost import Tariff, energy, samples_to_target
from paleo.studies.long_run import goodput_of
from paleo.units import HOUR, KILO, MEGA, YEAR, counted, parse

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.system import System
    from paleo.studies.goodput import Goodput
    from paleo.studies.long_run import LongRunOptions

#: Ends of a 90 % interval in standard deviations.
NINETY = float(normal_quantile(0.95))
JOULES_PER_KWH = KILO * HOUR


@dataclass(frozen=True, slots=True)
class Need:
    """What a target takes with a predicted step: samples of its batch, seconds in all, their 90 % interval."""

    samples: float
    seconds: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Amount:
    """The amount of training: a number of samples, and the same in words.

    Where it follows from the run, ``needs`` is what a predicted step needs (its batch decides on the samples, its
    system on the evaluations), and ``batches`` are the global batches worth trying. ``sigma`` is how unsure the samples
    are, in logarithms."""

    samples: float
    words: str
    needs: Callable[[Prediction], Need] | None = None
    batches: tuple[int, ...] = ()
    sigma: float = 0.0


#: Epochs, samples or tokens: a number, or a text with a prefix (``15T``).
HowMany = float | str
#: Far more than anyone trains on; more is a slip of an exponent.
MOST_AMOUNT = 1e30


def amount(
    model: ModelSpec,
    *,
    epochs: HowMany | None = None,
    samples: HowMany | None = None,
    tokens: HowMany | None = None,
    tokens_per_sample: float | None = None,
) -> Amount | None:
    """Training of so many epochs (of the model file's data set), samples or tokens; None where none is stated."""
    stated = {"epochs": epochs, "samples": samples, "tokens": tokens}
    stated_values = {name: _number(name, value) for name, value in stated.items() if value is not None}
    if not stated_values:
        return None
    if len(stated_values) > 1:
        raise SpecError(f"{' and '.join(stated_values)}: state one of them")
    (name, value), *_ = stated_values.items()
    if not 0 < value <= MOST_AMOUNT:
        raise SpecError(f"{name}: {value} must be above zero, and at most {MOST_AMOUNT:.0e}")
    if epochs is not None:
        if model.dataset is None:
            raise SpecError(f"epochs: model {model.name} names no data set; state samples (or tokens) instead")
        return Amount(value * model.dataset.samples, f"{counted(value, 'epoch')} of {model.dataset.name}")
    if tokens is not None:
        if tokens_per_sample is None:
            raise SpecError(f"tokens: samples of model {model.name} are not counted in tokens; state samples")
        return Amount(value / tokens_per_sample, counted(round(value), "token"))
    return Amount(value, counted(value, "sample"))


def _number(name: str, value: HowMany) -> float:
    """An amount as a number: ``15T`` is 15e12."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return parse(value, "count") if isinstance(value, str) else plain_numbers(value) + 0
    except (SpecError, TypeError):
        raise SpecError(f"{name}: {value!r:.80}: expected a number, or a text such as 1M or 15T") from None


def stated_amount(
    model: ModelSpec,
    run: Run,
    *,
    epochs: HowMany | None = None,
    samples: HowMany | None = None,
    tokens: HowMany | None = None,
) -> Amount | None:
    """As `amount`, with the tokens of a sample as the network under the run's ``model`` parameters has them."""
    tokens_of_sample = None if tokens is None else build(model, batch=1, overrides=run.model).tokens_per_sample
    return amount(model, epochs=epochs, samples=samples, tokens=tokens, tokens_per_sample=tokens_of_sample)


def usual_amount(model: ModelSpec) -> Amount:
    """One epoch, or a million samples without a data set."""
    epoch = amount(model, epochs=1) if model.dataset is not None else None
    return epoch or Amount(MEGA, "1 million samples")


@dataclass(frozen=True, slots=True)
class Training:
    """Time [s], price [USD, None where no price is known] and energy [J] of an amount of training on one configuration.

    ``energy`` is modelled from the work done (see ``paleo.studies.cost``), ``energy_limit`` is every GPU at its design
    power all the time. ``interval`` are the ends of the 90 % interval of ``time``; cost and energy scale with it.
    ``goodput``: with failures, where they are counted; all figures then hold what they cost.
    """

    amount: Amount
    samples: float
    steps: int
    time: float
    interval: tuple[float, float]
    price_per_s: float | None
    price: Price | None
    energy: float | None
    energy_limit: float | None
    tariff: Tariff
    goodput: Goodput | None = None

    @property
    def rent(self) -> float | None:
        """USD for the use of the machines."""
        return None if self.price_per_s is None else self.price_per_s * self.time

    @property
    def electricity(self) -> float | None:
        """USD for energy, where the tariff has a price of it; the rents of the catalog hold it already."""
        stated = self.price is None or self.price.date == "as stated"
        if (self.tariff.rented and not stated) or self.energy is None or self.tariff.electricity is None:
            return None
        return self.energy * self.tariff.electricity

    @property
    def cost(self) -> float | None:
        """USD in all: rent, electricity or both, whichever has a price."""
        parts = [part for part in (self.rent, self.electricity) if part is not None]
        return sum(parts) if parts else None

    @property
    def price_per_hour(self) -> float | None:
        return None if self.price_per_s is None else self.price_per_s * HOUR

    @property
    def energy_kwh(self) -> float | None:
        return None if self.energy is None else self.energy / JOULES_PER_KWH

    @property
    def energy_limit_kwh(self) -> float | None:
        return None if self.energy_limit is None else self.energy_limit / JOULES_PER_KWH


def training(
    prediction: Prediction, amount: Amount, tariff: Tariff | None = None, *, critical_batch: float | None = None,
    long_run: LongRunOptions | None = None,
) -> Training:  # fmt: skip
    """What an amount of training takes; whole nodes are paid for, each step is a whole step. Under a consistency model
    a step is what all workers take to see the global batch once. With a ``long_run`` failures, checkpoints and spare
    nodes are counted, too.

    Raises CapacityError where such a run never finishes.
    """
    terms, plan = tariff or Tariff(), prediction.plan
    needed = amount.needs(prediction) if amount.needs is not None else _need(prediction, amount, critical_batch)
    work, (low, high) = needed.seconds, needed.interval
    rate, price = rent(prediction.system, plan.gpus, terms)
    failing = None if long_run is None else goodput_of(prediction, work, long_run)
    seconds = work if failing is None else failing.finish
    if failing is not None:
        early, late = failing.finish_interval
        low, high = low + early - work, high + late - work
    if rate is not None and long_run is not None and long_run.spares:
        rate *= 1.0 + long_run.spares / nodes_of(prediction.system, plan.gpus)
    watts = prediction.system.device.tdp
    limit = None if watts is None else (watts + (terms.host_power or 0.0)) * terms.pue * plan.gpus * seconds
    joules = energy(prediction, seconds, terms)
    steps = math.ceil(needed.samples / plan.global_batch)
    return Training(
        amount,
        needed.samples,
        steps=steps,
        time=seconds,
        interval=(low, high),
        price_per_s=rate,
        price=price,
        energy=joules,
        energy_limit=limit,
        tariff=terms,
        goodput=failing,
    )


def _need(prediction: Prediction, amount: Amount, critical_batch: float | None) -> Need:
    """Whole steps that see a fixed amount of samples."""
    batch = prediction.plan.global_batch
    samples = samples_to_target(samples=amount.samples, global_batch=batch, critical_batch=critical_batch)
    work = math.ceil(samples / batch) * step_seconds(prediction)
    low, high = (end / prediction.step_time for end in prediction.interval)
    unsure = NINETY * amount.sigma
    ends = math.exp(-math.hypot(unsure, math.log(low))), math.exp(math.hypot(unsure, math.log(high)))
    return Need(samples, work, (work * ends[0], work * ends[1]))


def with_length(long_run: LongRunOptions | None, amount: Amount | None) -> LongRunOptions | None:
    """The options of a long run whose length is stated; SpecError where it is not."""
    if long_run is not None and amount is None:
        raise SpecError("--goodput: how long the run is has to be stated: --tokens, --samples, --epochs or --target")
    return long_run


def rent(system: System, gpus: int, tariff: Tariff | None = None) -> tuple[float | None, Price | None]:
    """USD per second for the nodes that hold ``gpus`` devices (else for the devices), and the price it is made of.

    What the tariff states comes first; then machines that are bought; then the price in the system's own file, for
    machines rented on demand; then the dated price lists, `paleo.specs.prices`. Where electricity has a price a system
    that nobody offers is taken to be one's own: it has no rent.
    """
    terms = tariff or Tariff()
    stated = terms.gpu_prices.get(system.name, terms.gpu_price)
    if stated is not None:
        source = f"{stated * HOUR:.4g} USD an hour for each GPU"
        price = Price.model_construct(rate=stated, date="as stated", source=source)
        return stated * gpus, price
    if terms.years is not None:
        return _written_off(system, gpus, terms.years)
    offer = rented(system, gpus, terms.term)
    if offer is None or (terms.electricity is not None and not (offer[2] or terms.market)):
        return None, None
    return offer[0], offer[1]


def side_by_side(tariff: Tariff, systems: Iterable[System]) -> Tariff:
    """The tariff for systems whose costs are compared: where one of them has a rent, those of the market are rents,
    too, so that no bill of electricity alone stands beside a rent."""
    hired = any(rent(system, 1, tariff)[0] is not None for system in systems)
    return tariff.model_copy(update={"market": True}) if hired else tariff


def _written_off(system: System, gpus: int, seconds: float) -> tuple[float | None, Price | None]:
    """USD per second of machines that are bought, their price spread evenly over so long a time."""
    quote = purchase_quote(system)
    if quote is None:
        return None, None
    rate = quote.value / seconds
    purchase = f"bought at {quote.value:,.0f} USD for each GPU, written off over {seconds / YEAR:.3g} years"
    source = f"{purchase}; {quote.price.source}"
    return rate * gpus, quote.price.model_copy(update={"rate": rate, "source": source})
