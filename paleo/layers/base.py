"""What a layer is: its YAML schema (pydantic fields) and one method that states its operations over named dims; and
which of its tensors need a gradient: those that something trained has gone into."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from paleo.errors import GraphError
from paleo.operations.base import MemoryPass, Operation, with_tensors
from paleo.operations.contraction import Contraction
from paleo.operations.tensor import LossKernels, Rotation, Size, Tensor
from paleo.registry import Registry

#: GELUs that plain framework code writes out.
_WRITTEN_OUT = ("gelu_tanh", "quick_gelu")
Attending = Literal["fused", "unfused", "stepwise"]
LAYERS: Registry[type[Layer]] = Registry("layer type", "paleo.layers")


@dataclass(frozen=True, slots=True)
class Choices:
    """How a framework carries layers out where it has a choice; a software profile sets it."""

    #: ``fused``: one kernel; ``unfused``: scores are kept, one kernel for scale, mask and softmax; ``stepwise``: a pass
    #: for each of those, and heads are copied next to each other, as plain framework code does.
    attention: Attending = "fused"
    #: ``fused``: reads the logits, writes log-probabilities; ``recomputed``: keeps the logits and a number a row, as
    #: the kernels of Apex and FlashAttention do; ``tiled``: head and loss together, a tile of tokens at a time, so that
    #: logits are never whole (Liger's fused linear cross-entropy, DeepSpeed's tiled logits); ``upcast``: logits are
    #: first written in fp32, as PyTorch's autocast does; ``stepwise``: a pass for each step of the vocabulary-parallel
    #: loss (Megatron-LM).
    loss: LossKernels = "fused"
    #: ``separate``: a pass for the function of a gate and one for the product, as eager frameworks make them.
    gates: Literal["fused", "separate"] = "fused"
    #: ``tanh-stepwise``: a pass for each term of ``gelu_tanh`` and ``quick_gelu``; ``stepwise``: every gelu so.
    gelu: Literal["fused", "tanh-stepwise", "stepwise"] = "fused"
    #: ``stepwise``: a pass for each term of biases and clamped gates of experts.
    experts: Literal["fused", "stepwise"] = "fused"
    #: What mixed precision computes and hands on in fp32.
    wide: frozenset[str] = frozenset()
    #: How often the loss is computed again, in fp32, for metrics of training.
    metrics: int = 0
    #: ``layer``: kernels for all steps of a recurrent layer; ``looped``: the operations of each step by themselves.
    recurrence: Literal["layer", "looped"] = "layer"
    #: Where relative attention keeps heads in its scores.
    relative: Literal["heads first", "heads last"] = "heads first"
    #: How gradients of a table that is looked up and multiplied by meet.
    tied: Literal["sum", "slices"] = "sum"
    #: Whether states for the next step pass through the host.
    memories_through_host: bool = False
    #: Operations, forward and backward, that rotate query and key of latent attention.
    latent_rotation: tuple[float, float] = (2.0, 2.0)
    #: Operations that a router with groups of experts has more than one without.
    grouped_router: tuple[float, float] = (0.0, 0.0)
    #: Operations that a router with sigmoids has more than one with a softmax.
    sigmoid_router: tuple[float, float] = (0.0, 0.0)
    #: Of which tokens a rank projects the latent vectors of latent attention where sequences are split over tp.
    latents: Literal["own", "all"] = "all"
    #: ``stepwise``: a pass for each step of the rotation of latent attention's query and key; ``complex``, ``halves``:
    #: of all queries and keys, as complex products in fp32 or by halves of heads.
    rotation: Rotation = "fused"
    #: Root-mean-square norms. ``upcast``: of inputs that are cast to fp32; ``stepwise``: a pass for each step.
    rms_norm: Literal["fused", "upcast", "stepwise"] = "fused"

    @property
    def stepwise(self) -> tuple[str, ...]:
        """Activations that are computed term by term."""
        return {"fused": (), "tanh-stepwise": _WRITTEN_OUT, "stepwise": ("gelu", *_WRITTEN_OUT)}[self.gelu]

    def output(self, out: Tensor, by: str) -> Tensor:
        """Return the output of a pass, in fp32 if mixed precision computes such passes in fp32.

        Parameters
        ----------
        out : Tensor
            Output tensor.
        by : str
            Name of the operation.

        Returns
        -------
        Tensor
            The tensor, perhaps ``wide``.
        """
        return replace(out, wide=True) if by in self.wide else out


@dataclass(frozen=True, slots=True)
class Expansion:
    """Operations of one layer, in order, and its output.

    ``whole`` is the tensor whose storage the output lies in, if the output is a part of one.
    """

    operations: tuple[Operation, ...]
    out: Tensor
    whole: Tensor | None = None


class Layer(BaseModel):
    """Base of all layers: fields are what a model file may say, ``expand`` is what the layer does.

    A subclass registers itself with ``@LAYERS.register("name")``; ``arity`` is how many inputs it takes (None: two or
    more). ``tensor_dims`` are the dims that tensor parallelism divides (empty: every rank of a group keeps all of it,
    as it costs little; None: nobody has said, so that a prediction warns where such a layer has parameters),
    ``expert_dims`` those that expert parallelism divides, ``shared_dims`` those of a mixture that tp divides whatever
    the tensor degree of its experts is, ``token_dims`` those that are divided as the sequence is between
    tensor-parallel layers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)
    arity: ClassVar[int | None] = 1
    #: Names of the inputs after the first that a layer may take, e.g. the memory of a cross attention.
    optional_inputs: ClassVar[int] = 0
    tensor_dims: ClassVar[tuple[str, ...] | None] = None
    expert_dims: ClassVar[tuple[str, ...]] = ()
    shared_dims: ClassVar[tuple[str, ...]] = ()
    token_dims: ClassVar[tuple[str, ...]] = ()

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        """Return the operations of the layer on its inputs.

        Parameters
        ----------
        name : str
            Name of the layer in the network.
        inputs : tuple of Tensor
            Input tensors with named dims.
        choices : Choices
            How the framework carries layers out.

        Returns
        -------
        Expansion
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
            shape = describe(x)
            raise GraphError(f"{name}: input {shape} has {len(x.dims)} dims, expected {expected}")


def describe(x: Tensor) -> str:
    """Write a shape for people: ``batch=32 × channels=3``.

    Parameters
    ----------
    x : Tensor
        A tensor.

    Returns
    -------
    str
        The text.
    """
    return " × ".join(f"{dim}={size:g}" for dim, size in zip(x.dims, x.sizes, strict=True))


def project(
    name: str,
    x: Tensor,
    outputs: dict[str, Size],
    *,
    bias: bool = False,
    contract: int = 1,
    shared: tuple[str, ...] = (),
    weight: str | None = None,
) -> tuple[Contraction, Tensor]:
    """Multiply the last dims of a tensor with a weight.

    A summed dim whose name is also an output dim is called ``in_<dim>`` inside, so that a strategy can split either
    one.

    Parameters
    ----------
    name : str
        Name of the product.
    x : Tensor
        The input.
    outputs : dict of str to Size
        Sizes of the output dims by name.
    bias : bool, optional
        Add a bias vector.
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
    lhs = x.renamed(inner)
    kept = {d: n for d, n in zip(x.dims, x.sizes, strict=True) if d not in summed}
    clash = [d for d in outputs if d in kept]
    if clash:
        raise GraphError(
            f"{name}: output dim {clash[0]!r} is also a dim of the input {describe(x)}; give it another `dim:`"
        )
    sizes = {d: x.size(d) for d in shared} | {d: lhs.size(d) for d in lhs.dims[len(lhs.dims) - contract :]} | outputs
    rhs = Tensor(weight or f"{name}.weight", tuple(sizes), tuple(sizes.values()), "parameter")
    out = Tensor(name, (*kept, *outputs), (*kept.values(), *outputs.values()))
    vector = None
    if bias:
        bias_sizes = {d: x.size(d) for d in shared} | outputs
        vector = Tensor(f"{name}.bias", tuple(bias_sizes), tuple(bias_sizes.values()), "parameter")
    return Contraction(name, lhs, rhs, out, vector), out


