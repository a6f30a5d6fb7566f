"""Operations that compute FLOP: contractions (GEMM, convolution), fused attention, recurrences; checks of splits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from paleo.errors import PlanError
from paleo.operations.base import (
    Family,
    Kernel,
    MemoryPass,
    Operation,
    Phase,
    RecomputedFusedChain,
    WeightMatrices,
    elementwise_kernel,
    gradient_accumulation_kernel,
    is_attention_core,
)
from paleo.operations.tensor import (
    DimSize,
    Halos,
    Precision,
    SlidingWindow,
    Tensor,
    halo_size_ratio,
    received_halo_rows,
    shard_tensors,
)


@dataclass(frozen=True, slots=True)
class Contraction:
    """Contraction of two operands over named dims: linear layers, convolutions (with windows), attention products.

    Dims in all three tensors are batch dims; dims absent from ``out`` are summed. FLOP = 2 · product of the sizes of
    all dims. The source dim of a window does not count, as the output and kernel dims address it. The backward
    contractions follow: d lhs = out' · rhs, d rhs = lhs · out'.

    ``transposed`` marks a transposed convolution: its forward pass is the data gradient of a convolution.
    ``unmasked_share`` is the share of the scores that a mask leaves: about half under a causal mask, 1 without one.
    """

    name: str
    lhs: Tensor
    rhs: Tensor
    out: Tensor
    bias: Tensor | None = None
    windows: tuple[SlidingWindow, ...] = ()
    transposed: bool = False
    halos: Halos = ()
    unmasked_share: float = 1.0

    @property
    def model_flop_shares(self) -> tuple[float, float]:
        """Shares of the operation's forward and backward FLOP that count as model FLOP (MFU)."""
        return self.unmasked_share, self.unmasked_share

    @property
    def read_tensors(self) -> tuple[Tensor, ...]:
        return (self.lhs, self.rhs) if self.bias is None else (self.lhs, self.rhs, self.bias)

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        kept = [self.lhs] if self.rhs.needs_gradient else []
        return tuple(kept + ([self.rhs] if self.lhs.needs_gradient and self.rhs.role == "activation" else []))

    @property
    def independent_dims(self) -> frozenset[str]:
        return frozenset(name for w in self.windows for name in (w.input_dim, w.kernel_dim, w.output_dim))

    @property
    def flops(self) -> float:
        hidden = {w.output_dim if self.transposed else w.input_dim for w in self.windows}
        sizes = self.lhs.shape | self.rhs.shape | self.out.shape
        return 2.0 * math.prod([size for dim, size in sizes.items() if dim not in hidden])

    def shard(self, ways: Mapping[str, float]) -> Contraction:
        """Return one rank's shard of the contraction.

        Parameters
        ----------
        ways : mapping of str to float
            Number of parts of each dim.

        Returns
        -------
        Contraction
            Share of one rank.
        """
        bias = None if self.bias is None else self.bias.shard(ways)
        lhs, rhs, out = shard_tensors((self.lhs, self.rhs, self.out), ways)
        return replace(self, lhs=lhs, rhs=rhs, out=out, bias=bias, halos=received_halo_rows(self.windows, ways))

    def forward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return the kernels of the forward pass, with FLOP, bytes and shapes.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            One product.
        """
        formats = self.operand_precision(precision)
        kernels = [self._kernel("forward", self.lhs, self.rhs, self.out, formats, extra=self.bias)]
        if formats.quantises_operands:
            kernels += self._quantised("forward", self.lhs, formats)
        return (*_share_host_call(kernels), *self._casts("forward", precision))

    def _casts(self, phase: Phase, precision: Precision) -> tuple[Kernel, ...]:
        """List the cast kernels of mixed precision: fp32 operands before a product, and gradients after the product."""
        if not precision.casts_weights_each_pass:
            return ()
        wide = [t for t in (self.lhs, self.rhs) if t.stays_fp32 or t.role == "parameter"]
        if phase == "forward":
            return tuple(_cast(self.name, phase, t, t.bytes(precision), precision.activation_bytes) for t in wide)
        narrow, width = precision.activation_bytes, precision.gradient_bytes
        trained = [t for t in wide if t.needs_gradient]
        return tuple(_cast(self.name, _phase(t), t, float(t.elements * narrow), width) for t in trained)

    def backward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return the kernels of the backward pass: a product for each gradient.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            One GEMM for each factor that needs a gradient, and the passes for bias, quantisation and casts.
        """
        if not any(tensor.needs_gradient for tensor in self.read_tensors):
            return ()
        precision = self.operand_precision(precision)
        kernels = self._quantised("backward", self.out, precision) if precision.quantises_operands else []
        if self.lhs.needs_gradient:
            kernels.append(self._kernel("backward", self.out, self.rhs, self.lhs, precision))
        if self.rhs.needs_gradient:
            kernels.append(self._kernel(_phase(self.rhs), self.lhs, self.out, self.rhs, precision))
        if self.bias is not None and self.bias.needs_gradient:
            summed = MemoryPass(f"{self.name}.bias", "reduce", (self.out,), self.bias, flops_per_element=1.0)
            kernels.append(replace(summed.forward_kernels(precision)[0], phase="backward_weight"))
        return (*_share_host_call(kernels), *self._casts("backward", precision))

    def operand_precision(self, precision: Precision) -> Precision:
        """Return the number formats of the operands, given the run's precision.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        Precision
            Formats below sixteen bits are used only in products with weights, and not in convolutions.
        """
        return precision if self.rhs.role == "parameter" and not self.windows else precision.without_quantisation

    def _quantised(self, phase: Phase, source: Tensor, precision: Precision) -> list[Kernel]:
        """List the passes that convert an operand to a narrow format with scales.

        The passes are an amax reduction, if the scaling needs one, and the conversion. The conversion also writes
        a transposed copy if the weight gradient, whose product sums over the other dim, is needed. Weights are
        converted once a step, which is not counted.
        """
        count, copies = float(source.elements), 2.0 if self.rhs.needs_gradient else 1.0
        read = count * precision.activation_bytes
        written = copies * count * (precision.operand_bytes + precision.scale_bytes_per_number)
        largest = elementwise_kernel(f"{self.name}.largest", "reduce", phase, count, read, 0.0)
        quantised = elementwise_kernel(f"{self.name}.quantise", "elementwise", phase, count, read, written)
        return [largest, quantised] if precision.has_separate_amax_pass else [quantised]

    def _kernel(
        self, phase: Phase, left: Tensor, right: Tensor, out: Tensor, precision: Precision, extra: Tensor | None = None
    ) -> Kernel:
        moved = left.elements * self._halo_factor(left, phase) + right.elements
        read = moved * precision.operand_bytes + (0.0 if extra is None else extra.bytes(precision))
        gradient = phase == "backward_weight" and not precision.casts_weights_each_pass
        written = out.elements * (precision.gradient_bytes if gradient else precision.activation_bytes)
        if self.windows:
            operation, shape = self._direction(phase), self._conv_shape()
        else:
            operation, shape = "narrow" if precision.quantises_operands else "gemm", _gemm_shape(left, right, out)
        family: Family = "conv" if self.windows else "gemm"
        of_experts = self.rhs.role == "parameter" and "experts" in self.rhs.dims and "experts" in self.lhs.dims
        experts = float(self.rhs.size("experts")) if of_experts else 0.0
        bytes_moved = float(read), float(written)
        return Kernel(self.name, family, operation, phase, self.flops, 0.0, *bytes_moved, shape, expert_count=experts)

    def _halo_factor(self, tensor: Tensor, phase: Phase) -> float:
        """Compute the ratio of rows that a convolution operand needs, halos included, to the rank's own rows."""
        if not self.windows:
            return 1.0
        backward = phase == "backward"
        pairs = zip(self.windows, self.halos, strict=False)
        dims = [(w.output_dim if backward else w.input_dim, rows[backward != self.transposed]) for w, rows in pairs]
        return halo_size_ratio(tensor, dims)

    def _direction(self, phase: Phase) -> str:
        if phase == "backward_weight":
            return "bwd_filter"
        return "bwd_data" if (phase == "backward") != self.transposed else "fwd"

    def _conv_shape(self) -> dict[str, float]:
        """Return the shape of the equivalent convolution: n, c, k, groups, and sizes, kernel and stride of each dim."""
        image, result = (self.out, self.lhs) if self.transposed else (self.lhs, self.out)
        names = ("d", "h", "w")[-len(self.windows) :] if len(self.windows) > 1 else ("h",)
        shape: dict[str, float] = {"n": image.sizes[0], "c": _channels(image), "k": _channels(result)}
        shape["groups"] = self.rhs.size("groups") if "groups" in self.rhs.dims else 1
        for axis, window in zip(names, self.windows, strict=True):
            dims = (window.input_dim, window.output_dim)
            source, sink = dims[::-1] if self.transposed else dims
            shape |= {axis: image.size(source), f"out_{axis}": result.size(sink)}
            shape |= {f"kernel_{axis}": self.rhs.size(window.kernel_dim), f"stride_{axis}": window.stride}
            shape |= {f"dilation_{axis}": window.dilation, f"pad_{axis}": window.padding}
        return shape


