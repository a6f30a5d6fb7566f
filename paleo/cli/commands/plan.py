"""``paleo plan``: the best strategies of all."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import DECIDE, NO, app
from paleo.cli.options import AsJson, Counts, ModelName, Plot, RunOptions, SystemName, gpu_counts, takes_run
from paleo.cli.output import draw, picture_path, show_document
from paleo.errors import SpecError

Goal = Annotated[str, typer.Option(help="What is made small: time, cost, energy, or gpus.")]
Top = Annotated[int, typer.Option(min=1, metavar="K", help="So many plans.")]
Explain = Annotated[bool, typer.Option("--explain", help="Why the winner wins, and how near the next one is.")]
PerLayer = Annotated[bool, typer.Option("--per-layer", help="Choose the split of each layer, for chains of layers.")]


@app.command("plan", rich_help_panel=DECIDE)
@takes_run
def plan_(
    model: ModelName,
    system: SystemName,
    gpus: Counts,
    options: RunOptions,
    objective: Goal = "time",
    top: Top = 10,
    explain: Explain = False,
    per_layer: PerLayer = False,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """The fastest (or cheapest) strategies of all: degrees, microbatch, recomputation, ZeRO, schedule.

    Options of a run that are given narrow the search: --strategy tp=8 tries tp=8 alone.
    """
    from paleo.report import search as shown
    from paleo.search import plans, space
    from paleo.specs.hardware import load_system
    from paleo.specs.model import load_model

    path = picture_path(plot)
    counts, network, machine = gpu_counts(gpus), load_model(model), load_system(system)
    run = options.run(gpus=counts[0], strategy="dp")
    if per_layer and path is not None:
        raise SpecError("--plot draws plans of whole networks; leave out --per-layer")
    if per_layer:
        from paleo.search import hybrid

        split = hybrid.hybrid(network, machine, run)
        names = network.name, machine.name
        show_document(lambda: shown.hybrid_document(*names, split), lambda: shown.hybrid_table(*names, split), as_json)
        return
    fields_of = {"microbatches": "microbatch", "recompute": "recompute", "schedules": "schedule"}
    fixed = {listed: options.stated(name) for listed, name in fields_of.items()}
    narrowed = space.within(options.stated("strategy"), **fixed)
    ranking = plans.search(network, machine, run, counts=counts, space=narrowed, objective=objective, top=top)
    best = plans.explain(network, machine, ranking) if explain else None
    names = network.name, machine.name
    if path is not None:
        from paleo.report import plots

        draw(path, lambda: plots.plan(*names, ranking, machine.device.memory.capacity))
    show_document(lambda: shown.document(*names, ranking, best), lambda: shown.table(*names, ranking, best), as_json)
    if not ranking.fitting:
        raise typer.Exit(NO)
