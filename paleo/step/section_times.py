"""Times and bytes of one layer iteration of each section, from the times of its kernels and collectives.

A *section* is a run of equal layers. A *layer iteration* is one pass of a microbatch through one layer of a repeated
block, or through a layer that occurs once. Arrays have the sections along their first axis and configurations along the
last, which may be missing for a single configuration. Units are seconds and bytes.

The times of kernels and collectives are given. Here they are summed by section (`SectionSumMatrices`), overlapped where
collectives run beside computation, and combined with the host time to issue them (`_host_paced_time`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from paleo.lowering.program import CountedKernel, LayerCollective, Program
    from paleo.lowering.stages_and_recompute import RecomputePolicies
    from paleo.parallel.placement import Mesh
    from paleo.pricing.communication import Fabric
    from paleo.pricing.kernels import KernelTimes
    from paleo.specs.software import Overlap

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]


def enumerate_collectives(program: Program) -> Iterator[tuple[int, LayerCollective]]:
    """List the collectives of all sections (runs of layers) of a program, with the section's index.

    Parameters
    ----------
    program : Program
        Kernels and collectives of one rank.

    Yields
    ------
    Iterator[tuple[int, LayerCollective]]
        Position of the section, and the collective.
    """
    for index, section in enumerate(program.sections):
        for transfer in section.collectives:
            yield index, transfer


def collective_times(
    fabric: Fabric, programs: Sequence[tuple[Mesh, Program]], payloads: Sequence[Array]
) -> list[Array]:
    """Return the time of each collective inside the layers of several programs.

    The host time of the calls is counted with the kernels.

    Parameters
    ----------
    fabric : Fabric
        Predictor of collective times on the network of the system.
    programs : Sequence[tuple[Mesh, Program]]
        Mesh and program of each layout.
    payloads : sequence of Array, shape (collectives, points)
        Payload of each collective of each program [byte].

    Returns
    -------
    list of Array
        Seconds, one array of shape (collectives, points) per program.
    """
    seconds = [np.zeros(each.shape) for each in payloads]
    cells: dict[str, list[tuple[int, int, int, int]]] = {}
    device = replace(fabric, host_launch_time=0.0)
    for index, (mesh, program) in enumerate(programs):
        for row, (_, transfer) in enumerate(enumerate_collectives(program)):
            place = index, row, mesh.stride((transfer.axis,)), mesh.degree(transfer.axis)
            cells.setdefault(transfer.operation, []).append(place)
    for operation, members in cells.items():
        counts = [payloads[index].shape[1] for index, *_ in members]
        strides, ranks = (np.repeat([cell[part] for cell in members], counts) for part in (2, 3))
        sizes = np.concatenate([payloads[index][row] for index, row, *_ in members])
        prices = np.split(device.collective_times(operation, strides, ranks, sizes), np.cumsum(counts)[:-1])
        for (index, row, *_), priced in zip(members, prices, strict=True):
            seconds[index][row] = priced
    for index, (mesh, program) in enumerate(programs):
        for row, (_, transfer) in enumerate(enumerate_collectives(program)):
            group = mesh.stride((transfer.axis,)), mesh.degree(transfer.axis)
            if transfer.token_direction:
                exchange = fabric.token_exchange_time(transfer.token_direction, *group, payloads[index][row])
                seconds[index][row] = seconds[index][row] if exchange is None else exchange
            if transfer.carries_expert_tokens:
                seconds[index][row] += fabric.group_handshake_time(*group)
    return seconds


@dataclass(frozen=True, slots=True)
class SectionTimes:
    """Time [s] and memory [byte] of one layer of each section (run of equal layers), without recomputation.

    Arrays have the shape (sections, …).

    Attributes
    ----------
    repeat : ndarray, shape (sections,)
        Number of layers of the section.
    forward, backward, weight_gradients : ndarray
        Compute time of the passes.
    recomputed, selectively_recomputed : ndarray
        Compute time that full and selective recomputation repeats.
    forward_transfers, recomputed_transfers, selectively_recomputed_transfers, backward_transfers : ndarray
        Exposed communication of the passes, and of recomputation.
    hidden_transfers : ndarray
        Communication hidden behind computation; its exposed part counts in the fields above.
    forward_paired_transfers, backward_paired_transfers : ndarray
        Part of ``hidden_transfers`` that overlaps with another microbatch.
    times_by_limit : ndarray, shape (3 limits, 3 runs, sections, …)
        Kernel times by limit (arithmetic, memory, constant launches) and by run (the step itself, the repetition by
        full recomputation, that by selective recomputation).
    saved_bytes, selectively_freed_bytes, input_bytes, output_bytes, workspace_bytes : ndarray
        Saved activations, those that selective recomputation frees, input and output of the section, and temporary
        memory.
    """

    repeat: Array
    forward: Array
    backward: Array
    weight_gradients: Array
    recomputed: Array
    selectively_recomputed: Array
    forward_transfers: Array
    recomputed_transfers: Array
    selectively_recomputed_transfers: Array
    backward_transfers: Array
    hidden_transfers: Array
    forward_paired_transfers: Array
    backward_paired_transfers: Array
    times_by_limit: Array
    saved_bytes: Array
    selectively_freed_bytes: Array
    input_bytes: Array
    output_bytes: Array
    workspace_bytes: Array

    def select_configurations(self, configurations: Index) -> SectionTimes:
        """Select the times and memory of some configurations by index, along the last axis.

        Parameters
        ----------
        configurations : Index
            Positions of the configurations on the last axis.

        Returns
        -------
        SectionTimes
            Times and memory of the selected configurations.
        """
        figures = {name: np.take(getattr(self, name), configurations, axis=-1) for name in ARRAY_FIELDS}
        return SectionTimes(self.repeat, **figures)


#: Fields of `SectionTimes` in bytes.
MEMORY_FIELDS = ("saved_bytes", "selectively_freed_bytes", "input_bytes", "output_bytes", "workspace_bytes")
#: Fields of `SectionTimes` whose last axis is that of configurations.
ARRAY_FIELDS = (
    *("forward", "backward", "weight_gradients", "recomputed", "selectively_recomputed"),
    *("forward_transfers", "recomputed_transfers", "selectively_recomputed_transfers", "backward_transfers"),
    *("hidden_transfers", "forward_paired_transfers", "backward_paired_transfers", "times_by_limit"),
    *MEMORY_FIELDS,
)


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Time and memory of one layer of each section under a recompute policy, shape (sections, …), in seconds and bytes.

    A section is a run of equal layers. Fields are those of `SectionTimes`; recomputation counts in ``backward`` and
    ``backward_transfers``. ``times_by_limit`` are kernel times by limit, shape (3, sections, …). ``saved_bytes`` and
    ``offloaded_bytes`` are saved activations on the device and in host memory. ``recompute_bytes`` are the activations
    that exist while a layer is recomputed.
    """

    forward: Array
    backward: Array
    weight_gradients: Array
    forward_transfers: Array
    backward_transfers: Array
    hidden_transfers: Array
    forward_paired_transfers: Array
    backward_paired_transfers: Array
    times_by_limit: Array
    saved_bytes: Array
    offloaded_bytes: Array
    recompute_bytes: Array
    output_bytes: Array
    workspace_bytes: Array

    @property
    def forward_with_transfers(self) -> Array:
        """Forward time of one layer with its exposed collectives, shape (sections, …) [s]."""
        return self.forward + self.forward_transfers

    @property
    def backward_with_transfers(self) -> Array:
        """Backward time of one layer (input gradients only) with exposed collectives, shape (sections, …) [s]."""
        return self.backward + self.backward_transfers

    @property
    def iteration_time(self) -> Array:
        """Forward plus backward time of one layer, shape (sections, …) [s]."""
        return self.forward_with_transfers + self.backward_with_transfers + self.weight_gradients

    def select_configurations(self, configurations: Index) -> LayerTimes:
        """Select the times and memory of some configurations by index, along the last axis.

        Parameters
        ----------
        configurations : Index
            Positions of the configurations on the last axis.

        Returns
        -------
        LayerTimes
            Times of the selected configurations.
        """
        return LayerTimes(*(np.take(getattr(self, name), configurations, axis=-1) for name in LayerTimes.__slots__))


