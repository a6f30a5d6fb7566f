"""The section of a report on failures: goodput of each offer, and a map of it over checkpoint interval and mean time
between failures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.report.charts import COLOURS, heat_map
from paleo.report.tables import tenths
from paleo.units import counted, duration

if TYPE_CHECKING:
    from paleo.studies.comparison import Offer, Purchase
    from paleo.studies.goodput import Goodput

#: Intervals and times between failures of the map, over those of the run.
FACTORS = tuple(2.0**power for power in range(-4, 5))


def section(study: Purchase) -> str:
    """The section; empty where failures are not counted."""
    runs = [(offer, run) for offer in study.offers if (run := _run(offer)) is not None]
    if not runs:
        return ""
    items = "".join(f"<li>{escape(_sentence(offer, run))}</li>" for offer, run in runs)
    panels = "".join(_panel(offer, run) for offer, run in runs)
    return (
        "<section><h2>If nodes fail</h2><p>Time, cost and energy on this page hold checkpoints, work done again and "
        f'restarts.</p><ul class=verdicts>{items}</ul><div class="panels">{panels}</div></section>'
    )


def _run(offer: Offer) -> Goodput | None:
    return None if offer.candidate.training is None else offer.candidate.training.goodput


def _sentence(offer: Offer, run: Goodput) -> str:
    low, high = run.share_range
    early, late = run.finish_interval
    return (
        f"{offer.gpus} × {offer.candidate.system.name}: goodput {tenths(run.share)} ({tenths(low)} to {tenths(high)} "
        f"over the range of failure rates), a failure every {duration(run.mtbf)}, checkpoints every "
        f"{duration(run.interval)}; done after {duration(run.finish)}, p10 to p90 "
        f"{duration(early)} to {duration(late)}; {counted(run.spares, 'spare node')} for 99 % of repairs. "
        f"Failures: {run.source}."
    )


def _panel(offer: Offer, run: Goodput) -> str:
    title = f"Goodput [%] of {offer.gpus} × {offer.candidate.system.name}; framed: this run"
    drawn = heat_map(
        shares(run, FACTORS).tolist(),
        columns=[duration(run.interval * factor, digits=2) for factor in FACTORS],
        rows=[duration(run.mtbf * factor, digits=2) for factor in FACTORS],
        marked=(len(FACTORS) // 2, len(FACTORS) // 2),
        colour=COLOURS[0],
        title=title,
        x_label="interval between checkpoints",
        y_label="time between failures",
    )
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"


def shares(run: Goodput, factors: Sequence[float]) -> npt.NDArray[np.float64]:
    """Goodput with time between failures (rows) and interval (columns) times the factors: (factors, factors)."""
    scale = np.asarray(factors)
    return run.checkpoints.goodput(run.interval * scale[None, :], run.mtbf * scale[:, None])
