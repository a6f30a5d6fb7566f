"""Base of layers: a YAML schema (pydantic fields), and a method that returns operations over named dims.

`LayerImplementations` says how a framework implements layers. `without_unneeded_gradients` removes gradients that no
trained weight needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from paleo.errors import GraphError
from paleo.operations.base import MemoryPass, Operation, map_tensors
from paleo.operations.contraction import Contraction
from paleo.operations.tensor import CrossEntropyImplementation, DimSize, RotaryImplementation, Tensor
from paleo.registry import Registry

#: GELU variants that plain framework code computes term by term.
_WRITTEN_OUT = ("gelu_tanh", "quick_gelu")
AttentionImplementation = Literal["fused", "unfused", "stepwise"]
LAYERS: Registry[type[Layer]] = Registry("layer type", "paleo.layers")


@dataclass(frozen=True, slots=True)
class LayerImplementations:
    """Implementation choices of a training framework that change the kernels of a layer.

    A software profile sets them.
    """

    #: Attention. ``fused``: one kernel. ``unfused``: scores are saved; one kernel for scale, mask and softmax.
    #: ``stepwise``: a pass for each of those, and copies that make heads contiguous, as in plain framework code.
    attention: AttentionImplementation = "fused"
    #: Cross-entropy. ``fused``: reads logits, writes log-probabilities. ``recomputed``: saves the logits and one number
    #: per row, as the kernels of Apex and FlashAttention do. ``tiled``: head and loss in one kernel over tiles of
    #: tokens, so that the logits never exist in memory (Liger's fused linear cross-entropy, DeepSpeed's tiled logits).
    #: ``separate``: log-softmax and the choice of the target are functions of their own, as in eager PyTorch.
    #: ``upcast``: so, and logits are first written in fp32, as PyTorch's autocast does. ``stepwise``: a pass for each
    #: step of the vocabulary-parallel loss (Megatron-LM).
    loss: CrossEntropyImplementation = "fused"
    #: Gated activations. ``separate``: one pass for the gate's function and one for the product, as in eager mode.
    gates: Literal["fused", "separate"] = "fused"
    #: GELU. ``tanh-stepwise``: a pass for each term of ``gelu_tanh`` and ``quick_gelu``; ``stepwise``: of every GELU.
    gelu: Literal["fused", "tanh-stepwise", "stepwise"] = "fused"
    #: Experts. ``stepwise``: a pass for each term of their biases and clamped gates.
    experts: Literal["fused", "stepwise"] = "fused"
    #: Functions that mixed precision computes in fp32, with fp32 output.
    fp32_functions: frozenset[str] = frozenset()
    #: Extra evaluations of the loss, in fp32, for training metrics.
    metric_loss_evaluations: int = 0
    #: Recurrent layers. ``layer``: one kernel for all steps; ``looped``: separate operations for each step.
    recurrence: Literal["layer", "looped"] = "layer"
    #: Position of the heads dim in the scores of relative attention.
    relative_attention_layout: Literal["heads first", "heads last"] = "heads first"
    #: How gradients of a table that serves as embedding and as weight are accumulated.
    tied_gradient_accumulation: Literal["sum", "slices"] = "sum"
    #: True if saved states for the next step are copied through the host.
    memories_through_host: bool = False
    #: Calls of the host, forward and backward, to rotate query and key of latent attention.
    latent_rotation_calls: tuple[float, float] = (2.0, 2.0)
    #: Extra calls of the host, forward and backward, for a router with groups of experts.
    grouped_router_calls: tuple[float, float] = (0.0, 0.0)
    #: Extra calls of the host, forward and backward, for a router with sigmoids instead of a softmax.
    sigmoid_router_calls: tuple[float, float] = (0.0, 0.0)
    #: Extra calls of the host, forward and backward, for a router without fused kernels.
    unfused_router_calls: tuple[float, float] = (0.0, 0.0)
    #: Tokens whose latent vectors a rank projects in latent attention if sequences are split over tp.
    latent_tokens: Literal["own", "all"] = "all"
    #: Key heads of a network with fewer than tensor-parallel ranks, which gather what the product makes; else None.
    gathered_key_heads: int | None = None
    #: Rotary embedding. ``stepwise``: a pass for each step, of latent attention only. ``complex``, ``halves``: separate
    #: passes in every attention, as complex products in fp32 or by halves of heads.
    rotation: RotaryImplementation = "fused"
    #: Root-mean-square norms. ``upcast``: of inputs that are cast to fp32; ``stepwise``: a pass for each step.
    rms_norm: Literal["fused", "upcast", "stepwise"] = "fused"

    @property
    def unfused_activations(self) -> tuple[str, ...]:
        """Names of the activations that the framework computes term by term, one pass each."""
        return {"fused": (), "tanh-stepwise": _WRITTEN_OUT, "stepwise": ("gelu", *_WRITTEN_OUT)}[self.gelu]

    def with_output_precision(self, out: Tensor, by: str) -> Tensor:
        """Return a layer's output tensor, marked as fp32 if autocast computes the operation ``by`` in fp32.

        Parameters
        ----------
        out : Tensor
            Output tensor.
        by : str
            Name of the operation.

        Returns
        -------
        Tensor
            The same tensor, with ``stays_fp32`` set if autocast computes the operation in fp32.
        """
        return replace(out, stays_fp32=True) if by in self.fp32_functions else out


@dataclass(frozen=True, slots=True)
class LayerOperations:
    """Result of `Layer.to_operations`: operations of a layer in order, and the output tensor.

    ``storage`` is the tensor whose storage holds the output, if the output is a view of part of it.
    """

    operations: tuple[Operation, ...]
    out: Tensor
    storage: Tensor | None = None

    @classmethod
    def of(cls, *operations: Operation) -> LayerOperations:
        """Return operations of which the last computes the output.

        Parameters
        ----------
        *operations : Operation
            Operations in order.

        Returns
        -------
        LayerOperations
            The operations, and the output of the last.
        """
        return cls(operations, operations[-1].out)


class Layer(BaseModel):
    """Base of all layers of a network: fields are the options in a model file, `to_operations` returns the operations.

    A subclass registers itself with ``@LAYERS.register("name")``. ``input_count`` is the number of inputs (None: two or
    more). ``tensor_parallel_dims`` are the dims that tensor parallelism splits. If it is empty, every rank of a
    tensor-parallel group computes the whole layer, as it costs little; if it is None, a prediction warns if the layer
    has parameters. ``expert_parallel_dims`` are split by expert parallelism. ``shared_expert_dims`` are those of a
    mixture's shared experts, which tensor parallelism splits even if routed experts have another degree.
    ``sequence_parallel_dims`` are split as the sequence is between tensor-parallel layers (sequence parallelism).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)
    input_count: ClassVar[int | None] = 1
    #: Number of optional inputs after the required ones, such as the encoder output of a cross attention.
    optional_input_count: ClassVar[int] = 0
    tensor_parallel_dims: ClassVar[tuple[str, ...] | None] = None
    expert_parallel_dims: ClassVar[tuple[str, ...]] = ()
    shared_expert_dims: ClassVar[tuple[str, ...]] = ()
    sequence_parallel_dims: ClassVar[tuple[str, ...]] = ()

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        """Expand the layer to operations on the given inputs.

        Parameters
        ----------
        name : str
            Name of the layer in the network.
        inputs : tuple of Tensor
            Input tensors with named dims.
        choices : LayerImplementations
            How the framework carries layers out.

        Returns
        -------
        LayerOperations
            Operations in order, and the output.

        Raises
        ------
        GraphError
            If the inputs do not fit the layer.
        """
        raise NotImplementedError

    def check_rank(self, name: str, x: Tensor, ranks: tuple[int, ...]) -> None:
        """Check the number of dims of an input.

        Parameters
        ----------
        name : str
            Name of the layer, for messages.
        x : Tensor
            The input.
        ranks : tuple of int
            Allowed numbers of dims.

        Raises
        ------
        GraphError
            If the input has another number.
        """
        if len(x.dims) not in ranks:
            expected = " or ".join(str(rank) for rank in ranks)
            shape = format_shape(x)
            raise GraphError(f"{name}: input {shape} has {len(x.dims)} dims, expected {expected}")