#: Fields of `SectionTimes` that a recompute policy leaves as they are in `LayerTimes`.
_UNCHANGED_FIELDS = (
    *("forward", "weight_gradients", "forward_transfers", "hidden_transfers", "forward_paired_transfers"),
    *("backward_paired_transfers", "output_bytes", "workspace_bytes"),
)
#: Exponent of `_host_paced_time` where the host issues work ahead of the device.
HOST_PACED_EXPONENT = 4.0
#: Share of the multiprocessors that the exchange of tokens leaves to computation: its kernels occupy 24 of 132
#: (DeepSeek-V3 technical report, 2024, section 3.2.2: 20; DeepEP's default: 24 on Hopper).
_COMPUTE_SHARE_DURING_DISPATCH = 1.0 - 24.0 / 132.0


class CollectiveSumMatrices(NamedTuple):
    """Matrices of zeros and ones, shape (sections, collectives), that sum times of collectives by section.

    There is one matrix for each kind of computation with which collectives overlap, for forward or for backward passes.
    ``exposed``: no overlap. ``section``: the whole section. ``attention_core``: the core of attention (keys in a
    ring). ``products``: products with weights, in pieces. ``shared_experts``: shared experts, during the MoE token
    exchange. ``microbatch``: the computation of another microbatch, during the MoE token exchange.
    """

    exposed: Array
    section: Array
    attention_core: Array
    products: Array
    shared_experts: Array
    microbatch: Array

    @property
    def collective_counts(self) -> Array:
        """Number of collectives of each section, shape (sections,)."""
        return np.asarray(sum(matrix.sum(axis=1) for matrix in self))


