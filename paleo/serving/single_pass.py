"""Inference of networks without token-by-token decoding: encoders, image networks, diffusion, recommendation.

Nothing is cached between requests, so a device computes batches of requests, one after the other. The forward pass is
predicted as an inference compiler runs it (TensorRT). Convolutions and GEMMs are in the format of the weights.
Activation functions, folded norms and sums run in the epilogue of the kernel before, so that only the bytes of second
operands remain. Tensors between kernels have 8 bits in int8, where epilogues convert them, and otherwise 16. Tensors
that one kernel writes and the next reads stay in the L2 cache where they fit. Attention stays in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.operations.tensor import BYTES_PER_NUMBER
from paleo.parallel.plan import plan
from paleo.pricing.families import inference_convolution_times, inter_kernel_traffic_time
from paleo.serving.formats import WEIGHT_ELEMENT_BYTES
from paleo.serving.forward_lowering import Sharding, is_autoregressive
from paleo.serving.iteration_times import EngineKernels, iteration_tables
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import load_software
from paleo.step.backend import build_backend
from paleo.units import MEGA, format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paleo.operations.base import Kernel
    from paleo.pricing.kernels import KernelFamilyPredictor
    from paleo.serving.formats import Formats
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System

Array = npt.NDArray[np.float64]
#: Most tokens of a pass of an encoder.
_MAX_ENCODER_TOKENS = 2.0**14
#: Batches that are tried.
_BATCH_SIZES = tuple(2**power for power in range(12))
#: Bytes of the place of a maximum, which a pool in training writes beside each result (torch's int64).
_POOL_INDEX_BYTES = 8.0
#: Width of numbers between kernels in int8 over that in sixteen bits.
_INT8_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class ForwardPasses:
    """Forward passes of one network that are needed to answer one request.

    Attributes
    ----------
    model : str
        Name of the network.
    count : int
        Number of consecutive passes, such as the denoising steps of a diffusion network.
    samples : int
        Samples of a request in each pass: 2 with classifier-free guidance (Ho and Salimans, arXiv:2207.12598), or the
        user-item pairs that a recommendation ranks.
    stays_in_sixteen_bits : bool
        True if this network stays in 16 bits when the other networks of the request are quantised.
    """

    model: str
    count: int = 1
    samples: int = 1
    stays_in_sixteen_bits: bool = False


#: Mean pairs of a user and an item in a sample of MLPerf Inference's recommendation, which has 100 to 700: the
#: 89,137,319 of the second half of the data's last day make 330,067 samples (recommendation/dlrm_v2/pytorch of its
#: reference code).
_USER_ITEM_PAIRS_PER_SAMPLE = 270
#: Passes of a request where these are not one pass of the network. 20 steps: MLPerf Inference's, text-to-image.
_FORWARD_PASSES_BY_MODEL = {
    name: (ForwardPasses(name, samples=_USER_ITEM_PAIRS_PER_SAMPLE),) for name in ("dlrm", "dlrm-sharded", "dlrm-dcnv2")
} | {
    "stable-diffusion-xl": (
        ForwardPasses("stable-diffusion-xl", count=20, samples=2),
        ForwardPasses("sdxl-vae-decoder", stays_in_sixteen_bits=True),
    )
}


def forward_passes(model: ModelSpec) -> tuple[ForwardPasses, ...]:
    """Return the forward passes that are needed to answer one request to a network.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.

    Returns
    -------
    tuple of ForwardPasses
        Passes in the order in which they run.
    """
    return _FORWARD_PASSES_BY_MODEL.get(model.name, (ForwardPasses(model.name),))


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Batch of requests that one device computes together, with its time.

    Attributes
    ----------
    requests : float
        Number of requests; a mean if they differ in length.
    batch_time : float
        Time of the batch [s].
    """

    requests: float
    batch_time: float

    @property
    def requests_per_s(self) -> float:
        """Throughput of one device [requests/s]."""
        return self.requests / self.batch_time


