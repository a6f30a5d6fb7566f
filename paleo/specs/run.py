"""What is run: batch, precision, optimizer, strategy and how communication is done. From options or a YAML file."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from paleo.errors import SpecError
from paleo.operations.tensor import LossKernels, Scaling
from paleo.specs.loading import Flag, PositiveCount, Spec, Text, read_yaml, validate
from paleo.specs.software import Dispatch, Recompute
from paleo.units import Bytes, BytesPerSecond, Seconds

#: When gradients are exchanged: in buckets while backward still runs, all after it, or through parameter servers.
Exchange = Literal["overlapped", "after", "parameter-server"]

#: How a pipeline's pieces are made; numbers are the layers of each piece, in the order of the network.
Cut = Literal["uniform", "time"] | tuple[Annotated[int, Field(strict=True, ge=0)], ...]


#: Independent and persistent noise of ranks of traced jobs: medians of eight stages of two jobs of ByteDance (the
#: stage with a worker that was slowed on purpose left out of the persistent one). Lin et al., Understanding stragglers
#: in large model training using what-if analysis, OSDI 2025, data of ByteDance-Seed/StragglerAnalysis@8efcd7f37f.
TRACED = (0.015, 0.003)


def _rank_as_text(value: object) -> object:
    """``lora: 16`` is ``lora: "16"``."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _listed(value: object) -> object:
    """``embed,block.0`` is a list of two."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


class InputOptions(Spec):
    """How samples reach the devices. A cost that is not stated is zero, or that of the system's host."""

    sample: Bytes | None = Field(None, description="stored bytes of a sample, read at `storage`")
    storage: BytesPerSecond | None = Field(None, description="rate at which a node reads")
    decode: Seconds = Field(0.0, description="time of one core for a sample")
    cores: Annotated[float, Field(gt=0)] | None = Field(None, description="cores for each GPU that decode")
    copied: Bytes | None = Field(
        None, description="bytes of a sample that go to the device; left out: those of the network's inputs"
    )


class RecomputeOptions(Spec):
    """Options of recomputation: the activations that are computed again before the backward pass."""

    policy: Recompute = Field("none", description="which activations are computed again before the backward pass")
    layers: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        None, description="full recomputation of so many first layers of each piece; the others keep all activations"
    )
    every: PositiveCount | None = Field(
        None, description="full recomputation keeps one input for so many layers, which are then brought back together"
    )
    modules: tuple[Text, ...] = Field(
        (),
        description="parts of a block that selective recomputation runs again, as Megatron-Core calls them: core_attn, "
        "layernorm, moe_act, mla_up_proj, mlp, moe, shared_experts",
    )
    by_layer: dict[Text, Recompute] = Field(
        default_factory=dict, description='layers that differ from the policy: `{"block.[0-3]": full}`'
    )

    @model_validator(mode="after")
    def _modules_are_of_selective_recomputation(self) -> RecomputeOptions:
        if self.modules and self.policy != "selective":
            raise SpecError(
                f"modules: say what selective recomputation runs again, but the policy is {self.policy!r}; "
                "use selective"
            )
        return self


class ExpertOptions(Spec):
    """Options of experts: how tokens reach them, and how evenly."""

    imbalance: Annotated[float, Field(ge=1)] = Field(
        1.0, description="tokens of the busiest rank of experts over their mean"
    )
    dispatch: Dispatch | None = Field(None, description="how tokens are dispatched to experts")
    overlap: Flag | None = Field(
        None,
        description="whether tokens travel beside a pass of another microbatch; under a schedule that pairs passes, as "
        "dualpipe does, they do unless stated",
    )
    shared_overlap: Flag | None = Field(
        None, description="whether experts that all tokens visit run while NCCL exchanges the tokens of the others"
    )
    drop_tokens: Flag = Field(
        False, description="whether every expert gets its equal share and no more, so that the host waits for no counts"
    )


class PipelineOptions(Spec):
    """Options of a pipeline: the pieces of the network, and the order of their passes."""

    schedule: Text = Field("1f1b", description="order of a pipeline's passes (`paleo list schedules`)")
    cut: Cut | None = Field(
        None,
        description="how a pipeline's pieces are made. uniform: iterations of the heaviest block divided evenly; "
        "time: the slowest piece is as light as it can be; numbers: layers of each piece; left out: as the software "
        "does it, uniform where that is possible",
    )


