"""Unique blocks priced once: for every layout of layers and every microbatch, the seconds and bytes of each section.

Counts of a rank's layers are affine in its microbatch, but for sparse ones that a small batch does not fill (rows of an embedding): so
each count is the lower or the upper of two lines, and four lowerings of a layout give all of its microbatches (a fifth checks it on
the first layout). Where that fails, each microbatch is lowered by itself. Equal kernels of all points are priced once, in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from paleo.assemble import BYTES, Columns, Sums, columns, waits
from paleo.errors import PlanError
from paleo.graph import Graph, build
from paleo.lower import Program
from paleo.parallel.mesh import Mesh
from paleo.parallel.placement import STRATEGIES
from paleo.predict import Setting
from paleo.search.space import Layout
from paleo.specs.model import ModelSpec
from paleo.work import Kernel

Array = npt.NDArray[np.float64]
#: Figures of sections beside kernels: those of `Columns`, and what a pipeline stage hands on.
SIZES = (*BYTES, "output_bytes")
#: Numbers of a kernel before those of its shape.
_COUNTS = 4
#: Relative difference up to which a count lies on a line.
_SAME = 2.0**-44
#: Microbatches that are lowered where there are more: two at either end.
_ENDS = 4

Key = tuple[int, int, int, int, bool]


@dataclass(frozen=True, slots=True)
class Block:
    """The layers of one layout at several microbatches. ``values``: (microbatches, numbers of the program, one after another)."""

    program: Program
    mesh: Mesh
    microbatches: tuple[int, ...]
    values: Array


@dataclass(frozen=True, slots=True)
class Points:
    """All points: columns of (sections, points), the program behind each block, and where to find a layout's microbatch."""

    columns: Columns
    output_bytes: Array
    programs: tuple[Program, ...]
    block_of: npt.NDArray[np.intp]
    where: dict[tuple[Key, int], int]
    key: Callable[[Layout], Key]

    def point(self, layout: Layout, microbatch: int) -> int | None:
        """The point of a layout at a microbatch; None where its layers cannot be divided so."""
        return self.where.get((self.key(layout), microbatch))


def priced(model: ModelSpec, made: Setting, layouts: Sequence[Layout], sizes: Callable[[Layout], Sequence[int]]) -> Points:
    """Every point of the layouts, each at the microbatches of ``sizes``."""
    blocks = _Blocks(model, made)
    key = blocks.key(layouts)
    wanted: dict[Key, set[int]] = {}
    for layout in layouts:
        wanted.setdefault(key(layout), set()).update(sizes(layout))
    keyed = [(one, block) for one, counts in wanted.items() for block in blocks.of(one, sorted(counts))]
    if not keyed:
        raise PlanError(f"{blocks.problem or 'no way to lay the network over these gpus'}")
    where: dict[tuple[Key, int], int] = {}
    for one, block in keyed:
        where.update({(one, size): len(where) + i for i, size in enumerate(block.microbatches)})
    table, output = _columns([block for _, block in keyed], made)
    lengths = [len(block.microbatches) for _, block in keyed]
    return Points(table, output, tuple(b.program for _, b in keyed), np.repeat(np.arange(len(keyed)), lengths), where, key)


