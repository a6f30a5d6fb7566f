"""Schema of a run: batch, precision, optimizer, strategy and communication, from options or a YAML file."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from paleo.errors import SpecError
from paleo.operations.tensor import CrossEntropyImplementation, QuantisationScaling
from paleo.specs.loading import NonEmptyText, PositiveCount, Spec, StrictBool, read_yaml, validate_mapping
from paleo.specs.software import RecomputePolicy, TokenDispatcher
from paleo.units import Bytes, BytesPerSecond, Seconds

#: When gradients are exchanged: in buckets during the backward pass, all after it, or through parameter servers.
GradientExchangeMode = Literal["overlapped", "after", "parameter-server"]

#: How the network is cut into pipeline pieces; numbers are the layers of each piece, in the order of the network.
PipelineCut = Literal["uniform", "time"] | tuple[Annotated[int, Field(strict=True, ge=0)], ...]


#: Noise of ranks in traced jobs: independent from step to step, and persistent. Both are medians of eight stages of two
#: jobs of ByteDance; the persistent one leaves out the stage with a worker that was slowed on purpose. Lin et al.,
#: Understanding stragglers in large model training using what-if analysis, OSDI 2025, data of
#: ByteDance-Seed/StragglerAnalysis@8efcd7f37f.
TRACED_STEP_TIME_JITTER = (0.015, 0.003)


def _rank_as_text(value: object) -> object:
    """Convert a whole number to text, so that ``lora: 16`` in a file means ``lora: "16"``."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _listed(value: object) -> object:
    """Split a text at commas, so that ``freeze: embed,block.0`` means a list of two names."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


class InputOptions(Spec):
    """Options of the input pipeline (reading, decoding and copying samples).

    A cost that is not given is zero, or the cost on the system's host.

    Parameters
    ----------
    sample
        stored bytes of a sample, read at `storage`
    storage
        rate at which a node reads samples
    decode
        time of one core to decode a sample
    cores
        cores that decode, for each GPU
    copied
        bytes of a sample that are copied to the device; left out: those of the network's inputs
    """

    sample: Bytes | None = None
    storage: BytesPerSecond | None = None
    decode: Seconds = 0.0
    cores: Annotated[float, Field(gt=0)] | None = None
    copied: Bytes | None = None


class RecomputeOptions(Spec):
    """Options of activation recomputation.

    Parameters
    ----------
    policy
        activations that are computed again before the backward pass
    layers
        number of first layers of each pipeline piece that are fully recomputed; the others keep all activations
    every
        full recomputation keeps one input for so many layers, which are then recomputed together
    modules
        parts of a block that selective recomputation computes again, as named by Megatron-Core: core_attn,
        layernorm, moe_act, mla_up_proj, mlp, moe, shared_experts
    by_layer
        layers that differ from the policy: `{"block.[0-3]": full}`
    """

    policy: RecomputePolicy = "none"
    layers: Annotated[int, Field(strict=True, ge=0)] | None = None
    every: PositiveCount | None = None
    modules: tuple[NonEmptyText, ...] = ()
    by_layer: dict[NonEmptyText, RecomputePolicy] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _modules_are_of_selective_recomputation(self) -> RecomputeOptions:
        if self.modules and self.policy != "selective":
            raise SpecError(
                f"modules: say what selective recomputation runs again, but the policy is {self.policy!r}; "
                "use selective"
            )
        return self


class ExpertOptions(Spec):
    """Options of a mixture of experts: how tokens are sent to experts, and how evenly.

    Parameters
    ----------
    imbalance
        tokens of the busiest expert rank over the mean
    dispatch
        how tokens are dispatched to experts
    overlap
        whether tokens are exchanged during a pass of another microbatch; left out: only under schedules that pair
        passes, such as dualpipe
    shared_overlap
        whether shared experts, which all tokens visit, run while NCCL exchanges the tokens of the others
    drop_tokens
        whether every expert gets exactly its equal share of tokens, so that the host waits for no counts
    """

    imbalance: Annotated[float, Field(ge=1)] = 1.0
    dispatch: TokenDispatcher | None = None
    overlap: StrictBool | None = None
    shared_overlap: StrictBool | None = None
    drop_tokens: StrictBool = False


class PipelineOptions(Spec):
    """Options of a pipeline: how the network is cut into stages, and the pipeline schedule.

    Parameters
    ----------
    schedule
        order of a pipeline's passes (`paleo list schedules`)
    cut
        how the network is cut into pipeline pieces. uniform: iterations of the heaviest block divided evenly; time:
        the slowest piece is as fast as possible; numbers: layers of each piece; left out: as the software does it,
        uniform where possible
    """

    schedule: NonEmptyText = "1f1b"
    cut: PipelineCut | None = None


class KernelOptions(Spec):
    """Options of kernels and their number formats; the software decides what is not given.

    Parameters
    ----------
    cuda_graph
        part of a step that is one CUDA graph
    cudnn
        release of the convolution library
    attention
        how attention is computed
    scaling
        how the scales of formats below sixteen bits are computed
    cross_entropy
        kernels of the loss
    main_gradients
        format in which gradients are summed with fp32 masters
    """

    cuda_graph: Literal["none", "full_iteration"] | None = None
    cudnn: Annotated[float, Field(gt=0)] | None = None
    attention: Literal["fused", "unfused", "stepwise"] | None = None
    scaling: QuantisationScaling | None = None
    cross_entropy: CrossEntropyImplementation | None = None
    main_gradients: Literal["narrow", "fp32"] | None = None


class ExchangeOptions(Spec):
    """Options of the gradient exchange between data-parallel ranks, and of how workers wait for each other.

    Parameters
    ----------
    when
        when and how gradients are exchanged
    bucket
        bytes of gradients that are exchanged together; left out: as the software does it
    algorithm
        collective algorithm that all all-reduces use (`paleo list collectives`)
    compress
        compression of gradients: `topk:0.001` (`paleo.compression`)
    consistency
        when workers wait for one another: `ssp:4` (`paleo.consistency`)
    servers
        parameter servers
    """

    when: GradientExchangeMode | None = None
    bucket: Bytes | None = None
    algorithm: NonEmptyText | None = None
    compress: NonEmptyText | None = None
    consistency: NonEmptyText = "bsp"
    servers: PositiveCount | None = None

    @property
    def forced_all_reduce(self) -> str | None:
        """All-reduce algorithm that the run forces, ``parameter_server`` if gradients go through servers, or None."""
        return self.algorithm or ("parameter_server" if self.when == "parameter-server" else None)


class FabricOptions(Spec):
    """Options of the network fabric: where the nodes of a run are placed, and which other jobs share the fabric.

    Parameters
    ----------
    nodes
        placement of the nodes of a run: packed, random, or `spread:8` leaf switches
    background
        fraction of the bandwidth above leaf switches that other jobs use
    neighbour
        a second job on the same leaf switches, `all_to_all:32:0.4`: its traffic (ring or all_to_all), number of
        nodes, and fraction of the time that it sends
    """

    nodes: NonEmptyText = "packed"
    background: Annotated[float, Field(ge=0, lt=1)] = 0.0
    neighbour: NonEmptyText | None = None


class VariationOptions(Spec):
    """Options of the variation of step times between ranks and steps, and of the work between samples.


    Parameters
    ----------
    jitter
        standard deviation of a rank's step time from step to step, as a fraction of it; `0.02,0.01` also states
        slow_ranks; traces: both as in traced jobs
    slow_ranks
        spread of ranks that are always slower or faster, as a fraction of the step time
    lengths
        standard deviation of the work of a sample over its mean, as for sequences of unequal lengths
    """

    jitter: Annotated[float, Field(ge=0, le=3)] = 0.0
    slow_ranks: Annotated[float, Field(ge=0, le=3)] = 0.0
    lengths: Annotated[float, Field(ge=0, le=3)] = 0.0

    @model_validator(mode="before")
    @classmethod
    def _noise(cls, data: Any) -> Any:
        """Parse ``jitter``: a fraction, two such as ``0.02,0.01`` (the second is ``slow_ranks``), or ``traces``."""
        text = data.get("jitter") if isinstance(data, Mapping) else None
        if not isinstance(text, str):
            return data
        try:
            traced = text.strip() == "traces"
            shares = TRACED_STEP_TIME_JITTER if traced else tuple(float(part) for part in text.split(","))
        except ValueError:
            shares = ()
        if len(shares) not in (1, 2):
            raise SpecError(
                f"jitter: {text[:80]!r}: expected a fraction such as 0.02, two such as 0.02,0.01, or traces"
            )
        if len(shares) == 2 and "slow_ranks" in data:
            raise SpecError(f"slow_ranks: jitter {text[:80]!r} states it, too; use one of them")
        return {**data, **dict(zip(("jitter", "slow_ranks"), shares, strict=False))}


class OffloadOptions(Spec):
    """Options of offloading optimizer states, gradients, parameters and activations to host memory.

    Parameters
    ----------
    states
        states and activations in host memory: optimizer, gradients, parameters, activations
    layers
        number of layers of the repeated blocks whose activations are offloaded to host memory, spread evenly over
        the network (Megatron-Core's cpu_offloading_num_layers)
    """

    states: NonEmptyText = "none"
    layers: Annotated[int, Field(strict=True, ge=0)] | None = None


class FineTuningOptions(Spec):
    """Options of fine-tuning: which weights are trained if not all of them.

    Parameters
    ----------
    lora
        rank of low-rank adapters, with all other weights frozen, and which products of the repeated blocks have
        one: `16:attention` (Hu et al., ICLR 2022), `16:mlp`, `16:all` or a pattern of names
    qlora
        whether frozen weights are stored in NF4 with double quantisation (Dettmers et al., 2023)
    freeze
        layers that are not trained, by patterns: `[embed, "block.[0-9]"]`
    """

    lora: Annotated[NonEmptyText, BeforeValidator(_rank_as_text)] | None = None
    qlora: StrictBool = False
    freeze: Annotated[tuple[NonEmptyText, ...], BeforeValidator(_listed)] = ()


#: The field of a group that a plain value states: ``recompute: full`` is ``recompute: {policy: full}``.
MAIN_FIELD_OF_GROUP = {"recompute": "policy", "exchange": "when", "offload": "states"}

#: Names of command-line options that mean a field of a group. Files and keywords may use them too.
SHORT_FIELD_NAMES = {
    "seq": "model.seq",
    "schedule": "pipeline.schedule",
    "recompute_layers": "recompute.layers",
    "compress": "exchange.compress",
    "consistency": "exchange.consistency",
    "servers": "exchange.servers",
    "jitter": "variation.jitter",
    "nodes": "fabric.nodes",
    "background": "fabric.background",
    "neighbour": "fabric.neighbour",
    "lora": "fine_tuning.lora",
    "qlora": "fine_tuning.qlora",
    "freeze": "fine_tuning.freeze",
}

#: Groups that may have fields of any name, or that a single word may replace.
_OPEN_GROUPS = ("model", "input")

#: Keys of earlier releases with the fields that replace them. This release still reads them and prints a remark.
FORMER_FIELD_NAMES = {
    "expert_imbalance": "experts.imbalance",
    "expert_dispatch": "experts.dispatch",
    "expert_overlap": "experts.overlap",
    "shared_expert_overlap": "experts.shared_overlap",
    "drop_tokens": "experts.drop_tokens",
    "cut": "pipeline.cut",
    "recompute_every": "recompute.every",
    "recompute_modules": "recompute.modules",
    "recompute_by_layer": "recompute.by_layer",
    "cuda_graph": "kernels.cuda_graph",
    "cudnn": "kernels.cudnn",
    "attention": "kernels.attention",
    "scaling": "kernels.scaling",
    "cross_entropy": "kernels.cross_entropy",
    "main_gradients": "kernels.main_gradients",
    "bucket": "exchange.bucket",
    "algorithm": "exchange.algorithm",
    "slow_ranks": "variation.slow_ranks",
    "length_variation": "variation.lengths",
    "offload_layers": "offload.layers",
}


class Run(Spec):
    """One training run: all options of a prediction.

    Sizes that are left out follow from the others; the prediction has the resolved sizes. Other options that are left
    out take the default of the ``software`` profile (how a framework's release drives the device).

    Fields of a group are stated as mappings (``recompute={"policy": "full", "layers": 4}``), by their path
    (``recompute.layers``), or by the name of the command-line option (``recompute_layers=4``).

    Parameters
    ----------
    gpus
        devices of the run
    batch
        samples of a data-parallel rank in a step
    global_batch
        samples of all ranks in a step
    microbatch
        samples of a rank in one pass
    dtype
        format of the operands of products; left out: the one people usually train in on the device
    optimizer
        optimizer of the update
    strategy
        a preset, or degrees: `tp=8,pp=4,zero=1,sp` (`paleo.parallel.placement`)
    placement
        splits of single layers over those of the strategy: `{block.*.mlp1: {ffn: tp}}`
    software
        software profile, perhaps of a release: `megatron-core@0.9`
    calibration
        auto, ideal, `ppp=0.6`, or a calibration by name or path
    clip
        gradient clipping by norm before the update
    input
        input pipeline; none: synthetic data at no cost; left out: as the software loads images, if the system
        states its cores
    forward_only
        whether only the forward pass is predicted
    model
        parameters of the model file to replace (seq, hidden, …)
    """

    gpus: PositiveCount = 1
    batch: PositiveCount | None = None
    global_batch: PositiveCount | None = None
    microbatch: PositiveCount | None = None
    dtype: NonEmptyText | None = None
    optimizer: NonEmptyText = "adamw"
    strategy: NonEmptyText = "dp"
    placement: dict[NonEmptyText, dict[NonEmptyText, NonEmptyText | list[NonEmptyText] | None]] = Field(
        default_factory=dict
    )
    experts: ExpertOptions = Field(default_factory=ExpertOptions)
    pipeline: PipelineOptions = Field(default_factory=PipelineOptions)
    recompute: RecomputeOptions = Field(default_factory=RecomputeOptions)
    software: NonEmptyText = "pytorch-eager"
    kernels: KernelOptions = Field(default_factory=KernelOptions)
    exchange: ExchangeOptions = Field(default_factory=ExchangeOptions)
    variation: VariationOptions = Field(default_factory=VariationOptions)
    fabric: FabricOptions = Field(default_factory=FabricOptions)
    calibration: NonEmptyText = "auto"
    offload: OffloadOptions = Field(default_factory=OffloadOptions)
    clip: Literal["none", "norm", "scaled"] | None = None
    input: InputOptions | Literal["none"] | None = None
    fine_tuning: FineTuningOptions = Field(default_factory=FineTuningOptions)
    forward_only: StrictBool = False
    model: dict[str, int | float | str] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, data: Any) -> Any:
        return _grouped(flatten_to_paths(data)) if isinstance(data, Mapping) else data

    def __hash__(self) -> int:
        """Hash all fields, including nested groups, because many runs differ only in a group's field."""
        return hash((super().__hash__(), *(value for value in self.__dict__.values() if isinstance(value, Spec))))

    @classmethod
    def extra_keys(cls) -> tuple[str, ...]:
        """Return the keys that a run file may have besides field names: short names and dotted paths of nested fields.

        Returns
        -------
        tuple of str
            Names of command-line options, and dotted paths.
        """
        return (*SHORT_FIELD_NAMES, *field_paths())

    @staticmethod
    def photo_input_options(*, sample: float | None, decode: float, cores: float) -> InputOptions:
        """Return input-pipeline options for software that loads photographs, the default of runs without ``input``.

        Parameters
        ----------
        sample : float, optional
            Size of a stored photograph [byte].
        decode : float
            Time of one core to decode a photograph [s].
        cores : float
            CPU cores that decode, for each GPU.

        Returns
        -------
        InputOptions
            Options of the input pipeline.
        """
        return InputOptions().model_copy(update={"sample": sample, "decode": decode, "cores": cores})


@functools.cache
def field_paths() -> tuple[str, ...]:
    """List the dotted paths of all fields of a run, such as ``gpus`` and ``recompute.layers``.

    Returns
    -------
    tuple of str
        Paths in the order of declaration.
    """
    paths: list[str] = []
    for name in Run.model_fields:
        group = _group(name)
        paths += [name] if group is None else [f"{name}.{field}" for field in group.model_fields]
    return tuple(paths)


def field_path(name: str) -> str:
    """Return the dotted path of a run's field from any of its names, such as ``recompute_layers``.

    Parameters
    ----------
    name : str
        Dotted path, name of a group with a main field, or name of a command-line option.

    Returns
    -------
    str
        Dotted path, such as ``recompute.policy``; ``name`` itself if it is none of these. A key of an earlier release
        warns.

    Examples
    --------
    >>> field_path("recompute"), field_path("recompute_layers"), field_path("gpus")
    ('recompute.policy', 'recompute.layers', 'gpus')
    """
    if name in FORMER_FIELD_NAMES:
        present = FORMER_FIELD_NAMES[name]
        warnings.warn(f"{name} is now {present}; the old key goes with the next release", FutureWarning, 2)
        return present
    return f"{name}.{MAIN_FIELD_OF_GROUP[name]}" if name in MAIN_FIELD_OF_GROUP else SHORT_FIELD_NAMES.get(name, name)


def shortest_field_name(path: str) -> str:
    """Return the shortest name of a run's field, from its dotted path.

    Parameters
    ----------
    path : str
        Path of the field.

    Returns
    -------
    str
        Name of the command-line option or group that stands for the field, if there is one; else the path.

    Examples
    --------
    >>> [shortest_field_name(path) for path in ("recompute.policy", "recompute.layers", "pipeline.cut")]
    ['recompute', 'recompute_layers', 'pipeline.cut']
    """
    group, _, field = path.partition(".")
    if MAIN_FIELD_OF_GROUP.get(group) == field:
        return group
    return next((name for name, long in SHORT_FIELD_NAMES.items() if long == path and group != "model"), path)


def flatten_to_paths(data: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested options of a run to a mapping from dotted path to value.

    Parameters
    ----------
    data : mapping of str to Any
        Options, in any of the forms that `Run` takes.

    Returns
    -------
    dict of str to Any
        Values by dotted path, not validated.

    Raises
    ------
    SpecError
        If two keys give the same field.

    Examples
    --------
    >>> flatten_to_paths({"gpus": 8, "recompute": "full", "recompute_layers": 4})
    {'gpus': 8, 'recompute.policy': 'full', 'recompute.layers': 4}
    """
    flat: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in data.items():
        for path, each in _paths_of_key(key, value).items():
            name = key if field_path(key) == path else path
            if path in flat:
                raise SpecError(f"{name} and {keys[path]} state the same field; keep one")
            flat[path], keys[path] = each, name
    return flat


def _paths_of_key(key: str, value: Any) -> dict[str, Any]:
    """Return values by dotted path for one key of a run: all fields of a group, or a single field."""
    if isinstance(value, Spec):
        value = {name: getattr(value, name) for name in value.model_fields_set}
    if isinstance(value, Mapping) and (key in _OPEN_GROUPS or _group(key) is not None):
        return {f"{key}.{name}": each for name, each in value.items()} or {key: {}}
    return {field_path(key): value}


def _grouped(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values by dotted path to one nested mapping for each group."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        group, _, name = path.partition(".")
        if not name or group not in Run.model_fields:
            nested[path] = value
        elif isinstance(present := nested.get(group, {}), dict):
            nested[group] = {**present, name: value}
        else:
            raise SpecError(f"{path}: {group} is {nested[group]!r:.80}, too; use one of them")
    return nested


@functools.cache
def _group(name: str) -> type[Spec] | None:
    """Return the schema of a group of run options (such as ``recompute``), or None for a plain field."""
    field = Run.model_fields.get(name)
    annotation = None if field is None else field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Spec) else None


def user_set_fields(run: Run) -> dict[str, Any]:
    """Return the options that the user set for a run, without defaults.

    Parameters
    ----------
    run : Run
        Run to read.

    Returns
    -------
    dict of str to Any
        Values by dotted path, from which `Run` can be built again.
    """
    return flatten_to_paths({name: getattr(run, name) for name in run.model_fields_set})


def replace_fields(run: Run, values: Mapping[str, Any]) -> Run:
    """Return a copy of a run with some fields replaced, without validation.

    Parameters
    ----------
    run : Run
        Run to copy.
    values : mapping of str to Any
        Values by dotted path or short name (see `field_path`); entries of ``model`` are merged with those of the run.

    Returns
    -------
    Run
        Run with the new values.

    Raises
    ------
    AttributeError
        If there is no such field.

    Examples
    --------
    >>> replace_fields(Run(recompute="full"), {"gpus": 8, "recompute.layers": 4}).recompute.layers
    4
    """
    changed = _grouped({field_path(name): value for name, value in values.items()})
    for group, fields in changed.items():
        old = getattr(run, group)
        if group == "model":
            changed[group] = {**old, **fields}
        elif isinstance(fields, dict) and group != "placement":
            changed[group] = (old if isinstance(old, Spec) else InputOptions()).model_copy(update=fields)
    return run.model_copy(update=changed)


def load_run(path: str | Path) -> Run:
    """Load a run from a YAML file.

    Parameters
    ----------
    path : str | Path
        Path of the file.

    Returns
    -------
    Run
        Validated run.

    Raises
    ------
    SpecError
        If the file is not valid.
    """
    return validate_mapping(Run, read_yaml(path), path)
