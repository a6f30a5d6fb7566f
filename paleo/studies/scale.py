"""Scaling studies: predictions over rising GPU counts, the count where more GPUs stop paying, and node placement."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from paleo.errors import CapacityError, PlanError, SpecError, suggest_names
from paleo.parallel.plan import plan
from paleo.predict import Prediction, predict
from paleo.pricing.links.topology import NetworkShare, NodePlacement, parse_node_placement, placement_nic_share
from paleo.specs.run import Run, replace_fields
from paleo.studies.cost import Tariff, TrainingAmount, TrainingEstimate, estimate_training
from paleo.studies.goodput import LongRunOptions, goodput_of_prediction
from paleo.studies.gradient_exchange import ConsistencyStudy, consistency_study
from paleo.units import (
    DAY,
    HOUR,
    comma_separated,
    format_dollars,
    format_duration,
    format_gibibytes,
    format_percent,
    with_noun,
)

if TYPE_CHECKING:
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System


Scaling = Literal["strong", "weak"]

#: A GPU that brings less than this part of what each of the first ones brought no longer pays.
_LEAST_RELATIVE_GAIN = 0.5
#: Above this efficiency there is no loss worth a word.
_NEARLY_PERFECT = 0.98
#: How the problem of a count begins that is larger than the global batch.
_NO_SAMPLES = "out of samples"
#: A count pays in money as long as it costs at most this part more than the cheapest.
_DEARER = 0.1


def parse_scalings(text: str) -> tuple[Scaling, ...]:
    """Parse the kinds of scaling to study: ``strong``, ``weak`` or ``both``.

    Parameters
    ----------
    text : str
        ``strong``, ``weak`` or ``both``.

    Returns
    -------
    tuple of Scaling
        Kinds of scaling.

    Raises
    ------
    SpecError
        For any other text.

    Examples
    --------
    >>> parse_scalings("both")
    ('strong', 'weak')
    """
    known: tuple[Scaling, ...] = get_args(Scaling)
    if text == "both":
        return known
    if text not in known:
        raise SpecError(f"scaling {text!r} is not strong, weak or both; {suggest_names(text, [*known, 'both'])}")
    return tuple(scaling for scaling in known if scaling == text)


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """One GPU count of a scaling curve with its prediction, or the ``problem`` why the count cannot be used.

    ``consistency`` is the comparison with synchronous steps, None for a synchronous run. ``goodput`` is the share of
    wall time left after failures and checkpoints, if they count. ``training`` holds time and cost of the training, if
    an amount of training is given.
    """

    gpus: int
    prediction: Prediction | None
    problem: str = ""
    consistency: ConsistencyStudy | None = None
    goodput: float | None = None
    training: TrainingEstimate | None = None

    @property
    def step_time(self) -> float:
        """Step time at this GPU count [s]: the time in which all workers process the global batch once."""
        return (self.consistency or self.required_prediction).step_time

    @property
    def exposed_exchange_share(self) -> float:
        """Share (0 to 1) of a step that is exposed communication, or also waits for workers in asynchronous updates."""
        if self.consistency is None:
            return self.required_prediction.breakdown.communication_exposed / self.step_time
        return float(self.consistency.consistency_result.exposed_time) / self.step_time

    @property
    def samples_per_s(self) -> float:
        """Throughput of all GPUs [samples/s]."""
        return (self.consistency or self.required_prediction).samples_per_s

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation (0 to 1) under the consistency model of the run."""
        return (self.consistency or self.required_prediction).mfu

    @property
    def updates_per_s(self) -> float:
        """Optimizer updates per second over all workers; a synchronous step is one update."""
        study = self.consistency
        return 1.0 / self.step_time if study is None else float(study.consistency_result.updates_per_s)

    @property
    def staleness(self) -> tuple[float, float]:
        """Mean and standard deviation of gradient staleness [updates]; zero for synchronous steps."""
        if self.consistency is None:
            return 0.0, 0.0
        result = self.consistency.consistency_result
        return float(result.staleness_mean), float(result.staleness_sd)

    @property
    def is_usable(self) -> bool:
        return self.prediction is not None and not self.problem

    @property
    def required_prediction(self) -> Prediction:
        """Prediction at this GPU count; raises PlanError if there is none."""
        if self.prediction is None:
            raise PlanError(f"{self.gpus} gpus: {self.problem}")
        return self.prediction

    @property
    def fits(self) -> bool:
        """True if the run works at this GPU count and fits in memory."""
        return self.prediction is not None and self.is_usable and self.prediction.memory.fits


