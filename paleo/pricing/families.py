"""The families of kernels: which calibration each is priced by on a device, and what its formula is asked.

A family registers itself, from a file of its own in this folder where it is a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paleo.errors import SpecError
from paleo.operations.tensor import BYTES, precision
from paleo.pricing.attention import PrefillParameters, attention_backward_time, attention_prefill_time, default_kernel
from paleo.pricing.convolution import (
    AVAILABLE_FROM,
    L2_OVER_MEMORY,
    L2_SHARE,
    OWN_KERNELS,
    REDUCED,
    SEARCHED_FROM,
    ConvolutionParameters,
    Direction,
    algorithm_costs,
    convolution_shape,
    fastest,
    overlapped,
)
from paleo.pricing.gemm import GemmParameters, gemm_time, unaligned_time
from paleo.pricing.kernels import FAMILIES, REDUCTIONS, Array, DeviceFigures, FamilyPrices, column, pointwise_format
from paleo.pricing.memory import (
    LIBRARY_LOADS,
    SCALAR_LOADS,
    MemoryParameters,
    layer_norm_passes,
    memory_time,
    softmax_passes,
    transposed_time,
)
from paleo.pricing.power import ARITHMETIC_FAMILY, SustainedParameters, operand_energy, slow_down
from paleo.pricing.rnn import RnnDirection, RnnParameters, rnn_time
from paleo.pricing.training import STREAMS, TrainingParameters, trained_attention
from paleo.specs.calibration import of_steps

if TYPE_CHECKING:
    from paleo.operations.base import Kernel
    from paleo.pricing.store import SourcedParameters
    from paleo.specs.software import Software

#: What families of passes that sweep rows hold in registers and read again.
_ROW_PASSES = {"memory.softmax": softmax_passes, "memory.layernorm": layer_norm_passes}
#: The cuDNN release before which convolutions are those that the family conv.vector-cudnn5 describes, and architectures
#: whose conv.vector was itself measured with such a release.
OLD_LIBRARY, OLD_ARCHITECTURES = 6.0, frozenset({"Kepler", "Maxwell"})
_DIRECTIONS = {"fwd": Direction.FORWARD, "bwd_data": Direction.DATA, "bwd_filter": Direction.FILTER}
_RNN_DIRECTIONS = {"fwd": RnnDirection.FORWARD, "bwd_data": RnnDirection.DATA, "bwd_filter": RnnDirection.FILTER}


#: Share of the operands of a linear layer's product that lie along what it sums over: outputs from inputs and weights,
#: gradients of inputs from those of outputs, gradients of weights (row-major tensors, weights of outputs by inputs).
_ALONG_SUM = {"forward": 1.0, "backward": 0.5, "backward_weight": 0.0}


@FAMILIES.register("gemm")
def gemm(prices: FamilyPrices, group: str, kernels: Sequence[Kernel]) -> tuple[SourcedParameters[Any], Array]:
    """Price matrix products; those of ``gemm.narrow`` are in the format of the run.

    Parameters
    ----------
    prices : FamilyPrices
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
    dtype = prices.dtype if group == "gemm.narrow" else prices.sixteen_bits
    tensor = prices.figures(dtype).tensor_cores
    family = f"gemm.{dtype}" if precision(dtype).narrow else "gemm.tensor" if tensor else "gemm.simt"
    entry = prices.parameters_of(GemmParameters, family)
    formats = precision(dtype)
    batch, experts = np.maximum(column(kernels, "batch"), 1.0), np.array([kernel.experts for kernel in kernels])
    looped = experts > 1.0
    together = np.where(looped, np.minimum(batch, STREAMS), batch)
    times = gemm_time(
        m=np.maximum(column(kernels, "m"), 1.0),
        n=np.maximum(column(kernels, "n"), 1.0),
        k=np.maximum(column(kernels, "k"), 1.0),
        batch=together,
        element_bytes=formats.operand,
        result_bytes=formats.activation,
        weight_copies=np.inf,
        activity=_activity(prices, entry.parameters, dtype) if tensor else 1.0,
        k_contiguous=1.0 if tensor else np.array([_ALONG_SUM.get(kernel.phase, 1.0) for kernel in kernels]),
        sustained=1.0,
        device=prices.figures(dtype),
        parameters=entry.parameters,
    )
    if tensor and formats.operand == BYTES["fp16"] and "fp32" in prices.device.vector_peak:
        m, n, k = (column(kernels, name) for name in ("m", "n", "k"))
        odd = unaligned_time(m, n, k, np.where(experts > 0.0, 1.0, batch), prices.figures("fp32"))
        times = np.maximum(times, odd)
    if not looped.any():
        return entry, times
    training: TrainingParameters = prices.parameters_of(TrainingParameters, "training.experts").parameters
    rounds = batch / together
    alone = times - (rounds > 1.0) * entry.parameters.launch
    return entry, np.where(looped, rounds * alone + experts * training.launch, times)


