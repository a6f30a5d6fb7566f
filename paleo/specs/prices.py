"""Dated price lists: hourly rents of cloud instances, and purchase prices of machines and devices.

An offer names the device, the number of devices in an instance, and the term. A system of the catalog is priced by
offers of the same system if there are any, else by market prices of its device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Literal, get_args

from paleo.errors import SpecError, suggest_names
from paleo.specs.catalog import entry_files, entry_names, load_entry
from paleo.specs.device import Price
from paleo.specs.loading import NonEmptyText, PositiveCount, Spec
from paleo.specs.system import Reliability, System, load_system
from paleo.units import DAY, HOUR, KILO, Dollars, PricePerSecond

#: Terms for which a machine can be rented.
RentalTerm = Literal["on-demand", "1-year", "3-year", "spot"]
_RENTAL_TERMS = get_args(RentalTerm)


class PriceOffer(Spec):
    """One line of a price list: a rented or sold instance with its number of ``devices``.

    ``rate`` is the rent of the whole instance [USD/s]; ``price`` is its price if it was sold [USD].
    """

    instance: NonEmptyText
    device: NonEmptyText
    devices: PositiveCount
    term: Literal["on-demand", "1-year", "3-year", "spot", "purchase"]
    rate: PricePerSecond | None = None
    price: Dollars | None = None
    system: NonEmptyText | None = None
    region: NonEmptyText | None = None
    date: NonEmptyText
    source: NonEmptyText
    notes: NonEmptyText | None = None


class PriceList(Spec):
    """Offers of one provider (a cloud or a shop), with dates and sources."""

    name: NonEmptyText
    full_name: NonEmptyText
    source: NonEmptyText
    offers: tuple[PriceOffer, ...]


@cache
def load_price_list(name: str) -> PriceList:
    """Load a price list of the catalog.

    Parameters
    ----------
    name : str
        Name of the list, which is the provider's name.

    Returns
    -------
    PriceList
        Offers of the provider.
    """
    return load_entry(PriceList, "prices", name)


@dataclass(frozen=True, slots=True)
class DevicePriceQuote:
    """Price of one device, with the offers from which the price is derived.

    ``device_price`` is in USD/s for a rent, in USD for a purchase. ``is_same_system`` is True if the offers are for the
    same system, False if they are only for the same device.
    """

    device_price: float
    offers: tuple[tuple[str, PriceOffer], ...]
    is_same_system: bool

    @property
    def price(self) -> Price:
        """Price of one device as a `Price`, with source and date of the offer nearest to it."""
        provider, first = self.offers[0]
        source = f"{provider}, {first.instance}: {first.source}"
        if not self.is_same_system:
            source = f"{self._market}: {source}"
        if first.term not in ("on-demand", "purchase"):
            source = f"{first.term}, {source}"
        return Price.model_construct(rate=self.device_price, date=first.date, source=source)

    @property
    def _market(self) -> str:
        """Text that says how the price is derived: from the only offer, or as the median of several."""
        device, count = self.offers[0][1].device, len(self.offers)
        if count == 1:
            return f"the only offer of {device}"
        sold = [offer.price / offer.devices for _, offer in self.offers if offer.price is not None]
        hourly = [HOUR * offer.rate / offer.devices for _, offer in self.offers if offer.rate is not None]
        unit, prices = ("USD/h", hourly) if hourly else ("USD", sold)
        low, high = (f"{price:,.5g}" if price >= 1000 else f"{price:.3g}" for price in (min(prices), max(prices)))
        return f"median of {count} providers of {device}, {low} to {high} {unit}, the nearest"


def _find_offers(system: System, term: str) -> tuple[list[tuple[str, PriceOffer]], bool]:
    """Find the offers of all price lists for a system under a rental term.

    Parameters
    ----------
    system : System
        System to rent or buy.
    term : str
        Term of a rent, or ``purchase``.

    Returns
    -------
    tuple[list[tuple[str, PriceOffer]], bool]
        Pairs of provider and offer, and True if they are for this very system. Otherwise they are for machines with the
        same device, whole nodes preferred.
    """
    offers = [(name, offer) for name in entry_names("prices") for offer in load_price_list(name).offers]
    term_offers = [(name, offer) for name, offer in offers if offer.term == term]
    exact = [(name, offer) for name, offer in term_offers if offer.system == system.name]
    if exact:
        return exact, True
    device_offers = [(name, offer) for name, offer in term_offers if offer.device == system.device.name]
    whole = [(name, offer) for name, offer in device_offers if offer.devices == system.devices_per_node]
    return whole or device_offers, False


def parse_rental_term(text: str) -> RentalTerm:
    """Return the rental term (on-demand, spot, …) that a text names.

    Parameters
    ----------
    text : str
        Term as the user wrote it.

    Returns
    -------
    RentalTerm
        Valid term.

    Raises
    ------
    SpecError
        If there is no such term; the message names the nearest.
    """
    for term in _RENTAL_TERMS:
        if term == text:
            return term  # type: ignore[no-any-return]
    raise SpecError(f"term {text!r}: expected {', '.join(_RENTAL_TERMS)}; {suggest_names(text, _RENTAL_TERMS)}")


def rent_quote(system: System, term: RentalTerm) -> DevicePriceQuote | None:
    """Return the rent of one device of a system, from the price lists.

    The rent is the lowest among offers of this very system, else the median over providers of the lowest offer of each
    for the device.

    Parameters
    ----------
    system : System
        System to rent.
    term : RentalTerm
        Term of the rent.

    Returns
    -------
    DevicePriceQuote, optional
        Rent in USD/s and where it comes from; None if no list has an offer.
    """
    market, exact = _find_offers(system, term)
    rates = [(offer.rate / offer.devices, name, offer) for name, offer in market if offer.rate is not None]
    return _quote(rates if exact else _lowest_of_each_provider(rates), exact)


def _lowest_of_each_provider(rates: Iterable[tuple[float, str, PriceOffer]]) -> list[tuple[float, str, PriceOffer]]:
    """Return the lowest offer of each provider as (rate, provider, offer), so that a median counts providers once."""
    lowest: dict[str, tuple[float, str, PriceOffer]] = {}
    for row in rates:
        if row[1] not in lowest or row[0] < lowest[row[1]][0]:
            lowest[row[1]] = row
    return list(lowest.values())


def machine_rent(system: System, gpus: int, term: RentalTerm = "on-demand") -> tuple[float, Price, bool] | None:
    """Return the rent of the machines that a run occupies.

    For on-demand rents, a price in the file of the system or device takes precedence over the price lists.

    Parameters
    ----------
    system : System
        System to rent.
    gpus : int
        Devices of the run. Prices per node count whole nodes; prices per device count devices.
    term : RentalTerm, optional
        Rental term.

    Returns
    -------
    tuple[float, Price, bool], optional
        Rent of all machines [USD/s], price of one device or node, and True if the price is for this very system. None
        if no price is known.
    """
    devices = billed_devices(system, gpus).devices
    if term == "on-demand" and system.price_per_node is not None:
        return system.price_per_node.rate * devices / system.devices_per_node, system.price_per_node, True
    if term == "on-demand" and system.device.price is not None:
        return system.device.price.rate * devices, system.device.price, True
    quote = rent_quote(system, term)
    return None if quote is None else (quote.device_price * devices, quote.price, quote.is_same_system)


@dataclass(frozen=True, slots=True)
class BilledDevices:
    """Devices that are paid for, as machines are rented whole.

    ``devices`` is the number of all devices, ordered as ``machine_count`` machines; ``machine_noun`` says what a
    machine is ("node", "tray", "slice" or "GPU").
    """

    devices: int
    machine_count: int
    machine_noun: str


#: Largest TPU slice whose number of chips must be a power of two. Larger slices of a three-dimensional torus are
#: multiples of a cube of 4 x 4 x 4 chips (Google Cloud, TPU v4 and v5p configurations).
_CUBE = 64


def billed_devices(system: System, gpus: int) -> BilledDevices:
    """Return the number of devices that must be rented for a run, since machines are rented whole.

    Parameters
    ----------
    system : System
        Machine type: nodes are rented whole, multi-host NVLink domains by trays, TPUs by slices.
    gpus : int
        Devices that the run uses.

    Returns
    -------
    BilledDevices
        Devices and machines that are paid for.

    Examples
    --------
    >>> from paleo.specs.system import load_system
    >>> gpus, tpus = load_system("aws-p4d.24xlarge"), load_system("tpu-v5p-pod")
    >>> billed_devices(gpus, 12).devices, billed_devices(tpus, 24).devices
    (16, 32)
    """
    size = devices_per_machine(system)
    if system.device.kind == "tpu":
        size = max(size, 1 << (gpus - 1).bit_length())
        cube = any(level.topology == "torus" and len(level.shape or ()) == 3 for level in system.levels)
        size, unit = (_CUBE if cube and size > _CUBE else size), "slice"
    else:
        unit = "tray" if system.devices_per_host else "node" if size > 1 else "GPU"
    units = math.ceil(gpus / size)
    return BilledDevices(units * size, 1 if unit == "slice" else units, unit)


def devices_per_machine(system: System) -> int:
    """Return the number of devices in the smallest machine that can be rented.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.

    Returns
    -------
    int
        Devices of a node, or of one host where an NVLink domain joins several.
    """
    return system.devices_per_host or system.devices_per_node


def purchase_quote(system: System) -> DevicePriceQuote | None:
    """Return the purchase price of one device of a system, from the price lists.

    Parameters
    ----------
    system : System
        System to buy.

    Returns
    -------
    DevicePriceQuote, optional
        Price in USD: the device's share of a whole machine if such machines were sold, else of a bare device. None if
        no list has a price.
    """
    sold, exact = _find_offers(system, "purchase")
    prices = [(offer.price / offer.devices, name, offer) for name, offer in sold if offer.price is not None]
    return _quote(prices, exact)


def _quote(values: list[tuple[float, str, PriceOffer]], exact: bool) -> DevicePriceQuote | None:
    if not values:
        return None
    prices = [value for value, _, _ in values]
    value = min(prices) if exact else median(prices)
    nearest = sorted(values, key=lambda row: abs(row[0] - value))
    return DevicePriceQuote(value, tuple((name, offer) for _, name, offer in nearest), exact)


# Failure rates of nodes come from the system's file, else from similar systems

#: Between RSC-2 (2.3) and OPT-175B (16.1 failures per thousand node-days); near Llama 3 (3.8) and BLOOM (3.0).
DEFAULT_RELIABILITY = Reliability.model_construct(
    failures=4.0 / (KILO * DAY),
    low=2.0 / (KILO * DAY),
    high=16.0 / (KILO * DAY),
    source="the usual rate of GPU clusters: published runs lie between 2.3 and 16 per thousand node-days",
)


def system_reliability(system: System) -> Reliability:
    """Return the failure rate of a system's nodes, from its file or from the most similar systems with a known rate.

    The order is: the system's file, catalog systems with the same device, systems with a device of the same
    architecture, `DEFAULT_RELIABILITY`. An inherited rate is the geometric mean of the known rates. Its range encloses
    all of them and the default rate, because clusters of one kind of machine differ as much as clusters of different
    kinds.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.

    Returns
    -------
    Reliability
        Failures per node and second, with a 90 % range.
    """
    if system.reliability is not None:
        return system.reliability
    known = _systems_with_failures()
    for relatives, words in (
        ([other for other in known if other.device.name == system.device.name], system.device.name),
        ([other for other in known if other.device.architecture == system.device.architecture], "its architecture"),
    ):
        if relatives:
            stated = [system.reliability for system in relatives if system.reliability is not None]
            mean = math.exp(sum(math.log(entry.failures) for entry in stated) / len(stated))
            return Reliability.model_construct(
                failures=mean,
                low=min(DEFAULT_RELIABILITY.low, *(entry.low for entry in stated)),
                high=max(DEFAULT_RELIABILITY.high, *(entry.high for entry in stated)),
                source=f"of other systems with {words}: {', '.join(system.name for system in relatives)}",
            )
    return DEFAULT_RELIABILITY


@cache
def _systems_with_failures() -> list[System]:
    """Return the catalog systems whose files have a failure rate; other files are not parsed."""
    stating = [name for name, path in entry_files("systems").items() if "\nreliability:" in path.read_text("utf-8")]
    return [load_system(name) for name in stating]


def occupied_machines(system: System, gpus: int) -> int:
    """Count the machines (nodes, or hosts of a multi-host NVLink domain) that a job occupies.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    gpus : int
        Devices of the job.

    Returns
    -------
    int
        Number of machines.

    Examples
    --------
    >>> occupied_machines(load_system("dgx-h100"), 20), occupied_machines(load_system("gb200-nvl72"), 72)
    (3, 18)
    """
    return math.ceil(gpus / devices_per_machine(system))
