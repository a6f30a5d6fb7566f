"""From prices to a step: recomputation, streams, pipeline stages and memory, as pure functions that broadcast over
arrays.

One configuration is an array without further axes, a search one with many: ``predict`` and ``search`` call the same
functions, so that they cannot disagree. Figures of sections have the sections along their first axis, those of stages
the stages; further axes are configurations. Seconds and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from paleo.lowering.partition import Chunk
from paleo.lowering.program import Program, Transfer
from paleo.lowering.recompute import Ways
from paleo.operations.kernel import Kernel, flat_pass
from paleo.operations.optimizers import Optimizer
from paleo.operations.precision import Precision
from paleo.parallel.mesh import Axes
from paleo.schedules.base import Numeric, Passes, Schedule
from paleo.step.timeline import Turn

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Columns:
    """One turn of each section, without recomputation: seconds by pass, seconds of the collectives that computation
    waits for, bytes.

    ``again`` is what full recomputation runs once more of ``forward``, ``selected`` what selective does. ``hidden`` are
    seconds of collectives that run beside computation which takes as long; what is left of them is waited for.
    ``repeat`` has the sections alone; so have ``parameters`` and those of them that are ``trained`` in one program."""

    repeat: Array
    parameters: Array
    trained: Array
    forward: Array
    backward: Array
    weights: Array
    again: Array
    selected: Array
    forward_transfers: Array
    again_transfers: Array
    backward_transfers: Array
    hidden: Array
    saved_bytes: Array
    selected_bytes: Array
    input_bytes: Array
    largest_output_bytes: Array


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """One turn of each section with what it recomputes; bytes ``kept`` for backward on the device or ``away`` from it,
    and ``transient`` ones, which live while that turn is made (again)."""

    forward: Array
    backward: Array
    weights: Array
    forward_transfers: Array
    backward_transfers: Array
    kept: Array
    away: Array
    transient: Array

    @property
    def forwards(self) -> Array:
        """Seconds of a forward turn with its collectives."""
        return self.forward + self.forward_transfers

    @property
    def backwards(self) -> Array:
        """Seconds of a backward turn with its collectives; gradients of weights apart."""
        return self.backward + self.backward_transfers

    @property
    def turn(self) -> Array:
        """Seconds of one turn, forward and backward."""
        return self.forwards + self.backwards + self.weights


@dataclass(frozen=True, slots=True)
class Sums:
    """How kernels and collectives add up to sections: matrices of (sections, kernels) and (sections, collectives).

    ``forward_beside`` and ``backward_beside`` are collectives that run beside the section's computation, those of
    ``…_ring`` beside the core of attention alone, ``…_dealt`` in ``pieces`` beside the products with weights. ``calls``
    counts the collectives of each section, forward and backward.
    """

    forward: Array
    backward: Array
    weights: Array
    core: Array
    backward_core: Array
    again: Array
    selected: Array
    spared: Array
    forward_transfers: Array
    backward_transfers: Array
    forward_beside: Array
    backward_beside: Array
    forward_ring: Array
    backward_ring: Array
    forward_dealt: Array
    backward_dealt: Array
    forward_products: Array
    backward_products: Array
    pieces: Array
    calls: Array

    @classmethod
    def of(cls, program: Program) -> Sums:
        """Kernels and `collectives` in the order of the program."""
        sections = program.sections
        kernels = [(i, counted) for i, section in enumerate(sections) for counted in section.kernels]
        owed = list(collectives(program))

        def matrix(cells: Sequence[tuple[int, float, bool]]) -> Array:
            found = np.zeros((len(sections), len(cells)))
            for column, (row, times, counts) in enumerate(cells):
                found[row, column] = times * counts
            return found

        forward, backward, weights = (
            matrix([(i, one.times, one.kernel.phase == phase) for i, one in kernels])
            for phase in ("forward", "backward", "backward_weight")
        )
        cores = (
            matrix([(i, one.times, one.core and one.kernel.phase == phase) for i, one in kernels])
            for phase in ("forward", "backward")
        )
        rerun = (
            matrix([(i, one.times * share(one), one.kernel.phase == "forward") for i, one in kernels])
            for share in (attrgetter("again"), attrgetter("selected"))
        )
        spared = matrix([(i, one.times, one.phase == "forward" and not one.again) for i, one in owed])
        ways = [
            matrix([(i, one.times, (one.phase, one.beside) == (phase, beside)) for i, one in owed])
            for beside in ("nothing", "section", "core", "products")
            for phase in ("forward", "backward")
        ]
        made = np.array([one.kernel.family == "gemm" and not one.core for _, one in kernels], dtype=np.float64)
        products = (forward * made, (backward + weights) * made)
        pieces = np.asarray(max((float(one.pieces) for _, one in owed), default=1.0))
        calls = np.stack([sum(one.sum(axis=1) for one in ways[phase::2]) for phase in (0, 1)])
        return cls(*(forward, backward, weights, *cores, *rerun, spared, *ways, *products, pieces, calls))


def collectives(program: Program) -> Iterator[tuple[int, Transfer]]:
    """The collectives of layers, each with the position of its section."""
    for index, section in enumerate(program.sections):
        for one in section.transfers:
            yield index, one


#: Byte figures of a section that `Columns` holds.
BYTES = ("saved_bytes", "selected_bytes", "input_bytes", "largest_output_bytes")


def columns(
    program: Program,
    kernels: Array,
    host: Array,
    transfers: Array,
    sizes: Sequence[Array],
    sums: Sums | None = None,
    *,
    call: float = 0.0,
) -> Columns:
    """Columns from seconds of every kernel on the device and on the host (kernels, …) and of every collective
    (`collectives`, …), which costs the host a ``call``; ``sizes`` as in `BYTES`.

    A pass of a section takes as long as `paced` says of all its kernels and collectives together; what it waits for the
    host counts to its kernels. What is dealt out in n pieces leaves the first of them uncovered, so hides 1 - 1/n of
    the shorter of the collective and its products.

    ``sums``: those of a program of the same structure, where they are at hand.
    """
    sums = sums or Sums.of(program)
    forward, backward, weights, core = (one @ kernels for one in (sums.forward, sums.backward, sums.weights, sums.core))
    beside = (
        (sums.forward_beside, forward),
        (sums.forward_ring, core),
        (sums.backward_beside, backward + weights),
        (sums.backward_ring, sums.backward_core @ kernels),
        (sums.forward_dealt, sums.forward_products @ kernels),
        (sums.backward_dealt, sums.backward_products @ kernels),
    )
    dealt = 1.0 - 1.0 / sums.pieces
    hidden = [
        np.minimum(which @ transfers, covering) * share
        for (which, covering), share in zip(beside, (1.0, 1.0, 1.0, 1.0, dealt, dealt), strict=True)
    ]
    left = [which @ transfers - covered for (which, _), covered in zip(beside, hidden, strict=True)]
    there = sums.forward_transfers @ transfers + left[0] + left[1] + left[4]
    back = sums.backward_transfers @ transfers + left[2] + left[3] + left[5]
    again, once_more = sums.again @ kernels, np.maximum(there - sums.spared @ transfers, 0.0)
    calls = (sums.calls * call).reshape((2, -1) + (1,) * (forward.ndim - 1))
    gradients = backward + weights
    slower = paced(gradients + back, (sums.backward + sums.weights) @ host + calls[1]) - back
    share = np.divide(slower, gradients, out=np.ones_like(gradients), where=gradients > 0)
    return Columns(
        section_figures(program, "repeat"),
        section_figures(program, "parameters"),
        section_figures(program, "trained"),
        paced(forward + there, sums.forward @ host + calls[0]) - there,
        backward * share,
        weights * share,
        paced(again + once_more, sums.again @ host + calls[0]) - once_more,
        paced(sums.selected @ kernels, sums.selected @ host),
        there,
        once_more,
        back,
        sum(hidden, np.zeros(())),
        *sizes,
    )


def paced(device: Array, host: Array) -> Array:
    """Seconds of work that the host issues ahead of the device: (device⁴ + host⁴)^¼.

    A host that runs ahead freely would make it the longer of the two; calls of uneven length and waiting for other
    ranks cost most where both are alike. The power is that of a study of whole steps (FINDINGS_STEPS.md, CNNs).

    >>> paced(np.array([3.0, 1.0]), np.array([0.0, 1.0])).round(3)
    array([3.   , 1.189])
    """
    return np.where(host > 0, np.sqrt(np.sqrt(np.square(np.square(device)) + np.square(np.square(host)))), device)


def section_figures(program: Program, name: str) -> Array:
    """A figure of each section of a program."""
    return np.array([getattr(section, name) for section in program.sections], dtype=np.float64)


def recomputed(columns: Columns, ways: Ways) -> TurnTimes:
    """Turns with what their sections recompute: nothing, a selection (the core of attention), or all from the input of
    each turn or group of turns.

    A group keeps one input, and all its activations live at once when they have been brought back. References:
    Korthikanti et al., Reducing activation recomputation in large transformer models, MLSys 2023; Chen et al., Training
    deep nets with sublinear memory cost, arXiv:1604.06174 (groups).
    """
    c = columns
    shape = (-1,) + (1,) * (c.forward.ndim - 1)
    whole, core, group = (one.reshape(shape) for one in ways)
    again = np.where(whole, c.again, core * c.selected)
    kept = np.where(whole, np.minimum(c.input_bytes, c.saved_bytes) / group, c.saved_bytes) - core * c.selected_bytes
    return TurnTimes(
        c.forward,
        c.backward + again,
        c.weights,
        c.forward_transfers,
        c.backward_transfers + np.where(whole, c.again_transfers, 0.0),
        kept,
        np.zeros_like(kept),
        np.where(whole, c.saved_bytes * group, 0.0),
    )


def turns_placed(sections: int, pieces: Sequence[Chunk], places: Sequence[Sequence[int]]) -> Array:
    """Turns of each section in each chunk of each stage, (stages, chunks, sections); ``places``: the pieces of the
    network that a stage's chunks are."""
    placed = np.zeros((len(places), len(places[0]), sections))
    for stage, held in enumerate(places):
        for chunk, piece in enumerate(held):
            for section, turns in pieces[piece]:
                placed[stage, chunk, section] += turns
    return placed


