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
    from paleo.errors import SpecError
    from paleo.logs.base import read_log
    from paleo.logs.nccl_tests import operation_of, read_collectives
    from paleo.predict import predict
    from paleo.report import audit as report
    from paleo.specs.model import load_model
    from paleo.specs.system import load_system
    from paleo.studies.audit import audit as audited
    from paleo.studies.audit import audit_collectives

    machine, timed = load_system(system), read_collectives(log)
    if timed is not None:
        run = options.run()
        ranks = run.gpus if "gpus" in run.model_fields_set else timed.ranks or 1
        links = audit_collectives(timed, operation_of(timed, operation), ranks, machine)
        show_document(lambda: report.collective_document(links), lambda: report.collective_table(links), as_json)
        return
    read = read_log(log)
    if model is None:
        raise SpecError(f"--model: {log} is a log of a training ({read.kind}); state the network that it trains")
    result = audited(read, predict(load_model(model), machine, options.run()))
    show_document(lambda: report.document(result), lambda: report.table(result), as_json)
