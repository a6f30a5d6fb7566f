"""The collectives that layers wait for, by name, as a timeline shows them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paleo.lowering.program import Program, Section, Transfer
from paleo.step.batch import Batch
from paleo.step.streams import Direction
from paleo.step.transfers import collectives, transfer_seconds


@dataclass(frozen=True, slots=True)
class NamedCollective:
    """Seconds that computation waits for a collective, and its payload [byte]."""

    name: str
    seconds: float
    bytes: float


def section_collectives(batch: Batch, program: Program) -> list[dict[Direction, list[NamedCollective]]]:
    """The collectives that one layer iteration of each section waits for, by direction, of the first case of a batch
    that runs ``program``. What a section waits for in all is shared out over them by their seconds alone."""
    payloads = np.array([[each.payload_bytes] for _, each in collectives(program)]).reshape(-1, 1)
    [priced] = transfer_seconds(batch.backend.fabric, [(batch.layouts.meshes[0], program)], [payloads])
    alone: list[list[tuple[Transfer, float]]] = [[] for _ in program.sections]
    for (section, transfer), seconds in zip(collectives(program), priced[:, 0].tolist(), strict=True):
        alone[section].append((transfer, seconds * transfer.times))
    forward, backward = batch.times.forward_transfers[:, 0], batch.times.backward_transfers[:, 0]
    return [
        {
            "forward": _waited(section, alone[row], "forward", float(forward[row])),
            "backward": _waited(section, alone[row], "backward", float(backward[row])),
        }
        for row, section in enumerate(program.sections)
    ]


def _waited(
    section: Section, transfers: list[tuple[Transfer, float]], direction: Direction, total: float
) -> list[NamedCollective]:
    """The collectives of one direction, which add up to ``total`` seconds; backward has those of the forward pass again
    that full recomputation repeats. What no collective explains is the traffic of an offload."""
    again = direction == "backward" and section.recompute == "full"
    owed = [(each, s) for each, s in transfers if each.phase == direction or (again and each.again)]
    known = sum(seconds for _, seconds in owed)
    if total <= 0:
        return []
    if known == 0:
        return [NamedCollective(f"{section.name}: host memory", total, 0.0)]
    return [
        NamedCollective(f"{each.name} {each.operation} over {each.axis}", s * total / known, each.payload_bytes)
        for each, s in owed
        if s > 0
    ]


def chunk_collectives(batch: Batch, program: Program) -> list[list[dict[str, list[NamedCollective]]]]:
    """The collectives that each pass of each chunk of each stage waits for, by the kind of the pass (F, B, W)."""
    by_section, assignment = section_collectives(batch, program), batch.assignment
    kinds: tuple[tuple[str, Direction], ...] = (("F", "forward"), ("B", "backward"))
    passes = [
        {kind: _of_piece(by_section, piece, direction) for kind, direction in kinds} | {"W": []}
        for piece in assignment.pieces
    ]
    places = batch.schedule.pieces(assignment.stages, assignment.chunks)
    return [[passes[piece] for piece in pieces] for pieces in places]


def _of_piece(
    by_section: list[dict[Direction, list[NamedCollective]]], piece: tuple[tuple[int, int], ...], direction: Direction
) -> list[NamedCollective]:
    """Those of all layers of a piece, each name once."""
    return [
        NamedCollective(each.name, each.seconds * layers, each.bytes * layers)
        for section, layers in piece
        for each in by_section[section][direction]
    ]