def fitting_batches(
    model: ModelSpec, system: System, formats: Formats, fused: str = "", length: float = 0.0, between: float = 1.0
) -> tuple[RequestBatch, ...]:
    """List the batch sizes that fit in a device's memory, with the time of each.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    formats : Formats
        Number formats of the weights.
    fused : str
        Prefix of the names of layers that run as one fused kernel, without memory traffic between them; empty for none.
    length : float
        Mean tokens of a request to an encoder; 0 for networks without tokens.
    between : float
        Bytes per element between the kernels of an encoder. For other networks, 2 means that GEMMs are in 16 bits and
        only embedding tables have the format of the weights.

    Returns
    -------
    tuple of RequestBatch
        Batches with their times, the smallest first.

    Raises
    ------
    SpecError
        If a batch of one does not fit.
    """
    if length:
        # Batches of an encoder, whose samples lie one behind the other without padding.
        kernels = EngineKernels(encoder_element_bytes=between)
        prices = iteration_tables(model, system, Sharding(), formats, kernels)
        samples = np.maximum(_MAX_ENCODER_TOKENS / length / 2.0 ** np.arange(5)[::-1], 1.0)
        seconds = prices.non_attention_time(samples * length) + prices.prefill_attention_time(samples, length)
        return tuple(RequestBatch(*pair) for pair in zip(samples.tolist(), seconds.tolist(), strict=True))
    parts = forward_passes(model)
    sizes = [batch for batch in _BATCH_SIZES if batch <= largest_batch(parts, system, formats)]
    times = [request_batch_time(parts, system, formats, batch, fused, between) for batch in sizes]
    return tuple(RequestBatch(*pair) for pair in zip(sizes, times, strict=True))


def best_batch(tried: Sequence[RequestBatch], limit: float | None = None) -> RequestBatch | None:
    """Return the batch with the highest throughput within a latency limit.

    Parameters
    ----------
    tried : sequence of RequestBatch
        Batches with their times.
    limit : float, optional
        Longest time from a request to its answer [s]. A request waits for the batch before it, so two batches must take
        no longer. None if all requests arrive at once.

    Returns
    -------
    RequestBatch, optional
        Best batch; None if no batch meets the limit.
    """
    kept = [each for each in tried if limit is None or 2.0 * each.batch_time <= limit]
    return max(kept, key=lambda each: each.requests_per_s, default=None)


def largest_batch(parts: tuple[ForwardPasses, ...], system: System, formats: Formats) -> int:
    """Return the largest batch of requests that fits in the memory of a device, beside the weights.

    The memory of a batch is that of the kernel with the most bytes.

    Parameters
    ----------
    parts : tuple of ForwardPasses
        Forward passes of a request.
    system : System
        Machine: its devices, nodes and links.
    formats : Formats
        Number formats of the weights.

    Returns
    -------
    int
        Number of requests of the batch.

    Raises
    ------
    SpecError
        If a batch of one does not fit.
    """
    fits = []
    for part in parts:
        kernels, backend, weights = _lowered(part.model, system, 1)
        doubled, _, _ = _lowered(part.model, system, 2)
        added = [large.bytes - small.bytes for (_, small), (_, large) in zip(kernels, doubled, strict=True)]
        widest = max(added, default=0.0) * part.samples
        left = backend.device.memory.usable_bytes - weights * formats.weight_bytes
        fits.append(left / widest if widest else np.inf)
    if min(fits) < 1.0:
        raise SpecError(f"{parts[0].model} does not fit into the memory of {system.device.name}")
    return int(min(min(fits), _BATCH_SIZES[-1]))


def request_batch_time(
    parts: tuple[ForwardPasses, ...],
    system: System,
    formats: Formats,
    batch: int,
    fused: str = "",
    between: float = 1.0,
) -> float:
    """Return the time in which one device answers a batch of requests.

    Parameters
    ----------
    parts : tuple of ForwardPasses
        Forward passes of a request.
    system : System
        Machine: its devices, nodes and links.
    formats : Formats
        Number formats of the weights.
    batch : int
        Number of requests that are computed together.
    fused : str
        Prefix of the names of layers that run as one fused kernel.
    between : float
        Bytes per element between kernels; 2 means GEMMs in 16 bits.

    Returns
    -------
    float
        Time [s].
    """
    seconds = 0.0
    for part in parts:
        tables = "bf16" if part.stays_in_sixteen_bits else formats.weight_format
        weights = "bf16" if between == BYTES_PER_NUMBER["bf16"] else tables
        seconds += part.count * forward_pass_time(part.model, system, weights, batch * part.samples, fused, tables)
    return seconds


