"""Goodput of a predicted run: what fails, what a checkpoint holds and where it goes, from options as people write."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from paleo.errors import SpecError
from paleo.operations.optimizers import optimizer
from paleo.operations.precision import precision
from paleo.predict import Prediction
from paleo.studies.checkpoint import WRITERS
from paleo.studies.goodput import (
    CHECKPOINTING,
    Checkpointing,
    Goodput,
    Reliability,
    check_storage,
    long_run,
    mean_time_between_failures,
    save_seconds,
)
from paleo.studies.training import Training
from paleo.units import DAY, GIGA, KILO, parse

#: What shared storage takes in where nobody states it [byte/s]: a parallel file system of a large cluster.
STORAGE_RATE = 100.0 * GIGA
#: Bytes per second that a process copies into host memory, and seconds that the call takes.
COPY_RATE, PAUSE = 10.0 * GIGA, 0.2
_FAILURES = re.compile(r"\s*([\d.]+(?:[eE][+-]?\d+)?)\s*/\s*(k?)node-?days?\s*\Z")


def failure_rate(text: str) -> float:
    """Failures of a node and second from ``4/knodeday`` or ``0.004/nodeday``; SpecError without such a unit.

    >>> round(failure_rate("4/knodeday") * 86400 * 1000, 6)
    4.0
    """
    match = _FAILURES.match(text)
    if match is None:
        raise SpecError(f"--failures {text!r} has no unit; write it like '4/knodeday' (per thousand days of a node)")
    return float(match.group(1)) / DAY / (KILO if match.group(2) else 1.0)


@dataclass(frozen=True, slots=True)
class LongRunOptions:
    """Options of a long run as text, each None where it is not given."""

    failures: str | None = None
    checkpoint: str | None = None
    checkpointing: str | None = None
    storage: str | None = None
    capacity: str | None = None
    restart: str | None = None
    spares: int | None = None


def checkpoint_bytes(prediction: Prediction) -> float:
    """Bytes of a checkpoint: weights, fp32 masters and optimizer states of all parameters, each shard once."""
    formats = precision(prediction.plan.dtype)
    each = formats.parameter + optimizer(prediction.run.optimizer).state_bytes(formats)
    return float(prediction.graph.parameters * each)


def goodput_of(prediction: Prediction, work: float, options: LongRunOptions) -> Goodput:
    """The goodput of ``work`` seconds of a predicted step.

    Raises SpecError for what cannot be read, CapacityError where a checkpoint does not fit or the run never finishes.
    """
    total = checkpoint_bytes(prediction)
    check_storage(total, None if options.capacity is None else parse(options.capacity, "bytes"))
    plan, system = prediction.plan, prediction.system
    nodes = math.ceil(plan.gpus / max(system.devices_per_node, 1))
    reliability = Reliability() if options.failures is None else Reliability(node_rate=failure_rate(options.failures))
    rate = STORAGE_RATE if options.storage is None else parse(options.storage, "bandwidth")
    write = float(
        save_seconds(
            total_bytes=total,
            process_rate=WRITERS["megatron"].rate,
            processes=plan.gpus,
            nodes=nodes,
            storage_rate=rate,
        )
    )
    mode = checkpointing_named(options.checkpointing)
    save = write if mode == "sync" else PAUSE + total / plan.gpus / COPY_RATE
    replace = 0.0 if options.spares else reliability.replace
    load = total / rate
    restart = (
        reliability.restart(load) - reliability.replace + replace
        if options.restart is None
        else parse(options.restart, "time")
    )
    return long_run(
        work=work,
        mtbf=float(mean_time_between_failures(nodes=nodes, node_rate=reliability.node_rate)),
        checkpoint_bytes=total,
        save=save,
        restart=restart,
        interval=checkpoint_interval(options.checkpoint, prediction.step_time),
        lag=0.0 if mode == "sync" else write,
    )


def checkpointing_named(text: str | None) -> Checkpointing:
    """sync (the default), async or memory."""
    for mode in CHECKPOINTING:
        if mode == (text or "sync"):
            return mode
    raise SpecError(f"--checkpointing {text!r} is none of {', '.join(CHECKPOINTING)}")


def checkpoint_interval(text: str | None, step_time: float) -> float | None:
    """Seconds between checkpoints from ``30min`` or ``250steps``; None for ``auto``, the best one."""
    if text in (None, "auto"):
        return None
    steps = re.match(r"\s*(\d+)\s*steps?\s*\Z", str(text))
    return float(steps.group(1)) * step_time if steps else parse(text, "time")


def failing(prediction: Prediction, training: Training | None, options: LongRunOptions) -> Goodput:
    """The goodput of a training; SpecError where its length is not stated."""
    if training is None:
        raise SpecError("--goodput: how long the run is has to be stated: --tokens, --samples or --epochs")
    return goodput_of(prediction, training.time, options)
