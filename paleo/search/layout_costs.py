"""Times and bytes of one rank's layers for every layout and microbatch of a plan search.

Most counts of a rank (FLOP, bytes, payloads) are affine in the microbatch, in 1/tp, in 1/cp and in 1/ep or ep. So a few
layouts at the corners of a range of degrees are lowered to programs (kernels and collectives). The counts of all
layouts between them are interpolated, and some programs inside the range check the result. A sparse count, such as the
rows of an embedding that a small batch reads, is the lower of two interpolations. One starts from small microbatches,
the other from large ones. Large microbatches are lowered only as far as the last section with such a table.

If the check fails, because of rounding, smaller groups of layouts are interpolated; what still fails is lowered point
by point. Kernels that occur several times are priced once, all in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError
from paleo.lowering.program import count_sections_through_embeddings, with_token_dispatch
from paleo.operations.base import Kernel
from paleo.operations.contraction import UNEVENLY_SPLITTABLE_DIMS
from paleo.parallel.placement import BATCH_AXES, ContextParallelMethod, Mesh, Placement, Strategy
from paleo.parallel.propagation import check_divisibility
from paleo.pricing.kernels import KernelTimes
from paleo.search.space import SEARCHED_AXES, Layout, SearchSpace, expert_folding_strategy
from paleo.step.layouts import ResultCache
from paleo.step.section_times import (
    ARRAY_FIELDS,
    MEMORY_FIELDS,
    SectionSumMatrices,
    SectionTimes,
    collective_times,
    section_times,
)

if TYPE_CHECKING:
    from paleo.lowering.kernel_launches import TokenDispatch
    from paleo.lowering.program import Program, Section
    from paleo.network.graph import Graph
    from paleo.operations.tensor import DimSize
    from paleo.specs.model import ModelSpec
    from paleo.step.backend import Backend

Array = npt.NDArray[np.float64]
#: Products of shares, of which counts are sums; with more digits than counts, because weights come from small
#: differences.
_LongDoubleArray = npt.NDArray[np.longdouble]
_ShardFractionFunction = Callable[[int], float]
#: Counts of one section: those of its kernels, payloads of its collectives [bytes], workspaces of its operations
#: [bytes], and the byte counts that `_SECTION_BYTE_FIELDS` names.
SectionCounts = tuple[Array, Array, Array, Array]
#: Byte counts of a section that `SectionTimes` holds, except the workspace, which depends on single operations.
_SECTION_BYTE_FIELDS = tuple(name for name in MEMORY_FIELDS if name != "workspace_bytes")
#: Each kernel has four counts (matrix FLOP, vector FLOP, bytes read, bytes written); the sizes of its shape follow.
_COUNTS = 4
#: Largest relative difference between an interpolated and a lowered count that are taken to be equal.
_SAME = 2.0**-36
#: Length of the part of a row of terms that other rows do not give, above which the row is independent of them.
_INDEPENDENT = 1e-12
#: Number of rounds in which the weights of samples are computed, each from what the one before leaves.
_REFINED = 3
#: Microbatches so large that every sparse count has reached its limit (all rows of an embedding are read).
_FULL = (2**16, 2**17)


class LayoutKey(NamedTuple):
    """Part of a layout that decides what its layers compute: degrees of parallelism and method of context parallelism.

    ``fixed_degrees`` are degrees of axes that the search does not vary.
    """

    tp: int
    cp: int
    ep: int
    dp: int
    sequence_parallel: bool
    context_parallel_method: ContextParallelMethod = "ring"
    fixed_degrees: tuple[tuple[str, int], ...] = ()
    etp: int | None = None

    @property
    def expert_ranks(self) -> int:
        """Number of ranks over which the experts are spread.

        With ``etp`` set, experts are folded: spread over cp (and over tp if ``etp`` is 1) as well as over ep.
        """
        return self.ep if self.etp is None else self.ep * self.cp * (self.tp if self.etp == 1 else 1)


@dataclass(frozen=True, slots=True)
class LayoutCounts:
    """FLOP, bytes and other counts of all layers of one layout, at several microbatches.

    ``values_by_microbatch`` has the shape (microbatches, counts): all counts of the program's sections, one after
    another. ``program`` has the structure and the parameters of this layout; its counts may be those of another layout.
    """

    key: LayoutKey
    program: Program
    microbatches: tuple[int, ...]
    values_by_microbatch: Array

    @property
    def counts_by_type(self) -> tuple[Array, Array, Array, Array]:
        """Counts of kernels, collectives, workspaces and sections, as four arrays of shape (counts, microbatches).

        The second holds the payloads of collectives [byte], the third the workspaces of operations [byte], and the
        fourth the byte counts that `_SECTION_BYTE_FIELDS` names.
        """
        sections = self.program.sections
        numbers = sum(_COUNTS + len(counted.kernel.shape) for section in sections for counted in section.kernels)
        lengths = (
            numbers,
            sum(len(counted.collectives) for counted in sections),
            sum(len(counted.operation_workspace_bytes) for counted in sections),
        )
        kernels, payloads, outputs, sizes = np.split(self.values_by_microbatch.T, np.cumsum(lengths))
        return kernels, payloads, outputs, sizes

    def select_microbatches(self, sizes: Sequence[int]) -> LayoutCounts:
        """Select the counts at some of the microbatches.

        Parameters
        ----------
        sizes : sequence of int
            Microbatches to keep [samples].

        Returns
        -------
        LayoutCounts
            Counts of the same layout at these microbatches.
        """
        rows = [self.microbatches.index(size) for size in sizes]
        return replace(self, microbatches=tuple(sizes), values_by_microbatch=self.values_by_microbatch[rows])

    @property
    def mesh(self) -> Mesh:
        """Device mesh of the layout without its pipeline axis; its dp may be smaller than that of the layout."""
        return _mesh(self.key)


@dataclass(frozen=True, slots=True)
class LayoutTimes:
    """Times and bytes of the layers for every layout and microbatch of a search, shape (sections, points).

    A point is a layout at a microbatch; ``index_by_layout`` gives the index of each. A section is a run of
    consecutive operations of one layer. ``program_cache`` caches what depends on one program and its mesh.
    """

    times_by_section: SectionTimes
    programs: tuple[Program, ...]
    program_index: npt.NDArray[np.intp]
    index_by_layout: dict[tuple[LayoutKey, int], int]
    key_of_layout: Callable[[Layout], LayoutKey]
    graph: Graph
    program_cache: ResultCache = field(default_factory=ResultCache, compare=False)


def layer_times_of_layouts(
    graphs: GraphsByBatch,
    backend: Backend,
    layouts: Sequence[Layout],
    sizes: Callable[[Layout], Sequence[int]],
    space: SearchSpace | None = None,
) -> LayoutTimes:
    """Predict the times of the layers of all layouts, each at several microbatches.

    Parameters
    ----------
    graphs : GraphsByBatch
        Graphs of the network at several batches, which also cache counts.
    backend : Backend
        Software, prices and links of the run.
    layouts : sequence of Layout
        Layouts of the search.
    sizes : Callable[[Layout], Sequence[int]]
        Function that returns the microbatches of a layout [samples].
    space : SearchSpace, optional
        Values that the search varies.

    Returns
    -------
    LayoutTimes
        Times and bytes, shape (sections, points); a point is a layout at a microbatch.
    """
    blocks = _Blocks(graphs, backend, space)
    key_of = blocks.make_key_function()
    sizes_of: dict[LayoutKey, set[int]] = {}
    for layout in layouts:
        sizes_of.setdefault(key_of(layout), set()).update(sizes(layout))
    families: dict[tuple[object, ...], dict[LayoutKey, list[int]]] = {}
    for key, counts in sizes_of.items():
        families.setdefault(_family(key), {})[key] = sorted(counts)
    priced_blocks = [
        blocks.with_backend_dispatch(block) for family in families.values() for block in blocks.lower_layouts(family)
    ]
    if not priced_blocks:
        raise PlanError(f"{blocks.problem or 'no way to lay the network over these gpus'}")
    positions: dict[tuple[LayoutKey, int], int] = {}
    for block in priced_blocks:
        positions.update({(block.key, size): len(positions) + i for i, size in enumerate(block.microbatches)})
    lengths = [len(block.microbatches) for block in priced_blocks]
    block_of = np.repeat(np.arange(len(priced_blocks)), lengths)
    programs = tuple(block.program for block in priced_blocks)
    return LayoutTimes(_costs(priced_blocks, backend), programs, block_of, positions, key_of, graphs.graph_at_batch(1))


def _family(key: LayoutKey) -> tuple[object, ...]:
    """Return a key that is equal for layouts whose counts can be interpolated from each other.

    Such layouts agree in all degrees except tp, cp and ep, and in whether each of these exceeds 1.
    """
    return key.tp > 1, key.cp > 1, key.ep > 1, *key[3:-1], None if key.etp is None else key.etp == 1


class GraphsByBatch:
    """Cache of a network's graphs, one for each batch, and of the programs and counts that were lowered from them."""

    def __init__(self, model: ModelSpec, backend: Backend) -> None:
        self._build = partial(backend.graph, model)
        self._graphs: dict[int, Graph] = {}
        self._family: dict[Hashable, object] = {}
        self._numbers: dict[int, tuple[Section, SectionCounts]] = {}
        #: Lowered programs, and counts that were found by interpolation. Both send a token to each of its experts.
        self.programs: dict[tuple[LayoutKey, int, int | None], Program] = {}
        self.blocks: dict[LayoutKey, LayoutCounts] = {}
        self._dispatched: dict[tuple[int, TokenDispatch], tuple[Program, Program]] = {}

    def program_with_dispatcher(self, program: Program, dispatch: TokenDispatch) -> Program:
        """Return a copy of a program whose tokens reach their experts by another dispatcher, such as DeepEP.

        Parameters
        ----------
        program : Program
            One rank's kernels and collectives (the lowered network).
        dispatch : TokenDispatch
            How tokens are sent to their experts.

        Returns
        -------
        Program
            Changed program; the same object at each call with the same program and dispatch.
        """
        key = id(program), dispatch
        if key not in self._dispatched:
            self._dispatched[key] = with_token_dispatch(program, dispatch), program
        return self._dispatched[key][0]

    def section_counts(self, section: Section) -> SectionCounts:
        """Return the FLOP, bytes and payloads of a section (consecutive operations of one layer).

        The counts are computed once for a section that several programs share.

        Parameters
        ----------
        section : Section
            Section of a program.

        Returns
        -------
        SectionCounts
            Arrays of the counts of kernels, payloads [byte], workspaces [byte], and other byte counts.
        """
        if id(section) not in self._numbers:
            self._numbers[id(section)] = section, _section_values(section)
        return self._numbers[id(section)][1]

    def graph_at_batch(self, batch: int) -> Graph:
        """Return the graph of the network at a batch; built once for each batch.

        Parameters
        ----------
        batch : int
            Batch [samples].

        Returns
        -------
        Graph
            Network with the shapes of this batch.
        """
        if batch not in self._graphs:
            self._graphs[batch] = replace(self._build(batch), shared_cache=self._family)
        return self._graphs[batch]


