"""Registries are complete at the first look-up, in whichever thread that happens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paleo.errors import SpecError
from paleo.pricing.kernels import KERNEL_FAMILIES
from paleo.registry import Registry

THREADS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
sys.setswitchinterval(1e-6)
sys.path.insert(0, {folder!r})
from shapes.base import SHAPES
start = threading.Barrier(8)
def count(number):
    start.wait()
    return len(SHAPES), SHAPES["s29"]
with ThreadPoolExecutor(8) as pool:
    print(set(pool.map(count, range(8))))
"""


def test_threads_that_look_up_at_once_all_see_every_entry(tmp_path: Path) -> None:
    package = tmp_path / "shapes"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text("from paleo.registry import Registry\nSHAPES = Registry('shape', 'shapes')\n")
    for number in range(30):
        text = f"import time\nfrom shapes.base import SHAPES\ntime.sleep(0.001)\nSHAPES.register('s{number}')({number})"
        (package / f"s{number}.py").write_text(text)
    call = [sys.executable, "-c", THREADS.format(folder=str(tmp_path))]
    answer = subprocess.run(call, capture_output=True, text=True, timeout=60, check=False)
    assert (answer.stdout.strip(), answer.stderr) == ("{(30, 29)}", "")


def test_a_module_that_fails_fails_every_look_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "broken_shapes"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("raise RuntimeError('does not load')")
    monkeypatch.syspath_prepend(str(tmp_path))
    shapes = Registry[int]("shape", "broken_shapes")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not load"):
            len(shapes)


def test_a_name_twice_is_an_error() -> None:
    shapes = Registry[int]("shape")
    shapes.register("square")(4)
    with pytest.raises(SpecError, match="registered twice"):
        shapes.register("square")(4)


PREDICT = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
sys.setswitchinterval(1e-6)
import paleo
start = threading.Barrier(8)
def step(number):
    start.wait()
    model, system = paleo.load_model("lenet"), paleo.load_system("dgx-a100-80gb")
    return paleo.predict(model, system, paleo.Run(gpus=8, batch=32)).step_time
with ThreadPoolExecutor(8) as pool:
    print(len(set(pool.map(step, range(8)))))
"""


def test_eight_cold_threads_predict_the_same() -> None:
    answer = subprocess.run([sys.executable, "-c", PREDICT], capture_output=True, text=True, timeout=60, check=False)
    assert (answer.stdout.strip(), answer.stderr) == ("1", "")


def test_families_of_kernels_register_themselves() -> None:
    assert list(KERNEL_FAMILIES) == ["attention", "conv", "gemm", "memory", "rnn", "scan"]
    with pytest.raises(SpecError, match=r"unknown kernel family 'gem'.*gemm"):
        KERNEL_FAMILIES["gem"]
