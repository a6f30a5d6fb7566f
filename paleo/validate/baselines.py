"""What minutes to target have to beat: three ways to predict a submission from those of other rounds.

All work with device time: minutes x GPUs x peak FLOP/s of tensor cores in 16 bits, which a perfect scaling would keep.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import PaleoError
from paleo.specs.device import find_device

Array = npt.NDArray[np.float64]
#: Format whose peak scales a score from one device to another.
DTYPE = "fp16"


def peaks(devices: pd.Series[str]) -> Array:
    """Peak FLOP/s of each row's device; nan for devices that the catalog lacks."""

    def peak(name: str) -> float:
        try:
            return find_device(name).peak_flops_per_s(DTYPE)
        except PaleoError:
            try:
                return find_device(name).peak_flops_per_s("bf16")
            except PaleoError:
                return float("nan")

    known = {str(name): peak(str(name)) for name in devices.unique()}
    return np.asarray(devices.astype(str).map(known), dtype=np.float64)


def _work(frame: pd.DataFrame) -> Array:
    """Minutes x GPUs x peak of each row."""
    minutes, gpus = (frame[name].to_numpy(dtype=np.float64) for name in ("minutes_to_target", "n_gpus"))
    return np.asarray(minutes * gpus * peaks(frame["device"]))


def scaled_best(frame: pd.DataFrame, other_rounds: pd.DataFrame, last: str) -> Array:
    """The least device time of the round before (``last``), spread over each row's GPUs; nan without one."""
    before = other_rounds[other_rounds["round"] == last]
    work = _work(before)
    least = np.nanmin(work) if np.isfinite(work).any() else np.nan
    return np.asarray(least / (frame["n_gpus"].to_numpy(dtype=np.float64) * peaks(frame["device"])))


def one_utilisation(frame: pd.DataFrame, other_rounds: pd.DataFrame) -> Array:
    """The median device time of other rounds on the same device (on all, where it is new), over each row's GPUs."""
    work = pd.Series(_work(other_rounds), index=other_rounds.index)
    medians = work.groupby(other_rounds["device"]).median()
    chosen = frame["device"].map(medians).fillna(float(work.median())).to_numpy(dtype=np.float64)
    return np.asarray(chosen / (frame["n_gpus"].to_numpy(dtype=np.float64) * peaks(frame["device"])))


def nearest(frame: pd.DataFrame, other_rounds: pd.DataFrame) -> Array:
    """The submission of other rounds nearest in device first and then in count, its minutes scaled by GPUs and peak."""
    work, counts = _work(other_rounds), np.log(other_rounds["n_gpus"].to_numpy(dtype=np.float64))
    usable = np.isfinite(work)
    if not usable.any():
        return np.full(len(frame), np.nan)
    same = other_rounds["device"].to_numpy()[None, :] == frame["device"].to_numpy()[:, None]
    distance = np.abs(np.log(frame["n_gpus"].to_numpy(dtype=np.float64))[:, None] - counts[None, :])
    cost = np.where(usable[None, :], distance + np.where(same, 0.0, OTHER_DEVICE), np.inf)
    chosen = work[np.argmin(cost, axis=1)]
    return np.asarray(chosen / (frame["n_gpus"].to_numpy(dtype=np.float64) * peaks(frame["device"])))


#: How many powers of e in count another device is worth.
OTHER_DEVICE = 10.0


def left_out_baselines(frame: pd.DataFrame) -> pd.DataFrame:
    """The three baselines of every row from all other rounds, in minutes: ``scaled_best``, ``one_utilisation``,
    ``nearest``."""
    rounds = sorted(frame["round"].unique())
    parts = []
    for benchmark in frame["benchmark"].unique():
        submissions = frame[frame["benchmark"] == benchmark]
        for name in submissions["round"].unique():
            rows, other_rounds = submissions[submissions["round"] == name], submissions[submissions["round"] != name]
            if other_rounds.empty:
                continue
            before = [earlier for earlier in rounds if earlier < name and (other_rounds["round"] == earlier).any()]
            last = before[-1] if before else str(other_rounds["round"].min())
            predicted = {
                "scaled_best": scaled_best(rows, other_rounds, last),
                "one_utilisation": one_utilisation(rows, other_rounds),
                "nearest": nearest(rows, other_rounds),
            }
            parts.append(pd.DataFrame(predicted, index=rows.index))
    return pd.concat(parts).reindex(frame.index)