class _Blocks:
    """Counter of FLOP and bytes of layouts: lowers some layouts to programs, and interpolates the others where exact.

    ``problem`` says why the last layout could not be lowered. With ``uneven`` counts are not interpolated, because the
    microbatch decides which kernels run.
    """

    def __init__(self, graphs: GraphsByBatch, backend: Backend, space: SearchSpace | None = None) -> None:
        space = space or SearchSpace()
        self.graphs, self.backend = graphs, backend
        self.problem = ""
        self._known_lengths: dict[object, Hashable] = {}
        self._placements: dict[tuple[object, ...], Placement] = {}
        self.uneven = backend.software.fusion.softmax_multiple > 1
        self.counts_dp = space.preset != "dp" or bool(backend.run.placement)
        self.preset = space.preset

    def make_key_function(self) -> Callable[[Layout], LayoutKey]:
        """Return a function that maps a layout to its key: the part that decides what the layers compute.

        The key has the layout's dp only if a placement may split more than the batch over dp. Otherwise dp is 2 and
        stands for any number of ranks; it is not 1, because a collective over one rank takes no time.
        """

        def key(layout: Layout) -> LayoutKey:
            tp, cp, ep, dp = map(layout.mesh.degree, ("tp", "cp", "ep", "dp"))
            stated = [pair for pair in layout.mesh.degrees if pair[0] not in (*SEARCHED_AXES, "dp") and pair[1] > 1]
            if not self.counts_dp:
                dp, stated = 2, [(axis, 2 if axis in BATCH_AXES else degree) for axis, degree in stated]
            return LayoutKey(
                tp, cp, ep, dp, layout.sequence_parallel, layout.context_parallel_method, tuple(stated), layout.etp
            )

        return key

    def lower_layouts(self, family: Mapping[LayoutKey, Sequence[int]]) -> list[LayoutCounts]:
        """Return the FLOP, bytes and payloads of layouts that differ in tp, cp and ep only.

        Layouts that cannot divide the layers are left out.

        Parameters
        ----------
        family : mapping of LayoutKey to sequence of int
            Microbatch sizes of each layout [samples].

        Returns
        -------
        list of LayoutCounts
            Counts of each layout at its microbatches.
        """
        alike: dict[object, dict[LayoutKey, Sequence[int]]] = {}
        for key, sizes in family.items():
            if self._divides(key):
                alike.setdefault(self._lengths(key, sizes[0]), {})[key] = sizes
        finer = (lambda key: key.expert_ranks), (lambda key: key.tp), (lambda key: key)
        return [block for part in alike.values() for block in self._blocks(part, finer)]

    def _lengths(self, key: LayoutKey, microbatch: int) -> Hashable:
        """Return the number of counts in each section of a layout, which is equal for programs of equal structure."""
        shares = *_family(key), *_shares_of(key)
        if shares not in self._known_lengths:
            sections = self._lower(key, microbatch).sections
            self._known_lengths[shares] = tuple(tuple(map(len, self.graphs.section_counts(each))) for each in sections)
        return self._known_lengths[shares]

    def _blocks(
        self, family: Mapping[LayoutKey, Sequence[int]], groupings: Sequence[Callable[[LayoutKey], object]]
    ) -> list[LayoutCounts]:
        """Return the counts of all layouts, by interpolation where that reproduces lowered programs exactly.

        Otherwise the layouts are grouped by the first of ``groupings``. Each group is tried separately, then grouped by
        the next one. Where no grouping helps, each layout and microbatch is lowered separately.
        """
        surface = self._repeated(family) or self._surface(family)
        if surface is not None:
            self.graphs.blocks.update({block.key: block for block in surface})
            return surface
        if not groupings:
            points = [(key, size, self._lower(key, size)) for key, sizes in family.items() for size in sizes]
            numbers = self.graphs.section_counts
            return [LayoutCounts(key, each, (size,), _values(each, numbers)[None]) for key, size, each in points]
        parts: dict[object, dict[LayoutKey, Sequence[int]]] = {}
        for key, sizes in family.items():
            parts.setdefault(groupings[0](key), {})[key] = sizes
        return [block for part in parts.values() for block in self._blocks(part, groupings[1:])]

    def _divides(self, key: LayoutKey) -> bool:
        """Return True if the layers can be divided over a layout; otherwise store the reason in ``problem``."""
        graph = self.graphs.graph_at_batch(_mesh(key).replicas)
        try:
            check_divisibility(graph, self._placement(graph, key), _mesh(key))
        except PlanError as error:
            self.problem = str(error)
            return False
        return True

    def _repeated(self, family: Mapping[LayoutKey, Sequence[int]]) -> list[LayoutCounts] | None:
        """Return cached counts of all layouts, found earlier for another backend; None if some are missing."""
        known = self.graphs.blocks
        if not all(key in known and {*sizes} <= {*known[key].microbatches} for key, sizes in family.items()):
            return None
        return [known[key].select_microbatches(sizes) for key, sizes in family.items()]

    def _surface(self, family: Mapping[LayoutKey, Sequence[int]]) -> list[LayoutCounts] | None:
        """Interpolate the counts of all layouts between a few lowered ones; None if that is inexact or no faster.

        The number of lowered layouts is the number of terms (`_terms`), at two small and at two very large
        microbatches. Another layout is lowered for each further way to shard the weights, because its program gives the
        parameters. All lowered programs check the interpolation.
        """
        sizes = sorted({size for counts in family.values() for size in counts})
        if self.uneven or len(sizes) < 2:
            return None
        orders = sorted(family, key=_small_first), sorted(family, key=_full_first)
        ends = [[keys[row] for row in _spanning(_terms(keys, _even_share, _even_share))] for keys in orders]
        small, full = list(product(ends[0], sizes[:2])), list(product(ends[1], _FULL))
        owners: dict[object, LayoutKey] = {}
        for key in family:
            owners.setdefault(_shares_of(key), key)
        checked = [(key, family[key][at]) for key in (min(family), max(family)) for at in (0, -1)]
        lowered = dict.fromkeys([*((key, family[key][0]) for key in owners.values()), *small, *checked])
        if len({**lowered, **dict.fromkeys(full)}) >= sum(map(len, family.values())):
            return None
        tables = count_sections_through_embeddings(self.graphs.graph_at_batch(1), self.backend.fused_chains)
        tried = (self._interpolated(family, sizes, ends, lowered, sections) for sections in (tables, None))
        values = next((each for each in tried if each is not None), None)
        if values is None:
            return None
        programs = {shares: self._lower(key, family[key][0]) for shares, key in owners.items()}
        return [LayoutCounts(key, programs[_shares_of(key)], tuple(family[key]), values[key]) for key in family]

    def _interpolated(
        self,
        family: Mapping[LayoutKey, Sequence[int]],
        sizes: Sequence[int],
        ends: Sequence[Sequence[LayoutKey]],
        lowered: Iterable[tuple[LayoutKey, int]],
        sections: int | None,
    ) -> dict[LayoutKey, Array] | None:
        """Interpolate the counts of each layout at its microbatches, shape (microbatches, counts) for each layout.

        ``ends`` are the layouts lowered at small microbatches and those lowered at very large ones (`_FULL`). Only the
        first ``sections`` are lowered at the large ones. Returns None if the ``lowered`` programs differ in structure,
        or if no form of interpolation reproduces their counts.
        """
        programs, section_counts = {point: self._lower(*point) for point in lowered}, self.graphs.section_counts
        rows = {point: _values(program, section_counts) for point, program in programs.items()}
        bends = _is_early(next(iter(programs.values())), section_counts, sections)
        full = {
            point: _values(self._lower(*point, sections), section_counts)
            for point in product(ends[1], _FULL if bends.any() else ())
        }
        if {len(row) for row in rows.values()} != {len(bends)} or {*map(len, full.values())} - {bends.sum()}:
            return None
        count, place = len(bends), {key: number for number, key in enumerate(family)}
        values = {key: np.empty((len(family[key]), count)) for key in family}
        wrong = np.ones(count, dtype=bool)
        for share, share_of_ep in product(self._shares({key.tp for key in family}), _SHARES_OF_EP):
            terms = _terms(list(family), share, share_of_ep)
            corners = [[place[key] for key in keys] for keys in ends]
            if any(len(_spanning(terms[corner])) < len(corner) for corner in corners):
                continue
            small, large = (_combination_weights(terms[corner], terms) for corner in corners)
            bent, between = bends[wrong], np.zeros((4, len(family), wrong.sum()))
            for row, size in enumerate(sizes[:2]):
                between[row] = small @ np.stack([rows[key, size][wrong] for key in ends[0]])
            for row, size in enumerate(_FULL if bends.any() else (), start=2):
                between[row][:, bent] = large @ np.stack([full[key, size][wrong[bends]] for key in ends[1]])
            lower = _concave(sizes, between[:, place[min(family)]])

            def at(key: LayoutKey, targets: Sequence[int]) -> Array:
                return _at_microbatches(targets, sizes, between[:, place[key]], lower, bent)  # noqa: B023 - used at once

            for key in family:
                values[key][:, wrong] = at(key, family[key])
            deviations = [_differing(at(key, (size,))[0], rows[key, size][wrong]) for key, size in rows]
            wrong[wrong] = np.any(deviations, axis=0)
            if not wrong.any():
                return values
        return None

    def _shares(self, tps: Collection[int]) -> list[_ShardFractionFunction]:
        """Return functions of tp in which a count may be affine: 1/tp, or the padded shard size of an uneven dim."""
        graph = self.graphs.graph_at_batch(1)
        laid = self._placement(graph, LayoutKey(1, 1, 1, 1, False))
        padded = {
            tensor.size(dim)
            for node in graph.nodes
            for dim, axes in laid.split_axes_of(node).items()
            if dim in UNEVENLY_SPLITTABLE_DIMS and "tp" in axes
            for operation in node.operations
            for tensor in (*operation.read_tensors, operation.out)
            if dim in tensor.dims
        }
        shares: list[_ShardFractionFunction] = [_even_share, *(partial(_padded_share, size) for size in sorted(padded))]
        return [share for share in shares if len({share(tp) for tp in tps}) == len(tps)]

    def _lower(self, key: LayoutKey, microbatch: int, sections: int | None = None) -> Program:
        """Return one rank's program (kernels and collectives) for a layout and microbatch, or its first sections."""
        known, point = self.graphs.programs, (key, microbatch, sections)
        if point not in known:
            mesh = _mesh(key)
            graph = self.graphs.graph_at_batch(microbatch * mesh.replicas)
            known[point] = self.backend.lower_without_token_deduplication(
                graph, self._placement(graph, key), mesh, sections
            )
        return known[point]

    def with_backend_dispatch(self, block: LayoutCounts) -> LayoutCounts:
        """Return the counts of a layout under the token dispatcher of the backend (NCCL all-to-all or DeepEP).

        Parameters
        ----------
        block : LayoutCounts
            Counts of a layout as it was lowered.

        Returns
        -------
        LayoutCounts
            Counts with the token dispatch of the backend.
        """
        placement = self._placement(self.graphs.graph_at_batch(block.mesh.replicas), block.key)
        dispatch = self.backend.token_dispatch(placement, block.mesh)
        values = (
            block.values_by_microbatch if dispatch.deduplication_target_count is None else _sent_once(block, dispatch)
        )
        return replace(
            block, program=self.graphs.program_with_dispatcher(block.program, dispatch), values_by_microbatch=values
        )

    def _placement(self, graph: Graph, key: LayoutKey) -> Placement:
        known, chosen = self._placements, (graph.batch, *key[4:])
        if chosen not in known:
            experts = expert_folding_strategy(key.etp)
            degrees = {**experts.degrees, **dict(key.fixed_degrees)}
            strategy = Strategy(self.preset, degrees, 0, key.sequence_parallel, 1, key.context_parallel_method, key.etp)
            known[chosen] = self.backend.placement(graph, strategy)
        return known[chosen]


