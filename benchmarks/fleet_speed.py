"""Many runs: ``python benchmarks/fleet_speed.py`` prints seconds and memory of a trace and of searches.

A trace of 100,000 jobs on 2,000 GPUs under FIFO with EASY backfill; ``paleo tune`` with 1,000 trials on a given number
of GPUs a trial beside ``paleo estimate`` of one trial, and with the search over GPUs a trial and in all. Seconds are of
the processor, so that a busy machine does not change them.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

import numpy as np

from paleo.cluster.nodes import SCHEDULING_POLICIES, NodePool
from paleo.cluster.simulation import ClusterJob, simulate_cluster

JOBS, NODES, LOAD = 100_000, 250, 0.95
TRIALS = ["gpt2", "--system", "dgx-h100", "--gpus", "64", "--trials", "1000", "--max-tokens", "1B"]


def trace() -> list[ClusterJob]:
    """Gangs of powers of two and lognormal run times of at most a day, as in the traces of Philly and Helios."""
    random = np.random.default_rng(0)
    gpus = random.choice([1, 2, 4, 8, 16, 32, 64], JOBS, p=[0.5, 0.12, 0.12, 0.16, 0.05, 0.03, 0.02]).tolist()
    seconds = random.lognormal(7.0, 1.8, JOBS).clip(10, 86400).tolist()
    work = float(np.mean(np.multiply(gpus, seconds)))
    arrivals = np.cumsum(random.exponential(work / (LOAD * 8 * NODES), JOBS)).tolist()
    rows = zip(arrivals, gpus, seconds, strict=True)
    return [ClusterJob(f"{n:06d}", arrival, ({g: s},), (g,)) for n, (arrival, g, s) in enumerate(rows)]


def command(*words: str) -> float:
    """Processor time of a command in a new process [s]: the least of three."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "paleo", *words], check=True, stdout=subprocess.DEVNULL, env=os.environ)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def main() -> None:
    jobs, start = trace(), time.process_time()
    run = simulate_cluster(jobs, [NodePool(NODES, 8)], SCHEDULING_POLICIES["backfill"])
    seconds, most = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    longest = run.queue_history[:, 1].max()
    waits = f"{run.utilisation:.0%} busy, mean wait {run.waiting_time.mean():.0f} s, queue up to {longest:.0f}"
    print(f"{JOBS:,} jobs on {8 * NODES:,} GPUs: {seconds:.1f} s, {most:.2f} GiB ({waits})")
    estimate = command("estimate", "gpt2", "--system", "dgx-h100", "--gpus", "2")
    fixed, searched = command("tune", *TRIALS, "--gpus-per-trial", "2"), command("tune", *TRIALS, "--deadline", "2h")
    print(f"paleo estimate {estimate:.2f} s; paleo tune of 1,000 trials {fixed:.2f} s ({fixed / estimate:.2f} times)")
    print(f"paleo tune with the search over GPUs a trial, GPUs and a deadline {searched:.2f} s")


if __name__ == "__main__":
    main()
