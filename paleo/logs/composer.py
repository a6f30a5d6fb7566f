"""Logs of llm-foundry (Composer): a block of ``Train …: value`` lines behind ``[batch=10/100]:``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paleo.logs.base import READERS, Reader, given_values, number_after
from paleo.units import GIGA

_RATE = re.compile(r"throughput/batches_per_sec:\s*([\d.]+)")
_TOKENS = re.compile(r"throughput/device/tokens_per_sec:\s*([\d.]+)")
_MEMORY = re.compile(r"memory/peak_(?:allocated|active)_mem:\s*([\d.]+)")


def _states(line: str) -> Mapping[str, object]:
    rate = number_after(_RATE, line)
    return given_values(
        seconds=None if rate is None else 1.0 / rate,
        tokens_per_s=number_after(_TOKENS, line),
        memory=number_after(_MEMORY, line, GIGA),
    )


READERS.register("llm-foundry")(Reader(re.compile(r"\[batch=\d+/\d+\]"), _states, "Composer, ConsoleLogger"))
