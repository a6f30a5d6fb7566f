"""Report on many jobs on a cluster, as a JSON document, as tables and as a plot."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import RenderableType

from paleo.cluster.nodes import SCHEDULING_POLICIES
from paleo.report.columns import AnswerColumn, answer_group, format_usd, name_value_table, row_json, rows_table
from paleo.units import HOUR, format_duration, with_noun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paleo.cluster.study import FleetStudy

#: Jobs that a table lists, and jobs up to which a plot has a line for each node.
_LISTED, _DRAWN_NODES = 25, 64


def _time(seconds: float) -> str:
    return format_duration(seconds) if seconds else "0 s"


@dataclass(frozen=True, slots=True)
class _JobRow:
    """One job of a fleet with its results, as a row of the table."""

    study: FleetStudy
    number: int

    @property
    def job(self) -> Any:
        return self.study.fleet.cluster_jobs[self.number]

    def of(self, part: str) -> float:
        """Return this job's entry in an array of simulation results, such as the start times.

        Parameters
        ----------
        part : str
            Name of the array, such as ``start`` or ``finish``.

        Returns
        -------
        float
            Entry of the job, in the unit of the array.
        """
        return float(getattr(self.study.result, part)[self.number])

    @property
    def met(self) -> bool | None:
        return None if math.isinf(self.job.deadline) else self.of("finish") <= self.job.deadline

    @property
    def gpus(self) -> int:
        return int(next(gpus for gpus in self.job.preferred_gpus if gpus))

    @property
    def interval(self) -> list[float] | None:
        ends = self.study.finish_time_intervals
        return None if ends is None else [float(end) for end in ends[self.number]]

    @property
    def on_time_share(self) -> float | None:
        shares = self.study.deadline_probability
        return None if shares is None or self.met is None else float(shares[self.number])


def _columns() -> list[AnswerColumn]:
    return [
        AnswerColumn("name", lambda r: r.job.name, "job"),
        AnswerColumn("team", lambda r: r.job.team or None, "team", optional=True),
        AnswerColumn("gpus", lambda r: r.gpus, "GPUs", "count"),
        AnswerColumn("arrival_s", lambda r: r.job.arrival, "arrival", "s", lambda r: _time(r.job.arrival)),
        AnswerColumn("start", lambda r: r.of("start"), "start", "s", lambda r: _time(r.of("start"))),
        AnswerColumn("finish", lambda r: r.of("finish"), "finish", "s", lambda r: _time(r.of("finish"))),
        AnswerColumn("finish_interval", lambda r: r.interval),
        AnswerColumn("waited", lambda r: r.of("waiting_time"), "waited", "s", lambda r: _time(r.of("waiting_time"))),
        AnswerColumn("preemptions", lambda r: int(r.of("preemptions")), "stops", "count"),
        AnswerColumn("deadline", lambda r: None if r.met is None else r.job.deadline),
        AnswerColumn("met", lambda r: r.met, "in time", "yes or no", optional=True),
        AnswerColumn("met_share", lambda r: r.on_time_share, "of samples", "fraction", optional=True),
    ]


def _rows(study: FleetStudy) -> list[_JobRow]:
    return [_JobRow(study, number) for number in range(len(study.fleet.jobs))]


def json_document(study: FleetStudy) -> dict[str, Any]:
    """Return the answer of ``paleo fleet`` as a JSON document.

    Parameters
    ----------
    study : FleetStudy
        Jobs simulated on an order of machines.

    Returns
    -------
    dict of str to Any
        The document; times in seconds from the zero of arrivals.
    """
    result, larger, more = study.result, study.result_with_one_more_node, None
    machines = zip(study.fleet.systems, study.nodes, strict=True)
    if larger is not None:
        more = {"span_s": larger.makespan, "wait_s": _waits(larger), "utilisation": larger.utilisation}
    return {
        "verdict": study.verdict,
        "policy": study.fleet.policy,
        "placement": study.fleet.placement,
        "nodes": sum(study.nodes),
        "machines": [{"system": system.name, "nodes": count} for system, count in machines],
        "gpus": result.gpus,
        "possible": study.meets_requirements,
        "missed": study.late_jobs,
        "span_s": result.makespan,
        "wait_s": {**_waits(result), "limit": study.requirements.max_wait},
        "utilisation": result.utilisation,
        "lost_gpu_hours": study.lost_gpu_hours,
        "usd": study.rent_usd,
        "node_more": more,
        "jobs": [row_json(_columns(), row) for row in _rows(study)],
        "unmodelled": list(study.unmodelled),
    }


def _waits(result: Any) -> dict[str, float]:
    return {"mean": float(result.waiting_time.mean()), "p95": float(np.quantile(result.waiting_time, 0.95))}


def table(study: FleetStudy) -> RenderableType:
    """Return the answer of ``paleo fleet`` as tables: verdict, cluster, lost GPU-hours, jobs.

    Parameters
    ----------
    study : FleetStudy
        Jobs simulated on an order of machines.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    result, policy = study.result, SCHEDULING_POLICIES[study.fleet.policy]
    total = result.gpus * result.makespan / HOUR
    rows = [
        ("machines", f"{study.machines_text}, {with_noun(result.gpus, 'GPU')}"),
        ("policy", f"{policy.title} ({policy.source})"),
        ("mean wait", f"{_time(float(result.waiting_time.mean()))}, longest {_time(float(result.waiting_time.max()))}"),
        ("cost", format_usd(study.rent_usd)),
    ]
    work = float((result.work_gpu_seconds - result.failure_gpu_seconds).sum()) / HOUR
    lost = [("work", work), *study.lost_gpu_hours.items()]
    parts = [
        AnswerColumn("", lambda entry: entry[0], "GPU-hours of"),
        AnswerColumn("", lambda entry: entry[1], "hours", "", lambda entry: f"{entry[1]:,.1f}"),
        AnswerColumn("", lambda entry: entry[1] / total if total else 0.0, "share", "tenths"),
    ]
    listed = _rows(study)[:_LISTED]
    more = len(study.fleet.jobs) - len(listed)
    notes = [f"{with_noun(more, 'job')} more: --json lists all."] if more else []
    notes.append(f"Not modelled: {'; '.join(study.unmodelled)}.")
    tables = (
        name_value_table("The cluster", rows),
        rows_table("Where GPU-hours go", parts, lost),
        rows_table("Jobs", _columns(), listed),
    )
    return answer_group(study.verdict, tables, notes)


