"""Folding of repeated entries into loops.

Repetitions are found by comparing the chain of entries with itself, shifted. A loop carries one tensor from each
iteration to the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from paleo.importers._builder import LayerEntry

#: Most places that are tried for a repetition, in all and in one run, and the longest iteration.
MOST_TRIALS, MOST_STARTS, LONGEST_BODY = 4000, 16, 3000


@dataclass(eq=False)
class Loop:
    """``times`` iterations of ``body``: ``carry`` is the input of the first, ``last`` the output of the last one."""

    times: int
    body: list[Item]
    carry: LayerEntry | str
    last: LayerEntry


Marks = npt.NDArray[np.int64]
Item = LayerEntry | Loop
Ref = LayerEntry | str | None


def fold(entries: Sequence[LayerEntry]) -> list[Item]:
    """Fold every repeated part of the entries, starting with the largest saving."""
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
    """Return the repetition that saves most entries: start, length, number of iterations, and input of the first
    iteration."""
    # Return for each boundary the last entry that reads across it, except from the entry just before it.
    places = {entry: place for place, entry in enumerate(entries)}
    over = np.full(len(entries) + 1, -1, dtype=np.int64)
    for place, entry in enumerate(entries):
        readers = [places.get(reader, len(entries)) for reader in consumers.get(entry, ())]
        over[place + 2 : max(readers, default=0) + 1] = place
    repetitions = _candidates(marks, over)
    candidates = sorted(repetitions, key=lambda r: (-r[1] * (r[2] - 1), r[1], r[0]))
    for start, length, times in candidates[:MOST_TRIALS]:
        carry = _carried(entries, start, length, times, consumers)
        if carry is not None:
            return start, length, times, carry
    return None


def _candidates(marks: Marks, over: Marks) -> Iterator[tuple[int, int, int]]:
    """Yield (start, length, times) where the chain repeats and an iteration passes on only its last output."""
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
    """Return the tensor that each iteration takes from the one before and the first one from outside; None if not a
    loop."""
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
    if carry is None or not _has_same_shape(carry, last):
        return None
    return carry if _is_self_contained(entries, start, length, times, places, consumers) else None


def _has_same_shape(carry: LayerEntry | str, last: LayerEntry) -> bool:
    """Return True if the tensor entering an iteration has the shape of the one leaving it.

    The graph checks the inputs of the network.
    """
    return isinstance(carry, str) or (carry.out.dims, carry.out.sizes) == (last.out.dims, last.out.sizes)


def _relation(refs: tuple[Ref, ...], place: int, length: int, places: dict[LayerEntry, int]) -> str | None:
    """Say where an input comes from in every iteration: inside, outside, or the iteration before."""
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


def _is_self_contained(
    entries: list[LayerEntry],
    start: int,
    length: int,
    times: int,
    places: dict[LayerEntry, int],
    consumers: dict[LayerEntry, list[LayerEntry]],
) -> bool:
    """Return True if only the last output of an iteration is read outside it."""
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
