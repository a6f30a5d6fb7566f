"""Number formats, and what each part of a training state weighs in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from paleo.errors import SpecError, near

#: Bytes of one number. tf32 is fp32 in memory; only the multiplication is narrower.
BYTES: dict[str, float] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "int8": 1,
    "fp4": 0.5,
}

Role = Literal["activation", "parameter", "gradient", "statistic", "mask", "index"]


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of each role of a number when training in one dtype.

    ``activation`` is what layers pass on, ``operand`` what matrix products read, ``parameter`` the copy that forward
    and backward use, ``gradient`` the parameter gradients, ``master`` the optimizer's own fp32 copy (0 where the
    parameter is already fp32), ``state`` each optimizer state, ``accumulator`` a second copy of the gradients in which
    a framework sums them (kept, not exchanged). Statistics (means, variances, log-sum-exp) are fp32,
    dropout masks one byte, indices int64. With ``casts`` weights stay fp32, and products read narrow copies that are
    made for each pass; their gradients are widened again. ``gradient_accesses`` are reads and writes of each gradient
    after every backward pass: unscaling, norms, clipping, accumulation.
    """

    dtype: str
    activation: float
    operand: float
    parameter: float
    gradient: float
    master: float
    state: float = 4.0
    accumulator: float = 0.0
    casts: bool = False
    gradient_accesses: float = 0.0
    accumulated: bool = False

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
        """The same for products that stay in the format that layers pass on."""
        return replace(self, operand=self.activation) if self.narrow else self

    def bytes_of(self, role: Role) -> float:
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
    """How one trains in ``dtype`` by default: sixteen-bit formats keep fp32 masters (Micikevicius et al., ICLR 2018).

    fp8 and fp4 narrow the operands of matrix products with weights inside the repeated blocks; embedding, head,
    attention and everything stored stay bf16 (as in NVIDIA's Transformer Engine and in DeepSeek-V3, 2024, section 3.3).

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


def autocast(formats: Precision) -> Precision:
    """The same with fp32 weights that are cast for each pass, instead of narrow weights with fp32 masters.

    So do the automatic mixed precision of TensorFlow (a rewrite of the graph) and of PyTorch (``autocast``): 16 bytes a
    parameter with Adam either way, but gradients are summed, and exchanged, in fp32.

    >>> both = precision("fp16"), autocast(precision("fp16"))
    >>> [one.parameter + one.gradient + one.master + 2 * one.state for one in both]
    [16.0, 16.0]
    """
    if not formats.master:
        return formats
    return replace(formats, parameter=4.0, gradient=4.0, master=0.0, casts=True)
