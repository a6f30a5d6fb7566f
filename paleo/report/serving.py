"""Report on an inference service, as a JSON document, as tables and as plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paleo.report.columns import AnswerColumn, answer_group, empty_table, percent, row_json, rows_table, wrapped_text
from paleo.serving.plans import ServingPlan, iteration_time_breakdown, max_request_rate, states_over_request_rates
from paleo.serving.service import THROUGHPUT_INTERVAL_FACTORS, UNMODELLED_EFFECTS, Service
from paleo.units import format_duration, format_gibibytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paleo.serving.benchmark import ServiceAudit
    from paleo.serving.steady_state import SteadyState

#: Plans that a table shows.
_MAX_TABLE_PLANS = 8
#: Latencies of a service by the names of their rows, and the quantities of each.
LATENCY_ROW_NAMES = {"ttft": "to the first token", "tpot": "a further token", "latency": "the answer"}
LATENCY_STATISTICS = ("mean", "p50", "p90", "p99")


def json_document(service: Service, systems: Sequence[Service] = ()) -> dict[str, Any]:
    """Return the answer of ``paleo serve`` as a JSON document.

    Parameters
    ----------
    service : Service
        Plans of a service.
    systems : sequence of Service, optional
        Plans of the same service on several systems or engines.

    Returns
    -------
    dict of str to Any
        The document; speeds and prices are null if no plan meets the limits.
    """
    plan = service.best
    head = {
        "verdict": service.verdict,
        "model": service.model.name,
        "released": service.model.released,
        "system": service.system.name,
        "gpus": service.gpus,
        "engine": {"name": service.engine.name, "release": service.engine.release},
        "load": _load_document(service),
        "limits": dict(service.limits.limits_by_name) | {"percentile": service.limits.percentile},
        "possible": plan is not None,
        "unmodelled": list(UNMODELLED_EFFECTS),
        "refusals": list(service.result.refusals),
        "warnings": list(service.warnings),
        "engine_choice": service.engine_comparison,
        "disaggregation": _disaggregation_document(service),
        "systems": [row_json(SYSTEM_COLUMNS, each) for each in systems],
    }
    return head | (_refused(service) if plan is None else _answered(service, plan))


def _disaggregation_document(service: Service) -> dict[str, Any] | None:
    split = service.disaggregation
    if split is None:
        return None
    return {
        "plan": split.text,
        "gpus": split.gpus,
        "requests_per_s": split.requests_per_s,
        "ttft_s": split.ttft,
        "tpot_s": split.tpot,
        "transfer_s": split.cache_transfer_time,
    }


def _of_plan(get: Callable[[ServingPlan], Any]) -> Callable[[Service], Any]:
    """Return a function that reads a quantity of a service's first plan; None where there is none."""
    return lambda service: None if service.best is None else get(service.best)


def _price(service: Service) -> float | None:
    return (service.usd_per_million or {}).get("output")


