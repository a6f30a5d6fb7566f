"""Tensors with named dims, number formats, and sliding windows.

A strategy splits tensors by the names of their dims. `Precision` holds the bytes of parameters, gradients, masters and
states under a number format. `SlidingWindow` describes the sliding windows of convolutions and pools, and the rows of
neighbouring ranks that they read if space is split (halos).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from paleo.errors import SpecError, suggest_names

#: Bytes of one number. tf32 is fp32 in memory; only the multiplication is narrower.
BYTES_PER_NUMBER: dict[str, float] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "int8": 1,
    "fp4": 0.5,
}

#: How scales of formats below sixteen bits are found. delayed: from the largest values of earlier passes (Transformer
#: Engine's default). current: from the largest value of the tensor, found in an extra pass. mxfp8: a one-byte scale for
#: each 32 numbers (Open Compute Project, Microscaling Formats, 2023). nvfp4: a one-byte scale for each 16 numbers, and
#: one scale for the tensor.
QuantisationScaling = Literal["delayed", "current", "mxfp8", "nvfp4"]
#: Implementations of the cross-entropy of classes (`paleo.layers.base.LayerImplementations`).
CrossEntropyImplementation = Literal["fused", "recomputed", "tiled", "separate", "upcast", "stepwise"]
#: Implementations of rotary position embedding (`paleo.layers.base.LayerImplementations`).
RotaryImplementation = Literal["fused", "stepwise", "complex", "halves"]
#: Bytes of scales per number.
_SCALE_BYTES: dict[QuantisationScaling, float] = {
    "delayed": 0.0,
    "current": 0.0,
    "mxfp8": 1.0 / 32.0,
    "nvfp4": 1.0 / 16.0,
}

TensorRole = Literal["activation", "parameter", "gradient", "statistic", "mask", "index"]


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats of a training run: bytes of one number in activations, parameters, gradients and states.

    Statistics (means, variances, log-sum-exp) are fp32, dropout masks one byte, and indices int64.
    """

    dtype: str
    #: Activations passed between layers.
    activation_bytes: float
    #: Operands of matrix products.
    operand_bytes: float
    #: Weights used by the forward and backward pass.
    parameter_bytes: float
    #: Gradients of parameters.
    gradient_bytes: float
    #: Master weights of the optimizer; 0 if parameters are already fp32.
    master_bytes: float
    #: Each optimizer state.
    state_bytes: float = 4.0
    #: A second copy of the gradients (Megatron-LM's ``main_grad``), to which the framework adds each gradient in an
    #: extra pass. It is exchanged, clipped and read by the optimizer. 0: there is none.
    main_gradient_bytes: float = 0.0
    #: True if the pass that adds a gradient to that copy reads it in the copy's format, cast in an earlier pass.
    casts_gradients_before_accumulation: bool = False
    #: True if weights stay fp32: each pass casts them to narrow copies for products, and their gradients back.
    casts_weights_each_pass: bool = False
    #: Reads and writes per gradient number after every backward pass, for unscaling, norms and clipping.
    extra_gradient_accesses: float = 0.0
    #: True if these are passes over a flat buffer of each block, not over each tensor.
    uses_flat_gradient_buffer: bool = False
    #: True if the kernel of the weight gradient adds to the accumulated gradient itself.
    fuses_gradient_accumulation: bool = False
    #: True if autograd adds new gradients to accumulated ones.
    accumulates_gradients_by_autograd: bool = False
    #: Bytes of scales per number, of operands below sixteen bits.
    scale_bytes_per_number: float = 0.0
    #: True if an extra pass finds the largest value of such operands.
    has_separate_amax_pass: bool = False

    @property
    def accumulated_gradient_bytes(self) -> float:
        """Bytes of a number of the accumulated gradient, which is exchanged, clipped and read by the optimizer.

        >>> plain = default_precision("bf16")
        >>> plain.accumulated_gradient_bytes, replace(plain, main_gradient_bytes=4.0).accumulated_gradient_bytes
        (2.0, 4.0)
        """
        return self.main_gradient_bytes or self.gradient_bytes

    @property
    def fp32_activation_bytes(self) -> float:
        """Bytes of an element of activations that are kept in fp32 or wider under mixed precision."""
        return max(4.0, self.activation_bytes)

    @property
    def quantises_operands(self) -> bool:
        """True if products read a narrower format than that of activations, so that operands must be quantised."""
        return self.operand_bytes < self.activation_bytes

    @property
    def without_quantisation(self) -> Precision:
        """The precision of products with operands in the format of activations, without quantisation."""
        return replace(self, operand_bytes=self.activation_bytes) if self.quantises_operands else self

    def bytes_of(self, role: TensorRole) -> float:
        """Return the bytes of one element of a tensor by its role (activation, parameter, mask, …).

        Parameters
        ----------
        role : TensorRole
            Role of the tensor, such as ``activation`` or ``mask``.

        Returns
        -------
        float
            Size of one element [byte].
        """
        match role:
            case "activation":
                return self.activation_bytes
            case "parameter":
                return self.parameter_bytes
            case "gradient":
                return self.gradient_bytes
            case "statistic":
                return 4.0
            case "mask":
                return 1.0
            case "index":
                return 8.0