@dataclass(frozen=True, slots=True)
class ScalingVerdict:
    """GPU count up to which adding GPUs pays (None: never), with a sentence and the limiting part of the step."""

    pays_up_to: int | None
    text: str
    cause: str


@dataclass(frozen=True, slots=True)
class ScaleCurve:
    """Scaling curve: predictions of one run over rising GPU counts.

    Speed-up and efficiency refer to ``base_point``, the first count that fits in memory. ``fixed_batch`` [samples] is
    the global batch in strong scaling and the batch of each rank in weak scaling.

    ``consistency`` (such as ``bsp`` or ``async``) and ``parse_node_placement`` (``packed`` or scattered) are the run's
    options for all counts.
    """

    scaling: Scaling
    fixed_batch: int
    points: tuple[ScalePoint, ...]
    consistency: str = "bsp"
    node_placement: str = "packed"

    @property
    def label(self) -> str:
        """Name of the curve in a chart, such as ``weak scaling, async, random nodes``."""
        words = [f"{self.scaling} scaling"] + ([self.consistency] if self.consistency != "bsp" else [])
        return ", ".join(words + ([f"{self.node_placement} nodes"] if self.node_placement != "packed" else []))

    @property
    def usable_points(self) -> list[ScalePoint]:
        """Points whose GPU count can run, whether the run fits in memory there or not."""
        return [point for point in self.points if point.is_usable]

    @property
    def base_point(self) -> ScalePoint:
        return next((point for point in self.points if point.fits), None) or self.usable_points[0]

    def speedup(self, point: ScalePoint) -> float:
        """Return the throughput at one GPU count relative to the smallest count that runs.

        Parameters
        ----------
        point : ScalePoint
            Point of the curve.

        Returns
        -------
        float
            Ratio of samples per second.
        """
        return point.samples_per_s / self.base_point.samples_per_s

    def efficiency(self, point: ScalePoint) -> float:
        """Return the scaling efficiency at one GPU count: the speed-up over the growth in GPUs.

        Parameters
        ----------
        point : ScalePoint
            Point of the curve.

        Returns
        -------
        float
            Efficiency; 1 is perfect scaling.
        """
        return self.speedup(point) * self.base_point.gpus / point.gpus

    @property
    def fastest_point_with_failures(self) -> ScalePoint | None:
        """Point with the most useful throughput (speed-up times goodput); more GPUs only add failures.

        None if throughput still rises at the last count, or failures do not count.
        """
        counted_in = [point for point in self.points if point.fits and point.goodput is not None]
        best = max(counted_in, key=lambda point: self.speedup(point) * (point.goodput or 0.0), default=None)
        return None if best is None or best is counted_in[-1] else best


