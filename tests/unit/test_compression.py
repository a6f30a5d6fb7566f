"""Compression of gradients: counted bytes against index sets that are really merged, limits, worked values."""

from __future__ import annotations

import numpy as np
import pytest

from paleo.compression._methods import _Sparse, recursive_doubling_bytes, union_density_of_ranks
from paleo.compression.base import COMPRESSIONS, SummedGradient, break_even_bandwidth, parse_compression, wire_bytes
from paleo.errors import PaleoError

EXAMPLES = (
    "fp16", "bf16", "fp8", "int8", "onebit", "qsgd:4", "terngrad", "topk:0.001", "dgc:0.001", "gtopk:0.001",
    "powersgd:4", "factors", "zeropp",
)  # fmt: skip
GRADIENT = SummedGradient(
    elements=25e6, tensors=160.0, ranks=64.0, ranks_per_node=8.0,
    matrix_elements=24e6, matrix_side_sums=1e5, fully_connected_elements=2e6, fully_connected_side_sums=3e3,
    fully_connected_samples_per_rank=32.0,
)  # fmt: skip


def test_every_method_has_an_example_here() -> None:
    assert {text.partition(":")[0] for text in EXAMPLES} == set(COMPRESSIONS)


@pytest.mark.parametrize("text", EXAMPLES)
def test_methods_broadcast_and_count_something(text: str) -> None:
    method = parse_compression(text)
    ranks = np.array([2.0, 8.0, 64.0])
    fields = {name: getattr(GRADIENT, name) for name in GRADIENT.__dataclass_fields__}
    many = SummedGradient(**fields | {"ranks": ranks})
    for place, count in enumerate(ranks):
        alone = SummedGradient(**fields | {"ranks": float(count)})
        for several, single in zip(method.collectives(many), method.collectives(alone), strict=True):
            assert np.broadcast_to(several.payload, ranks.shape)[place] == pytest.approx(float(single.payload))
        coded = method.encoding_work(many) + method.decoding_work(many)
        single_coding = method.encoding_work(alone) + method.decoding_work(alone)
        assert np.broadcast_to(coded.bytes, ranks.shape)[place] == pytest.approx(float(single_coding.bytes))
        assert np.broadcast_to(method.state_bytes(many), ranks.shape)[place] == pytest.approx(
            float(method.state_bytes(alone))
        )
    assert method.reference and method.summary


@pytest.mark.parametrize("text", sorted(set(EXAMPLES) - {"zeropp", "factors"}))
def test_less_is_sent_than_of_the_dense_gradient(text: str) -> None:
    dense = 2.0 * 63 / 64 * 1e8
    assert float(wire_bytes(parse_compression(text).collectives(GRADIENT), GRADIENT)) < 0.6 * dense


def test_worked_bytes() -> None:
    """64 ranks, 25 M fp32 elements: 1 bit sends 2 · 63/64 · 3.125 MB, fp16 2 · 63/64 · 50 MB."""
    sent = {
        text: float(wire_bytes(parse_compression(text).collectives(GRADIENT), GRADIENT)) for text in ("onebit", "fp16")
    }
    assert sent["onebit"] == pytest.approx(2 * 63 / 64 * 3.125e6)
    assert sent["fp16"] == pytest.approx(2 * 63 / 64 * 50e6)


def merged(density: float, ranks: int, elements: int) -> tuple[float, float, float]:
    """Bytes a rank sends an element in a gather, in recursive doubling, in split and gather, of index sets drawn at
    random and really merged."""
    random = np.random.default_rng(11)
    chosen = [frozenset(np.flatnonzero(random.random(elements) < density).tolist()) for _ in range(ranks)]
    gathered = 8.0 * sum(map(len, chosen[1:])) / elements
    sets, doubling, distance = list(chosen), 0.0, 1
    while distance < ranks:
        doubling += min(8.0 * np.mean([len(each) for each in sets]), 4.0 * elements) / elements
        sets = [each | sets[place ^ distance] for place, each in enumerate(sets)]
        distance *= 2
    own = 8.0 * np.mean([len(each) for each in chosen]) * (ranks - 1) / ranks
    sums = min(8.0 * len(sets[0]), 4.0 * elements) * (ranks - 1) / ranks
    return gathered, float(doubling), float((own + sums) / elements)