class _Blocks:
    """Lowers layouts; remembers graphs, whether counts lie on lines, and why the last layout could not be lowered."""

    def __init__(self, model: ModelSpec, made: Setting) -> None:
        self.model, self.made = model, made
        self.problem = ""
        self._graphs: dict[int, Graph] = {}
        self._lined: bool | None = None

    def key(self, layouts: Sequence[Layout]) -> Callable[[Layout], Key]:
        """What a layout's layers depend on: tp, cp, ep, sequence parallelism, and dp only where some layer looks at it."""
        exact = any(
            "capacity" in tensor.dims
            for node in self.graph(1).nodes
            for operation in node.operations
            for tensor in (*operation.reads, operation.out)
        )

        def found(layout: Layout) -> Key:
            tp, cp, ep, dp = (layout.mesh.degree(axis) for axis in ("tp", "cp", "ep", "dp"))
            return tp, cp, ep, dp if exact else min(dp, 2), layout.sequence_parallel

        return found

    def graph(self, batch: int) -> Graph:
        """The network at a batch, built once."""
        if batch not in self._graphs:
            self._graphs[batch] = build(self.model, batch=batch, choices=self.made.choices, overrides=self.made.run.model)
        return self._graphs[batch]

    def of(self, key: Key, microbatches: Sequence[int]) -> list[Block]:
        """The block of a layout, or one for each microbatch; none where its layers cannot be divided so."""
        try:
            if len(microbatches) <= _ENDS:
                return self._each(key, microbatches)
            ends = [self._lower(key, size) for size in (*microbatches[:2], *microbatches[-2:])]
            rows = [_values(program) for program in ends]
            if len({len(row) for row in rows}) > 1 or self._lined is False:
                return self._each(key, microbatches)
            values = _lines(np.array(microbatches, dtype=np.float64), np.stack(rows))
            if self._lined is None:
                self._lined = self._is_lined(key, microbatches, values)
            return [Block(ends[0], _mesh(key), tuple(microbatches), values)] if self._lined else self._each(key, microbatches)
        except PlanError as error:
            self.problem = str(error)
            return []

    def _each(self, key: Key, microbatches: Sequence[int]) -> list[Block]:
        programs = [(size, self._lower(key, size)) for size in microbatches]
        return [Block(program, _mesh(key), (size,), _values(program)[None]) for size, program in programs]

    def _is_lined(self, key: Key, microbatches: Sequence[int], values: Array) -> bool:
        """Whether the lines hold in the middle, too."""
        middle = len(microbatches) // 2
        exact = _values(self._lower(key, microbatches[middle]))
        return bool(np.all(np.abs(values[middle] - exact) <= _SAME * np.abs(exact)))

    def _lower(self, key: Key, microbatch: int) -> Program:
        mesh = _mesh(key)
        graph = self.graph(microbatch * mesh.replicas)
        placement = STRATEGIES["dp"](graph, Layout(mesh, key[-1], microbatch).strategy)
        return self.made.lowered(graph, placement, mesh)


def _mesh(key: Key) -> Mesh:
    tp, cp, ep, dp, _ = key
    return Mesh.of({"tp": tp, "cp": cp, "ep": ep, "dp": dp})


def _lines(sizes: Array, rows: Array) -> Array:
    """Numbers at all sizes from those at the first two and the last two: the lower of both lines where the first lies too high at the
    end, else the upper one."""

    def line(near: int, far: int, at: tuple[Array, Array]) -> Array:
        slope = (at[1] - at[0]) / (sizes[far] - sizes[near])
        return np.asarray(at[0] + slope * (sizes[:, None] - sizes[near]))

    first, last = line(0, 1, (rows[0], rows[1])), line(-2, -1, (rows[2], rows[3]))
    return np.where(first[-1] > rows[3], np.minimum(first, last), np.maximum(first, last))


def _values(program: Program) -> Array:
    """The numbers of a program that depend on its batch: kernels, blocking collectives, sizes of sections."""
    found: list[float] = []
    for section in program.sections:
        for counted in section.kernels:
            one = counted.kernel
            found += (one.flops, one.vector_flops, one.bytes_read, one.bytes_written, *one.shape.values())
    found += [one.payload_bytes for _, one in waits(program)]
    found += [getattr(section, name) for name in SIZES for section in program.sections]
    return np.array(found, dtype=np.float64)


def _columns(blocks: Sequence[Block], made: Setting) -> tuple[Columns, Array]:
    """Prices kernels and collectives of all blocks at once, and adds them up by section."""
    kernels, transfers = _kernel_seconds(blocks, made), _transfer_seconds(blocks, made)
    known: dict[tuple[object, ...], Sums] = {}
    tables, outputs = [], []
    for block, kernel, transfer in zip(blocks, kernels, transfers, strict=True):
        count = len(block.program.sections)
        sizes = block.values[:, -count * len(SIZES) :].T.reshape(len(SIZES), count, -1)
        sums = known.setdefault(_structure(block.program), Sums.of(block.program))
        tables.append(columns(block.program, kernel, transfer, list(sizes[:-1]), sums=sums))
        outputs.append(sizes[-1])
    return _side_by_side(tables, [len(block.microbatches) for block in blocks]), np.concatenate(outputs, axis=1)


