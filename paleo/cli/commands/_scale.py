"""``paleo scale``: predicts the same network on a growing number of GPUs."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import PREDICT_HELP_GROUP, app, exit_unless, print_result, save_plot
from paleo.cli.options import GpuCounts, JsonOption, OptionalModel, PlotFileOption, SystemName, TrainingOptions
from paleo.errors import SpecError


@app.command(rich_help_panel=PREDICT_HELP_GROUP)
def scale(
    *,
    model: OptionalModel = None,
    system: SystemName,
    gpus: GpuCounts,
    options: TrainingOptions,
    mode: Annotated[str | None, typer.Argument()] = None,
    mode_option: Annotated[str | None, typer.Option("--mode")] = None,
    as_json: JsonOption = False,
    plot: PlotFileOption = None,
) -> None:
    """Predict how a network scales with the number of GPUs: speedup, efficiency, and what limits them.

    \b
    paleo scale resnet50 --system dgx-a100-80gb --gpus 1,2,4,8,16,32 --global-batch 1024
    paleo scale bert_large weak --system dgx-h100 --gpus 8,64,512 --batch 16 --plot curve.png

    Parameters
    ----------
    mode : [strong|weak|both]
        strong: fixed global batch; weak: fixed batch per rank. [strong with --global-batch, else weak]
    mode_option : MODE
        Same as the argument MODE.
    """
    from paleo.questions import scale as answered

    if mode is not None and mode_option not in (None, mode):
        raise SpecError(f"--mode {mode_option}: the argument MODE is {mode!r}; use one of them")
    answer = answered(options.network(model), system, gpus, mode=mode or mode_option, **options.estimate_keywords())
    curves, names = answer.curves, (answer.model.name, answer.system.name)
    save_plot(plot, lambda plots: plots.plot_exchange_scaling(curves) or plots.plot_scaling(*names, curves))
    print_result(answer.json_document, answer.table, as_json, options.warnings())
    exit_unless(any(curve.base_point.fits for curve in answer.curves))
