"""Search for the best split of each layer of a chain, including the cost of changing the layout between layers.

Data parallelism splits every layer by its batch. A layer with many weights and few activations is better split by its
features (Krizhevsky, One weird trick, 2014). Each layer is tried under every split that it allows. The rules of
`paleo.parallel` give its communication, and dynamic programming finds the best combination (Jia, Lin, Qi and Aiken,
Exploring hidden dimensions, 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from paleo.errors import PlanError
from paleo.lowering.stages_and_recompute import has_mixed_recompute
from paleo.parallel.placement import Mesh, Placement, PlacementRule, SplitAxes
from paleo.parallel.plan import plan
from paleo.parallel.propagation import LocalLayer, propagate_placement
from paleo.step.backend import Backend, build_backend

if TYPE_CHECKING:
    from paleo.network.graph import Graph, Node
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.system import System

#: Dims that are not split, because that would need halo exchanges or move a sequence.
_LOCAL = frozenset({"height", "width", "depth", "seq"})
_BATCH: SplitAxes = {"batch": ("dp",)}


@dataclass(frozen=True, slots=True)
class LayerSplits:
    """Result of a per-layer search: the best split of each layer over all GPUs, and the predicted step time.

    ``split_by_layer`` holds (layer, split) pairs. ``step_time`` is the step time with these splits [s];
    ``data_parallel_step_time`` is the step time if every layer is data parallel [s].
    """

    split_by_layer: tuple[tuple[str, str], ...]
    step_time: float
    data_parallel_step_time: float


@dataclass(frozen=True, slots=True)
class _Option:
    """Candidate split of one layer, with the time of the layer's kernels and gradient exchange under this split [s]."""

    split: SplitAxes
    layer_time: float

    @property
    def split_text(self) -> str:
        return "+".join(self.split) or "nothing (every rank does all of it)"


def search_layer_splits(model: ModelSpec, system: System, run: Run) -> LayerSplits:
    """Search the split of every layer over all GPUs that minimises the step time, without pipeline and overlap.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.

    Returns
    -------
    LayerSplits
        Split of each layer, and the predicted step time.

    Raises
    ------
    PlanError
        If the network is no chain of layers.
    """
    _check(run)
    chosen = plan(model, system, run)
    backend = build_backend(system, run, chosen.dtype, strategy=chosen.strategy)
    graph = backend.graph(model, chosen.microbatch * chosen.dp)
    chain = _chain(graph)
    mesh = Mesh.from_degrees({"dp": run.gpus})
    search = _Chain(graph, chain, mesh, backend)
    options = search.layer_options()
    best = search.fastest_options(options)
    plain = [next(index for index, option in enumerate(layer) if option.split == _BATCH) for layer in options]
    layers = tuple((node.name, options[i][p].split_text) for i, (node, p) in enumerate(zip(chain, best, strict=True)))
    return LayerSplits(layers, search.step_time(options, best), search.step_time(options, plain))


def _check(run: Run) -> None:
    """Raise PlanError if a run has options that a per-layer search does not support."""
    if run.placement:
        raise PlanError(
            f"placement: {', '.join(run.placement)}: a per-layer search places the layers itself; leave it out"
        )
    if run.offload.states != "none":
        raise PlanError(f"offload {run.offload.states!r}: a per-layer search does not price offload; leave it out")
    if has_mixed_recompute(run) or run.pipeline.cut is not None:
        raise PlanError("recompute_layers and the like, cut: a per-layer search has no pipeline; leave them out")


def _chain(graph: Graph) -> list[Node]:
    """Return the layers that compute something, in order; raise PlanError unless they form a chain."""
    nodes = [node for node in graph.nodes if node.operations]
    for before, node in pairwise(nodes):
        if list(graph.layer_graph.predecessors(node.name)) != [before.name] or node.repeat > 1:
            raise PlanError(
                f"layer {node.name!r} forms no chain with {before.name!r}: a per-layer search takes chains of layers"
            )
    return nodes


