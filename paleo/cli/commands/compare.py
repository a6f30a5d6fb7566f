"""``paleo compare``: the same run on several systems."""

from __future__ import annotations

from dataclasses import asdict

import typer

from paleo.cli.application import DECIDE, NO, app, draw, picture_path, show_document
from paleo.cli.options import (
    AsJson,
    Epochs,
    LongRunFlags,
    ModelName,
    Plot,
    RankBy,
    RunOptions,
    Samples,
    Systems,
    Target,
    TariffOptions,
    Tokens,
    takes_long_run,
    takes_run,
    takes_tariff,
)


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
    paleo compare llama3-8b --systems dgx-a100-80gb:64,dgx-h100:32 --strategy auto --tokens 1T --objective cost
    """
    from paleo.questions import compare as answered

    path = picture_path(plot)
    answer = answered(
        model,
        systems,
        run=options.run(),
        epochs=epochs,
        samples=samples,
        tokens=tokens,
        target=target,
        objective=objective,
        **long_run.keywords(),
        **asdict(rates),
    )
    if path is not None:
        from paleo.report import plots

        draw(path, lambda: plots.compare(answer.comparison))
    show_document(answer.document, answer.table, as_json)
    if not any(candidate.runs for candidate in answer.comparison.candidates):
        raise typer.Exit(NO)
