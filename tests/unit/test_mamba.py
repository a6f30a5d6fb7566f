"""Mamba-2: split by groups, over cp too, and its place in a hybrid network."""

from __future__ import annotations

import pytest

from paleo.errors import GraphError, PlanError
from paleo.layers.base import LAYERS, LayerImplementations
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


def test_a_scan_gets_whole_sequences_of_a_part_of_its_groups() -> None:
    """Megatron-Core exchanges gate, entries, keys, queries and steps before a scan, and its output after it."""
    whole, split = predicted("dp"), predicted("cp=2")
    assert split.executed_flops == pytest.approx(whole.executed_flops, rel=1e-9)
    assert split.memory.parameters == whole.memory.parameters
    section = next(each for each in split.program.sections if any("scan" in t.name for t in each.collectives))
    sent = [t for t in section.collectives if t.name.endswith(".scan") and t.phase == "forward"]
    mixer = next(node for node in split.graph.nodes if node.type == "mamba2")
    gate = next(tensor for op in mixer.operations for tensor in op.read_tensors if tensor.name.endswith(".gate"))
    steps = next(tensor for op in mixer.operations for tensor in op.read_tensors if tensor.name.endswith(".dt"))
    tokens, entries = 8192 / 2, gate.size("inner") * gate.size("ssm_groups")
    expected = 2.0 * tokens * (3 * entries + 2 * 8 * 128 + steps.size("heads") * 8)
    assert {t.operation for t in sent} == {"all_to_all"}
    assert sum(t.payload_bytes for t in sent) == pytest.approx(expected)
    with pytest.raises(PlanError, match="ssm_groups 8 cannot be divided over 16 ranks"):
        predicted("cp=16", gpus=16, global_batch=16)


def test_other_frameworks_split_no_scans() -> None:
    assert any("scans" in text for text in predicted("cp=2,zero=3", software="torchtitan").warnings)


def test_groups_must_divide_heads() -> None:
    layer = LAYERS["mamba2"].model_validate({"heads": 12, "groups": 8})
    with pytest.raises(GraphError, match="heads 12 must be a multiple of groups 8"):
        layer.to_operations("m", (Tensor("x", ("batch", "seq", "hidden"), (1, 16, 64)),), LayerImplementations())