#: Computation that a collective overlaps with (`LayerCollective.overlapped_computation`), in the order of the fields of
#: `CollectiveSumMatrices`.
_OVERLAPPED_COMPUTATIONS = ("nothing", "section", "core", "products", "shared experts", "microbatch")


@dataclass(frozen=True, slots=True)
class SectionSumMatrices:
    """Matrices that add up times of kernels and collectives by section (a run of equal layers).

    Their shapes are (sections, kernels) and (sections, collectives). A product with times of kernels gives times of
    sections.

    Attributes
    ----------
    forward, backward, weight_gradients : ndarray
        Kernels of the passes.
    forward_attention_core, backward_attention_core : ndarray
        Kernels of the core of attention.
    forward_weight_gemms, backward_weight_gemms : ndarray
        GEMMs with weights.
    forward_shared_experts, backward_shared_experts : ndarray
        Kernels of shared experts.
    recomputed, selectively_recomputed : ndarray
        Kernels that full and selective recomputation repeats.
    forward_collectives, backward_collectives : CollectiveSumMatrices
        Collectives by the computation that they overlap with.
    not_recomputed_transfers : ndarray
        Forward collectives that full recomputation does not repeat.
    selectively_recomputed_transfers : ndarray
        Collectives that selective recomputation repeats.
    overlap_chunks : float
        Pieces into which collectives are cut to overlap with products.
    dispatches_tokens : ndarray of bool, shape (sections,)
        True for sections that dispatch tokens.
    """

    forward: Array
    backward: Array
    weight_gradients: Array
    forward_attention_core: Array
    backward_attention_core: Array
    forward_weight_gemms: Array
    backward_weight_gemms: Array
    forward_shared_experts: Array
    backward_shared_experts: Array
    recomputed: Array
    selectively_recomputed: Array
    forward_collectives: CollectiveSumMatrices
    backward_collectives: CollectiveSumMatrices
    not_recomputed_transfers: Array
    selectively_recomputed_transfers: Array
    overlap_chunks: float
    dispatches_tokens: npt.NDArray[np.bool_]

    @classmethod
    def from_program(cls, program: Program) -> SectionSumMatrices:
        """Build the matrices that sum the kernels and collectives of a program by section (run of equal layers).

        Parameters
        ----------
        program : Program
            Kernels and collectives of one rank.

        Returns
        -------
        SectionSumMatrices
            Matrices in the order of the program's kernels and collectives.
        """
        sections = len(program.sections)
        kernels = [(row, kernel) for row, section in enumerate(program.sections) for kernel in section.kernels]
        transfers = list(enumerate_collectives(program))

        def of_kernels(share: Callable[[CountedKernel], float]) -> Array:
            return _matrix(sections, [(row, counted.repetitions * share(counted)) for row, counted in kernels])

        def of_transfers(share: Callable[[LayerCollective], float]) -> Array:
            return _matrix(sections, [(row, each.calls_per_iteration * share(each)) for row, each in transfers])

        def hidden_in(*place: str) -> Array:
            return of_transfers(lambda transfer: (transfer.phase, transfer.overlapped_computation) == place)

        return cls(
            forward=of_kernels(lambda k: k.kernel.phase == "forward"),
            backward=of_kernels(lambda k: k.kernel.phase == "backward"),
            weight_gradients=of_kernels(lambda k: k.kernel.phase == "backward_weight"),
            forward_attention_core=of_kernels(lambda k: k.in_attention_core and k.kernel.phase == "forward"),
            backward_attention_core=of_kernels(lambda k: k.in_attention_core and k.kernel.phase == "backward"),
            forward_weight_gemms=of_kernels(lambda k: _is_product(k) and k.kernel.phase == "forward"),
            backward_weight_gemms=of_kernels(lambda k: _is_product(k) and _in_backward(k)),
            forward_shared_experts=of_kernels(lambda k: k.in_shared_experts and k.kernel.phase == "forward"),
            backward_shared_experts=of_kernels(lambda k: k.in_shared_experts and _in_backward(k)),
            recomputed=of_kernels(lambda k: k.full_recompute_runs * (k.kernel.phase == "forward")),
            selectively_recomputed=of_kernels(lambda k: k.selective_recompute_runs * (k.kernel.phase == "forward")),
            forward_collectives=CollectiveSumMatrices(*(hidden_in("forward", by) for by in _OVERLAPPED_COMPUTATIONS)),
            backward_collectives=CollectiveSumMatrices(*(hidden_in("backward", by) for by in _OVERLAPPED_COMPUTATIONS)),
            not_recomputed_transfers=of_transfers(lambda t: t.phase == "forward" and not t.recomputed),
            selectively_recomputed_transfers=of_transfers(lambda t: t.selectively_recomputed),
            overlap_chunks=max((float(transfer.overlap_chunks) for _, transfer in transfers), default=1.0),
            dispatches_tokens=np.isin(np.arange(sections), [row for row, counted in kernels if _routes(counted)]),
        )


