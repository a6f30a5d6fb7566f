"""``paleo tune``: predicts a search over many trials."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from paleo.cli.application import DECIDE, EXIT_NO, app, checked_plot_path, save_plot, show_document
from paleo.cli.options import (
    AsJson,
    ModelName,
    Plot,
    RunOptionsWithRent,
    SystemName,
    packed_options,
    parse_whole_number,
    with_run_and_price_options,
    word_completion,
)

_NAMES = ("asha", "asha-stopping", "evolution", "grid", "halving", "hyperband", "median", "pbt", "random")
Gpus = Annotated[int, typer.Option("--gpus", parser=parse_whole_number, metavar="N", help="Total number of GPUs.")]
Trials = Annotated[
    int, typer.Option("--trials", parser=parse_whole_number, metavar="T", help="Number of configurations to try.")
]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of the search over trials."""

    method: Annotated[
        str,
        typer.Option(
            metavar="M", help="Search method: " + ", ".join(_NAMES) + ".", autocompletion=word_completion(*_NAMES)
        ),
    ] = "asha"
    max_tokens: Annotated[str | None, typer.Option(metavar="N", help="Tokens that a full trial trains on: 1B.")] = None
    max_samples: Annotated[str | None, typer.Option(metavar="N", help="Samples that a full trial trains on.")] = None
    max_epochs: Annotated[float | None, typer.Option(help="Epochs that a full trial trains for.")] = None
    min_tokens: Annotated[
        str | None,
        typer.Option(metavar="N", help="Tokens until a trial is first compared with others. [a 64th of the most]"),
    ] = None
    min_samples: Annotated[
        str | None,
        typer.Option(metavar="N", help="Samples until a trial is first compared with others. [a 64th of the most]"),
    ] = None
    min_epochs: Annotated[
        float | None, typer.Option(help="Epochs until a trial is first compared with others. [a 64th of the most]")
    ] = None
    eta: Annotated[int, typer.Option(help="Reduction factor: one trial in this many goes on to the next rung.")] = 4
    gpus_per_trial: Annotated[
        str, typer.Option(metavar="K", help="Number of GPUs per trial, or auto for the fastest.")
    ] = "auto"
    population: Annotated[int, typer.Option(help="Number of members in the population of an evolution.")] = 20
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=V,…", help="Sizes of the network that differ between trials: layers=12,24."),
    ] = None
    evaluation_samples: Annotated[
        str | None, typer.Option(metavar="N", help="Samples per evaluation. [not counted]")
    ] = None
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Start promoted trials from the beginning, without a checkpoint.")
    ] = False
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="Longest time that the search may take: 24h.")
    ] = None
    rank_correlation: Annotated[
        float | None, typer.Option(help="Correlation of scores between rungs to assume; prints the expected regret.")
    ] = None
    seed: Annotated[int, typer.Option(help="Random seed of the scores.")] = 0


@app.command(rich_help_panel=DECIDE)
@packed_options("search", SearchOptions)
@with_run_and_price_options
def tune(
    model: ModelName,
    system: SystemName,
    gpus: Gpus,
    trials: Trials,
    search: SearchOptions,
    options: RunOptionsWithRent,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Predict how long a search over hyperparameters or architectures takes, and how to divide the GPUs among trials.

    \b
    paleo tune gpt2 --system dgx-h100 --gpus 64 --trials 256 --max-tokens 1B
    paleo tune resnet50 --system dgx-a100-80gb --gpus 32 --trials 100 --method hyperband --max-epochs 30 --deadline 24h
    """
    from paleo.questions import tune as answered

    path = checked_plot_path(plot)
    stated = asdict(search) | {"vary": search.vary or (), "run": options.run()}
    answer = answered(model, system, gpus, trials=trials, **stated, **options.terms())
    if path is not None:
        from paleo.report.tuning import figure

        save_plot(path, lambda: figure(answer.study))
    show_document(answer.document, answer.table, as_json)
    if not answer.possible:
        raise typer.Exit(EXIT_NO)
