"""Plans of a service, as a document, as tables, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from paleo.report.columns import grid, percent, wrapped_text
from paleo.serving.commands import written_command
from paleo.serving.plans import ServingPlan, capacity_of, curve_of, parts_of
from paleo.serving.service import INTERVAL, UNMODELLED
from paleo.units import duration, gibibytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paleo.serving.benchmark import ServiceAudit
    from paleo.serving.service import Service

#: Plans that a table shows.
SHOWN = 8


def document(service: Service, systems: Sequence[Service] = ()) -> dict[str, Any]:
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
        The document; values that a refusal lacks are null.
    """
    plan = service.best
    head = {
        "verdict": service.verdict,
        "model": service.model.name,
        "system": service.system.name,
        "gpus": service.gpus,
        "engine": {"name": service.engine.name, "release": service.engine.release},
        "load": _load(service),
        "limits": dict(service.limits.bounds) | {"percentile": service.limits.percentile},
        "possible": plan is not None,
        "unmodelled": list(UNMODELLED),
        "refusals": list(service.result.refusals),
        "warnings": list(service.warnings),
        "engine_choice": service.reason,
        "disaggregation": _division(service),
        "systems": [_system(each) for each in systems],
    }
    return head | (_refused(service) if plan is None else _answered(service, plan))


def _division(service: Service) -> dict[str, Any] | None:
    split = service.division
    if split is None:
        return None
    return {
        "plan": split.text,
        "gpus": split.gpus,
        "requests_per_s": split.requests_per_s,
        "ttft_s": split.ttft,
        "tpot_s": split.tpot,
        "transfer_s": split.transfer,
    }


def _system(service: Service) -> dict[str, Any]:
    plan, price = service.best, service.usd_per_million
    return {
        "system": service.system.name,
        "gpus": service.gpus,
        "engine": service.engine.name,
        "strategy": plan and plan.strategy,
        "requests_per_s": plan and plan.requests_per_s,
        "tokens_per_s_per_gpu": plan and plan.tokens_per_s / service.gpus,
        "usd_per_million_output": price and price["output"],
        "joules_per_token": service.joules_per_token if plan else None,
    }


def _load(service: Service) -> dict[str, Any]:
    load = service.load
    return {
        "kind": load.kind,
        "input_tokens": float(np.asarray(load.lengths.input)),
        "output_tokens": float(np.asarray(load.lengths.output)),
        "length_variation": [load.lengths.input_variation, load.lengths.output_variation],
        "prefix_hit": float(np.asarray(load.lengths.hit)),
        "rate": load.rate or None,
        "users": load.users or None,
        "think_s": load.think,
    }


def _refused(service: Service) -> dict[str, Any]:
    keys = (
        "requests_per_s", "requests_per_s_interval", "tokens_per_s", "ttft_s", "tpot_s", "latency_s", "batch",
        "kv_cache",
        "usd_per_million_tokens", "joules_per_token", "limited_by", "strategy", "steady", "calibration",
    )  # fmt: skip
    capacities = [capacity_of(each, service.load) for each in service.fitting]
    empty: dict[str, Any] = dict.fromkeys(keys)
    return empty | {"capacity_requests_per_s": max(capacities, default=None), "plans": [], "curve": []}


def _answered(service: Service, plan: ServingPlan) -> dict[str, Any]:
    low, high = INTERVAL
    memory = plan.candidate.memory
    length = float(np.asarray(service.load.lengths.resident))
    return {
        "requests_per_s": plan.requests_per_s,
        "requests_per_s_interval": [plan.requests_per_s * low, plan.requests_per_s * high],
        "tokens_per_s": plan.tokens_per_s,
        "ttft_s": service.times("ttft"),
        "tpot_s": service.times("tpot"),
        "latency_s": service.times("latency"),
        "batch": plan.candidate.replicas * float(plan.state.batch),
        "kv_cache": {
            "bytes": memory.cache,
            "sequences": float(memory.sequences(length)),
            "tokens": memory.tokens(length),
            "bytes_per_token": float(memory.sequence(memory.page)) / memory.page,
        },
        "memory_bytes": {
            "weights": memory.weights,
            "activations": memory.activations,
            "reserve": memory.reserve,
            "cache": memory.cache,
            "capacity": memory.capacity,
        },
        "usd_per_million_tokens": service.usd_per_million,
        "joules_per_token": service.joules_per_token,
        "limited_by": plan.limited_by,
        "strategy": plan.strategy,
        "capacity_requests_per_s": capacity_of(plan.candidate, service.load),
        "breakdown_s": parts_of(plan.candidate, plan.state),
        "steady": _steady(plan) | {"simulated_requests_per_s": service.simulated_rate},
        "launch": written_command(service.engine.name, service.model.name, plan),
        "calibration": plan.candidate.phases.calibration,
        "plans": [_plan(each) for each in service.result.plans],
        "curve": _curve(service, plan),
    }