def crowded(times: TurnTimes, gathers: Array, gradients: Array, contention: float) -> TurnTimes:
    """Turns slowed by the collectives that run beside them: ``contention`` seconds for each second of gathers (both
    directions) and of gradient exchange (backward), no more than they would take one after the other."""
    if contention == 0.0:
        return times
    return replace(
        times,
        forward=times.forward + contention * np.minimum(times.forward, gathers),
        backward=times.backward + contention * np.minimum(times.backward + times.weights, gathers + gradients),
    )


def over(held: Array, figures: Array) -> Array:
    """Figures of sections summed over what each stage holds: (stages, sections) with (sections, …) to (stages, …)."""
    return np.tensordot(held, figures, axes=1)


# one stage: streams


def walk(
    turns: Iterable[Turn],
    forward: Array,
    backward: Array,
    gather: Array | None,
    buckets: Sequence[Numeric],
    start: Numeric,
) -> tuple[Numeric, Numeric]:
    """When the computing and the network stream have done one pass [s]; the computing one is free from ``start`` on.

    Each stream is served in the order in which its work becomes ready. A gather starts once the turn before the last
    has ended, and the turn waits for it; buckets go out after their turn. ``forward``, ``backward`` and ``gather`` are
    seconds by section, ``buckets`` by turn."""
    compute, network, issued = start, 0.0 * np.asarray(start), 0.0 * np.asarray(start)
    sent: list[tuple[Numeric, Numeric]] = []
    for turn, bucket in zip(turns, buckets, strict=True):
        if turn.gathers and gather is not None:
            network = np.maximum(network, issued) + gather[turn.section]
            awaited, issued = network, np.asarray(compute)
            network = _served(network, sent)
            compute = np.maximum(compute, awaited)
        compute = compute + (forward if turn.direction == "forward" else backward)[turn.section] * turn.count
        if turn.buckets:
            sent.append((compute, bucket))
    return compute, _served(network, sent)


