"""Operations of a network (protocol, memory passes), the kernels that they launch, and optimizers.

A layer states operations. An *operation* (``Contraction``, ``MemoryPass``, ``FusedAttention``, ``Recurrence``) names
the dims of its tensors, so that a strategy can split them. Its backward operations are derived from it; layers do not
write them. It becomes kernels, which hold the FLOP, bytes and shape of one launch and no time. FLOP are those of
contractions, 1 multiply-add = 2 FLOP (the convention of MFU and of torch's flop counter). The arithmetic of
element-wise passes is counted separately, as ``vector_flops``.

A memory pass (element-wise work, norms, softmax, pooling, gathers) names its kind (``MemoryPass.operation``). The
traits of the kind decide how it is split, fused and priced; a name that is not registered is an error. A layer that
needs a new kind registers it in its module with `add_operation_kind`.

An optimizer is data. Its element-wise update is a memory pass: it reads the gradient, the weight (the fp32 master if
there is one) and the optimizer states, and writes weight, states and, in mixed precision, the narrow copy. Optimizers
with matrix products in the update (Muon, Shampoo) have a second rule for weight matrices; all other weights follow the
element-wise rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from paleo.operations.tensor import (
    Halos,
    Precision,
    SlidingWindow,
    Tensor,
    halo_size_ratio,
    received_halo_rows,
    shard_tensors,
)
from paleo.registry import Registry


@dataclass(frozen=True, slots=True)
class OperationKind:
    """Properties shared by all memory-bound operations of one name, such as ``softmax`` or ``gelu``."""

    name: str
    description: str
    #: Calibration family whose formula gives its time.
    calibration_family: str = "memory.elementwise"
    #: Each output element depends on one element of each input, so that a compiler may fuse it with its neighbours.
    is_pointwise: bool = False
    #: It only moves elements, so that it can run on partial sums before their all-reduce.
    only_moves_data: bool = False
    #: Under expert parallelism it sends tokens to the ranks of their experts and back.
    routes_tokens: bool = False
    #: Input dims absent from the output are merged into other dims and cannot be split.
    merges_dims: bool = False
    #: It normalises by mean and deviation. If rows are split over ranks, statistics are exchanged backward, too.
    is_norm: bool = False
    #: Numbers per row that ranks exchange if rows are split over them.
    statistics_per_row: int = 2
    #: It reads its input twice: once for statistics, once to apply them. Later passes can be fused into the second.
    reads_input_twice: bool = False
    #: It reduces dims.
    reduces_dims: bool = False
    #: The number of output rows depends on values, so that the host may have to wait for the device.
    has_data_dependent_rows: bool = False
    #: Its data is copied between host and device.
    copies_through_host: bool = False
    #: Kind that replaces it in inference.
    inference_kind: str | None = None
    #: The original Paleo assumes that it takes no time (Qi et al., ICLR 2017).
    is_free_in_original_paleo: bool = False


OPERATION_KINDS: Registry[OperationKind] = Registry("kind of pass")


def add_operation_kind(kind: OperationKind) -> OperationKind:
    """Register a kind of memory-bound operation under its own name.

    Parameters
    ----------
    kind : OperationKind
        Name and traits of the kind.

    Returns
    -------
    OperationKind
        The registered kind.
    """
    return OPERATION_KINDS.register(kind.name)(kind)


for _kind in (
    OperationKind("elementwise", "a function of each element", is_pointwise=True, is_free_in_original_paleo=True),
    OperationKind("eager", "a function of each element in a kernel of its own, whatever compilers do"),
    OperationKind("dropout", "zeroes a share of the elements at random", is_pointwise=True),
    OperationKind("copy", "the same elements elsewhere", only_moves_data=True, merges_dims=True,
                  is_free_in_original_paleo=True),
    OperationKind("gather", "rows of a table, or tokens on their way to experts", only_moves_data=True,
        routes_tokens=True),
    OperationKind("scatter", "tokens on their way back from experts", only_moves_data=True, routes_tokens=True),
    OperationKind("reduce", "sums, means or maxima along dims", reduces_dims=True, is_free_in_original_paleo=True),
    OperationKind("select", "rows that are kept by their values", reduces_dims=True, has_data_dependent_rows=True),
    OperationKind("pool", "one number for each position of a sliding window"),
    OperationKind("softmax", "softmax along rows", calibration_family="memory.softmax", statistics_per_row=3,
                  is_free_in_original_paleo=True),
    OperationKind("norm", "normalisation of rows", calibration_family="memory.layernorm", is_norm=True,
                  is_free_in_original_paleo=True),
    OperationKind("batch_norm", "normalisation of channels by the statistics of a batch", is_norm=True,
                  reads_input_twice=True, inference_kind="elementwise", is_free_in_original_paleo=True),
    OperationKind("feed", "states that the host copies out of one step and into the next", copies_through_host=True),
    OperationKind("rope", "rotary position embedding", calibration_family="memory.rope",
        is_free_in_original_paleo=True),
    OperationKind("optimizer", "the update of parameters"),
):  # fmt: skip
    add_operation_kind(_kind)


Phase = Literal["forward", "backward", "backward_weight", "update"]


Family = Literal["gemm", "conv", "attention", "memory", "rnn", "scan"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel launch on one device: FLOP, bytes read and written, and the shape on which its time depends."""

    name: str
    family: Family
    operation: str
    phase: Phase
    flops: float
    vector_flops: float
    bytes_read: float
    bytes_written: float
    shape: Mapping[str, float] = field(default_factory=dict)
    #: Calls of the host for this kernel. Below 1 if one call of the framework launches several kernels, as in a
    #: backward pass; above 1 if many small launches, one per tensor, are counted as one kernel.
    host_calls: float = 1.0
    #: Experts of a mixture that the kernel serves: it multiplies by the weights of each, or routes their tokens.
    expert_count: float = 0.0

    def __post_init__(self) -> None:
        if self.family == "memory":
            _ = self.kind

    @property
    def kind(self) -> OperationKind:
        """Kind of the memory-bound operation. Raises SpecError, with the nearest names, for an unregistered kind."""
        return OPERATION_KINDS[self.operation]

    @property
    def bytes(self) -> float:
        return self.bytes_read + self.bytes_written


