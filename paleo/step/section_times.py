"""Seconds and bytes of one layer iteration of each section, from the prices of its kernels and collectives.

A *layer iteration* is one pass of a microbatch through one layer of a repeated block, or through a layer that occurs
once. Arrays have the sections along their first axis and configurations along the last; one configuration may have no
last axis. Seconds and bytes.

Seconds of the collectives of layers, priced for many programs at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from paleo.lowering.policies import Policies
    from paleo.lowering.program import Program, Transfer
    from paleo.parallel.placement import Mesh
    from paleo.pricing.communication import Fabric
    from paleo.pricing.kernels import KernelTimes
    from paleo.specs.software import Overlap

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
        prices = np.split(device.times(operation, strides, ranks, sizes), np.cumsum(counts)[:-1])
        for (index, row, *_), priced in zip(members, prices, strict=True):
            seconds[index][row] = priced
    for index, (mesh, program) in enumerate(programs):
        for row, (_, transfer) in enumerate(collectives(program)):
            if transfer.once:
                seconds[index][row] += fabric.handshakes(mesh.stride((transfer.axis,)), mesh.degree(transfer.axis))
    return seconds


Index = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class SectionCosts:
    """One layer iteration of each section without recomputation, (sections, …): seconds by pass, seconds of the
    collectives that computation waits for, bytes.

    ``recomputed`` is what full recomputation runs once more of ``forward``, ``selected`` what selective does, and so
    the transfers of these names. ``hidden`` are seconds of collectives that run beside computation which takes as long;
    what is left of them is waited for. Of these ``forward_paired`` and ``backward_paired`` run beside another
    microbatch. ``limits`` are seconds of kernels by what limits them (arithmetic, memory, constant launches), of those
    that run once, that full and that selective recomputation runs again: (3 limits, 3 runs, sections, …). ``repeat``
    has the sections alone."""

    repeat: Array
    forward: Array
    backward: Array
    weights: Array
    recomputed: Array
    selected: Array
    forward_transfers: Array
    recomputed_transfers: Array
    selected_transfers: Array
    backward_transfers: Array
    hidden: Array
    forward_paired: Array
    backward_paired: Array
    limits: Array
    saved_bytes: Array
    selected_bytes: Array
    input_bytes: Array
    output_bytes: Array
    workspace_bytes: Array

    def at(self, sections: Sequence[int]) -> SectionCosts:
        """Costs of the sections at some positions, with repetitions: (sections, …)."""
        rows = list(sections)
        figures = {name: getattr(self, name)[rows] for name in FIGURES if name != "limits"}
        return SectionCosts(self.repeat[rows], **figures, limits=self.limits[:, :, rows])

    def of(self, configurations: Index) -> SectionCosts:
        """Costs of some configurations."""
        figures = {name: np.take(getattr(self, name), configurations, axis=-1) for name in FIGURES}
        return SectionCosts(self.repeat, **figures)


#: Byte figures of a section that `SectionCosts` holds.
BYTES = ("saved_bytes", "selected_bytes", "input_bytes", "output_bytes", "workspace_bytes")
#: Figures of `SectionCosts` with a last axis of configurations.
FIGURES = (
    *("forward", "backward", "weights", "recomputed", "selected"),
    *("forward_transfers", "recomputed_transfers", "selected_transfers", "backward_transfers"),
    *("hidden", "forward_paired", "backward_paired", "limits"),
    *BYTES,
)


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """One layer iteration of each section with what it recomputes, (sections, …): seconds; ``limits``: seconds of its
    kernels by what limits them (arithmetic, memory, constant launches), (3, sections, …); ``saved_bytes`` for
    backward on the device, ``offloaded_bytes`` in host memory, and ``transient`` ones, which live while the layer
    computes (again)."""

    forward: Array
    backward: Array
    weights: Array
    forward_transfers: Array
    backward_transfers: Array
    hidden: Array
    forward_paired: Array
    backward_paired: Array
    limits: Array
    saved_bytes: Array
    offloaded_bytes: Array
    transient: Array
    output_bytes: Array
    workspace_bytes: Array

    @property
    def forwards(self) -> Array:
        """Seconds of a forward iteration with its collectives."""
        return self.forward + self.forward_transfers

    @property
    def backwards(self) -> Array:
        """Seconds of a backward iteration with its collectives; gradients of weights apart."""
        return self.backward + self.backward_transfers

    @property
    def iteration(self) -> Array:
        """Seconds of one iteration, forward and backward."""
        return self.forwards + self.backwards + self.weights

    def of(self, configurations: Index) -> LayerTimes:
        """Times of some configurations."""
        return LayerTimes(*(np.take(getattr(self, name), configurations, axis=-1) for name in LayerTimes.__slots__))


#: How strongly the longer of device and host prevails where the host runs ahead freely.
AHEAD = 4.0
#: What the exchange of tokens leaves of the multiprocessors: its kernels take 24 of 132 (DeepSeek-V3 technical report,
#: 2024, section 3.2.2: 20; DeepEP's default: 24 on Hopper).
BESIDE_DISPATCH = 1.0 - 24.0 / 132.0


@dataclass(frozen=True, slots=True)
class Sums:
    """How kernels and collectives add up to sections: matrices of (sections, kernels) and (sections, collectives).

    ``forward_overlapped`` and ``backward_overlapped`` are collectives that overlap with the section's computation,
    those of ``…_ring`` with the core of attention alone, ``…_pieces`` in ``pieces`` with the products with weights,
    ``…_beside_shared`` with the kernels ``…_shared`` of experts that all tokens visit, ``…_experts`` with another
    microbatch's computation.
    ``calls`` counts the collectives of each section, forward and backward; ``routes``: those that dispatch tokens.
    """

    forward: Array
    backward: Array
    weights: Array
    core: Array
    backward_core: Array
    recomputed: Array
    selected: Array
    spared: Array
    selected_transfers: Array
    forward_transfers: Array
    backward_transfers: Array
    forward_overlapped: Array
    backward_overlapped: Array
    forward_ring: Array
    backward_ring: Array
    forward_pieces: Array
    backward_pieces: Array
    forward_beside_shared: Array
    backward_beside_shared: Array
    forward_experts: Array
    backward_experts: Array
    forward_products: Array
    backward_products: Array
    forward_shared: Array
    backward_shared: Array
    pieces: Array
    calls: Array
    routes: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, program: Program) -> Sums:
        """Kernels and `collectives` in the order of the program."""
        kernels = [(i, counted) for i, section in enumerate(program.sections) for counted in section.kernels]
        transfers = list(collectives(program))

        def matrix(cells: Sequence[tuple[int, float, bool]]) -> Array:
            sums = np.zeros((len(program.sections), len(cells)))
            for column, (row, times, counts) in enumerate(cells):
                sums[row, column] = times * counts
            return sums

        forward, backward, weights = (
            matrix([(i, counted.times, counted.kernel.phase == phase) for i, counted in kernels])
            for phase in ("forward", "backward", "backward_weight")
        )
        cores = (
            matrix([(i, counted.times, counted.core and counted.kernel.phase == phase) for i, counted in kernels])
            for phase in ("forward", "backward")
        )
        recomputed = (
            matrix([(i, counted.times * share(counted), counted.kernel.phase == "forward") for i, counted in kernels])
            for share in (attrgetter("recomputed"), attrgetter("selected"))
        )
        spared = matrix([(i, each.times, each.phase == "forward" and not each.recomputed) for i, each in transfers])
        selected = matrix([(i, each.times, each.selected) for i, each in transfers])
        overlaps = [
            matrix([(i, each.times, (each.phase, each.hides_behind) == (phase, beside)) for i, each in transfers])
            for beside in ("nothing", "section", "core", "products", "shared experts", "microbatch")
            for phase in ("forward", "backward")
        ]
        gemm = np.array([counted.kernel.family == "gemm" and not counted.core for _, counted in kernels], dtype=float)
        shared = np.array([counted.shared for _, counted in kernels], dtype=float)
        products = (forward * gemm, (backward + weights) * gemm, forward * shared, (backward + weights) * shared)
        pieces = np.asarray(max((float(each.pieces) for _, each in transfers), default=1.0))
        calls = np.stack([sum(matrix.sum(axis=1) for matrix in overlaps[phase::2]) for phase in (0, 1)])
        routed = {i for i, counted in kernels if counted.kernel.experts > 0 and counted.kernel.family == "memory"}
        routes = np.array([i in routed for i in range(len(program.sections))], dtype=bool)
        sums = (forward, backward, weights, *cores, *recomputed, spared, selected, *overlaps, *products)
        return cls(*(*sums, pieces, calls, routes))


def section_costs(
    program: Program,
    kernels: KernelTimes,
    transfers: Array,
    sizes: Sequence[Array],
    sums: Sums | None = None,
    *,
    call: float = 0.0,
    waiting_power: float = AHEAD,
) -> SectionCosts:
    """Costs from seconds of every kernel (kernels, …) and of every collective (`collectives`, …), which costs the host
    a ``call``; ``sizes`` as in `BYTES`, (sections, …) each.

    A pass of a section takes as long as `paced` says of all its kernels and collectives together; what it waits for the
    host counts to its kernels, with a ``waiting_power`` where tokens are dispatched and the host waits for counts.

    ``sums``: those of a program of the same structure, where they are at hand.
    """
    sums = sums or Sums.of(program)
    device, host = kernels.total, kernels.host
    forward, backward, weights = (each @ device for each in (sums.forward, sums.backward, sums.weights))
    there, back, hidden, forward_paired, backward_paired = _waited(sums, device, transfers)
    again, once_more = sums.recomputed @ device, np.maximum(there - sums.spared @ transfers, 0.0)
    calls = (sums.calls * call).reshape((2, -1) + (1,) * (forward.ndim - 1))
    gradients = backward + weights
    slower = (
        paced(gradients + back, (sums.backward + sums.weights) @ host + calls[1], sums.routes, waiting_power) - back
    )
    share = np.divide(slower, gradients, out=np.ones_like(gradients), where=gradients > 0)
    return SectionCosts(
        section_figures(program, "repeat"),
        paced(forward + there, sums.forward @ host + calls[0], sums.routes, waiting_power) - there,
        backward * share,
        weights * share,
        paced(again + once_more, sums.recomputed @ host + calls[0], sums.routes, waiting_power) - once_more,
        paced(sums.selected @ device, sums.selected @ host),
        there,
        once_more,
        sums.selected_transfers @ transfers,
        back,
        hidden,
        forward_paired,
        backward_paired,
        _limits(sums, kernels),
        *sizes,
    )


def _waited(sums: Sums, device: Array, transfers: Array) -> tuple[Array, ...]:
    """Seconds of collectives that a section waits for, forward and backward, of those that computation hides, and of
    these such that run beside another microbatch, forward and backward: (sections, …) each. What is cut into n pieces
    leaves the first of them uncovered, so hides 1 - 1/n of the shorter of the collective and its products. A forward
    pass beside another microbatch's backward pass shares half of both."""
    forward, backward = sums.forward @ device, (sums.backward + sums.weights) @ device
    overlapped = (
        (sums.forward_overlapped, forward),
        (sums.forward_ring, sums.core @ device),
        (sums.backward_overlapped, backward),
        (sums.backward_ring, sums.backward_core @ device),
        (sums.forward_pieces, sums.forward_products @ device),
        (sums.backward_pieces, sums.backward_products @ device),
        (sums.forward_beside_shared, sums.forward_shared @ device),
        (sums.backward_beside_shared, sums.backward_shared @ device),
        (sums.forward_experts, (forward + backward) / 2.0),
        (sums.backward_experts, (forward + backward) / 2.0),
    )
    later = 1.0 - 1.0 / sums.pieces
    shares = (1.0, 1.0, 1.0, 1.0, later, later, *(BESIDE_DISPATCH,) * 4)
    hidden = [
        np.minimum(matrix @ transfers, covering) * share
        for (matrix, covering), share in zip(overlapped, shares, strict=True)
    ]
    left = [matrix @ transfers - covered for (matrix, _), covered in zip(overlapped, hidden, strict=True)]
    there = sums.forward_transfers @ transfers + left[0] + left[1] + left[4] + left[6] + left[8]
    back = sums.backward_transfers @ transfers + left[2] + left[3] + left[5] + left[7] + left[9]
    *_, forward_paired, backward_paired = hidden
    return there, back, sum(hidden, np.zeros(())), forward_paired, backward_paired