def predict_scale_curve(
    model: ModelSpec,
    system: System,
    run: Run,
    counts: Sequence[int],
    scaling: Scaling,
    long_run: LongRunOptions | None = None,
    amount: TrainingAmount | None = None,
    tariff: Tariff | None = None,
) -> ScaleCurve:
    """Predict a run over rising GPU counts under strong or weak scaling.

    Strong scaling keeps the global batch of the smallest count, weak scaling the batch of each rank there.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.
    counts : sequence of int
        Numbers of GPUs.
    scaling : Scaling
        ``strong`` or ``weak``.
    long_run : LongRunOptions, optional
        Failures and checkpoints, which give each point a goodput.
    amount : TrainingAmount, optional
        Amount of training for which points are priced.
    tariff : Tariff, optional
        Prices; by default those of the catalog.

    Returns
    -------
    ScaleCurve
        The curve; a count that the plan cannot use is a point with its reason.

    Raises
    ------
    PlanError
        If no count can be used.
    """
    if not counts or min(counts) < 1:
        raise SpecError(f"gpus: {list(counts)} must be counts of 1 or more, such as 1,2,4,8")
    rising = sorted(set(counts))
    fixed = _fixed_batch(model, system, run, rising, scaling)
    points = tuple(_point(model, system, run, count, scaling, fixed, long_run) for count in rising)
    if not any(point.is_usable for point in points):
        raise PlanError(points[0].problem)
    if amount is not None:
        points = tuple(_with_training(point, amount, tariff, long_run) for point in points)
    return ScaleCurve(scaling, fixed, points, run.exchange.consistency, run.fabric.nodes)


def _with_training(
    point: ScalePoint, amount: TrainingAmount, tariff: Tariff | None, long_run: LongRunOptions | None
) -> ScalePoint:
    """Add time, cost and energy of an amount of training to a scaling point, unless failures prevent an end."""
    if not point.is_usable:
        return point
    try:
        cost = estimate_training(point.required_prediction, amount, tariff, long_run=long_run)
    except CapacityError:
        return point
    return replace(point, training=cost)


def split_into_curve_runs(run: Run) -> tuple[Run, ...]:
    """Split a run whose options are lists into one run per scaling curve.

    Each pair of consistency model and node placement gives one run. Packed nodes come first.

    Parameters
    ----------
    run : Run
        The run, whose fields may be lists such as ``bsp,async``.

    Returns
    -------
    tuple of Run
        One run for each scaling curve.

    Examples
    --------
    >>> from paleo.specs.run import Run
    >>> [each.fabric.nodes for each in split_into_curve_runs(Run(nodes="random"))]
    ['packed', 'random']
    """
    models, places = comma_separated(run.exchange.consistency), comma_separated(run.fabric.nodes)
    if not models or not places:
        raise SpecError("--consistency and --nodes: expected names, such as bsp,async and packed,random")
    return tuple(
        replace_fields(run, {"consistency": model, "nodes": place})
        for model in dict.fromkeys(models)
        for place in dict.fromkeys(["packed", *places])
    )


def _fixed_batch(model: ModelSpec, system: System, run: Run, counts: Sequence[int], scaling: Scaling) -> int:
    """Return the batch that stays fixed over a scaling curve [samples]: global batch or batch per rank.

    Strong scaling fixes the global batch, weak scaling the batch per rank, of the smallest count that can be planned.
    """
    first: PlanError | None = None
    for count in counts:
        try:
            chosen = plan(model, system, run.model_copy(update={"gpus": count, "microbatch": None}))
        except PlanError as error:
            first = first or error
            continue
        return chosen.global_batch if scaling == "strong" else chosen.local_batch
    raise first or PlanError("no gpus")


def _point(
    model: ModelSpec, system: System, run: Run, gpus: int, scaling: Scaling, fixed: int, long_run: LongRunOptions | None
) -> ScalePoint:
    batches = {"global_batch": fixed, "batch": None} if scaling == "strong" else {"batch": fixed, "global_batch": None}
    at = run.model_copy(update={"gpus": gpus, "microbatch": None, **batches})
    try:
        chosen = plan(model, system, at)
        microbatch = None if run.microbatch is None else min(run.microbatch, chosen.local_batch)
        prediction = predict(model, system, at.model_copy(update={"microbatch": microbatch}))
        consistency = consistency_study(prediction)
    except PlanError as error:
        return ScalePoint(gpus, None, str(error))
    problem = ""
    if chosen.idle_gpus and chosen.local_batch == 1:
        problem = f"{_NO_SAMPLES}: {chosen.global_batch:,} of them, {with_noun(chosen.idle_gpus, 'GPU')} idle"
    goodput = None if long_run is None else goodput_of_prediction(prediction, long_run)
    return ScalePoint(gpus, prediction, problem, consistency, goodput)


