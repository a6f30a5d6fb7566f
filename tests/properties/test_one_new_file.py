"""One new file adds a device, link, system, software profile, model, layer, collective, strategy, schedule or rule for
a torch function: nothing else is edited."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

DEVICE = """
full_name: A processor of one's own
vendor: nobody
architecture: Ampere
year: 2030
multiprocessors: 100
boost_clock: 2 GHz
peak: {fp32: 50 TFLOP/s, bf16: 1 PFLOP/s}
vector_peak: {fp32: 50 TFLOP/s}
memory: {capacity: 200 GiB, bandwidth: 8 TB/s, kind: HBM4}
form_factor: board
source: this test
"""
LINK = """
kind: other
scope: all links of a device
bandwidth: 1 TB/s
latency: 1 us
latency_source: this test
source: this test
"""
SYSTEM = """
full_name: A node of one's own
year: 2030
device: a100-sxm4-80gb
devices_per_node: 4
levels:
  - {name: switch, ranks: 4, link: nvlink3-a100, topology: switch}
source: this test
"""
SOFTWARE = """
title: A framework of one's own
host: {forward: 1 ms, backward: 2 ms}
source: this test
"""
MODEL = """
title: A network of one's own
task: tests
source: this test
inputs:
  features: {dims: {batch: =batch, features: 64}}
layers:
  - linear: {features: 32, bias: false}
  - relu
"""
LAYER = '''
"""A layer that scales its input."""

from __future__ import annotations

from paleo.layers.base import LAYERS, LayerOperations, Layer, LayerImplementations, parameter_vector
from paleo.operations.base import MemoryPass
from paleo.operations.tensor import Tensor


@LAYERS.register("scale_shift")
class ScaleShift(Layer):
    """y = a x + b, per element of the last dim."""

    shift: bool = True

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        x = inputs[0]
        weights = (parameter_vector(f"{name}.scale", x, x.dims[-1]),)
        weights += (parameter_vector(f"{name}.shift", x, x.dims[-1]),) if self.shift else ()
        out = x.like(name)
        scale = MemoryPass(name, "elementwise", (x,), out, weights, saved=(x,), flops_per_element=2.0)
        return LayerOperations((scale,), out)
'''
COLLECTIVE = '''
"""Everyone sends everything to everyone."""

from __future__ import annotations

from paleo.collectives.base import CollectiveAlgorithm, register_algorithm, level_is_used, sequential_phases
from paleo.collectives.base import Array, LevelTraffic, Traffic


def all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """(n - 1) S on the wire in one step, level by level."""
    return sequential_phases(
        [LevelTraffic(level_is_used(n), (n - 1.0) * payload, (n - 1.0) * payload) for n in group]
    )


register_algorithm(
    CollectiveAlgorithm("shout", "all at once", "this test", {"all_reduce": all_reduce}, is_one_port=False)
)
'''
SCAN = '''
"""A selective scan: a gated state that each step decays and adds to, head by head."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from paleo.layers.base import LAYERS, LayerOperations, Layer, LayerImplementations, linear_projection
from paleo.operations.base import OperationKind, add_operation_kind
from paleo.operations.base import MemoryPass
from paleo.operations.tensor import Tensor

add_operation_kind(OperationKind("selective_scan", "a recurrence whose decay depends on its input"))


@LAYERS.register("selective_scan")
class SelectiveScan(Layer):
    """Input, gate and step of each head; the scan; the output projection (Gu and Dao, Mamba, 2023)."""

    tensor_parallel_dims: ClassVar[tuple[str, ...]] = ("scan_heads",)
    heads: PositiveInt
    head_dim: PositiveInt
    state: PositiveInt

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        packed = {"scan_heads": self.heads, "packed": 2 * self.head_dim + 2 * self.state + 1}
        project_in, mixed = linear_projection(f"{name}.in", x, packed)
        inner = mixed.reshaped(
            {x.dims[0]: x.sizes[0], x.dims[1]: x.sizes[1], "scan_heads": self.heads, "head_dim": self.head_dim},
            name=f"{name}.scanned",
        )
        decay = Tensor(f"{name}.decay", ("scan_heads",), (self.heads,), "parameter")
        scan = MemoryPass(
            f"{name}.scan", "selective_scan", (mixed,), inner, (decay,), (mixed,), flops_per_element=7.0 * self.state
        )
        project_out, out = linear_projection(f"{name}.out", inner, {x.dims[-1]: x.sizes[-1]}, contract=2)
        return LayerOperations((project_in, scan, project_out), out)
