"""All configurations of a search as arrays: gathering of priced points, and the arithmetic of `paleo.assemble`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from paleo.assemble import (
    Columns,
    TurnTimes,
    alive,
    clip_axes,
    crowded,
    memory,
    over,
    recomputed,
    section_figures,
    stage_ends,
    states,
    turns_placed,
    walk,
    workspace,
)
from paleo.exchange import (
    Sends,
    copied,
    exposed_gather,
    gradient_shares,
    gradient_turns,
    in_turn,
    owned_elements,
    replica_groups,
    sendings,
    sent_behind,
    sharers,
    tied_pairs,
)
from paleo.lower import Program
from paleo.parallel.mesh import BATCH_AXES, Axes
from paleo.predict import NORM_BYTES, Setting, gradient_operation
from paleo.recompute import RECOMPUTE, Ways
from paleo.schedules.base import SCHEDULES, Passes, Schedule
from paleo.search.points import Points
from paleo.search.space import Layout, Space, divisors, microbatches
from paleo.sharded import Figures, gathered_elements, sharded_passes, turn_of_each, waited_turns
from paleo.stages import Chunk
from paleo.timeline import Buckets, Turn, turns

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
Count = npt.NDArray[np.int64]
Codes = npt.NDArray[np.integer]
#: How turns follow one another: section, direction, count, whether they gather, whether gradients go out after them.
Shape = tuple[tuple[int, str, int, bool, bool], ...]


@dataclass(frozen=True, slots=True)
class Results:
    """One entry for each configuration: positions of its layout and of its choices, seconds of a step, bytes of the
    fullest stage."""

    layout: Codes
    microbatch: Codes
    recompute: Codes
    schedule: Codes
    chunks: Codes
    zero: Codes
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
    """Turns of each section in each chunk of each stage, (stages, chunks, sections), and on each stage, (stages,
    sections), in all ``copies`` of the network; ``key`` and ``stages_key`` tell them from others."""

    placed: Array
    held: Array
    copies: int
    key: tuple[object, ...]
    stages_key: tuple[object, ...]

    @classmethod
    def of(cls, placed: Array, copies: int = 1) -> _Laid:
        """From the turns in each chunk."""
        held = np.asarray(placed.sum(axis=1))
        return cls(placed, held, copies, (placed.shape, placed.tobytes(), copies), (len(held), held.tobytes(), copies))


@dataclass(frozen=True, slots=True)
class _Cut:
    """The network in ``pieces`` for the stages of some pairs, ``chunks`` on each, under one recomputation: seconds and
    bytes of those pairs' sections."""

    recompute: str
    chunks: int
    pieces: tuple[Chunk, ...]
    pairs: Index
    times: TurnTimes
    largest_outputs: Array


@dataclass(frozen=True, slots=True)
class _Cells:
    """Places of layouts, the groups in which they sum gradients, and elements of each of `gradient_turns`: (sections
    and ties, cells)."""

    places: list[int]
    groups: list[Count]
    elements: Array


