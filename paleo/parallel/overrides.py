"""Placements that a user states layer by layer, laid over those of a preset.

``placement:`` of a run names layers and says which mesh axes divide their dims:

    block.*.mlp1: {ffn: tp}
    "*.attention*": {kv_heads: tp, seq: [cp]}
    head: {vocab: null}

Names may be patterns. The iterations of a folded block are one counted copy, called ``block.*``. Dims that an entry
leaves out keep the split of the preset, or of an earlier entry; ``null`` leaves a dim whole. What must be communicated
follows from the rules of ``propagation``, as it does for a preset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from paleo.errors import PlanError, near
from paleo.network.graph import Graph, Node
from paleo.parallel.mesh import AXES, Axes
from paleo.parallel.placement import STRATEGIES, Placement, Rule, Split, Strategy

Stated = Mapping[str, Mapping[str, str | Sequence[str] | None]]
#: Axes that a dim may be divided over: a pipeline cuts the graph instead.
PLACEABLE = tuple(axis for axis in AXES if axis != "pp")


def placement(graph: Graph, strategy: Strategy, stated: Stated, imbalance: float = 1.0) -> Placement:
    """The placement of a strategy's preset with what is stated laid over it; ``imbalance`` as in `Placement`."""
    preset = STRATEGIES[strategy.preset](graph, strategy)
    return replace(overridden(preset, graph, stated), imbalance=imbalance)


def overridden(preset: Placement, graph: Graph, stated: Stated) -> Placement:
    """The placement with what is ``stated`` laid over it, entry by entry.

    Raises PlanError, with the nearest names, for an entry that names no layer, no dim or no axis, and for an axis that
    would divide two dims of one tensor.
    """
    splits: dict[str, Split] = {}
    for pattern, dims in stated.items():
        nodes = _named(graph, pattern)
        changes = {dim: _axes(pattern, dim, axes) for dim, axes in dims.items()}
        _check_dims(pattern, changes, nodes)
        for node in nodes:
            present = {dim: axes for dim, axes in changes.items() if dim in _dims(node)}
            splits[node.name] = {**splits.get(node.name, preset.of(node)), **present}
    for node in graph.nodes:
        if node.name in splits:
            _check_axes(node, splits[node.name])
    return replace(preset, rules=(*preset.rules, *(Rule(split, name=name) for name, split in splits.items())))


def label(node: Node) -> str:
    """The name of a layer with ``*`` for the iteration of each folded block: ``block.*.mlp1``."""
    name = node.name
    for loop, _ in reversed(node.repeats):
        if name.startswith(f"{loop}."):
            name = f"{loop}.*{name.removeprefix(loop)}"
    return name


def _named(graph: Graph, pattern: str) -> list[Node]:
    computing = [node for node in graph.nodes if node.operations]
    matching = [node for node in computing if fnmatchcase(label(node), pattern) or fnmatchcase(node.name, pattern)]
    if not matching:
        hint = near(pattern, dict.fromkeys(map(label, computing)))
        raise PlanError(f"placement: no layer of {graph.name} is called {pattern!r}; {hint}")
    return matching


def _dims(node: Node) -> set[str]:
    return {dim for op in node.operations for tensor in (*op.reads, op.out) for dim in tensor.dims}


def _axes(pattern: str, dim: str, axes: str | Sequence[str] | None) -> Axes:
    names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    where = f"placement: {pattern}: {dim}"
    for name in names:
        if name == "pp":
            raise PlanError(f"{where}: a pipeline cuts the network into stages, it divides no dim; leave pp out")
        if name not in PLACEABLE:
            raise PlanError(f"{where}: unknown mesh axis {name!r}; {near(name, PLACEABLE)}")
    if len(set(names)) < len(names):
        raise PlanError(f"{where}: names an axis twice: {', '.join(names)}")
    return names


def _check_dims(pattern: str, dims: Iterable[str], nodes: Sequence[Node]) -> None:
    known = dict.fromkeys(dim for node in nodes for dim in sorted(_dims(node)))
    for dim in dims:
        if dim not in known:
            layers = f"layer {nodes[0].name!r} has" if len(nodes) == 1 else f"none of the {len(nodes)} layers has"
            raise PlanError(f"placement: {pattern}: {layers} no dim {dim!r}; {near(dim, known)}")


def _check_axes(node: Node, split: Split) -> None:
    """An axis divides one dim of a tensor at most."""
    for tensor in (tensor for op in node.operations for tensor in (*op.reads, op.out)):
        met: dict[str, str] = {}
        for dim in tensor.dims:
            for axis in split.get(dim, ()):
                if axis in met:
                    both = f"{met[axis]!r} and {dim!r} of {tensor.name!r}"
                    raise PlanError(f"placement: layer {node.name!r}: {axis} would divide both {both}; keep one")
                met[axis] = dim
