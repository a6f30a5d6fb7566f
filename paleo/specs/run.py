"""What is run: batch, precision, optimizer, strategy and how communication is done. From options or a YAML file."""

from __future__ import annotations

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


#: A run may state the length of its sequences without ``model``.
SEQUENCE = "seq"


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


class Run(Spec):
    """One training run. Sizes that are not stated follow from the others; the prediction holds the resolved ones. What
    is left out of how the framework works is as the ``software`` profile does it.

    ``seq=512`` is short for ``model={"seq": 512}``.
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
    expert_imbalance: Annotated[float, Field(ge=1)] = Field(
        1.0, description="tokens of the busiest rank of experts over their mean"
    )
    expert_dispatch: Dispatch | None = Field(None, description="how tokens are dispatched to experts")
    expert_overlap: Flag | None = Field(
        None,
        description="whether tokens travel beside a pass of another microbatch; under a schedule that pairs passes, as "
        "dualpipe does, they do unless stated",
    )
    shared_expert_overlap: Flag | None = Field(
        None, description="whether experts that all tokens visit run while NCCL exchanges the tokens of the others"
    )
    drop_tokens: Flag = Field(
        False, description="whether every expert gets its equal share and no more, so that the host waits for no counts"
    )
    cuda_graph: Literal["none", "full_iteration"] | None = Field(None, description="what of a step is one CUDA graph")
    schedule: Text = Field("1f1b", description="order of a pipeline's passes (`paleo list schedules`)")
    cut: Cut | None = Field(
        None,
        description="how a pipeline's pieces are made. uniform: iterations of the heaviest block divided evenly; "
        "time: the slowest piece is as light as it can be; numbers: layers of each piece; left out: as the software "
        "does it, uniform where that is possible",
    )
    recompute: Recompute = Field("none", description="which activations are computed again before the backward pass")
    recompute_layers: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        None, description="full recomputation of so many first layers of each piece; the others keep all activations"
    )
    recompute_every: PositiveCount | None = Field(
        None, description="full recomputation keeps one input for so many layers, which are then brought back together"
    )
    recompute_modules: tuple[Text, ...] = Field(
        (),
        description="parts of a block that selective recomputation runs again, as Megatron-Core calls them: core_attn, "
        "layernorm, moe_act, mla_up_proj, mlp, moe, shared_experts",
    )
    recompute_by_layer: dict[Text, Recompute] = Field(
        default_factory=dict, description='layers that differ from `recompute`: `{"block.[0-3]": full}`'
    )
    software: Text = Field("pytorch-eager", description="software profile, perhaps of a release: `megatron-core@0.9`")
    cudnn: Annotated[float, Field(gt=0)] | None = Field(None, description="release of the library of convolutions")
    attention: Literal["fused", "unfused", "stepwise"] | None = Field(None, description="how attention is computed")
    scaling: Scaling | None = Field(None, description="how scales of formats below sixteen bits are found")
    cross_entropy: LossKernels | None = Field(None, description="kernels of the loss")
    main_gradients: Literal["narrow", "fp32"] | None = Field(
        None, description="format in which gradients are summed up beside fp32 masters"
    )
    exchange: Exchange | None = Field(None, description="when and how gradients are exchanged")
    bucket: Bytes | None = Field(
        None, description="bytes of gradients that go out together; left out: as the software gathers them"
    )
    algorithm: Text | None = Field(None, description="the one collective algorithm (`paleo list collectives`)")
    compress: Text | None = Field(None, description="compression of gradients: `topk:0.001` (`paleo.compression`)")
    consistency: Text = Field("bsp", description="how workers wait for one another: `ssp:4` (`paleo.consistency`)")
    servers: PositiveCount | None = Field(None, description="parameter servers")
    jitter: Annotated[float, Field(ge=0, le=3)] = Field(
        0.0,
        description="noise of a rank's step from one step to the next, as a share of it; `0.02,0.01` states "
        "slow_ranks, too; traces: both as in traced jobs",
    )
    nodes: Text = Field("packed", description="where nodes lie: packed, random or `spread:8` leaf switches")
    background: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the links above leaf switches that others use"
    )
    neighbour: Text | None = Field(
        None,
        description="a second job on the same leaf switches, `all_to_all:32:0.4`: traffic (ring or all_to_all), its "
        "nodes and the share of the time that it sends",
    )
    slow_ranks: Annotated[float, Field(ge=0, le=3)] = Field(
        0.0, description="spread of ranks that are always slower or faster, as a share of the step"
    )
    length_variation: Annotated[float, Field(ge=0, le=3)] = Field(
        0.0, description="standard deviation of a sample's work over its mean, as of sequences of unequal lengths"
    )
    calibration: Text = Field("auto", description="auto, ideal, `ppp=0.6`, or a calibration by name or path")
    offload: Text = Field(
        "none", description="what lives in host memory: optimizer, gradients, parameters, activations"
    )
    offload_layers: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        None,
        description="activations of so many layers of the repeated blocks go to host memory, spread evenly over the "
        "network; the others stay (Megatron-Core's cpu_offloading_num_layers)",
    )
    clip: Literal["none", "norm", "scaled"] | None = Field(
        None, description="what happens to gradients by their norm before the update"
    )
    input: InputOptions | Literal["none"] | None = Field(
        None,
        description="data loading; none: synthetic data, which cost nothing; left out: as the software loads images, "
        "where the system states its cores",
    )
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
    forward_only: Flag = Field(False, description="whether the forward pass alone is predicted")
    model: dict[str, int | float | str] = Field(
        default_factory=dict, description="parameters of the model file to replace (seq, hidden, …)"
    )

    @model_validator(mode="before")
    @classmethod
    def _sequence_length(cls, data: Any) -> Any:
        """``seq`` is a parameter of the model; it may stand among the fields of the run."""
        if not isinstance(data, Mapping) or SEQUENCE not in data:
            return data
        other_fields = {key: value for key, value in data.items() if key != SEQUENCE}
        sizes = other_fields.get("model") or {}
        if SEQUENCE in sizes:
            raise SpecError("seq: stands beside model.seq; keep one")
        return {**other_fields, "model": {**sizes, SEQUENCE: data[SEQUENCE]}}

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

    @model_validator(mode="after")
    def _modules_are_of_selective_recomputation(self) -> Run:
        if self.recompute_modules and self.recompute != "selective":
            raise ValueError(
                f"recompute_modules: say what selective recomputation runs again, but recompute is {self.recompute!r}; "
                "use selective"
            )
        return self

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

    @property
    def algorithm_or_server(self) -> str | None:
        """The forced all-reduce algorithm; a parameter-server exchange is one unless another is named."""
        return self.algorithm or ("parameter_server" if self.exchange == "parameter-server" else None)


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
