"""Software profiles: how a framework drives the device, in groups of fields.

Every field says what it means where it is declared; `paleo show software NAME` and the docs print those sentences.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from paleo.errors import SpecError, near
from paleo.operations.tensor import LossKernels, Rotation, Scaling
from paleo.specs.calibration import Residual
from paleo.specs.catalog import is_path, names, read_entry
from paleo.specs.loading import FileCache, Flag, PositiveCount, Spec, Text, validate
from paleo.units import MEBIBYTE, Bytes, BytesPerSecond, Seconds

#: An empty PyTorch process as nvidia-smi shows it, kernels loaded lazily (CUDA 11.7 and later): about half a GiB.
CONTEXT = 512.0 * MEBIBYTE
#: NCCL's buffers of a ring, by its own sizes: 24 channels of 4 MiB (NCCL_BUFFSIZE, its documentation), 4.7 MiB for the
#: LL128 and 0.5 MiB for the LL protocol. Trees and more channels would add to that.
COMMUNICATOR = 221.0 * MEBIBYTE
#: What PyTorch's caching allocator reserves beside what it hands out, as a share of that: 5.8 % on average, one sigma
#: 2.2 %, between 2.8 and 7.9 %, in six layouts of Megatron-Core on B200 whose peaks SimuMax's table prints both ways.
FRAGMENTATION = 0.058
#: Seconds of a parameter server for each tensor that is pushed and pulled: TensorFlow's, fitted to four saturated rates
#: of P100 workers (Li, Walls, Guo, CM-DARE, ICDCS 2020); 6.5 % on 93 rates that were not.
SERVER_CALL = 0.102e-3
#: The profile of programs that are compiled for TPUs.
TPU_PROFILE = "xla-tpu"
#: Algorithms of convolution that a profile may name.
Algorithm = Literal["implicit", "explicit", "winograd", "nonfused", "fft", "direct"]
#: A day, month or year.
Date = Annotated[str, BeforeValidator(str), Field(pattern=r"^[0-9]{4}(-[0-9]{2}){0,2}$")]
Recompute = Literal["none", "selective", "full"]
#: How tokens are dispatched to experts.
Dispatch = Literal["nccl", "deepep", "hybridep"]
#: A release's number or name, as its framework prints it.
Release = Annotated[str, BeforeValidator(str), Field(pattern=r"^[0-9A-Za-z._-]{1,40}$")]
Factor = Annotated[float, Field(ge=0)]
Slowdown = Annotated[float, Field(ge=1)]
#: Operations that a host issues, forward and backward.
Operations = tuple[Factor, Factor]


class SoftwareFit(Spec):
    """Where fitted numbers of a profile come from: measured steps, one sigma of each number's logarithm, and the errors
    on steps that were not fitted; ``architectures`` are those of the devices that ran them."""

    source: Text
    date: Text
    architectures: tuple[Text, ...] = ()
    rows_fitted: PositiveCount
    rows_held_out: Annotated[int, Field(ge=0)]
    uncertainty: dict[str, Annotated[float, Field(ge=0)]]
    residual: Residual


class HostTime(Spec):
    """The host's time for one operation (used by `paleo.step.memory`)."""

    forward: Seconds = Field(description="the host's time to issue one operation of the forward pass")
    backward: Seconds = Field(description="the same for the backward pass of one operation")
    routing: Seconds = Field(
        0.0,
        description="what tokens on their way to experts, or back, cost the host beside that: indices, permutations, "
        "and the counts of tokens that it waits for",
    )
    expert: Seconds = Field(
        0.0, description="what each expert on the device adds to a grouped product: a call, casts, splits"
    )
    handshake: Seconds = Field(
        0.0,
        description="what an exchange between nodes by deepep or hybridep takes beside its bytes: layout, counts that "
        "are sent ahead, and the wait for them",
    )
    libfabric: tuple[Seconds, Seconds] = Field(
        (0.0, 0.0),
        description="what an exchange over EFA takes beside that: by NCCL, and by libraries that send each token once, "
        "whose messages a thread of the host posts through libfabric",
    )
    waiting_power: Annotated[float, Field(ge=1)] = Field(
        4.0,
        description="how strongly the longer of device and host prevails in sections in which the host waits for "
        "counts of tokens (their sum to this power: 1 if they took turns, 4 where the host runs ahead freely)",
    )
    latent_rotation: Operations = Field(
        (2.0, 2.0), description="operations that rotate query and key of latent attention, forward and backward"
    )
    grouped_router: Operations = Field(
        (0.0, 0.0), description="those that groups of experts add to a router, forward and backward"
    )
    sigmoid_router: Operations = Field(
        (0.0, 0.0), description="those that sigmoids with a balancing bias, in place of a softmax, add to a router"
    )
    selection: Seconds = Field(
        0.0,
        description="what a choice of proposals by their values, and of their targets, costs the host in each pass, "
        "while the device waits for it",
    )
    piece: Seconds = Field(
        0.0,
        description="what each piece of a tensor that one rank updated costs the host when ZeRO-1 and 2 gather it: "
        "views and a copy (0: flat buffers, gathered whole)",
    )
    feeds: BytesPerSecond | None = Field(
        None,
        description="at what rate a core copies states that one step hands to the next, out of the framework and into "
        "it again, while the device waits; left out: they stay on the device",
    )
    whole_iteration: Flag = Field(
        False, description="whether an iteration is one CUDA graph, so that its operations cost the host nothing"
    )
    fitted_on: tuple[Text, ...] = Field(
        (),
        description="architectures of devices on whose steps the times of operations were fitted, in this profile or "
        "in that from which they are taken; on others they are assumed",
    )
    blocking: Flag = Field(
        False, description="whether it waits for each kernel before it issues the next (CUDA_LAUNCH_BLOCKING=1)"
    )
    jitter: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="standard deviation of a rank's step from one step to the next, as a share of it"
    )


