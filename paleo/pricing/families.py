"""Kernel families (GEMM, convolution, attention, memory pass, RNN): calibration and formula of their times on a device.

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
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.operations.tensor import BYTES_PER_NUMBER, default_precision
from paleo.pricing import convolution, memory
from paleo.pricing.attention import (
    PrefillParameters,
    attention_backward_time,
    attention_prefill_time,
    default_attention_kernel,
)
from paleo.pricing.gemm import GemmParameters, gemm_time, unaligned_batched_gemm_time, unaligned_gemm_time
from paleo.pricing.kernels import (
    KERNEL_FAMILIES,
    RELATIVE_ALGORITHM_FLOPS,
    Array,
    DeviceDatasheet,
    KernelFamilyPredictor,
    KernelFamilyTimes,
    elementwise_dtype,
    kernel_shape_values,
)
from paleo.pricing.power import (
    energy_per_flop,
    power_slowdown,
    relative_flop_energy,
    relative_training_energy,
    slowdown_share,
)
from paleo.pricing.rnn import RnnDirection, RnnParameters, rnn_time
from paleo.specs.calibration import parameter

if TYPE_CHECKING:
    from paleo.operations.base import Kernel
    from paleo.pricing.calibration_lookup import SourcedParameters
    from paleo.specs.software import SoftwareProfile

#: Experts whose products run concurrently.
CONCURRENT_EXPERTS = 4.0


@dataclass(frozen=True, slots=True)
class TrainingKernelParameters:
    """Calibrated parameters of one training kernel, scaled from an inference kernel, on one device."""

    launch_time: float = parameter("5 us", "0.1..300 us", "what a call takes beside its kernel; for experts, each")
    half_throttle_time: float = parameter(
        "0.1 ms", "1 us..10 ms", "kernel time that feels half the power limit in a test run"
    )
    forward_rate_ratio: float = parameter("1", "0.4..2", "rate of attention's products over that of an engine's kernel")
    backward_rate_ratio: float = parameter("0.7", "0.2..1.5", "rate of backward attention's products over forward's")


def looped_expert_gemm_time(*, experts: npt.ArrayLike, launch: float, **product: Any) -> Array:
    """Compute the time of a rank's expert GEMMs that a loop launches, of which up to `CONCURRENT_EXPERTS` run at once.

    Parameters
    ----------
    experts : array-like
        Number of experts of the rank.
    launch : float
        Seconds that each expert adds.
    **product
        Arguments of `paleo.pricing.gemm.gemm_time` except ``batch``.

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
    return np.asarray(cold + (hot - cold) * slowdown_share(cold, 0.0, ramp))


def training_attention_parameters(engine: PrefillParameters, training: TrainingKernelParameters) -> PrefillParameters:
    """Convert the parameters of a serving engine's attention kernel to parameters of attention in training.

    Parameters
    ----------
    engine : PrefillParameters
        Calibration of the kernel as inference engines run it.
    training : TrainingKernelParameters
        Calibration of training. Its ``launch_time`` is that of single calls, which other kernels hide in a step.

    Returns
    -------
    PrefillParameters
        Parameters of the attention kernel in training.
    """
    rate = engine.mma_efficiency * training.forward_rate_ratio
    return replace(engine, mma_efficiency=rate, backward_efficiency=training.backward_rate_ratio)


