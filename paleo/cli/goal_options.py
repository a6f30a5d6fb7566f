"""Options of what a training is to reach."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.options import completes

Loss = Annotated[
    float | None, typer.Option(help="Train a language model to this loss in nats a token, by Chinchilla's law.")
]
Target = Annotated[
    str | None,
    typer.Option(metavar="TASK", help="Train to the target of a task: mlperf:bert.", autocompletion=completes("tasks")),
]
NoiseScale = Annotated[
    float | None,
    typer.Option(help="Critical batch in samples: a batch as large needs twice the samples. [not counted]"),
]
