"""Parameter, FLOP, byte and activation counts of every layer of a network, without any hardware."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paleo.layers.base import LayerImplementations
from paleo.lowering.kernel_launches import SavedTensorCounter
from paleo.network.graph import Graph, Node, apply_graph_transforms, build_graph
from paleo.operations.base import Kernel, model_flops
from paleo.operations.tensor import Precision, default_precision
from paleo.parallel.plan import resolve_dtype
from paleo.pricing.kernels import kernel_predictor
from paleo.specs.software import load_software

if TYPE_CHECKING:
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.system import System


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Parameters, FLOP, bytes and saved activations of one iteration of a layer, which runs ``repeat`` times.

    A tied weight is counted with its first layer. ``model_flops_*`` are the FLOP that MFU counts; ``flops_*`` also
    count the attention scores behind the causal mask.
    """

    name: str
    type: str
    dims: tuple[str, ...]
    output_shape: tuple[float, ...]
    parameters: float
    flops_forward: float
    flops_backward: float
    model_flops_forward: float
    model_flops_backward: float
    bytes_forward: float
    bytes_backward: float
    saved_bytes: float
    repeat: int
    kernels: tuple[Kernel, ...]

    @property
    def arithmetic_intensity(self) -> float:
        """Arithmetic intensity of the forward pass [FLOP/byte]."""
        return self.flops_forward / self.bytes_forward if self.bytes_forward else 0.0


@dataclass(frozen=True, slots=True)
class NetworkSummary:
    """Parameters, FLOP and activation counts of each layer of a network for one batch, independent of hardware."""

    graph: Graph
    dtype: str
    layers: tuple[LayerCounts, ...]

    def total(self, field: str) -> float:
        """Sum one count, such as the forward FLOP, over all layers and their repetitions.

        Parameters
        ----------
        field : str
            Field of `LayerCounts`, such as ``flops_forward``.

        Returns
        -------
        float
            Sum in the unit of the field (FLOP, byte or a count).
        """
        return float(sum(getattr(layer, field) * layer.repeat for layer in self.layers))

    @property
    def model_flops(self) -> tuple[float, float] | None:
        """FLOP of all layers that MFU counts, as (forward, backward); None if the layers' full FLOP count is equal."""
        forward, backward = self.total("model_flops_forward"), self.total("model_flops_backward")
        counted = self.total("flops_forward") + self.total("flops_backward")
        return None if math.isclose(forward + backward, counted) else (forward, backward)


def summarise_network(model: ModelSpec, run: Run, system: System | None = None) -> NetworkSummary:
    """Count parameters, FLOP, bytes and saved activations of every layer.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    run : Run
        The run; its batch is 1 by default.
    system : System, optional
        System whose training format is used; by default fp32.

    Returns
    -------
    NetworkSummary
        Counts of the layers.
    """
    dtype = run.dtype or "fp32" if system is None else resolve_dtype(system.device, run.dtype)
    formats = default_precision(dtype)
    choices = LayerImplementations(run.kernels.attention or load_software(run.software).attention.implementation)
    graph = apply_graph_transforms(build_graph(model, batch=run.batch or 1, choices=choices, overrides=run.model), run)
    storage, known = SavedTensorCounter(graph), set[str]()
    return NetworkSummary(graph, dtype, tuple(_counted(node, formats, storage, known) for node in graph.nodes))