def format_shape(x: Tensor) -> str:
    """Format a tensor's shape for messages: ``batch=32 × channels=3``.

    Parameters
    ----------
    x : Tensor
        A tensor.

    Returns
    -------
    str
        The text.
    """
    return " × ".join(f"{dim}={size:g}" for dim, size in x.shape.items())


def linear_projection(
    name: str,
    x: Tensor,
    outputs: Mapping[str, DimSize],
    *,
    bias: bool = False,
    contract: int = 1,
    shared: tuple[str, ...] = (),
    weight: str | None = None,
) -> tuple[Contraction, Tensor]:
    """Return the product of a tensor's last dims with a weight (a linear projection), and its output tensor.

    A summed dim whose name is also an output dim is renamed ``in_<dim>`` inside, so that a strategy can split either
    one.

    Parameters
    ----------
    name : str
        Name of the product.
    x : Tensor
        The input.
    outputs : dict of str to DimSize
        Sizes of the output dims by name.
    bias : bool, optional
        True to add a bias vector.
    contract : int, optional
        Number of trailing dims that are summed.
    shared : tuple of str, optional
        Dims that batch the weight, such as experts.
    weight : str, optional
        Name of the weight if it is shared with another layer.

    Returns
    -------
    tuple[Contraction, Tensor]
        The product and its output tensor.

    Raises
    ------
    GraphError
        If an output dim is also a dim of the input.
    """
    summed = x.dims[len(x.dims) - contract :]
    inner = {dim: f"in_{dim}" for dim in summed if dim in outputs}
    lhs = x.with_renamed_dims(inner)
    kept = {d: n for d, n in x.shape.items() if d not in summed}
    if clash := [d for d in outputs if d in kept]:
        raise GraphError(
            f"{name}: output dim {clash[0]!r} is also a dim of the input {format_shape(x)}; give it another `dim:`"
        )
    batched = {d: x.size(d) for d in shared}
    taken = {d: lhs.size(d) for d in lhs.dims[len(lhs.dims) - contract :]}
    rhs = Tensor.of(weight or f"{name}.weight", {**batched, **taken, **outputs}, "parameter")
    out = Tensor.of(name, {**kept, **outputs})
    vector = Tensor.of(f"{name}.bias", {**batched, **outputs}, "parameter") if bias else None
    return Contraction(name, lhs, rhs, out, vector), out