def elementwise_kernel(
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
    """Build the kernel of an element-wise operation over ``count`` elements.

    Parameters
    ----------
    name : str
        Name of the operation, which its kernels share.
    operation : str
        Kind of the operation.
    phase : Phase
        Forward, backward or update.
    count : float
        Number of elements.
    read, written : float
        Bytes read and written by the kernel [byte].
    flops : float, optional
        FLOP of vector cores; by default one per element.
    calls : float, default 1.0
        Calls of the host.

    Returns
    -------
    Kernel
        Memory-bound kernel with its FLOP and bytes.
    """
    work = count if flops is None else flops
    return Kernel(name, "memory", operation, phase, 0.0, work, read, written, {"rows": count, "columns": 1.0}, calls)


def gradient_accumulation_kernel(name: str, count: float, size: float) -> Kernel:
    """Build the kernel that adds a gradient to an existing one: two reads, one write.

    Parameters
    ----------
    name : str
        Name of the operation, which its kernels share.
    count : float
        Elements of the gradient.
    size : float
        Size of the gradient [byte].

    Returns
    -------
    Kernel
        Memory-bound kernel with its FLOP and bytes.
    """
    return elementwise_kernel(f"{name}.accumulate", "elementwise", "backward", count, 2.0 * size, size)


#: Part of the names of attention's operations between its projections, which selective recomputation runs again
#: (Korthikanti et al., 2022).
ATTENTION_CORE_NAME_INFIX = ".core"
#: Part of the names of operations of shared experts, which process every token.
SHARED_EXPERTS_NAME_INFIX = ".shared."


class Operation(Protocol):
    """Protocol of an operation (GEMM, attention, norm, …): its tensors, its sharding, and its kernels."""

    @property
    def name(self) -> str: ...

    @property
    def read_tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def out(self) -> Tensor: ...

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """Activations that the backward pass needs."""

    @property
    def independent_dims(self) -> frozenset[str]:
        """Dims that can be split without partial sums in the output, such as windowed dims and rows of softmax."""

    def shard(self, ways: Mapping[str, float]) -> Operation:
        """Return one rank's shard of the operation.

        Parameters
        ----------
        ways : mapping of str to float
            Number of parts of each dim.

        Returns
        -------
        Operation
            Share of one rank.
        """

    def forward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return the kernels of the forward pass, with FLOP, bytes and shapes.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            In the order in which they run.
        """

    def backward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return the kernels of the backward pass, with FLOP, bytes and shapes.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            In the order in which they run.
        """


def model_flops(operation: Operation, precision: Precision) -> tuple[float, float]:
    """Count the FLOP that the network asks for, without recomputation and without masked scores.

    Parameters
    ----------
    operation : Operation
        The operation.
    precision : Precision
        Formats of tensors and products.

    Returns
    -------
    tuple of (float, float)
        Forward and backward.
    """
    if isinstance(operation, MemoryPass):
        return 0.0, 0.0
    forward, backward = getattr(operation, "model_flop_shares", (1.0, 1.0))
    return (
        forward * sum(kernel.flops for kernel in operation.forward_kernels(precision)),
        backward * sum(kernel.flops for kernel in operation.backward_kernels(precision)),
    )


def is_attention_core(operation: Operation) -> bool:
    """Return True if an operation belongs to the core of attention: scores, softmax, dropout, weighted sum.

    Parameters
    ----------
    operation : Operation
        The operation.

    Returns
    -------
    bool
        True for a part of the core of attention.
    """
    return ATTENTION_CORE_NAME_INFIX in operation.name


def parameters_by_name(operations: Iterable[Operation]) -> dict[str, Tensor]:
    """Collect the parameters that operations read; a tied weight appears once.

    Parameters
    ----------
    operations : iterable of Operation
        The operations.

    Returns
    -------
    dict of str to Tensor
        By name.
    """
    return {t.name: t for op in operations for t in op.read_tensors if t.role == "parameter"}


def with_renamed_parameters(operation: Operation, prefix: str, replacement: str) -> Operation:
    """Rename the parameters of an operation, so that it shares the weights of another layer.

    Parameters
    ----------
    operation : Operation
        The operation.
    prefix : str
        Prefix of the names to replace.
    replacement : str
        Prefix of the new names.

    Returns
    -------
    Operation
        The operation with renamed parameters.
    """

    def shared(tensor: Tensor) -> Tensor:
        if tensor.role != "parameter" or not tensor.name.startswith(prefix):
            return tensor
        return replace(tensor, name=replacement + tensor.name.removeprefix(prefix))

    return map_tensors(operation, shared)


def map_tensors(operation: Operation, change: Callable[[Tensor], Tensor]) -> Operation:
    """Apply a function to each tensor of an operation, including the tensors of nested operations.

    Parameters
    ----------
    operation : Operation
        The operation.
    change : callable
        Maps a tensor to its replacement.

    Returns
    -------
    Operation
        The operation with the new tensors.
    """

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if is_dataclass(value) and hasattr(value, "forward_kernels"):
            return map_tensors(value, change)  # type: ignore[arg-type]
        return tuple(map(changed, value)) if isinstance(value, tuple) else value

    result: Operation = replace(operation, **{f.name: changed(getattr(operation, f.name)) for f in fields(operation)})  # type: ignore
    return result


@dataclass(frozen=True, slots=True)
class MemoryPass:
    """Memory-bound operation: element-wise work, norm, softmax, pooling or gather; bytes moved determine the time."""

    name: str
    operation: str
    inputs: tuple[Tensor, ...]
    out: Tensor
    parameters: tuple[Tensor, ...] = ()
    #: Activations that it saves for its backward pass.
    saved: tuple[Tensor, ...] = ()
    flops_per_element: float = 1.0
    #: How its backward pass is counted. derived: one pass reads the gradient of ``out`` and the saved tensors, and
    #: writes the gradient of each input. free: the gradients are views (add, slices). by input: each input has a pass
    #: over the gradient of ``out`` and the other inputs, followed by a sum if the input was broadcast (products).
    backward_rule: Literal["derived", "free", "by input"] = "derived"
    #: Dims that make up a row of softmax or norms. If they are split over ranks, its statistics need an all-reduce.
    reduced_dims: tuple[str, ...] = ()
    #: Statistics cover only the samples of one replica (batch normalisation).
    has_per_replica_statistics: bool = False
    #: Rows of a table read per row of ``out`` (embedding). 0: the whole table is read.
    table_rows_per_output: int = 0
    #: Sliding windows of a pool.
    windows: tuple[SlidingWindow, ...] = ()
    halos: Halos = ()
    #: It commutes with addition, so that it can run on partial sums before their all-reduce.
    commutes_with_addition: bool = False
    #: It runs after the backward pass, so that its output does not add to the peak of memory.
    runs_after_backward: bool = False
    #: It is fused with the product that writes its input, tile by tile, so that the input never exists in memory.
    fused_with_product: bool = False
    #: Calls of the host, forward and backward.
    host_calls: tuple[float, float] = (1.0, 1.0)
    #: Temporary tensors alive at once, each as large as the saved activations; set where there are more than an old
    #: and a new gradient. ``temporary_tensor_count_if_split`` holds if a dim of ``reduced_dims`` is split over ranks.
    temporary_tensor_count: int = 0
    temporary_tensor_count_if_split: int = 0
    #: Factor on the bytes of its backward pass for code that takes several passes where one would do.
    backward_traffic_factor: float = 1.0

    def __post_init__(self) -> None:
        _ = self.kind

    @property
    def kind(self) -> OperationKind:
        """Traits of the operation's kind, such as softmax. Raises SpecError if the kind is not registered."""
        return OPERATION_KINDS[self.operation]

    @property
    def read_tensors(self) -> tuple[Tensor, ...]:
        return self.inputs + self.parameters

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.saved

    @property
    def independent_dims(self) -> frozenset[str]:
        return frozenset(self.reduced_dims) | {window.output_dim for window in self.windows}

    def shard(self, ways: Mapping[str, float]) -> MemoryPass:
        """Return one rank's shard of the operation.

        Parameters
        ----------
        ways : mapping of str to float
            Number of parts of each dim.

        Returns
        -------
        MemoryPass
            Share of one rank.
        """
        tensors = self.inputs, (self.out,), self.parameters, self.saved
        inputs, (out,), parameters, keeps = (shard_tensors(each, ways) for each in tensors)
        divided = any(ways.get(dim, 1.0) > 1.0 for dim in self.reduced_dims)
        halos = received_halo_rows(self.windows, ways)
        count = self.temporary_tensor_count_if_split if divided else self.temporary_tensor_count
        return replace(
            self, inputs=inputs, out=out, parameters=parameters, saved=keeps, halos=halos, temporary_tensor_count=count
        )

    def forward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return the kernels of the forward pass, with FLOP, bytes and shapes.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            One kernel.
        """
        new = tuple(t for t in self.saved if t.name not in {u.name for u in (*self.inputs, self.out)})
        return (self._kernel("forward", self.inputs, (self.out, *new), precision),)

    def backward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return the kernels of the backward pass, which follow from the inputs and the saved tensors.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            Memory-bound kernels; empty if no gradient is needed.
        """
        targets = tuple(t for t in self.inputs if t.needs_gradient)
        learned = tuple(t for t in self.parameters if t.needs_gradient)
        if self.backward_rule == "free" or not (targets or learned):
            return ()
        if self.backward_rule == "by input":
            return tuple(kernel for target in targets for kernel in self._gradient(target, precision))
        kept = tuple(t for t in self.saved if t.name != self.out.name or t.role == "activation")
        kernel = self._kernel("backward", (self.out, *kept), targets, precision)
        if (factor := self.backward_traffic_factor) != 1.0:
            kernel = replace(kernel, bytes_read=kernel.bytes_read * factor, bytes_written=kernel.bytes_written * factor)
        if not learned:
            return (kernel,)
        gradients = sum(self._table_elements(t) for t in learned) * precision.gradient_bytes
        return (replace(kernel, bytes_written=kernel.bytes_written + gradients),)

    def _gradient(self, target: Tensor, precision: Precision) -> tuple[Kernel, ...]:
        """Build the backward kernels for one factor of an element-wise product.

        A second kernel sums over the dims along which the factor was broadcast.
        """
        other_operands = tuple(t for t in self.saved if t.name != target.name)
        product = self._kernel("backward", (self.out, *other_operands), (self.out,), precision)
        if target.elements == self.out.elements:
            return (product,)
        summed = self._kernel("backward", (self.out,), (target,), precision)
        return product, replace(summed, operation="reduce")

    def _kernel(
        self, phase: Phase, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], precision: Precision
    ) -> Kernel:
        table = sum([self._table_elements(t) for t in self.parameters]) * precision.parameter_bytes
        largest = max([t.elements for t in (*reads, *writes)], default=0)
        row = math.prod([self.inputs[0].size(d) for d in self.reduced_dims if d in self.inputs[0].dims])
        channels, samples = self._layout
        flops, rows = float(self.flops_per_element * largest), float(largest / max(row, 1))
        read = sum([t.bytes(precision) * self._halo_factor(t, phase) for t in reads]) + table
        written = sum([t.bytes(precision) for t in writes])
        shape = {"rows": rows, "columns": float(row), "channels": channels, "samples": samples}
        calls = self.host_calls[phase != "forward"]
        return Kernel(
            self.name, "memory", self.operation, phase, 0.0, flops, read, written, shape, calls, self._experts
        )

    @property
    def _layout(self) -> tuple[float, float]:
        """Memory layout of the pass: channels (or size of the last dim) and samples of the largest tensor."""
        tensor = max((*self.inputs, self.out), key=lambda each: each.elements)
        channels = tensor.size("channels") if "channels" in tensor.dims else tensor.sizes[-1] if tensor.sizes else 1
        return float(channels), float(tensor.size("batch") if "batch" in tensor.dims else 1)

    @property
    def _experts(self) -> float:
        """Number of experts to which a dispatch sends tokens, or from which a combine takes them; 0 otherwise."""
        sent = [t for t in (*self.inputs, self.out) if "capacity" in t.dims]
        return max(float(tensor.size("experts")) for tensor in sent) if sent and self.kind.routes_tokens else 0.0

    def _halo_factor(self, tensor: Tensor, phase: Phase) -> float:
        """Compute the ratio of rows that a pooling reads, halos of neighbouring ranks included, to the rank's rows."""
        if not self.windows:
            return 1.0
        pairs = zip(self.windows, self.halos, strict=False)
        return halo_size_ratio(tensor, [(w.output_dim, rows[phase == "backward"]) for w, rows in pairs])

    def _table_elements(self, table: Tensor) -> float:
        rows = self.table_rows_per_output
        return float(min(table.elements, rows * self.out.elements) if rows else table.elements)


