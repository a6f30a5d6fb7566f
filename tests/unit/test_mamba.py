"""Mamba-2: split by groups, whole along the sequence, and its place in a hybrid network."""

from __future__ import annotations

import pytest

from paleo.errors import GraphError, PlanError
from paleo.layers.base import LAYERS, Choices
from paleo.network.graph import build_graph
from paleo.operations.tensor import Tensor
from paleo.predict import Prediction, predict
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system

H100 = load_system("dgx-h100")
NETWORK = load_model("nemotron-h-8b")


def predicted(strategy: str, **run: object) -> Prediction:
    asked = {"gpus": 8, "global_batch": 8, "microbatch": 1, "dtype": "bf16", "software": "megatron-core", **run}
    return predict(NETWORK, H100, Run.model_validate({**asked, "strategy": strategy}))


def test_the_hybrid_has_its_layers() -> None:
    """24 of Mamba, 24 feed-forward, 4 of attention."""
    counts: dict[str, int] = {}
    for node in build_graph(NETWORK, batch=1).nodes:
        counts[node.type] = counts.get(node.type, 0) + node.repeat
    assert (counts["mamba2"], counts["mlp"], counts["attention"]) == (24, 24, 4)


def test_groups_are_divided_over_tensor_ranks() -> None:
    whole, split = predicted("dp"), predicted("tp=8,sp")
    assert split.memory.parameters == pytest.approx(whole.memory.parameters / 8, rel=1e-3)
    assert split.executed_flops == pytest.approx(whole.executed_flops, rel=1e-9)
    assert not any("does not split" in text for text in split.warnings)


def test_a_scan_runs_again_backward() -> None:
    """Its products are a tenth of a layer's: HFU is that little above MFU."""
    prediction = predicted("dp")
    assert 1.0 < prediction.hfu / prediction.mfu < 1.1


def test_the_sequence_of_a_scan_stays_whole() -> None:
    with pytest.raises(PlanError, match="seq cannot be divided: its steps wait for one another"):
        predicted("cp=2")


def test_groups_must_divide_heads() -> None:
    layer = LAYERS["mamba2"].model_validate({"heads": 12, "groups": 8})
    with pytest.raises(GraphError, match="heads 12 must be a multiple of groups 8"):
        layer.expand("m", (Tensor("x", ("batch", "seq", "hidden"), (1, 16, 64)),), Choices())
