"""How fast the search is: GPT-3 on 4,096 A100 with a global batch of 3,072, in fresh processes and in a warm one, all
on one thread. The bytecode of the package is there (a first run that does not count writes it).

python benchmarks/plan_speed.py [GPUS [GLOBAL_BATCH]]
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

#: Fresh processes; the least of them counts.
RUNS = 5
COMMAND = "plan gpt3-175b --system dgx-a100-80gb --gpus {gpus} --global-batch {batch} --top 5 --json"


def cold(arguments: list[str]) -> tuple[float, float]:
    """Seconds of a fresh process, and of its CPU (user and system)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "paleo", *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - started, used


def main(gpus: int = 4096, batch: int = 3072) -> None:
    from paleo.search.plans import search
    from paleo.specs.model import load_model
    from paleo.specs.run import Run
    from paleo.specs.system import load_system

    arguments = COMMAND.format(gpus=gpus, batch=batch).split()
    cold(arguments)
    wall, used = map(min, zip(*(cold(arguments) for _ in range(RUNS)), strict=True))
    model, system, run = load_model("gpt3-175b"), load_system("dgx-a100-80gb"), Run(gpus=gpus, global_batch=batch)
    warm = min(search(model, system, run).search_duration for _ in range(3))
    found = search(model, system, run)
    sys.stdout.write(
        f"{found.covered_configurations:,} configurations, {found.fitting_configurations:,} fit\n"
        f"cold process {wall:.2f} s ({used:.2f} s of CPU, user and system)\n"
        f"warm search {warm:.2f} s ({found.covered_configurations / warm:,.0f} configurations/s)\n"
        f"best: {found.plans[0].strategy}, microbatch {found.plans[0].microbatch}, {found.plans[0].step_time:.2f} s\n"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
