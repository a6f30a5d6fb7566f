"""Search space of plans: the meshes, shares of the batch and other choices that a search tries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from paleo.errors import PlanError, SpecError
from paleo.lowering.stages_and_recompute import RECOMPUTE_POLICIES, has_mixed_recompute
from paleo.parallel.placement import (
    AXES,
    BATCH_AXES,
    STRATEGY_PRESETS,
    ZERO_STAGE_BY_NAME,
    ContextParallelMethod,
    Mesh,
    Strategy,
    parse_strategy,
    shard_degree_within_node,
)
from paleo.parallel.plan import DEFAULT_BATCH, DEFAULT_SEQUENCES
from paleo.schedules.base import SCHEDULES

if TYPE_CHECKING:
    from paleo.network.graph import Graph
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run

#: Axes that a search may use beside dp.
SEARCHED_AXES = ("tp", "cp", "ep", "pp")


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Choices that a plan search tries. All values of an option are tried unless the user fixes some.

    ``degrees`` fixes degrees of mesh axes. ``microbatches`` and ``chunks`` list the values that are tried.
    ``sequence_parallel`` and ``overlaps_gradient_exchange`` fix a choice. Pipelines with ZeRO-3 are tried only with
    ``zero3_pipelines``. Axes other than dp and `SEARCHED_AXES`, such as shard groups and spatial splits, are used
    only if ``degrees`` has them.

    ``context_parallel_methods`` lists how attention splits a sequence over cp; None tries rings and, for sequences of
    `LONG_SEQUENCE_TOKENS` tokens or more, all-to-alls. ``preset`` is the preset of the strategy. With
    ``shards_within_nodes`` shard groups are nodes. ``etp`` lists tensor degrees of experts that are folded over tp and
    cp (None: not folded); without it the degrees that the software's users choose are tried. ``framework`` limits the
    configurations to its abilities (`paleo.specs.framework_capabilities`); None sets no limit.
    """

    degrees: Mapping[str, int] = field(default_factory=dict)
    microbatches: tuple[int, ...] | None = None
    chunks: tuple[int, ...] | None = None
    recompute: tuple[str, ...] = RECOMPUTE_POLICIES
    zero: tuple[int, ...] = (0, 1, 2, 3)
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    sequence_parallel: bool | None = None
    overlaps_gradient_exchange: bool | None = None
    zero3_pipelines: bool = False
    context_parallel_methods: tuple[ContextParallelMethod, ...] | None = None
    preset: str = "dp"
    shards_within_nodes: bool = False
    etp: tuple[int | None, ...] | None = None
    framework: str | None = None


#: Shortest sequence [tokens] for which all-to-alls over cp are tried besides rings.
LONG_SEQUENCE_TOKENS = 16384


def search_space_from_options(strategy: str | None, **stated: object) -> SearchSpace:
    """Return a search space in which a strategy text and single values fix some choices.

    Parameters
    ----------
    strategy : str, optional
        Strategy as on the command line.
    **stated : object
        Values by field of `SearchSpace`, each of which becomes the only one tried; None leaves a field open.

    Returns
    -------
    SearchSpace
        Space with these choices fixed.

    Examples
    --------
    >>> search_space_from_options("tp=8,zero=1", recompute="full").degrees
    {'tp': 8}
    """
    fixed: dict[str, object] = {name: (value,) for name, value in stated.items() if value is not None}
    if strategy is not None:
        parsed = parse_strategy(strategy)
        fixed |= {"preset": parsed.preset} | (
            {} if parsed.expert_tensor_degree is None else {"etp": (parsed.expert_tensor_degree,)}
        )
        fixed |= {"context_parallel_methods": (parsed.context_parallel_method,)} if "ulysses" in parsed.flags else {}
        words = {part.partition("=")[0].strip() for part in strategy.split(",")}
        fixed["degrees"] = dict(parsed.degrees)
        fixed |= (
            {"zero": (parsed.zero,), "zero3_pipelines": parsed.zero == 3}
            if words & {"zero", *ZERO_STAGE_BY_NAME}
            else {}
        )
        fixed["shards_within_nodes"] = parsed.shards_within_nodes
        fixed |= {"chunks": (parsed.chunks,)} if "vp" in words else {}
        fixed |= {"sequence_parallel": True} if "sp" in words else {}
    if stated.get("schedules") is not None:
        SCHEDULES[str(stated["schedules"])]
    if fixed.get("schedules") == ("1f1b",):
        fixed["schedules"] = ("1f1b", "interleaved")
    return SearchSpace(**fixed)  # type: ignore[arg-type]


