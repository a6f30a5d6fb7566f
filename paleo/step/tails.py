"""What a stage does after its last pass: sums of gradients that are not hidden, the update, gathers of sharded states.

Arrays have the stages along their first axis (their chunks along the second, where they are told apart) and the layouts
or the cases along the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from paleo.schedules.base import Passes
from paleo.step.exchange import bucket_count, exposed_gather, exposed_sends, in_order
from paleo.step.offload import SUM_BYTES, host_update
from paleo.step.section_times import over

if TYPE_CHECKING:
    from paleo.step.batch import Batch
    from paleo.step.exchange import Sends
    from paleo.step.layouts import Layouts
    from paleo.step.stages import Assignment

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
#: Gradients that are summed after the last pass: none without a pipeline (`paleo.step.streams` has them), those of tied
#: parameters alone where all others are scattered after every pass.
Summed = Literal["none", "tied", "all"]


@dataclass(frozen=True, slots=True)
class Tails:
    """What follows the last passes, (stages, layouts): ``fixed`` seconds that nothing hides; ``sums`` of gradients that
    overlap, by chunk, (stages, chunks, layouts), and ``gathers`` that the next pass hides, with the buckets in which
    they go out. ``total``: seconds of all communication. ``sends``: layouts that have anything to send, (layouts,)."""

    fixed: Array
    sums: Array
    sum_buckets: Array
    gathers: Array
    gather_buckets: Array
    total: Array
    sends: Mask


def tails(layouts: Layouts, assignment: Assignment, zero: int, *, overlapped: bool, summed: Summed = "all") -> Tails:
    """What follows the last backward pass: the gradients that are ``summed`` then, the update unless the host does it,
    and gathers of sharded states."""
    part = assignment.key if overlapped else assignment.stages_key
    key = "tails", part, min(zero, 1) + (zero == 3), overlapped, summed
    return layouts.shared.once(key, lambda: _tails(layouts, assignment, zero, overlapped, summed))


def _tails(layouts: Layouts, assignment: Assignment, zero: int, overlapped: bool, summed: Summed) -> Tails:
    backend, kinds, rows = layouts.backend, assignment.kinds.stages, assignment.stage_kind
    sizes = layouts.elements(kinds, trained=True)[rows] * backend.formats.parameter
    fixed = np.zeros((assignment.stages, len(layouts)))
    gathers, sums = np.zeros_like(fixed), np.zeros((len(fixed), 1, len(layouts)))
    sent, total = sums, fixed
    if zero in (1, 2) and layouts.training:
        gathers = layouts.state_gathers(assignment)
    if summed != "none":
        fixed = fixed + layouts.tied_sums(assignment)
    if summed == "all":
        sums, sent = layouts.exchange(assignment, zero, chunks=overlapped)
    exchanged = sums.sum(axis=1)
    total, sends = fixed + exchanged + gathers, np.asarray((exchanged + gathers).any(axis=0))
    if not overlapped:
        fixed, sums = fixed + exchanged, np.zeros_like(sums)
    if not (overlapped and backend.software.overlap.gather):
        fixed, gathers = fixed + gathers, np.zeros_like(gathers)
    buckets = bucket_count(sent, backend.run.bucket), bucket_count(sizes, backend.run.bucket)
    if not backend.offload.holds("optimizer"):
        fixed = fixed + layouts.updates(kinds, sharded=zero > 0)[rows]
    fixed = fixed + layouts.coding(kinds)[rows]
    return Tails(fixed, sums, buckets[0], gathers, buckets[1], total, sends)


def after_passes(batch: Batch, passes: Passes, *, summed: bool = True) -> Array:
    """Seconds after each stage's last pass until its update is done and its parameters are gathered: (stages,
    cases)."""
    exposed = exposed_communication(batch, passes, summed=summed)
    return exposed + host_updates(batch) if batch.backend.offload.holds("optimizer") else exposed


def after_streams(batch: Batch) -> Array:
    """Without a pipeline, seconds after the last bucket of gradients: (cases,)."""
    forward = over(batch.assignment.computed, batch.times.forwards)
    return np.asarray(after_passes(batch, Passes(forward, forward, forward), summed=False)[0])


def exposed_communication(batch: Batch, passes: Passes, *, summed: bool = True) -> Array:
    """The same without updates of the host."""
    following, contention = batch_tails(batch, summed=summed), batch.backend.software.overlap.contention
    seconds = batch.taken(following.fixed)
    if batch.zero == 3 and batch.backend.compression is not None:  # gradients are coded with every microbatch
        kinds, rows = batch.assignment.kinds.stages, batch.assignment.stage_kind
        seconds = seconds + batch.taken(batch.layouts.coding(kinds)[rows]) * (batch.microbatches - 1.0)
    if following.gathers.any():
        seconds += overlapped_gathers(batch, following, passes)
    if contention >= 1.0:  # as `exposed_sends` has it: nothing is won
        seconds += batch.taken(following.sums.sum(axis=1))
    elif following.sums.any():
        ordered = _sends_in_order(batch, following).of(batch.cases.layout)
        seconds += exposed_sends(ordered, batch.schedule, passes, batch.assignment.chunks, contention)
    return seconds


def overlapped_gathers(batch: Batch, following: Tails, passes: Passes) -> Array:
    """What the next first pass leaves exposed of gathers that overlap with it: (stages, cases)."""
    gathers, buckets = batch.taken(following.gathers), batch.taken(following.gather_buckets)
    return exposed_gather(gathers, buckets, passes.forward, batch.backend.software.overlap.contention)


def exposed_gathers(batch: Batch, passes: Passes) -> Array:
    """Seconds in which stages gather updated parameters (ZeRO-1 and 2) that nothing hides: (stages, cases)."""
    if batch.zero not in (1, 2) or not batch.training:
        return np.zeros((batch.assignment.stages, len(batch)))
    if batch.overlapped and batch.backend.software.overlap.gather:
        return overlapped_gathers(batch, batch_tails(batch), passes)
    return batch.taken(batch.layouts.state_gathers(batch.assignment))


def updates(batch: Batch) -> Array:
    """Seconds of the update on each stage, by the device or by its host: (stages, cases)."""
    if batch.backend.offload.holds("optimizer"):
        return host_updates(batch)
    kinds, rows = batch.assignment.kinds.stages, batch.assignment.stage_kind
    return batch.taken(batch.layouts.updates(kinds, sharded=batch.zero > 0)[rows])


def host_updates(batch: Batch) -> Array:
    """Seconds of an update by the host, after the last backward pass, and of clipping: (stages, cases)."""
    layouts, backend, assignment = batch.layouts, batch.backend, batch.assignment
    if not layouts.training:
        return np.zeros((assignment.stages, len(batch)))
    kinds, sharded, rows = assignment.kinds.stages, batch.zero > 0, assignment.stage_kind
    counts = batch.taken(layouts.owned(kinds, sharded=sharded)[rows])
    backward = over(assignment.computed, batch.times.backwards + batch.times.weights)
    update = host_update(counts, backward, backend.optimizer, backend.formats, backend.offload)
    if backend.clip == "scaled" and backend.offload.holds("gradients"):  # DeepSpeed's stage3.py: unscale_and_clip_grads
        update = update + 2.0 * SUM_BYTES * counts / backend.offload.memory
    return update + batch.taken(layouts.clipping(kinds, sharded=sharded)[rows])


def batch_tails(batch: Batch, *, summed: bool = True) -> Tails:
    """The tails of a batch; scattered gradients have gone out with every microbatch, those of tied parameters alone
    have not."""
    scattered = batch.scattered and batch.assignment.stages > 1
    how: Summed = "none" if not summed else "tied" if scattered else "all"
    return tails(batch.layouts, batch.assignment, batch.zero, overlapped=batch.overlapped, summed=how)


def _sends_in_order(batch: Batch, following: Tails) -> Sends:
    """The sums of gradients in the order of the schedule."""
    key = "sends", batch.assignment.key, min(batch.zero, 1) + (batch.zero == 3), batch.schedule.name
    chunks = batch.assignment.chunks
    return batch.layouts.shared.once(
        key, lambda: in_order(following.sums, following.sum_buckets, batch.schedule, chunks)
    )
