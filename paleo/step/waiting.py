"""Waits of a step: for the slowest rank, and for the next batch of data.

Ranks that wait for one another differ in speed by two kinds of noise. *Persistent* noise stays with a rank: a slow chip
is slow in every step. *Independent* noise varies from step to step (operating system, garbage collection, lengths of
sequences). Both are standard deviations as a share of a rank's mean step.

The input pipeline reads and decodes the samples of a batch and copies them to the devices. Every device has a separate
link to the host; storage and cores of a node are divided equally. All functions broadcast over arrays; units are
seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paleo.step.memory import host_link_rate, required_host_property

if TYPE_CHECKING:
    from paleo.network.graph import Graph
    from paleo.operations.tensor import Tensor
    from paleo.specs.run import InputOptions, Run
    from paleo.specs.software import SoftwareProfile
    from paleo.specs.system import System

Array = npt.NDArray[np.float64]
Numeric = float | npt.NDArray[np.floating[Any]]
#: Noise above which a lognormal distribution is used, as a normal one would give negative steps too often.
_LOGNORMAL_NOISE_THRESHOLD = 0.3
#: Coefficients of a rational approximation of the normal quantile (Wichura, Algorithm AS 241, Applied Statistics 37,
#: 1988, routine PPND7, seven digits): numerator and denominator near the middle, further out, and in the tails.
_MIDDLE = ((59.109374720, 159.29113202, 50.434271938, 3.3871327179), (67.187563600, 78.757757664, 17.895169469, 1.0))
_SHOULDER = ((0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777), (0.12021132975, 0.73700164250, 1.0))
_TAIL = ((0.017337203997, 0.42868294337, 3.0812263860, 6.6579051150), (0.012258202635, 0.24197894225, 1.0))


def normal_quantile(probability: Numeric) -> Array:
    """Compute the quantile (inverse distribution function) of the standard normal distribution, to seven digits.

    Parameters
    ----------
    probability : Numeric
        Probability, 0 to 1.

    Returns
    -------
    ndarray
        Quantile, of the shape of `probability`.

    References
    ----------
    Wichura, Algorithm AS 241, Applied Statistics 37, 1988.

    Examples
    --------
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


def expected_normal_maximum(ranks: Numeric) -> Array:
    """Compute the expected maximum of n standard normal numbers: Φ⁻¹((n − 0.375) / (n + 0.25)).

    The slowest of n ranks is that many standard deviations slower than the mean. The approximation is within 1 % for 8
    ranks or more, and within 5 % below.

    Parameters
    ----------
    ranks : Numeric
        Number of ranks, 1 or more.

    Returns
    -------
    ndarray
        Expected maximum in standard deviations, of the shape of `ranks`; 0 for one rank.

    References
    ----------
    Blom, Statistical estimates and transformed beta-variables, 1958.

    Examples
    --------
    >>> expected_normal_maximum(np.array([1.0, 2.0, 8.0, 1000.0])).round(3)
    array([0.   , 0.589, 1.434, 3.227])
    """
    n = np.maximum(np.asarray(ranks, dtype=np.float64), 1.0)
    return np.where(n > 1.0, normal_quantile((n - 0.375) / (n + 0.25)), 0.0)


def straggler_wait_share(ranks: Numeric, independent: Numeric, persistent: Numeric = 0.0) -> Array:
    """Compute how long a step waits for its slowest rank, as a share of a rank's mean step.

    For equal ranks the share is e_n √(persistent² + independent²), with e_n from `expected_normal_maximum`. For noise
    above `_LOGNORMAL_NOISE_THRESHOLD` a lognormal distribution of the same mean and deviation replaces the normal one:
    exp(s e_n − s²/2) − 1 with s² = ln(1 + c²).

    Parameters
    ----------
    ranks : Numeric
        Ranks that wait for one another.
    independent : Numeric
        Standard deviation of noise that differs in every step, as a share of the mean.
    persistent : Numeric, optional
        Standard deviation of noise that stays with a rank, as a share of the mean.

    Returns
    -------
    ndarray
        Waiting time over a rank's mean step time [-]; all arguments broadcast.

    Examples
    --------
    >>> round(float(straggler_wait_share(8.0, 0.1)), 4)
    0.1434
    """
    noise = np.hypot(independent, persistent)
    largest = expected_normal_maximum(ranks)
    spread = np.sqrt(np.log1p(noise**2))
    heavy = np.expm1(spread * largest - spread**2 / 2.0)
    return np.where((noise > _LOGNORMAL_NOISE_THRESHOLD) & (np.asarray(ranks) > 1.0), heavy, noise * largest)