def _limits(sums: Sums, kernels: KernelTimes) -> Array:
    """Seconds of kernels by their limit and by the pass in which they run, as `SectionCosts.limits`."""
    work = kernels.total - kernels.launch
    by_limit = (work * kernels.arithmetic, work * ~kernels.arithmetic, kernels.launch)
    runs = (sums.forward + sums.backward + sums.weights, sums.recomputed, sums.selected)
    return np.stack([np.stack([matrix @ seconds for matrix in runs]) for seconds in by_limit])


def paced(
    device: Array, host: Array, waits: npt.NDArray[np.bool_] | None = None, waiting_power: float = AHEAD
) -> Array:
    """Seconds of work that the host issues ahead of the device: (device⁴ + host⁴)^¼; in sections (the first axis) where
    it ``waits`` for the device on its way, with ``waiting_power`` in place of 4.

    A host that runs ahead freely would make it the longer of the two; calls of uneven length and waiting for other
    ranks cost most where both are alike. The fourth power is that of a study of whole steps (FINDINGS_STEPS.md, CNNs).

    >>> paced(np.array([3.0, 1.0, 1.0]), np.array([0.0, 1.0, 1.0]), np.array([True, False, True]), 2.5).round(3)
    array([3.   , 1.189, 1.32 ])
    """
    seconds = np.where(host > 0, np.sqrt(np.sqrt(np.square(np.square(device)) + np.square(np.square(host)))), device)
    if waits is not None and waits.any() and waiting_power != AHEAD:
        some = (device[waits] ** waiting_power + host[waits] ** waiting_power) ** (1.0 / waiting_power)
        seconds[waits] = np.where(host[waits] > 0, some, device[waits])
    return seconds


