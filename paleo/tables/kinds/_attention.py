"""Tables of measured attention kernels: fused attention, and sparse attention over selected keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.pricing.attention import (
    ATTENTION_KERNELS,
    DecodeParameters,
    PrefillParameters,
    attention_decode_time,
    attention_prefill_time,
    default_attention_kernel,
)
from paleo.pricing.kernels import DeviceDatasheet
from paleo.pricing.power import WHOLE_L2_SURVIVAL_SHARE, energy_per_flop, l2_surviving_share
from paleo.pricing.sparse_attention import (
    MIN_COMPUTED_HEADS,
    SparseAttentionParameters,
    SparseWork,
    sparse_attention_time,
)
from paleo.tables.base import column_set, parse_column_names
from paleo.tables.cells import (
    Array,
    map_text_columns,
    mapped_column,
    number_column,
    number_columns,
    parse_release,
    text_column,
    true_cells,
    word_mask,
)
from paleo.tables.kernels import (
    KERNEL_TABLES,
    FitSettings,
    FitTarget,
    KernelTable,
    apply_per_row,
    first_reasons,
    timing_methods,
    unsupported_reason,
)

# Attention over selected keys as engines run it: whole layers of a rank, and their parts


class _SparseAttentionSizes(NamedTuple):
    """Sizes of a network's sparse attention (each query attends to selected keys), as in its config.json.

    ``hidden`` is the model width and ``q_rank`` the rank of the compressed queries. ``query_dim`` and ``value_dim`` are
    the entries per head of queries and values. ``index_heads`` is the number of heads of the indexer, ``top_k`` the
    number of keys that each query selects. ``heads`` counts all attention heads, ``output_groups`` the groups of the
    output projection.
    """

    hidden: float
    q_rank: float
    query_dim: float
    value_dim: float
    index_heads: float
    top_k: float
    heads: float
    output_groups: float = 0.0


#: Networks by a part of their name.
_SPARSE_SIZES_OF_NETWORK = {
    "V3.2": _SparseAttentionSizes(7168, 1536, 192, 128, 64, 2048, 128),
    "GLM-5": _SparseAttentionSizes(6144, 2048, 256, 256, 32, 2048, 64),
    "V4-Flash": _SparseAttentionSizes(4096, 2**10, 512, 512, 64, 512, 64, 8),
    "V4-Pro": _SparseAttentionSizes(7168, 1536, 512, 512, 64, 2**10, 128, 16),
    "M3": _SparseAttentionSizes(6144, 0, 128, 128, 4, 2048, 64),
}
#: Entries of a latent with its rotated part, of one without, of an indexer's key; rank of the output groups; key heads
#: of MiniMax M3; positions of the window of DeepSeek-V4, and those that an entry of each kind stands for.
_LATENT_WITH_ROPE_DIM, _LATENT_DIM, _INDEXER_KEY_DIM = 576.0, 512.0, 128.0
_OUTPUT_GROUP_RANK, _MINIMAX_KEY_HEADS, _SLIDING_WINDOW_TOKENS = 2.0**10, 4.0, 128.0
_POSITIONS_PER_ENTRY = {"csa": 4.0, "hca": 128.0}
#: Bytes of a weight.
_BYTES_PER_WEIGHT = {"fp8_block": 1.0, "bfloat16": 2.0, "nvfp4": 0.5625}
#: Weight of a prediction above a measured time where most rows hold a compilation, so that the fast rows tell.
_OVERESTIMATE_WEIGHT_WITH_COMPILATION = 3.0
#: Parameters that a part of a layer does not have.
_LAUNCHES_BY_WEIGHTS = ("fp8_launch_time", "fp4_launch_time", "indexer_launch_time", "dense_launch_time")
_UNDETERMINED_SPARSE_PARAMETERS = {
    "module": (),
    "attention": (
        "projection_peak_share", "indexer_peak_share", "selection_bandwidth_share", "search_picoseconds_per_key",
        "search_start_time", "cycles_per_key", "picoseconds_per_pair", *_LAUNCHES_BY_WEIGHTS,
    ),
    "indexer_logits": (
        "projection_peak_share", "attention_peak_share", "fp8_cache_attention_peak_share", "pass_bandwidth_share",
        "search_picoseconds_per_key", "search_start_time", "time_per_sequence", "fp8_cache_launch_time",
        *_LAUNCHES_BY_WEIGHTS,
    ),
    "topk": (
        "projection_peak_share", "bandwidth_share", "attention_peak_share", "fp8_cache_attention_peak_share",
        "indexer_peak_share", "pass_bandwidth_share", "cycles_per_key", "picoseconds_per_pair", "time_per_sequence",
        "fp8_cache_launch_time", *_LAUNCHES_BY_WEIGHTS,
    ),
}  # fmt: skip
_INFERENCE_LIBRARIES = ("trtllm", "sglang", "vllm")


class SparseAttentionTable(KernelTable[DeviceDatasheet]):
    """Table of sparse attention (each query attends to the top-k keys of an indexer), one timed layer per row.

    A row has the time of a whole layer on one rank (part ``module``) or of one part: ``attention``, ``indexer_logits``
    or ``topk``.
    """

    name = "sparse_attention"
    identifying_columns = column_set("kind part phase num_heads batch_size q_len past_len kv_dtype time_us")
    optional_columns = "device library version kernel_source model weight_dtype"
    configuration_columns = parse_column_names("kind part phase model num_heads batch_size q_len past_len")
    size_columns = ("num_heads", "batch_size", "q_len")
    parameters_by_family: ClassVar[Mapping[str, type[Any]]] = {
        f"sparse.{kind}.{part}.{phase}.{library}": SparseAttentionParameters
        for kind in ("dsa", "csa", "hca", "msa")
        for part in _UNDETERMINED_SPARSE_PARAMETERS
        for phase in ("context", "generation")
        for library in _INFERENCE_LIBRARIES
    }
    host_parameters = ("launch_time",)

    def prepare_rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Add column ``dtype`` = bf16 to measured rows of sparse attention, as the attention itself runs in 16 bits."""
        return frame.assign(dtype="bf16")

    @apply_per_row
    def unsupported_reasons(self, device: str, model: str, kind: str, part: str, phase: str, library: str) -> str:
        """Explain why a timed sparse-attention layer cannot be modelled; '' if it can.

        Reasons are an unknown network, part, kind or library.
        """
        if f"sparse.{kind}.{part}.{phase}.{library}" not in self.parameters_by_family or _sizes_of(model) is None:
            return f"kind {kind!r}, part {part!r}, model {model!r}, library {library!r}: not modelled"
        return unsupported_reason(device, "bf16", "", frozenset({"bf16"}))

    @apply_per_row
    def kernel_family(self, kind: str, part: str, phase: str, library: str) -> str:
        """Return the key of the calibrated parameters that predict a timed sparse-attention layer.

        The key is ``sparse.<kind>.<part>.<phase>.<library>``.
        """
        return f"sparse.{kind}.{part}.{phase}.{library}"

    def fit_settings(self, target: FitTarget) -> FitSettings:
        """Choose how sparse-attention parameters are fitted to measured times: start values and fixed parameters.

        Rows of one part of a layer do not determine the parameters of the other parts, which stay fixed.
        """
        start = SparseAttentionParameters()
        fallback = (replace(start, selection_bandwidth_share=1.0 / 1000.0),) if "msa" in target.family else ()
        host = replace(
            start, launch_time=0.0005, fp8_launch_time=0.0002, fp4_launch_time=0.0005, indexer_launch_time=0.0004,
            launch_norm_order=4.0,
        )  # fmt: skip
        compiled = target.family == "sparse.msa.module.context.trtllm"
        return FitSettings(
            start, alternative_starts=(*fallback, host), random_starts=0, prior_precision=0.2, max_training_rows=500,
            fixed_parameters=_UNDETERMINED_SPARSE_PARAMETERS[target.family.split(".")[2]],
            overestimate_weight=_OVERESTIMATE_WEIGHT_WITH_COMPILATION if compiled else 1.0,
        )  # fmt: skip

    def flops_and_bytes(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """Count (FLOP, bytes) of measured sparse-attention layers, for the roofline baseline.

        Weights, index, scores and tokens are moved once.
        """
        work = _work(frame)
        flops = work.projection_flops + work.score_flops + work.attention_flops
        return flops, work.weight_bytes + work.index_bytes + work.score_bytes + work.pass_bytes + 1.0

    def predict_times(
        self, frame: pd.DataFrame, figures: DeviceDatasheet, parameters: SparseAttentionParameters
    ) -> Array:
        """Predict the time [s] of measured sparse-attention layers with given parameters.

        The rows share device, kind, part, phase and library.
        """
        return sparse_attention_time(_work(frame), figures, parameters)


@cache
def _sizes_of(model: str) -> _SparseAttentionSizes | None:
    return next((sizes for part, sizes in _SPARSE_SIZES_OF_NETWORK.items() if part in model), None)


Flags = npt.NDArray[np.bool_]


class _GatheringKernelTraits(NamedTuple):
    """Properties of the sparse-attention kernel that gathers the selected keys in each row; arrays of shape (rows,).

    ``computed_heads``: heads that the kernel computes, at least those of the rank. ``computes_empty_slots``: True if
    the kernel also multiplies slots of a selection without a key. ``reads_8_bit_cache``: True if the kernel reads a KV
    cache in 8 bits.
    """

    computed_heads: Array
    computes_empty_slots: Flags
    reads_8_bit_cache: Flags


def _gathering(
    frame: pd.DataFrame, heads: Array, latent: Flags, context: Flags, dense: Flags, stored: Flags
) -> _GatheringKernelTraits:
    """Determine which gathering kernel ran each row of sparse attention, by engine, release and device.

    ``stored`` is True for a cache in 8 bits. FlashMLA computes 64 heads at once on Hopper, 128 on Blackwell. vLLM runs
    it on Hopper. On Blackwell vLLM runs it with more than 16 heads or an 8-bit cache, unless a row names FlashInfer.
    With an 8-bit cache and fewer than 32 heads, vLLM prefills by the decode kernel. That kernel, and all of them before
    vLLM 0.24, multiply empty slots of a selection, as TensorRT-LLM's does on Hopper.

    References: vLLM, v1/attention/backends/mla/flashmla_sparse.py (padding, MIN_HEADS_FOR_BF16_PREFILL).
    """
    hopper = text_column(frame, "device").str.startswith(_HOPPER_DEVICE_PREFIXES).to_numpy(dtype=bool)
    vllm, tensorrt = word_mask(frame, "library", "vllm"), word_mask(frame, "library", "trtllm")
    flashmla = _has(frame, "flashmla")
    unnamed = vllm & _has(frame, "default") & (stored | (heads > 16.0))
    gathers = np.where(latent, ~dense & (hopper | context & (flashmla | unnamed)), flashmla)
    tile = np.where(hopper, 64.0, 128.0)
    narrow = gathers & latent & stored & (_has(frame, "flashmla_kv") | vllm & ((heads < 32.0) | ~hopper))
    early = vllm & map_text_columns(frame, ("version",), lambda version: parse_release(version) < (0, 24), bool)
    return _GatheringKernelTraits(
        computed_heads=np.where(gathers, np.ceil(heads / tile) * tile, np.maximum(heads, MIN_COMPUTED_HEADS)),
        computes_empty_slots=gathers & latent & (narrow | tensorrt | early),
        reads_8_bit_cache=narrow,
    )


def _has(frame: pd.DataFrame, word: str) -> Flags:
    """Return a mask of the table rows whose kernel name (column ``kernel_source``) contains ``word``, shape (rows,)."""
    return text_column(frame, "kernel_source").str.contains(word, case=False, regex=False).to_numpy(dtype=bool)


def _layer_weights(sizes: Array, kind: npt.NDArray[Any], heads: Array, key_heads: Array) -> tuple[Array, Array]:
    """Count the weights of sparse-attention layers on one rank: (weights of the attention, weights of the indexer).

    Both arrays have shape (rows,).
    """
    hidden, q_rank, query, value, index_heads, _, all_heads, groups = sizes
    up, grouped = q_rank * heads * query, kind == "msa"
    latent = (
        hidden * (q_rank + _LATENT_WITH_ROPE_DIM) + up + heads * (_LATENT_DIM * (query - 64.0 + value) + value * hidden)
    )
    compressed = (
        hidden * (q_rank + _LATENT_DIM) + up + heads * _LATENT_DIM * _OUTPUT_GROUP_RANK
        + groups * heads / all_heads * _OUTPUT_GROUP_RANK * hidden + 4.0 * hidden * _LATENT_DIM
    )  # fmt: skip
    selected = hidden * _INDEXER_KEY_DIM * 2.0 * (heads + key_heads)
    attended = np.select([kind == "dsa", grouped], [latent, selected], compressed)
    latents = (q_rank * index_heads + hidden) * _INDEXER_KEY_DIM + hidden * index_heads
    return attended, np.where(grouped, hidden * _INDEXER_KEY_DIM * 2.0 * key_heads, latents)


def _work(frame: pd.DataFrame) -> SparseWork:
    """Count FLOP and bytes of sparse-attention layers from the sizes of their networks, one layer per row.

    A row that times one part of a layer has only the FLOP and bytes of that part.
    """
    named = [_sizes_of(model) or _SPARSE_SIZES_OF_NETWORK["V3.2"] for model in text_column(frame, "model")]
    sizes = np.array(named, dtype=np.float64).T
    hidden, q_rank, query, value, index_heads, top_k, all_heads, _ = sizes
    kind, part = (text_column(frame, column).to_numpy(dtype=object) for column in ("kind", "part"))
    heads, batch, queries, past = number_columns(frame, ("num_heads", "batch_size", "q_len", "past_len"))
    tokens, keys = batch * queries, past + (queries + 1.0) / 2.0
    ratio = mapped_column(frame, "kind", _POSITIONS_PER_ENTRY, 1.0)
    latent, grouped = kind == "dsa", kind == "msa"
    entries, near = keys / ratio, np.minimum(_SLIDING_WINDOW_TOKENS, keys)
    chosen = np.minimum(entries, top_k)
    context = word_mask(frame, "phase", "context")
    skips, dense = _has(frame, "skip_indexer") | (kind == "hca"), _has(frame, "dense_mha")
    eight_bits = text_column(frame, "kv_dtype").str.startswith("fp8").to_numpy(dtype=bool)
    element, kernel = np.where(eight_bits, 1.0, 2.0), _gathering(frame, heads, latent, context, dense, eight_bits)
    seen = np.select(
        [kind == "hca", kind == "csa", kernel.computes_empty_slots, dense],
        [entries + near, chosen + near, top_k, keys],
        chosen,
    )
    key_heads = np.where(grouped, np.maximum(_MINIMAX_KEY_HEADS * heads / all_heads, 1.0), 1.0)
    scorers = np.where(grouped, key_heads, index_heads)
    attended, scored = _layer_weights(sizes, kind, heads, key_heads)
    weights = attended + np.where(skips | dense, 0.0, scored)
    module = part == "module"
    scoring, selecting = ((module | (part == each)) & ~skips for each in ("indexer_logits", "topk"))
    attending = module | (part == "attention")
    width = np.select([grouped, latent], [2.0 * _INDEXER_KEY_DIM * key_heads, _LATENT_WITH_ROPE_DIM], _LATENT_DIM)
    pair_products = [2.0 * _INDEXER_KEY_DIM, query + value, _LATENT_WITH_ROPE_DIM + _LATENT_DIM]
    products = np.select([grouped, dense, latent], pair_products, 2.0 * _LATENT_DIM)
    expanded = dense * batch * past * heads * _LATENT_DIM * (query - 64.0 + value)
    stored = mapped_column(frame, "weight_dtype", _BYTES_PER_WEIGHT, 2.0)
    scores = tokens * entries * np.where(grouped, key_heads, 1.0) * 4.0
    return SparseWork(
        projection_flops=module * 2.0 * (tokens * weights + expanded),
        weight_bytes=module * weights * stored,
        weight_element_bytes=np.where(module, stored, 2.0),
        cache_element_bytes=np.where(attending & eight_bits, 1.0, 2.0),
        has_indexer=module & ~skips & ~dense,
        is_dense=module & dense,
        query_key_pairs=scoring * ~dense * tokens * np.where(context, batch * (past + queries) / ratio, tokens),
        score_flops=scoring * 2.0 * tokens * entries * scorers * _INDEXER_KEY_DIM,
        index_bytes=scoring * batch * (past + queries) / ratio * _INDEXER_KEY_DIM,
        score_bytes=((part == "indexer_logits") | (selecting & ~dense)) * scores,
        entries_per_search=entries,
        searching_queries=(selecting & ~dense) * tokens * np.clip((past + queries - top_k * ratio) / queries, 0.0, 1.0),
        indexer_scored_keys_per_query=scoring * entries,
        attention_flops=attending * 2.0 * tokens * np.where(dense, heads, kernel.computed_heads) * seen * products,
        reads_8_bit_cache=kernel.reads_8_bit_cache,
        key_bytes=attending * np.where(dense, batch * (past + queries), tokens * seen) * width * element,
        sequences=attending * (queries > 1.0) * batch,
        pass_bytes=attending * tokens * (2.0 * hidden + q_rank + heads * (query + _LATENT_DIM)) * 2.0,
    )


KERNEL_TABLES.register(SparseAttentionTable.name)(SparseAttentionTable())


# Tables of fused attention: context (causal prefill), encoder (not causal) and generation (one token to a cache)

_ATTENTION_PHASES = ("context", "encoder", "generation")
_DTYPE_BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}
#: Beginnings of device names by the architecture that decides which kernel a library picks.
_HOPPER_DEVICE_PREFIXES = ("h100", "h200", "h800", "h20", "gh200")
_BLACKWELL_DEVICE_PREFIXES = ("b100", "b200", "b300", "gb200", "gb300")
#: How libraries name their kernels; without a name a library picks by architecture.
_KERNEL_OF_LIBRARY_NAME = {
    "fa4": "fa4", "fa3": "fa3", "fa2": "fa2", "trtllm": "trtllm", "tensorrt": "trtllm", "flashinfer": "fa2",
}  # fmt: skip


