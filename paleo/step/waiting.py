"""Waiting of a step: for the slowest rank, and for the next batch of data.

Ranks that wait for one another are not equally fast, by two kinds of noise. *Persistent* noise is a rank's own: a slow
chip is slow in every step. *Independent* noise is drawn anew in every step (operating system, garbage collection,
lengths of sequences). Both are standard deviations as a share of a rank's mean step.

The input pipeline reads, decodes and copies the samples of a batch to the devices. Every device has its own link to the
host; storage and cores of a node are shared evenly. All functions broadcast over arrays; seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.step.memory import host_figure, link_rate

if TYPE_CHECKING:
    from paleo.network.graph import Graph
    from paleo.operations.tensor import Tensor
    from paleo.specs.run import InputOptions, Run
    from paleo.specs.software import Software
    from paleo.specs.system import System

Array = npt.NDArray[np.float64]
Numeric = float | npt.NDArray[np.floating[Any]]
#: Noise above which a normal law would give negative steps too often; a lognormal one takes over.
HEAVY_TAIL = 0.3
#: Independent and persistent noise of ranks of traced jobs: medians of eight stages of two jobs of ByteDance (the
#: stage with a worker that was slowed on purpose left out of the persistent one). Lin et al., Understanding stragglers
#: in large model training using what-if analysis, OSDI 2025, data of ByteDance-Seed/StragglerAnalysis@8efcd7f37f.
TRACED = (0.015, 0.003)
#: Coefficients of the rational approximation of the normal quantile: Wichura, Algorithm AS 241, Applied Statistics 37
#: (1988), routine PPND7 (seven digits): numerator and denominator near the middle, in the shoulders, in the tails.
_MIDDLE = ((59.109374720, 159.29113202, 50.434271938, 3.3871327179), (67.187563600, 78.757757664, 17.895169469, 1.0))
_SHOULDER = ((0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777), (0.12021132975, 0.73700164250, 1.0))
_TAIL = ((0.017337203997, 0.42868294337, 3.0812263860, 6.6579051150), (0.012258202635, 0.24197894225, 1.0))


def normal_quantile(probability: Numeric) -> Array:
    """Standard normal quantile, to seven digits (Wichura, AS 241, 1988).

    >>> normal_quantile(np.array([0.5, 0.975, 0.001])).round(4)
    array([ 0.    ,  1.96  , -3.0902])
    """
    p = np.asarray(probability, dtype=np.float64)
    centred = p - 0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        r = 0.180625 - centred**2
        middle = centred * np.polyval(_MIDDLE[0], r) / np.polyval(_MIDDLE[1], r)
        root = np.sqrt(-np.log(np.minimum(p, 1.0 - p)))
        shoulder = np.polyval(_SHOULDER[0], root - 1.6) / np.polyval(_SHOULDER[1], root - 1.6)
        tail = np.polyval(_TAIL[0], root - 5.0) / np.polyval(_TAIL[1], root - 5.0)
        outer = np.sign(centred) * np.where(root <= 5.0, shoulder, tail)
    return np.where(np.abs(centred) <= 0.425, middle, outer)


def expected_largest(ranks: Numeric) -> Array:
    """Expected largest of ``ranks`` standard normal numbers: Φ⁻¹((n − 0.375) / (n + 0.25)), 0 for one rank.

    Reference: Blom, Statistical estimates and transformed beta-variables, 1958; within 1 % from 8 ranks up, within 5 %
    below.

    >>> expected_largest(np.array([1.0, 2.0, 8.0, 1000.0])).round(3)
    array([0.   , 0.589, 1.434, 3.227])
    """
    n = np.maximum(np.asarray(ranks, dtype=np.float64), 1.0)
    return np.where(n > 1.0, normal_quantile((n - 0.375) / (n + 0.25)), 0.0)


def waiting_share(ranks: Numeric, independent: Numeric, persistent: Numeric = 0.0) -> Array:
    """Seconds that a step of ``ranks`` waits for its slowest one, as a share of a rank's mean step.

    e_n √(persistent² + independent²) for like ranks. Where the noise is above `HEAVY_TAIL` a lognormal law of the same
    mean and deviation takes the normal one's place: exp(s e_n − s²/2) − 1 with s² = ln(1 + c²).

    >>> round(float(waiting_share(8.0, 0.1)), 4)
    0.1434
    """
    noise = np.hypot(independent, persistent)
    largest = expected_largest(ranks)
    spread = np.sqrt(np.log1p(noise**2))
    heavy = np.expm1(spread * largest - spread**2 / 2.0)
    return np.where((noise > HEAVY_TAIL) & (np.asarray(ranks) > 1.0), heavy, noise * largest)


@dataclass(frozen=True, slots=True)
class Noise:
    """How unequal the steps of ranks are, as shares of their mean: ``independent`` noise, drawn anew in every step, and
    ``persistent`` noise, a rank's own."""

    independent: Array
    persistent: float

    @classmethod
    def of(cls, run: Run, software: Software, local_batch: Numeric) -> Noise:
        """That of a run and of its software, which are independent of each other; the lengths of sequences vary by
        sample and average over the ``local_batch`` samples of a rank."""
        lengths = averaged(run.length_variation, local_batch)
        return cls(np.sqrt(run.jitter**2 + software.host.jitter**2 + lengths**2), run.slow_ranks)

    @property
    def any(self) -> bool:
        """Whether ranks differ at all."""
        return bool(self.persistent or self.independent.any())


