"""Report on a hyperparameter search over many trials, as a JSON document, as tables and as a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import RenderableType

from paleo.report.columns import (
    AnswerColumn,
    answer_group,
    format_percent_tenths,
    name_value_table,
    row_json,
    rows_table,
)
from paleo.units import HOUR, format_duration, format_quantity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paleo.tuning.study import TuningSearch, TuningStudy

#: Points that a table lists.
_LISTED = 12


def _columns(study: TuningStudy) -> list[AnswerColumn]:
    """Return the columns of the table with one row per division of the GPUs: GPUs in all, and GPUs of a trial."""
    tariff = study.tariff
    return [
        AnswerColumn("gpus", lambda point: point.gpus, "GPUs", "count"),
        AnswerColumn("gpus_per_trial", lambda point: point.trial_estimate.gpus, "a trial", "count"),
        AnswerColumn("workers", lambda point: point.workers, "at once", "count"),
        AnswerColumn("strategy", lambda point: point.trial_estimate.predictions[0].plan.strategy_text or "dp", "plan"),
        AnswerColumn("step_time_s", lambda point: point.trial_estimate.predictions[0].step_time, "step", "s"),
        AnswerColumn("hours", lambda point: point.seconds / HOUR),
        AnswerColumn("", lambda point: point.seconds, "wall time", "duration"),
        AnswerColumn("gpu_hours", lambda point: point.gpu_hours, "GPU-h", "count"),
        AnswerColumn("usd", lambda point: point.usd(tariff), "cost", "USD", optional=True),
    ]


def _rungs(study: TuningStudy) -> list[dict[str, Any]]:
    """Return samples, tokens and number of trials of each rung of the search (a round after which poor trials stop)."""
    best = study.fastest_search
    tokens = best.trial_estimate.predictions[0].graph.tokens_per_sample
    reached = best.timeline.trials_by_rung
    return [
        {"samples": samples, "tokens": None if tokens is None else samples * tokens, "trials": trials}
        for samples, trials in zip(study.tuning.rungs, reached, strict=True)
    ]


def json_document(study: TuningStudy) -> dict[str, Any]:
    """Return the answer of ``paleo tune`` as a JSON document.

    Parameters
    ----------
    study : TuningStudy
        Time of the search for each division of the GPUs among trials.

    Returns
    -------
    dict of str to Any
        The document.
    """
    best, tuning, margin, regret = study.fastest_search, study.tuning, study.deadline_margin, study.regret
    times = best.trial_estimate.trial_times
    return {
        "verdict": study.verdict,
        "model": study.model.name,
        "system": study.system.name,
        "gpus": study.gpus,
        "method": tuning.method,
        "trials": tuning.trials,
        "eta": tuning.eta,
        "global_batch_size": study.batch,
        "software": study.software,
        "sizes": [dict(size) for size in tuning.varied_network_sizes],
        "hours": best.seconds / HOUR,
        "hours_interval": [end / HOUR for end in best.interval],
        "first_full_hours": best.timeline.first_full_trial_time / HOUR,
        "gpu_hours": best.gpu_hours,
        "busy_gpu_hours": best.timeline.busy_worker_time * best.trial_estimate.gpus / HOUR,
        "usd": best.usd(study.tariff),
        "kwh": best.kwh(study.tariff),
        "utilisation": best.timeline.utilisation,
        "gpus_per_trial": best.trial_estimate.gpus,
        "trials_by_rung": _rungs(study),
        "overheads_s": {
            "start": times.launch_time,
            "restore": times.restore[0],
            "save": times.save[0],
            "evaluation": times.evaluation[0],
        },
        "cheapest": row_json(_columns(study), study.cheapest_search),
        "deadline": None
        if margin is None
        else {
            "seconds": margin.deadline_seconds,
            "holds": margin.meets_deadline,
            "trials": margin.max_trials,
            "nodes": margin.min_nodes,
        },
        "regret": None
        if regret is None
        else {"rank_correlation": regret.correlation, "share": regret.median, "share_interval": list(regret.interval)},
        "curve": [row_json(_columns(study), point) for point in study.searches],
        "refusals": list(study.refusals),
        "unmodelled": list(study.unmodelled),
    }


def table(study: TuningStudy) -> RenderableType:
    """Return the answer of ``paleo tune`` as tables: verdict, costs, rungs, divisions of the GPUs.

    Parameters
    ----------
    study : TuningStudy
        Time of the search for each division of the GPUs among trials.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    best, tuning = study.fastest_search, study.tuning
    low, high = best.interval
    kwh, first = best.kwh(study.tariff), best.timeline.first_full_trial_time
    interval = f"90 % interval {format_duration(low)} to {format_duration(high)}"
    rows = [
        ("wall time", f"{format_duration(best.seconds)}  ({interval})"),
        ("first whole trial", format_duration(first) if np.isfinite(first) else "none"),
        ("GPU-hours", f"{best.gpu_hours:,.1f}, {format_percent_tenths(best.timeline.utilisation)} of them busy"),
        ("energy", "-" if kwh is None else f"{kwh:,.1f} kWh"),
        ("global batch", f"{study.batch:,} samples"),
        ("software", study.software + (f", as of {study.software_reason}" if study.software_reason else "")),
        ("method", f"{tuning.method_class.title}: {tuning.method_class.source}"),
    ]
    if study.regret is not None:
        part = study.regret
        ends = " to ".join(map(format_percent_tenths, part.interval))
        better = f"{format_percent_tenths(part.median)} of the trials are better than the one returned"
        correlated = f"if scores of a rung and final ones correlate by {part.correlation:g}"
        rows.append(("regret", f"{better} (90 % interval {ends}), {correlated}"))
    unit = "tokens" if _rungs(study)[0]["tokens"] is not None else "samples"
    rungs = [
        AnswerColumn("", lambda rung: rung[unit], unit, "", lambda rung: format_quantity(rung[unit], "")),
        AnswerColumn("", lambda rung: rung["trials"], "trials", "count"),
    ]
    points = sorted(study.searches, key=lambda point: (-point.gpus, point.seconds))
    notes = [f"Does not run: {refusal}." for refusal in study.refusals]
    notes.append(f"Not modelled: {'; '.join(study.unmodelled)}.")
    tables = (
        name_value_table("The search", rows),
        rows_table("Trials by rung", rungs, _shortened(_rungs(study))),
        rows_table("Divisions of the GPUs", _columns(study), points[:_LISTED]),
    )
    return answer_group(study.verdict, tables, notes)


