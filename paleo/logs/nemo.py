"""Logs of NeMo 2: ``Training epoch 0, iteration 10/99 | … | train_step_timing in s: 12.3``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paleo.logs.base import READERS, Reader, given_values, number_after

_SECONDS = re.compile(r"train_step_timing in s:\s*([\d.]+)")
_BATCH = re.compile(r"global_batch_size:\s*([\d.]+)")


def _states(line: str) -> Mapping[str, object]:
    return given_values(seconds=number_after(_SECONDS, line), global_batch=number_after(_BATCH, line))


READERS.register("nemo")(Reader(re.compile(r"train_step_timing in s:"), _states, "NeMo, progress printer"))
