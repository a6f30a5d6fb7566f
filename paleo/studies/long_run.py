"""Goodput of a predicted run: failures, size and place of checkpoints, from the options of a command."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paleo.errors import CapacityError, SpecError
from paleo.operations.base import optimizer
from paleo.operations.tensor import precision
from paleo.specs.reliability import nodes_of, reliability_of
from paleo.specs.system import Reliability
from paleo.studies.checkpoint import WRITERS
from paleo.studies.goodput import (
    CHECKPOINTING,
    ON_DEMAND_BOOT,
    SURVIVED,
    CheckpointSchedule,
    RestartPath,
    check_room,
    long_run,
    mean_time_between_failures,
    replacement_wait,
    save_seconds,
    spares_needed,
)
from paleo.units import DAY, GIGA, YEAR, Quantity

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.studies.goodput import (
        Checkpointing,
        Goodput,
    )

#: What shared storage takes in where nobody states it [byte/s]: a parallel file system of a large cluster.
STORAGE_RATE = 100.0 * GIGA
#: Bytes per second that a process copies into host memory, and seconds that the call takes.
COPY_RATE, PAUSE = 10.0 * GIGA, 0.2
#: How long a failed node is away where nobody states it: a technician a day.
REPAIR = DAY


def failure_rate(text: str) -> float:
    """Failures of a node and second from ``4/knodeday`` or ``0.004/nodeday``; SpecError without such a unit.

    >>> round(failure_rate("4/knodeday") * 86400 * 1000, 6)
    4.0
    """
    return _quantity("failures", text, "failures")


def _quantity(option: str, text: str, dimension: str, *, positive: bool = False) -> float:
    """The value of an option with its unit; SpecError names the option."""
    try:
        return Quantity(dimension, positive).parsed(text)
    except SpecError as error:
        raise SpecError(f"--{option} {error}") from None


@dataclass(frozen=True, slots=True)
class LongRunOptions:
    """Options of a long run as text, each None where it is not given."""

    failures: str | None = None
    checkpoint: str | None = None
    checkpointing: str | None = None
    storage: str | None = None
    storage_size: str | None = None
    restart: str | None = None
    spares: int | None = None
    repair: str | None = None
    elastic: bool = False


def stated_long_run(*, goodput: bool = False, **options: Any) -> LongRunOptions | None:
    """The options as they are stated; None where neither they nor ``goodput`` ask for failures."""
    stated = LongRunOptions(**options)
    return stated if goodput or stated != LongRunOptions() else None


def checkpoint_bytes(prediction: Prediction) -> float:
    """Bytes of a checkpoint: weights, fp32 masters and optimizer states of all parameters, each shard once."""
    formats = precision(prediction.plan.dtype)
    bytes_of_parameter = formats.parameter + optimizer(prediction.run.optimizer).state_bytes(formats)
    return float(prediction.graph.parameters * bytes_of_parameter)


def goodput_of(prediction: Prediction, work: float, options: LongRunOptions) -> Goodput:
    """The goodput of ``work`` seconds of a predicted step.

    Raises SpecError for what cannot be read, CapacityError where a checkpoint does not fit or the run never finishes.
    """
    nodes = nodes_of(prediction.system, prediction.plan.gpus)
    rates = _reliability(prediction, options)
    repair = REPAIR if options.repair is None else _quantity("repair", options.repair, "time")
    return long_run(
        work=work,
        mtbf=float(mean_time_between_failures(nodes=nodes, node_rate=rates.failures)),
        checkpoint_bytes=checkpoint_bytes(prediction),
        checkpoints=checkpoints_of(prediction, options, in_repair=nodes * rates.failures * repair, repair=repair),
        interval=checkpoint_interval(options.checkpoint, prediction.step_time),
        rate_range=(rates.low / rates.failures, rates.high / rates.failures) if rates.failures else (1.0, 1.0),
        source=rates.source,
        spares=spares_needed(nodes=nodes, node_rate=rates.failures, repair=repair),
    )


def goodput_share(prediction: Prediction, options: LongRunOptions) -> float:
    """The goodput of a run however long; 0 where it never finishes or its checkpoints have no room."""
    try:
        return goodput_of(prediction, YEAR, options).share
    except CapacityError:
        return 0.0


def _reliability(prediction: Prediction, options: LongRunOptions) -> Reliability:
    if options.failures is None:
        return reliability_of(prediction.system)
    rate = failure_rate(options.failures)
    return Reliability.model_construct(failures=rate, low=rate, high=rate, source="as stated")


def checkpoints_of(
    prediction: Prediction, options: LongRunOptions, *, in_repair: float, repair: float
) -> CheckpointSchedule:  # fmt: skip
    """How the run saves and comes back; ``in_repair`` nodes are away on average, each for ``repair`` seconds."""
    total, plan = checkpoint_bytes(prediction), prediction.plan
    nodes = nodes_of(prediction.system, plan.gpus)
    rate = (
        STORAGE_RATE if options.storage is None else _quantity("storage", options.storage, "bandwidth", positive=True)
    )
    size = (
        None
        if options.storage_size is None
        else _quantity("storage-size", options.storage_size, "bytes", positive=True)
    )
    check_room("storage", total, size)
    mode, writer = checkpointing_named(options.checkpointing), WRITERS["megatron"].rate
    write = float(
        save_seconds(total_bytes=total, process_rate=writer, processes=plan.gpus, nodes=nodes, storage_rate=rate)
    )
    copy = total / plan.gpus / COPY_RATE
    path = RestartPath()
    replace = _replacement(prediction, options, in_repair, repair)
    restart = path.restart(total / rate, replace)
    if options.restart is not None:
        restart = _quantity("restart", options.restart, "time")
    if options.elastic:
        _check_replicas(prediction)
        standing = path.detect + path.warm_up if options.restart is None else restart
        absence = replace + path.launch + copy
        return CheckpointSchedule(
            write if mode == "sync" else PAUSE + copy, standing, 0.0, replicas=plan.dp, repair=absence
        )
    if mode == "sync":
        return CheckpointSchedule(write, restart)
    if mode == "async":
        return CheckpointSchedule(PAUSE + copy, restart, write)
    _check_host_memory(prediction, total / nodes)
    memory_restart = min(path.restart(copy, 0.0), restart)
    return CheckpointSchedule(PAUSE + copy, restart, write, survived=SURVIVED, restart_memory=memory_restart)


def _replacement(prediction: Prediction, options: LongRunOptions, in_repair: float, repair: float) -> float:
    """Seconds until a node stands in: a spare one, a machine of the cloud that boots, or the first that is repaired."""
    swap = RestartPath().replace
    if options.spares is not None:
        return replacement_wait(mean_in_repair=in_repair, spares=options.spares, repair=repair, swap=swap)
    return ON_DEMAND_BOOT.seconds if prediction.system.price_per_node is not None else swap


def _check_replicas(prediction: Prediction) -> None:
    """SpecError where a data-parallel replica cannot be lost."""
    plan = prediction.plan
    if plan.dp < 2 or plan.parallel.zero:
        raise SpecError(
            f"--elastic: {plan.strategy or 'one GPU'} has no replica that others can do without; expected dp of 2 or "
            "more whose states are not sharded (zero=0)"
        )


def _check_host_memory(prediction: Prediction, needed: float) -> None:
    """CapacityError where the copy in memory is larger than what a node has beside the run."""
    host = prediction.system.host
    if host is not None and host.memory is not None:
        check_room("host memory of a node", needed, host.memory)


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
    steps = re.match(r"\s*(\d{1,15})\s*steps?\s*\Z", str(text))
    if steps:
        return float(steps.group(1)) * step_time
    try:
        return Quantity("time").parsed(text)
    except SpecError:
        raise SpecError(
            f"--checkpoint {text!r:.60}: expected auto, a time as 30min or whole steps as 250steps"
        ) from None
