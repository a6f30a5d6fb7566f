"""``paleo summary``: a network layer by layer."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import PREDICT, app, draw, picture_path, show_document
from paleo.cli.options import AsJson, ModelName, Plot, RunOptions, completes, takes_run
from paleo.errors import SpecError

Roofline = Annotated[
    str | None,
    typer.Option(
        "--system",
        metavar="S",
        help="Whose roofline --plot draws, in the format that it trains in.",
        autocompletion=completes("systems", "devices"),
    ),
]


@app.command(rich_help_panel=PREDICT)
@takes_run
def summary(
    model: ModelName,
    options: RunOptions,
    system: Roofline = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """A network layer by layer: shape, parameters, FLOP, bytes, intensity, saved activations.

    \b
    paleo summary resnet50 --batch 32
    paleo summary gpt2 --seq 1024 --system dgx-h100 --plot roofline.png
    """
    from paleo.report import documents, tables
    from paleo.specs.model import load_model
    from paleo.specs.system import load_system
    from paleo.studies.summary import summarise

    path = picture_path(plot)
    if path is not None and system is None:
        raise SpecError("--plot: a roofline is that of a device; name it with --system")
    run = options.run()
    machine = None if system is None else load_system(system)
    study = summarise(load_model(model), run, machine)
    if path is not None and machine is not None:
        from paleo.report import plots

        draw(path, lambda: plots.roofline(study, machine, run))
    show_document(lambda: documents.summary(study), lambda: tables.summary(study), as_json)
