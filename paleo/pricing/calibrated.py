"""Kernels priced by the calibrated families: each kernel goes to the formula of its family, all kernels of a family at
once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.operations.base import Kernel
from paleo.operations.tensor import BYTES, precision
from paleo.pricing.attention import PrefillParameters, attention_backward_time, attention_prefill_time, default_kernel
from paleo.pricing.convolution import (
    AVAILABLE_FROM,
    OWN_KERNELS,
    REDUCED,
    SEARCHED_FROM,
    convolution_time,
)
from paleo.pricing.convolution_algorithms import (
    ConvolutionParameters,
)
from paleo.pricing.convolution_shape import (
    Direction,
)
from paleo.pricing.gemm import GemmParameters, gemm_time
from paleo.pricing.memory import (
    SCALAR_LOADS,
    MemoryParameters,
    layer_norm_passes,
    memory_time,
    softmax_passes,
    transposed_time,
)
from paleo.pricing.power import slow_down
from paleo.pricing.rnn import RnnDirection, RnnParameters, rnn_time
from paleo.pricing.roofline import figures, pointwise_format
from paleo.pricing.store import Found, lookup

if TYPE_CHECKING:
    from paleo.pricing.parameters import DeviceFigures
    from paleo.pricing.store import Rates
    from paleo.specs.calibration import Calibration
    from paleo.specs.hardware import Device
    from paleo.specs.software import Software

Array = npt.NDArray[np.float64]
#: What families of passes that sweep rows hold in registers and read again.
ROW_PASSES = {"memory.softmax": softmax_passes, "memory.layernorm": layer_norm_passes}
#: Families that run at the limit of power in training, and the factor by which rates that measured steps of one device
#: and format sustain lie apart: 500 to 590 TFLOP/s in bf16 on H100, 1,100 to 1,220 in fp8, 2,300 to 2,700 on GB200.
ARITHMETIC, SUSTAINED_SPREAD = ("gemm", "attention"), 1.1
#: The cuDNN release before which convolutions are those that the family conv.vector-cudnn5 describes, and architectures
#: whose conv.vector was itself measured with such a release.
OLD_LIBRARY, OLD_ARCHITECTURES = 6.0, frozenset({"Kepler", "Maxwell"})
_DIRECTIONS = {"fwd": Direction.FORWARD, "bwd_data": Direction.DATA, "bwd_filter": Direction.FILTER}
_RNN_DIRECTIONS = {"fwd": RnnDirection.FORWARD, "bwd_data": RnnDirection.DATA, "bwd_filter": RnnDirection.FILTER}


@dataclass(frozen=True, slots=True)
class Prices:
    """Device seconds of each kernel and the factors of its interval."""

    seconds: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class FamilyPrices:
    """Prices kernels of one device in one dtype by the calibrated families."""

    device: Device
    dtype: str
    software: Software
    own: Calibration | None = None
    origins: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Where the parameters of the families that were asked for come from: ``auto: measured (a100-sxm4-80gb)
        gemm.tensor; …``."""
        by_origin: dict[str, list[str]] = {}
        for family, origin in sorted(self.origins.items()):
            by_origin.setdefault(origin, []).append(family)
        parts = [f"{origin} {', '.join(families)}" for origin, families in sorted(by_origin.items(), reverse=True)]
        label = self.own.name if self.own is not None else "auto"
        return f"{label}: {'; '.join(parts)}" if parts else label

    @property
    def rates(self) -> Rates | None:
        """No constants here."""
        return None

    def prices(self, kernels: Sequence[Kernel]) -> Prices:
        """Device seconds of the kernels, in the order given; the host is not asked."""
        seconds, low, high = (np.zeros(len(kernels)) for _ in range(3))
        groups: dict[str, list[int]] = {}
        for index, kernel in enumerate(kernels):
            groups.setdefault(_group(kernel), []).append(index)
        for group, indices in groups.items():
            chosen = [kernels[index] for index in indices]
            lookup_result, times = _FORMULAS[group.partition(".")[0]](self, group, chosen)
            factors = np.array([lookup_result.factors(time) for time in times.tolist()])
            spread = SUSTAINED_SPREAD if group.partition(".")[0] in ARITHMETIC else 1.0
            seconds[indices] = times
            low[indices], high[indices] = factors[:, 0] / spread, factors[:, 1] * spread
        return Prices(seconds, low, high)

    def found(self, kind: type[Any], family: str) -> Found[Any]:
        """The parameters of a family, and a note of where they came from."""
        device = self.device
        result = lookup(
            kind,
            subject=device.name,
            architecture=device.architecture,
            memory_kind=device.memory.kind,
            family=family,
            user_calibration=self.own,
        )
        self.origins[family] = f"{result.origin} ({result.subject})"
        return result

    @property
    def sixteen_bits(self) -> str:
        """The format of what a run in fp8 or fp4 does not narrow: attention, the head; else the run's own."""
        return "bf16" if precision(self.dtype).narrow else self.dtype

    @property
    def channels_first(self) -> bool:
        """Whether the run keeps tensors channels-first that tensor cores want channels-last."""
        return self.dtype in self.software.formats.transposes and self.figures().tensor_cores

    @property
    def turns_norms(self) -> bool:
        """Whether batch normalisation in training turns channels-last tensors to channels-first and back."""
        narrow = precision(self.dtype).activation <= BYTES["fp16"]
        channels_last = narrow and self.figures().tensor_cores and not self.channels_first
        return channels_last and self.software.formats.norms == "channels-first"

    @property
    def attention_activity(self) -> float:
        """Energy of training's attention against that of the calibration's rows: as that of its matrix products."""
        tensor = self.figures(self.sixteen_bits).tensor_cores
        products: GemmParameters = self.found(GemmParameters, "gemm.tensor" if tensor else "gemm.simt").parameters
        return products.training_activity

    def figures(self, dtype: str | None = None) -> DeviceFigures:
        """The device for the arithmetic of the run, or of another dtype."""
        return figures(self.device, dtype or self.dtype)