def _sent_once(block: LayoutCounts, dispatch: TokenDispatch) -> Array:
    """Return a layout's counts if tokens are sent once to each target rank or node: no sorts, smaller payloads."""
    sections = block.program.sections
    kernels = [counted for section in sections for counted in section.kernels]
    sorts = np.repeat([each.sorts_tokens for each in kernels], [_COUNTS + len(each.kernel.shape) for each in kernels])
    shares = [transfer.deduplicated_payload_share(dispatch) for section in sections for transfer in section.collectives]
    counts, payloads, others = np.split(block.values_by_microbatch, [len(sorts), len(sorts) + len(shares)], axis=1)
    return np.concatenate([counts[:, ~sorts], payloads * shares, others], axis=1)


def _mesh(key: LayoutKey) -> Mesh:
    return Mesh.from_degrees({"tp": key.tp, "cp": key.cp, "ep": key.ep, "dp": key.dp, **dict(key.fixed_degrees)})


def _shares_of(key: LayoutKey) -> tuple[int, int]:
    """Return (tensor degree, ranks over which experts are spread), which decide a rank's share of the weights."""
    return key.tp, key.expert_ranks


def _small_first(key: LayoutKey) -> tuple[int, int, int]:
    """Return a sort key for choosing layouts to lower: first those whose sparse counts a small batch leaves low.

    A sparse count is for example the number of embedding rows read.
    """
    return key.tp, -key.cp, key.ep