'''
SCAN_NETWORK = """
title: Two scans
task: tests
source: this test
inputs:
  tokens: {dims: {batch: =batch, seq: 512}, role: index}
layers:
  - embedding: {entries: 1024, features: 256}
  - selective_scan: {heads: 8, head_dim: 64, state: 16}
  - selective_scan: {heads: 8, head_dim: 64, state: 16}
  - linear: {features: 1024, dim: vocab, bias: false}
  - cross_entropy
"""
TORUS = '''
"""All-reduce along all four directions of a torus at the same time, one quarter of the payload each."""

from __future__ import annotations

import numpy as np

from paleo.collectives.base import CollectiveAlgorithm, register_algorithm, level_is_used, sequential_phases
from paleo.collectives.base import remote_buffer_fraction
from paleo.collectives.base import Array, LevelTraffic, Traffic


def all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Rings along rows, then along columns, both ways: 2 (sqrt(n) - 1) steps, a quarter of the bytes of one ring."""
    sides = [np.ceil(np.sqrt(n)) for n in group]
    shares = [remote_buffer_fraction(n) * payload for n in group]
    return sequential_phases(
        [
            LevelTraffic(2.0 * (side - 1.0) * level_is_used(n), share / 2.0, share)
            for n, side, share in zip(group, sides, shares, strict=True)
        ]
    )


register_algorithm(
    CollectiveAlgorithm(
        "four-ways", "both sides, both ways", "this test", {"all_reduce": all_reduce}, {"xla": ["all_reduce"]},
        required_topology="torus",
    )
)
'''
SCHEDULE = '''
"""1F1B with twice as many forward passes ahead, so that sends hide behind passes."""

from __future__ import annotations

from paleo.schedules.base import SchedulePass, Schedule, register_schedule


def pass_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[SchedulePass]:
    """2 (p - s - 1) forward passes, then one backward for one forward, then the rest."""
    fill = min(2 * (stages - stage - 1), microbatches)
    actions = [SchedulePass("F", i) for i in range(fill)]
    for i in range(microbatches - fill):
        actions += [SchedulePass("F", fill + i), SchedulePass("B", i)]
    return actions + [SchedulePass("B", i) for i in range(microbatches - fill, microbatches)]


register_schedule(Schedule("eager-1f1b", "this test", pass_order))
'''
STRATEGY = '''
"""Every linear layer split over its outputs."""

from __future__ import annotations

from paleo.network.graph import Graph
from paleo.parallel.placement import STRATEGY_PRESETS, Placement, PlacementRule, Strategy


@STRATEGY_PRESETS.register("columns")
def columns(graph: Graph, strategy: Strategy) -> Placement:
    """The features of linear layers over tp, the batch over dp."""
    split = PlacementRule({"batch": ("dp",), "features": ("tp",)}, layer_type="linear")
    return Placement((PlacementRule({"batch": ("dp",)}), split))
'''

OPERATOR = '''
"""Exponentials of matrices."""

from __future__ import annotations

from paleo.importers._builder import NetworkBuilder
from paleo.importers._builder import TorchInvocation, TranslatedCall, register_torch_reader, register_translation
from paleo.importers._network_trace import TracedCall


@register_torch_reader("matrix_exp linalg_matrix_exp")
def matrix_exp(call: TorchInvocation) -> TranslatedCall:
    """Its argument is a square matrix."""
    return call.translated_call("matrix_exp", ("input",), ("input",))


@register_translation("matrix_exp")
def exponential(b: NetworkBuilder, call: TracedCall) -> None:
    """One pass over the matrix."""
    source = b.place_of(call.inputs[0])
    one_pass = {"of": "matrix_exp", "dims": source.dims, "keeps": "inputs"}
    b.record_output(call.out, b.add_layer("pass", one_pass, [source], call.path))
'''
NETWORK = """
import torch
from torch import nn


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x):
        return torch.matrix_exp(self.first(x))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and its catalog."""
    for folder in ("paleo", "hardware_specs", "models"):
        ignored = shutil.ignore_patterns("__pycache__", "calibrations") if folder == "hardware_specs" else None
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored or shutil.ignore_patterns("__pycache__"))
    (tmp_path / "hardware_specs" / "calibrations").mkdir()
    return tmp_path


def paleo(copy: Path, *arguments: str, warning: str = "") -> Any:
    """The document that a process of the copy prints, and the one line that it warns with."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "paleo", *arguments, "--json"],
        capture_output=True, text=True, check=False, cwd=copy, env=environment,
    )  # fmt: skip
    assert done.returncode == 0 and warning in done.stderr and done.stderr.count("\n") == bool(warning), done.stderr
    return json.loads(done.stdout)


def add(copy: Path, path: str, text: str) -> None:
    assert not (copy / path).exists()
    (copy / path).write_text(text.lstrip("\n"))


ESTIMATE = ("estimate", "lenet", "--calibration", "ideal")