@dataclass(frozen=True, slots=True)
class RecomputedFusedChain:
    """Chain of operations in one kernel that saves only its inputs, such as a selective scan (Mamba-2).

    The backward kernel first recomputes the chain. ``unsplit_dims`` cannot be split, as their entries are computed in
    sequence. Dims that appear only in ``operations`` are internal to the kernel: no strategy splits them.

    ``kernel_name`` is the calibrated scan kernel that times the chain. Its sizes are read from the state tensor of the
    chain: the last output whose name ends in ``.state``, with dims (batch, chunks, heads…, rows, columns).
    """

    name: str
    inputs: tuple[Tensor, ...]
    out: Tensor
    operations: tuple[Operation, ...]
    kernel_name: str
    unsplit_dims: frozenset[str] = frozenset()

    @property
    def read_tensors(self) -> tuple[Tensor, ...]:
        return self.inputs

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        trained = any(tensor.needs_gradient for tensor in self.inputs)
        return tuple(tensor for tensor in self.inputs if trained and tensor.role != "parameter")

    @property
    def independent_dims(self) -> frozenset[str]:
        return frozenset()

    @property
    def model_flop_shares(self) -> tuple[float, float]:
        """Shares of the kernel's forward and backward FLOP that count as model FLOP (MFU).

        One of three parts of the backward pass recomputes the forward pass.
        """
        return 1.0, 2.0 / 3.0

    def shard(self, ways: Mapping[str, float]) -> RecomputedFusedChain:
        """Return one rank's shard of the chain.

        Parameters
        ----------
        ways : mapping of str to float
            Number of parts of each dim.

        Returns
        -------
        RecomputedFusedChain
            Share of one rank.
        """
        operations = tuple(operation.shard(ways) for operation in self.operations)
        inputs, out = shard_tensors(self.inputs, ways), self.out.shard(ways)
        return replace(self, inputs=inputs, out=out, operations=operations)

    def forward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return the kernels of the forward pass, with FLOP, bytes and shapes.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            In the order in which they run.
        """
        inside = [kernel for operation in self.operations for kernel in operation.forward_kernels(precision)]
        return (self._kernel("forward", inside, inside, self.read_tensors, (self.out,), precision),)

    def backward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return the kernels of the backward pass, with the recomputed forward pass.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            One kernel, or none if nothing is trained.
        """
        if not any(tensor.needs_gradient for tensor in self.read_tensors):
            return ()
        once = [kernel for operation in self.operations for kernel in operation.forward_kernels(precision)]
        back = [kernel for operation in self.operations for kernel in operation.backward_kernels(precision)]
        return (
            self._kernel("backward", once, once + back, (*self.read_tensors, self.out), self.read_tensors, precision),
        )

    def _kernel(
        self, phase: Phase, once: list[Kernel], inside: list[Kernel], read: tuple[Tensor, ...],
        written: tuple[Tensor, ...], precision: Precision,
    ) -> Kernel:  # fmt: skip
        """Merge the kernels ``inside`` into one kernel of the ``scan`` family.

        ``passes`` in the kernel's shape is the ratio of the FLOP of ``inside`` to those of the forward pass ``once``.
        """
        state = next(op.out for op in reversed(self.operations) if op.out.name.endswith(".state"))
        batch, _, *heads, rows, columns = (float(size) for size in state.sizes)
        flops, vector = (sum(getattr(kernel, name) for kernel in inside) for name in ("flops", "vector_flops"))
        moved = [sum(tensor.bytes(precision) for tensor in tensors) for tensors in (read, written)]
        shape = {
            "batch": batch, "length": float(self.out.size(*self.unsplit_dims)), "heads": math.prod(heads), "keys": rows,
            "values": columns, "passes": flops / sum(kernel.flops for kernel in once),
        }  # fmt: skip
        return Kernel(self.name, "scan", self.kernel_name, phase, flops, vector, moved[0], moved[1], shape)