def parameter_vector(name: str, x: Tensor, dim: str) -> Tensor:
    """Return a parameter vector along one dim of a tensor, such as a scale or shift.

    Parameters
    ----------
    name : str
        Name of the parameter.
    x : Tensor
        The tensor.
    dim : str
        Dim of the vector.

    Returns
    -------
    Tensor
        The parameter.
    """
    return Tensor(name, (dim,), (x.size(dim),), "parameter")


#: FLOP of a norm per element: difference, square, sum, scale, shift. Its time follows from memory traffic.
NORM_FLOPS_PER_ELEMENT = 8.0


def norm_pass(x: Tensor, out: Tensor, weights: tuple[Tensor, ...] = (), dims: tuple[str, ...] = ()) -> MemoryPass:
    """Return the pass of a norm that saves its input.

    Parameters
    ----------
    x : Tensor
        The input.
    out : Tensor
        The output, after which the pass is named.
    weights : tuple of Tensor, optional
        Learned scale and shift.
    dims : tuple of str, optional
        Dims of a row; by default the last dim.

    Returns
    -------
    MemoryPass
        The pass.
    """
    rows = dims or (x.dims[-1],)
    return MemoryPass(out.name, "norm", (x,), out, weights, (x,), NORM_FLOPS_PER_ELEMENT, reduced_dims=rows)


#: Element-wise functions -> FLOP per element (a transcendental function counts as one), and whether the backward pass
#: needs the input or the output.
ACTIVATIONS: dict[str, tuple[float, Literal["input", "output"]]] = {
    "relu": (1.0, "output"),
    "relu6": (2.0, "output"),
    "leaky_relu": (2.0, "output"),
    "sigmoid": (4.0, "output"),
    "tanh": (5.0, "output"),
    "gelu": (8.0, "input"),
    "gelu_tanh": (8.0, "input"),
    "quick_gelu": (6.0, "input"),
    "silu": (5.0, "input"),
    "hard_swish": (5.0, "input"),
    "elu": (4.0, "output"),
    "softplus": (4.0, "input"),
}


