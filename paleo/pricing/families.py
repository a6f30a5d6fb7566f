"""The families of kernels: the calibration and the formula by which each is priced on a device.

A further family is a file in this folder that registers itself.

Kernels of a framework's training step are products under long load, experts in a loop, and attention:

    experts   = launches + products of ``CONCURRENT_EXPERTS`` experts at a time, each on its own multiprocessors
    attention = the formula of `paleo.pricing.attention`, its rates scaled from an engine's kernel to training's

Transformer Engine's GroupedLinear issues the products of a rank's experts one after the other on four streams
(transformer_engine/common/gemm/cublaslt_gemm.cu, ``num_streams``). A weight gradient that is accumulated reads and
writes the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.operations.tensor import BYTES, precision
from paleo.pricing import convolution, memory
from paleo.pricing.attention import PrefillParameters, attention_backward_time, attention_prefill_time, default_kernel
from paleo.pricing.gemm import GemmParameters, gemm_time, unaligned_rows_time, unaligned_time
from paleo.pricing.kernels import (
    FAMILIES,
    FLOP_RATIOS,
    Array,
    DeviceDatasheet,
    FamilyPredictor,
    column,
    pointwise_format,
)
from paleo.pricing.power import energy_per_flop, operand_energy, power_slowdown, switching_activity, throttled_share
from paleo.pricing.rnn import RnnDirection, RnnParameters, rnn_time
from paleo.specs.calibration import parameter

if TYPE_CHECKING:
    from paleo.operations.base import Kernel
    from paleo.pricing.store import SourcedParameters
    from paleo.specs.software import Software

#: Experts whose products run concurrently.
CONCURRENT_EXPERTS = 4.0


@dataclass(frozen=True, slots=True)
class TrainingParameters:
    """Calibrated parameters of one training kernel, scaled from an inference kernel, on one device."""

    launch: float = parameter("5 us", "0.1..300 us", "what a call takes beside its kernel; of experts: each of them")
    ramp: float = parameter("0.1 ms", "1 us..10 ms", "kernel time that feels half the power limit in a test run")
    forward: float = parameter("1", "0.4..2", "rate of attention's products over that of an engine's kernel")
    backward: float = parameter("0.7", "0.2..1.5", "rate of backward attention's products over forward's")


def experts_product_time(*, experts: npt.ArrayLike, launch: float, **product: Any) -> Array:
    """Compute the time of one GEMM for each expert of a rank, a few experts at a time.

    Parameters
    ----------
    experts : array-like
        Experts of the rank.
    launch : float
        Seconds that each expert adds.
    **product
        Arguments of `paleo.pricing.gemm.gemm_time`, but for ``batch``.

    Returns
    -------
    ndarray
        Seconds of all experts.
    """
    count = np.asarray(experts, dtype=np.float64)
    together = np.minimum(count, CONCURRENT_EXPERTS)
    return np.asarray(count / together * gemm_time(batch=together, **product) + count * launch)


def sustained_load_time(cold: Array, hot: Array, ramp: float) -> Array:
    """Interpolate a kernel's time between the clocks of a short test and of sustained load.

    Parameters
    ----------
    cold, hot : ndarray
        Times at the clock of a short run and of long load [s].
    ramp : float
        Kernel time at which half of the difference applies [s].

    Returns
    -------
    ndarray
        Time [s].

    Examples
    --------
    >>> float(sustained_load_time(np.array(1.0), np.array(3.0), ramp=1.0))
    2.0
    """
    return np.asarray(cold + (hot - cold) * throttled_share(cold, 0.0, ramp))


def training_attention_parameters(engine: PrefillParameters, training: TrainingParameters) -> PrefillParameters:
    """Convert the parameters of a serving engine's attention kernel to parameters of attention in training.

    Parameters
    ----------
    engine : PrefillParameters
        Calibration of the kernel as inference engines run it.
    training : TrainingParameters
        Calibration of training. Its ``launch`` is that of single calls, which other kernels hide in a step.

    Returns
    -------
    PrefillParameters
        Parameters of the kernel's time in training.
    """
    rate = engine.mma_efficiency * training.forward
    return replace(engine, mma_efficiency=rate, backward_efficiency=training.backward)


#: Functions that count how passes over rows keep a row in registers and read it again.
_ROW_PASSES = {"memory.softmax": memory.softmax_passes, "memory.layernorm": memory.layer_norm_passes}
#: cuDNN release before which the family conv.vector-cudnn5 describes convolutions, and architectures whose conv.vector
#: was itself measured with such a release.
OLD_LIBRARY, OLD_ARCHITECTURES = 6.0, frozenset({"Kepler", "Maxwell"})
_DIRECTIONS = {
    "fwd": convolution.Direction.FORWARD,
    "bwd_data": convolution.Direction.DATA,
    "bwd_filter": convolution.Direction.FILTER,
}
_RNN_DIRECTIONS = {"fwd": RnnDirection.FORWARD, "bwd_data": RnnDirection.DATA, "bwd_filter": RnnDirection.FILTER}


#: 1 for each operand of a linear layer's product that is contiguous along the summed dim: outputs from inputs and
#: weights, gradients of inputs from those of outputs, gradients of weights (row-major tensors, weights of outputs by
#: inputs).
_ALONG_SUM = {"forward": (1.0, 1.0), "backward": (1.0, 0.0), "backward_weight": (0.0, 0.0)}
#: Phases whose products run on rows as they are, by what the software pads.
UNPADDED: Mapping[str, tuple[str, ...]] = {
    "all": (), "inputs": ("backward_weight",), "none": ("forward", "backward", "backward_weight")
}  # fmt: skip


@FAMILIES.register("gemm")
def gemm_times(
    predictor: FamilyPredictor, group: str, kernels: Sequence[Kernel]
) -> tuple[SourcedParameters[Any], Array]:
    """Compute the times of GEMM kernels; ``gemm.narrow`` kernels use the run's fp8 or fp4 format.

    Parameters
    ----------
    predictor : FamilyPredictor
        The device, format and software of the run.
    group : str
        Calibration family, with the variant of its kernels.
    kernels : sequence of Kernel
        Kernels of that family.

    Returns
    -------
    tuple of (SourcedParameters[Any], ndarray)
        Parameters with their source, and seconds of each kernel.
    """
    dtype = predictor.dtype if group == "gemm.narrow" else predictor.sixteen_bits
    tensor = predictor.figures(dtype).tensor_cores
    family = f"gemm.{dtype}" if precision(dtype).quantises_operands else "gemm.tensor" if tensor else "gemm.simt"
    entry = predictor.parameters_of(GemmParameters, family)
    formats = precision(dtype)
    batch, experts = np.maximum(column(kernels, "batch"), 1.0), np.array([kernel.experts for kernel in kernels])
    looped = experts > 1.0
    together = np.where(looped, np.minimum(batch, CONCURRENT_EXPERTS), batch)
    times = gemm_time(
        m=np.maximum(column(kernels, "m"), 1.0),
        n=np.maximum(column(kernels, "n"), 1.0),
        k=np.maximum(column(kernels, "k"), 1.0),
        batch=together,
        element_bytes=formats.operand,
        result_bytes=formats.activation,
        weight_copies=np.inf,
        activity=_relative_energy(predictor, entry.parameters, dtype) if tensor else 1.0,
        k_contiguous=1.0 if tensor else np.mean(_along_sum(kernels), axis=0),
        sustained=1.0,
        device=predictor.figures(dtype),
        parameters=entry.parameters,
    )
    if tensor and formats.operand == BYTES["fp16"] and "fp32" in predictor.device.vector_peak:
        m, n, k = (column(kernels, name) for name in ("m", "n", "k"))
        odd = unaligned_time(m, n, k, np.where(experts > 0.0, 1.0, batch), predictor.figures("fp32"))
        times = np.maximum(np.maximum(times, odd), _unpadded_time(predictor, kernels, m, n, k))
    if not looped.any():
        return entry, times
    training: TrainingParameters = predictor.parameters_of(TrainingParameters, "training.experts").parameters
    rounds = batch / together
    alone = times - (rounds > 1.0) * entry.parameters.launch
    return entry, np.where(looped, rounds * alone + experts * training.launch, times)


def _unpadded_time(predictor: FamilyPredictor, kernels: Sequence[Kernel], m: Array, n: Array, k: Array) -> Array:
    """Compute the time of products with unaligned rows that the software does not pad; 0 for all others."""
    unpadded = UNPADDED[predictor.software.fusion.padded_products]
    chosen = np.array([kernel.phase in unpadded and kernel.shape.get("batch", 1.0) == 1.0 for kernel in kernels])
    return np.where(chosen, unaligned_rows_time(m, n, k, _along_sum(kernels), predictor.figures()), 0.0)


def _along_sum(kernels: Sequence[Kernel]) -> tuple[Array, Array]:
    """Return 1 where the left, and where the right, operand is contiguous along the summed dim; else 0."""
    left, right = np.array([_ALONG_SUM.get(kernel.phase, (1.0, 1.0)) for kernel in kernels], dtype=np.float64).T
    return left, right


def convolution_family(predictor: FamilyPredictor) -> str:
    """Return the name of the calibration family that predicts the time of convolutions in a run.

    Parameters
    ----------
    predictor : FamilyPredictor
        The device, format and software of the run.

    Returns
    -------
    str
        Family by unit: tensor cores or vector units, with a separate family for vector kernels of old libraries.
    """
    old = predictor.software.convolutions.cudnn < OLD_LIBRARY and predictor.device.architecture not in OLD_ARCHITECTURES
    family = f"conv.{predictor.unit}"
    calibration = predictor.user_calibration
    measured = calibration is not None and any(entry.family == family for entry in calibration.entries)
    return f"{family}-cudnn5" if old and not measured and not predictor.figures().tensor_cores else family


#: Algorithms that run only on vector units, as they have no product form; and those that a library has there for narrow
#: formats in channels-last layout.
NO_PRODUCT, NARROW = ("direct",), ("implicit", "direct")


@FAMILIES.register("conv")
def convolution_times(
    predictor: FamilyPredictor, group: str, kernels: Sequence[Kernel]
) -> tuple[SourcedParameters[Any], Array]:
    """Compute the times of convolutions by the fastest algorithm that the software has.

    Parameters
    ----------
    predictor : FamilyPredictor
        The device, format and software of the run.
    group : str
        Calibration family, with the variant of its kernels.
    kernels : sequence of Kernel
        Kernels of that family.

    Returns
    -------
    tuple of (SourcedParameters[Any], ndarray)
        Parameters with their source, and seconds of each kernel.

    Raises
    ------
    SpecError
        If no algorithm applies.
    """
    entry, (times, _) = _chosen_convolutions(predictor, kernels)
    if not np.all(np.isfinite(times)):
        lacking = kernels[int(np.argmin(np.isfinite(times)))].name
        has = ", ".join(predictor.software.convolutions.algorithms or convolution.AVAILABLE_FROM)
        where = f"convolution {lacking} in {predictor.dtype} on {predictor.device.name}"
        raise SpecError(
            f"software {predictor.software.name}: none of its algorithms ({has}) computes {where}; "
            "expected fp32, or another profile"
        )
    return entry, times


@FLOP_RATIOS.register("conv")
def convolution_flop_ratio(predictor: FamilyPredictor, kernels: Sequence[Kernel]) -> Array:
    """Return the FLOP that each convolution's algorithm executes, relative to the direct algorithm.

    Parameters
    ----------
    predictor : FamilyPredictor
        The device, format and software of the run.
    kernels : sequence of Kernel
        Convolutions.

    Returns
    -------
    ndarray
        Shape (kernels,); below 1 for Winograd's algorithms and Fourier transforms.
    """
    return _chosen_convolutions(predictor, kernels)[1][1]


def _chosen_convolutions(
    predictor: FamilyPredictor, kernels: Sequence[Kernel]
) -> tuple[SourcedParameters[convolution.ConvolutionParameters], tuple[Array, Array]]:
    """Return the parameters of convolutions, and the time and share of FLOP of the fastest algorithm of each."""
    entry, stated = (
        predictor.parameters_of(convolution.ConvolutionParameters, convolution_family(predictor)),
        predictor.software.convolutions,
    )
    algorithms: tuple[str, ...] = stated.algorithms or tuple(convolution.AVAILABLE_FROM)
    if stated.algorithms is None and predictor.figures().tensor_cores and "fp32" in predictor.device.peak:
        # Compute time and share of FLOP on tensor cores or, if these are slower, on vector units.
        products = tuple(name for name in algorithms if name not in NO_PRODUCT)
        moved = np.array([kernel.bytes for kernel in kernels])
        tensor, work = _convolved(predictor, kernels, predictor.figures(), entry.parameters, products)
        share = moved / (predictor.figures().memory_bandwidth * tensor)
        tensor = _under_power_limit(predictor, kernels, tensor, moved, share, operand_energy(predictor.dtype))
        if predictor.channels_first:
            operands = np.array([kernel.bytes_read for kernel in kernels])
            width = precision(predictor.dtype).operand
            tensor = tensor + memory.layout_conversion_time(
                operands, operands / width, predictor.figures(), loads=memory.LIBRARY_ELEMENTS_PER_CLOCK
            )
        vector = predictor.parameters_of(convolution.ConvolutionParameters, "conv.vector").parameters
        names = algorithms if predictor.dtype == "tf32" else NARROW
        ordinary, reduced = _convolved(predictor, kernels, predictor.figures("fp32"), vector, names)
        return entry, (np.minimum(tensor, ordinary), np.where(ordinary < tensor, reduced, work))
    return entry, _convolved(predictor, kernels, predictor.figures(), entry.parameters, algorithms)


def _under_power_limit(
    predictor: FamilyPredictor,
    kernels: Sequence[Kernel],
    seconds: Array,
    dram: Array,
    memory_share: Array,
    operands: float,
) -> Array:
    """Slow down convolutions on tensor cores by the power limit under long load.

    Convolutions draw as much power as matrix products of as many FLOP, though no more than those of their process: on
    B200, whose products draw 0.84 pJ, ten measured steps of RetinaNet and Stable Diffusion suit 0.70. Their calibration
    is from short runs over numbers near zero. ``dram`` are bytes from and to memory, ``memory_share`` is the share of
    the time that traffic takes, and ``operands`` the energy of a FLOP relative to that of the measured format.
    """
    device, p = predictor.figures(), predictor.parameters_of(GemmParameters, "gemm.tensor").parameters
    flops = np.array([kernel.flops for kernel in kernels])
    drawn = min(p.training_energy, energy_per_flop(device).training) * operands
    slowed = power_slowdown(busy=seconds, flops=flops, dram=dram, energy=drawn, device=device)
    return np.asarray(seconds * (1.0 + np.maximum(0.0, 1.0 - memory_share) * (slowed - 1.0)))


def inter_kernel_traffic_time(predictor: FamilyPredictor, moved: Array) -> tuple[Array, Array]:
    """Compute the time to move tensors that one kernel of an inference program writes and the next one reads.

    Bytes in the L2 cache have `L2_OVER_MEMORY` times the bandwidth of memory; other bytes have the bandwidth that
    convolutions reach.

    Parameters
    ----------
    predictor : FamilyPredictor
        The device, format and software of the run.
    moved : ndarray, shape (kernels,)
        Bytes that each kernel reads and writes.

    Returns
    -------
    tuple of ndarray, each of shape (kernels,)
        Seconds, and bytes read from and written to memory.
    """
    device = predictor.figures()
    parameters = predictor.parameters_of(convolution.ConvolutionParameters, convolution_family(predictor)).parameters
    kept = convolution.l2_resident_share(moved, device)
    seconds = moved / (parameters.bandwidth_fraction * device.memory_bandwidth)
    return seconds * (1.0 - kept * (1.0 - 1.0 / convolution.L2_OVER_MEMORY)), moved * (1.0 - kept)


def inference_convolution_times(predictor: FamilyPredictor, kernels: Sequence[Kernel], moved: Array) -> Array:
    """Compute the times of convolutions in an inference compiler: implicit products in the format of the run.

    They run under long load, so that the power limit applies. Energy is proportional to the bytes of operands, as for
    products in training (`operand_energy`).

    Parameters
    ----------
    predictor : FamilyPredictor
        The device, format and software of the run.
    kernels : sequence of Kernel
        Convolutions.
    moved : ndarray, shape (kernels,)
        Bytes that each reads and writes.

    Returns
    -------
    ndarray, shape (kernels,)
        Time [s].
    """
    device = predictor.figures()
    parameters = predictor.parameters_of(convolution.ConvolutionParameters, convolution_family(predictor)).parameters
    arithmetic, _ = _convolved(
        predictor, kernels, device, replace(parameters, bandwidth_fraction=np.inf), ("implicit",)
    )
    streamed, dram = inter_kernel_traffic_time(predictor, moved)
    busy = convolution.overlap_with_loss(arithmetic, streamed)
    operands = precision(predictor.dtype).operand / BYTES["fp16"]
    return _under_power_limit(predictor, kernels, busy, dram, streamed / busy, operands)


def _available_algorithms(predictor: FamilyPredictor, algorithms: Sequence[str]) -> Sequence[str]:
    """Return the algorithms that exist for the device and the dtype.

    cuDNN's Winograd and Fourier kernels are for GPUs, and not for fp64 (NVIDIA, cuDNN API reference,
    cudnnConvolutionFwdAlgo_t, supported configurations).
    """
    if predictor.device.kind == "gpu" and predictor.dtype != "fp64":
        return algorithms
    return tuple(name for name in algorithms if name not in convolution.REDUCED_PRODUCT_ALGORITHMS)


def _convolved(
    predictor: FamilyPredictor,
    kernels: Sequence[Kernel],
    device: DeviceDatasheet,
    parameters: convolution.ConvolutionParameters,
    algorithms: Sequence[str],
) -> tuple[Array, Array]:
    """Compute time and share of FLOP of the fastest of some algorithms on one arithmetic unit.

    A third spatial dim is folded: its positions into the batch, its taps into the channels.
    """
    software = predictor.software
    algorithms = _available_algorithms(predictor, algorithms)
    images = column(kernels, "n") * column(kernels, "out_d")
    calls = images if software.convolutions.image_by_image else np.ones_like(images)
    shape = convolution.convolution_shape(
        batch=images / calls,
        channels=column(kernels, "c") * column(kernels, "kernel_d"),
        height=column(kernels, "h"),
        width=column(kernels, "w"),
        filters=column(kernels, "k"),
        kernel_h=column(kernels, "kernel_h"),
        kernel_w=column(kernels, "kernel_w"),
        pad_h=column(kernels, "pad_h", 0.0),
        pad_w=column(kernels, "pad_w", 0.0),
        stride_h=column(kernels, "stride_h"),
        stride_w=column(kernels, "stride_w"),
        dilation_h=column(kernels, "dilation_h"),
        dilation_w=column(kernels, "dilation_w"),
        groups=column(kernels, "groups"),
        direction=np.array([_DIRECTIONS[kernel.operation] for kernel in kernels]),
    )
    costs = convolution.algorithm_costs(
        shape,
        element_bytes=precision(predictor.dtype).operand,
        library=software.convolutions.cudnn if software.convolutions.algorithms is None else convolution.OWN_KERNELS,
        channels_last=not predictor.channels_first,
        algorithms=algorithms,
        available=convolution.SEARCHED_FROM if software.convolutions.searches else convolution.AVAILABLE_FROM,
        device=device,
        parameters=parameters,
    )
    limit = software.convolutions.workspace
    seconds, work = convolution.fastest_time_and_flops(costs, np.inf if limit is None else limit)
    return calls * seconds, work


@FAMILIES.register("attention")
def attention_times(
    predictor: FamilyPredictor, group: str, kernels: Sequence[Kernel]
) -> tuple[SourcedParameters[Any], Array]:
    """Compute the times of fused attention by the kernel of the software, or else the usual one of the device.

    Parameters
    ----------
    predictor : FamilyPredictor
        The device, format and software of the run.
    group : str
        Calibration family, with the variant of its kernels.
    kernels : sequence of Kernel
        Kernels of that family.

    Returns
    -------
    tuple of (SourcedParameters[Any], ndarray)
        Parameters with their source, and seconds of each kernel.
    """
    device = predictor.device
    kernel_name = predictor.software.attention.kernel or default_kernel(device.architecture, device.memory.kind)
    entry = predictor.parameters_of(PrefillParameters, f"attention.{kernel_name}.prefill")
    attended, keys = column(kernels, "attended"), column(kernels, "kv_len")
    training = predictor.parameters_of(TrainingParameters, f"training.attention.{kernel_name}")
    measured = training.origin != "default"
    by_order = predictor.software.attention.mask == "causal"
    formula = attention_prefill_time if group.endswith("forward") else attention_backward_time
    tensor = predictor.figures(predictor.sixteen_bits).tensor_cores
    products: GemmParameters = predictor.parameters_of(
        GemmParameters, "gemm.tensor" if tensor else "gemm.simt"
    ).parameters
    times = formula(
        batch=column(kernels, "batch"),
        query_heads=column(kernels, "q_heads"),
        kv_heads=column(kernels, "kv_heads"),
        query_length=column(kernels, "q_len"),
        kv_length=keys,
        head_dim=column(kernels, "head_dim"),
        value_dim=column(kernels, "value_dim"),
        causal=(column(kernels, "causal") > 0) & by_order,
        window=np.where((attended < keys) & by_order, attended, 0.0),
        kernel_name=kernel_name,
        element_bytes=float(BYTES[predictor.sixteen_bits]),
        sustained=1.0,
        activity=_relative_energy(predictor, products, predictor.sixteen_bits) / operand_energy(predictor.sixteen_bits),
        device=predictor.figures(predictor.sixteen_bits),
        parameters=training_attention_parameters(entry.parameters, training.parameters)
        if measured
        else entry.parameters,
    )
    dropout = np.where(column(kernels, "dropout", 0.0) > 0, predictor.software.attention.dropout, 1.0)
    return entry, times * dropout * predictor.software.slowdown_on(predictor.device.architecture)


def _relative_energy(predictor: FamilyPredictor, products: GemmParameters, dtype: str) -> float:
    """Return the energy of products on tensor cores in training relative to that of the calibration's rows."""
    return switching_activity(products.training_activity, dtype, predictor.figures(dtype), predictor.user_calibration)


