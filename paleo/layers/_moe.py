"""Mixture of experts: a router, routed experts of which each token visits ``top_k``, and shared experts.

`clamped_expert_operations` counts experts with biases and clamped gates as a framework without fused kernels computes
them. Biases are added expert by expert in fp32, the format of the probabilities, and the pieces are concatenated and
cast back. The gate x · sigmoid(1.702 x) · (y + 1) of clamped x and y (gpt-oss model card, OpenAI, 2025) takes one pass
per term, and its product with the probabilities two more. Forward and backward together move about 270 bytes per routed
token and element of the width, and 100 more if activations are recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from paleo.errors import GraphError
from paleo.layers._linear import up_projection_operations
from paleo.layers.base import (
    LAYERS,
    Layer,
    LayerImplementations,
    LayerOperations,
    linear_projection,
    norm_pass,
    parameter_vector,
)
from paleo.operations.base import MemoryPass, Operation
from paleo.operations.tensor import DimSize, Tensor

#: Kind of passes that no compiler fuses, because the host cuts each expert's share by the counts of its tokens.
_UNFUSED_PASS_KIND = "eager"


def clamped_expert_operations(
    name: str, sent: Tensor, ffn: int, back: Mapping[str, DimSize]
) -> tuple[tuple[Operation, ...], Tensor]:
    """Return the feed-forward operations of MoE experts with a clamped gate, and the output tensor.

    Tokens ``sent`` have dims (experts, in_capacity, hidden). The operations are up projection, clamped gate and down
    projection. ``back`` maps the dim of the output to its size.
    """
    up, wide = linear_projection(f"{name}.up", sent, {"gates": 2, "ffn": ffn}, shared=("experts",))
    added, biased = _add_expert_bias(f"{name}.act.bias", wide)
    gated, inner = _clamped_gate(f"{name}.act", biased)
    down, out = linear_projection(f"{name}.down", inner, back, shared=("experts",))
    last, shifted = _add_expert_bias(f"{name}.bias", out)
    return (up, *added, *gated, down, *last), shifted


def _add_expert_bias(name: str, x: Tensor) -> tuple[tuple[Operation, ...], Tensor]:
    """Return the memory passes that add expert biases, weighted by routing probability, and the output tensor.

    The passes write the biases in fp32, add, concatenate, and cast back.
    """
    features = {dim: size for dim, size in x.shape.items() if dim != x.dims[1]}
    bias = Tensor.of(f"{name}.vector", features, "parameter")
    chances = x.without_dims(*(dim for dim in x.dims[2:]), name=f"{name}.probabilities", role="statistic")
    shift, summed, joined = (replace(x.like(f"{name}.{part}"), stays_fp32=True) for part in ("shift", "sum", "joined"))
    out = x.like(f"{name}.narrow")
    steps = (
        _unfused_pass((chances,), shift, parameters=(bias,)),
        _unfused_pass((x, shift), summed),
        _unfused_pass((summed,), joined, flops_per_element=0.0, backward_rule="free"),
        _unfused_pass((joined,), out),
    )
    return steps, out


def _clamped_gate(name: str, x: Tensor) -> tuple[tuple[Operation, ...], Tensor]:
    """Return the unfused memory passes of a clamped gated activation, and the output tensor.

    The halves of ``x`` along the dim ``gates`` are clamped and multiplied, times the routing probabilities in fp32.
    """
    half = x.without_dims("gates", name=f"{name}.half")
    gate, value, low, high, scaled, open_gate, opened, shifted, product = (
        half.like(f"{name}.{part}")
        for part in ("gate", "value", "clamped", "bounded", "scaled", "sigmoid", "opened", "shifted", "product")
    )
    chances = half.without_dims("ffn", name=f"{name}.probabilities", role="statistic")
    weighted = replace(half.like(f"{name}.weighted"), stays_fp32=True)
    out = half.like(name)
    steps = (
        _unfused_pass((gate,), low, saved=(gate,)),
        _unfused_pass((value,), high, saved=(value,)),
        _unfused_pass((low,), scaled),
        _unfused_pass((scaled,), open_gate, saved=(open_gate,), flops_per_element=4.0),
        _unfused_pass((low, open_gate), opened, saved=(low, open_gate), backward_rule="by input"),
        _unfused_pass((high,), shifted, backward_rule="free"),
        _unfused_pass((opened, shifted), product, saved=(opened, shifted), backward_rule="by input"),
        _unfused_pass((product, chances), weighted, saved=(product,), backward_rule="by input"),
        _unfused_pass((weighted,), out),
    )
    return steps, out


def _unfused_pass(inputs: tuple[Tensor, ...], out: Tensor, **more: Any) -> MemoryPass:
    return MemoryPass(out.name, _UNFUSED_PASS_KIND, inputs, out, **more)


@LAYERS.register("moe")
class MixtureOfExperts(Layer):
    """Mixture of experts over (batch, seq, hidden): router, dispatch, expert feed-forward layers, combine.

    Tokens are spread evenly: each expert processes tokens · top_k / experts of them, multiplied by ``capacity_factor``.
    ``shared`` experts of width ``shared_ffn`` process every token. ``router_bias`` shifts the logits of the router;
    ``score_bias`` is the load-balancing bias of DeepSeek-V3. ``groups`` is the number of expert groups among which the
    router chooses first (DeepSeek-V2, 2024, section 2.2.2). ``scores`` is the function from logits to scores;
    DeepSeek-V3 uses sigmoids with a balancing bias (technical report, 2024, section 2.1.2). Groups and sigmoids cost
    only CPU calls. With ``latent``, routed experts work on that many entries per token, between two
    projections that all tokens share (Nemotron 3 Super, 2025).

    Shared experts are feed-forward layers, ``shared_ffn`` wide, over the dim ``in_seq``. Tensor parallelism splits them
    even if routed experts take their tokens from a sequence split over tp; that sequence is then all-gathered for the
    shared experts (Megatron-Core's SharedExpertMLP).

    Each expert has ``capacity`` places for tokens. This dim is called ``capacity`` in dispatch and combine, and
    ``in_capacity`` inside the experts. If only ``capacity`` is split over tp, tokens are all-gathered before the
    experts, and the experts' partial sums reduce-scattered.
    """

    tensor_parallel_dims = ("ffn",)
    expert_parallel_dims = ("experts",)
    shared_expert_dims = ("shared_ffn",)
    experts: PositiveInt
    top_k: PositiveInt
    ffn: PositiveInt
    activation: Literal[
        "gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh", "swiglu", "geglu", "reglu", "clamped_swiglu"
    ] = "swiglu"
    bias: bool = False
    shared: NonNegativeInt = 0
    shared_ffn: PositiveInt | None = None
    shared_gate: bool = False
    router_bias: bool = False
    score_bias: bool = False
    groups: PositiveInt | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"
    latent: PositiveInt | None = None
    latent_norm: bool = False
    capacity_factor: Annotated[float, Field(gt=0)] = 1.0

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        if self.top_k > self.experts:
            raise GraphError(f"{name}: top_k {self.top_k} exceeds the {self.experts} experts")
        # Build the router: scores of every expert for every token, their softmax and the top k.
        more = (
            (choices.unfused_router_calls, True),
            (choices.grouped_router_calls, self.groups is not None),
            (choices.sigmoid_router_calls, self.scores == "sigmoid"),
        )
        forward, backward = (1.0 + sum(count[phase] for count, present in more if present) for phase in (0, 1))
        router, logits = linear_projection(f"{name}.router", x, {"choices": self.experts}, bias=self.router_bias)
        scores = logits.like(f"{name}.scores", role="statistic")
        extra = (Tensor(f"{name}.score_bias", ("choices",), (self.experts,), "parameter"),) if self.score_bias else ()
        soft = MemoryPass(
            f"{name}.top_k", "softmax", (logits,), scores, extra, (scores,), flops_per_element=6.0,
            reduced_dims=("choices",), host_calls=(forward, backward),
        )  # fmt: skip
        route = (router, soft)
        narrowed, routed = self._project_to_latent(name, x)
        hidden = routed.dims[-1]
        capacity = x.sizes[0] * x.sizes[1] * self.top_k * self.capacity_factor / self.experts
        sent = Tensor(f"{name}.dispatched", ("experts", "capacity", hidden), (self.experts, capacity, routed.sizes[-1]))
        dispatch = MemoryPass(f"{name}.dispatch", "gather", (routed,), sent, flops_per_element=0.0)
        arrived = sent.with_renamed_dims({"capacity": "in_capacity"})
        expert_ops, results = self._experts(f"{name}.expert", arrived, {hidden: routed.sizes[-1]}, choices)
        back, out = results.with_renamed_dims({"in_capacity": "capacity"}), x.like(name)
        combined = routed.like(f"{name}.combined") if self.latent else out
        combine = MemoryPass(f"{name}.combine", "scatter", (back, scores), combined, flops_per_element=2.0)
        widened: tuple[Operation, ...] = ()
        if self.latent:
            up, _ = linear_projection(f"{name}.latent_up", combined, {x.dims[-1]: x.sizes[-1]})
            widened = (replace(up, out=out),)
        shared, join = self._shared(name, x, out, choices)
        return LayerOperations((*shared, *route, *narrowed, dispatch, *expert_ops, combine, *widened, *join), out)

    def _project_to_latent(self, name: str, x: Tensor) -> tuple[tuple[Operation, ...], Tensor]:
        """Return the operations that project tokens to the ``latent`` width of routed experts, and their output tensor.

        Without ``latent`` there are none, and the output is ``x``.
        """
        if self.latent is None:
            return (), x
        down, tokens = linear_projection(f"{name}.latent_down", x, {"latent": self.latent})
        if not self.latent_norm:
            return (down,), tokens
        weight = parameter_vector(f"{name}.latent_norm.weight", tokens, "latent")
        norm = norm_pass(tokens, tokens.like(f"{name}.latent_norm"), (weight,))
        return (down, norm), norm.out

    def _experts(
        self, name: str, sent: Tensor, back: Mapping[str, DimSize], choices: LayerImplementations
    ) -> tuple[tuple[Operation, ...], Tensor]:
        """Return the feed-forward operations of all routed experts, and their output tensor.

        Probabilities are applied inside them, so that their output is not saved (Megatron-Core 0.12 and later).
        """
        if choices.experts == "stepwise" and self.bias and self.activation == "clamped_swiglu":
            return clamped_expert_operations(name, sent, self.ffn, back)
        shared = ("experts",)
        operations, inner = up_projection_operations(
            name, sent, self.ffn, self.activation, choices, bias=self.bias, shared=shared
        )
        down, out = linear_projection(f"{name}.down", inner, back, bias=self.bias, shared=shared)
        return (*operations, down), out

    def _shared(
        self, name: str, x: Tensor, out: Tensor, choices: LayerImplementations
    ) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
        """Return (operations of the shared experts, operations that add their output to the routed experts' output).

        The shared experts run before tokens are dispatched (Megatron-Core's MoELayer, NeMo AutoModel's MoE).
        """
        if not self.shared:
            return (), ()
        width, tokens = self.shared * (self.shared_ffn or self.ffn), x.with_renamed_dims({x.dims[1]: "in_seq"})
        up, inner = up_projection_operations(
            f"{name}.shared", tokens, width, self.activation, choices, bias=self.bias, dim="shared_ffn"
        )
        down, summed = linear_projection(f"{name}.shared.down", inner, {x.dims[-1]: x.sizes[-1]}, bias=self.bias)
        gate = (linear_projection(f"{name}.shared.gate", x, {"gate": 1})[0],) if self.shared_gate else ()
        added = summed.with_renamed_dims({"in_seq": x.dims[1]}), out
        return (*up, down, *gate), (MemoryPass(f"{name}.join", "elementwise", added, out, backward_rule="free"),)