#: Columns of systems, whose rows are services, and of plans.
SYSTEM_COLUMNS = (
    AnswerColumn("system", lambda s: s.system.name, "system"),
    AnswerColumn("gpus", lambda s: s.gpus, "GPUs", "count"),
    AnswerColumn("engine", lambda s: s.engine.name),
    AnswerColumn("requests_per_s", _of_plan(lambda plan: plan.requests_per_s), "requests/s", "number"),
    AnswerColumn("tokens_per_s_per_gpu", lambda s: s.best and s.best.tokens_per_s / s.gpus, "tokens/s/GPU", "count"),
    AnswerColumn("usd_per_million_output", _price, "USD/1M tokens", "price"),
    AnswerColumn("joules_per_token", lambda s: s.joules_per_token, "J/token", "number"),
    AnswerColumn("strategy", _of_plan(lambda plan: plan.strategy), "plan"),
)
PLAN_COLUMNS = (
    AnswerColumn("strategy", lambda plan: plan.strategy, "plan"),
    AnswerColumn("gpus", lambda plan: plan.gpus),
    AnswerColumn("replicas", lambda plan: plan.layout.replicas),
    AnswerColumn("weights", lambda plan: plan.layout.formats.text, "weights"),
    AnswerColumn("cache", lambda plan: plan.layout.formats.cache_format),
    AnswerColumn("batch_tokens", lambda plan: float(plan.batching.max_tokens)),
    AnswerColumn("sequences", lambda plan: float(plan.batching.max_sequences)),
    AnswerColumn("batch", lambda plan: plan.layout.replicas * float(plan.state.decoding_sequences), "batch", "count"),
    AnswerColumn("requests_per_s", lambda plan: plan.requests_per_s, "requests/s", "number"),
    AnswerColumn("tokens_per_s", lambda plan: plan.tokens_per_s),
    AnswerColumn("tokens_per_s_per_gpu", lambda plan: plan.tokens_per_s / plan.gpus, "tokens/s/GPU", "count"),
    AnswerColumn("tokens_per_s_per_user", lambda plan: 1.0 / float(plan.state.tpot), "tokens/s/user", "number"),
    AnswerColumn("ttft_s", lambda plan: _finite(plan.state.ttft), "first token", "s"),
    AnswerColumn("tpot_s", lambda plan: float(plan.state.tpot)),
    AnswerColumn("limited_by", lambda plan: plan.limited_by, "limited by"),
)  # fmt: skip


def _load_document(service: Service) -> dict[str, Any]:
    load = service.load
    return {
        "kind": load.arrival_kind,
        "input_tokens": float(load.lengths.input),
        "output_tokens": float(load.lengths.output),
        "length_variation": [load.lengths.input_variation, load.lengths.output_variation],
        "prefix_hit": float(load.lengths.prefix_hit_share),
        "rate": load.rate or None,
        "users": load.users or None,
        "think_s": load.think_time,
    }


def _refused(service: Service) -> dict[str, Any]:
    keys = (
        "requests_per_s", "requests_per_s_interval", "tokens_per_s", "ttft_s", "tpot_s", "latency_s", "batch",
        "kv_cache", "usd_per_million_tokens", "joules_per_token", "limited_by", "strategy", "steady", "calibration",
    )  # fmt: skip
    capacities = [max_request_rate(each, service.load) for each in service.fitting_layouts]
    empty: dict[str, Any] = dict.fromkeys(keys)
    return empty | {"capacity_requests_per_s": max(capacities, default=None), "plans": [], "curve": []}


def _answered(service: Service, plan: ServingPlan) -> dict[str, Any]:
    low, high = THROUGHPUT_INTERVAL_FACTORS
    memory, state = plan.layout.memory, plan.state
    length = service.load.lengths.mean_cached_tokens
    return {
        "requests_per_s": plan.requests_per_s,
        "requests_per_s_interval": [plan.requests_per_s * low, plan.requests_per_s * high],
        "tokens_per_s": plan.tokens_per_s,
        "ttft_s": service.latencies("ttft"),
        "tpot_s": service.latencies("tpot"),
        "latency_s": service.latencies("latency"),
        "batch": plan.layout.replicas * float(state.decoding_sequences),
        "kv_cache": {
            "bytes": memory.kv_cache,
            "sequences": float(memory.max_cached_sequences(length)),
            "tokens": memory.max_cached_tokens(length),
            "bytes_per_token": float(memory.sequence_bytes(memory.tokens_per_page)) / memory.tokens_per_page,
        },
        "memory_bytes": {
            "weights": memory.weights,
            "activations": memory.activations,
            "reserve": memory.engine_reserve,
            "cache": memory.kv_cache,
            "capacity": memory.capacity,
        },
        "usd_per_million_tokens": service.usd_per_million,
        "joules_per_token": service.joules_per_token,
        "limited_by": service.limited_by,
        "strategy": plan.strategy,
        "capacity_requests_per_s": max_request_rate(plan.layout, service.load),
        "breakdown_s": iteration_time_breakdown(plan.layout, state),
        "steady": {  # what the steady-state model says without simulation
            "iteration_s": float(state.iteration_time),
            "utilisation": float(state.utilisation),
            **_steady_latencies(state)[0],
            "simulated_requests_per_s": service.simulated_rate,
        },
        "launch": service.launch_command,
        "calibration": plan.layout.iteration_tables.calibration,
        "plans": [row_json(PLAN_COLUMNS, each) for each in service.result.plans],
        "curve": _curve(service, plan),
    }


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if np.isfinite(number) else None