def _counted(node: Node, formats: Precision, storage: SavedTensorCounter, known: set[str]) -> LayerCounts:
    """Return parameters, FLOP, bytes and saved activations of one layer.

    ``storage`` and ``known`` hold the saved tensors and weights that earlier layers have counted; both are updated.
    """
    new = [tensor for name, tensor in node.parameters.items() if name not in known]
    known |= set(node.parameters)
    forward = tuple(kernel for operation in node.operations for kernel in operation.forward_kernels(formats))
    backward = tuple(kernel for operation in node.operations for kernel in operation.backward_kernels(formats))
    model_counts = [model_flops(operation, formats) for operation in node.operations]
    iterations = max(node.repeat, 1)
    kept = [tensor for operation in node.operations for tensor in operation.saved_tensors if tensor.role != "parameter"]
    return LayerCounts(
        node.name,
        node.type,
        node.out.dims,
        node.out.sizes,
        parameters=float(sum(tensor.elements for tensor in new)),
        flops_forward=sum(kernel.flops for kernel in forward),
        flops_backward=sum(kernel.flops for kernel in backward),
        model_flops_forward=sum(flops for flops, _ in model_counts),
        model_flops_backward=sum(flops for _, flops in model_counts),
        bytes_forward=sum(kernel.bytes for kernel in forward),
        bytes_backward=sum(kernel.bytes for kernel in backward),
        saved_bytes=sum(tensor.bytes(formats) * storage.count_new_copies(tensor, node) for tensor in kept) / iterations,
        repeat=node.repeat,
        kernels=forward,
    )


@dataclass(frozen=True, slots=True)
class LayerSpeed:
    """Speed of a layer's forward kernels: arithmetic intensity [FLOP/byte], FLOP/s, and share of the network's FLOP."""

    type: str
    arithmetic_intensity: float
    flops_per_s: float
    flops_share: float


def layer_speeds(summary: NetworkSummary, system: System, run: Run) -> list[LayerSpeed]:
    """Return the points of a roofline plot: arithmetic intensity and FLOP/s of each layer's forward kernels.

    Parameters
    ----------
    summary : NetworkSummary
        Counts of the layers.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.

    Returns
    -------
    list of LayerSpeed
        One entry for each layer that computes.
    """
    total, seconds = summary.total("flops_forward"), layer_forward_times(summary, system, run)
    speeds = []
    for layer, time in zip(summary.layers, seconds, strict=True):
        if layer.flops_forward > 0 and time > 0:
            share = layer.flops_forward * layer.repeat / total
            speeds.append(LayerSpeed(layer.type, layer.arithmetic_intensity, layer.flops_forward / time, share))
    return speeds


#: Why kernels of a layer may be faster than the roof of the FLOP that are counted.
_FEWER_FLOPS = {
    "conv": "Winograd and FFT kernels multiply less often than is counted",
    "attention": "fused kernels skip products behind the causal mask, which are counted",
}


def faster_than_roofline(points: Sequence[LayerSpeed], system: System, dtype: str) -> list[str]:
    """Explain which layers are faster than peak and memory bandwidth allow for their counted FLOP.

    Parameters
    ----------
    points : sequence of LayerSpeed
        Speeds of the layers.
    system : System
        Machine: its devices, nodes and links.
    dtype : str
        Format of the operands.

    Returns
    -------
    list of str
        One sentence for each type of layer.
    """
    peak, bandwidth = system.device.peak_flops_per_s(dtype), system.device.memory.bandwidth
    higher = [point.type for point in points if point.flops_per_s > min(peak, point.arithmetic_intensity * bandwidth)]
    reasons = {name: _FEWER_FLOPS.get(name, "kernels do less than is counted") for name in higher}
    return [f"{name} above the roof: {reason}" for name, reason in reasons.items()]


def layer_forward_times(summary: NetworkSummary, system: System, run: Run) -> list[float]:
    """Predict the forward time of one iteration of each layer on a device, as the sum of the times of its kernels.

    Parameters
    ----------
    summary : NetworkSummary
        Counts of the layers.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.

    Returns
    -------
    list of float
        Seconds, in the order of the layers.
    """
    prices = kernel_predictor(system.device, summary.dtype, run.calibration, load_software(run.software))
    kernels = [kernel for layer in summary.layers for kernel in layer.kernels]
    seconds = iter(prices.times(kernels).host_synchronous_times.tolist() if kernels else [])
    return [sum(next(seconds) for _ in layer.kernels) for layer in summary.layers]
