"""``paleo estimate``: predicts one configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import (
    PREDICT_HELP_GROUP,
    app,
    check_launch_option,
    exit_unless,
    print_result,
    print_warnings,
    save_plot,
    write_launch_files,
)
from paleo.cli.options import (
    JsonOption,
    LaunchFileOption,
    NoiseScale,
    OptionalModel,
    PlotFileOption,
    SystemName,
    TargetLossOption,
    TargetTaskOption,
    TrainingOptions,
)


@app.command(rich_help_panel=PREDICT_HELP_GROUP)
def estimate(
    *,
    model: OptionalModel = None,
    system: SystemName,
    options: TrainingOptions,
    loss: TargetLossOption = None,
    target: TargetTaskOption = None,
    noise_scale: NoiseScale = None,
    as_json: JsonOption = False,
    plot: PlotFileOption = None,
    launch: LaunchFileOption = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose")] = False,
) -> None:
    """Predict one configuration: step time and its parts, memory, throughput; time, cost and energy of a training.

    \b
    paleo estimate resnet50 --system dgx-a100-80gb --gpus 8 --epochs 90
    paleo estimate llama3-8b --system dgx-h100 --gpus 64 --strategy zero=3 --tokens 1T --json

    Parameters
    ----------
    verbose
        Also print time by section and stream, and every collective.
    """
    from paleo.questions import estimate as answered

    check_launch_option(launch, options.software)
    stated = options.estimate_keywords() | {"loss": loss, "target": target, "noise_scale": noise_scale}
    answer = answered(options.network(model), system, **stated)
    step = answer.prediction
    if step.run.exchange.compress is None:
        save_plot(plot, lambda plots: plots.plot_step_and_memory(step))
    else:
        save_plot(plot, lambda plots: plots.plot_compressed_step_time(step))
    print_result(answer.json_document, lambda: answer.table(verbose=verbose), as_json)
    write_launch_files(launch, lambda: answer.prediction)
    print_warnings((*options.warnings(), *(answer.prediction.warnings if as_json else ()), *answer.notes))
    exit_unless(answer.memory.fits)
