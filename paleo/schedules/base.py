"""What a pipeline schedule is: for each stage an order of forward and backward passes of microbatches.

An order is all that a schedule owes. Its time, the activations that live at once and what follows a gradient come from
that order (`paleo.schedules.base`), unless it states closed forms of them.

When the stages of a pipeline end, for many configurations at once: the longest way through the passes of an order.

The order of each stage is fixed, so a pass starts when the one before it on its stage and the one that feeds it have
ended. Passes that run as one (`Schedule.fused`) start when all that feed them have ended, and feed others when all of
them have ended. Passes that are as many steps from the start are computed together, over all configurations. The result
equals that of `paleo.schedules.pipeline.pipeline_time` without sends, which draws a timeline of one configuration.
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
Index = npt.NDArray[np.intp]
_KINDS = {"F": 0, "B": 1, "W": 2}


class _Wave(NamedTuple):
    """Passes that can run together, one a stage: rows of their seconds, positions of the passes before them on their
    stages, and of those that feed them (the last position stands for none). ``others``: of those that feed a pass with
    which they run as one; None where nothing does."""

    seconds: Index
    before: Index
    sources: Index
    others: Index | None


class _Waves(NamedTuple):
    """All passes of a schedule, as many as there are of them, and the position of the last one of each stage."""

    waves: tuple[_Wave, ...]
    passes: int
    last: Index


def stage_ends(schedule: Schedule, pieces: Passes, microbatches: npt.ArrayLike) -> Array:
    """When each stage ends its last pass [s]: (stages, …).

    ``pieces`` are seconds of one microbatch through each chunk of each stage, (stages, chunks of all copies, …);
    ``microbatches`` broadcasts with the axes behind. PlanError where passes wait for one another in a circle.
    """
    seconds = np.stack(np.broadcast_arrays(*(np.asarray(each, dtype=np.float64) for each in pieces)))
    if not schedule.splits_backward:
        seconds = np.stack([seconds[0], seconds[1] + seconds[2], np.zeros_like(seconds[2])])
    shape = np.broadcast_shapes(seconds.shape[3:], np.shape(microbatches))
    seconds = np.broadcast_to(seconds, (*seconds.shape[:3], *shape)).reshape(*seconds.shape[:3], -1)
    counts = np.broadcast_to(np.asarray(microbatches), shape).ravel()
    ends = np.zeros((seconds.shape[1], counts.size))
    for count in np.unique(counts):
        chosen = np.flatnonzero(counts == count)
        ends[:, chosen] = _repeated(schedule, np.ascontiguousarray(seconds[..., chosen]), int(count))
    return ends.reshape(len(ends), *shape)


#: Forward passes of all chunks and stages up to which a pipeline is unrolled whole.
UNROLLED = 2**14


def window(stages: int, chunks: int) -> int:
    """Microbatches that fill a pipeline; every further round is taken to add as much time as the last round of the
    window."""
    return stages * (4 if chunks == 1 else 4 + chunks)


def unrolled(stages: int, chunks: int, microbatches: int) -> bool:
    """Whether all microbatches are run one by one, rather than a window of them and the last round many times."""
    return microbatches <= window(stages, chunks) + stages or stages * chunks * microbatches <= UNROLLED


def _repeated(schedule: Schedule, seconds: Array, microbatches: int) -> Array:
    """Ends of the stages: of all microbatches, or of a window of microbatches and repetitions of its last round."""
    stages, chunks = seconds.shape[1], seconds.shape[2] // schedule.copies
    if unrolled(stages, chunks, microbatches):
        return _ends(schedule, seconds, microbatches)
    most = window(stages, chunks) + microbatches % stages
    first, second = (_ends(schedule, seconds, count) for count in (most - stages, most))
    return np.asarray(second + (second - first) * ((microbatches - most) // stages))


def _ends(schedule: Schedule, seconds: Array, microbatches: int) -> Array:
    _, stages, chunks, cases = seconds.shape
    waves = _waves(schedule, stages, microbatches, chunks // schedule.copies)
    ends = np.zeros((stages, cases))
    for first in range(0, cases, _BLOCK):
        rows = np.ascontiguousarray(seconds.reshape(-1, cases)[:, first : first + _BLOCK])
        ends[:, first : first + _BLOCK] = _run(waves, rows)
    return ends


def _run(waves: _Waves, rows: Array) -> Array:
    """End of the last pass of each stage: (stages, cases)."""
    done, position = np.zeros((waves.passes + 1, rows.shape[1])), 0
    for seconds, before, sources, others in waves.waves:
        ended = done[position : position + len(seconds)]
        np.maximum(done.take(before, axis=0), done.take(sources, axis=0), out=ended)
        if others is not None:
            np.maximum(ended, done.take(others, axis=0), out=ended)
        ended += rows.take(seconds, axis=0)
        position += len(seconds)
    return done[waves.last]


#: Configurations that are computed together: what they need stays in the cache of a processor.
_BLOCK = 256


@lru_cache(maxsize=512)
def _waves(schedule: Schedule, stages: int, microbatches: int, chunks: int) -> _Waves:
    """The passes of a schedule by the number of passes that must precede them."""
    rows, codes, sources, others = _waits(schedule, stages, microbatches, chunks)
    passes = sum(map(len, rows))
    try:
        wave_of = _wave_numbers(*([each.tolist() for each in column] for column in (codes, sources, others)))
    except ValueError as error:
        raise PlanError(f"schedule {schedule.name!r}: {error} passes wait for one another") from None
    order_of = np.argsort(np.concatenate(wave_of), kind="stable")
    numbers_of_waves, pass_codes = np.concatenate(wave_of)[order_of], np.concatenate(codes)
    width = chunks * schedule.copies
    position = np.full(3 * stages * width * microbatches + 1, passes, dtype=np.intp)  # the last one: of none
    position[pass_codes[order_of]] = np.arange(passes)
    before = [np.append(-1, each[:-1]) if len(each) else each for each in codes]
    waited = (position[np.concatenate(each)[order_of]] for each in (before, sources, others))
    starts = np.flatnonzero(np.diff(numbers_of_waves)) + 1
    columns = (np.split(column, starts) for column in (np.concatenate(rows)[order_of], *waited))
    waves = tuple(
        _Wave(seconds, previous, feeding, other if (other < passes).any() else None)
        for seconds, previous, feeding, other in zip(*columns, strict=True)
    )
    return _Waves(waves, passes, position[[each[-1] if len(each) else -1 for each in codes]])


def _waits(
    schedule: Schedule, stages: int, microbatches: int, chunks: int
) -> tuple[list[Index], list[Index], list[Index], list[Index]]:
    """The passes of each stage in order: rows of their seconds, their codes, those of the passes that feed them (-1:
    none), and of those that feed a pass with which they run as one."""
    width, feeds = chunks * schedule.copies, _feeds(schedule, stages, chunks)
    rows, codes, sources = [], [], []
    for stage in range(stages):
        order = schedule.order(stage, stages, microbatches, chunks)
        kinds, *numbers = zip(*order, strict=True) if order else ((), (), ())
        microbatch_of, chunk_of = (np.array(column, dtype=np.intp) for column in numbers)
        row = (np.array([_KINDS[kind] for kind in kinds], dtype=np.intp) * stages + stage) * width + chunk_of
        rows.append(row)
        codes.append(row * microbatches + microbatch_of)
        sources.append(np.where(feeds[row] < 0, -1, feeds[row] * microbatches + microbatch_of))
    if schedule.fused is None:
        return rows, codes, sources, [np.full_like(each, -1) for each in sources]
    sizes = [np.array(schedule.fused(stage, stages, microbatches, chunks)) for stage in range(stages)]
    return rows, codes, *_of_fused(codes, sources, sizes)


def _of_fused(codes: list[Index], sources: list[Index], sizes: list[Index]) -> tuple[list[Index], list[Index]]:
    """What passes wait for where ``sizes`` of them run as one: the last of those that run with their source, and the
    first of them also for what feeds the second."""
    released = np.full(max(each.max() for each in codes) + 2, -1, dtype=np.intp)
    for code, size in zip(codes, sizes, strict=True):
        released[code] = np.repeat(code[np.cumsum(size) - 1], size)
    sources, others = [released[each] for each in sources], []
    for source, size in zip(sources, sizes, strict=True):
        other, first = np.full_like(source, -1), np.cumsum(size) - size
        other[first[size > 1]] = source[first[size > 1] + 1]
        others.append(other)
    return sources, others


def _feeds(schedule: Schedule, stages: int, chunks: int) -> Index:
    """For each kind of pass of each chunk of each stage the one that feeds it: the same of a neighbour, or the forward
    pass on the same place; -1 for none: (kinds · stages · chunks of all copies,)."""
    before, behind = _neighbours(schedule.paths(stages, chunks))
    width = chunks * schedule.copies
    feeds = np.full(3 * stages * width, -1, dtype=np.intp)
    for stage, chunk in itertools.product(range(stages), range(width)):
        for kind in ("F", "B", "W"):
            source = _source(kind, 0, (stage, chunk), before, behind)
            if source is not None:
                number = (_KINDS[source[0]] * stages + source[1]) * width + source[3]
                feeds[(_KINDS[kind] * stages + stage) * width + chunk] = number
    return feeds


def _wave_numbers(codes: list[list[int]], sources: list[list[int]], others: list[list[int]]) -> list[list[int]]:
    """In which wave each pass of each stage runs; ValueError with how many never do. A pass, one of ``codes``, waits
    for the one before it, for its source and for another one (-1: none)."""
    done = {-1}
    reached, waves = [0] * len(codes), [list[int]() for _ in codes]
    active, wave = [stage for stage, order in enumerate(codes) if order], 0
    while active:
        ready = []
        for stage in active:
            place = reached[stage]
            if sources[stage][place] in done and others[stage][place] in done:
                ready.append(stage)
        if not ready:
            raise ValueError(sum(len(codes[stage]) - reached[stage] for stage in active))
        for stage in ready:
            done.add(codes[stage][reached[stage]])
            reached[stage] += 1
            waves[stage].append(wave)
        active = [stage for stage in active if reached[stage] < len(codes[stage])]
        wave += 1
    return waves


def _neighbours(paths: tuple[tuple[Place, ...], ...]) -> tuple[dict[Place, Place], dict[Place, Place]]:
    """The places before and behind each place on the way of its copy of the network."""
    steps = [step for path in paths for step in itertools.pairwise(path)]
    return {after: first for first, after in steps}, dict(steps)


def _source(
    kind: str, microbatch: int, place: Place, before: dict[Place, Place], behind: dict[Place, Place]
) -> tuple[str, int, int, int] | None:
    """The pass on another place, or the forward pass on the same one, that must have ended."""
    if kind == "W" or (kind == "F" and place not in before):
        return None
    stage, chunk = (before if kind == "F" else behind).get(place, place)
    return ("F" if kind == "F" or place not in behind else "B"), stage, microbatch, chunk


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


def around(stages: int, chunks: int) -> tuple[tuple[Place, ...], ...]:
    """One copy of the network, its pieces dealt to the stages in turn.

    >>> around(2, 2)
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
Behind = Callable[[Numeric, int, int, int], tuple[Numeric, Numeric]]
#: When each stage ends its last pass [s]: (span, passes, microbatches, chunks).
Ends = Callable[[Array, Passes, Numeric, int], Array]


