"""Dated price lists: every offer has its source, systems are priced by their own offers or by the market."""

from __future__ import annotations

import pytest

from paleo import load_system
from paleo.errors import SpecError
from paleo.specs.catalog import entry_names
from paleo.specs.prices import billed_devices, load_price_list, parse_rental_term, purchase_quote, rent_quote
from paleo.studies.cost import Tariff, rent_rate
from paleo.units import HOUR, SECONDS_PER_YEAR


@pytest.mark.parametrize("name", entry_names("prices"))
def test_offers_name_known_devices_and_one_price(name: str) -> None:
    for offer in load_price_list(name).offers:
        assert offer.device in entry_names("devices")
        assert (offer.rate is None) == (offer.term == "purchase") == (offer.price is not None)


def test_most_systems_have_a_dated_price() -> None:
    priced = [name for name in entry_names("systems") if rent_rate(load_system(name), 8)[0] is not None]
    assert len(priced) >= 42


def test_a_systems_own_offer_comes_before_the_market() -> None:
    quote = rent_quote(load_system("aws-p4d.24xlarge"), "3-year")
    assert quote is not None and quote.is_same_system
    assert quote.device_price * 8 * HOUR == pytest.approx(11.60)
    market = rent_quote(load_system("dgx-a100-80gb"), "1-year")
    assert market is not None and not market.is_same_system and "median" in market.price.source


def test_a_price_says_how_far_offers_differ_and_for_which_term() -> None:
    """H100s by the hour: the lowest and the highest offer stand beside the median; other terms are named."""
    system = load_system("dgx-h100")
    for term, start in (("on-demand", "median of"), ("spot", "spot, median of")):
        quote = rent_quote(system, parse_rental_term(term))
        assert quote is not None and quote.price.source.startswith(start)
        hourly = [HOUR * (offer.rate or 0.0) / offer.devices for _, offer in quote.offers]
        assert f" {min(hourly):.3g} to {max(hourly):.3g} USD/h, the nearest: " in quote.price.source
        assert min(hourly) <= quote.device_price * HOUR <= max(hourly)
    alone = rent_quote(load_system("l4-8gpu-100gbe"), "on-demand")
    assert alone is not None and alone.price.source.startswith("the only offer of l4: ")
    stated = rent_rate(system, 8, Tariff.model_validate({"gpu_price": "2.5 USD/h"}))[1]
    assert stated is not None and stated.source == "2.5 USD an hour for each GPU"


def test_a_provider_is_one_voice_on_the_market() -> None:
    """Four lists of one provider, three of another: H100s are not dearer than their successors for that."""
    quote = rent_quote(load_system("dgx-h100"), "on-demand")
    assert quote is not None
    providers = [name for name, _ in quote.offers]
    assert len(providers) == len(set(providers)) >= 5
    rates = [rent_rate(load_system(name), 8)[0] or 0.0 for name in ("dgx-h100", "dgx-h200", "dgx-b200")]
    assert 0 < rates[0] <= rates[1] <= rates[2]


def test_racks_of_one_device_cost_the_same_on_the_market() -> None:
    """An offer of a superchip is for its device, not for one maker's rack."""
    racks = [rent_rate(load_system(name), 72)[0] for name in ("gb200-nvl72", "nebius-gb200-nvl72", "azure-nd-gb200-v6")]
    assert racks[0] is not None and racks == pytest.approx(racks[:1] * 3, rel=0.01)


def test_longer_terms_and_spot_are_cheaper_on_the_same_machine() -> None:
    system = load_system("aws-p4de.24xlarge")
    rates = [rent_rate(system, 8, Tariff(term=term))[0] for term in ("on-demand", "1-year", "3-year", "spot")]
    assert rates == sorted(rates, reverse=True)


def test_bought_machines_are_written_off_and_pay_their_electricity() -> None:
    """A DGX A100 was listed at 167,000 USD, the lowest of its prices: over four years 4.76 USD an hour."""
    system = load_system("dgx-a100-80gb")
    quote = purchase_quote(system)
    assert quote is not None and quote.device_price * 8 == pytest.approx(167_000)
    rate, price = rent_rate(system, 8, Tariff.model_validate({"years": f"{4 * SECONDS_PER_YEAR} s"}))
    assert rate is not None and rate * HOUR == pytest.approx(167_000 / (4 * 365.25 * 24))
    assert price is not None and "written off over 4 years" in price.source


def test_prices_by_system_come_first() -> None:
    tariff = Tariff.model_validate({"gpu_prices": {"dgx-h100": "2 USD/h"}, "gpu_price": "3 USD/h"})
    assert rent_rate(load_system("dgx-h100"), 4, tariff)[0] == pytest.approx(16 / HOUR)  # a node of eight
    assert rent_rate(load_system("dgx-a100-80gb"), 12, tariff)[0] == pytest.approx(48 / HOUR)
    assert rent_rate(load_system("h100-sxm5-80gb"), 1, tariff)[0] == pytest.approx(3 / HOUR)


@pytest.mark.parametrize(
    ("system", "gpus", "devices", "unit"),
    [
        ("aws-p4d.24xlarge", 4, 8, "node"),
        ("dgx-2", 24, 32, "node"),
        ("azure-nd-gb200-v6", 70, 72, "tray"),
        ("tpu-v5p-pod", 3, 4, "slice"),
        ("tpu-v5p-pod", 96, 128, "slice"),  # cubes of 4 x 4 x 4
        ("tpu-v5e-pod", 96, 128, "slice"),
        ("rtx-4090", 3, 3, "GPU"),
    ],
)
def test_whole_units_are_billed(system: str, gpus: int, devices: int, unit: str) -> None:
    whole = billed_devices(load_system(system), gpus)
    assert (whole.devices, whole.machine_noun) == (devices, unit)


def test_unknown_terms_name_the_nearest() -> None:
    with pytest.raises(SpecError, match="nearest: 'spot'"):
        parse_rental_term("spott")


def test_trays_of_an_nvl72_are_rented_one_by_one() -> None:
    """GB200 NVL72 racks are rented by trays of four GPUs."""
    system = load_system("gb200-nvl72")
    each = rent_quote(system, "on-demand")
    assert each is not None
    paid = {gpus: rent_rate(system, gpus)[0] for gpus in (1, 4, 5, 8, 72)}
    assert paid == pytest.approx(
        {
            1: 4 * each.device_price,
            4: 4 * each.device_price,
            5: 8 * each.device_price,
            8: 8 * each.device_price,
            72: 72 * each.device_price,
        }
    )