class AttentionSoftware(Spec):
    """How attention is computed."""

    implementation: Literal["fused", "unfused", "stepwise"] = Field(
        "fused",
        description="fused: one kernel; unfused: scores are kept, one kernel for scale, mask and softmax; stepwise: a "
        "pass for each of those, and heads are copied next to each other",
    )
    kernel: Text | None = Field(None, description="the fused kernel; left out: the usual one of the architecture")
    relative: Literal["heads first", "heads last"] = Field(
        "heads first",
        description="how relative attention keeps scores. heads first: as batched products make them; heads last: "
        "samples and heads are the last dims, so that products and softmax turn scores round",
    )
    slowdown: Slowdown | dict[str, Slowdown] = Field(
        1.0, description="how much slower than the calibrated kernel it runs, for all architectures or by architecture"
    )


class Fusion(Spec):
    """Operations that the software runs as one kernel."""

    passes: Flag = Field(False, description="whether chains of element-wise passes are one kernel")
    convolutions: Flag = Field(
        False,
        description="with passes: whether those that only convolutions read are part of these, made again for the "
        "backward pass, and sums of gradients part of the kernel that makes one of them",
    )
    norms: Literal["never", "inference", "forward", "both"] = Field(
        "never",
        description="where a sum and a rectifier after a batch normalisation are part of its kernel: in inference; in "
        "training in sixteen bits, too, in forward passes alone or both ways",
    )
    statistics: Literal["normalisation", "convolution"] = Field(
        "normalisation",
        description="who sums up the statistics of a batch normalisation in sixteen bits: its own first sweep, or the "
        "convolution before it in its last step, so that its input is read once",
    )
    gelu: Literal["fused", "tanh-stepwise", "stepwise"] = Field(
        "fused", description="tanh-stepwise: a pass for each term of gelu_tanh and quick_gelu; stepwise: every gelu so"
    )
    experts: Literal["fused", "stepwise"] = Field(
        "fused",
        description="biases and clamped gates of experts. stepwise: a pass for each term, and a piece for each expert, "
        "cut out by counts on the host, so that a graph of a whole iteration has them fused",
    )
    loss: LossKernels = Field(
        "fused",
        description="cross-entropy. fused: reads logits, writes log-probabilities; recomputed: keeps the logits and a "
        "number a row (Apex, FlashAttention); tiled: with the head, a tile of tokens at a time, so "
        "that logits are never whole (Liger's fused linear cross-entropy); upcast: logits are first written in fp32 "
        "(autocast); stepwise: a pass for each step of the vocabulary-parallel loss (Megatron-LM)",
    )
    metrics: Annotated[int, Field(strict=True, ge=0)] = Field(
        0,
        description="how often the loss is computed again from the logits, in fp32 and without a kernel of its "
        "own, for metrics of training after each microbatch",
    )
    recurrence: Literal["layer", "looped"] = Field(
        "layer",
        description="recurrent layers. layer: kernels of a library for all steps; looped: a loop of the framework, the "
        "operations of each step by themselves, the gradient of the weights added up step by step",
    )
    rotation: Rotation = Field(
        "fused",
        description="how query and key are rotated. fused: in a pass over each; stepwise: those of latent attention in "
        "one for each step of plain code; complex, halves: all of them so, as complex products in fp32 (torchtitan) or "
        "by halves of heads (transformers)",
    )
    rms_norm: Literal["fused", "upcast", "stepwise"] = Field(
        "fused",
        description="root-mean-square norms. fused: one kernel; upcast: one over inputs cast to fp32; stepwise: a pass "
        "for each step of plain code in fp32",
    )
    softmax_multiple: PositiveCount = Field(
        1, description="by how many matrices of scores a rank's unfused softmax kernel works; 1: any number"
    )


