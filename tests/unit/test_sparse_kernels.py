"""Attention over selected keys: what rows of the table do, and limits of their price."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from paleo.pricing.kernels import device_datasheet
from paleo.pricing.sparse_attention import SparseAttentionParameters
from paleo.specs.device import load_device
from paleo.tables.kernels import KERNEL_TABLES

KIND, B200 = KERNEL_TABLES["sparse_attention"], device_datasheet(load_device("b200"), "bf16")
ROW = {
    "device": "b200", "library": "sglang", "kernel_source": "sglang_dsa_indexer_trtllm", "model": "DeepSeek-V3.2",
    "kind": "dsa", "part": "module", "phase": "context", "num_heads": 128, "batch_size": 1, "q_len": 8192,
    "past_len": 0, "kv_dtype": "fp8", "weight_dtype": "fp8_block",
}  # fmt: skip
#: Only the products of attention cost time.
CORE = replace(
    SparseAttentionParameters(),
    launch_time=0.0,
    fp8_cache_launch_time=0.0,
    pass_bandwidth_share=1e12,
    bandwidth_share=1e9,
    time_per_sequence=0.0,
)


def seconds(parameters: SparseAttentionParameters | None = None, **changed: object) -> float:
    frame = KIND.prepare_rows(pd.DataFrame([ROW | changed]))
    return float(KIND.predict_times(frame, B200, parameters or SparseAttentionParameters())[0])


def test_keys_beyond_those_that_are_selected_cost_the_indexer_alone() -> None:
    attention = {"part": "attention", "q_len": 1024}
    assert seconds(**attention, past_len=8192) == pytest.approx(seconds(**attention, past_len=65536))
    assert seconds(part="indexer_logits", past_len=65536) > 3 * seconds(part="indexer_logits", past_len=8192)


def test_attention_counts_latents_of_576_and_512_for_each_head() -> None:
    free = SparseAttentionParameters(
        launch_time=0.0, attention_peak_share=1.0, pass_bandwidth_share=1e9, bandwidth_share=1e9
    )
    expected = 2 * 8192 * 128 * 2048 * (576 + 512) / B200.peak_flops_per_s
    assert seconds(free, part="attention", past_len=65536) == pytest.approx(expected, rel=1e-3)


def test_a_layer_that_takes_the_choice_of_another_scores_nothing() -> None:
    skipping = seconds(kernel_source="sglang_dsa_skip_indexer_trtllm")
    without = replace(
        SparseAttentionParameters(),
        indexer_peak_share=1e9,
        selection_bandwidth_share=1e9,
        search_picoseconds_per_key=0.0,
        search_start_time=0.0,
        cycles_per_key=0.0,
    )
    assert skipping < seconds() and skipping == pytest.approx(seconds(without), rel=0.05)


def test_one_query_walks_its_keys_in_a_block_and_selects_them_in_another() -> None:
    """Deep keys of few queries fill no device: 131,072 keys took 282 to 290 us for 1 to 128 queries on a B200."""
    walk = SparseAttentionParameters(
        launch_time=0.0, bandwidth_share=1e9, indexer_peak_share=1e9, selection_bandwidth_share=1e9, cycles_per_key=4.0
    )
    expected = 4.0 * (131_072 + 1) / B200.clock_hz
    for queries in (1, 2):
        assert seconds(walk, part="indexer_logits", past_len=131_072, q_len=queries) == pytest.approx(
            expected, rel=0.01
        )
    select = SparseAttentionParameters(
        launch_time=0.0, selection_bandwidth_share=1e9, search_picoseconds_per_key=0.0, search_start_time=1e-5
    )
    assert seconds(select, part="topk", past_len=65536, q_len=100) == pytest.approx(1e-5)
    assert seconds(select, part="topk", past_len=65536, q_len=2 * 148 * 8) == pytest.approx(8e-5)
    assert seconds(select, part="topk", past_len=0, q_len=1024) < 1e-12


def test_weights_are_read_once_and_networks_are_told_by_name() -> None:
    free = SparseAttentionParameters(
        launch_time=0.0, projection_peak_share=1e9, bandwidth_share=1.0, attention_peak_share=1e9,
        indexer_peak_share=1e9, selection_bandwidth_share=1e9,
        fp8_launch_time=0.0, fp8_cache_launch_time=0.0, indexer_launch_time=0.0, picoseconds_per_pair=0.0,
    )  # fmt: skip
    one = seconds(
        replace(
            free, pass_bandwidth_share=1e9, search_picoseconds_per_key=0.0, search_start_time=0.0, cycles_per_key=0.0
        ),
        phase="generation",
        q_len=1,
    )
    weights = 7168 * (1536 + 576) + 1536 * 128 * 192 + 128 * (512 * (128 + 128) + 128 * 7168)
    weights += (1536 * 64 + 7168) * 128 + 7168 * 64
    assert one == pytest.approx(weights / B200.memory_bandwidth, rel=0.01)
    reasons = KIND.unsupported_reasons(pd.DataFrame([ROW, ROW | {"model": "someone/else"}]))
    assert reasons.iloc[0] == "" and "someone/else" in reasons.iloc[1]
    assert np.isfinite(KIND.flops_and_bytes(pd.DataFrame([ROW]))).all()


def test_launches_grow_with_formats_and_hide_behind_the_device_where_a_host_issues_them_ahead() -> None:
    """Small layers of SGLang on an H100 took 320 us in 16 bits, 626 with weights in 8, 674 with the cache too."""
    idle = SparseAttentionParameters(
        launch_time=3e-4, fp8_launch_time=3e-4, fp4_launch_time=9e-4, fp8_cache_launch_time=1e-4,
        indexer_launch_time=8e-4, dense_launch_time=2e-4,
        launch_norm_order=8.0, picoseconds_per_pair=0.0001,
    )  # fmt: skip
    skip = "sglang_dsa_skip_indexer_flashmla_kv"
    small = {"q_len": 1, "num_heads": 8, "past_len": 4096, "kernel_source": skip}
    cases = {
        ("bfloat16", "bfloat16", skip): 3e-4,
        ("fp8_block", "bfloat16", skip): 6e-4,
        ("nvfp4", "bfloat16", skip): 12e-4,
        ("fp8_block", "fp8", skip): 7e-4,
        ("bfloat16", "bfloat16", "sglang_dsa_indexer_flashmla_kv"): 11e-4,
        ("bfloat16", "bfloat16", "sglang_dsa_dense_mha_fa3"): 5e-4,
    }
    for (weights, keys, source), expected in cases.items():
        asked = small | {"weight_dtype": weights, "kv_dtype": keys, "kernel_source": source}
        assert seconds(idle, **asked) == pytest.approx(expected, rel=0.01)
    graph = replace(idle, launch_norm_order=1.0)
    deep = {"q_len": 65536, "past_len": 65536, "kernel_source": skip}
    alone = seconds(replace(graph, launch_time=0.0, fp8_launch_time=0.0, fp8_cache_launch_time=0.0), **deep)
    assert seconds(graph, **deep) == pytest.approx(alone + 7e-4) and seconds(idle, **deep) == pytest.approx(alone)


def test_a_paged_indexer_pays_for_pairs_of_tokens() -> None:
    """4,096 tokens of one or two sequences took 75 us, 8,192 of one or four 250, whatever their few keys (H100)."""
    pairs = replace(
        SparseAttentionParameters(),
        indexer_peak_share=1e9,
        selection_bandwidth_share=1e9,
        bandwidth_share=1e9,
        cycles_per_key=0.0001,
        launch_time=1e-8,
        picoseconds_per_pair=3.7,
    )
    one, two = (seconds(pairs, part="indexer_logits", phase="generation", kind="csa", q_len=n) for n in (4096, 8192))
    assert two / one == pytest.approx(4.0, rel=0.01) and 50e-6 < one < 75e-6
    assert seconds(pairs, part="attention", q_len=8192) == pytest.approx(seconds(part="attention", q_len=8192), rel=0.5)


def test_flashmla_computes_whole_tiles_of_heads() -> None:
    """A token of long prompts took 1.5 to 1.9 us with 1 to 64 heads, 3.7 with 128 (TensorRT-LLM on an H100)."""
    hopper = {"device": "h100-sxm5-80gb", "library": "trtllm", "kernel_source": "default", "part": "attention"}
    one, most, twice = (seconds(CORE, **hopper, num_heads=heads) for heads in (1, 64, 128))
    assert one == pytest.approx(most) and twice == pytest.approx(2 * most)
    blackwell = {"library": "vllm", "part": "attention", "kv_dtype": "bfloat16"}
    flashmla = [seconds(CORE, **blackwell, kernel_source="FLASHMLA_SPARSE", num_heads=heads) for heads in (32, 128)]
    flashinfer = [
        seconds(CORE, **blackwell, kernel_source="FLASHINFER_MLA_SPARSE", num_heads=heads) for heads in (32, 128)
    ]
    assert flashmla[0] == pytest.approx(flashmla[1]) and flashinfer[1] == pytest.approx(4 * flashinfer[0])


def test_some_kernels_multiply_slots_without_a_key() -> None:
    short = {"part": "attention", "q_len": 512, "device": "h100-sxm5-80gb", "kv_dtype": "bfloat16", "num_heads": 64}
    vllm = {"library": "vllm", "kernel_source": "FLASHMLA_SPARSE"}
    newer, older = (seconds(CORE, **short, **vllm, version=release) for release in ("0.24.0", "0.19.0"))
    assert older == pytest.approx(newer * 2048 / 256.5)
    assert seconds(CORE, **short, library="trtllm", kernel_source="default") == pytest.approx(older)


def test_vllm_prefills_few_heads_with_a_cache_in_8_bits_by_the_kernel_of_decoding() -> None:
    """8,192 keys took 1.16 us a token with 4 heads and 0.86 with 32 on an H100, since the latter run in 16 bits."""
    core = replace(CORE, attention_peak_share=0.6, fp8_cache_attention_peak_share=0.3)
    rows = {"part": "attention", "device": "h100-sxm5-80gb", "library": "vllm", "kernel_source": "FLASHMLA_SPARSE"}
    few, many = (seconds(core, **rows, past_len=65536, num_heads=heads) for heads in (4, 32))
    assert few == pytest.approx(2 * many, rel=1e-3)


def test_attention_over_all_keys_has_heads_of_their_own() -> None:
    dense = seconds(
        replace(CORE, attention_peak_share=1.0),
        part="attention",
        kernel_source="sglang_dsa_dense_mha_trtllm_ragged",
        q_len=1024,
    )
    assert dense == pytest.approx(2 * 1024 * 128 * 512.5 * (192 + 128) / B200.peak_flops_per_s, rel=1e-3)


def test_each_sequence_of_several_new_tokens_costs_a_start() -> None:
    """2,048 sequences of one token took 201 us, 512 of four 985 (vLLM on an H100)."""
    starts = replace(SparseAttentionParameters(), time_per_sequence=1.5e-6)
    verify = {"kind": "hca", "part": "attention", "phase": "generation", "past_len": 64}
    one, four = (seconds(starts, **verify, batch_size=2048 // each, q_len=each) for each in (1, 4))
    assert four - one == pytest.approx(512 * 1.5e-6, rel=0.05)
