"""``paleo sweep``: a product of configurations as a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paleo.cli.application import DECIDE, app


@app.command(rich_help_panel=DECIDE)
def sweep(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A YAML file: models, systems, run, axes.")],
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help=".csv, .csv.gz or .parquet. [STUDY.csv]")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes of this machine; 0: as many as pay.")] = 0,
    scheduler: Annotated[str | None, typer.Option(metavar="URL", help="A Dask scheduler: tcp://host:8786.")] = None,
) -> None:
    """The product of models, systems, runs, changed hardware and prices as a table; goes on where it was stopped.

    \b
    paleo sweep study.yaml -o points.csv
    paleo sweep study.yaml -o points.parquet --jobs 4
    """
    from rich.console import Console
    from rich.progress import Progress

    from paleo.studies import sweep as studies
    from paleo.studies.study_file import load_study
    from paleo.studies.sweep_points import dask, local
    from paleo.units import counted

    definition = load_study(study)
    target = Path(output) if output is not None else Path(study).with_suffix(".csv")
    evaluator = dask(scheduler) if scheduler is not None else local(definition, jobs)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(counted(definition.points, "point"))
        rows = studies.sweep(
            definition, target, evaluator, lambda done, all_: bar.update(task, completed=done, total=all_)
        )
    sys.stderr.write(f"wrote {target}: {counted(rows, 'row')} of {counted(definition.points, 'point')}\n")
