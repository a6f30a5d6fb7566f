"""Audit of a logged training run or of nccl-tests: find the fault that explains why measurements miss the prediction.

A hypothesis changes one property of the run (clock, link, overlap, host, attention, batch, a slow rank) by one factor.
It predicts all quantities that a log contains: step time, memory, parts of a step, spread over ranks, samples. The best
hypothesis is reported if it explains the log better by a clear margin than no fault at all. Hypotheses that the log
cannot tell apart are all reported.

Each quantity has a standard deviation. Each hypothesis has a penalty, which is higher if it has a free factor (a
likelihood ratio with a penalty for parameters: Akaike, 1974). Therefore no fault is reported for a healthy run.

Links are judged by the times of nccl-tests over the predicted times of collectives. Small payloads show the start-up
time of a collective, large ones the bandwidth of the links. A ratio counts as a fault if it exceeds the error of nine
of ten measured rows (docs/accuracy.md, collective: 36 % over all payloads; small ones scatter more).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.errors import PaleoError, SpecError
from paleo.parallel.placement import without_data_parallel_degree
from paleo.predict import Prediction, predict
from paleo.specs.software import load_software
from paleo.studies.collective import CollectiveStudy, compare_algorithms
from paleo.studies.what_if import HARDWARE_SCALERS
from paleo.units import MEBIBYTE, with_noun

if TYPE_CHECKING:
    from paleo.logs.base import NcclTestsLog, StepRecord, TrainingLog
    from paleo.specs.system import System

#: Relative standard deviation of a quantity where model and machine agree.
_DEVIATION = {"step": 0.025, "memory": 0.04, "samples": 0.002, "spread": 0.05, "unsteadiness": 0.03}
_PART_DEVIATION = 0.06
#: What a hypothesis costs, in units of half a squared deviation, what its free factor adds, and by how much a fault
#: must beat none.
_PRICE, _FACTOR_PRICE, _MARGIN = 2.0, 1.0, 6.0
#: Steps that are left out at the beginning: compilation, caches, graphs.
_WARM_UP = 2
#: Deviations from which a quantity is not as predicted; times the median from which a step is late, and the share of
#: late steps that is too many for checkpoints and the like.
_ASTRAY, _LATE_STEP, _MANY_LATE = 3.0, 1.5, 0.1
#: The most that a half-width (log) of an interval may be: steps of such a log say nothing.
_WIDEST = 50.0
#: Parts below this share of the step are not judged.
_SMALL_PART = 0.02
#: How often factors between the best one and its neighbours are tried.
_ROUNDS = 4
#: A verdict is carried on to so many times the ranks.
_RANKS_BEYOND = 8

_Evidence = Mapping[str, float]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Fault:
    """Possible explanation of a training log: a fault such as a slow link, with its factor and its fit to the log.

    ``prediction`` is the prediction of the run with the fault. ``evidence`` holds the log values that follow from the
    prediction (SI units, by quantity). ``misfit`` is their squared deviation from the measured log plus a penalty.
    """

    name: str
    factor: float
    advice: str
    prediction: Prediction
    evidence: _Evidence
    misfit: float

    @property
    def text(self) -> str:
        """Name of the fault with its factor, such as ``slow link (factor 0.5)``."""
        return self.name if self.factor == 1.0 else f"{self.name} (factor {self.factor:.3g})"


@dataclass(frozen=True, slots=True)
class TrainingLogAudit:
    """Result of the audit of a training log: the faults that explain deviations from the predicted run.

    ``faults`` come best first; there are none if the log is as predicted. ``explaining_prediction`` is the prediction
    that fits best, and ``measured_to_best_fit_step_time_ratio`` the measured step time over it.
    ``relative_step_deviation`` is the relative standard deviation of step times. ``step_time_on_more_ranks`` is a
    number of ranks, eight times as many, with the step time there and its interval [s].
    """

    log: TrainingLog
    expected_prediction: Prediction
    measured_quantities: _Evidence
    predicted_quantities: _Evidence
    faults: tuple[_Fault, ...]
    measured_to_best_fit_step_time_ratio: float
    relative_step_deviation: float
    step_time_on_more_ranks: tuple[int, float, tuple[float, float]] | None
    late_step_share: float = 0.0

    @property
    def outlying_quantities(self) -> tuple[str, ...]:
        """Names of logged quantities (step, memory, …) that differ from the prediction by more than its usual error."""
        measured, (low, high) = self.measured_quantities, self.expected_prediction.interval
        step = () if low <= measured["step"] <= high else ("step",)
        others = {name: _deviation(name, measured, self.predicted_quantities) for name in measured if name != "step"}
        return (*step, *(name for name, deviation in others.items() if abs(deviation) > _ASTRAY))

    @property
    def log_irregularities(self) -> tuple[str, ...]:
        """Remarks on irregular logged steps, such as several runs in one log or many late steps, a sentence each."""
        late = f"{self.late_step_share:.0%} of the steps take more than {_LATE_STEP:g} times as long as the median"
        return (*self.log.remarks, *([late] if self.late_step_share > _MANY_LATE else []))

    @property
    def explaining_prediction(self) -> Prediction:
        return self.faults[0].prediction if self.faults else self.expected_prediction

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions behind the audit, one sentence each, such as the batch of a log with tokens per second alone."""
        plan, notes = self.expected_prediction.plan, list(self.log_irregularities)
        if all(record.seconds is None for record in self.log.steps):
            tokens = self.expected_prediction.graph.tokens_per_sample
            size = f"{with_noun(plan.global_batch, 'sample')} of {tokens:,.0f} tokens"
            notes.append(f"the log states tokens a second alone: a step is taken to hold {size}, as stated or usual")
        if not self.expected_prediction.memory.fits:
            notes.append("the predicted run does not fit into memory: its batch, splits or recomputation may be others")
        return tuple(notes)

    @property
    def most_informative_unlogged_quantity(self) -> str | None:
        """Name of a quantity, missing from the log, that would best tell the two most likely faults apart.

        None if there are fewer than two faults, or no quantity helps.
        """
        if len(self.faults) < 2:
            return None
        first, second = (fault.evidence for fault in self.faults[:2])
        unlogged = first.keys() & second.keys() - self.measured_quantities.keys()
        logs = {name: math.log(first[name] / second[name]) for name in unlogged if first[name] > 0 and second[name] > 0}
        apart = {name: abs(log) / _DEVIATION.get(name, _PART_DEVIATION) for name, log in logs.items()}
        best = max(apart, key=lambda name: apart[name], default=None)
        return best if best is not None and apart[best] > _ASTRAY else None

    @property
    def interval(self) -> tuple[float, float]:
        """Range that holds nine of ten logged step times [s]: the median, and 1.645 standard deviations each way."""
        deviation = max(self.relative_step_deviation, _DEVIATION["step"])
        return _interval_around(self.measured_quantities["step"], 1.645 * deviation)


