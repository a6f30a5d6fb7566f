"""Device mesh of ranks, and placements: which tensor dims of which layers are split over which mesh axes.

The mesh has named axes with degrees, innermost first, so that each axis is a set of groups on the system. A strategy
selects a preset, a function that returns a placement. Users can override a placement layer by layer: ``placement:`` of
a run names layers and says which mesh axes split their dims:

    block.*.mlp1: {ffn: tp}
    "*.attention*": {kv_heads: tp, seq: [cp]}
    head: {vocab: null}

Names may be patterns. The repeated iterations of a block are stored as one copy with a count, called ``block.*``. Dims
that an entry does not mention keep the split of the preset, or of an earlier entry; ``null`` leaves a dim unsplit.
Communication follows from the rules of `paleo.parallel.propagation`, as for a preset.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, NamedTuple

from paleo.errors import PlanError, suggest_names
from paleo.registry import Registry
from paleo.units import comma_separated, parse_whole_number

if TYPE_CHECKING:
    from paleo.network.graph import Graph, Node

#: Mesh axes from the innermost (neighbouring ranks) to the outermost, the order of Megatron and of torchtitan.
#: ``spatial`` splits images, ``ep`` spreads experts over data-parallel ranks, and ``shard``, if stated, shards states
#: over groups of them. So the batch is split over all of ``BATCH_AXES``.
AXES = ("spatial", "tp", "cp", "ep", "shard", "dp", "pp")
Axes = tuple[str, ...]
BATCH_AXES: Axes = ("ep", "shard", "dp")
#: Dims of tokens sorted by expert: during dispatch and combine, and inside the experts.
EXPERT_TOKEN_DIMS = ("capacity", "in_capacity")


def joined_axis_name(axes: Axes) -> str:
    """Return the name for a group of ranks that spans several mesh axes, such as ``tp+ep``.

    Parameters
    ----------
    axes : Axes
        Mesh axes.

    Returns
    -------
    str
        Names of the axes, joined by ``+``.

    Examples
    --------
    >>> joined_axis_name(("tp", "ep")), Mesh.from_degrees({"tp": 2, "ep": 4, "dp": 3}).degree("tp+ep")
    ('tp+ep', 8)
    """
    return "+".join(axes)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Device mesh: the number of ranks along each axis of parallelism; ranks count up fastest along the first axis.

    >>> mesh = Mesh.from_degrees({"dp": 4, "tp": 8})
    >>> mesh.size, mesh.stride(("dp",)), mesh.degree("pp")
    (32, 8, 1)
    """

    degrees: tuple[tuple[str, int], ...]
    _by_axis: dict[str, int] = field(init=False, repr=False, compare=False)
    _strides: dict[Axes, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_axis", dict(self.degrees))

    @classmethod
    def from_degrees(cls, degrees: Mapping[str, int]) -> Mesh:
        """Build a mesh from the degrees of parallelism, with the axes in their fixed order (`AXES`).

        Parameters
        ----------
        degrees : dict of str to int
            Ranks along each axis; 1 for missing axes.

        Returns
        -------
        Mesh
            Mesh with all axes.
        """
        return cls(tuple((axis, degrees.get(axis, 1)) for axis in AXES))

    @property
    def size(self) -> int:
        return math.prod(degree for _, degree in self.degrees)

    def degree(self, axis: str) -> int:
        """Return the number of ranks along an axis, or along several axes joined by ``+``.

        Parameters
        ----------
        axis : str
            Name of the axis, or of a group as `joined_axis_name` returns it.

        Returns
        -------
        int
            Number of ranks.
        """
        known = self._by_axis.get(axis)
        return self.group_size(tuple(axis.split("+"))) if known is None else known

    def stride(self, axes: Axes) -> int:
        """Return the difference between the ranks of neighbours in a communication group over some axes.

        Parameters
        ----------
        axes : Axes
            Axes of the group.

        Returns
        -------
        int
            Stride of the group's innermost axis with more than one rank.
        """
        if axes not in self._strides:
            names = [name for name, _ in self.degrees]
            single = tuple(name for axis in axes for name in axis.split("+"))
            used = [axis for axis in single if self.degree(axis) > 1] or list(single)
            innermost = min(names.index(axis) for axis in used)
            self._strides[axes] = math.prod(degree for _, degree in self.degrees[:innermost])
        return self._strides[axes]

    @property
    def replicas(self) -> int:
        """Number of data-parallel ranks, over which the batch is split."""
        return self.group_size(BATCH_AXES)

    @property
    def zero_shard_axes(self) -> Axes:
        """Axes over which ZeRO shards optimizer states, gradients and parameters.

        These are the shard group (HSDP) or all replicas, and the ranks of cp. Ranks of cp hold the same parameters, so
        Megatron's distributed optimizer and FSDP shard states over dp x cp.
        """
        axes = ("cp", "shard") if self.degree("shard") > 1 else ("cp", "ep", "dp")
        return tuple(axis for axis in axes if self.degree(axis) > 1)

    def group_size(self, axes: Axes) -> int:
        """Return the number of ranks of a communication group over several mesh axes.

        Parameters
        ----------
        axes : Axes
            Mesh axes.

        Returns
        -------
        int
            Product of the degrees of the axes.
        """
        return math.prod([self._by_axis[axis] for axis in axes])


#: dim -> mesh axes that split it.
SplitAxes = Mapping[str, Axes]
#: How attention reads all keys under context parallelism: keys and values go round a ring (Liu et al., Ring attention,
#: 2023), or all-to-alls exchange heads for the sequence (Jacobs et al., DeepSpeed-Ulysses, 2023).
ContextParallelMethod = Literal["ring", "all_to_all"]


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """Rule of a placement: which mesh axes split which tensor dims, in layers with a given type and name pattern."""

    split_axes: SplitAxes
    layer_type: str | None = None
    name_pattern: str = "*"

    def __hash__(self) -> int:
        return hash((tuple(self.split_axes.items()), self.layer_type, self.name_pattern))

    def matches(self, node: Node) -> bool:
        """Return True if the rule applies to a layer, by layer type and name pattern.

        Parameters
        ----------
        node : Node
            Layer of the network.

        Returns
        -------
        bool
            True if type and name match.
        """
        named = self.name_pattern == "*" or fnmatchcase(node.name, self.name_pattern)
        return named and self.layer_type in (None, node.type)


@dataclass(frozen=True, slots=True)
class Placement:
    """Sharding of a network's layers over the mesh, as ordered rules; the last rule that matches a layer applies.

    ``context_parallel_method`` says how attention over a split sequence reads all keys. ``expert_load_imbalance`` is
    the number of tokens of the busiest expert rank relative to the mean.
    """

    rules: tuple[PlacementRule, ...]
    context_parallel_method: ContextParallelMethod = "ring"
    expert_load_imbalance: float = 1.0
    _splits: dict[tuple[str, str], SplitAxes] = field(default_factory=dict, init=False, repr=False, compare=False)

    def split_axes_of(self, node: Node) -> SplitAxes:
        """Return which mesh axes split each tensor dim of a layer.

        Parameters
        ----------
        node : Node
            Layer of the network.

        Returns
        -------
        SplitAxes
            Mesh axes by name of the dim; unsplit dims may be missing.
        """
        key = node.type, node.name
        if key not in self._splits:
            self._splits[key] = next((rule.split_axes for rule in reversed(self.rules) if rule.matches(node)), {})
        return self._splits[key]


def redundant_mesh_axes(graph: Graph, placement: Placement, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes that split no dim of any layer, so that all of their ranks do the same work.

    Parameters
    ----------
    graph : Graph
        Network as a graph of layers.
    placement : Placement
        Mesh axes that split the dims of every layer.
    mesh : Mesh
        Number of ranks along each mesh axis.

    Returns
    -------
    tuple of str
        Names of axes.
    """
    used: set[str] = set()
    for node in graph.nodes:
        dims = _dims(node)
        used.update(axis for dim, axes in placement.split_axes_of(node).items() if dim in dims for axis in axes)
    return tuple(axis for axis, degree in mesh.degrees if degree > 1 and axis != "pp" and axis not in used)


ZeroStage = Literal[0, 1, 2, 3]


@dataclass(frozen=True, slots=True)
class Strategy:
    """Parallelisation strategy as users write it: a preset, degrees, and flags.

    Attributes
    ----------
    preset : str
        Name of the preset placement.
    degrees : mapping of str to int
        Ranks along each mesh axis that the user fixed.
    zero : int
        ZeRO stage, which says what is sharded over data-parallel ranks: 1 optimizer states, 2 gradients too, 3
        parameters too (FSDP). A degree ``shard`` limits the sharding to groups of that size (HSDP).
    sequence_parallel : bool
        True if the sequence is split over tp outside the tensor-parallel layers.
    chunks : int
        Pieces of the network on each pipeline stage (virtual stages).
    context_parallel_method : {'ring', 'all_to_all'}
        How attention reads all keys under context parallelism.
    expert_tensor_degree : int, optional
        Tensor degree of experts, 1 or tp. Experts are then folded over the ranks of tp, cp and dp, innermost first
        (Megatron-Core 0.9 and later, "MoE parallel folding", Liu et al., 2025). None: they are spread over
        data-parallel ranks only.
    shards_within_nodes : bool
        True if each ZeRO shard group consists of the data-parallel ranks of one node (hsdp without a degree).
    expert_tokens : {'own', 'all'}
        Tokens that a rank sends to experts if experts and sequences are split over tp: its own, or all of its tp group.
    """

    preset: str = "dp"
    degrees: Mapping[str, int] = field(default_factory=dict)
    zero: ZeroStage = 0
    sequence_parallel: bool = False
    chunks: int = 1
    context_parallel_method: ContextParallelMethod = "ring"
    expert_tensor_degree: int | None = None
    shards_within_nodes: bool = False
    expert_tokens: Literal["own", "all"] = "all"

    @property
    def expert_axes(self) -> Axes:
        """Mesh axes over which experts are spread, innermost first."""
        if self.expert_tensor_degree is None or self.degrees.get("ep", 1) == 1:
            return ("ep",)
        return ("cp", "ep") if self.expert_tensor_degree == self.degrees.get("tp", 1) > 1 else ("tp", "cp", "ep")

    @property
    def splits_expert_tokens(self) -> bool:
        """True if tp splits the experts' tokens instead of their weights, because their tensor degree is below tp."""
        return self.expert_tensor_degree is not None and self.expert_tensor_degree < self.degrees.get("tp", 1)

    @property
    def dispatches_own_tokens(self) -> bool:
        """True if each tensor-parallel rank dispatches only its own share of the tokens to experts."""
        return self.splits_expert_tokens or (self.sequence_parallel and self.expert_tokens == "own")

    @property
    def flags(self) -> list[str]:
        """Flags of the strategy as written on the command line, such as ``sp`` and ``ulysses``."""
        return ["sp"] * self.sequence_parallel + ["ulysses"] * (self.context_parallel_method == "all_to_all")


#: Words of a strategy that are flags, not presets.
_STRATEGY_FLAGS = ("sp", "ulysses")
#: PyTorch's names of data parallelism -> ZeRO stage; ``hsdp`` shards within each node.
ZERO_STAGE_BY_NAME: Mapping[str, ZeroStage] = {"ddp": 0, "fsdp": 3, "hsdp": 3}


def shard_degree_within_node(devices_per_node: int, replicas: int, split: int) -> dict[str, int]:
    """Return the degree of mesh axis ``shard`` for HSDP: data-parallel ranks of the largest shard group within a node.

    Parameters
    ----------
    devices_per_node : int
        Devices of a node.
    replicas : int
        Number of data-parallel ranks; the degree divides this number.
    split : int
        Devices that hold one replica.

    Returns
    -------
    dict of str to int
        ``{'shard': degree}``; the degree is 1 if no two replicas fit into a node.

    Examples
    --------
    >>> shard_degree_within_node(8, replicas=16, split=1), shard_degree_within_node(8, replicas=8, split=2)
    ({'shard': 8}, {'shard': 4})
    >>> shard_degree_within_node(8, 3, 16)
    {'shard': 1}
    """
    sizes = (ranks for ranks in range(1, devices_per_node // split + 1) if replicas % ranks == 0)
    return {"shard": max(sizes, default=1)}


def has_shard_groups(degrees: Mapping[str, int]) -> bool:
    """Return True if states are sharded over groups of data-parallel ranks (HSDP), which needs ZeRO.

    Parameters
    ----------
    degrees : dict of str to int
        Ranks along each axis.

    Returns
    -------
    bool
        True if the degree ``shard`` is above 1.
    """
    return degrees.get("shard", 1) > 1


_PlacementPreset = Callable[["Graph", Strategy], Placement]
STRATEGY_PRESETS: Registry[_PlacementPreset] = Registry("strategy", "paleo.parallel")


def without_data_parallel_degree(text: str) -> str:
    """Remove the data-parallel degree from a strategy, so that it applies to other numbers of GPUs.

    Parameters
    ----------
    text : str
        Strategy as on the command line.

    Returns
    -------
    str
        Strategy without ``dp=``; ``dp`` if nothing else is left.

    Examples
    --------
    >>> without_data_parallel_degree("tp=2,dp=4,zero=1"), without_data_parallel_degree("dp=4")
    ('tp=2,zero=1', 'dp')
    """
    return ",".join(part for part in comma_separated(text) if not part.startswith("dp=")) or "dp"


def parse_strategy(text: str) -> Strategy:
    """Parse a strategy of the command line, such as ``dp`` or ``tp=8,pp=4,dp=16,zero=1,vp=2,sp``.

    ``owt`` is the preset of one-weird-trick parallelism. ``ulysses`` is context parallelism by all-to-alls. ``shard=8``
    shards states over groups of 8 ranks. ``ddp`` is plain data parallelism, ``fsdp`` is zero=3, and ``hsdp`` is zero=3
    within each node.

    Parameters
    ----------
    text : str
        Text of the strategy option.

    Returns
    -------
    Strategy
        Preset, degrees and flags.

    Raises
    ------
    PlanError
        If a word is unknown (with near names) or a degree is no whole number.

    Examples
    --------
    >>> parse_strategy("tp=8,dp=4,sp").degrees
    {'tp': 8, 'dp': 4}
    """
    words: list[str] = []
    numbers: dict[str, int] = {}
    for part in comma_separated(text):
        key, equals, value = part.partition("=")
        if not equals:
            words.append(key)
        elif key in numbers or (number := parse_whole_number(value, _MOST)) is None:
            raise PlanError(f"strategy {text[:200]!r}: {part[:80]!r} is not one whole number, such as {key[:80]}=8")
        else:
            numbers[key] = number
    known, spoken = [*AXES, "zero", "vp", "etp"], [*_STRATEGY_FLAGS, *ZERO_STAGE_BY_NAME, *STRATEGY_PRESETS]
    unknown = [key for key in numbers if key not in known] + [word for word in words if word not in spoken]
    if unknown:
        name, digits = unknown[0].rstrip(string.digits), unknown[0].lstrip(string.ascii_lowercase)
        hint = f"write {name}={digits}" if name in known and digits else suggest_names(unknown[0], [*known, *spoken])
        raise PlanError(f"strategy {text!r}: unknown {unknown[0]!r}; {hint}")
    return _strategy(text, words, numbers)


_MOST = 9_999_999


def _strategy(text: str, words: list[str], numbers: dict[str, int]) -> Strategy:
    presets = [word for word in words if word not in _STRATEGY_FLAGS and word not in ZERO_STAGE_BY_NAME]
    sharded = [word for word in words if word in ZERO_STAGE_BY_NAME]
    if len(sharded) > 1 or (sharded and "zero" in numbers):
        stated = " and ".join([*sharded, *(f"zero={numbers['zero']}" for _ in sharded if "zero" in numbers)])
        raise PlanError(f"strategy {text!r}: {stated}: ways to share states; state one of them")
    numbers |= {"zero": ZERO_STAGE_BY_NAME[sharded[0]]} if sharded else {}
    within_nodes = "hsdp" in sharded and "shard" not in numbers
    zero, chunks, etp = numbers.pop("zero", 0), numbers.pop("vp", 1), numbers.pop("etp", None)
    if len(presets) > 1 or len(words) != len(set(words)):
        raise PlanError(f"strategy {text!r}: names more than one preset; known: {', '.join(STRATEGY_PRESETS)}")
    if zero > 3:
        raise PlanError(f"strategy {text!r}: zero={zero} must be 0, 1, 2 or 3")
    for key, value in (numbers | {"vp": chunks}).items():
        if value < 1:
            raise PlanError(f"strategy {text!r}: {key}={value} must be 1 or more")
    if etp not in (None, 1, numbers.get("tp", 1)):
        raise PlanError(f"strategy {text!r}: etp={etp} must be 1 or tp={numbers.get('tp', 1)}")
    context: ContextParallelMethod = "all_to_all" if "ulysses" in words else "ring"
    return Strategy(
        (presets or ["dp"])[0],
        numbers,
        zero=zero,  # type: ignore[arg-type]
        sequence_parallel="sp" in words,
        chunks=chunks,
        context_parallel_method=context,
        expert_tensor_degree=etp,
        shards_within_nodes=within_nodes,
    )


PlacementEntries = Mapping[str, Mapping[str, str | Sequence[str] | None]]
#: Axes that can split a dim; a pipeline cuts the graph instead.
_PLACEABLE_AXES = tuple(axis for axis in AXES if axis != "pp")


def strategy_placement(graph: Graph, strategy: Strategy, stated: PlacementEntries, imbalance: float = 1.0) -> Placement:
    """Return how a strategy shards the layers of a network, with the ``placement`` entries of a run applied on top.

    Parameters
    ----------
    graph : Graph
        Network as a graph of layers.
    strategy : Strategy
        Preset, degrees and flags.
    stated : PlacementEntries
        Entries of `Run.placement`: for each pattern of layer names, the mesh axes that split each dim.
    imbalance : float, optional
        Tokens of the busiest expert rank relative to the mean.

    Returns
    -------
    Placement
        Mesh axes that split each dim of each layer.

    Raises
    ------
    PlanError
        If an entry names an unknown layer, dim or axis.
    """
    preset = STRATEGY_PRESETS[strategy.preset](graph, strategy)
    return replace(override_placement(preset, graph, stated), expert_load_imbalance=imbalance)


def override_placement(preset: Placement, graph: Graph, stated: PlacementEntries) -> Placement:
    """Override parts of a preset placement by the ``placement`` entries of a run.

    Parameters
    ----------
    preset : Placement
        Placement of the strategy.
    graph : Graph
        Network as a graph of layers.
    stated : PlacementEntries
        Entries of the run: for each pattern of layer names, the mesh axes that split each dim.

    Returns
    -------
    Placement
        Placement with these entries as additional rules.

    Raises
    ------
    PlanError
        If an entry names an unknown layer, dim or axis (the message has near names), or an axis would divide two dims
        of one tensor.
    """
    splits: dict[str, SplitAxes] = {}
    for pattern, dims in stated.items():
        computing = [node for node in graph.nodes if node.operations]
        named = ((node, (layer_label(node), node.name)) for node in computing)
        nodes = [node for node, names in named if any(fnmatchcase(name, pattern) for name in names)]
        if not nodes:
            hint = suggest_names(pattern, dict.fromkeys(map(layer_label, computing)))
            raise PlanError(f"placement: no layer of {graph.name} is called {pattern!r}; {hint}")
        changes = {dim: _axes(pattern, dim, axes) for dim, axes in dims.items()}
        _check_dims(pattern, changes, nodes)
        for node in nodes:
            present = {dim: axes for dim, axes in changes.items() if dim in _dims(node)}
            known = splits.get(node.name, preset.split_axes_of(node))
            carried = {dim for operation in node.operations for dim in operation.out.dims}
            inner = {f"in_{dim}": axes for dim, axes in present.items() if f"in_{dim}" in carried}
            splits[node.name] = {**inner, **known, **present}
    for node in graph.nodes:
        if node.name in splits:
            _check_axes(node, splits[node.name])
    added = (PlacementRule(split, name_pattern=name) for name, split in splits.items())
    return replace(preset, rules=(*preset.rules, *added))


def layer_label(node: Node) -> str:
    """Return the name of a layer with ``*`` for the iteration of each repeated block, such as ``block.*.mlp1``.

    Parameters
    ----------
    node : Node
        Layer of the network.

    Returns
    -------
    str
        Name that stands for all iterations.
    """
    name = node.name
    for loop, _ in reversed(node.loops):
        if name.startswith(f"{loop}."):
            name = f"{loop}.*{name.removeprefix(loop)}"
    return name


def _dims(node: Node) -> set[str]:
    return {dim for op in node.operations for tensor in (*op.read_tensors, op.out) for dim in tensor.dims}


def _axes(pattern: str, dim: str, axes: str | Sequence[str] | None) -> Axes:
    names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    where = f"placement: {pattern}: {dim}"
    for name in names:
        if name == "pp":
            raise PlanError(f"{where}: a pipeline cuts the network into stages, it divides no dim; leave pp out")
        if name not in _PLACEABLE_AXES:
            raise PlanError(f"{where}: unknown mesh axis {name!r}; {suggest_names(name, _PLACEABLE_AXES)}")
    if len(set(names)) < len(names):
        raise PlanError(f"{where}: names an axis twice: {', '.join(names)}")
    return names


def _check_dims(pattern: str, dims: Iterable[str], nodes: Sequence[Node]) -> None:
    known = dict.fromkeys(dim for node in nodes for dim in sorted(_dims(node)))
    for dim in dims:
        if dim not in known:
            layers = f"layer {nodes[0].name!r} has" if len(nodes) == 1 else f"none of the {len(nodes)} layers has"
            raise PlanError(f"placement: {pattern}: {layers} no dim {dim!r}; {suggest_names(dim, known)}")


def _check_axes(node: Node, split: SplitAxes) -> None:
    """Raise PlanError if a mesh axis would split two dims of one tensor."""
    for tensor in (tensor for op in node.operations for tensor in (*op.read_tensors, op.out)):
        dim_of_axis: dict[str, str] = {}
        for dim in tensor.dims:
            for axis in split.get(dim, ()):
                if axis in dim_of_axis:
                    dims = f"{dim_of_axis[axis]!r} and {dim!r} of {tensor.name!r}"
                    raise PlanError(f"placement: layer {node.name!r}: {axis} would divide both {dims}; keep one")
                dim_of_axis[axis] = dim


#: Position of a dim that a view has merged with others.
MERGED_DIM_INDEX = -1


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Sharding of a tensor over the mesh: which axis splits which dim, and which partial sums remain.

    Attributes
    ----------
    axes_by_dim : tuple of Axes
        Axes that split each dim, in the order of the dims.
    partial_sum_axes : frozenset of str
        Axes over which the tensor is a partial sum.
    merged_axes : frozenset of str
        Axes that split dims which a view has merged with others.
    """

    axes_by_dim: tuple[Axes, ...]
    partial_sum_axes: frozenset[str] = frozenset()
    merged_axes: frozenset[str] = frozenset()

    def dim_index(self, axis: str) -> int | None:
        """Return the index of the tensor dim that a mesh axis splits.

        Parameters
        ----------
        axis : str
            Mesh axis.

        Returns
        -------
        int, optional
            Index; `MERGED_DIM_INDEX` if a view has merged the dim, None if the axis splits no dim.
        """
        for index, axes in enumerate(self.axes_by_dim):
            if axis in axes:
                return index
        return MERGED_DIM_INDEX if axis in self.merged_axes else None


# keys by which equal shares of layers are found, so that each is computed once


class LayerShardKey(NamedTuple):
    """Cache key for one rank's share of a layer (local shapes and collectives); equal keys mean equal shares.

    ``layer_id`` identifies the layer with the samples of a rank, ``split`` its split dims, and ``inputs`` the layouts
    of its inputs. ``degrees`` are those of the axes that split other dims than the batch.
    """

    layer_id: Hashable
    split: tuple[tuple[str, Axes], ...]
    inputs: tuple[TensorLayout, ...]
    degrees: tuple[int, ...]


def layer_shard_key(
    graph: Graph, node: Node, split: SplitAxes, layouts: Mapping[str, TensorLayout], mesh: Mesh, batch_axes: Axes
) -> LayerShardKey:
    """Return a cache key that is equal for layers whose shares on a rank are equal.

    Parameters
    ----------
    graph : Graph
        Network as a graph of layers.
    node : Node
        Layer of the network.
    split : SplitAxes
        Mesh axes that split each dim of the layer.
    layouts : dict of str to TensorLayout
        Layout of each input by tensor name.
    mesh : Mesh
        Number of ranks along each mesh axis.
    batch_axes : Axes
        Axes that split the batch of the inputs.

    Returns
    -------
    LayerShardKey
        Key that includes layer, split, layouts of the inputs, and degrees.
    """
    inputs = tuple([layouts[tensor.name] for tensor in node.inputs])
    axes = _inner_axes(node, split, inputs, batch_axes)
    if axes is None:
        return LayerShardKey((node.name, graph.batch, mesh.degrees), tuple(split.items()), inputs, ())
    number = graph.cached_result(("number", node.name, mesh.replicas), lambda: _number(graph, node, mesh.replicas))
    return LayerShardKey(number, tuple(split.items()), inputs, tuple([mesh.degree(axis) for axis in axes]))


def _inner_axes(node: Node, split: SplitAxes, inputs: tuple[TensorLayout, ...], batch_axes: Axes) -> Axes | None:
    """Return the axes that split dims other than the batch; None if the batch is not split over ``batch_axes``."""
    lying = list(split.items())
    for tensor, layout in zip(node.inputs, inputs, strict=True):
        lying += zip(tensor.dims, layout.axes_by_dim, strict=False)
        lying += [("merged", axes) for axes in layout.axes_by_dim[len(tensor.dims) :]]
    if any(axes != batch_axes for dim, axes in lying if dim == "batch"):
        return None
    return tuple(dict.fromkeys(axis for dim, axes in lying if dim != "batch" for axis in axes))


def _number(graph: Graph, node: Node, replicas: int) -> Hashable:
    """Return a number that identifies a layer; layers that compute the same on a rank have equal numbers.

    Graphs of other batches that share a cache use the same numbers.
    """
    if graph.shared_cache is None:
        return node.name, replicas
    numbers: dict[Hashable, int] = graph.cached_result("layers with their batch divided", dict, any_batch=True)
    return numbers.setdefault(_at_rank_batch(node, {"batch": replicas}), len(numbers))


def _at_rank_batch(node: Node, shards: Mapping[str, float]) -> Hashable:
    """Return a hashable description of a layer with the samples of one rank.

    Inputs that no operation reads keep all samples.
    """
    operations = tuple([operation.shard(shards) for operation in node.operations])
    inputs = tuple([tensor.shard(shards) for tensor in node.inputs])
    read = {tensor.name for operation in node.operations for tensor in operation.read_tensors}
    unread = tuple([tensor for tensor in node.inputs if tensor.name not in read])
    return node.name, node.loops, operations, inputs, unread, node.out.shard(shards)
