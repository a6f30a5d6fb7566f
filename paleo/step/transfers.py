"""Seconds of the collectives of layers, priced for many programs at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from paleo.lowering.program import Program, Transfer
from paleo.parallel.mesh import Mesh
from paleo.pricing.communication import Fabric

Array = npt.NDArray[np.float64]


def collectives(program: Program) -> Iterator[tuple[int, Transfer]]:
    """The collectives of layers, each with the position of its section."""
    for index, section in enumerate(program.sections):
        for transfer in section.transfers:
            yield index, transfer


def transfer_seconds(
    fabric: Fabric, programs: Sequence[tuple[Mesh, Program]], payloads: Sequence[Array]
) -> list[Array]:
    """Seconds of the `collectives` of each program with some ``payloads``, (collectives, points) each and back; one
    call for each operation. The call of the host is counted with its kernels, not here."""
    seconds = [np.zeros(each.shape) for each in payloads]
    cells: dict[str, list[tuple[int, int, int, int]]] = {}
    device = replace(fabric, host=0.0)
    for index, (mesh, program) in enumerate(programs):
        for row, (_, transfer) in enumerate(collectives(program)):
            place = index, row, mesh.stride((transfer.axis,)), mesh.degree(transfer.axis)
            cells.setdefault(transfer.operation, []).append(place)
    for operation, members in cells.items():
        counts = [payloads[index].shape[1] for index, *_ in members]
        strides, ranks = (np.repeat([cell[part] for cell in members], counts) for part in (2, 3))
        sizes = np.concatenate([payloads[index][row] for index, row, *_ in members])
        each = np.split(device.times(operation, strides, ranks, sizes), np.cumsum(counts)[:-1])
        for (index, row, *_), priced in zip(members, each, strict=True):
            seconds[index][row] = priced
    for index, (mesh, program) in enumerate(programs):
        for row, (_, transfer) in enumerate(collectives(program)):
            if transfer.once:
                seconds[index][row] += fabric.handshakes(mesh.stride((transfer.axis,)), mesh.degree(transfer.axis))
    return seconds