def _interval_around(seconds: float, width: float) -> tuple[float, float]:
    """Return the ends [s] of an interval around ``seconds`` whose half-width in natural logarithms is ``width``."""
    width = min(width, _WIDEST)
    return seconds * math.exp(-width), seconds * math.exp(width)


def _deviation(name: str, measured: _Evidence, predicted: _Evidence) -> float:
    """Return by how many standard deviations a logged quantity differs from its prediction.

    ``name`` is a quantity such as ``step``, ``memory`` or ``exchange``. To parts of a step, 2 % of the step time is
    added on both sides, so that small parts do not count.
    """
    value, expected = measured[name], predicted[name]
    if name in _DEVIATION:
        return math.log(value / expected) / _DEVIATION[name]
    floor = _SMALL_PART * measured["step"]
    return math.log((value + floor) / (expected + floor)) / _PART_DEVIATION


def _evidence_of_log(log: TrainingLog, expected: Prediction) -> dict[str, float]:
    """Return the median of each logged quantity over the steps after warm-up (SI units, by quantity).

    Memory is the largest logged value. SpecError is raised if the log has no step times.
    """
    settled = _settled_steps(log)
    seconds = _step_seconds(log, expected)
    if not seconds:
        raise SpecError("the log states neither seconds of a step nor tokens a second")
    evidence = {"step": median(seconds)}
    if memory := [record.memory for record in log.steps if record.memory]:
        evidence["memory"] = max(memory)
    if batches := [record.global_batch for record in settled if record.global_batch]:
        evidence["samples"] = median(batches)
    computing = []
    for record in settled:
        slow, fast = record.slowest_rank_parts, record.fastest_rank_parts
        if {"forward", "backward"} <= slow.keys() & fast.keys():
            computing.append((slow["forward"] + slow["backward"], fast["forward"] + fast["backward"]))
    if computing:
        evidence["compute"] = median([fastest for _, fastest in computing])
        evidence["spread"] = median([slowest / fastest for slowest, fastest in computing])
    for part in ("exchange", "optimizer"):
        if stated := [record.fastest_rank_parts[part] for record in settled if part in record.fastest_rank_parts]:
            evidence[part] = median(stated)
    if len(seconds) >= 5:
        evidence["unsteadiness"] = 1.0 + _scatter(seconds)
    return evidence


