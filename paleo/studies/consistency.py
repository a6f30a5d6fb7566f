"""What a consistency model makes of a predicted step: updates a second, staleness, what servers limit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paleo.consistency.base import Server, Workload, consistency
from paleo.errors import PlanError
from paleo.parallel.placement import BATCH_AXES
from paleo.step.waiting import Noise

if TYPE_CHECKING:
    from paleo.consistency.base import Consistency, Cycle
    from paleo.predict import Prediction
    from paleo.specs.run import Run
    from paleo.specs.software import Software
    from paleo.specs.system import System

#: Bytes of host memory that a server moves for each byte pushed: gradient, parameter read and written, reply.
SERVER_PASSES = 4.0


@dataclass(frozen=True, slots=True)
class ConsistencyStudy:
    """A run under its consistency model: ``cycle`` of one configuration, beside the synchronous one. ``exposed`` and
    the rest are in the cycle; ``workers``: data-parallel replicas."""

    prediction: Prediction
    model: Consistency
    workload: Workload
    cycle: Cycle
    synchronous: Cycle

    @property
    def workers(self) -> int:
        return self.prediction.plan.dp

    @property
    def step_time(self) -> float:
        """Seconds in which every worker makes a step: the whole global batch is seen once."""
        return float(self.cycle.step)

    @property
    def samples_per_s(self) -> float:
        """Samples that all workers see a second."""
        return self.prediction.plan.global_batch / self.step_time

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that all workers see a second; None for models that count none."""
        tokens = self.prediction.graph.tokens_per_sample
        return None if tokens is None else tokens * self.samples_per_s

    @property
    def served(self) -> bool:
        """Whether there is a parameter server, with a utilization and a knee."""
        return not math.isnan(float(self.cycle.knee))


def studied(prediction: Prediction) -> ConsistencyStudy | None:
    """The study of a run that names a consistency model, worked out once for a prediction; None for synchronous steps,
    which hold their waiting."""
    run = prediction.run
    if run.forward_only or run.consistency == "bsp":
        return None
    return prediction.steps.batch.shared.once("consistency", lambda: _study(prediction))


def _study(prediction: Prediction) -> ConsistencyStudy:
    run = prediction.run
    model, work = consistency(run.consistency), workload(prediction)
    return ConsistencyStudy(prediction, model, work, model.cycle(work), consistency("bsp").cycle(work))


def step_seconds(prediction: Prediction) -> float:
    """Seconds in which a run sees its global batch once, under the consistency model that it names."""
    study = studied(prediction)
    return prediction.step_time if study is None else study.step_time


def workload(prediction: Prediction) -> Workload:
    """A predicted step as the workload of like workers; PlanError where sharding ties workers together.

    Compute is the step less its sums of gradients; a worker is a data-parallel replica with all its ranks.
    """
    plan, run = prediction.plan, prediction.run
    if plan.parallel.zero == 3:
        raise PlanError(f"consistency {run.consistency}: with zero=3 no worker has all parameters; use zero=0, 1 or 2")
    after = prediction if run.exchange == "after" else _unhidden(prediction)
    batch = after.steps.batch
    seconds, _ = batch.layouts.exchange(batch.assignment, plan.parallel.zero, chunks=False)
    exchange = float(seconds.sum(axis=1).max()) if plan.dp > 1 else 0.0
    noise = Noise.of(run, batch.backend.software, plan.local_batch)
    compute = max(after.step_time - exchange, 0.0)
    elements = float(batch.layouts.elements(batch.assignment.kinds.stages, trained=True).max())
    payload = elements * batch.backend.formats.summed
    tensors = sum(section.tensors * section.repeat for section in prediction.program.sections) / plan.stages
    return Workload(
        workers=float(plan.dp),
        compute=compute,
        all_reduce=exchange,
        hidden=exchange - (prediction.step_time - compute),
        neighbour=_neighbour(after, payload),
        payload=payload,
        parameters=elements,
        tensors=float(tensors),
        jitter=float(noise.independent),
        persistent=noise.persistent,
        server=_server(prediction),
    )


def _unhidden(prediction: Prediction) -> Prediction:
    """The prediction of the run with gradients summed after the backward pass, without overlap."""
    return prediction.variant(exchange="after")


def _neighbour(prediction: Prediction, payload: float) -> float:
    """Seconds in which a worker sends its payload to the worker that is farthest away."""
    mesh = prediction.plan.mesh
    if prediction.plan.dp == 1:
        return 0.0
    stride, ranks = np.array([mesh.stride(BATCH_AXES)]), np.array([mesh.group_size(BATCH_AXES)])
    fabric = prediction.steps.batch.backend.fabric
    return float(fabric.times("send_recv", stride, ranks, np.array([payload]))[0])


def _server(prediction: Prediction) -> Server | None:
    """The parameter servers that a run has."""
    run = prediction.run
    if not has_servers(run.servers, run.consistency):
        return None
    return server_of(run, prediction.system, prediction.steps.batch.backend.software)


def has_servers(servers: int | None, model: str) -> bool:
    """Whether workers of a model have parameter servers: those that a run states; asynchronous ones always have one."""
    return servers is not None or model == "async"


def server_of(run: Run, system: System, software: Software) -> Server:
    """Parameter servers on nodes of the system: their port takes pushes and replies at the same time, their memory
    holds the update."""
    links = [level for level in system.levels if level.ranks is None] or list(system.levels)
    if not links:
        raise PlanError(f"consistency {run.consistency}: {system.name} is one device without links to a server")
    port = links[-1].link.bandwidth * max(1, links[-1].ports or 1)
    memory = system.host.memory_bandwidth if system.host is not None and system.host.memory_bandwidth else np.inf
    rate = 1.0 / (1.0 / port + SERVER_PASSES / memory)
    return Server(call=software.gradients.server_call, bandwidth=float(rate), count=run.servers or 1)
