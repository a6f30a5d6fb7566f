"""All configurations of a search as arrays: gathering of priced points, and the arithmetic of `paleo.assemble`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import numpy.typing as npt

from paleo.assemble import (
    RECOMPUTE,
    Columns,
    States,
    TurnTimes,
    alive,
    clip_axes,
    memory,
    over,
    pipeline_end,
    recomputed,
    section_figures,
    states,
    turns_placed,
    walk,
    workspace,
)
from paleo.exchange import (
    copied,
    exposed_exchange,
    exposed_gather,
    gradient_elements,
    replica_groups,
    sendings,
    tied_pairs,
)
from paleo.lower import Program
from paleo.parallel.mesh import Axes
from paleo.predict import NORM_BYTES, Setting, gradient_operation
from paleo.schedules.base import SCHEDULES, Passes, Schedule
from paleo.search.points import Points
from paleo.search.space import Layout, Space, divisors, microbatches
from paleo.stages import Chunk
from paleo.timeline import Buckets, Turn, turns

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
#: How turns follow one another: section, direction, count, whether they gather, whether gradients go out after them.
Shape = tuple[tuple[int, str, int, bool, bool], ...]


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


@dataclass(frozen=True, slots=True)
class _Laid:
    """Turns of each section in each chunk of each stage, (stages, chunks, sections), in all ``copies`` of the
    network."""

    placed: Array
    copies: int = 1

    @property
    def held(self) -> Array:
        """Turns on each stage: (stages, sections)."""
        return np.asarray(self.placed.sum(axis=1))

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from others."""
        return self.placed.shape, self.placed.tobytes(), self.copies


