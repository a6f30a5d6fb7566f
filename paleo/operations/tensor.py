"""Tensors with named dims, so that a strategy can split them.

Number formats, and what each part of a training state weighs in them.

Sliding windows of convolutions and pools, and the rows of neighbouring ranks that they read where space is split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from paleo.errors import SpecError, near

#: Bytes of one number. tf32 is fp32 in memory; only the multiplication is narrower.
BYTES: dict[str, float] = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1, "fp4": 0.5}

#: How scales of formats below sixteen bits are found. delayed: from the largest values of passes before (Transformer
#: Engine's default); current: from that of the tensor itself, in a pass before; mxfp8: one of a byte for each 32
#: numbers (Open Compute Project, Microscaling Formats, 2023); nvfp4: one of a byte for each 16, and one of the tensor.
Scaling = Literal["delayed", "current", "mxfp8", "nvfp4"]
#: How the cross-entropy of classes is computed (`paleo.layers.base.Choices`).
LossKernels = Literal["fused", "recomputed", "tiled", "upcast", "stepwise"]
#: How query and key are rotated (`paleo.layers.base.Choices`).
Rotation = Literal["fused", "stepwise", "complex", "halves"]
#: Bytes of scales for each number.
_SCALE_BYTES: dict[Scaling, float] = {"delayed": 0.0, "current": 0.0, "mxfp8": 1.0 / 32.0, "nvfp4": 1.0 / 16.0}

Role = Literal["activation", "parameter", "gradient", "statistic", "mask", "index"]


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of each role of a number when training in one dtype.

    Statistics (means, variances, log-sum-exp) are fp32, dropout masks one byte, and indices int64.
    """

    dtype: str
    #: What layers pass on.
    activation: float
    #: What matrix products read.
    operand: float
    #: The copy that forward and backward use.
    parameter: float
    #: The parameter gradients.
    gradient: float
    #: The optimizer's own fp32 copy; 0 where the parameter is already fp32.
    master: float
    #: Each optimizer state.
    state: float = 4.0
    #: A second copy of the gradients, to which a framework adds each of them in a pass of its own, and which it
    #: exchanges, clips and hands to the optimizer.
    accumulator: float = 0.0
    #: The pass that adds a gradient to that copy reads it in the copy's format, cast in a pass before.
    accumulator_cast: bool = False
    #: Weights stay fp32; products read narrow copies that are made for each pass, their gradients are widened again.
    casts: bool = False
    #: Reads and writes of each gradient after every backward pass: unscaling, norms, clipping.
    gradient_accesses: float = 0.0
    #: Those are passes over a flat buffer of each block, not over each tensor.
    flat_gradients: bool = False
    #: Gradients are summed up by the products that make them.
    accumulated: bool = False
    #: Gradients are added to their sums by autograd.
    added: bool = False
    #: Operands below sixteen bits have so many bytes of scales for each number.
    scale_bytes: float = 0.0
    #: The largest value of such operands is found first, in a pass.
    measured_first: bool = False

    @property
    def summed(self) -> float:
        """Bytes of a gradient in the sum that is exchanged, clipped and handed to the optimizer.

        >>> precision("bf16").summed, replace(precision("bf16"), accumulator=4.0).summed
        (2.0, 4.0)
        """
        return self.accumulator or self.gradient

    @property
    def wide(self) -> float:
        """Bytes of an activation that stays at least fp32 whatever the products read."""
        return max(4.0, self.activation)

    @property
    def narrow(self) -> bool:
        """Whether matrix products read a narrower format than layers pass on, so that operands are quantised first."""
        return self.operand < self.activation

    @property
    def sixteen_bits(self) -> Precision:
        """The precision of products whose operands are not quantised but keep the format of activations."""
        return replace(self, operand=self.activation) if self.narrow else self

    def bytes_of(self, role: Role) -> float:
        """Return the bytes of an element of a role.

        Parameters
        ----------
        role : Role
            What the tensor is for.

        Returns
        -------
        float
        """
        match role:
            case "activation":
                return self.activation
            case "parameter":
                return self.parameter
            case "gradient":
                return self.gradient
            case "statistic":
                return 4.0
            case "mask":
                return 1.0
            case "index":
                return 8.0


