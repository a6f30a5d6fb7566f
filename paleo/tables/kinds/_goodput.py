"""Rows of long runs: the share of time that trained."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from paleo.errors import SpecError
from paleo.specs.reliability import USUAL
from paleo.step.waiting import expected_largest, normal_quantile, slowest_mean
from paleo.studies.goodput import RestartPath, best_interval, goodput, mean_time_between_failures
from paleo.tables.steps import Row, Step, StepTable, filled, whole_cell
from paleo.tables.tables import STEPS
from paleo.units import HOUR

if TYPE_CHECKING:
    from paleo.specs.software import Software


#: Accelerators in a node where a row counts those alone: 8 GPUs, 16 chips of Trainium (trn1.32xlarge).
GPUS_PER_NODE, TRAINIUM_PER_NODE = 8.0, 16.0
#: What a row says that tells a run of another row once more.
REPEATED = "by another count"
#: Words of rows whose machines people replaced and restarted, and the hours that took: OPT-175B's chronicle (41 % of 56
#: days over 90 restarts).
BY_HAND, HOURS_BY_HAND = ("manual", "by hand", "without dlrover"), 6.6
#: Pause of a checkpoint where a row does not say how long it takes: copied to host memory, written beside training.
PAUSE = 10.0


def mtbf_of(row: Row) -> float:
    """The mean time between failures of a row: as stated, else from its failures, else from the failure rate of its
    nodes."""
    if filled(row, "mtbf_s"):
        return float(row["mtbf_s"])
    if filled(row, "period_s") and filled(row, "failures"):
        return float(row["period_s"]) / float(row["failures"])
    if filled(row, "nodes"):
        nodes = float(row["nodes"])
    elif filled(row, "gpus"):
        trainium = "trainium" in str(row.get("model", "")).lower()
        nodes = float(row["gpus"]) / (TRAINIUM_PER_NODE if trainium else GPUS_PER_NODE)
    else:
        raise SpecError("neither failures nor nodes are stated")
    return float(mean_time_between_failures(nodes=nodes, node_rate=USUAL.failures))


def restart_of(row: Row) -> float:
    """Seconds from a failure to the next new step."""
    words = f"{row.get('run', '')} {row.get('notes', '')}".lower()
    if filled(row, "restart_s"):
        return float(row["restart_s"])
    if any(word in words for word in BY_HAND):
        return HOURS_BY_HAND * HOUR
    return RestartPath().restart(float(row["load_s"]) if filled(row, "load_s") else 60.0)


class LongRuns(StepTable):
    """Rows of long runs; the measured quantity is goodput."""

    name = "goodput"
    header = frozenset({"gpus", "mtbf_s", "interval_s", "goodput"})
    reads = "checkpoint_bytes checkpoint_s device failures load_s model nodes notes period_s restart_s run"
    configuration = ("model", "run", "nodes", "failures", "checkpoint_s", "checkpoint_bytes", "notes")
    measured_column = "goodput"
    measured_unit = 1.0
    calibrates = False

    def step(self, row: Row, software: Software | None = None) -> Step:
        """The goodput of the row's run; ends of the interval are those of the range of failure rates."""
        if REPEATED in str(row.get("notes", "")):
            raise SpecError("the run of another row by another count")
        mtbf, restart, save = (
            mtbf_of(row),
            restart_of(row),
            (float(row["checkpoint_s"]) if filled(row, "checkpoint_s") else PAUSE),
        )
        interval = float(row["interval_s"]) if filled(row, "interval_s") else float(best_interval(save=save, mtbf=mtbf))
        shares = [
            float(goodput(interval=interval, save=save, restart=restart, mtbf=mtbf * factor))
            for factor in (1.0, USUAL.failures / USUAL.high, USUAL.failures / USUAL.low)
        ]
        if not math.isfinite(shares[0]):
            raise SpecError("nothing is known of failures")
        return Step(shares[0], shares[1], shares[2], 1.0, str(row.get("device") or "-"), "closed form")


STEPS.register("goodput")(LongRuns())


def rank_means(*, ranks: int, mean: float, slowest: float, deviation: float) -> list[float]:
    """Means of ranks of which the average, the slowest and the deviation are known: the others are spread as a normal
    sample of what deviation the slowest leaves."""
    if ranks == 1:
        return [slowest]
    mean_of_others = (ranks * mean - slowest) / (ranks - 1)
    left = ranks * deviation**2 - (slowest - mean) ** 2 - (ranks - 1) * (mean_of_others - mean) ** 2
    scores = normal_quantile((np.arange(1.0, ranks) - 0.375) / (ranks - 1 + 0.25))
    spread = np.sqrt(max(left, 0.0) / max(float(np.sum(scores**2)), 1.0))
    return [slowest, *np.minimum(mean_of_others + spread * scores, slowest).tolist()]


class Stages(StepTable):
    """One pipeline stage of a traced job a row; the measured quantity is the mean over steps of its slowest rank."""

    name = "stragglers"
    header = frozenset({"trace", "ranks", "persistent_sd_s", "independent_sd_s", "compute_max_s"})
    reads = "cause compute_mean_s slowest_rank_mean_s stage steps"
    configuration = ("cause", "stage", "compute_mean_s", "slowest_rank_mean_s")
    measured_column = "compute_max_s"
    measured_unit = 1.0
    calibrates = False

    def step(self, row: Row, software: Software | None = None) -> Step:
        """Expected maximum over the ranks; the baseline is their mean."""
        if not filled(row, "ranks"):
            raise SpecError("ranks is not stated")
        ranks, mean = whole_cell(row, "ranks"), float(row["compute_mean_s"])
        noise, slowest = float(row["independent_sd_s"]), float(row["slowest_rank_mean_s"])
        means = rank_means(ranks=ranks, mean=mean, slowest=slowest, deviation=float(row["persistent_sd_s"]))
        value = slowest_mean(means, noise / mean)
        steps = max(whole_cell(row, "steps", 1), 1)
        error = 1.65 * noise / np.sqrt(steps) + 0.01 * value * float(expected_largest(ranks))
        return Step(value, value - error, value + error, mean, str(row["trace"]), "expected maximum")


STEPS.register("stragglers")(Stages())
