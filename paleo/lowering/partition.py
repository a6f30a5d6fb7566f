"""The cut of a program into pipeline stages: whole layers and whole turns of repeated blocks, in order."""

from __future__ import annotations

from collections.abc import Sequence

from paleo.errors import PlanError
from paleo.lowering.program import Program, Section
from paleo.specs.run import Cut

#: A run of layers on one stage: positions of sections, each with how many of its turns are here.
Chunk = tuple[tuple[int, int], ...]
#: Room for rounding when weights are added up.
_SLACK = 1.0 + 2.0**-40


def cut(program: Program, weights: Sequence[float], pieces: int, how: Cut | None = None) -> list[Chunk]:
    """``pieces`` runs of layers, cut ``how`` a run says. Left to itself: where the heaviest block's turns divide evenly
    they are dealt out evenly, as Megatron does, with what comes before on the first piece and what comes after on the
    last; else the slowest piece is made as light as it can be.

    ``weights``: seconds of one turn of each section, forward and backward.
    """
    sections = program.sections
    if isinstance(how, tuple):
        return _by_hand(program, how)
    if pieces == 1:
        return [tuple((index, section.repeat) for index, section in enumerate(sections))]
    heaviest = max(range(len(sections)), key=lambda i: weights[i] * sections[i].repeat)
    turns = sections[heaviest].repeat
    if how != "time" and turns % pieces == 0:
        return _dealt(program, heaviest, pieces)
    if how == "uniform":
        problem = f"the {turns} layers of {sections[heaviest].name!r} cannot be dealt out over {pieces} pieces"
        raise PlanError(f"cut 'uniform': {problem}; use cut=time, or state the layers of each piece")
    return _balanced(program, weights, pieces)


def _by_hand(program: Program, layers: Sequence[int]) -> list[Chunk]:
    """Pieces of stated numbers of layers: turns of repeated blocks where there are any, with the sections between them
    beside the turn before (the first ones beside the first turn); else whole sections."""
    folded = any(section.repeat > 1 for section in program.sections)
    counts = [section.repeat if section.repeat > 1 or not folded else 0 for section in program.sections]
    if sum(layers) != sum(counts):
        stated = f"cut {list(layers)}: adds up to {sum(layers)} layers"
        raise PlanError(f"{stated}; the network has {sum(counts)} to deal out")
    pieces: list[list[tuple[int, int]]] = [[]]
    left = list(layers)
    for index, (section, count) in enumerate(zip(program.sections, counts, strict=True)):
        if not count:
            pieces[-1].append((index, section.repeat))
        while count:
            if not left[0]:
                left.pop(0)
                pieces.append([])
            turns = min(count, left[0])
            pieces[-1].append((index, turns))
            count, left[0] = count - turns, left[0] - turns
    return [tuple(piece) for piece in pieces]


def cut_by_work(program: Program, pieces: int) -> list[Chunk]:
    """``pieces`` runs of layers by the work of their products of weights, as nanotron cuts: a piece takes layers until
    the sum from the first one on has passed its share of the whole, so early pieces are the fuller ones and the output
    layer counts. Where that leaves a piece empty, as ``cut`` does it."""
    work = [product_flops(section) for section in program.sections]
    total = sum(one * section.repeat for one, section in zip(work, program.sections, strict=True))
    found: list[list[int]] = [[]]
    done = 0.0
    for index, section in enumerate(program.sections):
        for _ in range(section.repeat):
            found[-1].append(index)
            done += work[index]
            if len(found) < pieces and done > total * len(found) / pieces * _SLACK:
                found.append([])
    return [_counted(piece) for piece in found] if len(found) == pieces and found[-1] else cut(program, work, pieces)


def product_flops(section: Section) -> float:
    """FLOP of the forward products of one turn that have weights in them: those of attention's core count for none."""
    counted = [one for one in section.kernels if one.kernel.family == "gemm" and not one.core]
    return sum(one.times * one.kernel.flops for one in counted if one.kernel.phase == "forward")


def _dealt(program: Program, block: int, pieces: int) -> list[Chunk]:
    turns = program.sections[block].repeat // pieces
    chunks: list[list[tuple[int, int]]] = [[(block, turns)] for _ in range(pieces)]
    chunks[0][:0] = [(i, program.sections[i].repeat) for i in range(block)]
    chunks[-1] += [(i, program.sections[i].repeat) for i in range(block + 1, len(program.sections))]
    return [tuple(chunk) for chunk in chunks]


def _balanced(program: Program, weights: Sequence[float], pieces: int) -> list[Chunk]:
    """Contiguous pieces whose heaviest is as light as possible, by bisection on the heaviest weight."""
    units = [(i, weights[i]) for i, section in enumerate(program.sections) for _ in range(section.repeat)]
    if len(units) < pieces:
        raise PlanError(f"{len(units)} layers cannot be cut into {pieces} pipeline stages")
    low, high = max(weight for _, weight in units), sum(weight for _, weight in units)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(units, middle)) <= pieces else (middle, high)
    found = _filled(units, high)
    while len(found) < pieces:
        longest = max(range(len(found)), key=lambda i: len(found[i]))
        half = len(found[longest]) // 2
        found[longest : longest + 1] = [found[longest][:half], found[longest][half:]]
    return [_counted(piece) for piece in found]


def _filled(units: list[tuple[int, float]], most: float) -> list[list[int]]:
    """Fill pieces one after another up to a weight."""
    found: list[list[int]] = [[]]
    total = 0.0
    for index, weight in units:
        if found[-1] and total + weight > most * _SLACK:
            found.append([])
            total = 0.0
        found[-1].append(index)
        total += weight
    return found


def _counted(piece: list[int]) -> Chunk:
    return tuple((index, piece.count(index)) for index in dict.fromkeys(piece))
