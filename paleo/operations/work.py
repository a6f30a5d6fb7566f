"""Hardware-free work: tensors with named dims, operations on them, and the kernels that they become.

An *operation* (``Contraction``, ``MemoryPass``, ``FusedAttention``, ``Recurrence``) is what a layer states. It names
the dims of its tensors, so that a strategy can split them; its backward operations are derived here, not written in the
layers. An operation becomes *kernels*: FLOP, bytes and the shape that a pricing formula needs, with no clock in sight.

FLOP are those of contractions, 1 multiply-add = 2 FLOP (the convention of MFU and of torch's flop counter); the
arithmetic of element-wise passes is kept apart as ``vector_flops``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol

from paleo.operations.precision import Precision, Role

Size = int | float
Phase = Literal["forward", "backward", "backward_weight", "update"]
Family = Literal["gemm", "conv", "attention", "memory", "rnn"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor by name (the identity of its storage: views share it), dims and sizes.

    ``grad`` is False for what needs no gradient: graph inputs, masks, indices, frozen weights. ``wide`` activations
    stay fp32 under mixed precision, and so does what element-wise passes make of them.

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

    @property
    def elements(self) -> Size:
        return math.prod(self.sizes)

    def size(self, dim: str) -> Size:
        return self.sizes[self.dims.index(dim)]

    def split(self, ways: Mapping[str, float]) -> Tensor:
        """The largest local shard when each dim of ``ways`` is divided; whole sizes stay whole numbers."""
        if ways.keys().isdisjoint(self.dims):
            return self
        pairs = zip(self.dims, self.sizes, strict=True)
        sizes = tuple([_share(n, ways[dim]) if dim in ways else n for dim, n in pairs])
        return Tensor(self.name, self.dims, sizes, self.role, self.grad, self.wide)

    def renamed(self, names: Mapping[str, str]) -> Tensor:
        return replace(self, dims=tuple(names.get(dim, dim) for dim in self.dims))

    def like(self, name: str, *, role: Role | None = None) -> Tensor:
        """A new tensor of the same shape."""
        return replace(self, name=name, role=role or self.role, grad=True)

    def reshaped(self, dims: Mapping[str, Size], *, name: str | None = None) -> Tensor:
        return replace(self, name=name or self.name, dims=tuple(dims), sizes=tuple(dims.values()))

    def without(self, *dims: str, name: str, role: Role = "activation") -> Tensor:
        """The tensor left when ``dims`` are reduced away."""
        kept = {dim: n for dim, n in zip(self.dims, self.sizes, strict=True) if dim not in dims}
        return Tensor(name, tuple(kept), tuple(kept.values()), role)

    def bytes(self, precision: Precision) -> float:
        each = precision.wide if self.wide and self.role == "activation" else precision.bytes_of(self.role)
        return float(self.elements * each)


def _share(size: Size, ways: float) -> Size:
    if ways == 1:
        return size
    return math.ceil(size / ways) if isinstance(size, int) else size / ways


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


@dataclass(frozen=True, slots=True)
class Window:
    """How one windowed dim of a convolution or a pool slides: out[i] reads in[i·stride + j·dilation − padding], j <
    taps. ``kernel`` is the dim of a convolution's taps.

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


def is_core(operation: Operation) -> bool:
    """Whether an operation belongs to the core of attention: scores, softmax, dropout, weighted sum."""
    return ATTENTION_CORE in operation.name


#: Rows of neighbours that a rank reads beside its own share, for each window: of the source, and of the output's
#: gradient.
Halos = tuple[tuple[int, int], ...]


def halos(windows: tuple[Window, ...], ways: Mapping[str, float]) -> Halos:
    """What comes from both neighbours; of two ranks each has one."""

    def received(rows: tuple[int, int], ranks: float) -> int:
        return 0 if ranks <= 1 else sum(rows) if ranks > 2 else max(rows)

    return tuple((received(w.halo, ways.get(w.out, 1)), received(w.gradient_halo, ways.get(w.out, 1))) for w in windows)