def _full_first(key: LayoutKey) -> tuple[int, int, int]:
    """Return a sort key for choosing layouts to lower: first those whose sparse counts a large batch saturates.

    A sparse count is for example the number of embedding rows read.
    """
    return -key.tp, key.cp, key.ep


def _terms(
    keys: Sequence[LayoutKey], share: _ShardFractionFunction, share_of_ep: _ShardFractionFunction
) -> _LongDoubleArray:
    """Return the basis of the interpolation over tp, cp and ep: all products of the three shares, shape (layouts, 8).

    A count is a weighted sum of these products. ``share_of_ep`` is 1/ep, or ep for the tokens of an expert, which come
    from ep ranks.
    """
    shares = np.array([(share(key.tp), 1.0 / key.cp, share_of_ep(key.ep)) for key in keys], dtype=np.longdouble)
    terms = np.ones((len(keys), 1), dtype=np.longdouble)
    for column in (shares / shares.max(axis=0)).T:
        terms = np.concatenate([terms, terms * column[:, None]], axis=1)
    return terms


def _spanning(terms: _LongDoubleArray) -> list[int]:
    """Return the indices of the first linearly independent rows, found by Gram-Schmidt orthogonalisation."""
    left, chosen = terms.copy(), list[int]()
    for row in range(len(terms)):
        length = np.sqrt(left[row] @ left[row])
        if length > _INDEPENDENT:
            chosen.append(row)
            unit = left[row] / length
            left = left - np.outer(left @ unit, unit)
    return chosen


