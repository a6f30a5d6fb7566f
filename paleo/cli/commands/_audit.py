"""``paleo audit``: compares the log of a run with its prediction and names what is slower."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import PREDICT_HELP_GROUP, app, print_result
from paleo.cli.options import (
    COLLECTIVE_OPERATIONS,
    JsonOption,
    RunOptions,
    SystemName,
    catalog_name_completion,
    word_completion,
)


@app.command(rich_help_panel=PREDICT_HELP_GROUP)
def audit(
    log: Annotated[str, typer.Argument()],
    system: SystemName,
    options: RunOptions,
    model: Annotated[str | None, typer.Option(autocompletion=catalog_name_completion("models"))] = None,
    operation: Annotated[str | None, typer.Option(autocompletion=word_completion(*COLLECTIVE_OPERATIONS))] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the log of a training run with its prediction and name the faults that explain the difference.

    \b
    paleo audit train.log --model llama3-8b --system dgx-h100 --gpus 64 --strategy zero=3 --software torchtitan
    paleo audit slurm.out --model gpt3-175b --system dgx-h100 --gpus 1024 --strategy tp=8,pp=16 --global-batch 1536
    paleo audit train.log --from job.toml --system dgx-h100 --gpus 64
    paleo audit all_reduce_perf.log --system dgx-h100 --gpus 16
    paleo audit bench_serve.txt --model llama3-8b --system dgx-h100 --strategy tp=1 --software vllm

    Parameters
    ----------
    log : LOG
        Log of at least ten steps (Megatron-LM, torchtitan, NeMo, llm-foundry, HF Trainer), of nccl-tests, or of a
        benchmark of vLLM or SGLang.
    model : M
        Network that was trained: a catalog name or a file; required for training logs unless --from names it.
    operation : OP
        Collective of an nccl-tests log: all_reduce, all_gather, … [named in the log]
    """
    from paleo.questions import audit as answered
    from paleo.serving.benchmark import read_benchmark

    benchmark = read_benchmark(log)
    if benchmark is not None:
        from paleo.services import audit_service

        line = options.from_[0] if options.from_ else None
        stated = {"gpus": options.gpus or 1, "strategy": options.strategy, "command": line}
        served = audit_service(benchmark, model, system, engine=options.software or "vllm", **stated)
        print_result(served.json_document, served.table, as_json)
        return
    network = model if model is not None or options.launch_file_network is None else options.launch_file_network
    answer = answered(log, system, network, operation=operation, run=options.build_run())
    print_result(answer.json_document, answer.table, as_json, options.warnings())
