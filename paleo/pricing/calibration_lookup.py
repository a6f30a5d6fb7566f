"""Lookup of calibrated parameters: which calibration predicts the time of a kernel family or link on a device.

Times come from the plain roofline, from the original Paleo's constants (both `ConstantEfficiencies`), or from
measured parameters (`find_calibrated_parameters`). The parameters of a family are measured on the device, inherited,
or the defaults of the formula. A *stack* is the way in which kernels were timed. The order of search, with a wider
interval at each step:

1. the user's calibration file, then the shipped file of the device or system, in the wanted stack;
2. the same file in another stack: parameters of the silicon are kept, those of the host are taken from the rules of
   the device's architecture for the wanted stack;
3. the rules of the architecture (``architectures.yaml``), by the best match of memory technology, then of the stack;
4. the rules of its nearest relatives (Blackwell Ultra: Blackwell, then Hopper; Turing: Volta; …);
5. the defaults of the formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.specs.calibration import (
    Calibration,
    CalibrationEntry,
    InheritanceRule,
    catalog_calibration,
    load_inheritance,
    parameters_from_mapping,
)

Array = npt.NDArray[np.float64]
Parameters = TypeVar("Parameters")
IntervalBins = tuple[tuple[float, float, float], ...]
#: Ways of timing a kernel, the one nearest to a kernel inside a running step first: replayed graphs, bare kernels,
#: calls.
TIMING_METHODS = ("graph", "kernel", "back-to-back", "eager")
#: Parameters that belong to the host or the way of timing, not to the silicon, by the first part of the family's name.
HOST_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "gemm": ("launch_time",),
    "conv": ("launch_time",),
    "rnn": ("launch_time", "step_launch_time", "early_step_time"),
    "attention": ("launch_time",),
    "memory": ("launch_time", "kernel_time", "host_overlap"),
    "collective": ("launch_time", "launch_skew_time", "host_time"),
    "narrow": ("launch_time", "host_time", "pass_bandwidth_share"),
    "experts": ("launch_time", "host_time", "pass_bandwidth_share"),
    "latent": ("launch_time", "host_time", "pass_bandwidth_share"),
    "training": ("launch_time",),
    "scan": ("launch_time", "host_time"),
    "exchange": ("launch_time",),
    "sparse": ("launch_time",),
}
#: Interval of a prediction from the formula's defaults, without any measurement.
UNMEASURED_INTERVAL_FACTORS = (0.5, 2.0)
#: Factor by which each step to a relative architecture widens an interval.
INTERVAL_FACTOR_PER_RELATED_ARCHITECTURE = 1.2
#: Architecture from which those without rules inherit.
_FALLBACK_ARCHITECTURE = "Ampere"
#: Memory technologies whose error-correcting bits are stored among the data on server cards.
_INLINE_ECC = frozenset({"GDDR5", "GDDR6", "GDDR7"})
#: Achieved share of the nominal bandwidth in large streams, by memory technology (`streaming_bandwidth_share`).
_STREAMING = {"HBM2": 0.90, "HBM2e": 0.89, "HBM3": 0.90, "HBM3e": 0.90, "GDDR": 0.87}
#: Ratio of data bytes to data and inline ECC bytes, and the share of the bandwidth that Pascal's HBM2 controller
#: reaches.
_INLINE_ECC_DATA_SHARE, _PASCAL_HBM2_BANDWIDTH_SHARE = 8.0 / 9.0, 0.74


def streaming_bandwidth_share(*, memory_kind: str, architecture: str, inline_ecc: bool) -> float:
    """Return the share of the datasheet's bandwidth that a long stream reaches, for unmeasured devices.

    Row activation, refresh and the switch from reads to writes cost some 10 % on HBM and a little more on the longer
    bursts of GDDR. HBM has separate wires for ECC bits. Server cards with GDDR store one ECC byte with each eight bytes
    in the same memory (inline), which takes a ninth of the traffic.

    Parameters
    ----------
    memory_kind : str
        Memory technology, such as ``HBM3`` or ``GDDR6``.
    architecture : str
        Architecture of the device, such as ``Turing``.
    inline_ecc : bool
        True if error-correcting bytes are stored among the data.

    Returns
    -------
    float
        Achieved over datasheet bandwidth, 0 to 1 [-].

    Examples
    --------
    >>> round(streaming_bandwidth_share(memory_kind="GDDR6", architecture="Turing", inline_ecc=True), 2)
    0.77
    """
    if architecture == "Pascal" and memory_kind.startswith("HBM"):
        return _PASCAL_HBM2_BANDWIDTH_SHARE
    if memory_kind in _STREAMING:
        return _STREAMING[memory_kind]
    return _STREAMING["GDDR"] * (_INLINE_ECC_DATA_SHARE if inline_ecc else 1.0)


@dataclass(frozen=True, slots=True)
class SourcedParameters(Generic[Parameters]):
    """Calibrated parameters of one kernel or link family, with their origin and the 90 % interval of predicted times.

    ``origin`` is ``measured``, ``inherited`` or ``default``; ``source_name`` names the device, system or architecture
    that the parameters come from. ``interval_bins`` holds (up to predicted seconds, low factor, high factor), in
    ascending order of times.
    """

    parameters: Parameters
    origin: str
    source_name: str
    interval_bins: IntervalBins

    def interval_factors(self, predicted: float) -> tuple[float, float]:
        """Return the ends of the 90 % interval of one predicted time, as factors on that time.

        Parameters
        ----------
        predicted : float
            Predicted time [s].

        Returns
        -------
        tuple of (float, float)
            (low, high) factors [-].
        """
        for up_to, low, high in self.interval_bins:
            if predicted <= up_to:
                return low, high
        return self.interval_bins[-1][1:]

    def interval_factor_arrays(self, predicted: Array) -> tuple[Array, Array]:
        """Return the ends of the 90 % interval of each predicted time, as factors on that time.

        Parameters
        ----------
        predicted : ndarray
            Predicted times [s].

        Returns
        -------
        tuple of (ndarray, ndarray)
            (low, high) factors [-].
        """
        ends, low, high = (np.array(column) for column in zip(*self.interval_bins, strict=True))
        bin_of = np.minimum(np.searchsorted(ends, predicted), len(ends) - 1)
        return low[bin_of], high[bin_of]

    def interval_bounds(self, predicted: Array) -> tuple[Array, Array]:
        """Return the ends of the 90 % interval of each predicted time.

        Parameters
        ----------
        predicted : ndarray
            Predicted times [s].

        Returns
        -------
        tuple of (ndarray, ndarray)
            (low end, high end) [s].
        """
        low, high = self.interval_factor_arrays(predicted)
        return predicted * low, predicted * high


def find_calibrated_parameters(
    kind: type[Parameters],
    *,
    subject: str,
    architecture: str,
    family: str,
    memory_kind: str = "",
    stacks: Sequence[str] = TIMING_METHODS,
    user_calibration: Calibration | None = None,
) -> SourcedParameters[Parameters]:
    """Find the calibrated parameters of a kernel or link family for a device or system.

    Parameters
    ----------
    kind : type
        Dataclass of the calibrated parameters.
    subject : str
        Name of the device or system.
    architecture : str
        Architecture of the device, such as ``Hopper``.
    family : str
        Calibration family, such as ``gemm.tensor``: kernels or links that share one formula.
    memory_kind : str, default ''
        Memory technology of a device, or kind of the links inside a node of a system.
    stacks : sequence of str, default TIMING_METHODS
        Ways of timing (such as ``graph``), best first.
    user_calibration : Calibration, optional
        Calibration of the user, which takes precedence over the shipped ones.

    Returns
    -------
    SourcedParameters[Parameters]
        Parameters with their origin and interval.
    """
    # each stack is followed by its base (eager/linear: eager), then by the usual ones
    named = [part for stack in stacks for part in dict.fromkeys((stack, stack.partition("/")[0]))]
    variants = tuple(dict.fromkeys([*named, *TIMING_METHODS]))
    for calibration in filter(None, (user_calibration, _shipped(subject))):
        fitting = [entry for entry in calibration.entries if entry.family == family and entry.stack in variants]
        if fitting:
            nearest = min(fitting, key=lambda entry: _rank(entry.stack, variants))
            entry = _with_host_parameters(nearest, variants, architecture, memory_kind)
            return _sourced(kind, entry, "measured", calibration.name)
    inherited = _inherited(family, architecture, memory_kind, variants)
    if inherited is not None:
        return _sourced(kind, inherited[0], "inherited", inherited[1])
    return SourcedParameters(kind(), "default", "formula", ((math.inf, *UNMEASURED_INTERVAL_FACTORS),))


def _rank(stack: str, stacks: Sequence[str]) -> int:
    return list(stacks).index(stack) if stack in stacks else len(stacks)


def _with_host_parameters(
    entry: CalibrationEntry, stacks: Sequence[str], architecture: str, memory_kind: str
) -> CalibrationEntry:
    """Replace the launch costs in an entry by those of a preferred stack, if the architecture's rules have one.

    ``stacks`` are ways of timing, the preferred first.
    """
    better = stacks[: _rank(entry.stack, stacks)]
    for rule in _rules(entry.family, architecture):
        for stack in better:
            if stack in rule.stacks and _memory_distance(rule, memory_kind) < 2:
                host = inherited_entry(rule, entry.family, stack, architecture, memory_kind)
                return entry.model_copy(update={"parameters": entry.parameters | host_parameters(host)})
    return entry


def host_parameters(entry: CalibrationEntry) -> dict[str, float]:
    """Return those parameters of a calibration entry that describe the host (launch costs), not the device.

    Parameters
    ----------
    entry : CalibrationEntry
        Calibrated parameters of one family, timed in one way.

    Returns
    -------
    dict of str to float
        Values in SI units by name.
    """
    names = HOST_PARAMETERS.get(entry.family.partition(".")[0], ())
    return {name: entry.parameters[name] for name in names if name in entry.parameters}


def _inherited(
    family: str, architecture: str, memory_kind: str, stacks: Sequence[str]
) -> tuple[CalibrationEntry, str] | None:
    """Return (calibration entry inherited from measured devices, name of its source); None if no rule fits.

    The best inheritance rule is chosen. The source is the architecture for which the rule was written, or the devices
    of another maker that the rule names.
    """
    for steps, relative in enumerate(_relatives(architecture)):
        choices = [(rule, stack) for rule in _rules(family, relative) for stack in rule.stacks]
        if choices:
            rule, stack = min(choices, key=lambda c: (_memory_distance(c[0], memory_kind), _rank(c[1], stacks)))
            entry = inherited_entry(rule, family, stack, relative, memory_kind)
            subject = ", ".join(rule.inherits) if rule.foreign else relative
            return _widened(entry, INTERVAL_FACTOR_PER_RELATED_ARCHITECTURE**steps), subject
    return None


def _relatives(architecture: str) -> Iterator[str]:
    inheritance = load_inheritance()
    known: Mapping[str, tuple[str, ...]] = inheritance.relatives if inheritance else {}
    start = architecture if architecture in known else _FALLBACK_ARCHITECTURE
    yield from dict.fromkeys((architecture, start, *known.get(start, ())))


@cache
def _rules(family: str, architecture: str) -> tuple[InheritanceRule, ...]:
    inheritance = load_inheritance()
    rules = inheritance.rules if inheritance else ()
    return tuple(rule for rule in rules if family in rule.families and architecture in rule.architectures)


def _memory_distance(rule: InheritanceRule, memory_kind: str) -> int:
    """Rate how well the memory of an inheritance rule fits a device's memory technology; 0 is best.

    0: same technology, 1: rule for any memory, 2: same class (HBM, GDDR), 3: another class.
    """
    if rule.memory_kinds is None:
        return 1
    if memory_kind in rule.memory_kinds:
        return 0
    return 2 if any(kind[:3] == memory_kind[:3] for kind in rule.memory_kinds) else 3


def inherited_entry(
    rule: InheritanceRule, family: str, stack: str, architecture: str, memory_kind: str
) -> CalibrationEntry:
    """Build the calibration entry of an unmeasured architecture from measured relatives, by a rule.

    Parameters
    ----------
    rule : InheritanceRule
        Names the measured devices, factors on their parameters, and the widening of the interval.
    family, stack : str
        Calibration family, such as ``gemm.tensor``, and way of timing, such as ``graph``.
    architecture : str
        The architecture that inherits.
    memory_kind : str
        Memory technology of its devices, such as ``HBM3``.

    Returns
    -------
    CalibrationEntry
        Entry with a widened interval.

    Raises
    ------
    SpecError
        If an entry that the rule names is missing.
    """
    changes = rule.stacks[stack]
    source_family = rule.family_there or family
    sources = [_source(subject, source_family, changes.like or stack) for subject in rule.inherits]
    parameters = _geometric_mean([source.parameters for source in sources], list(rule.inherits.values()))
    if rule.host is not None:
        parameters |= host_parameters(_source(rule.host, source_family, changes.like or stack))
    parameters |= {name: parameters[name] * factor for name, factor in {**rule.scale, **changes.scale}.items()}
    if rule.stream is not None:
        parameters[rule.stream] = streaming_bandwidth_share(
            memory_kind=memory_kind, architecture=architecture, inline_ecc=memory_kind in _INLINE_ECC
        )
    parameters |= {**rule.set, **changes.set}
    entry = CalibrationEntry(
        family=family, stack=stack, source="inherited: " + ", ".join(rule.inherits), date=sources[0].date,
        inherits=tuple(rule.inherits), parameters=parameters, interval=rule.interval or sources[0].interval,
        notes=rule.notes,
    )  # fmt: skip
    return _widened(entry, rule.widen)


def _source(subject: str, family: str, stack: str) -> CalibrationEntry:
    calibration = _shipped(subject)
    for entry in calibration.entries if calibration else ():
        if entry.family == family and entry.stack == stack:
            return entry
    raise SpecError(f"calibrations/architectures.yaml: {subject} has no entry of {family!r} in stack {stack!r}")


def _geometric_mean(sets: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Compute the weighted geometric mean of several sets of calibrated parameters, name by name."""
    if len(sets) == 1:
        return dict(sets[0])
    pairs, total = list(zip(weights, sets, strict=True)), sum(weights)
    return {name: math.exp(sum(w * math.log(each[name]) for w, each in pairs) / total) for name in sets[0]}


