"""``paleo rl``: predicts a step of reinforcement learning."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from paleo.cli.application import PREDICT_HELP_GROUP, app, exit_unless, print_result, write_page
from paleo.cli.options import (
    JsonOption,
    ModelName,
    OptionalWholeNumber,
    PageFileOption,
    SystemName,
    TariffOptions,
    catalog_name_completion,
    word_completion,
)

_ALGORITHMS = ("grpo", "rloo", "dapo", "ppo", "dpo")


@dataclass(frozen=True, kw_only=True)
class ReinforcementOptions:
    """Options of a step of reinforcement learning.

    Parameters
    ----------
    algorithm
        Algorithm: grpo, rloo, dapo, ppo or dpo.
    rollouts
        Answers generated per step: prompts times answers per prompt.
    batch
        Sequences per optimizer step. [all rollouts]
    input : TOKENS
        Mean number of tokens in a prompt.
    output : TOKENS
        Mean number of tokens in an answer.
    max_output : TOKENS
        Largest number of tokens in an answer. [4 times the mean]
    steps
        Number of steps to price.
    staleness
        Number of steps that generation on separate GPUs may run ahead of training.
    generators
        With --staleness: number of GPUs that generate; the others train. [the best split]
    engine_strategy
        Parallelism of a replica that generates: tp=4. [searched]
    strategy
        Parallelism of the trainer: tp=4,zero=1. [usual ones]
    software
        Framework profile of the trainer.
    """

    algorithm: Annotated[str, typer.Option(autocompletion=word_completion(*_ALGORITHMS))] = "grpo"
    rollouts: Annotated[int, typer.Option(min=1)] = 512
    batch: Annotated[int | None, typer.Option(min=1)] = None
    input: str = "200"
    output: str = "1000"
    max_output: str | None = None
    steps: Annotated[int, typer.Option(min=1)] = 1000
    staleness: Annotated[int, typer.Option(min=0)] = 0
    generators: Annotated[int | None, typer.Option(min=1)] = None
    engine_strategy: str | None = None
    strategy: str | None = None
    software: Annotated[str, typer.Option(autocompletion=catalog_name_completion("software"))] = "megatron-core"


@app.command(rich_help_panel=PREDICT_HELP_GROUP)
def rl(
    model: ModelName,
    system: SystemName,
    step: ReinforcementOptions,
    rates: TariffOptions,
    gpus: OptionalWholeNumber = None,
    as_json: JsonOption = False,
    explore: PageFileOption = None,
) -> None:
    """Predict a step of reinforcement learning: generation, log-probabilities, training, new weights.

    \b
    paleo rl qwen3-8b --system dgx-h100 --gpus 16 --rollouts 2048 --batch 512 --output 2000
    paleo rl qwen3-30b-a3b --system dgx-h100 --gpus 32 --staleness 1 --engine-strategy tp=2 --strategy ep=8,zero=1

    Parameters
    ----------
    gpus
        Number of GPUs, of the inference engine and the trainer together. [those of a node]
    explore : FILE
        Also write a page of all layouts (.html, works offline).
    """
    from paleo.services import rl as answered

    answer = answered(model, system, gpus=gpus, **asdict(step), **asdict(rates))
    write_page(explore, lambda pages, date: pages.reinforcement_page(answer.study, date=date))
    print_result(answer.json_document, answer.table, as_json)
    exit_unless(answer.layout_found)
