"""Repeated parts of a chain of entries, found by comparing it with itself shifted, and folded into loops of one
carried tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from paleo.importers._builder import LayerEntry

#: How many places are tried for a repetition, in all and in one run, and how long an iteration may be.
MOST_TRIALS, MOST_STARTS, LONGEST_BODY = 4000, 16, 3000


@dataclass(eq=False)
class Loop:
    """``times`` iterations of ``body``: ``carry`` enters the first, ``last`` is what the last one gives."""

    times: int
    body: list[Item]
    carry: LayerEntry | str
    last: LayerEntry


Marks = npt.NDArray[np.int64]
Item = LayerEntry | Loop
Ref = LayerEntry | str | None


def fold(entries: Sequence[LayerEntry]) -> list[Item]:
    """The entries with every repeated part folded, largest saving first."""
    consumers: dict[LayerEntry, list[LayerEntry]] = {}
    for entry in entries:
        for ref in _refs(entry):
            if isinstance(ref, LayerEntry):
                consumers.setdefault(ref, []).append(entry)
    kinds: dict[str, int] = {}
    marks = np.array([kinds.setdefault(_signature(entry), len(kinds)) for entry in entries], dtype=np.int64)
    return _folded(list(entries), marks, consumers)


def _refs(entry: LayerEntry) -> list[Ref]:
    return [*entry.inputs, entry.share, entry.tie]


def _signature(entry: LayerEntry) -> str:
    lent = [entry.share is None, entry.tie is None, entry.frozen, entry.flops_backward]
    return json.dumps(
        [entry.kind, entry.options, len(entry.inputs), lent, entry.out.dims, entry.out.sizes], default=str
    )


def _folded(entries: list[LayerEntry], marks: Marks, consumers: dict[LayerEntry, list[LayerEntry]]) -> list[Item]:
    best = _best(entries, marks, consumers)
    if best is None:
        return list(entries)
    start, length, times, carry = best
    stop = start + length * times
    body = _folded(entries[start : start + length], marks[start : start + length], consumers)
    loop = Loop(times, body, carry, entries[stop - 1])
    left = _folded(entries[:start], marks[:start], consumers)
    right = _folded(entries[stop:], marks[stop:], consumers)
    return list(chain(left, [loop], right))


def _best(
    entries: list[LayerEntry], marks: Marks, consumers: dict[LayerEntry, list[LayerEntry]]
) -> tuple[int, int, int, LayerEntry | str] | None:
    """The repetition that saves most entries: start, length, times, and what its first iteration takes."""
    repetitions = _candidates(marks, _reaching_over(entries, consumers))
    candidates = sorted(repetitions, key=lambda r: (-r[1] * (r[2] - 1), r[1], r[0]))
    for start, length, times in candidates[:MOST_TRIALS]:
        carry = _carried(entries, start, length, times, consumers)
        if carry is not None:
            return start, length, times, carry
    return None


def _reaching_over(entries: list[LayerEntry], consumers: dict[LayerEntry, list[LayerEntry]]) -> Marks:
    """For each boundary the last entry that is read beyond the boundary, apart from the entry just before it."""
    places = {entry: place for place, entry in enumerate(entries)}
    over = np.full(len(entries) + 1, -1, dtype=np.int64)
    for place, entry in enumerate(entries):
        readers = [places.get(reader, len(entries)) for reader in consumers.get(entry, ())]
        over[place + 2 : max(readers, default=0) + 1] = place
    return over


def _candidates(marks: Marks, over: Marks) -> Iterator[tuple[int, int, int]]:
    """(start, length, times) where the chain equals itself shifted, and an iteration hands on its last output alone."""
    count = len(marks)
    for length in range(1, min(count // 2, LONGEST_BODY) + 1):
        same = np.concatenate(([False], marks[:-length] == marks[length:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            starts = np.arange(begin, min(begin + length + 1, end - length + 1))
            for start in starts[over[starts + length] < starts][:MOST_STARTS].tolist():
                times = (end - start) // length + 1
                if times >= 2 and length * (times - 1) >= 2:
                    yield start, length, times


def _carried(
    entries: list[LayerEntry], start: int, length: int, times: int, consumers: dict[LayerEntry, list[LayerEntry]]
) -> LayerEntry | str | None:
    """The tensors that the first iteration takes from outside and every later one from the iteration before; None
    without a loop."""
    places = {entry: place for place, entry in enumerate(entries[start : start + length * times])}
    carry: LayerEntry | str | None = None
    for place in range(length):
        iterations = [_refs(entries[start + iteration * length + place]) for iteration in range(times)]
        for refs in zip(*iterations, strict=True):
            kind = _relation(refs, place, length, places)
            if kind is None:
                return None
            if kind == "carried":
                first = refs[0]
                if first is None or (carry is not None and carry is not first):
                    return None
                carry = first
    last = entries[start + length - 1]
    if carry is None or not _like(carry, last):
        return None
    return carry if _private(entries, start, length, times, places, consumers) else None


def _like(carry: LayerEntry | str, last: LayerEntry) -> bool:
    """Whether the tensor that enters an iteration has the shape of the one that leaves it. Inputs of the network are
    checked by the graph."""
    return isinstance(carry, str) or (carry.out.dims, carry.out.sizes) == (last.out.dims, last.out.sizes)


def _relation(refs: tuple[Ref, ...], place: int, length: int, places: dict[LayerEntry, int]) -> str | None:
    """Where an input stands in every iteration: inside it, outside, or carried from the iteration before."""
    inside = [places.get(ref) if isinstance(ref, LayerEntry) else None for ref in refs]
    if all(position is None for position in inside):
        return "outside" if all(ref is refs[0] or ref == refs[0] for ref in refs) else None
    if all(
        position is not None and position // length == iteration and position % length == inside[0]
        for iteration, position in enumerate(inside)
    ):
        return "inside"
    carried = all(position == iteration * length - 1 for iteration, position in enumerate(inside) if iteration)
    return "carried" if inside[0] is None and carried else None


def _private(
    entries: list[LayerEntry],
    start: int,
    length: int,
    times: int,
    places: dict[LayerEntry, int],
    consumers: dict[LayerEntry, list[LayerEntry]],
) -> bool:
    """Whether nothing but the last output of an iteration is read outside it."""
    for entry, position in places.items():
        iteration, place = divmod(position, length)
        for reader in consumers.get(entry, ()):
            read_at = places.get(reader)
            if read_at is not None and read_at // length == iteration:
                continue
            follows = iteration == times - 1 if read_at is None else read_at // length == iteration + 1
            if place != length - 1 or not follows:
                return False
    return True
