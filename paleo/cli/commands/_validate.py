"""``paleo validate``: compares predictions with measured tables."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import MEASURE_HELP_GROUP, app, print_result, save_plot
from paleo.cli.options import JsonOption, PlotFileOption


@app.command(rich_help_panel=MEASURE_HELP_GROUP)
def validate(
    files: Annotated[list[str], typer.Argument()],
    as_json: JsonOption = False,
    predictions: str | None = None,
    plot: PlotFileOption = None,
    calibration: str | None = None,
    worst: Annotated[int, typer.Option(min=0)] = 5,
) -> None:
    """Compare predictions with measured tables: errors by device and source, and those of a plain roofline.

    \b
    paleo validate gemm.csv
    paleo validate steps.csv --predictions rows.csv --plot parity.png

    Parameters
    ----------
    files : FILE…
        Measured tables: .csv or .csv.gz.
    predictions : F.csv
        Also write the rows with columns predicted, low and high.
    calibration
        Calibration file to use instead of the catalog's. [auto]
    worst
        Number of rows with the largest errors to print.
    """
    from paleo.files import check_output_path
    from paleo.questions import validate as answered
    from paleo.tables.validation_report import prediction_plot, write_predictions

    rows = None if predictions is None else check_output_path(predictions, (".csv", ".csv.gz"), option="--predictions")
    answer = answered(files, calibration=calibration)
    if rows is not None:
        write_predictions(rows, answer.reports)
    save_plot(plot, lambda _: prediction_plot(answer.reports))
    print_result(answer.json_document, lambda: answer.table(worst=worst), as_json)
