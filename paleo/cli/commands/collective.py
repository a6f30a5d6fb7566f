"""``paleo collective``: every algorithm for a collective operation."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import PREDICT, app
from paleo.cli.options import AsJson, Plot, SystemName, words
from paleo.cli.output import draw, picture_path, show_document
from paleo.errors import SpecError

#: Operations that the shell completes.
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
Operation = Annotated[
    str,
    typer.Argument(metavar="OP", help="all_reduce, all_gather, reduce_scatter, …", autocompletion=words(*OPERATIONS)),
]
Payload = Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Payload with its unit: 100MB, 64KiB.")]
Ranks = Annotated[int, typer.Option(help="Ranks of the group, neighbours on the system.")]
Calibration = Annotated[str, typer.Option(help="auto, ideal, ppp=0.6 or a calibration file.")]
Dtype = Annotated[str, typer.Option(help="Format of the elements; switches cannot add int8.")]


@app.command(rich_help_panel=PREDICT)
def collective(
    operation: Operation,
    system: SystemName,
    bytes_: Payload,
    ranks: Ranks,
    calibration: Calibration = "auto",
    dtype: Dtype = "bf16",
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Every algorithm for a collective operation: time, bandwidth, distance from the lower bound, cross-overs.

    \b
    paleo collective all_reduce --bytes 100MB --ranks 64 --system dgx-h100
    paleo collective all_to_all --bytes 1GB --ranks 16 --system dgx-a100-80gb --plot a2a.png
    """
    from paleo.report import documents, tables
    from paleo.specs.hardware import load_system
    from paleo.studies import collective as studies
    from paleo.units import parse

    path = picture_path(plot)
    try:
        payload = parse(bytes_, "bytes")
    except SpecError as error:
        raise SpecError(f"--bytes: {error}") from None
    study = studies.collective(
        operation.replace("-", "_"), payload, ranks, load_system(system), calibration=calibration, dtype=dtype
    )
    if path is not None:
        from paleo.report import plots

        draw(path, lambda: plots.collective(study))
    show_document(lambda: documents.collective(study), lambda: tables.collective(study), as_json)