class KernelOptions(Spec):
    """Options of kernels and their number formats; the software decides what is not given."""

    cuda_graph: Literal["none", "full_iteration"] | None = Field(None, description="what of a step is one CUDA graph")
    cudnn: Annotated[float, Field(gt=0)] | None = Field(None, description="release of the library of convolutions")
    attention: Literal["fused", "unfused", "stepwise"] | None = Field(None, description="how attention is computed")
    scaling: Scaling | None = Field(None, description="how scales of formats below sixteen bits are found")
    cross_entropy: LossKernels | None = Field(None, description="kernels of the loss")
    main_gradients: Literal["narrow", "fp32"] | None = Field(
        None, description="format in which gradients are summed up beside fp32 masters"
    )


class ExchangeOptions(Spec):
    """Options of the gradient exchange, and of how workers wait for one another."""

    when: Exchange | None = Field(None, description="when and how gradients are exchanged")
    bucket: Bytes | None = Field(
        None, description="bytes of gradients that go out together; left out: as the software gathers them"
    )
    algorithm: Text | None = Field(None, description="the one collective algorithm (`paleo list collectives`)")
    compress: Text | None = Field(None, description="compression of gradients: `topk:0.001` (`paleo.compression`)")
    consistency: Text = Field("bsp", description="how workers wait for one another: `ssp:4` (`paleo.consistency`)")
    servers: PositiveCount | None = Field(None, description="parameter servers")

    @property
    def algorithm_or_server(self) -> str | None:
        """The forced all-reduce algorithm; a parameter-server exchange is one unless another is named."""
        return self.algorithm or ("parameter_server" if self.when == "parameter-server" else None)


class FabricOptions(Spec):
    """Options of the fabric: where the nodes of a run lie, and who else uses it."""

    nodes: Text = Field("packed", description="where nodes lie: packed, random or `spread:8` leaf switches")
    background: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the links above leaf switches that others use"
    )
    neighbour: Text | None = Field(
        None,
        description="a second job on the same leaf switches, `all_to_all:32:0.4`: traffic (ring or all_to_all), its "
        "nodes and the share of the time that it sends",
    )


class VariationOptions(Spec):
    """Options of variation: how much the work of ranks and steps differs."""

    jitter: Annotated[float, Field(ge=0, le=3)] = Field(
        0.0,
        description="noise of a rank's step from one step to the next, as a share of it; `0.02,0.01` states "
        "slow_ranks, too; traces: both as in traced jobs",
    )
    slow_ranks: Annotated[float, Field(ge=0, le=3)] = Field(
        0.0, description="spread of ranks that are always slower or faster, as a share of the step"
    )
    lengths: Annotated[float, Field(ge=0, le=3)] = Field(
        0.0, description="standard deviation of a sample's work over its mean, as of sequences of unequal lengths"
    )

    @model_validator(mode="before")
    @classmethod
    def _noise(cls, data: Any) -> Any:
        """``jitter`` is a share, two as in ``0.02,0.01`` (the second is ``slow_ranks``), or ``traces``."""
        text = data.get("jitter") if isinstance(data, Mapping) else None
        if not isinstance(text, str):
            return data
        try:
            shares = TRACED if text.strip() == "traces" else tuple(float(part) for part in text.split(","))
        except ValueError:
            shares = ()
        if len(shares) not in (1, 2):
            raise SpecError(f"jitter: {text[:80]!r}: expected a share such as 0.02, two as in 0.02,0.01, or traces")
        if len(shares) == 2 and "slow_ranks" in data:
            raise SpecError(f"slow_ranks: jitter {text[:80]!r} states it, too; use one of them")
        return {**data, **dict(zip(("jitter", "slow_ranks"), shares, strict=False))}


class OffloadOptions(Spec):
    """Options of offloading: the states and activations that live in host memory."""

    states: Text = Field("none", description="what lives in host memory: optimizer, gradients, parameters, activations")
    layers: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        None,
        description="activations of so many layers of the repeated blocks go to host memory, spread evenly over the "
        "network; the others stay (Megatron-Core's cpu_offloading_num_layers)",
    )


class FineTuningOptions(Spec):
    """Options of fine-tuning: the weights that are trained, where it is not all of them."""

    lora: Annotated[Text, BeforeValidator(_rank_as_text)] | None = Field(
        None,
        description="rank of low-rank adapters, while all other weights are frozen, and the products of the repeated "
        "blocks that have one: `16:attention` (Hu et al., ICLR 2022), `16:mlp`, `16:all` or a pattern of names",
    )
    qlora: Flag = Field(
        False, description="whether frozen products are stored in NF4 with double quantisation (Dettmers et al., 2023)"
    )
    freeze: Annotated[tuple[Text, ...], BeforeValidator(_listed)] = Field(
        (), description='layers that are not trained, by patterns: `[embed, "block.[0-9]"]`'
    )


