"""Logs of the Hugging Face Trainer: progress bars ``10/100 [00:12<01:50, 1.23s/it]``, several to a line."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paleo.logs.base import READERS, Reader, given_values, number_after

_SECONDS = re.compile(r"([\d.]+)\s*s/it\]")
_RATE = re.compile(r"([\d.]+)\s*it/s\]")


def _states(line: str) -> Mapping[str, object]:
    seconds, rate = number_after(_SECONDS, line), number_after(_RATE, line)
    return given_values(seconds=seconds if rate is None else 1.0 / rate)


READERS.register("transformers-trainer")(
    Reader(re.compile(r"\d+/\d+ \[[\d:]+<[\d:?]+,\s*[\d.]+\s*(?:s/it|it/s)"), _states, "Hugging Face Trainer, tqdm")
)
