"""Options of a whole training: its length, prices, and what is made small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from paleo.errors import SpecError

if TYPE_CHECKING:
    from paleo.studies.comparison import Objective
    from paleo.studies.cost import Tariff

Epochs = Annotated[float | None, typer.Option(help="Time, rent and energy of so many epochs of the data set.")]
Samples = Annotated[float | None, typer.Option(help="The same for so many samples.")]
Tokens = Annotated[float | None, typer.Option(help="The same for so many tokens.")]
GpuPrice = Annotated[
    str | None, typer.Option("--price", metavar="RATE", help="Rent of one GPU: '2.5 USD/h'. [catalog]")
]
Electricity = Annotated[str | None, typer.Option(metavar="RATE", help="Price of energy: '0.12 USD/kWh'. [not counted]")]
Pue = Annotated[float | None, typer.Option(help="Energy of the building over that of its machines. [1]")]
HostPower = Annotated[
    str | None, typer.Option(metavar="POWER", help="Of the host, for each GPU: '150 W'. [not counted]")
]
RankBy = Annotated[str | None, typer.Option("--objective", help="Best first by time, cost or energy.")]


def tariff(price: str | None, electricity: str | None, pue: float | None, host_power: str | None) -> Tariff:
    """What is paid beside the catalog's rent."""
    from paleo.specs.loading import validate
    from paleo.studies.cost import Tariff

    stated = {"gpu_price": price, "electricity": electricity, "pue": pue, "host_power": host_power}
    return validate(Tariff, {key: value for key, value in stated.items() if value is not None}, "options")


def objective_named(text: str | None, default: Objective) -> Objective:
    """What --objective says, or the default; SpecError names the nearest."""
    from paleo.errors import near
    from paleo.studies.comparison import Objective

    for objective in get_args(Objective):
        if objective == (text or default):
            return cast("Objective", objective)
    raise SpecError(f"--objective {text!r} is not time, cost or energy; {near(str(text), get_args(Objective))}")