class NumberFormats(Spec):
    """How the framework trains in sixteen bits."""

    mixed: Literal["masters", "autocast"] = Field(
        "masters",
        description="masters: fp32 copies beside narrow weights; autocast: fp32 weights, narrowed for products",
    )
    main_gradients: Literal["narrow", "fp32"] = Field(
        "narrow",
        description="the format in which gradients are summed up, kept and exchanged beside fp32 masters: that of the "
        "weights, or fp32 in place of it (Megatron-LM's --accumulate-allreduce-grads-in-fp32, its default in bf16: 18 "
        "bytes a parameter, 6 + 12/dp with a distributed optimizer)",
    )
    scaling: Scaling = Field(
        "delayed",
        description="how scales of formats below sixteen bits are found. delayed: from the largest values of passes "
        "before; current: from that of the tensor itself, in a pass before unless passes are fused; mxfp8: a byte for "
        "each 32 numbers; nvfp4 (fp4, unless said otherwise): a byte for each 16, and one of the tensor, in a pass",
    )
    wide: tuple[Literal["embedding", "norm", "softmax", "gelu"], ...] = Field(
        (), description="what autocast computes and hands on in fp32"
    )
    transposes: tuple[Literal["tf32", "fp16", "bf16"], ...] = Field(
        (), description="dtypes in which tensors go to channels-last and back round each convolution on tensor cores"
    )
    norms: Literal["as stored", "channels-first"] = Field(
        "as stored",
        description="channels-first: batch normalisation in training turns what is channels-last for tensor cores to "
        "channels-first and its results back, each way",
    )