def _in_backward(counted: CountedKernel) -> bool:
    return counted.kernel.phase in ("backward", "backward_weight")


def _is_product(counted: CountedKernel) -> bool:
    """Return True for a GEMM with weights."""
    return counted.kernel.family == "gemm" and not counted.in_attention_core


def _routes(counted: CountedKernel) -> bool:
    """Return True for a kernel that sorts tokens for dispatch to MoE experts."""
    return counted.kernel.expert_count > 0 and counted.kernel.family == "memory"


def _matrix(sections: int, cells: Sequence[tuple[int, float]]) -> Array:
    """Build a matrix (sections, cells) with one column per (section, value); the value is in the row of the section."""
    sums = np.zeros((sections, len(cells)))
    for column, (row, figure) in enumerate(cells):
        sums[row, column] = figure
    return sums


def section_times(
    program: Program,
    kernels: KernelTimes,
    transfers: Array,
    sizes: Sequence[Array],
    sums: SectionSumMatrices | None = None,
    *,
    call: float = 0.0,
    waiting_exponent: float = HOST_PACED_EXPONENT,
) -> SectionTimes:
    """Sum times of kernels and collectives to time and memory of one layer of each section (run of equal layers).

    A pass of a section takes the `_host_paced_time` of all its kernels and collectives together. Time spent waiting for
    the host counts as kernel time.

    Parameters
    ----------
    program : Program
        Kernels and collectives of one rank.
    kernels : KernelTimes
        Time of every kernel, shape (kernels, ...) [s].
    transfers : ndarray, shape (collectives, ...)
        Time of every collective [s].
    sizes : sequence of Array
        Memory by kind, in the order of `MEMORY_FIELDS`; arrays of shape (sections, ...) [byte].
    sums : SectionSumMatrices, optional
        Matrices of a program of the same structure; built from ``program`` by default.
    call : float, optional
        Host time of launching one collective [s].
    waiting_exponent : float, optional
        Exponent of `_host_paced_time` where the host waits for counts of dispatched tokens.

    Returns
    -------
    SectionTimes
        Times and memory, arrays of shape (sections, ...).
    """
    sums = sums or SectionSumMatrices.from_program(program)
    device, host = kernels.device_time, kernels.host_time
    forward, backward, weights = (matrix @ device for matrix in (sums.forward, sums.backward, sums.weight_gradients))
    in_forward, in_backward = _overlapped(sums, device, transfers)
    repeated = np.maximum(in_forward.exposed - sums.not_recomputed_transfers @ transfers, 0.0)
    forward_calls, backward_calls = (
        (direction.collective_counts * call).reshape((-1,) + (1,) * (forward.ndim - 1))
        for direction in (sums.forward_collectives, sums.backward_collectives)
    )

    def issued(seconds: Array, waited: Array, host_seconds: Array) -> Array:
        """Compute the time of computation with its waits for the host [s]. The host launches collectives as well."""
        return _host_paced_time(seconds + waited, host_seconds, sums.dispatches_tokens, waiting_exponent) - waited

    gradients = backward + weights
    slower = issued(gradients, in_backward.exposed, (sums.backward + sums.weight_gradients) @ host + backward_calls)
    share = np.divide(slower, gradients, out=np.ones_like(gradients), where=gradients > 0)
    # Sum kernel times by their limit and by run, as in `SectionTimes.times_by_limit`.
    work = kernels.device_time - kernels.launch_time
    by_limit = (work * kernels.compute_bound, work * ~kernels.compute_bound, kernels.launch_time)
    core = sums.selectively_recomputed
    runs = (sums.forward + sums.backward + sums.weight_gradients, sums.recomputed, core)
    return SectionTimes(
        section_field_values(program, "repeat"),
        forward=issued(forward, in_forward.exposed, sums.forward @ host + forward_calls),
        backward=backward * share,
        weight_gradients=weights * share,
        recomputed=issued(sums.recomputed @ device, repeated, sums.recomputed @ host + forward_calls),
        selectively_recomputed=_host_paced_time(core @ device, core @ host),
        forward_transfers=in_forward.exposed,
        recomputed_transfers=repeated,
        selectively_recomputed_transfers=sums.selectively_recomputed_transfers @ transfers,
        backward_transfers=in_backward.exposed,
        hidden_transfers=in_forward.hidden + in_backward.hidden,
        forward_paired_transfers=in_forward.paired,
        backward_paired_transfers=in_backward.paired,
        times_by_limit=np.stack([np.stack([matrix @ seconds for matrix in runs]) for seconds in by_limit]),
        **dict(zip(MEMORY_FIELDS, sizes, strict=True)),
    )