def _share_host_call(kernels: list[Kernel]) -> list[Kernel]:
    """Divide one host call (CPU launch overhead) equally among the kernels of the call."""
    return kernels if len(kernels) == 1 else [replace(kernel, host_calls=1.0 / len(kernels)) for kernel in kernels]


def _cast(name: str, phase: Phase, tensor: Tensor, read: float, width: float) -> Kernel:
    """Build the kernel that casts a tensor to a format of ``width`` bytes."""
    count = float(tensor.elements)
    return elementwise_kernel(f"{name}.cast", "elementwise", phase, count, read, count * width)


def _phase(operand: Tensor) -> Phase:
    """Return the phase of the gradient of an operand."""
    return "backward_weight" if operand.role == "parameter" else "backward"


def _channels(image: Tensor) -> DimSize:
    """Return the channels of an image, of all groups together."""
    return image.sizes[1] * image.sizes[2] if image.dims[1] == "groups" else image.sizes[1]


def _gemm_shape(left: Tensor, right: Tensor, out: Tensor) -> dict[str, float]:
    """Return m, n, k and batch of the matrix product: all three tensors have the batch dims, and k dims are summed."""
    sizes = left.shape | right.shape | out.shape
    inside, l, r = set(out.dims), set(left.dims), set(right.dims)  # noqa: E741 - the field's letters
    return {
        "m": float(math.prod([n for d, n in sizes.items() if d in inside and d in l and d not in r])),
        "n": float(math.prod([n for d, n in sizes.items() if d in inside and d in r and d not in l])),
        "k": float(math.prod([n for d, n in sizes.items() if d not in inside])),
        "batch": float(math.prod([n for d, n in sizes.items() if d in inside and d in l and d in r])),
    }