def _widened(entry: CalibrationEntry, factor: float) -> CalibrationEntry:
    factors = ({"low": each.low / factor, "high": each.high * factor} for each in entry.interval)
    bins = tuple(each.model_copy(update=ends) for each, ends in zip(entry.interval, factors, strict=True))
    return entry.model_copy(update={"interval": bins})


_shipped = cache(catalog_calibration)


def _sourced(kind: type[Parameters], entry: CalibrationEntry, origin: str, subject: str) -> SourcedParameters[Any]:
    bins = tuple((interval.up_to_s or math.inf, interval.low, interval.high) for interval in entry.interval)
    parameters = parameters_from_mapping(kind, entry.parameters, where=f"{subject}: {entry.family}")
    return SourcedParameters(parameters, origin, subject, bins)


@dataclass(frozen=True, slots=True)
class ConstantEfficiencies:
    """Constant shares of the datasheet's peaks that computation, memory and links reach, and a launch time [s].

    ``combine`` is ``max`` if arithmetic and memory traffic of a kernel overlap, and ``sum`` if they add up (the
    original Paleo). ``includes_latency`` is False if links have no alpha, as in the original. ``pads_to_arrays`` is
    True if products are padded to the systolic arrays of the device (`paleo.pricing.systolic`). ``low_factor`` and
    ``high_factor`` bound the interval of a predicted time.
    """

    name: str
    compute: float = 1.0
    memory: float = 1.0
    link: float | None = None
    launch_time: float = 0.0
    combine: Literal["max", "sum"] = "max"
    includes_latency: bool = True
    pads_to_arrays: bool = False
    low_factor: float = 1.0
    high_factor: float = 2.0


