"""Regions of images: boxes that are proposed, thinned out and cut from feature maps (two-stage detectors)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Choices, Expansion, Layer, describe
from paleo.operations.base import MemoryPass
from paleo.operations.tensor import Tensor


@LAYERS.register("proposals")
class Proposals(Layer):
    """Boxes worth a second look: scores of all anchors (batch, anchors, …) are sorted, the best ``considered`` compared
    pair by pair (non-maximum suppression), and ``kept`` of them handed on: (batch, regions, box).

    Comparisons are bits of a matrix of considered x considered that is written and read once; nothing goes back.
    """

    kept: PositiveInt
    considered: PositiveInt = 2000

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        batch = x.dims[0]
        sorted_scores = x.like(f"{name}.sorted", role="statistic")
        pairs = Tensor(
            f"{name}.overlaps", (batch, "boxes", "others"), (x.sizes[0], self.considered, self.considered), "mask"
        )
        out = Tensor(name, (batch, "regions", "box"), (x.sizes[0], self.kept, 4), "statistic", grad=False)
        sort = MemoryPass(f"{name}.sort", "elementwise", (x,), sorted_scores, backward_pass="free")
        compare = MemoryPass(f"{name}.overlaps", "elementwise", (sorted_scores,), pairs, flops_per_element=12.0,
                             backward_pass="free")  # fmt: skip
        take = MemoryPass(name, "select", (pairs,), out, backward_pass="free")
        return Expansion((sort, compare, take), out)


@LAYERS.register("roi_align")
class RoiAlign(Layer):
    """Regions cut out of a feature map and brought to ``size`` x ``size``, bilinearly, ``samples`` points a side of
    each cell: (batch, channels, height, width) and boxes (batch, regions, 4) to (regions, channels, height, width),
    the regions of all images as the batch.

    Reference: He et al., Mask R-CNN, ICCV 2017, section 3.
    """

    arity: ClassVar[int | None] = 2
    size: PositiveInt
    samples: PositiveInt = 2
    #: Regions of an image that are cut, where fewer than there are boxes (positives of the mask branch).
    regions: PositiveInt | None = None

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        x, boxes = inputs
        if len(x.dims) != 4 or len(boxes.dims) != 3:
            raise GraphError(f"{name}: expected a feature map and boxes, found {describe(x)} and {describe(boxes)}")
        regions = x.sizes[0] * (self.regions or boxes.sizes[1])
        dims = (x.dims[0], x.dims[1], "height", "width")
        out = Tensor(name, dims, (regions, x.sizes[1], self.size, self.size))
        points = self.samples**2
        corners = out.like(f"{name}.corners")
        read = Tensor(corners.name, (*dims, "points"), (*out.sizes, points), "activation")
        cut = MemoryPass(read.name, "gather", (x, boxes), read, flops_per_element=8.0)
        mean = MemoryPass(name, "reduce", (read,), out)
        return Expansion((cut, mean), out)
