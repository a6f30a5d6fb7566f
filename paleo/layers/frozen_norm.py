"""Batch normalisation whose statistics and affine parameters are constants, as detectors fine-tune their backbones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.layers.base import LAYERS, Expansion, Layer
from paleo.operations.memory_pass import MemoryPass

if TYPE_CHECKING:
    from paleo.layers.base import Choices
    from paleo.operations.tensor import Tensor


@LAYERS.register("frozen_batch_norm")
class FrozenBatchNorm(Layer):
    """x · scale + shift along the channels, all four constants kept as buffers that are not trained.

    No parameters are counted (torchvision keeps them as buffers), and nothing is kept for backward but the scale.
    """

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        return Expansion((MemoryPass(name, "elementwise", (x,), x.like(name), flops_per_element=2.0),), x.like(name))
