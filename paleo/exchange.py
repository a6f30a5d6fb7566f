"""What follows the passes of a pipeline: gradients summed over their replicas, tables that two stages share, parameters
gathered. Pure functions that broadcast over arrays; the stages are the first axis, their chunks the second where there
are any.

A stage that overlaps starts to send a chunk's gradients inside the last pass that makes them, and goes on behind the
passes of its other chunks; only what is left when its last pass ends is exposed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paleo.lower import Program, Tie
from paleo.parallel.mesh import Axes, Mesh
from paleo.schedules.base import Numeric, Passes, Schedule

Array = npt.NDArray[np.float64]
Count = npt.NDArray[np.int64]


def copied(held: Array, ties: Sequence[Tie]) -> Array:
    """1 where a stage reads a tied parameter whose owner lies elsewhere and so holds a copy of it: (stages, ties).

    ``held``: turns of each section on each stage.
    """
    found = np.zeros((len(held), len(ties)))
    known: dict[str, npt.NDArray[np.bool_]] = {}
    for column, tie in enumerate(ties):
        there, reads = known.get(tie.name, held[:, tie.owner] > 0), held[:, tie.reader] > 0
        found[:, column] = reads & ~there
        known[tie.name] = there | reads
    return found


def gradient_elements(program: Program, placed: Array, mesh: Mesh, copies: int) -> dict[Axes, Array]:
    """Gradient elements of each chunk of each stage by the axes over which they are summed, (stages, chunks); those of
    copied tied parameters are with the last chunk. With ``copies`` of the network every gradient travels.

    ``placed``: turns of each section in each chunk of each stage.
    """
    found: dict[Axes, Array] = {}

    def add(axes: Axes, elements: Array) -> None:
        used = tuple(axis for axis in axes if mesh.degree(axis) > 1)
        if used or copies > 1:
            found[used] = found.get(used, 0.0) + elements

    for number, section in enumerate(program.sections):
        for one in section.gradients:
            add(one.axes, placed[:, :, number] * one.elements)
    if program.ties:
        last = np.arange(placed.shape[1]) == placed.shape[1] - 1
        for tie, here in zip(program.ties, copied(placed.sum(axis=1), program.ties).T, strict=True):
            if tie.trained and here.any():
                add(tie.axes, here[:, None] * last * tie.elements)
    return found


def tied_pairs(ties: Sequence[Tie], held: Array) -> list[tuple[int, int, int]]:
    """Tie, stage of its owner and stage of a copy, for each copy of a trained parameter."""
    return [
        (number, int(np.flatnonzero(held[:, ties[number].owner])[0]), stage)
        for stage, number in np.argwhere(copied(held, ties)).tolist()
        if ties[number].trained
    ]


def replica_groups(mesh: Mesh, axes: Axes, copies: int) -> list[tuple[Count, Count]]:
    """Stride and ranks of the groups that sum a stage's gradients over ``axes``, (stages,) each; the slowest of them
    counts.

    With two copies of the network the group is twice as large, and what it sums crosses between the two stages that
    hold the same piece: no faster than those two alone.
    """
    stages = mesh.degree("pp")
    groups = [(np.full(stages, mesh.stride(axes)), np.full(stages, mesh.ways(axes) * copies))] if axes else []
    if copies > 1:
        apart = np.abs(stages - 1 - 2 * np.arange(stages))
        groups.append((apart * mesh.stride(("pp",)), np.full(stages, copies)))
    return groups


def exposed_exchange(
    seconds: Array, buckets: Array, schedule: Schedule, passes: Passes, chunks: int, contention: float
) -> Array:
    """Seconds after each stage's last pass until all its gradients have been sent: (stages, …).

    ``seconds`` and ``buckets``: time and number of the sendings of each chunk, (stages, chunks, …). A bucket is ready
    once its share of the chunk's last gradient pass is done. ``contention``: what the passes lose for each second of
    sending beside them; at 1 nothing is won.
    """
    total = seconds.sum(axis=1)
    if contention >= 1.0 or not total.any():
        return np.asarray(total)
    back, weights = passes.backward / chunks, passes.weights / chunks
    making = weights if schedule.splits_backward else back + weights
    follow = _behind(schedule, seconds.shape[0], seconds.shape[1], chunks)
    rows, finish = np.arange(len(seconds)), np.full_like(total, -np.inf)
    for chunk in np.argsort(-follow.sum(axis=2), axis=1, kind="stable").T:
        left = follow[rows, chunk].T.reshape((2, -1) + (1,) * (back.ndim - 1))
        ready, one, count = -left[0] * back - left[1] * weights, seconds[rows, chunk], buckets[rows, chunk]
        finish = np.maximum(np.maximum(finish, ready - making * (1.0 - 1.0 / count)) + one, ready + one / count)
    exposed = np.maximum(finish, 0.0)
    return np.asarray(np.minimum(total, exposed + contention * np.maximum(total - exposed, 0.0)))


def _behind(schedule: Schedule, stages: int, held: int, chunks: int) -> Array:
    """Passes that a stage still makes after the last gradient of each chunk: of inputs and of weights, (stages, chunks,
    2)."""
    stage = np.arange(float(stages))
    counts = [[stage * 0.0 + n for n in schedule.behind(stage, stages, chunk, chunks)] for chunk in range(held)]
    return np.array(counts).transpose(2, 0, 1)


def exposed_gather(seconds: Array, buckets: Array, forward: Array, contention: float) -> Array:
    """Seconds of gathering that the first forward pass of the next step, ``forward`` long, does not hide: the first
    bucket at least."""
    exposed = np.maximum(seconds / buckets, seconds - forward * (1.0 - 1.0 / buckets))
    return np.asarray(np.minimum(seconds, exposed + contention * (seconds - exposed)))


def sendings(size: Numeric, bucket: float) -> Array:
    """In how many buckets so many bytes go out; a bucket holds one byte at least."""
    return np.maximum(1.0, np.ceil(np.asarray(size) / max(bucket, 1.0)))
