"""A prediction as a trace for Perfetto or chrome://tracing.

Each class of ranks is a process, and each of its streams a track.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paleo.units import MICROSECOND

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.schedules.engine import Event

Document = dict[str, Any]


def trace(prediction: Prediction) -> Document:
    """Return a prediction in the Trace Event Format of Perfetto and chrome://tracing.

    Events are complete events in microseconds with FLOP and bytes as arguments. Ranks that do the same at the same time
    are one class: all of them, or those of a pipeline stage.

    Parameters
    ----------
    prediction : Prediction
        Prediction of a run.

    Returns
    -------
    Document
        The trace as a JSON document.
    """
    events = prediction.timeline.events
    streams = list(dict.fromkeys(_stream(event) for event in events))
    places = {
        stream: (list(dict.fromkeys(group for group, *_ in streams)).index(stream[0]), i)
        for i, stream in enumerate(streams)
    }
    ranks = prediction.plan.mesh.size // prediction.plan.stages
    named = [_named(places[stream], stream, ranks) for stream in streams]
    return {
        "traceEvents": [*(event for pair in named for event in pair), *_complete(events, places)],
        "displayTimeUnit": "ms",
        "otherData": {
            "model": prediction.model.name,
            "system": prediction.system.name,
            "gpus": prediction.plan.gpus,
            "strategy": prediction.plan.strategy or "dp",
            "step_time_s": prediction.step_time,
            "traced_s": prediction.timeline.end,
            "calibration": prediction.calibration,
        },
    }


def _stream(event: Event) -> tuple[str, str]:
    """Return the class of ranks and the stream of an event."""
    resource, _, stream = event.task.resource.partition(" ")
    if not resource.startswith("stage"):
        return "ranks", resource
    return f"stage {resource.removeprefix('stage')}", stream or "compute"


def _named(place: tuple[int, int], stream: tuple[str, str], ranks: int) -> Iterator[Document]:
    process, thread = place
    process_name = f"{stream[0]} ({ranks} alike)" if ranks > 1 else stream[0]
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": process_name}}
    yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": stream[1]}}


def _complete(events: tuple[Event, ...], places: dict[tuple[str, str], tuple[int, int]]) -> Iterator[Document]:
    for event in events:
        if event.end > event.start:
            process, thread = places[_stream(event)]
            task = event.task
            counts = {name: value for name, value in (("flops", task.flops), ("bytes", task.bytes)) if value > 0}
            yield {
                "ph": "X",
                "name": task.name,
                "cat": task.kind,
                "pid": process,
                "tid": thread,
                "ts": event.start / MICROSECOND,
                "dur": (event.end - event.start) / MICROSECOND,
                "args": counts,
            }
