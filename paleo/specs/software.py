"""Software profiles: how a framework runs a network on a device, in groups of fields.

Every field states its meaning where it is declared. `paleo show software NAME` and the docs print these sentences.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from paleo.errors import SpecError, suggest_names
from paleo.operations.tensor import CrossEntropyImplementation, RotaryImplementation, Scaling
from paleo.specs.calibration import Residual
from paleo.specs.catalog import is_path, names, read_entry
from paleo.specs.loading import FileCache, Flag, PositiveCount, Spec, Text, validate
from paleo.units import MEBIBYTE, Bytes, BytesPerSecond, Seconds

#: Device memory of an empty PyTorch process in nvidia-smi, with lazily loaded kernels (CUDA 11.7 and later): half a
#: GiB.
CONTEXT = 512.0 * MEBIBYTE
#: Buffers of one NCCL ring, by documented sizes: 24 channels of 4 MiB (NCCL_BUFFSIZE), 4.7 MiB for the LL128 and 0.5
#: MiB for the LL protocol. Trees and more channels would add to that.
COMMUNICATOR = 221.0 * MEBIBYTE
#: Memory that PyTorch's caching allocator reserves but does not allocate, as a fraction of allocated memory: 5.8 % on
#: average with a standard deviation of 2.2 % (2.8 to 7.9 %), in six layouts of Megatron-Core on B200 for which
#: SimuMax's table prints both peaks.
FRAGMENTATION = 0.058
#: Time of a parameter server for each tensor that is pushed and pulled [s]. It is TensorFlow's, fitted to four
#: saturated rates of P100 workers (Li, Walls, Guo, CM-DARE, ICDCS 2020), with an error of 6.5 % on 93 rates that were
#: not fitted.
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
LaunchCounts = tuple[Factor, Factor]


class SoftwareFit(Spec):
    """Origin of the fitted numbers of a profile.

    It states the measured steps, one standard deviation of the logarithm of each number, the errors on steps that were
    not fitted, and the ``architectures`` of the devices that ran the steps.
    """

    source: Text
    date: Text
    architectures: tuple[Text, ...] = ()
    rows_fitted: PositiveCount
    rows_held_out: Annotated[int, Field(ge=0)]
    uncertainty: dict[str, Annotated[float, Field(ge=0)]]
    residual: Residual


class HostTime(Spec):
    """Host (CPU) time to launch one operation, by phase (used by `paleo.step.memory`)."""

    forward: Seconds = Field(description="time in which the host issues one operation of the forward pass")
    backward: Seconds = Field(description="time in which the host issues the backward pass of one operation")
    routing: Seconds = Field(
        0.0,
        description="additional host time for each dispatch of tokens to experts or back: indices, "
        "permutations, and the counts of tokens that the host waits for",
    )
    expert: Seconds = Field(
        0.0,
        description="host time that each expert on the device adds to a grouped matrix product: a call, casts, splits",
    )
    handshake: Seconds = Field(
        0.0,
        description="time of an exchange between nodes by deepep or hybridep besides its bytes: layout, "
        "counts that are sent first, and the wait for them",
    )
    libfabric: tuple[Seconds, Seconds] = Field(
        (0.0, 0.0),
        description="additional time of an exchange over EFA for each of a device's ports, by NCCL and by libraries "
        "that send each token once; a host thread serves the endpoints of libfabric, one a port",
    )
    waiting_power: Annotated[float, Field(ge=1)] = Field(
        4.0,
        description="exponent with which device and host time are combined in sections where the host waits "
        "for counts of tokens: 1 adds them up; from 4 on nearly the longer one counts, as when the host runs ahead "
        "freely",
    )
    latent_rotation: LaunchCounts = Field(
        (2.0, 2.0),
        description="operations for the rotary embedding of query and key in latent attention, forward and backward",
    )
    grouped_router: LaunchCounts = Field(
        (0.0, 0.0), description="operations that a router with groups of experts adds, forward and backward"
    )
    sigmoid_router: LaunchCounts = Field(
        (0.0, 0.0),
        description="operations that a router with sigmoids and a balancing bias adds over one with a softmax",
    )
    unfused_router: LaunchCounts = Field(
        (0.0, 0.0),
        description="operations that a router with a softmax and its balancing loss add where no fused kernels "
        "compute them",
    )
    selection: Seconds = Field(
        0.0,
        description="host time in each pass for selecting object proposals and their targets, while the device waits",
    )
    piece: Seconds = Field(
        0.0,
        description="host time for each piece of a tensor that one rank updated when ZeRO-1 or 2 gathers it: "
        "views and a copy (0: flat buffers that are gathered as a whole)",
    )
    feeds: BytesPerSecond | None = Field(
        None,
        description="rate at which a host core copies states from one step to the next, out of the framework "
        "and back, while the device waits; left out: the states stay on the device",
    )
    whole_iteration: Flag = Field(
        False, description="whether an iteration is one CUDA graph, so that its operations take no host time"
    )
    fitted_on: tuple[Text, ...] = Field(
        (),
        description="architectures of the devices on whose steps the host times were fitted, here or in the "
        "profile from which they are taken; on others they are assumed",
    )
    blocking: Flag = Field(
        False, description="whether the host waits for each kernel before it issues the next (CUDA_LAUNCH_BLOCKING=1)"
    )
    jitter: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="standard deviation of a rank's step time from one step to the next, as a fraction of it"
    )


class AttentionSoftware(Spec):
    """Options for how the software computes attention."""

    implementation: Literal["fused", "unfused", "stepwise"] = Field(
        "fused",
        description="fused: one kernel; unfused: the scores are stored, and one kernel does scale, mask and "
        "softmax; stepwise: scale, mask and softmax are one pass each, and heads are copied next to each other",
    )
    kernel: Text | None = Field(
        None, description="the fused kernel; left out: the usual one of the device's architecture"
    )
    relative: Literal["heads first", "heads last"] = Field(
        "heads first",
        description="layout of the scores of relative attention. heads first: as batched products write "
        "them; heads last: samples and heads are the last dims, so that scores are transposed for products and "
        "softmax",
    )
    dropout: Slowdown = Field(
        1.0,
        description="factor on the time of a fused kernel that drops weights out, for which it draws random numbers",
    )
    mask: Literal["causal", "tensor"] = Field(
        "causal",
        description="how a fused kernel learns which keys a token sees. causal: from the order of tokens, so that it "
        "skips the others; tensor: from an explicit mask, so that it computes all scores",
    )
    slowdown: Slowdown | dict[str, Slowdown] = Field(
        1.0,
        description="factor by which attention is slower than the calibrated kernel, for all architectures "
        "or by architecture",
    )


class Fusion(Spec):
    """Operations that the software runs as one kernel."""

    passes: Flag = Field(False, description="whether chains of element-wise passes are fused into one kernel")
    compiles: Flag = Field(
        False,
        description="whether users may turn on a compiler that fuses passes which this profile runs one by one (XLA); "
        "it widens the intervals of steps",
    )
    convolutions: Flag = Field(
        False,
        description="with passes: whether passes that only convolutions read are fused too and recomputed "
        "for the backward pass, and sums of gradients are fused into the kernel that makes one of the summands",
    )
    norms: Literal["never", "inference", "forward", "both"] = Field(
        "never",
        description="where a residual sum and a ReLU after a batch normalisation are fused into its kernel: "
        "in inference; also in 16-bit training, in forward passes only or in both passes",
    )
    statistics: Literal["normalisation", "convolution"] = Field(
        "normalisation",
        description="what computes the statistics of a batch normalisation in sixteen bits: its own first "
        "pass over the input, or the end of the convolution before it, so that the input is read once",
    )
    padded_products: Literal["all", "inputs", "none"] = Field(
        "all",
        description="which 16-bit products have rows padded to multiples of 16 bytes (Megatron-LM pads the "
        "vocabulary, XLA operands); inputs: those of outputs and of gradients of inputs alone, as torch.compile does. "
        "Others run on slower kernels",
    )
    gelu: Literal["fused", "tanh-stepwise", "stepwise"] = Field(
        "fused",
        description="tanh-stepwise: one pass for each term of gelu_tanh and quick_gelu; stepwise: for every gelu",
    )
    experts: Literal["fused", "stepwise"] = Field(
        "fused",
        description="biases and clamped gates of experts. stepwise: one pass for each term and each expert, "
        "whose tokens are selected by counts on the host; they are fused if a CUDA graph holds the whole iteration",
    )
    loss: CrossEntropyImplementation = Field(
        "fused",
        description="cross-entropy. fused: reads logits, writes log-probabilities; recomputed: keeps the "
        "logits and one number a row (Apex, FlashAttention); tiled: computed with the output layer for one tile of "
        "tokens at a time, so that the logits are never stored whole (Liger's fused linear cross-entropy); separate: "
        "log-softmax and the choice of the target are functions of their own, so that a gradient as large as the "
        "logits is filled with zeros and read (eager PyTorch); upcast: so, and logits are first written in fp32 "
        "(autocast); stepwise: one pass for each step of the vocabulary-parallel loss (Megatron-LM)",
    )
    metrics: Annotated[int, Field(strict=True, ge=0)] = Field(
        0,
        description="how often the loss is computed again from the logits after each microbatch, for "
        "training metrics, in fp32 and without a fused kernel",
    )
    recurrence: Literal["layer", "looped"] = Field(
        "layer",
        description="recurrent layers. layer: library kernels for all steps together; looped: a loop of the "
        "framework, with separate operations for each step and the weight gradient added up step by step",
    )
    rotation: RotaryImplementation = Field(
        "fused",
        description="rotary embedding of query and key. fused: one pass over each; stepwise: plain code with "
        "a pass for each step, in latent attention only; complex, halves: plain code in all attention, as complex "
        "products in fp32 (torchtitan) or by halves of heads (transformers)",
    )
    rms_norm: Literal["fused", "upcast", "stepwise"] = Field(
        "fused",
        description="root-mean-square norms. fused: one kernel; upcast: one kernel over inputs cast to fp32; "
        "stepwise: plain code in fp32 with a pass for each step",
    )
    norm_rows: Literal["block", "streamed"] = Field(
        "block",
        description="how kernels of layer and root-mean-square norms process rows. block: one thread block for each "
        "row, which it reads twice (PyTorch); streamed: blocks loop over rows, hold each in registers, share a block "
        "among several short rows (Transformer Engine)",
    )
    softmax_multiple: PositiveCount = Field(
        1,
        description="the unfused softmax kernel is used if the number of score matrices of a rank is a "
        "multiple of this; 1: always",
    )


class NumberFormats(Spec):
    """Number formats that the framework uses when it trains in sixteen bits."""

    mixed: Literal["masters", "autocast", "narrow"] = Field(
        "masters",
        description="masters: 16-bit weights with fp32 copies; autocast: fp32 weights that are cast to "
        "sixteen bits for products; narrow: weights and states in sixteen bits, without copies",
    )
    main_gradients: Literal["narrow", "fp32"] = Field(
        "narrow",
        description="format in which gradients are summed, kept and exchanged with fp32 masters: that of the "
        "weights, or fp32 instead (Megatron-LM's --accumulate-allreduce-grads-in-fp32, its default in bf16: 18 bytes "
        "a parameter, 6 + 12/dp with a distributed optimizer)",
    )
    scaling: Scaling = Field(
        "delayed",
        description="how the scales of formats below sixteen bits are computed. delayed: from the largest "
        "values of earlier passes; current: from the tensor itself, in an extra pass unless passes are fused; mxfp8: "
        "one byte for each 32 numbers; nvfp4 (default for fp4): one byte for each 16 numbers, and one scale of the "
        "tensor, in an extra pass",
    )
    wide: tuple[Literal["embedding", "norm", "softmax", "gelu"], ...] = Field(
        (), description="operations that autocast computes and stores in fp32"
    )
    transposes: tuple[Literal["tf32", "fp16", "bf16"], ...] = Field(
        (),
        description="dtypes in which tensors are transposed to channels-last and back around each "
        "convolution on tensor cores",
    )
    norms: Literal["as stored", "channels-first"] = Field(
        "as stored",
        description="channels-first: batch normalisation in training transposes channels-last tensors of "
        "tensor cores to channels-first and its results back, in both passes",
    )
    scalar_norms: tuple[Literal["fp16", "bf16"], ...] = Field(
        (),
        description="dtypes in which batch normalisation in training runs on kernels of the framework, which load one "
        "number a thread, as cuDNN does not get them",
    )


class Gradients(Spec):
    """Treatment of gradients between the backward pass and the update."""

    accesses: Factor = Field(0.0, description="reads and writes of each gradient after every backward pass")
    flat: Flag = Field(
        False,
        description="whether those reads and writes are passes over a flat buffer of each block, not over each tensor",
    )
    accumulated: Flag = Field(
        False,
        description="whether the matrix product of a weight gradient adds its result to the sum, which it "
        "reads and writes for every microbatch (Megatron's gradient_accumulation_fusion)",
    )
    added: Flag = Field(
        False,
        description="whether autograd adds each gradient to the sum of earlier microbatches in a pass of two "
        "reads and a write (AccumulateGrad, without a call of the framework)",
    )
    accumulator: Factor = Field(
        0.0,
        description="bytes for each parameter of a separate accumulation buffer besides 16-bit gradients; a "
        "pass adds to it after every backward pass, and it is what is exchanged",
    )
    accumulator_cast: Flag = Field(
        False, description="whether that pass reads a copy of the gradient in its own format, which another pass makes"
    )
    tied: Literal["sum", "slices"] = Field(
        "sum",
        description="gradients of a table that is both an embedding and the output layer. sum: added as they "
        "are; slices: kept as rows with indices, which are joined and then added up (Cavdar et al., ISC 2019)",
    )
    clip: Literal["none", "norm", "scaled"] = Field(
        "none",
        description="norm: the norm of all gradients is computed before the update; scaled: they are also "
        "scaled, in a separate pass",
    )
    bucket: Bytes = Field(
        25 * MEBIBYTE, description="bytes of gradients that are exchanged together (bucket_cap_mb of PyTorch's DDP)"
    )
    bucket_elements: Factor = Field(
        0.0, description="elements of gradients that are exchanged together, whatever their format; 0: counted in bytes"
    )
    bucket_per_rank: Factor = Field(
        0.0,
        description="smallest bucket in elements for each rank that shares out states (Megatron-Core: "
        "max(40e6, 1e6 x dp x cp), so that each rank's part of a bucket stays large)",
    )
    bucket_buffers: Factor = Field(
        2.0,
        description="buckets that need memory besides the gradients; 0: buckets are parts of one buffer of "
        "all gradients",
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
        False, description="whether ZeRO-1 and 2 all-reduce whole buckets instead of scattering the sums (DeepSpeed)"
    )
    stepwise_updates: tuple[Text, ...] = Field(
        (), description="optimizers without a fused kernel: each term of the formula is one pass"
    )
    listwise_updates: tuple[Text, ...] = Field(
        (),
        description="optimizers that compute each term of the formula for all tensors at once (PyTorch's "
        "foreach), so that the roots of the second moments also need memory during the update",
    )
    compression_call: Seconds = Field(
        0.0, description="time of the framework for each tensor that is compressed by itself, besides its kernels"
    )
    server_call: Seconds = Field(
        SERVER_CALL,
        description="time of a parameter server for each tensor that is pushed and pulled (TensorFlow: Li et al., "
        "CM-DARE, ICDCS 2020)",
    )


class Overlap(Spec):
    """Communication that the software overlaps with computation."""

    gradients: Flag = Field(True, description="whether gradients are exchanged during the backward pass")
    gather: Flag = Field(
        False, description="whether updated shards of parameters are gathered during the next forward pass"
    )
    tensor: Flag = Field(
        False,
        description="whether gathers and scatters over tp run piece by piece during the products before or "
        "after them (Wang et al., ASPLOS 2023)",
    )
    tensor_over_nodes: Flag = Field(
        True, description="whether that also holds where the ranks of tp are not all joined inside one node (NVLink)"
    )
    tensor_with_latents: Flag = Field(
        True, description="whether this overlap also exists for networks with latent attention"
    )
    experts: Flag | None = Field(
        None,
        description="whether tokens are exchanged with experts while the device computes another microbatch "
        "(Megatron-Core's combined forward and backward passes); left out: only under pipeline schedules that pair "
        "passes, such as dualpipe",
    )
    shared_experts: Flag = Field(
        False,
        description="whether shared experts, which all tokens visit, run while NCCL exchanges the tokens of "
        "the others (Megatron-Core's moe_shared_expert_overlap)",
    )
    sharded: Flag = Field(
        True,
        description="whether ZeRO-3 gathers parameters and scatters gradients while the device computes; "
        "else the device waits for them",
    )
    contention: Factor = Field(
        0.0,
        description="seconds that computation loses for each second of a collective that runs at the same "
        "time: multiprocessors, bandwidth, copies into and out of flat buffers",
    )


class Recomputation(Spec):
    """Activations that the software recomputes before the backward pass."""

    policy: Recompute = Field("none", description="recompute policy that users of the software usually choose")
    some_layers: Flag = Field(False, description="whether full recomputation can be limited to some layers of a stage")
    stops_early: Flag = Field(
        False,
        description="whether recomputation of a block stops once its backward pass has what it needs; else "
        "it runs to the end",
    )
    selective: Literal["attention", "products"] = Field(
        "attention",
        description="what selective recomputation computes again: the core of attention; or all except the "
        "core and every second matrix product",
    )


class Parallelism(Spec):
    """Rules by which the software divides work and states over ranks."""

    zero: Annotated[int, Field(strict=True, ge=0, le=3)] = Field(
        0, description="ZeRO stage that users of the software usually choose"
    )
    zero_stages: tuple[Annotated[int, Field(strict=True, ge=0, le=3)], ...] | None = Field(
        None, description="ZeRO stages that the software supports; left out: not known, so that a search tries all"
    )
    sequence_parallel: Flag = Field(
        False, description="whether users of the software usually combine tp with sequence parallelism"
    )
    interleaves: Flag = Field(
        False, description="whether users of the software usually interleave pipelines, as finely as the layers divide"
    )
    schedules: tuple[Text, ...] | None = Field(
        None,
        description="pipeline schedules that the software supports, an empty list if it has no pipelines; "
        "left out: not known, so that a search tries all",
    )
    stages: Literal["even", "work"] = Field(
        "even",
        description="how a pipeline is cut. even: the same number of blocks on each stage; work: equal work "
        "on each stage, including the output layer",
    )
    microbatches: Literal["samples", "stages"] = Field(
        "samples",
        description="default number of microbatches of a pipeline: one for each sample of a rank, or one for "
        "each stage",
    )
    blocking_sends: Flag = Field(
        False, description="whether both stages wait for each send between them, one at a time (DeepSpeed)"
    )
    pipeline_gathers: Literal["pass", "step"] = Field(
        "pass",
        description="how often a stage gathers sharded parameters: for every pass, or once a step; with the "
        "latter gradients are reduced with the last microbatch only, as in ZeRO-1",
    )
    pipeline_outputs: Literal["kept", "freed"] = Field(
        "kept",
        description="what a stage does with an output that it has sent and from which autograd starts the "
        "backward pass: keeps it, or frees its data (Megatron-Core's deallocate_pipeline_outputs)",
    )
    gather_buffers: Literal["sections", "root"] = Field(
        "sections",
        description="what ZeRO-3 has gathered at a time. sections: two of the largest; root: all that is outside "
        "repeated blocks, and two blocks, and beside them the flat buffers that they were copied out of (FSDP2)",
    )
    gradient_scatters: Literal["pass", "pass_without_pipeline", "step"] = Field(
        "pass",
        description="how often ZeRO-2 reduces and scatters gradients: after every backward pass (DeepSpeed; "
        "FSDP's SHARD_GRAD_OP); so without a pipeline only; or once a step, with whole gradients kept on each rank "
        "until then, as in ZeRO-1",
    )
    latents: Literal["own", "all"] = Field(
        "all",
        description="tokens whose latent vectors a rank computes in latent attention with sequence "
        "parallelism: its own, after which latents are gathered; or all, for which the inputs are gathered",
    )
    few_key_heads: Literal["copied", "gathered"] = Field(
        "copied",
        description="key and value heads that are fewer than the ranks of tp. copied: each rank has the weights of a "
        "whole head; gathered: weights are split, and each rank gathers what all of them make and keeps its part",
    )
    whole_tensors: Flag = Field(
        False,
        description="whether ZeRO-1 assigns whole tensors to ranks, each reduced to its owner and broadcast "
        "from there, instead of equal shards of flat buffers",
    )
    regather: Flag = Field(
        True, description="whether inputs gathered over tp are kept as shards and gathered again for the backward pass"
    )
    expert_dispatch: Dispatch = Field(
        "nccl",
        description="how tokens are dispatched. nccl: an all-to-all that sends a token to each of its "
        "experts; deepep and hybridep: a token is sent once to each node (within one node: to each device) that has "
        "some of them (DeepSeek-V3 technical report, 2024, section 3.2.2)",
    )
    expert_tensor: Literal["tp", "none"] = Field(
        "tp",
        description="ranks over which users usually split the tensors of each expert: those of tp; or none, "
        "so that experts are folded over tp as well",
    )
    expert_tokens: Literal["own", "all"] = Field(
        "all",
        description="tokens that a rank sends to experts split over tp, with sequence parallelism. own: its "
        "own tokens; what arrives is gathered over tp and the sums are scattered; all: those of its tp group, for "
        "which the inputs of the layer are gathered",
    )


class ProcessMemory(Spec):
    """Memory that a process holds besides its tensors."""

    context: Bytes = Field(CONTEXT, description="device memory of a process before its first tensor")
    communicator: Bytes = Field(COMMUNICATOR, description="device memory that each communicator adds")
    fragmentation: Factor = Field(
        FRAGMENTATION,
        description="memory that the allocator reserves but does not allocate, as a fraction of allocated "
        "memory (torch.cuda.max_memory_reserved over max_memory_allocated, less 1)",
    )


class Loader(Spec):
    """Preparation of samples by the software."""

    image: Seconds = Field(
        0.0,
        description="what a core of the host takes to decode, crop and scale a photograph of 110 kB (ImageNet); 0: "
        "that is done on the device, or not known",
    )


class Convolutions(Spec):
    """Convolution kernels of the software, and how it chooses among them."""

    cudnn: Annotated[float, Field(gt=0)] = Field(
        9.0, description="version of the library, which decides which algorithms exist"
    )
    searches: Flag = Field(
        False,
        description="whether the framework times all algorithms and keeps the fastest; else the library's "
        "heuristics choose",
    )
    workspace: Bytes | None = Field(None, description="largest workspace of one call; left out: no limit")
    algorithms: tuple[Algorithm, ...] | None = Field(
        None,
        description="algorithms of a framework that has its own convolution kernels (those of "
        "`paleo.pricing.convolution`)",
    )
    image_by_image: Flag = Field(False, description="whether the kernels are called once for each image of the batch")


class EarlierReleases(Spec):
    """Fields, such as ``parallelism.expert_tensor``, that had other values in releases before a date."""

    until: Date
    changes: dict[str, Any]
    source: Text


class Software(Spec):
    """Behaviour of a framework, in groups of fields; each field states its meaning.

    ``from`` and ``until`` are the dates of the first and last release that the profile describes. ``releases`` dates
    some of the releases. ``earlier`` lists, newest first, what was different before a date (`load_software`).
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

    def with_fields(self, values: Mapping[str, Any]) -> Software:
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
        >>> load_software("megatron-core").with_fields({"overlap.contention": 0.5}).overlap.contention
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
            True if the date is between ``from`` and ``until``.

        Examples
        --------
        >>> load_software("tensorflow2").covers("2018-06"), load_software("tensorflow2").covers("2021")
        (False, True)
        """
        begins = self.since is None or self.since[: len(date)] <= date[: len(self.since)]
        ends = self.until is None or date[: len(self.until)] <= self.until[: len(date)]
        return begins and ends

    def earlier_releases(self, date: str) -> tuple[EarlierReleases, ...]:
        """Return the differences of releases of a date, the newest first.

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
                f"software {self.name}: no release {version!r}; {suggest_names(version, known)}, or a date (2024-06)"
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
            True if they were.
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
            True if they were.

        Examples
        --------
        >>> [load_software(name).host_is_known("Hopper") for name in ("fsdp-composer", "megatron-core", "tensorflow2")]
        [True, True, False]
        """
        return architecture in self.host.fitted_on or self.is_fitted(architecture)

    def slowdown_on(self, architecture: str) -> float:
        """Return by how much attention on an architecture is slower than the calibrated kernel.

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
    """Return the profiles that state the host's time for routing tokens to experts (``host.routing``)."""
    return [name for name in names("software") if load_software(name).host.routing > 0]


def load_software(name_or_path: str | Path) -> Software:
    """Load a software profile by catalog name or path, or as ``name@release`` or ``name@date``.

    A release is one that the profile dates, or the month of an NVIDIA container (``24.07``).

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
            raise SpecError(f"{path}: {key}: unknown key; {suggest_names(key, [*known, *places])}")
    newest = validate(Software, {"name": path.stem, **data}, path)
    eras = newest.earlier_releases(newest.date_of(version)) if dated else ()
    chosen = newest.model_copy(update={"name": f"{path.stem}@{version}"}) if dated else newest
    for era in newest.earlier:
        data = _overlaid(data, era.changes)
        older = validate(Software, {**data, "name": chosen.name}, path)
        chosen = older if era in eras else chosen
    return chosen


def _overlaid(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the groups of a profile with some dotted fields changed."""
    result = dict(data)
    for path, value in changes.items():
        group, _, field = path.partition(".")
        result[group] = {**result.get(group, {}), field: value} if field else value
    return result


_profiles = FileCache(_profile)