@dataclass(frozen=True, slots=True)
class _Tails:
    """Seconds after the passes: those that nothing hides and gathers that the next pass hides, (stages, layouts), with
    the buckets in which they go out; sums of gradients by chunk. ``sends``: layouts that have anything to send."""

    fixed: Array
    sums: Array
    sum_buckets: Array
    gathers: Array
    gather_buckets: Array
    sends: npt.NDArray[np.bool_]


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
        self._cells: dict[tuple[int, int], _Cells] = {}
        self._in_turn: dict[tuple[object, ...], Sends] = {}
        self._laid: dict[tuple[object, ...], tuple[_Laid, Array]] = {}
        self._pieces: dict[tuple[int, int], tuple[Chunk, ...]] = {}
        self._orders: dict[tuple[int, bool, bool], tuple[Shape, list[Turn]]] = {}

    # what every group needs

    def _times(self, group: _Group) -> dict[str, TurnTimes]:
        """Turns of all pairs under each recomputation."""
        of = self.points.columns
        figures = {one.name: getattr(of, one.name)[:, group.point] for one in fields(Columns) if one.name != "repeat"}
        table = Columns(repeat=of.repeat, **figures)
        ways = {name: Ways.alike(of.repeat, name if self.training else "none") for name in self.space.recompute}
        return {name: recomputed(table, one) for name, one in ways.items()}

    def _once(self, key: tuple[object, ...], made: Callable[[], Array]) -> Array:
        """An array that is made once for its key."""
        if key not in self._kept:
            self._kept[key] = made()
        return self._kept[key]

    def _program(self, group: _Group, place: int) -> int:
        """The block of a layout's points."""
        return int(self.points.block_of[group.point[group.first[place]]])

    def _collective(self, operation: str, layouts: Sequence[int], axes: Sequence[Axes], sizes: Array) -> Array:
        """Seconds of one collective for each layout (last axis) and size (axes before it)."""
        return self._slowest(operation, self._ranks(layouts, axes, 1), sizes)

    def _slowest(self, operation: str, groups: Sequence[Count], sizes: Array) -> Array:
        """Seconds of one collective of ``sizes`` bytes, (…, layouts) or (stages, …, layouts), in the slowest of its
        ``groups``."""
        found = np.zeros(sizes.shape)
        for group in groups:
            shape = (group.shape[1],) + (1,) * (sizes.ndim - 2) + (group.shape[2],) if sizes.ndim > 1 else (-1,)
            strides, ranks = (np.broadcast_to(one.reshape(shape), sizes.shape).ravel() for one in group)
            seconds = self.made.fabric.times(operation, strides, ranks, sizes.ravel()).reshape(sizes.shape)
            found = np.maximum(found, seconds)
        return found

    def _ranks(self, layouts: Sequence[int], axes: Sequence[Axes], copies: int) -> list[Count]:
        """Stride and ranks of the groups over which layouts sum something, with ``copies`` of the network: (2, stages,
        layouts) each; one stage stands for all where they are alike."""
        if copies == 1:
            places = [self._place(index, one) for index, one in zip(layouts, axes, strict=True)]
            return [np.array(places, dtype=np.int64).T[:, None]]
        groups = [
            replica_groups(self.layouts[index].mesh, one, copies) for index, one in zip(layouts, axes, strict=True)
        ]
        alone = (np.ones(self.layouts[layouts[0]].mesh.degree("pp"), dtype=np.int64),) * 2
        found = [[one[k] if k < len(one) else alone for one in groups] for k in range(max(map(len, groups)))]
        return [np.array(one).transpose(1, 2, 0) for one in found]

    def _place(self, layout: int, axes: Axes) -> tuple[int, int]:
        """Stride and ranks of a layout's groups over some axes."""
        if (layout, axes) not in self._places:
            mesh = self.layouts[layout].mesh
            self._places[layout, axes] = mesh.stride(axes), mesh.ways(axes)
        return self._places[layout, axes]

    def _parameters(self, group: _Group, laid: _Laid) -> Array:
        """Parameter elements of (stages, layouts), copies of tied ones too."""
        return self._counted(group, laid, "parameters")

    def _trained(self, group: _Group, laid: _Laid) -> Array:
        """Those of them that have gradients."""
        return self._counted(group, laid, "trained")

    def _counted(self, group: _Group, laid: _Laid, which: Literal["parameters", "trained"]) -> Array:
        return self._once((which, *laid.stages_key), lambda: self._elements(group, laid, which))

    def _elements(self, group: _Group, laid: _Laid, which: Literal["parameters", "trained"]) -> Array:
        found = over(laid.held, getattr(self.points.columns, which)[:, group.point[group.first]])
        ties = [self._of(group, place).ties for place in range(len(group.layouts))]
        if not (ties and ties[0]):
            return found
        elements = [[tie.elements * (tie.trained or which == "parameters") for tie in one] for one in ties]
        return np.asarray(found + copied(laid.held, ties[0]) @ np.array(elements).T)

    def _of(self, group: _Group, place: int) -> Program:
        """The program of a layout's points."""
        return self.points.programs[self._program(group, place)]

    def _tails(self, group: _Group, laid: _Laid, zero: int, overlapped: bool) -> _Tails:
        """What follows the last backward pass, remembered: gradients, beside it or after it, update, gathering."""
        key = *(laid.key if overlapped else laid.stages_key), zero, overlapped
        if key not in self._tailed:
            self._tailed[key] = self._made_tails(group, laid, zero, overlapped)
        return self._tailed[key]

    def _made_tails(self, group: _Group, laid: _Laid, zero: int, overlapped: bool, *, summed: bool = True) -> _Tails:
        """``summed``: with the sums of gradients."""
        key, bucket = (*laid.stages_key, bool(zero)), self.made.run.bucket
        sizes = self._trained(group, laid) * self.made.formats.parameter
        fixed = self._once(("update", *key), lambda: self._update(group, laid, zero))
        gathers = np.zeros_like(fixed)
        if zero in (1, 2) and self.training:
            gathers = self._once(
                ("gathers", *key),
                lambda: self._slowest("all_gather", self._replicas(group, laid.copies), sizes),
            )
        sums = np.zeros((len(fixed), 1, fixed.shape[1]))
        sent = sums
        if summed:
            fixed = fixed + self._tied_sums(group, laid)
            sums, sent = self._exchange(group, laid, zero, overlapped)
        sends = (sums.sum(axis=1) + gathers).any(axis=0)
        if not overlapped:
            fixed, sums = fixed + sums.sum(axis=1), np.zeros_like(sums)
        if not (overlapped and self.made.software.overlap_gather):
            fixed, gathers = fixed + gathers, np.zeros_like(gathers)
        return _Tails(fixed, sums, sendings(sent, bucket), gathers, sendings(sizes, bucket), sends)

    def _tail(
        self, tails: _Tails, schedule: Schedule, passes: Passes, chunks: int, members: Index, key: tuple[object, ...]
    ) -> Array:
        """Seconds of (stages, pairs) after the last passes that these do not hide; ``key`` tells the tails from
        others."""
        found = self._gathered(tails, passes.forward, members)
        if tails.sums.any():
            sends = self._sendings(tails, schedule, chunks, key).of(members)
            found += sent_behind(sends, schedule, passes, chunks, self.made.software.contention)
        return found

    def _sendings(self, tails: _Tails, schedule: Schedule, chunks: int, key: tuple[object, ...]) -> Sends:
        """The sums of gradients in the order of a schedule, remembered."""
        key = *key, schedule.name
        if key not in self._in_turn:
            self._in_turn[key] = in_turn(tails.sums, tails.sum_buckets, schedule, chunks)
        return self._in_turn[key]

    def _gathered(self, tails: _Tails, forward: Array, members: Index) -> Array:
        """Seconds that nothing hides, and of gathering that the next forward pass does not hide: (stages, pairs)."""
        found = np.take(tails.fixed, members, axis=1)
        if tails.gathers.any():
            gathers, buckets = (np.take(one, members, axis=1) for one in (tails.gathers, tails.gather_buckets))
            found += exposed_gather(gathers, buckets, forward, self.made.software.contention)
        return found

    def _replicas(self, group: _Group, copies: int = 1) -> list[Count]:
        """The groups in which each layout's states are replicas."""
        axes = [self.layouts[i].mesh.state_axes or ("dp",) for i in group.layouts]
        return self._ranks(group.layouts, axes, copies)

    def _exchange(self, group: _Group, laid: _Laid, zero: int, overlapped: bool) -> tuple[Array, Array]:
        """Seconds in which each chunk of each stage of each layout sums its gradients, and their bytes: (stages,
        chunks, layouts). In one go for all chunks where nothing overlaps."""
        turns = gradient_turns(laid.placed if overlapped else laid.held[:, None], self._of(group, 0).ties)
        if laid.copies > 1:
            seconds, sizes = self._summed(group, turns, laid.copies, zero)
            return seconds, sizes
        # chunks that make the same gradients send them in the same time
        kinds, kind_of = np.unique(turns.reshape(-1, turns.shape[2]), axis=0, return_inverse=True)
        seconds, sizes = (
            one[kind_of.reshape(turns.shape[:2]), 0] for one in self._summed(group, kinds[:, None], 1, zero)
        )
        return seconds, sizes

    def _summed(self, group: _Group, turns: Array, copies: int, zero: int) -> Array:
        """Seconds and bytes of the gradients of some turns, (stages, chunks, ties and sections), for each layout: (2,
        stages, chunks, layouts)."""
        found = np.zeros((2, *turns.shape[:2], len(group.layouts)))
        cells = self._gradient_cells(group, copies)
        if cells.places:
            sizes = turns @ cells.elements * self.made.formats.gradient
            seconds = self._slowest(gradient_operation(zero), cells.groups, sizes)
            np.add.at(found.T, cells.places, np.stack([seconds, sizes]).T)
        return found

    def _gradient_cells(self, group: _Group, copies: int) -> _Cells:
        """What each layout of a group sums its gradients over, remembered."""
        if (group.stages, copies) not in self._cells:
            known: dict[tuple[object, ...], dict[Axes, Array]] = {}
            cells: list[tuple[int, Axes, Array]] = []
            for place, index in enumerate(group.layouts):
                program, mesh = self._of(group, place), self.layouts[index].mesh
                key = id(program), tuple(axis for axis, degree in mesh.degrees if degree > 1)
                if key not in known:
                    known[key] = gradient_shares(program, mesh, copies)
                cells += [(place, *one) for one in known[key].items()]
            places, axes, elements = zip(*cells, strict=True) if cells else ((), (), ())
            groups = self._ranks([group.layouts[place] for place in places], axes, copies) if cells else []
            self._cells[group.stages, copies] = _Cells(list(places), groups, np.array(elements).T)
        return self._cells[group.stages, copies]

    def _tied_sums(self, group: _Group, laid: _Laid) -> Array:
        """Seconds in which the stages that hold a tied parameter sum its gradients: (stages, layouts)."""
        return self._once(("tied", *laid.stages_key), lambda: self._summed_ties(group, laid))

    def _summed_ties(self, group: _Group, laid: _Laid) -> Array:
        found = np.zeros((group.stages, len(group.layouts)))
        pairs = tied_pairs(self._of(group, 0).ties, laid.held) if self.training else []
        strides = np.array([self.layouts[index].mesh.stride(("pp",)) for index in group.layouts])
        for tie, owner, other in pairs:
            ties = [self._of(group, place).ties[tie] for place in range(len(group.layouts))]
            sizes = np.array([one.elements for one in ties]) * self.made.formats.gradient
            ranks = np.full(len(sizes), 2)
            found[[owner, other]] += self.made.fabric.times("all_reduce", strides * abs(other - owner), ranks, sizes)
        return found

    def _update(self, group: _Group, laid: _Laid, zero: int) -> Array:
        """Seconds of the update of the parameters that a rank owns, clipping too: (stages, layouts)."""
        counts = self._trained(group, laid) / (self._sharers(group, laid) if zero else 1.0)
        if not self.training:
            return np.zeros_like(counts)
        tensors = over(laid.held, section_figures(self.points.programs[0], "tensors"))[:, None]
        found = self.made.updated(counts, tensors) + self.made.clipped(counts)
        if self.made.clip != "none":
            axes = [clip_axes(zero)] * len(group.layouts)
            found = found + self._collective("all_reduce", group.layouts, axes, np.full(len(axes), NORM_BYTES))
        return found

    def _sharers(self, group: _Group, laid: _Laid) -> Array:
        """Ranks over which ZeRO shares out the states of (stages, layouts)."""

        def made() -> Array:
            turns_made = gradient_turns(laid.placed, self._of(group, 0).ties).sum(axis=1)
            owned = turns_made @ self._once(
                ("mine", group.stages, laid.copies), partial(self._mine, group, laid.copies)
            )
            return sharers(self._trained(group, laid), owned, group.ranks * laid.copies)

        return self._once(("sharers", *laid.stages_key), made)

    def _mine(self, group: _Group, copies: int) -> Array:
        """`owned_elements` of each layout: (sections and ties, layouts)."""
        known: dict[tuple[object, ...], Array] = {}
        found = []
        for place, index in enumerate(group.layouts):
            program, mesh = self._of(group, place), self.layouts[index].mesh
            key = id(program), *(mesh.degree(axis) for axis in BATCH_AXES)
            if key not in known:
                known[key] = owned_elements(program, mesh, copies)
            found.append(known[key])
        return np.array(found).T

    def _owned(self, group: _Group, laid: _Laid, zero: int) -> Array:
        """Bytes of the states of each stage and of what the process itself takes: (stages, layouts)."""
        held, learned, ranks = self._parameters(group, laid), self._trained(group, laid), self._sharers(group, laid)
        whole = states(held, learned, 0.0, ranks, zero, self.optimizer, self.made.formats, training=self.training)
        own = np.array([self.made.reserved(self.layouts[index].mesh) for index in group.layouts])
        return memory(whole, np.zeros_like(held), own)

    def _passing(self, group: _Group, laid: _Laid, cut: _Cut) -> tuple[Array, Array]:
        """Bytes of all activations of a microbatch, and of what is needed for a moment: (stages, pairs)."""
        if not self.training:
            work = workspace(laid.held, cut.largest_outputs, cut.times.transient, 0.0)
            return np.zeros_like(work), work
        bucket = np.where(group.ranks * laid.copies > 1, self.made.run.bucket, 0.0)[group.member[cut.pairs]]
        work = workspace(laid.held, cut.largest_outputs, cut.times.transient, bucket)
        return over(laid.held, cut.times.kept), work

    def _results(
        self, group: _Group, pairs: Index, choice: tuple[str, str, int, int, bool], step: Array, size: Array
    ) -> Results:
        """``choice``: recompute, schedule, chunks, zero, overlapped."""
        recompute, schedule, chunks, zero, overlapped = choice
        step = np.maximum(step, self._fed(group)[group.member[pairs]])
        codes = (RECOMPUTE.index(recompute), list(SCHEDULES).index(schedule), chunks, zero)
        first, second, third, fourth = (np.full(len(pairs), code, dtype=np.int16) for code in codes)
        layout = np.array(group.layouts, dtype=np.int32)[group.member[pairs]]
        kept = np.full(len(pairs), overlapped)
        return Results(layout, group.microbatch[pairs].astype(np.int32), first, second, third, fourth, kept, step, size)

    def _fed(self, group: _Group) -> Array:
        """Seconds in which the batch of each layout arrives; 0 for synthetic data."""
        return self._once(("fed", group.stages), lambda: self._arriving(group))

    def _arriving(self, group: _Group) -> Array:
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
        outputs = self.points.columns.largest_output_bytes[:, group.point]
        for recompute, times in self._times(group).items():
            for sharded in (False, True) if self.space.sharded_pipelines else (False,):
                turn = self._waited(group, times) if sharded else times.turn
                heaviest = (turn * self.points.columns.repeat[:, None]).argmax(axis=0)
                for chunks in self._chunks(group.stages):
                    for pieces, pairs in self._cuts(group, turn, heaviest, group.stages * chunks):
                        taken = TurnTimes(*(getattr(times, one.name)[:, pairs] for one in fields(TurnTimes)))
                        cut = _Cut(recompute, chunks, pieces, pairs, taken, outputs[:, pairs])
                        for schedules in self._alike(group.stages, chunks):
                            yield from self._ordered(group, cut, schedules, sharded)

    def _waited(self, group: _Group, times: TurnTimes) -> Array:
        """Turns with the gathers and scatters of sharded parameters that they wait for: (sections, pairs)."""
        count, ties = len(self.sections), len(self._of(group, 0).ties)
        sent = self._summed(group, np.eye(count, count + ties)[None], 1, 3)[0, 0]
        goes_back = np.array([section.goes_back for section in self.sections])
        every = np.arange(len(group.point))
        return waited_turns(times, self._gathers(group, every), sent[:, group.member], goes_back)

    def _chunks(self, stages: int) -> tuple[int, ...]:
        repeats = {section.repeat for section in self.sections if section.repeat > 1}
        known = {chunks for repeat in repeats if repeat % stages == 0 for chunks in divisors(repeat // stages)} | {1}
        return tuple(sorted(known if self.space.chunks is None else known & set(self.space.chunks)))

    def _cuts(
        self, group: _Group, turn: Array, heaviest: Index, pieces: int
    ) -> Iterator[tuple[tuple[Chunk, ...], Index]]:
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
                    found = self._cut(group, turn[:, pair], pair, pieces)
                    known.setdefault(found, []).extend(pairs if alike else [pair])
        yield from ((pieces, np.array(found, dtype=np.intp)) for pieces, found in known.items())

    def _cut(self, group: _Group, turn: Array, pair: int, pieces: int) -> tuple[Chunk, ...]:
        """The pieces of one pair; by work, those of its layout do for every microbatch."""
        block = int(self.points.block_of[group.point[pair]])
        program = self.points.programs[block]
        if self.made.software.stages == "even":
            return tuple(self.made.cut(program, turn, pieces))
        if (block, pieces) not in self._pieces:
            self._pieces[block, pieces] = tuple(self.made.cut(program, turn, pieces))
        return self._pieces[block, pieces]

    def _alike(self, stages: int, chunks: int) -> list[list[Schedule]]:
        """Schedules that lay a cut over the stages in the same way."""
        shared: dict[tuple[object, ...], list[Schedule]] = {}
        for schedule in (SCHEDULES[name] for name in self.space.schedules):
            if schedule.takes(chunks):
                places = schedule.pieces(stages, chunks), schedule.hands_on(stages, chunks)
                shared.setdefault((*places, schedule.copies), []).append(schedule)
        return list(shared.values())

    def _ordered(self, group: _Group, cut: _Cut, schedules: list[Schedule], sharded: bool) -> Iterator[Results]:
        """Schedules that lay a cut over the stages in the same way."""
        able = [np.flatnonzero(one.runs(group.stages, group.count[cut.pairs])) for one in schedules]
        if not any(map(len, able)):
            return
        laid, sends = self._dealt(group, cut, schedules[0])
        sends, made = sends[:, cut.pairs], laid.held / laid.copies
        passing = self._passing(group, laid, cut)
        if sharded:
            for schedule, inside in zip(schedules, able, strict=True):
                yield from self._sharded(group, cut, laid, schedule, inside, sends, passing)
            return
        passes = Passes(
            over(made, cut.times.forwards) + sends,
            over(made, cut.times.backwards) + sends,
            over(made, cut.times.weights),
        )
        for schedule, inside in zip(schedules, able, strict=True):
            if len(inside) == len(cut.pairs):
                yield from self._scheduled(group, cut, laid, schedule, cut.pairs, passes, passing)
            elif len(inside):
                here, held = (tuple(np.take(one, inside, axis=1) for one in of) for of in (passes, passing))
                yield from self._scheduled(group, cut, laid, schedule, cut.pairs[inside], Passes(*here), held)

    def _sharded(
        self,
        group: _Group,
        cut: _Cut,
        laid: _Laid,
        schedule: Schedule,
        inside: Index,
        sends: Array,
        passing: Sequence[Array],
    ) -> Iterator[Results]:
        """Those of a cut's pairs, ``inside`` by position, that shard parameters under one schedule."""
        inside = inside[group.ranks[group.member[cut.pairs[inside]]] > 1]
        pairs = cut.pairs[inside]
        count, member = group.count[pairs], group.member[pairs]
        if not len(pairs):
            return
        turn = turn_of_each(laid.held, self._of(group, 0).ties)
        programs = [self._of(group, place) for place in range(len(group.layouts))]
        elements = turn @ np.stack([gathered_elements(one) for one in programs], axis=1)
        width = self.made.formats.parameter
        whole = 2.0 * width * (elements * (laid.held > 0)[..., None]).max(axis=1)
        held, work = (one[:, inside] for one in passing)
        size = held * alive(schedule, group.stages, count, cut.chunks) + work
        size = (size + np.take(self._owned(group, laid, 3) + whole, member, axis=1)).max(axis=0)
        gather = self._slowest("all_gather", self._replicas(group, laid.copies), elements * width)
        after = self._update(group, laid, 3) + self._tied_sums(group, laid)
        times = TurnTimes(*(getattr(cut.times, one.name)[:, inside] for one in fields(TurnTimes)))
        taken = replace(cut, pairs=pairs, times=times)
        for overlapped in self._modes():
            sent, late = self._sent(group, laid, turn, overlapped)
            made = self._sharded_passes(taken, schedule, elements, *(one[..., member] for one in (gather, sent, late)))
            forward, backward, weights = made / laid.copies
            passes = Passes(forward + sends[:, inside], backward + sends[:, inside], weights)
            step = stage_ends(schedule, passes, count, cut.chunks) + after[:, member]
            choice = (cut.recompute, schedule.name, cut.chunks, 3, overlapped)
            yield self._results(group, pairs, choice, step.max(axis=0), size)

    def _sent(self, group: _Group, laid: _Laid, turn: Array, overlapped: bool) -> tuple[Array, Array]:
        """Seconds in which the gradients of a turn of each section are scattered beside the passes, (stages, sections,
        layouts), and those of a chunk behind them, (stages, chunks, layouts)."""
        sent, _ = self._summed(group, turn, laid.copies, 3)
        late = np.zeros((*laid.placed.shape[:2], len(group.layouts)))
        return (sent, late) if overlapped else (0.0 * sent, self._exchange(group, laid, 3, True)[0])

    def _sharded_passes(
        self, cut: _Cut, schedule: Schedule, elements: Array, gather: Array, sent: Array, late: Array
    ) -> Array:
        """Seconds of the passes of stages that gather their layers, (3, stages, pairs); stages alike are made once."""
        known: dict[tuple[object, ...], Array] = {}
        found = []
        goes_back = np.array([section.goes_back for section in self.sections])
        for stage, pieces in enumerate(schedule.pieces(len(gather), cut.chunks)):
            held = tuple(cut.pieces[piece] for piece in pieces)
            key = (held, elements[stage].tobytes(), stage if schedule.copies > 1 else 0)
            if key not in known:
                slow = crowded(cut.times, gather[stage], sent[stage], self.made.software.contention)
                figures = Figures(slow.forwards, slow.backwards, slow.weights, gather[stage], sent[stage])
                gathered, splits = elements[stage].any(axis=1), schedule.splits_backward
                chunks = [
                    sharded_passes(one, figures, gathered, goes_back, splits=splits, late=behind)
                    for one, behind in zip(held, late[stage], strict=True)
                ]
                known[key] = np.sum(chunks, axis=0)
            found.append(known[key])
        return np.stack(found, axis=1)

    def _scheduled(
        self,
        group: _Group,
        cut: _Cut,
        laid: _Laid,
        schedule: Schedule,
        pairs: Index,
        passes: Passes,
        passing: Sequence[Array],
    ) -> Iterator[Results]:
        """One schedule of the pairs that it can run: its passes once, then what each ZeRO and exchange mode adds."""
        count, member, chunks = group.count[pairs], group.member[pairs], cut.chunks
        ends = stage_ends(schedule, passes, count, chunks)
        held = passing[0] * alive(schedule, group.stages, count, chunks) + passing[1]
        several = np.take(group.ranks > 1, member)
        known: dict[tuple[int, bool], tuple[Array, npt.NDArray[np.bool_]]] = {}
        for zero in (zero for zero in self.space.zero if zero < 3):
            owned = self._once(("owned", *laid.stages_key, zero), partial(self._owned, group, laid, zero))
            size = (held + np.take(owned, member, axis=1)).max(axis=0)
            for overlapped in self._modes():
                mode = _kind(zero), overlapped
                if mode not in known:
                    tails = self._tails(group, laid, *mode)
                    tail = self._tail(tails, schedule, passes, chunks, member, (*laid.key, *mode))
                    tail += ends
                    known[mode] = tail.max(axis=0), np.take(self._distinct(tails, overlapped), member)
                step, own = known[mode]
                chosen = np.flatnonzero(own & several if zero else own)
                choice = (cut.recompute, schedule.name, chunks, zero, overlapped)
                yield self._results(group, pairs[chosen], choice, step[chosen], size[chosen])

    def _distinct(self, tails: _Tails, overlapped: bool) -> npt.NDArray[np.bool_]:
        """Layouts of which a mode is a choice of its own: where both are tried, overlapping needs something to send."""
        return tails.sends if overlapped and len(self._modes()) > 1 else np.ones_like(tails.sends)

    def _dealt(self, group: _Group, cut: _Cut, schedule: Schedule) -> tuple[_Laid, Array]:
        """A cut over the stages, and the seconds in which each hands on the outputs of its chunks for one microbatch
        and way, (stages, all pairs); remembered."""
        key = group.stages, cut.chunks, cut.pieces, schedule.name
        if key not in self._laid:
            placed = turns_placed(len(self.sections), cut.pieces, schedule.pieces(group.stages, cut.chunks))
            sends = self._sends(group, cut.pieces, schedule, cut.chunks)
            self._laid[key] = _Laid.of(placed, schedule.copies), sends
        return self._laid[key]

    def _sends(self, group: _Group, pieces: Sequence[Chunk], schedule: Schedule, chunks: int) -> Array:
        """Seconds in which each stage hands on the outputs of its chunks, one microbatch and way: (stages, pairs)."""
        ends = np.zeros((group.stages, len(self.sections)))
        handed = schedule.hands_on(group.stages, chunks)
        for stage, held in enumerate(schedule.pieces(group.stages, chunks)):
            for piece, sent in zip(held, handed[stage], strict=True):
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
        laid = _Laid.of(np.array([[[float(section.repeat) for section in self.sections]]]))
        times, whole = self._times(group), tuple((i, section.repeat) for i, section in enumerate(self.sections))
        every, outputs = np.arange(len(group.point)), self.points.columns.largest_output_bytes[:, group.point]
        cuts = [_Cut(recompute, 1, (whole,), every, turn, outputs) for recompute, turn in times.items()]
        held = [np.sum(self._passing(group, laid, cut), axis=0)[0] for cut in cuts]
        several = group.ranks[group.member] > 1
        for overlapped in self._modes():
            ends = {
                kind: self._ends(group, times, overlapped, kind) for kind in {_kind(zero) for zero in self.space.zero}
            }
            for zero in self.space.zero:
                after = self._after(group, laid, times, zero, overlapped)
                owned = self._owned(group, laid, zero)[0, group.member] + self._whole(group) * (zero == 3)
                pairs = np.flatnonzero(several) if zero else every
                for place, recompute in enumerate(times):
                    step, size = ends[_kind(zero)][place] + after, held[place] + owned
                    yield self._results(
                        group, pairs, (recompute, "1f1b", 1, zero, overlapped), step[pairs], size[pairs]
                    )

    def _whole(self, group: _Group) -> Array:
        """Bytes of parameters that are whole at once where they are sharded, for each pair."""
        largest = self.points.columns.parameters[:, group.point].max(axis=0)
        return np.asarray(2.0 * largest * self.made.formats.parameter)

    def _after(self, group: _Group, laid: _Laid, times: dict[str, TurnTimes], zero: int, overlapped: bool) -> Array:
        """Seconds after the exchange of gradients, for each pair."""
        tails, forward = (
            self._made_tails(group, laid, zero, overlapped, summed=False),
            next(iter(times.values())).forwards,
        )
        return np.asarray(self._gathered(tails, over(laid.held, forward), group.member)[0])

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
        contention, alone = self.made.software.contention, (forward, backward)
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
            once = np.maximum(*walk(plain, *alone, None, [0.0] * len(plain), 0.0))
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
        seconds = self._slowest("all_gather", self._replicas(group), sizes)
        return seconds[:, group.member[pairs]]


def _kind(zero: int) -> int:
    """Configurations whose streams are the same: plain, sharded states, sharded parameters."""
    return 3 if zero == 3 else min(zero, 1)