IDEAL_EFFICIENCIES = ConstantEfficiencies("ideal", link=1.0)
#: Rates of systolic arrays, on which no kernel was timed; families of GPU kernels do not apply to one large core. The
#: share of the matrix units, in addition to padding, is that of MaxText's published steps (0.5 to 0.68 of peak as MFU),
#: that of memory is as for HBM elsewhere, and that of a link is from the scaling book (ICI, 0.9).
TPU_EFFICIENCIES = ConstantEfficiencies(
    "assumed for TPUs: 0.7 of the matrix units, 0.85 of memory, 0.9 of a link",
    0.7, 0.85, 0.9, pads_to_arrays=True, low_factor=0.65, high_factor=1.6,
)  # fmt: skip


def constant_efficiencies(device_kind: str, text: str) -> ConstantEfficiencies | None:
    """Return the constant efficiencies that a calibration option names; for TPUs ``auto`` has constants, too.

    Parameters
    ----------
    device_kind : str
        Kind of device, such as ``gpu`` or ``tpu``.
    text : str
        Calibration option as the user wrote it.

    Returns
    -------
    ConstantEfficiencies, optional
        Efficiencies; None if times are predicted from measured parameters.
    """
    return TPU_EFFICIENCIES if text == "auto" and device_kind == "tpu" else parse_efficiencies(text)