def nothing_behind(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """The last gradient pass of a stage's only chunk is its last pass."""
    return 0.0, 0.0


def drained(span: Array, passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """The last backward pass hurries up to the first stage: each stage is done by as much earlier as it is above."""
    back = passes.backward + passes.weights
    return np.asarray(span - (running_sum(back) - back) / chunks)


def together(span: Array, passes: Passes, microbatches: Numeric, chunks: int) -> Array:
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
    """Formulas that a schedule may state beside its order; all broadcast over arrays, and None leaves a figure to the
    order.

    ``span`` is the time of all passes, ``ends`` when each stage has made its last one, ``alive`` the most passes whose
    activations live at once, ``alive_of`` how many of them are of one piece of the network, ``behind`` what a stage
    still does after the gradients of a chunk. ``exact`` says where ``span`` equals the longest way through the order:
    on ``any`` stages, or where all pieces of the network take ``equal`` times; elsewhere it is near. It holds from
    ``least`` microbatches a stage on.
    """

    span: Span | None = None
    alive: Alive | None = None
    ends: Ends = drained
    behind: Behind | None = None
    exact: Literal["any", "equal"] = "equal"
    least: float = 0.0
    alive_of: AliveOfPiece | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline order.

    ``order(stage, stages, microbatches, chunks)`` lists a stage's passes. ``paths`` says which stage has which piece of
    the network, once for each copy of it. ``chunks`` is how many of a copy's pieces a stage has (None: as many as the
    strategy says); ``splits_backward``: weight gradients are passes of their own. It runs with a ``multiple`` of the
    stages as microbatches, ``least`` times the stages or more of them and as many for each copy of the network, on an
    ``even`` number of stages. ``fused`` says which passes of the order begin and end together: a forward pass beside
    the backward pass that follows it (with its weights), or a backward pass and its weights; None: each runs alone.
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
    paths: Paths = around
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
        """For each chunk of each stage whether its output goes to another stage (or, behind the last piece, out)."""
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

    def stage_ends(self, passes: Passes, microbatches: Numeric, chunks: int, pieces: Passes | None = None) -> Array:
        """When each stage has made its last pass [s]: (stages, …).

        ``passes`` are seconds of one microbatch through all chunks of each stage, (stages, …); ``pieces`` the same for
        each chunk of all copies, (stages, chunks, …). With ``pieces`` the result is that of the order itself; without
        them chunks of a stage are taken to be alike, and closed forms may be near where stages differ.
        """
        count = np.asarray(microbatches, dtype=np.float64)
        closed = self._closed_holds(passes, count, pieces)
        if closed.all():
            return self._closed_ends(passes, count, chunks)
        whole = self._with_equal_chunks(passes, chunks) if pieces is None else pieces
        if not closed.any():
            return stage_ends(self, whole, count)
        return self._mixed(passes, whole, count, chunks, closed)

    def span(self, passes: Passes, microbatches: Numeric, chunks: int) -> Array:
        """Seconds from the first pass to the end of the last one, as `stage_ends` has it without pieces."""
        return np.asarray(self.stage_ends(passes, microbatches, chunks).max(axis=0))

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

    def behind(self, stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
        """Chunks' passes that a stage still makes after the last gradient of one of its chunks: (backward passes of
        inputs, of weights)."""
        if self.closed.behind is not None:
            return self.closed.behind(stage, stages, chunk, chunks)
        places = np.asarray(stage, dtype=int)
        counts = [_passes_behind(self, place, stages, chunk, chunks) for place in places.ravel().tolist()]
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

    def _closed_holds(self, passes: Passes, count: Array, pieces: Passes | None) -> npt.NDArray[np.bool_]:
        """The cases whose closed form is to be used."""
        shape = np.broadcast_shapes(passes.forward.shape[1:], count.shape)
        if self.closed.span is None:
            return np.zeros(shape, dtype=bool)
        enough = count >= self.closed.least * len(passes.forward)
        if pieces is not None and self.closed.exact == "equal":
            enough = enough & np.logical_and.reduce([_equal(np.asarray(each)) for each in pieces])
        return np.broadcast_to(enough, shape)

    def _closed_ends(self, passes: Passes, count: Array, chunks: int) -> Array:
        assert self.closed.span is not None
        return self.closed.ends(self.closed.span(passes, count, chunks), passes, count, chunks)

    def _mixed(self, passes: Passes, pieces: Passes, count: Array, chunks: int, closed: npt.NDArray[np.bool_]) -> Array:
        """Closed forms for some cases, the order for the others; cases lie along the last axes."""
        ends = np.empty((len(passes.forward), *closed.shape))
        counts = np.broadcast_to(count, closed.shape)
        for chosen in (closed, ~closed):
            totals = Passes(*(np.broadcast_to(each, ends.shape)[:, chosen] for each in passes))
            if chosen is closed:
                ends[:, chosen] = self._closed_ends(totals, counts[chosen], chunks)
                continue
            each_chunk = [np.broadcast_to(each, (*each.shape[:2], *closed.shape))[:, :, chosen] for each in pieces]
            ends[:, chosen] = stage_ends(self, Passes(*each_chunk), counts[chosen])
        return ends

    def _with_equal_chunks(self, passes: Passes, chunks: int) -> Passes:
        """Passes by chunk where all chunks of a stage take the same time."""
        number = chunks * self.copies
        return Passes(*(np.repeat(np.asarray(each)[:, None] / chunks, number, axis=1) for each in passes))


def _equal(seconds: Array) -> npt.NDArray[np.bool_]:
    """Whether all pieces take the same time but for rounding: (stages, chunks, …) to (…)."""
    return np.asarray(np.ptp(seconds, axis=(0, 1)) <= _ROUNDING * np.abs(seconds).max(axis=(0, 1)))


#: Relative difference of times that are taken for equal.
_ROUNDING = 1e-13


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
def _passes_behind(schedule: Schedule, stage: int, stages: int, chunk: int, chunks: int) -> tuple[int, int]:
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