class _CollectiveTimes(NamedTuple):
    """Times of the collectives of one direction (forward or backward), shape (sections, …) [s].

    ``exposed`` is exposed, ``hidden`` overlaps with computation, and ``paired`` is the part of ``hidden`` that overlaps
    with another microbatch.
    """

    exposed: Array
    hidden: Array
    paired: Array


def _overlapped(sums: SectionSumMatrices, device: Array, transfers: Array) -> tuple[_CollectiveTimes, _CollectiveTimes]:
    """Compute exposed and hidden time of the collectives of the forward and of the backward pass.

    Shared experts and the pass of another microbatch run on the multiprocessors that the MoE token exchange leaves. A
    pair of a forward and a backward pass overlaps with the mean of both.
    """
    forward, backward = sums.forward @ device, (sums.backward + sums.weight_gradients) @ device
    both = (forward + backward) / 2.0
    in_forward = sums.forward_attention_core, sums.forward_weight_gemms, sums.forward_shared_experts
    in_backward = sums.backward_attention_core, sums.backward_weight_gemms, sums.backward_shared_experts
    of_forward = [forward, *(matrix @ device for matrix in in_forward), both]
    of_backward = [backward, *(matrix @ device for matrix in in_backward), both]
    return (
        _divide_exposed(sums.forward_collectives, transfers, sums.overlap_chunks, of_forward),
        _divide_exposed(sums.backward_collectives, transfers, sums.overlap_chunks, of_backward),
    )


