"""Tables of kernels of inference engines (low-precision GEMM, MoE experts, latent attention) and of training steps.

Kernels of training steps are GEMMs, grouped GEMMs of experts by stage, and attention forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from paleo.pricing.attention import (
    PrefillParameters,
    attention_backward_time,
    attention_prefill_time,
    default_attention_kernel,
)
from paleo.pricing.engine_gemm import (
    DECODE_BLOCK_ROWS,
    LATENT_DIM,
    QUERY_HEAD_DIM,
    SCALED_ELEMENT_BYTES,
    TRITON_DECODE_BLOCK_ROWS,
    VALUE_HEAD_DIM,
    EngineGemmParameters,
    LatentAttentionParameters,
    latent_attention_time,
    low_precision_gemm_time,
)
from paleo.pricing.experts import expert_ffn_time, expert_gemm_tiles
from paleo.pricing.families import (
    TrainingKernelParameters,
    looped_expert_gemm_time,
    sustained_load_time,
    training_attention_parameters,
)
from paleo.pricing.gemm import GemmParameters, gemm_time
from paleo.pricing.kernels import DeviceDatasheet
from paleo.tables.base import column_set
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
    shipped_parameters,
    unsupported_reason,
)
from paleo.units import MICROSECOND

#: Bytes of an element of the experts' weights and activations, scales included.
_EXPERT_BYTES = {"bf16": 2.0, "fp16": 2.0, **SCALED_ELEMENT_BYTES}

#: Tile width at which Triton's kernels load operands as long as they multiply: what makes SGLang's tile of 64 x 64 0.6
#: times as efficient as vLLM's of 128 x 256, on H100 and B200 alike. On A100 one tile was measured.
_TRITON_BALANCED_TILE_WIDTH = 57.0
#: Visits of a mean expert below which the most popular one's round to none.
_MIN_TOKENS_PER_EXPERT = 0.1
#: Releases beside TensorRT-LLM's whose benchmark gives all visits to one rank then.
_SINGLE_RANK_RELEASES = {"vllm": ("0.14.0",), "sglang": ("0.5.6.post2", "0.5.9")}
#: Releases of SGLang whose benchmark keeps only tokens that visit the rank; the one that multiplies all their visits
#: except on B200; and the one whose rows hold ten calls.
_VISITORS_ONLY, _UNFILTERED, _TEN_CALLS = ("0.5.9", "0.5.10"), "0.5.10", "0.5.6.post2"
#: Most experts that TensorRT-LLM before 1.3.0rc15 routes without loss; seconds of its router for more, and for each
#: token and expert. Inferred from equal shapes of two releases, alike on B200 and H100 and in four formats.
_ROUTED, _ROUTER_CALL, _ROUTER_LOGIT = 128, 15 * MICROSECOND, 40e-6 * MICROSECOND
_ROUTED_BY_KERNEL = ("1.3.0rc15", "1.3.0rc20")
#: vLLM's last release with one tile where no tuned file is found; experts whose tiles are tuned, and up to which width.
_UNTUNED_VLLM, _TUNED_EXPERTS, _TUNED_WIDTH = "0.14.0", 8, 8192


class EngineKernelTable(KernelTable[DeviceDatasheet]):
    """Abstract base of tables of inference-engine kernels timed in CUDA graphs, a family per library and format."""

    element_bytes: ClassVar[Mapping[str, float]]
    #: Parameters that the kind's formula does not have.
    undetermined_parameters: ClassVar[tuple[str, ...]] = ()
    host_parameters = ("launch_time", "host_time", "pass_bandwidth_share")

    @apply_per_row
    def unsupported_reasons(self, device: str, dtype: str) -> str:
        """Explain why a timed kernel cannot be modelled: an unsupported number format; '' if it can be modelled."""
        return unsupported_reason(device, dtype, "", frozenset(self.element_bytes))

    def fit_settings(self, target: FitTarget) -> FitSettings:
        """Choose how parameters of inference-engine kernels are fitted: start values and fixed parameters.

        CUDA graphs hide the host time of a call, and eager calls hide the launch cost behind the host; hidden
        parameters stay fixed.
        """
        start, varying = EngineGemmParameters(), ("launch_time", "pass_bandwidth_share")
        fixed = (*self.undetermined_parameters, "host_time")
        if target.stack == "eager":
            start = replace(start, host_time=150 * MICROSECOND, launch_time=5 * MICROSECOND)
            fixed = (*self.undetermined_parameters, *varying)
        return FitSettings(start, parameters_per_stack=varying, fixed_parameters=fixed)


class QuantisedGemmTable(EngineKernelTable):
    """Table of matrix products C[m,n] = A[m,k] B[k,n] in fp8 or NVFP4, with quantisation of the activations A."""

    name = "gemm_lowbit"
    identifying_columns = frozenset({"scaling", "m", "n", "k", "dtype", "time_us"})
    optional_columns = "device library version kernel_source"
    configuration_columns = ("m", "n", "k")
    size_columns = ("m", "n", "k")
    element_bytes = SCALED_ELEMENT_BYTES
    undetermined_parameters = ("index_bytes_per_element", "unaligned_time_ratio", "time_per_element")
    parameters_by_family: ClassVar[Mapping[str, type[Any]]] = {
        f"narrow.{scaling}.{library}": EngineGemmParameters
        for scaling in ("tensor8", "block8", "block4")
        for library in ("trtllm", "vllm")
    }

    @apply_per_row
    def timing_method(self, library: str, version: str, dtype: str, scaling: str) -> str:
        """Return how a low-precision GEMM was timed: ``eager``, ``graph``, or ``graph/first``.

        vLLM from release 0.20 on and its development builds launch fp8 products eagerly. TensorRT-LLM 1.2's first
        DeepGEMM (``graph/first``) has a slow quantisation pass.
        """
        release = parse_release(version)[:2]
        if library == "vllm" and dtype == "fp8" and (release >= (0, 20) or "dev" in version):
            return "eager"
        first = library == "trtllm" and scaling == "block128" and release == (1, 2)
        return "graph/first" if first else "graph"

    @apply_per_row
    def kernel_family(self, library: str, scaling: str, dtype: str) -> str:
        """Return the key of the calibrated parameters that predict a low-precision GEMM.

        The key is ``narrow.<scaling><bits>.<library>``, with scaling per tensor or per block.
        """
        blocks = "tensor" if scaling.startswith("tensor") else "block"
        return f"narrow.{blocks}{dtype.removeprefix('fp')}.{'vllm' if library == 'vllm' else 'trtllm'}"

    def flops_and_bytes(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """Count (FLOP, bytes) of low-precision GEMMs: 2 m n k FLOP, and each operand moved once."""
        m, n, k = number_columns(frame, self.configuration_columns)
        element = mapped_column(frame, "dtype", _EXPERT_BYTES, 2.0)
        return 2.0 * m * n * k, (m + n) * k * element + 2.0 * m * n

    def predict_times(self, frame: pd.DataFrame, figures: DeviceDatasheet, parameters: EngineGemmParameters) -> Array:
        """Predict the time [s] of low-precision GEMMs that share device, format, family and timing method."""
        m, n, k = number_columns(frame, self.configuration_columns)
        element = SCALED_ELEMENT_BYTES[str(frame["dtype"].iloc[0])] if len(frame) else 1.0
        return low_precision_gemm_time(m=m, n=n, k=k, element_bytes=element, device=figures, parameters=parameters)


class ExpertKernelTable(EngineKernelTable):
    """Table of the MoE expert computation of one rank, forward: from the router's choice to the combined tokens."""

    name = "moe"
    identifying_columns = frozenset(
        {"num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "distribution"}
    )
    optional_columns = "device library version kernel_source dtype scaling gated"
    configuration_columns = (
        "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size",
    )  # fmt: skip
    size_columns = configuration_columns
    element_bytes = _EXPERT_BYTES
    undetermined_parameters = ("balanced_tile_width", "unaligned_time_ratio", "time_per_element")
    parameters_by_family: ClassVar[Mapping[str, type[Any]]] = {
        f"experts.{kernel}.{scaling}": EngineGemmParameters
        for kernel in ("triton-sglang", "triton-vllm", "cutlass", "flashinfer", "trtllm", "cutedsl", "deepgemm")
        for scaling in ("bf16", "tensor8", "block8", "block4")
    }

    def fit_settings(self, target: FitTarget) -> FitSettings:
        """Choose how parameters of MoE expert kernels are fitted to measured times: start values and fixed parameters.

        Triton kernels also fit the cost of unaligned loads, which starts at one load per element.
        """
        plan = super().fit_settings(target)
        if "triton" not in target.family:
            return plan
        start = replace(plan.start_values, unaligned_time_ratio=16.0 if target.family.endswith("8") else 8.0)
        if target.figures.architecture != "Ampere":
            start = replace(start, balanced_tile_width=_TRITON_BALANCED_TILE_WIDTH)
        measured_parameters = ("unaligned_time_ratio", "time_per_element")
        fixed = (name for name in plan.fixed_parameters if name not in measured_parameters)
        return replace(plan, start_values=start, fixed_parameters=(*fixed, "index_bytes_per_element"))

    @apply_per_row
    def kernel_family(self, library: str, kernel_source: str, scaling: str, dtype: str) -> str:
        """Return the key of the calibrated parameters that predict a timed MoE expert computation.

        The key is ``experts.<kernel>.<scaling>``. Kernels are Triton's (by engine), CUTLASS, FlashInfer, and others.
        """
        words = ("triton", "cutedsl", "deepgemm", "flashinfer_cutlass", "cutlass", "trtllm", "min_latency")
        word = next((word for word in words if word in kernel_source), "cutlass")
        if word == "triton" or kernel_source.endswith("fused_moe"):
            word = f"triton-{'sglang' if library == 'sglang' else 'vllm'}"
        word = {"min_latency": "trtllm", "flashinfer_cutlass": "flashinfer"}.get(word, word)
        blocks = "block" if scaling.startswith("block") else "tensor"
        return f"experts.{word}.{blocks + dtype[2:] if dtype.startswith('fp') and dtype != 'fp16' else 'bf16'}"

    def flops_and_bytes(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """Count (FLOP, bytes) of MoE expert computations on one rank.

        FLOP are those of the rank's tokens. Expert weights are read once; tokens are read and written.
        """
        tokens, hidden, inner, top_k, experts, tp, ep = number_columns(frame, self.configuration_columns)
        weights = (2.0 + number_column(frame, "gated", 1.0)) * hidden * inner / tp
        rows = tokens * top_k / ep
        weights_read = np.minimum(experts / ep, rows) * weights * mapped_column(frame, "dtype", _EXPERT_BYTES, 2.0)
        return 2.0 * rows * weights, weights_read + 4.0 * rows * hidden

    def predict_times(self, frame: pd.DataFrame, figures: DeviceDatasheet, parameters: EngineGemmParameters) -> Array:
        """Predict the time [s] of MoE expert computations that share device, format, family and timing method."""
        tokens, hidden, inner, top_k, experts, tp, ep = number_columns(frame, self.configuration_columns)
        law = text_column(frame, "distribution").str.extract(r"power_law_([\d.]+)")[0].fillna("0")
        exponent = law.to_numpy(dtype=np.float64)
        few = (exponent > 0) & (tokens * top_k < _MIN_TOKENS_PER_EXPERT * experts)
        together = few & map_text_columns(frame, ("library", "version"), _visits_single_rank, bool)
        local, logits = experts / ep, experts
        experts, ep = np.where(together, local, experts), np.where(together, 1.0, ep)
        element = _EXPERT_BYTES[str(frame["dtype"].iloc[0])] if len(frame) else 2.0
        family = str(self.kernel_family(frame.head(1)).iloc[0]) if len(frame) else ""
        visitors, unfiltered, calls, routed = (
            map_text_columns(frame, ("library", "version", "device"), fact, np.float64) for fact in _RELEASE_FACTS
        )
        seconds = expert_ffn_time(
            tokens=tokens, hidden=hidden, inner=inner, top_k=top_k, experts=experts, tp=tp, ep=ep,
            gated=number_column(frame, "gated", 1.0), exponent=np.where(few, 0.0, exponent), element_bytes=element,
            device=figures, parameters=parameters, visitors_only=visitors, unfiltered=unfiltered,
            tiles=expert_gemm_tiles(family, tokens, local, _untuned(frame, inner / tp)),
            padded="cutedsl" in family, triton="triton" in family,
        )  # fmt: skip
        outside = ("trtllm" not in family) * routed * (logits > _ROUTED)
        return np.asarray(calls * seconds + outside * (_ROUTER_CALL + _ROUTER_LOGIT * tokens * logits))


class LatentAttentionTable(EngineKernelTable):
    """Table of multi-head latent attention (MLA) kernels, for prompts (context) and single tokens (generation)."""

    name = "mla"
    identifying_columns = column_set("phase kv_dtype num_heads batch_size q_len kv_len kernel_source time_us")
    optional_columns = "device library version kernel_source dtype"
    configuration_columns = ("num_heads", "batch_size", "q_len", "kv_len")
    size_columns = configuration_columns
    element_bytes = _EXPERT_BYTES
    parameters_by_family: ClassVar[Mapping[str, type[Any]]] = {
        f"latent.{kernel}.{phase}{cache}": LatentAttentionParameters
        for kernel in ("trtllm", "sglang", "vllm")
        for phase in ("prompt", "token")
        for cache in (8, 16)
    }

    @apply_per_row
    def kernel_family(self, library: str, phase: str, kv_dtype: str) -> str:
        """Return the key of the calibrated parameters that predict a timed MLA kernel.

        The key is ``latent.<library>.<phase><bits>``, with the bits of the KV cache.
        """
        kernel = library if library in ("sglang", "vllm") else "trtllm"
        return f"latent.{kernel}.{'token' if phase == 'generation' else 'prompt'}{8 if kv_dtype == 'fp8' else 16}"

    @apply_per_row
    def timing_method(self, library: str, version: str, phase: str) -> str:
        """Return how an MLA kernel was timed: ``graph``, or ``graph/first`` for early releases.

        Early releases have an additional pass over the queries: TensorRT-LLM 1.2 in generation and SGLang before 0.5.14
        in context.
        """
        release = parse_release(version)
        tokens_again = (library, phase) == ("trtllm", "generation") and release[:2] == (1, 2)
        prompts_again = (library, phase) == ("sglang", "context") and release < (0, 5, 14)
        return "graph/first" if tokens_again or prompts_again else "graph"

    def fit_settings(self, target: FitTarget) -> FitSettings:
        """Choose how MLA parameters are fitted to measured times: start values and fixed parameters.

        Generation kernels start from an unsplit KV cache and from one split in four.
        """
        vllm, token = "vllm" in target.family, "token" in target.family
        start = LatentAttentionParameters(host_time=200 * MICROSECOND) if vllm else LatentAttentionParameters()
        starts = tuple(replace(start, max_splits=splits) for splits in (1.02, 4.0)) if token else ()
        fixed = (*(() if token else ("max_splits",)), *(() if vllm else ("host_time",)))
        varying = ("launch_time", "pass_bandwidth_share")
        return FitSettings(start, starts, varying, fixed, random_starts=0, prior_precision=0.2)

    def flops_and_bytes(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """Count (FLOP, bytes) of MLA kernels: full keys (causal for prompts); queries, keys and values moved once."""
        heads, batch, queries, keys = number_columns(frame, self.configuration_columns)
        seen = np.where(text_column(frame, "phase") == "generation", keys, keys - queries / 2.0)
        flop = 2.0 * batch * heads * queries * seen * (QUERY_HEAD_DIM + VALUE_HEAD_DIM)
        return flop, 2.0 * batch * (heads * queries * (QUERY_HEAD_DIM + VALUE_HEAD_DIM) + keys * LATENT_DIM)

    def predict_times(
        self, frame: pd.DataFrame, figures: DeviceDatasheet, parameters: LatentAttentionParameters
    ) -> Array:
        """Predict the time [s] of MLA kernels that share device, format, family and timing method."""
        heads, batch, queries, keys = number_columns(frame, self.configuration_columns)
        triton = text_column(frame, "kernel_source").str.contains("triton")
        return latent_attention_time(
            heads=heads, batch=batch, queries=queries, keys=keys, single=word_mask(frame, "phase", "generation"),
            cache_bytes=np.where(word_mask(frame, "kv_dtype", "fp8"), 1.0, 2.0),
            token_rows=np.where(triton, TRITON_DECODE_BLOCK_ROWS, DECODE_BLOCK_ROWS),
            device=figures, parameters=parameters,
        )  # fmt: skip


def _visits_single_rank(library: str, version: str) -> bool:
    """Return True for benchmark releases that send all tokens to one rank if too few tokens visit each expert."""
    return library == "trtllm" or version in _SINGLE_RANK_RELEASES.get(library, ())


#: Facts of a release's benchmark on a device, as numbers: only tokens that visit the rank are there, all their visits
#: are multiplied, calls in a row, and the router is PyTorch's for many experts.
_RELEASE_FACTS: tuple[Callable[..., float], ...] = (
    lambda library, version, _: float(library == "sglang" and version in _VISITORS_ONLY),
    lambda library, version, device: float((library, version) == ("sglang", _UNFILTERED) and device != "b200"),
    lambda library, version, _: 10.0 if (library, version) == ("sglang", _TEN_CALLS) else 1.0,
    lambda library, version, _: float(library == "trtllm" and version not in _ROUTED_BY_KERNEL),
)


def _untuned(frame: pd.DataFrame, width: Array) -> Array:
    """Return 1.0 for MoE rows whose Triton kernel uses one untuned tile size, shape (rows,).

    These are SGLang and early vLLM, except for Mixtral's experts, for which both ship tuned tiles.
    """
    tuned = (number_column(frame, "num_experts") == _TUNED_EXPERTS) & (number_column(frame, "moe_ep_size") == 1.0)
    old_vllm = word_mask(frame, "library", "vllm") & word_mask(frame, "version", _UNTUNED_VLLM)
    single = word_mask(frame, "library", "sglang") | old_vllm
    return np.asarray(single & ~(tuned & (width < _TUNED_WIDTH)), np.float64)


for kind in (QuantisedGemmTable(), ExpertKernelTable(), LatentAttentionTable()):
    KERNEL_TABLES.register(kind.name)(kind)


#: Operation of a row -> its family; that of attention is followed by the kernel.
_FAMILY_OF_OPERATION = {"matmul": "products", "group_matmul": "experts", "sdp_fwd": "attention", "sdp_bwd": "attention"}
#: Parameters that the rows of a family do not tell.
_UNDETERMINED_TRAINING_PARAMETERS = {
    "products": ("forward_rate_ratio", "backward_rate_ratio"),
    "experts": ("half_throttle_time", "forward_rate_ratio", "backward_rate_ratio"),
    "attention": ("half_throttle_time",),
}
#: Bytes of an element of operands and results, and of the sums of gradients by their format.
_OPERAND_ELEMENT_BYTES, _GRADIENT_BYTES_BY_DTYPE = 2.0, {"fp32": 4.0, "bf16": 2.0}
#: Tokens of the rows of attention that state none: those of the others.
_DEFAULT_ATTENTION_TOKENS = 4096.0


class TrainingKernelTable(KernelTable[DeviceDatasheet]):
    """Table of kernels of a training step (GEMM, grouped GEMM of experts, attention), one timed call per row."""

    name = "training_kernels"
    identifying_columns = column_set("op m k n layout groups group_m stage head_num time_us device")
    optional_columns = (
        "dtype accumulate out_dtype group_n group_k batch seq_len kv_head_num qk_head_dim v_head_dim main_grad_dtype"
    )
    configuration_columns = (
        "op", "m", "k", "n", "groups", "group_m", "group_n", "stage", "seq_len", "head_num", "kv_head_num",
        "qk_head_dim",
    )  # fmt: skip
    parameters_by_family: ClassVar[Mapping[str, type[Any]]] = {
        f"training.{name}": TrainingKernelParameters
        for name in ("products", "experts", *(f"attention.{kernel}" for kernel in ("fa2", "fa3", "fa4")))
    }
    host_parameters = ("launch_time",)

    def prepare_rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Complete the rows of timed training kernels: number format (bf16 if empty) and missing columns."""
        stated = text_column(frame, "dtype")
        absent = dict.fromkeys(set(self.configuration_columns) - set(frame.columns), "")
        return frame.assign(dtype=stated.where(stated != "", "bf16"), **absent)

    def unsupported_reasons(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Explain for each timed training kernel why it cannot be modelled; '' if it can.

        Reasons are an unknown operation, an unsupported format, or no FLOP.
        """
        reason = self._unsupported_reason(frame)
        reason[(reason == "") & ~(self.flops_and_bytes(frame)[0] > 0)] = "size is missing or not above zero"
        return reason

    @apply_per_row
    def _unsupported_reason(self, device: str, dtype: str, op: str) -> str:
        if op in _FAMILY_OF_OPERATION:
            return unsupported_reason(device, dtype or "bf16", "", frozenset({"bf16", "fp16"}))
        return f"op {op!r} is not modelled"

    @apply_per_row
    def kernel_family(self, device: str, op: str) -> str:
        """Return the key of the calibrated parameters of a training kernel, by its operation.

        Operations are GEMM, grouped GEMM of experts, or attention by the usual kernel of the device.
        """
        name = f"training.{_FAMILY_OF_OPERATION[op]}"
        if not name.endswith("attention"):
            return name
        traits = self.load_datasheet(device, "bf16", "")
        return f"{name}.{default_attention_kernel(traits.architecture, traits.memory_kind)}"

    def fit_settings(self, target: FitTarget) -> FitSettings:
        """Choose how parameters of training kernels are fitted to measured times: start values and fixed parameters.

        Parameters that the rows of a family do not determine stay fixed.
        """
        unseen = _UNDETERMINED_TRAINING_PARAMETERS[target.family.split(".")[1]]
        return FitSettings(TrainingKernelParameters(), fixed_parameters=unseen, prior_precision=0.2)

    def flops_and_bytes(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """Count (FLOP, bytes) of training kernels: GEMMs and attention scores, operands and results moved once."""
        rows, columns, length, count = _product(frame)
        heads = number_column(frame, "head_num", 0.0)
        tokens = number_column(frame, "seq_len", _DEFAULT_ATTENTION_TOKENS)
        widths = number_column(frame, "qk_head_dim", 0.0) + number_column(frame, "v_head_dim", 0.0)
        backward = np.where(text_column(frame, "op") == "sdp_bwd", 2.5, 1.0)
        attention = backward * heads * tokens**2 * widths
        moved = count * ((rows + columns) * length * _OPERAND_ELEMENT_BYTES + rows * columns * _written(frame))
        return 2.0 * count * rows * columns * length + attention, moved + 4.0 * heads * tokens * widths

    def predict_times(
        self, frame: pd.DataFrame, figures: DeviceDatasheet, parameters: TrainingKernelParameters
    ) -> Array:
        """Predict the time [s] of training kernels that share device and family."""
        if frame.empty:
            return np.zeros(0)
        op, products = str(frame["op"].iloc[0]), shipped_parameters(GemmParameters, "gemm.tensor", figures)
        if _FAMILY_OF_OPERATION[op] == "attention":
            return _attention(frame, figures, parameters, products.training_energy_ratio)
        rows, columns, length, count = _product(frame)
        launch = parameters.launch_time
        shared: dict[str, Any] = {
            "m": rows, "n": columns, "k": length, "element_bytes": _OPERAND_ELEMENT_BYTES,
            "result_bytes": _written(frame), "weight_copies": np.inf, "activity": products.training_energy_ratio,
            "device": figures, "parameters": replace(products, launch_time=launch if op == "matmul" else 0.0),
        }  # fmt: skip
        if op == "matmul":
            cold, hot = (gemm_time(sustained=load, **shared) for load in (0.0, 1.0))
            return sustained_load_time(cold, hot, parameters.half_throttle_time)
        return looped_expert_gemm_time(experts=count, launch=launch, sustained=1.0, **shared)


def _attention(frame: pd.DataFrame, figures: DeviceDatasheet, p: TrainingKernelParameters, activity: float) -> Array:
    kernel = default_attention_kernel(figures.architecture, figures.memory_kind)
    engine = shipped_parameters(PrefillParameters, f"attention.{kernel}.prefill", figures)
    tokens = number_column(frame, "seq_len", _DEFAULT_ATTENTION_TOKENS)
    shape: dict[str, Any] = {
        "batch": number_column(frame, "batch", 1.0), "query_heads": number_column(frame, "head_num"),
        "kv_heads": number_column(frame, "kv_head_num"), "query_length": tokens, "kv_length": tokens,
        "head_dim": number_column(frame, "qk_head_dim"), "value_dim": number_column(frame, "v_head_dim"),
        "causal": True, "kernel_name": kernel, "device": figures, "sustained": 1.0, "activity": activity,
        "parameters": replace(training_attention_parameters(engine, p), launch_time=p.launch_time),
    }  # fmt: skip
    forward = word_mask(frame, "op", "sdp_fwd")
    return np.where(forward, attention_prefill_time(**shape), attention_backward_time(**shape))


def _product(frame: pd.DataFrame) -> tuple[Array, Array, Array, Array]:
    """Read the GEMM sizes of training kernels: (rows m, columns n, inner dimension k, number of GEMMs).

    Each array has shape (rows,); sizes are 0 for attention.
    """
    m, n, k, groups = (number_column(frame, name, 0.0) for name in ("group_m", "group_n", "group_k", "groups"))
    stage = text_column(frame, "stage").to_numpy(dtype=object)
    weights, forward = stage == "bwd_grad_w", stage == "fwd"
    grouped = groups > 0
    rows = np.where(grouped, np.where(weights, n, m), number_column(frame, "m", 0.0))
    columns = np.where(grouped, np.where(forward, n, k), number_column(frame, "n", 0.0))
    length = np.where(grouped, np.where(forward, k, np.where(weights, m, n)), number_column(frame, "k", 0.0))
    return rows, columns, length, np.where(grouped, groups, 1.0)


def _written(frame: pd.DataFrame) -> Array:
    """Return the bytes moved per result element of training GEMMs, shape (rows,).

    Accumulated gradients are read and written, so that they count twice.
    """
    stated = text_column(frame, "main_grad_dtype").where(
        number_column(frame, "groups", 0.0) > 0, text_column(frame, "out_dtype")
    )
    sums = stated.map(_GRADIENT_BYTES_BY_DTYPE).fillna(_OPERAND_ELEMENT_BYTES).to_numpy(dtype=np.float64)
    return np.where(true_cells(frame, "accumulate"), 2.0 * sums, _OPERAND_ELEMENT_BYTES)


KERNEL_TABLES.register(TrainingKernelTable.name)(TrainingKernelTable())
