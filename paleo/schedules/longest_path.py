"""When the stages of a pipeline end, for many configurations at once: the longest way through the passes of an order.

The order of each stage is fixed, so a pass starts when the one before it on its stage and the one that feeds it have
ended. Passes that are as many steps from the start are computed together, over all configurations. The result equals
that of `paleo.schedules.pipeline.pipeline_time` without sends, which draws a timeline of one configuration.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError

if TYPE_CHECKING:
    from paleo.schedules.base import Passes, Place, Schedule

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
_KINDS = {"F": 0, "B": 1, "W": 2}


class _Wave(NamedTuple):
    """Passes that can run together, one a stage: which stages, rows of their seconds, and positions of the passes that
    feed them (the last position stands for none)."""

    stages: Index
    seconds: Index
    sources: Index


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
    """Microbatches that fill a pipeline; each round behind them is taken to add what the last one of them adds."""
    return stages * (4 if chunks == 1 else 4 + chunks)


def unrolled(stages: int, chunks: int, microbatches: int) -> bool:
    """Whether all microbatches are run one by one, rather than a window of them and the last round many times."""
    return microbatches <= window(stages, chunks) + stages or stages * chunks * microbatches <= UNROLLED


def _repeated(schedule: Schedule, seconds: Array, microbatches: int) -> Array:
    """Ends of the stages: of all microbatches, or of a window of them and as many more as there are left."""
    stages, chunks = seconds.shape[1], seconds.shape[2] // schedule.copies
    if unrolled(stages, chunks, microbatches):
        return _ends(schedule, seconds, microbatches)
    most = window(stages, chunks) + microbatches % stages
    first, second = (_ends(schedule, seconds, count) for count in (most - stages, most))
    return np.asarray(second + (second - first) * ((microbatches - most) // stages))


def _ends(schedule: Schedule, seconds: Array, microbatches: int) -> Array:
    _, stages, chunks, cases = seconds.shape
    waves, passes = _waves(schedule, stages, microbatches, chunks // schedule.copies)
    free = np.zeros((stages, cases))
    for first in range(0, cases, _BLOCK):
        rows = np.ascontiguousarray(seconds.reshape(-1, cases)[:, first : first + _BLOCK])
        free[:, first : first + _BLOCK] = _run(waves, passes, rows, stages)
    return free


def _run(waves: tuple[_Wave, ...], passes: int, rows: Array, stages: int) -> Array:
    """When each stage is free in the end: (stages, cases)."""
    done, free = np.zeros((passes + 1, rows.shape[1])), np.zeros((stages, rows.shape[1]))
    position = 0
    for wave in waves:
        ended = np.maximum(free[wave.stages], done[wave.sources])
        ended += rows[wave.seconds]
        free[wave.stages] = ended
        done[position : position + len(ended)] = ended
        position += len(ended)
    return free


#: Configurations that are computed together: what they need stays in the cache of a processor.
_BLOCK = 128


@lru_cache(maxsize=512)
def _waves(schedule: Schedule, stages: int, microbatches: int, chunks: int) -> tuple[tuple[_Wave, ...], int]:
    """The passes of a schedule by how many others must come before them, and how many there are."""
    width = chunks * schedule.copies
    feeds = _feeds(schedule, stages, chunks)
    rows, codes, sources = [], [], []
    for stage in range(stages):
        order = schedule.order(stage, stages, microbatches, chunks)
        numbers = np.array([(_KINDS[kind], microbatch, chunk) for kind, microbatch, chunk in order], dtype=np.intp)
        kinds, microbatch_of, chunk_of = numbers.reshape(-1, 3).T
        row = (kinds * stages + stage) * width + chunk_of
        rows.append(row)
        codes.append(row * microbatches + microbatch_of)
        sources.append(np.where(feeds[row] < 0, -1, feeds[row] * microbatches + microbatch_of))
    passes = sum(map(len, rows))
    try:
        wave_of = _wave_numbers([each.tolist() for each in codes], [each.tolist() for each in sources])
    except ValueError as error:
        raise PlanError(f"schedule {schedule.name!r}: {error} passes wait for one another") from None
    order_of = np.argsort(np.concatenate(wave_of), kind="stable")
    waves = np.concatenate(wave_of)[order_of]
    position = np.full(3 * stages * width * microbatches + 1, passes, dtype=np.intp)
    position[np.concatenate(codes)[order_of]] = np.arange(passes)
    each_stage = np.repeat(np.arange(stages), [len(row) for row in rows])[order_of]
    columns = each_stage, np.concatenate(rows)[order_of], position[np.concatenate(sources)[order_of]]
    ends = np.flatnonzero(np.diff(waves)) + 1
    return tuple(_Wave(*parts) for parts in zip(*(np.split(column, ends) for column in columns), strict=True)), passes


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


def _wave_numbers(codes: list[list[int]], sources: list[list[int]]) -> list[list[int]]:
    """In which wave each pass of each stage runs; ValueError with how many never do. A pass, one of ``codes``, waits
    for the one before it and for its source (-1: none)."""
    done: set[int] = set()
    reached, waves = [0] * len(codes), [list[int]() for _ in codes]
    active, wave = [stage for stage, order in enumerate(codes) if order], 0
    while active:
        ready = []
        for stage in active:
            source = sources[stage][reached[stage]]
            if source < 0 or source in done:
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