def failure_limit_sentence(curve: ScaleCurve) -> str:
    """Return a sentence on the GPU count beyond which a run with failures gets no faster.

    Parameters
    ----------
    curve : ScaleCurve
        Scaling curve.

    Returns
    -------
    str
        Sentence for the report; empty if failures are not counted.
    """
    last = next((point for point in reversed(curve.points) if point.fits and point.goodput is not None), None)
    if last is None:
        return ""
    best, kept = curve.fastest_point_with_failures, format_percent(last.goodput or 0.0)
    if best is None:
        return f"With failures it still gains at {with_noun(last.gpus, 'GPU')} (goodput {kept})."
    lost = f"goodput {format_percent(best.goodput or 0.0)} there, {kept} at {last.gpus:,}"
    return f"With failures it turns over at {with_noun(best.gpus, 'GPU')}: more of them finish later ({lost})."


def scaling_verdict(curve: ScaleCurve) -> ScalingVerdict:
    """Return the GPU count up to which adding GPUs pays, and the part of the step that limits scaling there.

    Adding GPUs pays while each added GPU brings at least half (``_LEAST_RELATIVE_GAIN``) of the throughput of a GPU of
    the smallest run. The cause is the part of the step time that grew most beyond its proportional share, which shrinks
    in strong scaling.

    Parameters
    ----------
    curve : ScaleCurve
        Scaling curve.

    Returns
    -------
    ScalingVerdict
        Number of GPUs, sentence and cause.
    """
    if not curve.base_point.fits:
        least = min(curve.usable_points, key=lambda point: point.required_prediction.memory.total)
        where = f"at best ({with_noun(least.gpus, 'GPU')}) {_shortage(least.required_prediction)}"
        return ScalingVerdict(None, f"Does not fit at any of these counts: {where}.", "memory")
    last = curve.base_point
    for point in curve.points[curve.points.index(last) + 1 :]:
        if not point.fits or _relative_gain(curve, last, point) < _LEAST_RELATIVE_GAIN:
            return _limit_verdict(curve, last, point)
        last = point
    cause, words = _limiting_part(curve, last)
    efficiency = curve.efficiency(last)
    end = "." if efficiency > _NEARLY_PERFECT else f"; {words}."
    text = f"{_pays_up_to(curve, last)}, the most asked for: efficiency {format_percent(efficiency)}{end}"
    return ScalingVerdict(last.gpus, text, cause)


def node_placement_advice(curves: Sequence[ScaleCurve]) -> tuple[str, ...]:
    """Return sentences on how much scattered nodes slow down the largest GPU count of each curve, and why.

    Parameters
    ----------
    curves : sequence of ScaleCurve
        Scaling curves.

    Returns
    -------
    tuple of str
        Sentences; none for curves on packed nodes.
    """
    sentences = []
    for curve in curves:
        points = curve.usable_points
        study = node_placement_study(points[-1].required_prediction) if points else None
        if study is not None:
            sentences.append(f"{curve.node_placement} nodes at {with_noun(points[-1].gpus, 'GPU')}: {study.advice}")
    return tuple(sentences)


def _pays_up_to(curve: ScaleCurve, last: ScalePoint) -> str:
    """Return the beginning of a scaling verdict: why smaller GPU counts do not run, and up to which count GPUs pay."""
    first, base, start = curve.points[0], curve.base_point, "P"
    if base is not first:
        reason = first.problem or f"{first.gpus}: {_shortage(first.required_prediction)}"
        start = f"Runs from {with_noun(base.gpus, 'GPU')} on ({reason}); p"
    return f"{start}ays up to {with_noun(last.gpus, 'GPU')}"