def precision(dtype: str) -> Precision:
    """Return how one trains in a format by default.

    Sixteen-bit formats keep fp32 masters (Micikevicius et al., ICLR 2018).

    fp8 and fp4 narrow the operands of matrix products with weights inside the repeated blocks; embedding, head,
    attention and everything stored stay bf16 (as in NVIDIA's Transformer Engine and in DeepSeek-V3, 2024, section 3.3).

    Parameters
    ----------
    dtype : str
        Number format.

    Returns
    -------
    Precision

    Raises
    ------
    SpecError
        If there is no such format.

    Examples
    --------
    >>> precision("bf16").master, precision("fp32").master
    (4.0, 0.0)
    """
    if dtype not in BYTES:
        raise SpecError(f"unknown dtype {dtype!r}; {near(dtype, BYTES)}")
    if dtype in ("fp64", "fp32", "tf32"):
        width = float(BYTES[dtype])
        return Precision(dtype, width, width, width, width, 0.0, width)
    if dtype in ("fp16", "bf16"):
        return Precision(dtype, 2.0, 2.0, 2.0, 2.0, 4.0)
    return Precision(dtype, 2.0, float(BYTES[dtype]), 2.0, 2.0, 4.0)


def scaled(formats: Precision, scaling: Scaling, *, fused: bool) -> Precision:
    """Add the scales of narrow operands.

    Parameters
    ----------
    formats : Precision
        Formats of tensors and products.
    scaling : Scaling
        How scales are taken.
    fused : bool
        True where what makes a tensor finds its largest value on the way; not that of NVFP4, which is taken of rotated
        numbers (Transformer Engine; torch.compile).

    Returns
    -------
    Precision
        The formats with them.
    """
    measured_first = scaling == "nvfp4" or (scaling == "current" and not fused)
    return replace(formats, scale_bytes=_SCALE_BYTES[scaling], measured_first=measured_first)


def autocast(formats: Precision) -> Precision:
    """Return the formats with fp32 weights that are cast for each pass.

    So do the automatic mixed precision of TensorFlow (a rewrite of the graph) and of PyTorch (``autocast``): 16 bytes a
    parameter with Adam either way, but gradients are summed, and exchanged, in fp32.

    Parameters
    ----------
    formats : Precision
        Formats of tensors and products.

    Returns
    -------
    Precision
        They take the place of narrow weights with fp32 masters.

    Examples
    --------
    >>> both = precision("fp16"), autocast(precision("fp16"))
    >>> [one.parameter + one.gradient + one.master + 2 * one.state for one in both]
    [16.0, 16.0]
    """
    if not formats.master:
        return formats
    return replace(formats, parameter=4.0, gradient=4.0, master=0.0, casts=True)


