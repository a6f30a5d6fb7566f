"""``paleo rl``: predicts a step of reinforcement learning."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from paleo.cli.application import EXIT_NO, PREDICT, app, checked_page_path, show_document, write_page
from paleo.cli.options import (
    AsJson,
    ModelName,
    SystemName,
    TariffOptions,
    name_completion,
    packed_options,
    parse_whole_number,
    with_tariff_options,
    word_completion,
)

if TYPE_CHECKING:
    from paleo.services import ReinforcementResult

Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        parser=parse_whole_number,
        metavar="N",
        help="Number of GPUs, of the inference engine and the trainer together. [those of a node]",
    ),
]

Explore = Annotated[
    str | None, typer.Option(metavar="FILE", help="Also write a page of all layouts (.html, works offline).")
]


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of a step of reinforcement learning."""

    algorithm: Annotated[
        str,
        typer.Option(
            help="Algorithm: grpo, rloo, dapo, ppo or dpo.",
            autocompletion=word_completion("grpo", "rloo", "dapo", "ppo", "dpo"),
        ),
    ] = "grpo"
    rollouts: Annotated[
        int, typer.Option(min=1, help="Answers generated per step: prompts times answers per prompt.")
    ] = 512
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences per optimizer step. [all rollouts]")] = None
    input: Annotated[str, typer.Option(metavar="TOKENS", help="Mean number of tokens in a prompt.")] = "200"
    output: Annotated[str, typer.Option(metavar="TOKENS", help="Mean number of tokens in an answer.")] = "1000"
    max_output: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Largest number of tokens in an answer. [4 times the mean]")
    ] = None
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to price.")] = 1000
    staleness: Annotated[
        int, typer.Option(min=0, help="Number of steps that generation on separate GPUs may run ahead of training.")
    ] = 0
    generators: Annotated[
        int | None,
        typer.Option(min=1, help="With --staleness: number of GPUs that generate; the others train. [the best split]"),
    ] = None
    engine_strategy: Annotated[
        str | None, typer.Option(help="Parallelism of a replica that generates: tp=4. [searched]")
    ] = None
    strategy: Annotated[str | None, typer.Option(help="Parallelism of the trainer: tp=4,zero=1. [usual ones]")] = None
    software: Annotated[
        str, typer.Option(help="Framework profile of the trainer.", autocompletion=name_completion("software"))
    ] = "megatron-core"


@app.command(rich_help_panel=PREDICT)
@packed_options("step", StepOptions)
@with_tariff_options
def rl(
    model: ModelName,
    system: SystemName,
    step: StepOptions,
    rates: TariffOptions,
    gpus: Gpus = None,
    as_json: AsJson = False,
    explore: Explore = None,
) -> None:
    """Predict a step of reinforcement learning: generation, log-probabilities, training, new weights.

    \b
    paleo rl qwen3-8b --system dgx-h100 --gpus 16 --rollouts 2048 --batch 512 --output 2000
    paleo rl qwen3-30b-a3b --system dgx-h100 --gpus 32 --staleness 1 --engine-strategy tp=2 --strategy ep=8,zero=1
    """
    from paleo.services import rl as answered

    page = checked_page_path(explore)
    answer = answered(model, system, gpus=gpus, **asdict(step), **asdict(rates))
    write_page(page, lambda date: _page(answer, date))
    show_document(answer.document, answer.table, as_json)
    if not answer.possible:
        raise typer.Exit(EXIT_NO)


def _page(answer: ReinforcementResult, date: str) -> str:
    from paleo.report.answer import learning_page

    return learning_page(answer.study, date=date)