def _structure(program: Program) -> tuple[object, ...]:
    """What `Sums` depend on."""
    kernels = tuple((c.times, c.kernel.phase, c.core) for section in program.sections for c in section.kernels)
    waiting = tuple((i, one.times, one.phase) for i, one in waits(program))
    return kernels, waiting, tuple(len(section.kernels) for section in program.sections)


def _side_by_side(tables: Sequence[Columns], counts: Sequence[int]) -> Columns:
    """One table of (sections, points): parameters too, as they differ between blocks."""

    def joined(name: str) -> Array:
        if name == "repeat":
            return tables[0].repeat
        parts = [getattr(table, name) for table in tables]
        if name == "parameters":
            parts = [np.repeat(part[:, None], count, axis=1) for part, count in zip(parts, counts, strict=True)]
        return np.concatenate(parts, axis=1)

    return Columns(**{field.name: joined(field.name) for field in fields(Columns)})


def _kernel_seconds(blocks: Sequence[Block], made: Setting) -> list[Array]:
    """Seconds of (kernels, microbatches) for each block; a kernel that occurs twice is priced once."""
    known: dict[object, dict[bytes, int]] = {}
    unique: list[Kernel] = []
    places = []
    for block in blocks:
        rows, first = [], 0
        for section in block.program.sections:
            for counted in section.kernels:
                width = _COUNTS + len(counted.kernel.shape)
                rows.append(_numbered(counted.kernel, block.values[:, first : first + width], known, unique))
                first += width
        places.append(np.array(rows, dtype=np.intp).reshape(len(rows), len(block.microbatches)))
    seconds = made.prices.times(unique).total
    return [seconds[place] for place in places]


def _numbered(kernel: Kernel, values: Array, known: dict[object, dict[bytes, int]], unique: list[Kernel]) -> Iterable[int]:
    """The position of each row of a kernel among the unique ones; new ones are added."""
    kind = (kernel.family, kernel.operation, kernel.phase, kernel.calls, tuple(kernel.shape))
    met = known.setdefault(kind, {})
    raw, width = np.ascontiguousarray(values).tobytes(), values.shape[1] * values.itemsize
    found = []
    for row in range(len(values)):
        key = raw[row * width : (row + 1) * width]
        place = met.get(key)
        if place is None:
            place = met[key] = len(unique)
            numbers = values[row].tolist()
            shape = dict(zip(kernel.shape, numbers[_COUNTS:], strict=True))
            flops, vector, read, written = numbers[:_COUNTS]
            unique.append(replace(kernel, flops=flops, vector_flops=vector, bytes_read=read, bytes_written=written, shape=shape))
        found.append(place)
    return found


def _transfer_seconds(blocks: Sequence[Block], made: Setting) -> list[Array]:
    """Seconds of (blocking collectives, microbatches) for each block; one call for each operation."""
    found = [np.zeros((sum(1 for _ in waits(block.program)), len(block.microbatches))) for block in blocks]
    cells: dict[str, list[tuple[int, int]]] = {}
    for index, block in enumerate(blocks):
        for row, (_, one) in enumerate(waits(block.program)):
            cells.setdefault(one.operation, []).append((index, row))
    for operation, members in cells.items():
        strides, ranks, payloads = [], [], []
        for index, row in members:
            block = blocks[index]
            axis, first = list(waits(block.program))[row][1].axis, len(block.program.sections) * len(SIZES) + len(found[index])
            payloads.append(block.values[:, block.values.shape[1] - first + row])
            strides.append(np.full(len(block.microbatches), block.mesh.stride((axis,))))
            ranks.append(np.full(len(block.microbatches), block.mesh.degree(axis)))
        seconds = made.fabric.times(operation, *(np.concatenate(one) for one in (strides, ranks, payloads)))
        first = 0
        for index, row in members:
            found[index][row] = seconds[first : first + found[index].shape[1]]
            first += found[index].shape[1]
    return found
