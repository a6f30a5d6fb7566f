"""Software profiles: how a framework drives the device, above all what each operation costs the host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paleo.specs.calibration import Residual
from paleo.specs.catalog import read_entry
from paleo.specs.loading import PositiveCount, Spec, Text, validate
from paleo.specs.references import FileCache
from paleo.units import MEBIBYTE, Bytes, Seconds

#: An empty PyTorch process as nvidia-smi shows it, kernels loaded lazily (CUDA 11.7 and later): about half a GiB.
CONTEXT = 512.0 * MEBIBYTE
#: NCCL's buffers of a ring, by its own sizes: 24 channels of 4 MiB (NCCL_BUFFSIZE, its documentation), 4.7 MiB for the
#: LL128 and 0.5 MiB for the LL protocol. Trees and more channels would add to that.
COMMUNICATOR = 221.0 * MEBIBYTE
#: Algorithms of convolution that a profile may name.
Algorithm = Literal["implicit", "explicit", "winograd", "nonfused", "fft", "direct"]


class SoftwareFit(Spec):
    """Where fitted numbers of a profile come from: measured steps, one sigma of each number's logarithm, and the errors
    on steps that were not fitted."""

    source: Text
    date: Text
    rows_fitted: PositiveCount
    rows_held_out: Annotated[int, Field(ge=0)]
    uncertainty: dict[str, Annotated[float, Field(ge=0)]]
    residual: Residual


class Software(Spec):
    """A framework's behaviour.

    ``host_forward`` and ``host_backward`` are the host's time for one operation (those of `assemble.paced`).
    ``attention_kernel`` names its fused kernel (None: the usual one of the architecture), ``attention_slowdown`` how
    much slower than the calibrated ones the framework's attention is (an older generation). ``gradient_accumulator`` is
    the bytes that it holds for each parameter beside the gradient; ``regather`` says that inputs gathered over tp are
    kept as shards and gathered again for backward. ``transposes`` names the dtypes in which tensors are turned to
    channels-last and back round each convolution on tensor cores. ``recompute``, ``zero`` and ``sequence_parallel`` are
    what its users do unless they say otherwise; ``recomputes_some`` says whether full recomputation may be limited to
    some layers of a stage, ``pipeline_gathers`` how often a stage of a pipeline gathers parameters that are sharded:
    for every ``pass``, or once a ``step`` while it sums gradients with the last microbatch alone, which is ZeRO-1.
    ``stops_early`` and ``selective`` say what recomputation runs again (those of `Checkpoints`).
    ``stages`` says how a pipeline is cut: ``even`` deals out blocks, ``work`` goes by the work of layers, the output
    layer too. ``overlap`` says whether gradients travel during backward, ``overlap_gather`` whether parameters updated
    in shards are gathered during the next forward pass, ``tensor_overlap`` whether gathers and scatters over tp are
    made piece by piece beside the products that feed them or wait for them (Wang et al., Overlap communication with
    dependent computation via decomposition, ASPLOS 2023). ``expert_dispatch`` says whether a token travels to ``each``
    of its experts, or ``once`` to each node (within one: to each device) that has some of them, as DeepEP does
    (DeepSeek-V3 technical report, 2024, section 3.2.2). ``contention`` is what computation loses for each second that a
    collective runs beside it: multiprocessors, bandwidth, copies into and out of flat buffers. ``context`` is what a
    process holds of a GPU before its first tensor, ``communicator`` what each group of ranks that it talks to adds.
    ``clip`` says whether the norm of all gradients is taken before the update, and whether they are then ``scaled`` in
    a pass of their own. ``fused`` says whether chains of element-wise passes are one kernel, ``norm_chains`` where a
    sum and a rectifier after a batch normalisation are part of its kernel: in inference; in training in sixteen bits,
    too, ``forward`` alone or ``both`` ways. ``softmax_multiple`` is by how many matrices of scores a rank's fused
    softmax works (1: any number).

    ``attention``, ``gelu``, ``loss`` and ``wide`` are those of `Choices`. ``mixed`` says how it trains in sixteen bits:
    fp32 ``masters`` beside narrow weights, or ``autocast`` of fp32 weights. ``gradient_accesses`` are reads and writes
    of each gradient after every backward pass. ``stepwise_updates`` names optimizers that it has no kernel for, so that
    each term is a pass. ``fit`` says where numbers come from that were fitted.

    Convolutions: ``cudnn`` is the library's version, which limits the algorithms there are; ``searches`` says that the
    framework times them all and keeps the fastest, where others ask the library's heuristics; ``workspace`` is what one
    call may use beside its tensors. A framework with kernels of its own names their algorithms in ``convolutions``
    (those of `paleo.pricing.convolution`); with ``image_by_image`` it calls them once for each image of the batch.
    """

    name: Text
    title: Text
    host_forward: Seconds
    host_backward: Seconds
    attention: Literal["fused", "unfused", "stepwise"] = "fused"
    attention_kernel: Text | None = None
    attention_slowdown: Annotated[float, Field(ge=1)] | dict[str, Annotated[float, Field(ge=1)]] = 1.0
    loss: Literal["fused", "recomputed", "upcast", "stepwise"] = "fused"
    gelu: Literal["fused", "tanh-stepwise", "stepwise"] = "fused"
    wide: tuple[Literal["embedding", "norm", "softmax", "gelu"], ...] = ()
    mixed: Literal["masters", "autocast"] = "masters"
    gradient_accesses: Annotated[float, Field(ge=0)] = 0.0
    stepwise_updates: tuple[Text, ...] = ()
    transposes: tuple[Literal["tf32", "fp16", "bf16"], ...] = ()
    gradient_accumulator: Annotated[float, Field(ge=0)] = 0.0
    regather: Annotated[bool, Field(strict=True)] = True
    recompute: Literal["none", "selective", "full"] = "none"
    recomputes_some: Annotated[bool, Field(strict=True)] = False
    pipeline_gathers: Literal["pass", "step"] = "pass"
    zero: Annotated[int, Field(strict=True, ge=0, le=3)] = 0
    sequence_parallel: Annotated[bool, Field(strict=True)] = False
    stops_early: Annotated[bool, Field(strict=True)] = False
    selective: Literal["attention", "products"] = "attention"
    stages: Literal["even", "work"] = "even"
    overlap: Annotated[bool, Field(strict=True)] = True
    overlap_gather: Annotated[bool, Field(strict=True)] = False
    tensor_overlap: Annotated[bool, Field(strict=True)] = False
    expert_dispatch: Literal["each", "once"] = "each"
    clip: Literal["none", "norm", "scaled"] = "none"
    contention: Annotated[float, Field(ge=0)] = 0.0
    context: Bytes = CONTEXT
    communicator: Bytes = COMMUNICATOR
    fused: Annotated[bool, Field(strict=True)] = False
    norm_chains: Literal["never", "inference", "forward", "both"] = "never"
    softmax_multiple: PositiveCount = 1
    cudnn: Annotated[float, Field(gt=0)] = 9.0
    searches: Annotated[bool, Field(strict=True)] = False
    workspace: Bytes | None = None
    convolutions: tuple[Algorithm, ...] | None = None
    image_by_image: Annotated[bool, Field(strict=True)] = False
    source: Text
    notes: str | None = None
    fit: SoftwareFit | None = None

    def slowdown_on(self, architecture: str) -> float:
        """How much slower than the calibrated kernel attention runs on an architecture; the mean of those known for
        others."""
        if isinstance(self.attention_slowdown, float):
            return self.attention_slowdown
        known = self.attention_slowdown
        return known.get(architecture, sum(known.values()) / len(known) if known else 1.0)


def load_software(name_or_path: str | Path) -> Software:
    """A software profile by catalog name or path."""
    return _profiles(name_or_path)


def _profile(name_or_path: str | Path) -> Software:
    path, data = read_entry("software", name_or_path)
    return validate(Software, {"name": path.stem, **data}, path)


_profiles = FileCache(_profile)