def _steady(plan: ServingPlan) -> dict[str, Any]:
    """What the fixed point alone says."""
    state = plan.state
    return {
        "iteration_s": float(state.iteration),
        "utilisation": float(state.utilisation),
        "ttft_s": {"mean": _finite(state.ttft), "p99": _finite(state.percentile("ttft", 99))},
        "tpot_s": {"mean": float(state.tpot), "p99": _finite(state.percentile("tpot", 99))},
        "latency_s": {"mean": _finite(state.latency), "p99": _finite(state.percentile("latency", 99))},
    }


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if np.isfinite(number) else None


def _plan(plan: ServingPlan) -> dict[str, Any]:
    formats = plan.candidate.formats
    return {
        "strategy": plan.strategy,
        "gpus": plan.gpus,
        "replicas": plan.candidate.replicas,
        "weights": formats.weights,
        "cache": formats.cache,
        "batch_tokens": float(np.asarray(plan.batching.tokens)),
        "sequences": float(np.asarray(plan.batching.sequences)),
        "requests_per_s": plan.requests_per_s,
        "tokens_per_s": plan.tokens_per_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s / plan.gpus,
        "tokens_per_s_per_user": 1.0 / float(plan.state.tpot),
        "ttft_s": _finite(plan.state.ttft),
        "tpot_s": float(plan.state.tpot),
        "batch": plan.candidate.replicas * float(plan.state.batch),
        "limited_by": plan.limited_by,
    }


