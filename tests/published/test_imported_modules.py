"""Imported torch modules: parameters exact, FLOP within 0.5 % of torch's counter; step times as the catalog's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paleo
from paleo.importers.import_sources import import_network
from paleo.importers.torch import build_module, parse_input
from paleo.layers.base import LayerImplementations
from paleo.network.graph import Graph, build_graph
from paleo.operations.tensor import default_precision
from paleo.specs.model import ModelSpec, load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system

torch = pytest.importorskip("torch")
from networks import ZOO, hf  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
SYSTEM = "dgx-a100-80gb"


def counted(module: Any, texts: list[str]) -> float:
    """FLOP of one forward pass by torch's counter."""
    specs = [parse_input(text) for text in texts]
    tensors = [(s.name, torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device="meta")) for s in specs]
    with FlopCounterMode(display=False) as counter:
        module.eval()(*(t for name, t in tensors if name is None), **{name: t for name, t in tensors if name})
    return float(counter.get_total_flops())


def flops(graph: Graph) -> float:
    formats = default_precision("fp32")
    return sum(n.repeat * k.flops for n in graph.nodes for op in n.operations for k in op.forward_kernels(formats))


@pytest.mark.parametrize("name", ZOO)
def test_parameters_exact_and_flop_within_half_a_percent(name: str) -> None:
    factory, inputs = ZOO[name]
    module = build_module(factory, name)
    model = paleo.from_torch(module, inputs)
    graph = build_graph(model, batch=parse_input(inputs[0]).shape[0], choices=LayerImplementations(attention="unfused"))
    assert graph.parameters == sum(p.numel() for p in module.parameters())
    assert flops(graph) == pytest.approx(counted(module, inputs), rel=5e-3)


def test_the_zoo_is_wide_enough() -> None:
    assert len(ZOO) >= 40


PAIRS = {
    "resnet50": (hf("ResNetForImageClassification", num_labels=1000), "2x3x224x224", {}, 32),
    "vit_b16": (hf("ViTForImageClassification", num_labels=1000), "2x3x224x224", {}, 32),
    "bert_base": (hf("BertForPreTraining"), "2x512:int64", {"predictions": 512}, 8),
    "gpt2": (hf("GPT2LMHeadModel", "GPT2Config"), "2x1024:int64", {}, 4),
    "llama2-7b": (hf("LlamaForCausalLM", max_position_embeddings=4096), "1x4096:int64", {}, 1),
}


def read(name: str) -> ModelSpec:
    factory, text, _, _ = PAIRS[name]
    return paleo.from_torch(factory, [text])


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("strategy", ["dp", "tp=4,dp=2", "zero=3"])
def test_the_step_time_is_that_of_the_catalog(name: str, strategy: str) -> None:
    _, _, overrides, batch = PAIRS[name]
    # Under transformers' profile the catalog's norms are plain code, too, and save what these networks' norms save.
    run = {"gpus": 8, "batch": batch, "strategy": strategy, "software": "huggingface-amp"}
    ours = paleo.predict(load_model(name), load_system(SYSTEM), Run(model=overrides, **run))
    theirs = paleo.predict(read(name), load_system(SYSTEM), Run(**run))
    assert theirs.step_time == pytest.approx(ours.step_time, rel=0.01)
    # An update may need more than the activations that are gone by then: then more of these take no more memory.
    part = "activations" if ours.memory.workspace > theirs.memory.workspace else "total"
    assert getattr(theirs.memory, part) == pytest.approx(getattr(ours.memory, part), rel=0.01)


#: Imports Llama-3-70B and prints its parameters and the peak of the process's memory [KiB].
SEVENTY_BILLION = """
import re
from pathlib import Path

import paleo
from networks import hf
from paleo.network.graph import build_graph

factory = hf(
    "LlamaForCausalLM", hidden_size=8192, num_attention_heads=64, num_key_value_heads=8, num_hidden_layers=80,
    intermediate_size=28672, vocab_size=128256, max_position_embeddings=8192, head_dim=128,
)
graph = build_graph(paleo.from_torch(factory, ["1x4096:int64"]), batch=1)
print(graph.parameters, re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_seventy_billion_parameters_need_no_memory() -> None:
    # The peak is that of a program: in this process the tests before would be counted, and getrusage passes it on.
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SEVENTY_BILLION],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    parameters, peak = map(int, answer.stdout.split())
    assert parameters == 70_553_706_496
    assert peak < 1_000_000


@pytest.mark.filterwarnings("ignore::Warning")  # the exporter warns of every size that it fixes
@pytest.mark.parametrize("name", ["convnext", "dit", "ddpm", "deep-speech"])
def test_onnx_files_that_torch_exports_count_the_same(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    small = {"convnext": (hf("ConvNextForImageClassification", hidden_sizes=[16, 32, 64, 128]), ["2x3x64x64"])}
    factory, inputs = small.get(name, ZOO[name])
    module = factory().eval()
    for parameter in module.parameters():  # equal tensors would be merged in the file
        torch.nn.init.uniform_(parameter, -0.1, 0.1)
    tensors = tuple(torch.randn(parse_input(text).shape) for text in inputs)
    names, file = [f"in{i}" for i in range(len(tensors))], tmp_path / "net.onnx"
    axes = {one: {0: "batch"} for one in names}
    options = {"input_names": names, "dynamic_axes": axes, "do_constant_folding": False}
    torch.onnx.export(
        module, tensors, str(file), dynamo=False, opset_version=17, training=torch.onnx.TrainingMode.PRESERVE, **options
    )
    theirs = import_network("onnx", str(file))
    ours = build_graph(paleo.from_torch(module, inputs), batch=1)
    assert theirs.graph.parameters == ours.parameters == sum(p.numel() for p in module.parameters())
    assert theirs.flops == pytest.approx(flops(ours), rel=1e-3)