def weight_matrix(tensor: Tensor, operations: Iterable[Operation]) -> WeightMatrices | None:
    """Return the (rows, columns) shape of a weight, for optimizers such as Muon that multiply matrices.

    Parameters
    ----------
    tensor : Tensor
        Weight, whole or a rank's shard of it.
    operations : iterable of Operation
        Operations that read it.

    Returns
    -------
    WeightMatrices or None
        Summed dims are rows, the others columns; filters of a convolution are flattened. None for vectors, and for
        embeddings and heads (dim ``vocab``), which such optimizers update element-wise (Jordan et al., 2024).
    """
    sizes = tensor.shape
    for operation in operations:
        if isinstance(operation, Contraction) and operation.rhs.name == tensor.name and "vocab" not in sizes:
            inside, left = set(operation.out.dims), set(operation.lhs.dims)
            rows = math.prod(size for dim, size in sizes.items() if dim not in inside)
            columns = math.prod(size for dim, size in sizes.items() if dim in inside and dim not in left)
            copies = math.prod(size for dim, size in sizes.items() if dim in inside and dim in left)
            return WeightMatrices(float(rows), float(columns), float(copies)) if min(rows, columns) > 1 else None
    return None


def causal_score_share(keys: DimSize, attended: DimSize) -> float:
    """Compute the share of attention scores that a causal mask leaves.

    Parameters
    ----------
    keys : DimSize
        Keys, as many as queries.
    attended : DimSize
        Keys that a query sees at most: the sliding window, or all of them.

    Returns
    -------
    float
        Share of keys · attended scores, 0 to 1.

    Examples
    --------
    >>> causal_score_share(4, 4), causal_score_share(8, 4), round(causal_score_share(1024, 1024), 4)
    (0.625, 0.8125, 0.5005)
    """
    return float((attended + 1.0) / 2.0 + keys - attended) / float(keys)


