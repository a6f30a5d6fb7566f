"""What ``-v`` adds to an estimate: time by section and stream, and every collective with the source of its price."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from paleo.report.grid import grid
from paleo.step.timeline import COMPUTE
from paleo.studies.collective import step_collectives
from paleo.units import duration, engineering

if TYPE_CHECKING:
    from paleo.predict import Prediction

#: Rows of a table.
MOST_ROWS = 40
#: Passes of a pipeline, as they are called.
PASSES = {"F": "forward", "B": "backward", "W": "weight gradients"}


def sections(prediction: Prediction) -> Table:
    """Time on each stream by section, the longest first; of a pipeline the passes of each stage over all
    microbatches."""
    table = grid("Sections by time on their stream", ("section", "stream", "kind", "time"), left=3)
    spent: dict[tuple[str, str, str], float] = {}
    for event in prediction.timeline.events:
        task = event.task
        if task.resource.endswith(" communication"):
            continue  # of a stage: `collectives` has them
        name = "all microbatches" if task.kind in PASSES else task.name
        stream = "computing" if task.resource == COMPUTE else task.resource
        key = name, stream, PASSES.get(task.kind, task.kind)
        spent[key] = spent.get(key, 0.0) + event.end - event.start
    for key, seconds in sorted(spent.items(), key=lambda item: -item[1])[:MOST_ROWS]:
        table.add_row(*key, duration(seconds))
    return table


def collectives(prediction: Prediction) -> Table:
    """Every collective of a device in a step, and whether its price is calibrated or follows from datasheets."""
    columns = "sent", "collective", "over", "calls", "payload", "time of each", "price"
    table = grid("Collectives of a step, on the busiest stage; times as if nothing else travelled", columns, left=3)
    table.columns[-1].justify = "left"
    for collective in step_collectives(prediction)[:MOST_ROWS]:
        group = f"{collective.ranks} ranks of {'+'.join(collective.axes)}"
        size, seconds = engineering(collective.payload_bytes, "B"), duration(collective.seconds)
        table.add_row(
            collective.content, collective.operation, group, f"{collective.calls:,}", size, seconds, collective.price
        )
    if not table.row_count:
        table.add_row("nothing")
    return table
