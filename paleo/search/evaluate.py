"""All configurations of a search as arrays: gathering of priced points, and the arithmetic of `paleo.assemble`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from paleo.assemble import (
    RECOMPUTE,
    Columns,
    States,
    TurnTimes,
    alive,
    memory,
    over,
    pipeline_end,
    recomputed,
    section_figures,
    states,
    turns_held,
    update_kernel,
    walk,
    workspace,
)
from paleo.lower import Program
from paleo.parallel.mesh import Axes
from paleo.predict import Setting, gradient_operation
from paleo.schedules.base import SCHEDULES, Passes
from paleo.search.points import Points
from paleo.search.space import Layout, Space, divisors, microbatches
from paleo.stages import Chunk, cut
from paleo.timeline import Buckets, Turn, turns

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
#: How turns follow one another: section, direction, count, whether they gather.
Shape = tuple[tuple[int, str, int, bool], ...]


@dataclass(frozen=True, slots=True)
class Results:
    """One entry for each configuration: positions of its layout and of its choices, seconds of a step, bytes of the
    fullest stage."""

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
    """Layouts of one number of stages, and their pairs with microbatches: positions of layouts and points, one entry a
    pair; ``first`` is a pair of each layout, ``ranks`` its data-parallel ones."""

    stages: int
    layouts: tuple[int, ...]
    ranks: Array
    first: Index
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
        members: list[int] = []
        rows: list[tuple[int, int, int, int]] = []
        for index, layout in enumerate(layouts):
            if layout.mesh.degree("pp") == stages:
                key = points.key(layout)
                found = [(size, points.where.get((key, size))) for size in microbatches(layout.local_batch, space)]
                here = [
                    (len(members), point, size, layout.local_batch // size)
                    for size, point in found
                    if point is not None
                ]
                members += [index] if here else []
                rows += here
        if rows:
            table = np.array(rows, dtype=np.int64)
            sizes, counts = table[:, 2].astype(np.float64), table[:, 3].astype(np.float64)
            first = np.unique(table[:, 0], return_index=True)[1]
            member, point = table[:, 0].astype(np.intp), table[:, 1].astype(np.intp)
            ranks = np.array([float(layouts[index].mesh.replicas) for index in members])
            yield _Group(stages, tuple(members), ranks, first, member, point, sizes, counts)


class _Search:
    def __init__(self, points: Points, layouts: Sequence[Layout], space: Space, made: Setting) -> None:
        self.points, self.layouts, self.space, self.made = points, layouts, space, made
        self.training = not made.run.forward_only
        self.optimizer = made.optimizer
        self.sections = points.programs[0].sections
        self._places: dict[tuple[int, Axes], tuple[int, int]] = {}
        self._kept: dict[tuple[object, ...], Array] = {}
        self._orders: dict[tuple[int, bool, bool], tuple[Shape, list[Turn]]] = {}

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

    def _program(self, group: _Group, place: int) -> int:
        """The block of a layout's points."""
        return int(self.points.block_of[group.point[group.first[place]]])

    def _collective(self, operation: str, layouts: Sequence[int], axes: Sequence[Axes], sizes: Array) -> Array:
        """Seconds of one collective for each layout (last axis) and size (axes before it)."""
        places = np.array([self._place(index, one) for index, one in zip(layouts, axes, strict=True)], dtype=np.intp)
        strides, ranks = (np.broadcast_to(one, sizes.shape).ravel() for one in places.T)
        return self.made.fabric.times(operation, strides, ranks, sizes.ravel()).reshape(sizes.shape)

    def _place(self, layout: int, axes: Axes) -> tuple[int, int]:
        """Stride and ranks of a layout's groups over some axes."""
        if (layout, axes) not in self._places:
            mesh = self.layouts[layout].mesh
            self._places[layout, axes] = mesh.stride(axes), mesh.ways(axes)
        return self._places[layout, axes]

    def _parameters(self, group: _Group, held: Array) -> Array:
        """Parameter elements of (stages, layouts)."""
        return over(held, self.points.columns.parameters[:, group.point[group.first]])

    def _after(self, group: _Group, held: Array, zero: int, *, exchange: bool) -> Array:
        """Seconds of (stages, layouts) after the last backward pass: gradients where ``exchange`` asks for them,
        update, gathering."""
        parameters, formats = self._parameters(group, held), self.made.formats
        total = self._update(parameters / (group.ranks if zero else 1.0), held)
        if zero in (1, 2) and self.training:
            total = total + self._collective(
                "all_gather", group.layouts, self._replicas(group), parameters * formats.parameter
            )
        return total + self._exchange(group, held, zero) if exchange else total

    def _replicas(self, group: _Group) -> list[Axes]:
        """The axes over which each layout's states are replicas."""
        meshes = [self.layouts[i].mesh for i in group.layouts]
        return [tuple(axis for axis in ("ep", "dp") if mesh.degree(axis) > 1) or ("dp",) for mesh in meshes]

    def _tails(self, group: _Group, held: Array, zero: int) -> Array:
        """`_after` with the exchange, remembered."""
        key = ("tails", group.stages, held.tobytes(), zero)
        if key not in self._kept:
            self._kept[key] = self._after(group, held, zero, exchange=True)
        return self._kept[key]

    def _exchange(self, group: _Group, held: Array, zero: int) -> Array:
        """Seconds in which each stage of each layout sums its gradients."""
        found = np.zeros((len(held), len(group.layouts)))
        cells: list[tuple[int, Axes, Array]] = []
        for place in range(len(group.layouts)):
            elements: dict[Axes, Array] = {}
            for number, section in enumerate(self.points.programs[self._program(group, place)].sections):
                for one in section.gradients:
                    elements[one.axes] = elements.get(one.axes, 0.0) + held[:, number] * one.elements
            cells += [(place, axes, size) for axes, size in elements.items() if axes]
        if cells:
            sizes = np.stack([size for _, _, size in cells], axis=1) * self.made.formats.gradient
            chosen = [group.layouts[place] for place, _, _ in cells]
            seconds = self._collective(gradient_operation(zero), chosen, [axes for _, axes, _ in cells], sizes)
            np.add.at(found.T, [place for place, _, _ in cells], seconds.T)
        return found

    def _update(self, counts: Array, held: Array) -> Array:
        """Seconds of the update of ``counts`` parameters, (stages, layouts)."""
        if not self.training:
            return np.zeros_like(counts)
        tensors = np.broadcast_to(
            over(held, section_figures(self.points.programs[0], "tensors"))[:, None], counts.shape
        )
        unique, place = np.unique(np.stack([counts.ravel(), tensors.ravel()]), axis=1, return_inverse=True)
        kernels = [
            update_kernel(count, number, self.optimizer, self.made.formats) for count, number in unique.T.tolist()
        ]
        seconds = np.where(unique[0] > 0, self.made.prices.times(kernels).total, 0.0)
        return seconds[place.ravel()].reshape(counts.shape)

    def _memory(self, group: _Group, held: Array, times: TurnTimes, living: Array, zero: int, pairs: Index) -> Array:
        """Bytes of the fullest stage, for the pairs chosen."""
        member, ranks = group.member[pairs], group.ranks
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

    def _shareable(self, group: _Group, pairs: Index, zero: int) -> Index:
        """Pairs whose ranks have somebody to share states with."""
        return pairs[group.ranks[group.member[pairs]] > 1] if zero else pairs

    def _results(
        self, group: _Group, pairs: Index, choice: tuple[str, str, int, int, bool], step: Array, size: Array
    ) -> Results:
        """``choice``: recompute, schedule, chunks, zero, overlapped."""
        recompute, schedule, chunks, zero, overlapped = choice
        codes = (RECOMPUTE.index(recompute), list(SCHEDULES).index(schedule), chunks, zero)
        first, second, third, fourth = (np.full(len(pairs), code, dtype=np.intp) for code in codes)
        layout = np.array(group.layouts, dtype=np.intp)[group.member[pairs]]
        kept = np.full(len(pairs), overlapped)
        return Results(layout, group.microbatch[pairs].astype(np.intp), first, second, third, fourth, kept, step, size)

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
        """Ways to cut the network, each with the pairs that it serves: whole blocks dealt out evenly, or balanced where
        none repeats."""
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
        sends = self._sends(group, pieces)[:, pairs]
        passes = Passes(
            over(held, times.forwards[:, pairs]) + sends,
            over(held, times.backwards[:, pairs]) + sends,
            over(held, times.weights[:, pairs]),
        )
        tails = {zero: self._tails(group, held, zero) for zero in {_kind(z) for z in self.space.zero if z < 3}}
        for name in (name for name in self.space.schedules if SCHEDULES[name].chunked == (chunks > 1)):
            whole = (
                group.count[pairs] % group.stages == 0 if SCHEDULES[name].multiple else np.ones(len(pairs), dtype=bool)
            )
            living = alive(name, group.stages, group.count[pairs], chunks)
            for zero in (zero for zero in self.space.zero if zero < 3):
                inside = np.flatnonzero(whole & np.isin(pairs, self._shareable(group, pairs, zero)))
                chosen = pairs[inside]
                here = Passes(*(one[:, inside] for one in passes))
                tail = tails[_kind(zero)][:, group.member[chosen]]
                step = pipeline_end(name, here, group.count[chosen], chunks, tail)
                size = self._memory(group, held, times, living[:, inside], zero, chosen)
                yield self._results(group, chosen, (recompute, name, chunks, zero, self.made.overlapped), step, size)

    def _sends(self, group: _Group, pieces: list[Chunk]) -> Array:
        """Seconds in which each stage hands on the outputs of its chunks, one microbatch and way: (stages, pairs)."""
        ends = np.zeros((group.stages, len(self.sections)))
        for index, chunk in enumerate(pieces):
            ends[index % group.stages, chunk[-1][0]] += 1.0
        found = np.zeros((group.stages, len(group.point)))
        for section in np.flatnonzero(ends.any(axis=0)).tolist():
            found += ends[:, section, None] * self._send(group, section)
        return found

    def _send(self, group: _Group, section: int) -> Array:
        """Seconds in which a stage that ends with a section hands its output on, for each pair."""
        key = ("send", group.stages, section)
        if key not in self._kept:
            chosen = [self.layouts[i] for i in group.layouts]
            split = np.array([1.0 if one.sequence_parallel else float(one.mesh.degree("tp")) for one in chosen])
            sizes = self.points.output_bytes[section, group.point] / split[group.member]
            members = np.array(group.layouts)[group.member].tolist()
            self._kept[key] = self._collective("send_recv", members, [("pp",)] * len(members), sizes)
        return self._kept[key]

    # one stage

    def single(self, group: _Group) -> Iterator[Results]:
        """Configurations without a pipeline."""
        held = np.array([[float(section.repeat) for section in self.sections]])
        times = {recompute: self._times(group, recompute) for recompute in self.space.recompute}
        after = {zero: self._after(group, held, zero, exchange=False)[0][group.member] for zero in self.space.zero}
        living = np.ones((1, 1))
        for overlapped in self._modes():
            ends = {
                kind: self._ends(group, times, overlapped, kind) for kind in {_kind(zero) for zero in self.space.zero}
            }
            for zero in self.space.zero:
                pairs = self._shareable(group, np.arange(len(group.point)), zero)
                for place, (recompute, turn) in enumerate(times.items()):
                    size = self._memory(group, held, turn, living, zero, pairs)
                    step = ends[_kind(zero)][place][pairs] + after[zero][pairs]
                    yield self._results(group, pairs, (recompute, "1f1b", 1, zero, overlapped), step, size)

    def _modes(self) -> tuple[bool, ...]:
        """Whether gradients travel during backward: as the run or the space says, else both ways."""
        if self.space.overlapped is not None:
            return (self.space.overlapped,)
        return (False, True) if self.made.run.exchange is None else (self.made.overlapped,)

    def _ends(self, group: _Group, times: dict[str, TurnTimes], overlapped: bool, kind: int) -> Array:
        """When gradients have travelled, before the update: (recompute, pairs)."""
        formats = self.made.formats
        buckets = Buckets(self.made.run.bucket, formats.gradient, overlapped, kind == 3)
        orders: dict[Shape, list[tuple[int, list[Turn]]]] = {}
        for place in np.flatnonzero(group.ranks > 1).tolist() if kind == 3 else range(len(group.layouts)):
            shape, order = self._order(self.points.programs[self._program(group, place)], buckets)
            orders.setdefault(shape, []).append((place, order))
        found = np.zeros((len(times), len(group.point)))
        for members in orders.values():
            pairs = np.flatnonzero(np.isin(group.member, [place for place, _ in members]))
            found[:, pairs] = self._walked(group, list(times.values()), buckets, members, pairs, kind)
        return found

    def _order(self, program: Program, buckets: Buckets) -> tuple[Shape, list[Turn]]:
        """The turns of a program, and in which way they follow one another; remembered, as many layouts share a
        program."""
        key = id(program), buckets.overlapped, buckets.sharded
        if key not in self._orders:
            order = turns(program, buckets, last=True)
            self._orders[key] = tuple((turn.section, turn.direction, turn.count, turn.gathers) for turn in order), order
        return self._orders[key]

    def _walked(
        self,
        group: _Group,
        times: Sequence[TurnTimes],
        buckets: Buckets,
        members: Sequence[tuple[int, list[Turn]]],
        pairs: Index,
        kind: int,
    ) -> Array:
        """The streams of layouts whose turns follow one another in the same way."""
        forward = np.stack([one.forwards[:, pairs] for one in times], axis=1)
        backward = np.stack([(one.backwards + one.weights)[:, pairs] for one in times], axis=1)
        column = {place: i for i, (place, _) in enumerate(members)}
        member = np.array([column[place] for place in group.member[pairs].tolist()], dtype=np.intp)
        order = members[0][1]
        seconds = self._buckets(group, members, kind)
        sent: list[Array | float] = [row[member] if row.any() else 0.0 for row in seconds]
        gather = self._gathers(group, pairs)[:, None] if buckets.sharded else None
        contention = self.made.software.contention
        if contention and (buckets.overlapped or buckets.sharded):
            beside = np.zeros((1, 1, 1)) if gather is None else gather
            sums = self._gradients(group, members, buckets, kind)[:, None, member]
            plain_forward = np.stack([one.forward[:, pairs] for one in times], axis=1)
            plain_backward = np.stack([(one.backward + one.weights)[:, pairs] for one in times], axis=1)
            forward = forward + contention * np.minimum(plain_forward, beside)
            backward = backward + contention * np.minimum(plain_backward, beside + sums)
        if buckets.sharded:
            once = np.maximum(*walk(order, forward, backward, gather, sent, 0.0))
        else:
            plain = turns(self.points.programs[self._program(group, members[0][0])], buckets, last=False)
            once = np.maximum(*walk(plain, forward, backward, None, [0.0] * len(plain), 0.0))
        return np.maximum(*walk(order, forward, backward, gather, sent, (group.count[pairs] - 1.0) * once))

    def _buckets(self, group: _Group, members: Sequence[tuple[int, list[Turn]]], kind: int) -> Array:
        """Seconds of what goes out after each turn: (turns, layouts)."""
        cells = [
            (number, column, place, axes, size)
            for column, (place, order) in enumerate(members)
            for number, turn in enumerate(order)
            for axes, size in turn.buckets
        ]
        found = np.zeros((len(members[0][1]), len(members)))
        if cells:
            chosen = [group.layouts[place] for _, _, place, _, _ in cells]
            sizes = np.array([size for *_, size in cells])
            seconds = self._collective(gradient_operation(kind), chosen, [axes for _, _, _, axes, _ in cells], sizes)
            np.add.at(found, ([cell[0] for cell in cells], [cell[1] for cell in cells]), seconds)
        return found

    def _gradients(
        self, group: _Group, members: Sequence[tuple[int, list[Turn]]], buckets: Buckets, kind: int
    ) -> Array:
        """Seconds in which the gradients of one turn of each section travel: (sections, layouts)."""
        cells = [
            (section, column, place, one.axes, one.elements * buckets.gradient_bytes)
            for column, (place, _) in enumerate(members)
            for section, of in enumerate(self.points.programs[self._program(group, place)].sections)
            for one in of.gradients
            if one.axes
        ]
        found = np.zeros((len(self.sections), len(members)))
        if cells:
            chosen, sizes = [group.layouts[cell[2]] for cell in cells], np.array([cell[4] for cell in cells])
            seconds = self._collective(gradient_operation(kind), chosen, [cell[3] for cell in cells], sizes)
            np.add.at(found, ([cell[0] for cell in cells], [cell[1] for cell in cells]), seconds)
        return found

    def _gathers(self, group: _Group, pairs: Index) -> Array:
        """Seconds in which a section's parameters are gathered: (sections, pairs)."""
        sizes = self.points.columns.parameters[:, group.point[group.first]] * self.made.formats.parameter
        seconds = self._collective("all_gather", group.layouts, self._replicas(group), sizes)
        return seconds[:, group.member[pairs]]


def _kind(zero: int) -> int:
    """Configurations whose streams are the same: plain, sharded states, sharded parameters."""
    return 3 if zero == 3 else min(zero, 1)