def default_precision(dtype: str) -> Precision:
    """Return the default mixed-precision recipe for a format.

    Sixteen-bit formats keep fp32 masters (Micikevicius et al., ICLR 2018).

    fp8 and fp4 narrow the operands of matrix products with weights inside the repeated blocks. Embedding, head,
    attention and everything stored stay bf16 (as in NVIDIA's Transformer Engine and in DeepSeek-V3, 2024, section 3.3).

    Parameters
    ----------
    dtype : str
        Number format, such as ``bf16``.

    Returns
    -------
    Precision
        Bytes and formats of parameters, gradients, activations and optimizer states.

    Raises
    ------
    SpecError
        If there is no such format.

    Examples
    --------
    >>> default_precision("bf16").master_bytes, default_precision("fp32").master_bytes
    (4.0, 0.0)
    """
    if dtype not in BYTES_PER_NUMBER:
        raise SpecError(f"unknown dtype {dtype!r}; {suggest_names(dtype, BYTES_PER_NUMBER)}")
    if dtype in ("fp64", "fp32", "tf32"):
        width = float(BYTES_PER_NUMBER[dtype])
        return Precision(dtype, width, width, width, width, 0.0, width)
    if dtype in ("fp16", "bf16"):
        return Precision(dtype, 2.0, 2.0, 2.0, 2.0, 4.0)
    return Precision(dtype, 2.0, float(BYTES_PER_NUMBER[dtype]), 2.0, 2.0, 4.0)


def with_quantisation_scales(formats: Precision, scaling: QuantisationScaling, *, fused: bool) -> Precision:
    """Add the bytes of fp8 or fp4 scale factors to a precision.

    Parameters
    ----------
    formats : Precision
        Formats of tensors and products.
    scaling : QuantisationScaling
        How scales are found.
    fused : bool
        True if the kernel that writes a tensor also finds its largest value (Transformer Engine; torch.compile). This
        does not apply to NVFP4, whose largest value is that of rotated numbers.

    Returns
    -------
    Precision
        The formats with scales.
    """
    measured_first = scaling == "nvfp4" or (scaling == "current" and not fused)
    return replace(formats, scale_bytes_per_number=_SCALE_BYTES[scaling], has_separate_amax_pass=measured_first)


def with_autocast_weights(formats: Precision) -> Precision:
    """Return the formats of autocast mixed precision: fp32 weights that each pass casts for products.

    The automatic mixed precision of TensorFlow (a rewrite of the graph) and of PyTorch (``autocast``) works so. With
    Adam a parameter takes 16 bytes, as with fp32 masters, but gradients are accumulated and exchanged in fp32.

    Parameters
    ----------
    formats : Precision
        Formats of tensors and products.

    Returns
    -------
    Precision
        Formats without masters; unchanged if there are none to replace.

    Examples
    --------
    >>> both = default_precision("fp16"), with_autocast_weights(default_precision("fp16"))
    >>> [one.parameter_bytes + one.gradient_bytes + one.master_bytes + 2 * one.state_bytes for one in both]
    [16.0, 16.0]
    """
    return _without_masters(formats, parameter_bytes=4.0, gradient_bytes=4.0, casts_weights_each_pass=True)


def _pure_16_bit_precision(formats: Precision) -> Precision:
    """Return the formats of pure 16-bit training: no master weights, and optimizer states in the weights' format.

    Parameters
    ----------
    formats : Precision
        Formats of tensors and products.

    Returns
    -------
    Precision
        Formats without masters; unchanged if there are none.

    Examples
    --------
    >>> both = default_precision("bf16"), _pure_16_bit_precision(default_precision("bf16"))
    >>> [one.parameter_bytes + one.gradient_bytes + one.master_bytes + 2 * one.state_bytes for one in both]
    [16.0, 8.0]
    """
    return _without_masters(formats, state_bytes=formats.parameter_bytes)