def vector(name: str, x: Tensor, dim: str) -> Tensor:
    """Make a parameter vector along one dim of a tensor, such as a scale or shift.

    Parameters
    ----------
    name : str
        Name of the parameter.
    x : Tensor
        The tensor.
    dim : str
        Its dim.

    Returns
    -------
    Tensor
        The parameter.
    """
    return Tensor(name, (dim,), (x.size(dim),), "parameter")


#: FLOP of a norm for each element: difference, square, sum, scale, shift; memory traffic decides its time.
NORM_FLOPS = 8.0

#: Element-wise functions: FLOP per element (a transcendental counts as one), and what backward needs: the input or the
#: output.
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


def activate(function: str, name: str, x: Tensor, choices: Choices) -> tuple[tuple[MemoryPass, ...], Tensor]:
    """Apply an element-wise activation function.

    Parameters
    ----------
    function : str
        Name in `ACTIVATIONS`.
    name : str
        Name of the pass.
    x : Tensor
        The input.
    choices : Choices
        Whether the framework computes the function step by step.

    Returns
    -------
    tuple[tuple[MemoryPass, ...], Tensor]
        The passes and the output tensor.
    """
    if function in choices.stepwise:
        return _quick_gelu_steps(name, x, choices) if function == "quick_gelu" else _gelu_steps(name, x, choices)
    flops, needed = ACTIVATIONS[function]
    out = choices.output(x.like(name), function)
    kept = x if needed == "input" else out
    return (MemoryPass(name, "elementwise", (x,), out, keeps=(kept,), flops_per_element=flops),), out