@dataclass(frozen=True, slots=True)
class StepTimeNoise:
    """Variation of step times between ranks, as standard deviations relative to the mean step time [-].

    ``independent`` noise differs in every step; ``persistent`` noise stays with a rank.
    """

    independent: Array
    persistent: float

    @classmethod
    def from_run(cls, run: Run, software: SoftwareProfile, local_batch: Numeric) -> StepTimeNoise:
        """Combine the noise of step times from the options of a run and from its software.

        Lengths of sequences vary by sample and average over the samples of a rank.

        Parameters
        ----------
        run : Run
            Options of the run.
        software : SoftwareProfile
            Software profile.
        local_batch : Numeric
            Samples of a rank.

        Returns
        -------
        StepTimeNoise
            Noise as shares of the mean step.
        """
        lengths = averaged_noise(run.variation.lengths, local_batch)
        return cls(np.sqrt(run.variation.jitter**2 + software.host.jitter**2 + lengths**2), run.variation.slow_ranks)

    @property
    def has_noise(self) -> bool:
        """True if step times vary between ranks at all."""
        return bool(self.persistent or self.independent.any())


def describe_unmodelled_straggler_wait(run: Run, software: SoftwareProfile, ranks: float, working: float) -> str:
    """Describe the waits for stragglers that a prediction without noise leaves out, as a sentence for reports.

    Parameters
    ----------
    run : Run
        Options of the run, which may set noise.
    software : SoftwareProfile
        Software profile, which may set noise.
    ranks : float
        Ranks that wait for one another.
    working : float
        Share of the step that is computation.

    Returns
    -------
    str
        A sentence with the wait of ranks as unequal as those of traced jobs; empty if noise is set, or for a single
        rank.
    """
    synchronous = not run.forward_only and ranks > 1 and run.exchange.consistency == "bsp"
    if not synchronous or StepTimeNoise.from_run(run, software, 1.0).has_noise:
        return ""
    from paleo.specs.run import TRACED_STEP_TIME_JITTER

    share = float(straggler_wait_share(ranks, *TRACED_STEP_TIME_JITTER)) * working
    return f"stragglers: as unequal as in traced jobs (--jitter traces) ranks wait {share:.1%} of the step"


def averaged_noise(noise: Numeric, draws: Numeric) -> Array:
    """Compute the noise of the mean time of n passes with independent noise, c / √n.

    Parameters
    ----------
    noise : Numeric
        Standard deviation of one pass, as a share of its mean.
    draws : Numeric
        Number of passes n, such as microbatches or local steps.

    Returns
    -------
    ndarray
        Standard deviation of the mean, as a share.
    """
    return np.asarray(noise / np.sqrt(draws))


def expected_slowest_rank_time(means: Sequence[float], independent: float) -> float:
    """Compute the expected time of a synchronous step whose ranks differ in their mean step times.

    Ranks are ordered by their means. For every k the slowest k ranks, with noise around their common mean, give a lower
    bound of the expected maximum. The result is the largest of these bounds.

    Parameters
    ----------
    means : sequence of float
        Mean step time of each rank [s].
    independent : float
        Standard deviation of noise that differs in every step, as a share of the mean.

    Returns
    -------
    float
        Time [s].

    Examples
    --------
    >>> round(expected_slowest_rank_time([1.0] * 7 + [1.5], 0.02), 3)  # one slow rank decides
    1.5
    """
    ordered = np.sort(np.asarray(means, dtype=np.float64))[::-1]
    counts = np.arange(1.0, len(ordered) + 1.0)
    bounds = (np.cumsum(ordered) / counts) * (1.0 + straggler_wait_share(counts, independent))
    return float(bounds.max())