def convolution_family(prices: FamilyPrices) -> str:
    """Name the calibration family of convolutions.

    Parameters
    ----------
    prices : FamilyPrices
        The device, format and software of the run.

    Returns
    -------
    str
        Tensor cores or ordinary ones, and of the latter the kernels of old libraries apart.
    """
    old = prices.software.convolutions.cudnn < OLD_LIBRARY and prices.device.architecture not in OLD_ARCHITECTURES
    family = f"conv.{prices.unit}"
    calibration = prices.user_calibration
    measured = calibration is not None and any(entry.family == family for entry in calibration.entries)
    return f"{family}-cudnn5" if old and not measured and not prices.figures().tensor_cores else family


#: What ordinary cores do for tensor cores: algorithms without a product form, which only they compute, and those that
#: a library has on them for narrow storage, laid out channels-last.
NO_PRODUCT, NARROW = ("direct",), ("implicit", "direct")


@FAMILIES.register("conv")
def conv(prices: FamilyPrices, group: str, kernels: Sequence[Kernel]) -> tuple[SourcedParameters[Any], Array]:
    """Price convolutions by the fastest algorithm that the software has.

    Parameters
    ----------
    prices : FamilyPrices
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
    entry, (times, _) = _chosen_convolutions(prices, kernels)
    if not np.all(np.isfinite(times)):
        lacking = kernels[int(np.argmin(np.isfinite(times)))].name
        has = ", ".join(prices.software.convolutions.algorithms or AVAILABLE_FROM)
        where = f"convolution {lacking} in {prices.dtype} on {prices.device.name}"
        raise SpecError(
            f"software {prices.software.name}: none of its algorithms ({has}) computes {where}; "
            "expected fp32, or another profile"
        )
    return entry, times


@REDUCTIONS.register("conv")
def convolution_work(prices: FamilyPrices, kernels: Sequence[Kernel]) -> Array:
    """Return the FLOP of the products of each convolution's algorithm, over those of the direct convolution.

    Parameters
    ----------
    prices : FamilyPrices
        The device, format and software of the run.
    kernels : sequence of Kernel
        Convolutions.

    Returns
    -------
    ndarray
        Of shape (kernels,); below 1 for Winograd's algorithms and Fourier transforms.
    """
    return _chosen_convolutions(prices, kernels)[1][1]


def _chosen_convolutions(
    prices: FamilyPrices, kernels: Sequence[Kernel]
) -> tuple[SourcedParameters[ConvolutionParameters], tuple[Array, Array]]:
    """Parameters of convolutions, with seconds and share of FLOP of the fastest algorithm of each."""
    entry, stated = (
        prices.parameters_of(ConvolutionParameters, convolution_family(prices)),
        prices.software.convolutions,
    )
    algorithms: tuple[str, ...] = stated.algorithms or tuple(AVAILABLE_FROM)
    if stated.algorithms is None and prices.figures().tensor_cores and "fp32" in prices.device.peak:
        return entry, _convolved_by_either(prices, kernels, entry.parameters, algorithms)
    return entry, _convolved(prices, kernels, prices.figures(), entry.parameters, algorithms)


def _convolved_by_either(
    prices: FamilyPrices, kernels: Sequence[Kernel], parameters: ConvolutionParameters, algorithms: tuple[str, ...]
) -> tuple[Array, Array]:
    """Seconds and share of FLOP on tensor cores or, where they are faster, on ordinary ones.

    Few channels do not fill a step of the former, and depthwise convolutions are no products. A library offers both
    units for any dtype (cudnnFind… "attempts both the provided mathType and CUDNN_DEFAULT_MATH", its documentation).
    Ordinary cores compute in fp32, so that tf32 has all their algorithms there, and tensors need not be turned to
    channels-last for them."""
    products = tuple(name for name in algorithms if name not in NO_PRODUCT)
    moved = np.array([kernel.bytes for kernel in kernels])
    tensor, work = _convolved(prices, kernels, prices.figures(), parameters, products)
    tensor = _heated(prices, kernels, tensor, moved)
    if prices.channels_first:
        operands = np.array([kernel.bytes_read for kernel in kernels])
        width = precision(prices.dtype).operand
        tensor = tensor + transposed_time(operands, operands / width, prices.figures(), loads=LIBRARY_LOADS)
    vector = prices.parameters_of(ConvolutionParameters, "conv.vector").parameters
    names = algorithms if prices.dtype == "tf32" else NARROW
    ordinary, reduced = _convolved(prices, kernels, prices.figures("fp32"), vector, names)
    return np.minimum(tensor, ordinary), np.where(ordinary < tensor, reduced, work)


def _heated(prices: FamilyPrices, kernels: Sequence[Kernel], seconds: Array, moved: Array) -> Array:
    """Tensor cores under the power limit of a device at work for long: convolutions draw what products of as many FLOP
    draw. Their own calibration is from short runs over numbers near zero."""
    device, p = prices.figures(), prices.parameters_of(GemmParameters, "gemm.tensor").parameters
    flops = np.array([kernel.flops for kernel in kernels])
    activity = p.training_activity * operand_energy(prices.dtype)
    slowed = slow_down(busy=seconds, flops=flops, dram=moved, energy=p.energy, activity=activity, device=device)
    share = np.maximum(0.0, 1.0 - moved / (device.memory_bandwidth * seconds))
    return np.asarray(seconds * (1.0 + share * (slowed - 1.0)))


def streamed_between_kernels(prices: FamilyPrices, moved: Array) -> tuple[Array, Array]:
    """Price tensors that one kernel of an inference program writes and the next reads.

    What the L2 cache holds comes at `L2_OVER_MEMORY` times the bandwidth of memory; the rest at that of convolutions.

    Parameters
    ----------
    prices : FamilyPrices
        The device, format and software of the run.
    moved : ndarray, shape (kernels,)
        Bytes that each kernel reads and writes.

    Returns
    -------
    tuple of ndarray, each of shape (kernels,)
        Seconds, and bytes that come from and go to memory.
    """
    device = prices.figures()
    parameters = prices.parameters_of(ConvolutionParameters, convolution_family(prices)).parameters
    kept = 1.0 / (1.0 + (moved / (L2_SHARE * device.l2_bytes)) ** 4)
    seconds = moved / (parameters.bandwidth_fraction * device.memory_bandwidth)
    return seconds * (1.0 - kept * (1.0 - 1.0 / L2_OVER_MEMORY)), moved * (1.0 - kept)


def single_pass_convolutions(prices: FamilyPrices, kernels: Sequence[Kernel], moved: Array) -> Array:
    """Price convolutions as an inference compiler runs them: implicit products in the format of the run.

    They run for long, so that the device is at its power limit. Energy goes with the bytes of operands, as that of
    products in training does (`operand_energy`).

    Parameters
    ----------
    prices : FamilyPrices
        The device, format and software of the run.
    kernels : sequence of Kernel
        Convolutions.
    moved : ndarray, shape (kernels,)
        Bytes that each reads and writes.

    Returns
    -------
    ndarray, shape (kernels,)
        Seconds.
    """
    device = prices.figures()
    parameters = prices.parameters_of(ConvolutionParameters, convolution_family(prices)).parameters
    product = prices.parameters_of(GemmParameters, "gemm.tensor").parameters
    arithmetic, _ = _convolved(prices, kernels, device, replace(parameters, bandwidth_fraction=np.inf), ("implicit",))
    streamed, dram = streamed_between_kernels(prices, moved)
    busy = overlapped(arithmetic, streamed)
    flops = np.array([kernel.flops for kernel in kernels])
    activity = product.training_activity * precision(prices.dtype).operand / BYTES["fp16"]
    slowed = slow_down(busy=busy, flops=flops, dram=dram, energy=product.energy, activity=activity, device=device)
    return np.asarray(busy * (1.0 + np.maximum(0.0, 1.0 - streamed / busy) * (slowed - 1.0)))


def _offered(prices: FamilyPrices, algorithms: Sequence[str]) -> Sequence[str]:
    """The algorithms that there are for the device and the dtype: cuDNN's Winograd and Fourier kernels are for GPUs,
    and for no fp64 (NVIDIA, cuDNN API reference, cudnnConvolutionFwdAlgo_t, supported configurations)."""
    if prices.device.kind == "gpu" and prices.dtype != "fp64":
        return algorithms
    return tuple(name for name in algorithms if name not in REDUCED)


def _convolved(
    prices: FamilyPrices,
    kernels: Sequence[Kernel],
    device: DeviceFigures,
    parameters: ConvolutionParameters,
    algorithms: Sequence[str],
) -> tuple[Array, Array]:
    """Seconds and share of FLOP by the fastest of some algorithms on one arithmetic unit. A third spatial dim is
    folded: its positions into the batch, its taps into the channels."""
    software = prices.software
    algorithms = _offered(prices, algorithms)
    images = column(kernels, "n") * column(kernels, "out_d")
    calls = images if software.convolutions.image_by_image else np.ones_like(images)
    shape = convolution_shape(
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
    costs = algorithm_costs(
        shape,
        element_bytes=precision(prices.dtype).operand,
        library=software.convolutions.cudnn if software.convolutions.algorithms is None else OWN_KERNELS,
        channels_last=not prices.channels_first,
        algorithms=algorithms,
        available=SEARCHED_FROM if software.convolutions.searches else AVAILABLE_FROM,
        device=device,
        parameters=parameters,
    )
    limit = software.convolutions.workspace
    seconds, work = fastest(costs, np.inf if limit is None else limit)
    return calls * seconds, work


@FAMILIES.register("attention")
def attention(prices: FamilyPrices, group: str, kernels: Sequence[Kernel]) -> tuple[SourcedParameters[Any], Array]:
    """Price fused attention by the kernel of the software, or else the usual one of the device.

    Parameters
    ----------
    prices : FamilyPrices
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
    device = prices.device
    kernel_name = prices.software.attention.kernel or default_kernel(device.architecture, device.memory.kind)
    entry = prices.parameters_of(PrefillParameters, f"attention.{kernel_name}.prefill")
    attended, keys = column(kernels, "attended"), column(kernels, "kv_len")
    training = prices.parameters_of(TrainingParameters, f"training.attention.{kernel_name}")
    measured = training.origin != "default"
    formula = attention_prefill_time if group.endswith("forward") else attention_backward_time
    times = formula(
        batch=column(kernels, "batch"),
        query_heads=column(kernels, "q_heads"),
        kv_heads=column(kernels, "kv_heads"),
        query_length=column(kernels, "q_len"),
        kv_length=keys,
        head_dim=column(kernels, "head_dim"),
        value_dim=column(kernels, "value_dim"),
        causal=column(kernels, "causal") > 0,
        window=np.where(attended < keys, attended, 0.0),
        kernel_name=kernel_name,
        element_bytes=float(BYTES[prices.sixteen_bits]),
        sustained=1.0,
        activity=_attention_activity(prices),
        device=prices.figures(prices.sixteen_bits),
        parameters=trained_attention(entry.parameters, training.parameters) if measured else entry.parameters,
    )
    return entry, times * prices.software.slowdown_on(prices.device.architecture)