def _steady_latencies(state: SteadyState) -> list[dict[str, Any]]:
    """Return mean and p99 of each latency in the steady state, a document for each request rate."""
    documents: list[dict[str, Any]] = [{} for _ in np.atleast_1d(state.ttft)]
    for part in LATENCY_ROW_NAMES:
        ends = zip(np.atleast_1d(getattr(state, part)), np.atleast_1d(state.percentile(part, 99)), strict=True)
        for document, (mean, p99) in zip(documents, ends, strict=True):
            document[f"{part}_s"] = {"mean": _finite(mean), "p99": _finite(p99)}
    return documents


def _curve(service: Service, plan: ServingPlan) -> list[dict[str, Any]]:
    rates, state = states_over_request_rates(plan, service.load)
    return [
        {
            "requests_per_s": float(rate),
            "tokens_per_s": float(rate * state.answer_tokens[index]),
            "batch": plan.layout.replicas * float(state.decoding_sequences[index]),
            **latencies,
        }
        for index, (rate, latencies) in enumerate(zip(rates, _steady_latencies(state), strict=True))
    ]


def table(service: Service, systems: Sequence[Service] = ()) -> RenderableType:
    """Return the answer of ``paleo serve`` as tables: verdict, latencies, memory and plans.

    Parameters
    ----------
    service : Service
        Plans of a service.
    systems : sequence of Service, optional
        Plans of the same service on several systems or engines.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    plan = service.best
    if plan is None:
        reasons = list(dict.fromkeys(service.result.refusals[1:]))[:_MAX_TABLE_PLANS]
        return answer_group(service.verdict, (), (f"- {reason}" for reason in reasons))
    memory = plan.layout.memory
    facts = empty_table("Memory of a GPU", ["part", "size", "share"])
    for name, size in (*memory_parts(plan).items(), ("engine", memory.engine_reserve)):
        facts.add_row(name, format_gibibytes(size), percent(size / memory.capacity))
    tables = [rows_table("Systems", SYSTEM_COLUMNS, systems)] if len(systems) > 1 else []
    tables += [_latency_table(service), facts]
    tables.append(rows_table("Plans", PLAN_COLUMNS, service.result.plans[:_MAX_TABLE_PLANS]))
    command = Text(service.launch_command, no_wrap=True, overflow="ignore")
    notes = [*accuracy_notes(service), f"Not modelled: {'; '.join(UNMODELLED_EFFECTS)}."]
    return answer_group(service.verdict, [*tables, *([command] if command else [])], notes)


def accuracy_notes(service: Service) -> list[str]:
    """Return notes on the source, accuracy and calibration of a serving prediction, one sentence each.

    Parameters
    ----------
    service : Service
        Plans of a service.

    Returns
    -------
    list of str
        Sentences.
    """
    low, high = THROUGHPUT_INTERVAL_FACTORS
    texts = [
        "Times are those of a simulation; the fixed point has them in --json (steady).",
        f"Published throughputs: 84 % lie between {low:g} and {high:g} times the prediction.",
    ]
    if service.load.arrival_kind == "most" and not service.limits.limits_by_name:
        waits = "first tokens wait in the queue; --rate or --ttft bound it."
        texts.append(f"All requests are there at once, so that {waits}")
    if service.best is not None:
        texts.append(f"Calibration: {service.best.layout.iteration_tables.calibration}")
    return texts


def load_description(service: Service) -> str:
    """Return a sentence on the load of a service: arrivals and lengths of requests.

    Parameters
    ----------
    service : Service
        Plans of a service.

    Returns
    -------
    str
        A sentence.
    """
    load = service.load
    kinds = {
        "most": "As many requests as are served",
        "at once": f"{load.request_count:,} requests at once",
        "closed": f"{load.users:,} users who ask {format_duration(load.think_time)} after an answer",
        "trace": "The requests of a trace",
    }
    arrival = kinds.get(load.arrival_kind, f"{load.rate:.3g} requests/s, {load.arrival_kind} arrivals")
    lengths = (load.lengths.input, load.lengths.output)
    return "{}; prompts of {:,.0f} tokens, answers of {:,.0f}.".format(arrival, *lengths)


def _latency_table(service: Service) -> Table:
    facts = empty_table("Latency", ["time", *LATENCY_STATISTICS])
    for part, name in LATENCY_ROW_NAMES.items():
        times = service.latencies(part)
        facts.add_row(name, *(format_duration(times[key]) for key in LATENCY_STATISTICS))
    return facts


def memory_parts(plan: ServingPlan) -> dict[str, float]:
    """Return the memory of one GPU by part: weights, KV cache and activations.

    Parameters
    ----------
    plan : ServingPlan
        Plan of a service.

    Returns
    -------
    dict of str to float
        Bytes by the name of the part.
    """
    memory = plan.layout.memory
    return {"weights": memory.weights, "KV cache": memory.kv_cache, "activations": memory.activations}


def audit_json_document(audit: ServiceAudit) -> dict[str, Any]:
    """Return the audit of an engine's benchmark as a JSON document.

    Parameters
    ----------
    audit : ServiceAudit
        Measured and predicted values.

    Returns
    -------
    dict of str to Any
        The document.
    """
    service = audit.service
    return {
        "model": service.model.name,
        "system": service.system.name,
        "gpus": service.gpus,
        "log": "benchmark of a serving engine",
        "verdict": audit.verdict,
        "measured": dict(audit.benchmark.measured_performance),
        "predicted": audit.predicted_performance,
        "faults": [{"name": name, "factor": factor} for name, factor in audit.latency_ratios_by_fault.items()],
        "beyond": None,
    }


def audit_table(audit: ServiceAudit) -> RenderableType:
    """Return the audit of an engine's benchmark as tables.

    Parameters
    ----------
    audit : ServiceAudit
        Measured and predicted values.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    facts = empty_table("Benchmark", ["quantity", "measured", "predicted", "ratio"])
    names = {"ttft": "first token", "ttft_p99": "first token, p99", "tpot": "a token", "tpot_p99": "a token, p99"}
    for key, predicted in audit.predicted_performance.items():
        measured = audit.benchmark.measured_performance[key]
        texts = (format_duration(each) if key in names else f"{each:,.0f}" for each in (measured, predicted))
        facts.add_row(names.get(key, "output tokens/s"), *texts, f"{measured / predicted:.2f}")
    return Group(wrapped_text(Text(audit.verdict, style="bold")), Text(), facts)


