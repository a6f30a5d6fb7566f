"""Options of a whole training: its length, prices, and what is made small."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from paleo.cli.options import packs
from paleo.errors import SpecError

if TYPE_CHECKING:
    from paleo.studies.cost import Tariff


def count(text: str) -> float:
    """A number of samples or tokens, perhaps with a prefix: ``15T``."""
    from paleo.units import parse

    try:
        return parse(text, "count")
    except SpecError as error:
        raise typer.BadParameter(str(error)) from None


Epochs = Annotated[float | None, typer.Option(help="Time, rent and energy of so many epochs of the data set.")]
Samples = Annotated[
    float | None, typer.Option(parser=count, metavar="N", help="The same for so many samples: 4M or 4000000.")
]
Tokens = Annotated[float | None, typer.Option(parser=count, metavar="N", help="The same for so many tokens: 15T.")]
GpuPrice = Annotated[
    str | None,
    typer.Option(
        "--price",
        metavar="RATE",
        help="Rent of one GPU: '2.5 USD/h', or by system in USD an hour: A=2.1,B=1.3. [catalog and price lists]",
    ),
]
RentTerm = Annotated[
    str, typer.Option("--term", metavar="TERM", help="Rented on-demand, 1-year, 3-year or spot (dated price lists).")
]
Bought = Annotated[
    float | None,
    typer.Option("--buy", metavar="YEARS", help="Machines are bought and written off over so many years. [rented]"),
]
Electricity = Annotated[str | None, typer.Option(metavar="RATE", help="Price of energy: '0.12 USD/kWh'. [not counted]")]
Pue = Annotated[float | None, typer.Option(help="Energy of the building over that of its machines. [1]")]
HostPower = Annotated[
    str | None, typer.Option(metavar="POWER", help="Of the host, for each GPU: '150 W'. [not counted]")
]
RankBy = Annotated[str | None, typer.Option("--objective", help="Best first by time, cost or energy.")]


@dataclass(frozen=True, kw_only=True)
class TariffOptions:
    """What is paid beside the catalog's rent, for the commands that price a training."""

    price: GpuPrice = None
    electricity: Electricity = None
    pue: Pue = None
    host_power: HostPower = None
    term: RentTerm = "on-demand"
    buy: Bought = None

    def tariff(self) -> Tariff:
        """The tariff that the options describe; SpecError names the option that is wrong."""
        from paleo.studies.cost import stated_tariff

        return stated_tariff(**asdict(self))


#: Those options, in the argument ``rates``.
takes_tariff = packs("rates", TariffOptions)