def _relative_gain(curve: ScaleCurve, last: ScalePoint, point: ScalePoint) -> float:
    """Return the throughput gained per GPU added from ``last`` to ``point``, relative to that per GPU of the base."""
    added = point.samples_per_s - last.samples_per_s
    base_rate = curve.base_point.samples_per_s / curve.base_point.gpus
    return added / (point.gpus - last.gpus) / base_rate


def _limit_verdict(curve: ScaleCurve, last: ScalePoint, point: ScalePoint) -> ScalingVerdict:
    if point.problem:
        cause = "samples" if point.problem.startswith(_NO_SAMPLES) else "strategy"
        reason = f"{point.gpus} cannot be used ({point.problem})"
    elif not point.fits:
        cause, reason = "memory", f"with {point.gpus} it does not fit, {_shortage(point.required_prediction)}"
    else:
        cause, words = _limiting_part(curve, point)
        worth = _relative_gain(curve, last, point)
        brings = f"brings {format_percent(worth)} of what the first ones bring" if worth > 0 else "slows the step down"
        reason = f"each GPU added from there to {point.gpus} {brings}; {words}"
    efficiency = format_percent(curve.efficiency(last))
    return ScalingVerdict(last.gpus, f"{_pays_up_to(curve, last)} (efficiency {efficiency}): {reason}.", cause)


def cost_verdict(curve: ScaleCurve) -> str | None:
    """Return a sentence on the cheapest GPU count for a training, and the largest count at most 10 % dearer.

    Parameters
    ----------
    curve : ScaleCurve
        Scaling curve.

    Returns
    -------
    str, optional
        A sentence; None without an amount of training or a price.
    """
    priced = [(point.gpus, point.training) for point in curve.points if point.fits and point.training is not None]
    known = [(gpus, each, each.cost) for gpus, each in priced if each.cost is not None]
    if not known:
        return None
    least = min(known, key=lambda entry: (entry[2], entry[0]))
    start = f"{least[1].amount.description}: cheapest on {with_noun(least[0], 'GPU')} ({_spent(least[1])})"
    within = [entry for entry in known if entry[0] >= least[0] and entry[2] <= (1.0 + _DEARER) * least[2]]
    last = max(within, key=lambda entry: entry[0])
    words = [start]
    if last is not least:
        dearer = format_percent(last[2] / least[2] - 1.0)
        words.append(f"pays in money up to {with_noun(last[0], 'GPU')} ({_spent(last[1])}, {dearer} dearer)")
    following = next((entry for entry in known if entry[0] > last[0]), None)
    if following is not None:
        words.append(f"beyond, {with_noun(following[0], 'GPU')} {_price_of_time_saved(last[1], following[1])}")
    return "; ".join(words) + "."


def _spent(trained: TrainingEstimate) -> str:
    return f"{format_dollars(trained.cost or 0.0)} in {format_duration(trained.time)}"


def _price_of_time_saved(before: TrainingEstimate, after: TrainingEstimate) -> str:
    """Return a text on the additional cost of a larger GPU count per hour or day of training time that it saves."""
    more, saved = (after.cost or 0.0) - (before.cost or 0.0), before.time - after.time
    if saved <= 0:
        return f"cost {format_dollars(more)} more and save no time"
    unit, seconds = ("day", DAY) if saved >= DAY else ("hour", HOUR)
    return f"cost {format_dollars(more)} more, {format_dollars(more / saved * seconds)} for each {unit} saved"


def _shortage(prediction: Prediction) -> str:
    memory = prediction.memory
    return f"{format_gibibytes(memory.total)} wanted, {format_gibibytes(memory.capacity)} there on each GPU"