def noise_named(text: str) -> tuple[float, float]:
    """Independent and persistent noise from ``0.02``, ``0.02,0.01`` or ``traces``; SpecError for anything else.

    >>> noise_named("0.02,0.01"), noise_named("0.02"), noise_named("traces") == TRACED
    ((0.02, 0.01), (0.02, 0.0), True)
    """
    if text.strip() == "traces":
        return TRACED
    try:
        independent, persistent = (float(part) for part in (text if "," in text else f"{text},0").split(","))
    except ValueError:
        raise SpecError(f"--jitter {text!r}: expected a share such as 0.02, two as in 0.02,0.01, or traces") from None
    return independent, persistent


def averaged(noise: Numeric, draws: Numeric) -> Array:
    """Independent noise of the mean of ``draws`` passes, as of a pipeline's microbatches or of local steps: c / √n."""
    return np.asarray(noise / np.sqrt(draws))


def slowest_mean(means: Sequence[float], independent: float) -> float:
    """Expected step of ranks whose ``means`` [s] are known: the largest of each mean and its noise.

    Ranks are ordered by their means; the slowest k of them, taken as alike at their own mean, bound the maximum from
    below for every k, and the largest of these bounds is returned.

    >>> round(slowest_mean([1.0] * 7 + [1.5], 0.02), 3)  # one slow rank decides
    1.5
    """
    ordered = np.sort(np.asarray(means, dtype=np.float64))[::-1]
    counts = np.arange(1.0, len(ordered) + 1.0)
    bounds = (np.cumsum(ordered) / counts) * (1.0 + waiting_share(counts, independent))
    return float(bounds.max())


@dataclass(frozen=True, slots=True)
class InputPipeline:
    """Seconds in which a step's batch is read, decoded and copied: three stages that work at the same time, ahead of
    the step that needs it."""

    storage: Numeric
    decode: Numeric
    copy: Numeric

    @property
    def total(self) -> Array:
        """Seconds between two batches in steady state: the slowest stage sets the pace."""
        return np.maximum(np.maximum(self.storage, self.decode), self.copy)

    @property
    def slowest(self) -> str:
        """The slowest part of the input pipeline."""
        names = {"storage": self.storage, "decoding": self.decode, "copies to the device": self.copy}
        return max(names, key=lambda name: float(names[name]))


def input_pipeline(
    stages: InputOptions,
    system: System,
    sample_bytes: float,
    *,
    gpus: int,
    replica: Numeric,
    local_batch: Numeric,
    link: float | None = None,
) -> InputPipeline:
    """How long a batch takes to arrive, where ``replica`` ranks share the ``local_batch`` samples of one model replica.

    A node reads and decodes the samples of all its replicas (of one, where a replica is larger than a node) with its
    storage and its cores; each rank copies the batch of its replica over its own link, at ``link`` byte/s or the usual
    share of its slot.
    """
    devices = min(gpus, system.devices_per_node)
    samples = np.asarray(local_batch) * np.maximum(devices / np.asarray(replica), 1.0)
    storage, decode = 0.0 * samples, 0.0 * samples
    if stages.sample is not None:
        rate = stages.storage or host_figure(system, "storage_bandwidth", ", or input.storage")
        storage = samples * stages.sample / rate
    if stages.decode > 0:
        cores = stages.cores or host_figure(system, "cores", ", or input.cores") / system.devices_per_node
        decode = samples * stages.decode / (cores * devices)
    copied = sample_bytes if stages.copied is None else stages.copied
    return InputPipeline(storage, decode, np.asarray(local_batch) * copied / (link or link_rate(system)))


#: Stored bytes of a photograph (ImageNet-1k: 140 GB in 1.28 million JPEG files), and the side in pixels from which an
#: image of three channels is taken for one.
PHOTOGRAPH, LEAST_SIDE = 110_000.0, 128


def usual_input(run: Run, graph: Graph, system: System, decode: float, gpus: int) -> InputOptions | None:
    """How photographs arrive where the run does not say: a core of the host takes ``decode`` seconds for each, and
    storage counts where the host states its bandwidth. The run has all cores of its nodes, which its ``gpus`` may not
    fill. None where the network takes none, the host's cores are not stated, or ``decode`` is 0: data cost nothing."""
    host = system.host
    if not decode or host is None or host.cores is None or not any(map(_photograph, graph.inputs.values())):
        return None
    cores = host.cores / min(gpus, system.devices_per_node)
    stored = PHOTOGRAPH if host.storage_bandwidth else None
    return run.photographs(sample=stored, decode=decode, cores=cores)


def _photograph(tensor: Tensor) -> bool:
    pixels = tensor.dims[1:] == ("channels", "height", "width") and tensor.sizes[1] == 3
    return pixels and min(tensor.sizes[2:]) >= LEAST_SIDE


#: Bytes of an input's numbers as loaders hand them on: fp32, and int64 for indices.
_WIDTH = {"index": 8.0}


def sample_bytes(graph: Graph) -> float:
    """Bytes of one sample as it is copied to the device."""
    return sum(float(tensor.elements) * _WIDTH.get(tensor.role, 4.0) for tensor in graph.inputs.values()) / graph.batch