Size = int | float


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor by name (the identity of its storage: views share it), dims and sizes.

    ``grad`` is False for what needs no gradient: graph inputs, masks, indices, frozen weights. ``wide`` activations
    stay fp32 under mixed precision, and so does what element-wise passes make of them. ``packed`` weights are stored in
    so many bytes each, whatever the run's format; 0: in that.

    >>> x = Tensor("x", ("batch", "features"), (4, 8))
    >>> x.elements, x.size("features"), x.split({"batch": 2}).sizes
    (32, 8, (2, 8))
    """

    name: str
    dims: tuple[str, ...]
    sizes: tuple[Size, ...]
    role: Role = "activation"
    grad: bool = True
    wide: bool = False
    packed: float = 0.0

    @property
    def elements(self) -> Size:
        return math.prod(self.sizes)

    def size(self, dim: str) -> Size:
        """Return the extent of a dim.

        Parameters
        ----------
        dim : str
            Name of the dim.

        Returns
        -------
        Size
        """
        return self.sizes[self.dims.index(dim)]

    def split(self, ways: Mapping[str, float]) -> Tensor:
        """Return the largest local shard.

        Parameters
        ----------
        ways : mapping of str to float
            Parts into which each dim is divided.

        Returns
        -------
        Tensor
            Whole sizes stay whole numbers.
        """
        if ways.keys().isdisjoint(self.dims):
            return self
        pairs = zip(self.dims, self.sizes, strict=True)
        sizes = tuple([_share(n, ways[dim]) if dim in ways else n for dim, n in pairs])
        return Tensor(self.name, self.dims, sizes, self.role, self.grad, self.wide, self.packed)

    def renamed(self, names: Mapping[str, str]) -> Tensor:
        """Return the tensor with other names of dims.

        Parameters
        ----------
        names : mapping of str to str
            Old names to new ones.

        Returns
        -------
        Tensor
        """
        return replace(self, dims=tuple(names.get(dim, dim) for dim in self.dims))

    def like(self, name: str, *, role: Role | None = None) -> Tensor:
        """Return a new tensor of the same shape.

        Parameters
        ----------
        name : str
            Its name.
        role : Role, optional
            Its role; the same where None.

        Returns
        -------
        Tensor
        """
        return replace(self, name=name, role=role or self.role, grad=True)

    def reshaped(self, dims: Mapping[str, Size], *, name: str | None = None) -> Tensor:
        """Return the tensor with other dims.

        Parameters
        ----------
        dims : mapping of str to Size
            Names and extents.
        name : str, optional
            Another name for it.

        Returns
        -------
        Tensor
        """
        return replace(self, name=name or self.name, dims=tuple(dims), sizes=tuple(dims.values()))

    def without(self, *dims: str, name: str, role: Role = "activation") -> Tensor:
        """Return the tensor that remains when dims are reduced away.

        Parameters
        ----------
        *dims : str
            Names of the dims.
        name : str
            Name of the new tensor.
        role : Role, optional
            Its role.

        Returns
        -------
        Tensor
            The tensor.
        """
        kept = {dim: n for dim, n in zip(self.dims, self.sizes, strict=True) if dim not in dims}
        return Tensor(name, tuple(kept), tuple(kept.values()), role)

    def bytes(self, precision: Precision) -> float:
        """Return the bytes of the tensor.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        float
        """
        element_bytes = precision.wide if self.wide and self.role == "activation" else precision.bytes_of(self.role)
        return float(self.elements * (self.packed or element_bytes))


def _share(size: Size, ways: float) -> Size:
    if ways == 1:
        return size
    return math.ceil(size / ways) if isinstance(size, int) else size / ways


def split_all(tensors: tuple[Tensor, ...], ways: Mapping[str, float]) -> tuple[Tensor, ...]:
    """Return the largest local shard of each tensor.

    Parameters
    ----------
    tensors : tuple of Tensor
        The tensors.
    ways : mapping of str to float
        Parts into which each dim is divided.

    Returns
    -------
    tuple of Tensor
    """
    return tuple([t.split(ways) for t in tensors])


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding window over one dim: out[i] reads in[i·stride + j·dilation − padding] for j < taps.

    ``kernel`` is the dim of a convolution's taps.

    Examples
    --------
    >>> Window("height", "in_height", "kernel_height", stride=2, padding=3, taps=7).halo
    (3, 2)
    """

    out: str
    source: str
    kernel: str
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    taps: int = 1

    @property
    def _reach(self) -> int:
        return self.dilation * (self.taps - 1)

    @property
    def halo(self) -> tuple[int, int]:
        """Rows of the source below and above a rank's share that its own outputs read, where both are cut evenly."""
        return self.padding, max(0, self._reach - self.padding - self.stride + 1)

    @property
    def gradient_halo(self) -> tuple[int, int]:
        """Outputs of the neighbours below and above that read the rank's own rows: their gradients are needed."""
        return max(0, (self._reach - self.padding) // self.stride), -(-self.padding // self.stride)


#: Rows of neighbours that a rank reads beside its own share, for each window: of the source, and of the output's
#: gradient.
Halos = tuple[tuple[int, int], ...]


def halos(windows: tuple[Window, ...], ways: Mapping[str, float]) -> Halos:
    """Count the rows that a rank receives from both neighbours; of two ranks each has one.

    Parameters
    ----------
    windows : tuple of Window
        Windows along divided dims.
    ways : mapping of str to float
        Parts into which each dim is divided.

    Returns
    -------
    Halos
    """

    def received(rows: tuple[int, int], ranks: float) -> int:
        return 0 if ranks <= 1 else sum(rows) if ranks > 2 else max(rows)

    return tuple((received(w.halo, ways.get(w.out, 1)), received(w.gradient_halo, ways.get(w.out, 1))) for w in windows)


def with_rows(tensor: Tensor, rows: Iterable[tuple[str, int]]) -> float:
    """Return the elements of a tensor with extra rows over those without.

    Parameters
    ----------
    tensor : Tensor
        The tensor.
    rows : iterable of tuple of (str, int)
        Dims and their extra extents.

    Returns
    -------
    float
        At least 1.
    """
    return math.prod([(tensor.size(dim) + more) / tensor.size(dim) for dim, more in rows])