def _shortened(rungs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first and last rungs if there are many, otherwise all."""
    return rungs if len(rungs) <= _LISTED else [*rungs[: _LISTED // 2], *rungs[-_LISTED // 2 :]]


def plot_trials(study: TuningStudy) -> Figure:
    """Plot the trials of each rung over time, and wall time over the GPUs of a trial.

    Parameters
    ----------
    study : TuningStudy
        Time of the search for each division of the GPUs among trials.

    Returns
    -------
    Figure
        The plot.
    """
    import matplotlib

    from paleo.report.plots import BLUE, PLOT_STYLE, VERMILION, figure_with_axes

    with matplotlib.rc_context(PLOT_STYLE):
        picture, (over_time, by_width) = figure_with_axes(9.0, 3.8, 2, width_ratios=[3, 2])
        _busy_workers(over_time, study.fastest_search)
        whole = [point for point in study.searches if point.gpus == study.gpus]
        widths = [point.trial_estimate.gpus for point in whole]
        by_width.plot(widths, [point.seconds / HOUR for point in whole], "o-", color=BLUE)
        best = study.fastest_search
        by_width.plot(best.trial_estimate.gpus, best.seconds / HOUR, "o", color=VERMILION, label="fastest")
        by_width.set_xscale("log", base=2)
        by_width.set_xticks(widths, [str(width) for width in widths])
        by_width.minorticks_off()
        by_width.set(xlabel="GPUs a trial", ylabel="wall time [h]", title=f"{study.gpus} GPUs in all")
        by_width.set_ylim(bottom=0.0)
        by_width.legend()
        picture.suptitle(f"{study.tuning.trials:,} trials of {study.model.title} by {study.tuning.method_class.title}")
    return picture


def _busy_workers(axes: Any, point: TuningSearch) -> None:
    """Draw the number of workers that are busy with each rung over time, stacked from the first rung."""
    import matplotlib
    from matplotlib.ticker import MaxNLocator

    timeline = point.timeline
    times = np.linspace(0.0, timeline.wall_time, 400)
    rungs = np.array([job.rung for job in timeline.jobs])
    begins, ends = np.array(timeline.begins), np.array(timeline.ends)
    groups = np.array_split(np.arange(len(timeline.rungs)), min(len(timeline.rungs), 6))
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, len(groups)))
    busy, names = [], []
    for group in groups:
        chosen = np.isin(rungs, group)
        started = np.searchsorted(np.sort(begins[chosen]), times, side="right")
        busy.append(started - np.searchsorted(np.sort(ends[chosen]), times, side="right"))
        names.append(f"rung {group[0] + 1}" if len(group) == 1 else f"rungs {group[0] + 1} to {group[-1] + 1}")
    axes.stackplot(times / HOUR, busy, labels=names, colors=colours, step="post")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.axhline(point.workers, color="black", linewidth=0.8)
    axes.set(xlabel="hours", ylabel="trials at once", ylim=(0, point.workers * 1.25))
    axes.set_title(f"{point.trial_estimate.gpus} GPUs a trial")
    axes.legend(loc="upper center", ncols=min(len(groups), 4), fontsize=8)