#: Functions that count how passes over rows keep a row in registers and read it again.
_ROW_PASSES = {"memory.softmax": memory.softmax_row_traffic, "memory.layernorm": memory.layer_norm_row_traffic}
#: cuDNN release before which the family conv.vector-cudnn5 describes convolutions, and architectures whose conv.vector
#: was itself measured with such a release.
_OLD_CUDNN_RELEASE, _OLD_CUDNN_ARCHITECTURES = 6.0, frozenset({"Kepler", "Maxwell"})
#: Directions of convolutions and of recurrent layers by the names of their operations.
_DIRECTIONS, _RNN_DIRECTIONS = (
    {"fwd": kind.FORWARD, "bwd_data": kind.DATA, "bwd_filter": kind.FILTER}
    for kind in (convolution.ConvolutionDirection, RnnDirection)
)
#: Arguments of `attention_prefill_time` and entries of ``Kernel.shape``; sizes with one name in ``Kernel.shape`` and
#: in `convolution_shape`.
_ATTENTION_SIZES = {
    "batch": "batch", "query_heads": "q_heads", "kv_heads": "kv_heads", "query_length": "q_len", "kv_length": "kv_len",
    "head_dim": "head_dim", "value_dim": "value_dim",
}  # fmt: skip
_CONVOLUTION_SIZES = ("kernel_h", "kernel_w", "stride_h", "stride_w", "dilation_h", "dilation_w", "groups")


#: 1 for each operand of a linear layer's product that is contiguous along the summed dim: outputs from inputs and
#: weights, gradients of inputs from those of outputs, gradients of weights (row-major tensors, weights of outputs by
#: inputs).
_ALONG_SUM = {"forward": (1.0, 1.0), "backward": (1.0, 0.0), "backward_weight": (0.0, 0.0)}
#: Phases whose products run on rows as they are, by what the software pads.
_UNPADDED_GEMM_PHASES: Mapping[str, tuple[str, ...]] = {
    "all": (), "inputs": ("backward_weight",), "none": ("forward", "backward", "backward_weight")
}  # fmt: skip


@KERNEL_FAMILIES.register("gemm")
def gemm_times(predictor: KernelFamilyPredictor, group: str, kernels: Sequence[Kernel]) -> KernelFamilyTimes:
    """Predict the times of GEMM kernels; the group ``gemm.narrow`` runs in the fp8 or fp4 format of the run.

    Parameters
    ----------
    predictor : KernelFamilyPredictor
        The device, format and software of the run.
    group : str
        Group of kernels: ``gemm`` and the variant, such as ``gemm.narrow``.
    kernels : sequence of Kernel
        Kernels of the family.

    Returns
    -------
    tuple of (SourcedParameters[Any], ndarray)
        Parameters with their source, and seconds of each kernel.
    """
    dtype = predictor.dtype if group == "gemm.narrow" else predictor.sixteen_bit_dtype
    device, formats = predictor.datasheet(dtype), default_precision(dtype)
    entry = predictor.parameters_of(GemmParameters, f"gemm.{dtype}" if formats.quantises_operands else _gemm(device))
    m, n, k, batch = (kernel_shape_values(kernels, name) for name in ("m", "n", "k", "batch"))
    batch, experts = np.maximum(batch, 1.0), np.array([kernel.expert_count for kernel in kernels])
    looped = experts > 1.0
    together = np.where(looped, np.minimum(batch, CONCURRENT_EXPERTS), batch)
    times = gemm_time(
        m=np.maximum(m, 1.0), n=np.maximum(n, 1.0), k=np.maximum(k, 1.0), batch=together,
        element_bytes=formats.operand_bytes, result_bytes=formats.activation_bytes, weight_copies=np.inf,
        activity=_relative_energy(predictor, entry.parameters, dtype) if device.tensor_cores else 1.0,
        k_contiguous=1.0 if device.tensor_cores else np.mean(_along_sum(kernels), axis=0),
        sustained=1.0, device=device, parameters=entry.parameters,
    )  # fmt: skip
    narrow = device.tensor_cores and formats.operand_bytes == BYTES_PER_NUMBER["fp16"]
    if narrow and "fp32" in predictor.device.vector_peak:
        odd = unaligned_batched_gemm_time(m, n, k, np.where(experts > 0.0, 1.0, batch), predictor.datasheet("fp32"))
        times = np.maximum(np.maximum(times, odd), _unpadded_time(predictor, kernels, m, n, k))
    if not looped.any():
        return entry, times
    training = predictor.parameters_of(TrainingKernelParameters, "training.experts").parameters
    rounds = batch / together
    alone = times - (rounds > 1.0) * entry.parameters.launch_time
    return entry, np.where(looped, rounds * alone + experts * training.launch_time, times)