@cache
def forward_pass_time(
    model: str, system: System, weights: str, samples: int, fused: str = "", tables: str = "bf16"
) -> float:
    """Predict the time of one forward pass on a device under an inference compiler (TensorRT).

    Parameters
    ----------
    model : str
        Name of the network.
    system : System
        Machine: its devices, nodes and links.
    weights : str
        Number format of weights, and of tensors between kernels.
    samples : int
        Number of samples of the pass.
    fused : str
        Prefix of the names of layers that run as one fused kernel.
    tables : str
        Number format of embedding tables.

    Returns
    -------
    float
        Time [s].
    """
    kernels, wide, _ = _lowered(model, system, samples)
    names = (weights, *(("fp8", "int8") if BYTES_PER_NUMBER[weights] == 1.0 else ()))
    name = next((name for name in names if name in wide.device.peak), wide.dtype)
    narrow, share = replace(wide, dtype=name), _INT8_SHARE if weights == "int8" else 1.0
    operand = BYTES_PER_NUMBER[name] / BYTES_PER_NUMBER["bf16"]
    repeats = np.array([repeat for repeat, _ in kernels])
    seconds = np.zeros(len(kernels))
    places: dict[str, list[int]] = {"conv": [], "sum": [], "narrow": [], "wide": []}
    every = [kernel for _, kernel in kernels]
    for place, (before, kernel) in enumerate(zip([None, *every], every, strict=False)):
        places[_kind(kernel, before, narrow=name != wide.dtype)].append(place)
    chosen = [every[place] for place in places["conv"]]
    if chosen:
        moved = operand * np.array([kernel.bytes_read for kernel in chosen])
        written = share * np.array([kernel.bytes_written for kernel in chosen])
        inside = [place for place, kernel in enumerate(chosen) if fused and kernel.name.startswith(fused)]
        moved[inside[1:]], written[inside[:-1]] = 0.0, 0.0
        moved = moved + written
        seconds[places["conv"]] = inference_convolution_times(narrow, chosen, moved)
    operands = share * np.array([_operands(every[place], fused) for place in places["sum"]])
    seconds[places["sum"]], _ = inter_kernel_traffic_time(narrow, operands)
    products = [replace(every[place], operation="narrow") for place in places["narrow"]]
    rows = WEIGHT_ELEMENT_BYTES[tables] / BYTES_PER_NUMBER["bf16"]
    passes = [_narrowed(every[place], share, rows) for place in places["wide"]]
    seconds[places["narrow"]] = narrow.device_times(products).seconds
    seconds[places["wide"]] = wide.device_times(passes).seconds
    return float(repeats @ seconds)


def _kind(kernel: Kernel, before: Kernel | None, *, narrow: bool) -> str:
    """Classify a kernel by the formula of its time: ``conv``, ``sum``, ``narrow`` or ``wide``.

    Class ``conv`` is a convolution. ``sum`` is a pooling or a pass that is fused with the kernel before, and moves only
    a second operand. ``narrow`` is a GEMM in the format of the weights. ``wide`` is any other kernel, in 16 bits; gates
    (as in GLU) are ``wide``, since no epilogue reads both halves of the GEMM before.
    """
    if kernel.family == "conv":
        return "conv"
    if kernel.operation == "pool":
        return "sum"
    if kernel.family == "memory" and kernel.operation == "elementwise":
        gates = before is not None and before.family == "gemm" and before.bytes_written > kernel.bytes_written
        return "wide" if gates else "sum"
    return "narrow" if narrow and kernel.family == "gemm" and kernel.operation == "gemm" else "wide"


def _operands(kernel: Kernel, fused: str) -> float:
    """Return the bytes, in 16-bit numbers, that an element-wise or pooling pass still moves after fusion.

    Pooling moves all but the positions of maxima, which only training keeps. A sum moves the operand that is not in the
    registers of the kernel before.
    """
    if kernel.operation == "pool":
        places = _POOL_INDEX_BYTES if "max" in kernel.name else 0.0
        return kernel.bytes_read + kernel.bytes_written * BYTES_PER_NUMBER["bf16"] / (BYTES_PER_NUMBER["bf16"] + places)
    return 0.0 if fused and kernel.name.startswith(fused) else max(kernel.bytes_read - kernel.bytes_written, 0.0) / 2.0


def _narrowed(kernel: Kernel, share: float, tables: float) -> Kernel:
    """Return a memory pass with its bytes scaled to another number format; other kernels unchanged.

    ``share`` is the factor for activations, ``tables`` that for rows of embedding tables [-].
    """
    if kernel.family != "memory":
        return kernel
    read = kernel.bytes_read * (tables if kernel.operation == "gather" else share)
    return replace(kernel, bytes_read=read, bytes_written=kernel.bytes_written * share)


