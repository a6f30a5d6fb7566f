"""Placements that a user states: laid over a preset, with what they owe, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paleo.cli import run_command_line as paleo
from paleo.errors import PlanError
from paleo.network.graph import build_graph
from paleo.parallel.placement import STRATEGY_PRESETS, Mesh, layer_label, override_placement, parse_strategy
from paleo.parallel.propagation import propagate_placement
from paleo.predict import Prediction, predict
from paleo.search.layer_splits import search_layer_splits
from paleo.specs.model import build_model_spec, load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system

SYSTEM = load_system("dgx-a100-80gb")
WIDE, BATCH = 16, 8
#: Megatron's tensor parallelism (Shoeybi et al., 2019), layer by layer.
MEGATRON: dict[str, Any] = {
    "*.attention1": {"kv_heads": "tp"},
    "*.mlp1": {"ffn": "tp"},
    "embed": {"vocab": "tp"},
    "head": {"vocab": "tp"},
    "cross_entropy1": {"vocab": "tp"},
}
#: The same with the sequence split between those layers (Korthikanti et al., 2022).
SEQUENCE: dict[str, Any] = {"*": {"seq": ["tp"]}} | {name: {"seq": None, **dims} for name, dims in MEGATRON.items()}


def made(model: str, strategy: str, placement: dict[str, Any] | None = None, **more: Any) -> Prediction:
    run = Run(gpus=8, batch=4, strategy=strategy, placement=placement or {}, **more)
    return predict(load_model(model), SYSTEM, run)


@pytest.mark.parametrize("model", ["gpt2-medium", "llama3-8b"])
@pytest.mark.parametrize(("suffix", "placement"), [("", MEGATRON), (",sp", SEQUENCE)])
def test_megatron_by_hand_is_the_preset(model: str, suffix: str, placement: dict[str, Any]) -> None:
    """The same kernels, collectives, seconds and bytes, to the last digit."""
    preset, by_hand = made(model, f"tp=4,dp=2{suffix}"), made(model, "batch,tp=4,dp=2", placement)
    assert by_hand.program == preset.program
    assert by_hand.breakdown == preset.breakdown
    assert by_hand.memory == preset.memory
    assert by_hand.warnings == ()


def test_one_replicated_layer_pays_what_the_rules_say() -> None:
    """Under sequence parallelism an MLP that no rank shares still gathers its input (again for its weight gradient),
    gathers its output's gradient, and sums nothing: its weights are whole on every rank, its output is sliced."""
    split, mixed = made("gpt2-medium", "tp=4,dp=2,sp"), made("gpt2-medium", "tp=4,dp=2,sp", {"*.mlp1": {"ffn": None}})

    def owed(of: Prediction) -> set[tuple[str, str, str, float]]:
        block = max(of.program.sections, key=lambda section: section.repeat)
        return {(one.name, one.operation, one.phase, one.payload_bytes) for one in block.collectives}

    size = 4 * 1024 * 1024 * 2.0  # batch · sequence · hidden, bf16
    mlp = "block.branch2.1.mlp1"
    assert owed(mixed) <= owed(split)
    assert owed(split) - owed(mixed) == {
        (f"{mlp}>block.branch2.1.layer_norm1", "reduce_scatter", "backward", size),
        (f"block.branch2.1.dropout1<{mlp}.down", "reduce_scatter", "forward", size),
    }
    weights = 24 * 3 / 4 * (2 * 1024 * 4096 + 4096)  # three quarters of two matrices and a bias in 24 blocks
    assert mixed.program.parameter_count - split.program.parameter_count == weights
    assert mixed.program.flops() > split.program.flops() and mixed.step_time > split.step_time


def chain(*layers: Any) -> Any:
    head = {"title": "t", "task": "t", "source": "t", "inputs": {"x": {"dims": {"batch": "=batch", "hidden": WIDE}}}}
    return build_graph(build_model_spec(head | {"layers": list(layers)}, "t.yaml"), batch=BATCH)


def linear(name: str, dim: str) -> dict[str, Any]:
    return {"name": name, "linear": {"features": WIDE, "dim": dim, "bias": False}}


def placed(graph: Any, stated: dict[str, Any], **degrees: int) -> Any:
    preset = STRATEGY_PRESETS["batch"](graph, parse_strategy("batch"))
    return {
        one.node.name: one
        for one in propagate_placement(graph, override_placement(preset, graph, stated), Mesh.from_degrees(degrees))
    }


def test_entries_are_laid_over_one_another_dim_by_dim() -> None:
    graph = chain(linear("one", "ffn"), linear("two", "wide"), linear("three", "out"))
    stated = {"*": {"batch": "cp"}, "t*": {"batch": ["cp", "dp"]}, "three": {"out": "tp"}}
    preset = STRATEGY_PRESETS["batch"](graph, parse_strategy("batch"))
    splits = [override_placement(preset, graph, stated).split_axes_of(node) for node in graph.nodes]
    assert splits == [{"batch": ("cp",)}, {"batch": ("cp", "dp")}, {"batch": ("cp", "dp"), "out": ("tp",)}]


