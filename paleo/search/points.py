"""Unique blocks priced once: for every layout of layers and every microbatch, the seconds and bytes of each section.

Counts of a rank's layers are affine in its microbatch and in 1/cp (each number of a shape is a product of sizes, each
count of bytes a sum of those), but for sparse ones that a small batch does not fill (rows of an embedding): those are
the lower of two such surfaces. So a few lowerings at the corners give a whole family of layouts, and one more in the
middle checks them. Where that fails (rounding, a mixture of experts), each microbatch or each point is lowered by
itself. Equal kernels of all points are priced once, in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from paleo.assemble import BYTES, Columns, Sums, collectives, columns
from paleo.errors import PlanError
from paleo.graph import Graph
from paleo.lower import Program
from paleo.parallel.mesh import Mesh
from paleo.parallel.overrides import placement
from paleo.parallel.placement import Placement, Strategy
from paleo.parallel.propagation import check_divisions
from paleo.predict import Setting
from paleo.search.space import Layout
from paleo.specs.model import ModelSpec
from paleo.work import Kernel

Array = npt.NDArray[np.float64]
#: Figures of sections beside kernels: those of `Columns`, and what a pipeline stage hands on.
SIZES = (*BYTES, "output_bytes")
#: Numbers of a kernel before those of its shape.
_COUNTS = 4
#: Relative difference up to which a count lies on a surface.
_SAME = 2.0**-36
#: Microbatches that are all lowered where there are no more.
_FEW = 3
#: Microbatches that fill up every sparse count.
_FULL = (2**16, 2**17)

#: tp, cp, ep, dp, sequence parallelism: what the layers of a rank depend on.
Key = tuple[int, int, int, int, bool]


@dataclass(frozen=True, slots=True)
class Block:
    """The layers of one layout at several microbatches. ``values``: (microbatches, numbers of the program, one after
    another).

    ``program`` has the structure and the parameters of the layout; its counts may be those of another one.
    """

    key: Key
    program: Program
    microbatches: tuple[int, ...]
    values: Array

    @property
    def mesh(self) -> Mesh:
        """Degrees of the layout, but for pp (and dp, which may be a smaller one)."""
        return _mesh(self.key)


@dataclass(frozen=True, slots=True)
class Points:
    """All points: columns of (sections, points), the program behind each block, and where to find a layout's
    microbatch."""

    columns: Columns
    output_bytes: Array
    programs: tuple[Program, ...]
    block_of: npt.NDArray[np.intp]
    where: dict[tuple[Key, int], int]
    key: Callable[[Layout], Key]
    graph: Graph

    def point(self, layout: Layout, microbatch: int) -> int | None:
        """The point of a layout at a microbatch; None where its layers cannot be divided so."""
        return self.where.get((self.key(layout), microbatch))


def priced(
    model: ModelSpec, made: Setting, layouts: Sequence[Layout], sizes: Callable[[Layout], Sequence[int]]
) -> Points:
    """Every point of the layouts, each at the microbatches of ``sizes``."""
    blocks = _Blocks(model, made)
    key = blocks.key()
    wanted: dict[Key, set[int]] = {}
    for layout in layouts:
        wanted.setdefault(key(layout), set()).update(sizes(layout))
    families: dict[tuple[int, int, int, bool], dict[Key, list[int]]] = {}
    for one, counts in wanted.items():
        tp, cp, ep, dp, sequence_parallel = one
        family = (tp, ep, dp if cp > 1 else 0, sequence_parallel)
        families.setdefault(family, {})[one] = sorted(counts)
    found = [block for family in families.values() for block in blocks.of(family)]
    if not found:
        raise PlanError(f"{blocks.problem or 'no way to lay the network over these gpus'}")
    where: dict[tuple[Key, int], int] = {}
    for block in found:
        where.update({(block.key, size): len(where) + i for i, size in enumerate(block.microbatches)})
    table, output = _columns(found, made)
    lengths = [len(block.microbatches) for block in found]
    block_of = np.repeat(np.arange(len(found)), lengths)
    return Points(table, output, tuple(b.program for b in found), block_of, where, key, blocks.graph(1))


class _Blocks:
    """Lowers layouts; remembers graphs, and why the last layout could not be lowered. ``uneven``: which kernels there
    are depends on the microbatch, so that each is lowered by itself."""

    def __init__(self, model: ModelSpec, made: Setting) -> None:
        self.model, self.made = model, made
        self.problem = ""
        self._graphs: dict[int, Graph] = {}
        self._known: dict[tuple[Key, int], Program] = {}
        self.uneven = made.software.softmax_multiple > 1
        self.exact = any(
            "capacity" in tensor.dims
            for node in self.graph(1).nodes
            for operation in node.operations
            for tensor in (*operation.reads, operation.out)
        )

    def key(self) -> Callable[[Layout], Key]:
        """What a layout's layers depend on: tp, cp, ep, sequence parallelism, and dp only where some layer looks at it.

        Else two dp ranks stand for any number of them: a collective over one rank takes no time.
        """

        def found(layout: Layout) -> Key:
            tp, cp, ep, dp = (layout.mesh.degree(axis) for axis in ("tp", "cp", "ep", "dp"))
            return tp, cp, ep, dp if self.exact else 2, layout.sequence_parallel

        return found

    def graph(self, batch: int) -> Graph:
        """The network at a batch, built once."""
        if batch not in self._graphs:
            self._graphs[batch] = self.made.graph(self.model, batch)
        return self._graphs[batch]

    def of(self, family: Mapping[Key, Sequence[int]]) -> list[Block]:
        """Blocks of layouts that differ in cp alone, those left out whose layers cannot be divided."""
        able = {key: sizes for key, sizes in family.items() if self._divides(key)}
        if not (self.exact or self.uneven) and len(able) > 2:
            found = self._surface(able)
            if found is not None:
                return found
        return [block for key, sizes in able.items() for block in self._line(key, sizes)]

    def _divides(self, key: Key) -> bool:
        graph = self.graph(_mesh(key).replicas)
        try:
            check_divisions(graph, self._placement(graph, key), _mesh(key))
        except PlanError as error:
            self.problem = str(error)
            return False
        return True

    def _surface(self, family: Mapping[Key, Sequence[int]]) -> list[Block] | None:
        """All layouts from four: small microbatches on the most cp ranks, large ones on the fewest, so that a sparse
        count which fills up does so in between. None where the counts do not lie on such surfaces."""
        keys = sorted(family)
        sizes = sorted({size for counts in family.values() for size in counts})
        if len(sizes) < 2:
            return None
        few, many = (keys[0], keys[1]), (keys[-1], keys[-2])
        rows = [[_values(self._lower(key, size)) for size in sizes[:2]] for key in many]
        last = [[_values(self._lower(key, size)) for size in _FULL] for key in few]
        if len({len(row) for pair in (*rows, *last) for row in pair}) > 1:
            return None

        def between(pair: tuple[Key, Key], at: Sequence[Array], key: Key) -> Array:
            here, first, second = (1.0 / one[1] for one in (key, *pair))
            return np.asarray(at[0] + (at[1] - at[0]) * ((here - first) / (second - first)))

        stacked, stacked_last = [np.stack(pair) for pair in rows], [np.stack(pair) for pair in last]
        ends = {key: np.concatenate([between(many, stacked, key), between(few, stacked_last, key)]) for key in keys}
        lower = _concave(sizes, ends[few[0]])
        values = {key: _lines(family[key], sizes, ends[key], lower) for key in keys}
        if not self._holds(few[0], family[few[0]], values[few[0]], 0) or not self._holds(
            many[0], family[many[0]], values[many[0]], -1
        ):
            return None
        program = self._lower(few[0], _FULL[0])
        return [Block(key, program, tuple(family[key]), values[key]) for key in keys]

    def _line(self, key: Key, sizes: Sequence[int]) -> list[Block]:
        """One layout from its smallest microbatches and full ones, or each of them by itself."""
        if len(sizes) > _FEW and not self.uneven:
            rows = self._ends(key, sizes)
            values = _lines(sizes, sizes, rows, _concave(sizes, rows)) if rows.ndim == 2 else rows
            if rows.ndim == 2 and self._holds(key, sizes, values, len(sizes) // 2):
                return [Block(key, self._lower(key, sizes[0]), tuple(sizes), values)]
        return [Block(key, self._lower(key, size), (size,), _values(self._lower(key, size))[None]) for size in sizes]

    def _ends(self, key: Key, sizes: Sequence[int]) -> Array:
        """Numbers at the first two and two full microbatches: (4, numbers); a flat array where they have no common
        shape."""
        rows = [_values(self._lower(key, size)) for size in (*sizes[:2], *_FULL)]
        return np.stack(rows) if len({len(row) for row in rows}) == 1 else np.zeros(0)

    def _holds(self, key: Key, sizes: Sequence[int], values: Array, at: int) -> bool:
        """Whether a lowering agrees."""
        exact = _values(self._lower(key, sizes[at]))
        return len(exact) == values.shape[1] and bool(np.all(np.abs(values[at] - exact) <= _SAME * np.abs(exact)))

    def _lower(self, key: Key, microbatch: int) -> Program:
        if (key, microbatch) not in self._known:
            mesh = _mesh(key)
            graph = self.graph(microbatch * mesh.replicas)
            self._known[key, microbatch] = self.made.lowered(graph, self._placement(graph, key), mesh)
        return self._known[key, microbatch]

    def _placement(self, graph: Graph, key: Key) -> Placement:
        return placement(graph, Strategy(sequence_parallel=key[-1]), {}, self.made.run.expert_imbalance)


def _mesh(key: Key) -> Mesh:
    tp, cp, ep, dp, _ = key
    return Mesh.of({"tp": tp, "cp": cp, "ep": ep, "dp": dp})


def _concave(sizes: Sequence[int], rows: Array) -> npt.NDArray[np.bool_]:
    """Numbers whose line through the first two sizes lies too high at full ones."""
    slope = (rows[1] - rows[0]) / (sizes[1] - sizes[0])
    return np.asarray(rows[0] + slope * (_FULL[1] - sizes[0]) > rows[3])


def _lines(wanted: Sequence[int], sizes: Sequence[int], rows: Array, lower: npt.NDArray[np.bool_]) -> Array:
    """Numbers at the sizes wanted from those at the first two of all sizes and at two full ones: the ``lower`` of both
    lines, or the upper one. Whole numbers stay whole."""
    at, ends = np.array(wanted, dtype=np.float64)[:, None], np.array([*sizes[:2], *_FULL], dtype=np.float64)

    def line(near: int, far: int) -> Array:
        return np.asarray(rows[near] + (rows[far] - rows[near]) / (ends[far] - ends[near]) * (at - ends[near]))

    found = np.where(lower, np.minimum(line(0, 1), line(2, 3)), np.maximum(line(0, 1), line(2, 3)))
    whole = np.rint(found)
    return np.where(np.abs(found - whole) <= _SAME * np.abs(whole), whole, found)


def _values(program: Program) -> Array:
    """The numbers of a program that depend on its batch: kernels, collectives, sizes of sections."""
    found: list[float] = []
    for section in program.sections:
        for counted in section.kernels:
            one = counted.kernel
            found += (one.flops, one.vector_flops, one.bytes_read, one.bytes_written, *one.shape.values())
    found += [one.payload_bytes for _, one in collectives(program)]
    found += [getattr(section, name) for name in SIZES for section in program.sections]
    return np.array(found, dtype=np.float64)


def _columns(blocks: Sequence[Block], made: Setting) -> tuple[Columns, Array]:
    """Prices kernels and collectives of all blocks at once, and adds them up by section."""
    kernels, transfers = _kernel_seconds(blocks, made), _transfer_seconds(blocks, made)
    known: dict[tuple[object, ...], Sums] = {}
    tables, outputs = [], []
    for block, (device, host), transfer in zip(blocks, kernels, transfers, strict=True):
        count = len(block.program.sections)
        sizes = block.values[:, -count * len(SIZES) :].T.reshape(len(SIZES), count, -1)
        structure = _structure(block.program)
        if structure not in known:
            known[structure] = Sums.of(block.program)
        sums = known[structure]
        tables.append(columns(block.program, device, host, transfer, list(sizes[:-1]), sums, call=made.call))
        outputs.append(sizes[-1])
    return _side_by_side(tables, [len(block.microbatches) for block in blocks]), np.concatenate(outputs, axis=1)


def _structure(program: Program) -> tuple[object, ...]:
    """What `Sums` depend on."""
    kernels = tuple(
        (c.times, c.kernel.family, c.kernel.phase, c.core) for section in program.sections for c in section.kernels
    )
    owed = tuple((i, one.times, one.phase, one.beside, one.pieces) for i, one in collectives(program))
    return kernels, owed, tuple(len(section.kernels) for section in program.sections)


def _side_by_side(tables: Sequence[Columns], counts: Sequence[int]) -> Columns:
    """One table of (sections, points): parameters too, as they differ between blocks."""

    def joined(name: str) -> Array:
        if name == "repeat":
            return tables[0].repeat
        parts = [getattr(table, name) for table in tables]
        if name in ("parameters", "trained"):
            parts = [np.repeat(part[:, None], count, axis=1) for part, count in zip(parts, counts, strict=True)]
        return np.concatenate(parts, axis=1)

    return Columns(**{field.name: joined(field.name) for field in fields(Columns)})


def _kernel_seconds(blocks: Sequence[Block], made: Setting) -> list[tuple[Array, Array]]:
    """Seconds of (kernels, microbatches) for each block, on the device and on the host; a kernel that occurs twice is
    priced once."""
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
    times = made.prices.times(unique)
    return [(times.total[place], times.host[place]) for place in places]


def _numbered(
    kernel: Kernel, values: Array, known: dict[object, dict[bytes, int]], unique: list[Kernel]
) -> Iterable[int]:
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
            kept = kernel.name, kernel.family, kernel.operation, kernel.phase
            unique.append(Kernel(*kept, flops, vector, read, written, shape, kernel.calls))
        found.append(place)
    return found


def _transfer_seconds(blocks: Sequence[Block], made: Setting) -> list[Array]:
    """Seconds of (collectives, microbatches) for each block; one call for each operation."""
    found = [np.zeros((sum(1 for _ in collectives(block.program)), len(block.microbatches))) for block in blocks]
    cells: dict[str, list[tuple[int, int, str]]] = {}
    meshes, bare = [block.mesh for block in blocks], replace(made.fabric, host=0.0)
    for index, block in enumerate(blocks):
        for row, (_, one) in enumerate(collectives(block.program)):
            cells.setdefault(one.operation, []).append((index, row, one.axis))
    for operation, members in cells.items():
        strides, ranks, payloads = [], [], []
        for index, row, axis in members:
            block, mesh = blocks[index], meshes[index]
            first = len(block.program.sections) * len(SIZES) + len(found[index])
            payloads.append(block.values[:, block.values.shape[1] - first + row])
            strides.append(np.full(len(block.microbatches), mesh.stride((axis,))))
            ranks.append(np.full(len(block.microbatches), mesh.degree(axis)))
        seconds = bare.times(operation, *(np.concatenate(one) for one in (strides, ranks, payloads)))
        first = 0
        for index, row, _ in members:
            found[index][row] = seconds[first : first + found[index].shape[1]]
            first += found[index].shape[1]
    return found