def _settled_steps(log: TrainingLog) -> Sequence[StepRecord]:
    """Return the logged steps after warm-up; all of them if the log is too short for that."""
    return log.steps[_WARM_UP:] if len(log.steps) > _WARM_UP + 1 else log.steps


def _step_seconds(log: TrainingLog, expected: Prediction) -> list[float]:
    """Return the durations [s] of those steps after warm-up that state one."""
    return [value for record in _settled_steps(log) if (value := _seconds(record, expected)) is not None]


def _seconds(record: StepRecord, expected: Prediction) -> float | None:
    """Return the duration of a logged step [s], directly or from tokens per second; None if neither is logged."""
    if record.seconds is not None:
        return record.seconds
    tokens = expected.graph.tokens_per_sample
    if record.tokens_per_s is None or tokens is None:
        return None
    return expected.plan.global_batch * tokens / (record.tokens_per_s * expected.plan.gpus)


def _scatter(seconds: Sequence[float]) -> float:
    """Return the relative standard deviation of step times by quartiles: (q3 − q1) / 1.349 over the median.

    Quartiles are robust against single late steps.
    """
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / 1.349 / median(ordered)


def _evidence_of(prediction: Prediction, *, slowed: float = 1.0) -> dict[str, float]:
    """Return the quantities that the log of a predicted run would contain (SI units, by quantity).

    The compute of one rank may be ``slowed`` by a factor; all other ranks wait for it.
    """
    parts, memory = prediction.breakdown, prediction.memory
    computing = parts.compute + parts.memory_bound + parts.launch
    return {
        "step": prediction.step_time + computing * (slowed - 1.0),
        "memory": memory.total - memory.reserved,
        "samples": float(prediction.plan.global_batch),
        "spread": slowed,
        "unsteadiness": 1.0 + _DEVIATION["unsteadiness"] / 2.0,
        "compute": computing,
        "exchange": parts.communication_exposed + parts.stragglers,
        "optimizer": parts.optimizer,
    }


def _misfit(measured: _Evidence, predicted: _Evidence) -> float:
    """Return the misfit of a prediction to a log: half the sum of squared deviations of all logged quantities."""
    return sum(min(_deviation(name, measured, predicted) ** 2, 400.0) / 2.0 for name in measured)


@dataclass(frozen=True, slots=True)
class _Hypothesis:
    """Kind of fault that a run may have, such as a slow link.

    ``factors`` returns the factors to try. ``changed`` predicts the run with the fault of a factor. ``slows_a_rank`` is
    True if the factor slows the compute of one rank instead.
    """

    name: str
    advice: str
    factors: Callable[[_Evidence, Prediction], Sequence[float]]
    changed: Callable[[Prediction, float], Prediction]
    slows_a_rank: bool = False

    def faults(self, expected: Prediction, measured: _Evidence) -> Iterator[_Fault]:
        """Predict the run with each factor of the hypothesis, and compare the predictions with the measurements.

        Factors for which the run cannot be predicted are left out.

        Parameters
        ----------
        expected : Prediction
            Prediction of the run without the fault.
        measured : _Evidence
            Median of each logged quantity (SI units), by quantity.

        Yields
        ------
        _Fault
            Fault with one factor, its prediction and its misfit to the log.
        """
        factors = self.factors(measured, expected)
        price = _PRICE + (0.0 if self.factors is _once else _FACTOR_PRICE)
        for factor in factors:
            try:
                prediction = self.changed(expected, factor)
            except PaleoError:
                continue
            evidence = _evidence_of(prediction, slowed=factor if self.slows_a_rank else 1.0)
            yield _Fault(self.name, factor, self.advice, prediction, evidence, price + _misfit(measured, evidence))