def _gemm(device: DeviceDatasheet) -> str:
    """Return the name of the calibration family that predicts the time of 16-bit or wider GEMMs on a unit."""
    return "gemm.tensor" if device.tensor_cores else "gemm.simt"


def _unpadded_time(predictor: KernelFamilyPredictor, kernels: Sequence[Kernel], m: Array, n: Array, k: Array) -> Array:
    """Compute the time of GEMMs with unaligned rows that the software does not pad; 0 for all other GEMMs."""
    unpadded = _UNPADDED_GEMM_PHASES[predictor.software.fusion.padded_products]
    chosen = np.array([kernel.phase in unpadded and kernel.shape.get("batch", 1.0) == 1.0 for kernel in kernels])
    return np.where(chosen, unaligned_gemm_time(m, n, k, _along_sum(kernels), predictor.datasheet()), 0.0)


def _along_sum(kernels: Sequence[Kernel]) -> tuple[Array, Array]:
    """Return for the left and right operand of each GEMM 1 if the summed dim (k) is contiguous in memory, else 0."""
    left, right = np.array([_ALONG_SUM.get(kernel.phase, (1.0, 1.0)) for kernel in kernels], dtype=np.float64).T
    return left, right


def convolution_family(predictor: KernelFamilyPredictor) -> str:
    """Return the name of the calibration family that predicts the time of convolutions in a run.

    Parameters
    ----------
    predictor : KernelFamilyPredictor
        The device, format and software of the run.

    Returns
    -------
    str
        Family by unit: tensor cores or vector units, with a separate family for vector kernels of old libraries.
    """
    family, calibration = f"conv.{predictor.arithmetic_unit_suffix}", predictor.user_calibration
    release, architecture = predictor.software.convolutions.cudnn, predictor.device.architecture
    old = release < _OLD_CUDNN_RELEASE and architecture not in _OLD_CUDNN_ARCHITECTURES
    measured = calibration is not None and any(entry.family == family for entry in calibration.entries)
    return f"{family}-cudnn5" if old and not measured and family == "conv.vector" else family


#: Algorithms that run only on vector units, as they have no product form; and those that a library has there for narrow
#: formats in channels-last layout.
_VECTOR_ONLY_ALGORITHMS, _NARROW_FORMAT_ALGORITHMS = ("direct",), ("implicit", "direct")


@KERNEL_FAMILIES.register("conv")
def convolution_times(predictor: KernelFamilyPredictor, group: str, kernels: Sequence[Kernel]) -> KernelFamilyTimes:
    """Predict the times of convolutions, each by the fastest algorithm that the software has.

    Parameters
    ----------
    predictor : KernelFamilyPredictor
        The device, format and software of the run.
    group : str
        Calibration family, with the variant of its kernels.
    kernels : sequence of Kernel
        Kernels of the family.

    Returns
    -------
    tuple of (SourcedParameters[Any], ndarray)
        Parameters with their source, and seconds of each kernel.

    Raises
    ------
    SpecError
        If no algorithm of the software can compute a convolution.
    """
    entry, (times, _) = _chosen_convolutions(predictor, kernels)
    if not np.all(np.isfinite(times)):
        lacking = kernels[int(np.argmin(np.isfinite(times)))].name
        has = ", ".join(predictor.software.convolutions.algorithms or convolution.FIRST_CHOSEN_RELEASE)
        raise SpecError(
            f"software {predictor.software.name}: none of its algorithms ({has}) computes convolution {lacking} in "
            f"{predictor.dtype} on {predictor.device.name}; expected fp32, or another profile"
        )
    return entry, times