@dataclass(frozen=True, slots=True)
class InputPipeline:
    """Times in which the input pipeline reads (``storage``), decodes and copies the training data of a step [s].

    The three stages run at the same time, ahead of the step.
    """

    storage: Numeric
    decode: Numeric
    copy: Numeric

    @property
    def batch_interval(self) -> Array:
        """Time between two batches in steady state, the time of the slowest stage of the input pipeline [s]."""
        return np.maximum(np.maximum(self.storage, self.decode), self.copy)

    @property
    def slowest_stage(self) -> str:
        """Name of the slowest stage of the input pipeline."""
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
    """Compute the times to read and decode a batch and to copy the batch to the devices.

    A node reads and decodes the samples of all its replicas (of one, if a replica is larger than a node). Each rank
    copies the batch of its replica over a separate link.

    Parameters
    ----------
    stages : InputOptions
        Bytes and decoding time of a sample in the input pipeline.
    system : System
        Machine: its devices, nodes and links.
    sample_bytes : float
        Bytes of a sample in the format of the copy.
    gpus : int
        Number of devices of the run.
    replica : Numeric
        Ranks of one model replica.
    local_batch : Numeric
        Number of samples of one replica.
    link : float, optional
        Rate of the link to the host [byte/s]; by default the usual share of the slot.

    Returns
    -------
    InputPipeline
        Times of the three stages per step [s].

    Raises
    ------
    SpecError
        If the system's host lacks a property that is needed.
    """
    devices = min(gpus, system.devices_per_node)
    samples = np.asarray(local_batch) * np.maximum(devices / np.asarray(replica), 1.0)
    storage, decode = 0.0 * samples, 0.0 * samples
    if stages.sample is not None:
        rate = stages.storage or required_host_property(system, "storage_bandwidth", ", or input.storage")
        storage = samples * stages.sample / rate
    if stages.decode > 0:
        cores = stages.cores or required_host_property(system, "cores", ", or input.cores") / system.devices_per_node
        decode = samples * stages.decode / (cores * devices)
    copied = sample_bytes if stages.copied is None else stages.copied
    return InputPipeline(storage, decode, np.asarray(local_batch) * copied / (link or host_link_rate(system)))


#: Stored bytes of a photograph (ImageNet-1k: 140 GB in 1.28 million JPEG files), and the least side in pixels of a
#: three-channel image that counts as a photograph.
_PHOTOGRAPH_BYTES, _MIN_PHOTOGRAPH_SIDE = 110_000.0, 128


def default_input_options(run: Run, graph: Graph, system: System, decode: float, gpus: int) -> InputOptions | None:
    """Return the default input pipeline of networks on photographs, which the host's cores decode.

    Storage counts if the system file gives its bandwidth. The run has all cores of its nodes, even if it does not use
    all of their devices.

    Parameters
    ----------
    run : Run
        Options of the run.
    graph : Graph
        Network as a graph of layers.
    system : System
        Machine: its devices, nodes and links.
    decode : float
        Seconds of one core to decode a photograph.
    gpus : int
        Number of devices of the run.

    Returns
    -------
    InputOptions, optional
        Input options; None if the network takes no photographs, the host's cores are unknown, or `decode` is 0.
    """
    host = system.host
    if not decode or host is None or host.cores is None or not any(map(_photograph, graph.inputs.values())):
        return None
    cores = host.cores / min(gpus, system.devices_per_node)
    stored = _PHOTOGRAPH_BYTES if host.storage_bandwidth else None
    return run.photo_input_options(sample=stored, decode=decode, cores=cores)


def _photograph(tensor: Tensor) -> bool:
    pixels = tensor.dims[1:] == ("channels", "height", "width") and tensor.sizes[1] == 3
    return pixels and min(tensor.sizes[2:]) >= _MIN_PHOTOGRAPH_SIDE


#: Bytes of an input's numbers as loaders provide them: int64 for indices, fp32 otherwise.
_WIDTH = {"index": 8.0}


def input_sample_bytes(graph: Graph) -> float:
    """Return the bytes of one input sample as copied to the device.

    Parameters
    ----------
    graph : Graph
        Network as a graph of layers.

    Returns
    -------
    float
        Size [byte].
    """
    return sum(float(tensor.elements) * _WIDTH.get(tensor.role, 4.0) for tensor in graph.inputs.values()) / graph.batch
