"""``paleo audit``: which part of a run is off against the prediction, by its log."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import PREDICT, app
from paleo.cli.options import AsJson, RunOptions, SystemName, completes, takes_run
from paleo.cli.output import show_document

LogFile = Annotated[
    str,
    typer.Argument(metavar="LOG", help="Ten steps of Megatron-LM, torchtitan, NeMo, llm-foundry, HF Trainer."),
]
Model = Annotated[
    str,
    typer.Option(
        "--model", metavar="M", help="A model of the catalog, or a YAML file.", autocompletion=completes("models")
    ),
]


@app.command(rich_help_panel=PREDICT)
@takes_run
def audit(log: LogFile, model: Model, system: SystemName, options: RunOptions, as_json: AsJson = False) -> None:
    """What is off in a run: its log against the prediction, the fault that explains it, and the same on 8 x the ranks.

    \b
    paleo audit train.log --model llama3-8b --system dgx-h100 --gpus 64 --strategy zero=3 --software torchtitan
    paleo audit slurm.out --model gpt3-175b --system dgx-h100 --gpus 1024 --strategy tp=8,pp=16 --global-batch 1536
    """
    from paleo.logs.base import read_log
    from paleo.predict import predict
    from paleo.report.audit import document, table
    from paleo.specs.hardware import load_system
    from paleo.specs.model import load_model
    from paleo.studies.audit import audit as audited

    read = read_log(log)
    result = audited(read, predict(load_model(model), load_system(system), options.run()))
    show_document(lambda: document(result), lambda: table(result), as_json)