def executed_flop_share(kernel: Kernel) -> float:
    """Compute the share of the counted FLOP that a kernel executes.

    Parameters
    ----------
    kernel : Kernel
        The kernel.

    Returns
    -------
    float
        Below 1 if fused attention skips blocks that a causal mask hides.
    """
    shape = kernel.shape
    if kernel.family != "attention" or not shape["causal"]:
        return 1.0
    keys, attended = shape["kv_len"], shape["attended"]
    whole = 2.0 * keys - shape["q_len"] if attended == keys else keys
    return causal_score_share(whole, whole if attended == keys else attended)


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Fused attention kernel that saves only its output and one log-sum-exp per row (FlashAttention).

    Shapes: query (batch, q sequence, kv_heads, group, head_dim), key and value (batch, kv sequence, kv_heads, dim).

    FLOP count all scores, even if a causal mask hides half of them (the convention of MFU and of torch). The time also
    depends on ``causal``, on ``attended_keys`` (most keys that a query sees, its sliding window), and on ``dropout``
    (True if weights are dropped out).

    A split sequence is distributed so that each rank has early and late queries, and all ranks an equal share of the
    scores that a causal mask leaves (Brandon et al., Striped attention, 2023). The kernel is then counted over the mean
    number of keys.
    """

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    causal: bool
    attended_keys: DimSize
    dropout: bool = False

    @property
    def model_flop_shares(self) -> tuple[float, float]:
        """Shares of the kernel's forward and backward FLOP that count as model FLOP (MFU).

        Masked scores and recomputed FLOP do not count.

        >>> from paleo.operations.tensor import Tensor
        >>> x = Tensor("x", ("batch", "seq", "kv_heads", "group", "head_dim"), (1, 4, 1, 1, 8))
        >>> key = Tensor("k", ("batch", "keys", "kv_heads", "head_dim"), (1, 4, 1, 8))
        >>> FusedAttention("a", x, key, key, x, True, 4).model_flop_shares  # 10 of 16 scores; 4 of 5 products backward
        (0.625, 0.5)
        """
        visible = causal_score_share(self.key.sizes[1], self.attended_keys) if self.causal else 1.0
        return visible, visible * 2.0 * self._flops(1, 1) / self._flops(3, 2)

    @property
    def read_tensors(self) -> tuple[Tensor, ...]:
        return (self.query, self.key, self.value)

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        if not any(tensor.needs_gradient for tensor in self.read_tensors):
            return ()
        return (*self.read_tensors, self.out, self._statistic)

    @property
    def _statistic(self) -> Tensor:
        return self.query.without_dims(self.query.dims[-1], name=f"{self.name}.logsumexp", role="statistic")

    @property
    def independent_dims(self) -> frozenset[str]:
        return frozenset({self.key.dims[1], self.query.dims[1]})

    def shard(self, ways: Mapping[str, float]) -> FusedAttention:
        """Return one rank's shard of attention.

        Parameters
        ----------
        ways : mapping of str to float
            Number of parts of each dim.

        Returns
        -------
        FusedAttention
            Share of one rank.
        """
        query, key, value, out = shard_tensors((self.query, self.key, self.value, self.out), ways)
        return replace(self, query=query, key=key, value=value, out=out)

    @property
    def _scores(self) -> float:
        """Number of attention scores, over batch and heads."""
        return float(self.query.elements / self.query.sizes[-1] * self.attended_keys)

    def _flops(self, score_products: int, value_products: int) -> float:
        """Count the FLOP of ``score_products`` products along the head dim and ``value_products`` along the value
        dim."""
        return 2.0 * self._scores * (score_products * self.query.sizes[-1] + value_products * self.value.sizes[-1])

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
        read = sum(t.bytes(precision) for t in self.read_tensors)
        written = self.out.bytes(precision) + self._statistic.bytes(precision)
        return (self._kernel("forward", self._flops(1, 1), read, written),)

    def backward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return the kernels of the backward pass, with FLOP, bytes and shapes.

        The kernel recomputes the scores, then computes the gradients of scores, value, query and key (Dao,
        FlashAttention-2, 2023). These are five products, three of them along the head dim: 2.5 times the FLOP of the
        forward pass if head and value dims are equal.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            One kernel; empty if the forward pass saves nothing.
        """
        if not self.saved_tensors:
            return ()
        read = sum(t.bytes(precision) for t in (*self.saved_tensors, self.out))
        return (self._kernel("backward", self._flops(3, 2), read, sum(t.bytes(precision) for t in self.read_tensors)),)

    def _kernel(self, phase: Phase, flops: float, read: float, written: float) -> Kernel:
        batch, q, kv_heads, group, head_dim = self.query.sizes
        keys, attended = float(self.key.sizes[1]), float(self.attended_keys)
        if self.causal and attended == keys:
            keys = attended = (keys + float(q)) / 2
        shape = {
            "batch": float(batch),
            "q_heads": float(kv_heads * group),
            "kv_heads": float(kv_heads),
            "q_len": float(q),
            "kv_len": keys,
            "head_dim": float(head_dim),
            "value_dim": float(self.value.sizes[-1]),
            "causal": float(self.causal),
            "attended": attended,
            "dropout": float(self.dropout),
        }
        return Kernel(self.name, "attention", "fused", phase, flops, 5.0 * self._scores, read, written, shape)