def _divide_exposed(
    collectives: CollectiveSumMatrices, transfers: Array, pieces: float, beside: Sequence[Array]
) -> _CollectiveTimes:
    """Divide the collectives of one direction into exposed and hidden time.

    ``beside`` holds the times of the computation that the collectives can overlap with. A collective in n pieces
    exposes its first piece. So 1 - 1/n of the shorter of the collective and its products is hidden.
    """
    travelling = [matrix @ transfers for matrix in collectives[1:]]
    shares = (1.0, 1.0, 1.0 - 1.0 / pieces, _COMPUTE_SHARE_DURING_DISPATCH, _COMPUTE_SHARE_DURING_DISPATCH)
    pairs = zip(travelling, beside, shares, strict=True)
    hidden = [np.minimum(seconds, covering) * share for seconds, covering, share in pairs]
    uncovered = [seconds - covered for seconds, covered in zip(travelling, hidden, strict=True)]
    return _CollectiveTimes(sum(uncovered, collectives.exposed @ transfers), sum(hidden, np.zeros(())), hidden[-1])


def _host_paced_time(
    device: Array,
    host: Array,
    waits: npt.NDArray[np.bool_] | None = None,
    waiting_exponent: float = HOST_PACED_EXPONENT,
) -> Array:
    """Combine device time and host launch time of work that the host issues ahead: (device⁴ + host⁴)^¼.

    An ideal host would give the longer of the two. Uneven calls and waits for other ranks cost most where both are
    equal. The fourth power was fitted to measured steps of convolutional networks.

    Parameters
    ----------
    device : ndarray, shape (sections, ...)
        Time of the kernels [s].
    host : ndarray, shape (sections, ...)
        Time in which the host launches the kernels [s].
    waits : ndarray of bool, shape (sections,), optional
        True for sections in which the host waits for the device.
    waiting_exponent : float, optional
        Exponent in sections where the host waits, instead of 4.

    Returns
    -------
    ndarray, shape (sections, ...)
        Time [s].

    Examples
    --------
    >>> device, host = np.array([3.0, 1.0, 1.0]), np.array([0.0, 1.0, 1.0])
    >>> _host_paced_time(device, host, np.array([True, False, True]), 2.5).round(3)
    array([3.   , 1.189, 1.32 ])
    """
    seconds = np.where(host > 0, np.sqrt(np.sqrt(np.square(np.square(device)) + np.square(np.square(host)))), device)
    if waits is not None and waits.any() and waiting_exponent != HOST_PACED_EXPONENT:
        waiting = (device[waits] ** waiting_exponent + host[waits] ** waiting_exponent) ** (1.0 / waiting_exponent)
        seconds[waits] = np.where(host[waits] > 0, waiting, device[waits])
    return seconds


def section_field_values(program: Program, name: str) -> Array:
    """Return one field of every section (run of layers) of a program, shape (sections,).

    Parameters
    ----------
    program : Program
        Kernels and collectives of one rank.
    name : str
        Name of a field of `Section`, such as ``repeat``.

    Returns
    -------
    ndarray, shape (sections,)
        Value of the field in each section.
    """
    return np.array([getattr(section, name) for section in program.sections], dtype=np.float64)


