"""``paleo summary``: counts a network layer by layer."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import PREDICT_HELP_GROUP, app, print_result, save_plot
from paleo.cli.options import SYSTEMS_AND_DEVICES, JsonOption, ModelName, PlotFileOption, RunOptions
from paleo.errors import SpecError


@app.command(rich_help_panel=PREDICT_HELP_GROUP)
def summary(
    model: ModelName,
    options: RunOptions,
    system: Annotated[str | None, typer.Option(autocompletion=SYSTEMS_AND_DEVICES)] = None,
    as_json: JsonOption = False,
    plot: PlotFileOption = None,
) -> None:
    """Count a network layer by layer: shapes, parameters, FLOP, bytes, arithmetic intensity, saved activations.

    \b
    paleo summary resnet50 --batch 32
    paleo summary gpt2 --seq 1024 --system dgx-h100 --plot roofline.png

    Parameters
    ----------
    system : S
        System or device whose roofline --plot draws.
    """
    from paleo.report.catalog import summary_document, summary_table
    from paleo.specs.model import load_model
    from paleo.specs.system import load_system
    from paleo.studies.network_summary import summarise_network

    if plot is not None and system is None:
        raise SpecError("--plot: a roofline needs a device; name one with --system")
    run = options.build_run()
    machine = None if system is None else load_system(system)
    study = summarise_network(load_model(model), run, machine)
    save_plot(plot, lambda plots: plots.plot_roofline(study, machine, run))
    print_result(lambda: summary_document(study), lambda: summary_table(study), as_json)
