"""Kernels of training steps: products and products of experts by stage, attention forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import pandas as pd

from paleo.pricing.attention import PrefillParameters, attention_backward_time, attention_prefill_time, default_kernel
from paleo.pricing.families import TrainingParameters, experts_product_time, hardened, trained_attention
from paleo.pricing.gemm import GemmParameters, gemm_time
from paleo.pricing.kernels import DeviceFigures
from paleo.pricing.store import lookup
from paleo.tables.cells import Array, number, text
from paleo.tables.kernels import KINDS, FitPlan, Fitted, TableKind, by_words, unpriced_reason

P = TypeVar("P")
#: Operation of a row -> its family; that of attention is followed by the kernel.
FAMILIES = {"matmul": "products", "group_matmul": "experts", "sdp_fwd": "attention", "sdp_bwd": "attention"}
#: Parameters that the rows of a family do not tell.
ABSENT = {"products": ("forward", "backward"), "experts": ("ramp", "forward", "backward"), "attention": ("ramp",)}
#: Bytes of an element of operands and results, and of the sums of gradients by their format.
ELEMENT, SUMS = 2.0, {"fp32": 4.0, "bf16": 2.0}
#: Tokens of the rows of attention that state none: those of the others.
TOKENS = 4096.0


class TrainingKernels(TableKind[DeviceFigures]):
    """Kernels that a framework's training step calls, timed one by one."""

    name = "training_kernels"
    header = frozenset({"op", "m", "k", "n", "layout", "groups", "group_m", "stage", "head_num", "time_us", "device"})
    reads = (
        "dtype accumulate out_dtype group_n group_k batch seq_len kv_head_num qk_head_dim v_head_dim main_grad_dtype"
    )
    configuration = (
        "op", "m", "k", "n", "groups", "group_m", "group_n", "stage", "seq_len", "head_num", "kv_head_num",
        "qk_head_dim",
    )  # fmt: skip
    families: ClassVar[Mapping[str, type[Any]]] = {
        f"training.{name}": TrainingParameters
        for name in ("products", "experts", *(f"attention.{kernel}" for kernel in ("fa2", "fa3", "fa4")))
    }
    host_parameters = ("launch",)

    def prepared(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Add the number format: rows that name none are in bf16."""
        stated = text(frame, "dtype")
        return frame.assign(dtype=stated.where(stated != "", "bf16"))

    def unsupported(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Name operations that are unknown, formats that the device lacks, and rows without work."""
        reason = self._unpriced(frame)
        reason[(reason == "") & ~(self.work(frame)[0] > 0)] = "size is missing or not above zero"
        return reason

    @by_words
    def _unpriced(self, device: str, dtype: str, op: str) -> str:
        if op in FAMILIES:
            return unpriced_reason(device, dtype or "bf16", "", frozenset({"bf16", "fp16"}))
        return f"op {op!r} is not modelled"

    @by_words
    def family(self, device: str, op: str) -> str:
        """Name the family of a row: products, experts, or attention by the usual kernel of the device."""
        name = f"training.{FAMILIES[op]}"
        if not name.endswith("attention"):
            return name
        traits = self.figures(device, "bf16", "")
        return f"{name}.{default_kernel(traits.architecture, traits.memory_kind)}"

    def fit_plan(self, subject: str, family: str, stack: str, figures: DeviceFigures, fitted: Fitted) -> FitPlan:
        """Fit what the rows of a family tell."""
        return FitPlan(TrainingParameters(), fixed=ABSENT[family.split(".")[1]], prior=0.2)

    def work(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """Count the FLOP of products and of visible scores, and the bytes of operands and results once."""
        rows, columns, length, count = _product(frame)
        heads, tokens = number(frame, "head_num", 0.0), number(frame, "seq_len", TOKENS)
        widths = number(frame, "qk_head_dim", 0.0) + number(frame, "v_head_dim", 0.0)
        backward = np.where(text(frame, "op") == "sdp_bwd", 2.5, 1.0)
        attention = backward * heads * tokens**2 * widths
        moved = count * ((rows + columns) * length * ELEMENT + rows * columns * _written(frame))
        return 2.0 * count * rows * columns * length + attention, moved + 4.0 * heads * tokens * widths

    def time(self, frame: pd.DataFrame, figures: DeviceFigures, parameters: TrainingParameters) -> Array:
        """Predict the seconds of rows of one device and family."""
        if frame.empty:
            return np.zeros(0)
        op, products = str(frame["op"].iloc[0]), _shipped(GemmParameters, "gemm.tensor", figures)
        if FAMILIES[op] == "attention":
            return _attention(frame, figures, parameters, products.training_activity)
        rows, columns, length, count = _product(frame)
        shared: dict[str, Any] = {
            "m": rows, "n": columns, "k": length, "element_bytes": ELEMENT, "result_bytes": _written(frame),
            "weight_copies": np.inf, "activity": products.training_activity, "device": figures,
            "parameters": replace(products, launch=parameters.launch),
        }  # fmt: skip
        if op == "matmul":
            cold, hot = (gemm_time(sustained=load, **shared) for load in (0.0, 1.0))
            return hardened(cold, hot, parameters.ramp)
        shared["parameters"] = replace(products, launch=0.0)
        return experts_product_time(experts=count, launch=parameters.launch, sustained=1.0, **shared)


def _shipped(kind: type[P], family: str, figures: DeviceFigures) -> P:
    return lookup(
        kind, subject=figures.name, architecture=figures.architecture, memory_kind=figures.memory_kind, family=family
    ).parameters


def _attention(frame: pd.DataFrame, figures: DeviceFigures, p: TrainingParameters, activity: float) -> Array:
    kernel = default_kernel(figures.architecture, figures.memory_kind)
    engine = _shipped(PrefillParameters, f"attention.{kernel}.prefill", figures)
    tokens = number(frame, "seq_len", TOKENS)
    shape: dict[str, Any] = {
        "batch": number(frame, "batch", 1.0), "query_heads": number(frame, "head_num"),
        "kv_heads": number(frame, "kv_head_num"), "query_length": tokens, "kv_length": tokens,
        "head_dim": number(frame, "qk_head_dim"), "value_dim": number(frame, "v_head_dim"), "causal": True,
        "kernel_name": kernel, "device": figures, "sustained": 1.0,
        "parameters": replace(trained_attention(engine, p), launch_time=p.launch),
        "activity": activity,
    }  # fmt: skip
    forward = (text(frame, "op") == "sdp_fwd").to_numpy(dtype=bool)
    return np.where(forward, attention_prefill_time(**shape), attention_backward_time(**shape))


def _product(frame: pd.DataFrame) -> tuple[Array, Array, Array, Array]:
    """Return rows, columns, length of the sum and count of products; zeros for attention."""
    m, n, k, groups = (number(frame, name, 0.0) for name in ("group_m", "group_n", "group_k", "groups"))
    stage = text(frame, "stage").to_numpy(dtype=object)
    weights, forward = stage == "bwd_grad_w", stage == "fwd"
    grouped = groups > 0
    rows = np.where(grouped, np.where(weights, n, m), number(frame, "m", 0.0))
    columns = np.where(grouped, np.where(forward, n, k), number(frame, "n", 0.0))
    length = np.where(grouped, np.where(forward, k, np.where(weights, m, n)), number(frame, "k", 0.0))
    return rows, columns, length, np.where(grouped, groups, 1.0)


def _written(frame: pd.DataFrame) -> Array:
    """Return the bytes for each element of a result: written once, or read and written where it is added to a sum."""
    stated = text(frame, "main_grad_dtype").where(number(frame, "groups", 0.0) > 0, text(frame, "out_dtype"))
    sums = stated.map(SUMS).fillna(ELEMENT).to_numpy(dtype=np.float64)
    added = text(frame, "accumulate").str.lower().isin(["true", "1", "1.0"]).to_numpy(dtype=bool)
    return np.where(added, 2.0 * sums, ELEMENT)


KINDS.register(TrainingKernels.name)(TrainingKernels())
