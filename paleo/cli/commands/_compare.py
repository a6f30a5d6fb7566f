"""``paleo compare``: the same run on several systems."""

from __future__ import annotations

from dataclasses import replace

from paleo.cli.application import DECIDE_HELP_GROUP, app, exit_unless, print_result, save_plot
from paleo.cli.options import (
    JsonOption,
    ObjectiveOption,
    OptionalModel,
    PlotFileOption,
    Systems,
    TargetTaskOption,
    TrainingOptions,
)
from paleo.errors import SpecError


def set_common_gpu_count(options: TrainingOptions, systems: str) -> TrainingOptions:
    """Set the GPU count of the options to the count that all systems share.

    Launch files of --from need that count to convert samples per rank to the global batch.

    Parameters
    ----------
    options : TrainingOptions
        Options of the run.
    systems : str
        Value of --systems.

    Returns
    -------
    TrainingOptions
        Options with ``gpus``; unchanged if the count is not needed or the systems have none.

    Raises
    ------
    SpecError
        If --from gives samples per rank and the systems have different counts.
    """
    counts = {count for _, _, count in (system.rpartition(":") for system in systems.split(","))}
    if options.gpus is not None or not counts or not all(count.isdigit() for count in counts):
        return options
    if len(counts) == 1:
        return replace(options, gpus=int(counts.pop()))
    job = options.launch_file_job
    if job is None or job.plan.global_batch or options.batch or options.global_batch:
        return options
    raise SpecError("--from states samples per rank, and the systems have different counts; add --global-batch N")


@app.command(rich_help_panel=DECIDE_HELP_GROUP)
def compare(
    *,
    model: OptionalModel = None,
    systems: Systems,
    options: TrainingOptions,
    target: TargetTaskOption = None,
    objective: ObjectiveOption = None,
    for_: str | None = None,
    as_json: JsonOption = False,
    plot: PlotFileOption = None,
) -> None:
    """Compare systems on the same run: step time, speedup, memory, cost and energy.

    \b
    paleo compare bert_large --systems aws-p4d.24xlarge,aws-p5.48xlarge --gpus 8 --batch 16
    paleo compare llama3-8b --systems dgx-a100-80gb:64,dgx-h100:32 --strategy auto --tokens 1T --objective cost
    paleo compare llama3-8b --systems dgx-h100:32,dgx-b200:16 --strategy zero=3 --for train:7d,serve:20/s

    Parameters
    ----------
    for_ : USES
        Two uses of the same machines: train:7d,serve:20/s.
    """
    if options.from_:
        options = set_common_gpu_count(options, systems)
    if for_ is not None:
        from paleo.serve_train_split import split_serving_and_training

        run, terms = options.build_run(), options.price_and_failure_keywords()
        both = split_serving_and_training(options.network(model), systems, for_, run=run, **terms)
        print_result(both.json_document, both.table, as_json)
        exit_unless(both.is_possible)
        return
    from paleo.questions import compare as answered

    stated = options.estimate_keywords() | {"target": target, "objective": objective}
    answer = answered(options.network(model), systems, **stated)
    save_plot(plot, lambda plots: plots.plot_systems(answer.comparison))
    print_result(answer.json_document, answer.table, as_json, options.warnings())
    exit_unless(any(candidate.fits for candidate in answer.comparison.candidates))