def layer_times(costs: SectionTimes, policies: RecomputePolicies) -> LayerTimes:
    """Compute the time and memory of layers under a recompute policy: none, selective or full.

    A group of layers saves one input; when it is recomputed, all its activations exist at once.

    Parameters
    ----------
    costs : SectionTimes
        Times and memory without recomputation.
    policies : RecomputePolicies
        Recompute policy of each section.

    Returns
    -------
    LayerTimes
        Times [s] and memory [byte], arrays of shape (sections, ...).

    References
    ----------
    Korthikanti et al., Reducing activation recomputation in large transformer models, MLSys 2023; Chen et al., Training
    deep nets with sublinear memory cost, arXiv:1604.06174 (groups).
    """
    whole, core, group = policies.with_trailing_axes(costs.forward.ndim)
    again = np.where(whole, costs.recomputed, core * costs.selectively_recomputed)
    input_bytes = np.minimum(costs.input_bytes, costs.saved_bytes) / group
    kept = np.where(whole, input_bytes, costs.saved_bytes) - core * costs.selectively_freed_bytes
    again_transfers = np.where(whole, costs.recomputed_transfers, core * costs.selectively_recomputed_transfers)
    once, whole_again, core_again = costs.times_by_limit.swapaxes(0, 1)
    return LayerTimes(
        **{name: getattr(costs, name) for name in _UNCHANGED_FIELDS},
        backward=costs.backward + again,
        backward_transfers=costs.backward_transfers + again_transfers,
        times_by_limit=np.asarray(once + np.where(whole, whole_again, core * core_again)),
        saved_bytes=kept,
        offloaded_bytes=np.zeros_like(kept),
        recompute_bytes=np.where(whole, costs.saved_bytes * group, 0.0),
    )


def with_exposed_unpaired_exchange(times: LayerTimes, alone: Array) -> LayerTimes:
    """Expose the MoE token exchange of microbatches that are not paired with the pass of another microbatch.

    Parameters
    ----------
    times : LayerTimes
        Times if all iterations are paired.
    alone : ndarray, shape (...)
        Share of the iterations that are unpaired, 0 to 1.

    Returns
    -------
    LayerTimes
        Times [s] in which the exchange of unpaired iterations is exposed.
    """
    forward, backward = alone * times.forward_paired_transfers, alone * times.backward_paired_transfers
    return replace(
        times,
        forward_transfers=times.forward_transfers + forward,
        backward_transfers=times.backward_transfers + backward,
        hidden_transfers=times.hidden_transfers - forward - backward,
        forward_paired_transfers=times.forward_paired_transfers - forward,
        backward_paired_transfers=times.backward_paired_transfers - backward,
    )


def with_contention(
    times: LayerTimes, gathers: Array, gradients: Array, overlap: Overlap, regathers: Array | None = None
) -> LayerTimes:
    """Slow down the compute times of layers by the collectives that overlap with them.

    Parameters
    ----------
    times : LayerTimes
        Time and memory of one layer of each section (run of equal layers).
    gathers : ndarray, shape (sections, ...)
        Time of parameter gathers, forward and backward [s].
    gradients : ndarray, shape (sections, ...)
        Time of the gradient exchange [s].
    overlap : Overlap
        Overlap settings of the software.
    regathers : Array, shape (sections, ...), optional
        Time of parameter gathers before the backward pass, if different [s].

    Returns
    -------
    LayerTimes
        Layer times with contention [s].
    """
    if overlap.sharded and overlap.contention == 0.0:
        return times
    again = gathers if regathers is None else regathers
    backward = times.backward + times.weight_gradients
    return replace(
        times,
        forward=times.forward + _lost(times.forward, gathers, overlap),
        backward=times.backward + _lost(backward, again + gradients, overlap),
    )


def _lost(computing: Array, travelling: Array, overlap: Overlap) -> Array:
    """Return the time that layers lose to overlapping collectives [s].

    ``computing`` and ``travelling`` are the times of computation and collectives [s]. If the software overlaps nothing,
    the layers wait for the whole time of the collectives.
    """
    if not overlap.sharded:
        return travelling
    return np.minimum(overlap.contention * np.minimum(computing, travelling), travelling)


def sum_per_stage(layers: Array, figures: Array) -> Array:
    """Sum a value per layer (such as a time) over the layers of each pipeline stage.

    Parameters
    ----------
    layers : ndarray, shape (stages, sections)
        Number of layers of each section on each stage.
    figures : ndarray, shape (sections, ...)
        Value of one layer of each section.

    Returns
    -------
    ndarray, shape (stages, ...)
        Sum over the layers of each stage.
    """
    return np.tensordot(layers, figures, axes=1)