def test_a_stated_split_owes_what_the_rules_say() -> None:
    """Two layers split by features: the first leaves its output split, the second gathers it (rule B), and its input
    gradient, which sums over the split features, is scattered back (rule A)."""
    graph = chain(linear("stem", "ffn"), linear("one", "wide"), linear("two", "out"))
    nodes = placed(graph, {"one": {"wide": "tp"}, "two": {"out": "tp"}}, tp=4, dp=2)
    owed = sorted(
        (c.operation, c.phase, int(c.tensor.elements)) for c in nodes["two"].communications if not c.overlapped
    )
    share = BATCH // 2 * WIDE
    assert owed == [("all_gather", "forward", share), ("reduce_scatter", "backward", share)]


def test_layers_of_folded_blocks_go_by_a_star() -> None:
    graph = build_graph(load_model("gpt2"), batch=1)
    assert {layer_label(node) for node in graph.nodes} >= {"embed", "block.*.branch2.1.mlp1"}


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ({"block.*.mpl1": {"ffn": "tp"}}, "no layer of gpt2 is called 'block.*.mpl1'; nearest: "),
        ({"block.3.mlp1": {"ffn": "tp"}}, "no layer of gpt2 is called 'block.3.mlp1'"),
        ({"head": {"vocabulary": "tp"}}, "layer 'head' has no dim 'vocabulary'; nearest: 'vocab'"),
        ({"*.mlp1": {"ffn": "tpp"}}, "unknown mesh axis 'tpp'; nearest: 'tp'"),
        ({"*.mlp1": {"ffn": "pp"}}, "a pipeline cuts the network"),
        ({"*.mlp1": {"ffn": ["tp", "tp"]}}, "names an axis twice"),
        ({"*.mlp1": {"batch": "tp"}}, "tp would divide both 'batch' and 'ffn'"),
        (
            {"*.attention1": {"kv_heads": None, "head_dim": "tp"}},
            "head_dim cannot be divided: attention is divided by batch, seq or kv_heads",
        ),
        ({"*.mlp1": {"hidden": "dp", "batch": None}}, "hidden 769 cannot be divided over 4"),
    ],
)
def test_what_is_wrong_is_said(placement: dict[str, Any], words: str) -> None:
    sizes = {"hidden": 769, "heads": 1} if "769" in words else {}
    strategy = "dp=4,tp=1" if "769" in words else "tp=2"
    with pytest.raises(PlanError) as error:
        predict(load_model("gpt2"), SYSTEM, Run(gpus=4, batch=4, strategy=strategy, placement=placement, model=sizes))
    assert words in str(error.value)


def test_steps_of_a_recurrence_cannot_be_divided() -> None:
    with pytest.raises(PlanError, match="seq cannot be divided: its steps wait for one another"):
        predict(load_model("lstm_lm"), SYSTEM, Run(gpus=2, batch=4, strategy="cp=2", model={"seq": 64}))


def test_a_search_layer_by_layer_places_layers_itself() -> None:
    run = Run(gpus=8, global_batch=64, placement={"head": {"vocab": None}})
    with pytest.raises(PlanError, match="placement: head: a per-layer search places the layers itself"):
        search_layer_splits(load_model("gpt2"), SYSTEM, run)


@pytest.mark.parametrize(("stated", "option"), [("batch: 64", "--global-batch"), ("global_batch: 64", "--batch")])
def test_one_batch_on_the_command_line_replaces_the_other_in_a_file(
    stated: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"gpus: 8\n{stated}\n")
    command = ["estimate", "lenet", "--system", "dgx-a100-80gb", "--run", str(path), "--json"]
    assert paleo([*command, option, "32"]) == 0
    batch = json.loads(capsys.readouterr().out)["global_batch_size"]
    assert batch == (32 if option == "--global-batch" else 256)
    assert paleo(command) == 0
    assert json.loads(capsys.readouterr().out)["global_batch_size"] == (512 if option == "--global-batch" else 64)


def test_a_run_may_be_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options win over the file; what is wrong in it is told with its name."""
    path = tmp_path / "run.yaml"
    path.write_text("gpus: 8\nstrategy: tp=2\nmodel: {seq: 512}\nplacement:\n  head: {vocab: null}\n")
    command = ["estimate", "gpt2", "--system", "dgx-a100-80gb", "--run", str(path), "--batch", "4"]
    assert paleo([*command, "--gpus", "4", "--json"]) == 0
    out = capsys.readouterr().out
    assert '"gpus": 4' in out and '"strategy": "tp=2,dp=2"' in out
    path.write_text("gpus: 8\nplacment: {}\n")
    assert paleo(command) == 2
    error = capsys.readouterr().err
    assert "run.yaml: placment: unknown key; nearest: 'placement'" in error
