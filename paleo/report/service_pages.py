"""Self-contained pages of services and of reinforcement learning: verdict, charts, every plan in a table that sorts.

They work without a server or network. Layout is in ``templates/answer.html``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib

from paleo import __version__
from paleo.report.charts import Bar, Chart, bar_chart, figure_to_svg
from paleo.report.columns import AnswerColumn
from paleo.report.html_pages import rendered_page, sortable_table
from paleo.report.plots import BLUE, GREY, PLOT_STYLE, figure_with_axes
from paleo.units import format_duration, format_gibibytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from paleo.serving.service import Service
    from paleo.studies.reinforcement import ReinforcementStudy

#: Size of a chart [inch].
_CHART_SIZE = (5.2, 3.4)


def _latency_table(service: Service) -> Any:
    """Return the rows (name, percentiles) of a service's latencies."""
    from paleo.report import serving

    columns = [AnswerColumn("", lambda row: row[0], "time")]
    columns += [AnswerColumn("", _quantile(key), key, "s") for key in serving.LATENCY_STATISTICS]
    rows = [(name, service.latencies(part)) for part, name in serving.LATENCY_ROW_NAMES.items()]
    return sortable_table(columns, rows)


def _quantile(key: str) -> Callable[[Any], Any]:
    return lambda row: row[1].get(key)


def service_page(service: Service, systems: Sequence[Service] = (), *, date: str) -> str:
    """Return the HTML page with the verdict, latencies and plans of an inference service.

    Parameters
    ----------
    service : Service
        Plans of a service.
    systems : sequence of Service, optional
        Plans of the same service on several systems or engines.
    date : str
        Printed on the page.

    Returns
    -------
    str
        The page.
    """
    from paleo.report import serving
    from paleo.serving.service import UNMODELLED_EFFECTS

    plan, tables, charts = service.best, [], []
    if len(systems) > 1:
        tables.append(("Systems", sortable_table(serving.SYSTEM_COLUMNS, systems), ""))
    if plan is not None:
        room = ", ".join(f"{name} {format_gibibytes(size)}" for name, size in serving.memory_parts(plan).items())
        tables.append(("Latency of the first plan", _latency_table(service), f"Simulated. Memory of a GPU: {room}."))
        tables.append(("Plans", sortable_table(serving.PLAN_COLUMNS, service.result.plans), "Click a heading to sort."))
        charts = [(title, _picture(title, picture, service)) for title, picture in serving.PLOTS_BY_TITLE.items()]
    return rendered_page(
        "answer.html",
        title=f"{service.model.title} on {service.gpus} x {service.system.device.name}",
        version=__version__,
        date=date,
        question=serving.load_description(service),
        verdict=service.verdict,
        possible=plan is not None,
        warnings=list(service.warnings),
        charts=charts,
        tables=tables,
        command=service.launch_command,
        assumptions=serving.accuracy_notes(service),
        unmodelled=list(UNMODELLED_EFFECTS),
        refusals=list(dict.fromkeys(service.result.refusals)),
    )


def _picture(title: str, picture: Callable[[Axes, Service], None], service: Service) -> Chart:
    with matplotlib.rc_context(PLOT_STYLE):
        drawn, (axes,) = figure_with_axes(*_CHART_SIZE)
        picture(axes, service)
    return Chart(figure_to_svg(drawn, title))


def reinforcement_page(study: ReinforcementStudy, *, date: str) -> str:
    """Return the HTML page with the verdict, step time by part and layouts of reinforcement learning.

    Parameters
    ----------
    study : ReinforcementStudy
        Steps, the shortest first.
    date : str
        Printed on the page.

    Returns
    -------
    str
        The page.
    """
    from paleo.report import reinforcement
    from paleo.serving.reinforcement import UNMODELLED_EFFECTS as NOT_LEARNED

    best = study.steps[0] if study.steps else None
    charts = []
    if best is not None:
        parts = [
            Bar(name, seconds, None, None, format_duration(seconds), GREY if name == "idle" else BLUE)
            for name, seconds in reinforcement.nonzero_step_parts(best).items()
        ]
        charts = [("A step by part", bar_chart(parts, "A step by part"))]
    tables = [("Layouts", sortable_table(reinforcement.LAYOUT_COLUMNS, study.steps), "Click a heading to sort.")]
    question = study.question
    rollouts, machine = question.rollouts, f"{question.gpus} x {question.system.device.name}"
    return rendered_page(
        "answer.html",
        title=f"{question.algorithm.upper()} on {question.model.title}, {machine}",
        version=__version__,
        date=date,
        question=(
            f"{rollouts.count:,} answers a step; on average {rollouts.mean_prompt_tokens:,.0f} tokens a prompt and "
            f"{rollouts.mean_answer_tokens:,.0f} an answer, at most {rollouts.max_answer_tokens:,.0f}; "
            f"{study.step_count:,} steps."
        ),
        verdict=study.verdict,
        possible=best is not None and best.trainer_fits,
        warnings=[],
        charts=charts,
        tables=tables if best else [],
        command="",
        assumptions=reinforcement.accuracy_notes(study),
        unmodelled=list(NOT_LEARNED),
        refusals=list(dict.fromkeys(study.refusals)),
    )