def _curve(service: Service, plan: ServingPlan) -> list[dict[str, Any]]:
    rates, state = curve_of(plan, service.load)
    p99 = {part: state.percentile(part, 99) for part in ("ttft", "tpot", "latency")}
    return [
        {
            "requests_per_s": float(rate),
            "tokens_per_s": float(rate * state.output[index]),
            "batch": plan.candidate.replicas * float(state.batch[index]),
            "ttft_s": {"mean": _finite(state.ttft[index]), "p99": _finite(p99["ttft"][index])},
            "tpot_s": {"mean": float(state.tpot[index]), "p99": _finite(p99["tpot"][index])},
            "latency_s": {"mean": _finite(state.latency[index]), "p99": _finite(p99["latency"][index])},
        }
        for index, rate in enumerate(rates)
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
    head = wrapped_text(Text(service.verdict, style="bold"))
    plan = service.best
    if plan is None:
        reasons: list[RenderableType] = [
            wrapped_text(Text(f"- {each}")) for each in dict.fromkeys(service.result.refusals)
        ]
        return Group(head, Text(), *reasons[:SHOWN])
    notes = [
        Text("Times are those of a simulation; the fixed point has them in --json (steady)."),
        Text(f"Published throughputs: 84 % lie between {INTERVAL[0]:g} and {INTERVAL[1]:g} times the prediction."),
        Text(f"Not modelled: {'; '.join(UNMODELLED)}."),
        Text(f"Calibration: {plan.candidate.phases.calibration}"),
    ]
    line = written_command(service.engine.name, service.model.name, plan)
    launch: list[RenderableType] = [Text(), Text(line)] if line else []
    tables: list[RenderableType] = [_times(service), Text(), _memory(plan), Text(), _plans(service)]
    if len(systems) > 1:
        tables = [_systems(systems), Text(), *tables]
    remarks: list[RenderableType] = [wrapped_text(note) for note in notes]
    return Group(head, Text(), *tables, *launch, Text(), *remarks)


def _systems(systems: Sequence[Service]) -> RenderableType:
    facts = grid("Systems", ["system", "GPUs", "requests/s", "tokens/s/GPU", "USD/1M tokens", "J/token", "plan"])
    for row in map(_system, systems):
        numbers = ("requests_per_s", "tokens_per_s_per_gpu", "usd_per_million_output", "joules_per_token")
        texts = ["–" if row[name] is None else f"{row[name]:,.{0 if row[name] >= 100 else 2}f}" for name in numbers]
        facts.add_row(row["system"], str(row["gpus"]), *texts, row["strategy"] or "none")
    return facts


def _times(service: Service) -> RenderableType:
    facts = grid("Latency", ["time", "mean", "p50", "p90", "p99"])
    for part, name in (("ttft", "to the first token"), ("tpot", "a further token"), ("latency", "the answer")):
        times = service.times(part)
        facts.add_row(name, *(duration(times[key]) for key in ("mean", "p50", "p90", "p99")))
    return facts


def _memory(plan: ServingPlan) -> RenderableType:
    memory = plan.candidate.memory
    facts = grid("Memory of a GPU", ["part", "size", "share"])
    parts = {"weights": memory.weights, "KV cache": memory.cache, "activations": memory.activations}
    for name, size in (*parts.items(), ("engine", memory.reserve)):
        facts.add_row(name, gibibytes(size), percent(size / memory.capacity))
    return facts


def _plans(service: Service) -> RenderableType:
    columns = ["plan", "weights", "batch", "requests/s", "tokens/s/GPU", "tokens/s/user", "first token", "limited by"]
    facts = grid("Plans", columns)
    for plan in service.result.plans[:SHOWN]:
        facts.add_row(
            plan.strategy,
            plan.candidate.formats.weights,
            f"{plan.candidate.replicas * float(plan.state.batch):,.0f}",
            f"{plan.requests_per_s:.3g}",
            f"{plan.tokens_per_s / plan.gpus:,.0f}",
            f"{1.0 / float(plan.state.tpot):.3g}",
            duration(float(plan.state.ttft)),
            plan.limited_by,
        )
    return facts


def audit_document(audit: ServiceAudit) -> dict[str, Any]:
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
        "measured": dict(audit.benchmark.measured),
        "predicted": audit.predicted,
        "faults": [{"name": name, "factor": factor} for name, factor in audit.faults.items()],
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
    facts = grid("Benchmark", ["quantity", "measured", "predicted", "ratio"])
    names = {"ttft": "first token", "ttft_p99": "first token, p99", "tpot": "a token", "tpot_p99": "a token, p99"}
    for key, predicted in audit.predicted.items():
        measured = audit.benchmark.measured[key]
        texts = (duration(each) if key in names else f"{each:,.0f}" for each in (measured, predicted))
        facts.add_row(names.get(key, "output tokens/s"), *texts, f"{measured / predicted:.2f}")
    return Group(wrapped_text(Text(audit.verdict, style="bold")), Text(), facts)


def figure(service: Service) -> Figure:
    """Plot tokens per second of a user against those of a GPU for every plan, and latency against the request rate.

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

    from paleo.report.plots import BLUE, GREY, STYLE, VERMILION, figure_of

    plan, result = service.best, service.simulation
    assert plan is not None
    assert result is not None
    with matplotlib.rc_context(STYLE):
        drawn, (pareto, latency, queue) = figure_of(12.0, 3.6, 3)
        for each in reversed(service.result.plans[:SHOWN]):
            rates, state = curve_of(each, service.load)
            color, width = (BLUE, 2.0) if each is plan else (GREY, 1.0)
            pareto.plot(1.0 / state.tpot, rates * state.output / each.gpus, color=color, lw=width)
        pareto.plot([], [], color=BLUE, lw=2.0, label=plan.strategy)
        pareto.plot([], [], color=GREY, label="other plans")
        pareto.set(xlabel="tokens/s of a user", ylabel="tokens/s of a GPU", title="speed against throughput")
        rates, state = curve_of(plan, service.load, 40)
        for part, color, label in (("ttft", VERMILION, "first token"), ("latency", BLUE, "answer")):
            latency.plot(rates, getattr(state, part), color=color, label=f"{label}, mean")
            latency.plot(rates, state.percentile(part, 99), ":", color=color, label=f"{label}, p99")
        latency.set(xlabel="requests/s", ylabel="time", yscale="log", title=plan.strategy)
        latency.yaxis.set_major_formatter(lambda seconds, _: duration(seconds))
        queue.plot(*result.queue.T, color=BLUE, lw=0.8, drawstyle="steps-post")
        queue.set(xlabel="seconds", ylabel="waiting requests of a replica", title="simulated queue")
        queue.set_ylim(bottom=0)
        pareto.legend(loc="best")
        latency.legend(loc="best")
        drawn.suptitle(f"{service.model.title} on {service.gpus} x {service.system.device.name}")
    return drawn