def _with_rows(tensor: Tensor, rows: Iterable[tuple[str, int]]) -> float:
    """Elements of a tensor with so many more rows along its dims, over its own."""
    return math.prod((tensor.size(dim) + more) / tensor.size(dim) for dim, more in rows)


def parameters_of(operations: Iterable[Operation]) -> dict[str, Tensor]:
    """The parameters that operations read, by name; a tied weight appears once."""
    return {t.name: t for op in operations for t in op.reads if t.role == "parameter"}


def with_parameters_of(operation: Operation, own: str, other: str) -> Operation:
    """The operation with the parameters whose names start with ``own`` replaced by those that start with ``other``."""

    def shared(tensor: Tensor) -> Tensor:
        if tensor.role != "parameter" or not tensor.name.startswith(own):
            return tensor
        return replace(tensor, name=other + tensor.name.removeprefix(own))

    return with_tensors(operation, shared)


def with_tensors(operation: Operation, change: Callable[[Tensor], Tensor]) -> Operation:
    """The operation with each of its tensors changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        return tuple(map(changed, value)) if isinstance(value, tuple) else value

    made: Operation = replace(operation, **{f.name: changed(getattr(operation, f.name)) for f in fields(operation)})  # type: ignore
    return made


def _split_all(tensors: tuple[Tensor, ...], ways: Mapping[str, float]) -> tuple[Tensor, ...]:
    return tuple([t.split(ways) for t in tensors])


@dataclass(frozen=True, slots=True)
class Contraction:
    """An einsum of two operands over named dims, perhaps with sliding windows: linear layers, convolutions, attention
    products.

    Dims in all three tensors are batch dims; dims absent from ``out`` are summed. FLOP = 2 · product of the sizes of
    all dims (a windowed source dim is addressed by its output and kernel dims and does not count). The backward
    contractions follow: d lhs = out' · rhs, d rhs = lhs · out'.

    ``transposed`` marks a transposed convolution: its forward pass is the data gradient of a convolution.
    """

    name: str
    lhs: Tensor
    rhs: Tensor
    out: Tensor
    bias: Tensor | None = None
    windows: tuple[Window, ...] = ()
    transposed: bool = False
    halos: Halos = ()

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return (self.lhs, self.rhs) if self.bias is None else (self.lhs, self.rhs, self.bias)

    @property
    def saves(self) -> tuple[Tensor, ...]:
        kept = [self.lhs] if self.rhs.grad else []
        return tuple(kept + ([self.rhs] if self.lhs.grad and self.rhs.role == "activation" else []))

    @property
    def private_dims(self) -> frozenset[str]:
        return frozenset(name for w in self.windows for name in (w.source, w.kernel, w.out))

    @property
    def flops(self) -> float:
        hidden = {w.out if self.transposed else w.source for w in self.windows}
        sizes = {
            d: n
            for t in (self.lhs, self.rhs, self.out)
            for d, n in zip(t.dims, t.sizes, strict=True)
            if d not in hidden
        }
        return 2.0 * math.prod(sizes.values())

    def split(self, ways: Mapping[str, float]) -> Contraction:
        bias = None if self.bias is None else self.bias.split(ways)
        lhs, rhs, out = _split_all((self.lhs, self.rhs, self.out), ways)
        return replace(self, lhs=lhs, rhs=rhs, out=out, bias=bias, halos=halos(self.windows, ways))

    def forward(self, precision: Precision) -> tuple[Kernel, ...]:
        formats = self._operands(precision)
        kernels = [self._kernel("forward", self.lhs, self.rhs, self.out, formats, extra=self.bias)]
        if formats.narrow:
            kernels.append(self._quantised("forward", self.lhs, formats))
        products = tuple(replace(kernel, calls=1.0 / len(kernels)) for kernel in kernels)
        return (*products, *self._casts("forward", precision))

    def _casts(self, phase: Phase, precision: Precision) -> tuple[Kernel, ...]:
        """Mixed precision: what is stored wide is narrowed for the product, and its gradient widened after it."""
        if not precision.casts:
            return ()
        wide = [t for t in (self.lhs, self.rhs) if t.wide or t.role == "parameter"]
        if phase == "forward":
            return tuple(_cast(self.name, phase, t, t.bytes(precision), precision.activation) for t in wide)
        phases: list[Phase] = ["backward_weight" if t.role == "parameter" else "backward" for t in wide]
        return tuple(
            _cast(self.name, phase, t, float(t.elements * precision.activation), precision.gradient)
            for t, phase in zip(wide, phases, strict=True)
            if t.grad
        )

    def backward(self, precision: Precision) -> tuple[Kernel, ...]:
        precision = self._operands(precision)
        kernels = [self._quantised("backward", self.out, precision)] if precision.narrow else []
        if self.lhs.grad:
            kernels.append(self._kernel("backward", self.out, self.rhs, self.lhs, precision))
        if self.rhs.grad:
            phase: Phase = "backward_weight" if self.rhs.role == "parameter" else "backward"
            kernels.append(self._kernel(phase, self.lhs, self.out, self.rhs, precision))
        if self.bias is not None and self.bias.grad:
            summed = MemoryPass(f"{self.name}.bias", "reduce", (self.out,), self.bias, flops_per_element=1.0)
            kernels.append(replace(summed.forward(precision)[0], phase="backward_weight"))
        products = tuple(replace(kernel, calls=1.0 / len(kernels)) for kernel in kernels)
        return (*products, *self._casts("backward", precision))

    def _operands(self, precision: Precision) -> Precision:
        """Only products with weights are made in formats below sixteen bits, and no convolutions."""
        return precision if self.rhs.role == "parameter" and not self.windows else precision.sixteen_bits

    def _quantised(self, phase: Phase, source: Tensor, precision: Precision) -> Kernel:
        """An operand brought to the narrow format, and its transpose beside it: the product of the weight gradient,
        where there is one, runs along the other dim. Weights are brought there once a step, which is not counted."""
        count, copies = float(source.elements), 2.0 if self.rhs.grad else 1.0
        read, written = count * precision.activation, copies * count * precision.operand
        return flat_pass(f"{self.name}.quantise", "elementwise", phase, count, read, written)

    def _kernel(
        self, phase: Phase, left: Tensor, right: Tensor, out: Tensor, precision: Precision, extra: Tensor | None = None
    ) -> Kernel:
        moved = left.elements * self._border(left, phase) + right.elements
        read = moved * precision.operand + (0.0 if extra is None else extra.bytes(precision))
        gradient = phase == "backward_weight" and not precision.casts
        written = out.elements * (precision.gradient if gradient else precision.activation)
        if self.windows:
            operation, shape = self._direction(phase), self._conv_shape()
        else:
            operation, shape = "narrow" if precision.narrow else "gemm", _gemm_shape(left, right, out)
        family: Family = "conv" if self.windows else "gemm"
        return Kernel(self.name, family, operation, phase, self.flops, 0.0, float(read), float(written), shape)

    def _border(self, tensor: Tensor, phase: Phase) -> float:
        """A windowed operand with the rows of its neighbours, over its own rows."""
        turned = int((phase == "backward") != self.transposed)
        pairs = zip(self.windows, self.halos, strict=False)
        return _with_rows(tensor, ((w.out if phase == "backward" else w.source, rows[turned]) for w, rows in pairs))

    def _direction(self, phase: Phase) -> str:
        if phase == "backward_weight":
            return "bwd_filter"
        return "bwd_data" if (phase == "backward") != self.transposed else "fwd"

    def _conv_shape(self) -> dict[str, float]:
        """NCHW shape of the equivalent convolution; missing spatial dims are 1, a third one is folded into the batch of
        windows."""
        image, result = (self.out, self.lhs) if self.transposed else (self.lhs, self.out)
        groups = self.rhs.size("groups") if "groups" in self.rhs.dims else 1
        names = ("d", "h", "w")[-len(self.windows) :] if len(self.windows) > 1 else ("h",)
        shape: dict[str, float] = {
            "n": image.sizes[0],
            "c": math.prod(n for d, n in zip(image.dims, image.sizes, strict=True) if d in ("groups", _channel(image))),
            "k": math.prod(
                n for d, n in zip(result.dims, result.sizes, strict=True) if d in ("groups", _channel(result))
            ),
            "groups": groups,
        }
        for axis, window in zip(names, self.windows, strict=True):
            source, sink = (window.out, window.source) if self.transposed else (window.source, window.out)
            shape |= {axis: image.size(source), f"out_{axis}": result.size(sink)}
            shape |= {f"kernel_{axis}": self.rhs.size(window.kernel), f"stride_{axis}": window.stride}
            shape |= {f"dilation_{axis}": window.dilation, f"pad_{axis}": window.padding}
        return shape


def _cast(name: str, phase: Phase, tensor: Tensor, read: float, width: float) -> Kernel:
    """One pass from one format to another of ``width`` bytes."""
    count = float(tensor.elements)
    return flat_pass(f"{name}.cast", "elementwise", phase, count, read, count * width)


def _channel(tensor: Tensor) -> str:
    return tensor.dims[2] if tensor.dims[1] == "groups" else tensor.dims[1]


def _gemm_shape(left: Tensor, right: Tensor, out: Tensor) -> dict[str, float]:
    """m, n, k and batch of the matrix product: batch dims are shared by all three, k dims are summed."""
    sizes = {d: n for t in (left, right, out) for d, n in zip(t.dims, t.sizes, strict=True)}
    inside, l, r = set(out.dims), set(left.dims), set(right.dims)  # noqa: E741 - the field's letters
    return {
        "m": float(math.prod(n for d, n in sizes.items() if d in inside and d in l and d not in r)),
        "n": float(math.prod(n for d, n in sizes.items() if d in inside and d in r and d not in l)),
        "k": float(math.prod(n for d, n in sizes.items() if d not in inside)),
        "batch": float(math.prod(n for d, n in sizes.items() if d in inside and d in l and d in r)),
    }


@dataclass(frozen=True, slots=True)
class MemoryPass:
    """A pass over memory: element-wise work, norms, softmax, pooling, gathers. Its time is that of its bytes.

    ``backward_pass`` None derives the gradient pass: read the gradient of ``out`` and what was kept, write the gradient
    of each input that needs one; "free" says that the gradient is a view (add, slices); "by input" that each input's is
    a pass of its own over what was kept of the others, as large as ``out``, and summed up where the input is smaller
    (products). ``reduces`` names dims whose
    statistics are shared by a row (softmax, norms): split over ranks they owe a small all-reduce. ``sparse_rows`` says
    that of a table only the rows that make up ``out`` move (embedding), so many for each row of ``out``. ``windows``
    slide over the dims of a pool. ``linear`` ones commute with addition, so that partial sums go through.
    """

    name: str
    operation: str
    inputs: tuple[Tensor, ...]
    out: Tensor
    parameters: tuple[Tensor, ...] = ()
    keeps: tuple[Tensor, ...] = ()
    flops_per_element: float = 1.0
    backward_pass: Literal["derived", "free", "by input"] = "derived"
    reduces: tuple[str, ...] = ()
    local_statistics: bool = False
    sparse_rows: int = 0
    windows: tuple[Window, ...] = ()
    halos: Halos = ()
    linear: bool = False

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return self.inputs + self.parameters

    @property
    def saves(self) -> tuple[Tensor, ...]:
        return self.keeps

    @property
    def private_dims(self) -> frozenset[str]:
        return frozenset(self.reduces) | {window.out for window in self.windows}

    def split(self, ways: Mapping[str, float]) -> MemoryPass:
        return replace(
            self,
            inputs=_split_all(self.inputs, ways),
            out=self.out.split(ways),
            parameters=_split_all(self.parameters, ways),
            keeps=_split_all(self.keeps, ways),
            halos=halos(self.windows, ways),
        )

    def forward(self, precision: Precision) -> tuple[Kernel, ...]:
        new = tuple(t for t in self.keeps if t.name not in {u.name for u in (*self.inputs, self.out)})
        return (self._kernel("forward", self.inputs, (self.out, *new), precision),)

    def backward(self, precision: Precision) -> tuple[Kernel, ...]:
        targets = tuple(t for t in self.inputs if t.grad)
        learned = tuple(t for t in self.parameters if t.grad)
        if self.backward_pass == "free" or not (targets or learned):
            return ()
        if self.backward_pass == "by input":
            return tuple(kernel for one in targets for kernel in self._gradient(one, precision))
        kept = tuple(t for t in self.keeps if t.name != self.out.name or t.role == "activation")
        kernel = self._kernel("backward", (self.out, *kept), targets, precision)
        gradients = sum(self._table_elements(t) for t in learned) * precision.gradient
        return (replace(kernel, bytes_written=kernel.bytes_written + gradients),)

    def _gradient(self, target: Tensor, precision: Precision) -> tuple[Kernel, ...]:
        """The gradient of one input of a product, and the sum over what it was broadcast over."""
        others = tuple(t for t in self.keeps if t.name != target.name)
        made = self._kernel("backward", (self.out, *others), (self.out,), precision)
        if target.elements == self.out.elements:
            return (made,)
        summed = self._kernel("backward", (self.out,), (target,), precision)
        return made, replace(summed, operation="reduce")

    def _kernel(
        self, phase: Phase, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], precision: Precision
    ) -> Kernel:
        table = sum(self._table_elements(t) for t in self.parameters) * precision.parameter
        largest = max((t.elements for t in (*reads, *writes)), default=0)
        row = math.prod(self.inputs[0].size(d) for d in self.reduces if d in self.inputs[0].dims)
        return Kernel(
            self.name,
            "memory",
            self.operation,
            phase,
            0.0,
            float(self.flops_per_element * largest),
            sum(t.bytes(precision) * self._border(t, phase) for t in reads) + table,
            sum(t.bytes(precision) for t in writes),
            {"rows": float(largest / max(row, 1)), "columns": float(row)},
        )

    def _border(self, tensor: Tensor, phase: Phase) -> float:
        """What a pool reads with the rows of its neighbours, over its own rows."""
        pairs = zip(self.windows, self.halos, strict=False)
        return _with_rows(tensor, ((w.out, rows[phase == "backward"]) for w, rows in pairs))

    def _table_elements(self, table: Tensor) -> float:
        return float(min(table.elements, self.sparse_rows * self.out.elements) if self.sparse_rows else table.elements)


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Scores, softmax and weighted sum in one kernel that keeps only its output and a log-sum-exp per row
    (FlashAttention).

    query (batch, q sequence, kv_heads, group, head_dim), key and value (batch, kv sequence, kv_heads, dim). FLOP count
    the whole rectangle of scores even where a causal mask skips half of it (the convention of MFU and of torch); the
    kernel's price uses ``causal`` and ``attended``, the keys that a query sees at most (its sliding window).

    A split sequence is dealt out so that each rank has early and late queries, and with them the same share of a causal
    mask's work (Brandon et al., Striped attention, 2023): a kernel over the mean of all keys and its own.
    """

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    causal: bool
    attended: Size

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return (self.query, self.key, self.value)

    @property
    def saves(self) -> tuple[Tensor, ...]:
        statistic = self.query.without(self.query.dims[-1], name=f"{self.name}.logsumexp", role="statistic")
        return (*self.reads, self.out, statistic)

    @property
    def private_dims(self) -> frozenset[str]:
        return frozenset({self.key.dims[1], self.query.dims[1]})

    def split(self, ways: Mapping[str, float]) -> FusedAttention:
        query, key, value, out = _split_all((self.query, self.key, self.value, self.out), ways)
        return replace(self, query=query, key=key, value=value, out=out)

    @property
    def _scores(self) -> float:
        """How many numbers the matrix of scores would have."""
        return float(self.query.elements / self.query.sizes[-1] * self.attended)

    def _flops(self, score_products: int, value_products: int) -> float:
        """FLOP of so many products along the head dim and along the value dim."""
        return 2.0 * self._scores * (score_products * self.query.sizes[-1] + value_products * self.value.sizes[-1])

    def forward(self, precision: Precision) -> tuple[Kernel, ...]:
        read = sum(t.bytes(precision) for t in self.reads)
        written = self.out.bytes(precision) + self.saves[-1].bytes(precision)
        return (self._kernel("forward", self._flops(1, 1), read, written),)

    def backward(self, precision: Precision) -> tuple[Kernel, ...]:
        """Recomputes the scores, then the gradients of scores, value, query and key (Dao, FlashAttention-2, 2023).

        Five products, three of them along the head dim: 2.5 times the FLOP of the forward pass where the value is as
        wide.
        """
        read = sum(t.bytes(precision) for t in (*self.saves, self.out))
        return (self._kernel("backward", self._flops(3, 2), read, sum(t.bytes(precision) for t in self.reads)),)

    def _kernel(self, phase: Phase, flops: float, read: float, written: float) -> Kernel:
        batch, q, kv_heads, group, head_dim = self.query.sizes
        keys, attended = float(self.key.sizes[1]), float(self.attended)
        if self.causal and attended == keys:
            keys = attended = (keys + float(q)) / 2
        shape = {
            "batch": float(batch),
            "q_heads": float(kv_heads * group),
            "kv_heads": float(kv_heads),
            "q_len": float(q),
            "kv_len": keys,
            "head_dim": float(head_dim),
            "causal": float(self.causal),
            "attended": attended,
        }
        return Kernel(self.name, "attention", "fused", phase, flops, 5.0 * self._scores, read, written, shape)


