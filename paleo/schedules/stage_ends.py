"""Time at which each pipeline stage ends its last pass, for many configurations at once.

A valid closed form of the schedule is used if there is one, otherwise the longest path through the passes.

The order of passes on each stage is fixed. So a pass starts when two others have ended. One is the previous pass on the
same stage. The other is the source, whose output the pass reads (of a neighbour, or the forward pass on the same
stage). Passes that run as one (`Schedule.pass_group_sizes`) start when the sources of all of them have ended. Passes
that depend on one of them wait for all of them.

A *wave* consists of passes with equally many passes before them on the longest path. The passes of a wave run on
different stages and are computed together over all configurations. The result equals that of
`paleo.schedules.pipeline_simulation.simulate_pipeline` without sends, which simulates one configuration.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError
from paleo.schedules.base import (
    ChunkLocation,
    Numeric,
    PassTimes,
    Schedule,
    distinct_values,
    simulated_microbatch_count,
    simulates_every_microbatch,
)

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
#: Relative difference below which times count as equal.
_ROUNDING = 1e-13


def pipeline_stage_end_times(
    schedule: Schedule, passes: PassTimes, microbatches: Numeric, chunks: int, pieces: PassTimes | None = None
) -> Array:
    """Return the time at which each pipeline stage ends its last pass, over many configurations.

    Parameters
    ----------
    schedule : Schedule
        Order of passes, with its closed forms.
    passes : PassTimes
        Times of one microbatch through all chunks of each stage, shape (stages, ...) [s].
    microbatches : float or ndarray
        Microbatches of a step; broadcasts with the further axes.
    chunks : int
        Model chunks of each replica on a stage.
    pieces : PassTimes, optional
        Times of each chunk of all replicas, shape (stages, chunks, ...) [s]. With these the result is exact for the
        order. Without them all chunks of a stage are assumed equal, and closed forms are approximate if stages differ.

    Returns
    -------
    ndarray
        End of each stage, shape (stages, ...) [s].

    Raises
    ------
    PlanError
        If passes of the order wait for one another in a cycle.
    """
    count = np.asarray(microbatches, dtype=np.float64)
    closed = _closed_form_holds(schedule, passes, count, pieces)
    if closed.all():
        return _closed_ends(schedule, passes, count, chunks)
    by_chunk = _with_equal_chunks(passes, chunks, chunks * schedule.replicas) if pieces is None else pieces
    if not closed.any():
        return _longest_path_ends(schedule, by_chunk, count)
    ends = np.empty((len(passes.forward), *closed.shape))
    counts = np.broadcast_to(count, closed.shape)
    ends[:, closed] = _closed_ends(schedule, _chosen(passes, closed, leading=1), counts[closed], chunks)
    ends[:, ~closed] = _longest_path_ends(schedule, _chosen(by_chunk, ~closed, leading=2), counts[~closed])
    return ends


def _closed_form_holds(schedule: Schedule, passes: PassTimes, count: Array, pieces: PassTimes | None) -> Mask:
    """Return True for configurations for which the schedule's closed form of the makespan is valid."""
    shape = np.broadcast_shapes(passes.forward.shape[1:], count.shape)
    if schedule.closed_forms.makespan is None:
        return np.zeros(shape, dtype=bool)
    enough = count >= schedule.closed_forms.min_microbatches_per_stage * len(passes.forward)
    if pieces is not None and schedule.closed_forms.exact_for_stages == "equal":
        enough = enough & np.logical_and.reduce([_equal(np.asarray(seconds)) for seconds in pieces])
    return np.broadcast_to(enough, shape)


def _equal(seconds: Array) -> Mask:
    """Return True for configurations whose chunks all take the same time, up to rounding.

    The input has the shape (stages, chunks, ...), the result the shape (...).
    """
    return np.asarray(np.ptp(seconds, axis=(0, 1)) <= _ROUNDING * np.abs(seconds).max(axis=(0, 1)))


def _closed_ends(schedule: Schedule, passes: PassTimes, count: Array, chunks: int) -> Array:
    forms = schedule.closed_forms
    assert forms.makespan is not None
    return forms.stage_ends(forms.makespan(passes, count, chunks), passes, count, chunks)


def _chosen(passes: PassTimes, mask: Mask, *, leading: int) -> PassTimes:
    """Select the pass times of the configurations for which a mask is True.

    ``leading`` is the number of axes (stages, chunks) before the axes of configurations.
    """
    wide = (np.broadcast_to(seconds, (*np.shape(seconds)[:leading], *mask.shape)) for seconds in passes)
    return PassTimes(*(seconds[..., mask] for seconds in wide))


def _with_equal_chunks(passes: PassTimes, chunks: int, pieces: int) -> PassTimes:
    """Divide the pass times of each stage equally among its chunks, to the shape (stages, chunks, …)."""
    return PassTimes(*(np.repeat(np.asarray(seconds)[:, None] / chunks, pieces, axis=1) for seconds in passes))


# the longest path

#: Index of each kind of pass in the rows of a stage's times: forward, backward of inputs, backward of weights.
_KINDS = {"F": 0, "B": 1, "W": 2}


