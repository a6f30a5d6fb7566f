"""``paleo tune``: predicts a search over many trials."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from paleo.cli.application import DECIDE_HELP_GROUP, app, exit_unless, print_result, save_plot
from paleo.cli.options import (
    JsonOption,
    ModelName,
    PlotFileOption,
    RunPriceAndFailureOptions,
    SystemName,
    WholeNumber,
    word_completion,
)

_NAMES = ("asha", "asha-stopping", "evolution", "grid", "halving", "hyperband", "median", "pbt", "random")


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of the search over trials.

    Parameters
    ----------
    max_tokens : N
        Tokens that a full trial trains on: 1B.
    max_samples : N
        Samples that a full trial trains on.
    max_epochs
        Epochs that a full trial trains for.
    min_tokens : N
        Tokens until a trial is first compared with others. [a 64th of the most]
    min_samples : N
        Samples until a trial is first compared with others. [a 64th of the most]
    min_epochs
        Epochs until a trial is first compared with others. [a 64th of the most]
    eta
        Reduction factor: one trial in this many goes on to the next rung.
    gpus_per_trial : K
        Number of GPUs per trial, or auto for the fastest.
    population
        Number of members in the population of an evolution.
    vary : NAME=V,…
        Sizes of the network that differ between trials: layers=12,24.
    evaluation_samples : N
        Samples per evaluation. [not counted]
    from_scratch
        Start promoted trials from the beginning, without a checkpoint.
    deadline : TIME
        Longest time that the search may take: 24h.
    rank_correlation
        Correlation of scores between rungs to assume; prints the expected regret.
    seed
        Random seed of the scores.
    """

    method: Annotated[
        str,
        typer.Option(
            metavar="M", help="Search method: " + ", ".join(_NAMES) + ".", autocompletion=word_completion(*_NAMES)
        ),
    ] = "asha"
    max_tokens: str | None = None
    max_samples: str | None = None
    max_epochs: float | None = None
    min_tokens: str | None = None
    min_samples: str | None = None
    min_epochs: float | None = None
    eta: int = 4
    gpus_per_trial: str = "auto"
    population: int = 20
    vary: list[str] | None = None
    evaluation_samples: str | None = None
    from_scratch: bool = False
    deadline: str | None = None
    rank_correlation: float | None = None
    seed: int = 0


@app.command(rich_help_panel=DECIDE_HELP_GROUP)
def tune(
    model: ModelName,
    system: SystemName,
    gpus: WholeNumber,
    trials: WholeNumber,
    search: TuneOptions,
    options: RunPriceAndFailureOptions,
    as_json: JsonOption = False,
    plot: PlotFileOption = None,
) -> None:
    """Predict how long a search over hyperparameters or architectures takes, and how to divide the GPUs among trials.

    \b
    paleo tune gpt2 --system dgx-h100 --gpus 64 --trials 256 --max-tokens 1B
    paleo tune resnet50 --system dgx-a100-80gb --gpus 32 --trials 100 --method hyperband --max-epochs 30 --deadline 24h

    Parameters
    ----------
    gpus
        Total number of GPUs.
    trials : T
        Number of configurations to try.
    """
    from paleo.questions import tune as answered

    stated = asdict(search) | {"vary": search.vary or (), "run": options.build_run()}
    answer = answered(model, system, gpus, trials=trials, **stated, **options.price_and_failure_keywords())
    save_plot(plot, lambda tuning: tuning.plot_trials(answer.study), "tuning")
    print_result(answer.json_document, answer.table, as_json)
    exit_unless(answer.deadline_met)
