"""All configurations of a search as arrays: gathering of priced points, and the arithmetic of
`paleo.step.section_times`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from paleo.lowering.partition import Chunk
from paleo.lowering.program import Program
from paleo.lowering.recompute import Ways
from paleo.parallel.mesh import BATCH_AXES, Axes
from paleo.predict import NORM_BYTES, gradient_operation
from paleo.schedules.base import SCHEDULES, Passes, Schedule
from paleo.search.cases import Choice, Group, Results, Solved, groups
from paleo.search.points import Points
from paleo.search.space import Layout, Space, divisors
from paleo.step.backend import Setting
from paleo.step.gradient_exchange import (
    Sends,
    exposed_gather,
    gathered_shares,
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
from paleo.step.section_times import (
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
from paleo.step.sharded_parameters import Figures, gathered_elements, sharded_passes, turn_of_each, waited_turns
from paleo.step.timeline import Buckets, Turn, turns

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
Count = npt.NDArray[np.int64]
Codes = npt.NDArray[np.integer]
#: How turns follow one another: section, direction, count, whether they gather, whether gradients go out after them.
Shape = tuple[tuple[int, str, int, bool, bool], ...]


class _Kinds:
    """Different turns that the stages of a group's cuts hold, or their chunks: turns of each section, copies of each
    tied parameter, copies of the network. They are few: what they take is found once for each, not for each stage."""

    def __init__(self) -> None:
        self._place: dict[bytes, int] = {}
        self._rows: list[Array] = []

    def places(self, turns: Array, copies: int) -> Index:
        """Positions of turns, (…, sections and ties), among the kinds; new ones are added."""
        rows = np.concatenate([turns, np.full((*turns.shape[:-1], 1), float(copies))], axis=-1)
        found = [self._of(row) for row in rows.reshape(-1, rows.shape[-1])]
        return np.array(found, dtype=np.intp).reshape(turns.shape[:-1])

    def _of(self, row: Array) -> int:
        place = self._place.setdefault(row.tobytes(), len(self._rows))
        if place == len(self._rows):
            self._rows.append(row)
        return place

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def turns(self) -> Array:
        """(kinds, sections and ties)."""
        return np.array(self._rows)[:, :-1]

    @property
    def copies(self) -> Array:
        """Copies of the network of which these are turns: (kinds, 1)."""
        return np.array(self._rows)[:, -1:]


@dataclass(frozen=True, slots=True)
class _Laid:
    """Turns of each section on each stage, (stages, sections), in all ``copies`` of the network, and how they are
    placed in its chunks, (stages, chunks, sections); kinds of both, (stages,) and (stages, chunks)."""

    placed: Array
    held: Array
    copies: int
    kind: Index
    chunk_kind: Index

    @property
    def key(self) -> tuple[object, ...]:
        """Tells them from others of as many stages."""
        return self.chunk_kind.shape, self.chunk_kind.tobytes()

    @property
    def stages_key(self) -> tuple[object, ...]:
        """The same, whatever lies in which chunk."""
        return len(self.kind), self.kind.tobytes()


@dataclass(frozen=True, slots=True)
class _Cut:
    """The network in ``pieces`` for the stages of some cases, ``chunks`` on each: seconds and bytes of those cases'
    sections. With ``sharded`` parameters it is another one, as their gathers weigh, too."""

    chunks: int
    pieces: tuple[Chunk, ...]
    cases: Index
    times: TurnTimes
    largest_outputs: Array
    sharded: bool = False


@dataclass(frozen=True, slots=True)
class _Cells:
    """Places of layouts, the groups in which they sum gradients, and elements of each of `gradient_turns`: (sections
    and ties, cells)."""

    places: list[int]
    groups: Count
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


def _of_cases(times: TurnTimes, cases: Index) -> TurnTimes:
    """Turns of some cases."""
    return TurnTimes(*(getattr(times, one.name)[:, cases] for one in fields(TurnTimes)))


def evaluate(points: Points, layouts: Sequence[Layout], space: Space, made: Setting) -> Results:
    """Every configuration of the space over the layouts."""
    search = _Search(points, layouts, space, made)
    every = list(groups(points, layouts, space))
    solved: list[Solved] = []
    for group in every:
        solved += search.single(group) if group.stages == 1 else search.pipelined(group)
    return Results.of(every, solved)


class _Search:
    def __init__(self, points: Points, layouts: Sequence[Layout], space: Space, made: Setting) -> None:
        self.points, self.layouts, self.space, self.made = points, layouts, space, made
        self.training = not made.run.forward_only
        self.optimizer = made.optimizer
        self.sections = points.programs[0].sections
        self._places: dict[tuple[int, Axes], tuple[int, int]] = {}
        self._kept: dict[tuple[object, ...], Array] = {}
        self._tailed: dict[tuple[object, ...], _Tails] = {}
        self._cells: dict[tuple[int, int, str], _Cells] = {}
        self._in_turn: dict[tuple[object, ...], Sends] = {}
        self._kinds: dict[int, tuple[_Kinds, _Kinds]] = {}
        self._laid: dict[tuple[object, ...], tuple[_Laid, Array]] = {}
        self._pieces: dict[tuple[int, int], tuple[Chunk, ...]] = {}
        self._orders: dict[tuple[int, bool, bool], tuple[Shape, list[Turn]]] = {}

    # what every group needs

    def _times(self, group: Group) -> TurnTimes:
        """Turns of all cases."""
        of, pairs = self.points.columns, group.point[: group.pairs]
        figures = {one.name: getattr(of, one.name)[:, pairs] for one in fields(Columns) if one.name != "repeat"}
        table = Columns(repeat=of.repeat, **figures)
        ways = [Ways.alike(of.repeat, name if self.training else "none") for name in self.space.recompute]
        each = [recomputed(table, one) for one in ways]
        joined = (np.concatenate([getattr(one, name.name) for one in each], axis=1) for name in fields(TurnTimes))
        return TurnTimes(*joined)

    def _once(self, key: tuple[object, ...], made: Callable[[], Array]) -> Array:
        """An array that is made once for its key."""
        if key not in self._kept:
            self._kept[key] = made()
        return self._kept[key]

    def _program(self, group: Group, place: int) -> int:
        """The block of a layout's points."""
        return int(self.points.block_of[group.point[group.first[place]]])

    def _collective(self, operation: str, layouts: Sequence[int], axes: Sequence[Axes], sizes: Array) -> Array:
        """Seconds of one collective for each layout (last axis) and size (axes before it)."""
        return self._slowest(operation, self._ranks(layouts, axes, 1), sizes)

    def _slowest(self, operation: str, groups: Count, sizes: Array) -> Array:
        """Seconds of one collective of ``sizes`` bytes, (…, layouts) or (stages, …, layouts), in the slowest of its
        ``groups``, as `_ranks` gives them."""
        stages = groups.shape[2:3] if sizes.ndim > 1 else ()
        shape = (*groups.shape[:2], *stages, *(1,) * (sizes.ndim - 2), groups.shape[-1])
        whole = (groups.shape[1], *sizes.shape)
        strides, ranks = np.broadcast_to(groups.reshape(shape), (2, *whole)).reshape(2, -1)
        seconds = self.made.fabric.times(operation, strides, ranks, np.broadcast_to(sizes, whole).ravel())
        return np.asarray(seconds.reshape(whole).max(axis=0))

    def _ranks(self, layouts: Sequence[int], axes: Sequence[Axes], copies: int) -> Count:
        """Stride and ranks of the groups over which layouts sum something, with ``copies`` of the network: (2, groups,
        stages, layouts); one stage stands for all where they are alike."""
        if copies == 1:
            places = [self._place(index, one) for index, one in zip(layouts, axes, strict=True)]
            return np.array(places, dtype=np.int64).T[:, None, None]
        found = [
            replica_groups(self.layouts[index].mesh, one, copies) for index, one in zip(layouts, axes, strict=True)
        ]
        alone = (np.ones(self.layouts[layouts[0]].mesh.degree("pp"), dtype=np.int64),) * 2
        most = max(map(len, found))
        return np.array([[*one, *[alone] * (most - len(one))] for one in found]).transpose(2, 1, 3, 0)

    def _place(self, layout: int, axes: Axes) -> tuple[int, int]:
        """Stride and ranks of a layout's groups over some axes."""
        if (layout, axes) not in self._places:
            mesh = self.layouts[layout].mesh
            self._places[layout, axes] = mesh.stride(axes), mesh.ways(axes)
        return self._places[layout, axes]

    def _elements(self, group: Group, which: Literal["parameters", "trained"]) -> Array:
        """Parameter elements of each kind of turns, copies of tied ones too, or those of them that have gradients:
        (kinds, layouts)."""
        return self._once((which, group.stages), lambda: self._counted(group, which))

    def _counted(self, group: Group, which: Literal["parameters", "trained"]) -> Array:
        figures = getattr(self.points.columns, which)[:, group.point[group.first]]
        ties = [self._of(group, place).ties for place in range(len(group.layouts))]
        tied = [[tie.elements * (tie.trained or which == "parameters") for tie in one] for one in ties]
        each = np.concatenate([figures, np.array(tied, dtype=np.float64).T.reshape(-1, figures.shape[1])])
        return np.asarray(self._kinds[group.stages][0].turns @ each)

    def _of(self, group: Group, place: int) -> Program:
        """The program of a layout's points."""
        return self.points.programs[self._program(group, place)]

    def _tails(self, group: Group, laid: _Laid, zero: int, overlapped: bool) -> _Tails:
        """What follows the last backward pass, remembered: gradients, beside it or after it, update, gathering."""
        key = *(laid.key if overlapped else laid.stages_key), zero, overlapped
        if key not in self._tailed:
            self._tailed[key] = self._made_tails(group, laid, zero, overlapped)
        return self._tailed[key]

    def _made_tails(self, group: Group, laid: _Laid, zero: int, overlapped: bool, *, summed: bool = True) -> _Tails:
        """``summed``: with the sums of gradients."""
        bucket = self.made.run.bucket
        sizes = self._elements(group, "trained")[laid.kind] * self.made.formats.parameter
        fixed = self._update(group, zero > 0)[laid.kind]
        gathers = np.zeros_like(fixed)
        if zero in (1, 2) and self.training:
            gathers = self._gathering(group, laid)
        sums = np.zeros((len(fixed), 1, fixed.shape[1]))
        sent = sums
        if summed:
            fixed = fixed + self._tied_sums(group, laid)
            sums, sent = self._exchange(group, laid, zero, overlapped)
        sends = (sums.sum(axis=1) + gathers).any(axis=0)
        if not overlapped:
            fixed, sums = fixed + sums.sum(axis=1), np.zeros_like(sums)
        if not (overlapped and self.made.software.overlap.gather):
            fixed, gathers = fixed + gathers, np.zeros_like(gathers)
        return _Tails(fixed, sums, sendings(sent, bucket), gathers, sendings(sizes, bucket), sends)

    def _gathering(self, group: Group, laid: _Laid) -> Array:
        """Seconds in which each stage of each layout gathers its parameters: (stages, layouts)."""

        def gathered(places: Index | slice) -> Array:
            turns = self._kinds[group.stages][0].turns[places, None]
            return self._gathered_turns(group, turns, laid.copies, "trained")[:, 0]

        if laid.copies > 1:  # how far apart the copies of a stage are is a matter of its place
            return self._once(("gathering", *laid.stages_key), lambda: gathered(laid.kind))
        return self._once(("gathering", group.stages), lambda: gathered(slice(None)))[laid.kind]

    def _tail(
        self, tails: _Tails, schedule: Schedule, passes: Passes, chunks: int, members: Index, key: tuple[object, ...]
    ) -> Array:
        """Seconds of (stages, cases) after the last passes that these do not hide; ``key`` tells the tails from
        others."""
        found, contention = self._gathered(tails, passes.forward, members), self.made.software.overlap.contention
        if contention >= 1.0:  # as `sent_behind` has it: nothing is won
            found += np.take(tails.sums.sum(axis=1), members, axis=1)
        elif tails.sums.any():
            sends = self._sendings(tails, schedule, chunks, key).of(members)
            found += sent_behind(sends, schedule, passes, chunks, contention)
        return found

    def _sendings(self, tails: _Tails, schedule: Schedule, chunks: int, key: tuple[object, ...]) -> Sends:
        """The sums of gradients in the order of a schedule, remembered."""
        key = *key, schedule.name
        if key not in self._in_turn:
            self._in_turn[key] = in_turn(tails.sums, tails.sum_buckets, schedule, chunks)
        return self._in_turn[key]

    def _gathered(self, tails: _Tails, forward: Array, members: Index) -> Array:
        """Seconds that nothing hides, and of gathering that the next forward pass does not hide: (stages, cases)."""
        found = np.take(tails.fixed, members, axis=1)
        if tails.gathers.any():
            gathers, buckets = (np.take(one, members, axis=1) for one in (tails.gathers, tails.gather_buckets))
            found += exposed_gather(gathers, buckets, forward, self.made.software.overlap.contention)
        return found

    def _exchange(self, group: Group, laid: _Laid, zero: int, overlapped: bool) -> tuple[Array, Array]:
        """Seconds in which each chunk of each stage of each layout sums its gradients, and their bytes: (stages,
        chunks, layouts). In one go for all chunks where nothing overlaps."""
        kinds, chunk_kinds = self._kinds[group.stages]
        if laid.copies > 1:  # where a stage is decides how far it is from its copies
            turns = np.concatenate([kinds.turns[laid.kind][:, None], chunk_kinds.turns[laid.chunk_kind]], axis=1)
            found = self._once(("exchange", *laid.key, zero), lambda: self._summed(group, turns, laid.copies, zero))
            return tuple(found[:, :, 1:] if overlapped else found[:, :, :1])
        turns = np.concatenate([kinds.turns, chunk_kinds.turns])[:, None]
        found = self._once(("exchange", group.stages, zero), lambda: self._summed(group, turns, 1, zero))[:, :, 0]
        return tuple(found[:, laid.chunk_kind + len(kinds) if overlapped else laid.kind[:, None]])

    def _summed(self, group: Group, turns: Array, copies: int, zero: int) -> Array:
        """Seconds and bytes of the gradients of some turns, (stages, chunks, sections and ties), for each layout: (2,
        stages, chunks, layouts)."""
        operation, width = gradient_operation(zero), self.made.formats.gradient
        return self._sent_turns(group, turns, self._travelling(group, copies, "gradients"), operation, width)

    def _gathered_turns(self, group: Group, turns: Array, copies: int, which: Literal["trained", "all"]) -> Array:
        """Seconds in which the parameters of some turns are gathered, as in `_summed`: (stages, chunks, layouts)."""
        cells, width = self._travelling(group, copies, which), self.made.formats.parameter
        return np.asarray(self._sent_turns(group, turns, cells, "all_gather", width)[0])

    def _sent_turns(self, group: Group, turns: Array, cells: _Cells, operation: str, width: float) -> Array:
        found = np.zeros((2, *turns.shape[:2], len(group.layouts)))
        if cells.places:
            sizes = turns @ cells.elements * width
            seconds = self._slowest(operation, cells.groups, sizes)
            np.add.at(found.T, cells.places, np.stack([seconds, sizes]).T)
        return found

    def _travelling(self, group: Group, copies: int, what: Literal["gradients", "trained", "all"]) -> _Cells:
        """What each layout of a group sums its gradients over, or gathers parameters from, remembered."""
        if (group.stages, copies, what) not in self._cells:
            known: dict[tuple[object, ...], dict[Axes, Array]] = {}
            cells: list[tuple[int, Axes, Array]] = []
            for place, index in enumerate(group.layouts):
                program, mesh = self._of(group, place), self.layouts[index].mesh
                key = id(program), tuple(axis for axis, degree in mesh.degrees if degree > 1)
                if key not in known:
                    shares = gradient_shares if what == "gradients" else partial(gathered_shares, frozen=what == "all")
                    known[key] = shares(program, mesh, copies)
                cells += [(place, *one) for one in known[key].items()]
            places, axes, elements = zip(*cells, strict=True) if cells else ((), (), ())
            chosen = [group.layouts[place] for place in places]
            groups = self._ranks(chosen, axes, copies) if cells else np.zeros((2, 1, 1, 0), dtype=np.int64)
            self._cells[group.stages, copies, what] = _Cells(list(places), groups, np.array(elements).T)
        return self._cells[group.stages, copies, what]

    def _tied_sums(self, group: Group, laid: _Laid) -> Array:
        """Seconds in which the stages that hold a tied parameter sum its gradients: (stages, layouts)."""
        return self._once(("tied", *laid.stages_key), lambda: self._summed_ties(group, laid))

    def _summed_ties(self, group: Group, laid: _Laid) -> Array:
        found = np.zeros((group.stages, len(group.layouts)))
        pairs = tied_pairs(self._of(group, 0).ties, laid.held) if self.training else []
        for tie, owner, other in pairs:
            key = "tie", group.stages, tie, abs(other - owner)
            found[[owner, other]] += self._once(key, partial(self._summed_tie, group, tie, abs(other - owner)))
        return found

    def _summed_tie(self, group: Group, tie: int, apart: int) -> Array:
        """Seconds in which two stages so far ``apart`` sum a tied parameter's gradients: (layouts,)."""
        strides = np.array([self.layouts[index].mesh.stride(("pp",)) for index in group.layouts])
        ties = [self._of(group, place).ties[tie] for place in range(len(group.layouts))]
        sizes = np.array([one.elements for one in ties]) * self.made.formats.gradient
        return self.made.fabric.times("all_reduce", strides * apart, np.full(len(sizes), 2), sizes)

    def _update(self, group: Group, sharded: bool) -> Array:
        """Seconds of the update of the parameters that a rank owns, clipping too: (kinds, layouts)."""
        return self._once(("update", group.stages, sharded), lambda: self._updated(group, sharded))

    def _updated(self, group: Group, sharded: bool) -> Array:
        kinds = self._kinds[group.stages][0]
        counts = self._elements(group, "trained") / (self._sharers(group) if sharded else 1.0)
        if not self.training:
            return np.zeros_like(counts)
        each = section_figures(self.points.programs[0], "tensors")
        tensors = over(kinds.turns[:, : len(each)], each)[:, None]
        found = self.made.updated(counts, tensors) + self.made.clipped(counts)
        if self.made.clip != "none":
            axes = [clip_axes(int(sharded))] * len(group.layouts)
            found = found + self._collective("all_reduce", group.layouts, axes, np.full(len(axes), NORM_BYTES))
        return found

    def _owned(self, group: Group, laid: _Laid, zero: int) -> Array:
        """Bytes of the states of each stage and of what the process itself takes: (stages, layouts)."""
        return self._once(("owned", group.stages, zero), lambda: self._owning(group, zero))[laid.kind]

    def _owning(self, group: Group, zero: int) -> Array:
        held, learned = (self._elements(group, which) for which in ("parameters", "trained"))
        ranks = self._sharers(group)
        whole = states(held, learned, 0.0, ranks, zero, self.optimizer, self.made.formats, training=self.training)
        own = np.array([self.made.reserved(self.layouts[index].mesh) for index in group.layouts])
        return memory(whole, np.zeros_like(held), own)

    def _sharers(self, group: Group) -> Array:
        """Ranks over which ZeRO shares out the states of each kind of turns: (kinds, layouts)."""
        return self._once(("sharers", group.stages), lambda: self._sharing(group))

    def _sharing(self, group: Group) -> Array:
        kinds = self._kinds[group.stages][0]
        owned = np.zeros((len(kinds), len(group.layouts)))
        for copies in np.unique(kinds.copies).astype(int).tolist():
            alike = np.flatnonzero(kinds.copies[:, 0] == copies)
            owned[alike] = kinds.turns[alike] @ self._mine(group, copies)
        return sharers(self._elements(group, "trained"), owned, group.ranks * kinds.copies)

    def _mine(self, group: Group, copies: int) -> Array:
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

    def _passing(self, group: Group, laid: _Laid, cut: _Cut) -> tuple[Array, Array]:
        """Bytes of all activations of a microbatch, and of what is needed for a moment: (stages, cases)."""
        if not self.training:
            work = workspace(laid.held, cut.largest_outputs, cut.times.transient, 0.0)
            return np.zeros_like(work), work
        bucket = np.where(group.ranks * laid.copies > 1, self.made.run.bucket, 0.0)[group.member[cut.cases]]
        work = workspace(laid.held, cut.largest_outputs, cut.times.transient, bucket)
        return over(laid.held, cut.times.kept), work

    def _solved(self, group: Group, cases: Index, choice: Choice, step: Array, size: Array) -> Solved:
        if self.made.run.input is not None:
            step = np.maximum(step, self._fed(group)[group.member[cases]])
        return Solved(choice, (cases + group.before).astype(np.int32), step, size)

    def _fed(self, group: Group) -> Array:
        """Seconds in which the batch of each layout arrives; 0 for synthetic data."""
        return self._once(("fed", group.stages), lambda: self._arriving(group))

    def _arriving(self, group: Group) -> Array:
        chosen = [self.layouts[index] for index in group.layouts]
        replica, local = (
            np.array(one, dtype=np.float64)
            for one in ([c.mesh.size / c.mesh.replicas for c in chosen], [c.local_batch for c in chosen])
        )
        fed = self.made.fed(self.points.graph, self.made.run.gpus, replica, local)
        return np.zeros(len(chosen)) if fed is None else fed.total

    # pipelines

    def pipelined(self, group: Group) -> Iterator[Solved]:
        """Configurations of two stages or more."""
        cuts = [(cut, self._alike(group.stages, cut.chunks)) for cut in self._all_cuts(group)]
        for cut, ways in cuts:  # all of them first: what they have in common is priced once
            for schedules in ways:
                self._dealt(group, cut, schedules[0])
        for cut, ways in cuts:
            for schedules in ways:
                yield from self._ordered(group, cut, schedules)

    def _all_cuts(self, group: Group) -> Iterator[_Cut]:
        chunks = self._chunks(group.stages)
        if not chunks:
            return
        outputs = self.points.columns.largest_output_bytes[:, group.point]
        times = self._times(group)
        for sharded in (False, True) if self.space.sharded_pipelines else (False,):
            turn = self._waited(group, times) if sharded else times.turn
            heaviest = (turn * self.points.columns.repeat[:, None]).argmax(axis=0)
            for count in chunks:
                for pieces, cases in self._cuts(group, turn, heaviest, group.stages * count):
                    every = len(cases) == len(group.point)
                    taken = times if every else _of_cases(times, cases)
                    yield _Cut(count, pieces, cases, taken, outputs if every else outputs[:, cases], sharded)

    def _waited(self, group: Group, times: TurnTimes) -> Array:
        """Turns with the gathers and scatters of sharded parameters that they wait for: (sections, cases)."""
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
        self, group: Group, turn: Array, heaviest: Index, pieces: int
    ) -> Iterator[tuple[tuple[Chunk, ...], Index]]:
        """Ways to cut the network, each with the cases that it serves: the blocks of a folded network in numbers that
        divide evenly, or any cut where none repeats."""
        folded = any(section.repeat > 1 for section in self.sections)
        known: dict[tuple[Chunk, ...], list[int]] = {}
        for block in np.unique(heaviest).tolist():
            cases = np.flatnonzero(heaviest == block).tolist()
            if self.sections[block].repeat % pieces == 0 or (not folded and pieces <= len(self.sections)):
                # whole blocks dealt out evenly are cut alike for all cases
                alike = folded and self.made.software.parallelism.stages == "even"
                for case in cases[:1] if alike else cases:
                    found = self._cut(group, turn[:, case], case, pieces)
                    known.setdefault(found, []).extend(cases if alike else [case])
        yield from ((pieces, np.array(found, dtype=np.intp)) for pieces, found in known.items())

    def _cut(self, group: Group, turn: Array, case: int, pieces: int) -> tuple[Chunk, ...]:
        """The pieces of one case; by work, those of its layout do for every microbatch."""
        block = int(self.points.block_of[group.point[case]])
        program = self.points.programs[block]
        if self.made.software.parallelism.stages == "even":
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

    def _ordered(self, group: Group, cut: _Cut, schedules: list[Schedule]) -> Iterator[Solved]:
        """Schedules that lay a cut over the stages in the same way."""
        able = [np.flatnonzero(one.runs(group.stages, group.count[cut.cases])) for one in schedules]
        if not any(map(len, able)):
            return
        laid, sends = self._dealt(group, cut, schedules[0])
        sends, made = sends[:, cut.cases], laid.held / laid.copies
        passing = self._passing(group, laid, cut)
        if cut.sharded:
            for schedule, inside in zip(schedules, able, strict=True):
                yield from self._sharded(group, cut, laid, schedule, inside, sends, passing)
            return
        passes = Passes(
            over(made, cut.times.forwards) + sends,
            over(made, cut.times.backwards) + sends,
            over(made, cut.times.weights),
        )
        for schedule, inside in zip(schedules, able, strict=True):
            if len(inside) == len(cut.cases):
                yield from self._scheduled(group, cut, laid, schedule, cut.cases, passes, passing)
            elif len(inside):
                here, held = (tuple(np.take(one, inside, axis=1) for one in of) for of in (passes, passing))
                yield from self._scheduled(group, cut, laid, schedule, cut.cases[inside], Passes(*here), held)

    def _sharded(
        self,
        group: Group,
        cut: _Cut,
        laid: _Laid,
        schedule: Schedule,
        inside: Index,
        sends: Array,
        passing: Sequence[Array],
    ) -> Iterator[Solved]:
        """Those of a cut's cases, ``inside`` by position, that shard parameters under one schedule."""
        inside = inside[group.ranks[group.member[cut.cases[inside]]] > 1]
        cases = cut.cases[inside]
        count, member = group.count[cases], group.member[cases]
        if not len(cases):
            return
        turn = turn_of_each(laid.held, self._of(group, 0).ties)
        programs = [self._of(group, place) for place in range(len(group.layouts))]
        elements = turn @ np.stack([gathered_elements(one) for one in programs], axis=1)
        width = self.made.formats.parameter
        whole = 2.0 * width * (elements * (laid.held > 0)[..., None]).max(axis=1)
        held, work = (one[:, inside] for one in passing)
        size = held * alive(schedule, group.stages, count, cut.chunks) + work
        size = (size + np.take(self._owned(group, laid, 3) + whole, member, axis=1)).max(axis=0)
        gather = self._gathered_turns(group, turn, laid.copies, "all")
        after = self._update(group, True)[laid.kind] + self._tied_sums(group, laid)
        taken = replace(cut, cases=cases, times=_of_cases(cut.times, inside))
        for overlapped in self._modes():
            sent, late = self._sent(group, laid, turn, overlapped)
            made = self._sharded_passes(taken, schedule, elements, *(one[..., member] for one in (gather, sent, late)))
            forward, backward, weights = made / laid.copies
            passes = Passes(forward + sends[:, inside], backward + sends[:, inside], weights)
            step = stage_ends(schedule, passes, count, cut.chunks) + after[:, member]
            choice = Choice.named(schedule.name, cut.chunks, 3, overlapped=overlapped)
            yield self._solved(group, cases, choice, step.max(axis=0), size)

    def _sent(self, group: Group, laid: _Laid, turn: Array, overlapped: bool) -> tuple[Array, Array]:
        """Seconds in which the gradients of a turn of each section are scattered beside the passes, (stages, sections,
        layouts), and those of a chunk behind them, (stages, chunks, layouts)."""
        sent, _ = self._summed(group, turn, laid.copies, 3)
        late = np.zeros((*laid.placed.shape[:2], len(group.layouts)))
        return (sent, late) if overlapped else (0.0 * sent, self._exchange(group, laid, 3, True)[0])

    def _sharded_passes(
        self, cut: _Cut, schedule: Schedule, elements: Array, gather: Array, sent: Array, late: Array
    ) -> Array:
        """Seconds of the passes of stages that gather their layers, (3, stages, cases); stages alike are made once."""
        known: dict[tuple[object, ...], Array] = {}
        found = []
        goes_back = np.array([section.goes_back for section in self.sections])
        for stage, pieces in enumerate(schedule.pieces(len(gather), cut.chunks)):
            held = tuple(cut.pieces[piece] for piece in pieces)
            key = (held, elements[stage].tobytes(), stage if schedule.copies > 1 else 0)
            if key not in known:
                slow = crowded(cut.times, gather[stage], sent[stage], self.made.software.overlap.contention)
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
        group: Group,
        cut: _Cut,
        laid: _Laid,
        schedule: Schedule,
        cases: Index,
        passes: Passes,
        passing: Sequence[Array],
    ) -> Iterator[Solved]:
        """One schedule of the cases that it can run: its passes once, then what each ZeRO and exchange mode adds."""
        count, member, chunks = group.count[cases], group.member[cases], cut.chunks
        ends = stage_ends(schedule, passes, count, chunks)
        held = passing[0] * alive(schedule, group.stages, count, chunks) + passing[1]
        several = np.take(group.ranks > 1, member)
        known: dict[tuple[int, bool], tuple[Array, npt.NDArray[np.bool_]]] = {}
        for zero in (zero for zero in self.space.zero if zero < 3):
            size = (held + np.take(self._owned(group, laid, zero), member, axis=1)).max(axis=0)
            for overlapped in self._modes():
                mode = _kind(zero), overlapped
                if mode not in known:
                    tails = self._tails(group, laid, *mode)
                    tail = self._tail(tails, schedule, passes, chunks, member, (*laid.key, *mode))
                    tail += ends
                    known[mode] = tail.max(axis=0), np.take(self._distinct(tails, overlapped), member)
                step, own = known[mode]
                chosen = np.flatnonzero(own & several if zero else own)
                choice = Choice.named(schedule.name, chunks, zero, overlapped=overlapped)
                yield self._solved(group, cases[chosen], choice, step[chosen], size[chosen])

    def _distinct(self, tails: _Tails, overlapped: bool) -> npt.NDArray[np.bool_]:
        """Layouts of which a mode is a choice of its own: where both are tried, overlapping needs something to send."""
        return tails.sends if overlapped and len(self._modes()) > 1 else np.ones_like(tails.sends)

    def _dealt(self, group: Group, cut: _Cut, schedule: Schedule) -> tuple[_Laid, Array]:
        """A cut over the stages, and the seconds in which each hands on the outputs of its chunks for one microbatch
        and way, (stages, all cases); remembered."""
        key = group.stages, cut.chunks, cut.pieces, schedule.name
        if key not in self._laid:
            placed = turns_placed(len(self.sections), cut.pieces, schedule.pieces(group.stages, cut.chunks))
            sends = self._sends(group, cut.pieces, schedule, cut.chunks)
            self._laid[key] = self._laying(group, placed, schedule.copies), sends
        return self._laid[key]

    def _laying(self, group: Group, placed: Array, copies: int = 1) -> _Laid:
        """Turns in each chunk of each stage, (stages, chunks, sections), with their kinds."""
        kinds, chunk_kinds = self._kinds.setdefault(group.stages, (_Kinds(), _Kinds()))
        held, ties = np.asarray(placed.sum(axis=1)), self._of(group, 0).ties
        kind = kinds.places(gradient_turns(held[:, None], ties)[:, 0], copies)
        return _Laid(placed, held, copies, kind, chunk_kinds.places(gradient_turns(placed, ties), copies))

    def _sends(self, group: Group, pieces: Sequence[Chunk], schedule: Schedule, chunks: int) -> Array:
        """Seconds in which each stage hands on the outputs of its chunks, one microbatch and way: (stages, cases)."""
        ends = np.zeros((group.stages, len(self.sections)))
        handed = schedule.hands_on(group.stages, chunks)
        for stage, held in enumerate(schedule.pieces(group.stages, chunks)):
            for piece, sent in zip(held, handed[stage], strict=True):
                ends[stage, pieces[piece][-1][0]] += sent / schedule.copies
        found = np.zeros((group.stages, len(group.point)))
        for section in np.flatnonzero(ends.any(axis=0)).tolist():
            found += ends[:, section, None] * self._send(group, section)
        return found

    def _send(self, group: Group, section: int) -> Array:
        """Seconds in which a stage that ends with a section hands its output on, for each case."""
        key = ("send", group.stages, section)
        if key not in self._kept:
            chosen, pairs = [self.layouts[i] for i in group.layouts], slice(group.pairs)
            split = np.array([1.0 if one.sequence_parallel else float(one.mesh.degree("tp")) for one in chosen])
            sizes = self.points.output_bytes[section, group.point[pairs]] / split[group.member[pairs]]
            places = self._ranks(group.layouts, [("pp",)] * len(chosen), 1)
            seconds = self._slowest("send_recv", places[..., group.member[pairs]], sizes)
            self._kept[key] = np.tile(seconds, len(group.point) // group.pairs)
        return self._kept[key]

    # one stage

    def single(self, group: Group) -> Iterator[Solved]:
        """Configurations without a pipeline."""
        laid = self._laying(group, np.array([[[float(section.repeat) for section in self.sections]]]))
        times, whole = self._times(group), tuple((i, section.repeat) for i, section in enumerate(self.sections))
        every, outputs = np.arange(len(group.point)), self.points.columns.largest_output_bytes[:, group.point]
        held = np.sum(self._passing(group, laid, _Cut(1, (whole,), every, times, outputs)), axis=0)[0]
        several = np.flatnonzero(group.ranks[group.member] > 1)
        for overlapped in self._modes():
            ends = {
                kind: self._ends(group, times, overlapped, kind) for kind in {_kind(zero) for zero in self.space.zero}
            }
            for zero in self.space.zero:
                step = ends[_kind(zero)] + self._after(group, laid, times, zero, overlapped)
                owned = self._owned(group, laid, zero)[0, group.member] + self._whole(group) * (zero == 3)
                cases = several if zero else every
                choice = Choice.named("1f1b", 1, zero, overlapped=overlapped)
                yield self._solved(group, cases, choice, step[cases], (held + owned)[cases])

    def _whole(self, group: Group) -> Array:
        """Bytes of parameters that are whole at once where they are sharded, for each case."""
        largest = self.points.columns.parameters[:, group.point].max(axis=0)
        return np.asarray(2.0 * largest * self.made.formats.parameter)

    def _after(self, group: Group, laid: _Laid, times: TurnTimes, zero: int, overlapped: bool) -> Array:
        """Seconds after the exchange of gradients, for each case."""
        tails = self._made_tails(group, laid, zero, overlapped, summed=False)
        return np.asarray(self._gathered(tails, over(laid.held, times.forwards), group.member)[0])

    def _modes(self) -> tuple[bool, ...]:
        """Whether gradients travel during backward: as the run or the space says, else both ways."""
        if self.space.overlapped is not None:
            return (self.space.overlapped,)
        return (False, True) if self.made.run.exchange is None else (self.made.overlapped,)

    def _ends(self, group: Group, times: TurnTimes, overlapped: bool, kind: int) -> Array:
        """When gradients have travelled, before the update, for each case."""
        formats = self.made.formats
        buckets = Buckets(self.made.run.bucket, formats.gradient, overlapped, kind == 3)
        orders: dict[Shape, list[tuple[int, list[Turn]]]] = {}
        for place in np.flatnonzero(group.ranks > 1).tolist() if kind == 3 else range(len(group.layouts)):
            shape, order = self._order(self.points.programs[self._program(group, place)], buckets)
            orders.setdefault(shape, []).append((place, order))
        found = np.zeros(len(group.point))
        for members in orders.values():
            cases = np.flatnonzero(np.isin(group.member, [place for place, _ in members]))
            found[cases] = self._walked(group, times, buckets, members, cases, kind)
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
        group: Group,
        times: TurnTimes,
        buckets: Buckets,
        members: Sequence[tuple[int, list[Turn]]],
        cases: Index,
        kind: int,
    ) -> Array:
        """The streams of layouts whose turns follow one another in the same way."""
        forward, backward = times.forwards[:, cases], (times.backwards + times.weights)[:, cases]
        column = np.zeros(len(group.layouts), dtype=np.intp)
        column[[place for place, _ in members]] = np.arange(len(members))
        member, order = column[group.member[cases]], members[0][1]
        seconds = self._buckets(group, members, kind)
        sent: list[Array | float] = [row[member] if row.any() else 0.0 for row in seconds]
        gather = self._gathers(group, cases) if buckets.sharded else None
        contention, alone = self.made.software.overlap.contention, (forward, backward)
        if contention and (buckets.overlapped or buckets.sharded):
            beside = np.zeros((1, 1)) if gather is None else gather
            sums = self._gradients(group, members, buckets, kind)[:, member]
            plain_backward = (times.backward + times.weights)[:, cases]
            forward = forward + contention * np.minimum(times.forward[:, cases], beside)
            backward = backward + contention * np.minimum(plain_backward, beside + sums)
        if buckets.sharded:
            once = np.maximum(*walk(order, forward, backward, gather, sent, 0.0))
        else:
            plain = turns(self.points.programs[self._program(group, members[0][0])], buckets, last=False)
            once = np.maximum(*walk(plain, *alone, None, [0.0] * len(plain), 0.0))
        return np.maximum(*walk(order, forward, backward, gather, sent, (group.count[cases] - 1.0) * once))

    def _buckets(self, group: Group, members: Sequence[tuple[int, list[Turn]]], kind: int) -> Array:
        """Seconds of what goes out after each turn: (turns, layouts)."""
        columns: dict[int, list[int]] = {}
        for column, (_, order) in enumerate(members):
            columns.setdefault(id(order), []).append(column)
        cells: list[tuple[int, Axes, float, list[int]]] = []
        for own in columns.values():
            sent: dict[tuple[Axes, float], list[int]] = {}
            for number, turn in enumerate(members[own[0]][1]):
                for bucket in turn.buckets:
                    sent.setdefault(bucket, []).append(number)
            cells += [(column, *bucket, after) for column in own for bucket, after in sent.items()]
        found = np.zeros((len(members[0][1]), len(members)))
        if cells:
            chosen = [group.layouts[members[column][0]] for column, *_ in cells]
            axes, sizes = [cell[1] for cell in cells], np.array([cell[2] for cell in cells])
            seconds = self._collective(gradient_operation(kind), chosen, axes, sizes)
            for (column, _, _, after), each in zip(cells, seconds.tolist(), strict=True):
                np.add.at(found[:, column], after, each)
        return found

    def _gradients(self, group: Group, members: Sequence[tuple[int, list[Turn]]], buckets: Buckets, kind: int) -> Array:
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

    def _gathers(self, group: Group, cases: Index) -> Array:
        """Seconds in which a section's parameters are gathered: (sections, cases)."""
        count, ties = len(self.sections), len(self._of(group, 0).ties)
        seconds = self._gathered_turns(group, np.eye(count, count + ties)[None], 1, "all")[0]
        return np.asarray(seconds[:, group.member[cases]])


def _kind(zero: int) -> int:
    """Configurations whose streams are the same: plain, sharded states, sharded parameters."""
    return 3 if zero == 3 else min(zero, 1)