#: Gates of a recurrent cell, which is the number of hidden x hidden products in a step.
GATES_BY_CELL = {"vanilla": 1, "gru": 3, "lstm": 4}


@dataclass(frozen=True, slots=True)
class _LoopedCell:
    """Cost of one step of a recurrent cell in a framework's loop, forward and backward.

    ``host_calls`` are calls of the host. ``accesses_per_state`` are numbers read and written per number of the state in
    the forward pass.
    """

    host_calls: tuple[float, float]
    accesses_per_state: tuple[float, float]


#: Cells of TensorFlow 1 (rnn_cell_impl.py, by name). They join input and state, multiply, add the bias, split, apply
#: the gates' functions, multiply and add; each step reads and writes arrays of states and pushes the tensors that the
#: backward pass pops.
_LOOPED_CELLS = {
    "vanilla": _LoopedCell((8.0, 10.0), (9.0, 7.0)),
    "gru": _LoopedCell((24.0, 30.0), (27.0, 21.0)),
    "lstm": _LoopedCell((26.0, 31.0), (26.0, 22.0)),
}


@dataclass(frozen=True, slots=True)
class LoopInputGradientSum:
    """Gradient accumulation for a tensor that every step of a loop reads, such as encoder outputs in a decoder RNN.

    ``out`` has one entry for each of the ``steps``.
    """

    out: Tensor
    steps: float

    @property
    def name(self) -> str:
        return f"{self.out.name}.steps"

    @property
    def read_tensors(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def independent_dims(self) -> frozenset[str]:
        return frozenset()

    def shard(self, ways: Mapping[str, float]) -> LoopInputGradientSum:
        """Return one rank's shard of the gradient.

        Parameters
        ----------
        ways : mapping of str to float
            Number of parts of each dim.

        Returns
        -------
        LoopInputGradientSum
            Share of one rank.
        """
        return replace(self, out=self.out.shard(ways))

    def forward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return no kernels: the accumulation happens in the backward pass only.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            Empty.
        """
        return ()

    def backward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return the backward kernel that sums the gradients of all time steps.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            Memory-bound kernel; empty if the tensor needs no gradient.
        """
        added = gradient_accumulation_kernel(self.name, float(self.out.elements), self.out.bytes(precision))
        return (replace(added, host_calls=self.steps),) if self.out.needs_gradient else ()


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Sequential part of a recurrent layer: h[t] = f(gates[t] + h[t-1] · U), with t over ``steps_dim``.

    A Contraction before it computes the input products of all steps. The weight gradient is one product over all steps.
    ``concatenated_input_features`` is 0 for kernels of whole layers. For a framework's own loop it is the number of
    input features that each step concatenates with the state; there the functions of the gates are separate passes, and
    the weight gradient is accumulated step by step.
    """

    name: str
    cell: str
    gates: Tensor
    weight: Tensor
    out: Tensor
    steps_dim: str = "seq"
    directions: int = 1
    #: Numbers saved for the backward pass per output number. None: the gates, the output and LSTM's cell are saved.
    saved_numbers_per_output: float | None = None
    concatenated_input_features: float = 0.0

    @property
    def read_tensors(self) -> tuple[Tensor, ...]:
        return (self.gates, self.weight)

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        if not (self.gates.needs_gradient or self.weight.needs_gradient):
            return ()
        if self.saved_numbers_per_output is not None:
            sizes = (*self.out.sizes[:-1], self.out.sizes[-1] * self.saved_numbers_per_output)
            return (replace(self.out, name=f"{self.name}.kept", sizes=sizes),)
        cells = (self.out.like(f"{self.name}.cell"),) if self.cell == "lstm" else ()
        return (self.gates, self.out, *cells)

    @property
    def independent_dims(self) -> frozenset[str]:
        return frozenset({self.steps_dim})

    def shard(self, ways: Mapping[str, float]) -> Recurrence:
        """Return one rank's shard of the recurrence.

        Parameters
        ----------
        ways : mapping of str to float
            Number of parts of each dim.

        Returns
        -------
        Recurrence
            Share of one rank.
        """
        gates, weight, out = shard_tensors((self.gates, self.weight, self.out), ways)
        return replace(self, gates=gates, weight=weight, out=out)

    @property
    def flops(self) -> float:
        steps = self.gates.size(self.steps_dim)
        return 2.0 * steps * self.gates.size("batch") * float(self.weight.elements)

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
        written = (self.out, *self.saved_tensors[2:])
        steps = self._kernel("forward", "fwd", self.read_tensors, written, precision)
        return (steps, self._loop_passes("forward", precision)) if self.concatenated_input_features else (steps,)

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
        if not self.saved_tensors:
            return ()
        read = (self.out, self.weight, *self.saved_tensors)
        data = self._kernel("backward", "bwd_data", read, (self.gates,), precision)
        weight = self._kernel("backward_weight", "bwd_filter", (self.out, self.gates), (self.weight,), precision)
        kernels = (data, weight) if self.weight.needs_gradient else (data,)
        if not self.concatenated_input_features:
            return kernels
        return (*kernels, self._loop_passes("backward", precision), *self._weight_gradient_sums(precision))

    @property
    def _total_steps(self) -> float:
        """Number of steps, summed over directions."""
        return float(self.gates.size(self.steps_dim)) * self.directions

    def _loop_passes(self, phase: Phase, precision: Precision) -> Kernel:
        """Build the kernel of all element-wise passes of an RNN that a framework runs as a loop over time steps.

        The backward pass moves twice the bytes.
        """
        cell, backward = _LOOPED_CELLS[self.cell], phase != "forward"
        count = float(self.out.elements) * (1.0 + backward)
        read, written = (count * number * precision.activation_bytes for number in cell.accesses_per_state)
        calls = self._total_steps * cell.host_calls[backward]
        return elementwise_kernel(f"{self.name}.cell", "elementwise", phase, count, read, written, calls=calls)

    def _weight_gradient_sums(self, precision: Precision) -> tuple[Kernel, ...]:
        """Build the kernel that accumulates the weight gradient over the time steps of a looped RNN."""
        if not self.weight.needs_gradient:
            return ()
        state, steps = float(self.out.sizes[-1]) / self.directions, self._total_steps
        widened = 1.0 + self.concatenated_input_features / state
        count = float(self.weight.elements) / self.directions * widened * steps
        size, name = count * precision.gradient_bytes, f"{self.name}.sum"
        return (elementwise_kernel(name, "elementwise", "backward_weight", count, 2.0 * size, size, calls=steps),)

    def _kernel(
        self, phase: Phase, operation: str, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], precision: Precision
    ) -> Kernel:
        shape = {
            "hidden": float(self.out.sizes[-1]) / self.directions,
            "batch": float(self.gates.size("batch")),
            "timesteps": float(self.gates.size(self.steps_dim)),
            "gates": float(GATES_BY_CELL[self.cell]),
            "directions": float(self.directions),
        }
        read, written = sum(t.bytes(precision) for t in reads), sum(t.bytes(precision) for t in writes)
        vector = 10.0 * float(self.gates.elements)
        return Kernel(self.name, "rnn", f"{self.cell}.{operation}", phase, self.flops, vector, read, written, shape)


#: Dims of attention that views merge with others.
_MERGED_ATTENTION_DIMS = frozenset({"keys", "group", "head_dim", "value_dim", "packed"})


def _undivided_dims(operation: Operation) -> tuple[frozenset[str], str]:
    """Return the dims of an operation that no parallel split may divide, and the reason for error messages."""
    if isinstance(operation, Recurrence):
        return frozenset({operation.steps_dim}), "its steps wait for one another"
    if isinstance(operation, RecomputedFusedChain):
        return operation.unsplit_dims, "its steps wait for one another"
    if is_attention_core(operation):
        return _MERGED_ATTENTION_DIMS, "attention is divided by batch, seq or kv_heads"
    if isinstance(operation, Contraction):
        return frozenset(window.kernel_dim for window in operation.windows), "it is the window of a convolution"
    moved = {dim for tensor in operation.read_tensors for dim in tensor.dims} - set(operation.out.dims)
    merged = isinstance(operation, MemoryPass) and operation.kind.merges_dims
    return frozenset(moved if merged else ()), "the layer moves it into another dim"


def _check_window(layer: str, operation: Contraction | MemoryPass, window: SlidingWindow, n: int) -> None:
    """Raise PlanError if a window reaches beyond the next neighbour, as halos are exchanged between neighbours only."""
    if n == 1:
        return
    source = operation.lhs if isinstance(operation, Contraction) else operation.inputs[0]
    for tensor, dim, rows in (
        (source, window.input_dim, window.halo),
        (operation.out, window.output_dim, window.gradient_halo),
    ):
        share = int(tensor.size(dim)) // n
        if share < max(rows):
            reach = f"its windows reach {max(rows)} beyond a share of {share}"
            raise PlanError(f"layer {layer!r}: {window.output_dim} {tensor.size(dim):g} over {n} ranks: {reach}")


def halo_rows(operation: Contraction | MemoryPass, window: SlidingWindow, when: str) -> tuple[int, int]:
    """Count the halo rows that a rank needs from its spatial neighbours.

    Parameters
    ----------
    operation : Contraction or MemoryPass
        The operation.
    window : SlidingWindow
        Window of the operation along the divided dim.
    when : str
        ``forward`` or ``backward``.

    Returns
    -------
    tuple of (int, int)
        Rows of the neighbours below and above. For a transposed convolution the two passes are swapped.
    """
    transposed = isinstance(operation, Contraction) and operation.transposed
    return window.halo if (when == "forward") != transposed else window.gradient_halo


# which dims may be divided, and into how many shares

#: Spatial dims of images, of a window's output and of its source.
_SPATIAL_DIMS = frozenset({"height", "width", "depth", "in_height", "in_width", "in_depth"})
#: Dims that may be split unevenly, where the rank with the largest share determines the time: a batch, a vocabulary
#: padded to the ranks, an image of odd height.
UNEVENLY_SPLITTABLE_DIMS = frozenset({"batch", "vocab"}) | _SPATIAL_DIMS


def check_parallel_split(
    layer: str, operations: Sequence[Operation], shards: Mapping[str, float], core: Mapping[str, float]
) -> None:
    """Raise PlanError if a parallel split divides dims of a layer that cannot be divided that way.

    Parameters
    ----------
    layer : str
        Name of the layer, for the error.
    operations : sequence of Operation
        Operations of the layer.
    shards : mapping of str to float
        Parts of each dim.
    core : mapping of str to float
        Parts of the dims of the core of attention, and of a scan.

    Raises
    ------
    PlanError
        If they cannot.
    """
    tensors = [t for op in operations for t in (*op.read_tensors, op.out)]
    for divisors in (shards,) if core == shards else (shards, core):
        for dim, n in divisors.items():
            _check_sizes(layer, operations, dim, int(n), [t for t in tensors if dim in t.dims])
    for operation in operations:
        undivided, reason = _undivided_dims(operation)
        divided = core if isinstance(operation, RecomputedFusedChain) else shards
        for dim in sorted(undivided & {dim for dim, n in divided.items() if n > 1}):
            raise PlanError(f"layer {layer!r}: {dim} cannot be divided: {reason}")
        if isinstance(operation, Contraction | MemoryPass):
            for window in operation.windows:
                _check_window(layer, operation, window, int(shards.get(window.output_dim, 1)))


def _check_sizes(layer: str, operations: Sequence[Operation], dim: str, n: int, tensors: list[Tensor]) -> None:
    sizes = [t.size(dim) for t in tensors]
    if n == 1 or not sizes or not isinstance(sizes[0], int):
        return
    if dim in _SPATIAL_DIMS:
        read = {t for op in operations for t in op.read_tensors}
        least = min(t.size(dim) for t in tensors if t.size(dim) > 1 or t not in read)
        if least < n:
            raise PlanError(f"layer {layer!r}: {dim} {least:g} cannot be divided over {n} ranks: some would have none")
    elif sizes[0] % n and dim not in UNEVENLY_SPLITTABLE_DIMS:
        raise PlanError(f"layer {layer!r}: {dim} {sizes[0]:g} cannot be divided over {n} ranks")