def plot_service(service: Service) -> Figure:
    """Plot throughput per user against throughput per GPU [tokens/s] for every plan, and latency against request rate.

    Parameters
    ----------
    service : Service
        Plans of a service.

    Returns
    -------
    Figure
        The plot.
    """
    import matplotlib

    from paleo.report.plots import PLOT_STYLE, figure_with_axes

    with matplotlib.rc_context(PLOT_STYLE):
        drawn, axes = figure_with_axes(12.0, 3.6, len(PLOTS_BY_TITLE))
        for each, (title, picture) in zip(axes, PLOTS_BY_TITLE.items(), strict=True):
            picture(each, service)
            each.set_title(title)
        drawn.suptitle(f"{service.model.title} on {service.gpus} x {service.system.device.name}")
    return drawn


def _draw_speeds(axes: Axes, service: Service) -> None:
    """Draw tokens per second of one user against tokens per second of one GPU, a point per plan."""
    from paleo.report.plots import BLUE, GREY

    assert service.best is not None
    for each in reversed(service.result.plans[:_MAX_TABLE_PLANS]):
        rates, state = states_over_request_rates(each, service.load)
        color, width = (BLUE, 2.0) if each is service.best else (GREY, 1.0)
        axes.plot(1.0 / state.tpot, rates * state.answer_tokens / each.gpus, color=color, lw=width)
    axes.plot([], [], color=BLUE, lw=2.0, label=service.best.strategy)
    if len(service.result.plans) > 1:
        axes.plot([], [], color=GREY, label="other plans")
    axes.set(xlabel="tokens/s of a user", ylabel="tokens/s of a GPU")
    axes.legend(loc="best")


