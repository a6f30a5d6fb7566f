"""Pipeline schedules: the order of forward and backward passes of microbatches on each stage.

The order is all that a schedule needs. Step time (`paleo.schedules.stage_ends`), live activations and the passes after
a chunk's last gradient are derived from the order, unless the schedule has closed forms for them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError, SpecError
from paleo.registry import Registry

Array = npt.NDArray[np.float64]
#: A number or an array of numbers; closed forms broadcast.
Numeric = float | Array


def distinct_values(numbers: npt.NDArray[np.integer[Any]]) -> list[int]:
    """Return the distinct values of an array in ascending order.

    ``numpy.unique`` is avoided because it loads ``numpy.ma``, which would delay a single estimate.

    Parameters
    ----------
    numbers : ndarray of int
        Values, in any shape.

    Returns
    -------
    list of int
        Distinct values.

    Examples
    --------
    >>> distinct_values(np.array([[3, 1], [1, 2]]))
    [1, 2, 3]
    """
    return sorted(set(numbers.ravel().tolist()))


#: F: forward. B: backward; of inputs only, if the schedule lists weight passes separately. W: backward of weights.
PassKind = Literal["F", "B", "W"]


class SchedulePass(NamedTuple):
    """One pass (forward, backward or weight gradient) of one microbatch through one model chunk of a stage."""

    kind: PassKind
    microbatch: int
    chunk: int = 0


PassOrderFunction = Callable[[int, int, int, int], list[SchedulePass]]
#: How many passes of a stage's order run as one, for each group in order: (stage, stages, microbatches, chunks).
PassGroupSizesFunction = Callable[[int, int, int, int], list[int]]
#: Location of a piece of the network: (stage, chunk of that stage).
ChunkLocation = tuple[int, int]
#: (stages, chunks) -> for each replica the places of its pieces, from input to output.
ChunkPlacementFunction = Callable[[int, int], tuple[tuple[ChunkLocation, ...], ...]]


def _round_robin_chunk_paths(stages: int, chunks: int) -> tuple[tuple[ChunkLocation, ...], ...]:
    """Assign model chunks to pipeline stages round robin, as interleaved 1F1B does.

    Parameters
    ----------
    stages : int
        Stages of the pipeline.
    chunks : int
        Chunks of layers of each stage.

    Returns
    -------
    tuple of tuple of (int, int)
        Stage and chunk of each pipeline piece from input to output, for the only replica of the network.

    Examples
    --------
    >>> _round_robin_chunk_paths(2, 2)
    (((0, 0), (1, 0), (0, 1), (1, 1)),)
    """
    return (tuple((stage, chunk) for chunk in range(chunks) for stage in range(stages)),)


class PassTimes(NamedTuple):
    """Times of the forward, backward and weight-gradient passes of one microbatch on each stage [s].

    Each array has the shape (stages, ...) and adds up all chunks of a stage.
    """

    forward: Array
    backward: Array
    weight_gradients: Array


#: Time from the start of the first pass to the end of the last one [s]: (passes, microbatches, chunks).
MakespanFunction = Callable[[PassTimes, Numeric, int], Array]
#: Largest number of chunk activations alive at once on a stage: (stage, stages, microbatches, chunks).
PeakActivationsFunction = Callable[[Numeric, int, Numeric, int], Numeric]
#: Activations of one piece when most are alive on a stage: (stage, stages, microbatches, piece, chunks).
ChunkActivationsFunction = Callable[[Numeric, int, Numeric, int, int], Numeric]


#: Passes that a stage still runs after the last gradient of one of its chunks: (stage, stages, chunk, chunks) ->
#: (backward passes of inputs, of weights).
PassesAfterGradientFunction = Callable[[Numeric, int, int, int], tuple[Numeric, Numeric]]
#: End of the last pass of each stage [s]: (span, passes, microbatches, chunks).
StageEndsFunction = Callable[[Array, PassTimes, Numeric, int], Array]


def no_passes_after_gradient(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """Return (0, 0): with one model chunk per stage, no passes follow the last gradient of the chunk.

    Parameters
    ----------
    stage, stages, chunk, chunks
        Arguments of a `PassesAfterGradientFunction`, unused.

    Returns
    -------
    tuple of float
        Remaining backward passes of inputs and of weights, both 0.
    """
    return 0.0, 0.0


def _drained(span: Array, passes: PassTimes, microbatches: Numeric, chunks: int) -> Array:
    """Return the time at which each stage ends, if the last backward pass moves from the last stage up to the first.

    Parameters
    ----------
    span : ndarray
        Time of all passes [s].
    passes : PassTimes
        Times of one microbatch, shape (stages, ...) [s].
    microbatches : float or ndarray
        Microbatches of a step; unused.
    chunks : int
        Chunks of each stage.

    Returns
    -------
    ndarray
        End of each stage, shape (stages, ...) [s].
    """
    back = passes.backward + passes.weight_gradients
    return np.asarray(span - (cumulative_sum(back) - back) / chunks)


def simultaneous_stage_ends(span: Array, passes: PassTimes, microbatches: Numeric, chunks: int) -> Array:
    """Return the time at which each stage ends for schedules whose stages all work until the end of the pipeline.

    Parameters
    ----------
    span : ndarray
        Time of all passes [s].
    passes : PassTimes
        Times of one microbatch, shape (stages, ...) [s].
    microbatches, chunks
        Unused.

    Returns
    -------
    ndarray
        End of each stage, shape (stages, ...) [s].
    """
    return np.asarray(span + 0.0 * passes.forward)


def cumulative_sum(values: Array) -> Array:
    """Return the cumulative sum over the first axis, like `np.cumsum`.

    Parameters
    ----------
    values : ndarray
        Values, shape (stages, ...).

    Returns
    -------
    ndarray
        Shape (stages, ...).

    Notes
    -----
    Rows are added one by one, which is ten times as fast as `np.cumsum` where rows are long.
    """
    return _running(np.add, values)


def cumulative_max(values: Array) -> Array:
    """Return the cumulative maximum over the first axis.

    Parameters
    ----------
    values : ndarray
        Shape (stages, ...).

    Returns
    -------
    ndarray
        Shape (stages, ...).
    """
    return _running(np.maximum, values)


def _running(function: np.ufunc, values: Array) -> Array:
    rows = np.array(values, dtype=np.float64)
    for place in range(1, len(rows)):
        function(rows[place - 1], rows[place], out=rows[place, ...])
    return rows


@dataclass(frozen=True, slots=True)
class ClosedForms:
    """Closed-form formulas of a pipeline schedule that replace the simulation of its passes; all broadcast over arrays.

    Attributes
    ----------
    makespan : callable, optional
        Time from the first pass to the last [s]. None: the order of passes is simulated.
    peak_activations : callable, optional
        Largest number of activations alive at once on a stage. None: they are counted from the order.
    stage_ends : callable
        End of each stage's last pass [s], from the makespan.
    passes_after_last_gradient : callable, optional
        Passes that a stage still runs after the last gradient of one of its chunks. None: counted from the order.
    exact_for_stages : {'any', 'equal'}
        Condition under which ``makespan`` equals the simulated time: any stages, or only pieces of the network that all
        take equal times. Otherwise ``makespan`` is an approximation.
    min_microbatches_per_stage : float
        Fewest microbatches per stage for which ``makespan`` is valid.
    chunk_activations : callable, optional
        Activations among ``peak_activations`` that belong to one model chunk.
    """

    makespan: MakespanFunction | None = None
    peak_activations: PeakActivationsFunction | None = None
    stage_ends: StageEndsFunction = _drained
    passes_after_last_gradient: PassesAfterGradientFunction | None = None
    exact_for_stages: Literal["any", "equal"] = "equal"
    min_microbatches_per_stage: float = 0.0
    chunk_activations: ChunkActivationsFunction | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """Pipeline schedule: an order of passes for each stage, and what it requires of stages and microbatches.

    Attributes
    ----------
    name : str
        Name under which it is registered.
    reference : str
        Paper or source code that describes it.
    pass_order : callable
        (stage, stages, microbatches, chunks) -> the passes of a stage, a list of `SchedulePass`.
    closed_forms : ClosedForms
        Formulas that replace the evaluation of the order.
    chunks_per_stage : int, optional
        Model chunks of each replica on a stage; a bidirectional schedule (Chimera, DualPipe) holds a replica for each
        direction. None: as many as the strategy says.
    splits_backward : bool
        True if weight gradients (W) are separate passes.
    needs_microbatch_multiple : bool
        True if the number of microbatches must be a multiple of the stages.
    min_microbatches_per_stage : int
        Smallest ratio of microbatches to stages. Replicas process equally many microbatches.
    needs_even_stages : bool
        True if the number of stages must be even.
    chunk_paths : callable
        (stages, chunks) -> for each replica, the stage and chunk of its pieces in the order of the forward pass.
    pass_group_sizes : callable, optional
        Sizes of the groups of passes that run as one: a forward pass and the next backward pass (with its weight
        gradients), or a backward pass and its weight gradients. None: every pass runs separately.
    """

    name: str
    reference: str
    pass_order: PassOrderFunction
    closed_forms: ClosedForms = ClosedForms()
    chunks_per_stage: int | None = 1
    splits_backward: bool = False
    needs_microbatch_multiple: bool = False
    min_microbatches_per_stage: int = 0
    needs_even_stages: bool = False
    chunk_paths: ChunkPlacementFunction = _round_robin_chunk_paths
    pass_group_sizes: PassGroupSizesFunction | None = None

    @property
    def replicas(self) -> int:
        """Replicas of the network in one pipeline: 2 for bidirectional schedules (Chimera, DualPipe), else 1."""
        return len(self.chunk_paths(2, 1))

    def stage_chunks(self, stages: int, chunks: int) -> tuple[tuple[int, ...], ...]:
        """List the model chunks (numbered in forward order) that each stage holds.

        Parameters
        ----------
        stages : int
            Stages of the pipeline.
        chunks : int
            Model chunks of each replica on a stage.

        Returns
        -------
        tuple of tuple of int
            Indices of the chunks of each stage.

        Examples
        --------
        >>> SCHEDULES["interleaved"].stage_chunks(2, 2)
        ((0, 2), (1, 3))
        """
        piece_of: list[dict[int, int]] = [{} for _ in range(stages)]
        for path in self.chunk_paths(stages, chunks):
            for piece, (stage, chunk) in enumerate(path):
                piece_of[stage][chunk] = piece
        return tuple(tuple(pieces[chunk] for chunk in range(len(pieces))) for pieces in piece_of)

    def chunk_stages(self, stages: int, chunks: int) -> tuple[int, ...]:
        """Return the stage of each model chunk, in forward order; for several replicas, the lowest of their stages.

        Parameters
        ----------
        stages : int
            Stages of the pipeline.
        chunks : int
            Model chunks of each replica on a stage.

        Returns
        -------
        tuple of int
            Index of a stage for each chunk. For a chunk without a stage, which `check_schedule` refuses, an arbitrary
            one.

        Examples
        --------
        >>> SCHEDULES["interleaved"].chunk_stages(2, 2)
        (0, 1, 0, 1)
        >>> SCHEDULES["zb-v"].chunk_stages(2, 2)
        (0, 1, 1, 0)
        """
        places = list(enumerate(self.stage_chunks(stages, chunks)))
        stage_of = {piece: stage for stage, pieces in reversed(places) for piece in pieces}
        return tuple(stage_of.get(piece, piece % stages) for piece in range(stages * chunks))

    def sends_output(self, stages: int, chunks: int) -> tuple[tuple[bool, ...], ...]:
        """Return, for each model chunk of each stage, True if its output goes to another stage.

        The last chunk of the network counts as True, too.

        Parameters
        ----------
        stages : int
            Stages of the pipeline.
        chunks : int
            Model chunks of each replica on a stage.

        Returns
        -------
        tuple of tuple of bool
            One entry for each chunk of each stage.
        """
        sent = [[True] * (chunks * self.replicas) for _ in range(stages)]
        for path in self.chunk_paths(stages, chunks):
            for (stage, chunk), (other, _) in itertools.pairwise(path):
                sent[stage][chunk] = stage != other
        return tuple(map(tuple, sent))

    def allows_chunks(self, chunks: int) -> bool:
        """Return True if the schedule supports a number of model chunks per stage and replica.

        Parameters
        ----------
        chunks : int
            Model chunks of each replica on a stage.

        Returns
        -------
        bool
            True if the number is allowed.
        """
        return chunks > 1 if self.chunks_per_stage is None else chunks == self.chunks_per_stage

    def allows_microbatches(self, stages: int, microbatches: Numeric) -> npt.NDArray[np.bool_]:
        """Return True for numbers of microbatches that the schedule can run.

        Parameters
        ----------
        stages : int
            Stages of the pipeline.
        microbatches : float or ndarray
            Microbatches of a step, any shape.

        Returns
        -------
        ndarray of bool
            Shape of ``microbatches``.
        """
        count = np.asarray(microbatches)
        divides = (count % stages == 0) | (not self.needs_microbatch_multiple)
        fits = (count >= self.min_microbatches_per_stage * stages) & divides & (count % self.replicas == 0)
        return np.asarray(fits & (stages % 2 == 0 or not self.needs_even_stages))

    def peak_activations(self, stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
        """Return the peak number of chunk activations (one microbatch, one chunk) alive on a stage.

        Parameters
        ----------
        stage : float or ndarray
            Index of the stage.
        stages : int
            Stages of the pipeline.
        microbatches : float or ndarray
            Microbatches of a step.
        chunks : int
            Model chunks of each replica on a stage.

        Returns
        -------
        float or ndarray
            Number of activations; arguments broadcast.
        """
        if self.closed_forms.peak_activations is not None:
            return self.closed_forms.peak_activations(stage, stages, microbatches, chunks)
        return np.asarray(self._counted_alive(stage, stages, microbatches, chunks).sum(axis=-1))

    def peak_activations_by_chunk(self, stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Array:
        """Return the live activations of each model chunk of a stage at the moment when most are alive on the stage.

        Parameters
        ----------
        stage : float or ndarray
            Index of the stage.
        stages : int
            Stages of the pipeline.
        microbatches : float or ndarray
            Microbatches of a step.
        chunks : int
            Model chunks of each replica on a stage.

        Returns
        -------
        ndarray
            Shape (model chunks of all replicas, ...).
        """
        of_piece, pieces = self.closed_forms.chunk_activations, range(chunks * self.replicas)
        if len(pieces) == 1:
            return np.asarray(self.peak_activations(stage, stages, microbatches, chunks), dtype=np.float64)[None]
        if of_piece is not None:
            counts = [of_piece(stage, stages, microbatches, piece, chunks) for piece in pieces]
            return np.stack(np.broadcast_arrays(*counts))
        return np.moveaxis(self._counted_alive(stage, stages, microbatches, chunks), -1, 0)

    def _counted_alive(self, stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Array:
        places, counts = np.broadcast_arrays(np.asarray(stage, dtype=int), np.asarray(microbatches, dtype=int))
        pairs = zip(places.ravel().tolist(), counts.ravel().tolist(), strict=True)
        most = [_in_flight(self, place, stages, count, chunks) for place, count in pairs]
        return np.array(most, dtype=np.float64).reshape(*places.shape, chunks * self.replicas)

    def passes_after_last_gradient(
        self, stage: Numeric, stages: int, chunk: int, chunks: int
    ) -> tuple[Numeric, Numeric]:
        """Count the passes that a stage still runs after the last gradient of one of its chunks.

        Parameters
        ----------
        stage : float or ndarray
            Index of the stage.
        stages : int
            Stages of the pipeline.
        chunk : int
            Chunk whose gradients are complete.
        chunks : int
            Model chunks of each replica on a stage.

        Returns
        -------
        inputs, weights : float or ndarray
            Backward passes of inputs and of weights.
        """
        if self.closed_forms.passes_after_last_gradient is not None:
            return self.closed_forms.passes_after_last_gradient(stage, stages, chunk, chunks)
        places = np.asarray(stage, dtype=int)
        counts = [_passes_remaining(self, place, stages, chunk, chunks) for place in places.ravel().tolist()]
        inputs, weights = np.array(counts, dtype=np.float64).T.reshape(2, *places.shape)
        return inputs, weights

    def pass_groups(self, stage: int, stages: int, microbatches: int, chunks: int) -> list[tuple[SchedulePass, ...]]:
        """Return the passes of a stage in order, as groups of passes that run as one.

        Parameters
        ----------
        stage : int
            Index of the stage.
        stages : int
            Stages of the pipeline.
        microbatches : int
            Microbatches of a step.
        chunks : int
            Model chunks of each replica on a stage.

        Returns
        -------
        list of tuple of SchedulePass
            Groups in the order in which they run.
        """
        order = self.pass_order(stage, stages, microbatches, chunks)
        if self.pass_group_sizes is None:
            return [(action,) for action in order]
        actions = iter(order)
        return [tuple(itertools.islice(actions, n)) for n in self.pass_group_sizes(stage, stages, microbatches, chunks)]

    @property
    def pairs_forward_with_backward(self) -> bool:
        """True if forward passes run as one with backward passes of other microbatches (DualPipe)."""
        return self.pass_group_sizes is not None

    def unpaired_passes(self, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
        """Count the forward passes of a stage that are not paired with a backward pass of another microbatch.

        Only paired passes can hide expert all-to-alls behind computation.

        Parameters
        ----------
        stages : int
            Stages of the pipeline.
        microbatches : float or ndarray
            Microbatches of a step.
        chunks : int
            Model chunks of each replica on a stage.

        Returns
        -------
        float or ndarray
            Number of forward passes, equal to the number of unpaired backward passes; mean over the stages.

        Notes
        -----
        Software may also pair passes in the steady state of a schedule without ``pairs_forward_with_backward``. Then
        the forward passes that fill the first stage run unpaired, including the one that produces the input of the
        first backward pass.
        """
        if self.pairs_forward_with_backward:
            return _unpaired_passes(self, stages, chunks)
        return self.peak_activations(0, stages, microbatches, chunks)

    def replayed_peak_activations(self, stage: int, stages: int, microbatches: int, chunks: int) -> tuple[int, ...]:
        """Count the live activations of each model chunk at a stage's first peak, by replaying the order of passes.

        Parameters
        ----------
        stage : int
            Index of the stage.
        stages : int
            Stages of the pipeline.
        microbatches : int
            Microbatches of a step.
        chunks : int
            Model chunks of each replica on a stage.

        Returns
        -------
        tuple of int
            Activations of each chunk. An activation is freed by pass B, or by pass W if weight gradients are separate.
        """
        ends: PassKind = "W" if self.splits_backward else "B"
        alive = [0] * (chunks * self.replicas)
        most = tuple(alive)
        for action in self.pass_order(stage, stages, microbatches, chunks):
            alive[action.chunk] += (action.kind == "F") - (action.kind == ends)
            most = tuple(alive) if sum(alive) > sum(most) else most
        return most


@lru_cache(maxsize=65536)
def _in_flight(schedule: Schedule, stage: int, stages: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """Return `Schedule.replayed_peak_activations`, extrapolated from fewer microbatches if there are many."""
    most = simulated_microbatch_count(stages, chunks) + microbatches % stages
    if microbatches <= most:
        return schedule.replayed_peak_activations(stage, stages, microbatches, chunks)
    counts = (most - stages, most)
    first, second = (schedule.replayed_peak_activations(stage, stages, count, chunks) for count in counts)
    rounds = (microbatches - most) // stages
    return tuple(after + (after - before) * rounds for before, after in zip(first, second, strict=True))


@lru_cache(maxsize=65536)
def _passes_remaining(schedule: Schedule, stage: int, stages: int, chunk: int, chunks: int) -> tuple[int, int]:
    """Count the passes (of inputs, of weights) that a stage runs after the last gradient of a chunk."""
    order = schedule.pass_order(stage, stages, simulated_microbatch_count(stages, chunks), chunks)
    last: PassKind = "W" if schedule.splits_backward else "B"
    end = max(k for k, action in enumerate(order) if action.kind == last and action.chunk == chunk)
    later = [action.kind for action in order[end + 1 :]]
    return later.count("B"), later.count(last)


@lru_cache(maxsize=4096)
def _unpaired_passes(schedule: Schedule, stages: int, chunks: int) -> float:
    """Count forward passes that are not paired, averaged over the stages; more microbatches only add pairs."""
    count = simulated_microbatch_count(stages, chunks)
    groups = [group for stage in range(stages) for group in schedule.pass_groups(stage, stages, count, chunks)]
    return sum(len(group) == 1 and group[0].kind == "F" for group in groups) / stages


#: Largest number of forward passes, over all chunks and stages, for which every microbatch is evaluated.
MAX_SIMULATED_PASSES = 2**14


def simulated_microbatch_count(stages: int, chunks: int) -> int:
    """Return the number of microbatches that are simulated pass by pass.

    Further microbatches repeat the steady state, so that their time is extrapolated.

    Parameters
    ----------
    stages : int
        Stages of the pipeline.
    chunks : int
        Model chunks of each replica on a stage.

    Returns
    -------
    int
        Number of microbatches.
    """
    return stages * (4 if chunks == 1 else 4 + chunks)


def simulates_every_microbatch(stages: int, chunks: int, microbatches: int) -> bool:
    """Return True if all microbatches are simulated pass by pass, False if later ones are extrapolated.

    Parameters
    ----------
    stages : int
        Stages of the pipeline.
    chunks : int
        Model chunks of each replica on a stage.
    microbatches : int
        Microbatches of a step.

    Returns
    -------
    bool
        True if every microbatch is simulated.
    """
    few = microbatches <= simulated_microbatch_count(stages, chunks) + stages
    return few or stages * chunks * microbatches <= MAX_SIMULATED_PASSES


SCHEDULES: Registry[Schedule] = Registry("pipeline schedule", "paleo.schedules")


def register_schedule(schedule: Schedule) -> Schedule:
    """Register a pipeline schedule under its name, after checking that its order contains every pass.

    Parameters
    ----------
    schedule : Schedule
        Order of passes, and what it requires of stages and microbatches.

    Returns
    -------
    Schedule
        Same schedule.

    Raises
    ------
    SpecError
        If the name is taken, or a pass is missing, repeated or on a wrong stage. Every microbatch needs one forward
        pass, one backward pass and, if those are separate, one weight pass through every chunk of its copy.
    """
    chunks = 2 if schedule.chunks_per_stage is None else schedule.chunks_per_stage
    for stages, rounds in ((2, 1), (3, 2), (4, 2)):
        microbatches = max(schedule.min_microbatches_per_stage, 1) * stages * rounds
        if schedule.allows_microbatches(stages, microbatches):
            _check_complete(schedule, stages, microbatches, chunks)
    return SCHEDULES.register(schedule.name)(schedule)


_WORDS: dict[PassKind, str] = {"F": "forward pass", "B": "backward pass", "W": "weight pass"}


def _check_complete(schedule: Schedule, stages: int, microbatches: int, chunks: int) -> None:
    """Raise SpecError if the order of a schedule lacks a pass, repeats a pass, or has a pass on a wrong stage."""
    kinds: tuple[PassKind, ...] = ("F", "B", "W") if schedule.splits_backward else ("F", "B")
    remaining = [Counter(schedule.pass_order(stage, stages, microbatches, chunks)) for stage in range(stages)]
    paths = schedule.chunk_paths(stages, chunks)
    for microbatch in range(microbatches):
        copies = [path for path in paths if remaining[path[0][0]][SchedulePass("F", microbatch, path[0][1])]]
        for (stage, chunk), kind in itertools.product(next(iter(copies), paths[0]), kinds):
            times = remaining[stage].pop(SchedulePass(kind, microbatch, chunk), 0)
            if times != 1:
                _refuse(schedule, stages, microbatches, stage, SchedulePass(kind, microbatch, chunk), times)
    for stage, passes in enumerate(remaining):
        for action, times in passes.items():
            if times:
                _refuse(schedule, stages, microbatches, stage, action, times)


def _refuse(schedule: Schedule, stages: int, microbatches: int, stage: int, action: SchedulePass, times: int) -> None:
    verb = {0: "has no", 1: "may not have a"}.get(times, f"has {times} times a")
    where = f"with {stages} stages and {microbatches} microbatches, stage {stage}"
    passed = f"{_WORDS[action.kind]} of microbatch {action.microbatch} through chunk {action.chunk}"
    raise SpecError(f"schedule {schedule.name!r}: {where} {verb} {passed}")


def check_schedule(name: str, stages: int, chunks: int, microbatches: int) -> None:
    """Raise PlanError if a pipeline schedule does not support the given stages, chunks and microbatches.

    Parameters
    ----------
    name : str
        Name of the schedule.
    stages : int
        Stages of the pipeline.
    chunks : int
        Model chunks of each replica on a stage.
    microbatches : int
        Microbatches of a step.

    Raises
    ------
    PlanError
        If one of the numbers is not supported.
    """
    chosen = SCHEDULES[name]
    if chosen.chunks_per_stage not in (None, chunks):
        count = "one chunk" if chosen.chunks_per_stage == 1 else f"{chosen.chunks_per_stage} chunks"
        other = "; use interleaved" if chosen.chunks_per_stage == 1 else ""
        raise PlanError(f"schedule {name!r} holds {count} a stage, not {chunks}{other}")
    if chosen.needs_even_stages and stages % 2:
        raise PlanError(f"schedule {name!r} needs an even number of stages, not {stages}")
    if chosen.needs_microbatch_multiple and microbatches % stages:
        raise PlanError(f"schedule {name!r}: {microbatches} microbatches are not a multiple of the {stages} stages")
    if microbatches % chosen.replicas:
        shared = f"are not shared evenly by its {chosen.replicas} copies"
        raise PlanError(f"schedule {name!r}: {microbatches} microbatches {shared}")
    if microbatches < chosen.min_microbatches_per_stage * stages:
        least = f"{chosen.min_microbatches_per_stage} for each of the {stages} stages"
        raise PlanError(f"schedule {name!r}: {microbatches} microbatches are too few; it needs {least}")