def _hardware(figure: str) -> Callable[[Prediction, float], Prediction]:
    return lambda expected, factor: expected.predict_variant(HARDWARE_SCALERS[figure](expected.system, factor))


def _slower_host(expected: Prediction, factor: float) -> Prediction:
    software = load_software(expected.run.software)
    host = software.host
    slower = host.model_copy(update={"forward": host.forward * factor, "backward": host.backward * factor})
    return expected.predict_variant(software=software.model_copy(update={"host": slower}))


def _once(measured: _Evidence, expected: Prediction) -> Sequence[float]:
    return (1.0,)


def _batch_factors(measured: _Evidence, expected: Prediction) -> Sequence[float]:
    """Return the factors on the global batch to try as an explanation of a log.

    They are the logged over the expected batch if both differ, and 0.5 and 2 if the log has no batch.
    """
    if "samples" not in measured:
        return (0.5, 2.0)
    logged = measured["samples"] / expected.plan.global_batch
    return (logged,) if abs(logged - 1.0) > _DEVIATION["samples"] else ()


#: Single faults, by what people call them.
_HYPOTHESES: tuple[_Hypothesis, ...] = (
    _Hypothesis(
        "capped clock",
        "look at clocks and power limits (nvidia-smi -q -d CLOCK,POWER), at heat, and at other jobs",
        lambda measured, e: (0.9, 0.8, 0.7, 0.6, 0.5, 0.4),
        _hardware("arithmetic (FLOP/s)"),
    ),
    _Hypothesis(
        "slow link",
        "run nccl-tests: a port that is down, a cable, TCP in place of RDMA, or other jobs on the fabric",
        lambda measured, e: (0.7, 0.5, 0.35, 0.25, 0.125, 0.0625) if e.plan.gpus > 1 else (),
        _hardware("link bandwidth"),
    ),
    _Hypothesis(
        "missing overlap",
        "switch on the overlap of gradient exchange with the backward pass",
        _once,
        lambda e, factor: e.predict_variant(exchange="after"),
    ),
    _Hypothesis(
        "host-bound",
        "launches limit it: CUDA graphs, a compiled model, fewer Python hooks, pinned CPU cores",
        lambda measured, e: (1.5, 2.0, 3.0, 4.0, 6.0),
        _slower_host,
    ),
    _Hypothesis(
        "eager attention",
        "use a fused attention kernel (flash)",
        _once,
        lambda e, factor: e.predict_variant(kernels={"attention": "unfused"}),
    ),
    _Hypothesis(
        "wrong batch",
        "the run's global batch is not the one stated",
        _batch_factors,
        lambda e, factor: e.predict_variant(global_batch=max(1, round(e.plan.global_batch * factor)), batch=None),
    ),
    _Hypothesis(
        "another recomputation",
        "the run recomputes other layers than stated",
        _once,
        lambda e, factor: e.predict_variant(recompute="none" if e.run.recompute.policy == "full" else "full"),
    ),
    _Hypothesis(
        "straggler",
        "one rank is slower than the others: find it by the timers of each rank, and replace it",
        lambda measured, e: (measured["spread"],) if measured.get("spread", 1.0) > 1.0 and e.plan.gpus > 1 else (),
        lambda e, factor: e,
        slows_a_rank=True,
    ),
)


