"""Optimizers: bytes kept and moved for each parameter, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from paleo.errors import PlanError
from paleo.network.graph import build_graph
from paleo.operations.base import OPTIMIZERS, WeightMatrices, configure_optimizer
from paleo.operations.contraction import weight_matrix
from paleo.operations.tensor import default_precision, with_autocast_weights
from paleo.predict import Prediction, predict
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system

#: Bytes kept, read and written per parameter in fp32 and in bf16. fp32: read gradient, weight, states; write weight,
#: states. bf16: the gradient is 2, the master 4, and 2 more are written.
BY_HAND = {
    "sgd": ((0, 8, 4), (4, 6, 6)),
    "momentum": ((4, 12, 8), (8, 10, 10)),
    "rmsprop": ((8, 16, 12), (12, 14, 14)),
    "adam": ((8, 16, 12), (12, 14, 14)),
    "adamw": ((8, 16, 12), (12, 14, 14)),
    "lars": ((4, 24, 8), (8, 20, 10)),
    "lamb": ((8, 32, 12), (12, 28, 14)),
    "lion": ((4, 12, 8), (8, 10, 10)),
    "muon": ((8, 16, 12), (12, 14, 14)),  # of vectors, embeddings and heads, as AdamW
    "shampoo": ((8, 16, 12), (12, 14, 14)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_bytes(name: str) -> None:
    for dtype, (kept, read, written) in zip(("fp32", "bf16"), BY_HAND[name], strict=True):
        formats = default_precision(dtype)
        assert configure_optimizer(name).state_bytes(formats) == kept
        assert configure_optimizer(name).update_bytes(formats) == (read, written)


#: Numbers read and written where each term is a pass. Adam: β·m, (1−β)·g and their sum 4 + 3; with g² 5 + 4 for v;
#: √v, + ε and m / that 4 + 3; times η and off the weight 3 + 2. Weight decay 3 + 2 more; LAMB two norms and a product.
#: Lion: two means of momentum and gradient at 4 + 3, a sign, η, decay.
#: RMSprop: as Adam, but for the sum of g / (√v + ε) with β·m, 3 + 2.
STEPWISE = {
    "sgd": (3, 2), "momentum": (6, 4), "rmsprop": (15, 11), "adam": (16, 12), "adamw": (19, 14), "lars": (11, 6),
    "lamb": (22, 15), "lion": (15, 11), "muon": (19, 14), "shampoo": (19, 14),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPWISE)
def test_bytes_step_by_step(name: str) -> None:
    read, written = STEPWISE[name]
    one = configure_optimizer(name, stepwise=True)
    assert (
        one.update_bytes(default_precision("fp32"))
        == one.update_bytes(with_autocast_weights(default_precision("fp16")))
        == (4 * read, 4 * written)
    )
    assert one.update_bytes(default_precision("bf16")) == (
        4 * read + 2 + 4,
        4 * written + 4 + 2,
    )  # gradient up, weight down
    assert one.state_bytes(default_precision("fp32")) == configure_optimizer(name).state_bytes(
        default_precision("fp32")
    )


def test_every_optimizer_is_counted_by_hand() -> None:
    assert set(BY_HAND) == set(STEPWISE) == set(OPTIMIZERS)
    for name in OPTIMIZERS:
        assert OPTIMIZERS[name].flops_per_parameter >= 2
        assert OPTIMIZERS[name].reference


def _flops(name: str, rows: float, columns: float) -> float:
    rule = configure_optimizer(name).matrix_update
    assert rule is not None
    kernels = rule.kernels("update", WeightMatrices(rows, columns, 1.0), default_precision("bf16"))
    return sum(kernel.flops * times for kernel, times in kernels)


def test_muon_multiplies_each_matrix_fifteen_times() -> None:
    """Five steps of X Xᵀ, A² and B X, on the short side of 768: 5 · (2·768²·3072 + 2·768³ + 2·768²·3072)."""
    by_hand = 5 * (2 * 768**2 * 3072 + 2 * 768**3 + 2 * 768**2 * 3072)
    assert _flops("muon", 768, 3072) == _flops("muon", 3072, 768) == by_hand == 40_768_634_880


def test_shampoo_multiplies_each_gradient_four_times_and_roots_now_and_then() -> None:
    """4·m·n·(m + n), and each hundredth step 19 iterations of four products a side."""
    roots = 19 * 4 * (2 * 768**3 + 2 * 3072**3) / 100
    assert _flops("shampoo", 768, 3072) == pytest.approx(4 * 768 * 3072 * (768 + 3072) + roots)
    halves = _flops("shampoo", 8192, 8192) * 2
    assert _flops("shampoo", 8192, 16384) == pytest.approx(halves)  # sides above 8192 are cut


def test_states_of_matrices() -> None:
    """Muon keeps a momentum; Shampoo both preconditioners and their roots, too."""
    matrices = WeightMatrices(768, 3072, 2.0)
    muon, shampoo = (configure_optimizer(name).matrix_update for name in ("muon", "shampoo"))
    assert muon is not None and muon.state_count(matrices) == 2 * 768 * 3072
    assert shampoo is not None and shampoo.state_count(matrices) == 2 * (768 * 3072 + 2 * (768**2 + 3072**2))


def test_which_weights_are_matrices() -> None:
    """Not embedding, head, norms and biases; experts have one each, filters are laid flat."""
    graph = build_graph(load_model("gpt2"), batch=1)
    shapes = {
        name: weight_matrix(tensor, node.operations) for node in graph.nodes for name, tensor in node.parameters.items()
    }
    assert {name: shape[:2] for name, shape in shapes.items() if shape} == {
        "block.branch1.1.attention1.qkv.weight": (768, 2304),
        "block.branch1.1.attention1.out.weight": (768, 768),
        "block.branch2.1.mlp1.up.weight": (768, 3072),
        "block.branch2.1.mlp1.down.weight": (3072, 768),
    }
    (first, *_) = (node for node in build_graph(load_model("resnet50"), batch=1).nodes if node.type == "conv")
    (weight,) = (tensor for tensor in first.parameters.values() if len(tensor.dims) > 1)
    assert weight_matrix(weight, first.operations) == (3 * 7 * 7, 64, 1)


def _predicted(**options: Any) -> Prediction:
    return predict(load_model("gpt2"), load_system("dgx-h100"), Run(batch=8, calibration="ideal", **options))


def test_a_step_with_muon_by_hand() -> None:
    """GPT-2 on one GPU: 12 layers' products and passes, and 4 bytes less of states for each of their numbers."""
    adamw, muon = (_predicted(gpus=1, optimizer=name, software="megatron-core") for name in ("adamw", "muon"))
    assert adamw.memory.optimizer - muon.memory.optimizer == 4 * 12 * 12 * 768**2
    flops = 12 * sum(_flops("muon", 768, columns) for columns in (2304, 768, 3072, 3072))
    peak = load_system("dgx-h100").device.peak["bf16"]
    assert muon.breakdown.optimizer > adamw.breakdown.optimizer + 0.9 * flops / peak
    assert any(text.startswith("muon") for text in muon.unmodelled)


def test_ranks_share_out_the_states_and_products_of_muon() -> None:
    one, two = _predicted(gpus=1, optimizer="muon"), _predicted(gpus=2, optimizer="muon", strategy="dp,zero=1")
    assert two.memory.optimizer == pytest.approx(one.memory.optimizer / 2, rel=0.01)
    assert two.breakdown.optimizer == pytest.approx(one.breakdown.optimizer / 2, rel=0.01)
    with pytest.raises(PlanError, match="muon are not priced on a host"):
        _predicted(gpus=1, optimizer="muon", offload="optimizer")