class Gradients(Spec):
    """What happens to gradients between the backward pass and the update."""

    accesses: Factor = Field(0.0, description="reads and writes of each gradient after every backward pass")
    flat: Flag = Field(
        False, description="whether those accesses are passes over a flat buffer of each block, not over each tensor"
    )
    accumulated: Flag = Field(
        False,
        description="whether the product that makes a weight's gradient adds it to the sum in its last step, which it "
        "reads and writes with every microbatch (Megatron's gradient_accumulation_fusion)",
    )
    added: Flag = Field(
        False,
        description="whether each gradient is added to the sum of the microbatches before in a pass of two reads and a "
        "write, as part of autograd's work (AccumulateGrad, without a call of the framework)",
    )
    accumulator: Factor = Field(
        0.0,
        description="bytes for each parameter beside a gradient in sixteen bits, to which a pass of its own adds it "
        "after every backward pass, and which is what is exchanged",
    )
    accumulator_cast: Flag = Field(
        False, description="whether that pass reads a copy of the gradient in its own format, which another pass makes"
    )
    tied: Literal["sum", "slices"] = Field(
        "sum",
        description="a table that is both looked up and multiplied by. sum: its gradients are added as they are; "
        "slices: as rows with indices, which are joined and then added up (Cavdar et al., ISC 2019)",
    )
    clip: Literal["none", "norm", "scaled"] = Field(
        "none",
        description="norm: the norm of all gradients is taken before the update; scaled: they are then scaled in a "
        "pass of their own",
    )
    bucket: Bytes = Field(
        25 * MEBIBYTE, description="bytes of gradients that go out together (bucket_cap_mb of PyTorch's DDP)"
    )
    bucket_elements: Factor = Field(
        0.0, description="elements of gradients that go out together, whatever their format; 0: counted in bytes"
    )
    bucket_per_rank: Factor = Field(
        0.0,
        description="elements for each rank that shares out states, where that is more (Megatron-Core: max(40e6, 1e6 x "
        "dp x cp), so that each rank's part of a bucket stays large)",
    )
    bucket_buffers: Factor = Field(
        2.0,
        description="buckets that take memory beside the gradients; 0: they are parts of one buffer of all gradients",
    )
    unreduced: Literal["narrow", "fp32"] = Field(
        "narrow",
        description="the format in which a rank keeps whole gradients where ZeRO-3 sums them up over ranks once a step "
        "(FSDP2 keeps them in that of the reduction)",
    )
    flat_copies: tuple[Factor, Factor] = Field(
        (0.0, 0.0),
        description="bytes for each parameter of flat copies that are made of the gradients once the last backward "
        "pass is over: of all that a rank has, and of those whose states it owns",
    )
    whole_sums: Flag = Field(
        False,
        description="whether ZeRO-1 and 2 sum whole buckets on every rank in place of scattering the sums (DeepSpeed)",
    )
    stepwise_updates: tuple[Text, ...] = Field(
        (), description="optimizers without a kernel of their own: each term of the formula is a pass"
    )
    listwise_updates: tuple[Text, ...] = Field(
        (),
        description="optimizers that compute each term of the formula of all tensors at once (PyTorch's foreach), so "
        "that the roots of second moments are in memory, too, during the update",
    )
    compression_call: Seconds = Field(
        0.0, description="time of the framework for each tensor that is compressed by itself, beside its kernels"
    )
    server_call: Seconds = Field(
        SERVER_CALL,
        description="time of a parameter server for each tensor that is pushed and pulled (TensorFlow: Li et al., "
        "CM-DARE, ICDCS 2020)",
    )


class Overlap(Spec):
    """Communication that the software runs beside computation."""

    gradients: Flag = Field(True, description="whether gradients travel during the backward pass")
    gather: Flag = Field(
        False, description="whether parameters updated in shards are gathered during the next forward pass"
    )
    tensor: Flag = Field(
        False,
        description="whether gathers and scatters over tp are made piece by piece beside the products that feed them "
        "or wait for them (Wang et al., ASPLOS 2023)",
    )
    tensor_with_latents: Flag = Field(True, description="whether that holds for networks with latent attention, too")
    experts: Flag | None = Field(
        None,
        description="whether tokens travel to experts and back while the device computes on another microbatch "
        "(Megatron-Core's combined forward and backward passes); left out: under pipeline schedules that pair passes, "
        "as dualpipe does, alone",
    )
    shared_experts: Flag = Field(
        False,
        description="whether experts that all tokens visit run while NCCL exchanges the tokens of the others "
        "(Megatron-Core's moe_shared_expert_overlap)",
    )
    sharded: Flag = Field(
        True,
        description="whether parameters are gathered, and gradients scattered, for ZeRO-3 while the device computes; "
        "else it waits for them",
    )
    contention: Factor = Field(
        0.0,
        description="seconds that computation loses for each second that a collective runs beside it: "
        "multiprocessors, bandwidth, copies into and out of flat buffers",
    )


class Recomputation(Spec):
    """Operations that the software computes again before the backward pass."""

    policy: Recompute = Field("none", description="what its users recompute unless they say otherwise")
    some_layers: Flag = Field(False, description="whether full recomputation may be limited to some layers of a stage")
    stops_early: Flag = Field(
        False, description="whether a block stops once its backward pass has all that it needs, or runs to its end"
    )
    selective: Literal["attention", "products"] = Field(
        "attention",
        description="what selective recomputation runs again: the core of attention, or all but it and every second "
        "product",
    )


