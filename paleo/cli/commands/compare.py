"""``paleo compare``: the same run on several systems."""

from __future__ import annotations

import typer

from paleo.cli.application import DECIDE, NO, app
from paleo.cli.goal_options import Target
from paleo.cli.long_run_options import LongRunFlags, takes_long_run
from paleo.cli.options import (
    AsJson,
    ModelName,
    Plot,
    RunOptions,
    Systems,
    planner,
    systems_with_counts,
    takes_run,
)
from paleo.cli.output import draw, picture_path, show_document
from paleo.cli.training_options import Epochs, RankBy, Samples, TariffOptions, Tokens, takes_tariff


@app.command(rich_help_panel=DECIDE)
@takes_run
@takes_tariff
@takes_long_run
def compare(
    model: ModelName,
    systems: Systems,
    options: RunOptions,
    rates: TariffOptions,
    long_run: LongRunFlags,
    epochs: Epochs = None,
    samples: Samples = None,
    tokens: Tokens = None,
    target: Target = None,
    objective: RankBy = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """The same run on several systems: step time, speed-up, memory, rent and energy.

    \b
    paleo compare bert_large --systems aws-p4d.24xlarge,aws-p5.48xlarge --gpus 8 --batch 16
    paleo compare llama3-8b --systems dgx-a100-80gb,dgx-h100 --gpus 64 --tokens 1T --objective cost
    """
    from paleo.report import documents, tables
    from paleo.specs.model import load_model
    from paleo.studies import comparison
    from paleo.studies.learning import aimed
    from paleo.studies.training import stated_amount

    path = picture_path(plot)
    network, run = load_model(model), options.run()
    machines = systems_with_counts(systems, run.gpus)
    stated = stated_amount(network, run, epochs=epochs, samples=samples, tokens=tokens)
    run, wanted = aimed(network, run, target, stated)
    names, counts = [system for system, _ in machines], [count for _, count in machines]
    search = planner(options, run) if run.strategy == comparison.AUTO else None
    terms = wanted, rates.tariff(), long_run.stated()
    study = comparison.compare(network, names, run, *terms, gpus=counts, planner=search)
    study = study if objective is None else study.ranked(comparison.objective_named(objective))
    if path is not None:
        from paleo.report import plots

        draw(path, lambda: plots.compare(study))
    show_document(lambda: documents.compare(study), lambda: tables.compare(study), as_json)
    if not any(candidate.runs for candidate in study.candidates):
        raise typer.Exit(NO)
