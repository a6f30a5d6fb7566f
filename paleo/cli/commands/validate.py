"""``paleo validate``: predictions against measured tables."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import MEASURE, app, draw, picture_path, show_document
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
    from paleo.files import checked_output
    from paleo.questions import validate as answered
    from paleo.validate.report import figure, write_predictions

    picture = picture_path(plot)
    rows = None if predictions is None else checked_output(predictions, (".csv", ".csv.gz"), option="--predictions")
    answer = answered(files, calibration=calibration)
    if rows is not None:
        write_predictions(rows, answer.reports)
    draw(picture, lambda: figure(answer.reports))
    show_document(answer.document, lambda: answer.table(worst=worst), as_json)
