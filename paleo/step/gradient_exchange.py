"""What follows the passes of a pipeline: gradients summed over their replicas, tables that two stages share, parameters
gathered. Pure functions that broadcast over arrays; the stages are the first axis, their chunks the second where there
are any.

A stage that overlaps starts to send a chunk's gradients inside the last pass that makes them, and goes on behind the
passes of its other chunks; only what is left when its last pass ends is exposed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paleo.lowering.program import Program, Tie
from paleo.parallel.mesh import Axes, Mesh
from paleo.schedules.base import Numeric, Passes, Schedule

Array = npt.NDArray[np.float64]
Count = npt.NDArray[np.int64]
Index = npt.NDArray[np.intp]


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
    turns = gradient_turns(placed, program.ties)
    return {axes: turns @ elements for axes, elements in gradient_shares(program, mesh, copies).items()}


def gradient_turns(placed: Array, ties: Sequence[Tie]) -> Array:
    """What makes gradients in each chunk of each stage: turns of each section, then copies of each tied parameter,
    which are with the last chunk: (stages, chunks, sections and ties)."""
    tied = np.zeros((*placed.shape[:2], len(ties)))
    tied[:, -1] = copied(placed.sum(axis=1), ties)
    return np.concatenate([placed, tied], axis=2)


def gradient_shares(program: Program, mesh: Mesh, copies: int) -> dict[Axes, Array]:
    """Gradient elements that one of `gradient_turns` makes, by the axes over which they are summed: (sections and
    ties,)."""
    owed = [
        (number, tuple([axis for axis in axes if mesh.degree(axis) > 1]), elements)
        for number, axes, elements in _gradients(program)
    ]
    return _by_axes(program, owed, copies)


def gathered_shares(program: Program, mesh: Mesh, copies: int, *, frozen: bool) -> dict[Axes, Array]:
    """Parameter elements that one of `gradient_turns` gathers from the ranks that share out their states, by the axes
    of these ranks, which are fewer for experts: (sections and ties,). ``frozen``: those too that are not trained."""
    owed = list(_states(program, mesh))
    if frozen:
        first, shared = len(program.sections), mesh.state_axes
        owed += [(i, shared, one.parameters - one.trained) for i, one in enumerate(program.sections)]
        owed += [(first + i, shared, one.elements) for i, one in enumerate(program.ties) if not one.trained]
    return _by_axes(program, [one for one in owed if one[2]], copies)


def owned_elements(program: Program, mesh: Mesh, copies: int) -> Array:
    """Trained elements that a rank owns of one of `gradient_turns` where states are shared out over their replicas,
    which experts have fewer of: (sections and ties,)."""
    found = np.zeros(len(program.sections) + len(program.ties))
    for number, axes, elements in _states(program, mesh):
        found[number] += elements / (mesh.ways(axes) * copies)
    return found


def _gradients(program: Program) -> list[tuple[int, Axes, float]]:
    """Position among `gradient_turns`, axes and elements of all gradients."""
    first = len(program.sections)
    made = [(i, one.axes, one.elements) for i, section in enumerate(program.sections) for one in section.gradients]
    return made + [(first + i, one.axes, one.elements) for i, one in enumerate(program.ties) if one.trained]


def _states(program: Program, mesh: Mesh) -> Iterator[tuple[int, Axes, float]]:
    """The same with the axes over which the states of those parameters are shared out."""
    shared = mesh.state_axes
    for number, axes, elements in _gradients(program):
        yield number, tuple([axis for axis in shared if axis in axes]), elements


def _by_axes(program: Program, owed: Sequence[tuple[int, Axes, float]], copies: int) -> dict[Axes, Array]:
    """Elements side by side for each set of axes; with one copy of the network nothing travels over none."""
    found: dict[Axes, Array] = {}
    for number, axes, elements in owed:
        if axes or copies > 1:
            found.setdefault(axes, np.zeros(len(program.sections) + len(program.ties)))[number] += elements
    return found


def sharers(trained: Array, owned: Array, ranks: Numeric) -> Array:
    """Ranks that share out ``trained`` elements, of which each ``owned`` some; ``ranks`` where there are none."""
    return np.divide(trained, owned, out=np.zeros_like(owned) + ranks, where=owned > 0)


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
    return sent_behind(in_turn(seconds, buckets, schedule, chunks), schedule, passes, chunks, contention)


@dataclass(frozen=True, slots=True)
class Sends:
    """The sendings of chunks, one after another, by which a stage's end is told; each field (stages, sends, …).

    ``inputs`` and ``weights`` passes follow a chunk's last gradient, the first ``share`` of whose pass lies behind its
    first bucket. From that bucket on sending lasts ``from_first`` seconds, all later chunks in it, from the last one on
    ``from_last``. ``total``: seconds of all sendings, (stages, …)."""

    inputs: Array
    weights: Array
    share: Array
    from_first: Array
    from_last: Array
    total: Array

    def of(self, members: Index) -> Sends:
        """Those of positions along the last axis."""
        parts = (np.take(one, members, axis=-1) for one in (self.share, self.from_first, self.from_last, self.total))
        return Sends(self.inputs, self.weights, *parts)


def in_turn(seconds: Array, buckets: Array, schedule: Schedule, chunks: int) -> Sends:
    """The sendings of each stage in the order in which its chunks are done; arguments as in `exposed_exchange`.

    Between two chunks the time to the end is linear where all of them are alike; then neither the inner ones nor their
    buckets can be the last to be waited for, and they are left out.
    """
    follow = _behind(schedule, seconds.shape[0], seconds.shape[1], chunks)
    order = np.argsort(-follow.sum(axis=2), axis=1, kind="stable")
    rows = np.arange(len(seconds))[:, None]
    follow, one, count = follow[rows, order], seconds[rows, order], buckets[rows, order]
    kept = _corners(follow, one, count)
    total = seconds.sum(axis=1)
    later = np.zeros_like(one)
    later[:, :-1] = np.cumsum(one[:, :0:-1], axis=1)[:, ::-1]
    one, count, left, later = one[:, kept], count[:, kept], follow[:, kept], later[:, kept]
    inputs, weights = (left[..., kind].reshape(left.shape[:2] + (1,) * (seconds.ndim - 2)) for kind in range(2))
    return Sends(inputs, weights, 1.0 - 1.0 / count, one + later, one / count + later, total)


def _corners(follow: Array, seconds: Array, buckets: Array) -> list[int]:
    """Chunks that are first, last or, on some stage, unlike a neighbour: all others lie on a line between two of
    these."""
    figures = np.concatenate([one.reshape(*one.shape[:2], -1) for one in (seconds, buckets)], axis=2)
    alike = (figures[:, 1:] == figures[:, :-1]).all(axis=(0, 2))
    even = (np.diff(follow, 2, axis=1) == 0.0).all(axis=(0, 2))
    inner = {place + 1 for place in np.flatnonzero(alike[1:] & alike[:-1] & even).tolist()}
    return [place for place in range(seconds.shape[1]) if place not in inner]


def sent_behind(sends: Sends, schedule: Schedule, passes: Passes, chunks: int, contention: float) -> Array:
    """`exposed_exchange` of sendings in turn."""
    if contention >= 1.0 or not sends.total.any():
        return sends.total
    back, weights = passes.backward / chunks, passes.weights / chunks
    making = weights if schedule.splits_backward else back + weights
    exposed = np.zeros(np.broadcast_shapes(back.shape, sends.total.shape))
    for k in range(sends.share.shape[1]):
        after = sends.inputs[:, k] * back + sends.weights[:, k] * weights
        finish = np.maximum(sends.from_first[:, k] - making * sends.share[:, k], sends.from_last[:, k]) - after
        np.maximum(exposed, finish, out=exposed)
    return np.asarray(np.minimum(sends.total, exposed + contention * np.maximum(sends.total - exposed, 0.0)))


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
