"""Results as documents: dictionaries for JSON, whose keys are a contract."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.step.memory import Footprint
    from paleo.step.waiting import InputPipeline
    from paleo.studies.advice import Advice
    from paleo.studies.collective import CollectiveStudy
    from paleo.studies.comparison import Candidate, Comparison
    from paleo.studies.consistency import ConsistencyStudy
    from paleo.studies.goodput import Goodput
    from paleo.studies.scaling import ScaleCurve, ScalePoint
    from paleo.studies.summary import Summary
    from paleo.studies.training import Training

Document = dict[str, Any]


#: Version of all documents: it rises when a key changes its meaning or goes away.
SCHEMA_VERSION = 1


def with_schema(command: str, document: Mapping[str, Any]) -> Document:
    """A document that names its schema (``paleo schema COMMAND``).

    >>> with_schema("scale", {"points": []})
    {'schema': 'paleo.scale/1', 'points': []}
    """
    return {"schema": f"paleo.{command}/{SCHEMA_VERSION}", **document}


def dumped(document: Mapping[str, Any]) -> str:
    """JSON text of a document; a number that is not finite becomes null."""
    return json.dumps(_finite(document), indent=2, allow_nan=False, ensure_ascii=False)


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def estimate(prediction: Prediction, training: Training | None = None, advice: Sequence[Advice] = ()) -> Document:
    """One configuration; seconds, bytes, FLOP."""
    plan = prediction.plan
    return {
        "model": prediction.model.name,
        "system": prediction.system.name,
        "gpus": plan.gpus,
        "strategy": plan.strategy,
        "dtype": plan.dtype,
        "global_batch_size": plan.global_batch,
        "local_batch_size": plan.local_batch,
        "microbatch": plan.microbatch,
        "num_microbatches": plan.microbatches,
        "idle_gpus": plan.idle,
        "lora": prediction.run.lora,
        "qlora": prediction.run.qlora,
        "freeze": list(prediction.run.freeze),
        "step_time_s": prediction.step_time,
        "step_time_interval_s": list(prediction.interval),
        "samples_per_s": prediction.samples_per_s,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "flops_per_step": prediction.flops,
        "breakdown_s": asdict(prediction.breakdown),
        "memory_bytes": _memory(prediction.memory),
        "fits": prediction.memory.fits,
        "calibration": prediction.calibration,
        "reserved_memory_bytes": prediction.memory.reserved,
        "allocated_memory_bytes": prediction.memory.allocated,
        "cached_memory_bytes": prediction.memory.cached,
        "used_memory_bytes": prediction.memory.used,
        "host_memory_bytes": prediction.host_memory,
        "input_s": None if prediction.input_pipeline is None else _input(prediction.input_pipeline),
        "advice": [_advice(change) for change in advice],
        "training": None if training is None else _training(training),
        **({} if training is None or training.goodput is None else {"goodput": goodput(training.goodput)}),
        "unmodelled": list(prediction.unmodelled),
        "warnings": list(prediction.warnings),
    }


def _input(pipeline: InputPipeline) -> Document:
    parts = {name: float(seconds) for name, seconds in asdict(pipeline).items()}
    return {**parts, "total": float(pipeline.total), "slowest": pipeline.slowest}


def _advice(advice: Advice) -> Document:
    prediction = advice.prediction
    return {
        "change": advice.change,
        "step_time_s": prediction.step_time,
        "memory_bytes": prediction.memory.total,
        "fits": advice.fits,
    }


def _memory(memory: Footprint) -> Document:
    return {**memory.parts, "total": memory.total, "capacity": memory.capacity}


def goodput(run: Goodput) -> Document:
    """A long run with failures; seconds, bytes."""
    return {
        "goodput": run.share,
        "goodput_range": list(run.share_range),
        "interval_s": run.interval,
        "checkpoint_bytes": run.checkpoint_bytes,
        "checkpoint_s": run.save,
        "restart_s": run.restart,
        "mtbf_s": run.mtbf,
        "failures": run.failures,
        "failures_source": run.source,
        "spares": run.spares,
        "work_s": run.work,
        "finish_s": run.finish,
        "finish_s_interval": list(run.finish_interval),
        "lost": run.lost,
    }


def _training(training: Training) -> Document:
    price = training.price
    return {
        "amount": training.amount.words,
        "samples": training.samples,
        "steps": training.steps,
        "time_s": training.time,
        "time_interval_s": list(training.interval),
        "cost_usd": training.cost,
        "price_usd_per_hour": training.price_per_hour,
        "price_date": None if price is None else price.date,
        "price_source": None if price is None else price.source,
        "rent_usd": training.rent,
        "electricity_usd": training.electricity,
        "energy_j": training.energy,
        "energy_j_at_tdp": training.energy_limit,
        "pue": training.tariff.pue,
        "host_watts_per_gpu": training.tariff.host_power,
    }


def summary(study: Summary) -> Document:
    """A network layer by layer; the figures of a layer are of one of its ``repeat`` iterations, the totals of all."""
    layers = [
        {
            "name": layer.name,
            "type": layer.type,
            "output_shape": list(layer.output_shape),
            "output_dims": list(layer.dims),
            "parameters": layer.parameters,
            "flops_forward": layer.flops_forward,
            "flops_backward": layer.flops_backward,
            "bytes_forward": layer.bytes_forward,
            "bytes_backward": layer.bytes_backward,
            "saved_bytes": layer.saved_bytes,
            "repeat": layer.repeat,
        }
        for layer in study.layers
    ]
    return {
        "model": study.graph.name,
        "batch": study.graph.batch,
        "dtype": study.dtype,
        "parameters": study.graph.parameters,
        "flops_forward": study.total("flops_forward"),
        "flops_backward": study.total("flops_backward"),
        "saved_activation_bytes": study.total("saved_bytes"),
        "layers": layers,
    }


def scale(model: str, system: str, curves: Sequence[ScaleCurve]) -> Document:
    """Scaling curves one after another in ``points``; each point says which curve (``scaling``) it belongs to."""
    from paleo.studies.scaling import curve_warnings, placement_advice, spending, verdict

    return {
        "model": model,
        "system": system,
        "curves": [
            {
                "scaling": curve.scaling,
                "consistency": curve.consistency,
                "nodes": curve.nodes,
                "global_batch_size" if curve.scaling == "strong" else "local_batch_size": curve.fixed_batch,
                "base_gpus": curve.base.gpus,
                **asdict(verdict(curve)),
                **_turnover(curve),
                "spending": spending(curve),
            }
            for curve in curves
        ],
        "points": [_point(curve, point) for curve in curves for point in curve.points if point.usable],
        "unusable": [
            {**_of_curve(curve, None), "gpus": point.gpus, "reason": point.problem}
            for curve in curves
            for point in curve.points
            if not point.usable
        ],
        "placement_advice": list(placement_advice(curves)),
        "warnings": curve_warnings(curves),
    }


def _of_curve(curve: ScaleCurve, study: ConsistencyStudy | None) -> Document:
    """Keys that identify a curve among those of one document; ``consistency`` is a mapping in every point, with the
    figures of its study if it has one."""
    cycle = {} if study is None else _cycle(study)
    return {"scaling": curve.scaling, "consistency": {"model": curve.consistency, **cycle}, "nodes": curve.nodes}


def _turnover(curve: ScaleCurve) -> Document:
    """Where a run with failures turns over (null: not at these counts); nothing where they are not counted."""
    if all(point.goodput is None for point in curve.points):
        return {}
    return {"turnover_gpus": None if curve.turnover is None else curve.turnover.gpus}


def _point(curve: ScaleCurve, point: ScalePoint) -> Document:
    prediction = point.predicted
    return {
        **_of_curve(curve, point.consistency),
        "gpus": point.gpus,
        "global_batch_size": prediction.plan.global_batch,
        "local_batch_size": prediction.plan.local_batch,
        "step_time_s": point.step_time,
        "step_time_interval_s": [end * point.step_time / prediction.step_time for end in prediction.interval],
        "samples_per_s": point.samples_per_s,
        "speedup": curve.speedup(point),
        "efficiency": curve.efficiency(point),
        **({} if point.goodput is None else {"goodput": point.goodput}),
        "breakdown_s": asdict(prediction.breakdown),
        "memory_total_bytes": prediction.memory.total,
        "fits": prediction.memory.fits,
        "idle_gpus": prediction.plan.idle,
        "training": None if point.training is None else _training(point.training),
    }


def consistency(study: ConsistencyStudy) -> Document:
    """Figures of one configuration; those of a server are null without one."""
    return {
        "model": study.prediction.run.consistency,
        "summary": study.model.summary,
        "reference": study.model.reference,
        "exact": study.model.exact,
        "workers": study.workers,
        "step_time_s": study.step_time,
        "synchronous_step_time_s": float(study.synchronous.step),
        "samples_per_s": study.samples_per_s,
        **_cycle(study),
    }


def _cycle(study: ConsistencyStudy) -> Document:
    """The figures that a consistency model adds to a step; those of a server are null without a server."""
    cycle = study.cycle
    return {
        "updates_per_s": float(cycle.updates_per_s),
        "exposed_s": float(cycle.exposed),
        "bytes_per_s": float(cycle.bytes_per_s),
        "staleness": {"mean": float(cycle.staleness_mean), "sd": float(cycle.staleness_sd)},
        "server_utilization": float(cycle.utilization) if study.served else None,
        "knee": float(cycle.knee) if study.served else None,
        "extra_memory_bytes": float(cycle.extra_memory),
    }


def compare(comparison: Comparison) -> Document:
    """Systems side by side; ``best`` names the fastest, the cheapest and the most frugal that fits, ``not_certain`` for
    each of them the systems whose 90 % intervals overlap its own."""
    best = {objective: comparison.best(objective) for objective in ("time", "cost", "energy")}
    models = [
        candidate.prediction.model.name for candidate in comparison.candidates if candidate.prediction is not None
    ]
    return {
        "model": models[0],
        "amount": comparison.amount.words,
        "samples": comparison.amount.samples,
        "best": {
            objective: None if candidate is None else candidate.system.name for objective, candidate in best.items()
        },
        "not_certain": {
            objective: [rival.system.name for rival in comparison.rivals(objective)]
            for objective in ("time", "cost", "energy")
        },
        "systems": [_candidate(comparison, candidate) for candidate in comparison.candidates],
    }


def _candidate(comparison: Comparison, candidate: Candidate) -> Document:
    if candidate.prediction is None or candidate.training is None:
        return {"system": candidate.system.name, "error": candidate.problem}
    training = _training(candidate.training)
    cycle = {} if candidate.consistency is None else {"consistency": consistency(candidate.consistency)}
    return {
        **estimate(candidate.prediction, candidate.training),
        **cycle,
        "training": training,
        "device": candidate.system.device.name,
        "speedup": comparison.speedup(candidate),
        "error": None,
    }


def collective(study: CollectiveStudy) -> Document:
    """Every algorithm for one operation, fastest first."""
    levels = [
        {
            "name": span.level.name,
            "fan_out": span.fan_out,
            "alpha_s": span.level.link.latency,
            "beta_s_per_byte": 1.0 / span.bandwidth,
        }
        for span in study.spans
    ]
    return {
        "operation": study.operation,
        "system": study.system.name,
        "ranks": study.ranks,
        "payload_bytes": study.payload_bytes,
        "levels": levels,
        "best": study.best.algorithm,
        "time_s": study.best.time,
        "lower_bound_s": study.lower_bound,
        "calibration": study.calibration,
        "algorithms": [
            {
                "algorithm": row.algorithm,
                "steps": row.steps,
                "time_s": row.time,
                "algorithm_bandwidth": row.algorithm_bandwidth,
                "bus_bandwidth": row.bus_bandwidth,
                "times_lower_bound": row.times_lower_bound,
                "automatic": row.automatic,
            }
            for row in study.rows
        ],
        "crossovers": [asdict(crossover) for crossover in study.crossovers],
    }
