"""``paleo trace``: one step as a timeline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paleo.cli.application import PREDICT, app, warn
from paleo.cli.options import ModelName, RunOptions, SystemName, takes_run
from paleo.files import checked_output, write_text

TraceFile = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The trace, .json.")]


@app.command(rich_help_panel=PREDICT)
@takes_run
def trace(model: ModelName, system: SystemName, options: RunOptions, output: TraceFile) -> None:
    """One step as a timeline for Perfetto or chrome://tracing: a track for each stream of each class of ranks.

    \b
    paleo trace resnet50 --system dgx-a100-80gb --gpus 8 -o trace.json
    paleo trace gpt2 --system dgx-h100 --gpus 8 --strategy pp=4 --global-batch 32 -o trace.json
    """
    from paleo.predict import predict
    from paleo.report.documents import dumped
    from paleo.report.trace import trace as traced
    from paleo.specs.model import load_model
    from paleo.specs.system import load_system

    checked_output(output)
    step = predict(load_model(model), load_system(system), options.run())
    text = dumped(traced(step)) + "\n"
    write_text(output, text)
    sys.stderr.write(f"wrote {output}\n")
    warn(step.warnings)
