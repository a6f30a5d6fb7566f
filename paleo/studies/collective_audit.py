"""What is off in the links of a machine: times of nccl-tests beside those that its collectives are predicted to take.

Small payloads tell when a collective starts, large ones what the links carry. A ratio is a fault beyond what nine of
ten rows of measured tables err by (docs/accuracy.md, collective: 36 % over all payloads; small ones scatter more).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.errors import PaleoError
from paleo.studies.audit import RANKS_BEYOND
from paleo.studies.collective import collective
from paleo.units import MEBIBYTE

if TYPE_CHECKING:
    from paleo.logs.nccl_tests import CollectiveLog
    from paleo.specs.hardware import System
    from paleo.studies.collective import CollectiveStudy

Array = npt.NDArray[np.float64]
#: Measured over predicted seconds from which links are slow, and starts are late.
SLOW, LATE = 1.4, 2.0
#: Payloads up to this tell the start; those of at least this, and of a quarter of the largest, the links [bytes].
SMALL, LARGE, NEAR_LARGEST = MEBIBYTE / 16.0, 16.0 * MEBIBYTE, 4.0
ADVICE = {
    "slow link": "a port that is down, a cable, TCP in place of RDMA (NCCL_DEBUG=INFO tells), other jobs, or fewer "
    "network cards than stated",
    "late start": "processes far from their cards (NUMA), power saving of the CPU, or a proxy thread without a core",
    "faster than stated": "the system has more links, or newer ones, than the file says",
}


@dataclass(frozen=True, slots=True)
class CollectiveAudit:
    """``small`` and ``large``: median of measured over predicted seconds, None where the log has no such payload;
    ``faults`` by name with their factor; ``beyond``: ranks and seconds of the largest payload on more of them."""

    log: CollectiveLog
    study: CollectiveStudy
    predicted: tuple[float, ...]
    small: float | None
    large: float | None
    faults: Mapping[str, float]
    beyond: tuple[int, float] | None

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        subject = f"{self.study.operation} over {self.study.ranks} GPUs of {self.study.system.name}"
        if not self.faults:
            return f"{subject}: as predicted, nothing in this log says otherwise."
        words = {
            "slow link": "links carry {share:.0%} of what is predicted",
            "late start": "small payloads take {factor:.1f} times as long as predicted, large ones do not",
            "faster than stated": "links carry {share:.0%} of what is predicted",
        }
        parts = [
            f"{name}: {words[name].format(share=1.0 / factor, factor=factor)}" for name, factor in self.faults.items()
        ]
        return f"{subject}: {'; '.join(parts)}."


def audit_collectives(log: CollectiveLog, operation: str, ranks: int, system: System) -> CollectiveAudit:
    """Measured times beside predicted ones, what is off, and the largest payload on `RANKS_BEYOND` times the ranks."""
    study = collective(operation, log.payloads[-1], ranks, system)
    payloads, measured = np.asarray(log.payloads), np.asarray(log.seconds)
    predicted = automatic_seconds(study, payloads)
    ratios = measured / predicted
    small = _median(ratios[payloads <= SMALL])
    large = _median(ratios[(payloads >= LARGE) & (payloads >= payloads[-1] / NEAR_LARGEST)])
    faults: dict[str, float] = {}
    if large is not None and large > SLOW:
        faults["slow link"] = large
    elif large is not None and large < 1.0 / SLOW:
        faults["faster than stated"] = large
    elif small is not None and small > LATE:
        faults["late start"] = small
    return CollectiveAudit(log, study, tuple(predicted), small, large, faults, _on_more(study, large))


def automatic_seconds(study: CollectiveStudy, payloads: Array) -> Array:
    """Seconds of the algorithm that the library chooses, payload by payload."""
    times = study.times(payloads)
    return np.asarray(np.min([times[row.algorithm] for row in study.rows if row.automatic], axis=0))


def _median(values: Array) -> float | None:
    return float(np.median(values)) if len(values) else None


def _on_more(study: CollectiveStudy, large: float | None) -> tuple[int, float] | None:
    """The largest payload on more ranks, at the ratio of large payloads; None where the system does not hold them."""
    ranks = study.ranks * RANKS_BEYOND
    try:
        more = collective(study.operation, study.payload_bytes, ranks, study.system)
    except PaleoError:
        return None
    return ranks, more.best.time * (large or 1.0)