def audit_training_log(log: TrainingLog, expected: Prediction) -> TrainingLogAudit:
    """Find the faults that explain a training log better than its prediction does.

    Parameters
    ----------
    log : TrainingLog
        Measured step times, memory and so on.
    expected : Prediction
        Prediction of the run that was logged.

    Returns
    -------
    TrainingLogAudit
        Faults, the remaining ratio of measured to predicted step time, and the same run on more ranks.
    """
    measured, plain = _evidence_of_log(log, expected), _evidence_of(expected)
    known = {name: value for name, value in measured.items() if value > 0}
    unexplained = _misfit(known, plain)
    tried = [fault for hypothesis in _HYPOTHESES for fault in _refined(hypothesis, expected, known)]
    tried.sort(key=lambda fault: fault.misfit)
    faults = [fault for fault in tried if fault.misfit + _MARGIN <= unexplained]
    faults = [fault for fault in faults if fault.misfit <= faults[0].misfit + _PRICE + _FACTOR_PRICE]
    best = faults[0] if faults else None
    ratio = known["step"] / (best.evidence if best else plain)["step"]
    scatter = known.get("unsteadiness", 1.0) - 1.0
    seconds = _step_seconds(log, expected)
    late_share = sum(value > _LATE_STEP * median(seconds) for value in seconds) / len(seconds)
    beyond = _beyond(expected, best, ratio, scatter)
    return TrainingLogAudit(log, expected, known, plain, tuple(faults), ratio, scatter, beyond, late_share)


def _refined(hypothesis: _Hypothesis, expected: Prediction, measured: _Evidence) -> list[_Fault]:
    """Find the factor of a hypothesis that explains a log best; return the fault as a list, empty if none applies.

    Factors between the best one and its neighbours are tried in a few rounds.
    """
    faults = list(hypothesis.faults(expected, measured))
    for _ in range(_ROUNDS if len(faults) > 2 else 0):
        faults.sort(key=lambda fault: fault.factor)
        place = min(range(len(faults)), key=lambda index: faults[index].misfit)
        ends = {faults[index].factor for index in (place - 1, place + 1) if 0 <= index < len(faults)}
        between = [math.sqrt(faults[place].factor * factor) for factor in ends]
        faults += replace(hypothesis, factors=lambda *_, closer=between: closer).faults(expected, measured)
    return sorted(faults, key=lambda fault: fault.misfit)[:1]


def _beyond(
    expected: Prediction, fault: _Fault | None, ratio: float, scatter: float
) -> tuple[int, float, tuple[float, float]] | None:
    """Predict a run with its fault on eight times as many ranks at the same batch per rank.

    Returns the number of ranks, the step time [s] and its interval [s]; None if the system is too small.
    """
    observed, gpus = expected if fault is None else fault.prediction, expected.plan.gpus * _RANKS_BEYOND
    batch, strategy = observed.plan.global_batch * _RANKS_BEYOND, without_data_parallel_degree(observed.run.strategy)
    more = {"gpus": gpus, "global_batch": batch, "batch": None, "strategy": strategy}
    try:
        larger = predict(observed.model, observed.system, observed.run.model_copy(update=more))
    except PaleoError:
        return None
    seconds = larger.step_time * ratio
    width = 1.645 * math.hypot(max(scatter, _DEVIATION["step"]), _DEVIATION["step"])
    return gpus, seconds, _interval_around(seconds, width)


#: Measured over predicted seconds from which links are slow, and starts are late.
_SLOW, _LATE = 1.4, 2.0
#: Payloads up to this tell the start; those of at least this, and of a quarter of the largest, the links [bytes].
_SMALL, _LARGE, _NEAR_LARGEST = MEBIBYTE / 16.0, 16.0 * MEBIBYTE, 4.0
COLLECTIVE_FAULT_ADVICE = {
    "slow link": "a port that is down, a cable, TCP in place of RDMA (NCCL_DEBUG=INFO tells), other jobs, or fewer "
    "network cards than stated",
    "late start": "processes far from their cards (NUMA), power saving of the CPU, or a proxy thread without a core",
    "faster than stated": "the system has more links, or newer ones, than the file says",
}


