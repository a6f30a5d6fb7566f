"""What minutes to target have to beat: three ways to predict a submission to MLPerf from those of other rounds.

OMP_NUM_THREADS=1 python benchmarks/submission_baselines.py training_runs.csv

All three work with device time: minutes x GPUs x peak FLOP/s of tensor cores in 16 bits, which a perfect scaling would
keep. Printed are their mean absolute relative errors by benchmark, beside the predictions of ``paleo validate``.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import PaleoError
from paleo.specs.device import find_device

Array = npt.NDArray[np.float64]
#: Formats whose peak scales a score from one device to another: the first that the device has.
FORMATS = ("fp16", "bf16")
#: Powers of e in the count of GPUs that another device is worth in `nearest`: more than counts ever differ by.
OTHER_DEVICE = 10.0


def peak(device: str) -> float:
    """FLOP/s of a device in 16 bits; nan where the catalog lacks it."""
    for dtype in FORMATS:
        try:
            return find_device(device).peak_flops_per_s(dtype)
        except PaleoError:
            continue
    return float("nan")


def gpu_peaks(frame: pd.DataFrame) -> Array:
    """FLOP/s of all GPUs of each row."""
    of_device = {name: peak(str(name)) for name in frame["device"].unique()}
    return np.asarray(frame["n_gpus"] * frame["device"].map(of_device), dtype=np.float64)


def device_time(frame: pd.DataFrame) -> Array:
    """Minutes x GPUs x peak of each row."""
    return np.asarray(frame["minutes_to_target"].to_numpy(dtype=np.float64) * gpu_peaks(frame))


def fastest_of_round_before(rows: pd.DataFrame, other_rounds: pd.DataFrame) -> Array:
    """Minutes by the least device time of the round before the rows' own (the first one, where none is before)."""
    rounds = sorted(other_rounds["round"].unique())
    earlier = [name for name in rounds if name < rows["round"].iloc[0]]
    times = device_time(other_rounds[other_rounds["round"] == (earlier or rounds[:1])[-1]])
    least = np.nanmin(times) if np.isfinite(times).any() else np.nan
    return least / gpu_peaks(rows)


def median_of_device(rows: pd.DataFrame, other_rounds: pd.DataFrame) -> Array:
    """Minutes by the median device time of other rounds on the same device (on all, where it is new)."""
    times = pd.Series(device_time(other_rounds), index=other_rounds.index)
    by_device = times.groupby(other_rounds["device"]).median()
    medians = rows["device"].map(by_device).fillna(float(times.median())).to_numpy(dtype=np.float64)
    return np.asarray(medians / gpu_peaks(rows))


def nearest(rows: pd.DataFrame, other_rounds: pd.DataFrame) -> Array:
    """Minutes by the submission of other rounds that is nearest in device first and then in count."""
    times = device_time(other_rounds)
    if not np.isfinite(times).any():
        return np.full(len(rows), np.nan)
    counts, other_counts = (np.log(frame["n_gpus"].to_numpy(dtype=np.float64)) for frame in (rows, other_rounds))
    same_device = rows["device"].to_numpy()[:, None] == other_rounds["device"].to_numpy()[None, :]
    distance = np.abs(counts[:, None] - other_counts[None, :]) + np.where(same_device, 0.0, OTHER_DEVICE)
    closest = np.argmin(np.where(np.isfinite(times)[None, :], distance, np.inf), axis=1)
    return np.asarray(times[closest] / gpu_peaks(rows))


BASELINES = (fastest_of_round_before, median_of_device, nearest)


def baselines(frame: pd.DataFrame) -> pd.DataFrame:
    """Minutes of every row by each baseline from all other rounds of its benchmark; nan where there is no other."""
    minutes = pd.DataFrame(np.nan, index=frame.index, columns=[baseline.__name__ for baseline in BASELINES])
    for (benchmark, edition), rows in frame.groupby(["benchmark", "round"]):
        other_rounds = frame[(frame["benchmark"] == benchmark) & (frame["round"] != edition)]
        if not other_rounds.empty:
            for baseline in BASELINES:
                minutes.loc[rows.index, baseline.__name__] = baseline(rows, other_rounds)
    return minutes


def main(file: str) -> None:
    frame = pd.read_csv(file)
    frame = frame[~frame["device"].astype(str).str.startswith("tpu")]
    errors = baselines(frame).div(frame["minutes_to_target"], axis=0).sub(1.0).abs()
    print((errors.groupby(frame["benchmark"]).mean() * 100).round(1).to_string())


if __name__ == "__main__":
    main(sys.argv[1])
