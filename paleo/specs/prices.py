"""Dated price lists: what providers ask for a machine by the hour, and what machines and devices were sold for.

An offer names the device, how many of them are in one instance, and for which term. A system of the catalog is priced
by offers of the very system, else by what the market asks for its device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Literal, get_args

from paleo.errors import SpecError, near
from paleo.specs.catalog import names, read_entry
from paleo.specs.device import Price
from paleo.specs.loading import PositiveCount, Spec, Text, validate
from paleo.units import HOUR, Dollars, PricePerSecond

if TYPE_CHECKING:
    from paleo.specs.system import System

#: How long a machine is taken for.
Term = Literal["on-demand", "1-year", "3-year", "spot"]
TERMS = get_args(Term)


class PriceOffer(Spec):
    """One line of a price list: ``rate`` of the instance with all its ``devices``, or the ``price`` it was sold for."""

    instance: Text
    device: Text
    devices: PositiveCount
    term: Literal["on-demand", "1-year", "3-year", "spot", "purchase"]
    rate: PricePerSecond | None = None
    price: Dollars | None = None
    system: Text | None = None
    region: Text | None = None
    date: Text
    source: Text
    notes: Text | None = None


class PriceList(Spec):
    """The offers of one provider."""

    name: Text
    full_name: Text
    source: Text
    offers: tuple[PriceOffer, ...]


@cache
def price_list(name: str) -> PriceList:
    """A list of the catalog."""
    path, data = read_entry("prices", name)
    return validate(PriceList, {"name": path.stem, **data}, path)


@dataclass(frozen=True, slots=True)
class Quote:
    """The price of one device: ``value`` in USD/s for a rent, in USD for a purchase; the number of ``offers``; and
    whether they are for this system (else for its device, on the market)."""

    value: float
    offers: tuple[tuple[str, PriceOffer], ...]
    exact: bool

    @property
    def price(self) -> Price:
        """As a price of the catalog, for one device."""
        provider, first = self.offers[0]
        source = f"{provider}, {first.instance}: {first.source}"
        if not self.exact:
            source = f"{self._market}: {source}"
        if first.term not in ("on-demand", "purchase"):
            source = f"{first.term}, {source}"
        return Price.model_construct(rate=self.value, date=first.date, source=source)

    @property
    def _market(self) -> str:
        """What the value is of several offers of a device."""
        device, count = self.offers[0][1].device, len(self.offers)
        if count == 1:
            return f"the only offer of {device}"
        sold = [offer.price / offer.devices for _, offer in self.offers if offer.price is not None]
        hourly = [HOUR * offer.rate / offer.devices for _, offer in self.offers if offer.rate is not None]
        unit, prices = ("USD/h", hourly) if hourly else ("USD", sold)
        low, high = (f"{price:,.5g}" if price >= 1000 else f"{price:.3g}" for price in (min(prices), max(prices)))
        return f"median of {count} providers of {device}, {low} to {high} {unit}, the nearest"


def offers(system: System, term: str) -> tuple[list[tuple[str, PriceOffer]], bool]:
    """Offers of a term with their providers for this system, or, False, for machines with its device."""
    term_offers = [(name, offer) for name in names("prices") for offer in price_list(name).offers if offer.term == term]
    exact = [(name, offer) for name, offer in term_offers if offer.system == system.name]
    if exact:
        return exact, True
    device_offers = [(name, offer) for name, offer in term_offers if offer.device == system.device.name]
    whole = [(name, offer) for name, offer in device_offers if offer.devices == system.devices_per_node]
    return whole or device_offers, False


def term_named(text: str) -> Term:
    """A term of a rent; SpecError names the nearest."""
    for term in TERMS:
        if term == text:
            return term  # type: ignore[no-any-return]
    raise SpecError(f"term {text!r}: expected {', '.join(TERMS)}; {near(text, TERMS)}")


def rent_quote(system: System, term: Term) -> Quote | None:
    """Rent of one device: the lowest of the system's own offers, else the median of what each provider asks at least
    for the device; None where no list has one."""
    market, exact = offers(system, term)
    rates = [(offer.rate / offer.devices, name, offer) for name, offer in market if offer.rate is not None]
    return _quote(rates if exact else _lowest_of_each_provider(rates), exact)


def _lowest_of_each_provider(rates: Iterable[tuple[float, str, PriceOffer]]) -> list[tuple[float, str, PriceOffer]]:
    """A provider with many regions, dates or instances is one voice on the market: its lowest offer."""
    lowest: dict[str, tuple[float, str, PriceOffer]] = {}
    for row in rates:
        if row[1] not in lowest or row[0] < lowest[row[1]][0]:
            lowest[row[1]] = row
    return list(lowest.values())


def rented(system: System, gpus: int, term: Term = "on-demand") -> tuple[float, Price, bool] | None:
    """USD per second for the machines that hold ``gpus`` devices (a device's own price is for each), the price it is
    made of, and whether it is for the very system; None where nobody offers it.

    The price in the system's or the device's file comes first, for machines rented on demand; then the price lists.
    """
    if term == "on-demand" and system.price_per_node is not None:
        return system.price_per_node.rate * math.ceil(gpus / system.devices_per_node), system.price_per_node, True
    if term == "on-demand" and system.device.price is not None:
        return system.device.price.rate * gpus, system.device.price, True
    quote = rent_quote(system, term)
    if quote is None:
        return None
    return quote.value * paid_devices(system, gpus), quote.price, quote.exact


def devices_per_machine(system: System) -> int:
    """Devices of the smallest machine that is rented: a node, or one of the hosts that an NVLink domain joins."""
    return system.devices_per_host or system.devices_per_node


def paid_devices(system: System, gpus: int) -> int:
    """Devices of the whole machines that hold ``gpus`` of them."""
    machine_size = devices_per_machine(system)
    return math.ceil(gpus / machine_size) * machine_size


def purchase_quote(system: System) -> Quote | None:
    """Price of one device with its share of the machine where whole machines were sold, else of the bare device."""
    sold, exact = offers(system, "purchase")
    return _quote(
        [(offer.price / offer.devices, name, offer) for name, offer in sold if offer.price is not None], exact
    )


def _quote(values: list[tuple[float, str, PriceOffer]], exact: bool) -> Quote | None:
    if not values:
        return None
    prices = [value for value, _, _ in values]
    value = min(prices) if exact else median(prices)
    nearest = sorted(values, key=lambda row: abs(row[0] - value))
    return Quote(value, tuple((name, offer) for _, name, offer in nearest), exact)
