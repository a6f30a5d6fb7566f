"""Networks that answer a request with forward passes only: encoders, image networks, diffusion.

Nothing is cached between requests, so a device computes batches of requests one after the other. The forward pass is
priced as an inference compiler runs it (TensorRT). Convolutions and products are in the format of the weights.
Activations, folded norms and sums run in the epilogue of the kernel before, so only the bytes of a second operand
remain of them. Numbers between kernels have eight bits in int8, where epilogues convert them, and sixteen bits
otherwise. Data that one kernel writes and the next one reads stays in the L2 cache if it fits. Attention stays in
sixteen bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.operations.tensor import BYTES
from paleo.parallel.plan import plan
from paleo.pricing.families import single_pass_convolutions, streamed_between_kernels
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import load_software
from paleo.step.backend import backend_of

if TYPE_CHECKING:
    from paleo.operations.base import Kernel
    from paleo.pricing.kernels import Calibrated, FamilyPrices
    from paleo.serving.formats import Formats
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System

Array = npt.NDArray[np.float64]
#: Batch sizes that are tried.
BATCHES = tuple(2**power for power in range(12))
#: Ratio of the widths of numbers between kernels in int8 and in sixteen bits.
_INT8_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Passes:
    """Forward passes of one network that a request takes.

    Attributes
    ----------
    model : str
        Name of the network.
    count : int
        Passes after one another: steps of a diffusion.
    samples : int
        Samples that a request has in each pass: 2 with classifier-free guidance (Ho and Salimans, arXiv:2207.12598).
    wide : bool
        Whether the pass stays in sixteen bits whatever the weights of the others have.
    """

    model: str
    count: int = 1
    samples: int = 1
    wide: bool = False


#: Passes of a request where these are not one pass of the network. 20 steps: MLPerf Inference's, text-to-image.
REQUESTS = {"stable-diffusion-xl": (Passes("stable-diffusion-xl", count=20, samples=2), Passes("sdxl-vae-decoder"))}


def passes_of(model: ModelSpec) -> tuple[Passes, ...]:
    """Return the forward passes that a request to a network takes.

    Parameters
    ----------
    model : ModelSpec
        The network.
    """
    return REQUESTS.get(model.name, (Passes(model.name),))


@dataclass(frozen=True, slots=True)
class Batching:
    """The batch of requests at which a device answers most.

    Attributes
    ----------
    batch : int
        Requests that are computed together.
    seconds : float
        Time of the batch [s].
    """

    batch: int
    seconds: float

    @property
    def rate(self) -> float:
        """Requests a second of one device."""
        return self.batch / self.seconds


def best_batching(
    model: ModelSpec, system: System, formats: Formats, limit: float | None = None, fused: str = ""
) -> Batching:
    """Return the batch at which a device answers most requests a second.

    Parameters
    ----------
    model : ModelSpec
        The network.
    system : System
        The machine.
    formats : Formats
        Formats of the weights.
    limit : float, optional
        Longest time from a request to its answer [s]: it waits for the batch before its own, so that two batches must
        fit. None for requests that are all there at once.
    fused : str
        Beginning of the names of layers that run as one kernel, without memory between them; empty for none.

    Raises
    ------
    SpecError
        If no batch keeps the limit.
    """
    parts = passes_of(model)
    most = largest_batch(parts, system)
    tried = [
        Batching(batch, request_seconds(parts, system, formats, batch, fused)) for batch in BATCHES if batch <= most
    ]
    kept = [each for each in tried if limit is None or 2.0 * each.seconds <= limit]
    if not kept:
        raise SpecError(f"{model.name}: a batch of one takes {tried[0].seconds:.3g} s, twice that is above the limit")
    return max(kept, key=lambda each: each.rate)


def largest_batch(parts: tuple[Passes, ...], system: System) -> int:
    """Return the largest batch whose weights and widest layer fit into memory.

    Parameters
    ----------
    parts : tuple of Passes
        Passes of a request.
    system : System
        The machine.

    Raises
    ------
    SpecError
        If a batch of one does not fit.
    """
    fits = []
    for part in parts:
        kernels, backend, weights = _lowered(part.model, system, 1)
        widest = max((kernel.bytes for _, kernel in kernels), default=0.0) * part.samples
        left = backend.families.device.memory.usable - weights * BYTES["bf16"]
        fits.append(left / widest if widest else np.inf)
    if min(fits) < 1.0:
        raise SpecError(f"{parts[0].model} does not fit into the memory of {system.device.name}")
    return int(min(min(fits), BATCHES[-1]))


def request_seconds(parts: tuple[Passes, ...], system: System, formats: Formats, batch: int, fused: str = "") -> float:
    """Return the time in which a device answers a batch of requests.

    Parameters
    ----------
    parts : tuple of Passes
        Passes of a request.
    system : System
        The machine.
    formats : Formats
        Formats of the weights.
    batch : int
        Requests that are computed together.
    fused : str
        Beginning of the names of layers that run as one kernel.

    Returns
    -------
    float
        Seconds.
    """
    seconds = 0.0
    for part in parts:
        weights = "bf16" if part.wide else formats.weights
        seconds += part.count * pass_seconds(part.model, system, weights, batch * part.samples, fused)
    return seconds


@cache
def pass_seconds(model: str, system: System, weights: str, samples: int, fused: str = "") -> float:
    """Return the time of a forward pass under an inference compiler.

    Parameters
    ----------
    model : str
        Name of the network.
    system : System
        The machine.
    weights : str
        Format of weights, and of numbers between kernels.
    samples : int
        Samples of the pass.
    fused : str
        Beginning of the names of layers that run as one kernel.

    Returns
    -------
    float
        Seconds.
    """
    kernels, calibrated, _ = _lowered(model, system, samples)
    wide = calibrated.families
    name = _arithmetic(weights, wide)
    narrow, share = replace(wide, dtype=name), _INT8_SHARE if weights == "int8" else 1.0
    operand = BYTES[name] / BYTES["bf16"]
    repeats = np.array([repeat for repeat, _ in kernels])
    seconds = np.zeros(len(kernels))
    places: dict[str, list[int]] = {"conv": [], "sum": [], "narrow": [], "wide": []}
    every = [kernel for _, kernel in kernels]
    for place, (before, kernel) in enumerate(zip([None, *every], every, strict=False)):
        places[_kind(kernel, before, narrow=name != wide.dtype)].append(place)
    chosen = [every[place] for place in places["conv"]]
    if chosen:
        read, written = np.array([_outside(kernel, fused, chosen) for kernel in chosen]).T
        moved = operand * read + share * written
        seconds[places["conv"]] = single_pass_convolutions(narrow, chosen, moved)
    operands = share * np.array([_second_operand(every[place], fused) for place in places["sum"]])
    seconds[places["sum"]], _ = streamed_between_kernels(narrow, operands)
    products = [replace(every[place], operation="narrow") for place in places["narrow"]]
    passes = [_narrowed(every[place], share) for place in places["wide"]]
    seconds[places["narrow"]] = narrow.prices(products).seconds
    seconds[places["wide"]] = wide.prices(passes).seconds
    return float(repeats @ seconds)


def _arithmetic(weights: str, prices: FamilyPrices) -> str:
    """Return the format of the products: that of the weights, or another 8-bit format that the device supports."""
    names = (weights, *(("fp8", "int8") if BYTES[weights] == 1.0 else ()))
    return next((name for name in names if name in prices.device.peak), prices.dtype)


def _kind(kernel: Kernel, before: Kernel | None, *, narrow: bool) -> str:
    """Return how a kernel is priced.

    It is a convolution, a fused pass with or without a second operand, a product in the format of the weights, or a
    kernel in sixteen bits. A gate reads both halves of the product before it, which an epilogue cannot do.
    """
    if kernel.family == "conv":
        return "conv"
    if kernel.family == "memory" and kernel.operation == "elementwise":
        gates = before is not None and before.family == "gemm" and before.bytes_written > kernel.bytes_written
        return "wide" if gates else "sum"
    return "narrow" if narrow and kernel.family == "gemm" and kernel.operation == "gemm" else "wide"


def _outside(kernel: Kernel, fused: str, convolutions: list[Kernel]) -> tuple[float, float]:
    """Return the bytes that a convolution reads and writes outside the layers that run as one kernel, in 16-bit
    numbers."""
    together = [each for each in convolutions if fused and each.name.startswith(fused)]
    inside = kernel in together
    first, last = not inside or kernel is together[0], not inside or kernel is together[-1]
    return kernel.bytes_read * first, kernel.bytes_written * last


def _second_operand(kernel: Kernel, fused: str) -> float:
    """Return the bytes of a sum's operand that is not in registers of the kernel before it, in 16-bit numbers."""
    return 0.0 if fused and kernel.name.startswith(fused) else max(kernel.bytes_read - kernel.bytes_written, 0.0) / 2.0


def _narrowed(kernel: Kernel, share: float) -> Kernel:
    """Return a pass over numbers of another width; other kernels are unchanged."""
    if kernel.family != "memory":
        return kernel
    return replace(kernel, bytes_read=kernel.bytes_read * share, bytes_written=kernel.bytes_written * share)


@cache
def _lowered(model: str, system: System, samples: int) -> tuple[list[tuple[int, Kernel]], Calibrated, float]:
    """Return the kernels of a 16-bit forward pass with their repetitions, their prices, and the parameter count."""
    network, software = load_model(model), load_software("cuda-graph").changed({"fusion.passes": True})
    dtype = "bf16" if "bf16" in system.device.peak else "fp16"
    run = Run(gpus=1, strategy="dp", batch=samples, forward_only=True, dtype=dtype)
    layout = plan(network, system, run)
    backend = backend_of(system, run, layout.dtype, software)
    graph = backend.graph(network, samples)
    program = backend.lowered(graph, backend.placement(graph, layout.parallel), layout.mesh)
    kernels = [(section.repeat, counted.kernel) for section in program.sections for counted in section.kernels]
    return kernels, backend.prices, float(program.parameters)  # type: ignore[return-value]