@RELATIVE_ALGORITHM_FLOPS.register("conv")
def relative_convolution_flops(predictor: KernelFamilyPredictor, kernels: Sequence[Kernel]) -> Array:
    """Return the FLOP that the algorithm of each convolution executes, relative to the direct algorithm.

    Parameters
    ----------
    predictor : KernelFamilyPredictor
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
    predictor: KernelFamilyPredictor, kernels: Sequence[Kernel]
) -> tuple[SourcedParameters[convolution.ConvolutionParameters], tuple[Array, Array]]:
    """Choose the fastest algorithm of each convolution.

    Returns the calibrated parameters, and the time [s] and the FLOP relative to the direct algorithm of each kernel.
    """
    entry = predictor.parameters_of(convolution.ConvolutionParameters, convolution_family(predictor))
    device, stated = predictor.datasheet(), predictor.software.convolutions.algorithms
    algorithms: tuple[str, ...] = stated or tuple(convolution.FIRST_CHOSEN_RELEASE)
    if stated is not None or not device.tensor_cores or "fp32" not in predictor.device.peak:
        return entry, _convolved(predictor, kernels, device, entry.parameters, algorithms)
    # Compute time and share of FLOP on tensor cores or, if these are slower, on vector units.
    products = tuple(name for name in algorithms if name not in _VECTOR_ONLY_ALGORITHMS)
    moved = np.array([kernel.bytes for kernel in kernels])
    tensor, work = _convolved(predictor, kernels, device, entry.parameters, products)
    share = moved / (device.memory_bandwidth * tensor)
    tensor = _under_power_limit(predictor, kernels, tensor, moved, share, relative_flop_energy(predictor.dtype))
    if predictor.keeps_channels_first:
        operands = np.array([kernel.bytes_read for kernel in kernels])
        width, loads = default_precision(predictor.dtype).operand_bytes, memory.CUDNN_TRANSPOSE_ELEMENTS_PER_CLOCK
        tensor = tensor + memory.layout_conversion_time(operands, operands / width, device, loads=loads)
    vector = predictor.parameters_of(convolution.ConvolutionParameters, "conv.vector").parameters
    names = algorithms if predictor.dtype == "tf32" else _NARROW_FORMAT_ALGORITHMS
    ordinary, reduced = _convolved(predictor, kernels, predictor.datasheet("fp32"), vector, names)
    return entry, (np.minimum(tensor, ordinary), np.where(ordinary < tensor, reduced, work))


def _under_power_limit(
    predictor: KernelFamilyPredictor,
    kernels: Sequence[Kernel],
    seconds: Array,
    dram: Array,
    memory_share: Array,
    operands: float,
) -> Array:
    """Compute the times of tensor-core convolutions under long load, slowed down by the power limit.

    Convolutions draw as much power as matrix products of as many FLOP, though no more than those of their process. On
    B200, whose products draw 0.84 pJ, ten measured steps of RetinaNet and Stable Diffusion suit 0.70. The calibration
    of convolutions is from short runs over numbers near zero. ``seconds`` are the times without a power limit, ``dram``
    bytes from and to memory, and ``memory_share`` the share of the time that traffic takes. ``operands`` is the energy
    of a FLOP relative to that of the measured format.
    """
    device, p = predictor.datasheet(), predictor.parameters_of(GemmParameters, "gemm.tensor").parameters
    flops = np.array([kernel.flops for kernel in kernels])
    drawn = min(p.training_energy_per_flop, energy_per_flop(device).training) * operands
    slowed = power_slowdown(busy=seconds, flops=flops, dram=dram, energy=drawn, device=device)
    return np.asarray(seconds * (1.0 + np.maximum(0.0, 1.0 - memory_share) * (slowed - 1.0)))


def inter_kernel_traffic_time(predictor: KernelFamilyPredictor, moved: Array) -> tuple[Array, Array]:
    """Compute the time to move tensors that one kernel of an inference program writes and the next one reads.

    Bytes in the L2 cache have `L2_BANDWIDTH_RATIO` times the bandwidth of memory; other bytes have the bandwidth that
    convolutions reach.

    Parameters
    ----------
    predictor : KernelFamilyPredictor
        The device, format and software of the run.
    moved : ndarray, shape (kernels,)
        Bytes that each kernel reads and writes.

    Returns
    -------
    tuple of ndarray, each of shape (kernels,)
        Seconds, and bytes read from and written to memory.
    """
    device = predictor.datasheet()
    parameters = predictor.parameters_of(convolution.ConvolutionParameters, convolution_family(predictor)).parameters
    kept = convolution.l2_resident_share(moved, device)
    seconds = moved / (parameters.bandwidth_fraction * device.memory_bandwidth)
    return seconds * (1.0 - kept * (1.0 - 1.0 / convolution.L2_BANDWIDTH_RATIO)), moved * (1.0 - kept)


def inference_convolution_times(predictor: KernelFamilyPredictor, kernels: Sequence[Kernel], moved: Array) -> Array:
    """Compute the times of convolutions in an inference compiler: implicit products in the format of the run.

    The convolutions run under long load, so that the power limit applies. Energy is proportional to the bytes of
    operands, as for products in training (`relative_flop_energy`).

    Parameters
    ----------
    predictor : KernelFamilyPredictor
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
    device = predictor.datasheet()
    parameters = predictor.parameters_of(convolution.ConvolutionParameters, convolution_family(predictor)).parameters
    unlimited = replace(parameters, bandwidth_fraction=np.inf)
    arithmetic, _ = _convolved(predictor, kernels, device, unlimited, ("implicit",))
    streamed, dram = inter_kernel_traffic_time(predictor, moved)
    busy = convolution.lossy_overlap_time(arithmetic, streamed)
    operands = default_precision(predictor.dtype).operand_bytes / BYTES_PER_NUMBER["fp16"]
    return _under_power_limit(predictor, kernels, busy, dram, streamed / busy, operands)


