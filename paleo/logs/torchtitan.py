"""Logs of torchtitan: ``step: 10  loss: …  memory: 47.30GiB(59.80%)  tps: 5,762  tflops: …  mfu: …``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paleo.logs.base import READERS, Reader, given_values, number_after
from paleo.units import GIB

_MEMORY = re.compile(r"memory:\s*([\d.]+)\s*GiB")
_TOKENS = re.compile(r"tps:\s*([\d,]+)")


def _states(line: str) -> Mapping[str, object]:
    return given_values(memory=number_after(_MEMORY, line, GIB), tokens_per_s=number_after(_TOKENS, line))


READERS.register("torchtitan")(Reader(re.compile(r"step:\s*\d+.*\btps:"), _states, "torchtitan, components/metrics.py"))
