"""``paleo audit``: which part of a run is off against the prediction, by its log."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import PREDICT, app, show_document
from paleo.cli.options import OPERATIONS, AsJson, RunOptions, SystemName, completes, takes_run, words

LogFile = Annotated[
    str,
    typer.Argument(
        metavar="LOG", help="Ten steps of Megatron-LM, torchtitan, NeMo, llm-foundry, HF Trainer; or nccl-tests."
    ),
]
Operation = Annotated[
    str | None,
    typer.Option(
        metavar="OP",
        help="Of a log of nccl-tests: all_reduce, all_gather, … [as the log names it]",
        autocompletion=words(*OPERATIONS),
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="M",
        help="A model of the catalog, or a YAML file; a log of a training needs it.",
        autocompletion=completes("models"),
    ),
]


@app.command(rich_help_panel=PREDICT)
@takes_run
def audit(
    log: LogFile,
    system: SystemName,
    options: RunOptions,
    model: Model = None,
    operation: Operation = None,
    as_json: AsJson = False,
) -> None:
    """What is off in a run: its log against the prediction, the fault that explains it, and the same on 8 x the ranks.

    \b
    paleo audit train.log --model llama3-8b --system dgx-h100 --gpus 64 --strategy zero=3 --software torchtitan
    paleo audit slurm.out --model gpt3-175b --system dgx-h100 --gpus 1024 --strategy tp=8,pp=16 --global-batch 1536
    paleo audit all_reduce_perf.log --system dgx-h100 --gpus 16
    """
    from paleo.questions import audit as answered

    answer = answered(log, system, model, operation=operation, run=options.run())
    show_document(answer.document, answer.table, as_json)
