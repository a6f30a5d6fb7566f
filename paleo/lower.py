"""One rank's work under a plan: sections of kernels and collectives, forward and backward, still without a clock.

A section is what the scheduler moves as one: a layer, or one turn of a folded block with how often it repeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from paleo.graph import Graph, Node
from paleo.parallel.mesh import Mesh
from paleo.parallel.placement import Placement
from paleo.parallel.propagation import PlacedNode, propagate
from paleo.precision import Precision
from paleo.work import Kernel, Phase, Tensor


@dataclass(frozen=True, slots=True)
class Counted:
    """A kernel of one turn of its section; ``times`` is above 1 for a block folded inside the section's own."""

    kernel: Kernel
    layer: str
    times: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective of one turn: ``payload_bytes`` follows nccl-tests (the full buffer of the group)."""

    name: str
    operation: str
    axis: str
    payload_bytes: float
    phase: Phase
    times: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """Parameter gradients of one turn that are summed over ``axes``: elements on this rank."""

    axes: tuple[str, ...]
    elements: float


@dataclass(frozen=True, slots=True)
class Section:
    """A layer, or one turn of a repeated block; bytes and counts are of one turn on one rank."""

    name: str
    repeat: int
    kernels: tuple[Counted, ...]
    transfers: tuple[Transfer, ...]
    gradients: tuple[Gradient, ...]
    parameters: float
    saved_bytes: float
    largest_output_bytes: float


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank does in one pass over its share of the batch, section by section in forward order."""

    sections: tuple[Section, ...]

    @property
    def parameters(self) -> float:
        """Parameter elements on this rank."""
        return sum(section.parameters * section.repeat for section in self.sections)

    @property
    def saved_bytes(self) -> float:
        return sum(section.saved_bytes * section.repeat for section in self.sections)

    def flops(self, phase: Phase | None = None) -> float:
        """FLOP of this rank, of one phase or of all."""
        return sum(
            counted.kernel.flops * counted.times * section.repeat
            for section in self.sections
            for counted in section.kernels
            if phase in (None, counted.kernel.phase)
        )


def lower(graph: Graph, placement: Placement, mesh: Mesh, precision: Precision) -> Program:
    """The program of the fullest rank."""
    placed = propagate(graph, placement, mesh)
    uses = _uses(graph.nodes)
    seen_saved: set[str] = set()
    seen_parameters: set[str] = set()
    sections = []
    for _, members in groupby(placed, key=_section_key):
        sections.append(_section(list(members), uses, seen_saved, seen_parameters, precision))
    return Program(tuple(sections))


def _section_key(placed: PlacedNode) -> str:
    node = placed.node
    return node.repeats[0][0] if node.repeats else node.name


def _uses(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """Which layers read each tensor that needs a gradient, in order: all but the last add theirs to what is there."""
    uses: dict[str, list[str]] = {}
    for node in nodes:
        for tensor in dict.fromkeys(node.inputs):
            if tensor.grad and node.operations:
                uses.setdefault(tensor.name, []).append(node.name)
    return uses


def _section(
    members: list[PlacedNode], uses: dict[str, list[str]], saved: set[str], known: set[str], precision: Precision
) -> Section:
    first = members[0].node
    name, repeat = first.repeats[0] if first.repeats else (first.name, 1)
    gradients: dict[tuple[str, ...], float] = {}
    parameters = saved_bytes = 0.0
    for one in members:
        inner = one.node.repeat // repeat
        for tensor, axes in one.parameters:
            if tensor.name not in known:
                known.add(tensor.name)
                parameters += float(tensor.elements) * inner
                gradients[axes] = gradients.get(axes, 0.0) + float(tensor.elements) * inner
        saved_bytes += sum(t.bytes(precision) for t in new_saves(one, saved)) * inner
    outputs = [operation.out.bytes(precision) for one in members for operation in one.operations]
    return Section(
        name,
        repeat,
        tuple(kernel for one in members for kernel in _kernels(one, uses, repeat, precision)),
        tuple(transfer for one in members for transfer in _transfers(one, repeat, precision)),
        tuple(Gradient(axes, elements) for axes, elements in gradients.items()),
        parameters,
        saved_bytes,
        max(outputs, default=0.0),
    )


def new_saves(placed: PlacedNode, seen: set[str]) -> list[Tensor]:
    """Tensors that this layer is the first to keep for its backward pass; ``seen`` gathers their names."""
    kept = []
    for operation in placed.operations:
        for tensor in operation.saves:
            if tensor.name not in seen and tensor.role != "parameter":
                seen.add(tensor.name)
                kept.append(tensor)
    return kept


def _kernels(placed: PlacedNode, uses: dict[str, list[str]], repeat: int, precision: Precision) -> Iterable[Counted]:
    node = placed.node
    times = node.repeat // repeat
    for operation in placed.operations:
        for kernel in (*operation.forward(precision), *operation.backward(precision)):
            yield Counted(kernel, node.name, times)
    for tensor in dict.fromkeys(node.inputs):
        readers = uses.get(tensor.name, [])
        if node.name in readers[:-1]:
            yield Counted(_accumulate(placed, tensor, precision), node.name, times)


def _accumulate(placed: PlacedNode, tensor: Tensor, precision: Precision) -> Kernel:
    """Add this reader's gradient to the one that a later reader left: read two, write one."""
    local = next((t for op in placed.operations for t in op.reads if t.name == tensor.name), tensor)
    size = local.bytes(precision)
    shape = {"rows": float(local.elements), "columns": 1.0}
    name = f"{placed.node.name}.accumulate"
    return Kernel(name, "memory", "elementwise", "backward", 0.0, float(local.elements), 2 * size, size, shape)


def _transfers(placed: PlacedNode, repeat: int, precision: Precision) -> Iterable[Transfer]:
    for one in placed.communications:
        phase: Phase = "forward" if one.when == "forward" else "backward"
        times = placed.node.repeat // repeat
        yield Transfer(one.name, one.operation, one.axis, one.tensor.bytes(precision), phase, times)


def without_backward(program: Program) -> Program:
    """The forward pass alone."""
    kept = (
        replace(
            section,
            kernels=tuple(c for c in section.kernels if c.kernel.phase == "forward"),
            transfers=tuple(t for t in section.transfers if t.phase == "forward"),
            gradients=(),
            saved_bytes=0.0,
        )
        for section in program.sections
    )
    return Program(tuple(kept))