def _gelu_steps(name: str, x: Tensor, choices: Choices) -> tuple[tuple[MemoryPass, ...], Tensor]:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) term by term (Hendrycks and Gimpel, 2016), as BERT's and GPT-2's
    own code has it; sums hand their gradient on."""
    cube = choices.output(x.like(f"{name}.cube"), "gelu")
    scaled, summed, inner, tanh, shifted, out = (
        cube.like(f"{name}{part}") for part in (".scaled", ".sum", ".inner", ".tanh", ".shifted", "")
    )
    half = x.like(f"{name}.half")
    steps = (
        MemoryPass(cube.name, "elementwise", (x,), cube, keeps=(x,), flops_per_element=2.0),
        MemoryPass(scaled.name, "elementwise", (cube,), scaled),
        MemoryPass(summed.name, "elementwise", (x, scaled), summed),
        MemoryPass(inner.name, "elementwise", (summed,), inner),
        MemoryPass(tanh.name, "elementwise", (inner,), tanh, keeps=(tanh,), flops_per_element=5.0),
        MemoryPass(shifted.name, "elementwise", (tanh,), shifted, backward_pass="free"),
        MemoryPass(half.name, "elementwise", (x,), half),
        MemoryPass(name, "elementwise", (half, shifted), out, keeps=(half, shifted)),
    )
    return steps, out


def _quick_gelu_steps(name: str, x: Tensor, choices: Choices) -> tuple[tuple[MemoryPass, ...], Tensor]:
    """x · sigmoid(1.702 x) term by term (Hendrycks and Gimpel, 2016), as CLIP's own code has it."""
    out = choices.output(x.like(name), "gelu")
    scaled, opened = (out.like(f"{name}.{part}") for part in ("scaled", "opened"))
    steps = (
        MemoryPass(scaled.name, "elementwise", (x,), scaled),
        MemoryPass(opened.name, "elementwise", (scaled,), opened, keeps=(opened,), flops_per_element=4.0),
        MemoryPass(name, "elementwise", (x, opened), out, keeps=(x, opened)),
    )
    return steps, out


def gate(
    name: str, function: str, x: Tensor, gates_dim: str, *, separate: bool = False
) -> tuple[tuple[MemoryPass, ...], Tensor]:
    """Apply a gated linear unit, f(gate) · up, to the two halves along a dim.

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
        Activation and product are two passes.

    Returns
    -------
    tuple[tuple[MemoryPass, ...], Tensor]
        The passes and the output tensor.

    References
    ----------
    Shazeer, GLU Variants Improve Transformer, 2020.
    """
    out = x.without(gates_dim, name=name)
    flops = ACTIVATIONS[function][0]
    if not separate:
        return (MemoryPass(name, "elementwise", (x,), out, keeps=(x,), flops_per_element=flops + 1.0),), out
    opened, partner, activated = (out.like(f"{name}.{part}") for part in ("gate", "partner", "opened"))
    first = MemoryPass(activated.name, "elementwise", (opened,), activated, keeps=(opened,), flops_per_element=flops)
    return (first, MemoryPass(name, "elementwise", (activated, partner), out, keeps=(activated, partner))), out


def option(value: Any, length: int, *, field: str, name: str) -> tuple[int, ...]:
    """Expand a field that may be one number for all spatial dims or a list with one for each.

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


def frozen(expansion: Expansion) -> Expansion:
    """Mark the weights of a layer as not trained.

    Parameters
    ----------
    expansion : Expansion
        Operations of the layer.

    Returns
    -------
    Expansion
        A copy whose parameters need no gradient.
    """

    def untrained(tensor: Tensor) -> Tensor:
        return replace(tensor, grad=False) if tensor.role == "parameter" else tensor

    return replace(
        expansion, operations=tuple(with_tensors(operation, untrained) for operation in expansion.operations)
    )


def with_gradients_as_needed(expansion: Expansion, inputs: tuple[Tensor, ...]) -> Expansion:
    """Mark tensors that need no gradient because neither an input nor an earlier weight of the layer does.

    Such operations save nothing. A layer whose inputs need no gradient computes without gradients up to its first
    weight.

    Parameters
    ----------
    expansion : Expansion
        Operations of the layer.
    inputs : tuple of Tensor
        Inputs of the layer.

    Returns
    -------
    Expansion
        A copy.
    """
    if any(tensor.grad for tensor in inputs) or not expansion.operations:
        return expansion
    idle = {tensor.name for tensor in inputs}
    operations = []
    for operation in expansion.operations:
        needs = any(t.grad and t.name not in idle and t.role in ("activation", "parameter") for t in operation.reads)
        if not needs:
            idle.add(operation.out.name)

        def marked(tensor: Tensor, names: frozenset[str] = frozenset(idle)) -> Tensor:
            return replace(tensor, grad=False) if tensor.name in names else tensor

        changed = with_tensors(operation, marked)
        if not needs and isinstance(changed, MemoryPass):
            changed = replace(changed, keeps=())
        operations.append(changed)
    needed = expansion.out.grad and expansion.out.name not in idle
    return Expansion(tuple(operations), replace(expansion.out, grad=needed))