_WORDS = {
    "server": "the parameter servers are busy {busy} of the time, and are the limit from {knee} workers on",
    "waiting": "exchange and waiting for other workers take {share} of the step",
    "communication_exposed": "waiting for communication takes {share} of the step",
    "launch": "kernel launches take {share} of the step, however small the batch",
    "optimizer": "the optimizer's pass over all parameters takes {share} of the step",
    "bubble": "the pipeline is idle {share} of the step",
    "input": "input takes {share} of the step",
    "stragglers": "waiting for the slowest takes {share} of the step",
    "kernels": "{batch} per GPU no longer fill{s} it",
}


def _limiting_part(curve: ScaleCurve, point: ScalePoint) -> tuple[str, str]:
    """Return the part of the step that limits scaling at ``point``, and a text about it.

    The limiting part exceeds most what it would take under perfect scaling from the base point.
    """
    step = point.required_prediction
    shrinks = curve.base_point.gpus / point.gpus if curve.scaling == "strong" else 1.0
    parts, fair = _scaling_parts(point), _scaling_parts(curve.base_point)
    cause = max(parts, key=lambda part: parts[part] - fair[part] * shrinks)
    share, batch = format_percent(parts[cause] / point.step_time), step.plan.local_batch
    words = {"share": share, "batch": with_noun(batch, "sample"), "s": "s" if batch == 1 else ""}
    if point.consistency is not None and point.consistency.has_servers:
        servers = point.consistency.consistency_result
        words |= {"busy": format_percent(float(servers.utilization)), "knee": f"{float(servers.knee):.3g}"}
    return cause, _WORDS[cause].format(**words)


def _scaling_parts(point: ScalePoint) -> dict[str, float]:
    """Return the parts of the step time [s] that may limit scaling, by name.

    For asynchronous updates, exchange and waiting replace exposed collectives.
    """
    spent, study = point.required_prediction.breakdown, point.consistency
    exchange = {"communication_exposed": spent.communication_exposed}
    if study is not None:
        exchange = {"server" if study.has_servers else "waiting": float(study.consistency_result.exposed_time)}
    return {
        **exchange,
        "kernels": spent.compute + spent.memory_bound,
        "launch": spent.launch,
        "optimizer": spent.optimizer,
        "bubble": spent.bubble,
        "input": spent.input,
        "stragglers": spent.stragglers,
    }


def curve_warnings(curves: Sequence[ScaleCurve]) -> list[str]:
    """Collect the warnings of all points of scaling curves, each with the GPU counts that it concerns.

    Warnings that differ only in numbers are merged, with the numbers of the first count.

    Parameters
    ----------
    curves : sequence of ScaleCurve
        Scaling curves.

    Returns
    -------
    list of str
        Warnings, each with its GPU counts in front.
    """
    firsts, counts = dict[str, str](), dict[str, list[int]]()
    for point in (point for curve in curves for point in curve.usable_points):
        for warning in point.required_prediction.warnings:
            alike = re.sub(r"[\d.,]+", "0", warning)
            firsts.setdefault(alike, warning)
            counts.setdefault(alike, []).append(point.gpus)
    return [f"{', '.join(map(str, dict.fromkeys(counts[alike])))} GPUs: {text}" for alike, text in firsts.items()]


#: A longer step than this, as a share of it, is a loss worth a word; a share of the ports below it is lost bandwidth.
_NOTABLE = 0.01
#: What several nodes of a network share, in the plural and in the singular.
_UNITS = {"leaf switches": "leaf switch", "units of rails": "unit of rails", "groups": "group"}


