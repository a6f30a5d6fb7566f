"""Answer about a service: its plans, the simulation of the best plan, its cost, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from paleo.serving.commands import served_weights, written_command
from paleo.serving.energy import watts_of
from paleo.serving.plans import (
    DISAGREEMENT,
    LIMIT_NAMES,
    ReplicaLayout,
    ServicePlans,
    ServingLimits,
    ServingLoad,
    ServingPlan,
    candidates,
    capacity_of,
    nearest,
    plan_service,
    simulated,
    steady_part,
)
from paleo.specs.catalog import SIXTEEN_BITS
from paleo.units import MEGA, duration

if TYPE_CHECKING:
    from paleo.serving.disaggregation import Disaggregation
    from paleo.serving.engines import BatchLimit, Engine
    from paleo.serving.formats import Formats
    from paleo.serving.lowered import Sharding
    from paleo.serving.simulation import Simulated
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System

#: Percentiles that an answer has.
PERCENTILES = (50, 90, 99)
#: Factors within which 84 % of the measured throughputs of published runs lie (docs/howto/serve.md).
INTERVAL = (0.7, 1.35)
#: What no answer about a service has in it.
UNMODELLED = (
    "adapters and guided decoding",
    "the network between clients and the service",
    "experts that are more or less busy than a power law of exponent 0.5 makes them",
)
NAMES = {"ttft": "to the first token", "tpot": "a token", "latency": "for the answer"}


@dataclass(frozen=True)
class Service:
    """Plans of a service, the best first, with the question that they answer.

    Attributes
    ----------
    model, system, gpus, engine
        Network, machine, devices in all, engine.
    load, limits : ServingLoad, ServingLimits
        Requests, and latency limits.
    result : ServicePlans
        The plans; empty where the answer is no.
    fitting : tuple of ReplicaLayout
        Layouts that fit into memory.
    usd_per_s : float or None
        Rent of all devices.
    division : Disaggregation or None
        Best division into prefill and decode, if requested.
    reason : str
        Why this engine, where several were tried.
    """

    model: ModelSpec
    system: System
    gpus: int
    engine: Engine
    load: ServingLoad
    limits: ServingLimits
    result: ServicePlans
    fitting: tuple[ReplicaLayout, ...]
    usd_per_s: float | None
    division: Disaggregation | None = None
    reason: str = ""

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Sort key of systems: whether there is an answer, price of a token, requests per second."""
        price = (self.usd_per_million or {}).get("output", math.inf)
        return self.best is None, price, -(self.best.requests_per_s if self.best else 0.0)

    @property
    def best(self) -> ServingPlan | None:
        """First plan; None if no plan meets the limits."""
        return self.result.plans[0] if self.result.plans else None

    @cached_property
    def simulation(self) -> Simulated | None:
        """Simulation of the first plan."""
        return None if self.best is None else simulated(self.best, self.load)

    def times(self, part: str) -> dict[str, float]:
        """Return simulated mean and percentiles of a time of the first plan.

        Parameters
        ----------
        part : str
            ``ttft``, ``tpot`` or ``latency``.

        Returns
        -------
        dict of str to float
            Seconds by name.
        """
        if self.simulation is None:
            return {}
        whole = self.load.kind in ("trace", "at once")
        values = getattr(self.simulation, part) if whole else steady_part(self.simulation, part)
        known = values[np.isfinite(values)]
        known = known if len(known) else np.zeros(1)
        return {"mean": float(known.mean())} | {f"p{p}": float(np.percentile(known, p)) for p in PERCENTILES}

    @property
    def limited_by(self) -> str | None:
        """Limit of the first plan; of several latency limits, the one that its simulated times come closest to."""
        if self.best is None or self.best.limited_by not in LIMIT_NAMES.values():
            return None if self.best is None else self.best.limited_by
        name = f"p{self.limits.percentile}" if self.limits.percentile else "mean"
        times = {part: self.times(part) for part in self.limits.bounds}
        shares = {part: times[part].get(name, times[part]["p99"]) / self.limits.bounds[part] for part in times}
        return LIMIT_NAMES[max(shares, key=shares.__getitem__)]

    @property
    def simulated_rate(self) -> float | None:
        """Simulated requests per second of all replicas; for a saturated service, in the middle of its run."""
        if self.best is None or self.simulation is None:
            return None
        factor = self.best.candidate.replicas * self.best.candidate.sharding.pp
        finish = np.sort(self.simulation.finish)
        low, high = len(finish) // 4, (3 * len(finish)) // 4
        if self.load.kind in ("trace", "at once") or high - low < 20 or finish[high] <= finish[low]:
            return factor * self.simulation.requests_per_s
        return factor * (high - low) / float(finish[high] - finish[low])

    @property
    def joules_per_token(self) -> float | None:
        """Energy of all devices in use for a generated token [J]; None if a device states no power."""
        plan = self.best
        watts = None if plan is None else watts_of(plan, self.system.device)
        return None if watts is None or plan is None else watts * plan.gpus / plan.tokens_per_s

    @property
    def usd_per_million(self) -> dict[str, float] | None:
        """Price of a million generated tokens, prompt tokens and answer tokens [USD]; None without a rent.

        Prompt tokens and answer tokens are priced by the time that each takes.
        """
        plan, usd = self.best, self.usd_per_s
        if plan is None or usd is None:
            return None
        state = plan.state
        prompts = max(float(state.iteration) - float(state.plain), 0.0) / float(state.iteration)
        first = plan.requests_per_s * float(np.asarray(self.load.lengths.input))
        return {
            "output": usd / plan.tokens_per_s * MEGA,
            "input_alone": usd * prompts / first * MEGA,
            "output_alone": usd * (1.0 - prompts) / plan.tokens_per_s * MEGA,
        }

    @property
    def launch(self) -> str:
        """Command line of the engine that is the first plan; empty without one."""
        if self.best is None:
            return ""
        return written_command(self.engine.name, self.model, self.best)

    @property
    def verdict(self) -> str:
        """Answer in one or two sentences."""
        return refusal(self) if self.best is None else _verdict(self, self.best)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about what is uncertain."""
        if self.best is None or self.simulation is None:
            return ()
        notes = []
        off = (self.simulated_rate or 0.0) / self.best.requests_per_s - 1.0
        if abs(off) > DISAGREEMENT and self.load.kind in ("most", "poisson", "constant", "closed"):
            notes.append(
                f"the simulation serves {self.simulated_rate:.3g} requests/s, {abs(off):.0%} "
                f"{'fewer' if off < 0 else 'more'} than the fixed point: count on the lower number"
            )
        late = [part for part in self.limits.bounds if _late(self, part)]
        notes += [f"simulated time {NAMES[part]} is above its limit: {_late(self, part)}" for part in late]
        if self.best.candidate.formats.untimed(self.system.device):
            notes.append(
                "kernels of MXFP4 experts were never timed on devices without FP4 arithmetic: runs of SGLang and "
                "TensorRT-LLM took 3 to 19 times as long as predicted"
            )
        notes += _converted(self.engine.name, self.model, self.best.candidate.formats.text)
        if self.gpus > self.best.gpus:
            notes.append(f"{self.gpus - self.best.gpus} GPUs are idle: replicas of {self.best.candidate.sharding.gpus}")
        if self.simulation.preemptions:
            share = self.simulation.preemptions / len(self.simulation.finish)
            notes.append(
                f"the KV cache overflows: for 100 requests {100 * share:.0f} are stopped and computed again; "
                "--sequences bounds how many run at once"
            )
        return tuple(notes)


def _converted(engine: str, model: ModelSpec, weights: str) -> list[str]:
    """Return a sentence about weights that must be converted before the engine starts, if there are any."""
    loaded = served_weights(engine, model, weights)
    if loaded == (model.hub or model.name):
        return []
    return [f"the published weights are in {model.released}: {loaded} stands for a folder with weights in {weights}"]


def _late(service: Service, part: str) -> str:
    """Return text for a simulated time above its limit, or an empty string if the limit is met."""
    percentile = service.limits.percentile
    times = service.times(part)
    value = times.get(f"p{percentile}" if percentile else "mean", 0.0)
    limit = service.limits.bounds[part]
    return f"{duration(value)} for {duration(limit)}" if value > limit * (1.0 + DISAGREEMENT) else ""


def _verdict(service: Service, plan: ServingPlan) -> str:
    price = service.usd_per_million
    cost = "" if price is None else f": {price['output']:.3g} USD a million output tokens"
    limits = " and ".join(f"{duration(limit)} {NAMES[part]}" for part, limit in service.limits.bounds.items())
    at = f"p{service.limits.percentile}" if service.limits.percentile else "the mean"
    within = f" within {limits} at {at}" if limits else ""
    formats, published = plan.candidate.formats, service.model.released
    weights = f"{formats.text} (as released)" if formats.text == published != SIXTEEN_BITS else formats.text
    subject = f"{service.gpus} x {service.system.device.name}"
    verb = "serves" if service.gpus == 1 else "serve"
    return (
        f"{subject} {verb} {plan.requests_per_s:.3g} requests/s ({plan.tokens_per_s:,.0f} output tokens/s) of "
        f"{service.model.title} in {weights}{within}{cost}; limited by {_article(str(service.limited_by))}. "
        f"Plan: {plan.strategy} under {service.engine.title} {service.engine.release}.{_conditions(service)}"
    )


def _conditions(service: Service) -> str:
    """Return sentences about the prefix cache, drafted tokens, separate prefill replicas and other engines."""
    hit, engine = float(np.asarray(service.load.lengths.hit)), service.engine
    cached = f"{hit:.0%} of the prompts' tokens come" if hit else "Nothing comes"
    texts = [f"{cached} from the prefix cache."]
    if engine.drafted:
        emitted = engine.kernels.emitted
        texts.append(f"{engine.drafted} drafted tokens, each accepted at {engine.acceptance:.0%}, give {emitted:.2g}.")
    if service.division is not None:
        split = service.division
        texts.append(f"Divided into {split.text}: {split.requests_per_s:.3g} requests/s.")
    return " " + " ".join([*texts, service.reason]).strip()


def _article(cause: str) -> str:
    return cause if cause.startswith(("the ", "demand", "collectives", "products", "prompts")) else f"the {cause}"


def best_engine(services: Sequence[Service]) -> Service:
    """Return the service of the engine that serves most, or that answers fastest if the load is given.

    Parameters
    ----------
    services : sequence of Service
        One service an engine.

    Returns
    -------
    Service
        The best one, with the reason.
    """
    busy = services[0].load.kind in ("most", "at once", "closed")

    def order(service: Service) -> tuple[bool, float]:
        plan = service.best
        value = math.inf if plan is None else -plan.requests_per_s if busy else float(plan.state.latency)
        return plan is None, value

    first = min(services, key=order)
    if len(services) == 1 or first.best is None:
        return first
    texts = [f"{each.engine.title} {_figure(each.best, busy)}" for each in sorted(services, key=order)]
    return replace(first, reason=f"Engines: {', '.join(texts)}.")


def _figure(plan: ServingPlan | None, busy: bool) -> str:
    if plan is None:
        return "none"
    return f"{plan.requests_per_s:.3g} requests/s" if busy else f"{duration(float(plan.state.latency))} an answer"


def refusal(service: Service) -> str:
    """Explain why no plan meets the requirements, and what would help.

    Parameters
    ----------
    service : Service
        The service.

    Returns
    -------
    str
        A sentence.
    """
    title, gpus = service.model.title, f"{service.gpus} x {service.system.device.name}"
    if not service.fitting:
        nearest_layout = next(iter(service.result.refusals), "no layout divides it")
        return f"No: {title} does not fit on {gpus}. The nearest layout is {nearest_layout}."
    load, limits = service.load, service.limits
    top = max(service.fitting, key=lambda each: capacity_of(each, load))
    capacity = capacity_of(top, load)
    if load.rate and load.rate >= capacity:
        growth = load.rate - capacity
        return (
            f"No: {load.rate:.3g} requests/s are above the {capacity:.3g} that {gpus} can serve ({top.sharding.text}); "
            f"the queue grows by {growth:.3g} requests a second. Ask for at most {capacity:.3g}/s, or for "
            f"{math.ceil(service.gpus * load.rate / capacity):,} GPUs or more."
        )
    near = nearest(service.result.late, load, limits)
    if near is None or not limits.bounds:
        return f"No: {gpus} keep up with no plan."
    candidate, state = near
    values = {part: float(limits.value(state, part)) for part in limits.bounds}
    missed = [part for part, value in values.items() if value > limits.bounds[part]]
    at = f"p{limits.percentile}" if limits.percentile else "the mean"
    if not missed:
        return (
            f"No: {gpus} keep these limits at {at} for single requests ({candidate.sharding.text}), but not for the "
            f"load that is stated; fewer requests or more GPUs would."
        )
    texts = [f"{duration(values[part])} {NAMES[part]} (asked: {duration(limits.bounds[part])})" for part in missed]
    return (
        f"No: no plan of {gpus} answers within these limits. The nearest, {candidate.sharding.text} in "
        f"{candidate.formats.text} with one request at a time, takes {' and '.join(texts)} at {at}."
    )


def service_of(
    model: ModelSpec,
    system: System,
    gpus: int,
    engine: Engine,
    load: ServingLoad,
    limits: ServingLimits,
    formats: Sequence[Formats],
    layouts: Sequence[Sharding] | None = None,
    limit: BatchLimit | None = None,
    usd_per_s: float | None = None,
    *,
    disaggregate: bool = False,
) -> Service:
    """Return the plans of a service.

    Parameters
    ----------
    model, system, gpus, engine
        Network, machine, devices in all, engine.
    load, limits
        Requests, and latency limits.
    formats : sequence of Formats
        Formats that are compared.
    layouts : sequence of Sharding, optional
        The only layouts that are tried; by default all that make sense.
    limit : BatchLimit, optional
        Limits of an iteration in place of the engine's.
    usd_per_s : float, optional
        Rent of all devices.
    disaggregate : bool
        Also find the best division into replicas of prefill and of decode.
    """
    fitting, refusals = candidates(model, system, gpus, engine, formats, load, layouts, limit)
    plans = plan_service(fitting, load, limits)
    result = ServicePlans(plans.plans, tuple(refusals), plans.late)
    division = None
    if disaggregate:
        from paleo.serving.disaggregation import disaggregated

        division = disaggregated(fitting, load, limits, gpus, system)
    return Service(model, system, gpus, engine, load, limits, result, tuple(fitting), usd_per_s, division)
