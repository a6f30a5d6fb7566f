"""``paleo report``: a page that answers a purchase question."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paleo.cli.application import DECIDE, NO, app
from paleo.cli.options import (
    Epochs,
    LongRunFlags,
    ModelName,
    RankBy,
    RunOptions,
    Samples,
    Target,
    TariffOptions,
    Tokens,
    completes,
    takes_long_run,
    takes_run,
    takes_tariff,
)
from paleo.files import checked_output, write_text

Offered = Annotated[
    str,
    typer.Option(
        "--systems",
        metavar="A:8,B:16",
        help="Systems, each with its GPUs, else --gpus.",
        autocompletion=completes("systems", "devices"),
    ),
]
CriticalBatch = Annotated[
    float | None, typer.Option(help="Gradient noise scale in samples: large batches then need more. [not counted]")
]
OutputFile = Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="File to write.")]


@app.command(rich_help_panel=DECIDE)
@takes_run
@takes_tariff
@takes_long_run
def report(
    model: ModelName,
    systems: Offered,
    options: RunOptions,
    rates: TariffOptions,
    long_run: LongRunFlags,
    output: OutputFile = "report.html",
    epochs: Epochs = None,
    samples: Samples = None,
    tokens: Tokens = None,
    target: Target = None,
    objective: RankBy = None,
    counts: Annotated[str | None, typer.Option(metavar="1,2,4,…", help="GPU counts of the scaling curves.")] = None,
    mode: Annotated[str, typer.Option(help="Of the scaling curves: strong or weak.")] = "strong",
    critical_batch: CriticalBatch = None,
) -> None:
    """A page that answers a purchase question: one HTML file, self-contained. Without --strategy plans are searched.

    \b
    paleo report bert_large --systems aws-p4d.24xlarge:16,aws-p5.48xlarge:8 --samples 1M
    paleo report llama3-8b --systems dgx-h100:64 --tokens 1T --electricity "0.12 USD/kWh"
    """
    import datetime

    from paleo.questions import gpu_counts, of_any_software, planner_of, systems_with_counts
    from paleo.report.html import report as page
    from paleo.specs.model import load_model
    from paleo.studies import comparison
    from paleo.studies.learning import aimed
    from paleo.studies.scaling import scalings
    from paleo.studies.training import stated_amount, usual_amount

    path = checked_output(output, (".html", ".htm"))
    network, stated_run = load_model(model), of_any_software(options.run())
    run = (
        stated_run
        if "strategy" in stated_run.model_fields_set
        else stated_run.model_copy(update={"strategy": comparison.AUTO})
    )
    stated = stated_amount(network, run, epochs=epochs, samples=samples, tokens=tokens)
    offers = systems_with_counts(systems, run.gpus)
    run, amount = aimed(network, run, target, stated, [system for system, _ in offers])
    study = comparison.purchase(
        comparison.PurchaseRequest(
            network,
            offers,
            run=run,
            amount=amount or usual_amount(network),
            tariff=rates.tariff(),
            critical_batch=critical_batch,
            objective=comparison.objective_named(objective or "cost"),
            counts=tuple(gpu_counts(counts)) if counts is not None else (),
            scaling=scalings(mode)[0],
            planner=planner_of(stated_run, run.software),
            long_run=long_run.stated(),
        )
    )
    text = page(study, date=datetime.date.today().isoformat())
    write_text(path, text)
    sys.stderr.write(f"wrote {path}\n")
    if not any(offer.candidate.runs for offer in study.offers):
        raise typer.Exit(NO)