def plot_job_schedule(study: FleetStudy) -> Figure:
    """Plot which job runs on which GPUs over time, and the number of waiting jobs.

    Parameters
    ----------
    study : FleetStudy
        Jobs simulated on an order of machines.

    Returns
    -------
    Figure
        The plot.
    """
    import matplotlib
    from matplotlib.ticker import MaxNLocator

    from paleo.report.plots import BLUE, PLOT_STYLE, figure_with_axes

    with matplotlib.rc_context(PLOT_STYLE):
        result = study.result
        lengths = result.queue_history
        waiting = lengths[:, 1].max(initial=0.0)
        heights = [4, 1] if waiting else [4]
        picture, (chart, *panels) = figure_with_axes(9.0, 6.0, 1, rows=len(heights), sharex=True, height_ratios=heights)
        _gantt(chart, study)
        for queue in panels:
            times = np.append(lengths[:, 0], result.makespan + lengths[0, 0]) / HOUR
            jobs = np.append(lengths[:, 1], lengths[-1, 1])
            queue.step(times, jobs, where="post", color=BLUE)
            queue.fill_between(times, jobs, step="post", color=BLUE, alpha=0.25)
            queue.set(ylabel="jobs waiting", ylim=(0, 1.1 * waiting))
            queue.yaxis.set_major_locator(MaxNLocator(integer=True))
        [chart, *panels][-1].set_xlabel("hours" if waiting else "hours; no job waits")
        title = SCHEDULING_POLICIES[study.fleet.policy].title
        picture.suptitle(f"{with_noun(len(study.fleet.jobs), 'job')} on {study.machines_text}, {title}")
    return picture


def _gantt(axes: Any, study: FleetStudy) -> None:
    """Draw a Gantt chart: one bar for each time interval of a job on a node, as high as its number of GPUs there."""
    import matplotlib
    from matplotlib.collections import PolyCollection

    pools = study.fleet.empty_node_pools(study.nodes)
    first = np.concatenate([[0], np.cumsum([pool.gpus for pool in pools])])
    lanes = [np.zeros(pool.gpus) for pool in pools]
    colours = matplotlib.colormaps["tab20"](np.arange(20))
    boxes, fills = [], []
    for segment in sorted(study.result.segments, key=lambda each: each.begin):
        begin, end = segment.begin / HOUR, segment.end / HOUR
        for node, count in segment.gang:
            size = pools[segment.pool].gpus_per_node
            ends = lanes[segment.pool][node * size : (node + 1) * size]
            free = np.flatnonzero(ends <= segment.begin * (1.0 + 1e-12))[:count]
            ends[free] = segment.end
            for run in np.split(free, np.flatnonzero(np.diff(free) > 1) + 1):
                low = first[segment.pool] + node * size + run[0]
                high = low + len(run)
                boxes.append([(begin, low), (end, low), (end, high), (begin, high)])
                fills.append(colours[segment.job % 20])
            if len(boxes) < _LISTED * 8 and len(free) and node == segment.gang[0][0]:
                height = first[segment.pool] + node * size + free[0] + len(free) / 2
                _name(axes, study, segment.job, (begin, end), height)
    edge = "white" if len(boxes) < 2000 else "none"
    axes.add_collection(PolyCollection(boxes, facecolors=fills, edgecolors=edge, linewidths=0.5))
    for pool, low in zip(pools, first[:-1], strict=True):
        if sum(each.nodes for each in pools) <= _DRAWN_NODES:
            for node in range(pool.nodes + 1):
                axes.axhline(low + node * pool.gpus_per_node, color="grey", linewidth=0.4, zorder=0)
    begin = min((job.arrival for job in study.fleet.cluster_jobs), default=0.0) / HOUR
    node = pools[0].gpus_per_node
    axes.set_yticks(np.unique(np.linspace(0, first[-1], 9).astype(int) // node * node))
    axes.set(xlim=(begin, begin + study.result.makespan / HOUR), ylim=(0, first[-1]), ylabel="GPUs, by node")
    axes.grid(visible=False)


def _name(axes: Any, study: FleetStudy, job: int, ends: tuple[float, float], height: float) -> None:
    """Write a job's name into its bar, or to the right of the bar where it is too short."""
    name, span = study.fleet.cluster_jobs[job].name, study.result.makespan / HOUR
    if not span:
        return
    inside = (ends[1] - ends[0]) / span > 0.012 * len(name)
    if not inside and len(study.fleet.cluster_jobs) > _LISTED:
        return
    place, side = (sum(ends) / 2.0, "center") if inside else (ends[1] + 0.005 * span, "left")
    step = 0.03 * sum(pool.gpus for pool in study.fleet.empty_node_pools(study.nodes))
    written = [(*text.get_position(), max(len(text.get_text()), len(name))) for text in axes.texts]
    while any(abs(y - height) < step and abs(x - place) < 0.012 * longest * span for x, y, longest in written):
        height += step
    axes.text(place, height, name, ha=side, va="center", fontsize=7, clip_on=True)