def _without_masters(formats: Precision, **changes: Any) -> Precision:
    """Return the formats without fp32 master weights and with ``changes``; unchanged if there are no masters."""
    return replace(formats, master_bytes=0.0, **changes) if formats.master_bytes else formats


#: How sixteen-bit training keeps weights (``formats.mixed`` of a software profile) -> formats from those with masters.
MIXED_PRECISION: Mapping[str, Callable[[Precision], Precision]] = {
    "masters": lambda formats: formats,
    "autocast": with_autocast_weights,
    "narrow": _pure_16_bit_precision,
}

DimSize = int | float


@dataclass(frozen=True, slots=True)
class Tensor:
    """Tensor with named dims; the name identifies the storage, which views share.

    ``needs_gradient`` is False for tensors that need no gradient: graph inputs, masks, indices, frozen weights.
    ``stays_fp32`` activations stay fp32 under mixed precision, as do the outputs of element-wise passes over them.
    ``packed_bytes_per_number`` is the number of bytes in which each number of a weight is stored, whatever the run's
    format; 0: the run's format.

    >>> x = Tensor("x", ("batch", "features"), (4, 8))
    >>> x.elements, x.size("features"), x.shard({"batch": 2}).sizes
    (32, 8, (2, 8))
    """

    name: str
    dims: tuple[str, ...]
    sizes: tuple[DimSize, ...]
    role: TensorRole = "activation"
    needs_gradient: bool = True
    stays_fp32: bool = False
    packed_bytes_per_number: float = 0.0

    @classmethod
    def of(cls, name: str, shape: Mapping[str, DimSize], role: TensorRole = "activation", **more: bool) -> Tensor:
        """Return a tensor with the dims and sizes of a mapping.

        Parameters
        ----------
        name : str
            Name of the tensor.
        shape : mapping of str to DimSize
            Size of each dim, in order.
        role : TensorRole, optional
            Role of the tensor.
        **more : bool
            Further fields, such as ``needs_gradient``.

        Returns
        -------
        Tensor
            The tensor.
        """
        return cls(name, tuple(shape), tuple(shape.values()), role, **more)

    @property
    def shape(self) -> dict[str, DimSize]:
        """Size of each dim by the dim's name."""
        return dict(zip(self.dims, self.sizes, strict=True))

    @property
    def elements(self) -> DimSize:
        return math.prod(self.sizes)

    def size(self, dim: str) -> DimSize:
        """Return the size of a dim.

        Parameters
        ----------
        dim : str
            Name of the dim.

        Returns
        -------
        DimSize
            Number of elements along the dim.
        """
        return self.sizes[self.dims.index(dim)]

    def shard(self, ways: Mapping[str, float]) -> Tensor:
        """Return the largest shard of the tensor when its dims are divided among ranks.

        Parameters
        ----------
        ways : mapping of str to float
            Number of parts of each dim.

        Returns
        -------
        Tensor
            Shard with each size divided and, if it was a whole number, rounded up.
        """
        if ways.keys().isdisjoint(self.dims):
            return self
        pairs = zip(self.dims, self.sizes, strict=True)
        sizes = tuple([_local_size(n, ways[dim]) if dim in ways else n for dim, n in pairs])
        return Tensor(
            self.name, self.dims, sizes, self.role, self.needs_gradient, self.stays_fp32, self.packed_bytes_per_number
        )

    def with_renamed_dims(self, names: Mapping[str, str]) -> Tensor:
        """Return the tensor with its dims renamed.

        Parameters
        ----------
        names : mapping of str to str
            Old names to new ones.

        Returns
        -------
        Tensor
            The same tensor under the new dim names.
        """
        return replace(self, dims=tuple(names.get(dim, dim) for dim in self.dims))

    def like(self, name: str, *, role: TensorRole | None = None) -> Tensor:
        """Return a new tensor of the same shape.

        Parameters
        ----------
        name : str
            Name of the new tensor.
        role : TensorRole, optional
            Role of the new tensor; by default the role of this tensor.

        Returns
        -------
        Tensor
            Tensor with the same dims and sizes.
        """
        return replace(self, name=name, role=role or self.role, needs_gradient=True)

    def reshaped(self, dims: Mapping[str, DimSize], *, name: str | None = None) -> Tensor:
        """Return a view of the tensor with other dims and sizes.

        Parameters
        ----------
        dims : mapping of str to DimSize
            Names and sizes.
        name : str, optional
            New name; by default that of this tensor.

        Returns
        -------
        Tensor
            View with the new dims and sizes.
        """
        return replace(self, name=name or self.name, dims=tuple(dims), sizes=tuple(dims.values()))

    def without_dims(self, *dims: str, name: str, role: TensorRole = "activation") -> Tensor:
        """Return a new tensor that lacks some dims, as the result of a reduction.

        Parameters
        ----------
        *dims : str
            Names of the dims.
        name : str
            Name of the new tensor.
        role : TensorRole, optional
            Role of the new tensor.

        Returns
        -------
        Tensor
            The tensor.
        """
        return Tensor.of(name, {dim: size for dim, size in self.shape.items() if dim not in dims}, role)

    def bytes(self, precision: Precision) -> float:
        """Return the size of the tensor in memory at a precision [byte].

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        float
            Size [byte].
        """
        is_fp32 = self.stays_fp32 and self.role == "activation"
        element_bytes = precision.fp32_activation_bytes if is_fp32 else precision.bytes_of(self.role)
        return float(self.elements * (self.packed_bytes_per_number or element_bytes))