# optimizers: states, bytes read and written, and matrix products of an update


class WeightMatrices(NamedTuple):
    """Weight matrices of one shape (rows, columns) on a rank; ``matrix_count`` counts them (one per expert)."""

    rows: float
    columns: float
    matrix_count: float

    @property
    def elements(self) -> float:
        """Number of elements of all the matrices."""
        return self.rows * self.columns * self.matrix_count


class OptimizerGemm(NamedTuple):
    """GEMM (m x k)(k x n) of an optimizer update, run ``runs_per_step`` times per step."""

    m: float
    n: float
    k: float
    runs_per_step: float = 1.0

    @property
    def flops(self) -> float:
        """FLOP of the GEMM over all its runs in one step."""
        return 2.0 * self.m * self.n * self.k * self.runs_per_step


@dataclass(frozen=True, slots=True)
class MatrixOptimizerUpdate:
    """Update rule of an optimizer that computes matrix products for weight matrices (Muon, Shampoo).

    Attributes
    ----------
    elementwise_optimizer : Optimizer
        States and element-wise passes of the rule.
    gemms_per_matrix : callable
        (rows, columns) -> products of one matrix a step.
    extra_states_per_matrix : callable
        (rows, columns) -> numbers stored per matrix in addition to the states of ``elementwise_optimizer``.
    unmodelled_costs : str
        Costs that the rule does not count; predictions list them.
    """

    elementwise_optimizer: Optimizer
    gemms_per_matrix: Callable[[float, float], tuple[OptimizerGemm, ...]]
    extra_states_per_matrix: Callable[[float, float], float]
    unmodelled_costs: str = ""

    def kernels(self, name: str, matrix: WeightMatrices, precision: Precision) -> tuple[tuple[Kernel, float], ...]:
        """List the GEMM kernels of the optimizer update of weight matrices of one shape.

        Parameters
        ----------
        name : str
            Name of the kernels.
        matrix : WeightMatrices
            Shape of the weight on this rank.
        precision : Precision
            Formats of the run; products use the format of activations.

        Returns
        -------
        tuple of (Kernel, float)
            Each product, and its number a step.
        """
        kernels, width = list[tuple[Kernel, float]](), precision.activation_bytes
        for m, n, k, times in self.gemms_per_matrix(matrix.rows, matrix.columns):
            read, written, shape = (m * k + k * n) * width, m * n * width, {"m": m, "n": n, "k": k, "batch": 1.0}
            product = Kernel(name, "gemm", "gemm", "update", 2.0 * m * n * k, 0.0, read, written, shape)
            kernels.append((product, times))
        return tuple(kernels)

    def state_count(self, matrix: WeightMatrices) -> float:
        """Count the numbers stored as optimizer states for matrices of one shape.

        Parameters
        ----------
        matrix : WeightMatrices
            Shape of the weights on this rank, and how many there are.

        Returns
        -------
        float
            Numbers stored on this rank, over all matrices of that shape.
        """
        beside = self.extra_states_per_matrix(matrix.rows, matrix.columns) * matrix.matrix_count
        return self.elementwise_optimizer.state_count * matrix.elements + beside


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Optimizer: memory traffic, states and FLOP of its update rule, for one parameter.

    Attributes
    ----------
    name : str
        Name under which it is registered.
    state_count : int
        States, each a tensor as large as the parameters.
    flops_per_parameter : float
        Floating-point operations for one parameter [FLOP].
    reference : str
        Paper or documentation that describes it.
    unfused_accesses_per_parameter : (int, int)
        Numbers read and written per parameter if each term of the formula is a separate pass.
    needs_layerwise_norms : bool
        True if the update needs the norm of each layer first.
    runs_term_by_term : bool
        True if each term of the formula is a separate pass.
    foreach : bool
        True if each term is computed for all tensors before the next term (torch's ``foreach``).
    matrix_update : MatrixOptimizerUpdate, optional
        Rule for weight matrices. None: they are updated like all weights.
    foreach_accesses_per_parameter : (int, int)
        Numbers read and written per parameter if each term is computed for all tensors at once; (0, 0): not counted.
    """

    name: str
    state_count: int
    flops_per_parameter: float
    reference: str
    unfused_accesses_per_parameter: tuple[int, int]
    needs_layerwise_norms: bool = False
    runs_term_by_term: bool = False
    foreach: bool = False
    matrix_update: MatrixOptimizerUpdate | None = None
    foreach_accesses_per_parameter: tuple[int, int] = (0, 0)

    def state_bytes(self, precision: Precision) -> float:
        """Return the optimizer's bytes per parameter: its states and the fp32 master weight.

        Parameters
        ----------
        precision : Precision
            Formats of the run.

        Returns
        -------
        float
            Bytes per parameter under the element-wise rule [byte].

        Examples
        --------
        >>> from paleo.operations.tensor import default_precision
        >>> (OPTIMIZERS["adam"].state_bytes(default_precision("bf16")),
        ... OPTIMIZERS["sgd"].state_bytes(default_precision("fp32")))
        (12.0, 0.0)
        """
        return self.state_count * precision.state_bytes + precision.master_bytes

    def temporary_bytes(self, precision: Precision) -> float:
        """Return the temporary bytes per parameter during an update.

        Parameters
        ----------
        precision : Precision
            Formats of the run.

        Returns
        -------
        float
            Bytes of the square root of the second moment, if terms are computed for all tensors at once; else 0 [byte].

        References
        ----------
        Documentation of torch.optim.Adam: foreach "uses ~ sizeof(params) more peak memory than the for-loop version".

        Examples
        --------
        >>> from paleo.operations.tensor import default_precision
        >>> optimizers = [configure_optimizer(name, listwise=True) for name in ("adam", "momentum")]
        >>> [optimizer.temporary_bytes(default_precision("bf16")) for optimizer in optimizers]
        [4.0, 0.0]
        """
        return precision.state_bytes if self.foreach and self.state_count == 2 else 0.0

    def update_bytes(self, precision: Precision) -> tuple[float, float]:
        """Return the bytes that one update reads and writes per parameter; rules that need norms read everything twice.

        Parameters
        ----------
        precision : Precision
            Formats of the run.

        Returns
        -------
        read, written : float
            Bytes of a parameter [byte].

        Examples
        --------
        >>> from paleo.operations.tensor import default_precision
        >>> OPTIMIZERS["adam"].update_bytes(default_precision("fp32"))
        (16.0, 12.0)
        >>> configure_optimizer("adam", stepwise=True).update_bytes(default_precision("fp32"))
        (64.0, 48.0)
        >>> configure_optimizer("adamw", listwise=True).update_bytes(default_precision("fp32"))
        (48.0, 32.0)
        """
        at_once = self.foreach_accesses_per_parameter if self.foreach else (0, 0)
        accesses = self.unfused_accesses_per_parameter if self.runs_term_by_term else at_once
        gradient = precision.accumulated_gradient_bytes
        master = precision.master_bytes
        narrow = precision.parameter_bytes
        if any(accesses):
            # Count the bytes per parameter if each term is a pass in the format of the states, with casts.
            read, written = (count * precision.state_bytes for count in accesses)
            if master:
                read, written = read + gradient + master, written + precision.state_bytes + precision.parameter_bytes
            return read, written
        weight, states = master or precision.parameter_bytes, self.state_count * precision.state_bytes
        narrow = precision.parameter_bytes if master else 0.0
        read, written = gradient + weight + states, weight + states + narrow
        return read * (2.0 if self.needs_layerwise_norms else 1.0), written

    def kernel_launches(self, tensors: float) -> float:
        """Count the kernel launches of an optimizer update: one fused launch, or one for each term and tensor.

        Parameters
        ----------
        tensors : float
            Weight tensors of a rank.

        Returns
        -------
        float
            Number of kernel launches.

        Examples
        --------
        >>> (configure_optimizer("adam").kernel_launches(400.0),
        ... configure_optimizer("adam", stepwise=True).kernel_launches(400.0))
        (1.0, 4800.0)
        """
        return self.unfused_accesses_per_parameter[1] * tensors if self.runs_term_by_term else 1.0


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", "paleo.operations")


def add_optimizer(rule: Optimizer) -> Optimizer:
    """Register an optimizer under its own name.

    Parameters
    ----------
    rule : Optimizer
        Counts of an update.

    Returns
    -------
    Optimizer
        The registered optimizer.

    Raises
    ------
    SpecError
        If the name is taken.
    """
    return OPTIMIZERS.register(rule.name)(rule)


def configure_optimizer(name: str, *, stepwise: bool = False, listwise: bool = False) -> Optimizer:
    """Return the optimizer of a name, configured as a framework runs it (fused, foreach or stepwise).

    Parameters
    ----------
    name : str
        Name of the optimizer.
    stepwise : bool
        True if the framework runs a pass for each term of the formula.
    listwise : bool
        True if the framework computes a term for all tensors at once.

    Returns
    -------
    Optimizer
        States, memory accesses and launches of an update.

    Raises
    ------
    SpecError
        If there is none of that name.
    """
    return replace(OPTIMIZERS[name], runs_term_by_term=stepwise, foreach=listwise)


def update_kernel(count: float, tensors: float, rule: Optimizer, formats: Precision) -> Kernel:
    """Build the kernel of the element-wise update of a rank's parameters.

    Parameters
    ----------
    count : float
        Parameters that a rank updates.
    tensors : float
        Number of weight tensors that hold them.
    rule : Optimizer
        Counts of an update.
    formats : Precision
        Formats of the run.

    Returns
    -------
    Kernel
        Memory-bound kernel with its FLOP and bytes.
    """
    read, written = (count * per_parameter for per_parameter in rule.update_bytes(formats))
    calls, flops = rule.kernel_launches(tensors), count * rule.flops_per_parameter
    return elementwise_kernel("update", "optimizer", "update", count, read, written, flops=flops, calls=calls)