#: The field of a group that a plain value states: ``recompute: full`` is ``recompute: {policy: full}``.
MAIN_FIELDS = {"recompute": "policy", "exchange": "when", "offload": "states"}

#: Options of the command line whose names stand for a field of a group, in files and as keywords too.
SHORT_NAMES = {
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

#: Groups whose fields are not all known, or that a word may replace.
_OPEN_GROUPS = ("model", "input")

#: Keys of earlier releases, and the fields that took their place. This release reads them, with a remark.
OLD_NAMES = {
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
    """One training run. Sizes that are not stated follow from the others; the prediction holds the resolved ones. What
    is left out of how the framework works is as the ``software`` profile does it.

    Fields of a group are stated as mappings (``recompute={"policy": "full", "layers": 4}``), by their path
    (``recompute.layers``), or by the name of the option of the command line (``recompute_layers=4``).
    """

    gpus: PositiveCount = Field(1, description="devices of the run")
    batch: PositiveCount | None = Field(None, description="samples of a data-parallel rank in a step")
    global_batch: PositiveCount | None = Field(None, description="samples of all ranks in a step")
    microbatch: PositiveCount | None = Field(None, description="samples of a rank in one pass")
    dtype: Text | None = Field(None, description="format of products; left out: what people train in on the device")
    optimizer: Text = Field("adamw", description="optimizer of the update")
    strategy: Text = Field("dp", description="a preset, or degrees: `tp=8,pp=4,zero=1,sp` (`paleo.parallel.placement`)")
    placement: dict[Text, dict[Text, Text | list[Text] | None]] = Field(
        default_factory=dict,
        description="splits of single layers over those of the strategy: `{block.*.mlp1: {ffn: tp}}`",
    )
    experts: ExpertOptions = Field(default_factory=ExpertOptions)
    pipeline: PipelineOptions = Field(default_factory=PipelineOptions)
    recompute: RecomputeOptions = Field(default_factory=RecomputeOptions)
    software: Text = Field("pytorch-eager", description="software profile, perhaps of a release: `megatron-core@0.9`")
    kernels: KernelOptions = Field(default_factory=KernelOptions)
    exchange: ExchangeOptions = Field(default_factory=ExchangeOptions)
    variation: VariationOptions = Field(default_factory=VariationOptions)
    fabric: FabricOptions = Field(default_factory=FabricOptions)
    calibration: Text = Field("auto", description="auto, ideal, `ppp=0.6`, or a calibration by name or path")
    offload: OffloadOptions = Field(default_factory=OffloadOptions)
    clip: Literal["none", "norm", "scaled"] | None = Field(
        None, description="what happens to gradients by their norm before the update"
    )
    input: InputOptions | Literal["none"] | None = Field(
        None,
        description="data loading; none: synthetic data, which cost nothing; left out: as the software loads images, "
        "where the system states its cores",
    )
    fine_tuning: FineTuningOptions = Field(default_factory=FineTuningOptions)
    forward_only: Flag = Field(False, description="whether the forward pass alone is predicted")
    model: dict[str, int | float | str] = Field(
        default_factory=dict, description="parameters of the model file to replace (seq, hidden, …)"
    )

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, data: Any) -> Any:
        return _grouped(by_path(data)) if isinstance(data, Mapping) else data

    def __hash__(self) -> int:
        """Return a hash of all fields, those of groups too, as many runs differ in one of them only."""
        return hash((super().__hash__(), *(value for value in self.__dict__.values() if isinstance(value, Spec))))

    @classmethod
    def other_keys(cls) -> tuple[str, ...]:
        """Return the keys that stand for fields of groups.

        Returns
        -------
        tuple of str
            Names of options and paths.
        """
        return (*SHORT_NAMES, *field_paths())

    @staticmethod
    def photographs(*, sample: float | None, decode: float, cores: float) -> InputOptions:
        """Return the default input pipeline of photographs.

        It is used by software that loads photographs when a run has no `input`.

        Parameters
        ----------
        sample : float, optional
            Bytes of a stored photograph.
        decode : float
            Seconds of one core to decode a photograph.
        cores : float
            CPU cores that decode.

        Returns
        -------
        InputOptions
            Options of the input pipeline.
        """
        return InputOptions().model_copy(update={"sample": sample, "decode": decode, "cores": cores})


@functools.cache
def field_paths() -> tuple[str, ...]:
    """List the fields of a run by their paths, such as ``gpus`` and ``recompute.layers``.

    Returns
    -------
    tuple of str
        Paths in the order of declaration.
    """
    groups = {name: _group(name) for name in Run.model_fields}
    return tuple(
        path
        for name, group in groups.items()
        for path in ([name] if group is None else [f"{name}.{field}" for field in group.model_fields])
    )


def path_of(name: str) -> str:
    """Return the path of a field.

    Parameters
    ----------
    name : str
        A path, the name of a group with a main field, or of an option of the command line.

    Returns
    -------
    str
        The path; a name that is none of these as it is. A key of an earlier release warns.

    Examples
    --------
    >>> path_of("recompute"), path_of("recompute_layers"), path_of("gpus")
    ('recompute.policy', 'recompute.layers', 'gpus')
    """
    if name in OLD_NAMES:
        warnings.warn(f"{name} is now {OLD_NAMES[name]}; the old key goes with the next release", FutureWarning, 2)
        return OLD_NAMES[name]
    return SHORT_NAMES.get(name) or (f"{name}.{MAIN_FIELDS[name]}" if name in MAIN_FIELDS else name)


def name_of(path: str) -> str:
    """Return the short name of a field.

    Parameters
    ----------
    path : str
        Path of the field.

    Returns
    -------
    str
        The name of its option or group where one stands for it; else the path.

    Examples
    --------
    >>> name_of("recompute.policy"), name_of("recompute.layers"), name_of("pipeline.cut")
    ('recompute', 'recompute_layers', 'pipeline.cut')
    """
    group, _, field = path.partition(".")
    if MAIN_FIELDS.get(group) == field:
        return group
    return next((name for name, long in SHORT_NAMES.items() if long == path and group != "model"), path)


def by_path(data: Mapping[str, Any]) -> dict[str, Any]:
    """Write a mapping of run fields with one entry for each path.

    Parameters
    ----------
    data : mapping of str to Any
        Fields, in any of the forms that `Run` takes.

    Returns
    -------
    dict of str to Any
        Value by path, not checked.

    Raises
    ------
    SpecError
        If two keys state one field.

    Examples
    --------
    >>> by_path({"gpus": 8, "recompute": "full", "recompute_layers": 4})
    {'gpus': 8, 'recompute.policy': 'full', 'recompute.layers': 4}
    """
    flat: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in data.items():
        for path, each in _paths_of_key(key, value).items():
            name = key if path_of(key) == path else path
            if path in flat:
                raise SpecError(f"{name}: stands beside {keys[path]}; keep one")
            flat[path], keys[path] = each, name
    return flat


def _paths_of_key(key: str, value: Any) -> dict[str, Any]:
    """Return the fields that one key of a run gives: a whole group or a single field."""
    if isinstance(value, Spec):
        value = {name: getattr(value, name) for name in value.model_fields_set}
    if isinstance(value, Mapping) and (key in _OPEN_GROUPS or _group(key) is not None):
        return {f"{key}.{name}": each for name, each in value.items()} or {key: {}}
    return {path_of(key): value}


def _grouped(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings of groups from values by path."""
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
    """The schema of a group of fields; None for a plain field."""
    field = Run.model_fields.get(name)
    annotation = None if field is None else field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Spec) else None


def explicit_fields(run: Run) -> dict[str, Any]:
    """Return the fields that a run was given.

    Parameters
    ----------
    run : Run
        The run.

    Returns
    -------
    dict of str to Any
        Value by path; `Run` takes it again.
    """
    return by_path({name: getattr(run, name) for name in run.model_fields_set})


def updated(run: Run, values: Mapping[str, Any]) -> Run:
    """Return a run with other values in some fields, which are not checked again.

    Parameters
    ----------
    run : Run
        The run.
    values : mapping of str to Any
        Values by path or by a name that stands for one (see `path_of`); entries of ``model`` join those of the run.

    Returns
    -------
    Run
        The changed run.

    Raises
    ------
    AttributeError
        If there is no such field.

    Examples
    --------
    >>> updated(Run(recompute="full"), {"gpus": 8, "recompute.layers": 4}).recompute.layers
    4
    """
    changed = _grouped({path_of(name): value for name, value in values.items()})
    for group, fields in changed.items():
        old = getattr(run, group)
        if group == "model":
            changed[group] = {**old, **fields}
        elif isinstance(fields, dict) and group != "placement":
            changed[group] = (old if isinstance(old, Spec) else InputOptions()).model_copy(update=fields)
    return run.model_copy(update=changed)


def load_run(path: str | Path) -> Run:
    """Load a run from its YAML file.

    Parameters
    ----------
    path : str | Path
        The file.

    Returns
    -------
    Run
        The run.

    Raises
    ------
    SpecError
        If the file is not valid.
    """
    return validate(Run, read_yaml(path), path)