#: Least share of peak that ``ppp=`` accepts.
_LEAST_SHARE = 1e-4


def parse_efficiencies(text: str) -> ConstantEfficiencies | None:
    """Parse a calibration option with constant efficiencies: ``ideal`` (the peaks), or ``ppp=C,L``.

    C is the share of peak that computation reaches (the platform percent of peak of Paleo, 2017), L that of links; L is
    C if absent.

    Parameters
    ----------
    text : str
        The calibration as the user wrote it.

    Returns
    -------
    ConstantEfficiencies, optional
        Constant shares of peak; None for any other option.

    Raises
    ------
    SpecError
        If the percentages are out of range.

    Examples
    --------
    >>> parse_efficiencies("ppp=0.62,0.72").link
    0.72
    """
    if text == "ideal":
        return IDEAL_EFFICIENCIES
    if not text.startswith("ppp="):
        return None
    try:
        values = [float(part) for part in text.removeprefix("ppp=").split(",")]
    except ValueError:
        values = []
    if not 1 <= len(values) <= 2 or not all(_LEAST_SHARE <= value <= 1 for value in values):
        raise SpecError(
            f"calibration {text!r}: expected one or two shares of peak from {_LEAST_SHARE:g} to 1, as in ppp=0.62,0.7"
        )
    return ConstantEfficiencies(text, values[0], values[0], values[-1], combine="sum", includes_latency=False)
