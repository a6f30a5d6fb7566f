"""``paleo sweep``: predicts every combination of models, systems and options as a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paleo.cli.application import DECIDE_HELP_GROUP, app, print_warnings


@app.command(rich_help_panel=DECIDE_HELP_GROUP)
def sweep(
    study: Annotated[str, typer.Argument()],
    output: Annotated[str | None, typer.Option("-o", "--output")] = None,
    jobs: int = 0,
    scheduler: str | None = None,
) -> None:
    """Predict every combination of models, systems, run options and changed hardware, as a table; resumes if stopped.

    \b
    paleo sweep study.yaml -o points.csv
    paleo sweep study.yaml -o points.parquet --jobs 4
    paleo sweep fleets.yaml --scheduler tcp://host:8786

    Parameters
    ----------
    study : STUDY
        YAML file: models (or jobs), systems, run, axes.
    output : FILE
        Table to write: .csv, .csv.gz or .parquet. [STUDY.csv]
    jobs
        Number of processes; 0 chooses it.
    scheduler : URL
        Dask scheduler to run on: tcp://host:8786.
    """
    from rich.console import Console
    from rich.progress import Progress

    from paleo.cluster.study import load_run_or_fleet_sweep
    from paleo.studies import sweep as studies
    from paleo.studies.sweep import dask_evaluator, local_evaluator
    from paleo.units import with_noun

    definition = load_run_or_fleet_sweep(study)
    target = Path(output) if output is not None else Path(study).with_suffix(".csv")
    evaluator = local_evaluator(definition, jobs)
    if scheduler is not None:
        evaluator = dask_evaluator(scheduler, lambda sentence: print_warnings([sentence]))
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(with_noun(definition.point_count, "point"))
        rows = studies.write_sweep_table(
            definition, target, evaluator, lambda done, all_: bar.update(task, completed=done, total=all_)
        )
    sys.stderr.write(f"wrote {target}: {with_noun(rows, 'row')} of {with_noun(definition.point_count, 'point')}\n")