#: Bytes moved by autograd's gradient of a power (x^(n - 1), its product with n, that with the gradient), 28 an element
#: in fp32, relative to the 12 of a single pass.
POWER_GRADIENT_TRAFFIC_FACTOR = 28.0 / 12.0


def activation_passes(
    function: str, name: str, x: Tensor, choices: LayerImplementations
) -> tuple[tuple[MemoryPass, ...], Tensor]:
    """Return the passes of an element-wise activation function, and the output tensor.

    Parameters
    ----------
    function : str
        Name in `ACTIVATIONS`.
    name : str
        Name of the pass.
    x : Tensor
        The input.
    choices : LayerImplementations
        Implementation of the framework, which may compute the function term by term.

    Returns
    -------
    tuple[tuple[MemoryPass, ...], Tensor]
        The passes and the output tensor.
    """
    if function in choices.unfused_activations:
        return _quick_gelu_steps(name, x, choices) if function == "quick_gelu" else _gelu_steps(name, x, choices)
    flops, needed = ACTIVATIONS[function]
    out = choices.with_output_precision(x.like(name), function)
    kept = x if needed == "input" else out
    return (MemoryPass(name, "elementwise", (x,), out, saved=(kept,), flops_per_element=flops),), out


def _gelu_steps(name: str, x: Tensor, choices: LayerImplementations) -> tuple[tuple[MemoryPass, ...], Tensor]:
    """Return the passes of x/2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³))), one per term, and the output tensor.

    The original code of BERT and GPT-2 computes GELU in this way (Hendrycks and Gimpel, 2016). PyTorch
    (``tanh-stepwise``) runs the gradient of the power in three passes and that of the last product in two. Two more add
    up the gradients of the three uses of x, for which the backward pass of the first sum stands. Autocast's power reads
    a copy in fp32. Graphs of TensorFlow are priced with a pass each, which its measured steps suit better.
    """
    cube = choices.with_output_precision(x.like(f"{name}.cube"), "gelu")
    scaled, summed, inner, tanh, shifted, out = (
        cube.like(f"{name}{part}") for part in (".scaled", ".sum", ".inner", ".tanh", ".shifted", "")
    )
    half, wide = x.like(f"{name}.half"), replace(x.like(f"{name}.wide"), stays_fp32=True)
    autograd = choices.gelu == "tanh-stepwise"
    cast = autograd and cube.stays_fp32 and not x.stays_fp32
    power = wide if cast else x
    sweeps = (POWER_GRADIENT_TRAFFIC_FACTOR, 2.0) if autograd else (1.0, 1.0)
    steps = (
        *((MemoryPass(wide.name, "elementwise", (x,), wide),) if cast else ()),
        MemoryPass(cube.name, "elementwise", (power,), cube, (), (power,), 2.0, backward_traffic_factor=sweeps[0]),
        MemoryPass(scaled.name, "elementwise", (cube,), scaled),
        MemoryPass(summed.name, "elementwise", (x, scaled), summed, backward_traffic_factor=sweeps[1]),
        MemoryPass(inner.name, "elementwise", (summed,), inner),
        MemoryPass(tanh.name, "elementwise", (inner,), tanh, saved=(tanh,), flops_per_element=5.0),
        MemoryPass(shifted.name, "elementwise", (tanh,), shifted, backward_rule="free"),
        MemoryPass(half.name, "elementwise", (x,), half),
        MemoryPass(name, "elementwise", (half, shifted), out, saved=(half, shifted),
                   backward_rule="by input" if autograd else "derived"),
    )  # fmt: skip
    return steps, out


def _quick_gelu_steps(name: str, x: Tensor, choices: LayerImplementations) -> tuple[tuple[MemoryPass, ...], Tensor]:
    """Return the passes of x · sigmoid(1.702 x), one per term, and the output tensor.

    The original code of CLIP computes it in this way (Hendrycks and Gimpel, 2016).
    """
    out = choices.with_output_precision(x.like(name), "gelu")
    scaled, opened = (out.like(f"{name}.{part}") for part in ("scaled", "opened"))
    steps = (
        MemoryPass(scaled.name, "elementwise", (x,), scaled),
        MemoryPass(opened.name, "elementwise", (scaled,), opened, saved=(opened,), flops_per_element=4.0),
        MemoryPass(name, "elementwise", (x, opened), out, saved=(x, opened)),
    )
    return steps, out