def section_figures(program: Program, name: str) -> Array:
    """A figure of each section of a program."""
    return np.array([getattr(section, name) for section in program.sections], dtype=np.float64)


def layer_times(costs: SectionCosts, policies: Policies) -> LayerTimes:
    """Layer iterations with what their sections recompute: nothing, a selection (the core of attention), or all from
    the input of each layer or group of layers.

    A group keeps one input, and all its activations live at once when they have been brought back. References:
    Korthikanti et al., Reducing activation recomputation in large transformer models, MLSys 2023; Chen et al., Training
    deep nets with sublinear memory cost, arXiv:1604.06174 (groups).
    """
    whole, core, group = policies.shaped(costs.forward.ndim)
    again = np.where(whole, costs.recomputed, core * costs.selected)
    input_bytes = np.minimum(costs.input_bytes, costs.saved_bytes) / group
    kept = np.where(whole, input_bytes, costs.saved_bytes) - core * costs.selected_bytes
    return LayerTimes(
        costs.forward,
        costs.backward + again,
        weights=costs.weights,
        forward_transfers=costs.forward_transfers,
        backward_transfers=costs.backward_transfers
        + np.where(whole, costs.recomputed_transfers, core * costs.selected_transfers),
        hidden=costs.hidden,
        forward_paired=costs.forward_paired,
        backward_paired=costs.backward_paired,
        limits=np.asarray(costs.limits[:, 0] + np.where(whole, costs.limits[:, 1], core * costs.limits[:, 2])),
        saved_bytes=kept,
        offloaded_bytes=np.zeros_like(kept),
        transient=np.where(whole, costs.saved_bytes * group, 0.0),
        output_bytes=costs.output_bytes,
        workspace_bytes=costs.workspace_bytes,
    )