def _group(kernel: Kernel) -> str:
    if kernel.family == "memory":
        return f"{kernel.kind.price}.twice" if kernel.kind.two_sweeps else kernel.kind.price
    if kernel.family == "attention":
        return f"attention.{'forward' if kernel.phase == 'forward' else 'backward'}"
    return f"gemm.{kernel.operation}" if kernel.family == "gemm" else kernel.family


def _column(kernels: Sequence[Kernel], name: str, default: float = 1.0) -> Array:
    return np.array([kernel.shape.get(name, default) for kernel in kernels], dtype=np.float64)


def _unit(prices: FamilyPrices) -> str:
    """Suffix of families that differ by the arithmetic unit."""
    return "tensor" if prices.figures().tensor_cores else "vector"


#: Share of the operands of a linear layer's product that lie along what it sums over: outputs from inputs and weights,
#: gradients of inputs from those of outputs, gradients of weights (row-major tensors, weights of outputs by inputs).
_ALONG_SUM = {"forward": 1.0, "backward": 0.5, "backward_weight": 0.0}


def _gemm(prices: FamilyPrices, group: str, kernels: Sequence[Kernel]) -> tuple[Found[Any], Array]:
    dtype = prices.dtype if group == "gemm.narrow" else prices.sixteen_bits
    tensor = prices.figures(dtype).tensor_cores
    family = f"gemm.{dtype}" if precision(dtype).narrow else "gemm.tensor" if tensor else "gemm.simt"
    entry = prices.found(GemmParameters, family)
    formats = precision(dtype)
    times = gemm_time(
        m=np.maximum(_column(kernels, "m"), 1.0),
        n=np.maximum(_column(kernels, "n"), 1.0),
        k=np.maximum(_column(kernels, "k"), 1.0),
        batch=np.maximum(_column(kernels, "batch"), 1.0),
        element_bytes=formats.operand,
        result_bytes=formats.activation,
        weight_copies=np.inf,
        activity=entry.parameters.training_activity if tensor else 1.0,
        k_contiguous=1.0 if tensor else np.array([_ALONG_SUM.get(kernel.phase, 1.0) for kernel in kernels]),
        sustained=1.0,
        device=prices.figures(dtype),
        parameters=entry.parameters,
    )
    return entry, times


def _convolution_family(prices: FamilyPrices) -> str:
    """The calibration family: tensor cores or ordinary ones, and of the latter the kernels of old libraries apart."""
    old = prices.software.convolutions.cudnn < OLD_LIBRARY and prices.device.architecture not in OLD_ARCHITECTURES
    family = f"conv.{_unit(prices)}"
    measured = prices.own is not None and any(entry.family == family for entry in prices.own.entries)
    return f"{family}-cudnn5" if old and not measured and not prices.figures().tensor_cores else family


#: What ordinary cores do for tensor cores: algorithms without a product form, which only they compute, and those that
#: a library has on them for narrow storage, laid out channels-last.
NO_PRODUCT, NARROW = ("direct",), ("implicit", "direct")