def test_a_device(copy: Path) -> None:
    add(copy, "hardware_specs/devices/own.yaml", DEVICE)
    assert "own" in paleo(copy, "list", "devices")["devices"]
    made = paleo(copy, *ESTIMATE, "--system", "own", "--batch", "64")
    assert made["memory_bytes"]["capacity"] == 200 * 2**30
    assert made["mfu"] == pytest.approx(made["flops_per_step"] / made["step_time_s"] / 1e15)


def test_a_link(copy: Path) -> None:
    add(copy, "hardware_specs/links/own.yaml", LINK)
    assert paleo(copy, "show", "own")["link"]["bandwidth"] == 1e12


def test_a_system(copy: Path) -> None:
    add(copy, "hardware_specs/systems/own.yaml", SYSTEM)
    ring = {row["algorithm"]: row["time_s"] for row in paleo(copy, *_all_reduce("own", 4))["algorithms"]}["ring"]
    assert ring >= 1.5e9 / 300e9
    assert paleo(copy, *ESTIMATE, "--system", "own", "--gpus", "4")["breakdown_s"]["communication_total"] > 0


def test_a_software_profile(copy: Path) -> None:
    add(copy, "hardware_specs/software/own.yaml", SOFTWARE)
    made = paleo(copy, "estimate", "lenet", "--system", "a100-sxm4-80gb", "--software", "own")
    assert 13e-3 <= made["step_time_s"] <= 100e-3  # thirteen layers at 1 ms, and more than that backward


def test_a_model(copy: Path) -> None:
    add(copy, "models/own.yaml", MODEL)
    made = paleo(copy, "summary", "own", "--batch", "8")
    assert (made["parameters"], made["flops_forward"]) == (64 * 32, 2 * 8 * 64 * 32)


def test_a_layer(copy: Path) -> None:
    add(copy, "paleo/layers/scale_shift.py", LAYER)
    (copy / "mine.yaml").write_text(MODEL + "  - scale_shift\n  - scale_shift: {shift: false}\n")
    assert "scale_shift" in paleo(copy, "list", "layers")["layers"]
    made = paleo(copy, "summary", "./mine.yaml", "--batch", "8")
    assert made["parameters"] == 64 * 32 + 3 * 32
    wide = paleo(copy, "estimate", "./mine.yaml", "--system", "dgx-a100-80gb", "--gpus", "8", "--calibration", "ideal")
    assert wide["memory_bytes"]["gradients"] == (64 * 32 + 3 * 32) * 2


def _all_reduce(system: str, ranks: int) -> tuple[str, ...]:
    return ("collective", "all_reduce", "--bytes", "1GB", "--ranks", str(ranks), "--system", system)


def test_a_collective(copy: Path) -> None:
    add(copy, "paleo/collectives/shout.py", COLLECTIVE)
    times = {row["algorithm"]: row["time_s"] for row in paleo(copy, *_all_reduce("dgx-a100-80gb", 8))["algorithms"]}
    assert times["shout"] > 3 * times["ring"]  # 7 S against 1.75 S
    made = paleo(copy, *ESTIMATE, "--system", "dgx-a100-80gb", "--gpus", "8", "--set", "exchange.algorithm=shout")
    assert made["breakdown_s"]["communication_total"] > 0


def test_a_collective_that_wins_is_used_by_the_libraries_it_belongs_to(copy: Path) -> None:
    """A tenth of the ring's bytes: used by name alone until its file says which libraries have it."""
    call = (*ESTIMATE, "--system", "dgx-a100-80gb", "--gpus", "8")
    before = paleo(copy, *call)["breakdown_s"]["communication_total"]
    whisper = COLLECTIVE.replace("shout", "whisper").replace("(n - 1.0)", "0.02 * (n - 1.0)")
    add(copy, "paleo/collectives/whisper.py", whisper)
    assert paleo(copy, *_all_reduce("dgx-a100-80gb", 8))["best"] == "ring"
    assert paleo(copy, *call)["breakdown_s"]["communication_total"] == before
    libraries = 'operations_by_library={"textbook": ["all_reduce"], "nccl": ["all_reduce"]}, is_one_port'
    (copy / "paleo/collectives/whisper.py").write_text(whisper.replace("is_one_port", libraries))
    assert paleo(copy, *_all_reduce("dgx-a100-80gb", 8))["best"] == "whisper"
    assert paleo(copy, *call)["breakdown_s"]["communication_total"] < before


