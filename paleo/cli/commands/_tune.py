"""``paleo tune``: predicts a search over many trials."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from paleo.cli.application import DECIDE, NO, app, draw, picture_path, show_document
from paleo.cli.options import (
    AsJson,
    LongRunFlags,
    ModelName,
    Plot,
    RunOptions,
    SystemName,
    TariffOptions,
    takes_long_run,
    takes_run,
    takes_tariff,
    whole,
    words,
)

_NAMES = ("asha", "asha-stopping", "evolution", "grid", "halving", "hyperband", "median", "pbt", "random")
Gpus = Annotated[int, typer.Option("--gpus", parser=whole, metavar="N", help="Total number of GPUs.")]
Trials = Annotated[int, typer.Option("--trials", parser=whole, metavar="T", help="Number of configurations to try.")]
MethodName = Annotated[
    str,
    typer.Option(
        "--method", metavar="M", help="Search method: " + ", ".join(_NAMES) + ".", autocompletion=words(*_NAMES)
    ),
]
MaxTokens = Annotated[
    str | None, typer.Option("--max-tokens", metavar="N", help="Tokens that a full trial trains on: 1B.")
]
MaxSamples = Annotated[
    str | None, typer.Option("--max-samples", metavar="N", help="Samples that a full trial trains on.")
]
MaxEpochs = Annotated[float | None, typer.Option("--max-epochs", help="Epochs that a full trial trains for.")]
MinTokens = Annotated[
    str | None,
    typer.Option(
        "--min-tokens", metavar="N", help="Tokens until a trial is first compared with others. [a 64th of the most]"
    ),
]
MinSamples = Annotated[
    str | None,
    typer.Option(
        "--min-samples", metavar="N", help="Samples until a trial is first compared with others. [a 64th of the most]"
    ),
]
MinEpochs = Annotated[
    float | None,
    typer.Option("--min-epochs", help="Epochs until a trial is first compared with others. [a 64th of the most]"),
]
Eta = Annotated[int, typer.Option(help="Reduction factor: one trial in this many goes on to the next rung.")]
Width = Annotated[
    str, typer.Option("--gpus-per-trial", metavar="K", help="Number of GPUs per trial, or auto for the fastest.")
]
Population = Annotated[int, typer.Option(help="Number of members in the population of an evolution.")]
Vary = Annotated[
    list[str] | None,
    typer.Option("--vary", metavar="NAME=V,…", help="Sizes of the network that differ between trials: layers=12,24."),
]
Evaluated = Annotated[
    str | None, typer.Option("--evaluation-samples", metavar="N", help="Samples per evaluation. [not counted]")
]
Scratch = Annotated[
    bool, typer.Option("--from-scratch", help="Start promoted trials from the beginning, without a checkpoint.")
]
Deadline = Annotated[str | None, typer.Option(metavar="TIME", help="Longest time that the search may take: 24h.")]
Correlation = Annotated[
    float | None,
    typer.Option(
        "--rank-correlation", help="Correlation of scores between rungs to assume; prints the expected regret."
    ),
]
Seed = Annotated[int, typer.Option(help="Random seed of the scores.")]


@app.command(rich_help_panel=DECIDE)
@takes_run
@takes_tariff
@takes_long_run
def tune(
    model: ModelName,
    system: SystemName,
    gpus: Gpus,
    trials: Trials,
    options: RunOptions,
    rates: TariffOptions,
    long_run: LongRunFlags,
    method: MethodName = "asha",
    max_tokens: MaxTokens = None,
    max_samples: MaxSamples = None,
    max_epochs: MaxEpochs = None,
    min_tokens: MinTokens = None,
    min_samples: MinSamples = None,
    min_epochs: MinEpochs = None,
    eta: Eta = 4,
    gpus_per_trial: Width = "auto",
    population: Population = 20,
    vary: Vary = None,
    evaluation_samples: Evaluated = None,
    from_scratch: Scratch = False,
    deadline: Deadline = None,
    rank_correlation: Correlation = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Predict how long a search over hyperparameters or architectures takes, and how to divide the GPUs among trials.

    \b
    paleo tune gpt2 --system dgx-h100 --gpus 64 --trials 256 --max-tokens 1B
    paleo tune resnet50 --system dgx-a100-80gb --gpus 32 --trials 100 --method hyperband --max-epochs 30 --deadline 24h
    """
    from paleo.questions import tune as answered

    path = picture_path(plot)
    answer = answered(
        model, system, gpus, trials=trials, method=method, max_tokens=max_tokens, max_samples=max_samples,
        max_epochs=max_epochs, min_tokens=min_tokens, min_samples=min_samples, min_epochs=min_epochs, eta=eta,
        gpus_per_trial=gpus_per_trial, population=population, vary=vary or (), evaluation_samples=evaluation_samples,
        from_scratch=from_scratch, deadline=deadline, rank_correlation=rank_correlation, seed=seed,
        run=options.run(), **long_run.keywords(), **asdict(rates),
    )  # fmt: skip
    if path is not None:
        from paleo.report.tuning import figure

        draw(path, lambda: figure(answer.study))
    show_document(answer.document, answer.table, as_json)
    if not answer.possible:
        raise typer.Exit(NO)
