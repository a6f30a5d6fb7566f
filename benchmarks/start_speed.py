"""How long a new process takes to its first answer, as multiples of Python's own start (`python -c pass`), and what
depends on the size of its input: a bad file against a good one, a module of 70e9 parameters against one of 7e9.

python benchmarks/start_speed.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

#: Runs of each; the least counts.
RUNS = 5
ROOT = Path(__file__).resolve().parents[1]


def least(action: Callable[[], object], runs: int = RUNS) -> float:
    """Seconds of the fastest of some runs."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def process(*arguments: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, *arguments], capture_output=True, check=False, cwd=ROOT)


def startup() -> None:
    bare = least(process("-c", "pass"))
    sys.stdout.write(f"python -c pass: {1000 * bare:.0f} ms\n")
    load = "from paleo.specs.system import load_system; load_system('dgx-a100-80gb')"
    for label, arguments in {
        "paleo --help": ("-m", "paleo", "--help"),
        "import paleo": ("-c", "import paleo"),
        "a system, cold": ("-c", load),
        "paleo estimate lenet": ("-m", "paleo", "estimate", "lenet", "--system", "dgx-a100-80gb"),
        "paleo estimate gpt3-175b": (
            *("-m", "paleo", "estimate", "gpt3-175b", "--system", "selene", "--gpus", "1024"),
            *("--strategy", "tp=8,pp=8", "--batch", "16"),
        ),
    }.items():
        seconds = least(process(*arguments))
        sys.stdout.write(f"{label}: {1000 * seconds:.0f} ms, {seconds / bare:.1f} times Python's start\n")


def refusals() -> None:
    """Files made to be slow are refused about as quickly as a good one is read."""
    with tempfile.TemporaryDirectory() as folder:
        good = Path(ROOT / "models" / "gpt2.yaml").read_text()
        texts = {"nested": "[" * 100_000, "long": "k: [" + "1," * 400_000 + "]", "anchors": "&a " * 500_000}
        path = Path(folder) / "model.yaml"
        path.write_text(good)
        reference = least(process("-m", "paleo", "summary", str(path)))
        for label, text in texts.items():
            path.write_text(text)
            seconds = least(process("-m", "paleo", "summary", str(path)))
            sys.stdout.write(f"a {label} file is refused in {seconds / reference:.2f} times what a good one takes\n")


def imports() -> None:
    """Reading a module of transformers costs by its kinds of layers, not by their number or width."""
    import transformers

    import paleo

    def read(**sizes: int) -> object:
        configuration = transformers.LlamaConfig(**sizes)
        return paleo.from_torch(lambda: transformers.LlamaForCausalLM(configuration), ["1x1024:int64"])

    small = least(lambda: read(hidden_size=4096, num_hidden_layers=32, intermediate_size=11008), 1)
    large = least(lambda: read(hidden_size=8192, num_hidden_layers=80, intermediate_size=28672), 1)
    sys.stdout.write(f"importing 70e9 parameters takes {large / small:.1f} times what 7e9 take\n")


if __name__ == "__main__":
    startup()
    refusals()
    imports()
