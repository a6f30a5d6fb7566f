"""Experts with biases and clamped gates, pass by pass, as a framework computes them that has no kernel for these.

Biases are added expert by expert, in fp32 as the probabilities are, and the pieces joined and narrowed again; the gate
x · sigmoid(1.702 x) · (y + 1) of clamped x and y (gpt-oss model card, OpenAI, 2025) takes a pass for each term, its
product with the probabilities another two. Forward and backward together these are about 270 bytes for each routed
token and element of the width, and 100 more where activations are recomputed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paleo.layers.base import project
from paleo.operations.memory_pass import MemoryPass
from paleo.operations.tensor import Tensor

if TYPE_CHECKING:
    from paleo.operations.base import Operation
    from paleo.operations.tensor import Size

#: Passes that no compiler merges: each expert's share is cut out by counts that the host knows.
EAGER = "eager"


def clamped_experts(name: str, sent: Tensor, ffn: int, back: dict[str, Size]) -> tuple[tuple[Operation, ...], Tensor]:
    """Tokens (experts, capacity, hidden) through up projection, gate and down projection; ``back``: the dim of the
    output and its size."""
    up, wide = project(f"{name}.up", sent, {"gates": 2, "ffn": ffn}, shared=("experts",))
    added, biased = _biased(f"{name}.act.bias", wide)
    gated, inner = _gated(f"{name}.act", biased)
    down, out = project(f"{name}.down", inner, back, shared=("experts",))
    last, shifted = _biased(f"{name}.bias", out)
    return (up, *added, *gated, down, *last), shifted


def _biased(name: str, x: Tensor) -> tuple[tuple[Operation, ...], Tensor]:
    """Each expert's bias, times probabilities, is written out in fp32 and added; pieces are joined and narrowed."""
    features = {dim: size for dim, size in zip(x.dims, x.sizes, strict=True) if dim != "capacity"}
    bias = Tensor(f"{name}.vector", tuple(features), tuple(features.values()), "parameter")
    chances = x.without(*(dim for dim in x.dims[2:]), name=f"{name}.probabilities", role="statistic")
    shift, summed, joined = (replace(x.like(f"{name}.{part}"), wide=True) for part in ("shift", "sum", "joined"))
    out = x.like(f"{name}.narrow")
    steps = (
        MemoryPass(shift.name, EAGER, (chances,), shift, (bias,)),
        MemoryPass(summed.name, EAGER, (x, shift), summed),
        MemoryPass(joined.name, EAGER, (summed,), joined, flops_per_element=0.0, backward_pass="free"),
        MemoryPass(out.name, EAGER, (joined,), out),
    )
    return steps, out


def _gated(name: str, x: Tensor) -> tuple[tuple[Operation, ...], Tensor]:
    """The two halves of ``x`` along ``gates``, clamped and multiplied, and times probabilities in fp32."""
    half = x.without("gates", name=f"{name}.half")
    gate, value, low, high, scaled, open_gate, opened, shifted, product = (
        half.like(f"{name}.{part}")
        for part in ("gate", "value", "clamped", "bounded", "scaled", "sigmoid", "opened", "shifted", "product")
    )
    chances = half.without("ffn", name=f"{name}.probabilities", role="statistic")
    weighted = replace(half.like(f"{name}.weighted"), wide=True)
    out = half.like(name)
    steps = (
        MemoryPass(low.name, EAGER, (gate,), low, keeps=(gate,)),
        MemoryPass(high.name, EAGER, (value,), high, keeps=(value,)),
        MemoryPass(scaled.name, EAGER, (low,), scaled),
        MemoryPass(open_gate.name, EAGER, (scaled,), open_gate, keeps=(open_gate,), flops_per_element=4.0),
        MemoryPass(opened.name, EAGER, (low, open_gate), opened, keeps=(low, open_gate), backward_pass="by input"),
        MemoryPass(shifted.name, EAGER, (high,), shifted, backward_pass="free"),
        MemoryPass(product.name, EAGER, (opened, shifted), product, keeps=(opened, shifted), backward_pass="by input"),
        MemoryPass(weighted.name, EAGER, (product, chances), weighted, keeps=(product,), backward_pass="by input"),
        MemoryPass(out.name, EAGER, (weighted,), out),
    )
    return steps, out
