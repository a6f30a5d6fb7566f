"""Answers for modules that read the data of tensors on the meta device, which has none.

Masks are full, conditions are false, no box is suppressed, tensors of one shape are equal, and tokens are spread evenly
over experts. Detectors select boxes by their scores. One-stage detectors are cut at this point. In two-stage detectors
of torchvision the second stage runs with as many boxes for each image as in training (Ren et al., Faster R-CNN, 2015,
section 3.1.3; He et al., Mask R-CNN, 2017, section 3.1).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from paleo.errors import SpecError
from paleo.importers._trace import Value

#: Functions that select boxes by their scores.
BOX_SELECTIONS = (
    "nms", "postprocess", "post_process", "filter_proposals", "select_training_samples", "keypointrcnn_inference",
)  # fmt: skip


def box_selection() -> str | None:
    """Return the name of the running function that selects boxes, if there is one."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if any(word in name for word in BOX_SELECTIONS):
            return name
        frame = frame.f_back  # type: ignore[assignment]
    return None


@contextlib.contextmanager
def sampled_boxes(module: Any, notes: list[str]) -> Iterator[None]:
    """Pass the first boxes of each image, as many as training samples, to the second stage and its masks."""
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

    notes.append(f"each image has {boxes} boxes, {positive} of them on objects, as training samples them")
    network.filter_proposals, stage.postprocess_detections = proposed, detected
    try:
        yield
    finally:
        del network.filter_proposals, stage.postprocess_detections


#: Functions that select experts by their scores, one row for each token.
_ROUTERS = frozenset({"topk", "argmax", "max", "argsort", "sort"})
_PLACES = frozenset({"nonzero", "where", "argwhere"})


class Guessing(Protocol):
    """The parts of a tape that answers need: values of tensors, probe sizes, and notes for the user."""

    torch: Any
    probes: Mapping[str, int]
    notes: list[str]

    def value(self, tensor: Any) -> Value: ...

    def is_tensor(self, argument: Any) -> bool: ...


def label_of(function: Any) -> str:
    """Return the name of a torch function, or of the property that it reads."""
    name = getattr(function, "__name__", "") or str(function)
    if name == "__get__":
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    return str(name)


def computed(tape: Guessing, function: Any, label: str, args: Any, kwargs: Any) -> Any:
    """Return the result of a call, with guessed data where it depends on data.

    A mask without data selects everything, or the share of the tokens that an expert gets. A grouped product for which
    torch has no kernel (fp32, sizes that are no multiple of 16 bytes) is computed as one product with the same FLOP.
    """
    if label in ("__getitem__", "__setitem__") and (mask := _mask(tape, args[1])) is not None:
        rows = _selected(tape, mask)
        return _all_selected(args[0], args[1], mask, rows) if label == "__getitem__" else None
    if label in _PLACES and len(args) == 1 and tape.is_tensor(args[0]) and args[0].device.type == "meta":
        return _places(tape, args[0], label == "where" or bool(kwargs.get("as_tuple")))
    try:
        return function(*args, **kwargs)
    except RuntimeError:
        if "grouped_mm" not in label or len(args) < 2 or args[1].dim() != 3:
            raise
        return args[0] @ (args[1] if args[0].dim() == 3 else args[1][0])


def _places(tape: Guessing, mask: Any, by_dim: bool) -> Any:
    """Return the coordinates that a mask selects: as one tensor, or as one tensor for each dim.

    A mask with one element for each expert says which experts have tokens: all of them.
    """
    router = _router(tape, mask)
    if router is not None and tuple(mask.shape) == (router[0],) and not by_dim:
        return tape.torch.arange(router[0])[:, None]
    rows = _selected(tape, mask)
    if by_dim:
        return tuple(tape.torch.zeros(rows, dtype=tape.torch.int64, device="meta") for _ in range(mask.dim()))
    return tape.torch.zeros(rows, mask.dim(), dtype=tape.torch.int64, device="meta")


def _selected(tape: Guessing, mask: Any) -> int:
    """Return how many elements of a mask are taken to be true: an even share for tokens of an expert, else all.

    SpecError is raised if the probe sizes do not divide evenly; the next attempt uses the stated sizes.
    """
    router, total = _router(tape, mask), int(mask.numel())
    if router is None:
        if (name := box_selection()) is not None:
            raise RuntimeError(f"{name} chooses boxes by their values")
        tape.notes.append("masks that select rows are taken to select all of them")
        return total
    return math.ceil(_share(tape, router, total))


