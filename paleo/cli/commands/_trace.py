"""``paleo trace``: writes the timeline of one step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paleo.cli.application import PREDICT_HELP_GROUP, app, print_warnings
from paleo.cli.options import OptionalModel, RunOptions, SystemName
from paleo.files import check_output_path, write_text


@app.command(rich_help_panel=PREDICT_HELP_GROUP)
def trace(
    *,
    model: OptionalModel = None,
    system: SystemName,
    options: RunOptions,
    output: Annotated[Path, typer.Option("-o", "--output")],
) -> None:
    """Write the timeline of one step for Perfetto or chrome://tracing, one track per stream.

    \b
    paleo trace resnet50 --system dgx-a100-80gb --gpus 8 -o trace.json
    paleo trace gpt2 --system dgx-h100 --gpus 8 --strategy pp=4 --global-batch 32 -o trace.json

    Parameters
    ----------
    output : FILE
        Trace file to write: .json.
    """
    from paleo.questions import estimate
    from paleo.report.columns import json_text
    from paleo.report.estimate import trace_events as traced

    check_output_path(output)
    answer = estimate(options.network(model), system, run=options.build_run())
    write_text(output, json_text(traced(answer.prediction)) + "\n")
    sys.stderr.write(f"wrote {output}\n")
    chosen = answer.run_with_defaults.automatic_choices_text if answer.run_with_defaults is not None else ""
    print_warnings([*([chosen] if chosen else []), *answer.prediction.warnings])
