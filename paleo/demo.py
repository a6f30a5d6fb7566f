"""What ``make run`` shows: two real networks, predicted on real systems, in the words of the command line."""

from __future__ import annotations

import shlex
import sys

from paleo.cli import run

COMMANDS = (
    "estimate resnet50 --system dgx-a100-80gb --gpus 8 --epochs 90",
    "scale resnet50 --system dgx-a100-80gb --gpus 1,2,4,8,16,32,64 --global-batch 1024 both",
    "estimate bert_large --system dgx-h100 --gpus 8 --batch 16",
    "compare bert_large --systems dgx-1-v100,dgx-a100-80gb,dgx-h100 --gpus 8 --batch 16",
)


def main() -> int:
    """Run the commands one after the other; the worst exit code is that of the demonstration."""
    worst = 0
    for command in COMMANDS:
        sys.stdout.write(f"$ paleo {command}\n\n")
        sys.stdout.flush()
        worst = max(worst, run(shlex.split(command)))
        sys.stdout.write("\n")
    return worst


if __name__ == "__main__":
    sys.exit(main())
