"""Logs of Megatron-LM and Megatron-Core: a line of bars a step, timers of ranks as (fastest, slowest) below it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paleo.logs.base import READERS, Reader, given_values, number_after, number_of
from paleo.units import MEBIBYTE, MILLISECOND

_ELAPSED = re.compile(r"elapsed time per iteration \(ms\):\s*([\d.,]+)")
_BATCH = re.compile(r"global batch size:\s*([\d,]+)")
_MEMORY = re.compile(r"max allocated:\s*([\d.]+)")
_TIMER = re.compile(r"^\s*([\w-]+)\s*\.{3,}:\s*\(([\d.]+),\s*([\d.]+)\)")
#: Timers of parts of a step; those of one part are added up.
_PARTS = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "all-grads-sync": "exchange",
    "params-all-gather": "gather",
    "optimizer": "optimizer",
}


def _states(line: str) -> Mapping[str, object]:
    timer = _TIMER.match(line)
    if timer is not None and timer.group(1) in _PARTS:
        name = _PARTS[timer.group(1)]
        fastest, slowest = (number_of(timer.group(group), MILLISECOND) for group in (2, 3))
        return {"parts": given_values(**{name: slowest}), "fastest": given_values(**{name: fastest})}
    return given_values(
        seconds=number_after(_ELAPSED, line, MILLISECOND),
        global_batch=number_after(_BATCH, line),
        memory=number_after(_MEMORY, line, MEBIBYTE),
    )


READERS.register("megatron-lm")(
    Reader(re.compile(r"iteration\s+\d+/\s*\d+ \|"), _states, "Megatron-LM, training.py, training_log")
)
