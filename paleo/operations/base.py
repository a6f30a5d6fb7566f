"""What every operation offers. A layer states operations; an operation becomes kernels.

An *operation* (``Contraction``, ``MemoryPass``, ``FusedAttention``, ``Recurrence``) names the dims of its tensors, so
that a strategy can split them; its backward operations are derived, not written in the layers.

Kinds of passes over memory, with the traits that strategies, fusion and prices go by.

A pass names its kind (``MemoryPass.operation``); a name that is not registered is an error. A layer with a kind of its
own registers that beside its code, with `add_kind`.

Kernels: the FLOP, bytes and shape of one launch, with no clock in sight.

FLOP are those of contractions, 1 multiply-add = 2 FLOP (the convention of MFU and of torch's flop counter); the
arithmetic of element-wise passes is kept apart as ``vector_flops``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paleo.operations.tensor import Tensor
from paleo.registry import Registry

if TYPE_CHECKING:
    from paleo.operations.tensor import Precision


@dataclass(frozen=True, slots=True)
class Kind:
    """What all passes of one name have in common.

    ``price`` is the family of the calibration that prices it. ``pointwise``: it touches each element on its own, so
    that a compiler may merge it with its neighbours. ``moves``: it only moves elements, so that sums which are not
    complete yet go through. ``routes``: it may send tokens to the ranks of their experts and back. ``merges_dims``:
    dims of its input that its output lacks lie inside others and cannot be divided. ``norm``: it subtracts a mean and
    divides by a deviation; where its rows are divided it exchanges statistics backward, too. ``row_statistics``:
    numbers for each row that ranks exchange where rows are divided. ``two_sweeps``: one over its input for statistics,
    then one over everything, which passes after it may join. ``reduces``: it sums dims up. ``inference`` is the kind
    that stands in for it where nothing is trained. ``free_in_paleo``: the original Paleo takes its time for zero (Qi et
    al., ICLR 2017).
    """

    name: str
    meaning: str
    price: str = "memory.elementwise"
    pointwise: bool = False
    moves: bool = False
    routes: bool = False
    merges_dims: bool = False
    norm: bool = False
    row_statistics: int = 2
    two_sweeps: bool = False
    reduces: bool = False
    inference: str | None = None
    free_in_paleo: bool = False


KINDS: Registry[Kind] = Registry("kind of pass")


def add_kind(kind: Kind) -> Kind:
    """Register a kind under its own name."""
    return KINDS.register(kind.name)(kind)


add_kind(Kind("elementwise", "a function of each element", pointwise=True, free_in_paleo=True))
add_kind(Kind("eager", "a function of each element in a kernel of its own, whatever compilers do"))
add_kind(Kind("dropout", "zeroes a share of the elements at random", pointwise=True))
add_kind(Kind("copy", "the same elements elsewhere", moves=True, merges_dims=True, free_in_paleo=True))
add_kind(Kind("gather", "rows of a table, or tokens on their way to experts", moves=True, routes=True))
add_kind(Kind("scatter", "tokens on their way back from experts", moves=True, routes=True))
add_kind(Kind("reduce", "sums, means or maxima along dims", reduces=True, free_in_paleo=True))
add_kind(Kind("pool", "one number for each position of a sliding window"))
add_kind(Kind("softmax", "softmax along rows", price="memory.softmax", row_statistics=3, free_in_paleo=True))
add_kind(Kind("norm", "normalisation of rows", price="memory.layernorm", norm=True, free_in_paleo=True))
add_kind(
    Kind(
        "batch_norm",
        "normalisation of channels by the statistics of a batch",
        norm=True,
        two_sweeps=True,
        inference="elementwise",
        free_in_paleo=True,
    )
)
add_kind(Kind("rope", "rotary position embedding", price="memory.rope", free_in_paleo=True))
add_kind(Kind("optimizer", "the update of parameters"))


Phase = Literal["forward", "backward", "backward_weight", "update"]


Family = Literal["gemm", "conv", "attention", "memory", "rnn"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch on one device: what it computes and moves, and the shape that its price depends on.

    ``shape`` holds the family's own numbers: gemm (m, n, k, batch), conv (n, c, h, w, k, …), attention (batch, heads,
    …), memory (rows, columns). ``operation`` is the variant within the family. Counts are floats: a rank's share may be
    uneven.
    """

    name: str
    family: Family
    operation: str
    phase: Phase
    flops: float
    vector_flops: float
    bytes_read: float
    bytes_written: float
    shape: Mapping[str, float] = field(default_factory=dict)
    #: Calls of the host: below 1 for the kernels of one operation's backward pass, which come out of one call of the
    #: framework; above 1 where many small launches, one a tensor, are counted as one kernel.
    calls: float = 1.0
    #: Experts of a mixture that it works for: a product of each, or tokens on their way to them and back.
    experts: float = 0.0

    def __post_init__(self) -> None:
        if self.family == "memory":
            _ = self.kind

    @property
    def kind(self) -> Kind:
        """The kind of a pass over memory; SpecError, with the nearest names, where it is not registered."""
        return KINDS[self.operation]

    @property
    def bytes(self) -> float:
        return self.bytes_read + self.bytes_written


