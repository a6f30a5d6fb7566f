"""Schema of software profiles: how a framework's release drives a device (host times, fusion, formats, overlap).

Every field's meaning is in the docstring of its group. `paleo show software NAME` and the docs print these sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from paleo.errors import SpecError, suggest_names
from paleo.operations.tensor import CrossEntropyImplementation, QuantisationScaling, RotaryImplementation
from paleo.specs.calibration import HeldOutErrors
from paleo.specs.catalog import entry_names, is_path, read_entry
from paleo.specs.loading import NonEmptyText, PositiveCount, Spec, StrictBool, cache_by_files, validate_mapping
from paleo.units import (
    MEBIBYTE,
    Bytes,
    BytesPerSecond,
    FlopsPerSecond,
    Hertz,
    Seconds,
    Watts,
    format_duration,
    format_gibibytes,
    format_quantity,
)

#: Device memory of an empty PyTorch process in nvidia-smi, with lazily loaded kernels (CUDA 11.7 and later): half a
#: GiB.
_CUDA_CONTEXT_BYTES = 512.0 * MEBIBYTE
#: Buffers of one NCCL ring, by documented sizes: 24 channels of 4 MiB (NCCL_BUFFSIZE), 4.7 MiB for the LL128 and 0.5
#: MiB for the LL protocol. Trees and more channels would add to that.
_COMMUNICATOR_BYTES = 221.0 * MEBIBYTE
#: Memory that PyTorch's caching allocator reserves but does not allocate, as a fraction of allocated memory: 5.8 % on
#: average with a standard deviation of 2.2 % (2.8 to 7.9 %), in six layouts of Megatron-Core on B200 for which
#: SimuMax's table prints both peaks.
_FRAGMENTATION_FRACTION = 0.058
#: Time of a parameter server for each tensor that is pushed and pulled [s]. It is TensorFlow's, fitted to four
#: saturated rates of P100 workers (Li, Walls, Guo, CM-DARE, ICDCS 2020), with an error of 6.5 % on 93 rates that were
#: not fitted.
PARAMETER_SERVER_CALL_TIME = 0.102e-3
#: The profile of programs that are compiled for TPUs.
TPU_PROFILE_NAME = "xla-tpu"
#: Algorithms of convolution that a profile may name.
ConvolutionAlgorithm = Literal["implicit", "explicit", "winograd", "nonfused", "fft", "direct"]
#: A day, month or year.
Date = Annotated[str, BeforeValidator(str), Field(pattern=r"^[0-9]{4}(-[0-9]{2}){0,2}$")]
RecomputePolicy = Literal["none", "selective", "full"]
#: How tokens are dispatched to experts.
TokenDispatcher = Literal["nccl", "deepep", "hybridep"]
#: A release's number or name, as its framework prints it.
ReleaseName = Annotated[str, BeforeValidator(str), Field(pattern=r"^[0-9A-Za-z._-]{1,40}$")]
NonNegativeFactor = Annotated[float, Field(ge=0)]
SlowdownFactor = Annotated[float, Field(ge=1)]
#: Operations that a host issues, forward and backward.
LaunchCounts = tuple[NonNegativeFactor, NonNegativeFactor]


#: Unit or dimension that is printed for each type of quantity.
_UNITS = {Seconds: "time", Bytes: "bytes", BytesPerSecond: "bytes/s", FlopsPerSecond: "FLOP/s", Hertz: "Hz", Watts: "W"}
#: Units in which rates are printed.
_RATES = {"bytes/s": "B/s", "FLOP/s": "FLOP/s", "Hz": "Hz"}


class SoftwareFit(Spec):
    """Source and quality of the fitted numbers of a software profile.

    ``rows_fitted`` and ``rows_held_out`` count measured steps. ``uncertainty`` is one standard deviation of the
    logarithm of each number, ``residual`` the errors on held-out steps. ``architectures`` are those of the devices that
    ran the steps.
    """

    source: NonEmptyText
    date: NonEmptyText
    architectures: tuple[NonEmptyText, ...] = ()
    rows_fitted: PositiveCount
    rows_held_out: Annotated[int, Field(ge=0)]
    uncertainty: dict[str, Annotated[float, Field(ge=0)]]
    residual: HeldOutErrors


class HostTime(Spec):
    """Host (CPU) time to launch the operations of a step, by phase and kind.

    Parameters
    ----------
    forward
        time in which the host issues one operation of the forward pass
    backward
        time in which the host issues the backward pass of one operation
    routing
        additional host time for each dispatch of tokens to experts or back: indices, permutations, and the counts
        of tokens that the host waits for
    expert
        host time that each expert on the device adds to a grouped matrix product: a call, casts, splits
    handshake
        time of an exchange between nodes by deepep or hybridep besides its bytes: layout, counts that are sent
        first, and the wait for them
    libfabric
        additional time of an exchange over EFA for each of a device's ports, by NCCL and by libraries that send each
        token once; a host thread serves the endpoints of libfabric, one a port
    waiting_exponent
        exponent with which device and host time are combined in sections where the host waits for counts of tokens:
        1 adds them up; from 4 on nearly the longer one counts, as when the host runs ahead freely
    latent_rotation
        operations for the rotary embedding of query and key in latent attention, forward and backward
    grouped_router
        operations that a router with groups of experts adds, forward and backward
    sigmoid_router
        operations that a router with sigmoids and a balancing bias adds over one with a softmax
    unfused_router
        operations that a router with a softmax and its balancing loss add where no fused kernels compute them
    selection
        host time in each pass for selecting object proposals and their targets, while the device waits
    piece
        host time for each piece of a tensor that one rank updated when ZeRO-1 or 2 gathers it: views and a copy (0:
        flat buffers that are gathered as a whole)
    feeds
        rate at which a host core copies states from one step to the next, out of the framework and back, while the
        device waits; left out: the states stay on the device
    whole_iteration
        whether an iteration is one CUDA graph, so that its operations take no host time
    fitted_on
        architectures of the devices on whose steps the host times were fitted, here or in the profile from which
        they are taken; on others they are assumed
    blocking
        whether the host waits for each kernel before it issues the next (CUDA_LAUNCH_BLOCKING=1)
    jitter
        standard deviation of a rank's step time from one step to the next, as a fraction of it
    """

    forward: Seconds
    backward: Seconds
    routing: Seconds = 0.0
    expert: Seconds = 0.0
    handshake: Seconds = 0.0
    libfabric: tuple[Seconds, Seconds] = (0.0, 0.0)
    waiting_exponent: Annotated[float, Field(ge=1)] = Field(4.0, alias="waiting_power")
    latent_rotation: LaunchCounts = (2.0, 2.0)
    grouped_router: LaunchCounts = (0.0, 0.0)
    sigmoid_router: LaunchCounts = (0.0, 0.0)
    unfused_router: LaunchCounts = (0.0, 0.0)
    selection: Seconds = 0.0
    piece: Seconds = 0.0
    feeds: BytesPerSecond | None = None
    whole_iteration: StrictBool = False
    fitted_on: tuple[NonEmptyText, ...] = ()
    blocking: StrictBool = False
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.0


class AttentionSoftware(Spec):
    """Implementation of attention by the software.

    Parameters
    ----------
    implementation
        fused: one kernel; unfused: the scores are stored, and one kernel does scale, mask and softmax; stepwise:
        scale, mask and softmax are one pass each, and heads are copied next to each other
    kernel
        the fused kernel; left out: the usual one of the device's architecture
    relative
        layout of the scores of relative attention. heads first: as batched products write them; heads last: samples
        and heads are the last dims, so that scores are transposed for products and softmax
    dropout
        factor on the time of a fused kernel that drops weights out, for which it draws random numbers
    mask
        how a fused kernel learns which keys a token sees. causal: from the order of tokens, so that it skips the
        others; tensor: from an explicit mask, so that it computes all scores
    slowdown
        factor by which attention is slower than the calibrated kernel, for all architectures or by architecture
    """

    implementation: Literal["fused", "unfused", "stepwise"] = "fused"
    kernel: NonEmptyText | None = None
    relative: Literal["heads first", "heads last"] = "heads first"
    dropout: SlowdownFactor = 1.0
    mask: Literal["causal", "tensor"] = "causal"
    slowdown: SlowdownFactor | dict[str, SlowdownFactor] = 1.0


class KernelFusion(Spec):
    """Kernel fusion by the software: which operations run together as one kernel.

    Parameters
    ----------
    passes
        whether chains of element-wise passes are fused into one kernel
    compiles
        whether users may turn on a compiler that fuses passes which this profile runs one by one (XLA); it widens
        the intervals of steps
    convolutions
        with passes: whether passes that only convolutions read are fused too and recomputed for the backward pass,
        and sums of gradients are fused into the kernel that makes one of the summands
    norms
        where a residual sum and a ReLU after a batch normalisation are fused into its kernel: in inference; also in
        16-bit training, in forward passes only or in both passes
    statistics
        what computes the statistics of a batch normalisation in sixteen bits: its own first pass over the input, or
        the end of the convolution before it, so that the input is read once
    padded_products
        which 16-bit products have rows padded to multiples of 16 bytes (Megatron-LM pads the vocabulary, XLA
        operands); inputs: those of outputs and of gradients of inputs alone, as torch.compile does. Others run on
        slower kernels
    gelu
        tanh-stepwise: one pass for each term of gelu_tanh and quick_gelu; stepwise: for every gelu
    experts
        biases and clamped gates of experts. stepwise: one pass for each term and each expert, whose tokens are
        selected by counts on the host; they are fused if a CUDA graph holds the whole iteration
    loss
        cross-entropy. fused: reads logits, writes log-probabilities; recomputed: keeps the logits and one number a
        row (Apex, FlashAttention); tiled: computed with the output layer for one tile of tokens at a time, so that
        the logits are never stored whole (Liger's fused linear cross-entropy); separate: log-softmax and the choice
        of the target are functions of their own, so that a gradient as large as the logits is filled with zeros and
        read (eager PyTorch); upcast: so, and logits are first written in fp32 (autocast); stepwise: one pass for
        each step of the vocabulary-parallel loss (Megatron-LM)
    metrics
        how often the loss is computed again from the logits after each microbatch, for training metrics, in fp32
        and without a fused kernel
    recurrence
        recurrent layers. layer: library kernels for all steps together; looped: a loop of the framework, with
        separate operations for each step and the weight gradient added up step by step
    rotation
        rotary embedding of query and key. fused: one pass over each; stepwise: plain code with a pass for each
        step, in latent attention only; complex, halves: plain code in all attention, as complex products in fp32
        (torchtitan) or by halves of heads (transformers)
    rms_norm
        root-mean-square norms. fused: one kernel; upcast: one kernel over inputs cast to fp32; stepwise: plain code
        in fp32 with a pass for each step
    norm_rows
        how kernels of layer and root-mean-square norms process rows. block: one thread block for each row, which it
        reads twice (PyTorch); streamed: blocks loop over rows, hold each in registers, share a block among several
        short rows (Transformer Engine)
    softmax_multiple
        the unfused softmax kernel is used if the number of score matrices of a rank is a multiple of this; 1:
        always
    """

    passes: StrictBool = False
    compiles: StrictBool = False
    convolutions: StrictBool = False
    norms: Literal["never", "inference", "forward", "both"] = "never"
    statistics: Literal["normalisation", "convolution"] = "normalisation"
    padded_products: Literal["all", "inputs", "none"] = "all"
    gelu: Literal["fused", "tanh-stepwise", "stepwise"] = "fused"
    experts: Literal["fused", "stepwise"] = "fused"
    loss: CrossEntropyImplementation = "fused"
    metrics: Annotated[int, Field(strict=True, ge=0)] = 0
    recurrence: Literal["layer", "looped"] = "layer"
    rotation: RotaryImplementation = "fused"
    rms_norm: Literal["fused", "upcast", "stepwise"] = "fused"
    norm_rows: Literal["block", "streamed"] = "block"
    softmax_multiple: PositiveCount = 1


class NumberFormats(Spec):
    """Number formats that the software uses in mixed-precision training.

    Parameters
    ----------
    mixed
        masters: 16-bit weights with fp32 copies; autocast: fp32 weights that are cast to sixteen bits for products;
        narrow: weights and states in sixteen bits, without copies
    main_gradients
        format in which gradients are summed, kept and exchanged with fp32 masters: that of the weights, or fp32
        instead (Megatron-LM's --accumulate-allreduce-grads-in-fp32, its default in bf16: 18 bytes a parameter, 6 +
        12/dp with a distributed optimizer)
    scaling
        how the scales of formats below sixteen bits are computed. delayed: from the largest values of earlier
        passes; current: from the tensor itself, in an extra pass unless passes are fused; mxfp8: one byte for each
        32 numbers; nvfp4 (default for fp4): one byte for each 16 numbers, and one scale of the tensor, in an extra
        pass
    wide
        operations that autocast computes and stores in fp32
    transposes
        dtypes in which tensors are transposed to channels-last and back around each convolution on tensor cores
    norms
        channels-first: batch normalisation in training transposes channels-last tensors of tensor cores to
        channels-first and its results back, in both passes
    scalar_norms
        dtypes in which batch normalisation in training runs on kernels of the framework, which load one number a
        thread, as cuDNN does not get them
    """

    mixed: Literal["masters", "autocast", "narrow"] = "masters"
    main_gradients: Literal["narrow", "fp32"] = "narrow"
    scaling: QuantisationScaling = "delayed"
    wide: tuple[Literal["embedding", "norm", "softmax", "gelu"], ...] = ()
    transposes: tuple[Literal["tf32", "fp16", "bf16"], ...] = ()
    norms: Literal["as stored", "channels-first"] = "as stored"
    scalar_norms: tuple[Literal["fp16", "bf16"], ...] = ()


class Gradients(Spec):
    """Treatment of gradients between the backward pass and the optimizer update.

    Parameters
    ----------
    extra_gradient_accesses
        reads and writes of each gradient after every backward pass
    flat
        whether those reads and writes are passes over a flat buffer of each block, not over each tensor
    accumulated
        whether the matrix product of a weight gradient adds its result to the sum, which it reads and writes for
        every microbatch (Megatron's gradient_accumulation_fusion)
    added
        whether autograd adds each gradient to the sum of earlier microbatches in a pass of two reads and a write
        (AccumulateGrad, without a call of the framework)
    main_gradient_bytes
        bytes for each parameter of a separate accumulation buffer besides 16-bit gradients; a pass adds to it after
        every backward pass, and it is what is exchanged
    casts_gradients_before_accumulation
        whether that pass reads a copy of the gradient in its own format, which another pass makes
    tied
        gradients of a table that is both an embedding and the output layer. sum: added as they are; slices: kept as
        rows with indices, which are joined and then added up (Cavdar et al., ISC 2019)
    clip
        norm: the norm of all gradients is computed before the update; scaled: they are also scaled, in a separate
        pass
    bucket
        bytes of gradients that are exchanged together (bucket_cap_mb of PyTorch's DDP)
    bucket_elements
        elements of gradients that are exchanged together, whatever their format; 0: counted in bytes
    bucket_per_rank
        smallest bucket in elements for each rank that shares out states (Megatron-Core: max(40e6, 1e6 x dp x cp),
        so that each rank's part of a bucket stays large)
    bucket_buffers
        buckets that need memory besides the gradients; 0: buckets are parts of one buffer of all gradients
    unreduced
        the format in which a rank keeps whole gradients where ZeRO-3 sums them up over ranks once a step (FSDP2
        keeps them in that of the reduction)
    flat_copies
        bytes per parameter of flat gradient buffers that are copied after the last backward pass: of all gradients of a
        rank, and of those whose optimizer states the rank owns
    whole_sums
        whether ZeRO-1 and 2 all-reduce whole buckets of gradients instead of reduce-scattering them (DeepSpeed)
    stepwise_updates
        optimizers without a fused kernel: each term of the formula is one pass
    listwise_updates
        optimizers that compute each term of the formula for all tensors at once (PyTorch's foreach), so that the
        roots of the second moments also need memory during the update
    compression_call
        time of the framework for each tensor that is compressed by itself, besides its kernels
    server_call
        time of a parameter server for each tensor that is pushed and pulled (TensorFlow: Li et al., CM-DARE, ICDCS
        2020)
    """

    extra_gradient_accesses: NonNegativeFactor = Field(0.0, alias="accesses")
    flat: StrictBool = False
    accumulated: StrictBool = False
    added: StrictBool = False
    main_gradient_bytes: NonNegativeFactor = Field(0.0, alias="accumulator")
    casts_gradients_before_accumulation: StrictBool = Field(False, alias="accumulator_cast")
    tied: Literal["sum", "slices"] = "sum"
    clip: Literal["none", "norm", "scaled"] = "none"
    bucket: Bytes = 25 * MEBIBYTE
    bucket_elements: NonNegativeFactor = 0.0
    bucket_per_rank: NonNegativeFactor = 0.0
    bucket_buffers: NonNegativeFactor = 2.0
    unreduced: Literal["narrow", "fp32"] = "narrow"
    flat_copies: tuple[NonNegativeFactor, NonNegativeFactor] = (0.0, 0.0)
    whole_sums: StrictBool = False
    stepwise_updates: tuple[NonEmptyText, ...] = ()
    listwise_updates: tuple[NonEmptyText, ...] = ()
    compression_call: Seconds = 0.0
    server_call: Seconds = PARAMETER_SERVER_CALL_TIME


class Overlap(Spec):
    """Communication that the software overlaps with computation.

    Parameters
    ----------
    gradients
        whether gradients are exchanged during the backward pass
    gather
        whether updated shards of parameters are gathered during the next forward pass
    tensor
        whether gathers and scatters over tp run piece by piece during the products before or after them (Wang et
        al., ASPLOS 2023)
    tensor_over_nodes
        whether that also holds where the ranks of tp are not all joined inside one node (NVLink)
    tensor_with_latents
        whether this overlap also exists for networks with latent attention
    experts
        whether tokens are exchanged with experts while the device computes another microbatch (Megatron-Core's
        combined forward and backward passes); left out: only under pipeline schedules that pair passes, such as
        dualpipe
    shared_experts
        whether shared experts, which all tokens visit, run while NCCL exchanges the tokens of the others
        (Megatron-Core's moe_shared_expert_overlap)
    sharded
        whether ZeRO-3 gathers parameters and scatters gradients while the device computes; else the device waits
        for them
    contention
        seconds that computation loses for each second of a collective that runs at the same time: multiprocessors,
        bandwidth, copies into and out of flat buffers
    """

    gradients: StrictBool = True
    gather: StrictBool = False
    tensor: StrictBool = False
    tensor_over_nodes: StrictBool = True
    tensor_with_latents: StrictBool = True
    experts: StrictBool | None = None
    shared_experts: StrictBool = False
    sharded: StrictBool = True
    contention: NonNegativeFactor = 0.0


class Recomputation(Spec):
    """Activation recomputation that the software supports, and what its users usually choose.

    Parameters
    ----------
    policy
        recompute policy that users of the software usually choose
    some_layers
        whether full recomputation can be limited to some layers of a stage
    stops_recompute_early
        whether recomputation of a block stops once its backward pass has what it needs; else it runs to the end
    selective
        what selective recomputation computes again: the core of attention; or all except the core and every second
        matrix product
    """

    policy: RecomputePolicy = "none"
    some_layers: StrictBool = False
    stops_recompute_early: StrictBool = Field(False, alias="stops_early")
    selective: Literal["attention", "products"] = "attention"


class Parallelism(Spec):
    """Rules by which the software divides work, parameters and optimizer states over ranks.

    Parameters
    ----------
    zero
        ZeRO stage that users of the software usually choose
    zero_stages
        ZeRO stages that the software supports; left out: not known, so that a search tries all
    sequence_parallel
        whether users of the software usually combine tp with sequence parallelism
    uses_interleaved_schedule
        whether users of the software usually interleave pipelines, as finely as the layers divide
    schedules
        pipeline schedules that the software supports, an empty list if it has no pipelines; left out: not known, so
        that a search tries all
    stages
        how a pipeline is cut. even: the same number of blocks on each stage; work: equal work on each stage,
        including the output layer
    microbatches
        default number of microbatches of a pipeline: one for each sample of a rank, or one for each stage
    blocking_sends
        whether both stages wait for each send between them, one at a time (DeepSpeed)
    parameter_gathers_in_pipelines
        how often a stage gathers sharded parameters: for every pass, or once a step; with the latter gradients are
        reduced with the last microbatch only, as in ZeRO-1
    pipeline_outputs
        what a stage does with an output that it has sent and from which autograd starts the backward pass: keeps
        it, or frees its data (Megatron-Core's deallocate_pipeline_outputs)
    gather_buffers
        what ZeRO-3 has gathered at a time. sections: two of the largest; root: all that is outside repeated blocks,
        and two blocks, and beside them the flat buffers that they were copied out of (FSDP2)
    gradient_scatters
        how often ZeRO-2 reduces and scatters gradients: after every backward pass (DeepSpeed; FSDP's
        SHARD_GRAD_OP); so without a pipeline only; or once a step, with whole gradients kept on each rank until
        then, as in ZeRO-1
    latents
        tokens whose latent vectors a rank computes in latent attention with sequence parallelism: its own, after
        which latents are gathered; or all, for which the inputs are gathered
    few_key_heads
        key and value heads that are fewer than the ranks of tp. copied: each rank has the weights of a whole head;
        gathered: weights are split, and each rank gathers what all of them make and keeps its part
    whole_tensors
        whether ZeRO-1 assigns whole tensors to ranks, each reduced to its owner and broadcast from there, instead
        of equal shards of flat buffers
    regather
        whether inputs gathered over tp are kept as shards and gathered again for the backward pass
    expert_dispatch
        how tokens are dispatched. nccl: an all-to-all that sends a token to each of its experts; deepep and
        hybridep: a token is sent once to each node (within one node: to each device) that has some of them
        (DeepSeek-V3 technical report, 2024, section 3.2.2)
    expert_tensor
        ranks over which users usually split the tensors of each expert: those of tp; or none, so that experts are
        folded over tp as well
    expert_tokens
        tokens that a rank sends to experts split over tp, with sequence parallelism. own: its own tokens; what
        arrives is gathered over tp and the sums are scattered; all: those of its tp group, for which the inputs of
        the layer are gathered
    """

    zero: Annotated[int, Field(strict=True, ge=0, le=3)] = 0
    zero_stages: tuple[Annotated[int, Field(strict=True, ge=0, le=3)], ...] | None = None
    sequence_parallel: StrictBool = False
    uses_interleaved_schedule: StrictBool = Field(False, alias="interleaves")
    schedules: tuple[NonEmptyText, ...] | None = None
    stages: Literal["even", "work"] = "even"
    microbatches: Literal["samples", "stages"] = "samples"
    blocking_sends: StrictBool = False
    parameter_gathers_in_pipelines: Literal["pass", "step"] = Field("pass", alias="pipeline_gathers")
    pipeline_outputs: Literal["kept", "freed"] = "kept"
    gather_buffers: Literal["sections", "root"] = "sections"
    gradient_scatters: Literal["pass", "pass_without_pipeline", "step"] = "pass"
    latents: Literal["own", "all"] = "all"
    few_key_heads: Literal["copied", "gathered"] = "copied"
    whole_tensors: StrictBool = False
    regather: StrictBool = True
    expert_dispatch: TokenDispatcher = "nccl"
    expert_tensor: Literal["tp", "none"] = "tp"
    expert_tokens: Literal["own", "all"] = "all"


class ProcessMemory(Spec):
    """Device memory of a process besides its tensors.

    Parameters
    ----------
    context
        device memory of a process before its first tensor
    communicator
        device memory that each communicator adds
    fragmentation
        memory that the allocator reserves but does not allocate, as a fraction of allocated memory
        (torch.cuda.max_memory_reserved over max_memory_allocated, less 1)
    """

    context: Bytes = _CUDA_CONTEXT_BYTES
    communicator: Bytes = _COMMUNICATOR_BYTES
    fragmentation: NonNegativeFactor = _FRAGMENTATION_FRACTION


class SampleLoader(Spec):
    """Preparation of training samples on the host by the software.

    Parameters
    ----------
    image
        what a core of the host takes to decode, crop and scale a photograph of 110 kB (ImageNet); 0: that is done
        on the device, or not known
    """

    image: Seconds = 0.0


class Convolutions(Spec):
    """Convolution kernels of the software, and how they are chosen.

    Parameters
    ----------
    cudnn
        version of the library, which decides which algorithms exist
    benchmarks_algorithms
        whether the framework times all algorithms and keeps the fastest; else the library's heuristics choose
    workspace
        largest workspace of one call; left out: no limit
    algorithms
        algorithms of a framework that has its own convolution kernels (those of `paleo.pricing.convolution`)
    image_by_image
        whether the kernels are called once for each image of the batch
    """

    cudnn: Annotated[float, Field(gt=0)] = 9.0
    benchmarks_algorithms: StrictBool = Field(False, alias="searches")
    workspace: Bytes | None = None
    algorithms: tuple[ConvolutionAlgorithm, ...] | None = None
    image_by_image: StrictBool = False


class EarlierReleases(Spec):
    """Fields of a profile, such as ``parallelism.expert_tensor``, that had other values in releases before a date."""

    until: Date
    changes: dict[str, Any]
    source: NonEmptyText


class SoftwareProfile(Spec):
    """Behaviour of a framework's release, in groups of fields: host times, fusion, formats, overlap and so on.

    ``from`` and ``until`` are the dates of the first and last release that the profile describes. ``releases`` dates
    some of the releases. ``earlier`` lists, newest first, what was different before a date (`load_software`).

    Parameters
    ----------
    since
        when the first release that it describes came out
    until
        when releases that it describes were superseded; left out: not yet
    framework
        what its framework can run, an entry of `hardware_specs/frameworks`; left out: not known
    """

    model_config = ConfigDict(populate_by_name=True)

    name: NonEmptyText
    title: NonEmptyText
    since: Date | None = Field(None, alias="from")
    until: Date | None = None
    releases: dict[ReleaseName, Date] = Field(default_factory=dict)
    earlier: tuple[EarlierReleases, ...] = ()
    framework: NonEmptyText | None = None
    host: HostTime
    attention: AttentionSoftware = AttentionSoftware()
    fusion: KernelFusion = KernelFusion()
    formats: NumberFormats = NumberFormats()
    gradients: Gradients = Gradients()
    overlap: Overlap = Overlap()
    recomputation: Recomputation = Recomputation()
    parallelism: Parallelism = Parallelism()
    memory: ProcessMemory = ProcessMemory()
    convolutions: Convolutions = Convolutions()
    loader: SampleLoader = SampleLoader()
    source: NonEmptyText
    notes: str | None = None
    fit: SoftwareFit | None = None

    def with_fields(self, values: Mapping[str, Any]) -> SoftwareProfile:
        """Return a copy of the profile with some fields replaced.

        Parameters
        ----------
        values : dict of str to Any
            Values by dotted field name, such as ``overlap.contention``; they are not validated.

        Returns
        -------
        SoftwareProfile
            Changed copy.

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

    def covers_date(self, date: str) -> bool:
        """Return True if the profile describes releases of a given day, month or year.

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
        >>> load_software("tensorflow2").covers_date("2018-06"), load_software("tensorflow2").covers_date("2021")
        (False, True)
        """
        begins = self.since is None or self.since[: len(date)] <= date[: len(self.since)]
        ends = self.until is None or date[: len(self.until)] <= self.until[: len(date)]
        return begins and ends

    def changes_at_date(self, date: str) -> tuple[EarlierReleases, ...]:
        """Return the field changes that make the profile describe the releases of a date, the newest first.

        Parameters
        ----------
        date : str
            Day, month or year of the release.

        Returns
        -------
        tuple of EarlierReleases
            Entries of ``earlier`` that end after the date.
        """
        return tuple(era for era in self.earlier if date[: len(era.until)] < era.until[: len(date)])

    def release_date(self, version: str) -> str:
        """Return the date of a framework release.

        Parameters
        ----------
        version : str
            Release that the profile lists, month of an NVIDIA container (``24.07``), or a date.

        Returns
        -------
        str
            Day (``2024-06-30``), month or year.

        Raises
        ------
        SpecError
            If the release is unknown or outside the profile's dates.
        """
        container = re.fullmatch(r"(2[0-9])\.([01][0-9])(\.[0-9]+)?", version)
        date = self.releases.get(version) or (f"20{container[1]}-{container[2]}" if container else version)
        known = [*self.releases, *filter(None, (self.since, self.until))]
        if not re.fullmatch(r"20[0-9]{2}(-(0[1-9]|1[0-2])(-(0[1-9]|[12][0-9]|3[01]))?)?", date):
            nearest = suggest_names(version, known)
            raise SpecError(f"software {self.name}: no release {version!r}; {nearest}, or a date (2024-06)")
        if not self.covers_date(date):
            range_of = " ".join(filter(None, (f"from {self.since}", self.until and f"until {self.until}")))
            raise SpecError(f"software {self.name} describes releases {range_of}, not {version!r}")
        return date

    def is_fitted_for(self, architecture: str) -> bool:
        """Return True if numbers of the profile were fitted to steps on devices of an architecture.

        Parameters
        ----------
        architecture : str
            GPU architecture, such as ``Hopper``.

        Returns
        -------
        bool
            True if the fit covers the architecture.
        """
        return self.fit is not None and architecture in self.fit.architectures

    def has_fitted_host_times(self, architecture: str) -> bool:
        """Return True if the host times were fitted to steps on devices of an architecture.

        Parameters
        ----------
        architecture : str
            GPU architecture, such as ``Hopper``.

        Returns
        -------
        bool
            True if the fit covers the architecture; otherwise the host times are assumed.

        Examples
        --------
        >>> names = ("fsdp-composer", "megatron-core", "tensorflow2")
        >>> [load_software(name).has_fitted_host_times("Hopper") for name in names]
        [True, True, False]
        """
        return architecture in self.host.fitted_on or self.is_fitted_for(architecture)

    def attention_slowdown(self, architecture: str) -> float:
        """Return the factor by which the framework's attention is slower than the calibrated attention kernel.

        Parameters
        ----------
        architecture : str
            GPU architecture, such as ``Hopper``.

        Returns
        -------
        float
            Factor on the time; for an architecture without one, the mean of the others.
        """
        known = self.attention.slowdown
        if isinstance(known, float):
            return known
        return known.get(architecture, sum(known.values()) / len(known) if known else 1.0)


def profiles_with_routing_time() -> list[str]:
    """Return the names of profiles whose host time for routing tokens to experts (``host.routing``) is known."""
    return [name for name in entry_names("software") if load_software(name).host.routing > 0]


@cache_by_files
def load_software(name_or_path: str | Path) -> SoftwareProfile:
    """Load a software profile by catalog name or path, or as ``name@release`` or ``name@date``.

    A release is one that the profile lists, or the month of an NVIDIA container (``24.07``).

    Parameters
    ----------
    name_or_path : str | Path
        Name, path or ``name@release``.

    Returns
    -------
    SoftwareProfile
        Profile of the newest release, or of the given release or date.

    Raises
    ------
    SpecError
        If there is no such profile or release.

    Examples
    --------
    >>> [load_software(f"megatron-core{at}").parallelism.expert_tensor for at in ("", "@0.9", "@2024-06", "@25.04")]
    ['none', 'tp', 'tp', 'none']
    """
    name, dated, version = ("", "", "") if is_path(name_or_path) else str(name_or_path).partition("@")
    path, data = read_entry("software", name if dated else name_or_path)
    known = {field.alias or name for name, field in SoftwareProfile.model_fields.items()}
    for key in data:
        if key not in known:
            places = [row.field for row in field_table(SoftwareProfile)]
            raise SpecError(f"{path}: {key}: unknown key; {suggest_names(key, [*known, *places])}")
    newest = validate_mapping(SoftwareProfile, {"name": path.stem, **data}, path)
    eras = newest.changes_at_date(newest.release_date(version)) if dated else ()
    chosen = newest.model_copy(update={"name": f"{path.stem}@{version}"}) if dated else newest
    for era in newest.earlier:
        data = _overlaid(data, era.changes)
        older = validate_mapping(SoftwareProfile, {**data, "name": chosen.name}, path)
        chosen = older if era in eras else chosen
    return chosen


def _overlaid(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping of a profile with some fields replaced, given by dotted names."""
    result = dict(data)
    for path, value in changes.items():
        group, _, field = path.partition(".")
        result[group] = {**result.get(group, {}), field: value} if field else value
    return result


# Tables of a schema's fields, for `paleo show`, the docs and messages


class FieldRow(NamedTuple):
    """One row of a table of a schema's fields: dotted name, unit, default and meaning."""

    field: str
    unit: str
    default: str
    meaning: str


def field_table(schema: type[BaseModel]) -> list[FieldRow]:
    """List the fields of a schema with unit, default and meaning, in the order of their declaration.

    Parameters
    ----------
    schema : type[BaseModel]
        Schema (pydantic model class).

    Returns
    -------
    list of FieldRow
        One row for each field; nested fields have dotted names.
    """
    return list(_rows_of(schema, ""))


def _rows_of(schema: type[BaseModel], prefix: str) -> Iterator[FieldRow]:
    for name, field in schema.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _rows_of(field.annotation, f"{key}.")
        elif field.description:
            unit = _field_unit(field)
            default = "required" if field.is_required() else format_value(field.default, unit)
            yield FieldRow(key, unit, default, field.description)


def _field_unit(field: FieldInfo) -> str:
    """Return the unit of a schema field, from its type.

    Parameters
    ----------
    field : FieldInfo
        Field of a pydantic model.

    Returns
    -------
    str
        For example ``bytes/s``; empty for plain numbers, words and flags.
    """
    inside = (field.annotation, *get_args(field.annotation))
    for dimension, unit in _UNITS.items():
        validator = get_args(dimension)[1]
        if dimension in inside or any(entry is validator for entry in field.metadata):
            return unit
    return ""


def format_value(value: Any, unit: str = "") -> str:
    """Format a field's value as text with its unit.

    Parameters
    ----------
    value : Any
        Value in SI units.
    unit : str, optional
        Unit, as `_field_unit` returns it.

    Returns
    -------
    str
        Text such as ``8 us``; ``-`` for None.

    Examples
    --------
    >>> format_value(8e-06, "time"), format_value(6e9, "bytes/s")
    ('8 us', '6 GB/s')
    >>> format_value(True), format_value(("norm", "softmax")), format_value(None)
    ('true', 'norm, softmax', '-')
    """
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {number:g}" for key, number in value.items())
    if isinstance(value, int | float):
        if unit in ("time", "bytes"):
            return format_duration(value) if unit == "time" else format_gibibytes(value)
        return format_quantity(value, _RATES[unit]) if unit in _RATES else f"{value:g}"
    return str(value)