def _available_algorithms(predictor: KernelFamilyPredictor, algorithms: Sequence[str]) -> Sequence[str]:
    """Return the convolution algorithms that exist for the device and the number format of a run.

    cuDNN's Winograd and Fourier kernels are for GPUs, and not for fp64 (NVIDIA, cuDNN API reference,
    cudnnConvolutionFwdAlgo_t, supported configurations).
    """
    if predictor.device.kind == "gpu" and predictor.dtype != "fp64":
        return algorithms
    return tuple(name for name in algorithms if name not in convolution.FAST_CONVOLUTION_ALGORITHMS)


def _convolved(
    predictor: KernelFamilyPredictor,
    kernels: Sequence[Kernel],
    device: DeviceDatasheet,
    parameters: convolution.ConvolutionParameters,
    algorithms: Sequence[str],
) -> tuple[Array, Array]:
    """Compute time and relative FLOP of the fastest of the named algorithms for each convolution, on one unit.

    The unit, tensor cores or vector units, is that of ``device``. A third spatial dim is folded: its positions into the
    batch, its taps into the channels.
    """
    software, sizes = predictor.software.convolutions, partial(kernel_shape_values, kernels)
    images = sizes("n") * sizes("out_d")
    calls = images if software.image_by_image else np.ones_like(images)
    shape = convolution.convolution_shape(
        batch=images / calls,
        channels=sizes("c") * sizes("kernel_d"),
        height=sizes("h"),
        width=sizes("w"),
        filters=sizes("k"),
        **{name: sizes(name) for name in _CONVOLUTION_SIZES},
        **{name: sizes(name, 0.0) for name in ("pad_h", "pad_w")},
        direction=np.array([_DIRECTIONS[kernel.operation] for kernel in kernels]),
    )
    costs = convolution.convolution_costs(
        shape,
        element_bytes=default_precision(predictor.dtype).operand_bytes,
        library=software.cudnn if software.algorithms is None else convolution.NON_CUDNN_RELEASE,
        channels_last=not predictor.keeps_channels_first,
        algorithms=_available_algorithms(predictor, algorithms),
        available=convolution.FIRST_AUTOTUNED_RELEASE
        if software.benchmarks_algorithms
        else convolution.FIRST_CHOSEN_RELEASE,
        device=device,
        parameters=parameters,
    )
    limit = np.inf if software.workspace is None else software.workspace
    seconds, work = convolution.fastest_convolution_time_and_flops(costs, limit)
    return calls * seconds, work


