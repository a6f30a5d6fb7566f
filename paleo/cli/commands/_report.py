"""``paleo report``: writes a page that compares systems for a purchase."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paleo.cli.application import DECIDE_HELP_GROUP, EXIT_NO, app
from paleo.cli.options import (
    ModelName,
    ObjectiveOption,
    TargetTaskOption,
    TrainingOptions,
    catalog_name_completion,
    with_training_options,
)
from paleo.files import check_output_path, write_text


@app.command(rich_help_panel=DECIDE_HELP_GROUP)
@with_training_options
def report(
    model: ModelName,
    systems: Annotated[str, typer.Option(autocompletion=catalog_name_completion("systems", "devices"))],
    options: TrainingOptions,
    output: Annotated[str, typer.Option("-o", "--output")] = "report.html",
    target: TargetTaskOption = None,
    objective: ObjectiveOption = None,
    counts: str | None = None,
    mode: str = "strong",
    critical_batch: float | None = None,
) -> None:
    """Write an HTML page that compares systems for a purchase: one file without external resources.

    Without --strategy each system gets the best plan of a search.

    \b
    paleo report bert_large --systems aws-p4d.24xlarge:16,aws-p5.48xlarge:8 --samples 1M
    paleo report llama3-8b --systems dgx-h100:64 --tokens 1T --electricity "0.12 USD/kWh"

    Parameters
    ----------
    systems : A:8,B:16
        Systems to compare, optionally with GPU counts: A:8,B:16.
    output : FILE
        HTML file to write.
    counts : 1,2,4,…
        Numbers of GPUs of the scaling curves. [no curves]
    mode
        Scaling of the curves: strong (fixed global batch) or weak (fixed batch per rank).
    critical_batch
        Gradient noise scale in samples: at this batch size, training needs twice the samples. [not counted]
    """
    import datetime

    from paleo.questions import (
        parse_gpu_counts,
        parse_systems_with_gpu_counts,
        plan_search_function,
        replace_any_software,
    )
    from paleo.report.html_pages import purchase_page as page
    from paleo.specs.model import load_model
    from paleo.studies import purchase
    from paleo.studies.cost import default_samples_to_train, parse_training_amount
    from paleo.studies.scale import parse_scalings
    from paleo.studies.target import run_and_amount_for_target

    path = check_output_path(output, (".html", ".htm"))
    network, stated_run = load_model(model), replace_any_software(options.build_run())
    run = (
        stated_run
        if "strategy" in stated_run.model_fields_set
        else stated_run.model_copy(update={"strategy": purchase.AUTO})
    )
    stated = parse_training_amount(network, run, **options.amount_keywords())
    offers = parse_systems_with_gpu_counts(systems, run.gpus)
    run, amount = run_and_amount_for_target(network, run, target, stated, [system for system, _ in offers])
    study = purchase.recommend_plans(
        purchase.PurchaseRequest(
            network,
            offers,
            run=run,
            amount=amount or default_samples_to_train(network),
            tariff=options.tariff(),
            critical_batch=critical_batch,
            objective=purchase.parse_objective(objective or "cost"),
            counts=tuple(parse_gpu_counts(counts)) if counts is not None else (),
            scaling=parse_scalings(mode)[0],
            planner=plan_search_function(stated_run, run.software),
            long_run=options.long_run_options(),
        )
    )
    text = page(study, date=datetime.date.today().isoformat())
    write_text(path, text)
    sys.stderr.write(f"wrote {path}\n")
    if not any(offer.candidate.fits for offer in study.offers):
        raise typer.Exit(EXIT_NO)
