"""Mixture of experts: a router, routed experts of which each token visits ``top_k``, and experts that all tokens
share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Expansion, Layer, project
from paleo.layers.clamped_experts import clamped_experts
from paleo.layers.linear import feed_forward
from paleo.operations.memory_pass import MemoryPass
from paleo.operations.tensor import Tensor

if TYPE_CHECKING:
    from paleo.layers.base import Choices
    from paleo.operations.base import Operation
    from paleo.operations.tensor import Size


@LAYERS.register("moe")
class MixtureOfExperts(Layer):
    """Router, dispatch, expert feed-forward blocks, combine, over (batch, seq, hidden).

    Tokens spread evenly: each expert sees tokens · top_k / experts of them (``capacity_factor`` pads that). ``shared``
    experts of width ``shared_ffn`` see every token. ``router_bias`` shifts the logits of the router; ``score_bias`` is
    the load-balancing bias of DeepSeek-V3.
    """

    tensor_dims = ("ffn",)
    expert_dims = ("experts",)
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
    capacity_factor: Annotated[float, Field(gt=0)] = 1.0

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        if self.top_k > self.experts:
            raise GraphError(f"{name}: top_k {self.top_k} exceeds the {self.experts} experts")
        route, scores = self._route(name, x)
        hidden = x.dims[-1]
        capacity = x.sizes[0] * x.sizes[1] * self.top_k * self.capacity_factor / self.experts
        sent = Tensor(f"{name}.dispatched", ("experts", "capacity", hidden), (self.experts, capacity, x.sizes[-1]))
        dispatch = MemoryPass(f"{name}.dispatch", "gather", (x,), sent, flops_per_element=0.0)
        expert_ops, back = self._experts(f"{name}.expert", sent, {hidden: x.sizes[-1]}, choices)
        out = x.like(name)
        combine = MemoryPass(f"{name}.combine", "scatter", (back, scores), out, flops_per_element=2.0)
        return Expansion((*route, dispatch, *expert_ops, combine, *self._shared(name, x, out, choices)), out)

    def _experts(
        self, name: str, sent: Tensor, back: dict[str, Size], choices: Choices
    ) -> tuple[tuple[Operation, ...], Tensor]:
        """The feed-forward blocks of all experts; their probabilities are applied inside, so that what comes back is
        not kept (Megatron-Core 0.12 and later)."""
        if choices.experts == "stepwise" and self.bias and self.activation == "clamped_swiglu":
            return clamped_experts(name, sent, self.ffn, back)
        shared = ("experts",)
        operations, inner = feed_forward(name, sent, self.ffn, self.activation, choices, bias=self.bias, shared=shared)
        down, out = project(f"{name}.down", inner, back, bias=self.bias, shared=shared)
        return (*operations, down), out

    def _route(self, name: str, x: Tensor) -> tuple[tuple[Operation, ...], Tensor]:
        """Scores of every expert for every token, their softmax and the top k."""
        router, logits = project(f"{name}.router", x, {"choices": self.experts}, bias=self.router_bias)
        scores = logits.like(f"{name}.scores", role="statistic")
        extra = (Tensor(f"{name}.score_bias", ("choices",), (self.experts,), "parameter"),) if self.score_bias else ()
        soft = MemoryPass(
            f"{name}.top_k", "softmax", (logits,), scores, extra, (scores,), flops_per_element=6.0, reduces=("choices",)
        )
        return (router, soft), scores

    def _shared(self, name: str, x: Tensor, out: Tensor, choices: Choices) -> tuple[Operation, ...]:
        if not self.shared:
            return ()
        width = self.shared * (self.shared_ffn or self.ffn)
        up, inner = feed_forward(f"{name}.shared", x, width, self.activation, choices, bias=self.bias)
        down, summed = project(f"{name}.shared.down", inner, {x.dims[-1]: x.sizes[-1]}, bias=self.bias)
        operations: tuple[Operation, ...] = (*up, down)
        if self.shared_gate:
            gate, _ = project(f"{name}.shared.gate", x, {"gate": 1})
            operations += (gate,)
        return (*operations, MemoryPass(f"{name}.join", "elementwise", (summed, out), out, backward_pass="free"))
