"""What a pipeline schedule is: for each stage an order of forward and backward passes of microbatches.

An order is all that a schedule owes. Its time (`paleo.schedules.stage_ends`), the activations that live at once and
the passes that remain after a gradient follow from that order, unless the schedule states closed forms of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError
from paleo.registry import Registry

Array = npt.NDArray[np.float64]
#: A number or an array of numbers; closed forms broadcast.
Numeric = float | Array

#: F forward, B backward (of inputs alone where W is listed apart), W backward of weights.
Pass = Literal["F", "B", "W"]


class Action(NamedTuple):
    """One pass of one microbatch through one chunk of layers of a stage."""

    kind: Pass
    microbatch: int
    chunk: int = 0


Order = Callable[[int, int, int, int], list[Action]]
#: How many passes of a stage's order run as one, one group after another: (stage, stages, microbatches, chunks).
Fused = Callable[[int, int, int, int], list[int]]
#: Where a piece of the network lies: (stage, chunk of that stage).
Place = tuple[int, int]
#: (stages, chunks) -> for each copy of the network the places of its pieces, from input to output.
Paths = Callable[[int, int], tuple[tuple[Place, ...], ...]]


def round_robin(stages: int, chunks: int) -> tuple[tuple[Place, ...], ...]:
    """One copy of the network, whose pieces lie on one stage after the other, chunk by chunk.

    >>> round_robin(2, 2)
    (((0, 0), (1, 0), (0, 1), (1, 1)),)
    """
    return (tuple((stage, chunk) for chunk in range(chunks) for stage in range(stages)),)


class Passes(NamedTuple):
    """Seconds of one microbatch through all chunks of each stage; the first axis is the stage, further ones
    broadcast."""

    forward: Array
    backward: Array
    weights: Array


#: Seconds from the first pass to the end of the last one: (passes, microbatches, chunks).
Span = Callable[[Passes, Numeric, int], Array]
#: Most chunk activations alive at once on a stage: (stage, stages, microbatches, chunks).
Alive = Callable[[Numeric, int, Numeric, int], Numeric]
#: Those of one of its pieces among them: (stage, stages, microbatches, piece, chunks).
AliveOfPiece = Callable[[Numeric, int, Numeric, int, int], Numeric]


#: Chunks' passes that a stage still makes after the last gradient of one of its chunks: (stage, stages, chunk, chunks)
#: -> (backward passes of inputs, of weights).
Remaining = Callable[[Numeric, int, int, int], tuple[Numeric, Numeric]]
#: When each stage ends its last pass [s]: (span, passes, microbatches, chunks).
Ends = Callable[[Array, Passes, Numeric, int], Array]


def none_remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """The last gradient pass of a stage's only chunk is its last pass."""
    return 0.0, 0.0