def _share(tape: Guessing, router: tuple[int, int], total: int) -> float:
    """Return the number of tokens of one expert, of ``total`` tokens."""
    experts, choices = router
    tape.notes.append(f"tokens are taken to spread evenly over {experts} experts")
    rows = min(float(total), choices / experts)
    unit = math.prod(probe for probe in tape.probes.values() if total % probe == 0)
    if unit > 1 and rows % unit:
        raise SpecError(f"{choices} choices of {experts} experts do not spread evenly at these sizes")
    return rows


def _router(tape: Guessing, mask: Any) -> tuple[int, int] | None:
    """Return the number of experts and of choices behind a mask of tokens; None if the mask depends on no choice."""
    stack, seen = [tape.value(mask)], set[Value]()
    while stack:
        value = stack.pop()
        call = value.maker
        if call is None or value in seen:
            continue
        seen.add(value)
        if call.label == "one_hot" and call.out.shape[-1] > 1:
            return call.out.shape[-1], call.out.elements // call.out.shape[-1]
        # The number of scores in a row of which a call selects some; 0 for other calls.
        scores = call.inputs[0] if call.inputs else None
        chooses = call.label in _ROUTERS and call.outputs[-1].index and scores is not None and not scores.index
        if (experts := scores.shape[-1] if chooses and scores is not None and scores.shape else 0) > 1:
            return experts, call.outputs[-1].elements
        stack.extend(source for source in call.inputs if source is not None and (source.index or source.static))
    return None


def _mask(tape: Guessing, index: Any) -> Any:
    """Return the only mask without data among indices that are otherwise slices and positions; else None."""
    entries = index if isinstance(index, tuple) else (index,)
    masks = [entry for entry in entries if tape.is_tensor(entry)]
    plain_entries = [entry for entry in entries if not tape.is_tensor(entry)]
    plain = all(isinstance(entry, slice | int) or entry is Ellipsis for entry in plain_entries)
    single = len(masks) == 1 and masks[0].dtype == tape.torch.bool and masks[0].device.type == "meta"
    return masks[0] if single and plain and masks[0].dim() else None


def _all_selected(tensor: Any, index: Any, mask: Any, rows: int) -> Any:
    """Return the first ``rows`` elements under a mask, with the dims of the mask joined to one."""
    entries = list(index) if isinstance(index, tuple) else [index]
    place = next(i for i, entry in enumerate(entries) if entry is mask)
    before, behind = entries[:place], entries[place + 1 :]
    start = tensor.dim() - mask.dim() - len(behind) if Ellipsis in before else place
    flat = tensor.flatten(start, start + mask.dim() - 1)
    return flat[(*before, slice(None) if rows == mask.numel() else slice(rows), *behind)]


def guessed(tape: Guessing, function: Any, args: Any) -> Any:
    """Return what a module is told that asks for values without data; None where it does not ask.

    So attention masks hide nothing (their rows are whole), there is no padding, and every expert has tokens.
    """
    label = label_of(function)
    if label == "tolist" and args[0].device.type == "meta" and args[0].dim() == 1:
        # The tokens of each expert, or of each row of a mask, if the tensor counts them, else None.
        tokens = args[0]
        router = _router(tape, tokens)
        if router is None or tokens.shape[0] != router[0]:
            maker = tape.value(tokens).maker
            mask = maker.inputs[0] if maker is not None and maker.label == "sum" else None
            if mask is None or not mask.index or mask.root is None or mask.shape[:-1] != tuple(tokens.shape):
                return None
            return [mask.shape[-1]] * tokens.shape[0]
        experts, choices = router
        share = int(_share(tape, router, choices))
        return [share + (index < choices - share * experts) for index in range(experts)]
    if label.endswith("nms") and args and tape.is_tensor(args[0]) and args[0].device.type == "meta":
        tape.notes.append("non-maximum suppression is taken to suppress nothing")
        return tape.torch.zeros(args[0].shape[0], dtype=tape.torch.int64, device="meta")
    if label == "equal" and args and tape.is_tensor(args[0]) and args[0].device.type == "meta":
        return args[0].shape == args[1].shape
    if label not in ("item", "__bool__", "__contains__") or not args or args[0].device.type != "meta":
        return None
    if label == "__contains__":
        return False
    if args[0].dtype != tape.torch.bool:
        return None
    maker = tape.value(args[0]).maker
    if maker is None or maker.label not in ("all", "any"):
        tape.notes.append("a condition on the values of tensors is taken to be false; its other path is not counted")
        return False
    return maker.label == "all" or _router(tape, args[0]) is not None
