"""Readers of the logs of training frameworks: which values a line gives for a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from paleo.logs.base import (
    TRAINING_LOG_READERS,
    TrainingLogReader,
    matched_number,
    parse_positive_number,
    without_missing_values,
)
from paleo.units import GIBIBYTE, GIGA, MEBIBYTE, MILLISECOND


def _numbers(**fields: tuple[str, float]) -> Callable[[str], Mapping[str, object]]:
    """Return a function that reads fields of a line, given the pattern of each number and the SI value of its unit."""
    patterns = [(name, re.compile(pattern), unit) for name, (pattern, unit) in fields.items()]
    return lambda line: without_missing_values(**{name: matched_number(p, line, unit) for name, p, unit in patterns})


# Logs of llm-foundry (Composer): a block of ``Train …: value`` lines after ``[batch=10/100]:``

_RATE = re.compile(r"throughput/batches_per_sec:\s*([\d.]+)")
_TOKENS = re.compile(r"throughput/device/tokens_per_sec:\s*([\d.]+)")
_MEMORY = re.compile(r"memory/peak_(?:allocated|active)_mem:\s*([\d.]+)")


def _composer_values(line: str) -> Mapping[str, object]:
    rate = matched_number(_RATE, line)
    return without_missing_values(
        seconds=None if rate is None else 1.0 / rate,
        tokens_per_s=matched_number(_TOKENS, line),
        memory=matched_number(_MEMORY, line, GIGA),
    )


TRAINING_LOG_READERS.register("llm-foundry")(
    TrainingLogReader(re.compile(r"\[batch=\d+/\d+\]"), _composer_values, "Composer, ConsoleLogger")
)


# Logs of Megatron-LM and Megatron-Core: a line with vertical bars for each step, and timers (fastest, slowest rank)

_MEGATRON_NUMBERS = _numbers(
    seconds=(r"elapsed time per iteration \(ms\):\s*([\d.,]+)", MILLISECOND),
    global_batch=(r"global batch size:\s*([\d,]+)", 1.0),
    memory=(r"max allocated:\s*([\d.]+)", MEBIBYTE),
)
_TIMER = re.compile(r"^\s*([\w-]+)\s*\.{3,}:\s*\(([\d.]+),\s*([\d.]+)\)")
#: Timers of Megatron for each part of a step; the timers of one part are added up.
_PARTS = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "all-grads-sync": "exchange",
    "params-all-gather": "gather",
    "optimizer": "optimizer",
}


def _megatron_values(line: str) -> Mapping[str, object]:
    timer = _TIMER.match(line)
    if timer is not None and timer.group(1) in _PARTS:
        name = _PARTS[timer.group(1)]
        fastest, slowest = (parse_positive_number(timer.group(group), MILLISECOND) for group in (2, 3))
        return {
            "slowest_rank_parts": without_missing_values(**{name: slowest}),
            "fastest_rank_parts": without_missing_values(**{name: fastest}),
        }
    return _MEGATRON_NUMBERS(line)


TRAINING_LOG_READERS.register("megatron-lm")(
    TrainingLogReader(
        re.compile(r"iteration\s+\d+/\s*\d+ \|"), _megatron_values, "Megatron-LM, training.py, training_log"
    )
)


# Logs of NeMo 2: ``Training epoch 0, iteration 10/99 | … | train_step_timing in s: 12.3``

_NEMO_NUMBERS = _numbers(
    seconds=(r"train_step_timing in s:\s*([\d.]+)", 1.0), global_batch=(r"global_batch_size:\s*([\d.]+)", 1.0)
)
TRAINING_LOG_READERS.register("nemo")(
    TrainingLogReader(re.compile(r"train_step_timing in s:"), _NEMO_NUMBERS, "NeMo, progress printer")
)


# Logs of torchtitan: ``step: 10 loss: … memory: 47.30GiB(59.80%) tps: 5,762 tflops: … mfu: …``

_TITAN_NUMBERS = _numbers(memory=(r"memory:\s*([\d.]+)\s*GiB", GIBIBYTE), tokens_per_s=(r"tps:\s*([\d,]+)", 1.0))
TRAINING_LOG_READERS.register("torchtitan")(
    TrainingLogReader(re.compile(r"step:\s*\d+.*\btps:"), _TITAN_NUMBERS, "torchtitan, components/metrics.py")
)


# Logs of the Hugging Face Trainer: progress bars ``10/100 [00:12<01:50, 1.23s/it]``, several to a line

_TRAINER_SECONDS = re.compile(r"([\d.]+)\s*s/it\]")
_TRAINER_RATE = re.compile(r"([\d.]+)\s*it/s\]")


def _trainer_values(line: str) -> Mapping[str, object]:
    seconds, rate = matched_number(_TRAINER_SECONDS, line), matched_number(_TRAINER_RATE, line)
    return without_missing_values(seconds=seconds if rate is None else 1.0 / rate)


TRAINING_LOG_READERS.register("transformers-trainer")(
    TrainingLogReader(
        re.compile(r"\d+/\d+ \[[\d:]+<[\d:?]+,\s*[\d.]+\s*(?:s/it|it/s)"), _trainer_values, "Hugging Face Trainer, tqdm"
    )
)