def drained(span: Array, passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """The last backward pass hurries up to the first stage: each stage is done by as much earlier as it is above."""
    back = passes.backward + passes.weights
    return np.asarray(span - (running_sum(back) - back) / chunks)


def all_at_once(span: Array, passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """No stage is done later than the slowest."""
    return np.asarray(span + 0.0 * passes.forward)


def running_sum(figures: Array) -> Array:
    """Sums over the first axis up to each place, as `np.cumsum` has them: row by row, which is ten times as fast where
    rows are long."""
    return _running(np.add, figures)


def running_max(figures: Array) -> Array:
    """The largest over the first axis up to each place."""
    return _running(np.maximum, figures)


def _running(function: np.ufunc, figures: Array) -> Array:
    rows = np.array(figures, dtype=np.float64)
    for place in range(1, len(rows)):
        function(rows[place - 1], rows[place], out=rows[place, ...])
    return rows


@dataclass(frozen=True, slots=True)
class ClosedForms:
    """Formulas that a schedule may state beside its order; all broadcast over arrays. None: the order says.

    ``span``: seconds of all passes.
    ``alive``: the most passes of a stage whose activations live at once.
    ``ends``: when each stage has made its last pass [s], from the span.
    ``remaining``: passes that a stage still makes after the gradients of one of its chunks.
    ``exact``: where ``span`` is the longest path through the order: on ``any`` stages, or where all pieces of the
    network take ``equal`` times. Elsewhere it is near.
    ``least``: microbatches for each stage from which ``span`` holds.
    ``alive_of``: how many of ``alive`` are of one piece of the network.
    """

    span: Span | None = None
    alive: Alive | None = None
    ends: Ends = drained
    remaining: Remaining | None = None
    exact: Literal["any", "equal"] = "equal"
    least: float = 0.0
    alive_of: AliveOfPiece | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline order.

    ``order``: (stage, stages, microbatches, chunks) -> the passes of a stage.
    ``closed``: formulas that stand in for what the order says.
    ``chunks``: pieces of each copy of the network that a stage has; None: as many as the strategy says.
    ``splits_backward``: weight gradients (W) are passes of their own.
    ``multiple``: the number of microbatches must be a multiple of the stages.
    ``least``: the fewest microbatches for each stage. Copies of the network take equally many of them.
    ``even``: the number of stages must be even.
    ``paths``: which stage has which piece of the network, once for each copy of it.
    ``fused``: which passes of the order begin and end together: a forward pass beside the backward pass that follows it
    (with its weights), or a backward pass and its weights; None: each runs alone.
    """

    name: str
    reference: str
    order: Order
    closed: ClosedForms = ClosedForms()
    chunks: int | None = 1
    splits_backward: bool = False
    multiple: bool = False
    least: int = 0
    even: bool = False
    paths: Paths = round_robin
    fused: Fused | None = None

    @property
    def copies(self) -> int:
        """Copies of the network that the stages hold together."""
        return len(self.paths(2, 1))

    def pieces(self, stages: int, chunks: int) -> tuple[tuple[int, ...], ...]:
        """For each stage the pieces of the network that its chunks are.

        >>> SCHEDULES["interleaved"].pieces(2, 2)
        ((0, 2), (1, 3))
        """
        piece_of: list[dict[int, int]] = [{} for _ in range(stages)]
        for path in self.paths(stages, chunks):
            for piece, (stage, chunk) in enumerate(path):
                piece_of[stage][chunk] = piece
        return tuple(tuple(pieces[chunk] for chunk in range(len(pieces))) for pieces in piece_of)

    def sends_output(self, stages: int, chunks: int) -> tuple[tuple[bool, ...], ...]:
        """For each chunk of each stage whether its output leaves the stage, for another or at the network's end."""
        sent = [[True] * (chunks * self.copies) for _ in range(stages)]
        for path in self.paths(stages, chunks):
            for (stage, chunk), (other, _) in itertools.pairwise(path):
                sent[stage][chunk] = stage != other
        return tuple(map(tuple, sent))

    def takes(self, chunks: int) -> bool:
        """Whether the schedule supports ``chunks`` chunks per stage of each copy of the network."""
        return chunks > 1 if self.chunks is None else chunks == self.chunks

    def runs(self, stages: int, microbatches: Numeric) -> npt.NDArray[np.bool_]:
        """Whether the schedule can run ``microbatches`` on ``stages``: a mask in the shape of ``microbatches``."""
        count = np.asarray(microbatches)
        fits = (count >= self.least * stages) & ((count % stages == 0) | (not self.multiple))
        fits = fits & (count % self.copies == 0)
        return np.asarray(fits & (stages % 2 == 0 or not self.even))

    def alive(self, stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
        """Most chunk activations alive at once on a stage."""
        if self.closed.alive is not None:
            return self.closed.alive(stage, stages, microbatches, chunks)
        return np.asarray(self._counted_alive(stage, stages, microbatches, chunks).sum(axis=-1))

    def alive_by_piece(self, stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Array:
        """`alive` by the pieces of the network that a stage has, those of all copies: (pieces, …)."""
        of_piece, pieces = self.closed.alive_of, range(chunks * self.copies)
        if len(pieces) == 1:
            return np.asarray(self.alive(stage, stages, microbatches, chunks), dtype=np.float64)[None]
        if of_piece is not None:
            counts = [of_piece(stage, stages, microbatches, piece, chunks) for piece in pieces]
            return np.stack(np.broadcast_arrays(*counts))
        return np.moveaxis(self._counted_alive(stage, stages, microbatches, chunks), -1, 0)

    def _counted_alive(self, stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Array:
        """`in_flight` of arrays: (…, pieces)."""
        places, counts = np.broadcast_arrays(np.asarray(stage, dtype=int), np.asarray(microbatches, dtype=int))
        pairs = zip(places.ravel().tolist(), counts.ravel().tolist(), strict=True)
        most = [_in_flight(self, place, stages, count, chunks) for place, count in pairs]
        return np.array(most, dtype=np.float64).reshape(*places.shape, chunks * self.copies)

    def remaining(self, stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
        """Chunks' passes that a stage still makes after the last gradient of one of its chunks: (backward passes of
        inputs, of weights)."""
        if self.closed.remaining is not None:
            return self.closed.remaining(stage, stages, chunk, chunks)
        places = np.asarray(stage, dtype=int)
        counts = [_passes_remaining(self, place, stages, chunk, chunks) for place in places.ravel().tolist()]
        inputs, weights = (
            np.array(counts, dtype=np.float64).reshape(*places.shape, 2).transpose(-1, *range(places.ndim))
        )
        return inputs, weights

    def groups(self, stage: int, stages: int, microbatches: int, chunks: int) -> list[tuple[Action, ...]]:
        """The order of a stage; passes that run as one stand together."""
        order = self.order(stage, stages, microbatches, chunks)
        sizes = [1] * len(order) if self.fused is None else self.fused(stage, stages, microbatches, chunks)
        return [tuple(itertools.islice(actions, size)) for actions in [iter(order)] for size in sizes]

    @property
    def pairs(self) -> bool:
        """Whether forward passes run beside backward passes of other microbatches, as one."""
        return self.fused is not None

    def unpaired(self, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
        """Forward passes of a stage that have no backward pass beside them, and as many backward passes: those that the
        order leaves alone, the mean of the stages; of a schedule without `pairs`, whose passes software may pair in the
        steady state, those that fill the first stage and one more, whose output the first backward pass waits for."""
        return _left_alone(self, stages, chunks) if self.pairs else self.alive(0, stages, microbatches, chunks)

    def in_flight(self, stage: int, stages: int, microbatches: int, chunks: int) -> tuple[int, ...]:
        """The most forward passes of this stage whose activations live at once (until B, or W where that is apart), by
        the order: how many there are of each of its pieces when there are most for the first time."""
        ends: Pass = "W" if self.splits_backward else "B"
        alive = [0] * (chunks * self.copies)
        most = tuple(alive)
        for action in self.order(stage, stages, microbatches, chunks):
            alive[action.chunk] += (action.kind == "F") - (action.kind == ends)
            most = tuple(alive) if sum(alive) > sum(most) else most
        return most


@lru_cache(maxsize=65536)
def _in_flight(schedule: Schedule, stage: int, stages: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """`Schedule.in_flight`; beyond a window each round of microbatches adds the same (nothing, or as many as it
    holds)."""
    most = window(stages, chunks) + microbatches % stages
    if microbatches <= most:
        return schedule.in_flight(stage, stages, microbatches, chunks)
    first, second = (schedule.in_flight(stage, stages, count, chunks) for count in (most - stages, most))
    rounds = (microbatches - most) // stages
    return tuple(after + (after - before) * rounds for before, after in zip(first, second, strict=True))


@lru_cache(maxsize=65536)
def _passes_remaining(schedule: Schedule, stage: int, stages: int, chunk: int, chunks: int) -> tuple[int, int]:
    """What the order has after the last gradient of a chunk, once the pipeline has been full."""
    order = schedule.order(stage, stages, window(stages, chunks), chunks)
    last: Pass = "W" if schedule.splits_backward else "B"
    end = max(k for k, action in enumerate(order) if action.kind == last and action.chunk == chunk)
    left = [action.kind for action in order[end + 1 :]]
    return left.count("B"), left.count(last)


@lru_cache(maxsize=4096)
def _left_alone(schedule: Schedule, stages: int, chunks: int) -> float:
    """Forward passes that run alone, the mean of the stages; more microbatches add pairs."""
    count = window(stages, chunks)
    groups = [group for stage in range(stages) for group in schedule.groups(stage, stages, count, chunks)]
    return sum(len(group) == 1 and group[0].kind == "F" for group in groups) / stages


#: Forward passes of all chunks and stages up to which a pipeline is unrolled whole.
UNROLLED = 2**14


def window(stages: int, chunks: int) -> int:
    """Microbatches that fill a pipeline; every further round is taken to add as much time as the last round of the
    window."""
    return stages * (4 if chunks == 1 else 4 + chunks)


def unrolled(stages: int, chunks: int, microbatches: int) -> bool:
    """Whether all microbatches are run one by one, rather than a window of them and the last round many times."""
    return microbatches <= window(stages, chunks) + stages or stages * chunks * microbatches <= UNROLLED


SCHEDULES: Registry[Schedule] = Registry("pipeline schedule", "paleo.schedules")


def add_schedule(schedule: Schedule) -> Schedule:
    """Register a schedule under its own name."""
    return SCHEDULES.register(schedule.name)(schedule)


def check_schedule(name: str, stages: int, chunks: int, microbatches: int) -> None:
    """PlanError where a schedule cannot run so many stages, chunks and microbatches."""
    chosen = SCHEDULES[name]
    if chosen.chunks not in (None, chunks):
        count = "one chunk" if chosen.chunks == 1 else f"{chosen.chunks} chunks"
        other = "; use interleaved" if chosen.chunks == 1 else ""
        raise PlanError(f"schedule {name!r} holds {count} a stage, not {chunks}{other}")
    if chosen.even and stages % 2:
        raise PlanError(f"schedule {name!r} needs an even number of stages, not {stages}")
    if chosen.multiple and microbatches % stages:
        raise PlanError(f"schedule {name!r}: {microbatches} microbatches are not a multiple of the {stages} stages")
    if microbatches % chosen.copies:
        raise PlanError(
            f"schedule {name!r}: {microbatches} microbatches are not shared evenly by its {chosen.copies} copies"
        )
    if microbatches < chosen.least * stages:
        least = f"{chosen.least} for each of the {stages} stages"
        raise PlanError(f"schedule {name!r}: {microbatches} microbatches are too few; it needs {least}")