def flat_pass(
    name: str,
    operation: str,
    phase: Phase,
    count: float,
    read: float,
    written: float,
    *,
    flops: float | None = None,
    calls: float = 1.0,
) -> Kernel:
    """One pass over ``count`` elements in no rows, of ``read`` and ``written`` bytes; ``flops`` of ordinary cores, one
    an element where nothing else is said."""
    work = count if flops is None else flops
    return Kernel(name, "memory", operation, phase, 0.0, work, read, written, {"rows": count, "columns": 1.0}, calls)


def accumulation(name: str, count: float, size: float) -> Kernel:
    """A gradient of ``count`` elements, ``size`` bytes, added to one that is there: two are read, one is written."""
    return flat_pass(f"{name}.accumulate", "elementwise", "backward", count, 2.0 * size, size)


#: Marks the operations of attention between its projections, those that selective recomputation runs again (Korthikanti
#: et al., 2022).
ATTENTION_CORE = ".core"


class Operation(Protocol):
    """What every operation offers to the graph, to strategies and to lowering."""

    @property
    def name(self) -> str: ...

    @property
    def reads(self) -> tuple[Tensor, ...]: ...

    @property
    def out(self) -> Tensor: ...

    @property
    def saves(self) -> tuple[Tensor, ...]:
        """Tensors that must live until the backward pass."""

    @property
    def private_dims(self) -> frozenset[str]:
        """Dims whose split is no partial sum: windowed dims, and those whose statistics stay local by choice."""

    def split(self, ways: Mapping[str, float]) -> Operation:
        """The same operation on one rank when dims are divided."""

    def forward(self, precision: Precision) -> tuple[Kernel, ...]: ...

    def backward(self, precision: Precision) -> tuple[Kernel, ...]: ...


def model_flops(operation: Operation, precision: Precision) -> tuple[float, float]:
    """FLOP that the network asks for, forward and backward: not what a kernel computes again, nor what a mask hides."""
    forward, backward = getattr(operation, "useful", (1.0, 1.0))
    return (
        forward * sum(kernel.flops for kernel in operation.forward(precision)),
        backward * sum(kernel.flops for kernel in operation.backward(precision)),
    )


def is_core(operation: Operation) -> bool:
    """Whether an operation belongs to the core of attention: scores, softmax, dropout, weighted sum."""
    return ATTENTION_CORE in operation.name


def parameters_of(operations: Iterable[Operation]) -> dict[str, Tensor]:
    """The parameters that operations read, by name; a tied weight appears once."""
    return {t.name: t for op in operations for t in op.reads if t.role == "parameter"}


def with_parameters_of(operation: Operation, prefix: str, replacement: str) -> Operation:
    """The operation with the parameters whose names start with ``own`` replaced by those that start with ``other``."""

    def shared(tensor: Tensor) -> Tensor:
        if tensor.role != "parameter" or not tensor.name.startswith(prefix):
            return tensor
        return replace(tensor, name=replacement + tensor.name.removeprefix(prefix))

    return with_tensors(operation, shared)


def with_tensors(operation: Operation, change: Callable[[Tensor], Tensor]) -> Operation:
    """The operation with each of its tensors changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if is_dataclass(value) and hasattr(value, "forward"):
            return with_tensors(value, change)  # type: ignore[arg-type]
        return tuple(map(changed, value)) if isinstance(value, tuple) else value

    result: Operation = replace(operation, **{f.name: changed(getattr(operation, f.name)) for f in fields(operation)})  # type: ignore
    return result
