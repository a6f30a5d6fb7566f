"""Readers of the logs of training frameworks: which values a line gives for a step."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paleo.logs.base import (
    TRAINING_LOG_READERS,
    TrainingLogReader,
    matched_number,
    parse_positive_number,
    without_missing_values,
)
from paleo.units import GIBIBYTE, GIGA, MEBIBYTE, MILLISECOND

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

_ELAPSED = re.compile(r"elapsed time per iteration \(ms\):\s*([\d.,]+)")
_BATCH = re.compile(r"global batch size:\s*([\d,]+)")
_MEGATRON_MEMORY = re.compile(r"max allocated:\s*([\d.]+)")
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
    return without_missing_values(
        seconds=matched_number(_ELAPSED, line, MILLISECOND),
        global_batch=matched_number(_BATCH, line),
        memory=matched_number(_MEGATRON_MEMORY, line, MEBIBYTE),
    )


TRAINING_LOG_READERS.register("megatron-lm")(
    TrainingLogReader(
        re.compile(r"iteration\s+\d+/\s*\d+ \|"), _megatron_values, "Megatron-LM, training.py, training_log"
    )
)


# Logs of NeMo 2: ``Training epoch 0, iteration 10/99 | … | train_step_timing in s: 12.3``

_SECONDS = re.compile(r"train_step_timing in s:\s*([\d.]+)")
_NEMO_BATCH = re.compile(r"global_batch_size:\s*([\d.]+)")


def _nemo_values(line: str) -> Mapping[str, object]:
    return without_missing_values(
        seconds=matched_number(_SECONDS, line), global_batch=matched_number(_NEMO_BATCH, line)
    )


TRAINING_LOG_READERS.register("nemo")(
    TrainingLogReader(re.compile(r"train_step_timing in s:"), _nemo_values, "NeMo, progress printer")
)


# Logs of torchtitan: ``step: 10 loss: … memory: 47.30GiB(59.80%) tps: 5,762 tflops: … mfu: …``

_TITAN_MEMORY = re.compile(r"memory:\s*([\d.]+)\s*GiB")
_TITAN_TOKENS = re.compile(r"tps:\s*([\d,]+)")


def _titan_values(line: str) -> Mapping[str, object]:
    return without_missing_values(
        memory=matched_number(_TITAN_MEMORY, line, GIBIBYTE), tokens_per_s=matched_number(_TITAN_TOKENS, line)
    )


TRAINING_LOG_READERS.register("torchtitan")(
    TrainingLogReader(re.compile(r"step:\s*\d+.*\btps:"), _titan_values, "torchtitan, components/metrics.py")
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