@dataclass(frozen=True, slots=True)
class CollectiveAudit:
    """Result of the comparison of an nccl-tests log with predicted collectives.

    ``small_payload_ratio`` and ``large_payload_ratio`` are medians of measured over predicted time for small and large
    payloads, None without such payloads. ``fault_time_ratios`` maps a fault such as ``slow link`` to its ratio of
    times. ``time_on_more_ranks`` is a larger number of ranks with the time of the largest payload there [s].
    """

    log: NcclTestsLog
    study: CollectiveStudy
    predicted_times: tuple[float, ...]
    small_payload_ratio: float | None
    large_payload_ratio: float | None
    fault_time_ratios: Mapping[str, float]
    time_on_more_ranks: tuple[int, float] | None

    @property
    def verdict(self) -> str:
        """Sentence on whether the measured collectives are as predicted, and on the likely fault."""
        subject = f"{self.study.operation} over {self.study.ranks} GPUs of {self.study.system.name}"
        if self.log.ranks is not None and self.log.ranks != self.study.ranks:
            return f"{subject}: the log is of {with_noun(self.log.ranks, 'rank')}; state --gpus {self.log.ranks}."
        if self.log.run_count > 1:
            return f"{subject}: the log holds {self.log.run_count} runs; state one alone."
        if not self.fault_time_ratios:
            return f"{subject}: as predicted, nothing in this log says otherwise."
        parts = []
        for name, factor in self.fault_time_ratios.items():
            words = f"links carry {1.0 / factor:.0%} of what is predicted"
            if name == "late start":
                words = f"small payloads take {factor:.1f} times as long as predicted, large ones do not"
            parts.append(f"{name}: {words}")
        return f"{subject}: {'; '.join(parts)}."


def audit_collectives(log: NcclTestsLog, operation: str, ranks: int, system: System) -> CollectiveAudit:
    """Compare the collectives of an nccl-tests log with predicted ones, to find faults of the links.

    Parameters
    ----------
    log : NcclTestsLog
        Payloads [byte] and times [s], as nccl-tests prints them.
    operation : str
        Collective, such as ``all_reduce``.
    ranks : int
        Number of ranks.
    system : System
        Machine: its devices, nodes and links.

    Returns
    -------
    CollectiveAudit
        Ratios of measured to predicted time, likely faults, and the time of the largest payload on `_RANKS_BEYOND` (8)
        times as many ranks.
    """
    study = compare_algorithms(operation, log.payloads[-1], ranks, system)
    payloads, measured = np.asarray(log.payloads), np.asarray(log.seconds)
    predicted = _automatic_seconds(study, payloads)
    ratios = measured / predicted
    small = _median(ratios[payloads <= _SMALL])
    large = _median(ratios[(payloads >= _LARGE) & (payloads >= payloads[-1] / _NEAR_LARGEST)])
    faults: dict[str, float] = {}
    if large is not None and large > _SLOW:
        faults["slow link"] = large
    elif large is not None and large < 1.0 / _SLOW:
        faults["faster than stated"] = large
    elif small is not None and small > _LATE:
        faults["late start"] = small
    return CollectiveAudit(log, study, tuple(predicted), small, large, faults, _on_more(study, large))


def _automatic_seconds(study: CollectiveStudy, payloads: Array) -> Array:
    """Return the predicted time of a collective at each payload by the algorithm that NCCL would choose [s]."""
    times = study.times(payloads)
    return np.asarray(np.min([times[row.algorithm] for row in study.rows if row.chosen_by_library], axis=0))


def _median(values: Array) -> float | None:
    return float(np.median(values)) if len(values) else None


def _on_more(study: CollectiveStudy, large: float | None) -> tuple[int, float] | None:
    """Predict a collective on eight times as many ranks, scaled by the measured ratio of large payloads.

    Returns the number of ranks and the time [s]; None if the system has no more ranks.
    """
    ranks = study.ranks * _RANKS_BEYOND
    try:
        more = compare_algorithms(study.operation, study.payload_bytes, ranks, study.system)
    except PaleoError:
        return None
    return ranks, more.best.time * (large or 1.0)