def _draw_latencies(axes: Axes, service: Service) -> None:
    """Draw the latencies of the first plan against its request rate."""
    from paleo.report.plots import BLUE, VERMILION

    assert service.best is not None
    rates, state = states_over_request_rates(service.best, service.load, 40)
    for part, color, label in (("ttft", VERMILION, "first token"), ("latency", BLUE, "answer")):
        axes.plot(rates, getattr(state, part), color=color, label=f"{label}, mean")
        axes.plot(rates, state.percentile(part, 99), ":", color=color, label=f"{label}, p99")
    axes.set(xlabel="requests/s", ylabel="time", yscale="log")
    axes.yaxis.set_major_formatter(lambda seconds, _: format_duration(seconds))
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.4)  # the legend is above the lines
    axes.legend(loc="upper left", ncols=2)


#: Intervals of time of a queue.
_QUEUE_TIME_BINS = 100


def mean_and_longest_queue(queue: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], ...]:
    """Summarise the length of a simulated request queue: mean and maximum in equal time intervals.

    Parameters
    ----------
    queue : ndarray, shape (n, 2)
        Times of observation [s], rising, and the number of waiting requests at each.

    Returns
    -------
    tuple of ndarray, shape (m,)
        Ends of the intervals with observations [s], and mean and maximum number of waiting requests.
    """
    times, lengths = queue.T
    edges = np.linspace(0.0, times[-1], _QUEUE_TIME_BINS + 1)
    interval = np.clip(np.searchsorted(edges, times) - 1, 0, _QUEUE_TIME_BINS - 1)
    seen = np.bincount(interval, minlength=_QUEUE_TIME_BINS)
    longest = np.zeros(_QUEUE_TIME_BINS)
    np.maximum.at(longest, interval, lengths)
    mean = np.bincount(interval, lengths, _QUEUE_TIME_BINS) / np.maximum(seen, 1)
    return edges[1:][seen > 0], mean[seen > 0], longest[seen > 0]


def _draw_queue(axes: Axes, service: Service) -> None:
    """Draw the number of requests that wait over time in one simulated replica."""
    from matplotlib.ticker import MaxNLocator

    from paleo.report.plots import BLUE

    assert service.simulation is not None
    times, mean, longest = mean_and_longest_queue(service.simulation.queue_history)
    axes.fill_between(times, longest, color=BLUE, alpha=0.3, lw=0.0, step="pre", label="longest")
    axes.plot(times, mean, color=BLUE, drawstyle="steps-pre", label="mean")
    axes.set(xlabel="seconds", ylabel="requests that wait")
    axes.set_ylim(0.0, 1.3 * max(float(longest.max()), 1.0))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.legend(loc="upper left", ncols=2)


#: Pictures of a service by title.
PLOTS_BY_TITLE: dict[str, Callable[[Axes, Service], None]] = {
    "Speed against throughput": _draw_speeds,
    "Latency against rate": _draw_latencies,
    "Queue of one replica, simulated": _draw_queue,
}