#: Parameters of decode that a kernel does not have, or that its rows do not tell apart.
_UNDETERMINED_DECODE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "fa2": ("block_search_cycles", "time_per_sequence"),
    "fa3": ("extra_kernel_time", "block_search_cycles"),
    "fa4": ("extra_kernel_time", "time_per_sequence"),
    "trtllm": ("extra_kernel_time", "block_search_cycles", "time_per_sequence", "mma_efficiency"),
}
#: Cycles of an exponential per score where it is not the special-function unit's 1/16: FlashAttention-4 computes half
#: of them as polynomials (its authors' talk at Hot Chips 2025).
_CYCLES_PER_EXPONENTIAL = {"fa4": 1 / 32}
#: Rate of backward against forward, long causal sequences at head dimension 128: FlashAttention-2 on A100 (Dao, 2023,
#: figures 5 and 6), FlashAttention-3 (Shah et al., 2024, figures 5 and 6, less its exponentials), the same for others.
_BACKWARD_RATE_RATIO = {"fa2": 0.85, "fa3": 0.72, "fa4": 0.67, "trtllm": 0.67}
#: Energy of a FLOP of attention against that of a product: scores and sums stay in registers between the two products.
_ATTENTION_FLOP_ENERGY_RATIO = 0.75
#: L2 bytes per clock and multiprocessor of parts with a split L2 and with a whole one, where no decode rows tell.
_L2_BYTES_PER_CLOCK = (40.0, 8.0)


