"""Assignment of layers to pipeline stages, and of recompute policies to layers.

The cut is between whole layers; the layers of repeated blocks can be separated. A *layer iteration* is one pass through
one layer of a repeated block, or through a layer that occurs once. Recomputation may apply to all of them, to the first
ones of each piece of a pipeline, in groups, or by layer. Layers of a section with different policies become separate
sections, so that times, bytes and timeline have one policy for each section.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError, suggest_names

if TYPE_CHECKING:
    from paleo.lowering.program import CountedKernel, Program, Section
    from paleo.specs.run import PipelineCut, Run

#: Consecutive layers on one stage: pairs of a section's position and the number of its layers.
ModelChunk = tuple[tuple[int, int], ...]
#: Tolerance for rounding errors in sums of weights.
_SLACK = 1.0 + 2.0**-40


def cut_into_stages(
    program: Program, weights: Sequence[float], stages: Sequence[int], how: PipelineCut | None = None
) -> list[ModelChunk]:
    """Cut a network into contiguous model chunks for pipeline stages.

    If the number of chunks divides the layers of the heaviest repeated block, each chunk has equally many of them, as
    in Megatron; layers before the block are on the first chunk and those after it on the last. If it does not, the
    cut minimises the time of the slowest stage.

    Parameters
    ----------
    program : Program
        The lowered network: its sections are runs of equal layers.
    weights : sequence of float, shape (sections,)
        Time of one layer of each section, forward and backward [s].
    stages : sequence of int, shape (pieces,)
        Stage of each chunk (`Schedule.chunk_stages`).
    how : PipelineCut, optional
        ``uniform``, ``time``, or the number of layers of each chunk; by default as above.

    Returns
    -------
    list of ModelChunk
        For each chunk (section, number of its layers) pairs.

    Raises
    ------
    PlanError
        If there are fewer layers than pieces, or the numbers of layers do not add up.
    """
    sections = program.sections
    if isinstance(how, tuple):
        return _cut_as_stated(program, how)
    pieces = len(stages)
    if pieces == 1:
        return [tuple((index, section.repeat) for index, section in enumerate(sections))]
    heaviest = max(range(len(sections)), key=lambda i: weights[i] * sections[i].repeat)
    layers = sections[heaviest].repeat
    if how != "time" and layers % pieces == 0:
        return _cut_evenly(program, heaviest, pieces)
    if how == "uniform":
        problem = f"the {layers} layers of {sections[heaviest].name!r} cannot be divided evenly over {pieces} pieces"
        raise PlanError(f"pipeline.cut 'uniform': {problem}; use pipeline.cut=time, or state the layers of each piece")
    return _cut_balanced(program, weights, stages)


def layer_counts_for_cut(program: Program) -> list[int]:
    """Count the layers of each section that a user-stated pipeline cut distributes over chunks.

    A cut distributes the layers of repeated blocks. If nothing repeats, each section counts as one layer.

    Parameters
    ----------
    program : Program
        One rank's kernels and collectives (the lowered network).

    Returns
    -------
    list of int, shape (sections,)
        Numbers of layers.
    """
    folded = any(section.repeat > 1 for section in program.sections)
    return [section.repeat if section.repeat > 1 or not folded else 0 for section in program.sections]


def _cut_as_stated(program: Program, layers: Sequence[int]) -> list[ModelChunk]:
    """Cut a network into pipeline chunks whose numbers of layers the user states.

    Sections between layers are on the piece of the layer before them, sections before the first layer on that of the
    first. A first or last piece of 0 layers holds the sections before the first or after the last layer.
    """
    counts = layer_counts_for_cut(program)
    if sum(layers) != sum(counts):
        stated = f"pipeline.cut {list(layers)}: adds up to {sum(layers)} layers"
        raise PlanError(f"{stated}; the network has {sum(counts)} to divide")
    _check_empty(program, layers, counts)
    pieces: list[list[tuple[int, int]]] = [[]]
    left = list(layers)
    for index, (section, count) in enumerate(zip(program.sections, counts, strict=True)):
        if not count:
            if left == [0, 0]:  # after the last layer
                left.pop(0)
                pieces.append([])
            pieces[-1].append((index, section.repeat))
        while count:
            if not left[0]:
                left.pop(0)
                pieces.append([])
            taken = min(count, left[0])
            pieces[-1].append((index, taken))
            count, left[0] = count - taken, left[0] - taken
    return [tuple(piece) for piece in pieces]


def _check_empty(program: Program, layers: Sequence[int], counts: Sequence[int]) -> None:
    """Raise PlanError if a pipeline chunk would contain no layer at all."""
    if 0 in layers[1:-1]:
        raise PlanError(f"pipeline.cut {list(layers)}: only the first and the last piece may be without layers")
    for place, section, name in ((0, counts[0], "first"), (-1, counts[-1], "last")):
        if layers[place] == 0 and section:
            raise PlanError(
                f"pipeline.cut {list(layers)}: the {name} piece is empty; the network has nothing beside its layers"
            )


def balanced_chunk_layers(program: Program, weights: Sequence[float], stages: Sequence[int]) -> tuple[int, ...]:
    """Return the number of layers of each model chunk for which the slowest stage is as fast as possible.

    Among equal cuts, earlier chunks are the lighter ones.

    Parameters
    ----------
    program : Program
        One rank's kernels and collectives (the lowered network).
    weights : sequence of float, shape (sections,)
        Time of one layer of each section, forward and backward [s].
    stages : sequence of int, shape (pieces,)
        Stage of each piece.

    Returns
    -------
    tuple of int
        Layers of each chunk, for `cut_into_stages`; empty if there are fewer layers than chunks.
    """
    return _balanced_layers(_units(program, weights), tuple(stages))


@lru_cache(maxsize=2**16)
def _balanced_layers(runs: tuple[tuple[float, int, int], ...], stages: tuple[int, ...]) -> tuple[int, ...]:
    """Compute the chunk sizes of `balanced_chunk_layers` from the units of `_units`.

    Results are cached, as a plan search asks for the same units many times.
    """
    units = [(weight, count) for weight, count, times in runs for _ in range(times)]
    if len(units) < len(stages):
        return ()
    layers = [0, *accumulate(count for _, count in units)]
    ends = _balanced_ends([weight for weight, _ in units], stages)
    return tuple([layers[end] - layers[start] for start, end in pairwise([0, *ends])])


def slowest_stage_time(
    program: Program, weights: Sequence[float], chunks: Sequence[ModelChunk], stages: Sequence[int]
) -> float:
    """Return the forward plus backward time of the slowest stage for one microbatch.

    Parameters
    ----------
    program : Program
        One rank's kernels and collectives (the lowered network).
    weights : sequence of float, shape (sections,)
        Time of one layer of each section [s].
    chunks : sequence of ModelChunk
        Pieces, as `cut_into_stages` returns them.
    stages : sequence of int, shape (pieces,)
        Stage of each piece.

    Returns
    -------
    float
        Time [s].
    """
    seconds = [sum(weights[section] * layers for section, layers in chunk) for chunk in chunks]
    return float(np.bincount(stages, seconds).max())


def _units(program: Program, weights: Sequence[float]) -> tuple[tuple[float, int, int], ...]:
    """List the units between which a pipeline cut may fall, as (weight, layers, repetitions).

    Units are the sections before the first layer, each layer with the sections after it, and the sections after the
    last layer.
    """
    units: list[tuple[float, int, int]] = []
    counts = layer_counts_for_cut(program)
    last = max((index for index, count in enumerate(counts) if count), default=-1)
    for index, (section, count) in enumerate(zip(program.sections, counts, strict=True)):
        if count:
            units.append((weights[index], 1, count))
        elif not units or index == last + 1:
            units.append((weights[index] * section.repeat, 0, 1))
        else:
            weight, layers, times = units.pop()
            units += [(weight, layers, times - 1)] * (times > 1)
            units.append((weight + weights[index] * section.repeat, layers, 1))
    return tuple(units)


def _balanced_ends(weights: Sequence[float], stages: Sequence[int], *, early: bool = False) -> tuple[int, ...]:
    """Cut a list of weights into contiguous chunks that minimise the weight of the heaviest pipeline stage.

    Returns the end index of each chunk. Among equal cuts the heaviest chunk is minimised.

    Chunks that are balanced one by one are taken, unless a stage gets lighter by sharing out its weight over its
    chunks, or all chunks have equally many units. Units that do not divide evenly are on later chunks, or with
    ``early`` on earlier ones.
    """
    pieces, units = len(stages), tuple(weights)
    cuts = [_least_filled(units, each, early) for each in dict.fromkeys((tuple(range(pieces)), tuple(stages)))]
    cuts.append(tuple([len(weights) * (piece + 1) // pieces for piece in range(pieces)]))
    array = np.array(units)
    return min(cuts, key=lambda ends: _loads(array, ends, stages))


def _loads(weights: npt.ArrayLike, ends: Sequence[int], stages: Sequence[int]) -> tuple[float, float]:
    """Return (weight of the heaviest stage, weight of the heaviest chunk), rounded to single precision."""
    pieces = np.add.reduceat(weights, [0, *ends[:-1]])
    return float(np.float32(np.bincount(stages, pieces).max())), float(np.float32(pieces.max()))


@lru_cache(maxsize=2**14)
def _least_filled(weights: tuple[float, ...], stages: tuple[int, ...], early: bool) -> tuple[int, ...]:
    """Cut weights into chunks by finding the smallest weight limit per stage that all chunks can respect.

    Returns the end index of each chunk.

    Pieces are filled from the back, so that the output layer is placed before the layers that make up for it. The least
    weight is found by bisection, between the weight that a filling reaches and the next larger one. Where stages can be
    less than full at that weight, pieces share the rest evenly.
    """
    sums, order = _running_sums(weights[::-1]), stages[::-1]
    ends, low, high = list[int](), sums[-1] / len(set(stages)), sums[-1]
    if len(set(stages)) == len(stages):  # with several pieces a stage, more weight may suffice less well
        ends, high, _ = _fill_chunks(sums, order, high, even=True)
    while low * _SLACK < high:
        middle = (low + high) / 2
        filled, reached, following = _fill_chunks(sums, order, middle)
        if reached <= middle * _SLACK:
            ends, high = filled, min(middle, reached)
        else:
            low = max(middle, min(following, reached))
    ahead = (_running_sums(weights), stages) if early else (sums, order)
    spread, reached, _ = _fill_chunks(*ahead, high, even=True)
    if reached <= high * _SLACK:  # always where no weight below the sum of all has sufficed
        return tuple(spread if early else _mirrored(spread))
    return tuple(_mirrored(ends))


def _running_sums(weights: Sequence[float]) -> list[float]:
    """Return the cumulative sums of weights, in extended precision and rounded once to float64."""
    sums: list[float] = np.cumsum(weights, dtype=np.longdouble).astype(float).tolist()
    return sums


def _mirrored(ends: Sequence[int]) -> list[int]:
    """Convert chunk ends of a reversed list of layers to chunk ends of the list in forward order."""
    return [ends[-1] - end for end in (0, *ends[:-1])][::-1]


def _fill_chunks(
    sums: Sequence[float], stages: Sequence[int], most: float, *, even: bool = False
) -> tuple[list[int], float, float]:
    """Fill pipeline chunks in order, so that no stage exceeds the weight limit ``most`` where possible.

    ``sums`` are cumulative weights of the units, ``stages`` the stage of each chunk. A chunk takes its share
    of what its stage has left, and at least one unit; the last chunk takes all that is left. With ``even`` a chunk
    stops at the mean weight of the chunks that are not yet filled.

    Returns
    -------
    tuple of (list of int, float, float)
        (ends of the chunks, weight of the heaviest stage, least weight at which a chunk would take another unit).
    """
    ends, base, start, following = list[int](), 0.0, 0, np.inf
    taken, open_pieces, pieces = dict.fromkeys(stages, 0.0), Counter(stages), len(stages)
    for last, stage in enumerate(stages, start=len(sums) - pieces + 1):  # units that leave one for each later piece
        weight, left = taken[stage], open_pieces[stage]
        end = bisect_right(sums, base + (most - weight) / left * _SLACK, start)
        if end <= start:
            end = start + 1
        if end >= last:
            end = last
        else:
            next_weight = weight + (sums[end] - base) * left
            if next_weight < following:
                following = next_weight
        if even:
            mean = (sums[-1] - base) / (len(sums) + 1 - last)
            end = min(end, bisect_left(sums, base + mean / _SLACK, start) + 1)
        start = end if last < len(sums) else last
        ends.append(start)
        reached = sums[start - 1]
        taken[stage], open_pieces[stage], base = weight + (reached - base), left - 1, reached
    return ends, max(taken.values()), following


def cut_by_flops(program: Program, pieces: int) -> list[ModelChunk]:
    """Cut a network into pipeline chunks by the FLOP of its matrix products with weights, as nanotron does.

    A piece takes layers until the cumulative FLOP exceed its share of the total. So earlier pieces have more work, and
    the output layer counts. If that leaves a piece empty, `cut_into_stages` is used.

    Parameters
    ----------
    program : Program
        One rank's kernels and collectives (the lowered network).
    pieces : int
        Number of pieces.

    Returns
    -------
    list of ModelChunk
        Sections and numbers of layers of each piece.
    """
    work = [_weight_gemm_flops(section) for section in program.sections]
    total = sum(flops * section.repeat for flops, section in zip(work, program.sections, strict=True))
    filled: list[list[int]] = [[]]
    done = 0.0
    for index, section in enumerate(program.sections):
        for _ in range(section.repeat):
            filled[-1].append(index)
            done += work[index]
            if len(filled) < pieces and done > total * len(filled) / pieces * _SLACK:
                filled.append([])
    complete = len(filled) == pieces and filled[-1]
    return [_as_chunk(piece) for piece in filled] if complete else cut_into_stages(program, work, range(pieces))


def _weight_gemm_flops(section: Section) -> float:
    """Return the forward FLOP of one layer's matrix products with weights (attention scores and values excluded).

    Parameters
    ----------
    section : Section
        Section of a program.

    Returns
    -------
    float
        FLOP of one layer iteration on one rank.
    """
    counted = [kernel for kernel in section.kernels if kernel.kernel.family == "gemm" and not kernel.in_attention_core]
    return sum(kernel.repetitions * kernel.kernel.flops for kernel in counted if kernel.kernel.phase == "forward")


def _cut_evenly(program: Program, block: int, pieces: int) -> list[ModelChunk]:
    """Cut a network so that each pipeline chunk has equally many layers of one repeated block."""
    layers = program.sections[block].repeat // pieces
    chunks: list[list[tuple[int, int]]] = [[(block, layers)] for _ in range(pieces)]
    chunks[0][:0] = [(i, program.sections[i].repeat) for i in range(block)]
    chunks[-1] += [(i, program.sections[i].repeat) for i in range(block + 1, len(program.sections))]
    return [tuple(chunk) for chunk in chunks]


def _cut_balanced(program: Program, weights: Sequence[float], stages: Sequence[int]) -> list[ModelChunk]:
    """Cut a network into contiguous pipeline chunks that minimise the time of the slowest stage.

    The output layer and its loss stay together: on another stage the loss would receive all logits (Megatron's
    account_for_loss_in_pipeline_split also counts both as one layer). Layers that do not divide evenly are on earlier
    pieces where each stage has one, as DeepSpeed's partition_uniform has them, else on later ones.
    """
    units = _balanced_units(program, weights)
    if len(units) < len(stages):
        raise PlanError(f"{len(units)} layers cannot be cut into {len(stages)} pipeline stages")
    ends = [0, *_balanced_ends([weight for _, weight in units], stages, early=len(set(stages)) == len(stages))]
    return [_as_chunk([i for sections, _ in units[start:end] for i in sections]) for start, end in pairwise(ends)]


def _balanced_units(program: Program, weights: Sequence[float]) -> list[tuple[tuple[int, ...], float]]:
    """List the units between which a balanced pipeline cut may fall, as (section indices, weight [s]).

    Each layer is a unit. The last layer with parameters and the sections after it are one unit.
    """
    holders = [index for index, section in enumerate(program.sections) if section.parameter_count]
    last = max([*holders, *(tie.reader_section for tie in program.tied_parameters)], default=len(program.sections) - 1)
    layers = [index for index, section in enumerate(program.sections) for _ in range(section.repeat)]
    units = [((index,), weights[index]) for index in layers if index <= last]
    behind = tuple(index for index in layers if index > last)
    (*earlier, (final, weight)) = units
    return [*earlier, ((*final, *behind), weight + sum(weights[index] for index in behind))]


def _as_chunk(piece: list[int]) -> ModelChunk:
    return tuple((index, piece.count(index)) for index in dict.fromkeys(piece))


#: Layers of a piece: position of the section, and the range of its layer numbers in the network.
_ChunkLayerIndices = list[tuple[int, range]]
SectionMask = npt.NDArray[np.bool_]
Array = npt.NDArray[np.float64]
RECOMPUTE_POLICIES = ("none", "selective", "full")


class _Policy(NamedTuple):
    """Recompute policy of a layer: ``none``, ``selective`` (the core of attention) or ``full`` (all from its input).

    ``layers_per_checkpoint`` layers are checkpointed together.
    """

    mode: str = "none"
    layers_per_checkpoint: int = 1


class RecomputePolicies(NamedTuple):
    """Recompute policy of every section, as arrays of shape (sections,) or (sections, configurations).

    ``is_full`` is True where the whole layer is recomputed, ``is_attention_core`` where only its attention core is.
    ``layers_per_checkpoint`` is the number of layers that are checkpointed together.
    """

    is_full: SectionMask
    is_attention_core: SectionMask
    layers_per_checkpoint: Array

    @classmethod
    def from_program(cls, program: Program) -> RecomputePolicies:
        """Read the recompute policy of every section (run of equal layers) from a lowered program.

        Parameters
        ----------
        program : Program
            One rank's kernels and collectives (the lowered network).

        Returns
        -------
        RecomputePolicies, shape (sections,)
            Policies.
        """
        hows = np.array([section.recompute_policy for section in program.sections])
        groups = np.array([section.layers_per_checkpoint for section in program.sections], dtype=np.float64)
        return cls(hows == "full", hows == "selective", groups)

    @classmethod
    def uniform(cls, repeat: Array, how: str) -> RecomputePolicies:
        """Build one policy for the whole network; full recomputation applies to repeated blocks only.

        Parameters
        ----------
        repeat : ndarray, shape (sections,)
            Layers of each section.
        how : str
            ``none``, ``selective`` or ``full``.

        Returns
        -------
        RecomputePolicies
            Policies, arrays of shape (sections,).
        """
        policies = cls.for_each_section(len(repeat), how)
        return policies._replace(is_full=policies.is_full & _full_recompute_mask(repeat))

    @classmethod
    def for_each_section(cls, sections: int, how: str) -> RecomputePolicies:
        """Build one policy for every section, including those outside repeated blocks.

        Parameters
        ----------
        sections : int
            Number of sections.
        how : str
            ``none``, ``selective`` or ``full``.

        Returns
        -------
        RecomputePolicies
            Policies, arrays of shape (sections,).
        """
        whole, core = np.full(sections, how == "full"), np.full(sections, how == "selective")
        return cls(whole, core, np.ones(sections))

    @classmethod
    def for_configurations(cls, repeat: Array, hows: npt.NDArray[np.intp]) -> RecomputePolicies:
        """Build one policy for the whole network in each configuration.

        Parameters
        ----------
        repeat : ndarray, shape (sections,)
            Layers of each section.
        hows : ndarray, shape (configurations,)
            Positions in `RECOMPUTE_POLICIES`.

        Returns
        -------
        RecomputePolicies
            Policies, arrays of shape (sections, configurations).
        """
        whole = _full_recompute_mask(repeat)[:, None] & (hows == RECOMPUTE_POLICIES.index("full"))
        core = np.broadcast_to(hows == RECOMPUTE_POLICIES.index("selective"), whole.shape)
        return cls(whole, core, np.ones(whole.shape))

    def with_trailing_axes(self, axes: int) -> tuple[SectionMask, SectionMask, Array]:
        """Add trailing axes of length 1, so that the policies broadcast with arrays of more dimensions.

        Parameters
        ----------
        axes : int
            Number of dimensions of each returned array.

        Returns
        -------
        tuple[SectionMask, SectionMask, Array]
            (``full``, ``add_attention_core``, ``layers_per_checkpoint``) with trailing axes.
        """
        shape = self.is_full.shape + (1,) * (axes - self.is_full.ndim)
        return (
            self.is_full.reshape(shape),
            self.is_attention_core.reshape(shape),
            self.layers_per_checkpoint.reshape(shape),
        )


def _full_recompute_mask(repeat: Array) -> SectionMask:
    """Find the sections that full recomputation runs again: repeated blocks, or all sections if nothing repeats.

    Parameters
    ----------
    repeat : ndarray, shape (sections,)
        Layers of each section.

    Returns
    -------
    SectionMask, shape (sections,)
        True for these sections.
    """
    blocks = repeat > 1
    return blocks if blocks.any() else np.ones_like(blocks)


def full_recompute_sections(program: Program) -> SectionMask:
    """Find the sections of a program that full recomputation runs again.

    Sections that were split by policy count as one section.

    Parameters
    ----------
    program : Program
        One rank's kernels and collectives (the lowered network).

    Returns
    -------
    SectionMask, shape (sections,)
        True for these sections.
    """
    layers: Counter[str] = Counter()
    for section in program.sections:
        layers[section.name] += section.repeat
    return _full_recompute_mask(np.array([layers[section.name] for section in program.sections]))


def kernel_runs_per_microbatch(section: Section, counted: CountedKernel) -> float:
    """Return how often a kernel runs per microbatch: recomputed forward kernels run more than once.

    Parameters
    ----------
    section : Section
        Section of the kernel.
    counted : CountedKernel
        The kernel with its counts.

    Returns
    -------
    float
        Number of runs per occurrence of the kernel in the section.
    """
    if counted.kernel.phase != "forward":
        return 1.0
    return (
        1.0
        + {"none": 0.0, "full": counted.full_recompute_runs, "selective": counted.selective_recompute_runs}[
            section.recompute_policy
        ]
    )


def with_recompute_policy(program: Program, how: str) -> Program:
    """Return a program with one recompute policy for all its layers.

    Parameters
    ----------
    program : Program
        One rank's kernels and collectives (the lowered network).
    how : str
        ``none``, ``selective`` or ``full``.

    Returns
    -------
    Program
        Copy with this policy.
    """
    whole = full_recompute_sections(program)
    hows = [how if how != "full" or blocks else "none" for blocks in whole]
    sections = (replace(section, recompute_policy=each) for section, each in zip(program.sections, hows, strict=True))
    return replace(program, sections=tuple(sections))


def recompute_description(run: Run) -> str:
    """Describe the activation recomputation of a run in a few words, for tables and messages.

    Parameters
    ----------
    run : Run
        The run.

    Returns
    -------
    str
        For example ``full, 4 layers a stage``.
    """
    if run.recompute.by_layer:
        return ", ".join([run.recompute.policy, *(f"{how} of {name}" for name, how in run.recompute.by_layer.items())])
    if run.recompute.layers is not None:
        return f"{run.recompute.policy}, {run.recompute.layers} layer{'s' * (run.recompute.layers != 1)} a stage"
    return (
        run.recompute.policy
        if run.recompute.every is None
        else f"{run.recompute.policy}, every {run.recompute.every} layers"
    )


# layers with different policies


def has_mixed_recompute(run: Run) -> bool:
    """Return True if a run recomputes only some layers, or some differently from others.

    Parameters
    ----------
    run : Run
        The run.

    Returns
    -------
    bool
        True if policies differ between layers.

    Raises
    ------
    PlanError
        If the run chooses the recomputed layers in two ways.
    """
    stated = {
        "recompute_layers": run.recompute.layers is not None,
        "recompute.every": run.recompute.every is not None,
        "recompute.by_layer": bool(run.recompute.by_layer),
    }
    names = [name for name, is_stated in stated.items() if is_stated]
    if len(names) > 1:
        raise PlanError(f"{' and '.join(names)}: two ways to choose the layers that are recomputed; state one of them")
    if names and names != ["recompute.by_layer"] and run.recompute.policy != "full":
        raise PlanError(
            f"{names[0]}: chooses layers of full recomputation, but recompute is {run.recompute.policy!r}; use full"
        )
    return bool(names) and not run.forward_only


def recompute_policy_shares(program: Program, run: Run, pieces: int) -> dict[str, Array]:
    """Return, per recompute policy, the share of each section's layers under that policy, before the pipeline cut.

    If a run recomputes N layers of each piece, these count as their share of all layers.

    Parameters
    ----------
    program : Program
        One rank's kernels and collectives (the lowered network).
    run : Run
        The run.
    pieces : int
        Number of pieces of the pipeline.

    Returns
    -------
    dict of str to Array
        Shares from 0 to 1 by policy, arrays of shape (sections,).
    """
    sections = program.sections
    if run.recompute.by_layer:
        policies = _by_layer(program, run)
        return {how: np.array([np.mean([p.mode == how for p in e]) for e in policies]) for how in RECOMPUTE_POLICIES}
    whole = full_recompute_sections(program)
    layers = sum(section.repeat for section, blocks in zip(sections, whole, strict=True) if blocks)
    share = 1.0 if run.recompute.layers is None else min(1.0, run.recompute.layers * pieces / layers)
    full = share * whole.astype(np.float64)
    return {"none": 1.0 - full, "full": full}


class PolicySplitProgram(NamedTuple):
    """Program whose sections are split so that each has one recompute policy.

    ``model_chunks`` are the pieces of the pipeline in terms of the new sections. ``original_sections`` is the position
    of the original section of each new one.
    """

    program: Program
    model_chunks: list[ModelChunk]
    original_sections: list[int]


def split_by_recompute_policy(program: Program, pieces: Sequence[ModelChunk], run: Run) -> PolicySplitProgram:
    """Split sections whose layers are recomputed differently, so that each section has one policy.

    Parameters
    ----------
    program : Program
        One rank's kernels and collectives (the lowered network).
    pieces : sequence of ModelChunk
        Pieces of the pipeline, as `cut_into_stages` returns them.
    run : Run
        The run, which chooses the recomputed layers.

    Returns
    -------
    PolicySplitProgram
        The divided program with its pieces.

    Raises
    ------
    PlanError
        If the run recomputes more layers than a piece has.
    """
    whole = full_recompute_sections(program)
    layers = [list(_piece_policies(program, run, piece, whole)) for piece in _numbered(pieces)]
    _check_layers(run, max(sum(whole[section] for section, _ in piece) for piece in layers))
    kinds = sorted(dict.fromkeys(kind for piece in layers for kind in piece), key=lambda kind: kind[0])
    number = {kind: index for index, kind in enumerate(kinds)}
    first = {section: index for index, (section, _) in reversed(list(enumerate(kinds)))}
    count = [sum(piece.count(kind) for piece in layers) for kind in kinds]
    sections = (
        replace(
            program.sections[section],
            repeat=times,
            recompute_policy=policy.mode,
            layers_per_checkpoint=policy.layers_per_checkpoint,
        )
        for (section, policy), times in zip(kinds, count, strict=True)
    )
    # tied parameters are in sections that occur once, so none of those is split
    ties = (
        replace(tie, owner_section=first[tie.owner_section], reader_section=first[tie.reader_section])
        for tie in program.tied_parameters
    )
    chunks = [tuple((number[kind], piece.count(kind)) for kind in kinds if kind in piece) for piece in layers]
    return PolicySplitProgram(
        replace(program, sections=tuple(sections), tied_parameters=tuple(ties)), chunks, [k for k, _ in kinds]
    )


def max_recomputable_layers(program: Program, pieces: Sequence[ModelChunk]) -> int:
    """Return the largest number of layers in one pipeline chunk that full recomputation can apply to.

    Parameters
    ----------
    program : Program
        One rank's kernels and collectives (the lowered network).
    pieces : sequence of ModelChunk
        Pieces of the pipeline.

    Returns
    -------
    int
        Number of layers.
    """
    whole = full_recompute_sections(program)
    return max(sum(layers for section, layers in piece if whole[section]) for piece in pieces)


def _numbered(pieces: Sequence[ModelChunk]) -> Iterator[_ChunkLayerIndices]:
    """Yield each pipeline chunk as (section index, range of layer indices in that section) pairs."""
    done: dict[int, int] = {}
    for piece in pieces:
        numbered = []
        for section, layers in piece:
            start = done.get(section, 0)
            numbered.append((section, range(start, start + layers)))
            done[section] = start + layers
        yield numbered


def _piece_policies(
    program: Program, run: Run, piece: _ChunkLayerIndices, whole: SectionMask
) -> Iterator[tuple[int, _Policy]]:
    """Yield (section, recompute policy) of each layer of a model chunk, in order."""
    if run.recompute.by_layer:
        policies = _by_layer(program, run)
        yield from ((section, policies[section][layer]) for section, layers in piece for layer in layers)
        return
    left = run.recompute.layers
    for section, layers in piece:
        full = whole[section] * (len(layers) if left is None else min(left, len(layers)))
        left = left if left is None else left - full
        size = min(run.recompute.every or 1, full or 1)
        grouped = [_Policy("full", size)] * (full - full % size) + [_Policy("full", full % size)] * (full % size)
        yield from ((section, policy) for policy in grouped + [_Policy()] * (len(layers) - full))


def _check_layers(run: Run, most: int) -> None:
    for name, stated in (("recompute_layers", run.recompute.layers), ("recompute.every", run.recompute.every)):
        if stated is not None and stated > most:
            raise PlanError(f"{name}: {stated} layers; the fullest piece of this network has {most} to recompute")


def _by_layer(program: Program, run: Run) -> list[list[_Policy]]:
    """Return the policy of every layer of every section from patterns of names; later patterns take precedence."""
    default = with_recompute_policy(program, run.recompute.policy)
    policies = [[_Policy(section.recompute_policy)] * section.repeat for section in default.sections]
    for pattern, how in run.recompute.by_layer.items():
        places = [(i, layer) for i, layer, name in _names(program) if fnmatchcase(name, pattern)]
        if not places:
            raise PlanError(
                f"recompute.by_layer: no layer is called {pattern!r}; {suggest_names(pattern, _labels(program))}"
            )
        for section, layer in places:
            policies[section][layer] = _Policy(how)
    return policies


def _names(program: Program) -> Iterator[tuple[int, int, str]]:
    """Yield (section index, layer index, layer name) of every layer, with names ``block.0``, ``block.1``, ….

    A layer outside repeated blocks keeps the name of its section.
    """
    for index, section in enumerate(program.sections):
        for layer in range(section.repeat):
            yield index, layer, section.name if section.repeat == 1 else f"{section.name}.{layer}"


def _labels(program: Program) -> list[str]:
    """List names of layers for a message, with a pattern for the layers of a block."""
    return [section.name + ".*" * (section.repeat > 1) for section in program.sections]
