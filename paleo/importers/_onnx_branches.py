"""Conditions of ONNX files: the branch that shapes tell is read, or the longer one where only data would tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def take_branches(onnx: Any, graph: Any, truth: Callable[[Any], bool | None]) -> list[Any]:
    """Put the nodes of one branch in the place of every `If` whose condition is told.

    Parameters
    ----------
    onnx : Any
        The library.
    graph : Any
        The graph, which is changed.
    truth : callable
        Tells the condition of a node, or None.

    Returns
    -------
    list
        The branches that were taken.
    """
    nodes, taken = [], []
    for place, node in enumerate(graph.node):
        chosen = truth(node) if node.op_type == "If" else None
        name = "then_branch" if chosen else "else_branch"
        branch = next((item.g for item in node.attribute if item.name == name and item.HasField("g")), None)
        if chosen is None or branch is None or len(branch.output) != len(node.output):
            nodes.append(node)
            continue
        _rename(branch, {tensor: f"{tensor}@{place}" for tensor in _made_in(branch)})
        nodes += branch.node
        ends = zip(branch.output, node.output, strict=True)
        nodes += [onnx.helper.make_node("Identity", [inner.name], [outer]) for inner, outer in ends if outer]
        taken.append(branch)
    if taken:
        copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
        initializers = [tensor for branch in taken for tensor in branch.initializer]
        graph.initializer.extend(initializers)
        del graph.node[:]
        graph.node.extend(copies)
    return taken


def longer(node: Any) -> bool:
    """Return True if the branch taken where a condition is true has at least as many nodes as the other."""
    sizes = {attribute.name: _size(attribute.g) for attribute in node.attribute if attribute.HasField("g")}
    return sizes.get("then_branch", 0) >= sizes.get("else_branch", 0)


def graphs_of(node: Any) -> Iterator[Any]:
    """Yield the graphs that a node holds.

    Parameters
    ----------
    node : Any
        The node.

    Yields
    ------
    Any
        A graph of an attribute.
    """
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def _size(graph: Any) -> int:
    """Nodes of a graph and of all graphs within."""
    return sum(1 + sum(_size(inner) for inner in graphs_of(node)) for node in graph.node)


def _made_in(graph: Any) -> set[str]:
    """Names that a graph gives: those of its nodes' outputs and of its constants."""
    outputs = {name for node in graph.node for name in node.output if name}
    return outputs | {tensor.name for tensor in graph.initializer}


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    """Give other names to tensors wherever a graph, or one within, states them."""
    for tensor in (*graph.initializer, *graph.output):
        tensor.name = names.get(tensor.name, tensor.name)
    for node in graph.node:
        for texts in (node.input, node.output):
            texts[:] = [names.get(name, name) for name in texts]
        for inner in graphs_of(node):
            _rename(inner, names)