def _combination_weights(samples: _LongDoubleArray, targets: _LongDoubleArray) -> Array:
    """Return the weights with which linearly independent samples sum to the targets, shape (targets, samples).

    Solved by Gram-Schmidt orthogonalisation and iterative refinement.
    """
    units = np.zeros((0, samples.shape[1]), dtype=np.longdouble)
    for sample in samples:
        left = sample - sample @ units.T @ units
        units = np.concatenate([units, [left / np.sqrt(left @ left)]])
    triangle, weights = samples @ units.T, np.zeros((len(targets), len(samples)), dtype=np.longdouble)
    for _ in range(_REFINED):
        more = (targets - weights @ samples) @ units.T
        for column in reversed(range(len(samples))):
            later = more[:, column + 1 :] @ triangle[column + 1 :, column]
            more[:, column] = (more[:, column] - later) / triangle[column, column]
        weights = weights + more
    return weights.astype(np.float64)


def _even_share(shards: int) -> float:
    """Return the fraction of a dim that one shard holds if the dim divides evenly."""
    return 1.0 / shards


#: Shares of ep in counts: that of experts on a rank, and the ranks from which the tokens of an expert come.
_SHARES_OF_EP: tuple[_ShardFractionFunction, _ShardFractionFunction] = _even_share, float