@KERNEL_FAMILIES.register("attention")
def attention_times(predictor: KernelFamilyPredictor, group: str, kernels: Sequence[Kernel]) -> KernelFamilyTimes:
    """Predict the times of fused attention by the kernel of the software, or else the usual kernel of the device.

    Parameters
    ----------
    predictor : KernelFamilyPredictor
        The device, format and software of the run.
    group : str
        Calibration family, with the variant of its kernels.
    kernels : sequence of Kernel
        Kernels of the family.

    Returns
    -------
    tuple of (SourcedParameters[Any], ndarray)
        Parameters with their source, and seconds of each kernel.
    """
    software, architecture, dtype = predictor.software, predictor.device.architecture, predictor.sixteen_bit_dtype
    kernel_name = software.attention.kernel or default_attention_kernel(architecture, predictor.device.memory.kind)
    entry = predictor.parameters_of(PrefillParameters, f"attention.{kernel_name}.prefill")
    training = predictor.parameters_of(TrainingKernelParameters, f"training.attention.{kernel_name}")
    parameters: PrefillParameters = entry.parameters
    if training.origin != "default":
        parameters = training_attention_parameters(parameters, training.parameters)
    device, sizes = predictor.datasheet(dtype), partial(kernel_shape_values, kernels)
    shapes: dict[str, Any] = {name: sizes(key) for name, key in _ATTENTION_SIZES.items()}
    products = predictor.parameters_of(GemmParameters, _gemm(device)).parameters
    by_order = software.attention.mask == "causal"
    formula = attention_prefill_time if group.endswith("forward") else attention_backward_time
    times = formula(
        **shapes,
        causal=(sizes("causal") > 0) & by_order,
        window=np.where((sizes("attended") < sizes("kv_len")) & by_order, sizes("attended"), 0.0),
        kernel_name=kernel_name,
        element_bytes=float(BYTES_PER_NUMBER[dtype]),
        sustained=1.0,
        activity=_relative_energy(predictor, products, dtype) / relative_flop_energy(dtype),
        device=device,
        parameters=parameters,
    )
    dropout = np.where(sizes("dropout", 0.0) > 0, software.attention.dropout, 1.0)
    return entry, times * dropout * software.attention_slowdown(architecture)


def _relative_energy(predictor: KernelFamilyPredictor, products: GemmParameters, dtype: str) -> float:
    """Return the energy of tensor-core GEMMs in training relative to the benchmark that was calibrated [-]."""
    device, ratio = predictor.datasheet(dtype), products.training_energy_ratio
    return relative_training_energy(ratio, dtype, device, predictor.user_calibration)


