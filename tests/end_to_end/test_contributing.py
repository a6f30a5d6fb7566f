"""The examples of CONTRIBUTING.md, all added to one copy of the checkout, work as they stand."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = re.findall(r"^`([\w./-]+)`\n\n```\w+\n(.*?)```", TEXT, re.M | re.S)
COMMANDS = [
    line.removeprefix("paleo ")
    for block in re.findall(r"^```sh\n(.*?)```", TEXT, re.M | re.S)
    for line in block.splitlines()
    if line.startswith("paleo ")
]
ON_EIGHT = "estimate lenet --system dgx-a100-80gb --gpus 8"
#: Commands with an argument that an example has to refuse, and how its message begins.
REFUSED = {
    f"{ON_EIGHT} --consistency example-paused:x": "consistency example-paused:x: expected example-paused:N",
    f"{ON_EIGHT} --consistency example-paused:-1": "consistency example-paused:-1: expected example-paused:N",
    f"{ON_EIGHT} --compress example-nibbles:x": "compress example-nibbles:x: example-nibbles takes no argument",
}
#: Entries that no command lists.
REGISTERED = ["example-paused", "example_power", "example_gate", "example-lines", "example-nibbles", "example_scan"]
RUN_ALL = """
import shlex, sys
from paleo.cli import run_command_line as run
from paleo.compression.base import COMPRESSIONS
from paleo.consistency.base import CONSISTENCY_MODELS
from paleo.layers.base import LAYERS
from paleo.learning.base import SAMPLES_LAWS
from paleo.logs.base import TRAINING_LOG_READERS
from paleo.pricing.kernels import KERNEL_FAMILIES
for registry in (COMPRESSIONS, CONSISTENCY_MODELS, KERNEL_FAMILIES, SAMPLES_LAWS, LAYERS, TRAINING_LOG_READERS):
    print(f"registered {' '.join(registry)} ", file=sys.stderr)
for line in sys.stdin.read().splitlines():
    code = run(shlex.split(line))
    print(f"exit code {code} of {line}", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one process of the copy says of every command."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("paleo", "hardware_specs", "models"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in FILES:
        assert not (copy / path).exists(), path
        (copy / path).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL], input="\n".join([*COMMANDS, *REFUSED]), text=True,
        capture_output=True, check=False, cwd=copy, env=environment,
    )  # fmt: skip
    return done.stderr


def test_every_row_has_an_example() -> None:
    rows = re.findall(r"^\| an? ([\w ]+?)(?: \(preset\))? \|", TEXT, re.M)
    headings = " ".join(re.findall(r"^### (.*)$", TEXT, re.M)).lower()
    missing = [row for row in rows if row.removeprefix("operation ") not in headings]
    assert len(rows) >= 24 and missing == []


@pytest.mark.parametrize("command", COMMANDS)
def test_an_example_works(command: str, outcomes: str) -> None:
    assert f"exit code 0 of {command}\n" in outcomes, outcomes[-3000:]


@pytest.mark.parametrize("command", REFUSED)
def test_an_example_refuses_a_bad_argument(command: str, outcomes: str) -> None:
    assert f"error: {REFUSED[command]}" in outcomes and f"exit code 2 of {command}\n" in outcomes, outcomes[-3000:]


@pytest.mark.parametrize("name", REGISTERED)
def test_an_example_is_found(name: str, outcomes: str) -> None:
    assert re.search(rf"^registered .*\b{name}\b", outcomes, re.M), outcomes[:500]


def test_examples_are_short() -> None:
    assert max(len([line for line in text.splitlines() if line.strip()]) for _, text in FILES) <= 30
    assert all(shlex.split(command) for command in COMMANDS)