def gated_unit_passes(
    name: str, function: str, x: Tensor, gates_dim: str, *, separate: bool = False
) -> tuple[tuple[MemoryPass, ...], Tensor]:
    """Return the passes of a gated linear unit, f(gate) · up, on the two halves along a dim, and the output tensor.

    One pass saves the two halves. Separate passes also save f(gate), as autograd's product needs it.

    Parameters
    ----------
    name : str
        Name of the pass.
    function : str
        Activation f, a name in `ACTIVATIONS`.
    x : Tensor
        Tensor that holds gate and up.
    gates_dim : str
        Dim of size 2 that separates them.
    separate : bool, optional
        True if activation and product are two passes.

    Returns
    -------
    tuple[tuple[MemoryPass, ...], Tensor]
        The passes and the output tensor.

    References
    ----------
    Shazeer, GLU Variants Improve Transformer, 2020.
    """
    out = x.without_dims(gates_dim, name=name)
    flops = ACTIVATIONS[function][0]
    if not separate:
        return (MemoryPass(name, "elementwise", (x,), out, saved=(x,), flops_per_element=flops + 1.0),), out
    opened, partner, activated = (out.like(f"{name}.{part}") for part in ("gate", "partner", "opened"))
    first = MemoryPass(activated.name, "elementwise", (opened,), activated, saved=(opened,), flops_per_element=flops)
    return (first, MemoryPass(name, "elementwise", (activated, partner), out, saved=(activated, partner))), out


def option_per_spatial_dim(value: Any, length: int, *, field: str, name: str) -> tuple[int, ...]:
    """Return one number per spatial dim, from an option that is one number for all or a list.

    Parameters
    ----------
    value : Any
        The field's value.
    length : int
        Number of spatial dims.
    field : str
        Name of the field, for messages.
    name : str
        Name of the layer, for messages.

    Returns
    -------
    tuple of int
        One number a dim.

    Raises
    ------
    GraphError
        If a list has another length.
    """
    values = tuple(value) if isinstance(value, list | tuple) else (value,) * length
    if len(values) != length:
        raise GraphError(f"{name}: {field} {list(values)} has {len(values)} entries, expected {length}")
    return values


def with_frozen_weights(expansion: LayerOperations) -> LayerOperations:
    """Return a layer's operations with its weights marked as not trained.

    Parameters
    ----------
    expansion : LayerOperations
        Operations of the layer.

    Returns
    -------
    LayerOperations
        Copy whose parameters need no gradient.
    """

    def untrained(tensor: Tensor) -> Tensor:
        return replace(tensor, needs_gradient=False) if tensor.role == "parameter" else tensor

    return replace(expansion, operations=tuple(map_tensors(operation, untrained) for operation in expansion.operations))


def without_unneeded_gradients(expansion: LayerOperations, inputs: tuple[Tensor, ...]) -> LayerOperations:
    """Return a layer's operations without gradients for tensors that no trained weight influences.

    Such tensors are computed from no trained weight. If no input of the layer needs a gradient, the backward pass stops
    at the layer's first trained weight, and the operations before that weight save no activations.

    Parameters
    ----------
    expansion : LayerOperations
        Operations of the layer.
    inputs : tuple of Tensor
        Inputs of the layer.

    Returns
    -------
    LayerOperations
        Copy with these tensors marked.
    """
    if any(tensor.needs_gradient for tensor in inputs) or not expansion.operations:
        return expansion
    idle = {tensor.name for tensor in inputs}
    operations = []
    for operation in expansion.operations:
        needs = any(
            t.needs_gradient and t.name not in idle and t.role in ("activation", "parameter")
            for t in operation.read_tensors
        )
        if not needs:
            idle.add(operation.out.name)

        def marked(tensor: Tensor, names: frozenset[str] = frozenset(idle)) -> Tensor:
            return replace(tensor, needs_gradient=False) if tensor.name in names else tensor

        changed = map_tensors(operation, marked)
        if not needs and isinstance(changed, MemoryPass):
            changed = replace(changed, saved=())
        operations.append(changed)
    needed = expansion.out.needs_gradient and expansion.out.name not in idle
    return LayerOperations(tuple(operations), replace(expansion.out, needs_gradient=needed))
