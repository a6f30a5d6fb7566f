"""``paleo validate``: predictions against measured tables."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import MEASURE, app, finish
from paleo.cli.options import AsJson, Plot

Tables = Annotated[list[str], typer.Argument(metavar="FILE…", help="Measured tables, CSV or CSV.gz.")]


@app.command(rich_help_panel=MEASURE)
def validate(
    files: Tables,
    as_json: AsJson = False,
    predictions: Annotated[
        str | None, typer.Option(metavar="F.csv", help="Write the rows with predicted, low and high.")
    ] = None,
    plot: Plot = None,
    calibration: Annotated[
        str | None, typer.Option(help="Price devices by this calibration file, where it has them. [auto]")
    ] = None,
    worst: Annotated[int, typer.Option(min=0, help="How many of the worst rows to show.")] = 5,
) -> None:
    """Predictions against measured tables: errors by device and source, beside a roofline.

    \b
    paleo validate gemm.csv
    paleo validate steps.csv --predictions rows.csv --plot parity.png
    """
    from paleo.validate.command import validate as run_validation

    finish(
        run_validation(files, as_json=as_json, predictions=predictions, plot=plot, calibration=calibration, worst=worst)
    )