def check_search_options(run: Run) -> None:
    """Raise PlanError if a run has options that a plan search does not support.

    Parameters
    ----------
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.

    Raises
    ------
    PlanError
        If an option is not supported, such as a stale consistency model or per-layer recomputation.
    """
    if run.exchange.consistency != "bsp":
        model = run.exchange.consistency
        stale = f"consistency {model!r}: plans are ranked by time alone, which always prefers the stalest"
        raise PlanError(f"{stale}; state what staleness costs (--staleness-cost, --noise-scale), or estimate it")
    if has_mixed_recompute(run):
        raise PlanError("recompute_layers and the like: a search recomputes all layers alike; leave them out")
    if run.pipeline.cut == "time":
        raise PlanError(
            "pipeline.cut 'time': a search balances pieces itself; leave it out, or state the layers of each piece"
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Device mesh of a configuration, with samples of each data-parallel rank and the method of context parallelism.

    ``etp`` is the tensor-parallel degree of experts that are folded over other axes; None if they are not folded.
    """

    mesh: Mesh
    sequence_parallel: bool
    local_batch: int
    context_parallel_method: ContextParallelMethod = "ring"
    etp: int | None = None

    @property
    def expert_ranks(self) -> int:
        """Number of ranks over which the experts are spread."""
        axes = expert_folding_strategy(self.etp).expert_axes
        return self.mesh.group_size(axes)


def list_layouts(
    graph: Graph, gpus: int, global_batch: int, space: SearchSpace, devices_per_node: int = 1
) -> list[Layout]:
    """List the device meshes for a GPU count in which each axis splits something and each data-parallel rank has work.

    Parameters
    ----------
    graph : Graph
        Network as a graph of layers.
    gpus : int
        Number of GPUs.
    global_batch : int
        Samples of one optimizer step.
    space : SearchSpace
        Values that the search varies.
    devices_per_node : int, optional
        Devices of a node, for shard groups within nodes.

    Returns
    -------
    list of Layout
        Layouts that the search tries.
    """
    useful, laid_out = _useful(graph, space), []
    stated = {axis: space.degrees.get(axis, 1) for axis in AXES if axis not in (*SEARCHED_AXES, "dp")}
    splits = product(*(_degrees(axis, gpus, graph, useful, space) for axis in SEARCHED_AXES))
    for (tp, cp, experts, pp), etp in product(splits, space.etp or (None,)):
        ep = _data_ranks(tp, cp, experts, etp, unfolded=space.etp is not None and None not in space.etp)
        if ep is None:
            continue
        degrees = {**stated, "tp": tp, "cp": cp, "ep": ep, "pp": pp}
        model_ranks = math.prod([degrees[axis] for axis in AXES if axis not in BATCH_AXES])
        replicas = gpus // model_ranks
        degrees |= (
            shard_degree_within_node(devices_per_node, replicas, model_ranks // pp) if space.shards_within_nodes else {}
        )
        ranks = math.prod(degrees.values())
        if (
            gpus % ranks
            or space.degrees.get("dp", replicas) != replicas
            or not _shares_batch_evenly(global_batch, replicas)
        ):
            continue
        mesh, local = Mesh.from_degrees(degrees | {"dp": gpus // ranks}), math.ceil(global_batch / replicas)
        for context in _contexts(graph, cp, space):
            laid_out += [Layout(mesh, sp, local, context, etp) for sp in _sequence_parallel(tp, space)]
    return laid_out


def _data_ranks(tp: int, cp: int, experts: int, etp: int | None, *, unfolded: bool) -> int | None:
    """Return the degree of ep that spreads folded experts over ``experts`` ranks, besides the ranks of tp and cp.

    Returns None if the degrees do not allow it. Also returns None if nothing is folded, unless ``unfolded`` is True.
    """
    if etp is None:
        return experts
    inner = cp if etp == tp > 1 else tp * cp
    folds = experts > 1 and (inner > 1 or unfolded)
    return experts // inner if folds and etp in (1, tp) and experts % inner == 0 else None


def expert_folding_strategy(etp: int | None) -> Strategy:
    """Return a strategy with nothing but the tensor degree of experts, which decides the axes that spread the experts.

    Parameters
    ----------
    etp : int, optional
        Tensor degree of the experts; None if they are not folded.

    Returns
    -------
    Strategy
        Strategy whose only use is its `Strategy.expert_axes`.
    """
    return Strategy(degrees={} if etp is None else {"tp": max(etp, 2), "ep": 2}, expert_tensor_degree=etp)


def _contexts(graph: Graph, cp: int, space: SearchSpace) -> tuple[ContextParallelMethod, ...]:
    """Return the methods of context parallelism (ring, all-to-all) that the search tries at a degree cp."""
    if cp == 1 or space.context_parallel_methods is not None:
        return space.context_parallel_methods or ("ring",)
    return ("ring", "all_to_all") if (graph.tokens_per_sample or 0) >= LONG_SEQUENCE_TOKENS else ("ring",)


#: Largest fraction of the global batch by which the slots for samples of a layout may exceed it, and stay idle.
_IDLE = 0.25


def _shares_batch_evenly(global_batch: int, replicas: int) -> bool:
    """Return True if each data-parallel rank gets samples and idle sample slots are at most a quarter of the batch."""
    local = math.ceil(global_batch / replicas)
    return math.ceil(global_batch / local) == replicas and local * replicas <= (1.0 + _IDLE) * global_batch


def _degrees(axis: str, gpus: int, graph: Graph, useful: frozenset[str], space: SearchSpace) -> Sequence[int]:
    if axis in space.degrees:
        return (space.degrees[axis],)
    if axis == "pp" and not space.schedules:
        return (1,)
    if axis == "pp":
        return tuple(pp for pp in divisors(gpus) if pp == 1 or _has_enough_layers(graph, pp))
    return divisors(gpus) if axis in useful else (1,)


def _has_enough_layers(graph: Graph, stages: int) -> bool:
    """Return True if a network has at least one layer for each of ``stages`` pipeline stages."""
    repeats = {node.loops[0] for node in graph.nodes if node.repeat > 1}
    return stages <= (sum(repeat for _, repeat in repeats) if repeats else len(graph.nodes))


def _useful(graph: Graph, space: SearchSpace) -> frozenset[str]:
    """Return the mesh axes that split a dim other than the batch in at least one layer."""
    placement = STRATEGY_PRESETS[space.preset](graph, Strategy(space.preset))
    used: set[str] = set()
    for node in graph.nodes:
        dims = {d for op in node.operations for tensor in (*op.read_tensors, op.out) for d in tensor.dims} - {"batch"}
        used.update(axis for dim, axes in placement.split_axes_of(node).items() if dim in dims for axis in axes)
    return frozenset(used)


def _sequence_parallel(tp: int, space: SearchSpace) -> Iterator[bool]:
    if space.sequence_parallel is not True or tp == 1:
        yield False
    if space.sequence_parallel is not False and tp > 1:
        yield True


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number in ascending order.

    Parameters
    ----------
    number : int
        Positive number.

    Returns
    -------
    tuple of int
        Divisors, from 1 to the number itself.

    Examples
    --------
    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    candidates = np.arange(1, math.isqrt(number) + 1)
    small = candidates[number % candidates == 0].tolist()
    return tuple(sorted({*small, *(number // n for n in small)}))


def microbatch_sizes(local_batch: int, space: SearchSpace) -> tuple[int, ...]:
    """Return the microbatches that a search tries: those that divide a rank's share of the batch.

    Parameters
    ----------
    local_batch : int
        Samples of one data-parallel rank.
    space : SearchSpace
        Values that the search varies.

    Returns
    -------
    tuple of int
        Microbatches in ascending order [samples].
    """
    return tuple(n for n in divisors(local_batch) if space.microbatches is None or n in space.microbatches)


def search_global_batch(model: ModelSpec, run: Run) -> int:
    """Return the global batch of a search, by default 32 samples (or 8 sequences) for each GPU.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    run : Run
        Run with its batch, global batch and GPU count.

    Returns
    -------
    int
        Global batch [samples].

    Raises
    ------
    SpecError
        If the run has both a batch and a global batch.
    """
    if run.batch is not None and run.global_batch is not None:
        raise SpecError("batch and global_batch are both given; a search keeps the global batch, so state one of them")
    return run.global_batch or (run.batch or (DEFAULT_BATCH if model.tokens is None else DEFAULT_SEQUENCES)) * run.gpus
