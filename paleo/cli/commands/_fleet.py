"""``paleo fleet``: many jobs on one cluster."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from paleo.cli.application import DECIDE_HELP_GROUP, app, exit_unless, print_result, save_plot
from paleo.cli.options import JsonOption, PlotFileOption, TariffOptions, catalog_name_completion, word_completion

_POLICIES = ("backfill", "elastic", "fair", "fifo", "las", "priority", "srtf")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of the cluster and of its scheduler.

    Parameters
    ----------
    nodes : N[,N]
        Number of nodes of each system, or auto for the smallest order.
    placement
        Placement of jobs: packed on few racks, or spread over all.
    wait : TIME
        Longest time that a job may wait: 1h. [none; deadlines only]
    measure
        Statistic of the waiting times that --wait limits: p95 or mean.
    samples
        Number of simulations for intervals. [20, none above 1,000 jobs]
    seed
        Random seed of the samples.
    """

    nodes: str = "auto"
    policy: Annotated[
        str,
        typer.Option(
            metavar="P",
            help="Scheduling policy: " + ", ".join(_POLICIES) + ".",
            autocompletion=word_completion(*_POLICIES),
        ),
    ] = "backfill"
    placement: Annotated[str, typer.Option(autocompletion=word_completion("packed", "spread"))] = "packed"
    wait: str | None = None
    measure: Annotated[str, typer.Option(autocompletion=word_completion("p95", "mean"))] = "p95"
    samples: Annotated[int | None, typer.Option(min=0, max=10000)] = None
    seed: Annotated[int, typer.Option(min=0)] = 0


@app.command(rich_help_panel=DECIDE_HELP_GROUP)
def fleet(
    jobs: Annotated[str, typer.Argument()],
    system: Annotated[str, typer.Option(autocompletion=catalog_name_completion("systems"))],
    cluster: ClusterOptions,
    rates: TariffOptions,
    as_json: JsonOption = False,
    plot: PlotFileOption = None,
) -> None:
    """Predict when the jobs of a team end on a cluster, and find the smallest order of machines for them.

    \b
    paleo fleet jobs.yaml --system dgx-h100 --nodes 4 --policy backfill --plot team.png
    paleo fleet jobs.yaml --system dgx-h100,dgx-a100-80gb --nodes auto --wait 4h

    Parameters
    ----------
    jobs : JOBS
        YAML file of jobs, or a trace: CSV with arrival, gpus and duration.
    system : S[,S]
        Systems to order nodes of, separated by commas.
    """
    from paleo.questions import fleet as answered

    answer = answered(jobs, system, **asdict(cluster), **asdict(rates))
    save_plot(plot, lambda cluster: cluster.plot_job_schedule(answer.study), "cluster")
    print_result(answer.json_document, answer.table, as_json)
    exit_unless(answer.requirements_met)