def partly_paired(times: LayerTimes, alone: Array) -> LayerTimes:
    """Iterations of which a share ``alone`` runs without a pass of another microbatch, and so waits for collectives
    that such a pass would hide."""
    forward, backward = alone * times.forward_paired, alone * times.backward_paired
    return replace(
        times,
        forward_transfers=times.forward_transfers + forward,
        backward_transfers=times.backward_transfers + backward,
        hidden=times.hidden - forward - backward,
        forward_paired=times.forward_paired - forward,
        backward_paired=times.backward_paired - backward,
    )


def contended(
    times: LayerTimes, gathers: Array, gradients: Array, overlap: Overlap, regathers: Array | None = None
) -> LayerTimes:
    """Iterations slowed by the collectives beside them, gathers (both directions; ``regathers`` backward, where they
    differ) and gradient exchange (backward): by ``overlap.contention`` seconds for each second in which both go on, no
    more than they would take one after the other; by all of their seconds where computation waits for them."""
    if overlap.sharded and overlap.contention == 0.0:
        return times
    again = gathers if regathers is None else regathers
    backward = times.backward + times.weights
    return replace(
        times,
        forward=times.forward + _lost(times.forward, gathers, overlap),
        backward=times.backward + _lost(backward, again + gradients, overlap),
    )


def _lost(computing: Array, travelling: Array, overlap: Overlap) -> Array:
    """Seconds that iterations lose to collectives that run beside them, or for which they wait."""
    return overlap.contention * np.minimum(computing, travelling) if overlap.sharded else travelling


def per_stage(layers: Array, figures: Array) -> Array:
    """Figures of sections summed over the layers that each stage holds: (stages, sections) with (sections, …) to
    (stages, …)."""
    return np.tensordot(layers, figures, axes=1)