@dataclass(frozen=True, slots=True)
class NodePlacementStudy:
    """Comparison of a run on scattered nodes, beside other jobs, with the same run alone on packed nodes.

    ``port_share`` holds the shares (0 to 1) of the nodes' network bandwidth that remain for rings and all-to-alls.
    """

    prediction: Prediction
    packed_prediction: Prediction
    placement: NodePlacement
    port_share: NetworkShare
    nodes: int

    @property
    def slowdown(self) -> float:
        """Step time relative to the run on packed nodes; 1 is no slowdown."""
        return self.prediction.step_time / self.packed_prediction.step_time

    @property
    def lengthens_step(self) -> bool:
        """True if the node placement makes the step more than 1 % longer."""
        return self.slowdown > 1.0 + _NOTABLE

    @property
    def _network_unit(self) -> str:
        """Network unit that neighbouring nodes share: a leaf switch, a unit of rail switches or a dragonfly group."""
        return _UNITS[self.network_units]

    @property
    def network_units(self) -> str:
        """Plural of the network unit, for messages: "leaf switches", "units of rails" or "groups" of a dragonfly."""
        system = self.prediction.system
        level = next(filter(system.is_inter_node_level, system.levels))
        if level.topology == "dragonfly":
            return "groups"
        return "units of rails" if level.routing == "rail" else "leaf switches"

    @property
    def advice(self) -> str:
        """Advice on whether node placement matters to this run, in a sentence or two."""
        share, direct = self.port_share, _direct_rails_words(self.port_share)
        if share.leaves <= 1:
            return f"All nodes lie on one {self._network_unit}: what lies above it does not matter.{direct}"
        rings = f"rings sorted by leaf keep {format_percent(share.ring_share)} of the nodes' ports"
        exchanges = f"all-to-alls {format_percent(share.exchange_share)}"
        unsorted = f"rings in the order of the ranks would keep {format_percent(share.unsorted_ring_share)}"
        if self.lengthens_step:
            longer = f"The step is {100 * (self.slowdown - 1):.0f} % longer than on packed nodes of one's own"
            ask = f"Ask for nodes that share {self.network_units}"
            return f"Placement matters: {longer}; {rings}, {exchanges}. {ask}.{direct}"
        if self.slowdown < 1.0 - _NOTABLE:
            shorter = f"The step is {100 * (1 - self.slowdown):.0f} % shorter than on packed nodes"
            links = f"over the links of {share.leaves:.3g} {self.network_units}, as long as others leave them idle"
            return f"Spread nodes are faster here: {shorter}; {rings}, {exchanges} {links}.{direct}"
        if share.exchange_share < 1.0 - _NOTABLE or share.unsorted_ring_share < 1.0 - _NOTABLE:
            return f"Placement does not matter to this run: {rings}. It would to others: {exchanges}, and {unsorted}."
        above = f"the links above a {self._network_unit} carry what its nodes can send"
        return f"Placement does not matter: {above}; {rings}."


def node_placement_study(prediction: Prediction) -> NodePlacementStudy | None:
    """Compare a run on scattered nodes and a shared network with the same run alone on packed nodes.

    Parameters
    ----------
    prediction : Prediction
        Prediction of the run.

    Returns
    -------
    NodePlacementStudy, optional
        The comparison; None for the usual run on packed nodes.
    """
    run, system = prediction.run, prediction.system
    placement = parse_node_placement(run.fabric.nodes, run.fabric.background, run.fabric.neighbour)
    if placement.is_uncontended or not any(system.is_inter_node_level(level) for level in system.levels):
        return None
    nodes = math.ceil(prediction.plan.gpus / system.devices_per_node)
    packed = prediction.predict_variant(nodes="packed", background=0.0, neighbour=None)
    return NodePlacementStudy(prediction, packed, placement, placement_nic_share(system, nodes, placement), nodes)


def _direct_rails_words(share: NetworkShare) -> str:
    """Return a text on all-to-alls that run directly between unlike rails instead of over NVLink first (PXN)."""
    if share.direct_rail_exchange_share is None or share.direct_rail_exchange_share >= share.exchange_share - _NOTABLE:
        return ""
    direct = format_percent(share.direct_rail_exchange_share)
    return f" Straight between unlike rails, not over NVLink first (PXN), all-to-alls would keep {direct}."
