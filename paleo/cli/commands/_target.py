"""``paleo target``: predicts the time to a quality target for several GPU counts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from paleo.cli.application import PREDICT_HELP_GROUP, app, exit_unless, print_result, save_plot
from paleo.cli.options import (
    GpuCounts,
    JsonOption,
    NoiseScale,
    PlotFileOption,
    SystemName,
    TargetLossOption,
    TariffOptions,
    catalog_name_completion,
)


@app.command(rich_help_panel=PREDICT_HELP_GROUP)
def target(
    task: Annotated[str, typer.Argument(autocompletion=catalog_name_completion("tasks"))],
    system: SystemName,
    gpus: GpuCounts,
    rates: TariffOptions,
    batch: str = "auto",
    loss: TargetLossOption = None,
    noise_scale: NoiseScale = None,
    strategy: str | None = None,
    dtype: str | None = None,
    software: Annotated[str | None, typer.Option(autocompletion=catalog_name_completion("software"))] = None,
    as_json: JsonOption = False,
    plot: PlotFileOption = None,
) -> None:
    """Predict the time to a quality target: number of steps, step time and evaluations, for several GPU counts.

    \b
    paleo target mlperf:bert --system dgx-h100 --gpus 8,64,512
    paleo target mlperf:resnet --system dgx-a100-80gb --gpus 8,64 --batch 4096 --plot minutes.png
    paleo target llama3-8b --loss 2.1 --system dgx-h100 --gpus 64,512

    Parameters
    ----------
    task : TASK
        Task: a catalog name (`paleo list tasks`) or a YAML file; with --loss a language model.
    batch : auto|SAMPLES
        Global batch size in samples; auto chooses the one with the shortest time to target.
    strategy
        Parallelism: a preset, degrees such as tp=8,zero=1, or both. [dp, or a strategy that fits]
    dtype
        Number format of matrix products. [the device's best 16 bits]
    software
        Framework profile, NAME or NAME@RELEASE. [the task's]
    """
    from paleo.questions import target as answered

    options = {"strategy": strategy, "dtype": dtype, "software": software}
    stated = {name: value for name, value in options.items() if value is not None}
    answer = answered(task, system, gpus, batch=batch, loss=loss, noise_scale=noise_scale, **stated, **asdict(rates))
    save_plot(plot, lambda plots: plots.plot_time_to_target(answer.system.name, answer.curve))
    warnings = dict.fromkeys(warning for point in answer.points for warning in point.warnings)
    print_result(answer.json_document, answer.table, as_json, list(warnings))
    exit_unless(any(point.prediction.memory.fits for point in answer.points))