def _attention_activity(prices: FamilyPrices) -> float:
    """Energy of training's attention against that of the calibration's rows: as that of its matrix products."""
    tensor = prices.figures(prices.sixteen_bits).tensor_cores
    products: GemmParameters = prices.parameters_of(GemmParameters, "gemm.tensor" if tensor else "gemm.simt").parameters
    return _activity(prices, products, prices.sixteen_bits) / operand_energy(prices.sixteen_bits)


def _activity(prices: FamilyPrices, products: GemmParameters, dtype: str) -> float:
    """Energy of training's products on tensor cores against that of the calibration's rows."""
    energy = products.training_activity * operand_energy(dtype)
    if precision(dtype).operand < BYTES["bf16"] or not prices.device.memory.kind.startswith("HBM"):
        return energy
    sustained = of_steps(SustainedParameters, ARITHMETIC_FAMILY, prices.user_calibration)
    return energy * sustained.of(prices.device.architecture)


@FAMILIES.register("memory")
def memory(prices: FamilyPrices, group: str, kernels: Sequence[Kernel]) -> tuple[SourcedParameters[Any], Array]:
    """Price passes over tensors; those of a group that ends in ``.twice`` sweep them once more.

    Parameters
    ----------
    prices : FamilyPrices
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
    entry = prices.parameters_of(MemoryParameters, family)
    parameters: MemoryParameters = entry.parameters
    device, width = prices.figures(pointwise_format(prices.device)), precision(prices.dtype).activation
    swept = group != family  # batch normalisation: statistics first, then everything once more
    moved = np.array([kernel.bytes - (_masked(kernel, prices.software) if swept else 0.0) for kernel in kernels])
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
        read = np.array([_first_sweep(kernel, prices) for kernel in kernels])
        rowwise = {"reread_bytes": read, "reread_footprint": read}
        if prices.channels_first or prices.transposes_norms:
            elements, parameters = (moved + read) / width, replace(parameters, elements_per_cycle=SCALAR_LOADS)
    times = memory_time(
        moved_bytes=moved, elements=elements, device=device, parameters=parameters, host_calls=0.0, **rowwise
    )
    if swept and prices.transposes_norms:
        times = times + transposed_time(moved, moved / width, device)
    return entry, times


#: What a mask of a bit takes of a number of sixteen bits.
_MASK_SHARE = 1.0 / 16.0


def _first_sweep(kernel: Kernel, prices: FamilyPrices) -> float:
    """Bytes that a batch normalisation reads for its statistics, without fused operands; none in forward if the
    convolution before it has summed them up."""
    summed = prices.software.fusion.statistics == "convolution" and precision(prices.dtype).activation <= BYTES["fp16"]
    return 0.0 if summed and kernel.phase == "forward" else kernel.shape.get("swept", kernel.bytes_read)


def _masked(kernel: Kernel, software: Software) -> float:
    """Bytes that the fused gradient of batch normalisation and a rectifier does not read: the results of the
    rectifier, of which a bit each is kept as a mask (cuDNN's reserve space, cudnnBatchNormalizationBackwardEx)."""
    if software.fusion.norms != "both" or kernel.phase == "forward" or "swept" not in kernel.shape:
        return 0.0
    return (1.0 - _MASK_SHARE) * (kernel.bytes_read - kernel.shape["swept"])


@FAMILIES.register("rnn")
def rnn(prices: FamilyPrices, group: str, kernels: Sequence[Kernel]) -> tuple[SourcedParameters[Any], Array]:
    """Price whole recurrent layers of the library.

    Parameters
    ----------
    prices : FamilyPrices
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
    entry = prices.parameters_of(RnnParameters, f"rnn.{prices.unit}")
    products = prices.parameters_of(GemmParameters, "gemm.tensor" if prices.figures().tensor_cores else "gemm.simt")
    times = rnn_time(
        gate_count=column(kernels, "gates"),
        hidden=column(kernels, "hidden"),
        batch=column(kernels, "batch"),
        timesteps=column(kernels, "timesteps"),
        direction=np.array([_RNN_DIRECTIONS[kernel.operation.partition(".")[2]] for kernel in kernels]),
        bidirectional=column(kernels, "directions") - 1.0,
        element_bytes=precision(prices.dtype).operand,
        library=prices.software.convolutions.cudnn,
        device=prices.figures(),
        parameters=entry.parameters,
        products=products.parameters,
    )
    return entry, times