class AttentionTable(KernelTable[DeviceDatasheet]):
    """Table of fused attention kernels (prefill, encoder, decode), one timed call per row.

    Families (keys of calibrated parameters) are ``attention.<kernel>.<phase>``.
    """

    name = "attention"
    identifying_columns = frozenset({"phase", "batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "causal"})
    optional_columns = "compute device dtype library source timing window"
    configuration_columns = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "causal")
    size_columns = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim")
    parameters_by_family: ClassVar = {
        f"attention.{kernel}.{phase}": DecodeParameters if phase == "decode" else PrefillParameters
        for kernel in ATTENTION_KERNELS
        for phase in ("prefill", "encoder", "decode")
    }
    host_parameters = ("launch_time",)

    def fit_settings(self, target: FitTarget) -> FitSettings:
        """Choose how attention parameters are fitted to measured times: start values and fixed parameters.

        Energies and the share of traffic that L2 serves follow from the silicon. Prefill is fitted after decode of the
        same kernel and takes the L2 share from that fit.
        """
        _, kernel, phase = target.family.split(".")
        share = l2_surviving_share(target.figures)
        decode = target.fitted.get((target.subject, f"attention.{kernel}.decode", target.stack))
        if phase == "decode":
            start, fixed = DecodeParameters(l2_survival_share=share), _UNDETERMINED_DECODE_PARAMETERS[kernel]
            return FitSettings(start, fixed_parameters=fixed, max_training_rows=900, prior_precision=0.3)
        prefill = PrefillParameters(
            l2_survival_share=decode.l2_survival_share if decode else share,
            l2_bytes_per_cycle=decode.l2_bytes_per_cycle
            if decode
            else _L2_BYTES_PER_CLOCK[share == WHOLE_L2_SURVIVAL_SHARE],
            exp_cycles=_CYCLES_PER_EXPONENTIAL.get(kernel, 1 / 16),
            energy_per_flop=_ATTENTION_FLOP_ENERGY_RATIO * energy_per_flop(target.figures).tensor,
            backward_efficiency=_BACKWARD_RATE_RATIO[kernel],
        )
        silent = ("cache_write_time",) if phase == "encoder" else ("padding_time", "padded_tile_cycles")
        whole = ("combine_time",) if ATTENTION_KERNELS[kernel].max_kv_splits == 1 else ()
        fixed = ("exp_cycles", *silent, *whole)
        return FitSettings(prefill, fixed_parameters=fixed, max_training_rows=900, prior_precision=0.3)

    def unsupported_reasons(self, frame: pd.DataFrame) -> pd.Series[str]:
        sizes = [pd.to_numeric(frame[name], errors="coerce") for name in self.size_columns]
        return first_reasons(
            frame.index,
            (np.any([~(size > 0) for size in sizes], axis=0), "size is missing or not above zero"),
            (~text_column(frame, "dtype").isin(_DTYPE_BYTES), "unknown dtype"),
            (~text_column(frame, "phase").isin(_ATTENTION_PHASES), "unknown phase"),
        )

    def timing_method(self, frame: pd.DataFrame) -> pd.Series[str]:
        eager = text_column(frame, "library").str.contains("eager", case=False)
        return timing_methods(frame, pd.Series(np.where(eager, "eager", "graph"), index=frame.index, dtype=object))

    def kernel_family(self, frame: pd.DataFrame) -> pd.Series[str]:
        return "attention." + _kernel(frame) + "." + _phase(frame)

    def flops_and_bytes(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        b, hq, hk, nq, nk, d = number_columns(frame, self.size_columns)
        seen = np.where(true_cells(frame, "causal"), nk - (nq - 1) / 2, nk)
        return 4 * b * hq * nq * seen * d, mapped_column(frame, "dtype", _DTYPE_BYTES) * b * d * (
            2 * hq * nq + 2 * hk * nk
        )

    def predict_times(
        self, frame: pd.DataFrame, figures: DeviceDatasheet, parameters: PrefillParameters | DecodeParameters
    ) -> Array:
        b, hq, hk, nq, nk, d = number_columns(frame, self.size_columns)
        shared: dict[str, Any] = {
            "batch": b, "query_heads": hq, "kv_heads": hk, "kv_length": nk, "head_dim": d, "device": figures,
            "kernel_name": _kernel(frame).iloc[0] if len(frame) else "fa2", "parameters": parameters,
            "window": number_column(frame, "window", 0.0), "element_bytes": mapped_column(frame, "dtype", _DTYPE_BYTES),
        }  # fmt: skip
        if isinstance(parameters, DecodeParameters):
            return attention_decode_time(**shared)
        paged = not word_mask(frame, "phase", "encoder").any()
        return attention_prefill_time(query_length=nq, causal=true_cells(frame, "causal"), paged=paged, **shared)


def _kernel(frame: pd.DataFrame) -> pd.Series[str]:
    device, library = text_column(frame, "device"), text_column(frame, "library").str.lower()
    kernel = pd.Series(default_attention_kernel("Ampere"), index=frame.index, dtype=object)
    kernel[device.str.startswith(_HOPPER_DEVICE_PREFIXES)] = default_attention_kernel("Hopper")
    kernel[device.str.startswith(_BLACKWELL_DEVICE_PREFIXES)] = default_attention_kernel("Blackwell")
    named = pd.Series(False, index=frame.index)
    for word, name in _KERNEL_OF_LIBRARY_NAME.items():
        matches = library.str.contains(word, regex=False) & ~named
        kernel[matches], named = name, named | matches
    return kernel


def _phase(frame: pd.DataFrame) -> pd.Series[str]:
    """Return the phase of each timed attention call: ``decode``, ``encoder`` or ``prefill``.

    A causal context with a single query token runs the decode kernel.
    """
    phase, single = text_column(frame, "phase"), number_column(frame, "q_len") == 1
    decode = (phase == "generation") | ((phase == "context") & single)
    return pd.Series(np.select([decode, phase == "encoder"], ["decode", "encoder"], "prefill"), index=frame.index)


KERNEL_TABLES.register("attention")(AttentionTable())