def _padded_share(size: DimSize, shards: int) -> float:
    """Return the size of the largest shard of a dim that does not divide evenly: ceil(size / shards)."""
    return float(-(-size // shards))


def _differing(values: Array, exact: Array) -> npt.NDArray[np.bool_]:
    """Return True where interpolated counts differ from the exact ones by more than rounding."""
    return np.asarray(np.abs(values - exact) > _SAME * np.abs(exact))


def _concave(sizes: Sequence[int], rows: Array) -> npt.NDArray[np.bool_]:
    """Return True for counts that grow more slowly at large microbatches, such as the embedding rows read."""
    slope = (rows[1] - rows[0]) / (sizes[1] - sizes[0])
    return np.asarray(rows[0] + slope * (_FULL[1] - sizes[0]) > rows[3])


def _at_microbatches(
    targets: Sequence[int],
    sizes: Sequence[int],
    rows: Array,
    lower: npt.NDArray[np.bool_],
    bends: npt.NDArray[np.bool_],
) -> Array:
    """Interpolate counts at the ``targets`` from two small and two very large microbatches, shape (targets, counts).

    Where ``bends`` is True, a count lies on the lower of the two straight lines where ``lower`` is True, else on the
    upper one. Other counts lie on the line of the small microbatches. Whole numbers stay whole.
    """
    at, ends = np.array(targets, dtype=np.float64)[:, None], np.array([*sizes[:2], *_FULL], dtype=np.float64)

    def line(low: int, high: int) -> Array:
        return np.asarray(rows[low] + (rows[high] - rows[low]) / (ends[high] - ends[low]) * (at - ends[low]))

    count = line(0, 1)
    straight, full = count[:, bends], line(2, 3)[:, bends]
    count[:, bends] = np.where(lower[bends], np.minimum(straight, full), np.maximum(straight, full))
    whole = np.rint(count)
    return np.where(np.abs(count - whole) <= _SAME * np.abs(whole), whole, count)


def _values(program: Program, numbers: Callable[[Section], SectionCounts]) -> Array:
    """Return all counts of a program that depend on its batch, as one array; ``numbers`` gives those of a section."""
    *parts, sizes = zip(*map(numbers, program.sections), strict=True)
    return np.concatenate([*(each for part in parts for each in part), np.stack(sizes, axis=1).ravel()])


def _is_early(
    program: Program, numbers: Callable[[Section], SectionCounts], sections: int | None
) -> npt.NDArray[np.bool_]:
    """Return True for those of a program's counts (in the order of `_values`) that belong to its first ``sections``."""
    early = np.arange(len(program.sections)) < (len(program.sections) if sections is None else sections)
    lengths = np.array([[len(part) for part in numbers(section)[:-1]] for section in program.sections]).T
    return np.concatenate(
        [*(np.repeat(early, length) for length in lengths), np.tile(early, len(_SECTION_BYTE_FIELDS))]
    )


def _section_values(section: Section) -> SectionCounts:
    """Return the counts of one section: kernels, payloads of collectives, workspaces, and other byte counts."""
    kernels: list[float] = []
    for counted in section.kernels:
        kernel = counted.kernel
        kernels += kernel.flops, kernel.vector_flops, kernel.bytes_read, kernel.bytes_written, *kernel.shape.values()
    payloads = [transfer.payload_bytes for transfer in section.collectives]
    sizes = [getattr(section, name) for name in _SECTION_BYTE_FIELDS]
    return tuple(
        np.array(each, dtype=np.float64) for each in (kernels, payloads, section.operation_workspace_bytes, sizes)
    )  # type: ignore[return-value]


def _costs(blocks: Sequence[LayoutCounts], backend: Backend) -> SectionTimes:
    """Predict the times and bytes of all layouts, summed by section: shape (sections, points).

    Kernels and collectives of all blocks are predicted at once.
    """
    counts, payloads, outputs, sizes = zip(*(block.counts_by_type for block in blocks), strict=True)
    kernels = _kernel_seconds(blocks, counts, backend)
    transfers = collective_times(backend.fabric, [(block.mesh, block.program) for block in blocks], payloads)
    known: dict[Hashable, SectionSumMatrices] = {}
    structures: dict[int, Hashable] = {}
    tables = []
    for block, times, waited, *moved in zip(blocks, kernels, transfers, outputs, sizes, strict=True):
        by_name, structure = _sizes(block.program, *moved), _of_sections(block.program, _structure, structures)
        if structure not in known:
            known[structure] = SectionSumMatrices.from_program(block.program)
        figures = [by_name[name] for name in MEMORY_FIELDS]
        tables.append(
            section_times(
                block.program,
                times,
                waited,
                figures,
                known[structure],
                call=backend.collective_issue_time,
                waiting_exponent=backend.host_wait_exponent,
            )
        )
    joined = {name: np.concatenate([getattr(table, name) for table in tables], axis=-1) for name in ARRAY_FIELDS}
    return SectionTimes(tables[0].repeat, **joined)


def _sizes(program: Program, outputs: Array, sizes: Array) -> dict[str, Array]:
    """Return the byte counts of one layout by name (see `MEMORY_FIELDS`), each of shape (sections, microbatches)."""
    by_name = dict(zip(_SECTION_BYTE_FIELDS, np.split(sizes, len(_SECTION_BYTE_FIELDS)), strict=True))
    lengths = [len(section.operation_workspace_bytes) for section in program.sections]
    by_section = np.split(outputs, np.cumsum(lengths)[:-1])
    by_name["workspace_bytes"] = np.stack([sizes.max(axis=0, initial=0.0) for sizes in by_section])
    return by_name


def _of_sections(program: Program, description: Callable[[Section], Hashable], known: dict[int, Hashable]) -> Hashable:
    """Return a description of every section of a program, as a key; ``known`` caches those of shared sections."""
    for section in program.sections:
        if id(section) not in known:
            known[id(section)] = description(section)
    return tuple([known[id(section)] for section in program.sections])


def _structure(section: Section) -> Hashable:
    """Return a key of the properties of a section on which its sums of kernel times depend (`SectionSumMatrices`)."""
    kernels = [
        (
            c.repetitions,
            c.kernel.family,
            c.kernel.phase,
            c.in_attention_core,
            c.in_shared_experts,
            c.full_recompute_runs,
            c.selective_recompute_runs,
        )
        for c in section.kernels
    ]
    owed = [
        (
            owed.calls_per_iteration,
            owed.phase,
            owed.overlapped_computation,
            owed.overlap_chunks,
            owed.recomputed,
            owed.selectively_recomputed,
        )
        for owed in section.collectives
    ]
    return tuple(kernels), tuple(owed)


def _kernel_seconds(blocks: Sequence[LayoutCounts], counts: Sequence[Array], backend: Backend) -> list[KernelTimes]:
    """Predict the times of each layout's kernels [s], shape (kernels, microbatches), each distinct kernel once."""
    blocks_of_kind: dict[object, list[int]] = {}
    kinds: dict[int, Hashable] = {}
    for index, block in enumerate(blocks):
        blocks_of_kind.setdefault(_of_sections(block.program, _kinds, kinds), []).append(index)
    known: dict[object, dict[bytes, int]] = {}
    unique: list[Kernel] = []
    places: dict[int, npt.NDArray[np.intp]] = {}
    for members in blocks_of_kind.values():
        numbers, rows, first = np.concatenate([counts[index] for index in members], axis=1), [], 0
        numbered: dict[object, Iterable[int]] = {}  # layers of different sections have many kernels in common
        for section in blocks[members[0]].program.sections:
            for counted in section.kernels:
                width = _COUNTS + len(counted.kernel.shape)
                values = np.ascontiguousarray(numbers[first : first + width].T)
                key = _kind(counted.kernel), values.tobytes()
                if key not in numbered:
                    numbered[key] = _numbered(counted.kernel, values, known, unique)
                rows.append(numbered[key])
                first += width
        table = np.array(rows, dtype=np.intp).reshape(len(rows), -1)
        ends = np.cumsum([len(blocks[index].microbatches) for index in members])
        places.update(zip(members, np.split(table, ends[:-1], axis=1), strict=True))
    times = backend.predictor.times(unique)
    figures = [getattr(times, name) for name in KernelTimes.__slots__]
    return [KernelTimes(*(figure[places[index]] for figure in figures)) for index in range(len(blocks))]


def _kind(kernel: Kernel) -> tuple[object, ...]:
    """Return a key that is equal for kernels which differ only in FLOP, bytes and sizes."""
    return kernel.family, kernel.operation, kernel.phase, kernel.host_calls, kernel.expert_count, tuple(kernel.shape)


def _kinds(section: Section) -> Hashable:
    return tuple([_kind(counted.kernel) for counted in section.kernels])


def _numbered(
    kernel: Kernel, values: Array, known: dict[object, dict[bytes, int]], unique: list[Kernel]
) -> Iterable[int]:
    """Return the index of each row of ``values`` among the ``unique`` kernels; add kernels that are not yet there."""
    positions = known.setdefault(_kind(kernel), {})
    keys = values.view(f"V{values.shape[1] * values.itemsize}").ravel().tolist()
    for row, key in enumerate(keys):
        if key not in positions:
            positions[key] = len(unique)
            flops, vector, read, written, *shape = values[row].tolist()
            kept = kernel.name, kernel.family, kernel.operation, kernel.phase
            shaped = dict(zip(kernel.shape, shape, strict=True))
            unique.append(Kernel(*kept, flops, vector, read, written, shaped, kernel.host_calls, kernel.expert_count))
    return [positions[key] for key in keys]