class _Wave(NamedTuple):
    """Passes that are computed together, at most one per stage, since all of their predecessors are in earlier waves.

    ``duration_rows`` are the row indices of their times. ``previous`` and ``sources`` are the indices of the passes
    that must end before: the previous pass on the same stage, and the pass whose output is read. A pass that waits for
    nothing has the index after all passes, whose end is 0. ``fused_sources`` are the sources of passes that run as one
    with these; None if there are none.
    """

    duration_rows: Index
    previous: Index
    sources: Index
    fused_sources: Index | None = None


class _Waves(NamedTuple):
    """All waves of a schedule, with the number of passes and the index of the last pass of each stage."""

    waves: tuple[_Wave, ...]
    passes: int
    last: Index


def _longest_path_ends(schedule: Schedule, pieces: PassTimes, microbatches: npt.ArrayLike) -> Array:
    """Return the time at which each stage ends its last pass, shape (stages, …), by the longest path [s].

    ``pieces`` are times of one microbatch through each chunk of each stage, shape (stages, chunks of all copies, …);
    ``microbatches`` broadcasts with the further axes. Raises PlanError if passes wait for one another in a cycle.
    """
    seconds = np.stack(np.broadcast_arrays(*(np.asarray(kind, dtype=np.float64) for kind in pieces)))
    if not schedule.splits_backward:
        seconds = np.stack([seconds[0], seconds[1] + seconds[2], np.zeros_like(seconds[2])])
    shape = np.broadcast_shapes(seconds.shape[3:], np.shape(microbatches))
    seconds = np.broadcast_to(seconds, (*seconds.shape[:3], *shape)).reshape(*seconds.shape[:3], -1)
    counts = np.broadcast_to(np.asarray(microbatches), shape).ravel()
    ends = np.zeros((seconds.shape[1], counts.size))
    for count in distinct_values(counts):
        chosen = np.flatnonzero(counts == count)
        ends[:, chosen] = _ends_by_window(schedule, np.ascontiguousarray(seconds[..., chosen]), int(count))
    return ends.reshape(len(ends), *shape)