def test_a_layer_that_tensor_parallelism_splits(copy: Path) -> None:
    """A scan with a kind of pass of its own: two ranks have half of its weights each, and owe a sum."""
    (copy / "scans.yaml").write_text(SCAN_NETWORK)
    add(copy, "paleo/layers/selective_scan_of_this_test.py", SCAN)
    call = ("estimate", "./scans.yaml", "--system", "dgx-a100-80gb", "--dtype", "bf16")
    whole = paleo(copy, *call, "--gpus", "1")
    split = paleo(copy, *call, "--gpus", "2", "--strategy", "tp=2")  # and no warning of what stays whole
    assert split["memory_bytes"]["parameters"] == whole["memory_bytes"]["parameters"] / 2
    assert split["breakdown_s"]["communication_total"] > 0 == whole["breakdown_s"]["communication_total"]
    assert split["breakdown_s"]["compute"] < 0.7 * whole["breakdown_s"]["compute"]
    (copy / "paleo/layers/selective_scan_of_this_test.py").write_text(
        SCAN.replace('ClassVar[tuple[str, ...]] = ("scan_heads",)', "ClassVar[tuple[str, ...] | None] = None")
    )
    paleo(copy, *call, "--gpus", "2", "--strategy", "tp=2", warning="tp=2 does not split selective_scan")


def test_a_torus_all_reduce_wins_on_a_torus_alone(copy: Path) -> None:
    torus = SYSTEM.replace("devices_per_node: 4", "devices_per_node: 64").replace("ranks: 4", "ranks: 64")
    add(copy, "hardware_specs/systems/torus-of-this-test.yaml", torus.replace("topology: switch", "topology: torus"))
    add(copy, "hardware_specs/systems/switch-of-this-test.yaml", torus)
    step = ("estimate", "resnet50", "--system", "torus-of-this-test", "--gpus", "64")
    before = paleo(copy, *step)["breakdown_s"]["communication_total"]
    add(copy, "paleo/collectives/torus_of_this_test.py", TORUS)
    for kind in ("torus", "switch"):
        call = ("collective", "all_reduce", "--bytes", "1MB", "--ranks", "64", "--system", f"{kind}-of-this-test")
        assert (paleo(copy, *call)["best"] == "four-ways") == (kind == "torus")
    assert paleo(copy, *step)["breakdown_s"]["communication_total"] < before


def test_a_schedule_without_any_closed_form(copy: Path) -> None:
    """It takes as long as 1F1B, which waits for its sends, holds more activations, and is searched where asked for."""
    add(copy, "paleo/schedules/eager.py", SCHEDULE)
    call = ("estimate", "gpt2", "--calibration", "ideal", "--system", "dgx-a100-80gb", "--gpus", "4")
    call = (*call, "--strategy", "pp=4", "--batch", "16", "--set", "microbatch=1")
    eager, usual = paleo(copy, *call, "--schedule", "eager-1f1b"), paleo(copy, *call, "--schedule", "1f1b")
    assert eager["step_time_s"] == pytest.approx(usual["step_time_s"], rel=1e-9)
    assert eager["memory_bytes"]["activations"] > 1.5 * usual["memory_bytes"]["activations"]
    machine = ("--system", "dgx-a100-80gb", "--gpus", "2", "--software", "pytorch-eager")
    search = ("plan", "gpt2", *machine, "--global-batch", "16", "--strategy", "pp=2")
    plans = paleo(copy, *search, "--schedule", "eager-1f1b")["plans"]
    assert plans and {plan["schedule"] for plan in plans} == {"eager-1f1b"}


def test_a_strategy(copy: Path) -> None:
    add(copy, "paleo/parallel/columns.py", STRATEGY)
    made = paleo(copy, *ESTIMATE, "--system", "dgx-a100-80gb", "--gpus", "2", "--strategy", "columns,tp=2",
                 warning="tp=2 does not split conv2, conv1")  # fmt: skip
    whole = paleo(copy, *ESTIMATE, "--system", "dgx-a100-80gb", "--gpus", "1")
    convolutions = 156 + 2416
    halves = (whole["memory_bytes"]["gradients"] / 2 - convolutions) / 2 + convolutions
    assert made["memory_bytes"]["gradients"] / 2 == pytest.approx(halves)
    assert made["breakdown_s"]["communication_total"] > 0


def test_a_torch_function(copy: Path) -> None:
    pytest.importorskip("torch")
    (copy / "net.py").write_text(NETWORK)
    call = ("import", "torch", "net.py:Network", "--input", "2x8x8", "--loss", "none", "-o", "net.yaml")
    assert _standard_output(copy, *call)["unknown"] == ["matrix_exp"]
    add(copy, "paleo/importers/operators/matrix_exp.py", OPERATOR)
    assert _standard_output(copy, *call)["unknown"] == []


def _standard_output(copy: Path, *arguments: str) -> Any:
    """The document that a process of the copy prints, whatever it warns of."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "paleo", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=copy, env=environment)
    return json.loads(done.stdout)


def test_the_same_name_twice_is_an_error(copy: Path) -> None:
    add(copy, "paleo/schedules/again.py", SCHEDULE.replace("eager-1f1b", "gpipe"))
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "paleo", "list", "schedules"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=copy, env=environment)
    assert done.returncode == 2
    assert "'gpipe' is registered twice" in done.stderr
