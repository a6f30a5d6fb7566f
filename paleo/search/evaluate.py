"""All configurations of a search as arrays: gathering of priced points, and the arithmetic of `paleo.assemble`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from paleo.assemble import (
    Columns,
    States,
    TurnTimes,
    alive,
    memory,
    over,
    pipeline_end,
    recomputed,
    states,
    turns_held,
    update_kernel,
    walk,
    workspace,
)
from paleo.optimizers import optimizer
from paleo.parallel.mesh import Axes
from paleo.predict import Setting, gradient_operation, schedule_name
from paleo.schedules.base import SCHEDULES, Passes
from paleo.search.points import Points
from paleo.search.space import Layout, Space, divisors, microbatches
from paleo.stages import Chunk, cut
from paleo.timeline import Buckets, Turn, turns

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Results:
    """One entry for each configuration: positions of its layout and of its choices, seconds of a step, bytes of the fullest stage."""

    layout: Index
    microbatch: Index
    recompute: Index
    schedule: Index
    chunks: Index
    zero: Index
    overlapped: npt.NDArray[np.bool_]
    step_time: Array
    memory: Array

    def __len__(self) -> int:
        return len(self.step_time)

    @classmethod
    def joined(cls, parts: Sequence[Results]) -> Results:
        """Several results one after another."""
        return cls(*(np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(cls)))


@dataclass(frozen=True, slots=True)
class _Group:
    """Layouts of one number of stages, and their pairs with microbatches: positions of layouts and points, one entry a pair."""

    stages: int
    layouts: tuple[int, ...]
    member: Index
    point: Index
    microbatch: Array
    count: Array


def evaluate(points: Points, layouts: Sequence[Layout], space: Space, made: Setting) -> Results:
    """Every configuration of the space over the layouts."""
    search = _Search(points, layouts, space, made)
    parts: list[Results] = []
    for group in _groups(points, layouts, space):
        parts += search.single(group) if group.stages == 1 else search.pipelined(group)
    empty = np.zeros(0, dtype=np.intp)
    none = Results(empty, empty, empty, empty, empty, empty, np.zeros(0, dtype=bool), np.zeros(0), np.zeros(0))
    return Results.joined(parts or [none])


def _groups(points: Points, layouts: Sequence[Layout], space: Space) -> Iterator[_Group]:
    for stages in sorted({layout.mesh.degree("pp") for layout in layouts}):
        members = tuple(i for i, layout in enumerate(layouts) if layout.mesh.degree("pp") == stages)
        rows = [
            (place, point, size, layouts[index].local_batch // size)
            for place, index in enumerate(members)
            for size in microbatches(layouts[index].local_batch, space)
            if (point := points.point(layouts[index], size)) is not None
        ]
        if rows:
            table = np.array(rows, dtype=np.int64)
            sizes, counts = table[:, 2].astype(np.float64), table[:, 3].astype(np.float64)
            yield _Group(stages, members, table[:, 0].astype(np.intp), table[:, 1].astype(np.intp), sizes, counts)


class _Search:
    def __init__(self, points: Points, layouts: Sequence[Layout], space: Space, made: Setting) -> None:
        self.points, self.layouts, self.space, self.made = points, layouts, space, made
        self.training = not made.run.forward_only
        self.optimizer = optimizer(made.run.optimizer)
        self.sections = points.programs[0].sections

    # what every group needs

    def _times(self, group: _Group, recompute: str) -> TurnTimes:
        table = Columns(
            **{
                field.name: getattr(self.points.columns, field.name)
                if field.name == "repeat"
                else getattr(self.points.columns, field.name)[:, group.point]
                for field in fields(Columns)
            }
        )
        return recomputed(table, recompute if self.training else "none")

    def _degree(self, group: _Group, axis: str) -> Index:
        return np.array([self.layouts[i].mesh.degree(axis) for i in group.layouts], dtype=np.intp)

    def _ranks(self, group: _Group) -> Array:
        return np.array([float(self.layouts[i].mesh.replicas) for i in group.layouts])

    def _program(self, layout: Layout, group: _Group, place: int) -> int:
        """The block of a layout's points."""
        return int(self.points.block_of[group.point[np.flatnonzero(group.member == place)[0]]])

    def _collective(self, operation: str, layouts: Sequence[Layout], axes: Sequence[Axes], sizes: Array) -> Array:
        """Seconds of one collective for each layout (last axis) and size (axes before it)."""
        stride = np.array([layout.mesh.stride(one) for layout, one in zip(layouts, axes, strict=True)])
        ranks = np.array([layout.mesh.ways(one) for layout, one in zip(layouts, axes, strict=True)])
        places = (np.broadcast_to(one, sizes.shape).ravel() for one in (stride, ranks))
        return self.made.fabric.times(operation, *places, sizes.ravel()).reshape(sizes.shape)

    def _parameters(self, group: _Group, held: Array) -> Array:
        """Parameter elements of (stages, layouts)."""
        first = np.array([np.flatnonzero(group.member == place)[0] for place in range(len(group.layouts))])
        return over(held, self.points.columns.parameters[:, group.point[first]])

    def _after(self, group: _Group, held: Array, sharded: bool, *, exchange: bool) -> Array:
        """Seconds of (stages, layouts) after the last backward pass: gradients where ``exchange`` asks for them, update, gathering."""
        chosen = [self.layouts[i] for i in group.layouts]
        parameters, formats = self._parameters(group, held), self.made.formats
        total = self._update(parameters / (self._ranks(group) if sharded else 1.0))
        if sharded and self.training:
            axes = [tuple(a for a in ("ep", "dp") if layout.mesh.degree(a) > 1) for layout in chosen]
            total = total + self._collective("all_gather", chosen, axes, parameters * formats.parameter)
        if exchange:
            total = total + self._exchange(group, held, sharded)
        return total

    def _exchange(self, group: _Group, held: Array, sharded: bool) -> Array:
        """Seconds in which each stage of each layout sums its gradients."""
        found = np.zeros((len(held), len(group.layouts)))
        cells: list[tuple[int, Axes, Array]] = []
        for place, index in enumerate(group.layouts):
            layout = self.layouts[index]
            elements: dict[Axes, Array] = {}
            for number, section in enumerate(self.points.programs[self._program(layout, group, place)].sections):
                for one in section.gradients:
                    axes = self._used(layout, one.axes)
                    elements[axes] = elements.get(axes, 0.0) + held[:, number] * one.elements
            cells += [(place, axes, size) for axes, size in elements.items() if axes]
        if cells:
            sizes = np.stack([size for _, _, size in cells], axis=1) * self.made.formats.gradient
            chosen = [self.layouts[group.layouts[place]] for place, _, _ in cells]
            seconds = self._collective(gradient_operation(int(sharded)), chosen, [axes for _, axes, _ in cells], sizes)
            np.add.at(found.T, [place for place, _, _ in cells], seconds.T)
        return found

    def _used(self, layout: Layout, axes: Axes) -> Axes:
        return tuple(axis for axis in axes if layout.mesh.degree(axis) > 1)

    def _update(self, counts: Array) -> Array:
        if not self.training:
            return np.zeros_like(counts)
        unique, place = np.unique(counts, return_inverse=True)
        kernels = [update_kernel(count, self.optimizer, self.made.formats) for count in unique.tolist()]
        seconds = np.where(unique > 0, self.made.prices.times(kernels).total, 0.0)
        return seconds[place].reshape(counts.shape)

    def _memory(self, group: _Group, held: Array, times: TurnTimes, living: Array, zero: int, pairs: Index) -> Array:
        """Bytes of the fullest stage, for the pairs chosen."""
        member, ranks = group.member[pairs], self._ranks(group)
        largest = self.points.columns.parameters[:, group.point].max(axis=0)[pairs]
        whole = states(
            self._parameters(group, held), 0.0, ranks, zero, self.optimizer, self.made.formats, training=self.training
        )
        bucket = np.where(ranks > 1, self.made.run.bucket, 0.0)[member] if self.training else 0.0
        outputs = self.points.columns.largest_output_bytes[:, group.point[pairs]]
        work = workspace(outputs, times.transient[pairs], bucket)
        gathered = 2.0 * largest * self.made.formats.parameter if zero == 3 else 0.0
        each = States(whole.parameters[:, member], whole.gradients[:, member], whole.optimizer[:, member], gathered)
        activations = over(held, times.kept[:, pairs]) * living * self.training
        return np.asarray(memory(each, activations, work).max(axis=0))

    def _results(
        self, group: _Group, pairs: Index, recompute: str, schedule: str, chunks: int, zero: int, overlapped: bool, step: Array, size: Array
    ) -> Results:
        from paleo.assemble import RECOMPUTE

        def all_(value: int) -> Index:
            return np.full(len(pairs), value, dtype=np.intp)

        return Results(
            np.array(group.layouts, dtype=np.intp)[group.member[pairs]],
            group.microbatch[pairs].astype(np.intp),
            all_(RECOMPUTE.index(recompute)),
            all_(list(SCHEDULES).index(schedule)),
            all_(chunks),
            all_(zero),
            np.full(len(pairs), overlapped),
            step,
            size,
        )

    # pipelines

    def pipelined(self, group: _Group) -> Iterator[Results]:
        """Configurations of two stages or more."""
        for recompute in self.space.recompute:
            times = self._times(group, recompute)
            weight = times.turn * self.points.columns.repeat[:, None]
            heaviest = weight.argmax(axis=0)
            for chunks in self._chunks(group.stages):
                for pieces, pairs in self._cuts(times, heaviest, group.stages * chunks):
                    yield from self._staged(group, recompute, times, chunks, pieces, pairs)

    def _chunks(self, stages: int) -> tuple[int, ...]:
        repeats = {section.repeat for section in self.sections if section.repeat > 1}
        known = {chunks for repeat in repeats if repeat % stages == 0 for chunks in divisors(repeat // stages)} | {1}
        return tuple(sorted(known if self.space.chunks is None else known & set(self.space.chunks)))

    def _cuts(self, times: TurnTimes, heaviest: Index, pieces: int) -> Iterator[tuple[list[Chunk], Index]]:
        """Ways to cut the network, each with the pairs that it serves: whole blocks dealt out evenly, or balanced where none repeats."""
        program, turn = self.points.programs[0], times.turn
        folded = any(section.repeat > 1 for section in self.sections)
        for block in np.unique(heaviest).tolist():
            pairs = np.flatnonzero(heaviest == block)
            if self.sections[block].repeat % pieces == 0:
                yield cut(program, turn[:, pairs[0]].tolist(), pieces), pairs
            elif not folded and pieces <= len(self.sections):
                known: dict[tuple[Chunk, ...], list[int]] = {}
                for pair in pairs.tolist():
                    known.setdefault(tuple(cut(program, turn[:, pair].tolist(), pieces)), []).append(pair)
                yield from ((list(chunks), np.array(found, dtype=np.intp)) for chunks, found in known.items())

    def _staged(
        self, group: _Group, recompute: str, times: TurnTimes, chunks: int, pieces: list[Chunk], pairs: Index
    ) -> Iterator[Results]:
        held = turns_held(len(self.sections), pieces, group.stages)
        names = [name for name in self.space.schedules if SCHEDULES[name].chunked == (chunks > 1)]
        rounds = [pairs if not SCHEDULES[name].multiple else pairs[group.count[pairs] % group.stages == 0] for name in names]
        tails = {sharded: self._after(group, held, sharded, exchange=True) for sharded in (False, True)}
        sends = self._sends(group, pieces, pairs)
        passes = Passes(
            over(held, times.forwards[:, pairs]) + sends,
            over(held, times.backwards[:, pairs]) + sends,
            over(held, times.weights[:, pairs]),
        )
        for name, chosen in zip(names, rounds, strict=True):
            inside = np.flatnonzero(np.isin(pairs, chosen))
            here = Passes(*(one[:, inside] for one in passes))
            living = alive(name, group.stages, group.count[chosen], chunks)
            ends = {
                sharded: pipeline_end(name, here, group.count[chosen], chunks, tails[sharded][:, group.member[chosen]])
                for sharded in (False, True)
            }
            for zero in self.space.zero:
                if zero < 3 and len(chosen):
                    size = self._memory(group, held, times, living, zero, chosen)
                    step = ends[zero > 0]
                    yield self._results(group, chosen, recompute, name, chunks, zero, self.made.overlapped, step, size)

    def _sends(self, group: _Group, pieces: list[Chunk], pairs: Index) -> Array:
        """Seconds in which each stage hands on the outputs of its chunks, one microbatch and way: (stages, pairs)."""
        chosen = [self.layouts[group.layouts[place]] for place in group.member[pairs].tolist()]
        split = np.array([1.0 if one.sequence_parallel else float(one.mesh.degree("tp")) for one in chosen])
        found = np.zeros((group.stages, len(pairs)))
        ends = np.zeros((group.stages, len(self.sections)))
        for index, chunk in enumerate(pieces):
            ends[index % group.stages, chunk[-1][0]] += 1.0
        for section in np.flatnonzero(ends.any(axis=0)).tolist():
            sizes = self.points.output_bytes[section, group.point[pairs]] / split
            found += ends[:, section, None] * self._collective("send_recv", chosen, [("pp",)] * len(chosen), sizes)
        return found

    # one stage

    def single(self, group: _Group) -> Iterator[Results]:
        """Configurations without a pipeline."""
        held = np.array([[float(section.repeat) for section in self.sections]])
        every = np.arange(len(group.point))
        after = {sharded: self._after(group, held, sharded, exchange=False)[0][group.member] for sharded in (False, True)}
        all_times = {recompute: self._times(group, recompute) for recompute in self.space.recompute}
        modes = (self.made.overlapped,) if self.space.overlapped is None and self._fixed else (False, True)
        for overlapped in modes if self.space.overlapped is None else (self.space.overlapped,):
            ends = self._ends(group, all_times, overlapped)
            for recompute, times in all_times.items():
                for zero in self.space.zero:
                    kind = 3 if zero == 3 else min(zero, 1)
                    step = ends[recompute, kind] + after[zero > 0 if zero < 3 else True] * 1.0
                    size = self._memory(group, held, times, np.ones((1, 1)), zero, every)
                    yield self._results(group, every, recompute, "1f1b", 1, zero, overlapped, step, size)

    @property
    def _fixed(self) -> bool:
        return self.made.run.exchange is not None