def _served(free: Array, waiting: list[tuple[Numeric, Numeric]]) -> Array:
    for ready, seconds in waiting:
        free = np.maximum(free, ready) + seconds
    waiting.clear()
    return free


# a pipeline


def stage_ends(schedule: Schedule, passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """When each stage has done its passes: (stages, …) [s]."""
    return schedule.stage_ends(passes, microbatches, chunks)


def alive(schedule: Schedule, stages: int, microbatches: Numeric, chunks: int) -> Array:
    """Microbatches whose activations live at once on each stage, as a fraction of all that it holds (chunks, copies):
    (stages, …)."""
    if stages == 1:
        return np.ones((1,) + np.ndim(microbatches) * (1,))
    stage = np.arange(float(stages)).reshape((-1,) + np.ndim(microbatches) * (1,))
    living = np.asarray(schedule.alive(stage, stages, microbatches, chunks)) / (chunks * schedule.copies)
    return np.broadcast_to(living, np.broadcast_shapes(stage.shape, np.shape(microbatches)))


# update and memory


def update_kernel(count: float, tensors: float, chosen: Optimizer, formats: Precision) -> Kernel:
    """The optimizer as one pass over all that it reads and writes of ``count`` parameters in ``tensors``."""
    read, written = (count * per_parameter for per_parameter in chosen.update_bytes(formats))
    calls, flops = chosen.launches(tensors), count * chosen.flops
    return flat_pass("update", "optimizer", "update", count, read, written, flops=flops, calls=calls)


def clip_kernels(count: float, clip: str, formats: Precision) -> list[Kernel]:
    """Passes over ``count`` gradients before an update that is clipped to a global norm: they are read once for the
    norm and, where they are ``scaled`` apart from the update, read and written once more (Pascanu et al., ICML
    2013)."""
    size = count * (formats.accumulator or formats.gradient)
    norm = flat_pass("norm of gradients", "reduce", "update", count, size, 0.0, flops=2.0 * count)
    scale = flat_pass("scaled gradients", "elementwise", "update", count, size, size)
    return {"none": [], "norm": [norm], "scaled": [norm, scale]}[clip]


def clip_axes(zero: int) -> Axes:
    """The axes over which parts of the norm are summed: whatever parameters, or shards of their gradients, are divided
    over."""
    return ("tp", "ep", "dp", "pp") if zero else ("tp", "pp")


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of what training keeps for each parameter on a stage, (stages, …), and of what sharding gathers at a
    time."""

    parameters: Array
    gradients: Array
    optimizer: Array
    gathered: Numeric


def states(
    parameters: Array,
    trained: Array,
    largest: Numeric,
    ranks: Numeric,
    zero: int,
    chosen: Optimizer,
    formats: Precision,
    *,
    training: bool = True,
) -> States:
    """States of ``parameters`` elements on each stage, ``trained`` of them with gradients and optimizer states, sharded
    over ``ranks`` as ZeRO's stages say (Rajbhandari et al., SC 2020).

    ``largest``: elements of the largest section; with sharded parameters two of them are whole at once.
    """
    share = [1.0 / np.asarray(ranks) if zero >= stage else 1.0 for stage in (3, 2, 1)]
    return States(
        parameters * formats.parameter * share[0],
        trained * ((formats.gradient + formats.accumulator) * training) * share[1],
        trained * (chosen.state_bytes(formats) * training) * share[2],
        2.0 * largest * formats.parameter if zero == 3 else 0.0 * np.asarray(largest),
    )


def workspace(held: Array, largest_output_bytes: Array, transient: Array, bucket: Numeric) -> Array:
    """What a stage needs for a moment, (stages, …): two of its largest activations (a gradient and its successor), two
    buckets, and what recomputation brings back. Only sections that a stage holds count."""
    known: dict[bytes, Array] = {}
    found = []
    for here in held > 0:  # few stages differ in what they hold
        kind = here.tobytes()
        if kind not in known:
            most = (one[here].max(axis=0, initial=0.0) for one in (largest_output_bytes, transient))
            known[kind] = 2.0 * next(most) + next(most) + 2.0 * np.asarray(bucket)
        found.append(known[kind])
    return np.stack(found)


def memory(held: States, activations: Array, work: Numeric) -> Array:
    """Bytes of each stage, all parts together."""
    return held.parameters + held.gradients + held.optimizer + activations + work + held.gathered