class Parallelism(Spec):
    """How work and states are divided."""

    zero: Annotated[int, Field(strict=True, ge=0, le=3)] = Field(
        0, description="the ZeRO stage of its users unless they say otherwise"
    )
    zero_stages: tuple[Annotated[int, Field(strict=True, ge=0, le=3)], ...] | None = Field(
        None, description="the ZeRO stages that it has; left out: not known, so that a search tries all"
    )
    sequence_parallel: Flag = Field(
        False, description="whether its users split sequences where they split tensors, unless they say otherwise"
    )
    interleaves: Flag = Field(
        False,
        description="whether its users interleave pipelines, as finely as layers divide, unless they say otherwise",
    )
    schedules: tuple[Text, ...] | None = Field(
        None,
        description="pipeline schedules that its releases run, none of them where it has no pipelines; left out: not "
        "known, so that a search tries all",
    )
    stages: Literal["even", "work"] = Field(
        "even",
        description="how a pipeline is cut: even divides the blocks, work goes by the work of layers, the output layer "
        "too",
    )
    microbatches: Literal["samples", "stages"] = Field(
        "samples",
        description="into how many microbatches a pipeline cuts a rank's batch where none are asked for: one for each "
        "sample, or as many as there are stages",
    )
    blocking_sends: Flag = Field(
        False, description="whether both ends of a send between pipeline stages wait for it, one at a time (DeepSpeed)"
    )
    pipeline_gathers: Literal["pass", "step"] = Field(
        "pass",
        description="how often a stage gathers sharded parameters: for every pass, or once a step while it sums "
        "gradients with the last microbatch alone, which is ZeRO-1",
    )
    pipeline_outputs: Literal["kept", "freed"] = Field(
        "kept",
        description="what a stage does with an output that it has sent, at which autograd begins its backward pass: "
        "keeps it until then, or frees its numbers (Megatron-Core's deallocate_pipeline_outputs)",
    )
    gather_buffers: Literal["sections", "root"] = Field(
        "sections",
        description="what ZeRO-3 has gathered at a time. sections: two of the largest; root: all that is outside "
        "repeated blocks, and two blocks, and beside them the flat buffers that they were copied out of (FSDP2)",
    )
    gradient_scatters: Literal["pass", "step"] = Field(
        "pass",
        description="how often ZeRO-2 sums and scatters gradients: after every backward pass (DeepSpeed; FSDP's "
        "SHARD_GRAD_OP), or once a step, until when each rank keeps them whole, as in ZeRO-1",
    )
    latents: Literal["own", "all"] = Field(
        "all",
        description="of which tokens each rank projects the latent vectors of latent attention where sequences are "
        "split over tp: its own, so that latents are gathered for the heads, or all, so that their inputs are",
    )
    whole_tensors: Flag = Field(
        False,
        description="whether ZeRO-1 shares out whole tensors, each summed at its owner and broadcast from there, and "
        "not equal shards of flat buffers",
    )
    regather: Flag = Field(
        True, description="whether inputs gathered over tp are kept as shards and gathered again for backward"
    )
    expert_dispatch: Dispatch = Field(
        "nccl",
        description="how tokens are dispatched. nccl: an all-to-all in which a token travels to each of its experts; "
        "deepep and hybridep: it travels once to each node (within one: to each device) that has some of them "
        "(DeepSeek-V3 technical report, 2024, section 3.2.2)",
    )
    expert_tensor: Literal["tp", "none"] = Field(
        "tp",
        description="over how many ranks its users split the tensors of each expert, unless they say otherwise: those "
        "of tp, or none, so that experts are folded over tp, too",
    )
    expert_tokens: Literal["own", "all"] = Field(
        "all",
        description="which tokens a rank sends to experts whose tensors are split over tp, where sequences are, too: "
        "its own, so that what arrives is gathered over tp beside the experts and their sums scattered, or all that "
        "its group of tp has, so that inputs of the layer are gathered",
    )


class ProcessMemory(Spec):
    """Memory that a process holds beside its tensors."""

    context: Bytes = Field(CONTEXT, description="what a process holds of a GPU before its first tensor")
    communicator: Bytes = Field(COMMUNICATOR, description="what each group of ranks that it talks to adds")
    fragmentation: Factor = Field(
        FRAGMENTATION,
        description="what the framework's allocator reserves beside what it hands out, as a share of that "
        "(torch.cuda.max_memory_reserved over max_memory_allocated, less 1)",
    )


class Loader(Spec):
    """How samples are made ready."""

    image: Seconds = Field(
        0.0,
        description="what a core of the host takes to decode, crop and scale a photograph of 110 kB (ImageNet); 0: "
        "that is done on the device, or not known",
    )


