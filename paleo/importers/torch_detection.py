"""Detectors, where boxes are chosen by their values.

One-stage detectors are cut there. Of torchvision's two-stage ones the second stage is run with as many boxes an image
as training samples (Ren et al., Faster R-CNN, 2015, section 3.1.3; He et al., Mask R-CNN, 2017, section 3.1).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

#: Functions where boxes are chosen by their values.
CHOOSERS = (
    "nms", "postprocess", "post_process", "filter_proposals", "select_training_samples", "keypointrcnn_inference",
)  # fmt: skip


def chooser() -> str | None:
    """The function that is choosing boxes now, if there is one among those that run."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if any(word in name for word in CHOOSERS):
            return name
        frame = frame.f_back  # type: ignore[assignment]
    return None


@contextlib.contextmanager
def sampled_boxes(module: Any, remarks: list[str]) -> Iterator[None]:
    """The first boxes of each image, as many as training samples, go to the second stage and to its masks."""
    stage = next((part for part in module.modules() if type(part).__name__ == "RoIHeads"), None)
    network = next((part for part in module.modules() if type(part).__name__ == "RegionProposalNetwork"), None)
    sampler = getattr(stage, "fg_bg_sampler", None)
    if stage is None or network is None or sampler is None:
        yield
        return
    boxes = int(sampler.batch_size_per_image)
    positive = int(boxes * sampler.positive_fraction)

    def proposed(proposals: Any, objectness: Any, sizes: Any, anchors: Any) -> Any:
        return list(proposals[:, :boxes].unbind(0)), None

    def detected(logits: Any, regression: Any, proposals: Any, sizes: Any) -> Any:
        whole = logits.new_zeros(positive)
        return [each[:positive] for each in proposals], [whole] * len(sizes), [whole.long()] * len(sizes)

    remarks.append(f"each image has {boxes} boxes, {positive} of them on objects, as training samples them")
    network.filter_proposals, stage.postprocess_detections = proposed, detected
    try:
        yield
    finally:
        del network.filter_proposals, stage.postprocess_detections
