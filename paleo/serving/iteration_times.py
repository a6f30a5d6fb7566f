"""Time of one iteration of an inference engine, in which prefill and decode tokens share the GEMMs.

Each GEMM and memory pass of an iteration computes ``tokens`` = prefill + decode tokens. The iteration also has the
attention of each decode token over its KV cache, the attention of prefill chunks, collectives, and the output head for
sequences that sample a token.

Times of GEMMs, memory passes and collectives are tabulated over tokens and interpolated. Attention has separate
formulas (`paleo.pricing.attention`), tabulated over sequences and cached tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.operations.tensor import default_precision
from paleo.pricing.attention import (
    DecodeParameters,
    PrefillParameters,
    attention_decode_time,
    attention_prefill_time,
    default_attention_kernel,
)
from paleo.pricing.engine_gemm import CACHED_LATENT_DIM as LATENT_CACHED
from paleo.pricing.engine_gemm import (
    DECODE_BLOCK_ROWS,
    TRITON_DECODE_BLOCK_ROWS,
    EngineGemmParameters,
    LatentAttentionParameters,
    latent_attention_time,
    low_precision_gemm_time,
)
from paleo.pricing.experts import TUNED_BLOCK_SCALED_TILES, expert_ffn_time, expert_gemm_tiles
from paleo.pricing.gemm import GemmParameters
from paleo.pricing.kernels import KernelFamilyPredictor, device_datasheet
from paleo.pricing.power import power_slowdown, relative_training_energy
from paleo.serving.formats import has_block_scales
from paleo.serving.forward_lowering import (
    MANY_TOKENS,
    AttentionLayers,
    LoweredForward,
    Sharding,
    TokenCollective,
    TokenScaledKernel,
    lower_forward,
)
from paleo.units import MEBIBYTE, MICROSECOND

if TYPE_CHECKING:
    from paleo.operations.base import Kernel
    from paleo.serving.formats import Formats
    from paleo.specs.device import Device
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System
    from paleo.step.backend import Backend

Array = npt.NDArray[np.float64]
Numbers = float | npt.NDArray[np.float64]
#: Tokens of an iteration at which kernels are priced, beyond the largest in proportion.
TOKEN_GRID = np.array(
    [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 2**10,
     1280, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384], dtype=np.float64,
)  # fmt: skip
#: Sequences and cached tokens at which attention of one token is priced, and lengths of prefilled chunks.
_SEQUENCE_GRID = np.array([2.0**power for power in range(13)])
CACHED_TOKEN_GRID = np.array(
    [1, 128, 256, 512, 2**10, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144], dtype=np.float64
)
CHUNK_LENGTH_GRID = np.array(
    [1, 32, 64, 128, 256, 512, 2**10, 2048, 4096, 8192, 16384, 32768, 65536, 131072], dtype=np.float64
)
#: Tokens of a hop between stages whose time is shared out.
_STAGE_TRANSFER_TOKENS = 2.0**10
#: Tokens of the prompts that are prefilled together where their attention is priced.
_PREFILL_BATCH_TOKENS = 8192.0
#: Share of an NVLink's rate that a kernel reaches which reads its peers' memory, and the latency of a second
#: synchronisation between the halves of a two-step all-reduce over that of the whole call (vLLM's, SGLang's and
#: TensorRT-LLM's kernels on A100 and H100, 64 KiB to 8 MiB).
_NVLINK_PEER_READ_SHARE, _TWO_SHOT_EXTRA_LATENCY = 0.6, 0.3
#: Bytes that a dynamic conversion to a narrow format moves for each number: two reads in sixteen bits, a write.
_QUANTISATION_BYTES_PER_ELEMENT = 5.0
#: Share of it that is the search for the largest activation, which scales of tokens and blocks do not need: one of two
#: kernels, and one of the reads.
_AMAX_PASS_SHARE = 0.5
#: Seconds of a norm that is fused with the sum before it beside its bytes.
_FUSED_NORM_FIXED_TIME = 1.0 * MICROSECOND
#: Share of the memory bandwidth that a kernel reaches which streams states or short sequences.
_STREAMING_BANDWIDTH_SHARE = 0.8
#: Exponent of the popularity of experts: between equal loads and the least uneven ones (1.01) of the timed kernels.
EXPERT_POPULARITY_EXPONENT = 0.5
#: Kernels of a layer's experts (order of the tokens, conversion, two products, activation, sum of the visits),
#: and of its attention (write of the cache, attention, combination of its parts).
_KERNELS_PER_MIXTURE_LAYER, _KERNELS_PER_ATTENTION_LAYER = 6, 3
#: Passes that all engines join with the next one: residual sums with norms, the rotation of keys with that of queries.
_FUSED_PASS_SUFFIXES = (".add", ".key.rotated")
#: Ranks from which on an engine captures graphs of more sequences.
_WIDE_GRAPH_MIN_RANKS = 4
#: Products of sixteen bits behind weight-only kernels: share of their rate where arithmetic limits them.
_WEIGHT_ONLY_RATE_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class EngineKernels:
    """Properties of an engine that determine the times of its kernels.

    Attributes
    ----------
    all_reduce_latency : float
        Latency of the engine's own all-reduce kernel over NVLink [s]; 0 if it has none.
    all_reduce_max_bytes : float
        Payload from which on the engine leaves all-reduces to NCCL [byte].
    attention_kernels : tuple
        (architecture, attention kernel) pairs, for architectures with another kernel than the usual one.
    expert_kernels : tuple
        (architecture, grouped-GEMM kernel of experts) pairs; the first that matches counts.
    weight_only_expert_kernels : tuple
        The same for experts with narrow weights and 16-bit activations.
    mla_library : str
        Library of the kernels of latent attention (MLA) and of products whose weights have scales per block.
    joint_attention : bool
        True if one call computes attention of all tokens of an iteration. If prompts are among them, FlashAttention-2
        reads the cache of a decoding sequence once for each query head: mha_varlen_fwd packs the heads of a group only
        if no sequence has more than one query.
    fused_norm : bool
        True if norms and quantisation are fused with the operation before them, without a separate launch.
    has_quantisation_kernel : bool
        True if a separate kernel quantises activations to fp8, with scales per token or block. Otherwise scales are
        static, and the kernel before the GEMM converts. Activations in NVFP4 always have such a kernel.
    encoder_element_bytes : float
        Bytes per element between the kernels of an encoder under TensorRT; 0 for other engines. There activation
        functions run in the epilogue of the GEMM before, and attention over short sequences is memory-bound.
    drafted_tokens : int
        Positions after a sequence's last token for which a draft head proposes tokens; 0: no speculative decoding.
    acceptance : float
        Probability (0 to 1) that a drafted token is accepted if all drafted tokens before it were.
    branches : int
        Tokens drafted per position: 1 is a chain, more a tree.
    verified_tokens : int
        Tokens of each sequence that an iteration verifies, including its last token; 0: those of a chain.
    draft_vocabulary : float
        Size of the draft head's vocabulary [tokens]; 0: that of the network.
    kernel_launch_time : float
        Host time to launch one kernel of an iteration without CUDA graph [s].
    largest_graph, wide_graph : int
        Largest number of sequences of a captured CUDA graph of decode, and the same with tp of 4 or more (0: equal).
    """

    all_reduce_latency: float = 4.6 * MICROSECOND
    all_reduce_max_bytes: float = 8.0 * MEBIBYTE
    attention_kernels: tuple[tuple[str, str], ...] = ()
    expert_kernels: tuple[tuple[str, str], ...] = ()
    weight_only_expert_kernels: tuple[tuple[str, str], ...] = ()
    mla_library: str = "trtllm"
    joint_attention: bool = False
    fused_norm: bool = True
    has_quantisation_kernel: bool = False
    encoder_element_bytes: float = 0.0
    drafted_tokens: int = 0
    acceptance: float = 0.0
    branches: int = 1
    verified_tokens: int = 0
    draft_vocabulary: float = 0.0
    kernel_launch_time: float = 0.0
    largest_graph: int = 0
    wide_graph: int = 0

    @property
    def mean_emitted_tokens(self) -> float:
        """Mean number of tokens that an iteration adds to a sequence under speculative decoding; 1 without drafts.

        Reference: Leviathan, Kalman, Matias, ICML 2023, eq. 1.
        """
        return (1.0 - self.acceptance ** (self.drafted_tokens + 1)) / (1.0 - self.acceptance)


@dataclass(frozen=True)
class IterationTables:
    """Tables of iteration times of one replica under one sharding; `iteration_time` combines them.

    Attributes
    ----------
    layer_times, head_times : numpy.ndarray
        Time of all layers, and of output head and sampling, at each number of tokens in ``TOKEN_GRID`` [s], shape
        (34,).
    collective_times : numpy.ndarray
        Part of ``layer_times`` that is collectives [s], shape (34,).
    decode_attention_times : numpy.ndarray
        Attention time of decoding one token per sequence, all layers [s], shape (sequences, cached tokens).
    joint_attention_times : numpy.ndarray
        Attention time as in ``decode_attention_times``, in iterations that also have prompts [s].
    prefill_attention_times : numpy.ndarray
        Attention time that a prefill chunk adds [s], shape (chunk lengths, cached tokens before it).
    prefill_fixed_time : float
        Time of launching attention of chunks in all layers [s].
    state_time_per_sequence : float
        Time that each decoding sequence adds for recurrent states [s].
    stage_transfer_time : float
        Time in which a token's features pass to the next pipeline stage [s].
    launch_time : float
        Time in which the host launches all kernels of an iteration without CUDA graph [s].
    lowered : LoweredForward
        Kernels and collectives of one rank.
    calibration : str
        Source of the calibrated parameters of the times.
    kernels : EngineKernels
        Properties of the engine that determine the times.
    """

    layer_times: Array
    head_times: Array
    collective_times: Array
    decode_attention_times: Array
    joint_attention_times: Array
    prefill_attention_times: Array
    prefill_fixed_time: float
    state_time_per_sequence: float
    stage_transfer_time: float
    launch_time: float
    lowered: LoweredForward
    sharding: Sharding
    calibration: str
    kernels: EngineKernels = EngineKernels()

    @property
    def largest_graph(self) -> int:
        """Largest number of sequences of a rank that decode in a captured CUDA graph."""
        wide = self.sharding.expert_group_size >= _WIDE_GRAPH_MIN_RANKS and self.kernels.wide_graph
        return wide or self.kernels.largest_graph

    @property
    def rows_per_sequence(self) -> int:
        """GEMM rows per decoding sequence: one token, plus the drafted tokens that are verified."""
        return max(self.kernels.verified_tokens, self.kernels.drafted_tokens + 1)

    def speculation_time(self, sequences: Numbers) -> Array:
        """Return the time that speculative decoding adds to an iteration, per token that a sequence gets.

        A draft head of one layer runs once per drafted position, on all branches after the first position. Then all
        drafted tokens are verified together. The time of the iteration is divided by the ``mean_emitted_tokens`` tokens
        that each sequence gets. The result is 0 without speculative decoding.

        Parameters
        ----------
        sequences : array_like, shape (...)
            Number of decoding sequences.

        Returns
        -------
        ndarray, shape (...)
            Time [s].
        """
        number = np.asarray(sequences, dtype=np.float64)
        if self.rows_per_sequence == 1:
            return np.zeros(number.shape)
        verified, places = self.non_attention_time(self.rows_per_sequence * number), self.kernels.drafted_tokens
        draft = self._drafting(number) + (places - 1) * self._drafting(self.kernels.branches * number)
        whole = verified + self.sampling_time(self.rows_per_sequence * number) + draft
        added = whole / self.kernels.mean_emitted_tokens - verified - self.sampling_time(number)
        return np.asarray(np.where(number > 0, added, 0.0))

    def _drafting(self, tokens: Array) -> Array:
        """Return the time of one pass of a draft head [s]: one layer, and an output head over the draft vocabulary."""
        layers = max(sum(group.count for group in self.lowered.attention), 1.0)
        vocabulary = max(self.lowered.local_vocabulary_size * self.sharding.tp, 1.0)
        known = min(self.kernels.draft_vocabulary or vocabulary, vocabulary) / vocabulary
        return self.non_attention_time(tokens) / layers + known * self.sampling_time(tokens)

    def non_attention_time(self, tokens: Numbers) -> Array:
        """Return the time of an iteration without attention and output head (GEMMs, norms, collectives).

        Parameters
        ----------
        tokens : array_like, shape (...)
            Number of tokens of the iteration.

        Returns
        -------
        ndarray, shape (...)
            Time [s].
        """
        return _extended(tokens, self.layer_times)

    def sampling_time(self, sequences: Numbers) -> Array:
        """Return the time of the output head and of sampling in an iteration.

        Parameters
        ----------
        sequences : array_like, shape (...)
            Number of sequences that sample a token.

        Returns
        -------
        ndarray, shape (...)
            Time [s].
        """
        return np.where(np.asarray(sequences) > 0, _extended(np.maximum(sequences, 1.0), self.head_times), 0.0)

    def decode_attention_time(self, sequences: Numbers, cached: Numbers, *, joint: bool = False) -> Array:
        """Return the attention time of one decode token per sequence, over all layers.

        Parameters
        ----------
        sequences : array_like, shape (...)
            Number of decoding sequences.
        cached : array_like, shape (...)
            Tokens in the KV cache of each sequence.
        joint : bool, optional
            True if prompts are in the same iteration.

        Returns
        -------
        ndarray, shape (...)
            Time [s].
        """
        number, length = np.broadcast_arrays(sequences, cached)
        share = np.minimum(number, 1.0)  # a fraction of a sequence is there for a share of the time
        table = self.joint_attention_times if joint else self.decode_attention_times
        each = _interpolate_bilinearly(np.maximum(number, 1.0), length, _SEQUENCE_GRID, CACHED_TOKEN_GRID, table)
        return np.asarray((share * each + number * self.state_time_per_sequence) / self.kernels.mean_emitted_tokens)

    def prefill_attention_time(self, chunks: Numbers, length: Numbers, cached: Numbers = 0.0) -> Array:
        """Return the attention time of prefill chunks, over all layers.

        Parameters
        ----------
        chunks : array_like, shape (...)
            Number of chunks.
        length : array_like, shape (...)
            Tokens of each chunk.
        cached : array_like, shape (...), optional
            Cached tokens of the same prompt before each chunk.

        Returns
        -------
        ndarray, shape (...)
            Time [s].
        """
        number, tokens, before = np.broadcast_arrays(chunks, length, cached)
        table, cached_before = self.prefill_attention_times, np.append(0.0, CACHED_TOKEN_GRID[1:])
        each = _interpolate_bilinearly(np.maximum(tokens, 1.0), before, CHUNK_LENGTH_GRID, cached_before, table)
        return np.asarray(number * each + np.minimum(number, 1.0) * self.prefill_fixed_time)

    def iteration_time(
        self, *, decoded: Numbers, cached: Numbers, chunks: Numbers = 0.0, length: Numbers = 1.0, before: Numbers = 0.0,
        finished: Numbers | None = None,
    ) -> Array:  # fmt: skip
        """Return the time of one engine iteration: one forward pass of the running batch.

        Parameters
        ----------
        decoded, cached : array_like
            Number of sequences that decode a token, and tokens in the KV cache of each.
        chunks, length, before : array_like
            Number of prefill chunks, tokens of each, and cached tokens of the same prompt before each.
        finished : array_like, optional
            Number of chunks that end a prompt and sample a token; all chunks by default.

        Returns
        -------
        numpy.ndarray
            Time [s]; shapes are broadcast. With ``attention_dp`` all counts are those of the whole replica, whose ranks
            have equal loads. With a pipeline they are those of one of the batches in flight.
        """
        ranks = float(self.sharding.attention_dp)
        share, pieces = decoded / ranks, chunks / ranks
        tokens = self.rows_per_sequence * share + pieces * length
        ends = pieces if finished is None else finished / ranks
        seconds, decoding = self.non_attention_time(tokens), self.decode_attention_time(share, cached)
        seconds = seconds + self.sampling_time(share + ends) + self.prefill_attention_time(pieces, length, before)
        seconds = seconds + decoding
        if self.joint_attention_times is not self.decode_attention_times:
            added = self.decode_attention_time(share, cached, joint=True) - decoding
            seconds = seconds + np.minimum(chunks, 1.0) * added
        seconds = seconds + self.speculation_time(share) + (self.sharding.pp - 1) * self.stage_transfer_time * tokens
        captured = np.equal(pieces, 0.0) & np.less_equal(share, self.largest_graph)
        return np.asarray(np.where(captured, seconds, np.maximum(seconds, self.launch_time)))


def _extended(tokens: Numbers, values: Array) -> Array:
    """Interpolate a table over `TOKEN_GRID`; above the grid values grow in proportion, below it they are constant."""
    inside, most = np.interp(tokens, TOKEN_GRID, values), TOKEN_GRID[-1]
    return np.asarray(np.where(tokens > most, values[-1] * tokens / most, inside))


def _interpolate_bilinearly(x: Array, y: Array, xs: Array, ys: Array, table: Array) -> Array:
    """Interpolate a two-dimensional table bilinearly; beyond its ends the last slopes continue.

    Parameters
    ----------
    x : ndarray, shape (...)
        First coordinate.
    y : ndarray, shape (...)
        Second coordinate.
    xs : ndarray, shape (n,)
        First coordinates of the table, rising.
    ys : ndarray, shape (m,)
        Second coordinates of the table, rising.
    table : ndarray, shape (n, m)
        Values at the grid points.

    Returns
    -------
    ndarray, shape (...)
        Interpolated values.

    Examples
    --------
    >>> table = np.array([[1.0, 3.0], [2.0, 4.0]])
    >>> float(_interpolate_bilinearly(np.array(1.5), np.array(3.0), np.array([1.0, 2.0]), np.array([2.0, 4.0]), table))
    2.5
    """
    i = np.clip(np.searchsorted(xs, x, side="right") - 1, 0, len(xs) - 2)
    j = np.clip(np.searchsorted(ys, y, side="right") - 1, 0, len(ys) - 2)
    u, v = (x - xs[i]) / (xs[i + 1] - xs[i]), (y - ys[j]) / (ys[j + 1] - ys[j])
    low = table[i, j] * (1 - v) + table[i, j + 1] * v
    high = table[i + 1, j] * (1 - v) + table[i + 1, j + 1] * v
    return np.asarray(low * (1 - u) + high * u)


def iteration_tables(
    model: ModelSpec, system: System, sharding: Sharding, formats: Formats, kernels: EngineKernels | None = None
) -> IterationTables:
    """Compute the tables of iteration times (prefill and decode) of one replica of an inference engine.

    Parameters
    ----------
    model, system : ModelSpec, System
        Network and machine.
    sharding : Sharding
        Parallel degrees of a replica.
    formats : Formats
        Number formats of weights and KV cache.
    kernels : EngineKernels, optional
        Properties of the engine that determine the times of its kernels.

    Returns
    -------
    IterationTables
        Tables of times [s] over tokens, sequences and cached tokens.

    Raises
    ------
    PlanError, SpecError
        If the network cannot be divided by the sharding, or the device lacks a format.
    """
    engine = kernels or EngineKernels()
    work, backend = lower_forward(model, system, sharding, formats.arithmetic_format(system.device))
    pricing = _TableBuilder(work, backend, sharding, formats, engine, has_block_scales(model, formats.weight_format))
    exchanges, decode = pricing.layer_collective_times(), pricing.decode_attention_times()
    joint = engine.joint_attention and pricing.reads_cache_per_query_head
    return IterationTables(
        layer_times=pricing.kernel_times(work.layers) + exchanges,
        head_times=pricing.kernel_times(work.head_kernels) + pricing.tensor_collective_times(work.head_collectives),
        collective_times=exchanges,
        decode_attention_times=decode,
        joint_attention_times=pricing.joint_attention_times() if joint else decode,
        prefill_attention_times=pricing.prefill_attention_times(),
        prefill_fixed_time=pricing.prefill_fixed_time(),
        state_time_per_sequence=pricing.recurrent_state_time(),
        stage_transfer_time=pricing.stage_transfer_time(),
        launch_time=engine.kernel_launch_time * pricing.launch_count(),
        lowered=work,
        sharding=sharding,
        calibration=backend.predictor.name,
        kernels=engine,
    )


def _of_architecture(names: tuple[tuple[str, str], ...], device: Device) -> str | None:
    return next((name for word, name in names if device.architecture.startswith(word)), None)


def _routing(kernels: list[Kernel]) -> npt.NDArray[np.bool_]:
    """Return a mask of the kernels that dispatch tokens to experts and combine them, or are experts' activations.

    Their time is part of the time of the experts.
    """
    ends = (".dispatch", ".combine", ".expert.act")
    return np.array([kernel.family == "memory" and kernel.name.endswith(ends) for kernel in kernels])


def _converted(kernel: Kernel) -> float:
    """Return the number of activations that a GEMM in fp8 or fp4 reads and that must be quantised; else 0."""
    if kernel.family != "gemm" or kernel.operation != "narrow":
        return 0.0
    return kernel.shape["m"] * kernel.shape["k"] * kernel.shape["batch"]


@dataclass(frozen=True, slots=True)
class _TableBuilder:
    """Builder of `IterationTables`: times of kernels and collectives over tokens, sequences and cached tokens."""

    work: LoweredForward
    backend: Backend
    sharding: Sharding
    formats: Formats
    engine: EngineKernels
    block_scales: bool = False

    @property
    def device(self) -> Device:
        """Device of the machine."""
        return self.backend.system.device

    def parameters(self, kind: type[Any], family: str) -> Any:
        """Return the calibrated parameters of a kernel family on the device."""
        return self._families.parameters_of(kind, family).parameters

    def kernel_times(self, kernels: tuple[TokenScaledKernel, ...]) -> Array:
        """Compute the summed times of kernels at each number of tokens in `TOKEN_GRID`.

        Parameters
        ----------
        kernels : tuple of TokenScaledKernel
            Kernels of a forward pass, each with its count.

        Returns
        -------
        ndarray, shape (34,)
            Time [s].
        """
        groups: dict[object, tuple[TokenScaledKernel, float]] = {}
        for each in kernels:
            few, many = each.kernel_at_few_tokens, each.kernel_at_many_tokens
            if not each.is_expert_gemm:
                sizes = (*sorted(many.shape.items()), few.bytes, many.bytes)
                key = (few.family, few.operation, each.is_shared_expert, *sizes)
                kept, count = groups.get(key, (each, 0.0))
                groups[key] = kept, count + each.count
        experts, listed = self._experts(kernels), [each for each, _ in groups.values()]
        if not listed:
            return experts
        priced = [each.kernel_at(tokens) for each in listed for tokens in TOKEN_GRID]
        seconds = self._seconds(priced, [each for each in listed for _ in TOKEN_GRID]).reshape(len(listed), -1)
        counts = np.array([count for _, count in groups.values()])
        return np.asarray(counts @ self._beside(listed, seconds) + experts)

    def _beside(self, kernels: list[TokenScaledKernel], seconds: Array) -> Array:
        """Return kernel times [s] in which shared experts overlap with the routed experts.

        ``seconds`` has shape (kernels, tokens). Shared experts add only the time of their weights' bytes and their
        arithmetic, no latency. They run on a second stream in vLLM and TensorRT-LLM, and as one more routed expert in
        SGLang (``num_fused_shared_experts`` of its deepseek_v2.py).
        """
        shared = np.array([each.is_shared_expert for each in kernels])
        weights = np.array([each.weight_elements for each in kernels]) * shared * self.formats.weight_bytes
        saved = np.maximum(seconds[:, 0] - weights / self._streaming_bandwidth, 0.0)
        return np.asarray(seconds - (saved * shared)[:, None])

    def _experts(self, kernels: tuple[TokenScaledKernel, ...]) -> Array:
        """Return the time of the experts of all layers, with dispatch, at each number of tokens in `TOKEN_GRID` [s]."""
        chosen = [each for each in kernels if each.is_expert_gemm]
        total, ones, ranks = np.zeros(len(TOKEN_GRID)), np.ones(len(TOKEN_GRID)), self.sharding.attention_dp
        group = float(self.sharding.expert_group_size)
        slices, places = (1.0, group) if self.sharding.expert_parallel else (group, 1.0)
        for up, down in zip(chosen[::2], chosen[1::2], strict=True):
            first, second = up.kernel_at_many_tokens.shape, down.kernel_at_many_tokens.shape
            top_k, gated = first["m"] * first["batch"] / MANY_TOKENS, first["n"] / second["k"] - 1.0
            seconds = expert_ffn_time(
                tokens=TOKEN_GRID * ranks, hidden=ones * first["k"], inner=ones * second["k"] * self.sharding.tp,
                top_k=ones * top_k, experts=ones * first["batch"], tp=ones * slices, ep=ones * places,
                gated=ones * gated, exponent=ones * EXPERT_POPULARITY_EXPONENT,
                element_bytes=self.formats.expert_formats.weight_bytes,
                **self._grouped(TOKEN_GRID * ranks, ones * first["batch"] / places),
            )  # fmt: skip
            width = second["k"] * self.sharding.tp / slices
            flops = 2.0 * TOKEN_GRID * ranks * top_k / places * (2.0 + gated) * first["k"] * width
            total = total + up.count * self._sustained(seconds, flops)
        return total

    def _sustained(self, seconds: Array, flops: Array) -> Array:
        """Return times of expert GEMMs at the clock that the power limit allows under long load [s].

        Calibration measures short runs at a higher clock. ``seconds`` and ``flops`` are time and FLOP at that clock.
        """
        device, families = self.device, self._families
        dtype = self.formats.expert_formats.arithmetic_format(device)
        family = f"gemm.{dtype}" if default_precision(dtype).quantises_operands else "gemm.tensor"
        products, card = self.parameters(GemmParameters, family), device_datasheet(device, dtype)
        activity = relative_training_energy(products.training_energy_ratio, dtype, card, families.user_calibration)
        factor = power_slowdown(
            busy=seconds, flops=flops, dram=0.0, energy=products.energy_per_flop, activity=activity, device=card
        )
        return np.asarray(seconds * factor)

    def _grouped(self, tokens: Array, local: Array) -> dict[str, Any]:
        """Return device, parameters and tiles of the engine's grouped-GEMM kernel, as keyword arguments of a formula.

        In fp8, weights have scales per block in SGLang's Triton kernel and in networks that are published with them.
        Marlin computes experts like dense GEMMs, at a share of the rate of 16 bits; its other parameters are CUTLASS's.
        """
        device, dtype = self.device, self.formats.expert_formats.arithmetic_format(self.device)
        packed = self.formats.expert_format is not None and not default_precision(dtype).quantises_operands
        kernel = _of_architecture(self.engine.expert_kernels, device) or "cutlass"
        if packed:
            kernel = _of_architecture(self.engine.weight_only_expert_kernels, device) or kernel
        blocks = kernel == "triton-sglang" or self.block_scales
        if blocks and kernel == "cutlass" and dtype == "fp8" and device.architecture.startswith("Blackwell"):
            kernel = "deepgemm"
        name = {"fp8": "block8" if blocks else "tensor8", "fp4": "block4"}.get(dtype, "bf16")
        family = f"experts.{'cutlass' if kernel == 'marlin' else kernel}.{name}"
        parameters = self.parameters(EngineGemmParameters, family)
        if packed and kernel in ("cutlass", "marlin"):
            dense = kernel == "marlin" and self.parameters(GemmParameters, "gemm.tensor")
            parameters = replace(parameters, efficiency=_WEIGHT_ONLY_RATE_SHARE * (dense or parameters).efficiency)
        triton = "triton" in kernel
        tiles = TUNED_BLOCK_SCALED_TILES if triton and name == "block8" else expert_gemm_tiles(family, tokens, local)
        return {"device": device_datasheet(device, dtype), "parameters": parameters, "tiles": tiles, "triton": triton}

    def _seconds(self, kernels: list[Kernel], scaled: list[TokenScaledKernel]) -> Array:
        """Return the times of kernels of an iteration inside a CUDA graph, as the engine fuses and quantises them [s].

        ``scaled`` are the kernels' sources, which hold their weights, in the same order.
        """
        seconds = self.backend.predictor.times(kernels).device_time.copy()
        seconds = np.maximum(seconds - self._quantisation(kernels), self._gemm_lower_bound(kernels))
        if self.engine.fused_norm:
            seconds -= self._fused_launches(kernels)
        if self._weight_only:
            seconds = self._dequantised(kernels, scaled, seconds)
        seconds = np.maximum(seconds, np.maximum(self._block_scaled_gemm_time(kernels), MICROSECOND))
        width = self.engine.encoder_element_bytes
        if width:
            seconds *= [width / 2.0 if kernel.family == "memory" else 1.0 for kernel in kernels]
        return np.where(self._merged(kernels) | _routing(kernels), 0.0, seconds)

    def _merged(self, kernels: list[Kernel]) -> npt.NDArray[np.bool_]:
        """Return a mask of the memory passes that the engine fuses into the kernel before them."""
        fused = (".quantise", ".largest") * self.engine.fused_norm + (".act",) * (self.engine.encoder_element_bytes > 0)
        return np.array([kernel.family == "memory" and kernel.name.endswith(fused) for kernel in kernels])

    def _block_scaled_gemm_time(self, kernels: list[Kernel]) -> Array:
        """Return the times of fp8 GEMMs whose weights have a scale per block [s]; 0 for other kernels.

        vLLM has separate kernels, SGLang and TensorRT-LLM run DeepGEMM. The caller takes these times as lower bounds,
        since scales per block make no kernel faster than scales per tensor.
        """
        seconds = np.zeros(len(kernels))
        chosen = [place for place, kernel in enumerate(kernels) if kernel.operation == "narrow"] * self.block_scales
        if not chosen or not default_precision(self._families.dtype).quantises_operands:
            return seconds
        library = "vllm" if self.engine.mla_library == "vllm" else "trtllm"
        shapes = [kernels[i].shape for i in chosen]
        m, n, k, batch = (np.array([float(shape[name]) for shape in shapes]) for name in ("m", "n", "k", "batch"))
        seconds[chosen] = batch * low_precision_gemm_time(
            m=m, n=n, k=k, element_bytes=1.0, device=device_datasheet(self.device, "fp8"),
            parameters=self.parameters(EngineGemmParameters, f"narrow.block8.{library}"),
        )  # fmt: skip
        return seconds

    def _gemm_lower_bound(self, kernels: list[Kernel]) -> Array:
        """Return a lower bound of the times of GEMMs in fp8 or fp4 [s]; 0 for other kernels.

        The bound is FLOP over the fraction of peak that the main loop of the kernel reaches.
        """
        families, device = self._families, self.device
        if not default_precision(families.dtype).quantises_operands:
            return np.zeros(len(kernels))
        share = self.parameters(GemmParameters, f"gemm.{families.dtype}").efficiency
        flops = np.array([kernel.flops if kernel.operation == "narrow" else 0.0 for kernel in kernels])
        return np.asarray(flops / (share * device.peak_flops_per_s(families.dtype)))

    def _quantisation(self, kernels: list[Kernel]) -> Array:
        """Return the part of calibrated fp8 and fp4 GEMM times that is the quantisation of activations [s].

        The calibration was measured with TensorRT-LLM's linear layer with dynamic scales. Its rows include the search
        for the largest activation, the conversion, and the launches of both. Engines fuse these with the norm or the
        activation before the GEMM. A conversion to NVFP4, with a scale for each 16 numbers, is a separate kernel in
        every engine (fp4_quantize in TensorRT-LLM 1.0, tensorrt_llm/_torch/modules/linear.py).
        """
        families = self._families
        if not default_precision(families.dtype).quantises_operands:
            return np.zeros(len(kernels))
        names = families.dtype, "tensor"
        narrow, wide = (self.parameters(GemmParameters, f"gemm.{name}").launch_time for name in names)
        launch, bandwidth = max(narrow - wide, 0.0), 0.9 * self.device.memory.bandwidth
        rows = np.array([_converted(kernel) for kernel in kernels])
        apart = self.engine.has_quantisation_kernel or self.block_scales or families.dtype == "fp4"
        share = _AMAX_PASS_SHARE if apart else 1.0
        return np.where(rows > 0, share * (launch + _QUANTISATION_BYTES_PER_ELEMENT * rows / bandwidth), 0.0)

    def _fused_launches(self, kernels: list[Kernel]) -> Array:
        """Return the time that each norm saves by fusion with the residual sum before it: a launch and a read [s]."""
        norms = [index for index, kernel in enumerate(kernels) if kernel.operation == "norm"]
        saved = np.zeros(len(kernels))
        if norms:
            alone = self.backend.predictor.times([kernels[index] for index in norms]).device_time
            launch = float(alone.min())
            saved[norms] = launch + 0.5 * (alone - launch) - _FUSED_NORM_FIXED_TIME
        return saved

    @property
    def _weight_only(self) -> bool:
        return self.formats.weight_bytes < 2.0 and not default_precision(self._families.dtype).quantises_operands

    def _dequantised(self, kernels: list[Kernel], scaled: list[TokenScaledKernel], seconds: Array) -> Array:
        """Return kernel times with GEMMs replaced by weight-only quantised ones, whose arithmetic is in 16 bits [s].

        A weight-only GEMM takes as long as a 16-bit GEMM that reads as many bytes, and at least the time of its 16-bit
        arithmetic.
        """
        ratio = self.formats.weight_bytes / 2.0
        chosen = [index for index, each in enumerate(scaled) if each.weight_elements and "head" not in each.name]
        if not chosen:
            return seconds
        smaller = [replace(kernels[i], shape={**kernels[i].shape, "k": kernels[i].shape["k"] * ratio}) for i in chosen]
        large = [replace(kernels[i], shape={**kernels[i].shape, "m": TOKEN_GRID[-1]}) for i in chosen]
        read = self.backend.predictor.times(smaller).device_time
        rows = np.array([kernels[i].shape["m"] for i in chosen]) / TOKEN_GRID[-1]
        arithmetic = self.backend.predictor.times(large).device_time * rows / _WEIGHT_ONLY_RATE_SHARE
        result = seconds.copy()
        result[chosen] = np.maximum(read, arithmetic)
        return result

    def tensor_collective_times(self, exchanges: tuple[TokenCollective, ...]) -> Array:
        """Compute the summed time of collectives over tensor-parallel ranks, at each number of tokens in `TOKEN_GRID`.

        Parameters
        ----------
        exchanges : tuple of TokenCollective
            Collectives of a forward pass, each with its count and its bytes per token [byte].

        Returns
        -------
        ndarray, shape (34,)
            Time [s]; zero without tensor parallelism.
        """
        total = np.zeros(len(TOKEN_GRID))
        for each in exchanges if self.sharding.tp > 1 else ():
            total = total + each.count * self._collective(each.operation, each.bytes_per_token * TOKEN_GRID)
        return total

    def layer_collective_times(self) -> Array:
        """Return the time of all collectives of the layers, at each number of tokens in `TOKEN_GRID` [s].

        The collectives are all-reduces over tensor-parallel ranks. With attention data parallelism, tokens are also
        all-gathered for the experts and reduce-scattered after them.
        """
        total = self.tensor_collective_times(self.work.layer_collectives)
        ranks = self.sharding.attention_dp
        if ranks > 1:
            width = self.backend.formats.activation_bytes
            payload = self.work.hidden_size * width * TOKEN_GRID * ranks
            each = sum(self._group_time(name, payload, ranks) for name in ("all_gather", "reduce_scatter"))
            total = total + self.work.mixture_layer_count * np.asarray(each)
        return total

    def _collective(self, operation: str, payload: Array) -> Array:
        library = self._group_time(operation, payload, self.sharding.tp)
        if operation != "all_reduce" or not self._peers:
            return library
        direct = np.minimum(library, self._peer_sum(payload))
        return np.where(payload < self.engine.all_reduce_max_bytes, direct, library)

    def _group_time(self, operation: str, payload: Array, ranks: int) -> Array:
        ones = np.ones(len(payload), dtype=np.int64)
        return self.backend.fabric.collective_times(operation, ones, ranks * ones, payload)

    @property
    def _peers(self) -> bool:
        """True if ranks can read each other's memory over NVLink, as the engine's custom all-reduce kernel needs."""
        links, most = self.device.interconnect, min(8, self.backend.system.devices_per_node)
        joined = links is not None and links.kind == "nvlink"
        return joined and self.engine.all_reduce_latency > 0 and self.sharding.tp <= most

    def _peer_sum(self, payload: Array) -> Array:
        """Return the time of a custom all-reduce kernel over NVLink [s]: the faster of one-shot and two-shot.

        ``payload`` [byte] may have any shape.
        """
        links, ranks = self.device.interconnect, self.sharding.tp
        assert links is not None
        rate, latency = _NVLINK_PEER_READ_SHARE * links.bandwidth, self.engine.all_reduce_latency
        once = latency + (ranks - 1) * payload / rate
        twice = latency * (1.0 + _TWO_SHOT_EXTRA_LATENCY) + 2.0 * (ranks - 1) / ranks * payload / rate
        return np.minimum(once, twice)

    def stage_transfer_time(self) -> float:
        """Return the time to send one token to the next pipeline stage [s]."""
        if self.sharding.pp == 1:
            return 0.0
        payload = np.array([self.work.hidden_size * self.backend.formats.activation_bytes * _STAGE_TRANSFER_TOKENS])
        stride = np.array([self.sharding.tp], dtype=np.int64)
        seconds = self.backend.fabric.collective_times("send_recv", stride, np.array([2], dtype=np.int64), payload)
        return float(seconds[0]) / _STAGE_TRANSFER_TOKENS

    @property
    def _families(self) -> KernelFamilyPredictor:
        if not isinstance(self.backend.predictor, KernelFamilyPredictor):
            raise SpecError("serving needs calibrated kernels: --calibration auto or a file")
        return self.backend.predictor

    @property
    def _streaming_bandwidth(self) -> float:
        return _STREAMING_BANDWIDTH_SHARE * self.device.memory.bandwidth

    def _kernel(self) -> str:
        named = _of_architecture(self.engine.attention_kernels, self.device)
        return named or default_attention_kernel(self.device.architecture, self.device.memory.kind)

    def decode_attention_times(self) -> Array:
        """Return the attention time of one decode token per sequence, over sequences and cached tokens [s].

        The shape is (sequences, cached tokens), those of `_SEQUENCE_GRID` and `CACHED_TOKEN_GRID`.
        """
        total = np.zeros((len(_SEQUENCE_GRID), len(CACHED_TOKEN_GRID)))
        for group in self.work.attention:
            if group.latent_elements == LATENT_CACHED:
                total += self._latent_time(group, _SEQUENCE_GRID[:, None], 1.0, CACHED_TOKEN_GRID[None, :], single=True)
                continue
            heads, dim, width = group.kv_heads, group.head_dim, self.formats.cache_bytes
            if group.latent_elements:  # queries of all heads over one vector, which is key and value
                heads, dim, width = 1.0, group.latent_elements, width / 2.0
            total += group.count * attention_decode_time(
                batch=_SEQUENCE_GRID[:, None], query_heads=group.query_heads, kv_heads=heads,
                kv_length=CACHED_TOKEN_GRID[None, :],
                head_dim=dim, kernel_name=self._kernel(), window=group.window, element_bytes=width,
                **self._device("decode"),
            )  # fmt: skip
        return total

    def _latent_time(
        self, group: AttentionLayers, batch: Array, queries: Numbers, keys: Array, *, single: bool
    ) -> Array:
        """Return the time of latent attention (MLA) in a group of layers [s].

        ``single`` is True for decode tokens, False for prompts. ``queries`` and ``keys`` are tokens per sequence.
        """
        width = self.formats.cache_bytes
        # SGLang's prompts have keys of their own on Hopper, for vLLM's FlashAttention-3; its timed rows have latents
        own_keys = self.engine.mla_library == "sglang" and self._kernel() == "fa3" and not single
        library = "vllm" if own_keys else self.engine.mla_library
        name = f"latent.{library}.{'token' if single else 'prompt'}{8 if width == 1.0 else 16}"
        rows = TRITON_DECODE_BLOCK_ROWS if self._triton else DECODE_BLOCK_ROWS
        shape = np.broadcast(batch, queries, keys).shape
        ones = np.ones(shape)
        seconds = latent_attention_time(
            heads=group.query_heads * ones, batch=batch * ones, queries=np.asarray(queries) * ones, keys=keys * ones,
            single=np.full(shape, single), cache_bytes=width * ones, token_rows=rows * ones,
            device=device_datasheet(self.device, self.device.training_dtype),
            parameters=self.parameters(LatentAttentionParameters, name),
        )  # fmt: skip
        return np.asarray(group.count * seconds)

    @property
    def _triton(self) -> bool:
        """True if latent attention and attention sinks run in Triton: vLLM has CUDA kernels for them from Hopper on."""
        return self.engine.mla_library == "vllm" and self.device.architecture == "Ampere"

    def _prefill_time(self, batch: Array, length: Array, before: Array) -> Array:
        total = np.zeros(np.broadcast(length, before).shape)
        width = self.engine.encoder_element_bytes / self._streaming_bandwidth
        for group in self.work.attention:
            if width:
                numbers = 2.0 * (group.query_heads + group.kv_heads) * group.head_dim * batch * length
                total += group.count * width * numbers
                continue
            if group.latent_elements == LATENT_CACHED:
                total += self._latent_time(group, batch, length, length + before, single=False)
                continue
            total += group.count * attention_prefill_time(
                batch=batch, query_heads=group.query_heads, kv_heads=group.kv_heads, query_length=length,
                kv_length=length + before, head_dim=group.head_dim, causal=group.causal, kernel_name=self._kernel(),
                window=group.window, element_bytes=2.0, paged=True, sustained=1.0, activity=self._activity(),
                **self._device("prefill"),
            )  # fmt: skip
        return total

    @property
    def reads_cache_per_query_head(self) -> bool:
        """True if decode attention in an iteration with prompts reads the KV cache once for each query head.

        FlashAttention-2 does so, unless latent attention or attention sinks need another kernel.
        """
        latent = any(group.latent_elements for group in self.work.attention)
        return self._kernel() == "fa2" and not self._sinks and not latent

    @property
    def _sinks(self) -> bool:
        return any(each.name.endswith(".sinks") for each in self.work.layers)

    def joint_attention_times(self) -> Array:
        """Return the attention time of one decode token per sequence in iterations that also have prompts [s].

        The shape is (sequences, cached tokens), those of `_SEQUENCE_GRID` and `CACHED_TOKEN_GRID`.
        """
        single = np.ones((len(_SEQUENCE_GRID), 1))
        return self._prefill_time(_SEQUENCE_GRID[:, None], single, CACHED_TOKEN_GRID[None, :] - 1.0)

    def prefill_attention_times(self) -> Array:
        """Return the attention time that each prefill chunk adds to an iteration [s].

        The shape is (chunk lengths, cached tokens before the chunk).
        """
        lengths, before = CHUNK_LENGTH_GRID[:, None], np.append(0.0, CACHED_TOKEN_GRID[1:])[None, :]
        batch = np.maximum(_PREFILL_BATCH_TOKENS / lengths, 1.0)
        whole = self._prefill_time(batch, lengths, before)
        return np.maximum(whole - self.prefill_fixed_time(), 0.0) / batch

    def prefill_fixed_time(self) -> float:
        """Return the fixed attention time of prefill in an iteration [s]: that of a one-token chunk in all layers."""
        if not self.work.attention:
            return 0.0
        single = np.ones((1, 1))
        return float(self._prefill_time(single, single, 0.0 * single)[0, 0])

    def _activity(self) -> float:
        tensor = device_datasheet(self.device, self.device.training_dtype).tensor_cores
        family = "gemm.tensor" if tensor else "gemm.simt"
        return float(self.parameters(GemmParameters, family).training_energy_ratio)

    def _device(self, phase: str) -> dict[str, Any]:
        """Return device and calibrated attention parameters for ``prefill`` or ``decode``, as keyword arguments.

        With an fp8 cache both attention GEMMs are in fp8 where the kernel has them, as queries are quantised, too
        (FlashAttention-3, trtllm-gen; FlashAttention-2 computes in 16 bits). The Triton kernel for attention sinks has
        blocks of 16 rows like the one for latent attention, whose measured rate is used.
        """
        device, kernel = self.device, self._kernel()
        kind: type[Any] = DecodeParameters if phase == "decode" else PrefillParameters
        parameters = self.parameters(kind, f"attention.{kernel}.{phase}")
        narrow = self.formats.cache_format == "fp8" and "fp8" in device.peak and kernel != "fa2"
        dtype = "fp8" if narrow else device.training_dtype
        if phase == "prefill" and self._sinks and self._triton:
            blocks = self.parameters(LatentAttentionParameters, "latent.vllm.token16")
            parameters = replace(parameters, mma_efficiency=blocks.efficiency)
        return {"device": device_datasheet(device, dtype), "parameters": parameters}

    def launch_count(self) -> float:
        """Return the number of kernels that the host launches for all layers of an iteration without CUDA graph."""
        dense = [each for each in self.work.layers if not each.is_expert_gemm]
        scaled = [each for each in dense if not each.name.endswith(_FUSED_PASS_SUFFIXES)]
        kernels = [each.kernel_at_few_tokens for each in scaled]
        narrow = np.array([kernel.operation == "narrow" for kernel in kernels])
        converted = narrow & (self.engine.has_quantisation_kernel or self.block_scales)
        separate = ~(_routing(kernels) | self._merged(kernels))
        number = float(((1.0 + converted) * separate) @ [each.count for each in scaled])
        number += _KERNELS_PER_ATTENTION_LAYER * sum(group.count for group in self.work.attention)
        number += sum(each.count for each in self.work.layer_collectives) * (self.sharding.tp > 1)
        return number + _KERNELS_PER_MIXTURE_LAYER * self.work.mixture_layer_count

    def recurrent_state_time(self) -> float:
        """Return the memory time of the recurrent states of one sequence, read and written in fp32 [s]."""
        return 2.0 * 4.0 * self.work.state_elements / self._streaming_bandwidth