@FAMILIES.register("memory")
def memory_pass_times(
    predictor: FamilyPredictor, group: str, kernels: Sequence[Kernel]
) -> tuple[SourcedParameters[Any], Array]:
    """Compute the times of memory passes; a pass whose group name ends in ``.twice`` reads its input twice.

    Parameters
    ----------
    predictor : FamilyPredictor
        The device, format and software of the run.
    group : str
        Calibration family, with the variant of its kernels.
    kernels : sequence of Kernel
        Kernels of that family.

    Returns
    -------
    tuple of (SourcedParameters[Any], ndarray)
        Parameters with their source, and seconds of each kernel.
    """
    family = group.removesuffix(".twice")
    if family == "memory.layernorm" and predictor.software.fusion.norm_rows == "streamed":
        family = group = "memory.elementwise"
    entry = predictor.parameters_of(memory.MemoryParameters, family)
    parameters: memory.MemoryParameters = entry.parameters
    device, width = predictor.figures(pointwise_format(predictor.device)), precision(predictor.dtype).activation
    swept = group != family  # batch normalisation reads its input for statistics, then once more
    moved = np.array(
        [kernel.bytes - (_unread_mask_bytes(kernel, predictor.software) if swept else 0.0) for kernel in kernels]
    )
    rows, columns = column(kernels, "rows"), np.maximum(column(kernels, "columns"), 1.0)
    rowwise: dict[str, Any] = {}
    elements = moved / width / 2.0
    if family in _ROW_PASSES:
        passes = _ROW_PASSES[family](rows=rows, length=columns, element_bytes=width, device=device)
        elements = passes.elements
        rowwise = {
            "reread_bytes": passes.reread_bytes,
            "reread_footprint": passes.reread_footprint,
            "rows": rows,
            "threads_per_row": passes.threads_per_row,
            "steps_per_row": passes.steps_per_row,
        }
    if swept:
        read = np.array([_statistics_bytes(kernel, predictor) for kernel in kernels])
        rowwise = {"reread_bytes": read, "reread_footprint": read}
        if predictor.scalar_norms:
            elements, parameters = (
                (moved + read) / width,
                replace(parameters, elements_per_cycle=memory.SCALAR_ELEMENTS_PER_CLOCK),
            )
    times = memory.memory_time(
        moved_bytes=moved, elements=elements, device=device, parameters=parameters, host_calls=0.0, **rowwise
    )
    if swept and predictor.transposes_norms:
        times = times + memory.layout_conversion_time(moved, moved / width, device)
    return entry, times


