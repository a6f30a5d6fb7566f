"""Demonstration of ``make run``: the command line predicts two real networks on real systems.

``python -m paleo.demo --plot scaling.png`` also draws the scaling study.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence

_SCALING_COMMAND = "scale resnet50 --system dgx-a100-80gb --gpus 1,2,4,8,16,32,64 --global-batch 1024"
_DEMO_COMMANDS = (
    "estimate resnet50 --system dgx-a100-80gb --gpus 8 --epochs 90",
    _SCALING_COMMAND,
    "estimate bert_large --system dgx-h100 --gpus 8 --batch 16",
    "compare bert_large --systems dgx-1-v100,dgx-a100-80gb,dgx-h100 --gpus 8 --batch 16",
)


def main(more: Sequence[str] = ()) -> int:
    """Run the example commands one after the other.

    Parameters
    ----------
    more : sequence of str, optional
        Further arguments of the scaling study.

    Returns
    -------
    int
        The worst exit code.
    """
    worst = 0
    for command in _DEMO_COMMANDS:
        arguments = [*shlex.split(command), *(more if command is _SCALING_COMMAND else ())]
        sys.stdout.write(f"$ paleo {shlex.join(arguments)}\n\n")
        sys.stdout.flush()
        worst = max(worst, subprocess.run([sys.executable, "-m", "paleo", *arguments], check=False).returncode)
        sys.stdout.write("\n")
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