@cache
def _lowered(model: str, system: System, samples: int) -> tuple[list[tuple[int, Kernel]], KernelFamilyPredictor, float]:
    """Lower a network to its 16-bit forward pass.

    Returns the kernels with their repetitions, the predictor of their times, and the number of parameters.
    """
    network, software = load_model(model), load_software("cuda-graph").with_fields({"fusion.passes": True})
    dtype = "bf16" if "bf16" in system.device.peak else "fp16"
    run = Run(gpus=1, strategy="dp", batch=samples, forward_only=True, dtype=dtype)
    layout = plan(network, system, run)
    backend = build_backend(system, run, layout.dtype, software)
    graph = backend.graph(network, samples)
    program = backend.lower(graph, backend.placement(graph, layout.strategy), layout.mesh)
    kernels = [(section.repeat, counted.kernel) for section in program.sections for counted in section.kernels]
    return kernels, backend.predictor, float(program.parameter_count)  # type: ignore[return-value]


def format_three_digits(number: float) -> str:
    """Format a number with three significant digits.

    Parameters
    ----------
    number : float
        Any number.

    Returns
    -------
    str
        Text with thousands separators, such as ``569,000``.

    Examples
    --------
    >>> format_three_digits(568912.0), format_three_digits(2.3456)
    ('569,000', '2.35')
    """
    return f"{float(f'{number:.3g}'):,.10g}"


def is_single_pass(model: ModelSpec, system: System) -> bool:
    """Return True if a network answers requests with forward passes only, without token-by-token decoding.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.

    Returns
    -------
    bool
        True for encoders, image networks, diffusion and recommendation.
    """
    return "seq" not in model.params or not is_autoregressive(model, system)


@dataclass(frozen=True)
class BatchedService:
    """Predicted service of a network that answers with forward passes only (no decoding), on a number of devices.

    Attributes
    ----------
    model, system, gpus
        Network, machine, and total number of devices; each device holds the whole network.
    formats : Formats
        Number formats of the weights.
    request_batches : tuple of RequestBatch
        Batches that fit in memory, with their times.
    limit : float or None
        Longest time from a request to its answer [s].
    length : float
        Mean tokens of a request to an encoder; 0 for networks without tokens.
    usd_per_s : float or None
        Rent of all devices [USD/s].
    """

    model: ModelSpec
    system: System
    gpus: int
    formats: Formats
    request_batches: tuple[RequestBatch, ...]
    limit: float | None = None
    length: float = 0.0
    usd_per_s: float | None = None

    @property
    def best(self) -> RequestBatch | None:
        """Batch of the highest throughput within the latency limit; None if no batch meets it."""
        return best_batch(self.request_batches, self.limit)

    @property
    def requests_per_s(self) -> float | None:
        """Throughput of all devices [requests/s]; None if no batch meets the latency limit."""
        return None if self.best is None else self.gpus * self.best.requests_per_s

    @property
    def usd_per_million(self) -> float | None:
        """Rent per million requests [USD]; None without a rent or if no batch meets the limit."""
        if self.requests_per_s is None or self.usd_per_s is None:
            return None
        return self.usd_per_s / self.requests_per_s * MEGA

    @property
    def verdict(self) -> str:
        """Answer in one or two sentences: batch, throughput and cost, or why the limit cannot be met."""
        title, price = self.model.title or self.model.name, self.usd_per_million
        if self.best is None:
            least = f"a batch of one takes {format_duration(self.request_batches[0].batch_time)}"
            return f"No batch of {title} keeps the limit: {least}, and a request waits for the batch that runs."
        cost = "" if price is None else f": {format_three_digits(price)} USD a million requests"
        rate = format_three_digits(self.gpus * self.best.requests_per_s)
        rate = f"{self.gpus} x {self.system.device.name} answer {rate} requests/s of {title}"
        batch = f"Batches of {self.best.requests:,.0f} on each device take {format_duration(self.best.batch_time)}."
        return f"{rate} in {self.formats.weight_format}{cost}. {batch}"


def batched_service(
    model: ModelSpec,
    system: System,
    gpus: int,
    formats: Formats,
    limit: float | None = None,
    length: float = 0.0,
    usd_per_s: float | None = None,
) -> BatchedService:
    """Predict the service of a network without token-by-token decoding, such as a vision network.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    gpus : int
        Number of devices; each holds the whole network.
    formats : Formats
        Number formats of the weights.
    limit : float, optional
        Longest time from a request to its answer [s].
    length : float, optional
        Mean tokens of a request to an encoder; 0 takes the sequence length in the model file.
    usd_per_s : float, optional
        Rent of all devices [USD/s].

    Returns
    -------
    BatchedService
        Batches that fit, with throughput and cost.
    """
    tokens = length or float(model.params.get("seq", 0.0))
    batches = fitting_batches(model, system, formats, length=tokens)
    return BatchedService(model, system, gpus, formats, batches, limit, tokens, usd_per_s)