def _conv(prices: FamilyPrices, group: str, kernels: Sequence[Kernel]) -> tuple[Found[Any], Array]:
    """The fastest algorithm that the software has, or where none applies a SpecError."""
    entry, software = prices.found(ConvolutionParameters, _convolution_family(prices)), prices.software
    algorithms: tuple[str, ...] = software.convolutions.algorithms or tuple(AVAILABLE_FROM)
    both = software.convolutions.algorithms is None and prices.figures().tensor_cores and "fp32" in prices.device.peak
    if both:
        times = _convolved_by_either(prices, kernels, entry.parameters, algorithms)
    else:
        times = _convolved(prices, kernels, prices.figures(), entry.parameters, algorithms)
    if not np.all(np.isfinite(times)):
        lacking = kernels[int(np.argmin(np.isfinite(times)))].name
        has, tried = ", ".join(algorithms), f"{prices.dtype} on {prices.device.name}"
        raise SpecError(
            f"software {software.name}: none of its algorithms ({has}) computes convolution {lacking} in {tried}; "
            "expected fp32, or another profile"
        )
    return entry, times


def _convolved_by_either(
    prices: FamilyPrices, kernels: Sequence[Kernel], parameters: ConvolutionParameters, algorithms: tuple[str, ...]
) -> Array:
    """Seconds on tensor cores or, where they are faster, on ordinary ones: few channels do not fill a step of the
    former, and depthwise convolutions are no products. A library offers both units for any dtype (cudnnFind…
    "attempts both the provided mathType and CUDNN_DEFAULT_MATH", its documentation). Ordinary cores compute in fp32,
    so that tf32 has all their algorithms there, and tensors need not be turned to channels-last for them."""
    products = tuple(name for name in algorithms if name not in NO_PRODUCT)
    moved = np.array([kernel.bytes for kernel in kernels])
    tensor = _heated(prices, kernels, _convolved(prices, kernels, prices.figures(), parameters, products), moved)
    if prices.channels_first:
        tensor = tensor + transposed_time(moved, moved / precision(prices.dtype).operand, prices.figures())
    vector = prices.found(ConvolutionParameters, "conv.vector").parameters
    names = algorithms if prices.dtype == "tf32" else NARROW
    return np.minimum(tensor, _convolved(prices, kernels, prices.figures("fp32"), vector, names))


def _heated(prices: FamilyPrices, kernels: Sequence[Kernel], seconds: Array, moved: Array) -> Array:
    """Tensor cores under the power limit of a device at work for long: convolutions draw what products of as many FLOP
    draw. Their own calibration is from short runs over numbers near zero."""
    device, p = prices.figures(), prices.found(GemmParameters, "gemm.tensor").parameters
    flops = np.array([kernel.flops for kernel in kernels])
    slowed = slow_down(
        busy=seconds, flops=flops, dram=moved, energy=p.energy, activity=p.training_activity, device=device
    )
    share = np.maximum(0.0, 1.0 - moved / (device.memory_bandwidth * seconds))
    return np.asarray(seconds * (1.0 + share * (slowed - 1.0)))


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
) -> Array:
    """Seconds by the fastest of some algorithms on one arithmetic unit. A third spatial dim is folded: its positions
    into the batch, its taps into the channels."""
    software = prices.software
    algorithms = _offered(prices, algorithms)
    images = _column(kernels, "n") * _column(kernels, "out_d")
    calls = images if software.convolutions.image_by_image else np.ones_like(images)
    return calls * convolution_time(
        batch=images / calls,
        channels=_column(kernels, "c") * _column(kernels, "kernel_d"),
        height=_column(kernels, "h"),
        width=_column(kernels, "w"),
        filters=_column(kernels, "k"),
        kernel_h=_column(kernels, "kernel_h"),
        kernel_w=_column(kernels, "kernel_w"),
        pad_h=_column(kernels, "pad_h", 0.0),
        pad_w=_column(kernels, "pad_w", 0.0),
        stride_h=_column(kernels, "stride_h"),
        stride_w=_column(kernels, "stride_w"),
        dilation_h=_column(kernels, "dilation_h"),
        dilation_w=_column(kernels, "dilation_w"),
        groups=_column(kernels, "groups"),
        direction=np.array([_DIRECTIONS[kernel.operation] for kernel in kernels]),
        element_bytes=precision(prices.dtype).operand,
        library=software.convolutions.cudnn if software.convolutions.algorithms is None else OWN_KERNELS,
        channels_last=not prices.channels_first,
        algorithms=algorithms,
        available=SEARCHED_FROM if software.convolutions.searches else AVAILABLE_FROM,
        workspace_limit=np.inf if software.convolutions.workspace is None else software.convolutions.workspace,
        device=device,
        parameters=parameters,
    )


