"""Which dims tensor parallelism divides is said by each layer; what stays whole is warned about."""

from __future__ import annotations

import pytest

from paleo.layers.base import LAYERS
from paleo.network.graph import build_graph
from paleo.parallel.placement import STRATEGY_PRESETS, Mesh, Strategy
from paleo.parallel.plan import unsplit_parameter_fractions
from paleo.predict import predict
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system

NODE = load_system("dgx-a100-80gb")
TP = Strategy(degrees={"tp": 4})


def undivided(model: str, degree: int = 4) -> dict[str, float]:
    graph = build_graph(load_model(model), batch=4)
    return unsplit_parameter_fractions(graph, STRATEGY_PRESETS["dp"](graph, TP), Mesh.from_degrees({"tp": degree}))


def test_every_dim_that_tensor_parallelism_divides_is_said_by_a_layer() -> None:
    said = {name: layer.tensor_parallel_dims for name, layer in LAYERS.items() if layer.tensor_parallel_dims}
    assert said == {
        "attention": ("kv_heads",),
        "latent_attention": ("kv_heads",),
        "relative_attention": ("kv_heads",),
        "sparse_attention": ("kv_heads",),
        "sparse_latent_attention": ("kv_heads",),
        "compressed_attention": ("kv_heads",),
        "delta_net": ("delta_heads",),
        "mlp": ("ffn",),
        "moe": ("ffn",),
        "mamba2": ("ssm_groups",),
        "linear": ("vocab",),
        "embedding": ("vocab",),
        "adaptive_embedding": ("vocab",),
        "adaptive_softmax": ("vocab",),
        "cross_entropy": ("vocab",),
    }


def test_a_transformer_is_divided_but_for_layers_that_cost_little() -> None:
    assert undivided("llama3-8b") == {}
    assert undivided("gpt2") == {}


def test_recurrent_layers_stay_whole() -> None:
    """Weights and biases of both LSTM layers; table and head are divided over the vocabulary."""
    spec = load_model("lstm_lm")
    graph = build_graph(spec, batch=4)
    whole = [node for node in graph.nodes if node.type == "lstm"]
    total = sum(t.elements * node.repeat for node in graph.nodes for t in node.parameters.values())
    kept = sum(t.elements * node.repeat for node in whole for t in node.parameters.values())
    assert sum(undivided("lstm_lm").values()) == pytest.approx(kept / total)
    assert undivided("lstm_lm", degree=1) == {}


def test_a_prediction_warns_about_them() -> None:
    run = Run(gpus=4, batch=8, strategy="tp=4")
    (warning,) = [text for text in predict(load_model("lstm_lm"), NODE, run).warnings if "does not split" in text]
    assert "layer.lstm1" in warning and "55% of the parameters whole" in warning
    assert not any("does not split" in text for text in predict(load_model("gpt2"), NODE, run).warnings)


def test_where_the_whole_axis_is_idle_one_warning_is_enough() -> None:
    texts = predict(load_model("resnet50"), NODE, Run(gpus=4, batch=8, strategy="tp=4")).warnings
    assert [text for text in texts if "tp=4" in text] == [
        "tp=4 splits nothing in this network: its ranks all do the same work"
    ]
