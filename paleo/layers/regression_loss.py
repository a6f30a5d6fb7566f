"""Losses of numbers rather than classes: boxes of detectors, noise of diffusion models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.layers.base import LAYERS, Expansion, Layer
from paleo.operations.memory_pass import MemoryPass

if TYPE_CHECKING:
    from paleo.layers.base import Choices
    from paleo.operations.tensor import Tensor


class RegressionLoss(Layer):
    """An element-wise function of the difference to the target; keeps its input."""

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        out = x.like(name, role="statistic")
        return Expansion((MemoryPass(name, "elementwise", (x,), out, keeps=(x,), flops_per_element=3.0),), out)


@LAYERS.register("squared_error")
class SquaredError(RegressionLoss):
    """(x − target)²."""


@LAYERS.register("smooth_l1")
class SmoothL1(RegressionLoss):
    """Quadratic near zero, linear beyond (Girshick, Fast R-CNN, ICCV 2015)."""