def _local_size(size: DimSize, ways: float) -> DimSize:
    if ways == 1:
        return size
    return math.ceil(size / ways) if isinstance(size, int) else size / ways


def shard_tensors(tensors: tuple[Tensor, ...], ways: Mapping[str, float]) -> tuple[Tensor, ...]:
    """Return the largest local shard of each tensor.

    Parameters
    ----------
    tensors : tuple of Tensor
        The tensors.
    ways : mapping of str to float
        Number of parts of each dim.

    Returns
    -------
    tuple of Tensor
        Share of one rank of each tensor.
    """
    return tuple([t.shard(ways) for t in tensors])


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Sliding window over one dim: out[i] reads in[i·stride + j·dilation − padding] for j < taps.

    ``kernel_dim`` is the kernel dim of a convolution, of size ``taps``.

    Examples
    --------
    >>> SlidingWindow("height", "in_height", "kernel_height", stride=2, padding=3, taps=7).halo
    (3, 2)
    """

    output_dim: str
    input_dim: str
    kernel_dim: str
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    taps: int = 1

    @property
    def _reach(self) -> int:
        return self.dilation * (self.taps - 1)

    @property
    def halo(self) -> tuple[int, int]:
        """Halo rows (below, above) of input that a rank needs from its neighbours under an even split."""
        return self.padding, max(0, self._reach - self.padding - self.stride + 1)

    @property
    def gradient_halo(self) -> tuple[int, int]:
        """Halo rows (below, above) of output gradient that a rank needs from its neighbours in the backward pass."""
        return max(0, (self._reach - self.padding) // self.stride), -(-self.padding // self.stride)


#: For each window: rows that a rank receives from its neighbours, of the source and of the output's gradient.
Halos = tuple[tuple[int, int], ...]


def received_halo_rows(windows: tuple[SlidingWindow, ...], ways: Mapping[str, float]) -> Halos:
    """Count the halo rows that a rank receives from its neighbours; with two ranks, each has one neighbour.

    Parameters
    ----------
    windows : tuple of SlidingWindow
        Windows along divided dims.
    ways : mapping of str to float
        Number of parts of each dim.

    Returns
    -------
    tuple of (int, int)
        For each window, rows received of the input and of the output's gradient.
    """

    def received(rows: tuple[int, int], ranks: float) -> int:
        return 0 if ranks <= 1 else sum(rows) if ranks > 2 else max(rows)

    return tuple(
        (received(w.halo, ways.get(w.output_dim, 1)), received(w.gradient_halo, ways.get(w.output_dim, 1)))
        for w in windows
    )


def halo_size_ratio(tensor: Tensor, rows: Iterable[tuple[str, int]]) -> float:
    """Compute the ratio of a tensor's size with halo rows to the size without.

    Parameters
    ----------
    tensor : Tensor
        The tensor.
    rows : iterable of tuple of (str, int)
        Dims and their extra sizes.

    Returns
    -------
    float
        Ratio, at least 1.
    """
    return math.prod([(tensor.size(dim) + more) / tensor.size(dim) for dim, more in rows])