#: Bytes of a one-bit mask relative to those of a sixteen-bit number.
_MASK_SHARE = 1.0 / 16.0


def _statistics_bytes(kernel: Kernel, predictor: FamilyPredictor) -> float:
    """Count the bytes that a batch normalisation reads for its statistics, without fused operands.

    There are none in the forward pass if the preceding convolution has summed them.
    """
    summed = (
        predictor.software.fusion.statistics == "convolution" and precision(predictor.dtype).activation <= BYTES["fp16"]
    )
    return 0.0 if summed and kernel.phase == "forward" else kernel.shape.get("swept", kernel.bytes_read)


def _unread_mask_bytes(kernel: Kernel, software: Software) -> float:
    """Count the bytes that the fused gradient of batch normalisation and a rectifier does not read.

    These are outputs of the rectifier, of which a one-bit mask is saved (cuDNN's reserve space,
    cudnnBatchNormalizationBackwardEx).
    """
    if software.fusion.norms != "both" or kernel.phase == "forward" or "swept" not in kernel.shape:
        return 0.0
    return (1.0 - _MASK_SHARE) * (kernel.bytes_read - kernel.shape["swept"])


@FAMILIES.register("rnn")
def rnn_times(
    predictor: FamilyPredictor, group: str, kernels: Sequence[Kernel]
) -> tuple[SourcedParameters[Any], Array]:
    """Compute the times of whole recurrent layers of the library.

    Parameters
    ----------
    predictor : FamilyPredictor
        The device, format and software of the run.
    group : str
        Calibration family, with the variant of its kernels.
    kernels : sequence of Kernel
        Kernels of that family.

    Returns
    -------
    tuple of (SourcedParameters[Any], ndarray)
        Parameters with their source, and seconds of each kernel.
    """
    entry = predictor.parameters_of(RnnParameters, f"rnn.{predictor.unit}")
    products = predictor.parameters_of(
        GemmParameters, "gemm.tensor" if predictor.figures().tensor_cores else "gemm.simt"
    )
    times = rnn_time(
        gate_count=column(kernels, "gates"),
        hidden=column(kernels, "hidden"),
        batch=column(kernels, "batch"),
        timesteps=column(kernels, "timesteps"),
        direction=np.array([_RNN_DIRECTIONS[kernel.operation.partition(".")[2]] for kernel in kernels]),
        bidirectional=column(kernels, "directions") - 1.0,
        element_bytes=precision(predictor.dtype).operand,
        library=predictor.software.convolutions.cudnn,
        device=predictor.figures(),
        parameters=entry.parameters,
        products=products.parameters,
    )
    return entry, times
