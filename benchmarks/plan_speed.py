"""How fast the search is: GPT-3 on 4,096 A100 with a global batch of 3,072, in a fresh process and in a warm one.

python benchmarks/plan_speed.py [GPUS [GLOBAL_BATCH]]
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

COMMAND = "plan gpt3-175b --system dgx-a100-80gb --gpus {gpus} --global-batch {batch} --top 5 --json"


def main(gpus: int = 4096, batch: int = 3072) -> None:
    from paleo.search.plans import search
    from paleo.specs.hardware import load_system
    from paleo.specs.model import load_model
    from paleo.specs.run import Run

    started = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    arguments = COMMAND.format(gpus=gpus, batch=batch).split()
    subprocess.run([sys.executable, "-m", "paleo", *arguments], check=True, stdout=subprocess.DEVNULL)
    cold = time.perf_counter() - started
    user = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    model, system, run = load_model("gpt3-175b"), load_system("dgx-a100-80gb"), Run(gpus=gpus, global_batch=batch)
    warm = min(search(model, system, run).seconds for _ in range(3))
    found = search(model, system, run)
    sys.stdout.write(
        f"{found.configurations:,} configurations, {found.fitting:,} fit\n"
        f"cold process {cold:.2f} s ({user:.2f} s of user CPU)\n"
        f"warm search {warm:.2f} s ({found.configurations / warm:,.0f} configurations/s)\n"
        f"best: {found.plans[0].strategy}, microbatch {found.plans[0].microbatch}, {found.plans[0].step_time:.2f} s\n"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