def _attention(prices: FamilyPrices, group: str, kernels: Sequence[Kernel]) -> tuple[Found[Any], Array]:
    device = prices.device
    kernel_name = prices.software.attention.kernel or default_kernel(device.architecture, device.memory.kind)
    entry = prices.found(PrefillParameters, f"attention.{kernel_name}.prefill")
    attended, keys = _column(kernels, "attended"), _column(kernels, "kv_len")
    formula = attention_prefill_time if group.endswith("forward") else attention_backward_time
    times = formula(
        batch=_column(kernels, "batch"),
        query_heads=_column(kernels, "q_heads"),
        kv_heads=_column(kernels, "kv_heads"),
        query_length=_column(kernels, "q_len"),
        kv_length=keys,
        head_dim=_column(kernels, "head_dim"),
        causal=_column(kernels, "causal") > 0,
        window=np.where(attended < keys, attended, 0.0),
        kernel_name=kernel_name,
        element_bytes=float(BYTES[prices.sixteen_bits]),
        sustained=1.0,
        activity=prices.attention_activity,
        device=prices.figures(prices.sixteen_bits),
        parameters=entry.parameters,
    )
    return entry, times * prices.software.slowdown_on(prices.device.architecture)


def _memory(prices: FamilyPrices, group: str, kernels: Sequence[Kernel]) -> tuple[Found[Any], Array]:
    family = group.removesuffix(".twice")
    entry = prices.found(MemoryParameters, family)
    parameters: MemoryParameters = entry.parameters
    device, width = prices.figures(pointwise_format(prices.device)), precision(prices.dtype).activation
    swept = group != family  # batch normalisation: statistics first, then everything once more
    moved = np.array([kernel.bytes - (_masked(kernel, prices.software) if swept else 0.0) for kernel in kernels])
    rows, columns = _column(kernels, "rows"), np.maximum(_column(kernels, "columns"), 1.0)
    rowwise: dict[str, Any] = {}
    elements = moved / width / 2.0
    if family in ROW_PASSES:
        passes = ROW_PASSES[family](rows=rows, length=columns, element_bytes=width, device=device)
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
        if prices.channels_first or prices.turns_norms:
            elements, parameters = (moved + read) / width, replace(parameters, elements_per_cycle=SCALAR_LOADS)
    times = memory_time(
        moved_bytes=moved, elements=elements, device=device, parameters=parameters, host_calls=0.0, **rowwise
    )
    if swept and prices.turns_norms:
        times = times + transposed_time(moved, moved / width, device)
    return entry, times


#: What a mask of a bit takes of a number of sixteen bits.
MASK_SHARE = 1.0 / 16.0


def _first_sweep(kernel: Kernel, prices: FamilyPrices) -> float:
    """Bytes that a batch normalisation reads for its statistics, without what was fused to it; none forward where the
    convolution before it has summed them up."""
    summed = prices.software.fusion.statistics == "convolution" and precision(prices.dtype).activation <= BYTES["fp16"]
    return 0.0 if summed and kernel.phase == "forward" else kernel.shape.get("swept", kernel.bytes_read)


def _masked(kernel: Kernel, software: Software) -> float:
    """Bytes that the fused gradient of batch normalisation and a rectifier does not read: the results of the
    rectifier, of which a bit each is kept as a mask (cuDNN's reserve space, cudnnBatchNormalizationBackwardEx)."""
    if software.fusion.norms != "both" or kernel.phase == "forward" or "swept" not in kernel.shape:
        return 0.0
    return (1.0 - MASK_SHARE) * (kernel.bytes_read - kernel.shape["swept"])


def _rnn(prices: FamilyPrices, group: str, kernels: Sequence[Kernel]) -> tuple[Found[Any], Array]:
    entry = prices.found(RnnParameters, f"rnn.{_unit(prices)}")
    times = rnn_time(
        gate_count=_column(kernels, "gates"),
        hidden=_column(kernels, "hidden"),
        batch=_column(kernels, "batch"),
        timesteps=_column(kernels, "timesteps"),
        direction=np.array([_RNN_DIRECTIONS[kernel.operation.partition(".")[2]] for kernel in kernels]),
        bidirectional=_column(kernels, "directions") - 1.0,
        element_bytes=precision(prices.dtype).operand,
        library=prices.software.convolutions.cudnn,
        device=prices.figures(),
        parameters=entry.parameters,
    )
    return entry, times


_Formula = Callable[[FamilyPrices, str, Sequence[Kernel]], tuple[Found[Any], Array]]
_FORMULAS: dict[str, _Formula] = {"gemm": _gemm, "conv": _conv, "attention": _attention, "memory": _memory, "rnn": _rnn}