def sent_by_schemes(density: float, ranks: int) -> dict[str, float]:
    """Bytes that a rank sends an element of the gradient in each way to sum sparse ones."""
    gradient = SummedGradient(elements=1.0, tensors=1.0, ranks=float(ranks))
    schemes = _Sparse("topk", density, momentum=False, reference="").schemes(gradient)
    return {name: float(wire_bytes(messages, gradient)) for name, messages in schemes.items()}


@pytest.mark.parametrize(("density", "ranks"), [(0.001, 8), (0.01, 32), (0.05, 16), (0.3, 8)])
def test_fill_in_is_that_of_merged_index_sets(density: float, ranks: int) -> None:
    gathered, doubling, split = merged(density, ranks, 20_000 if density > 0.005 else 400_000)
    sent = sent_by_schemes(density, ranks)
    assert sent["gather all"] == pytest.approx(gathered, rel=0.05)
    assert sent["recursive doubling"] == pytest.approx(doubling, rel=0.05)
    assert sent["split and gather"] == pytest.approx(split, rel=0.05)


def test_sparse_sums_never_cost_more_than_dense_ones() -> None:
    density = np.geomspace(1e-5, 1.0, 40)
    split = np.array([sent_by_schemes(share, 64)["split and gather"] for share in density])
    assert (split <= (8.0 * density + 4.0) * 63 / 64 + 1e-12).all()
    assert (recursive_doubling_bytes(density, 64.0) <= 6 * 4.0).all()
    assert (np.diff(union_density_of_ranks(density, 64.0)) >= 0).all()


def test_factors_pay_for_small_batches_alone() -> None:
    """P B (a + b) < 2 a b: 64 · 32 · 3000 is more than 4 M, 2 · 32 · 3000 is less."""
    fields = {name: getattr(GRADIENT, name) for name in GRADIENT.__dataclass_fields__}
    many, few = (
        parse_compression("factors").collectives(SummedGradient(**fields | {"ranks": ranks})) for ranks in (64.0, 2.0)
    )
    assert float(many[1].payload) == 0.0 and float(few[1].payload) == 2 * 32 * 3e3 * 4


def test_break_even() -> None:
    assert float(break_even_bandwidth(1e9, 2e9, 0.1)) == 0.0
    assert float(break_even_bandwidth(2e9, 1e9, 0.0)) == np.inf
    assert break_even_bandwidth(np.array([2e9, 4e9]), 1e9, 0.5).tolist() == [2e9, 6e9]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zip", "unknown compression"),
        ("topk", "the share of elements"),
        ("topk:2", "from 1e-07 to 1"),
        ("qsgd:x", "the bits of an element"),
        ("qsgd:nan", "the bits of an element"),
        ("fp16:3", "takes no argument"),
    ],
)
def test_bad_methods_are_one_message(text: str, words: str) -> None:
    with pytest.raises(PaleoError, match=words):
        parse_compression(text)


@pytest.mark.parametrize(("density", "ranks"), [(0.001, 16), (0.05, 64), (0.3, 8)])
def test_sparse_sums_on_index_sets(density: float, ranks: int) -> None:
    """Recursive doubling and split-and-gather on drawn index sets send what the schemes count, within 5 %."""
    elements, random = 100_000, np.random.default_rng(3)
    chosen = [set(random.choice(elements, int(density * elements), replace=False).tolist()) for _ in range(ranks)]
    sent, held = 0.0, [set(each) for each in chosen]
    for distance in (2**number for number in range(int(np.log2(ranks)))):
        sent += np.mean([min(8.0 * len(each), 4.0 * elements) for each in held])
        held = [held[rank] | held[rank ^ distance] for rank in range(ranks)]
    gradient = SummedGradient(elements=float(elements), tensors=1.0, ranks=float(ranks))
    schemes = parse_compression(f"topk:{density}").schemes(gradient)  # type: ignore[attr-defined]
    assert float(wire_bytes(schemes["recursive doubling"], gradient)) == pytest.approx(sent, rel=0.05)
    split = (8.0 * density * elements + min(8.0 * len(held[0]), 4.0 * elements)) * (ranks - 1) / ranks
    assert float(wire_bytes(schemes["split and gather"], gradient)) == pytest.approx(split, rel=0.05)
    cheapest = min(float(wire_bytes(messages, gradient)) for messages in schemes.values())
    chosen_messages = parse_compression(f"topk:{density}").collectives(gradient)
    assert float(wire_bytes(chosen_messages, gradient)) == pytest.approx(cheapest)