@dataclass(frozen=True, slots=True)
class _Tails:
    """Seconds after the passes: those that nothing hides and gathers, (stages, layouts), sums of gradients, (stages,
    chunks, layouts); with the buckets in which the latter two go out."""

    fixed: Array
    sums: Array
    sum_buckets: Array
    gathers: Array
    gather_buckets: Array


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
        self._tailed: dict[tuple[object, ...], _Tails] = {}
        self._pieces: dict[tuple[int, int], tuple[Chunk, ...]] = {}
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

    def _replicated(
        self, operation: str, layouts: Sequence[int], axes: Sequence[Axes], sizes: Array, copies: int
    ) -> Array:
        """Seconds of one collective of each stage (first axis) over its replicas, those in other copies too, for each
        layout (last axis)."""
        if copies == 1:
            return self._collective(operation, layouts, axes, sizes)
        groups = [
            replica_groups(self.layouts[index].mesh, one, copies) for index, one in zip(layouts, axes, strict=True)
        ]
        alone = (np.ones(len(sizes), dtype=np.int64),) * 2
        found, shape = np.zeros(sizes.shape), (len(sizes),) + (1,) * (sizes.ndim - 2) + (len(layouts),)
        for k in range(max(map(len, groups), default=0)):
            pair = zip(*(one[k] if k < len(one) else alone for one in groups), strict=True)
            strides, ranks = (
                np.broadcast_to(np.stack(one, axis=1).reshape(shape), sizes.shape).ravel() for one in pair
            )
            seconds = self.made.fabric.times(operation, strides, ranks, sizes.ravel())
            found = np.maximum(found, seconds.reshape(sizes.shape))
        return found

    def _parameters(self, group: _Group, laid: _Laid) -> Array:
        """Parameter elements of (stages, layouts), copies of tied ones too."""
        return self._held(group, laid, "parameters")

    def _trained(self, group: _Group, laid: _Laid) -> Array:
        """Those of them that have gradients."""
        return self._held(group, laid, "trained")

    def _held(self, group: _Group, laid: _Laid, which: Literal["parameters", "trained"]) -> Array:
        key = (which, group.stages, laid.key)
        if key not in self._kept:
            found = over(laid.held, getattr(self.points.columns, which)[:, group.point[group.first]])
            ties = [self._of(group, place).ties for place in range(len(group.layouts))]
            if ties and ties[0]:
                counted = [[tie.elements * (tie.trained or which == "parameters") for tie in one] for one in ties]
                found = found + copied(laid.held, ties[0]) @ np.array(counted).T
            self._kept[key] = found
        return self._kept[key]

    def _of(self, group: _Group, place: int) -> Program:
        """The program of a layout's points."""
        return self.points.programs[self._program(group, place)]

    def _tails(self, group: _Group, laid: _Laid, zero: int, overlapped: bool | None) -> _Tails:
        """What follows the last backward pass, remembered: gradients, beside it or after it (None: not these), update,
        gathering."""
        key = group.stages, laid.key, zero, overlapped
        if key not in self._tailed:
            self._tailed[key] = self._made_tails(group, laid, zero, overlapped)
        return self._tailed[key]

    def _made_tails(self, group: _Group, laid: _Laid, zero: int, overlapped: bool | None) -> _Tails:
        trained, bucket = self._trained(group, laid), self.made.run.bucket
        fixed = self._update(trained / (group.ranks * laid.copies if zero else 1.0), laid.held)
        if self.training and self.made.clip != "none":
            axes = [clip_axes(zero)] * len(group.layouts)
            fixed = fixed + self._collective("all_reduce", group.layouts, axes, np.full(len(axes), NORM_BYTES))
        gathers, sizes = np.zeros_like(fixed), trained * self.made.formats.parameter
        if zero in (1, 2) and self.training:
            gathers = self._replicated("all_gather", group.layouts, self._replicas(group), sizes, laid.copies)
        sums = np.zeros((len(fixed), 1, fixed.shape[1]))
        sent = sums
        if overlapped is not None:
            fixed = fixed + self._tied_sums(group, laid)
            sums, sent = self._exchange(group, laid, zero, overlapped)
            if not overlapped:
                fixed, sums = fixed + sums.sum(axis=1), np.zeros_like(sums)
        return _Tails(fixed, sums, sendings(sent, bucket), gathers, sendings(sizes, bucket))

    def _tail(
        self, tails: _Tails, schedule: Schedule, passes: Passes, chunks: int, members: Index, overlapped: bool
    ) -> Array:
        """Seconds of (stages, pairs) after the last passes that these do not hide."""
        contention, found = self.made.software.contention, tails.fixed[:, members]
        if tails.sums.any():
            sums, buckets = tails.sums[:, :, members], tails.sum_buckets[:, :, members]
            found = found + exposed_exchange(sums, buckets, schedule, passes, chunks, contention)
        return found + self._gathered(tails, passes.forward, members, overlapped)

    def _gathered(self, tails: _Tails, forward: Array, members: Index, overlapped: bool) -> Array:
        """Seconds of gathering that the next forward pass does not hide: (stages, pairs)."""
        gathers, buckets = tails.gathers[:, members], tails.gather_buckets[:, members]
        if not (overlapped and self.made.software.overlap_gather and gathers.any()):
            return gathers
        return exposed_gather(gathers, buckets, forward, self.made.software.contention)

    def _replicas(self, group: _Group) -> list[Axes]:
        """The axes over which each layout's states are replicas."""
        meshes = [self.layouts[i].mesh for i in group.layouts]
        return [tuple(axis for axis in ("ep", "dp") if mesh.degree(axis) > 1) or ("dp",) for mesh in meshes]

    def _exchange(self, group: _Group, laid: _Laid, zero: int, overlapped: bool) -> tuple[Array, Array]:
        """Seconds in which each chunk of each stage of each layout sums its gradients, and their bytes: (stages,
        chunks, layouts). In one go for all chunks where nothing overlaps."""
        placed = laid.placed if overlapped else laid.held[:, None]
        found = np.zeros((*placed.shape[:2], len(group.layouts)))
        sizes = np.zeros_like(found)
        known: dict[tuple[object, ...], dict[Axes, Array]] = {}
        cells: list[tuple[int, Axes, Array]] = []
        for place, index in enumerate(group.layouts):
            program, mesh = self._of(group, place), self.layouts[index].mesh
            key = id(program), tuple(axis for axis, degree in mesh.degrees if degree > 1)
            if key not in known:
                known[key] = gradient_elements(program, placed, mesh, laid.copies)
            cells += [(place, *one) for one in known[key].items()]
        if cells:
            count = np.stack([elements for *_, elements in cells], axis=2) * self.made.formats.gradient
            chosen, places = [group.layouts[place] for place, *_ in cells], [place for place, *_ in cells]
            axes = [one for _, one, _ in cells]
            seconds = self._replicated(gradient_operation(zero), chosen, axes, count, laid.copies)
            np.add.at(found.T, places, seconds.T)
            np.add.at(sizes.T, places, count.T)
        return found, sizes

    def _tied_sums(self, group: _Group, laid: _Laid) -> Array:
        """Seconds in which the stages that hold a tied parameter sum its gradients: (stages, layouts)."""
        key = ("tied", group.stages, laid.key)
        if key not in self._kept:
            found = np.zeros((group.stages, len(group.layouts)))
            pairs = tied_pairs(self._of(group, 0).ties, laid.held) if self.training else []
            strides = np.array([self.layouts[index].mesh.stride(("pp",)) for index in group.layouts])
            for tie, owner, other in pairs:
                ties = [self._of(group, place).ties[tie] for place in range(len(group.layouts))]
                sizes = np.array([one.elements for one in ties]) * self.made.formats.gradient
                ranks = np.full(len(sizes), 2)
                found[[owner, other]] += self.made.fabric.times(
                    "all_reduce", strides * abs(other - owner), ranks, sizes
                )
            self._kept[key] = found
        return self._kept[key]

    def _update(self, counts: Array, held: Array) -> Array:
        """Seconds of the update of ``counts`` parameters, (stages, layouts)."""
        if not self.training:
            return np.zeros_like(counts)
        tensors = over(held, section_figures(self.points.programs[0], "tensors"))[:, None]
        return self.made.updated(counts, tensors) + self.made.clipped(counts)

    def _memory(self, group: _Group, laid: _Laid, times: TurnTimes, living: Array, zero: int, pairs: Index) -> Array:
        """Bytes of the fullest stage, for the pairs chosen."""
        member, ranks = group.member[pairs], group.ranks * laid.copies
        largest = self.points.columns.parameters[:, group.point].max(axis=0)[pairs]
        held, learned = self._parameters(group, laid), self._trained(group, laid)
        whole = states(held, learned, 0.0, ranks, zero, self.optimizer, self.made.formats, training=self.training)
        bucket = np.where(ranks > 1, self.made.run.bucket, 0.0)[member] if self.training else 0.0
        outputs = self.points.columns.largest_output_bytes[:, group.point[pairs]]
        work = workspace(laid.held, outputs, times.transient[:, pairs], bucket)
        gathered = 2.0 * largest * self.made.formats.parameter if zero == 3 else 0.0
        each = States(whole.parameters[:, member], whole.gradients[:, member], whole.optimizer[:, member], gathered)
        activations = over(laid.held, times.kept[:, pairs]) * living * self.training
        own = np.array([self.made.reserved(self.layouts[index].mesh) for index in group.layouts])
        return np.asarray(memory(each, activations, work).max(axis=0) + own[member])

    def _shareable(self, group: _Group, pairs: Index, zero: int) -> Index:
        """Pairs whose ranks have somebody to share states with."""
        return pairs[group.ranks[group.member[pairs]] > 1] if zero else pairs

    def _results(
        self, group: _Group, pairs: Index, choice: tuple[str, str, int, int, bool], step: Array, size: Array
    ) -> Results:
        """``choice``: recompute, schedule, chunks, zero, overlapped."""
        recompute, schedule, chunks, zero, overlapped = choice
        step = np.maximum(step, self._fed(group)[group.member[pairs]])
        codes = (RECOMPUTE.index(recompute), list(SCHEDULES).index(schedule), chunks, zero)
        first, second, third, fourth = (np.full(len(pairs), code, dtype=np.intp) for code in codes)
        layout = np.array(group.layouts, dtype=np.intp)[group.member[pairs]]
        kept = np.full(len(pairs), overlapped)
        return Results(layout, group.microbatch[pairs].astype(np.intp), first, second, third, fourth, kept, step, size)

    def _fed(self, group: _Group) -> Array:
        """Seconds in which the batch of each layout arrives; 0 for synthetic data."""
        chosen = [self.layouts[index] for index in group.layouts]
        replica, local = (
            np.array(one, dtype=np.float64)
            for one in ([c.mesh.size / c.mesh.replicas for c in chosen], [c.local_batch for c in chosen])
        )
        fed = self.made.fed(self.points.graph, self.made.run.gpus, replica, local)
        return np.zeros(len(chosen)) if fed is None else fed.total

    # pipelines

    def pipelined(self, group: _Group) -> Iterator[Results]:
        """Configurations of two stages or more."""
        for recompute in self.space.recompute:
            times = self._times(group, recompute)
            weight = times.turn * self.points.columns.repeat[:, None]
            heaviest = weight.argmax(axis=0)
            for chunks in self._chunks(group.stages):
                for pieces, pairs in self._cuts(group, times, heaviest, group.stages * chunks):
                    yield from self._staged(group, recompute, times, chunks, pieces, pairs)

    def _chunks(self, stages: int) -> tuple[int, ...]:
        repeats = {section.repeat for section in self.sections if section.repeat > 1}
        known = {chunks for repeat in repeats if repeat % stages == 0 for chunks in divisors(repeat // stages)} | {1}
        return tuple(sorted(known if self.space.chunks is None else known & set(self.space.chunks)))

    def _cuts(
        self, group: _Group, times: TurnTimes, heaviest: Index, pieces: int
    ) -> Iterator[tuple[list[Chunk], Index]]:
        """Ways to cut the network, each with the pairs that it serves: the blocks of a folded network in numbers that
        divide evenly, or any cut where none repeats."""
        folded = any(section.repeat > 1 for section in self.sections)
        known: dict[tuple[Chunk, ...], list[int]] = {}
        for block in np.unique(heaviest).tolist():
            pairs = np.flatnonzero(heaviest == block).tolist()
            if self.sections[block].repeat % pieces == 0 or (not folded and pieces <= len(self.sections)):
                # whole blocks dealt out evenly are cut alike for all pairs
                alike = folded and self.made.software.stages == "even"
                for pair in pairs[:1] if alike else pairs:
                    found = self._cut(group, times, pair, pieces)
                    known.setdefault(found, []).extend(pairs if alike else [pair])
        yield from ((list(chunks), np.array(found, dtype=np.intp)) for chunks, found in known.items())

    def _cut(self, group: _Group, times: TurnTimes, pair: int, pieces: int) -> tuple[Chunk, ...]:
        """The pieces of one pair; by work, those of its layout do for every microbatch."""
        block = int(self.points.block_of[group.point[pair]])
        program, turn = self.points.programs[block], times.turn[:, pair]
        if self.made.software.stages == "even":
            return tuple(self.made.cut(program, turn, pieces))
        if (block, pieces) not in self._pieces:
            self._pieces[block, pieces] = tuple(self.made.cut(program, turn, pieces))
        return self._pieces[block, pieces]

    def _staged(
        self, group: _Group, recompute: str, times: TurnTimes, chunks: int, pieces: list[Chunk], pairs: Index
    ) -> Iterator[Results]:
        shared: dict[tuple[object, ...], list[Schedule]] = {}
        for name in self.space.schedules:
            schedule = SCHEDULES[name]
            if schedule.takes(chunks) and schedule.runs(group.stages, group.count[pairs]).any():
                places = schedule.pieces(group.stages, chunks), schedule.hands_on(group.stages, chunks)
                shared.setdefault((*places, schedule.copies), []).append(schedule)
        for schedules in shared.values():
            yield from self._ordered(group, recompute, times, chunks, pieces, pairs, schedules)

    def _ordered(
        self,
        group: _Group,
        recompute: str,
        times: TurnTimes,
        chunks: int,
        pieces: list[Chunk],
        pairs: Index,
        schedules: list[Schedule],
    ) -> Iterator[Results]:
        """Schedules that lay a cut over the stages in the same way."""
        first = schedules[0]
        laid = _Laid(turns_placed(len(self.sections), pieces, first.pieces(group.stages, chunks)), copies=first.copies)
        sends, made = self._sends(group, pieces, first, chunks)[:, pairs], laid.held / first.copies
        passes = Passes(
            over(made, times.forwards[:, pairs]) + sends,
            over(made, times.backwards[:, pairs]) + sends,
            over(made, times.weights[:, pairs]),
        )
        for schedule in schedules:
            whole = schedule.runs(group.stages, group.count[pairs])
            living = alive(schedule, group.stages, group.count[pairs], chunks)
            for zero in (zero for zero in self.space.zero if zero < 3):
                inside = np.flatnonzero(whole & np.isin(pairs, self._shareable(group, pairs, zero)))
                chosen = pairs[inside]
                here = Passes(*(one[:, inside] for one in passes))
                size = self._memory(group, laid, times, living[:, inside], zero, chosen)
                for overlapped in self._modes():
                    tails = self._tails(group, laid, _kind(zero), overlapped)
                    tail = self._tail(tails, schedule, here, chunks, group.member[chosen], overlapped)
                    step = pipeline_end(schedule, here, group.count[chosen], chunks, tail)
                    talks = self._distinct(tails, group.member[chosen], overlapped)
                    choice = (recompute, schedule.name, chunks, zero, overlapped)
                    yield self._results(group, chosen[talks], choice, step[talks], size[talks])

    def _distinct(self, tails: _Tails, members: Index, overlapped: bool) -> npt.NDArray[np.bool_]:
        """Pairs of which a mode is a choice of its own: where both are tried, overlapping needs something to send."""
        if not overlapped or len(self._modes()) == 1:
            return np.ones(len(members), dtype=bool)
        return np.asarray((tails.sums.sum(axis=1) + tails.gathers).any(axis=0)[members])

    def _sends(self, group: _Group, pieces: list[Chunk], schedule: Schedule, chunks: int) -> Array:
        """Seconds in which each stage hands on the outputs of its chunks, one microbatch and way: (stages, pairs)."""
        ends = np.zeros((group.stages, len(self.sections)))
        for stage, held in enumerate(schedule.pieces(group.stages, chunks)):
            for piece, sent in zip(held, schedule.hands_on(group.stages, chunks)[stage], strict=True):
                ends[stage, pieces[piece][-1][0]] += sent / schedule.copies
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
        laid = _Laid(np.array([[[float(section.repeat) for section in self.sections]]]))
        times = {recompute: self._times(group, recompute) for recompute in self.space.recompute}
        living = np.ones((1, 1))
        for overlapped in self._modes():
            ends = {
                kind: self._ends(group, times, overlapped, kind) for kind in {_kind(zero) for zero in self.space.zero}
            }
            for zero in self.space.zero:
                after = self._after(group, laid, times, zero, overlapped)
                pairs = self._shareable(group, np.arange(len(group.point)), zero)
                for place, (recompute, turn) in enumerate(times.items()):
                    size = self._memory(group, laid, turn, living, zero, pairs)
                    step = ends[_kind(zero)][place][pairs] + after[pairs]
                    yield self._results(group, pairs, (recompute, "1f1b", 1, zero, overlapped), step, size)

    def _after(self, group: _Group, laid: _Laid, times: dict[str, TurnTimes], zero: int, overlapped: bool) -> Array:
        """Seconds after the exchange of gradients, for each pair."""
        tails, forward = self._tails(group, laid, zero, None), next(iter(times.values())).forwards
        gathers = self._gathered(tails, over(laid.held, forward), group.member, overlapped)
        return np.asarray((tails.fixed[:, group.member] + gathers)[0])

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
            shape = ((one.section, one.direction, one.count, one.gathers, bool(one.buckets)) for one in order)
            self._orders[key] = tuple(shape), order
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