@KERNEL_FAMILIES.register("memory")
def memory_pass_times(predictor: KernelFamilyPredictor, group: str, kernels: Sequence[Kernel]) -> KernelFamilyTimes:
    """Predict the times of memory passes (norms, softmax, element-wise); groups in ``.twice`` read inputs twice.

    Parameters
    ----------
    predictor : KernelFamilyPredictor
        The device, format and software of the run.
    group : str
        Calibration family, with the variant of its kernels.
    kernels : sequence of Kernel
        Kernels of the family.

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
    device = predictor.datasheet(elementwise_dtype(predictor.device))
    width = default_precision(predictor.dtype).activation_bytes
    swept = group != family  # batch normalisation reads its input for statistics, then once more
    moved = np.array([kernel.bytes for kernel in kernels])
    if swept:
        moved = moved - [_unread_mask_bytes(kernel, predictor.software) for kernel in kernels]
    rowwise: dict[str, Any] = {"moved_bytes": moved, "elements": moved / width / 2.0}
    if family in _ROW_PASSES:
        rows, columns = kernel_shape_values(kernels, "rows"), np.maximum(kernel_shape_values(kernels, "columns"), 1.0)
        passes = _ROW_PASSES[family](rows=rows, length=columns, element_bytes=width, device=device)
        rowwise |= {"rows": rows, **passes._asdict()}
    if swept:
        read = np.array([_statistics_bytes(kernel, predictor) for kernel in kernels])
        rowwise = {name: rowwise[name] for name in ("moved_bytes", "elements")}
        rowwise |= {"reread_bytes": read, "reread_footprint": read}
        if predictor.loads_norms_without_vectors:
            rowwise["elements"] = (moved + read) / width
            parameters = replace(parameters, elements_per_cycle=memory.SCALAR_ELEMENTS_PER_CLOCK)
    times = memory.memory_kernel_time(**rowwise, device=device, parameters=parameters, host_calls=0.0)
    if swept and predictor.transposes_norms:
        times = times + memory.layout_conversion_time(moved, moved / width, device)
    return entry, times


#: Bytes of a one-bit mask relative to those of a sixteen-bit number.
_MASK_SHARE = 1.0 / 16.0


def _statistics_bytes(kernel: Kernel, predictor: KernelFamilyPredictor) -> float:
    """Count the bytes that a batch normalisation reads for its statistics, without fused operands.

    The forward pass reads none if the preceding convolution has summed them.
    """
    narrow = default_precision(predictor.dtype).activation_bytes <= BYTES_PER_NUMBER["fp16"]
    summed = narrow and predictor.software.fusion.statistics == "convolution"
    return 0.0 if summed and kernel.phase == "forward" else kernel.shape.get("swept", kernel.bytes_read)


def _unread_mask_bytes(kernel: Kernel, software: SoftwareProfile) -> float:
    """Count the bytes that the fused gradient of batch normalisation and ReLU does not read.

    These are outputs of the ReLU, of which a one-bit mask is saved (cuDNN's reserve space,
    cudnnBatchNormalizationBackwardEx).
    """
    if software.fusion.norms != "both" or kernel.phase == "forward" or "swept" not in kernel.shape:
        return 0.0
    return (1.0 - _MASK_SHARE) * (kernel.bytes_read - kernel.shape["swept"])


@KERNEL_FAMILIES.register("rnn")
def rnn_times(predictor: KernelFamilyPredictor, group: str, kernels: Sequence[Kernel]) -> KernelFamilyTimes:
    """Predict the times of whole recurrent layers, one library call (cuDNN) for all timesteps.

    Parameters
    ----------
    predictor : KernelFamilyPredictor
        The device, format and software of the run.
    group : str
        Calibration family, with the variant of its kernels.
    kernels : sequence of Kernel
        Kernels of the family.

    Returns
    -------
    tuple of (SourcedParameters[Any], ndarray)
        Parameters with their source, and seconds of each kernel.
    """
    entry = predictor.parameters_of(RnnParameters, f"rnn.{predictor.arithmetic_unit_suffix}")
    device = predictor.datasheet()
    times = rnn_time(
        gate_count=kernel_shape_values(kernels, "gates"),
        hidden=kernel_shape_values(kernels, "hidden"),
        batch=kernel_shape_values(kernels, "batch"),
        timesteps=kernel_shape_values(kernels, "timesteps"),
        direction=np.array([_RNN_DIRECTIONS[kernel.operation.partition(".")[2]] for kernel in kernels]),
        bidirectional=kernel_shape_values(kernels, "directions") - 1.0,
        element_bytes=default_precision(predictor.dtype).operand_bytes,
        library=predictor.software.convolutions.cudnn,
        device=device,
        parameters=entry.parameters,
        products=predictor.parameters_of(GemmParameters, _gemm(device)).parameters,
    )
    return entry, times
