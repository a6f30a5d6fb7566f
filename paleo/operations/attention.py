"""Attention as one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paleo.operations.base import Kernel
from paleo.operations.tensor import split_all

if TYPE_CHECKING:
    from paleo.operations.base import Phase
    from paleo.operations.tensor import Precision, Size, Tensor


def visible_share(keys: Size, attended: Size) -> float:
    """Scores that a causal mask leaves of the rectangle of ``keys`` queries and ``attended`` keys each.

    >>> visible_share(4, 4), visible_share(8, 4), round(visible_share(1024, 1024), 4)
    (0.625, 0.8125, 0.5005)
    """
    return float((attended + 1.0) / 2.0 + keys - attended) / float(keys)


def executed_share(kernel: Kernel) -> float:
    """Share of the counted FLOP that a kernel executes: fused attention skips blocks behind a causal mask."""
    shape = kernel.shape
    if kernel.family != "attention" or not shape["causal"]:
        return 1.0
    keys, attended = shape["kv_len"], shape["attended"]
    whole = 2.0 * keys - shape["q_len"] if attended == keys else keys
    return visible_share(whole, whole if attended == keys else attended)


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
    def useful(self) -> tuple[float, float]:
        """Shares of its FLOP, forward and backward, that the network asks for: scores before the mask's edge, once.

        >>> from paleo.operations.tensor import Tensor
        >>> x = Tensor("x", ("batch", "seq", "kv_heads", "group", "head_dim"), (1, 4, 1, 1, 8))
        >>> key = Tensor("k", ("batch", "keys", "kv_heads", "head_dim"), (1, 4, 1, 8))
        >>> FusedAttention("a", x, key, key, x, True, 4).useful  # 10 of 16 scores; 4 of 5 products backward
        (0.625, 0.5)
        """
        visible = visible_share(self.key.sizes[1], self.attended) if self.causal else 1.0
        return visible, visible * 2.0 * self._flops(1, 1) / self._flops(3, 2)

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return (self.query, self.key, self.value)

    @property
    def saves(self) -> tuple[Tensor, ...]:
        if not any(tensor.grad for tensor in self.reads):
            return ()
        return (*self.reads, self.out, self._statistic)

    @property
    def _statistic(self) -> Tensor:
        return self.query.without(self.query.dims[-1], name=f"{self.name}.logsumexp", role="statistic")

    @property
    def private_dims(self) -> frozenset[str]:
        return frozenset({self.key.dims[1], self.query.dims[1]})

    def split(self, ways: Mapping[str, float]) -> FusedAttention:
        query, key, value, out = split_all((self.query, self.key, self.value, self.out), ways)
        return replace(self, query=query, key=key, value=value, out=out)

    @property
    def _scores(self) -> float:
        """How many numbers the matrix of scores would have."""
        return float(self.query.elements / self.query.sizes[-1] * self.attended)

    def _flops(self, score_products: int, value_products: int) -> float:
        """FLOP of ``score_products`` products along the head dim and ``value_products`` along the value dim."""
        return 2.0 * self._scores * (score_products * self.query.sizes[-1] + value_products * self.value.sizes[-1])

    def forward(self, precision: Precision) -> tuple[Kernel, ...]:
        read = sum(t.bytes(precision) for t in self.reads)
        written = self.out.bytes(precision) + self._statistic.bytes(precision)
        return (self._kernel("forward", self._flops(1, 1), read, written),)

    def backward(self, precision: Precision) -> tuple[Kernel, ...]:
        """Recomputes the scores, then the gradients of scores, value, query and key (Dao, FlashAttention-2, 2023).

        Five products, three of them along the head dim: 2.5 times the FLOP of the forward pass where the value is as
        wide.
        """
        if not self.saves:
            return ()
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
