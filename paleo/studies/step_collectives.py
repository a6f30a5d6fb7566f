"""Every collective of a step: what is sent, over which ranks, how often, how long one takes, and the price's source."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.pricing.communication import calibrated_families
from paleo.step.exchange import gathered_shares, gradient_shares
from paleo.step.section_times import collectives, transfer_seconds

if TYPE_CHECKING:
    from paleo.parallel.placement import Axes
    from paleo.predict import Prediction
    from paleo.pricing.communication import Fabric
    from paleo.pricing.links.group import GroupLinks
    from paleo.step.batch import Batch
    from paleo.step.layouts import Sent


@dataclass(frozen=True, slots=True)
class StepCollective:
    """Collectives of one kind and size on a device of the busiest stage: ``calls`` of them in a step, each of
    ``payload_bytes`` over the ranks of ``axes`` and of ``seconds`` if nothing else travels."""

    content: str
    operation: str
    axes: Axes
    ranks: int
    calls: int
    payload_bytes: float
    seconds: float
    price: str


def step_collectives(prediction: Prediction) -> list[StepCollective]:
    """The collectives of a step, those that take longest in all first."""
    sent = [*_of_layers(prediction), *_over_replicas(prediction), *_between_stages(prediction)]
    same: dict[tuple[str, str, Axes, float], StepCollective] = {}
    for collective in sent:
        key = collective.content, collective.operation, collective.axes, collective.payload_bytes
        calls = collective.calls + (same[key].calls if key in same else 0)
        same[key] = replace(collective, calls=calls)
    return sorted(same.values(), key=lambda each: -each.calls * each.seconds)


def _of_layers(prediction: Prediction) -> Iterator[StepCollective]:
    """The collectives that layers owe."""
    batch, program = prediction.steps.batch, prediction.program
    payloads = np.array([each.payload_bytes for _, each in collectives(program)]).reshape(-1, 1)
    [priced] = transfer_seconds(batch.backend.fabric, [(batch.layouts.meshes[0], program)], [payloads])
    layers = batch.assignment.computed[_busiest(prediction)]
    for (index, transfer), seconds in zip(collectives(program), priced[:, 0].tolist(), strict=True):
        passes = 2 if transfer.again and program.sections[index].recompute == "full" else 1
        calls = round(float(layers[index]) * transfer.times * passes * float(batch.microbatches[0]))
        if seconds > 0 and calls:
            yield _priced(batch, "layers", transfer.operation, (transfer.axis,), calls, transfer.payload_bytes, seconds)


def _over_replicas(prediction: Prediction) -> Iterator[StepCollective]:
    """Sums of gradients and gathers of parameters, in as many collectives of equal size as there are buckets or layers;
    in one for each pass over a stage of a pipeline."""
    batch, program, mesh = prediction.steps.batch, prediction.program, prediction.plan.mesh
    if not batch.training:
        return
    formats, kinds = batch.backend.formats, batch.assignment.kinds.stages
    holding = kinds.holdings[batch.assignment.stage_kind[_busiest(prediction)]]
    passes = math.ceil(float(batch.microbatches[0]))
    sums = passes if batch.scattered else 1
    sent: list[tuple[str, Sent, dict[Axes, npt.NDArray[np.float64]], float, int]] = [
        ("gradients", "gradients", gradient_shares(program, mesh, 1), formats.summed, sums)
    ]
    if batch.zero:
        content: Sent = "all" if batch.sharded else "trained"
        shares = gathered_shares(program, mesh, 1, frozen=batch.sharded)
        sent.append(("weights", content, shares, formats.parameter, 2 * passes if batch.sharded else 1))
    kinds_of = [event.task.kind for event in prediction.timeline.events] if batch.assignment.stages == 1 else []
    travelling = {"gradients": kinds_of.count("bucket"), "weights": kinds_of.count("gather") if batch.sharded else 0}
    for words, content, shares, width, calls in sent:
        for axes, elements in shares.items():
            payload = float(holding @ elements) * width
            for operation, over, part in batch.layouts.operations(0, content, batch.zero, axes, payload):
                if over and part > 0:
                    pieces = max(calls, travelling[words])
                    size, groups = part * calls / pieces, batch.layouts.groups([0], [over])
                    seconds = float(batch.layouts.exchanged(operation, [0], groups, np.array([size]))[0])
                    yield _priced(batch, words, operation, over, pieces, size, seconds)


def _between_stages(prediction: Prediction) -> Iterator[StepCollective]:
    """What a stage sends to the next one, forward and backward."""
    batch, mesh = prediction.steps.batch, prediction.plan.mesh
    if mesh.degree("pp") == 1:
        return
    section = batch.assignment.pieces[0][-1][0]
    split = 1.0 if batch.layouts.sequence_parallel[0] else float(mesh.degree("tp"))
    payload, seconds = float(batch.times.output_bytes[section][0]) / split, float(batch.cases.send(section)[0])
    calls = 2 * batch.assignment.chunks * math.ceil(float(batch.microbatches[0]))
    yield _priced(batch, "activations", "send_recv", ("pp",), calls, payload, seconds)


def _busiest(prediction: Prediction) -> int:
    return int(prediction.steps.busiest[0])


def _priced(
    batch: Batch, content: str, operation: str, axes: Axes, calls: int, payload: float, seconds: float
) -> StepCollective:
    mesh, fabric = batch.layouts.meshes[0], batch.backend.fabric
    links = fabric.links(mesh.stride(axes), mesh.ways(axes))
    price = price_source(fabric, operation.partition("@")[0], links)
    return StepCollective(content, operation, axes, mesh.ways(axes), calls, payload, seconds, price)


def price_source(fabric: Fabric, operation: str, links: GroupLinks) -> str:
    """Where the price of a collective is from: the calibration file that was measured or is inherited from, or the
    datasheets of the links."""
    if fabric.rates is not None:
        return fabric.rates.name
    inside, sources = len(links.fan_outs) - links.fabric_levels, []
    for family, entry in calibrated_families(fabric, operation, links).items():
        between = family == "collective.fabric"
        levels = fabric.system.levels[inside : len(links.fan_outs)] if between else fabric.system.levels[:inside]
        datasheet = f"datasheet ({', '.join(level.link.name for level in levels)})"
        source_names = {"measured": f"measured ({entry.subject}.yaml)", "inherited": f"inherited ({entry.subject})"}
        sources.append(source_names.get(entry.origin, datasheet))
    return ", ".join(dict.fromkeys(sources))