#: Gates of a recurrent cell: how many hidden x hidden products a step makes.
GATES = {"vanilla": 1, "gru": 3, "lstm": 4}


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The steps of a recurrent layer that wait for one another: h[t] = f(gates[t] + h[t-1] · U), t over ``steps``.

    The input products of all steps are one Contraction before it. The weight gradient is one product over all steps.
    """

    name: str
    cell: str
    gates: Tensor
    weight: Tensor
    out: Tensor
    steps_dim: str = "seq"
    directions: int = 1

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return (self.gates, self.weight)

    @property
    def saves(self) -> tuple[Tensor, ...]:
        cells = (self.out.like(f"{self.name}.cell"),) if self.cell == "lstm" else ()
        return (self.gates, self.out, *cells)

    @property
    def private_dims(self) -> frozenset[str]:
        return frozenset({self.steps_dim})

    def split(self, ways: Mapping[str, float]) -> Recurrence:
        gates, weight, out = _split_all((self.gates, self.weight, self.out), ways)
        return replace(self, gates=gates, weight=weight, out=out)

    @property
    def flops(self) -> float:
        steps = self.gates.size(self.steps_dim)
        return 2.0 * steps * self.gates.size("batch") * float(self.weight.elements)

    def forward(self, precision: Precision) -> tuple[Kernel, ...]:
        return (self._kernel("forward", "fwd", (self.gates, self.weight), (self.out, *self.saves[2:]), precision),)

    def backward(self, precision: Precision) -> tuple[Kernel, ...]:
        data = self._kernel("backward", "bwd_data", (self.out, self.weight, *self.saves), (self.gates,), precision)
        weight = self._kernel("backward_weight", "bwd_filter", (self.out, self.gates), (self.weight,), precision)
        return (data, weight) if self.weight.grad else (data,)

    def _kernel(
        self, phase: Phase, operation: str, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], precision: Precision
    ) -> Kernel:
        shape = {
            "hidden": float(self.out.sizes[-1]) / self.directions,
            "batch": float(self.gates.size("batch")),
            "timesteps": float(self.gates.size(self.steps_dim)),
            "gates": float(GATES[self.cell]),
            "directions": float(self.directions),
        }
        read, written = sum(t.bytes(precision) for t in reads), sum(t.bytes(precision) for t in writes)
        vector = 10.0 * float(self.gates.elements)
        return Kernel(self.name, "rnn", f"{self.cell}.{operation}", phase, self.flops, vector, read, written, shape)