class _Chain:
    def __init__(self, graph: Graph, chain: Sequence[Node], mesh: Mesh, backend: Backend) -> None:
        self.graph, self.chain, self.mesh, self.backend = graph, chain, mesh, backend
        self._views = {tensor.name for node in graph.nodes if not node.operations for tensor in node.inputs}
        self._known: dict[tuple[int, tuple[str, ...], tuple[str, ...]], float] = {}

    def layer_options(self) -> list[list[_Option]]:
        """Return every split that each layer allows, with the predicted time of the layer."""
        return [
            [option for split in self._splits(node) if (option := self._option(index, split))]
            for index, node in enumerate(self.chain)
        ]

    def _splits(self, node: Node) -> list[SplitAxes]:
        """Return the splits that a layer allows: by the batch, by each other dim of its output, or none.

        A dim that the next layer reads in another shape is not split.
        """
        dims = [] if node.out.name in self._views else [d for d in node.out.dims if d != "batch" and d not in _LOCAL]
        return [_BATCH, *({dim: ("dp",)} for dim in dims), {}]

    def _option(self, index: int, split: SplitAxes) -> _Option | None:
        try:
            placed = self._placed(index, _BATCH, split)
        except PlanError:
            return None
        formats = self.backend.formats
        kernels = [
            kernel
            for operation in placed.operations
            for kernel in (*operation.forward_kernels(formats), *operation.backward_kernels(formats))
        ]
        seconds = float(self.backend.predictor.times(kernels).host_synchronous_times.sum())
        sums = [
            float(tensor.elements) * formats.accumulated_gradient_bytes
            for tensor, axes in placed.parameters
            if axes and tensor.needs_gradient
        ]
        return _Option(split, seconds + self._collectives([("all_reduce", size) for size in sums]))

    def _layout_change_time(self, index: int, before: SplitAxes, after: SplitAxes) -> float:
        """Return the time to redistribute activations and gradients between two layers with different splits [s].

        Parameters
        ----------
        index : int
            Position of the later layer in the chain.
        before, after : SplitAxes
            Mesh axes that split each dim in the earlier layer and in the later one.

        Returns
        -------
        float
            Time of the collectives that are not overlapped [s].
        """
        key = index, tuple(before), tuple(after)
        if key not in self._known:
            formats = self.backend.formats
            owed = [
                owed_part for owed_part in self._placed(index, before, after).communications if not owed_part.overlapped
            ]
            self._known[key] = self._collectives(
                [(owed_part.operation, owed_part.tensor.bytes(formats)) for owed_part in owed]
            )
        return self._known[key]

    def _placed(self, index: int, before: SplitAxes, after: SplitAxes) -> LocalLayer:
        """Place one layer under split ``after``, behind a layer under split ``before``; return one rank's share.

        The share has local operations and the collectives for the change of layout. The first layer follows the inputs
        of the network, which are split by the batch.
        """
        node = self.chain[index]
        nodes = list(self.graph.nodes)
        first = nodes.index(self.chain[index - 1]) if index else nodes.index(node)
        part = nodes[first : nodes.index(node) + 1]
        outside = {tensor.name: tensor for operation in part for tensor in operation.inputs}
        graph = replace(self.graph, nodes=tuple(part), inputs=outside)
        rules = [
            PlacementRule(_BATCH),
            *([PlacementRule(before, name_pattern=part[0].name)] if index else []),
            PlacementRule(after, name_pattern=node.name),
        ]
        return propagate_placement(graph, Placement(tuple(rules)), self.mesh)[-1]

    def _collectives(self, owed: Sequence[tuple[str, float]]) -> float:
        ranks, seconds = np.array([self.mesh.size]), 0.0
        for operation, size in owed:
            seconds += float(self.backend.fabric.collective_times(operation, np.array([1]), ranks, np.array([size]))[0])
        return seconds

    def fastest_options(self, options: Sequence[Sequence[_Option]]) -> list[int]:
        """Return the split of each layer that minimises the total time, found by dynamic programming along the chain.

        Parameters
        ----------
        options : sequence of sequence of _Option
            Splits that each layer allows, with their times [s].

        Returns
        -------
        list of int
            Index of the chosen split of each layer.
        """
        costs = np.array(
            [option.layer_time + self._layout_change_time(0, _BATCH, option.split) for option in options[0]]
        )
        came: list[np.ndarray] = []
        for index in range(1, len(options)):
            change = np.array(
                [
                    [self._layout_change_time(index, a.split, b.split) for b in options[index]]
                    for a in options[index - 1]
                ]
            )
            through = costs[:, None] + change
            came.append(through.argmin(axis=0))
            costs = through.min(axis=0) + np.array([option.layer_time for option in options[index]])
        picks = [int(costs.argmin())]
        for back in reversed(came):
            picks.append(int(back[picks[-1]]))
        return picks[::-1]

    def step_time(self, options: Sequence[Sequence[_Option]], picks: Sequence[int]) -> float:
        """Return the step time if each layer uses one given split [s].

        Parameters
        ----------
        options : sequence of sequence of _Option
            Splits that each layer allows, with their times [s].
        picks : sequence of int
            Position of the chosen option of each layer.

        Returns
        -------
        float
            Time of all layers and of the layout changes between them [s].
        """
        chosen = [layer[pick] for layer, pick in zip(options, picks, strict=True)]
        before = [_BATCH, *(option.split for option in chosen[:-1])]
        return sum(
            option.layer_time + self._layout_change_time(i, split, option.split)
            for i, (option, split) in enumerate(zip(chosen, before, strict=True))
        )
