"""ZeRO++: quantised gathers and scatters of sharded parameters, and a second shard inside each node.

Forward gathers carry parameters in 8 bits (qwZ); backward gathers stay inside the node, where a second copy of the
node's shard lies in 16 bits (hpZ); gradients are scattered in 4 bits by two all-to-alls, inside a node and across it
(qgZ).

Reference: Wang et al., ZeRO++: Extremely efficient collective communication for giant model training, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paleo.compression.base import COMPRESSIONS, Coding, Message, no_argument

if TYPE_CHECKING:
    from paleo.compression.base import Array, Compression, SummedGradient

#: Bytes of an element in the gather of the forward pass and in the scatter of gradients, and of the 16-bit copy.
WEIGHT_BYTES, GRADIENT_BYTES, COPY_BYTES = 1.0, 0.5, 2.0


@dataclass(frozen=True, slots=True)
class ZeroPlusPlus:
    """Messages of one pass over all parameters: gather forward, gather backward inside the node, two scatters."""

    summary = "8-bit gathers, 16-bit copies inside a node, 4-bit scatters of sharded training"
    reference = "Wang et al., ZeRO++, 2023"
    linear = False
    unbiased = False
    sharded = True

    def messages(self, gradient: SummedGradient) -> tuple[Message, ...]:
        elements = np.asarray(gradient.elements, dtype=np.float64)
        nodes_share = GRADIENT_BYTES * elements / np.maximum(gradient.ranks_per_node, 1.0)
        return (
            Message("all_gather", WEIGHT_BYTES * elements),
            Message("all_gather", COPY_BYTES * elements, "node"),
            Message("all_to_all", GRADIENT_BYTES * elements, "node"),
            Message("all_to_all", np.asarray(nodes_share), "across"),
        )

    def encode(self, gradient: SummedGradient) -> Coding:
        """A rank codes its shard of the parameters, and its gradients twice: before each all-to-all."""
        shard = gradient.elements / np.maximum(np.asarray(gradient.ranks, dtype=np.float64), 1.0)
        second = gradient.elements / np.maximum(np.asarray(gradient.ranks_per_node, dtype=np.float64), 1.0)
        read = COPY_BYTES * shard + gradient.bytes + COPY_BYTES * second
        written = WEIGHT_BYTES * shard + GRADIENT_BYTES * (gradient.elements + second)
        return Coding.of(read, written, launches=3.0 * gradient.tensors)

    def decode(self, gradient: SummedGradient) -> Coding:
        """Gathered parameters are widened, gradients summed behind each all-to-all."""
        elements = np.asarray(gradient.elements, dtype=np.float64)
        second = elements / np.maximum(np.asarray(gradient.ranks_per_node, dtype=np.float64), 1.0)
        read = WEIGHT_BYTES * elements + GRADIENT_BYTES * (elements + second)
        written = COPY_BYTES * (elements + second)
        return Coding.of(read, written, launches=3.0 * gradient.tensors)

    def state(self, gradient: SummedGradient) -> Array:
        """The second shard."""
        return np.asarray(COPY_BYTES * np.asarray(gradient.elements) / np.maximum(gradient.ranks_per_node, 1.0))


@COMPRESSIONS.register("zeropp")
def zeropp(argument: str) -> Compression:
    """``zeropp``: for zero=3."""
    no_argument("zeropp", argument)
    return ZeroPlusPlus()
