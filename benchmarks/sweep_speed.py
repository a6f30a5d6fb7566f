"""A sweep of a million rows: ``python benchmarks/sweep_speed.py [csv|parquet]`` prints seconds and memory.

500 points (two networks, five systems, ten GPU counts, five batches) times 2,000 combinations of amounts and prices.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

from paleo.studies.sweep import SweepStudy, local_evaluator, write_sweep_table

STUDY = SweepStudy.model_validate(
    {
        "models": ["alexnet", "bert_large"],
        "systems": ["aws-p3dn.24xlarge", "aws-p4d.24xlarge", "aws-p5.48xlarge", "dgx-h200", "dgx-a100-80gb"],
        "axes": {
            "gpus": [2**power for power in range(10)],
            "batch": [4, 8, 16, 32, 64],
            "samples": [step * 10**power for power in (6, 7, 8, 9) for step in (1, 2, 3, 5, 7)],
            "gpu_price": [f"{rate / 4} USD/h" for rate in range(2, 12)],
            "electricity": ["0.1 USD/kWh", "0.3 USD/kWh"],
            "pue": [1.05, 1.1, 1.2, 1.3, 1.5],
        },
    }
)


def main() -> None:
    suffix = sys.argv[1] if len(sys.argv) > 1 else "parquet"
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        rows = write_sweep_table(STUDY, Path(folder) / f"table.{suffix}", local_evaluator(STUDY))
        seconds = time.perf_counter() - start
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 2**20
    print(
        f"{rows:,} rows of {STUDY.point_count:,} points as {suffix}: {seconds:.1f} s, at most {most:.2f} GiB in a "
        f"process"
    )


if __name__ == "__main__":
    main()
