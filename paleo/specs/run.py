"""What is run: batch, precision, optimizer, strategy and how communication is done. From options or a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from paleo.errors import SpecError
from paleo.operations.tensor import LossKernels, Scaling
from paleo.specs.loading import PositiveCount, Spec, Text, read_yaml, validate
from paleo.specs.software import Dispatch, Recompute
from paleo.units import MEBIBYTE, Bytes, BytesPerSecond, Seconds

#: When gradients are exchanged: in buckets while backward still runs, all after it, or through parameter servers.
Exchange = Literal["overlapped", "after", "parameter-server"]


#: What is computed again before the backward pass: nothing, the core of attention, or each layer from its input.


#: How a pipeline's pieces are made; numbers are the layers of each piece, in the order of the network.
Cut = Literal["uniform", "time"] | tuple[Annotated[int, Field(strict=True, ge=0)], ...]


#: A run may state the length of its sequences without ``model``.
SEQUENCE = "seq"


def _rank_as_text(value: object) -> object:
    """``lora: 16`` is ``lora: "16"``."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _listed(value: object) -> object:
    """``embed,block.0`` is a list of two."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


class InputOptions(Spec):
    """How samples reach the devices. A cost that is not stated is zero, or that of the system's host.

    ``sample``: stored bytes of one, read at ``storage`` (of a node); ``decode``: seconds of one core for each of them,
    on ``cores`` for each GPU; ``copied``: bytes of one that go to the device [those of the network's inputs].
    """

    sample: Bytes | None = None
    storage: BytesPerSecond | None = None
    decode: Seconds = 0.0
    cores: Annotated[float, Field(gt=0)] | None = None
    copied: Bytes | None = None


class Run(Spec):
    """One training run. Sizes that are not stated follow from the others; the prediction holds the resolved ones.
    ``seq=512`` is short for ``model={"seq": 512}``.

    ``batch`` is per data-parallel rank, ``global_batch`` over all of them. ``algorithm`` forces one collective
    algorithm. ``compress`` names a compression of the gradients, ``topk:0.001`` (`paleo.compression`).
    ``consistency`` is how workers wait for one another, ``ssp:4`` (`paleo.consistency`), with ``servers`` where there
    are parameter servers; ``jitter`` is the noise of a rank's step from one step to the next, as a share of it, and
    ``slow_ranks`` that of ranks that are always slower or faster; ``length_variation`` is the standard deviation of a
    sample's work over its mean, as of sequences of unequal lengths.
    ``nodes`` says where nodes lie: packed, random or ``spread:8`` leaf switches; ``background`` is the share of the
    links above those that others use, and ``neighbour`` a second job on the same leaf switches, ``all_to_all:32:0.4``:
    its traffic (ring or all_to_all), its nodes and the share of the time that it sends.
    ``cudnn``, ``attention``, ``cross_entropy``, ``scaling``, ``main_gradients``, ``expert_dispatch``,
    ``expert_overlap``, ``cuda_graph`` and ``exchange`` are what the ``software`` profile does unless they are given
    (under a ``schedule`` that pairs passes, as dualpipe does, tokens travel beside a pass unless it says not).
    ``bucket`` is how many bytes of gradients go out together (25 MiB in PyTorch's DDP). ``offload`` names what lives in
    host memory: optimizer, gradients, parameters, activations. ``input`` is data loading; left out it is how the
    software loads photographs where the system states its cores; ``none`` is synthetic data, which cost nothing.
    ``clip`` is what the software does with the norm of the gradients, unless it is given. ``cut`` is how
    a pipeline's pieces are made: ``uniform`` divides the iterations of the heaviest block evenly, ``time`` makes the
    slowest piece as light as it can be, numbers state the layers of each piece; left out it is as the software does it,
    uniform where that is possible. ``placement`` lays splits of single layers over those of the strategy:
    ``{block.*.mlp1: {ffn: tp}}``, see `paleo.parallel.placement`. ``recompute_layers`` limits full recomputation to so
    many first layers of each piece of the pipeline, the others keep all activations; ``recompute_every`` keeps one
    input for so many layers, which are then brought back together; ``recompute_modules`` says which parts of a block
    selective recomputation runs again instead of what the software does (core_attn, layernorm, moe_act, mla_up_proj,
    mlp, moe, shared_experts, as Megatron-Core calls them); ``recompute_by_layer`` names layers that differ from
    ``recompute``: ``{"block.[0-3]": full}``. ``expert_imbalance`` is how many tokens the busiest rank of experts has
    over their mean; with ``drop_tokens`` every expert gets its equal share and no more, so that the host waits for no
    counts. ``lora`` is the rank of low-rank adapters that are trained while all other weights are frozen, and
    which products of the repeated blocks have one, ``16:attention`` (as in the paper, Hu et al., ICLR 2022),
    ``16:mlp``, ``16:all`` or a pattern of names; ``qlora`` stores the frozen products in NF4 with double quantisation
    (Dettmers et al., NeurIPS 2023). ``freeze`` names layers that are not trained, by patterns: ``[embed,
    "block.[0-9]"]``."""

    gpus: PositiveCount = 1
    batch: PositiveCount | None = None
    global_batch: PositiveCount | None = None
    microbatch: PositiveCount | None = None
    dtype: Text | None = None
    optimizer: Text = "adamw"
    strategy: Text = "dp"
    placement: dict[Text, dict[Text, Text | list[Text] | None]] = Field(default_factory=dict)
    expert_imbalance: Annotated[float, Field(ge=1)] = 1.0
    expert_dispatch: Dispatch | None = None
    expert_overlap: Annotated[bool, Field(strict=True)] | None = None
    drop_tokens: Annotated[bool, Field(strict=True)] = False
    cuda_graph: Literal["none", "full_iteration"] | None = None
    schedule: Text = "1f1b"
    cut: Cut | None = None
    recompute: Recompute = "none"
    recompute_layers: Annotated[int, Field(strict=True, ge=0)] | None = None
    recompute_every: PositiveCount | None = None
    recompute_modules: tuple[Text, ...] = ()
    recompute_by_layer: dict[Text, Recompute] = Field(default_factory=dict)
    software: Text = "pytorch-eager"
    cudnn: Annotated[float, Field(gt=0)] | None = None
    attention: Literal["fused", "unfused", "stepwise"] | None = None
    scaling: Scaling | None = None
    cross_entropy: LossKernels | None = None
    main_gradients: Literal["narrow", "fp32"] | None = None
    exchange: Exchange | None = None
    bucket: Bytes = 25 * MEBIBYTE
    algorithm: Text | None = None
    compress: Text | None = None
    consistency: Text = "bsp"
    servers: PositiveCount | None = None
    jitter: Annotated[float, Field(ge=0, le=3)] = 0.0
    nodes: Text = "packed"
    background: Annotated[float, Field(ge=0, lt=1)] = 0.0
    neighbour: Text | None = None
    slow_ranks: Annotated[float, Field(ge=0, le=3)] = 0.0
    length_variation: Annotated[float, Field(ge=0, le=3)] = 0.0
    calibration: Text = "auto"
    offload: Text = "none"
    clip: Literal["none", "norm", "scaled"] | None = None
    input: InputOptions | Literal["none"] | None = None
    lora: Annotated[Text, BeforeValidator(_rank_as_text)] | None = None
    qlora: Annotated[bool, Field(strict=True)] = False
    freeze: Annotated[tuple[Text, ...], BeforeValidator(_listed)] = ()
    forward_only: Annotated[bool, Field(strict=True)] = False
    #: parameters of the model file to replace (seq, hidden, …)
    model: dict[str, int | float | str] = Field(default_factory=dict)

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
        """The default input of photographs, for software that loads them, if a run does not state `input`."""
        return InputOptions().model_copy(update={"sample": sample, "decode": decode, "cores": cores})

    @property
    def algorithm_or_server(self) -> str | None:
        """The forced all-reduce algorithm; a parameter-server exchange is one unless another is named."""
        return self.algorithm or ("parameter_server" if self.exchange == "parameter-server" else None)


def load_run(path: str | Path) -> Run:
    """A run from its YAML file."""
    return validate(Run, read_yaml(path), path)