class Convolutions(Spec):
    """Kernels of convolutions, and how they are chosen."""

    cudnn: Annotated[float, Field(gt=0)] = Field(
        9.0, description="the library's version, which limits the algorithms there are"
    )
    searches: Flag = Field(
        False, description="whether it times all algorithms and keeps the fastest; else the library's heuristics choose"
    )
    workspace: Bytes | None = Field(None, description="what one call may use beside its tensors; left out: no limit")
    algorithms: tuple[Algorithm, ...] | None = Field(
        None, description="the algorithms of a framework with kernels of its own (those of `paleo.pricing.convolution`)"
    )
    image_by_image: Flag = Field(False, description="whether they are called once for each image of the batch")


class EarlierReleases(Spec):
    """What was otherwise in releases before a day, month or year: fields as in ``parallelism.expert_tensor``."""

    until: Date
    changes: dict[str, Any]
    source: Text


class Software(Spec):
    """The behaviour of a framework, in groups of fields; the meaning of each field is stated with the field.

    ``from`` and ``until`` are the first and last day, month or year of the releases that it describes; ``releases``
    says when some came out, and ``earlier``, the newest first, in what those before a date differ (`load_software`).
    """

    model_config = ConfigDict(populate_by_name=True)

    name: Text
    title: Text
    since: Date | None = Field(None, alias="from", description="when the first release that it describes came out")
    until: Date | None = Field(None, description="when releases that it describes were superseded; left out: not yet")
    releases: dict[Release, Date] = Field(default_factory=dict)
    earlier: tuple[EarlierReleases, ...] = ()
    framework: Text | None = Field(
        None, description="what its framework can run, an entry of `hardware_specs/frameworks`; left out: not known"
    )
    host: HostTime
    attention: AttentionSoftware = AttentionSoftware()
    fusion: Fusion = Fusion()
    formats: NumberFormats = NumberFormats()
    gradients: Gradients = Gradients()
    overlap: Overlap = Overlap()
    recomputation: Recomputation = Recomputation()
    parallelism: Parallelism = Parallelism()
    memory: ProcessMemory = ProcessMemory()
    convolutions: Convolutions = Convolutions()
    loader: Loader = Loader()
    source: Text
    notes: str | None = None
    fit: SoftwareFit | None = None

    def changed(self, values: Mapping[str, Any]) -> Software:
        """Return the profile with other values of some fields.

        Parameters
        ----------
        values : dict of str to Any
            Values by dotted field name, such as ``overlap.contention``; they are not validated.

        Returns
        -------
        Software
            A new profile.

        Examples
        --------
        >>> load_software("megatron-core").changed({"overlap.contention": 0.5}).overlap.contention
        0.5
        """
        groups: dict[str, Any] = {}
        for path, value in values.items():
            group, dot, field = path.partition(".")
            if not dot:
                groups[group] = value
                continue
            groups[group] = groups.get(group, getattr(self, group)).model_copy(update={field: value})
        return self.model_copy(update=groups)

    def covers(self, date: str) -> bool:
        """Return True if the profile describes releases of a day, month or year.

        Parameters
        ----------
        date : str
            ``2024``, ``2024-06`` or ``2024-06-30``.

        Returns
        -------
        bool
            Whether the date lies between ``from`` and ``until``.

        Examples
        --------
        >>> load_software("tensorflow2").covers("2018-06"), load_software("tensorflow2").covers("2021")
        (False, True)
        """
        begins = self.since is None or self.since[: len(date)] <= date[: len(self.since)]
        ends = self.until is None or date[: len(self.until)] <= self.until[: len(date)]
        return begins and ends

    def eras(self, date: str) -> tuple[EarlierReleases, ...]:
        """Return what was different in releases of a date, the newest first.

        Parameters
        ----------
        date : str
            Day, month or year.

        Returns
        -------
        tuple of EarlierReleases
            Entries of ``earlier`` that end after the date.
        """
        return tuple(era for era in self.earlier if date[: len(era.until)] < era.until[: len(date)])

    def date_of(self, version: str) -> str:
        """Return the date of a release.

        Parameters
        ----------
        version : str
            Release that the profile dates, an NVIDIA container (``24.07``), or a date.

        Returns
        -------
        str
            Day, month or year.

        Raises
        ------
        SpecError
            If the release is unknown or out of the profile's range of dates.
        """
        container = re.fullmatch(r"(2[0-9])\.([01][0-9])(\.[0-9]+)?", version)
        date = self.releases.get(version) or (f"20{container[1]}-{container[2]}" if container else version)
        known = [*self.releases, *filter(None, (self.since, self.until))]
        if not re.fullmatch(r"20[0-9]{2}(-(0[1-9]|1[0-2])(-(0[1-9]|[12][0-9]|3[01]))?)?", date):
            raise SpecError(
                f"software {self.name}: no release {version!r}; {near(version, known)}, or a date (2024-06)"
            )
        if not self.covers(date):
            range_of = " ".join(filter(None, (f"from {self.since}", self.until and f"until {self.until}")))
            raise SpecError(f"software {self.name} describes releases {range_of}, not {version!r}")
        return date

    def is_fitted(self, architecture: str) -> bool:
        """Return True if numbers of the profile were fitted to steps on devices of an architecture.

        Parameters
        ----------
        architecture : str
            For example ``Hopper``.

        Returns
        -------
        bool
            Whether they were.
        """
        return self.fit is not None and architecture in self.fit.architectures

    def host_is_known(self, architecture: str) -> bool:
        """Return True if the host times were fitted to steps on devices of an architecture.

        Parameters
        ----------
        architecture : str
            For example ``Hopper``.

        Returns
        -------
        bool
            Whether they were.

        Examples
        --------
        >>> [load_software(name).host_is_known("Hopper") for name in ("fsdp-composer", "megatron-core", "tensorflow2")]
        [True, True, False]
        """
        return architecture in self.host.fitted_on or self.is_fitted(architecture)

    def slowdown_on(self, architecture: str) -> float:
        """Return how much slower than the calibrated kernel attention runs on an architecture.

        Parameters
        ----------
        architecture : str
            For example ``Hopper``.

        Returns
        -------
        float
            Factor on the time; for an architecture without one, the mean of the others.
        """
        known = self.attention.slowdown
        if isinstance(known, float):
            return known
        return known.get(architecture, sum(known.values()) / len(known) if known else 1.0)