def _ends_by_window(schedule: Schedule, seconds: Array, microbatches: int) -> Array:
    """Return the time at which each stage ends [s]; many microbatches are extrapolated from a window."""
    stages, chunks = seconds.shape[1], seconds.shape[2] // schedule.replicas
    if simulates_every_microbatch(stages, chunks, microbatches):
        return _ends(schedule, seconds, microbatches)
    most = simulated_microbatch_count(stages, chunks) + microbatches % stages
    first, second = (_ends(schedule, seconds, count) for count in (most - stages, most))
    return np.asarray(second + (second - first) * ((microbatches - most) // stages))


def _ends(schedule: Schedule, seconds: Array, microbatches: int) -> Array:
    """Return the time at which each stage ends, with every microbatch evaluated, shape (stages, configurations) [s]."""
    _, stages, chunks, configurations = seconds.shape
    waves = _waves(schedule, stages, microbatches, chunks // schedule.replicas)
    ends = np.zeros((stages, configurations))
    for first in range(0, configurations, _BLOCK):
        rows = np.ascontiguousarray(seconds.reshape(-1, configurations)[:, first : first + _BLOCK])
        ends[:, first : first + _BLOCK] = _run(waves, rows)
    return ends


def _run(waves: _Waves, rows: Array) -> Array:
    """Evaluate the waves for all configurations; return the end of each stage's last pass [s].

    The result has the shape (stages, configurations); ``rows`` are the times of passes.
    """
    ends, position = np.zeros((waves.passes + 1, rows.shape[1])), 0
    for durations, previous, sources, fused_sources in waves.waves:
        wave_ends = ends[position : position + len(durations)]
        np.maximum(ends.take(previous, axis=0), ends.take(sources, axis=0), out=wave_ends)
        if fused_sources is not None:
            np.maximum(wave_ends, ends.take(fused_sources, axis=0), out=wave_ends)
        wave_ends += rows.take(durations, axis=0)
        position += len(durations)
    return ends[waves.last]


#: Configurations that are computed together, so that their arrays fit into the processor's cache.
_BLOCK = 256


@lru_cache(maxsize=512)
def _waves(schedule: Schedule, stages: int, microbatches: int, chunks: int) -> _Waves:
    """Group the passes of a schedule into waves, by the number of passes on the longest path to each."""
    rows, codes, sources = _dependencies(schedule, stages, microbatches, chunks)
    passes = sum(map(len, rows))
    try:
        wave_of = _wave_numbers(codes, sources)
    except ValueError as error:
        raise PlanError(f"schedule {schedule.name!r}: {error} passes wait for one another") from None
    by_wave = np.argsort(wave_of, kind="stable")
    width = chunks * schedule.replicas
    position = np.full(3 * stages * width * microbatches + 1, passes, dtype=np.intp)  # code -1: no pass
    position[np.concatenate(codes)[by_wave]] = np.arange(passes)
    previous = [np.append(-1, order[:-1]) if len(order) else order for order in codes]
    awaited = (position[np.concatenate(column)[by_wave]] for column in (previous, *sources))
    bounds = itertools.pairwise([0, *(np.flatnonzero(np.diff(wave_of[by_wave])) + 1).tolist(), passes])
    inside = [slice(first, end) for first, end in bounds if end]
    columns = ([column[wave] for wave in inside] for column in (np.concatenate(rows)[by_wave], *awaited))
    waves = tuple(
        _Wave(durations, before, source, *(each for each in fused if (each < passes).any()))
        for durations, before, source, *fused in zip(*columns, strict=True)
    )
    return _Waves(waves, passes, position[[order[-1] if len(order) else -1 for order in codes]])


def _dependencies(
    schedule: Schedule, stages: int, microbatches: int, chunks: int
) -> tuple[list[Index], list[Index], list[list[Index]]]:
    """Return the passes of each stage in order, as row indices of their times, codes, and codes of their sources.

    A code numbers a pass among all passes: row · microbatches + microbatch; source −1 means none. The sources are one
    list. For a schedule with passes that run as one there is a second list, with the sources of those other passes.
    """
    width, source_rows = chunks * schedule.replicas, _source_rows(schedule, stages, chunks)
    rows, codes, sources = [], [], []
    for stage in range(stages):
        order = schedule.pass_order(stage, stages, microbatches, chunks)
        kinds, *numbers = zip(*order, strict=True) if order else ((), (), ())
        microbatch_of, chunk_of = (np.array(column, dtype=np.intp) for column in numbers)
        row = (np.array([_KINDS[kind] for kind in kinds], dtype=np.intp) * stages + stage) * width + chunk_of
        rows.append(row)
        codes.append(row * microbatches + microbatch_of)
        sources.append(np.where(source_rows[row] < 0, -1, source_rows[row] * microbatches + microbatch_of))
    if schedule.pass_group_sizes is None:
        return rows, codes, [sources]
    sizes = [np.array(schedule.pass_group_sizes(stage, stages, microbatches, chunks)) for stage in range(stages)]
    # The sources of all passes if groups of ``sizes`` passes run as one.
    last_of_group = np.full(max(code.max() for code in codes) + 2, -1, dtype=np.intp)
    for code, size in zip(codes, sizes, strict=True):
        last_of_group[code] = np.repeat(code[np.cumsum(size) - 1], size)
    group_sources, fused_sources = [last_of_group[source] for source in sources], []
    for source, size in zip(group_sources, sizes, strict=True):
        of_second, first = np.full_like(source, -1), np.cumsum(size) - size
        of_second[first[size > 1]] = source[first[size > 1] + 1]
        fused_sources.append(of_second)
    return rows, codes, [group_sources, fused_sources]


def _source_rows(schedule: Schedule, stages: int, chunks: int) -> Index:
    """Return, for each kind of pass of each chunk, the row index of the pass whose output is read; −1 for none.

    The result has the shape (kinds · stages · chunks of all replicas,).
    """
    width = chunks * schedule.replicas
    steps = [step for path in schedule.chunk_paths(stages, chunks) for step in itertools.pairwise(path)]
    previous, following = {place: source for source, place in steps}, dict(steps)
    sources = np.full(3 * stages * width, -1, dtype=np.intp)
    for place in itertools.product(range(stages), range(width)):
        if place in previous:
            sources[_row("F", place, stages, width)] = _row("F", previous[place], stages, width)
        source = ("B", following[place]) if place in following else ("F", place)
        sources[_row("B", place, stages, width)] = _row(*source, stages, width)
    return sources


def _row(kind: str, place: ChunkLocation, stages: int, width: int) -> int:
    """Return the row index of a pass's time in the table of all kinds of passes, stages and chunks."""
    return (_KINDS[kind] * stages + place[0]) * width + place[1]


def _wave_numbers(codes: list[Index], sources: list[list[Index]]) -> Index:
    """Return the number of the wave in which each pass can be computed.

    Raises ValueError with the number of passes that wait for each other in a cycle.
    """
    never, last = max(int(order.max(initial=-1)) for order in codes) + 1, np.cumsum([len(order) + 1 for order in codes])
    # behind the passes of each stage comes one that never runs
    code, *awaited = (np.concatenate([np.append(each, never) for each in column]) for column in (codes, *sources))
    place_of = np.full(never + 2, len(code))
    place_of[code] = np.arange(len(code))
    first, *others = (place_of[column] for column in awaited)
    wave_of, reached = np.full(len(code) + 1, -1), np.append(0, last[:-1])
    wave_of[-1] = 0  # code -1: no pass
    for wave in itertools.count():
        ready = wave_of.take(first.take(reached)) >= 0
        for column in others:
            ready &= wave_of.take(column.take(reached)) >= 0
        places = reached[ready]
        if not len(places):
            break
        wave_of[places] = wave
        reached += ready
    if waiting := int((last - 1 - reached).sum()):
        raise ValueError(waiting)
    return np.delete(wave_of[:-1], last - 1)
