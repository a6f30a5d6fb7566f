"""How fast ``paleo validate`` predicts a table of matrix products once it is read: rows a second on one core.

OMP_NUM_THREADS=1 python benchmarks/validate_speed.py [TABLE] [ROWS]      (default: 1,000,000 made-up rows)
"""

from __future__ import annotations

import sys
import time

import numpy as np
import pandas as pd

from paleo.tables.cells import read_table
from paleo.tables.run_tables import find_table_kind
from paleo.units import MEGA

#: Devices with the dtypes that their tables hold, and the sources that timed them.
MEASURED = (
    ("h100-sxm5-80gb", "bf16", "aiconfigurator"),
    ("a100-sxm4-80gb", "fp16", "vidur"),
    ("v100-pcie-32gb", "fp32", "neusight"),
    ("b200", "bf16", "aiconfigurator"),
)


def made_up(rows: int) -> pd.DataFrame:
    """Products of log-uniform sizes, a quarter of them on each device."""
    random = np.random.default_rng(0)
    devices, dtypes, sources = zip(*(MEASURED[index % len(MEASURED)] for index in range(rows)), strict=True)
    m, n, k = np.rint(2 ** random.uniform(3, 14, (3, rows))).astype(np.int64)
    frame = {"source": sources, "device": devices, "dtype": dtypes, "library": "cuBLAS", "m": m, "n": n, "k": k}
    return pd.DataFrame({**frame, "batch": 1, "time_us": 1.0})


def main(arguments: list[str]) -> None:
    rows = int(arguments[1]) if len(arguments) > 1 else 1_000_000
    frame = read_table(arguments[0]) if arguments else made_up(rows)
    if arguments:
        frame = pd.concat([frame] * -(-rows // len(frame)), ignore_index=True).iloc[:rows]
    table = find_table_kind(frame.columns)
    table.predict(frame.iloc[:1000])
    begin, spent = time.perf_counter(), time.process_time()
    predictions = table.predict(frame)
    wall, core = time.perf_counter() - begin, time.process_time() - spent
    done = int((predictions.failure_reasons == "").sum())
    rates = f"{done / wall / MEGA:.2f} M rows/s; {done / core / MEGA:.2f} M rows a core-second"
    print(f"{done} of {len(frame)} rows: {rates}")


if __name__ == "__main__":
    main(sys.argv[1:])
