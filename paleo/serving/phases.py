"""Seconds of one iteration of an engine: tokens of prompts and tokens that are generated, in the same products.

An iteration computes ``tokens`` = prefilled + decoded tokens in every product and pass, attention of each decoded token
over its cache, attention of the prefilled chunks, collectives, and the head for the sequences that sample. Products,
passes and collectives are priced on a grid of tokens and interpolated; attention is priced by its own formulas
(`paleo.pricing.attention`), on a grid of sequences and cached tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.operations.tensor import precision
from paleo.pricing.attention import (
    DecodeParameters,
    PrefillParameters,
    attention_decode_time,
    attention_prefill_time,
    default_kernel,
)
from paleo.pricing.gemm import GemmParameters
from paleo.pricing.kernels import Calibrated, figures
from paleo.serving.experts import grouped_time
from paleo.serving.formats import WEIGHT_BYTES
from paleo.serving.lowered import Lowered, Scaled, Sharding, lowered
from paleo.units import MICROSECOND

if TYPE_CHECKING:
    from paleo.operations.base import Kernel
    from paleo.serving.formats import Formats
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System
    from paleo.step.backend import Backend

Array = npt.NDArray[np.float64]
Numbers = npt.ArrayLike
#: Tokens of an iteration at which kernels are priced, beyond the largest in proportion.
TOKENS = np.array(
    [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 2**10,
     1280, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384], dtype=np.float64,
)  # fmt: skip
#: Sequences and cached tokens at which attention of one token is priced, and lengths of prefilled chunks.
SEQUENCES = np.array([2.0**power for power in range(13)])
CACHED = np.array([1, 128, 256, 512, 2**10, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144], dtype=np.float64)
CHUNKS = np.array([1, 32, 64, 128, 256, 512, 2**10, 2048, 4096, 8192, 16384, 32768, 65536, 131072], dtype=np.float64)
#: Tokens of a hop between stages whose time is shared out.
HOP_TOKENS = 2.0**10
#: Tokens of the prompts that are prefilled together where their attention is priced.
TOGETHER = 8192.0
#: Share of an NVLink's rate that a kernel reaches which reads its peers' memory, and the latency of a second
#: synchronisation between the halves of a two-step all-reduce over that of the whole call (vLLM's, SGLang's and
#: TensorRT-LLM's kernels on A100 and H100, 64 KiB to 8 MiB).
PEER_SHARE, SECOND_STEP = 0.6, 0.3
#: Bytes that a dynamic conversion to a narrow format moves for each number: two reads in sixteen bits, a write.
CONVERSION_BYTES = 5.0
#: Seconds of a norm that is fused with the sum before it beside its bytes.
FUSED_PASS = 1.0 * MICROSECOND
#: Share of the memory bandwidth that a kernel reaches which streams states or short sequences.
STREAMED_SHARE = 0.8
#: Products of sixteen bits behind weight-only kernels: share of their rate where arithmetic limits them.
DEQUANTISED_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class EngineKernels:
    """What of an engine prices its kernels.

    Attributes
    ----------
    all_reduce : float
        Latency of its own all-reduce between peers [s]; 0 where it has none.
    attention : dict
        Attention kernel by architecture, where it is not the usual one.
    fused_norm : bool
        Whether norms and quantisation are fused with what comes before them, and launched with it.
    encoder_bytes : float
        Bytes of a number between the kernels of an encoder under TensorRT, whose activations run in the epilogue of the
        product before them and whose attention over short sequences takes the time of its bytes; 0 for other engines.
    drafted : int
        Tokens that are drafted for each sequence and verified in one iteration; 0: no speculative decoding.
    acceptance : float
        Probability that a drafted token is accepted where all before it were.
    """

    all_reduce: float = 4.6 * MICROSECOND
    attention: tuple[tuple[str, str], ...] = ()
    fused_norm: bool = True
    encoder_bytes: float = 0.0
    drafted: int = 0
    acceptance: float = 0.0

    @property
    def emitted(self) -> float:
        """Mean tokens that an iteration gives each sequence (Leviathan, Kalman, Matias, ICML 2023, equation 1)."""
        return (1.0 - self.acceptance ** (self.drafted + 1)) / (1.0 - self.acceptance)


@dataclass(frozen=True)
class Phases:
    """Seconds of iterations of one replica under one sharding; see `iteration`.

    Attributes
    ----------
    body, head : numpy.ndarray
        Seconds of all layers and of head and sampling on the grid ``TOKENS``, shape (34,).
    communication : numpy.ndarray
        The part of ``body`` that is collectives, shape (34,).
    decode : numpy.ndarray
        Seconds of all layers' attention of one token a sequence, shape (sequences, cached tokens).
    prefill : numpy.ndarray
        Seconds that a chunk adds, shape (chunk lengths, cached tokens before it).
    prefill_launch : float
        Seconds of starting attention of chunks in all layers.
    state : float
        Seconds that each decoded sequence adds for recurrent states.
    stages : int
        Pipeline stages.
    hop : float
        Seconds in which a token's features pass to the next stage, for each token.
    lowered : Lowered
        One rank's work.
    calibration : str
        Where the prices come from.
    kernels : EngineKernels
        What of the engine decides on them.
    """

    body: Array
    head: Array
    communication: Array
    decode: Array
    prefill: Array
    prefill_launch: float
    state: float
    stages: int
    hop: float
    lowered: Lowered
    sharding: Sharding
    calibration: str
    kernels: EngineKernels = EngineKernels()

    @property
    def rows(self) -> int:
        """Rows of products for each sequence that decodes: a token, and those that are drafted."""
        return self.kernels.drafted + 1

    def speculated(self, sequences: Numbers) -> Array:
        """Return the time that speculation adds to an iteration which gives each sequence one token.

        A draft head of one layer runs once for each drafted token, all are verified at once, and an iteration gives
        ``emitted`` tokens, so that a token takes that part of it. 0 without speculation.

        Parameters
        ----------
        sequences : array_like, shape (...)
            Sequences.

        Returns
        -------
        ndarray, shape (...)
            Seconds.
        """
        number = np.asarray(sequences, dtype=np.float64)
        if self.rows == 1:
            return np.zeros(number.shape)
        layers = max(sum(group.count for group in self.lowered.attention), 1.0)
        verified = self.products(self.rows * number)
        draft = (self.rows - 1) * (self.products(number) / layers + self.sampled(number))
        whole = verified + self.sampled(self.rows * number) + draft
        return np.asarray(np.where(number > 0, whole / self.kernels.emitted - verified - self.sampled(number), 0.0))

    def products(self, tokens: Numbers) -> Array:
        """Return the time of an iteration without attention and head.

        Parameters
        ----------
        tokens : array_like, shape (...)
            Tokens of the iteration.

        Returns
        -------
        ndarray, shape (...)
            Seconds.
        """
        return _extended(np.asarray(tokens, dtype=np.float64), TOKENS, self.body)

    def sampled(self, sequences: Numbers) -> Array:
        """Return the time of head and sampling.

        Parameters
        ----------
        sequences : array_like, shape (...)
            Sequences that sample a token.

        Returns
        -------
        ndarray, shape (...)
            Seconds.
        """
        number = np.asarray(sequences, dtype=np.float64)
        return np.where(number > 0, _extended(np.maximum(number, 1.0), TOKENS, self.head), 0.0)

    def decoding(self, sequences: Numbers, cached: Numbers) -> Array:
        """Return the time of attention of one new token for each sequence.

        Parameters
        ----------
        sequences : array_like, shape (...)
            Sequences.
        cached : array_like, shape (...)
            Tokens in the cache of each.

        Returns
        -------
        ndarray, shape (...)
            Seconds.
        """
        number, length = np.broadcast_arrays(
            np.asarray(sequences, dtype=np.float64), np.asarray(cached, dtype=np.float64)
        )
        share = np.minimum(number, 1.0)  # a fraction of a sequence is there for a share of the time
        each = bilinear(np.maximum(number, 1.0), length, SEQUENCES, CACHED, self.decode)
        return np.asarray((share * each + number * self.state) / self.kernels.emitted)

    def prefilling(self, chunks: Numbers, length: Numbers, cached: Numbers = 0.0) -> Array:
        """Return the time of attention of chunks of prompts.

        Parameters
        ----------
        chunks : array_like, shape (...)
            Number of chunks.
        length : array_like, shape (...)
            Tokens of each chunk.
        cached : array_like, shape (...), optional
            Tokens before each chunk.

        Returns
        -------
        ndarray, shape (...)
            Seconds.
        """
        number, tokens, before = np.broadcast_arrays(
            *(np.asarray(each, dtype=np.float64) for each in (chunks, length, cached))
        )
        each = bilinear(np.maximum(tokens, 1.0), before, CHUNKS, np.append(0.0, CACHED[1:]), self.prefill)
        return np.asarray(number * each + np.minimum(number, 1.0) * self.prefill_launch)

    def iteration(
        self, *, decoded: Numbers, cached: Numbers, chunks: Numbers = 0.0, length: Numbers = 1.0, before: Numbers = 0.0,
        finished: Numbers | None = None,
    ) -> Array:  # fmt: skip
        """Return the seconds in which one batch passes through all layers of a replica.

        Parameters
        ----------
        decoded, cached : array_like
            Sequences that generate a token, and the tokens in the cache of each.
        chunks, length, before : array_like
            Pieces of prompts, tokens of each, and tokens of the same prompt that are cached already.
        finished : array_like, optional
            Pieces that end a prompt and so sample; all of them by default.

        Returns
        -------
        numpy.ndarray
            Seconds; shapes are broadcast. With ``attention_dp`` all counts are those of the whole replica, its ranks
            taken as equally full; with a pipeline those of one of the batches that are under way.
        """
        ranks = float(self.sharding.attention_dp)
        share, pieces = np.asarray(decoded, dtype=np.float64) / ranks, np.asarray(chunks, dtype=np.float64) / ranks
        tokens = self.rows * share + pieces * np.asarray(length, dtype=np.float64)
        ends = pieces if finished is None else np.asarray(finished, dtype=np.float64) / ranks
        seconds = self.products(tokens) + self.sampled(share + ends)
        seconds = seconds + self.decoding(share, cached) + self.prefilling(pieces, length, before)
        seconds = seconds + self.speculated(share)
        return np.asarray(seconds + (self.stages - 1) * self.hop * tokens)


def _extended(points: Array, grid: Array, values: Array) -> Array:
    """Linear interpolation; beyond the grid in proportion, before it constant."""
    inside = np.interp(points, grid, values)
    return np.asarray(np.where(points > grid[-1], values[-1] * points / grid[-1], inside))


def bilinear(x: Array, y: Array, xs: Array, ys: Array, table: Array) -> Array:
    """Interpolate a table; beyond its ends the last slopes continue.

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
        Values.

    Returns
    -------
    ndarray, shape (...)
        Values.

    Examples
    --------
    >>> table = np.array([[1.0, 3.0], [2.0, 4.0]])
    >>> float(bilinear(np.array(1.5), np.array(3.0), np.array([1.0, 2.0]), np.array([2.0, 4.0]), table))
    2.5
    """
    i = np.clip(np.searchsorted(xs, x, side="right") - 1, 0, len(xs) - 2)
    j = np.clip(np.searchsorted(ys, y, side="right") - 1, 0, len(ys) - 2)
    u, v = (x - xs[i]) / (xs[i + 1] - xs[i]), (y - ys[j]) / (ys[j + 1] - ys[j])
    low = table[i, j] * (1 - v) + table[i, j + 1] * v
    high = table[i + 1, j] * (1 - v) + table[i + 1, j + 1] * v
    return np.asarray(low * (1 - u) + high * u)


def phases(
    model: ModelSpec, system: System, sharding: Sharding, formats: Formats, kernels: EngineKernels | None = None
) -> Phases:
    """Price the phases of a served network.

    Parameters
    ----------
    model, system : ModelSpec, System
        Network and machine.
    sharding : Sharding
        Division of one replica.
    formats : Formats
        Formats of weights and cache.
    kernels : EngineKernels, optional
        What of the engine decides on its kernels.

    Raises
    ------
    PlanError, SpecError
        The network cannot be divided so, or the device lacks a format.
    """
    engine = kernels or EngineKernels()
    work, backend = lowered(model, system, sharding, formats.arithmetic(system.device))
    pricing = _Pricing(work, backend, sharding, formats, engine)
    body, exchanges = pricing.products(work.layers), pricing.exchanges()
    head = pricing.products(work.head)
    return Phases(
        body=body + exchanges,
        head=head + pricing.reduced(work.head_exchanges),
        communication=exchanges,
        decode=pricing.decode(),
        prefill=pricing.prefill(),
        prefill_launch=pricing.prefill_launch(),
        state=pricing.state(),
        stages=sharding.pp,
        hop=pricing.hop(),
        lowered=work,
        sharding=sharding,
        calibration=backend.prices.name,
        kernels=engine,
    )


def _routing(kernels: list[Kernel]) -> npt.NDArray[np.bool_]:
    """Passes that bring tokens to experts and back, and their activation."""
    ends = (".dispatch", ".combine", ".expert.act")
    return np.array([kernel.family == "memory" and kernel.name.endswith(ends) for kernel in kernels])


def _converted(kernel: Kernel) -> float:
    """Numbers of activations that a narrow product reads; 0 for other kernels."""
    if kernel.family != "gemm" or kernel.operation != "narrow":
        return 0.0
    return kernel.shape["m"] * kernel.shape["k"] * kernel.shape["batch"]


@dataclass(frozen=True, slots=True)
class _Pricing:
    """Prices of one sharding on the grids."""

    work: Lowered
    backend: Backend
    sharding: Sharding
    formats: Formats
    engine: EngineKernels

    def products(self, kernels: tuple[Scaled, ...]) -> Array:
        """Seconds of kernels on the grid of tokens, summed."""
        groups: dict[object, tuple[Scaled, float]] = {}
        for each in kernels:
            key = (each.short.family, each.short.operation, each.of_experts, *sorted(each.long.shape.items()))
            key = (*key, each.short.bytes, each.long.bytes)
            kept, count = groups.get(key, (each, 0.0))
            groups[key] = kept, count + each.count
        listed = list(groups.values())
        if not listed:
            return np.zeros(len(TOKENS))
        priced = [self._at(each, tokens) for each, _ in listed for tokens in TOKENS]
        seconds = self._seconds(priced, [each for each, _ in listed for _ in TOKENS]).reshape(len(listed), -1)
        return np.asarray(np.array([count for _, count in listed]) @ seconds)

    def _at(self, each: Scaled, tokens: float) -> Kernel:
        """A kernel for so many tokens of a rank; experts also work for those of the other ranks of attention, and only
        experts that a token hits are read."""
        if not each.of_experts:
            return each.at(tokens)
        kernel = each.at(tokens * self.sharding.attention_dp)
        shape = dict(kernel.shape)
        group = self.sharding.group
        if self.sharding.expert_parallel and group > 1:
            inner = "k" if shape["n"] >= self.work.hidden else "n"
            shape |= {"batch": shape["batch"] / group, inner: shape[inner] * self.sharding.tp}
        elif self.sharding.attention_dp > 1:
            inner = "k" if shape["n"] >= self.work.hidden else "n"
            shape[inner] /= self.sharding.attention_dp
        rows = shape["m"]
        hit = shape["batch"] * -np.expm1(-rows)
        return replace(kernel, shape=shape | {"m": rows * shape["batch"] / hit, "batch": hit})

    def _seconds(self, kernels: list[Kernel], scaled: list[Scaled]) -> Array:
        """Seconds of kernels, as a captured graph runs them."""
        seconds = self.backend.prices.times(kernels).total.copy()
        if not isinstance(self.backend.prices, Calibrated):
            return seconds
        seconds = np.maximum(seconds - self._quantisation(kernels), self._least(kernels))
        if self.engine.fused_norm:
            seconds -= self._fused_launches(kernels)
        if self._weight_only:
            seconds = self._dequantised(kernels, scaled, seconds)
        seconds = self._grouped(kernels, scaled, np.maximum(seconds, MICROSECOND))
        fused = (".quantise", ".largest") * self.engine.fused_norm + (".act",) * (self.engine.encoder_bytes > 0)
        merged = np.array([kernel.family == "memory" and kernel.name.endswith(fused) for kernel in kernels])
        if self.engine.encoder_bytes:
            seconds *= [self.engine.encoder_bytes / 2.0 if kernel.family == "memory" else 1.0 for kernel in kernels]
        return np.where(merged | _routing(kernels), 0.0, seconds)

    def _least(self, kernels: list[Kernel]) -> Array:
        """Seconds of narrow products at the share of the peak that their main loop reaches, by their own fit."""
        families, device = self.backend.prices.families, self.backend.system.device  # type: ignore[attr-defined]
        if not precision(families.dtype).narrow:
            return np.zeros(len(kernels))
        share = families.parameters_of(GemmParameters, f"gemm.{families.dtype}").parameters.efficiency
        flops = np.array([kernel.flops if kernel.operation == "narrow" else 0.0 for kernel in kernels])
        return np.asarray(flops / (share * device.peak_flops_per_s(families.dtype)))

    def _grouped(self, kernels: list[Kernel], scaled: list[Scaled], seconds: Array) -> Array:
        """Seconds with those of experts' products replaced; the passes that route tokens are part of these."""
        chosen = [index for index, each in enumerate(scaled) if each.of_experts]
        if not chosen:
            return seconds
        device = self.backend.system.device
        rows, outer, inner, experts = (
            np.array([kernels[i].shape[name] for i in chosen]) for name in ("m", "n", "k", "batch")
        )
        result = seconds.copy()
        result[chosen] = grouped_time(
            rows=rows, inner=inner, outer=outer, experts=experts, weight_bytes=self.formats.weight_bytes,
            peak=device.peak_flops_per_s(self.formats.arithmetic(device)), bandwidth=device.memory.bandwidth,
        )  # fmt: skip
        return result

    def _quantisation(self, kernels: list[Kernel]) -> Array:
        """Seconds in the prices of narrow products that are not theirs: rows of their calibration hold the search for
        the largest activation, the conversion, and launches of both (TensorRT-LLM's linear layer with dynamic scales),
        which engines fuse with the norm or the activation before the product."""
        families = self.backend.prices.families  # type: ignore[attr-defined]
        if not precision(families.dtype).narrow:
            return np.zeros(len(kernels))
        launches = [
            families.parameters_of(GemmParameters, f"gemm.{name}").parameters.launch
            for name in (families.dtype, "tensor")
        ]
        launch, bandwidth = max(launches[0] - launches[1], 0.0), 0.9 * self.backend.system.device.memory.bandwidth
        rows = np.array([_converted(kernel) for kernel in kernels])
        return np.where(rows > 0, launch + CONVERSION_BYTES * rows / bandwidth, 0.0)

    def _fused_launches(self, kernels: list[Kernel]) -> Array:
        """Norms that run in the kernel of the sum before them: a launch and the bytes that they read are not paid."""
        norms = [index for index, kernel in enumerate(kernels) if kernel.operation == "norm"]
        saved = np.zeros(len(kernels))
        if norms:
            alone = self.backend.prices.times([kernels[index] for index in norms]).total
            launch = float(alone.min())
            saved[norms] = launch + 0.5 * (alone - launch) - FUSED_PASS
        return saved

    @property
    def _weight_only(self) -> bool:
        narrow = WEIGHT_BYTES[self.formats.weights] < 2.0
        return narrow and not precision(self.backend.prices.families.dtype).narrow  # type: ignore[attr-defined]

    def _dequantised(self, kernels: list[Kernel], scaled: list[Scaled], seconds: Array) -> Array:
        """Products whose weights are read narrow and multiplied in sixteen bits: those of as many bytes, and no faster
        than their arithmetic."""
        ratio = self.formats.weight_bytes / 2.0
        chosen = [
            index
            for index, each in enumerate(scaled)
            if each.weights and not each.of_experts and not self.formats.experts_only and "head" not in each.short.name
        ]
        if not chosen:
            return seconds
        smaller = [replace(kernels[i], shape={**kernels[i].shape, "k": kernels[i].shape["k"] * ratio}) for i in chosen]
        large = [replace(kernels[i], shape={**kernels[i].shape, "m": TOKENS[-1]}) for i in chosen]
        read = self.backend.prices.times(smaller).total
        rows = np.array([kernels[i].shape["m"] for i in chosen]) / TOKENS[-1]
        arithmetic = self.backend.prices.times(large).total * rows / DEQUANTISED_SHARE
        result = seconds.copy()
        result[chosen] = np.maximum(read, arithmetic)
        return result

    def reduced(self, exchanges: tuple[object, ...]) -> Array:
        """Seconds of collectives over tp on the grid of tokens."""
        total = np.zeros(len(TOKENS))
        if self.sharding.tp == 1:
            return total
        for each in exchanges:
            total = total + each.count * self._collective(each.operation, each.payload_bytes * TOKENS)  # type: ignore[attr-defined]
        return total

    def exchanges(self) -> Array:
        """Seconds of all collectives of the layers on the grid of tokens: sums over tp; with attention_dp tokens are
        gathered for the experts and their results summed and scattered."""
        total = self.reduced(self.work.exchanges)
        ranks = self.sharding.attention_dp
        if ranks > 1:
            width = self.backend.formats.activation
            payload = self.work.hidden * width * TOKENS * ranks
            each = sum(self._group_time(name, payload, ranks) for name in ("all_gather", "reduce_scatter"))
            total = total + self.work.mixture_layers * np.asarray(each)
        return total

    def _collective(self, operation: str, payload: Array) -> Array:
        library = self._group_time(operation, payload, self.sharding.tp)
        if operation != "all_reduce" or not self._peers:
            return library
        return np.minimum(library, self._peer_sum(payload))

    def _group_time(self, operation: str, payload: Array, ranks: int) -> Array:
        ones = np.ones(len(payload), dtype=np.int64)
        return self.backend.fabric.times(operation, ones, ranks * ones, np.asarray(payload, dtype=np.float64))

    @property
    def _peers(self) -> bool:
        """Whether the ranks reach each other's memory, so that the engine sums by its own kernel."""
        system, links = self.backend.system, self.backend.system.device.interconnect
        joined = links is not None and links.kind == "nvlink"
        return joined and self.engine.all_reduce > 0 and self.sharding.tp <= min(8, system.devices_per_node)

    def _peer_sum(self, payload: Array) -> Array:
        """Every rank reads all of its peers' buffers, or a share of each and then the sums."""
        links, ranks = self.backend.system.device.interconnect, self.sharding.tp
        assert links is not None
        rate, latency = PEER_SHARE * links.bandwidth, self.engine.all_reduce
        once = latency + (ranks - 1) * payload / rate
        twice = latency * (1.0 + SECOND_STEP) + 2.0 * (ranks - 1) / ranks * payload / rate
        return np.minimum(once, twice)

    def hop(self) -> float:
        """Seconds a token to the next stage of a pipeline."""
        if self.sharding.pp == 1:
            return 0.0
        payload = np.array([self.work.hidden * self.backend.formats.activation * HOP_TOKENS])
        stride = np.array([self.sharding.tp], dtype=np.int64)
        seconds = self.backend.fabric.times("send_recv", stride, np.array([2], dtype=np.int64), payload)
        return float(seconds[0]) / HOP_TOKENS

    def _kernel(self) -> str:
        device = self.backend.system.device
        named = [name for word, name in self.engine.attention if device.architecture.startswith(word)]
        return named[0] if named else default_kernel(device.architecture, device.memory.kind)

    def decode(self) -> Array:
        """Seconds of attention of one token on the grid of sequences and cached tokens."""
        total = np.zeros((len(SEQUENCES), len(CACHED)))
        for group in self.work.attention:
            heads, dim, width = group.kv_heads, group.head_dim, self.formats.cache_bytes
            if group.latent:  # queries of all heads over one vector, which is key and value
                heads, dim, width = 1.0, group.latent, width / 2.0
            total += group.count * attention_decode_time(
                batch=SEQUENCES[:, None], query_heads=group.query_heads, kv_heads=heads, kv_length=CACHED[None, :],
                head_dim=dim, kernel_name=self._kernel(), window=group.window, element_bytes=width,
                **self._device("decode"),
            )  # fmt: skip
        return total

    def _prefill_time(self, batch: Array, length: Array, before: Array) -> Array:
        total = np.zeros(np.broadcast(length, before).shape)
        width = self.engine.encoder_bytes / (STREAMED_SHARE * self.backend.system.device.memory.bandwidth)
        for group in self.work.attention:
            if width:
                numbers = 2.0 * (group.query_heads + group.kv_heads) * group.head_dim * batch * length
                total += group.count * width * numbers
                continue
            total += group.count * attention_prefill_time(
                batch=batch, query_heads=group.query_heads, kv_heads=group.kv_heads, query_length=length,
                kv_length=length + before, head_dim=group.head_dim, causal=group.causal, kernel_name=self._kernel(),
                window=group.window, element_bytes=2.0, paged=True, sustained=1.0, activity=self._activity(),
                **self._device("prefill"),
            )  # fmt: skip
        return total

    def prefill(self) -> Array:
        """Seconds that a chunk adds to others on the grid of lengths and tokens before it."""
        lengths, before = CHUNKS[:, None], np.append(0.0, CACHED[1:])[None, :]
        batch = np.maximum(TOGETHER / lengths, 1.0)
        whole = self._prefill_time(batch, lengths, before)
        return np.maximum(whole - self.prefill_launch(), 0.0) / batch

    def prefill_launch(self) -> float:
        """Seconds of attention of a chunk of one token."""
        if not self.work.attention:
            return 0.0
        single = np.ones((1, 1))
        return float(self._prefill_time(single, single, 0.0 * single)[0, 0])

    def _activity(self) -> float:
        device = self.backend.system.device
        tensor = figures(device, device.training_dtype).tensor_cores
        families = getattr(self.backend.prices, "families", None)
        if families is None:
            return 1.0
        entry = families.parameters_of(GemmParameters, "gemm.tensor" if tensor else "gemm.simt")
        return float(entry.parameters.training_activity)

    def _device(self, phase: str) -> dict[str, Any]:
        """Device and parameters of attention."""
        device = self.backend.system.device
        families = getattr(self.backend.prices, "families", None)
        if families is None:
            raise SpecError("serving needs calibrated attention: --calibration auto or a file")
        kind = DecodeParameters if phase == "decode" else PrefillParameters
        entry = families.parameters_of(kind, f"attention.{self._kernel()}.{phase}")
        return {"device": figures(device, device.training_dtype), "parameters": entry.parameters}

    def state(self) -> float:
        """Seconds in which the states of one sequence are read and written, in fp32."""
        moved = 2.0 * 4.0 * self.work.states
        return moved / (STREAMED_SHARE * self.backend.system.device.memory.bandwidth)
