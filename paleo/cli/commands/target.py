"""``paleo target``: how long a task takes to reach its quality, over counts of GPUs."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import NO, PREDICT, app
from paleo.cli.goal_options import NoiseScale
from paleo.cli.options import AsJson, Counts, Plot, SystemName, completes, gpu_counts
from paleo.cli.output import draw, picture_path, show_document, warn
from paleo.cli.training_options import TariffOptions, takes_tariff

TaskName = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        help="A task of the catalog such as mlperf:bert, or a YAML file.",
        autocompletion=completes("tasks"),
    ),
]
Batch = Annotated[
    str, typer.Option(metavar="auto|SAMPLES", help="Global batch; auto finds the one that is soonest there.")
]
Strategy = Annotated[str | None, typer.Option(help="As in estimate. [dp, or what fits]")]
Dtype = Annotated[str | None, typer.Option(help="As in estimate. [the device's best 16 bits]")]
Software = Annotated[
    str | None, typer.Option(help="Profile of a framework. [the task's]", autocompletion=completes("software"))
]


@app.command(rich_help_panel=PREDICT)
@takes_tariff
def target(
    task: TaskName,
    system: SystemName,
    gpus: Counts,
    rates: TariffOptions,
    batch: Batch = "auto",
    noise_scale: NoiseScale = None,
    strategy: Strategy = None,
    dtype: Dtype = None,
    software: Software = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """How long a task takes to its target: steps from its law of samples, seconds of a step, evaluations.

    \b
    paleo target mlperf:bert --system dgx-h100 --gpus 8,64,512
    paleo target mlperf:resnet --system dgx-a100-80gb --gpus 8,64 --batch 4096 --plot minutes.png
    """
    from paleo.report import target as report
    from paleo.specs.hardware import load_system
    from paleo.specs.task import load_task
    from paleo.studies.target import over_counts, scaling, with_noise_scale

    path = picture_path(plot)
    goal, machine = with_noise_scale(load_task(task), noise_scale), load_system(system)
    options = {"strategy": strategy, "dtype": dtype, "software": software}
    curve = scaling(over_counts(goal, machine, gpu_counts(gpus), batch, **options))
    names = (goal.name, machine.name)
    draw(path, lambda: report.figure(*names, curve))
    tariff = rates.tariff()
    show_document(lambda: report.document(*names, curve, tariff), lambda: report.table(*names, curve, tariff), as_json)
    warn(list(dict.fromkeys(warning for point in curve.points for warning in point.warnings)))
    if not any(point.prediction.memory.fits for point in curve.points):
        raise typer.Exit(NO)