def profiles_with_routing() -> list[str]:
    """Profiles of the catalog that state the host's time for tokens on their way to experts (``host.routing``)."""
    return [name for name in names("software") if load_software(name).host.routing > 0]


def load_software(name_or_path: str | Path) -> Software:
    """Load a software profile by catalog name or path; ``name@release`` or ``name@date`` as it was then.

    A release is one that the profile dates, or the month of one of NVIDIA's containers (``24.07``).

    Parameters
    ----------
    name_or_path : str | Path
        Name, path or ``name@release``.

    Returns
    -------
    Software
        The profile.

    Raises
    ------
    SpecError
        If there is no such profile or release.

    Examples
    --------
    >>> [load_software(f"megatron-core{at}").parallelism.expert_tensor for at in ("", "@0.9", "@2024-06", "@25.04")]
    ['none', 'tp', 'tp', 'none']
    """
    return _profiles(name_or_path)


def _profile(name_or_path: str | Path) -> Software:
    name, dated, version = ("", "", "") if is_path(name_or_path) else str(name_or_path).partition("@")
    path, data = read_entry("software", name if dated else name_or_path)
    known = {field.alias or name for name, field in Software.model_fields.items()}
    for key in data:
        if key not in known:
            from paleo.specs.fields import field_table

            places = [row.field for row in field_table(Software)]
            raise SpecError(f"{path}: {key}: unknown key; {near(key, [*known, *places])}")
    newest = validate(Software, {"name": path.stem, **data}, path)
    eras = newest.eras(newest.date_of(version)) if dated else ()
    chosen = newest.model_copy(update={"name": f"{path.stem}@{version}"}) if dated else newest
    for era in newest.earlier:
        data = _overlaid(data, era.changes)
        older = validate(Software, {**data, "name": chosen.name}, path)
        chosen = older if era in eras else chosen
    return chosen


def _overlaid(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The groups of a profile with some dotted fields changed."""
    result = dict(data)
    for path, value in changes.items():
        group, _, field = path.partition(".")
        result[group] = {**result.get(group, {}), field: value} if field else value
    return result


_profiles = FileCache(_profile)
